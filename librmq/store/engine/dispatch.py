"""From the log to what is derived from it: queue entries and keys, in the order of the log.

Records are collected and written in batches: one slice of entries a queue, one run of keys; the entries first. A reader
has them written before it looks. A crash in between loses nothing, since all can be read from the log again. Mirrors
4.9.4's ``ReputMessageService``, ``CommitLogDispatcherBuildConsumeQueue`` and ``…BuildIndex``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from librmq.consumequeue import ENTRY, ConsumeQueue
from librmq.java.hashing import hash_append, index_key_hashes, java_decode, string_hash
from librmq.java.numbers import java_int
from librmq.message import record as record_format
from librmq.message.delay_levels import SCHEDULE_TOPIC, DelayLevels
from librmq.message.message import StoredMessage
from librmq.runtime.critical import critical
from librmq.store.format.keyindex import KeyIndex

__all__ = [
    "BitmapOf",
    "Dispatcher",
    "KeyBlock",
    "Lane",
    "Pending",
    "RawPending",
    "derived_tags_code",
    "has_queue_entry",
    "is_indexed",
    "key_block",
    "key_hashes",
    "parse_level",
]


_FEW: Final = 16
"""Below so many records a loop is quicker than arrays."""

BitmapOf = Callable[[str, Mapping[str, str] | None], bytes | None]
"""From a topic and a message's properties to the bitmap of the filters that match, None where none is registered."""


def has_queue_entry(sys_flag: int) -> bool:
    """Whether a record with ``sys_flag`` gets a queue entry: raw prepared and rollback records do not."""
    return (sys_flag & record_format.TRANSACTION_MASK) in (0, record_format.TRANSACTION_COMMIT)


def derived_tags_code(message: StoredMessage, levels: DelayLevels) -> int:
    """What stands as tags code in a record's queue entry: a delayed record's is its delivery time (ms)."""
    properties = message.properties
    if message.topic == SCHEDULE_TOPIC:
        level = parse_level(properties.get(record_format.PROPERTY_DELAY))
        if level > 0:
            return levels.deliver_timestamp_ms(levels.cap(level), message.store_timestamp_ms)
    return record_format.tags_code(properties.get(record_format.PROPERTY_TAGS))


def parse_level(text: str | None) -> int:
    """A delay level as a record says it; 0, none, for what is no number of 32 bits."""
    return 0 if text is None else java_int(text) or 0


def key_hashes(prefix_hash: int, unique_key: str | None, keys: str | None) -> Sequence[int]:
    """The index hashes of a record, its unique key first; ``prefix_hash`` is that of ``topic#``."""
    hashes = [_index_hash(hash_append(prefix_hash, unique_key))] if unique_key else []
    if keys:
        hashes += [_index_hash(hash_append(prefix_hash, key)) for key in record_format.split_keys(keys)]
    return hashes


def is_indexed(sys_flag: int) -> bool:
    """Whether the keys of a record with ``sys_flag`` are indexed: those of a rollback are not."""
    return (sys_flag & record_format.TRANSACTION_MASK) != record_format.TRANSACTION_ROLLBACK


def _index_hash(value: int) -> int:
    return abs(value) if value != -(1 << 31) else 0


