"""Mapped files on disk."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import stat
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, BinaryIO, Final, NamedTuple

from librmq.errors import CorruptionError, StoreIOError
from librmq.files.interface import (
    LARGEST_WHOLE,
    Advice,
    File,
    FileLock,
    FileStatus,
    FolderEntry,
    SystemCall,
    file_size,
    without_zeros,
)
from librmq.files.lock import HAS_PEER_LOCKS, DiskLock, PeerLock, lock_holder
from librmq.files.regular import give_to_owner, joined_folders, make_owned_folder, open_regular, place_of
from librmq.override import override
from librmq.runtime.compiled_core import CORE
from librmq.runtime.event_log import EventLog

_log = EventLog("librmq.files")
_BINARY: Final = getattr(os, "O_BINARY", 0)
# Do not follow a link to a file to write: it could lead out of the store.
_TO_WRITE: Final = os.O_RDWR | _BINARY | getattr(os, "O_NOFOLLOW", 0)
_FOLDER: Final = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_ON_THE_WAY: Final = _FOLDER | getattr(os, "O_PATH", 0)
"""A folder that is opened only to name what is in it, which costs less."""
_HAS_PLACES: Final = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")
"""Whether files can be named within an open folder, whose path no other process can replace by a link."""
_SEEK_DATA: Final[int | None] = getattr(os, "SEEK_DATA", None)
_SEEK_HOLE: Final[int | None] = getattr(os, "SEEK_HOLE", None)
_NOT_RENAMED: Final = (errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors where a file can't be made in another folder and renamed."""
_NOT_NAMELESS: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EISDIR, errno.EINVAL, errno.ENOENT, *_NOT_RENAMED)
"""Errors where the file system has no files without a name, or the system does not let them get one."""
_GENERATION: Final = 0x80087601  # FS_IOC_GETVERSION, which ext4, XFS, Btrfs and others have, and tmpfs has not
_MADV_NORMAL: Final = 0
_MADV_RANDOM: Final = 1
_MADV_DONTNEED: Final = 4
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_MS_SYNC: Final = 4
_MUCH: Final = 1 << 20


def _generation(path: str) -> str:
    """Return what tells a folder from an older one that had its inode number; empty if the file system has nothing."""
    if sys.platform != "linux":
        return ""
    import fcntl

    descriptor = os.open(path, _FOLDER)
    try:
        answer: bytes = fcntl.ioctl(descriptor, _GENERATION, bytes(8))
        return f"/{answer.hex()}"
    except OSError:
        return ""
    finally:
        os.close(descriptor)


@cache
def _on_pages(name: str) -> Callable[[Any, int, int, int], None]:
    """Return a function of the system that takes a mapping, its first byte, a number of bytes, and an option.

    The method of the mapping would hold the interpreter's lock meanwhile.
    """
    import ctypes  # only writers need this slow import

    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def call(mapping: Any, begin: int, size: int, option: int) -> None:
        first = ctypes.c_char.from_buffer(mapping)  # keeps the mapping at its address
        if function(ctypes.addressof(first) + begin, size, option):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    return call


class _Place(NamedTuple):
    """A name, and the descriptor of the folder in which it counts; None for the current one."""

    name: str
    folder: int | None


