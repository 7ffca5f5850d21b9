"""Requests of brokers to their clients."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import field

from librmq.message.message import MessageQueue, StoredMessage
from librmq.protocol.client_requests import MessageModel
from librmq.protocol.endpoint import Request, value


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
    with_passed: bool = False
    """Whether messages that a filter has passed over count, although the client will report them only later.

    Push consumers only: the program of a pull consumer chooses what it commits."""


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
    running: int
    """Listeners that run."""
    strategy: str
    """The name of the function that allocates queues."""
    queues: tuple[HeldQueue, ...]
    listeners: tuple[ListenerCall, ...]
    """The listeners that run in threads, without coroutines."""
    started_ms: int = 0
    """When it joined its group."""


@value
class DescribeInstance(Request[InstanceState]):
    """Return the state of a client's consumer of a group. Mirrors 4.9's ``GET_CONSUMER_RUNNING_INFO``."""

    group: str


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
