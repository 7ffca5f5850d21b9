"""Lag of a group in one queue, from three offsets: its progress, and the queue's begin and end.

::

    lag = max(0, end - max(progress, begin))        a queue without progress counts from its beginning

RocketMQ 4.9 counts a queue without progress from 0, and so includes messages that were deleted long ago.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

_Terms: TypeAlias = Any
"""A number, or a column of them."""


def lag_terms(
    progress: _Terms, begin: _Terms, end: _Terms, greatest: Callable[[_Terms, _Terms], _Terms] = max, zero: _Terms = 0
) -> tuple[_Terms, _Terms, _Terms]:
    """Return the first unread offset, the lag, and the number of messages that were deleted before they were read.

    A queue is given by its numbers, many queues by columns with an element for each, such as arrays of numpy or
    columns of Spark. Where a group has no progress, ``progress`` is ``begin``. A progress below 0 counts as 0.

    Args:
        progress: The offset of the group's next message.
        begin: The queue's first offset.
        end: The offset of the queue's next message.
        greatest: Returns the greater one of two numbers, or of two columns for each queue.
        zero: The number 0 in a form that ``greatest`` takes.
    """
    first = greatest(progress, begin)
    return first, greatest(end - first, zero), greatest(begin - greatest(progress, zero), zero)


def queue_lag(progress: int | None, begin: int, end: int) -> int:
    """Return the number of messages that a group has left to consume in a queue."""
    lag: int = lag_terms(begin if progress is None else progress, begin, end)[1]
    return lag
