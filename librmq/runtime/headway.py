"""Headway of a long call: how much it has done so far, for a caller that shows it.

::

    with watched(lambda done, total: print(done)):
        verify(path)                     # reports the bytes of the log that it walks over, a MiB at a time
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TypeAlias

__all__ = ["advance", "watched"]

Watcher: TypeAlias = Callable[[int, int | None], object]
"""Gets the amount that was just done, and the whole amount if the call knows it."""

_watcher: Final[ContextVar[Watcher | None]] = ContextVar("librmq_headway", default=None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Report the headway of calls inside the block, in this thread or task, to ``watcher``."""
    before = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(before)


def advance(done: int, total: int | None = None) -> None:
    """Report that ``done`` more is done, of ``total`` in all."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(done, total)
