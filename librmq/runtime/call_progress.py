"""Progress of a long call: how much it has done so far, for callers that show it.

::

    with watched(lambda done, total: print(done)):
        verify(path)                     # reports the log bytes that it has read, a MiB at a time
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TypeAlias

Watcher: TypeAlias = Callable[[int, int | None], object]
"""Receives the amount just done, and the total if the call knows it."""

_watcher: Final[ContextVar[Watcher | None]] = ContextVar("librmq_call_progress", default=None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Report the progress of calls inside the block, in the current thread or task, to ``watcher``."""
    before = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(before)


def advance(done: int, total: int | None = None) -> None:
    """Report that the amount ``done`` has just been completed, of ``total`` altogether."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(done, total)
