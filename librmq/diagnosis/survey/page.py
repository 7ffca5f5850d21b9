"""Renders a report as one page of HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from typing import Final, Literal, NamedTuple

from librmq.diagnosis._findings import grouped
from librmq.diagnosis.survey.model import Comparison, Report, ReportedFinding, compare
from librmq.errors import MissingExtraError
from librmq.formatting import duration, moment, number, options_unbroken, sent_again, size, visible
from librmq.runtime.event_log import counted


class Fact(NamedTuple):
    """A number at the top of the page."""

    what: str
    value: str
    note: str = ""
    mood: Literal["", "bad", "good"] = ""


class Notice(NamedTuple):
    """The findings of one kind, the largest first."""

    severity: str
    title: str
    findings: Sequence[ReportedFinding]
    next_step: str
    """The single next step of all; empty if they have several."""
    more: int
    """Number of further findings that the page leaves out."""


_OF_A_KIND: Final = 5
_LONGEST_EVIDENCE: Final = 300


def require() -> None:
    """Check that a page can be rendered.

    Raises:
        MissingExtraError: The extra ``report`` is not installed.
    """
    if find_spec("jinja2") is None:
        raise MissingExtraError("a page", "report")


def render_page(report: Report, earlier: Report | None = None) -> str:
    """Return the page of a report. With an earlier report, it also says what has changed.

    Raises:
        MissingExtraError: The extra ``report`` is not installed.
    """
    require()
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    from librmq.diagnosis.survey._plots import WIDE  # plots need the extra
    from librmq.diagnosis.survey._sections import sections

    comparison = None if earlier is None else compare(earlier, report)
    every = list(sections(report, comparison))
    folder = files("librmq.diagnosis.survey")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["options"] = lambda text: Markup(options_unbroken(text))
    template = environment.from_string((folder / "page.html.j2").read_text("utf-8"))
    html = template.render(
        style=(folder / "page.css").read_text("utf-8"),
        title=report.title,
        wide=WIDE,
        about=_about(report),
        mood=_mood(report),
        verdict=_verdict(report, comparison),
        notices=_notices(report),
        subject_of=partial(_subject, report),
        what_of=partial(_what, comparison),
        evidence_of=_evidence,
        facts=_facts(report),
        sections=[section for section in every if section.tables],
        empty=[section for section in every if not section.tables],
    )
    return "\n".join(visible(line) for line in html.split("\n"))


def _about(report: Report) -> str:
    names = ", ".join(store.store for store in report.stores[:8]) + ", …" * (len(report.stores) > 8)
    latest = max((store.now_ms for store in report.stores if store.now_ms is not None), default=None)
    only = f" Only {', '.join(f'{name} {value}' for name, value in report.only.items())}." if report.only else ""
    return f"{names}, as of {moment(latest)} UTC.{only}"


def _mood(report: Report) -> str:
    severities = {finding.severity for finding in report.findings}
    return "bad" if "error" in severities else "warn" if "warning" in severities else "good"


def _verdict(report: Report, comparison: Comparison | None) -> str:
    counts = Counter(row.severity for row in report.findings)
    unknown = any(row.is_sound is None for row in report.stores)
    if not counts["error"] and not counts["warning"]:
        verdict = "Nothing needs attention."
        if unknown:
            verdict += " Whether the files are sound is unknown."
        elif any(row.recoverable for row in report.stores):
            verdict += " What a kill or a copy has left is recoverable: the next opening repairs it without a loss."
    else:
        counts_text = [counted(counts[name], name) for name in ("error", "warning") if counts[name]]
        worst = report.findings[0]
        what = worst.what.partition(";")[0].rstrip(".")
        verdict = f"{' and '.join(counts_text)}. Look first at {worst.subject}: {what}."
    if comparison is not None and (comparison.added or comparison.removed):
        verdict += f" Since the earlier report: {len(comparison.added)} new, {len(comparison.removed)} gone."
    return verdict


def _notices(report: Report) -> list[Notice]:
    """Return the findings by kind, worst first."""
    notices = []
    kinds = grouped(report.findings, lambda finding: (finding.severity, finding.kind))
    for (severity, kind), findings in kinds.items():
        first = findings[:_OF_A_KIND]
        steps = {finding.next_step for finding in first}
        title, step = kind.replace("-", " ").capitalize(), steps.pop() if len(steps) == 1 else ""
        notices.append(Notice(severity, title, first, step, len(findings) - len(first)))
    return notices


def _subject(report: Report, finding: ReportedFinding) -> str:
    is_named = len(report.stores) > 1 and finding.subject != f"store {finding.store}"
    return f"{finding.subject}, store {finding.store}" if is_named else finding.subject


def _what(comparison: Comparison | None, finding: ReportedFinding) -> str:
    if comparison is not None:
        before = next((old for old, now in comparison.changed if now is finding), None)
        if before is not None:
            return f"{finding.what} (Before: {before.what})"
        if any(now is finding for now in comparison.added):
            return f"New: {finding.what}"
    return finding.what


def _evidence(finding: ReportedFinding) -> list[tuple[str, str]]:
    pairs = []
    for name, value in finding.evidence.items():
        if name.endswith("_timestamp_ms") and isinstance(value, int):
            text = moment(value)
        elif name.endswith("_s") and isinstance(value, int | float):
            text = duration(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            text = number(value)
        else:
            text = "unknown" if value is None else str(value)
            if len(text) > _LONGEST_EVIDENCE:
                text = f"{text[:_LONGEST_EVIDENCE]}… (whole in the JSON beside this page)"
        label = name.removesuffix("_timestamp_ms").removesuffix("_s").replace("_", " ")
        pairs.append((label, text))
    return pairs


def _facts(report: Report) -> list[Fact]:
    lag = sum(row.lag for row in report.lags)
    oldest = max((row.oldest_age_s for row in report.lags if row.oldest_age_s is not None), default=None)
    dead, resent = (sum(getattr(row, name) for row in report.dead_letters) for name in ("messages", "resent"))
    waiting = sum(row.messages for row in report.waiting)
    topics = f"in {counted(len({row.topic for row in report.topics}), 'topic')}"
    first = min((row.first_ms for row in report.stores if row.first_ms is not None), default=None)
    last = max((row.last_ms for row in report.stores if row.last_ms is not None), default=None)
    span = "" if first is None or last is None else f"over {duration((last - first) / 1000)}"
    unsound = [row for row in report.stores if row.is_sound is False]
    unknown = [row for row in report.stores if row.is_sound is None]
    recoverable = sum(row.recoverable for row in report.stores)
    verdict = "damaged" if unsound else "not checked" if unknown else "recoverable" if recoverable else "sound"
    count = len(report.damage) if unsound else recoverable if verdict == "recoverable" else 0
    places = counted(count, "place") if count else ""
    return [
        Fact("records", number(sum(row.records for row in report.stores)), span),
        Fact("stored", size(sum(row.bytes for row in report.stores)), topics),
        Fact("wait for a group", number(lag), f"the oldest for {duration(oldest)}" if lag else ""),
        Fact("dead letters", number(dead), sent_again(resent), "bad" if dead else ""),
        Fact("pending", number(waiting), "halves, delays, retries"),
        Fact("verify", verdict, places, "bad" if unsound else "good" if verdict == "sound" else ""),
    ]
