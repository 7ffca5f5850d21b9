"""Writing: the stored messages, all or nothing, repeated jobs, failed tasks."""

from __future__ import annotations

import json
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, ManualClock, Message, MessageStore, StoreConfig
from librmq.store.recovery._verify import verify
from tests.programs import run_program

pytest.importorskip("pyspark")

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import BinaryType, LongType, MapType, StringType, StructField, StructType

from librmq.cli import main
from librmq.commitlog import CommitLog
from librmq.errors import ConfigError, MessageIllegalError, StoreLockedError
from librmq.message.record import decode_record
from librmq.spark import _write as write
from librmq.spark._encode import Encoder
from librmq.spark._kafka import written_batch
from librmq.spark._options import WriteOptions
from librmq.spark._staged_records import Staged, StagedRecords, discard, run_folder
from librmq.spark._write import Writer, commit, wait_until_free
from tests.job_histories import JobHistory
from tests.spark_session import killing, shared_session
from tests.stores import with_fields

START_MS = 1_700_000_000_000
CONFIG = StoreConfig.tiny(commitlog_file_size=16384, max_message_size=8192)
SCHEMA = (
    "topic string, body binary, tags string, keys array<string>, uniqueKey string, properties map<string,string>, "
    "queueId int, flag int, bornTimestamp timestamp"
)


def new_store(path: Path, messages: int = 3) -> Path:
    with MessageStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        for number in range(messages):
            store.append(Message("Old", b"old %d" % number, keys=f"o{number}"))
    return path


def rows(count: int) -> list[tuple[Any, ...]]:
    return [
        (
            ("A", "主题")[n % 2],
            b"body %d" % n if n % 7 else b"",
            ("t1", None, "标签")[n % 3],
            [f"k{n}", f"k{n}b"] if n % 4 else None,
            f"U{n:031d}" if n % 5 else None,
            {f"p{i}": f"v{n}" for i in range(n % 4)} | ({"é": "ü"} if n % 6 == 0 else {}) if n % 9 else None,
            n % 3,
            n,
            datetime.fromtimestamp((START_MS + n) / 1000, UTC),
        )
        for n in range(count)
    ]


@pytest.mark.spark
def test_spark_writes_the_same_bytes_as_the_store(tmp_path: Path) -> None:
    path, plain = new_store(tmp_path / "store"), new_store(tmp_path / "plain")
    given = rows(300)
    frame = shared_session().createDataFrame(given, SCHEMA).coalesce(1)
    frame.write.format("rocketmq").mode("append").save(str(path))
    with MessageStore.open(path, read_only=True) as store:
        written = list(store)[3:]
    clock = ManualClock(written[0].store_timestamp_ms)
    with MessageStore.open(plain, clock=clock) as store:
        for topic, body, tags, keys, unique, properties, queue_id, flag, born in given:
            message = Message(topic, body, tags=tags, keys=keys, unique_key=unique, properties=properties, flag=flag)
            store.append(message, queue_id, born_timestamp_ms=round(born.timestamp() * 1000))
    with MessageStore.open(plain, read_only=True) as store:
        assert [message.raw for message in written] == [message.raw for message in store][3:]
        queues = {name: queue.entries().tobytes() for name, queue in store.queues.items()}
        found = [message.physical_offset for message in store.find_by_key("A", "k2b")]
    with MessageStore.open(path, read_only=True) as store:
        assert {name: queue.entries().tobytes() for name, queue in store.queues.items()} == queues
        assert [message.physical_offset for message in store.find_by_key("A", "k2b")] == found
    assert verify(str(path)).sound
    assert not list((path / "librmq" / "spark").iterdir())


@pytest.mark.spark
def test_order_and_defaults(tmp_path: Path) -> None:
    path = new_store(tmp_path / "store")
    frame = shared_session().range(40, numPartitions=4).select(
        F.concat(F.lit("b"), F.col("id").cast("string")).alias("body"), (F.col("id") * 7 % 40).alias("rank")
    )  # fmt: skip
    frame.write.format("rocketmq").mode("append").options(topic="New", orderBy="rank", queues="2").save(str(path))
    with MessageStore.open(path, read_only=True) as store:
        bodies = [message.body for message in store if message.topic == "New"]
        assert bodies == [b"b%d" % n for n in sorted(range(40), key=lambda n: n * 7 % 40)]
        assert {name[1] for name in store.queues if name[0] == "New"} == {0, 1}


