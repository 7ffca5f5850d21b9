"""What adjacent usual records define, by arrays, as the compiled core finds it.

The arrays stay beside the core because stores are opened without it too: to rebuild queues and index of 253 MB takes
3.0 s with them, and 6.5 s by a loop.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from librmq.consumequeue_entries import ENTRY_SIZE, entry_dtype
from librmq.java.lang import absolute_hashes, part_hashes
from librmq.message import DelayLevels
from librmq.message import record as record_format
from librmq.runtime import lazy_numpy as np
from librmq.store.engine.derivation import (
    SCHEDULE_TOPIC,
    UNUSUAL_IN_BLOCKS,
    DerivedBlock,
    KeyBlock,
    int64s,
    topic_hash,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_unpack_size = record_format.header_struct("size", unsigned=("size",)).unpack_from
_PADDING: Final = 1 << 9  # bytes behind texts, more than a topic of a wrong length can reach beyond them


def derive_in_arrays(
    data: bytes, begin: int, max_records: int, levels: DelayLevels, *, check_body: bool
) -> DerivedBlock | None:
    """Do what the compiled core does with the bytes of a log file from physical offset ``begin`` on.

    None also if an unusual record is among the first quarter of ``max_records``, because then a loop takes less time.
    """
    min_records = -(-max_records // 4)
    places = _places(data, max_records)
    if len(places) < min_records:
        return None
    head, ends, tails = _usual_frames(data, begin, int64s(places), check_body)
    if len(tails) < min_records:
        return None
    raw, properties_at, tails_end, topics = _texts(head, tails)
    count = len(topics)
    if count < min_records:
        return None
    head = head[:count]
    queues, stored = _QueueColumns.of_records(head, topics), head["store_timestamp"].astype(np.int64)
    parts = _parts(raw, properties_at, tails_end, 2)
    starts = record_format.gather(raw, parts[1], "<u4")
    bounds = [_find_values(raw, parts, starts, name, count) for name in (b"UNIQ_KEY\1", b"KEYS\1", b"TAGS\1")]
    uniques, keys, tags = bounds
    prefixes = np.array([topic_hash(topic) for topic, _ in queues.names], np.int64)[queues.numbers]
    owners, hashes = _hashes_of_keys(raw, uniques, keys, prefixes)
    codes = _codes_of_tags(raw, *tags)
    is_usual = queues.is_next & (codes >= 0)
    is_usual[owners[hashes < 0]] = False
    for values_at, values_end in bounds:
        is_usual &= values_at != values_end  # an empty one needs the careful search
    waits = np.array([topic == SCHEDULE_TOPIC for topic, _ in queues.names])[queues.numbers]
    codes = codes.astype(np.uint32).view(np.int32).astype(np.int64)
    if waits.any():
        waits_ms = _waits_ms(raw, *_find_values(raw, parts, starts, b"DELAY\1", count), levels.delays_ms)
        is_usual &= ~waits | (waits_ms >= 0)
        codes = np.where(waits, stored + waits_ms, codes)

    count = _count_first(is_usual)
    if count < min_records:
        return None
    key_count = int(np.searchsorted(owners, count))
    physical_offsets = head["physical_offset"][:count].astype(np.int64)
    block = KeyBlock(physical_offsets, stored[:count], owners[:key_count], absolute_hashes(hashes[:key_count]))
    return DerivedBlock(begin + int(ends[count - 1]), queues.entries(head[:count], codes[:count]), block)


def _places(data: bytes, max_records: int) -> list[int]:
    """Return where adjacent records begin, as their sizes say."""
    at, size, places = 0, record_format.FIXED_SIZE, list[int]()
    last = len(data) - size
    for _ in range(max_records):
        if at > last or size < record_format.FIXED_SIZE:
            break
        places.append(at)
        (size,) = _unpack_size(data, at)
        at += size
    return places


def _usual_frames(
    data: bytes, begin: int, places: NDArray[np.int64], check_body: bool
) -> tuple[NDArray[Any], NDArray[np.int64], list[bytes]]:
    """Return headers, ends and what follows the bodies of the records at ``places``, up to the first unusual one."""
    head = record_format.headers_at(np.frombuffer(data, np.uint8), places)
    ends, tails_at = places + head["size"], places + head.itemsize + head["body_length"]
    count = _count_first(
        (head["magic"] == record_format.MESSAGE_MAGIC)
        & (ends <= len(data))
        & (head["body_length"] >= 0)
        & (tails_at + 3 <= ends)
        & (head["sys_flag"] & UNUSUAL_IN_BLOCKS == 0)
        & (head["physical_offset"] == places + begin)
    )
    tails = [data[at:end] for at, end in zip(tails_at[:count].tolist(), ends.tolist(), strict=False)]
    if check_body:
        bodies = zip((places[:count] + head.itemsize).tolist(), tails_at.tolist(), strict=False)
        sums = [record_format.body_checksum(data[at:end]) if end > at else -1 for at, end in bodies]
        count = _count_first((head["body_crc"][:count] == sums) | (head["body_length"][:count] == 0))
        checksummed = (number for number, tail in enumerate(tails[:count]) if record_format.has_own_checksum(tail))
        count = next(checksummed, count)
    return head[:count], ends[:count], tails[:count]


def _texts(
    head: NDArray[Any], tails: Sequence[bytes]
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64], list[bytes]]:
    """Return the bytes of all tails, where properties begin and end in them, and the topics, until one is unusual."""
    raw = np.frombuffer(b"".join((*tails, bytes(_PADDING))), np.uint8)
    sizes = head["size"].astype(np.int64) - head["body_length"] - head.itemsize
    ends = np.cumsum(sizes)
    topics_at = ends - sizes
    topic_sizes = raw[topics_at].astype(np.int64)
    properties_at = topics_at + topic_sizes + 3
    count = _count_first(
        (topic_sizes <= record_format.MAX_TOPIC_SIZE)
        & (record_format.gather(raw, properties_at - 2, ">i2") == ends - properties_at)
        & (properties_at <= ends)
    )
    topics = [tail[1 : 1 + size] for tail, size in zip(tails, topic_sizes[:count].tolist(), strict=False)]
    return raw, properties_at[:count], ends[:count], topics


class _QueueColumns(NamedTuple):
    """The queues of adjacent records."""

    names: list[tuple[bytes, int]]
    """Topics and queue ids, in order of appearance."""
    numbers: NDArray[np.int64]
    """For each record, which of ``names`` it has."""
    order: NDArray[np.int64]
    """The records, queue by queue."""
    is_next: NDArray[np.bool_]
    """Whether a record has the queue offset behind that of the record before it in its queue."""

    @classmethod
    def of_records(cls, head: NDArray[Any], topics: Sequence[bytes]) -> _QueueColumns:
        numbered = defaultdict[tuple[bytes, int], int](itertools.count().__next__)
        numbers = int64s([numbered[name] for name in zip(topics, head["queue_id"].tolist(), strict=True)])
        order, counts = np.argsort(numbers, kind="stable"), np.bincount(numbers)
        ahead = head["queue_offset"].astype(np.int64)[order] - np.arange(len(order))
        is_next = np.empty(len(order), np.bool_)
        is_next[order] = ahead == np.repeat(ahead[np.cumsum(counts) - counts], counts)
        return cls(list(numbered), numbers, order, is_next)

    def entries(self, head: NDArray[Any], codes: NDArray[np.int64]) -> list[tuple[bytes, int, int, bytes]]:
        """Return topic, queue id, first queue offset and packed entries of each queue of the first records."""
        entries = np.empty(len(head), entry_dtype())
        entries["physical_offset"], entries["size"], entries["tags_code"] = head["physical_offset"], head["size"], codes
        order = self.order[self.order < len(head)]
        packed, first_offsets = entries[order].tobytes(), head["queue_offset"]
        ends = np.cumsum(np.bincount(self.numbers[: len(head)])).tolist()
        return [
            (*name, int(first_offsets[order[at]]), packed[at * ENTRY_SIZE : end * ENTRY_SIZE])
            for name, at, end in zip(self.names, [0, *ends], ends, strict=False)
        ]


_Parts = tuple["NDArray[np.int64]", "NDArray[np.int64]", "NDArray[np.int64]"]
"""The row of each part, its beginning and its end."""


def _parts(raw: NDArray[np.uint8], begins: NDArray[np.int64], ends: NDArray[np.int64], separator: int) -> _Parts:
    """Split each row of ``raw``; rows are given by begin and end, in order."""
    at = np.flatnonzero(raw == separator)
    rows = np.searchsorted(begins, at, "right") - 1
    is_inside = (rows >= 0) & (at < np.append(ends, 0)[rows])
    at, rows = at[is_inside], rows[is_inside]
    counts = np.bincount(rows, minlength=len(begins)) + 1
    parts_at, parts_end = np.concatenate((begins, at + 1)), np.concatenate((ends, at))
    parts_at.sort(kind="stable")
    parts_end.sort(kind="stable")
    return np.repeat(np.arange(len(begins)), counts), parts_at, parts_end


def _find_values(
    raw: NDArray[np.uint8], parts: _Parts, starts: NDArray[np.uint32], name: bytes, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return begin and end of the last value of a property in each of ``count`` rows; 0 and -1 in a row without.

    ``starts`` are the first four bytes of the parts.
    """
    rows, begins, ends = parts
    values_at, values_end = np.zeros(count, np.int64), np.full(count, -1)
    hits = np.flatnonzero(starts == int.from_bytes(name[:4], "little"))
    hits = hits[ends[hits] - begins[hits] >= len(name)]
    for at in range(4, len(name)):
        hits = hits[raw[begins[hits] + at] == name[at]]
    values_at[rows[hits]], values_end[rows[hits]] = begins[hits] + len(name), ends[hits]
    return values_at, values_end


