"""Lag of a group in one queue, from three offsets: its progress, and the queue's begin and end.

::

    lag = max(0, end - max(progress, begin))        a queue without progress counts from its begin

RocketMQ 4.9 counts a queue without progress from 0, and so includes messages that were deleted long ago.
"""

from __future__ import annotations

from collections.abc import Iterable


def unread_from(progress: int | None, begin: int) -> int:
    """Return the offset of the first message that a group has left to consume in a queue."""
    return begin if progress is None or progress < begin else progress


def queue_lag(progress: int | None, begin: int, end: int) -> int:
    """Return the number of messages that a group has left to consume in a queue."""
    first = unread_from(progress, begin)
    return end - first if end > first else 0


def unread_and_lags(
    progresses: Iterable[int | None], begins: Iterable[int], ends: Iterable[int]
) -> tuple[list[int], list[int]]:
    """Return `unread_from` and `queue_lag` of many queues."""
    # Inline, because calls for each of 100,000 queues would take longer than all else.
    firsts = [
        begin if progress is None or progress < begin else progress
        for progress, begin in zip(progresses, begins, strict=True)
    ]
    return firsts, [end - first if end > first else 0 for first, end in zip(firsts, ends, strict=True)]


def deleted_unread(progress: int | None, begin: int) -> int:
    """Return the number of messages that were deleted before a group reached them; a progress below 0 counts as 0."""
    return 0 if progress is None else max(0, begin - max(0, progress))
