"""``topics``, ``stats``, ``queues``, ``queue``: the content of a store by topic and queue."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from librmq.cli.input import TOPICS, near
from librmq.cli.output import Output
from librmq.cli.progress_bar import ProgressBar
from librmq.cli.rows import entry_rows, queue_row
from librmq.cli.stores import open_store
from librmq.diagnosis.findings import named
from librmq.errors import InputError
from librmq.message.delay_levels import SCHEDULE_TOPIC
from librmq.message.topics import DEAD_LETTER_PREFIX, HALF_TOPIC, OP_TOPIC, RETRY_PREFIX, is_system_topic
from librmq.store import MessageStore
from librmq.store.format import directory
from librmq.store.format.broker_tables import BrokerTables
from librmq.store.format.checkpoint import has_abort

if TYPE_CHECKING:
    from librmq.consumequeue import ConsumeQueue


# ---- kinds of topics

_INHERITED: Final = 1
_KINDS: Final = {SCHEDULE_TOPIC: "delay", HALF_TOPIC: "half", OP_TOPIC: "op"}


def kind_of_topic(topic: str) -> str:
    """Return the kind of a topic: user, retry, dead, delay, half, op or system."""
    if topic.startswith(RETRY_PREFIX):
        return "retry"
    if topic.startswith(DEAD_LETTER_PREFIX):
        return "dead"
    return _KINDS.get(topic) or ("system" if is_system_topic(topic) else "user")


def is_listed(topic: str, permission: int) -> bool:
    """Return whether a topic is listed though it has no messages: users have made it."""
    is_own = kind_of_topic(topic) == "system" or topic in _KINDS or topic.endswith("_REPLY_TOPIC")
    return not is_own and not permission & _INHERITED


def tables_of(store: MessageStore) -> BrokerTables:
    """Return the broker's tables in a store's folder."""
    return BrokerTables.open(os.path.join(store.path, directory.CONFIG), files=store.files)


def topics(arguments: argparse.Namespace, output: Output) -> int:
    """Print a line for each topic that has queues, or that users made."""
    if arguments.route is not None:
        from librmq.cli.cluster import open_cluster

        with open_cluster(arguments) as cluster:
            for row in cluster.topic_rows():
                output.row(row)
        return 0
    with open_store(arguments) as store:
        for row in _topic_rows(store, "topics", quiet=output.is_on_terminal):
            output.row(row)
    return 0


def _topic_rows(store: MessageStore, what: str, *, quiet: bool = False) -> Iterator[dict[str, Any]]:
    queues_by_topic = _queues_by_topic(store)
    with ProgressBar(what, len(queues_by_topic), "topics", quiet=quiet) as bar:
        for number, (topic, queues) in enumerate(queues_by_topic.items()):
            bar.to(number)
            yield _topic_row(store, topic, queues)


def _queues_by_topic(store: MessageStore) -> dict[str, list[ConsumeQueue]]:
    queues_by_topic: dict[str, list[ConsumeQueue]] = {
        topic: [] for topic, row in tables_of(store).topics.rows.items() if is_listed(topic, row.get("perm", 0))
    }
    for (topic, _), queue in sorted(store.queues.items()):
        queues_by_topic.setdefault(topic, []).append(queue)
    return dict(sorted(queues_by_topic.items()))


def _topic_row(store: MessageStore, topic: str, queues: list[ConsumeQueue]) -> dict[str, Any]:
    ends = [(queue, at) for queue in queues if queue.max_offset > queue.min_offset for at in (queue.min_offset,)]
    return {
        "topic": topic,
        "kind": kind_of_topic(topic),
        "queues": len(queues),
        "messages": sum(queue.max_offset - queue.min_offset for queue in queues),
        "min_timestamp_ms": min(filter(None, (_stored_ms(store, *end) for end in ends)), default=None),
        "max_timestamp_ms": max(
            filter(None, (_stored_ms(store, queue, queue.max_offset - 1) for queue, _ in ends)), default=None
        ),
    }


def _stored_ms(store: MessageStore, queue: ConsumeQueue, queue_offset: int) -> int | None:
    entry = queue.entry(queue_offset)
    return None if entry is None else store.log.store_timestamp_ms(entry.physical_offset, entry.size)


def stats(arguments: argparse.Namespace, output: Output) -> int:
    """Print a row about the whole store."""
    from librmq.diagnosis.view import StoreView, is_own_group

    with open_store(arguments) as store:
        rows = list(_topic_rows(store, "stats"))
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
                "groups": sum(not is_own_group(group) for group in StoreView.over(store).groups),
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
            hint = f"; its queues are {named(ids)}" if ids else near(topic, topics, TOPICS)
            raise InputError(f"unknown queue: there is no queue {queue_id} of topic {topic!r}{hint}")
        for row in entry_rows(topic, queue_id, consume_queue):
            output.row(row)
    return 0
