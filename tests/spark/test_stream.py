"""Streams: limits, restarts, new queues, lost data, and each message once in an idempotent sink."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from librmq import ManualClock, Message, MessageStore, StoreConfig

pytest.importorskip("pyspark")

from pyspark.errors import PySparkException
from pyspark.sql.streaming.datasource import ReadAllAvailable

from librmq.columns.options import DataLossError
from librmq.consumequeue_entries import ENTRY
from librmq.errors import ConfigError
from librmq.spark._options import StreamLimits, parse_read_options
from librmq.spark._positions import Key, flat
from librmq.spark._source import RocketMQDataSource, arrow_schema, schema_of
from librmq.spark._stream import StreamLag, StreamReader, share, stream_lags
from librmq.spark.pipelines import run as run_pipeline
from tests.job_histories import JobHistory, Row
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


def fill_recorded(store: MessageStore, history: JobHistory, topic: str, first: int, count: int) -> None:
    numbers = range(first, first + count)
    with history.job(topic, map(b"%d".__mod__, numbers), (number % 2 for number in numbers)):
        fill(store, topic, first, count)


def delete_log_files(path: Path, count: int) -> None:
    """Delete the first files of the log, as a broker does: librmq would note the new begin."""
    (path / "librmq" / "closed.json").unlink(missing_ok=True)  # before, so that no reader misses the files
    for file in sorted((path / "commitlog").iterdir())[:count]:
        file.unlink()


def store_of(path: Path, first: int, count: int, topic: str = "A", at_ms: int = START_MS) -> Path:
    """Make a store, or add to it: four messages fill a file of the log."""
    config = StoreConfig.tiny(commitlog_file_size=4096, max_message_size=2048)
    with MessageStore.open(path, config, clock=ManualClock(at_ms)) as store:
        for number in range(first, first + count):
            store.append(Message(topic, b"%d " % number + b"x" * 800), 0)
    return path


def create_again(path: Path, first: int, count: int) -> None:
    """Delete topic A, whose queue a broker cleans when retention has deleted its messages, and fill it again."""
    store_of(path, 0, 5, "Other")
    delete_log_files(path, len(list((path / "commitlog").iterdir())) - 1)
    with MessageStore.open(path) as store:
        assert store.clean_unused_topics(["Other"]) == [("A", 0)]
    store_of(path, first, count)


class Sink:
    """Writes each batch to a folder named by its number, so that a repeated batch replaces itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sizes: list[int] = []

    def take(self, frame: Any, batch: int) -> None:
        rows = frame.select("topic", "queueId", "queueOffset", "body")
        rows.write.mode("overwrite").parquet(str(self.folder / f"b{batch}"))
        self.sizes.append(shared_session().read.parquet(str(self.folder / f"b{batch}")).count())

    def rows(self) -> list[Row]:
        found = shared_session().read.option("recursiveFileLookup", "true").parquet(str(self.folder)).collect()
        return [Row(topic, queue_id, queue_offset, bytes(body)) for topic, queue_id, queue_offset, body in found]


def reader(path: Path | str, given: Mapping[str, str] | None = None, **limits: Any) -> StreamReader:
    options = parse_read_options({"path": str(path), **(given or {})})
    return StreamReader(options, StreamLimits(**limits), arrow_schema(schema_of(["topic"]), options))


def read_up_to(offset: Any) -> int:
    return sum(flat(offset).values())


def test_a_trigger_takes_a_number_of_bytes(tmp_path: Path) -> None:
    """The bytes are those of the records, divided among queues; a record that is larger goes alone."""
    with MessageStore.open(tmp_path / "s", StoreConfig.tiny()) as store:
        for number in range(40):
            store.append(Message("A", b"x" * (10 * number)), number % 3)
        entries = {(name[1], at): queue.entry(at) for name, queue in store.queues.items() for at in range(14)}
        sizes = {name: entry.size for name, entry in entries.items() if entry is not None}
    stream = reader(tmp_path / "s", max_bytes=1500)
    offset, taken = stream.initialOffset(), 0
    limit = stream.getDefaultReadLimit()
    while taken < 40:
        before, offset = offset, stream.latestOffset(offset, limit)
        queues = [(int(name), at, offset[str(tmp_path / "s")]["A"][name])
                  for name, at in before[str(tmp_path / "s")]["A"].items()]  # fmt: skip
        read = sum(sizes[name, at] for name, begin, end in queues for at in range(begin, end))
        assert 0 < read <= 1500
        taken = read_up_to(offset)
    assert taken == 40
    stream.stop()
    small = reader(tmp_path / "s", max_bytes=1, max_offsets=7)
    assert read_up_to(small.latestOffset(small.initialOffset(), small.getDefaultReadLimit())) == 1
    small.stop()


