"""The result of a send, and a send as hooks see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from librmq.message.message import Message, MessageQueue
from librmq.protocol import SendStatus


class SendResult(NamedTuple):
    """Where a sent message or batch is stored."""

    status: SendStatus
    """How durable the message is."""
    message_id: str
    """The unique id; for a batch the unique ids, joined by commas."""
    offset_id: str
    """The broker's id; for a batch the ids, joined by commas."""
    queue: MessageQueue
    """The queue that has it."""
    queue_offset: int
    """The queue offset of the first message."""
    transaction_id: str | None = None
    """The id of the transaction; None outside of one."""


class SendContext(NamedTuple):
    """A send, as hooks see it."""

    group: str
    message: Message
    queue: MessageQueue
    attempt: int
    """Number of the try, counting from 0."""


SendHook = Callable[[SendContext], Callable[[SendResult | None, Exception | None], None] | None]
"""A function called before each try, which returns a function to call after it with the result or the error."""
