"""Arrays over the bytes of a log file: Arrow's numbers, texts and slices, mostly without a copy; starts of records.

A record's size leads to the next record, so one chain reaches all of them, step by step. To use arrays instead, many
chains are followed in lock step, each from a guess: the first magic after an evenly spaced place. A chain counts if the
chain before it ends at its start. A guess can be wrong, because a body can contain what looks like a record; then the
plain walk continues until it meets a right guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from librmq.errors import MissingExtraError, RecordError
from librmq.java.lang import java_decode
from librmq.message import frames, record
from librmq.runtime.compiled_core import CORE

try:
    import pyarrow as pa
except ModuleNotFoundError as error:
    if error.name != "pyarrow":  # it is there, and damaged
        raise
    raise MissingExtraError("decoding records into Arrow columns", "arrow") from error

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
_KEPT_BYTES: Final = 16 << 20


@cache
def keep_freed_memory() -> None:
    """Let the allocator keep the memory of temporary arrays between batches, up to twice `_KEPT_BYTES`.

    glibc gives freed memory back to the system beyond a threshold, which grows with the largest block ever freed. Below
    it, each batch would take its pages from the system again, a third of the time of a read by several processes.
    """
    np.empty(_KEPT_BYTES, np.uint8)


def runs(sizes: Ints, most_bytes: int, most_rows: int, files: Ints) -> Iterator[tuple[int, int]]:
    """Yield begin and end of runs of rows in one file each: a single row, or not too many rows and bytes."""
    sums = np.cumsum(sizes)
    begin = 0
    while begin < len(sizes):
        before = int(sums[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(sums, before + most_bytes, "right")))
        end = min(end, begin + most_rows, len(sizes))
        others = np.flatnonzero(files[begin:end] != files[begin])
        end = begin + int(others[0]) if len(others) else end
        yield begin, end
        begin = end


def numbers(values: npt.NDArray[Any], present: Mask | None = None) -> pa.Array:
    """Return numbers as an Arrow array on the same memory, null where not ``present``.

    `pyarrow.array` does the same, but loads pandas: some 20 MiB that a reader does not need.
    """
    values = np.ascontiguousarray(values)
    valid = None if present is None else pa.py_buffer(np.packbits(present, bitorder="little"))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [valid, pa.py_buffer(values)])


def integers(array: pa.Array) -> Ints:
    """Return whole numbers or truth values, none of them null; `pyarrow.Array.to_numpy` loads pandas, like `array`."""
    return np.from_dlpack(array.cast(pa.int64())).astype(np.int64, copy=False)


def strings(values: Sequence[str]) -> pa.StringArray:
    """Return texts as an Arrow array."""
    raws = [value.encode() for value in values]
    offsets = np.cumsum([0, *map(len, raws)]).astype(np.int32)
    return pa.Array.from_buffers(pa.string(), len(raws), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(raws))])


def slices(raw: Bytes, begins: Ints, ends: Ints) -> pa.BinaryArray:
    """Return the bytes from each of ``begins`` to its end as one binary array, packed without gaps."""
    count = len(begins)
    if not count:
        return pa.nulls(0, pa.binary())
    if CORE.slices is not None:
        parts = CORE.slices(raw, np.ascontiguousarray(begins, np.int64), np.ascontiguousarray(ends, np.int64))
        return pa.Array.from_buffers(pa.binary(), count, [None, *map(pa.py_buffer, parts)])
    base, end = int(begins.min()), int(ends.max())
    pairs = np.empty(2 * count + 1, np.int32)
    pairs[:-1:2], pairs[1::2], pairs[-1] = begins - base, ends - base, end - base
    # Every second element covers the gap between two slices; it is dropped without being read.
    buffers = [None, pa.py_buffer(pairs), pa.py_buffer(raw[base:end])]
    between = pa.Array.from_buffers(pa.binary(), 2 * count, buffers)
    return between.take(numbers(np.arange(0, 2 * count, 2)))


def offsets_and_bytes(array: pa.BinaryArray) -> tuple[npt.NDArray[np.int32], Bytes]:
    """Return offsets and bytes of a binary or text array that is not a slice of another."""
    _, offsets, data = array.buffers()
    count = len(array)
    ends = np.frombuffer(offsets, np.int32, count + 1) if count else np.zeros(1, np.int32)
    return ends, np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)


def not_utf8(array: pa.BinaryArray) -> Mask:
    """Return a mask of the rows that are not UTF-8. Rows are decoded singly only if the whole does not decode."""
    offsets, data = offsets_and_bytes(array)
    bad = np.zeros(len(array), np.bool_)
    data = data[: int(offsets[-1])]
    if not len(data) or int(data.max()) < 0x80:
        return bad
    inside = offsets[:-1][offsets[:-1] < len(data)]
    if not ((data[inside] & 0xC0) == 0x80).any():  # no row begins inside a character
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
    bad = not_utf8(array)
    if bad.any():
        array = replaced(array, np.flatnonzero(bad), [java_decode(array[int(row)].as_py()).encode() for row in
                                                       np.flatnonzero(bad)])  # fmt: skip
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers(), array.null_count)


def replaced(array: pa.Array, rows: Ints, values: Sequence[bytes | str | None]) -> pa.Array:
    """Return ``array`` with other values in some rows."""
    if not len(rows):
        return array
    where = np.arange(len(array))
    where[rows] = len(array) + np.arange(len(rows))
    return pa.concat_arrays([array, pa.array(values, array.type)]).take(numbers(where))


def known_text(array: pa.BinaryArray) -> pa.StringArray:
    """Return bytes that are known to be UTF-8."""
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers())


# ---- starts of records, without queue entries

WINDOW: Final = 64 << 20
"""Bytes of the log to scan before the found records are yielded."""
_STRETCH: Final = 64 << 10
"""Distance between guesses."""
_NEAR: Final = 4096
_MAGIC: Final = record.MESSAGE_MAGIC.to_bytes(4, "big")


def record_starts(raw: Bytes, begin: int, end: int) -> Iterator[tuple[Ints, list[tuple[int, str]]]]:
    """Yield the starts of records in ``raw``, a log file, from ``begin`` to ``end``, some MiB at a time.

    Each item also has the places without a readable record, and why; the scan skips from there to ``end``.
    """
    at = begin
    while at < end:
        bad: list[tuple[int, str]] = []
        starts: list[Ints] = []
        until = min(end, at + WINDOW)
        chains = _Chains.from_guesses(raw, at, until) if until - at >= 2 * _STRETCH else None
        while at < until:
            linked = None if chains is None else chains.linked(at)
            if linked is not None:
                places, at = linked
                starts.append(places)
            else:
                places, at = _plain(raw, at, until, end, chains.numbers if chains is not None else {}, bad)
                starts.append(places)
        yield np.concatenate(starts), bad


def _plain(
    raw: Bytes, place: int, until: int, end: int, chain_numbers: dict[int, int], bad: list[tuple[int, str]]
) -> tuple[Ints, int]:
    """Walk the records from ``place`` to ``until`` or to a known one; return them and where it ended.

    ``chain_numbers`` has the known records, by their places.

    At bytes that are not a record the walk ends, and returns ``end``.
    """
    view, size, places = raw.data, len(raw), []
    unpack = frames.SIZE_AND_MAGIC.unpack_from
    begin, last = place, min(until, size - record.FIXED_SIZE)
    while place < until:
        while place < last:  # fast path: plain records
            length, magic = unpack(view, place)
            if magic != record.MESSAGE_MAGIC or length < record.FIXED_SIZE or place + length > size:
                break
            places.append(place)
            place += length
            if place in chain_numbers:
                return np.array(places, np.int64), place
        if place >= until:
            break
        if place + record.BLANK_SIZE > size:
            if raw[place:end].any():
                bad.append((place, "expected a record, found the end of the file"))
            place = end
            break
        length, magic = unpack(view, place)
        if magic in frames.MAGICS and length >= record.FIXED_SIZE and place + length <= size:
            places.append(place)
            place += length
            if place in chain_numbers and place > begin:
                break
        elif magic == record.BLANK_MAGIC or (not length and not magic and not raw[place:end].any()):
            place = end  # a blank, or zeros after the last record
        else:
            try:
                record.frame(view, place, size)
                why = "expected a record"
            except RecordError as error:
                why = error.reason
            bad.append((place, why))
            place = end
    return np.array(places, np.int64), place


class _Chains(NamedTuple):
    """Chains of plain records, each from a guess."""

    numbers: dict[int, int]
    """Start of each chain that has a record, and its number."""
    places: Ints
    """Starts of the records of all chains, chain by chain."""
    firsts: Ints
    """Index in ``places`` of each chain's first record; the last item is the number of records."""
    ends: Ints
    """End of each chain: at or after the start of the next one, or at bytes that are not a plain record."""
    broken: Ints
    """The chains that do not end where the next one starts."""

    @classmethod
    def from_guesses(cls, raw: Bytes, begin: int, end: int) -> _Chains:
        begins = _guesses(raw, begin, end)
        bounds = np.append(begins[1:], end)
        ends = begins.copy()
        size = len(raw)
        which, at = np.arange(len(begins)), begins
        owners: list[Ints] = []
        steps: list[Ints] = []
        while len(which):
            inside = at <= size - record.FIXED_SIZE
            word = record.gather(raw, np.where(inside, at, 0), ">u8")
            following = at + (word >> np.uint64(32)).astype(np.int64)
            plausible = (word & np.uint64(0xFFFFFFFF)) == record.MESSAGE_MAGIC
            plausible &= inside & (following - at >= record.FIXED_SIZE) & (following <= size)
            if not plausible.all():
                which, at, following = which[plausible], at[plausible], following[plausible]
            owners.append(which)
            steps.append(at)
            ends[which] = following
            going_on = following < bounds[which]
            if going_on.all():
                at = following
            else:
                which, at = which[going_on], following[going_on]
        owner, places = np.concatenate(owners), np.concatenate(steps)
        firsts = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=len(begins)))))
        order = np.argsort(owner, kind="stable")
        broken = np.append(np.flatnonzero(ends[:-1] != begins[1:]), len(begins) - 1)
        numbers = {place: number for number, place in enumerate(begins.tolist()) if firsts[number] < firsts[number + 1]}
        return cls(numbers, places[order], firsts, ends, broken)

    def linked(self, at: int) -> tuple[Ints, int] | None:
        """Return the records from ``at`` through all linked chains, and their end; None if no chain begins there."""
        first = self.numbers.get(at)
        if first is None:
            return None
        last = int(self.broken[np.searchsorted(self.broken, first)])
        return self.places[self.firsts[first] : self.firsts[last + 1]], int(self.ends[last])


def _guesses(raw: Bytes, begin: int, end: int) -> Ints:
    """Return ``begin``, and after each stride the first offset that looks like a record."""
    guesses = [begin]
    for at in range(begin + _STRETCH, end - record.FIXED_SIZE, _STRETCH):
        for first, until in ((at, at + _NEAR), (at + _NEAR - 3, at + _STRETCH)):
            index = raw[first : min(until, end)].tobytes().find(_MAGIC)
            if index >= 0:
                place = first + index - 4
                if place > guesses[-1]:
                    guesses.append(place)
                break
    return np.array(guesses, np.int64)
