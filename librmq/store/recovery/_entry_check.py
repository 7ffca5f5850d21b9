"""Comparison of a queue's entries with those of its records, and correction of differences."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from librmq.commitlog import CommitLog
from librmq.consumequeue import ConsumeQueue
from librmq.consumequeue_entries import ENTRY, ENTRY_SIZE, HOLE_SIZE, is_ext_address
from librmq.errors import CorruptionError
from librmq.files import Damage
from librmq.message import StoredMessage, record
from librmq.message.properties import decode_properties, tags_code
from librmq.message.topics import SystemTopic
from librmq.runtime import lazy_numpy as np
from librmq.store.engine.derivation import BitmapOf
from librmq.store.engine.store_parts import QueueName

_LONG: Final = struct.Struct(">q")


class ExpectedEntry(NamedTuple):
    """The entry of a record, and the content of its extension unit."""

    packed: bytes
    store_timestamp_ms: int
    properties: bytes

    @property
    def physical_offset(self) -> int:
        """Physical offset in the entry."""
        return int.from_bytes(self.packed[:8], "big")


class EntryRun(NamedTuple):
    """The entries that records expect in a queue from queue offset ``first`` on."""

    queue: ConsumeQueue
    topic: str
    first: int
    entries: Sequence[bytes]
    units: Mapping[int, ExpectedEntry]
    """By queue offset, for a queue with extension."""

    def count_same(self, log: CommitLog) -> int:
        """Return how many of the entries the queue has, up to the first that differs or lacks."""
        same, entries = 0, self.entries
        while same < len(entries) and self.first >= self.queue.min_offset:
            raw = self.queue.read(self.first + same, len(entries) - same)
            if not raw:
                break
            count = len(raw) // ENTRY_SIZE
            if raw != b"".join(entries[same : same + count]):
                for number in range(same, same + count):
                    stored = raw[ENTRY_SIZE * (number - same) : ENTRY_SIZE * (number - same + 1)]
                    if stored == entries[number] or self._leads_to(log, stored, number):
                        continue
                    following = entries[number + 1] if number + 1 < len(entries) else b""
                    is_made_up = ENTRY.unpack(entries[number])[1] == HOLE_SIZE or entries[number][:12] == following[:12]
                    if not following or not is_made_up or not _is_hole(stored, following, log.file_size):
                        return number
            same += count
        return same

    def _leads_to(self, log: CommitLog, stored: bytes, number: int) -> bool:
        """Return whether a different entry is acceptable: by its unit, or by the rules for delayed messages."""
        queue, expected, queue_offset = self.queue, self.entries[number], self.first + number
        place, size, code = ENTRY.unpack(stored)
        if stored[:12] != expected[:12]:
            return False
        message = record_at(log, place, size)
        is_free = message is not None and is_illegible(message)

        def is_acceptable(stored_code: int) -> bool:
            if is_free or stored_code == ENTRY.unpack(expected)[2]:
                return True
            is_delayed = self.topic == SystemTopic.SCHEDULE
            return is_delayed and message is not None and _can_wait_until(message, stored_code)

        if not is_ext_address(code):
            return is_acceptable(code)
        if queue.ext is None:
            return False  # there are no units to which it could point
        if before := queue.read(queue_offset - 1, 1):
            place_before, _, earlier = ENTRY.unpack(before)
            if place_before >= log.begin and is_ext_address(earlier) and earlier >= code:
                return False  # units are in the order of their entries, except those of deleted records
        unit, entry = queue.ext_unit(code), self.units.get(queue_offset)
        if unit is None or entry is None:
            return False
        return is_acceptable(unit.tags_code) and unit.store_timestamp_ms == entry.store_timestamp_ms

    def difference(self) -> Damage:
        """Return as damage that the queue has another first entry, or lacks it."""
        queue, first = self.queue, self.first
        path, position = queue.place_of(first)
        kind, what = "missing" if first >= queue.max_offset else "entry", f"lacks entries from queue offset {first} on"
        if kind == "missing" and (missing := queue.what_is_missing()) is not None:
            path, position, what = queue.folder, 0, missing
        elif queue.min_offset <= first < queue.max_offset:
            entry = ENTRY.unpack(queue.read(first, 1))
            what = f"queue offset {first}: expected {ENTRY.unpack(self.entries[0])}, found {entry}"
        return Damage(path, position, kind, what, ENTRY_SIZE * len(self.entries))

    def write(self, bitmap_of: BitmapOf | None) -> None:
        """Let the queue end with these entries."""
        queue, packed = self.queue, list(self.entries)
        if self.first < queue.min_offset or self.first > queue.max_offset:
            queue.clear()
        else:
            queue.truncate_to(self.first)
        for number, entry in enumerate(self.entries if queue.ext is not None else ()):
            unit = self.units.get(self.first + number)
            if unit is None or queue.ext is None:
                continue
            # The address of a new unit stands in place of the tags code.
            place, size, code = ENTRY.unpack(entry)
            bitmap = None
            if bitmap_of is not None:
                properties = decode_properties(unit.properties) if unit.properties else None
                bitmap = bitmap_of(self.topic, properties, unit.store_timestamp_ms)
            packed[number] = ENTRY.pack(place, size, queue.ext.put(code, unit.store_timestamp_ms, bitmap))
        queue.append_many(self.first, b"".join(packed))


def _can_wait_until(message: StoredMessage, code: int) -> bool:
    """Return whether ``code`` can be the delivery time of a delayed message, or what 4.9's recovery puts in its place.

    The levels of the broker that wrote the entry can differ from those of the settings, because no file of a broker
    names them. Each is a whole number of seconds.
    """
    waits_ms = code - message.store_timestamp_ms
    return (waits_ms >= 0 and waits_ms % 1000 == 0) or code == tags_code(message.tags)


def wrong_field(log: CommitLog, physical_offset: int, at: int, expected: bytes, what: str) -> Damage:
    """Return the damage of a field at place ``at`` of a record; correct the field if the log is writable."""
    if log.sequence.writable:
        log.patch(physical_offset + at, expected)
    return Damage(log.sequence.path_at(physical_offset), physical_offset, "record", what, len(expected))


def misaddressed(log: CommitLog, physical_offset: int, at: int, actual: int, expected: int) -> Damage:
    """Return the damage of an offset in a record; correct it if the log is writable."""
    field = "physical offset" if at == record.PHYSICAL_OFFSET_AT else "queue offset"
    what = f"{field}: expected {expected}, found {actual}"
    return wrong_field(log, physical_offset, at, _LONG.pack(expected), what)


def is_illegible(message: StoredMessage) -> bool:
    """Return whether a record's properties end in zeros: it is torn, and its tags and keys are lost.

    As in 4.9, the queue entry and the keys written earlier are kept. Other zeros are damage.
    """
    return message.properties_raw[-1:] == b"\0"


def record_at(log: CommitLog, physical_offset: int, size: int) -> StoredMessage | None:
    """Return the record of that size at this place, None if there is none."""
    try:
        raw = log.read(physical_offset, size)
    except CorruptionError:
        return None
    return None if raw is None else StoredMessage(raw)


def hole(log: CommitLog, following: ExpectedEntry) -> bytes:
    """Return an entry in place of a lost message, which readers skip.

    If a broker finds no record at an entry, it skips all entries below the next log file, counted from the entry's
    place. So the entry names the file before the one of the next message, with an impossible size. In the first file
    the entry points to the next message, which a broker then returns twice.
    """
    place, size, _ = ENTRY.unpack(following.packed)
    start = place - place % log.file_size
    return ENTRY.pack(start - log.file_size, HOLE_SIZE, 0) if start else ENTRY.pack(place, size, 0)


def _is_hole(entry: bytes, following: bytes, file_size: int) -> bool:
    """Return whether readers can skip an entry without a message of its own."""
    place, size, _ = ENTRY.unpack(entry)
    next_place = ENTRY.unpack(following)[0]
    if size == HOLE_SIZE:
        return bool(place % file_size == 0 and place + file_size <= next_place)
    return entry[:12] == following[:12]


# ---- records in a wrong queue, by a changed byte of their topic or queue id


class Stray(NamedTuple):
    """A record that does not fit the count of the queue in its fields."""

    name: QueueName
    """The queue in its fields."""
    entry: ExpectedEntry
    release: Callable[[ExpectedEntry], None]
    """Called when the record turns out to be one of another queue, so that its own queue needs it no more."""


class Strays:
    """The records that do not fit the count of their queues, by queue offset.

    Such a record can belong to any other queue, so ``open_all()`` opens every queue as soon as there is one.
    """

    def __init__(self, open_all: Callable[[], None]) -> None:
        self.open_all = open_all
        self.renamed = False
        """Whether the topic of a record was corrected, with which its keys were indexed."""
        self._strays = defaultdict[int, dict[int, Stray]](dict)  # the keys are queue offset and physical offset
        self.passed: set[int] = set()
        """Places of records behind which the count of their queue goes on as if they were not there."""

    def passed_first(self) -> list[Stray]:
        """Return the records that name queue offset 0, have no entry, and that no queue needs."""
        return [stray for place, stray in sorted(self._strays.get(0, {}).items()) if place in self.passed]

    def add_stray(self, queue_offset: int, stray: Stray) -> None:
        """Note a record that can belong to another queue, at the same queue offset."""
        self._strays[queue_offset][stray.entry.physical_offset] = stray

    def is_stray(self, queue_offset: int, physical_offset: int) -> bool:
        """Return whether the record at this place can belong to another queue."""
        return physical_offset in self._strays.get(queue_offset, ())

    def pop_stray(self, queue_offset: int, physical_offset: int) -> Stray | None:
        """Return the stray record at this place, if it is one, and forget it."""
        return self._strays.get(queue_offset, {}).pop(physical_offset, None)

    def stray_between(self, queue_offset: int, after: int, before: int, name: QueueName) -> int:
        """Return the place of a record between two that a changed byte took from the queue ``name``; -1 if none is.

        It has the same queue offset in a queue that does not need it.
        """
        for physical_offset, stray in self._strays.get(queue_offset, {}).items():
            if after < physical_offset < before and _is_one_byte_off(name, stray.name):
                return physical_offset
        return -1

    def pop_stray_between(self, queue_offset: int, after: int, before: int, name: QueueName) -> Stray | None:
        """Return that record, if there is one, and forget it."""
        return self.pop_stray(queue_offset, self.stray_between(queue_offset, after, before, name))


def _is_one_byte_off(first: QueueName, second: QueueName) -> bool:
    """Return whether a change of one byte turns one queue's name into the other's."""
    ours, theirs = (topic.encode() + queue_id.to_bytes(4, "big", signed=True) for topic, queue_id in (first, second))
    return len(ours) == len(theirs) and sum(a != b for a, b in zip(ours, theirs, strict=True)) == 1


def first_not_older(queue: ConsumeQueue, end: int, begin: int, log_file_size: int) -> int | None:
    """Return the first entry below queue offset ``end`` that is neither filler nor of a message before ``begin``."""
    at, raw = queue.stored_begin, queue.read(end, 1)
    latest_hole = ENTRY.unpack(raw)[0] - log_file_size if raw else 0
    try:
        for first, block in queue.blocks(at, end):
            place = block["physical_offset"]
            filler = (block["size"] == HOLE_SIZE) & ((place == 0) | (place <= latest_hole))
            wrong = np.flatnonzero((place >= begin) & ~filler)
            if len(wrong):
                return first + int(wrong[0])
            at = first + len(block)
    except CorruptionError:
        return at
    return None
