"""Progress of groups in the queues of topics, and what they have not consumed, which keeps files of the log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Final

from librmq.broker._context import BrokerContext, BrokerPart
from librmq.config import to_timestamp_ms
from librmq.errors import BrokerError
from librmq.message import MessageQueue
from librmq.message.lag import queue_lag
from librmq.message.topics import SystemTopic, TopicPrefix, group_of_retries, is_user_topic, receive_retry_topic
from librmq.protocol import (
    ConsumeFrom,
    DescribeProgress,
    DescribeQueues,
    GroupProgress,
    HoldPlace,
    MessageModel,
    MoveGroup,
    Place,
    QueryOffset,
    QueueBounds,
    QueueOffsetAt,
    ResetGroup,
    ResetOffsets,
    ResponseCode,
    SaveProgress,
    StartGroup,
    StartOutcome,
    TopicGroups,
    UpdateOffset,
)
from librmq.runtime.closing import LaterPart
from librmq.runtime.event_log import EventLog
from librmq.store.retention import Unread, UnreadInFile

if TYPE_CHECKING:
    from librmq.broker._transactions import BrokerTransactions
    from librmq.delay import DelaySchedule
    from librmq.scheduling.timer import Timers

_MOST_UNKNOWN: Final = 1000

_log = EventLog("librmq.broker")

ResetHook = Callable[[str, str], object]
"""Called with group and topic after the progress was moved."""


class Progress(BrokerPart):
    """Begins and ends of queues, progress of groups in them, and resets of groups. Changes need the runner's lock.

    Mirrors ``ConsumerManageProcessor``, and the part of ``AdminBrokerProcessor`` and ``Broker2Client`` about queue
    offsets.
    """

    def __init__(self, context: BrokerContext) -> None:
        super().__init__(context)
        self._await_device = context.await_device
        self.reset_hooks: list[ResetHook] = []
        self.drop_flights: Callable[[str, str, int], object] = lambda group, topic, queue_id: None
        """Forgets what a group has received in a queue; the handler of receives sets it."""
        self._unknown: set[tuple[str, str]] = set()
        """Groups and topics with progress, one of which did not exist when it came."""
        self._known_counts = (0, 0, 0)

    def query_offset(self, request: QueryOffset) -> int | None:
        """Return a group's stored progress; without any, 0 if the whole queue exists and counts as in memory."""
        stored = self._offsets.consumer_offset(request.topic, request.group, request.queue_id)
        if stored is not None:
            return stored
        store = self._store
        begin, end = store.queue_range(request.topic, request.queue_id)
        if begin > 0:
            return None
        if not end or not store.counts_as_on_disk(store.log.begin):
            return 0  # the group begins at the first message
        queue = store.queue(request.topic, request.queue_id)
        first = None if queue is None else queue.entry(0)
        return None if first is not None and store.counts_as_on_disk(first.physical_offset) else 0

    def update(self, request: UpdateOffset) -> None:
        """Store a group's progress. As by 4.9, that of what does not exist is kept too, but not without bounds."""
        group, topic = request.group, request.topic
        is_new = self._is_unknown(group, topic)
        if is_new and not self._has_room_for_unknown():
            raise BrokerError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"group {group!r} or topic {topic!r} does not exist, and progress of {_MOST_UNKNOWN:,} such pairs is "
                "kept already: create them by set_group and create_topic",
            )
        store = self._offsets.advance_consumer_offset if request.only_forward else self._offsets.set_consumer_offset
        store(topic, group, request.queue_id, request.queue_offset)
        if is_new:
            self._unknown.add((group, topic))

    def _is_unknown(self, group: str, topic: str) -> bool:
        exist = topic in self._topics.by_name and group in self._groups.by_name
        return not exist and not self._offsets.of_topic(group, topic)

    def hold_place(self, request: HoldPlace) -> Place | None:
        group, topic, queue_id = request.group, request.topic, request.queue_id
        place = None if self._is_unknown(group, topic) else self._offsets.place(topic, group, queue_id)
        if place is None:
            return None
        members = self._clients.consumers.get(group)
        clients = () if members is None else members.clients
        place = self._offsets.hold(place, request.client_id, clients, was_held=request.was_held)
        if (settings := self._groups.by_name.get(group)) is not None:
            place.max_process_deaths = settings.max_process_deaths
        return place

    def _has_room_for_unknown(self) -> bool:
        """Return whether progress of one more group and topic can be kept, one of which does not exist."""
        if len(self._unknown) < _MOST_UNKNOWN:
            return True
        # What was made or deleted since does not count any more. Refused requests change no count, so they look once.
        counts = len(self._topics.by_name), len(self._groups.by_name), len(self._offsets)
        if counts != self._known_counts:
            self._known_counts = counts
            self._unknown = {
                (group, topic)
                for group, topic in self._unknown
                if not (topic in self._topics.by_name and group in self._groups.by_name)
                and self._offsets.of_topic(group, topic)
            }
        return len(self._unknown) < _MOST_UNKNOWN

    def groups(self, request: TopicGroups) -> tuple[str, ...]:
        subscribed = (group.name for group in self._clients.consumers.values() if request.topic in group.subscriptions)
        return tuple(dict.fromkeys((*self._offsets.groups(request.topic), *subscribed)))

    def describe_queues(self, request: DescribeQueues) -> dict[MessageQueue, QueueBounds]:
        return {
            self._queue(request.topic, queue_id): QueueBounds(
                begin, end, max(self.stored_ms(request.topic, queue_id, end - 1), 0)
            )
            for queue_id, (begin, end) in self._ranges_of(request.topic).items()
        }

    def _ranges_of(self, topic: str) -> dict[int, tuple[int, int]]:
        config = self._topics.find(topic)
        if config is None:
            raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist")
        return {queue_id: self._store.queue_range(topic, queue_id) for queue_id in range(config.queues)}

    def stored_ms(self, topic: str, queue_id: int, queue_offset: int) -> int:
        begin, end = self._store.queue_range(topic, queue_id)
        if not begin <= queue_offset < end:
            return -1
        message = next(self._store.messages(topic, queue_id, queue_offset, queue_offset + 1), None)
        return -1 if message is None else message.store_timestamp_ms

    def describe(self, request: DescribeProgress) -> dict[MessageQueue, GroupProgress]:
        group = request.group
        topics = self.topics_of(group) if request.topic is None else [request.topic]
        progress: dict[MessageQueue, GroupProgress] = {}
        for topic in topics:
            for queue_id, (begin, end) in self._ranges_of(topic).items():
                offset = max(self._offsets.consumer_offset(topic, group, queue_id) or 0, 0)
                last_ms = max(self.stored_ms(topic, queue_id, offset - 1), 0)
                progress[self._queue(topic, queue_id)] = GroupProgress(end, offset, last_ms, begin)
        return progress

    def topics_of(self, group: str) -> list[str]:
        """Return the topics in which a group has progress, and those to which it subscribes, that exist."""
        connections = self._clients.connections(group)
        topics = set(() if connections is None else connections.subscriptions)
        topics.update(self._offsets.topics(group))
        return sorted(topic for topic in topics if topic in self._topics.by_name)

    def queue_offset_at(self, request: QueueOffsetAt) -> int:
        return self._store.queue_offset_at(request.topic, request.queue_id, request.timestamp_ms)

    def _queue(self, topic: str, queue_id: int) -> MessageQueue:
        return MessageQueue(topic, self._broker_name, queue_id)

    def _reset_to(
        self, group: str, topic: str, offsets: Mapping[MessageQueue, int], except_for: str | None = None
    ) -> None:
        """Move a running or stopped group's progress to queue offsets.

        Running instances are notified and continue from there, but for the client ``except_for``; the stored progress
        is set as well.
        """
        self._await_device()
        self._clients.notify_group(group, ResetOffsets(group, topic, offsets), except_for)
        for queue, queue_offset in offsets.items():
            self.drop_flights(group, topic, queue.queue_id)  # the progress can be there already, and later ones ended
            self._offsets.set_consumer_offset(topic, group, queue.queue_id, queue_offset)
        self._offsets.saving.save()  # a person is told that the group has moved, which a kill must not undo
        for hook in self.reset_hooks:
            hook(group, topic)

    def move(self, request: MoveGroup) -> dict[MessageQueue, int]:
        group, topic, queue_id = request.group, request.topic, request.queue_id
        topic_config = self._topics.by_name.get(topic)
        if topic_config is None:
            raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, f"topic {topic!r} does not exist")
        if not request.dry_run and group not in self._groups.by_name and group not in self._offsets.groups(topic):
            raise BrokerError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"group {group!r} does not exist")
        is_listed = queue_id is None or 0 <= queue_id < topic_config.queues
        if not is_listed and (topic, queue_id) not in self._store.queues:  # a topic can have had more queues
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"topic {topic!r} has no queue {queue_id}")
        queues = range(topic_config.queues) if queue_id is None else (queue_id,)
        offsets = {self._queue(topic, number): self._offset_of(topic, number, request.to) for number in queues}
        if not request.dry_run:
            self._reset_to(group, topic, offsets)
        return offsets

    def start(self, request: StartGroup) -> StartOutcome:
        """Move a group in a topic for its first start with ``start_at``.

        A topic that does not exist yet is marked too: its messages come after the start.
        """
        group, name, to_ms = request.group, request.topic, request.timestamp_ms
        if self._offsets.is_started(group, name):
            return StartOutcome.MOVED_BEFORE
        topic = self._topics.by_name.get(name)
        bounds = [self._store.queue_range(name, queue_id) for queue_id in range(0 if topic is None else topic.queues)]
        if bounds and (request.queue_offset or 0) > max(end for _, end in bounds):
            return StartOutcome.BEYOND_END
        offsets = {}
        for queue_id, (begin, end) in enumerate(bounds):
            if request.queue_offset is not None:
                target = min(max(request.queue_offset, begin), end)
            else:
                target = end if to_ms == -1 else self._store.first_offset_from(name, queue_id, to_ms)
            offsets[self._queue(name, queue_id)] = target
        if offsets:
            self._reset_to(group, name, offsets, request.client_id)
        self._offsets.mark_started(group, name, self._runner.now_ms())
        return StartOutcome.MOVED if offsets else StartOutcome.NO_QUEUES

    def _offset_of(self, topic: str, queue_id: int, to: str | datetime | int) -> int:
        begin, end = self._store.queue_range(topic, queue_id)
        if isinstance(to, datetime):
            return self._store.first_offset_from(topic, queue_id, to_timestamp_ms("to", to))
        if isinstance(to, int):
            return min(max(to, begin), end)
        return begin if to == "begin" else end

    def behind(self) -> list[str]:
        """Return a text for each queue with messages that a running group has not consumed.

        Messages that still wait, including retries, do not count. Instances that reach the broker through something
        else than its page are asked to store their progress, for the next call.
        """
        behind: dict[str, list[str]] = {}
        for group in list(self._clients.consumers.values()):
            if group.model is MessageModel.BROADCASTING:
                continue
            names = list(group.subscriptions)
            if group.kind == "simple":
                names += [receive_retry_topic(group.name, name) for name in names]
            for name in names:
                topic = self._topics.by_name.get(name)
                for queue_id in range(0 if topic is None else topic.read_queues):
                    begin, end = self._store.queue_range(name, queue_id)
                    at = self._offsets.consumer_offset(name, group.name, queue_id)
                    if lag := queue_lag(at, begin, end):
                        lags = behind.setdefault(group.name, [])
                        lags.append(f"group {group.name}: {lag} messages of {name}/{queue_id}")
        for name in behind:
            self._clients.notify_group(name, SaveProgress(name))
        return [text for texts in behind.values() for text in texts]

    def reset(self, request: ResetGroup) -> Mapping[MessageQueue, int]:
        """Send new offsets to a group's running instances, which continue there and save them."""
        group, name = request.group, request.topic
        if request.queue_offset is not None:
            return self.move(MoveGroup(group, name, request.queue_offset, request.queue_id))
        topic = self._topics.by_name.get(name)
        if topic is None:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"topic {name!r} does not exist")
        offsets = {}
        for queue_id in range(topic.write_queues):
            stored = self._offsets.consumer_offset(name, group, queue_id)
            if stored is None:
                raise BrokerError(
                    ResponseCode.SYSTEM_ERROR, f"group {group!r} has no progress in queue {queue_id} of {name!r}"
                )
            if request.timestamp_ms == -1:
                target = self._store.queue_range(name, queue_id)[1]
            else:
                target = self._store.queue_offset_at(name, queue_id, request.timestamp_ms)
            offsets[self._queue(name, queue_id)] = target if request.force or target < stored else stored
        if group not in self._clients.consumers:
            raise BrokerError(
                ResponseCode.CONSUMER_NOT_ONLINE, f"no client of group {group!r} runs: use Broker.reset_group"
            )
        self._await_device()
        self._clients.notify_group(group, ResetOffsets(group, name, offsets))
        return offsets