class Lane:
    """What appending to one queue needs to know."""

    __slots__ = (
        "next_queue_offset", "pending", "pending_from", "prefix_hash", "queue", "queue_id", "topic", "topic_field"
    )  # fmt: skip

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
        self.pending_from = self.next_queue_offset
        """The queue offset of the first of them, where there are any."""


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

    ``records`` is public for the store's hot path, which adds to it and to `Lane.pending` by itself and calls `advance`
    while there are `BATCH`. Call `write_entries` before a queue is read, `drain` before the index is asked.
    """

    BATCH: Final = 128
    """So many records are written together at most; more would make the append that writes them stand out."""

    def __init__(self, index: KeyIndex, bitmap_of: BitmapOf | None = None) -> None:
        self._index = index
        self.bitmap_of = bitmap_of
        self.lanes: list[Lane] = []
        """The lanes that have pending entries."""
        self.records: list[tuple[int, int, int, str | None, str | None]] = []
        """The fields of `Pending`, for each record in the order of the log, with or without keys, that the index does
        not have yet."""
        self._block: KeyBlock | None = None  # of the first of them
        self._indexing = False  # true outside of a call: the last one failed
        self.unflushed: set[ConsumeQueue] = set()
        """The queues that were written since this set was last taken to flush them."""
        self.entries = 0
        """How many records were dispatched since `unflushed` was last taken."""
        self.dispatched_timestamp_ms = 0
        """The store time of the last record whose entry and keys are written."""
        self.writing_at = -1
        """The physical offset of the append that runs, -1 for none. Found by the next one, it is that of an append
        which a signal has interrupted."""

    def add_unit(self, lane: Lane, tags_code: int, store_timestamp_ms: int, properties: bytes) -> int:
        """Give a record of a queue with extension its unit; returns the unit's address, its entry's tags code."""
        assert lane.queue.ext is not None
        bitmap = None
        if self.bitmap_of is not None:
            bitmap = self.bitmap_of(lane.topic, record_format.decode_properties(properties) if properties else None)
        return lane.queue.ext.put(tags_code, store_timestamp_ms, bitmap)

    def add(self, lane: Lane, entry: bytes) -> None:
        """Collect the packed queue entry of the next record of a queue; appends have this inline."""
        if not lane.pending:
            lane.pending_from = lane.next_queue_offset
            self.lanes.append(lane)
        lane.pending.append(entry)
        lane.next_queue_offset += 1

    def write_entries(self) -> None:
        """Write the queue entries that were collected; after an error (a full disk) the next call goes on there.

        So it does after a signal that raised: a queue counts what it has.
        """
        for lane in self.lanes:
            queue, first = lane.queue, max(lane.pending_from, lane.queue.max_offset)
            entries = lane.pending[first - lane.pending_from :]
            if entries:
                self.unflushed.add(queue)
                if queue.has_room(len(entries)):
                    queue.append_many(first, b"".join(entries))
                else:
                    with critical:
                        queue.append_many(first, b"".join(entries))
            lane.pending = []
        self.lanes.clear()

    def rewind(self, physical_offset: int, lanes: Iterable[Lane]) -> None:
        """Forget what was collected of the records from ``physical_offset`` on; ``lanes`` are all there are."""
        while self.records and self.records[-1][0] >= physical_offset:
            self.records.pop()
        self.lanes.clear()
        for lane in lanes:
            pending = lane.pending
            while pending and ENTRY.unpack(pending[-1])[0] >= physical_offset:
                pending.pop()
            if pending:
                self.lanes.append(lane)
                lane.next_queue_offset = lane.pending_from + len(pending)
            else:
                lane.next_queue_offset = lane.queue.max_offset

    def advance(self) -> None:
        """Do one of two parts of what `drain` does, so that no append waits for all of it; with its errors."""
        if self._indexing:  # the last call failed, and it is for this one to tell if that is still so
            self.drain()
        elif self._block is None:
            self.write_entries()
            self._block = key_block(self.records)
        else:
            with critical:
                self._put_block(self._block)

    def drain(self) -> None:
        """Write whatever was collected; after an error (a full disk) the next call goes on where this one ended."""
        if self.records:
            with critical:
                self._drain()

    def _drain(self) -> None:
        self.write_entries()
        if self._indexing:
            self._resume()
        elif self._block is not None:
            self._put_block(self._block)
        records = self.records
        if len(records) >= _FEW:
            self._put_block(key_block(records))
        elif records:
            self._indexing = True
            self._index.append_many(
                [(place, stored, key_hashes(prefix, unique, keys)) for place, stored, prefix, unique, keys in records]
            )
            self._indexed(len(records))

    def _resume(self) -> None:
        """Go on where an index call has failed: without the records that are indexed, and of one some of its keys."""
        last, count = self._index.last_record()
        self.records = records = [record for record in self.records if record[0] >= last]
        if not records:
            return
        left = records
        if records[0][0] == last and count:  # it stays whole in `records`, should this call fail too
            _, stored, prefix, unique, keys = records[0]
            texts = [*([unique] if unique else []), *record_format.split_keys(keys)]
            left = [(last, stored, prefix, None, " ".join(texts[count:])), *records[1:]]
        self._put_block(key_block(left))

    def _put_block(self, block: KeyBlock) -> None:
        self._indexing = True
        self._index.append_block(*block)
        self._indexed(len(block.physical_offsets))

    def _indexed(self, count: int) -> None:
        """Take note that the first ``count`` records have their keys in the index."""
        records = self.records
        self.entries += count
        self.dispatched_timestamp_ms = records[count - 1][1]
        self.records = records[count:]
        self._block = None
        self._indexing = False


class KeyBlock(NamedTuple):
    """The keys of many records, as `KeyIndex.append_block` takes them."""

    physical_offsets: NDArray[np.int64]
    timestamps: NDArray[np.int64]
    record_of_key: NDArray[np.int64]
    key_hashes: NDArray[np.int64]


def key_block(records: Sequence[tuple[int, int, int, str | None, str | None] | RawPending]) -> KeyBlock:
    """The keys of many records (`Pending`); texts may be as they are stored, in all or in none."""
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
            found = record_format.split_keys(key if key is None or isinstance(key, str) else java_decode(key))
            if unique:
                found = [unique if isinstance(unique, str) else java_decode(unique), *found]
            texts += found
            owners += [number] * len(found)
        record_of_key = np.array(owners, np.int64)
        hashes = index_key_hashes(prefix_hashes[record_of_key], texts)
    return KeyBlock(np.array(places, np.int64), np.array(stored, np.int64), record_of_key, hashes)


def _has_blank(keys: Sequence[str] | Sequence[bytes]) -> bool:
    if isinstance(keys[0], bytes):
        return b" " in b"".join(keys)  # type: ignore[arg-type]
    return " " in "".join(keys)  # type: ignore[arg-type]
