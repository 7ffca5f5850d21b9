"""The values of a report, flat rows that survive a round trip through JSON, and the changes between two reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, NamedTuple, Self, get_args, get_type_hints

from librmq.diagnosis._lag_report import TopicProgress, rate_between
from librmq.errors import InputError

VERSION: Final = 3

DELAY_BOUNDS_MS: Final = (0, 1, 10, 100, 1_000, 10_000, 60_000, 600_000, 3_600_000)
"""Bounds between the bins of `BornToStored`. The first bin has messages that were stored before they were born."""
DUE_BOUNDS_MS: Final = (0, 60_000, 600_000, 3_600_000, 6 * 3_600_000, 86_400_000, 7 * 86_400_000)
"""Bounds between the bins of `WaitingMessages`, counted from now. The first bin has overdue messages."""
ATTEMPTS: Final = 17
"""Bins of `RetriedMessages`: one for each of the attempts 1 to 16, and one for later attempts."""


class StoreSummary(NamedTuple):
    """A store in the report."""

    store: str
    """The shortest end of its path that distinguishes it from the others."""
    path: str
    owner: str | None
    """The process that has the store open for writing."""
    now_ms: int | None
    """The time from which ages are counted."""
    is_sound: bool | None
    """The result of ``verify``; None if it did not run."""
    error: str | None
    """Why the store can only be read up to its damage."""
    records: int
    """Messages of all topics, also the broker's own; `librmq stats` counts those of users alone."""
    bytes: int
    """Total size of these records."""
    first_ms: int | None
    last_ms: int | None
    """Store times of the first and last records."""
    skipped: bool = False
    """Whether a part of the log can't be read; the messages there are in none of the numbers."""
    recoverable: int = 0
    """Places that ``verify`` finds recoverable: a kill or a copy left them, and the next opening repairs them."""


class DamagedPlace(NamedTuple):
    """A damaged place, as reported by ``verify``."""

    store: str
    file: str
    offset: int
    kind: str
    what: str


class ReportedFinding(NamedTuple):
    """A finding about a store."""

    store: str
    kind: str
    severity: str
    subject: str
    what: str
    evidence: Mapping[str, Any]
    next_step: str


class GroupTopicLag(NamedTuple):
    """The lag of a group in a topic, and in each of its queues."""

    store: str
    group: str
    topic: str
    lag: int
    oldest_timestamp_ms: int | None
    oldest_age_s: float | None
    without_progress: int
    """Queues without progress; their lag counts from their beginning."""
    expired: int
    """Messages that retention deleted before the group had consumed them."""
    instances: int | None
    """Running instances of the group. None for a folder, where they are unknown."""
    queue_ids: tuple[int, ...]
    min_offsets: tuple[int, ...]
    max_offsets: tuple[int, ...]
    consumer_offsets: tuple[int | None, ...]
    lags: tuple[int, ...]


class StoredTopic(NamedTuple):
    """The messages of a topic by time and by queue."""

    store: str
    topic: str
    messages: int
    bytes: int
    first_ms: int
    last_ms: int
    stored: tuple[int, ...]
    """Messages in each time interval of the report."""
    queue_ids: tuple[int, ...]
    queue_messages: tuple[int, ...]


class BornToStored(NamedTuple):
    """The time from birth to storing of a topic's messages, in the bins of `DELAY_BOUNDS_MS`."""

    store: str
    topic: str
    counts: tuple[int, ...]
    most_ms: int


class RetriedMessages(NamedTuple):
    """Messages that were stored again for a group, by attempt."""

    store: str
    group: str
    attempts: tuple[int, ...]
    """Messages for the first, the second … retry. The last number counts all later retries."""


class ReportedCause(NamedTuple):
    """Dead letters of a group by cause; see `DeadLetterCause`."""

    store: str
    group: str
    topic: str
    cause: str
    messages: int
    first_ms: int
    last_ms: int
    most_times: int
    physical_offset: int
    """The place of the last dead letter."""
    resent: int = 0
    """Dead letters that were sent again."""


class FrequentKey(NamedTuple):
    """A key that many messages of a topic have."""

    store: str
    topic: str
    key: str
    messages: int
    share: float
    sampled: bool
    """Whether only a sample of the messages was counted, and the numbers are estimates."""
    cut: bool
    """Whether further keys of the topic came several times, which the report leaves out."""


class RepeatedKeys(NamedTuple):
    """Messages of a topic that share a key with an earlier message in the window."""

    store: str
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
    """Waiting messages of one kind: halves, delayed messages, timers, retries."""

    store: str
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

    store: str
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

    store: str
    group: str
    topic: str
    expression: str
    messages: int
    matched: int
    bytes: int
    matched_bytes: int


