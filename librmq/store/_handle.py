"""The life of an open store: opening, recovery, scheduled work, closing, and the end of a handle after a fork."""

from __future__ import annotations

import functools
import gc
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from threading import get_ident
from typing import Final

from librmq.clock import Clock, SystemClock
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.errors import (
    FlushFailedError,
    ReadOnlyError,
    ReplicaError,
    StoreClosedError,
    StoreIOError,
    StoreLockedError,
)
from librmq.files.disk import TemporaryFolder
from librmq.files.interface import Damage, FileLock, Files, make_folders
from librmq.message.delays import DelayLevels
from librmq.runtime.compiled_core import CORE, CORE_STATE, IS_CORE_EXPECTED
from librmq.runtime.event_log import EventLog
from librmq.runtime.lazy_numpy import import_numpy
from librmq.runtime.locks import Inherited, call_in_child, critical
from librmq.store._read_only_view import Moment, ReadOnlyView
from librmq.store.engine._durability import Durability, Housekeeping, HousekeepingThread
from librmq.store.engine.append import Appender
from librmq.store.engine.copies import CopiedRecords, CopyWriter, LogCopier
from librmq.store.engine.derivation import BitmapOf, Pending
from librmq.store.engine.read import Transfer
from librmq.store.engine.store_parts import AppendLock, PartFiles, Parts, QueueTable
from librmq.store.engine.store_times import StoreTimes, TimeOrder, noted_order
from librmq.store.format import directory
from librmq.store.format._keyindex import KeyIndex
from librmq.store.format.checkpoint import Checkpoint, clear_abort, has_abort
from librmq.store.format.documents import ReplicaMark, read_mark, write_kept_config, write_mark, write_retention
from librmq.store.recovery.log_end import RecoveryMode
from librmq.store.recovery.open import describe_recovery, load
from librmq.store.recovery.saved_state import MarkWriter, delete_mark, write_closed_state
from librmq.store.recovery.verify import Verdict, verify_parts
from librmq.store.retention import DISK_CHECK_MS, Readers, Retention

# ---- the lock of a store: one process, and one handle in it, holds it

_LOOK_AGAIN_S: Final = 0.05
"""Interval at which a lock of another writer is tried."""

_held: dict[FileLock, weakref.ref[object]] = {}
"""The locks of this process, with their handles."""


def lock_store(handle: object, path: str, files: Files, wait_s: float) -> FileLock:
    """Lock the store in ``path`` for ``handle``; wait ``wait_s`` for another writer, in real time.

    Raises:
        StoreLockedError: Another writer has the store.
    """
    clock, never = SystemClock(), threading.Event()
    deadline = clock.monotonic() + wait_s
    while True:
        try:
            with critical:
                return _lock(handle, path, files)
        except StoreLockedError as error:
            remaining_s = deadline - clock.monotonic()
            if remaining_s <= 0:
                raise StoreLockedError(
                    f"{error}; only one process can write to a store (docs/processes.md): close it there first; in "
                    f"Python, wait=seconds waits for that, and MessageStore.open(path, read_only=True) reads meanwhile"
                ) from None
        clock.wait(never, min(remaining_s, _LOOK_AGAIN_S))


def _lock(handle: object, path: str, files: Files) -> FileLock:
    """Take the lock; first release the lock of a handle that Ctrl-C lost."""
    place = directory.lock_path(path)
    try:
        lock = _lock_with_folder(place, files)
    except StoreLockedError:
        gc.collect()
        lost_locks = [lock for lock, holder in list(_held.items()) if holder() is None]
        if not lost_locks:
            raise
        for lost_lock in lost_locks:
            unlock_store(lost_lock)
        lock = _lock_with_folder(place, files)
    _held[lock] = weakref.ref(handle)
    return lock


def _lock_with_folder(place: str, files: Files) -> FileLock:
    lock = files.lock(place)
    try:
        lock.hold_folder()
    except BaseException:
        lock.release()
        raise
    return lock


def unlock_store(lock: FileLock) -> None:
    """Release a lock; a second call does nothing."""
    with critical:
        if _held.pop(lock, None) is not None:
            lock.release()


_log = EventLog("librmq.store")


