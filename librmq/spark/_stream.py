"""Stores as streams: offsets by queue, a limit for each trigger, and runs up to the present end.

Spark keeps the offsets (`librmq.spark._positions`) in its checkpoint, and repeats its requests after a failure. This
module only keeps the stores open for reading, next to their writers. Queues and topics that appear later are read from
their start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import numpy as np
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from librmq.clock import SystemClock
from librmq.columns import DataLossError, ReadOptions, RemoteStore
from librmq.columns.options import LARGEST_OFFSET, log_unknown_topics
from librmq.columns.planned_store import PlannedStore
from librmq.columns.planner import damaged_parts, portable, queue_parts
from librmq.columns.remote import RemoteFiles
from librmq.errors import ConfigError, RmqError
from librmq.message.lag import queue_lag
from librmq.override import override
from librmq.spark._options import StreamLimits, shows_conditions
from librmq.spark._positions import Document, Key, Positions, flat, nested
from librmq.spark._source import read_part
from librmq.store.engine.store_parts import QueueName

if TYPE_CHECKING:
    import pyarrow as pa

    from librmq.files import Damage
    from librmq.spark._kafka import Renaming

SMALLEST_RECORD: Final = 91
"""Bytes of a record with an empty body, topic and properties."""

MIRROR_SECONDS: Final = 10.0
"""Seconds for which the mirror of a store behind a URL serves."""

_UNLESS: Final = "option failOnDataLoss=false"


class StreamLag(NamedTuple):
    """The number of messages of a queue that a stream has not processed."""

    store: str
    topic: str
    queue_id: int
    lag: int


def stream_lags(progress: Any) -> list[StreamLag]:
    """Return the lag of each queue at the end of a batch, the largest first.

    ``progress`` is a ``StreamingQueryProgress`` or ``StreamingQuery.lastProgress``; other sources are left out. Of a
    queue or store that is gone, nothing is left to read: its lag is 0.
    """
    lags = []
    for source in json.loads(progress.json)["sources"] if hasattr(progress, "json") else progress["sources"]:
        ends, latest = (_offset_of(source.get(name)) for name in ("endOffset", "latestOffset"))
        lags += [StreamLag(*key, queue_lag(ends.get(key), 0, end)) for key, end in (ends | latest).items()]
    return sorted(lags, key=lambda lag: (-lag.lag, lag))


def _offset_of(value: Any) -> dict[Key, int]:
    """Return an offset of a progress; empty for another source's."""
    try:
        return flat(json.loads(value) if isinstance(value, str) else value)
    except (ValueError, AttributeError, TypeError):
        return {}


class RefusedStream(DataSourceStreamReader):
    """A stream with wrong options; the first call raises the error."""

    def __init__(self, error: RmqError) -> None:
        self._error = error

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise self._error

    initialOffset = getDefaultReadLimit = latestOffset = partitions = read = _refuse  # noqa: N815 (Spark's)


