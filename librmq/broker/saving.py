"""Writing down what has changed, some time after: consumers' progress and filters.

Mirrors the schedule of ``BrokerController`` that has its tables persisted, but runs only where something has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from librmq.broker.offsets import ConsumerOffsets
from librmq.brokerconfig import BrokerConfig
from librmq.errors import StoreIOError

if TYPE_CHECKING:
    from librmq.filter import Registrations

__all__ = ["DelayProgress", "Saving"]

_log = logging.getLogger("librmq.broker")

_FILTERS_MS: Final = 10_000
_AGAIN_MS: Final = 10_000  # after a failure that may pass


class Saving:
    """What one broker has to save. Called under the runner's lock."""

    def __init__(
        self,
        tables: BrokerConfig,
        registrations: Registrations,
        offsets_after_ms: int,
        now_ms: Callable[[], int],
        wake: Callable[[int], None],
    ) -> None:
        """``wake(at_ms)`` has `run_due` called by then."""
        self.offsets = ConsumerOffsets(tables.offsets, self._offsets_changed)
        self._tables = tables
        self._registrations = registrations
        self._offsets_after_ms = offsets_after_ms
        self._now_ms = now_ms
        self._wake = wake
        self._offsets_ms: int | None = None
        self._filters_ms: int | None = None

    def _offsets_changed(self) -> None:
        self._offsets_ms = self._now_ms() + self._offsets_after_ms
        self._wake(self._offsets_ms)

    def filters_changed(self) -> None:
        """The filters may be others than those that were saved last."""
        if self._filters_ms is None and (self._tables.filters or any(True for _ in self._registrations)):
            self._filters_ms = self._now_ms() + _FILTERS_MS
            self._wake(self._filters_ms)

    def run_due(self, now_ms: int) -> int | None:
        """Save what is due; returns when the next is."""
        if self._offsets_ms is not None and self._offsets_ms <= now_ms:
            self._offsets_ms = self._save(self.offsets.save, now_ms)
        if self._filters_ms is not None and self._filters_ms <= now_ms:
            self._filters_ms = self._save(self._save_filters, now_ms)
        return min((due for due in (self._offsets_ms, self._filters_ms) if due is not None), default=None)

    @staticmethod
    def _save(save: Callable[[int], None], now_ms: int) -> int | None:
        """Save; when to try again."""
        try:
            save(now_ms)
        except StoreIOError as error:
            _log.error("progress or filters could not be saved: %s", error)
            return now_ms + _AGAIN_MS
        return None

    def save_all(self, now_ms: int) -> None:
        """Save whatever has changed, in every table."""
        self.offsets.save(now_ms)
        self._save_filters(now_ms)
        self._tables.persist(now_ms)

    def _save_filters(self, now_ms: int) -> None:
        self._tables.set_filters(self._registrations.to_document(now_ms)["filterDataByTopic"])
        self._tables.filter_table.persist(now_ms)


class DelayProgress:
    """Where the delay schedule keeps how far it has come."""

    def __init__(self, tables: BrokerConfig) -> None:
        self._tables = tables

    def delay_offset(self, level: int) -> int:
        return self._tables.delay_offset(level)

    def set_delay_offset(self, level: int, queue_offset: int) -> None:
        self._tables.set_delay_offset(level, queue_offset)

    def persist(self, now_ms: int) -> None:
        self._tables.delays.persist(now_ms)
