"""Long polling: pulls and receives that found nothing and wait for a message.

Mirrors ``PullRequestHoldService``. A held pull is in the list of its queue, and a matching message wakes it. If only
other messages come, the broker answers it at the next time at which 4.9 checks all pulls, so that progress passes them.
Held requests are never polled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from librmq.errors import BrokerError, FilterSyntaxError
from librmq.message.delays import parse_level
from librmq.message.properties import PropertyName, tags_code
from librmq.protocol import ResponseCode, Subscription
from librmq.runtime import Runner
from librmq.runtime.runner import next_on_grid
from librmq.store import AppendResult

if TYPE_CHECKING:
    from librmq.filter import Registration, Registrations, SqlFilter, TagFilter
    from librmq.metrics import Metrics
    from librmq.store import MessageFilter


# ---- deadlines

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """Keys in order of their deadlines in ms, first set first among equal ones. A key has one. Not thread-safe.

    `set` and each key of `pop_due` cost O(log n). Up to as many discarded keys as there are others stay behind.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()  # so that keys need no order
        self._entries: dict[K, tuple[int, int, K]] = {}
        self._heap: list[tuple[int, int, K]] = []  # discarded ones too, because removing them costs more

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def first_ms(self) -> int | None:
        """The earliest deadline."""
        heap, entries = self._heap, self._entries
        while heap and entries.get(heap[0][2]) is not heap[0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def set(self, key: K, at_ms: int) -> None:
        """Give a key a deadline, in place of its former one."""
        entry = self._entries[key] = at_ms, next(self._numbers), key
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = sorted(self._entries.values())

    def discard(self, key: K) -> None:
        """Remove a key, if it has a deadline."""
        if self._entries.pop(key, None) is not None and not self._entries:
            self._heap.clear()

    def pop_due(self, now_ms: int) -> Iterator[K]:
        """Remove and yield the keys that are due; the caller may change deadlines meanwhile."""
        while (first_ms := self.first_ms) is not None and first_ms <= now_ms:
            _, _, key = heappop(self._heap)
            del self._entries[key]
            yield key

    def pop_all(self) -> Iterator[K]:
        """Remove and yield all keys by time."""
        while (first_ms := self.first_ms) is not None:
            yield from self.pop_due(first_ms)


class Selection:
    """A subscription, ready for reads of a queue and for one arriving message. Immutable and thread-safe.

    Tags are compared by their hash, and consumers check their exact text; SQL is exact. Mirrors
    ``ExpressionMessageFilter``.
    """

    __slots__ = ("_codes", "_sql", "matching")

    def __init__(
        self,
        matching: MessageFilter | None,
        tags: TagFilter | None = None,
        sql: SqlFilter | Registration | None = None,
    ) -> None:
        self.matching = matching
        """The filter for `MessageStore.read`; None selects all."""
        self._codes = None if tags is None or tags.takes_all else tags.codes
        self._sql = sql

    def takes(self, properties: Mapping[str, str]) -> bool:
        """Return whether a message with these properties would be read."""
        if self._codes is not None:
            tags = properties.get("TAGS")
            return (tags_code(tags) if tags else 0) in self._codes
        return self._sql is None or self._sql.matches(properties)


ALL: Final = Selection(None)
_SWEEP_MS: Final = 5_000  # the time between two answers of pulls that other messages have passed, as in 4.9


@lru_cache(maxsize=1024)
def selection_of(expression: str, expression_type: str, *, by_text: bool) -> Selection:
    """Return the selection of a valid expression. Tags are compared ``by_text``, or by their hash as a queue has it."""
    from librmq.filter import SqlFilter, TagFilter  # a grammar comes with it, which few need
    from librmq.store import BySql, ByTags

    if expression_type == "SQL92":
        sql = SqlFilter(expression)
        return Selection(BySql(sql), sql=sql)
    tags = TagFilter(expression)
    return ALL if tags.takes_all else Selection(ByTags(tags, exact=by_text), tags)


def parse_selection(subscription: Subscription, *, by_text: bool = False) -> Selection:
    """Parse a subscription; `BrokerError` if that fails. Tags are compared as `selection_of` says."""
    expression_type = subscription.expression_type or "TAG"
    if expression_type == "TAG" and subscription.expression in ("*", ""):
        return ALL
    if expression_type not in ("TAG", "SQL92"):
        raise BrokerError(
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
            f"topic {subscription.topic!r}: expected a filter of type TAG or SQL92, found {expression_type!r:.80}",
        )
    try:
        return selection_of(subscription.expression, expression_type, by_text=by_text)
    except FilterSyntaxError as error:
        raise BrokerError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, f"topic {subscription.topic!r}: {error}") from error


def registered_selection(registrations: Registrations, registration: Registration) -> Selection:
    """Return the selection of a registered SQL subscription, which can use the store's bitmaps."""
    from librmq.store import BySql

    return Selection(BySql(registration, registrations), sql=registration)


