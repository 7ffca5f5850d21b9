"""Stores made of other stores: snapshots of one in use, what is restored from them, what is saved of a damaged one.

A snapshot holds the log up to where it ended when it was asked for, and the queues, full index files and tables of
``config/`` copied thereafter. Those may be ahead, behind, or caught in the middle of a write: the snapshot is then
recovered as a whole, by which they agree with its log. A writer is neither stopped nor noticed.

What is made grows under the name ``TARGET.part``, is flushed, and gets its name at last; what a process leaves there
that dies is removed by the next one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from librmq.clock import Clock, SystemClock
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.errors import (
    CorruptionError,
    MessageIllegalError,
    NotAStoreError,
    StoreError,
    StoreIOError,
    StoreLockedError,
)
from librmq.files.disk import DiskFiles
from librmq.files.rolling import file_name
from librmq.files.seam import Entry, FileLock, Files, copy_file, link_file, make_folders
from librmq.message import record
from librmq.message.message import StoredMessage
from librmq.message.topics import validate_queue
from librmq.store.engine.dispatch import has_queue_entry
from librmq.store.format import directory
from librmq.store.recovery import salvage
from librmq.store.recovery.open import settle
from librmq.store.recovery.salvage import Gap

__all__ = ["Rescued", "Snapshot", "rescue", "restore", "snapshot"]

_PART: Final = ".part"
_STILL_WRITTEN: Final = 2  # files of the log that a writer, or its recovery, may yet change
_ATTEMPTS: Final = 10
_MAKING_S: Final = 0.01
_LARGEST_GAP: Final = 100_000  # of a queue, that is filled in
_LARGEST_OFFSET: Final = 1 << 40  # of a queue; beyond it a record has lost its count
_LONG: Final = struct.Struct(">q")


class Snapshot(NamedTuple):
    """What a snapshot holds: the log from ``begin`` to ``end``, in files of which some are the store's own, linked."""

    path: str
    begin: int
    end: int
    copied_files: int
    linked_files: int


class Rescued(NamedTuple):
    """A new store of what was sound in a damaged one."""

    path: str
    records: int
    gaps: int


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
    """Make a snapshot of the store in ``path`` in the folder ``target``, which must be empty or not exist.

    The store may be in use, by this process or another; no lock is taken. Whatever was acknowledged before the call is
    in the snapshot, which is a store, cleanly closed and sound. Files of the log that are full are linked where the
    file system can, unless ``copy``, but for the last two; the rest is copied. Costs a copy of that and a walk over
    all of the log. ``end`` tells where the log ends, where somebody knows; else it is looked for.

    `CorruptionError` if the log is damaged, `StoreIOError` for want of space or a ``target`` that is not empty, and
    whatever opening a store raises; there is no ``target`` then.
    """
    files, clock = files or DiskFiles(), clock or SystemClock()
    _check_copyable(path, files)
    config = config or directory.infer_config(path, files)
    with _growing(target, files) as part:
        # Before the log's end is known: index files that are full by now have no record behind it.
        index = _listed(os.path.join(path, directory.INDEX), files)[:-1]
        log_end = end() if end is not None else _log_end(path, config, files, clock)
        copied, linked = _copy_log(path, part, config, log_end, copy, files)
        for entry in index:
            _copy(path, part, os.path.join(directory.INDEX, entry.name), files)
        for ext in (False, True):
            for topic, queue_id in directory.list_queues(path, files, ext=ext):
                folder = os.path.relpath(directory.queue_folder(path, topic, queue_id, ext=ext), path)
                _copy_sequence(path, part, folder, files)
        _copy_config(path, part, files)
        begin, found_end = settle(part, config, files, clock)
        if found_end != log_end:
            file = os.path.join(
                path, directory.COMMITLOG, file_name(found_end - found_end % config.commitlog_file_size)
            )
            what = f"no sound record, though the log goes on to {log_end}: no snapshot is made of a damaged log"
            raise CorruptionError(file, found_end, "record", what)
    return Snapshot(target, begin, found_end, copied, linked)


def restore(
    path: str, target: str, config: StoreConfig | None = None, *, files: Files | None = None, clock: Clock | None = None
) -> Snapshot:
    """Make a store in ``target`` of the snapshot in ``path``, which stays as it is: all is copied, and checked."""
    return snapshot(path, target, config, copy=True, files=files, clock=clock)


def rescue(
    path: str,
    target: str,
    config: StoreConfig | None = None,
    *,
    files: Files | None = None,
    clock: Clock | None = None,
    tell: Callable[[Gap], object] = lambda gap: None,
) -> Rescued:
    """Make a store in ``target`` (empty, or not there yet) of every sound record of the store in ``path``.

    In the order of `librmq.store.recovery.salvage.records`, the cuts that were kept among them; ``tell`` is told of
    what is left out. Records keep their fields but for the physical offset, and with it the offset id; a queue offset
    too where an earlier record of the queue has it, or it is too far from the one before.
    """
    files, clock = files or DiskFiles(), clock or SystemClock()
    config = config or directory.infer_config(path, files)
    count = gaps = 0
    with _growing(target, files) as part:
        log = CommitLog.open(os.path.join(part, directory.COMMITLOG), config.commitlog_file_size, files=files)
        following: dict[tuple[str, int], int] = {}
        for item in salvage.records(path, files):
            if isinstance(item, StoredMessage):
                try:
                    validate_queue(item.topic, item.queue_id)
                    _append(log, item, following)
                    count += 1
                    continue
                except MessageIllegalError as error:
                    item = Gap(item.physical_offset, item.size, path, str(error))
            gaps += 1
            tell(item)
        log.close()
        _copy_config(path, part, files)
        settle(part, config, files, clock)
    return Rescued(target, count, gaps)


