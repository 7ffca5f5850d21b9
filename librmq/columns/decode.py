"""Log records as Arrow columns, without a Python object for each message.

::

    places, sizes ──> Block: header fields read by numpy, frames checked like `record.frame`
                        │
                        ├─ numbers, times      gathered from the fixed part (IPv6 hosts shift what follows them)
                        ├─ topic, body         slices of the mapped file: its bytes as an Arrow buffer, then `take`
                        ├─ hosts               each distinct host formatted once
                        └─ Properties          the property strings of the block side by side; segments by their
                                               separators; a named property by the 8-byte words at segment starts

Every byte string decodes to the same values as by `record.decode_record` and `record.decode_properties`. These
functions decode the unusual rows one by one: text that is not UTF-8, a property that occurs twice, a compressed body.
Blocks of 4,000 to 16,000 records fit into the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from librmq.columns.arrays import Bytes, Ints, Mask, gather, numbers, replaced, slices, texts
from librmq.columns.properties import Properties
from librmq.errors import BodyCompressionError, RecordError
from librmq.message import record
from librmq.message.checksum import crc32
from librmq.message.message import DECOMPRESSED_LIMIT
from librmq.runtime.core import CORE

__all__ = ["COLUMNS", "FIXED_COLUMNS", "HEADER", "LAST_MS", "MAP", "TIMESTAMP", "Block"]

HEADER: Final = np.dtype(
    [(name, {"8s": "V8"}.get(code, f">{code}")) for name, code in (record.LAYOUT | {"body_crc": "I"}).items()]
)
"""`record.LAYOUT` as a numpy type: everything before the body, with IPv4 hosts."""
LAST_MS: Final = ((1 << 63) - 1) // 1000
"""The largest time that Spark's timestamp can hold."""


class Block:
    """Some records of one file. Rows outside of `sound` have no valid values."""

    def __init__(self, raw: Bytes, places: Ints, sizes: Ints | None = None, *, frames: bool = True) -> None:
        """Look at the records at ``places`` in ``raw``, of at least `record.FIXED_SIZE` bytes; a place may be invalid.

        With ``sizes``, a record of another length is not sound. Without ``frames`` only size and magic are checked,
        which is enough to read fields of the fixed part.
        """
        self._raw = raw
        self.places = places
        self._sizes = sizes
        self._frames = frames
        self.sound: Mask
        """Mask of the rows that `record.frame` accepts."""
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
        """Return what is wrong with an unsound row."""
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
        """Return a block of these rows only."""
        sizes = None if self._sizes is None else self._sizes[rows]
        return Block(self._raw, self.places[rows], sizes, frames=self._frames)

    # ----------------------------------------------------------------------------------------- numbers, texts, bodies

    def field(self, name: str) -> npt.NDArray[Any]:
        """Return a field of the fixed part in native byte order."""
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
                # There are few distinct hosts: format each once.
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
        """Return the bodies as stored."""
        return self._slices(*self._body)

    def body(self) -> tuple[pa.BinaryArray, dict[int, RecordError]]:
        """Return the bodies as sent, null where one can't be restored, and the reasons by row."""
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
        return replaced(stored, packed, values), bad

    def bad_checksums(self) -> dict[int, RecordError]:
        """Return the errors of rows whose stored body does not match its checksum."""
        begins, ends = self._body
        expected = self._head["body_crc"]
        found = _checksums(self._raw, begins, ends).astype(np.int64) & 0x7FFFFFFF
        wrong = (found != self._head["body_crc"]) & self.sound & (ends > begins)
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


def _checksums(raw: Bytes, begins: Ints, ends: Ints) -> npt.NDArray[np.uint32]:
    """Return the CRC-32 of each part of ``raw``."""
    if CORE is not None:
        return np.frombuffer(CORE.checksums(raw, begins, ends), np.uint32)
    view = raw.data
    return np.array([crc32(view[a:b]) for a, b in zip(begins.tolist(), ends.tolist(), strict=True)], np.uint32)


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
"""The columns that a record can fill, by their names in Spark."""

FIXED_COLUMNS: Final = frozenset(
    (
        "queueId", "queueOffset", "physicalOffset", "bornTimestamp", "storeTimestamp", "reconsumeTimes", "sysFlag",
        "size", "flag", "bornHost", "storeHost", "preparedTransactionOffset", "bodyCrc",
    )
)  # fmt: skip
"""Columns from the fixed part of a record."""
