"""Arrow columns of texts compared with a few short ones, faster than by kernels that go text by text.

A text equals another if it has its length and its first bytes; eight of them are read as one integer from wherever the
text begins in the column's buffer, so that a comparison is one of integers for all rows.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["Places", "Texts"]

Places: TypeAlias = npt.NDArray[np.int64]

_WORD: Final = 8


class Texts:
    """A string or large string array, or its texts at some places, compared with short texts."""

    def __init__(self, array: Any, places: Places | None = None, of: Texts | None = None) -> None:
        self._array: Final = array
        self._places: Final = places
        self._of: Final = of

    def at(self, places: Places) -> Texts:
        """The texts at ``places``, in that order."""
        return Texts(self._array, places, self)

    def equal(self, text: str) -> npt.NDArray[np.bool_]:
        """Where a text is ``text``; what it says of a null means nothing."""
        data = text.encode("utf-8", "surrogatepass")
        found: npt.NDArray[np.bool_] = self._lengths == len(data)
        head = data[:_WORD]
        if head:
            mask = np.uint64((1 << (8 * len(head))) - 1)
            found &= (self._words & mask) == np.uint64(int.from_bytes(head, "little"))
        if len(data) > _WORD:
            alike = np.flatnonzero(found)
            rows = alike if self._places is None else self._places[alike]
            found[alike] = pc.equal(self._array.take(pa.array(rows)), text).fill_null(False)
        return found

    @cached_property
    def _offsets(self) -> npt.NDArray[np.signedinteger[Any]]:
        kind = np.dtype(np.int64 if pa.types.is_large_string(self._array.type) else np.int32)
        if not len(self._array):
            return np.zeros(1, kind)
        begin = self._array.offset * kind.itemsize
        return np.frombuffer(self._array.buffers()[1], kind, len(self._array) + 1, begin)

    @cached_property
    def _starts(self) -> npt.NDArray[np.signedinteger[Any]]:
        return self._offsets[:-1] if self._places is None else self._offsets[self._places]

    @cached_property
    def _lengths(self) -> npt.NDArray[np.signedinteger[Any]]:
        if self._places is None:
            return np.diff(self._offsets)
        return self._offsets[self._places + 1] - self._starts

    @cached_property
    def _anywhere(self) -> npt.NDArray[np.uint64]:
        """The eight bytes from each byte of the texts on; zeros after the last."""
        if self._of is not None:
            return self._of._anywhere
        first, last = int(self._offsets[0]), int(self._offsets[-1])
        data = np.zeros(last - first + _WORD, np.uint8)
        if last > first:
            data[:-_WORD] = np.frombuffer(self._array.buffers()[2], np.uint8, last - first, first)
        return np.ndarray((last - first + 1,), "<u8", data, strides=(1,))

    @cached_property
    def _words(self) -> npt.NDArray[np.uint64]:
        """The eight bytes from where each text begins, those of the next texts among them."""
        first = int(self._offsets[0])
        words: npt.NDArray[np.uint64] = self._anywhere[self._starts - first if first else self._starts]
        return words
