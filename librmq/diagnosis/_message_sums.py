"""Sums over a store's messages for a report: by topic, time and queue, delays from birth to storing, retries, keys.

One pass reads the messages, by columns if pyarrow is installed, else record by record. Keys take a fixed amount of
memory: up to some number of messages all are counted. Beyond it, frequent keys are those in a sample of the messages,
and repeated keys those in all messages of a sample of the keys. Both are then estimates.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from librmq.diagnosis.report_rows import (
    ATTEMPTS,
    DELAY_BOUNDS_MS,
    MOST_OF_A_TOPIC,
    FilterMatch,
    FrequentKey,
    RepeatedKeys,
    ReportScope,
    TimeAxis,
    TopicTraffic,
    frequent_keys,
)
from librmq.diagnosis.view import StoreView
from librmq.errors import CorruptionError
from librmq.files import Damage
from librmq.message import StoredMessage
from librmq.message.properties import split_keys
from librmq.message.topics import TopicPrefix, is_user_topic
from librmq.runtime.event_log import advance
from librmq.store.engine.derivation import has_queue_entry

if TYPE_CHECKING:
    from librmq.columns import ReaderKeywords


# ---- keys

MOST_KEYED: Final = 200_000
_MULTIPLIER: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1


def share_of(number: Any, shares: int) -> Any:  # noqa: ANN401 (a whole number, or an array of unsigned ones)
    """Return the share of a number among ``shares`` (a power of two): of a key's last eight bytes, or of a place."""
    return (number * _MULTIPLIER & _WORD) >> 32 & shares - 1


@dataclass(slots=True)
class _Repeats:
    messages: int = 0
    resent: int = 0
    keys: set[str] = field(default_factory=set)
    shortest_ms: float = math.inf


