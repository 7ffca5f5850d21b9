"""File seams for tests: one that records what a store does, one that fails, one that waits, and disks without power.

A `CrashImages` computes from the trace of `RecordingFiles` which contents a disk can have::

    written and flushed          present
    written since the last flush each sector (512 bytes) or page (4,096) in its state after any write since the last
                                 flush, independently of the others; the last write can be there in part
    ... when a flush failed      the same, whatever is flushed later: the kernel drops what it could not write
    the length of a file         0 until its first flush, or the created length
    names made, deleted, renamed each possibly, until the folder is flushed; also the folder's own name
    `Files.write`                the old file or the new one until it returns, then the new one

A sector is written as a whole; a running write is there in whole words (8 bytes). This module does not depend on
stores: it works for the trace of anything that writes through `librmq.files`.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self, SupportsIndex

from librmq.errors import StoreIOError
from librmq.files._memory import MemoryFiles
from librmq.files.interface import File, Files, is_folder
from librmq.runtime.locks import Lock


class Event(NamedTuple):
    """One change of a file.

    ``call`` is ``create`` (``offset`` is the length), ``write`` (``data`` at ``offset`` of the buffer), ``replace``
    (the whole file), ``flush`` (from ``offset`` to the number in ``data``, or all), ``give_up`` (a flush failed, and
    its unwritten data counts as flushed), ``flush_folder``, ``make_folder``, ``rename`` and ``link`` (``data`` is the
    new name) or ``delete``.
    """

    call: str
    """What was done."""
    path: str
    """Path of the file or folder."""
    offset: int = 0
    """Place of the data in the file, or the length of a created file, in bytes."""
    data: bytes = b""
    """The written bytes, or the new name."""


_WAIT_S: Final = 60.0


class _RecordingBuffer(mmap.mmap):
    """Anonymous memory that reports every slice assignment."""

    path: str
    record: Callable[[Event], None]

    def __new__(cls, path: str, size: int, record: Callable[[Event], None]) -> Self:
        self = super().__new__(cls, -1, size)
        self.path = path
        self.record = record
        return self

    def __setitem__(self, place: SupportsIndex | slice, value: Any) -> None:
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

    def flush(self, file: File, begin: int = 0, end: int | None = None) -> None:
        part = b"" if end is None else end.to_bytes(8)
        self.trace.append(Event("flush", file.path, begin, part))

    def flush_folder(self, path: str) -> None:
        self.trace.append(Event("flush_folder", path))

    def make_folder(self, path: str) -> None:
        if not is_folder(self, path):
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

    def write(self, path: str, data: bytes | Iterable[bytes]) -> None:
        content = data if isinstance(data, bytes) else b"".join(data)
        with self._guard:
            super().write(path, content)
            self.trace.append(Event("replace", path, 0, content))


def on_a_disk(folder: str) -> RecordingFiles:
    """Return files with a folder that a power failure does not lose."""
    files = RecordingFiles()
    files.make_folder(folder)
    files.flush_folder("/")
    return files


class GatedFiles(MemoryFiles):
    """Files whose flushes wait until the gate is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.come, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def flush(self, file: File, begin: int = 0, end: int | None = None) -> None:
        self.come.set()
        assert self.gate.wait(_WAIT_S)


def _passed_on(call: str, *, can_fail: bool = True) -> Any:
    """Return the method of `FailingFiles` that passes a call on."""

    def pass_on(self: FailingFiles, place: File | str, *arguments: object, **settings: object) -> object:
        if can_fail:
            self._called(call, place if isinstance(place, str) else place.path)
        return getattr(self._files, call)(place, *arguments, **settings)

    return pass_on


