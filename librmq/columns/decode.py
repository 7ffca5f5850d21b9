"""Log records as Arrow columns, without a Python object a message.

::

    places, sizes ──> Block: header fields by numpy, frames checked like `record.frame`
                        │
                        ├─ numbers, times      gathered from the fixed part (IPv6 hosts shift what follows them)
                        ├─ topic, body         slices of the mapped file: its bytes as an Arrow buffer, then `take`
                        ├─ hosts               formatted once for each that is different
                        └─ Properties          the property strings of the block side by side; segments by their
                                               separators; a named property by the 8-byte words at segment starts

What the plain decoder (`record.decode_record`, `record.decode_properties`) gives is given here, for every byte string:
rows with anything unusual (text that is no UTF-8, a property twice, a compressed body) are read again by the plain
code, one by one. Blocks of 4 to 16 thousand records keep what is worked out in the processor's cache.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from librmq.errors import BodyCompressionError, MissingExtraError, RecordError
from librmq.java.hashing import java_decode
from librmq.message import record
from librmq.message.message import DECOMPRESSED_LIMIT

try:
    import pyarrow as pa
except ImportError as error:
    raise MissingExtraError("decoding records into Arrow columns", "arrow") from error

__all__ = ["COLUMNS", "FIXED_COLUMNS", "Block", "Properties", "numbers", "strings", "texts"]

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

_KINDS: Final = {"i": ">i4", "I": ">u4", "q": ">i8", "8s": "V8"}
HEADER: Final = np.dtype([(name, _KINDS[code]) for name, code in (record.LAYOUT | {"body_crc": "I"}).items()])
"""Everything before the body, with IPv4 hosts; the layout is drawn in `librmq.message.record`."""

_MOST_COMPARED: Final = 24
"""Properties of a row that are held against each other by arrays; a row with more is read one by one."""
LAST_MS: Final = ((1 << 63) - 1) // 1000
"""The last time that a timestamp of Spark's can be."""


def gather(raw: Bytes, positions: Ints, dtype: str) -> npt.NDArray[Any]:
    """Return the values of type ``dtype`` that stand at ``positions`` of ``raw``, which may lie anywhere in it."""
    kind = np.dtype(dtype)
    if len(raw) < kind.itemsize:
        return np.zeros(len(positions), kind)
    return np.ndarray((len(raw) - kind.itemsize + 1,), kind, raw, strides=(1,))[positions]


def numbers(values: npt.NDArray[Any], present: Mask | None = None) -> pa.Array:
    """Return numbers as an Arrow array on the same memory, null where not ``present``.

    `pyarrow.array` does that too, but loads pandas, some 20 MiB that no reader needs.
    """
    values = np.ascontiguousarray(values)
    valid = None if present is None else pa.py_buffer(np.packbits(present, bitorder="little"))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [valid, pa.py_buffer(values)])


def strings(values: Sequence[str]) -> pa.StringArray:
    """Return texts as an Arrow array."""
    raws = [value.encode() for value in values]
    offsets = np.cumsum([0, *map(len, raws)]).astype(np.int32)
    return pa.Array.from_buffers(pa.string(), len(raws), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(raws))])


def slices(raw: Bytes, begins: Ints, ends: Ints) -> pa.BinaryArray:
    """Return the bytes from each of ``begins`` to its end, as one binary array without gaps between them."""
    count = len(begins)
    if not count:
        return pa.nulls(0, pa.binary())
    base, end = int(begins.min()), int(ends.max())
    pairs = np.empty(2 * count + 1, np.int32)
    pairs[:-1:2], pairs[1::2], pairs[-1] = begins - base, ends - base, end - base
    # Every second element is what lies between two slices, of any length, and is never looked at.
    buffers = [None, pa.py_buffer(pairs), pa.py_buffer(raw[base:end])]
    between = pa.Array.from_buffers(pa.binary(), 2 * count, buffers)
    return between.take(numbers(np.arange(0, 2 * count, 2)))


