"""Real files, mapped."""

from __future__ import annotations

import errno
import mmap
import os
import re
import shutil
import stat
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, BinaryIO, Final

from librmq.errors import CorruptionError, StoreIOError
from librmq.files.lock import DiskLock, lock_holder
from librmq.files.seam import File, FileLock, FolderEntry, named

__all__ = ["DiskFiles", "TemporaryFolder"]

_BINARY: Final = getattr(os, "O_BINARY", 0)
# No link is followed to a file that is written: it might lead out of the store.
_TO_WRITE: Final = os.O_RDWR | _BINARY | getattr(os, "O_NOFOLLOW", 0)
_MADV_RANDOM: Final = 1
_MADV_DONTNEED: Final = 4
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14


@cache
def _advise() -> Callable[[Any, int, int, int], None]:
    """Return ``advise(mapping, begin, size, advice)``, which advises the kernel about a mapping's pages.

    The mapping's own method would stop all threads of the interpreter meanwhile. A kernel that does not know the
    advice does nothing, and what follows is slower.
    """
    import ctypes  # only writers need it

    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def advise(mapping: Any, begin: int, size: int, advice: int) -> None:
        first = ctypes.c_char.from_buffer(mapping)  # holds the mapping where it is
        call(ctypes.addressof(first) + begin, size, advice)

    return advise


@cache
def _syncfs() -> Callable[[int], int] | None:
    """Return Linux's call that flushes a file system, where it reports failures: from 5.8 on."""
    if sys.platform != "linux":
        return None
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if release is None or (int(release[1]), int(release[2])) < (5, 8):
        return None
    import ctypes  # rarely needed

    call: Callable[[int], int] | None = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    return call


class DiskFiles:
    """Real files, mapped. Thread-safe."""

    is_shared = True
    fills_by_itself = True

    def open(self, path: str, *, writable: bool = False, keep_descriptor: bool = False) -> File:
        with named("open", path):
            try:
                descriptor = os.open(path, _TO_WRITE if writable else os.O_RDONLY | _BINARY)
            except OSError as error:
                if error.errno == errno.ELOOP and os.path.islink(path):
                    raise CorruptionError(path, 0, "name", "a symbolic link: expected a file of the store") from None
                raise
        return self._map(path, descriptor, writable, keep_descriptor)

    def create(self, path: str, size: int, *, keep_descriptor: bool = False) -> File:
        with named("create", path):
            descriptor = os.open(path, _TO_WRITE | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            try:
                with named("set the length of", path):
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
            with named("map", path):
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
        with named(call, file.path):
            if file.descriptor >= 0:
                yield file.descriptor
                return
            descriptor = os.open(file.path, _TO_WRITE)
            try:
                yield descriptor
            finally:
                os.close(descriptor)

    def flush_folder(self, path: str) -> None:
        if sys.platform == "win32":
            return
        with named("flush the folder", path):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def list(self, path: str) -> list[FolderEntry]:
        entries = []
        with named("list", path):
            try:
                found = os.scandir(path)
            except FileNotFoundError:
                return []
            with found:
                for one in found:
                    try:
                        status = one.stat()
                    except OSError as error:
                        if one.is_symlink():
                            raise CorruptionError(one.path, 0, "name", "a link that leads nowhere") from error
                        if isinstance(error, FileNotFoundError):
                            continue  # deleted meanwhile
                        raise
                    folder = stat.S_ISDIR(status.st_mode)
                    size = 0 if folder else status.st_size
                    entries.append(FolderEntry(one.name, size, folder, stat.S_ISREG(status.st_mode)))
        entries.sort()
        return entries

    def size(self, path: str) -> int | None:
        with named("look at", path):
            try:
                return os.stat(path).st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def make_folder(self, path: str) -> None:
        with named("make the folder", path):
            os.makedirs(path, exist_ok=True)

    def delete(self, path: str) -> None:
        with named("delete", path):
            try:
                os.unlink(path)
            except FileNotFoundError:
                return
            except (IsADirectoryError, PermissionError):
                if not os.path.isdir(path):
                    raise
                shutil.rmtree(path)

    def rename(self, old: str, new: str) -> None:
        with named("rename", old):
            os.replace(old, new)

    def link(self, old: str, new: str) -> None:
        with named("link", old):
            os.link(old, new)

    def own(self, path: str) -> bool:
        with named("look at", path):
            if os.stat(path).st_nlink == 1:
                return False
            path = os.path.realpath(path)
        folder = os.path.dirname(path)
        beside = os.path.join(os.path.dirname(folder), os.path.basename(path) + ".tmp")  # in a folder of other names
        try:
            with named("copy", path):
                with open(path, "rb") as source, _new_file(beside) as file:
                    shutil.copyfileobj(source, file, 1 << 20)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(beside, path)
        except StoreIOError:
            with suppress(OSError):
                os.unlink(beside)
            raise
        self.flush_folder(folder)
        return True

    def read(self, path: str, limit: int = 64 << 20) -> bytes:
        with named("read", path):
            if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe would wait for its writer
                raise CorruptionError(path, 0, "name", "expected a regular file")
            with open(path, "rb") as file:
                data = file.read(limit + 1)
        if len(data) > limit:
            raise CorruptionError(path, limit, "size", f"expected at most {limit} bytes")
        return data

    def write(self, path: str, data: bytes) -> None:
        beside = path + ".tmp"
        try:
            with named("write", path):
                with _new_file(beside) as file:
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
        return DiskLock(path)

    def lock_holder(self, path: str) -> str | None:
        return lock_holder(path)

    def flush_all(self, path: str) -> bool:
        call = _syncfs()
        if call is None:
            return False
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            return False
        try:
            return bool(call(descriptor) == 0)
        finally:
            os.close(descriptor)

    def data_end(self, file: File, begin: int) -> int:
        seek_data, seek_hole = getattr(os, "SEEK_DATA", None), getattr(os, "SEEK_HOLE", None)
        if seek_data is None or seek_hole is None:
            return file.size
        descriptor, end = file.descriptor, begin
        try:
            if descriptor < 0:
                descriptor = os.open(file.path, os.O_RDONLY)
            while end < file.size:
                end = os.lseek(descriptor, os.lseek(descriptor, end, seek_data), seek_hole)
        except OSError as error:
            return end if error.errno == errno.ENXIO else file.size  # ENXIO: nothing but holes follow
        finally:
            if 0 <= descriptor != file.descriptor:
                os.close(descriptor)
        return end

    def copy_times(self, source: str, target: str) -> None:
        with named("set the times of", target):
            status = os.stat(source)
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))

    def used_ratio(self, path: str) -> float:
        with named("look at the disk of", path):
            usage = shutil.disk_usage(path)
        # As df counts: what only the superuser may fill counts neither as used nor as free.
        within_reach = usage.used + usage.free
        return usage.used / within_reach if within_reach else 0.0


def _new_file(path: str) -> BinaryIO:
    """Make an empty file in the place of a leftover, or of a link, of that name."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    return os.fdopen(os.open(path, _TO_WRITE | os.O_CREAT | os.O_EXCL, 0o644), "wb")


class TemporaryFolder:
    """A folder of its own, deleted by `delete` or at the end of the process that made it, but by no child of a fork."""

    def __init__(self) -> None:
        self.name = tempfile.mkdtemp(prefix="librmq-")
        self.delete = weakref.finalize(self, _delete_folder, self.name, os.getpid())


def _delete_folder(path: str, process: int) -> None:
    if os.getpid() == process and os.path.isdir(path):
        shutil.rmtree(path)
