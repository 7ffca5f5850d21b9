"""The file seam: everything a store does to files goes through one `Files` object.

All writes to store files are slice assignments on a file's ``buffer`` (many numbers at once may go into a plain mapping
by numpy, but never past a subclass of it, which is to see each write); opening, creating, allocating, flushing,
listing, renaming and deleting are methods of `Files`. Production maps real files (`DiskFiles`); tests and ephemeral
stores use anonymous memory (`MemoryFiles`); wrappers that record or fail stand in `librmq.testing.files`.

Rules of use:

* A mapping is never closed. It goes with the last reference to its `File`, or to a view of its buffer, so that it
  stays for a reader whatever is deleted or rolled meanwhile.
* A store to a mapped page without a block behind it kills the process when the disk is full: `reserve` a range before
  writing to it.
* Errors of the operating system leave as `StoreIOError`, which names the call and the file.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Protocol

from librmq.errors import StoreIOError

__all__ = [
    "Buffer",
    "File",
    "FileLock",
    "Files",
    "FolderEntry",
    "copy_file",
    "fills_by_itself",
    "folders_to_name",
    "link_file",
    "make_folders",
    "named",
]

Buffer = mmap.mmap
_CHUNK: Final = 1 << 20
_ZEROS_SIZE: Final = 1 << 16
_ZEROS: Final = bytes(_ZEROS_SIZE)
# Why a file system does not link: it can't, the other name is on another one, there are too many, or it is not allowed.
_NO_LINKS: Final = {errno.EXDEV, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EPERM, errno.EACCES}


class File:
    """A file of the store and its contents as a buffer.

    ``buffer`` supports slices, slice assignment of equal length, and the buffer protocol (``struct.unpack_from``,
    ``numpy.frombuffer``). ``descriptor`` is kept open for files whose flush is a promise, else -1.
    """

    __slots__ = ("__weakref__", "buffer", "descriptor", "path", "size", "writable")

    def __init__(self, path: str, buffer: Buffer, size: int, writable: bool, descriptor: int = -1) -> None:
        self.path = path
        self.buffer = buffer
        self.size = size
        self.writable = writable
        self.descriptor = descriptor

    def __del__(self) -> None:
        if getattr(self, "descriptor", -1) >= 0:  # a signal in __init__ leaves it unset
            os.close(self.descriptor)
            self.descriptor = -1

    def __repr__(self) -> str:
        return f"<File {self.path} {self.size} bytes>"


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """One name in a folder; ``size`` is 0 for a folder."""

    name: str
    size: int
    is_folder: bool
    is_file: bool = True
    """Whether it is a regular file, or leads to one: no pipe, socket or device."""


class FileLock(Protocol):
    """A held lock of a store."""

    def check(self) -> None:
        """Check that the lock still keeps other writers out; `StoreIOError` if its file was deleted or replaced."""
        ...

    def release(self) -> None:
        """Give the lock back; doing so again does nothing."""
        ...


class Files(Protocol):
    """What a store asks of a file system. Paths are plain strings; all methods are thread-safe."""

    @property
    def is_shared(self) -> bool:
        """Whether other processes see these files, and may change them."""
        ...

    def open(self, path: str, *, writable: bool = False, keep_descriptor: bool = False) -> File:
        """Map an existing file. `CorruptionError` if it is empty or no regular file."""
        ...

    def create(self, path: str, size: int, *, keep_descriptor: bool = False) -> File:
        """Make a file of ``size`` zero bytes (an existing one is an error) and map it for writing."""
        ...

    def reserve(self, file: File, begin: int, end: int) -> None:
        """Make sure that blocks exist behind bytes ``begin`` to ``end``, so that writing there can't fail."""
        ...

    def touch(self, file: File, begin: int, end: int) -> None:
        """Make the pages of bytes ``begin`` to ``end`` ready for writing, where the system can.

        The first write to a page is slow: call this where no producer waits.
        """
        ...

    def put(self, file: File, at: int, data: bytes | bytearray) -> None:
        """Write much data at once into blocks that are there, and start it on its way to the device.

        The file's buffer shows it. For a few bytes an assignment to the buffer is quicker.
        """
        ...

    def no_read_ahead(self, file: File, begin: int, end: int) -> None:
        """Let the first touch of a page of bytes ``begin`` to ``end`` bring that page alone, not MiBs behind it.

        For places where there is nothing to read yet, or where reads do not follow each other.
        """
        ...

    def unmap(self, file: File, begin: int, end: int) -> None:
        """Unmap the whole pages among bytes ``begin`` to ``end`` until they are next asked for; nothing is lost.

        Worth it before a flush of many: the kernel makes mapped pages read-only one by one, and interrupts all other
        threads for each.
        """
        ...

    def flush(self, file: File) -> None:
        """Return when all that was written to the file has reached the device."""
        ...

    def flush_folder(self, path: str) -> None:
        """Return when names made, renamed and deleted in the folder have reached the device."""
        ...

    def list(self, path: str) -> list[FolderEntry]:
        """The names in a folder, sorted; empty when there is no such folder.

        Links are followed; `CorruptionError` for one that leads nowhere.
        """
        ...

    def size(self, path: str) -> int | None:
        """The length of a file, None when there is none."""
        ...

    def is_folder(self, path: str) -> bool:
        """Return whether there is a folder of that name."""
        ...

    def make_folder(self, path: str) -> None:
        """Make a folder and its parents; one that exists is fine."""
        ...

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with all that is in it; one that is gone is fine."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Rename a file or folder within the store, replacing a file."""
        ...

    def link(self, old: str, new: str) -> None:
        """Give a file a second name, under which it is the same bytes; `StoreIOError` where that can't be done."""
        ...

    def own(self, path: str) -> bool:
        """Before a file is changed in place: let it share its bytes with no other name.

        One that was linked is replaced by a copy, and the answer is true: what was mapped before is the other's now.
        """
        ...

    def read(self, path: str, limit: int = 64 << 20) -> bytes:
        """The whole of a small file; `CorruptionError` if it is longer than ``limit``."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Replace the whole of a small file, durably and at once: a crash leaves the old or the new."""
        ...

    def lock(self, path: str) -> FileLock:
        """Take the lock of a store, ``path`` its lock file; `StoreLockedError` names the holder."""
        ...

    def lock_holder(self, path: str) -> str | None:
        """Return what holds the lock, None where nothing does; changes nothing."""
        ...

    def flush_all(self, path: str) -> bool:
        """Flush the whole file system of ``path``; false where success can't be known."""
        ...

    def data_end(self, file: File, begin: int) -> int:
        """Return a position from ``begin`` on behind which all bytes are zero, as far as that is known without a look.

        The file's size where nothing is known.
        """
        ...

    def copy_times(self, source: str, target: str) -> None:
        """Give a file the modification time of another, where files have such times."""
        ...

    def used_ratio(self, path: str) -> float:
        """How much of the disk that ``path`` is on is in use, 0.0 to 1.0; 0.0 where there is no disk behind it."""
        ...


