"""Requests of operators and tools to a broker and, through it, to its clients; and of replicas to their master."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple

from librmq.config import StoreConfig
from librmq.errors import RmqError
from librmq.message import MessageQueue, StoredMessage
from librmq.message.lag import queue_lag
from librmq.message.topics import TopicType, kind_of_topic
from librmq.protocol._client_requests import (
    ChannelClosed,
    ConsumeFrom,
    Heartbeat,
    MessageModel,
    Subscription,
    Unregister,
    UpdateOffset,
)
from librmq.protocol._endpoint import PERM_READ, PERM_WRITE, QueueData
from librmq.protocol._request import ReadRequest, Request, value
from librmq.store.format.documents import RecordIdentity

if TYPE_CHECKING:
    from librmq.scheduling import Schedule  # noqa: F401 (a request names it in quotes)

__all__ = [
    "MEMBERSHIP", "REPLICA_READS", "ChangeSchedule", "CleanUnusedTopics", "ConnectedClient", "ConsumeDirectly",
    "ConsumerOffsets", "ConsumerOffsetsOf", "CopiedTables", "CopyTables", "CreateTopic", "DeleteExpiredFiles",
    "DeleteGroup", "DeleteTopic", "DescribeClients", "DescribeConnections", "DescribeGroups", "DescribeInstance",
    "DescribeLog", "DescribeProgress", "DescribeQueues", "DescribeSchedules", "DescribeTopics", "DirectResult",
    "DirectlyConsumed", "FollowLog", "GroupConnections", "GroupProgress", "GroupSettings", "GroupsBehind", "HeldQueue",
    "InstanceState", "LeaveLog", "ListenerCall", "LogBytes", "LogDescription", "MoveGroup", "QueryMessages",
    "QueueBounds", "ResendLetters", "ResentLetters", "ResetGroup", "ResetOffsets", "SaveProgress", "SetGroup",
    "TopicDescription", "ViewMessage",
]  # fmt: skip
"""What `librmq.protocol` has of this module."""


@value
class CreateTopic(Request[None]):
    """Create a topic, or change its queues and permission; stored messages do not move."""

    topic: str
    read_queues: int = 8
    write_queues: int = 8
    permission: int = PERM_READ | PERM_WRITE
    attributes: Mapping[str, str | None] = field(default_factory=dict)
    """Attributes of 5.x to set, such as `MESSAGE_TYPE`, and with None those to remove; the others stay."""
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
class DeleteExpiredFiles(Request[None]):
    """Delete log files that have expired, whatever the hours of deletion; the broker does so soon."""


@value
class ChangeSchedule(Request[None]):
    """Set, pause, resume or delete a schedule. RocketMQ has no such request."""

    name: str
    change: Literal["set", "pause", "resume", "delete"]
    rule: Mapping[str, Any] | None = None
    """The rule that is set, as a row."""


@value
class DescribeSchedules(ReadRequest["tuple[Schedule, ...]"]):
    """Return the schedules by name. RocketMQ has no such request."""


@value
class DescribeTopics(ReadRequest[Mapping[str, QueueData]]):
    """Return all topics of a broker by name, its own included."""


@value
class TopicDescription:
    """A topic of a route: its queues in each broker that has it."""

    name: str
    brokers: tuple[QueueData, ...]

    @property
    def kind(self) -> str:
        """What the topic is for: user, retry, dead, delay, half, op or system."""
        return kind_of_topic(self.name)

    @property
    def read_queues(self) -> int:
        """Queues that can be read, in all brokers."""
        return sum(data.read_queues for data in self.brokers)

    @property
    def write_queues(self) -> int:
        """Queues that can be written, in all brokers."""
        return sum(data.write_queues for data in self.brokers)

    @property
    def permission(self) -> int:
        """What at least one broker permits: the sum of `PERM_READ` and `PERM_WRITE`."""
        permission = 0
        for data in self.brokers:
            permission |= data.permission
        return permission

    @property
    def message_type(self) -> TopicType:
        """What official clients of 5.x may send, by the first broker."""
        return self.brokers[0].message_type


class QueueBounds(NamedTuple):
    """The messages of a queue at its broker."""

    min_offset: int
    max_offset: int
    """The queue offset of the next message."""
    last_timestamp_ms: int
    """Store time of the last message; 0 if there is none."""


@value
class DescribeQueues(ReadRequest[Mapping[MessageQueue, QueueBounds]]):
    """Return the queues of a topic with the bounds of their messages.

    Raises:
        BrokerError: There is no such topic (TOPIC_NOT_EXIST).
    """

    topic: str


@value
class GroupSettings:
    """The settings of a consumer group at a broker."""

    name: str
    retry_max_times: int
    """Redeliveries before a message becomes a dead letter."""
    retry_queues: int
    """Queues of its retry topic; 0 means that failed messages are not delivered again."""
    consumes: bool
    """False: pulls and receives are refused."""
    broadcasts: bool
    """False: pulls of broadcasting instances are refused."""
    is_ordered: bool
    """True: receives hand out each queue's messages in order. Pulls ignore it."""
    priority_factor: int = 100
    """Percentage of receives that take messages of the highest priority first; the others take the queues in turn."""
    max_process_deaths: int = 3
    """Ends of a process, while a message ran alone, before it becomes a dead letter; 0 for never. Consumers can have a
    setting of their own."""


