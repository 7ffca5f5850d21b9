"""Parts of a store of RocketMQ 5 whose queues are not all in files: they are derived from the log, in memory.

5.x can keep queues in RocksDB, in ``consumequeue/`` or ``consumequeue_rocksdb/``, alone or beside files of queues, and
queues of batches in ``batchconsumequeue/``. The log has all that these queues say, so only the log is read:

- an ordinary record is the message at its queue offset;
- a batch (`librmq.message.batch.inner_messages`) is one message at each of its queue offsets;
- a record with ``INNER_MULTI_DISPATCH`` is also a message of the light queues that it names, at the queue offsets of
  ``INNER_MULTI_QUEUE_OFFSET``.

A queue whose messages are all deleted from the log is not there. Opening walks over the whole log; the keys are derived
at the first search. Mirrors ``RocksDBConsumeQueueStore``, ``BatchConsumeQueue`` and ``DispatchRequest.containsLMQ`` of
5.3.3.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final

from librmq.commitlog import LogEnd
from librmq.config import StoreConfig
from librmq.consumequeue_entries import ENTRY, ENTRY_SIZE, HOLE_SIZE, first_from
from librmq.errors import CorruptionError, MessageIllegalError, RecordError
from librmq.files import Files, MemoryFiles
from librmq.files.rolling import MappedFileQueue, MappingPool
from librmq.java.lang import java_decode, java_int
from librmq.message import StoredMessage
from librmq.message import record as record_format
from librmq.message.batch import inner_messages
from librmq.message.properties import PropertyName, find_keys_and_tags
from librmq.message.topics import validate_queue
from librmq.override import override
from librmq.store._live_tail import GLANCE, FollowedParts, QueueWithTail
from librmq.store.engine.derivation import MULTI_DISPATCH, DerivedBlock, DerivedRecord, Pending
from librmq.store.engine.store_parts import QueueTable
from librmq.store.format import directory
from librmq.store.format._keyindex import KeyIndex

_LARGEST_GAP: Final = 100_000  # of a queue with batches; the log's room bounds that of others
_LARGEST_OFFSET: Final = 1 << 58
_pack = ENTRY.pack


class DerivedQueue(QueueWithTail):
    """A queue of which all entries are in memory."""

    __slots__ = ("_has_batches", "_has_begun", "_outside")

    def __init__(self, files: MappedFileQueue) -> None:
        """Begin an empty queue; ``files`` has none, and names those that the entries could be in."""
        self._held = 0, bytearray()
        super().__init__(files, None)
        self._has_batches = False
        self._has_begun = False
        self._outside: tuple[int, bytes] | None = None  # a record outside of the count, which the next one places

    @property
    @override
    def stored_begin(self) -> int:
        """The first queue offset."""
        return self._held[0]

    def collect(self, queue_offset: int, entries: bytes) -> None:
        """Take adjacent entries of the queue's next records, packed.

        A single record outside of the count has a wrong address. Two in a row, or a first message, are a jump: records
        are missing, or the topic was deleted and made again.
        """
        while entries:
            self.place_outside(queue_offset)
            if not self._has_begun and 0 <= queue_offset < _LARGEST_OFFSET:
                self._start(queue_offset)
            if self._has_begun and queue_offset == self.max_offset:
                self.extend(entries)
                return
            self._outside = queue_offset, entries[:ENTRY_SIZE]
            queue_offset, entries = queue_offset + 1, entries[ENTRY_SIZE:]

    def collect_batch(self, queue_offset: int, physical_offset: int, size: int, codes: Iterable[int]) -> None:
        """Take an entry for each message of the queue's next record, with its tags code."""
        self._has_batches = True
        self.collect(queue_offset, b"".join(_pack(physical_offset, size, code) for code in codes))

    def _start(self, queue_offset: int) -> None:
        """Begin at a queue offset, without the entries so far."""
        self.max_offset = self.min_offset = 0  # before readers see entries of other offsets
        self._held = queue_offset, bytearray()
        self.min_offset = self.max_offset = queue_offset
        self._has_begun = True
        self.max_physic_offset = -1

    def place_outside(self, following: int | None = None) -> None:
        """Place a record outside of the count, if there is one, by the queue offset of the next one."""
        if self._outside is None:
            return
        (claimed, entry), self._outside = self._outside, None
        jumps = claimed == 0 if following is None else following == claimed + 1
        gap = claimed - self.max_offset
        if self._has_begun and following == self.max_offset:  # one of two records at this place belongs elsewhere
            return
        if jumps and 0 <= claimed < _LARGEST_OFFSET and self._has_room(gap, entry):
            if gap > 0 and (gap <= _LARGEST_GAP or not self._has_batches):
                self.extend(_pack(ENTRY.unpack(entry)[0], HOLE_SIZE, 0) * gap)
            else:
                self._start(claimed)
        self._has_begun = True
        self.extend(entry)

    def _has_room(self, gap: int, entry: bytes) -> bool:
        """Return whether that many records can have been between the last one in the log and this one."""
        if self._has_batches:  # a record is then many messages
            return True
        place: int = ENTRY.unpack(entry)[0]
        return gap * (record_format.FIXED_SIZE + 1) <= place - max(self.max_physic_offset, 0)

    @override
    def advance(self, min_physical_offset: int) -> None:
        """Move `min_offset` to the first message at or after the beginning of the log."""
        served = first_from(self._chunks(self.min_offset, self.max_offset), min_physical_offset)
        self.min_offset = self.max_offset if served is None else served

    @override
    def _last_place(self) -> int:
        raw = self._raw((self.max_offset - 1) * ENTRY_SIZE, self.max_offset * ENTRY_SIZE)
        return sum(ENTRY.unpack(raw)[:2]) if raw else -1


