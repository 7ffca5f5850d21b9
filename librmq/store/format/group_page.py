"""The page of groups: where each group is in each queue, mapped, so that what was answered outlives a killed process.

::

    librmq/groups/0000, 0001, …   segments of 256 KiB, words of 8 bytes in the machine's order, cells of 8 words

    cells 0 to 7, the header      0 magic, 1 the number of used cells
                                  2 sealed, whether ``consumerOffset.json`` is being written
                                  8 to 63 the identity of folder and machine: length, checksum << 16; then its bytes
    a place, 2 cells              0 PLACE, checksum of its number and words 3 to 5 << 8
                                  1 position: the queue offset of the next message, -1 without one
                                  2 number of the times that it was set back, 3 queue id
                                  4 and 5 the cells of the names of group and topic
                                  6 the queue offset that a receive reads next, sealed with word 2 of when that was
                                  8 the cell of its window, 0 without one; 9 that of its first suspect, sealed
                                  10 sealed, how many ends of its process the group lets a message have
                                  11 and 12 sealed, the positions in the tables that were saved last, and before that
                                  13 how often a consumer has taken the queue, 14 sealed, the checksum of the last
    a window, 257 cells           0 WINDOW, 1 the cell of its place, 8 to 2055 a slot for each queue offset, by its
                                  remainder: the offset plus one, word 2 of the place << 48, and a remainder of both
                                  << 56, of a message that is finished although the position has not passed it; with
                                  255 for the remainder, one that has only begun
    a suspect                     0 SUSPECT, and sealed: 1 queue offset, 2 word 2 of the place when it began
                                  3 how often its process has ended, 4 how often of these while it ran alone
                                  5 whether it runs alone, 6 the cell of the next suspect of the place, 0 without one
    a received message            0 IN_FLIGHT, HANDED_OUT (how often, after its flight), with checksums of words 1 to 3
                                  << 8 and of the others << 40, or FREE, 1 the cell of its place
                                  2 queue offset, 3 physical offset, 4 time of the receive, 5 invisible time
                                  6 attempt; in order, how often its process has ended << 24, alone << 31;
                                  whether it was received alone << 38, the receiver << 39
                                  7 time at which it is visible again; all times in ms
    a name                        0 NAME, its cells << 8, its bytes << 32, their checksum << 48; then the bytes
    the rest of a segment         0 GAP, its cells << 8

The word of used cells is stored last, so what a kill has left half made is not there. A position is one aligned word,
which a kill does not tear. Each place has one writer at a time: the consumer that holds the queue, in the process of
the broker or in another one of a share. No lock is on its way.

**A flipped bit passes no message.** The number of used cells, positions and word 6 are sealed: each is a number plus
one, and the remainder of that << 48. A damaged page is refused, and the tables count. A slot or word 6 with
another remainder does not count, and a message whose times do not match is visible at once, as after a kill between
the two writes of a change.

**Suspects.** A consumer that releases a queue removes its marks of what has begun. So the marks that the next holder
finds are those of a process that has ended by surprise, and the broker makes suspects of them.

**When the page counts.** A kill undoes no write, so in the same folder on a machine that has not restarted, the page is
newer than the broker's tables, and what it passes is in the log. After a loss of power neither is sure: the kernel
writes a mapped page when it likes, perhaps before the retry copy of a message that a position passes. Then the tables
count, which are saved after a flush of the log. They count too for each queue in which they say something else than
librmq has saved: a broker has run, or a backup came back. Without the page, they count as they do for a broker.

Nothing of the original mirrors it: there the broker outlives its consumers, and reads its progress from the tables.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, overload

from librmq.errors import CorruptionError, StoreIOError
from librmq.files import Buffer, File, Files, file_size
from librmq.files.interface import identity_of, read_replaced
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Inherited
from librmq.store.format.documents import GROUPS_FOLDER, OWN_FOLDER, folder_part

if TYPE_CHECKING:
    from librmq.message import StoredMessage
    from librmq.store.format.broker_tables import DelayedSave

_log = EventLog("librmq.store")
_MAGIC: Final = 0x6C696272_67700003
_CELL: Final = 8  # words
_CELLS: Final = 4096
_SEGMENT_SIZE: Final = _CELLS * _CELL * 8
_HEADER_CELLS: Final = 8
_USED, _IS_WRITING, _IDENTITY = 1, 2, 8
_MOST_IDENTITY: Final = 8 * (_HEADER_CELLS * _CELL - _IDENTITY - 1)
_PLACE, _NAME, _GAP, _FREE, _IN_FLIGHT, _HANDED_OUT, _WINDOW, _SUSPECT = 1, 2, 3, 4, 5, 6, 7, 8
_PLACE_CELLS: Final = 2
_POSITION, _SET_BACK, _QUEUE, _GROUP, _TOPIC, _NEXT, _WINDOW_AT, _SUSPECTS, _DEATHS = 1, 2, 3, 4, 5, 6, 8, 9, 10
_SAVED_LAST, _SAVED_BEFORE, _TAKES, _HOLDER = 11, 12, 13, 14
SLOTS: Final = 2048
"""Messages behind the first unfinished one of which a page remembers that they are finished."""
BEGUN: Final = -1 << 56
"""What is added to a slot without its remainder, of a message that has begun, and not ended."""
_WINDOW_CELLS: Final = 1 + SLOTS // _CELL
_NO_SLOTS: Final = bytes(8 * SLOTS)
_WORD: Final = struct.Struct("=q")
_FLIGHT: Final = struct.Struct("=7q")
_NUMBER: Final = (1 << 48) - 1
_MOST_POSITION: Final = _NUMBER - 1
"""Stands for all greater positions too, as of a client of 4.x that stores the greatest number to skip a queue."""
_WORD_MASK: Final = (1 << 64) - 1
_encoded: Final = partial(str.encode, errors="surrogatepass")
_PRIME: Final = 32749
"""The greatest one below 2 ** 15: no power of 2 has the remainder 0, so each flipped bit changes the remainder."""
SLOT_PRIME: Final = 127


def _sealed(number: int, salt: int = 0) -> int:
    """Return the word of a number from -1 on, from which no other one comes by a flipped bit; it is never 0."""
    number += 1
    return number | (number + salt) % _PRIME + 1 << 48


def _unsealed(word: int, salt: int = 0) -> int | None:
    """Return the number of a word; None if the word is not one of `_sealed`."""
    number = word & _NUMBER
    return number - 1 if word >> 48 == (number + salt) % _PRIME + 1 else None


def _slot(tag: int, queue_offset: int) -> int:
    return tag + queue_offset + ((queue_offset + 37 * (tag >> 48)) % SLOT_PRIME << 56)


def _begun_slot(tag: int, queue_offset: int) -> int:
    return tag + BEGUN + queue_offset


def _kind_of_place(number: int, queue_id: int, group: int, topic: int) -> int:
    return _PLACE | zlib.crc32(b"%d %d %d %d" % (number, queue_id, group, topic)) << 8


def _kind_of_name(data: bytes) -> int:
    cells = -(-(8 + len(data)) // (8 * _CELL))
    return _NAME | cells << 8 | len(data) << 32 | zlib.crc32(data) >> 17 << 48


def _kind_of_flight(data: bytes) -> int:
    return _IN_FLIGHT | zlib.crc32(data[:24]) << 8 | zlib.crc32(data[24:]) >> 9 << 40


@lru_cache(maxsize=16)
def _rows(count: int) -> tuple[int, int]:
    """Return two rows of words, as one number each: a row of ones, and the numbers from 0 on."""
    rows = [1] * count, range(count)
    ones, numbers = (int.from_bytes(struct.pack(f"={count}q", *row), sys.byteorder) for row in rows)
    return ones, numbers


class _Words(Protocol):
    @overload
    def __getitem__(self, at: int, /) -> int: ...
    @overload
    def __getitem__(self, at: slice, /) -> memoryview[int]: ...

    def __setitem__(self, at: Any, value: Any, /) -> None: ...  # noqa: ANN401 (a word, or a slice of them)

    def release(self) -> None: ...


class _SeenWords:
    """The words of a buffer that must see each write, as files of tests and overlays do."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer: Buffer | None = buffer

    def _held(self) -> Buffer:
        if self._buffer is None:
            raise ValueError("released")
        return self._buffer

    @overload
    def __getitem__(self, at: int, /) -> int: ...
    @overload
    def __getitem__(self, at: slice, /) -> memoryview[int]: ...
    def __getitem__(self, at: int | slice, /) -> int | memoryview[int]:
        if isinstance(at, slice):
            return memoryview(bytes(self._held()[8 * at.start : 8 * at.stop])).cast("q")
        number: int = _WORD.unpack_from(self._held(), 8 * at)[0]
        return number

    def __setitem__(self, at: int | slice, value: Any, /) -> None:  # noqa: ANN401 (as `_Words` has it)
        if isinstance(at, slice):
            self._held()[8 * at.start : 8 * at.stop] = value.tobytes()
        else:
            self._held()[8 * at : 8 * at + 8] = _WORD.pack(value)

    def release(self) -> None:
        self._buffer = None