def test_a_stream_of_a_store_behind_a_url(tmp_path: Path) -> None:
    """A later look reads on where the earlier one ended; another store in the same place is data loss."""
    pytest.importorskip("fsspec")
    path, url, counts = tmp_path / "s", f"local://{tmp_path}/s", list[int]()
    begin: Any = None
    with MessageStore.open(path, StoreConfig.tiny()) as store:
        fill(store, "A", 0, 6)
    for following in (4, 0, 0):
        stream = reader(url)
        begin = begin or stream.initialOffset()
        end = stream.latestOffset(begin, ReadAllAvailable())
        parts = stream.partitions(begin, end)
        counts.append(sum(batch.num_rows for part in parts for batch in stream.read(part)))
        assert stream.latestOffset(end, ReadAllAvailable()) == end
        stream.stop()
        begin = end
        with MessageStore.open(path) as store:
            fill(store, "A", 6, following)
    assert counts == [6, 4, 0]
    shutil.rmtree(path)
    with MessageStore.open(path, StoreConfig.tiny()) as store:
        fill(store, "A", 100, 50)
    stream = reader(url)
    with pytest.raises(DataLossError, match="holds another store"):
        stream.latestOffset(begin, ReadAllAvailable())
    stream.stop()


def batches_of(path: Path, **options: str) -> list[list[dict[str, Any]]]:
    """Return the rows of each batch of a stream in mode ``PERMISSIVE`` up to the present end."""
    source = RocketMQDataSource({"path": str(path), "mode": "PERMISSIVE", **options})
    stream: Any = source.streamReader(source.schema())
    begin, batches = stream.initialOffset(), list[list[dict[str, Any]]]()
    while (end := stream.latestOffset(begin, stream.getDefaultReadLimit())) != begin:
        parts = stream.partitions(begin, end)
        batches.append([row for part in parts for batch in stream.read(part) for row in batch.to_pylist()])
        begin = end
    stream.stop()
    return batches


def test_a_stream_reports_damage_in_its_first_batch(tmp_path: Path) -> None:
    """What planning found damaged is a row once after each start, and not in the batches that follow."""
    path = store_of(tmp_path / "s", 0, 20)
    log = sorted((path / "commitlog").iterdir())[2]
    with log.open("r+b") as file:
        file.truncate(100)
    batches = batches_of(path, maxOffsetsPerTrigger="5")
    counts = [sum(log.name in (row["_corrupt_record"] or "") for row in rows) for rows in batches]
    assert len(counts) > 1
    assert counts == [1] + [0] * (len(counts) - 1)


def test_a_damaged_entry_stops_no_limited_stream(tmp_path: Path) -> None:
    path = store_of(tmp_path / "s", 0, 6)
    file = path / "consumequeue" / "A" / "0" / f"{0:020d}"
    raw = bytearray(file.read_bytes())
    raw[40:60] = ENTRY.pack(0, -5, 0)
    file.write_bytes(raw)
    rows = [row for batch in batches_of(path, maxBytesPerTrigger="2000") for row in batch]
    assert sorted(row["queueOffset"] for row in rows) == list(range(6))
    assert [row["queueOffset"] for row in rows if row["_corrupt_record"]] == [2]


def test_a_trigger_waits_for_more_messages(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "s", StoreConfig.tiny()) as store:
        fill(store, "A", 0, 4)
        for delay, available_now, taken in ((3600, False, 0), (0, False, 4), (3600, True, 4)):
            stream = reader(tmp_path / "s", min_offsets=5, max_delay_seconds=delay)
            if available_now:
                stream.prepareForTriggerAvailableNow()
            begin = stream.initialOffset()
            assert read_up_to(stream.latestOffset(begin, stream.getDefaultReadLimit())) == taken
            stream.stop()
        stream = reader(tmp_path / "s", min_offsets=5, max_delay_seconds=3600)
        begin = stream.initialOffset()
        assert stream.latestOffset(begin, stream.getDefaultReadLimit()) == begin
        fill(store, "A", 4, 1)
        assert read_up_to(stream.latestOffset(begin, stream.getDefaultReadLimit())) == 5
        stream.stop()


