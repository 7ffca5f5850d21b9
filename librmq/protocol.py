"""The protocol of clients and brokers: requests and responses as values.

Clients hold a `Route` to `Endpoint`s; a broker is an endpoint, and a route with one endpoint. A client is an `Endpoint`
too, which its brokers call (`Heartbeat.client`). Faults, latency, a wire or a recorder wrap `Endpoint.call`. A refused
request raises `BrokerError`.

Mirrors the request headers of ``org.apache.rocketmq.common.protocol``; the codes are those of ``ResponseCode``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar, dataclass_transform

from librmq.message.hosts import Host
from librmq.message.message import Message, MessageQueue, StoredMessage
from librmq.runtime.runner import Runner

R = TypeVar("R")
_C = TypeVar("_C")

PERM_READ: Final = 4
PERM_WRITE: Final = 2
PERM_INHERIT: Final = 1

LOCAL_HOST: Final[Host] = ("127.0.0.1", 0)


@dataclass_transform(frozen_default=True)
def _value(cls: type[_C]) -> type[_C]:
    # Only the type checker prevents changes, because a frozen dataclass takes 2 µs longer to make.
    return dataclass(slots=True, weakref_slot=False)(cls)


class ResponseCode(enum.IntEnum):
    """Reason of a broker's refusal."""

    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    FILTER_DATA_NOT_EXIST = 27
    NO_BUYER_ID = 204
    NOT_IN_CURRENT_UNIT = 205
    CONSUMER_NOT_ONLINE = 206


class SendStatus(enum.Enum):
    """Durability of a stored message."""

    SEND_OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"


class PullStatus(enum.Enum):
    """Status of a pull."""

    FOUND = "FOUND"
    NO_NEW_MESSAGE = "NO_NEW_MESSAGE"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    OFFSET_ILLEGAL = "OFFSET_ILLEGAL"
    HELD = "HELD"
    """No message yet: the broker calls `PullMessage.notify` when the client should ask again."""


class MessageModel(enum.Enum):
    """Sharing of messages among a group's instances: each message once, or every message to each."""

    CLUSTERING = "CLUSTERING"
    BROADCASTING = "BROADCASTING"


class ConsumeFrom(enum.Enum):
    """Start of a group in a queue without stored progress."""

    LAST = "CONSUME_FROM_LAST_OFFSET"
    FIRST = "CONSUME_FROM_FIRST_OFFSET"
    TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


class TransactionState(enum.Enum):
    """End of a transaction; UNKNOWN leaves it to the check."""

    COMMIT = 8
    ROLLBACK = 12
    UNKNOWN = 0


# ------------------------------------------------------------------------------------------------------------ parties


class Request(Generic[R]):
    """A request whose answer is an ``R``."""

    __slots__ = ()


class Endpoint(Protocol):
    """Answers requests."""

    def call(self, request: Request[R], /) -> R:
        """Answer a request without waiting for other clients. Thread-safe.

        Raises:
            BrokerError: the request is refused.
        """
        ...


@_value
class QueueData:
    """The queues of a topic in one broker."""

    broker_name: str
    read_queues: int
    write_queues: int
    permission: int


class Route(Protocol):
    """The brokers, their topics, and the runner of their clients."""

    @property
    def runner(self) -> Runner:
        """The runner of all users of the route."""
        ...

    def topic_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return the brokers that have ``topic``, by name; empty if none does."""
        ...

    def broker_names(self) -> tuple[str, ...]:
        """Return the names of the brokers that can be reached, sorted."""
        ...

    def endpoint(self, broker_name: str) -> Endpoint:
        """Return the broker of that name.

        Raises:
            NoRouteError: there is none.
        """
        ...

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call ``changed`` under the runner's lock when brokers, topics or queues change.

        Return a function that ends this.

        Raises:
            BrokerUnreachableError: The route is a single broker, which is closed.
        """
        ...


# ------------------------------------------------------------------------------------------------------------ producing


@_value
class SendResponse:
    """Place of a stored message, or of the first of a batch."""

    status: SendStatus
    queue_id: int
    queue_offset: int
    """That of the first message; those of a batch follow it."""
    physical_offset: int
    offset_ids: tuple[str, ...]
    """The broker's ids, one for each message."""
    transaction_id: str | None = None


