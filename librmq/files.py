"""The file seam: everything a store does to files goes through one `Files` object.

All writes to store files are slice assignments on a file's ``buffer`` (many numbers at once may go into a plain mapping
by numpy, but never past a subclass of it, which is to see each write); opening, creating, allocating, flushing,
listing, renaming and deleting are methods of `Files`. Production maps real files (`DiskFiles`); tests and ephemeral
stores use anonymous memory (`MemoryFiles`); wrappers that record or fail stand in `librmq.testing.files`.

Rules of use:

* Nobody closes a mapping. Whoever drops the last reference to a `File` (or to a view of its buffer) unmaps it, so that
  a reader who holds one never sees it vanish, whatever is deleted or rolled meanwhile.
* A store to a mapped page without a block behind it kills the process when the disk is full: `reserve` a range before
  writing to it.
* Errors of the operating system leave as `StoreIOError`, which names the call and the file.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import stat
import struct
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol

from librmq.errors import CorruptionError, StoreIOError, StoreLockedError

if sys.platform != "win32":
    import fcntl

__all__ = [
    "DiskFiles",
    "Entry",
    "File",
    "FileLock",
    "Files",
    "MemoryFiles",
    "TemporaryFolder",
    "copy_file",
    "folders_to_name",
    "link_file",
    "make_folders",
]

Buffer = mmap.mmap
_CHUNK: Final = 1 << 20
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
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __repr__(self) -> str:
        return f"<File {self.path} {self.size} bytes>"


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a folder; ``size`` is 0 for a folder."""

    name: str
    size: int
    is_folder: bool


class FileLock(Protocol):
    """A held lock of a store; ``release`` gives it back (once)."""

    def release(self) -> None: ...


class Files(Protocol):
    """What a store asks of a file system. Paths are plain strings; all methods are thread-safe."""

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
        """Make the pages of bytes ``begin`` to ``end`` ready for writing, where the system can: the first write to a
        page is slow. Call it off the path of those who must not wait."""
        ...

    def put(self, file: File, at: int, data: bytes | bytearray) -> None:
        """Write much data at once, behind which blocks are, and let it go on its way to the device; what the file's
        buffer shows follows. For some bytes an assignment to the buffer is quicker."""
        ...

    def no_read_ahead(self, file: File, begin: int, end: int) -> None:
        """Let the first touch of a page of bytes ``begin`` to ``end`` bring that page, not MiBs behind it: where there
        is nothing to read yet, or not in a row."""
        ...

    def unmap(self, file: File, begin: int, end: int) -> None:
        """Take the pages of bytes ``begin`` to ``end`` out of the process's sight, whole ones, until they are next
        asked for; nothing is lost. Worth it before a flush of many: the kernel makes each page that is mapped
        read-only by itself, and interrupts all other threads for it."""
        ...

    def flush(self, file: File) -> None:
        """Return when all that was written to the file has reached the device."""
        ...

    def flush_folder(self, path: str) -> None:
        """Return when names made, renamed and deleted in the folder have reached the device."""
        ...

    def list(self, path: str) -> list[Entry]:
        """The names in a folder, sorted; empty when there is no such folder.

        Links are followed; `CorruptionError` for one that leads nowhere.
        """
        ...

    def size(self, path: str) -> int | None:
        """The length of a file, None when there is none."""
        ...

    def is_folder(self, path: str) -> bool: ...

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
        """Who holds the lock, None for nobody; changes nothing."""
        ...

    def used_ratio(self, path: str) -> float:
        """How much of the disk that ``path`` is on is in use, 0.0 to 1.0; 0.0 where there is no disk behind it."""
        ...


@contextmanager
def _named(call: str, path: str) -> Iterator[None]:
    """Give errors of the operating system their address."""
    try:
        yield
    except StoreIOError:
        raise
    except OSError as error:
        raise StoreIOError(call, path, error) from error


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


# ------------------------------------------------------------------------------------------------------ real files

_LOCKED_BYTE: Final = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, len, pid

_MADV_RANDOM: Final = 1
_MADV_DONTNEED: Final = 4
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14

