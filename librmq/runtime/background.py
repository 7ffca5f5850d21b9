"""Call a step from a thread when it is due or woken."""

from __future__ import annotations

import threading
from collections.abc import Callable

from librmq.clock import Clock
from librmq.runtime.critical import critical

__all__ = ["Background"]


class Background:
    """A thread that calls a step when it is due or woken. It ends with `stop` and does not keep a process alive."""

    def __init__(self, step: Callable[[int], int | None], clock: Clock, name: str) -> None:
        """``step(now_ms)`` returns when it is due next.

        Raises:
            RuntimeError: No thread can be started.
        """
        self._step = step
        self._clock = clock
        self._event = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Let the step run now."""
        if not self._event.is_set():  # to set it again would cost more than to look
            with critical:  # Python's events keep a lock that a signal in the middle leaves held
                self._event.set()

    def stop(self) -> None:
        """Return when the step that runs has ended; no other follows."""
        with critical:
            self._stopping = True
            self._event.set()
            if self._thread is not threading.current_thread():
                self._thread.join()

    def _run(self) -> None:
        while True:
            self._event.clear()
            if self._stopping:  # looked at behind `clear`, which may have taken the signal of `stop` away
                return
            due = self._step(self._clock.now_ms())
            seconds = None if due is None else max(0, due - self._clock.now_ms()) / 1000
            self._clock.wait(self._event, seconds)
