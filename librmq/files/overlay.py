"""The disk, or other files, with changes kept in memory; the files below stay unchanged.

Use it to try out an operation that changes a store: an `OverlayFiles` shows what the disk would hold afterwards, unless
the disk refuses a write.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from typing import Any, Self, SupportsIndex

from librmq.errors import StoreIOError, StoreLockedError
from librmq.files.disk import DiskFiles
from librmq.files.memory import MemoryFiles
from librmq.files.seam import File, FileLock, Files, FolderEntry


class _PrivateBuffer(mmap.mmap):
    """A private mapping of a file that reports its first change; writing the same bytes again is none."""

    path: str
    overlay: OverlayFiles | None

    def __new__(cls, path: str, descriptor: int, size: int, overlay: OverlayFiles | None) -> Self:
        self = super().__new__(cls, descriptor, size, access=mmap.ACCESS_COPY)
        self.path = path
        self.overlay = overlay
        return self

    def __setitem__(self, place: SupportsIndex | slice, value: Any) -> None:
        if self.overlay is not None and self[place] == value:
            return
        super().__setitem__(place, value)
        overlay, self.overlay = self.overlay, None
        if overlay is not None:
            overlay._keep(self)


class OverlayFiles(MemoryFiles):
    """The files of the disk with changes in memory, which are lost with the object. Thread-safe.

    Only changed pages take memory. The lock of a store is refused while another writer holds it, and is taken only
    within this object. A folder on the disk can't be renamed.
    """

    def __init__(self, memory: Files | None = None) -> None:
        """Show the files of ``memory`` instead of the disk; each takes its size again once it is opened."""
        super().__init__()
        self._disk = DiskFiles()
        self._base: Files = memory or self._disk
        self._roots = len(self._folders)
        self._deleted: set[str] = set()
        self._mapped: weakref.WeakValueDictionary[str, _PrivateBuffer] = weakref.WeakValueDictionary()

    def _keep(self, buffer: _PrivateBuffer) -> None:
        """Keep a file that was changed, unless it was deleted meanwhile."""
        with self._guard:
            if self._mapped.get(buffer.path) is buffer:
                self._files[buffer.path] = File(buffer.path, buffer, len(buffer), True)

    def _in_base(self, path: str) -> bool:
        """Return whether the file or folder at ``path`` is the one on the disk."""
        if not self._deleted:  # as nearly always
            return True
        while path not in self._deleted:
            parent = os.path.dirname(path)
            if parent == path or not parent:
                return True
            path = parent
        return False

    def open(self, path: str, *, writable: bool = False, keep_descriptor: bool = False) -> File:
        with self._guard:
            if path in self._files or not self._in_base(path):
                return super().open(path, writable=writable)
            buffer = self._mapped.get(path)
            if buffer is None:
                buffer = self._mapped[path] = self._private(path)
            return File(path, buffer, len(buffer), writable)

    def _private(self, path: str) -> _PrivateBuffer:
        """Return the content of a file below, to be changed here alone."""
        if self._base is not self._disk:
            data = self._base.open(path).buffer[:]
            buffer = _PrivateBuffer(path, -1, len(data), None)
            buffer[:] = data
            buffer.overlay = self
            return buffer
        descriptor, size = self._disk.descriptor(path)
        try:
            return _PrivateBuffer(path, descriptor, size, self)
        except OSError as error:
            raise StoreIOError("map", path, error) from error
        finally:
            os.close(descriptor)  # the mapping keeps its own duplicate

    def changed_folders(self) -> set[str]:
        """Return the folders that were made, changed or deleted, or hold a file that was."""
        with self._guard:
            names = {*self._files, *self._folders, *self._deleted}
        return names | set(map(os.path.dirname, names))

    def create(self, path: str, size: int, *, keep_descriptor: bool = False) -> File:
        with self._guard:
            if self.size(path) is not None:
                raise StoreIOError("create", path, FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)))
            return super().create(path, size)

    def list(self, path: str) -> list[FolderEntry]:
        with self._guard:
            if not self._deleted and not self._files and len(self._folders) == self._roots:
                return self._base.list(path)
            entries = {entry.name: entry for entry in self._base.list(path)} if self._in_base(path) else {}
            entries = {name: entry for name, entry in entries.items() if self._in_base(os.path.join(path, name))}
            entries |= {entry.name: entry for entry in super().list(path)}
        return [entries[name] for name in sorted(entries)]

    def size(self, path: str) -> int | None:
        with self._guard:
            size = super().size(path)
            return self._base.size(path) if size is None and self._in_base(path) else size

    def is_folder(self, path: str) -> bool:
        return super().is_folder(path) or (self._in_base(path) and self._base.is_folder(path))

    def delete(self, path: str) -> None:
        with self._guard:
            super().delete(path)
            self._mapped.pop(path, None)
            if self._base.size(path) is not None:
                self._deleted.add(path)

    def rename(self, old: str, new: str) -> None:
        with self._guard:
            self._take_over(old)
            super().rename(old, new)
            self._mapped.pop(old, None)
            self._deleted.add(old)

    def link(self, old: str, new: str) -> None:
        with self._guard:
            self._take_over(old)
            super().link(old, new)

    def _take_over(self, path: str) -> None:
        if path not in self._files and self._in_base(path) and self._base.size(path) and not self._base.is_folder(path):
            self._files[path] = self.open(path, writable=True)

    def read(self, path: str, limit: int = 64 << 20) -> bytes:
        with self._guard:
            if path in self._files or not self._in_base(path):
                return super().read(path, limit)
        return self._base.read(path, limit)

    def read_used(self, path: str, limit: int) -> bytes | None:
        with self._guard:
            if path in self._files or not self._in_base(path):
                return super().read_used(path, limit)
        return self._base.read_used(path, limit)

    def lock(self, path: str) -> FileLock:
        holder = self._base.lock_holder(path)
        if holder is not None:
            raise StoreLockedError(f"{path}: locked by {holder}")
        return super().lock(path)

    def lock_holder(self, path: str) -> str | None:
        return super().lock_holder(path) or self._base.lock_holder(path)
