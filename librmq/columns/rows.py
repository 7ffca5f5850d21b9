"""The rows of a part before they are decoded: where their records lie, and in which queues."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from librmq.columns.arrays import Ints


@dataclass(slots=True)
class Rows:
    """Entries of several queues, or records of the log without queues."""

    places: Ints
    sizes: Ints
    codes: Ints
    queue: npt.NDArray[np.int32]
    queue_offsets: Ints

    def __len__(self) -> int:
        return len(self.places)

    def take(self, which: Any) -> Rows:
        """Return the rows that a slice, a mask or an array of numbers chooses."""
        return Rows(
            self.places[which], self.sizes[which], self.codes[which], self.queue[which], self.queue_offsets[which]
        )


def chunks(rows: Rows, file_size: int, most_rows: int, most_bytes: int) -> Iterator[Rows]:
    """Cut rows at the ends of files, and where a batch has enough rows or bytes."""
    if not len(rows):
        return
    starts = rows.places // file_size
    weights = np.cumsum(np.clip(rows.sizes, 0, most_bytes))
    at, count = 0, len(rows)
    while at < count:
        until = min(count, at + most_rows)
        before = weights[at - 1] if at else 0
        until = min(until, max(at + 1, int(np.searchsorted(weights, before + most_bytes, "right"))))
        changed = np.flatnonzero(starts[at:until] != starts[at])
        until = at + int(changed[0]) if len(changed) else until
        yield rows.take(slice(at, until))
        at = until
