"""Acknowledge what has reached the device: group commit, acknowledgements that follow, and a sticky failure.

One flush serves all waiters: the first flushes for all that was appended so far, the others wait for their turn, and
the first of those whose message came later flushes next. After a failed flush the kernel may have dropped what it could
not write and call the next flush good, so nothing is acknowledged until the store is reopened. Mirrors 4.9.4's
``GroupCommitService`` and ``FlushRealTimeService``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Final, Generic, Protocol, TypeVar

from librmq.errors import FlushFailedError, StoreClosedError, StoreIOError
from librmq.runtime.critical import critical

__all__ = ["Acknowledgement", "GroupCommit", "flush_all"]

_T = TypeVar("_T")
_F = TypeVar("_F", bound="Flushable")

_MANY: Final = 16
_AT_A_TIME: Final = 8


class Flushable(Protocol):
    """What can be flushed, and has a folder of its own."""

    @property
    def folder(self) -> str: ...

    def flush(self) -> None: ...


def flush_all(parts: set[_F]) -> None:
    """Flush all of ``parts`` by folder, some side by side where they are many: the device takes them together.

    Those that are flushed are taken out of ``parts``; raises what the first that fails raises.
    """

    def flush(part: _F) -> None:
        part.flush()
        parts.discard(part)

    ordered = sorted(parts, key=lambda part: part.folder)
    if len(ordered) >= _MANY:
        begun: list[Future[None]] = []
        with ThreadPoolExecutor(_AT_A_TIME, "librmq-flush") as pool:
            with suppress(RuntimeError):  # no thread starts any more once the interpreter calls exit handlers
                begun.extend(pool.submit(flush, part) for part in ordered)
            for done in begun:
                done.result()
        ordered = ordered[len(begun) :]
    for part in ordered:
        flush(part)


class GroupCommit:
    """Flushes the log on behalf of many. Thread-safe.

    Waiters queue in FIFO order; the first one flushes and wakes the next. A waiter whose message has been flushed
    wakes the next in turn. So no waiter is woken too early, and by the time one has to flush, those before it have had
    the time to append again.
    """

    def __init__(self, flush: Callable[[], int], flushed: int, on_failure: Callable[[], None]) -> None:
        """``flush()`` returns up to which physical offset the log has reached the device; ``flushed`` is where it has.

        ``on_failure()`` is called once, when a flush has failed.
        """
        self.flushed = flushed
        """Below this physical offset everything has reached the device."""
        self.failure: StoreIOError | None = None
        """The first flush that failed; nothing unflushed is acknowledged after it."""
        self._flush = flush
        self._on_failure = on_failure
        self._guard = threading.Lock()  # of what follows
        self._row: deque[threading.Lock] = deque()  # the places; the first has its turn, the others are held until then
        self._stopped: str | None = None

    def reach(self, physical_offset: int) -> None:
        """Return when everything below ``physical_offset`` has reached the device, flushing unless another caller does.

        `FlushFailedError` if that will never be known, `StoreClosedError` after `stop`.
        """
        if self.flushed >= physical_offset:
            return
        self.check()
        self._in_turn(lambda: self._lead(physical_offset))
        if self.flushed < physical_offset:
            self.check()

    def _lead(self, physical_offset: int) -> None:
        """Flush, unless a caller before has."""
        if self.flushed < physical_offset:
            self.check()
            try:
                self.flushed = max(self.flushed, self._flush())
            except StoreIOError as error:
                self.failure = error
                self._on_failure()

    def _in_turn(self, act: Callable[[], None]) -> None:
        """Call ``act`` when it is this caller's turn, in the order of the calls. Ctrl-C waits as long."""
        mine = threading.Lock()
        mine.acquire()
        with critical:
            with self._guard:
                self._row.append(mine)
                is_first = self._row[0] is mine
            if not is_first:
                mine.acquire()  # until the one before lets go of it
            try:
                act()
            finally:
                self._leave()

    def _leave(self) -> None:
        """Give up the first place, and let the next caller have its turn."""
        with self._guard:
            self._row.popleft()
            if self._row:
                self._row[0].release()

    def check(self) -> None:
        """`FlushFailedError` if a flush has failed, `StoreClosedError` after `stop`."""
        if self.failure is not None:
            raise FlushFailedError(self.failure) from self.failure
        if self._stopped is not None:
            raise StoreClosedError(self._stopped)

    def stop(self, why: str) -> None:
        """Flush no more, since the log is let go: what has not reached the device by now is never said to have.

        Returns when a flush that is under way has ended.
        """
        self._stopped = why
        self._in_turn(lambda: None)

    def forget(self, why: str) -> None:
        """`stop` in a child process after a fork, where no thread holds what this waits for."""
        self._stopped = why


class Acknowledgement(Generic[_T]):
    """What a pipelined append returns at once: ``result`` is known, its durability follows.

    Thread-safe. Acknowledgements come in the order of the appends, since one watermark decides them all.
    """

    __slots__ = ("_commit", "_end", "result")

    def __init__(self, result: _T, commit: GroupCommit, end: int) -> None:
        self.result = result
        """Where the message went."""
        self._commit = commit
        self._end = end

    @property
    def done(self) -> bool:
        """Whether the message has reached the device."""
        return self._commit.flushed >= self._end

    def wait(self) -> _T:
        """Return ``result`` when the message has reached the device; `FlushFailedError` if that will never be known."""
        self._commit.reach(self._end)
        return self.result
