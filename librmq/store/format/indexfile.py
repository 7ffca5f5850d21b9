"""One index file: a hash table from message keys to places in the log, written in batches, queried by hash.

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
    | ...                |  12  time                  4   seconds since the beginning timestamp, not below 0
    | entry entries - 1  |  16  previous              4   number of the slot's next older entry, 0 for none
    +--------------------+

A file's begin and end start as the end of the file before it, until its first entry sets them. If a writer dies within
a batch, the next opening for writing takes back its rest. Mirrors 4.9.4's ``IndexFile`` and ``IndexHeader``.
"""

from __future__ import annotations

import mmap
import os
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from librmq.errors import ConfigError, CorruptionError, ReadOnlyError, StoreClosedError
from librmq.files import Advice, Buffer, DiskFiles, File, Files
from librmq.override import override
from librmq.runtime import lazy_numpy as np
from librmq.runtime.closing import Closing
from librmq.runtime.compiled_core import CORE

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
    """Return the length in bytes of a file with this geometry: the position of the entry after these."""
    return HEADER_SIZE + SLOT_SIZE * slots + ENTRY_SIZE * entries


def geometry(length: int) -> tuple[int, int] | None:
    """Return slots and entries of a file of ``length`` bytes with four entries to a slot, None if impossible."""
    slots, remainder = divmod(length - HEADER_SIZE, SLOT_SIZE + 4 * ENTRY_SIZE)
    return (slots, 4 * slots) if slots > 0 and not remainder else None


def check_geometry(slots: int, entries: int) -> None:
    """Check that a file can have this geometry; `ConfigError` if not."""
    if type(slots) is not int or type(entries) is not int or slots < 1 or entries < 2:
        raise ConfigError(f"expected at least 1 slot and 2 entries, found {slots!r:.40} and {entries!r:.40}")


class IndexHeader(NamedTuple):
    """The header of an index file; times are milliseconds."""

    begin_timestamp_ms: int
    end_timestamp_ms: int
    begin_physical_offset: int
    end_physical_offset: int
    slot_count: int
    index_count: int
    """The number of the next entry: one more than the number of entries."""

    @classmethod
    def read(cls, path: str, files: Files) -> IndexHeader:
        """Read the header of the file ``path``, without a mapping; what the file lacks counts as zeros."""
        return cls(*HEADER.unpack(files.read(path, 0, HEADER_SIZE).ljust(HEADER_SIZE, b"\0")))

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


