"""One index file: written in batches, queried by hash.

If a writer dies within a batch, the next opening for writing takes back its rest. `librmq.store.format.index_layout`
draws the bytes. Mirrors 4.9.4's ``IndexFile``.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Self

from librmq.errors import CorruptionError, ReadOnlyError, StoreClosedError
from librmq.files.disk import DiskFiles
from librmq.files.interface import File, Files
from librmq.runtime import lazy_numpy as np
from librmq.store.format.index_layout import (
    ENTRY_SIZE,
    HEADER,
    HEADER_SIZE,
    SLOT_SIZE,
    IndexHeader,
    IndexWriter,
    check_geometry,
    entry_dtype,
    file_length,
    geometry,
    slot_dtype,
    stored_entry_dtype,
    unpack_entry,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


_INT: Final = struct.Struct(">i")
_CHUNK: Final = 1 << 20
_FIRST_STEP: Final = 4096 // ENTRY_SIZE
_MAX_STEP: Final = (1 << 20) // ENTRY_SIZE


class IndexFile:
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
        self.path = file.path
        self.writable = file.writable
        self.max_slots = slots
        self.max_entries = entries
        """A file holds one entry less, because the first is unused."""
        self._files = files
        self._file: File | None = None
        self._on_map = on_map
        self._closed = False
        self._dirty = False
        self._reserved = 0  # entries below this number have blocks; 0 means unknown
        self._announced = 0  # slots can lead to entries below this number before the header counts them
        self._use_file(file)
        self._load()

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
                self.begin_after(after)
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
        self._files.no_read_ahead(file, self.entry_position(0), length)
        if self._on_map:
            self._on_map(self)

    def release(self) -> None:
        """Release the mapping; the next use maps the file again."""
        self._file = None

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
        table = np.frombuffer(self.file.buffer, ">i4", self.max_slots, HEADER_SIZE)
        used = np.flatnonzero(table)
        rows = np.empty(len(used), slot_dtype())
        rows["slot"] = used
        rows["number"] = table[used]
        return rows

    def entry_position(self, number: int) -> int:
        """Return the position of an entry in the file."""
        return file_length(self.max_slots, number)

    def query(self, key_hash: int, begin_ms: int, end_ms: int, max_results: int, places: list[int]) -> None:
        """Append to ``places`` the physical offsets of a hash, the newest first, until it has ``max_results``.

        An entry's time is exact to the second. A chain ends after its first entry before ``begin_ms``, and in a
        damaged file where 4.9's search ends. Thread-safe.

        Raises:
            CorruptionError: The chain is a circle.
        """
        buffer = self.file.buffer
        slot = HEADER_SIZE + SLOT_SIZE * (key_hash % self.max_slots)
        (number,) = _INT.unpack(buffer[slot : slot + SLOT_SIZE])
        # Read slot, announced number and header in the order of the writer, so that no slot is ahead of both counts.
        announced = self._announced
        header = self.header
        count = max(header.index_count, announced)
        if not 0 < number <= count or count <= 1:
            return
        first_timestamp, first_position = header.begin_timestamp_ms, self.entry_position(0)
        forward: set[int] = set()
        while len(places) < max_results and number < self.max_entries:
            position = first_position + ENTRY_SIZE * number
            entry_hash, physical, seconds, previous = unpack_entry(buffer, position)
            if seconds < 0:
                return
            timestamp = first_timestamp + 1000 * seconds
            if entry_hash == key_hash and begin_ms <= timestamp <= end_ms:
                places.append(physical)
            if not 0 < previous <= count or previous == number or timestamp < begin_ms:
                return
            if previous > number:  # chains lead backwards; one that does not can be a circle
                if number in forward:
                    raise CorruptionError(self.path, position, "entry", "a chain of entries goes in a circle")
                forward.add(number)
            number = previous

    # ------------------------------------------------------------------------------------------------ writing

    def begin_after(self, header: IndexHeader) -> None:
        """Begin an empty file at the end of one with this header; it needs no flush, because it can be repeated."""
        self.file.buffer[:HEADER_SIZE] = HEADER.pack(*header.follower._replace(index_count=0))
        self._load()

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
        self.put_many(((physical_offset, store_timestamp_ms, (key_hash,)),), 1)
        return True

    def put_many(self, records: Iterable[tuple[int, int, Sequence[int]]], keys: int) -> None:
        """Add all keys of records, for which there is room; skip records before that of the last entry."""
        self._make_room(keys)
        try:
            self._writer.put_many((self._file or self._map()).buffer, records)
        except BaseException:
            self._load()
            raise
        self._dirty, self._announced = True, 0

    def put_block(self, physical: NDArray[np.int64], timestamps: NDArray[np.int64], hashes: NDArray[np.int64]) -> None:
        """Add an entry for each place of the arrays, none before the last entry's; there is room for all."""
        self._make_room(len(hashes))
        try:
            self._writer.put_block((self._file or self._map()).buffer, physical, timestamps, hashes)
        except BaseException:
            self._load()
            raise
        self._dirty, self._announced = True, 0

    def _make_room(self, keys: int) -> None:
        """Let the next entries have blocks, and queries follow slots to them."""
        end = self.count + keys
        if end > self._reserved:
            self._reserve(end)
        if self.count > 1:
            self._announced = end

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

    def _load(self) -> None:
        """Read the header, and take back the remains of a write that did not reach its header."""
        self._writer = writer = IndexWriter(self.header, self.max_slots)
        if self.writable and writer.take_back(self.file.buffer, self.max_entries):
            self._dirty = True
        self._announced = 0

    def write_again(self) -> None:
        """Write the whole content again for `flush`, because the writer can have died before its own flush."""
        file = self.file
        for at in range(0, file.size, _CHUNK):
            data = file.buffer[at : at + _CHUNK]
            if data.count(0) != len(data):
                self._files.reserve(file, at, at + len(data))
                file.buffer[at : at + len(data)] = data
        self._dirty = True

    def flush(self) -> None:
        """Flush everything written before the call to the device."""
        if self._dirty:
            self._dirty = False
            file = self.file
            self._files.unmap(file, 0, file.size)  # any page of the slots can have been written
            try:
                self._files.flush(file)
            except BaseException:
                self._dirty = True
                raise

    def close(self) -> None:
        """Flush and release the file."""
        if not self._closed:
            self.flush()
            self._closed = True
            self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
