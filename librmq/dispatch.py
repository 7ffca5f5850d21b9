"""From the log to what is derived from it: queue entries and keys, in the order of the log.

Records are collected and written in batches: one slice of entries a queue, one run of keys. Whoever reads what is
derived calls `Dispatcher.drain` first. Nothing is lost by a crash in between, since all of it can be read from the log
again. Mirrors 4.9.4's ``ReputMessageService``, ``CommitLogDispatcherBuildConsumeQueue`` and ``…BuildIndex``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from librmq import codec
from librmq.consumequeue import ConsumeQueue
from librmq.javahash import hash_append, index_key_hashes, java_decode, java_int, string_hash
from librmq.keyindex import KeyIndex
from librmq.levels import SCHEDULE_TOPIC, DelayLevels
from librmq.message import StoredMessage

__all__ = [
    "BitmapOf",
    "Dispatcher",
    "Lane",
    "Pending",
    "RawPending",
    "derived_tags_code",
    "has_queue_entry",
    "index_block",
    "is_indexed",
    "key_hashes",
    "parse_level",
]


_FEW: Final = 16
"""Below so many records a loop is quicker than arrays."""

BitmapOf = Callable[[str, Mapping[str, str] | None], bytes | None]
"""From a topic and a message's properties to the bitmap of the filters that match, None where none is registered."""


def has_queue_entry(sys_flag: int) -> bool:
    """Whether a record with ``sys_flag`` gets a queue entry: raw prepared and rollback records do not."""
    return (sys_flag & codec.TRANSACTION_MASK) in (0, codec.TRANSACTION_COMMIT)


def derived_tags_code(message: StoredMessage, levels: DelayLevels) -> int:
    """What stands as tags code in a record's queue entry: a delayed record's is its delivery time (ms)."""
    properties = message.properties
    if message.topic == SCHEDULE_TOPIC:
        level = parse_level(properties.get(codec.PROPERTY_DELAY))
        if level > 0:
            return levels.deliver_timestamp_ms(levels.cap(level), message.store_timestamp_ms)
    return codec.tags_code(properties.get(codec.PROPERTY_TAGS))


def parse_level(text: str | None) -> int:
    """A delay level as a record says it; 0, none, for what is no number of 32 bits."""
    return 0 if text is None else java_int(text) or 0


def key_hashes(prefix_hash: int, unique_key: str | None, keys: str | None) -> Sequence[int]:
    """The index hashes of a record, its unique key first; ``prefix_hash`` is that of ``topic#``."""
    hashes = [_index_hash(hash_append(prefix_hash, unique_key))] if unique_key else []
    if keys:
        hashes += [_index_hash(hash_append(prefix_hash, key)) for key in codec.split_keys(keys)]
    return hashes


def is_indexed(sys_flag: int) -> bool:
    """Whether the keys of a record with ``sys_flag`` are indexed: those of a rollback are not."""
    return (sys_flag & codec.TRANSACTION_MASK) != codec.TRANSACTION_ROLLBACK


def _index_hash(value: int) -> int:
    return abs(value) if value != -(1 << 31) else 0


class Lane:
    """What appending to one queue needs to know."""

    __slots__ = ("next_queue_offset", "pending", "prefix_hash", "queue", "queue_id", "topic", "topic_field")

    def __init__(self, topic: str, queue_id: int, queue: ConsumeQueue) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.queue = queue
        encoded = topic.encode()
        self.topic_field = bytes((len(encoded),)) + encoded
        """The topic as it stands in a record, its length before it."""
        self.prefix_hash = string_hash(topic + "#")
        """From which the index hashes of the topic's keys go on."""
        self.next_queue_offset = queue.max_offset
        """What the next record of the queue gets."""
        self.pending: list[bytes] = []
        """Packed entries that are not in the queue yet; the last is that of ``next_queue_offset - 1``."""


class Pending(NamedTuple):
    """The keys of a record that are not in the index yet."""

    physical_offset: int
    store_timestamp_ms: int
    prefix_hash: int
    unique_key: str | None
    keys: str | None


RawPending = tuple[int, int, int, bytes | None, bytes | None]
"""The fields of `Pending`, the texts as a record has them."""


