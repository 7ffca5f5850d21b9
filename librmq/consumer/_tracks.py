"""What became of a message in each group.

`message_tracks` answers as ``DefaultMQAdminExtImpl.messageTrackDetail`` does.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from librmq.consumer._listeners import DeliveredMessage
from librmq.errors import FilterEvaluationError, NoRouteError
from librmq.filter import SqlFilter, TagFilter
from librmq.message import StoredMessage
from librmq.protocol import (
    DescribeConnections,
    Endpoint,
    MessageModel,
    QueryOffset,
    Route,
    Subscription,
    TopicGroups,
)


class TrackType(enum.Enum):
    """Whether a group has consumed a message."""

    CONSUMED = "CONSUMED"
    """The group's progress is past it; a redelivery can still be waiting."""
    CONSUMED_BUT_FILTERED = "CONSUMED_BUT_FILTERED"
    """The group's progress is past it, but its subscription excludes it."""
    NOT_CONSUME_YET = "NOT_CONSUME_YET"
    """The group's progress has not reached it."""
    PULL = "PULL"
    """The instances are pull consumers; the broker does not know their results."""
    CONSUME_BROADCASTING = "CONSUME_BROADCASTING"
    """Each instance has progress of its own."""
    NOT_ONLINE = "NOT_ONLINE"
    """The group has progress in the topic, but no running instance."""


class MessageTrack(NamedTuple):
    """A group, and whether it has consumed a message."""

    group: str
    type: TrackType
    """Whether the group has consumed the message."""


def message_tracks(route: Route, message: StoredMessage, broker_name: str | None = None) -> list[MessageTrack]:
    """Return each group of the message's topic with its state, sorted by group.

    A route with several brokers needs ``broker_name`` unless ``message`` has it. As in 4.9, a message that was sent
    back, or that the group's current subscription excludes, counts as consumed.
    """
    endpoint = _endpoint(route, message, broker_name)
    groups = endpoint.call(TopicGroups(message.topic))
    return [MessageTrack(group, _track(endpoint, message, group)) for group in sorted(groups)]


def _endpoint(route: Route, message: StoredMessage, broker_name: str | None) -> Endpoint:
    if broker_name is None and isinstance(message, DeliveredMessage):
        broker_name = message.broker_name
    if broker_name is None:
        names = route.broker_names()
        if len(names) != 1:
            raise NoRouteError(f"broker_name: expected the message's broker, one of {', '.join(names) or 'none'}")
        broker_name = names[0]
    return route.endpoint(broker_name)


def _track(endpoint: Endpoint, message: StoredMessage, group: str) -> TrackType:
    running = endpoint.call(DescribeConnections(group))
    if running is None:
        return TrackType.NOT_ONLINE
    if running.kind == "pull":
        return TrackType.PULL
    if running.model is MessageModel.BROADCASTING:
        return TrackType.CONSUME_BROADCASTING
    progress = endpoint.call(QueryOffset(group, message.topic, message.queue_id))
    if progress is None or progress <= message.queue_offset:
        return TrackType.NOT_CONSUME_YET
    subscription = running.subscriptions.get(message.topic)
    if subscription is not None and not _selects(subscription, message):
        return TrackType.CONSUMED_BUT_FILTERED
    return TrackType.CONSUMED


def _selects(subscription: Subscription, message: StoredMessage) -> bool:
    if subscription.is_by_tags:
        return TagFilter(subscription.expression).matches(message.tags)
    try:
        return SqlFilter(subscription.expression).evaluate(message.properties) is True
    except FilterEvaluationError:
        return False
