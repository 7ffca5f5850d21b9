"""File seams for tests: one that records what a store does to its files, one that fails on request."""

# ruff: noqa: D102 (the methods are those of Files, described there)

from __future__ import annotations

import errno
import mmap
import os
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, Self, SupportsIndex

from librmq.errors import StoreIOError
from librmq.files.interface import File, FileLock, Files, FolderEntry
from librmq.files.memory import MemoryFiles
from librmq.runtime.locks import Lock


class Event(NamedTuple):
    """One change of a file.

    ``call`` is ``create`` (``offset`` is the length), ``write`` (``data`` at ``offset`` of the buffer), ``replace``
    (the whole file), ``flush``, ``give_up`` (a flush failed, and its unwritten data counts as flushed),
    ``flush_folder``, ``make_folder``, ``rename`` and ``link`` (``data`` is the new name) or ``delete``.
    """

    call: str
    """What was done."""
    path: str
    """Path of the file or folder."""
    offset: int = 0
    """Place of the data in the file, or the length of a created file, in bytes."""
    data: bytes = b""
    """The written bytes, or the new name."""


class _RecordingBuffer(mmap.mmap):
    """Anonymous memory that reports every slice assignment."""

    path: str
    record: Callable[[Event], None]

    def __new__(cls, path: str, size: int, record: Callable[[Event], None]) -> Self:
        self = super().__new__(cls, -1, size)
        self.path = path
        self.record = record
        return self

    def __setitem__(self, place: SupportsIndex | slice, value: Any) -> None:  # noqa: ANN401 (as mmap has it)
        super().__setitem__(place, value)
        if isinstance(place, slice):
            self.record(Event("write", self.path, place.indices(len(self))[0], bytes(value)))
        else:
            self.record(Event("write", self.path, place.__index__(), bytes((value,))))


