"""Lag of consumer groups: unconsumed messages by queue, by topic and by group.

`librmq.message.lag` has the formula. There can be a hundred thousand rows, so they are kept as columns; each file of a
queue is read once for all groups.
"""

from __future__ import annotations

import os
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from typing import Any, Final, NamedTuple, TypeVar

from librmq.commitlog import CommitLog
from librmq.consumequeue import ENTRY_SIZE, HOLE_SIZE, ConsumeQueue
from librmq.consumequeue_entries import PLACE, places_and_sizes
from librmq.diagnosis.findings import Finding, Severity, Thresholds, cut_evidence, id_ranges
from librmq.diagnosis.formatting import duration
from librmq.diagnosis.view import QueueProgress, Source, StoreView, View, viewed
from librmq.errors import ConfigError, CorruptionError, StoreIOError
from librmq.files.rolling import file_name
from librmq.message.lag import deleted_unread, unread_and_lags, unread_from
from librmq.message.record import (
    BORN_HOST_V6,
    FIXED_SIZE,
    HOST_V6_EXTRA,
    PHYSICAL_OFFSET_AT,
    store_timestamp_ms,
)
from librmq.message.topics import RETRY_PREFIX, is_own_group
from librmq.runtime.event_log import counted
from librmq.store.engine.store_parts import QueueName
from librmq.store.format import directory

# ----------------------------------------------------------------------------------------------- store times of records

_NEVER_MS: Final = 1 << 63
_FEW_QUEUES: Final = 3
_PLACE_AND_TIME: Final = struct.Struct(">qi16xq").unpack_from  # the fields from the physical offset to the store time

_T = TypeVar("_T")


def store_times_at(log: CommitLog, physical_offsets: Iterable[int]) -> list[int | None]:
    """Return the store times of the records at these places in ms; None if no record starts there.

    Raises:
        CorruptionError: A file of the log has a wrong length.
    """
    begin, last, size = log.begin, log.end - FIXED_SIZE, log.file_size
    times: list[int | None] = []
    start, buffer = -1, None
    for place in physical_offsets:
        at = place % size
        if place - at != start:
            start = place - at
            file = log.sequence.file_at(place)
            buffer = None if file is None else file.buffer
        if buffer is None or not begin <= place <= last or at + FIXED_SIZE + HOST_V6_EXTRA > size:
            times.append(None)
            continue
        stated, sys_flag, time_ms = _PLACE_AND_TIME(buffer, at + PHYSICAL_OFFSET_AT)
        if sys_flag & BORN_HOST_V6:
            time_ms = store_timestamp_ms(buffer, at)
        times.append(time_ms if stated == place and time_ms >= 0 else None)
        if stated != place:
            _leave_out(log, place)
    return times


def _leave_out(log: CommitLog, place: int) -> None:
    log.leave_out(CorruptionError(log.sequence.path_at(place), place, "record", "an entry leads here, to no record"))


_AT_ONCE: Final = 64  # entries


class _Queues(NamedTuple):
    ids: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]


class QueueLag(NamedTuple):
    """The unconsumed messages of a group in one queue."""

    group: str
    topic: str
    queue_id: int
    """Number of the queue."""
    min_offset: int
    """The queue's first offset."""
    max_offset: int
    """The offset of the queue's next message."""
    consumer_offset: int | None
    """The queue offset of the group's next message; None without progress there."""
    lag: int
    """Number of unconsumed messages."""
    oldest_timestamp_ms: int | None
    """Store time of the oldest unconsumed message; None without one, or if it is unreadable."""

    @property
    def next_offset(self) -> int:
        """The queue offset of the first unconsumed message; the end or beyond it without one."""
        return unread_from(self.consumer_offset, self.min_offset)


class TopicLag(NamedTuple):
    """The unconsumed messages of a group in one topic."""

    group: str
    topic: str
    queues: int
    """Number of queues."""
    lag: int
    """Number of unconsumed messages."""
    most_in_one_queue: int
    """The largest lag of a queue."""
    oldest_timestamp_ms: int | None
    """Store time of the oldest unconsumed message; None without one, or if it is unreadable."""
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
    """Number of topics."""
    queues: int
    """Number of queues."""
    lag: int
    """All of it."""
    new: int
    """Messages of producers, including delivered delayed messages."""
    again: int
    """Retries, on which the group has failed before."""
    oldest_timestamp_ms: int | None
    """Store time of the oldest unconsumed message; None without one, or if it is unreadable."""


