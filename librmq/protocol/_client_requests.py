"""Requests of clients: of producers, of consumers that pull or receive, and of brokers to them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from librmq.config import wrong_kind
from librmq.errors import BrokerUnreachableError, MessageIllegalError, RmqError
from librmq.java.lang import java_int
from librmq.message import Message, MessageQueue, StoredMessage
from librmq.message.ids import Host
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic
from librmq.protocol._request import ReadRequest, Request, RequestHandler, value

__all__ = [
    "DAMAGE_MS", "ENDED", "INNER_PRODUCER", "MAX_INVISIBLE_MS", "MAX_RECEIVED", "NOT_SENT_HERE", "OF_GROUP",
    "REPLAY_PRODUCER", "TOOL_PRODUCERS", "Acknowledge", "CancelMessage", "CancelReceive", "CancelResult",
    "ChangeInvisible", "ChannelClosed", "CheckSubscription", "CheckTransaction", "ClientRemoved", "ConsumeFrom",
    "ConsumerData", "ConsumerIds", "ConsumersChanged", "EndTransaction", "ForwardToDeadLetters", "GroupSubscriptions",
    "Heartbeat", "HoldPlace", "LockQueues", "MaxOffset", "MessageModel", "MinOffset", "PendingSend", "PullMessage",
    "PullResponse", "PullStatus", "QueryOffset", "QueueOffsetAt", "Receive", "ReceiveResponse", "Received",
    "ReplyArrived", "SendBack", "SendBatch", "SendLater", "SendMessage", "SendReply", "SendResponse", "SendStatus",
    "SendTogether", "SentBack", "SentMessage", "StartGroup", "StartOutcome", "Subscription", "TakeHandOuts", "Takes",
    "TopicGroups", "TransactionState", "UnlockQueues", "Unregister", "UpdateOffset", "cancel_request", "ended_cause",
    "process_deaths",
]  # fmt: skip
"""What `librmq.protocol` has of this module."""

INNER_PRODUCER: Final = "CLIENT_INNER_PRODUCER"
"""Producer group of the messages that consumers and tools send for a group."""
REPLAY_PRODUCER: Final = "librmq-replay"
"""Producer group of `librmq replay`, which sends stored messages with their ids."""
TOOL_PRODUCERS: Final = frozenset((INNER_PRODUCER, REPLAY_PRODUCER))
"""The groups whose messages repeat ids on purpose."""


class CancelResult(NamedTuple):
    """What has become of a message that was to be cancelled."""

    cancelled: bool
    """Whether it is not delivered, because of this call or an earlier one."""
    why: str
    """The reason, for people."""


NOT_SENT_HERE: Final = CancelResult(cancelled=False, why="the broker has no message of a producer with this id")


class PullStatus(enum.Enum):
    """Status of a pull."""

    FOUND = "FOUND"
    NO_NEW_MESSAGE = "NO_NEW_MESSAGE"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    OFFSET_ILLEGAL = "OFFSET_ILLEGAL"
    HELD = "HELD"
    """No message yet: the broker calls `PullMessage.notify` when the client should ask again."""


class MessageModel(enum.Enum):
    """How a group's instances share messages: each message to one instance, or every message to all."""

    CLUSTERING = "CLUSTERING"
    """Each message goes to one instance."""
    BROADCASTING = "BROADCASTING"
    """Every message goes to all instances."""


class ConsumeFrom(enum.Enum):
    """Where a group starts in a queue without stored progress."""

    LAST = "CONSUME_FROM_LAST_OFFSET"
    """At the end: messages that were sent before the group started are not consumed."""
    FIRST = "CONSUME_FROM_FIRST_OFFSET"
    """At the first message that the queue still has."""
    TIMESTAMP = "CONSUME_FROM_TIMESTAMP"
    """At the first message that was stored at ``consume_from_timestamp_ms`` or later."""


@value
class Subscription:
    """Subscription of a group to a topic; of two, the one with the larger ``version`` (ms) is newer."""

    topic: str
    expression: str = "*"
    expression_type: str = "TAG"
    """``TAG`` or ``SQL92``."""
    version: int = 0

    @property
    def is_by_tags(self) -> bool:
        """Whether it selects by tags; so does one that names no type."""
        return self.expression_type in ("", "TAG")


@value
class ConsumerData:
    """A consumer group, as one client describes it."""

    group: str
    kind: str
    """``push`` or ``pull``."""
    model: MessageModel
    consume_from: ConsumeFrom
    subscriptions: Mapping[str, Subscription]
    """By topic."""
    max_reconsume_times: int | None = None
    """Redeliveries before a message becomes a dead letter; -1: the group's setting; None: the client does not say."""
    set_timestamp_ms: int = 0
    """When the instance started, or last changed this number: in a group the latest decides."""


