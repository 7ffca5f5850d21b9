"""Consistency of consumer groups: whether their instances agree, and whether each queue has one owner.

Only a running broker knows its instances: a folder has no such findings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from librmq.broker.clients import GroupConnections, TopicDifference, comparable, group_differences
from librmq.diagnosis.findings import Finding, Thresholds
from librmq.diagnosis.group_lag import Lag, lag
from librmq.diagnosis.view import Source, StoreView, is_own_group, viewed
from librmq.message.topics import RETRY_PREFIX
from librmq.protocol import PERM_READ, InstanceState, MessageModel

States = Mapping[str, InstanceState | None]


def consistency_findings(
    source: Source, thresholds: Thresholds | None = None, *, group_lag: Lag | None = None
) -> list[Finding]:
    """Return disagreements between the instances of a group, and queues without an owner or with two.

    During a rebalance, queues can be without an owner for a moment. ``group_lag`` is the lag, if already known.
    """
    limits = thresholds or Thresholds()
    findings: list[Finding] = []
    with viewed(source) as view:
        broker = view.broker
        if broker is None:
            return []
        group_lag = lag(view) if group_lag is None else group_lag
        waiting = {(row.group, row.topic, row.queue_id): row.lag for row in group_lag if row.lag}
        for client_id in sorted(broker.shared_client_ids()):
            findings.append(_shared_id(client_id))
        for group in view.groups:
            if not limits.own and is_own_group(group):
                continue
            connections = broker.connections(group)
            if connections is None:
                findings += _not_running(group, waiting)
                continue
            states = broker.instances(group)
            differences = group_differences(
                {client_id: comparable(topics) for client_id, topics in connections.subscriptions_by_client.items()}
            )
            findings += [_difference(group, difference, states, waiting) for difference in differences]
            findings += _modes(group, states)
            if connections.model is MessageModel.CLUSTERING and not differences and all(states.values()):
                findings += _owners(view, connections, states, waiting)
    return findings


def _shared_id(client_id: str) -> Finding:
    return Finding(
        "shared-client-id", "error", f"client {client_id}",
        "Two clients use this id. They count as one and consume the same queues, so messages are delivered twice.",
        {"client_id": client_id}, "Give each an instance_name of its own, or shut the other down first.",
    )  # fmt: skip


def _not_running(group: str, waiting: Mapping[tuple[str, str, int], int]) -> Iterator[Finding]:
    counts = {(topic, queue_id): count for (owner, topic, queue_id), count in waiting.items() if owner == group}
    if counts:
        yield Finding(
            "group-not-running", "warning", f"group {group}",
            f"{sum(counts.values()):,} messages wait in {len(counts)} queues, and the group has no running instance.",
            {"lag": sum(counts.values()), "queues": len(counts), "instances": 0},
            "Start an instance; or reset an unused group to the end of the topic.",
        )  # fmt: skip


def _difference(
    group: str, difference: TopicDifference, states: States, waiting: Mapping[tuple[str, str, int], int]
) -> Finding:
    held = [
        f"{client_id}: {', '.join(queue_ids)}"
        for client_id, state in states.items()
        if state is not None
        and (queue_ids := [str(held.queue.queue_id) for held in state.queues if held.queue.topic == difference.topic])
    ]
    unread = sum(count for (owner, topic, _), count in waiting.items() if (owner, topic) == (group, difference.topic))
    what = (
        "queues that are allocated to an instance without it stay unread"
        if difference.without
        else "a message that does not match the filter of its queue's owner is skipped for good"
    )
    return Finding(
        "subscriptions-differ", "error", f"group {group}, topic {difference.topic}",
        f"The instances subscribe to different things: {difference}. So {what}.",
        {
            "without": list(difference.without),
            "subscriptions": {str(kind): list(client_ids) for kind, client_ids in difference.subscriptions},
            "queues_held": held,
            "lag": unread,
        },
        "Give every instance the same subscriptions, or use another group for different ones.",
    )  # fmt: skip


def _modes(group: str, states: States) -> Iterator[Finding]:
    for name, mode_of in (
        ("model", lambda state: state.model.name.lower()),
        ("order", lambda state: "orderly" if state.is_orderly else "concurrent"),
        ("strategy", lambda state: state.strategy),
    ):
        modes: dict[str, list[str]] = {}
        for client_id, state in states.items():
            if state is not None:
                modes.setdefault(mode_of(state), []).append(client_id)
        if len(modes) > 1:
            text = "; ".join(f"{', '.join(client_ids)}: {mode}" for mode, client_ids in modes.items())
            yield Finding(
                f"{name}-differs", "error", f"group {group}", f"The instances differ in {name}: {text}.",
                {"instances": modes}, "Start every instance of a group with the same settings.",
            )  # fmt: skip


def _owners(
    view: StoreView, connections: GroupConnections, states: States, waiting: Mapping[tuple[str, str, int], int]
) -> Iterator[Finding]:
    group, broker = connections.group, view.broker
    assert broker is not None
    idle: Counter[str] = Counter(dict.fromkeys(states, 0))
    for topic in sorted(connections.subscriptions):
        owners: dict[int, list[str]] = {
            number: []
            for data in broker.topic_route(topic)
            if data.permission & PERM_READ
            for number in range(data.read_queues)
        }
        shares = dict.fromkeys(states, 0)
        for client_id, state in states.items():
            for held in () if state is None else state.queues:
                if held.queue.topic == topic and held.queue.broker_name == broker.name:
                    owners.setdefault(held.queue.queue_id, []).append(client_id)
                    shares[client_id] += 1
        if not topic.startswith(RETRY_PREFIX):
            idle.update(shares)
            yield from _shares(group, topic, shares)
        yield from _owned(group, topic, owners, waiting)
    without = [client_id for client_id, count in idle.items() if not count]
    if without:
        yield Finding(
            "idle-instances", "info", f"group {group}",
            f"{len(without)} of {len(states)} instances have no queue: there are more instances than queues.",
            {"client_ids": without, "instances": len(states)},
            "Add queues to the topic, or stop the instances that have none.",
        )  # fmt: skip


def _shares(group: str, topic: str, shares: Mapping[str, int]) -> Iterator[Finding]:
    largest, smallest = max(shares.values(), default=0), min(shares.values(), default=0)
    if largest > smallest + 1:
        yield Finding(
            "uneven-shares", "warning", f"group {group}, topic {topic}",
            f"One instance has {largest} queues, another {smallest}.", {"queues_by_client_id": dict(shares)},
            "Check the allocation strategy: the shares of allocate_averagely differ by at most one.",
        )  # fmt: skip


def _owned(
    group: str, topic: str, owners: Mapping[int, list[str]], waiting: Mapping[tuple[str, str, int], int]
) -> Iterator[Finding]:
    unowned = [queue_id for queue_id, client_ids in owners.items() if not client_ids]
    doubled: dict[str, Any] = {
        str(queue_id): client_ids for queue_id, client_ids in owners.items() if len(client_ids) > 1
    }
    if unowned:
        unread = sum(waiting.get((group, topic, queue_id), 0) for queue_id in unowned)
        yield Finding(
            "queues-without-owner", "error", f"group {group}, topic {topic}",
            f"{len(unowned)} of {len(owners)} queues have no instance; {unread:,} messages wait there.",
            {"queue_ids": unowned, "lag": unread},
            "Check the allocation strategy, and whether all instances use the same one.",
        )  # fmt: skip
    if doubled:
        yield Finding(
            "queues-with-two-owners", "error", f"group {group}, topic {topic}",
            f"{len(doubled)} queues have more than one instance: their messages are delivered twice.",
            {"client_ids_by_queue_id": doubled},
            "Check the allocation strategy, and whether all instances use the same one.",
        )  # fmt: skip