class GroupRate(NamedTuple):
    """How fast a topic grows and a group consumes it, between two measurements."""

    group: str
    topic: str
    seconds: float
    """Time between the measurements."""
    stored_per_s: float
    """New messages of the topic."""
    consumed_per_s: float | None
    """None if the group had no progress at either time."""
    lag: int
    """Unconsumed messages at the second measurement."""
    drain_s: float | None
    """Time until the lag is 0 at these rates; None if never."""


class TopicProgress(NamedTuple):
    """The queues of a topic as a group sees them, sorted by queue id, as columns."""

    group: str
    topic: str
    queue_ids: Sequence[int]
    """Numbers of the queues."""
    min_offsets: Sequence[int]
    """First offset of each queue."""
    max_offsets: Sequence[int]
    """Offset of each queue's next message."""
    consumer_offsets: Sequence[int | None]
    """The queue offset of the group's next message; None without progress."""
    lags: Sequence[int]
    """Numbers of unconsumed messages."""
    oldest_ms: Sequence[int | None]
    """Store time of the oldest unconsumed message, in milliseconds since 1970."""
    broker_names: Sequence[str] = ()
    """Broker of each queue, of which several can have one number; empty if there is only one broker."""

    def rows(self) -> Iterator[QueueLag]:
        """Yield a row for each queue."""
        return map(QueueLag, repeat(self.group), repeat(self.topic), *self[2:8])

    def by_queue(self) -> dict[tuple[str, int], QueueLag]:
        """Return the row of each queue by its broker and number."""
        return dict(zip(zip(self.broker_names or repeat(""), self.queue_ids, strict=False), self.rows(), strict=True))

    def sums(self) -> TopicLag:
        """Return the sums over the queues."""
        expired = beyond = 0
        for begin, end, offset in zip(self.min_offsets, self.max_offsets, self.consumer_offsets, strict=True):
            if offset is not None and not begin <= offset <= end:
                beyond += offset > end
                expired += deleted_unread(offset, begin)
        return TopicLag(
            self.group,
            self.topic,
            len(self.queue_ids),
            sum(self.lags),
            max(self.lags, default=0),
            min((time for time in self.oldest_ms if time is not None), default=None),
            self.consumer_offsets.count(None),
            beyond,
            expired,
        )


@dataclass(frozen=True, eq=False)
class Lag:
    """The lag of groups at one moment; iterating makes a `QueueLag` of each queue."""

    topics: Sequence[TopicProgress]
    """Each topic of each group, sorted."""
    now_ms: int | None
    """The time for computing ages."""

    def __len__(self) -> int:
        if isinstance(self.topics, _Blocks):
            return sum(block.row_count for block in self.topics.blocks)
        return sum(len(columns.queue_ids) for columns in self.topics)

    def __iter__(self) -> Iterator[QueueLag]:
        if isinstance(self.topics, _Blocks) and self.topics.are_narrow:
            return self.topics.rows()
        return chain.from_iterable(columns.rows() for columns in self.topics)

    @property
    def total(self) -> int:
        """The sum of all lags."""
        return sum(sum(columns.lags) for columns in self.topics)

    def by_topic(self) -> list[TopicLag]:
        """Return the lag of each group in each topic, sorted by group and topic."""
        return [columns.sums() for columns in self.topics]

    def by_group(self) -> list[GroupLag]:
        """Return the lag of each group, sorted."""
        blocks = self.topics.blocks if isinstance(self.topics, _Blocks) else map(_block_of, self.topics)
        return _sums_by_group(blocks)

    def rates_since(self, earlier: Lag) -> list[GroupRate]:
        """Return the rates between an earlier measurement and this one, for each group and topic of both.

        A reset of progress in between counts as consumption, a reset backwards as none.
        """
        if self.now_ms is None or earlier.now_ms is None or self.now_ms <= earlier.now_ms:
            return []
        seconds = (self.now_ms - earlier.now_ms) / 1000
        before = {columns[:2]: columns for columns in earlier.topics}
        pairs = [(before[columns[:2]], columns) for columns in self.topics if columns[:2] in before]
        return [rate for old, columns in pairs if (rate := rate_between(old, columns, seconds)) is not None]