class GroupLagChange(NamedTuple):
    """How the lag of a group in a topic has changed since an earlier report."""

    store: str
    group: str
    topic: str
    before: int | None
    """None if the earlier report had no such row."""
    lag: int | None
    seconds: float | None
    stored_per_s: float | None
    consumed_per_s: float | None
    drain_s: float | None
    """Time until no message waits, at these rates. None if never or unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRows:
    """The rows of a report, about one store or several."""

    damage: tuple[DamagedPlace, ...] = ()
    findings: tuple[ReportedFinding, ...] = ()
    lags: tuple[GroupTopicLag, ...] = ()
    topics: tuple[StoredTopic, ...] = ()
    delays: tuple[BornToStored, ...] = ()
    retries: tuple[RetriedMessages, ...] = ()
    dead_letters: tuple[ReportedCause, ...] = ()
    keys: tuple[FrequentKey, ...] = ()
    repeated: tuple[RepeatedKeys, ...] = ()
    waiting: tuple[WaitingMessages, ...] = ()
    log_files: tuple[LogFileUse, ...] = ()
    filters: tuple[FilterMatch, ...] = ()


ROW_NAMES: Final = tuple(column.name for column in fields(ReportRows))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPart(ReportRows):
    """Everything about one store."""

    summary: StoreSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(ReportRows):
    """What a report says about one or several stores."""

    title: str
    """Title of the page."""
    only: Mapping[str, str]
    """The settings that select the part to report about, such as ``topic``."""
    window_s: float
    """Seconds between messages of one key that count as repeated."""
    begin_ms: int | None
    """Begin of the first interval of `StoredTopic.stored`. None without messages."""
    interval_ms: int
    """Length of an interval, in milliseconds."""
    stores: tuple[StoreSummary, ...]
    """A summary of each store."""
    version: int = field(default=VERSION)
    """Version of the report's format."""

    def to_json(self) -> str:
        """Return the report as JSON, for `from_json`."""
        document = {column.name: getattr(self, column.name) for column in fields(self)}
        for name in _ROWS:
            document[name] = [row._asdict() for row in document[name]]
        return json.dumps({**document, "only": dict(self.only)}, ensure_ascii=False, separators=(",", ":"))

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
            for name, kind in _ROWS.items():
                rows = [
                    {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
                    for row in document[name]
                ]
                document[name] = tuple(kind(**row) for row in rows)
            return cls(**document)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"no report of librmq: {type(error).__name__}: {error}") from None


_ROWS: Final[dict[str, Callable[..., Any]]] = {
    name: get_args(hint)[0] for name, hint in get_type_hints(Report).items() if name in ("stores", *ROW_NAMES)
}
"""The kind of the rows in each part of a report."""


# -------------------------------------------------------------------------------------- changes since an earlier report


class Comparison(NamedTuple):
    """The changes between two reports."""

    earlier: Report
    """The report to compare with; a store of it that the later report has too is named as there."""
    added: tuple[ReportedFinding, ...]
    """Findings that the earlier report lacks."""
    removed: tuple[ReportedFinding, ...]
    """Findings that only the earlier report has."""
    changed: tuple[tuple[ReportedFinding, ReportedFinding], ...]
    """The earlier and the current finding of one kind about one subject."""
    lags: tuple[GroupLagChange, ...]
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
        tuple(finding for key, finding in now.items() if key not in before),
        tuple(finding for key, finding in before.items() if key not in now),
        tuple(
            (before[key], finding)
            for key, finding in now.items()
            if key in before and (finding.severity, finding.what) != (before[key].severity, before[key].what)
        ),
        tuple(
            sorted(
                _lag_changes(earlier, later),
                key=lambda finding: ((finding.before or 0) - (finding.lag or 0), finding[:3]),
            )
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

    def renamed(row: Any) -> Any:  # noqa: ANN401 (a row of any kind)
        name = names.get(row.store, f"{row.store} (earlier)" if row.store in now else row.store)
        if isinstance(row, ReportedFinding) and row.subject == f"store {row.store}":
            row = row._replace(subject=f"store {name}")
        return row._replace(store=name)

    rows: dict[str, Any] = {part: tuple(map(renamed, getattr(earlier, part))) for part in ("stores", *ROW_NAMES)}
    return replace(earlier, **rows)


def _log_starts(report: Report) -> dict[str, dict[int, str]]:
    """Return for each store the first record of each log file, by its physical offset."""
    starts: dict[str, dict[int, str]] = {store.store: {} for store in report.stores}
    for file in report.log_files:
        starts.setdefault(file.store, {})[file.physical_offset] = file.first
    return starts


def _by_subject(report: Report) -> dict[tuple[str, ...], ReportedFinding]:
    findings: dict[tuple[str, ...], ReportedFinding] = {}
    for finding in report.findings:
        cause = str(finding.evidence.get("cause", ""))  # one subject can have several causes
        findings[finding.store, finding.kind, finding.subject, cause] = finding
    return findings


def _lag_changes(earlier: Report, later: Report) -> Iterator[GroupLagChange]:
    before = {row[:3]: row for row in earlier.lags}
    times = {row.store: row.now_ms for row in earlier.stores}
    seconds = {
        row.store: (row.now_ms - (times[row.store] or 0)) / 1000
        for row in later.stores
        if row.now_ms is not None and times.get(row.store) is not None
    }
    for row in later.lags:
        yield _lag_change(before.pop(row[:3], None), row, seconds.get(row.store))
    for old in before.values():
        yield GroupLagChange(*old[:3], old.lag, None, None, None, None, None)


def _lag_change(old: GroupTopicLag | None, row: GroupTopicLag, seconds: float | None) -> GroupLagChange:
    change = GroupLagChange(*row[:3], None if old is None else old.lag, row.lag, seconds, None, None, None)
    if old is None or seconds is None or seconds <= 0:
        return change
    rate = rate_between(_progress(old), _progress(row), seconds)
    if rate is None:
        return change
    return change._replace(stored_per_s=rate.stored_per_s, consumed_per_s=rate.consumed_per_s, drain_s=rate.drain_s)


def _progress(row: GroupTopicLag) -> TopicProgress:
    offsets = row.queue_ids, row.min_offsets, row.max_offsets, row.consumer_offsets, row.lags
    return TopicProgress(row.group, row.topic, *offsets, [None] * len(row.queue_ids))