class FailingFiles:
    """Passes every call on to other files, except those that should fail. Thread-safe.

    ``fail(call, number)`` makes the ``number``-th later call of that name raise, once.
    """

    is_shared = is_temporary = False

    def __init__(self, files: Files) -> None:
        self._files = files
        self._guard = Lock()
        self._due: dict[tuple[str, int], int] = {}
        self.calls: Counter[str] = Counter()
        """Number of calls by name."""
        self.failed_within: frozenset[str] = frozenset()
        """The names of the functions around the last call that has failed."""

    def fail(self, call: str, number: int = 1, code: int = errno.ENOSPC) -> None:
        """Make a later call fail with the error ``code``."""
        with self._guard:
            self._due[call, self.calls[call] + number] = code

    def _called(self, call: str, path: str) -> None:
        with self._guard:
            self.calls[call] += 1
            code = self._due.pop((call, self.calls[call]), None)
        if code is not None:
            self.failed_within = frozenset(frame.f_code.co_name for frame, _ in traceback.walk_stack(None))
            raise StoreIOError(call, path, OSError(code, os.strerror(code)))

    open = _passed_on("open")
    create = _passed_on("create")
    make_files = _passed_on("make_files")
    reserve = _passed_on("reserve")
    flush_folder = _passed_on("flush_folder")
    list = _passed_on("list")
    names = _passed_on("names")
    status = _passed_on("status", can_fail=False)
    make_folder = _passed_on("make_folder")
    delete = _passed_on("delete")
    rename = _passed_on("rename")
    link = _passed_on("link")
    read = _passed_on("read")
    read_used = _passed_on("read_used")
    overwrite = _passed_on("overwrite")
    write = _passed_on("write")
    lock = _passed_on("lock")
    lock_holder = _passed_on("lock_holder", can_fail=False)
    used_ratio = _passed_on("used_ratio")

    def flush(self, file: File, begin: int = 0, end: int | None = None) -> None:
        try:
            self._called("flush", file.path)
        except StoreIOError:
            if isinstance(self._files, RecordingFiles):
                self._files.trace.append(Event("give_up", file.path))
            raise
        self._files.flush(file, begin, end)


# ---- contents of a disk after a power failure

SECTOR: Final = 512
PAGE: Final = 4096
_WORD: Final = 8


@dataclass(frozen=True)
class Image:
    """Content of the disk after a crash between two events of the trace; ``seed`` and ``crash_point`` reproduce it."""

    seed: int | str
    """Seed of the random choices."""
    crash_point: int
    """Number of events that had ended; the next one may have been running."""
    contents: Mapping[str, bytes | None]
    """Bytes by path, None for a folder; parents come first."""
    choices: tuple[str, ...]
    """A line for each unflushed change that reached the disk."""

    def __str__(self) -> str:
        lines = "".join(f"\n  {choice}" for choice in self.choices)
        return f"image of seed {self.seed!r} at crash point {self.crash_point}:{lines or ' nothing was unflushed'}"

    def write_to(self, files: Files) -> None:
        """Write the image to ``files``, in which its paths must not exist."""
        for path, data in self.contents.items():
            if data is None:
                files.make_folder(path)
        for path, data in self.contents.items():
            if data is not None:
                files.write(path, data)

    def files(self) -> MemoryFiles:
        """Return the image in memory."""
        files = MemoryFiles()
        self.write_to(files)
        return files


