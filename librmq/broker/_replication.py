"""The master's side of replication: log bytes for replicas, and sends that wait for a replica.

Mirrors ``HAService``, ``HAConnection`` and ``CommitLog.submitReplicaRequest``. A replica requests the bytes after a
physical offset, and thereby acknowledges all bytes before it. With ``replication="sync"`` the thread of a send first
lets the replicas copy, so that one copy serves many senders, and then waits. Topics that a replica lacks come with the
bytes, because a message without its topic can't be seen on the replica.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from librmq.broker._context import BrokerContext
from librmq.clock import moves_by_itself
from librmq.protocol import (
    CopiedTables,
    CopyTables,
    DescribeLog,
    FollowLog,
    LeaveLog,
    LogBytes,
    LogDescription,
    SendStatus,
)
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Event, Lock

_log = EventLog("librmq.broker")
_OK: Final = SendStatus.SEND_OK


@dataclass(slots=True, eq=False)
class _Follower:
    """A replica as its master sees it."""

    acknowledged: int = 0
    follow: Callable[[], int] | None = None
    take: Callable[[int, bytes], int] | None = None
    notify: Callable[[], None] | None = None
    behind_since_ms: int | None = None
    """Time since which the replica has lacked bytes of the master; None while it has all."""
    topics_version: int = 0


_acknowledged: Final = attrgetter("acknowledged")


class Replication:
    """The replicas of one broker. Thread-safe."""

    def __init__(self, context: BrokerContext) -> None:
        config = context.config
        self._check_open = context.life.check_open
        self._context = context
        self._store = context.store
        self._clock = context.runner.clock
        self._now_ms = context.runner.now_ms
        self._timeout_s = config.replica_timeout_s
        self._expiry_ms = round(1000 * config.replica_expiry_s)
        self._max_lag = config.replica_max_lag
        self._is_sync = config.replication == "sync"
        self._opened = object()
        self._followers: dict[str, _Follower] = {}
        self._all: tuple[_Follower, ...] = ()
        self._is_watched = False
        self._table_watchers: dict[str, Callable[[], None]] = {}
        self._table_copiers: dict[str, Callable[[int, bool], bool]] = {}
        self._late = set[str]()  # replicas that have not copied for the last request
        self._guard = Lock()
        self._acknowledged = Event()
        self._waiting = 0

    # ---- requests of replicas

    def describe(self, _: DescribeLog) -> LogDescription:
        self._check_open()
        store = self._store
        files = None if store.files.is_shared else store.files
        place = files, os.path.realpath(store.path)
        return LogDescription(self._context.name, place, store.config, store.log.begin, store.log.end)

    def follow_log(self, request: FollowLog) -> LogBytes:
        """Record what a replica has, and return the bytes that follow."""
        self._check_open()
        log, at = self._store.log, request.physical_offset
        end = log.end
        if at > end:  # the replica finds out from the end in the answer
            return LogBytes(b"", log.begin, end, opened=self._opened)
        follower = self._acknowledge(request) if request.replica else None
        version = self._context.topics.version  # after the end, and before the rows
        has_topics = follower is None or request.topics_version == version
        topics = None if has_topics else dict(self._context.tables.topics.rows)
        data = b"" if at < log.begin else log.data_at(at, min(request.size, end - at))
        is_held = not data and at >= log.begin and request.notify is not None and follower is not None
        if is_held and follower is not None:
            self._watch(follower, request)
        return LogBytes(data, log.begin, end, is_held, self._opened, topics, version)

    def _acknowledge(self, request: FollowLog) -> _Follower:
        with self._guard:
            follower = self._followers.get(request.replica)
            if follower is None:
                follower = self._followers[request.replica] = _Follower()
                self._all = tuple(self._followers.values())
            follower.follow, follower.take = request.follow, request.take
            follower.topics_version = request.topics_version
            self._record(follower, request.physical_offset)
            return follower

    def _watch(self, follower: _Follower, request: FollowLog) -> None:
        """Notify a replica of the next append, only once after several requests."""
        with self._guard:
            follower.notify = request.notify
            is_watched, self._is_watched = self._is_watched, True
        if not is_watched:
            self._store.watch(request.physical_offset, self._notify_followers)

    def _record(self, follower: _Follower, acknowledged: int) -> None:
        """Record what a replica has, and wake the sends that wait for it. Called under the guard."""
        follower.acknowledged, follower.behind_since_ms = acknowledged, None
        if self._waiting:
            waited_for, self._acknowledged = self._acknowledged, Event()
            waited_for.set()

    def _notify_followers(self) -> None:
        notified, now_ms = [], self._now_ms()
        with self._guard:
            self._is_watched = False
            for follower in self._followers.values():
                if follower.notify is not None:
                    notified.append(follower.notify)
                    follower.notify = None
                    if follower.behind_since_ms is None:
                        follower.behind_since_ms = now_ms
        for notify in notified:
            notify()

    def remove_replica(self, request: LeaveLog) -> None:
        with self._guard:
            self._followers.pop(request.replica, None)
            self._all = tuple(self._followers.values())
        self._table_watchers.pop(request.replica, None)
        self._table_copiers.pop(request.replica, None)
        self._late.discard(request.replica)

    def snapshot_tables(self, request: CopyTables) -> CopiedTables:
        """Return the current tables. Called under the runner's lock."""
        tables = self._context.tables
        self._context.offsets.adopt()
        if request.notify is not None:
            if not self._table_watchers:
                self._context.writing.watchers.append(self._tables_changed)
            self._table_watchers[request.replica] = request.notify
        if request.copy is not None:
            self._table_copiers[request.replica] = request.copy
        starts = {group: dict(row) for group, row in tables.starts.rows.items()}
        progress = tables.offsets.rows
        moved = (f"{topic}@{group}" for group, row in starts.items() for topic in row)
        names = [name for name in moved if name in progress] if request.is_early else progress
        return CopiedTables(
            dict(tables.topics.rows),
            dict(tables.groups.rows),
            {name: dict(progress[name]) for name in names},
            dict(tables.delays.rows),
            self._context.cancellations.rows(),
            self._context.topics.version,
            starts,
            self._tables_version(),
            dict(tables.schedules.rows),
        )

    def _tables_changed(self) -> None:
        """Notify the replicas. Called under the runner's lock."""
        watchers, self._table_watchers = self._table_watchers, {}
        for notify in watchers.values():
            notify()

    def _tables_version(self) -> int:
        return self._context.cancellations.version + self._context.offsets.starts_version

    def copy_tables_early(self, *, is_closing: bool = False) -> None:
        """Let replicas copy the cancellations and marks that they lack, because clients rely on them.

        With "sync" and before closing they have them when this returns; a warning says if one has not.
        """
        version, waits = self._tables_version(), self._is_sync or is_closing
        for replica, copy in list(self._table_copiers.items()):
            has_copied = copy(version, waits)
            with self._guard:
                if not waits or has_copied != (replica in self._late):
                    continue
                self._late ^= {replica}
            if has_copied:
                _log.info("%(path)s: the replica has all cancellations and starts of groups again", path=replica)
            else:
                _log.warning(
                    "%(path)s: the replica lacks a cancellation or the start of a group, because it has not copied it "
                    "in time; a promotion before its next copy undoes it",
                    path=replica,
                )

    # ---- sends

    @property
    def has_followers(self) -> bool:
        """Whether at least one replica has made a request and not left."""
        return bool(self._followers)

    @property
    def replica_count(self) -> int:
        """Number of replicas that follow."""
        return len(self._available())

    def confirm(self, end: int) -> SendStatus:
        """Wait until a replica has the log up to ``end`` or the time is over; return the status of the send."""
        monotonic = self._clock.monotonic
        deadline = monotonic() + self._timeout_s
        followers = self._available()
        if not followers or (end - max(map(_acknowledged, followers)) > self._max_lag):
            return SendStatus.SLAVE_NOT_AVAILABLE
        for follower in followers:
            if follower.acknowledged < end and follower.follow is not None:
                reached = self._copy_to(follower, end)
                if reached > follower.acknowledged:
                    with self._guard:
                        self._record(follower, max(reached, follower.acknowledged))  # another send may be ahead
                elif follower.behind_since_ms is None:
                    follower.behind_since_ms = self._now_ms()
            if follower.acknowledged >= end and monotonic() <= deadline:
                return _OK
        with self._guard:
            self._waiting += 1
        try:
            return self._wait(followers, end, deadline)
        finally:
            with self._guard:
                self._waiting -= 1

    def _copy_to(self, follower: _Follower, end: int) -> int:
        """Let a replica copy immediately; return the physical offset up to which it has the log."""
        at, log = follower.acknowledged, self._store.log
        has_topics = follower.topics_version == self._context.topics.version
        is_in_file = at % log.file_size + end - at < log.file_size and log.begin <= at  # and before its blank
        if follower.take is not None and has_topics and is_in_file:
            return follower.take(at, log.data_at(at, end - at))
        return 0 if follower.follow is None else follower.follow()

    def _wait(self, followers: Sequence[_Follower], end: int, deadline: float) -> SendStatus:
        while True:
            acknowledged = self._acknowledged
            if any(follower.acknowledged >= end for follower in followers) and self._clock.monotonic() <= deadline:
                return _OK
            left = deadline - self._clock.monotonic()
            if left <= 0 or not moves_by_itself(self._clock):  # a manual clock stands still while a send waits
                return SendStatus.FLUSH_SLAVE_TIMEOUT
            self._clock.wait(acknowledged, left)

    def _available(self) -> tuple[_Follower, ...]:
        """Return the replicas that have the whole log or made a request recently."""
        followers = self._all
        if len(followers) == 1 and followers[0].behind_since_ms is None:
            return followers
        now_ms = self._now_ms()
        return tuple(
            follower
            for follower in followers
            if (since := follower.behind_since_ms) is None or now_ms - since < self._expiry_ms
        )
