"""Listeners: the user's functions by topic and tag, the messages that they get, and subscriptions to these."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final

from librmq.client import Client
from librmq.errors import BrokerUnreachableError, ConfigError, NoRouteError
from librmq.filter import SQL92, TAG, TagFilter
from librmq.message import MessageQueue, StoredMessage
from librmq.message.properties import PropertyName
from librmq.message.topics import TopicPrefix, validate_client_topic
from librmq.override import override
from librmq.protocol import CheckSubscription, Subscription

_ORIGIN_MESSAGE_ID: Final = PropertyName.ORIGIN_MESSAGE_ID.encode()
_RETRY_TOPIC: Final = PropertyName.RETRY_TOPIC.encode()
_TRANSACTION_PREPARED: Final = PropertyName.TRANSACTION_PREPARED.encode()


class DeliveredMessage(StoredMessage):
    """A message that was pulled from a queue. Thread-safe.

    Equal to the `StoredMessage` of the same record. Mirrors the additions of ``PullAPIWrapper`` and
    ``DefaultMQPushConsumerImpl.resetRetryAndNamespace`` to a ``MessageExt``.
    """

    __slots__ = (
        "_all_properties", "_bounds", "_held_size", "_more_times", "consume_start_timestamp_ms", "queue", "queue_offset"
    )  # fmt: skip

    queue_offset: int
    """The number of the message's entry in the queue."""
    _all_properties: dict[str, str]
    _held_size: int
    """The length of the stored body, while a `ProcessQueue` holds it."""

    def __init__(self, raw: bytes, queue: MessageQueue, queue_offset: int, bounds: tuple[int, int]) -> None:
        """``raw`` is a whole record; ``bounds`` are the minimum and maximum offset of the queue at the pull."""
        self.raw = raw
        self.queue: MessageQueue = queue
        """The pulled queue; for a redelivery a queue of the group's retry topic."""
        self.queue_offset = queue_offset
        self.consume_start_timestamp_ms: int | None = None
        """When a concurrent listener got the message."""
        self._bounds = bounds
        self._more_times = 0

    @property
    @override
    def topic(self) -> str:
        """The topic that the message was sent to, even for a redelivery."""
        topic = self.queue.topic
        if topic.startswith(TopicPrefix.RETRY):
            return self._property(_RETRY_TOPIC) or topic
        return topic

    @property
    def broker_name(self) -> str:
        """The broker that the message was pulled from."""
        return self.queue.broker_name

    @property
    def min_offset(self) -> int:
        """The minimum offset of the queue at the time of the pull."""
        return self._bounds[0]

    @property
    def max_offset(self) -> int:
        """The maximum offset of the queue at the time of the pull."""
        return self._bounds[1]

    @property
    @override
    def reconsume_times(self) -> int:
        """How often the group has failed on this message, including failures since the pull."""
        return super().reconsume_times + self._more_times

    def _count_failure(self) -> None:
        """Count a failure after which this consumer keeps the message."""
        self._more_times += 1

    @property
    def origin_message_id(self) -> str:
        """The id of the first record of the message; its own unless it was sent back."""
        return self._property(_ORIGIN_MESSAGE_ID) or self.message_id

    @property
    def transaction_id(self) -> str | None:
        """The id of the transaction that sent it, None without one."""
        return self.unique_key if (self._property(_TRANSACTION_PREPARED) or "").lower() == "true" else None

    @property
    @override
    def properties(self) -> Mapping[str, str]:
        """All properties, with MIN_OFFSET, MAX_OFFSET and CONSUME_START_TIME, which a client of 4.9 adds."""
        try:
            return self._all_properties
        except AttributeError:
            properties = dict(super().properties)
            properties[PropertyName.MIN_OFFSET] = str(self._bounds[0])
            properties[PropertyName.MAX_OFFSET] = str(self._bounds[1])
            if self.consume_start_timestamp_ms is not None:
                properties[PropertyName.CONSUME_START_TIME] = str(self.consume_start_timestamp_ms)
            self._all_properties = properties
            return properties

    @override
    def __reduce__(self) -> tuple[type[DeliveredMessage], tuple[bytes, MessageQueue, int, tuple[int, int]]]:  # type: ignore[override]
        return DeliveredMessage, (self.raw, self.queue, self.queue_offset, self._bounds)

    @override
    def __repr__(self) -> str:
        return super().__repr__().replace("StoredMessage", "DeliveredMessage", 1)


def delivered_messages(
    records: Sequence[bytes], queue: MessageQueue, offsets: Iterable[int], bounds: tuple[int, int]
) -> list[DeliveredMessage]:
    """Return the messages of records at ``offsets``, in less time than one by one."""
    messages = [*map(DeliveredMessage.__new__, repeat(DeliveredMessage, len(records)))]
    for message, raw, queue_offset in zip(messages, records, offsets, strict=True):
        message.raw = raw
        message.queue_offset = queue_offset
        message.queue, message._bounds = queue, bounds
        message.consume_start_timestamp_ms, message._more_times = None, 0
    return messages


MessageListener = Callable[[DeliveredMessage], object | Awaitable[object]]
"""A listener for one message at a time."""

BatchListener = Callable[[list[DeliveredMessage]], object | Awaitable[object]]
"""A listener for up to ``batch_size`` messages at a time."""


