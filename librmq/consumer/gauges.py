"""Gauges of a consumer, by the names of `librmq.metrics`; those of a group's instances add up."""

from __future__ import annotations

from collections.abc import Callable

from librmq.consumer.assigned_queue import HeldQueue
from librmq.consumer.instance import Instance
from librmq.errors import RmqError
from librmq.metrics import Metrics
from librmq.protocol import MaxOffset

__all__ = ["show_gauges"]

_GAUGES: dict[str, Callable[[Instance, HeldQueue], float]] = {
    "queues": lambda member, held: 1,
    "waiting_messages": lambda member, held: len(held.messages),
    "waiting_bytes": lambda member, held: held.messages.size,
    "lag": lambda member, held: _lag(member, held),
}


def _lag(member: Instance, held: HeldQueue) -> float:
    progress = held.next_offset if held.progress is None else held.progress
    try:
        end = member.client.endpoint(held.queue.broker_name).call(MaxOffset(held.queue.topic, held.queue.queue_id))
    except RmqError:
        return 0  # nothing is known while the broker is away
    return max(0, end - progress)


def show_gauges(member: Instance, metrics: Metrics) -> None:
    """Show the gauges of all topics that are subscribed to, until ``metrics.take_away(member)``."""
    for topic in list(member.subscriptions):
        for name, measure in _GAUGES.items():
            metrics.gauge(name, _gauge(member, topic, measure), of=member, topic=topic, group=member.group)


def _gauge(member: Instance, topic: str, measure: Callable[[Instance, HeldQueue], float]) -> Callable[[], float]:
    def total() -> float:
        with member.runner.lock:
            held = [one for one in member.held.values() if one.queue.topic == topic and not one.dropped]
            return sum(measure(member, one) for one in held)

    return total
