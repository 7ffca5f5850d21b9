"""Lag of consumer groups: unconsumed messages by queue, by topic and by group.

::

    lag = max(0, end - max(progress, begin))        a queue without progress counts from its begin

The rows are columns of numpy, because there can be a hundred thousand; iterating makes a `QueueLag` of each. RocketMQ
4.9 counts a queue without progress from 0, and so includes messages that were deleted long ago.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from librmq.consumequeue import ENTRY_DTYPE, ENTRY_SIZE, HOLE_SIZE, ConsumeQueue
from librmq.diagnosis.findings import Finding, Severity, Thresholds, counted
from librmq.diagnosis.people import duration
from librmq.diagnosis.store_times import UNKNOWN, store_times
from librmq.diagnosis.view import Source, StoreView, is_own_group, viewed
from librmq.errors import CorruptionError, StoreIOError
from librmq.files.rolling import file_name
from librmq.message.topics import RETRY_PREFIX
from librmq.store.engine.queue_table import QueueName
from librmq.store.format import directory

__all__ = ["GroupLag", "GroupRate", "Lag", "QueueLag", "TopicLag", "is_uneven", "lag", "lag_findings"]

Ints = npt.NDArray[np.int64]

_NONE: Final = -(1 << 62)
_NEVER: Final = (1 << 63) - 1
_AT_ONCE: Final = 4096  # entries
_KNOWN: Final = ("queue_id", "min_offset", "max_offset", "lag")
_NO_QUEUE: Final[tuple[Ints, list[int]]] = (np.empty((3, 0), np.int64), [])


class QueueLag(NamedTuple):
    """The unconsumed messages of a group in one queue."""

    group: str
    topic: str
    queue_id: int
    min_offset: int
    max_offset: int
    consumer_offset: int | None
    """The queue offset of the group's next message; None without progress there."""
    lag: int
    oldest_timestamp_ms: int | None
    """Store time of the oldest unconsumed message; None without one, or if it is unreadable."""


class TopicLag(NamedTuple):
    """The unconsumed messages of a group in one topic."""

    group: str
    topic: str
    queues: int
    lag: int
    most_in_one_queue: int
    oldest_timestamp_ms: int | None
    without_progress: int
    """Queues without progress of the group, which count from their begin."""
    beyond_end: int
    """Queues whose progress is beyond their end."""
    expired: int
    """Messages that were deleted before the group reached them."""

    @property
    def is_again(self) -> bool:
        """Whether these messages are retries, written again for this group."""
        return self.topic.startswith(RETRY_PREFIX)


class GroupLag(NamedTuple):
    """All unconsumed messages of a group."""

    group: str
    topics: int
    queues: int
    lag: int
    """All of it."""
    new: int
    """Messages of producers, including delivered delayed messages."""
    again: int
    """Retries, on which the group has failed before."""
    oldest_timestamp_ms: int | None


class GroupRate(NamedTuple):
    """How fast a topic grows and a group consumes it, between two measurements."""

    group: str
    topic: str
    seconds: float
    stored_per_s: float
    consumed_per_s: float | None
    """None if the group had no progress at either time."""
    lag: int
    drain_s: float | None
    """Time until the lag is 0 at these rates; None if never."""


