"""Arrays over the bytes of a log file: Arrow's numbers, texts and slices, mostly without a copy; starts of records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

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
_KEPT_BYTES: Final = 30 << 20
"""More than the entries of a task have; glibc's threshold grows to 32 MiB at most."""


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
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype), len(values), [_validity(present), pa.py_buffer(values)]
    )


def _validity(present: Mask | None) -> pa.Buffer | None:
    """Return Arrow's bits of the values that are there; None if all are."""
    return None if present is None else pa.py_buffer(np.packbits(present, bitorder="little"))


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


def known_text(array: pa.BinaryArray, present: Mask | None = None) -> pa.StringArray:
    """Return bytes that are known to be UTF-8, null where not ``present``."""
    return pa.Array.from_buffers(pa.string(), len(array), [_validity(present), *array.buffers()[1:]])


# ---- starts of records, without queue entries

WINDOW: Final = 64 << 20
"""Bytes of the log to scan before the found records are yielded."""


def record_starts(raw: Bytes, begin: int, end: int) -> Iterator[tuple[Ints, list[tuple[int, str]]]]:
    """Yield the starts of records in ``raw``, a log file, from ``begin`` to ``end``, some MiB at a time.

    Each item also has the places without a readable record, and why; the scan skips from there to ``end``.
    """
    at = begin
    while at < end:
        until = min(end, at + WINDOW)
        places, at = _following(raw, at, until)
        bad: list[tuple[int, str]] = []
        if at < until:
            if why := _no_record(raw, at, end):
                bad.append((at, why))
            at = end
        yield places, bad


def _following(raw: Bytes, at: int, until: int) -> tuple[Ints, int]:
    """Return the records that follow each other from ``at``, and where they end: at or after ``until``, or before."""
    if CORE.record_starts is not None:
        starts, at = CORE.record_starts(raw, at, until)
        return np.frombuffer(starts, np.int64), at
    view, size, places = raw.data, len(raw), list[int]()
    unpack, last = frames.SIZE_AND_MAGIC.unpack_from, min(until, len(raw) - record.FIXED_SIZE + 1)
    while at < last:
        length, magic = unpack(view, at)
        if magic not in record.MAGICS or not record.FIXED_SIZE <= length <= size - at:
            break
        places.append(at)
        at += length
    return np.array(places, np.int64), at


def _no_record(raw: Bytes, at: int, end: int) -> str:
    """Return why no record is at ``at``; nothing for a blank, and for zeros after the last record."""
    if at + record.BLANK_SIZE > len(raw):
        return "expected a record, found the end of the file" if raw[at:end].any() else ""
    length, magic = frames.SIZE_AND_MAGIC.unpack_from(raw.data, at)
    if magic == record.BLANK_MAGIC or not (length or magic or raw[at:end].any()):
        return ""
    try:
        record.frame(raw.data, at, len(raw))
    except RecordError as error:
        return error.reason
    return "expected a record"
