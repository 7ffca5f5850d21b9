"""Where a sent message went, and what hooks see of a send."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from librmq.message.message import Message, MessageQueue
from librmq.protocol import SendStatus

__all__ = ["SendContext", "SendHook", "SendResult"]


class SendResult(NamedTuple):
    """Where a message, or a batch, went."""

    status: SendStatus
    message_id: str
    """The unique id; those of a batch joined by commas."""
    offset_id: str
    """The broker's id; those of a batch joined by commas."""
    queue: MessageQueue
    queue_offset: int
    """The first message's."""
    transaction_id: str | None = None


class SendContext(NamedTuple):
    """What a hook sees of a send."""

    group: str
    message: Message
    queue: MessageQueue
    attempt: int
    """Counts from 0."""


SendHook = Callable[[SendContext], Callable[[SendResult | None, Exception | None], None] | None]
"""Called before each try; what it returns is called after it, with the result or the error."""
