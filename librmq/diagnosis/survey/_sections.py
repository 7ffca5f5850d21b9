"""The sections of a page: what each says about a report in words, plots and tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from librmq.diagnosis.survey._plots import Scale, area, bar, cells, columns
from librmq.diagnosis.survey.model import (
    DELAY_BOUNDS_MS,
    BornToStored,
    Comparison,
    GroupLagChange,
    GroupTopicLag,
    Report,
    StoredTopic,
    StoreSummary,
)
from librmq.formatting import duration, moment, number, percent, rate, short, size, span
from librmq.message import DEFAULT_LEVELS, retry_level
from librmq.message.topics import is_user_topic
from librmq.runtime.event_log import counted

MOST: Final = 20
"""Most rows of a table."""
_N: Final = "number"
_UNEVEN: Final = 1.5
_HOURS: Final = (6, 12, 24, 48, 72)
_DELAYS: Final = ("<0", "1 ms", "10 ms", "0.1 s", "1 s", "10 s", "1 min", "10 min", "1 h", "more")
_DUE: Final = ("overdue", "1 min", "10 min", "1 h", "6 h", "1 d", "7 d", "later")
_DELAY_AXIS: Final = ("<0", "1 ms", "10", "100", "1 s", "10", "1 min", "10", "1 h", "more")
_DUE_AXIS: Final = ("overdue", "1 min", "10", "1 h", "6", "1 d", "7", "later")
_VERDICTS: Final = {True: "sound", False: "damaged", None: "not checked"}
_KINDS: Final = {
    "half": "half message",
    "given_up": "half given up",
    "delay": "delayed",
    "timer": "timer",
    "retry": "retry",
    "pop": "received, in flight",
}


class Column(NamedTuple):
    """A column in a table."""

    name: str
    kind: Literal["text", "number", "plot", "store"] = "text"
    axis: Sequence[str] = ()
    """Labels below the columns of a plot, or at the beginning, the middle and the end of an area."""
    ends: bool = False
    """Whether these are begin, middle and end."""


@dataclass(frozen=True)
class PageTable:
    """Rows of strings and plots."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    left_out: str = ""
    """Says what the table leaves out."""
    legend: bool = False
    """Whether the shades of `plots.cells` are explained below."""

    @property
    def first_column(self) -> int:
        """The column that names a row."""
        return int(self.columns[0].kind == "store")


@dataclass(frozen=True)
class Section:
    """A heading with a sentence and tables. Without tables only the sentence is shown, at the end of the page."""

    anchor: str
    title: str
    about: str
    tables: Sequence[PageTable] = field(default_factory=tuple)


def table(
    columns: Sequence[Column], rows: Iterable[Sequence[Any]], *, stores: bool, legend: bool = False, limit: int = MOST
) -> Sequence[PageTable]:
    """Return a table whose rows begin with their store; empty columns are omitted, and so is a single store."""
    every = list(rows)
    if not every:
        return ()
    names = [Column("store", "store"), *columns]
    positions = [at for at in range(len(names)) if (stores or at) and any(row[at] != "" for row in every[:limit])]
    visible_rows = [[row[at] for at in positions] for row in every[:limit]]
    names = [names[at] for at in positions]
    hidden = len(every) - len(visible_rows)
    left_out = (
        f"{hidden:,} more {'rows are' if hidden > 1 else 'row is'} in the JSON beside this page." if hidden else ""
    )
    return (PageTable(names, visible_rows, left_out, legend),)


# ------------------------------------------------------------------------------------------------------------- sections


def sections(report: Report, comparison: Comparison | None) -> Iterator[Section]:
    """Yield the sections in page order."""
    several = len(report.stores) > 1
    if comparison is not None:
        yield _changes(comparison, several)
    yield _lag(report, comparison, several)
    yield _topics(report, several)
    yield _retries(report, several)
    yield _dead_letters(report, several)
    yield _waiting(report, several)
    yield _delays(report, several)
    yield _uneven(report, several)
    yield _keys(report, several)
    yield _repeated(report, several)
    yield _retention(report, several)
    yield _filters(report, several)
    yield _damage(report, several)
    yield _stores(report)


# --------------------------------------------------------------------------------------------------------------- lag


