"""Arrays over the bytes of a log file: Arrow's numbers, texts and slices, mostly without a copy; starts of records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from librmq.errors import MissingExtraError, RecordError
from librmq.java.lang import java_decode
from librmq.message import record

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


def replaced(array: pa.BinaryArray, rows: Ints, values: Sequence[bytes | None]) -> pa.BinaryArray:
    """Return ``array`` with other values in some rows."""
    if not len(rows):
        return array
    where = np.arange(len(array))
    where[rows] = len(array) + np.arange(len(rows))
    return pa.concat_arrays([array, pa.array(values, pa.binary())]).take(numbers(where))


def known_text(array: pa.BinaryArray) -> pa.StringArray:
    """Return bytes that are known to be UTF-8."""
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers())


# ---- starts of records, without queue entries

WINDOW: Final = 64 << 20
"""Bytes of the log to scan before the found records are yielded."""
_MAGICS: Final = (record.MESSAGE_MAGIC, record.MESSAGE_MAGIC_V2)
_SIZE_AND_MAGIC: Final = record.header_struct("size", "magic", unsigned=("size",))


def record_starts(raw: Bytes, begin: int, end: int) -> Iterator[tuple[Ints, list[tuple[int, str]]]]:
    """Yield the starts of records in ``raw``, a log file, from ``begin`` to ``end``, some MiB at a time.

    Each item also has the places without a readable record, and why; the scan skips from there to ``end``.
    """
    view, size, unpack = raw.data, len(raw), _SIZE_AND_MAGIC.unpack_from
    place = begin
    while place < end:
        until = min(end, place + WINDOW)
        starts: list[int] = []
        why = ""
        while place < until:
            if place + record.BLANK_SIZE > size:
                why = "expected a record, found the end of the file" if raw[place:end].any() else ""
                break
            length, magic = unpack(view, place)
            if magic in _MAGICS and length >= record.FIXED_SIZE and place + length <= size:
                starts.append(place)
                place += length
                continue
            # A blank, or zeros after the last record, end the walk too.
            if magic != record.BLANK_MAGIC and (length or magic or raw[place:end].any()):
                try:
                    record.frame(view, place, size)
                    why = "expected a record"
                except RecordError as error:
                    why = error.reason
            break
        yield np.array(starts, np.int64), [(place, why)] if why else []
        if place < until:
            return
