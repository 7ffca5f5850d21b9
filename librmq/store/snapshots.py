"""Stores made from other stores: snapshots of stores in use, restored snapshots, and rescued damaged stores.

A snapshot holds the log up to its end at the call, and the queues, full index files and tables of ``config/`` copied
afterwards. These can be ahead, behind, or in the middle of a write. Queues and index of the snapshot are then
made to agree with its log; tables stay as they are. A writer continues undisturbed.

A new store grows under the name ``TARGET.part``, is flushed, and gets its name last. If a process dies before that, the
next one removes the remains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import struct
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from librmq.clock import Clock, SystemClock
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig, check_path
from librmq.errors import (
    ConfigError,
    CorruptionError,
    MessageIllegalError,
    NotAStoreError,
    StoreError,
    StoreIOError,
    StoreLockedError,
)
from librmq.files.disk import DiskFiles
from librmq.files.interface import (
    Damage,
    FileLock,
    Files,
    FolderEntry,
    copy_file,
    link_file,
    make_folders,
    numbered_files,
)
from librmq.files.rolling import file_name
from librmq.message import record
from librmq.message.delay_levels import SCHEDULE_TOPIC, queue_id_of_level
from librmq.message.message import StoredMessage
from librmq.message.topics import HALF_TOPIC, OP_TOPIC, validate_queue
from librmq.runtime.locks import critical
from librmq.store.engine.dispatch import has_queue_entry
from librmq.store.engine.store_parts import PartFiles
from librmq.store.format import directory
from librmq.store.format.broker_tables import BrokerTables, ConfigTable
from librmq.store.format.checkpoint import has_abort
from librmq.store.format.documents import JOB_NOTES_FOLDER, OWN_FOLDER, JobNote, MovedJobs, note_path, noted_jobs
from librmq.store.format.timerfiles import TimerCheckpoint
from librmq.store.recovery import salvage
from librmq.store.recovery.open import read_closed_state, settle
from librmq.store.recovery.salvage import Gap

# ---- progress of groups and delay levels

PROGRESS_TABLES: Final = ("consumerOffset.json", "delayOffset.json")
"""Files of ``config`` with the progress of consumers and delay levels."""

NewOffset = Callable[[str, int, int], int]
"""Function of topic, queue id and queue offset to the queue offset in the copy."""


def revise_progress(path: str, files: Files, new_offset: NewOffset, now_ms: int) -> None:
    """Replace every stored queue offset by its ``new_offset``.

    A rescued store numbers its messages differently, and progress beyond a queue would make a group skip later
    messages. Backups are deleted, since they hold the progress of the source.

    Raises:
        CorruptionError: A table and its backup are unreadable.
    """
    folder = os.path.join(path, directory.CONFIG)
    tables = BrokerTables.open(folder, files=files)
    for name, offsets in list(tables.offsets.rows.items()):
        topic = name.rpartition("@")[0]
        tables.offsets.set(name, {queue_id: new_offset(topic, queue_id, at) for queue_id, at in offsets.items()})
    for level, at in list(tables.delays.rows.items()):
        tables.delays.set(level, new_offset(SCHEDULE_TOPIC, queue_id_of_level(level), at))
    for table, file in zip((tables.offsets, tables.delays), PROGRESS_TABLES, strict=True):
        _write(table, os.path.join(folder, file), files, now_ms)


def _write(table: ConfigTable, path: str, files: Files, now_ms: int) -> None:
    if not files.size(path) and not files.size(f"{path}.bak"):
        return  # the source has no such table
    table.persist(now_ms)
    if files.size(f"{path}.bak") is not None:
        files.delete(f"{path}.bak")


_PART: Final = ".part"
_STILL_WRITTEN: Final = 2  # files of the log that a writer or its recovery can still change
_ATTEMPTS: Final = 10
_MAKING_S: Final = 0.01
_PROGRESS: Final = re.compile(r"(consumerOffset|delayOffset)\.json(\.bak)?|timercheck")
_TIMER_CHECK: Final = re.compile("timercheck")
_KEPT_CONFIG: Final = re.compile(r"config\.json")
_NOTE: Final = re.compile(r".*\.json")  # of a job whose records are in the log
_MAX_DIGITS: Final = 20  # digits of a queue offset
_LONG: Final = struct.Struct(">q")


class Snapshot(NamedTuple):
    """Content of a snapshot: the log from ``begin`` to ``end``, in copied files and in links to files of the store."""

    path: str
    """The folder of the snapshot."""
    begin: int
    """The physical offset of its first byte."""
    end: int
    """The physical offset behind its last byte."""
    copied_files: int
    """Number of log files."""
    linked_files: int
    """Number of log files that the store and the snapshot share."""
    changed: tuple[Damage, ...] = ()
    """What is different in the snapshot of a store that no process used: parts of queues that contradicted the log, and
    an abort marker. The index is always made from the log."""


class Rescued(NamedTuple):
    """A new store with the sound records of a damaged one."""

    path: str
    """The folder of the new store."""
    records: int
    """Number of copied records."""
    gaps: int
    """Number of gaps in the damaged log."""


def snapshot(
    path: str,
    target: str,
    config: StoreConfig | None = None,
    *,
    copy: bool = False,
    files: Files | None = None,
    clock: Clock | None = None,
    end: Callable[[], int] | None = None,
) -> Snapshot:
    """Copy the store in ``path`` to a snapshot in the folder ``target``, which must be empty or not exist.

    This process or another can use the store at the same time; no lock is taken. The snapshot contains every message
    acknowledged before the call, and is a sound, cleanly closed store. Full files of the log, except the last two, are
    hard-linked if the file system allows it and ``copy`` is false. All others are copied. The whole log is read.
    Tables of ``config/`` are copied as they are, progress beyond the end of a queue too. Queues and index then agree
    with the log; `Snapshot.changed` lists what that changed.
    ``end()`` returns the end of the log; without it, the end is searched for.

    Errors of opening a store are raised too; after an error there is no ``target``.

    Raises:
        CorruptionError: The log is damaged.
        StoreIOError: For example, the disk is full, or ``target`` is not empty.
        ConfigError: ``target`` is in the store.
    """
    check_path("path", path, "the folder of a store")
    check_path("target", target, "the folder of a new store")
    files, clock = files or DiskFiles(), clock or SystemClock()
    _check_copyable(path, files)
    _check_outside(path, target)
    config = config or directory.infer_config(path, files)
    keep_deleted = _is_whole(path, files)
    is_used = files.lock_holder(directory.lock_path(path)) is not None
    with _growing(target, files) as part:
        # Copied before the log's end is known, so that all messages behind progress and notes are in the log.
        _copy_progress(path, part, files)
        # Index files that are full by now have no record behind the end.
        index = _listed(os.path.join(path, directory.INDEX), files)[:-1]
        log_end = end() if end is not None else _log_end(path, config, files, clock)
        copied, linked = _copy_log(path, part, config, log_end, copy, files)
        for entry in index:
            _copy(path, part, os.path.join(directory.INDEX, entry.name), files)
        for ext in (False, True):
            for topic, queue_id in directory.list_queues(path, files, ext=ext):
                folder = os.path.relpath(directory.queue_folder(path, topic, queue_id, ext=ext), path)
                _copy_sequence(path, part, folder, files)
        _copy_config(path, part, files, without=_PROGRESS)
        begin, found_end, _, cuts = settle(part, config, files, clock, keep_deleted=keep_deleted)
        if found_end != log_end:
            file = os.path.join(
                path, directory.COMMITLOG, file_name(found_end - found_end % config.commitlog_file_size)
            )
            what = f"expected a sound record, because the log continues to {log_end}: repair it before a snapshot"
            raise CorruptionError(file, found_end, "record", what)
        for folder in (directory.COMMITLOG, directory.CONSUMEQUEUE, directory.CONSUMEQUEUE_EXT, directory.INDEX):
            _keep_times(path, part, files, folder)
    return Snapshot(
        target, begin, found_end, copied, linked, () if is_used else _changes(path, part, target, cuts, files)
    )


def _changes(path: str, part: str, target: str, cuts: Sequence[Damage], files: Files) -> tuple[Damage, ...]:
    """Return what recovery changed in the queues of the copy ``part``, and whether the store had an abort marker."""
    of_queues = tuple(os.path.join(part, name) for name in (directory.CONSUMEQUEUE, directory.CONSUMEQUEUE_EXT))
    changed = [
        dataclasses.replace(cut, file=os.path.join(target, os.path.relpath(cut.file, part)))
        for cut in cuts
        if cut.file.startswith(of_queues)
    ]
    if has_abort(files, path):
        what = "removed: the copy is closed, the store was not"
        changed.append(Damage(os.path.join(target, directory.ABORT), 0, "abort", what))
    return tuple(changed)


def restore(path: str, target: str, config: StoreConfig | None = None, *, files: Files | None = None) -> Snapshot:
    """Create a store in ``target`` from the snapshot in ``path``: copy and check every file; the snapshot stays."""
    return snapshot(path, target, config, copy=True, files=files)


def rescue(
    path: str,
    target: str,
    config: StoreConfig | None = None,
    *,
    files: Files | None = None,
    tell: Callable[[Gap], object] = lambda gap: None,
) -> Rescued:
    """Create a store in ``target``, which is empty or does not exist, from every sound record of the store in ``path``.

    The order is that of `librmq.store.recovery.salvage.records`, including the kept cuts; ``tell`` is called with each
    gap. Records keep their fields except physical offset, offset id and queue offset. The messages of each queue are
    numbered from 0 without a gap, so that no consumer stops at a lost message. The progress of groups, delay levels and
    transactions is adjusted to the new numbers. A Spark job with a ``jobId`` stays committed if its first record was
    saved, or, after its end, any record; otherwise it can write its messages again.
    """
    check_path("path", path, "the folder of a store")
    check_path("target", target, "the folder of a new store")
    files, clock = files or DiskFiles(), SystemClock()
    config = config or directory.infer_config(path, files)
    count = gaps = 0
    with _growing(target, files) as part:
        log = PartFiles(part, config, files).open_log(writable=True)
        numbers, jobs = _Renumbering(), MovedJobs(_sound_notes(path, files, tell))
        for item in _records(path, files, numbers.end_log):
            if isinstance(item, StoredMessage):
                try:
                    validate_queue(item.topic, item.queue_id)
                    place, raw = _append(log, item, numbers)
                    jobs.copied(item.physical_offset, item.raw, place, raw)
                    count += 1
                    continue
                except MessageIllegalError as error:
                    item = Gap(item.physical_offset, item.size, path, str(error))
            gaps += 1
            tell(item)
        log.close()
        _copy_config(path, part, files, OWN_FOLDER, only=_KEPT_CONFIG)
        moved = jobs.finish()
        if moved:
            make_folders(files, os.path.join(part, JOB_NOTES_FOLDER))
        for job, note in moved.items():
            note.write(note_path(part, job), files)
        _copy_config(path, part, files, without=_TIMER_CHECK)  # it belongs to a timer log that is not copied
        with contextlib.suppress(CorruptionError):  # a table that can't be read stays as it is
            revise_progress(part, files, numbers.new_offset, clock.now_ms())
        settle(part, config, files, clock)
    return Rescued(target, count, gaps)


def _records(path: str, files: Files, end_log: Callable[[], None]) -> Iterator[StoredMessage | Gap]:
    directory.check_kind(path, files, log_only=True)
    yield from salvage.log_records(path, files)
    end_log()
    yield from salvage.cut_records(path, files)


class _Renumbering:
    """Queue offsets of a rescued store: each queue counts from 0 without a gap.

    A consumer cannot pass an entry that leads to no record, so a lost record has no entry.
    """

    def __init__(self) -> None:
        self._old: dict[tuple[str, int], array[int]] = {}  # by new queue offset
        self._made_again: dict[tuple[str, int], int] = {}
        self._log_ends: dict[tuple[str, int], int] = {}
        self._halves: dict[tuple[int, int], int] = {}

    def next(self, message: StoredMessage) -> int:
        """Return the queue offset of the next record."""
        name, old = (message.topic, message.queue_id), message.queue_offset
        queue = self._old.get(name)
        if queue is None:
            queue = self._old[name] = array("q")
        new = len(queue)
        if new > 1 and queue[-1] < queue[-2] and old == queue[-1] + 1:
            self._made_again[name] = new - 1  # two such records show that the topic was deleted and made again
        queue.append(old)
        if message.topic == HALF_TOPIC:
            self._halves[message.queue_id, old] = new
        return new

    def end_log(self) -> None:
        """Note that the following records were cut from the log, so no progress passes them."""
        self._log_ends = {name: len(queue) for name, queue in self._old.items()}

    def new_offset(self, topic: str, queue_id: int, queue_offset: int) -> int:
        """Return the queue offset after everything that ``queue_offset`` of the damaged store had passed."""
        name = topic, queue_id
        begin, end = self._made_again.get(name, 0), self._log_ends.get(name, 0)
        if begin >= end:
            return end
        left = np.frombuffer(self._old[name], np.int64)[begin:end] >= queue_offset
        return begin + int(left.argmax()) if left.any() else end

    def half(self, queue_id: int, queue_offset: int) -> int:
        """Return the new queue offset of a half message; -1 if it was lost."""
        return self._halves.get((queue_id, queue_offset), -1)


def _sound_notes(path: str, files: Files, tell: Callable[[Gap], object]) -> dict[str, JobNote]:
    """Return the store's notes about jobs; ``tell`` is called with unreadable ones."""
    notes = {}
    for job in noted_jobs(path, files):
        try:
            notes[job] = JobNote.read(note_path(path, job), files)
        except CorruptionError as error:
            tell(Gap(0, 0, error.file, error.what))
    return notes


