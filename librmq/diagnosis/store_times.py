"""Store times of one record or of many, read from the mapped log without an object for each."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, TypeAlias

from librmq.commitlog import CommitLog
from librmq.message.record import (
    BORN_HOST_V6,
    FIXED_SIZE,
    HOST_V6_EXTRA,
    PHYSICAL_OFFSET_AT,
    STORE_TIMESTAMP_AT,
    SYS_FLAG_AT,
    store_timestamp_ms,
)
from librmq.runtime import lazy_numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["UNKNOWN", "Ints", "store_time", "store_times"]

UNKNOWN: Final = -1
_LONG: Final = struct.Struct(">q")

Ints: TypeAlias = "npt.NDArray[np.int64]"


def store_time(log: CommitLog, physical_offset: int) -> int | None:
    """Return the store time of the record at this place in ms; None if no record starts there.

    Raises:
        CorruptionError: The log's file has a wrong length.
    """
    if not log.begin <= physical_offset <= log.end - FIXED_SIZE:
        return None
    at = physical_offset % log.file_size
    file = log.sequence.file_at(physical_offset)
    if file is None or at + FIXED_SIZE + HOST_V6_EXTRA > file.size:
        return None
    (stated,) = _LONG.unpack_from(file.buffer, at + PHYSICAL_OFFSET_AT)
    if stated != physical_offset:
        return None
    time_ms = store_timestamp_ms(file.buffer, at)
    return time_ms if time_ms >= 0 else None


def store_times(log: CommitLog, physical_offsets: Ints) -> Ints:
    """Return the store times of the records at these places in ms; `UNKNOWN` if no record starts there.

    Raises:
        CorruptionError: A file of the log has a wrong length.
    """
    found = np.full(len(physical_offsets), UNKNOWN, np.int64)
    files, size = log.sequence, log.sequence.file_size
    inside = (physical_offsets >= log.begin) & (physical_offsets + FIXED_SIZE <= log.end)
    starts = physical_offsets - physical_offsets % size
    for start in sorted(set(starts[inside].tolist())):  # numpy.unique would load numpy.ma
        file = files.file_at(start)
        rows = np.flatnonzero(
            inside & (starts == start) & (physical_offsets - start + FIXED_SIZE + HOST_V6_EXTRA <= size)
        )
        if file is not None and len(rows):
            found[rows] = _of_file(np.frombuffer(file.buffer, np.uint8), start, physical_offsets[rows])
    return found


def _of_file(raw: npt.NDArray[np.uint8], start: int, physical_offsets: Ints) -> Ints:
    at = physical_offsets - start
    is_record = _numbers(raw, at + PHYSICAL_OFFSET_AT) == physical_offsets
    shift = np.where(raw[at + SYS_FLAG_AT + 3] & BORN_HOST_V6, HOST_V6_EXTRA, 0)
    times = _numbers(raw, at + STORE_TIMESTAMP_AT + shift)
    return np.asarray(np.where(is_record & (times >= 0), times, UNKNOWN), np.int64)


def _numbers(raw: npt.NDArray[np.uint8], at: Ints) -> Ints:
    """Return the numbers of 8 bytes, big-endian, at these places."""
    words = raw[at[:, None] + np.arange(8)].view(">i8")
    return np.asarray(words[:, 0], np.int64)
