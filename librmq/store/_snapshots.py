"""Copies of whole stores: snapshots of stores in use, and restored snapshots.

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
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple

from librmq.clock import Clock, SystemClock
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig, check_path
from librmq.errors import ConfigError, CorruptionError, StoreError, StoreIOError, StoreLockedError
from librmq.files import Damage, DiskFiles, FileLock, Files, FolderEntry, file_size, is_folder
from librmq.files.interface import (
    SystemCall,
    confine,
    copy_file,
    flush_all,
    link_file,
    make_folders,
    numbered_files,
    read_sole_file,
)
from librmq.files.rolling import file_name
from librmq.runtime import critical
from librmq.store.engine.saved_state import read_closed_state
from librmq.store.engine.store_parts import QueueName
from librmq.store.format import directory
from librmq.store.format.broker_tables import BrokerTables
from librmq.store.format.directory import has_abort, is_database, set_abort
from librmq.store.format.documents import JOBS_FOLDER, OWN_FOLDER
from librmq.store.format.timerfiles import TimerCheckpoint, TimerWheel
from librmq.store.recovery import salvage
from librmq.store.recovery._copied_parts import flush_made, settle

_PART: Final = ".part"
_STILL_WRITTEN: Final = 2  # a writer or its recovery can still change this many files at the end of the log
_ATTEMPTS: Final = 10
_MAKING_S: Final = 0.01
_LARGEST: Final = 1 << 16  # a file of a queue with more bytes is mapped, not read at once
_PROGRESS: Final = re.compile(r"(consumerOffset|delayOffset)\.json(\.bak)?|timercheck")
KEPT_CONFIG: Final = re.compile(r"(config|retention|settings)\.json")
_OF_PLACES: Final = re.compile(
    r"(config|retention|settings|cancelled(-since)?|starts|schedules|resent|replay)\.json|skipped\.jsonl"
)
"""These and what has places in the log and its queues, which a snapshot keeps."""
_NOTE: Final = re.compile(r".*\.json")  # these are notes of a Spark job whose records are in the log


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
    Tables of ``config/`` are copied as they are, progress beyond the end of a queue too, with what groups have reached
    since, but not what they have in work; so are schedules, and notes of what was skipped or sent again. Queues and
    index then agree with the log; `Snapshot.changed` lists what that changed. ``end()`` returns the end of the log;
    without it, the end is searched for. An error leaves no ``target``.

    Raises:
        RmqError: As of an opening of the store.
        CorruptionError: The log is damaged.
        StoreIOError: For example, the disk is full, or ``target`` is not empty.
        ConfigError: ``target`` is in the store.
    """
    check_path("path", path, "the folder of a store")
    check_path("target", target, "the folder of a new store")
    files, clock = files or DiskFiles(), clock or SystemClock()
    kind = directory.check_kind(path, files)
    check_outside(path, target)
    config = config or directory.infer_config(path, files)
    keeps_deleted = _is_whole(path, files)
    is_used = files.lock_holder(directory.lock_path(path)) is not None
    with growing_store(target, files) as part:
        # Copy this before the log's end is known, so that all messages behind progress and notes are in the log.
        _copy_progress(path, part, files, clock.now_ms())
        if kind.value.startswith(directory.StoreKind.V5.value):
            _copy_files_of_5(path, part, kind, files)
        if not kind.derives_queues and file_size(files, os.path.join(path, directory.CHECKPOINT)):
            _copy(path, part, directory.CHECKPOINT, files)
        # Index files that are full by now have no record behind the end.
        index = _listed(os.path.join(path, directory.INDEX), files)[:-1]
        log_end = end() if end is not None else _log_end(path, config, files, clock)
        copied, linked = _copy_log(path, part, config, log_end, copy, files)
        timed = [directory.COMMITLOG, directory.CONSUMEQUEUE_EXT, directory.INDEX]
        if not kind.derives_queues:
            timed += _copy_derived(path, part, index, config.consumequeue_file_size, files)
        copy_config(path, part, files, without=_PROGRESS)
        if kind.derives_queues:
            begin, found_end, cuts = *_check_log(part, config, files), list[Damage]()
        else:
            if has_abort(files, path) and not is_used:
                set_abort(files, part)  # a crash can have changed the last records
            begin, found_end, cuts = settle(part, config, files, clock, keeps_deleted=keeps_deleted)
        if found_end != log_end:
            start = found_end - found_end % config.commitlog_file_size
            what = f"expected a sound record, because the log continues to {log_end}: repair it before a snapshot"
            raise CorruptionError(os.path.join(path, directory.COMMITLOG, file_name(start)), found_end, "record", what)
        of_queues = os.path.join(part, directory.CONSUMEQUEUE, "")
        timed += {os.path.dirname(os.path.relpath(cut.file, part)) for cut in cuts if cut.file.startswith(of_queues)}
        _keep_times(path, part, files, timed)
    changed = () if is_used else _changes(path, part, target, cuts, files)
    return Snapshot(target, begin, found_end, copied, linked, changed)


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


