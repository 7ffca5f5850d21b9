"""Time as a value: the only module that reads the wall clock or sleeps."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from librmq.override import override

if TYPE_CHECKING:
    import asyncio

__all__ = ["Clock", "ManualClock", "SystemClock", "moves_by_itself"]

_LONGEST_WAIT_S: Final = 0.5
"""After this time of sleep the clock is read again."""
_SLEWED_MS: Final = 500
"""A correction of the clock up to this much does not count as set back."""


class Clock(Protocol):
    """A source of time."""

    def now_ms(self) -> int:
        """The time of day in milliseconds since 1970 (UTC)."""
        ...

    def monotonic(self) -> float:
        """Return seconds since some moment, which never go backwards."""
        ...

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        """Wait until ``event`` is set or ``seconds`` have passed (None: no limit); return whether it is set."""
        ...


class SystemClock:
    """The machine's clock. Thread-safe."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        return event.wait(seconds)


class ManualClock:
    """A clock that stands still until a caller moves it, and never goes backwards.

    Not thread-safe: one thread moves it.
    """

    moves_by_itself = False

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self.followers: list[Callable[[int], object]] = []
        """What is called with each time (ms) to which the clock moves."""

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic(self) -> float:
        return self._now_ms / 1000

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        """Return immediately, because time does not pass by itself."""
        return event.is_set()

    def move_to(self, now_ms: int) -> None:
        """Set the time.

        Raises:
            ValueError: The time is before now.
        """
        if now_ms < self._now_ms:
            raise ValueError(f"time can't go backwards: it is {self._now_ms} ms, asked for {now_ms} ms")
        self._now_ms = now_ms
        for follow in self.followers:
            follow(now_ms)

    @override
    def __repr__(self) -> str:
        return f"ManualClock({self._now_ms})"

    def advance(
        self, *, ms: int = 0, seconds: float = 0, minutes: float = 0, hours: float = 0, days: float = 0
    ) -> None:
        """Move the time forward."""
        self.move_to(self._now_ms + ms + round(1000 * (seconds + 60 * (minutes + 60 * (hours + 24 * days)))))


LAST_MS: Final = 253_402_300_799_999
"""The end of the year 9999, the last time that a date has."""


_defaults: Final[list[Clock]] = [SystemClock()]


def default_clock() -> Clock:
    """Return the clock of code that was given none: the machine's, unless `replace_default_clock` names another."""
    return _defaults[-1]


def replace_default_clock(clock: Clock) -> Callable[[], None]:
    """Give code that was given no clock this one, in all threads; return a function that ends this."""
    _defaults.append(clock)

    def end() -> None:
        _defaults[:] = [other for other in _defaults if other is not clock]

    return end


def moves_by_itself(clock: Clock) -> bool:
    """Return whether time passes without a caller that moves it; a clock says no by an attribute of this name.

    If it does not, waiting is useless, and nothing happens between two moments.
    """
    return getattr(clock, "moves_by_itself", True)


def seconds_until(due_ms: int, now_ms: int) -> float:
    """Return how long to sleep towards a time of day before the clock is read again: half a second at most.

    The clock can jump either way meanwhile, and timers of the system stand still while the machine is suspended.
    """
    return min(max(0, due_ms - now_ms) / 1000, _LONGEST_WAIT_S)


def was_set_back(latest_ms: int, now_ms: int) -> bool:
    """Return whether the clock was set back since it showed ``latest_ms``, so due times found then are too late."""
    return now_ms < latest_ms - _SLEWED_MS


async def wait_async(clock: Clock, event: asyncio.Event, seconds: float) -> bool:
    """Wait like `Clock.wait` while the event loop runs."""
    import asyncio  # slow to load, and unnecessary for a store alone

    if moves_by_itself(clock):
        with suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), seconds)
    else:
        await asyncio.sleep(0)
    return event.is_set()


class Allowance:
    """What a rate permits: ``rate`` units a second, of which at most ``burst`` gather while none is taken.

    Not thread-safe.
    """

    def __init__(self, now_ms: int) -> None:
        """Nothing was taken before ``now_ms``."""
        self._saved: float | None = None
        self._at_ms = now_ms

    def take(self, max_units: int, rate: float, burst: int, now_ms: int) -> tuple[int, int]:
        """Take up to ``max_units`` units; return their number, and when there is one again (ms)."""
        passed_ms, self._at_ms = max(0, now_ms - self._at_ms), now_ms
        saved = burst if self._saved is None else min(burst, self._saved + passed_ms * rate / 1000)
        units = min(max_units, int(saved + 1e-9))
        self._saved = saved - units
        return units, now_ms + max(1, math.ceil((1 - self._saved) * 1000 / rate - 1e-6))
