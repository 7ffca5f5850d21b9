"""What a diagnosis reads: a store's folder, a running broker, or the brokers of a cluster.

::

    folder, not in use   the result of a recovery in memory; time is that of the last message
    folder, in use       the writer's current messages; its tables can be some seconds old; time is now
    running broker       its own store and tables, its clients, their threads; time is that of its runner
    cluster              the answers of its brokers (`ClusterView`); time is that of this machine

Nothing is locked and no byte of a file changes. `View` is what all four answer; lag, dead letters and the sums of
topics and groups are computed from it, each by one function.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self, TypeAlias, TypeVar, cast, runtime_checkable

from librmq.clock import LAST_MS, SystemClock
from librmq.config import wrong_kind
from librmq.errors import BrokerError, CorruptionError
from librmq.files import DiskFiles, Files
from librmq.formatting import innermost_frame
from librmq.java.json import NumberColumns
from librmq.message import DEFAULT_LEVELS, DelayLevels, MessageQueue, StoredMessage, dead_letter_topic
from librmq.message.lag import queue_lag
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic, TopicPrefix, group_of_retries, is_own_group, is_user_topic, kind_of_topic
from librmq.message.traces import has_traces
from librmq.override import override
from librmq.runtime.closing import Closing
from librmq.store import BrokerTables, MessageStore
from librmq.store.engine.store_parts import QueueName, QueueState
from librmq.store.engine.store_times import store_times_at
from librmq.store.format import directory
from librmq.store.format.broker_tables import progress_of
from librmq.store.format.documents import RecordIdentity, resent_times

if TYPE_CHECKING:
    from librmq.broker import AdministeredRoute, Broker
    from librmq.protocol import InstanceState, QueueBounds

Queue = TypeVar("Queue")
"""The name of a queue: topic and id, and in a cluster its broker."""

_Times: TypeAlias = tuple[int | None, int | None]
_FEW: Final = 10_000
"""Queues of all groups with progress; columns of fewer cost more time than they save, for the import of numpy."""
_INHERITED: Final = 1
_OWN_KINDS: Final = frozenset(("system", "delay", "half", "op"))


def groups_of_topics(topics: Collection[str], groups: Collection[str]) -> set[str]:
    """Return the groups that have one of these topics for their retries or dead letters; ``groups`` are known ones."""
    names = {group_of_retries(topic, groups, topics) for topic in topics if topic.startswith(TopicPrefix.RETRY)}
    dead = {
        topic.removeprefix(TopicPrefix.DEAD_LETTER) for topic in topics if topic.startswith(TopicPrefix.DEAD_LETTER)
    }
    return (names | dead) - {""}


def is_listed(topic: str, permission: int) -> bool:
    """Return whether a topic is listed though it has no messages: users have made it."""
    is_own = kind_of_topic(topic) in _OWN_KINDS or topic.endswith("_REPLY_TOPIC")
    return not is_own and not permission & _INHERITED


class QueueProgress(NamedTuple):
    """The messages of a queue, and the progress of a group in it."""

    begin: int
    """The queue's first offset."""
    end: int
    """The offset of the queue's next message."""
    offset: int | None
    """The queue offset of the group's next message; None without progress."""


class View(Protocol[Queue]):
    """Topics, groups and messages of a store or a cluster at one moment."""

    @property
    def levels(self) -> DelayLevels:
        """The delay levels of messages."""

    @property
    def topics(self) -> Collection[str]:
        """The topics that have queues."""

    @property
    def listed_topics(self) -> Collection[str]:
        """The topics that have messages, and those that users made, sorted."""

    @property
    def groups(self) -> Collection[str]:
        """The consumer groups, with the groups that retry and dead-letter topics name, sorted."""

    @property
    def resent_times(self) -> Mapping[RecordIdentity, int]:
        """The times at which dead letters were last sent to their groups again."""

    @property
    def resent_letters(self) -> Counter[str] | None:
        """How many dead letters of each group were sent again; None if that is unknown."""

    def queues(self, topic: str) -> Mapping[Queue, range]:
        """Return the queue offsets of the messages in each queue of a topic."""

    def broker_name(self, queue: Queue) -> str:
        """Return the name of a queue's broker; empty if there is only one broker."""

    def stored_at(self, queue: Queue, queue_offset: int) -> int | None:
        """Return the store time of a message; None if it is deleted."""

    def times_of(self, queue: Queue, offsets: range) -> tuple[int | None, int | None]:
        """Return the least and the greatest store time of some messages of a queue; None if unreadable."""

    def span(self, queue: Queue, begin_ms: int, end_ms: int) -> range:
        """Return a run of queue offsets with all messages stored from a time on and before another, and few others."""

    def messages(self, queue: Queue, offsets: range) -> Iterator[StoredMessage]:
        """Yield the messages of a queue with these queue offsets, without deleted ones."""

    def consumed(self, group: str, topic: str | None = None) -> Iterator[tuple[str, Mapping[Queue, QueueProgress]]]:
        """Yield the topics in which a group has progress, sorted, or one of them, each with its queues."""