# ------------------------------------------------------------------------------------------------------ the target


def check_outside(path: str, target: str) -> None:
    """Refuse a target below the store, where a later copy of the folder would find it; links don't hide it."""
    if Path(os.path.realpath(path)) in Path(os.path.realpath(target)).parents:
        raise ConfigError(f"target: {target} is in the store; name a folder outside of it")


_MANY_FOLDERS: Final = 256
"""Folders from which flushing the whole file system takes less time than flushing each of them."""


@contextlib.contextmanager
def growing_store(target: str, files: Files) -> Iterator[str]:
    """Make a folder that gets the name ``target`` on success, and is removed after an error."""
    target = target.rstrip(os.sep) or target
    if files.list(target) if is_folder(files, target) else file_size(files, target) is not None:
        raise StoreIOError("make a store in", target, OSError(errno.EEXIST, "it is not empty: name a new folder"))
    parent, part = os.path.dirname(target) or os.curdir, target + _PART
    if files.is_shared and os.path.islink(part):
        raise CorruptionError(part, 0, "name", "a symbolic link: expected a folder in the making, or none: delete it")
    make_folders(files, parent)
    files.make_folder(part)
    for folder in (part, target):
        confine(files, folder, OWN_FOLDER)
    lock: FileLock | None = None
    try:
        with critical:
            lock = files.lock(directory.lock_path(part))
            lock.mark_untouched()
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
    many = itertools.islice(_folders_below(folder, files), _MANY_FOLDERS, None)
    if next(many, None) is not None and flush_all(files, folder):
        return
    for path in _folders_below(folder, files):
        files.flush_folder(path)


def _folders_below(folder: str, files: Files) -> Iterator[str]:
    """Yield the folders below a folder, and then the folder itself."""
    for entry in files.list(folder):
        if entry.is_folder:
            yield from _folders_below(os.path.join(folder, entry.name), files)
    yield folder


# ------------------------------------------------------------------------------------------------------ the source


_OF_5: Final = (
    directory.TIMERWHEEL,  # it is copied before its log, so that it leads to nothing that the copy lacks
    directory.TIMERLOG,
    directory.COMPACTION,
    "brokerIdentity",
    "epochFileCheckpoint",
)
"""Files and folders of a broker of 5.x that are copied as they are."""
_OF_QUEUES: Final = (
    directory.CONSUMEQUEUE,
    directory.CONSUMEQUEUE_ROCKSDB,
    directory.BATCHCONSUMEQUEUE,
    directory.INDEX,
    "kvStore",
)
"""The same where librmq derives queues from the log: a broker adds or cuts what does not fit the log when it starts."""


def _copy_files_of_5(path: str, part: str, kind: directory.StoreKind, files: Files) -> None:
    """Copy what a store of 5.x has beside the files of 4.9; databases of RocksDB as a whole."""
    wheels = [f"{directory.TIMERWHEEL}.{position}" for position in TimerWheel.snapshots_in(path, files)]
    for name in (*wheels, *_OF_5, *(_OF_QUEUES if kind.derives_queues else ())):
        _copy_below(path, part, name, files)
    for name in files.names(os.path.join(path, directory.CONFIG)):
        if is_database(os.path.join(path, directory.CONFIG, name), files):
            _copy_below(path, part, os.path.join(directory.CONFIG, name), files)