def _lag(report: Report, comparison: Comparison | None, several: bool) -> Section:
    rows = sorted(report.lags, key=lambda row: (-row.lag, row[:3]))
    waiting = [row for row in rows if row.lag]
    if not waiting:
        text = "No group has any progress here." if not rows else "No message waits for a group."
        return Section("lag", "Lag", text)
    scale = Scale.for_values([row.lag for row in waiting])
    drains = {change[:3]: change for change in comparison.lags} if comparison is not None else {}
    about = (
        f"{number(sum(row.lag for row in waiting))} messages wait in {number(sum(map(_late_queues, waiting)))} of "
        f"{number(sum(len(row.queue_ids) for row in rows))} queues. "
        "Squares are queues, in the order of their numbers. One dark square is a stuck or slow queue; when all are "
        f"dark, consumers are too few or too slow.{_scale(scale)}"
        + ("" if comparison else " How fast a group consumes is unknown: --compare with an earlier report tells.")
    )
    table_rows = (
        (
            row.store, f"{row.group} ← {row.topic}", _lag_plot(row, scale), number(row.lag),
            duration(row.oldest_age_s), _drain(drains.get(row[:3])), _notes(row),
        )
        for row in waiting
    )  # fmt: skip
    columns_ = (
        Column("group ← topic"), Column("queues", "plot"), Column("waiting", _N), Column("oldest waits", _N),
        Column("drains in", _N), Column(""),
    )  # fmt: skip
    tables = [*table(columns_, table_rows, stores=several, legend=True)]
    tables += _by_decade(waiting)
    return Section("lag", "Lag", about, tables)


def _late_queues(row: GroupTopicLag) -> int:
    return sum(map(bool, row.lags))


def _lag_plot(row: GroupTopicLag, scale: Scale) -> object:
    worst = max(range(len(row.lags)), key=row.lags.__getitem__)
    what = (
        f"{row.group} on {row.topic}: {number(row.lag)} messages wait in {number(_late_queues(row))} of "
        f"{number(len(row.lags))} queues; most in queue {row.queue_ids[worst]}: {number(row.lags[worst])}"
    )
    return bar(row.lag, scale, what) + cells(row.lags, what)


def _notes(row: GroupTopicLag) -> str:
    parts = []
    worst = max(row.lags)
    if len(row.lags) > 1 and worst > row.lag / 2 and row.lag > 1:
        parts.append(f"{percent(worst / row.lag)} in queue {row.queue_ids[row.lags.index(worst)]}")
    if row.without_progress:
        parts.append(f"{row.without_progress} of {len(row.lags)} queues without progress")
    if row.expired:
        parts.append(f"{number(row.expired)} deleted unread")
    if row.instances is not None:
        parts.append(f"{row.instances} running")
    return "; ".join(parts)


def _drain(change: GroupLagChange | None) -> str:
    if change is None or change.consumed_per_s is None or change.stored_per_s is None:
        return "unknown"
    if change.drain_s is None:
        return "grows" if change.stored_per_s > change.consumed_per_s else "never"
    return duration(change.drain_s)


def _by_decade(rows: Sequence[GroupTopicLag]) -> Sequence[PageTable]:
    """Show many queues grouped by the size of their lag, which stays readable for any number of queues."""
    if len(rows) <= 20 and max(len(row.lags) for row in rows) <= 60:
        return ()
    digits = Counter(len(str(lag)) if lag else 0 for row in rows for lag in row.lags)
    names = ("none", *(f"{10**power:,}+" for power in range(max(digits))))
    values = [digits[power] for power in range(len(names))]
    what = "Queues by waiting messages: " + ", ".join(
        f"{name}: {number(value)}" for name, value in zip(names, values, strict=True)
    )
    row = ("", "all queues of these groups", columns(values, what), number(sum(values)))
    return table((Column("by waiting messages"), Column("", "plot", names), Column("queues", _N)), [row], stores=False)


