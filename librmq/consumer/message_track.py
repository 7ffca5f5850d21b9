"""Fate of a message in each group, and dead letters sent again.

Mirrors ``DefaultMQAdminExtImpl.messageTrackDetail`` and ``TrackType``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

from librmq.broker.dead_letters import retry_of
from librmq.consumer.delivered import DeliveredMessage
from librmq.errors import FilterEvaluationError, NoRouteError
from librmq.filter import TAG, SqlFilter, TagFilter
from librmq.message.message import StoredMessage
from librmq.protocol import (
    ConsumerData,
    Endpoint,
    MessageModel,
    QueryOffset,
    Route,
    Subscription,
    TopicGroups,
)

__all__ = ["MessageTrack", "TrackType", "message_tracks", "resend_dead_letters"]


class TrackType(enum.Enum):
    """How far a group is with a message."""

    CONSUMED = "CONSUMED"
    """The group's progress is behind it; a redelivery may still wait."""
    CONSUMED_BUT_FILTERED = "CONSUMED_BUT_FILTERED"
    """Progress is behind it, but the group does not ask for it."""
    NOT_CONSUME_YET = "NOT_CONSUME_YET"
    PULL = "PULL"
    """Instances poll, and keep to themselves what they make of it."""
    CONSUME_BROADCASTING = "CONSUME_BROADCASTING"
    """Each instance has progress of its own."""
    NOT_ONLINE = "NOT_ONLINE"
    """The group has been there, but has no instance now."""


class MessageTrack(NamedTuple):
    """A group and how far it is with a message."""

    group: str
    type: TrackType


def message_tracks(route: Route, message: StoredMessage, broker_name: str | None = None) -> list[MessageTrack]:
    """Return what each group of the message's topic has done with it, sorted by group.

    ``broker_name`` is needed where the route has several brokers and ``message`` does not tell which has it. As in
    4.9, what was sent back counts as consumed, and so does what the group's present subscription leaves out.
    """
    endpoint = _endpoint(route, message, broker_name)
    topic = message.topic
    return [
        MessageTrack(name, _track(endpoint, message, name, data))
        for name, data in sorted(endpoint.call(TopicGroups(topic)).items())
    ]


def _endpoint(route: Route, message: StoredMessage, broker_name: str | None) -> Endpoint:
    if broker_name is None and isinstance(message, DeliveredMessage):
        broker_name = message.broker_name
    if broker_name is None:
        names = route.broker_names()
        if len(names) != 1:
            raise NoRouteError(f"which broker has the message? Known are {', '.join(names) or 'none'}")
        broker_name = names[0]
    return route.endpoint(broker_name)


def _track(endpoint: Endpoint, message: StoredMessage, group: str, data: ConsumerData | None) -> TrackType:
    if data is None:
        return TrackType.NOT_ONLINE
    if data.kind == "pull":
        return TrackType.PULL
    if data.model is MessageModel.BROADCASTING:
        return TrackType.CONSUME_BROADCASTING
    progress = endpoint.call(QueryOffset(group, message.topic, message.queue_id))
    if progress is None or progress <= message.queue_offset:
        return TrackType.NOT_CONSUME_YET
    subscription = data.subscriptions.get(message.topic)
    if subscription is not None and not _asks_for(subscription, message):
        return TrackType.CONSUMED_BUT_FILTERED
    return TrackType.CONSUMED


def _asks_for(subscription: Subscription, message: StoredMessage) -> bool:
    if subscription.expression_type in ("", TAG):
        return TagFilter(subscription.expression).matches(message.tags)
    try:
        return SqlFilter(subscription.expression).evaluate(message.properties) is True
    except FilterEvaluationError:
        return False


def resend_dead_letters(route: Route, letters: Iterable[StoredMessage], broker_name: str | None = None) -> int:
    """Send dead letters to their groups once more, with all their retries; gives their number.

    Each goes to the retry topic of the group that had given it up, so that no other group sees it, and is delivered at
    once. The dead letter stays where it is.
    """
    count = 0
    for letter in letters:
        _endpoint(route, letter, broker_name).call(retry_of(letter))
        count += 1
    return count
