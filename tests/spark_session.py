"""The Spark session that all tests marked ``spark`` share, and a check of their plans."""

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
    """Return the local session of this run. It retries a killed task, and Spark ends with the process."""
    spark = session("librmq tests", "local[2,4]", {"spark.sql.shuffle.partitions": "2"})
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def assert_native(frame: Any) -> None:
    """Assert that the plan of ``frame`` runs no Python, and that Spark considers it deterministic."""
    execution = frame._jdf.queryExecution()
    plan = execution.executedPlan().toString()
    assert "Python" not in plan, plan
    assert "UDF" not in plan, plan
    assert execution.analyzed().deterministic(), plan


@contextmanager
def killing(marker: Path) -> Iterator[None]:
    """Kill one Python worker while it reads or writes a store; it creates ``marker`` first.

    Other workers find the marker and are not killed.
    """
    from librmq.spark._source import RocketMQDataSource

    path = str(marker)

    # Defined inside a function, so that Spark sends them to the workers by value.
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