class DiskFile(File):
    """A mapped file on disk."""

    __slots__ = ()

    @override
    def advise(self, begin: int, end: int, advice: Advice) -> None:
        if advice is Advice.WRITES:
            is_paged = end - begin < _MUCH  # otherwise the kernel reads ahead, and zeros what it finds no data for
            begin -= begin % mmap.PAGESIZE
            for step in (_MADV_RANDOM, _MADV_POPULATE_WRITE, _MADV_NORMAL) if is_paged else (_MADV_POPULATE_WRITE,):
                self._advise(begin, end, step)
            return
        begin += -begin % mmap.PAGESIZE  # because the page before it may be in use
        if advice is Advice.RANDOM_READS:
            self._advise(begin, end, _MADV_RANDOM)
            return
        end -= end % mmap.PAGESIZE
        self._advise(begin, end, _MADV_DONTNEED)
        if sys.platform == "linux" and end > begin and not self.writable:
            self.buffer.madvise(_MADV_DONTNEED, begin, end - begin)

    def _advise(self, begin: int, end: int, advice: int) -> None:
        if sys.platform == "linux" and end > begin and self.writable:
            with suppress(OSError):  # a kernel that does not know the advice makes later accesses slower
                if CORE.advise is None:
                    _on_pages("madvise")(self.buffer, begin, end - begin, advice)
                else:
                    # In parts, because a thread that maps a file waits for the end of each.
                    part = _MUCH if advice == _MADV_POPULATE_WRITE else end - begin
                    CORE.advise(self.buffer, begin, end, advice, part)

    @override
    def data_end(self, begin: int = 0) -> int:
        if self.descriptor >= 0:
            return _data_end(self.descriptor, begin, self.size)
        try:
            descriptor = open_regular(self.path)
        except OSError:
            return self.size
        try:
            return _data_end(descriptor, begin, self.size)
        finally:
            os.close(descriptor)