def rate_between(earlier: TopicProgress, later: TopicProgress, seconds: float) -> GroupRate | None:
    """Return the rates of a group and topic between two measurements; None if no queue is in both."""
    before = earlier.by_queue()
    pairs = [(before[queue], row) for queue, row in later.by_queue().items() if queue in before]
    if not pairs:
        return None
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
    return GroupRate(later.group, later.topic, seconds, stored, consumed, waiting, drain)


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
        progress_by_topic: defaultdict[str, dict[str, dict[int, int]]] = defaultdict(dict)
        takes_all = group is None and topic is None
        for (group_name, name), progress in view.progress.items():
            if takes_all or (group in (None, group_name) and topic in (None, name)):
                progress_by_topic[name][group_name] = progress
        return Lag(
            _Blocks(
                _block(view, name, progress_by_topic[name], queues.get(name), times)
                for name in sorted(progress_by_topic)
            ),
            view.now_ms,
        )


def lag_of_view(view: View[Any], *, group: str | None = None, topic: str | None = None, times: bool = True) -> Lag:
    """Return the lag of all groups of a store, or of all of a cluster but its brokers' own, as `lag` does."""
    if isinstance(view, StoreView):
        return lag(view, group=group, topic=topic, times=times)
    groups = [name for name in view.groups if not is_own_group(name)] if group is None else [group]
    topics = ((name, *consumed) for name in groups for consumed in view.consumed(name, topic))
    return Lag([_progress_in(view, *columns, times) for columns in topics], None)


def _progress_in(
    view: View[Any], group: str, topic: str, queues: Mapping[Any, QueueProgress], times: bool
) -> TopicProgress:
    begins, ends, offsets = zip(*queues.values(), strict=True)
    starts, lags = unread_and_lags(offsets, begins, ends)
    oldest_ms = [
        view.stored_at(queue, start) if times and waiting else None
        for queue, start, waiting in zip(queues, starts, lags, strict=True)
    ]
    ids, broker_names = [queue.queue_id for queue in queues], [view.broker_name(queue) for queue in queues]
    return TopicProgress(group, topic, ids, begins, ends, offsets, lags, oldest_ms, broker_names)


def no_progress(group: str, topic: str) -> ConfigError:
    """Return the error of a group that never consumed a topic."""
    return ConfigError(f"group {group!r} has no progress in topic {topic!r}: `librmq groups` lists groups and topics")


def _queues_by_topic(view: StoreView) -> dict[str, _Queues]:
    rows_by_topic: dict[str, list[tuple[int, int, int]]] = {}
    for (topic, queue_id), state in view.ranges.items():
        rows_by_topic.setdefault(topic, []).append((queue_id, state.min_offset, state.max_offset))
    return {topic: _Queues(*zip(*rows, strict=True)) for topic, rows in rows_by_topic.items()}


class _Block(NamedTuple):
    """The groups with progress in a topic, or in a deleted queue of it, as columns for each queue."""

    topic: str
    progresses: Mapping[str, Mapping[int, int]]
    """The progress of each group."""
    queues: list[tuple[int, int, int]]
    """Number, begin and end of each queue."""
    by_queue: list[tuple[list[int | None], list[int], list[int | None]]]
    """Progress, lag and oldest time of each group, for each queue."""
    deleted: dict[str, list[int]]
    """The deleted queues in which a group has progress."""

    @property
    def row_count(self) -> int:
        """Number of queues of all groups."""
        return len(self.queues) * len(self.progresses) + sum(map(len, self.deleted.values()))

    def columns(self) -> Iterator[TopicProgress]:
        """Yield the columns of each group."""
        columns = zip(*self.queues, strict=True) if self.queues else repeat((), 3)
        by_group = (
            (zip(*items, strict=True) for items in zip(*self.by_queue, strict=True))
            if self.queues
            else repeat(repeat(()), 3)
        )
        for of_group in map(TopicProgress, self.progresses, repeat(self.topic), *map(repeat, columns), *by_group):
            # Each group brings the deleted queues of its own progress, so that they cost nothing in the other groups.
            if of_group.group in self.deleted:
                yield _with_deleted(of_group, self.deleted[of_group.group], self.progresses[of_group.group])
            elif self.queues:
                yield of_group


