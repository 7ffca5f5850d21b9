"""Copying: appends bytes of another store's log to this one, and dispatches their records to queues and index.

Mirrors 4.9.4's ``DefaultMessageStore.appendToCommitLog``, which appends a master's log to a slave's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from librmq.commitlog import LogItem
from librmq.consumequeue import ENTRY
from librmq.errors import RmqError
from librmq.java.hashing import java_decode
from librmq.message import record as record_format
from librmq.runtime.critical import critical
from librmq.store.engine.derivation import Derivation
from librmq.store.engine.dispatch import Dispatcher, Lane
from librmq.store.engine.open_store import Parts

__all__ = ["CopiedRecords", "LogCopier", "whole_size"]

_unpack_size = record_format.header_struct("size", "magic", unsigned=("size",)).unpack_from
_pack_entry = ENTRY.pack


class CopiedRecords(NamedTuple):
    """Result of one copy."""

    end: int
    """The end of the copy's log."""
    queues: frozenset[tuple[str, int]]
    """The queues that got messages, as topic and queue id."""
    is_regular: bool = True
    """Whether each record was the next one in its queue. Otherwise the queues must be recovered from the log."""


def whole_size(data: bytes, left: int) -> tuple[int, int]:
    """Return the bytes of the whole records at the start of ``data``, and the total size of the next record.

    ``left`` is the number of bytes from the start of ``data`` to the end of its log file, which a blank fills.
    """
    at, size = 0, len(data)
    while at + record_format.BLANK_SIZE <= size:
        needed, magic = _unpack_size(data, at)
        if magic == record_format.BLANK_MAGIC:
            needed = left - at
        if at + needed > size or needed <= 0:
            return at, needed
        at += needed
    return at, 0 if at == size else record_format.BLANK_SIZE


class LogCopier:
    """The copying side of an open store. Not thread-safe: `StoreHandle` calls it under the append lock."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._lanes: dict[tuple[bytes, int], Lane] = {}
        self._derivation = Derivation(parts.levels)

    def append(self, data: bytes, *, is_checked: bool = False) -> CopiedRecords:
        """Append whole records and blanks of one log file, and dispatch them.

        If a signal interrupts this, `Appender.mend` does the rest. Where the log lacks room the caller is in a critical
        block.

        Raises:
            CorruptionError: the bytes are not records; nothing is appended.
            StoreIOError: there is no space. If the log already has the records, a later call dispatches them.
        """
        parts = self._parts
        if not data:
            return CopiedRecords(parts.log.end, frozenset())
        dispatcher = parts.dispatcher
        dispatcher.writing_at = parts.log.end
        try:
            items = parts.log.append_copy(data, is_checked=is_checked)
        except RmqError:
            dispatcher.writing_at = -1  # nothing was appended
            raise
        queues, is_regular = self._derive(items)
        dispatcher.writing_at = -1
        if is_regular and len(dispatcher.records) >= Dispatcher.BATCH:
            dispatcher.drain()
        return CopiedRecords(parts.log.end, queues, is_regular)

    def _derive(self, items: Iterable[LogItem]) -> tuple[frozenset[tuple[str, int]], bool]:
        """Collect entries and keys of records; return their queues, and whether each is the next one in its queue."""
        dispatcher = self._parts.dispatcher
        records, lanes, touched = dispatcher.records, self._lanes, set[tuple[str, int]]()
        for (
            place,
            size,
            _,
            topic,
            queue_id,
            queue_offset,
            code,
            stored,
            properties,
            unique,
            key,
        ) in self._derivation.walk(items):
            lane = lanes.get((topic, queue_id))
            if lane is None:
                with critical:
                    lane = lanes[topic, queue_id] = self._parts.lane(java_decode(topic), queue_id)
            if code is not None:
                if queue_offset != lane.next_queue_offset:
                    if lane.next_queue_offset:
                        return frozenset(), False
                    lane.next_queue_offset = queue_offset  # the log begins with a later message of the queue
                if lane.queue.ext is not None:
                    with critical:
                        code = dispatcher.add_unit(lane, code, stored, properties)
                pending = lane.pending
                if not pending:
                    lane.pending_from = queue_offset
                    dispatcher.lanes.append(lane)
                pending.append(_pack_entry(place, size, code))
                lane.next_queue_offset = queue_offset + 1
                touched.add((lane.topic, lane.queue_id))
            records.append(
                (
                    place,
                    stored,
                    lane.prefix_hash,
                    java_decode(unique) if unique else None,
                    java_decode(key) if key else None,
                )
            )
        return frozenset(touched), True