class KeyCounts:
    """The keys of a store's messages, in the order of the log."""

    def __init__(self, expected: int, window_s: float) -> None:
        """Prepare for ``expected`` messages; beyond `MOST_KEYED` only a sample is counted."""
        self.shares = 1 << max(0, (expected - 1) // MOST_KEYED).bit_length()
        """The number of shares, a power of two; one of them is counted."""
        self._window_ms = round(window_s * 1000)
        self._frequent: dict[str, Counter[str]] = defaultdict(Counter)
        self._keyed: Counter[str] = Counter()
        self._last: dict[str, dict[str, tuple[int, str | None]]] = defaultdict(dict)
        self._repeats: dict[str, _Repeats] = {}

    def add_keys(self, topics: Sequence[str], keys: Sequence[str]) -> None:
        """Count the keys of messages whose places are in one share."""
        keys_by_topic: dict[str, list[str]] = defaultdict(list)
        for topic, text in zip(topics, keys, strict=True):
            if " " in text:
                keys_by_topic[topic] += dict.fromkeys(split_keys(text))
            else:
                keys_by_topic[topic].append(text)
        for topic, keys_of_topic in keys_by_topic.items():
            self._keyed[topic] += len(keys_of_topic)
            self._frequent[topic].update(keys_of_topic)

    def add_repeats(
        self, topics: Sequence[str], keys: Sequence[str], unique: Sequence[str | None], times_ms: Sequence[int]
    ) -> None:
        """Compare messages whose keys are in one share with earlier ones."""
        window_ms = self._window_ms
        for topic, text, unique_key, at_ms in zip(topics, keys, unique, times_ms, strict=True):
            last = self._last[topic]
            for key in dict.fromkeys(split_keys(text)) if " " in text else (text,):
                before = last.get(key)
                last[key] = at_ms, unique_key
                if before is not None and at_ms - before[0] <= window_ms:
                    repeats = self._repeats.setdefault(topic, _Repeats())
                    repeats.messages += 1
                    repeats.resent += unique_key is not None and unique_key == before[1]
                    repeats.keys.add(key)
                    repeats.shortest_ms = min(max(0, at_ms - before[0]), repeats.shortest_ms)

    def frequent(self) -> tuple[FrequentKey, ...]:
        """Return the most frequent keys of all topics, if several messages have them."""
        return frequent_keys(
            FrequentKey(topic, key, count * self.shares, count / self._keyed[topic], self.shares > 1)
            for topic, counts in self._frequent.items()
            for key, count in counts.most_common(MOST_OF_A_TOPIC + 1)
            if count > 1
        )

    def repeated(self) -> Iterator[RepeatedKeys]:
        """Yield the repeated keys of each topic; with a sample, also a row for each topic without any in it."""
        n = self.shares
        for topic in sorted(self._repeats.keys() | (self._keyed.keys() if n > 1 else ())):
            repeats = self._repeats.get(topic) or _Repeats()
            shortest_s = repeats.shortest_ms / 1000 if repeats.messages else None
            yield RepeatedKeys(
                topic, repeats.messages * n, repeats.resent * n, len(repeats.keys) * n, shortest_s, n > 1
            )


# ---- sums

Ints = npt.NDArray[np.int64]

_SHIFT: Final = 32


class Batch(NamedTuple):
    """Columns of some messages. The functions return what only few of them are asked for, by their rows."""

    topics: Sequence[str]
    """Distinct names."""
    codes: Ints
    """Indexes in ``topics``."""
    queue_ids: Ints
    sizes: Ints
    stored_ms: Ints
    born_ms: Ints
    attempts: Ints
    has_keys: npt.NDArray[np.bool_]
    keys: Callable[[Ints], Sequence[str]]
    unique_keys: Callable[[Ints], Sequence[str | None]]
    last_bytes: Callable[[Ints], npt.NDArray[np.uint64]]
    """The last eight bytes of the keys, as numbers."""


class _Topic:
    __slots__ = ("attempts", "bytes", "delays", "first_ms", "last_ms", "longest_ms", "messages", "queues", "stored")

    def __init__(self, intervals: int) -> None:
        self.messages = self.bytes = 0
        self.first_ms, self.last_ms, self.longest_ms = 1 << 62, 0, 0
        self.stored = np.zeros(intervals, np.int64)
        self.delays = np.zeros(len(DELAY_BOUNDS_MS) + 1, np.int64)
        self.attempts = np.zeros(ATTEMPTS, np.int64)
        self.queues = Counter[int]()


class Traffic:
    """Sums over the messages of a store."""

    def __init__(self, axis: TimeAxis, keys: KeyCounts) -> None:
        self.keys = keys
        self._done = 0
        self._axis = axis
        self._topics: dict[str, _Topic] = {}

    def add(self, batch: Batch) -> None:
        """Add some messages."""
        count = len(batch.codes)
        if not count:
            return
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
            sums.longest_ms = max(sums.longest_ms, int(delays[rows].max()))
            if topic.startswith(TopicPrefix.RETRY):
                attempts = np.clip(batch.attempts[rows], 1, ATTEMPTS) - 1
                sums.attempts += np.bincount(attempts, minlength=ATTEMPTS)
        names, counts = np.unique(batch.codes << _SHIFT | batch.queue_ids, return_counts=True)
        for name, messages in zip(names.tolist(), counts.tolist(), strict=True):
            self._topics[batch.topics[name >> _SHIFT]].queues[name & (1 << _SHIFT) - 1] += messages
        self._add_keys(batch)
        self._done += count

    def _add_keys(self, batch: Batch) -> None:
        """Count the keys of messages of producers: of a sample of messages, and of all with a sample of keys."""
        is_user = np.array([is_user_topic(topic) for topic in batch.topics], np.bool_)
        counted = same = np.flatnonzero(is_user[batch.codes] & batch.has_keys)
        shares = self.keys.shares
        if shares > 1:
            counted = counted[share_of((self._done + counted).astype(np.uint64), shares) == 0]
            same = same[share_of(batch.last_bytes(same), shares) == 0]

        def topics(rows: Ints) -> list[str]:
            return [batch.topics[code] for code in batch.codes[rows].tolist()]

        self.keys.add_keys(topics(counted), batch.keys(counted))
        times_ms = batch.stored_ms[same].tolist()
        self.keys.add_repeats(topics(same), batch.keys(same), batch.unique_keys(same), times_ms)

    def rows(self, scope: ReportScope) -> Iterator[TopicTraffic]:
        """Yield the sums of each topic, the largest first."""
        for topic, sums in sorted(self._topics.items(), key=lambda item: (-item[1].messages, item[0])):
            totals = sums.messages, sums.bytes, sums.first_ms, sums.last_ms, sums.longest_ms
            bins = sums.stored.tolist(), sums.delays.tolist(), sums.attempts.tolist()
            yield TopicTraffic.of(topic, scope, totals, sums.queues, *bins)


_COLUMNS: Final = (
    "topic", "queueId", "size", "storeTimestamp", "bornTimestamp", "reconsumeTimes", "keys", "uniqueKey",
    "_corrupt_record",
)  # fmt: skip
_ROWS: Final = 8192
_LAST: Final = 8


def has_columns() -> bool:
    """Return whether pyarrow is installed."""
    return find_spec("pyarrow") is not None


def read_messages(view: StoreView, scope: ReportScope, traffic: Traffic) -> list[Damage]:
    """Add the messages of a store to ``traffic``; return the places that can't be read."""
    return (_by_columns if has_columns() else _by_messages)(view, scope, traffic)


def count_filter(view: StoreView, scope: ReportScope, group: str, topic: str, expression: str) -> FilterMatch:
    """Return what a registered SQL filter matches."""
    if has_columns():
        every, matched = (_counted(view, scope, topic, sql) for sql in (None, expression))
    else:
        from librmq.filter import SqlFilter

        matches = SqlFilter(expression).matches
        every = matched = (0, 0)
        for message in _messages(view, scope):
            if message.topic == topic:
                every = every[0] + 1, every[1] + message.size
                if matches(message.properties):
                    matched = matched[0] + 1, matched[1] + message.size
    return FilterMatch(group, topic, expression, every[0], matched[0], every[1], matched[1])


# ---- by columns


def _settings(view: StoreView, scope: ReportScope) -> ReaderKeywords:
    topics = {topic for topic in view.topics if scope.has_topic(topic)}
    settings: ReaderKeywords = {
        "topic": topics,
        "tags": scope.tags,
        "checksums": False,
        "as_recovered": True,
        "files": view.store.files,
        "mode": "PERMISSIVE",
    }
    if scope.has_times:
        settings["since"] = scope.begin_ms
        settings["until"] = scope.end_ms
    return settings


def _by_columns(view: StoreView, scope: ReportScope, traffic: Traffic) -> list[Damage]:
    from librmq.columns.record_batches import reader_of

    settings = _settings(view, scope)
    settings["columns"] = _COLUMNS
    damage: list[Damage] = []
    for batch in reader_of(view.store, **settings) if settings["topic"] else ():
        reports = batch.column("_corrupt_record")
        if reports.null_count < len(reports):
            damage += [Damage("", 0, "unreadable", text) for text in reports.drop_null().to_pylist()]
            batch = batch.filter(reports.is_null())
        traffic.add(_batch_of_columns(batch))
    return damage


def _batch_of_columns(batch: Any) -> Batch:  # noqa: ANN401 (a batch of Arrow)
    from librmq.columns import arrays

    topic, keys = batch.column("topic").dictionary_encode(), batch.column("keys")

    def numbers(name: str) -> Ints:
        return arrays.integers(batch.column(name))

    def texts(name: str) -> Callable[[Ints], list[str]]:
        return lambda rows: batch.column(name).take(arrays.numbers(rows)).to_pylist()

    sizes = numbers("size")
    advance(int(sizes.sum()))
    return Batch(
        topics=topic.dictionary.to_pylist(), codes=arrays.integers(topic.indices), queue_ids=numbers("queueId"),
        sizes=sizes, stored_ms=numbers("storeTimestamp") // 1000, born_ms=numbers("bornTimestamp") // 1000,
        attempts=numbers("reconsumeTimes"), has_keys=arrays.integers(keys.is_valid()) > 0, keys=texts("keys"),
        unique_keys=texts("uniqueKey"), last_bytes=lambda rows: _last_bytes(keys)[rows],
    )  # fmt: skip


def _last_bytes(column: Any) -> Any:  # noqa: ANN401 (arrays of Arrow and numpy)
    """Return the last eight bytes of each string as a number."""
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1].astype(np.int64)
    raw = np.frombuffer(data if data else b"\0", np.uint8)
    numbers = np.zeros(len(column), np.uint64)
    for back in range(_LAST, 0, -1):
        at = bounds[1:] - back
        here = np.where(at >= bounds[:-1], raw[np.maximum(at, 0)], 0).astype(np.uint64)
        numbers = numbers << np.uint64(8) | here
    return numbers


