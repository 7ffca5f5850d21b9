"""``reset --route``: move the progress of a consumer group in a running cluster."""

from __future__ import annotations

import argparse

from librmq.cli.cluster_source import ClusterSource, open_cluster
from librmq.cli.input import parse_time
from librmq.cli.output import Output
from librmq.cli.stores import select_queues
from librmq.cli.unknown_names import GROUPS, TOPICS, near
from librmq.clock import SystemClock
from librmq.errors import InputError
from librmq.message.message import MessageQueue
from librmq.protocol import QueueOffsetAt, UpdateOffset
from librmq.wire.remote import QueueBounds


def reset_in_cluster(arguments: argparse.Namespace, output: Output) -> int:
    """Set a group's progress.

    With running consumers only the progress of a whole topic can be set, and only to a time.
    """
    group, topic = arguments.group, arguments.topic
    at_ms = None if arguments.to is None else _time_ms(arguments.to)
    with open_cluster(arguments) as cluster:
        named, queues = cluster.named, _cluster_queues(cluster, arguments)
        before = cluster.admin.progress(group, topic)
        after = {queue: _target(cluster, queue, bounds, at_ms, arguments) for queue, bounds in queues.items()}
        if not arguments.dry_run:
            if at_ms is not None and arguments.queue is None:
                after |= cluster.admin.reset(group, topic, at_ms)
            elif cluster.admin.clients(group) is not None:
                raise InputError(
                    f"group {group!r} has running consumers, which would overwrite the progress of single queues: stop "
                    "them first, or reset the whole topic to a time, of which the broker notifies them"
                )
            else:
                for queue, offset in after.items():
                    cluster.route.broker(queue.broker_name).call(UpdateOffset(group, topic, queue.queue_id, offset))
    for queue, bounds in queues.items():
        progress = before.get(queue)
        begin = max(bounds.min_offset, 0 if progress is None else progress.queue_offset)
        row = {
            "group": group,
            "topic": topic,
            "queue_id": queue.queue_id,
            "before": None if progress is None else progress.queue_offset,
            "after": after[queue],
            "skipped": max(0, after[queue] - begin),
            "again": max(0, begin - after[queue]),
            "lag": max(0, bounds.max_offset - after[queue]),
            "dry_run": arguments.dry_run,
        }
        output.row(named(queue.broker_name, row))
    return 0


def _time_ms(to: str) -> int:
    """Return a time as brokers take it: 0 is the beginning of each queue, -1 its end."""
    return {"begin": 0, "end": -1}[to] if to in ("begin", "end") else parse_time(to, SystemClock())


def _cluster_queues(cluster: ClusterSource, arguments: argparse.Namespace) -> dict[MessageQueue, QueueBounds]:
    """Return the queues to move in; refuse a group or a topic that the cluster does not know."""
    groups = cluster.groups()
    if arguments.group not in groups:
        raise InputError(f"there is no group {arguments.group!r}{near(arguments.group, groups, GROUPS)}")
    bounds = cluster.bounds(arguments.topic)
    if not bounds:
        raise InputError(f"topic {arguments.topic!r} has no queue{near(arguments.topic, cluster.topics(), TOPICS)}")
    ids = {queue.queue_id for queue in bounds}
    queue_ids = select_queues(arguments.topic, arguments.queue, ids)
    return {queue: queue_bounds for queue, queue_bounds in bounds.items() if queue.queue_id in queue_ids}


def _target(
    cluster: ClusterSource, queue: MessageQueue, bounds: QueueBounds, at_ms: int | None, arguments: argparse.Namespace
) -> int:
    if at_ms is None:
        text = arguments.offset
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise InputError(f"--offset: expected a whole number, found {text!r:.80}")
        return min(max(int(text), bounds.min_offset), bounds.max_offset)
    if at_ms <= 0:
        return bounds.max_offset if at_ms else bounds.min_offset
    request = QueueOffsetAt(queue.topic, queue.queue_id, at_ms)
    return cluster.route.broker(queue.broker_name).call(request)