@shows_conditions
class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The stream on the driver; only `read` runs in workers, on a copy."""

    def __init__(
        self, options: ReadOptions, limits: StreamLimits, schema: pa.Schema, renaming: Renaming | None = None
    ) -> None:
        if options.view == "log":
            raise ConfigError("option view: a stream reads messages or queues; the log is read by a batch")
        if options.ending != "latest" or options.selection.end_ms is not None:
            raise ConfigError("options endingOffsets, until, endingOffsetsByTimestamp: a stream has no end")
        self._options = options
        self._unless = _UNLESS if options.fail_on_data_loss else None
        self._limits = limits
        self._schema = schema
        self._renaming = renaming
        self._stores: dict[str, PlannedStore] = {}
        self._mirrored_at: dict[str, float] = {}
        """When the mirror of each store behind a URL was made."""
        self._warned: set[str] = set()
        self._reported: set[Damage] = set()
        """What batches have told of damage that planning found."""
        self._target: dict[Key, int] | None = None
        self._waiting_since: float | None = None
        """When a trigger first had fewer messages than wanted."""

    @override
    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_stores": {}, "_mirrored_at": {}, "_target": None}

    # --------------------------------------------------------------------------------------------------- on the driver

    @override
    def initialOffset(self) -> Document:  # noqa: N802 (Spark's)
        """Return the start of a new query."""
        options, stores = self._options, self._refreshed_stores()
        log_unknown_topics(options, {topic for store in stores.values() for topic in store.topics})
        offsets: dict[Key, int] = {}
        for path, store in stores.items():
            store.check_names(options.starting, options.offset_settings[0])
            for name, queue in store.queues.items():
                begin = store.offset_of(name, options.starting, -2)
                begin = queue.begin if begin < 0 else begin
                if options.fail_on_data_loss:
                    store.check_loss(name, begin, begin)
                begin = min(max(begin, queue.begin), queue.end)
                if options.selection.begin_ms is not None:
                    begin = max(begin, store.first_at(name, options.selection.begin_ms))
                offsets[path, *name] = begin
        return Positions().moved_to(offsets, self._stores).document()

    @override
    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        max_offsets = self._limits.max_offsets
        if self._limits == StreamLimits():
            return ReadAllAvailable()
        # Spark knows no limit of several kinds; `latestOffset` applies the others.
        return ReadMaxRows(LARGEST_OFFSET if max_offsets is None else max_offsets)

    @override
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Keep the present ends, where the query stops."""
        self._target = self._ends()

    @override
    def reportLatestOffset(self) -> Document:  # noqa: N802
        """Return the present ends."""
        return nested(self._ends())

    @override
    def latestOffset(self, start: Document, limit: ReadLimit) -> Document:  # noqa: N802
        """Return the end of the next batch."""
        ends = self._ends()
        former = self._located(start)
        if self._target is not None:
            ends = {key: min(end, self._target[key]) for key, end in ends.items() if key in self._target}
        begins = {key: former.next_offset(key, self._stores, self._unless) for key in ends}
        lags = {key: max(0, end - begins[key]) for key, end in ends.items()}
        counts = lags
        if not isinstance(limit, ReadAllAvailable):
            if self._target is None and self._waits(sum(lags.values())):
                return start
            if self._limits.max_offsets is not None:
                counts = share(lags, self._limits.max_offsets)
            if self._limits.max_bytes is not None:
                counts = self._within(counts, self._limits.max_bytes, begins)
        # A deleted queue stays in the offset, so that it is not read again if it comes back.
        offsets = dict(former.offsets) | {
            key: begins[key] + count for key, count in counts.items() if count or key in former.offsets
        }
        end = former.moved_to(offsets, self._stores)
        return start if end == Positions.parse(start) else end.document()

    def _waits(self, lag: int) -> bool:
        """Return whether a trigger has too few messages, and has not waited long enough for more."""
        now = SystemClock().monotonic()
        if not 0 < lag < self._limits.min_offsets:
            self._waiting_since = None
            return False
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since < self._limits.max_delay_seconds:
            return True
        self._waiting_since = None
        return False

    def _within(self, lags: Mapping[Key, int], max_bytes: int, begins: Mapping[Key, int]) -> dict[Key, int]:
        """Return as many messages of each queue as have at most ``max_bytes`` bytes in all.

        A queue gets bytes in proportion to its messages; what it leaves goes to the queues with more messages. The
        queue with the most messages gives at least one, so that a large record does not stop a queue forever.
        """
        left, behind = max_bytes, sum(lags.values())
        counts: dict[Key, int] = {}
        order = sorted((key for key in lags if lags[key]), key=lambda key: (lags[key], key))
        for key in order:
            share_ = left * lags[key] // behind
            until = begins[key] + min(lags[key], share_ // SMALLEST_RECORD)
            entries = self._stores[key[0]].queues[key[1:]].entries(begins[key], until)
            sums = np.cumsum(np.maximum(entries["size"].astype(np.int64), 0))  # damage is for the read to report
            counts[key] = int(np.searchsorted(sums, share_, "right"))
            left -= int(sums[counts[key] - 1]) if counts[key] else 0
            behind -= lags[key]
        if order:
            counts[order[-1]] = max(counts[order[-1]], 1)
        return counts

    @override
    def partitions(self, start: Document, end: Document) -> list[InputPartition]:
        """Return the tasks of a batch."""
        stores = self._refreshed_stores()
        begins, ends = self._located(start), self._located(end).offsets
        options = self._options
        parts: list[InputPartition] = []
        for path, store in stores.items():
            ranges: dict[tuple[str, int], range] = {}
            for key, until in ends.items():
                if key[0] != path or begins.offsets.get(key) == until:
                    continue
                name = key[1:]
                queue = store.queues.get(name)
                begin = begins.next_offset(key, stores, self._unless)
                if options.fail_on_data_loss:
                    if queue is None:
                        raise self._loss_of(store, name, range(begin, until))
                    store.check_loss(name, begin, until)
                if queue is not None:
                    ranges[name] = range(max(begin, queue.begin), min(until, queue.end))
            of_store = damaged_parts(store, self._reported)
            ranges = {name: offsets for name, offsets in ranges.items() if len(offsets)}
            if ranges:
                entries_only = options.view == "queues"
                of_store += queue_parts(store, list(ranges.items()), options.min_partitions, entries_only=entries_only)
            parts += [InputPartition(portable(part, store)) for part in of_store]
        return parts

    @override
    def commit(self, end: Document) -> None:
        """Do nothing: Spark does not call this for a query's last batch anyway."""

    @override
    def stop(self) -> None:
        """Close the stores."""
        for store in self._stores.values():
            store.close()
        self._stores, self._mirrored_at = {}, {}

    def _loss_of(self, store: PlannedStore, name: QueueName, offsets: range) -> RmqError:
        """Return the error for a batch with ``offsets`` of a queue that the stream does not have."""
        what = f"{store.path}: topic {name[0]!r}, queue {name[1]}"
        if store.options.selection.has_queue(*name):
            return DataLossError(f"{what}: deleted ({_UNLESS} goes on without it)")
        return ConfigError(
            f"{what}: the options leave it out, but the batch that Spark repeats has its offsets {offsets.start} to "
            f"{offsets.stop}: start the stream once more with the former options, which ends this batch, and then "
            f"change them ({_UNLESS} leaves these messages out)"
        )

    def _located(self, offset: Document) -> Positions:
        """Return the positions of ``offset`` in the open stores."""
        return Positions.parse(offset).located(self._stores, self._unless, self._warned)

    def _ends(self) -> dict[Key, int]:
        return {
            (path, *name): queue.end
            for path, store in self._refreshed_stores().items()
            for name, queue in store.queues.items()
        }

    def _refreshed_stores(self) -> Mapping[str, PlannedStore]:
        for path in self._options.paths:
            store = self._stores.get(path)
            if "://" in path:
                self._mirror(path)
            elif store is None:
                self._stores[path] = PlannedStore.open(path, self._options)
            else:
                store.refresh()
        return self._stores

    def _mirror(self, url: str) -> None:
        """Open a store behind a URL as it is now, unless that was done a moment ago: a mirror costs many requests."""
        now, former = SystemClock().monotonic(), self._stores.get(url)
        if former is not None and now - self._mirrored_at[url] < MIRROR_SECONDS:
            return
        files = RemoteFiles({url: RemoteStore(url, self._options.storage_options)})
        options = files.mirrored(replace(self._options, paths=(url,)))
        self._stores[url] = PlannedStore.open(options.paths[0], options, files)
        self._mirrored_at[url] = now
        if former is not None:
            former.close()

    # ------------------------------------------------------------------------------------------------------ in workers

    @override
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a task's rows, in a worker."""
        # The offsets hold the stream's start, so times no longer matter.
        options = replace(self._options, selection=replace(self._options.selection, begin_ms=None))
        return read_part(options, self._schema, self._renaming, partition.value)


def share(lags: Mapping[Key, int], count: int) -> dict[Key, int]:
    """Divide ``count`` messages by lag; messages left by rounding go to the largest fractions."""
    total = sum(lags.values())
    if total <= count:
        return dict(lags)
    shares = {key: count * lag // total for key, lag in lags.items()}
    left = count - sum(shares.values())
    by_remainder = sorted(lags, key=lambda key: (-(count * lags[key] % total), key))
    for key in by_remainder[:left]:
        shares[key] += 1
    return shares
