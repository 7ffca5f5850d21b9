"""Queues held against the records that name them, in the order of the log, and mended where they differ.

Two fields of a record can be wrong without a trace in a checksum and be told from the rest all the same: its own
address, and its queue offset, since the records of a queue count on. A single record that falls out of the count is
misaddressed; two that agree are a jump (a topic that was deleted and made again, a record whose topic was lost).
"""

from __future__ import annotations

import struct
from collections.abc import MutableMapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from librmq.commitlog import CommitLog
from librmq.consumequeue import ENTRY, ENTRY_DTYPE, ENTRY_SIZE, ConsumeQueue
from librmq.consumequeue_ext import is_ext_address
from librmq.errors import CorruptionError, MessageIllegalError
from librmq.files.damage import Damage
from librmq.java.hashing import java_decode, string_hash
from librmq.message import record
from librmq.message.delay_levels import SCHEDULE_TOPIC
from librmq.message.message import StoredMessage
from librmq.message.topics import validate_queue
from librmq.store.engine.dispatch import BitmapOf
from librmq.store.engine.queue_table import OpenQueue

__all__ = ["COMPARED", "Entry", "GapError", "QueueCheck", "QueueChecks", "first_at", "misaddressed"]

_LONG: Final = struct.Struct(">q")
_FILLER_SIZE: Final = 0x7FFFFFFF
_FILLER: Final = ENTRY.pack(0, _FILLER_SIZE, 0)
_NONE: Final = 1 << 63
_LARGEST_GAP: Final = 100_000  # entries that are filled in where records are missing; beyond, the queue starts anew
COMPARED: Final = 4096
"""So many entries are compared together."""


class GapError(Exception):
    """A queue lacks entries from before the place where the walk began: walk over all of the log."""


class QueueChecks(dict[tuple[bytes, int], "QueueCheck"]):
    """The checks of all queues, by topic as it stands in records and queue id."""

    def __init__(
        self,
        log: CommitLog,
        queues: MutableMapping[tuple[str, int], ConsumeQueue],
        open_queue: OpenQueue,
        begin: int,
        mend: bool,
        bitmap_of: BitmapOf | None,
    ) -> None:
        super().__init__()
        self._bitmap_of = bitmap_of
        self._log = log
        self._queues = queues
        self._open_queue = open_queue
        self._begin = begin
        self._mend = mend
        self._by_name: dict[tuple[str, int], QueueCheck] = {}

    def make(self, topic_raw: bytes, queue_id: int, physical_offset: int) -> QueueCheck:
        """The check of a queue of which the first record comes; `CorruptionError` if there can be no such queue."""
        topic = java_decode(topic_raw)
        check = self._by_name.get((topic, queue_id))  # malformed topics may be read alike
        if check is None:
            try:
                validate_queue(topic, queue_id)
            except MessageIllegalError as error:
                path = self._log.sequence.path_at(physical_offset)
                raise CorruptionError(path, physical_offset, "record", f"it names no queue: {error}") from None
            queue = self._queues.get((topic, queue_id))
            if queue is None:
                queue = self._open_queue(topic, queue_id)
                if self._mend:
                    self._queues[topic, queue_id] = queue
            check = self._check(topic, queue_id, queue)
        self[topic_raw, queue_id] = check
        return check

    def _check(self, topic: str, queue_id: int, queue: ConsumeQueue) -> QueueCheck:
        check = QueueCheck(self._log, queue, topic, self._begin, self._mend, self._bitmap_of)
        self._by_name[topic, queue_id] = check
        return check

    def all(self) -> list[QueueCheck]:
        """The checks of all queues, those without a record too."""
        for (topic, queue_id), queue in list(self._queues.items()):
            if (topic, queue_id) not in self._by_name:
                self._check(topic, queue_id, queue)
        return list(self._by_name.values())


def misaddressed(log: CommitLog, physical_offset: int, at: int, found: int, expected: int, mend: bool) -> Damage:
    """A field of 8 bytes in a record that is not what it must be."""
    field = "physical offset" if at == record.PHYSICAL_OFFSET_AT else "queue offset"
    if mend:
        log.patch(physical_offset + at, _LONG.pack(expected))
    path = log.sequence.path_at(physical_offset)
    return Damage(path, physical_offset, "record", f"{field}: expected {expected}, found {found}", 8)