class DerivedQueues(QueueTable):
    """The queues of a store, all in memory."""

    has_files = False

    def __init__(self, path: str, config: StoreConfig) -> None:
        """Begin without queues; ``path`` and ``config`` say in which files they could be."""
        super().__init__(self.queue, {})
        self._path = path
        self._file_size = config.consumequeue_file_size
        self._no_files = MemoryFiles()
        self._pool = MappingPool(1)

    def queue(self, topic: str, queue_id: int) -> DerivedQueue:
        """Return a queue, made if there is none.

        Raises:
            MessageIllegalError: No queue can have this name.
        """
        queue = self._open.get((topic, queue_id))
        if queue is None:
            validate_queue(topic, queue_id)
            folder = directory.queue_folder(self._path, topic, queue_id)
            files = MappedFileQueue(folder, self._file_size, self._no_files, self._pool, writable=False)
            queue = self._open[topic, queue_id] = DerivedQueue(files)
        assert isinstance(queue, DerivedQueue)
        return queue


class DerivedParts(FollowedParts):
    """The parts of a store, derived from its log."""

    def __init__(self, path: str, config: StoreConfig, files: Files, *, is_written: bool) -> None:
        """Derive the queues; ``is_written`` says that another process writes to the store."""
        super().__init__(path, config, files, is_written=is_written)
        self._queues = DerivedQueues(path, config)
        self._index = KeyIndex.open(
            os.path.join(path, directory.INDEX),
            slots=config.max_hash_slot_num,
            entries=config.max_index_num,
            files=MemoryFiles(),
            now_ms=lambda: 0,
        )
        self._batches: dict[int, StoredMessage] = {}
        self._touched: set[DerivedQueue] = set()
        self._has_keys = False
        self._make_parts(self._queues, self._index, self._queues.queue)
        log = self._log  # which ends at the first record that can't be read
        walk = log.walk(self._walk_begin)
        damage, end, log.end = walk.damage, walk.physical_offset, log.begin
        if is_written:  # the last record can be incomplete
            damage, end = None, log.begin if walk.last_record is None else walk.last_record
        try:
            for block in self._derivation.blocks(log, log.begin, end, self._is_whole):
                self._take(block)
                log.last_write = block.last
        except CorruptionError as error:
            damage, end = error, error.offset
        self._place_outside()
        log.end = end
        if log.last_write is not None:
            self._last = log.last_write, log.data_at(log.last_write, min(GLANCE, end - log.last_write))
        if is_written and damage is None:
            self.follow_log()
        log.last_write = None if self._last is None else self._last[0]
        log.found_end = LogEnd(log.end, damage, log.last_write)

    @override
    def complete(self) -> None:
        if not self._has_keys:
            self._has_keys = True
            for block in self._derivation.blocks(self._log, self._log.begin, self._log.end, self._is_whole):
                self._add_keys(block)
                self._batches.clear()

    @override
    def _walk_on(self, until: int | None = None) -> bool:
        is_changed = super()._walk_on(until)
        self._place_outside()
        return is_changed

    def _place_outside(self) -> None:
        for queue in self._touched:
            queue.place_outside()
        self._touched.clear()

    @override
    def _is_whole(self, begin: int, end: int) -> bool:
        at, file = begin % self._log.file_size, self._log.sequence.file_at(begin)
        return file is not None and file.buffer.find(MULTI_DISPATCH, at, at + end - begin) < 0

    @override
    def _on_batch(self, place: int, batch: StoredMessage) -> None:
        self._batches[place] = batch

    @override
    def _take(self, block: DerivedBlock) -> None:
        self._log.end = block.end
        for (topic, queue_id, first, entries), record in itertools.zip_longest(block.queues, block.records):
            if not entries:
                continue
            with suppress(MessageIllegalError):  # damage: it fits into no queue
                queue = self._queues.queue(java_decode(topic), queue_id)
                self._touched.add(queue)
                if record is None or (batch := self._batches.get(record.physical_offset)) is None:
                    queue.collect(first, entries)
                else:
                    queue.collect_batch(first, record.physical_offset, record.size, _batch_codes(batch))
            for name, light_id, queue_offset in record.light_queues() if record is not None else ():
                queue = self._queues.queue(name, light_id)
                queue.collect(queue_offset, entries)
                self._touched.add(queue)
        if self._has_keys:
            self._add_keys(block)
        self._batches.clear()

    def _add_keys(self, block: DerivedBlock) -> None:
        """Index the keys of the next records, and of the messages in those that are batches."""
        dispatcher = self.parts.dispatcher
        if self._batches:
            dispatcher.records += itertools.chain.from_iterable(map(self._keys_of, block.records))
        else:
            dispatcher.collect(block)
        dispatcher.drain()

    def _keys_of(self, record: DerivedRecord) -> Iterator[Pending]:
        place, stored_ms, prefix, _, _ = pending = record.pending()
        yield pending
        with suppress(KeyError, RecordError):
            for message in inner_messages(self._batches[place]):
                unique, keys, _ = find_keys_and_tags(message.properties_raw)
                yield place, stored_ms, prefix, unique, keys


def _batch_codes(record: StoredMessage) -> list[int]:
    """Return the tags code of each message of a batch; one that can't be read counts as its property says."""
    try:
        return [message.tags_code for message in inner_messages(record)]
    except RecordError:
        return [record.tags_code] * min(
            max(java_int(record.properties.get(PropertyName.INNER_NUM, "1")) or 1, 1), 1 << 15
        )