class _File:
    """Bytes on the device, and the writes since the last flush."""

    def __init__(self, data: bytearray, *, sized: bool) -> None:
        self.data = data
        self.sized = sized
        self.writes: list[tuple[int, bytes]] = []
        self.given_up: dict[int, list[tuple[int, bytes]]] = {}
        """Pages that a failed flush dropped: they are never written unless they change again."""
        self.ended = 0
        """How many of the writes came before a flush of another part, so that none of them is running."""

    def write(self, at: int, data: bytes) -> None:
        if not data:
            return
        for page in _pages(at, data) if self.given_up else ():
            self.writes += self.given_up.pop(page, [])
        if self.writes or self.data[at : at + len(data)] != data:
            self.writes.append((at, data))

    def give_up(self) -> None:
        for at, data in self.writes:
            for page in _pages(at, data):
                low, high = max(at, page * PAGE), min(at + len(data), (page + 1) * PAGE)
                self.given_up.setdefault(page, []).append((low, data[low - at : high - at]))
        self.writes.clear()
        self.ended = 0

    def unflushed(self) -> list[tuple[int, bytes]]:
        """Writes that can be on the device or not, in order."""
        return [write for page in self.given_up.values() for write in page] + self.writes

    def flush(self, begin: int, end: int) -> None:
        begin, end, writes = begin // PAGE * PAGE, -(-end // PAGE) * PAGE, self.writes
        self.writes = []
        for at, data in writes:
            low, high = min(max(at, begin), at + len(data)), max(min(at + len(data), end), at)
            if low >= high:
                self.writes.append((at, data))
                continue
            self.data[low:high] = data[low - at : high - at]
            self.writes += [
                (place, part) for place, part in ((at, data[: low - at]), (high, data[high - at :])) if part
            ]
        self.ended = len(self.writes)
        self.sized = True


class _Folder:
    """Names on the device, and changes of names since the last flush."""

    def __init__(self) -> None:
        self.names: dict[str, _Node] = {}
        self.now: dict[str, _Node] = {}
        self.changes: list[_Change] = []

    def change(self, *changes: tuple[str, _Node | None]) -> None:
        """Change names; the changes of one call reach the device together."""
        self.changes.append(changes)
        for name, node in changes:
            _set(self.now, name, node)

    def flush(self) -> None:
        self.names = dict(self.now)
        self.changes.clear()


_Node = _File | _Folder
_Change = tuple[tuple[str, _Node | None], ...]