def _append(log: CommitLog, message: StoredMessage, numbers: _Renumbering) -> tuple[int, bytes]:
    """Append a record to a new log, with a new physical offset and queue offset; return its place and bytes."""
    raw = bytearray(message.raw)
    if has_queue_entry(message.sys_flag):
        if message.topic == OP_TOPIC:
            raw = _op_of_half(message, numbers)
        raw[record.QUEUE_OFFSET_AT : record.QUEUE_OFFSET_AT + 8] = _LONG.pack(numbers.next(message))
    place = log.claim(len(raw))
    raw[record.PHYSICAL_OFFSET_AT : record.PHYSICAL_OFFSET_AT + 8] = _LONG.pack(place)
    data = bytes(raw)
    log.append(data)
    return place, data


def _op_of_half(message: StoredMessage, numbers: _Renumbering) -> bytearray:
    """Return the record of an op message that names the half's new queue offset."""
    op = record.decode_record(message.raw)
    text = op.body.decode("ascii", "replace")
    if text.isdigit() and len(text) < _MAX_DIGITS:
        body = str(numbers.half(message.queue_id, int(text))).encode()
        op = dataclasses.replace(op, body=body, body_crc=record.body_checksum(body))
    return bytearray(record.encode_record(op))


# ------------------------------------------------------------------------------------------------------ the target