def _copy_below(path: str, part: str, name: str, files: Files) -> None:
    """Copy a file or a folder, again if a broker changed its names meanwhile: files of a database fit together."""
    source, target = os.path.join(path, name), os.path.join(part, name)
    if not is_folder(files, source):
        if (size := file_size(files, source)) is not None:
            if size:
                _copy(path, part, name, files)
            else:
                files.write(target, b"")
        return
    for _ in range(_ATTEMPTS):
        names = files.names(source)
        if is_folder(files, target):
            files.delete(target)
        files.make_folder(target)
        for below in names:
            if below != directory.LOCK.upper():
                _copy_below(path, part, os.path.join(name, below), files)
        if names == files.names(source):
            return
    raise StoreIOError("copy", source, OSError(errno.EBUSY, "its files change too fast: try again, or stop the broker"))


def _check_log(part: str, config: StoreConfig, files: Files) -> tuple[int, int]:
    """Return begin and end of the log of a copy whose queues are derived from it; read it as a whole."""
    folder = os.path.join(part, directory.COMMITLOG)
    with CommitLog.open(folder, config.commitlog_file_size, files=files, writable=False) as log:
        return log.begin, log.walk(log.begin).physical_offset


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
        # Search only up to the last data, because reading holes takes room in a file system that keeps files in memory.
        until = end + log.data_behind(end)
        following = salvage.find_record(log.sequence, end + max(log.unfinished_at(end), 1), until)
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
    # Copy the newest first, because retention can delete the oldest, and a gap would be damage.
    for start in sorted((start for start in starts if start < end), reverse=True):
        name = os.path.join(directory.COMMITLOG, file_name(start))
        source, target = os.path.join(path, name), os.path.join(part, name)
        with _unless_deleted(source, files):
            file = files.open(source)
            if file.size != size:
                raise CorruptionError(source, min(file.size, size), "size", f"expected {size} bytes, found {file.size}")
            if not copy and start + _STILL_WRITTEN * size < end and _link(source, target, files):
                linked += 1
            else:
                copy_file(files, file, target, end=min(size, end - start), size=size)
                copied += 1
            continue
        break
    return copied, linked


def _link(source: str, target: str, files: Files) -> bool:
    """Link a file, with its bytes on the device; return False if it has to be copied."""
    if not link_file(files, source, target):
        return False
    try:
        linked = files.open(target, writable=True)
    except StoreIOError as error:
        if error.errno != errno.EACCES:
            raise
        files.delete(target)  # no process may write to the file, but the new store is one to write to
        return False
    files.flush(linked)
    return True


def _copy_derived(path: str, part: str, index: Sequence[FolderEntry], size: int, files: Files) -> list[str]:
    """Copy files of the index and the queues; return the queues' folders whose files did not get the times there."""
    for entry in index:
        files.make_folder(os.path.join(part, directory.INDEX))
        _copy(path, part, os.path.join(directory.INDEX, entry.name), files)
    copied, others = list[str](), list[str]()

    def read_small(names: Iterable[QueueName]) -> Iterator[tuple[str, bytes]]:
        for name in names:
            folder = directory.queue_folder("", *name)
            only = read_sole_file(files, os.path.join(path, folder), size, _LARGEST)
            if only is not None and only[0].isascii() and only[0].isdigit():
                copied.append(os.path.join(part, folder, only[0]))
                yield os.path.join(str(name[1]), only[0]), only[1]
            else:
                others.append(folder)

    for topic, names in itertools.groupby(directory.list_queues(path, files), key=itemgetter(0)):
        source, target = (os.path.join(store, directory.CONSUMEQUEUE, topic) for store in (path, part))
        files.make_files(target, read_small(names), size, times_of=source)
    flush_made(copied, part, files)
    units = [directory.queue_folder("", *name, ext=True) for name in directory.list_queues(path, files, ext=True)]
    for folder in (*others, *units):
        _copy_sequence(path, part, folder, files)
    return others