class TopicSummary(NamedTuple):
    """The messages of a topic."""

    topic: str
    kind: str
    """Its kind, as in `kind_of_topic`."""
    queues: int
    """Number of its queues."""
    messages: int
    """Number of its messages."""
    min_timestamp_ms: int | None
    """The least store time of a message; None without one, or if none is readable."""
    max_timestamp_ms: int | None
    """The greatest store time of a message; None without one, or if none is readable."""


def topic_summaries(
    view: View[Any], topics: Iterable[str] | None = None, times_of: Callable[..., _Times] | None = None
) -> Iterator[TopicSummary]:
    """Yield the messages of each listed topic, or of these; ``times_of`` stands for the view's own."""
    for topic in view.listed_topics if topics is None else topics:
        queues = view.queues(topic)
        filled = [(queue, offsets) for queue, offsets in queues.items() if offsets]
        times = [(times_of or view.times_of)(queue, offsets) for queue, offsets in filled]
        yield TopicSummary(
            topic,
            kind_of_topic(topic),
            len(queues),
            sum(map(len, queues.values())),
            min((oldest_ms for oldest_ms, _ in times if oldest_ms is not None), default=None),
            max((newest_ms for _, newest_ms in times if newest_ms is not None), default=None),
        )


class GroupSummary(NamedTuple):
    """The consumption of a group."""

    group: str
    topics: list[str]
    """The topics in which it has progress."""
    lag: int | None
    """Number of unconsumed messages; None without progress."""
    dead_letters: int
    """Number of its dead letters that were not sent again."""
    resent: int | None
    """Number of those that were sent again; None if the brokers do not note that, so that all count as unsent."""


def group_summaries(view: View[Any], *, includes_own: bool) -> Iterator[GroupSummary]:
    """Yield the consumption of each group, of the broker's own groups only with ``includes_own``."""
    for group in view.groups:
        if includes_own or not is_own_group(group):
            topics = dict(view.consumed(group))
            lag = sum(
                queue_lag(progress.offset, progress.begin, progress.end)
                for queues in topics.values()
                for progress in queues.values()
            )
            yield GroupSummary(group, list(topics), lag if topics else None, *count_dead_letters(view, group))


class LetterCount(NamedTuple):
    """The dead letters of a group."""

    unsent: int
    """Those that were not sent again."""
    resent: int | None
    """Those that were sent again; None if that is unknown."""

    @property
    def every(self) -> int:
        """All of them."""
        return self.unsent + (self.resent or 0)


def count_dead_letters(view: View[Any], group: str) -> LetterCount:
    """Return the number of dead letters of a group."""
    letters = sum(map(len, view.queues(dead_letter_topic(group)).values()))
    resent = view.resent_letters
    return LetterCount(letters, None) if resent is None else LetterCount(letters - resent[group], resent[group])


_ANSWER_S: Final = 3.0
"""Time for instances of other processes to answer."""