def _parts(array: pa.BinaryArray) -> tuple[npt.NDArray[np.int32], Bytes]:
    """Return offsets and bytes of a binary or text array that is no slice of another."""
    _, offsets, data = array.buffers()
    count = len(array)
    ends = np.frombuffer(offsets, np.int32, count + 1) if count else np.zeros(1, np.int32)
    return ends, np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)


def _not_utf8(array: pa.BinaryArray) -> Mask:
    """Return which rows are no UTF-8; single rows are decoded only if the whole is none."""
    offsets, data = _parts(array)
    bad = np.zeros(len(array), np.bool_)
    data = data[: int(offsets[-1])]
    if not len(data) or int(data.max()) < 0x80:
        return bad
    inside = offsets[:-1][offsets[:-1] < len(data)]
    if not ((data[inside] & 0xC0) == 0x80).any():  # no row begins in the midst of a character
        try:
            data.tobytes().decode()
        except UnicodeDecodeError:
            pass
        else:
            return bad
    for row in np.flatnonzero(np.diff(offsets) > 0):
        try:
            data[offsets[row] : offsets[row + 1]].tobytes().decode()
        except UnicodeDecodeError:
            bad[row] = True
    return bad


def texts(array: pa.BinaryArray) -> pa.StringArray:
    """Return bytes as texts, malformed ones as Java reads them."""
    bad = _not_utf8(array)
    if bad.any():
        array = _replaced(array, np.flatnonzero(bad), [java_decode(array[int(row)].as_py()).encode() for row in
                                                       np.flatnonzero(bad)])  # fmt: skip
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers(), array.null_count)


def _replaced(array: pa.BinaryArray, rows: Ints, values: Sequence[bytes | None]) -> pa.BinaryArray:
    """Return ``array`` with other values in some rows."""
    if not len(rows):
        return array
    where = np.arange(len(array))
    where[rows] = len(array) + np.arange(len(rows))
    return pa.concat_arrays([array, pa.array(values, pa.binary())]).take(numbers(where))


