"""A queue that rebalancing assigned to a consumer: its pulled messages, and the consumer's position in it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeVar

from librmq.consumer._listeners import DeliveredMessage
from librmq.message import MessageQueue, StoredMessage, record
from librmq.message.topics import TopicPrefix
from librmq.override import override
from librmq.protocol import SLOTS, Endpoint, Place, Suspect
from librmq.runtime import Step

M = TypeVar("M", bound=StoredMessage)
_V6_HOSTS: Final = 0x30
_unpack_held = record.header_struct("queue_offset", "sys_flag", "body_length").unpack_from


class ProcessQueue:
    """Messages of a queue between pull and consumption. Call it only under the runner's lock.

        pulled -> held (in order of offsets), and waiting (in the same order) -> begun: held only -> removed

    Pulls come in order and messages begin in order, so both parts stay sorted, and returned messages go back to their
    place. All operations are O(1) for each message. A message costs its record and less than 300 bytes.
    Mirrors ``ProcessQueue``.
    """

    __slots__ = ("_held", "_largest", "_waiting", "queue", "size")

    def __init__(self, queue: MessageQueue) -> None:
        self.queue: MessageQueue = queue
        self.size: int = 0
        """Total size of the stored bodies."""
        # The first key is read after each call of a listener. A plain dict would look for it among all that is removed.
        self._held: OrderedDict[int, DeliveredMessage] = OrderedDict()
        self._waiting: deque[DeliveredMessage] = deque()
        self._largest = -1

    def __len__(self) -> int:
        return len(self._held)

    @property
    def waiting(self) -> int:
        """The number of messages that have not begun."""
        return len(self._waiting)

    @property
    def begun(self) -> int:
        """The number of messages that have begun."""
        return len(self._held) - len(self._waiting)

    def exceeds(self, messages: int, size: int, span: int) -> bool:
        """Return whether it holds more messages than this, more bytes of bodies, or a longer span of offsets."""
        count = len(self._held)
        return count > messages or self.size > size or (count > 1 and self.span > span)

    @property
    def span(self) -> int:
        """The number of queue offsets between the first and the last message."""
        return next(reversed(self._held)) - next(iter(self._held)) if self._held else 0

    @property
    def first(self) -> int | None:
        """The smallest queue offset held."""
        return next(iter(self._held), None)

    def pass_to(self, queue_offset: int) -> None:
        """Count the messages before a queue offset that were not put as consumed: the group's filter left them out."""
        self._largest = max(self._largest, queue_offset - 1)

    @property
    def progress(self) -> int:
        """The smallest queue offset not yet consumed; when empty, the largest ever put or passed plus one."""
        return next(iter(self._held), self._largest + 1)

    def put(self, messages: Iterable[StoredMessage], min_offset: int, max_offset: int) -> int:
        """Add pulled messages, in order of queue offset; return how many are new."""
        new = self.put_and_take([message.raw for message in messages], (min_offset, max_offset))
        self._waiting.extend(new)
        return len(new)

    def put_and_take(self, records: Iterable[bytes], bounds: tuple[int, int]) -> list[DeliveredMessage]:
        """Add and begin pulled records, like `put` and `take`, while none waits; return those that are new.

        ``bounds`` are the minimum and maximum offset of the queue.
        """
        begun: list[DeliveredMessage] = []
        for raw in records:
            queue_offset, flags, size = _unpack_held(raw)
            if queue_offset > self._largest:
                self._largest = queue_offset
                message = self._held[queue_offset] = DeliveredMessage(raw, self.queue, queue_offset, bounds)
                message._held_size = len(message.stored_body) if flags & _V6_HOSTS else size
                self.size += message._held_size
                begun.append(message)
        return begun

    def take(self, limit: int) -> list[DeliveredMessage]:
        """Begin the first ``limit`` waiting messages."""
        waiting, messages = self._waiting, list[DeliveredMessage]()
        while waiting and len(messages) < limit:
            messages.append(waiting.popleft())
        return messages

    def remove(self, messages: Iterable[DeliveredMessage]) -> int | None:
        """Remove messages that have begun; return the progress, None if none of them was held."""
        held, remove = self._held, self._held.pop
        if not held:
            return None
        for message in messages:
            if remove(message.queue_offset, None) is not None:
                self.size -= message._held_size
        for queue_offset in held:  # This is `progress`, inlined, because it runs for each call of a listener.
            return queue_offset
        return self._largest + 1

    def put_back(self, messages: Sequence[DeliveredMessage]) -> None:
        """Make the last messages that have begun wait again."""
        self._waiting.extendleft(reversed(messages))

    def commit(self) -> int | None:
        """Remove all messages that have begun; return the progress, None if there were none."""
        begun = self.begun
        for _ in range(begun):
            _, message = self._held.popitem(last=False)
            self.size -= message._held_size
        return self.progress if begun else None

    def roll_back(self) -> None:
        """Make all messages that have begun wait again."""
        self._waiting = deque(self._held.values())

    def _taken(self) -> list[DeliveredMessage]:
        return list(islice(self._held.values(), self.begun))

    def _first_message(self) -> DeliveredMessage | None:
        """Return the message that holds back the progress."""
        return next(iter(self._held.values()), None)

    def _started(self) -> Iterator[DeliveredMessage]:
        """Return the messages that concurrent listeners have."""
        return (message for message in self._held.values() if message.consume_start_timestamp_ms is not None)

    def holds(self, message: DeliveredMessage) -> bool:
        """Return whether a message that has begun is still here; it is not after the consume timeout."""
        return self._held.get(message.queue_offset) is message

    def peek(self) -> DeliveredMessage | None:
        """Return the next message to begin."""
        return self._waiting[0] if self._waiting else None

    def drop_all(self) -> None:
        self._waiting.clear()
        self._held.clear()
        self.size = 0
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
    is_taken: bool = False
    """Whether another instance has taken the queue, so that it is pulled no more, or its topic was unsubscribed: the
    next rebalance gives it up, or takes it again."""
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

    def unfinished(self, messages: Sequence[M], begin: int, end: int) -> Sequence[M]:
        """Return the messages of a pull from ``begin`` to ``end`` without those that former holders have finished."""
        if self.left is not None:
            messages = self.left.pulled(messages, begin, end)
            self.forget_left()
        return messages

    def forget_left(self) -> None:
        """Take the usual way again once nothing is left of former holders."""
        if self.left is not None and not self.left.finished and not self.left.suspects:
            self.left = None

    def end(self, messages: Iterable[DeliveredMessage]) -> None:
        if self.place is not None:
            for message in messages:
                self.place.end(message.queue_offset)

    def leave_marks(self) -> None:
        """Remove the marks of all that has begun: this holder ends in order, or gives the queue up."""
        place = self.place
        with suppress(ValueError):  # the broker has ended
            if place is not None:
                # A pull consumer has handed out what is before the next offset, and holds nothing.
                for queue_offset in self.messages._held or range(max(place.position, 0), self.next_offset)[-SLOTS:]:
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