class _LiveView:
    """What a view knows of the instances of groups, each asked once."""

    route: AdministeredRoute | None
    """The broker, the process that shares the folder, or the cluster, which report instances; None without one."""

    def __init__(self, route: AdministeredRoute | None) -> None:
        self.route = route
        self._states: dict[str, dict[str, InstanceState | None]] = {}

    @property
    def now_ms(self) -> int | None:
        """The time for ages."""
        raise NotImplementedError

    def age_s(self, timestamp_ms: int | None) -> float | None:
        """Return the seconds since a time, never below 0; None if it is unknown."""
        if timestamp_ms is None or self.now_ms is None:
            return None
        return max(0, self.now_ms - timestamp_ms) / 1000

    @cached_property
    def running_groups(self) -> list[str]:
        """The groups of users that have a running instance, sorted."""
        clients = () if self.route is None else self.route.clients()
        return sorted({group for client in clients for group in client.consumer_groups if not is_own_group(group)})

    def states(self, group: str, *, timeout_s: float = _ANSWER_S) -> dict[str, InstanceState | None]:
        """Return what each running instance of a group says, by client id; none for a folder that no process shares."""
        if self.route is not None and group not in self._states:
            self._states[group] = self.route.instances(group, timeout=timeout_s)
        return self._states.get(group, {})

    def instance_rows(self, groups: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Yield the rows of `librmq top` for the instances of groups."""
        for group in groups:
            for client_id, state in sorted(self.states(group).items()):
                numbers: tuple[int | None, ...] = (None,) * 4
                if state is not None:
                    held = sum(queue.waiting + queue.running for queue in state.queues)
                    numbers = state.running, state.threads, len(state.queues), held
                status = "does not answer" if state is None else "paused" if state.is_paused else "runs"
                named = dict(zip(("busy", "threads", "queues", "held"), numbers, strict=True))
                yield {"type": "instance", "instance": client_id, "group": group, **named, "state": status}

    def listener_rows(self, groups: Iterable[str]) -> list[dict[str, Any]]:
        """Return the rows of `librmq top` for the listeners that work, the one that has worked longest first."""
        rows = []
        for state in filter(None, chain.from_iterable(self.states(group).values() for group in groups)):
            for call in state.listeners:
                message = self.message_of(call.queue, call.queue_offset)
                rows.append({
                    "type": "listener", "for_s": self.age_s(call.since_ms), "place": innermost_frame(call.stack),
                    "group": state.group, "topic": call.queue.topic,
                    "keys": None if message is None else " ".join(message.keys),
                    "message_id": call.message_id, "messages": call.messages, "thread": call.thread,
                    "instance": state.client_id,
                })  # fmt: skip
        return sorted(rows, key=lambda row: -1 if row["for_s"] is None else row["for_s"], reverse=True)

    def message_of(self, queue: MessageQueue, queue_offset: int) -> StoredMessage | None:
        """Return a message of a broker's queue; None if it is deleted, damaged, or may not be read."""
        raise NotImplementedError


class StoreView(_LiveView, Closing):
    """A store at one moment, opened by `open` or `of`. Not thread-safe."""

    store: MessageStore
    broker: Broker | None
    """The running broker of this process; None for a folder."""
    owner: str | None
    """The process that has the folder open for writing, None without one; ``this process`` for a broker."""

    def __init__(
        self,
        store: MessageStore,
        owner: str | None,
        *,
        broker: Broker | None = None,
        tables: BrokerTables | None = None,
        now_ms: int | None = None,
        route: AdministeredRoute | None = None,
        closes_store: bool = False,
    ) -> None:
        self.store = store
        self.broker = broker
        super().__init__(broker if route is None else route)
        self.owner = owner
        self._tables = tables
        self._now_ms = now_ms
        self._closes_store = closes_store
        self.earlier_columns: NumberColumns | None = None
        """The `progress_columns` of an earlier view, which make those of this one quicker."""

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        now_ms: int | None = None,
        files: Files | None = None,
        tables: BrokerTables | None = None,
        route: AdministeredRoute | None = None,
    ) -> Self:
        """Open the store in ``path`` for reading, whether a process uses it or not.

        Args:
            path: The store's folder.
            now_ms: The time for ages; by default now for a store in use, else that of its last message.
            files: The file system; the disk by default.
            tables: Topics, groups and progress; by default those in the folder.
            route: The process that has the store open, which knows the instances.

        Raises:
            NotAStoreError: There is no store, or one of another kind.
            CorruptionError: A file is damaged in a way that no crash explains.
        """
        files, path = files or DiskFiles(), os.fspath(path)
        directory.check_kind(path, files)
        owner = files.lock_holder(directory.lock_path(path))
        store = MessageStore.open(path, read_only=True, files=files)
        if now_ms is None and owner is not None:
            now_ms = SystemClock().now_ms()
        return cls(store, owner, tables=tables, now_ms=now_ms, route=route, closes_store=True)

    @classmethod
    def of(cls, broker: Broker) -> Self:
        """View the store of a running broker.

        Raises:
            StoreClosedError: The broker is closed.
        """
        return cls(broker.store, "this process", broker=broker, now_ms=broker.runner.now_ms())

    @classmethod
    def over(cls, store: MessageStore, tables: BrokerTables | None = None) -> Self:
        """View an open store; ``tables`` are by default those in its folder."""
        return cls(store, None if store.read_only else "this process", tables=tables)

    @property
    def is_live(self) -> bool:
        """Whether this is the store of a running broker of this process."""
        return self.broker is not None

    @property
    def tables(self) -> BrokerTables:
        """Topics, groups and progress; without progress for a store that is shown at an earlier moment."""
        if self._tables is None and self.broker is not None:
            self._tables = self.broker.tables.with_delays(self.broker.delay_offsets)
        if self._tables is None:
            self._tables = BrokerTables.open(os.path.join(self.store.path, directory.CONFIG), files=self.store.files)
            if self.store.past_ms is not None:
                self._tables.drop_progress()
        return self._tables

    @cached_property
    def unknown_progress(self) -> str | None:
        """Why the progress of groups is unknown, and what to do; None if it is known, as that of a running broker."""
        return None if self.is_live else self.tables.unknown_progress()

    @cached_property
    def unknown_delays(self) -> str | None:
        """Why the progress of delay levels is unknown, and what to do; None if it is known."""
        return None if self.is_live else self.tables.unknown_delays()

    @property
    def unknown_groups(self) -> str | None:
        """Why a store without a broker's tables has no groups; None if it has tables, or `unknown_progress` says it.

        A `MessageStore` alone has none, and neither has a copy without its folder config.
        """
        tables = self.tables
        if self.is_live or self.unknown_progress is not None or tables.topics.is_stored or tables.offsets.is_stored:
            return None
        path = os.path.join(self.store.path, directory.CONFIG, "consumerOffset.json")
        return f"there is no {path}, so the progress of no group is known: copy the folder config too"

    @cached_property
    def progress(self) -> dict[tuple[str, str], dict[int, int]]:
        """Queue offsets by queue id, by group and topic; for a running broker the present ones.

        A running group has an item for each topic that it subscribes to, even without progress.
        """
        rows = self._rows
        if self.broker is not None:  # each copy is one call, between which other threads go on
            rows = {name: offsets.copy() for name, offsets in rows.items()}
        return progress_of(rows)

    @cached_property
    def _rows(self) -> dict[str, dict[int, int]]:
        """The rows of progress by ``topic@group``; those of a running broker can change."""
        rows: dict[str, dict[int, int]] = self.tables.offsets.rows
        if self.broker is None:
            return rows
        rows = rows.copy()
        for name in self._subscribed:
            rows.setdefault(name, {})
        return rows

    @cached_property
    def _subscribed(self) -> tuple[str, ...]:
        """The topics to which running groups subscribe, as ``topic@group``."""
        broker = self.broker
        if broker is None:
            return ()
        from librmq.protocol import MessageModel  # asyncio comes with it, which a folder does not need

        names = []
        with broker.runner.lock:
            for group in sorted({group for client in broker.clients() for group in client.consumer_groups}):
                connections = broker.connections(group)
                if connections is not None and connections.model is MessageModel.CLUSTERING:
                    names += [f"{topic}@{group}" for topic in connections.subscriptions]
        return tuple(names)

    @cached_property
    def progress_version(self) -> tuple[int, tuple[str, ...]]:
        """A value that another one follows as soon as the progress in memory changes; take it before the progress."""
        return self.tables.offsets.revision, self._subscribed

    def _progress_in(self, topics: Collection[str]) -> dict[tuple[str, str], dict[int, int]]:
        """Return the part of `progress` that is of these topics; of a folder the others are not made for it."""
        columns = self.progress_columns
        if columns is None:
            return {place: offsets for place, offsets in self.progress.items() if place[1] in topics}
        return {(group, topic): offsets for (topic, group), offsets in columns.named(0, topics).rows().items()}

    @cached_property
    def progress_columns(self) -> NumberColumns | None:
        """The progress as columns, by topic and group; None if it is little, and `progress` quicker."""
        columns = self.tables.offsets.columns(_FEW) if self.broker is None else None
        if columns is None and (len(self._rows) > _FEW or sum(map(len, self._rows.values())) > _FEW):
            columns = NumberColumns.of(self._rows, self.earlier_columns)
        return columns

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The consumer groups in the tables, and of the topics of retries and dead letters, sorted."""
        columns = self.progress_columns
        groups = {group for group, _ in self.progress} if columns is None else set(columns.names[1])
        groups |= set(self.tables.groups.rows)
        return tuple(sorted(groups | groups_of_topics(self.topics, groups)))

    @cached_property
    def ranges(self) -> dict[QueueName, QueueState]:
        """The beginning and end of each queue, sorted by topic and queue id."""
        queues = self.store.queues
        states = queues.states()
        ranges = {}
        for name in sorted(queues):
            state = states.get(name)
            if state is None:
                queue = queues.find(name)
                if queue is None:  # it was deleted meanwhile
                    continue
                state = QueueState(queue.min_offset, queue.max_offset, queue.max_physic_offset)
            ranges[name] = state
        return ranges

    @cached_property
    def topics(self) -> dict[str, list[int]]:
        """The ids of the queues of each topic that has any."""
        queue_ids: dict[str, list[int]] = {}
        for topic, queue_id in self.ranges:
            queue_ids.setdefault(topic, []).append(queue_id)
        return queue_ids

    @cached_property
    def revive_topics(self) -> list[str]:
        """The topics of what POP of 5.x holds; empty for a broker that does not know POP."""
        topics = self.topics.keys() | self.tables.topics.rows.keys()
        revive = {topic for topic in topics if topic.startswith(TopicPrefix.REVIVE)}
        # A broker lists its revive topic in topics.json, and with configManagerVersion=v2 nowhere.
        is_unlisted = not revive and SystemTopic.TIMER in self.topics
        lacks_table = is_unlisted and not self.tables.topics.rows
        if lacks_table or (is_unlisted and directory.is_of_5(self.store.path, self.store.files)):
            from librmq.scheduling.timer import waiting_timers  # loads what few stores need

            waiting = (message.properties.get(PropertyName.REAL_TOPIC, "") for _, message in waiting_timers(self.store))
            revive.update(topic for topic in waiting if topic.startswith(TopicPrefix.REVIVE))
        return sorted(revive)

    @cached_property
    def trace_topics(self) -> list[str]:
        """The topics of traces: by their names, and of other topics those whose newest message is one."""
        topics = []
        for topic, queues in self.topics.items():
            if topic == SystemTopic.TRACE or topic.startswith(TopicPrefix.TRACE):
                topics.append(topic)
            elif is_user_topic(topic):
                queue_id = max(queues, key=lambda queue_id: self.ranges[topic, queue_id].max_offset)
                last = self.ranges[topic, queue_id].max_offset - 1
                newest = self.message(topic, queue_id, last) if last >= 0 else None
                if newest is not None and has_traces(newest):
                    topics.append(topic)
        return topics

    @property
    def levels(self) -> DelayLevels:
        """The delay levels of the store's settings."""
        return self.store.levels

    @property
    def listed_topics(self) -> Collection[str]:
        """The topics that have queues, and those that users made, sorted."""
        rows = self.tables.topics.rows.items()
        return sorted(self.topics.keys() | {topic for topic, row in rows if is_listed(topic, row.get("perm", 0))})

    @cached_property
    def resent_times(self) -> Mapping[RecordIdentity, int]:
        """The times at which dead letters were last sent to their groups again."""
        times, past_ms = resent_times(self.store.path, self.store.files), self.store.past_ms
        return times if past_ms is None else {letter: at for letter, at in times.items() if at <= past_ms}

    @cached_property
    def resent_letters(self) -> Counter[str]:
        """How many dead letters of each group were sent again."""
        counts = Counter[str]()
        for identity in self.resent_times:
            with suppress(CorruptionError):  # no record begins there, or a damaged one
                letter = self.store.message_at(identity[0])
                if letter is not None and RecordIdentity.of(letter) == identity:
                    counts[letter.topic.removeprefix(TopicPrefix.DEAD_LETTER)] += 1
        return counts

    def queues(self, topic: str) -> dict[QueueName, range]:
        """Return the queue offsets of the messages in each queue of a topic."""
        return self._offsets.get(topic, {})

    @cached_property
    def _offsets(self) -> dict[str, dict[QueueName, range]]:
        """The queue offsets of each queue, by topic."""
        offsets: dict[str, dict[QueueName, range]] = {}
        for name, state in self.ranges.items():
            offsets.setdefault(name[0], {})[name] = range(state.min_offset, state.max_offset)
        return offsets

    def broker_name(self, queue: QueueName) -> str:
        """Return an empty name, because a store has one broker."""
        return ""

    def messages(self, queue: QueueName, offsets: range) -> Iterator[StoredMessage]:
        """Yield the messages of a queue with these queue offsets, without deleted ones."""
        return self.store.messages(*queue, offsets.start, offsets.stop)

    def consumed(self, group: str, topic: str | None = None) -> Iterator[tuple[str, dict[QueueName, QueueProgress]]]:
        """Yield the topics in which a group has progress, sorted, or one of them, each with its queues.

        Deleted queues in which the group has any progress are among them, without messages.
        """
        for name in self._topics_by_group.get(group, ()):
            if topic in (None, name):
                progress, queues = self.progress[group, name], self.queues(name)
                deleted = {(name, id): range(0) for id, at in progress.items() if at > 0 and (name, id) not in queues}
                if deleted:
                    queues = dict(sorted((queues | deleted).items()))
                yield (
                    name,
                    {
                        queue: QueueProgress(offsets.start, offsets.stop, progress.get(queue[1]))
                        for queue, offsets in queues.items()
                    },
                )

    @cached_property
    def _topics_by_group(self) -> dict[str, list[str]]:
        topics: dict[str, list[str]] = {}
        for group, topic in self.progress:
            topics.setdefault(group, []).append(topic)
        return {group: sorted(topics[group]) for group in sorted(topics)}

    def message(self, topic: str, queue_id: int, queue_offset: int) -> StoredMessage | None:
        """Return a message of a queue; None if it is deleted."""
        return next(self.store.messages(topic, queue_id, queue_offset, queue_offset + 1), None)

    @override
    def message_of(self, queue: MessageQueue, queue_offset: int) -> StoredMessage | None:
        """Return a message of a broker's queue; None if it is deleted or damaged."""
        with suppress(CorruptionError):
            return self.message(queue.topic, queue.queue_id, queue_offset)
        return None

    def message_count(self, topic: str | None = None) -> int:
        """Return the number of messages of a topic, or of all queues."""
        topics = self.topics if topic is None else [topic]
        return sum(len(offsets) for name in topics for offsets in self.queues(name).values())

    def queue_count(self, topic: str) -> int:
        """Return the number of queues of a topic, including those without messages."""
        row = self.tables.topics.rows.get(topic, {})
        return max(len(self.topics.get(topic, ())), int(row.get("readQueueNums", 0)))

    @cached_property
    @override
    def now_ms(self) -> int | None:
        """The time for ages; None for an unused folder without messages."""
        if self._now_ms is not None:
            return self._now_ms
        return self._last_timestamp_ms() if self.store.past_ms is None else self.store.past_ms

    def _last_timestamp_ms(self) -> int | None:
        """Return the store time of the last message, usually that at the log's end."""
        ends = sorted(((state.max_physic_offset, name) for name, state in self.ranges.items()), reverse=True)
        times = (self._readable_time(name, self.ranges[name].max_offset - 1) for _, name in ends[:8])
        return next((time_ms for time_ms in times if time_ms is not None), None)

    def stored_at(self, queue: QueueName, queue_offset: int) -> int | None:
        """Return the store time of a message of a queue; None if it is deleted.

        Raises:
            CorruptionError: A file is damaged.
        """
        message = self.store.queues[queue].first_message(queue_offset)
        return store_times_at(self.store.log, queue, [message if message and message[0] == queue_offset else None])[0]

    def times_of(self, queue: QueueName, offsets: range) -> tuple[int | None, int | None]:
        """Return the least and the greatest store time of some messages of a queue; None if unreadable."""
        return self.store.times.extent(self.store.queues[queue], offsets) or (None, None)

    def span(self, queue: QueueName, begin_ms: int, end_ms: int) -> range:
        """Return the shortest run of queue offsets with all messages stored from a time on and before another."""
        return self.store.times.span(self.store.queues[queue], begin_ms, end_ms, self.queues(queue[0])[queue])

    def _readable_time(self, queue: QueueName, queue_offset: int) -> int | None:
        """Return the store time of a message of a queue; None if it is deleted or unreadable."""
        with suppress(CorruptionError):
            return self.stored_at(queue, queue_offset)
        return None

    @override
    def close(self) -> None:
        """Close the store, if `open` opened it."""
        if self._closes_store:
            self._closes_store = False
            self.store.close()

    @override
    def __repr__(self) -> str:
        return f"<StoreView of {self.store.path!r}, {'live' if self.is_live else self.owner or 'not in use'}>"