class Place:
    """Where a group is in a queue, on the page. Written by the consumer that holds the queue, alone."""

    __slots__ = ("_at", "_set_back", "_takes", "_words", "number", "page", "saving", "watcher", "window")

    def __init__(self, page: GroupPage, number: int) -> None:
        self.page: GroupPage = page
        self._words = words = page.words[number // _CELLS]
        self.saving: DelayedSave | None = None
        """Saves the table some time after an `advance`; None where the owner has to be notified."""
        self.watcher: Callable[[], object] | None = None
        """Called by `advance`, for who records what consumers do."""
        self._at = number % _CELLS * _CELL
        self.number: int = number
        """Its first cell."""
        self._set_back, self._takes = words[self._at + _SET_BACK], words[self._at + _TAKES]
        self.window: tuple[_Words, int, int] | None = None
        """Words, where the slots begin in them, and the `_slot` of offset 0 without its remainder: the word ``begin +
        offset % SLOTS`` is the `_slot` of a message that is finished although the position has not passed it."""
        cell = words[self._at + _WINDOW_AT]
        if 0 < cell < len(page.words) * _CELLS:
            begin, window = cell % _CELLS * _CELL, page.words[cell // _CELLS]
            if (window[begin], window[begin + 1]) == (_WINDOW, number):
                self.window = window, begin + _CELL, ((self._set_back & 0xFF) << 48) + 1

    @property
    def position(self) -> int:
        """The queue offset of the group's next message; -1 without one."""
        return (self._words[self._at + _POSITION] & _NUMBER) - 1

    @property
    def is_open(self) -> bool:
        """Whether it can be written: not after the end of the broker, or of this process's link to it."""
        try:
            return self.position is not None
        except ValueError:
            return False

    @property
    def is_taken(self) -> bool:
        """Whether another consumer has taken the queue since; what this one has of it still counts."""
        try:
            return self._words[self._at + _TAKES] != self._takes
        except ValueError:  # the broker has ended
            return False

    def advance(self, position: int) -> bool:
        """Move the position forward; return False, and move nothing, if it was set back since `Place` was made.

        A position that has come further stays: another consumer has had the queue since. False too after the end of
        the broker, or of this process's link to it.
        """
        words, at = self._words, self._at
        try:
            if words[at + _SET_BACK] != self._set_back:
                return False
            number = position + 1
            if words[at + _POSITION] & _NUMBER < number:
                words[at + _POSITION] = number | number % _PRIME + 1 << 48  # `_sealed`, inlined
        except ValueError:
            return False
        saving = self.saving
        if saving is not None and not saving.has_changed:
            saving.save_soon()
        if self.watcher is not None:
            self.watcher()
        return True

    def finish(self, queue_offset: int) -> None:
        """Note that a message is finished although the position has not passed it."""
        if self.window is not None:
            words, begin, tag = self.window
            try:  # noqa: SIM105 (twice as fast, for each message that ends out of order)
                words[begin + queue_offset % SLOTS] = _slot(tag, queue_offset)
            except ValueError:  # the broker has ended
                pass

    def finished(self) -> set[int]:
        """Return the queue offsets from the position on whose messages are finished."""
        return self._marked(_slot)

    def _marked(self, word_of: Callable[[int, int], int]) -> set[int]:
        """Return the queue offsets from the position on whose slots have ``word_of(tag, offset)``."""
        if self.window is None:
            return set()
        words, begin, tag = self.window
        window = words[begin : begin + SLOTS]
        if window.tobytes() == _NO_SLOTS:  # the group has just come to the queue
            return set()
        slots = window.tolist()
        position = max(self.position, 0)
        offsets = {(word & _NUMBER) - 1 for word in slots if word & _NUMBER > position}
        return {offset for offset in offsets if slots[offset % SLOTS] == word_of(tag, offset)}

    def begin(self, messages: Iterable[StoredMessage]) -> None:
        """Note that a listener gets messages next."""
        if self.window is not None:
            words, begin, tag = self.window
            begun = tag + BEGUN  # `_begun_slot`, inlined, because this runs for each message
            try:
                for message in messages:
                    queue_offset = message.queue_offset
                    words[begin + queue_offset % SLOTS] = begun + queue_offset
            except ValueError:  # the broker has ended
                pass

    def begin_pulled(self, messages: Sequence[StoredMessage]) -> None:
        """Note the same of messages in the order of their queue, in half the time if none of the queue was passed."""
        first, count = messages[0].queue_offset, len(messages)
        at = first % SLOTS
        if self.window is None or messages[-1].queue_offset != first + count - 1 or at + count > SLOTS:
            self.begin(messages)
            return
        words, begin, tag = self.window
        ones, numbers = _rows(count)  # each word by itself takes three times as long
        slots = (_begun_slot(tag, first) & _WORD_MASK) * ones + numbers
        try:  # noqa: SIM105 (quicker so)
            words[begin + at : begin + at + count] = memoryview(slots.to_bytes(8 * count, sys.byteorder)).cast("q")
        except ValueError:  # the broker has ended
            pass

    def end(self, queue_offset: int) -> None:
        """Note that no listener has a message any more, which is not finished."""
        if self.window is not None:
            words, begin, tag = self.window
            with suppress(ValueError):
                if words[begin + queue_offset % SLOTS] == tag + BEGUN + queue_offset:
                    words[begin + queue_offset % SLOTS] = 0

    def suspects(self) -> dict[int, Suspect]:
        """Return the messages at which a process has ended by surprise, by queue offset."""
        suspects, page = dict[int, Suspect](), self.page
        cell = _unsealed(self._words[self._at + _SUSPECTS])
        while (
            cell
            and 0 < cell < len(page.words) * _CELLS
            and page.words[cell // _CELLS][cell % _CELLS * _CELL] == _SUSPECT
            and (suspect := Suspect(page, cell, self)).queue_offset not in suspects
        ):
            suspects[suspect.queue_offset], cell = suspect, suspect.next
        return suspects

    @property
    def has_left(self) -> bool:
        """Whether messages from the position on are finished or suspects, or had begun at the end of a process."""
        position, suspects = max(self.position, 0), self.suspects()
        is_suspect = any(suspects[at].since == self._set_back for at in suspects if at >= position)
        return is_suspect or bool(self.finished() or self._marked(_begun_slot))

    def note_deaths(self) -> None:
        """Make suspects of what the former holder had begun, which has ended by surprise. Called by the broker.

        Raises:
            StoreIOError: The disk refuses.
        """
        words, at, page = self._words, self._at, self.page
        begun, finished, position = self._marked(_begun_slot), self.finished(), self.position
        suspects, stale, first, last = self.suspects(), list[int](), 0, None
        for offset, suspect in suspects.items():
            if offset < position or offset in finished or suspect.since != self._set_back:
                stale.append(suspect.cell)
                continue
            if offset in begun:
                suspect.note_death()
            else:
                suspect.runs_alone(False)
            # By one word, and before a cell is free, so that a kill loses no suspect behind those that go.
            if last is None:
                first = suspect.cell
                words[at + _SUSPECTS] = _sealed(first)
            elif last.next != suspect.cell:
                last.next = suspect.cell
            last = suspect
        if last is None:
            words[at + _SUSPECTS] = _sealed(0)
        elif last.next:
            last.next = 0
        for offset in sorted(begun - suspects.keys()):
            first = page.add_suspect(offset, self._set_back, first)
            words[at + _SUSPECTS] = _sealed(first)
        for cell in stale:
            page.free_flight(cell)
        for offset in begun:
            self.end(offset)

    @property
    def max_process_deaths(self) -> int:
        """The group's setting, which the broker notes for a consumer that holds the queue; 0 without one."""
        try:
            return _unsealed(self._words[self._at + _DEATHS]) or 0
        except ValueError:  # the broker has ended
            return 0

    @max_process_deaths.setter
    def max_process_deaths(self, number: int) -> None:
        self._words[self._at + _DEATHS] = _sealed(number)

    @property
    def next_offset(self) -> int | None:
        """The queue offset that a receive reads next; None if the position was set back since that was noted."""
        words, at = self._words, self._at
        return _unsealed(words[at + _NEXT], 7919 * words[at + _SET_BACK])

    def set_next_offset(self, queue_offset: int) -> None:
        """Note where a receive reads next: what is in flight before it counts, and nothing behind it."""
        words, at = self._words, self._at
        words[at + _NEXT] = _sealed(queue_offset, 7919 * words[at + _SET_BACK])

    @property
    def saved(self) -> tuple[int | None, int | None]:
        """The positions in the tables that were saved last, and before that."""
        words, at = self._words, self._at
        return _unsealed(words[at + _SAVED_LAST]), _unsealed(words[at + _SAVED_BEFORE])

    def note_saved(self, position: int, *, is_again: bool = False) -> None:
        """Note the position in the table that is saved next; ``is_again`` if the last one noted was not saved."""
        words, at = self._words, self._at
        if not is_again:
            words[at + _SAVED_BEFORE] = words[at + _SAVED_LAST]
        words[at + _SAVED_LAST] = _sealed(position)

    def set(self, position: int) -> None:
        """Set the position, also back; what a holder reaches from before then counts no more. -1 removes it."""
        words, at, number = self._words, self._at, min(position, _MOST_POSITION) + 1
        if number < words[at + _POSITION] & _NUMBER:
            words[at + _SET_BACK] += 1
        words[at + _POSITION] = number | number % _PRIME + 1 << 48  # `_sealed`, inlined


class Suspect:
    """A message at which a process has ended by surprise, on the page. Its holder writes whether it runs alone."""

    __slots__ = ("_at", "_place", "_words", "cell")

    def __init__(self, page: GroupPage, cell: int, place: Place | None = None) -> None:
        self.cell: int = cell
        self._place = place
        self._words = page.words[cell // _CELLS]
        self._at = cell % _CELLS * _CELL

    def _number(self, field: int, damaged: int = 0) -> int:
        try:
            number = _unsealed(self._words[self._at + field])
        except ValueError:  # the broker has ended
            number = None
        return damaged if number is None else number

    @property
    def queue_offset(self) -> int:
        """Its place in the queue; -1, which no message has, where that is damaged."""
        return self._number(1, damaged=-1)

    @property
    def since(self) -> int:
        """How often the position had been set back when it began."""
        return self._number(2)

    @property
    def deaths(self) -> int:
        """How often its process has ended by surprise."""
        return self._number(3)

    @property
    def deaths_alone(self) -> int:
        """How often of these it ran alone."""
        return self._number(4)

    @property
    def next(self) -> int:
        """The cell of the place's next suspect; 0 without one."""
        return self._number(6)

    @next.setter
    def next(self, cell: int) -> None:
        self._words[self._at + 6] = _sealed(cell)

    def runs_alone(self, is_alone: bool) -> None:
        """Note whether it runs alone in its process from now on, unless another consumer has taken the queue."""
        with suppress(ValueError):  # the broker has ended
            if self._place is None or not self._place.is_taken:
                self._words[self._at + 5] = _sealed(is_alone)

    def note_death(self) -> None:
        """Count an end of its process."""
        was_alone = self._number(5)
        self.runs_alone(False)  # first: a kill here counts it too little, and never twice
        self._words[self._at + 3] = _sealed(self.deaths + 1)
        self._words[self._at + 4] = _sealed(self.deaths_alone + was_alone)


class PlaceName(NamedTuple):
    """What a place belongs to."""

    group: str
    topic: str
    queue_id: int


Places: TypeAlias = dict[tuple[str, str], dict[int, Place]]
"""Places by group and topic, and by queue id."""


Rows: TypeAlias = Mapping[str, Mapping[int, int]]
"""The rows of ``consumerOffset.json``: positions by queue id, by ``topic@group``."""


_SAVED: Final = os.path.join(OWN_FOLDER, "groups.saved")
_SAVED_MAGIC: Final = 0x6C696272_67730004
_SAVED_HEADER: Final = struct.Struct("=2q")  # magic, the checksum of the page


class FlightRow(NamedTuple):
    """A message that a group has received, as the page has it."""

    cell: int
    is_in_flight: bool
    """Whether it is not acknowledged; else only the number of its attempts counts, in a queue in order."""
    queue_offset: int
    physical_offset: int
    received_ms: int
    invisible_ms: int
    attempt: int
    visible_ms: int


class GroupPage:
    """The places of all groups of a store, and what they have received. Not thread-safe; places are."""

    def __init__(self, files: Files, store: str, *, writable: bool) -> None:
        """Show the page of the store in a folder as far as it is there; see `open` and `make`."""
        self._files = files
        self._store = store
        self._writable = writable
        self._segments: list[File] = []
        self.words: list[_Words] = []
        """The words of its segments."""
        self._names: dict[str, int] = {}
        self.opened: Places = {}
        """The places that it had when it was opened, and that count."""
        self.flights: dict[int, list[FlightRow]] = {}
        """What was received by then, by number of the place."""
        self._free: list[int] = []
        self._flight_cells = 0
        self._with_window: list[int] = []
        if writable:
            _pages.add(self)

    @classmethod
    def open(
        cls, files: Files, store: str, rows: Callable[[], Rows], *, is_backup: bool = False, writable: bool = False
    ) -> GroupPage | None:
        """Return the page of the store in a folder; None if there is none, or if the table counts in its place.

        ``rows()`` returns the rows of the table, or of its backup. Where they win, a page to write takes their
        positions, and another lacks the places.
        """
        if not (names := files.names(os.path.join(store, GROUPS_FOLDER))):
            return None
        page, identity = cls(files, store, writable=writable), _identity(files, store)
        try:
            if identity is None or names[0] != _segment_name(0):
                return None
            page._map(0)
            if page.identity != identity:
                return None
            page._map((page._used - 1) // _CELLS)
            page._add_opened(rows(), before_too=is_backup or _unsealed(page.words[0][_IS_WRITING]) != 0)
            if writable:
                page.note_write(False)
        except StoreIOError:  # another process deletes it meanwhile
            return None
        except CorruptionError as error:
            _log.warning("where groups are is known as of the last save of the table: %(error)s", error=error)
            return None
        return page

    @classmethod
    def make(cls, files: Files, store: str) -> GroupPage:
        """Make an empty page.

        Raises:
            StoreIOError: The disk refuses.
        """
        cls.delete(files, store)
        page = cls(files, store, writable=True)
        page._grow()
        text = (_identity(files, store) or "").encode()[:_MOST_IDENTITY]
        page._segments[0].buffer[8 * (_IDENTITY + 1) : 8 * (_IDENTITY + 1) + len(text)] = text
        words = page.words[0]
        words[_IDENTITY], page._used = len(text) | zlib.crc32(text) << 16, _HEADER_CELLS
        page.note_write(False)
        words[0] = _MAGIC
        return page

    @property
    def has_left(self) -> bool:
        """Whether messages behind a position are finished or suspects, which the tables do not say."""
        opened = [place.number for _, place in self.named() if place.window is not None]
        return any(Place(self, number).has_left for number in [*opened, *self._with_window])

    def named(self) -> Iterator[tuple[PlaceName, Place]]:
        """Yield the places of `opened`."""
        for names, row in self.opened.items():
            for queue_id, place in row.items():
                yield PlaceName(*names, queue_id), place

    def copied(self) -> bytes:
        """Return a copy, for `save`; b"" if there is only what the tables have, the positions."""
        if self._flight_cells == len(self._free):
            return b""
        size = self._used * _CELL * 8
        return b"".join(file.buffer[:] for file in self._segments)[:size]

    @staticmethod
    def save(files: Files, store: str, copied: bytes) -> None:
        """Save a copy of the page, after a flush of the log, for an opening after a loss of power; b"" deletes it."""
        path = os.path.join(store, _SAVED)
        if copied:
            files.write(path, _SAVED_HEADER.pack(_SAVED_MAGIC, zlib.crc32(copied)) + copied)
        elif file_size(files, path) is not None:
            files.delete(path)

    @classmethod
    def saved(cls, files: Files, store: str, rows: Callable[[], Rows]) -> GroupPage | None:
        """Return the copy that was saved last, to read; None without one that fits the folder."""
        try:
            copied = cls._checked(files, store)
        except CorruptionError as error:
            _log.warning("messages in flight are delivered again: %(error)s", error=error)
            return None
        if not copied:
            return None
        page = cls(files, store, writable=False)
        for begin in range(0, len(copied), _SEGMENT_SIZE):
            buffer = mmap.mmap(-1, _SEGMENT_SIZE)
            part = copied[begin : begin + _SEGMENT_SIZE]
            buffer[: len(part)] = part
            page._add(File(os.path.join(store, _SAVED), buffer, _SEGMENT_SIZE, False))
        try:
            if files.is_shared and folder_part(page.identity) != folder_part(_identity(files, store) or ""):
                return None
            page._add_opened(rows(), before_too=True)  # it is as old as the table that is written after it
        except CorruptionError as error:
            _log.warning("messages in flight are delivered again: %(error)s", error=error)
            return None
        return page

    @staticmethod
    def _checked(files: Files, store: str) -> bytes:
        """Return the copy that `save` has written; it is empty if it has not.

        Raises:
            CorruptionError: It is damaged.
        """
        path = os.path.join(store, _SAVED)
        data = read_replaced(files, path)
        if not data:
            return b""
        if len(data) > _SAVED_HEADER.size + _HEADER_CELLS * _CELL * 8:
            (magic, checksum), copied = _SAVED_HEADER.unpack_from(data), data[_SAVED_HEADER.size :]
            if magic == _SAVED_MAGIC and checksum == zlib.crc32(copied):
                return copied
        raise CorruptionError(path, 0, "checksum", "no copy of a page of groups of this version: delete the file")

    @classmethod
    def damage(cls, files: Files, store: str) -> CorruptionError | None:
        """Return what is wrong with what `save` has written; None if nothing is."""
        try:
            cls._checked(files, store)
        except CorruptionError as error:
            return error
        return None

    @staticmethod
    def delete(files: Files, store: str) -> None:
        """Delete the page of the store in a folder, if there is one; places on it can still be written, in vain."""
        folder = os.path.join(store, GROUPS_FOLDER)
        for name in files.names(folder):  # the first one first, without which the others say nothing
            files.delete(os.path.join(folder, name))

    @property
    def identity(self) -> str:
        """The folder and machine that it was made for."""
        words = self.words[0]
        begin, size = 8 * (_IDENTITY + 1), words[_IDENTITY] & 0xFFFF
        text = self._segments[0].buffer[begin : begin + min(size, _MOST_IDENTITY)]
        if words[0] != _MAGIC or not text or words[_IDENTITY] != len(text) | zlib.crc32(text) << 16:
            raise CorruptionError(self._segments[0].path, 0, "config", "no page of groups of this version")
        return text.decode("utf-8", "replace")

    @property
    def _used(self) -> int:
        used = _unsealed(self.words[0][_USED])
        if used is None or used < _HEADER_CELLS:
            raise self._damage(0, "expected a number of used cells")
        return used

    @_used.setter
    def _used(self, cells: int) -> None:
        self.words[0][_USED] = _sealed(cells)

    def note_write(self, is_writing: bool) -> None:
        """Note whether the table is being written. Thread-safe."""
        self.words[0][_IS_WRITING] = _sealed(is_writing)

    # ---- places

    def _add_opened(self, rows: Rows, *, before_too: bool) -> None:
        """Add all places to `opened`, but those in which the table says something else than was saved."""
        for name, place in self._places():
            position = rows.get(f"{name.topic}@{name.group}", {}).get(name.queue_id, -1)
            last, before = place.saved
            if position != last:
                if position != place.position and not (before_too and position == before):
                    if not self._writable:
                        continue
                    place.set(position)
                if self._writable:
                    place.note_saved(position)
            self.opened.setdefault((name.group, name.topic), {})[name.queue_id] = place

    def _places(self) -> Iterator[tuple[PlaceName, Place]]:
        """Yield all places, in the order in which they were made; raise `CorruptionError` for a damaged page."""
        names: dict[int, str] = {}
        number, used = _HEADER_CELLS, self._used
        while number < used:
            words, at = self.words[number // _CELLS], number % _CELLS * _CELL
            kind, cells = words[at] & 0xFF, words[at] >> 8 & 0xFFFF
            if kind == _PLACE:
                group, topic = words[at + _GROUP], words[at + _TOPIC]
                if (
                    group not in names
                    or topic not in names
                    or words[at] != _kind_of_place(number, words[at + _QUEUE], group, topic)
                    or _unsealed(words[at + _POSITION]) is None
                ):
                    raise self._damage(number, "expected a place with names and a position")
                yield PlaceName(names[group], names[topic], words[at + _QUEUE]), Place(self, number)
                cells = _PLACE_CELLS
            elif kind == _NAME:
                names[number] = name = self._name(number)
                self._names[name] = number
            elif words[at] == _WINDOW:
                cells = _WINDOW_CELLS
            elif words[at] in (_FREE, _SUSPECT):
                cells = 1
                self._flight_cells += 1
                self._free += [number] * (words[at] == _FREE)
            elif kind in (_IN_FLIGHT, _HANDED_OUT):
                cells = 1
                self._flight_cells += 1
                place, *fields = [words[at + field] for field in range(1, _CELL)]
                differs = words[at] ^ _kind_of_flight(_FLIGHT.pack(place, *fields)) ^ kind ^ _IN_FLIGHT
                if differs & (1 << 40) - 1:
                    raise self._damage(number, "expected a received message")
                flight = FlightRow(number, kind == _IN_FLIGHT, *fields)
                if differs:
                    flight = flight._replace(visible_ms=0)
                self.flights.setdefault(place, []).append(flight)
            elif kind != _GAP or cells != -number % _CELLS:
                raise self._damage(number, f"expected a place or a name, found {kind}")
            if not 0 < cells <= _CELLS - number % _CELLS:
                raise self._damage(number, f"expected a number of cells, found {cells}")
            number += cells

    def at(self, number: int, name: PlaceName) -> Place | None:
        """Return the place at a cell that another process has named; None if this page has another there."""
        with suppress(CorruptionError, StoreIOError):
            self._map(number // _CELLS)
            words, at = self.words[number // _CELLS], number % _CELLS * _CELL
            group, topic = words[at + _GROUP], words[at + _TOPIC]
            if words[at] == _kind_of_place(number, name.queue_id, group, topic):
                self._map(max(group, topic) // _CELLS)
                if (self._name(group), self._name(topic)) == name[:2]:
                    self._map(words[at + _WINDOW_AT] // _CELLS)
                    cell = _unsealed(words[at + _SUSPECTS])
                    while cell:
                        self._map(cell // _CELLS)
                        cell = Suspect(self, cell).next
                    return Place(self, number)
        return None

    def add(self, name: PlaceName, position: int) -> Place:
        """Add a place.

        Raises:
            StoreIOError: The disk refuses.
        """
        group, topic = self._named(name.group), self._named(name.topic)
        number = self._room(_PLACE_CELLS)
        words, at = self.words[number // _CELLS], number % _CELLS * _CELL
        words[at + _POSITION] = words[at + _SAVED_LAST] = _sealed(max(-1, min(position, _MOST_POSITION)))
        words[at + _SET_BACK], words[at + _SAVED_BEFORE], words[at + _QUEUE] = 0, 0, name.queue_id
        words[at + _TAKES], words[at + _HOLDER] = 0, 0
        words[at + _GROUP], words[at + _TOPIC] = group, topic
        words[at] = _kind_of_place(number, name.queue_id, group, topic)
        self._used = number + _PLACE_CELLS
        return Place(self, number)

    def hold(self, place: Place, client_id: str = "", members: Iterable[str] = (), *, was_held: bool = False) -> Place:
        """Return a place for a consumer that takes the queue, or ``was_held`` by it before, with a window.

        What has begun there is suspect, unless the former holder is another one of ``members``, and so still runs.

        Raises:
            StoreIOError: The disk refuses.
        """
        number = place.number
        words, at = self.words[number // _CELLS], number % _CELLS * _CELL
        if not words[at + _WINDOW_AT]:
            cell = self._room(_WINDOW_CELLS)
            window, begin = self.words[cell // _CELLS], cell % _CELLS * _CELL
            window[begin], window[begin + 1] = _WINDOW, number
            self._used = cell + _WINDOW_CELLS
            words[at + _WINDOW_AT] = cell
            self._with_window.append(number)  # those of `opened` have one already
        if not was_held:
            words[at + _TAKES] = words[at + _TAKES] + 1 & _NUMBER
        held = Place(self, number)
        held.saving = place.saving
        if was_held:
            return held
        holder, *others = map(zlib.crc32, map(_encoded, (client_id, *members)))
        former = _unsealed(words[at + _HOLDER])
        if former == holder or former not in others:
            held.note_deaths()
        else:
            for suspect in held.suspects().values():  # one that runs alone does so in the former holder's process
                suspect.runs_alone(False)
        words[at + _HOLDER] = _sealed(holder)  # last: after a kill before, the former one is still known
        return held

    def add_suspect(self, queue_offset: int, since: int, next_cell: int) -> int:
        """Add a message at which a process has ended, before other suspects of its place; return its cell.

        Raises:
            StoreIOError: The disk refuses.
        """
        cell = self._free.pop() if self._free else self._new_flight()
        words, at = self.words[cell // _CELLS], cell % _CELLS * _CELL
        for field, number in enumerate((queue_offset, since, 1, 0, 0, next_cell), 1):
            words[at + field] = _sealed(number)
        words[at] = _SUSPECT
        return cell

    # ---- received messages

    def add_flight(self, place: int, cell: int | None, *numbers: int) -> int:
        """Note a message in flight at a place by its number, as a `FlightRow` has it; return its cell, or ``cell``.

        Raises:
            StoreIOError: The disk refuses.
        """
        if cell is None:
            cell = self._free.pop() if self._free else self._new_flight()
        segment, at = cell // _CELLS, cell % _CELLS * _CELL
        data = _FLIGHT.pack(place, *numbers)
        self._segments[segment].buffer[8 * at + 8 : 8 * at + 64] = data
        self.words[segment][at] = _kind_of_flight(data)
        return cell

    def _new_flight(self) -> int:
        cell = self._room(1)
        self.words[cell // _CELLS][cell % _CELLS * _CELL] = _FREE
        self._used = cell + 1
        self._flight_cells += 1
        return cell

    def free_flight(self, cell: int) -> None:
        """Forget a message that was received."""
        self.words[cell // _CELLS][cell % _CELLS * _CELL] = _FREE
        self._free.append(cell)

    def end_flight(self, cell: int) -> None:
        """Note that a message is no longer in flight; its attempts still count."""
        words, at = self.words[cell // _CELLS], cell % _CELLS * _CELL
        words[at] = words[at] >> 8 << 8 | _HANDED_OUT

    def _named(self, name: str) -> int:
        """Return the cell of a name, which is added once."""
        if (number := self._names.get(name)) is None:
            data = name.encode("utf-8", "surrogatepass")
            word = _kind_of_name(data)
            cells = word >> 8 & 0xFFFF
            number = self._names[name] = self._room(cells)
            words, at = self.words[number // _CELLS], number % _CELLS * _CELL
            self._segments[number // _CELLS].buffer[8 * at + 8 : 8 * at + 8 + len(data)] = data
            words[at] = word
            self._used = number + cells
        return number

    def _name(self, number: int) -> str:
        words, at = self.words[number // _CELLS], number % _CELLS * _CELL
        size, begin = words[at] >> 32 & 0xFFFF, 8 * at + 8
        data = self._segments[number // _CELLS].buffer[begin : begin + size]
        if words[at] != _kind_of_name(data):
            raise self._damage(number, "expected a name")
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise self._damage(number, f"a name: {error}") from None

    # ---- segments

    def _room(self, cells: int) -> int:
        """Return the first of so many free cells of one segment."""
        number = self._used
        left = -number % _CELLS
        if left < cells:
            if left:
                self.words[number // _CELLS][number % _CELLS * _CELL] = _GAP | left << 8
            if len(self._segments) == (number + left) // _CELLS:
                self._grow()
            self._used = number = number + left
        return number

    def close(self, *, deletes: bool) -> None:
        """Let no place be read or written any more, because another process can own the store; delete the page."""
        self.release()
        if deletes:
            with suppress(StoreIOError):  # then it agrees with the tables
                self.delete(self._files, self._store)

    def release(self) -> None:
        """Let no place be read or written any more by this process."""
        for words in self.words:
            words.release()

    def _grow(self) -> None:
        folder = os.path.join(self._store, GROUPS_FOLDER)
        self._files.make_folder(folder)
        file = self._files.create(os.path.join(folder, _segment_name(len(self._segments))), _SEGMENT_SIZE)
        self._files.reserve(file, 0, _SEGMENT_SIZE)
        self._add(file)

    def _map(self, last: int) -> None:
        while len(self._segments) <= last:
            path = os.path.join(self._store, GROUPS_FOLDER, _segment_name(len(self._segments)))
            file = self._files.open(path, writable=self._writable)
            if file.size != _SEGMENT_SIZE:
                raise CorruptionError(path, file.size, "size", f"expected {_SEGMENT_SIZE} bytes, found {file.size}")
            self._add(file)

    def _add(self, file: File) -> None:
        buffer = file.buffer
        self._segments.append(file)
        self.words.append(memoryview(buffer).cast("q") if type(buffer) is mmap.mmap else _SeenWords(buffer))

    def _damage(self, number: int, what: str) -> CorruptionError:
        path = self._segments[number // _CELLS].path
        return CorruptionError(path, number % _CELLS * _CELL * 8, "config", what)


_pages: Final[Inherited[GroupPage]] = Inherited(GroupPage.release)  # the progress of the parent's consumers


def _segment_name(number: int) -> str:
    return f"{number:04d}"


def _identity(files: Files, store: str) -> str | None:
    """Return a text for the folder on this machine until it restarts; None where a kill can't be told from that."""
    of_memory: Callable[[str], str | None] = getattr(files, "identity_in_memory", partial(identity_of, files))
    return of_memory(store)


# ---- the table beside it


def take_positions(places: Places, rows: dict[str, dict[int, int]]) -> list[tuple[Place, int]]:
    """Take the positions of places into the rows of a table; return the places that have changed, with the position."""
    changed = list[tuple[Place, int]]()
    for (group, topic), of_topic in places.items():
        key, positions = f"{topic}@{group}", {queue_id: place.position for queue_id, place in of_topic.items()}
        row = rows.get(key, {})
        if positions.items() <= row.items():
            continue
        moved = {queue_id: position for queue_id, position in positions.items() if position != row.get(queue_id, -1)}
        if moved:
            changed += [(of_topic[queue_id], position) for queue_id, position in moved.items()]
            rows[key] = {queue_id: position for queue_id, position in {**row, **moved}.items() if position >= 0}
    return changed


# ---- the page of the broker that owns the store


class KeptPage:
    """The page of an open broker, made when a first group needs it, and its saved copy. Called under the runner's lock.

    The copy has what the tables lack, for an opening after a loss of power. It is saved with the table of progress.
    """

    def __init__(
        self,
        files: Files,
        store: str,
        flush: Callable[[], object],
        page: GroupPage | None,
    ) -> None:
        """Go on with a page, if there is one; ``flush()`` flushes the log."""
        self._files, self._store = files, store
        self._flush = flush
        self._page = page
        self._adopted: dict[Place, int] = {}  # what the table has taken since the last copy
        self._copies: list[tuple[bytes, dict[Place, int], bytes]] = []  # of each table that is not written yet
        self._noted = set[Place]()  # the places with a new position in a table whose write has begun, and not ended
        self.places: Places = {} if page is None else page.opened
        """The places that it has had from its opening on, to which the broker adds."""
        self.received: list[tuple[PlaceName, Place]] = []
        """The places with something in `GroupPage.flights`."""
        self.is_of_killed: bool = page is not None
        """Whether a process of this machine has left the page, and not a loss of power."""
        self.is_in_table = False
        """Whether all positions were saved for the last time."""
        self.is_needed = False
        """Whether other processes can have the page, or have ended with messages in flight."""
        if page is not None:
            self.received = [opened for opened in page.named() if opened[1].number in page.flights]

    def restore(self, name: PlaceName, position: int, next_offset: int, rows: list[FlightRow]) -> None:
        """Put what was saved on the page; raise `StoreIOError` if the disk refuses."""
        place = self.add(name, position)
        page = place.page
        copied = page.flights[place.number] = [
            row._replace(cell=page.add_flight(place.number, None, *row[2:])) for row in rows
        ]
        for row in copied:
            if not row.is_in_flight:
                page.end_flight(row.cell)
        place.set_next_offset(next_offset)
        self.places.setdefault((name.group, name.topic), {})[name.queue_id] = place
        self.received.append((name, place))

    def takes_positions(self, rows: dict[str, dict[int, int]]) -> bool:
        """Take the present positions of `places` into the rows of the table; return whether they have changed."""
        changed = take_positions(self.places, rows)
        self._adopted.update(changed)
        return bool(changed)

    def add(self, name: PlaceName, position: int) -> Place:
        """Add a place; raise `StoreIOError` if the disk refuses."""
        if self._page is None:
            self._page = GroupPage.make(self._files, self._store)
        return self._page.add(name, position)

    def copy(self, content: bytes) -> None:
        """Copy the page, to be saved with the content of the table, which is written later."""
        if self._page is not None:
            self._copies.append((content, self._adopted, self._page.copied()))
            self._adopted = {}

    def begin_write(self, content: bytes) -> None:
        """Note that librmq is about to write a table of progress, and save the copy. Called without the lock."""
        if self._page is not None:
            self._page.note_write(True)
        number = next((number for number, copy in enumerate(self._copies, 1) if copy[0] is content), 0)
        copies = self._copies[:number]  # the tables before it are not written any more
        for _, adopted, _ in copies:
            for place, position in adopted.items():
                place.note_saved(position, is_again=place in self._noted)
                self._noted.add(place)
        for _, _, copied in copies[-1:]:
            if copied:
                self._flush()  # the copy can be newer than the table, for which the log was flushed
            GroupPage.save(self._files, self._store, copied)
        del self._copies[:number]

    def end_write(self) -> None:
        """Note that the table is written. Called without the lock."""
        if self._page is not None:
            self._page.note_write(False)
        self._noted.clear()

    def close(self) -> None:
        """Let no place be written any more, and delete a page whose content is saved."""
        page, self._page = self._page, None
        if page is not None:
            page.close(deletes=self.is_in_table and not self.is_needed and not page.has_left)
