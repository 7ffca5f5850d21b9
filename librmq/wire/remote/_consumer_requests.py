"""Pulls and receives of the consumers at one broker, which a call under the runner's lock never waits for.

A pull goes out, the client gets HELD, and asks again when the answer is here. Mirrors ``PullAPIWrapper`` and the
callbacks of ``MQClientAPIImpl.pullMessageAsync``::

    pull ──> frame sent ──> HELD        answer arrives ──> notify ──> the same pull ──> its messages

The answer to a pull that a later one has replaced is dropped, because the broker says it again. But a broker of
RocketMQ 5 says only once that a group was reset. It moves the progress, ignores commits until the next pull of the
queue, and answers that pull with the new offset. This answer is kept until the client takes it, and progress that the
client stores before is replaced by the new offset.

Receives with an invisible time are librmq's own at the owner of a shared store; `librmq.wire.remote._pop_receives` has
those at a broker of RocketMQ 5.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeGuard

from librmq.errors import BrokerUnreachableError, MalformedError, RmqError
from librmq.message import StoredMessage
from librmq.protocol import (
    CancelReceive,
    PullMessage,
    PullResponse,
    PullStatus,
    Receive,
    ReceiveResponse,
    UpdateOffset,
)
from librmq.runtime.locks import Lock
from librmq.wire.remote._connection import Transport
from librmq.wire.remoting._frames import Frame
from librmq.wire.remoting._headers import HoldHeader, RequestCode
from librmq.wire.remoting._request_codec import (
    FORMS,
    frame_of,
    pull_frame,
    pull_status,
    read_pulled,
    read_received,
    receive_frame,
    refusal,
)

SUSPEND_MS: Final = 15_000
ANSWER_WITHIN_MS: Final = 30_000
"""After this time a pull or a notification is sent again; its answer is lost."""
_QUICK_MS: Final = 1_000
_MOST_QUICK: Final = 10
"""Pulls of a queue that go out at once, one after the other, although the broker did not hold the one before."""
_PAUSE_MS: Final = 100
"""From such a pull to the next one after that."""
_SHARED_PREFIX: Final = "%LMQ%"
"""Of topics whose queues refer to records of other topics."""
_NOTHING: Final = (PullStatus.NO_NEW_MESSAGE, PullStatus.NO_MATCHED_MESSAGE)
_RESET: Final = "OFFSET_RESET"
"""The remark of the answer to a pull in a queue that was reset."""
_Queue = tuple[str, int]
"""Topic and queue id."""


class _Pull:
    """The latest pull of a client in one queue."""

    __slots__ = ("answer", "asked", "committed", "is_being_sent", "notify", "quick", "sent_ms")

    def __init__(self, request: PullMessage, sent_ms: int, quick: int) -> None:
        self.asked = _asked(request)
        self.committed = request.commit_offset
        self.notify = request.notify
        self.sent_ms = sent_ms
        self.answer: Frame | RmqError | None = None
        self.quick = quick
        """The pulls before this one that the broker answered at once with nothing."""
        self.is_being_sent = True
        """Whether the call that sends it is still under way: an answer that comes meanwhile is its result."""


class _Member:
    """What a client pulls in a group, until it leaves the group."""

    __slots__ = ("pulls", "resets")

    def __init__(self) -> None:
        self.pulls: dict[_Queue, _Pull] = {}
        self.resets: dict[_Queue, tuple[Frame, object]] = {}
        """Answers that say that a queue was reset, until the client takes them, with ``notify`` of their pulls.

        ``notify`` is another object once the queue was released and assigned again. Then the client has begun at the
        broker's progress, which may be far beyond an old reset.
        """

    def take_reset(self, queue: _Queue, notify: object) -> Frame | None:
        """Return the answer that says that a queue was reset since it was assigned. Under the lock."""
        frame, assigned = self.resets.pop(queue, (None, None))
        return frame if assigned is notify else None


@dataclass(eq=False, repr=False)
class LongPulls:
    """The pulls at one broker. Thread-safe."""

    broker_name: str
    now_ms: Callable[[], int]
    connect: Callable[[str], Transport]
    """Returns the connection of a client, which the broker knows by its heartbeat."""
    later: Callable[[Callable[[], None]], None]
    """Runs a function under the runner's lock, soon."""
    timeout_s: float
    """Seconds for the answer to a pull that the broker must not hold."""
    at: Callable[[Callable[[], None], int], None] = lambda call, due_ms: call()
    """Runs a function at a time; called under the runner's lock."""

    def __post_init__(self) -> None:
        self._lock = Lock()
        self._members: dict[tuple[str, str], _Member] = {}  # by client id and group
        self._bounds: dict[_Queue, tuple[int, int]] = {}
        self.suggested: dict[_Queue, int] = {}
        """What answers suggest for the next pull, until it is taken: broker ids by topic and queue id."""

    def pull(self, request: PullMessage) -> PullResponse:
        """Return the answer to a pull if it is here; otherwise send the pull, and return HELD."""
        if request.notify is None:
            return self._response(
                request, self.connect(request.client_id).request(pull_frame(request, SUSPEND_MS), self.timeout_s)
            )
        key, queue = (request.client_id, request.group), (request.topic, request.queue_id)
        answer: Frame | RmqError | None = None
        with self._lock:
            if (member := self._members.get(key)) is None:
                member = self._members[key] = _Member()
            pull = member.pulls.get(queue)
            if (reset := member.take_reset(queue, request.notify)) is not None:
                member.pulls.pop(queue, None)
                return self._response(request, reset)
            is_fresh = pull is not None and 0 <= self.now_ms() - pull.sent_ms < ANSWER_WITHIN_MS
            if pull is None or pull.asked != _asked(request) or not is_fresh:
                pull = None
            else:
                pull.notify = request.notify
                answer = pull.answer
                if answer is not None:
                    del member.pulls[queue]
        if pull is None:
            return self._send_pull(member, request)
        if answer is not None and self._is_empty(request, answer):
            is_quick = 0 <= self.now_ms() - pull.sent_ms < _QUICK_MS
            return self._send_pull(member, request, pull.quick + 1 if is_quick else 0)
        if request.commit_offset not in (None, pull.committed):
            update = UpdateOffset(request.group, request.topic, request.queue_id, request.commit_offset or 0)
            self.connect(request.client_id).send_one_way(FORMS[UpdateOffset].write(update))
            pull.committed = request.commit_offset
        return self._held(request) if answer is None else self._response(request, answer)

    def _is_empty(self, request: PullMessage, answer: Frame | RmqError) -> bool:
        """Return whether a hold has ended without anything, so that the next one begins at the same offset."""
        if isinstance(answer, Frame) and pull_status(answer) in _NOTHING:
            return self._response(request, answer).next_offset == request.queue_offset
        return False

    def _send_pull(self, member: _Member, request: PullMessage, quick: int = 0) -> PullResponse:
        pull, queue = _Pull(request, self.now_ms(), quick), (request.topic, request.queue_id)

        def ended(outcome: Frame | RmqError) -> None:
            with self._lock:
                current = member.pulls.get(queue)
                if _is_reset(outcome):
                    if self._members.get((request.client_id, request.group)) is not member:
                        return  # the client has left, and another one reads where the broker begins now
                    member.resets[queue] = outcome, pull.notify
                    self._drop(member, queue, pull)
                elif current is not pull:
                    return  # a later pull has replaced it
                else:
                    pull.answer = outcome
                if current is None or current.is_being_sent:
                    return
                if isinstance(outcome, RmqError):
                    del member.pulls[queue]  # the connection has ended: the next pull is sent over a new one
            self.later(lambda: self._notify(current))

        transport = self.connect(request.client_id)
        try:
            with self._lock:
                member.pulls[queue] = pull
            transport.send(pull_frame(request, SUSPEND_MS), ended)
            with self._lock:
                pull.is_being_sent = False
                answer = member.take_reset(queue, request.notify) or pull.answer
                is_empty = answer is not None and self._is_empty(request, answer)
                if answer is not None and not is_empty:
                    self._drop(member, queue, pull)
        except BaseException:  # also Ctrl-C, after which the next pull must not wait for this one
            with self._lock:
                self._drop(member, queue, pull)
            raise
        if is_empty:
            self.later(lambda: self._notify(pull))
        return self._held(request) if answer is None or is_empty else self._response(request, answer)

    def _notify(self, pull: _Pull) -> None:
        """Let the client ask again, later if the broker answers pulls at once with nothing. Under the runner's lock."""
        notify, answer = pull.notify, pull.answer
        if notify is None:
            return
        if pull.quick < _MOST_QUICK or not isinstance(answer, Frame) or pull_status(answer) not in _NOTHING:
            notify()
        else:
            self.at(notify, min(pull.sent_ms, self.now_ms()) + _PAUSE_MS)  # the clock can be set back meanwhile

    @staticmethod
    def _drop(member: _Member, queue: _Queue, pull: _Pull) -> None:
        """Drop a pull, unless a later one has replaced it. Under the lock."""
        if member.pulls.get(queue) is pull:
            del member.pulls[queue]

    def _held(self, request: PullMessage) -> PullResponse:
        begin, end = self._bounds.get((request.topic, request.queue_id), (0, request.queue_offset))
        return PullResponse(PullStatus.HELD, request.queue_offset, begin, end, is_held=True)

    def _response(self, request: PullMessage, answer: Frame | RmqError) -> PullResponse:
        if isinstance(answer, RmqError):
            raise answer
        if pull_status(answer) is None:
            raise refusal(answer)
        try:
            response, suggested = read_pulled(answer)
            if response.status is PullStatus.FOUND:
                first = request.queue_offset
                if response.messages and response.messages[0].queue_offset < first:  # it begins in a batch
                    later = [message for message in response.messages if message.queue_offset >= first]
                    response = replace(response, messages=later)
                _check_found(request, response.messages, response.next_offset)
        except RmqError as error:
            raise BrokerUnreachableError(
                f"{self.broker_name}: the answer to a pull of {request.topic} can't be read: {error}"
            ) from error
        place = request.topic, request.queue_id
        self._bounds[place] = response.min_offset, response.max_offset
        self.suggested[place] = suggested
        return response

    def after_reset(self, update: UpdateOffset) -> UpdateOffset:
        """Return the progress to store for a group: its new offset while one of its clients does not know of a reset.

        The broker has said that the queue was reset, and takes commits again: one of before would undo the reset.
        """
        queue = update.topic, update.queue_id
        with self._lock:
            members = [member for (_, group), member in self._members.items() if group == update.group]
            readers = [member for member in members if queue in member.pulls] or members
            reset = next((member.resets[queue][0] for member in readers if queue in member.resets), None)
        return update if reset is None else replace(update, queue_offset=read_pulled(reset)[0].next_offset)

    def expire(self, client_id: str, group: str) -> None:
        """Ignore the answers to pulls of a client in a group, whose subscriptions have changed; it pulls again.

        A reset does not depend on subscriptions, so it still counts.
        """
        with self._lock:
            member = self._members.get((client_id, group))
            for pull in () if member is None else member.pulls.values():
                pull.asked = ()

    def drop_client(self, client_id: str, group: str | None = None) -> None:
        """Drop the pulls of a client, in one group or in all."""
        with self._lock:
            for key in [key for key in self._members if key[0] == client_id and group in (None, key[1])]:
                del self._members[key]


