"""Names of columns: librmq's own, or those of Spark's source for Kafka (option ``names``).

==============  ==================  ==================
Kafka's name    librmq's            type
==============  ==================  ==================
``key``         ``keys``            binary
``value``       ``body``            binary
``partition``   ``queueId``         int
``offset``      ``queueOffset``     bigint
``timestamp``   ``storeTimestamp``  timestamp
==============  ==================  ==================

A written row has no offset, and its ``timestamp`` becomes ``bornTimestamp``. All other columns keep their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from librmq.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_PLAIN: Final = {
    "key": "keys",
    "value": "body",
    "partition": "queueId",
    "offset": "queueOffset",
    "timestamp": "storeTimestamp",
}
_WRITTEN: Final = _PLAIN | {"timestamp": "bornTimestamp"}
_ORDER: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "store", "_corrupt_record")


def plain_name(name: str) -> str:
    """Return librmq's name for a column that may have Kafka's."""
    return _PLAIN.get(name, name)


def kafka_schema(schema: StructType) -> StructType:
    """Return the columns of a read without a schema, which is ``schema`` with librmq's names, as Kafka names them."""
    from pyspark.sql.types import BinaryType, StructField, StructType

    types = {field.name: field.dataType for field in schema} | {"keys": BinaryType()}
    return StructType([StructField(name, types[plain_name(name)]) for name in _ORDER if plain_name(name) in types])


def plain_schema(schema: StructType) -> StructType:
    """Return the columns to read for columns that may have Kafka's names, each once.

    Raises:
        ConfigError: A column ``key`` is not binary.
    """
    from pyspark.sql.types import StringType, StructField, StructType

    fields: dict[str, StructField] = {}
    for field in schema:
        kind = field.dataType
        if field.name == "key":
            if kind.simpleString() != "binary":
                raise ConfigError(f"column 'key': expected type binary, found {kind.simpleString()}")
            kind = StringType()
        fields.setdefault(plain_name(field.name), StructField(plain_name(field.name), kind))
    return StructType(list(fields.values()))


@dataclass(frozen=True)
class Renaming:
    """The columns that a reader shows, each with the column that it reads."""

    schema: pa.Schema

    def batches(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield batches with the names and types of ``schema``."""
        for batch in batches:
            columns = [batch.column(plain_name(field.name)).cast(field.type) for field in self.schema]
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)


def written_schema(columns: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the names and types of columns to write as librmq names them.

    Raises:
        ConfigError: A column is Kafka's ``offset``.
    """
    if any(name == "offset" for name, _ in columns):
        raise ConfigError("column 'offset': the store gives a message its offset; drop the column before the write")
    return [
        (_WRITTEN.get(name, name), "string" if (name, kind) == ("key", "binary") else kind) for name, kind in columns
    ]


def written_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch to write with librmq's names."""
    columns = [
        column.cast(pa.string()) if name == "key" and pa.types.is_binary(column.type) else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, [_WRITTEN.get(name, name) for name in batch.schema.names])