def _copy_sequence(path: str, part: str, folder: str, files: Files) -> None:
    """Copy the existing files of a queue, the newest first."""
    files.make_folder(os.path.join(part, folder))
    for entry in reversed(_listed(os.path.join(path, folder), files)):
        if not _copy(path, part, os.path.join(folder, entry.name), files):
            break


def _copy(path: str, part: str, name: str, files: Files) -> bool:
    """Copy a file to the folder that is made for it; return False if it was deleted meanwhile."""
    source, target = os.path.join(path, name), os.path.join(part, name)
    with _unless_deleted(source, files):
        copy_file(files, files.open(source, keep_descriptor=True), target)
        return True
    return False


@contextlib.contextmanager
def _unless_deleted(source: str, files: Files) -> Iterator[None]:
    """Leave the block without an error if a file of the source was deleted meanwhile."""
    try:
        yield
    except StoreIOError as error:
        if error.errno != errno.ENOENT or file_size(files, source) is not None:
            raise


def _keep_times(path: str, part: str, files: Files, folders: Iterable[str]) -> None:
    """Give the files of folders the modification times of the source, by which a broker finds messages by time."""
    for folder in folders:
        for entry in files.list(os.path.join(part, folder)):
            name = os.path.join(folder, entry.name)
            if entry.is_folder:
                _keep_times(path, part, files, [name])
                continue
            source = os.path.join(path, name)
            with _unless_deleted(source, files):
                _copy_time(files, source, os.path.join(part, name))


def _copy_time(files: Files, source: str, target: str) -> None:
    """Give a copy of a disk's file the modification time of its source, unless one of them is empty.

    Files in memory have no times, and a file with other names keeps its time.
    """
    status = files.status(target)
    if not files.is_shared or status is None or not status.size or status.links > 1 or not file_size(files, source):
        return
    original = files.open(source, keep_descriptor=True)
    copy = files.open(target, writable=True, keep_descriptor=True)
    with SystemCall("set the time of", target):
        times = os.fstat(original.descriptor)
        # By its descriptor, because another process can put a link into the path meanwhile.
        place = copy.descriptor if os.utime in os.supports_fd else target
        os.utime(place, ns=(times.st_atime_ns, times.st_mtime_ns))


def _copy_progress(path: str, part: str, files: Files, now_ms: int) -> None:
    """Copy the progress of consumers, delays, timers and jobs."""
    copy_config(path, part, files, only=_PROGRESS)
    used, copied = (BrokerTables.open(os.path.join(folder, directory.CONFIG), files=files) for folder in (path, part))
    if used.database is None and copied.offsets.replace(used.offsets.rows):  # the page of groups is newer
        copied.offsets.persist(now_ms)
    if file_size(files, TimerCheckpoint.path_in(part)):  # without it the timer reads its queue from the beginning
        _copy_sequence(path, part, directory.TIMERLOG, files)
    copy_config(path, part, files, JOBS_FOLDER, only=_NOTE)
    copy_config(path, part, files, OWN_FOLDER, only=_OF_PLACES)


def copy_config(
    path: str,
    part: str,
    files: Files,
    folder: str = directory.CONFIG,
    *,
    only: re.Pattern[str] | None = None,
    without: re.Pattern[str] | None = None,
) -> None:
    """Copy the tables of a folder, each as a whole, `cancelled-since.json` before what takes its content over."""
    for entry in files.list(os.path.join(path, folder)):  # sorted by name
        name = os.path.join(folder, entry.name)
        if entry.is_folder:
            if only is None and not is_database(os.path.join(path, name), files):
                copy_config(path, part, files, name)
            continue
        if not entry.is_file:
            continue  # a store has no such file
        if (only is not None and not only.fullmatch(entry.name)) or (without and without.fullmatch(entry.name)):
            continue
        files.make_folder(os.path.join(part, folder))
        with _unless_deleted(os.path.join(path, name), files):
            files.write(os.path.join(part, name), files.read(os.path.join(path, name)))