def _is_reset(answer: Frame | RmqError) -> TypeGuard[Frame]:
    """Return whether an answer to a pull says that the group was reset; no later answer says it again."""
    return isinstance(answer, Frame) and answer.remark == _RESET and pull_status(answer) is PullStatus.OFFSET_ILLEGAL


def _check_found(request: PullMessage, messages: Sequence[StoredMessage], next_offset: int) -> None:
    """Refuse what would be delivered as messages of another queue, again and again, or in another order."""
    if not messages or next_offset <= request.queue_offset:
        raise MalformedError(
            f"expected messages from offset {request.queue_offset} on, "
            f"found {len(messages)} with {next_offset} as the next offset"
        )
    if request.topic.startswith(_SHARED_PREFIX):
        return
    min_offset = request.queue_offset
    for message in messages:
        if message.topic != request.topic or message.queue_id != request.queue_id:
            raise MalformedError(
                f"expected messages of queue {request.queue_id}, found one of {message.topic!r:.80}, "
                f"queue {message.queue_id}"
            )
        if not min_offset <= message.queue_offset < next_offset:
            raise MalformedError(
                f"expected a message of offsets {min_offset} to {next_offset - 1}, found one of {message.queue_offset}"
            )
        min_offset = message.queue_offset + 1


def _asked(request: PullMessage) -> tuple[object, ...]:
    return request.queue_offset, request.max_messages, request.subscription