_Values = tuple["NDArray[np.int64]", "NDArray[np.int64]"]
"""Begin and end of a value in each row, as of `_find_values`."""


def _hashes_of_keys(
    raw: NDArray[np.uint8], uniques: _Values, keys: _Values, prefixes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the records of all keys and the keys' hashes, negative for one that needs a careful look."""
    (of_uniques, uniques_at, uniques_end), (with_keys, lists_at, lists_end) = _present(*uniques), _present(*keys)
    of_keys, keys_at, keys_end = _parts(raw, lists_at, lists_end, 32)
    owners = np.concatenate((of_uniques, with_keys[of_keys]))
    begins, ends = np.concatenate((uniques_at, keys_at)), np.concatenate((uniques_end, keys_end))
    order = np.argsort(owners, kind="stable")
    order = order[(ends > begins)[order]]
    owners = owners[order]
    return owners, part_hashes(raw, begins[order], (ends - begins)[order], prefixes[owners])


def _codes_of_tags(raw: NDArray[np.uint8], begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the hash of each row's tags, 0 without any, negative for those that need a careful look."""
    rows, tags_at, tags_end = _present(begins, ends)
    codes = np.zeros(len(begins), np.int64)
    codes[rows] = part_hashes(raw, tags_at, tags_end - tags_at, codes[rows])
    return codes


def _present(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> _Parts:
    """Return the rows with a value, and where it begins and ends."""
    rows = np.flatnonzero(begins < ends)
    return rows, begins[rows], ends[rows]


def _waits_ms(
    raw: NDArray[np.uint8], begins: NDArray[np.int64], ends: NDArray[np.int64], delays_ms: Sequence[int]
) -> NDArray[np.int64]:
    """Return how long records of delay levels wait, by the texts of their levels, -1 for an unusual one."""
    sizes, last = ends - begins, raw[ends - 1].astype(np.int64) - 48
    tens = np.where(sizes == 2, raw[begins].astype(np.int64) - 48, 0)
    levels = 10 * tens + last
    is_level = (last >= 0) & (last <= 9) & (tens <= 9) & np.where(sizes == 2, tens > 0, (sizes == 1) & (last > 0))
    waits_ms = np.full(len(begins), -1)
    if delays_ms:
        waits_ms[is_level] = np.array(delays_ms)[np.minimum(levels[is_level], len(delays_ms)) - 1]
    return waits_ms


def _count_first(is_usual: NDArray[np.bool_]) -> int:
    """Return the number of true values before the first false one."""
    return len(is_usual) if is_usual.all() else int(is_usual.argmin())
