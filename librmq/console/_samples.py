"""What the overview remembers of its last minutes: where queues ended and how far groups were, at each look."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from librmq.runtime.locks import Lock

_KEPT: Final = 180
_LEAST_MS: Final = 2_000
_RATE_MS: Final = 60_000
"""Rates are of about this time."""


class Sample(NamedTuple):
    """One look."""

    at_ms: int
    ends: Mapping[str, int]
    """The sum of the ends of a topic's queues."""
    lags: Mapping[str, int]
    """The lag of each group."""
    positions: Mapping[str, int] | None
    """The sum of a group's progress over its queues; None where these are too many to add up."""


class Samples:
    """The last looks of all who have the overview open. Thread-safe.

    Nothing is measured while no page asks, so that a console that is not looked at costs nothing.
    """

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=_KEPT)
        self._lock = Lock()

    def add(self, sample: Sample) -> None:
        """Add a look, unless the last one has just been; after a clock that was set back the earlier ones go."""
        with self._lock:
            if self._samples and sample.at_ms < self._samples[-1].at_ms:
                self._samples.clear()
            if not self._samples or sample.at_ms - self._samples[-1].at_ms >= _LEAST_MS:
                self._samples.append(sample)

    def lags(self, group: str) -> list[tuple[int, int]]:
        """Return time and lag of a group at each look, the oldest first."""
        with self._lock:
            return [(sample.at_ms, sample.lags[group]) for sample in self._samples if group in sample.lags]

    def stored_per_s(self, topic: str | None = None) -> float | None:
        """Return the messages a second of a topic, or of all; None before the second look."""
        pair = self._pair()
        if pair is None:
            return None
        first, last = pair
        names = last.ends.keys() & first.ends.keys() if topic is None else {topic}
        grown = sum(last.ends.get(name, 0) - first.ends.get(name, 0) for name in names)
        return max(grown, 0) * 1000 / (last.at_ms - first.at_ms)

    def consumed_per_s(self, group: str | None = None) -> float | None:
        """Return how many messages a second a group has passed, or all of them together; None if that is unknown."""
        pair = self._pair()
        if pair is None or pair[0].positions is None or pair[1].positions is None:
            return None
        first, last = pair[0].positions, pair[1].positions
        names = first.keys() & last.keys()
        if group is not None and group not in names:
            return None
        passed = sum(max(last[name] - first[name], 0) for name in (names if group is None else {group}))
        return passed * 1000 / (pair[1].at_ms - pair[0].at_ms)

    def _pair(self) -> tuple[Sample, Sample] | None:
        with self._lock:
            if len(self._samples) < 2:
                return None
            last = self._samples[-1]
            first = next(sample for sample in self._samples if last.at_ms - sample.at_ms <= _RATE_MS)
            return (first, last) if first.at_ms < last.at_ms else (self._samples[-2], last)