def _pages(at: int, data: bytes) -> range:
    return range(at // PAGE, (at + len(data) - 1) // PAGE + 1)


def _names(path: str) -> list[str]:
    return [name for name in path.split(os.sep) if name not in ("", os.curdir)]


def _set(names: dict[str, _Node], name: str, node: _Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


class _Disk:
    """A file system that records which of its content is on the device."""

    def __init__(self, contents: Mapping[str, bytes | None]) -> None:
        self.root = _Folder()
        for path, data in contents.items():
            names = _names(path)
            folder = self._folder(names if data is None else names[:-1], make=True)
            if data is not None:
                folder.change((names[-1], _File(bytearray(data), sized=True)))
        self._settle(self.root)

    def _settle(self, folder: _Folder) -> None:
        folder.flush()
        for node in folder.now.values():
            if isinstance(node, _Folder):
                self._settle(node)

    def _folder(self, names: Sequence[str], *, make: bool = False) -> _Folder:
        folder = self.root
        for name in names:
            node = folder.now.get(name)
            if node is None and make:
                node = _Folder()
                folder.change((name, node))
            assert isinstance(node, _Folder), names
            folder = node
        return folder

    def _place(self, path: str) -> tuple[_Folder, str]:
        *above, name = _names(path)
        return self._folder(above), name

    def apply(self, event: Event) -> None:  # noqa: C901 (a case for each call of the seam)
        call, path, at, data = event
        names = _names(path)
        if call == "make_folder":
            self._folder(names, make=True)
            return
        if call == "flush_folder":
            self._folder(names).flush()
            return
        folder, name = self._folder(names[:-1]), names[-1]
        node = folder.now.get(name)
        if call == "write":
            if isinstance(node, _File):  # otherwise it is deleted, and its holder can continue writing
                node.write(at, data)
        elif call == "flush":
            if isinstance(node, _File):
                node.flush(at, int.from_bytes(data) if data else len(node.data))
        elif call == "give_up":
            if isinstance(node, _File):
                node.give_up()
        elif call == "create":
            folder.change((name, _File(bytearray(at), sized=False)))
        elif call == "delete":
            if node is not None:
                folder.change((name, None))
        elif call == "replace":
            self.replace(folder, name, data)
        else:
            other_folder, other = self._place(os.fsdecode(data))
            assert node is not None, event
            if call == "link":
                other_folder.change((other, node))
            elif other_folder is folder:
                folder.change((name, None), (other, node))
            else:
                raise ValueError(f"renamed from folder to folder: {event}")

    @staticmethod
    def replace(folder: _Folder, name: str, data: bytes) -> None:
        """Replace a file on the device, with all earlier changes of the folder."""
        folder.change((name, _File(bytearray(data), sized=True)))
        folder.flush()


@dataclass
class _Choosing:
    """One way in which unflushed changes can have reached the device."""

    rng: random.Random
    contents: dict[str, bytes | None] = field(default_factory=dict)
    choices: list[str] = field(default_factory=list)
    by_file: dict[_File, bytes] = field(default_factory=dict)
    """One choice for each file, also if it has several names."""

    def __post_init__(self) -> None:
        rng = self.rng
        # From nothing to everything; most failures are in between.
        self.written = rng.choice((0.0, 0.1, 0.5, 0.5, 0.9, 1.0))
        self.named = rng.choice((0.0, 0.5, 0.9, 1.0, 1.0))
        self.older = rng.choice((0.0, 0.5))  # a sector may have been written before its last change
        self.unit = rng.choice((SECTOR, SECTOR, PAGE))
        self.torn = rng.random() < 0.5

    def folder(self, path: str, folder: _Folder) -> None:
        names = dict(folder.names)
        missing: set[str] = set()
        for changes in folder.changes:
            touched = {name for name, _ in changes}
            # A later change of a name is never there without the earlier ones.
            if missing & touched or self.rng.random() >= self.named:
                missing |= touched
                self.choices.append(f"{path or os.sep}: not there: {_describe(changes)}")
                continue
            if len(folder.changes) > 1:
                self.choices.append(f"{path or os.sep}: there: {_describe(changes)}")
            for name, node in changes:
                _set(names, name, node)
        for name, node in names.items():
            place = path + os.sep + name
            if isinstance(node, _Folder):
                self.contents[place] = None
                self.folder(place, node)
            else:
                self.contents[place] = self.file(place, node)

    def file(self, path: str, file: _File) -> bytes:
        if file not in self.by_file:
            self.by_file[file] = self._content(path, file)
        return self.by_file[file]

    def _content(self, path: str, file: _File) -> bytes:  # noqa: C901 (a case for each way of a crash)
        if not file.sized and self.rng.random() >= self.named:
            self.choices.append(f"{path}: of length 0")
            return b""
        writes = file.unflushed()
        if not writes:
            return bytes(file.data)
        count = len(writes)
        # For each sector, the number of its writes that reached it.
        seen: dict[int, int] = {}
        pages: dict[int, tuple[int, int, int]] = {}
        for at, data in writes:
            for sector in range(at // SECTOR, (at + len(data) - 1) // SECTOR + 1):
                if sector in seen:
                    continue
                if self.unit == SECTOR:
                    seen[sector] = self._seen(count)
                    continue
                page = sector * SECTOR // PAGE
                if page not in pages:
                    until = self._seen(count)
                    torn = self.rng.randrange(PAGE // SECTOR) if self.torn else PAGE // SECTOR
                    pages[page] = until, torn, self.rng.randint(0, until)
                until, torn, before = pages[page]
                seen[sector] = until if sector % (PAGE // SECTOR) < torn else before
        content = bytearray(file.data)
        for number, (at, data) in enumerate(writes):
            end = at + len(data)
            if number == count - 1 and self.torn and len(file.writes) > file.ended:  # it was running
                end = self.rng.choice((end, max(at, self.rng.randrange(at, end) // _WORD * _WORD)))
            for sector in range(at // SECTOR, (end - 1) // SECTOR + 1):
                if number < seen[sector]:
                    low, high = max(at, sector * SECTOR), min(end, (sector + 1) * SECTOR)
                    if low < high:
                        content[low:high] = data[low - at : high - at]
        self._note_sectors(path, seen, count)
        return bytes(content)

    def _seen(self, count: int) -> int:
        if self.rng.random() < self.written:
            return count
        return self.rng.randint(0, count) if self.rng.random() < self.older else 0

    def _note_sectors(self, path: str, seen: Mapping[int, int], count: int) -> None:
        parts = []
        for sector, until in sorted(seen.items()):
            if until < count:
                parts.append(f"{sector}" if not until else f"{sector} ({until})")
        lacking = f"without sectors (or with so many of {count} writes) {', '.join(parts)}" if parts else "whole"
        self.choices.append(f"{path}: {lacking}{', the last write perhaps in part' if self.torn else ''}")


def _describe(changes: _Change) -> str:
    return " and ".join(f"{name} {'deleted' if node is None else 'made'}" for name, node in changes)


def distinct(images: Iterable[Image]) -> Iterator[Image]:
    """Yield the images without those that have the contents of an earlier one, as a later crash often leaves them."""
    seen = set[frozenset[tuple[str, bytes | None]]]()
    for image in images:
        contents = frozenset(image.contents.items())
        if contents not in seen:
            seen.add(contents)
            yield image


class CrashImages:
    """Images of the disks that a crash during a trace can leave. Not thread-safe."""

    def __init__(self, trace: Sequence[Event], contents: Mapping[str, bytes | None] | None = None) -> None:
        """``contents`` is the device's content by path before the first event of ``trace``, by default empty."""
        self._trace = list(trace)
        self._begin = dict(contents or {})
        self._disk = _Disk(self._begin)
        self._applied = 0

    def __len__(self) -> int:
        """Return the number of crash points: before each event, and after the last."""
        return len(self._trace) + 1

    def image(self, seed: int | str, crash_point: int) -> Image:
        """Return one image of a crash after ``crash_point`` events; equal arguments return equal images.

        Calls with ascending crash points are the fastest.

        Raises:
            IndexError: There is no such crash point.
        """
        if not 0 <= crash_point <= len(self._trace):
            raise IndexError(f"crash_point: expected 0 to {len(self) - 1}, found {crash_point}")
        if crash_point < self._applied:
            self._disk, self._applied = _Disk(self._begin), 0
        while self._applied < crash_point:
            self._disk.apply(self._trace[self._applied])
            self._applied += 1
        choosing = _Choosing(random.Random(f"{seed}/{crash_point}"))
        choosing.folder("", self._disk.root)
        if crash_point < len(self._trace):
            self._under_way(self._trace[crash_point], choosing)
        return Image(seed, crash_point, choosing.contents, tuple(choosing.choices))

    def images(self, seed: int | str, count: int) -> Iterator[Image]:
        """Yield ``count`` images at random crash points, in ascending order."""
        rng = random.Random(f"{seed}")
        for number, crash_point in enumerate(sorted(rng.randrange(len(self)) for _ in range(count))):
            yield self.image(f"{seed}/{number}", crash_point)

    @staticmethod
    def _under_way(event: Event, choosing: _Choosing) -> None:
        """Replace a running replacement of a file by the new file, or leave the new file beside the old one."""
        call, path, _, data = event
        parent = os.path.dirname(path)
        if call != "replace" or (parent not in choosing.contents and parent != os.sep):
            return
        kind = choosing.rng.choice(("old", "beside", "new"))
        if kind == "new":
            choosing.contents[path] = data
            choosing.choices.append(f"{path}: the new one")
        elif kind == "beside":
            choosing.contents[path + ".tmp"] = data[: choosing.rng.randint(0, len(data))]
            choosing.choices.append(f"{path}: the old one, the new one beside it")
