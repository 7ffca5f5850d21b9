"""A Bloom filter of the keys that a process has seen, a prefilter of dedup stores: extra ``bloom``."""

from __future__ import annotations

from typing import Any

from librmq.errors import ConfigError, MissingExtraError
from librmq.runtime.locks import Lock


class SeenKeys:
    """Remembers at least the last ``capacity`` keys, in a few bytes each, and drops older ones. Thread-safe.

    Its Bloom filter answers "certainly new here" or "perhaps seen". It can't decide for the store: other processes have
    their own keys, and a restart loses them. It only chooses which statement the store runs first. ``error_rate`` is
    the fraction of new keys that count as possibly seen.

    Raises:
        ConfigError: An argument is out of range.
        MissingExtraError: The extra ``bloom`` is not installed.
    """

    def __init__(self, capacity: int = 1_000_000, error_rate: float = 0.001) -> None:
        if capacity < 1 or not 0 < error_rate < 1:
            raise ConfigError(f"expected a capacity of 1 or more and a rate below 1, found {capacity}, {error_rate}")
        self._capacity = capacity
        self._error_rate = error_rate
        try:
            from pybloom_live import ScalableBloomFilter
        except ImportError as error:
            raise MissingExtraError("a prefilter of keys", "bloom") from error
        self._kind: Any = ScalableBloomFilter
        self._lock = Lock()
        self._new: Any = self._filter()
        self._old: Any = self._filter()

    def _filter(self) -> Any:  # noqa: ANN401 (the library has no types)
        # A filter that grows, with half of the error rate, because two are searched.
        return self._kind(min(self._capacity, 1000), self._error_rate / 2)

    def __len__(self) -> int:
        """Return how many keys are remembered."""
        return len(self._new) + len(self._old)

    def add(self, key: str) -> bool:
        """Remember ``key``; return False if it was certainly not remembered before."""
        with self._lock:
            if self._new.add(key):
                return True
            if len(self._new) >= self._capacity:
                self._old, self._new = self._new, self._filter()
                return False
            return key in self._old