@value
class DescribeGroups(ReadRequest[Mapping[str, GroupSettings]]):
    """Return the settings of all consumer groups, by name."""


class GroupProgress(NamedTuple):
    """The progress of a group in a queue."""

    max_offset: int
    """The queue offset of the next message at the broker."""
    queue_offset: int
    """The queue offset of the next message for the group; 0 without stored progress."""
    last_timestamp_ms: int
    """Store time of the last consumed message; 0 if it is gone."""
    min_offset: int = 0
    """The queue offset of the first message, where the broker says it; a broker of RocketMQ does not."""

    @property
    def lag(self) -> int:
        """Messages that the group has not consumed; those that are deleted count where ``min_offset`` is unknown."""
        return queue_lag(self.queue_offset, self.min_offset, self.max_offset)


@value
class DescribeProgress(ReadRequest[Mapping[MessageQueue, GroupProgress]]):
    """Return a group's progress in a topic, or in all topics that it consumes or has progress in."""

    group: str
    topic: str | None = None


@value
class ConsumerOffsetsOf(ReadRequest[Mapping[int, int]]):
    """Return a group's stored progress in a topic, by queue id; queues without progress are omitted."""

    group: str
    topic: str


@value
class MoveGroup(Request[Mapping[MessageQueue, int]]):
    """Move a running or stopped group in a topic, or in one queue of it; return the new offsets.

    Raises:
        BrokerError: The group, the topic or the queue does not exist.
    """

    group: str
    topic: str
    to: Literal["begin", "end"] | datetime | int
    """A time is that of the first message stored at or after it, a number a queue offset."""
    queue_id: int | None = None
    dry_run: bool = False
    """Move nothing; answer as if the group existed."""


@value
class GroupsBehind(Request[tuple[str, ...]]):
    """Return a text for each queue with messages that a running group has not consumed."""

    DUE: ClassVar = "delayed messages that are due"
    """The text for delayed messages and retries that are due and not delivered yet."""


class ResentLetters(NamedTuple):
    """What became of dead letters that were to be sent again."""

    sent: tuple[RecordIdentity, ...]
    refused: tuple[tuple[RecordIdentity, RmqError], ...] = ()
    """With the reason for each."""


@value
class ResendLetters(Request[ResentLetters]):
    """Send dead letters to their group again, and note it; return what became of those that the broker has.

    Without ``letters`` nothing is sent, and the answer has those that were not sent yet. Copies of letters that the
    log has without a note, because a process was killed, are noted then.
    """

    group: str
    letters: tuple[RecordIdentity, ...] | None = None
    only_unsent: bool = False
    """Leave out letters that were sent before, or that another request sends now."""
    dry_run: bool = False
    """Send and note nothing; answer as if."""