class OrderlyResult(enum.Enum):
    """Result of an orderly listener that commits several calls together. Mirrors manual commits in 4.9."""

    HOLD = "HOLD"
    """Continue, but count nothing as consumed before a COMMIT or a plain return."""
    COMMIT = "COMMIT"
    """Count everything since the last commit as consumed."""
    ROLLBACK = "ROLLBACK"
    """After a pause deliver everything since the last commit again, without counting a failure."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A function that gets messages of a topic."""

    function: Callable[[Any], Any]
    as_list: bool
    must_return: bool
    is_async: bool
    weight: int | None = None
    """Share of the calls while messages wait for a thread; None, which counts as 1, if the subscription names none."""
    is_sql: bool = False
    """Whether its messages are selected by an SQL92 expression."""


class Listeners:
    """The listeners of one consumer. A topic has one for all its messages, or several for disjoint tags.

    With weights one of several can get the rest of the topic.
    """

    def __init__(self) -> None:
        # Listeners by tag; None: all other messages of the topic.
        self._by_topic: dict[str, dict[str | None, Listener]] = {}
        self.are_weighted: bool = False
        """Whether they have different weights."""

    @property
    def are_async(self) -> bool:
        return any(listener.is_async for by_tag in self._by_topic.values() for listener in by_tag.values())

    def register(self, topic: str, tags: frozenset[str], listener: Listener) -> frozenset[str]:
        """Add a listener for some tags of a topic, or for all of it or its rest.

        Return all tags with a listener of the topic; none if one listener gets the rest.
        """
        present = self._by_topic.get(topic, {})
        new_tags: set[str | None] = set(tags) or {None}
        others = [*present.values(), listener] if present else []
        shares_rest = any(other.weight for other in others) and not any(other.is_sql for other in others)
        has_rest = None in present or None in new_tags
        if present and (not new_tags.isdisjoint(present) or (has_rest and not shares_rest)):
            shared = sorted(tag for tag in new_tags & present.keys() if tag is not None)
            what = f"tag {shared[0]!r} of topic {topic!r}" if shared else f"topic {topic!r}"
            raise ConfigError(
                f"{what} has a listener already: unsubscribe({topic!r}) first, or give each listener its own tags"
            )
        self._by_topic[topic] = {**present, **dict.fromkeys(new_tags, listener)}
        self._compare_weights()
        tags_with_listener = frozenset(tag for tag in self._by_topic[topic] if tag is not None)
        return frozenset() if None in self._by_topic[topic] else tags_with_listener

    def unregister(self, topic: str) -> None:
        self._by_topic.pop(topic, None)
        self._compare_weights()

    def _compare_weights(self) -> None:
        weights = {listener.weight or 1 for by_tag in self._by_topic.values() for listener in by_tag.values()}
        self.are_weighted = len(weights) > 1

    def listener_for(self, topic: str, message: DeliveredMessage) -> Listener | None:
        """Return the listener of a message; None where the topic, or the message's tag, has none."""
        by_tag = self._by_topic.get(topic)
        if by_tag is None:
            return None
        others = by_tag.get(None)
        return others if others is not None and len(by_tag) == 1 else by_tag.get(message.tags, others)

    def dead_letter_listener(self, message: DeliveredMessage) -> Listener | None:
        """Return the listener of dead letters for a redelivery; None without one, or with several.

        A dead letter that is given back comes again as a message of its first topic, to which no one here subscribes.
        """
        topics = [topic for topic in self._by_topic if topic.startswith(TopicPrefix.DEAD_LETTER)]
        listeners = {
            id(listener): listener for topic in topics if (listener := self.listener_for(topic, message)) is not None
        }
        return next(iter(listeners.values())) if len(listeners) == 1 else None

    def without_batches(self) -> str | None:
        """Return a topic with a listener for single messages; None if all listeners get lists."""
        for topic, by_tag in self._by_topic.items():
            if not all(listener.as_list for listener in by_tag.values()):
                return topic
        return None

    def sole_listener(self, topic: str) -> Listener | None:
        by_tag = self._by_topic.get(topic, {})
        return next(iter(by_tag.values()), None) if _has_one_listener(by_tag) else None

    def share_batches(self, topic: str, is_retry: bool) -> bool:
        """Return whether one listener gets all messages of a queue, so that they can share a batch."""
        if is_retry:  # A retry topic has messages of all topics.
            return len(self._by_topic) == 1 and all(map(_has_one_listener, self._by_topic.values()))
        return _has_one_listener(self._by_topic.get(topic, {}))


def _has_one_listener(by_tag: dict[str | None, Listener]) -> bool:
    return len(by_tag) <= 1 or len(set(map(id, by_tag.values()))) == 1


# ---- subscriptions


def make_subscription(
    topic: str, tags: str | None, sql: str | None, version: int
) -> tuple[Subscription, TagFilter | None]:
    """Return a subscription, and the exact check of its tags if it has any."""
    validate_client_topic(topic)
    if tags is not None and sql is not None:
        raise ConfigError(f"topic {topic!r}: expected tags or sql, found both: give either tags or sql")
    for name, value in (("tags", tags), ("sql", sql)):
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"topic {topic!r}: {name}: expected text, found {value!r:.80}")
    if sql is not None:
        from librmq.filter import SqlFilter  # loads a grammar

        SqlFilter(sql)
        return Subscription(topic, sql, SQL92, version), None
    tag_filter = TagFilter(tags)
    return Subscription(topic, tag_filter.expression, TAG, version), tag_filter if tag_filter.tags else None


def check_at_brokers(client: Client, group: str, subscription: Subscription) -> None:
    """Check that each reachable broker serves an SQL subscription; raise `BrokerError` if one does not."""
    if subscription.expression_type == TAG:
        return
    request = CheckSubscription(client.client_id, group, subscription)
    for name in client.route.broker_names():
        with suppress(BrokerUnreachableError, NoRouteError):
            client.route.endpoint(name).call(request)
