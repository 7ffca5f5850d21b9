"""The parts of a planned read: ranges of queue offsets, or a stretch of the log.

They are apart from the planner so that a process that only reads does not load the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from librmq.errors import StoreError
from librmq.files.seam import Damage

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