@pytest.mark.spark
def test_a_repeated_job_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "made"
    frame = shared_session().createDataFrame([(b"x",), (b"y",)], "body binary")
    history = JobHistory(path)
    job = history.job("T", [b"x", b"y"])
    for _ in range(2):
        with job:
            writer = frame.write.format("rocketmq").mode("append").options(topic="T", queueId="0", jobId="nightly-7")
            writer.save(str(path))
        assert history.anomalies() == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"maxOffsetsPerTrigger": "5"}, "unknown option 'maxOffsetsPerTrigger' for writing"),
        ({"checkpointLocation": "c"}, "option checkpointLocation: only a stream has it"),
        ({"queues": "3", "queueId": "1"}, "options queue and queues: expected only one of them"),
        ({"queueId": "4294967296"}, "option queue: expected at most 2147483647"),
    ],
)
def test_no_option_of_a_write_is_ignored(tmp_path: Path, options: dict[str, str], text: str) -> None:
    from librmq.spark._source import RocketMQDataSource

    schema = StructType([StructField("body", BinaryType())])
    with pytest.raises(ConfigError, match=text):
        RocketMQDataSource({"path": str(new_store(tmp_path / "store")), "topic": "T", **options}).writer(schema, False)


def test_an_offset_of_kafka_is_not_written(tmp_path: Path) -> None:
    """The error names the column as the user does."""
    from librmq.spark._source import RocketMQDataSource

    schema = StructType([StructField("value", BinaryType()), StructField("offset", LongType())])
    source = RocketMQDataSource({"path": str(new_store(tmp_path / "store")), "topic": "T", "names": "kafka"})
    with pytest.raises(ConfigError, match=r"^\[RMQ_BAD_OPTION\] column 'offset': the store gives a message its offset"):
        source.writer(schema, False)


def test_two_columns_for_one_of_a_message_are_refused(tmp_path: Path) -> None:
    from librmq.spark._source import RocketMQDataSource

    properties = MapType(StringType(), StringType())
    fields = [StructField("value", BinaryType()), StructField("headers", properties)]
    source = RocketMQDataSource({"path": str(new_store(tmp_path / "store")), "topic": "T", "names": "kafka"})
    source.writer(StructType(fields), False)
    with pytest.raises(ConfigError, match="column 'properties': two columns are written to it"):
        source.writer(StructType([*fields, StructField("properties", properties)]), False)


@pytest.mark.parametrize("is_wide", [False, True])
def test_rows_of_kafka_are_written_in_the_order_of_their_times(tmp_path: Path, is_wide: bool) -> None:
    """Texts and bytes have wide offsets in a session with spark.sql.execution.arrow.useLargeVarTypes."""
    text, binary = (pa.large_string(), pa.large_binary()) if is_wide else (pa.string(), pa.binary())
    columns = {
        "key": pa.array([b"k1", None], binary),
        "value": pa.array([b"late", b"early"], binary),
        "timestamp": pa.array([2000, 1000], pa.timestamp("us", "UTC")),
        "headers": pa.array([[{"key": "h", "value": b"1"}], None], pa.list_(pa.struct({"key": text, "value": binary}))),
    }
    batch = pa.RecordBatch.from_pydict(columns)
    options = WriteOptions(str(tmp_path), topic="T", names="kafka", order_by="timestamp")
    writer = Writer(options, from_arrow_schema(batch.schema))
    writer.commit([writer.write(iter([batch]))])
    with MessageStore.open(tmp_path, read_only=True) as store:
        assert [(one.body, one.keys, one.properties.get("h")) for one in store] == [
            (b"early", (), None),
            (b"late", ("k1",), "1"),
        ]


