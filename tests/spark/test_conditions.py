"""Each kind of librmq's errors reaches the user of Spark with its condition, from the driver, a task or a stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from librmq import Message, MessageStore, StoreConfig

pytestmark = pytest.mark.spark
pytest.importorskip("pyspark")

from pyspark.errors import PySparkException  # noqa: E402

from librmq.spark import cause_of  # noqa: E402
from tests.spark_session import shared_session  # noqa: E402


def condition_of(action: Callable[[], object]) -> str:
    """Return the condition with which the cause of an error of Spark begins."""
    with pytest.raises(PySparkException) as caught:
        action()
    return (cause_of(caught.value) or "").partition(" ")[0]


def stream(path: Path, checkpoint: Path, **options: str) -> None:
    rows = shared_session().readStream.format("rocketmq").options(**options).load(str(path))
    writer = rows.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    writer.trigger(availableNow=True).start().awaitTermination()


def test_an_error_begins_with_its_condition(tmp_path: Path) -> None:
    spark, path = shared_session(), tmp_path / "store"
    with MessageStore.open(path, StoreConfig.tiny()) as store:
        for number in range(5):
            store.append(Message("T", b"body %d" % number), 0)
        place = list(store)[2].physical_offset

    def read(**options: str) -> Any:
        return spark.read.format("rocketmq").options(**options).load(str(path))

    def write() -> None:
        rows = spark.createDataFrame([("T", b"x")], "topic string, body binary")
        rows.write.format("rocketmq").mode("append").option("wait", "0").save(str(path))

    gone = '{"T": {"0": 900}}'
    assert condition_of(lambda: read(startingOffsets=gone).count()) == "[RMQ_DATA_LOSS]"
    assert condition_of(lambda: stream(path, tmp_path / "checkpoint", startingOffsets=gone)) == "[RMQ_DATA_LOSS]"
    assert condition_of(lambda: read(topicz="T")) == "[RMQ_BAD_OPTION]"
    assert condition_of(lambda: read(sql="a > (").count()) == "[RMQ_BAD_OPTION]"
    assert condition_of(lambda: spark.read.format("rocketmq").load(str(tmp_path)).count()) == "[RMQ_ERROR]"
    with MessageStore.open(path):
        assert condition_of(write) == "[RMQ_LOCKED]"
    with open(path / "commitlog" / f"{0:020}", "r+b") as log:
        log.seek(place)
        log.write(b"\xff" * 4)
    assert condition_of(lambda: read().count()) == "[RMQ_DAMAGED]"
