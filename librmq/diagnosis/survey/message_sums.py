"""Sums over a store's messages for a report: by topic, time and queue, delays from birth to storing, retries, keys.

One pass reads the messages, by columns if pyarrow is installed, else record by record. Keys take a fixed amount of
memory: up to some number of messages all are counted. Beyond it, frequent keys are those in a sample of the messages,
and repeated keys those in all messages of a sample of the keys. Both are then estimates.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from librmq.config import suggest, to_timestamp_ms
from librmq.diagnosis.survey.model import (
    ATTEMPTS,
    DELAY_BOUNDS_MS,
    BornToStored,
    DamagedPlace,
    FilterMatch,
    FrequentKey,
    RepeatedKeys,
    RetriedMessages,
    StoredTopic,
)
from librmq.diagnosis.view import StoreView
from librmq.errors import ConfigError, CorruptionError
from librmq.message import StoredMessage
from librmq.message.properties import split_keys
from librmq.message.topics import TopicPrefix, is_user_topic
from librmq.runtime.event_log import advance
from librmq.store.engine.derivation import has_queue_entry

if TYPE_CHECKING:
    from librmq.columns import ReaderKeywords


# ----------------------------------------------------------------------------------------------------------------- keys

MOST_KEYED: Final = 200_000
_MOST_FREQUENT: Final = 15
MOST_OF_A_TOPIC: Final = 5
_MULTIPLIER: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1


def share_of(number: Any, shares: int) -> Any:  # noqa: ANN401 (a whole number, or an array of unsigned ones)
    """Return the share of a number among ``shares`` (a power of two): of a key's last eight bytes, or of a place."""
    return (number * _MULTIPLIER & _WORD) >> 32 & shares - 1


def most_frequent(counts: Iterable[tuple[int, str, str]]) -> Iterator[tuple[int, str, str, bool]]:
    """Yield the largest of (count, topic, key), a few of each topic, with whether others of their topic are cut."""
    ordered = sorted(counts, key=lambda row: (-row[0], *row[1:]))
    place: Counter[str] = Counter()
    rows = []
    for row in ordered:
        place[row[1]] += 1
        if place[row[1]] <= MOST_OF_A_TOPIC:
            rows.append(row)
    del rows[_MOST_FREQUENT:]
    listed = Counter(topic for _, topic, _ in rows)
    for count, topic, key in rows:
        yield count, topic, key, place[topic] > listed[topic]


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

    def frequent(self, store: str) -> Iterator[FrequentKey]:
        """Yield the most frequent keys of all topics, if several messages have them."""
        counts_of_topics = [
            (count, topic, key)
            for topic, counts in self._frequent.items()
            for key, count in counts.most_common(MOST_OF_A_TOPIC + 1)
            if count > 1
        ]
        for count, topic, key, cut in most_frequent(counts_of_topics):
            share = count / self._keyed[topic]
            yield FrequentKey(store, topic, key, count * self.shares, share, self.shares > 1, cut)

    def repeated(self, store: str) -> Iterator[RepeatedKeys]:
        """Yield the repeated keys of each topic; with a sample, also a row for each topic without any in it."""
        n = self.shares
        for topic in sorted(self._repeats.keys() | (self._keyed.keys() if n > 1 else ())):
            repeats = self._repeats.get(topic) or _Repeats()
            shortest_s = repeats.shortest_ms / 1000 if repeats.messages else None
            yield RepeatedKeys(
                store, topic, repeats.messages * n, repeats.resent * n, len(repeats.keys) * n, shortest_s, n > 1
            )


# -------------------------------------------------------------------------------------------------- scope and time axis

_LARGEST: Final = (1 << 63) - 1
_INTERVALS: Final = 72
_SETTINGS: Final = ("topic", "group", "tags", "since", "until")