@pytest.mark.parametrize(
    ("column", "values", "text"),
    [
        ("key", [b"\xff"], "column 'key': expected UTF-8"),
        ("headers", [[{"key": "a", "value": b"\xff"}]], "column 'headers': expected UTF-8"),
        ("headers", [[{"key": None, "value": b"1"}]], "column 'headers': expected a name for each header"),
        ("headers", [[None]], "column 'headers': expected a name for each header"),
    ],
)
def test_rows_of_kafka_that_are_no_messages_are_refused(column: str, values: list[Any], text: str) -> None:
    kind = pa.binary() if column == "key" else pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()}))
    with pytest.raises(ConfigError, match=text):
        written_batch(pa.RecordBatch.from_pydict({column: pa.array(values, kind)}))


@pytest.mark.spark
@pytest.mark.parametrize(
    ("column", "options", "text"),
    [
        ("tag string", {}, "did you mean tags"),
        ("tags int", {}, "expected type string, found int"),
        ("tags string", {"orderBy": "tag"}, "no column 'tag'"),
        ("keys array<string>", {"orderBy": "keys"}, "option orderBy: column 'keys' has type array<string>"),
        ("age interval year to month", {"orderBy": "age"}, "option orderBy: column 'age' has type interval year to"),
        ("tags string", {"topicz": "x"}, "did you mean topic"),
    ],
)
def test_errors_are_raised_on_the_driver(tmp_path: Path, column: str, options: dict[str, str], text: str) -> None:
    path = new_store(tmp_path / "store")
    frame = shared_session().createDataFrame([], f"topic string, body binary, {column}")
    with pytest.raises(PySparkException, match=text):
        frame.write.format("rocketmq").mode("append").options(**options).save(str(path))


@pytest.mark.spark
def test_a_failed_job_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    path = new_store(tmp_path / "store")
    before = {one: one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()}
    frame = shared_session().range(30, numPartitions=3).select(
        F.lit("T").alias("topic"), F.lit("body").alias("body"),
        F.when(F.col("id") == 25, F.lit("a\x01b")).otherwise("fine").alias("tags"),
    )  # fmt: skip
    history = JobHistory(path)
    with pytest.raises(PySparkException, match="01 and 02 separate properties"), history.job("T", [b"body"]):
        frame.write.format("rocketmq").mode("append").save(str(path))
    assert history.anomalies() == []
    assert {one: one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()} == before


@pytest.mark.spark
def test_a_worker_that_is_killed_writes_nothing_twice(tmp_path: Path) -> None:
    path = new_store(tmp_path / "store")
    frame = shared_session().range(3000, numPartitions=3).select(F.col("id").cast("string").alias("body"))
    history = JobHistory(path)
    queue_ids = (number % 1000 % 4 for number in range(3000))  # each task begins with the first queue
    with killing(tmp_path / "killed"), history.job("New", map(b"%d".__mod__, range(3000)), queue_ids):
        frame.write.format("rocketmq").mode("append").options(topic="New").save(str(path))
    assert history.anomalies() == []
    assert not list((path / "librmq" / "spark").iterdir())


# ------------------------------------------------------------------------------------------- commit, without a session


def test_a_task_that_is_retried_writes_once(tmp_path: Path) -> None:
    """Only the records of the attempt whose message reached the driver are added."""
    path = new_store(tmp_path / "store", 0)
    writer = Writer(WriteOptions(str(path), topic="T"), StructType([StructField("body", BinaryType())]))
    batch = pa.RecordBatch.from_pydict({"body": pa.array([b"one", b"two"])})

    def failing() -> Iterator[pa.RecordBatch]:
        yield batch
        raise RuntimeError("the task was killed")

    with pytest.raises(RuntimeError):
        writer.write(failing())
    writer.write(iter([batch]))  # the driver never gets this attempt's message
    history = JobHistory(path)
    with history.job("T", [b"one", b"two"], [0, 1]):
        writer.commit([writer.write(iter([batch])), None])
    assert history.anomalies() == []
    assert not list((path / "librmq" / "spark").iterdir())


