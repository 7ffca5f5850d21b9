"""Requests of operators and tools to a broker."""

from __future__ import annotations

from collections.abc import Mapping

from librmq.message.message import MessageQueue, StoredMessage
from librmq.message.topics import TopicType
from librmq.protocol.endpoint import PERM_READ, PERM_WRITE, Request, value


@value
class CreateTopic(Request[None]):
    """Create a topic, or change its queues and permission; stored messages do not move."""

    topic: str
    read_queues: int = 8
    write_queues: int = 8
    permission: int = PERM_READ | PERM_WRITE
    message_type: TopicType | None = None
    """What official clients of 5.x may send; None leaves it as it is, MIXED for a new topic."""
    unless_exists: bool = False
    """Whether an existing topic stays as it is."""


@value
class DeleteTopic(Request[None]):
    """Remove a topic with its queue counts and permission. Its messages stay until retention deletes them."""

    topic: str


@value
class CleanUnusedTopics(Request[tuple[tuple[str, int], ...]]):
    """Delete the queue files of removed topics whose messages have left the log.

    Return the queues as topic and queue id.
    """


@value
class SetGroup(Request[None]):
    """Create a consumer group, or change it."""

    group: str
    settings: Mapping[str, object]
    """By their names in ``subscriptionGroup.json``; omitted settings keep their values."""


@value
class DeleteGroup(Request[None]):
    """Remove a consumer group's settings and, if wanted, its progress; a later heartbeat makes it again."""

    group: str
    removes_progress: bool = False


@value
class ViewMessage(Request["StoredMessage | None"]):
    """Return the message at a physical offset."""

    physical_offset: int


@value
class QueryMessages(Request[tuple[StoredMessage, ...]]):
    """Return messages of a topic by key or unique id, in log order, at most 64."""

    topic: str
    key: str
    max_messages: int = 64
    begin_ms: int = 0
    end_ms: int = (1 << 63) - 1


@value
class ResetGroup(Request[Mapping[MessageQueue, int]]):
    """Move a running group's progress on a topic to a time (ms; -1 is the end), and return the new offsets by queue.

    ``force`` moves forward too.

    Raises:
        BrokerError: The group lacks progress in a queue (SYSTEM_ERROR), or no client of it runs (CONSUMER_NOT_ONLINE).
    """

    group: str
    topic: str
    timestamp_ms: int
    force: bool = True
