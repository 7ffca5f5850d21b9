"""The writing side of an open store: its lock, opening and recovery, appends, scheduled work, and its end."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import Event, get_ident
from typing import TYPE_CHECKING, Any, Final

from librmq.clock import Clock, SystemClock
from librmq.config import StoreConfig
from librmq.errors import (
    CorruptionError,
    FlushFailedError,
    ReadOnlyError,
    ReplicaError,
    StoreError,
    StoreIOError,
    StoreLockedError,
)
from librmq.files import Damage, FileLock, Files
from librmq.files.interface import flush_all, make_folders
from librmq.override import override
from librmq.runtime import StateLog, calls_later, critical
from librmq.runtime.closing import LaterPart
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import call_in_child
from librmq.store._handle import StoreHandle
from librmq.store.engine._append import Appender
from librmq.store.engine._durability import AGAIN_MS, Durability, Housekeeping, HousekeepingThread
from librmq.store.engine._entry_checks import EntryChecks
from librmq.store.engine.derivation import BitmapOf, KeyBlock
from librmq.store.engine.dispatch import TimeOrder
from librmq.store.engine.saved_state import MarkWriter, delete_state, noted_order, write_closed_state
from librmq.store.engine.store_parts import AppendLock, PartFiles, Parts, QueueName, QueueTable, Recovered
from librmq.store.format import directory
from librmq.store.format.directory import clear_abort, has_abort
from librmq.store.format.documents import KeptSettings, ReplicaMark, write_kept_config, write_retention
from librmq.store.recovery._case import RecoveryMode
from librmq.store.recovery.open import describe_recovery, load
from librmq.store.retention import DISK_CHECK_MS, Readers, RetainedStore, Retention

if TYPE_CHECKING:
    from librmq.files import TemporaryFolder
    from librmq.store.engine._comparison import Comparison
    from librmq.store.engine._shared_appends import PeersRecords, SharedAppends
    from librmq.store.engine.copies import CopiedRecords
    from librmq.store.engine.store_times import StoreTimes
    from librmq.store.recovery._verify import Verdict

_log = EventLog("librmq.store")
_LOOKING: Final = "looking whether the disk is full"
_WRITING: Final = "writing the entries of queues"
_CHECKING: Final = "checking the entries of queues"


class Writer(StoreHandle):
    """A store that this process alone writes to. Thread-safe."""

    durability: Durability
    retention: Retention
    housekeeping: Housekeeping

    def __init__(
        self, path: str, files: Files, clock: Clock, bitmap_of: BitmapOf | None, replica_of: str | None = None
    ) -> None:
        """Prepare a handle that accepts no calls until `open`."""
        super().__init__(path, files, clock)
        self.replica_of = replica_of
        """Name of the master whose log this store copies; it takes no appends."""
        self.readers: Readers | None = None
        """Tells retention which messages are not consumed."""
        self.thread: HousekeepingThread = HousekeepingThread(path, self.do_due_work, clock)
        self.appender: Appender = Appender(clock, self._refusal, self.thread.wake)
        self.lock: AppendLock = self.appender.lock
        self.temporary: TemporaryFolder | None = None
        """The folder to delete when the store is released."""
        self._bitmap_of = bitmap_of
        self._file_lock: FileLock | None = None
        self._states = StateLog(_log, path)

    # --------------------------------------------------------------------------------------------------------- opening

    def open(self, config: StoreConfig | None, wait_s: float, *, thorough: bool, background: bool) -> None:
        """Lock, open and recover the store; see `MessageStore.open`."""
        path, files = self.path, self.files
        self._in_background = background
        kind, mark = self._look()  # a folder that is refused stays as it is
        try:
            if kind is directory.StoreKind.NEW:
                with critical:
                    make_folders(files, path)
            self._file_lock = lock_store(self, path, files, wait_s)
            # Look again, because another process may have made or changed the store before this one had the lock.
            kind, mark = self._look()
            was_killed, begin_ms = has_abort(files, path), self.clock.now_ms()
            kept = KeptSettings.read(path, files)  # Where they are damaged readers go on; what a writer does is final.
            self.is_own: bool = directory.is_made_by_librmq(path, files, kept)
            if config is not None:
                config = directory.complete_config(path, config, files, kept)
            if self.replica_of is not None and (mark is None or mark.master != self.replica_of):
                # Write the mark before the log is opened, so that the folder of a killed replica is known as one.
                ReplicaMark(self.replica_of, None).write(path, files)
            with critical:  # now, so that no later call waits for it
                import numpy  # noqa: F401
            self.configure(config or directory.infer_config(path, files, kept))
            if kind is directory.StoreKind.NEW:
                # The settings reach the device before the folder of the log does. A folder with a log and without them
                # counts as a broker's, whose retention deletes unread messages on a full disk.
                kept = write_kept_config(path, self.config, files, kept, is_own=self.is_own)
                files.flush_folder(path)
            recovered = self._load_parts(RecoveryMode.WHOLE_LOG if thorough else RecoveryMode.LAST_EXIT)
            # The file is marked only now, because a recovery withdraws notes that a broker's retention has made wrong.
            self._file_lock.mark_untouched()
            if config is not None and kind is not directory.StoreKind.NEW:
                kept = write_kept_config(path, self.config, files, kept, is_own=self.is_own)
            write_retention(path, self.config, files, kept)
            if was_killed:
                took_ms = self.clock.now_ms() - begin_ms
                what = describe_recovery(path, self.log, recovered, took_ms)
                _log.warning("%(recovery)s", recovery=what, path=path)
        except BaseException:
            with critical:
                self._release_store()
            raise
        self.accept_calls()

    def _look(self) -> tuple[directory.StoreKind, ReplicaMark | None]:
        """Return what is in the folder.

        Raises:
            NotAStoreError: The folder contains something else, or a kind of store that this handle can't open.
            ReadOnlyError: The store is a replica, and is not opened as one.
            ReplicaError: The store is not a replica, and is opened as one.
        """
        path, files = self.path, self.files
        kind = directory.check_kind(path, files, writable=True)
        mark = ReplicaMark.read(path, files)
        if mark is not None and self.replica_of is None:
            raise ReadOnlyError(_no_writes(path, mark.master))
        if mark is None and self.replica_of is not None and kind.has_log:
            raise ReplicaError(f"{path}: expected a new folder or a replica, found a store of its own")
        return kind, mark

    @override
    def configure(self, config: StoreConfig) -> None:
        super().configure(config)
        self.appender.configure(config, self.levels)

    def _load_parts(self, mode: RecoveryMode) -> Recovered:
        parts = load(self.path, self.config, self.files, self.clock, mode=mode, bitmap_of=self._bitmap_of)
        with critical:
            self.use_parts(parts)
        self.durability.mark_flush()
        self.recovered: list[Damage] = self.recovered + parts.recovered.cuts
        return parts.recovered

    @override
    def use_parts(self, parts: Parts) -> None:
        super().use_parts(parts)
        appender, end = self.appender, parts.log.end
        appender.room_until = -1
        parts.log.check_owner = self._check_lock
        noted = noted_order(self.path, self.files, parts.log)
        parts.dispatcher.followed = end
        parts.dispatcher.order = order = noted if noted is not None and noted.end == end else TimeOrder(end, end)
        if self._bitmap_of is not None and parts.log.last_write is not None:
            # The clock may have been set back since these messages got their bitmaps.
            stored_ms = parts.log.store_timestamp_ms(parts.log.last_write)
            self._bitmap_of("", None, max(order.newest_ms, stored_ms or 0))
        marks = MarkWriter(self.path, self.files, self.config, parts)
        self.durability = Durability(
            parts, appender.lock, appender.advance, appender.catch_up, self._check_lock, appender.refuse,
            partial(flush_all, self.files), marks,
        )  # fmt: skip
        self.retention = Retention(
            RetainedStore(
                path=self.path,
                files=self.files,
                clock=self.clock,
                config=self.config,
                log=self.log,
                index=self.index,
                queues=self.queues,
                lock=appender.lock,
                readers=lambda: self.readers,
                written_queues=self.written_queues,
                deletion=self.durability.deletion,
                settled=lambda: self.durability.settled,
                flush_log=lambda: self.durability.commit.reach(self.log.end),
            )
        )
        self.housekeeping = Housekeeping(
            self.config,
            self.log,
            self.durability.commit,
            self.durability.flush,
            self._entries_a_queue,
            self._expire,
            self.clock.now_ms(),
            self._states,
        )
        appender.use_parts(parts, self.durability.commit, self.housekeeping)
        self._comparison = LaterPart(partial(_make_comparison, parts, self.checks))
        if parts.recovered.compared_from > parts.log.begin:
            self._comparison().add_older()
        self.checks.noticed = self._compare_soon

    def share_appends(
        self,
        path: str,
        settings: Mapping[str, Any],
        arrived: Callable[[PeersRecords], object],
        wait_s: float,
        is_hurried: Callable[[], bool] = lambda: False,
    ) -> SharedAppends:
        """Let other processes append too, by a page at ``path``; see `SharedAppends`."""
        from librmq.store.engine._shared_appends import SharedAppends

        fields = {name: getattr(self.config, name) for name in SharedAppends.SETTINGS}
        settings = {**fields, **settings}
        shared = SharedAppends(self.appender, path, settings, self.check_room, arrived, wait_s, is_hurried)
        self.appender.shared = shared
        return shared

    def _check_lock(self) -> None:
        if self._file_lock is not None:
            self._file_lock.check()

    @override
    def accept_calls(self) -> None:
        super().accept_calls()
        self.appender.accepts = self.replica_of is None
        if self._in_background:
            self.thread.may_start = True

    # ------------------------------------------------------------------------------------------------------ while open

    def written_queues(self) -> QueueTable:
        """Return the queues with the entries of all messages appended before, as far as the disk has room."""
        if self.closed is None:
            self.appender.write_entries()
        return self.queues

    def _entries_a_queue(self) -> int:
        """Return the number of entries that no flush has covered, on average for a queue that has some, rounded up."""
        try:
            self.appender.write_entries()
        except StoreError as error:
            self._states.failing(_WRITING, error)
            return 1  # at least: if it lasts, the flush that becomes due with it fails too
        self._states.works(_WRITING)
        dispatcher = self.appender.dispatcher
        return -(-(dispatcher.entries + dispatcher.due) // (len(dispatcher.unflushed) or 1))

    @override
    def up_to_date(self) -> Parts:
        self.check_open()
        self.appender.drain_what_fits()
        return self.appender.open_parts()

    @override
    def with_index(self) -> tuple[Parts, Sequence[KeyBlock]]:
        self.check_open()
        unindexed = self.appender.drain_what_fits()
        return self.appender.open_parts(), unindexed

    @property
    @override
    def times(self) -> StoreTimes:
        from librmq.store.engine.store_times import StoreTimes  # many programs ask for no time

        return StoreTimes(self.log, self.appender.dispatcher.order)

    def do_due_work(self, now_ms: int) -> int | None:
        """Look at the disk, and do the periodic work that is due; return the next due time."""
        self._check_disk(now_ms)
        due_ms = self.housekeeping.run_due(now_ms)  # a recovery replaces it
        checked_ms = self._check_entries(now_ms)
        if checked_ms is not None:
            due_ms = checked_ms if due_ms is None else min(due_ms, checked_ms)
        is_idle = due_ms is None or due_ms - now_ms > DISK_CHECK_MS
        if is_idle and self.retention.watches_disk:  # the next send looks at the disk before this does
            with self.appender.lock.mutex:
                self.appender.look_for_room()
        return due_ms

    def _compare_soon(self, name: QueueName) -> None:
        """Compare the rest of a queue with the log, because one of its entries disagreed."""
        self._comparison().add(name)
        self.thread.wake()

    def _check_entries(self, now_ms: int) -> int | None:
        """Compare the next entries with the log, write those that reads have derived again; return the next time."""
        comparison, due_ms = self._comparison.made, None
        try:
            if comparison is not None:
                due_ms = comparison.run_due(now_ms)
            self._write_corrected()
        except StoreError as error:  # each read checks its entries, so nothing depends on this
            self._states.failing(_CHECKING, error, again_ms=AGAIN_MS)
            return now_ms + AGAIN_MS
        self._states.works(_CHECKING)
        return due_ms

    def _write_corrected(self) -> None:
        if self.checks.corrected:
            self.appender.lock.check_reentry()
            with critical, self.appender.lock.mutex:
                self.checks.write_corrected()

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
            appender.look_for_room()
            # A flush can have failed since the line above, so look once more.
            if commit.failure is not None:
                appender.accepts = False

    def _check_disk(self, now_ms: int) -> None:
        """Begin or end to refuse messages as soon as the disk is too full, or has room again."""
        try:
            has_changed = self.retention.check_disk(now_ms)
        except StoreIOError as error:
            self._states.failing(_LOOKING, error)
            return
        self._states.works(_LOOKING)
        if has_changed:
            self.appender.lock.check_reentry()
            with critical:
                self._update_acceptance()
            # The step of retention looks for room again. Otherwise what the broker itself delivers would stay refused
            # until a producer sends.
            self.expire_soon()

    def expire_soon(self) -> None:
        """Let retention take a step soon."""
        self.housekeeping.expire_soon()
        self.thread.wake()

    def check_room(self) -> None:
        """Refuse a send while there is no room for it; see `MessageStore.check_room`."""
        retention = self.retention
        self._check_disk(self.clock.now_ms())  # a disk that is too full refuses the append
        error = retention.full_error()
        if error is not None:
            raise error
        if retention.is_held and retention.is_full():
            self.expire_soon()
        elif retention.sees_disk_by_time and self.appender.accepts:
            self.appender.room_until = retention.room_end

    def verify(self) -> Verdict:
        """Look at all of the store, changing nothing; producers wait."""
        from librmq.store.recovery._verify import verify_parts

        appender = self.appender

        def look() -> Verdict:
            if self.closed is not None:
                raise self.unusable()
            if appender.shared is not None:
                appender.shared.shut()
            appender.catch_up()
            return verify_parts(self.path, self.config, self.files)

        return appender.under_lock(look)

    def copy_log(self, physical_offset: int, data: bytes, *, is_checked: bool = False) -> CopiedRecords:
        """Append bytes of the master's log, whole records and blanks of one of its files, to this replica.

        ``physical_offset`` is the log's end, or in an empty store the start of a log file. ``is_checked`` says that the
        bytes are whole records, because an open store of this process has them.

        Raises:
            CorruptionError: The bytes are not whole records; nothing was appended.
            ReplicaError: The store is not a replica.
            StoreIOError: There is no space.
        """
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
            self.replace_parts()
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
            self.appender.dispatcher.followed = physical_offset
        if physical_offset != log.end:
            raise ValueError(f"physical_offset: expected the log's end {log.end}, found {physical_offset}")
        from librmq.store.engine.copies import append_log  # few stores are copies

        return append_log(self.appender.open_parts(), data, is_checked=is_checked)

    def cut_copy(self, physical_offset: int) -> None:
        """Cut this replica's log at the start of a record, where the next `copy_log` continues."""
        self._check_copies()

        def cut() -> None:
            part_files = PartFiles(self.path, self.config, self.files)
            with part_files.open_log(writable=True, scan_from=lambda _: physical_offset) as log:
                log.truncate(physical_offset)
                log.flush()

        self.replace_parts(cut)

    def clear_copy(self) -> None:
        """Delete all messages of this replica, which then begins where the next `copy_log` says."""
        self._check_copies()
        self.replace_parts(self._delete_content)

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

    def replace_parts(self, between: Callable[[], None] | None = None) -> list[Damage]:
        """Close the parts, call ``between()``, and open them by a thorough recovery; return its findings."""
        appender = self.appender
        appender.lock.check_reentry()
        self.thread.stop()
        thread = get_ident()
        with calls_later(), appender.lock.flushing, appender.lock.mutex:
            try:
                appender.lock.owner = thread
                if self.closed is not None:
                    raise self.unusable()
                if appender.shared is not None:
                    appender.shared.shut()
                with critical:
                    with suppress(CorruptionError):  # the recovery looks at the log again
                        appender.catch_up()
                    self.closed, appender.accepts = "could not be recovered", False  # until it succeeds
                    self._close_parts()
                try:
                    delete_state(self.path, self.files)
                    if between is not None:
                        between()
                    recovered = self._load_parts(RecoveryMode.LIVING)
                    self.accept_calls()
                except BaseException:
                    with critical:
                        self.closed, appender.accepts = "could not be recovered", False
                        self._release_store()
                    raise
            finally:
                appender.lock.owner = 0
            return list(recovered.cuts)

    # --------------------------------------------------------------------------------------------------------- closing

    @override
    def close(self) -> None:
        with critical:
            if not self._stop_calls("is closed"):
                self._release_store()  # a signal can have interrupted an opening or a recovery
                return
            try:
                self._write_corrected()
                self.durability.flush()
                for queue in self.queues.opened():
                    # Flush queues that no append wrote to as well: retention may have deleted their files.
                    queue.flush()
                write_closed_state(
                    self.path, self.files, self.log, self.queues, self.index, self.appender.dispatcher.order
                )
                delete_state(self.path, self.files)  # it names the machine, and equal stores have equal files
                clear_abort(self.files, self.path)
            finally:
                self._release_store()

    @override
    def abandon(self, why: str) -> None:
        with critical:
            if not self._stop_calls(why):
                self._release_store()
                return
            try:
                # A reader that found collected entries may be writing them, so the lock is needed although no append
                # comes.
                with suppress(StoreIOError), self.lock.mutex:
                    self.appender.catch_up()
            finally:
                self._release_store()

    @override
    def after_fork(self) -> None:
        super().after_fork()
        self.thread.after_fork()
        self.retention.after_fork()
        # A thread of the parent may hold the lock, and does not exist in this process; closing would wait for it.
        self._file_lock = None
        self.appender.after_fork()
        self.durability.commit.stop_after_fork(f"{self.path}: this handle {self.closed}")

    def _stop_calls(self, why: str) -> bool:
        """Take no more calls; return False if that was so already."""
        self.appender.lock.check_reentry()
        if self.appender.shared is not None:
            self.appender.shared.close()
        with self.appender.lock.mutex:
            if self.closed is not None:
                return False
            self.closed: str | None = why
            self.appender.accepts = False
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

    @override
    def check_open(self) -> None:
        if self.closed is not None:
            self.lock.check_reentry()
            with self.lock.flushing:  # a recovery holds this too
                super().check_open()

    def _refusal(self) -> Exception:
        if self.closed is None:
            if self.durability.commit.failure is not None:
                return FlushFailedError(self.durability.commit.failure)
            if self.retention.refuses_writes:
                return self.retention.refusal()
        return self.unusable()

    @override
    def unusable(self) -> Exception:
        if self.closed is None and self.replica_of is not None:
            return ReadOnlyError(_no_writes(self.path, self.replica_of))
        return super().unusable()


