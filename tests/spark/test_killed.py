"""Rounds in which Python workers, executors or drivers are killed, or a task hangs until another one does its work."""

from __future__ import annotations

import json
import random
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from librmq import Message, MessageStore, StoreConfig
from tests.conftest import SlowBudget
from tests.programs import Process, start_program

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds executors by Linux's files about processes"),
]
pytest.importorskip("pyspark")

MESSAGES = 100
QUEUES = 4
CASES = [
    ("executor", "batch"), ("worker", "stream"), ("driver", "incremental"), ("driver", "stream"), ("driver", "batch"),
    ("executor", "stream"), ("executor", "incremental"), ("worker", "batch"), ("worker", "incremental"),
    ("hanging task", "batch"), ("hanging task", "stream"), ("hanging task", "incremental"),
]  # fmt: skip
SAMPLE = 3
"""The rounds of a run without time for more."""

DRIVER = """
import json, os, signal, sys
from pathlib import Path
from pyspark.errors import StreamingQueryException
from librmq.spark import register, run_incrementally, session
from librmq.spark._source import RocketMQDataSource

spark = session("librmq", sys.argv[1], {
    "spark.driver.host": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "2",
    "spark.speculation": "true",
    "spark.speculation.quantile": "0.25",
    "spark.speculation.interval": "50ms",
    "spark.speculation.task.duration.threshold": "10s",
})
spark.sparkContext.setLogLevel("OFF")
register(spark)
drivers = [spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid(), os.getpid()]


def harmed(values, side, request):
    for value in values:
        yield value
        if side != request["side"]:
            continue
        try:
            os.close(os.open(request["marker"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        if request["kind"] == "hanging task":
            signal.pause()
        parent = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
        for process in {"driver": drivers, "executor": [parent], "worker": [os.getpid()]}[request["kind"]]:
            os.kill(process, signal.SIGKILL)


def source_of(request):
    def harm(reader_or_writer, name, side):
        method = getattr(reader_or_writer, name)
        setattr(reader_or_writer, name, lambda values: harmed(method(values), side, request))
        return reader_or_writer

    class Harmed(RocketMQDataSource):
        def reader(self, schema):
            return harm(super().reader(schema), "read", "source")

        def streamReader(self, schema):
            return harm(super().streamReader(schema), "read", "source")

        def writer(self, schema, overwrite):
            return taking(super().writer(schema, overwrite))

        def streamWriter(self, schema, overwrite):
            return taking(super().streamWriter(schema, overwrite))

    def taking(writer):
        write = writer.write
        writer.write = lambda values: write(harmed(values, "sink", request))
        return writer

    return Harmed


for line in sys.stdin:
    request = json.loads(line)
    spark.dataSource.register(source_of(request))
    source, target, topic, folder = (request[name] for name in ("source", "target", "topic", "folder"))
    options = {"topic": topic, "columns": "topic,queueId,body", "minPartitions": "4"}
    if request["way"] == "batch":
        frame = spark.read.format("rocketmq").options(**options).load(source)
        frame.write.format("rocketmq").mode("append").option("jobId", topic).save(target)
    elif request["way"] == "stream":
        stream = spark.readStream.format("rocketmq").options(**options, maxOffsetsPerTrigger="60").load(source)
        writer = stream.writeStream.format("rocketmq").option("checkpointLocation", folder + "/checkpoint")
        while True:
            try:
                writer.trigger(availableNow=True).start(target).awaitTermination()
                break
            except StreamingQueryException as error:
                if "worker failed to connect back" not in str(error):  # Spark waits 10 s for a process to start
                    raise
    else:
        found = run_incrementally(spark, "skew", source, folder, {"topic": topic})
        count = spark.read.parquet(found.path).groupBy().sum("messages").first()[0]
        assert count == request["messages"], count
    print("done", flush=True)
"""


def age(folder: Path) -> Path:
    """Give the folder of a run the name that it has if the run began a day earlier."""
    job, of_run, ending = folder.name.rsplit(".", 2)
    began_ms, random_number = of_run.split("-")
    return folder.rename(folder.with_name(f"{job}.{int(began_ms) - 86_400_001}-{random_number}.{ending}"))


def test_each_message_arrives_once_whatever_is_killed(tmp_path: Path, standalone: str, slow_budget: SlowBudget) -> None:
    """What jobs have staged is deleted too: that of a killed driver by another job a day after its start."""
    source, target = tmp_path / "source", tmp_path / "target"
    config = StoreConfig.tiny(commitlog_file_size=1 << 20, max_message_size=8192)
    for path in (source, target):
        MessageStore.open(path, config).close()
    aged: list[Path] = []
    with ExitStack() as running:
        driver: Process[str] | None = None
        for number in slow_budget.rounds(3_000, "jobs of Spark of which a process is killed or hangs", at_least=SAMPLE):
            (kind, way), topic, marker = CASES[number % len(CASES)], f"T{number}", tmp_path / f"harmed-{number}"
            with MessageStore.open(source) as store:
                for body in range(MESSAGES):
                    store.append(Message(topic, b"%d" % body), body % QUEUES)
            request = {
                "kind": kind, "way": way, "marker": str(marker), "messages": MESSAGES, "topic": topic,
                "side": "source" if way == "incremental" else random.Random(number).choice(["source", "sink"]),
                "source": str(source), "target": str(target), "folder": str(tmp_path / topic),
            }  # fmt: skip
            answer = ""
            while not answer:
                if driver is None:
                    driver = running.enter_context(start_program(DRIVER, standalone))
                    running.callback(driver.kill)
                driver.stdin.write(json.dumps(request) + "\n")
                driver.stdin.flush()
                answer = driver.stdout.readline()
                if not answer:
                    assert marker.exists(), driver.wait()
                    assert kind == "driver"
                    driver.wait()
                    driver = None
            assert (answer, marker.exists()) == ("done\n", True), request
            if way == "incremental":
                continue
            with MessageStore.open(target, read_only=True) as store:
                found = sorted((int(message.body), message.queue_id) for message in store if message.topic == topic)
            assert found == [(body, body % QUEUES) for body in range(MESSAGES)], request
            staged = list((target / "librmq" / "spark").glob("*.staging"))
            assert not [path for path in aged if path in staged], request
            assert not staged or kind == "driver", request
            aged = [age(path) for path in staged]
