"""Dispatch from the log to queues and index: entries and keys, in the order of the log.

Records are collected and written in batches, first one slice of entries for each queue, then one run of keys. A reader
of a queue or of the index has them written first. A crash loses nothing, because both are derived from the log. Mirrors
4.9.4's ``ReputMessageService``, ``CommitLogDispatcherBuildConsumeQueue`` and ``…BuildIndex``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from librmq.commitlog import CommitLog
from librmq.consumequeue import ENTRY, ConsumeQueue
from librmq.errors import MessageIllegalError
from librmq.java.lang import hash_append, index_key_hashes, java_decode, java_int, java_long, string_hash
from librmq.message import record as record_format
from librmq.message.batch import is_batch
from librmq.message.delay_levels import SCHEDULE_TOPIC, DelayLevels
from librmq.message.message import StoredMessage
from librmq.message.properties import PROPERTY_INNER_MULTI_DISPATCH, PROPERTY_INNER_MULTI_QUEUE_OFFSET
from librmq.message.topics import LIGHT_PREFIX, RETRY_PREFIX, SYSTEM_PREFIX, validate_queue
from librmq.runtime import lazy_numpy as np
from librmq.runtime.compiled_core import CORE, DispatchState, LaneState
from librmq.runtime.locks import critical
from librmq.store.format.keyindex import KeyIndex

if TYPE_CHECKING:
    from numpy.typing import NDArray


_FEW: Final = 16
"""Number of records below which a loop is faster than arrays."""

BitmapOf = Callable[[str, Mapping[str, str] | None], bytes | None]
"""Function of a topic and a message's properties to the bitmap of matching filters, None if none is registered."""


def has_queue_entry(sys_flag: int) -> bool:
    """Return whether a record with ``sys_flag`` gets a queue entry; raw prepared and rollback records get none."""
    return (sys_flag & record_format.TRANSACTION_MASK) in (0, record_format.TRANSACTION_COMMIT)


def derived_tags_code(message: StoredMessage, levels: DelayLevels) -> int:
    """Return the tags code of a record's queue entry; for a delayed record it is the delivery time (ms)."""
    properties = message.properties
    if message.topic == SCHEDULE_TOPIC:
        level = parse_level(properties.get(record_format.PROPERTY_DELAY))
        if level > 0:
            return levels.deliver_timestamp_ms(levels.cap(level), message.store_timestamp_ms)
    return record_format.tags_code(properties.get(record_format.PROPERTY_TAGS))


def parse_level(text: str | None) -> int:
    """Parse the delay level of a record; 0, no delay, for a text that is not a number of 32 bits."""
    return 0 if text is None else java_int(text) or 0


@lru_cache(maxsize=1 << 16)
def topic_hash(topic: str | bytes) -> int:
    """Return the hash of ``topic#``, with which the hash of each of its keys begins; bytes are a topic in a record."""
    return string_hash(f"{topic if isinstance(topic, str) else java_decode(topic)}#")


def key_hashes(prefix_hash: int, unique_key: str | None, keys: str | None) -> Sequence[int]:
    """Return the index hashes of a record, its unique id first; ``prefix_hash`` is its `topic_hash`."""
    hashes = [_index_hash(hash_append(prefix_hash, unique_key))] if unique_key else []
    if keys:
        hashes += [_index_hash(hash_append(prefix_hash, key)) for key in record_format.split_keys(keys)]
    return hashes


def is_indexed(sys_flag: int) -> bool:
    """Return whether the keys of a record with ``sys_flag`` are indexed; those of a rollback are not."""
    return (sys_flag & record_format.TRANSACTION_MASK) != record_format.TRANSACTION_ROLLBACK


def _index_hash(value: int) -> int:
    return abs(value) if value != -(1 << 31) else 0


