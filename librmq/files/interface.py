"""The file seam: a store accesses files only through one `Files` object.

Writes to store files are slice assignments on a file's ``buffer``, apart from those of `Files.overwrite`. numpy can
write many numbers at once into a plain mapping, but not into a subclass, which must see each write. Opening, creating,
allocating, flushing, listing, renaming and deleting are methods of `Files`. Production maps real files (`DiskFiles`),
tests and ephemeral stores use anonymous memory (`MemoryFiles`), and the tests of librmq wrap either in files that
record or fail.

Rules of use:

* A mapping is never closed. It ends with the last reference to its `File` or to a view of its buffer, so a reader can
  keep using it after the file was deleted or rolled.
* On a full disk, writing to a mapped page without a block kills the process: `reserve` a range before writing to it.
* Errors of the operating system leave as `StoreIOError`, which names the call and the file.
"""

from __future__ import annotations

import enum
import errno
import mmap
import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple, Protocol, Self

from librmq.errors import CorruptionError, StoreIOError
from librmq.files.regular import with_owner
from librmq.override import override

Buffer = mmap.mmap
"""The bytes of an open file: a mapping, or what a file system of tests gives in its place."""
LARGEST_WHOLE: Final = 64 << 20
"""Most bytes of a file that `Files.read` returns as a whole."""
_CHUNK: Final = 1 << 20
_ZEROS_SIZE: Final = 1 << 16
_FEW: Final = 64
_ZEROS: Final = bytes(_ZEROS_SIZE)
# A file system refuses a link because it has none, the names are on two file systems, or there are too many.
_NO_LINKS: Final = {errno.EXDEV, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EPERM, errno.EACCES}


class Advice(enum.Enum):
    """What comes to pages of a file."""

    WRITES = "writes"
    """They are written soon. The first write to a page is slow, so give this advice while no producer waits. From 1 MiB
    on the kernel fills MiBs at a time: that is faster in all, but takes a core for some ms."""
    RANDOM_READS = "random reads"
    """Touching one loads only that one, not those after it. Use it for places without data or with random reads."""
    NO_USE = "no use"
    """Unmap the whole pages among them until their next use. Use it before a flush of many pages, because the kernel
    makes mapped pages read-only one by one and interrupts all other threads for each."""