@dataclass(frozen=True, slots=True)
class ReportScope:
    """The messages, topics and groups of a report. The default is everything."""

    topics: frozenset[str] | None = None
    groups: frozenset[str] | None = None
    tags: str | None = None
    begin_ms: int | None = None
    end_ms: int | None = None
    """Exclusive."""
    names: tuple[tuple[str, str], ...] = ()
    """The settings as the caller gave them, for the page."""

    @classmethod
    def from_settings(cls, settings: Mapping[str, str | None]) -> Self:
        """Parse ``topic`` and ``group`` (names separated by commas), ``tags``, ``since`` and ``until``.

        Raises:
            ConfigError: A setting is unknown, or a time is invalid.
        """
        for name in settings:
            if name not in _SETTINGS:
                raise ConfigError(f"only: unknown setting {name!r:.80}: {suggest(name, _SETTINGS)}")
        texts = {name: value for name, value in settings.items() if value is not None}

        def names(name: str) -> frozenset[str] | None:
            return frozenset(text.strip() for text in texts[name].split(",")) if name in texts else None

        def time(name: str) -> int | None:
            return parse_time(name, texts[name]) if name in texts else None

        return cls(
            names("topic"), names("group"), texts.get("tags"), time("since"), time("until"), tuple(texts.items())
        )

    def has_topic(self, topic: str) -> bool:
        """Return whether a topic is part of the report."""
        return self.topics is None or topic in self.topics

    def has_group(self, group: str) -> bool:
        """Return whether a group is part of the report."""
        return self.groups is None or group in self.groups

    def has_time(self, timestamp_ms: int) -> bool:
        """Return whether a store time is part of the report."""
        return (self.begin_ms or 0) <= timestamp_ms < (_LARGEST if self.end_ms is None else self.end_ms)

    @property
    def has_times(self) -> bool:
        """Whether store times limit the report."""
        return self.begin_ms is not None or self.end_ms is not None

    def has_subject(self, subject: str) -> bool:
        """Return whether the subject of a finding, such as ``group g, topic t``, is part of the report."""
        for kind, names in (("topic ", self.topics), ("group ", self.groups)):
            named = {part.removeprefix(kind) for part in subject.split(", ") if part.startswith(kind)}
            if names is not None and named and not named & names:
                return False
        return True


