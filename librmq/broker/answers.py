"""Typed answers of a broker's methods about its clients and groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from librmq.protocol import ConsumeFrom, MessageModel, Subscription

__all__ = ["ConnectedClient", "GroupConnections"]


@dataclass(frozen=True, slots=True)
class ConnectedClient:
    """A client that the broker knows by its heartbeats."""

    client_id: str
    producer_groups: tuple[str, ...]
    """Sorted."""
    consumer_groups: tuple[str, ...]
    """Sorted."""


@dataclass(frozen=True, slots=True)
class GroupConnections:
    """The running instances of a consumer group."""

    group: str
    kind: str
    """``push`` or ``pull``."""
    model: MessageModel
    consume_from: ConsumeFrom
    subscriptions: Mapping[str, Subscription]
    """By topic, as the group has them."""
    client_ids: tuple[str, ...]
    """In the order in which the instances came."""
    told: Mapping[str, Mapping[str, Subscription]]
    """The subscriptions of each instance, by client id and topic."""
