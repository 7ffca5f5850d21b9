"""Exceptions by which a listener decides about its message: control flow, not errors.

A message is consumed when the listener returns. `ReconsumeLater` delivers it again after a delay; any other exception
does so by the group's policy. `SuspendQueue` pauses an orderly queue. `DownstreamDown` pauses without counting an
attempt. The others mirror ``ConsumeConcurrentlyStatus``,
``ConsumeOrderlyStatus`` and their contexts.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, Protocol, cast

from librmq.errors import ConfigError

__all__ = ["DeadLetter", "DownstreamDown", "ReconsumeLater", "SuspendQueue"]


_LONGEST_REST_S: Final = 86_400


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

    With ``delay_level`` 0 the broker chooses the delay by the number of deliveries (10 s, 30 s, 1 min, …). Above 0 it
    is a delay level; below 0 the message becomes a dead letter immediately. The first ``consumed`` messages of a
    concurrent batch still count as consumed; the others are delivered again.
    """

    def __init__(self, reason: str = "", *, delay_level: int = 0, consumed: int = 0) -> None:
        super().__init__(reason)
        self.delay_level = delay_level
        self.consumed = consumed


class DeadLetter(ReconsumeLater):
    """Make the message a dead letter of the group immediately, without a retry."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason, delay_level=-1)


class DownstreamDown(ReconsumeLater):
    """Something that every message needs is down: rest for ``seconds``, then deliver the message again.

    The message has not failed, so this counts as no attempt and never leads to the dead letters. The consumer begins no
    listener while it rests, and then tries one before it begins the others. With ``only_queue`` only the queue of the
    message rests. The first ``consumed`` messages of a concurrent batch count as consumed.
    """

    def __init__(
        self, reason: str = "", *, seconds: float | timedelta = 60, only_queue: bool = False, consumed: int = 0
    ) -> None:
        super().__init__(reason, consumed=consumed)
        self.seconds: float = seconds.total_seconds() if isinstance(seconds, timedelta) else float(seconds)
        if not 0 < self.seconds <= _LONGEST_REST_S:
            raise ValueError(f"seconds: expected more than 0, and a day at most, found {seconds!r}")
        self.only_queue = only_queue


class SuspendQueue(Exception):
    """Pause an orderly queue for ``seconds`` (None: as configured), then deliver the same messages again."""

    def __init__(self, reason: str = "", *, seconds: float | None = None) -> None:
        super().__init__(reason)
        self.seconds = seconds


_CONSUMED: Final = "_librmq_consumed"
_FAILURES: Final = frozenset({"FAILURE", "RECONSUME_LATER", "SUSPEND", "SUSPEND_CURRENT_QUEUE_A_MOMENT"})


def returned_failure(result: object) -> ReconsumeLater | SuspendQueue | None:
    """Return the exception for a result, an enum or its name, by which RocketMQ's other clients report a failure."""
    name = result.name if isinstance(result, enum.Enum) else result
    if not isinstance(name, str) or name.upper() not in _FAILURES:
        return None
    reason = f"the listener returned {name}"
    return SuspendQueue(reason) if name.upper().startswith("SUSPEND") else ReconsumeLater(reason)


def is_coroutine_function(function: object) -> bool:
    """Return whether ``function`` returns a coroutine; an object can have an asynchronous ``__call__``."""
    call = getattr(cast(Any, function), "__call__", None)  # noqa: B004 - only the type's own counts
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def refuse_generator(function: object, where: str = "") -> None:
    """Raise `ConfigError` for a generator function, asynchronous or not, because a call of it runs nothing.

    ``where`` begins the message.
    """
    call = getattr(cast(Any, function), "__call__", None)  # noqa: B004 - only the type's own counts
    if any(inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code) for code in (function, call)):
        raise ConfigError(
            f"{where}the listener {function!r:.80} is a generator, whose body a call does not run: "
            "remove `yield` from it"
        )


def note_consumed(error: BaseException, count: int) -> None:
    """Note in the error of a batch how many of its first messages are consumed, as `ReconsumeLater` says itself."""
    vars(error)["consumed" if isinstance(error, ReconsumeLater) else _CONSUMED] = count


def consumed_before(error: Exception) -> int:
    """Return how many messages of a batch are consumed in spite of its error."""
    return error.consumed if isinstance(error, ReconsumeLater) else getattr(error, _CONSUMED, 0)


def is_requested(error: Exception | None) -> bool:
    """Return whether a listener asked for another delivery, and has not failed by surprise."""
    return error is None or isinstance(error, ReconsumeLater | SuspendQueue)
