"""What a record defines: the entry of its queue, and its keys in the index.

`Derivation` reads one record after the other. `derived_block` reads many adjacent ones together if they are usual, by
the compiled core or by arrays. Mirrors 4.9.4's ``CommitLogDispatcherBuildConsumeQueue`` and ``…BuildIndex``.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from librmq.commitlog import CommitLog
from librmq.consumequeue_entries import ENTRY
from librmq.errors import CorruptionError, MessageIllegalError
from librmq.files import Buffer
from librmq.java.lang import (
    hash_append,
    index_key_hashes,
    java_decode,
    java_int,
    java_long,
    string_hash,
)
from librmq.message import DelayLevels, StoredMessage
from librmq.message import record as record_format
from librmq.message.delays import parse_level
from librmq.message.message import is_batch
from librmq.message.properties import (
    PropertyName,
    decode_properties,
    find_keys_and_tags,
    split_keys,
    tags_code,
)
from librmq.message.topics import SystemTopic, TopicPrefix, validate_queue
from librmq.runtime import lazy_numpy as np
from librmq.runtime.compiled_core import CORE

if TYPE_CHECKING:
    from numpy.typing import NDArray

BitmapOf = Callable[[str, Mapping[str, str] | None, int], bytes | None]
"""Function of a topic, a message's properties and its store time (ms) to the bitmap of matching filters, None if none
is registered."""


def has_queue_entry(sys_flag: int) -> bool:
    """Return whether a record with ``sys_flag`` gets a queue entry; raw prepared and rollback records get none."""
    return not sys_flag & record_format.UNQUEUED


def derived_tags_code(message: StoredMessage, levels: DelayLevels) -> int:
    """Return the tags code of a record's queue entry; for a delayed record it is the delivery time (ms)."""
    properties = message.properties
    wait_ms = _wait_ms(properties, levels) if message.topic == SystemTopic.SCHEDULE else None
    return tags_code(properties.get(PropertyName.TAGS)) if wait_ms is None else message.store_timestamp_ms + wait_ms


def _wait_ms(properties: Mapping[str, str], levels: DelayLevels) -> int | None:
    """Return how long a record of the schedule topic waits, None if it names no level."""
    level = levels.cap(parse_level(properties.get(PropertyName.DELAY)))
    return levels.delay_ms(level) if level > 0 else None


@lru_cache(maxsize=1 << 16)
def topic_hash(topic: str | bytes) -> int:
    """Return the hash of ``topic#``, with which the hash of each of its keys begins; bytes are a topic in a record."""
    return string_hash(f"{topic if isinstance(topic, str) else java_decode(topic)}#")


def key_hashes(prefix_hash: int, unique_key: bytes | None, keys: bytes | None) -> Sequence[int]:
    """Return the index hashes of a record, its unique id first; ``prefix_hash`` is its `topic_hash`."""
    hashes = [_index_hash(hash_append(prefix_hash, java_decode(unique_key)))] if unique_key else []
    if keys:
        hashes += [_index_hash(hash_append(prefix_hash, key)) for key in split_keys(java_decode(keys))]
    return hashes


def is_indexed(sys_flag: int) -> bool:
    """Return whether the keys of a record with ``sys_flag`` are indexed; those of a rollback are not."""
    return (sys_flag & record_format.TRANSACTION_MASK) != record_format.TRANSACTION_ROLLBACK


def _index_hash(value: int) -> int:
    return abs(value) if value != -(1 << 31) else 0


Pending = tuple[int, int, int, bytes | None, bytes | None]
"""The keys of a record that are not in the index yet: physical offset, store time, prefix hash, unique id, keys."""


def without_first_keys(record: Pending, count: int) -> Pending:
    """Return a record without those of its keys that the index has."""
    place, stored_ms, prefix_hash, unique, keys = record
    texts = [*([unique] if unique else []), *(key for key in (keys or b"").split(b" ") if key)]
    return place, stored_ms, prefix_hash, None, b" ".join(texts[count:])


