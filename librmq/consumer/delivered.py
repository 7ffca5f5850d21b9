"""A message as a consumer sees it: the stored record, and how it was delivered.

Mirrors the additions of ``PullAPIWrapper`` and ``DefaultMQPushConsumerImpl.resetRetryAndNamespace`` to a
``MessageExt``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from librmq.message.message import MessageQueue, StoredMessage
from librmq.message.record import (
    PROPERTY_CONSUME_START_TIME,
    PROPERTY_MAX_OFFSET,
    PROPERTY_MIN_OFFSET,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_TRANSACTION_PREPARED,
)
from librmq.message.topics import RETRY_PREFIX

_ORIGIN_MESSAGE_ID: Final = PROPERTY_ORIGIN_MESSAGE_ID.encode()
_RETRY_TOPIC: Final = PROPERTY_RETRY_TOPIC.encode()
_TRANSACTION_PREPARED: Final = PROPERTY_TRANSACTION_PREPARED.encode()


class DeliveredMessage(StoredMessage):
    """A message that was pulled from a queue. Thread-safe.

    Equal to the `StoredMessage` of the same record.
    """

    __slots__ = ("_all_properties", "_bounds", "_more_times", "consume_start_timestamp_ms", "queue", "queue_offset")

    queue_offset: int
    """The number of the message's entry in the queue."""
    _all_properties: dict[str, str]

    def __init__(self, raw: bytes, queue: MessageQueue, queue_offset: int, bounds: tuple[int, int]) -> None:
        """``raw`` is a whole record; ``bounds`` are the minimum and maximum offset of the queue at the pull."""
        self.raw = raw
        self.queue = queue
        """The pulled queue; for a redelivery a queue of the group's retry topic."""
        self.queue_offset = queue_offset
        self.consume_start_timestamp_ms: int | None = None
        """When a concurrent listener got the message."""
        self._bounds = bounds
        self._more_times = 0

    @property
    def topic(self) -> str:
        """The topic that the message was sent to, even for a redelivery."""
        topic = self.queue.topic
        if topic.startswith(RETRY_PREFIX):
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
    def reconsume_times(self) -> int:
        """How often the group has failed on this message, including failures since the pull."""
        return super().reconsume_times + self._more_times

    def count_failure(self) -> None:
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
    def properties(self) -> Mapping[str, str]:
        """All properties, with MIN_OFFSET, MAX_OFFSET and CONSUME_START_TIME, which a client of 4.9 adds."""
        try:
            return self._all_properties
        except AttributeError:
            properties = dict(super().properties)
            properties[PROPERTY_MIN_OFFSET] = str(self._bounds[0])
            properties[PROPERTY_MAX_OFFSET] = str(self._bounds[1])
            if self.consume_start_timestamp_ms is not None:
                properties[PROPERTY_CONSUME_START_TIME] = str(self.consume_start_timestamp_ms)
            self._all_properties = properties
            return properties

    def __reduce__(self) -> tuple[type[DeliveredMessage], tuple[bytes, MessageQueue, int, tuple[int, int]]]:  # type: ignore[override]
        return DeliveredMessage, (self.raw, self.queue, self.queue_offset, self._bounds)

    def __repr__(self) -> str:
        return super().__repr__().replace("StoredMessage", "DeliveredMessage", 1)