def all_entry_seconds(timestamps_ms: NDArray[np.int64], begin_timestamp_ms: int) -> NDArray[np.int64]:
    """Return `entry_seconds` of each element."""
    if begin_timestamp_ms <= 0:
        return np.zeros(len(timestamps_ms), np.int64)
    seconds: NDArray[np.int64] = np.minimum(np.maximum(timestamps_ms - begin_timestamp_ms, 0) // 1000, MAX_SECONDS)
    return seconds


# ---- the end of a file

# Entries are written before the slots that lead to them, and the header last. A batch counts when its header is there.

_pack_header = HEADER.pack
_pack_entry = struct.Struct(">iqi4s").pack
_INT: Final = struct.Struct(">i")
_pack_int = _INT.pack
_NO_ENTRY: Final = bytes(SLOT_SIZE)


class IndexWriter:
    """The end of one index file. After an error of a method, make another from the file's header. Not thread-safe."""

    __slots__ = ("begin_physical", "begin_timestamp", "count", "end_physical", "max_slots", "slot_count")

    def __init__(self, header: IndexHeader, max_slots: int) -> None:
        self.max_slots = max_slots
        self.begin_timestamp, self.begin_physical = header.begin_timestamp_ms, header.begin_physical_offset
        self.end_physical = header.end_physical_offset
        self.slot_count, self.count = header.slot_count, header.index_count

    def put_many(self, buffer: Buffer, records: Iterable[tuple[int, int, Sequence[int]]]) -> None:
        """Add all keys of records, for which there is room; skip records before that of the last entry."""
        # A few records are packed by literal sizes and locals, because the calls of NumPy would cost more.
        number = start = self.count
        begin_timestamp, begin_physical = self.begin_timestamp, self.begin_physical
        end_physical = self.end_physical
        slot_count, max_slots = self.slot_count, self.max_slots
        position = 40 + 4 * max_slots + 20 * number
        end_timestamp, seconds = None, 0
        for physical, timestamp, hashes in records:
            if physical < end_physical or not hashes:
                continue
            if timestamp != end_timestamp:
                end_timestamp = timestamp
                seconds = entry_seconds(timestamp, begin_timestamp)
            for key_hash in hashes:
                slot = key_hash % max_slots * 4 + 40
                packed = _pack_int(number)
                previous = buffer[slot : slot + 4]
                # Packed numbers compare like numbers, with negative ones after all others.
                if not _NO_ENTRY < previous <= packed:
                    previous = _NO_ENTRY
                    slot_count += 1
                buffer[position : position + 20] = _pack_entry(key_hash, physical, seconds, previous)
                buffer[slot : slot + 4] = packed
                if number <= 1:
                    begin_timestamp, begin_physical, seconds = timestamp, physical, 0
                number += 1
                position += 20
            end_physical = physical
        if end_timestamp is not None:
            buffer[0:40] = _pack_header(
                begin_timestamp, end_timestamp, begin_physical, end_physical, slot_count, number
            )
            if start <= 1:
                self.begin_timestamp, self.begin_physical = begin_timestamp, begin_physical
            self.end_physical = end_physical
            self.slot_count, self.count = slot_count, number

    def put_block(
        self, buffer: Buffer, physical: NDArray[np.int64], timestamps: NDArray[np.int64], hashes: NDArray[np.int64]
    ) -> None:
        """Add an entry for each place of the arrays, none before the last entry's; there is room for all."""
        keys, number = len(hashes), self.count
        begin_timestamp, begin_physical = self.begin_timestamp, self.begin_physical
        first_seconds = entry_seconds(int(timestamps[0]), begin_timestamp)
        if number <= 1:
            begin_timestamp, begin_physical = int(timestamps[0]), int(physical[0])
        end_timestamp, end_physical = int(timestamps[-1]), int(physical[-1])
        put = CORE.put_entries if CORE.put_entries and type(buffer) is mmap.mmap else self._put_entries
        fresh = put(buffer, self.max_slots, number, physical, timestamps, hashes, begin_timestamp, first_seconds)
        slot_count = self.slot_count + fresh
        buffer[:HEADER_SIZE] = _pack_header(
            begin_timestamp, end_timestamp, begin_physical, end_physical, slot_count, number + keys
        )
        self.begin_timestamp, self.begin_physical = begin_timestamp, begin_physical
        self.end_physical = end_physical
        self.slot_count, self.count = slot_count, number + keys

    def _put_entries(
        self,
        buffer: Buffer,
        max_slots: int,
        number: int,
        physical: NDArray[np.int64],
        timestamps: NDArray[np.int64],
        hashes: NDArray[np.int64],
        begin_timestamp: int,
        first_seconds: int,
    ) -> int:
        """Write entries from ``number`` on, and the slots that lead to them; return how many led to none before."""
        keys = len(hashes)
        slots = hashes % max_slots
        numbers = np.arange(number, number + keys)
        before = np.frombuffer(buffer, ">i4", max_slots, HEADER_SIZE)[slots].astype(np.int64)
        previous = np.where((before > 0) & (before <= numbers), before, 0)
        # Sort keys by slot, stably. Sorting pairs as single numbers is fastest.
        shift = keys.bit_length()
        pairs = np.sort(slots << shift | np.arange(keys))
        ordered = pairs >> shift
        again = ordered[1:] == ordered[:-1]
        touched, newest = slots, numbers
        if again.any():
            order = pairs & (1 << shift) - 1
            previous[order[1:][again]] = numbers[order[:-1][again]]
            last = order[np.append(~again, True)]
            touched, newest = slots[last], numbers[last]
        entries = np.empty(keys, stored_entry_dtype())
        entries["hash"] = hashes
        entries["physical"] = physical
        entries["time_diff"] = all_entry_seconds(timestamps, begin_timestamp)
        entries["time_diff"][0] = first_seconds
        entries["previous"] = previous
        position = file_length(self.max_slots, number)
        buffer[position : position + ENTRY_SIZE * keys] = entries.tobytes()
        self._write_slots(buffer, int(ordered[0]), int(ordered[-1]), touched, newest)
        return keys - int(np.count_nonzero(previous))

    def _write_slots(
        self, buffer: Buffer, first: int, last: int, slots: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> None:
        """Set slots from ``first`` to ``last``, in one piece if they are close together."""
        if last - first < 16 * len(slots):
            begin, end = HEADER_SIZE + SLOT_SIZE * first, HEADER_SIZE + SLOT_SIZE * (last + 1)
            table = np.frombuffer(buffer[begin:end], ">i4").copy()
            table[slots - first] = numbers
            buffer[begin:end] = table.tobytes()
            return
        if type(buffer) is mmap.mmap:
            np.frombuffer(buffer, ">i4", self.max_slots, HEADER_SIZE)[slots] = numbers
            return
        # A file that records its writes, or copies at the first, must see each write.
        packed: list[bytes] = numbers.astype(">i4").view("V4").tolist()
        for position, number in zip((HEADER_SIZE + SLOT_SIZE * slots).tolist(), packed, strict=True):
            buffer[position : position + 4] = number

    def take_back(self, buffer: Buffer, max_entries: int) -> bool:
        """Undo entries that no header counts, and return whether there were any.

        A slot that leads to one gets the entry's previous number.
        """
        start = self.count
        position, restore = file_length(self.max_slots, start), []
        for number in range(start, max_entries):
            entry_hash, physical, seconds, previous = unpack_entry(buffer, position)
            if entry_hash < 0 or physical < self.end_physical or seconds < 0 or not 0 <= previous <= number:
                break  # a write leaves no such remains
            slot = HEADER_SIZE + SLOT_SIZE * (entry_hash % self.max_slots)
            if not (entry_hash or physical or seconds or previous):
                # There is nothing, or the entry of hash 0 at the start of the log; its slot decides.
                (newest,) = _INT.unpack(buffer[slot : slot + SLOT_SIZE])
                if newest < number:
                    break
            restore.append((number, slot, previous))
            position += ENTRY_SIZE
        for number, slot, previous in reversed(restore):
            if buffer[slot : slot + SLOT_SIZE] == _pack_int(number):
                buffer[slot : slot + SLOT_SIZE] = _pack_int(previous)
        if restore:
            begin = file_length(self.max_slots, start)
            buffer[begin:position] = bytes(position - begin)
        return bool(restore)


# ---- the file

_CHUNK: Final = 1 << 20
_PAGE: Final = 4096
_FIRST_STEP: Final = 4096 // ENTRY_SIZE
_MAX_STEP: Final = (1 << 20) // ENTRY_SIZE


class IndexFile(Closing):
    """One index file, usable alone.

    One thread can write while any number of threads query. Write records in log order. Hashes are those of
    `librmq.java.lang.index_key_hash`.
    """

    __slots__ = (
        "_announced",
        "_closed",
        "_dirty",
        "_file",
        "_files",
        "_on_map",
        "_reserved",
        "_writer",
        "max_entries",
        "max_slots",
        "path",
        "writable",
    )
    _writer: IndexWriter

    def __init__(
        self,
        file: File,
        slots: int | None,
        entries: int | None,
        files: Files,
        on_map: Callable[[IndexFile], None] | None = None,
    ) -> None:
        """Call `create` or `open` instead. ``on_map`` is called with every mapping of the file."""
        if slots is None or entries is None:
            shape = geometry(file.size)
            if shape is None:
                raise CorruptionError(
                    file.path, file.size, "size", f"expected the size of an index file, found {file.size} bytes"
                )
            slots, entries = shape
        check_geometry(slots, entries)
        self.path: str = file.path
        self.writable: bool = file.writable
        self.max_slots: int = slots
        self.max_entries: int = entries
        """A file holds one entry less, because the first is unused."""
        self._files = files
        self._file: File | None = None
        self._on_map = on_map
        self._closed = False
        self._dirty = False
        self._reserved = 0  # entries below this number have blocks; 0 means unknown
        self._announced = 0  # slots can lead to entries below this number before the header counts them
        self._use_file(file)
        self._load_header()

    @classmethod
    def create(
        cls,
        path: str,
        slots: int,
        entries: int,
        files: Files | None = None,
        *,
        after: IndexHeader | None = None,
        on_map: Callable[[IndexFile], None] | None = None,
    ) -> IndexFile:
        """Create an empty file and open it for writing; ``after`` is the header of the previous file."""
        check_geometry(slots, entries)
        files = files or DiskFiles()
        file = files.create(path, file_length(slots, entries))
        try:
            files.reserve(file, 0, HEADER_SIZE + SLOT_SIZE * slots)
            self = cls(file, slots, entries, files, on_map)
            self._reserved = 1
            self._dirty = True
            if after is not None:
                self._begin_after(after)
        except BaseException:
            files.delete(path)
            raise
        return self

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        files: Files | None = None,
        *,
        slots: int | None = None,
        entries: int | None = None,
        writable: bool = False,
        on_map: Callable[[IndexFile], None] | None = None,
    ) -> IndexFile:
        """Open a file; by default it has four entries to a slot.

        Raises:
            CorruptionError: The length is wrong or the header impossible.
        """
        files = files or DiskFiles()
        return cls(files.open(os.fspath(path), writable=writable), slots, entries, files, on_map)

    @override
    def __repr__(self) -> str:
        return f"<IndexFile {self.path}>"

    @property
    def name(self) -> str:
        """Name of the file: the time of its creation."""
        return os.path.basename(self.path)

    @property
    def file(self) -> File:
        """The file itself, mapped."""
        return self._file or self._map()

    def _map(self) -> File:
        if self._closed:
            raise StoreClosedError(f"{self.path} is closed")
        file = self._files.open(self.path, writable=self.writable)
        self._use_file(file)
        return file

    def _use_file(self, file: File) -> None:
        length = file_length(self.max_slots, self.max_entries)
        if file.size != length:
            raise CorruptionError(
                self.path, min(file.size, length), "size", f"expected {length} bytes, found {file.size}"
            )
        self._file = file
        file.advise(0, length, Advice.RANDOM_READS)
        if self._on_map:
            self._on_map(self)

    def release_mapping(self) -> None:
        """Release the mapping; the next use maps the file again."""
        self._file = None

    def _release_pages(self, begin: int, end: int) -> None:
        """Release the pages of entries that were read in their order, from number ``begin`` to below ``end``."""
        if self._file is not None and not self.writable:
            self._file.advise(self.entry_position(begin), min(self.entry_position(end), self._file.size), Advice.NO_USE)

    # ------------------------------------------------------------------------------------------------ reading

    @property
    def header(self) -> IndexHeader:
        """The header in the file.

        Raises:
            CorruptionError: The header is impossible.
        """
        header = IndexHeader(*HEADER.unpack(self.file.buffer[:HEADER_SIZE]))
        _, _, begin_physical, end_physical, slot_count, count = header
        if not 0 <= count <= self.max_entries:
            raise CorruptionError(self.path, 36, "header", f"index count {count} of {self.max_entries}")
        if not 0 <= slot_count <= max(count, 1):
            raise CorruptionError(self.path, 32, "header", f"slot count {slot_count} of {count} entries")
        if not 0 <= begin_physical <= end_physical:
            raise CorruptionError(self.path, 16, "header", f"physical offsets from {begin_physical} to {end_physical}")
        return header if count else header._replace(index_count=1)

    @property
    def count(self) -> int:
        """The number of the writer's next entry."""
        return self._writer.count

    @property
    def end_physical(self) -> int:
        """The place of the last record that was written."""
        return self._writer.end_physical

    @property
    def full(self) -> bool:
        """Whether there is no room for another entry."""
        return self.header.index_count >= self.max_entries

    def entries(self, begin: int = 1, end: int | None = None) -> NDArray[np.void]:
        """Return a copy of the entries from number ``begin`` to below ``end``, by default all, as `entry_dtype`."""
        count = self.header.index_count
        end = count if end is None else min(end, count)
        begin = min(max(begin, 0), count)
        at = self.entry_position(begin)
        stored = np.frombuffer(self.file.buffer, stored_entry_dtype(), max(end - begin, 0), at)
        return stored.astype(entry_dtype())

    def slots(self) -> NDArray[np.void]:
        """Return the slots that are not zero, ascending, as `slot_dtype`."""
        table = np.frombuffer(self._read_slots(0, self.max_slots), ">i4")
        used = np.flatnonzero(table)
        rows = np.empty(len(used), slot_dtype())
        rows["slot"] = used
        rows["number"] = table[used]
        return rows

    def _read_slots(self, begin: int, end: int) -> bytes:
        """Return slots without a mapping, which would fill their holes in a file system that lies in memory."""
        return self._files.read(self.path, HEADER_SIZE + SLOT_SIZE * begin, SLOT_SIZE * (end - begin))

    def first_from(self, physical_offset: int) -> int:
        """Return the number of the first entry of a record at or after ``physical_offset``."""
        buffer = self.file.buffer

        def place(number: int) -> int:
            return int(unpack_entry(buffer, self.entry_position(number))[1])

        return bisect_left(range(self.header.index_count), physical_offset, 1, key=place)

    def entry_position(self, number: int) -> int:
        """Return the position of an entry in the file."""
        return file_length(self.max_slots, number)

    def query(self, key_hash: int, begin_ms: int, end_ms: int, max_results: int, places: list[int]) -> int:
        """Append to ``places`` the physical offsets of a hash, the newest first, until it has ``max_results``.

        Return the time of the file's first record: if it is before ``begin_ms``, no older file need be searched.
        An entry's time is exact to the second. A chain ends after its first entry before ``begin_ms``, and in a
        damaged file where 4.9's search ends. Thread-safe.

        Raises:
            CorruptionError: The chain is a circle.
        """
        buffer = self.file.buffer
        slot = key_hash % self.max_slots
        at = HEADER_SIZE + SLOT_SIZE * slot
        (number,) = _INT.unpack(
            buffer[at : at + SLOT_SIZE] if self.writable and self._files.is_shared else self._read_slots(slot, slot + 1)
        )
        # Read slot, announced number and header in the order of the writer, so that no slot is ahead of both counts.
        announced = self._announced
        header = self.header
        first_timestamp, count = header.begin_timestamp_ms, max(header.index_count, announced)
        if not 0 < number <= count or count <= 1 or not header.overlaps(begin_ms, end_ms):
            return first_timestamp
        first_position = self.entry_position(0)
        forward: set[int] = set()
        while len(places) < max_results and number < self.max_entries:
            position = first_position + ENTRY_SIZE * number
            entry_hash, physical, seconds, previous = unpack_entry(buffer, position)
            if seconds < 0:
                break
            timestamp = first_timestamp + 1000 * seconds
            if entry_hash == key_hash and begin_ms <= timestamp <= end_ms:
                places.append(physical)
            if not 0 < previous <= count or previous == number or timestamp < begin_ms:
                break
            if previous > number:  # chains lead backwards; one that does not can be a circle
                if number in forward:
                    raise CorruptionError(self.path, position, "entry", "a chain of entries goes in a circle")
                forward.add(number)
            number = previous
        return first_timestamp

    # ------------------------------------------------------------------------------------------------ writing

    def _begin_after(self, header: IndexHeader) -> None:
        """Begin an empty file at the end of one with this header; it needs no flush, because it can be repeated."""
        self.file.buffer[:HEADER_SIZE] = HEADER.pack(*header.follower._replace(index_count=0))
        self._load_header()

    def put(self, key_hash: int, physical_offset: int, store_timestamp_ms: int) -> bool:
        """Add one entry, and return False if the file is full.

        Raises:
            ValueError: The place is before that of the last entry.
        """
        if not self.writable:
            raise ReadOnlyError(f"{self.path} is open for reading only")
        if self.count >= self.max_entries:
            return False
        if physical_offset < self.end_physical:
            raise ValueError(f"{self.path}: {physical_offset} is before the last, {self.end_physical}")
        self._put_many(((physical_offset, store_timestamp_ms, (key_hash,)),), 1)
        return True

    def _put_many(self, records: Iterable[tuple[int, int, Sequence[int]]], keys: int) -> None:
        """Add all ``keys`` of records, for which there is room; skip records before that of the last entry."""
        self._put(keys, self._writer.put_many, records)

    def put_block(self, physical: NDArray[np.int64], timestamps: NDArray[np.int64], hashes: NDArray[np.int64]) -> None:
        """Add an entry for each place of the arrays, none before the last entry's; there is room for all."""
        self._put(len(hashes), self._writer.put_block, physical, timestamps, hashes)

    def _put(self, keys: int, put: Callable[..., None], *columns: object) -> None:
        """Let the next entries have blocks, and queries follow slots to them; then write them."""
        end = self.count + keys
        if end > self._reserved:
            self._reserve(end)
        if self.count > 1:
            self._announced = end
        try:
            put((self._file or self._map()).buffer, *columns)
        except BaseException:
            self._load_header()
            raise
        self._dirty, self._announced = True, 0

    def _reserve(self, end: int) -> None:
        """Reserve blocks for the entries below number ``end`` and for a growing number of further ones."""
        file = self.file
        if not self._reserved:
            self._files.reserve(file, 0, HEADER_SIZE + SLOT_SIZE * self.max_slots)
            self._reserved = self.count
        step = min(max(self.count, _FIRST_STEP), _MAX_STEP)
        target = min(max(end, self._reserved + step), self.max_entries)
        self._files.reserve(file, self.entry_position(self._reserved), self.entry_position(target))
        self._reserved = target

    def _load_header(self) -> None:
        """Read the header, and take back the remains of a write that did not reach its header."""
        self._writer = writer = IndexWriter(self.header, self.max_slots)
        if self.writable and writer.take_back(self.file.buffer, self.max_entries):
            self._dirty = True
        self._announced = 0

    def write_again(self) -> None:
        """Write the whole content again for `flush`, because the writer can have died before its own flush."""
        file = self.file
        for at in range(0, file.data_end(), _CHUNK):
            data = self._files.read(self.path, at, _CHUNK)
            if data.count(0) == len(data):
                continue
            self._files.reserve(file, at, at + len(data))
            for begin in range(0, len(data), _PAGE):  # an overlay reads what it writes, and so would fill a hole
                page = data[begin : begin + _PAGE]
                if page.count(0) != len(page):
                    file.buffer[at + begin : at + begin + len(page)] = page
        self._dirty = True

    def _note_unflushed(self) -> None:
        """Let the next `flush` flush what a killed process has written, too."""
        self._dirty = True

    def flush(self) -> None:
        """Flush everything written before the call to the device."""
        if self._dirty:
            self._dirty = False
            file = self.file
            file.advise(0, file.size, Advice.NO_USE)  # any page of the slots can have been written
            try:
                self._files.flush(file)
            except BaseException:
                self._dirty = True
                raise

    @override
    def close(self) -> None:
        """Flush and release the file."""
        if not self._closed:
            self.flush()
            self._closed = True
            self.release_mapping()