@dataclass(frozen=True, eq=False)
class Lag:
    """The lag of groups at one moment, sorted by group, topic and queue, as columns; rows are made on demand."""

    names: Sequence[tuple[str, str]]
    """Group and topic, each once."""
    begins: Ints
    """The first row of each of ``names``."""
    queue_ids: Ints
    min_offsets: Ints
    max_offsets: Ints
    consumer_offsets: npt.NDArray[np.int64]
    """A large negative number without progress: see `has_progress`."""
    has_progress: npt.NDArray[np.bool_]
    lags: Ints
    oldest_ms: Ints
    """-1 if it is unknown."""
    now_ms: int | None
    """The time for computing ages."""

    @classmethod
    def of(cls, rows: Iterable[QueueLag]) -> Self:
        """Return the lag in these rows, which are measured elsewhere."""
        kept = sorted(rows)
        names = list(dict.fromkeys((row.group, row.topic) for row in kept))
        places = [(row.group, row.topic) for row in kept]
        columns = {name: np.array([getattr(row, name) for row in kept], np.int64) for name in _KNOWN}
        offsets = [row.consumer_offset for row in kept]
        oldest = [UNKNOWN if row.oldest_timestamp_ms is None else row.oldest_timestamp_ms for row in kept]
        return cls(
            names,
            np.array([places.index(name) for name in names], np.int64),
            columns["queue_id"],
            columns["min_offset"],
            columns["max_offset"],
            np.array([_NONE if one is None else one for one in offsets], np.int64),
            np.array([one is not None for one in offsets], np.bool_),
            columns["lag"],
            np.array(oldest, np.int64),
            None,
        )

    def __len__(self) -> int:
        return len(self.queue_ids)

    def __iter__(self) -> Iterator[QueueLag]:
        return self.rows(0, len(self))

    def rows(self, begin: int, end: int) -> Iterator[QueueLag]:
        """Yield some of the rows."""
        counts = self._counts().tolist()
        names = [name for name, count in zip(self.names, counts, strict=True) for _ in range(count)][begin:end]
        here = slice(begin, end)
        offsets: list[int | None] = self.consumer_offsets[here].tolist()
        for at in np.flatnonzero(~self.has_progress[here]).tolist():
            offsets[at] = None
        oldest: list[int | None] = self.oldest_ms[here].tolist()
        for at in np.flatnonzero(self.oldest_ms[here] == UNKNOWN).tolist():
            oldest[at] = None
        known = (column[here].tolist() for column in (self.queue_ids, self.min_offsets, self.max_offsets))
        columns: list[Any] = [*known, offsets, self.lags[here].tolist(), oldest]
        return (QueueLag(*name, *row) for name, row in zip(names, zip(*columns, strict=True), strict=True))

    @property
    def total(self) -> int:
        """The sum of all lags."""
        return int(self.lags.sum())

    def _counts(self) -> Ints:
        return np.diff(np.append(self.begins, len(self)))

    def by_topic(self) -> list[TopicLag]:
        """Return the lag of each group in each topic, sorted by group and topic."""
        if not len(self):
            return []
        consumed = np.maximum(0, self.consumer_offsets)  # a negative offset stands for no message
        expired = np.where(self.has_progress, np.maximum(0, self.min_offsets - consumed), 0)
        beyond = self.has_progress & (self.consumer_offsets > self.max_offsets)
        oldest = np.where(self.oldest_ms == UNKNOWN, _NEVER, self.oldest_ms)
        begins = self.begins
        columns = [
            self._counts(),
            np.add.reduceat(self.lags, begins),
            np.maximum.reduceat(self.lags, begins),
            np.minimum.reduceat(oldest, begins),
            np.add.reduceat((~self.has_progress).astype(np.int64), begins),
            np.add.reduceat(beyond.astype(np.int64), begins),
            np.add.reduceat(expired, begins),
        ]
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [
            TopicLag(name[0], name[1], count, lags, most, None if first == _NEVER else first, without, ahead, gone)
            for name, (count, lags, most, first, without, ahead, gone) in zip(self.names, rows, strict=True)
        ]

    def by_group(self) -> list[GroupLag]:
        """Return the lag of each group, sorted."""
        found: dict[str, list[TopicLag]] = {}
        for each in self.by_topic():
            found.setdefault(each.group, []).append(each)
        return [
            GroupLag(
                group,
                len(topics),
                sum(one.queues for one in topics),
                sum(one.lag for one in topics),
                sum(one.lag for one in topics if not one.is_again),
                sum(one.lag for one in topics if one.is_again),
                min((one.oldest_timestamp_ms for one in topics if one.oldest_timestamp_ms is not None), default=None),
            )
            for group, topics in found.items()
        ]

    def rates_since(self, earlier: Lag) -> list[GroupRate]:
        """Return the rates between an earlier measurement and this one, for each group and topic of both.

        A reset of progress in between counts as consumption, a reset backwards as none.
        """
        if self.now_ms is None or earlier.now_ms is None or self.now_ms <= earlier.now_ms:
            return []
        seconds = (self.now_ms - earlier.now_ms) / 1000
        before = {(row.group, row.topic, row.queue_id): row for row in earlier}
        found: dict[tuple[str, str], list[tuple[QueueLag, QueueLag]]] = {}
        for row in self:
            old = before.get((row.group, row.topic, row.queue_id))
            if old is not None:
                found.setdefault((row.group, row.topic), []).append((old, row))
        rates = []
        for (group, topic), pairs in found.items():
            stored = sum(max(0, row.max_offset - old.max_offset) for old, row in pairs) / seconds
            moved = [
                max(0, row.consumer_offset - max(old.consumer_offset or 0, old.min_offset))
                for old, row in pairs
                if row.consumer_offset is not None
            ]
            consumed = sum(moved) / seconds if moved else None
            waiting = sum(row.lag for _, row in pairs)
            gain = 0.0 if consumed is None else consumed - stored
            drain = 0.0 if not waiting else waiting / gain if gain > 0 else None
            rates.append(GroupRate(group, topic, seconds, stored, consumed, waiting, drain))
        return rates


