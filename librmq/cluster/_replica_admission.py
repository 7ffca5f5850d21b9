"""Checks that a folder can copy a master, made before anything in the folder changes.

A replica is recognised by its bytes: the end of its log, including the whole last record, must also be in the
master's log. Records contain their position, time and host, so two logs never agree there by chance. After a kill the
comparison starts at the third last log file, because zeros in a record's properties look valid.
"""

from __future__ import annotations

import os
from typing import Final

from librmq.clock import Clock
from librmq.commitlog import CommitLog
from librmq.errors import CorruptionError, ReplicaError
from librmq.files import Files
from librmq.protocol import Endpoint, FollowLog, LogDescription
from librmq.store import MessageStore
from librmq.store.format import directory
from librmq.store.format.directory import has_abort
from librmq.store.format.documents import ReplicaMark

_COMPARED: Final = 64 << 10
_AT_ONCE: Final = 1 << 20
_SECTOR: Final = 512  # bytes that a device writes together


def check_folder(path: str, files: Files, clock: Clock, master: Endpoint, described: LogDescription) -> bool:
    """Check that the folder is new or has a replica of this master; return whether that replica was killed.

    Raises:
        ReplicaError: It is the master's own folder, has an independent store or a copy of another master, or is ahead.
        NotAStoreError: It has other content.
    """
    copy_files = None if files.is_shared else files
    master_files, place = described.place
    if copy_files is master_files and os.path.realpath(path) == place:
        raise ReplicaError(f"{path}: expected another folder than the master's, because a store can't copy itself")
    mark = ReplicaMark.read(path, files)
    if not directory.recognise(path, files).has_log:
        return False
    if mark is None:
        raise ReplicaError(f"{path}: expected a new folder or a replica, found a store of its own")
    was_killed = has_abort(files, path)
    try:
        copy = MessageStore.open(path, read_only=True, files=files, clock=clock)
    except CorruptionError:
        if not was_killed:
            raise
        return True  # after a kill some files have no bytes: recovery removes them, and then `check_bytes` is called
    with copy:
        log = copy.log
        if log.sequence.starts and log.file_size != described.config.commitlog_file_size:
            raise ReplicaError(
                f"{path}: its log files have {log.file_size} bytes, those of {described.name} "
                f"{described.config.commitlog_file_size}: it is the replica of another store"
            )
        check_origin(path, mark, log, described)
        check_bytes(path, log, master, described, was_killed=was_killed)
    return was_killed


def check_origin(path: str, mark: ReplicaMark | None, log: CommitLog, described: LogDescription) -> None:
    """Check the mark of a copy whose bytes can't be compared, because its master has deleted them."""
    folder = described.place[1]
    if mark is not None and log.begin < log.end <= described.begin and not mark.is_of(described.name, folder):
        origin = mark.master if mark.folder in (None, mark.master) else f"{mark.master} in {mark.folder}"
        raise ReplicaError(
            f"{path}: it is the replica of {origin}, and {described.name} in {folder} no longer has bytes to compare "
            "with it, so this copy would be deleted: name another folder, or delete this one if nothing in it is needed"
        )


def check_bytes(
    path: str, log: CommitLog, master: Endpoint, described: LogDescription, *, was_killed: bool = False
) -> int | None:
    """Check that the end of a copy's log is also in the master's log.

    After a kill more is compared, because a record may lack bytes that never reached the disk, and no checksum of
    the record covers them. Return the physical offset of the first such record; None if there is none.
    """
    end = log.end
    if end > described.end:
        raise ReplicaError(
            f"{path}: the replica is {end - described.end} bytes ahead of {described.name}, whose log ends at "
            f"{described.end}: the master has lost its end, so make the replica a store of its own by "
            f"librmq.cluster.promote_replica, or delete its folder to copy the master again"
        )
    if end <= max(described.begin, log.begin):
        return None  # one side no longer has the bytes
    file_start = end - 1 - (end - 1) % log.file_size
    at = max(end - _COMPARED, file_start)
    if was_killed:
        at = log.third_last_file()
    elif log.last_write is not None and file_start <= log.last_write < at:
        at = log.last_write
    at = max(at, described.begin, log.begin)
    was_empty = False
    while at < end:
        size = min(_AT_ONCE, end - at, log.file_size - at % log.file_size)
        theirs = master.call(FollowLog("", at, size)).data
        mine = log.data_at(at, len(theirs) or size)
        if was_empty and not mine and not theirs:
            raise ReplicaError(
                f"{path}: neither its log nor that of {described.name} has the bytes at physical offset {at}, which "
                f"end at {end}: delete this folder to copy the master again, if nothing in it is needed"
            )
        # A link that breaks can shorten an answer, even to nothing. The next request shows whether it is broken.
        if mine != theirs and (theirs or was_empty):
            at += next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(theirs))
            if was_killed and _never_written(log, at):
                return _record_at(log, log.third_last_file(), at)
            raise ReplicaError(
                f"{path}: its log differs from that of {described.name} at physical offset {at}: it is the replica of "
                "another store, or one of them took other messages since"
            )
        at += len(theirs)
        was_empty = not theirs
    return None


def _never_written(log: CommitLog, physical_offset: int) -> bool:
    upto = min(log.end, physical_offset - physical_offset % _SECTOR + _SECTOR)
    return not any(log.data_at(physical_offset, upto - physical_offset))


def _record_at(log: CommitLog, begin: int, physical_offset: int) -> int:
    start = begin
    for start, size, _ in log.scan(begin, check_body=False):
        if start + size > physical_offset:
            break
    return start
