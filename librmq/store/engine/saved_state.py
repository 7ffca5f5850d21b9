"""The state of a store at its last close, and at its last flush while it is open.

So that opening need not check the whole store, librmq notes its state beside the broker's files:

::

    librmq/closed.json    {"version": 1, "log_begin", "log_end", "last_record", "last_record_crc32",
                           "index_files", "index_end", "queues": [[topic, queue id, min, max, max physic], …],
                           "times": [begin, newest_ms, setback_ms], as in `librmq.store.engine.store_times`}
    librmq/flushed.json   the same fields without "times", with "index_file" and "machine"

A broker ignores them, and without them a store opens as a broker would open it. The first counts after a clean close,
if it agrees with the log: the same oldest file, the same last record, nothing after it. After a kill it still says what
the log had reached, until retention deletes a file, or a recovery has reported what is missing.

A broker's retention knows neither, and can move the log's beginning. When a broker starts, it writes a word into its
lock file. An opening for writing dates that file back to 1970 as its last step, so what was noted about the beginning
counts while the file has that time. It does not in a copy that has got times of its own.

The second is the mark of a flush: after a kill, recovery begins at its last record. It promises that log, queues and
index have everything of the records before ``log_end``. It can't hide a loss:

- It comes last, when log, queues, index and checkpoint have reached the device, in this order. A kill undoes no
  write, so all that was written before a mark is there with it.
- It counts once: opening for writing deletes it, durably, before any file changes.
- It counts where it was written, until a restart: it names the start of the system (Linux only) and the folder.
  Stores with extension units have no marks.
- The files must agree: the log's first and last record, the number of index files and the last entry of each, and the
  last entry of each file of a queue. What was deleted, put back from an older copy, or recovered by a broker
  contradicts this; then the recovery starts again without the mark.
- It is withdrawn by a close, before retention deletes a file of the log, and where queues, index or checkpoint could
  not be flushed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from types import NoneType
from typing import Any, Final, NamedTuple

from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.consumequeue_entries import ENTRY, ENTRY_SIZE, HOLE_SIZE
from librmq.errors import CorruptionError, MessageIllegalError, StoreIOError
from librmq.files import Files, file_size, is_folder
from librmq.files.interface import identity_of, is_full, read_replaced
from librmq.files.rolling import file_name
from librmq.message import record
from librmq.message.topics import validate_queue
from librmq.runtime.event_log import EventLog
from librmq.store.engine.dispatch import TimeOrder
from librmq.store.engine.store_parts import Parts, QueueName, QueueState, QueueTable
from librmq.store.format import directory
from librmq.store.format._keyindex import KeyIndex
from librmq.store.format.documents import (
    CLOSED_FILE,
    OWN_FOLDER,
    is_of_another_folder,
    parse_document,
    read_document,
    write_document,
)
from librmq.store.format.indexfile import IndexHeader, file_length, unpack_entry

_log = EventLog("librmq.store")

_NUMBERS: Final = ("log_begin", "log_end", "last_record_crc32", "index_files", "index_end")
_STATE_KINDS: Final = {**dict.fromkeys(_NUMBERS, (int,)), "last_record": (int, NoneType), "queues": (list,)}
_CLOSED_KINDS: Final = {**_STATE_KINDS, "times": (list, NoneType)}
_MARK_KINDS: Final = {**_STATE_KINDS, "index_file": (str, NoneType), "machine": (str,)}
_LARGEST_FILE: Final = 256 << 20
_MARK_FILE: Final = os.path.join(OWN_FOLDER, "flushed.json")
WORTH_A_MARK: Final = 8 << 20
"""Bytes of the log after which a flush leaves a mark; recovering them takes a fraction of a second."""
FILES_A_ROUND: Final = 10
"""The most log files that a round of retention deletes, a broker's and librmq's, before it trims queues and index."""


@dataclass(frozen=True, slots=True)
class StoreState:
    """State of a store at its close or at a flush."""

    log_begin: int
    log_end: int
    last_record: int | None
    last_record_crc32: int
    index_files: int
    index_end: int
    queues: Mapping[QueueName, QueueState]
    times: tuple[object, ...] = ()
    """What a close noted of `TimeOrder`, not checked."""

    def agrees_with(self, log: CommitLog) -> bool:
        """Return whether the log is unchanged since the close; this reads one record."""
        if log.begin != self.log_begin or log.data_at(self.log_end, 8).strip(b"\0"):
            return False
        return self.log_end == self.log_begin if self.last_record is None else self.has_last_record(log)

    def has_last_record(self, log: CommitLog) -> bool:
        """Return whether the log still has the last record."""
        last = self.last_record
        return last is not None and record.crc32(log.data_at(last, self.log_end - last)) == self.last_record_crc32

    def has_index(self, index: KeyIndex) -> bool:
        """Return whether the index is unchanged since the close."""
        return (len(index.files), index.end_physical_offset) == (self.index_files, self.index_end)


def _fields(log: CommitLog, index: KeyIndex) -> dict[str, Any]:
    """Return the fields of a state that change with each append; `_complete` adds the others."""
    return {
        "log_begin": log.begin,
        "log_end": log.end,
        "last_record": log.last_write,
        "index_files": len(index.files),
        "index_end": index.end_physical_offset,
    }


def _complete(fields: dict[str, Any], log: CommitLog, queues: Mapping[QueueName, QueueState]) -> dict[str, Any]:
    last = fields["last_record"]
    return {
        **fields,
        "last_record_crc32": record.crc32(b"" if last is None else log.data_at(last, fields["log_end"] - last)),
        "queues": [[*name, *state] for name, state in sorted(queues.items())],
    }


def _state(fields: dict[str, Any]) -> StoreState:
    """Raise ValueError, TypeError or KeyError for values that no store has."""
    queues = {}
    for topic, *numbers in fields.pop("queues"):
        queue_id, *state = map(_checked_number, numbers)
        queues[str(topic), queue_id] = QueueState(*state)
    last, times = fields.pop("last_record"), fields.pop("times", None) or ()
    numbers = {name: _checked_number(value) for name, value in fields.items()}
    return StoreState(
        queues=queues, times=(*times,), last_record=None if last is None else _checked_number(last), **numbers
    )


def _checked_number(value: object) -> int:
    if type(value) is not int or not -1 <= value < 1 << 63:
        raise ValueError
    return value


_UNREADABLE: Final = (ValueError, TypeError, KeyError, CorruptionError)

# ---- at a close


def write_closed_state(
    path: str, files: Files, log: CommitLog, queues: QueueTable, index: KeyIndex, order: TimeOrder | None = None
) -> None:
    """Write the state of the store in ``path``, which has been flushed completely, and what is known of its times.

    If the disk has no room for it, the store still closes cleanly, without it.
    """
    place = os.path.join(path, CLOSED_FILE)
    states = {
        name: state
        for name, state in queues.states().items()
        if state.max_offset or is_folder(files, directory.queue_folder(path, *name))
    }
    try:
        fields = _complete(_fields(log, index), log, states)
        last = fields["last_record"]
        if order is not None and last is not None and order.begin <= last < order.end:
            fields["times"] = order.fields
        write_document(place, files, fields)
    except StoreIOError as error:
        if not is_full(error):
            raise
        _log.warning("the next open takes longer: %(error)s", error=error)
        files.delete(place)  # an earlier close may have left one


def read_closed_state(path: str, files: Files) -> StoreState | None:
    """Return the state that the last close left, None if there is none or it is unreadable.

    The queues of topics that were deleted on a broker since then are left out.
    """
    try:
        data = read_replaced(files, os.path.join(path, CLOSED_FILE), _LARGEST_FILE)
        return _without_deleted(_parsed_state(data), path, files) if data else None
    except _UNREADABLE:
        return None  # it only saves time


@lru_cache(maxsize=1)
def _parsed_state(data: bytes) -> StoreState:
    # A command asks for the same state several times, and parsing that of 24,000 queues takes 60 ms.
    return _state(parse_document(CLOSED_FILE, data, _CLOSED_KINDS))


def noted_order(path: str, files: Files, log: CommitLog) -> TimeOrder | None:
    """Return what the last close of the store in ``path`` noted of its times; None if the log has another record."""
    state = read_closed_state(path, files)
    if state is None or state.last_record is None or not state.has_last_record(log):
        return None
    match state.times:
        case (int(begin), int(newest_ms), int(setback_ms)) if 0 <= begin <= state.last_record and setback_ms >= 0:
            return TimeOrder(begin, state.log_end, newest_ms, setback_ms)
    return None


def broker_has_started(path: str, files: Files) -> bool:
    """Return whether a broker may have started since librmq had the store open for writing."""
    status = files.status(directory.lock_path(path))
    return status is None or not status.is_untouched


class NotedEnd(NamedTuple):
    """Where the log ended, as a note says."""

    log_end: int
    what: str
    by_flush: bool


def noted_ends(path: str, files: Files) -> list[NotedEnd]:
    """Return where the log ended at the last flush and at the last close that were noted."""
    return [
        NotedEnd(state.log_end, f"the last {when}", when == "flush") for when, state in noted_states(path, files)[::-1]
    ]


def noted_queue_ends(path: str, files: Files) -> dict[QueueName, int]:
    """Return where the messages of each queue ended at the last close or flush that was noted."""
    return {
        name: queue.max_physic_offset for _, state in noted_states(path, files) for name, queue in state.queues.items()
    }


def noted_states(path: str, files: Files, *, was_closed: bool = False) -> list[tuple[str, StoreState]]:
    """Return the states at the last close, and at a last flush since, unless the store ``was_closed``."""
    closed, mark = read_closed_state(path, files), None if was_closed else read_mark(path, files)
    states = ("close", closed), ("flush", mark and mark.state)
    return [(when, state) for when, state in states if state is not None]


def was_copied(path: str, files: Files) -> bool:
    """Return whether the store is a copy that no process has opened for writing since, as far as notes tell."""
    machine = None
    with suppress(MarkError, StoreIOError):
        _, machine = _stored_mark(path, files)
    return is_of_another_folder(path, files, machine)


def withdraw_closed_state(path: str, files: Files, log: CommitLog) -> None:
    """Delete the state of the last close if the log lacks a part that it had, and log the loss.

    Call it after a recovery. Otherwise readers would report the loss again after the next kill.
    """
    closed = read_closed_state(path, files)
    if closed is None or (closed.log_begin == log.begin and closed.log_end <= log.end):
        return
    # A broker's retention deletes files at the beginning; no end that was closed is lost without damage.
    if closed.log_end > log.end or not broker_has_started(path, files):
        _log.warning(
            "%(path)s: the log lacks a part: it reached from %(noted_begin)d to %(noted_end)d at the last close, and "
            "reaches from %(begin)d to %(end)d: copy missing files from a backup, then run librmq recover",
            path=path,
            noted_begin=closed.log_begin,
            noted_end=closed.log_end,
            begin=log.begin,
            end=log.end,
        )
    delete_state(path, files, CLOSED_FILE)


def _without_deleted(state: StoreState, path: str, files: Files) -> StoreState:
    """Leave out topics without a folder that the broker's table of topics does not have either."""
    folders = {entry.name for entry in files.list(os.path.join(path, directory.CONSUMEQUEUE))}
    absent = {topic for topic, _ in state.queues} - folders
    listed = directory.known_topics(path, files) if absent else set()
    if not listed:
        return state
    deleted = absent - listed
    return replace(state, queues={name: queue for name, queue in state.queues.items() if name[0] not in deleted})