_QueueName = tuple[str, int]
_Holder = tuple[str, str]  # client id, group
Notify = Callable[[], None]
HandOver = Callable[[AppendResult], bool]
"""Gives an arriving message to the client of a held pull, and returns whether it took it."""


# ---- held requests


@dataclass(slots=True, eq=False)
class _Hold:
    selection: Selection
    notify: Notify
    hand_over: HandOver | None
    rules: int
    is_passed: bool = False


class HeldRequests:
    """The held pulls and receives of one broker. Called under the runner's lock; `by_queue` is read without it.

    A pull is held at one queue for its client and group; a receive is known by its ``notify``, and is held at several.
    """

    def __init__(self, now_ms: Callable[[], int], wake: Callable[[int], None]) -> None:
        """``wake(at_ms)`` makes the runner call `run_due` by then."""
        self._now_ms = now_ms
        self._begin_ms = now_ms()
        self._wake = wake
        self._passed: Deadlines[tuple[_QueueName, _Holder]] = Deadlines()
        self.by_queue: dict[_QueueName, dict[_Holder, _Hold]] = {}
        """Only queues with holds are in it."""
        # The message that ended each hold, until the client asks again.
        self._ended_by: dict[tuple[_QueueName, _Holder], tuple[Selection, AppendResult]] = {}
        self._receives: dict[Notify, tuple[_Holder, tuple[_QueueName, ...]]] = {}
        self._receive_numbers = itertools.count()
        self._rules = 0

    def rules_changed(self) -> None:
        """Let each pull that is held now be checked again before its next message.

        Topics, groups or subscriptions have changed, so the broker may refuse it. A hand-over does not check, and a
        pull does; therefore these holds end with the next message, as if they had no ``hand_over``.
        """
        self._rules += 1

    # ---- pulls

    def hold_pull(
        self,
        queue: _QueueName,
        holder: _Holder,
        selection: Selection,
        notify: Notify,
        hand_over: HandOver | None = None,
    ) -> None:
        """Hold a pull; it replaces an earlier one of the same client, group and queue.

        It stays held while ``hand_over`` takes the messages that match.
        """
        held = self.by_queue.get(queue)
        if held is None:
            held = self.by_queue[queue] = {}
        elif holder in held:
            self._passed.discard((queue, holder))
        held[holder] = _Hold(selection, notify, hand_over, self._rules)

    def remove_pull(self, queue: _QueueName, holder: _Holder) -> None:
        """Remove a pull, if it is held."""
        held = self.by_queue.get(queue)
        hold = None if held is None else held.pop(holder, None)
        if held is not None and hold is not None:
            if hold.is_passed:
                self._passed.discard((queue, holder))
            if not held:
                del self.by_queue[queue]

    def end_hold(self, queue: _QueueName, holder: _Holder, selection: Selection) -> AppendResult | None:
        """Remove a held pull; return the matching message that ended the hold, or None."""
        ending = self._ended_by.pop((queue, holder), None)
        if ending is None:
            self.remove_pull(queue, holder)
            return None
        return ending[1] if ending[0] is selection else None

    def remove_client(self, client_id: str, group: str | None = None) -> None:
        """Remove the held pulls of a client in a group that it leaves or, with None, in all groups of a lost client.

        A lost client's pulls are answered: if it is alive, it pulls again and learns that the broker has removed it.
        """
        for queue, held in list(self.by_queue.items()):
            for holder in [key for key in held if key[0] == client_id and group in (None, key[1])]:
                hold = held[holder]
                self.remove_pull(queue, holder)
                if group is None:
                    hold.notify()
        for queue, holder in list(self._ended_by):
            if holder[0] == client_id and group in (None, holder[1]):
                del self._ended_by[queue, holder]

    # ---- receives

    def hold_receive(self, client_id: str, group: str, queues: Mapping[_QueueName, Selection], notify: Notify) -> None:
        """Hold a receive at its queues, in place of an earlier one of the same ``notify``."""
        self.remove_receive(notify)
        holder = f"{client_id}\0{next(self._receive_numbers)}", group  # a client may have several
        self._receives[notify] = holder, tuple(queues)
        for queue, selection in queues.items():
            self.hold_pull(queue, holder, selection, partial(self._wake_receive, holder, notify))

    def remove_receive(self, notify: Notify) -> None:
        """Remove a receive, if it is held."""
        holder, queues = self._receives.pop(notify, (("", ""), ()))
        for queue in queues:
            self._ended_by.pop((queue, holder), None)
            self.remove_pull(queue, holder)

    def wake_receives(self, group: str, queue_topic: str) -> None:
        """Notify a group's held receives from a topic, so that they ask again."""
        for notify, (holder, queues) in list(self._receives.items()):
            if holder[1] == group and any(topic == queue_topic for topic, _ in queues):
                self._wake_receive(holder, notify)

    def _wake_receive(self, holder: _Holder, notify: Notify) -> None:
        if notify in self._receives and self._receives[notify][0] == holder:
            self.remove_receive(notify)
            notify()

    # ---- ends of holds

    def arrived(self, queue: _QueueName, properties: Mapping[str, str], message: AppendResult) -> None:
        """Answer the requests that a new message with these properties matches."""
        held = self.by_queue.get(queue)
        if held is None:
            return
        for holder, hold in list(held.items()):
            if hold.selection is ALL or hold.selection.takes(properties):
                may_hand_over = hold.rules == self._rules and not hold.is_passed
                if may_hand_over and hold.hand_over is not None and hold.hand_over(message):
                    continue
                self._ended_by[queue, holder] = hold.selection, message
                # Notify before the removal: after an interruption in between, the next message answers the hold again,
                # and none is forgotten.
                hold.notify()
                if held.get(holder) is hold:
                    self.remove_pull(queue, holder)
            else:
                self.answer_by_sweep(queue, holder)

    def answer_by_sweep(self, queue: _QueueName, holder: _Holder) -> None:
        """Let the next sweep answer a held pull, whatever arrives."""
        hold = self.by_queue[queue][holder]
        if not hold.is_passed:
            hold.is_passed = True
            due = next_on_grid(self._now_ms(), self._begin_ms, _SWEEP_MS)
            self._passed.set((queue, holder), due)
            self._wake(due)

    def answer_queue(self, queue: _QueueName) -> None:
        """Answer all held requests of a queue, whatever they match."""
        self._notify_holders((queue, holder) for holder in list(self.by_queue.get(queue, ())))

    def answer_passed(self) -> None:
        """Answer the requests that other messages have passed now, so that progress passes them too."""
        self._notify_holders(self._passed.pop_all())

    def run_due(self, now_ms: int) -> int | None:
        """Answer the requests that other messages have passed; return the time of the next call."""
        first_ms = self._passed.first_ms
        # The clock was set back, so the times of all holds lie too far ahead.
        if first_ms is not None and first_ms > now_ms + _SWEEP_MS:
            self.answer_passed()
        self._notify_holders(self._passed.pop_due(now_ms))
        return self._passed.first_ms

    def _notify_holders(self, holds: Iterable[tuple[_QueueName, _Holder]]) -> None:
        for queue, holder in holds:
            hold = self.by_queue.get(queue, {}).get(holder)
            # The notification of an earlier hold can have ended this one.
            if hold is not None:
                self.remove_pull(queue, holder)
                hold.notify()