@value
class Heartbeat(Request[None]):
    """Register a client with these groups, in place of its former groups."""

    client_id: str
    client: RequestHandler
    """The client's endpoint, for `ConsumersChanged`, `CheckTransaction`, `ResetOffsets`, …"""
    producer_groups: frozenset[str]
    consumers: tuple[ConsumerData, ...]
    checking_groups: frozenset[str] | None = None
    """The producer groups in which this client answers checks of transactions; None: the client does not say."""


@value
class Unregister(Request[None]):
    """Remove a client from a group, as producer or as consumer."""

    client_id: str
    producer_group: str | None = None
    consumer_group: str | None = None


@value
class ChannelClosed(Request[None]):
    """Remove a client from all its groups, because its connection has ended."""

    client_id: str
    has_ended: bool = False
    """Whether its process has ended, so that its queues in order are free; else their locks expire by themselves."""


@value
class ConsumerIds(ReadRequest[tuple[str, ...]]):
    """Return the ids of a group's clients, in any order."""

    group: str


@value
class GroupSubscriptions(ReadRequest[Mapping[str, Mapping[str, Subscription]]]):
    """Return the subscriptions of a group's clients, by client id and topic, from their heartbeats."""

    group: str


@value
class CheckSubscription(ReadRequest[None]):
    """Check whether the broker can serve a subscription, before a consumer starts.

    Raises:
        BrokerError: Filters of its type are switched off (SYSTEM_ERROR), or it does not compile
            (SUBSCRIPTION_PARSE_FAILED).
    """

    client_id: str
    group: str
    subscription: Subscription


@value
class TopicGroups(ReadRequest[tuple[str, ...]]):
    """Return the groups that subscribe to a topic or have progress in it."""

    topic: str


@value
class PullResponse:
    """Result of a pull; ``next_offset`` is the offset of the next pull, whatever the status."""

    status: PullStatus
    next_offset: int
    min_offset: int
    max_offset: int
    messages: Sequence[StoredMessage] = ()
    is_held: bool = False
    """Whether the broker will call `PullMessage.notify`: with HELD, or as `PullMessage.stay` says."""
    suggests_replica: bool = False
    """Whether the next pull should ask a replica: this pull read so far back that the messages are not in memory."""


DAMAGE_MS: Final = 60_000
"""Time after which a damaged message becomes a dead letter by default."""


@value
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
    """Keep ``notify`` for the next messages even if this pull finds some, unless the next are already stored."""
    take: Callable[[bytes, int, int], int | None] | None = None
    """Called with the record of a matching message and the queue's minimum and maximum offset, in place of ``notify``,
    when that message is the only one after those pulled. The call begins it and returns the progress to store, 0 for
    none; the pull stays held. Or it returns None: then ``notify`` is called, and a pull gets the message."""
    subscription_version: int | None = None
    """The least version that the subscription in the group's heartbeats must have, unless None."""
    joined: bool = False
    """Whether the messages may be `StoredRecords`, for a client that needs their bytes only."""
    damage_ms: int | None = None
    """Time after which a damaged message becomes a dead letter of the group and is passed; -1 for never. None means
    `DAMAGE_MS` for push consumers, and never for others. Until then the pull raises `BrokerDamageError`."""


@value
class TakeHandOuts(Request[tuple[int, int]]):
    """Ask how many messages a client of a group with a rate may hand out now; the lowest rate of the members counts.

    The answer also has the time at which to ask again. RocketMQ has no such request.
    """

    group: str
    client_id: str
    wanted: int
    rate_by_1000: int
    """Messages in 1,000 seconds."""
    burst: int


@value
class SentBack:
    """Result of sending a message back."""

    is_dead: bool
    """Whether the message is a dead letter now."""
    max_reconsume_times: int
    """Number of redeliveries before a message becomes a dead letter."""
    due_timestamp_ms: int | None = None
    """Time of the next delivery; None for a dead letter."""


@value
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
    reconsume_times: int = 0
    """The record's redeliveries, from which a client derives the result if the broker does not report it."""


@value
class CancelMessage(Request[CancelResult]):
    """Cancel the delivery of a message that waits for its time. RocketMQ 4 has no such request."""

    message_id: str
    """Its unique id, or its offset id."""
    topic: str | None = None
    """The topic that it was sent to; None searches all."""
    dry_run: bool = False
    """Whether only the answer is wanted."""
    recall_handle: str | None = None
    """What a broker of 5.x returned when it was sent, by which such a broker recalls it."""