@runtime_checkable
class Shared(Protocol):
    """A store that several processes share, as `librmq.share` returns it."""

    path: str

    def store_view(self) -> AbstractContextManager[StoreView]:
        """View the store, with the progress and the instances that its owner knows."""


Source: TypeAlias = "StoreView | Broker | Shared | str | os.PathLike[str]"
"""The source of a diagnosis: a view, a running broker, or the folder of a store."""
LiveSource: TypeAlias = "Source | ClusterView | AdministeredRoute"
"""A source, or what `librmq.connect` returned, whose requests tell less."""


@contextmanager
def viewed(source: Source) -> Iterator[StoreView]:
    """View a store, a broker or a folder; close the store if this opened it."""
    if isinstance(source, StoreView):
        yield source
    elif isinstance(source, str | os.PathLike):
        with StoreView.open(source) as view:
            yield view
    elif isinstance(source, Shared):
        with source.store_view() as view:
            yield view
    elif hasattr(source, "store") and hasattr(source, "runner"):
        yield StoreView.of(source)
    else:
        raise wrong_kind("source", source, "a Broker, what share returned, the folder of a store, or a StoreView")


@contextmanager
def viewed_live(source: LiveSource) -> Iterator[StoreView | ClusterView]:
    """View a source like `viewed`; of a cluster view what its brokers answer."""
    if isinstance(source, ClusterView):
        yield source
    elif hasattr(source, "broker_names") and not hasattr(source, "store") and not isinstance(source, Shared):
        yield ClusterView(cast("AdministeredRoute", source))
    else:
        with viewed(cast("Source", source)) as view:
            yield view


