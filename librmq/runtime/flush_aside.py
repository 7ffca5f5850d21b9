"""Save progress behind a flush: some time after it changed, beside other turns, again after a failure.

Progress may be saved only when the device has what it vouches for. Its owner makes one `FlushAside` and says four
things: what has been reached, how to flush, how to note it, and how long to wait after a change::

    self._saver = FlushAside(
        "the relay's progress",
        flush=store.flush,                                   # waits for the disk; may run in another thread
        reached=lambda: self._next if self._next != self._saved else None,   # None: nothing to save
        note=self._note,                                     # takes what `reached` gave before the flush
        now_ms=store.clock.now_ms,
        save_every_s=10,
        aside=aside,                                         # librmq.runtime.runner.aside_by(…); None: within run_due
    )

In its own step it calls ``self._saver.run_due(now_ms)`` and hands the time on, `save` when it is shut down, and
`put_back` where the clock was put back. The step is woken by ``aside`` when a flush has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from librmq.errors import LASTING, StoreError
from librmq.runtime.runner import Aside

__all__ = ["FlushAside"]

_log = logging.getLogger("librmq.runtime")
_T = TypeVar("_T")


class FlushAside(Generic[_T]):
    """Saves one kind of progress. Not thread-safe: called where its owner's step runs, under the runner's lock."""

    def __init__(
        self,
        what: str,
        *,
        flush: Callable[[], object],
        reached: Callable[[], _T | None],
        note: Callable[[_T], object],
        now_ms: Callable[[], int],
        save_every_s: float | None,
        retry_s: float = 10,
        aside: Aside | None = None,
    ) -> None:
        """``what`` names the progress in log lines.

        ``save_every_s`` None leaves saving to `save`. ``retry_s`` is how long to wait after a failure that may pass.
        """
        self._what = what
        self._flush = flush
        self._reached = reached
        self._note = note
        self._now_ms = now_ms
        self._every_ms = None if save_every_s is None else round(1000 * save_every_s)
        self._retry_ms = round(1000 * retry_s)
        self._aside = aside
        self._due_ms: int | None = None
        self._is_flushing = False

    @property
    def is_flushing(self) -> bool:
        """Whether a flush runs aside; what changes meanwhile is saved by the next one."""
        return self._is_flushing

    def run_due(self, now_ms: int) -> int | None:
        """Save if it is time, or begin to; return when to call again (ms), None where a change or ``aside`` will tell.

        Raises:
            FlushFailedError, StoreClosedError, ReadOnlyError: The store takes nothing any more.
        """
        if self._every_ms is None or self._is_flushing or (reached := self._reached()) is None:
            return None
        latest = now_ms + max(self._every_ms, self._retry_ms)
        if self._due_ms is None or self._due_ms > latest:  # the clock was put back
            self._due_ms = now_ms + self._every_ms
        if self._due_ms > now_ms:
            return self._due_ms
        if self._aside is not None:
            self._flush_aside(self._aside, reached)
            return None
        try:
            self.save()
        except LASTING:
            raise
        except StoreError as error:
            self._retry(error, now_ms)
        return self._due_ms

    def save(self) -> None:
        """Save now what has been reached. Raises what the flush and ``note`` do."""
        reached = self._reached()
        if reached is not None:
            self._flush()
            self._note(reached)
        self._due_ms = None

    def put_back(self, now_ms: int) -> None:
        """Look at what is unsaved at the next `run_due`: the clock was put back to ``now_ms``."""
        if self._due_ms is not None:
            self._due_ms = now_ms

    def _flush_aside(self, aside: Aside, reached: _T) -> None:
        def flushed(error: Exception | None) -> int | None:
            self._is_flushing = False
            now_ms = self._now_ms()
            try:
                if error is not None:
                    raise error
                self._note(reached)
                return self.run_due(now_ms)
            except LASTING as told:  # no caller waits for this: the next append meets it too
                _log.error("%s can't be saved any more: %s", self._what, told)
                return None
            except StoreError as told:
                self._retry(told, now_ms)
                return self._due_ms

        self._is_flushing, self._due_ms = True, None
        aside(self._flush, flushed)

    def _retry(self, error: StoreError, now_ms: int) -> None:
        _log.error("%s could not be saved, and is tried again in %d ms: %s", self._what, self._retry_ms, error)
        self._due_ms = now_ms + self._retry_ms