def _append(log: CommitLog, message: StoredMessage, following: dict[tuple[str, int], int]) -> None:
    """Append a record to a new log, with a queue offset that goes on from those before it."""
    raw = bytearray(message.raw)
    physical_offset = log.claim(len(raw))
    if has_queue_entry(message.sys_flag):
        name, queue_offset = (message.topic, message.queue_id), message.queue_offset
        due = following.get(name)
        if due is None:
            queue_offset = queue_offset if 0 <= queue_offset < _LARGEST_OFFSET else 0
        elif not due <= queue_offset <= due + _LARGEST_GAP:
            queue_offset = due
        following[name] = queue_offset + 1
        raw[record.QUEUE_OFFSET_AT : record.QUEUE_OFFSET_AT + 8] = _LONG.pack(queue_offset)
    raw[record.PHYSICAL_OFFSET_AT : record.PHYSICAL_OFFSET_AT + 8] = _LONG.pack(physical_offset)
    log.append(bytes(raw))


# ------------------------------------------------------------------------------------------------------ the target


@contextlib.contextmanager
def _growing(target: str, files: Files) -> Iterator[str]:
    """A folder that gets the name ``target`` when all has gone well, and is removed otherwise."""
    target = target.rstrip(os.sep) or target
    if files.list(target) if files.is_folder(target) else files.size(target) is not None:
        raise StoreIOError("make a store in", target, OSError(errno.EEXIST, "there is something else already"))
    parent, part = os.path.dirname(target) or os.curdir, target + _PART
    make_folders(files, parent)
    files.make_folder(part)
    lock: FileLock | None = None
    try:
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
    except StoreLockedError:  # somebody else makes it
        raise
    except BaseException:
        with contextlib.suppress(StoreError):
            files.delete(part)
        raise
    finally:
        if lock is not None:
            lock.release()


def _flush_folders(folder: str, files: Files) -> None:
    for entry in files.list(folder):
        if entry.is_folder:
            _flush_folders(os.path.join(folder, entry.name), files)
    files.flush_folder(folder)


# ------------------------------------------------------------------------------------------------------ the source


def _check_copyable(path: str, files: Files) -> None:
    kind = directory.check_kind(path, files)
    if kind is not directory.StoreKind.V4:
        raise NotAStoreError(f"{path}: {kind.value}, which has files besides that no snapshot is made of")


def _log_end(path: str, config: StoreConfig, files: Files, clock: Clock) -> int:
    """Where the log ends, to which somebody else may be writing."""
    folder = os.path.join(path, directory.COMMITLOG)
    for _ in range(_ATTEMPTS - 1):
        try:
            return _walked_end(folder, config, files)
        except StoreIOError:  # a file was deleted meanwhile
            continue
        except CorruptionError as error:
            if (error.kind, error.offset) != ("size", 0):
                raise
            clock.wait(threading.Event(), _MAKING_S)  # a file is just being made, unless it stays so
    return _walked_end(folder, config, files)


def _walked_end(folder: str, config: StoreConfig, files: Files) -> int:
    with CommitLog.open(folder, config.commitlog_file_size, files=files, writable=False) as log:
        end = log.found_end.physical_offset
        following = salvage.find_record(log.sequence, end + 1)
        if following is not None and log.walk(end).physical_offset == end:  # else it was just being written
            what = f"no record, though sound ones follow from {following} on: no snapshot is made of a damaged log"
            raise CorruptionError(log.sequence.path_at(end), end, "record", what)
        return end


def _listed(folder: str, files: Files) -> list[Entry]:
    """The files of a folder that are named by numbers, but for those that are just being made."""
    return [
        entry
        for entry in files.list(folder)
        if entry.name.isascii() and entry.name.isdigit() and entry.size and not entry.is_folder
    ]


def _copy_log(path: str, part: str, config: StoreConfig, end: int, copy: bool, files: Files) -> tuple[int, int]:
    """Copy or link the log up to ``end``; returns how many files were copied, and how many linked."""
    size = config.commitlog_file_size
    starts = [int(entry.name) for entry in _listed(os.path.join(path, directory.COMMITLOG), files)]
    copied = linked = 0
    # The newest first: retention may take the oldest away, and a gap would be damage.
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
    """Copy the files of a queue, the newest first, as far as they are there."""
    files.make_folder(os.path.join(part, folder))
    for entry in reversed(_listed(os.path.join(path, folder), files)):
        if not _copy(path, part, os.path.join(folder, entry.name), files):
            break


def _copy(path: str, part: str, name: str, files: Files) -> bool:
    """Copy a file; false if it has been deleted meanwhile."""
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


def _copy_config(path: str, part: str, files: Files, folder: str = directory.CONFIG) -> None:
    """Copy the tables of ``config/``, each as a whole."""
    for entry in files.list(os.path.join(path, folder)):
        name = os.path.join(folder, entry.name)
        if entry.is_folder:
            _copy_config(path, part, files, name)
            continue
        files.make_folder(os.path.join(part, folder))
        try:
            files.write(os.path.join(part, name), files.read(os.path.join(path, name)))
        except StoreIOError as error:
            if not _vanished(error, os.path.join(path, name), files):
                raise