def _make_comparison(parts: Parts, checks: EntryChecks) -> Comparison:
    from librmq.store.engine._comparison import Comparison  # after a clean exit nothing needs it

    return Comparison(parts, checks)


def _no_writes(path: str, master: str) -> str:
    return (
        f"{path}: this store is a replica of {master} and takes no writes: write to {master}, read by "
        "MessageStore.open(path, read_only=True), or make it a store of its own by librmq.cluster.promote_replica"
    )


# ---- the lock of a store: one process, and one handle in it, holds it while it writes

_LOOK_AGAIN_S: Final = 0.05
"""Interval at which a lock of another writer is tried."""

_held: dict[FileLock, weakref.ref[Writer]] = {}
"""The locks of this process, with their handles."""


def lock_store(handle: Writer, path: str, files: Files, wait_s: float) -> FileLock:
    """Lock the store in ``path`` for ``handle``; wait ``wait_s`` for another writer, in real time.

    Raises:
        StoreLockedError: Another writer has the store.
    """
    clock, never = SystemClock(), Event()
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


def _lock(handle: Writer, path: str, files: Files) -> FileLock:
    """Take the lock; first release the lock of a handle that Ctrl-C lost."""
    while True:
        try:
            lock = files.lock(directory.lock_path(path))
            try:
                lock.hold_folder()
            except BaseException:
                lock.release()
                raise
        except StoreLockedError:
            gc.collect()
            lost_locks = [lock for lock, holder in list(_held.items()) if holder() is None]
            if not lost_locks:
                raise
            for lost_lock in lost_locks:
                unlock_store(lost_lock)
        else:
            _held[lock] = weakref.ref(handle)
            return lock


def unlock_store(lock: FileLock) -> None:
    """Release a lock; a second call does nothing."""
    with critical:
        if _held.pop(lock, None) is not None:
            lock.release()


call_in_child(_held.clear)  # the locks are the parent's