def test_limits_do_not_count_deleted_messages(tmp_path: Path) -> None:
    """A trigger begins at the first message that retention left, and its limit is for those."""
    path = tmp_path / "s"
    with MessageStore.open(path, StoreConfig.tiny(commitlog_file_size=4096, max_message_size=2048)) as store:
        for _ in range(100):
            store.append(Message("A", b"x" * 100), 0)
    begin = {str(path): {"A": {"0": 0}}}
    delete_log_files(path, 2)
    for limits in ({"max_offsets": 5}, {"max_bytes": 1000}):
        stream = reader(path, {"failOnDataLoss": "false"}, **limits)
        end = stream.latestOffset(begin, stream.getDefaultReadLimit())
        first = read_up_to(stream.initialOffset())
        (task,) = stream.partitions(begin, end)
        assert [(one.begin, one.end) for one in task.value.slices] == [(first, first + 5)]
        stream.stop()


def test_a_queue_that_appears_without_its_beginning_is_a_loss(tmp_path: Path) -> None:
    """Also if retention deletes the beginning between the plan of a batch and its run."""
    path = tmp_path / "s"
    with MessageStore.open(path, StoreConfig.tiny(commitlog_file_size=4096, max_message_size=2048)) as store:
        fill(store, "A", 0, 2)
    planned = reader(path)
    checkpoint = planned.latestOffset(planned.initialOffset(), planned.getDefaultReadLimit())
    with MessageStore.open(path) as store:
        for _ in range(100):
            store.append(Message("B", b"x" * 100), 0)
    end = planned.latestOffset(checkpoint, planned.getDefaultReadLimit())
    planned.stop()
    delete_log_files(path, 2)
    stream = reader(path)
    with pytest.raises(DataLossError, match=r"topic 'B', queue 0: it is new, but begins at offset \d+"):
        stream.latestOffset(checkpoint, stream.getDefaultReadLimit())
    with pytest.raises(DataLossError, match=r"topic 'B', queue 0: it is new"):
        stream.partitions(checkpoint, end)
    stream.stop()
    stream = reader(path, {"failOnDataLoss": "false"})
    end = stream.latestOffset(checkpoint, stream.getDefaultReadLimit())
    (task,) = stream.partitions(checkpoint, end)
    assert [(piece.topic, piece.end) for piece in task.value.slices] == [("B", 100)]
    stream.stop()


def advance(stream: StreamReader, offset: Any) -> tuple[Any, int]:
    """Return the next offset, as Spark reads it back from a checkpoint, and the number of messages up to it."""
    end = json.loads(json.dumps(stream.latestOffset(offset, stream.getDefaultReadLimit())))
    tasks = stream.partitions(offset, end)
    stream.stop()
    return end, sum(piece.end - piece.begin for task in tasks for piece in task.value.slices)


def test_a_store_is_known_at_another_path(tmp_path: Path) -> None:
    """Renamed, swapped, or by a link: no message is read twice, and only a batch with messages changes the offset."""
    first, second = tmp_path / "a" / "store", tmp_path / "b" / "store"
    for number, path in enumerate((first, second)):
        with MessageStore.open(path, StoreConfig.tiny(), clock=ManualClock(START_MS + number)) as store:
            fill(store, "A", 0, 10 + number)
    stream = reader(tmp_path / "*" / "store")
    offset, count = advance(stream, stream.initialOffset())
    assert count == 21
    assert advance(reader(tmp_path / "*" / "store"), offset) == (offset, 0)
    first.rename(tmp_path / "moved")
    second.rename(first)  # where the other store was
    (tmp_path / "moved").rename(second)
    offset, count = advance(reader(tmp_path / "*" / "store"), offset)
    assert count == 0
    assert {path: read_up_to({path: offset[path]}) for path in map(str, (first, second))} == {
        str(first): 11, str(second): 10,
    }  # fmt: skip
    first.parent.rename(tmp_path / "c")
    (tmp_path / "d").symlink_to(tmp_path / "c")
    with MessageStore.open(tmp_path / "c" / "store") as store:
        fill(store, "A", 11, 3)
    _, count = advance(reader(tmp_path / "*" / "store"), offset)
    assert count == 3


