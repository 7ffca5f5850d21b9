"""What clients and brokers say to each other: requests and responses as values.

Clients hold a `Route` to `Endpoint`s; a broker is an endpoint and a route of one. A client is an `Endpoint` too, to
which its brokers speak (`Heartbeat.client`). Whatever stands between them (faults, latency, a wire, a recorder) wraps
`Endpoint.call`. A refused request raises `BrokerError`.

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
    # The type checker keeps values from being changed: a frozen dataclass costs 2 µs more to make.
    return dataclass(slots=True, weakref_slot=False)(cls)


class ResponseCode(enum.IntEnum):
    """Why a broker refused."""

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
    """How well a message is stored."""

    SEND_OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"


class PullStatus(enum.Enum):
    """What a pull came to."""

    FOUND = "FOUND"
    NO_NEW_MESSAGE = "NO_NEW_MESSAGE"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    OFFSET_ILLEGAL = "OFFSET_ILLEGAL"
    HELD = "HELD"
    """Nothing yet: the broker calls `PullMessage.notify` when it is worth asking again."""


class MessageModel(enum.Enum):
    """Whether the instances of a group share the messages or each gets all."""

    CLUSTERING = "CLUSTERING"
    BROADCASTING = "BROADCASTING"


class ConsumeFrom(enum.Enum):
    """Where a group starts in a queue of which no progress is stored."""

    LAST = "CONSUME_FROM_LAST_OFFSET"
    FIRST = "CONSUME_FROM_FIRST_OFFSET"
    TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


class TransactionState(enum.Enum):
    """How a transaction ends; unknown is left to the check."""

    COMMIT = 8
    ROLLBACK = 12
    UNKNOWN = 0


# ------------------------------------------------------------------------------------------------------------ parties


class Request(Generic[R]):
    """A request that is answered with an ``R``."""

    __slots__ = ()


class Endpoint(Protocol):
    """Answers requests."""

    def call(self, request: Request[R], /) -> R:
        """Answer; `BrokerError` if it is refused. Never waits for other clients. Thread-safe."""
        ...


@_value
class QueueData:
    """What a broker has of a topic."""

    broker_name: str
    read_queues: int
    write_queues: int
    permission: int
    topic_sys_flag: int = 0


class Route(Protocol):
    """Which brokers there are, what topics they have, and who runs the turns of their clients."""

    @property
    def runner(self) -> Runner:
        """Takes the turns of all that use the route."""
        ...

    def topic_route(self, topic: str) -> tuple[QueueData, ...]:
        """The brokers that have ``topic``, by name; empty if none does."""
        ...

    def broker_names(self) -> tuple[str, ...]:
        """The brokers that can be reached, sorted."""
        ...

    def endpoint(self, broker_name: str) -> Endpoint:
        """The broker of that name; `NoRouteError` if there is none."""
        ...

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Have ``changed`` called, under the runner's lock, when brokers, topics or their queues change.

        Gives a function that ends it.

        Raises:
            BrokerUnreachableError: The route is a single broker, which is closed.
        """
        ...


# ------------------------------------------------------------------------------------------------------------ producing


@_value
class SendResponse:
    """Where a message, or the first of a batch, was stored."""

    status: SendStatus
    queue_id: int
    queue_offset: int
    """The first message's; those of a batch follow it."""
    physical_offset: int
    offset_ids: tuple[str, ...]
    """The broker's ids, one a message."""
    transaction_id: str | None = None


@_value
class SendMessage(Request[SendResponse]):
    """Store a message; with properties as the client completed them."""

    group: str
    message: Message
    queue_id: int
    """Below 0: the broker chooses."""
    born_timestamp_ms: int
    born_host: Host
    sys_flag: int = 0
    """Compression and transaction bits, as in a record."""
    default_queues: int = 4
    """So many queues a topic gets that is made by this send (at most the broker's default)."""
    reconsume_times: int = 0
    max_reconsume_times: int | None = None
    """Of a consumer that sends a message back by itself, as an orderly one does."""


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
    """What a group takes of a topic. ``version`` (ms) tells the newer of two."""

    topic: str
    expression: str = "*"
    expression_type: str = "TAG"
    """``TAG`` or ``SQL92``."""
    version: int = 0


@_value
class ConsumerData:
    """A group as one client has it."""

    group: str
    kind: str
    """``push`` or ``pull``."""
    model: MessageModel
    consume_from: ConsumeFrom
    subscriptions: Mapping[str, Subscription]
    """By topic."""


@_value
class Heartbeat(Request[None]):
    """A client is there, with these groups; replaces what it said before."""

    client_id: str
    client: Endpoint
    """To which the broker speaks: `ConsumersChanged`, `CheckTransaction`, `ResetOffsets`, …"""
    producer_groups: frozenset[str]
    consumers: tuple[ConsumerData, ...]


@_value
class Unregister(Request[None]):
    """A client leaves a group, as producer or as consumer."""

    client_id: str
    producer_group: str | None = None
    consumer_group: str | None = None


@_value
class ChannelClosed(Request[None]):
    """The connection of a client has ended: it leaves all its groups at once."""

    client_id: str


@_value
class ConsumerIds(Request[tuple[str, ...]]):
    """The ids of a group's clients, in no particular order."""

    group: str


@_value
class GroupSubscriptions(Request[Mapping[str, Mapping[str, Subscription]]]):
    """What each client of a group subscribes to, by client id and topic, as its heartbeats told."""

    group: str


@_value
class CheckSubscription(Request[None]):
    """Ask, before a consumer starts, whether the broker can serve a subscription.

    `BrokerError` SYSTEM_ERROR where filters of its type are switched off, SUBSCRIPTION_PARSE_FAILED where it can't be
    parsed.
    """

    client_id: str
    group: str
    subscription: Subscription


