"""The files of a store's log: when each was written, and what groups have left to consume in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from librmq.consumequeue import HOLE_SIZE
from librmq.diagnosis.backlog import Lag
from librmq.diagnosis.survey.model import LogFileUse
from librmq.diagnosis.view import StoreView
from librmq.errors import CorruptionError
from librmq.store.engine.queue_table import QueueName

__all__ = ["log_file_uses"]


def log_file_uses(view: StoreView, name: str, found: Lag) -> Iterator[LogFileUse]:
    """Yield a row for each file of the log, oldest first; ``found`` is the lag of all groups."""
    log, size = view.store.log, view.store.log.sequence.file_size
    first = log.begin // size
    count = max(0, -(-log.end // size) - first)
    messages, unread, last = (np.zeros(count, np.int64) for _ in range(3))
    unread_from = _unread_from(found)
    for queue_name in view.ranges:
        with suppress(CorruptionError):  # reported by verify
            for begin, block in view.store.queues[queue_name].blocks():
                places = block["physical_offset"].astype(np.int64)
                at = places // size - first
                is_here = (block["size"] != HOLE_SIZE) & (at >= 0) & (at < count)
                messages += np.bincount(at[is_here], minlength=count)
                np.maximum.at(last, at[is_here], places[is_here])
                start = unread_from.get(queue_name)
                if start is not None:
                    is_here &= begin + np.arange(len(block)) >= start
                    unread += np.bincount(at[is_here], minlength=count)
    for number in range(count):
        begin = (first + number) * size
        time = log.store_timestamp_ms(int(last[number])) if messages[number] else None
        end = min(begin + size, log.end)
        yield LogFileUse(name, begin, end - max(begin, log.begin), int(messages[number]), int(unread[number]), time)


def _unread_from(found: Lag) -> dict[QueueName, int]:
    """Return the first queue offset that some group has not consumed, by queue."""
    unread: dict[QueueName, int] = {}
    for row in found:
        if row.lag:
            name = row.topic, row.queue_id
            start = row.max_offset - row.lag
            unread[name] = min(start, unread.get(name, start))
    return unread