@_value
class SendMessage(Request[SendResponse]):
    """Store a message, with properties that the client has completed."""

    group: str
    message: Message
    queue_id: int
    """Below 0: the broker chooses."""
    born_timestamp_ms: int
    born_host: Host
    sys_flag: int = 0
    """Compression and transaction bits, as in a record."""
    default_queues: int = 4
    """Number of queues of a topic that this send makes, at most the broker's default."""
    reconsume_times: int = 0
    max_reconsume_times: int | None = None
    """Of a consumer that sends a message back itself, as an orderly one does."""


@_value
class SendBatch(Request[SendResponse]):
    """Store messages of one topic as one batch."""

    group: str
    messages: tuple[Message, ...]
    queue_id: int
    born_timestamp_ms: int
    born_host: Host
    default_queues: int = 4


@_value
class EndTransaction(Request[None]):
    """Commit or roll back a half message; UNKNOWN does nothing."""

    group: str
    state: TransactionState
    queue_offset: int
    """Of the half message, in the half topic."""
    physical_offset: int
    message_id: str
    from_check: bool = False


# ------------------------------------------------------------------------------------------------------------ consuming


@_value
class Subscription:
    """Subscription of a group to a topic; of two, the one with the larger ``version`` (ms) is newer."""

    topic: str
    expression: str = "*"
    expression_type: str = "TAG"
    """``TAG`` or ``SQL92``."""
    version: int = 0


@_value
class ConsumerData:
    """A consumer group, as one client describes it."""

    group: str
    kind: str
    """``push`` or ``pull``."""
    model: MessageModel
    consume_from: ConsumeFrom
    subscriptions: Mapping[str, Subscription]
    """By topic."""


@_value
class Heartbeat(Request[None]):
    """Register a client with these groups, in place of its former ones."""

    client_id: str
    client: Endpoint
    """The client's endpoint, for `ConsumersChanged`, `CheckTransaction`, `ResetOffsets`, …"""
    producer_groups: frozenset[str]
    consumers: tuple[ConsumerData, ...]


@_value
class Unregister(Request[None]):
    """Remove a client from a group, as producer or as consumer."""

    client_id: str
    producer_group: str | None = None
    consumer_group: str | None = None


@_value
class ChannelClosed(Request[None]):
    """Remove a client from all its groups, because its connection has ended."""

    client_id: str


@_value
class ConsumerIds(Request[tuple[str, ...]]):
    """Return the ids of a group's clients, in any order."""

    group: str


@_value
class GroupSubscriptions(Request[Mapping[str, Mapping[str, Subscription]]]):
    """Return the subscriptions of a group's clients, by client id and topic, from their heartbeats."""

    group: str


@_value
class CheckSubscription(Request[None]):
    """Check whether the broker can serve a subscription, before a consumer starts.

    Raises:
        BrokerError: filters of its type are switched off (SYSTEM_ERROR), or it does not compile
            (SUBSCRIPTION_PARSE_FAILED).
    """

    client_id: str
    group: str
    subscription: Subscription


@_value
class TopicGroups(Request["Mapping[str, ConsumerData | None]"]):
    """Return the groups that subscribe to a topic or have progress in it; None for one without a running instance."""

    topic: str


@_value
class PullResponse:
    """Result of a pull; ``next_offset`` is the offset of the next pull, whatever the status."""

    status: PullStatus
    next_offset: int
    min_offset: int
    max_offset: int
    messages: Sequence[StoredMessage] = ()
    is_held: bool = False
    """Whether the broker will call `PullMessage.notify`: with HELD, or as `PullMessage.stay` says."""


@_value
class PullMessage(Request[PullResponse]):
    """Read up to ``max_messages`` messages of a queue that match.

    If there is none yet, and ``notify`` is given, the answer is HELD. The broker keeps one ``notify`` for each client,
    group and queue, which a later pull replaces. It calls it once, under the runner's lock, when a matching message
    arrives, or up to 5 s after other messages. The client then asks again. The pull also stores progress.
    """

    client_id: str
    group: str
    topic: str
    queue_id: int
    queue_offset: int
    max_messages: int = 32
    subscription: Subscription | None = None
    """None means the subscription in the group's heartbeats."""
    commit_offset: int | None = None
    """Progress of the group in this queue to store, unless None."""
    notify: Callable[[], None] | None = None
    stay: bool = False
    """Keep ``notify`` for the next messages even if this pull finds some, unless the next are there already."""


@_value
class SentBack:
    """Result of sending a message back."""

    is_dead: bool
    """Whether the message is a dead letter now."""
    max_reconsume_times: int
    """Number of redeliveries before a message becomes a dead letter."""
    due_timestamp_ms: int | None = None
    """Time of the next delivery; None for a dead letter."""