# ---- unconsumed messages

DELAYS = "delay levels"
TIMERS = "timers"


class StoreReaders(BrokerPart):
    """The readers of one broker's store and their unconsumed messages, for retention. Called without a lock.

    Readers are groups and the broker's own parts. A queue in which a group has no progress counts from its beginning,
    like its lag. A group without any progress in a topic counts if it runs and consumes from the first message, or if
    the topic holds its retries. Dead letters have no reader. Thread-safe.
    """

    def __init__(
        self,
        context: BrokerContext,
        schedule: LaterPart[DelaySchedule],
        transactions: LaterPart[BrokerTransactions],
        timers: Callable[[], Timers | None],
    ) -> None:
        super().__init__(context)
        self._schedule = schedule
        self._transactions = transactions
        self._timers = timers

    def unread(self, before: int) -> Iterator[Unread]:
        """Return each reader's progress by queue; messages at or above ``before`` (a physical offset) don't matter."""
        queues: dict[str, list[int]] = defaultdict(list)
        for topic, queue_id in self._store.queues:
            queues[topic].append(queue_id)
        for topic, queue_ids in queues.items():
            if topic in self._topics.by_name and topic not in (SystemTopic.HALF, SystemTopic.OP):
                for group, row in self._progress_in(topic).items():
                    for queue_id in queue_ids:
                        yield Unread(group, topic, queue_id, row.get(queue_id, 0))
        for queue_id, queue_offset in self._schedule().next_offsets() if SystemTopic.SCHEDULE in queues else ():
            yield Unread(DELAYS, SystemTopic.SCHEDULE, queue_id, queue_offset)
        if SystemTopic.HALF in queues:
            yield self._transactions().unread()
        if SystemTopic.TIMER in queues and (timers := self._timers()) is not None:
            yield Unread(TIMERS, SystemTopic.TIMER, 0, 0, timers.passed(before))

    def never_read(self) -> Iterator[Unread]:
        """Return the queues of users' topics that no group has read, and that no running group subscribes to."""
        subscribed = {topic for group in list(self._clients.consumers.values()) for topic in group.subscriptions}
        read = subscribed.union(self._offsets.topics())
        for topic, queue_id in self._store.queues:
            if topic in self._topics.by_name and topic not in read and is_user_topic(topic):
                yield Unread("", topic, queue_id, 0)

    def _progress_in(self, topic: str) -> dict[str, Mapping[int, int]]:
        progress: dict[str, Mapping[int, int]] = {}
        if topic.startswith(TopicPrefix.RETRY):
            # The topic of unacknowledged receives has the names of a group and a topic, which look like one name.
            groups = {*self._clients.consumers, *self._offsets.groups(topic)}
            progress[group_of_retries(topic, groups, self._topics.by_name)] = {}
        for group in list(self._clients.consumers.values()):
            is_counted = group.model is MessageModel.CLUSTERING and group.consume_from is ConsumeFrom.FIRST
            if is_counted and topic in group.subscriptions:
                progress[group.name] = {}
        for name in self._offsets.groups(topic):
            progress[name] = dict(self._offsets.of_topic(name, topic))
        return progress

    def lost(self, unread: UnreadInFile) -> None:
        """Count messages that were deleted before they were consumed."""
        reader = unread.reader
        name, labels = ("unread_deleted", {"group": reader.group}) if reader.group else ("never_read_deleted", {})
        self._count(name, unread.messages, topic=reader.topic, **labels)
