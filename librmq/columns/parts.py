"""The parts of a planned read: ranges of queue offsets, or a stretch of the log.

They are apart from the planner so that a process that only reads does not load the store.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from librmq.columns.arrays import Ints
from librmq.config import ENTRY_SIZE
from librmq.consumequeue import entry_dtype
from librmq.errors import CorruptionError, StoreError, StoreIOError
from librmq.files.interface import Damage, Files
from librmq.files.rolling import file_name
from librmq.store.format import directory

REST: Final = (
    "to read the rest, set fail_on_data_loss=False; in Spark failOnDataLoss=false, in librmq export --skip-deleted"
)
"""What to do about deleted messages, for errors."""


class DataLossError(StoreError):
    """Requested messages were deleted; with ``fail_on_data_loss`` false the rest is read."""


class ReadingProcessError(StoreError):
    """A process that reads a part of a store ended before its work was done."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Entries of a queue from ``begin`` to ``end``; those from ``inline_from`` on are in ``inline``, not in files."""

    topic: str
    queue_id: int
    begin: int
    end: int
    inline_from: int
    inline: bytes = b""


@dataclass(frozen=True, slots=True)
class RemoteLog:
    """The log of a store behind a URL, for a process that did not plan the read."""

    url: str
    storage_options: Mapping[str, Any]
    """Arguments of the file system."""
    sizes: Mapping[str, int]
    """Lengths of the log's files, by name within the store."""
    folder: str
    """Where the planner's machine keeps what is fetched, until the read has ended."""


@dataclass(frozen=True, slots=True)
class Part:
    """The work of one task: entries of queues, or a section of the log with its entries."""

    path: str
    """Folder of the store."""
    log_file_size: int
    """Size of a file of the log, in bytes."""
    queue_file_size: int
    """Size of a file of a queue, in bytes."""
    slices: tuple[Slice, ...]
    """Entries to read, by queue."""
    walk: tuple[int, int] | None = None
    """Section of the log to read, as physical offsets of begin and end; None without one."""
    damage: tuple[Damage, ...] = ()
    """Damage that planning found and that does not raise."""
    remote: RemoteLog | None = None
    """Where the log is, if another process than the planner reads it; the slices then hold all entries."""


# ---- rows


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


# ---- queue entries


def slice_entries(part: Part, share: Slice, files: Files, deleted: list[str]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield the entries of a slice, each time with the first queue offset; add deleted files to ``deleted``."""
    per_file = part.queue_file_size // ENTRY_SIZE
    at, stored_end = share.begin, min(share.end, share.inline_from)
    while at < stored_end:
        start = at - at % per_file
        until = min(stored_end, start + per_file)
        name = file_name(start * ENTRY_SIZE)
        path = os.path.join(directory.queue_folder(part.path, share.topic, share.queue_id), name)
        try:
            file = files.open(path)
        except StoreIOError as error:
            if error.errno != errno.ENOENT:
                raise
            deleted.append(path)
        else:
            if file.size < (until - start) * ENTRY_SIZE:
                raise CorruptionError(path, file.size, "size", f"expected {part.queue_file_size} bytes")
            # A copy: a mapping holds a descriptor, and there can be many queues.
            yield at, np.frombuffer(file.buffer, entry_dtype(), until - at, (at - start) * ENTRY_SIZE).copy()
        at = until
    if share.inline and at < share.end:
        yield max(at, share.inline_from), np.frombuffer(share.inline, entry_dtype())
