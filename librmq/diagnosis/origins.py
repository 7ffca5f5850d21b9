"""The origin of waiting messages: new ones of producers, and those written again by a delay or a retry."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import NamedTuple

from librmq.diagnosis.group_lag import QueueLag, lag
from librmq.diagnosis.pending import kind_of
from librmq.diagnosis.view import Source, StoreView, viewed
from librmq.errors import CorruptionError
from librmq.message.topics import RETRY_PREFIX


class WaitingOrigins(NamedTuple):
    """The origins of the messages of a topic that a group has left to consume."""

    group: str
    """The consumer group."""
    topic: str
    """The topic."""
    lag: int
    """All of them."""
    looked_at: int
    """Those whose origin was looked up; the next three add up to it."""
    new: int
    """Messages of producers, those of a committed transaction among them."""
    delayed: int
    """Deliveries after a delay or at a time."""
    retried: int
    """Retries, on which the group has failed before."""
    sampled: bool = False
    """Whether some of the messages were not looked up."""


def waiting_origins(
    source: Source, *, group: str | None = None, topic: str | None = None, sampled: int = 10_000
) -> list[WaitingOrigins]:
    """Return the origins of the messages that groups have left to consume, for each topic with any.

    Args:
        source: A running broker, the folder of a store, or a view of either.
        group: Only this group.
        topic: Only this topic.
        sampled: The most messages to read of each group and topic, the oldest of each queue.

    Raises:
        NotAStoreError: The folder holds no store.
        CorruptionError: A file is damaged.
    """
    with viewed(source) as view:
        rows: dict[tuple[str, str], list[QueueLag]] = {}
        for row in lag(view, group=group, topic=topic, times=False):
            if row.lag:
                rows.setdefault((row.group, row.topic), []).append(row)
        return [_of_topic(view, *name, rows_of_topic, sampled) for name, rows_of_topic in rows.items()]


def _of_topic(view: StoreView, group: str, topic: str, rows: list[QueueLag], sampled: int) -> WaitingOrigins:
    total = sum(row.lag for row in rows)
    if topic.startswith(RETRY_PREFIX):
        return WaitingOrigins(group, topic, total, total, 0, 0, total)
    kinds: Counter[str] = Counter()
    for row in rows:
        begin = max(row.min_offset, row.consumer_offset or 0)
        count = row.lag if total <= sampled else max(1, row.lag * sampled // total)
        with suppress(CorruptionError):
            kinds.update(map(kind_of, view.store.messages(topic, row.queue_id, begin, begin + count)))
    delayed = kinds["delayed"]
    return WaitingOrigins(
        group, topic, total, kinds.total(), kinds.total() - delayed, delayed, 0, kinds.total() < total
    )