# ---- receives at the owner of a shared store


class HeldReceives:
    """The receives at one broker that wait for messages, by numbers that the broker repeats. Thread-safe."""

    def __init__(self, broker_name: str, connect: Callable[[str], Transport], timeout_s: float) -> None:
        """``connect(client_id)`` returns the connection of a client; ``timeout_s`` is the time for an answer."""
        self._broker_name = broker_name
        self._connect = connect
        self._timeout_s = timeout_s
        self._lock = Lock()
        self._numbers = itertools.count(1)
        self._held: dict[int, tuple[Transport, Callable[[], None]]] = {}

    def receive(self, request: Receive) -> ReceiveResponse:
        """Return messages, or hold the request until the broker calls its ``notify``."""
        transport, notify, hold = self._connect(request.client_id), request.notify, 0
        if notify is not None:
            with self._lock:
                hold = next(self._numbers)
                self._held[hold] = transport, notify  # before the answer, which a message can overtake
        is_held = False
        try:
            response = read_received(transport.request(receive_frame(request, hold), self._timeout_s))
            is_held = response.is_held
        except MalformedError as error:
            raise BrokerUnreachableError(f"{self._broker_name}: the answer to a receive: {error}") from error
        finally:
            if not is_held:
                self._remove(hold)
        return response

    def notify(self, hold: int) -> None:
        """Let the client ask again. Under the runner's lock."""
        held = self._remove(hold)
        if held is not None:
            held[1]()

    def cancel(self, request: CancelReceive) -> None:
        """Remove a held receive; a lost connection has removed it too."""
        with self._lock:
            holds = [hold for hold, (_, notify) in self._held.items() if notify is request.notify]
        for hold in holds:
            held = self._remove(hold)
            if held is not None:
                held[0].send_one_way(frame_of(RequestCode.CANCEL_RECEIVE, HoldHeader(hold)))

    def _remove(self, hold: int) -> tuple[Transport, Callable[[], None]] | None:
        with self._lock:
            return self._held.pop(hold, None)
