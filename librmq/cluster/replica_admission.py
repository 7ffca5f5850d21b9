"""Checks that a folder can copy a master, before anything in it is changed.

A replica is told from another store by its bytes: the end of its log, with the whole last record, must be in the
master's log too. A record has its place, its time and its host, so no two logs agree there by chance.
"""

from __future__ import annotations

import os
from typing import Final

from librmq.clock import Clock
from librmq.commitlog import CommitLog
from librmq.errors import ReplicaError
from librmq.files.seam import Files
from librmq.protocol import Endpoint, FollowLog, LogDescription
from librmq.store import MessageStore
from librmq.store.format import directory
from librmq.store.format.replica_mark import read_mark

__all__ = ["check_bytes", "check_folder"]

_COMPARED: Final = 64 << 10


def check_folder(path: str, files: Files, clock: Clock, master: Endpoint, described: LogDescription) -> None:
    """Check that the folder is new, or has a replica of this master.

    Raises:
        ReplicaError: it is the master's own folder, has a store of its own or the copy of another one, or is ahead.
        NotAStoreError: it has something else.
    """
    own = None if files.is_shared else files
    other, place = described.place
    if own is other and os.path.realpath(path) == place:
        raise ReplicaError(f"{path}: expected another folder than the master's, because a store can't copy itself")
    mark = read_mark(path, files)
    if not directory.recognise(path, files).has_log:
        return
    if mark is None:
        raise ReplicaError(f"{path}: expected a new folder or a replica, found a store of its own")
    with MessageStore.open(path, read_only=True, files=files, clock=clock) as copy:
        if not copy.log.sequence.starts:
            return
        if copy.config.commitlog_file_size != described.config.commitlog_file_size:
            raise ReplicaError(
                f"{path}: its log files have {copy.config.commitlog_file_size} bytes, those of {described.name} "
                f"{described.config.commitlog_file_size}: it is the replica of another store"
            )
        check_bytes(path, copy.log, master, described)


def check_bytes(path: str, log: CommitLog, master: Endpoint, described: LogDescription) -> None:
    """Check that the end of a copy's log is in the master's log too.

    Raises:
        ReplicaError: it is not; the error says whether the copy is ahead, or another store's.
    """
    end = log.end
    if end > described.end:
        raise ReplicaError(
            f"{path}: the replica is {end - described.end} bytes ahead of {described.name}, whose log ends at "
            f"{described.end}: the master has lost its end, so make the replica a store of its own by "
            f"librmq.cluster.promote_replica, or delete its folder to copy the master again"
        )
    if end <= max(described.begin, log.begin):
        return  # the bytes are gone on one side
    begin = max(end - _COMPARED, end - 1 - (end - 1) % log.file_size, described.begin)
    if log.last_write is not None and end - (end - 1) % log.file_size <= log.last_write < begin:
        begin = max(log.last_write, described.begin)
    mine = log.data_at(begin, end - begin)
    theirs = master.call(FollowLog("", begin, end - begin)).data
    if mine != theirs:
        at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(theirs))
        raise ReplicaError(
            f"{path}: its log differs from that of {described.name} at physical offset {begin + at}: it is the replica "
            "of another store, or one of them took other messages since"
        )
