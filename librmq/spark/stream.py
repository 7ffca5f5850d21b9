"""Stores as streams: offsets by queue, a limit for each trigger, and runs up to the present end.

::

    offset   {store: {topic: {queue id: queue offset of the next message}}}

Spark keeps these offsets in its checkpoint, and repeats its requests after a failure. This module only keeps the stores
open for reading, beside their writers. Queues and topics that appear later are read from their start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from librmq.columns.options import ReadOptions
from librmq.columns.parts import DataLossError
from librmq.columns.planner import PlannedStore
from librmq.errors import ConfigError, RmqError
from librmq.spark.partition import PartPartition

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["RefusedStream", "StreamReader", "share"]

Offset = dict[str, dict[str, dict[str, int]]]
Key = tuple[str, str, int]
"""Store, topic, queue id."""


class RefusedStream(DataSourceStreamReader):
    """A stream with wrong options; the first call raises the error."""

    def __init__(self, error: RmqError) -> None:
        self._error = error

    def initialOffset(self) -> Offset:  # noqa: N802 (Spark's)
        """Return the start of a new query."""
        raise self._error

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 (Spark's)
        """Return the limit in the options."""
        raise self._error

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 (Spark's)
        """Return the end of the next batch."""
        raise self._error

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Return the tasks of a batch."""
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a task's rows, in a worker."""
        raise self._error


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The stream on the driver; only `read` runs in workers, on a copy."""

    def __init__(self, options: ReadOptions, schema: pa.Schema) -> None:
        if options.view == "log":
            raise ConfigError("option view: a stream reads messages or queues; the log is read by a batch")
        if options.ending != "latest" or options.wanted.end_ms is not None:
            raise ConfigError("options endingOffsets, endingTimestamp: a stream has no end")
        self._options = options
        self._schema = schema
        self._stores: dict[str, PlannedStore] = {}
        self._target: dict[Key, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_schema": self._schema, "_stores": {}, "_target": None}

    # --------------------------------------------------------------------------------------------------- on the driver

    def initialOffset(self) -> Offset:  # noqa: N802 (Spark's)
        """Return the start of a new query."""
        options = self._options
        found: dict[Key, int] = {}
        for path, store in self._looked_at().items():
            store.check_names(options.starting, "startingOffsets")
            for name, queue in store.queues.items():
                begin = store.offset_of(name, options.starting, -2)
                begin = queue.begin if begin < 0 else begin
                if options.fail_on_data_loss:
                    store.check_loss(name, begin, begin)
                begin = min(max(begin, queue.begin), queue.end)
                if options.wanted.begin_ms is not None:
                    begin = max(begin, store.first_at(name, options.wanted.begin_ms))
                found[path, *name] = begin
        return _nested(found)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit in the options."""
        most = self._options.max_offsets_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Keep the present ends, where the query stops."""
        self._target = self._ends()

    def reportLatestOffset(self) -> Offset:  # noqa: N802
        """Return the present ends."""
        return _nested(self._ends())

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Return the end of the next batch."""
        begins, ends = _flat(start), self._ends()
        if self._target is not None:
            ends = {key: min(end, self._target[key]) for key, end in ends.items() if key in self._target}
        lags = {}
        for key, end in ends.items():
            begin = self._begin(key, begins.get(key))
            lags[key] = max(0, end - begin)
        taken = lags
        if isinstance(limit, ReadMaxRows):
            taken = share(lags, limit.max_rows)
        # A deleted queue stays in the offset, so that it is not read again if it comes back.
        found = dict(begins)
        for key, count in taken.items():
            if count or key in begins:
                found[key] = self._begin(key, begins.get(key)) + count
        return _nested(found)

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Return the tasks of a batch."""
        begins, ends = _flat(start), _flat(end)
        stores = self._looked_at()
        options = self._options
        parts: list[InputPartition] = []
        for path, store in stores.items():
            ranges: dict[tuple[str, int], range] = {}
            for key, until in ends.items():
                if key[0] != path or begins.get(key) == until:
                    continue
                name = key[1:]
                queue = store.queues.get(name)
                begin = self._begin(key, begins.get(key))
                if options.fail_on_data_loss:
                    if queue is None:
                        raise DataLossError(f"{path}: topic {name[0]!r}, queue {name[1]}: deleted (failOnDataLoss)")
                    store.check_loss(name, begin, until)
                if queue is not None:
                    ranges[name] = range(max(begin, queue.begin), min(until, queue.end))
            ranges = {name: wanted for name, wanted in ranges.items() if len(wanted)}
            if ranges:
                parts += map(
                    PartPartition,
                    store.parts(list(ranges.items()), options.min_partitions, entries_only=options.view == "queues"),
                )
        return parts

    def commit(self, end: Offset) -> None:
        """Do nothing: Spark does not call this for a query's last batch anyway."""

    def stop(self) -> None:
        """Close the stores."""
        for store in self._stores.values():
            store.close()
        self._stores = {}

    def _begin(self, key: Key, known: int | None) -> int:
        """Return the next offset in a queue: Spark's, or the begin of a queue that is new or was created again."""
        store = self._stores.get(key[0])
        queue = None if store is None else store.queues.get(key[1:])
        if known is None:
            return 0 if queue is None else queue.begin
        if queue is not None and known > queue.end:
            if self._options.fail_on_data_loss:
                raise DataLossError(
                    f"{key[0]}: topic {key[1]!r}, queue {key[2]}: read up to offset {known}, but it ends at "
                    f"{queue.end} (option failOnDataLoss=false starts again at the beginning of the queue)"
                )
            return queue.begin
        return known

    def _ends(self) -> dict[Key, int]:
        return {
            (path, *name): queue.end
            for path, store in self._looked_at().items()
            for name, queue in store.queues.items()
        }

    def _looked_at(self) -> Mapping[str, PlannedStore]:
        """Return the stores in their present state."""
        options = self._options
        for path in options.paths:
            store = self._stores.get(path)
            if store is None:
                self._stores[path] = PlannedStore.open(path, options.wanted, options.mode)
            else:
                store.refresh(options.wanted, options.mode)
        return self._stores

    # ------------------------------------------------------------------------------------------------------ in workers

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a task's rows, in a worker."""
        from librmq.columns.read import Reading

        assert isinstance(partition, PartPartition)
        # The offsets hold the stream's start, so times no longer matter.
        options = replace(self._options, wanted=replace(self._options.wanted, begin_ms=None))
        return Reading(options, self._schema).read(partition.part)


def share(lags: Mapping[Key, int], most: int) -> dict[Key, int]:
    """Divide ``most`` messages by lag; the rest of the rounding goes to the largest fractions."""
    total = sum(lags.values())
    if total <= most:
        return dict(lags)
    shares = {key: most * lag // total for key, lag in lags.items()}
    left = most - sum(shares.values())
    by_rest = sorted(lags, key=lambda key: (-(most * lags[key] % total), key))
    for key in by_rest[:left]:
        shares[key] += 1
    return shares


def _nested(found: Mapping[Key, int]) -> Offset:
    made: Offset = {}
    for (path, topic, queue_id), queue_offset in sorted(found.items()):
        made.setdefault(path, {}).setdefault(topic, {})[str(queue_id)] = queue_offset
    return made


def _flat(offset: Offset) -> dict[Key, int]:
    return {
        (path, topic, int(queue_id)): queue_offset
        for path, topics in offset.items()
        for topic, queues in topics.items()
        for queue_id, queue_offset in queues.items()
    }