def lacks_all_records(path: str, files: Files, log: CommitLog) -> str | None:
    """Return what is wrong with a log whose files have no record, if queues have entries before it; else None.

    Retention, a broker's too, keeps the file of the last message. A recovery that went on without any is noted.
    """
    begin = log.begin
    if not begin or log.end > begin:
        return None
    closed = read_closed_state(path, files)
    if closed is not None and closed.log_end == begin:
        return None
    for name in directory.list_queues(path, files):
        folder = directory.queue_folder(path, *name)
        start = min((start for start in files.names(folder) if start.isdigit()), default=None)
        if start is not None and is_below(files.read(os.path.join(folder, start), 0, ENTRY_SIZE), begin):
            return f"the log begins at {begin} and has no record, but queues have entries before it"
    return None


def is_below(entry: bytes, limit: int) -> bool:
    """Return whether an entry is about a message before ``limit``."""
    physical_offset: int
    size: int
    physical_offset, size, _ = ENTRY.unpack(entry)
    return 0 < size < HOLE_SIZE and 0 <= physical_offset < limit


# ---- at a flush


class MarkError(Exception):
    """The mark of the last flush does not count; the text says why."""


class Mark(NamedTuple):
    """The mark of a flush."""

    state: StoreState
    index_file: str | None
    """Name of the newest index file."""
    last_record: int
    """Place of a record before the end, or of several that were written together."""

    def check_files(self, path: str, files: Files, config: StoreConfig, log: CommitLog) -> None:
        """Check that the files of the store in ``path`` have what the mark says.

        This reads the last record, the headers of index files with their last entries, and the last entry of each file
        of the queues.

        Raises:
            MarkError: They have not.
        """
        state = self.state
        if log.begin != state.log_begin:
            raise MarkError(f"the log begins at {log.begin}, and began at {state.log_begin} at the last flush")
        if not state.has_last_record(log):
            raise MarkError(f"the log has another record at {self.last_record} than at the last flush")
        self._check_index(os.path.join(path, directory.INDEX), files, config)
        size = config.consumequeue_file_size
        for (topic, queue_id), (first, end, physical_end) in state.queues.items():
            folder, at = directory.queue_folder(path, topic, queue_id), max(end - 1, 0) * ENTRY_SIZE
            oldest = min(max(first, 0) * ENTRY_SIZE, at) // size * size
            entry = b""
            with suppress(StoreIOError, CorruptionError):  # there is no such file
                if file_size(files, os.path.join(folder, file_name(oldest))) == size:
                    for last in (*range(oldest + size - ENTRY_SIZE, at, size), at):  # files before the last are full
                        entry = files.read(os.path.join(folder, file_name(last - last % size)), last % size, ENTRY_SIZE)
                        if not any(entry):
                            break
            if len(entry) != ENTRY_SIZE or sum(ENTRY.unpack(entry)[:2]) != physical_end:
                raise MarkError(f"queue {queue_id} of topic {topic} lacks entries that it had at the last flush")

    def _check_index(self, folder: str, files: Files, config: StoreConfig) -> None:
        newest, lacks = self.index_file or "", "the key index lacks files or entries that it had at the last flush"
        names = [name for name in files.names(folder) if name.isdigit()]
        if sum(name <= newest for name in names) != self.state.index_files or (newest and newest not in names):
            raise MarkError(lacks)
        for name in names:
            place = os.path.join(folder, name)
            try:
                header = IndexHeader.read(place, files)
                count = header.index_count
                if (name == newest and header.end_physical_offset < self.state.index_end) or (
                    name < newest and count < config.max_index_num
                ):
                    raise MarkError(lacks)
                if count > 1:  # a kill inside the write of a header can leave its end without its count
                    at = file_length(config.max_hash_slot_num, count - 1)
                    last = files.read(place, at, ENTRY_SIZE).ljust(ENTRY_SIZE, b"\0")
                    if unpack_entry(last, 0)[1] != header.end_physical_offset:
                        raise MarkError(f"the header of index file {name} does not fit its entries")
            except (StoreIOError, CorruptionError):
                raise MarkError(lacks) from None