def test_texts_with_wide_offsets_are_the_same_texts() -> None:
    """Spark uses them with spark.sql.execution.arrow.useLargeVarTypes."""
    found = []
    for text, binary in ((pa.string(), pa.binary()), (pa.large_string(), pa.large_binary())):
        batch = pa.RecordBatch.from_pydict(
            {
                "topic": pa.array(["A", "B", "A"], text),
                "body": pa.array([b"a", b"", b"c"], binary),
                "tags": pa.array(["t", None, "u"], text),
                "keys": pa.array([["a", "b"], None, ["c"]], pa.list_(text)),
                "uniqueKey": pa.array(["U1", "U2", "U3"], text),
                "properties": pa.array([[("x", "y")], None, [("é", "ü"), ("p", "q")]], pa.map_(text, text)),
            }
        )
        encoded = Encoder(None, None, 1, "127.0.0.1:10911", 8192, 16376).encode(batch, 0, START_MS)
        found.append((encoded.data.to_pybytes(), encoded.key_hashes.tolist(), encoded.lanes))
    assert found[0] == found[1]


@pytest.mark.parametrize("keys", [["a b"], ["a", ""], ["a", None], ["a\xa0b"]])
def test_a_list_with_what_is_no_key_is_refused(keys: list[str | None]) -> None:
    lists = pa.array([["fine", "too"], None, keys], pa.list_(pa.string()))
    batch = pa.RecordBatch.from_pydict({"body": pa.array([b"x"] * 3), "keys": lists})
    with pytest.raises(MessageIllegalError, match="row 2: keys: "):
        Encoder("T", None, 1, "127.0.0.1:10911", 8192, 16376).encode(batch, 0, START_MS)


@pytest.mark.spark
def test_a_session_with_wide_offsets_writes_and_reads(tmp_path: Path) -> None:
    path, spark = tmp_path / "store", shared_session()
    spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "true")
    try:
        frame = spark.createDataFrame(
            [("T", b"one", "t1", ["k1", "k2"])], "topic string, body binary, tags string, keys array<string>"
        )
        frame.write.format("rocketmq").mode("append").save(str(path))
        (row,) = spark.read.format("rocketmq").load(str(path)).select("topic", "body", "tags", "keys").collect()
    finally:
        spark.conf.unset("spark.sql.execution.arrow.useLargeVarTypes")
    assert (row.topic, bytes(row.body), row.tags) == ("T", b"one", "t1")


def staged_bodies(count: int) -> list[bytes]:
    """Return the bodies that `stage` gives this many records, in the order of the tasks."""
    return [b"%d" % number * 40 for number in range(count)]


def stage(
    folder: Path, tasks: int, records: int, order: Callable[[int, int], int | None] | None = None
) -> list[Staged]:
    """Write files as tasks do."""
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    encoder = Encoder("N", 0, 1, "127.0.0.1:10911", 8192, 16376)
    made = []
    for task in range(tasks):
        bodies = staged_bodies(tasks * records)[task * records :][:records]
        batch = pa.RecordBatch.from_pydict(
            {"body": pa.array(bodies), "keys": pa.array([f"k{b[:4]!r}" for b in bodies])}
        )
        encoded = encoder.encode(batch, 0, START_MS)
        (folder / f"t{task}.log").write_bytes(encoded.data.to_pybytes())
        table = pa.table(
            {
                "size": encoded.sizes.astype(np.int32), "lane": encoded.lane, "tagsCode": encoded.tags_code,
                "keys": pa.ListArray.from_arrays(pa.array(np.arange(records + 1, dtype=np.int32)),
                                                 pa.array(encoded.key_hashes)),
            }
        )  # fmt: skip
        if order is not None:
            table = table.append_column("order", pa.array([order(task, n) for n in range(records)], pa.int64()))
        with pa.ipc.new_file(str(folder / f"t{task}.arrow"), table.schema) as file:
            file.write_table(table)
        made.append(Staged(f"t{task}", task, records, tuple(encoded.lanes)))
    return made


