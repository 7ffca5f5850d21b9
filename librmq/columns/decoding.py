"""Log records as Arrow columns, without a Python object for each message, and the columns of each view.

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
If all rows have the names of the first row in its order, as one producer writes them, only its names are read. Blocks
of 4,000 to 16,000 records fit into the processor's cache.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from librmq.columns.arrays import (
    Bytes,
    Ints,
    Mask,
    known_text,
    not_utf8,
    numbers,
    offsets_and_bytes,
    replaced,
    slices,
    texts,
)
from librmq.columns.options import ReadOptions, View
from librmq.errors import BodyCompressionError, RecordError
from librmq.message import record
from librmq.message.ids import decode_host, format_host
from librmq.message.properties import PropertyName, decode_properties
from librmq.runtime.compiled_core import CORE

# ---- properties: one by its name, or maps of all

_MOST_COMPARED: Final = 24
"""Rows with more properties are decoded one by one; array operations compare the properties of the others."""
_WORD: Final = 8
_MASKS: Final = np.array([(1 << 8 * size) - 1 for size in range(_WORD + 1)], np.uint64)
"""The bits of a little-endian word that a name of this many bytes fills."""


def _stored_name(name: str) -> bytes | None:
    """Return the bytes of a property's name, None if no stored property can have it."""
    stored = name.encode("utf-8", "replace")
    return stored if stored and not {1, 2} & {*stored} else None


