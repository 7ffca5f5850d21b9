"""Unconsumed messages of a broker's readers, for retention: of groups, and of the broker's own parts.

A queue in which a group has no progress counts from its begin, like its lag. A group without any progress in a topic
counts if it runs and consumes from the first message, or if the topic holds its retries. Dead letters have no reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from librmq.broker.context import BrokerContext
from librmq.broker.transactions import BrokerTransactions
from librmq.delay import DelaySchedule
from librmq.message.delay_levels import SCHEDULE_TOPIC
from librmq.message.topics import HALF_TOPIC, OP_TOPIC, RETRY_PREFIX
from librmq.protocol import ConsumeFrom, MessageModel
from librmq.scheduling.half_messages import CHECK_GROUP, QUEUE
from librmq.scheduling.timer import Timers
from librmq.scheduling.timer_config import TIMER_TOPIC
from librmq.store.upkeep.unread import Unread, UnreadInFile

DELAYS = "delay levels"
TIMERS = "timers"


class StoreReaders:
    """The readers of one broker's store. Called by any thread, without a lock."""

    def __init__(
        self,
        context: BrokerContext,
        schedule: DelaySchedule,
        transactions: BrokerTransactions,
        timers: Timers | None,
    ) -> None:
        self._store = context.store
        self._topics = context.topics.by_name
        self._offsets = context.offsets
        self._registry = context.registry
        self._metrics = context.metrics
        self._schedule = schedule
        self._transactions = transactions
        self._timers = timers

    def unread(self, before: int) -> Iterator[Unread]:
        """Return each reader's progress by queue; messages at or above ``before`` (a physical offset) don't matter."""
        queues: dict[str, list[int]] = defaultdict(list)
        for topic, queue_id in self._store.queues:
            queues[topic].append(queue_id)
        for topic, queue_ids in queues.items():
            if topic in self._topics and topic not in (HALF_TOPIC, OP_TOPIC):
                for group, row in self._progress_in(topic).items():
                    for queue_id in queue_ids:
                        yield Unread(group, topic, queue_id, row.get(queue_id, 0))
        for queue_id, queue_offset in self._schedule.next_offsets():
            yield Unread(DELAYS, SCHEDULE_TOPIC, queue_id, queue_offset)
        if HALF_TOPIC in queues:
            yield Unread(CHECK_GROUP, HALF_TOPIC, QUEUE, *self._transactions.open_halves())
        if self._timers is not None and TIMER_TOPIC in queues:
            yield Unread(TIMERS, TIMER_TOPIC, QUEUE, 0, self._timers.passed(before))

    def _progress_in(self, topic: str) -> dict[str, Mapping[int, int]]:
        """Return the progress of each group that consumes a topic."""
        progress: dict[str, Mapping[int, int]] = {}
        if topic.startswith(RETRY_PREFIX):
            progress[topic.removeprefix(RETRY_PREFIX)] = {}
        for group in list(self._registry.consumers.values()):
            is_counted = group.model is MessageModel.CLUSTERING and group.consume_from is ConsumeFrom.FIRST
            if is_counted and topic in group.subscriptions:
                progress[group.name] = {}
        for name in self._offsets.groups(topic):
            progress[name] = dict(self._offsets.of_topic(name, topic))
        return progress

    def lost(self, unread: UnreadInFile) -> None:
        """Count messages that were deleted before they were consumed."""
        if self._metrics is not None:
            reader = unread.reader
            self._metrics.count("unread_deleted", unread.messages, topic=reader.topic, group=reader.group)
