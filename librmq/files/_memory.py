"""Files that leave nothing behind: anonymous memory, overlays (the disk with changes in memory), temporary folders."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, Self, SupportsIndex

from librmq.errors import CorruptionError, StoreIOError, StoreLockedError
from librmq.files._disk import DiskFile, DiskFiles
from librmq.files.interface import (
    LARGEST_WHOLE,
    Advice,
    Buffer,
    File,
    FileLock,
    Files,
    FileStatus,
    FolderEntry,
    identity_of,
    is_folder,
)
from librmq.override import override
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import RLock

_log = EventLog("librmq.files")
_numbers = itertools.count(1)
_TRIES: Final = 5


class MemoryFiles:
    """Files in anonymous memory, for tests and ephemeral stores; gone with the object. Thread-safe."""

    is_shared = False
    is_temporary = False
    _file_type: type[File] = File

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._files: dict[str, File | bytes] = {}
        self._folders: set[str] = {"", os.sep}
        self._locks: set[str] = set()
        self._untouched: set[str] = set()
        self._linked: set[str] = set()  # other names of their files can be gone
        self._guard = RLock()
        self.disk_used_ratio: float = 0.0
        """Result of `used_ratio`, which tests can set; 0.0 stands for no disk."""

    def open(self, path: str, *, writable: bool = False, keep_descriptor: bool = False) -> File:
        with self._guard:
            stored = self._files.get(path)
            if stored is None:
                raise _missing("open", path)
            if isinstance(stored, bytes):
                if not stored:
                    raise CorruptionError(path, 0, "size", "the file is empty")
                buffer = self._new_buffer(path, len(stored))
                buffer[:] = stored
                stored = self._files[path] = self._file_type(path, buffer, len(stored), True)
            return stored if writable else type(stored)(path, stored.buffer, stored.size, False)

    def create(self, path: str, size: int, *, keep_descriptor: bool = False) -> File:
        with self._guard:
            if path in self._files:
                raise StoreIOError("create", path, FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)))
            self._check_parent("create", path)
            file = self._files[path] = self._file_type(path, self._new_buffer(path, size), size, True)
            return file

    def make_files(
        self, folder: str, contents: Iterable[tuple[str, bytes | bytearray]], size: int, *, times_of: str | None = None
    ) -> None:
        for name, data in contents:
            path = os.path.join(folder, name)
            self.make_folder(os.path.dirname(path))
            self.create(path, size).buffer[: len(data)] = data

    def reserve(self, file: File, begin: int, end: int) -> None:
        pass

    def flush(self, file: File, begin: int = 0, end: int | None = None) -> None:
        pass

    def flush_folder(self, path: str) -> None:
        pass

    def list(self, path: str) -> list[FolderEntry]:
        prefix = path.rstrip(os.sep) + os.sep
        with self._guard:
            names = {p[len(prefix) :]: self._length(f) for p, f in self._files.items() if p.startswith(prefix)}
            folders = {p[len(prefix) :] for p in self._folders if p.startswith(prefix) and len(p) > len(prefix)}
        entries = [FolderEntry(name, size, False) for name, size in names.items() if os.sep not in name]
        entries += [FolderEntry(name, 0, True) for name in folders if os.sep not in name]
        return sorted(entries, key=lambda entry: entry.name)

    def names(self, path: str) -> tuple[str, ...]:
        return tuple([entry.name for entry in self.list(path)])

    def status(self, path: str) -> FileStatus | None:
        with self._guard:
            file = self._files.get(path)
            if file is None:
                return FileStatus(0, True, 1, False) if path in self._folders else None
            links = self._links(path, file) if path in self._linked else 1
            return FileStatus(self._length(file), False, links, path in self._untouched)

    def _links(self, path: str, file: File | bytes) -> int:
        if isinstance(file, bytes):
            return 1
        return sum(isinstance(other, File) and other.buffer is file.buffer for other in self._files.values())

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
            self._untouched = {moved(p) for p in self._untouched}
            self._linked = {moved(p) for p in self._linked}
            for path, file in self._files.items():
                if isinstance(file, File):
                    file.path = path

    def link(self, old: str, new: str) -> None:
        with self._guard:
            if self.status(new) is not None:
                raise StoreIOError("link", new, FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)))
            self._check_parent("link", new)
            file = self.open(old, writable=True)
            self._files[new] = type(file)(new, file.buffer, file.size, True)
            self._linked |= {old, new}

    def read(self, path: str, at: int = 0, size: int | None = None) -> bytes:
        with self._guard:
            file = self._files.get(path)
            if file is None:
                raise _missing("read", path)
            if size is None and self._length(file) > LARGEST_WHOLE:
                raise CorruptionError(path, LARGEST_WHOLE, "size", f"expected at most {LARGEST_WHOLE} bytes")
            content = file if isinstance(file, bytes) else file.buffer
            return content[at:] if size is None else content[at : at + size]

    def read_used(self, path: str, limit: int, size: int | None = None, *, is_whole: bool = True) -> bytes | None:
        status = self.status(path)
        if status is None or (is_whole and status.size > limit) or size not in (None, status.size):
            return None
        return self.read(path, 0, limit).rstrip(b"\0")

    def overwrite(self, place: File | str, at: int, data: bytes | bytearray) -> None:
        file = self.open(place, writable=True) if isinstance(place, str) else place
        file.buffer[at : at + len(data)] = data

    def write(self, path: str, data: bytes | Iterable[bytes]) -> None:
        content = data if isinstance(data, bytes) else b"".join(data)
        with self._guard:
            self._check_parent("write", path)
            self._files[path] = content
            self._untouched.discard(path)

    def lock(self, path: str) -> FileLock:
        with self._guard:
            if path in self._locks:
                raise StoreLockedError(f"{path}: locked by this process (pid {os.getpid()})")
            self._locks.add(path)
            self._files.setdefault(path, b"lock")
        return _MemoryLock(self, path)

    def lock_holder(self, path: str) -> str | None:
        return f"this process (pid {os.getpid()})" if path in self._locks else None

    def used_ratio(self, path: str) -> float:
        return self.disk_used_ratio

    def identity_in_memory(self, path: str) -> str | None:
        """Return a text that no copy of these files has: while it is the same, no write was lost."""
        return f"memory {self._number}"

    def _new_buffer(self, path: str, size: int) -> Buffer:
        if sys.platform == "win32":
            return mmap.mmap(-1, size)
        # A private mapping costs half of a shared one, and a forked child can't write to its parent's.
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    @staticmethod
    def _length(file: File | bytes) -> int:
        return len(file) if isinstance(file, bytes) else file.size

    def _check_parent(self, call: str, path: str) -> None:
        if not is_folder(self, os.path.dirname(path)):
            raise _missing(call, path)


class _MemoryLock:
    def __init__(self, files: MemoryFiles, path: str) -> None:
        self._files = files
        self._path = path

    def hold_folder(self) -> None:
        """Do nothing, like `check`: only this process reaches files in memory."""

    def mark_untouched(self) -> None:
        self._files._untouched.add(self._path)

    def check(self) -> None:
        pass

    def release(self) -> None:
        self._files._locks.discard(self._path)


def _missing(call: str, path: str) -> StoreIOError:
    return StoreIOError(call, path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))


# ---- overlays


class _PrivateBuffer(mmap.mmap):
    """A private mapping of a file that reports its first change; writing the same bytes again is none."""

    path: str
    overlay: OverlayFiles | None
    changed_from: int
    """The place of the first changed byte; the file's size without a change."""
    changed_end: int
    """The end of the last change."""

    def __new__(cls, path: str, descriptor: int, size: int, overlay: OverlayFiles | None) -> Self:
        self = super().__new__(cls, descriptor, size, access=mmap.ACCESS_COPY)
        self.path = path
        self.overlay = overlay
        self.changed_from, self.changed_end = size, 0
        return self

    @override
    def __setitem__(self, place: SupportsIndex | slice, value: Any) -> None:
        if self.overlay is not None and self[place] == value:
            return
        super().__setitem__(place, value)
        begin = place.indices(len(self))[0] if isinstance(place, slice) else range(len(self))[place]
        end = place.indices(len(self))[1] if isinstance(place, slice) else begin + 1
        self.changed_from, self.changed_end = min(self.changed_from, begin), max(self.changed_end, end)
        overlay, self.overlay = self.overlay, None
        if overlay is not None:
            overlay._keep(self)


