"""Gauges of a consumer, named as in `librmq.metrics`; the gauges of a group's instances add up."""

from __future__ import annotations

from collections.abc import Callable

from librmq.consumer.assignment import AssignedQueue
from librmq.consumer.instance import Instance
from librmq.errors import RmqError
from librmq.metrics import Metrics
from librmq.protocol import MaxOffset

_GAUGES: dict[str, Callable[[Instance, AssignedQueue], float]] = {
    "queues": lambda member, assigned: 1,
    "waiting_messages": lambda member, assigned: len(assigned.messages),
    "waiting_bytes": lambda member, assigned: assigned.messages.size,
    "lag": lambda member, assigned: _lag(member, assigned),
}


def _lag(member: Instance, assigned: AssignedQueue) -> float:
    progress = assigned.next_offset if assigned.progress is None else assigned.progress
    try:
        end = member.client.endpoint(assigned.queue.broker_name).call(
            MaxOffset(assigned.queue.topic, assigned.queue.queue_id)
        )
    except RmqError:
        return 0  # unknown while the broker is unreachable
    return max(0, end - progress)


def show_gauges(member: Instance, metrics: Metrics) -> None:
    """Show the gauges of all subscribed topics until ``metrics.remove_gauges(member)``."""
    for topic in list(member.subscriptions):
        for name, measure in _GAUGES.items():
            metrics.gauge(name, _gauge(member, topic, measure), owner=member, topic=topic, group=member.group)


def _gauge(member: Instance, topic: str, measure: Callable[[Instance, AssignedQueue], float]) -> Callable[[], float]:
    def total() -> float:
        with member.runner.lock:
            queues = [
                assigned
                for assigned in member.assigned.values()
                if assigned.queue.topic == topic and not assigned.released
            ]
            return sum(measure(member, assigned) for assigned in queues)

    return total