class DiskFiles:
    """Mapped files on disk. Thread-safe.

    Args:
        follow_links: Whether a folder of a store may be a symbolic link when the store is written, as of operators who
            keep ``commitlog`` on another disk. Links below ``librmq`` are refused in any case, and links of files.
        has_peers: Whether processes that share a store append to it too, each with a lock beside the owner's.
    """

    is_shared = True
    is_temporary = False
    # The defaults stand in the class, because a subclass may have a constructor that does not call this one.
    _follows = False
    _roots: tuple[str, ...] = ()
    _own: tuple[str, ...] = ()
    _made: frozenset[str] = frozenset()
    """Those of the roots that were there, or were made, and are not made again."""
    has_peers: bool = False
    """Whether locks leave room for those of peers; False where the system has no such locks."""

    def __init__(self, *, follow_links: bool = False, has_peers: bool = False) -> None:
        self._follows = follow_links
        self.has_peers = has_peers and HAS_PEER_LOCKS

    def confine(self, store: str, own: str, *folders: str) -> None:
        """Do as `interface.confine` says."""
        root = os.path.join(store, own) if self._follows else store
        for path in (root, os.path.abspath(root)):
            prefix = path.rstrip(os.sep) + os.sep
            if prefix not in self._roots:
                self._roots = (*self._roots, prefix)
                if os.path.isdir(root):
                    self._made |= {prefix}
                self._own = (*self._own, prefix if self._follows else f"{prefix}{own}{os.sep}")
        if self._follows:
            self._check_below(os.path.join(store, own))
            return
        self._check_below(store, {own, *folders})

    def _check_below(self, folder: str, names: Container[str] | None = None) -> None:
        """Refuse a link anywhere below a folder, or in what it has of ``names``, before any write."""
        with SystemCall("list", folder):
            try:
                entries = os.scandir(folder)  # kept out of `list`, which follows links, as readers do
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                return  # the open that follows says so
            with entries:
                for entry in entries:
                    if names is not None and entry.name not in names:
                        continue
                    if entry.is_symlink():
                        raise self._link_refused(entry.path)
                    if entry.is_dir(follow_symlinks=False):
                        self._check_below(entry.path)

    @contextmanager
    def _place(self, path: str) -> Iterator[_Place]:
        """Yield a path to write at; below the folder of a store it is found without following links.

        Raises:
            CorruptionError: A folder on the way is a link, or a file.
        """
        root = next((root for root in self._roots if path.startswith(root)), None)
        if root is None:
            yield _Place(path, None)
            return
        *folders, name = path[len(root) :].split(os.sep)
        if not _HAS_PLACES:
            at = root
            for folder in folders:
                at = os.path.join(at, folder)
                if os.path.islink(at):
                    raise self._link_refused(at)
            yield _Place(path, None)
            return
        descriptor = os.open(root, _ON_THE_WAY)
        try:
            for depth, folder in enumerate(folders, 1):
                try:
                    below = os.open(folder, _ON_THE_WAY | os.O_NOFOLLOW, dir_fd=descriptor)
                except OSError as error:
                    at = os.path.join(root, *folders[:depth])
                    if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.islink(at):
                        raise self._link_refused(at) from None
                    raise
                # Name the next folder first: after an interrupt here, the end would close this one a second time.
                descriptor, above = below, descriptor
                os.close(above)
            yield _Place(name, descriptor)
        finally:
            os.close(descriptor)

    def _link_refused(self, path: str) -> CorruptionError:
        if path.startswith(self._own):  # also without `follow_links`, because that allows no link here
            return CorruptionError(
                path, 0, "name", "a symbolic link: librmq follows none below its own folder to write"
            )
        return CorruptionError(
            path,
            0,
            "name",
            "a symbolic link, which could lead out of the store, so nothing is written there: allow it, if you have "
            "made it, by --follow-links, librmq.share(…, follow_links=True) or files=DiskFiles(follow_links=True)",
        )

    def open(self, path: str, *, writable: bool = False, keep_descriptor: bool = False) -> File:
        descriptor, size = self.descriptor(path, writable=writable)
        return self._map(path, descriptor, size, writable=writable, keep_descriptor=keep_descriptor)

    def descriptor(self, path: str, *, writable: bool = False) -> tuple[int, int]:
        """Open a file as `open` does, and return a descriptor, which the caller closes, and the file's size."""
        with SystemCall("open", path):
            if writable:
                with self._place(path) as place:
                    descriptor = open_regular(path, _TO_WRITE, name=place.name, folder=place.folder)
            else:
                descriptor = open_regular(path)
            try:
                size = os.fstat(descriptor).st_size
                if size == 0:
                    raise CorruptionError(path, 0, "size", "the file is empty")
            except BaseException:
                os.close(descriptor)
                raise
        return descriptor, size

    def create(self, path: str, size: int, *, keep_descriptor: bool = False) -> File:
        with SystemCall("create", path), self._place(path) as place:
            _create(path, place, size)
            try:
                # It is opened by its name, because tools call a nameless file deleted.
                descriptor = os.open(place.name, _TO_WRITE, dir_fd=place.folder)
                return self._map(path, descriptor, size, writable=True, keep_descriptor=keep_descriptor)
            except BaseException:
                os.unlink(place.name, dir_fd=place.folder)
                raise

    def make_files(
        self, folder: str, contents: Iterable[tuple[str, bytes | bytearray]], size: int, *, times_of: str | None = None
    ) -> None:
        self.make_folder(folder)
        with SystemCall("create", folder), self._place(os.path.join(folder, "")) as above:
            for name, data in contents:
                path = os.path.join(folder, name)
                source = times_of and os.path.join(times_of, name)
                if above.folder is None:
                    self.make_folder(os.path.dirname(path))
                    _create(path, _Place(path, None), size, data, source)
                    continue
                parent = os.path.dirname(name)
                os.mkdir(parent, dir_fd=above.folder)
                descriptor = os.open(parent, _FOLDER | os.O_NOFOLLOW, dir_fd=above.folder)
                try:
                    give_to_owner(descriptor, "", above.folder)
                    _create(path, _Place(os.path.basename(name), descriptor), size, data, source)
                finally:
                    os.close(descriptor)

    def _map(self, path: str, descriptor: int, size: int, *, writable: bool, keep_descriptor: bool) -> File:
        try:
            with SystemCall("map", path):
                buffer = mmap.mmap(descriptor, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        except BaseException:
            os.close(descriptor)
            raise
        if keep_descriptor:
            return DiskFile(path, buffer, size, writable, descriptor)
        os.close(descriptor)  # the mapping keeps its own duplicate
        return DiskFile(path, buffer, size, writable)

    def reserve(self, file: File, begin: int, end: int) -> None:
        if not hasattr(os, "posix_fallocate"):  # macOS and Windows allocate blocks at the write
            return
        # Allocate whole pages: the first write to a page needs all of its blocks.
        begin -= begin % mmap.PAGESIZE
        end += -end % mmap.PAGESIZE
        with self._descriptor(file, "allocate") as descriptor:
            os.posix_fallocate(descriptor, begin, min(end, file.size) - begin)

    def flush(self, file: File, begin: int = 0, end: int | None = None) -> None:
        if end is not None and sys.platform == "linux":
            with SystemCall("flush", file.path):
                self._wait_for_part(file, begin, end)
            return
        with self._descriptor(file, "flush") as descriptor:
            if sys.platform != "linux" and file.writable:  # elsewhere a file may not have the changes of its mapping
                file.buffer.flush()
            self._wait_for_device(descriptor, is_data=True)

    def _wait_for_part(self, file: File, begin: int, end: int) -> None:
        """Return when bytes ``begin`` to ``end`` of a mapped file are on the device: Linux's fdatasync of a part."""
        begin -= begin % mmap.PAGESIZE
        _on_pages("msync")(file.buffer, begin, end - begin, _MS_SYNC)

    def _wait_for_device(self, descriptor: int, *, is_data: bool = False) -> None:
        """Return when a file or a folder is on the device; ``is_data`` leaves out what no reader of a file needs."""
        (os.fdatasync if is_data and hasattr(os, "fdatasync") else os.fsync)(descriptor)

    @contextmanager
    def _descriptor(self, file: File | str, call: str) -> Iterator[int]:
        """Yield the kept descriptor of a file, or open it for one call, whose error names it."""
        path = file if isinstance(file, str) else file.path
        with SystemCall(call, path):
            if isinstance(file, File) and file.descriptor >= 0:
                yield file.descriptor
                return
            with self._place(path) as place:
                descriptor = open_regular(path, _TO_WRITE, name=place.name, folder=place.folder)
            try:
                yield descriptor
            finally:
                os.close(descriptor)

    def flush_folder(self, path: str) -> None:
        if sys.platform == "win32":
            return
        with SystemCall("flush the folder", path):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                self._wait_for_device(descriptor)
            finally:
                os.close(descriptor)

    def list(self, path: str) -> list[FolderEntry]:
        entries = _entries(path)
        for other in joined_folders(path):
            names = {entry.name for entry in entries}
            entries += [entry for entry in _entries(other) if entry.name not in names]
        entries.sort()
        return entries

    def names(self, path: str) -> tuple[str, ...]:
        names: set[str] = set()
        for folder in (path, *joined_folders(path)):
            with SystemCall("list", folder), suppress(FileNotFoundError):
                names.update(os.listdir(folder))
        return tuple(sorted(names))

    def status(self, path: str) -> FileStatus | None:
        with SystemCall("look at", path):
            try:
                status = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                if joined_folders(path):
                    return FileStatus(0, is_folder=True, links=1, is_untouched=False)
                place = place_of(path)
                if place == path:
                    return None
                status = os.stat(place)
        return FileStatus(status.st_size, stat.S_ISDIR(status.st_mode), status.st_nlink, status.st_mtime_ns == 0)

    def make_folder(self, path: str) -> None:
        root = next((root for root in self._roots if path.startswith(root)), None)
        with SystemCall("make the folder", path):
            if root is None:
                _make_folders(path)
                return
            if self._make_below(path, missing_ok=True):
                self._made |= {root}
                return
            if root not in self._made:  # else it was deleted or moved, and parts of it would keep a new store out
                _make_folders(root)
            self._made |= {root}
            at = root
            for name in path[len(root) :].split(os.sep):
                at = os.path.join(at, name)
                self._make_below(at)

    def _make_below(self, path: str, *, missing_ok: bool = False) -> bool:
        """Make a folder of a store unless it is there; with ``missing_ok`` return False if the one above is missing."""
        try:
            with self._place(path) as place:
                make_owned_folder(path, name=place.name, folder=place.folder)
        except FileExistsError:
            if os.path.islink(path):
                raise self._link_refused(path) from None
            if not os.path.isdir(path):
                raise
        except FileNotFoundError:
            if missing_ok:
                return False
            raise
        return True

    def delete(self, path: str) -> None:
        with SystemCall("delete", path):
            try:
                with self._place(path) as place:
                    try:
                        os.unlink(place.name, dir_fd=place.folder)
                    except (IsADirectoryError, PermissionError):
                        if not os.path.isdir(path):
                            raise
                        shutil.rmtree(place.name, dir_fd=place.folder)
            except FileNotFoundError:
                return

    def rename(self, old: str, new: str) -> None:
        with SystemCall("rename", old), self._place(old) as source, self._place(new) as target:
            os.replace(source.name, target.name, src_dir_fd=source.folder, dst_dir_fd=target.folder)

    def link(self, old: str, new: str) -> None:
        with SystemCall("link", old), self._place(new) as target:
            os.link(place_of(old), target.name, dst_dir_fd=target.folder)

    def read(self, path: str, at: int = 0, size: int | None = None) -> bytes:
        if size is None:
            with SystemCall("read", path), open(open_regular(path), "rb") as file:
                file.seek(at)
                data = file.read(LARGEST_WHOLE + 1)
            if len(data) > LARGEST_WHOLE:
                raise CorruptionError(path, LARGEST_WHOLE, "size", f"expected at most {LARGEST_WHOLE} bytes")
            return data
        if not sys.platform.startswith("linux"):  # elsewhere a file may not have the changes of its mapping
            # An empty file can't be mapped.
            return b"" if file_size(self, path) == 0 else self.open(path).buffer[at : at + size]
        with SystemCall("read", path):
            descriptor = open_regular(path)
            try:
                return os.pread(descriptor, size, at)
            finally:
                os.close(descriptor)

    def read_used(self, path: str, limit: int, size: int | None = None, *, is_whole: bool = True) -> bytes | None:
        if not sys.platform.startswith("linux"):  # elsewhere a file may not have the changes of its mapping
            return None
        with SystemCall("open", path):
            try:
                descriptor = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
            except CorruptionError:
                if os.path.islink(path):
                    return None
                raise
        try:
            if size is not None and os.fstat(descriptor).st_size != size:
                return None
            end = _data_end(descriptor, 0, limit + 1) if is_whole else limit
            return None if end > limit else without_zeros(os.pread(descriptor, end, 0))
        except OSError as error:
            raise StoreIOError("read", path, error) from error
        finally:
            os.close(descriptor)

    def overwrite(self, place: File | str, at: int, data: bytes | bytearray) -> None:
        if not sys.platform.startswith("linux"):  # elsewhere a mapping may not show written bytes
            file = self.open(place, writable=True) if isinstance(place, str) else place
            file.buffer[at : at + len(data)] = data
            return
        with self._descriptor(place, "write") as descriptor:
            if isinstance(place, str):
                _write_at(descriptor, at, data)
                return
            if not 0 <= at <= place.size - len(data):
                raise ValueError(f"{place.path}: {len(data)} bytes at {at} do not fit into {place.size} bytes")
            # Writing through the mapping would fault in small pages one by one, and zero each first.
            _write_at(descriptor, at, data)
            # This advice makes Linux start writing the pages out; it drops none that is still dirty.
            os.posix_fadvise(descriptor, at, len(data), os.POSIX_FADV_DONTNEED)

    def write(self, path: str, data: bytes | Iterable[bytes]) -> None:
        temporary = _temporary_path(path)
        with SystemCall("write", path), self._place(temporary) as new, self._place(path) as target:
            try:
                with _new_file(new) as file:
                    file.writelines((data,) if isinstance(data, bytes) else data)
                    file.flush()
                    self._wait_for_device(file.fileno())
                os.replace(new.name, target.name, src_dir_fd=new.folder, dst_dir_fd=target.folder)
            except BaseException:  # ``data`` can raise anything, and Ctrl-C comes at any time
                with suppress(OSError):
                    os.unlink(new.name, dir_fd=new.folder)
                raise
        self.flush_folder(os.path.dirname(path))

    def lock(self, path: str) -> FileLock:
        with SystemCall("lock", path), self._place(path) as place:  # `DiskLock` refuses a link of the file itself
            return DiskLock(path, place.folder, has_peers=self.has_peers)

    def lock_as_peer(self, path: str) -> PeerLock:
        """Take a lock beside that of an owner with ``has_peers``; see `PeerLock`."""
        return PeerLock(path)

    def lock_holder(self, path: str) -> str | None:
        return lock_holder(path)

    def identity(self, path: str) -> str | None:
        """Do as `identity_of` says; None where the system has no number of its start."""
        try:
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
                status = os.stat(path)
                return f"{file.read().strip()}{_generation(path)}:{status.st_dev}:{status.st_ino}"
        except OSError:
            return None

    def used_ratio(self, path: str) -> float:
        with SystemCall("look at the disk of", path):
            usage = shutil.disk_usage(path)
        # Count like df: space reserved for the superuser is neither used nor free.
        within_reach = usage.used + usage.free
        return usage.used / within_reach if within_reach else 0.0


def _entries(path: str) -> list[FolderEntry]:
    entries: list[FolderEntry] = []
    with SystemCall("list", path):
        try:
            listing = os.scandir(path)
        except FileNotFoundError:
            return []
        with listing:
            for item in listing:
                if item.is_dir(follow_symlinks=False):  # needs no further call
                    entries.append(FolderEntry(item.name, 0, is_folder=True, is_file=False))
                    continue
                try:
                    status = item.stat()
                except OSError as error:
                    if item.is_symlink():
                        raise CorruptionError(item.path, 0, "name", "the target of this link is missing") from error
                    if isinstance(error, FileNotFoundError):
                        continue  # it was deleted since the folder was listed
                    raise
                folder = stat.S_ISDIR(status.st_mode)
                size = 0 if folder else status.st_size
                entries.append(FolderEntry(item.name, size, folder, stat.S_ISREG(status.st_mode)))
    return entries


def _data_end(descriptor: int, begin: int, limit: int) -> int:
    """Return a position from ``begin`` on behind which only holes follow; ``limit`` if it is there, or unknown."""
    if _SEEK_DATA is None or _SEEK_HOLE is None:
        return limit
    end = at = begin
    try:
        while at < limit:
            end = os.lseek(descriptor, at, _SEEK_HOLE)
            at = os.lseek(descriptor, end, _SEEK_DATA)
    except OSError as error:
        return min(end, limit) if error.errno == errno.ENXIO else limit  # ENXIO: only holes follow
    return limit


def _write_at(descriptor: int, at: int, data: bytes | bytearray) -> None:
    done = os.pwrite(descriptor, data, at)
    while done < len(data):
        done += os.pwrite(descriptor, memoryview(data)[done:], at + done)


def _create(path: str, place: _Place, size: int, data: bytes | bytearray = b"", times_of: str | None = None) -> None:
    """Create a file of that length, with its first bytes, and with the times of another if that is still there.

    No kill leaves one of another length, which a broker would not load, unless the system can do it in no other way.
    """
    if not _create_unnamed(path, place, size, data, times_of):
        _create_renamed(path, place, size, data, times_of)


def _create_unnamed(path: str, place: _Place, size: int, data: bytes | bytearray, times_of: str | None) -> bool:
    """Create a file that gets its name after its content; return False if the system can't do it."""
    if not hasattr(os, "O_TMPFILE"):
        return False
    folder = os.path.dirname(place.name) or os.curdir
    try:
        with SystemCall("create", path):
            descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o644, dir_fd=place.folder)
        try:
            give_to_owner(descriptor, folder, place.folder)
            _fill(descriptor, path, size, data, times_of)
            with SystemCall("create", path):
                # Python follows the link only if it gets a folder too, which an absolute path does not use.
                os.link(
                    f"/proc/self/fd/{descriptor}",
                    place.name,
                    src_dir_fd=descriptor,
                    dst_dir_fd=place.folder,
                    follow_symlinks=True,
                )
        finally:
            os.close(descriptor)
    except StoreIOError as error:
        if error.errno in _NOT_NAMELESS and os.path.isdir(os.path.dirname(path) or os.curdir):
            return False
        raise
    return True


