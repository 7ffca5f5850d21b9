"""A store as it was at an earlier moment.

The log is only appended to, and queues and index follow it. So everything before a place of the log is as it was when
the log ended there, except files that retention has deleted since.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from datetime import UTC, datetime

from librmq.commitlog import CommitLog, LogEnd
from librmq.config import to_timestamp_ms
from librmq.consumequeue import ConsumeQueue
from librmq.errors import ConfigError
from librmq.store.engine.store_parts import Parts, QueueTable

Moment = datetime | int
"""A time with a time zone, or a physical offset."""
_IsBefore = Callable[[int, int], bool]
"""Whether a record was there; called with its place and size."""


def cut_at(parts: Parts, moment: Moment) -> None:
    """Let parts that are only read end as they did at a moment.

    A time includes the messages stored up to it, a physical offset those that end there or before.

    Raises:
        ConfigError: The moment is before the first message, or a physical offset is behind the log's end.
    """
    log = parts.log
    end, last = _place(parts, moment)
    queues = QueueTable(parts.open_queue, {})
    for name in parts.queues:
        queue = parts.queues[name]
        if _cut_queue(queue, end):
            queues[name] = queue
    parts.queues = queues
    parts.index.show_before(end)
    log.end, log.last_write, log.found_end = end, last, LogEnd(end, None, last)
    parts.cuts = [cut for cut in parts.cuts if cut.kind == "size"]  # others lie behind it


def _place(parts: Parts, moment: Moment) -> tuple[int, int | None]:
    """Return where the log ended, and its last record."""
    log = parts.log
    is_before = _before_time(log, moment) if isinstance(moment, datetime) else _before_place(log, moment)
    end, last = log.begin, None
    for place, size, raw in log.scan(_late_record(parts, is_before), check_body=False):
        if raw is None:
            continue
        if not is_before(place, size):
            break
        end, last = place + size, place
    return end, last


def _before_place(log: CommitLog, moment: int) -> _IsBefore:
    if not log.begin <= moment <= log.end:
        raise ConfigError(f"at: expected a physical offset from {log.begin} to {log.end}, found {moment!r:.80}")
    return lambda place, size: place + size <= moment


def _before_time(log: CommitLog, moment: datetime) -> _IsBefore:
    at_ms = to_timestamp_ms("at", moment)
    first_ms = log.first_store_timestamp_ms(log.begin) if log.end > log.begin else None
    if first_ms is None or first_ms > at_ms:
        first = "there is none" if first_ms is None else f"it is of {datetime.fromtimestamp(first_ms / 1000, UTC)}"
        raise ConfigError(f"at: expected a time from the first message on ({first}), found {moment}")

    def is_before(place: int, size: int) -> bool:
        stored_ms = log.store_timestamp_ms(place, size)
        return stored_ms is None or stored_ms <= at_ms  # a deleted message is older than all others

    return is_before


def _late_record(parts: Parts, is_before: _IsBefore) -> int:
    """Return the place of the last record before the moment that has an entry in a queue, else the log's begin.

    Records without entries can follow it.
    """
    latest = parts.log.begin
    for name in parts.queues:
        queue = parts.queues[name]
        count = _entries(queue, is_before)
        entry = queue.entry(queue.min_offset + count - 1) if count else None
        if entry is not None:
            latest = max(latest, entry.physical_offset)
    return latest


def _cut_queue(queue: ConsumeQueue, log_end: int) -> bool:
    """Drop the entries of later records; return False if the queue did not exist."""
    before = queue.max_offset
    queue.show_before(queue.min_offset + _entries(queue, lambda place, size: place + size <= log_end))
    return queue.max_offset > 0 or queue.max_offset == before


def _entries(queue: ConsumeQueue, is_before: _IsBefore) -> int:
    """Return how many entries of a queue belong to records before the moment."""

    def is_later(queue_offset: int) -> bool:
        entry = queue.entry(queue_offset)
        return entry is not None and not is_before(entry.physical_offset, entry.size)

    return bisect_left(range(queue.min_offset, queue.max_offset), True, key=is_later)
