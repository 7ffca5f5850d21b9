"""A store to examine: in a folder that no process uses, in one that another process uses, or a broker's own.

::

    folder, not in use   the result of a recovery in memory; time is that of the last message
    folder, in use       the writer's current messages; its tables can be some seconds old; time is now
    running broker       its own store and tables, its clients, their threads; time is that of its runner

Nothing is locked and no byte of a file changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Self, TypeAlias

from librmq.clock import Clock, SystemClock
from librmq.errors import CorruptionError
from librmq.files.disk import DiskFiles
from librmq.files.interface import Files
from librmq.message.message import StoredMessage
from librmq.message.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX
from librmq.store import MessageStore
from librmq.store.engine.store_parts import QueueName, QueueState
from librmq.store.format import directory
from librmq.store.format.broker_tables import BrokerTables

if TYPE_CHECKING:
    from librmq.broker import Broker

_OWN_GROUPS = frozenset(("TOOLS_CONSUMER", "FILTERSRV_CONSUMER", "SELF_TEST_C_GROUP"))


def is_own_group(group: str) -> bool:
    """Return whether a group is the broker's own."""
    return group.startswith("CID_") or group in _OWN_GROUPS


class StoreView:
    """A store at one moment, opened by `open` or `of`. Not thread-safe."""

    store: MessageStore
    broker: Broker | None
    """The running broker, without which instances and threads are unknown; None for a folder."""
    owner: str | None
    """The process that has the folder open for writing, None without one; ``this process`` for a broker."""

    def __init__(self, store: MessageStore, broker: Broker | None, owner: str | None) -> None:
        self.store = store
        self.broker = broker
        self.owner = owner
        self._opened = False
        self._tables: BrokerTables | None = None
        self._now_ms: int | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        now_ms: int | None = None,
        files: Files | None = None,
        clock: Clock | None = None,
    ) -> Self:
        """Open the store in ``path`` for reading, whether a process uses it or not.

        Args:
            path: The store's folder.
            now_ms: The time for ages; by default now for a store in use, else that of its last message.
            files: The file system; the disk by default.
            clock: The clock; the machine's by default.

        Raises:
            NotAStoreError: There is no store, or one of another kind.
            CorruptionError: A file is damaged in a way that no crash explains.
        """
        files, path = files or DiskFiles(), os.fspath(path)
        directory.check_kind(path, files)
        owner = files.lock_holder(directory.lock_path(path))
        store = MessageStore.open(path, read_only=True, files=files, clock=clock)
        view = cls(store, None, owner)
        view._opened = True
        if now_ms is not None:
            view._now_ms = now_ms
        elif owner is not None:
            view._now_ms = (clock or SystemClock()).now_ms()
        return view

    @classmethod
    def of(cls, broker: Broker) -> Self:
        """View the store of a running broker.

        Raises:
            StoreClosedError: The broker is closed.
        """
        view = cls(broker.store, broker, "this process")
        view._now_ms = broker.runner.now_ms()
        return view

    @classmethod
    def over(cls, store: MessageStore, tables: BrokerTables | None = None) -> Self:
        """View an open store; ``tables`` are by default those in its folder."""
        view = cls(store, None, None if store.read_only else "this process")
        view._tables = tables
        return view

    @property
    def is_live(self) -> bool:
        """Whether instances, threads and held messages are known."""
        return self.broker is not None

    @property
    def tables(self) -> BrokerTables:
        """Topics, groups and progress; without progress for a store that is shown at an earlier moment."""
        if self.broker is not None:
            return self.broker.tables
        if self._tables is None:
            self._tables = BrokerTables.open(os.path.join(self.store.path, directory.CONFIG), files=self.store.files)
            if self.store.past_ms is not None:
                self._tables.drop_progress()
        return self._tables

    @cached_property
    def progress(self) -> dict[tuple[str, str], dict[int, int]]:
        """Queue offsets by queue id, by group and topic; for a running broker the present ones.

        A running group has an item for each topic that it subscribes to, even without progress.
        """
        broker = self.broker
        if broker is None:
            return self.tables.progress()
        from librmq.protocol import MessageModel  # asyncio comes with it, which a folder does not need

        with broker.runner.lock:
            progress = self.tables.progress()
            for group in sorted({group for client in broker.clients() for group in client.consumer_groups}):
                connections = broker.connections(group)
                if connections is not None and connections.model is MessageModel.CLUSTERING:
                    for topic in connections.subscriptions:
                        progress.setdefault((group, topic), {})
            return progress

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The consumer groups in the tables, and of the topics of retries and dead letters, sorted."""
        groups = {group for group, _ in self.progress} | set(self.tables.groups.rows)
        for topic in self.topics:
            for prefix in (RETRY_PREFIX, DEAD_LETTER_PREFIX):
                if topic.startswith(prefix):
                    groups.add(topic.removeprefix(prefix))
        return tuple(sorted(groups))

    @cached_property
    def ranges(self) -> dict[QueueName, QueueState]:
        """The begin and end of each queue, sorted by topic and queue id."""
        queues = self.store.queues
        states = queues.states()
        ranges = {}
        for name in sorted(queues):
            state = states.get(name)
            if state is None:
                queue = queues[name]
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

    def message(self, topic: str, queue_id: int, queue_offset: int) -> StoredMessage | None:
        """Return a message of a queue; None if it is deleted."""
        return next(self.store.messages(topic, queue_id, queue_offset, queue_offset + 1), None)

    def message_count(self, topic: str | None = None) -> int:
        """Return the number of messages of a topic, or of all queues."""
        topics = self.topics if topic is None else [topic]
        ranges = (self.ranges[name, queue_id] for name in topics for queue_id in self.topics.get(name, ()))
        return sum(state.max_offset - state.min_offset for state in ranges)

    def queue_count(self, topic: str) -> int:
        """Return the number of queues of a topic, including those without messages."""
        row = self.tables.topics.rows.get(topic, {})
        return max(len(self.topics.get(topic, ())), int(row.get("readQueueNums", 0)))

    @cached_property
    def now_ms(self) -> int | None:
        """The time for ages; None for an unused folder without messages."""
        if self._now_ms is not None:
            return self._now_ms
        return self._last_timestamp_ms() if self.store.past_ms is None else self.store.past_ms

    def age_s(self, timestamp_ms: int | None) -> float | None:
        """Return the seconds since a time, never below 0; None if it is unknown."""
        if timestamp_ms is None or self.now_ms is None:
            return None
        return max(0, self.now_ms - timestamp_ms) / 1000

    def _last_timestamp_ms(self) -> int | None:
        """Return the store time of the last message, usually that at the log's end."""
        ends = sorted(((state.max_physic_offset, name) for name, state in self.ranges.items()), reverse=True)
        times = (self.stored_at(name, self.ranges[name].max_offset - 1) for _, name in ends[:8])
        return next((time_ms for time_ms in times if time_ms is not None), None)

    def stored_at(self, name: QueueName, queue_offset: int) -> int | None:
        """Return the store time of a message of a queue; None if it is deleted or unreadable."""
        with suppress(CorruptionError):
            entry = self.store.queues[name].entry(queue_offset)
            if entry is not None:
                return self.store.log.store_timestamp_ms(entry.physical_offset, entry.size)
        return None

    def close(self) -> None:
        """Close the store, if `open` opened it."""
        if self._opened:
            self._opened = False
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<StoreView of {self.store.path!r}, {'live' if self.is_live else self.owner or 'not in use'}>"


Source: TypeAlias = "StoreView | Broker | str | os.PathLike[str]"
"""The source of a diagnosis: a view, a running broker, or the folder of a store."""


@contextmanager
def viewed(source: Source) -> Iterator[StoreView]:
    """View a store, a broker or a folder; close the store if this opened it."""
    if isinstance(source, StoreView):
        yield source
    elif isinstance(source, str | os.PathLike):
        with StoreView.open(source) as view:
            yield view
    else:
        yield StoreView.of(source)