class _Descriptor:
    """An open descriptor, closed with its last reference."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        if hasattr(self, "number"):  # a signal in __init__ leaves it unset
            os.close(self.number)


class File:
    """A file of the store and its contents as a buffer.

    ``buffer`` supports slices, slice assignment of equal length, and the buffer protocol (``struct.unpack_from``,
    ``numpy.frombuffer``). ``descriptor`` is kept open for files whose flush is a promise, else -1.

    Only a kept descriptor has a finalizer, because Python drops an exception that a signal raises in one.
    """

    __slots__ = ("__weakref__", "_kept", "buffer", "descriptor", "path", "size", "writable")

    def __init__(self, path: str, buffer: Buffer, size: int, writable: bool, descriptor: int = -1) -> None:
        self.path: str = path
        self.buffer: Buffer = buffer
        self.size: int = size
        self.writable: bool = writable
        self._kept = _Descriptor(descriptor) if descriptor >= 0 else None
        self.descriptor: int = descriptor

    def advise(self, begin: int, end: int, advice: Advice) -> None:
        """Prepare the pages of bytes ``begin`` to ``end`` for what comes, if the system can; no data change."""

    def data_end(self, begin: int = 0) -> int:
        """Return a position from ``begin`` on after which all bytes are zero, without reading the file.

        It is the file's size if nothing is known.
        """
        return self.size

    def used_end(self, begin: int, end: int) -> int:
        """Return the position after the last byte from ``begin`` to ``end`` that is not zero, ``begin`` without one.

        Holes of the file are not read.
        """
        high = min(end, self.data_end(begin))
        while high > begin:
            at = max(begin, high - _ZEROS_SIZE)
            data = self.buffer[at:high]
            if data != (_ZEROS if len(data) == _ZEROS_SIZE else bytes(len(data))):
                return at + len(without_zeros(data))
            high = at
        return begin

    @override
    def __repr__(self) -> str:
        return f"<File {self.path} {self.size} bytes>"


class FolderEntry(NamedTuple):
    """A name in a folder."""

    name: str
    """Name within the folder."""
    size: int
    """Size in bytes, 0 for a folder."""
    is_folder: bool
    is_file: bool = True
    """Whether it is a regular file, or a link to one, and no pipe, socket or device."""


class FileStatus(NamedTuple):
    """What a file system knows of a file or a folder."""

    size: int
    """Size in bytes; that of a folder says nothing."""
    is_folder: bool
    links: int
    """Number of hard links of a file."""
    is_untouched: bool
    """For a lock file: whether no program has written into it since its holder marked it, and it is no copy."""


class FileLock(Protocol):
    """A held lock of a store."""

    def hold_folder(self) -> None:
        """Lock the folder of the lock file too, which can't be deleted apart from its content, as the file can.

        Raises:
            StoreLockedError: The holder of a deleted lock file has it.
        """
        ...

    def mark_untouched(self) -> None:
        """Mark the lock file, by its time, until a program writes into it, as a broker does that starts."""
        ...

    def check(self) -> None:
        """Check that the lock still keeps other writers out.

        Raises:
            StoreIOError: Its file was deleted or replaced.
        """
        ...

    def release(self) -> None:
        """Release the lock; a repetition does nothing."""
        ...


class Files(Protocol):
    """Operations of a file system that a store needs. Paths are plain strings; all methods are thread-safe."""

    @property
    def is_shared(self) -> bool:
        """Whether other processes can see and change these files."""
        ...

    @property
    def is_temporary(self) -> bool:
        """Whether these files are deleted again, so that no call waits for the device."""
        ...

    def open(self, path: str, *, writable: bool = False, keep_descriptor: bool = False) -> File:
        """Map an existing file.

        Raises:
            CorruptionError: It is empty or not a regular file.
        """
        ...

    def create(self, path: str, size: int, *, keep_descriptor: bool = False) -> File:
        """Create a file of ``size`` zero bytes, which must not exist, and map it for writing."""
        ...

    def make_files(
        self, folder: str, contents: Iterable[tuple[str, bytes | bytearray]], size: int, *, times_of: str | None = None
    ) -> None:
        """Create files of ``size`` bytes, each in a new folder of its own below ``folder``, without a mapping.

        ``contents`` has their paths in ``folder`` and their first bytes. It costs a fraction of `create`. They get the
        modification times of the files of the same paths in the folder ``times_of``, where these are still there.
        """
        ...

    def reserve(self, file: File, begin: int, end: int) -> None:
        """Allocate blocks for bytes ``begin`` to ``end``, so that writing there cannot fail."""
        ...

    def flush(self, file: File, begin: int = 0, end: int | None = None) -> None:
        """Flush the file to the device, at least bytes ``begin`` to ``end``."""
        ...

    def flush_folder(self, path: str) -> None:
        """Flush the creations, renames and deletions in the folder to the device."""
        ...

    def list(self, path: str) -> list[FolderEntry]:
        """Return the names in a folder, sorted; empty if there is no such folder.

        Links are followed.

        Raises:
            CorruptionError: A link leads nowhere.
        """
        ...

    def names(self, path: str) -> tuple[str, ...]:
        """Return the names in a folder, sorted, without a look at what has them; empty if there is no such folder."""
        ...

    def status(self, path: str) -> FileStatus | None:
        """Return what is known of a file or a folder, None if there is none. Links are followed."""
        ...

    def make_folder(self, path: str) -> None:
        """Create a folder and its parents, unless they exist."""
        ...

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with its content, if it exists."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Rename a file or folder within the store, replacing a file."""
        ...

    def link(self, old: str, new: str) -> None:
        """Create a hard link.

        Raises:
            StoreIOError: The file system refuses.
        """
        ...

    def read(self, path: str, at: int = 0, size: int | None = None) -> bytes:
        """Return up to ``size`` bytes of a file from ``at`` on, by default all of a small one, and keep no mapping.

        Raises:
            CorruptionError: ``size`` is None, and the file is longer than 64 MiB.
        """
        ...

    def read_used(self, path: str, limit: int, size: int | None = None, *, is_whole: bool = True) -> bytes | None:
        """Return a file's content without the zeros at its end, without a mapping, which is faster if it is small.

        None if it is longer than ``limit``, if the file has another ``size``, or if only a mapping shows its content.
        Unless ``is_whole``, the content is that of the first ``limit`` bytes, and costs no look for the last ones.
        """
        ...

    def overwrite(self, place: File | str, at: int, data: bytes | bytearray) -> None:
        """Write bytes into existing blocks of a file, and keep no mapping of one that is named; mappings show them.

        Of an open file much data is written, and starts its way to the device. For a few bytes an assignment to the
        buffer is faster.
        """
        ...

    def write(self, path: str, data: bytes | Iterable[bytes]) -> None:
        """Replace the content of a file durably and atomically: a crash leaves the old or the new.

        A large file is given by its parts.
        """
        ...

    def lock(self, path: str) -> FileLock:
        """Take the lock of a store with the lock file ``path``.

        Raises:
            StoreLockedError: Another writer has it; the error names the holder.
        """
        ...

    def lock_holder(self, path: str) -> str | None:
        """Return the holder of the lock, or None, without changing anything."""
        ...

    def used_ratio(self, path: str) -> float:
        """Return the used fraction of the disk of ``path``, 0.0 to 1.0; 0.0 without a disk."""
        ...


