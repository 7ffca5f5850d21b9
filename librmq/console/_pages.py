"""The content of each page, as text and tables; every number is the one that the command of the same name prints.

What could read all of a large store is bounded: the page says where it stopped, and offers the command that goes on.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import islice
from typing import Any, Final

from librmq.console._group_parts import Members, causes, queues_of_group, work_table
from librmq.console._place import Look, Place, newest_letters, waiting_by_requests
from librmq.console._search import Sample, Samples, history_of, stored_per_s
from librmq.console._tables import (
    KINDS,
    Cell,
    Fact,
    Findings,
    Page,
    Query,
    Table,
    count,
    group_link,
    line,
    link,
    notices,
    topic_link,
)
from librmq.diagnosis import (
    ClusterView,
    Finding,
    Lag,
    StoreView,
    View,
    diagnose,
    held_progress,
    pending_messages,
)
from librmq.diagnosis import lag as lag_of
from librmq.diagnosis.deadletters import sum_up_causes
from librmq.diagnosis.disk_use import DiskUse
from librmq.diagnosis.view import count_dead_letters, topic_summaries
from librmq.errors import ConfigError
from librmq.formatting import UNKNOWN, duration, moment, number, rate, sent_again, size
from librmq.message.topics import is_own_group
from librmq.runtime.event_log import counted

ROWS: Final = 100
"""Rows of a table of topics, groups or queues."""
_FEW: Final = 20_000
"""Messages of a store in which the overview looks by itself for findings and for what waits."""
_FEW_QUEUES: Final = 512
_FINDINGS_MS: Final = 30_000
"""For so long an overview shows the findings that it has, because it is asked every few seconds."""
_NOT_COMPARED: Final = "Queues and index were not compared with the log: librmq verify does that."
_NOTHING: Final = f"Nothing needs attention. {_NOT_COMPARED}"
_LAST_MINUTE: Final = "in the last minute"
_BY_LOOKS: Final = f"{_LAST_MINUTE}, while the overview was open"
_SECOND_LOOK: Final = "rates come with the second look at the overview"
_SINCE: Final = {"first": "since", "due": "due since", "oldest age": "the oldest for", "waits": "for", "held": "for"}
"""Evidence that says since when something is wrong, with the words for it."""
_BUTTONS: Final = {
    "dead-letters": "Fix the cause, then send them again from the list behind the name.",
    "progress-beyond-end": "Find out first whether the log lost its end. Then reset the group, behind the name.",
    "retries-without-progress": "Reset the group before it starts, behind the name.",
    "given-up-halves": "Look up the transactions in the producer's database, then decide each at Waiting.",
}
"""What is next where a button of the console does it."""
_PAGES: Final = {
    "filter-matches-nothing": "Compare the expression with the topic's messages, at Topics. librmq filter explains it.",
}
"""What is next where a page shows it."""
_BY_COMMAND: Final = "Where a next step names a command, no page does that."
_PAIRS: Final = 5_000
"""Groups and topics of which progress is added up."""


# ---- overview, topics


class Pages:
    """The pages about one place. Thread-safe."""

    def __init__(self, place: Place, *, bodies: bool, allow_changes: bool) -> None:
        self.place = place
        self.look = Look(place, bodies, allow_changes and place.route is not None)
        self._samples = Samples()
        self._latest_findings: tuple[int, list[Finding]] | None = None
        """When the overview last looked for findings, and those."""

    @cached_property
    def saved(self) -> Pages | None:
        """The pages of the folder alone, for when its broker does not answer; None without a folder."""
        if self.place.route is None or self.place.folder is None:
            return None
        return Pages(Place(self.place.folder), bodies=self.look.bodies, allow_changes=False)

    def overview(self, query: Query) -> Page:
        """Show what flows, what waits, and what needs attention."""
        now_ms, is_past, samples = query.clock.now_ms(), query.at_ms is not None, self._samples_at(query)
        with self.place.view(query.at_ms) as view, self.place.beside(view, asks_owner=True) as beside:
            log = beside if isinstance(beside, StoreView) else None
            groups = [group for group in view.groups if not is_own_group(group)]
            visible = groups[:ROWS] if not isinstance(view, StoreView) else groups
            progress = lag_of(view, group=visible, times=False)
            ranges = {topic: view.queues(topic).values() for topic in view.listed_topics}
            ends = {topic: sum(ids.stop for ids in queues) for topic, queues in ranges.items()}
            lags = {group.group: group.lag for group in progress.by_group()}
            samples.add(_sample(now_ms, ends, progress, {group: lags.get(group, 0) for group in visible}))
            letters = {group: count_dead_letters(view, group) for group in visible}
            messages = sum(len(ids) for queues in ranges.values() for ids in queues)
            disk = [] if is_past or log is None else self._disk(log)
            findings = self._findings(log, now_ms, messages, sum(map(len, ranges.values())), is_past)
            waiting = self._waiting_fact(view, log, query)
            if log is not None and (is_past or not self.place.is_at_rest):
                stored, since = stored_per_s(log, query.clock), _LAST_MINUTE
            else:
                stored, since = None if log is None else {}, ""
        if stored is None:
            stored, since = samples.per_s(lambda look: look.ends), _BY_LOOKS
        consumed = samples.per_s(lambda look: look.positions)
        total, dead = sum(lags.values()), sum(of_group.unsent for of_group in letters.values())
        resent_counts = [of_group.resent for of_group in letters.values() if of_group.resent is not None]
        resent = sum(resent_counts) if len(resent_counts) == len(letters) else None
        scope = f"of {'' if len(visible) == len(groups) else f'the first {ROWS} of '}{counted(len(groups), 'group')}"
        verdict, mood = self._verdict(findings, lags, dead, query)
        worst = sorted(visible, key=lambda group: (-lags.get(group, -1), group))[:ROWS]
        busiest = sorted(ends, key=lambda topic: (-(stored or {}).get(topic, 0), -ends[topic], topic))
        notes = []
        if len(visible) < len(groups):
            notes.append(f"Of {number(len(groups))} groups the first {ROWS} were asked for.")
        if len(progress.topics) > _PAIRS:
            notes.append(f"What groups consume is unknown: more than {number(_PAIRS)} groups and topics have progress.")
        return Page(
            "Overview",
            [
                Fact("messages", number(messages), f"in {counted(len(ends), 'topic')}"),
                Fact("stored", *self._rate(stored, query, since)),
                Fact("consumed", *self._rate(consumed, query)),
                Fact("wait for a group", number(total), scope, "warn" if total else ""),
                waiting,
                Fact(
                    "dead letters",
                    number(dead),
                    "; ".join(filter(None, (scope, sent_again(resent)))),
                    "bad" if dead else "",
                ),
                *disk,
            ],
            [
                self._groups_table(samples, consumed, worst, lags, letters, len(groups)),
                self._busiest(stored, busiest[:10], ends),
            ],
            notes,
            findings,
            verdict,
            mood,
        )

    def _verdict(self, findings: Findings, lags: Mapping[str, int], dead: int, query: Query) -> tuple[str, str]:
        """Return in one sentence what is wrong, where and since when, and the mood of that."""
        counts = Counter[str]()
        for notice in findings.notices:
            counts[notice.severity] += len(notice.findings) + notice.more
        worst = next((notice for notice in findings.notices if notice.severity in ("error", "warning")), None)
        if worst is not None:
            subject, what, evidence, _ = worst.findings[0]
            since = next((f", {_SINCE[name]} {value}" for name, value in evidence if name in _SINCE), "")
            since = "" if since.rpartition(" for ")[2] in what else since
            group = _names_in(subject.text).get("group", "")
            since = since or (self._oldest(group, query) if lags.get(group) else "")
            amounts = " and ".join(counted(counts[name], name) for name in ("error", "warning") if counts[name])
            text = f"{amounts}. Look first at {subject.text}: {what.partition(';')[0].rstrip('.')}{since}."
            return text, "bad" if counts["error"] else "warn"
        group = max(lags, key=lambda name: lags[name], default="")
        if not lags.get(group):
            return (f"{counted(dead, 'dead letter')} wait for a decision.", "warn") if dead else ("", "good")
        return f"{counted(lags[group], 'message')} wait for group {group}{self._oldest(group, query)}.", "warn"

    def _oldest(self, group: str, query: Query) -> str:
        """Return since when the oldest message waits for a group, as the end of a sentence."""
        with self.place.view(query.at_ms) as view:
            rows = lag_of(view, group=group, includes_own=False).by_group()
        times = [row.oldest_timestamp_ms for row in rows if row.oldest_timestamp_ms is not None]
        return f", the oldest since {moment(min(times))}" if times else ""

    def _waiting_fact(self, view: View[Any], log: StoreView | None, query: Query) -> Fact:
        """Return how many messages wait for their time, a decision or an acknowledgement, as the page Waiting does."""
        if log is None:
            waiting = [pending for pending, _ in waiting_by_requests(view, query.clock.now_ms(), ROWS)]
            limit = "not asked for: halves, the relay, what POP holds"
        elif _is_large(log.message_count(), len(log.ranges)):
            return Fact("waiting", UNKNOWN, "this store is large: the page Waiting lists them")
        else:
            waiting, limit = list(pending_messages(log.store, log.tables)), ""
        kinds = Counter(message.kind for message in waiting)
        parts = [f"{number(amount)} {KINDS[kind][amount != 1]}" for kind, amount in sorted(kinds.items())]
        amount = number(len(waiting))
        if limit:
            amount = f"at least {amount}" if waiting else UNKNOWN
        return Fact("waiting", amount, "; ".join(filter(None, (", ".join(parts), limit))))

    def _samples_at(self, query: Query) -> Samples:
        """Return the last looks, of which a past moment has none."""
        return self._samples if query.at_ms is None else Samples()

    def _rate(self, rates: Mapping[str, float] | None, query: Query, since: str = _BY_LOOKS) -> tuple[str, str]:
        """Return the sum of rates with what they are of, or with why there are none yet."""
        if query.at_ms is None and self.place.is_at_rest:
            return rate(0), "no process has the store open"
        if rates is not None:
            return rate(sum(rates.values())), since
        return UNKNOWN, "a past moment has no rates" if query.at_ms is not None else _SECOND_LOOK

    def _groups_table(
        self,
        samples: Samples,
        consumed: Mapping[str, float] | None,
        groups: Sequence[str],
        lags: Mapping[str, int],
        letters: Mapping[str, tuple[int, int | None]],
        every: int,
    ) -> Table:
        rows = []
        for group in groups:
            points, (dead, resent) = line(samples.lags(group), "lag over time"), letters[group]
            rows.append(
                [
                    group_link(group),
                    count(lags.get(group), "warn"),
                    Cell(points, "", "plot"),
                    Cell(rate((consumed or {}).get(group)), is_number=True),
                    count(dead, "bad"),
                    count(resent),
                ]
            )
        note = f"The {len(groups)} with the most of {number(every)} groups." if len(groups) < every else ""
        columns = ("group", "lag", "since this page was opened", "consumed", "dead letters", "sent again")
        return Table("Groups", columns, rows, note, "No group yet.")

    def _busiest(self, stored: Mapping[str, float] | None, topics: Sequence[str], ends: Mapping[str, int]) -> Table:
        rates = [rate(None if stored is None else stored.get(topic, 0)) for topic in topics]
        rows = [
            [topic_link(topic), count(ends[topic]), Cell(of_topic, is_number=True)]
            for topic, of_topic in zip(topics, rates, strict=True)
        ]
        return Table("Busiest topics", ("topic", "messages so far", "stored"), rows, "", "No topic yet.")

    def _disk(self, log: StoreView) -> list[Fact]:
        folder = self.place.folder if self.place.broker is None else self.place.broker.store.path
        if folder is None or not os.path.isdir(folder):  # the files of a kit are in memory
            return []
        use = DiskUse.of(folder, log.store.config)
        nearest = next((limit for limit in use.thresholds if limit.ratio > use.used_ratio), None)
        note = "" if nearest is None else f"{size(nearest.free_bytes)} until {nearest.ratio:.0%} of the disk are used"
        return [Fact("on disk", size(use.allocated_bytes), note, "bad" if nearest is None else "")]

    def _findings(self, log: StoreView | None, now_ms: int, messages: int, queues: int, is_past: bool) -> Findings:
        """Return the findings of a small store; of a large one the page that looks for them is named."""
        if log is None:
            return Findings([], nothing="The page Findings asks the brokers for them.")
        if _is_large(messages, queues):
            return Findings([], nothing="This store is large: the page Findings looks for them on request.")
        latest = None if is_past else self._latest_findings
        if latest is None or not 0 <= now_ms - latest[0] < _FINDINGS_MS:
            latest = now_ms, self._diagnosed(log)
            self._latest_findings = self._latest_findings if is_past else latest
        return self._shown(latest[1], f"As of {moment(latest[0])}." if latest[0] < now_ms else "")

    def _diagnosed(self, log: StoreView | None = None, at_ms: int | None = None) -> list[Finding]:
        with self.place.live(at_ms, ROWS) if log is None else nullcontext(log) as view:
            return [finding for finding in diagnose(view, check=False) if finding.kind != "not-verified"]

    def findings(self, query: Query) -> Page:
        """Show all findings of `librmq diagnose`; in a large store they are looked for on request."""
        note = ""
        if self.place.has_log:
            if not query.text("look"):
                with self.place.log(query.at_ms) as view:
                    messages, queues = view.message_count(), len(view.ranges)
                if _is_large(messages, queues):
                    return Page(
                        "Findings",
                        template="ask.html.j2",
                        is_live=False,
                        more={"messages": number(messages), "queues": number(queues)},
                    )
            note = _NOT_COMPARED
        findings = self._diagnosed(at_ms=query.at_ms)
        amounts = Counter[str](finding.severity for finding in findings)
        return Page(
            "Findings",
            [Fact(f"{name}s", number(amounts[name])) for name in ("error", "warning")],
            findings=self._shown(findings, note),
            is_live=False,
        )

    def _shown(self, findings: Iterable[Finding], note: str) -> Findings:
        """Return findings with links; where a page or a button does what is next, that is said instead of a command."""
        rows, steps = [], _PAGES | (_BUTTONS if self.look.allow_changes else {})
        for finding in findings:
            subject = _subject(finding.subject)
            if finding.kind == "dead-letters" and subject.link:
                cause = finding.evidence.get("cause") if finding.evidence.get("causes", 1) == 1 else None
                address = link("letters", group=_names_in(finding.subject)["group"], cause=cause)
                subject = subject._replace(link=address)
            step = steps.get(finding.kind, finding.next_step) if subject.link else finding.next_step
            note = f"{note} {_BY_COMMAND}".strip() if "librmq " in step and _BY_COMMAND not in note else note
            rows.append((finding._replace(next_step=step), subject, finding.what))
        return Findings(notices(rows, ROWS), note, _NOTHING)

    def topics(self, query: Query) -> Page:
        """Show all topics, a part at a time."""
        words, begin = query.text("q").lower(), query.number("from", largest=1 << 40)
        with self.place.view(query.at_ms) as view:
            names = [topic for topic in view.listed_topics if words in topic.lower()]
            page_topics = names[begin : begin + ROWS]
            rows = [
                [
                    topic_link(summary.topic),
                    Cell(summary.kind),
                    count(summary.queues),
                    count(summary.messages),
                    *(
                        Cell(moment(time_ms) if summary.messages else "")
                        for time_ms in (summary.min_timestamp_ms, summary.max_timestamp_ms)
                    ),
                ]
                for summary in topic_summaries(view, page_topics)
            ]
        columns = ("topic", "kind", "queues", "messages", "oldest", "newest")
        return _list_page("topic", columns, rows, len(names), begin, query.text("q"))

    # ---- groups

    def groups(self, query: Query) -> Page:
        """Show all groups, a part at a time."""
        words, begin = query.text("q").lower(), query.number("from", largest=1 << 40)
        with self.place.view(query.at_ms) as view:
            names = [group for group in view.groups if words in group.lower() and not is_own_group(group)]
            page_groups = names[begin : begin + ROWS]
            progress = {row.group: row for row in lag_of(view, group=page_groups, includes_own=False).by_group()}
            letters = {group: count_dead_letters(view, group) for group in page_groups}
            now_ms = view.now_ms if isinstance(view, StoreView) else query.clock.now_ms()
        rows = []
        for group in page_groups:
            row = progress.get(group)
            oldest = None if row is None or now_ms is None else row.oldest_timestamp_ms
            waits_s = None if oldest is None or now_ms is None else max(now_ms - oldest, 0) / 1000
            rows.append(
                [
                    group_link(group),
                    count(None if row is None else row.topics),
                    count(None if row is None else row.lag, "warn"),
                    count(None if row is None else row.again),
                    Cell(duration(waits_s) if row is not None and row.lag else "", order=waits_s or 0),
                    count(letters[group].unsent, "bad"),
                    count(letters[group].resent),
                ]
            )
        columns = ("group", "topics", "lag", "of it retries", "oldest waits for", "dead letters", "sent again")
        return _list_page("group", columns, rows, len(names), begin, query.text("q"))

    def group(self, query: Query) -> Page:
        """Show a group: its lag by queue, its instances, what holds it back, its dead letters."""
        group, is_past = query.required("name"), query.at_ms is not None
        with self.place.view(query.at_ms) as view, self.place.beside(view, asks_owner=True) as beside:
            if group not in view.groups and is_own_group(group):
                return Page(group, tables=[Table("Own group of the broker", ("see",), [[Cell("Waiting", "waiting")]])])
            if group not in view.groups:
                raise ConfigError(f"there is no group {group!r}")
            progress = lag_of(view, group=group, includes_own=False)
            rows = list(islice(progress.by_broker(), 10 * ROWS))
            letters = [letter for _, letter in newest_letters(view, group)]
            dead = count_dead_letters(view, group)
            topics = sorted({row.topic for _, row in rows})
            by_queue = {(row.topic, row.queue_id): row for _, row in rows}
            queues = {name: range(row.min_offset, row.max_offset) for name, row in by_queue.items()}
            behind = {name: row.next_offset for name, row in by_queue.items()}
            history = history_of(beside, queues, query.clock, behind).tables
            live = beside if isinstance(beside, StoreView | ClusterView) and not is_past else None
            live = None if live is None or live.route is None else live
            work = None if live is None else work_table(live, (group,))
            held = held_progress(live, group=group) if isinstance(live, StoreView) else None
            row = view.tables.groups.rows.get(group) if isinstance(view, StoreView) else None
            is_at_rest = isinstance(view, StoreView) and view.owner is None
        consumed = self._samples_at(query).per_s(lambda look: look.positions) or {}
        rates = {group: consumed[group]} if group in consumed else None
        members = Members() if is_past else Members.of(self.place.route, live, group, row, is_at_rest=is_at_rest)
        lag = sum(row.lag for _, row in rows)
        member_tables = [] if is_past else [members.table(rows), members.settings_table()]
        return Page(
            group,
            [
                Fact("lag", number(lag), f"in {counted(len(topics), 'topic')}", "warn" if lag else ""),
                Fact("dead letters", number(dead.unsent), sent_again(dead.resent)),
                Fact("consumed", *self._rate(rates, query)),
                Fact("retries", number(members.retries), members.retries_note),
            ],
            [
                *history,
                queues_of_group(rows, held, members),
                *([work] if work is not None and work.rows else []),
                *member_tables,
                causes(sum_up_causes(letters), dead.every, is_noted=dead.resent is not None),
            ],
            template="group.html.j2",
            more={"group": group, "topics": topics, "retries": members.retries, "has_letters": bool(letters)},
        )


def _sample(now_ms: int, ends: Mapping[str, int], progress: Lag, lags: Mapping[str, int]) -> Sample:
    if len(progress.topics) > _PAIRS:
        return Sample(now_ms, dict(ends), lags, None)
    positions: Counter[str] = Counter()
    for part in progress.topics:
        positions[part.group] += sum(offset or 0 for offset in part.consumer_offsets)
    return Sample(now_ms, dict(ends), lags, dict(positions))


def _is_large(messages: int, queues: int) -> bool:
    return messages > _FEW or queues > _FEW_QUEUES


def _names_in(subject: str) -> dict[str, str]:
    """Return the names in the subject of a finding, such as that of its ``group``."""
    return dict(part.partition(" ")[::2] for part in subject.split(", "))


def _subject(subject: str) -> Cell:
    """Return what a finding is about, with a link to the group that it names, else to the topic."""
    names = _names_in(subject)
    for kind, cell in (("group", group_link), ("topic", topic_link)):
        if kind in names:
            return cell(names[kind])._replace(text=subject)
    return Cell(subject)


def _list_page(
    what: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], every: int, begin: int, words: str
) -> Page:
    """Return the page of a part of all topics or groups, which a form selects by words of their names."""
    title, nothing = f"{what.capitalize()}s", f"No {what} has this name." if words else f"No {what} yet."
    return Page(
        title,
        tables=[Table(title, columns, rows, nothing=nothing)],
        template="topics.html.j2",
        more={"q": words, "paging": _paging(f"{what}s", every, begin, q=words)},
    )


def _paging(page: str, every: int, begin: int, **parameters: str) -> Mapping[str, str]:
    """Return where this part of a list is, and the addresses of its neighbours."""
    before = link(page, **{"from": max(begin - ROWS, 0)}, **parameters) if begin else ""
    after = link(page, **{"from": begin + ROWS}, **parameters) if begin + ROWS < every else ""
    where = f"{number(min(begin + 1, every))} – {number(min(begin + ROWS, every))} of {number(every)}"
    return {"where": where if every > ROWS else "", "before": before, "after": after}