def _counted(view: StoreView, scope: ReportScope, topic: str, sql: str | None) -> tuple[int, int]:
    from librmq.columns import arrays
    from librmq.columns.record_batches import reader_of

    settings = _settings(view, scope)
    settings["topic"], settings["columns"], settings["sql"] = topic, ["size"], sql
    count = size = 0
    for batch in reader_of(view.store, **settings):
        sizes = batch.column("size").drop_null()  # null for damage, which is reported elsewhere
        count += len(sizes)
        size += int(arrays.integers(sizes).sum())
    return count, size


# ---- one by one


def _messages(view: StoreView, scope: ReportScope) -> Iterator[StoredMessage]:
    """Yield the wanted messages of all queues in log order."""
    from librmq.filter import TagFilter

    tags = TagFilter(scope.tags)
    for message in view.store:
        state = view.ranges.get((message.topic, message.queue_id))
        if (
            state is not None
            and has_queue_entry(message.sys_flag)
            and message.queue_offset >= state.min_offset
            and scope.has_topic(message.topic)
            and scope.has_time(message.store_timestamp_ms)
            and tags.matches(message.tags)
        ):
            yield message


def _by_messages(view: StoreView, scope: ReportScope, traffic: Traffic) -> list[Damage]:
    messages = _messages(view, scope)
    while True:
        batch: list[StoredMessage] = []
        try:
            batch.extend(islice(messages, _ROWS))
        except CorruptionError as error:
            traffic.add(_batch_of_messages(batch))
            return [Damage(error.file, error.offset, "unreadable", str(error))]
        if not batch:
            return []
        traffic.add(_batch_of_messages(batch))


def _batch_of_messages(messages: list[StoredMessage]) -> Batch:
    codes: dict[str, int] = {}
    rows = [
        (
            codes.setdefault(message.topic, len(codes)), message.queue_id, message.size, message.store_timestamp_ms,
            message.born_timestamp_ms, message.reconsume_times,
        )
        for message in messages
    ]  # fmt: skip
    codes_of, ids, sizes, stored_ms, born_ms, attempts = np.array(rows, np.int64).reshape(-1, 6).T
    keys = [" ".join(message.keys) for message in messages]

    def last_bytes(rows: Ints) -> npt.NDArray[np.uint64]:
        return np.array([int.from_bytes(keys[row].encode()[-_LAST:]) for row in rows.tolist()], np.uint64)

    has_keys = np.array([bool(key) for key in keys], np.bool_)
    return Batch(
        topics=list(codes), codes=codes_of, queue_ids=ids, sizes=sizes, stored_ms=stored_ms, born_ms=born_ms,
        attempts=attempts, has_keys=has_keys, keys=lambda rows: [keys[row] for row in rows.tolist()],
        unique_keys=lambda rows: [messages[row].unique_key for row in rows.tolist()], last_bytes=last_bytes,
    )  # fmt: skip