class Properties:
    """The stored properties of many messages."""

    def __init__(self, raw: Bytes, begins: Ints, ends: Ints) -> None:
        """Read the properties from each of ``begins`` to its end in ``raw``."""
        self.rows = rows = len(begins)
        first, last = (int(begins.min()), int(ends.max())) if rows else (0, 0)
        if last + _WORD > len(raw):
            raw = np.append(raw[first:], np.zeros(_WORD, np.uint8))
            begins, ends, last = begins - first, ends - first, last - first
        self._whole = raw, begins, ends
        # Include the byte after each, and overwrite it with a separator, so that each segment ends with one; a row that
        # ends with a separator needs no other. One more word is for reads at the end.
        until = ends + ((raw[ends - 1] != 2) | (ends == begins))
        offsets, data = offsets_and_bytes(slices(raw, np.append(begins, last), np.append(until, last + _WORD)))
        self._text = np.require(data, requirements="W")
        self._row_begins, self._row_ends = offsets[:-2], offsets[1:-1] - 1
        self._text[self._row_ends] = 2
        self._text[offsets[-2] :] = 0
        self._ends = np.flatnonzero(self._text == 2)
        self._begins = np.empty_like(self._ends)
        self._begins[:1] = 0
        np.add(self._ends[:-1], 1, out=self._begins[1:])

    @cached_property
    def _splits(self) -> Ints:
        """The first 01 of each segment, which ends its name; else the end of the segment."""
        if self._names:
            sizes = np.array(list(map(len, self._names)))
            return np.ravel(self._begins.reshape(-1, self._width) + sizes)
        ones = np.flatnonzero(self._text == 1)
        if len(ones) == len(self._ends) and (ones >= self._begins).all() and (ones < self._ends).all():
            return ones
        following: Ints = np.append(ones, len(self._text))[np.searchsorted(ones, self._begins)]
        return np.minimum(following, self._ends)

    @cached_property
    def _width(self) -> int:
        """The number of segments in each row, if it is the same in all; else 0."""
        width, remainder = divmod(len(self._ends), max(self.rows, 1))
        return 0 if remainder or not width or (self._ends[width - 1 :: width] != self._row_ends).any() else width

    @cached_property
    def _row(self) -> Ints:
        if self._width:
            return np.repeat(np.arange(self.rows), self._width)
        segments = np.diff(np.searchsorted(self._ends, self._row_ends), prepend=-1)
        return np.repeat(np.arange(self.rows), segments)

    @cached_property
    def _names(self) -> list[bytes]:
        """The names in each row, if all rows have the first row's names in the same order, each once; else none."""
        count = self._width
        if not count or count > _MOST_COMPARED:
            return []
        row = self._text[: self._row_ends[0] + 1].tobytes()
        parts = [part.partition(b"\1") for part in row.split(b"\2")[:-1]]
        names, starts = [name for name, _, _ in parts], [name + split for name, split, _ in parts]
        if not all(split for _, split, _ in parts) or len({*names} - {b""}) < count - names.count(b""):
            return []
        sizes = np.array([len(start) for start in starts])
        words = self._words.reshape(-1, count)
        if ((words ^ words[0]) & _MASKS[np.minimum(sizes, _WORD)]).any():
            return []
        for column, start in enumerate(starts):
            for at in range(_WORD, len(start), _WORD):  # the last word overlaps the one before it
                word = record.gather(self._text, self._begins[column::count] + min(at, len(start) - _WORD), "<u8")
                if (word != word[0]).any():
                    return []
        return names

    @cached_property
    def _words(self) -> npt.NDArray[np.uint64]:
        """The first 8 bytes of each segment."""
        return record.gather(self._text, self._begins, "<u8")

    @cached_property
    def _stored(self) -> pa.BinaryArray:
        return slices(*self._whole)

    def _plain(self, row: int) -> dict[str, str]:
        """Return a row decoded by `record.decode_properties`."""
        return decode_properties(self._text[self._row_begins[row] : self._row_ends[row]].tobytes())

    def value(self, name: str) -> pa.StringArray:
        """Return the values of one property, null where a message has none."""
        needle = _stored_name(name)
        unusual = self._unusual_names
        if needle in self._names and not len(unusual):
            column, width = self._names.index(needle), self._width
            begins, ends = self._begins[column::width] + len(needle) + 1, self._ends[column::width]
            if (begins < ends).all():
                return self._texts(begins, ends)
        if needle is None:
            rows = begins = ends = np.zeros(0, np.int64)
        else:
            rows, begins, ends = self._values_of(needle + b"\1")
        values = self._texts(begins, ends)
        if len(rows) == self.rows and not len(unusual) and (rows[1:] > rows[:-1]).all():
            return values  # every message has the property once
        where = np.zeros(self.rows, np.int64)
        present = np.zeros(self.rows, np.bool_)
        where[rows] = np.arange(len(rows))  # if a property occurs twice, the last one counts
        present[rows] = True
        plain = [self._plain(int(row)).get(name) for row in unusual]
        return replaced(values.take(numbers(where, present)), unusual, plain)

    def _values_of(self, needle: bytes) -> tuple[Ints, Ints, Ints]:
        """Return row, begin and end of every non-empty value after ``needle`` at the start of a segment."""
        size = len(needle)
        prefix = np.uint64(int.from_bytes(needle[:_WORD], "little"))
        hits = np.flatnonzero((self._words & _MASKS[min(size, _WORD)]) == prefix)
        hits = hits[self._ends[hits] - self._begins[hits] > size]
        for at in range(_WORD, size):
            hits = hits[self._text[self._begins[hits] + at] == needle[at]]
        return self._row[hits], self._begins[hits] + size, self._ends[hits]

    @cached_property
    def _is_ascii(self) -> bool:
        return int(self._text.max()) < 0x80

    def _texts(self, begins: Ints, ends: Ints) -> pa.StringArray:
        raw = slices(self._text, begins, ends)
        return known_text(raw) if self._is_ascii else texts(raw)

    @cached_property
    def _unusual_names(self) -> Ints:
        """Return the rows that are not UTF-8, whose names are known only after decoding."""
        if self._is_ascii:
            return np.zeros(0, np.int64)
        return np.flatnonzero(not_utf8(self._stored))

    def stored_texts(self) -> pa.StringArray:
        """Return the properties of each record as stored, as one text."""
        return texts(self._stored)

    def map(self) -> pa.MapArray:
        """Return all properties of each message, in stored order."""
        text, begins, ends, split = self._text, self._begins, self._ends, self._splits
        unusual = self._unusual_names
        nonempty = ends - split > 1
        if not self._names or b"" in self._names:
            nonempty &= split > begins
        elif not len(unusual) and nonempty.all():
            counts = np.full(self.rows, len(self._names))
            return self._map_of(counts, self._repeated_names(), known_text(slices(text, split + 1, ends)))
        row = self._row
        if not nonempty.all():
            begins, ends, split, row = begins[nonempty], ends[nonempty], split[nonempty], row[nonempty]
        if not self._names:
            unusual = np.union1d(unusual, self._repeated(begins, split, row))
        if not len(unusual):
            names = slices(text, begins, split)
            values = slices(text, split + 1, ends)
            return self._map_of(np.bincount(row, minlength=self.rows), known_text(names), known_text(values))
        regular = ~np.isin(row, unusual)
        begins, ends, split, row = begins[regular], ends[regular], split[regular], row[regular]
        plain = [self._plain(int(properties)) for properties in unusual]
        counts = np.bincount(row, minlength=self.rows)
        counts[unusual] = [len(properties) for properties in plain]
        # Rows decoded singly are appended; a stable sort by row puts them in their places.
        row = np.concatenate((row, np.repeat(unusual, counts[unusual])))
        order = numbers(np.argsort(row, kind="stable"))
        names, values = (
            pa.concat_arrays([known_text(slices(text, first, last)), pa.array(of_plain, pa.string())]).take(order)
            for first, last, of_plain in (
                (begins, split, [name for properties in plain for name in properties]),
                (split + 1, ends, [value for properties in plain for value in properties.values()]),
            )
        )
        return self._map_of(counts, names, values)

    def _repeated_names(self) -> pa.StringArray:
        """Return the names of all rows, which equal the first row's."""
        data = np.frombuffer(b"".join(self._names), np.uint8)
        ends = np.cumsum([len(name) for name in self._names])
        offsets = np.zeros(self.rows * len(ends) + 1, np.int32)
        np.add.outer(np.arange(self.rows) * len(data), ends, out=offsets[1:].reshape(-1, len(ends)), casting="unsafe")
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.tile(data, self.rows))]
        return pa.Array.from_buffers(pa.string(), len(offsets) - 1, buffers)

    @staticmethod
    def _map_of(counts: Ints, names: pa.StringArray, values: pa.StringArray) -> pa.MapArray:
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        return pa.MapArray.from_arrays(numbers(offsets), names, values)

    def _repeated(self, begins: Ints, split: Ints, row: Ints) -> Ints:
        """Return rows in which a name may occur twice, or that have very many properties."""
        if not len(begins):
            return begins
        lengths = split - begins
        words = record.gather(self._text, begins, "<u8") & _MASKS[np.minimum(lengths, _WORD)]
        tails = record.gather(self._text, np.maximum(split - _WORD, 0), "<u8")
        tails[lengths < _WORD] = 0
        marks = words * np.uint64(31) + tails * np.uint64(1_000_003) + lengths.astype(np.uint64)
        counts = np.bincount(row, minlength=self.rows)
        repeated = [np.flatnonzero(counts > _MOST_COMPARED)]
        for distance in range(1, min(int(counts.max()), _MOST_COMPARED)):
            same = (row[distance:] == row[:-distance]) & (marks[distance:] == marks[:-distance])
            repeated.append(row[distance:][same])
        return np.unique(np.concatenate(repeated))