@pytest.mark.parametrize("died", [True, False])
def test_a_job_repeated_after_its_records_expired(tmp_path: Path, died: bool) -> None:
    """A job that died before a record became visible is repeated, whatever was written and deleted there since."""
    path = new_store(tmp_path / "store")
    with MessageStore.open(path) as store:
        while store.log.end < 20_000:
            store.append(Message("Old", bytes(1000)))
    folder, note = run_folder(str(path), "job", None, START_MS), path / "librmq" / "spark" / "job.json"
    staged = stage(Path(folder), 1, 10)
    assert commit(str(path), "job", staged, folder, ordered=False, keep_note=True) == 10
    assert json.loads(note.read_bytes())["done"] is True
    note.write_bytes(with_fields(note.read_bytes(), begin=100, end=200, done=not died))
    (path / "commitlog" / f"{0:020}").unlink()
    again = stage(Path(folder), 1, 10)
    assert commit(str(path), "job", again, folder, ordered=False, keep_note=True) == (10 if died else 0)
    with MessageStore.open(path, read_only=True) as store:
        assert sum(message.topic == "N" for message in store) == (20 if died else 10)


def test_a_job_without_a_record_is_done_once(tmp_path: Path) -> None:
    path = new_store(tmp_path / "store")
    folder = run_folder(str(path), "job", None, START_MS)
    for _ in range(2):
        assert commit(str(path), "job", [], folder, ordered=False, keep_note=True) == 0
    assert json.loads((path / "librmq" / "spark" / "job.json").read_bytes())["done"] is True
    staged = stage(Path(folder), 1, 10)
    assert commit(str(path), "job", staged, folder, ordered=False, keep_note=True) == 0


def test_records_in_another_folder_are_not_committed(tmp_path: Path) -> None:
    """If workers wrote the files to another folder, the commit adds nothing."""
    path = new_store(tmp_path / "store")
    folder = Path(run_folder(str(path), "job", None, START_MS))
    staged = stage(folder, 2, 10)
    (folder / "t1.log").unlink()
    (folder / "t1.arrow").unlink()
    history = JobHistory(path)
    with pytest.raises(ConfigError, match="driver and workers must share"), history.job("N", staged_bodies(20)):
        commit(str(path), "job", staged, str(folder), ordered=False, keep_note=True)
    assert history.anomalies() == []
    assert verify(str(path)).sound


KILLED = """
import os, sys
from pathlib import Path
from librmq.commitlog import CommitLog
from librmq.consumequeue import ConsumeQueue
from librmq.store import KeyIndex
from tests.spark.test_write import stage
from librmq.spark._write import commit
from librmq.spark._staged_records import run_folder

left = [0]


def counted(part, name):
    method = getattr(part, name)

    def call(self, *arguments):
        if not left[0]:
            os._exit(9)
        left[0] -= 1
        return method(self, *arguments)

    setattr(part, name, call)


for name in ("append_block", "patch", "flush"):
    counted(CommitLog, name)
counted(ConsumeQueue, "append_many")
counted(KeyIndex, "append_block")
for calls, path in enumerate(map(Path, sys.argv[1:])):
    child = os.fork()
    if not child:
        left[0] = 1 << 30
        folder = run_folder(str(path), "job", None, 1_700_000_000_000)
        staged = stage(Path(folder), 2, 150)
        left[0] = calls
        commit(str(path), "job", staged, folder, ordered=False, keep_note=True)
        os._exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (7, 9), code
    if code == 7:
        sys.exit(0)
sys.exit(1)
"""


@pytest.mark.slow
def test_a_commit_that_is_killed_anywhere_is_done_once(tmp_path: Path) -> None:
    """After each kill the store is sound and has all messages or none, and the repeated job writes them once."""
    paths = [new_store(tmp_path / f"s{calls}") for calls in range(25)]
    histories = [JobHistory(path) for path in paths]
    jobs = [history.job("N", staged_bodies(300)) for history in histories]
    assert not run_program(KILLED, *paths).returncode
    ends = set()
    for path, history, job in zip(paths, histories, jobs, strict=True):
        notes = path / "librmq" / "spark"
        if not notes.exists():
            break  # every call was allowed, so no kill
        left = next(notes.glob("job.*.staging"), notes / "deleted")
        with MessageStore.open(path) as store:
            there = sum(message.topic == "N" for message in store)
            ends.add(there)
        assert there in (0, 300)
        assert history.anomalies() == []
        assert verify(str(path)).sound
        staged = [
            Staged(f"t{n}", n, 150, (("N", 0),)) for n in range(2) if (left / f"t{n}.log").exists()
        ]  # fmt: skip
        with job:
            commit(str(path), "job", staged, str(left), ordered=False, keep_note=True)
        assert history.anomalies() == []
        with MessageStore.open(path, read_only=True) as store:
            assert len(store.find_by_key("N", f"k{staged_bodies(1)[0][:4]!r}")) >= 1
    assert ends == {0, 300}


