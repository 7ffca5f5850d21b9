"""A thread that calls a step when it is due or woken, and a saver of progress, which steps call.

Progress is saved some time after a change, without blocking other turns, and again after a failure. It may be saved
only after the device has the data that it covers. Its owner makes one `ProgressSaver` and passes how to get the
progress, flush, and note it, and how long to wait after a change::

    self._saver = ProgressSaver(
        "the relay's progress",
        flush=lambda reached: store.flush(),                 # waits for the disk; can run in another thread
        reached=lambda: self._next if self._next != self._saved else None,   # None: nothing to save
        note=self._note,                                     # gets the value of `reached` from before the flush
        now_ms=store.clock.now_ms,
        save_every_s=10,
        aside=aside,                                         # librmq.runtime.runner.aside_by(…); None: within run_due
    )

The owner's step calls ``self._saver.run_due(now_ms)`` and returns its result, calls `save` at a shutdown, and
`put_back` when the clock was set back. ``aside`` runs the step again when a flush has ended. A failure is logged once,
and so is the next success.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from librmq.clock import Clock, seconds_until, was_set_back
from librmq.errors import LASTING, StoreClosedError, StoreError
from librmq.runtime.event_log import EventLog, StateLog
from librmq.runtime.locks import Lock, critical

if TYPE_CHECKING:
    from librmq.runtime.runner import Aside


class Background:
    """A thread that calls a step when it is due or woken. It ends with `stop` and does not keep a process alive."""

    def __init__(self, step: Callable[[int], int | None], clock: Clock, name: str) -> None:
        """Start the thread; ``step(now_ms)`` returns its next due time.

        Raises:
            RuntimeError: No thread can be started.
        """
        self._step = step
        self._clock = clock
        self._event = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._repeat_step, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Let the step run now."""
        if not self._event.is_set():  # checking is cheaper than setting it again
            with critical:  # a signal within `set` would leave the event's lock held
                self._event.set()

    def stop(self) -> None:
        """Stop the thread; return when a running step has ended."""
        with critical:
            self._stopping = True
            self._event.set()
            if self._thread is not threading.current_thread():
                self._thread.join()

    def _repeat_step(self) -> None:
        while True:
            self._event.clear()
            if self._stopping:  # checked after `clear`, which can erase the signal of `stop`
                return
            latest_ms = self._clock.now_ms()
            due = self._step(latest_ms)
            # Read the clock again and again, because it can jump. If it was set back the due time is too late.
            while True:
                now_ms = self._clock.now_ms()
                is_woken = self._clock.wait(self._event, None if due is None else seconds_until(due, now_ms))
                if is_woken or due is None or now_ms >= due or was_set_back(latest_ms, now_ms):
                    break
                latest_ms = max(latest_ms, now_ms)


_log = EventLog("librmq.runtime")
_T = TypeVar("_T")
_SAVING: Final = "saving"


class ProgressSaver(Generic[_T]):
    """Saves one kind of progress. Not thread-safe: its owner calls it under the runner's lock."""

    def __init__(
        self,
        what: str,
        *,
        flush: Callable[[_T], object],
        reached: Callable[[], _T | None],
        note: Callable[[_T], object],
        now_ms: Callable[[], int],
        save_every_s: float | None,
        retry_s: float = 10,
        aside: Aside | None = None,
    ) -> None:
        """Take the owner's functions; ``what`` names the progress in log lines.

        Flushes never overlap, and none is noted after a later one. With ``save_every_s`` None only `save` saves.
        ``retry_s`` is the wait after a temporary failure.
        """
        self._flush = flush
        self._reached = reached
        self._note = note
        self._now_ms = now_ms
        self._every_ms = None if save_every_s is None else round(1000 * save_every_s)
        self._retry_ms = round(1000 * retry_s)
        self._aside = aside
        self._states = StateLog(_log, what)
        self._due_ms: int | None = None
        self._is_flushing = False
        self._numbers = itertools.count(1)
        self._flushed = 0
        self._flush_lock = Lock()
        self._closed_reason: str | None = None

    def changed(self) -> int | None:
        """Note a change; return when to call `run_due` (ms), None if ``aside`` will wake the step."""
        if self._due_ms is None and self._every_ms is not None and not self._is_flushing:
            self._due_ms = self._now_ms() + self._every_ms
        return self._due_ms

    def run_due(self, now_ms: int) -> int | None:
        """Save or begin to save if due; return the time of the next call (ms), None to wait for a change or ``aside``.

        Raises:
            FlushFailedError: A flush has failed; the store must be reopened.
            StoreClosedError: The store was closed.
            ReadOnlyError: The store is read-only.
        """
        if self._every_ms is None or self._is_flushing:
            return None
        reached = self._reached()
        if reached is None:
            self._saved()
            return None
        latest = now_ms + max(self._every_ms, self._retry_ms)
        if self._due_ms is None or self._due_ms > latest:  # the clock was set back
            self._due_ms = now_ms + self._every_ms
        if self._due_ms > now_ms:
            return self._due_ms
        number = next(self._numbers)
        if self._aside is not None:
            self._flush_without_lock(self._aside, reached, number)
            return None
        try:
            self._save(reached, number)
        except LASTING:
            raise
        except StoreError as error:
            self._retry(error)
        return self._due_ms

    def save(self) -> None:
        """Save the progress now. Raises the errors of the flush and of ``note``."""
        reached = self._reached()
        if reached is not None:
            self._save(reached, next(self._numbers))
        self._due_ms = None

    def put_back(self, now_ms: int) -> None:
        """Make the next save due: the clock was set back to ``now_ms``, or the progress should be saved soon."""
        self._due_ms = now_ms

    def end_writing(self, why: str) -> None:
        """End all flushes; later calls raise ``why``. Return when none is running. Thread-safe."""
        with self._flush_lock:
            self._closed_reason = why

    def _save(self, reached: _T, number: int) -> None:
        self._flush_numbered(reached, number)
        self._note(reached)
        self._saved()

    def _saved(self) -> None:
        self._due_ms = None
        self._states.works(_SAVING)

    def _flush_numbered(self, reached: _T, number: int) -> None:
        """Flush unless a later flush has ended. Thread-safe."""
        with self._flush_lock:
            if self._closed_reason is not None:
                raise StoreClosedError(self._closed_reason)
            if number > self._flushed:
                self._flush(reached)
                self._flushed = number

    def _flush_without_lock(self, aside: Aside, reached: _T, number: int) -> None:
        def flushed(error: Exception | None) -> int | None:
            self._is_flushing = False
            try:
                if error is not None:
                    raise error
                if number == self._flushed:  # otherwise a later one is noted
                    self._note(reached)
                self._saved()
            except LASTING as failure:  # no caller waits here, and the next append gets the same error
                self._states.failing(_SAVING, failure, logging.ERROR)
                return None
            except StoreError as failure:
                self._retry(failure)
                return self._due_ms
            return self._now_ms()  # to save changes made meanwhile

        self._is_flushing, self._due_ms = True, None
        aside(lambda: self._flush_numbered(reached, number), flushed)

    def _retry(self, error: StoreError) -> None:
        self._due_ms = self._now_ms() + self._retry_ms
        self._states.failing(_SAVING, error, logging.ERROR, again_ms=self._retry_ms)
