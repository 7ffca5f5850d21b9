"""Administration: topics, groups and searches for messages, for operators and tools.

Mirrors the useful part of ``AdminBrokerProcessor`` and ``QueryMessageProcessor``.
"""

from __future__ import annotations

from typing import Final

from librmq.broker._context import BrokerContext, BrokerPart
from librmq.errors import CorruptionError
from librmq.message import StoredMessage
from librmq.message.topics import has_no_row, moved_keys
from librmq.protocol import (
    CleanUnusedTopics,
    CreateTopic,
    DeleteExpiredFiles,
    DeleteGroup,
    DeleteTopic,
    DescribeTopics,
    QueryMessages,
    QueueData,
    SetGroup,
    ViewMessage,
)
from librmq.runtime.event_log import EventLog

_MAX_RESULTS: Final = 64

_log = EventLog("librmq.broker")


class Administration(BrokerPart):
    """The tables and messages of one broker. Changes need the runner's lock."""

    def __init__(self, context: BrokerContext) -> None:
        super().__init__(context)
        self._flushing = context.flushing
        self._locks = context.locks
        self._locks._noted_group = self._report_to_late_group
        self._known_queues: dict[str, dict[str, int]] = {}  # queues at the last lock, by topic that grew and group

    def create_topic(self, request: CreateTopic) -> None:
        """Make or change a topic. Growth that breaks the order of keys for a group is logged."""
        old = self._topics.by_name.get(request.topic)
        if request.unless_exists and old is not None:
            return
        self._topics.change_topic(request)
        if old is not None and 0 < old.write_queues < request.write_queues:
            self._report_moved_keys(old.name, old.write_queues, request.write_queues)

    def _report_moved_keys(self, topic: str, before: int, after: int) -> None:
        """Log the share of keys that move to another queue, if the topic has messages and a group reads it in order."""
        groups = self._orderly_groups(topic)
        ranges = (self._store.queue_range(topic, queue_id) for queue_id in range(before))
        if not any(begin < end for begin, end in ranges):
            return
        queues_before = self._known_queues.setdefault(topic, {})
        for group in self._offsets.groups(topic):
            if group not in groups:
                queues_before.setdefault(group, before)
        self._warn_of_moved_keys(topic, before, after, groups)

    def _report_to_late_group(self, topic: str, group: str) -> None:
        """Log all growth of a topic, after the broker's start, of which a group with progress locks a queue first."""
        before = self._known_queues.get(topic, {}).pop(group, None)
        config = self._topics.by_name.get(topic)
        if before is not None and config is not None and before < config.write_queues:
            self._warn_of_moved_keys(topic, before, config.write_queues, {group})

    def _warn_of_moved_keys(self, topic: str, before: int, after: int, groups: set[str]) -> None:
        if groups:
            _log.warning(
                "topic %(topic)s grows from %(before)d to %(after)d queues: %(_share).0f %% of the keys that select "
                "their queue by hash move to another one, so %(groups)s, reading in order, can get new messages of a "
                "key before its old ones; with select_by_consistent_hash %(_ring_share).0f %% move",
                topic=topic,
                before=before,
                after=after,
                groups=", ".join(sorted(groups)),
                moved_keys=round(moved_keys(before, after), 4),
                _share=100 * moved_keys(before, after),
                _ring_share=100 * (1 - before / after),
            )

    def _orderly_groups(self, topic: str) -> set[str]:
        """Return the groups that read a topic in order: by locks since the broker's start, or by their settings."""
        readers = {group.name for group in self._clients.consumers.values() if topic in group.subscriptions}
        readers.update(self._offsets.groups(topic))
        by_name = self._groups.by_name
        by_settings = {name for name in readers if name in by_name and by_name[name].is_ordered}
        return by_settings | self._locks._groups_by_topic.get(topic, set())

    def delete_topic(self, request: DeleteTopic) -> None:
        self._topics.delete(request.topic)
        self._known_queues.pop(request.topic, None)

    def clean_unused_topics(self, request: CleanUnusedTopics) -> tuple[tuple[str, int], ...]:
        store, topics = self._store, self._topics.by_name
        unused = [name for name in store.queues if name[0] not in topics and not has_no_row(name[0])]
        try:
            return tuple(store.clean_unused_topics(topics))
        finally:  # the queues before one that the disk refuses are gone too
            for topic, queue_id in unused:
                if not store.queue_range(topic, queue_id)[1]:
                    self._offsets.delete_queue(topic, queue_id)

    def delete_expired_files(self, request: DeleteExpiredFiles) -> None:
        self._store.delete_expired()
        if self._flushing is not None:
            self._runner.wake(self._flushing)

    def describe_topics(self, request: DescribeTopics) -> dict[str, QueueData]:
        return {name: config.at(self._broker_name) for name, config in self._topics.by_name.items()}

    def set_group(self, request: SetGroup) -> None:
        self._groups.change_group(request.group, request.settings, request.like)

    def delete_group(self, request: DeleteGroup) -> None:
        self._groups.delete(request.group)
        if request.removes_progress:
            self._offsets.drop_group(request.group)
            self._offsets.saving.save()

    def view_message(self, request: ViewMessage) -> StoredMessage | None:
        try:
            return self._store.message_at(request.physical_offset)
        except CorruptionError:
            return None  # no record begins there

    def query_messages(self, request: QueryMessages) -> tuple[StoredMessage, ...]:
        limit = max(0, min(request.max_messages, _MAX_RESULTS))  # a client can ask for less than none
        bounds = request.begin_ms, request.end_ms
        store, is_unique = self._store, request.is_unique
        return tuple(store.find_by_key(request.topic, request.key, *bounds, limit, is_unique=is_unique))