# ---- stored messages

_DELAY: Final = PropertyName.DELAY


@dataclass(eq=False, repr=False)
class Arrivals:
    """The observer of one broker's stored messages; code that stores one calls `stored` once. Thread-safe.

    Held requests can wait for a message, and so can the step that delivers it later (delays, timer, relay, the check of
    transactions) and the flush of the store.
    """

    runner: Runner
    """Its lock is held while the others are notified."""
    held: HeldRequests
    metrics: Metrics | None
    delayed: Callable[[int, int], int]
    """``delayed(level, store_timestamp_ms)`` wakes the schedule, under the runner's lock, and returns the level in
    which the message waits."""
    wake_flush: Callable[[], None] | None
    """Wakes the step that flushes the store; None if a thread of the store flushes."""

    def __post_init__(self) -> None:
        self._holds = self.held.by_queue
        self.wake_by_topic: dict[str, Callable[[], None]] = {}
        """The step that handles messages of a topic."""

    def refused(self) -> None:
        """Note a message that the store had no room for: its step looks for room, for what the broker delivers."""
        if self.wake_flush is not None:
            self.wake_flush()

    def stored(
        self,
        topic: str,
        queue_id: int,
        properties: Mapping[str, str],
        result: AppendResult,
        *,
        is_delivered: bool = False,
    ) -> None:
        """Note a message that was stored for a queue.

        With a delay level among its properties it is not in the queue yet, unless it ``is_delivered``.
        """
        if not is_delivered and _DELAY in properties and (level := parse_level(properties[_DELAY])) > 0:
            with self.runner.lock:
                level = self.delayed(level, result.store_timestamp_ms)
            if self.metrics is not None:
                self.metrics.count("delayed_in", level=str(level))
        else:
            if self.metrics is not None:
                self.metrics.count("messages_in", topic=topic)
                self.metrics.count("bytes_in", result.size, topic=topic)
            if topic in self.wake_by_topic:
                self.wake_by_topic[topic]()
            queue = topic, queue_id
            if queue in self._holds:
                with self.runner.lock:
                    self.held.arrived(queue, properties, result)
        if self.wake_flush is not None:
            self.wake_flush()

    def copied(self, queues: Iterable[tuple[str, int]]) -> None:
        """Note messages that a replica has copied into these queues."""
        for queue in queues:
            if queue in self._holds:
                with self.runner.lock:
                    self.held.answer_queue(queue)
        if self.wake_flush is not None:
            self.wake_flush()
