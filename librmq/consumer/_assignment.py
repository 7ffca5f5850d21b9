"""A queue that rebalancing assigned to a consumer: its pulled messages, and the consumer's position in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeVar

from librmq.consumer._listeners import DeliveredMessage
from librmq.message import MessageQueue, StoredMessage, record
from librmq.message.topics import TopicPrefix
from librmq.override import override
from librmq.protocol import SLOTS, Endpoint, Place, Suspect
from librmq.runtime import Step

M = TypeVar("M", bound=StoredMessage)
_V6_HOSTS: Final = 0x30
_unpack_body = record.header_struct("sys_flag", "body_length").unpack_from
_unpack_begun = record.header_struct("queue_offset", "sys_flag", "body_length").unpack_from
_unpack_queue_offset = record.header_struct("queue_offset").unpack_from


def _body_size(message: StoredMessage) -> int:
    flags, size = _unpack_body(message.raw)
    return len(message.stored_body) if flags & _V6_HOSTS else size


class ProcessQueue:
    """Messages of a queue between pull and consumption. Call it only under the runner's lock.

        pulled -> waiting (a deque, as pulled) -> begun (a dict, in order of offsets) -> removed

    Pulls come in order and messages begin in order, so both parts stay sorted, and returned messages go back to their
    place. All operations are O(1) for each message. A waiting message costs its record and one place in the deque.
    Mirrors ``ProcessQueue``.
    """

    __slots__ = ("_begun", "_bounds", "_largest", "_lined_up", "_waiting", "queue", "size")

    def __init__(self, queue: MessageQueue) -> None:
        self.queue: MessageQueue = queue
        self.size: int = 0
        """Total size of the stored bodies."""
        self._lined_up: int = 0
        """The number of messages that were taken and wait for a listener, so they count as waiting."""
        self._waiting: deque[StoredMessage] = deque()
        self._begun: dict[int, DeliveredMessage] = {}
        # A row for each pull: last offset, (min, max) of its queue.
        self._bounds: deque[tuple[int, tuple[int, int]]] = deque()
        self._largest = -1

    def __len__(self) -> int:
        return len(self._waiting) + len(self._begun)

    @property
    def waiting(self) -> int:
        """The number of messages that have not begun."""
        return len(self._waiting) + self._lined_up

    @property
    def begun(self) -> int:
        """The number of messages that have begun."""
        return len(self._begun) - self._lined_up

    def exceeds(self, messages: int, size: int, span: int) -> bool:
        """Return whether it holds more messages than this, more bytes of bodies, or a longer span of offsets."""
        count = len(self._waiting) + len(self._begun)
        return count > messages or self.size > size or (count > 1 and self.span > span)

    @property
    def span(self) -> int:
        """The number of queue offsets between the first and the last message."""
        first = self.first
        if first is None:
            return 0
        return (self._waiting[-1].queue_offset if self._waiting else next(reversed(self._begun))) - first

    @property
    def first(self) -> int | None:
        """The smallest queue offset held."""
        for queue_offset in self._begun:
            return queue_offset
        return self._waiting[0].queue_offset if self._waiting else None

    def pass_to(self, queue_offset: int) -> None:
        """Count the messages before a queue offset that were not put as consumed: the group's filter left them out."""
        self._largest = max(self._largest, queue_offset - 1)

    @property
    def progress(self) -> int:
        """The smallest queue offset not yet consumed; when empty, the largest ever put or passed plus one."""
        first = self.first
        return self._largest + 1 if first is None else first

    def put(self, messages: Sequence[StoredMessage], min_offset: int, max_offset: int) -> int:
        """Add pulled messages, in order of queue offset; return how many are new."""
        if not messages:
            return 0
        largest = self._largest
        if messages[0].queue_offset <= largest:
            messages = [message for message in messages if message.queue_offset > largest]
            if not messages:
                return 0
        self._largest = messages[-1].queue_offset
        self._waiting.extend(messages)
        self._bounds.append((self._largest, (min_offset, max_offset)))
        self.size += sum(map(_body_size, messages))
        return len(messages)

    def put_and_take(self, raw: bytes, bounds: tuple[int, int]) -> DeliveredMessage | None:
        """Add and begin a pulled record, like `put` and `take`; return None and do nothing unless it is the next one.

        ``bounds`` are the minimum and maximum offset of the queue.
        """
        queue_offset, flags, size = _unpack_begun(raw)
        if self._waiting or queue_offset <= self._largest:
            return None
        self._largest = queue_offset
        begun = self._begun[queue_offset] = DeliveredMessage(raw, self.queue, queue_offset, bounds)
        self.size += len(begun.stored_body) if flags & _V6_HOSTS else size
        return begun

    def take(self, limit: int) -> list[DeliveredMessage]:
        """Begin the first ``limit`` waiting messages."""
        waiting, bounds, begun = self._waiting, self._bounds, self._begun
        messages: list[DeliveredMessage] = []
        while waiting and len(messages) < limit:
            message = waiting.popleft()
            if message.__class__ is not DeliveredMessage:
                (queue_offset,) = _unpack_queue_offset(message.raw)
                while bounds[0][0] < queue_offset:
                    bounds.popleft()
                message = DeliveredMessage(message.raw, self.queue, queue_offset, bounds[0][1])
            begun[message.queue_offset] = message
            messages.append(message)
        return messages

    def remove(self, messages: Iterable[DeliveredMessage]) -> int | None:
        """Remove messages that have begun; return the progress, None if none of them was held."""
        begun = self._begun
        if not begun and not self._waiting:
            return None
        for message in messages:
            if begun.pop(message.queue_offset, None) is not None:
                # This is `_body_size`, inlined, because it runs for each message.
                flags, size = _unpack_body(message.raw)
                self.size -= len(message.stored_body) if flags & _V6_HOSTS else size
        for queue_offset in begun:  # This is `progress`, inlined, because it runs for each call of a listener.
            return queue_offset
        return self._waiting[0].queue_offset if self._waiting else self._largest + 1

    def put_back(self, messages: Sequence[DeliveredMessage]) -> None:
        """Make the last messages that have begun wait again."""
        for message in reversed(messages):
            del self._begun[message.queue_offset]
            self._waiting.appendleft(message)

    def commit(self) -> int | None:
        """Remove all messages that have begun; return their largest queue offset plus one, None if there were none."""
        begun = self._begun
        if not begun:
            return None
        progress = next(reversed(begun)) + 1
        self.size -= sum(map(_body_size, begun.values()))
        begun.clear()
        return progress

    def roll_back(self) -> None:
        """Make all messages that have begun wait again."""
        self.put_back(list(self._begun.values()))

    def first_begun(self) -> DeliveredMessage | None:
        """Return the message that holds back the progress, if it has begun."""
        for message in self._begun.values():
            return message
        return None

    def _first_started(self) -> DeliveredMessage | None:
        """Return the first message that a concurrent listener has."""
        for message in self._begun.values():
            if message.consume_start_timestamp_ms is not None:
                return message
        return None

    def holds(self, message: DeliveredMessage) -> bool:
        """Return whether a message that has begun is still here; it is not after the consume timeout."""
        return self._begun.get(message.queue_offset) is message

    def peek(self) -> StoredMessage | None:
        """Return the next message to begin."""
        return self._waiting[0] if self._waiting else None

    def drop_all(self) -> None:
        self._waiting.clear()
        self._begun.clear()
        self._bounds.clear()
        self.size = self._lined_up = 0
        self._largest = -1


