"""A rolling sequence of files of equal length, of which few are mapped at a time.

::

    folder/00000000000000000000   bytes         0 .. file_size
    folder/00000000000000065536   bytes file_size .. 2 * file_size      (file_size = 65536)
    ...

A position counts bytes from the start of the sequence. A file is named by the position of its first byte, in 20 digits.
Mirrors ``MappedFileQueue`` and ``MappedFile`` of 4.9.4.
"""

from __future__ import annotations

import errno
import os
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from librmq.errors import CorruptionError, ReadOnlyError, StoreIOError
from librmq.files.interface import (
    Advice,
    Buffer,
    File,
    Files,
    FolderEntry,
    break_links,
    folders_to_name,
    is_folder,
    is_linked,
    read_sole_file,
)
from librmq.runtime.locks import Lock

_POSITIONS: Final = 1 << 63
_FIRST_RESERVE: Final = 4096
_MAX_RESERVE: Final = 1 << 20
_UNMAPPED_USES: Final = 32
"""Number of uses of unmapped files after which one is mapped, which takes as long as some ten of them."""
_SMALL: Final = 1 << 16
"""Most used bytes of a file that is small."""
_KEPT: Final = 1 << 10
"""Most bytes of a small file to keep in memory: a store can have many thousands."""


def file_name(position: int) -> str:
    """Return the name of the file that starts at ``position``."""
    return f"{position:020d}"


def list_starts(folder: str, file_size: int, listed: Iterable[FolderEntry]) -> list[int]:
    """Return the starts of the files in a listed folder.

    Raises:
        CorruptionError: A name is not a position, a position does not follow the one before, or a file has another
            length.
    """
    starts: list[int] = []
    for entry in listed:
        wrong = _wrong_name(entry, file_size, starts[-1] + file_size if starts else None)
        if wrong is not None:
            raise CorruptionError(os.path.join(folder, entry.name), 0, "name", wrong)
        if entry.size != file_size:
            path, at = os.path.join(folder, entry.name), min(entry.size, file_size)
            raise CorruptionError(path, at, "size", f"expected {file_size} bytes, found {entry.size}")
        starts.append(int(entry.name))
    return starts


def _wrong_name(entry: FolderEntry, file_size: int, following: int | None) -> str | None:
    """Return the expected name, or None if a file of that name can start at ``following``."""
    name = entry.name
    if entry.is_folder or len(name) != 20 or not (name.isascii() and name.isdigit()):
        return "expected a file named by its start in 20 digits"
    start = int(name)
    if start >= _POSITIONS - file_size:
        return "expected a start whose file ends below 2^63"
    if start % file_size:
        return f"expected a multiple of the file size {file_size}"
    if following is not None and start != following:
        return f"expected {file_name(following)} after {file_name(following - file_size)}"
    return None


