"""The page of a report: what its rows say in words, plots and tables, in one file that needs no console."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from librmq.console._tables import (
    CELLS,
    KINDS,
    Axis,
    Cell,
    Fact,
    Findings,
    Notice,
    Page,
    Scale,
    Table,
    area,
    bar,
    cells,
    columns,
    count,
    notices,
    render,
)
from librmq.diagnosis import (
    Comparison,
    DeadLetterCause,
    Finding,
    GroupRate,
    Report,
    TopicLag,
    TopicProgress,
    compare,
)
from librmq.diagnosis.report_rows import (
    DELAY_BOUNDS_MS,
    FilterMatch,
    FrequentKey,
    LagChange,
    LogFileUse,
    RepeatedKeys,
    StoreReport,
    TopicTraffic,
    WaitingMessages,
)
from librmq.files import Damage
from librmq.formatting import UNKNOWN, duration, moment, number, percent, rate, sent_again, short, size, span
from librmq.message import DEFAULT_LEVELS, retry_level
from librmq.message.topics import TopicPrefix, is_user_topic
from librmq.runtime.event_log import counted

MOST: Final = 20
"""Most rows of a table."""
_OF_A_KIND: Final = 5
"""Most findings of a kind."""
_UNEVEN: Final = 1.5
_HOURS: Final = (6, 12, 24, 48, 72)
_DELAYS: Final = ("<0", "1 ms", "10 ms", "0.1 s", "1 s", "10 s", "1 min", "10 min", "1 h", "more")
_DUE: Final = ("overdue", "1 min", "10 min", "1 h", "6 h", "1 d", "7 d", "later")
_DELAY_AXIS: Final = Axis(("<0", "1 ms", "10", "100", "1 s", "10", "1 min", "10", "1 h", "more"))
_DUE_AXIS: Final = Axis(("overdue", "1 min", "10", "1 h", "6", "1 d", "7", "later"))
_VERDICTS: Final = {True: "sound", False: "damaged", None: "not checked"}
Row = TypeVar("Row")


class _GroupLag(NamedTuple):
    """The lag of a group in a topic of a store."""

    part: StoreReport
    queues: TopicProgress
    row: TopicLag

    @property
    def age_s(self) -> float | None:
        """How long the oldest message waits; None without one, or if it is unknown."""
        if self.row.oldest_timestamp_ms is None or self.part.now_ms is None:
            return None
        return max(0, self.part.now_ms - self.row.oldest_timestamp_ms) / 1000


Lags: TypeAlias = Sequence[tuple[str, _GroupLag]]
"""The lags of all stores, the largest first."""


def render_page(report: Report, earlier: Report | None = None) -> str:
    """Return the page of a report. With an earlier report, it also says what has changed.

    Raises:
        MissingExtraError: The extra ``report`` is not installed.
    """
    comparison = None if earlier is None else compare(earlier, report)
    lags = [
        (part.store, _GroupLag(part, queues, row))
        for part in report.stores
        for of_store in (part.lags(),)
        for queues, row in zip(of_store.topics, of_store.by_topic(), strict=True)
    ]
    lags.sort(key=lambda item: (-item[1].row.lag, item[0], *item[1].row[:2]))
    every = list(_tables(report, comparison, lags))
    page = Page(
        report.title,
        _facts(report, lags),
        [table for table in every if table.rows],
        findings=Findings(_notices(report, comparison)),
        template="report.html.j2",
        more={
            "style": (files("librmq.console") / "templates" / "console.css").read_text("utf-8"),
            "about": _about(report),
            "mood": _mood(report),
            "verdict": _verdict(report, comparison),
            "empty": [table for table in every if table.nothing and not table.rows],
        },
    )
    return render(page, at="", is_printed=True)


# ---- the top of the page


def _about(report: Report) -> str:
    names = ", ".join(part.store for part in report.stores[:8]) + ", …" * (len(report.stores) > 8)
    latest = max((part.now_ms for part in report.stores if part.now_ms is not None), default=None)
    only = f" Only {', '.join(f'{name} {value}' for name, value in report.only.items())}." if report.only else ""
    return f"{names}, as of {moment(latest)} UTC.{only}"


def _mood(report: Report) -> str:
    severities = {finding.severity for part in report.stores for finding in part.findings}
    return "bad" if "error" in severities else "warn" if "warning" in severities else "good"


def _verdict(report: Report, comparison: Comparison | None) -> str:
    findings = report.findings
    counts = Counter[str](finding.severity for _, finding in findings)
    if not counts["error"] and not counts["warning"]:
        verdict = "Nothing needs attention."
        if any(part.is_sound is None for part in report.stores):
            verdict += " Whether the files are sound is unknown."
        elif any(part.recoverable for part in report.stores):
            verdict += " What a kill or a copy has left is recoverable: the next opening repairs it without a loss."
    else:
        counts_text = [counted(counts[name], name) for name in ("error", "warning") if counts[name]]
        worst = findings[0][1]
        what = worst.what.partition(";")[0].rstrip(".")
        verdict = f"{' and '.join(counts_text)}. Look first at {worst.subject}: {what}."
    if comparison is not None and (comparison.added or comparison.removed):
        verdict += f" Since the earlier report: {len(comparison.added)} new, {len(comparison.removed)} gone."
    return verdict


def _notices(report: Report, comparison: Comparison | None) -> Sequence[Notice]:
    changed = {} if comparison is None else {id(now): f" (Before: {old.what})" for old, now in comparison.changed}
    added = set() if comparison is None else {id(finding) for _, finding in comparison.added}
    rows: list[tuple[Finding, Cell, str]] = []
    for store, finding in report.findings:
        is_named = len(report.stores) > 1 and finding.subject != f"store {store}"
        subject = f"{finding.subject}, store {store}" if is_named else finding.subject
        new = "New: " * (id(finding) in added)
        rows.append((finding, Cell(subject), f"{new}{finding.what}{changed.get(id(finding), '')}"))
    return notices(rows, _OF_A_KIND)


def _facts(report: Report, lags: Lags) -> list[Fact]:
    lag = sum(item.row.lag for _, item in lags)
    oldest = max((age for _, item in lags if (age := item.age_s) is not None), default=None)
    letters = [row for part in report.stores for row in part.dead_letters]
    dead, resent = sum(row.messages for row in letters), sum(row.resent for row in letters)
    traffic = [row for part in report.stores for row in part.traffic]
    first, last = min((row.first_ms for row in traffic), default=0), max((row.last_ms for row in traffic), default=0)
    unsound = any(part.is_sound is False for part in report.stores)
    unknown = any(part.is_sound is None for part in report.stores)
    recoverable = sum(part.recoverable for part in report.stores)
    verdict = "damaged" if unsound else "not checked" if unknown else "recoverable" if recoverable else "sound"
    places = sum(len(part.damage) for part in report.stores) if unsound else recoverable * (verdict == "recoverable")
    return [
        Fact(
            "records", number(sum(row.messages for row in traffic)),
            f"over {duration((last - first) / 1000)}" if traffic else "",
        ),
        Fact(
            "stored", size(sum(row.bytes for row in traffic)),
            f"in {counted(len({row.topic for row in traffic}), 'topic')}",
        ),
        Fact("wait for a group", number(lag), f"the oldest for {duration(oldest)}" * (lag > 0), "warn" * (lag > 0)),
        Fact("dead letters", number(dead), sent_again(resent), "bad" if dead else ""),
        Fact(
            "pending", number(sum(row.messages for part in report.stores for row in part.waiting)),
            "halves, delays, retries",
        ),
        Fact(
            "verify", verdict, counted(places, "place") if places else "",
            "bad" if unsound else "good" if verdict == "sound" else "",
        ),
    ]  # fmt: skip


# ---- tables


def _tables(report: Report, comparison: Comparison | None, lags: Lags) -> Iterator[Table]:
    """Yield the tables of the page in their order; those without rows say why at its end."""
    if comparison is not None:
        yield from _changes(report, comparison)
    yield from _lag(report, comparison, lags)
    for table in (_topics, _retries, _dead_letters, _waiting, _delays, _uneven, _keys, _repeated):
        yield table(report)
    for table in (_retention, _filters, _damage, _stores):
        yield table(report)


def _filled(
    report: Report, rows: Sequence[tuple[str, Row]], cells_of: Callable[[Row], Mapping[str, Cell]], table: Table,
    max_rows: int = MOST,
) -> Table:  # fmt: skip
    """Return a table of rows that are given with their stores; ``cells_of`` returns the cells of one by column.

    Empty columns are left out, and so is the store if there is only one.
    """
    several, hidden = len(report.stores) > 1, len(rows) - max_rows
    cells = [
        {**({"store": Cell(store, "", "store")} if several else {}), **cells_of(row)} for store, row in rows[:max_rows]
    ]
    names = [name for name in (cells[0] if cells else ()) if any(row[name].text for row in cells)]
    note = f"{hidden:,} more {'rows are' if hidden > 1 else 'row is'} in the JSON beside this page." * (hidden > 0)
    return table._replace(columns=names, rows=[[row[name] for name in names] for row in cells], note=note)


def _rows(report: Report, name: str, order: Callable[[Any], Any] | None = None) -> list[tuple[str, Any]]:
    """Return the rows of a kind, each with its store; in this order, then by store, else as they are."""
    rows = [(part.store, row) for part in report.stores for row in getattr(part, name)]
    return rows if order is None else sorted(rows, key=lambda row: (order(row[1]), row[0], *map(str, row[1][:3])))


def _n(text: str) -> Cell:
    return Cell(text, is_number=True)


def _plot(text: str) -> Cell:
    return Cell(text, "", "plot")


def _first(text: str) -> Cell:
    return Cell(text, "", "first")


def _scale(scale: Scale) -> str:
    return " Bars are on a logarithmic scale: each line of the grid is ten times the one before." * scale.is_log


def _counts(names: Iterable[str], counts: Iterable[int]) -> str:
    return ", ".join(f"{name}: {number(amount)}" for name, amount in zip(names, counts, strict=True) if amount)


def _changes(report: Report, comparison: Comparison) -> Iterator[Table]:
    since = min((part.now_ms for part in comparison.earlier.stores if part.now_ms is not None), default=None)
    about = (
        f"Since the report of {moment(since)}: {counted(len(comparison.added), 'new finding')}, "
        f"{len(comparison.removed)} gone, {len(comparison.changed)} changed. Rates are between the two reports."
    )

    def cells_of(row: LagChange) -> dict[str, Cell]:
        change = "new" if row.before is None else "gone" if row.lag is None else f"{row.lag - row.before:+,}"
        return {
            "group ← topic": _first(f"{row.group} ← {row.topic}"),
            "before": count(row.before),
            "now": count(row.lag),
            "change": _n(change),
            "stored": _n(rate(None if row.rate is None else row.rate.stored_per_s)),
            "consumed": _n(rate(None if row.rate is None else row.rate.consumed_per_s)),
            "drains in": _n("–" if row.lag is None else _drain(row.rate)),
        }

    rows = [(row.store, row) for row in comparison.lags if row.before != row.lag]
    yield _filled(report, rows, cells_of, Table("Changes", nothing=about, about=about, anchor="changes"))
    yield _filled(
        report, comparison.removed,
        lambda finding: {"no longer found": Cell(finding.what), "about": Cell(finding.subject)},
        Table("Findings that are gone", nothing="", anchor="gone"),
    )  # fmt: skip


def _lag(report: Report, comparison: Comparison | None, lags: Lags) -> Iterator[Table]:
    waiting = [item for item in lags if item[1].row.lag]
    scale = Scale.for_values([item.row.lag for _, item in waiting])
    rates = {} if comparison is None else {row[:3]: row.rate for row in comparison.lags}

    def cells_of(item: _GroupLag) -> dict[str, Cell]:
        row = item.row
        return {
            "group ← topic": _first(f"{row.group} ← {row.topic}"),
            "queues": _plot(_lag_plot(item.queues, row, scale)),
            "waiting": count(row.lag),
            "oldest waits": _n(duration(item.age_s)),
            "drains in": _n(_drain(rates.get((item.part.store, row.group, row.topic)))),
            "": Cell(_notes(item)),
        }

    about = (
        f"{number(sum(item.row.lag for _, item in waiting))} messages wait in "
        f"{number(sum(bool(lag) for _, item in waiting for lag in item.queues.lags))} of "
        f"{number(sum(item.row.queues for _, item in lags))} queues. "
        "Squares are queues, in the order of their numbers. One dark square is a stuck or slow queue; when all are "
        f"dark, consumers are too few or too slow.{_scale(scale)}"
        + ("" if comparison else " How fast a group consumes is unknown: --compare with an earlier report tells.")
    )
    nothing = "No message waits for a group." if lags else "No group has any progress here."
    table = Table("Lag", nothing=nothing, about=about, anchor="lag", has_shades=True)
    yield _filled(report, waiting, cells_of, table)
    if len(waiting) > MOST or any(len(item.queues.lags) > CELLS for _, item in waiting):
        yield _by_decade([item.queues for _, item in waiting])


def _lag_plot(queues: TopicProgress, row: TopicLag, scale: Scale) -> str:
    worst = max(range(len(queues.lags)), key=queues.lags.__getitem__)
    what = (
        f"{row.group} on {row.topic}: {number(row.lag)} messages wait in {number(sum(map(bool, queues.lags)))} of "
        f"{number(row.queues)} queues; most in queue {queues.queue_ids[worst]}: {number(queues.lags[worst])}"
    )
    return bar(row.lag, scale, what) + cells(queues.lags, what)


def _notes(item: _GroupLag) -> str:
    part, queues, row = item
    parts, largest_lag = [], row.most_in_one_queue
    if row.queues > 1 and largest_lag > row.lag / 2 and row.lag > 1:
        parts.append(f"{percent(largest_lag / row.lag)} in queue {queues.queue_ids[queues.lags.index(largest_lag)]}")
    if row.without_progress:
        parts.append(f"{row.without_progress} of {row.queues} queues without progress")
    if row.expired:
        parts.append(f"{number(row.expired)} deleted unread")
    if part.instances is not None:
        parts.append(f"{part.instances.get(row.group, 0)} running")
    return "; ".join(parts)


def _drain(change: GroupRate | None) -> str:
    if change is None or change.consumed_per_s is None:
        return UNKNOWN
    if change.drain_s is None:
        return "grows" if change.stored_per_s > change.consumed_per_s else "never"
    return duration(change.drain_s)


def _by_decade(rows: Sequence[TopicProgress]) -> Table:
    """Show many queues grouped by the size of their lag, which stays readable for any number of queues."""
    digits = Counter(len(str(lag)) if lag else 0 for row in rows for lag in row.lags)
    labels = ("none", *(f"{10**power:,}+" for power in range(max(digits))))
    values = [digits[power] for power in range(len(labels))]
    title = "Queues by waiting messages"
    row = [_plot(columns(values, f"{title}: {_counts(labels, values)}")), count(sum(values))]
    return Table(title, ("waiting", "queues"), [row], anchor="decades", axes={"waiting": Axis(labels)})


# ---- traffic


def _topics(report: Report) -> Table:
    rows = _rows(report, "traffic", lambda row: -row.messages)
    intervals = max((len(row.stored) for _, row in rows), default=0)
    times = [moment((report.begin_ms or 0) + report.interval_ms * intervals * half // 2) for half in range(3)]
    is_one_day = times[0][:10] == times[-1][:10]
    axis = Axis([text[11:] if is_one_day else text[5:16] for text in times], is_span=True)  # without their common part
    per_s = 1000 / report.interval_ms

    def cells_of(row: TopicTraffic) -> dict[str, Cell]:
        peak = row.stored.index(max(row.stored))
        what = (
            f"{row.topic}: {number(row.messages)} messages from {moment(row.first_ms)} to {moment(row.last_ms)}; most "
            f"at {moment((report.begin_ms or 0) + peak * report.interval_ms)}, {rate(row.stored[peak] * per_s)}"
        )
        return {
            "topic": _first(row.topic),
            "stored over time": _plot(area(row.stored, what)),
            "peak": _n(rate(row.stored[peak] * per_s)),
            "messages": count(row.messages),
            "size": _n(size(row.bytes)),
            "mean": _n(size(row.bytes / row.messages)),
            "last stored": _n(moment(row.last_ms)),
        }

    about = (
        f"When messages were stored, in intervals of {duration(report.interval_ms / 1000)}. Each row has its own "
        "scale, up to its peak. %RETRY% topics hold messages that a group gets again, %DLQ% those it gave up; "
        "SCHEDULE_TOPIC and RMQ_SYS are the broker’s own."
    )
    nothing, axes = "There are no messages.", {"stored over time": axis}
    table = Table("Topics and rates", nothing=nothing, about=about, anchor="rates", axes=axes)
    return _filled(report, rows, cells_of, table)


def _retries(report: Report) -> Table:
    rows = [row for row in _rows(report, "traffic", lambda row: -sum(row.attempts)) if any(row[1].attempts)]
    levels = DEFAULT_LEVELS
    last = max((at for _, row in rows for at, amount in enumerate(row.attempts, 1) if amount), default=0)
    delays = (levels.delay_ms(levels.cap(retry_level(times))) / 1000 for times in range(last))
    axis = Axis([duration(delay_s).replace(" min", "m").replace(" ", "") for delay_s in delays])

    def cells_of(row: TopicTraffic) -> dict[str, Cell]:
        attempts = [(at, amount) for at, amount in enumerate(row.attempts, 1) if amount]
        what = ", ".join(f"{number(amount)} at attempt {at}" for at, amount in attempts)
        return {
            "group": _first(row.topic.removeprefix(TopicPrefix.RETRY)),
            "attempts": _plot(columns(row.attempts[:last], f"Retries: {what}")),
            "retries": count(sum(row.attempts)),
            "highest attempt": count(attempts[-1][0]),
        }

    about = (
        "Messages that a group failed on and that were written again for it, by attempt. Below each attempt is the "
        "delay before it with the usual levels. Many at the left fail once; a flat row fails always."
    )
    nothing = "No message was written again for a group."
    table = Table("Retries", nothing=nothing, about=about, anchor="retries", axes={"attempts": axis})
    return _filled(report, rows, cells_of, table)


def _dead_letters(report: Report) -> Table:
    rows = _rows(report, "dead_letters", lambda row: -row.messages)
    scale = Scale.for_values([row.messages for _, row in rows])

    def cells_of(row: DeadLetterCause) -> dict[str, Cell]:
        what = f"{number(row.messages)} dead letters of {row.group}: {row.cause}"
        return {
            "group ← topic": _first(f"{row.group} ← {row.original_topic}"),
            "cause": Cell(row.cause),
            "": _plot(bar(row.messages, scale, what)),
            "messages": count(row.messages),
            "sent again": count(row.resent),
            "attempts": count(row.most_times),
            "given up": _n(span(row.first_timestamp_ms, row.last_timestamp_ms)),
        }

    about = f"Messages that a group gave up. No consumer gets them until they are sent again.{_scale(scale)}"
    title, nothing = f"Dead letters{' by cause' if rows else ''}", "There are no dead letters."
    return _filled(report, rows, cells_of, Table(title, nothing=nothing, about=about, anchor="dead-letters"))


def _waiting(report: Report) -> Table:
    ends = [name if name in ("overdue", "later") else f"within {name}" for name in _DUE]

    def cells_of(row: WaitingMessages) -> dict[str, Cell]:
        what = ", ".join(f"{number(amount)} {end}" for amount, end in zip(row.due, ends, strict=False) if amount)
        return {
            "kind": _first(KINDS[row.kind][row.messages != 1]),
            "topic": Cell(row.topic),
            "group": Cell(row.group or ""),
            "due within": _plot(columns(row.due, f"Due: {what}", frozenset((0,))) if row.due else ""),
            "messages": count(row.messages),
            "due": _n(span(row.first_due_ms, row.last_due_ms) if row.due else "never"),
            "checks": _n(number(row.most_checks) if row.most_checks else ""),
        }

    about = (
        "Half messages were neither committed nor rolled back: the broker asks their producers until it gives up. "
        "Delayed messages, timers and retries wait for their time. In a store that is not in use, overdue ones wait "
        "for a broker."
    )
    nothing = "Nothing is pending: no half message, delayed message, timer or retry."
    table = Table("Pending", nothing=nothing, about=about, anchor="pending", axes={"due within": _DUE_AXIS})
    return _filled(report, _rows(report, "waiting"), cells_of, table)


def _delays(report: Report) -> Table:
    def cells_of(row: TopicTraffic) -> dict[str, Cell]:
        what = f"{row.topic}, messages by delay up to {_counts(_DELAYS, row.delays)}"
        return {
            "topic": _first(row.topic),
            "delay, up to": _plot(columns(row.delays, what, frozenset((0,)))),
            "half within": _n(_most_within(row, 0.5)),
            "99 % within": _n(_most_within(row, 0.99)),
            "longest": _n(duration(row.longest_delay_ms / 1000)),
        }

    about = (
        "Time from the send on the producer’s clock to the storing on the broker’s. Below 0 the clocks disagree. "
        "Delayed messages and transactions count from their send."
    )
    nothing, axes = "No message of a producer is stored here.", {"delay, up to": _DELAY_AXIS}
    table = Table("From born to stored", nothing=nothing, about=about, anchor="delays", axes=axes)
    return _filled(report, [row for row in _rows(report, "traffic") if row[1].delays], cells_of, table)


def _most_within(row: TopicTraffic, share: float) -> str:
    """Return the bound that covers this share of the delays."""
    total, below = sum(row.delays), 0
    for bound_ms, amount in zip(DELAY_BOUNDS_MS, row.delays, strict=False):
        below += amount
        if below >= share * total:
            return duration(min(bound_ms, max(0, row.longest_delay_ms)) / 1000)
    return duration(row.longest_delay_ms / 1000)


# ---- skew


def _unevenness(row: TopicTraffic) -> float:
    """Return the size of the largest queue as a multiple of the mean of the others."""
    largest, others = max(row.queue_messages), len(row.queue_ids) - 1
    left = row.messages - largest
    return largest * others / left if left else math.inf if others else 0


def _uneven(report: Report) -> Table:
    rows = [row for row in _rows(report, "traffic", lambda row: -_unevenness(row)) if is_user_topic(row[1].topic)]

    def cells_of(row: TopicTraffic) -> dict[str, Cell]:
        largest, ratio = max(row.queue_messages), _unevenness(row)
        return {
            "topic": _first(row.topic),
            "messages by queue": _plot(cells(row.queue_messages, f"{row.topic}: messages by queue")),
            "largest queue": _n(str(row.queue_ids[row.queue_messages.index(largest)])),
            "messages": count(largest),
            "of the topic": _n(percent(largest / row.messages)),
            "of the mean of the others": _n("all" if ratio == math.inf else f"{ratio:.3g} ×"),
        }

    about = (
        "Topics whose largest queue holds far more than the mean of the others. A queue has one consumer at a time, so "
        "it limits how fast the topic is consumed. A key that is sent often is the usual cause."
    )
    nothing = "All queues of a topic hold about the same."
    table = Table("Uneven queues", nothing=nothing, about=about, anchor="queues", has_shades=True)
    return _filled(report, [row for row in rows if _unevenness(row[1]) > _UNEVEN], cells_of, table)


def _estimate(value: float, sampled: bool) -> Cell:
    return _n(f"about {number(value)}" if sampled else number(value))


def _keys(report: Report) -> Table:
    rows = _rows(report, "keys", lambda row: -row.messages)
    sampled = any(row.sampled for name in ("keys", "repeated") for _, row in _rows(report, name))
    scale = Scale.for_values([row.messages for _, row in rows])

    def cells_of(row: FrequentKey) -> dict[str, Cell]:
        what = f"{short(row.key)} in {row.topic}: {number(row.messages)} messages"
        return {
            "key": _first(short(row.key)),
            "topic": Cell(row.topic),
            "": _plot(bar(row.messages, scale, what)),
            "messages": _estimate(row.messages, row.sampled),
            "of the topic’s keys": _n(percent(row.share)),
        }

    cut = sorted({row.topic for _, row in rows if row.cut})
    about = f"Business keys with the most messages.{_scale(scale)}" + (
        f" Further keys of {', '.join(map(short, cut[:3]))}{', …' * (len(cut) > 3)} are left out." if cut else ""
    )
    nothing = "No key occurs twice."
    if sampled:
        about += " The store is large, so a sample of the messages was counted, and these are estimates."
        nothing = "Among the sampled messages, no key occurs twice; most were not looked at."
    return _filled(report, rows, cells_of, Table("Frequent keys", nothing=nothing, about=about, anchor="keys"))


def _repeated(report: Report) -> Table:
    rows = _rows(report, "repeated", lambda row: -row.messages)

    def cells_of(row: RepeatedKeys) -> dict[str, Cell]:
        none = _n("none in the sample" if row.sampled else "0")
        amounts = {"messages": row.messages, "sent again": row.resent, "keys": row.keys}
        return {
            "topic": _first(row.topic),
            **{name: _estimate(amount, row.sampled) if row.messages else none for name, amount in amounts.items()},
            "shortest distance": _n("" if row.shortest_s is None else duration(row.shortest_s)),
        }

    about = (
        f"Messages whose key another message of the topic had in the {duration(report.window_s)} before. One key may "
        "belong to several messages; where it must not, this is what a consumer has to recognise. Those sent again "
        "have the same unique id too: a client or broker repeated them."
    )
    if any(row.sampled for _, row in rows):
        about += (
            " The store is large, so a sample of the keys was looked at, and these are estimates. A key outside of the "
            "sample is not counted, however often it came: see also the frequent keys."
        )
    nothing = "No key came twice within the window."
    return _filled(report, rows, cells_of, Table("Repeated keys", nothing=nothing, about=about, anchor="repeated"))


# ---- the store


def _retention(report: Report) -> Table:
    rows: list[tuple[str, tuple[int, list[LogFileUse]]]] = []
    for part in report.stores:
        for hours in _HOURS if part.now_ms is not None else ():
            limit = (part.now_ms or 0) - hours * 3_600_000
            deleted = [file for file in part.log_files[:-1] if file.last_ms is not None and file.last_ms <= limit]
            if deleted or hours == _HOURS[-1]:
                rows.append((part.store, (hours, deleted)))

    def cells_of(row: tuple[int, list[LogFileUse]]) -> dict[str, Cell]:
        return {
            "hours kept": _first(f"{row[0]} h"),
            "files deleted": count(len(row[1])),
            "freed": _n(size(sum(file.bytes for file in row[1]))),
            "messages": count(sum(file.messages for file in row[1])),
            "of these unread": count(sum(file.unread for file in row[1])),
        }

    every = [file for _, file in _rows(report, "log_files")]
    oldest = min((row.first_ms for _, row in _rows(report, "traffic")), default=None)
    about = (
        f"The log has {size(sum(file.bytes for file in every))} in {counted(len(every), 'file')}; the oldest message "
        f"is of {moment(oldest)}. This is what a retention of so many hours would delete, in whole files, and how much "
        "of it some group has not consumed."
    )
    table = Table("Retention", nothing="The log is empty.", about=about, anchor="retention")
    return _filled(report, rows, cells_of, table, max_rows=60)


def _filters(report: Report) -> Table:
    def cells_of(row: FilterMatch) -> dict[str, Cell]:
        return {
            "group ← topic": _first(f"{row.group} ← {row.topic}"),
            "expression": Cell(row.expression),
            "messages": count(row.messages),
            "matched": count(row.matched),
            "not sent": _n(size(row.bytes - row.matched_bytes)),
        }

    about = (
        "SQL filters that groups have registered, how many of their topic’s messages they match, and what the broker "
        "does not have to send because of them."
    )
    table = Table("Filters", nothing="No group filters by SQL.", about=about, anchor="filters")
    return _filled(report, _rows(report, "filters", lambda row: row.matched_bytes - row.bytes), cells_of, table)


def _damage(report: Report) -> Table:
    def cells_of(row: Damage) -> dict[str, Cell]:
        return {"file": _first(row.file), "offset": count(row.offset), "kind": Cell(row.kind), "what": Cell(row.what)}

    is_checked = all(part.is_sound is not None for part in report.stores)
    about = (
        "What librmq verify finds wrong. Records that cannot be read are in none of the numbers. librmq recover "
        "repairs what a crash leaves; librmq salvage saves what can be read of the rest."
    )
    nothing = "verify finds no damage." if is_checked else "verify did not run on every store."
    table = Table("Damage", nothing=nothing, about=about, anchor="damage")
    return _filled(report, _rows(report, "damage"), cells_of, table)


def _stores(report: Report) -> Table:
    def cells_of(part: StoreReport) -> list[Cell]:
        verdict = "recoverable" if part.is_sound and part.recoverable else _VERDICTS[part.is_sound]
        return [
            _first(part.store),
            Cell(part.path),
            Cell(part.owner or "not in use"),
            Cell(verdict),
            _n(number(part.records) + " without the unreadable" * part.skipped),
            _n(size(part.bytes)),
            _n(moment(min((row.first_ms for row in part.traffic), default=None))),
            _n(moment(max((row.last_ms for row in part.traffic), default=None))),
            _n(moment(part.now_ms)),
        ]

    names = ("store", "folder", "written by", "verify", "records", "size", "first stored", "last stored", "now")
    about = (
        "Ages count from “now”: of a store in use the time of the report, else of its last message. All times are UTC."
    )
    return Table("Stores", names, list(map(cells_of, report.stores)), about=about, anchor="stores")