class TimeAxis(NamedTuple):
    """Equal time intervals over which rates are counted."""

    begin_ms: int
    interval_ms: int
    intervals: int

    @classmethod
    def between(cls, first_ms: int, last_ms: int) -> Self:
        """Divide the time from the first to the last message into intervals."""
        interval_ms = max(1_000, -(-(last_ms - first_ms + 1) // _INTERVALS))
        return cls(first_ms, interval_ms, (last_ms - first_ms) // interval_ms + 1)


def parse_time(name: str, text: str) -> int:
    """Return a time, given in digits or as ISO 8601 with a zone, in milliseconds since 1970.

    Raises:
        ConfigError: The string is neither; the error names the setting.
    """
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        return to_timestamp_ms(name, datetime.fromisoformat(text))
    except (ValueError, ConfigError):
        raise ConfigError(
            f"setting {name}: expected milliseconds, or a time like 2026-11-20T08:00+00:00, found {text!r:.80}"
        ) from None


# ----------------------------------------------------------------------------------------------------------------- sums

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

    def add_headers(self, batch: Headers) -> None:
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
            if topic.startswith(TopicPrefix.RETRY):
                attempts = np.clip(batch.attempts[rows], 1, ATTEMPTS) - 1
                sums.attempts += np.bincount(attempts, minlength=ATTEMPTS)
        self._add_queues(batch)

    def _add_queues(self, batch: Headers) -> None:
        names, counts = np.unique(batch.codes << _SHIFT | batch.queue_ids, return_counts=True)
        for name, count in zip(names.tolist(), counts.tolist(), strict=True):
            queue = batch.topics[name >> _SHIFT], name & (1 << _SHIFT) - 1
            self._queues[queue] = self._queues.get(queue, 0) + count

    def stored_topics(self, store: str) -> Iterator[StoredTopic]:
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
            if topic.startswith(TopicPrefix.RETRY):
                yield RetriedMessages(store, topic.removeprefix(TopicPrefix.RETRY), tuple(sums.attempts.tolist()))


_COLUMNS: Final = (
    "topic", "queueId", "size", "storeTimestamp", "bornTimestamp", "reconsumeTimes", "keys", "uniqueKey",
    "_corrupt_record",
)  # fmt: skip
_ROWS: Final = 8192
_LAST: Final = 8


def has_columns() -> bool:
    """Return whether pyarrow is installed."""
    return find_spec("pyarrow") is not None


def read_messages(view: StoreView, name: str, scope: ReportScope, traffic: Traffic) -> list[DamagedPlace]:
    """Add the messages of a store to ``traffic``; return the places that can't be read."""
    if has_columns():
        return _by_columns(view, name, scope, traffic)
    return _by_messages(view, name, scope, traffic)


def count_filter(
    view: StoreView, name: str, scope: ReportScope, group: str, topic: str, expression: str
) -> FilterMatch:
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
    return FilterMatch(name, group, topic, expression, every[0], matched[0], every[1], matched[1])


# ---------------------------------------------------------------------------------------------------- by columns


def _settings(view: StoreView, scope: ReportScope) -> ReaderKeywords:
    topics = {topic for topic in view.topics if scope.has_topic(topic)}
    settings: ReaderKeywords = {
        "topic": topics,
        "tags": scope.tags,
        "checksums": False,
        "as_recovered": True,
        "files": view.store.files,
    }
    if scope.has_times:
        settings["since"] = scope.begin_ms
        settings["until"] = scope.end_ms
    return settings


def _by_columns(view: StoreView, name: str, scope: ReportScope, traffic: Traffic) -> list[DamagedPlace]:
    from librmq.columns.record_batches import reader_of

    settings = _settings(view, scope)
    settings["columns"], settings["mode"] = _COLUMNS, "PERMISSIVE"
    damage: list[DamagedPlace] = []
    for batch in reader_of(view.store, **settings) if settings["topic"] else ():
        reports = batch.column("_corrupt_record")
        if reports.null_count < len(reports):
            damage += [DamagedPlace(name, "", 0, "unreadable", text) for text in reports.drop_null().to_pylist()]
            batch = batch.filter(reports.is_null())
        _add_batch(batch, traffic)
    return damage


def _add_batch(batch: Any, traffic: Traffic) -> None:  # noqa: ANN401 (a batch of Arrow)
    from librmq.columns import arrays

    topic = batch.column("topic").dictionary_encode()
    topics = topic.dictionary.to_pylist()

    def numbers(name: str) -> Ints:
        return arrays.integers(batch.column(name))

    codes = arrays.integers(topic.indices)
    times_ms = numbers("storeTimestamp") // 1000
    sizes = numbers("size")
    advance(int(sizes.sum()))
    traffic.add_headers(
        Headers(
            topics, codes, numbers("queueId"), sizes, times_ms, numbers("bornTimestamp") // 1000,
            numbers("reconsumeTimes"),
        )
    )  # fmt: skip
    keys = batch.column("keys")
    is_user = np.array([is_user_topic(topic_name) for topic_name in topics], np.bool_)
    keyed = np.flatnonzero(is_user[codes] & (arrays.integers(keys.is_valid()) > 0)) if topics else codes
    shares = traffic.keys.shares
    counted = keyed
    if shares > 1:
        places = (traffic.done - len(codes) + keyed).astype(np.uint64)
        counted = keyed[share_of(places, shares) == 0]
    texts = keys.take(arrays.numbers(counted)).to_pylist()
    traffic.keys.add_keys([topics[code] for code in codes[counted].tolist()], texts)
    if shares > 1:
        keyed = keyed[share_of(_last_bytes(keys)[keyed], shares) == 0]
    rows = arrays.numbers(keyed)
    traffic.keys.add_repeats(
        [topics[code] for code in codes[keyed].tolist()],
        keys.take(rows).to_pylist(),
        batch.column("uniqueKey").take(rows).to_pylist(),
        times_ms[keyed].tolist(),
    )


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
    settings["topic"], settings["columns"], settings["sql"], settings["mode"] = topic, ["size"], sql, "PERMISSIVE"
    count = size = 0
    for batch in reader_of(view.store, **settings):
        sizes = batch.column("size").drop_null()  # null for damage, which is reported elsewhere
        count += len(sizes)
        size += int(arrays.integers(sizes).sum())
    return count, size


# --------------------------------------------------------------------------------------------------- one by one


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
            and (tags.takes_all or tags.matches(message.tags))
        ):
            yield message


def _by_messages(view: StoreView, name: str, scope: ReportScope, traffic: Traffic) -> list[DamagedPlace]:
    messages = _messages(view, scope)
    shares = traffic.keys.shares
    while True:
        batch: list[StoredMessage] = []
        try:
            batch.extend(islice(messages, _ROWS))
        except CorruptionError as error:
            _add_messages(batch, traffic)
            return [DamagedPlace(name, error.file, error.offset, "unreadable", str(error))]
        if not batch:
            return []
        at = traffic.done
        _add_messages(batch, traffic)
        keyed = [
            (place, message) for place, message in enumerate(batch, at) if message.keys and is_user_topic(message.topic)
        ]
        counted = [message for place, message in keyed if share_of(place, shares) == 0]
        traffic.keys.add_keys([message.topic for message in counted], [" ".join(message.keys) for message in counted])
        same = [message for _, message in keyed if _in_share(message, shares)]
        traffic.keys.add_repeats(
            [message.topic for message in same],
            [" ".join(message.keys) for message in same],
            [message.unique_key for message in same],
            [message.store_timestamp_ms for message in same],
        )


def _in_share(message: StoredMessage, shares: int) -> bool:
    return bool(share_of(int.from_bytes(" ".join(message.keys).encode()[-_LAST:]), shares) == 0)


def _add_messages(messages: list[StoredMessage], traffic: Traffic) -> None:
    codes: dict[str, int] = {}
    rows = [
        (
            codes.setdefault(message.topic, len(codes)), message.queue_id, message.size, message.store_timestamp_ms,
            message.born_timestamp_ms, message.reconsume_times,
        )
        for message in messages
    ]  # fmt: skip
    columns = np.array(rows, np.int64).reshape(-1, 6).T
    traffic.add_headers(Headers(list(codes), *columns))
