"""A history as operations of Jepsen's Kafka workload, so that a checker which others trust can judge the same run.

The form is that of ``jepsen.tests.kafka``: maps in EDN, one a line. A queue is an integer key, and a message an integer
value, which its place has. A send is an operation ``:send``, and each first delivery from the queue of the send is a
``:poll`` that returns it. Redeliveries have other queues, of which that workload knows nothing, so they are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any, Final, NamedTuple

from librmq.testing.histories.events import HistoryEvents, MessageId, Queue

_NS: Final = 1_000_000
"""Nanoseconds of a millisecond."""
_TYPES: Final = {"ok": ":ok", "failed": ":fail", "unknown": ":info"}


class JepsenHistory(NamedTuple):
    """Operations, and what they leave out."""

    operations: list[str]
    """One line of EDN for each, in the order of time."""
    redeliveries: int
    placeless_sends: int
    """Sends whose queue is unknown: they failed, or no consumer got their message."""


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


def to_jepsen(history: HistoryEvents) -> JepsenHistory:
    """Translate a history; see the module for what becomes of its events."""
    keys: dict[Queue, int] = {}
    values: dict[tuple[Queue, int], int] = {}
    first = [row for row in sorted(history.deliveries) if row.attempt == 0 and row.queue[0] == row.topic]
    known = {(send.queue, send.queue_offset) for send in history.sends if send.queue}
    found: dict[MessageId, list[tuple[Queue, int]]] = {}
    for row in first:
        places = found.setdefault(row.id, [])
        if (place := (row.queue, row.queue_offset)) not in known and place not in places:
            places.append(place)
    steps: list[_Step] = []
    placeless = 0
    for send in sorted(history.sends):
        if send.queue:
            queue, offset = send.queue, send.queue_offset
        elif send.outcome != "failed" and found.get(send.id):
            queue, offset = found[send.id].pop(0)
        else:
            placeless += 1
            continue
        key, value = keys.setdefault(queue, len(keys)), values.setdefault((queue, offset), len(values))
        number, kind = len(steps), _TYPES[send.outcome]
        is_known = send.outcome == "ok"
        answered = f"[[:send {key} [{offset} {value}]]]" if is_known else f"[[:send {key} {value}]]"
        named = f", :queue {_text('/'.join(map(str, queue)))}, :id {_text(send.id)}"
        asked = f"[[:send {key} {value}]]"
        steps.append(_Step(send.begin_ms, True, number, send.process, ":invoke", ":send", asked, named))
        steps.append(_Step(send.end_ms, False, number, send.process, kind, ":send", answered))
    for row in first:
        key = keys.setdefault(row.queue, len(keys))
        value = values.setdefault((row.queue, row.queue_offset), len(values))
        number, read = len(steps), f"[[:poll {{{key} [[{row.queue_offset} {value}]]}}]]"
        process = f"{row.group} {row.process}"
        steps.append(_Step(row.begin_ms, True, number, process, ":invoke", ":poll", "[[:poll]]"))
        steps.append(_Step(row.begin_ms, False, number, process, ":ok", ":poll", read))
    return JepsenHistory(list(_lines(steps)), len(history.deliveries) - len(first), placeless)


def _lines(steps: list[_Step]) -> Iterator[str]:
    """Yield operations; one process of Jepsen does one at a time, so overlapping ones of ours take several."""
    free: dict[str, list[int]] = {}
    numbers: dict[int, int] = {}
    count = 0
    order = {step.number: index for index, step in enumerate(sorted(steps, key=_invoked_first))}
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


def _invoked_first(step: _Step) -> tuple[Any, ...]:
    return step.at_ms, not step.is_invoked, step.number


def _text(value: object) -> str:
    return json.dumps(str(value))
