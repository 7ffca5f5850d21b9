"""Search for the starts of records in a stretch of the log, without queue entries.

A record's size leads to the next record, so one chain reaches all of them, step by step. To use arrays instead, many
chains are followed in lock step, each from a guess: the first magic after an evenly spaced place. A chain counts if the
chain before it ends at its start. A guess can be wrong, because a body can contain what looks like a record; then the
plain walk continues until it meets a right guess.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from librmq.columns.arrays import Bytes, Ints, gather
from librmq.errors import RecordError
from librmq.message import record

WINDOW: Final = 64 << 20
"""Bytes of the log to scan before the found records are yielded."""
_STRETCH: Final = 64 << 10
"""Distance between guesses."""
_NEAR: Final = 4096
_MAGIC: Final = record.MESSAGE_MAGIC.to_bytes(4, "big")
_MAGICS: Final = (record.MESSAGE_MAGIC, record.MESSAGE_MAGIC_V2)
_SIZE_AND_MAGIC: Final = record.header_struct("size", "magic", unsigned=("size",))


def record_starts(raw: Bytes, begin: int, end: int) -> Iterator[tuple[Ints, list[tuple[int, str]]]]:
    """Yield the starts of records in ``raw``, a log file, from ``begin`` to ``end``, some MiB at a time.

    Each item also has the places without a readable record, and why; the scan skips from there to ``end``.
    """
    at = begin
    while at < end:
        bad: list[tuple[int, str]] = []
        starts: list[Ints] = []
        until = min(end, at + WINDOW)
        chains = _Chains.from_guesses(raw, at, until) if until - at >= 2 * _STRETCH else None
        while at < until:
            linked = None if chains is None else chains.linked(at)
            if linked is not None:
                places, at = linked
                starts.append(places)
            else:
                places, at = _plain(raw, at, until, end, chains.numbers if chains is not None else {}, bad)
                starts.append(places)
        yield np.concatenate(starts), bad


def _plain(
    raw: Bytes, place: int, until: int, end: int, chain_numbers: dict[int, int], bad: list[tuple[int, str]]
) -> tuple[Ints, int]:
    """Walk the records from ``place`` to ``until`` or to a known one; return them and where it ended.

    ``chain_numbers`` has the known records, by their places.

    At bytes that are not a record the walk ends, and returns ``end``.
    """
    view, size, places = raw.data, len(raw), []
    unpack = _SIZE_AND_MAGIC.unpack_from
    begin, last = place, min(until, size - record.FIXED_SIZE)
    while place < until:
        while place < last:  # fast path: plain records
            length, magic = unpack(view, place)
            if magic != record.MESSAGE_MAGIC or length < record.FIXED_SIZE or place + length > size:
                break
            places.append(place)
            place += length
            if place in chain_numbers:
                return np.array(places, np.int64), place
        if place >= until:
            break
        if place + record.BLANK_SIZE > size:
            if raw[place:end].any():
                bad.append((place, "expected a record, found the end of the file"))
            place = end
            break
        length, magic = unpack(view, place)
        if magic in _MAGICS and length >= record.FIXED_SIZE and place + length <= size:
            places.append(place)
            place += length
            if place in chain_numbers and place > begin:
                break
        elif magic == record.BLANK_MAGIC or (not length and not magic and not raw[place:end].any()):
            place = end  # a blank, or zeros after the last record
        else:
            try:
                record.frame(view, place, size)
                why = "expected a record"
            except RecordError as error:
                why = error.reason
            bad.append((place, why))
            place = end
    return np.array(places, np.int64), place


class _Chains(NamedTuple):
    """Chains of plain records, each from a guess."""

    numbers: dict[int, int]
    """Start of each chain that has a record, and its number."""
    places: Ints
    """Starts of the records of all chains, chain by chain."""
    firsts: Ints
    """Index in ``places`` of each chain's first record; the last item is the number of records."""
    ends: Ints
    """End of each chain: at or after the start of the next one, or at bytes that are not a plain record."""
    broken: Ints
    """The chains that do not end where the next one starts."""

    @classmethod
    def from_guesses(cls, raw: Bytes, begin: int, end: int) -> _Chains:
        begins = _guesses(raw, begin, end)
        bounds = np.append(begins[1:], end)
        ends = begins.copy()
        size = len(raw)
        which, at = np.arange(len(begins)), begins
        owners: list[Ints] = []
        steps: list[Ints] = []
        while len(which):
            inside = at <= size - record.FIXED_SIZE
            word = gather(raw, np.where(inside, at, 0), ">u8")
            following = at + (word >> np.uint64(32)).astype(np.int64)
            plausible = (word & np.uint64(0xFFFFFFFF)) == record.MESSAGE_MAGIC
            plausible &= inside & (following - at >= record.FIXED_SIZE) & (following <= size)
            if not plausible.all():
                which, at, following = which[plausible], at[plausible], following[plausible]
            owners.append(which)
            steps.append(at)
            ends[which] = following
            going_on = following < bounds[which]
            if going_on.all():
                at = following
            else:
                which, at = which[going_on], following[going_on]
        owner, places = np.concatenate(owners), np.concatenate(steps)
        firsts = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=len(begins)))))
        order = np.argsort(owner, kind="stable")
        broken = np.append(np.flatnonzero(ends[:-1] != begins[1:]), len(begins) - 1)
        numbers = {place: number for number, place in enumerate(begins.tolist()) if firsts[number] < firsts[number + 1]}
        return cls(numbers, places[order], firsts, ends, broken)

    def linked(self, at: int) -> tuple[Ints, int] | None:
        """Return the records from ``at`` through all linked chains, and their end; None if no chain begins there."""
        first = self.numbers.get(at)
        if first is None:
            return None
        last = int(self.broken[np.searchsorted(self.broken, first)])
        return self.places[self.firsts[first] : self.firsts[last + 1]], int(self.ends[last])


def _guesses(raw: Bytes, begin: int, end: int) -> Ints:
    """Return ``begin``, and after each stride the first offset that looks like a record."""
    guesses = [begin]
    for at in range(begin + _STRETCH, end - record.FIXED_SIZE, _STRETCH):
        for first, until in ((at, at + _NEAR), (at + _NEAR - 3, at + _STRETCH)):
            index = raw[first : min(until, end)].tobytes().find(_MAGIC)
            if index >= 0:
                place = first + index - 4
                if place > guesses[-1]:
                    guesses.append(place)
                break
    return np.array(guesses, np.int64)
