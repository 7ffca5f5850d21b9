"""Lag of consumer groups: unconsumed messages by queue, by topic and by group.

`librmq.message.lag` has the formula. There can be a million rows, so they are kept as columns of numpy; each file of a
queue is read once for all groups.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate, chain, compress, count, pairwise, repeat, starmap
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from librmq.consumequeue_entries import ENTRY_SIZE, HOLE_SIZE, PLACE
from librmq.diagnosis._findings import Finding, Severity, Thresholds, cut_evidence
from librmq.diagnosis.view import ClusterView, LiveSource, LiveView, QueueProgress, StoreView, View, viewed_live
from librmq.errors import ConfigError, CorruptionError, StoreIOError
from librmq.files.rolling import file_name
from librmq.formatting import duration, id_ranges
from librmq.java.json import NumberColumns
from librmq.message.lag import lag_terms
from librmq.message.topics import TopicPrefix, is_own_group
from librmq.override import override
from librmq.runtime import lazy_numpy as np
from librmq.runtime.event_log import counted
from librmq.store.engine.store_parts import QueueName
from librmq.store.engine.store_times import store_times_at
from librmq.store.format import directory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[Any]

_NEVER_MS: Final = (1 << 63) - 1


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
        return max(self.consumer_offset or 0, self.min_offset)


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
    """Queues without progress of the group, which count from their beginning."""
    beyond_end: int
    """Queues whose progress is beyond their end."""
    expired: int
    """Messages that were deleted before the group reached them."""


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


@dataclass(frozen=True, eq=False)
class Lag:
    """The lag of groups at one moment; iterating makes a `QueueLag` of each queue."""

    topics: Sequence[TopicProgress]
    """Each topic of each group, sorted."""
    now_ms: int | None
    """The time for computing ages."""

    @cached_property
    def _rows(self) -> _Rows:
        return self.topics if isinstance(self.topics, _Rows) else _Rows.of(self.topics)

    def __len__(self) -> int:
        return int(self._rows.bounds[-1])

    def __iter__(self) -> Iterator[QueueLag]:
        return self._rows.queue_lags()

    def by_broker(self) -> Iterator[tuple[str, QueueLag]]:
        """Yield the row of each queue with its broker, which is empty if there is only one."""
        if isinstance(self.topics, _Rows):
            yield from zip(repeat(""), self, strict=False)
        for topic in () if isinstance(self.topics, _Rows) else self.topics:
            yield from zip(topic.broker_names or repeat(""), topic.rows(), strict=False)

    @property
    def total(self) -> int:
        """The sum of all lags."""
        return sum(topic_lag.lag for topic_lag in self.by_topic())

    def by_topic(self) -> list[TopicLag]:
        """Return the lag of each group in each topic, sorted by group and topic."""
        return self._rows.by_topic()

    def by_group(self) -> list[GroupLag]:
        """Return the lag of each group, sorted."""
        return self._rows.by_group()

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


def lag(
    source: LiveSource | View[Any],
    *,
    group: str | Collection[str] | None = None,
    topic: str | None = None,
    times: bool = True,
    includes_own: bool = True,
) -> Lag:
    """Return the lag of each group in each queue of each topic with progress of the group.

    Args:
        source: A running broker, a share, a cluster, the folder of a store, or a view of one.
        group: Only this group, or these.
        topic: Only this topic.
        times: Whether to look up the store times of the oldest unconsumed messages.
        includes_own: Whether the broker's own groups count too; one that ``group`` names always does.

    Raises:
        NotAStoreError: The folder holds no store.
        CorruptionError: A file is damaged.
    """
    with viewed_live(cast("LiveSource", source)) as view:
        if isinstance(view, ClusterView):
            time_of = view.stored_at if times else None
            return Lag(_topics_of(view, group, topic, includes_own, time_of), view.now_ms)
        progress = view.progress_columns
        if progress is None:  # numpy, whose import takes longer than few queues, is left out
            time_at = cache(lambda queue, start: _times_of(view, queue, [start])[0]) if times else None
            return Lag(_topics_of(view, group, topic, includes_own, time_at), view.now_ms)
        if not includes_own and group is None:
            progress = progress.named(1, {name for name in progress.names[1] if not is_own_group(name)})
        for at, name in enumerate((topic, group)):
            if name is not None:
                progress = progress.named(at, {name} if isinstance(name, str) else set(name))
        return Lag(_rows_of(view, progress, times), view.now_ms)


def _topics_of(
    view: View[Any],
    group: str | Collection[str] | None,
    topic: str | None,
    includes_own: bool,
    time_at: Callable[[Any, int], int | None] | None,
) -> list[TopicProgress]:
    """Return the queues of each topic that a group has consumed; ``time_at`` returns the store time of a message."""
    if group is None:
        groups = [name for name in view.groups if includes_own or not is_own_group(name)]
    else:
        groups = [group] if isinstance(group, str) else sorted(set(group))
    return [
        _progress_in(view, name, consumed_topic, queues, time_at)
        for name in groups
        for consumed_topic, queues in view.consumed(name, topic)
        if queues
    ]


def _progress_in(
    view: View[Any],
    group: str,
    topic: str,
    queues: Mapping[Any, QueueProgress],
    time_at: Callable[[Any, int], int | None] | None,
) -> TopicProgress:
    begins, ends, offsets = map(list, zip(*queues.values(), strict=True))
    firsts, lags, *_ = _terms(_filled(offsets, begins), begins, ends)
    oldest_ms = [
        time_at(queue, first) if time_at is not None and waiting else None
        for queue, first, waiting in zip(queues, firsts, lags, strict=True)
    ]
    ids, broker_names = [queue[-1] for queue in queues], [view.broker_name(queue) for queue in queues]
    return TopicProgress(
        group=group,
        topic=topic,
        queue_ids=ids,
        min_offsets=begins,
        max_offsets=ends,
        consumer_offsets=offsets,
        lags=lags,
        oldest_ms=oldest_ms,
        broker_names=broker_names,
    )


def no_progress(group: str, topic: str) -> ConfigError:
    """Return the error of a group that never consumed a topic."""
    return ConfigError(f"group {group!r} has no progress in topic {topic!r}: `librmq groups` lists groups and topics")


class _Rows(Sequence[TopicProgress]):
    """The queues of each group and topic, as columns with an element for each of them.

    The columns are lists, or arrays where there are many queues. The queues of a pair are those between its bounds. The
    pairs of a group are behind each other.
    """

    def __init__(
        self,
        names: tuple[Sequence[str], Sequence[str]],
        bounds: Any,  # noqa: ANN401 (a column)
        columns: Sequence[Any],
        places: Sequence[Ints] | None = None,
    ) -> None:
        """Take ids, begins, ends, offsets, whether these are unknown and so equal to the begins, and oldest times.

        ``names`` are the groups and the topics, one of each for a pair; with ``places`` all that there are, and the
        places there of each pair's.
        """
        self._names, self._places = names, places
        self.bounds = bounds
        """The number of each pair's first queue, and that of all queues."""
        self._ids, self._begins, self._ends, self._offsets, self._is_unknown, self._oldest_ms = columns

    @classmethod
    def of(cls, topics: Sequence[TopicProgress]) -> _Rows:
        """Return the queues of some topics."""
        groups, names, *columns = zip(*(queues[:8] for queues in topics), strict=True) if topics else [()] * 8
        bounds = [0, *accumulate(map(len, columns[0]))]
        ids, begins, ends, offsets, _, oldest_ms = (list(chain.from_iterable(column)) for column in columns)
        is_unknown = [offset is None for offset in offsets]
        oldest_ms = [_NEVER_MS if time_ms is None else time_ms for time_ms in oldest_ms]
        return cls((groups, names), bounds, (ids, begins, ends, _filled(offsets, begins), is_unknown, oldest_ms))

    @cached_property
    def _groups(self) -> Sequence[str]:
        return self._names_of_pairs(0)

    @cached_property
    def _topics(self) -> Sequence[str]:
        return self._names_of_pairs(1)

    def _names_of_pairs(self, at: int) -> Sequence[str]:
        names = self._names[at]
        return names if self._places is None else _listed(np.array(names, np.object_)[self._places[at]])

    @cached_property
    def _terms(self) -> Sequence[Any]:
        return _terms(self._offsets, self._begins, self._ends)

    @cached_property
    def _lists(self) -> list[list[Any]]:
        """The columns of `QueueLag` from the queue's number on."""
        numbers = self._ids, self._begins, self._ends, self._offsets, self._terms[1]
        ids, begins, ends, offsets, lags = map(_listed, numbers)
        progress: list[int | None] = [*offsets]
        for queue in compress(count(), _listed(self._is_unknown)):
            progress[queue] = None
        return [ids, begins, ends, progress, lags, _times(_listed(self._oldest_ms))]

    @override
    def __len__(self) -> int:
        return len(self.bounds) - 1

    @override
    def __getitem__(self, place: Any) -> Any:  # noqa: ANN401 (a number or a slice)
        if isinstance(place, slice):
            return list(self)[place]
        place = range(len(self))[place]
        queues = slice(*self.bounds[place : place + 2])
        return TopicProgress(self._groups[place], self._topics[place], *(column[queues] for column in self._lists))

    @override
    def __iter__(self) -> Iterator[TopicProgress]:
        queues = list(starmap(slice, pairwise(_listed(self.bounds))))
        columns = (map(column.__getitem__, queues) for column in self._lists)
        return map(TopicProgress, self._groups, self._topics, *columns)

    def queue_lags(self) -> Iterator[QueueLag]:
        """Yield the row of each queue."""
        names = (chain.from_iterable(map(repeat, column, self._counts())) for column in (self._groups, self._topics))
        return map(partial(tuple.__new__, QueueLag), zip(*names, *self._lists, strict=True))

    def by_topic(self) -> list[TopicLag]:
        _, lags, deleted, is_beyond = self._terms
        by_pair = partial(self._combined, bounds=self.bounds)
        sums = [by_pair(sum, lags), by_pair(max, lags), by_pair(min, self._oldest_ms)]
        sums += [by_pair(sum, column) for column in (self._is_unknown, is_beyond, deleted)]
        total, largest, oldest_ms, *others = map(_listed, sums)
        columns = self._groups, self._topics, self._counts(), total, largest, _times(oldest_ms), *others
        return [TopicLag(*row) for row in zip(*columns, strict=True)]

    def by_group(self) -> list[GroupLag]:
        lags, places = self._terms[1], self._places
        is_again = [topic.startswith(TopicPrefix.RETRY) for topic in self._names[1]]
        lags_again = self._combined(sum, lags, self.bounds)
        if places is None:
            firsts: Any = [0, *accumulate(Counter(self._groups).values())]
            bounds: Any = [self.bounds[first] for first in firsts]
            lags_again = [lag if again else 0 for lag, again in zip(lags_again, is_again, strict=True)]
        else:
            firsts = np.append(np.flatnonzero(np.diff(places[0], prepend=-1)), len(places[0]))
            bounds = self.bounds[firsts]
            lags_again = lags_again * np.array(is_again)[places[1]]
        sums = (
            self._combined(sum, lags, bounds),
            self._combined(sum, lags_again, firsts),
            self._combined(min, self._oldest_ms, bounds),
        )
        totals, again, oldest_ms = map(_listed, sums)
        names = [self._names[0][first if places is None else places[0][first]] for first in firsts[:-1]]
        counts = ([end - begin for begin, end in pairwise(_listed(column))] for column in (firsts, bounds))
        new = [total - repeated for total, repeated in zip(totals, again, strict=True)]
        return list(map(GroupLag, names, *counts, totals, new, again, _times(oldest_ms)))

    def _counts(self) -> list[int]:
        return [end - begin for begin, end in pairwise(_listed(self.bounds))]

    @staticmethod
    def _combined(combine: Callable[[Sequence[int]], int], column: Any, bounds: Any) -> Any:  # noqa: ANN401 (columns)
        """Return the sums, maxima or minima of a column between its bounds."""
        if isinstance(column, list):
            return [combine(column[begin:end]) for begin, end in pairwise(bounds)]
        ufunc = {sum: np.add, max: np.maximum, min: np.minimum}[combine]
        return ufunc.reduceat(column, bounds[:-1], dtype=np.int64)