@_value
class SendBack(Request["SentBack | None"]):
    """Send a message back after a failure: store it for the group again, delayed, or as a dead letter.

    The answer is None if the broker does not report the result.
    """

    group: str
    physical_offset: int
    delay_level: int
    """0 means by the number of deliveries, below 0 a dead letter at once."""
    max_reconsume_times: int | None = None
    """The consumer's maximum; None means the group's."""
    origin_topic: str = ""
    origin_message_id: str = ""
    cause: str = ""
    """Cause of the failure, which a dead letter keeps as a property."""


@_value
class QueryOffset(Request["int | None"]):
    """Return a group's stored progress in a queue, None if there is none.

    Without stored progress the answer is 0 if the queue's minimum is 0 and its first message counts as in memory.
    """

    group: str
    topic: str
    queue_id: int


@_value
class UpdateOffset(Request[None]):
    """Store a group's progress in a queue: the queue offset of the next message."""

    group: str
    topic: str
    queue_id: int
    queue_offset: int


@_value
class MaxOffset(Request[int]):
    """Return the queue offset of the next message."""

    topic: str
    queue_id: int


@_value
class MinOffset(Request[int]):
    """Return the queue offset of the oldest message."""

    topic: str
    queue_id: int


@_value
class QueueOffsetAt(Request[int]):
    """Return the queue offset whose store time is nearest to ``timestamp_ms``."""

    topic: str
    queue_id: int
    timestamp_ms: int


@_value
class LockQueues(Request[frozenset[MessageQueue]]):
    """Lock queues for a client of a group, or renew its locks; return the queues that it holds then."""

    group: str
    client_id: str
    queues: frozenset[MessageQueue]


@_value
class UnlockQueues(Request[None]):
    """Release locks."""

    group: str
    client_id: str
    queues: frozenset[MessageQueue]


# ----------------------------------------------------------------------------------------------------- receiving (POP)


@_value
class Received:
    """A message that a receive has handed out."""

    message: StoredMessage
    topic: str
    """The topic of the receive, for a redelivery too."""
    receipt: str
    """Names this delivery to `Acknowledge` and the like."""
    attempt: int
    """1 for the first delivery."""
    visible_timestamp_ms: int
    """When it comes again unless it is acknowledged."""


@_value
class ReceiveResponse:
    """Result of a receive."""

    messages: Sequence[Received] = ()
    is_held: bool = False
    """Whether the broker will call `Receive.notify`."""


@_value
class Receive(Request[ReceiveResponse]):
    """Hand out messages of any queue of a topic, and hide each from the group for ``invisible_ms``.

    A message that is not acknowledged by then comes again, as one more attempt; after the group's retries it becomes a
    dead letter. If there is none yet, and ``notify`` is given, the broker calls it once, under the runner's lock, when
    the client should ask again; `CancelReceive` ends the wait.

    Mirrors ``PopMessageRequestHeader`` of 5.x.

    Raises:
        BrokerError: the topic does not exist or may not be read, the group may not consume, the filter does not
            compile, or a number is out of range.
    """

    client_id: str
    group: str
    topic: str
    max_messages: int = 32
    invisible_ms: int = 60_000
    subscription: Subscription | None = None
    """None means all messages."""
    attempt_id: str = ""
    """Of a group in order: the same id is answered with the same messages while they are in flight."""
    max_attempts: int | None = None
    """None means one more than the group's retries."""
    notify: Callable[[], None] | None = None


@_value
class CancelReceive(Request[None]):
    """Forget a receive that is held, by its ``notify``."""

    notify: Callable[[], None]


@_value
class Acknowledge(Request[tuple[bool, ...]]):
    """Say that received messages are done with; return for each receipt whether it was good.

    A receipt is no longer good when its message has come again. Acknowledging twice is no error.
    """

    group: str
    topic: str
    receipts: tuple[str, ...]


@_value
class ChangeInvisible(Request[str]):
    """Let a received message come again ``invisible_ms`` from now unless it is acknowledged; return its receipt.

    Raises:
        ReceiptError: the message has come again, or was acknowledged.
    """

    group: str
    topic: str
    receipt: str
    invisible_ms: int
    """0 makes it come again immediately."""
    keeps_receipt: bool = False
    """Whether the old receipt stays good, as in a renewal on behalf of a client."""