class SentMessage(Protocol):
    """A message that a producer has sent, such as `librmq.SendResult`."""

    @property
    def message_id(self) -> str:
        """The unique id."""
        ...

    @property
    def queue(self) -> MessageQueue:
        """The queue that it is for."""
        ...

    @property
    def recall_handle(self) -> str | None:
        """What a broker of 5.x recalls it by; None if it gave nothing, as for a half message."""
        ...


def cancel_request(sent: SentMessage) -> CancelMessage:
    """Return the request that cancels a message that was sent.

    Raises:
        MessageIllegalError: It is a batch, whose messages never wait.
        TypeError: It is something else.
    """
    try:
        message_id, topic, handle = sent.message_id, sent.queue.topic, sent.recall_handle
    except AttributeError:
        raise wrong_kind("receipt", sent, "what send returned") from None
    if "," in message_id:
        raise MessageIllegalError(f"topic {topic!r}: a batch has no delay, so none of its messages can be cancelled")
    return CancelMessage(message_id, topic, recall_handle=handle)


@value
class QueryOffset(ReadRequest["int | None"]):
    """Return a group's stored progress in a queue, None if there is none.

    Without stored progress the answer is 0 if the queue's minimum is 0 and its first message counts as in memory.
    """

    group: str
    topic: str
    queue_id: int


@value
class UpdateOffset(Request[None]):
    """Store a group's progress in a queue: the queue offset of the next message."""

    group: str
    topic: str
    queue_id: int
    queue_offset: int
    only_forward: bool | None = None
    """Whether later progress stays: the holder of the queue has written this on the page of groups, and goes on."""


@value
class HoldPlace(Request[object]):
    """Return the place of a group's progress in a queue, for the consumer that holds the queue.

    An endpoint that says `Endpoint.has_page` answers with the `Place`. Over the wire, the answer is its number. It is
    None without a page of groups. What has begun there is suspect, unless its holder still runs or ``was_held``.
    """

    group: str
    topic: str
    queue_id: int
    client_id: str
    was_held: bool = False
    """Whether the client has the queue already, and asks for its place again."""


class StartOutcome(enum.Enum):
    """What `StartGroup` has done."""

    MOVED = "moved"
    MOVED_BEFORE = "moved before"
    NO_QUEUES = "no queues"
    """The topic has none yet, so its messages come after the start."""
    BEYOND_END = "beyond end"
    """Each of the topic's queues ends before the queue offset; nothing has changed."""


@value
class StartGroup(Request[StartOutcome]):
    """Move a group's progress in a topic, unless this request has moved it before.

    RocketMQ has no such request.
    """

    group: str
    topic: str
    timestamp_ms: int = -1
    """To the first message stored at or after a time; -1 is the end."""
    queue_offset: int | None = None
    """To this queue offset instead, or the nearest that a queue has, unless all end before it."""
    client_id: str | None = None
    """The client that starts; it reads the progress after the answer, so the broker does not ask it to move."""


@value
class MaxOffset(ReadRequest[int]):
    """Return the queue offset of the next message."""

    topic: str
    queue_id: int


@value
class MinOffset(ReadRequest[int]):
    """Return the queue offset of the oldest message."""

    topic: str
    queue_id: int


@value
class QueueOffsetAt(ReadRequest[int]):
    """Return the queue offset whose store time is nearest to ``timestamp_ms``."""

    topic: str
    queue_id: int
    timestamp_ms: int


@value
class LockQueues(Request[frozenset[MessageQueue]]):
    """Lock queues for a client of a group, or renew its locks; return the queues that it holds then."""

    group: str
    client_id: str
    queues: frozenset[MessageQueue]


@value
class UnlockQueues(Request[None]):
    """Release locks."""

    group: str
    client_id: str
    queues: frozenset[MessageQueue]


# ---- receives

MAX_RECEIVED: Final = 32
"""Messages that one receive can return, as in 5.x."""
MAX_INVISIBLE_MS: Final = 12 * 3_600_000


@value
class Received:
    """A message that a receive has handed out."""

    message: StoredMessage
    stored_topic: str
    """The topic of its queue: for a redelivery the group's retry topic."""
    receipt: str
    """Names this delivery to `Acknowledge` and the like."""
    attempt: int
    """1 for the first delivery."""
    visible_timestamp_ms: int
    """When it comes again unless it is acknowledged."""


