"""The option ``names=kafka``: columns with the names of Spark's source for Kafka.

==============  ==================  ========================================
Kafka's name    librmq's            type
==============  ==================  ========================================
``key``         ``keys``            binary
``value``       ``body``            binary
``partition``   ``queueId``         int
``offset``      ``queueOffset``     bigint
``timestamp``   ``storeTimestamp``  timestamp
``headers``     ``properties``      array<struct<key:string,value:binary>>
==============  ==================  ========================================

The headers are the properties that a user has set. As in Spark's source, a message without headers has null there. A
written row has no offset, and its ``timestamp`` becomes ``bornTimestamp``. All other columns keep their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, StringType, StructField, StructType

from librmq.errors import ConfigError
from librmq.message.properties import RESERVED_PROPERTIES
from librmq.spark._encode import map_counts, map_entries

_HEADERS: Final = "headers"
_PLAIN: Final = {
    "key": "keys",
    "value": "body",
    "partition": "queueId",
    "offset": "queueOffset",
    "timestamp": "storeTimestamp",
    _HEADERS: "properties",
}
_WRITTEN: Final = _PLAIN | {"timestamp": "bornTimestamp"}
_ORDER: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "store", "_corrupt_record")
_HEADER: Final = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
_TYPES: Final[dict[str, tuple[DataType, DataType]]] = {
    "key": (BinaryType(), StringType()),
    _HEADERS: (ArrayType(_HEADER), MapType(StringType(), StringType())),
}
"""Types of columns that differ: as Kafka's source has them, and as librmq reads them."""


def plain_name(name: str) -> str:
    """Return librmq's name for a column that may have Kafka's."""
    return _PLAIN.get(name, name)


def kafka_schema(schema: StructType, *, headers: bool) -> StructType:
    """Return the columns of a read without a schema, which is ``schema`` with librmq's names, as Kafka names them."""
    types = {field.name: field.dataType for field in schema}
    names = [name for name in _ORDER if plain_name(name) in types]
    return StructType([_field(name, types[plain_name(name)]) for name in names + [_HEADERS] * headers])


def kafka_columns(names: Sequence[str], types: StructType) -> StructType:
    """Return the columns of these names, of which each may be one of Kafka's; ``types`` has them by librmq's names."""
    return StructType([_field(name, types[plain_name(name)].dataType) for name in names])


def _field(name: str, kind: DataType) -> StructField:
    return StructField(name, _TYPES[name][0] if name in _TYPES else kind)


def plain_schema(schema: StructType) -> StructType:
    """Return the columns to read for columns that may have Kafka's names, each once.

    Raises:
        ConfigError: A column has not the type that Kafka's source gives it.
    """
    fields: dict[str, StructField] = {}
    for field in schema:
        kind = field.dataType
        if field.name in _TYPES:
            expected, plain = _TYPES[field.name]
            if kind.simpleString() != expected.simpleString():
                raise ConfigError(
                    f"column {field.name!r}: expected type {expected.simpleString()}, found {kind.simpleString()}"
                )
            kind = plain
        fields.setdefault(plain_name(field.name), StructField(plain_name(field.name), kind))
    return StructType(list(fields.values()))


@dataclass(frozen=True)
class Renaming:
    """The columns that a reader shows, each with the column that it reads."""

    schema: pa.Schema

    def batches(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield batches with the names and types of ``schema``."""
        for batch in batches:
            columns = []
            for field in self.schema:
                column = batch.column(plain_name(field.name))
                columns.append((_headers_of(column) if field.name == _HEADERS else column).cast(field.type))
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)


def _headers_of(properties: pa.Array) -> pa.Array:
    """Return the properties that users have set as lists of headers; null for none."""
    names, values = map_entries(properties)
    begins = np.concatenate(([0], np.cumsum(map_counts(properties))))
    is_header = pc.invert(pc.is_in(names, pa.array(sorted(RESERVED_PROPERTIES))))
    before = np.concatenate(([0], np.cumsum(is_header.to_numpy(zero_copy_only=False))))  # headers before each entry
    headers = pa.StructArray.from_arrays(
        [names.filter(is_header), values.filter(is_header).cast(pa.binary())], ["key", "value"]
    )
    ends = before[begins]
    lists = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), headers)
    return pc.if_else(pa.array(ends[1:] > ends[:-1]), lists, pa.scalar(None, lists.type))


def written_name(name: str) -> str:
    """Return librmq's name for a column to write that may have Kafka's."""
    return _WRITTEN.get(name, name)


def written_schema(columns: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the names and types of columns to write as librmq names them.

    Raises:
        ConfigError: A column is Kafka's ``offset``.
    """
    if any(name == "offset" for name, _ in columns):
        raise ConfigError("column 'offset': the store gives a message its offset; drop the column before the write")
    return [
        (written_name(name), _TYPES[name][1].simpleString() if _is_kafkas(name, kind) else kind)
        for name, kind in columns
    ]


def _is_kafkas(name: str, kind: str) -> bool:
    return name in _TYPES and _TYPES[name][0].simpleString() == kind


def written_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch to write with librmq's names."""
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name == "key" and not pa.types.is_list(column.type):
            column = _texts_of(name, column)
        elif name == _HEADERS and pa.types.is_list(column.type):
            column = _properties_of(column)
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, list(map(written_name, batch.schema.names)))


def _texts_of(name: str, column: pa.Array) -> pa.Array:
    """Return a column of bytes in UTF-8, or of texts with wide offsets, as texts."""
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        raise ConfigError(f"column {name!r}: expected UTF-8, as keys and properties are; drop other values") from None


def _properties_of(headers: pa.Array) -> pa.Array:
    """Return lists of headers as maps of properties; a row without headers has none.

    Raises:
        ConfigError: A header has no name, a value is no UTF-8, or a row has two headers of one name.
    """
    names, texts = (_texts_of(_HEADERS, column) for column in headers.flatten().flatten())
    if names.null_count:
        raise ConfigError("column 'headers': expected a name for each header, found null; drop headers without one")
    sizes = pc.fill_null(pc.list_value_length(headers), 0).to_numpy(zero_copy_only=False)
    rows = pa.array(np.repeat(np.arange(len(headers)), sizes))
    if len(names) and len(pa.table({"row": rows, "name": names}).group_by(["row", "name"]).aggregate([])) < len(names):
        raise ConfigError("column 'headers': two headers of a row have one name; a message has each property once")
    begins = pa.array(np.concatenate(([0], np.cumsum(sizes))), pa.int32())
    return pa.MapArray.from_arrays(begins, names, texts)
