"""Find where the instances of one consumer group subscribe to different things."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from librmq.java.hashing import utf16_order
from librmq.protocol import Subscription

__all__ = ["TopicDifference", "comparable", "group_differences", "told_differences"]


class TopicDifference(NamedTuple):
    """A topic on which the instances of a group do not agree. Clients are sorted."""

    topic: str
    without: tuple[str, ...]
    """The clients that do not subscribe to it. Queues are allotted to them all the same, and stay unread."""
    subscriptions: tuple[tuple[Any, tuple[str, ...]], ...]
    """Each different subscription with its clients. A message that its queue's owner did not ask for is passed over."""

    def __str__(self) -> str:
        parts = [f"{', '.join(clients)}: {subscription}" for subscription, clients in self.subscriptions]
        if self.without:
            parts.append(f"{', '.join(self.without)}: not at all")
        return f"{self.topic} ({'; '.join(parts)})"


def group_differences(subscriptions: Mapping[str, Mapping[str, Any]]) -> list[TopicDifference]:
    """Return the topics on which the instances of a group differ, sorted; empty if they may work together.

    ``subscriptions`` is ``{client id: {topic: subscription}}``. Subscriptions are compared by ``==``, so leave out what
    may differ without harm, such as a version.
    """
    clients = sorted(subscriptions, key=utf16_order)
    differences = []
    for topic in sorted({topic for topics in subscriptions.values() for topic in topics}, key=utf16_order):
        without = tuple(client for client in clients if topic not in subscriptions[client])
        kinds: list[tuple[Any, list[str]]] = []
        for client in clients:
            if topic in subscriptions[client]:
                wanted = subscriptions[client][topic]
                same = next((members for kind, members in kinds if kind == wanted), None)
                if same is None:
                    kinds.append((wanted, [client]))
                else:
                    same.append(client)
        if without or len(kinds) > 1:
            differences.append(TopicDifference(topic, without, tuple((kind, tuple(who)) for kind, who in kinds)))
    return differences


def told_differences(group: str, subscriptions: Mapping[str, Mapping[str, Any]]) -> str:
    """Say on what the instances of ``group`` differ and what to do about it; empty where they do not."""
    differences = group_differences(subscriptions)
    if not differences:
        return ""
    return (
        f"instances of group {group} differ on {'; '.join(map(str, differences))}. Queues are left without a reader, "
        "or messages passed over: give every instance the same subscriptions, or those that differ a new group name"
    )


def comparable(subscriptions: Mapping[str, Subscription]) -> dict[str, str]:
    """Return subscriptions by topic as `group_differences` compares them: without what may differ."""
    return {topic: _in_words(subscription) for topic, subscription in subscriptions.items()}


def _in_words(subscription: Subscription) -> str:
    if subscription.expression_type not in ("", "TAG"):
        return f"sql {subscription.expression!r}"
    return "all messages" if subscription.expression == "*" else f"tags {subscription.expression!r}"
