"""Begins and ends of queues, progress of groups in them, and resets of groups.

Mirrors ``ConsumerManageProcessor``, and the part of ``AdminBrokerProcessor`` and ``Broker2Client`` about queue offsets.
Changes need the runner's lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Literal

from librmq.broker.context import BrokerContext
from librmq.config import suggest, to_timestamp_ms
from librmq.errors import BrokerError, ConfigError, RmqError
from librmq.message.message import MessageQueue
from librmq.protocol import (
    ConsumerData,
    ConsumerOffsets,
    MaxOffset,
    MessageModel,
    MinOffset,
    QueryOffset,
    QueueOffsetAt,
    ResetGroup,
    ResetOffsets,
    ResponseCode,
    TopicGroups,
    UpdateOffset,
)
from librmq.runtime.event_log import EventLog

_log = EventLog("librmq.broker")


class Progress:
    """The queue offsets of one broker."""

    def __init__(self, context: BrokerContext) -> None:
        self._store = context.store
        self._topics = context.topics
        self._groups = context.groups
        self._offsets = context.offsets
        self._registry = context.registry
        self._broker_name = context.name

    def query(self, request: QueryOffset) -> int | None:
        """Return a group's stored progress; without any, 0 if the whole queue exists and counts as in memory."""
        stored = self._offsets.get(request.group, request.topic, request.queue_id)
        if stored is not None:
            return stored
        store = self._store
        begin, end = store.queue_range(request.topic, request.queue_id)
        if begin > 0:
            return None
        if not end or not store.counts_as_on_disk(store.log.begin):
            return 0  # from the first message
        queue = store.queue(request.topic, request.queue_id)
        first = None if queue is None else queue.entry(0)
        return None if first is not None and store.counts_as_on_disk(first.physical_offset) else 0

    def update(self, request: UpdateOffset) -> None:
        """Store a group's progress."""
        self._offsets.set(request.group, request.topic, request.queue_id, request.queue_offset)

    def groups(self, request: TopicGroups) -> Mapping[str, ConsumerData | None]:
        """Return the groups of a topic."""
        groups: dict[str, ConsumerData | None] = dict.fromkeys(self._offsets.groups(request.topic))
        for group in self._registry.consumers.values():
            if request.topic in group.subscriptions:
                groups[group.name] = ConsumerData(
                    group.name, group.kind, group.model, group.consume_from, dict(group.subscriptions)
                )
            elif group.name in groups:
                groups[group.name] = ConsumerData(group.name, group.kind, group.model, group.consume_from, {})
        return groups

    def queue_end(self, request: MaxOffset) -> int:
        """Return the queue offset after the last message of a queue."""
        return self._store.queue_range(request.topic, request.queue_id)[1]

    def queue_begin(self, request: MinOffset) -> int:
        """Return the queue offset of the first message of a queue."""
        return self._store.queue_range(request.topic, request.queue_id)[0]

    def queue_offset_at(self, request: QueueOffsetAt) -> int:
        """Return the queue offset of the message stored nearest to a time."""
        return self._store.queue_offset_at(request.topic, request.queue_id, request.timestamp_ms)

    def _reset_to(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Move a running or stopped group's progress to queue offsets by queue id.

        Running instances are notified and continue from there; the stored progress is set as well.
        """
        by_queue = {
            MessageQueue(topic, self._broker_name, queue_id): queue_offset for queue_id, queue_offset in offsets.items()
        }
        members = self._registry.consumers.get(group)
        for client in [] if members is None else list(members.clients.values()):
            try:
                client.call(ResetOffsets(group, topic, by_queue))
            except RmqError as error:
                _log.info(
                    "group %(group)s: a leaving client was not notified of the reset: %(error)s",
                    group=group,
                    error=error,
                    topic=topic,
                )
        for queue_id, queue_offset in offsets.items():
            self._offsets.set(group, topic, queue_id, queue_offset)

    def move(
        self, group: str, topic: str, to: Literal["begin", "end"] | datetime | int, queue_id: int | None
    ) -> dict[int, int]:
        """Move a group's progress in all queues of a topic, or in one; return the queue offsets by queue id.

        Raises:
            ConfigError: ``to`` is none of these.
            BrokerError: The group, the topic or the queue does not exist.
        """
        topic_config = self._topics.by_name.get(topic)
        if topic_config is None:
            near = suggest(str(topic), self._topics.of_users())
            raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, f"topic {topic!r} does not exist; {near}")
        if group not in self._groups.by_name and group not in self._offsets.groups(topic):
            near = suggest(str(group), self._groups.of_users())
            raise BrokerError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"group {group!r} does not exist; {near} (set_group creates a group)",
            )
        if queue_id is not None and not 0 <= queue_id < topic_config.queues:
            raise BrokerError(
                ResponseCode.SYSTEM_ERROR, f"topic {topic!r} has {topic_config.queues} queues, but no queue {queue_id}"
            )
        queues = range(topic_config.queues) if queue_id is None else (queue_id,)
        offsets = {number: self._offset_of(topic, number, to) for number in queues}
        self._reset_to(group, topic, offsets)
        return offsets

    def _offset_of(self, topic: str, queue_id: int, to: str | datetime | int) -> int:
        begin, end = self._store.queue_range(topic, queue_id)
        if isinstance(to, datetime) and to.tzinfo is not None:
            return self._offset_from(topic, queue_id, to_timestamp_ms("to", to))
        if type(to) is int and to >= 0:
            return min(max(to, begin), end)
        if to in ("begin", "end"):
            return begin if to == "begin" else end
        raise ConfigError(
            f"to: expected 'begin', 'end', a time with a time zone or a queue offset of at least 0, found {to!r:.80}"
        )

    def _offset_from(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """Return the queue offset of the first message stored at or after a time; the end if there is none."""
        begin, end = self._store.queue_range(topic, queue_id)
        first = max(self._store.queue_offset_at(topic, queue_id, timestamp_ms), begin)
        message = next(self._store.messages(topic, queue_id, first, min(first + 1, end)), None) if end > first else None
        return first if message is None or message.store_timestamp_ms >= timestamp_ms else first + 1

    def behind(self) -> list[str]:
        """Return a text for each queue with messages that a running group has not consumed.

        The instances report their progress; messages that still wait, including retries, do not count.
        """
        lags = []
        for group in list(self._registry.consumers.values()):
            if group.model is MessageModel.BROADCASTING:
                continue
            for name in group.subscriptions:
                topic = self._topics.by_name.get(name)
                reached: dict[int, int] = {}
                for client in list(group.clients.values()):
                    try:
                        offsets = client.call(ConsumerOffsets(group.name, name, with_passed=True))
                    except RmqError:  # the instance is leaving, so its stored progress counts
                        continue
                    for queue, queue_offset in offsets.items():
                        if queue.broker_name == self._broker_name:
                            reached[queue.queue_id] = max(queue_offset, reached.get(queue.queue_id, 0))
                for queue_id in range(0 if topic is None else topic.read_queues):
                    begin, end = self._store.queue_range(name, queue_id)
                    at = reached.get(queue_id, self._offsets.get(group.name, name, queue_id) or 0)
                    if max(at, begin) < end:
                        lags.append(f"group {group.name}: {end - max(at, begin)} messages of {name}/{queue_id}")
        return lags

    def reset(self, request: ResetGroup) -> Mapping[MessageQueue, int]:
        """Send new offsets to a group's running instances, which continue there and save them."""
        group, name = request.group, request.topic
        topic = self._topics.by_name.get(name)
        if topic is None:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"topic {name!r} does not exist")
        offsets = {}
        for queue_id in range(topic.write_queues):
            stored = self._offsets.get(group, name, queue_id)
            if stored is None:
                raise BrokerError(
                    ResponseCode.SYSTEM_ERROR, f"group {group!r} has no progress in queue {queue_id} of {name!r}"
                )
            if request.timestamp_ms == -1:
                target = self.queue_end(MaxOffset(name, queue_id))
            else:
                target = self._store.queue_offset_at(name, queue_id, request.timestamp_ms)
            queue = MessageQueue(name, self._broker_name, queue_id)
            offsets[queue] = target if request.force or target < stored else stored
        members = self._registry.consumers.get(group)
        if members is None:
            raise BrokerError(
                ResponseCode.CONSUMER_NOT_ONLINE, f"no client of group {group!r} runs: use Broker.reset_group"
            )
        for client in list(members.clients.values()):
            try:
                client.call(ResetOffsets(group, name, offsets))
            except RmqError:
                continue  # the instance is leaving
        return offsets