class Entry(NamedTuple):
    """The entry that a record leads to, and what its extension unit is made of."""

    packed: bytes
    store_timestamp_ms: int
    properties: bytes

    @property
    def physical_offset(self) -> int:
        return int.from_bytes(self.packed[:8], "big")


class QueueCheck:
    """One queue held against the records that name it, in the order of the log.

    Entries collect in ``entries`` and are compared together. Most records take a short cut that `reconcile` has
    inline: ``expected`` is the queue offset for which that holds, one that no record can have while none does.
    """

    def __init__(
        self,
        log: CommitLog,
        queue: ConsumeQueue,
        topic: str,
        begin: int,
        mend: bool,
        bitmap_of: BitmapOf | None,
    ) -> None:
        self._topic = topic
        self._bitmap_of = bitmap_of
        self.damages: list[Damage] = []
        self.prefix_hash = string_hash(topic + "#")
        self.entries: list[bytes] = []
        self.expected = _NONE
        self._log = log
        self._queue = queue
        self._begin = begin
        self._whole = begin <= log.begin
        self._mend = mend
        self._delayed = topic == SCHEDULE_TOPIC
        self._first = first_at(queue, begin)  # entries below it are of older records
        self._next: int | None = self._first if self._first > queue.min_offset else None
        self._held: tuple[int, Entry] | None = None
        self._units: dict[int, Entry] = {}  # of a queue with extension: by queue offset
        self._expect()

    def _expect(self) -> None:
        """Open the short cut for the next record, if there is nothing particular about it."""
        short = self._next is not None and self._held is None and self._queue.ext is None
        self.expected = self._next if short and self._next is not None else _NONE

    def settle(self) -> None:
        """Take over what went the short way."""
        if self.expected != _NONE:
            self._next = self.expected
        if len(self.entries) >= COMPARED:
            self._compare()

    def offer(self, queue_offset: int, entry: Entry) -> None:
        """Take the next record of the queue, which says that it is at ``queue_offset``."""
        self.settle()
        if self._held is not None:
            claimed, held = self._held
            self._held = None
            self._settle(claimed, held, queue_offset)
        if queue_offset == self._next:
            self._accept(queue_offset, entry, queue_offset)
        else:
            self._held = queue_offset, entry
        self._expect()

    def _settle(self, claimed: int, entry: Entry, following: int | None) -> None:
        """Decide the queue offset of a record that falls out of the count, by the next one and by the queue."""
        due = self._next
        possible = 0 <= claimed < 1 << 58
        if due is None:
            if self._points_at(self._queue.min_offset, entry):
                due = self._queue.min_offset
            elif following and not 0 < following - claimed <= _LARGEST_GAP and not self._points_at(claimed, entry):
                due = following - 1
            else:
                due = claimed if possible else 0
        elif possible:
            jumps = following == claimed + 1 if following is not None else self._points_at(claimed, entry)
            due = claimed if jumps else due
        self._accept(claimed, entry, due)

    def _points_at(self, queue_offset: int, entry: Entry) -> bool:
        raw = self._queue.read(queue_offset, 1)
        return raw[:12] == entry.packed[:12]  # with the size: zeros are no entry of the log's first record

    def _accept(self, claimed: int, entry: Entry, queue_offset: int) -> None:
        if queue_offset != claimed:
            at = record.QUEUE_OFFSET_AT
            self.damages.append(misaddressed(self._log, entry.physical_offset, at, claimed, queue_offset, self._mend))
        if self._next is None:
            if queue_offset and not self._whole:
                raise GapError
            self._first = queue_offset
        elif queue_offset != self._next:
            self._jump(queue_offset)
        self._next = queue_offset + 1
        self.entries.append(entry.packed)
        if self._queue.ext is not None:
            self._units[queue_offset] = entry
        if len(self.entries) >= COMPARED:
            self._compare()

    def _jump(self, queue_offset: int) -> None:
        """The count goes on elsewhere."""
        assert self._next is not None
        gap = queue_offset - self._next
        if gap > 0 and not self._whole:
            raise GapError
        if 0 < gap <= _LARGEST_GAP:
            self.entries += [_FILLER] * gap
            return
        # The topic was made anew (or lost more than can be filled in): the later records are the queue.
        self.damages = [damage for damage in self.damages if damage.kind == "record"]
        if gap < 0:
            replaced = min(-gap, len(self.entries))
            del self.entries[len(self.entries) - replaced :]
            self._next -= replaced
            self._compare()
            self._first = min(self._first, queue_offset)
        else:
            self.entries = []
            self._first = queue_offset

    def _compare(self) -> None:
        """Hold what has collected against the queue."""
        entries, queue = self.entries, self._queue
        if not entries:
            return
        assert self._next is not None
        at = self._next - len(entries)
        same = self._count_same(at, entries) if at >= queue.min_offset else 0
        if same < len(entries):
            self._report(at + same, entries[same], len(entries) - same)
            if self._mend:
                self._write(at + same, entries[same:])
        self.entries = []
        self._units = {}

    def _report(self, queue_offset: int, expected: bytes, count: int) -> None:
        queue = self._queue
        lacking = queue_offset >= queue.max_offset
        if lacking and self.damages and self.damages[-1].kind == "missing":
            return  # said already
        path, position = queue.place_of(queue_offset)
        what = f"lacks entries from queue offset {queue_offset} on"
        if queue.min_offset <= queue_offset < queue.max_offset:
            found = ENTRY.unpack(queue.read(queue_offset, 1))
            what = f"queue offset {queue_offset}: expected {ENTRY.unpack(expected)}, found {found}"
        self.damages.append(Damage(path, position, "missing" if lacking else "entry", what, ENTRY_SIZE * count))

    def _write(self, queue_offset: int, entries: Sequence[bytes]) -> None:
        queue = self._queue
        if queue_offset < queue.min_offset or queue_offset > queue.max_offset:
            queue.clear()
        else:
            queue.truncate_to(queue_offset)
        if queue.ext is not None:
            entries = [self._with_unit(number, entry) for number, entry in enumerate(entries, queue_offset)]
        queue.append_many(queue_offset, b"".join(entries))

    def _with_unit(self, queue_offset: int, packed: bytes) -> bytes:
        """The entry with the address of a new unit in the place of its code."""
        entry = self._units.get(queue_offset)
        if entry is None or self._queue.ext is None:
            return packed
        physical_offset, size, tags_code = ENTRY.unpack(packed)
        bitmap = None
        if self._bitmap_of is not None:
            properties = entry.properties
            bitmap = self._bitmap_of(self._topic, record.decode_properties(properties) if properties else None)
        return ENTRY.pack(physical_offset, size, self._queue.ext.put(tags_code, entry.store_timestamp_ms, bitmap))

    def _count_same(self, queue_offset: int, entries: Sequence[bytes]) -> int:
        same = 0
        while same < len(entries):
            raw = self._queue.read(queue_offset + same, len(entries) - same)
            if not raw:
                return same
            count = len(raw) // ENTRY_SIZE
            if raw != b"".join(entries[same : same + count]):
                for number in range(same, same + count):
                    found = raw[ENTRY_SIZE * (number - same) : ENTRY_SIZE * (number - same + 1)]
                    if found != entries[number] and not self._leads_to(found, entries[number], queue_offset + number):
                        return number
            same += count
        return same

    def _leads_to(self, found: bytes, expected: bytes, queue_offset: int) -> bool:
        """Whether an entry says what is expected after all: by a unit, or as the original recovers it."""
        place, size, code = ENTRY.unpack(found)
        if found[:12] != expected[:12]:
            return False
        wanted = {ENTRY.unpack(expected)[2]}
        if self._delayed and (raw := self._log.read(place, size)):
            # After an unclean exit the original gives delayed records the code of their tags.
            wanted.add(record.tags_code(StoredMessage(raw).tags))
        if not is_ext_address(code):
            return code in wanted
        if self._queue.ext is None:
            return False  # there are no units that it could lead to
        if before := self._queue.read(queue_offset - 1, 1):
            place_before, _, earlier = ENTRY.unpack(before)
            if place_before >= self._log.begin and is_ext_address(earlier) and earlier >= code:
                return False  # units are in the order of their entries; of what is gone from the log none counts
        unit, entry = self._queue.ext_unit(code), self._units.get(queue_offset)
        if unit is None or entry is None:
            return False
        return unit.tags_code in wanted and unit.store_timestamp_ms == entry.store_timestamp_ms

    def finish(self) -> None:
        """No record follows."""
        self.settle()
        if self._held is not None:
            claimed, held = self._held
            self._held = None
            self._settle(claimed, held, None)
        self._compare()
        queue = self._queue
        if self._next is None:  # no record at all: every entry must be of an older one
            self._next = self._first
        if queue.max_offset > self._next:
            self._report_ahead(self._next)
            if self._mend:
                queue.truncate_to(self._next)
        if self._whole:
            self._check_older()
        elif not self._mend:
            return
        stale = queue.data_behind_end()
        if stale:
            path, position = queue.place_of(queue.max_offset)
            self.damages.append(Damage(path, position, "tail", "bytes behind the last entry", stale))
            if self._mend:
                queue.recover()

    def _report_ahead(self, queue_offset: int) -> None:
        path, position = self._queue.place_of(queue_offset)
        ahead = self._queue.max_offset - queue_offset
        what = f"{ahead} entries from queue offset {queue_offset} on that no record of the log leads to"
        self.damages.append(Damage(path, position, "ahead", what, ENTRY_SIZE * ahead))

    def _check_older(self) -> None:
        """Entries before the log's first record of the queue must point below the log, or be filler."""
        queue = self._queue
        wrong = _first_not_older(queue, self._first, self._begin)
        if wrong is None:
            return
        path, position = queue.place_of(wrong)
        what = f"queue offset {wrong}: points at no record of this queue"
        self.damages.append(Damage(path, position, "entry", what, ENTRY_SIZE))
        if not self._mend:
            return
        kept = queue.entries(self._first)
        units = [queue.ext_unit(code) for code in kept["tags_code"].tolist()]
        queue.truncate_to(wrong)
        queue.append_many(wrong, _FILLER * (self._first - wrong))
        if queue.ext is not None:
            for number, unit in enumerate(units):
                if unit is not None:
                    kept["tags_code"][number] = queue.ext.put(unit.tags_code, unit.store_timestamp_ms, unit.bitmap)
        queue.append_many(self._first, kept.tobytes())
        queue.serve_from(self._begin)