class Dispatcher:
    """Collects what records lead to and writes it. Not thread-safe: `MessageStore` calls it under its lock.

    ``records`` is public for the store's hot path, which adds to it and to `Lane.pending` by itself and calls `drain`
    when there are `BATCH`.
    """

    BATCH: Final = 128
    """So many records are written together at most; more would make the append that writes them stand out."""

    def __init__(self, index: KeyIndex, bitmap_of: BitmapOf | None = None) -> None:
        self._index = index
        self.bitmap_of = bitmap_of
        self.lanes: list[Lane] = []
        """The lanes that have pending entries."""
        self.records: list[tuple[int, int, int, str | None, str | None]] = []
        """The fields of `Pending`, for each record in the order of the log, with or without keys."""
        self._failed = False
        self.unflushed: set[ConsumeQueue] = set()
        """The queues that were written since somebody last took this set to flush them."""
        self.entries = 0
        """How many entries were written since `unflushed` was last taken."""
        self.dispatched_timestamp_ms = 0
        """The store time of the last record whose entry and keys are written."""

    def add_unit(self, lane: Lane, tags_code: int, store_timestamp_ms: int, properties: bytes) -> int:
        """Give a record of a queue with extension its unit; returns the unit's address, its entry's tags code."""
        assert lane.queue.ext is not None
        bitmap = None
        if self.bitmap_of is not None:
            bitmap = self.bitmap_of(lane.topic, codec.decode_properties(properties) if properties else None)
        return lane.queue.ext.put(tags_code, store_timestamp_ms, bitmap)

    def drain(self) -> None:
        """Write whatever was collected; after an error (a full disk) the next call goes on where this one ended."""
        records = self.records
        if not records:
            return
        if self._failed:
            records = self.records = self._resume()
        self._failed = True
        for lane in self.lanes:
            pending = lane.pending
            lane.queue.append_many(lane.next_queue_offset - len(pending), b"".join(pending))
            lane.pending = []
            self.unflushed.add(lane.queue)
        self.entries += len(records)
        self.lanes.clear()
        if len(records) < _FEW:
            self._index.append_many(
                [(place, stored, key_hashes(prefix, unique, keys)) for place, stored, prefix, unique, keys in records]
            )
        else:
            index_block(self._index, records)
        self.dispatched_timestamp_ms = records[-1][1]
        self.records = []
        self._failed = False

    def _resume(self) -> list[tuple[int, int, int, str | None, str | None]]:
        """Drop the entries that are written; returns the records that are not, or not wholly, indexed."""
        for lane in self.lanes:
            written = lane.queue.max_offset - (lane.next_queue_offset - len(lane.pending))
            del lane.pending[: max(written, 0)]
        last, count = self._index.last_record()
        records: list[tuple[int, int, int, str | None, str | None]] = []
        for record in self.records:
            if record[0] == last and count:
                _, stored, prefix, unique, keys = record
                texts = [*([unique] if unique else []), *codec.split_keys(keys)]
                records.append((last, stored, prefix, None, " ".join(texts[count:])))
            elif record[0] >= last:
                records.append(record)
        return records


def index_block(index: KeyIndex, records: Sequence[tuple[int, int, int, str | None, str | None] | RawPending]) -> None:
    """Add the keys of many records (`Pending`) to an index; texts may be as they are stored, in all or in none."""
    places, stored, prefixes, uniques, keys = zip(*records, strict=True)
    prefix_hashes = np.array(prefixes, np.int64)
    if all(uniques) and all(keys) and not _has_blank(keys):
        # The usual records, a unique id and one key each.
        record_of_key = np.repeat(np.arange(len(records)), 2)
        hashes = np.empty(len(record_of_key), np.int64)
        hashes[::2] = index_key_hashes(prefix_hashes, uniques)
        hashes[1::2] = index_key_hashes(prefix_hashes, keys)
    else:
        texts: list[str] = []
        owners: list[int] = []
        for number, (unique, key) in enumerate(zip(uniques, keys, strict=True)):
            found = codec.split_keys(key if key is None or isinstance(key, str) else java_decode(key))
            if unique:
                found = [unique if isinstance(unique, str) else java_decode(unique), *found]
            texts += found
            owners += [number] * len(found)
        record_of_key = np.array(owners, np.int64)
        hashes = index_key_hashes(prefix_hashes[record_of_key], texts)
    index.append_block(np.array(places, np.int64), np.array(stored, np.int64), record_of_key, hashes)


def _has_blank(keys: Sequence[str] | Sequence[bytes]) -> bool:
    if isinstance(keys[0], bytes):
        return b" " in b"".join(keys)  # type: ignore[arg-type]
    return " " in "".join(keys)  # type: ignore[arg-type]