class ClusterView(_LiveView):
    """What the brokers of a cluster say of their topics, groups and messages. Not thread-safe."""

    route: AdministeredRoute
    levels = DEFAULT_LEVELS
    """The delay levels that brokers have by default."""

    def __init__(self, route: AdministeredRoute, folder: str | None = None, *, most_groups: int | None = None) -> None:
        """``folder`` is that of the only broker's store, if it is on this machine; brokers do not answer what it notes.

        Without it nothing is known about dead letters that were sent again. Of the groups of users at most so many are
        in the view, the first ones.
        """
        super().__init__(route)
        self._most_groups = most_groups
        self.left_out: int = 0
        """How many groups of users are not in `groups`."""
        self._folder = folder
        self._bounds: dict[str, dict[MessageQueue, QueueBounds]] = {}

    @cached_property
    @override
    def now_ms(self) -> int:
        """The time of this machine when it was first asked for."""
        return self.route.runner.clock.now_ms()

    def broker_name(self, queue: MessageQueue) -> str:
        """Return the name of a queue's broker; empty if the cluster has only one."""
        return queue.broker_name if len(self.route.broker_names()) > 1 else ""

    @override
    def message_of(self, queue: MessageQueue, queue_offset: int) -> StoredMessage | None:
        """Return a message of a broker's queue; None if it is gone, or the topic's permission forbids to read it."""
        from librmq.protocol import ResponseCode

        try:
            return next(self.messages(queue, range(queue_offset, queue_offset + 1)), None)
        except BrokerError as error:
            if error.code != ResponseCode.NO_PERMISSION:
                raise
            return None

    def queue_count(self, topic: str) -> int:
        """Return the number of queues of a topic."""
        return len(self._bounds_of(topic))

    # ---- topics

    @cached_property
    def _permissions(self) -> dict[str, int]:
        return {topic: data.permission for topic, data in self.route.topics().items()}

    @property
    def topics(self) -> list[str]:
        """The topics that have messages, and those that users made."""
        return [
            topic
            for topic, permission in self._permissions.items()
            if is_listed(topic, permission) or any(bounds.max_offset for bounds in self._bounds_of(topic).values())
        ]

    listed_topics = topics

    def _bounds_of(self, topic: str) -> dict[MessageQueue, QueueBounds]:
        """Return the queues of a topic as they were when first asked for."""
        if topic not in self._bounds:
            self._bounds[topic] = self.route.queues(topic)
        return self._bounds[topic]

    def queues(self, topic: str) -> dict[MessageQueue, range]:
        """Return the queue offsets of the messages in each queue of a topic, as they were when first asked for."""
        return {queue: range(bounds.min_offset, bounds.max_offset) for queue, bounds in self._bounds_of(topic).items()}

    def queue_offset_at(self, queue: MessageQueue, time_ms: int) -> int:
        """Return the queue offset that the broker has for a time."""
        from librmq.protocol import QueueOffsetAt

        return self.route.endpoint(queue.broker_name).call(QueueOffsetAt(queue.topic, queue.queue_id, time_ms))

    def stored_at(self, queue: MessageQueue, queue_offset: int) -> int | None:
        """Return a store time; None if the message is gone, or the topic's permission forbids to read it."""
        bounds = self._bounds_of(queue.topic).get(queue)
        if bounds is not None and queue_offset == bounds.max_offset - 1:
            return bounds.last_timestamp_ms or None
        message = self.message_of(queue, queue_offset)
        return None if message is None else message.store_timestamp_ms

    def times_of(self, queue: MessageQueue, offsets: range) -> tuple[int | None, int | None]:
        """Return the store times of the first and the last of some messages of a queue: a broker tells no others."""
        return self.stored_at(queue, offsets[0]), self.stored_at(queue, offsets[-1])

    def span(self, queue: MessageQueue, begin_ms: int, end_ms: int) -> range:
        """Return a run of queue offsets by those that the broker has for both times, with one more at each end."""
        offsets = self.queues(queue.topic)[queue]
        begin = self.queue_offset_at(queue, begin_ms) - 1 if begin_ms > 0 else offsets.start
        end = self.queue_offset_at(queue, end_ms) + 2 if end_ms < LAST_MS else offsets.stop
        return range(max(begin, offsets.start), min(max(end, offsets.start), offsets.stop))

    # ---- groups

    @cached_property
    def resent_times(self) -> Mapping[RecordIdentity, int]:
        """The times at which dead letters were last sent to their groups again, as far as that is known."""
        return {} if self._folder is None else resent_times(self._folder, DiskFiles())

    @cached_property
    def resent_letters(self) -> Counter[str] | None:
        """How many dead letters of each group were sent again; None if that is unknown."""
        if self._folder is None or not self.resent_times:
            return None if self._folder is None else Counter()
        with StoreView.open(self._folder) as view:
            return view.resent_letters

    @cached_property
    def groups(self) -> list[str]:
        """The groups that brokers know, with the groups that retry and dead-letter topics name, sorted."""
        groups = self.route.groups().keys()
        every = sorted(groups | groups_of_topics(self.topics, groups))
        if self._most_groups is None:
            return every
        users = [group for group in every if not is_own_group(group)]
        self.left_out = len(users[self._most_groups :])
        return users[: self._most_groups]

    def consumed(self, group: str, topic: str | None = None) -> Iterator[tuple[str, dict[MessageQueue, QueueProgress]]]:
        """Yield the topics in which a group has progress, sorted, or one of them, each with its queues."""
        progress = self.route.progress(group, topic)
        for name, queues in groupby(progress, key=lambda queue: queue.topic):
            ranges = self.queues(name)
            yield (
                name,
                {
                    queue: QueueProgress(
                        ranges.get(queue, range(0)).start, progress[queue].max_offset, progress[queue].queue_offset
                    )
                    for queue in queues
                },
            )

    def messages(self, queue: MessageQueue, offsets: range) -> Iterator[StoredMessage]:
        """Yield the messages of a queue with these queue offsets, without deleted ones.

        Raises:
            BrokerError: The topic's permission forbids to read it.
        """
        return self.route.messages_in(queue, offsets)


LiveView: TypeAlias = StoreView | ClusterView
