"""The lock of an open store: appends and every other change of its parts wait for it."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Final

from librmq.clock import Clock
from librmq.errors import StoreError
from librmq.runtime.locks import Lock, RLock, critical

CTRL_C_WAITS_S: Final = 0.05
"""Seconds that a wait for the lock may delay Ctrl-C."""
_PAUSE_S: Final = 0.00005
_PAUSES: Final = 16
_THREADS_KEPT: Final = 32


class AppendLock:
    """A lock that a signal handler can't wait for while its own thread holds it. Thread-safe.

    Code that takes ``mutex`` outside a critical block calls `check_reentry` before, and has this object in a local
    variable ``lock_holder`` while it holds it. As a context manager it is taken for a deletion by retention.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.make_locks()

    def make_locks(self) -> None:
        """Make new locks in a child process after a fork, because threads of the parent may hold the old ones."""
        self.mutex = Lock()
        self.flushing = RLock()
        """What a flush holds, and what replaces the parts that it flushes; taken before ``mutex``."""
        self._deleting = False
        self._never = threading.Event()
        self._last_thread = threading.get_ident()
        self._threads: set[int] = set()
        self.crowd = 0
        """Number of the next appends that make a pause, because several threads append."""

    def check_reentry(self) -> None:
        """Refuse a call of a signal handler that has interrupted an append, because it would wait for its own thread.

        Raises:
            StoreError: The call is such a handler's.
        """
        if not self.mutex.locked() or threading.get_ident() != threading.main_thread().ident:
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if "lock_holder" in frame.f_code.co_varnames and frame.f_locals.get("lock_holder") is self:
                raise StoreError(
                    f"a signal handler called the store that it interrupted in {frame.f_code.co_name}, and would wait "
                    f"for itself forever: let the handler record the signal, and call the store after it has returned"
                )
            frame = frame.f_back

    def yield_to_waiters(self) -> None:
        """Check for reentry, and give other threads the interpreter before the caller waits for ``mutex``.

        A thread that waits inside ``mutex`` owns it as soon as it is released, long before it gets the interpreter. The
        releasing thread then waits at its next append, and so on: threads change places at each message. `count_turn`
        notices that, and a pause outside of ``mutex`` ends it.
        """
        self.check_reentry()
        self.crowd = max(self.crowd - 1, 0)
        for _ in range(_PAUSES):
            self._clock.wait(self._never, _PAUSE_S)
            if not self.mutex.locked():
                break

    def count_turn(self) -> None:
        """Note which thread appends; called now and then under the lock."""
        thread, threads = threading.get_ident(), self._threads
        if thread == self._last_thread:
            return
        self._last_thread = thread
        if len(threads) >= _THREADS_KEPT:
            threads.clear()
        threads.add(thread)
        self.crowd = len(threads)

    def is_writing(self) -> bool:
        """Return whether a call appends at this moment; a deletion by retention does not count."""
        return self.mutex.locked() and not self._deleting

    def is_free_within(self, seconds: float) -> bool:
        """Wait until no call appends, or for ``seconds``; return whether none did.

        A pause of the process does not count, because the other call was paused too.
        """
        while True:
            step_s = min(seconds, CTRL_C_WAITS_S)
            with critical:  # a lock that Ctrl-C takes from view is never given back
                if self.mutex.acquire(timeout=step_s):
                    self.mutex.release()
                    return True
            seconds -= step_s
            if seconds <= 0:
                return False

    def __enter__(self) -> None:
        self.mutex.acquire()
        self._deleting = True

    def __exit__(self, *_: object) -> None:
        self._deleting = False
        self.mutex.release()
