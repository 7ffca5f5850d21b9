"""A thread that calls a step when it is due or woken."""

from __future__ import annotations

import threading
from collections.abc import Callable

from librmq.clock import Clock, seconds_until, was_set_back
from librmq.runtime.locks import critical


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