def _check_outside(path: str, target: str) -> None:
    """Refuse a target below the store, where a later copy of the folder would find it; links don't hide it."""
    if Path(os.path.realpath(path)) in Path(os.path.realpath(target)).parents:
        raise ConfigError(f"target: {target} is in the store; name a folder outside of it")


@contextlib.contextmanager
def _growing(target: str, files: Files) -> Iterator[str]:
    """Make a folder that gets the name ``target`` on success, and is removed after an error."""
    target = target.rstrip(os.sep) or target
    if files.list(target) if files.is_folder(target) else files.size(target) is not None:
        raise StoreIOError("make a store in", target, OSError(errno.EEXIST, "it is not empty: name a new folder"))
    parent, part = os.path.dirname(target) or os.curdir, target + _PART
    make_folders(files, parent)
    files.make_folder(part)
    lock: FileLock | None = None
    try:
        with critical:
            lock = files.lock(directory.lock_path(part))
        for entry in files.list(part):
            if entry.name != directory.LOCK:
                files.delete(os.path.join(part, entry.name))
        files.make_folder(os.path.join(part, directory.COMMITLOG))
        yield part
        _flush_folders(part, files)
        files.delete(target)
        files.rename(part, target)
        files.flush_folder(parent)
    except StoreLockedError:  # another process makes it
        raise
    except BaseException:
        with contextlib.suppress(StoreError):
            files.delete(part)
        raise
    finally:
        if lock is not None:
            with critical:
                lock.release()