HEADER: Final = record.header_dtype()
"""`record.LAYOUT` as a numpy type: everything before the body, with IPv4 hosts."""
LAST_MS: Final = ((1 << 63) - 1) // 1000
"""The largest time that Spark's timestamp can hold."""
_SHORT_BODY: Final = 512
"""Most bytes of a body that is copied to compute its checksum, on average of a block."""


class Block:
    """Some records of one file. Rows outside of `sound` have no valid values."""

    def __init__(
        self,
        raw: Bytes,
        places: Ints,
        sizes: Ints | None = None,
        *,
        frames: bool = True,
        fields: Iterable[str] = (),
    ) -> None:
        """Look at the records at ``places`` in ``raw``, of at least `record.FIXED_SIZE` bytes; a place may be invalid.

        With ``sizes``, a record of another length is not sound. Without ``frames`` only size and magic are checked,
        which is enough to read fields of the fixed part. Those in ``fields`` are read at once; others later cost more.
        """
        self._raw = raw
        self.places = places
        self._sizes = sizes
        self._frames = frames
        self._fields = frozenset(fields)
        self.sound: Mask
        """Mask of the rows that `record.frame` accepts."""
        self._check_frames()

    def __len__(self) -> int:
        return len(self.places)

    def _check_frames(self) -> None:
        raw, places, sizes = self._raw, self.places, self._sizes
        self._born_shift = self._store_shift = None
        if self._frames and sizes is not None and CORE.frames is not None:
            ends = CORE.frames(raw, np.ascontiguousarray(places), np.ascontiguousarray(sizes))
            if ends is not None:  # usual records, all of them
                body_end, topic_end = (np.frombuffer(part, np.int64) for part in ends)
                self._at, self.sound = places, np.ones(len(places), np.bool_)
                self._head = record.fields_at(raw, places, self._fields)
                self._body = places + record.BODY_AT, body_end
                self._topic = body_end + 1, topic_end
                self._properties_at = topic_end + 2, places + sizes
                return
        limit = len(raw)
        sound = (places >= 0) & (places <= limit - record.FIXED_SIZE)
        at = places if sound.all() else np.where(sound, places, 0)
        self._at = at
        tested = ("size", "magic", "sys_flag", "body_length") if self._frames else ("size", "magic", "sys_flag")
        head = self._head = record.fields_at(raw, at, self._fields.union(tested))
        size, flags = head["size"].astype(np.int64), head["sys_flag"]
        end = at + size
        first = head["magic"] == record.MESSAGE_MAGIC
        second = None if first.all() else head["magic"] == record.MESSAGE_MAGIC_V2
        sound &= (size >= record.FIXED_SIZE) & (end <= limit)
        if second is not None:
            sound &= first | second
            second = second if second.any() else None
        if sizes is not None:
            sound &= size == sizes
        self.sound = sound
        body_at = at + record.BODY_AT
        lengths: Any = 3 if second is None else np.where(second, 4, 3)  # of topic and properties
        if (flags & record.HOSTS_V6).any():
            self._born_shift = record.HOST_V6_EXTRA * ((flags & record.BORN_HOST_V6) != 0).astype(np.int64)
            shift = record.HOST_V6_EXTRA * ((flags & record.STORE_HOST_V6) != 0).astype(np.int64)
            self._store_shift = self._born_shift + shift
            body_at = body_at + self._store_shift
            sound &= body_at + lengths <= end
        if not self._frames:
            return
        if self._store_shift is None:
            body_length = head["body_length"].astype(np.int64)
        else:
            body_length = record.gather(raw, np.where(sound, body_at - 4, 0), ">i4").astype(np.int64)
        body_end = body_at + np.maximum(body_length, 0)
        sound &= body_end + lengths <= end
        topic_at = body_end + 1
        topic_length = raw[self._of_sound(body_end)].astype(np.int64)
        max_size: Any = record.MAX_TOPIC_SIZE
        if second is not None:
            wide = record.gather(raw, np.where(sound & second, body_end, 0), ">u2").astype(np.int64)
            topic_length = np.where(second, wide, topic_length)
            topic_at = topic_at + second
            max_size = np.where(second, record.MAX_TOPIC_SIZE_V2, max_size)
        topic_end = topic_at + topic_length
        sound &= (topic_length <= max_size) & (topic_end + 2 <= end)
        properties_at = topic_end + 2
        properties_length = record.gather(raw, self._of_sound(topic_end), ">u2").astype(np.int64)
        properties_length[properties_length > record.MAX_PROPERTIES_SIZE] = 0
        sound &= properties_at + properties_length == end
        self._body = body_at, body_end
        self._topic = topic_at, topic_end
        self._properties_at = properties_at, end

    def _of_sound(self, positions: Ints) -> Ints:
        """Return ``positions`` with 0 in unsound rows."""
        return positions if self.sound.all() else np.where(self.sound, positions, 0)

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
        if self._sizes[row] == self.field("size")[row]:
            return RecordError("expected the record of this queue offset, found one that names another")
        return RecordError(f"expected a record of {self._sizes[row]} bytes, found {self.field('size')[row]}")

    def has_topics(self, sizes: Ints, ends: npt.NDArray[np.uint64]) -> Mask:
        """Return which records have topics of these sizes, that end in these bytes, at most eight as a number."""
        at, end = self._topic
        last = record.gather(self._raw, self._of_sound(end - _WORD), ">u8")
        same: Mask = (end - at == sizes) & ((last & _MASKS[np.minimum(sizes, _WORD)]) == ends)
        return same

    def record(self, row: int) -> bytes:
        """Return the bytes of a sound record."""
        at = int(self._at[row])
        return self._raw[at : at + int(self.field("size")[row])].tobytes()

    def take(self, rows: Ints) -> Block:
        """Return a block of these rows only."""
        sizes = None if self._sizes is None else self._sizes[rows]
        return Block(self._raw, self.places[rows], sizes, frames=self._frames, fields=self._fields)

    # ----------------------------------------------------------------------------------------- numbers, texts, bodies

    def field(self, name: str) -> npt.NDArray[Any]:
        """Return a field of the fixed part in native byte order, which no caller changes."""
        shift = self._born_shift if name == "store_timestamp" else self._store_shift
        if name in ("store_timestamp", "reconsume_times", "prepared_offset") and shift is not None:
            kind, at = HEADER.fields[name][:2]  # type: ignore[index]
            where = np.where(self.sound, self._at + at + shift, 0)
            return record.gather(self._raw, where, kind.str).astype(kind.newbyteorder("="))
        if name not in self._head:
            self._head |= record.fields_at(self._raw, self._at, (name,))
        return self._head[name]

    def host(self, name: str) -> pa.StringArray:
        """Return ``born_host`` or ``store_host`` as texts."""
        at = self._at + (record.BORN_HOST_AT if name == "born_host" else record.STORE_HOST_AT)
        bit = record.BORN_HOST_V6 if name == "born_host" else record.STORE_HOST_V6
        if name == "store_host" and self._born_shift is not None:
            at = at + self._born_shift
        at = self._of_sound(at)
        long = (self.field("sys_flag") & bit) != 0
        hosts = np.empty(len(at), object)
        for rows, size in ((np.flatnonzero(~long), 8), (np.flatnonzero(long), 20)):
            if len(rows):
                # There are few distinct hosts: format each once.
                raws = np.ascontiguousarray(record.gather(self._raw, at[rows], f"V{size}")).view(f"S{size}")
                _, first, which = np.unique(raws, return_index=True, return_inverse=True)
                padded = record.gather(self._raw, at[rows][first], f"V{size}")
                names = [format_host(decode_host(host.tobytes())) for host in padded]
                hosts[rows] = np.array(names, object)[which]
        return pa.array(hosts, pa.string())

    def topics(self) -> pa.StringArray:
        """Return the topics in the records."""
        return texts(self._slices(self._topic))

    @cached_property
    def stored_body(self) -> pa.BinaryArray:
        """The bodies as stored."""
        return self._slices(self._body)

    def bodies(
        self, most_bytes: int, *, checksums: bool
    ) -> Iterator[tuple[slice, pa.BinaryArray, dict[int, RecordError]]]:
        """Yield runs of rows with their bodies as sent, and the reasons by row of those that can't be restored.

        A run ends when its decompressed bodies have ``most_bytes``, so a few small records can fill several. With
        ``checksums`` also the rows whose stored body does not match its checksum have a reason.
        """
        stored, wrong = self.stored_body, self.bad_checksums() if checksums else {}
        begin, size, packed = 0, 0, list[int]()
        values, bad = list[bytes | None](), dict[int, RecordError]()

        def run(end: int) -> tuple[slice, pa.BinaryArray, dict[int, RecordError]]:
            reasons = bad | {row: why for row, why in wrong.items() if begin <= row < end}
            bodies = replaced(stored[begin:end], np.array(packed, np.int64) - begin, values)
            return slice(begin, end), bodies, {row - begin: why for row, why in reasons.items()}

        flags = self.field("sys_flag")
        for row in np.flatnonzero(self.sound & ((flags & record.COMPRESSED) != 0)).tolist():
            packed.append(row)
            try:
                raw, sys_flag = stored[row].as_py(), int(flags[row])
                values.append(body := record.decompress_body(raw, sys_flag, record.DECOMPRESSED_LIMIT))
                size += len(body)
            except BodyCompressionError as error:
                bad[row] = error
                values.append(None)
            if size >= most_bytes:
                yield run(row + 1)
                begin, size, packed, values, bad = row + 1, 0, [], [], {}
        if begin < len(self) or not begin:
            yield run(len(self))

    def bad_checksums(self) -> dict[int, RecordError]:
        """Return the errors of rows whose stored body, or whole record, does not match its checksum."""
        expected = self.field("body_crc")
        checksums = self._checksums().astype(np.int64) & 0x7FFFFFFF
        begins, ends = self._body
        wrong = (checksums != expected) & self.sound & (ends > begins)
        errors = {
            int(row): RecordError(f"body checksum: expected {expected[row]:08x}, found {checksums[row]:08x}", 8)
            for row in np.flatnonzero(wrong)
        }
        for row in self._with_own_checksum().tolist():
            try:
                record.check_own_checksum(self._raw.data, int(self._at[row]), int(self._properties_at[1][row]))
            except RecordError as error:
                errors.setdefault(row, error)
        return errors

    def _with_own_checksum(self) -> Ints:
        """Return the rows whose records end in a checksum of themselves."""
        begins, ends = self._properties_at
        rows = np.flatnonzero(self.sound & (ends - begins >= record.OWN_CHECKSUM_SIZE))
        rows = rows[self._raw[ends[rows] - 1] == ord(b"\2")]
        names = record.gather(self._raw, ends[rows] - record.OWN_CHECKSUM_SIZE, ">u8")
        checksummed: Ints = rows[names == int.from_bytes(record.OWN_CHECKSUM[:8])]
        return checksummed

    def _checksums(self) -> npt.NDArray[np.uint32]:
        """Return the CRC-32 of each stored body."""
        begins, ends = self._body
        if CORE.checksums is not None:
            return np.frombuffer(CORE.checksums(self._raw, begins, ends), np.uint32)
        offsets, data = offsets_and_bytes(self.stored_body)
        if len(data) > _SHORT_BODY * len(self):
            view = self._raw.data
            checksums = [record.crc32(view[a:b]) for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]
            return np.array(checksums, np.uint32)
        # A copy of few bytes costs less than a view.
        bodies = map(io.BytesIO(data.data).read, np.diff(offsets).tolist())
        return np.fromiter(map(record.crc32, bodies), np.uint32, len(self))

    @cached_property
    def properties(self) -> Properties:
        """Return the properties."""
        return Properties(self._raw, *map(self._of_sound, self._properties_at))

    def property(self, name: str) -> pa.StringArray:
        """Return the values of one property, null where a message has none."""
        needle = _stored_name(name)
        if needle is None or CORE.property_values is None or "properties" in self.__dict__:
            return self.properties.value(name)
        bounds = CORE.property_values(self._raw, *map(self._of_sound, self._properties_at), needle)
        if bounds is None:
            return self.properties.value(name)
        begins, ends = (np.frombuffer(part, np.int64) for part in bounds)
        values, present = slices(self._raw, begins, ends), begins < ends
        return known_text(values, None if present.all() else present)

    def _slices(self, bounds: tuple[Ints, Ints]) -> pa.BinaryArray:
        return slices(self._raw, *map(self._of_sound, bounds))

    def column(self, name: str) -> pa.Array:
        """Return a column by its name in `COLUMNS`."""
        return COLUMNS[name][1](self)