@_value
class ForwardToDeadLetters(Request[None]):
    """Make a received message a dead letter of its group.

    Raises:
        ReceiptError: the message has come again, or was acknowledged.
    """

    group: str
    topic: str
    receipt: str
    cause: str = ""


# ------------------------------------------------------------------------------------------------------ administration


@_value
class CreateTopic(Request[None]):
    """Make a topic, or change its queues and permission; stored messages do not move."""

    topic: str
    read_queues: int = 8
    write_queues: int = 8
    permission: int = PERM_READ | PERM_WRITE


@_value
class DeleteTopic(Request[None]):
    """Remove a topic with its queue counts and permission. Its messages stay until retention deletes them."""

    topic: str


@_value
class CleanUnusedTopics(Request[tuple[tuple[str, int], ...]]):
    """Delete the queue files of removed topics whose messages have left the log.

    Return the queues as topic and queue id.
    """


@_value
class SetGroup(Request[None]):
    """Make a consumer group, or change how often it retries."""

    group: str
    retry_max_times: int = 16
    is_ordered: bool | None = None
    """Whether receives hand out each queue's messages in order; None leaves it as it is."""


@_value
class ViewMessage(Request["StoredMessage | None"]):
    """Return the message at a physical offset."""

    physical_offset: int


@_value
class QueryMessages(Request[tuple[StoredMessage, ...]]):
    """Return messages of a topic by key or unique id, in log order, at most 64."""

    topic: str
    key: str
    max_messages: int = 64
    begin_ms: int = 0
    end_ms: int = (1 << 63) - 1


@_value
class ResetGroup(Request[Mapping[MessageQueue, int]]):
    """Move a running group's progress on a topic to a time (ms; -1 is the end), and return the new offsets by queue.

    ``force`` moves forward too.

    Raises:
        BrokerError: no client of the group runs (CONSUMER_NOT_ONLINE).
    """

    group: str
    topic: str
    timestamp_ms: int
    force: bool = True


# ------------------------------------------------------------------------------------------------ from broker to client


@_value
class ConsumersChanged(Request[None]):
    """Tell a client that the members of its group have changed, so that it rebalances."""

    group: str


@_value
class Forgotten(Request[None]):
    """Tell a client that the broker has removed it. As in 4.9, its next heartbeat registers it again."""

    broker_name: str


@_value
class CheckTransaction(Request[None]):
    """Ask a producer how the local transaction of a half message ended; it answers by `EndTransaction`, or never."""

    group: str
    message: StoredMessage
    transaction_id: str
    broker_name: str


@_value
class ResetOffsets(Request[None]):
    """Tell a client to continue from these queue offsets in a topic."""

    group: str
    topic: str
    offsets: Mapping[MessageQueue, int] = field(default_factory=dict)


@_value
class ConsumerOffsets(Request[Mapping[MessageQueue, int]]):
    """Return a client's progress in memory, by queue."""

    group: str
    topic: str


@_value
class HeldQueue:
    """A queue of an instance, as the instance has it in memory."""

    queue: MessageQueue
    progress: int | None
    """Queue offset of the next message to be consumed; None while none was."""
    stored: int | None
    """The progress that the broker was last told."""
    waiting: int
    """Messages that were pulled and not begun."""
    running: int
    """Messages that listeners have."""
    first: int | None
    """The smallest queue offset held, at which the progress stays; None if nothing is held."""
    first_message_id: str | None
    first_since_ms: int | None
    """When a listener got that message; None if none has it."""
    first_failures: int
    """Failures of the group on that message so far."""
    pulled_timestamp_ms: int
    is_throttled: bool
    """Pulling pauses until less is held."""


@_value
class ListenerCall:
    """A listener at work."""

    queue: MessageQueue
    queue_offset: int
    """Of its first message."""
    message_id: str
    messages: int
    since_ms: int | None
    """None where the consumer does not note it, as an orderly one."""
    thread: str
    stack: tuple[str, ...]
    """Where the listener's code stands, as ``file:line function``, the outermost call first."""


@_value
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
    running: int
    """Listeners that run."""
    strategy: str
    """The name of the function that allocates queues."""
    queues: tuple[HeldQueue, ...]
    listeners: tuple[ListenerCall, ...]
    """Those that run in threads; a coroutine has none."""


@_value
class DescribeInstance(Request[InstanceState]):
    """Return the state of a client's consumer of a group. Mirrors 4.9's ``GET_CONSUMER_RUNNING_INFO``."""

    group: str