def _block(
    view: StoreView, topic: str, progresses: Mapping[str, Mapping[int, int]], queues: _Queues | None, times: bool
) -> _Block:
    rows = sorted(zip(*queues, strict=True)) if queues else []
    by_queue: list[tuple[list[int | None], list[int], list[int | None]]] = []
    for queue_id, begin, end in rows:
        offsets = [progress.get(queue_id) for progress in progresses.values()]
        starts, lags = unread_and_lags(offsets, repeat(begin, len(offsets)), repeat(end, len(offsets)))
        oldest_ms = _oldest_timestamps(view, (topic, queue_id), starts, end if times else 0)
        by_queue.append((offsets, lags, oldest_ms))
    existing = frozenset(queue_id for queue_id, _, _ in rows)
    deleted: dict[str, list[int]] = {}
    for group, progress in progresses.items():
        if not progress.keys() <= existing and (
            ids := [queue_id for queue_id in progress.keys() - existing if progress[queue_id] > 0]
        ):
            deleted[group] = sorted(ids)
    return _Block(topic, progresses, rows, by_queue, deleted)


class _Blocks(Sequence[TopicProgress]):
    """The topics of each group, sorted, which are made when they are asked for; sums by group need none."""

    def __init__(self, blocks: Iterable[_Block]) -> None:
        self.blocks = list(blocks)

    @cached_property
    def _topics(self) -> list[TopicProgress]:
        by_group: defaultdict[str, list[TopicProgress]] = defaultdict(list)
        for columns in chain.from_iterable(block.columns() for block in self.blocks):
            by_group[columns.group].append(columns)
        return [columns for _, of_group in sorted(by_group.items()) for columns in of_group]

    @property
    def are_narrow(self) -> bool:
        """Whether topics have so few queues on average that `rows` is faster than the rows of each group's columns."""
        return sum(len(block.queues) for block in self.blocks) <= _FEW_QUEUES * len(self.blocks)

    def rows(self) -> Iterator[QueueLag]:
        """Yield a row for each queue of each group, sorted; all of them are in memory."""
        by_group: defaultdict[str, list[QueueLag]] = defaultdict(list)
        for block in self.blocks:
            of_queues = [
                map(QueueLag, block.progresses, repeat(block.topic), *map(repeat, queue), *of_queue)
                for queue, of_queue in zip(block.queues, block.by_queue, strict=True)
            ]
            for group, rows in zip(block.progresses, zip(*of_queues, strict=True), strict=False):
                if group not in block.deleted:
                    by_group[group] += rows
            if block.deleted:
                for columns in block.columns():
                    if columns.group in block.deleted:
                        by_group[columns.group] += columns.rows()
        return chain.from_iterable(by_group[group] for group in sorted(by_group))

    def __len__(self) -> int:
        return len(self._topics)

    def __getitem__(self, place: Any) -> Any:  # noqa: ANN401 (a number or a slice)
        return self._topics[place]

    def __iter__(self) -> Iterator[TopicProgress]:
        return iter(self._topics)


def _block_of(columns: TopicProgress) -> _Block:
    """Return the block of one group."""
    queues = list(zip(columns.queue_ids, columns.min_offsets, columns.max_offsets, strict=True))
    of_queues = zip(columns.consumer_offsets, columns.lags, columns.oldest_ms, strict=True)
    by_queue = [([offset], [lag], [oldest_ms]) for offset, lag, oldest_ms in of_queues]
    return _Block(columns.topic, {columns.group: {}}, queues, by_queue, {})


def _sums_by_group(blocks: Iterable[_Block]) -> list[GroupLag]:
    """Return the sums of each group, sorted, without an object for each of its topics."""
    topics, queues, new, again = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    oldest: dict[str, int] = {}
    by_count: defaultdict[int, Counter[str]] = defaultdict(Counter)  # each group's topics of so many queues
    for block in blocks:
        for group, ids in block.deleted.items():
            queues[group] += len(ids)
        by_count[len(block.queues)].update(list(block.progresses if block.queues else block.deleted))
        sums = again if block.topic.startswith(RETRY_PREFIX) else new
        for _, lags, oldest_ms in block.by_queue:
            for group, waiting, time_ms in zip(block.progresses, lags, oldest_ms, strict=True):
                if waiting:
                    sums[group] += waiting
                    if time_ms is not None and time_ms < oldest.get(group, _NEVER_MS):
                        oldest[group] = time_ms
    for count, groups in by_count.items():
        topics += groups
        for group, of_count in groups.items():
            queues[group] += count * of_count
    return [
        GroupLag(name, topics[name], queues[name], new[name] + again[name], new[name], again[name], oldest.get(name))
        for name in sorted(topics)
    ]


