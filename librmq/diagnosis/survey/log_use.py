"""The files of a store's log: when each was written, and which messages in it groups still have to consume."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final
from zlib import crc32

import numpy as np
import numpy.typing as npt

from librmq.consumequeue import HOLE_SIZE
from librmq.diagnosis.group_lag import Lag
from librmq.diagnosis.survey.message_sums import has_columns
from librmq.diagnosis.survey.model import LogFileUse
from librmq.diagnosis.view import StoreView
from librmq.errors import CorruptionError
from librmq.message.record import FIXED_SIZE
from librmq.store.engine.open_store import QueueName

_NEVER: Final = (1 << 63) - 1


def log_file_uses(view: StoreView, name: str, group_lag: Lag) -> Iterator[LogFileUse]:
    """Yield a row per file of the log, oldest first; ``group_lag`` is the lag of all groups."""
    log, size = view.store.log, view.store.log.sequence.file_size
    first = log.begin // size
    count = max(0, -(-log.end // size) - first)
    messages, unread, last = (np.zeros(count, np.int64) for _ in range(3))
    unread_from = _unread_from(group_lag)
    blocks = _by_columns(view, unread_from) if has_columns() else _by_queues(view, unread_from)
    for places, sizes, is_unread in blocks:
        at = places // size - first
        is_here = (sizes != HOLE_SIZE) & (at >= 0) & (at < count)
        messages += np.bincount(at[is_here], minlength=count)
        unread += np.bincount(at[is_here & is_unread], minlength=count)
        np.maximum.at(last, at[is_here], places[is_here])
    for number in range(count):
        begin = (first + number) * size
        time = log.store_timestamp_ms(int(last[number])) if messages[number] else None
        end = min(begin + size, log.end)
        data = log.data_at(max(begin, log.begin), FIXED_SIZE)
        yield LogFileUse(
            name, begin, end - max(begin, log.begin), int(messages[number]), int(unread[number]), time,
            f"{crc32(data):08x}",
        )  # fmt: skip


Block = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]
"""Physical offsets and sizes of messages, and whether a group has yet to consume them."""


def _by_columns(view: StoreView, unread_from: dict[QueueName, int]) -> Iterator[Block]:
    """Yield the entries of all queues in log order; memory use does not grow with their number."""
    import pyarrow as pa

    from librmq.columns import reader

    columns = ("queueId", "queueOffset", "physicalOffset", "size")
    for batch in reader(
        view.store.path, view="queues", topic=set(view.topics), columns=["topic", *columns, "_corrupt_record"],
        mode="PERMISSIVE", as_recovered=True, files=view.store.files,
    ) if view.topics else ():  # fmt: skip
        batch = batch.filter(batch.column("_corrupt_record").is_null())  # verify reports the others
        topic = batch.column("topic").dictionary_encode()
        topics = topic.dictionary.to_pylist()
        ids, offsets, places, sizes = (batch.column(column).cast(pa.int64()).to_numpy() for column in columns)
        queues, rows = np.unique(topic.indices.cast(pa.int64()).to_numpy() << 32 | ids, return_inverse=True)
        starts = [unread_from.get((topics[queue >> 32], queue & 0xFFFFFFFF), _NEVER) for queue in queues.tolist()]
        yield places, sizes, offsets >= np.array(starts, np.int64)[rows]


def _by_queues(view: StoreView, unread_from: dict[QueueName, int]) -> Iterator[Block]:
    for name in view.ranges:
        with suppress(CorruptionError):  # verify reports it
            for begin, block in view.store.queues[name].blocks():
                is_unread = begin + np.arange(len(block)) >= unread_from.get(name, _NEVER)
                yield block["physical_offset"].astype(np.int64), block["size"].astype(np.int64), is_unread


def _unread_from(group_lag: Lag) -> dict[QueueName, int]:
    """Return for each queue the first queue offset that a group has yet to consume."""
    unread: dict[QueueName, int] = {}
    for row in group_lag:
        if row.lag:
            name = row.topic, row.queue_id
            start = row.max_offset - row.lag
            unread[name] = min(start, unread.get(name, start))
    return unread
