"""Check of an index file for contradictions within it."""

from __future__ import annotations

from typing import Final

from librmq.runtime import lazy_numpy as np
from librmq.store.format.index_layout import HEADER_SIZE, SLOT_SIZE
from librmq.store.format.indexfile import IndexFile

_CHUNK: Final = 1 << 20


def find_flaw(file: IndexFile) -> tuple[int, str] | None:
    """Compare header, entries and slots, and return position and description of the first contradiction.

    This does not compare the entries with the log.
    """
    header, entries = file.header, file.entries()
    count = len(entries)
    numbers = np.arange(1, count + 1, dtype=np.int32)
    if count:
        ends = int(entries["physical"][0]), int(entries["physical"][-1])
        if ends != (header.begin_physical_offset, header.end_physical_offset):
            return 16, f"header: physical offsets {header[2:4]}, the entries have {ends}"
    wrong = np.flatnonzero((entries["hash"] < 0) | (np.diff(entries["physical"], prepend=0) < 0))
    if len(wrong):
        number = int(wrong[0]) + 1
        return file.entry_position(number), f"entry {number}: hash or physical offset out of order"
    slots = entries["hash"] % file.max_slots
    order = np.argsort(slots, kind="stable")
    same = np.diff(slots[order], prepend=-1) == 0
    previous = np.zeros(count, np.int32)
    previous[order[same]] = numbers[order[np.flatnonzero(same) - 1]]
    wrong = np.flatnonzero(previous != entries["previous"])
    if len(wrong):
        number = int(wrong[0]) + 1
        actual, expected = int(entries["previous"][number - 1]), int(previous[number - 1])
        return file.entry_position(number) + 16, f"entry {number}: previous is {actual}, expected {expected}"
    last = np.flatnonzero(np.diff(slots[order], append=-1) != 0)
    table = file.slots()
    expected_slots = np.stack([slots[order[last]], numbers[order[last]]], axis=1)
    found_slots = np.stack([table["slot"], table["number"]], axis=1)
    if not np.array_equal(expected_slots, found_slots):
        differing = {tuple(row) for row in expected_slots.tolist()} ^ {tuple(row) for row in found_slots.tolist()}
        slot = min(differing)[0]
        return HEADER_SIZE + SLOT_SIZE * slot, f"slot {slot} does not lead to the newest entry of its hash"
    if header.slot_count != len(table):
        return 32, f"header: {header.slot_count} slots are in use, found {len(table)}"
    for begin, end in ((0, 1), (count + 1, file.max_entries)):
        position = _first_byte(file, file.entry_position(begin), file.entry_position(end))
        if position is not None:
            return position, "expected zeros where no entry is"
    return None


def _first_byte(file: IndexFile, begin: int, end: int) -> int | None:
    """Return the position of the first byte that is not zero."""
    for at in range(begin, end, _CHUNK):
        block = file.file.buffer[at : min(end, at + _CHUNK)]
        used = block.lstrip(b"\0")
        if used:
            return at + len(block) - len(used)
    return None
