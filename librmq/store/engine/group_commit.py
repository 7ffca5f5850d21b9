"""Group commit: one flush for many waiters, acknowledgements that complete later, and a sticky failure.

The first waiter flushes everything appended so far, and the others wait for their turn. The first waiter whose message
came later flushes next. After a failed flush the kernel can drop the unwritten pages and report success for the next
flush. So nothing is acknowledged until the store is reopened. Mirrors 4.9.4's ``GroupCommitService`` and
``FlushRealTimeService``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Final, Generic, Protocol, TypeVar

from librmq.errors import FlushFailedError, StoreClosedError, StoreIOError
from librmq.runtime.locks import Lock, critical

_T = TypeVar("_T")
_F = TypeVar("_F", bound="Flushable")

_MANY: Final = 16
_AT_A_TIME: Final = 8


class Flushable(Protocol):
    """A part of a store that can be flushed and has a folder of its own."""

    @property
    def folder(self) -> str:
        """Return the folder of its files."""

    def flush(self) -> None:
        """Write what is in memory to the device."""


def flush_all(parts: set[_F]) -> None:
    """Flush all of ``parts`` by folder, several at once if they are many, because the device accepts them together.

    Flushed parts are removed from ``parts``. The error of the first failure is raised.
    """

    def flush(part: _F) -> None:
        part.flush()
        parts.discard(part)

    ordered = sorted(parts, key=lambda part: part.folder)
    if len(ordered) >= _MANY:
        futures: list[Future[None]] = []
        with ThreadPoolExecutor(_AT_A_TIME, "librmq-flush") as pool:
            with suppress(RuntimeError):  # the interpreter starts no thread while it calls exit handlers
                futures.extend(pool.submit(flush, part) for part in ordered)
            for future in futures:
                future.result()
        ordered = ordered[len(futures) :]
    for part in ordered:
        flush(part)


class GroupCommit:
    """Shared flushes of the log. Thread-safe.

    Waiters queue in FIFO order; the first one flushes and wakes the next. A waiter whose message has been flushed wakes
    the next in turn. So no waiter wakes too early. When a waiter has to flush, those before it have had time to append
    again.
    """

    def __init__(self, flush: Callable[[], int], flushed: int, on_failure: Callable[[], None]) -> None:
        """``flush()`` flushes the log and returns the physical offset up to which it is on the device, now ``flushed``.

        ``on_failure()`` is called once, when a flush has failed.
        """
        self.flushed = flushed
        """Physical offset below which everything is on the device."""
        self.failure: StoreIOError | None = None
        """The first flush that failed; nothing unflushed is acknowledged after it."""
        self._flush = flush
        self._on_failure = on_failure
        self._guard = Lock()  # protects the following fields
        self._waiters: deque[Lock] = deque()  # the first has its turn, the others are held
        self._stopped: str | None = None

    def reach(self, physical_offset: int) -> None:
        """Wait until everything below ``physical_offset`` is on the device, and flush unless another caller does.

        Raises:
            FlushFailedError: A flush has failed.
            StoreClosedError: `stop` was called.
        """
        if self.flushed >= physical_offset:
            return
        self.check()
        self._in_turn(lambda: self._flush_up_to(physical_offset))
        if self.flushed < physical_offset:
            self.check()

    def _flush_up_to(self, physical_offset: int) -> None:
        """Flush, unless an earlier caller has."""
        if self.flushed < physical_offset:
            self.check()
            try:
                self.flushed = max(self.flushed, self._flush())
            except StoreIOError as error:
                self.failure = error
                self._on_failure()

    def _in_turn(self, act: Callable[[], None]) -> None:
        """Call ``act`` at this caller's turn, in the order of the calls. Ctrl-C waits that long.

        Another thread can throw an exception into this one at any moment, as libraries for time limits do. One that
        comes at the begin of `_pass_turn` would keep the place, so the call is repeated from here, where none can come.
        """
        turn = Lock()
        turn.acquire()
        with critical:
            try:
                with self._guard:
                    self._waiters.append(turn)
                    is_first = self._waiters[0] is turn
                if not is_first:
                    turn.acquire()  # until it is the first
                act()
            finally:
                thrown: BaseException | None = None
                while True:
                    try:
                        self._pass_turn(turn)
                        break
                    except BaseException as error:
                        thrown = error
                if thrown is not None:
                    raise thrown

    def _pass_turn(self, turn: Lock) -> None:
        """Give up a place and wake the first caller; a second call does nothing more."""
        with self._guard:
            if turn in self._waiters:
                self._waiters.remove(turn)
            if self._waiters and self._waiters[0].locked():  # it waits, or has its turn and waits no more
                self._waiters[0].release()

    def check(self) -> None:
        """Raise `FlushFailedError` if a flush has failed, `StoreClosedError` after `stop`."""
        if self.failure is not None:
            raise FlushFailedError(self.failure) from self.failure
        if self._stopped is not None:
            raise StoreClosedError(self._stopped)

    def stop(self, why: str) -> None:
        """Flush no more, because the log is released; later nothing is acknowledged that is not on the device now.

        Waits until a running flush has ended.
        """
        self._stopped = why
        self._in_turn(lambda: None)

    def stop_after_fork(self, why: str) -> None:
        """Stop in a child process after a fork, where no thread releases the locks."""
        self._stopped = why


class Acknowledgement(Generic[_T]):
    """The acknowledgement of a pipelined append: ``result`` is known immediately, durability follows later.

    Thread-safe. Acknowledgements come in the order of the appends, because one watermark decides them all.
    """

    __slots__ = ("_commit", "_end", "result")

    def __init__(self, result: _T, commit: GroupCommit, end: int) -> None:
        self.result = result
        """The place of the message."""
        self._commit = commit
        self._end = end

    @property
    def done(self) -> bool:
        """Whether the message has reached the device."""
        return self._commit.flushed >= self._end

    def wait(self) -> _T:
        """Wait until the message is on the device, and return ``result``.

        Raises:
            FlushFailedError: A flush has failed.
        """
        self._commit.reach(self._end)
        return self.result
