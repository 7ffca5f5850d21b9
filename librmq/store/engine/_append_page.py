"""The page through which processes that share a store append to one log, and the lock of its writers.

The owner of the store makes the page, and keeps in it what a peer needs to append by itself: where the log ends, up to
where a peer may write, and the next offset of each queue whose topic takes plain messages. Every process that appends
holds the lock of the page, a lock of the open file description by ``flock``. It ends with its process, so a killed
writer blocks no other, and it is never taken from a writer that lives, however long that is stopped: it would continue
to write.

::

    numbers   state, tail, room, end of the running write, and what the write replaces
    settings  JSON: the settings of the store that shape a record
    offsets   the next offset of each queue, 8 bytes each
    names     topic and id of each queue

A write sets `WRITING` first, then copies the record, sets the offset of the queue, and commits by the tail: one aligned
store of eight bytes. A process that takes the lock and finds `WRITING` set ends that write, whose writer has died.

The log is the truth: no opening trusts a page that it finds. It closes that page, so that no peer of a former owner
writes by it any more, and makes another.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import platform
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import get_ident
from typing import Any, Final

from librmq.clock import SystemClock
from librmq.commitlog import CommitLog
from librmq.errors import BrokerUnreachableError, CorruptionError, LostAnswerError, StoreError
from librmq.files.interface import SystemCall
from librmq.files.lock import lock_process
from librmq.files.regular import open_regular
from librmq.override import override
from librmq.runtime.locks import Appending, Event, Inherited, Lock

if sys.platform != "win32":
    import fcntl

    _TRY: Final = fcntl.LOCK_EX | fcntl.LOCK_NB
_MAGIC: Final = 0x6C696272_6D710001
_SETTINGS_AT: Final = 512
_OFFSETS_AT: Final = 4096
_MOST_QUEUES: Final = 4096
_NAMES_AT: Final = _OFFSETS_AT + 8 * _MOST_QUEUES
_NAME: Final = struct.Struct("=IB251s")
_SIZE: Final = _NAMES_AT + _NAME.size * _MOST_QUEUES

(
    MAGIC, STATE, TAIL, ROOM, WRITING, REPLACED, OFFSET, HOLDER, TAKES, EPOCH, QUEUES, ASLEEP, WISHED,
    BEGIN, FLUSHED,
) = range(15)  # fmt: skip
"""Places of the numbers: state, the log's end, how far peers may write, the end of
the running write (0: none, -1: the owner's), its queue and the offset that it replaces, the process that took the lock
last, how often it was taken, the number of times that the queues have changed, how many there are, whether the owner
waits to be woken, whether a peer wants to append, where the running write begins, and up to where the owner has flushed
for senders that wait for it (-1: a flush has failed)."""

CLOSED: Final = 0
"""State: nothing may be written by this page any more."""
IDLE: Final = 1
"""State: the owner appends alone, without this lock."""
OPEN: Final = 2
"""State: all append under the lock."""
BROKEN: Final = 3
"""State: the owner has died within a write, or a signal has interrupted it; only the owner can repair that."""

OWNERS: Final = -1
"""In place of the end of the running write: the owner writes."""

IS_ORDERED: Final = platform.machine() in ("x86_64", "AMD64")
"""Whether what another process has stored before the tail is seen with the tail, without the lock."""
_TRIES: Final = 64
_PAUSE_S: Final = 0.0002
_LONG_PAUSE_S: Final = 0.005
_HURRIED_S: Final = 0.05
"""Time that a caller waits for whom others wait."""
_UNSURE: Final = "the message is in the log, and may be stored"


class AppendPage(Appending):
    """A mapped page and its lock. Thread-safe, but for the numbers, which are read and changed under the lock.

    Code takes ``mutex``, then `take` in a ``try`` whose ``finally`` calls `release`.
    """

    def __init__(self, path: str, descriptor: int, place: str) -> None:
        """Map the page of an open file, whose descriptor this owns; ``place`` is its path at this moment."""
        self.path = path
        self._descriptor = descriptor
        # A mapping keeps a duplicate of its descriptor, also in a forked child, where that would keep the lock.
        mapped = open_regular(place, os.O_RDWR)
        try:
            if not os.path.sameopenfile(mapped, descriptor):
                raise FileNotFoundError(errno.ENOENT, "another owner has replaced the page", path)
            self._map = mmap.mmap(mapped, _SIZE)
        finally:
            os.close(mapped)
        self.numbers: memoryview = memoryview(self._map)[:_SETTINGS_AT].cast("q")
        self.offsets: memoryview = memoryview(self._map)[_OFFSETS_AT:_NAMES_AT].cast("q")
        self.mutex: Lock = Lock()
        """Keeps the threads of this process apart, which have one lock of the file together."""
        self.thread: int = 0
        """The thread of a peer that appends."""
        self.holds: bool = False
        """Whether this process has the lock of the file."""
        self._process = _process()
        self._stuck_at = -1
        """`TAKES` when this process last waited in vain."""
        self._never = Event()
        _pages.add(self)
        super().__init__()

    @classmethod
    def make(cls, path: str, settings: Mapping[str, Any]) -> AppendPage:
        """Make a page that is `IDLE`, in place of another one, which must be closed."""
        new = f"{path}.new"
        with suppress(FileNotFoundError):
            os.unlink(new)
        text = json.dumps(settings).encode()
        if len(text) > _OFFSETS_AT - _SETTINGS_AT - 4:
            raise StoreError(f"{path}: the settings of the store are too long to be shared")
        with SystemCall("share", path):
            descriptor = open_regular(new, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                os.ftruncate(descriptor, _SIZE)
                os.posix_fallocate(descriptor, 0, _NAMES_AT)  # a full disk would end a process that writes to it
                fcntl.flock(descriptor, _TRY)  # some file systems have no such locks
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                page = cls(path, descriptor, new)
            except BaseException:
                os.close(descriptor)
                os.unlink(new)
                raise
            page._map[_SETTINGS_AT : _SETTINGS_AT + 4 + len(text)] = len(text).to_bytes(4, "little") + text
            page.numbers[STATE], page.numbers[MAGIC] = IDLE, _MAGIC
            os.rename(new, path)
        return page

    @classmethod
    def open(cls, path: str) -> AppendPage | None:
        """Return the page of a file, None if there is none or it is none of this version.

        Raises:
            OSError: It can't be opened now.
        """
        try:
            descriptor = open_regular(path, os.O_RDWR)
        except (FileNotFoundError, CorruptionError):
            return None
        try:
            if os.fstat(descriptor).st_size != _SIZE:
                os.close(descriptor)
                return None
            page = cls(path, descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise
        if page.numbers[MAGIC] == _MAGIC:
            return page
        page.close()
        return None

    @property
    def settings(self) -> dict[str, Any]:
        """What the owner has given to `make`."""
        size = int.from_bytes(self._map[_SETTINGS_AT : _SETTINGS_AT + 4], "little")
        settings: dict[str, Any] = json.loads(self._map[_SETTINGS_AT + 4 : _SETTINGS_AT + 4 + size])
        return settings

    @override
    def is_held_here(self) -> bool:
        return self.thread == get_ident() and self.mutex.locked()

    def take(
        self,
        wait_s: float,
        wake: Callable[[], object] | None = None,
        is_hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take the lock of the file, with ``mutex`` held; call ``wake()`` before a wait.

        A caller for whom others wait, as ``is_hurried()`` says, waits a moment at most.

        Raises:
            BrokerUnreachableError: Another process has it, and did not release it while this process waited so long.
        """
        try:
            fcntl.flock(self._descriptor, _TRY)
        except BlockingIOError:
            self._wait(wait_s, wake, is_hurried=is_hurried())
        self.holds = True
        numbers = self.numbers
        numbers[HOLDER] = self._process
        numbers[TAKES] += 1

    def _wait(self, wait_s: float, wake: Callable[[], object] | None, *, is_hurried: bool) -> None:
        """Wait for the lock of the file, and take it."""
        clock = SystemClock()
        if is_hurried:
            wait_s = min(wait_s, _HURRIED_S)
        end = clock.monotonic() + wait_s
        for number in range(1 << 62):
            if number < _TRIES:
                os.sched_yield()
            else:
                if number == _TRIES and wake is not None:
                    wake()
                clock.wait(self._never, _PAUSE_S)
            with suppress(BlockingIOError):
                fcntl.flock(self._descriptor, _TRY)
                return
            takes = self.numbers[TAKES]
            # Only the first of several threads waits for a process that is stopped.
            if number >= _TRIES and (clock.monotonic() >= end or takes == self._stuck_at):
                self._stuck_at = self._stuck_at if is_hurried else takes
                raise BrokerUnreachableError(
                    f"{self.path}: {self._holder()} has written to the log for {wait_s:g} s: it is stopped, by Ctrl-Z "
                    "or a debugger, or waits for its disk: let it run again, or end it"
                )

    def _holder(self) -> str:
        """Describe the process that has the lock of the file: `HOLDER` is late if that was stopped as it took it."""
        number = lock_process(self.path, is_whole=True)
        return f"process {number}" if number else _described(self.numbers[HOLDER])

    def wait_for_flush(self, end: int, wait_s: float) -> bool:
        """Wait until the owner has flushed the log up to ``end``; return False if it can't.

        A look comes after an eighth of the time that has passed, so there are few.

        Raises:
            LostAnswerError: The owner has ended before.
            BrokerUnreachableError: It has not flushed within ``wait_s``.
        """
        numbers, clock = self.numbers, SystemClock()
        begin = clock.monotonic()
        while True:
            is_closed = numbers[STATE] == CLOSED  # before the look, because an owner that ends flushes first
            flushed = numbers[FLUSHED]
            if flushed < 0 or flushed >= end:
                return bool(flushed >= end)
            waited_s = clock.monotonic() - begin
            if is_closed:
                raise LostAnswerError(f"{self.path}: the owner of the store has ended before it flushed: {_UNSURE}")
            if waited_s >= wait_s:
                raise BrokerUnreachableError(
                    f"{self.path}: the owner of the store has not flushed within {wait_s:g} s: {_UNSURE}"
                )
            clock.wait(self._never, min(max(waited_s / 8, _PAUSE_S / 2), _LONG_PAUSE_S))

    def release(self) -> None:
        """Release the lock of the file; without it, do nothing."""
        self.holds = False  # before it is free: a signal can come in between, and what others write then is not ours
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    # ---- a write, under the lock

    def begin_write(self, number: int, room: int) -> None:
        """Note that a record for a queue is written behind the tail, and ends at ``room`` at the latest."""
        numbers = self.numbers
        numbers[BEGIN] = numbers[TAIL]
        numbers[REPLACED], numbers[OFFSET] = number, self.offsets[number]
        numbers[WRITING] = room

    def commit(self, number: int, next_offset: int, end: int) -> None:
        """Note that the record is there: the log ends behind it from now on."""
        numbers = self.numbers
        self.offsets[number] = next_offset
        numbers[TAIL] = end
        numbers[WRITING] = 0

    def end_write(self, log: CommitLog) -> None:
        """Commit a write that ended before its commit, if its record is whole, as a recovery does; else undo it."""
        numbers = self.numbers
        tail, end = numbers[TAIL], numbers[WRITING]
        if end == OWNERS:  # only its recovery knows which queues it was writing to
            numbers[STATE] = BROKEN
        elif tail == numbers[BEGIN]:
            log.continue_at(tail, end)
            record_end = log.keep_or_clear(tail, end, numbers[OFFSET])
            self.offsets[numbers[REPLACED]] = numbers[OFFSET] + (record_end > tail)
            numbers[TAIL] = record_end
        numbers[WRITING] = 0

    # ---- the queues, under the lock

    def add_queue(self, topic: str, queue_id: int, next_offset: int) -> int | None:
        """Add a queue and return its number; None if it has no room."""
        number, name = self.numbers[QUEUES], topic.encode()
        if number >= _MOST_QUEUES or len(name) > 251:
            return None
        place = _NAMES_AT + number * _NAME.size
        with SystemCall("share", self.path):
            os.posix_fallocate(self._descriptor, place, _NAME.size)
        self._map[place : place + _NAME.size] = _NAME.pack(queue_id, len(name), name)
        self.offsets[number] = next_offset
        self.numbers[QUEUES] = number + 1
        return int(number)

    def queue_at(self, number: int) -> tuple[str, int]:
        """Return topic and id of a queue."""
        queue_id, size, name = _NAME.unpack_from(self._map, _NAMES_AT + number * _NAME.size)
        return name[:size].decode(), queue_id

    def drop_queues(self) -> None:
        """Let no peer append until queues are added again."""
        self.numbers[EPOCH] += 1
        self.numbers[QUEUES] = 0

    def after_fork(self) -> None:
        """Close a forked child's copy: it would hold the lock of a parent that is killed."""
        self.mutex, self.thread, self.holds = Lock(), 0, False  # a thread of the parent may hold it
        self.close()

    @property
    def is_closed(self) -> bool:
        """Whether this process has closed the page, or inherited it."""
        return self._descriptor < 0

    def close(self) -> None:
        """Close this process's descriptor; the mapping ends with its last reference."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def unmap(self) -> None:
        """Release the mapping too, which has a descriptor of its own; this object's numbers stay as they are.

        A repetition, after a signal has interrupted the caller, does nothing.
        """
        self.numbers = memoryview(bytearray(self.numbers)).cast("q")
        self.offsets = self.numbers[:0]
        with suppress(AttributeError):
            del self._map


def _process() -> int:
    """Return this process's number, and that of the space of processes in which it is one."""
    with suppress(OSError):
        return (os.stat("/proc/self/ns/pid").st_ino & 0x7FFFFFFF) << 32 | os.getpid()
    return os.getpid()


def _described(process: int) -> str:
    current, number = _process(), process & 0xFFFFFFFF
    return f"process {number}" if current >> 32 == process >> 32 else f"a process of another container, {number} there,"


_pages: Final[Inherited[AppendPage]] = Inherited(AppendPage.after_fork)
