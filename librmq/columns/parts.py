"""What a plan hands to the tasks that read: ranges of queue offsets, or a stretch of the log.

Apart from the planner, so that a process that only reads loads no store.
"""

from __future__ import annotations

from dataclasses import dataclass

from librmq.errors import StoreError
from librmq.files.damage import Damage

__all__ = ["DataLossError", "Part", "Slice"]


class DataLossError(StoreError):
    """Wanted messages are no longer there; with ``failOnDataLoss`` false the rest is read."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Some entries of a queue: from ``begin`` to ``end``, those from ``late_from`` on in ``late``, not in files."""

    topic: str
    queue_id: int
    begin: int
    end: int
    late_from: int
    late: bytes = b""


@dataclass(frozen=True, slots=True)
class Part:
    """What one task reads: entries of queues; or the log from a place to another, with the entries that lie there."""

    path: str
    log_file_size: int
    queue_file_size: int
    slices: tuple[Slice, ...]
    walk: tuple[int, int] | None = None
    damage: tuple[Damage, ...] = ()
    """Damage found while planning that does not raise."""
