"""Store times of messages, and which messages a window of time selects, whatever the clock did.

A message is either before a time or from it on, by the store time in its record. The machine's clock can be set back,
so these times need not ascend, and a binary search over them can miss messages. Two rules follow:

- A window of time selects messages, one by one: `StoreTimes.span` is the shortest run of a queue that has all of them.
- A start at a time is a place in a queue: `StoreTimes.first_from` is the first message stored at that time or later.
  What comes after it is taken too, even if the clock was set back meanwhile. RocketMQ's own search is
  `ConsumeQueue.queue_offset_at`.

How far times can disagree is known of records that librmq has written: the dispatcher keeps the greatest setback
(`TimeOrder`), and a close notes it in ``librmq/closed.json``. A binary search with that margin is right. The header of
each other record is read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from librmq.commitlog import CommitLog
from librmq.consumequeue import ConsumeQueue, QueueEntry
from librmq.consumequeue_entries import HOLE_SIZE, Entries
from librmq.errors import CorruptionError, RecordError
from librmq.files import Files
from librmq.message import record
from librmq.runtime import lazy_numpy as np
from librmq.store.engine.derivation import MULTI_DISPATCH, claims
from librmq.store.engine.dispatch import TimeOrder
from librmq.store.engine.saved_state import noted_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

UNKNOWN: Final = -(1 << 63)
"""The store time where the log has no record any more."""
_DAMAGED: Final = UNKNOWN + 1
"""The store time where a record is not the one of its entry, or unreadable. Searches take it for any time beside it."""
_LATEST: Final = (1 << 63) - 1
_FIRST_BLOCK: Final = 64
_BLOCK: Final = 1 << 16
"""Most entries to read at once."""
_OWN: Final = ("queue_id", "queue_offset", "physical_offset", "sys_flag", "store_timestamp", "body_length")
_unpack_own: Final = record.header_struct(*_OWN, unsigned=("body_length",)).unpack_from


# ---- the times of records


def store_times_at(
    log: CommitLog, name: tuple[str, int], entries: Iterable[tuple[int, int] | None]
) -> list[int | None]:
    """Return the store times (ms) of a queue's messages, each by queue offset and place; None if it is not there.

    Raises:
        CorruptionError: A file of the log has a wrong length.
    """
    topic, queue_id = name[0].encode(), name[1]
    field = bytes((len(topic) & 0xFF,)) + topic
    begin, last, size = log.begin, log.end - record.FIXED_SIZE, log.file_size
    times: list[int | None] = []
    start, buffer, looked_at = -1, None, list[int]()
    for entry in entries:
        if entry is None:
            times.append(None)
            continue
        queue_offset, place = entry
        at = place % size
        if place - at != start:
            start = place - at
            file = log.sequence.file_at(place)
            buffer = None if file is None else file.buffer
        if buffer is None or not begin <= place <= last or at + record.FIXED_SIZE > size:
            times.append(None)
            if not begin <= place < log.sequence.end:  # else a writer beside this reader has stored it
                _leave_out(log, place)
            continue
        own_id, own_offset, own_place, flags, time_ms, body_size = _unpack_own(buffer, at)
        topic_at = at + record.BODY_AT + body_size
        identity = own_id, own_offset, own_place, buffer[topic_at : topic_at + len(field)], flags & record.HOSTS_V6
        is_own = identity == (queue_id, queue_offset, place, field, 0)
        if not is_own and (is_own := _is_own(log, buffer[at : at + record.FIXED_SIZE], place, queue_offset, name)):
            time_ms = record.store_timestamp_ms(buffer, at)
        times.append(time_ms if is_own else None)
        looked_at.append(place)
        if not is_own:
            _leave_out(log, place)
    if looked_at:
        log._note_looks(looked_at[0], looked_at[-1], len(looked_at))
    return times


def _leave_out(log: CommitLog, place: int) -> None:
    log.leave_out(CorruptionError(log.sequence.path_at(place), place, "record", "an entry leads here, to no record"))


def times_at(log: CommitLog, queue: TimedQueue, places: NDArray[np.int64], first: int) -> NDArray[np.int64]:
    """Return the times of a queue's records from queue offset ``first`` on, or `UNKNOWN` or `_DAMAGED`.

    Places of one file are read together; that of a hole is -1.

    Raises:
        CorruptionError: A file of the log has a wrong length.
    """
    times = np.where(places == -1, UNKNOWN, _DAMAGED)
    for number in np.flatnonzero((places >= 0) & (places < log.begin)).tolist():
        if queue.has_expired(first + number, int(places[number]), log.begin):
            times[number] = UNKNOWN
    starts = places - places % log.file_size
    bounds = [0, *(np.flatnonzero(np.diff(starts)) + 1).tolist(), len(places)] if len(places) else []
    for begin_at, until in pairwise(bounds):
        start = int(starts[begin_at])
        file = log.sequence.file_at(start)
        if file is None:
            continue
        begin, end = max(log.begin, start), min(log.end, start + log.file_size) - record.FIXED_SIZE
        inside = begin_at + np.flatnonzero((places[begin_at:until] >= begin) & (places[begin_at:until] <= end))
        at = places[inside] - start
        raw = np.frombuffer(file.buffer, np.uint8)
        flags = record.gather(raw, at + record.SYS_FLAG_AT, ">i4")
        time_at = at + record.STORE_TIMESTAMP_AT + record.HOST_V6_EXTRA * ((flags & record.BORN_HOST_V6) != 0)
        read: NDArray[np.int64] = record.gather(raw, time_at, ">i8").astype(np.int64)
        is_own = record.gather(raw, at + record.PHYSICAL_OFFSET_AT, ">i8") == places[inside]
        is_own &= record.gather(raw, at + record.QUEUE_OFFSET_AT, ">i8") == first + inside
        for number in np.flatnonzero(~is_own).tolist():
            queue_offset, place = first + int(inside[number]), int(places[inside[number]])
            is_own[number] = _is_own(log, log.data_at(place, record.FIXED_SIZE), place, queue_offset)
        times[inside[is_own]] = read[is_own]
        log._note_looks(int(places[begin_at]), int(places[until - 1]), until - begin_at)
    if (times == _DAMAGED).any():
        _leave_out(log, int(places[times == _DAMAGED][0]))
    return times


def _is_own(log: CommitLog, raw: bytes, place: int, queue_offset: int, name: tuple[str, int] | None = None) -> bool:
    """Return whether a record is the one of an entry, by its beginning: it can be in other queues too.

    Without the ``name`` of the entry's queue, any queue does.
    """
    _, own_offset, own_place, flags, _, _ = _unpack_own(raw)
    if own_place != place:
        return False
    if name is None and (flags & record.INNER_BATCH or own_offset == queue_offset):
        return True
    with suppress(CorruptionError, RecordError):
        raw = log.read(place) or b""
        return MULTI_DISPATCH in raw if name is None else queue_offset in claims(raw, name)
    return False


# ---- the times of a queue


class TimedQueue(Protocol):
    """A queue whose entries can be read, such as a `ConsumeQueue`."""

    def entry(self, queue_offset: int) -> QueueEntry | None:
        """Return an entry; None if there is none."""
        ...

    def entries(self, begin: int, end: int) -> Entries:
        """Return the entries from ``begin`` to ``end``."""
        ...

    def has_expired(self, queue_offset: int, place: int, log_begin: int) -> bool:
        """Return whether retention has deleted the message of an entry that leads to ``place``."""
        ...


Fetch = Callable[["NDArray[np.int64]", "NDArray[np.int64]"], object]
"""Called with places and sizes of records before they are read, for a log that is not here."""


class StoreTimes:
    """The store times of a log's messages, by queue."""

    @classmethod
    def noted(cls, path: str, files: Files, log: CommitLog) -> Self:
        """Return those of the store in ``path``, with the order that its last close noted."""
        return cls(log, noted_order(path, files, log))

    def __init__(self, log: CommitLog, order: TimeOrder | None = None, fetch: Fetch | None = None) -> None:
        self.order = order
        """What is known of their order; None if nothing is."""
        self._log = log
        self._fetch = fetch
        # The end comes first: a writer that adds meanwhile sets it last.
        end = 0 if order is None else order.end
        self._ordered = range(0) if order is None else range(max(order.begin, log.begin), end)
        self._setback_ms = 0 if order is None else order.setback_ms

    @property
    def covers_log(self) -> bool:
        """Whether the greatest setback of all records is known."""
        return self._ordered.start <= self._log.begin and self._log.end <= self._ordered.stop

    def first_from(self, queue: TimedQueue, time_ms: int, offsets: range) -> int:
        """Return the first of some queue offsets whose message was stored at a time or later; their end without one."""
        first = self._first(queue, time_ms, _LATEST, offsets)
        return offsets.stop if first is None else first

    def span(self, queue: TimedQueue, begin_ms: int, end_ms: int, offsets: range) -> range:
        """Return the shortest run of queue offsets with all messages stored from a time on and before another."""
        first = self._first(queue, begin_ms, end_ms - 1, offsets)
        if first is None:
            return offsets[:0]
        last = self._last(queue, begin_ms, end_ms - 1, range(first, offsets.stop))
        return range(first, first + 1 if last is None else last + 1)

    def extent(self, queue: TimedQueue, offsets: range) -> tuple[int, int] | None:
        """Return the least and the greatest store time of some messages of a queue; None if none is readable."""
        ends = None if self._setback_ms else self._times_of_ends(queue, offsets)
        if ends is not None:
            return min(ends), max(ends)
        times: list[int] = []
        for part, is_ordered in self._parts(queue, offsets):
            pieces = [part]
            if is_ordered:
                first, last = self.stored_at(queue, part.start), self.stored_at(queue, part.stop - 1)
                if first is not None and last is not None:
                    times += (first, last)
                    pieces = self._pieces_of_extremes(queue, part, first, last) if self._setback_ms else []
            for piece in pieces:
                for _, block in self._blocks(queue, piece):
                    if len(readable := block[block > _DAMAGED]):
                        times += (int(readable.min()), int(readable.max()))
        return (min(times), max(times)) if times else None

    def _pieces_of_extremes(self, queue: TimedQueue, part: range, first_ms: int, last_ms: int) -> list[range]:
        """Return the offsets that can have the least or the greatest time, by the times of the first and last one."""
        # Messages behind the first of these pieces were not stored before the first message, and those before the
        # second piece not after the last one.
        begin = self._bisect(queue, part, first_ms + self._setback_ms, unreadable=False)
        end = self._bisect(queue, part, last_ms - self._setback_ms)
        return [part[: begin - part.start], part[end - part.start :]]

    def bounds_of(self, queue: TimedQueue, offsets: range) -> tuple[int, int] | None:
        """Return times between which all messages of a run were stored, without reading more than its ends.

        None if the order of their times is not known.
        """
        ends = self._times_of_ends(queue, offsets)
        return None if ends is None else (ends[0] - self._setback_ms, ends[1] + self._setback_ms)

    def _times_of_ends(self, queue: TimedQueue, offsets: range) -> tuple[int, int] | None:
        """Return the times of the first and the last message of a run whose order is known, if both are readable."""
        if not (offsets and self._ordered):
            return None
        first, last = queue.entry(offsets.start), queue.entry(offsets.stop - 1)
        if first is None or last is None or first.physical_offset not in self._ordered:
            return None
        if last.physical_offset not in self._ordered:
            return None
        first_ms, last_ms = self._time_of(queue, offsets.start, first), self._time_of(queue, offsets.stop - 1, last)
        return None if first_ms is None or last_ms is None else (first_ms, last_ms)

    def before(self, queue: TimedQueue, time_ms: int, offsets: range) -> int:
        """Return an end of some offsets: all records of the log up to the one before it were stored before a time.

        Only for a log whose order is known, see `covers_log`.
        """
        return self._bisect(queue, offsets, time_ms - self._setback_ms)

    def behind(self, queue: TimedQueue, time_ms: int, offsets: range) -> int:
        """Return the start of some offsets: its record and all later ones of the log were stored at a time or later.

        Only for a log whose order is known, see `covers_log`.
        """
        return self._bisect(queue, offsets, time_ms + self._setback_ms, unreadable=False)

    def first_file(self, time_ms: int) -> int:
        """Return where to begin a walk over the log: no record of the files before was stored at a time or later."""
        log, begin = self._log, self._log.begin
        if self._ordered.start > begin:
            return begin
        starts = [start for start in log.sequence.starts if start in self._ordered]

        def is_late(start: int) -> bool:
            first_ms = log.first_store_timestamp_ms(start)
            return first_ms is None or first_ms >= time_ms - self._setback_ms

        number = bisect_left(starts, True, key=is_late)
        return max(begin, starts[number - 1]) if number else begin

    # ---- searches

    def _first(self, queue: TimedQueue, least_ms: int, most_ms: int, offsets: range) -> int | None:
        """Return the first offset with a time in a window, both ends included, or of damaged ones right before it."""
        damaged: int | None = None  # the first of those that end where the walk is
        for part, is_ordered in self._parts(queue, offsets):
            begin = self._bisect(queue, part, least_ms - self._setback_ms) if is_ordered else part.start
            damaged = damaged if begin == part.start else None
            if damaged is None and begin < part.stop and self._is_within(queue, begin, least_ms, most_ms):
                return begin  # as in times that ascend
            for first, times in self._blocks(queue, range(begin, part.stop)):
                hits = np.flatnonzero((times >= least_ms) & (times <= most_ms) & (times > _DAMAGED))
                end = int(hits[0]) if len(hits) else len(times)
                others = np.flatnonzero(times[:end] != _DAMAGED)
                if len(others) or damaged is None:
                    damaged = first + (int(others[-1]) + 1 if len(others) else 0)
                if len(hits):
                    return damaged
                if damaged == first + end:
                    damaged = None
                if is_ordered and int(times.min()) > most_ms + self._setback_ms:
                    break
        return damaged

    def _last(self, queue: TimedQueue, least_ms: int, most_ms: int, offsets: range) -> int | None:
        """Return the last offset with a time in a window, or of damaged ones right behind it."""
        damaged: int | None = None  # the end of those that begin where the walk is
        for part, is_ordered in reversed(self._parts(queue, offsets)):
            limit_ms = most_ms + self._setback_ms + 1
            end = self._bisect(queue, part, limit_ms, unreadable=False) if is_ordered else part.stop
            damaged = damaged if end == part.stop else None
            if damaged is None and end > part.start and self._is_within(queue, end - 1, least_ms, most_ms):
                return end - 1
            for first, times in self._blocks(queue, range(part.start, end), backwards=True):
                hits = np.flatnonzero((times >= least_ms) & (times <= most_ms) & (times > _DAMAGED))
                begin = int(hits[-1]) + 1 if len(hits) else 0
                others = np.flatnonzero(times[begin:] != _DAMAGED)
                if len(others) or damaged is None:
                    damaged = first + (begin + int(others[0]) if len(others) else len(times))
                if len(hits):
                    return damaged - 1
                if damaged == first:
                    damaged = None
        return None if damaged is None else damaged - 1

    def _is_within(self, queue: TimedQueue, queue_offset: int, least_ms: int, most_ms: int) -> bool:
        stored_ms = self.stored_at(queue, queue_offset)
        return stored_ms is not None and least_ms <= stored_ms <= most_ms

    def _parts(self, queue: TimedQueue, offsets: range) -> list[tuple[range, bool]]:
        """Return the offsets before, in and behind the records whose order is known, and which these are."""
        ordered = self._ordered
        if not offsets:
            return []
        if not ordered:
            return [(offsets, False)]

        def place(queue_offset: int) -> int:
            for at in range(queue_offset, offsets.stop):
                entry = queue.entry(at)
                if entry is not None and entry.size != HOLE_SIZE:
                    return entry.physical_offset
            return ordered.stop

        first, last = place(offsets.start), place(offsets.stop - 1)
        if first in ordered and last in ordered:
            return [(offsets, True)]
        begin = bisect_left(range(offsets.stop), ordered.start, offsets.start, offsets.stop, key=place)
        end = bisect_left(range(offsets.stop), ordered.stop, begin, offsets.stop, key=place)
        parts = (range(offsets.start, begin), False), (range(begin, end), True), (range(end, offsets.stop), False)
        return [part for part in parts if part[0]]

    def stored_at(self, queue: TimedQueue, queue_offset: int) -> int | None:
        """Return the store time of a message; None if it can't be read."""
        return self._time_of(queue, queue_offset, queue.entry(queue_offset))

    def _time_of(self, queue: TimedQueue, queue_offset: int, entry: QueueEntry | None) -> int | None:
        if entry is None or entry.size == HOLE_SIZE:
            return None
        if self._fetch is not None:
            self._fetch(np.array([entry.physical_offset]), np.array([entry.size]))
        log, place = self._log, entry.physical_offset
        try:
            raw = log.read(place, entry.size)
        except CorruptionError as error:
            log.leave_out(error)
            return None
        if raw is not None and _is_own(log, raw, place, queue_offset):
            return record.store_timestamp_ms(raw)
        if raw is not None or not queue.has_expired(queue_offset, place, log.begin):
            _leave_out(log, place)
        return None

    def _is_damaged(self, queue: TimedQueue, queue_offset: int) -> bool:
        """Return whether a message has no store time although the log has its place."""
        entry = queue.entry(queue_offset)
        if entry is None or entry.size == HOLE_SIZE:
            return False
        if queue.has_expired(queue_offset, entry.physical_offset, self._log.begin):
            return False
        return self._time_of(queue, queue_offset, entry) is None

    def nearest(self, queue: ConsumeQueue, time_ms: int) -> int:
        """Return what `ConsumeQueue.queue_offset_at` does, for which damaged messages have the time of the one before.

        Damaged messages right before the result come with it, for they can have been stored at that time.
        """
        begin = queue.min_offset

        def stored(queue_offset: int) -> int | None:
            while self._is_damaged(queue, queue_offset) and queue_offset > begin:
                queue_offset -= 1
            return self.stored_at(queue, queue_offset)

        nearest_offset = queue._nearest_in_time(stored, time_ms)
        behind = int(not self._is_damaged(queue, nearest_offset))
        while nearest_offset > begin and self._is_damaged(queue, nearest_offset - behind):
            nearest_offset -= 1
        return nearest_offset

    def _bisect(self, queue: TimedQueue, offsets: range, time_ms: int, *, unreadable: bool = True) -> int:
        """Return a place between times below and not below a limit.

        ``unreadable`` says whether messages without a time count as not below it: what a caller passes over has one.
        """

        def is_late(queue_offset: int) -> bool:
            stored_ms = self.stored_at(queue, queue_offset)
            return unreadable if stored_ms is None else stored_ms >= time_ms

        return bisect_left(range(offsets.stop), True, offsets.start, offsets.stop, key=is_late)

    def _blocks(
        self, queue: TimedQueue, offsets: range, *, backwards: bool = False
    ) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield the times of a run in growing blocks, each with its first queue offset."""
        begin, end, size = offsets.start, offsets.stop, _FIRST_BLOCK
        while begin < end:
            first, until = (max(begin, end - size), end) if backwards else (begin, min(end, begin + size))
            entries: Any = queue.entries(first, until)
            if len(entries):
                places, sizes = entries["physical_offset"].astype(np.int64), entries["size"].astype(np.int64)
                places[sizes == HOLE_SIZE] = -1
                if self._fetch is not None:
                    self._fetch(places, sizes)
                yield first, times_at(self._log, queue, places, first)
            begin, end = (begin, first) if backwards else (until, end)
            size = min(8 * size, _BLOCK)
