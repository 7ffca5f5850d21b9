"""Streams: limits, restarts, new queues, lost data, and each message once in an idempotent sink."""

from __future__ import annotations

import contextlib
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from librmq import ManualClock, Message, MessageStore, StoreConfig

pytest.importorskip("pyspark")

from pyspark.errors import PySparkException

from librmq.spark.stream import Key, share
from tests.spark_session import shared_session

START_MS = 1_700_000_000_000


@given(st.dictionaries(st.tuples(st.just("s"), st.just("t"), st.integers(0, 9)), st.integers(0, 1000)),
       st.integers(1, 500))  # fmt: skip
def test_a_limit_is_distributed_completely(lags: dict[Key, int], most: int) -> None:
    found = share(lags, most)
    assert sum(found.values()) == min(most, sum(lags.values()))
    assert all(0 <= found[key] <= lag for key, lag in lags.items())


def fill(store: MessageStore, topic: str, first: int, count: int) -> None:
    for number in range(first, first + count):
        store.append(Message(topic, b"%d" % number), number % 2)


class Sink:
    """Writes each batch to a folder named by its number, so that a repeated batch replaces itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sizes: list[int] = []

    def take(self, frame: Any, batch: int) -> None:
        frame.select("topic", "body").write.mode("overwrite").parquet(str(self.folder / f"b{batch}"))
        self.sizes.append(shared_session().read.parquet(str(self.folder / f"b{batch}")).count())

    def numbers(self) -> list[int]:
        found = shared_session().read.option("recursiveFileLookup", "true").parquet(str(self.folder)).collect()
        return sorted(int(bytes(row["body"])) for row in found)


def run(path: Path, sink: Sink, checkpoint: Path, **options: str) -> None:
    stream = shared_session().readStream.format("rocketmq").options(**options).load(str(path))
    query = (
        stream.writeStream.foreachBatch(sink.take)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


@pytest.mark.spark
def test_limits_restarts_and_later_messages(tmp_path: Path) -> None:
    path, checkpoint = tmp_path / "store", tmp_path / "checkpoint"
    sink = Sink(tmp_path / "sink")
    clock = ManualClock(START_MS)
    with MessageStore.open(path, StoreConfig.tiny(), clock=clock) as store:
        fill(store, "A", 0, 25)
        run(path, sink, checkpoint, maxOffsetsPerTrigger="10")
        assert sink.sizes == [10, 10, 5]
        fill(store, "A", 25, 5)
        fill(store, "B", 30, 3)  # a topic that did not exist
        run(path, sink, checkpoint, maxOffsetsPerTrigger="100")
        assert sink.numbers() == list(range(33))
    # Spark requests an unfinished batch again.
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda one: int(one.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)
    run(path, sink, checkpoint, maxOffsetsPerTrigger="100")
    assert sink.numbers() == list(range(33))


@pytest.mark.spark
def test_loss_is_reported(tmp_path: Path) -> None:
    path, checkpoint = tmp_path / "store", tmp_path / "checkpoint"
    clock = ManualClock(START_MS)
    with MessageStore.open(path, StoreConfig.tiny(), clock=clock) as store:
        fill(store, "A", 0, 20)
    sink = Sink(tmp_path / "sink")
    run(path, sink, checkpoint)
    shutil.rmtree(path)
    with MessageStore.open(path, StoreConfig.tiny(), clock=clock) as store:
        fill(store, "A", 100, 4)
    with pytest.raises(PySparkException, match="read up to offset 10, but it ends at 2"):
        run(path, sink, checkpoint)
    run(path, sink, checkpoint, failOnDataLoss="false")
    assert sink.numbers() == [*range(20), *range(100, 104)]


@pytest.mark.spark
@pytest.mark.slow
def test_a_stream_that_is_killed_repeatedly(tmp_path: Path) -> None:
    """While a writer appends to the store, a sink that accepts each batch once gets each message once."""
    path, checkpoint = tmp_path / "store", tmp_path / "checkpoint"
    dice = random.Random(7)
    clock = ManualClock(START_MS)

    class Failing(Sink):
        def take(self, frame: Any, batch: int) -> None:
            chance = dice.random()
            if chance < 0.25:
                raise RuntimeError("killed before")
            super().take(frame, batch)
            fill(store, "AB"[batch % 2], written[0], 5)
            written[0] += 5
            if chance > 0.75:
                raise RuntimeError("killed behind")

    sink, written = Failing(tmp_path / "sink"), [40]
    with MessageStore.open(path, StoreConfig.tiny(), clock=clock) as store:
        fill(store, "A", 0, 40)
        for _ in range(6):
            with contextlib.suppress(PySparkException):
                run(path, sink, checkpoint, maxOffsetsPerTrigger="9")
        run(path, Sink(tmp_path / "sink"), checkpoint)
    assert sink.numbers() == list(range(written[0]))
