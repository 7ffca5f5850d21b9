"""Unconsumed messages: those that retention by age would delete soon, and the origins of all.

Retention deletes whole log files, the oldest first: a file goes when its last record is older than the reserved time,
and the file with the log's last record stays. Settings such as the hour of deletion, the log's largest size and
``keep_unconsumed`` are not considered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import NamedTuple

from librmq.commitlog import CommitLog
from librmq.consumequeue import HOLE_SIZE
from librmq.diagnosis.group_lag import QueueLag, lag
from librmq.diagnosis.view import Source, StoreView, viewed
from librmq.errors import ConfigError, CorruptionError
from librmq.message.topics import RETRY_PREFIX
from librmq.store.recovery.queue_check import first_at
from librmq.store.retention import first_behind, last_timestamp_ms


class ExpiringMessages(NamedTuple):
    """The unconsumed messages of a group in a topic that retention would delete soon."""

    group: str
    """The consumer group."""
    topic: str
    """The topic."""
    messages: int
    """Number of unconsumed messages in the log files that expire."""
    bytes: int
    """Size of their records."""
    first_at_ms: int
    """Time at which the first of these files expires, in milliseconds since 1970; in the past for an expired one."""


def expiring(source: Source, *, reserved_s: float, within_s: float) -> list[ExpiringMessages]:
    """Return the unconsumed messages that retention by age would delete soon, the first to expire first.

    Args:
        source: A running broker, the folder of a store, or a view of either. The time of a folder that no process
            uses is that of its last message.
        reserved_s: Seconds after its last record at which a log file expires.
        within_s: Only files that expire within this many seconds.

    Raises:
        ConfigError: A number of seconds is negative.
        NotAStoreError: The folder holds no store.
        CorruptionError: A file is damaged.
    """
    if reserved_s < 0 or within_s < 0:
        raise ConfigError(f"expiring: expected 0 seconds or more, found {reserved_s=} and {within_s=}")
    with viewed(source) as view:
        log, latest_ms = view.store.log, (view.now_ms or 0) + round(1000 * (within_s - reserved_s))
        last_ms = cache(lambda start: last_timestamp_ms(log, start))
        end = _end_of_expired(log, latest_ms, last_ms)
        rows: dict[tuple[str, str], ExpiringMessages] = {}
        for row in lag(view, times=False):
            if not row.lag:
                continue  # its queue can be gone
            queue = view.store.queues[row.topic, row.queue_id]
            begin = row.next_offset
            entries = queue.entries(begin, max(begin, first_at(queue, end)))
            entries = entries[entries["size"] != HOLE_SIZE]
            if len(entries):
                start = int(entries["physical_offset"][0]) // log.file_size * log.file_size
                at_ms, size = last_ms(start) + round(1000 * reserved_s), int(entries["size"].sum(dtype="i8"))
                sums = rows.get((row.group, row.topic), ExpiringMessages(row.group, row.topic, 0, 0, at_ms))
                rows[row.group, row.topic] = sums._replace(
                    messages=sums.messages + len(entries),
                    bytes=sums.bytes + size,
                    first_at_ms=min(sums.first_at_ms, at_ms),
                )
        return sorted(rows.values(), key=lambda row: (row.first_at_ms, -row.messages, row.group, row.topic))


def _end_of_expired(log: CommitLog, latest_ms: int, last_ms: Callable[[int], int]) -> int:
    """Return the end of the last log file whose last record is not later than ``latest_ms``; the log's begin if none.

    A file is walked through only if its first record and that of the next file disagree.
    """
    end = log.begin
    for start in log.sequence.starts:
        first = log.first_store_timestamp_ms(start)
        if start + log.file_size >= log.end or (first is not None and first > latest_ms):
            break
        following = first_behind(log, start)
        if (following is None or following > latest_ms) and last_ms(start) > latest_ms:
            break
        end = start + log.file_size
    return end


# -------------------------------------------------------------------------------------------------------------- origins


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
        return [_origins(view, *name, rows_of_topic, sampled) for name, rows_of_topic in rows.items()]


def _origins(view: StoreView, group: str, topic: str, rows: list[QueueLag], sampled: int) -> WaitingOrigins:
    total = sum(row.lag for row in rows)
    if topic.startswith(RETRY_PREFIX):
        return WaitingOrigins(group, topic, total, total, 0, 0, total)
    from librmq.diagnosis.pending import kind_of  # loads transactions and timers

    kinds: Counter[str] = Counter()
    for row in rows:
        begin = row.next_offset
        count = row.lag if total <= sampled else max(1, row.lag * sampled // total)
        with suppress(CorruptionError):
            kinds.update(map(kind_of, view.store.messages(topic, row.queue_id, begin, begin + count)))
    delayed = kinds["delayed"]
    return WaitingOrigins(
        group, topic, total, kinds.total(), kinds.total() - delayed, delayed, 0, kinds.total() < total
    )
