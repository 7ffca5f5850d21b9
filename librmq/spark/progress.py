"""The view ``progress`` of the data source: each group's progress in each queue, and the filter that it has registered.

The tables in ``config/`` have it, so no task reads a message.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from librmq.columns.options import ReadOptions
from librmq.config import suggest
from librmq.errors import ConfigError
from librmq.files.disk import DiskFiles
from librmq.spark.options import parse_read_options, refuse_urls
from librmq.store.format import directory
from librmq.store.format.broker_tables import BrokerTables

if TYPE_CHECKING:
    import pyarrow as pa

_VIEW: Final = "progress"
_OPTIONS: Final = ("path", "paths", "view", "topic", "topicPattern", "queueId")
_TYPES: Final = {
    "group": StringType(), "topic": StringType(), "queueId": IntegerType(), "offset": LongType(),
    "expression": StringType(), "store": StringType(),
}  # fmt: skip


def is_progress(options: Mapping[str, str]) -> bool:
    """Return whether the options of a read ask for this view."""
    return any(name.lower() == "view" and text.lower() == _VIEW for name, text in options.items())


def _options(values: Mapping[str, str]) -> ReadOptions:
    for name in values:
        if name.lower() not in map(str.lower, _OPTIONS):
            raise ConfigError(f"option {name}: the view progress has only {', '.join(_OPTIONS[3:])}; remove it")
    options = parse_read_options({name: text for name, text in values.items() if name.lower() != "view"})
    refuse_urls(options.paths, "the view progress reads")
    return replace(options, wanted=replace(options.wanted, internal=True))


def progress_schema(values: Mapping[str, str]) -> StructType:
    """Return the columns of a read without a schema; those of several stores have ``store`` too."""
    several = _options(values).several
    return StructType([StructField(name, kind) for name, kind in _TYPES.items() if several or name != "store"])


@dataclass
class _StorePartition(InputPartition):
    path: str


class ProgressReader(DataSourceReader):
    """Reads each store's tables in a task of its own."""

    def __init__(self, values: Mapping[str, str], schema: StructType) -> None:
        from pyspark.sql.pandas.types import to_arrow_schema

        self._options = _options(values)
        for column in schema.fields:
            if column.name not in _TYPES:
                raise ConfigError(f"the view progress has no column {column.name!r}: {suggest(column.name, _TYPES)}")
            if column.dataType != _TYPES[column.name]:
                kinds = [kind.simpleString() for kind in (_TYPES[column.name], column.dataType)]
                raise ConfigError(f"column {column.name!r}: expected type {kinds[0]}, found {kinds[1]}")
        self._schema = to_arrow_schema(schema, timezone="UTC")
        for path in self._options.paths:
            directory.check_kind(path, DiskFiles())

    def partitions(self) -> list[InputPartition]:
        """Return a partition for each store."""
        return [_StorePartition(path) for path in self._options.paths]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the rows of a store."""
        import pyarrow as pa

        assert isinstance(partition, _StorePartition)
        columns = [*zip(*self._rows(partition.path), strict=True)] or [()] * len(_TYPES)
        values = dict(zip(_TYPES, columns, strict=True))
        arrays = [pa.array(values[column.name], column.type) for column in self._schema]
        yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _rows(self, path: str) -> Iterable[tuple[str, str, int | None, int | None, str | None, str]]:
        tables, conditions = BrokerTables.open(os.path.join(path, directory.CONFIG)), self._options.wanted
        filters = {
            (group, topic): str(row["expression"])
            for topic, of_topic in tables.filters.items()
            for group, row in of_topic.get("groupFilterData", {}).items()
            if row.get("expression") and row.get("expressionType") != "TAG"
        }
        for name, offsets in sorted(tables.offsets.rows.items()):
            topic, _, group = name.rpartition("@")
            expression = filters.pop((group, topic), None)
            for queue_id, offset in sorted(offsets.items()):
                if conditions.queue(topic, queue_id):
                    yield group, topic, queue_id, offset, expression, path
        for (group, topic), expression in sorted(filters.items()):  # registered, and nothing consumed yet
            if conditions.topic(topic) and conditions.queue_ids is None:
                yield group, topic, None, None, expression, path