class Block:
    """Some records of one file. Rows whose frame is not sound (`sound`) have no valid values."""

    def __init__(self, raw: Bytes, places: Ints, sizes: Ints | None = None, *, frames: bool = True) -> None:
        """Look at the records at ``places`` in ``raw`` (of `record.FIXED_SIZE` bytes or more); a place may be anything.

        With ``sizes`` a record of another length is not sound. Without ``frames`` only size and magic are looked at,
        for those who want nothing but fields of the fixed part.
        """
        self._raw = raw
        self.places = places
        self._sizes = sizes
        self._frames = frames
        self.sound: Mask
        """Which rows are records that `record.frame` takes."""
        self._check()

    def __len__(self) -> int:
        return len(self.places)

    def _check(self) -> None:
        raw, places = self._raw, self.places
        limit = len(raw)
        sound = (places >= 0) & (places <= limit - record.FIXED_SIZE)
        at = places if sound.all() else np.where(sound, places, 0)
        self._at = at
        head = self._head = self._headers(at)
        end = at + head["size"]
        magic = head["magic"]
        second = magic == record.MESSAGE_MAGIC_V2
        sound &= ((magic == record.MESSAGE_MAGIC) | second) & (head["size"] >= record.FIXED_SIZE) & (end <= limit)
        if self._sizes is not None:
            sound &= head["size"] == self._sizes
        self.sound = sound
        sys_flag = head["sys_flag"]
        self._born_shift = self._store_shift = None
        body_at = at + record.BODY_AT
        body_length = head["body_length"].astype(np.int64)
        if (sys_flag & record.HOSTS_V6).any():
            self._born_shift = record.HOST_V6_EXTRA * ((sys_flag & record.BORN_HOST_V6) != 0).astype(np.int64)
            shift = record.HOST_V6_EXTRA * ((sys_flag & record.STORE_HOST_V6) != 0).astype(np.int64)
            self._store_shift = self._born_shift + shift
            body_at = body_at + self._store_shift
            sound &= body_at + np.where(second, 4, 3) <= end
        if not self._frames:
            return
        if self._store_shift is not None:
            body_length = gather(raw, np.where(sound, body_at - 4, 0), ">i4").astype(np.int64)
        body_end = body_at + np.maximum(body_length, 0)
        any_second = bool(second.any())
        lengths: Any = np.where(second, 4, 3) if any_second else 3
        sound &= body_end + lengths <= end
        topic_at = body_end + 1
        topic_length = raw[np.where(sound, body_end, 0)].astype(np.int64)
        most: Any = record.MAX_TOPIC_SIZE
        if any_second:
            wide = gather(raw, np.where(sound & second, body_end, 0), ">u2").astype(np.int64)
            topic_length = np.where(second, wide, topic_length)
            topic_at = topic_at + second
            most = np.where(second, record.MAX_TOPIC_SIZE_V2, most)
        topic_end = topic_at + topic_length
        sound &= (topic_length <= most) & (topic_end + 2 <= end)
        properties_at = topic_end + 2
        properties_length = gather(raw, np.where(sound, topic_end, 0), ">u2").astype(np.int64)
        properties_length[properties_length > record.MAX_PROPERTIES_SIZE] = 0
        sound &= properties_at + properties_length == end
        self._body = body_at, body_end
        self._topic = topic_at, topic_end
        self._properties_at = properties_at, end

    def _headers(self, at: Ints) -> npt.NDArray[Any]:
        size = HEADER.itemsize
        if not len(at) or len(self._raw) < size:
            return np.zeros(len(at), HEADER)
        window = np.ndarray((len(self._raw) - size + 1,), f"V{size}", self._raw, strides=(1,))
        return window[at].view(HEADER)

    def reason(self, row: int) -> RecordError:
        """Return what is wrong with a row that is not sound."""
        place = int(self.places[row])
        if not 0 <= place <= len(self._raw) - record.FIXED_SIZE:
            return RecordError("expected a record, found the end of the file")
        try:
            record.frame(self._raw.data, place, len(self._raw))
        except RecordError as error:
            return error
        assert self._sizes is not None
        return RecordError(f"expected a record of {self._sizes[row]} bytes, found {self._head['size'][row]}")

    def take(self, rows: Ints) -> Block:
        """Return the block of these rows only."""
        sizes = None if self._sizes is None else self._sizes[rows]
        return Block(self._raw, self.places[rows], sizes, frames=self._frames)

    # ----------------------------------------------------------------------------------------- numbers, texts, bodies

    def field(self, name: str) -> npt.NDArray[Any]:
        """Return a field of the fixed part, in this machine's order of bytes."""
        shift = self._born_shift if name == "store_timestamp" else self._store_shift
        if name in ("store_timestamp", "reconsume_times", "prepared_offset") and shift is not None:
            kind, at = HEADER.fields[name][:2]  # type: ignore[index]
            where = np.where(self.sound, self._at + at + shift, 0)
            return gather(self._raw, where, kind.str).astype(kind.newbyteorder("="))
        values = self._head[name]
        return values.astype(values.dtype.newbyteorder("="))

    def host(self, name: str) -> pa.StringArray:
        """Return ``born_host`` or ``store_host`` as texts."""
        at = self._at + (record.BORN_HOST_AT if name == "born_host" else record.STORE_HOST_AT)
        bit = record.BORN_HOST_V6 if name == "born_host" else record.STORE_HOST_V6
        if name == "store_host" and self._born_shift is not None:
            at = at + self._born_shift
        at = np.where(self.sound, at, 0)
        long = (self._head["sys_flag"] & bit) != 0
        found = np.empty(len(at), object)
        for rows, size in ((np.flatnonzero(~long), 8), (np.flatnonzero(long), 20)):
            if len(rows):
                # Few hosts are different: each is formatted once.
                raws = np.ascontiguousarray(gather(self._raw, at[rows], f"V{size}")).view(f"S{size}")
                _, first, which = np.unique(raws, return_index=True, return_inverse=True)
                padded = gather(self._raw, at[rows][first], f"V{size}")
                names = [record.format_host(record.decode_host(host.tobytes())) for host in padded]
                found[rows] = np.array(names, object)[which]
        return pa.array(found, pa.string())

    def topic(self) -> pa.StringArray:
        """Return the topics in the records."""
        return texts(self._slices(*self._topic))

    def stored_body(self) -> pa.BinaryArray:
        """Return the bodies as they are stored."""
        return self._slices(*self._body)

    def body(self) -> tuple[pa.BinaryArray, dict[int, RecordError]]:
        """Return the bodies as they were sent, and which can't be had, with the reason (they are null)."""
        stored = self.stored_body()
        packed = np.flatnonzero(self.sound & ((self._head["sys_flag"] & record.COMPRESSED) != 0))
        bad: dict[int, RecordError] = {}
        values: list[bytes | None] = []
        for row in packed.tolist():
            try:
                flags = int(self._head["sys_flag"][row])
                values.append(record.decompress_body(stored[row].as_py(), flags, DECOMPRESSED_LIMIT))
            except BodyCompressionError as error:
                bad[row] = error
                values.append(None)
        return _replaced(stored, packed, values), bad

    def bad_checksums(self) -> dict[int, RecordError]:
        """Return the rows whose stored body does not match its checksum."""
        begins, ends = self._body
        expected = self._head["body_crc"].tolist()
        view, crc32 = self._raw.data, zlib.crc32
        found = [crc32(view[a:b]) & 0x7FFFFFFF for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]
        wrong = (np.array(found, np.int64) != np.array(expected, np.int64)) & self.sound & (ends > begins)
        return {
            int(row): RecordError(f"body checksum: expected {expected[row]:08x}, found {found[row]:08x}", 8)
            for row in np.flatnonzero(wrong)
        }

    @cached_property
    def properties(self) -> Properties:
        """Return the properties."""
        return Properties(self._raw, *self._sound_only(*self._properties_at))

    def _sound_only(self, begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
        if self.sound.all():
            return begins, ends
        return np.where(self.sound, begins, 0), np.where(self.sound, ends, 0)

    def _slices(self, begins: Ints, ends: Ints) -> pa.BinaryArray:
        return slices(self._raw, *self._sound_only(begins, ends))

    def column(self, name: str) -> pa.Array:
        """Return a column by its name in `COLUMNS`."""
        return COLUMNS[name][1](self)


class Properties:
    """The stored properties of many messages."""

    def __init__(self, raw: Bytes, begins: Ints, ends: Ints) -> None:
        """Read the properties that stand from each of ``begins`` to its end in ``raw``."""
        self.rows = rows = len(begins)
        if rows and int(ends.max()) == len(raw):
            raw = np.append(raw, np.uint8(0))
        # With the byte behind it, in which a separator is put: so that each segment ends with one.
        offsets, data = _parts(slices(raw, begins, ends + 1))
        size = int(offsets[-1])
        self._text = np.zeros(size + 8, np.uint8)  # and a word to look beyond the end
        self._text[:size] = data[:size]
        self._row_begins, row_ends = offsets[:-1].astype(np.int64), offsets[1:].astype(np.int64) - 1
        self._row_ends = row_ends
        self._text[row_ends] = 2
        # Both separators, 01 and 02: the first behind a segment's begin is where its name ends, or its end.
        separators = np.flatnonzero((self._text[:size] - np.uint8(1)) <= 1)
        closing = np.flatnonzero(self._text[separators] == 2)
        opening = np.concatenate(([0], closing[:-1] + 1)) if len(closing) else closing
        self._ends = separators[closing]
        self._splits = separators[opening]
        self._begins = np.concatenate(([0], self._ends[:-1] + 1)) if len(closing) else closing
        last = np.searchsorted(self._ends, row_ends)
        self._row = np.repeat(np.arange(rows), np.diff(last, prepend=-1))
        self._words: npt.NDArray[np.uint64] | None = None

    @cached_property
    def _stored(self) -> pa.BinaryArray:
        return slices(self._text, self._row_begins, self._row_ends)

    def _plain(self, row: int) -> dict[str, str]:
        """Return a row read by the plain code."""
        return record.decode_properties(self._text[self._row_begins[row] : self._row_ends[row]].tobytes())

    def value(self, name: str) -> pa.StringArray:
        """Return the values of one property, null where a message has none."""
        needle = name.encode("utf-8", "replace") + b"\1"
        if name and not {1, 2} & set(needle[:-1]):
            rows, begins, ends = self._find(needle)
        else:
            rows = begins = ends = np.zeros(0, np.int64)
        values = texts(slices(self._text, begins, ends))
        unusual = self._unusual_names
        if len(rows) == self.rows and not len(unusual) and (rows[1:] > rows[:-1]).all():
            return values  # every message has it, once
        where = np.zeros(self.rows, np.int64)
        present = np.zeros(self.rows, np.bool_)
        where[rows] = np.arange(len(rows))  # of a property that is there twice the last counts
        present[rows] = True
        found = values.take(numbers(where, present))
        if not len(unusual):
            return found
        plain = [self._plain(int(row)).get(name) for row in unusual]
        where = np.arange(self.rows)
        where[unusual] = self.rows + np.arange(len(unusual))
        return pa.concat_arrays([found, pa.array(plain, pa.string())]).take(numbers(where))

    def _find(self, needle: bytes) -> tuple[Ints, Ints, Ints]:
        """Return row, begin and end of every value that is not empty behind ``needle`` at a segment's start."""
        if self._words is None:
            self._words = gather(self._text, self._begins, ">u8").astype(np.uint64)
        head, size = needle[:8], len(needle)
        wanted = int.from_bytes(head.ljust(8, b"\0"), "big")
        mask = (0xFFFFFFFFFFFFFFFF << (8 * (8 - len(head)))) & 0xFFFFFFFFFFFFFFFF
        hits = np.flatnonzero((self._words & np.uint64(mask)) == np.uint64(wanted))
        hits = hits[self._ends[hits] - self._begins[hits] > size]
        for at in range(8, size):
            hits = hits[self._text[self._begins[hits] + at] == needle[at]]
        return self._row[hits], self._begins[hits] + size, self._ends[hits]

    @cached_property
    def _unusual_names(self) -> Ints:
        """Return rows that are no UTF-8: what their names are is seen only once they are decoded."""
        if not len(self._text) or int(self._text.max()) < 0x80:
            return np.zeros(0, np.int64)
        return np.flatnonzero(_not_utf8(self._stored))

    def stored(self) -> pa.StringArray:
        """Return the properties of each record as one text, as stored."""
        return texts(self._stored)

    def map(self) -> pa.MapArray:
        """Return all properties of each message, in stored order."""
        text, begins, ends, split, row = self._text, self._begins, self._ends, self._splits, self._row
        kept = (split > begins) & (split < ends - 1)
        begins, ends, split, row = begins[kept], ends[kept], split[kept], row[kept]
        unusual = np.union1d(self._unusual_names, self._repeated(begins, split, row))
        if not len(unusual):
            names = slices(text, begins, split)
            values = slices(text, split + 1, ends)
            return self._map(np.bincount(row, minlength=self.rows), _as_text(names), _as_text(values))
        usual = ~np.isin(row, unusual)
        begins, ends, split, row = begins[usual], ends[usual], split[usual], row[usual]
        plain = [self._plain(int(one)) for one in unusual]
        counts = np.bincount(row, minlength=self.rows)
        counts[unusual] = [len(one) for one in plain]
        # Those read one by one stand behind the others; a stable order by row brings them to their places.
        row = np.concatenate((row, np.repeat(unusual, counts[unusual])))
        order = numbers(np.argsort(row, kind="stable"))
        names = pa.concat_arrays(
            [_as_text(slices(text, begins, split)), pa.array([name for one in plain for name in one], pa.string())]
        ).take(order)
        values = pa.concat_arrays(
            [
                _as_text(slices(text, split + 1, ends)),
                pa.array([value for one in plain for value in one.values()], pa.string()),
            ]
        ).take(order)
        return self._map(counts, names, values)

    @staticmethod
    def _map(counts: Ints, names: pa.StringArray, values: pa.StringArray) -> pa.MapArray:
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        return pa.MapArray.from_arrays(numbers(offsets), names, values)

    def _repeated(self, begins: Ints, split: Ints, row: Ints) -> Ints:
        """Return rows in which a name may be there twice, or that have very many."""
        if not len(begins):
            return begins
        lengths = split - begins
        words = gather(self._text, begins, ">u8").astype(np.uint64)
        short = lengths < 8
        words[short] >>= (8 * (8 - lengths[short])).astype(np.uint64)
        tails = gather(self._text, np.maximum(split - 8, 0), ">u8").astype(np.uint64)
        tails[short] = 0
        marks = words * np.uint64(31) + tails * np.uint64(1_000_003) + lengths.astype(np.uint64)
        counts = np.bincount(row, minlength=self.rows)
        repeated = [np.flatnonzero(counts > _MOST_COMPARED)]
        for distance in range(1, min(int(counts.max()), _MOST_COMPARED)):
            same = (row[distance:] == row[:-distance]) & (marks[distance:] == marks[:-distance])
            repeated.append(row[distance:][same])
        return np.unique(np.concatenate(repeated))


def _as_text(array: pa.BinaryArray) -> pa.StringArray:
    """Return bytes that are known to be UTF-8."""
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers())


