"""Heartbeats of clients that share an id.

A connection belongs to an id, and a broker takes the last heartbeat of a connection for all that its client does. So
clients of one id, such as the producer and the consumer of one ``instance_name``, send theirs as one, as Java's
`MQClientInstance` does for the producers and consumers of its process.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

from librmq.errors import ClientStateError
from librmq.protocol import (
    CheckTransaction,
    ConsumeDirectly,
    ConsumerOffsets,
    ConsumersChanged,
    DescribeInstance,
    Endpoint,
    Heartbeat,
    Request,
    ResetOffsets,
    SaveProgress,
    Unregister,
)

_R = TypeVar("_R")
_OF_CONSUMERS = ConsumersChanged | ResetOffsets | ConsumerOffsets | SaveProgress | DescribeInstance | ConsumeDirectly


class _ClientsOfOneId:
    """Passes a request on to the client of its group; one without a group goes to all."""

    def __init__(self, heartbeats: Iterable[Heartbeat]) -> None:
        self.heartbeats = tuple(heartbeats)

    def call(self, request: Request[_R], /) -> _R:
        answers = [beat.client.call(request) for beat in self.heartbeats if _is_for(request, beat)]
        if not answers:
            raise ClientStateError(f"{self.heartbeats[0].client_id} is in no group that {request} names")
        return answers[-1]


def join(before: Heartbeat | None, heartbeat: Heartbeat) -> Heartbeat:
    """Return what an id stands for after a heartbeat, which takes its groups over from other clients of the id."""
    others = [] if before is None else [part for part in _parts(before) if part.client is not heartbeat.client]
    for group in heartbeat.producer_groups:
        others = [left for part in others if (left := leave(part, Unregister(part.client_id, group)))]
    for data in heartbeat.consumers:
        leaving = Unregister(heartbeat.client_id, consumer_group=data.group)
        others = [left for part in others if (left := leave(part, leaving))]
    return _joined([*others, *_parts(heartbeat)])


def leave(heartbeat: Heartbeat, request: Unregister) -> Heartbeat | None:
    """Return a heartbeat without the group that its client leaves; None if it has no other."""
    left = []
    for part in _parts(heartbeat):
        producers = part.producer_groups - {request.producer_group}
        consumers = tuple(data for data in part.consumers if data.group != request.consumer_group)
        if producers or consumers:
            left.append(replace(part, producer_groups=producers, consumers=consumers))
    return _joined(left) if left else None


def _parts(heartbeat: Heartbeat) -> tuple[Heartbeat, ...]:
    client: Endpoint = heartbeat.client
    return client.heartbeats if isinstance(client, _ClientsOfOneId) else (heartbeat,)


def _joined(parts: list[Heartbeat]) -> Heartbeat:
    if len(parts) == 1:
        return parts[0]
    checking = [part.checking_groups for part in parts if part.checking_groups is not None]
    return Heartbeat(
        parts[0].client_id,
        _ClientsOfOneId(parts),
        frozenset[str]().union(*(part.producer_groups for part in parts)),
        tuple(data for part in parts for data in part.consumers),
        reduce(frozenset.union, checking) if checking else None,
    )


def _is_for(request: Request[Any], heartbeat: Heartbeat) -> bool:
    if isinstance(request, CheckTransaction):
        return request.group in heartbeat.producer_groups
    if isinstance(request, _OF_CONSUMERS):
        return any(data.group == request.group for data in heartbeat.consumers)
    return True