def commit_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "_was_committed", lambda store, job: False)


def keep_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    patch = CommitLog.patch

    def failing(log: CommitLog, at: int, data: bytes) -> None:
        patch(log, at, data)
        raise OSError("planted")

    monkeypatch.setattr(CommitLog, "patch", failing)
    monkeypatch.setattr(CommitLog, "truncate", lambda log, end: None)


def forget_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "StagedRecords", lambda folder, files, order: StagedRecords(folder, files[:-1], order))


def turn_the_tasks_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "StagedRecords", lambda folder, files, order: StagedRecords(folder, files[::-1], order))


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (commit_again, "repeat"),
        (keep_what_failed, "aborted"),
        (forget_a_task, "lost"),
        (turn_the_tasks_round, "offset-conflict"),
    ],
)
def test_a_history_shows_a_planted_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], kind: str
) -> None:
    """A job is committed, and repeated."""
    path = new_store(tmp_path / "store")
    folder = Path(run_folder(str(path), "job", None, START_MS))
    history = JobHistory(path)
    job = history.job("N", staged_bodies(20))
    plant(monkeypatch)
    for _ in range(2):
        with suppress(OSError), job:
            commit(str(path), "job", stage(folder, 2, 10), str(folder), ordered=False, keep_note=True)
    assert {anomaly.anomaly for anomaly in history.anomalies()} == {kind}


@pytest.mark.parametrize("job", [".", "..", ".hidden", "../up", "a/b", "", "-x", "a\0"])
def test_an_invalid_job_id_is_refused(tmp_path: Path, job: str) -> None:
    path = new_store(tmp_path / "store")
    schema = StructType([StructField("body", BinaryType())])
    with pytest.raises(ConfigError, match="option jobId: expected a letter or digit"):
        WriteOptions.from_options({"path": str(path), "jobId": job})
    if "/" in job or "\0" in job:
        with pytest.raises(ConfigError, match="not the name of a folder"):
            Writer(WriteOptions(str(path), topic="T", job_id=job), schema)


def test_a_job_deletes_nothing_but_its_own_staged_files(tmp_path: Path) -> None:
    """Other files in the staging folder are kept, and so is the target of a link in its place."""
    path, shared = new_store(tmp_path / "store"), tmp_path / "shared"
    staging = Path(run_folder(str(path), "thesis", str(shared), START_MS))
    for kept in (shared / "thesis" / "chapter.log", shared / "t0.log", staging / "notes.txt", staging / "notes.log"):
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text("kept")
    staged = stage(staging, 1, 3)
    assert commit(str(path), "thesis", staged, str(staging), ordered=False, keep_note=True) == 3
    assert {one.relative_to(shared).as_posix() for one in shared.rglob("*") if one.is_file()} == {
        "thesis/chapter.log", "t0.log", f"{staging.name}/notes.txt", f"{staging.name}/notes.log",
    }  # fmt: skip
    (shared / "linked.staging").symlink_to(staging)
    (staging / "t9.log").write_text("another job's")
    discard(str(shared / "linked.staging"))
    assert (staging / "t9.log").exists()


