"""Dispatch from the log to queues and index: entries and keys of the records behind what was dispatched before.

An append writes a record and moves the end of the log; what the record defines is derived from the log, in its order,
before a queue or the index is read, and at the latest after `Dispatcher.BATCH` records. A crash loses nothing, because
an opening does the same. Mirrors 4.9.4's ``ReputMessageService``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from librmq.consumequeue import ConsumeQueue, begin_together, files_of
from librmq.consumequeue_entries import ENTRY, ENTRY_SIZE
from librmq.errors import StoreIOError
from librmq.message.properties import decode_properties
from librmq.runtime import critical
from librmq.runtime import lazy_numpy as np
from librmq.runtime.compiled_core import CORE, DispatchState, LaneState
from librmq.store.engine.derivation import (
    BitmapOf,
    DerivedBlock,
    DerivedRecord,
    KeyBlock,
    Pending,
    key_block,
    key_hashes,
    topic_hash,
)
from librmq.store.format._keyindex import KeyIndex

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MANY_NEW: Final = 16
"""Number of new queues from which on they are made together."""
_pack_entry = ENTRY.pack
_FEW: Final = 16
"""Number of records below which a loop is faster than arrays."""


class Lane(LaneState):
    """State of appending to one queue."""

    __slots__: tuple[str, ...] = (
        "next_queue_offset", "prefix_hash", "queue", "queue_id", "topic", "topic_field"
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


Queued = tuple[Lane, int, bytes]
"""A queue, the first queue offset of some new entries, and these."""


@dataclass(slots=True)
class TimeOrder:
    """How far the store times of adjacent records disagree. One thread adds; others may read meanwhile."""

    begin: int
    """Physical offset of the first of these records."""
    end: int
    """Physical offset behind the beginning of the last one."""
    newest_ms: int = -(1 << 63)
    """The greatest store time of these records."""
    setback_ms: int = 0
    """The most by which one of them was stored before an earlier one of them."""

    def add(self, times: NDArray[np.int64], last: int) -> None:
        """Add the records that follow, by their store times; the last one is at ``last``."""
        if int(times[0]) >= self.newest_ms and (times[1:] >= times[:-1]).all():
            self.newest_ms = int(times[-1])
        else:
            newest = np.maximum(np.maximum.accumulate(times), self.newest_ms)
            self.setback_ms = max(self.setback_ms, int((newest - times).max()))
            self.newest_ms = int(newest[-1])
        self.end = last + 1  # a reader takes it first, so that the setback covers what it believes

    def add_few(self, times: Iterable[int], last: int) -> None:
        """Do the same for some records, for which arrays would take longer."""
        for time_ms in times:
            if time_ms >= self.newest_ms:
                self.newest_ms = time_ms
            else:
                self.setback_ms = max(self.setback_ms, self.newest_ms - time_ms)
        self.end = last + 1

    @property
    def fields(self) -> list[int]:
        """What a close notes of it."""
        return [self.begin, self.newest_ms, self.setback_ms]


class Dispatcher(DispatchState):
    """Writer of queue entries and keys. Not thread-safe: `Parts` calls it under the store's lock.

    Entries are written as they come, keys are collected and written together.
    """

    BATCH: Final = 256 if CORE.module else 1024
    """Number of records after which an append has them dispatched; more would make that append slow."""

    def __init__(self, index: KeyIndex, bitmap_of: BitmapOf | None = None) -> None:
        self._index = index
        self.bitmap_of = bitmap_of
        self.followed: int = 0
        """Physical offset up to which the log's records are dispatched, but for keys that are collected."""
        self.due: int = 0
        """Number of records whose entries or keys are not written."""
        self.records: list[Pending] = []
        """The last records whose keys are collected, with or without keys."""
        self._blocks: list[KeyBlock] = []  # those before
        self._in_blocks = 0
        self._indexing = False
        """Whether a call of the index has failed, so that it can have some of the keys."""
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

    @property
    def collected(self) -> int:
        """Number of records whose keys are collected; each counts, with or without keys."""
        return self._in_blocks + len(self.records)

    def add_record(self, lane: Lane, record: DerivedRecord) -> bool:
        """Write the entry of the next record, and collect its keys; after an error or a signal, do what is left of it.

        Return False, without effect, if the record is not the next one of its queue.
        """
        place, size, _, _, _, queue_offset, code, stored_ms, properties, unique, keys = record
        queue = lane.queue
        if code is not None:  # else it gets no entry
            is_next = queue_offset == queue.max_offset
            if not queue.max_offset and not lane.next_queue_offset:
                is_next = True  # the log of a copy can begin with a later message
            if is_next and queue.ext is not None:
                with critical:
                    code = self._add_unit(lane, code, stored_ms, properties)
            if is_next:
                self._put_entries(lane, queue_offset, _pack_entry(place, size, code))
            elif (entry := queue.entry(queue_offset)) is None or entry.physical_offset != place:
                return False
        if not self.records or self.records[-1][0] < place:
            self.records.append((place, stored_ms, lane.prefix_hash, unique, keys))
        self.followed = place + size
        return True

    def _add_unit(self, lane: Lane, tags_code: int, store_timestamp_ms: int, properties: bytes) -> int:
        """Add the extension unit of a record, and return the unit's address, which is its entry's tags code."""
        assert lane.queue.ext is not None
        bitmap = None
        if self.bitmap_of is not None:
            decoded = decode_properties(properties) if properties else None
            bitmap = self.bitmap_of(lane.topic, decoded, store_timestamp_ms)
        return lane.queue.ext.put(tags_code, store_timestamp_ms, bitmap)

    def _put_entries(self, lane: Lane, first: int, entries: bytes) -> None:
        queue, end = lane.queue, first + len(entries) // ENTRY_SIZE
        self.unflushed.add(queue)
        if queue.has_room(end - first):
            queue.append_many(first, entries)
        else:
            with critical:
                queue.append_many(first, entries)
        if end > lane.next_queue_offset:  # another process has appended
            lane.next_queue_offset = end

    def add_block(self, queued: Sequence[Queued], block: DerivedBlock) -> bool:
        """Write the entries of many records and collect their keys, in a critical block.

        Return False, without effect, if they do not continue their queues, or are to be added one by one.
        """
        for lane, first, _ in queued:
            if first != lane.queue.max_offset or lane.queue.ext is not None:
                return False
        if len(queued) >= _MANY_NEW:
            self._begin_queues(queued)
        for lane, first, entries in queued:
            if first == lane.queue.max_offset:  # or it was begun with them
                self._put_entries(lane, first, entries)
            lane.next_queue_offset = max(lane.next_queue_offset, lane.queue.max_offset)
        self.collect(block)
        self.followed = block.end
        return True

    def collect(self, block: DerivedBlock) -> None:
        """Collect the keys of the next records, whose entries are in their queues."""
        if block.records:
            self.records += block.pending()
        else:
            self._close_block()
            self._blocks.append(block.keys)
            self._in_blocks += len(block.keys.physical_offsets)

    def forget_first(self, count: int) -> None:
        """Forget the keys of the first records that are collected, but not of the last ``count``."""
        while self._blocks and self.collected - len(self._blocks[0].physical_offsets) >= count:
            self._in_blocks -= len(self._blocks.pop(0).physical_offsets)
        del self.records[:-count]

    def _close_block(self) -> None:
        if self.records:
            self._blocks.append(key_block(self.records))
            self._in_blocks += len(self.records)
            self.records = []

    def _begin_queues(self, queues: Sequence[Queued]) -> None:
        """Write the entries of new queues by topic, if they are many."""
        new: dict[str, list[tuple[ConsumeQueue, bytes]]] = {}
        for lane, first, entries in queues:
            if not first and not files_of(lane.queue).starts and len(entries) <= lane.queue.file_size:
                new.setdefault(lane.topic, []).append((lane.queue, entries))
        if sum(map(len, new.values())) >= _MANY_NEW:
            with suppress(StoreIOError):  # made one by one, the queue that has no room raises it
                for begun in new.values():
                    self.unflushed.update(queue for queue, _ in begun)
                    begin_together(begun)

    def drain(self) -> None:
        """Write the collected keys; after an error such as a full disk the next call continues from there."""
        if self.records or self._blocks:
            with critical:
                self._drain()

    def _drain(self) -> None:
        records = self.records
        if len(records) < _FEW and not self._blocks and not self._indexing:
            self._indexing = True
            self._index.append_many(
                [(place, stored, key_hashes(prefix, unique, keys)) for place, stored, prefix, unique, keys in records]
            )
            self.order.add_few([record[1] for record in records], records[-1][0])
            self.entries += len(records)
            self.dispatched_timestamp_ms, self._indexing, self.records = records[-1][1], False, []
        self._close_block()
        while self._blocks:
            keys = self._blocks[0]
            unindexed = keys.behind(*self._index.last_record()) if self._indexing else keys
            self._indexing = True  # before the call: if that fails, some of the keys may be in the index
            self._index.append_block(*unindexed)
            self.order.add(keys.timestamps, int(keys.physical_offsets[-1]))
            self.entries += len(keys.physical_offsets)
            self.dispatched_timestamp_ms, self._indexing = int(keys.timestamps[-1]), False
            self._in_blocks -= len(keys.physical_offsets)
            del self._blocks[0]

    def unindexed(self) -> list[KeyBlock]:
        """Return the collected keys; the index may have some of them."""
        return [*self._blocks, *([key_block(self.records)] if self.records else ())]