def _flush_folders(folder: str, files: Files) -> None:
    for entry in files.list(folder):
        if entry.is_folder:
            _flush_folders(os.path.join(folder, entry.name), files)
    files.flush_folder(folder)


# ------------------------------------------------------------------------------------------------------ the source


def _check_copyable(path: str, files: Files) -> None:
    kind = directory.check_kind(path, files)
    if kind is not directory.StoreKind.V4 and not directory.is_4_with_timers(path, files):
        raise NotAStoreError(f"{path}: {kind.value}, some of whose files a snapshot can't copy")


def _is_whole(path: str, files: Files) -> bool:
    """Return whether missing queues were deleted: the store was closed, and had no other queues then."""
    if has_abort(files, path) or files.lock_holder(directory.lock_path(path)) is not None:
        return False
    closed = read_closed_state(path, files)
    return closed is None or closed.queues.keys() <= set(directory.list_queues(path, files))


def _log_end(path: str, config: StoreConfig, files: Files, clock: Clock) -> int:
    """Return the end of the log, to which another process can be writing."""
    folder = os.path.join(path, directory.COMMITLOG)
    for _ in range(_ATTEMPTS - 1):
        try:
            return _walked_end(folder, config, files)
        except StoreIOError:  # a file was deleted meanwhile
            continue
        except CorruptionError as error:
            if (error.kind, error.offset) != ("size", 0):
                raise
            clock.wait(threading.Event(), _MAKING_S)  # a file is being made, unless it stays so
    return _walked_end(folder, config, files)


