"""Anomalies of a history as a page: for each its sentence, and its events on a timeline. It opens offline."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, Final

from librmq.diagnosis.findings import counted
from librmq.diagnosis.formatting import visible
from librmq.testing.anomalies import KINDS, Anomaly
from librmq.testing.history_events import span_of

SHOWN: Final = 200
"""The largest number of anomalies on a page."""
_LONGEST: Final = 300
_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}
.who, .when, .line {{ white-space: nowrap }} .timeline .bar {{ height: 1.5rem }} .timeline .plot {{ width: 40% }}
</style>
</head>
<body>
<main>
<header>
<p class="kicker">librmq check-history</p>
<h1>{title}</h1>
<p class="quiet">{about}</p>
</header>
<section class="verdict {mood}" id="verdict">
<p class="said">{verdict}</p>
</section>
{sections}
</main>
</body>
</html>
"""


def render_timelines(
    anomalies: Sequence[Anomaly], events: Mapping[int, Mapping[str, Any]], lines: int, sources: Sequence[str]
) -> str:
    """Return the page of the anomalies of a history.

    Args:
        anomalies: What `check_history` has returned; the page has the first `SHOWN`.
        events: The events that the anomalies name, by their lines.
        lines: Number of lines of the history.
        sources: Names of its files.
    """
    kinds = Counter(anomaly.anomaly for anomaly in anomalies)
    verdict = (
        ", ".join(f"{kind} {kinds[kind]:,}" for kind in KINDS if kinds[kind]) or "Nothing is wrong in this history."
    )
    sections = [_section(number, anomaly, events) for number, anomaly in enumerate(anomalies[:SHOWN], 1)]
    if len(anomalies) > SHOWN:
        sections.append(f'<p class="quiet">The page leaves out {len(anomalies) - SHOWN:,} more.</p>')
    names = ", ".join(sources[:8]) + ", …" * (len(sources) > 8)
    page = _PAGE.format(
        title=escape(f"{len(anomalies):,} anomal{'y' if len(anomalies) == 1 else 'ies'}"),
        style=(files("librmq.diagnosis.survey") / "page.css").read_text("utf-8"),
        about=escape(f"{names}: {counted(lines, 'line')}. Times are spaced evenly, not to scale."),
        mood="bad" if anomalies else "",
        verdict=escape(verdict),
        sections="\n".join(sections),
    )
    return "\n".join(visible(line) for line in page.split("\n"))


def _section(number: int, anomaly: Anomaly, events: Mapping[int, Mapping[str, Any]]) -> str:
    spans = {line: span_of(events[line]) for line in anomaly.events if events[line]["event"] != "group"}
    times = sorted({at_ms for span in spans.values() for at_ms in span if at_ms is not None})
    lines = sorted(anomaly.events, key=lambda line: (spans[line][0] if line in spans else times[0] - 1, line))
    named = {line for line, (begin_ms, _) in spans.items() if begin_ms == anomaly.at_ms} or {lines[-1]}
    body = [_row(line, events[line], spans.get(line), times, "bad" if line in named else "fill") for line in lines]
    return (
        f'<section id="a{number}">\n<h2>{escape(anomaly.anomaly)}</h2>\n'
        f'<p class="about">{escape(anomaly.what)}</p>\n<table class="timeline">\n<thead><tr>'
        '<th scope="col" class="number">line</th><th scope="col">who</th><th scope="col">event</th>'
        '<th scope="col">ms</th><th scope="col" class="plot">'
        f'<span class="axis ends" aria-hidden="true"><i>{times[0]} ms</i><i>{times[-1] - times[0]:+,} ms</i></span>'
        f"</th></tr></thead>\n<tbody>\n{''.join(body)}</tbody>\n</table>\n</section>"
    )


def _row(
    line: int, event: Mapping[str, Any], span: tuple[int, int | None] | None, times: Sequence[int], kind: str
) -> str:
    when, plot = "", ""
    if span is not None:
        begin_ms, end_ms = span
        when = f"+{begin_ms - times[0]:,}" + (
            "" if end_ms == begin_ms else " …" if end_ms is None else f" to +{end_ms - times[0]:,}"
        )
        plot = _bar(times, begin_ms, end_ms, kind, f"{event['event']}: {when} ms")
    who = next((str(event[name]) for name in ("process", "group", "broker") if event.get(name) is not None), "")
    if event["event"] == "deliver":
        who = f"{event['group']} {who}"
    cells = (("number", "line", line), ("first", "who", who), ("text", "event", _text(event)), ("when", "ms", when))
    text = "".join(f'<td class="{kind}" data-label="{name}">{escape(str(value))}</td>' for kind, name, value in cells)
    return f'<tr>{text}<td class="plot" data-label="">{plot}</td></tr>\n'


def _text(event: Mapping[str, Any]) -> str:
    """Return an event as words: its kind, what it is about, and the fields that are left."""
    place = ""
    if event.get("queue_id") is not None:
        place = f" {event.get('stored_in') or event.get('topic')}/{event.get('broker')}/{event['queue_id']}"
        place += "" if event.get("queue_offset") is None else f":{event['queue_offset']}"
    used = {"event", "process", "group", "id", "begin_ms", "end_ms", "at_ms"}
    used |= {"topic", "stored_in", "broker", "queue_id", "queue_offset"} if place else set()
    fields = [f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in event.items() if name not in used]
    text = ", ".join((f"{event['event']} {event.get('id', '')}".rstrip() + place, *fields))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _bar(times: Sequence[int], begin_ms: int, end_ms: int | None, kind: str, what: str) -> str:
    """Draw an event on an axis with the same room between any two times that occur."""
    step = 960 / max(1, len(times) - 1)
    places = {at_ms: 20 + number * step for number, at_ms in enumerate(times)}
    grid = "".join(f'<path class="grid" d="M{place:.1f} 0V10"/>' for place in places.values())
    begin = places[begin_ms] - 5
    end = 1000 if end_ms is None else places[end_ms] + 5
    bar = f'<rect class="{kind}" x="{begin:.1f}" y="2" width="{end - begin:.1f}" height="6"/>'
    return (
        '<svg class="bar" viewBox="0 0 1000 10" preserveAspectRatio="none" role="img">'
        f"<title>{escape(what)}</title>{grid}{bar}</svg>"
    )
