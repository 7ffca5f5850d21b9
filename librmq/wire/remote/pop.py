"""Receives with an invisible time at a broker of RocketMQ 5, by its POP requests.

A POP is never held at the broker: messages that it handed to a client that no longer waits would be invisible. A
consumer that waits sends a NOTIFICATION, which the broker holds until a POP can find messages, and which takes none::

    POP ──> nothing ──> NOTIFICATION, held        its answer ──> notify ──> POP ──> messages

A broker without that request, and one that answers it at once again and again, is asked again after half a second.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from librmq.broker.handlers.in_flight import Receipt
from librmq.errors import RmqError
from librmq.protocol import (
    Acknowledge,
    CancelMessage,
    CancelReceive,
    CancelResult,
    ChangeInvisible,
    ForwardToDeadLetters,
    Receive,
    ReceiveResponse,
    ResponseCode,
    SendBack,
    Subscription,
)
from librmq.runtime.locks import Lock
from librmq.wire.remoting.codec import FORMS
from librmq.wire.remoting.frames import Frame, version_name
from librmq.wire.remoting.pop import (
    ack_frame,
    change_frame,
    notification_frame,
    pop_frame,
    read_acked,
    read_changed,
    read_popped,
    read_recalled,
    recall_frame,
    unsupported,
)

_AGAIN_MS: Final = 500
_POLL_MS: Final = 15_000
_ANSWER_WITHIN_MS: Final = 30_000
"""After this time a notification is asked for again; its answer is lost."""
_MOST_QUICK: Final = 3
_Key = tuple[str, ...]
"""Group, topic and filter."""


class _Notification:
    """A request that a broker holds, and the waits that its answer ends."""

    def __init__(self, sent_ms: int, quick: int) -> None:
        self.sent_ms = sent_ms
        self.quick = quick
        """The ones before it that were answered at once, one after the other."""
        self.waiting: list[Callable[[], None]] = []


_TO_DEAD_LETTERS: Final = -1


class PopReceives:
    """The receives at one broker. Thread-safe."""

    def __init__(
        self,
        broker_name: str,
        now_ms: Callable[[], int],
        ask: Callable[[Frame], Frame],
        send: Callable[[Frame, Callable[[Frame | RmqError], None]], None],
        later: Callable[[Callable[[], None]], None],
        run_at: Callable[[Callable[[], None], int], None],
        is_ordered: Callable[[str], bool],
    ) -> None:
        """Receive from one broker.

        Args:
            broker_name: Names it in errors.
            now_ms: The time.
            ask: Returns the answer to a frame.
            send: Sends a frame whose answer may come late; the function gets it.
            later: Runs a function under the runner's lock, soon.
            run_at: Runs a function at a time; called under the runner's lock.
            is_ordered: Returns whether a group receives in order.
        """
        self._broker_name = broker_name
        self._now_ms = now_ms
        self._request = ask
        self._send = send
        self._later = later
        self._run_at = run_at
        self._is_ordered = is_ordered
        self._lock = Lock()
        self._held: dict[_Key, _Notification] = {}
        self._quick: dict[_Key, int] = {}

    def _ask(self, kind: str, frame: Frame) -> Frame:
        """Return an answer; raise the error that names the version of a broker without POP."""
        answer = self._request(frame)
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            raise unsupported(kind, self._broker_name, version_name(answer.version))
        return answer

    def receive(self, request: Receive) -> ReceiveResponse:
        """Return messages; without one, let a client that waits ask again when the broker has some.

        Raises:
            BrokerError: The broker refuses the receive, or has no POP.
            BrokerUnreachableError: It can't be reached.
            MalformedError: Its answer can't be read.
        """
        is_ordered = self._is_ordered(request.group)
        frame = pop_frame(request, self._now_ms(), is_ordered=is_ordered)
        answer = self._ask("POP (receives with an invisible time)", frame)
        response = read_popped(request, self._broker_name, answer)
        notify, subscription = request.notify, request.subscription or Subscription(request.topic)
        key = request.group, request.topic, subscription.expression_type, subscription.expression
        now_ms = self._now_ms()
        with self._lock:
            if response.messages or notify is None:
                self._quick.pop(key, None)
                return response
            former = self._held.get(key)
            if former is not None and 0 <= now_ms - former.sent_ms < _ANSWER_WITHIN_MS:
                held = former
            else:
                held = self._held[key] = _Notification(now_ms, self._quick.get(key, 0))
                if former is not None:
                    held.waiting, former.waiting = former.waiting, []
            held.waiting.append(notify)
        if held is not former:
            asked = notification_frame(request, now_ms, _POLL_MS, is_ordered=is_ordered)
            try:
                self._send(asked, partial(self._answered, key, held))
            except BaseException:
                for other in self._end(key, held):
                    if other is not notify:  # it joined meanwhile: let it ask again, and meet the error itself
                        self._later(other)
                raise
        return ReceiveResponse(is_held=True)

    def _answered(self, key: _Key, held: _Notification, outcome: Frame | RmqError) -> None:
        """Let the waits that a notification ends ask again."""
        now_ms = self._now_ms()
        is_quick = now_ms - held.sent_ms < _AGAIN_MS
        with self._lock:
            self._quick[key] = held.quick + 1 if is_quick else 0
        is_known = isinstance(outcome, RmqError) or outcome.code == 0
        paused = not is_known or (is_quick and held.quick >= _MOST_QUICK)
        wake = partial(self._wake, key, held)
        # The thread that reads the connection must not wait for the lock of a step that waits for an answer.
        self._later(partial(self._run_at, wake, now_ms + _AGAIN_MS) if paused else wake)

    def _wake(self, key: _Key, held: _Notification) -> None:
        for notify in self._end(key, held):
            notify()

    def _end(self, key: _Key, held: _Notification) -> list[Callable[[], None]]:
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

    def acknowledge(self, request: Acknowledge) -> tuple[bool, ...]:
        """Acknowledge messages, one by one; return for each whether its receipt was valid."""
        frames = [ack_frame(request.group, request.topic, Receipt.parse(text)) for text in request.receipts]
        return tuple(read_acked(self._ask("ACK_MESSAGE", frame)) for frame in frames)

    def change(self, request: ChangeInvisible) -> str:
        """Change when a message is visible again, and return its new receipt; the old one is no longer valid."""
        receipt = Receipt.parse(request.receipt)
        return read_changed(receipt, self._ask("CHANGE_MESSAGE_INVISIBLETIME", change_frame(request, receipt)))

    def forward(self, request: ForwardToDeadLetters) -> None:
        """Make a message a dead letter: it is sent back, then acknowledged."""
        receipt = Receipt.parse(request.receipt)
        back = SendBack(
            request.group, receipt.physical_offset, _TO_DEAD_LETTERS, origin_topic=request.topic, cause=request.cause
        )
        form = FORMS[SendBack]
        form.read(back, self._ask("CONSUMER_SEND_MSG_BACK", form.write(back)))
        self.acknowledge(Acknowledge(request.group, request.topic, (request.receipt,)))

    def recall(self, request: CancelMessage) -> CancelResult:
        """Cancel a message with a delivery time, by the handle that its send returned."""
        assert request.recall_handle is not None
        frame = recall_frame(request.topic or "", request.recall_handle)
        return read_recalled(self._ask("RECALL_MESSAGE", frame))
