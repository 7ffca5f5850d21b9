"""The traces of clients as Arrow record batches: one row for each record in the messages of trace topics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, Unpack

import pyarrow as pa

from librmq.columns.record_batches import ReaderKeywords, Stores, reader
from librmq.message.topics import TRACE_TOPIC
from librmq.message.traces import TRACE_PREFIX, Trace, TraceReader

TRACE_TOPICS: Final = f"{TRACE_TOPIC}|{TRACE_PREFIX}.*"
"""A pattern for the topics of traces whose names users have not chosen."""
SOURCE: Final = ("store", "storeTimestamp", "bornHost", "uniqueKey", "physicalOffset", "body")
"""The columns of messages that `decoded` needs; it adds ``store`` if it is there."""
_TYPES: Final = {
    "trace": pa.string(), "at_ms": pa.timestamp("us", "UTC"), "id": pa.string(), "topic": pa.string(),
    "group": pa.string(), "instance": pa.string(), "succeeded": pa.bool_(), "result": pa.string(),
    "took_s": pa.float64(), "retries": pa.int32(), "keys": pa.string(), "request": pa.string(),
    "physical_offset": pa.int64(),
}  # fmt: skip
_NAMES: Final = {"at_ms": "at", "took_s": "tookSeconds", "physical_offset": "physicalOffset"}
SCHEMA: Final = pa.schema([(_NAMES.get(name, name), _TYPES[name]) for name in Trace._fields])
"""The columns of a trace, those of `librmq.message.traces.Trace`: ``at`` is a time, ``tookSeconds`` a number."""


def traces(store: Stores, **settings: Unpack[ReaderKeywords]) -> pa.RecordBatchReader:
    """Return what clients have recorded about messages in a store, or several, as a stream of record batches.

    ``topic`` names the topics of traces; by default they are RocketMQ's own. Of several stores the column ``store``
    names the store. The other settings, and errors, are those of `reader`, but for ``columns``.

    Raises:
        ConfigError: A setting is wrong.
        NotAStoreError: There is no store.
        CorruptionError: The store is damaged; also raised while batches are read.
    """
    several = not isinstance(store, str) and isinstance(store, Iterable)
    selection: ReaderKeywords = {**settings, "columns": SOURCE if several else SOURCE[1:]}
    if selection.get("topic") is None:
        selection["topic"] = re.compile(TRACE_TOPICS)
    schema = SCHEMA.insert(0, pa.field("store", pa.string())) if several else SCHEMA
    return pa.RecordBatchReader.from_batches(schema, decoded(reader(store, **selection)))


def decoded(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the traces in batches of messages of trace topics; records that can't be read are left out."""
    decoder = TraceReader()
    for batch in batches:
        columns: list[list[object]] = [[] for _ in Trace._fields]
        stores: list[object] = []
        has_store = "store" in batch.schema.names
        for row in batch.to_pylist():
            stored_ms = int(row["storeTimestamp"].timestamp() * 1000)
            address = row["bornHost"].rpartition(":")[0].strip("[]")
            for trace in decoder.decode(
                row["body"] or b"", address, row["uniqueKey"], stored_ms, row["physicalOffset"]
            ):
                for column, value in zip(columns, trace, strict=True):
                    column.append(value)
                if has_store:
                    stores.append(row["store"])
        arrays = [_array(name, column) for name, column in zip(Trace._fields, columns, strict=True)]
        if has_store:
            yield pa.RecordBatch.from_arrays(
                [pa.array(stores, pa.string()), *arrays], schema=SCHEMA.insert(0, pa.field("store", pa.string()))
            )
        else:
            yield pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _array(name: str, values: list[object]) -> pa.Array:
    if name == "at_ms":
        return pa.array(values, pa.timestamp("ms", "UTC")).cast(_TYPES[name])
    return pa.array(values, _TYPES[name])