@functools.cache
def _report_python() -> None:
    """Log once in a process that it runs without the compiled core: a warning where an installation should have it."""
    if IS_CORE_EXPECTED and CORE.module is None:
        _log.warning("hot paths run in %(core)s; docs/performance.md says how to get it", core=CORE_STATE)
    elif CORE.module is None:
        _log.info("hot paths run in %(core)s", core=CORE_STATE)


class StoreHandle:
    """A store open in this process, with the parts that a recovery or a refresh replaces. Thread-safe."""

    config: StoreConfig
    levels: DelayLevels
    transfer: Transfer
    log: CommitLog
    queues: QueueTable
    index: KeyIndex
    checkpoint: Checkpoint
    durability: Durability
    retention: Retention
    housekeeping: Housekeeping

    def __init__(
        self,
        path: str,
        files: Files,
        clock: Clock,
        bitmap_of: BitmapOf | None,
        *,
        read_only: bool,
        in_background: bool,
        replica_of: str | None = None,
        moment: Moment | None = None,
    ) -> None:
        """Prepare a handle that accepts no calls until `open`."""
        self.path = path
        self.files = files
        self.clock = clock
        self.read_only = read_only
        self.replica_of = replica_of
        """Name of the master whose log this store copies; it takes no appends."""
        self.moment = moment
        """The earlier moment at which a read-only store is shown; None for the present."""
        self.readers: Readers | None = None
        """Tells retention which messages are not consumed."""
        self.recovered: list[Damage] = []
        self.view: ReadOnlyView | None = None
        self.is_own: bool = False
        """Whether librmq made the store, not a broker; only known while it is open for writing."""
        self.closed: str | None = "was not opened"
        """The reason why no calls are accepted; None while they are."""
        self.temporary: TemporaryFolder | None = None
        """The folder to delete when the store is released."""
        self.thread: HousekeepingThread = HousekeepingThread(path, self._do_due_work, clock)
        self.appender: Appender = Appender(clock, self._refusal, self.thread.wake)
        self.copies: CopyWriter = CopyWriter(self.appender)
        self._bitmap_of = bitmap_of
        self._in_background = in_background
        self._file_lock: FileLock | None = None
        self._had_room_at_ms, self._has_room_until = 0, -1  # as `check_room` last saw it
        self._disk_error = self._why_whole = ""
        self._noted_order: TimeOrder | None = None

    # --------------------------------------------------------------------------------------------------------- opening

    def open(self, config: StoreConfig | None, *, thorough: bool, wait_s: float) -> None:
        """Lock, open and recover the store; see `MessageStore.open`."""
        path, files = self.path, self.files
        kind, mark = self._look()  # before a byte is written
        was_killed, begin_ms = False, 0
        try:
            if not self.read_only:
                if kind is directory.StoreKind.NEW:
                    with critical:
                        make_folders(files, path)
                self._file_lock = lock_store(self, path, files, wait_s)
                # Look again, because another process may have made or changed the store before this one had the lock.
                kind, mark = self._look()
                was_killed, begin_ms = has_abort(files, path), self.clock.now_ms()
            self.is_own = not self.read_only and directory.is_made_by_librmq(path, files)
            if config is not None:
                config = directory.complete_config(path, config, files)
            if self.replica_of is not None and (mark is None or mark.master != self.replica_of):
                # Write the mark before the log is opened, so that the folder of a killed replica is known as one.
                write_mark(path, ReplicaMark(self.replica_of, None), files)
            if self.read_only:
                self.view = ReadOnlyView(
                    path,
                    config,
                    files,
                    self.clock,
                    self._bitmap_of,
                    self._use_view,
                    self.moment,
                    derives_queues=kind.derives_queues,
                )
            else:
                import_numpy()
                self._configure(config or directory.infer_config(path, files))
                if kind is directory.StoreKind.NEW:
                    # The settings reach the device before the folder of the log does. A folder with a log and without
                    # them counts as a broker's, whose retention deletes unread messages on a full disk.
                    write_kept_config(path, self.config, files, is_own=self.is_own)
                    files.flush_folder(path)
                self._load_parts(RecoveryMode.WHOLE_LOG if thorough else RecoveryMode.LAST_EXIT)
                if config is not None:
                    write_kept_config(path, self.config, files, is_own=self.is_own)
                write_retention(path, self.config, files, default=directory.default_retention(path, files))
            if was_killed:
                took_ms = self.clock.now_ms() - begin_ms
                _log.warning(
                    "%(recovery)s",
                    recovery=describe_recovery(path, self.log.end, self.recovered, took_ms, self._why_whole),
                    path=path,
                )
        except BaseException:
            with critical:
                self._release_store()
            raise
        self._accept_calls()
        _open_handles.add(self)
        _report_python()

    def _look(self) -> tuple[directory.StoreKind, ReplicaMark | None]:
        """Return what is in the folder.

        Raises:
            NotAStoreError: The folder contains something else, or a kind of store that this handle can't open.
            ReadOnlyError: The store is a replica, and is not opened as one.
            ReplicaError: The store is not a replica, and is opened as one.
        """
        path, files = self.path, self.files
        kind = directory.check_kind(path, files, writable=not self.read_only)
        mark = None if self.read_only else read_mark(path, files)
        if mark is not None and self.replica_of is None:
            raise ReadOnlyError(_no_writes(path, mark.master))
        if mark is None and self.replica_of is not None and kind.has_log:
            raise ReplicaError(f"{path}: expected a new folder or a replica, found a store of its own")
        return kind, mark

    def _configure(self, config: StoreConfig) -> None:
        self.config = config
        self.levels = DelayLevels.parse(config.message_delay_level)
        self.transfer = Transfer(config)
        self.appender.configure(config, self.levels)

    def _load_parts(self, mode: RecoveryMode) -> None:
        """Open the parts for writing and repair them."""
        bitmap_of = self._bitmap_of if self.config.enable_calc_filter_bitmap else None
        parts = load(self.path, self.config, self.levels, self.files, self.clock, mode=mode, bitmap_of=bitmap_of)
        with critical:
            self._use_parts(parts)
        self.durability.mark_flush()
        self.recovered = self.recovered + parts.cuts
        self._why_whole = parts.why_whole

    def _use_view(self, view: ReadOnlyView) -> None:
        self._configure(view.config)
        with critical:
            self._use_parts(view.parts)
        self.recovered = view.parts.cuts

    def _use_parts(self, parts: Parts) -> None:
        appender = self.appender
        self.log, self.index, self.checkpoint, self.queues = parts.log, parts.index, parts.checkpoint, parts.queues
        self._has_room_until = -1
        parts.log.check_owner = self._check_lock
        self._noted_order = None
        if not self.read_only:
            noted, end = noted_order(self.path, self.files, parts.log), parts.log.end
            parts.dispatcher.order = noted if noted is not None and noted.end == end else TimeOrder(end, end)
        marks = MarkWriter(self.path, self.files, self.config, parts)
        self.durability = Durability(
            parts, appender.lock, appender.advance, appender.catch_up, self._check_lock, appender.refuse, marks
        )
        self.retention = Retention(self)
        self.housekeeping = Housekeeping(
            self.config,
            self.log,
            self.durability.commit,
            self.durability.flush,
            parts.dispatcher.entries_a_queue,
            self._expire,
            self.clock.now_ms(),
        )
        appender.use_parts(parts, self.durability.commit, self.housekeeping)
        self._copier = LogCopier(parts)

    # what retention asks for, see `RetainedStore`

    @property
    def lock(self) -> AppendLock:
        """The lock of producers."""
        return self.appender.lock

    def deletion(self) -> AbstractContextManager[None]:
        """Return what is held while a file of the log is deleted."""
        return self.durability.deletion()

    def settled(self) -> int:
        """Return a physical offset below which all records and their queue entries are on the device."""
        return self.durability.settled

    def flush_log(self) -> None:
        """Flush the log up to its end."""
        self.durability.commit.reach(self.log.end)

    def _check_lock(self) -> None:
        if self._file_lock is not None:
            self._file_lock.check()

    def _accept_calls(self) -> None:
        self.closed = None
        self.appender.accepts = not self.read_only and self.replica_of is None
        if self._in_background:
            self.thread.allow_start()

    # ------------------------------------------------------------------------------------------------------ while open

    def refresh(self) -> bool:
        """Read what another process has written; see `MessageStore.refresh`."""
        self.check_open()
        return self.view is not None and self.view.refresh()

    def written_queues(self) -> QueueTable:
        """Return the queues with the entries of all messages appended before, as far as the disk has room."""
        if self.closed is None:
            self.appender.write_entries_that_fit()
        return self.queues

    def up_to_date(self) -> Parts:
        """Return the parts, with everything that was acknowledged before the call, as far as the disk has room."""
        self.refresh()
        self.appender.drain_what_fits()
        return self.appender.open_parts()

    def with_index(self) -> tuple[Parts, Sequence[Pending]]:
        """Return the parts like `up_to_date`, and the records for whose keys the disk has no room.

        A view of a large crashed store, which puts the index off, completes it.
        """
        self.check_open()
        if self.view is not None:
            self.view.complete()
        self.refresh()
        unindexed = self.appender.drain_what_fits()
        return self.appender.open_parts(), unindexed

    @property
    def times(self) -> StoreTimes:
        """The store times of the messages, and what is known of their order."""
        if not self.read_only:
            return StoreTimes(self.log, self.appender.dispatcher.order)
        if self._noted_order is None:
            self._noted_order = noted_order(self.path, self.files, self.log) or TimeOrder(0, 0)
        return StoreTimes(self.log, self._noted_order)

    def flush(self) -> int:
        """Flush all that was appended before; see `MessageStore.flush`."""
        self.appender.lock.check_reentry()
        # Take the lock before `durability` is read, because a recovery replaces it.
        with critical, self.appender.lock.flushing:
            self.check_writable()
            return self.durability.flush()

    def run_due(self, now_ms: int) -> int | None:
        """Do due work; see `MessageStore.run_due`."""
        self.check_writable()
        with critical:
            return self._do_due_work(now_ms)

    def _do_due_work(self, now_ms: int) -> int | None:
        self._check_disk(now_ms)
        return self.housekeeping.run_due(now_ms)  # a recovery replaces it

    def _expire(self, now_ms: int) -> int | None:
        """Run the step of retention, which also checks whether the disk has room for messages."""
        try:
            return self.retention.run_due(now_ms)
        finally:
            self._update_acceptance()

    def _update_acceptance(self) -> None:
        appender, commit = self.appender, self.durability.commit
        with appender.lock.mutex:
            refused = self.closed is not None or commit.failure is not None or self.replica_of is not None
            appender.accepts = not refused and not self.retention.refuses_writes
            # A flush can have failed since the line above, so look once more.
            if commit.failure is not None:
                appender.accepts = False

    def _check_disk(self, now_ms: int) -> None:
        """Begin or end to refuse messages as soon as the disk is too full, or has room again."""
        try:
            has_changed = self.retention.check_disk(now_ms)
        except StoreIOError as error:
            # Log each error of the disk once, and not at every look.
            if str(error) != self._disk_error:
                _log.warning(
                    "%(path)s: whether the disk is full can't be checked: %(error)s", error=error, path=self.path
                )
            self._disk_error = str(error)
            return
        self._disk_error = ""
        if has_changed:
            self.appender.lock.check_reentry()
            with critical:
                self._update_acceptance()
            # The step of retention looks for room again. Otherwise what the broker itself delivers would stay refused
            # until a producer sends.
            self.housekeeping.expire_soon()
            self.thread.wake()

    def delete_expired(self) -> None:
        """Delete expired log files soon; see `MessageStore.delete_expired`."""
        self.check_writable()
        self.retention.delete_expired()
        self.housekeeping.expire_soon()
        self.thread.wake()

    def has_room(self, now_ms: int) -> bool:
        """Return whether the last look of `check_room` still holds at the present time, so that it need not look."""
        return (
            0 <= now_ms - self._had_room_at_ms < DISK_CHECK_MS
            and self.log.end < self._has_room_until
            and self.retention.sees_disk_by_time
        )

    def check_room(self) -> None:
        """Refuse a send while there is no room for it; see `MessageStore.check_room`."""
        now_ms = self.clock.now_ms()
        retention = self.retention
        had_room = 0 <= now_ms - self._had_room_at_ms < DISK_CHECK_MS and self.log.end < self._has_room_until
        if not had_room or not retention.sees_disk_by_time:
            self._check_disk(now_ms)  # a disk that is too full refuses the append
        if had_room:
            return
        error = retention.full_error()
        if error is not None:
            raise error
        if retention.is_held and retention.is_full():
            self.housekeeping.expire_soon()
            self.thread.wake()
        else:
            self._had_room_at_ms, self._has_room_until = now_ms, retention.room_end

    def verify(self) -> Verdict:
        """Look at all of the store, changing nothing; producers wait."""
        appender = self.appender
        appender.lock.check_reentry()
        thread = get_ident()
        with appender.lock.mutex:
            try:
                appender.lock.owner = thread
                if self.closed is not None:
                    raise self.unusable()
                appender.catch_up()
                verdict = verify_parts(self.path, self.config, self.files)
            finally:
                appender.lock.owner = 0
        return verdict

    def copy_log(self, physical_offset: int, data: bytes, *, is_checked: bool = False) -> CopiedRecords:
        """Append bytes of the master's log; see `MessageStore.copy_log`."""
        appender, log = self.appender, self.log
        if self.closed is not None or self.replica_of is None:
            self._check_copies()
        lock = appender.lock
        if lock.mutex.locked():
            lock.check_reentry()
        # The room exists, so the copy needs no critical block: `repair` completes what a signal interrupts, as in an
        # append.
        if log.end + len(data) <= log.sure:
            thread = get_ident()
            with lock.mutex:
                try:
                    lock.owner = thread
                    copied = self._copy(physical_offset, data, is_checked)
                finally:
                    lock.owner = 0
        else:
            with critical, lock.mutex:
                copied = self._copy(physical_offset, data, is_checked)
        # The copied records do not continue their queues, for example because a topic was deleted and made again.
        if not copied.is_regular:
            self.recover()
            copied = copied._replace(queues=list(self.queues))
        appender.finish_append(copied.end)
        return copied

    def _copy(self, physical_offset: int, data: bytes, is_checked: bool) -> CopiedRecords:
        """Append bytes of the master's log, under the lock."""
        if self.closed is not None:
            raise self.unusable()
        log = self.log
        if self.appender.dispatcher.writing_at >= 0:  # a signal has interrupted the last copy, perhaps in its middle
            self.appender.repair()
            data = data[max(0, log.end - physical_offset) :]
            physical_offset = max(physical_offset, log.end)
        if not log.sequence.starts:
            log.begin_at(physical_offset)
        if physical_offset != log.end:
            raise ValueError(f"physical_offset: expected the log's end {log.end}, found {physical_offset}")
        return self._copier.append(data, is_checked=is_checked)

    def cut_copy(self, physical_offset: int) -> None:
        """Cut the log of a replica; see `MessageStore.cut_copy`."""
        self._check_copies()

        def cut() -> None:
            part_files = PartFiles(self.path, self.config, self.files)
            with part_files.open_log(writable=True, scan_from=lambda _: physical_offset) as log:
                log.truncate(physical_offset)
                log.flush()

        self._replace_parts(cut)

    def clear_copy(self) -> None:
        """Delete all content of a replica, which then begins where its next `copy_log` says."""
        self._check_copies()
        self._replace_parts(self._delete_content)

    def _check_copies(self) -> None:
        self.check_open()
        if self.replica_of is None:
            raise ReplicaError(f"{self.path}: expected a replica, found a store of its own")

    def _delete_content(self) -> None:
        for name in (directory.CONSUMEQUEUE, directory.CONSUMEQUEUE_EXT, directory.INDEX, directory.CHECKPOINT):
            self.files.delete(os.path.join(self.path, name))
        folder = os.path.join(self.path, directory.COMMITLOG)
        # Delete the newest file first, so that a crash in between leaves no gap in the log.
        for entry in reversed(self.files.list(folder)):
            self.files.delete(os.path.join(folder, entry.name))

    def recover(self) -> list[Damage]:
        """Reopen the parts and make them agree with the whole log; see `MessageStore.recover`."""
        return self._replace_parts()

    def _replace_parts(self, between: Callable[[], None] | None = None) -> list[Damage]:
        """Close the parts, call ``between()``, and open them by a thorough recovery; return its findings."""
        appender = self.appender
        appender.lock.check_reentry()
        self.thread.stop()
        thread = get_ident()
        with appender.lock.flushing, appender.lock.mutex:
            try:
                appender.lock.owner = thread
                if self.closed is not None or self.read_only:
                    raise self.unusable()
                with critical:
                    appender.catch_up()
                    self.closed, appender.accepts = "could not be recovered", False  # until it succeeds
                    self._close_parts()
                before = len(self.recovered)
                try:
                    delete_mark(self.path, self.files)
                    if between is not None:
                        between()
                    self._load_parts(RecoveryMode.LIVING)
                    self._accept_calls()
                except BaseException:
                    with critical:
                        self.closed, appender.accepts = "could not be recovered", False
                        self._release_store()
                    raise
            finally:
                appender.lock.owner = 0
            return self.recovered[before:]

    # --------------------------------------------------------------------------------------------------------- closing

    def close(self) -> None:
        """Flush the store, mark it as cleanly closed and release it; see `MessageStore.close`."""
        with critical:
            if not self._stop_calls("is closed"):
                self._release_store()  # after an open or a recovery that a signal interrupted
                return
            try:
                if not self.read_only:
                    self.durability.flush()
                    for queue in self.queues.opened():
                        # Flush queues that no append wrote to as well: retention may have deleted their files.
                        queue.flush()
                    write_closed_state(
                        self.path, self.files, self.log, self.queues, self.index, self.appender.dispatcher.order
                    )
                    delete_mark(self.path, self.files)  # it names the machine, and equal stores have equal files
                    clear_abort(self.files, self.path)
            finally:
                self._release_store()

    def abandon(self, why: str) -> None:
        """Release the store as a dying process does; see `MessageStore.abandon`."""
        with critical:
            if not self._stop_calls(why):
                self._release_store()
                return
            try:
                if not self.read_only:
                    # A reader that found collected entries may be writing them, so the lock is needed although no
                    # append comes.
                    with suppress(StoreIOError), self.appender.lock.mutex:
                        self.appender.catch_up()
            finally:
                self._release_store()

    def after_fork(self) -> None:
        """Leave the store to the parent, in a forked child."""
        _open_handles.discard(self)
        self.closed = "was opened before a fork: reopen the store in the child"
        self.thread.after_fork()
        self.retention.after_fork()
        # A thread of the parent may hold the lock, and does not exist in this process; closing would wait for it.
        self._file_lock = None
        self.appender.after_fork()
        self.durability.commit.stop_after_fork(f"{self.path}: this handle {self.closed}")

    def _stop_calls(self, why: str) -> bool:
        """Take no more calls; return False if that was so already."""
        self.appender.lock.check_reentry()
        with self.appender.lock.mutex:
            if self.closed is not None:
                return False
            self.closed, self.appender.accepts = why, False
        self.thread.stop()
        return True

    def _close_parts(self) -> None:
        appender = self.appender
        with appender.lock.flushing:
            parts, appender.parts = appender.parts, None
            if parts is not None:
                self.durability.commit.stop_flushes(f"{self.path}: the log was closed before this reached the device")
                parts.close()

    def _release_store(self) -> None:
        try:
            self._close_parts()
        finally:
            if self._file_lock is not None:
                unlock_store(self._file_lock)
                self._file_lock = None
            if self.temporary is not None:
                self.temporary.delete()

    # -------------------------------------------------------------------------------------------------------- refusals

    def check_open(self) -> None:
        """Refuse a call to a handle that is closed; wait for a recovery that is running."""
        if self.closed is not None:
            self._wait_for_recovery()
            if self.closed is not None:
                raise self.unusable()

    def check_writable(self) -> None:
        """Do as `check_open`, and refuse a call to a handle that is open for reading only."""
        self.check_open()
        if self.read_only:
            raise self.unusable()

    def _wait_for_recovery(self) -> None:
        self.appender.lock.check_reentry()
        with self.appender.lock.flushing:
            pass

    def _refusal(self) -> Exception:
        """Return why nothing can be appended."""
        if self.closed is None and not self.read_only:
            if self.durability.commit.failure is not None:
                return FlushFailedError(self.durability.commit.failure)
            if self.retention.refuses_writes:
                return self.retention.refusal()
        return self.unusable()

    def unusable(self) -> Exception:
        """Return the error of a handle that is closed or read-only."""
        if self.closed is not None:
            return StoreClosedError(f"{self.path}: this handle {self.closed}")
        if self.replica_of is not None:
            return ReadOnlyError(_no_writes(self.path, self.replica_of))
        return ReadOnlyError(f"{self.path}: this handle is read-only: use MessageStore.open without read_only=True")


def _no_writes(path: str, master: str) -> str:
    return (
        f"{path}: this store is a replica of {master} and takes no writes: write to {master}, read by "
        "MessageStore.open(path, read_only=True), or make it a store of its own by librmq.cluster.promote_replica"
    )


_open_handles: Final[Inherited[StoreHandle]] = Inherited(StoreHandle.after_fork)
call_in_child(_held.clear)  # the locks are the parent's