def test_a_store_that_is_gone_is_a_loss(tmp_path: Path) -> None:
    """So is another store in its folder. Without failOnDataLoss the stream goes on, and lists the store."""
    paths = tmp_path / "a", tmp_path / "b"
    for number, path in enumerate(paths):
        with MessageStore.open(path, StoreConfig.tiny(), clock=ManualClock(START_MS + number)) as store:
            fill(store, "A", 0, 4)
    stream = reader(tmp_path / "*")
    offset, _ = advance(stream, stream.initialOffset())
    paths[0].rename(tmp_path.parent / f"{tmp_path.name}-away")
    with pytest.raises(DataLossError, match=r"/a: this store was read, and none of the named folders holds it now"):
        advance(reader(tmp_path / "*"), offset)
    end, count = advance(reader(tmp_path / "*", {"failOnDataLoss": "false"}), offset)
    assert (end, count) == (offset, 0)
    latest = {path: topics for path, topics in end.items() if path == str(paths[1])}
    lags = stream_lags({"sources": [{"endOffset": json.dumps(end), "latestOffset": json.dumps(latest)}]})
    assert {(lag.store, lag.lag) for lag in lags} == {(str(path), 0) for path in paths}
    with MessageStore.open(paths[0], StoreConfig.tiny(), clock=ManualClock(START_MS)) as store:
        fill(store, "B", 0, 9)
    with pytest.raises(DataLossError, match=r"/a: its log has another record at \d+, .* holds another store"):
        advance(reader(tmp_path / "*"), offset)


LENIENT = {"failOnDataLoss": "false"}


@pytest.mark.parametrize("later", [5, 20, 30])
def test_a_topic_that_was_created_again(tmp_path: Path, later: int) -> None:
    """It is a loss, whether it has fewer messages than were read or more; by the option it is read from its start."""
    path, strict, lenient = store_of(tmp_path / "s", 0, 20), {"topic": "A"}, {"topic": "A", "failOnDataLoss": "false"}
    running = reader(path, lenient)
    first = running.latestOffset(running.initialOffset(), ReadAllAvailable())
    store_of(path, 100, 3)
    planned = running.latestOffset(first, ReadAllAvailable())
    create_again(path, 20, later)
    for offset in (first, planned):
        with pytest.raises(DataLossError, match=r"topic 'A', queue 0: (offset \d+ is another message|read up to)"):
            advance(reader(path, strict), offset)
    with pytest.raises(DataLossError, match="topic 'A', queue 0"):
        reader(path, strict).partitions(first, planned)
    assert running.partitions(first, planned) == []  # these messages are gone; the new ones are of the next batch
    assert advance(running, planned)[1] == later
    end, count = advance(reader(path, lenient), first)
    assert count == later
    assert advance(reader(path, strict), end) == (end, 0)
    store_of(path, 200, 2)
    assert advance(reader(path, strict), end)[1] == 2


def test_another_store_in_the_place_is_read_from_its_start(tmp_path: Path) -> None:
    path, stream = store_of(tmp_path / "s", 0, 20), reader(tmp_path / "s")
    offset, _ = advance(stream, stream.initialOffset())
    for number, count in enumerate((15, 20, 40)):
        shutil.rmtree(path)
        store_of(path, 0, count, at_ms=START_MS + 1 + number)
        with pytest.raises(DataLossError, match=r"its log has another record at \d+|its log ends at \d+, before"):
            advance(reader(path), offset)
        assert advance(reader(path, LENIENT), offset)[1] == count