def _with_deleted(columns: TopicProgress, deleted: list[int], progress: Mapping[int, int]) -> TopicProgress:
    """Return the columns of a group and topic with deleted queues, which are empty and where nothing waits."""
    zeros, ids = [0] * len(deleted), [*columns.queue_ids, *deleted]
    # Most deleted queues are those behind the last one; only others need an order of their own.
    is_behind = not columns.queue_ids or columns.queue_ids[-1] < deleted[0]
    order = [] if is_behind else [at for _, at in sorted(zip(ids, range(len(ids)), strict=True))]

    def joined(items: Sequence[_T], more: Sequence[_T]) -> Sequence[_T]:
        rows = [*items, *more]
        return [rows[at] for at in order] if order else rows

    return TopicProgress(
        columns.group,
        columns.topic,
        joined(columns.queue_ids, deleted),
        joined(columns.min_offsets, zeros),
        joined(columns.max_offsets, zeros),
        joined(columns.consumer_offsets, [progress[queue_id] for queue_id in deleted]),
        joined(columns.lags, zeros),
        joined(columns.oldest_ms, [None] * len(deleted)),
    )


def _oldest_timestamps(view: StoreView, name: QueueName, starts: Sequence[int], end: int) -> list[int | None]:
    """Return the store time of the oldest unconsumed message of each group in a queue; None without one."""
    offsets = sorted({start for start in starts if start < end})
    if not offsets:
        return [None] * len(starts)
    places = None if view.store.queues.is_open(name) else _places_in_unopened(view, name, offsets)
    if places is None:
        queue = view.store.queues[name]
        places = [first_place(queue, start) for start in offsets]
    times = dict(zip(offsets, store_times_at(view.store.log, places), strict=True))
    return list(map(times.get, starts))


def _places_in_unopened(view: StoreView, name: QueueName, starts: list[int]) -> list[int] | None:
    """Return the physical offsets at queue offsets from the queue's file, which is faster than opening the queue.

    None if they are in several files, if the file is odd, or if an entry leads to no message.
    """
    store = view.store
    file_size = store.config.consumequeue_file_size
    begin = starts[0] * ENTRY_SIZE // file_size * file_size
    if starts[-1] * ENTRY_SIZE >= begin + file_size:
        return None
    path = os.path.join(directory.queue_folder(store.path, *name), file_name(begin))
    try:
        file = store.files.open(path)
    except (StoreIOError, CorruptionError):
        return None
    if file.size != file_size:
        return None
    entries = [PLACE.unpack_from(file.buffer, start * ENTRY_SIZE - begin) for start in starts]
    return [place for place, _ in entries] if all(0 < size != HOLE_SIZE for _, size in entries) else None


def first_place(queue: ConsumeQueue, queue_offset: int) -> int:
    """Return the physical offset of the first message with an entry from ``queue_offset`` on; -1 without one."""
    while raw := queue.read(queue_offset, _AT_ONCE):
        for place, size in zip(*places_and_sizes(raw), strict=True):
            if size != HOLE_SIZE:
                return place if size > 0 else -1
        queue_offset += len(raw) // ENTRY_SIZE
    return -1


# ---------------------------------------------------------------------------------------------------------- findings


def lag_findings(view: StoreView, limits: Thresholds, group_lag: Lag) -> Iterator[Finding]:
    """Yield findings about lag: backlogs, progress beyond the end, messages deleted unread."""
    if view.store.past_ms is not None:
        return  # the progress back then is unknown
    # If the log is cut short, its damage is the finding, and a reset would lose the progress.
    is_cut_short = bool(view.store.condition.lost)
    for columns in group_lag.topics:
        topic_lag = columns.sums()
        if topic_lag.beyond_end and not is_cut_short:
            yield _beyond_end([row for row in columns.rows() if (row.consumer_offset or 0) > row.max_offset])
        if limits.own or not is_own_group(topic_lag.group):
            yield from _topic_findings(view, topic_lag, limits)


