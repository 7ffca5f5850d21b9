"""Calls of the application's code that wait until its thread has released the locks of runners.

A logging handler, a subclass of `Metrics` or a notification can call librmq, and takes locks of its own. Another thread
can hold such a lock while it calls librmq, and wait for the lock of a runner. So none of these is called within that,
nor within another lock of librmq: code that logs under one takes it in a block of `calls_later`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from librmq.runtime.locks import Lock, if_free


class Outside:
    """The calls that wait for the release of one lock, in the order in which they came. Thread-safe."""

    def __init__(self, is_held: Callable[[], bool], run_later: Callable[[], object]) -> None:
        """``is_held()`` returns whether this thread has the lock; ``run_later()``, under it, has `run` called soon."""
        self._is_held, self._run_later = is_held, run_later
        self.calls: deque[Callable[[], object]] = deque()
        """Those that wait."""
        self._running = Lock()
        _all.append(weakref.ref(self, _all.remove))

    def takes(self, call: Callable[[], object]) -> bool:
        """Keep a call if this thread has the lock; return whether it does."""
        if not self._is_held():
            return False
        self.calls.append(call)
        self._run_later()
        return True

    def run(self) -> None:
        """Make the calls that wait, unless this thread has the lock or defers calls, or another thread makes them."""
        if self._is_held() or _thread.calls is not None:
            return
        for _ in if_free(self._running):
            try:
                while self.calls:
                    try:
                        self.calls.popleft()()
                    except Exception:
                        _log.exception("the application's code has failed")
            finally:
                self._running.release()
            break


_log: Final = logging.getLogger("librmq.runner")
_all: Final[list[weakref.ref[Outside]]] = []


class _Thread(threading.local):
    calls: list[Callable[[], object]] | None = None
    """What this thread calls at the end of `calls_later`."""


_thread: Final = _Thread()


@contextmanager
def calls_later() -> Iterator[None]:
    """Make the calls of the application's code that come up within the block at its end."""
    if _thread.calls is not None:
        yield
        return
    calls: list[Callable[[], object]] = []
    try:
        _thread.calls = calls  # here, because a signal's handler can raise at any line
        yield
    finally:
        _thread.calls = None
        for call in calls:
            call_outside(call)


def call_outside(call: Callable[[], object]) -> None:
    """Call the application's code: now, or as soon as this thread has released the locks of runners."""
    if _thread.calls is not None:
        _thread.calls.append(call)
        return
    for reference in list(_all):
        outside = reference()
        if outside is not None and outside.takes(call):
            return
    call()
