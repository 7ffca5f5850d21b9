"""The Spark session that all tests marked ``spark`` share, and what their plans may hold."""

from __future__ import annotations

from functools import cache
from typing import Any

from librmq.spark import session


@cache
def shared_session() -> Any:
    """One local session for the run; Spark ends with the process."""
    spark = session("librmq tests", "local[2]", {"spark.sql.shuffle.partitions": "2"})
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def assert_native(frame: Any) -> None:
    """The plan of ``frame`` runs no Python and is deterministic to Spark."""
    execution = frame._jdf.queryExecution()
    plan = execution.executedPlan().toString()
    assert "Python" not in plan, plan
    assert "UDF" not in plan, plan
    assert execution.analyzed().deterministic(), plan
