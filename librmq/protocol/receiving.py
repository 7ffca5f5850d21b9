"""Receives with an invisible time per message (POP)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from librmq.message.message import StoredMessage
from librmq.protocol.consuming import Subscription
from librmq.protocol.endpoint import Request, value

MAX_RECEIVED: Final = 32
"""Messages that one receive can return, as in 5.x."""
MAX_INVISIBLE_MS: Final = 12 * 3_600_000


@value
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


@value
class ReceiveResponse:
    """Result of a receive."""

    messages: Sequence[Received] = ()
    is_held: bool = False
    """Whether the broker will call `Receive.notify`."""


@value
class Receive(Request[ReceiveResponse]):
    """Hand out messages of any queue of a topic, and hide each from the group for ``invisible_ms``.

    A message that is not acknowledged by then comes again, as one more attempt; after the group's retries it becomes a
    dead letter. If there is none yet, and ``notify`` is given, the broker calls it once, under the runner's lock, when
    the client should ask again; `CancelReceive` ends the wait.

    Mirrors ``PopMessageRequestHeader`` of 5.x.

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


@value
class CancelReceive(Request[None]):
    """Cancel a receive that is held, by its ``notify``."""

    notify: Callable[[], None]


@value
class Acknowledge(Request[tuple[bool, ...]]):
    """Acknowledge received messages; return for each receipt whether it was valid.

    A receipt is no longer valid when its message has come again. Acknowledging twice is no error.
    """

    group: str
    topic: str
    receipts: tuple[str, ...]


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
