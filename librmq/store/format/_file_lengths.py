"""The settings that the lengths of a store's files show."""

from __future__ import annotations

import errno
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from librmq.errors import CorruptionError, StoreIOError
from librmq.files import File, Files
from librmq.files.interface import numbered_files
from librmq.runtime import lazy_numpy as np
from librmq.store.format.indexfile import (
    ENTRY_SIZE,
    HEADER,
    HEADER_SIZE,
    SLOT_SIZE,
    IndexHeader,
    file_length,
    geometry,
    unpack_entry,
)

_MAX_FILE_SIZE: Final = 1 << 31
_MAX_SLOTS: Final = 1 << 29


def majority_length(sequences: Iterable[list[tuple[int, int]]], unit: int, saved_length: int | None) -> int | None:
    """Return the length of most files, which is also the distance between their names.

    ``sequences`` have start and length of the files of each folder, ascending.

    Between two files others can be missing after a power failure: their distance is a multiple of ``saved_length``,
    which the store keeps in its settings, unless one of the two has another length.
    """
    votes: Counter[int] = Counter()
    for sequence in sequences:
        votes.update(length for start, length in sequence if length and start % length == 0)
        for (before, length), (after, next_length) in itertools.pairwise(sequence):
            distance = after - before
            shows_saved = saved_length and {length, next_length} <= {0, saved_length} and distance % saved_length == 0
            votes[saved_length if shows_saved and saved_length else distance] += 1
    plausible = [(count, length) for length, count in votes.items() if length % unit == 0 and length <= _MAX_FILE_SIZE]
    return max(plausible)[1] if plausible else None


def _find_geometry(file: File) -> tuple[int, int] | None:
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


def majority_geometry(folder: str, files: Files, settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return slots and entries of most index files in a folder.

    They are those that the store keeps, if these give the files' length, otherwise those of the oldest file of that
    length.
    """
    index_files = [entry for entry in numbered_files(files, folder) if entry.size]
    if not index_files:
        return None
    length = Counter(entry.size for entry in index_files).most_common(1)[0][0]
    slots, entries = settings.get("max_hash_slot_num"), settings.get("max_index_num")
    if slots is not None and entries is not None and file_length(slots, entries) == length:
        return slots, entries
    name = next(entry.name for entry in index_files if entry.size == length)
    try:
        shape = _find_geometry(files.open(os.path.join(folder, name)))
    except CorruptionError:
        return None  # opening the index names the damage
    except StoreIOError as error:
        if error.errno != errno.ENOENT:  # a writer can have deleted a file
            raise
        return None
    return shape if shape and shape[0] <= _MAX_SLOTS else geometry(length)