@value
class ConnectedClient:
    """A client that a broker knows from its heartbeats."""

    client_id: str
    producer_groups: tuple[str, ...]
    """Sorted."""
    consumer_groups: tuple[str, ...]
    """Sorted."""

    @classmethod
    def _by_id(
        cls, producers: Iterable[tuple[str, str]], consumers: Iterable[tuple[str, str]]
    ) -> tuple[ConnectedClient, ...]:
        """Return the clients by id, from pairs of a client id and a group."""
        groups: dict[str, tuple[set[str], set[str]]] = {}
        for role, members in enumerate((producers, consumers)):
            for client_id, group in members:
                groups.setdefault(client_id, (set(), set()))[role].add(group)
        return tuple(
            cls(client_id, tuple(sorted(produces)), tuple(sorted(consumes)))
            for client_id, (produces, consumes) in sorted(groups.items())
        )


@value
class DescribeClients(Request[tuple[ConnectedClient, ...]]):
    """Return the clients that a broker knows, by id."""


@value
class GroupConnections:
    """The running instances of a consumer group."""

    group: str
    kind: str
    """``push`` or ``pull``."""
    model: MessageModel
    """Whether the instances share the messages, or each gets all."""
    consume_from: ConsumeFrom
    """Where a queue without progress begins."""
    subscriptions: Mapping[str, Subscription]
    """The group's subscriptions by topic."""
    client_ids: tuple[str, ...]
    """Client ids in the order in which the instances joined."""
    subscriptions_by_client: Mapping[str, Mapping[str, Subscription]]
    """The subscriptions of each instance, by topic; over TCP those of the group, since a broker says no more."""

    def joined(self, other: GroupConnections) -> GroupConnections:
        """Return these instances and those that another broker of the cluster knows."""
        return replace(
            self,
            subscriptions={**other.subscriptions, **self.subscriptions},
            client_ids=tuple(dict.fromkeys((*self.client_ids, *other.client_ids))),
            subscriptions_by_client={**other.subscriptions_by_client, **self.subscriptions_by_client},
        )


@value
class DescribeConnections(ReadRequest["GroupConnections | None"]):
    """Return the running instances of a consumer group; None if it has none."""

    group: str


@value
class SetGroup(Request[None]):
    """Create a consumer group, or change it."""

    group: str
    settings: Mapping[str, object]
    """By their names in ``subscriptionGroup.json``; omitted settings keep their values."""
    like: str | None = None
    """The group whose other settings a new group gets; None means the defaults."""


@value
class DeleteGroup(Request[None]):
    """Remove a consumer group's settings and, if wanted, its progress; a later heartbeat makes it again."""

    group: str
    removes_progress: bool = False


@value
class ViewMessage(ReadRequest["StoredMessage | None"]):
    """Return the message at a physical offset."""

    physical_offset: int


@value
class QueryMessages(ReadRequest[tuple[StoredMessage, ...]]):
    """Return the last messages of a topic with a key or unique id, in log order, at most 64."""

    topic: str
    key: str
    max_messages: int = 64
    begin_ms: int = 0
    end_ms: int = (1 << 63) - 1
    is_unique: bool = False
    """Return the first messages whose unique id it is; a broker of RocketMQ returns the last 32 that have the key."""


@value
class ResetGroup(Request[Mapping[MessageQueue, int]]):
    """Move a running group's progress on a topic to a time (ms; -1 is the end), and return the new offsets by queue.

    ``force`` moves forward too. With ``queue_offset``, as in 5.x, the group moves there in ``queue_id``, whether it
    runs or not.

    Raises:
        BrokerError: The group lacks progress in a queue (SYSTEM_ERROR), or no client of it runs (CONSUMER_NOT_ONLINE).
    """

    group: str
    topic: str
    timestamp_ms: int
    force: bool = True
    queue_id: int | None = None
    queue_offset: int | None = None


# ---- what a broker asks its clients for a tool


