"""Comparison of a queue with its records, in the order of the log, and repair of the differences.

No checksum covers a record's address and its queue offset, but errors in them are detectable, because the records of a
queue count up. A single record outside of the count has a wrong address. Two consecutive ones are a jump: a topic was
deleted and made again, or a record's topic was lost. No jump goes further ahead than records could have been written
between its two places in the log: 4.9 too puts the entries of such records directly behind the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from librmq.commitlog import CommitLog
from librmq.consumequeue import ConsumeQueue, files_of, offset_at_place
from librmq.consumequeue_entries import ENTRY, ENTRY_SIZE, HOLE_SIZE, entry_dtype
from librmq.files import Damage
from librmq.message import StoredMessage, record
from librmq.message.topics import SystemTopic, TopicPrefix
from librmq.runtime import lazy_numpy as np
from librmq.store.engine.derivation import COMPARED, BitmapOf, DerivedRecord, topic_hash
from librmq.store.engine.store_parts import QueueName
from librmq.store.format.directory import LOST
from librmq.store.recovery._entry_check import (
    EntryRun,
    ExpectedEntry,
    Stray,
    Strays,
    first_not_older,
    hole,
    misaddressed,
    record_at,
)

_FILLER: Final = ENTRY.pack(0, HOLE_SIZE, 0)
_NONE: Final = 1 << 63
_LARGEST_OFFSET: Final = 1 << 58
_LARGEST_GAP: Final = 100_000  # where more entries are missing, the queue starts again
_MOST_STRAYS: Final = 16  # before the last record of a queue
_SMALLEST: Final = record.FIXED_SIZE + 1
"""Bytes of a record with nothing but a topic of one character."""


class GapError(Exception):
    """A queue lacks entries from before the checked records, so all records must be checked."""

    def __init__(self, name: QueueName) -> None:
        super().__init__(name)
        self.name = name


def _is_possible(queue_offset: int) -> bool:
    return 0 <= queue_offset < _LARGEST_OFFSET


def _is_better_first(claimed: int, following: int, place: int) -> bool:
    """Return whether a queue's first record is right about its offset rather than the next one, at ``place``.

    A log of this length cannot have had as many records as an offset that is too large says.
    """
    gap = following - claimed
    return gap > 0 and (gap <= _LARGEST_GAP or following * _SMALLEST > place)


class QueueCheck:
    """Comparison of one queue with its records, in the order of the log.

    Its states, in which a record finds it:

    - *unopened*, ``first`` is -1: no record came, or each continued the count that the first one named,
      ``_named_first``. The queue was not looked at.
    - *empty*, ``_due`` is None: the queue is open, and neither a record nor an older entry begins its count.
    - *counting*: ``_due`` is the queue offset of the next record, and the last in ``entries`` is directly below it.
    - *undecided*: ``undecided`` is a record that names another offset than the due one; the next record decides.

    Entries collect in ``entries`` and are compared together. Most records take a short cut, unopened or counting:
    they have the queue offset ``expected``, and ``_due`` follows at `take_over`. In other states, and where a queue has
    an extension, ``expected`` is an impossible offset.
    """

    def __init__(
        self,
        strays: Strays,
        open_queue: Callable[[QueueName], ConsumeQueue],
        log: CommitLog,
        name: QueueName,
        begin: int,
        is_complete: bool,
        bitmap_of: BitmapOf | None,
    ) -> None:
        """Begin at physical offset ``begin``; ``is_complete`` means that no record of the queue is before it.

        ``open_queue(name)`` returns the queue, made if there is none. All checks share ``strays``.
        """
        self.name = name
        topic, self._queue_id = name
        self._strays = strays
        self._open = open_queue
        self._topic = topic
        self.left_out = 0
        """Number of excluded records of a deleted topic with this name."""
        self.released_all = False
        """Whether the only record that names the queue belongs to another one."""
        self.damages: list[Damage] = []
        self.lost: list[tuple[StoredMessage, Damage]] = []
        """Entries without a record of this queue, and the whole ones to which they lead."""
        self._bitmap_of = bitmap_of
        self._same_until = _NONE  # the first queue offset whose entry was another one, or lacked
        self.prefix_hash = topic_hash(topic)
        self.entries: list[bytes] = []
        self.expected = _NONE
        self._log = log
        self._opened: ConsumeQueue | None = None
        self.begin = begin
        self._is_complete = is_complete
        self._delayed = topic == SystemTopic.SCHEDULE
        # Records of a light queue are those of other queues, and stay as they are.
        self._is_light = topic.startswith(TopicPrefix.LIGHT)
        self._named_first = -1  # without a record, and once the queue is open
        self.first = -1
        """First checked queue offset; entries below belong to older records."""
        self._due: int | None = None
        self.undecided: tuple[int, ExpectedEntry] | None = None
        """A record that waits for the next one to decide its place, and the queue offset that it names."""
        self._compared_end = 0  # the last record that `_compare` took ends here in the log
        self._units: dict[int, ExpectedEntry] = {}  # by queue offset, what took no short cut

    @property
    def queue(self) -> ConsumeQueue:
        """The checked queue, opened at its first use."""
        if self._opened is None:
            self._opened = self._open(self.name)
        return self._opened

    def agrees(self) -> bool:
        """Return whether a queue in a small file is as the records say, with the collected entries behind older ones.

        Otherwise it is to be looked at closely.
        """
        queue = self.queue
        stored = files_of(queue).small if queue.ext is None and self.first < 0 else None
        if stored is None:
            return False
        start, expected = queue.stored_begin, b"".join(self.entries)
        stored += bytes(-len(stored) % ENTRY_SIZE)  # the last entry can end in zeros
        older = len(stored) - len(expected)
        first, end = start + older // ENTRY_SIZE, start + len(stored) // ENTRY_SIZE
        if not stored or older < 0 or not stored.endswith(expected):
            return False
        if expected and (first != self._named_first or self.expected != end):
            return False
        if not (older or first == 0 or self._is_complete):
            return False  # earlier records may be missing
        if older:
            block = np.frombuffer(stored, entry_dtype(), older // ENTRY_SIZE)
            places, sizes = block["physical_offset"], block["size"]
            if not ((places >= 0) & (places < self.begin) & (sizes > 0) & (sizes < HOLE_SIZE)).all():
                return False
            if not places[-1]:
                return False  # a write of zeros that was torn can have left the size alone
        self.first, self._due, self._named_first = first, end, -1
        return True

    def is_plain(self) -> bool:
        """Open the queue, and return whether all records are in its count and it ends with them."""
        self._find_first()
        if self._named_first >= 0 or self.undecided is not None:
            return False
        if self.expected != _NONE:
            self._due = self.expected
        return self.queue.max_offset <= (self.first if self._due is None else self._due)

    def open_queue(self) -> None:
        """Open the queue; earlier records that do not continue its count are taken again."""
        self._find_first()
        if self._named_first >= 0:
            claimed, self._named_first = self._named_first, -1
            entries, self.entries, self.expected = self.entries, [], _NONE
            for queue_offset, packed in enumerate(entries, claimed):
                self.offer_entry(queue_offset, ExpectedEntry(packed, 0, b""))

    def _find_first(self) -> None:
        """Open the queue, find the beginning of its records, and take the collected entries if they follow there."""
        if self.first >= 0:
            return
        queue, entries, claimed = self.queue, self.entries, self._named_first
        at = queue.min_offset
        is_there = bool(entries) and self._is_first(claimed, entries[0])
        self.first = claimed if is_there else offset_at_place(queue, self.begin)
        while self.first > queue.stored_begin and self._is_torn(self.first - 1):
            self.first -= 1
        self._due = self.first if self.first > at else None
        if not entries:
            return
        if self._due is None and (claimed == 0 or self._is_complete):
            is_new = queue.max_offset == 0 and len(entries) > 1
            if is_new or (is_there and claimed == at):
                self.first = self._due = claimed
        if self._due == claimed:
            self._due, self._named_first = claimed + len(entries), -1
            self._expect()

    def _is_first(self, queue_offset: int, entry: bytes) -> bool:
        """Return whether an entry is there, and before it none of a checked record."""
        queue = self.queue
        at = max(queue_offset - 1, queue.min_offset)
        raw = queue.read(at, queue_offset - at + 1) if at <= queue_offset else b""
        if raw[-ENTRY_SIZE:][:12] != entry[:12]:
            return False
        if at == queue_offset:
            return True
        place, size, _ = ENTRY.unpack_from(raw)
        return len(raw) > ENTRY_SIZE and 0 <= place < self.begin and size != HOLE_SIZE

    def _is_torn(self, queue_offset: int) -> bool:
        """Return whether an entry is half of a torn write of zeros: its place is 0 already, its size still the old one.

        Only the log's first record is at place 0, and no other entry with a size stands before its entry.
        """
        raw = self.queue.read(queue_offset, 1)
        place, size, _ = ENTRY.unpack(raw) if raw else (0, 0, 0)
        if not raw or place or size == HOLE_SIZE:
            return False
        before = self.queue.read(queue_offset - 1, 1) if queue_offset > self.queue.stored_begin else b""
        if before and ENTRY.unpack(before)[1] != HOLE_SIZE:
            return True
        return self._log.begin == 0 and record_at(self._log, 0, size) is None

    def _expect(self) -> None:
        """Open the short cut for the next record unless it needs a full check."""
        is_usual = self.undecided is None and self.queue.ext is None
        self.expected = self._due if is_usual and self._due is not None else _NONE

    def take_over(self) -> None:
        """Take over the records of the short cut."""
        self._find_first()
        if self._named_first >= 0:
            self._strays.open_all()
        if self.expected != _NONE:
            self._due = self.expected
        if len(self.entries) >= COMPARED:
            self._compare()
            self.queue.unmap_all()  # so that its pages do not stay in memory

    def claim(self, queue_offset: int, physical_offset: int) -> bool:
        """Begin with a record that names ``queue_offset``, if it is the first one and the queue is not open yet."""
        if self.first >= 0 or self.entries or not _is_possible(queue_offset) or physical_offset < self.begin:
            return False
        self._named_first = self.expected = queue_offset
        return True

    def take_entries(self, entries: bytes) -> None:
        """Take the next records of the queue, which continue its count, together."""
        if len(entries) == ENTRY_SIZE and len(self.entries) < COMPARED - 1:  # as in a store of many queues
            self.entries.append(entries)
            self.expected += 1
            return
        packed = [entries[at : at + ENTRY_SIZE] for at in range(0, len(entries), ENTRY_SIZE)]
        queue_offset, end = self.expected, self.expected + len(packed)
        while queue_offset == self.expected and queue_offset < end:
            collected = self.entries
            number = min(end - queue_offset, COMPARED - len(collected))
            collected += packed[len(packed) - (end - queue_offset) :][:number]
            self.expected = queue_offset = queue_offset + number
            if len(collected) >= COMPARED:
                self.take_over()
        for number in range(queue_offset, end):  # the queue was opened just now, and does not hold the first ones
            self.offer_entry(number, ExpectedEntry(packed[number - end], 0, b""))

    def take(self, queue_offset: int, packed: bytes, record: DerivedRecord) -> None:
        """Take the entry of the next record, at ``queue_offset``, by the short cut if it can."""
        if queue_offset == self.expected:  # nearly always so
            self.expected += 1
            self.entries.append(packed)
            if len(self.entries) >= COMPARED:
                self.take_over()
        else:
            self.offer_entry(queue_offset, ExpectedEntry(packed, record.store_timestamp_ms, record.properties))

    def offer_entry(self, queue_offset: int, entry: ExpectedEntry) -> None:
        """Take the next record of the queue, which names ``queue_offset``."""
        if entry.physical_offset < self.begin:
            if not self.left_out:  # this one can be another queue's
                self._add_stray(queue_offset, entry)
            self.left_out += 1
            return
        if self.claim(queue_offset, entry.physical_offset):
            self.expected = queue_offset + 1
            self.entries.append(entry.packed)
            return
        if self.first < 0:
            self._strays.open_all()
        self.take_over()
        self._decide(queue_offset, entry.physical_offset)
        if queue_offset == self._due:
            self._accept(queue_offset, entry, queue_offset)
        else:
            self.undecided = queue_offset, entry
            self._add_stray(queue_offset, entry)
        self._expect()

    def _add_stray(self, queue_offset: int, entry: ExpectedEntry) -> None:
        if not self._is_light:
            self._strays.add_stray(queue_offset, Stray(self.name, entry, self.release_entry))

    def release_entry(self, entry: ExpectedEntry) -> None:
        """Leave a record to the queue to which it belongs."""
        if self.undecided is not None and self.undecided[1] is entry:
            self.undecided = None
            self.released_all = self._due is None and self.queue.max_offset == 0
            self._expect()

    def _decide(self, following: int | None, place: int = 0) -> None:
        """Decide the queue offset of an undecided record, by the queue and the next record, at ``place``."""
        if self.undecided is None:
            return
        (claimed, entry), self.undecided = self.undecided, None
        due = self._due
        possible = _is_possible(claimed)
        if due is None:
            # Two records that follow each other are right, and a queue that is elsewhere had its file renamed.
            is_confirmed = possible and following == claimed + 1
            if not is_confirmed and self.points_at(self.queue.min_offset, entry.packed):
                due = self.queue.min_offset
            elif (
                following
                and _is_possible(following)
                and not (possible and _is_better_first(claimed, following, place))
                and not self.points_at(claimed, entry.packed)
            ):
                due = following - 1
            else:
                due = claimed if possible else 0
        elif following == due > self.first:  # one of two records with the same place belongs to another queue
            if claimed == due - 1 and self.entries and self._replaces_last(claimed, entry):
                replaced, self.entries[-1] = self.entries[-1], entry.packed
                self._strays.pop_stray(claimed, entry.physical_offset)
                self._add_stray(claimed, ExpectedEntry(replaced, 0, b""))
                self._units[claimed] = entry
            elif claimed == 0 and not self.points_at(0, entry.packed):
                self._strays.passed.add(entry.physical_offset)
            return
        elif possible:
            points = self.points_at(claimed, entry.packed)
            jumps = following == claimed + 1 if following is not None else points or self._are_strays(claimed, entry)
            if jumps and not points and claimed > due and not self._can_be_ahead(claimed, entry):
                jumps = self._move_lone_first(claimed, entry)
            due = claimed if jumps else due
        self._strays.pop_stray(claimed, entry.physical_offset)
        self._accept(claimed, entry, due)

    def _replaces_last(self, claimed: int, entry: ExpectedEntry) -> bool:
        """Return whether a record is the one of its queue offset rather than the last one, which names the same.

        The queue decides. Where it has no entry of either, the topic was made again after a single message.
        """
        if claimed or self.points_at(claimed, entry.packed):
            return self.points_at(claimed, entry.packed)
        return not self.points_at(claimed, self.entries[-1])

    def _are_strays(self, claimed: int, entry: ExpectedEntry) -> bool:
        """Return whether the records that would be missing before this one, the last, name other queues by a byte."""
        due = self._due
        assert due is not None
        if self._is_light or self._delayed or not due < claimed <= due + _MOST_STRAYS:
            return False
        after = ENTRY.unpack(self.entries[-1])[0] if self.entries else self._place_before(due)
        before = entry.physical_offset
        return all(self._strays.stray_between(at, after, before, self.name) >= 0 for at in range(due, claimed))

    def _can_be_ahead(self, claimed: int, entry: ExpectedEntry) -> bool:
        """Return whether the log has room for the records that would be missing before this one."""
        assert self._due is not None
        raw = self.entries[-1] if self.entries else self.queue.read(self._due - 1, 1)
        place, size, _ = ENTRY.unpack(raw) if raw else (0, 0, 0)
        end = max(self._compared_end, place + (0 if size == HOLE_SIZE else size))
        room: int = entry.physical_offset - end
        return (claimed - self._due) * _SMALLEST <= room

    def _move_lone_first(self, claimed: int, following: ExpectedEntry) -> bool:
        """Put the only record so far directly before two that agree; return False if it must stay.

        It stays if no log of this length can have had as many records as the two say.
        """
        is_lone = self._due == self.first + 1 and len(self.entries) == 1 and not self._compared_end
        is_new = self._is_complete and self.queue.max_offset == 0 and not self._is_light
        if not (is_lone and is_new) or claimed * _SMALLEST > following.physical_offset:
            return False
        place, at = ENTRY.unpack(self.entries[0])[0], record.QUEUE_OFFSET_AT
        self.damages.append(misaddressed(self._log, place, at, self.first, claimed - 1))
        if self.first in self._units:
            self._units[claimed - 1] = self._units.pop(self.first)
        self.first, self._due = claimed - 1, claimed
        return True

    def points_at(self, queue_offset: int, packed: bytes) -> bool:
        """Return whether the queue's entry at ``queue_offset`` leads to the record of this one."""
        raw = self.queue.read(queue_offset, 1)
        # Compare the size too: the log's first record is at place 0, and zeros are not an entry of it.
        return raw[:12] == packed[:12]

    def _accept(self, claimed: int, entry: ExpectedEntry, queue_offset: int) -> None:
        if queue_offset != claimed and not self._is_light:
            at = record.QUEUE_OFFSET_AT
            self.damages.append(misaddressed(self._log, entry.physical_offset, at, claimed, queue_offset))
        if self._due is None:
            if queue_offset and not self._is_complete:
                raise GapError((self._topic, self._queue_id))
            self.first = queue_offset
            self._take_before(entry.physical_offset)
        elif queue_offset != self._due:
            self._jump(queue_offset, entry)
        self._due = queue_offset + 1
        self.entries.append(entry.packed)
        self._units[queue_offset] = entry
        if len(self.entries) >= COMPARED:
            self._compare()

    def _take_before(self, before: int) -> None:
        """Take the records directly below the first one that have an entry here, and name another queue by damage."""
        while raw := self.queue.read(self.first - 1, 1):
            place = ENTRY.unpack(raw)[0]
            if not (self.begin <= place < before and self._strays.is_stray(self.first - 1, place)):
                return
            entry = self._find_missing(self.first - 1, place - 1, before)
            if entry is None:
                return
            self.first, before = self.first - 1, place
            self.entries.insert(0, entry.packed)
            self._units[self.first] = entry

    def _jump(self, queue_offset: int, following: ExpectedEntry) -> None:
        """Continue the count at another queue offset."""
        assert self._due is not None
        gap = queue_offset - self._due
        if gap > 0 and not self._is_complete:
            raise GapError((self._topic, self._queue_id))
        if 0 < gap <= _LARGEST_GAP:
            after = ENTRY.unpack(self.entries[-1])[0] if self.entries else self._place_before(self._due)
            for lacking in range(self._due, queue_offset):
                entry = self._find_missing(lacking, after, following.physical_offset)
                if entry is None:
                    self._note_lost(lacking, following.physical_offset)
                    self.entries.append(hole(self._log, following))
                    continue
                after = entry.physical_offset
                self.entries.append(entry.packed)
                self._units[lacking] = entry
            return
        # The topic was made again, or too many records are missing, so the queue consists of the later records.
        self.damages[:] = [damage for damage in self.damages if damage.kind == "record"]
        self.lost.clear()
        if gap < 0:
            replaced = min(-gap, len(self.entries))
            for number, packed in enumerate(self.entries[len(self.entries) - replaced :], self._due - replaced):
                self._add_stray(number, ExpectedEntry(packed, 0, b""))
            del self.entries[len(self.entries) - replaced :]
            self._due -= replaced
            self._compare()
            self.first = min(self.first, queue_offset)
        else:
            self.entries = []
            self.first = queue_offset

    def _note_lost(self, queue_offset: int, before: int) -> None:
        """Note an entry without a record in its queue, if it leads to a whole one: that can be its record, damaged."""
        raw = self.queue.read(queue_offset, 1)
        place, size, _ = ENTRY.unpack(raw) if raw else (-1, 0, 0)
        if not self.begin <= place < before or size == HOLE_SIZE:
            return
        message = record_at(self._log, place, size)
        if message is None:
            return
        path, position = self.queue.place_of(queue_offset)
        what = f"queue offset {queue_offset} of {self._topic}/{self._queue_id} leads to {place}, and the log has no "
        self.lost.append((message, Damage(path, position, LOST, f"{what}record of it", size)))

    def had_entry_of(self, message: StoredMessage) -> bool:
        """Return whether the queue's files had the entry of a message before the comparison."""
        at, packed = message.queue_offset, ENTRY.pack(message.physical_offset, message.size, 0)
        return at < self._same_until and self.points_at(at, packed)

    def _place_before(self, queue_offset: int) -> int:
        raw = self.queue.read(queue_offset - 1, 1)
        return ENTRY.unpack(raw)[0] if raw else -1

    def _find_missing(self, queue_offset: int, after: int, before: int) -> ExpectedEntry | None:
        """Find the record of a missing queue offset between two physical offsets.

        One changed byte of its topic or queue id can make it a record of another queue. The earlier entry still leads
        to it. Without an entry, it is a record outside of another queue's count at this offset.
        """
        if self._is_light:
            return None
        raw = self.queue.read(queue_offset, 1)
        place, size, tags_code = ENTRY.unpack(raw) if raw else (-1, 0, 0)
        message = record_at(self._log, place, size) if after < place < before else None
        if message is not None and message.queue_offset == queue_offset:
            stray = self._strays.pop_stray(queue_offset, place)
        else:
            stray = None if self._delayed else self._strays.pop_stray_between(queue_offset, after, before, self.name)
            place, size, _ = ENTRY.unpack(stray.entry.packed) if stray is not None else (-1, 0, 0)
            message = record_at(self._log, place, size) if stray is not None else None
        if stray is not None:
            stray.release(stray.entry)
        if message is None:
            return None
        self._reclaim(message)
        if not self._delayed:
            tags_code = message.tags_code
        return ExpectedEntry(ENTRY.pack(place, size, tags_code), message.store_timestamp_ms, message.properties_raw)

    def _reclaim(self, message: StoredMessage) -> None:
        """Report and correct a record that names a wrong queue."""
        topic, at = self._topic.encode(), message.physical_offset
        _, _, topic_at, topic_end, _, _ = message.frame
        if len(topic) != topic_end - topic_at or (message.topic, message.queue_id) == (self._topic, self._queue_id):
            return
        what = f"topic and queue id: expected {self._topic} {self._queue_id}, found {message.topic} {message.queue_id}"
        self.damages.append(Damage(self._log.sequence.path_at(at), at, "record", what, message.size))
        if self._log.sequence.writable:
            self._strays.renamed |= message.topic != self._topic
            self._log.patch(at + topic_at, topic)
            self._log.patch(at + record.QUEUE_ID_AT, self._queue_id.to_bytes(4, "big"))

    def _compare(self) -> None:
        """Compare the collected entries with those of the queue, and correct differences if the log is writable."""
        if not self.entries:
            return
        assert self._due is not None
        run = EntryRun(self.queue, self._topic, self._due - len(self.entries), self.entries, self._units)
        same = run.count_same(self._log)
        if same < len(run.entries):
            differing = run._replace(first=run.first + same, entries=run.entries[same:])
            self._same_until = min(self._same_until, differing.first)
            damage = differing.difference()
            if damage.kind != "missing" or not self.damages or self.damages[-1].kind != "missing":
                self.damages.append(damage)  # once for all that the queue lacks
            if self._log.sequence.writable:
                differing.write(self._bitmap_of)
        self._compared_end = sum(ENTRY.unpack(self.entries[-1])[:2])
        self.entries, self._units = [], {}

    def finish_queue(self) -> None:
        """Finish after the last record."""
        self.take_over()
        self._decide(None)
        self._compare()
        queue = self.queue
        if self._due is None:  # there is no record, so every entry must belong to an older one
            self._due = self.first
        while queue.max_offset > self._due and not self.released_all:
            entry = self._find_missing(self._due, self._place_before(self._due), self._log.end)
            if entry is None:
                break
            self.entries.append(entry.packed)
            self._units[self._due] = entry
            self._due += 1
        self._compare()
        if queue.max_offset > self._due:
            for queue_offset in range(self._due, min(queue.max_offset, self._due + _LARGEST_GAP)):
                self._note_lost(queue_offset, self._log.end)
            path, position = queue.place_of(self._due)
            ahead = queue.max_offset - self._due
            what = f"{ahead} entries from queue offset {self._due} on without a record in the log"
            self.damages.append(Damage(path, position, "ahead", what, ENTRY_SIZE * ahead))
            if self._log.sequence.writable:
                queue.truncate_to(self._due)
        if self._is_complete:
            self._check_older()
        stale = queue.data_behind_end()
        if stale:
            path, position = queue.place_of(queue.max_offset)
            self.damages.append(Damage(path, position, "tail", "bytes after the last entry", stale))
            if self._log.sequence.writable:
                queue.recover()

    def _check_older(self) -> None:
        """Check that entries before the queue's first record point below the log, or are filler."""
        queue = self.queue
        if self.first <= queue.stored_begin:
            return
        wrong = first_not_older(queue, self.first, self.begin, self._log.file_size)
        if wrong is None:
            return
        for queue_offset in range(wrong, self.first):
            self._note_lost(queue_offset, self._log.end)
        path, position = queue.place_of(wrong)
        what = f"queue offset {wrong}: points to no record of this queue"
        self.damages.append(Damage(path, position, "entry", what, ENTRY_SIZE))
        if not self._log.sequence.writable:
            return
        entries = queue.entries(self.first)
        units = [queue.ext_unit(code) for code in entries["tags_code"].tolist()]
        queue.truncate_to(wrong)
        queue.append_many(wrong, _FILLER * (self.first - wrong))
        if queue.ext is not None:
            for number, unit in enumerate(units):
                if unit is not None:
                    entries["tags_code"][number] = queue.ext.put(unit.tags_code, unit.store_timestamp_ms, unit.bitmap)
        queue.append_many(self.first, entries.tobytes())
        queue.advance(self.begin)