def test_runs_of_one_job_share_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An abort of one leaves the others theirs, one of which is committed; a run that was killed is deleted later."""
    path = new_store(tmp_path / "store")
    schema, options = StructType([StructField("body", BinaryType())]), WriteOptions(str(path), topic="T", job_id="job")
    runs = [Writer(options, schema) for _ in range(4)]
    ready = [run.write(iter([pa.RecordBatch.from_pydict({"body": [b"x"]})])) for run in runs]
    runs[0].abort([ready[0]])
    for number in (1, 2):
        runs[number].commit([ready[number]])
    with MessageStore.open(path, read_only=True) as store:
        assert sum(message.topic == "T" for message in store) == 1
    with pytest.raises(ConfigError, match="driver and workers must share"):  # a late task makes no folder again
        runs[1].write(iter([]))
    (killed,) = (path / "librmq" / "spark").glob("*.staging")
    for command in ("disk", "verify"):
        assert main([command, str(path)]) == 0
        assert "of Spark jobs that run or were killed, the first since 20" in capsys.readouterr().err
    assert main(["doctor", str(path), "--format", "table"]) == 0
    assert f"{killed}: " in capsys.readouterr().out
    Writer(options, schema)
    assert killed.exists()
    killed = killed.rename(killed.with_name(f"other.{START_MS}-{killed.name[-16:]}"))
    Writer(options, schema)
    assert not killed.exists()


@pytest.mark.parametrize(
    ("column", "values", "text"),
    [
        ("topic", ["A", "RMQ_SYS_TRANS_HALF_TOPIC"], "RMQ_SYS_TRANS_HALF_TOPIC' is the broker's own"),
        ("topic", ["SCHEDULE_TOPIC_XXXX", "A"], "is the broker's own"),
        ("body", [b"x", None], "row 6: body: expected bytes or text, found null"),
    ],
)
def test_system_topics_and_null_bodies_are_refused(column: str, values: list[Any], text: str) -> None:
    columns = {"topic": pa.array(["A", "A"]), "body": pa.array([b"x", b"y"])}
    columns[column] = pa.array(values, columns[column].type)
    with pytest.raises(MessageIllegalError, match=text):
        Encoder(None, None, 1, "127.0.0.1:10911", 8192, 16376).encode(pa.RecordBatch.from_pydict(columns), 5, START_MS)


def test_rows_without_a_queue_go_to_the_option() -> None:
    encoder = Encoder("T", 5, 4, "127.0.0.1:10911", 1 << 20, 1 << 20)
    batch = pa.RecordBatch.from_pydict({"body": [b"a", b"b"], "queueId": pa.array([2, None], pa.int32())})
    assert encoder.encode(batch, 0, START_MS).lanes == [("T", 2), ("T", 5)]
    assert encoder.encode(batch.select(["body"]), 0, START_MS).lanes == [("T", 5)]


def test_a_group_gets_each_row_of_a_job(tmp_path: Path) -> None:
    """Rows without a queue go to those that their topic has; a table of topics gets the queues of other rows."""
    path = tmp_path / "store"
    with Broker.open(path) as broker:
        broker.create_topic("T", 2)
    columns = pa.schema({"topic": pa.string(), "body": pa.binary(), "queueId": pa.int32()})
    rows = [("T", b"a", None), ("T", b"b", None), ("T", b"c", None), ("New", b"d", None), ("U", b"e", 6)]
    for queue_id, wanted in ((None, {("T", 0), ("T", 1), ("New", 3), ("U", 6)}), (2, {("T", 2)})):
        those = rows if queue_id is None else [("T", b"f", queue_id)]
        writer = Writer(WriteOptions(str(path)), from_arrow_schema(columns))
        batch = pa.RecordBatch.from_pylist([dict(zip(columns.names, row, strict=True)) for row in those], columns)
        ready = writer.write(iter([batch]))
        assert isinstance(ready, write.Ready)
        assert set(ready.staged.lanes) == wanted
        writer.commit([ready])
    with Broker.open(path) as broker:
        queues = {name: row.brokers[0] for name, row in broker.topics().items() if name in ("T", "New", "U")}
    assert {name: (row.read_queues, row.write_queues) for name, row in queues.items()} == {
        "T": (3, 2), "New": (4, 4), "U": (7, 7),
    }  # fmt: skip


def test_records_are_sorted_over_tasks_and_queues(tmp_path: Path) -> None:
    """Rows are sorted by a column, with nulls first and equal rows in the order of tasks; their keys move with them."""
    path = new_store(tmp_path / "store")
    folder = Path(run_folder(str(path), "job", None, START_MS))
    staged = stage(folder, 3, 50, order=lambda task, n: None if n == 7 else (n * 13 + task) % 50)
    ranked = sorted((-1 if n == 7 else (n * 13 + task) % 50, task, n) for task in range(3) for n in range(50))
    bodies = [staged_bodies(150)[task * 50 + n] for _, task, n in ranked]
    history = JobHistory(path)
    with history.job("N", bodies):
        assert commit(str(path), "job", staged, str(folder), ordered=True, keep_note=False) == 150
    assert history.anomalies() == []
    with MessageStore.open(path, read_only=True) as store:
        for body in bodies[::31]:
            assert body in [message.body for message in store.find_by_key("N", f"k{body[:4]!r}")]
    assert verify(str(path)).sound


@pytest.mark.slow
def test_the_driver_reads_staged_records_in_blocks(tmp_path: Path) -> None:
    """Four times the records take no more memory."""
    batch = pa.record_batch(
        {
            "size": pa.array([1] * 8192, pa.int32()), "lane": pa.array([0] * 8192, pa.int32()),
            "tagsCode": pa.array([0] * 8192, pa.int64()), "keys": pa.array([[5]] * 8192, pa.list_(pa.int64())),
        }
    )  # fmt: skip

    def most_bytes(batches: int) -> int:
        name, records = f"t{batches}", batches * len(batch)
        (tmp_path / f"{name}.log").write_bytes(bytes(records))
        with pa.ipc.new_file(str(tmp_path / f"{name}.arrow"), batch.schema) as file:
            for _ in range(batches):
                file.write_batch(batch)
        staged = Staged(name, 0, records, (("T", 0),))
        tracemalloc.start()
        try:
            with closing(StagedRecords(str(tmp_path), [staged], ordered=False)) as found:
                assert sum(len(block.sizes) for block in found.record_blocks()) == records
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert most_bytes(64) < 1.2 * most_bytes(16)


@pytest.mark.slow
def test_a_commit_waits_for_another_writer(tmp_path: Path) -> None:
    path = new_store(tmp_path / "store")
    folder = Path(run_folder(str(path), "job", None, START_MS))
    staged = stage(folder, 1, 10)
    history = JobHistory(path)
    job = history.job("N", staged_bodies(10))
    other = MessageStore.open(path)
    with pytest.raises(StoreLockedError, match="locked by"):
        wait_until_free(str(path), 0)
    with pytest.raises(StoreLockedError), job:
        commit(str(path), "job", staged, str(folder), ordered=False, keep_note=True)
    with pytest.raises(StoreLockedError, match=r"^\[RMQ_LOCKED\] "):
        Writer(WriteOptions(str(path), topic="N", wait_seconds=0), StructType([StructField("body", BinaryType())]))
    assert history.anomalies() == []
    threading.Timer(0.2, other.close).start()
    with job:
        assert commit(str(path), "job", staged, str(folder), ordered=False, keep_note=True, wait_seconds=60) == 10
    assert history.anomalies() == []


OTHER = """
import sys
from librmq import Message, MessageStore

