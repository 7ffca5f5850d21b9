"""Arrow columns of texts compared with a few short ones, faster than by Arrow's kernels.

Two texts are equal if their lengths and bytes are. The first eight bytes of each text are read as one integer from the
column's buffer, so one comparison of integers serves all rows.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Places: TypeAlias = npt.NDArray[np.int64]

_WORD: Final = 8

SHORT: Final = 8
"""Largest mean text length in bytes for which a copy of the words at each byte pays; it reads three times as fast."""


def _scratch(count: int, kind: npt.DTypeLike) -> Any:
    """Return an uninitialised array for an intermediate result.

    Arrow's allocator keeps freed memory. numpy's may return it to the system each time, and faulting its pages in again
    costs more than the whole comparison.
    """
    return np.frombuffer(pa.allocate_buffer(count * np.dtype(kind).itemsize), kind)


def booleans(mask: npt.NDArray[np.bool_]) -> Any:
    """Return a boolean array without nulls."""
    bits = pa.py_buffer(np.packbits(mask, bitorder="little"))
    return pa.BooleanArray.from_buffers(pa.bool_(), len(mask), [None, bits])


class Texts:
    """A string or large string array, or its texts at some places, compared with short texts."""

    def __init__(self, array: Any, places: Places | None = None, base: Texts | None = None) -> None:
        self._array: Final = array
        self._places: Final = places
        self._base: Final = base

    def at(self, places: Places) -> Texts:
        """Return the texts at ``places``, in that order."""
        return Texts(self._array, places, self)

    def equal(self, text: str) -> npt.NDArray[np.bool_]:
        """Return where a text is ``text``, with any value for a null."""
        data = text.encode("utf-8", "surrogatepass")
        matches: npt.NDArray[np.bool_] = self._lengths == len(data)
        head = data[:_WORD]
        if head:
            mask = np.uint64((1 << (8 * len(head))) - 1)
            words = np.bitwise_and(self._words, mask, out=_scratch(len(matches), np.uint64))
            matches &= words == np.uint64(int.from_bytes(head, "little"))
        if len(data) > _WORD:
            alike = np.flatnonzero(matches)
            rows = alike if self._places is None else self._places[alike]
            matches[alike] = pc.equal(self._array.take(pa.array(rows)), text).fill_null(False)
        return matches

    @cached_property
    def _offsets(self) -> npt.NDArray[np.signedinteger[Any]]:
        kind = np.dtype(np.int64 if pa.types.is_large_string(self._array.type) else np.int32)
        if not len(self._array):
            return np.zeros(1, kind)
        begin = self._array.offset * kind.itemsize
        return np.frombuffer(self._array.buffers()[1], kind, len(self._array) + 1, begin)

    @cached_property
    def _starts(self) -> npt.NDArray[np.signedinteger[Any]]:
        return self._offsets[:-1] if self._places is None else self._offsets.take(self._places)

    @cached_property
    def _lengths(self) -> npt.NDArray[np.signedinteger[Any]]:
        ends = self._offsets[1:] if self._places is None else self._offsets[1:].take(self._places)
        lengths: npt.NDArray[np.signedinteger[Any]] = _scratch(len(ends), ends.dtype)
        np.subtract(ends, self._starts, out=lengths)
        return lengths

    @cached_property
    def _anywhere(self) -> npt.NDArray[np.uint64]:
        """Return the eight bytes that begin at each byte of the texts, with zeros after the last."""
        if self._base is not None:
            return self._base._anywhere
        first, last = int(self._offsets[0]), int(self._offsets[-1])
        data = _scratch(last - first + _WORD, np.uint8)
        if last > first:
            data[:-_WORD] = np.frombuffer(self._array.buffers()[2], np.uint8, last - first, first)
        data[-_WORD:] = 0
        words: npt.NDArray[np.uint64] = np.ndarray((last - first + 1,), "<u8", data, strides=(1,))
        if last - first > SHORT * len(self._array):
            return words
        copy: npt.NDArray[np.uint64] = _scratch(len(words), np.uint64)
        copy[:] = words
        return copy

    @cached_property
    def _words(self) -> npt.NDArray[np.uint64]:
        """Return the eight bytes at the start of each text, which can reach into the next texts."""
        first = int(self._offsets[0])
        starts = self._starts - first if first else self._starts
        if not self._anywhere.flags.c_contiguous:  # take() would copy all of it
            gathered: npt.NDArray[np.uint64] = self._anywhere[starts]
            return gathered
        words: npt.NDArray[np.uint64] = _scratch(len(starts), np.uint64)
        # With this mode numpy writes straight into ``out``. No start is out of range.
        self._anywhere.take(starts, mode="clip", out=words)
        return words