def file_size(files: Files, path: str) -> int | None:
    """Return the length of a file, None if there is none."""
    status = files.status(path)
    return None if status is None else status.size


def is_folder(files: Files, path: str) -> bool:
    """Return whether there is a folder with that name, as far as this user may look."""
    try:
        status = files.status(path)
    except (StoreIOError, ValueError):  # no file system has a name with a NUL or half a surrogate pair
        return False
    return status is not None and status.is_folder


def is_linked(files: Files, path: str) -> bool:
    """Return whether a file has another hard link, as files of the log have that are part of a snapshot too."""
    status = files.status(path)
    return status is not None and status.links > 1


def read_sole_file(files: Files, folder: str, size: int, limit: int) -> tuple[str, bytes] | None:
    """Return name and content, as of `Files.read_used`, of a folder's only file, with fewer calls than `list` needs.

    None if there are others, if it is not a regular file of this size, or if `Files.read_used` could not read it.
    """
    with suppress(StoreIOError, CorruptionError):  # the usual calls raise it with its reason
        names = files.names(folder)
        if len(names) == 1 and (used := files.read_used(os.path.join(folder, names[0]), limit, size)) is not None:
            return names[0], used
    return None


def fixed_path(path: str | os.PathLike[str], files: Files) -> str:
    """Return a path that leads to the same place of a disk after the process has changed its working directory."""
    text = os.fspath(path)
    with SystemCall("find the working directory of", text):
        return os.path.abspath(text) if files.is_shared else text


def identity_of(files: Files, path: str) -> str | None:
    """Return a text that neither a copy of a folder has, nor the folder itself after a restart of the machine.

    Only files of a disk that are changed there have it, by a method ``identity``. While it is the same, every byte that
    a killed process wrote is there.
    """
    identity: Callable[[str], str | None] = getattr(files, "identity", lambda _: None)
    return identity(path)


def flush_all(files: Files, *paths: str) -> bool:
    """Flush the whole file systems of ``paths``, and return False if success is unknown, or if there is none.

    Name each folder that can be on a disk of its own; each disk is flushed once.
    """
    if files.is_temporary:
        return True
    call = _syncfs() if files.is_shared else None
    if call is None:
        return False
    try:
        disks = {_disk_of(path): path for path in paths}
    except OSError:
        return False
    for path in disks.values():
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            return False
        try:
            if call(descriptor) != 0:
                return False
        finally:
            os.close(descriptor)
    return True


def _disk_of(path: str) -> int:
    return os.stat(path).st_dev


@cache
def _syncfs() -> Callable[[int], int] | None:
    """Return Linux's call that flushes a file system, if it reports failures: since Linux 5.8."""
    if sys.platform != "linux":
        return None
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if release is None or (int(release[1]), int(release[2])) < (5, 8):
        return None
    import ctypes  # slow to import, rarely needed

    call: Callable[[int], int] | None = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    return call


def break_links(files: Files, path: str) -> bool:
    """Break hard links before an in-place write; return True if the file was copied.

    A linked file is replaced by a copy, with blocks for all of it. Earlier mappings then show the other name's file.
    """
    if not is_linked(files, path):
        return False
    size = files.open(path, writable=True).size  # refuses a symbolic link, which would lead to another folder's file
    files.write(path, (files.read(path, at, _CHUNK) for at in range(0, size, _CHUNK)))
    return True


def confine(files: Files, store: str, own: str, *folders: str) -> None:
    """Let no write below the folder ``store`` follow a link to a folder, from now on; ``store`` itself may be a link.

    Files of a disk whose maker allows links follow them, except below ``own``, the name of a folder in the store. Only
    files of a disk have links, and a method ``confine``.

    Raises:
        CorruptionError: ``own`` or one of ``folders`` in the store is a link or has one below it, which would be
            refused only after other writes.
    """
    confined: Callable[..., None] = getattr(files, "confine", lambda *_: None)
    confined(store, own, *folders)