class Lane(LaneState):
    """State of appending to one queue."""

    __slots__: tuple[str, ...] = (
        "next_queue_offset", "pending", "pending_from", "prefix_hash", "queue", "queue_id", "topic", "topic_field"
    ) if CORE.module is None else ()  # fmt: skip  # with the core its base has them

    def __init__(self, topic: str, queue_id: int, queue: ConsumeQueue) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.queue = queue
        encoded = topic.encode()
        self.topic_field = bytes((len(encoded),)) + encoded
        """The topic in a record's form, with its length before it."""
        self.prefix_hash = topic_hash(topic)
        """Hash of ``topic#``, the start of the index hashes of the topic's keys."""
        self.next_queue_offset = queue.max_offset
        """Queue offset of the next record."""
        self.pending: list[bytes] = []
        """Packed entries that are not in the queue yet; the last is that of ``next_queue_offset - 1``."""
        self.pending_from = self.next_queue_offset
        """Queue offset of the first of them, if there are any."""


Pending = tuple[int, int, int, str | None, str | None]
"""The keys of a record that are not in the index yet: physical offset, store time, prefix hash, unique id, keys."""

RawPending = tuple[int, int, int, bytes | None, bytes | None]
"""The same, with texts in a record's form."""


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
        self._entered = 0  # the number of them whose entries `advance` has written
        self._block: KeyBlock | None = None  # of these
        self._indexing = False  # true outside of a call if the last one failed
        self.unflushed: set[ConsumeQueue] = set()
        """Queues written since a flush last took this set."""
        self.entries = 0
        """Number of records dispatched since `unflushed` was last taken."""
        self.dispatched_timestamp_ms = 0
        """Store time of the last record whose entry and keys are written."""
        self.writing_at = -1
        """Physical offset of the running append, -1 for none. If the next append finds one, a signal interrupted it."""

    def entries_a_queue(self) -> int:
        """Return the number of entries that no flush has covered, on average for a queue that has some, rounded up."""
        return -(-(self.entries + len(self.records)) // (len(self.unflushed) or 1))

    def add_unit(self, lane: Lane, tags_code: int, store_timestamp_ms: int, properties: bytes) -> int:
        """Add the extension unit of a record, and return the unit's address, which is its entry's tags code."""
        assert lane.queue.ext is not None
        bitmap = None
        if self.bitmap_of is not None:
            bitmap = self.bitmap_of(lane.topic, record_format.decode_properties(properties) if properties else None)
        return lane.queue.ext.put(tags_code, store_timestamp_ms, bitmap)

    def add_entry(self, lane: Lane, entry: bytes) -> None:
        """Collect the packed queue entry of the next record of a queue. `Appender.append` does this inline."""
        if not lane.pending:
            lane.pending_from = lane.next_queue_offset
            self.lanes.append(lane)
        lane.pending.append(entry)
        lane.next_queue_offset += 1

    def write_entries(self) -> None:
        """Write the collected queue entries.

        After an error such as a full disk, or a signal that raised, the next call continues there: a queue counts its
        entries.
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
            else:
                lane.next_queue_offset = lane.queue.max_offset

    def advance(self) -> None:
        """Do one of the three parts of `drain`, so that no append waits for all of it. Raises the same errors."""
        if self._indexing:  # the last call failed; this one raises if that is still so
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

    def _resume(self) -> None:
        """Continue after a failed index call, without indexed records and without the indexed keys of a record."""
        last, count = self._index.last_record()
        self.records = records = [record for record in self.records if record[0] >= last]
        if not records:
            return
        remaining = records
        if records[0][0] == last and count:  # it stays complete in `records`, in case this call fails too
            _, stored, prefix, unique, keys = records[0]
            texts = [*([unique] if unique else []), *record_format.split_keys(keys)]
            remaining = [(last, stored, prefix, None, " ".join(texts[count:])), *records[1:]]
        self._put_block(key_block(remaining))

    def _put_block(self, block: KeyBlock) -> None:
        self._indexing = True
        self._index.append_block(*block)
        self._drop_indexed(len(block.physical_offsets))

    def _drop_indexed(self, count: int) -> None:
        """Note that the keys of the first ``count`` records are in the index."""
        records = self.records
        self.entries += count
        self.dispatched_timestamp_ms = records[count - 1][1]
        self.records = records[count:]
        self._entered, self._block = 0, None
        self._indexing = False


class KeyBlock(NamedTuple):
    """The keys of many records, as arguments of `KeyIndex.append_block`."""

    physical_offsets: NDArray[np.int64]
    timestamps: NDArray[np.int64]
    record_of_key: NDArray[np.int64]
    key_hashes: NDArray[np.int64]


def key_block(records: Sequence[Pending | RawPending]) -> KeyBlock:
    """Return the keys of many records (`Pending`); texts can be in stored form, in all or in none."""
    columns = None if CORE.key_hashes is None or type(records) is not list else CORE.key_hashes(records)
    if columns is not None:
        return KeyBlock(*(np.frombuffer(column, np.int64) for column in columns))
    uniques: Sequence[Any]
    keys: Sequence[Any]
    places, stored, prefixes, uniques, keys = zip(*records, strict=True)
    prefix_hashes, with_keys = np.array(prefixes, np.int64), np.arange(len(records))
    if not all(uniques):  # as of ops beside halves
        indexed = [number for number, (unique, key) in enumerate(zip(uniques, keys, strict=True)) if unique or key]
        uniques, keys = [uniques[number] for number in indexed], [keys[number] for number in indexed]
        with_keys = np.array(indexed, np.int64)
        prefix_hashes = prefix_hashes[with_keys]
    if uniques and all(uniques) and all(keys) and not _has_blank(keys):
        # Fast path for records with a unique id and one key each.
        record_of_key = np.repeat(with_keys, 2)
        hashes = np.empty(len(record_of_key), np.int64)
        hashes[::2] = index_key_hashes(prefix_hashes, uniques)
        hashes[1::2] = index_key_hashes(prefix_hashes, keys)
    elif all(uniques) and not any(keys):
        record_of_key = with_keys
        hashes = index_key_hashes(prefix_hashes, uniques)
    else:
        texts: list[str] = []
        owners: list[int] = []
        for number, (unique, key) in enumerate(zip(uniques, keys, strict=True)):
            key_texts = record_format.split_keys(key if key is None or isinstance(key, str) else java_decode(key))
            if unique:
                key_texts = [unique if isinstance(unique, str) else java_decode(unique), *key_texts]
            texts += key_texts
            owners += [number] * len(key_texts)
        record_of_key = np.array(owners, np.int64)
        hashes = index_key_hashes(prefix_hashes[record_of_key], texts)
        record_of_key = with_keys[record_of_key]
    return KeyBlock(np.array(places, np.int64), np.array(stored, np.int64), record_of_key, hashes)


def _has_blank(keys: Sequence[str] | Sequence[bytes]) -> bool:
    if isinstance(keys[0], bytes):
        return b" " in b"".join(keys)  # type: ignore[arg-type]
    return " " in "".join(keys)  # type: ignore[arg-type]


# ---- derivation of entries and keys

Derived = tuple[int, int, int, bytes, int, int, int | None, int, bytes, bytes | None, bytes | None]
"""Physical offset and size of a record, the physical offset that it names, its topic, queue id and queue offset, the
tags code of its queue entry (None if it gets none), its store time in ms, its properties, and its unique id and keys
(None if they are not indexed)."""

_unpack_fields = record_format.header_struct(
    "magic", "queue_id", "queue_offset", "physical_offset", "sys_flag", "store_timestamp", "body_length"
).unpack_from
_find_keys_and_tags = record_format.find_keys_and_tags
_MAGIC: Final = record_format.MESSAGE_MAGIC
_UNUSUAL: Final = record_format.HOSTS_V6 | record_format.INNER_BATCH
_IN_TRANSACTION: Final = record_format.TRANSACTION_MASK
_SCHEDULE_TOPIC: Final = SCHEDULE_TOPIC.encode()
_TAGS_KEPT: Final = 10_000


MULTI_DISPATCH: Final = PROPERTY_INNER_MULTI_DISPATCH.encode()
"""The property that names light queues; few records have it."""
_MULTI_OFFSETS: Final = PROPERTY_INNER_MULTI_QUEUE_OFFSET.encode()
_WITHOUT_LIGHT: Final = (RETRY_PREFIX.encode(), SYSTEM_PREFIX.encode())


def light_queues(topic: bytes, queue_id: int, properties: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield the light queues to which 5.x dispatched a record too, as topic, queue id and queue offset."""
    if topic.startswith(_WITHOUT_LIGHT) or topic == _SCHEDULE_TOPIC:
        return
    names, offsets = (record_format.find_property(properties, name) for name in (MULTI_DISPATCH, _MULTI_OFFSETS))
    if not names or not offsets:
        return
    queue_names, queue_offsets = java_decode(names).split(","), java_decode(offsets).split(",")
    if len(queue_names) != len(queue_offsets):  # RocketMQ logs that, and dispatches to none
        return
    for name, text in zip(queue_names, queue_offsets, strict=True):
        queue_offset = java_long(text)
        light_id = 0 if name.startswith(LIGHT_PREFIX) else queue_id
        with suppress(MessageIllegalError):  # a broker dispatches to no such queue either
            validate_queue(name, light_id)
            if queue_offset is not None:
                yield name, light_id, queue_offset


class DerivedBlock(NamedTuple):
    """What many adjacent records of one file define."""

    end: int
    """Physical offset behind the last one."""
    queues: list[tuple[bytes, int, int, bytes]]
    """Topic, queue id, first queue offset and adjacent packed entries of each queue."""
    keys: KeyBlock


def derived_block(log: CommitLog, begin: int, end: int, most: int, *, check_body: bool = False) -> DerivedBlock | None:
    """Return what usual records define, at most ``most``, from ``begin`` on; None without one, or without the core.

    With ``check_body`` they are compared with the checksums of their bodies.
    """
    file = None if CORE.derive is None else log.sequence.file_at(begin)
    if CORE.derive is None or file is None:
        return None
    start = begin - begin % log.file_size
    place, queues, *columns = CORE.derive(
        file.buffer, start, begin - start, min(end - start, log.file_size), most, _UNUSUAL | _IN_TRANSACTION, check_body
    )
    if not queues:
        return None
    return DerivedBlock(start + place, queues, KeyBlock(*(np.frombuffer(column, np.int64) for column in columns)))


class Derivation:
    """Reads records of one store and caches the codes of their tags. Not thread-safe.

    Recovery compares queues and index with the result, and a replica writes them from it.
    """

    def __init__(self, levels: DelayLevels, on_batch: Callable[[int, StoredMessage], object] | None = None) -> None:
        """``on_batch`` is called with the place of each record that is a batch of messages, and the record."""
        self._levels = levels
        self._on_batch = on_batch
        self._tags_codes: dict[bytes | None, int] = {None: 0}

    def derive(self, physical_offset: int, size: int, raw: bytes) -> Derived:
        """Return what a record defines."""
        magic, queue_id, queue_offset, address, sys_flag, stored, body_size = _unpack_fields(raw)
        if magic != _MAGIC or sys_flag & _UNUSUAL:
            if self._on_batch is not None and sys_flag & record_format.INNER_BATCH and is_batch(StoredMessage(raw)):
                self._on_batch(physical_offset, StoredMessage(raw))
            stored = record_format.store_timestamp_ms(raw)
            _, _, topic_at, topic_end, properties_at, _ = record_format.frame(raw, 0, size)
        else:
            topic_at = 89 + body_size if body_size > 0 else 89
            topic_end = topic_at + raw[topic_at - 1]
            properties_at = topic_end + 2
        topic, properties = raw[topic_at:topic_end], raw[properties_at:]
        unique, key, tags = _find_keys_and_tags(properties)
        code: int | None = None
        if not sys_flag & _IN_TRANSACTION or has_queue_entry(sys_flag):
            if topic == _SCHEDULE_TOPIC:
                code = derived_tags_code(StoredMessage(raw), self._levels)
            else:
                code = self._tags_codes.get(tags)
                if code is None:
                    if len(self._tags_codes) > _TAGS_KEPT:
                        self._tags_codes = {None: 0}
                    code = self._tags_codes[tags] = record_format.tags_code(java_decode(tags or b""))
        if sys_flag & _IN_TRANSACTION and not is_indexed(sys_flag):
            unique = key = None
        return physical_offset, size, address, topic, queue_id, queue_offset, code, stored, properties, unique, key
