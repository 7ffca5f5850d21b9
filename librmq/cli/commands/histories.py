"""``check-history``: anomalies in the recorded history of a run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from heapq import heappop, heappush
from html import escape
from importlib.resources import files
from typing import Any, BinaryIO, Final, NamedTuple

from librmq.cli._output import Output, complain, write_page
from librmq.cli._rows import binary_input, parse_object
from librmq.errors import InputError
from librmq.formatting import visible
from librmq.runtime.event_log import counted
from librmq.testing import Anomaly
from librmq.testing.histories.events import HistoryEvents, MessageId, Queue, span_of

_HAS_ANOMALIES: Final = 1
_NS: Final = 1_000_000
"""Nanoseconds of a millisecond."""
_TYPES: Final = {"ok": ":ok", "failed": ":fail", "unknown": ":info"}


def check_history(arguments: argparse.Namespace, output: Output) -> int:
    """Print the anomalies of a history; status 1 if there are some."""
    from librmq.testing.histories.anomalies import find_anomalies

    if arguments.files.count("-") > 1:
        raise InputError("-: standard input can be read once")
    history = HistoryEvents()
    if arguments.out is not None and any(_is_same(path, arguments.out) for path in arguments.files):
        raise InputError(f"--out: expected another file than the history {arguments.out}")
    piped: dict[str, list[bytes]] = {}
    begins = []
    for path in arguments.files:
        begins.append(history.lines)
        with _history_file(path) as file:
            if arguments.out is not None and not os.path.isfile(path):  # it can be read once
                piped[path] = file.readlines()
                is_cut = history.read(iter(piped[path]), _file_name(path))
            else:
                is_cut = history.read(file, _file_name(path))
        if is_cut:
            complain(f"note: {_file_name(path)}: line {history.lines - begins[-1]} is incomplete, and left out")
    if history.lines == 0:
        complain("note: the history has no events")
    elif not history.groups:
        complain("note: no event 'group' says which topics a group reads: lost messages cannot be found")
    if arguments.to is not None:
        return _print_for_jepsen(history)
    lines = history.lines
    anomalies = find_anomalies(history)
    output.rows_of(anomaly.row() for anomaly in anomalies)
    if arguments.out is not None:
        _write_timelines(arguments, anomalies, lines, begins, piped)
    if not anomalies:
        output.says_nothing_found = False
        if output.is_on_terminal:
            complain(f"note: nothing is wrong in {lines:,} lines")
    return _HAS_ANOMALIES if anomalies else 0


def _print_for_jepsen(history: HistoryEvents) -> int:
    operations, redeliveries, placeless = _to_jepsen(history)
    sys.stdout.writelines(f"{operation}\n" for operation in operations)
    if redeliveries:
        complain(f"note: left out, because that workload knows no retries: {redeliveries:,} of the deliveries")
    if placeless:
        complain(f"note: left out, because no queue is known: {counted(placeless, 'send')}")
    return 0


def _is_same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:  # one of them does not exist
        return False


def _file_name(path: str) -> str:
    return "standard input" if path == "-" else path


@contextmanager
def _history_file(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield binary_input()
        return
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def _write_timelines(
    arguments: argparse.Namespace,
    anomalies: Sequence[Anomaly],
    lines: int,
    begins: Sequence[int],
    piped: dict[str, list[bytes]],
) -> None:
    """Write the page; the events that it shows are read again."""
    shown_lines = {line for anomaly in anomalies[:_ON_PAGE] for line in anomaly.events}
    events: dict[int, dict[str, Any]] = {}
    for path, begin in zip(arguments.files, begins, strict=True):
        with nullcontext(piped[path]) if path in piped else _history_file(path) as file:
            events |= {line: parse_object(text) for line, text in enumerate(file, begin + 1) if line in shown_lines}
    page = render_timelines(anomalies, events, lines, [*map(_file_name, arguments.files)])
    write_page(arguments.out, page)


# ---- the page of timelines

_ON_PAGE: Final = 200
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
.timeline .bar {{ height: 1.5rem }} .timeline .plot {{ width: 40% }}
</style>
</head>
<body class="report">
<header>
<p class="place"><strong>librmq</strong> <span>check-history</span></p>
</header>
<main>
<h1>{title}</h1>
<p class="note">{about}</p>
<div class="verdict {mood}" id="verdict">
<p class="said">{verdict}</p>
</div>
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
        anomalies: What `check_history` has returned; the page has the first `_ON_PAGE`.
        events: The events that the anomalies name, by their lines.
        lines: Number of lines of the history.
        sources: Names of its files.
    """
    kinds = Counter(anomaly.anomaly for anomaly in anomalies)
    verdict = ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common())
    sections = [_section(number, anomaly, events) for number, anomaly in enumerate(anomalies[:_ON_PAGE], 1)]
    if len(anomalies) > _ON_PAGE:
        sections.append(f'<p class="note">The page leaves out {len(anomalies) - _ON_PAGE:,} more.</p>')
    names = ", ".join(sources[:8]) + ", …" * (len(sources) > 8)
    page = _PAGE.format(
        title=escape(f"{len(anomalies):,} anomal{'y' if len(anomalies) == 1 else 'ies'}"),
        style=(files("librmq.console") / "templates" / "console.css").read_text("utf-8"),
        about=escape(f"{names}: {counted(lines, 'line')}. Times are spaced evenly, not to scale."),
        mood="bad" if anomalies else "",
        verdict=escape(verdict or "Nothing is wrong in this history."),
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
        f'<p class="note">{escape(anomaly.what)}</p>\n<table class="timeline">\n<thead><tr>'
        '<th scope="col" class="number">line</th><th scope="col">who</th><th scope="col">event</th>'
        '<th scope="col">ms</th><th scope="col" class="plot">'
        f'<span class="axis span" aria-hidden="true"><i>{times[0]} ms</i><i>{times[-1] - times[0]:+,} ms</i></span>'
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
    actor = next((str(event[name]) for name in ("process", "group", "broker") if event.get(name) is not None), "")
    if event["event"] == "deliver":
        actor = f"{event['group']} {actor}"
    cells = (("number", "line", line), ("first", "who", actor), ("text", "event", _text(event)), ("when", "ms", when))
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


# ---- a history for Jepsen's checker
#
# The form is that of ``jepsen.tests.kafka``: maps in EDN, one a line. A queue is an integer key, and a message an
# integer value, which its place has. A send is an operation ``:send``, and each first delivery from the queue of the
# send is a ``:poll`` that returns it. Redeliveries have other queues, of which that workload knows nothing, so they are
# left out.


class _Step(NamedTuple):
    """An invocation or a completion; they compare by time, a completion before an invocation of the same time."""

    at_ms: int
    is_invoked: bool
    number: int
    process: str
    kind: str
    function: str
    value: str
    more: str = ""


def _to_jepsen(history: HistoryEvents) -> tuple[list[str], int, int]:
    """Return a line of EDN for each operation, in the order of time, and how many events these leave out.

    Those are redeliveries, and sends whose queue is unknown: they failed, or no consumer got their message.
    """
    keys: dict[Queue, int] = {}
    values: dict[tuple[Queue, int], int] = {}
    first = [row for row in sorted(history.deliveries) if row.attempt == 0 and row.queue[0] == row.topic]
    sent_places = {(send.queue, send.queue_offset) for send in history.sends if send.queue}
    received_places: dict[MessageId, list[tuple[Queue, int]]] = {}
    for row in first:
        places = received_places.setdefault(row.id, [])
        if (place := (row.queue, row.queue_offset)) not in sent_places and place not in places:
            places.append(place)
    steps: list[_Step] = []

    def add(
        process: str, function: str, times_ms: tuple[int, int], invoked: str, kind: str, answered: str, more: str = ""
    ) -> None:
        begin_ms, end_ms = times_ms
        number = len(steps)
        steps.append(_Step(begin_ms, True, number, process, ":invoke", function, invoked, more))
        steps.append(_Step(end_ms, False, number, process, kind, function, answered))

    placeless = 0
    for send in sorted(history.sends):
        if send.queue:
            queue, offset = send.queue, send.queue_offset
        elif send.outcome != "failed" and received_places.get(send.id):
            queue, offset = received_places[send.id].pop(0)
        else:
            placeless += 1
            continue
        key, value = keys.setdefault(queue, len(keys)), values.setdefault((queue, offset), len(values))
        invocation = f"[[:send {key} {value}]]"
        answered = f"[[:send {key} [{offset} {value}]]]" if send.outcome == "ok" else invocation
        named = f", :queue {json.dumps('/'.join(map(str, queue)))}, :id {json.dumps(str(send.id))}"
        times_ms = send.begin_ms, send.end_ms
        add(send.process, ":send", times_ms, invocation, _TYPES[send.outcome], answered, named)
    for row in first:
        key = keys.setdefault(row.queue, len(keys))
        value = values.setdefault((row.queue, row.queue_offset), len(values))
        read = f"[[:poll {{{key} [[{row.queue_offset} {value}]]}}]]"
        add(f"{row.group} {row.process}", ":poll", (row.begin_ms, row.begin_ms), "[[:poll]]", ":ok", read)
    return list(_lines(steps)), len(history.deliveries) - len(first), placeless


def _lines(steps: list[_Step]) -> Iterator[str]:
    """Yield operations; one process of Jepsen does one at a time, so overlapping ones of ours take several."""
    free: dict[str, list[int]] = {}
    numbers: dict[int, int] = {}
    count = 0
    by_begin = sorted(steps, key=lambda step: (step.at_ms, not step.is_invoked, step.number))
    order = {step.number: index for index, step in enumerate(by_begin)}
    for index, step in enumerate(sorted(steps, key=lambda step: (step.at_ms, order[step.number], not step.is_invoked))):
        if step.is_invoked:
            idle = free.setdefault(step.process, [])
            if not idle:
                heappush(idle, count)
                count += 1
            numbers[step.number] = heappop(idle)
        process = numbers[step.number]
        yield (
            f"{{:index {index}, :time {step.at_ms * _NS}, :process {process}, :type {step.kind}, "
            f":f {step.function}, :value {step.value}{step.more}}}"
        )
        if not step.is_invoked and step.kind != ":info":  # after :info a process of Jepsen does nothing more
            heappush(free[step.process], process)
