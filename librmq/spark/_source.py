"""The data source ``rocketmq``: Spark's reader, over the planner (on the driver) and `Reading` (in workers).

::

    DataSource.schema, reader      on the driver, in a Python process of Spark's planning: check options and schema
    Reader.partitions              in the same process: examine the stores, cut the read into parts
    Reader.read                    in a worker: a part as Arrow batches
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from librmq.columns import TYPES, ReadOptions, default_columns
from librmq.columns.decoding import columns_of
from librmq.config import suggest
from librmq.errors import ConfigError, RmqError
from librmq.files import DiskFiles
from librmq.override import override
from librmq.runtime.event_log import EventLog
from librmq.spark._kafka import Renaming, kafka_columns, kafka_schema, plain_name, plain_schema
from librmq.spark._options import (
    READ_OPTIONS,
    WRITE_OPTIONS,
    StreamLimits,
    WriteOptions,
    includes_headers,
    parse_columns,
    parse_names,
    parse_read_options,
    plain_option,
    refuse_for_batches,
    refuse_unknown,
    refuse_urls,
    shows_conditions,
    with_condition,
)
from librmq.store import BrokerTables
from librmq.store.format import directory

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import DataSourceStreamReader, DataSourceStreamWriter, DataSourceWriter

    from librmq.columns import Part


_OPTION: Final = "option."
_log = EventLog("librmq.spark")
_BIG: Final = 8
"""Most tasks of a read that decodes all columns without a warning: they read 1 GiB."""
_OPTIONAL: Final = frozenset(("tags", "keys", "uniqueKey", "key", "headers"))
"""Columns that are null for some messages, in every mode."""
_OPTIONS_OF_TABLE: Final = "rocketmq"
"""Metadata key of a table's first column, with the table's options as JSON."""


@shows_conditions
class RocketMQDataSource(DataSource):
    """Stores of RocketMQ brokers as a data source; docs/spark.md lists its options and columns."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        self._creates_table = options.get("provider", "").lower() == "rocketmq"
        if self._creates_table:
            # CREATE TABLE passes the properties of the table as well; options occur again with a prefix.
            named_options = {
                name.removeprefix(_OPTION): value for name, value in options.items() if name.startswith(_OPTION)
            }
            options = named_options | {name: value for name, value in options.items() if name.lower() == "path"}
        super().__init__(options)
        refuse_unknown(options, {*READ_OPTIONS, *WRITE_OPTIONS}, "format")

    @classmethod
    @override
    def name(cls) -> str:
        return "rocketmq"

    def _options_of(self, schema: StructType) -> dict[str, str]:
        """Return the options of a read, which the schema of a table can hold."""
        options = dict(self.options)
        if not options:  # Spark reads a table of the catalog without its options
            documents = [field.metadata[_OPTIONS_OF_TABLE] for field in schema if _OPTIONS_OF_TABLE in field.metadata]
            if not documents:
                raise ConfigError(
                    "no option path: Spark passes no options of a table that was created with columns; "
                    "write CREATE TABLE … USING rocketmq OPTIONS (path '…') without columns"
                )
            options = json.loads(documents[0])
        return options

    @override
    def schema(self) -> StructType:
        """Return the columns of a read without a schema."""
        options = dict(self.options)
        schema = progress_schema(options) if is_progress(options) else _schema_of_messages(options)
        if self._creates_table:
            schema.fields[0].metadata = {_OPTIONS_OF_TABLE: json.dumps(dict(self.options))}
        return schema

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        refuse_for_batches(self.options)  # a table of the catalog can have options for streams
        values = self._options_of(schema)
        if is_progress(values):
            return ProgressReader(values, schema)
        options = parse_read_options(values)
        is_bare = parse_columns(values) is None and schema.names == default_columns(options)
        return Reader(options, *read_schema(schema, options, values), is_bare=is_bare)

    @override
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's)
        from librmq.spark._stream import RefusedStream, StreamReader

        try:
            values = self._options_of(schema)
            if is_progress(values):
                raise ConfigError("option view: progress is for batch reads; a stream reads messages or queues")
            options = parse_read_options(values)
            if options.at is not None:
                raise ConfigError("option at: a stream continues with what is stored; read a moment by spark.read")
            return StreamReader(options, StreamLimits.from_options(values), *read_schema(schema, options, values))
        except RmqError as error:  # Spark would hide it behind its own error
            return RefusedStream(with_condition(error))

    @override
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from librmq.spark._write import Writer

        if overwrite:
            raise ConfigError('a store is only appended to: write with mode("append")')
        options = WriteOptions.from_options(dict(self.options))
        refuse_for_batches(self.options)
        return Writer(options, schema)

    @override
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 (Spark's)
        from librmq.spark._write import StreamWriter

        if overwrite:
            raise ConfigError('a store is only appended to: use outputMode("append")')
        return StreamWriter(WriteOptions.from_options(dict(self.options)), schema)


@shows_conditions
class Reader(DataSourceReader):
    """The batch reader of the data source.

    It takes no conditions of a query: Spark 4.3 keeps one reader for a frame, with the conditions that it pushed last,
    and uses it for every other scan of the frame, without asking the source again. So after
    ``frame.where("tags = 'one'").count()`` a source that only reads this tag makes ``frame.count()`` wrong, which a
    source can't notice. The options say what is read.
    """

    def __init__(
        self, options: ReadOptions, schema: pa.Schema, renaming: Renaming | None = None, *, is_bare: bool = False
    ) -> None:
        self._options = options
        self._is_bare = is_bare
        """Whether the reader of the frame has named no columns, so that all are decoded."""
        self._schema = schema
        self._renaming = renaming

    @override
    def partitions(self) -> list[InputPartition]:
        """Examine the stores, on the driver, and cut the read into tasks."""
        from librmq.columns import RemoteStore, plan
        from librmq.columns.remote import RemoteFiles, located

        remote = [located(path, self._options.storage_options) for path in self._options.paths if "://" in path]
        stores = {store.url: store for store in remote if isinstance(store, RemoteStore)}
        files = RemoteFiles(stores) if stores else None
        parts = plan(self._options, files, columns=self._schema.names, is_portable=True)
        if self._is_bare and len(parts) > max(_BIG, self._options.min_partitions):
            _log.warning(
                "%(path)s: Spark does not tell which columns a query uses, so %(count)d tasks decode all of them; name "
                "those of the query in the option columns, for a count columns=queueId",
                path=", ".join(self._options.paths),
                count=len(parts),
            )
        return [InputPartition(part) for part in parts]

    @override
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a task's rows, in a worker."""
        if partition.value is None:  # Spark's own partition, if there is nothing to read
            return iter(())
        return read_part(self._options, self._schema, self._renaming, partition.value)


def read_part(
    options: ReadOptions, schema: pa.Schema, renaming: Renaming | None, part: Part
) -> Iterator[pa.RecordBatch]:
    """Return the rows of a task, in a worker."""
    from librmq.columns import Reading

    freeze_modules()
    batches = Reading(options, schema).read(part)
    return batches if renaming is None else renaming.batches(batches)


@cache
def freeze_modules() -> None:
    """Leave what a worker has loaded out of its garbage collections.

    Spark collects after each task, which would take three times as long as a small read by ``tags``.
    """
    if TaskContext.get() is not None:
        gc.freeze()


def _schema_of_messages(options: Mapping[str, str]) -> StructType:
    """Return the columns of the option ``columns``, or all that a read shows by default."""
    parsed, names, is_kafka = parse_read_options(options), parse_columns(options), parse_names(options) == "kafka"
    if names is None:
        schema = schema_of(default_columns(parsed))
        return kafka_schema(schema, headers=includes_headers(options)) if is_kafka else schema
    plain = list(dict.fromkeys(map(plain_name, names) if is_kafka else names))
    _check_names(plain, parsed)
    return kafka_columns(names, schema_of(plain)) if is_kafka else schema_of(plain)


def _check_names(names: Iterable[str], options: ReadOptions) -> None:
    """Raise `ConfigError` for a name that is no column of the view."""
    columns = columns_of(options.view)
    for name in names:
        if name not in columns:
            raise ConfigError(f"the view {options.view} has no column {name!r}: {suggest(name, columns)}")


def schema_of(columns: list[str]) -> StructType:
    """Return columns by name as Spark types."""
    return StructType([StructField(name, from_arrow_type(TYPES[name])) for name in columns])


def read_schema(
    schema: StructType, options: ReadOptions, values: Mapping[str, str]
) -> tuple[pa.Schema, Renaming | None]:
    """Return the columns to read for ``schema``, and their renaming if the options ask for Kafka's names."""
    _check_nullable(schema, schema.names if options.mode == "PERMISSIVE" else _OPTIONAL)
    names = parse_columns(values)
    if names is not None and names != schema.names:
        raise ConfigError(f"option columns: the schema of the read has others ({', '.join(schema.names)}); give one")
    if parse_names(values) != "kafka":
        return arrow_schema(schema, options), None
    return arrow_schema(plain_schema(schema), options), Renaming(to_arrow_schema(schema, timezone="UTC"))


def _check_nullable(schema: StructType, optional: Collection[str]) -> None:
    """Raise `ConfigError` for a column that is declared NOT NULL and can be null: Spark would count these as values."""
    for field in schema.fields:
        if not field.nullable and field.name in optional:
            raise ConfigError(f"column {field.name!r}: rows can lack it: leave NOT NULL (nullable=False) out")


def arrow_schema(schema: StructType, options: ReadOptions) -> pa.Schema:
    """Return a Spark schema as Arrow's; `ConfigError` for a column or type that can't be read."""
    _check_names(schema.names, options)
    for field in schema.fields:
        if schema.names.count(field.name) > 1:
            raise ConfigError(f"column {field.name!r} is named twice; name each column once")
        expected = from_arrow_type(TYPES[field.name])
        if field.dataType.simpleString() != expected.simpleString():
            raise ConfigError(
                f"column {field.name!r}: expected type {expected.simpleString()}, found {field.dataType.simpleString()}"
            )
    return to_arrow_schema(schema, timezone="UTC")


# ---- the view ``progress``, whose rows come from ``config/``: no task reads a message

_VIEW: Final = "progress"
_OPTIONS: Final = ("path", "paths", "view", "topic", "topicPattern", "queue")
_TYPES: Final = {
    "group": StringType(), "topic": StringType(), "queueId": IntegerType(), "offset": LongType(),
    "expression": StringType(), "store": StringType(),
}  # fmt: skip


def is_progress(options: Mapping[str, str]) -> bool:
    """Return whether the options of a read ask for this view."""
    return any(name.lower() == "view" and text.lower() == _VIEW for name, text in options.items())


def _options(values: Mapping[str, str]) -> ReadOptions:
    for name in values:
        if plain_option(name) not in map(plain_option, _OPTIONS):
            raise ConfigError(f"option {name}: the view progress has only {', '.join(_OPTIONS[3:])}; remove it")
    options = parse_read_options({name: text for name, text in values.items() if name.lower() != "view"})
    refuse_urls(options.paths, "the view progress reads")
    return replace(options, selection=replace(options.selection, internal=True))


def progress_schema(values: Mapping[str, str]) -> StructType:
    """Return the columns of a read without a schema; those of several stores have ``store`` too."""
    several = _options(values).several
    return StructType([StructField(name, kind) for name, kind in _TYPES.items() if several or name != "store"])


@shows_conditions
class ProgressReader(DataSourceReader):
    """Reads each store's tables in a task of its own."""

    def __init__(self, values: Mapping[str, str], schema: StructType) -> None:
        self._options = _options(values)
        _check_nullable(schema, ("queueId", "offset", "expression"))
        for column in schema.fields:
            if column.name not in _TYPES:
                raise ConfigError(f"the view progress has no column {column.name!r}: {suggest(column.name, _TYPES)}")
            if column.dataType != _TYPES[column.name]:
                kinds = [kind.simpleString() for kind in (_TYPES[column.name], column.dataType)]
                raise ConfigError(f"column {column.name!r}: expected type {kinds[0]}, found {kinds[1]}")
        self._schema = to_arrow_schema(schema, timezone="UTC")
        for path in self._options.paths:
            directory.check_kind(path, DiskFiles())

    @override
    def partitions(self) -> list[InputPartition]:
        return [InputPartition(path) for path in self._options.paths]

    @override
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        columns = [*zip(*self._rows(partition.value), strict=True)] or [()] * len(_TYPES)
        values = dict(zip(_TYPES, columns, strict=True))
        arrays = [pa.array(values[column.name], column.type) for column in self._schema]
        yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _rows(self, path: str) -> Iterable[tuple[str, str, int | None, int | None, str | None, str]]:
        tables, conditions = BrokerTables.open(os.path.join(path, directory.CONFIG)), self._options.selection
        filters = {
            (group, topic): str(row["expression"])
            for topic, of_topic in tables.filters.items()
            for group, row in of_topic.get("groupFilterData", {}).items()
            if row.get("expression") and row.get("expressionType") != "TAG"
        }
        for (group, topic), offsets in sorted(tables.progress().items()):
            expression = filters.pop((group, topic), None)
            for queue_id, offset in sorted(offsets.items()):
                if conditions.has_queue(topic, queue_id):
                    yield group, topic, queue_id, offset, expression, path
        for (group, topic), expression in sorted(filters.items()):  # registered, and nothing consumed yet
            if conditions.has_topic(topic) and conditions.queue_ids is None:
                yield group, topic, None, None, expression, path