def take_mark(path: str, files: Files) -> Mark | None:
    """Delete the mark, durably, before any file is changed, and return it; None if there is none.

    Raises:
        MarkError: It can't count.
    """
    if file_size(files, os.path.join(path, _MARK_FILE)) is None:
        return None
    try:
        mark, machine = _stored_mark(path, files)
    finally:
        delete_state(path, files)
    if machine != identity_of(files, path):
        raise MarkError("the last flush was before a restart of the machine, or in another folder")
    return mark


def read_mark(path: str, files: Files) -> Mark | None:
    """Return the mark, wherever it was written, and leave it there; None if there is none or it is unreadable.

    It says what the log had, not that the files still have it.
    """
    try:
        return _stored_mark(path, files)[0]
    except (MarkError, StoreIOError):
        return None


def _stored_mark(path: str, files: Files) -> tuple[Mark, str]:
    """Return the mark and the machine that wrote it.

    Raises:
        MarkError: It is unreadable.
    """
    place = os.path.join(path, _MARK_FILE)
    try:
        fields = read_document(place, files, _MARK_KINDS, max_size=_LARGEST_FILE)
        if fields is None:
            raise ValueError
        machine, index_file = fields.pop("machine"), fields.pop("index_file")
        state = _state(fields)
        for topic, queue_id in state.queues:
            validate_queue(topic, queue_id)
    except (*_UNREADABLE, MessageIllegalError):
        raise MarkError(f"{place} is unreadable") from None
    if state.last_record is None or not 0 <= state.last_record < state.log_end:
        raise MarkError(f"{place} names no record")
    return Mark(state, index_file, state.last_record), machine