def fills_by_itself(files: Files) -> bool:
    """Return whether others fill the disk under these files; files say so by an attribute of this name.

    Where time is moved by hand, nothing depends on how full such a disk is.
    """
    return getattr(files, "fills_by_itself", False)


@contextmanager
def named(call: str, path: str) -> Iterator[None]:
    """Give errors of the operating system their address."""
    try:
        yield
    except StoreIOError:
        raise
    except OSError as error:
        raise StoreIOError(call, path, error) from error


def used_end(files: Files, file: File, begin: int, end: int) -> int:
    """Return the position behind the last byte from ``begin`` to ``end`` that is not zero; ``begin`` if all are.

    What the file system never stored is not read.
    """
    high = min(end, files.data_end(file, begin)) if end - begin > _ZEROS_SIZE else end
    while high > begin:
        at = max(begin, high - _ZEROS_SIZE)
        data = file.buffer[at:high]
        if data != (_ZEROS if len(data) == _ZEROS_SIZE else bytes(len(data))):
            return at + len(data.rstrip(b"\0"))
        high = at
    return begin


def copy_file(
    files: Files, source: File, target: str, *, begin: int = 0, end: int | None = None, size: int | None = None
) -> None:
    """Make the file ``target`` of bytes ``begin`` to ``end`` of another, zeros behind them up to ``size``; flushed.

    What is zero gets no blocks. `StoreIOError` for want of space, among others; ``target`` may be there in part then.
    """
    end = source.size if end is None else end
    file = files.create(target, end - begin if size is None else size)
    for at in range(begin, end, _CHUNK):
        data = source.buffer[at : min(at + _CHUNK, end)]
        if data.count(0) != len(data):
            place = at - begin
            files.reserve(file, place, place + len(data))
            file.buffer[place : place + len(data)] = data
    files.flush(file)


def folders_to_name(files: Files, folder: str) -> list[str]:
    """The folders that are to be flushed when ``folder`` and its parents have been made; call it before.

    Those that are not there have no name on the device either, until the one above them is flushed. The innermost
    first; empty if the folder is there.
    """
    above = []
    while not files.is_folder(folder):
        parent = os.path.dirname(folder) or os.curdir
        if parent == folder:
            break
        above.append(parent)
        folder = parent
    return above


def make_folders(files: Files, folder: str) -> None:
    """Make a folder and its parents, and return when their names are on the device.

    The folder's own is brought there in any case, unless what it lies in may not be read. Where that fails, what was
    made is gone again.
    """
    above = folders_to_name(files, folder)
    files.make_folder(folder)
    try:
        for other in above or [os.path.dirname(folder) or os.curdir]:
            files.flush_folder(other)
    except StoreIOError as error:
        if above:
            with suppress(StoreIOError):
                files.delete(folder)
        elif error.errno == errno.EACCES:
            return
        raise


def link_file(files: Files, path: str, target: str) -> bool:
    """Give a file a second name; false where that can't be done, but a copy may be."""
    try:
        files.link(path, target)
    except StoreIOError as error:
        if error.errno in _NO_LINKS:
            return False
        raise
    return True
