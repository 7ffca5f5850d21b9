"""A replica: a store that copies its master's log as it grows, and a broker that serves reads from the copy.

::

    master                          replica
    log      ── FollowLog ───────>  log, byte for byte; the replica derives queues and index like the master
    topics   ── FollowLog ───────>  topics, before the bytes of messages in new ones
    tables   ── CopyTables ──────>  topics, groups, progress of consumers and delays; every 10 s if they have changed,
                                    and at once when a message is cancelled or ``start_at`` moves a group

Mirrors ``HAClient`` and ``SlaveSynchronize``. The tables are copied separately from the log, so after a failover
consumers receive again what they consumed since the last copy of their progress. The store of another process, which
is copied from its files, gives its topics with the tables only.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Final, Self, TypeVar, cast

from librmq.broker import Broker, BrokerConfig
from librmq.clock import Clock, SystemClock
from librmq.cluster._replica_admission import check_bytes, check_folder, check_origin
from librmq.commitlog import CommitLog
from librmq.config import Between, Config, Seconds, check_kind, check_path
from librmq.errors import (
    BrokerError,
    BrokerUnreachableError,
    FlushFailedError,
    NotAStoreError,
    ReplicaError,
    RmqError,
    StoreClosedError,
    StoreError,
)
from librmq.files import DiskFiles, Files
from librmq.files.interface import confine, fixed_path
from librmq.metrics import Metrics
from librmq.override import override
from librmq.protocol import (
    CopiedTables,
    CopyTables,
    DescribeLog,
    Endpoint,
    FollowLog,
    LeaveLog,
    LogBytes,
    LogDescription,
    Request,
    ResponseCode,
)
from librmq.runtime import Runner, Step, ThreadRunner, Work, calls_later
from librmq.runtime.closing import Closing
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.runtime.runner import next_on_grid
from librmq.scheduling.waiting import Cancellations
from librmq.store import BrokerTables, MessageStore
from librmq.store.engine.copies import whole_size
from librmq.store.format import directory
from librmq.store.format.documents import OWN_FOLDER, ReplicaMark

# ---- a store on disk as a master

R = TypeVar("R")


class StoredMaster(Endpoint):
    """An `Endpoint` that serves a replica from the files of a store, without changing them. Thread-safe.

    It can't wait for the writer, so a replica checks it from time to time, and no send waits for such a replica.
    """

    def __init__(self, path: str | os.PathLike[str], *, files: Files | None = None, clock: Clock | None = None) -> None:
        """Open the store in ``path`` for reading.

        Raises:
            NotAStoreError: The folder has no store.
            CorruptionError: The store is damaged.
        """
        self._files = files or DiskFiles()
        self.path: str = fixed_path(path, self._files)
        self._last_tables: tuple[bytes, CopiedTables] | None = None  # tables with the digest of their files
        self._store = MessageStore.open(self.path, read_only=True, files=self._files, clock=clock or SystemClock())
        if not self._store.queues.has_files:
            raise NotAStoreError(
                f"{self.path}: expected a store with its queues in files, because a copy of its log makes them again: "
                "`librmq extract` copies the messages of this one"
            )

    @override
    def call(self, request: Request[R], /) -> R:
        """Answer a replica's request.

        Raises:
            BrokerUnreachableError: The files can't be read at the moment.
        """
        try:
            return cast(R, self._answer_request(request))
        except StoreError as error:
            raise BrokerUnreachableError(f"{self.path} cannot be read: {error}") from error

    def _answer_request(self, request: Request[Any]) -> object:
        store = self._store
        if isinstance(request, FollowLog):
            if _log_end(store.log) <= request.physical_offset:
                store.refresh()
            log, at = store.log, request.physical_offset
            end = _log_end(log)
            data = log.data_at(at, min(request.size, end - at)) if log.begin <= at < end else b""
            return LogBytes(data, log.begin, end)
        if isinstance(request, DescribeLog):
            store.refresh()
            place = None if self._files.is_shared else self._files, os.path.realpath(self.path)
            return LogDescription(self.path, place, store.config, store.log.begin, _log_end(store.log))
        if isinstance(request, CopyTables):
            return self._tables()
        if isinstance(request, LeaveLog):
            return None
        raise BrokerError(
            ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f"{self.path} does not know {type(request).__name__}"
        )

    def _tables(self) -> CopiedTables:
        """Return the tables, which are read again only if the content of their files has changed.

        A broker rewrites its files every few seconds with the same content, so their times say nothing.
        """
        digest, last = self._digest(), self._last_tables
        if last is not None and last[0] == digest:
            return last[1]
        tables = BrokerTables.open(os.path.join(self.path, directory.CONFIG), files=self._files)
        copied = CopiedTables(
            tables.topics.rows,
            tables.groups.rows,
            tables.offsets.rows,
            tables.delays.rows,
            Cancellations(self.path, self._files).rows(),
            starts=tables.starts.rows,
            schedules=tables.schedules.rows,
        )
        # If a file was written meanwhile, these tables can be older than the next digest.
        self._last_tables = (digest, copied) if self._digest() == digest else None
        return copied

    def _digest(self) -> bytes:
        """Return a digest of the names in the folders of tables, and of the contents of these tables."""
        digest = hashlib.blake2b()
        for folder in (directory.CONFIG, OWN_FOLDER):
            for entry in sorted(self._files.list(os.path.join(self.path, folder))):
                is_table = not entry.is_folder and entry.name.endswith((".json", ".json.bak"))
                data = self._files.read(os.path.join(self.path, folder, entry.name)) if is_table else b""
                digest.update(b"%s\0%d\0" % (os.fsencode(entry.name), len(data)))
                digest.update(data)
        return digest.digest()

    def close(self) -> None:
        """Release the store."""
        self._store.close()


def _log_end(log: CommitLog) -> int:
    """Return the log's end, after the blank of its last file.

    While a writer runs, a reader ends the log before that blank; without one, after it.
    """
    return log.end + log.blank_at(log.end)


# ---- the replica


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig(Config):
    """Times and sizes that control how a replica follows."""

    follow_after_s: Annotated[float, Seconds()] = 0.05
    """Time from the master's append to the copy, which many messages share. Sends with ``sync`` do not wait for it."""
    copy_tables_every_s: Annotated[float, Seconds()] = 10
    """Interval at which changed topics, groups and progress are copied."""
    retry_after_s: Annotated[float, Seconds()] = 5
    """Time to the next attempt if the master is unreachable; it doubles up to a minute."""
    look_every_s: Annotated[float, Seconds()] = 0.1
    """Interval between checks of the files of another process's store, which can't notify."""
    chunk_size: Annotated[int, Between(256)] = 1 << 20
    """Most bytes in one copy, except for a longer record."""


