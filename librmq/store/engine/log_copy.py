"""Copying: appends bytes of another store's log to this one, and dispatches their records to queues and index.

Mirrors 4.9.4's ``DefaultMessageStore.appendToCommitLog``, which appends a master's log to a slave's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from librmq.consumequeue import ENTRY
from librmq.errors import RmqError
from librmq.java.lang import JAVA_ERRORS, java_decode
from librmq.message import record as record_format
from librmq.runtime.locks import critical
from librmq.store.engine.derivation import Derivation
from librmq.store.engine.dispatch import Dispatcher, Lane
from librmq.store.engine.open_store import Parts

_unpack_size = record_format.header_struct("size", "magic", unsigned=("size",)).unpack_from
_pack_entry = ENTRY.pack
_IRREGULAR: Final = ("", -1)  # in place of a queue


class CopiedRecords(NamedTuple):
    """Result of one copy."""

    end: int
    """The end of the copy's log."""
    queues: Collection[tuple[str, int]]
    """The queues that got messages, as topic and queue id."""
    is_regular: bool = True
    """Whether each record was the next one in its queue. Otherwise the queues must be recovered from the log."""


def whole_size(data: bytes, room: int) -> tuple[int, int]:
    """Return the bytes of the whole records at the start of ``data``, and the total size of the next record.

    ``room`` is the number of bytes from the start of ``data`` to the end of its log file, which a blank fills.
    """
    at, size = 0, len(data)
    while at + record_format.BLANK_SIZE <= size:
        needed, magic = _unpack_size(data, at)
        if magic == record_format.BLANK_MAGIC:
            needed = room - at
        if at + needed > size or needed <= 0:
            return at, needed
        at += needed
    return at, 0 if at == size else record_format.BLANK_SIZE


class LogCopier:
    """The copying side of an open store. Not thread-safe: `StoreHandle` calls it under the append lock."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._lanes: dict[tuple[bytes, int], tuple[Lane, tuple[str, int]]] = {}
        self._derive = Derivation(parts.levels).derive

    def append(self, data: bytes, *, is_checked: bool = False) -> CopiedRecords:
        """Append whole records and blanks of one log file, and dispatch them.

        If a signal interrupts this, `Appender.repair` does the rest. Where the log lacks room the caller is in a
        critical block.

        Raises:
            CorruptionError: The bytes are not records; nothing is appended.
            StoreIOError: There is no space. If the log already has the records, a later call dispatches them.
        """
        parts = self._parts
        log, dispatcher = parts.log, parts.dispatcher
        size = len(data)
        if not size:
            return CopiedRecords(log.end, ())
        begin = dispatcher.writing_at = log.end
        if is_checked and begin + size <= log.sure and _unpack_size(data)[0] == size:  # a send waits for this record
            log.copy_in(data, size)
            name = self._dispatch(begin, size, data)
            queues: Collection[tuple[str, int]] = () if name is None else (name,)
        else:
            try:
                items = log.append_copy(data, is_checked=is_checked)
            except RmqError:
                dispatcher.writing_at = -1  # nothing was appended
                raise
            queues = names = set[tuple[str, int]]()
            for place, size, raw in items:
                name = None if raw is None else self._dispatch(place, size, raw)
                if name is not None:
                    names.add(name)
                    if name is _IRREGULAR:
                        break
        dispatcher.writing_at = -1
        if _IRREGULAR in queues:
            return CopiedRecords(log.end, (), False)
        if len(dispatcher.records) >= Dispatcher.BATCH:
            dispatcher.drain()
        return CopiedRecords(log.end, queues)

    def _dispatch(self, physical_offset: int, size: int, raw: bytes) -> tuple[str, int] | None:
        """Collect the entry and the keys of a record; return its queue.

        Return None for a record without an entry, and `_IRREGULAR` if it is not the next one in its queue.
        """
        dispatcher = self._parts.dispatcher
        _, _, _, topic, queue_id, queue_offset, code, stored, properties, unique, key = self._derive(
            physical_offset, size, raw
        )
        lane, name = self._lanes.get((topic, queue_id)) or self._lane(topic, queue_id)
        if code is not None:
            if queue_offset != lane.next_queue_offset:
                if lane.next_queue_offset:
                    return _IRREGULAR
                lane.next_queue_offset = queue_offset  # the log begins with a later message of the queue
            if lane.queue.ext is not None:
                with critical:
                    code = dispatcher.add_unit(lane, code, stored, properties)
            pending = lane.pending
            if not pending:
                lane.pending_from = queue_offset
                dispatcher.lanes.append(lane)
            pending.append(_pack_entry(physical_offset, size, code))
            lane.next_queue_offset = queue_offset + 1
        dispatcher.records.append(
            (
                physical_offset,
                stored,
                lane.prefix_hash,
                unique.decode("utf-8", JAVA_ERRORS) if unique else None,
                key.decode("utf-8", JAVA_ERRORS) if key else None,
            )
        )
        return None if code is None else name

    def _lane(self, topic: bytes, queue_id: int) -> tuple[Lane, tuple[str, int]]:
        """Return the lane of a queue and the queue's name, which its first record makes."""
        with critical:
            lane = self._parts.lane(java_decode(topic), queue_id)
            lane_and_name = self._lanes[topic, queue_id] = lane, (lane.topic, lane.queue_id)
        return lane_and_name
