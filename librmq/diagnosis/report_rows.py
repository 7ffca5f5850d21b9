"""The rows of a report, what limits them, and the changes between two reports.

Rows are those of commands: ``topics`` of `librmq topics`, ``lag`` of `librmq lag`, ``findings`` of `librmq diagnose`,
``dead_letters`` of `librmq dead-letters --causes`, ``damage`` of `librmq verify`. The others are sums over messages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from datetime import datetime
from itertools import groupby
from typing import Any, Final, NamedTuple, Self, get_args, get_type_hints

from librmq.config import suggest, to_timestamp_ms
from librmq.diagnosis._findings import Finding, finding_order
from librmq.diagnosis._lag_report import GroupRate, Lag, QueueLag, TopicProgress
from librmq.diagnosis.deadletters import DeadLetterCause
from librmq.diagnosis.view import TopicSummary
from librmq.errors import ConfigError, InputError
from librmq.files import Damage
from librmq.message.topics import TopicPrefix, is_user_topic

VERSION: Final = 4

DELAY_BOUNDS_MS: Final = (0, 1, 10, 100, 1_000, 10_000, 60_000, 600_000, 3_600_000)
"""Bounds between the bins of delays. The first bin has messages that were stored before they were born."""
DUE_BOUNDS_MS: Final = (0, 60_000, 600_000, 3_600_000, 6 * 3_600_000, 86_400_000, 7 * 86_400_000)
"""Bounds between the bins of `WaitingMessages`, counted from now. The first bin has overdue messages."""
ATTEMPTS: Final = 17
"""Bins of retries: one for each of the attempts 1 to 16, and one for later attempts."""
MOST_OF_A_TOPIC: Final = 5
"""Most frequent keys of a topic."""
_MOST_FREQUENT: Final = 15


# ---- scope and time axis

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
    """Return a time, given in digits or as ISO 8601 with a zone, in milliseconds since 1970."""
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        return to_timestamp_ms(name, datetime.fromisoformat(text))
    except (ValueError, ConfigError):
        raise ConfigError(
            f"setting {name}: expected milliseconds, or a time like 2026-11-20T08:00+00:00, found {text!r:.80}"
        ) from None


# ---- rows that no command prints


class TopicTraffic(NamedTuple):
    """Sums over the messages of a topic that the report is about."""

    topic: str
    messages: int
    bytes: int
    first_ms: int
    """Store time of the first message."""
    last_ms: int
    stored: tuple[int, ...]
    """Messages in each time interval of the report."""
    queue_ids: tuple[int, ...]
    queue_messages: tuple[int, ...]
    """Messages in each of these queues."""
    delays: tuple[int, ...] = ()
    """Messages by the time from birth to storing, in the bins of `DELAY_BOUNDS_MS`; of topics of producers."""
    longest_delay_ms: int = 0
    attempts: tuple[int, ...] = ()
    """Retries by attempt, the last number of all later ones; of topics of retries."""

    @classmethod
    def of(
        cls,
        topic: str,
        scope: ReportScope,
        totals: Sequence[int],
        queues: Mapping[int, int],
        stored: Iterable[int],
        delays: Iterable[int],
        attempts: Iterable[int],
    ) -> Self:
        """Return the sums of a topic, with its delays if producers send to it, or its retries if those of a group.

        ``totals`` are messages, bytes, the first and the last store time, and the longest delay.
        """
        messages, size, first_ms, last_ms, longest_ms = totals
        ids, counts = zip(*sorted(queues.items()), strict=True)
        traffic = cls(topic, messages, size, first_ms, last_ms, tuple(stored), ids, counts)
        if is_user_topic(topic):
            return traffic._replace(delays=tuple(delays), longest_delay_ms=longest_ms)
        is_wanted = topic.startswith(TopicPrefix.RETRY) and scope.has_group(topic.removeprefix(TopicPrefix.RETRY))
        return traffic._replace(attempts=tuple(attempts)) if is_wanted else traffic


class FrequentKey(NamedTuple):
    """A key that many messages of a topic have."""

    topic: str
    key: str
    messages: int
    share: float
    sampled: bool
    """Whether only a sample of the messages was counted, and the numbers are estimates."""
    cut: bool = False
    """Whether further keys of the topic came several times, which the report leaves out."""


def frequent_keys(rows: Iterable[FrequentKey]) -> tuple[FrequentKey, ...]:
    """Return the most frequent of these keys, a few of each topic; the rows of a topic that has others are cut."""
    every, places = list[FrequentKey](), Counter[str]()
    for row in sorted(rows, key=lambda row: (-row.messages, row.topic, row.key)):
        places[row.topic] += 1
        if places[row.topic] <= MOST_OF_A_TOPIC:
            every.append(row)
    del every[_MOST_FREQUENT:]
    listed = Counter(row.topic for row in every)
    return tuple(row._replace(cut=places[row.topic] > listed[row.topic]) for row in every)


class RepeatedKeys(NamedTuple):
    """Messages of a topic that share a key with an earlier message in the window."""

    topic: str
    messages: int
    resent: int
    """How many also have the unique id of the earlier message, because a client or a broker repeated them."""
    keys: int
    shortest_s: float | None
    """Shortest time between two such messages; None without any in the sample."""
    sampled: bool
    """Whether only a sample of the keys was looked at: numbers are estimates, and other keys can have come again."""


class WaitingMessages(NamedTuple):
    """Waiting messages of one kind, which `librmq pending` lists."""

    kind: str
    topic: str
    group: str | None
    """The producer group of halves, the consumer group of retries."""
    messages: int
    first_due_ms: int | None
    last_due_ms: int | None
    most_checks: int
    due: tuple[int, ...]
    """Messages by the time until they are due, in the bins of `DUE_BOUNDS_MS`."""


class LogFileUse(NamedTuple):
    """A file of the log: when it was written, and which messages in it groups still have to consume."""

    physical_offset: int
    bytes: int
    messages: int
    unread: int
    """Messages that at least one group has not consumed."""
    last_ms: int | None
    """Store time of its last message."""
    first: str
    """Checksum of the header of its first record, by which copies of a log are recognised."""


class FilterMatch(NamedTuple):
    """A registered SQL filter: how many messages match it, and how many the broker need not send because of it."""

    group: str
    topic: str
    expression: str
    messages: int
    matched: int
    bytes: int
    matched_bytes: int


# ---- the report


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """What a report says about one store."""

    store: str
    """The shortest end of its path that distinguishes it from the others."""
    path: str
    owner: str | None = None
    """The process that has the store open for writing."""
    now_ms: int | None = None
    """The time from which ages are counted."""
    is_sound: bool | None = None
    """The result of ``verify``; None if it did not run."""
    error: str | None = None
    """Why the store can only be read up to its damage."""
    skipped: bool = False
    """Whether a part of the log can't be read; the messages there are in none of the numbers."""
    recoverable: int = 0
    """Places that ``verify`` finds recoverable: a kill or a copy left them, and the next opening repairs them."""
    instances: Mapping[str, int] | None = None
    """Running instances by group; None for a folder, where they are unknown."""
    damage: tuple[Damage, ...] = ()
    findings: tuple[Finding, ...] = ()
    lag: tuple[QueueLag, ...] = ()
    topics: tuple[TopicSummary, ...] = ()
    dead_letters: tuple[DeadLetterCause, ...] = ()
    waiting: tuple[WaitingMessages, ...] = ()
    log_files: tuple[LogFileUse, ...] = ()
    traffic: tuple[TopicTraffic, ...] = ()
    """The topics with messages, the largest first. All topics count, also the broker's own."""
    keys: tuple[FrequentKey, ...] = ()
    repeated: tuple[RepeatedKeys, ...] = ()
    filters: tuple[FilterMatch, ...] = ()

    @property
    def records(self) -> int:
        """Messages of all topics, also the broker's own; `librmq stats` counts those of users alone."""
        return sum(topic.messages for topic in self.traffic)

    @property
    def bytes(self) -> int:
        """Total size of these records."""
        return sum(topic.bytes for topic in self.traffic)

    def lags(self) -> Lag:
        """Return the lag of groups by topic and by queue."""
        pairs = groupby(self.lag, key=lambda row: (row.group, row.topic))
        topics = [TopicProgress(*pair, *zip(*(row[2:] for row in rows), strict=True)) for pair, rows in pairs]
        return Lag(topics, self.now_ms)

    def to_document(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        document = {column.name: getattr(self, column.name) for column in fields(self)}
        return {**document, **{name: [_row(row) for row in document[name]] for name in _ROWS}}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Return the report of which `to_document` returned the fields."""
        rows = {
            name: tuple(
                make(**{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()})
                for row in document[name]
            )
            for name, make in _ROWS.items()
        }
        return cls(**{**document, **rows})


def _finding(**row: Any) -> Finding:  # noqa: ANN401 (values of JSON)
    return Finding(row["finding"], row["severity"], row["subject"], row["what"], row["evidence"], row["next"])


def _row(row: Any) -> dict[str, Any]:  # noqa: ANN401 (a row of any kind)
    if isinstance(row, Finding):
        return row.to_row()
    return asdict(row) if is_dataclass(row) and not isinstance(row, type) else row._asdict()


_ROWS: Final[dict[str, Callable[..., Any]]] = {
    name: _finding if name == "findings" else get_args(hint)[0]
    for name, hint in get_type_hints(StoreReport).items()
    if get_args(hint)[1:] == (...,)
}
"""How to make a row of each part of a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a report says about one or several stores."""

    title: str
    """Title of the page."""
    only: Mapping[str, str]
    """The settings that select the part to report about, such as ``topic``."""
    window_s: float
    """Seconds between messages of one key that count as repeated."""
    begin_ms: int | None
    """Begin of the first interval of `TopicTraffic.stored`. None without messages."""
    interval_ms: int
    """Length of an interval, in milliseconds."""
    stores: tuple[StoreReport, ...]
    """What it says about each store."""
    version: int = field(default=VERSION)
    """Version of the report's format."""

    @property
    def findings(self) -> list[tuple[str, Finding]]:
        """The findings with their stores, worst first."""
        rows = [(store.store, finding) for store in self.stores for finding in store.findings]
        return sorted(rows, key=lambda row: (*finding_order(row[1]), row[0]))

    def to_json(self) -> str:
        """Return the report as JSON, for `from_json`."""
        document = {column.name: getattr(self, column.name) for column in fields(self)}
        document |= {"only": dict(self.only), "stores": [store.to_document() for store in self.stores]}
        return json.dumps(document, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the report that `to_json` wrote.

        Raises:
            InputError: The string is not a report of this version.
        """
        try:
            document: dict[str, Any] = json.loads(text)
            if document["version"] != VERSION:
                raise InputError(f"report of version {document['version']!r:.20}: expected version {VERSION}")
            document["stores"] = tuple(map(StoreReport.from_document, document["stores"]))
            return cls(**document)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"no report of librmq: {type(error).__name__}: {error}") from None


# ---- changes since an earlier report


class LagChange(NamedTuple):
    """How the lag of a group in a topic has changed since an earlier report."""

    store: str
    group: str
    topic: str
    before: int | None
    """None if the earlier report had no such row."""
    lag: int | None
    rate: GroupRate | None
    """Rates between the two reports; None if they are unknown."""


class Comparison(NamedTuple):
    """The changes between two reports. Findings have the name of their store beside them."""

    earlier: Report
    """The report to compare with; a store of it that the later report has too is named as there."""
    added: tuple[tuple[str, Finding], ...]
    """Findings that the earlier report lacks."""
    removed: tuple[tuple[str, Finding], ...]
    """Findings that only the earlier report has."""
    changed: tuple[tuple[Finding, Finding], ...]
    """The earlier and the current finding of one kind about one subject."""
    lags: tuple[LagChange, ...]
    """The largest growth comes first."""


def compare(earlier: Report, later: Report) -> Comparison:
    """Return what has changed. Findings are the same if their store, kind and subject are equal.

    Stores are the same if their logs are, whatever their folders are called: a file of both begins with the same record
    at the same place. If retention has deleted all common files, stores of one name are the same.
    """
    earlier = _named_as(later, earlier)
    before, now = _by_subject(earlier), _by_subject(later)
    return Comparison(
        earlier,
        tuple(row for key, row in now.items() if key not in before),
        tuple(row for key, row in before.items() if key not in now),
        tuple(
            (before[key][1], finding)
            for key, (_, finding) in now.items()
            if key in before and (finding.severity, finding.what) != (before[key][1].severity, before[key][1].what)
        ),
        tuple(
            sorted(_lag_changes(earlier, later), key=lambda row: ((row.before or 0) - (row.lag or 0), row[:3])),
        ),
    )


def _named_as(later: Report, earlier: Report) -> Report:
    """Return a report whose stores have the names of their logs in a later one."""
    then, now = _log_starts(earlier), _log_starts(later)
    names: dict[str, str] = {}
    for name, starts in now.items():
        same = [old for old in then if old not in names and then[old].items() & starts.items()]
        if same:
            names[name if name in same else same[0]] = name
    for name in now.keys() - set(names.values()):
        if name in then and name not in names and not then[name].keys() & now[name].keys():
            names[name] = name

    def renamed(part: StoreReport) -> StoreReport:
        name = names.get(part.store, f"{part.store} (earlier)" if part.store in now else part.store)
        findings = tuple(
            finding._replace(subject=f"store {name}") if finding.subject == f"store {part.store}" else finding
            for finding in part.findings
        )
        return replace(part, store=name, findings=findings)

    return replace(earlier, stores=tuple(map(renamed, earlier.stores)))


def _log_starts(report: Report) -> dict[str, dict[int, str]]:
    """Return for each store the first record of each log file, by its physical offset."""
    return {part.store: {file.physical_offset: file.first for file in part.log_files} for part in report.stores}


def _by_subject(report: Report) -> dict[tuple[str, ...], tuple[str, Finding]]:
    return {  # one subject can have several causes
        (store, finding.kind, finding.subject, str(finding.evidence.get("cause", ""))): (store, finding)
        for store, finding in report.findings
    }


def _lag_changes(earlier: Report, later: Report) -> Iterator[LagChange]:
    lags = {part.store: part.lags() for part in earlier.stores}
    for part in later.stores:
        now, then = part.lags(), lags.pop(part.store, Lag((), None))
        before = {row[:2]: row.lag for row in then.by_topic()}
        rates = {(rate.group, rate.topic): rate for rate in now.rates_since(then)}
        for row in now.by_topic():
            pair = row.group, row.topic
            yield LagChange(part.store, *pair, before.pop(pair, None), row.lag, rates.get(pair))
        yield from (LagChange(part.store, *pair, old, None, None) for pair, old in before.items())
    for store, then in lags.items():
        yield from (LagChange(store, row.group, row.topic, row.lag, None, None) for row in then.by_topic())
