"""``queues`` and ``queue``: consume queues and their entries."""

from __future__ import annotations

import argparse
import dataclasses

from librmq.cli.input import check_opened, files_and_config
from librmq.cli.output import Output
from librmq.cli.rows import entry_rows, queue_row
from librmq.cli.unknown_names import TOPICS, near
from librmq.diagnosis.findings import named
from librmq.errors import InputError
from librmq.store import MessageStore


def open_store(arguments: argparse.Namespace, *, all_in_memory: bool = False) -> MessageStore:
    """Open the store that a command reads, without a lock and without changes.

    With ``all_in_memory`` a read returns as many old messages as new ones, whatever the machine's memory.

    Raises:
        CorruptionError: The store is damaged, or a kill has left a file of length zero.
    """
    files, config = files_and_config(arguments)
    if all_in_memory:
        config = dataclasses.replace(
            config,
            max_transfer_count_on_disk=config.max_transfer_count_in_memory,
            max_transfer_bytes_on_disk=config.max_transfer_bytes_in_memory,
        )
    store = MessageStore.open(arguments.store, config, read_only=True, files=files)
    check_opened(arguments, store)
    return store


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