@value
class ResetOffsets(Request[None]):
    """Order a client to continue from these queue offsets in a topic."""

    group: str
    topic: str
    offsets: Mapping[MessageQueue, int] = field(default_factory=dict)


@value
class ConsumerOffsets(Request[Mapping[MessageQueue, int]]):
    """Return a client's progress in memory, by queue."""

    group: str
    topic: str


@value
class SaveProgress(Request[None]):
    """Send the broker the progress of a group soon, instead of within seconds; a process asks its own clients.

    A broker that is asked answers when the progress that it has is durable.
    """

    group: str


@value
class HeldQueue:
    """A queue of an instance, as the instance has it in memory."""

    queue: MessageQueue
    progress: int | None
    """Queue offset of the next message to be consumed; None before the first."""
    stored: int | None
    """The progress last reported to the broker."""
    waiting: int
    """Messages that were pulled and not begun."""
    running: int
    """Messages that listeners have."""
    first: int | None
    """The smallest queue offset held, where the progress stays; None if nothing is held."""
    first_message_id: str | None
    first_since_ms: int | None
    """When a listener got that message; None if none has it."""
    first_failures: int
    """Failures of the group on that message so far."""
    pulled_timestamp_ms: int
    is_throttled: bool
    """Pulling pauses until less is held."""
    last: int | None = None
    """The largest queue offset held; None if nothing is held."""
    held_bytes: int = 0
    """Bytes of the bodies held."""
    is_locked: bool = False
    """Whether the broker has locked the queue for this orderly instance."""
    lock_timestamp_ms: int | None = None
    """When the broker last locked it; None if it never did."""


@value
class ListenerCall:
    """A listener at work."""

    queue: MessageQueue
    queue_offset: int
    """Of its first message."""
    message_id: str
    messages: int
    since_ms: int | None
    """None where the consumer does not record it, as an orderly consumer."""
    thread: str
    stack: tuple[str, ...]
    """Where the listener's code stands, as ``file:line function``, the outermost call first."""


@value
class InstanceState:
    """One instance of a consumer group, from within. Mirrors ``ConsumerRunningInfo``."""

    client_id: str
    group: str
    kind: str
    """``push`` or ``pull``."""
    model: MessageModel
    is_orderly: bool
    is_paused: bool
    threads: int
    """Listeners that may run in parallel; 0 for a pull consumer."""
    running: int | None
    """Listeners that run; None if a client of another kind does not say."""
    strategy: str
    """The name of the function that allocates queues."""
    queues: tuple[HeldQueue, ...]
    listeners: tuple[ListenerCall, ...]
    """The listeners that run in threads, without coroutines."""
    started_ms: int = 0
    """When it joined its group."""
    max_reconsume_times: int | None = None
    """Retries before a dead letter, as the instance has them; None where the setting of the group counts."""


@value
class DescribeInstance(Request[InstanceState]):
    """Return the state of a client's consumer of a group. Mirrors 4.9's ``GET_CONSUMER_RUNNING_INFO``.

    Raises:
        ClientStateError: The client is not in the group, or does not answer in time.
    """

    group: str
    client_id: str = ""
    """The client that a broker asks; a client itself needs none."""
    timeout_s: float = 0
    """Time in which a client on a connection must answer; 0: it is not asked."""


class DirectResult(enum.Enum):
    """How a listener has ended with a message that a broker passed to it. Mirrors ``CMResult``."""

    SUCCESS = "CR_SUCCESS"
    LATER = "CR_LATER"
    THROW_EXCEPTION = "CR_THROW_EXCEPTION"
    RETURN_NULL = "CR_RETURN_NULL"


@value
class DirectlyConsumed:
    """Result of `ConsumeDirectly`. Mirrors ``ConsumeMessageDirectlyResult``."""

    result: DirectResult
    is_orderly: bool
    took_ms: int
    remark: str | None = None
    """The listener's exception, in one line."""


@value
class ConsumeDirectly(Request[None]):
    """Pass one message to the group's listener now, whatever its progress, which stays the same.

    A failure is not tried again. Mirrors 4.9's ``CONSUME_MESSAGE_DIRECTLY``.
    """

    group: str
    message: StoredMessage
    broker_name: str
    ended: Callable[[DirectlyConsumed], None]
    """Gets the result, under the runner's lock."""