class KeyBlock(NamedTuple):
    """The keys of many records, as arguments of `KeyIndex.append_block`."""

    physical_offsets: NDArray[np.int64]
    timestamps: NDArray[np.int64]
    record_of_key: NDArray[np.int64]
    key_hashes: NDArray[np.int64]

    def behind(self, last: int, count: int) -> KeyBlock:
        """Return what is behind the first ``count`` keys of the record at ``last``."""
        record = int(np.searchsorted(self.physical_offsets, last))
        is_there = record < len(self.physical_offsets) and self.physical_offsets[record] == last
        key = int(np.searchsorted(self.record_of_key, record)) + (count if is_there else 0)
        places, times, owners, hashes = self
        return KeyBlock(places[record:], times[record:], owners[key:] - record, hashes[key:])

    def places_of(self, key_hash: int, begin_ms: int, end_ms: int) -> list[int]:
        """Return the places of records with a key of this hash, stored from ``begin_ms`` to ``end_ms``."""
        rows = np.unique(self.record_of_key[self.key_hashes == key_hash])
        times = self.timestamps[rows]
        places: list[int] = self.physical_offsets[rows[(begin_ms <= times) & (times <= end_ms)]].tolist()
        return places


def key_block(records: Sequence[Pending]) -> KeyBlock:
    """Return the keys of many records (`Pending`)."""
    columns = None if CORE.key_hashes is None or type(records) is not list else CORE.key_hashes(records)
    if columns is not None:
        return KeyBlock(*(np.frombuffer(column, np.int64) for column in columns))
    uniques: Sequence[Any]
    keys: Sequence[Any]
    places, stored, prefixes, uniques, keys = zip(*records, strict=True)
    prefix_hashes, with_keys = int64s(prefixes), np.arange(len(records))
    if not all(uniques):  # ops beside halves have no unique id
        indexed = [number for number, (unique, key) in enumerate(zip(uniques, keys, strict=True)) if unique or key]
        uniques, keys = [uniques[number] for number in indexed], [keys[number] for number in indexed]
        with_keys = np.array(indexed, np.int64)
        prefix_hashes = prefix_hashes[with_keys]
    if uniques and all(uniques) and all(keys) and b" " not in b"".join(keys):
        # Most records have a unique id and one key each, and take this fast path.
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
            key_texts = [*([java_decode(unique)] if unique else []), *split_keys(java_decode(key or b""))]
            texts += key_texts
            owners += [number] * len(key_texts)
        record_of_key = np.array(owners, np.int64)
        hashes = index_key_hashes(prefix_hashes[record_of_key], texts)
        record_of_key = with_keys[record_of_key]
    return KeyBlock(int64s(places), int64s(stored), record_of_key, hashes)


def int64s(numbers: Sequence[int]) -> NDArray[np.int64]:
    """Return an array of numbers, in a third of the time that NumPy takes to find out what they are."""
    return np.frombuffer(struct.pack(f"{len(numbers)}q", *numbers), np.int64)


# ---- records


_unpack_fields = record_format.header_struct(
    "magic", "queue_id", "queue_offset", "physical_offset", "sys_flag", "store_timestamp", "body_length"
).unpack_from
_find_keys_and_tags = find_keys_and_tags
_new_record = tuple.__new__
_TOPIC_AT: Final = record_format.TOPIC_AT
_MAGIC: Final = record_format.MESSAGE_MAGIC
_UNUSUAL: Final = record_format.HOSTS_V6 | record_format.INNER_BATCH
_UNQUEUED: Final = record_format.UNQUEUED
UNUSUAL_IN_BLOCKS: Final = _UNUSUAL | _UNQUEUED
"""Flags of records that are not derived together with others."""
_NO_LEVELS: Final = DelayLevels()
_IN_TRANSACTION: Final = record_format.TRANSACTION_MASK
SCHEDULE_TOPIC: Final = SystemTopic.SCHEDULE.encode()
"""As records have it."""
_TAGS_KEPT: Final = 10_000
_MOST_BYTES: Final = 1 << 22  # at most so many bytes of records are derived together


MULTI_DISPATCH: Final = PropertyName.INNER_MULTI_DISPATCH.encode()
"""The property that names light queues; few records have it."""
_WITHOUT_LIGHT: Final = (TopicPrefix.RETRY.encode(), TopicPrefix.SYSTEM.encode())