_Column = tuple[pa.DataType, Callable[[Block], pa.Array]]


def _number(name: str) -> _Column:
    kind = pa.int64() if record.LAYOUT[name] == "q" else pa.int32()
    return kind, lambda block: numbers(block.field(name))


def _time(name: str) -> _Column:
    return TIMESTAMP, lambda block: numbers(np.clip(block.field(name), -LAST_MS, LAST_MS) * 1000).view(TIMESTAMP)


def _property(name: str) -> _Column:
    return pa.string(), lambda block: block.property(name)


TIMESTAMP: Final = pa.timestamp("us", "UTC")
MAP: Final = pa.map_(pa.string(), pa.string())

FIELDS: Final = {
    "queueId": "queue_id", "queueOffset": "queue_offset", "physicalOffset": "physical_offset",
    "bornTimestamp": "born_timestamp", "storeTimestamp": "store_timestamp", "reconsumeTimes": "reconsume_times",
    "sysFlag": "sys_flag", "size": "size", "flag": "flag", "preparedTransactionOffset": "prepared_offset",
    "bodyCrc": "body_crc",
}  # fmt: skip
"""Columns that show a number in the fixed part of a record, and the names of these in `record.LAYOUT`."""
COLUMNS: Final[dict[str, _Column]] = {name: _number(field) for name, field in FIELDS.items()} | {
    "topic": (pa.string(), Block.topics),
    "bornTimestamp": _time("born_timestamp"),
    "storeTimestamp": _time("store_timestamp"),
    "tags": _property(PropertyName.TAGS),
    "keys": _property(PropertyName.KEYS),
    "uniqueKey": _property(PropertyName.UNIQUE_KEY),
    "properties": (MAP, lambda block: block.properties.map()),
    "body": (pa.binary(), lambda block: block.stored_body),  # `Block.bodies` restores compressed ones
    "bornHost": (pa.string(), lambda block: block.host("born_host")),
    "storeHost": (pa.string(), lambda block: block.host("store_host")),
    "bodyCrc": (pa.int64(), lambda block: numbers(block.field("body_crc").astype(np.int64))),
    "storedBody": (pa.binary(), lambda block: block.stored_body),
    "propertiesString": (pa.string(), lambda block: block.properties.stored_texts()),
}
"""The columns that a record can fill, by their names in Spark."""

