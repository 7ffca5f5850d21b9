"""What a listener may raise to say what becomes of its message: control flow, not errors.

A listener that returns has consumed. `ReconsumeLater` gives the message back to be delivered again after a delay, as
any other exception does by the group's policy; `SuspendQueue` lets an orderly queue rest. Mirrors
``ConsumeConcurrentlyStatus``, ``ConsumeOrderlyStatus`` and their contexts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

__all__ = ["DeadLetter", "Delivered", "ReconsumeLater", "SuspendQueue"]


class Delivered(Protocol):
    """The fields of a message that wrappers around a listener read."""

    @property
    def topic(self) -> str:
        """The topic that the message was sent to."""
        ...

    @property
    def tags(self) -> str | None:
        """The tag."""
        ...

    @property
    def properties(self) -> Mapping[str, str]:
        """All properties."""
        ...

    @property
    def unique_key(self) -> str | None:
        """The unique id that the producer gave the message."""
        ...

    @property
    def message_id(self) -> str:
        """The unique id if there is one, else the broker's."""
        ...


class ReconsumeLater(Exception):
    """Deliver the message again later.

    ``delay_level`` 0 lets the broker choose by how often it was delivered (10 s, 30 s, 1 min, …), above 0 names a
    level, below 0 makes it a dead letter at once. Of a batch, the first ``consumed`` messages are consumed all the
    same, and those behind them come again.
    """

    def __init__(self, reason: str = "", *, delay_level: int = 0, consumed: int = 0) -> None:
        super().__init__(reason)
        self.delay_level = delay_level
        self.consumed = consumed


class DeadLetter(ReconsumeLater):
    """Stop, do not retry: the message goes to the group's dead letters at once."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason, delay_level=-1)


class SuspendQueue(Exception):
    """Let the queue of an orderly consumer rest for ``seconds`` (None: as configured), then deliver the same again."""

    def __init__(self, reason: str = "", *, seconds: float | None = None) -> None:
        super().__init__(reason)
        self.seconds = seconds