def _terms(offsets: Any, begins: Any, ends: Any) -> Sequence[Any]:  # noqa: ANN401 (columns)
    """Return columns of first unread offsets, lags, deleted unread messages, and whether the progress is too large."""
    if isinstance(offsets, list):
        rows = [
            (*lag_terms(offset, begin, end), offset > end)
            for offset, begin, end in zip(offsets, begins, ends, strict=True)
        ]
        return [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
    return *lag_terms(offsets, begins, ends, np.maximum), offsets > ends


def _filled(offsets: Iterable[int | None], begins: Iterable[int]) -> list[int]:
    return [begin if offset is None else offset for offset, begin in zip(offsets, begins, strict=True)]


def _listed(column: Any) -> list[Any]:  # noqa: ANN401 (a column)
    return column if isinstance(column, list) else column.tolist()


def _times(times_ms: Iterable[int]) -> list[int | None]:
    return [None if time_ms == _NEVER_MS else time_ms for time_ms in times_ms]


def _sorted(names: list[str], places: Ints) -> tuple[list[str], Ints]:
    """Return names in order, and the places there of those that had ``places``."""
    order = sorted(range(len(names)), key=names.__getitem__)
    ranks = np.empty(len(names), np.int64)
    ranks[order] = np.arange(len(names))
    return [names[place] for place in order], ranks[places]


def _rows_of(view: StoreView, progress: NumberColumns, times: bool) -> _Rows:
    """Return the queues of each topic in which a group has progress, and the deleted ones where it has any."""
    topics, topic_of_row = _sorted(progress.names[0], progress.parts[0])
    groups, group_of_row = _sorted(progress.names[1], progress.parts[1])
    numbers = group_of_row * len(topics) + topic_of_row
    order = np.argsort(numbers, kind="stable")
    group_of_pair, topic_of_pair = group_of_row[order], topic_of_row[order]
    is_last = np.diff(numbers[order], append=-1) != 0
    if not is_last.all():  # of rows with one name the last counts
        return _rows_of(view, progress.chosen(is_last[np.argsort(order)]), times)
    pair_of_row = np.empty_like(order)
    pair_of_row[order] = np.arange(len(order))

    # The queues, sorted by topic and number, with one behind them that is of no topic.
    place_of = {name: place for place, name in enumerate(topics)}
    queues = [(name, state) for name, state in view.ranges.items() if name[0] in place_of]
    rows = [(place_of[topic], queue_id, *state[:2]) for (topic, queue_id), state in queues]
    topic_of_queue, ids, begins, ends = np.array([*rows, (len(topics), 0, 0, 0)], np.int64).T
    firsts = np.searchsorted(topic_of_queue, np.arange(len(topics) + 1))

    widths = np.diff(firsts)[topic_of_pair]
    starts = np.cumsum(widths) - widths
    pair_of_cell = np.repeat(np.arange(len(order)), widths)
    queue_of_cell = np.arange(len(pair_of_cell)) + np.repeat(firsts[topic_of_pair] - starts, widths)

    pair_of_entry = np.repeat(pair_of_row, progress.widths)
    topic_of_entry = topic_of_pair[pair_of_entry]
    distinct = np.unique(ids)
    queue_of_entry = np.searchsorted(
        topic_of_queue * len(distinct) + np.searchsorted(distinct, ids),
        topic_of_entry * len(distinct) + np.searchsorted(distinct, progress.keys),
    )
    exists = (topic_of_queue[queue_of_entry] == topic_of_entry) & (ids[queue_of_entry] == progress.keys)
    cell_of_entry = (starts - firsts[topic_of_pair])[pair_of_entry[exists]] + queue_of_entry[exists]
    is_unknown = np.ones(len(pair_of_cell), np.bool_)
    is_unknown[cell_of_entry] = False
    begin, end = begins[queue_of_cell], ends[queue_of_cell]
    offsets = begin.copy()
    offsets[cell_of_entry] = progress.values[exists]
    oldest_ms = np.full(len(offsets), _NEVER_MS)
    unread, lags, *_ = _terms(offsets, begin, end) if times else (offsets, begin)
    if times and lags.any():
        waiting, names = np.flatnonzero(lags), [name for name, _ in queues]
        oldest_ms[waiting] = _times_at(view, names, begins, ends, queue_of_cell[waiting], unread[waiting])
    columns = [pair_of_cell, ids[queue_of_cell], begin, end, offsets, is_unknown, oldest_ms]

    of_deleted = (column[~exists].tolist() for column in (pair_of_entry, progress.keys, progress.values))
    deleted = {(pair, queue_id): offset for pair, queue_id, offset in zip(*of_deleted, strict=True)}
    if more := [(*queue, 0, 0, offset, False, _NEVER_MS) for queue, offset in deleted.items() if offset > 0]:
        columns = [np.append(column, added) for column, added in zip(columns, zip(*more, strict=True), strict=True)]
        order = np.lexsort((columns[1], columns[0]))
        columns = [column[order] for column in columns]
    starts = np.flatnonzero(np.diff(columns[0], prepend=-1))
    pairs = columns[0][starts]  # those with any queue
    places = group_of_pair[pairs], topic_of_pair[pairs]
    return _Rows((groups, topics), np.append(starts, len(columns[0])), columns[1:], places)


def _times_at(
    view: StoreView, names: Sequence[QueueName], begins: Ints, ends: Ints, queues: Ints, offsets: Ints
) -> Ints:
    """Return the store time of the first message at or behind each of some places; each message is read once."""
    sizes = np.maximum(ends - begins, 0)
    bases = np.cumsum(sizes) - sizes - begins  # behind each other, the messages of all queues have a number each
    messages, place_of = np.unique(offsets + bases[queues], return_inverse=True)
    queues = np.searchsorted(bases + begins, messages, side="right") - 1
    bounds = np.flatnonzero(np.diff(queues, prepend=-1, append=-1))
    times: list[int | None] = []
    for queue, begin, end in zip(queues[bounds[:-1]].tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        times += _times_of(view, names[queue], (messages[begin:end] - bases[queue]).tolist())
    return np.array([_NEVER_MS if time_ms is None else time_ms for time_ms in times])[place_of]


def _times_of(view: StoreView, name: QueueName, offsets: list[int]) -> list[int | None]:
    """Return the store time of the first message at or behind each offset of a queue."""
    store = view.store
    entries: list[tuple[int, int] | None] | None = None
    if not store.queues.is_open(name):
        entries = _entries_in_unopened(view, name, offsets)
    if entries is None:
        entries, queue = [], store.queues[name]
        for offset in offsets:
            try:
                entries.append(queue.first_message(offset))
            except CorruptionError as error:
                store.log.leave_out(error)
                entries.append(None)
    return store_times_at(store.log, name, entries)


def _entries_in_unopened(view: StoreView, name: QueueName, starts: list[int]) -> list[tuple[int, int] | None] | None:
    """Return queue offsets with the places there from the queue's file, which is faster than opening the queue.

    None if they are in several files, if the file is odd, or if an entry leads to no message.
    """
    store = view.store
    file_size = store.config.consumequeue_file_size
    begin = starts[0] * ENTRY_SIZE // file_size * file_size
    with suppress(StoreIOError, CorruptionError):
        file = store.files.open(os.path.join(directory.queue_folder(store.path, *name), file_name(begin)))
        if starts[-1] * ENTRY_SIZE < begin + file_size == begin + file.size:
            entries = [PLACE.unpack_from(file.buffer, start * ENTRY_SIZE - begin) for start in starts]
            if all(0 < size != HOLE_SIZE for _, size in entries):
                return [(start, place) for start, (place, _) in zip(starts, entries, strict=True)]
    return None


# ---------------------------------------------------------------------------------------------------------- findings


def lag_findings(view: LiveView, limits: Thresholds, group_lag: Lag) -> Iterator[Finding]:
    """Yield findings about lag: backlogs, progress beyond the end, messages deleted unread."""
    store = view.store if isinstance(view, StoreView) else None
    if store is not None and store.past_ms is not None:
        return  # the progress back then is unknown
    # If the log is cut short, its damage is the finding, and a reset would lose the progress.
    is_cut_short = store is not None and bool(store.condition.lost)
    for columns, topic_lag in zip(group_lag.topics, group_lag.by_topic(), strict=True):
        if topic_lag.beyond_end and not is_cut_short:
            yield _beyond_end([row for row in columns.rows() if (row.consumer_offset or 0) > row.max_offset])
        if limits.own or not is_own_group(topic_lag.group):
            yield from _topic_findings(view, topic_lag, limits)


def is_uneven(view: LiveView, topic: str, largest: int, total: int, limits: Thresholds) -> bool:
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


def _topic_findings(view: LiveView, topic_lag: TopicLag, limits: Thresholds) -> Iterator[Finding]:
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
        severity: Severity = limits._severity_of(topic_lag.topic) if is_large else "info"
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
