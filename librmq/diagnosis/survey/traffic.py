"""Sums over a store's messages: by topic, time and queue, delays from birth to storing, retries, keys.

Messages come as columns, a batch at a time: from the column reader if pyarrow is installed, else from the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from librmq.diagnosis.survey.key_counts import KeyCounts
from librmq.diagnosis.survey.model import ATTEMPTS, DELAY_BOUNDS_MS, BornToStored, RetriedMessages, StoredTopic
from librmq.diagnosis.survey.scope import TimeAxis
from librmq.message.topics import RETRY_PREFIX, is_user_topic

Ints = npt.NDArray[np.int64]

_SHIFT: Final = 32


class Headers(NamedTuple):
    """Columns of some messages."""

    topics: Sequence[str]
    """Distinct names."""
    codes: Ints
    """Indexes in ``topics``."""
    queue_ids: Ints
    sizes: Ints
    stored_ms: Ints
    born_ms: Ints
    attempts: Ints


class _Topic:
    __slots__ = ("attempts", "bytes", "delays", "first_ms", "last_ms", "messages", "most_ms", "stored")

    def __init__(self, intervals: int) -> None:
        self.messages = self.bytes = 0
        self.first_ms, self.last_ms, self.most_ms = 1 << 62, 0, 0
        self.stored = np.zeros(intervals, np.int64)
        self.delays = np.zeros(len(DELAY_BOUNDS_MS) + 1, np.int64)
        self.attempts = np.zeros(ATTEMPTS, np.int64)


class Traffic:
    """Sums over the messages of a store."""

    def __init__(self, axis: TimeAxis, keys: KeyCounts) -> None:
        self.keys = keys
        self.done = 0
        self._axis = axis
        self._topics: dict[str, _Topic] = {}
        self._queues: dict[tuple[str, int], int] = {}

    def add(self, batch: Headers) -> None:
        """Add some messages."""
        count = len(batch.codes)
        if not count:
            return
        self.done += count
        order = np.argsort(batch.codes, kind="stable")
        codes = batch.codes[order]
        begins = np.flatnonzero(np.append(True, np.diff(codes) != 0))
        ends = np.append(begins[1:], count)
        at = np.clip((batch.stored_ms - self._axis.begin_ms) // self._axis.interval_ms, 0, self._axis.intervals - 1)
        delays = batch.stored_ms - batch.born_ms
        bins = np.searchsorted(DELAY_BOUNDS_MS, delays, side="right")
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            rows, topic = order[begin:end], batch.topics[int(codes[begin])]
            sums = self._topics.get(topic) or self._topics.setdefault(topic, _Topic(self._axis.intervals))
            stored = batch.stored_ms[rows]
            sums.messages += len(rows)
            sums.bytes += int(batch.sizes[rows].sum())
            sums.first_ms = min(sums.first_ms, int(stored.min()))
            sums.last_ms = max(sums.last_ms, int(stored.max()))
            sums.stored += np.bincount(at[rows], minlength=self._axis.intervals)
            sums.delays += np.bincount(bins[rows], minlength=len(sums.delays))
            sums.most_ms = max(sums.most_ms, int(delays[rows].max()))
            if topic.startswith(RETRY_PREFIX):
                attempts = np.clip(batch.attempts[rows], 1, ATTEMPTS) - 1
                sums.attempts += np.bincount(attempts, minlength=ATTEMPTS)
        self._add_queues(batch)

    def _add_queues(self, batch: Headers) -> None:
        names, counts = np.unique(batch.codes << _SHIFT | batch.queue_ids, return_counts=True)
        for name, count in zip(names.tolist(), counts.tolist(), strict=True):
            queue = batch.topics[name >> _SHIFT], name & (1 << _SHIFT) - 1
            self._queues[queue] = self._queues.get(queue, 0) + count

    def topics(self, store: str) -> Iterator[StoredTopic]:
        """Yield the totals of each topic, the largest first."""
        queues: dict[str, list[tuple[int, int]]] = {}
        for (topic, queue_id), count in sorted(self._queues.items()):
            queues.setdefault(topic, []).append((queue_id, count))
        for topic, sums in sorted(self._topics.items(), key=lambda item: (-item[1].messages, item[0])):
            ids, counts = zip(*queues[topic], strict=True)
            stored = tuple(sums.stored.tolist())
            yield StoredTopic(store, topic, sums.messages, sums.bytes, sums.first_ms, sums.last_ms, stored, ids, counts)

    def delays(self, store: str) -> Iterator[BornToStored]:
        """Yield the delays of each topic that producers send to, the largest topic first."""
        for topic, sums in sorted(self._topics.items(), key=lambda item: (-item[1].messages, item[0])):
            if is_user_topic(topic):
                yield BornToStored(store, topic, tuple(sums.delays.tolist()), sums.most_ms)

    def retries(self, store: str) -> Iterator[RetriedMessages]:
        """Yield the retries of each group."""
        for topic, sums in sorted(self._topics.items()):
            if topic.startswith(RETRY_PREFIX):
                yield RetriedMessages(store, topic.removeprefix(RETRY_PREFIX), tuple(sums.attempts.tolist()))
