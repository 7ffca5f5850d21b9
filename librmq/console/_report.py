"""The page of a report: what its rows say in words, plots and tables, in one file that needs no console."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from typing import Any, Final, TypeAlias

from librmq.console._plots import Scale, area, bar, cells, columns
from librmq.console._tables import Axis, Cell, Fact, Findings, Notice, Page, Table, count, notices, render
from librmq.diagnosis import Comparison, Finding, GroupRate, Report, TopicLag, TopicProgress, compare
from librmq.diagnosis.report_rows import DELAY_BOUNDS_MS, LagChange, StoreReport, TopicTraffic
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
_KINDS: Final = {
    "half": "half message",
    "given_up": "half given up",
    "delay": "delayed",
    "timer": "timer",
    "retry": "retry",
    "pop": "received, in flight",
}
_Row: TypeAlias = tuple[str, Sequence[Cell]]
"""The name of a store, and what the page says about it."""


def render_page(report: Report, earlier: Report | None = None) -> str:
    """Return the page of a report. With an earlier report, it also says what has changed.

    Raises:
        MissingExtraError: The extra ``report`` is not installed.
    """
    comparison = None if earlier is None else compare(earlier, report)
    every = list(_tables(report, comparison))
    page = Page(
        report.title,
        _facts(report),
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


def _facts(report: Report) -> list[Fact]:
    lags = [(part, row) for part in report.stores for row in part.lags().by_topic()]
    lag = sum(row.lag for _, row in lags)
    oldest = max((age for part, row in lags if (age := _age_s(part, row)) is not None), default=None)
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


def _age_s(part: StoreReport, row: TopicLag) -> float | None:
    if row.oldest_timestamp_ms is None or part.now_ms is None:
        return None
    return max(0, part.now_ms - row.oldest_timestamp_ms) / 1000


# ---- tables


def _tables(report: Report, comparison: Comparison | None) -> Iterator[Table]:
    """Yield the tables of the page in their order; those without rows say why at its end."""
    if comparison is not None:
        yield from _changes(report, comparison)
    yield from _lag(report, comparison)
    yield _topics(report)
    yield _retries(report)
    yield _dead_letters(report)
    yield _waiting(report)
    yield _delays(report)
    yield _uneven(report)
    yield _keys(report)
    yield _repeated(report)
    yield _retention(report)
    yield _filters(report)
    yield _damage(report)
    yield _stores(report)


def _filled(report: Report, rows: Iterable[_Row], table: Table, most: int = MOST) -> Table:
    """Return a table with rows, which begin with their store; empty columns are left out, and so is a single store."""
    several, all_rows = len(report.stores) > 1, list(rows)
    shown = [[*([Cell(store, "", "store")] if several else []), *row] for store, row in all_rows[:most]]
    names = [*(["store"] if several else []), *table.columns]
    places = [at for at in range(len(names)) if any(row[at].text for row in shown)]
    hidden = len(all_rows) - len(shown)
    note = f"{hidden:,} more {'rows are' if hidden > 1 else 'row is'} in the JSON beside this page." if hidden else ""
    rows_of_cells = [[row[at] for at in places] for row in shown]
    return table._replace(columns=[names[at] for at in places], rows=rows_of_cells, note=note)


def _rows(report: Report, name: str) -> list[tuple[str, Any]]:
    """Return the rows of a kind, each with its store."""
    return [(part.store, row) for part in report.stores for row in getattr(part, name)]


def _n(text: str) -> Cell:
    return Cell(text, is_number=True)


def _plot(text: str) -> Cell:
    return Cell(text, "", "plot")


def _first(text: str) -> Cell:
    return Cell(text, "", "first")


def _scale(scale: Scale) -> str:
    return " Bars are on a logarithmic scale: each line of the grid is ten times the one before." * scale.is_log


def _changes(report: Report, comparison: Comparison) -> Iterator[Table]:
    since = min((part.now_ms for part in comparison.earlier.stores if part.now_ms is not None), default=None)
    new = counted(len(comparison.added), "new finding")
    about = (
        f"Since the report of {moment(since)}: {new}, {len(comparison.removed)} gone, {len(comparison.changed)} "
        "changed. Rates are between the two reports."
    )

    def cells_of(row: LagChange) -> list[Cell]:
        change = "new" if row.before is None else "gone" if row.lag is None else f"{row.lag - row.before:+,}"
        stored, consumed = (None, None) if row.rate is None else (row.rate.stored_per_s, row.rate.consumed_per_s)
        drain = "–" if row.lag is None else _drain(row.rate)
        return [
            _first(f"{row.group} ← {row.topic}"), count(row.before), count(row.lag), _n(change), _n(rate(stored)),
            _n(rate(consumed)), _n(drain),
        ]  # fmt: skip

    names = ("group ← topic", "before", "now", "change", "stored", "consumed", "drains in")
    rows = [(row.store, cells_of(row)) for row in comparison.lags if row.before != row.lag]
    yield _filled(report, rows, Table("Changes", names, (), nothing=about, about=about, anchor="changes"))
    gone = [(store, [Cell(finding.what), Cell(finding.subject)]) for store, finding in comparison.removed]
    yield _filled(
        report,
        gone,
        Table("Findings that are gone", ("no longer found", "about"), (), nothing="", about="", anchor="gone"),
    )


def _lag(report: Report, comparison: Comparison | None) -> Iterator[Table]:
    every = [
        (part, queues, row)
        for part in report.stores
        for lags in (part.lags(),)
        for queues, row in zip(lags.topics, lags.by_topic(), strict=True)
    ]
    every.sort(key=lambda item: (-item[2].lag, item[0].store, *item[2][:2]))
    waiting = [item for item in every if item[2].lag]
    scale = Scale.for_values([row.lag for *_, row in waiting])
    rates = {} if comparison is None else {row[:3]: row.rate for row in comparison.lags}
    late = sum(bool(lag) for _, queues, _ in waiting for lag in queues.lags)
    about = (
        f"{number(sum(row.lag for *_, row in waiting))} messages wait in {number(late)} of "
        f"{number(sum(row.queues for *_, row in every))} queues. "
        "Squares are queues, in the order of their numbers. One dark square is a stuck or slow queue; when all are "
        f"dark, consumers are too few or too slow.{_scale(scale)}"
        + ("" if comparison else " How fast a group consumes is unknown: --compare with an earlier report tells.")
    )
    rows = (
        (
            part.store,
            [
                _first(f"{row.group} ← {row.topic}"), _plot(_lag_plot(queues, row, scale)), count(row.lag),
                _n(duration(_age_s(part, row))), _n(_drain(rates.get((part.store, row.group, row.topic)))),
                Cell(_notes(part, queues, row)),
            ],
        )
        for part, queues, row in waiting
    )  # fmt: skip
    names = ("group ← topic", "queues", "waiting", "oldest waits", "drains in", "")
    nothing = "No message waits for a group." if every else "No group has any progress here."
    yield _filled(report, rows, Table("Lag", names, (), nothing=nothing, about=about, anchor="lag", has_shades=True))
    if len(waiting) > MOST or any(len(queues.lags) > 60 for _, queues, _ in waiting):
        yield _by_decade([queues for _, queues, _ in waiting])


def _lag_plot(queues: TopicProgress, row: TopicLag, scale: Scale) -> str:
    worst = max(range(len(queues.lags)), key=queues.lags.__getitem__)
    what = (
        f"{row.group} on {row.topic}: {number(row.lag)} messages wait in {number(sum(map(bool, queues.lags)))} of "
        f"{number(row.queues)} queues; most in queue {queues.queue_ids[worst]}: {number(queues.lags[worst])}"
    )
    return bar(row.lag, scale, what) + cells(queues.lags, what)


def _notes(part: StoreReport, queues: TopicProgress, row: TopicLag) -> str:
    parts, most = [], row.most_in_one_queue
    if row.queues > 1 and most > row.lag / 2 and row.lag > 1:
        parts.append(f"{percent(most / row.lag)} in queue {queues.queue_ids[queues.lags.index(most)]}")
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
    what = "Queues by waiting messages: " + ", ".join(
        f"{label}: {number(value)}" for label, value in zip(labels, values, strict=True)
    )
    row = [Cell("all queues of these groups"), _plot(columns(values, what)), count(sum(values))]
    names = ("by waiting messages", "waiting", "queues")
    return Table("Queues by waiting messages", names, [row], anchor="decades", axes={"waiting": Axis(labels)})


def _topics(report: Report) -> Table:
    rows = sorted(_rows(report, "traffic"), key=lambda row: (-row[1].messages, row[0], row[1].topic))
    intervals = max((len(row.stored) for _, row in rows), default=0)
    times = [moment((report.begin_ms or 0) + report.interval_ms * intervals * half // 2) for half in range(3)]
    is_one_day = times[0][:10] == times[-1][:10]
    axis = Axis([text[11:] if is_one_day else text[5:16] for text in times], is_span=True)  # without their common part
    table_rows = (
        (
            store,
            [
                _first(row.topic), _plot(area(row.stored, _rate_text(row, report))),
                _n(rate(max(row.stored) / report.interval_ms * 1000)), count(row.messages), _n(size(row.bytes)),
                _n(size(row.bytes / row.messages)), _n(moment(row.last_ms)),
            ],
        )
        for store, row in rows
    )  # fmt: skip
    about = (
        f"When messages were stored, in intervals of {duration(report.interval_ms / 1000)}. Each row has its own "
        "scale, up to its peak. %RETRY% topics hold messages that a group gets again, %DLQ% those it gave up; "
        "SCHEDULE_TOPIC and RMQ_SYS are the broker’s own."
    )
    names = ("topic", "stored over time", "peak", "messages", "size", "mean", "last stored")
    axes = {"stored over time": axis}
    return _filled(
        report,
        table_rows,
        Table("Topics and rates", names, (), nothing="There are no messages.", about=about, anchor="rates", axes=axes),
    )


def _rate_text(row: TopicTraffic, report: Report) -> str:
    peak = row.stored.index(max(row.stored))
    at = moment((report.begin_ms or 0) + peak * report.interval_ms)
    return (
        f"{row.topic}: {number(row.messages)} messages from {moment(row.first_ms)} to {moment(row.last_ms)}; most at "
        f"{at}, {rate(row.stored[peak] / report.interval_ms * 1000)}"
    )


def _retries(report: Report) -> Table:
    rows = [
        (store, row.topic.removeprefix(TopicPrefix.RETRY), row.attempts)
        for store, row in _rows(report, "traffic")
        if row.attempts
    ]
    rows.sort(key=lambda row: (-sum(row[2]), row[:2]))
    levels = DEFAULT_LEVELS
    last_attempt = max((at for *_, attempts in rows for at, amount in enumerate(attempts, 1) if amount), default=0)
    delays = (levels.delay_ms(levels.cap(retry_level(times))) / 1000 for times in range(last_attempt))
    axis = Axis([duration(delay_s).replace(" min", "m").replace(" ", "") for delay_s in delays])

    def text(attempts: Sequence[int]) -> str:
        parts = (f"{number(amount)} at attempt {at}" for at, amount in enumerate(attempts, 1) if amount)
        return f"Retries: {', '.join(parts)}"

    table_rows = (
        (
            store,
            [
                _first(group), _plot(columns(attempts[:last_attempt], text(attempts))), count(sum(attempts)),
                count(max(at for at, amount in enumerate(attempts, 1) if amount)),
            ],
        )
        for store, group, attempts in rows
    )  # fmt: skip
    about = (
        "Messages that a group failed on and that were written again for it, by attempt. Below each attempt is the "
        "delay before it with the usual levels. Many at the left fail once; a flat row fails always."
    )
    names = ("group", "attempts", "retries", "highest attempt")
    nothing = "No message was written again for a group."
    return _filled(
        report,
        table_rows,
        Table("Retries", names, (), nothing=nothing, about=about, anchor="retries", axes={"attempts": axis}),
    )


def _dead_letters(report: Report) -> Table:
    rows = sorted(_rows(report, "dead_letters"), key=lambda row: (-row[1].messages, row[0], *row[1][:3]))
    scale = Scale.for_values([row.messages for _, row in rows])
    table_rows = (
        (
            store,
            [
                _first(f"{row.group} ← {row.original_topic}"), Cell(row.cause),
                _plot(bar(row.messages, scale, f"{number(row.messages)} dead letters of {row.group}: {row.cause}")),
                count(row.messages), count(row.resent), count(row.most_times),
                _n(span(row.first_timestamp_ms, row.last_timestamp_ms)),
            ],
        )
        for store, row in rows
    )  # fmt: skip
    about = f"Messages that a group gave up. No consumer gets them until they are sent again.{_scale(scale)}"
    names = ("group ← topic", "cause", "", "messages", "sent again", "attempts", "given up")
    title = "Dead letters by cause" if rows else "Dead letters"
    return _filled(
        report,
        table_rows,
        Table(title, names, (), nothing="There are no dead letters.", about=about, anchor="dead-letters"),
    )


def _waiting(report: Report) -> Table:
    def text(due: Sequence[int]) -> str:
        return "Due: " + ", ".join(
            f"{number(amount)} {'' if name in ('overdue', 'later') else 'within '}{name}"
            for name, amount in zip(_DUE, due, strict=True)
            if amount
        )

    overdue = frozenset((0,))
    rows = (
        (
            store,
            [
                _first(_KINDS.get(row.kind, row.kind)), Cell(row.topic), Cell(row.group or ""),
                _plot(columns(row.due, text(row.due), overdue) if row.due else ""), count(row.messages),
                _n(span(row.first_due_ms, row.last_due_ms) if row.due else "never"),
                _n(number(row.most_checks) if row.most_checks else ""),
            ],
        )
        for store, row in _rows(report, "waiting")
    )  # fmt: skip
    about = (
        "Half messages were neither committed nor rolled back: the broker asks their producers until it gives up. "
        "Delayed messages, timers and retries wait for their time. In a store that is not in use, overdue ones wait "
        "for a broker."
    )
    names = ("kind", "topic", "group", "due within", "messages", "due", "checks")
    nothing = "Nothing is pending: no half message, delayed message, timer or retry."
    return _filled(
        report,
        rows,
        Table("Pending", names, (), nothing=nothing, about=about, anchor="pending", axes={"due within": _DUE_AXIS}),
    )


def _delays(report: Report) -> Table:
    def text(topic: str, counts: Sequence[int]) -> str:
        parts = (f"{name}: {number(amount)}" for name, amount in zip(_DELAYS, counts, strict=True) if amount)
        return f"{topic}, messages by delay up to {', '.join(parts)}"

    behind = frozenset((0,))
    rows = (
        (
            store,
            [
                _first(row.topic), _plot(columns(row.delays, text(row.topic, row.delays), behind)),
                _n(_most_within(row, 0.5)), _n(_most_within(row, 0.99)), _n(duration(row.longest_delay_ms / 1000)),
            ],
        )
        for store, row in _rows(report, "traffic")
        if row.delays
    )  # fmt: skip
    about = (
        "Time from the send on the producer’s clock to the storing on the broker’s. Below 0 the clocks disagree. "
        "Delayed messages and transactions count from their send."
    )
    names = ("topic", "delay, up to", "half within", "99 % within", "longest")
    nothing = "No message of a producer is stored here."
    axes = {"delay, up to": _DELAY_AXIS}
    return _filled(
        report, rows, Table("From born to stored", names, (), nothing=nothing, about=about, anchor="delays", axes=axes)
    )


def _most_within(row: TopicTraffic, share: float) -> str:
    """Return the bound that covers this share of the delays."""
    total, below = sum(row.delays), 0
    for bound_ms, amount in zip(DELAY_BOUNDS_MS, row.delays, strict=False):
        below += amount
        if below >= share * total:
            return duration(min(bound_ms, max(0, row.longest_delay_ms)) / 1000)
    return duration(row.longest_delay_ms / 1000)


# ---- skew


def _uneven(report: Report) -> Table:
    rows: list[tuple[float, int, str, TopicTraffic]] = []
    for store, row in _rows(report, "traffic"):
        largest, others = max(row.queue_messages), len(row.queue_ids) - 1
        if is_user_topic(row.topic) and others > 0 and largest * others > _UNEVEN * (row.messages - largest):
            mean = (row.messages - largest) / others
            rows.append((largest / mean if mean else math.inf, largest, store, row))
    rows.sort(key=lambda item: (-item[0], item[2], item[3].topic))
    table_rows = (
        (
            store,
            [
                _first(row.topic), _plot(cells(row.queue_messages, f"{row.topic}: messages by queue")),
                _n(str(row.queue_ids[row.queue_messages.index(largest)])), count(largest),
                _n(percent(largest / row.messages)), _n("all" if ratio == math.inf else f"{ratio:.3g} ×"),
            ],
        )
        for ratio, largest, store, row in rows
    )  # fmt: skip
    about = (
        "Topics whose largest queue holds far more than the mean of the others. A queue has one consumer at a time, so "
        "it limits how fast the topic is consumed. A key that is sent often is the usual cause."
    )
    names = (
        "topic", "messages by queue", "largest queue", "messages", "of the topic", "of the mean of the others",
    )  # fmt: skip
    nothing = "All queues of a topic hold about the same."
    return _filled(
        report,
        table_rows,
        Table("Uneven queues", names, (), nothing=nothing, about=about, anchor="queues", has_shades=True),
    )


def _about_number(value: float, sampled: bool) -> Cell:
    return _n(f"about {number(value)}" if sampled else number(value))


def _keys(report: Report) -> Table:
    rows = sorted(_rows(report, "keys"), key=lambda row: (-row[1].messages, row[0], *row[1][:2]))
    sampled = any(row.sampled for name in ("keys", "repeated") for _, row in _rows(report, name))
    scale = Scale.for_values([row.messages for _, row in rows])
    table_rows = (
        (
            store,
            [
                _first(short(row.key)), Cell(row.topic),
                _plot(bar(row.messages, scale, f"{short(row.key)} in {row.topic}: {number(row.messages)} messages")),
                _about_number(row.messages, row.sampled), _n(percent(row.share)),
            ],
        )
        for store, row in rows
    )  # fmt: skip
    cut = sorted({row.topic for _, row in rows if row.cut})
    about = f"Business keys with the most messages.{_scale(scale)}" + (
        f" Further keys of {', '.join(map(short, cut[:3]))}{', …' * (len(cut) > 3)} are left out." if cut else ""
    )
    if sampled:
        about += " The store is large, so a sample of the messages was counted, and these are estimates."
    nothing = "Among the sampled messages, no key occurs twice; most were not looked at."
    names = ("key", "topic", "", "messages", "of the topic’s keys")
    return _filled(
        report,
        table_rows,
        Table(
            "Frequent keys",
            names,
            (),
            nothing=nothing if sampled else "No key occurs twice.",
            about=about,
            anchor="keys",
        ),
    )


def _repeated(report: Report) -> Table:
    rows = sorted(_rows(report, "repeated"), key=lambda row: (-row[1].messages, row[0], row[1].topic))
    table_rows = (
        (
            store,
            [
                _first(row.topic),
                *(
                    _about_number(amount, row.sampled)
                    if row.messages
                    else _n("none in the sample" if row.sampled else "0")
                    for amount in (row.messages, row.resent, row.keys)
                ),
                _n("" if row.shortest_s is None else duration(row.shortest_s)),
            ],
        )
        for store, row in rows
    )
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
    names = ("topic", "messages", "sent again", "keys", "shortest distance")
    return _filled(
        report,
        table_rows,
        Table(
            "Repeated keys", names, (), nothing="No key came twice within the window.", about=about, anchor="repeated"
        ),
    )


# ---- the store


def _retention(report: Report) -> Table:
    rows: list[_Row] = []
    for part in report.stores:
        for hours in _HOURS if part.now_ms is not None else ():
            limit = (part.now_ms or 0) - hours * 3_600_000
            deleted = [file for file in part.log_files[:-1] if file.last_ms is not None and file.last_ms <= limit]
            if deleted or hours == _HOURS[-1]:
                freed, messages, unread = (
                    sum(getattr(file, name) for file in deleted) for name in ("bytes", "messages", "unread")
                )
                row = [_n(size(freed)), count(messages), count(unread)]
                rows.append((part.store, [_first(f"{hours} h"), count(len(deleted)), *row]))
    files_of_log = [file for _, file in _rows(report, "log_files")]
    oldest = min((row.first_ms for _, row in _rows(report, "traffic")), default=None)
    about = (
        f"The log has {size(sum(file.bytes for file in files_of_log))} in {counted(len(files_of_log), 'file')}; the "
        f"oldest message is of {moment(oldest)}. This is what a retention of so many hours would delete, in whole "
        "files, and how much of it some group has not consumed."
    )
    names = ("hours kept", "files deleted", "freed", "messages", "of these unread")
    return _filled(
        report, rows, Table("Retention", names, (), nothing="The log is empty.", about=about, anchor="retention"), 60
    )


def _filters(report: Report) -> Table:
    rows = sorted(_rows(report, "filters"), key=lambda row: (row[1].matched_bytes - row[1].bytes, row[0], *row[1][:2]))
    table_rows = (
        (
            store,
            [
                _first(f"{row.group} ← {row.topic}"), Cell(row.expression), count(row.messages), count(row.matched),
                _n(size(row.bytes - row.matched_bytes)),
            ],
        )
        for store, row in rows
    )  # fmt: skip
    about = (
        "SQL filters that groups have registered, how many of their topic’s messages they match, and what the broker "
        "does not have to send because of them."
    )
    names = ("group ← topic", "expression", "messages", "matched", "not sent")
    return _filled(
        report,
        table_rows,
        Table("Filters", names, (), nothing="No group filters by SQL.", about=about, anchor="filters"),
    )


def _damage(report: Report) -> Table:
    is_checked = all(part.is_sound is not None for part in report.stores)
    about = (
        "What librmq verify finds wrong. Records that cannot be read are in none of the numbers. librmq recover "
        "repairs what a crash leaves; librmq salvage saves what can be read of the rest."
    )
    rows = (
        (store, [_first(row.file), count(row.offset), Cell(row.kind), Cell(row.what)])
        for store, row in _rows(report, "damage")
    )
    nothing = "verify finds no damage." if is_checked else "verify did not run on every store."
    return _filled(
        report,
        rows,
        Table("Damage", ("file", "offset", "kind", "what"), (), nothing=nothing, about=about, anchor="damage"),
    )


def _stores(report: Report) -> Table:
    rows = []
    for part in report.stores:
        times = [row.first_ms for row in part.traffic], [row.last_ms for row in part.traffic]
        verdict = "recoverable" if part.is_sound and part.recoverable else _VERDICTS[part.is_sound]
        rows.append(
            [
                _first(part.store), Cell(part.path), Cell(part.owner or "not in use"), Cell(verdict),
                _n(number(part.records) + " without the unreadable" * part.skipped), _n(size(part.bytes)),
                _n(moment(min(times[0], default=None))), _n(moment(max(times[1], default=None))),
                _n(moment(part.now_ms)),
            ]
        )  # fmt: skip
    names = (
        "store", "folder", "written by", "verify", "records", "size", "first stored", "last stored", "now",
    )  # fmt: skip
    about = (
        "Ages count from “now”: of a store in use the time of the report, else of its last message. All times are UTC."
    )
    return Table("Stores", names, rows, about=about, anchor="stores")