def _changes(comparison: Comparison, several: bool) -> Section:
    rows = [row for row in comparison.lags if row.before != row.lag]
    lag_table = table(
        (Column("group ← topic"), Column("before", _N), Column("now", _N), Column("change", _N), Column("stored", _N),
         Column("consumed", _N), Column("drains in", _N)),
        (
            (row.store, f"{row.group} ← {row.topic}", number(row.before), number(row.lag),
             "new" if row.before is None else "gone" if row.lag is None else f"{row.lag - row.before:+,}",
             rate(row.stored_per_s), rate(row.consumed_per_s), "–" if row.lag is None else _drain(row))
            for row in rows
        ),
        stores=several,
    )  # fmt: skip
    removed = table(
        (Column("no longer found"), Column("about")),
        ((row.store, row.what, row.subject) for row in comparison.removed),
        stores=several,
    )
    since = min((row.now_ms for row in comparison.earlier.stores if row.now_ms is not None), default=None)
    new = counted(len(comparison.added), "new finding")
    about = (
        f"Since the report of {moment(since)}: {new}, {len(comparison.removed)} gone, {len(comparison.changed)} "
        "changed. Rates are between the two reports."
    )
    return Section("changes", "Changes", about, (*lag_table, *removed))


# ----------------------------------------------------------------------------------------------------------- traffic