class _PrivateFile(File):
    """A file of a disk with its changes in memory."""

    __slots__ = ()
    buffer: _PrivateBuffer

    @override
    def advise(self, begin: int, end: int, advice: Advice) -> None:
        if advice is Advice.NO_USE and self.buffer.overlay is not None:  # unchanged, so the disk brings the pages back
            self._below().advise(begin, end, advice)

    @override
    def data_end(self, begin: int = 0) -> int:
        return max(self._below().data_end(begin), self.buffer.changed_end)

    def _below(self) -> DiskFile:
        return DiskFile(self.buffer.path, self.buffer, self.size, self.writable)


class OverlayFiles(MemoryFiles):
    """The files of the disk with changes in memory, which are lost with the object. Thread-safe.

    The disk stays unchanged. Use it to try out an operation that changes a store: it shows what the disk would hold
    afterwards, unless the disk refuses a write.

    Only changed pages take memory. The lock of a store is refused while another writer holds it, and is taken only
    within this object. A folder on the disk can't be renamed.
    """

    def __init__(self, files: Files | None = None) -> None:
        """Show ``files``; if they are in memory, each takes its size again once it is opened."""
        super().__init__()
        self._disk = DiskFiles()
        self._base: Files = self._disk if files is None or files.is_shared else files
        self._base_type: type[File] = _PrivateFile if self._base is self._disk else File
        self._roots = len(self._folders)
        self._deleted: set[str] = set()
        self._mapped: weakref.WeakValueDictionary[str, _PrivateBuffer] = weakref.WeakValueDictionary()

    def _keep(self, buffer: _PrivateBuffer) -> None:
        """Keep a file that was changed, unless it was deleted meanwhile."""
        with self._guard:
            if self._mapped.get(buffer.path) is buffer:
                self._files[buffer.path] = self._base_type(buffer.path, buffer, len(buffer), True)

    def _in_base(self, path: str) -> bool:
        """Return whether the file or folder at ``path`` is the one on the disk."""
        if not self._deleted:  # nearly always so
            return True
        while path not in self._deleted:
            parent = os.path.dirname(path)
            if parent == path or not parent:
                return True
            path = parent
        return False

    @override
    def open(self, path: str, *, writable: bool = False, keep_descriptor: bool = False) -> File:
        with self._guard:
            if path in self._files or not self._in_base(path):
                return super().open(path, writable=writable)
            buffer = self._mapped.get(path)
            if buffer is None:
                buffer = self._mapped[path] = self._private(path)
            return self._base_type(path, buffer, len(buffer), writable)

    def _private(self, path: str) -> _PrivateBuffer:
        """Return the content of a file below, to be changed here alone."""
        if self._base is not self._disk:
            file = self._base.open(path)
            end, buffer = file.used_end(0, file.size), _PrivateBuffer(path, -1, file.size, None)
            buffer[:end] = file.buffer[:end]  # zeros behind it take no memory
            buffer.changed_from, buffer.overlay = file.size, self
            return buffer
        descriptor, size = self._disk.descriptor(path)
        try:
            return _PrivateBuffer(path, descriptor, size, self)
        except OSError as error:
            raise StoreIOError("map", path, error) from error
        finally:
            os.close(descriptor)  # the mapping keeps its own duplicate

    def _discard(self) -> None:
        """Release the changed pages, once nothing uses these files; a repetition does nothing."""
        self._files = {}  # in one step, because a signal handler can interrupt a call

    def changes(self) -> dict[str, int]:
        """Return the files and folders that were made, changed or deleted, each with the place of its first change."""
        with self._guard:
            begins = {path: 0 for path in self._folders if self._base.status(path) is None}
            for path, file in self._files.items():
                buffer = None if isinstance(file, bytes) else file.buffer
                begins[path] = buffer.changed_from if isinstance(buffer, _PrivateBuffer) else 0
            return begins | dict.fromkeys(self._deleted, 0)

    @override
    def create(self, path: str, size: int, *, keep_descriptor: bool = False) -> File:
        with self._guard:
            if self.status(path) is not None:
                raise StoreIOError("create", path, FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)))
            return super().create(path, size)

    @override
    def list(self, path: str) -> list[FolderEntry]:
        with self._guard:
            if not self._deleted and not self._files and len(self._folders) == self._roots:
                return self._base.list(path)
            entries = {entry.name: entry for entry in self._base.list(path)} if self._in_base(path) else {}
            entries = {name: entry for name, entry in entries.items() if self._in_base(os.path.join(path, name))}
            entries |= {entry.name: entry for entry in super().list(path)}
        return [entries[name] for name in sorted(entries)]

    @override
    def names(self, path: str) -> tuple[str, ...]:
        with self._guard:
            names = {entry.name for entry in super().list(path)}
            if self._in_base(path):
                names.update(name for name in self._base.names(path) if self._in_base(os.path.join(path, name)))
        return tuple(sorted(names))

    @override
    def status(self, path: str) -> FileStatus | None:
        with self._guard:
            status = super().status(path)
            if status is None and self._in_base(path):
                status = self._base.status(path)
                # A change here takes a copy of the pages in any case, so other names of the file count for nothing.
                status = None if status is None else status._replace(links=1)
            return status

    @override
    def delete(self, path: str) -> None:
        with self._guard:
            super().delete(path)
            self._mapped.pop(path, None)
            if self._base.status(path) is not None:
                self._deleted.add(path)

    @override
    def rename(self, old: str, new: str) -> None:
        with self._guard:
            self._take_over(old)
            super().rename(old, new)
            self._mapped.pop(old, None)
            self._deleted.add(old)

    @override
    def link(self, old: str, new: str) -> None:
        with self._guard:
            self._take_over(old)
            super().link(old, new)

    def _take_over(self, path: str) -> None:
        status = None if path in self._files or not self._in_base(path) else self._base.status(path)
        if status is not None and status.size and not status.is_folder:
            self._files[path] = self.open(path, writable=True)

    @override
    def read(self, path: str, at: int = 0, size: int | None = None) -> bytes:
        with self._guard:
            if path in self._files or not self._in_base(path):
                return super().read(path, at, size)
        return self._base.read(path, at, size)

    @override
    def read_used(self, path: str, limit: int, size: int | None = None, *, is_whole: bool = True) -> bytes | None:
        with self._guard:
            if path in self._files or not self._in_base(path):
                return super().read_used(path, limit, size, is_whole=is_whole)
        return self._base.read_used(path, limit, size, is_whole=is_whole)

    @override
    def lock(self, path: str) -> FileLock:
        holder = self._base.lock_holder(path)
        if holder is not None:
            raise StoreLockedError(f"{path}: locked by {holder}")
        status = self.status(path)
        lock = super().lock(path)
        if status is not None and status.is_untouched:
            lock.mark_untouched()
        return lock

    @override
    def lock_holder(self, path: str) -> str | None:
        return super().lock_holder(path) or self._base.lock_holder(path)

    @override
    def identity_in_memory(self, path: str) -> str | None:
        base = self._base
        return base.identity_in_memory(path) if isinstance(base, MemoryFiles) else identity_of(base, path)


class _TemporaryFiles(DiskFiles):
    """Files that are deleted again, so that no call waits for the device: they outlive the process, not the machine."""

    is_temporary = True

    @override
    def flush_folder(self, path: str) -> None:
        pass

    @override
    def _wait_for_device(self, descriptor: int, *, is_data: bool = False) -> None:
        pass

    @override
    def _wait_for_part(self, file: File, begin: int, end: int) -> None:
        pass


class TemporaryFolder:
    """A new folder, deleted by `delete` or at the end of the process that made it, but not by a forked child."""

    def __init__(self) -> None:
        self.name: str = tempfile.mkdtemp(prefix="librmq-")
        self.files: DiskFiles = _TemporaryFiles()
        """Opens what is in the folder, without flushes to the device."""
        self.delete: Callable[[], object] = weakref.finalize(self, _delete_folder, self.name, os.getpid())


def _delete_folder(path: str, process: int) -> None:
    for _ in range(_TRIES):  # at the end of the process, threads of a broker that was not closed can still write
        if os.getpid() == process and os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
    if os.getpid() == process and os.path.isdir(path):
        try:
            shutil.rmtree(path)
        except OSError as error:
            _log.warning("%(path)s: the temporary folder could not be deleted: %(error)s", path=path, error=error)
