"""Dispatch from the log to queues and index: entries and keys, in the order of the log.

Records are collected and written in batches, first one slice of entries for each queue, then one run of keys. A reader
of a queue or of the index has them written first. A crash loses nothing, because both are derived from the log. Mirrors
4.9.4's ``ReputMessageService``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from librmq.consumequeue import ConsumeQueue, begin_together, files_of
from librmq.consumequeue_entries import ENTRY
from librmq.errors import StoreIOError
from librmq.message.properties import decode_properties, split_keys
from librmq.runtime import critical
from librmq.runtime import lazy_numpy as np
from librmq.runtime.compiled_core import CORE, DispatchState, LaneState
from librmq.store.engine.derivation import BitmapOf, KeyBlock, Pending, key_block, key_hashes, topic_hash
from librmq.store.engine.store_times import TimeOrder
from librmq.store.format._keyindex import KeyIndex

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MANY_NEW: Final = 16
"""Number of new queues from which on they are made together."""
_FEW: Final = 16
"""Number of records below which a loop is faster than arrays."""


class Lane(LaneState):
    """State of appending to one queue."""

    __slots__: tuple[str, ...] = (
        "next_queue_offset", "pending", "pending_from", "prefix_hash", "queue", "queue_id", "topic", "topic_field"
    ) if CORE.module is None else ()  # fmt: skip  # with the core its base has them

    @property
    def name(self) -> tuple[str, int]:
        """Topic and queue id."""
        return self.topic, self.queue_id

    def __init__(self, topic: str, queue_id: int, queue: ConsumeQueue) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.queue = queue
        encoded = topic.encode()
        self.topic_field: bytes = bytes((len(encoded),)) + encoded
        """The topic in a record's form, with its length before it."""
        self.prefix_hash: int = topic_hash(topic)
        """Hash of ``topic#``, the start of the index hashes of the topic's keys."""
        self.next_queue_offset: int = queue.max_offset
        """Queue offset of the next record."""
        self.pending: list[bytes] = []
        """Packed entries that are not in the queue yet; the last is that of ``next_queue_offset - 1``."""
        self.pending_from: int = self.next_queue_offset
        """Queue offset of the first of them, if there are any."""


