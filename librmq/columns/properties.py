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

__all__ = ["Properties"]

_MOST_COMPARED: Final = 24
"""Rows with more properties are decoded one by one; array operations compare the properties of the others."""


class Properties:
    """The stored properties of many messages."""

    def __init__(self, raw: Bytes, begins: Ints, ends: Ints) -> None:
        """Read the properties from each of ``begins`` to its end in ``raw``."""
        self.rows = rows = len(begins)
        if rows and int(ends.max()) == len(raw):
            raw = np.append(raw, np.uint8(0))
        # Include the byte after each, and overwrite it with a separator, so that each segment ends with one.
        offsets, data = offsets_and_bytes(slices(raw, begins, ends + 1))
        size = int(offsets[-1])
        self._text = np.zeros(size + 8, np.uint8)  # one more word, for reads at the end
        self._text[:size] = data[:size]
        self._row_begins, row_ends = offsets[:-1].astype(np.int64), offsets[1:].astype(np.int64) - 1
        self._row_ends = row_ends
        self._text[row_ends] = 2
        # Both separators, 01 and 02. The first one after a segment's start ends its name, or the segment.
        separators = np.flatnonzero((self._text[:size] - np.uint8(1)) <= 1)
        closing = np.flatnonzero(self._text[separators] == 2)
        opening = np.concatenate(([0], closing[:-1] + 1)) if len(closing) else closing
        self._ends = separators[closing]
        self._splits = separators[opening]
        self._begins = np.concatenate(([0], self._ends[:-1] + 1)) if len(closing) else closing
        last = np.searchsorted(self._ends, row_ends)
        self._segments = np.diff(last, prepend=-1)
        self._row = np.repeat(np.arange(rows), self._segments)

    @cached_property
    def _alike(self) -> int:
        """The number of segments in each row, if all rows have the names of the first one in the same order; else 0."""
        count = int(self._segments[0]) if self.rows else 0
        if not count or count > _MOST_COMPARED or (self._segments != count).any():
            return 0
        sizes = (self._splits - self._begins).reshape(-1, count)
        first = sizes[0].tolist()
        if (sizes != sizes[0]).any():
            return 0
        words = self._words.reshape(-1, count)
        for column, size in enumerate(first):
            own = words[:, column] & _mask(size)
            if (own != own[0]).any():
                return 0
            for at in range(8, size, 8):  # the last word overlaps the one before it
                rest = gather(self._text, self._begins[column::count] + min(at, size - 8), ">u8")
                if (rest != rest[0]).any():
                    return 0
        names = [self._text[at : at + size].tobytes() for at, size in zip(self._begins[:count], first, strict=True)]
        return count if len(set(names) - {b""}) == count - names.count(b"") else 0

    @cached_property
    def _words(self) -> npt.NDArray[np.uint64]:
        """The first 8 bytes of each segment."""
        return gather(self._text, self._begins, ">u8").astype(np.uint64)

    @cached_property
    def _stored(self) -> pa.BinaryArray:
        return slices(self._text, self._row_begins, self._row_ends)

    def _plain(self, row: int) -> dict[str, str]:
        """Return a row decoded by `record.decode_properties`."""
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
            return values  # every message has the property once
        where = np.zeros(self.rows, np.int64)
        present = np.zeros(self.rows, np.bool_)
        where[rows] = np.arange(len(rows))  # if a property occurs twice, the last one counts
        present[rows] = True
        found = values.take(numbers(where, present))
        if not len(unusual):
            return found
        plain = [self._plain(int(row)).get(name) for row in unusual]
        where = np.arange(self.rows)
        where[unusual] = self.rows + np.arange(len(unusual))
        return pa.concat_arrays([found, pa.array(plain, pa.string())]).take(numbers(where))

    def _find(self, needle: bytes) -> tuple[Ints, Ints, Ints]:
        """Return row, begin and end of every non-empty value after ``needle`` at the start of a segment."""
        head, size = needle[:8], len(needle)
        if self._alike:
            begins = self._begins[: self._alike].tolist()
            hits = np.flatnonzero([self._text[at : at + size].tobytes() == needle for at in begins])
            hits = (np.arange(0, len(self._begins), self._alike)[:, None] + hits).ravel()
            hits = hits[self._ends[hits] - self._begins[hits] > size]
            return self._row[hits], self._begins[hits] + size, self._ends[hits]
        wanted = int.from_bytes(head.ljust(8, b"\0"), "big")
        hits = np.flatnonzero((self._words & _mask(size)) == np.uint64(wanted))
        hits = hits[self._ends[hits] - self._begins[hits] > size]
        for at in range(8, size):
            hits = hits[self._text[self._begins[hits] + at] == needle[at]]
        return self._row[hits], self._begins[hits] + size, self._ends[hits]

    @cached_property
    def _unusual_names(self) -> Ints:
        """Return the rows that are not UTF-8, whose names are known only after decoding."""
        if not len(self._text) or int(self._text.max()) < 0x80:
            return np.zeros(0, np.int64)
        return np.flatnonzero(not_utf8(self._stored))

    def stored(self) -> pa.StringArray:
        """Return the properties of each record as stored, as one text."""
        return texts(self._stored)

    def map(self) -> pa.MapArray:
        """Return all properties of each message, in stored order."""
        text, begins, ends, split, row = self._text, self._begins, self._ends, self._splits, self._row
        kept = (split > begins) & (split < ends - 1)
        if not kept.all():
            begins, ends, split, row = begins[kept], ends[kept], split[kept], row[kept]
        unusual = self._unusual_names
        if not self._alike:
            unusual = np.union1d(unusual, self._repeated(begins, split, row))
        if not len(unusual):
            names = slices(text, begins, split)
            values = slices(text, split + 1, ends)
            return self._map(np.bincount(row, minlength=self.rows), known_text(names), known_text(values))
        usual = ~np.isin(row, unusual)
        begins, ends, split, row = begins[usual], ends[usual], split[usual], row[usual]
        plain = [self._plain(int(one)) for one in unusual]
        counts = np.bincount(row, minlength=self.rows)
        counts[unusual] = [len(one) for one in plain]
        # Rows decoded singly are appended; a stable sort by row puts them in their places.
        row = np.concatenate((row, np.repeat(unusual, counts[unusual])))
        order = numbers(np.argsort(row, kind="stable"))
        names = pa.concat_arrays(
            [known_text(slices(text, begins, split)), pa.array([name for one in plain for name in one], pa.string())]
        ).take(order)
        values = pa.concat_arrays(
            [
                known_text(slices(text, split + 1, ends)),
                pa.array([value for one in plain for value in one.values()], pa.string()),
            ]
        ).take(order)
        return self._map(counts, names, values)

    @staticmethod
    def _map(counts: Ints, names: pa.StringArray, values: pa.StringArray) -> pa.MapArray:
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        return pa.MapArray.from_arrays(numbers(offsets), names, values)

    def _repeated(self, begins: Ints, split: Ints, row: Ints) -> Ints:
        """Return rows in which a name may occur twice, or that have very many properties."""
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


def _mask(size: int) -> np.uint64:
    """Return the bits of a word that the first ``size`` bytes of a name fill."""
    return np.uint64((0xFFFFFFFFFFFFFFFF << (8 * max(0, 8 - size))) & 0xFFFFFFFFFFFFFFFF)