def lag(source: Source, *, group: str | None = None, topic: str | None = None, times: bool = True) -> Lag:
    """Return the lag of each group in each queue of each topic with progress of the group.

    Args:
        source: A running broker, the folder of a store, or a view of either.
        group: Only this group.
        topic: Only this topic.
        times: Whether to look up the store times of the oldest unconsumed messages.

    Raises:
        NotAStoreError: The folder holds no store.
        CorruptionError: A file is damaged.
    """
    with viewed(source) as view:
        queues = _queues_by_topic(view)
        names: list[tuple[str, str]] = []
        parts: list[Ints] = []
        offsets: list[int] = []
        for (of, name), progress in sorted(view.progress.items()):
            if group in (None, of) and topic in (None, name):
                part, known = _with_deleted(*queues.get(name, _NO_QUEUE), progress)
                if known:
                    names.append((of, name))
                    parts.append(part)
                    offsets += map(progress.get, known, repeat(_NONE))
        begins = np.cumsum([0, *(part.shape[1] for part in parts)])[:-1].astype(np.int64)
        ids, begin, end = np.concatenate(parts, axis=1) if parts else _NO_QUEUE[0]
        offset = np.array(offsets, np.int64)
        has_progress = offset != _NONE
        start = np.maximum(begin, offset)
        lags = np.maximum(0, end - start)
        oldest = np.full(len(ids), UNKNOWN, np.int64)
        found = Lag(names, begins, ids, begin, end, offset, has_progress, lags, oldest, view.now_ms)
        if times:
            _look_up_oldest(view, found, start)
        return found