def _create_renamed(path: str, place: _Place, size: int, data: bytes | bytearray, times_of: str | None) -> None:
    """Create a file in the folder above, and rename it when it has its length; where that can't be, in its place."""
    temporary = _temporary_path(path)
    try:
        with SystemCall("create", path):
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            with suppress(FileNotFoundError):
                os.unlink(temporary)  # a kill can have left it
            _make(_Place(temporary, None), path, size, data, times_of)
            try:
                os.rename(temporary, place.name, dst_dir_fd=place.folder)
            except BaseException:
                os.unlink(temporary)
                raise
    except StoreIOError as error:
        if error.errno not in _NOT_RENAMED:
            raise
        _make(place, path, size, data, times_of)


def _make(place: _Place, path: str, size: int, data: bytes | bytearray, times_of: str | None) -> None:
    with SystemCall("create", path):
        descriptor = os.open(place.name, _TO_WRITE | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=place.folder)
    try:
        with SystemCall("create", path):
            give_to_owner(descriptor, os.path.dirname(place.name), place.folder)
        _fill(descriptor, path, size, data, times_of)
    except BaseException:
        os.unlink(place.name, dir_fd=place.folder)
        raise
    finally:
        os.close(descriptor)


def _fill(descriptor: int, path: str, size: int, data: bytes | bytearray, times_of: str | None) -> None:
    """Set the length, the first bytes and the times of a new file."""
    with SystemCall("set the length of", path):
        os.ftruncate(descriptor, size)
    if data:
        with SystemCall("write", path):
            _write_at(descriptor, 0, data)
    if times_of is not None:
        with SystemCall("set the time of", path), suppress(FileNotFoundError):
            times = os.stat(times_of)
            os.utime(descriptor if os.utime in os.supports_fd else path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _make_folders(path: str) -> None:
    """Make a folder and those above it, each of the owner of the one above."""
    path = path.rstrip(os.sep) or path
    if path and not os.path.isdir(path):
        _make_folders(os.path.dirname(path))
        with suppress(FileExistsError):
            make_owned_folder(path)
        if not os.path.isdir(path):
            os.mkdir(path)  # this raises what is there instead


def _temporary_path(path: str) -> str:
    """Return a path for a file in the making: outside of the folders of numbered files, of which a broker loads all."""
    if not os.path.basename(path).isdigit():
        return path + ".tmp"
    folder, name = os.path.split(os.path.realpath(path))
    return os.path.join(os.path.dirname(folder), f"{os.path.basename(folder)}-{name}.tmp")


def _new_file(place: _Place) -> BinaryIO:
    """Make an empty file, replacing a leftover file or link of that name."""
    with suppress(FileNotFoundError):
        os.unlink(place.name, dir_fd=place.folder)
    flags = _TO_WRITE | os.O_CREAT | os.O_EXCL
    file = os.fdopen(os.open(place.name, flags, 0o644, dir_fd=place.folder), "wb")
    try:
        give_to_owner(file.fileno(), os.path.dirname(place.name), place.folder)
    except BaseException:
        file.close()
        raise
    return file
