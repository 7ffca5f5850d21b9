"""Rates of what clients have sent, got and sent back, by minute, hour and day.

Nothing runs periodically: the first event in a slot of time notes the totals before it, and a question subtracts them
from the totals now.

Mirrors ``BrokerStatsManager`` and ``StatsItem``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final, Literal, NamedTuple, get_args

from librmq.runtime.locks import Lock

Kind = Literal["put", "get", "back", "latency", "miss", "failed"]
"""``latency`` counts milliseconds of found pulls, ``miss`` pulls without a message, ``failed`` refused messages."""
_MOST_RATES: Final = 10_000
_DAY_MS: Final = 86_400_000


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
    "GROUP_GET_LATENCY": ("latency", 1),
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

    def count(self, now_ms: int, messages: int, size: int, calls: int) -> None:
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

    @property
    def counts(self) -> tuple[int, int, int]:
        """All calls, messages and bytes."""
        return self._calls, self._messages, self._size

    def counts_in(self, window: Window, now_ms: int) -> tuple[int, tuple[int, int, int]]:
        """Return the counted time in ms, and the calls, messages and bytes in it."""
        for since_ms, (calls, messages, size) in self._marks[window]:
            if since_ms > now_ms - window.span_ms:
                counts = self._calls - calls, self._messages - messages, self._size - size
                return max(now_ms - since_ms, window.slot_ms), counts
        return window.slot_ms, (0, 0, 0)


class DayTotals(NamedTuple):
    """Messages before yesterday, before today, and until now."""

    yesterday_morning: int
    today_morning: int
    now: int


class Rates:
    """The rates of one server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._rates: dict[tuple[Kind, str], _Rate] = {}
        self._totals: dict[Kind, _Rate] = {kind: _Rate() for kind in get_args(Kind)}
        self._longest_ms: dict[Kind, int] = {}
        self._mornings = dict.fromkeys(self._totals, (0, 0))
        self._next_morning_ms = 0

    def count(self, kind: Kind, key: str, now_ms: int, messages: int = 1, size: int = 0, calls: int = 1) -> None:
        """Count calls that have moved messages; ``key`` is a topic, ``topic@group`` or ``queue@topic@group``."""
        with self._lock:
            if now_ms >= self._next_morning_ms:
                self._begin_day(now_ms)
            self._totals[kind].count(now_ms, messages, size, calls)
            if kind in ("miss", "failed"):
                return
            rate = self._rates.get((kind, key))
            if rate is None:
                if len(self._rates) >= _MOST_RATES:
                    return
                rate = self._rates[kind, key] = _Rate()
            rate.count(now_ms, messages, size, calls)

    def rows(self, name: str, key: str, now_ms: int) -> dict[str, dict[str, float]] | None:
        """Return a statistic of 4.9 by window; None if nothing was counted."""
        if name not in _NAMES:
            return None
        kind, place = _NAMES[name]
        with self._lock:
            rate = self._totals[kind] if name.startswith("BROKER_") else self._rates.get((kind, key))
            if rate is None or not rate.counts[0]:
                return None
            return {title: _row(window, rate, place, now_ms) for title, window in WINDOWS.items()}

    def per_second(self, kind: Kind, key: str | None, now_ms: int, *, of_calls: bool = False) -> float:
        """Return the messages or calls a second in the last minute, of one key or of all."""
        with self._lock:
            rate = self._totals[kind] if key is None else self._rates.get((kind, key))
            return 0.0 if rate is None else float(_row(MINUTE, rate, 0 if of_calls else 1, now_ms)["tps"])

    def took(self, kind: Kind, ms: int) -> None:
        """Note how long a call has taken."""
        if ms > self._longest_ms.get(kind, 0):
            with self._lock:
                self._longest_ms[kind] = max(ms, self._longest_ms.get(kind, 0))

    def longest_ms(self, kind: Kind) -> int:
        """Return how long the longest call has taken."""
        return self._longest_ms.get(kind, 0)

    def total(self, kind: Kind) -> tuple[int, int, int]:
        """Return the calls, messages and bytes since the server began."""
        with self._lock:
            return self._totals[kind].counts

    def days(self, kind: Kind, now_ms: int) -> DayTotals:
        """Return the messages by day of the machine's time zone."""
        with self._lock:
            if now_ms >= self._next_morning_ms:
                self._begin_day(now_ms)
            return DayTotals(*self._mornings[kind], self._totals[kind].counts[1])

    def _begin_day(self, now_ms: int) -> None:
        is_next_day = now_ms < self._next_morning_ms + _DAY_MS
        for kind, rate in self._totals.items():
            total = rate.counts[1]
            self._mornings[kind] = (self._mornings[kind][1] if is_next_day else total), total
        midnight = datetime.fromtimestamp(now_ms // 1000).replace(hour=0, minute=0, second=0)
        self._next_morning_ms = round(1000 * (midnight + timedelta(days=1)).timestamp())


def _row(window: Window, rate: _Rate, place: int, now_ms: int) -> dict[str, float]:
    span_ms, counts = rate.counts_in(window, now_ms)
    total, calls = counts[place], counts[0]
    return {"avgpt": total / calls if calls else 0.0, "sum": total, "tps": total * 1000 / span_ms}
