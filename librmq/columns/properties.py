"""The property strings of many records as columns: one named property, or maps of all of them.

The strings of a block are laid side by side; each separator bounds a segment. A named property is found by the 8-byte
words at the starts of segments. If all rows have the names of the first row in its order, as one producer writes them,
only its names are looked at. `record.decode_properties` decodes the unusual rows: text that is not UTF-8, or a name
that occurs twice.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from librmq.columns.arrays import (
    Bytes,
    Ints,
    gather,
    known_text,
    not_utf8,
    numbers,
    offsets_and_bytes,
    slices,
    texts,
)
from librmq.message import record

_MOST_COMPARED: Final = 24
"""Rows with more properties are decoded one by one; array operations compare the properties of the others."""
_WORD: Final = 8
_MASKS: Final = np.array([(1 << 8 * size) - 1 for size in range(_WORD + 1)], np.uint64)
"""The bits of a little-endian word that a name of this many bytes fills."""


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
            sizes = np.array([len(name) for name in self._names])
            ends: Ints = (self._begins.reshape(-1, len(sizes)) + sizes).ravel()
            return ends
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
        """The row of each segment."""
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
                word = gather(self._text, self._begins[column::count] + min(at, len(start) - _WORD), "<u8")
                if (word != word[0]).any():
                    return []
        return names

    @cached_property
    def _words(self) -> npt.NDArray[np.uint64]:
        """The first 8 bytes of each segment."""
        return gather(self._text, self._begins, "<u8")

    @cached_property
    def _stored(self) -> pa.BinaryArray:
        return slices(*self._whole)

    def _plain(self, row: int) -> dict[str, str]:
        """Return a row decoded by `record.decode_properties`."""
        return record.decode_properties(self._text[self._row_begins[row] : self._row_ends[row]].tobytes())

    def value(self, name: str) -> pa.StringArray:
        """Return the values of one property, null where a message has none."""
        needle = name.encode("utf-8", "replace")
        unusual = self._unusual_names
        if not name or {1, 2} & set(needle):
            rows = begins = ends = np.zeros(0, np.int64)
        elif self._names:
            rows, begins, ends = self._find_in_column(needle)
        else:
            rows, begins, ends = self._values_of(needle + b"\1")
        values = self._texts(begins, ends)
        if len(rows) == self.rows and not len(unusual) and (rows[1:] > rows[:-1]).all():
            return values  # every message has the property once
        where = np.zeros(self.rows, np.int64)
        present = np.zeros(self.rows, np.bool_)
        where[rows] = np.arange(len(rows))  # if a property occurs twice, the last one counts
        present[rows] = True
        column = values.take(numbers(where, present))
        if not len(unusual):
            return column
        plain = [self._plain(int(row)).get(name) for row in unusual]
        where = np.arange(self.rows)
        where[unusual] = self.rows + np.arange(len(unusual))
        return pa.concat_arrays([column, pa.array(plain, pa.string())]).take(numbers(where))

    def _values_of(self, needle: bytes) -> tuple[Ints, Ints, Ints]:
        """Return row, begin and end of every non-empty value after ``needle`` at the start of a segment."""
        size = len(needle)
        prefix = np.uint64(int.from_bytes(needle[:_WORD], "little"))
        hits = np.flatnonzero((self._words & _MASKS[min(size, _WORD)]) == prefix)
        hits = hits[self._ends[hits] - self._begins[hits] > size]
        for at in range(_WORD, size):
            hits = hits[self._text[self._begins[hits] + at] == needle[at]]
        return self._row[hits], self._begins[hits] + size, self._ends[hits]

    def _find_in_column(self, name: bytes) -> tuple[Ints, Ints, Ints]:
        """Return the same where all rows have the same names."""
        if name not in self._names:
            return (np.zeros(0, np.int64),) * 3
        column, count = self._names.index(name), len(self._names)
        begins, ends = self._splits[column::count] + 1, self._ends[column::count]
        rows = np.arange(self.rows)
        some = begins < ends
        return (rows, begins, ends) if some.all() else (rows[some], begins[some], ends[some])

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

    def stored(self) -> pa.StringArray:
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
            return self._map(counts, self._repeated_names(), known_text(slices(text, split + 1, ends)))
        row = self._row
        if not nonempty.all():
            begins, ends, split, row = begins[nonempty], ends[nonempty], split[nonempty], row[nonempty]
        if not self._names:
            unusual = np.union1d(unusual, self._repeated(begins, split, row))
        if not len(unusual):
            names = slices(text, begins, split)
            values = slices(text, split + 1, ends)
            return self._map(np.bincount(row, minlength=self.rows), known_text(names), known_text(values))
        regular = ~np.isin(row, unusual)
        begins, ends, split, row = begins[regular], ends[regular], split[regular], row[regular]
        plain = [self._plain(int(properties)) for properties in unusual]
        counts = np.bincount(row, minlength=self.rows)
        counts[unusual] = [len(properties) for properties in plain]
        # Rows decoded singly are appended; a stable sort by row puts them in their places.
        row = np.concatenate((row, np.repeat(unusual, counts[unusual])))
        order = numbers(np.argsort(row, kind="stable"))
        names = pa.concat_arrays(
            [
                known_text(slices(text, begins, split)),
                pa.array([name for properties in plain for name in properties], pa.string()),
            ]
        ).take(order)
        values = pa.concat_arrays(
            [
                known_text(slices(text, split + 1, ends)),
                pa.array([value for properties in plain for value in properties.values()], pa.string()),
            ]
        ).take(order)
        return self._map(counts, names, values)

    def _repeated_names(self) -> pa.StringArray:
        """Return the names of all rows, which equal the first row's."""
        data = np.frombuffer(b"".join(self._names), np.uint8)
        ends = np.cumsum([len(name) for name in self._names])
        offsets = np.zeros(self.rows * len(ends) + 1, np.int32)
        np.add.outer(np.arange(self.rows) * len(data), ends, out=offsets[1:].reshape(-1, len(ends)), casting="unsafe")
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.tile(data, self.rows))]
        return pa.Array.from_buffers(pa.string(), len(offsets) - 1, buffers)

    @staticmethod
    def _map(counts: Ints, names: pa.StringArray, values: pa.StringArray) -> pa.MapArray:
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        return pa.MapArray.from_arrays(numbers(offsets), names, values)

    def _repeated(self, begins: Ints, split: Ints, row: Ints) -> Ints:
        """Return rows in which a name may occur twice, or that have very many properties."""
        if not len(begins):
            return begins
        lengths = split - begins
        words = gather(self._text, begins, "<u8") & _MASKS[np.minimum(lengths, _WORD)]
        tails = gather(self._text, np.maximum(split - _WORD, 0), "<u8")
        tails[lengths < _WORD] = 0
        marks = words * np.uint64(31) + tails * np.uint64(1_000_003) + lengths.astype(np.uint64)
        counts = np.bincount(row, minlength=self.rows)
        repeated = [np.flatnonzero(counts > _MOST_COMPARED)]
        for distance in range(1, min(int(counts.max()), _MOST_COMPARED)):
            same = (row[distance:] == row[:-distance]) & (marks[distance:] == marks[:-distance])
            repeated.append(row[distance:][same])
        return np.unique(np.concatenate(repeated))
