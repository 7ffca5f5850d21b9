"""Requests of producers."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from librmq.message.hosts import Host
from librmq.message.message import Message
from librmq.message.topics import AUTO_CREATE_TOPIC
from librmq.protocol.endpoint import Request, value


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


@value
class SendResponse:
    """Place of a stored message, or of the first of a batch."""

    status: SendStatus
    queue_id: int
    queue_offset: int
    """The queue offset of the first message; the others of a batch follow it."""
    physical_offset: int
    offset_ids: tuple[str, ...]
    """The broker's ids, one for each message."""
    transaction_id: str | None = None


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
    default_topic: str = AUTO_CREATE_TOPIC
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
    default_topic: str = AUTO_CREATE_TOPIC
    """A missing topic is made like this one."""


@value
class SendPlain(Request[list[SendResponse]]):
    """Store messages that came together, as `SendMessage` stores each, up to the first that needs anything special.

    The answer has the responses for the stored messages, maybe none. The caller sends the next message alone.
    """

    sends: Sequence[SendMessage]


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
    message_id: str
    from_check: bool = False