@value
class ReceiveResponse:
    """Result of a receive."""

    messages: Sequence[Received] = ()
    is_held: bool = False
    """Whether the broker will call `Receive.notify`."""
    suspect_deaths: int = 0
    """How often processes have ended at a message that waits for a receive which takes suspects; 0 without one."""


ENDED: Final = "its process ended"


def process_deaths(properties: Mapping[str, str]) -> tuple[int, int]:
    """Return how often processes have ended that had received a message, and how often of these it was alone."""
    deaths, _, alone = properties.get(PropertyName.PROCESS_DEATHS, "").partition(" ")
    return java_int(deaths) or 0, java_int(alone) or 0


def ended_cause(deaths: int, limit: int) -> str:
    """Return the cause of the dead letter of a message at which its process has ended."""
    return f"{ENDED} {deaths} times while it ran alone (max_process_deaths={limit})"


OF_GROUP: Final = -1
"""Stands for the group's setting."""


class Takes(enum.IntEnum):
    """Whether a receive takes a message that was in flight at a process which has ended by surprise."""

    NO_SUSPECT = 0
    ALONE = 1
    """While the client's process has no other message in work."""
    BESIDE_OTHERS = 2


@value
class Receive(Request[ReceiveResponse]):
    """Hand out messages of any queue of a topic, and hide each from the group for ``invisible_ms``.

    A message that is not acknowledged by then comes again, as one more attempt; after the group's retries it becomes a
    dead letter. If there is none yet, and ``notify`` is given, the broker calls it once, under the runner's lock, when
    the client should ask again; `CancelReceive` ends the wait. With ``max_messages`` 0 and ``notify`` no
    message is handed out, and ``notify`` is called when a receive can find one.

    Mirrors ``PopMessageRequestHeader`` and ``NotificationRequestHeader`` of 5.x.

    Raises:
        BrokerError: The topic does not exist or may not be read, the group may not consume, the filter does not
            compile, or a number is out of range.
    """

    client_id: str
    group: str
    topic: str
    max_messages: int = MAX_RECEIVED
    invisible_ms: int = 60_000
    subscription: Subscription | None = None
    """None means all messages."""
    attempt_id: str = ""
    """Of a group in order: the same id is answered with the same messages while they are in flight."""
    max_attempts: int | None = None
    """None means one more than the group's retries."""
    notify: Callable[[], None] | None = None
    acknowledged: tuple[str, ...] = ()
    """Receipts of messages of the same group and topic, which are acknowledged first; the answer does not name them."""
    damage_ms: int = DAMAGE_MS
    """Time after which a damaged message becomes a dead letter of the group; -1 for never. Its queue waits for that,
    and other queues are received from."""
    max_process_deaths: int | None = None
    """Ends of its receiver's process, alone, before a message is a dead letter; 0 for never, `OF_GROUP` for the group's
    setting. None: the client takes suspects like other messages."""
    takes: Takes = Takes.NO_SUSPECT


@value
class CancelReceive(Request[None]):
    """Cancel a receive that is held, by its ``notify``."""

    notify: Callable[[], None]


@value
class Acknowledge(Request[tuple[bool, ...]]):
    """Acknowledge received messages; return for each receipt whether it was valid.

    A receipt is no longer valid when its message has come again. Acknowledging twice is allowed within the invisible
    time that the receipt names.
    """

    group: str
    topic: str
    receipts: tuple[str, ...]
    is_one_way: bool = False
    """Whether a remote broker's answer is not awaited, so that all receipts count as valid."""


@value
class ChangeInvisible(Request[str]):
    """Let a received message come again ``invisible_ms`` from now unless it is acknowledged; return its receipt.

    Raises:
        ReceiptError: The message has come again, or was acknowledged.
    """

    group: str
    topic: str
    receipt: str
    invisible_ms: int
    """0 makes it come again immediately."""
    keeps_receipt: bool = False
    """Whether the old receipt stays valid, as in a renewal on behalf of a client."""


@value
class ForwardToDeadLetters(Request[None]):
    """Make a received message a dead letter of its group.

    Raises:
        ReceiptError: The message has come again, or was acknowledged.
    """

    group: str
    topic: str
    receipt: str
    cause: str = ""


# ---- producers


class SendStatus(enum.Enum):
    """How durable a stored message is."""

    SEND_OK = "SEND_OK"
    """The message is as durable as the broker's settings require."""
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    """The message is stored, but its flush to the disk failed or took too long."""
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    """The message is stored, but no replica had it in time."""
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"
    """The message is stored, but no replica can keep up."""


