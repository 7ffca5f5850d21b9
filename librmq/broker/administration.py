"""Administration: topics, groups, and searches for messages.

Mirrors the useful part of ``AdminBrokerProcessor`` and ``QueryMessageProcessor``.
"""

from __future__ import annotations

from typing import Final

from librmq.broker.context import BrokerContext
from librmq.errors import CorruptionError
from librmq.message.message import StoredMessage
from librmq.message.topics import is_system_topic
from librmq.protocol import (
    CleanUnusedTopics,
    CreateTopic,
    DeleteGroup,
    DeleteTopic,
    QueryMessages,
    SetGroup,
    ViewMessage,
)
from librmq.scheduling.relay import HOP_TOPIC

_MAX_RESULTS: Final = 64


class Administration:
    """The tables and messages of one broker. Changes need the runner's lock."""

    def __init__(self, context: BrokerContext) -> None:
        self._store = context.store
        self._offsets = context.offsets
        self._topics = context.topics
        self._groups = context.groups

    def create_topic(self, request: CreateTopic) -> None:
        """Make or change a topic."""
        if request.unless_exists and request.topic in self._topics.by_name:
            return
        self._topics.set(
            request.topic, request.read_queues, request.write_queues, request.permission, request.message_type
        )

    def delete_topic(self, request: DeleteTopic) -> None:
        """Delete a topic from the table."""
        self._topics.delete(request.topic)

    def clean_unused_topics(self, request: CleanUnusedTopics) -> tuple[tuple[str, int], ...]:
        """Delete the queue files of topics that do not exist, and the groups' progress in them."""
        store, topics = self._store, self._topics.by_name.keys() | {HOP_TOPIC}
        unused = [name for name in store.queues if name[0] not in topics and not is_system_topic(name[0])]
        try:
            return tuple(store.clean_unused_topics(topics))
        finally:  # also for the queues before one that the disk refuses
            for topic, queue_id in unused:
                if not store.queue_range(topic, queue_id)[1]:
                    self._offsets.delete_queue(topic, queue_id)

    def set_group(self, request: SetGroup) -> None:
        """Make a consumer group, or change it."""
        self._groups.set(request.group, request.settings)

    def delete_group(self, request: DeleteGroup) -> None:
        """Delete a consumer group, with its progress if that is asked for."""
        self._groups.delete(request.group)
        if request.removes_progress:
            self._offsets.drop_group(request.group)

    def view_message(self, request: ViewMessage) -> StoredMessage | None:
        """Return the message at a physical offset."""
        try:
            return self._store.message_at(request.physical_offset)
        except CorruptionError:
            return None  # no record begins there

    def query_messages(self, request: QueryMessages) -> tuple[StoredMessage, ...]:
        """Return messages by key: at most 64, as in 4.9."""
        limit = min(request.max_messages, _MAX_RESULTS)
        messages = self._store.find_by_key(request.topic, request.key, request.begin_ms, request.end_ms, limit)
        return tuple(messages)
