"""Receives at a broker of RocketMQ 5, by POP.

A POP is never held at the broker: messages that it handed to a client that no longer waits would be invisible. A
consumer that waits sends a NOTIFICATION, which the broker holds until a POP can find messages, and which takes none::

    POP ──> nothing ──> NOTIFICATION, held        its answer ──> notify ──> POP ──> messages

A broker without that request, and one that answers it at once again and again, is asked again after half a second.

A broker does not do all that its gRPC proxy does for consumers. The proxy makes dead letters of messages that were
received too often, acknowledges those whose tags only have a wanted hash, and refuses receipts whose time is over. Here
the client does so. Mirrors ``ConsumerProcessor``, ``PopMessageResultFilterImpl`` and ``ReceiptHandle`` of 5.3.3.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from librmq.clock import Clock
from librmq.errors import ReceiptError, RmqError
from librmq.filter import TAG, TagFilter
from librmq.message.ids import Receipt
from librmq.protocol import (
    Acknowledge,
    CancelMessage,
    CancelReceive,
    CancelResult,
    ChangeInvisible,
    ForwardToDeadLetters,
    Receive,
    Received,
    ReceiveResponse,
    ResponseCode,
    SendBack,
    Subscription,
)
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.wire.remote._consumer_requests import ANSWER_WITHIN_MS, SUSPEND_MS
from librmq.wire.remoting._frames import Frame, version_name
from librmq.wire.remoting._pop import (
    ack_frame,
    change_frame,
    pop_frame,
    read_acked,
    read_changed,
    read_popped,
    read_recalled,
    recall_frame,
    unsupported,
)
from librmq.wire.remoting._request_codec import FORMS

_AGAIN_MS: Final = 500
_MOST_QUICK_ANSWERS: Final = 3
_Wait = tuple[str, ...]
"""Group, topic and filter."""
_TO_DEAD_LETTERS: Final = -1
_log = EventLog("librmq.wire")


@dataclass(slots=True, eq=False)
class _Notification:
    """A request that a broker holds, and the waits that its answer ends."""

    sent_ms: int
    quick: int
    """The ones before it that were answered at once, one after the other."""
    waiting: list[Callable[[], None]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Batch:
    """A record that is several messages, which the broker delivers and acknowledges together."""

    receipt: Receipt
    """Names the record to the broker."""
    open: set[str]
    """The receipts of the messages that were not acknowledged."""


@dataclass(eq=False, repr=False)
class PopReceives:
    """The receives at one broker. Thread-safe."""

    broker_name: str
    clock: Clock
    """The time, which can jump; only its steady part tells how long ago a message was received."""
    ask: Callable[[Frame], Frame]
    """Returns the answer to a frame."""
    send: Callable[[Frame, Callable[[Frame | RmqError], None]], None]
    """Sends a frame whose answer may come late; the function gets it."""
    later: Callable[[Callable[[], None]], None]
    """Runs a function under the runner's lock, soon."""
    run_at: Callable[[Callable[[], None], int], None]
    """Runs a function at a time; called under the runner's lock."""
    is_ordered: Callable[[str], bool]
    """Returns whether a group receives in order."""
    retries_of: Callable[[str], int | None]
    """Returns how often a message comes again to a group; None if that is unknown."""

    def __post_init__(self) -> None:
        self._now_ms = self.clock.now_ms
        self._ahead_ms: float | None = None  # how far the broker's clock was ahead of this one's steady time
        self._batches: dict[str, _Batch] = {}  # by receipt of each message in them
        self._lock = Lock()
        self._held: dict[_Wait, _Notification] = {}
        self._quick: dict[_Wait, int] = {}

    def _ask(self, kind: str, frame: Frame) -> Frame:
        """Return an answer; raise the error that names the version of a broker without POP."""
        answer = self.ask(frame)
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            raise unsupported(kind, self.broker_name, version_name(answer.version))
        return answer

    def receive(self, request: Receive) -> ReceiveResponse:
        """Return messages; without one, let a client that waits ask again when the broker has some.

        Raises:
            BrokerError: The broker refuses the receive, or has no POP.
            BrokerUnreachableError: It can't be reached.
            MalformedError: Its answer can't be read.
        """
        if request.acknowledged:
            self.acknowledge(Acknowledge(request.group, request.topic, request.acknowledged))
        is_ordered = self.is_ordered(request.group)
        frame = pop_frame(request, self._now_ms(), is_ordered=is_ordered)
        answer = self._ask("POP (receives with an invisible time)", frame)
        response = read_popped(request, self.broker_name, answer)
        if response.messages:
            self._note_time(Receipt.parse(response.messages[-1].receipt))
            self._note_batches(response)
            response = ReceiveResponse([part for part in response.messages if self._is_wanted(request, part)])
        notify, subscription = request.notify, request.subscription or Subscription(request.topic)
        key = request.group, request.topic, subscription.expression_type, subscription.expression
        now_ms = self._now_ms()
        with self._lock:
            if response.messages or notify is None:
                self._quick.pop(key, None)
                return response
            former = self._held.get(key)
            if former is not None and 0 <= now_ms - former.sent_ms < ANSWER_WITHIN_MS:
                held = former
            else:
                held = self._held[key] = _Notification(now_ms, self._quick.get(key, 0))
                if former is not None:
                    held.waiting, former.waiting = former.waiting, []
            held.waiting.append(notify)
        if held is not former:
            question = pop_frame(request, now_ms, is_ordered=is_ordered, poll_ms=SUSPEND_MS)
            try:
                self.send(question, partial(self._answered, key, held))
            except BaseException:
                for other in self._end(key, held):
                    if other is not notify:  # it joined meanwhile: let it ask again, and meet the error itself
                        self.later(other)
                raise
        return ReceiveResponse(is_held=True)

    def _answered(self, key: _Wait, held: _Notification, outcome: Frame | RmqError) -> None:
        """Let the waits that a notification ends ask again."""
        now_ms = self._now_ms()
        is_quick = now_ms - held.sent_ms < _AGAIN_MS
        with self._lock:
            self._quick[key] = held.quick + 1 if is_quick else 0
        is_known = isinstance(outcome, RmqError) or outcome.code == 0
        paused = not is_known or (is_quick and held.quick >= _MOST_QUICK_ANSWERS)
        wake = partial(self._wake, key, held)
        # The thread that reads the connection must not wait for the lock of a step that waits for an answer.
        self.later(partial(self.run_at, wake, now_ms + _AGAIN_MS) if paused else wake)

    def _wake(self, key: _Wait, held: _Notification) -> None:
        for notify in self._end(key, held):
            notify()

    def _end(self, key: _Wait, held: _Notification) -> list[Callable[[], None]]:
        with self._lock:
            if self._held.get(key) is held:
                del self._held[key]
            waiting, held.waiting = held.waiting, []
        return waiting

    def cancel(self, request: CancelReceive) -> None:
        """Let a client wait no longer."""
        with self._lock:
            for held in self._held.values():
                held.waiting = [notify for notify in held.waiting if notify is not request.notify]

    # ---- what a gRPC proxy does

    def _is_wanted(self, request: Receive, part: Received) -> bool:
        """Return whether a message is for the consumer; acknowledge others, and make dead letters of overdue ones."""
        subscription = request.subscription or Subscription(request.topic)
        try:
            is_by_tags = subscription.expression_type == TAG
            if is_by_tags and not TagFilter(subscription.expression).matches(part.message.tags):
                self.acknowledge(Acknowledge(request.group, request.topic, (part.receipt,)))
                return False
            max_attempts = self._max_attempts(request) if part.attempt > 1 else None
            if max_attempts is not None and part.attempt > max(max_attempts, 1):
                cause = f"not acknowledged in {part.attempt - 1} attempts"
                self.forward(ForwardToDeadLetters(request.group, request.topic, part.receipt, cause))
                return False
        except RmqError as error:  # as the proxy: it is better delivered once more than lost
            _log.warning(
                "%(broker)s: group %(group)s gets message %(message)s once more, because it can't be taken out of its "
                "queue: %(error)s",
                broker=self.broker_name,
                group=request.group,
                message=part.message.message_id,
                error=error,
            )
        return True

    def _max_attempts(self, request: Receive) -> int | None:
        if request.max_attempts is not None:
            return request.max_attempts
        retries = self.retries_of(request.group)
        return None if retries is None else retries + 1

    def _note_time(self, receipt: Receipt) -> None:
        self._ahead_ms = receipt.received_ms - 1000 * self.clock.monotonic()

    def _is_over(self, receipt: Receipt) -> bool:
        """Return whether the message can have been delivered again, by the broker's clock."""
        ahead_ms = self._ahead_ms
        broker_ms = self._now_ms() if ahead_ms is None else 1000 * self.clock.monotonic() + ahead_ms
        return receipt.received_ms + receipt.invisible_ms <= broker_ms

    def _in_flight(self, group: str, topic: str, text: str) -> Receipt:
        """Return the receipt for the broker."""
        receipt = self._receipt(text)
        if self._is_over(receipt):
            raise ReceiptError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"group {group!r}, {topic!r}/{receipt.queue_id}: the message at queue offset {receipt.queue_offset} is "
                "no longer in flight under this receipt: its time is over, so it is delivered again",
            )
        return receipt

    # ---- messages that the broker delivers together

    def _note_batches(self, response: ReceiveResponse) -> None:
        batches: dict[str, _Batch] = {}
        for _, together in itertools.groupby(response.messages, key=lambda part: part.message.physical_offset):
            receipts = [part.receipt for part in together]
            if len(receipts) > 1:
                batches |= dict.fromkeys(receipts, _Batch(Receipt.parse(receipts[0]), set(receipts)))
        with self._lock:
            if batches:
                self._batches = {
                    text: batch for text, batch in self._batches.items() if not self._is_over(batch.receipt)
                } | batches

    def _receipt(self, text: str) -> Receipt:
        with self._lock:
            batch = self._batches.get(text)
        return Receipt.parse(text) if batch is None else batch.receipt

    def _completes_batch(self, text: str) -> bool:
        """Return whether a message is alone in its record, or the last one that was not acknowledged."""
        with self._lock:
            batch = self._batches.get(text)
            if batch is not None:
                batch.open.discard(text)
        return batch is None or not batch.open

    # ---- outcomes of a message

    def acknowledge(self, request: Acknowledge) -> tuple[bool, ...]:
        """Acknowledge messages, one by one; return for each whether its receipt was valid."""
        return tuple(self._acknowledge(request.group, request.topic, text) for text in request.receipts)

    def _acknowledge(self, group: str, topic: str, text: str) -> bool:
        receipt = self._receipt(text)
        if self._is_over(receipt):
            return False
        if not self._completes_batch(text):
            return True
        return read_acked(self._ask("ACK_MESSAGE", ack_frame(group, topic, receipt)))

    def change(self, request: ChangeInvisible) -> str:
        """Change when a message is visible again, and return its new receipt; the old one is no longer valid.

        Messages of a batch become visible together.
        """
        receipt = self._in_flight(request.group, request.topic, request.receipt)
        answer = self._ask("CHANGE_MESSAGE_INVISIBLETIME", change_frame(request, receipt))
        changed = Receipt.parse(read_changed(receipt, answer))
        if changed.received_ms != receipt.received_ms:  # in order they are the same
            self._note_time(changed)
        with self._lock:
            batch = self._batches.pop(request.receipt, None)
            if batch is None:
                return str(changed)
            batch.receipt = changed
            text = str(changed._replace(queue_offset=Receipt.parse(request.receipt).queue_offset))
            if request.receipt in batch.open:
                batch.open.remove(request.receipt)
                batch.open.add(text)
            self._batches[text] = batch
        return text

    def forward(self, request: ForwardToDeadLetters) -> None:
        """Make a message a dead letter: it is sent back, then acknowledged. The messages of a batch go together."""
        receipt = self._in_flight(request.group, request.topic, request.receipt)
        with self._lock:
            batch = self._batches.get(request.receipt)
            if batch is not None and not batch.open:
                return  # another message of it has taken all
        back = SendBack(
            request.group, receipt.physical_offset, _TO_DEAD_LETTERS, origin_topic=request.topic, cause=request.cause
        )
        form = FORMS[SendBack]
        form.read(back, self._ask("CONSUMER_SEND_MSG_BACK", form.write(back)))
        if batch is not None:
            with self._lock:
                batch.open.clear()
        self.acknowledge(Acknowledge(request.group, request.topic, (request.receipt,)))

    def recall(self, request: CancelMessage) -> CancelResult:
        """Cancel a message with a delivery time, by the handle that its send returned."""
        assert request.recall_handle is not None
        frame = recall_frame(request.topic or "", request.recall_handle)
        return read_recalled(self._ask("RECALL_MESSAGE", frame))
