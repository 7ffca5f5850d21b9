"""Clocks for tests: one that is set back or forward, one that passes by itself, and one that notes waits."""

from __future__ import annotations

import threading

from librmq.clock import ManualClock, SystemClock


class Adjusted(SystemClock):
    """A clock that can be set forward or back."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


class SlowClock(ManualClock):
    """A clock that passes by a second at each look."""

    def monotonic(self) -> float:
        self.advance(seconds=1)
        return super().monotonic()


class Waits(ManualClock):
    """Remembers how long it was asked to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float | None] = []

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        self.seconds.append(seconds)
        return super().wait(event, seconds)