# ---- replication

REPLICA_READS: Final = (ReadRequest, UpdateOffset)
"""Requests that a replica answers while its master can't be reached; pulls have rules of their own."""
MEMBERSHIP: Final[frozenset[type[Request[Any]]]] = frozenset((Heartbeat, Unregister, ChannelClosed))
"""Requests that a client sends to a master and its replicas."""


@value
class LogDescription:
    """The log of a master."""

    name: str
    """The broker's name, or the store's folder."""
    place: tuple[object, str]
    """The master's files unless they are on the disk, and the folder of its store."""
    config: StoreConfig
    begin: int
    """Physical offset of the log's first file."""
    end: int


@value
class DescribeLog(Request[LogDescription]):
    """Return the description that a replica checks before it follows."""


@value
class LogBytes:
    """Bytes of a master's log."""

    data: bytes
    begin: int
    """Physical offset of the master's first file."""
    end: int
    is_held: bool = False
    """Whether the master calls `FollowLog.notify` when there is more."""
    opened: object = None
    """Another object after the master was reopened, so that a replica compares its end with the master's. None if the
    master can't say: then the replica compares with each answer."""
    topics: Mapping[str, Any] | None = None
    """The topics of these bytes and all others, as in `CopiedTables`; None if the replica has them."""
    topics_version: int = 0
    """Their version, which grows within a process."""


@value
class FollowLog(Request[LogBytes]):
    """Read at most ``size`` bytes from one file of the log.

    Acknowledges everything before ``physical_offset``: the replica has it. An offset after the log's end or before
    its beginning gets no bytes and acknowledges nothing.
    """

    replica: str
    """The replica's id. With an empty id the request only reads, and acknowledges nothing."""
    physical_offset: int
    size: int
    notify: Callable[[], None] | None = None
    """Called once when there is more to read, in the thread of a send, so it must be short."""
    follow: Callable[[], int] | None = None
    """Lets the replica copy immediately, in the thread of a send that waits for it. Returns the physical
    offset up to which it then has the log."""
    take: Callable[[int, bytes], int] | None = None
    """Does the same with the bytes that follow ``physical_offset``, without a request: ``take(physical_offset, data)``.
    Only for a replica without a link that could fail."""
    topics_version: int = 0
    """The version of the topics that the replica has on its device."""


@value
class LeaveLog(Request[None]):
    """Stop serving a replica that was closed."""

    replica: str


@value
class CopiedTables:
    """The tables of a master, by the names of their rows in its files."""

    topics: Mapping[str, Any]
    groups: Mapping[str, Any]
    offsets: Mapping[str, Mapping[int, int]]
    delays: Mapping[int, int]
    cancelled: Sequence[Sequence[Any]] = ()
    """The cancelled messages, which no file of RocketMQ has."""
    topics_version: int = 0
    """The version of ``topics``, as in `LogBytes`; 0 if the master can't say."""
    starts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The marks of groups that ``start_at`` has moved; no file of RocketMQ has these either."""
    version: int = 0
    """Number of cancellations and marks since the master was opened."""
    schedules: Mapping[str, Any] = field(default_factory=dict)
    """Rows of schedules, by name."""


@value
class CopyTables(Request[CopiedTables]):
    """Return the topics, the groups, the progress of consumers and delays, and the cancelled messages."""

    notify: Callable[[], None] | None = None
    """Called once, under the runner's lock, when a table changes."""
    replica: str = ""
    """The replica's id. Its last ``notify`` replaces the earlier."""
    copy: Callable[[int, bool], bool] | None = None
    """Lets the replica copy up to a ``version``, until `LeaveLog`: ``copy(version, True)`` before it returns, in the
    thread of a request that waits for it, ``copy(version, False)`` soon after. Returns whether the replica has it."""
    is_early: bool = False
    """Whether only the progress of groups with a mark is needed, because a request waits."""
