"""Search for the entries of certain records in a queue, by bisection."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from librmq.commitlog import CommitLog
from librmq.consumequeue import ENTRY, ENTRY_SIZE, HOLE_SIZE, ConsumeQueue, entry_dtype
from librmq.errors import CorruptionError
from librmq.message.message import StoredMessage
from librmq.runtime import lazy_numpy as np
from librmq.store.engine.open_store import QueueName

_BLOCK: Final = 4096
_FILLER_SIZE: Final = HOLE_SIZE.to_bytes(4)


def recreated_queues(log: CommitLog, queues: Mapping[QueueName, ConsumeQueue]) -> dict[QueueName, int]:
    """Return the beginning of the records of each queue that counts from 0 again, by its first entry.

    A topic deleted on a broker leaves its records in the log. A new topic of that name counts from 0 again.
    """
    begins = {}
    for name, queue in queues.items():
        raw = queue.read(0, 1) if queue.stored_begin == 0 else b""
        place, size, _ = ENTRY.unpack(raw) if raw else (-1, 0, 0)
        if place > log.begin and size != HOLE_SIZE:
            with suppress(CorruptionError):
                data = log.read(place, size)
                message = None if data is None else StoredMessage(data)
                if message is not None and (message.topic, message.queue_id, message.queue_offset) == (*name, 0):
                    begins[name] = place
    return begins


def first_not_older(queue: ConsumeQueue, end: int, begin: int, log_file_size: int) -> int | None:
    """Return the first entry below queue offset ``end`` that is neither filler nor of a message before ``begin``."""
    at, raw = queue.stored_begin, queue.read(end, 1)
    latest_hole = ENTRY.unpack(raw)[0] - log_file_size if raw else 0
    try:
        for first, block in queue.blocks(at, end):
            place = block["physical_offset"]
            filler = (block["size"] == HOLE_SIZE) & ((place == 0) | (place <= latest_hole))
            wrong = np.flatnonzero((place >= begin) & ~filler)
            if len(wrong):
                return first + int(wrong[0])
            at = first + len(block)
    except CorruptionError:
        return at
    return None


def first_at(queue: ConsumeQueue, physical_offset: int) -> int:
    """Return the first queue offset whose message is at or after ``physical_offset``, by bisection.

    The search first goes back from the end in growing steps, because the place is mostly there, so few files are
    mapped.
    """
    low, high = queue.min_offset, queue.max_offset
    step = 1
    while low < high:
        middle = max(low, high - step) if step else (low + high) // 2
        at = _behind_filler(queue, middle, high)
        raw = queue.read(at, 1) if at < high else b""
        if not raw or ENTRY.unpack(raw)[0] >= physical_offset:
            high, step = middle, 2 * step
        else:
            low, step = at + 1, 0
    return _behind_filler(queue, low, queue.max_offset)


def _behind_filler(queue: ConsumeQueue, queue_offset: int, end: int) -> int:
    """Return the first entry from ``queue_offset`` to ``end`` that is not filler."""
    while queue_offset < end and queue.read(queue_offset, 1)[8:12] == _FILLER_SIZE:
        raw = queue.read(queue_offset, min(_BLOCK, end - queue_offset))
        others = np.flatnonzero(np.frombuffer(raw, entry_dtype())["size"] != HOLE_SIZE)
        queue_offset += int(others[0]) if len(others) else len(raw) // ENTRY_SIZE
    return queue_offset