def _walked_end(folder: str, config: StoreConfig, files: Files) -> int:
    with CommitLog.open(folder, config.commitlog_file_size, files=files, writable=False) as log:
        end = log.found_end.physical_offset
        following = salvage.find_record(log.sequence, end + max(log.unfinished_at(end), 1))
        if following is not None and log.walk(end).physical_offset == end:  # otherwise it was being written
            what = f"expected a record, because sound ones follow from {following} on: repair the log before a snapshot"
            raise CorruptionError(log.sequence.path_at(end), end, "record", what)
        return end if end % config.commitlog_file_size else _end_of_records(log, end)


def _end_of_records(log: CommitLog, end: int) -> int:
    """Return the end of the last record of the file before ``end``: its blank is written again without a next file."""
    ends: list[int] = []
    log.walk(max(0, end - log.file_size), lambda _log, place, raw: ends.append(place + len(raw)))
    return max((place for place in ends if place <= end), default=end)


def _listed(folder: str, files: Files) -> list[FolderEntry]:
    """Return the files of a folder with numbers as names, except those that are being made."""
    return [entry for entry in numbered_files(files, folder) if entry.size]


def _copy_log(path: str, part: str, config: StoreConfig, end: int, copy: bool, files: Files) -> tuple[int, int]:
    """Copy or link the log up to ``end``, and return the numbers of copied and linked files."""
    size = config.commitlog_file_size
    starts = [int(entry.name) for entry in _listed(os.path.join(path, directory.COMMITLOG), files)]
    copied = linked = 0
    # The newest first, because retention can delete the oldest, and a gap would be damage.
    for start in sorted((start for start in starts if start < end), reverse=True):
        name = os.path.join(directory.COMMITLOG, file_name(start))
        source, target = os.path.join(path, name), os.path.join(part, name)
        try:
            file = files.open(source)
            if file.size != size:
                raise CorruptionError(source, min(file.size, size), "size", f"expected {size} bytes, found {file.size}")
            if not copy and start + _STILL_WRITTEN * size < end and link_file(files, source, target):
                linked += 1  # it is flushed when the copy is recovered
            else:
                copy_file(files, file, target, end=min(size, end - start), size=size)
                copied += 1
        except StoreIOError as error:
            if not _vanished(error, source, files):
                raise
            break
    return copied, linked