def light_queues(topic: bytes, queue_id: int, properties: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield the light queues to which 5.x dispatched a record too, as topic, queue id and queue offset."""
    if topic.startswith(_WITHOUT_LIGHT) or topic == SCHEDULE_TOPIC:
        return
    pairs = decode_properties(properties)
    names, offsets = pairs.get(PropertyName.INNER_MULTI_DISPATCH), pairs.get(PropertyName.INNER_MULTI_QUEUE_OFFSET)
    if not names or not offsets:
        return
    queue_names, queue_offsets = names.split(","), offsets.split(",")
    # RocketMQ logs such a record and dispatches it to no queue, so a store that it wrote has no entry either.
    if len(queue_names) != len(queue_offsets):
        return
    for name, text in zip(queue_names, queue_offsets, strict=True):
        queue_offset = java_long(text)
        light_id = 0 if name.startswith(TopicPrefix.LIGHT) else queue_id
        # A broker dispatches to no queue of an illegal name either, so an entry here would be one that it lacks.
        with suppress(MessageIllegalError):
            validate_queue(name, light_id)
            if queue_offset is not None:
                yield name, light_id, queue_offset


def claims(raw: bytes, name: tuple[str, int]) -> range:
    """Return the queue offsets of a queue at which a record says that it is; none for one of other queues.

    Raises:
        RecordError: The bytes are not a record.
    """
    message = StoredMessage.framed(raw)
    _, _, begin, end, _, _ = message.frame
    if (message.topic, message.queue_id) == name:
        number = java_int(message.properties.get(PropertyName.INNER_NUM, "")) if is_batch(message) else 1
        return range(message.queue_offset, message.queue_offset + max(number or 1, 1))
    for topic, queue_id, queue_offset in light_queues(raw[begin:end], message.queue_id, message.properties_raw):
        if (topic, queue_id) == name:
            return range(queue_offset, queue_offset + 1)
    return range(0)


class DerivedRecord(NamedTuple):
    """What a record defines, with texts in its own form."""

    physical_offset: int
    """Place of the record."""
    size: int
    address: int
    """The physical offset that the record names, which damage can have changed."""
    topic: bytes
    queue_id: int
    queue_offset: int
    tags_code: int | None
    """Tags code of its queue entry, None for a record that gets no entry."""
    store_timestamp_ms: int
    properties: bytes
    unique_key: bytes | None
    """Its unique id, None if it is not indexed."""
    keys: bytes | None
    """Its keys, None if they are not indexed."""

    def pending(self) -> Pending:
        """Return what the index needs of the record."""
        return self.physical_offset, self.store_timestamp_ms, topic_hash(self.topic), self.unique_key, self.keys

    def light_queues(self) -> Iterator[tuple[str, int, int]]:
        """Return the light queues that have the record too, as `light_queues` does."""
        if MULTI_DISPATCH not in self.properties:
            return iter(())
        return light_queues(self.topic, self.queue_id, self.properties)


@dataclass(slots=True)
class DerivedBlock:
    """What adjacent records define."""

    end: int
    """Physical offset behind the last one."""
    queues: list[tuple[bytes, int, int, bytes]]
    """Topic, queue id, first queue offset and adjacent packed entries of each queue."""
    _keys: KeyBlock | None
    records: Sequence[DerivedRecord] = ()
    """The records, if they were derived one by one."""

    @property
    def last(self) -> int:
        """The place of the last record."""
        return self.records[-1].physical_offset if self.records else int(self.keys.physical_offsets[-1])

    @property
    def keys(self) -> KeyBlock:
        """The keys."""
        if self._keys is None:
            self._keys = key_block(self.pending())
        return self._keys

    def pending(self) -> list[Pending]:
        """Return the keys of `records`."""
        return [record.pending() for record in self.records]


def derived_block(
    log: CommitLog,
    begin: int,
    end: int,
    max_records: int,
    *,
    check_body: bool = False,
    levels: DelayLevels = _NO_LEVELS,
) -> DerivedBlock | None:
    """Return what usual records define, at most ``max_records``, from ``begin`` on; None if the first ones are unusual.

    With ``check_body`` they are compared with the checksums of their bodies. A record is unusual if its keys or tags
    are not ASCII, if it does not name its own place, if it does not continue the count of its queue, or if it waits for
    none of the delay ``levels``.
    """
    file = log.sequence.file_at(begin)
    if file is None:
        return None
    start = begin - begin % log.file_size
    limit = min(end - start, log.file_size)
    return block_of_file(file.buffer, start, begin - start, limit, max_records, check_body=check_body, levels=levels)


def block_of_file(
    buffer: Buffer,
    start: int,
    place: int,
    limit: int,
    max_records: int,
    *,
    check_body: bool,
    levels: DelayLevels = _NO_LEVELS,
) -> DerivedBlock | None:
    """Do as `derived_block`, from ``place`` to ``limit`` of a file whose first byte is at ``start``."""
    limit = min(place + _MOST_BYTES, limit)
    if CORE.derive is None:
        if limit - place < max_records // 4 * record_format.FIXED_SIZE:  # fewer records than arrays are worth
            return None
        from librmq.store.engine._derivation_in_arrays import derive_in_arrays

        return derive_in_arrays(buffer[place:limit], start + place, max_records, levels, check_body=check_body)
    max_records = min(max_records, (limit - place) // record_format.FIXED_SIZE + 1)  # for which it makes room
    place, queues, *columns = CORE.derive(
        buffer, start, place, limit, max_records, UNUSUAL_IN_BLOCKS, check_body, levels.delays_ms
    )
    if not queues:
        return None
    return DerivedBlock(start + place, queues, KeyBlock(*(np.frombuffer(column, np.int64) for column in columns)))


def block_of_records(records: Sequence[DerivedRecord]) -> DerivedBlock:
    """Return what adjacent records define; one without an entry has an empty one."""
    last = records[-1]
    return DerivedBlock(
        last.physical_offset + last.size,
        [
            (topic, queue_id, queue_offset, b"" if code is None else ENTRY.pack(place, size, code))
            for place, size, _, topic, queue_id, queue_offset, code, *_ in records
        ],
        None,
        records,
    )


class Derivation:
    """Reads records of one store and caches the codes of their tags. Not thread-safe.

    Recovery compares queues and index with the result, and a replica writes them from it.
    """

    def __init__(self, levels: DelayLevels, on_batch: Callable[[int, StoredMessage], object] | None = None) -> None:
        """``on_batch`` is called with the place of each record that is a batch of messages, and the record."""
        self._levels = levels
        self._on_batch = on_batch
        self._tags_codes: dict[bytes | None, int] = {None: 0}

    def derive(self, physical_offset: int, size: int, raw: bytes) -> DerivedRecord:
        """Return what a record defines."""
        magic, queue_id, queue_offset, address, sys_flag, stored, body_size = _unpack_fields(raw)
        if magic != _MAGIC or sys_flag & _UNUSUAL:
            if self._on_batch is not None and sys_flag & record_format.INNER_BATCH and is_batch(StoredMessage(raw)):
                self._on_batch(physical_offset, StoredMessage(raw))
            stored = record_format.store_timestamp_ms(raw)
            _, _, topic_at, topic_end, properties_at, _ = record_format.frame(raw, 0, size)
        else:
            topic_at = _TOPIC_AT + body_size if body_size > 0 else _TOPIC_AT
            topic_end = topic_at + raw[topic_at - 1]
            properties_at = topic_end + 2
        topic, properties = raw[topic_at:topic_end], raw[properties_at:]
        unique, key, tags = _find_keys_and_tags(properties)
        code: int | None = None
        if not sys_flag & _UNQUEUED:
            wait_ms = _wait_ms(decode_properties(properties), self._levels) if topic == SCHEDULE_TOPIC else None
            if wait_ms is not None:
                code = (stored + wait_ms + (1 << 63)) % (1 << 64) - (1 << 63)  # of a damaged time, as in Java
            else:
                code = self._tags_codes.get(tags)
                if code is None:
                    if len(self._tags_codes) > _TAGS_KEPT:
                        self._tags_codes = {None: 0}
                    code = self._tags_codes[tags] = tags_code(java_decode(tags or b""))
        if sys_flag & _IN_TRANSACTION and not is_indexed(sys_flag):
            unique = key = None
        # `tuple.__new__` takes half the time of the class's own constructor, and a replica derives each message.
        return _new_record(
            DerivedRecord,
            (physical_offset, size, address, topic, queue_id, queue_offset, code, stored, properties, unique, key),
        )

    def blocks(
        self, log: CommitLog, begin: int, end: int, is_whole: Callable[[int, int], bool] = lambda _begin, _end: True
    ) -> Iterator[DerivedBlock]:
        """Yield what the records of a log define, in its order; one without an entry has an empty one.

        Adjacent records, given by begin and end, are derived one by one if a block does not say all of what they define
        (``is_whole``).

        Raises:
            CorruptionError: A record is unreadable; those before it are yielded.
        """
        for stretch in walk(log, begin, end):
            block, damage = stretch.block, None
            if block is not None and is_whole(stretch.begin, block.end):
                yield block
                continue
            records: list[DerivedRecord] = []
            try:
                records.extend(itertools.starmap(self.derive, stretch.records()))
            except CorruptionError as error:
                damage = error
            if records:
                yield block_of_records(records)
            if damage is not None:
                raise damage


# ---- a walk over the log, which takes many usual records together where that takes less time

COMPARED: Final = 4096
"""Number of records in a block, and of entries compared together."""
_LEAST_APART: Final = 256 if CORE.derive is None else 1
_MOST_APART: Final = 1 << 16
FEW: Final = 16 if CORE.module else 48
"""Number of records from which on it takes less time to derive them together."""
_WORTH_BLOCK: Final = 64
"""Number of records from which a block takes less time than a loop over them."""


class Stretch:
    """The next part of a log. A taker takes the ``block``, or goes through `records`; the walk continues behind them.

    Only the taker knows whether a block is of use: one entry that differs makes it look at each record.
    """

    __slots__ = ("_check_body", "_limit", "_log", "_min_records", "begin", "block", "end")

    def __init__(
        self, log: CommitLog, block: DerivedBlock | None, begin: int, limit: int, min_records: int, check_body: bool
    ) -> None:
        self._log = log
        self._limit = limit
        self._min_records = min_records
        self._check_body = check_body
        self.block = block
        """What the records at the beginning define; None if they are unusual or few."""
        self.begin = begin
        self.end = begin
        """The physical offset up to which `records` has gone."""

    def records(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield place, size and bytes of the block's records one by one, and of some that follow.

        Raises:
            CorruptionError: A record is unreadable.
        """
        block_end = self.begin if self.block is None else self.block.end
        items = self._log.scan(self.begin, self._limit, check_body=self._check_body)
        for number, (place, size, raw) in enumerate(items, 1):
            if raw is not None:
                yield place, size, raw
            self.end = place + size
            if number >= self._min_records and self.end >= block_end:
                return


def walk(
    log: CommitLog, begin: int, end: int, *, check_body: bool = False, in_blocks: bool = True
) -> Iterator[Stretch]:
    """Yield the log from ``begin`` to ``end`` part by part; with ``check_body``, bodies match their checksums."""
    if not in_blocks:
        yield Stretch(log, None, begin, end, end - begin, check_body)
        return
    at, min_records, is_worth_block = begin, _LEAST_APART, True
    while at < end:
        block = derived_block(log, at, end, COMPARED, check_body=check_body) if is_worth_block else None
        stretch = Stretch(log, block, at, end, min_records, check_body)
        yield stretch
        if block is not None and stretch.end == at:
            log.sequence.unmap_pages(at, block.end)  # a writer's too, because it read them only once
            at = block.end
            # An unusual record ends a block. Where such records are many, a loop over all of them takes less time.
            is_worth_block = len(block.keys.physical_offsets) >= _WORTH_BLOCK
            min_records = _LEAST_APART if is_worth_block else min_records
        elif stretch.end == at:
            return
        else:
            # A block that was of no use is a hint that those which follow are not either, so try more and more seldom.
            at, min_records, is_worth_block = stretch.end, min(2 * min_records, _MOST_APART), True
