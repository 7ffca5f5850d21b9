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

import os
from collections.abc import Iterable
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
from librmq.store._live_tail import FLAG_AT, GLANCE, FollowedParts, QueueWithTail
from librmq.store.engine.derivation import (
    MULTI_DISPATCH,
    Derivation,
    DerivedRecord,
    Pending,
    key_block,
)
from librmq.store.engine.store_parts import QueueTable
from librmq.store.format import directory
from librmq.store.format._keyindex import KeyIndex

_TOGETHER: Final = 4096
"""Most entries of a queue, and most records with keys, to add together."""
_LARGEST_GAP: Final = 100_000  # of a queue with batches; the log's room bounds that of others
_LARGEST_OFFSET: Final = 1 << 58
_pack = ENTRY.pack


class DerivedQueue(QueueWithTail):
    """A queue of which all entries are in memory."""

    __slots__ = ("_has_batches", "_outside", "collected", "expected")

    expected: int
    """Queue offset of the next record, -1 before the first; it is ahead of `max_offset` until `publish`."""

    def __init__(self, files: MappedFileQueue) -> None:
        """Begin an empty queue; ``files`` has none, and names those that the entries could be in."""
        self._held = 0, bytearray()
        super().__init__(files, None)
        self._has_batches = False
        self.expected = -1
        self.collected: list[bytes] = []
        """Entries that readers do not see yet."""
        self._outside: tuple[int, bytes] | None = None  # a record outside of the count, which the next one places

    @property
    @override
    def stored_begin(self) -> int:
        """The first queue offset."""
        return self._held[0]

    def collect(self, queue_offset: int, entry: bytes) -> None:
        """Take the entry of the queue's next record.

        A single record outside of the count has a wrong address. Two in a row, or a first message, are a jump: records
        are missing, or the topic was deleted and made again.
        """
        if self._outside is not None:
            self._place_outside(queue_offset)
        if self.expected < 0 and 0 <= queue_offset < _LARGEST_OFFSET:
            self._start(queue_offset)
        if queue_offset == self.expected:
            self.add_next(entry)
        else:
            self.publish_collected()
            self._outside = queue_offset, entry

    def collect_batch(self, queue_offset: int, physical_offset: int, size: int, codes: Iterable[int]) -> None:
        """Take an entry for each message of the queue's next record, with its tags code."""
        self._has_batches = True
        for number, code in enumerate(codes):
            self.collect(queue_offset + number, _pack(physical_offset, size, code))

    def add_next(self, entry: bytes) -> None:
        """Take the entry at `expected`, behind at least one of `collected`; `collect` takes any."""
        self.collected.append(entry)
        self.expected += 1
        if len(self.collected) >= _TOGETHER:
            self.publish_collected()

    def _start(self, queue_offset: int) -> None:
        """Begin at a queue offset, without the entries so far."""
        self.collected = []
        self.max_offset = self.min_offset = 0  # before readers see entries of other offsets
        self._held = queue_offset, bytearray()
        self.min_offset = self.max_offset = self.expected = queue_offset
        self.max_physic_offset = -1

    def _place_outside(self, following: int | None) -> None:
        """Place a record outside of the count, by the queue offset of the next one."""
        assert self._outside is not None
        (claimed, entry), self._outside = self._outside, None
        jumps = claimed == 0 if following is None else following == claimed + 1
        gap = claimed - self.expected
        if following == self.expected:  # one of two records at this place belongs elsewhere
            return
        if jumps and 0 <= claimed < _LARGEST_OFFSET and self._has_room(gap, entry):
            if gap > 0 and (gap <= _LARGEST_GAP or not self._has_batches):
                hole = _pack(ENTRY.unpack(entry)[0], HOLE_SIZE, 0)
                for _ in range(gap):
                    self.add_next(hole)
            else:
                self._start(claimed)
        self.expected = max(self.expected, 0)
        self.add_next(entry)

    def _has_room(self, gap: int, entry: bytes) -> bool:
        """Return whether that many records can have been between the last one in the log and this one."""
        if self._has_batches:  # a record is then many messages
            return True
        end = sum(ENTRY.unpack(self.collected[-1])[:2]) if self.collected else self.max_physic_offset
        place: int = ENTRY.unpack(entry)[0]
        return gap * (record_format.FIXED_SIZE + 1) <= place - max(end, 0)

    def publish(self) -> None:
        """Show readers all entries so far."""
        if self._outside is not None:
            self._place_outside(None)
        self.publish_collected()

    def publish_collected(self) -> None:
        """Show readers the collected entries."""
        collected, self.collected = self.collected, []
        self.extend(collected)

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
        self._derivation = Derivation(self._levels)
        self._by_raw_name: dict[tuple[bytes, int], DerivedQueue | None] = {}
        self._changed: set[DerivedQueue] = set()
        self._has_keys = False
        self._keys: list[Pending] = []
        self._make_parts(self._queues, self._index, self._queues.queue)
        self._derive_all(is_written)

    def _derive_all(self, is_written: bool) -> None:
        """Derive the queues from the whole log, which ends at the first record that can't be read."""
        log = self._log
        walk = log.walk(self._walk_begin)
        damage, log.end = walk.damage, walk.physical_offset
        if is_written:  # the last record can be incomplete
            damage, log.end = None, log.begin if walk.last_record is None else walk.last_record
        try:
            self._derive(log.scan(check_body=False))
        except CorruptionError as error:
            damage, log.end = error, error.offset
        self._publish(log.end)
        if is_written and damage is None:
            self.follow_log()
        log.last_write = None if self._last is None else self._last[0]
        log.found_end = LogEnd(log.end, damage, log.last_write)

    @override
    def follow_log(self) -> bool:
        log, end = self._log, self._log.end
        following = self._derive(log.follow())
        if following > end:
            self._publish(following)
        if log.begin == self._begin:
            return following > end
        self._begin = log.begin
        for queue in self._queues.opened():
            queue.advance(log.begin)
        return True

    @override
    def complete(self) -> None:
        if not self._has_keys:
            self._has_keys = True
            for place, size, raw in self._log.scan(check_body=False):
                if raw is not None:
                    self._collect_keys(self._derivation.derive(place, size, raw), raw)
            self._write_keys()

    def _derive(self, items: Iterable[tuple[int, int, bytes | None]]) -> int:
        """Collect the entries of records, and return the end of the last one, 0 without any."""
        derive, by_raw_name, changed = self._derivation.derive, self._by_raw_name, self._changed
        last = None
        try:
            for place, size, raw in items:
                if raw is None:
                    continue
                last = place, raw
                record = derive(place, size, raw)
                _, _, _, topic, queue_id, queue_offset, code, _, properties, _, _ = record
                if code is not None:
                    queue = by_raw_name.get((topic, queue_id)) or self._queue(topic, queue_id)
                    if queue is None:
                        pass
                    elif raw[FLAG_AT] & record_format.INNER_BATCH:
                        queue.collect_batch(queue_offset, place, size, _batch_codes(raw))
                        changed.add(queue)
                    elif queue.collected and queue_offset == queue.expected:  # as nearly always
                        queue.add_next(_pack(place, size, code))
                    else:
                        queue.collect(queue_offset, _pack(place, size, code))
                        changed.add(queue)
                    if MULTI_DISPATCH in properties:
                        self._derive_light(record)
                if self._has_keys:
                    self._collect_keys(record, raw)
        finally:
            if last is not None:
                self._last = last[0], last[1][:GLANCE]
        return 0 if last is None else last[0] + len(last[1])

    def _queue(self, topic: bytes, queue_id: int) -> DerivedQueue | None:
        """Return the queue of a record, None for damage: it fits into no queue."""
        queue = None
        with suppress(MessageIllegalError):
            queue = self._by_raw_name[topic, queue_id] = self._queues.queue(java_decode(topic), queue_id)
        return queue

    def _derive_light(self, record: DerivedRecord) -> None:
        entry = _pack(record.physical_offset, record.size, record.tags_code)
        for name, light_id, queue_offset in record.light_queues():
            queue = self._queues.queue(name, light_id)
            queue.collect(queue_offset, entry)
            self._changed.add(queue)

    def _publish(self, log_end: int) -> None:
        self._log.end = log_end
        for queue in self._changed:
            queue.publish()
        self._changed.clear()
        self._write_keys()

    # ---- keys

    def _collect_keys(self, record: DerivedRecord, raw: bytes) -> None:
        pending = place, stored, prefix, _, _ = record.pending()
        self._keys.append(pending)
        if raw[FLAG_AT] & record_format.INNER_BATCH:
            with suppress(RecordError):
                for message in inner_messages(StoredMessage(raw)):
                    unique, keys, _ = find_keys_and_tags(message.properties_raw)
                    self._keys.append((place, stored, prefix, unique, keys))
        if len(self._keys) >= _TOGETHER:
            self._write_keys()

    def _write_keys(self) -> None:
        if self._keys:
            self._index.append_block(*key_block(self._keys))
            self._keys = []


def _batch_codes(raw: bytes) -> list[int]:
    """Return the tags code of each message of a batch; one that can't be read counts as its property says."""
    record = StoredMessage(raw)
    try:
        return [message.tags_code for message in inner_messages(record)]
    except RecordError:
        return [record.tags_code] * min(
            max(java_int(record.properties.get(PropertyName.INNER_NUM, "1")) or 1, 1), 1 << 15
        )