class Dispatcher(DispatchState):
    """Collector and writer of queue entries and keys. Not thread-safe: `MessageStore` calls it under its lock.

    ``records`` is public for the store's hot path, which adds to it and to `Lane.pending` directly and calls `advance`
    while there are `BATCH`. Call `write_entries` before reading a queue, and `drain` before searching the index.
    """

    BATCH: Final = 256
    """Most records written together; more would make the append that writes them slow."""

    def __init__(self, index: KeyIndex, bitmap_of: BitmapOf | None = None) -> None:
        self._index = index
        self.bitmap_of = bitmap_of
        self.lanes: list[Lane] = []
        """Lanes with pending entries."""
        self.records: list[Pending] = []
        """The `Pending` keys of each record that is not in the index yet, in log order, with or without keys."""
        # `advance` spreads a drain over three calls: entries of the first `_entered` records, then the block of their
        # keys, then the index. `_indexing` stays true after a failed call, so that the next one begins with a drain.
        self._entered = 0
        self._block: KeyBlock | None = None
        self._indexing = False
        self.unflushed: set[ConsumeQueue] = set()
        """Queues written since a flush last took this set."""
        self.entries: int = 0
        """Number of records dispatched since `unflushed` was last taken."""
        self.dispatched_timestamp_ms: int = 0
        """Store time of the last record whose entry and keys are written."""
        self.writing_at = -1
        """Physical offset of the running append, -1 for none. If the next append finds one, a signal interrupted it."""
        self.order: TimeOrder = TimeOrder(0, 0)
        """How far the store times of dispatched records disagree; opening the log for writing replaces it."""

    def entries_a_queue(self) -> int:
        """Return the number of entries that no flush has covered, on average for a queue that has some, rounded up."""
        return -(-(self.entries + len(self.records)) // (len(self.unflushed) or 1))

    def add_unit(self, lane: Lane, tags_code: int, store_timestamp_ms: int, properties: bytes) -> int:
        """Add the extension unit of a record, and return the unit's address, which is its entry's tags code."""
        assert lane.queue.ext is not None
        bitmap = None
        if self.bitmap_of is not None:
            bitmap = self.bitmap_of(lane.topic, decode_properties(properties) if properties else None)
        return lane.queue.ext.put(tags_code, store_timestamp_ms, bitmap)

    def add_entry(self, lane: Lane, entry: bytes) -> None:
        """Collect the packed queue entry of the next record of a queue. `Appender.append` does this inline."""
        if not lane.pending:
            lane.pending_from = lane.next_queue_offset
            self.lanes.append(lane)
        lane.pending.append(entry)
        lane.next_queue_offset += 1

    def add_block(self, entries_of: Sequence[tuple[Lane, bytes]], keys: KeyBlock) -> None:
        """Write the entries of records that follow all collected ones, and their keys, while nothing is collected.

        After an error the records can be collected one by one.
        """
        for lane, entries in entries_of:
            queue = lane.queue
            self.unflushed.add(queue)
            first = max(0, queue.max_offset - lane.next_queue_offset)  # after an error
            queue.append_many(lane.next_queue_offset + first, entries[first * ENTRY.size :])
        self._indexing = True
        self._index.append_block(*keys)
        for lane, entries in entries_of:
            lane.next_queue_offset += len(entries) // ENTRY.size
        self.order.add(keys.timestamps, int(keys.physical_offsets[-1]))
        self.entries += len(keys.physical_offsets)
        self.dispatched_timestamp_ms = int(keys.timestamps[-1])
        self._indexing = False

    def write_entries(self) -> None:
        """Write the collected queue entries.

        After an error such as a full disk, or a signal that raised, the next call continues there: a queue counts its
        entries.
        """
        if len(self.lanes) >= _MANY_NEW:
            with critical:
                self._begin_queues()
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

    def _begin_queues(self) -> None:
        """Write the entries of new queues by topic, if they are many."""
        new: dict[str, list[tuple[ConsumeQueue, bytes]]] = {}
        for lane in self.lanes:
            queue, size = lane.queue, len(lane.pending) * ENTRY.size
            is_new = queue.ext is None and not files_of(queue).starts
            if is_new and not lane.pending_from and size <= queue.file_size:
                new.setdefault(lane.topic, []).append((queue, b"".join(lane.pending)))
        if sum(map(len, new.values())) >= _MANY_NEW:
            with suppress(StoreIOError):  # made one by one, the queue that has no room raises it
                for queues in new.values():
                    self.unflushed.update(queue for queue, _ in queues)
                    begin_together(queues)

    def rewind(self, physical_offset: int, lanes: Iterable[Lane]) -> None:
        """Drop the collected entries and keys of records from ``physical_offset`` on; ``lanes`` are all lanes."""
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
                continue
            queue, end = lane.queue, lane.queue.max_offset
            if queue.max_physic_offset > physical_offset:  # `add_block` has written entries and failed behind them
                while (entry := queue.entry(end - 1)) is not None and entry.physical_offset >= physical_offset:
                    end -= 1
            lane.next_queue_offset = end

    def advance(self) -> None:
        """Do one of the three parts of `drain`, so that no append waits for all of it. Raises the same errors."""
        # The last call failed within the index. Drain everything at once, which raises again if the cause is still
        # there.
        if self._indexing:
            self.drain()
        elif not self._entered:
            self.write_entries()
            self._entered = len(self.records)
        elif self._block is None:
            self._block = key_block(self.records[: self._entered])
        else:
            with critical:
                self._put_block(self._block)

    def drain(self) -> None:
        """Write everything collected; after an error such as a full disk the next call continues from there."""
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
            self._drop_indexed(len(records))

    def _note_times(self, records: Sequence[Pending]) -> None:
        """Add records that are in the index to the order of times."""
        if len(records) >= _FEW:
            self.order.add(np.array([record[1] for record in records], np.int64), records[-1][0])
        elif records:
            self.order.add_few([record[1] for record in records], records[-1][0])

    def _resume(self) -> None:
        """Continue after a failed index call, without indexed records and without the indexed keys of a record."""
        last, count = self._index.last_record()
        self._note_times([record for record in self.records if record[0] < last])
        self.records = records = [record for record in self.records if record[0] >= last]
        if not records:
            return
        remaining = records
        # The index ends within this record's keys. Leave those out that it has, but keep the record whole in `records`,
        # so that a failure of this call loses none of them.
        if records[0][0] == last and count:
            _, stored, prefix, unique, keys = records[0]
            texts = [*([unique] if unique else []), *split_keys(keys)]
            remaining = [(last, stored, prefix, None, " ".join(texts[count:])), *records[1:]]
        self._put_block(key_block(remaining))

    def _put_block(self, block: KeyBlock) -> None:
        # Set before the call. If it fails, some of the keys may be in the index, and `_resume` asks how many.
        self._indexing = True
        self._index.append_block(*block)
        self._drop_indexed(len(block.physical_offsets), block.timestamps)

    def _drop_indexed(self, count: int, times: NDArray[np.int64] | None = None) -> None:
        """Note that the keys of the first ``count`` records are in the index; ``times`` are their store times."""
        records = self.records
        if times is None:
            self._note_times(records[:count])
        else:
            self.order.add(times, records[count - 1][0])
        self.entries += count
        self.dispatched_timestamp_ms = records[count - 1][1]
        self.records = records[count:]
        self._entered, self._block = 0, None
        self._indexing = False