with MessageStore.open(sys.argv[1]) as store:
    store.append(Message("N", b"theirs", keys="theirs"), 0)
"""


@pytest.mark.slow
def test_messages_that_others_append_during_a_job_stay(tmp_path: Path) -> None:
    """The job does not hold the lock during its work; its records follow what another process appended meanwhile."""
    path = new_store(tmp_path / "store")
    folder = Path(run_folder(str(path), "job", None, START_MS))
    wait_until_free(str(path), 0)
    staged = stage(folder, 1, 10)
    history = JobHistory(path)
    with history.job("N", [b"theirs"]):
        assert not run_program(OTHER, path).returncode
    with history.job("N", staged_bodies(10)):
        assert commit(str(path), "job", staged, str(folder), ordered=False, keep_note=True) == 10
    assert history.anomalies() == []
    with MessageStore.open(path, read_only=True) as store:
        assert len(list(store.find_by_key("N", "theirs"))) == 1
    assert verify(str(path)).sound


def test_ipv6_hosts() -> None:
    encoder = Encoder("N", 0, 1, "[fe80::1]:10911", 8192, 16376)
    batch = pa.RecordBatch.from_pydict({"body": pa.array([b"one", b"two"])})
    encoded = encoder.encode(batch, 0, START_MS)
    record = decode_record(encoded.data.to_pybytes(), int(encoded.sizes[0]))
    assert record.body == b"two"
    assert record.store_host == ("fe80:0:0:0:0:0:0:1", 10911)
