"""``queues`` and ``queue``: consume queues and their entries."""

from __future__ import annotations

import argparse

from librmq.cli.output import Output
from librmq.cli.rows import entry_rows, queue_row
from librmq.cli.stores import open_store
from librmq.cli.unknown_names import TOPICS, near
from librmq.diagnosis.findings import named
from librmq.errors import InputError


def queues(arguments: argparse.Namespace, output: Output) -> int:
    """Print a line for each queue."""
    with open_store(arguments) as store:
        for (topic, queue_id), queue_ in sorted(store.queues.items()):
            output.row(queue_row(topic, queue_id, queue_))
    return 0


def queue(arguments: argparse.Namespace, output: Output) -> int:
    """Print the entries of a queue."""
    text = arguments.queue_id
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise InputError(f"queue id: expected a whole number, found {text!r}")
    topic, queue_id = arguments.topic, int(text)
    with open_store(arguments) as store:
        consume_queue = store.queues.get((topic, queue_id))
        if consume_queue is None:
            topics = {name for name, _ in store.queues}
            ids = [number for name, number in store.queues if name == topic]
            hint = f"; its queues are {named(ids)}" if ids else near(topic, topics, TOPICS)
            raise InputError(f"unknown queue: there is no queue {queue_id} of topic {topic!r}{hint}")
        for row in entry_rows(topic, queue_id, consume_queue):
            output.row(row)
    return 0