def _first_not_older(queue: ConsumeQueue, end: int, begin: int) -> int | None:
    """The first entry below queue offset ``end`` that is no filler and of no message before ``begin`` of the log."""
    at = queue.stored_begin
    try:
        for first, block in queue.blocks(at, end):
            place = block["physical_offset"]
            wrong = np.flatnonzero((place >= begin) & ((place != 0) | (block["size"] != _FILLER_SIZE)))
            if len(wrong):
                return first + int(wrong[0])
            at = first + len(block)
    except CorruptionError:
        return at
    return None


def first_at(queue: ConsumeQueue, physical_offset: int) -> int:
    """The first queue offset whose message is at or behind ``physical_offset``, by halving.

    From the end on in growing steps before, since it mostly is there: so few files are mapped.
    """
    low, high = queue.min_offset, queue.max_offset
    step = 1
    while low < high:
        middle = max(low, high - step) if step else (low + high) // 2
        at = _behind_filler(queue, middle, high)
        raw = queue.read(at, 1) if at < high else b""
        if not raw or ENTRY.unpack(raw)[0] >= physical_offset:
            high, step = middle, 2 * step
        else:
            low, step = at + 1, 0
    return _behind_filler(queue, low, queue.max_offset)


def _behind_filler(queue: ConsumeQueue, queue_offset: int, end: int) -> int:
    """The first entry from ``queue_offset`` to ``end`` that is no filler."""
    while queue_offset < end and queue.read(queue_offset, 1) == _FILLER:
        raw = queue.read(queue_offset, min(COMPARED, end - queue_offset))
        others = np.flatnonzero(np.frombuffer(raw, ENTRY_DTYPE)["size"] != _FILLER_SIZE)
        queue_offset += int(others[0]) if len(others) else len(raw) // ENTRY_SIZE
    return queue_offset