class SystemCall:
    """Raises errors of the operating system as `StoreIOError`, which names the call and the file.

    It is a class because a generator would cost each call some microseconds.
    """

    __slots__ = ("_call", "_path")

    def __init__(self, call: str, path: str) -> None:
        self._call = call
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, StoreIOError):
            raise StoreIOError(self._call, self._path, with_owner(self._path, error)) from error


def without_zeros(data: bytes) -> bytes:
    """Return bytes without the zeros at their end, ten times as fast as ``rstrip`` where those are many."""
    size = len(data)
    while size > _FEW and data.endswith(bytes(size // 2), 0, size):
        size -= size // 2
    return data[:size].rstrip(b"\0")


def numbered_files(files: Files, folder: str) -> list[FolderEntry]:
    """Return the files of a folder with numbers as names, in ascending order."""
    return [
        entry for entry in files.list(folder) if entry.name.isascii() and entry.name.isdigit() and not entry.is_folder
    ]


def copy_file(
    files: Files, source: File, target: str, *, begin: int = 0, end: int | None = None, size: int | None = None
) -> None:
    """Make the flushed file ``target`` of bytes ``begin`` to ``end`` of another file, with zeros up to ``size``.

    Zeros get no blocks.

    Raises:
        StoreIOError: For example, the disk is full; a part of ``target`` can be left.
    """
    end = source.size if end is None else end
    file = files.create(target, end - begin if size is None else size, keep_descriptor=True)
    end = min(end, source.data_end(begin))  # holes are not read: a mapping would fill them in memory
    for at in range(begin, end, _CHUNK):
        data = source.buffer[at : min(at + _CHUNK, end)]
        if data.count(0) != len(data):
            place = at - begin
            files.reserve(file, place, place + len(data))
            file.buffer[place : place + len(data)] = data
    files.flush(file)


def folders_to_name(files: Files, folder: str) -> list[str]:
    """Return the folders to flush after making ``folder`` and its parents, the innermost first. Call it before.

    A new folder has a name on the device only after a flush of its parent. The list is empty if the folder exists.
    """
    above = []
    while not is_folder(files, folder):
        parent = os.path.dirname(folder) or os.curdir
        if parent == folder:
            break
        above.append(parent)
        folder = parent
    return above


def make_folders(files: Files, folder: str) -> None:
    """Make a folder and its parents, and return when their names are on the device.

    The name of the folder itself is flushed in any case, unless its parent can't be read. If that fails, the new
    folders are removed again.
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


def read_replaced(files: Files, path: str, limit: int = LARGEST_WHOLE) -> bytes:
    """Return the bytes of a file that another process may replace or delete; none if it is missing or empty.

    A broker of RocketMQ deletes a table before it renames the new one, so the file can be gone after a look at it.

    Raises:
        CorruptionError: It is longer than ``limit``.
    """
    try:
        data = files.read(path, 0, limit + 1) if file_size(files, path) else b""
    except StoreIOError as error:
        if error.errno != errno.ENOENT:
            raise
        return b""
    if len(data) > limit:
        raise CorruptionError(path, limit, "size", f"expected at most {limit} bytes")
    return data


def is_full(error: StoreIOError) -> bool:
    """Return whether a call failed because a disk is full, or the quota of its user is used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def link_file(files: Files, path: str, target: str) -> bool:
    """Give a file a second name; return False if links are impossible but a copy may work."""
    try:
        files.link(path, target)
    except StoreIOError as error:
        if error.errno in _NO_LINKS:
            return False
        raise
    return True


@dataclass(frozen=True, slots=True)
class Damage:
    """A defect of a store's file: `verify` finds it, recovery repairs it."""

    file: str
    """Path of the file."""
    offset: int
    """Place of the defect in bytes: physical for the log, within the file elsewhere."""
    kind: str
    """One word for programs, as in `CorruptionError`."""
    what: str
    """What is wrong, for people."""
    bytes: int = 0
    """Number of damaged bytes."""

    @classmethod
    def of(cls, error: CorruptionError, size: int = 0) -> Self:
        """Return what an error tells, with the number of damaged bytes."""
        return cls(error.file, error.offset, error.kind, error.what, size)
