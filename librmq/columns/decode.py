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

import io
from collections.abc import Callable
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from librmq.columns.arrays import Bytes, Ints, Mask, gather, numbers, offsets_and_bytes, replaced, slices, texts
from librmq.columns.properties import Properties
from librmq.errors import BodyCompressionError, RecordError
from librmq.message import record
from librmq.message.message import DECOMPRESSED_LIMIT
from librmq.message.record import crc32
from librmq.runtime.core import CORE

HEADER: Final = np.dtype(
    [(name, {"8s": "V8"}.get(code, f">{code}")) for name, code in (record.LAYOUT | {"body_crc": "I"}).items()]
)
"""`record.LAYOUT` as a numpy type: everything before the body, with IPv4 hosts."""
LAST_MS: Final = ((1 << 63) - 1) // 1000
"""The largest time that Spark's timestamp can hold."""
_SHORT_BODY: Final = 512
"""Most bytes of a body that is copied to compute its checksum, on average of a block."""


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
        # Fields of several tests are taken out of the headers once.
        size, self._flags = head["size"].astype(np.int64), head["sys_flag"].astype(np.int32)
        end = at + size
        first = head["magic"] == record.MESSAGE_MAGIC
        second = None if first.all() else head["magic"] == record.MESSAGE_MAGIC_V2
        sound &= (size >= record.FIXED_SIZE) & (end <= limit)
        if second is not None:
            sound &= first | second
            second = second if second.any() else None
        if self._sizes is not None:
            sound &= size == self._sizes
        self.sound = sound
        self._born_shift = self._store_shift = None
        body_at = at + record.BODY_AT
        lengths: Any = 3 if second is None else np.where(second, 4, 3)  # of topic and properties
        if (self._flags & record.HOSTS_V6).any():
            self._born_shift = record.HOST_V6_EXTRA * ((self._flags & record.BORN_HOST_V6) != 0).astype(np.int64)
            shift = record.HOST_V6_EXTRA * ((self._flags & record.STORE_HOST_V6) != 0).astype(np.int64)
            self._store_shift = self._born_shift + shift
            body_at = body_at + self._store_shift
            sound &= body_at + lengths <= end
        if not self._frames:
            return
        if self._store_shift is None:
            body_length = head["body_length"].astype(np.int64)
        else:
            body_length = gather(raw, np.where(sound, body_at - 4, 0), ">i4").astype(np.int64)
        body_end = body_at + np.maximum(body_length, 0)
        sound &= body_end + lengths <= end
        topic_at = body_end + 1
        topic_length = raw[self._of_sound(body_end)].astype(np.int64)
        max_size: Any = record.MAX_TOPIC_SIZE
        if second is not None:
            wide = gather(raw, np.where(sound & second, body_end, 0), ">u2").astype(np.int64)
            topic_length = np.where(second, wide, topic_length)
            topic_at = topic_at + second
            max_size = np.where(second, record.MAX_TOPIC_SIZE_V2, max_size)
        topic_end = topic_at + topic_length
        sound &= (topic_length <= max_size) & (topic_end + 2 <= end)
        properties_at = topic_end + 2
        properties_length = gather(raw, self._of_sound(topic_end), ">u2").astype(np.int64)
        properties_length[properties_length > record.MAX_PROPERTIES_SIZE] = 0
        sound &= properties_at + properties_length == end
        self._body = body_at, body_end
        self._topic = topic_at, topic_end
        self._properties_at = properties_at, end

    def _of_sound(self, positions: Ints) -> Ints:
        """Return ``positions`` with 0 in unsound rows."""
        return positions if self.sound.all() else np.where(self.sound, positions, 0)

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
        at = self._of_sound(at)
        long = (self._flags & bit) != 0
        hosts = np.empty(len(at), object)
        for rows, size in ((np.flatnonzero(~long), 8), (np.flatnonzero(long), 20)):
            if len(rows):
                # There are few distinct hosts: format each once.
                raws = np.ascontiguousarray(gather(self._raw, at[rows], f"V{size}")).view(f"S{size}")
                _, first, which = np.unique(raws, return_index=True, return_inverse=True)
                padded = gather(self._raw, at[rows][first], f"V{size}")
                names = [record.format_host(record.decode_host(host.tobytes())) for host in padded]
                hosts[rows] = np.array(names, object)[which]
        return pa.array(hosts, pa.string())

    def topic(self) -> pa.StringArray:
        """Return the topics in the records."""
        return texts(self._slices(*self._topic))

    @cached_property
    def stored_body(self) -> pa.BinaryArray:
        """The bodies as stored."""
        return self._slices(*self._body)

    def body(self) -> tuple[pa.BinaryArray, dict[int, RecordError]]:
        """Return the bodies as sent, null where one can't be restored, and the reasons by row."""
        stored = self.stored_body
        packed = np.flatnonzero(self.sound & ((self._flags & record.COMPRESSED) != 0))
        bad: dict[int, RecordError] = {}
        values: list[bytes | None] = []
        for row in packed.tolist():
            try:
                flags = int(self._flags[row])
                values.append(record.decompress_body(stored[row].as_py(), flags, DECOMPRESSED_LIMIT))
            except BodyCompressionError as error:
                bad[row] = error
                values.append(None)
        return replaced(stored, packed, values), bad

    def bad_checksums(self) -> dict[int, RecordError]:
        """Return the errors of rows whose stored body does not match its checksum."""
        expected = self._head["body_crc"]
        checksums = self._checksums().astype(np.int64) & 0x7FFFFFFF
        begins, ends = self._body
        wrong = (checksums != expected) & self.sound & (ends > begins)
        return {
            int(row): RecordError(f"body checksum: expected {expected[row]:08x}, found {checksums[row]:08x}", 8)
            for row in np.flatnonzero(wrong)
        }

    def _checksums(self) -> npt.NDArray[np.uint32]:
        """Return the CRC-32 of each stored body."""
        begins, ends = self._body
        if CORE is not None:
            return np.frombuffer(CORE.checksums(self._raw, begins, ends), np.uint32)
        offsets, data = offsets_and_bytes(self.stored_body)
        if len(data) > _SHORT_BODY * len(self):
            view = self._raw.data
            checksums = [crc32(view[a:b]) for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]
            return np.array(checksums, np.uint32)
        # A copy of few bytes costs less than a view.
        bodies = map(io.BytesIO(data.data).read, np.diff(offsets).tolist())
        return np.fromiter(map(crc32, bodies), np.uint32, len(self))

    @cached_property
    def properties(self) -> Properties:
        """Return the properties."""
        return Properties(self._raw, *self._sound_only(*self._properties_at))

    def _sound_only(self, begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
        return self._of_sound(begins), self._of_sound(ends)

    def _slices(self, begins: Ints, ends: Ints) -> pa.BinaryArray:
        return slices(self._raw, *self._sound_only(begins, ends))

    def column(self, name: str) -> pa.Array:
        """Return a column by its name in `COLUMNS`."""
        return COLUMNS[name][1](self)


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
    "storedBody": (pa.binary(), lambda block: block.stored_body),
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
