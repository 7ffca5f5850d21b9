"""Walks over the messages of queues from the newest to the oldest."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

from librmq.diagnosis import GivenUpMessage, StoreView, View
from librmq.diagnosis.deadletters import given_up
from librmq.errors import CorruptionError
from librmq.message import StoredMessage, dead_letter_topic

QUEUES: Final = 25
"""Queues that are read; of more those with the newest messages."""


def freshest(view: View[Any], runs: dict[Any, range]) -> dict[Any, range]:
    """Return the queues that a page reads: of many, those with the newest messages."""
    if len(runs) <= QUEUES:
        return runs
    return dict(heapq.nlargest(QUEUES, runs.items(), key=lambda run: view.stored_at(run[0], run[1].stop - 1) or 0))


def backwards(view: View[Any], runs: Mapping[Any, range]) -> Iterator[tuple[Any, StoredMessage]]:
    """Yield the messages of some queues, the newest first, each with its queue."""

    def of_queue(queue: Any, ids: range) -> Iterator[tuple[Any, StoredMessage]]:
        for message in queue_backwards(view, queue, ids, len(ids)):
            yield queue, message

    walks = (of_queue(queue, ids) for queue, ids in runs.items())
    return heapq.merge(*walks, key=lambda found: -found[1].store_timestamp_ms)


def newest_letters(view: View[Any], group: str, limit: int) -> list[tuple[StoredMessage, GivenUpMessage]]:
    """Return the newest dead letters of a group, the last one first."""
    times = view.resent_times
    runs = {queue: ids for queue, ids in view.queues(dead_letter_topic(group)).items() if ids}
    newest = islice(backwards(view, freshest(view, runs)), limit)
    return [(message, given_up(group, message, times)) for _, message in newest]


def queue_backwards(view: View[Any], queue: Any, ids: range, limit: int) -> Iterator[StoredMessage]:
    """Yield the messages of a queue, the newest first, about ``limit`` of them."""
    end = ids.stop
    while end > ids.start and ids.stop - end < limit:
        begin = max(ids.start, end - min(limit, 32))
        yield from reversed(_readable(view, queue, range(begin, end)))
        end = begin


def _readable(view: View[Any], queue: Any, offsets: range) -> list[StoredMessage]:
    """Return the messages of a queue without damaged ones, which the place tells."""
    try:
        return list(view.messages(queue, offsets))
    except CorruptionError as error:
        if not isinstance(view, StoreView):
            raise
        if len(offsets) == 1:
            view.store.log.leave_out(error)
            return []
    return [message for at in offsets for message in _readable(view, queue, range(at, at + 1))]