def is_uneven(view: StoreView, topic: str, largest: int, total: int, limits: Thresholds) -> bool:
    """Return whether one queue of a topic, with ``largest`` of ``total`` waiting messages, has many more than others.

    It is compared with the mean of the other queues, so that one of two queues can have many more too.
    """
    others = view.queue_count(topic) - 1
    return others > 0 and total > limits.normal_lag and largest * others > limits.uneven * (total - largest)


def _beyond_end(rows: Sequence[QueueLag]) -> Finding:
    """Return the finding about the queues of a group and topic whose progress is beyond their end."""
    worst = max(rows, key=lambda row: (row.consumer_offset or 0) - row.max_offset)
    ahead = sum((row.consumer_offset or 0) - row.max_offset for row in rows)
    where = id_ranges(row.queue_id for row in rows)
    what = f"In queue {where} the progress {worst.consumer_offset} is beyond the end {worst.max_offset}"
    if len(rows) > 1:
        what = (
            f"In {counted(len(rows), 'queue')} the progress is beyond the end, most in queue {worst.queue_id}: "
            f"{worst.consumer_offset} of {worst.max_offset}"
        )
    options = f"--group {worst.group} --topic {worst.topic} --queue {where} --to end"
    return Finding(
        "progress-beyond-end", "error", f"group {worst.group}, topic {worst.topic}",
        f"{what}. The group would skip the next {counted(ahead, 'message')}.",
        {"queue_id": worst.queue_id, "consumer_offset": worst.consumer_offset, "max_offset": worst.max_offset,
         "queues": len(rows), "queue_ids": where, **cut_evidence(where.endswith("…")), "messages": ahead},
        "Find out first whether the log lost its end: librmq verify STORE. Then set the progress to the end: "
        + ("Broker.open does it." if where.endswith("…") else f"librmq reset STORE {options}, or Broker.open."),
    )  # fmt: skip


def _topic_findings(view: StoreView, topic_lag: TopicLag, limits: Thresholds) -> Iterator[Finding]:
    subject = f"group {topic_lag.group}, topic {topic_lag.topic}"
    age_s = view.age_s(topic_lag.oldest_timestamp_ms)
    is_old = age_s is not None and age_s > limits.old_s
    evidence = {
        "lag": topic_lag.lag,
        "most_in_one_queue": topic_lag.most_in_one_queue,
        "queues": topic_lag.queues,
        "queues_without_progress": topic_lag.without_progress,
        "oldest_age_s": age_s,
    }
    if topic_lag.lag > limits.normal_lag:
        is_large = topic_lag.lag > limits.large_lag or is_old
        severity: Severity = limits.severity_of(topic_lag.topic) if is_large else "info"
        yield Finding(
            "backlog", severity, subject,
            f"{topic_lag.lag:,} messages wait"
            + ("." if age_s is None else f"; the oldest for {duration(age_s)}.")
            + (
                f" They count from the beginning of {counted(topic_lag.without_progress, 'queue')} without progress."
                * (topic_lag.without_progress > 0)
            ),
            evidence,
            "Check that the group runs. What helps, and how long the rest takes: librmq whatif STORE --group "
            f"{topic_lag.group} --topic {topic_lag.topic} --handler TIME.",
        )  # fmt: skip
    elif topic_lag.lag and is_old:
        yield Finding(
            "old-messages", "warning", subject,
            f"Only {counted(topic_lag.lag, 'message')} left to consume, but the oldest has waited for "
            f"{duration(age_s)}.",
            evidence, "Check whether the group runs, and which message holds its progress.",
        )  # fmt: skip
    if topic_lag.expired:
        yield Finding(
            "expired-unread", "error", subject,
            f"{counted(topic_lag.expired, 'message')} of the group's queues were deleted before the group consumed "
            "them.",
            {"expired": topic_lag.expired},
            "Unless the finding missing-log-files says that files are missing, retention deleted them: keep messages "
            "longer (file_reserved_hours, max_total_size), or let the group consume faster.",
        )  # fmt: skip