def _number(name: str, kind: pa.DataType) -> tuple[pa.DataType, Callable[[Block], pa.Array]]:
    return kind, lambda block: numbers(block.field(name))


def _time(name: str) -> tuple[pa.DataType, Callable[[Block], pa.Array]]:
    def micros(block: Block) -> pa.Array:
        values = block.field(name)
        np.clip(values, -LAST_MS, LAST_MS, out=values)
        values *= 1000
        return numbers(values).view(TIMESTAMP)

    return TIMESTAMP, micros


def _property(name: str) -> tuple[pa.DataType, Callable[[Block], pa.Array]]:
    return pa.string(), lambda block: block.properties.value(name)


TIMESTAMP: Final = pa.timestamp("us", "UTC")
MAP: Final = pa.map_(pa.string(), pa.string())

COLUMNS: Final[dict[str, tuple[pa.DataType, Callable[[Block], pa.Array]]]] = {
    "topic": (pa.string(), Block.topic),
    "queueId": _number("queue_id", pa.int32()),
    "queueOffset": _number("queue_offset", pa.int64()),
    "physicalOffset": _number("physical_offset", pa.int64()),
    "bornTimestamp": _time("born_timestamp"),
    "storeTimestamp": _time("store_timestamp"),
    "tags": _property(record.PROPERTY_TAGS),
    "keys": _property(record.PROPERTY_KEYS),
    "uniqueKey": _property(record.PROPERTY_UNIQUE_KEY),
    "properties": (MAP, lambda block: block.properties.map()),
    "body": (pa.binary(), lambda block: block.body()[0]),
    "reconsumeTimes": _number("reconsume_times", pa.int32()),
    "sysFlag": _number("sys_flag", pa.int32()),
    "size": _number("size", pa.int32()),
    "flag": _number("flag", pa.int32()),
    "bornHost": (pa.string(), lambda block: block.host("born_host")),
    "storeHost": (pa.string(), lambda block: block.host("store_host")),
    "preparedTransactionOffset": _number("prepared_offset", pa.int64()),
    "bodyCrc": (pa.int64(), lambda block: numbers(block.field("body_crc").astype(np.int64))),
    "storedBody": (pa.binary(), Block.stored_body),
    "propertiesString": (pa.string(), lambda block: block.properties.stored()),
}
"""What can be read of a record, by the names of the Spark columns."""

FIXED_COLUMNS: Final = frozenset(
    (
        "queueId", "queueOffset", "physicalOffset", "bornTimestamp", "storeTimestamp", "reconsumeTimes", "sysFlag",
        "size", "flag", "bornHost", "storeHost", "preparedTransactionOffset", "bodyCrc",
    )
)  # fmt: skip
"""Columns from the fixed part of a record."""
