"""``lag --every``: how fast topics grow and groups consume them."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NoReturn

from librmq.cli.input import parse_duration
from librmq.cli.output import Output, complain
from librmq.cli.selection import first_at
from librmq.clock import SystemClock
from librmq.diagnosis.backlog import GroupRate, Lag
from librmq.diagnosis.view import StoreView
from librmq.errors import InputError

_WINDOW_S: Final = 600
_LEAST_S: Final = 0.1


def interval_of(arguments: argparse.Namespace) -> float:
    """Return the seconds between two measurements.

    Raises:
        InputError: ``--every`` is no time, too short, or beside a ``--by`` of other rows.
    """
    seconds = parse_duration("--every", arguments.every, "a time such as 5s or 1m")
    if seconds < _LEAST_S:
        raise InputError(f"--every: expected at least 100ms, found {arguments.every}")
    if arguments.by in ("group", "origin"):
        raise InputError(f"--every measures by group and topic: expected no --by {arguments.by}")
    return seconds


def follow_rates(measure: Callable[[], Lag], seconds: float, output: Output) -> NoReturn:
    """Print the rates between each measurement and the next, without end."""
    clock, never = SystemClock(), threading.Event()
    before = replace(measure(), now_ms=clock.now_ms())
    while True:
        clock.wait(never, seconds)
        now = replace(measure(), now_ms=clock.now_ms())
        for rate in now.rates_since(before):
            output.row(rate._asdict())
        output.draw()
        before = now


def recent_rates(view: StoreView, queue_lags: Lag, output: Output) -> None:
    """Print what a store that no process uses tells: how fast topics grew at its end."""
    complain(
        "note: no process uses the store. stored_per_s is the rate of its last ten minutes; how fast groups consumed "
        "then is unknown"
    )
    for topic_lag in queue_lags.by_topic():
        messages, seconds = stored_recently(view, topic_lag.topic)
        output.row(
            GroupRate(
                topic_lag.group, topic_lag.topic, seconds, messages / seconds, None, topic_lag.lag, None
            )._asdict()
        )


def stored_recently(view: StoreView, topic: str) -> tuple[int, float]:
    """Return the messages of a topic in the last ten minutes of the store, and how many seconds they cover."""
    if view.now_ms is None:
        return 0, 1.0
    store, stored, begin_ms = view.store, 0, view.now_ms
    since_ms = view.now_ms - 1000 * _WINDOW_S
    for queue_id in view.topics.get(topic, ()):
        queue = store.queues[topic, queue_id]
        offsets = range(queue.min_offset, queue.max_offset)
        first = first_at(store, queue, since_ms, offsets) if offsets else 0
        entry = queue.entry(first) if first in offsets else None
        if entry is not None:
            stored += offsets.stop - first
            time_ms = store.log.store_timestamp_ms(entry.physical_offset, entry.size)
            begin_ms = begin_ms if time_ms is None else min(begin_ms, time_ms)
    return stored, max(1.0, (view.now_ms - begin_ms) / 1000)
