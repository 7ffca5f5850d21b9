"""Copying: appends bytes of another store's log to this one, and dispatches their records to queues and index.

Mirrors 4.9.4's ``DefaultMessageStore.appendToCommitLog``, which appends a master's log to a slave's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from librmq.commitlog import LogItem
from librmq.consumequeue import ENTRY
from librmq.java.hashing import java_decode
from librmq.message import record as record_format
from librmq.message.delay_levels import SCHEDULE_TOPIC
from librmq.message.message import StoredMessage
from librmq.store.engine.dispatch import Dispatcher, Lane, derived_tags_code, has_queue_entry, is_indexed
from librmq.store.engine.open_store import Parts

__all__ = ["CopiedRecords", "LogCopier", "whole_size"]

_unpack_fields = record_format.header_struct(
    "magic", "queue_id", "queue_offset", "physical_offset", "sys_flag", "store_timestamp", "body_length"
).unpack_from
_unpack_size = record_format.header_struct("size", "magic", unsigned=("size",)).unpack_from
_pack_entry = ENTRY.pack
_MAGIC: Final = record_format.MESSAGE_MAGIC
_V6: Final = record_format.HOSTS_V6
_IN_TRANSACTION: Final = record_format.TRANSACTION_MASK
_SCHEDULE_TOPIC: Final = SCHEDULE_TOPIC.encode()
_TAGS_KEPT: Final = 10_000


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
        self._tags_codes: dict[bytes | None, int] = {None: 0}

    def append(self, data: bytes) -> CopiedRecords:
        """Append whole records and blanks of one log file, and dispatch them. Called inside a critical block.

        Raises:
            CorruptionError: the bytes are not records; nothing is appended.
            StoreIOError: there is no space. If the log already has the records, a later call dispatches them.
        """
        parts = self._parts
        if not data:
            return CopiedRecords(parts.log.end, frozenset())
        items = parts.log.append_copy(data)
        queues, is_regular = self._derive(items)
        if is_regular and len(parts.dispatcher.records) >= Dispatcher.BATCH:
            parts.dispatcher.drain()
        return CopiedRecords(parts.log.end, queues, is_regular)

    def _derive(self, items: Iterable[LogItem]) -> tuple[frozenset[tuple[str, int]], bool]:
        """Collect entries and keys of records; return their queues, and whether each is the next one in its queue."""
        dispatcher, find = self._parts.dispatcher, record_format.find_keys_and_tags
        records, lanes, touched = dispatcher.records, self._lanes, set[Lane]()
        for physical_offset, size, raw in items:
            if raw is None:
                continue
            magic, queue_id, queue_offset, _, sys_flag, stored, body_size = _unpack_fields(raw)
            if magic != _MAGIC or sys_flag & _V6:
                stored = record_format.store_timestamp_ms(raw)
                _, _, topic_at, topic_end, properties_at, _ = record_format.frame(raw, 0, size)
            else:
                topic_at = 89 + body_size if body_size > 0 else 89
                topic_end = topic_at + raw[topic_at - 1]
                properties_at = topic_end + 2
            topic, properties = raw[topic_at:topic_end], raw[properties_at:]
            lane = lanes.get((topic, queue_id))
            if lane is None:
                lane = lanes[topic, queue_id] = self._parts.lane(java_decode(topic), queue_id)
            unique, key, tags = find(properties)
            if not sys_flag & _IN_TRANSACTION or has_queue_entry(sys_flag):
                code = self._tags_code(tags)
                if topic == _SCHEDULE_TOPIC:
                    code = derived_tags_code(StoredMessage(raw), self._parts.levels)
                if queue_offset != lane.next_queue_offset:
                    if lane.next_queue_offset:
                        return frozenset(), False
                    lane.next_queue_offset = queue_offset  # the log begins with a later message of the queue
                if lane.queue.ext is not None:
                    code = dispatcher.add_unit(lane, code, stored, properties)
                dispatcher.add(lane, _pack_entry(physical_offset, size, code))
                touched.add(lane)
            if sys_flag & _IN_TRANSACTION and not is_indexed(sys_flag):
                unique = key = None
            records.append(
                (
                    physical_offset,
                    stored,
                    lane.prefix_hash,
                    java_decode(unique) if unique else None,
                    java_decode(key) if key else None,
                )
            )
        return frozenset((lane.topic, lane.queue_id) for lane in touched), True

    def _tags_code(self, tags: bytes | None) -> int:
        found = self._tags_codes.get(tags)
        if found is None:
            if len(self._tags_codes) > _TAGS_KEPT:
                self._tags_codes = {None: 0}
            found = self._tags_codes[tags] = record_format.tags_code(java_decode(tags or b""))
        return found
