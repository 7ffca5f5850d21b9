"""Rates by minute, hour and day: what the clients of one server have sent, got and sent back.

Mirrors ``BrokerStatsManager`` and ``StatsItem``. Nothing runs periodically: the first event in a slot of time notes the
totals before it, and a question subtracts them from the totals now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

from librmq.runtime.locks import Lock

__all__ = ["Rates", "Window"]

Kind = Literal["put", "get", "back"]
_MOST_RATES: Final = 10_000


class Window(NamedTuple):
    """A span of time, and the slots in which it moves on, in ms."""

    span_ms: int
    slot_ms: int


MINUTE: Final = Window(60_000, 10_000)
WINDOWS: Final = {"statsDay": Window(86_400_000, 3_600_000), "statsHour": Window(3_600_000, 600_000)}
WINDOWS["statsMinute"] = MINUTE
_NAMES: Final[Mapping[str, tuple[Kind, int]]] = {
    "TOPIC_PUT_NUMS": ("put", 1),
    "TOPIC_PUT_SIZE": ("put", 2),
    "GROUP_GET_NUMS": ("get", 1),
    "GROUP_GET_SIZE": ("get", 2),
    "SNDBCK_PUT_NUMS": ("back", 1),
    "BROKER_PUT_NUMS": ("put", 1),
    "BROKER_GET_NUMS": ("get", 1),
}


class _Totals(NamedTuple):
    since_ms: int
    counts: tuple[int, int, int]
    """Calls, messages and bytes before that time."""


class _Rate:
    """What one topic or group has moved. Not thread-safe."""

    __slots__ = ("_calls", "_marks", "_messages", "_next_ms", "_size")

    def __init__(self) -> None:
        self._calls = self._messages = self._size = 0
        self._next_ms = 0
        self._marks: dict[Window, deque[_Totals]] = {window: deque() for window in WINDOWS.values()}

    def add(self, now_ms: int, messages: int, size: int, calls: int) -> None:
        if now_ms >= self._next_ms:
            self._mark(now_ms)
        self._calls += calls
        self._messages += messages
        self._size += size

    def _mark(self, now_ms: int) -> None:
        before = self._calls, self._messages, self._size
        for window, marks in self._marks.items():
            begin_ms = now_ms - now_ms % window.slot_ms
            if not marks or marks[-1].since_ms < begin_ms:
                marks.append(_Totals(begin_ms, before))
            while marks[0].since_ms <= now_ms - window.span_ms:
                marks.popleft()
        self._next_ms = now_ms - now_ms % MINUTE.slot_ms + MINUTE.slot_ms

    def over(self, window: Window, now_ms: int) -> tuple[int, tuple[int, int, int]]:
        """Return the counted time in ms, and the calls, messages and bytes in it."""
        for since_ms, (calls, messages, size) in self._marks[window]:
            if since_ms > now_ms - window.span_ms:
                counts = self._calls - calls, self._messages - messages, self._size - size
                return max(now_ms - since_ms, window.slot_ms), counts
        return window.slot_ms, (0, 0, 0)


class Rates:
    """The rates of one server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._rates: dict[tuple[Kind, str], _Rate] = {}

    def add(self, kind: Kind, key: str, now_ms: int, messages: int = 1, size: int = 0, calls: int = 1) -> None:
        """Count calls that have moved messages; ``key`` is a topic, or ``topic@group``."""
        with self._lock:
            rate = self._rates.get((kind, key))
            if rate is None:
                if len(self._rates) >= _MOST_RATES:
                    return
                rate = self._rates[kind, key] = _Rate()
            rate.add(now_ms, messages, size, calls)

    def rows(self, name: str, key: str, now_ms: int) -> dict[str, dict[str, float]] | None:
        """Return a statistic of 4.9 by window; None if nothing was counted."""
        kind, place = _NAMES.get(name, (None, 0))
        is_total = name.startswith("BROKER_")
        with self._lock:
            found = [rate for (each, its), rate in self._rates.items() if each == kind and (is_total or its == key)]
            if not found:
                return None
            return {title: _row(window, found, place, now_ms) for title, window in WINDOWS.items()}

    def per_second(self, kind: Kind, key: str | None, now_ms: int) -> float:
        """Return the messages a second in the last minute, of one key or of all."""
        with self._lock:
            found = [rate for (each, its), rate in self._rates.items() if each == kind and key in (None, its)]
            return float(_row(MINUTE, found, 1, now_ms)["tps"])


def _row(window: Window, rates: Iterable[_Rate], place: int, now_ms: int) -> dict[str, float]:
    total = calls = 0
    per_second = 0.0
    for rate in rates:
        span_ms, counts = rate.over(window, now_ms)
        total, calls = total + counts[place], calls + counts[0]
        per_second += counts[place] * 1000 / span_ms
    return {"avgpt": total / calls if calls else 0.0, "sum": total, "tps": per_second}