def delete_state(path: str, files: Files, name: str = _MARK_FILE) -> None:
    """Delete the mark of the store in ``path``, or another state by its file, before what it says can change; durably.

    That of the last close changes when retention deletes a file of the log.
    """
    place = os.path.join(path, name)
    if file_size(files, place) is not None:
        files.delete(place)
        files.flush_folder(os.path.dirname(place))


class MarkWriter:
    """Writes marks of the store in folder ``path`` while it is open for writing. One caller at a time."""

    def __init__(self, path: str, files: Files, config: StoreConfig, parts: Parts) -> None:
        self._path = path
        self._files = files
        self._parts = parts
        # A mark would have to check extension files too, so stores with them have none.
        self._is_used = not config.enable_consumequeue_ext
        self._begin = self._end = parts.log.begin
        self._is_written = False

    def due_state(self) -> dict[str, Any] | None:
        """Return fields for `write` if a mark is due, None otherwise.

        Call it under the writer's lock, with all entries and keys written.
        """
        parts, log = self._parts, self._parts.log
        if not self._is_used or (
            log.end - self._end < WORTH_A_MARK and not (self._is_written and log.begin > self._begin)
        ):
            return None
        machine = identity_of(self._files, self._path)
        if machine is None or log.last_write is None:
            return None
        self._begin, self._end = log.begin, log.end
        newest = parts.index.files[-1].name if parts.index.files else None
        return {**_fields(log, parts.index), "index_file": newest, "machine": machine}

    def write(self, fields: dict[str, Any] | None) -> None:
        """Write a mark after everything before its end was flushed; None writes nothing.

        It has the queues as they are now, so that appends wait for no look at thousands. In a queue that an append has
        half changed, the noted entry is never there. That costs time after a kill, and hides nothing.
        """
        if fields is None:
            return
        parts = self._parts
        queues = {name: state for name, state in parts.queues.states().items() if state.max_offset}
        try:
            write_document(os.path.join(self._path, _MARK_FILE), self._files, _complete(fields, parts.log, queues))
            self._is_written = True
        except StoreIOError as error:  # the mark before still holds
            _log.warning("a recovery after a kill would take longer: %(error)s", error=error, path=self._path)

    def withdraw(self) -> None:
        """Delete the mark, because the index may never reach the device, or a file that it names is to be deleted."""
        with suppress(StoreIOError):
            delete_state(self._path, self._files)

    def withdraw_all(self) -> None:
        """Delete the mark and the state of the last close, because a file that both name is to be deleted."""
        self.withdraw()
        delete_state(self._path, self._files, CLOSED_FILE)