class TransactionState(enum.Enum):
    """How a transaction ends; UNKNOWN leaves this to the check."""

    COMMIT = 8
    """Consumers get the message."""
    ROLLBACK = 12
    """The message is discarded."""
    UNKNOWN = 0
    """The broker asks again later."""


class SendResponse(NamedTuple):
    """Place of a stored message, or of the first of a batch."""

    status: SendStatus
    queue_id: int
    queue_offset: int
    """The queue offset of the first message; the others of a batch follow it."""
    physical_offset: int
    offset_ids: tuple[str, ...]
    """The broker's ids, one for each message."""
    transaction_id: str | None = None
    recall_handle: str | None = None
    """Of a message with a delivery time at a broker of 5.x."""


@value
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
    """The maximum of a consumer that sends a message back itself, as an orderly consumer does."""
    timeout_ms: float | None = None
    """Milliseconds for the answer of a remote broker; None for its route's timeout."""
    is_one_way: bool = False
    """Whether the sender needs no answer. A remote broker sends none, so places in the response are -1."""
    default_topic: str = SystemTopic.AUTO_CREATE
    """A missing topic is made like this one."""


@value
class SendBatch(Request[SendResponse]):
    """Store messages of one topic as one batch."""

    group: str
    messages: tuple[Message, ...]
    queue_id: int
    born_timestamp_ms: int
    born_host: Host
    default_queues: int = 4
    timeout_ms: float | None = None
    """Milliseconds for the answer of a remote broker; None for its route's timeout."""
    default_topic: str = SystemTopic.AUTO_CREATE
    """A missing topic is made like this one."""


@value
class SendTogether(Request[list[SendResponse]]):
    """Store messages that came together, as `SendMessage` stores each, up to the first that is refused.

    The answer has the responses for the stored messages. It is an error if none is: that for the first one.
    """

    sends: Sequence[SendMessage]


class PendingSend:
    """A send whose outcome comes later."""

    __slots__ = ("number", "outcome", "send")

    def __init__(self, send: SendMessage) -> None:
        self.send = send
        self.number = 0
        """Tells it apart at its endpoint, which sets this."""
        self.outcome: SendResponse | RmqError | None = None


class SendLater(Request[bool]):
    """Send messages, as `SendMessage` sends each, without waiting for their outcomes.

    Only a `SendsLater` answers this; a wrapper around one gets each `SendMessage`. The answer is False, and nothing was
    sent, where that could wait.
    """

    __slots__ = ("ended", "explain", "give_up", "sends")

    def __init__(self, sends: Sequence[PendingSend], ended: Callable[[Sequence[PendingSend]], None]) -> None:
        """``ended`` is called with sends that have an outcome, each once, by any thread, and must not wait."""
        self.sends: Sequence[PendingSend] = sends
        self.ended: Callable[[Sequence[PendingSend]], None] = ended
        self.give_up: Callable[[PendingSend], BrokerUnreachableError | None] = lambda pending: None
        """Waits no longer; returns the error, or None if there is an outcome already. From the endpoint."""
        self.explain: Callable[[BrokerUnreachableError], BrokerUnreachableError] = lambda error: error
        """Returns the error to raise in place of one. From the endpoint; may read files."""


@value
class SendReply(Request[SendResponse]):
    """Push a reply to the client that waits for it, and store it.

    Raises:
        BrokerError: The client is not connected to this broker; the reply is stored nevertheless.
    """

    send: SendMessage


@value
class EndTransaction(Request[None]):
    """Commit or roll back a half message; UNKNOWN does nothing."""

    group: str
    state: TransactionState
    queue_offset: int
    """Of the half message, in the half topic."""
    physical_offset: int
    message_id: str = ""
    from_check: bool = False


# ---- requests of brokers to clients


@value
class ConsumersChanged(Request[None]):
    """Notify a client that the members of its group have changed, so that it rebalances."""

    group: str
    max_reconsume_times: int | None = None
    """The redeliveries that count for the group now; -1: the group's setting; None: the broker does not say."""


@value
class ClientRemoved(Request[None]):
    """Notify a client that the broker has removed it. As in 4.9, its next heartbeat registers it again."""

    broker_name: str


@value
class CheckTransaction(Request[None]):
    """Ask a producer how the local transaction of a half message ended; it answers by `EndTransaction`, or never."""

    group: str
    message: StoredMessage
    transaction_id: str
    broker_name: str


@value
class ReplyArrived(Request[None]):
    """Pass a client the reply to one of its requests; a reply that it no longer waits for is ignored."""

    send: SendMessage
    """The reply, as its sender sent it."""
