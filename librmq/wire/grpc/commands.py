"""Commands that the server sends to a client over its stream."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from librmq.clock import SystemClock
from librmq.runtime.locks import RLock

_MAX_COMMANDS: Final = 1_000
_MAX_SIZE: Final = 16 << 20
_AGAIN_S: Final = 0.2


class Commands:
    """The commands of one stream. Bounded: a client that does not read misses further commands. Thread-safe."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._changed = threading.Condition(self._lock)  # never taken itself: Ctrl-C can leave a condition locked
        self._waiting: deque[tuple[Any, int]] = deque()
        self._size = 0
        self._has_ended = False
        self._error: Exception | None = None
        self._clock = SystemClock()
        self._again: tuple[Any, float] | None = None

    def put(self, command: Any) -> bool:  # noqa: ANN401 (a message)
        """Send a command; return False if it was dropped."""
        size = command.ByteSize()
        with self._lock:
            is_full = len(self._waiting) >= _MAX_COMMANDS or self._size + size > _MAX_SIZE
            if self._has_ended or (is_full and self._waiting):
                return False
            self._waiting.append((command, size))
            self._size += size
            self._changed.notify()
            return True

    def put_again(self, command: Any) -> None:  # noqa: ANN401 (a message)
        """Send a command again shortly."""
        with self._lock:
            self._again = command, self._clock.monotonic() + _AGAIN_S
            self._changed.notify()

    def end(self, error: Exception | None = None) -> None:
        """End the stream after the commands in it are sent, with an error if one is given."""
        with self._lock:
            self._has_ended = True
            self._error = self._error or error
            self._changed.notify()

    def wait_for_first(self, seconds: float) -> bool:
        """Wait for a command or the end, with a timeout by the wall clock; return whether there is one."""
        with self._lock:
            return self._changed.wait_for(lambda: bool(self._waiting) or self._has_ended, seconds)

    def __iter__(self) -> Iterator[Any]:
        """Yield commands until the stream ends, waiting for each."""
        while True:
            with self._lock:
                while not self._waiting:
                    if self._error is not None:
                        raise self._error
                    if self._has_ended:
                        return
                    self._wait()
                command, size = self._waiting.popleft()
                self._size -= size
            yield command

    def _wait(self) -> None:
        if self._again is None:
            self._changed.wait()
            return
        command, due = self._again
        left = due - self._clock.monotonic()
        if left > 0:
            self._changed.wait(left)
        else:
            self._waiting.append((command, 0))
            self._again = None