class MappingPool:
    """Bounds the number of files that several sequences keep mapped together; the oldest mapping goes first.

    A file dropped from the pool stays mapped while a reader holds it. A pool keeps no sequence alive, so that one that
    is dropped releases its files at once. Thread-safe.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._order: deque[tuple[weakref.ref[MappedFileQueue], int, weakref.ref[File]]] = deque()
        self._guard = Lock()

    @property
    def is_full(self) -> bool:
        """Whether the next mapping drops another."""
        return len(self._order) >= self._limit

    def mapped(self, queue: MappedFileQueue, start: int, file: File) -> None:
        """Note that ``queue`` has mapped its file at ``start``, and drop the oldest mappings beyond the limit."""
        with self._guard:
            self._order.append((weakref.ref(queue), start, weakref.ref(file)))
            self._shrink(self._limit)

    def unmap_all(self) -> None:
        """Drop all mappings."""
        with self._guard:
            self._shrink(0)

    def _shrink(self, limit: int) -> None:
        while len(self._order) > limit:
            reference, start, file = self._order.popleft()
            # The queue can have dropped this mapping, and have made another since.
            if (queue := reference()) is not None and queue.mapped.get(start) is file():
                queue.unmap(start)


class _SmallFile(NamedTuple):
    """The only file of a sequence as it was listed, with few bytes that are not zeros at its end."""

    start: int
    used: int
    """Number of those bytes."""
    data: bytes
    """They, or none."""


class MappedFileQueue:
    """The files of one folder.

    One thread can create, write and delete files while others read. Opening lists the folder and checks names and
    lengths; it opens no file.

    ``durable`` keeps a descriptor open with each mapping, so that a flush reports a failure to this writer. It also
    flushes each creation or deletion to the device before the next one, so that a crash leaves no gap between files.
    """

    __slots__ = (
        "__weakref__",
        "_changed_folders",
        "_dirty",
        "_durable",
        "_files",
        "_guard",
        "_pool",
        "_reserved",
        "_small",
        "_unmapped_uses",
        "file_size",
        "folder",
        "keeps_descriptors",
        "mapped",
        "starts",
        "writable",
    )

    def __init__(
        self,
        folder: str,
        file_size: int,
        files: Files,
        pool: MappingPool,
        *,
        writable: bool = True,
        durable: bool = False,
        reads_small: bool = False,
    ) -> None:
        """List the folder, which need not exist yet.

        With ``reads_small`` an only file of few bytes is read at once. It is mapped when it is written or often read,
        because mapping takes several times as long as reading.

        Raises:
            CorruptionError: A name is not a position, a position does not follow the one before, or a file has another
                length.
        """
        self.folder: str = folder
        self.file_size: int = file_size
        self.writable: bool = writable
        self._files = files
        self._pool = pool
        self._durable = durable
        self.keeps_descriptors: bool = durable
        """Whether new mappings keep a descriptor open."""
        self.mapped: dict[int, File] = {}
        """The mapped files by start; for inspection only."""
        self._reserved: dict[int, int] = {}
        self._unmapped_uses = 0
        self._dirty: set[int] = set()
        self._changed_folders: set[str] = set()
        self._guard = Lock()
        only = read_sole_file(files, folder, file_size, _SMALL) if reads_small else None
        listed = self._listed() if only is None else [FolderEntry(only[0], file_size, is_folder=False)]
        self.starts: list[int] = list_starts(folder, file_size, listed)
        """The starts of the files, ascending."""
        self._small = None if only is None else _SmallFile(self.starts[0], len(only[1]), only[1])

    def _list(self) -> list[int]:
        return list_starts(self.folder, self.file_size, self._listed())

    def _listed(self) -> list[FolderEntry]:
        return self._files.list(self.folder)

    def refresh(self) -> None:
        """List the folder again, for readers beside a writer in another process."""
        with self._guard:
            self.starts = self._list()
        self._small = None

    @property
    def small(self) -> bytes | None:
        """The content of a small file that is the only one, without the zeros at its end, if it is not mapped."""
        small = self._small
        if small is None or len(self.starts) != 1:
            return None
        return small.data if len(small.data) == small.used else self._files.read(self.path(small.start), 0, small.used)

    def content(self, start: int) -> tuple[Buffer | bytes, int]:
        """Return the content of the file at ``start``, at least up to where all bytes behind are zero, and that end."""
        if (small := self.small) is not None:
            return small, len(small)
        file = self.file(start)
        return file.buffer, file.data_end()

    def keep_little(self) -> None:
        """Keep no content of a small file that is longer than many sequences can keep."""
        if self._small is not None and self._small.used > _KEPT:
            self._small = self._small._replace(data=b"")

    @property
    def begin(self) -> int:
        """The position of the first byte, 0 if there is no file."""
        starts = self.starts
        return starts[0] if starts else 0

    @property
    def end(self) -> int:
        """The position after the last file, 0 if there is no file."""
        starts = self.starts
        return starts[-1] + self.file_size if starts else 0

    def path(self, start: int) -> str:
        """Return the path of the file that starts at ``start``."""
        return os.path.join(self.folder, file_name(start))

    def path_at(self, position: int) -> str:
        """Return the path of the file for ``position``, which need not exist."""
        return self.path(position - position % self.file_size)

    @property
    def has_folder(self) -> bool:
        """Whether the folder of the files exists."""
        return is_folder(self._files, self.folder)

    def start_of(self, position: int) -> int | None:
        """Return the start of the file that contains ``position``, None if there is none."""
        starts = self.starts
        if not starts or not starts[0] <= position < starts[-1] + self.file_size:
            return None
        return starts[bisect_right(starts, position) - 1]

    def file(self, start: int) -> File:
        """Return the file that starts at ``start``, mapped."""
        return self.mapped.get(start) or self._map(start)

    def file_at(self, position: int) -> File | None:
        """Return the file that contains ``position``, None if there is none."""
        start = self.start_of(position)
        if start is None:
            return None
        try:
            return self.file(start)
        except StoreIOError:
            if start in self.starts:
                raise
            return None  # it was deleted meanwhile

    def read(self, position: int, end: int) -> bytes:
        """Return the bytes from ``position`` to ``end``, at most to the end of the file; empty if it does not exist."""
        at = position % self.file_size
        file = self.mapped.get(position - at)
        if file is None:
            size, small = min(end - position, self.file_size - at), self._small
            if small is not None and small.start == position - at and len(small.data) == small.used:
                return small.data[at : at + size].ljust(size, b"\0")
            if self.start_of(position) is not None and self._leaves_unmapped():
                with suppress(StoreIOError):  # mapping the file raises it, unless the file was deleted meanwhile
                    data = self._files.read(self.path(position - at), at, size)
                    if len(data) == size:
                        return data
            file = self.file_at(position)
            if file is None:
                return b""
        return file.buffer[at : at + end - position]  # the slice ends with the file

    def _leaves_unmapped(self) -> bool:
        """Return whether to use an unmapped file as it is: it is small or others need the mappings, and seldom used."""
        if self._small is None and not self._pool.is_full:
            return False
        self._unmapped_uses += 1
        if self._unmapped_uses < _UNMAPPED_USES:
            return True
        self._unmapped_uses = 0
        return False

    def _map(self, start: int) -> File:
        path = self.path(start)
        self._small = None
        file = self._files.open(path, writable=self.writable, keep_descriptor=self.keeps_descriptors)
        if file.size != self.file_size:
            raise CorruptionError(
                path, min(file.size, self.file_size), "size", f"expected {self.file_size} bytes, found {file.size}"
            )
        with self._guard:
            file = self.mapped.setdefault(start, file)
        self._pool.mapped(self, start, file)
        return file

    def unmap(self, start: int) -> None:
        """Drop a mapping; the pool calls this."""
        self.mapped.pop(start, None)

    def unmap_all(self) -> None:
        """Drop all mappings."""
        self.mapped.clear()

    # ------------------------------------------------------------------------------------------------ for the writer

    def create(self, start: int) -> File:
        """Add the file that starts at ``start``: the next one, or any multiple of the file size if there is none."""
        self._check_writable()
        if start % self.file_size or (self.starts and start != self.end):
            raise ValueError(f"{self.folder}: expected {self.end} as the start of the next file, found {start}")
        changed = {self.folder}
        if not self.starts:
            changed.update(folders_to_name(self._files, self.folder))
        path = self.path(start)
        with self._noting(changed):
            if not self.starts:
                self._files.make_folder(self.folder)
            try:
                file = self._files.create(path, self.file_size, keep_descriptor=self.keeps_descriptors)
            except StoreIOError as error:
                if error.errno != errno.EEXIST:
                    raise
                self._files.delete(path)  # an interrupted call left it, because there is only one writer
                file = self._files.create(path, self.file_size, keep_descriptor=self.keeps_descriptors)
        if self._durable:
            try:
                self._files.flush(file)
                self._flush_folders()
            except BaseException:
                with suppress(StoreIOError):
                    self._files.delete(path)
                raise
        with self._guard:
            self.mapped[start] = file
            self.starts = [*self.starts, start]
        self._pool.mapped(self, start, file)
        return file

    @staticmethod
    def create_together(first_files: Sequence[tuple[MappedFileQueue, bytes]]) -> None:
        """Make the first file of each of several sequences below one folder, with its first bytes; none is mapped.

        That takes a third of the time of `create`. None of the sequences has a folder. After an error they have no
        file, and `create` replaces one that is there.
        """
        first = first_files[0][0]
        files, above = first._files, os.path.dirname(first.folder)
        with first._noting({above, *folders_to_name(files, above)}):
            files.make_files(
                above,
                [(os.path.join(os.path.basename(queue.folder), file_name(0)), data) for queue, data in first_files],
                first.file_size,
            )
        for queue, _ in first_files:
            queue._dirty.add(0)
            with queue._guard:
                queue._changed_folders.add(queue.folder)
                queue.starts = [0]

    @contextmanager
    def _noting(self, folders: Iterable[str]) -> Iterator[None]:
        """Note the folders that a creation changes, also if it fails, because the next one takes new ones for old."""
        try:
            yield
        finally:
            new_folders = {folder for folder in folders if is_folder(self._files, folder)}
            with self._guard:
                self._changed_folders |= new_folders

    def reserve(self, start: int, begin: int, end: int) -> int:
        """Allocate blocks for bytes ``begin`` to ``end`` of the file at ``start``, in growing steps.

        Return the end of the allocated bytes; call this before a write beyond it.
        """
        reserved = self._reserved.get(start)
        if reserved is not None and end <= reserved:
            return reserved
        if reserved is None:
            reserved = begin
        if self.starts[0] < start:  # what has filled a file fills the next, in one call
            step = _MAX_RESERVE
        else:
            step = min(max(_FIRST_RESERVE, 2 * (reserved - begin), 2 * (end - reserved), reserved), _MAX_RESERVE)
        block_end = min(self.file_size, max(end, -(-(reserved + step) // _FIRST_RESERVE) * _FIRST_RESERVE))
        self._files.reserve(self.file(start), reserved, block_end)
        self._reserved[start] = block_end
        return block_end

    def used_end(self, start: int, begin: int) -> int:
        """Return the position after the last non-zero byte of the file at ``start``; ``begin`` if none follows it."""
        small = self._small
        if small is not None and small.start == start:
            return max(begin, small.used)
        return self.file(start).used_end(begin, self.file_size)

    def data_behind(self, position: int) -> int:
        """Return the number of bytes from ``position`` to the last nonzero one, in all files."""
        for start in reversed(self.starts):
            begin = max(position - start, 0)
            end = self.used_end(start, begin)
            if end > begin:
                return start + end - position
            if begin:
                break
        return 0

    def touch(self, start: int, begin: int, end: int) -> None:
        """Prepare blocks and pages of bytes ``begin`` to ``end`` of the file at ``start`` for writing."""
        self.reserve(start, begin, end)
        self.file(start).advise(begin, end, Advice.WRITES)

    def write(self, start: int, at: int, data: bytes) -> None:
        """Write few bytes into reserved blocks of the file at ``start``, and include it in the next flush."""
        file, self._small = self.mapped.get(start), None
        if file is None and self._leaves_unmapped():
            self._files.overwrite(self.path(start), at, data)
        else:
            (file or self._map(start)).buffer[at : at + len(data)] = data
        self._dirty.add(start)

    def put(self, start: int, at: int, data: bytes | bytearray) -> None:
        """Write much data at once into the file at ``start``."""
        self.reserve(start, at, at + len(data))
        self._files.overwrite(self.file(start), at, data)

    def release_read_pages(self, begin: int, end: int) -> None:
        """Unmap positions ``begin`` to ``end`` that were read once; a writer of shared files keeps its pages."""
        if not (self.writable and self._files.is_shared):
            self.unmap_pages(begin, end)

    def unmap_pages(self, begin: int, end: int) -> None:
        """Unmap the pages of positions ``begin`` to ``end`` in mapped files until their next use."""
        for start in range(begin - begin % self.file_size, end, self.file_size):
            file = self.mapped.get(start)
            if file is not None:
                file.advise(max(begin - start, 0), min(end - start, self.file_size), Advice.NO_USE)

    def mark_dirty(self, start: int) -> None:
        """Include the file at ``start`` in the next flush."""
        self._dirty.add(start)

    def write_again(self, begin: int, end: int) -> None:
        """Rewrite the bytes from ``begin`` to ``end``, so that the next flush includes them and the folder.

        Use it for data of a writer that died. It may not have flushed them, or a flush failed, after which the kernel
        treats unwritten pages as clean. A file that a snapshot shares is only flushed, because a write changes the time
        of both.
        """
        self._check_writable()
        small = self.small
        for start in self.starts:
            low, high = max(begin, start), min(end, start + self.file_size)
            path = self.path(start)
            if low < high and is_linked(self._files, path):
                self._dirty.add(start)
                continue
            if low < high and small is not None:
                data = small[low - start : high - start].ljust(high - low, b"\0")
                self._files.overwrite(path, low - start, data)
                self._dirty.add(start)
                continue
            for at in range(low, high, _MAX_RESERVE):
                buffer, block_end = self.file(start).buffer, min(high, at + _MAX_RESERVE)
                self._files.reserve(self.file(start), at - start, block_end - start)
                buffer[at - start : block_end - start] = buffer[at - start : block_end - start]
                self.unmap_pages(at, block_end)
                self._dirty.add(start)
        if self.starts:  # else there may be no folder
            with self._guard:
                self._changed_folders.add(self.folder)

    def flush(self) -> None:
        """Flush everything written before this call to the device."""
        for start in sorted(self._dirty):
            # Discard the mark before the flush and from the writer's own set, so that a later mark is never lost.
            self._dirty.discard(start)
            try:
                if start in self.starts:
                    if self._durable or start in self.mapped:
                        self._files.flush(self.file(start))
                    else:
                        self._files.flush(self._files.open(self.path(start), writable=True, keep_descriptor=True))
            except BaseException as error:
                if start in self.starts:
                    self._dirty.add(start)
                elif isinstance(error, StoreIOError):
                    continue  # it was deleted since it was marked
                raise
        self._flush_folders()

    def flush_part(self, start: int, begin: int, end: int) -> None:
        """Flush positions ``begin`` to ``end`` of the file at ``start``, and everything marked before this call."""
        is_marked = start in self._dirty
        self.flush()
        if not is_marked:
            self._files.flush(self.file(start), begin - start, end - start)

    @property
    def has_new_names(self) -> bool:
        """Whether the next flush includes names in folders."""
        return bool(self._changed_folders)

    def take_marks(self) -> tuple[set[int], set[str]]:
        """Return what is marked for the next flush, which the caller makes by other means; it is marked no more."""
        starts = set(self._dirty)
        self._dirty -= starts
        with self._guard:
            folders, self._changed_folders = self._changed_folders, set()
        return starts, folders

    def put_marks_back(self, starts: set[int], folders: set[str]) -> None:
        """Mark again what `take_marks` has returned."""
        self._dirty |= starts
        with self._guard:
            self._changed_folders |= folders

    def _flush_folders(self) -> None:
        with self._guard:
            folders, self._changed_folders = self._changed_folders, set()
        try:
            for folder in sorted(folders):
                self._files.flush_folder(folder)
                folders.discard(folder)
        finally:
            if folders:  # keep the unflushed folders for the next flush
                with self._guard:
                    self._changed_folders |= folders

    def break_links(self, start: int) -> bool:
        """Break hard links of the file at ``start`` before an in-place write; return True if the file was replaced.

        Get a replaced file again, because old mappings show the file of a snapshot.
        """
        replaced = break_links(self._files, self.path(start))
        if replaced:
            with self._guard:
                self.mapped.pop(start, None)
        return replaced

    def zero_from(self, position: int) -> None:
        """Fill with zeros from ``position`` to the end of its file; write only where other bytes are."""
        self._check_writable()
        start = self.start_of(position)
        if start is None:
            return
        buffer = self.file(start).buffer
        at, step, end = position - start, 1 << 20, self.used_end(start, position - start)
        while at < end:
            block_end = min(end, at + step)
            zeros = bytes(block_end - at)
            if buffer[at:block_end] != zeros:
                if self.break_links(start):
                    buffer = self.file(start).buffer
                self._files.reserve(self.file(start), at, block_end)
                buffer[at:block_end] = zeros
                self._dirty.add(start)
            at = block_end

    def delete_from(self, position: int) -> list[str]:
        """Delete the files that start at or after ``position``, the last one first; return their paths."""
        self._check_writable()
        deleted: list[str] = []
        while self.starts and self.starts[-1] >= position:
            if self._durable:  # flush each deletion, also that of a process that died, so that a crash leaves no gap
                with self._guard:
                    self._changed_folders.add(self.folder)
                self._flush_folders()
            deleted.append(self._delete(self.starts[-1]))
        return deleted

    def delete_before(self, position: int, *, in_order: bool = False) -> list[str]:
        """Delete the files that end at or before ``position``, the first one first; return their paths.

        With ``in_order`` each deletion reaches the device before the next.
        """
        self._check_writable()
        deleted: list[str] = []
        while self.starts and self.starts[0] + self.file_size <= position:
            if deleted and (in_order or self._durable):
                self._flush_folders()
            deleted.append(self._delete(self.starts[0]))
        return deleted

    def _delete(self, start: int) -> str:
        path = self.path(start)
        before = self.starts
        with self._guard:  # update the list first, so that no reader looks for a file during its deletion
            self.starts, self._small = [other for other in before if other != start], None
            self.mapped.pop(start, None)
            self._reserved.pop(start, None)
            self._changed_folders.add(self.folder)
        try:
            self._files.delete(path)
        except BaseException:
            self.starts = before
            raise
        self._dirty.discard(start)
        return path

    def _check_writable(self) -> None:
        if not self.writable:
            raise ReadOnlyError(f"{self.folder} is open for reading only")
