"""Typed answers of a broker's methods about its clients and groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from librmq.protocol import ConsumeFrom, MessageModel, Subscription


@dataclass(frozen=True, slots=True)
class ConnectedClient:
    """A client that the broker knows from its heartbeats."""

    client_id: str
    """Id of the client."""
    producer_groups: tuple[str, ...]
    """Sorted."""
    consumer_groups: tuple[str, ...]
    """Sorted."""


@dataclass(frozen=True, slots=True)
class GroupConnections:
    """The running instances of a consumer group."""

    group: str
    """Name of the group."""
    kind: str
    """``push`` or ``pull``."""
    model: MessageModel
    """Whether the instances share the messages, or each gets all."""
    consume_from: ConsumeFrom
    """Where a queue without progress begins."""
    subscriptions: Mapping[str, Subscription]
    """The group's subscriptions by topic."""
    client_ids: tuple[str, ...]
    """Client ids in the order in which the instances joined."""
    subscriptions_by_client: Mapping[str, Mapping[str, Subscription]]
    """The subscriptions of each instance, by topic."""
