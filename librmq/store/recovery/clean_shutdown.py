"""The state that a clean close leaves beside the broker's files, so that opening need not check the whole store.

::

    librmq/closed.json    {"version": 1, "log_begin", "log_end", "last_record", "last_record_crc32",
                           "index_files", "index_end", "queues": [[topic, queue id, min, max, max physic], …]}

A broker ignores it, and without it a store opens as a broker would open it. It counts only if it agrees with the log:
the same oldest file, the same last record, nothing after it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from librmq.commitlog import CommitLog
from librmq.errors import CorruptionError, StoreIOError
from librmq.files.seam import Files
from librmq.message.record import crc32
from librmq.runtime.event_log import EventLog
from librmq.store.engine.open_store import QueueName, QueueState, QueueTable
from librmq.store.format import directory
from librmq.store.format.keyindex import KeyIndex

_log = EventLog("librmq.store")

_VERSION: Final = 1
_LARGEST_FILE: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class ClosedState:
    """State of a store at its close."""

    log_begin: int
    log_end: int
    last_record: int | None
    last_record_crc32: int
    index_files: int
    index_end: int
    queues: Mapping[QueueName, QueueState]

    def agrees_with(self, log: CommitLog) -> bool:
        """Return whether the log is unchanged since the close; this reads one record."""
        if log.begin != self.log_begin or log.data_at(self.log_end, 8).strip(b"\0"):
            return False
        if self.last_record is None:
            return self.log_end == self.log_begin
        return crc32(log.data_at(self.last_record, self.log_end - self.last_record)) == self.last_record_crc32

    def lacks_files(self, log: CommitLog) -> bool:
        """Return whether the first files of the log were deleted since the close, and nothing else changed."""
        return self.log_begin < log.begin < self.log_end and replace(self, log_begin=log.begin).agrees_with(log)

    def has_index(self, index: KeyIndex) -> bool:
        """Return whether the index is unchanged since the close."""
        return (len(index.files), index.end_physical_offset) == (self.index_files, self.index_end)


def _path(path: str) -> str:
    return os.path.join(path, directory.OWN, "closed.json")


def write_closed_state(path: str, files: Files, log: CommitLog, queues: QueueTable, index: KeyIndex) -> None:
    """Write the state of the store in ``path``, which has been flushed completely.

    If the disk has no room for it, the store still closes cleanly, without it.
    """
    states = {
        name: state
        for name, state in queues.states().items()
        if state.max_offset or files.is_folder(directory.queue_folder(path, *name))
    }
    last = log.last_write
    data = b"" if last is None else log.data_at(last, log.end - last)
    document = {
        "version": _VERSION,
        "log_begin": log.begin,
        "log_end": log.end,
        "last_record": last,
        "last_record_crc32": crc32(data),
        "index_files": len(index.files),
        "index_end": index.end_physical_offset,
        "queues": [[*name, *state] for name, state in sorted(states.items())],
    }
    try:
        files.make_folder(os.path.dirname(_path(path)))
        files.write(_path(path), json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode())
    except StoreIOError as error:
        if error.errno != errno.ENOSPC:
            raise
        _log.warning("the next open takes longer: %(error)s", error=error)
        if files.size(_path(path)) is not None:  # left by an earlier close
            files.delete(_path(path))


def read_closed_state(path: str, files: Files) -> ClosedState | None:
    """Return the state that the last close left, None if there is none or it is unreadable.

    The queues of topics that were deleted on a broker since then are left out.
    """
    place = _path(path)
    if files.size(place) is None:
        return None
    try:
        document = json.loads(files.read(place, _LARGEST_FILE))
        state = _state(document)
    except (ValueError, TypeError, KeyError, RecursionError, CorruptionError):
        return None  # it only saves time
    return state and _without_deleted(state, path, files)


def _without_deleted(state: ClosedState, path: str, files: Files) -> ClosedState:
    """Leave out topics without a folder that the broker's table of topics does not have either."""
    folders = {entry.name for entry in files.list(os.path.join(path, directory.CONSUMEQUEUE))}
    absent = {topic for topic, _ in state.queues} - folders
    listed = directory.known_topics(path, files) if absent else set()
    if not listed:
        return state
    deleted = absent - listed
    return replace(state, queues={name: queue for name, queue in state.queues.items() if name[0] not in deleted})


def _state(document: Any) -> ClosedState | None:  # noqa: ANN401 (JSON has any shape)
    if document["version"] != _VERSION:
        return None
    queues = {}
    for topic, *numbers in document["queues"]:
        queue_id, *state = map(_checked_number, numbers)
        queues[str(topic), queue_id] = QueueState(*state)
    last = document["last_record"]
    return ClosedState(
        _checked_number(document["log_begin"]),
        _checked_number(document["log_end"]),
        None if last is None else _checked_number(last),
        _checked_number(document["last_record_crc32"]),
        _checked_number(document["index_files"]),
        _checked_number(document["index_end"]),
        queues,
    )


def _checked_number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 1 << 63:
        raise ValueError
    return value