# The process's own locks by (device, inode): fcntl does not exclude one's own process, and closing any descriptor
# of the file would release the lock, so the file of a held lock is never opened again here.
_held: dict[tuple[int, int], str] = {}
_held_guard = threading.Lock()


@cache
def _advise() -> Callable[[Any, int, int, int], None]:
    """``advise(mapping, begin, size, advice)``: tell the kernel what is to become of a mapping's pages.

    Not by the mapping's own method, which stops all threads of the interpreter meanwhile. It is advice: a kernel that
    does not know it does nothing, and what follows is slower.
    """
    import ctypes  # whoever opens no store for writing does without

    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def advise(mapping: Any, begin: int, size: int, advice: int) -> None:
        first = ctypes.c_char.from_buffer(mapping)  # holds the mapping where it is
        call(ctypes.addressof(first) + begin, size, advice)

    return advise


class DiskFiles:
    """Real files, mapped. Thread-safe."""

    def open(self, path: str, *, writable: bool = False, keep_descriptor: bool = False) -> File:
        with _named("open", path):
            descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | getattr(os, "O_BINARY", 0))
        return self._map(path, descriptor, writable, keep_descriptor)

    def create(self, path: str, size: int, *, keep_descriptor: bool = False) -> File:
        with _named("create", path):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            descriptor = os.open(path, flags, 0o644)
        try:
            try:
                with _named("set the length of", path):
                    os.ftruncate(descriptor, size)
            except BaseException:
                os.close(descriptor)
                raise
            return self._map(path, descriptor, True, keep_descriptor)
        except BaseException:
            os.unlink(path)
            raise

    def _map(self, path: str, descriptor: int, writable: bool, keep_descriptor: bool) -> File:
        try:
            with _named("map", path):
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise CorruptionError(path, 0, "name", "expected a regular file")
                if status.st_size == 0:
                    raise CorruptionError(path, 0, "size", "the file is empty")
                access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
                buffer = mmap.mmap(descriptor, status.st_size, access=access)
        except BaseException:
            os.close(descriptor)
            raise
        if keep_descriptor:
            return File(path, buffer, status.st_size, writable, descriptor)
        os.close(descriptor)  # the mapping has a duplicate of its own
        return File(path, buffer, status.st_size, writable)

    def reserve(self, file: File, begin: int, end: int) -> None:
        if not hasattr(os, "posix_fallocate"):  # macOS and Windows: pages are found at the write
            return
        # Whole pages: the first write to one wants blocks behind all of it, however small blocks are.
        begin -= begin % mmap.PAGESIZE
        end += -end % mmap.PAGESIZE
        with self._descriptor(file, "allocate") as descriptor:
            os.posix_fallocate(descriptor, begin, min(end, file.size) - begin)

    def touch(self, file: File, begin: int, end: int) -> None:
        self._advise(file, begin - begin % mmap.PAGESIZE, end, _MADV_POPULATE_WRITE)

    def no_read_ahead(self, file: File, begin: int, end: int) -> None:
        self._advise(file, begin + -begin % mmap.PAGESIZE, end, _MADV_RANDOM)

    def unmap(self, file: File, begin: int, end: int) -> None:
        self._advise(file, begin + -begin % mmap.PAGESIZE, end - end % mmap.PAGESIZE, _MADV_DONTNEED)

    @staticmethod
    def _advise(file: File, begin: int, end: int, advice: int) -> None:
        if sys.platform == "linux" and end > begin and file.writable:
            _advise()(file.buffer, begin, end - begin, advice)

    def put(self, file: File, at: int, data: bytes | bytearray) -> None:
        if not sys.platform.startswith("linux"):  # elsewhere a mapping need not show what is written
            file.buffer[at : at + len(data)] = data
            return
        with self._descriptor(file, "write") as descriptor:
            if not 0 <= at <= file.size - len(data):
                raise ValueError(f"{file.path}: {len(data)} bytes at {at} do not fit {file.size}")
            # Through the mapping pages would be made one by one, small ones, each zeroed before it is written.
            done, view = 0, memoryview(data)
            while done < len(data):
                done += os.pwrite(descriptor, view[done:], at + done)
            # Linux begins to write out what is said not to be needed; what is not out yet it keeps.
            os.posix_fadvise(descriptor, at, len(data), os.POSIX_FADV_DONTNEED)

    def flush(self, file: File) -> None:
        with self._descriptor(file, "flush") as descriptor:
            if sys.platform != "linux" and file.writable:  # elsewhere a file need not know what its mapping shows
                file.buffer.flush()
            (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(descriptor)

    @contextmanager
    def _descriptor(self, file: File, call: str) -> Iterator[int]:
        with _named(call, file.path):
            if file.descriptor >= 0:
                yield file.descriptor
                return
            descriptor = os.open(file.path, os.O_RDWR | getattr(os, "O_BINARY", 0))
            try:
                yield descriptor
            finally:
                os.close(descriptor)

    def flush_folder(self, path: str) -> None:
        if sys.platform == "win32":
            return
        with _named("flush the folder", path):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def list(self, path: str) -> list[Entry]:
        entries = []
        with _named("list", path):
            try:
                found = os.scandir(path)
            except FileNotFoundError:
                return []
            with found:
                for one in found:
                    try:
                        folder = one.is_dir()
                        size = 0 if folder else one.stat().st_size
                    except OSError as error:
                        if one.is_symlink():
                            raise CorruptionError(one.path, 0, "name", "a link that leads nowhere") from error
                        if isinstance(error, FileNotFoundError):
                            continue  # deleted meanwhile
                        raise
                    entries.append(Entry(one.name, size, folder))
        entries.sort(key=lambda entry: entry.name)
        return entries

    def size(self, path: str) -> int | None:
        with _named("look at", path):
            try:
                return os.stat(path).st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def make_folder(self, path: str) -> None:
        with _named("make the folder", path):
            os.makedirs(path, exist_ok=True)

    def delete(self, path: str) -> None:
        with _named("delete", path):
            try:
                os.unlink(path)
            except FileNotFoundError:
                return
            except (IsADirectoryError, PermissionError):
                if not os.path.isdir(path):
                    raise
                shutil.rmtree(path)

    def rename(self, old: str, new: str) -> None:
        with _named("rename", old):
            os.replace(old, new)

    def link(self, old: str, new: str) -> None:
        with _named("link", old):
            os.link(old, new)

    def own(self, path: str) -> bool:
        with _named("look at", path):
            if os.stat(path).st_nlink == 1:
                return False
            path = os.path.realpath(path)
        folder = os.path.dirname(path)
        beside = os.path.join(os.path.dirname(folder), os.path.basename(path) + ".tmp")  # in a folder of other names
        try:
            with _named("copy", path):
                shutil.copyfile(path, beside)
                with open(beside, "rb+") as file:
                    os.fsync(file.fileno())
                os.replace(beside, path)
        except StoreIOError:
            with suppress(OSError):
                os.unlink(beside)
            raise
        self.flush_folder(folder)
        return True

    def read(self, path: str, limit: int = 64 << 20) -> bytes:
        with _named("read", path), open(path, "rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise CorruptionError(path, limit, "size", f"expected at most {limit} bytes")
        return data

    def write(self, path: str, data: bytes) -> None:
        beside = path + ".tmp"
        try:
            with _named("write", path):
                with open(beside, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(beside, path)
        except StoreIOError:
            with suppress(OSError):
                os.unlink(beside)
            raise
        self.flush_folder(os.path.dirname(path))

    def lock(self, path: str) -> FileLock:
        return _DiskLock(path)

    def lock_holder(self, path: str) -> str | None:
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreIOError("look at the lock", path, error) from error
        with _held_guard:
            if (status.st_dev, status.st_ino) in _held:
                return f"this process (pid {os.getpid()})"
            if sys.platform == "win32":
                return None
            with _named("look at the lock", path):
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # it may be anything, a pipe too
                try:
                    return _conflict(descriptor)
                finally:
                    os.close(descriptor)

    def used_ratio(self, path: str) -> float:
        with _named("look at the disk of", path):
            usage = shutil.disk_usage(path)
        # As df counts: what only the superuser may fill counts neither as used nor as free.
        within_reach = usage.used + usage.free
        return usage.used / within_reach if within_reach else 0.0


def _conflict(descriptor: int) -> str | None:
    """Who would be in the way of locking the first byte."""
    asked = _LOCKED_BYTE.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    kind, _, _, _, pid = _LOCKED_BYTE.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else f"process {pid}"


class _DiskLock:
    """The first byte of the lock file, locked as the broker's JVM does (``FileChannel.tryLock(0, 1, false)``)."""

    def __init__(self, path: str) -> None:
        with _held_guard, _named("lock", path):
            if os.path.exists(path):
                status = os.stat(path)
                if (status.st_dev, status.st_ino) in _held:
                    raise StoreLockedError(f"{path}: locked by this process (pid {os.getpid()})")
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if sys.platform != "win32":
                    try:
                        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0, os.SEEK_SET)
                    except OSError as error:
                        if error.errno not in (errno.EACCES, errno.EAGAIN):
                            raise
                        holder = _conflict(descriptor) or "another process"
                        raise StoreLockedError(f"{path}: locked by {holder}") from None
                os.pwrite(descriptor, b"lock", 0)
                status = os.fstat(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            self._key = (status.st_dev, status.st_ino)
            self._descriptor = descriptor
            _held[self._key] = path

    def release(self) -> None:
        with _held_guard:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
                _held.pop(self._key, None)


def _after_fork() -> None:
    global _held_guard
    _held.clear()  # locks of fcntl are not inherited: the child holds none of its parent's
    _held_guard = threading.Lock()  # some thread of the parent may hold it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class TemporaryFolder:
    """A folder of its own, deleted by `delete` or at the end of the process that made it, but by no child of a fork."""

    def __init__(self) -> None:
        self.name = tempfile.mkdtemp(prefix="librmq-")
        self.delete = weakref.finalize(self, _delete_folder, self.name, os.getpid())


def _delete_folder(path: str, process: int) -> None:
    if os.getpid() == process and os.path.isdir(path):
        shutil.rmtree(path)


# ------------------------------------------------------------------------------------------------------- in memory


class MemoryFiles:
    """Files in anonymous memory, for tests and ephemeral stores; gone with the object. Thread-safe."""

    def __init__(self) -> None:
        self._files: dict[str, File | bytes] = {}
        self._folders: set[str] = {"", os.sep}
        self._locks: set[str] = set()
        self._guard = threading.RLock()
        self.disk_used_ratio = 0.0
        """What `used_ratio` answers, to be set by tests; 0.0: no disk."""

    def open(self, path: str, *, writable: bool = False, keep_descriptor: bool = False) -> File:
        with self._guard:
            found = self._files.get(path)
            if found is None:
                raise _missing("open", path)
            if isinstance(found, bytes):
                if not found:
                    raise CorruptionError(path, 0, "size", "the file is empty")
                buffer = self._new_buffer(path, len(found))
                buffer[:] = found
                found = self._files[path] = File(path, buffer, len(found), True)
            return found if writable else File(path, found.buffer, found.size, False)

    def create(self, path: str, size: int, *, keep_descriptor: bool = False) -> File:
        with self._guard:
            if path in self._files:
                raise StoreIOError("create", path, FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)))
            self._check_parent("create", path)
            file = self._files[path] = File(path, self._new_buffer(path, size), size, True)
            return file

    def reserve(self, file: File, begin: int, end: int) -> None:
        pass

    def touch(self, file: File, begin: int, end: int) -> None:
        pass

    def put(self, file: File, at: int, data: bytes | bytearray) -> None:
        file.buffer[at : at + len(data)] = data

    def no_read_ahead(self, file: File, begin: int, end: int) -> None:
        pass

    def unmap(self, file: File, begin: int, end: int) -> None:
        pass

    def flush(self, file: File) -> None:
        pass

    def flush_folder(self, path: str) -> None:
        pass

    def list(self, path: str) -> list[Entry]:
        prefix = path.rstrip(os.sep) + os.sep
        with self._guard:
            names = {p[len(prefix) :]: self._length(f) for p, f in self._files.items() if p.startswith(prefix)}
            folders = {p[len(prefix) :] for p in self._folders if p.startswith(prefix) and len(p) > len(prefix)}
        entries = [Entry(name, size, False) for name, size in names.items() if os.sep not in name]
        entries += [Entry(name, 0, True) for name in folders if os.sep not in name]
        return sorted(entries, key=lambda entry: entry.name)

    def size(self, path: str) -> int | None:
        with self._guard:
            file = self._files.get(path)
            return None if file is None else self._length(file)

    def is_folder(self, path: str) -> bool:
        return path in self._folders

    def make_folder(self, path: str) -> None:
        with self._guard:
            while path not in self._folders:
                self._folders.add(path)
                path = os.path.dirname(path)

    def delete(self, path: str) -> None:
        with self._guard:
            below = path + os.sep
            self._files = {p: f for p, f in self._files.items() if p != path and not p.startswith(below)}
            self._folders = {p for p in self._folders if p != path and not p.startswith(below)}

    def rename(self, old: str, new: str) -> None:
        with self._guard:
            if old not in self._files and old not in self._folders:
                raise _missing("rename", old)
            self._check_parent("rename", new)

            def moved(path: str) -> str:
                return new + path[len(old) :] if path == old or path.startswith(old + os.sep) else path

            self._files = {moved(p): f for p, f in self._files.items() if p != new}
            self._folders = {moved(p) for p in self._folders}
            for path, file in self._files.items():
                if isinstance(file, File):
                    file.path = path

    def link(self, old: str, new: str) -> None:
        with self._guard:
            if self.size(new) is not None:
                raise StoreIOError("link", new, FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)))
            self._check_parent("link", new)
            file = self.open(old, writable=True)
            self._files[new] = File(new, file.buffer, file.size, True)

    def own(self, path: str) -> bool:
        with self._guard:
            file = self._files.get(path)
            others = (other for name, other in self._files.items() if name != path)
            if not isinstance(file, File) or all(
                isinstance(other, bytes) or other.buffer is not file.buffer for other in others
            ):
                return False
            buffer = self._new_buffer(path, file.size)
            buffer[:] = file.buffer[:]
            self._files[path] = File(path, buffer, file.size, True)
            return True

    def read(self, path: str, limit: int = 64 << 20) -> bytes:
        with self._guard:
            file = self._files.get(path)
            if file is None:
                raise _missing("read", path)
            if self._length(file) > limit:
                raise CorruptionError(path, limit, "size", f"expected at most {limit} bytes")
            return file if isinstance(file, bytes) else file.buffer[:]

    def write(self, path: str, data: bytes) -> None:
        with self._guard:
            self._check_parent("write", path)
            self._files[path] = data

    def lock(self, path: str) -> FileLock:
        with self._guard:
            if path in self._locks:
                raise StoreLockedError(f"{path}: locked by this process (pid {os.getpid()})")
            self._locks.add(path)
            self._files[path] = b"lock"
        return _MemoryLock(self._locks, path)

    def lock_holder(self, path: str) -> str | None:
        return f"this process (pid {os.getpid()})" if path in self._locks else None

    def used_ratio(self, path: str) -> float:
        return self.disk_used_ratio

    def _new_buffer(self, path: str, size: int) -> Buffer:
        if sys.platform == "win32":
            return mmap.mmap(-1, size)
        # Private: half the cost of a shared one, and no child of a fork is to write to its parent's.
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    @staticmethod
    def _length(file: File | bytes) -> int:
        return len(file) if isinstance(file, bytes) else file.size

    def _check_parent(self, call: str, path: str) -> None:
        if not self.is_folder(os.path.dirname(path)):
            raise _missing(call, path)


class _MemoryLock:
    def __init__(self, locks: set[str], path: str) -> None:
        self._locks = locks
        self._path = path

    def release(self) -> None:
        self._locks.discard(self._path)


def _missing(call: str, path: str) -> StoreIOError:
    return StoreIOError(call, path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
