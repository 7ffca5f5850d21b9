"""``groups``, ``lag``, ``expiring``, ``whatif``: consumer groups, and the messages that they have left to consume."""

from __future__ import annotations

import argparse
import dataclasses
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NoReturn

from librmq.cli.input import note_group, note_topic
from librmq.cli.output import Output, complain
from librmq.cli.rows import Row, named
from librmq.cli.selection import first_at
from librmq.cli.stores import open_source, open_view
from librmq.clock import SystemClock
from librmq.diagnosis.formatting import moment
from librmq.diagnosis.group_lag import GroupLag, GroupRate, Lag, TopicLag, TopicProgress, lag_of_view
from librmq.diagnosis.view import StoreView, View, group_summaries
from librmq.errors import InputError
from librmq.store.format import directory

if TYPE_CHECKING:
    from librmq.diagnosis.whatif import Consumption


def groups(arguments: argparse.Namespace, output: Output) -> int:
    """Print a line for each consumer group."""
    with open_source(arguments) as view:
        output.rows_of(row._asdict() for row in group_summaries(view, includes_own=arguments.all))
    return 0


def lag(arguments: argparse.Namespace, output: Output) -> int:
    """Print the lag of each group in each queue, its sums by topic or group, or rates."""
    if arguments.every is not None:
        _lag_rates(arguments, output)
        return 0
    with open_source(arguments) as view:
        output.rows_of(_lag_rows(view, arguments.by, arguments.group, arguments.topic))
        _note_unknown(view, arguments, output)
        if not output.rows and output.says_nothing_found and isinstance(view, StoreView):
            output.says_nothing_found = False
            complain(f"note: {_no_lag_reason(view)}")
    return 0


def _lag_rows(view: View[Any], by: str, group: str | None, topic: str | None) -> Iterable[Row]:
    if by == "origin":
        from librmq.diagnosis.unconsumed import waiting_origins

        if not isinstance(view, StoreView):
            raise InputError("--by origin: expected a folder, because it reads the messages that wait")
        return (row._asdict() for row in waiting_origins(view, group=group, topic=topic))
    queue_lags = lag_of_view(view, group=group, topic=topic)
    if by == "queue":
        return chain.from_iterable(map(_queue_rows, queue_lags.topics))
    rows: Iterable[TopicLag | GroupLag] = queue_lags.by_topic() if by == "topic" else queue_lags.by_group()
    return (row._asdict() for row in rows)


def _queue_rows(columns: TopicProgress) -> Iterable[Row]:
    rows = (row._asdict() for row in columns.rows())
    return map(named, columns.broker_names, rows) if columns.broker_names else rows


def _no_lag_reason(view: StoreView) -> str:
    """Return why a store has the lag of no group in some topics."""
    path = os.path.join(view.store.path, directory.CONFIG, "consumerOffset.json")
    if view.store.files.size(path) is None:
        return f"there is no {path}, so the progress of no group is known: copy the folder config too"
    return "no group has progress in these topics"


def expiring(arguments: argparse.Namespace, output: Output) -> int:
    """Print the unconsumed messages that retention by age would delete soon, by group and topic."""
    from librmq.diagnosis.unconsumed import expiring as expiring_of

    with open_view(arguments) as view:
        rows = expiring_of(view, reserved_s=arguments.reserved, within_s=arguments.within)
        output.rows_of(row._asdict() for row in rows)
        if view.owner is None and view.now_ms is not None:
            complain(f"note: no process uses the store; times count from its last message, {moment(view.now_ms)}")
    return 0


def _lag_rates(arguments: argparse.Namespace, output: Output) -> None:
    """Print how fast topics grow and groups consume them; of an unused store what its messages tell."""
    if arguments.by in ("group", "origin"):
        raise InputError(f"--every measures by group and topic: expected no --by {arguments.by}")

    if arguments.every < _LEAST_S:
        raise InputError(f"--every: expected at least 100ms, found {arguments.every} s")

    def measure(view: View[Any]) -> Lag:
        return lag_of_view(view, group=arguments.group, topic=arguments.topic, times=False)

    def measure_again() -> Lag:
        with open_source(arguments) as view:
            return measure(view)

    with open_source(arguments) as view:
        _note_unknown(view, arguments, output)
        if isinstance(view, StoreView) and view.owner is None:
            recent_rates(view, measure(view), output)
            return
    follow_rates(measure_again, arguments.every, output)


def _note_unknown(view: View[Any], arguments: argparse.Namespace, output: Output) -> None:
    """Tell a person about a group and a topic that are unknown; each can cost requests to all brokers of a cluster."""
    if arguments.group is not None:
        note_group(arguments.group, view.groups, output)
    if arguments.topic is not None:
        note_topic(arguments.topic, view.topics, output)


# ---- rates

_WINDOW_S: Final = 600
_LEAST_S: Final = 0.1


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


# ---- time to drain a backlog


def whatif(arguments: argparse.Namespace, output: Output) -> int:
    """Print the time to drain a group's backlog as it is, then with changes, the greatest speed-up first."""
    from librmq.diagnosis.whatif import what_if

    with open_view(arguments) as view:
        for scenario in what_if(_consumption(view, arguments)):
            consumption, estimate = scenario.consumption, scenario.estimate
            output.row(
                {
                    "scenario": scenario.name,
                    **estimate._asdict(),
                    "speed_up": scenario.speed_up,
                    "lag": sum(consumption.lags),
                    "queues": len(consumption.lags),
                    "clients": consumption.clients,
                    "threads": consumption.threads,
                    "batch_size": consumption.batch_size,
                    "handler_s": consumption.handler_s,
                    "stored_per_s": consumption.stored_per_s,
                    "advice": scenario.advice,
                }
            )
    return 0


def _consumption(view: StoreView, arguments: argparse.Namespace) -> Consumption:
    from librmq.diagnosis.whatif import consumption_of

    stored_per_s = arguments.inflow
    if stored_per_s is None:
        messages, seconds = stored_recently(view, arguments.topic)
        stored_per_s = messages / seconds
    consumption = consumption_of(
        view, arguments.group, arguments.topic, handler_s=arguments.handler, stored_per_s=stored_per_s
    )
    changes = {"clients": arguments.clients, "threads": arguments.threads, "batch_size": arguments.batch}
    return dataclasses.replace(
        consumption,
        is_orderly=arguments.orderly or consumption.is_orderly,
        downstream_per_s=arguments.downstream,
        **{name: value for name, value in changes.items() if value is not None},
    )