def _topics(report: Report, several: bool) -> Section:
    rows = sorted(report.topics, key=lambda row: (-row.messages, row[:2]))
    if not rows:
        return Section("rates", "Topics and rates", "There are no messages.")
    intervals = max(len(row.stored) for row in rows)
    times = [moment((report.begin_ms or 0) + report.interval_ms * intervals * half // 2) for half in range(3)]
    is_one_day = times[0][:10] == times[-1][:10]
    axis = [text[11:] if is_one_day else text[5:16] for text in times]  # without their common part
    table_rows = (
        (
            row.store, row.topic, area(row.stored, _rate_text(row, report)),
            rate(max(row.stored) / report.interval_ms * 1000), number(row.messages), size(row.bytes),
            size(row.bytes / row.messages), moment(row.last_ms),
        )
        for row in rows
    )  # fmt: skip
    about = (
        f"When messages were stored, in intervals of {duration(report.interval_ms / 1000)}. Each row has its own "
        "scale, up to its peak. %RETRY% topics hold messages that a group gets again, %DLQ% those it gave up; "
        "SCHEDULE_TOPIC and RMQ_SYS are the broker’s own."
    )
    names = (
        Column("topic"), Column("stored over time", "plot", axis, ends=True), Column("peak", _N),
        Column("messages", _N), Column("size", _N), Column("mean", _N), Column("last stored", _N),
    )  # fmt: skip
    return Section("rates", "Topics and rates", about, table(names, table_rows, stores=several))


def _rate_text(row: StoredTopic, report: Report) -> str:
    peak = row.stored.index(max(row.stored))
    at = moment((report.begin_ms or 0) + peak * report.interval_ms)
    return (
        f"{row.topic}: {number(row.messages)} messages from {moment(row.first_ms)} to {moment(row.last_ms)}; most at "
        f"{at}, {rate(row.stored[peak] / report.interval_ms * 1000)}"
    )


def _retries(report: Report, several: bool) -> Section:
    rows = sorted(report.retries, key=lambda row: (-sum(row.attempts), row[:2]))
    if not rows:
        return Section("retries", "Retries", "No message was written again for a group.")
    levels = DEFAULT_LEVELS
    last_attempt = max(at for row in rows for at, count in enumerate(row.attempts, 1) if count)
    delays = (levels.delay_ms(levels.cap(retry_level(times))) / 1000 for times in range(last_attempt))
    axis = [duration(delay_s).replace(" min", "m").replace(" ", "") for delay_s in delays]

    def text(attempts: Sequence[int]) -> str:
        counts_text = ", ".join(f"{number(count)} at attempt {at}" for at, count in enumerate(attempts, 1) if count)
        return f"Retries: {counts_text}"

    table_rows = (
        (row.store, row.group, columns(row.attempts[:last_attempt], text(row.attempts)), number(sum(row.attempts)),
         number(max(at for at, count in enumerate(row.attempts, 1) if count)))
        for row in rows
    )  # fmt: skip
    about = (
        "Messages that a group failed on and that were written again for it, by attempt. Below each attempt is the "
        "delay before it with the usual levels. Many at the left fail once; a flat row fails always."
    )
    names = (Column("group"), Column("attempts", "plot", axis), Column("retries", _N), Column("highest attempt", _N))
    return Section("retries", "Retries", about, table(names, table_rows, stores=several))


def _dead_letters(report: Report, several: bool) -> Section:
    rows = sorted(report.dead_letters, key=lambda row: (-row.messages, row[:4]))
    if not rows:
        return Section("dead-letters", "Dead letters", "There are no dead letters.")
    scale = Scale.for_values([row.messages for row in rows])
    table_rows = (
        (row.store, f"{row.group} ← {row.topic}", row.cause,
         bar(row.messages, scale, f"{number(row.messages)} dead letters of {row.group}: {row.cause}"),
         number(row.messages), number(row.resent), number(row.most_times), span(row.first_ms, row.last_ms))
        for row in rows
    )  # fmt: skip
    about = f"Messages that a group gave up. No consumer gets them until they are sent again.{_scale(scale)}"
    names = (
        Column("group ← topic"), Column("cause"), Column("", "plot"), Column("messages", _N),
        Column("sent again", _N), Column("attempts", _N), Column("given up", _N),
    )  # fmt: skip
    return Section("dead-letters", "Dead letters by cause", about, table(names, table_rows, stores=several))


def _waiting(report: Report, several: bool) -> Section:
    rows = report.waiting
    if not rows:
        return Section("pending", "Pending", "Nothing is pending: no half message, delayed message, timer or retry.")

    def text(due: Sequence[int]) -> str:
        return "Due: " + ", ".join(
            f"{number(count)} {'' if name in ('overdue', 'later') else 'within '}{name}"
            for name, count in zip(_DUE, due, strict=True)
            if count
        )

    overdue = frozenset((0,))
    table_rows = (
        (row.store, _KINDS.get(row.kind, row.kind), row.topic, row.group or "",
         columns(row.due, text(row.due), overdue) if row.due else "", number(row.messages),
         span(row.first_due_ms, row.last_due_ms) if row.due else "never",
         number(row.most_checks) if row.most_checks else "")
        for row in rows
    )  # fmt: skip
    about = (
        "Half messages were neither committed nor rolled back: the broker asks their producers until it gives up. "
        "Delayed messages, timers and retries wait for their time. In a store that is not in use, overdue ones wait "
        "for a broker."
    )
    names = (
        Column("kind"), Column("topic"), Column("group"), Column("due within", "plot", _DUE_AXIS),
        Column("messages", _N), Column("due", _N), Column("checks", _N),
    )  # fmt: skip
    return Section("pending", "Pending", about, table(names, table_rows, stores=several))


def _delays(report: Report, several: bool) -> Section:
    rows = [row for row in report.delays if sum(row.counts)]
    if not rows:
        return Section("delays", "From born to stored", "No message of a producer is stored here.")

    def text(topic: str, counts: Sequence[int]) -> str:
        counts_text = ", ".join(
            f"{name}: {number(count)}" for name, count in zip(_DELAYS, counts, strict=True) if count
        )
        return f"{topic}, messages by delay up to {counts_text}"

    behind = frozenset((0,))
    table_rows = (
        (row.store, row.topic, columns(row.counts, text(row.topic, row.counts), behind), _most_within(row, 0.5),
         _most_within(row, 0.99), duration(row.most_ms / 1000))
        for row in rows
    )  # fmt: skip
    about = (
        "Time from the send on the producer’s clock to the storing on the broker’s. Below 0 the clocks disagree. "
        "Delayed messages and transactions count from their send."
    )
    names = (
        Column("topic"), Column("delay, up to", "plot", _DELAY_AXIS), Column("half within", _N),
        Column("99 % within", _N), Column("longest", _N),
    )  # fmt: skip
    return Section("delays", "From born to stored", about, table(names, table_rows, stores=several))


def _most_within(row: BornToStored, share: float) -> str:
    """Return the bound that covers this share of the delays."""
    total, below = sum(row.counts), 0
    for bound_ms, count in zip(DELAY_BOUNDS_MS, row.counts, strict=False):
        below += count
        if below >= share * total:
            return duration(min(bound_ms, max(0, row.most_ms)) / 1000)
    return duration(row.most_ms / 1000)


# -------------------------------------------------------------------------------------------------------------- skew


def _uneven(report: Report, several: bool) -> Section:
    rows = []
    for row in report.topics:
        largest, others = max(row.queue_messages), len(row.queue_ids) - 1
        if is_user_topic(row.topic) and others > 0 and largest * others > _UNEVEN * (row.messages - largest):
            mean = (row.messages - largest) / others
            rows.append((largest / mean if mean else math.inf, largest, row))
    if not rows:
        return Section("queues", "Uneven queues", "All queues of a topic hold about the same.")
    rows.sort(key=lambda item: (-item[0], item[2][:2]))
    table_rows = (
        (row.store, row.topic, cells(row.queue_messages, f"{row.topic}: messages by queue"),
         str(row.queue_ids[row.queue_messages.index(largest)]), number(largest), percent(largest / row.messages),
         "all" if ratio == math.inf else f"{ratio:.3g} ×")
        for ratio, largest, row in rows
    )  # fmt: skip
    about = (
        "Topics whose largest queue holds far more than the mean of the others. A queue has one consumer at a time, so "
        "it limits how fast the topic is consumed. A key that is sent often is the usual cause."
    )
    names = (
        Column("topic"), Column("messages by queue", "plot"), Column("largest queue", _N), Column("messages", _N),
        Column("of the topic", _N), Column("of the mean of the others", _N),
    )  # fmt: skip
    return Section("queues", "Uneven queues", about, table(names, table_rows, stores=several, legend=True))


def _about(value: float, sampled: bool) -> str:
    return f"about {number(value)}" if sampled else number(value)


def _keys(report: Report, several: bool) -> Section:
    rows = sorted(report.keys, key=lambda row: (-row.messages, row[:3]))
    sampled = any(row.sampled for row in rows) or any(row.sampled for row in report.repeated)
    if not rows:
        text = "Among the sampled messages, no key occurs twice; most were not looked at."
        return Section("keys", "Frequent keys", text if sampled else "No key occurs twice.")
    scale = Scale.for_values([row.messages for row in rows])
    table_rows = (
        (row.store, short(row.key), row.topic,
         bar(row.messages, scale, f"{short(row.key)} in {row.topic}: {number(row.messages)} messages"),
         _about(row.messages, row.sampled), percent(row.share))
        for row in rows
    )  # fmt: skip
    names = (
        Column("key"), Column("topic"), Column("", "plot"), Column("messages", _N), Column("of the topic’s keys", _N),
    )  # fmt: skip
    cut = sorted({row.topic for row in rows if row.cut})
    about = f"Business keys with the most messages.{_scale(scale)}" + (
        f" Further keys of {', '.join(map(short, cut[:3]))}{', …' * (len(cut) > 3)} are left out." if cut else ""
    )
    if sampled:
        about += " The store is large, so a sample of the messages was counted, and these are estimates."
    return Section("keys", "Frequent keys", about, table(names, table_rows, stores=several))


def _repeated(report: Report, several: bool) -> Section:
    rows = sorted(report.repeated, key=lambda row: (-row.messages, row[:2]))
    if not rows:
        return Section("repeated", "Repeated keys", "No key came twice within the window.")
    table_rows = (
        (row.store, row.topic,
         *(_about(count, row.sampled) if row.messages else "none in the sample" if row.sampled else "0"
           for count in (row.messages, row.resent, row.keys)),
         "" if row.shortest_s is None else duration(row.shortest_s))
        for row in rows
    )  # fmt: skip
    about = (
        f"Messages whose key another message of the topic had in the {duration(report.window_s)} before. One key may "
        "belong to several messages; where it must not, this is what a consumer has to recognise. Those sent again "
        "have the same unique id too: a client or broker repeated them."
    )
    if any(row.sampled for row in rows):
        about += (
            " The store is large, so a sample of the keys was looked at, and these are estimates. A key outside of the "
            "sample is not counted, however often it came: see also the frequent keys."
        )
    names = (
        Column("topic"), Column("messages", _N), Column("sent again", _N), Column("keys", _N),
        Column("shortest distance", _N),
    )  # fmt: skip
    return Section("repeated", "Repeated keys", about, table(names, table_rows, stores=several))


def _scale(scale: Scale) -> str:
    return " Bars are on a logarithmic scale: each line of the grid is ten times the one before." * scale.is_log


# --------------------------------------------------------------------------------------------------------- the store


def _retention(report: Report, several: bool) -> Section:
    rows = []
    for store in report.stores:
        files = [file for file in report.log_files if file.store == store.store]
        for hours in _HOURS:
            if store.now_ms is not None:
                limit = store.now_ms - hours * 3_600_000
                deleted = [file for file in files[:-1] if file.last_ms is not None and file.last_ms <= limit]
                if deleted or hours == _HOURS[-1]:
                    freed = sum(file.bytes for file in deleted)
                    rows.append((
                        store.store, f"{hours} h", number(len(deleted)), size(freed),
                        number(sum(file.messages for file in deleted)), number(sum(file.unread for file in deleted)),
                    ))  # fmt: skip
    total = sum(file.bytes for file in report.log_files)
    oldest = min((store.first_ms for store in report.stores if store.first_ms is not None), default=None)
    about = (
        f"The log has {size(total)} in {number(len(report.log_files))} files; the oldest message is of "
        f"{moment(oldest)}. This is what a retention of so many hours would delete, in whole files, and how much of it "
        "some group has not consumed."
    )
    names = (
        Column("hours kept"), Column("files deleted", _N), Column("freed", _N), Column("messages", _N),
        Column("of these unread", _N),
    )  # fmt: skip
    if not rows:
        return Section("retention", "Retention", "The log is empty.")
    return Section("retention", "Retention", about, table(names, rows, stores=several, limit=60))


def _filters(report: Report, several: bool) -> Section:
    rows = sorted(report.filters, key=lambda row: (row.matched_bytes - row.bytes, row[:3]))
    if not rows:
        return Section("filters", "Filters", "No group filters by SQL.")
    table_rows = (
        (row.store, f"{row.group} ← {row.topic}", row.expression, number(row.messages), number(row.matched),
         size(row.bytes - row.matched_bytes))
        for row in rows
    )  # fmt: skip
    about = (
        "SQL filters that groups have registered, how many of their topic’s messages they match, and what the broker "
        "does not have to send because of them."
    )
    names = (
        Column("group ← topic"), Column("expression"), Column("messages", _N), Column("matched", _N),
        Column("not sent", _N),
    )  # fmt: skip
    return Section("filters", "Filters", about, table(names, table_rows, stores=several))


def _damage(report: Report, several: bool) -> Section:
    if not report.damage:
        is_checked = all(store.is_sound is not None for store in report.stores)
        verdict = "verify finds no damage." if is_checked else "verify did not run on every store."
        return Section("damage", "Damage", verdict)
    about = (
        "What librmq verify finds wrong. Records that cannot be read are in none of the numbers. librmq recover "
        "repairs what a crash leaves; librmq salvage saves what can be read of the rest."
    )
    names = (Column("file"), Column("offset", _N), Column("kind"), Column("what"))
    table_rows = ((row.store, row.file, number(row.offset), row.kind, row.what) for row in report.damage)
    return Section("damage", "Damage", about, table(names, table_rows, stores=several))


def _verdict(store: StoreSummary) -> str:
    return "recoverable" if store.is_sound and store.recoverable else _VERDICTS[store.is_sound]


def _stores(report: Report) -> Section:
    table_rows = (
        ("", store.store, store.path, store.owner or "not in use", _verdict(store),
         number(store.records) + " without the unreadable" * store.skipped,
         size(store.bytes), moment(store.first_ms), moment(store.last_ms), moment(store.now_ms))
        for store in report.stores
    )  # fmt: skip
    names = (
        Column("store"), Column("folder"), Column("written by"), Column("verify"), Column("records", _N),
        Column("size", _N), Column("first stored", _N), Column("last stored", _N), Column("now", _N),
    )  # fmt: skip
    about = (
        "Ages count from “now”: of a store in use the time of the report, else of its last message. All times are UTC."
    )
    return Section("stores", "Stores", about, table(names, table_rows, stores=False, limit=200))
