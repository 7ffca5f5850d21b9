"""Differences between the subscriptions of one consumer group's instances. Clients use it too, without a broker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from librmq.java.lang import utf16_order
from librmq.protocol import Subscription


class TopicDifference(NamedTuple):
    """A topic for which the instances of a group have different subscriptions. Clients are sorted."""

    topic: str
    without: tuple[str, ...]
    """The clients that do not subscribe to it. They are allocated queues nevertheless, which stay unread."""
    subscriptions: tuple[tuple[Any, tuple[str, ...]], ...]
    """Each subscription with its clients. A message that the owner of its queue does not select is skipped."""

    def __str__(self) -> str:
        parts = [f"{', '.join(clients)}: {subscription}" for subscription, clients in self.subscriptions]
        if self.without:
            parts.append(f"{', '.join(self.without)}: not at all")
        return f"{self.topic} ({'; '.join(parts)})"


def group_differences(subscriptions: Mapping[str, Mapping[str, Any]]) -> list[TopicDifference]:
    """Return the topics with different subscriptions, sorted; empty if the instances fit together.

    ``subscriptions`` is ``{client id: {topic: subscription}}``. Subscriptions are compared by ``==``, so leave out
    harmless differences, such as versions.
    """
    clients = sorted(subscriptions, key=utf16_order)
    differences = []
    for topic in sorted({topic for topics in subscriptions.values() for topic in topics}, key=utf16_order):
        without = tuple(client for client in clients if topic not in subscriptions[client])
        kinds: list[tuple[Any, list[str]]] = []
        for client in clients:
            if topic in subscriptions[client]:
                subscription = subscriptions[client][topic]
                same = next((members for kind, members in kinds if kind == subscription), None)
                if same is None:
                    kinds.append((subscription, [client]))
                else:
                    same.append(client)
        if without or len(kinds) > 1:
            differences.append(
                TopicDifference(topic, without, tuple((kind, tuple(subscribers)) for kind, subscribers in kinds))
            )
    return differences


def describe_differences(group: str, subscriptions: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a sentence about the differences in ``group`` and the remedy; empty if there are none."""
    differences = group_differences(subscriptions)
    if not differences:
        return ""
    return (
        f"instances of group {group} differ on {'; '.join(map(str, differences))}. Queues stay unread or messages are "
        "skipped: give every instance the same subscriptions, or those that differ a new group name"
    )


def comparable(subscriptions: Mapping[str, Subscription]) -> dict[str, str]:
    """Return subscriptions by topic as `group_differences` compares them: without what may differ."""
    return {topic: _description(subscription) for topic, subscription in subscriptions.items()}


def _description(subscription: Subscription) -> str:
    if subscription.expression_type not in ("", "TAG"):
        return f"sql {subscription.expression!r}"
    return "all messages" if subscription.expression == "*" else f"tags {subscription.expression!r}"