def _copy_sequence(path: str, part: str, folder: str, files: Files) -> None:
    """Copy the existing files of a queue, the newest first."""
    files.make_folder(os.path.join(part, folder))
    for entry in reversed(_listed(os.path.join(path, folder), files)):
        if not _copy(path, part, os.path.join(folder, entry.name), files):
            break


def _copy(path: str, part: str, name: str, files: Files) -> bool:
    """Copy a file; return False if it was deleted meanwhile."""
    source, target = os.path.join(path, name), os.path.join(part, name)
    files.make_folder(os.path.dirname(target))
    try:
        copy_file(files, files.open(source), target)
    except StoreIOError as error:
        if not _vanished(error, source, files):
            raise
        return False
    return True


def _vanished(error: StoreIOError, source: str, files: Files) -> bool:
    return error.errno == errno.ENOENT and files.size(source) is None


def _keep_times(path: str, part: str, files: Files, folder: str) -> None:
    """Give the files of a folder the modification times of the source, by which a broker finds messages by time."""
    for entry in files.list(os.path.join(part, folder)):
        name = os.path.join(folder, entry.name)
        source = os.path.join(path, name)
        if entry.is_folder:
            _keep_times(path, part, files, name)
            continue
        try:
            files.copy_times(source, os.path.join(part, name))
        except StoreIOError as error:
            if not _vanished(error, source, files):
                raise


def _copy_progress(path: str, part: str, files: Files) -> None:
    """Copy the progress of consumers, delays, timers and jobs."""
    _copy_config(path, part, files, only=_PROGRESS)
    if files.size(TimerCheckpoint.path_in(part)):  # without it the timer reads its queue from the beginning
        _copy_sequence(path, part, directory.TIMERLOG, files)
    _copy_config(path, part, files, JOB_NOTES_FOLDER, only=_NOTE)
    _copy_config(path, part, files, OWN_FOLDER, only=_KEPT_CONFIG)


def _copy_config(
    path: str,
    part: str,
    files: Files,
    folder: str = directory.CONFIG,
    *,
    only: re.Pattern[str] | None = None,
    without: re.Pattern[str] | None = None,
) -> None:
    """Copy the tables of a folder, each as a whole."""
    for entry in files.list(os.path.join(path, folder)):
        name = os.path.join(folder, entry.name)
        if entry.is_folder:
            if only is None:
                _copy_config(path, part, files, name)
            continue
        if not entry.is_file:
            continue  # not a file of a store
        if (only is not None and not only.fullmatch(entry.name)) or (without and without.fullmatch(entry.name)):
            continue
        files.make_folder(os.path.join(part, folder))
        try:
            files.write(os.path.join(part, name), files.read(os.path.join(path, name)))
        except StoreIOError as error:
            if not _vanished(error, os.path.join(path, name), files):
                raise
