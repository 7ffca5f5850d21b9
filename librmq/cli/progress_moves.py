"""``reset`` and ``skip``: move the progress of a consumer group."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable
from typing import Final

from librmq.cli.changes import opened_to_change
from librmq.cli.input import parse_time
from librmq.cli.output import Output
from librmq.cli.selection import first_at
from librmq.clock import SystemClock
from librmq.consumequeue import ConsumeQueue
from librmq.diagnosis.view import StoreView
from librmq.errors import InputError
from librmq.store import MessageStore
from librmq.store.format.broker_tables import BrokerTables

__all__ = ["reset", "skip"]

Move = Callable[[MessageStore, ConsumeQueue, int | None], int]
"""From a store, one of its queues and a group's progress in it to the new progress."""

_AGE: Final = re.compile(r"\d{1,12}(ms|s|m|h|d)")


def reset(arguments: argparse.Namespace, output: Output) -> int:
    """Set a group's progress to the begin or the end of each queue, a time, or a queue offset."""
    if (arguments.to is None) == (arguments.offset is None):
        raise InputError("name one of --to (begin, end or a time) and --offset")
    if arguments.offset is not None:
        if not (arguments.offset.isascii() and arguments.offset.isdigit() and len(arguments.offset) < 19):
            raise InputError(f"--offset: expected a whole number, found {arguments.offset!r:.80}")
        wanted = int(arguments.offset)
        return _move(arguments, output, lambda store, queue, at: min(max(wanted, queue.min_offset), queue.max_offset))
    if arguments.to == "begin":
        return _move(arguments, output, lambda store, queue, at: queue.min_offset)
    if arguments.to == "end":
        return _move(arguments, output, lambda store, queue, at: queue.max_offset)
    time_ms = parse_time(arguments.to, SystemClock())
    return _move(arguments, output, lambda store, queue, at: _at_time(store, queue, time_ms))


def skip(arguments: argparse.Namespace, output: Output) -> int:
    """Move a group's progress forward: past old messages, to the newest ones, or to the end."""
    if arguments.older_than is not None and arguments.keep is not None:
        raise InputError("name one of --older-than and --keep")
    if arguments.older_than is not None:
        if not _AGE.fullmatch(arguments.older_than):
            raise InputError(
                f"--older-than: expected an age such as 90s, 30m, 2h or 7d, found {arguments.older_than!r:.80}"
            )
        time_ms = parse_time(arguments.older_than, SystemClock())
        return _move(arguments, output, lambda store, queue, at: _at_time(store, queue, time_ms), only_forward=True)
    kept = 0
    if arguments.keep is not None:
        if not (arguments.keep.isascii() and arguments.keep.isdigit() and len(arguments.keep) < 19):
            raise InputError(f"--keep: expected a whole number, found {arguments.keep!r:.80}")
        kept = int(arguments.keep)
    return _move(arguments, output, lambda store, queue, at: queue.max_offset - kept, only_forward=True)


def _at_time(store: MessageStore, queue: ConsumeQueue, time_ms: int) -> int:
    return first_at(store, queue, time_ms, range(queue.min_offset, queue.max_offset))


def _move(arguments: argparse.Namespace, output: Output, move: Move, *, only_forward: bool = False) -> int:
    group, topic = arguments.group, arguments.topic
    with opened_to_change(arguments) as (store, tables):
        for queue_id in _queue_ids(store, tables, arguments):
            queue = store.queues[topic, queue_id]
            before = tables.consumer_offset(topic, group, queue_id)
            usual = queue.min_offset if before is None else max(before, queue.min_offset)
            after = move(store, queue, before)
            after = max(usual, after) if only_forward else after
            if after != before:
                tables.set_consumer_offset(topic, group, queue_id, after)
            output.row(
                {
                    "group": group,
                    "topic": topic,
                    "queue_id": queue_id,
                    "before": before,
                    "after": after,
                    "skipped": max(0, after - usual),
                    "again": max(0, usual - after),
                    "lag": queue.max_offset - after,
                }
            )
    return 0


def _queue_ids(store: MessageStore, tables: BrokerTables, arguments: argparse.Namespace) -> list[int]:
    """Return the queues to move in; refuse a group or a topic that the store does not know."""
    group, topic = arguments.group, arguments.topic
    known = StoreView.over(store, tables).groups
    if group not in known:
        raise InputError(f"there is no group {group!r}{_near(group, known)}")
    ids = sorted(number for name, number in store.queues if name == topic)
    if not ids:
        raise InputError(f"topic {topic!r} has no queue{_near(topic, {name for name, _ in store.queues})}")
    if arguments.queue is None:
        return ids
    if not arguments.queue.isdigit() or int(arguments.queue) not in ids:
        raise InputError(f"topic {topic!r} has no queue {arguments.queue}: its queues are {', '.join(map(str, ids))}")
    return [int(arguments.queue)]


def _near(name: str, known: object) -> str:
    found = difflib.get_close_matches(name, list(known), 1)  # type: ignore[call-overload]
    return f"; did you mean {found[0]!r}?" if found else ""
