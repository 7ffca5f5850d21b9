"""A queue of a topic, as clients and brokers name it. Mirrors ``MessageQueue``."""

from __future__ import annotations

from typing import NamedTuple

from librmq.java.lang import string_hash, utf16_order


class MessageQueue(NamedTuple):
    """One queue of a topic on one broker. Sorts as in RocketMQ: strings by UTF-16 units."""

    topic: str
    """The topic."""
    broker_name: str
    """Name of the broker."""
    queue_id: int
    """Number of the queue at its broker, from 0."""

    @property
    def java_hash(self) -> int:
        """Return ``hashCode()`` of RocketMQ's class."""
        code = 31 + string_hash(self.broker_name)
        code = 31 * code + self.queue_id
        code = 31 * code + string_hash(self.topic)
        return ((code & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000

    def __str__(self) -> str:
        """Return RocketMQ's text, which consistent hashing depends on."""
        return f"MessageQueue [topic={self.topic}, brokerName={self.broker_name}, queueId={self.queue_id}]"

    def sort_key(self) -> tuple[str, str, int]:
        """Return the key by which queues compare; with it, sorting many queues is faster."""
        return utf16_order(self.topic), utf16_order(self.broker_name), self.queue_id

    def __lt__(self, other: object) -> bool:
        return self.sort_key() < other.sort_key() if isinstance(other, MessageQueue) else NotImplemented

    def __le__(self, other: object) -> bool:
        return self.sort_key() <= other.sort_key() if isinstance(other, MessageQueue) else NotImplemented

    def __gt__(self, other: object) -> bool:
        return self.sort_key() > other.sort_key() if isinstance(other, MessageQueue) else NotImplemented

    def __ge__(self, other: object) -> bool:
        return self.sort_key() >= other.sort_key() if isinstance(other, MessageQueue) else NotImplemented
