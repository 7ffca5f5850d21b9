"""A store on disk as the master of a replica, even while another process writes it."""

from __future__ import annotations

import os
from typing import Any, TypeVar, cast

from librmq.clock import Clock, SystemClock
from librmq.commitlog import CommitLog
from librmq.errors import BrokerError, BrokerUnreachableError, StoreError
from librmq.files.disk import DiskFiles
from librmq.files.seam import Files
from librmq.message.record import BLANK_MAGIC, BLANK_SIZE
from librmq.protocol import (
    CopiedTables,
    CopyTables,
    DescribeLog,
    FollowLog,
    LeaveLog,
    LogBytes,
    LogDescription,
    Request,
    ResponseCode,
)
from librmq.store import MessageStore
from librmq.store.format.broker_tables import BrokerTables

R = TypeVar("R")


class StoredMaster:
    """An `Endpoint` that serves a replica from the files of a store, without changing them. Thread-safe.

    It can't wait for the writer, so a replica checks it from time to time, and no send waits for such a replica.
    """

    def __init__(self, path: str | os.PathLike[str], *, files: Files | None = None, clock: Clock | None = None) -> None:
        """Open the store in ``path`` for reading.

        Raises:
            NotAStoreError: The folder has no store.
            CorruptionError: The store is damaged.
        """
        self.path = os.fspath(path)
        self._files = files or DiskFiles()
        self._store = MessageStore.open(self.path, read_only=True, files=self._files, clock=clock or SystemClock())

    def call(self, request: Request[R], /) -> R:
        """Answer a replica's request.

        Raises:
            BrokerUnreachableError: The files can't be read at the moment.
        """
        try:
            return cast(R, self._answer(request))
        except StoreError as error:
            raise BrokerUnreachableError(f"{self.path} cannot be read: {error}") from error

    def _answer(self, request: Request[Any]) -> object:
        store = self._store
        if isinstance(request, FollowLog):
            if _end(store.log) <= request.physical_offset:
                store.refresh()
            log, at = store.log, request.physical_offset
            end = _end(log)
            data = log.data_at(at, min(request.size, end - at)) if log.begin <= at < end else b""
            return LogBytes(data, log.begin, end)
        if isinstance(request, DescribeLog):
            store.refresh()
            place = None if self._files.is_shared else self._files, os.path.realpath(self.path)
            return LogDescription(self.path, place, store.config, store.log.begin, _end(store.log))
        if isinstance(request, CopyTables):
            tables = BrokerTables.open(os.path.join(self.path, "config"), files=self._files)
            return CopiedTables(tables.topics.rows, tables.groups.rows, tables.offsets.rows, tables.delays.rows)
        if isinstance(request, LeaveLog):
            return None
        raise BrokerError(
            ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f"{self.path} does not know {type(request).__name__}"
        )

    def close(self) -> None:
        """Release the store."""
        self._store.close()


def _end(log: CommitLog) -> int:
    """Return the log's end, after the blank of its last file.

    While a writer runs, a reader ends the log before that blank; without one, after it.
    """
    end, left = log.end, -log.end % log.file_size
    blank = left.to_bytes(4, "big") + BLANK_MAGIC.to_bytes(4, "big")
    return end + left if left >= BLANK_SIZE and log.data_at(end, BLANK_SIZE) == blank else end