FIXED_COLUMNS: Final = frozenset((*FIELDS, "bornHost", "storeHost"))
"""Columns from the fixed part of a record."""


# ---- the columns of each view

CORRUPT: Final = "_corrupt_record"
"""The column that says why a record cannot be read, in mode ``PERMISSIVE``."""

TYPES: Final[dict[str, pa.DataType]] = {name: kind for name, (kind, _) in COLUMNS.items()} | {
    "tagsCode": pa.int64(),
    "store": pa.string(),
    CORRUPT: pa.string(),
}
"""The Arrow types of all columns."""

_DEFAULT: Final = (
    "topic", "queueId", "queueOffset", "physicalOffset", "bornTimestamp", "storeTimestamp", "tags", "keys",
    "uniqueKey", "properties", "body", "reconsumeTimes", "sysFlag",
)  # fmt: skip
_OF_ENTRIES: Final = ("topic", "queueId", "queueOffset", "physicalOffset", "size", "tagsCode")
ENTRY_COLUMNS: Final = frozenset((*_OF_ENTRIES, "store"))
"""Columns that the entry of a queue fills, without its record."""


def default_columns(options: ReadOptions) -> list[str]:
    """Return the columns of a read without a schema."""
    columns = list(_OF_ENTRIES if options.view == "queues" else _DEFAULT)
    if options.several:
        columns.append("store")
    if options.mode == "PERMISSIVE":
        columns.append(CORRUPT)
    return columns


def columns_of(view: View) -> set[str]:
    """Return the names of a view's columns."""
    if view == "queues":
        return {*ENTRY_COLUMNS, CORRUPT}
    return set(TYPES) - ({"tagsCode"} if view == "log" else set())
