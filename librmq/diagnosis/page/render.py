"""Renders a report as one page of HTML."""

from __future__ import annotations

from collections import Counter
from importlib.resources import files
from importlib.util import find_spec
from typing import Final

from librmq.diagnosis.findings import counted
from librmq.diagnosis.page.parts import Fact, Notice, NoticeItem
from librmq.diagnosis.people import duration, moment, number, size, visible
from librmq.diagnosis.survey.comparison import Comparison, compare
from librmq.diagnosis.survey.model import Report, ReportedFinding
from librmq.errors import MissingExtraError

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

    from librmq.diagnosis.page.plots import WIDE  # plots need the extra
    from librmq.diagnosis.page.sections import sections

    comparison = None if earlier is None else compare(earlier, report)
    every = list(sections(report, comparison))
    folder = files("librmq.diagnosis.page")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((folder / "page.html.j2").read_text("utf-8"))
    html = template.render(
        style=(folder / "page.css").read_text("utf-8"),
        title=report.title,
        wide=WIDE,
        about=_about(report),
        mood=_mood(report),
        verdict=_verdict(report, comparison),
        notices=_notices(report, comparison),
        facts=_facts(report),
        sections=[one for one in every if one.tables],
        empty=[one for one in every if not one.tables],
    )
    return "\n".join(visible(line) for line in html.split("\n"))


def _about(report: Report) -> str:
    names = ", ".join(one.store for one in report.stores[:8]) + ", …" * (len(report.stores) > 8)
    latest = max((one.now_ms for one in report.stores if one.now_ms is not None), default=None)
    only = f" Only {', '.join(f'{name} {value}' for name, value in report.only.items())}." if report.only else ""
    return f"{names}, as of {moment(latest)} UTC.{only}"


def _mood(report: Report) -> str:
    severities = {one.severity for one in report.findings}
    return "bad" if "error" in severities else "warn" if "warning" in severities else "good"


def _verdict(report: Report, comparison: Comparison | None) -> str:
    counts = Counter(one.severity for one in report.findings)
    unknown = any(one.is_sound is None for one in report.stores)
    if not counts["error"] and not counts["warning"]:
        said = "Nothing needs attention."
        if unknown:
            said += " Whether the files are sound is unknown."
    else:
        told = [counted(counts[name], name) for name in ("error", "warning") if counts[name]]
        worst = report.findings[0]
        said = f"{' and '.join(told)}. Look first at {worst.subject}: {worst.what.partition(';')[0].rstrip('.')}."
    if comparison is not None and (comparison.added or comparison.removed):
        said += f" Since the earlier report: {len(comparison.added)} new, {len(comparison.removed)} gone."
    return said


def _notices(report: Report, comparison: Comparison | None) -> list[Notice]:
    """Return the findings by kind, worst first."""
    kinds: dict[tuple[str, str], list[ReportedFinding]] = {}
    for one in report.findings:
        kinds.setdefault((one.severity, one.kind), []).append(one)
    found = []
    for (severity, kind), findings in kinds.items():
        shown = findings[:_OF_A_KIND]
        steps = {one.next_step for one in shown}
        items = [_item(report, one, comparison, own_step=len(steps) > 1) for one in shown]
        title = kind.replace("-", " ").capitalize()
        more = len(findings) - len(shown)
        found.append(Notice(severity, title, items, "" if len(steps) > 1 else shown[0].next_step, more))
    return found


def _item(report: Report, one: ReportedFinding, comparison: Comparison | None, *, own_step: bool) -> NoticeItem:
    what = one.what
    if comparison is not None:
        before = next((old for old, now in comparison.changed if now is one), None)
        if before is not None:
            what = f"{what} (Before: {before.what})"
        elif any(now is one for now in comparison.added):
            what = f"New: {what}"
    is_named = len(report.stores) > 1 and one.subject != f"store {one.store}"
    subject = f"{one.subject}, store {one.store}" if is_named else one.subject
    return NoticeItem(subject, what, _evidence(one), one.next_step if own_step else "")


def _evidence(one: ReportedFinding) -> list[tuple[str, str]]:
    found = []
    for name, value in one.evidence.items():
        if name.endswith("_timestamp_ms") and isinstance(value, int):
            shown = moment(value)
        elif name.endswith("_s") and isinstance(value, int | float):
            shown = duration(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            shown = number(value)
        else:
            shown = "unknown" if value is None else _shortened(str(value))
        label = name.removesuffix("_timestamp_ms").removesuffix("_s").replace("_", " ")
        found.append((label, shown))
    return found


def _shortened(text: str) -> str:
    return (
        text if len(text) <= _LONGEST_EVIDENCE else f"{text[:_LONGEST_EVIDENCE]}… (whole in the JSON beside this page)"
    )


def _facts(report: Report) -> list[Fact]:
    lag = sum(one.lag for one in report.lags)
    oldest = max((one.oldest_age_s for one in report.lags if one.oldest_age_s is not None), default=None)
    dead = sum(one.messages for one in report.dead_letters)
    waiting = sum(one.messages for one in report.waiting)
    topics = f"in {counted(len({one.topic for one in report.topics}), 'topic')}"
    first = min((one.first_ms for one in report.stores if one.first_ms is not None), default=None)
    last = max((one.last_ms for one in report.stores if one.last_ms is not None), default=None)
    span = "" if first is None or last is None else f"over {duration((last - first) / 1000)}"
    unsound = [one for one in report.stores if one.is_sound is False]
    unknown = [one for one in report.stores if one.is_sound is None]
    verdict = "damaged" if unsound else "not checked" if unknown else "sound"
    places = counted(len(report.damage), "place") if unsound else ""
    return [
        Fact("messages", number(sum(one.messages for one in report.stores)), span),
        Fact(
            "stored",
            size(sum(one.bytes for one in report.stores)),
            topics,
        ),
        Fact("wait for a group", number(lag), f"the oldest for {duration(oldest)}" if lag else ""),
        Fact("dead letters", number(dead), "", "bad" if dead else ""),
        Fact("pending", number(waiting), "halves, delays, retries"),
        Fact("verify", verdict, places, "bad" if unsound else "" if unknown else "good"),
    ]