def _queues_by_topic(view: StoreView) -> dict[str, tuple[Ints, list[int]]]:
    """Return ids, begins and ends of the queues of each topic as three rows, and the ids also as a list."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    for (topic, queue_id), state in view.ranges.items():
        found.setdefault(topic, []).append((queue_id, state.min_offset, state.max_offset))
    return {topic: (np.array(rows, np.int64).T, [row[0] for row in rows]) for topic, rows in found.items()}


def _with_deleted(queues: Ints, ids: list[int], progress: dict[int, int]) -> tuple[Ints, list[int]]:
    """Add the deleted queues of a topic in which a group has progress."""
    gone = [queue_id for queue_id in progress.keys() - ids if progress[queue_id] > 0]
    if not gone:
        return queues, ids
    queues = np.concatenate((queues, [gone, [0] * len(gone), [0] * len(gone)]), axis=1)
    queues = queues[:, np.argsort(queues[0], kind="stable")]
    return queues, queues[0].tolist()


def _look_up_oldest(view: StoreView, found: Lag, start: Ints) -> None:
    """Fill in the store time of the message at ``start``, for each row that lags."""
    late = np.flatnonzero(found.lags)
    if not len(late):
        return
    topics = sorted({topic for _, topic in found.names})
    number = {topic: at for at, topic in enumerate(topics)}
    of_name = np.array([number[topic] for _, topic in found.names], np.int64)
    of = of_name[np.searchsorted(found.begins, late, side="right") - 1]
    ids, offsets = found.queue_ids[late], start[late]
    order = np.lexsort((offsets, ids, of))  # so that each queue is read once
    late, of, ids, offsets = late[order], of[order], ids[order], offsets[order]
    begins = np.flatnonzero(np.append(True, (np.diff(of) != 0) | (np.diff(ids) != 0)))
    ends = np.append(begins[1:], len(late))
    names = [
        (topics[topic], queue_id) for topic, queue_id in zip(of[begins].tolist(), ids[begins].tolist(), strict=True)
    ]
    queues = view.store.queues
    entries = np.zeros(len(late), ENTRY_DTYPE)
    rows = zip(names, begins.tolist(), ends.tolist(), offsets[begins].tolist(), offsets[ends - 1].tolist(), strict=True)
    for name, begin, end, first, last in rows:
        block = None if queues.is_open(name) else _entries_of_unopened(view, name, first, last)
        if block is not None:
            entries[begin:end] = block[offsets[begin:end] - first]
    places = entries["physical_offset"].astype(np.int64)
    is_sound = (entries["size"] > 0) & (entries["size"] != HOLE_SIZE)
    for at in np.flatnonzero(~np.logical_and.reduceat(is_sound, begins)).tolist():
        here = slice(begins[at], ends[at])
        places[here] = _places(queues[names[at]], offsets[here])
    found.oldest_ms[late] = store_times(view.store.log, places)


def _entries_of_unopened(view: StoreView, name: QueueName, first: int, last: int) -> npt.NDArray[np.void] | None:
    """Return the entries of a queue from its file alone, which is faster than opening the queue.

    None if they are in several files, or if the file is odd.
    """
    store = view.store
    file_size = store.config.consumequeue_file_size
    start = first * ENTRY_SIZE // file_size * file_size
    if last * ENTRY_SIZE >= start + file_size:
        return None
    path = os.path.join(directory.queue_folder(store.path, *name), file_name(start))
    try:
        buffer = store.files.open(path).buffer
    except (StoreIOError, CorruptionError):
        return None
    if len(buffer) != file_size:
        return None
    return np.frombuffer(buffer, ENTRY_DTYPE, last - first + 1, first * ENTRY_SIZE - start)


def _places(queue: ConsumeQueue, offsets: Ints) -> Ints:
    """Return the physical offsets of messages at ascending queue offsets, or of the next ones with an entry."""
    found = np.full(len(offsets), UNKNOWN, np.int64)
    at = 0
    while at < len(offsets):
        first = int(offsets[at])
        block = np.frombuffer(queue.read(first, min(_AT_ONCE, int(offsets[-1]) - first + 1)), ENTRY_DTYPE)
        until = max(at + 1, int(np.searchsorted(offsets, first + len(block))))
        if len(block):
            entries = block[offsets[at:until] - first]
            is_sound = (entries["size"] > 0) & (entries["size"] != HOLE_SIZE)
            found[at:until] = np.where(is_sound, entries["physical_offset"], UNKNOWN)
            for row in np.flatnonzero(entries["size"] == HOLE_SIZE).tolist():
                found[at + row] = _behind_hole(queue, int(offsets[at + row]))
        at = until
    return found


def _behind_hole(queue: ConsumeQueue, queue_offset: int) -> int:
    """Return the physical offset of the first message with an entry from ``queue_offset`` on."""
    for _, block in queue.blocks(queue_offset, queue_offset + _AT_ONCE):
        sound = np.flatnonzero(block["size"] != HOLE_SIZE)
        if len(sound):
            return int(block["physical_offset"][sound[0]])
    return UNKNOWN


# ---------------------------------------------------------------------------------------------------------- findings


def lag_findings(source: Source, thresholds: Thresholds | None = None, *, found: Lag | None = None) -> list[Finding]:
    """Return findings about lag: backlogs, progress beyond the end, messages deleted unread.

    ``found`` is the lag, if already known.
    """
    limits = thresholds or Thresholds()
    with viewed(source) as view:
        known = lag(view) if found is None else found
        findings: list[Finding] = []
        beyond = known.has_progress & (known.consumer_offsets > known.max_offsets)
        if beyond.any():
            findings += [_beyond(row) for row in known if (row.consumer_offset or 0) > row.max_offset]
        for each in known.by_topic():
            if limits.own or not is_own_group(each.group):
                findings += _of_topic(view, each, limits)
        return findings


def is_uneven(view: StoreView, topic: str, most: int, total: int, limits: Thresholds) -> bool:
    """Return whether one queue of a topic, with ``most`` messages to consume, has many more than the others."""
    queues = view.queue_count(topic)
    return queues > 1 and total > limits.normal_lag and most * queues > limits.uneven * total


def _beyond(row: QueueLag) -> Finding:
    return Finding(
        "progress-beyond-end",
        "error",
        f"group {row.group}, topic {row.topic}, queue {row.queue_id}",
        f"The progress {row.consumer_offset} is beyond the queue's end {row.max_offset}: the group would skip the "
        f"next {(row.consumer_offset or 0) - row.max_offset} messages.",
        {"consumer_offset": row.consumer_offset, "max_offset": row.max_offset},
        "Find out first whether the log lost its end: librmq verify STORE. Then set the progress to the end: librmq "
        f"reset STORE --group {row.group} --topic {row.topic} --queue {row.queue_id} --to end. Broker.open does it.",
    )


def _of_topic(view: StoreView, each: TopicLag, limits: Thresholds) -> Iterator[Finding]:
    subject = f"group {each.group}, topic {each.topic}"
    age_s = view.age_s(each.oldest_timestamp_ms)
    is_old = age_s is not None and age_s > limits.old_s
    evidence = {
        "lag": each.lag,
        "most_in_one_queue": each.most_in_one_queue,
        "queues": each.queues,
        "queues_without_progress": each.without_progress,
        "oldest_age_s": age_s,
    }
    if each.lag > limits.normal_lag:
        severity: Severity = "warning" if each.lag > limits.large_lag or is_old else "info"
        if severity == "warning" and each.topic in limits.topics:
            severity = "error"
        yield Finding(
            "backlog",
            severity,
            subject,
            f"{each.lag:,} messages wait"
            + ("." if age_s is None else f"; the oldest for {duration(age_s)}.")
            + (
                f" They count from the begin of {counted(each.without_progress, 'queue')} without progress."
                * (each.without_progress > 0)
            ),
            evidence,
            "Check that the group runs. What helps, and how long the rest takes: librmq whatif STORE --group "
            f"{each.group} --topic {each.topic} --handler TIME.",
        )
    elif each.lag and is_old:
        yield Finding(
            "old-messages",
            "warning",
            subject,
            f"Only {counted(each.lag, 'message')} left to consume, but the oldest has waited for {duration(age_s)}.",
            evidence,
            "Check whether the group runs, and which message holds its progress.",
        )
    queues = view.queue_count(each.topic)
    if is_uneven(view, each.topic, each.most_in_one_queue, each.lag, limits):
        yield Finding(
            "uneven-lag",
            "warning",
            subject,
            f"One of {queues} queues holds {each.most_in_one_queue:,} of the {each.lag:,} messages that wait.",
            evidence,
            "Check that queue for a stuck or slow consumer, or a key that many messages share.",
        )
    if each.expired:
        yield Finding(
            "expired-unread",
            "error",
            subject,
            f"Retention deleted {counted(each.expired, 'message')} before the group consumed them.",
            {"expired": each.expired},
            "Keep messages longer (file_reserved_hours, max_total_size), or let the group consume faster.",
        )
