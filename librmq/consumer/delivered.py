"""Message as a consumer sees it: the stored record, and how it came here.

Mirrors what ``PullAPIWrapper`` and ``DefaultMQPushConsumerImpl.resetRetryAndNamespace`` add to a ``MessageExt``.
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

__all__ = ["DeliveredMessage"]

_ORIGIN_MESSAGE_ID: Final = PROPERTY_ORIGIN_MESSAGE_ID.encode()
_RETRY_TOPIC: Final = PROPERTY_RETRY_TOPIC.encode()
_TRANSACTION_PREPARED: Final = PROPERTY_TRANSACTION_PREPARED.encode()


class DeliveredMessage(StoredMessage):
    """A message that was pulled from a queue. Thread-safe.

    Equal to the `StoredMessage` of the same record.
    """

    __slots__ = ("_bounds", "_more_times", "_shown", "consume_start_timestamp_ms", "queue", "queue_offset")

    queue_offset: int
    """The entry of the queue that belongs to the message."""
    _shown: dict[str, str]

    def __init__(self, raw: bytes, queue: MessageQueue, queue_offset: int, bounds: tuple[int, int]) -> None:
        """``bounds`` are the minimum and maximum offset of the queue when it was pulled."""
        self.raw = raw
        self.queue = queue
        """Where it was pulled from; for a redelivery a queue of the group's retry topic."""
        self.queue_offset = queue_offset
        self.consume_start_timestamp_ms: int | None = None
        """When a concurrent listener was given it."""
        self._bounds = bounds
        self._more_times = 0

    @property
    def topic(self) -> str:
        """The topic that it was sent to, for a redelivery too."""
        topic = self.queue.topic
        if topic.startswith(RETRY_PREFIX):
            return self._property(_RETRY_TOPIC) or topic
        return topic

    @property
    def broker_name(self) -> str:
        """The broker that it was pulled from."""
        return self.queue.broker_name

    @property
    def min_offset(self) -> int:
        """The queue's oldest offset when it was pulled."""
        return self._bounds[0]

    @property
    def max_offset(self) -> int:
        """The queue's next offset when it was pulled."""
        return self._bounds[1]

    @property
    def reconsume_times(self) -> int:
        """Failures of the group on this message, those since it was pulled included."""
        return super().reconsume_times + self._more_times

    def failed_again(self) -> None:
        """Count a failure after which it stays here."""
        self._more_times += 1

    @property
    def origin_message_id(self) -> str:
        """The id under which it was first stored; of a message that was never sent back, its own."""
        return self._property(_ORIGIN_MESSAGE_ID) or self.message_id

    @property
    def transaction_id(self) -> str | None:
        """The id of the transaction that sent it, if one did."""
        return self.unique_key if (self._property(_TRANSACTION_PREPARED) or "").lower() == "true" else None

    @property
    def properties(self) -> Mapping[str, str]:
        """All properties, with MIN_OFFSET, MAX_OFFSET and CONSUME_START_TIME as a client of 4.9 adds them."""
        try:
            return self._shown
        except AttributeError:
            shown = dict(super().properties)
            shown[PROPERTY_MIN_OFFSET] = str(self._bounds[0])
            shown[PROPERTY_MAX_OFFSET] = str(self._bounds[1])
            if self.consume_start_timestamp_ms is not None:
                shown[PROPERTY_CONSUME_START_TIME] = str(self.consume_start_timestamp_ms)
            self._shown = shown
            return shown

    def __reduce__(self) -> tuple[type[DeliveredMessage], tuple[bytes, MessageQueue, int, tuple[int, int]]]:  # type: ignore[override]
        return DeliveredMessage, (self.raw, self.queue, self.queue_offset, self._bounds)

    def __repr__(self) -> str:
        return super().__repr__().replace("StoredMessage", "DeliveredMessage", 1)
