"""The Spark session that all tests marked ``spark`` share, and what their plans may hold."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from librmq.spark import session


@cache
def shared_session() -> Any:
    """One local session for the run, which tries a task that was killed again; Spark ends with the process."""
    spark = session("librmq tests", "local[2,4]", {"spark.sql.shuffle.partitions": "2"})
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def assert_native(frame: Any) -> None:
    """The plan of ``frame`` runs no Python and is deterministic to Spark."""
    execution = frame._jdf.queryExecution()
    plan = execution.executedPlan().toString()
    assert "Python" not in plan, plan
    assert "UDF" not in plan, plan
    assert execution.analyzed().deterministic(), plan


@contextmanager
def killing(marker: Path) -> Iterator[None]:
    """One Python worker that reads or writes a store is killed during its task; ``marker`` records this.

    The others find the marker there, and live.
    """
    from librmq.spark.source import RocketMQDataSource

    path = str(marker)

    # Within a function, so that they reach the workers by value.
    def killed_once(values: Any) -> Any:
        for value in values:
            yield value
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)

    class Killing(RocketMQDataSource):
        def reader(self, schema: Any) -> Any:
            reader = super().reader(schema)
            read = reader.read
            reader.read = lambda partition: killed_once(read(partition))  # type: ignore[method-assign]
            return reader

        def writer(self, schema: Any, overwrite: bool) -> Any:
            writer = super().writer(schema, overwrite)
            write = writer.write
            writer.write = lambda iterator: write(killed_once(iterator))  # type: ignore[method-assign]
            return writer

    spark = shared_session()
    spark.dataSource.register(Killing)
    try:
        yield
    finally:
        spark.dataSource.register(RocketMQDataSource)
    assert marker.exists(), "no worker was killed"