@dataclass(slots=True, eq=False)
class LeftWork:
    """What the former holders of a queue have left behind its position."""

    finished: set[int]
    """Queue offsets to pull whose messages they have finished."""
    suspects: dict[int, Suspect]
    """The messages to pull at which a process has ended, by queue offset."""

    def pulled(self, messages: Sequence[M], begin: int, end: int) -> list[M]:
        """Return the messages of a pull that are not finished; forget what it has passed from ``begin`` to ``end``."""
        unfinished = [message for message in messages if message.queue_offset not in self.finished]
        self.finished = {offset for offset in self.finished if offset >= end}
        passed = set(range(begin, end)).difference(message.queue_offset for message in unfinished)
        self.suspects = {offset: suspect for offset, suspect in self.suspects.items() if offset not in passed}
        return unfinished


@dataclass(slots=True, eq=False, repr=False)
class AssignedQueue:
    """One queue from its assignment until it is released. Changed under the runner's lock."""

    queue: MessageQueue
    next_offset: int
    """Queue offset of the next pull."""
    progress: int | None
    """The queue offset of the next message to consume; None before the first consumed message."""
    pull: Step
    is_retry: bool = field(init=False)
    label: str = field(init=False)
    messages: ProcessQueue = field(init=False)
    notify: Callable[[], None] | None = None
    """Brokers call this when a held pull should be repeated."""
    pulled_timestamp_ms: int = 0
    lost: bool = False
    """Whether the last pull failed unexpectedly; none is running, and only a rebalance starts the next one."""
    endpoint: Endpoint | None = None
    """The broker of the last pull."""
    throttled: bool = False
    """Whether pulling has stopped because too much is held."""
    stored_progress: int | None = field(init=False)
    """The progress that was last read or stored; 0 can also be read where none is stored."""
    place: Place | None = None
    """The progress on the page of groups; None where the broker has none for this consumer."""
    left: LeftWork | None = None
    """What former holders have left, as long as there is any."""
    may_be_passed: bool = False
    """Whether another instance may have stored later progress: the former reader, since this one took the queue,
    or the next one, while this one releases it or the broker was away. Then it is read before any is stored."""
    is_chosen: bool = False
    """Whether a call, or the queue's end, set the position, and no progress from there is stored yet: then it is
    stored even if the broker has later progress."""
    settled_ms: int = 0
    """By then the former reader has stored its progress, or the next one has taken the queue."""
    released: bool = False
    """Whether the queue is released: nothing begins, and results of running listeners are ignored."""
    locked: bool = False
    """Whether the broker has locked the queue for this client."""
    lock_timestamp_ms: int | None = None
    """Time at which the broker last said so; None if it must be asked before the lock is trusted."""
    owned_timestamp_ms: int = 0
    """Orderly: when the broker last confirmed this client's lock."""
    delivering: bool = False
    """Orderly: whether a listener has a message of the queue, the queue waits for a listener, or it rests."""
    running: bool = False
    """Orderly: whether a listener runs or is about to."""
    since_ms: int = 0
    """Orderly: time since which listeners have run without a rest."""
    release_until_ms: int = 0
    """Latest end of a listener that still runs in a released queue; then the next rebalance unlocks it."""

    def __post_init__(self) -> None:
        self.is_retry = self.queue.topic.startswith(TopicPrefix.RETRY)
        self.label = f"{self.queue.topic}/{self.queue.broker_name}/{self.queue.queue_id}"
        self.messages = ProcessQueue(self.queue)
        self.stored_progress = self.progress or None

    def doubt_progress(self, settled_ms: int) -> None:
        """Note that the broker was away: it can have lost progress, and another instance can have taken the queue.

        A broker forgets its locks when it ends, so an orderly consumer asks for this queue's again before it goes on.
        """
        self.stored_progress, self.may_be_passed, self.settled_ms = None, True, settled_ms
        self.lock_timestamp_ms = None

    def keep(self) -> bool:
        """Write the progress to the page of groups, and return whether it outlives this process.

        It does not if it goes back, or was set back. The broker of this process saves its table some time later; that
        of another one has to be notified, and `stored_progress` says whether it was.
        """
        place, progress = self.place, self.progress
        if progress is None or progress == self.stored_progress:
            return progress is not None
        try:
            if place is None or self.is_chosen or not place.advance(progress) or place.position != progress:
                return False
        except ValueError:  # the broker has ended
            return False
        if place.saving is not None:
            self.stored_progress, self.may_be_passed = progress, False
        return True

    def take_suspect(self, queue_offset: int) -> Suspect | None:
        """Return the suspect that a message is, once; None for any other."""
        left = self.left
        suspect = None if left is None else left.suspects.pop(queue_offset, None)
        self.forget_left()
        return suspect

    def keep_suspect(self, suspect: Suspect) -> None:
        """Return a suspect, which is delivered later."""
        if self.left is None and self.place is not None:
            self.left = LeftWork(set(), {})
        if self.left is not None:
            self.left.suspects[suspect.queue_offset] = suspect

    def forget_left(self) -> None:
        """Take the usual way again once nothing is left of former holders."""
        if self.left is not None and not self.left.finished and not self.left.suspects:
            self.left = None

    def end(self, messages: Iterable[DeliveredMessage]) -> None:
        """Remove the marks of messages that have begun, and are not finished."""
        if self.place is not None:
            for message in messages:
                self.place.end(message.queue_offset)

    def leave_marks(self) -> None:
        """Remove the marks of all that has begun: this holder ends in order, or gives the queue up."""
        place = self.place
        with suppress(ValueError):  # the broker has ended
            if place is not None:
                # A pull consumer has handed out what is before the next offset, and holds nothing.
                for queue_offset in self.messages._begun or range(max(place.position, 0), self.next_offset)[-SLOTS:]:
                    place.end(queue_offset)
                for suspect in place.suspects().values():
                    suspect.runs_alone(False)

    def choose(self, queue_offset: int) -> None:
        """Continue at a chosen offset, which is stored even if the broker has later progress."""
        self.progress = self.next_offset = queue_offset
        self.stored_progress, self.is_chosen = None, True

    @override
    def __repr__(self) -> str:
        state = "released" if self.released else "locked" if self.locked else "assigned"
        return f"AssignedQueue({self.label}, {state}, next_offset={self.next_offset}, progress={self.progress})"
