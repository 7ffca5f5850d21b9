"""The layout of an index file: a hash table from message keys to places in the log.

::

    file, 40 + 4 * slots + 20 * entries bytes, big-endian; named by its creation in UTC, yyyyMMddHHmmssSSS
    +--------------------+ 0
    | header             |   0  begin timestamp       8   store time (ms) of the first entry
    |                    |   8  end timestamp         8   store time (ms) of the last
    |                    |  16  begin physical offset 8   place in the log of the first entry
    |                    |  24  end physical offset   8   place in the log of the last
    |                    |  32  slot count            4   entries that found their slot empty
    |                    |  36  index count           4   number of the next entry; 0 (fresh) is read as 1
    +--------------------+ 40
    | slots              |   4 each: number of the newest entry whose hash falls here, 0 for none
    +--------------------+ 40 + 4 * slots
    | entry 0 (unused)   |   0  hash                  4   |hashCode(topic#key)|, the slot is hash % slots
    | entry 1            |   4  physical offset       8
    | ...                |  12  time                  4   seconds since the begin timestamp, not below 0
    | entry entries - 1  |  16  previous              4   number of the slot's next older entry, 0 for none
    +--------------------+

A file's begin and end start as the end of the file before it, until its first entry sets them. Mirrors
4.9.4's ``IndexFile``, ``IndexHeader`` and ``IndexService``.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Final, NamedTuple

from librmq.errors import ConfigError
from librmq.files.seam import File
from librmq.runtime import lazy_numpy as np

HEADER_SIZE: Final = 40
SLOT_SIZE: Final = 4
ENTRY_SIZE: Final = 20

HEADER: Final = struct.Struct(">qqqqii")
unpack_entry = struct.Struct(">iqii").unpack_from
MAX_SECONDS: Final = (1 << 31) - 1


@cache
def entry_dtype() -> np.dtype[np.void]:
    """Return the type of `IndexFile.entries`."""
    return np.dtype([("hash", "i4"), ("physical", "i8"), ("time_diff", "i4"), ("previous", "i4")])


@cache
def slot_dtype() -> np.dtype[np.void]:
    """Return the type of `IndexFile.slots`."""
    return np.dtype([("slot", "i4"), ("number", "i4")])


@cache
def stored_entry_dtype() -> np.dtype[np.void]:
    """Return the type of entries in a file."""
    return entry_dtype().newbyteorder(">")


def file_length(slots: int, entries: int) -> int:
    """Return the length in bytes of a file with this geometry."""
    return HEADER_SIZE + SLOT_SIZE * slots + ENTRY_SIZE * entries


def geometry(length: int) -> tuple[int, int] | None:
    """Return slots and entries of a file of ``length`` bytes with four entries to a slot, None if impossible."""
    slots, remainder = divmod(length - HEADER_SIZE, SLOT_SIZE + 4 * ENTRY_SIZE)
    return (slots, 4 * slots) if slots > 0 and not remainder else None


def find_geometry(file: File) -> tuple[int, int] | None:
    """Return slots and entries of a file by its header and length, None if they are ambiguous.

    The newest entry belongs to the header's last record, and its slot points to it. Four entries to a slot, 4.9's
    default, are tried first, and are the answer for a file without entries.
    """
    default, room = geometry(file.size), file.size - HEADER_SIZE
    if room < SLOT_SIZE + 2 * ENTRY_SIZE or room % SLOT_SIZE:
        return None
    header = IndexHeader(*HEADER.unpack(file.buffer[:HEADER_SIZE]))
    number, slots_an_entry = header.index_count - 1, ENTRY_SIZE // SLOT_SIZE
    if number < 1:
        return default

    def fits(slots: int) -> bool:
        """Return whether the newest entry is where it would be with this many slots."""
        at = HEADER_SIZE + SLOT_SIZE * slots + ENTRY_SIZE * number
        value, physical_offset, _, _ = unpack_entry(file.buffer, at)
        if value < 0 or physical_offset != header.end_physical_offset:
            return False
        at = HEADER_SIZE + SLOT_SIZE * (value % slots)
        return bool(int.from_bytes(file.buffer[at : at + SLOT_SIZE], "big") == number)

    min_slots = room // SLOT_SIZE % slots_an_entry or slots_an_entry
    max_slots = (room - ENTRY_SIZE * header.index_count) // SLOT_SIZE
    if default is not None and default[0] <= max_slots and fits(default[0]):
        return default
    if max_slots < min_slots:
        return None
    first = HEADER_SIZE + SLOT_SIZE * min_slots + ENTRY_SIZE * number + 4
    shape = ((max_slots - min_slots) // slots_an_entry + 1,)
    places = np.ndarray(shape, ">i8", file.buffer, first, (ENTRY_SIZE,))
    for slots in (min_slots + slots_an_entry * np.flatnonzero(places == header.end_physical_offset)).tolist():
        if fits(slots):
            return slots, (room - SLOT_SIZE * slots) // ENTRY_SIZE
    return None


def check_geometry(slots: int, entries: int) -> None:
    """Check that a file can have this geometry; `ConfigError` if not."""
    if slots < 1 or entries < 2:
        raise ConfigError(f"expected at least 1 slot and 2 entries, found {slots} and {entries}")


class IndexHeader(NamedTuple):
    """The header of an index file; times are milliseconds."""

    begin_timestamp_ms: int
    end_timestamp_ms: int
    begin_physical_offset: int
    end_physical_offset: int
    slot_count: int
    index_count: int
    """The number of the next entry: one more than the number of entries."""

    def overlaps(self, begin_ms: int, end_ms: int) -> bool:
        """Return whether the file can hold entries of a time from ``begin_ms`` to ``end_ms``."""
        first, last = self.begin_timestamp_ms, self.end_timestamp_ms
        return (begin_ms < first and end_ms > last) or first <= begin_ms <= last or first <= end_ms <= last

    @property
    def follower(self) -> IndexHeader:
        """Return the header of an empty file that follows a file with this header."""
        timestamp, physical = max(self.end_timestamp_ms, 0), max(self.end_physical_offset, 0)
        return IndexHeader(timestamp, timestamp, physical, physical, 0, 1)


FRESH: Final = IndexHeader(0, 0, 0, 0, 0, 1)
"""The header of the first file, without an entry."""


def entry_seconds(timestamp_ms: int, begin_timestamp_ms: int) -> int:
    """Return the stored time of an entry, in Java's 64-bit arithmetic."""
    if begin_timestamp_ms <= 0:
        return 0
    difference = timestamp_ms - begin_timestamp_ms
    if difference < -1 << 63:
        difference += 1 << 64
    return min(max(difference, 0) // 1000, MAX_SECONDS)