_log = EventLog("librmq.cluster")

_MOST_AT_ONCE: Final = 8 << 20
"""Bytes that one turn copies."""
_LONGEST_RETRY_MS: Final = 60_000
_LONGEST_WAIT_S: Final = 1
"""Time that a request of the master waits for another copy of the tables."""


class Replica(Closing):
    """A copy of a master's store, which follows the master until it is closed. Thread-safe.

    Created by `open`; a context manager that closes it.
    """

    broker: Broker
    """Serves reads under the master's name: pulls, queries, progress. It refuses writes."""
    path: str
    runner: Runner
    dead: bool
    """Whether the replica was closed."""
    failure: ReplicaError | None
    """Why the replica has stopped following; None while it follows."""
    _own_runner: ThreadRunner | None
    _files: Files
    _config: ReplicaConfig
    _metrics: Metrics | None
    _master: Endpoint
    _take: Callable[[int, bytes], int] | None

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("open a replica by Replica.open(path, of=broker)")

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        of: Broker | Endpoint | str | os.PathLike[str],
        config: ReplicaConfig | None = None,
        runner: Runner | None = None,
        files: Files | None = None,
        metrics: Metrics | None = None,
    ) -> Self:
        """Open the replica in ``path``, a new folder or an earlier copy of this master, and start following.

        Args:
            path: The folder of the copy.
            of: The master: a broker of this process, a link to one, or the folder of a store that any process writes.
            config: Times and sizes.
            runner: Runs its turns. None uses the runner of a `Broker`; for a folder it starts threads.
            files: The file system. None uses the `Broker`'s, or the disk.
            metrics: Gets the gauges of the copy.

        Raises:
            ReplicaError: The folder can't copy this master: it is the master's, has an independent store or a copy of
                another master, or is ahead of the master. Nothing was changed.
            BrokerUnreachableError: The master is closed.
            StoreLockedError: Another process has the copy open for writing.
        """
        check_path("path", path, "the folder of the copy")
        check_kind("config", config, ReplicaConfig)
        check_kind("runner", runner, Runner, "ManualRunner() or ThreadRunner()")
        if isinstance(of, Broker):
            runner, files = runner or of.runner, files or of.store.files
        own_runner = master = None
        if runner is None:
            own_runner = runner = ThreadRunner()
        files = files or DiskFiles()
        replica = object.__new__(cls)
        replica.path, replica.runner, replica._own_runner = fixed_path(path, files), runner, own_runner
        replica._files, replica._config, replica._metrics = files, config or ReplicaConfig(), metrics
        try:
            master = _endpoint(of, files, runner)
            described = master.call(DescribeLog())
            was_killed = check_folder(replica.path, files, runner.clock, master, described)
            replica._begin_following(master, described, was_killed=was_killed)
        except BaseException:
            if isinstance(master, StoredMaster):
                master.close()
            if own_runner is not None:
                own_runner.shutdown()
            raise
        return replica

    def _begin_following(self, master: Endpoint, described: LogDescription, *, was_killed: bool) -> None:
        self.broker = Broker.open(
            self.path,
            BrokerConfig(replica_of=described.name),
            name=described.name,
            store_config=described.config,
            runner=self.runner,
            files=self._files,
            metrics=self._metrics,
        )
        self._store, self._copied = self.broker.store, self.broker.copied
        self.dead, self.failure = False, None
        self._set_master(master)
        self._opened = object()  # so that the first answer is compared
        self._described = described
        self._master_end = described.end
        self._id = os.path.realpath(self.path)
        self._following = Lock()
        self._copying_tables, self._copying_topics = Lock(), Lock()  # so that no older copy replaces a newer one
        self._retry_ms = self._first_retry_ms = round(1000 * self._config.retry_after_s)
        self._tables_ms = round(1000 * self._config.copy_tables_every_s)
        self._begun_ms = self.runner.now_ms()
        self._first = described.begin
        self._copied_end = 0  # the copy has the log before this, on its device if its settings require it
        self._is_reached = True
        self._tables_version = -1  # the version of the last copy from this master
        self._is_held = self._is_send_waiting = self._are_tables_watched = self._has_tables = False
        self._step = Step(f"{described.name} replica follows", self._submit_follow, self)
        self._tables_step = Step(f"{described.name} replica copies tables", self._submit_tables, self)
        if self._metrics is not None:
            self._metrics.gauge("replica_lag_bytes", lambda: self.lag_bytes, owner=self)
        try:
            self._mark()
            if was_killed:
                torn_at = check_bytes(self.path, self.store.log, master, described, was_killed=True)
                if torn_at is not None:
                    self.store.writer.cut_copy(torn_at)
            self._copied_end = self.end
            reached = self._copy_log(_MOST_AT_ONCE) and self._copy_tables()
        except BaseException:
            self.abandon()
            raise
        with self.runner.lock:
            self._followed(reached, None)
            self._tables_copied(reached, None)

    def _set_master(self, master: Endpoint) -> None:
        self._master = master
        # A link in between can be cut, so the replica asks it for each copy.
        self._take = partial(self._take_for_send, master) if isinstance(master, Broker) else None
        self._topics_version = 0

    def _mark(self) -> None:
        mark = ReplicaMark(self.broker.name, self._described.place[1])
        if ReplicaMark.read(self.path, self._files) != mark:
            mark.write(self.path, self._files)

    # ---- state of the copy

    @property
    def store(self) -> MessageStore:
        """The copied store, for reading."""
        return self.broker.store

    @property
    def end(self) -> int:
        """Physical offset up to which the replica has the master's log."""
        return self.store.log.end

    @property
    def lag_bytes(self) -> int:
        """Bytes that the replica lacks, according to the master's last answer."""
        return max(0, self._master_end - self.end)

    @property
    def reaches_master(self) -> bool:
        """Whether the master answered the last request."""
        return self._is_reached

    def follow(self) -> bool:
        """Copy everything that the master has now, including its tables; return whether the master was reachable.

        Raises:
            ReplicaError: The replica has stopped following.
        """
        reached = self._copy_log(None) and self._copy_tables()
        if self.failure is not None:
            raise self.failure
        return reached

    def reconnect(self, master: Broker | Endpoint) -> None:
        """Follow a master that was reopened.

        Raises:
            ReplicaError: It is another store, or has lost messages that the replica has. The replica stays as it is.
            BrokerUnreachableError: It is closed.
        """
        with calls_later(), self._following:
            self._admit(master)
            if isinstance(self._master, StoredMaster) and self._master is not master:
                self._master.close()
            self._set_master(master)
            self.failure, self._are_tables_watched = None, False
            self._master_end, self._retry_ms = self._described.end, self._first_retry_ms
        with self.runner.lock:
            self.runner.wake(self._step)
            self.runner.wake(self._tables_step)

    def _admit(self, master: Endpoint) -> None:
        """Check that the copy is a part of the master's log; see `reconnect`."""
        described = master.call(DescribeLog())
        check_origin(self.path, ReplicaMark.read(self.path, self._files), self.store.log, described)
        check_bytes(self.path, self.store.log, master, described)
        self._described = described
        self._mark()

    # ---- following the log

    def _submit_follow(self, _: int) -> int | None:
        self.runner.submit(Work(self._step.label, partial(self._copy_log, _MOST_AT_ONCE), self._followed, self))
        return None

    def _followed(self, reached: bool | None, error: Exception | None) -> None:
        """Schedule the next copy. Called under the runner's lock."""
        if error is not None:
            _log.error("%(path)s: the replica could not copy: %(error)s", path=self.path, error=error)
        if self.failure is not None:
            return
        now_ms = self.runner.now_ms()
        if not reached:
            self.runner.wake(self._step, now_ms + self._retry_ms)
            self._retry_ms = min(2 * self._retry_ms, max(_LONGEST_RETRY_MS, self._first_retry_ms))
            return
        self._retry_ms = self._first_retry_ms
        if not self._has_tables:
            self.runner.wake(self._tables_step)
        if not self._is_held:
            wait_ms = 0 if self.lag_bytes else round(1000 * self._config.look_every_s)
            self.runner.wake(self._step, now_ms + wait_ms)

    def _notified(self) -> None:
        """Note that the master has more. Called in the thread of an append."""
        runner = self.runner
        with runner.lock:
            if not self.dead:
                runner.wake(self._step, runner.now_ms() + round(1000 * self._config.follow_after_s))

    @calls_later()
    def _follow_for_send(self) -> int:
        """Copy immediately, in the thread of a waiting send, unless another thread is already copying.

        Return the physical offset up to which the replica has the log.
        """
        self._is_send_waiting = True
        while not self.dead and self._is_send_waiting and self._following.acquire(blocking=False):
            try:
                self._is_send_waiting = False
                queues, _ = self._copy(None, is_enough=True)
            except RmqError as error:  # the status of the send says so
                _log.error("%(path)s: the replica could not copy: %(error)s", path=self.path, error=error)
                break
            finally:
                self._following.release()
            self._copied(queues)  # without the lock: the thread that holds the runner's may be waiting for this
        return self._copied_end

    @calls_later()
    def _take_for_send(self, master: Broker, at: int, data: bytes) -> int:
        """Add bytes that the master has in memory, or copy as `_follow_for_send` does."""
        self._is_send_waiting = True
        if not self._following.acquire(blocking=False):
            return self._follow_for_send()
        try:
            self._is_send_waiting = False
            if self.dead or self.failure is not None or self._master is not master or self._copied_end != at:
                return self._copied_end
            queues = self._add(at, data, is_checked=True)
        except RmqError as error:
            _log.error("%(path)s: the replica could not copy: %(error)s", path=self.path, error=error)
            return self._copied_end
        finally:
            self._following.release()
        self._copied(queues)
        return self._follow_for_send() if self._is_send_waiting else self._copied_end

    def _copy_log(self, limit: int | None) -> bool:
        """Copy up to ``limit`` bytes, or everything if None; return whether the master was reachable."""
        while True:
            with calls_later(), self._following:
                self._is_send_waiting = False
                queues, reached = self._copy(limit)
            self._copied(queues)
            if not self._is_send_waiting or not reached:
                return reached

    def _copy(self, limit: int | None, *, is_enough: bool = False) -> tuple[set[tuple[str, int]], bool]:
        """Copy up to ``limit`` bytes; return the queues that got messages, and whether the master was reachable.

        With ``is_enough`` the copy ends where the master's log ended at the first answer. Otherwise it ends with a
        request that finds nothing, which acknowledges everything and lets the master notify the replica.
        """
        store, size, copied = self.store, self._config.chunk_size, 0
        queues: set[tuple[str, int]] = set()
        while not self.dead and self.failure is None and (limit is None or copied < limit):
            at = self._next_offset()
            try:
                answer = self._master.call(
                    FollowLog(
                        self._id, at, size, self._notified, self._follow_for_send, self._take, self._topics_version
                    )
                )
                is_same = self._is_same_log(answer)
            except (BrokerUnreachableError, StoreClosedError) as error:
                self._note_unreachable(error)
                return queues, False
            if not self._is_reached:
                self._is_reached = True
                _log.info("%(path)s: the replica follows its master again", path=self.path)
            self._master_end, self._is_held = answer.end, answer.is_held
            if not is_same or not self._continues_copy(at, answer):
                continue
            if answer.topics is not None:
                self._add_topics(answer.topics, answer.topics_version)
            left = store.log.file_size - at % store.log.file_size
            complete, needed = len(answer.data), 0
            if at + complete != answer.end:  # otherwise the last record is whole too
                complete, needed = whole_size(answer.data, left)
            if complete:
                queues.update(self._add(at, answer.data[:complete]))
                copied, size = copied + complete, self._config.chunk_size
                if is_enough and at + complete >= answer.end:
                    break
            elif answer.data and size < left:  # the next record is longer than a copy
                size = min(max(needed, 2 * size), left)
            else:
                break
        return queues, True

    def _add(self, at: int, data: bytes, *, is_checked: bool = False) -> Collection[tuple[str, int]]:
        try:
            queues = self._store.writer.copy_log(at, data, is_checked=is_checked).queues
        except FlushFailedError as error:  # these bytes may not be on the device: never acknowledge them
            self.failure = ReplicaError(
                f"{self.path}: the replica has stopped following, because a flush has failed ({error.cause}): close it "
                "and open it again"
            )
            raise
        self._copied_end = at + len(data)
        return queues

    def _add_topics(self, rows: Mapping[str, Any], version: int) -> None:
        """Replace the topics unless these are older. They are durable when it returns, so bytes that follow can be."""
        with self._copying_topics:
            if not version or version > self._topics_version:
                self.broker.copy_topics(rows)
                self._topics_version = version

    def _note_unreachable(self, error: RmqError) -> None:
        if self._is_reached:
            self._is_reached = False
            _log.warning("%(path)s: the replica cannot reach its master: %(error)s", path=self.path, error=error)

    def _next_offset(self) -> int:
        log = self.store.log
        return log.end if log.sequence.starts else self._first

    def _continues_copy(self, at: int, answer: LogBytes) -> bool:
        """Return whether the answer continues the copy; otherwise stop following, or start again at another offset."""
        if at > answer.end:
            self.failure = ReplicaError(
                f"{self.path}: the replica is {at - answer.end} bytes ahead of its master, whose log ends at "
                f"{answer.end}: the master has lost its end"
            )
            _log.error("the replica has stopped following: %(error)s", path=self.path, error=self.failure)
            return False
        if at >= answer.begin:
            return True
        if self.store.log.sequence.starts:
            _log.warning(
                "%(path)s: it ended at %(end)d, before the first file of its master; it starts again at %(begin)d",
                path=self.path,
                end=at,
                begin=answer.begin,
            )
            self._copied_end = 0
            self.store.writer.clear_copy()
        self._first = answer.begin
        return False

    def _is_same_log(self, answer: LogBytes) -> bool:
        """Return whether the copy's end is still in the master's log; otherwise stop following.

        A master that has lost the end of its log can have grown beyond the copy since.
        """
        if answer.opened is not None and answer.opened is self._opened:
            return True
        try:
            if answer.opened is None:
                described = replace(self._described, begin=answer.begin, end=answer.end)
                check_bytes(self.path, self.store.log, self._master, described)
            else:
                self._admit(self._master)
        except ReplicaError as error:
            self.failure = error
            _log.error("the replica has stopped following: %(error)s", path=self.path, error=error)
            return False
        self._opened = answer.opened
        return True

    # ---- following the tables

    def _submit_tables(self, _: int) -> int | None:
        self.runner.submit(Work(self._tables_step.label, self._copy_tables, self._tables_copied, self))
        return None

    def _copy_tables(self) -> bool:
        with self._copying_tables:
            notify = None if self._are_tables_watched else self._tables_changed
            self._are_tables_watched = True
            self._has_tables = self._take_tables(CopyTables(notify, self._id, self._copy_tables_early))
            return self._has_tables

    def _take_tables(self, request: CopyTables) -> bool:
        """Copy what the master answers; return False if it is unreachable or the replica was closed meanwhile."""
        self._tables_version = -1
        try:
            tables = self._master.call(request)
        except (BrokerUnreachableError, StoreClosedError) as error:
            self._note_unreachable(error)
            self._are_tables_watched = self._has_tables = False
            return False
        try:
            self._add_topics(tables.topics, tables.topics_version)
            self.broker.copy_tables(tables)
        except RmqError:
            if self.broker.dead:
                return False
            raise
        self._tables_version = tables.version
        return True

    def _tables_copied(self, reached: bool | None, error: Exception | None) -> None:
        """Schedule the next copy, except of a master that notifies. Called under the runner's lock."""
        if error is not None:
            self._log_failed_tables(error)
        if error is not None or (reached and isinstance(self._master, StoredMaster)):
            self.runner.wake(self._tables_step, self._next_tables_ms())
        elif not reached:
            self.runner.wake(self._step, self.runner.now_ms() + self._retry_ms)

    def _copy_tables_early(self, version: int, waits: bool) -> bool:
        """Copy for a request of the master: before this returns if the request waits, or soon.

        Return whether the replica has this version of the tables, or is closed.
        """
        if self.dead or self._tables_version >= version:
            return True
        # Another copy may need the runner's lock, which the request's thread can hold.
        if waits and self._copying_tables.acquire(timeout=_LONGEST_WAIT_S):
            try:
                is_copied = self._tables_version >= version  # a copy for another request may have come first
                if is_copied or self._take_tables(CopyTables(replica=self._id, is_early=True)):
                    return True
            except (RmqError, OSError) as error:  # the request is answered; the next copy is tried soon
                self._log_failed_tables(error)
            finally:
                self._copying_tables.release()
        with self.runner.lock:
            if not self.dead:
                self.runner.wake(self._tables_step, self.runner.now_ms() + round(1000 * self._config.follow_after_s))
            return self.dead

    def _log_failed_tables(self, error: Exception) -> None:
        _log.error("%(path)s: the tables of the master could not be copied: %(error)s", path=self.path, error=error)

    def _tables_changed(self) -> None:
        """Note that a table of the master has changed. Called under the master's lock."""
        self._are_tables_watched = False
        with self.runner.lock:
            if not self.dead:
                self.runner.wake(self._tables_step, self._next_tables_ms())

    def _next_tables_ms(self) -> int:
        return next_on_grid(self.runner.now_ms(), self._begun_ms, max(1, self._tables_ms))

    # ---- closing

    def promote(self) -> None:
        """Close the replica and make its store independent, so that `Broker.open` can write to it."""
        self.close()
        promote_replica(self.path, files=self._files)

    @override
    def close(self) -> None:
        """Stop following, and close the copy. A second call does nothing."""
        if self._stop_turns():
            try:
                with calls_later(), self._following:
                    self._leave()
                    self.broker.close()
            finally:
                self._release_resources()

    def abandon(self) -> None:
        """Release everything without saving, like a killed process. The next `open` recovers the copy."""
        if self._stop_turns():
            try:
                with calls_later(), self._following:
                    self.broker.abandon()
            finally:
                self._release_resources()

    def _stop_turns(self) -> bool:
        with self.runner.lock:
            was_dead, self.dead = self.dead, True
        return not was_dead

    def _leave(self) -> None:
        try:
            self._master.call(LeaveLog(self._id))
        except RmqError as error:
            _log.info(
                "%(path)s: the master could not be notified that its replica leaves: %(error)s",
                path=self.path,
                error=error,
            )

    def _release_resources(self) -> None:
        if self._metrics is not None:
            self._metrics.remove_gauges(self)
        if isinstance(self._master, StoredMaster):
            self._master.close()
        if self._own_runner is not None:
            self._own_runner.shutdown()

    @override
    def __repr__(self) -> str:
        state = "closed" if self.dead else "stopped" if self.failure else f"{self.lag_bytes} bytes behind"
        return f"<Replica of {self.broker.name!r} in {self.path!r}, {state}>"


def _endpoint(source: object, files: Files, runner: Runner) -> Endpoint:
    if isinstance(source, str | os.PathLike):
        return StoredMaster(source, files=files, clock=runner.clock)
    if not hasattr(source, "call"):
        raise TypeError(f"of: expected a broker or the folder of a store, found {source!r:.80}")
    return cast(Endpoint, source)


def promote_replica(path: str | os.PathLike[str], *, files: Files | None = None) -> None:
    """Make the closed replica in ``path`` an independent store, which takes writes and follows no master.

    Raises:
        ReplicaError: It is not a replica.
        StoreLockedError: It is open.
    """
    folder, files = os.fspath(path), files or DiskFiles()
    if ReplicaMark.read(folder, files) is None:
        raise ReplicaError(f"{folder}: expected a replica, found none")
    confine(files, folder, OWN_FOLDER)
    lock = files.lock(directory.lock_path(folder))
    try:
        ReplicaMark.clear(folder, files)
    finally:
        lock.release()
