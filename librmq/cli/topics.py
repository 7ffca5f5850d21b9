"""``topics``, ``stats``, ``queues``, ``queue``: the content of a store by topic and queue."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from librmq.cli.input import TOPICS, near
from librmq.cli.output import Output
from librmq.cli.rows import entry_rows, queue_row
from librmq.cli.sources import StoreSource, open_source
from librmq.cli.stores import open_store, open_view
from librmq.diagnosis.findings import id_ranges
from librmq.diagnosis.view import is_own_group
from librmq.errors import InputError
from librmq.store.format import directory
from librmq.store.format.checkpoint import has_abort

if TYPE_CHECKING:
    pass


def topics(arguments: argparse.Namespace, output: Output) -> int:
    """Print a line for each topic that has queues, or that users made."""
    with open_source(arguments) as source:
        output.rows_of(source.topic_rows(quiet=output.is_on_terminal))
    return 0


def stats(arguments: argparse.Namespace, output: Output) -> int:
    """Print a row about the whole store."""
    with open_view(arguments) as view:
        store, rows = view.store, list(StoreSource(view).topic_rows())
        user_rows = [row for row in rows if row["kind"] == "user"]
        times = [
            row[name] for row in rows for name in ("min_timestamp_ms", "max_timestamp_ms") if row[name] is not None
        ]
        holder = store.files.lock_holder(directory.lock_path(store.path))
        output.row(
            {
                "type": "stats",
                "path": arguments.url or os.path.abspath(store.path),
                "kind": directory.recognise(store.path, store.files).value,
                "used_by": holder,
                "closed_cleanly": None if holder is not None else not has_abort(store.files, store.path),
                "topics": len(user_rows),
                "queues": sum(row["queues"] for row in user_rows),
                "messages": sum(row["messages"] for row in user_rows),
                "retries": sum(row["messages"] for row in rows if row["kind"] == "retry"),
                "dead_letters": sum(row["messages"] for row in rows if row["kind"] == "dead"),
                "groups": sum(not is_own_group(group) for group in view.groups),
                "log_bytes": store.log.end - store.log.begin,
                "log_files": len(store.log.sequence.starts),
                "min_phy_offset": store.log.begin,
                "max_phy_offset": store.log.end,
                "min_timestamp_ms": min(times, default=None),
                "max_timestamp_ms": max(times, default=None),
            }
        )
    return 0


# ---- queues


def queues(arguments: argparse.Namespace, output: Output) -> int:
    """Print a line for each queue."""
    with open_store(arguments) as store:
        for (topic, queue_id), queue_ in sorted(store.queues.items()):
            output.row(queue_row(topic, queue_id, queue_))
    return 0


def queue(arguments: argparse.Namespace, output: Output) -> int:
    """Print the entries of a queue."""
    topic, queue_id = arguments.topic, arguments.queue_id
    with open_store(arguments) as store:
        consume_queue = store.queues.get((topic, queue_id))
        if consume_queue is None:
            topics = {name for name, _ in store.queues}
            ids = [number for name, number in store.queues if name == topic]
            hint = f"; its queues are {id_ranges(ids)}" if ids else near(topic, topics, TOPICS)
            raise InputError(f"unknown queue: there is no queue {queue_id} of topic {topic!r}{hint}")
        for row in entry_rows(topic, queue_id, consume_queue):
            output.row(row)
    return 0
