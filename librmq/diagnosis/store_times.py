"""Store times of one record or of many, read from the mapped log without an object for each."""

from __future__ import annotations

import struct
from collections.abc import Iterable
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

UNKNOWN: Final = -1
_PLACE_AND_TIME: Final = struct.Struct(">qi16xq").unpack_from  # from the physical offset to the store time

Ints: TypeAlias = "npt.NDArray[np.int64]"


def store_times_at(log: CommitLog, physical_offsets: Iterable[int]) -> list[int | None]:
    """Return the store times of a few records at these places in ms; None if no record starts there.

    Raises:
        CorruptionError: A file of the log has a wrong length.
    """
    begin, last, size = log.begin, log.end - FIXED_SIZE, log.file_size
    times: list[int | None] = []
    start, buffer = -1, None
    for place in physical_offsets:
        at = place % size
        if place - at != start:
            start = place - at
            file = log.sequence.file_at(place) if begin <= place <= last else None
            buffer = None if file is None else file.buffer
        if buffer is None or not begin <= place <= last or at + FIXED_SIZE + HOST_V6_EXTRA > size:
            times.append(None)
            continue
        stated, sys_flag, time_ms = _PLACE_AND_TIME(buffer, at + PHYSICAL_OFFSET_AT)
        if sys_flag & BORN_HOST_V6:
            time_ms = store_timestamp_ms(buffer, at)
        times.append(time_ms if stated == place and time_ms >= 0 else None)
    return times


def store_times(log: CommitLog, physical_offsets: Ints) -> Ints:
    """Return the store times of the records at these places in ms; `UNKNOWN` if no record starts there.

    Raises:
        CorruptionError: A file of the log has a wrong length.
    """
    times = np.full(len(physical_offsets), UNKNOWN, np.int64)
    files, size = log.sequence, log.sequence.file_size
    inside = (physical_offsets >= log.begin) & (physical_offsets + FIXED_SIZE <= log.end)
    starts = physical_offsets - physical_offsets % size
    for start in sorted(set(starts[inside].tolist())):  # numpy.unique would load numpy.ma
        file = files.file_at(start)
        rows = np.flatnonzero(
            inside & (starts == start) & (physical_offsets - start + FIXED_SIZE + HOST_V6_EXTRA <= size)
        )
        if file is not None and len(rows):
            times[rows] = _of_file(np.frombuffer(file.buffer, np.uint8), start, physical_offsets[rows])
    return times


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