def test_a_queue_without_the_last_message_that_was_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If retention took it and no other, it is said once; a queue that has another one in that place is another."""
    path, stream = store_of(tmp_path / "s", 0, 20), reader(tmp_path / "s")
    offset, _ = advance(stream, stream.initialOffset())
    store_of(path, 20, 4)
    delete_log_files(path, 5)
    stream = reader(path)
    assert read_up_to(stream.latestOffset(offset, ReadAllAvailable())) == 24
    assert advance(stream, offset)[1] == 4
    (line,) = [record.getMessage() for record in caplog.records if record.name == "librmq.spark"]
    assert "retention has deleted the last message that was read of A/0" in line
    for before, deleted, error in ((0, 0, "its log has another record"), (8, 5, "offset 19 is another message"),
                                   (0, 6, "read up to offset 20, but begins at offset 24")):  # fmt: skip
        shutil.rmtree(path)
        store_of(store_of(path, 0, before, "Other", START_MS + 1), 0, 40, at_ms=START_MS + 1)
        delete_log_files(path, deleted)
        with pytest.raises(DataLossError, match=error):
            advance(reader(path, {"topic": "A"}), offset)


def test_what_a_lost_store_can_be(tmp_path: Path) -> None:
    """A renamed store without what it was known by can be linked; a replica that was behind is no other store."""
    path, stream = store_of(tmp_path / "s", 0, 20), reader(tmp_path / "s")
    offset, _ = advance(stream, stream.initialOffset())
    shutil.copytree(store_of(tmp_path / "behind", 0, 10), tmp_path / "replica")
    moved = store_of(path.rename(tmp_path / "moved"), 20, 4)
    delete_log_files(moved, 5)
    with pytest.raises(DataLossError, match=r"moved can be this store, but retention .* name it by a link at .*/s"):
        advance(reader(moved), offset)
    path.symlink_to(moved)
    assert advance(reader(path), offset)[1] == 4
    path.unlink()
    (tmp_path / "replica").rename(path)
    with pytest.raises(DataLossError, match=r"its log ends at \d+, before \d+, the last .* a replica that was behind"):
        advance(reader(path), offset)


def test_a_copy_beside_its_store_is_refused(tmp_path: Path) -> None:
    """In streams, batches and pipelines: whether it was there at the start or came later, by whatever it is behind."""
    shutil.copytree(store_of(tmp_path / "a", 0, 20), tmp_path / "copy")
    store_of(tmp_path / "a", 20, 5)
    both, alone = reader(tmp_path / "*"), reader(tmp_path / "a")
    copied = r"/copy has the messages of .*/a, up to the one at \d+ at least"
    with pytest.raises(ConfigError, match=copied):
        advance(both, both.initialOffset())
    offset, _ = advance(alone, alone.initialOffset())
    with pytest.raises(ConfigError, match=copied):
        advance(reader(tmp_path / "*"), offset)
    batch = RocketMQDataSource({"path": str(tmp_path / "*")})
    with pytest.raises(ConfigError, match=copied):
        batch.reader(batch.schema()).partitions()


@pytest.mark.spark
@pytest.mark.parametrize("pipeline", ["backlog", "skew"])
def test_a_pipeline_refuses_a_copy_beside_its_store(tmp_path: Path, pipeline: str) -> None:
    shutil.copytree(store_of(tmp_path / "a", 0, 20), tmp_path / "copy")
    with pytest.raises((ConfigError, PySparkException), match="copy has the messages of"):
        run_pipeline(shared_session(), pipeline, str(tmp_path / "*")).collect()


def test_a_batch_of_a_topic_that_the_options_leave_out(tmp_path: Path) -> None:
    path = store_of(store_of(tmp_path / "s", 0, 3), 0, 4, "B")
    both = reader(path)
    begin = both.initialOffset()
    end = both.latestOffset(begin, ReadAllAvailable())
    narrow = reader(path, {"topic": "A"})
    with pytest.raises(ConfigError, match=r"topic 'B', queue 0: the options leave it out, .* the former options"):
        narrow.partitions(begin, end)
    assert len(both.partitions(begin, end)) == 1
    assert advance(narrow, end) == (end, 0)


def test_a_new_stream_names_a_topic_that_no_store_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stream = reader(store_of(tmp_path / "s", 0, 1, "Orders"), {"topic": "Order"})
    stream.initialOffset()
    stream.stop()
    assert [f"topic 'Order' has no queue in {tmp_path}/s; did you mean 'Orders'?"] == caplog.messages


def test_a_delay_without_a_minimum_is_refused() -> None:
    with pytest.raises(ConfigError, match="option maxTriggerDelay: it limits the wait for minOffsetsPerTrigger"):
        StreamLimits.from_options({"maxTriggerDelay": "5s"})


def run(path: Path, sink: Sink, checkpoint: Path, **options: str) -> Any:
    stream = shared_session().readStream.format("rocketmq").options(**options).load(str(path))
    query = (
        stream.writeStream.foreachBatch(sink.take)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return query


@pytest.mark.spark
def test_limits_restarts_and_later_messages(tmp_path: Path) -> None:
    path, checkpoint = tmp_path / "store", tmp_path / "checkpoint"
    sink, history = Sink(tmp_path / "sink"), JobHistory(path)
    clock = ManualClock(START_MS)
    with MessageStore.open(path, StoreConfig.tiny(), clock=clock) as store:
        fill_recorded(store, history, "A", 0, 25)
        query = run(path, sink, checkpoint, maxOffsetsPerTrigger="10")
        assert sink.sizes == [10, 10, 5]
        lags = [stream_lags(progress) for progress in query.recentProgress if progress["numInputRows"]]
        assert [sum(one.lag for one in found) for found in lags] == [15, 5, 0]
        assert {one[:3] for one in lags[0]} == {(str(path), "A", 0), (str(path), "A", 1)}
        assert isinstance(lags[0][0], StreamLag)
        # Spark 4.3 asks no source in Python for metrics; if a later one does, the lag belongs there.
        assert not any(source["metrics"] for progress in query.recentProgress for source in progress["sources"])
        fill_recorded(store, history, "A", 25, 5)
        fill_recorded(store, history, "B", 30, 3)  # a topic that did not exist
        run(path, sink, checkpoint, maxOffsetsPerTrigger="100")
        assert history.anomalies(sink.rows()) == []
    # Spark requests an unfinished batch again.
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda one: int(one.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)
    run(path, sink, checkpoint, maxOffsetsPerTrigger="100")
    assert history.anomalies(sink.rows()) == []


@pytest.mark.spark
def test_a_stream_into_a_store(tmp_path: Path) -> None:
    """Each batch is written once, also if Spark repeats it; another checkpoint is another stream."""
    source, target = tmp_path / "source", tmp_path / "target"
    with MessageStore.open(source, StoreConfig.tiny()) as store:
        fill(store, "A", 0, 9)

    def copy(checkpoint: str, **options: str) -> None:
        stream = shared_session().readStream.format("rocketmq").options(names="kafka", maxOffsetsPerTrigger="5")
        rows = stream.load(str(source)).select("key", "value", "partition")
        writer = rows.writeStream.format("rocketmq").options(names="kafka", topic="B", **options)
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start(str(target))
        query.awaitTermination()

    checkpoint = tmp_path / "checkpoint"
    history = JobHistory(target)
    job = history.job("B", map(b"%d".__mod__, range(9)), (number % 2 for number in range(9)))
    with job:
        copy(str(checkpoint))
    assert history.anomalies() == []
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda one: int(one.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)
    with job:
        copy(str(checkpoint))
    assert history.anomalies() == []
    assert len(list((target / "librmq" / "spark").iterdir())) == 1
    copy(str(tmp_path / "other"), jobId="again")
    with MessageStore.open(target, read_only=True) as store:
        assert {(message.topic, message.queue_id - int(message.body) % 2) for message in store} == {("B", 0)}
        assert sorted(int(message.body) for message in store) == sorted([*range(9)] * 2)


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
    with pytest.raises(PySparkException, match=r"\[RMQ_DATA_LOSS\] .*its log ends at .* holds another store"):
        run(path, sink, checkpoint)
    run(path, sink, checkpoint, failOnDataLoss="false")
    assert sorted(int(row.body) for row in sink.rows()) == [*range(20), *range(100, 104)]


@pytest.mark.spark
def test_a_topic_that_is_created_again_under_a_stream(tmp_path: Path) -> None:
    """The query that runs fails, and so does a restart; by the option a restart reads the new topic once."""
    path, checkpoint, sink = store_of(tmp_path / "s", 0, 20), tmp_path / "checkpoint", Sink(tmp_path / "sink")
    stream = shared_session().readStream.format("rocketmq").option("topic", "A").load(str(path))
    query = stream.writeStream.foreachBatch(sink.take).option("checkpointLocation", str(checkpoint)).start()
    query.processAllAvailable()
    create_again(path, 20, 30)
    loss = r"\[RMQ_DATA_LOSS\] .*topic 'A', queue 0: (offset 19 is another|read up to offset 20)"
    with pytest.raises(PySparkException, match=loss):  # it can look while the new topic is filled
        query.processAllAvailable()
    with pytest.raises(PySparkException, match=r"\[RMQ_DATA_LOSS\] .*topic 'A', queue 0: offset 19 is another"):
        run(path, sink, checkpoint, topic="A")
    run(path, sink, checkpoint, topic="A", failOnDataLoss="false")
    run(path, sink, checkpoint, topic="A")
    assert sorted(int(row.body.split()[0]) for row in sink.rows()) == [*range(50)]


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
            fill_recorded(store, history, "AB"[batch % 2], written[0], 5)
            written[0] += 5
            if chance > 0.75:
                raise RuntimeError("killed behind")

    sink, history, written = Failing(tmp_path / "sink"), JobHistory(path), [40]
    with MessageStore.open(path, StoreConfig.tiny(), clock=clock) as store:
        fill_recorded(store, history, "A", 0, 40)
        for _ in range(6):
            with contextlib.suppress(PySparkException):
                run(path, sink, checkpoint, maxOffsetsPerTrigger="9")
        run(path, Sink(tmp_path / "sink"), checkpoint)
    assert history.anomalies(sink.rows()) == []
