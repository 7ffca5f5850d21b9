"""``reset``, ``skip``, ``replay``: move the progress of a consumer group."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from librmq.cli.input import age_clock, parse_duration, parse_time
from librmq.cli.output import Output, complain, whole_number
from librmq.cli.selection import first_at
from librmq.cli.stores import open_broker, open_to_change, select_queues
from librmq.cli.unknown_names import GROUPS, TOPICS, near
from librmq.consumequeue import ConsumeQueue
from librmq.diagnosis.findings import counted
from librmq.diagnosis.people import moment
from librmq.diagnosis.view import StoreView
from librmq.errors import InputError
from librmq.store import MessageStore
from librmq.store.format.broker_tables import BrokerTables

if TYPE_CHECKING:
    from librmq.diagnosis.policies import Skip

Move = Callable[[MessageStore, ConsumeQueue], int]
"""From a store and one of its queues to the new progress."""


def reset(arguments: argparse.Namespace, output: Output) -> int:
    """Set a group's progress to the beginning or the end of each queue, a time, or a queue offset."""
    if (arguments.to is None) == (arguments.offset is None):
        raise InputError("expected either --to (begin, end or a time) or --offset")
    if arguments.route is not None:
        from librmq.cli.cluster_moves import reset_in_cluster

        return reset_in_cluster(arguments, output)
    if arguments.offset is not None:
        queue_offset = _number("--offset", arguments.offset)
        return _move(arguments, output, lambda store, queue: min(max(queue_offset, queue.min_offset), queue.max_offset))
    if arguments.to == "begin":
        return _move(arguments, output, lambda store, queue: queue.min_offset)
    if arguments.to == "end":
        return _move(arguments, output, lambda store, queue: queue.max_offset)
    time_ms = parse_time(arguments.to, age_clock(arguments.store, arguments.to))
    return _move(arguments, output, lambda store, queue: _at_time(store, queue, time_ms))


def skip(arguments: argparse.Namespace, output: Output) -> int:
    """Move a group's progress forward: past old messages, to the newest, or to the end; record the skip."""
    from librmq.diagnosis.policies import move_to, plan_skip, set_aside
    from librmq.diagnosis.policies import skip as pass_over

    if arguments.aside is not None and arguments.move is not None:
        raise InputError("expected either --aside or --move")
    if arguments.queues is not None and arguments.move is None:
        raise InputError("--queues: only --move makes a topic with a number of queues")
    queues = None if arguments.queues is None else whole_number("--queues", arguments.queues)
    if arguments.older_than is not None and arguments.keep is not None:
        raise InputError("expected either --older-than or --keep")
    expected = "an age such as 90s, 30m, 2h or 7d"
    age_s = None if arguments.older_than is None else parse_duration("--older-than", arguments.older_than, expected)
    newest = None if arguments.keep is None else _number("--keep", arguments.keep)
    group, topic = arguments.group, arguments.topic
    clock = age_clock(arguments.store, arguments.older_than)
    with open_broker(arguments) as broker:
        queue_ids = _queue_ids(broker.store, broker.tables, arguments)
        to_end = age_s is None and newest is None
        now_ms = clock.now_ms()
        plan = plan_skip(broker, group, topic, older_than=age_s, lag_above=newest, to_end=to_end, now_ms=now_ms)
        plan = plan._replace(queues=tuple(queue_skip for queue_skip in plan.queues if queue_skip.queue_id in queue_ids))
        _announce(plan, "would skip" if arguments.dry_run else "skips")
        done = plan
        if plan.queues and arguments.move is not None:
            done = move_to(broker, plan, arguments.move, queues=queues)
        elif plan.queues:
            done = pass_over(broker, plan) if arguments.aside is None else set_aside(broker, plan, arguments.aside)
    for queue_skip in done.queues:
        row = {"group": group, "topic": topic, **queue_skip._asdict(), "skipped": queue_skip.end - queue_skip.begin}
        output.row({**row, "aside": done.aside, "dry_run": arguments.dry_run})
    return 0


def _announce(plan: Skip, skips: str) -> None:
    """Tell a person what is skipped, before it is."""
    bounds = [
        time for queue_skip in plan.queues for time in (queue_skip.first_timestamp_ms, queue_skip.last_timestamp_ms)
    ]
    times = [time for time in bounds if time is not None]
    stored = f", stored from {moment(min(times))} to {moment(max(times))} UTC" if times else ""
    complain(f"note: group {plan.group!r} {skips} {counted(plan.messages, 'message')} of topic {plan.topic!r}{stored}")


def _number(name: str, text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 19:
        return int(text)
    raise InputError(f"{name}: expected a whole number, found {text!r:.80}")


def _at_time(store: MessageStore, queue: ConsumeQueue, time_ms: int) -> int:
    return first_at(store, queue, time_ms, range(queue.min_offset, queue.max_offset))


def _move(arguments: argparse.Namespace, output: Output, move: Move) -> int:
    group, topic = arguments.group, arguments.topic
    rows = []
    with open_to_change(arguments) as (store, tables):
        for queue_id in _queue_ids(store, tables, arguments):
            queue = store.queues[topic, queue_id]
            before = tables.consumer_offset(topic, group, queue_id)
            begin = queue.min_offset if before is None else max(before, queue.min_offset)
            after = move(store, queue)
            if after != before:
                tables.set_consumer_offset(topic, group, queue_id, after)
            rows.append(
                {
                    "group": group,
                    "topic": topic,
                    "queue_id": queue_id,
                    "before": before,
                    "after": after,
                    "skipped": max(0, after - begin),
                    "again": max(0, begin - after),
                    "lag": queue.max_offset - after,
                    "dry_run": arguments.dry_run,
                }
            )
    for row in rows:  # the tables are saved
        output.row(row)
    return 0


def _queue_ids(store: MessageStore, tables: BrokerTables, arguments: argparse.Namespace) -> list[int]:
    """Return the queues to move in; refuse a group or a topic that the store does not know."""
    group, topic = arguments.group, arguments.topic
    groups = StoreView.over(store, tables).groups
    if group not in groups:
        raise InputError(f"there is no group {group!r}{near(group, groups, GROUPS)}")
    ids = sorted(number for name, number in store.queues if name == topic)
    if not ids:
        raise InputError(f"topic {topic!r} has no queue{near(topic, {name for name, _ in store.queues}, TOPICS)}")
    return select_queues(topic, arguments.queue, ids)