@_value
class TopicGroups(Request["Mapping[str, ConsumerData | None]"]):
    """The groups that subscribe to a topic or have progress in it, as they are now; None where no instance runs."""

    topic: str


@_value
class PullResponse:
    """What a pull found; ``next_offset`` is where to go on, whatever the status."""

    status: PullStatus
    next_offset: int
    min_offset: int
    max_offset: int
    messages: Sequence[StoredMessage] = ()
    is_held: bool = False
    """The broker calls `PullMessage.notify` when it is worth asking again: with HELD, or as `PullMessage.stay` says."""


@_value
class PullMessage(Request[PullResponse]):
    """Read up to ``max_messages`` messages of a queue that match.

    Where there is none yet, and ``notify`` is given, the answer is HELD, and the broker keeps ``notify`` (one for each
    client, group and queue; a later pull replaces it) until a message arrives that matches or, where others have, up to
    5 s later: then it calls it, once, under the runner's lock, and the client asks again. Progress travels with it.
    """

    client_id: str
    group: str
    topic: str
    queue_id: int
    queue_offset: int
    max_messages: int = 32
    subscription: Subscription | None = None
    """None: that which the group's heartbeats told."""
    commit_offset: int | None = None
    """Progress of the group in this queue, to be stored, unless None."""
    notify: Callable[[], None] | None = None
    stay: bool = False
    """Keep ``notify`` even if messages were found, for those that come behind them, unless they are there already."""


@_value
class SentBack:
    """What became of a message that was sent back."""

    is_dead: bool
    """It is a dead letter: the group gets it no more."""
    max_reconsume_times: int
    """Redeliveries before a message becomes a dead letter."""
    due_timestamp_ms: int | None = None
    """When the group gets it again; None for a dead letter."""


@_value
class SendBack(Request["SentBack | None"]):
    """A consumer failed on a message: store it again for its group, for delivery after a delay, or as dead letter.

    None where the broker does not tell what became of it.
    """

    group: str
    physical_offset: int
    delay_level: int
    """0: by how often it was delivered; below 0: a dead letter at once."""
    max_reconsume_times: int | None = None
    """Of the consumer; None: the group's."""
    origin_topic: str = ""
    origin_message_id: str = ""
    cause: str = ""
    """Why the consumer failed; a dead letter keeps it as a property."""


@_value
class QueryOffset(Request["int | None"]):
    """A group's stored progress in a queue.

    None if there is none; but 0 where the queue's minimum is 0 and its first message still counts as in memory.
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
    """The queue offset that the next message will get."""

    topic: str
    queue_id: int


@_value
class MinOffset(Request[int]):
    """The queue offset of the oldest message."""

    topic: str
    queue_id: int


@_value
class OffsetByTime(Request[int]):
    """The queue offset whose store time is nearest ``timestamp_ms``."""

    topic: str
    queue_id: int
    timestamp_ms: int


@_value
class LockQueues(Request[frozenset[MessageQueue]]):
    """Lock queues for a client of a group, or go on holding them; the answer is those it holds then."""

    group: str
    client_id: str
    queues: frozenset[MessageQueue]


@_value
class UnlockQueues(Request[None]):
    """Give locks back."""

    group: str
    client_id: str
    queues: frozenset[MessageQueue]


# ------------------------------------------------------------------------------------------------------ administration


@_value
class CreateTopic(Request[None]):
    """Make a topic, or change its queues and permission; nothing that is stored moves."""

    topic: str
    read_queues: int = 8
    write_queues: int = 8
    permission: int = PERM_READ | PERM_WRITE


@_value
class DeleteTopic(Request[None]):
    """Forget a topic: its queue counts and permission. Its messages stay until retention, for one made of its name."""

    topic: str


@_value
class CleanUnusedTopics(Request[tuple[tuple[str, int], ...]]):
    """Delete the queue files of topics that do not exist, where the log has none of their messages any more.

    The queues: topic, queue id.
    """


@_value
class SetGroup(Request[None]):
    """Make a consumer group, or change how often it retries."""

    group: str
    retry_max_times: int = 16


@_value
class ViewMessage(Request["StoredMessage | None"]):
    """The message at a physical offset."""

    physical_offset: int


@_value
class QueryMessages(Request[tuple[StoredMessage, ...]]):
    """Messages of a topic by key or unique id, in log order; 64 at most."""

    topic: str
    key: str
    max_messages: int = 64
    begin_ms: int = 0
    end_ms: int = (1 << 63) - 1


@_value
class ResetGroup(Request[Mapping[MessageQueue, int]]):
    """Move a running group's progress on a topic to a time (ms; -1: the end). Answers with the new offsets by queue.

    `BrokerError` CONSUMER_NOT_ONLINE where no client of the group runs. ``force`` moves forward too.
    """

    group: str
    topic: str
    timestamp_ms: int
    force: bool = True


# ------------------------------------------------------------------------------------------------ from broker to client


@_value
class ConsumersChanged(Request[None]):
    """The members of a group have changed: share its queues again."""

    group: str


@_value
class Forgotten(Request[None]):
    """The broker takes the client to be gone. If it lives, its next heartbeat says so, as in 4.9."""

    broker_name: str


@_value
class CheckTransaction(Request[None]):
    """How did the local transaction of this half message end? Answered by `EndTransaction`, or never."""

    group: str
    message: StoredMessage
    transaction_id: str
    broker_name: str


@_value
class ResetOffsets(Request[None]):
    """Go on from these queue offsets in a topic."""

    group: str
    topic: str
    offsets: Mapping[MessageQueue, int] = field(default_factory=dict)


@_value
class ConsumerOffsets(Request[Mapping[MessageQueue, int]]):
    """A client's progress in memory, by queue."""

    group: str
    topic: str
