"""The queues of a planned read: which offsets they have, and where in the log their entries lead.

A store can have many thousands of queues of a few entries. Mapping such a queue takes several times as long as reading
it, so its entries are kept from one read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from librmq.consumequeue import ENTRY, ENTRY_SIZE, HOLE_SIZE, ConsumeQueue, Entries, QueueEntry, entry_dtype
from librmq.consumequeue_entries import places_and_sizes
from librmq.files.interface import Files
from librmq.store.engine.store_parts import QueueState

_SHORT: Final = 1 << 10
"""Most bytes of entries to keep in memory for a queue."""
_READ: Final = 1 << 13
"""Most bytes to read of a queue's file, whose used part is known in blocks."""
_AT_ONCE: Final = 4096
"""Most entries of a queue to read at once, instead of searching among them one by one."""


@dataclass(slots=True)
class ShortQueue:
    """The entries of a queue with a single file, in memory."""

    min_offset: int
    max_offset: int
    _first: int
    _raw: bytes

    @classmethod
    def read(cls, folder: str, file_size: int, files: Files, state: QueueState) -> Self | None:
        """Return the queue in ``folder``; None if it is not short, or not as in ``state``: open it to see why."""
        file = files.read_sole_file(folder, file_size, _READ)
        if file is None or not 0 < len(file[1]) <= _SHORT or not (file[0].isdigit() and len(file[0]) == 20):
            return None
        raw = file[1] + bytes(-len(file[1]) % ENTRY_SIZE)
        first = int(file[0]) // ENTRY_SIZE
        places, sizes = places_and_sizes(raw)
        as_closed = (first + len(places), places[-1] + sizes[-1]) == (state.max_offset, state.max_physic_offset)
        if not as_closed or min(sizes) <= 0 or min(places) < 0 or HOLE_SIZE in sizes:
            return None
        return cls(max(first, state.min_offset), state.max_offset, first, raw)

    def entry(self, queue_offset: int) -> QueueEntry | None:
        """Return the entry at ``queue_offset``, None outside `min_offset` to `max_offset`."""
        if not self.min_offset <= queue_offset < self.max_offset:
            return None
        return QueueEntry._make(ENTRY.unpack_from(self._raw, (queue_offset - self._first) * ENTRY_SIZE))

    def entries(self, begin: int, end: int) -> Entries:
        """Return the entries from ``begin`` to ``end``."""
        every = np.frombuffer(self._raw, entry_dtype())
        return every[max(begin, self.min_offset) - self._first : max(end - self._first, 0)]


@dataclass(slots=True)
class QueueRange:
    """A planned queue."""

    begin: int
    end: int
    inline_from: int
    inline: bytes
    entries: ConsumeQueue | ShortQueue
    """Reader of the queue's entries."""

    def place(self, queue_offset: int) -> int:
        """Return the physical offset in an entry."""
        entry = self.entries.entry(queue_offset)
        return -1 if entry is None else entry.physical_offset

    def pieces(self, offsets: range, bounds: Sequence[int]) -> list[range]:
        """Return the parts of ``offsets`` before, between and after ``bounds``, ascending places of the log."""
        if not bounds:
            return [offsets]
        if len(offsets) <= _AT_ONCE:
            places = stored_entries(self.entries, offsets.start, offsets.stop)["physical_offset"]
            ends = np.minimum(offsets.start + np.searchsorted(places, bounds), offsets.stop).tolist()
        else:
            ends, at = [], offsets.start
            for bound in bounds:
                at = bisect_left(range(offsets.stop), bound, at, offsets.stop, key=self.place)
                ends.append(at)
        return [range(begin, end) for begin, end in zip([offsets.start, *ends], [*ends, offsets.stop], strict=True)]


def stored_entries(queue: ConsumeQueue | ShortQueue, begin: int, end: int) -> Entries:
    """Return the entries from ``begin`` to ``end``, damaged ones too; fewer if files were deleted."""
    if isinstance(queue, ShortQueue):
        return queue.entries(begin, end)
    blocks = []
    at = begin
    while at < end and (raw := queue.read(at, end - at)):
        blocks.append(raw)
        at += len(raw) // ENTRY_SIZE
    return np.frombuffer(b"".join(blocks), entry_dtype())