class RecordingFiles(MemoryFiles):
    """Files in memory with a trace of all their changes, in order. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[Event] = []

    def _new_buffer(self, path: str, size: int) -> mmap.mmap:
        return _RecordingBuffer(path, size, self.trace.append)

    def create(self, path: str, size: int, *, keep_descriptor: bool = False) -> File:
        with self._guard:
            file = super().create(path, size, keep_descriptor=keep_descriptor)
            self.trace.append(Event("create", path, size))
            return file

    def flush(self, file: File) -> None:
        self.trace.append(Event("flush", file.path))

    def flush_folder(self, path: str) -> None:
        self.trace.append(Event("flush_folder", path))

    def make_folder(self, path: str) -> None:
        if not self.is_folder(path):
            super().make_folder(path)
            self.trace.append(Event("make_folder", path))

    def delete(self, path: str) -> None:
        with self._guard:
            super().delete(path)
            self.trace.append(Event("delete", path))

    def rename(self, old: str, new: str) -> None:
        with self._guard:
            super().rename(old, new)
            self.trace.append(Event("rename", old, 0, os.fsencode(new)))

    def link(self, old: str, new: str) -> None:
        with self._guard:
            super().link(old, new)
            self.trace.append(Event("link", old, 0, os.fsencode(new)))

    def break_links(self, path: str) -> bool:
        with self._guard:
            replaced = super().break_links(path)
            if replaced:
                self.trace.append(Event("replace", path, 0, self.read(path)))
            return replaced

    def write(self, path: str, data: bytes) -> None:
        with self._guard:
            super().write(path, data)
            self.trace.append(Event("replace", path, 0, data))


class FailingFiles:
    """Passes every call on to other files, except those that should fail. Thread-safe.

    ``fail(call, number)`` makes the ``number``-th later call of that name raise, once.
    """

    is_shared = False

    def __init__(self, files: Files) -> None:
        self._files = files
        self._guard = Lock()
        self._due: dict[tuple[str, int], int] = {}
        self.calls: Counter[str] = Counter()
        """Number of calls by name."""

    def fail(self, call: str, number: int = 1, code: int = errno.ENOSPC) -> None:
        """Make a later call fail with the error ``code``."""
        with self._guard:
            self._due[call, self.calls[call] + number] = code

    def _called(self, call: str, path: str) -> None:
        with self._guard:
            self.calls[call] += 1
            code = self._due.pop((call, self.calls[call]), None)
        if code is not None:
            raise StoreIOError(call, path, OSError(code, os.strerror(code)))

    def open(self, path: str, *, writable: bool = False, keep_descriptor: bool = False) -> File:
        self._called("open", path)
        return self._files.open(path, writable=writable, keep_descriptor=keep_descriptor)

    def create(self, path: str, size: int, *, keep_descriptor: bool = False) -> File:
        self._called("create", path)
        return self._files.create(path, size, keep_descriptor=keep_descriptor)

    def reserve(self, file: File, begin: int, end: int) -> None:
        self._called("reserve", file.path)
        self._files.reserve(file, begin, end)

    def touch(self, file: File, begin: int, end: int) -> None:
        self._files.touch(file, begin, end)

    def put(self, file: File, at: int, data: bytes | bytearray) -> None:
        self._called("put", file.path)
        self._files.put(file, at, data)

    def no_read_ahead(self, file: File, begin: int, end: int) -> None:
        self._files.no_read_ahead(file, begin, end)

    def unmap(self, file: File, begin: int, end: int) -> None:
        self._files.unmap(file, begin, end)

    def flush(self, file: File) -> None:
        try:
            self._called("flush", file.path)
        except StoreIOError:
            if isinstance(self._files, RecordingFiles):
                self._files.trace.append(Event("give_up", file.path))
            raise
        self._files.flush(file)

    def flush_path(self, path: str) -> None:
        self.flush(self.open(path, writable=True))

    def flush_folder(self, path: str) -> None:
        self._called("flush_folder", path)
        self._files.flush_folder(path)

    def list(self, path: str) -> list[FolderEntry]:
        self._called("list", path)
        return self._files.list(path)

    def names(self, path: str) -> tuple[str, ...]:
        self._called("names", path)
        return self._files.names(path)

    def size(self, path: str) -> int | None:
        return self._files.size(path)

    def flush_all(self, path: str) -> bool:
        return self._files.flush_all(path)

    def data_end(self, file: File, begin: int) -> int:
        return self._files.data_end(file, begin)

    def copy_times(self, source: str, target: str) -> None:
        self._called("copy_times", target)
        self._files.copy_times(source, target)

    def is_folder(self, path: str) -> bool:
        return self._files.is_folder(path)

    def make_folder(self, path: str) -> None:
        self._called("make_folder", path)
        self._files.make_folder(path)

    def delete(self, path: str) -> None:
        self._called("delete", path)
        self._files.delete(path)

    def rename(self, old: str, new: str) -> None:
        self._called("rename", old)
        self._files.rename(old, new)

    def link(self, old: str, new: str) -> None:
        self._called("link", old)
        self._files.link(old, new)

    def is_linked(self, path: str) -> bool:
        return self._files.is_linked(path)

    def break_links(self, path: str) -> bool:
        self._called("break_links", path)
        return self._files.break_links(path)

    def read(self, path: str, limit: int = 64 << 20) -> bytes:
        self._called("read", path)
        return self._files.read(path, limit)

    def read_used(self, path: str, limit: int) -> bytes | None:
        self._called("read_used", path)
        return self._files.read_used(path, limit)

    def read_sole_file(self, folder: str, size: int, limit: int) -> tuple[str, bytes] | None:
        self._called("read_sole_file", folder)
        return self._files.read_sole_file(folder, size, limit)

    def overwrite(self, path: str, at: int, data: bytes) -> None:
        self._called("overwrite", path)
        self._files.overwrite(path, at, data)

    def read_at(self, path: str, at: int, size: int) -> bytes:
        self._called("read_at", path)
        return self._files.read_at(path, at, size)

    def write(self, path: str, data: bytes) -> None:
        self._called("write", path)
        self._files.write(path, data)

    def lock(self, path: str) -> FileLock:
        self._called("lock", path)
        return self._files.lock(path)

    def lock_holder(self, path: str) -> str | None:
        return self._files.lock_holder(path)

    def used_ratio(self, path: str) -> float:
        self._called("used_ratio", path)
        return self._files.used_ratio(path)
