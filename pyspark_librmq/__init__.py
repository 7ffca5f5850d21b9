"""PySpark looks for packages named ``pyspark_*`` and registers their ``DefaultSource``: this is librmq's.

Every session imports this at its first read, whatever the source, so it loads librmq only for a store.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    """`librmq.spark._source.RocketMQDataSource`, loaded when an object is made."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        from librmq.spark._source import RocketMQDataSource

        super().__init__(options)
        self._source = RocketMQDataSource(options)

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "rocketmq"

    def schema(self) -> StructType:
        """Return the columns of a read without a schema."""
        return self._source.schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch."""
        return self._source.reader(schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's)
        """Return the reader of a stream."""
        return self._source.streamReader(schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a job."""
        return self._source.writer(schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 (Spark's)
        """Return the writer of a stream."""
        return self._source.streamWriter(schema, overwrite)
