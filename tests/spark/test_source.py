"""The data source: options, projection, filters, damage, and a store with a running writer."""

from __future__ import annotations

import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from librmq import ManualClock, Message, MessageStore, StoreConfig
from librmq.message.record import COMPRESSED, SYS_FLAG_AT
from librmq.message.topics import SystemTopic
from tests.programs import run_program
from tests.s3_server import serving

pytestmark = pytest.mark.spark
pytest.importorskip("pyspark")

from pyspark.errors import PySparkException  # noqa: E402
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition  # noqa: E402
from pyspark.sql.types import BinaryType, StructField, StructType  # noqa: E402

from librmq.columns import planner  # noqa: E402
from librmq.errors import ConfigError, StoreIOError  # noqa: E402
from librmq.spark import cause_of  # noqa: E402
from librmq.spark._options import WriteOptions, parse_read_options  # noqa: E402
from librmq.spark._source import RocketMQDataSource  # noqa: E402
from tests.spark_session import shared_session  # noqa: E402

START_MS = 1_700_000_000_000
COUNT = 300


def fill(store: MessageStore, clock: ManualClock, count: int = COUNT, first: int = 0) -> None:
    """Make a store with messages one second apart in two topics of two queues; every tenth message is delayed."""
    for number in range(first, first + count):
        clock.advance(ms=1000)
        store.append(
            Message(
                "Orders" if number % 3 else "Refunds",
                b"body %d" % number,
                tags=("vip", "plain")[number % 2],
                keys=f"k{number}",
                properties={"amount": str(number), "region": ("eu", "us")[number % 2]},
                delay_level=1 if number % 10 == 0 else None,
            ),
            number // 3 % 2,
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stores") / "a"
    clock = ManualClock(START_MS)
    with MessageStore.open(path, StoreConfig.tiny(commitlog_file_size=16384, max_message_size=8192), clock=clock) as s:
        fill(s, clock)
    return path


def read(path: Path | str | list[str], schema: str | None = None, **options: str) -> Any:
    reader = shared_session().read.format("rocketmq").options(**options)
    if schema is not None:
        reader = reader.schema(schema)
    return reader.load(str(path) if isinstance(path, Path) else path)


WORKER = """
import gc, sys
from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition
from librmq.spark._source import RocketMQDataSource

source = RocketMQDataSource({"path": sys.argv[1]})
reader = source.reader(source.schema())
(part,) = reader.partitions()
TaskContext._setTaskContext(TaskContext())
for _ in range(2):
    assert sum(batch.num_rows for batch in reader.read(InputPartition(part.value))) == int(sys.argv[2])
    print(gc.get_freeze_count())
"""


def test_a_worker_keeps_its_modules_out_of_later_collections(folder: Path) -> None:
    """Spark collects after each task: the first one freezes what it has loaded, and the next ones no more."""
    done = run_program(WORKER, folder, len(PLAIN))
    first, second = map(int, done.stdout.split())
    assert first == second > 10_000, done.stderr


def numbers(frame: Any) -> list[int]:
    return sorted(int(bytes(row[0]).split()[1]) for row in frame.select("body").collect())


PLAIN = [number for number in range(COUNT) if number % 10]


def test_a_large_read_of_all_columns_names_the_option(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once for a frame: Spark plans its read once. A read with named columns, or a small one, is silent."""
    for part_bytes, options, said in ((1000, {}, 1), (1000, {"columns": "queueId,body"}, 0), (10_000, {}, 0)):
        monkeypatch.setattr(planner, "PARTITION_BYTES", part_bytes)
        source = RocketMQDataSource({"path": str(folder), **options})
        caplog.clear()
        source.reader(source.schema()).partitions()
        assert [record.name for record in caplog.records if "columns=queueId" in record.getMessage()] == (
            ["librmq.spark"] * said
        )


def test_spark_reads_other_queries_with_a_condition_that_a_source_took() -> None:
    """Spark 4.3 loses rows, so librmq takes none. Where this fails, ``tags =`` and ``IN`` can be taken."""

    class Taking(DataSourceReader):
        taken = False

        def pushFilters(self, filters: list[Any]) -> Any:  # noqa: N802
            self.taken = True
            return filters

        def partitions(self) -> Any:
            return [InputPartition(self.taken)]

        def read(self, partition: Any) -> Any:
            return iter([("one",)] if partition.value else [("one",), ("two",)])

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "taking"

        def schema(self) -> str:
            return "tags string"

        def reader(self, schema: Any) -> Any:
            return Taking()

    spark = shared_session()
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        spark.dataSource.register(Source)
        frame = spark.read.format("taking").load()
        assert (frame.where("tags = 'one'").count(), frame.count()) == (1, 1)  # of 2 rows
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_messages_without_internal_topics(folder: Path) -> None:
    frame = read(folder)
    assert numbers(frame) == PLAIN
    assert SystemTopic.SCHEDULE not in {row[0] for row in frame.select("topic").distinct().collect()}
    assert len(numbers(read(folder, topic=SystemTopic.SCHEDULE))) == COUNT - len(PLAIN)
    assert read(folder, view="log").count() == COUNT


def test_partitions_share_the_log(folder: Path) -> None:
    frame = read(folder, minPartitions="4")
    assert frame.rdd.getNumPartitions() == 4
    assert numbers(frame) == PLAIN
    sizes = frame.rdd.glom().map(len).collect()
    assert max(sizes) < 2 * min(sizes)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"topic": "Refunds"}, [n for n in PLAIN if n % 3 == 0]),
        ({"topicPattern": "Ref.*|%DLQ%.*"}, [n for n in PLAIN if n % 3 == 0]),
        ({"topic": "Orders,Refunds", "queueId": "1"}, [n for n in PLAIN if n // 3 % 2]),
        ({"tags": "vip"}, [n for n in PLAIN if n % 2 == 0]),
        ({"tags": "vip || plain"}, PLAIN),
        ({"selector": "amount > 50 AND region = 'eu'"}, [n for n in PLAIN if n > 50 and n % 2 == 0]),
        ({"sql": "amount BETWEEN 5 AND 7", "tags": "plain"}, [5, 7]),
        ({"startingTimestamp": str(START_MS + 101_000)}, [n for n in PLAIN if n >= 100]),
        ({"since": "2023-11-14T22:15:01+00:00", "UNTIL": "2023-11-14T22:15:03Z"}, [n for n in PLAIN if 100 <= n < 102]),
        ({"topics": "Ord*,Refunds", "queue": "1", "fail_on_data_loss": "false"}, [n for n in PLAIN if n // 3 % 2]),
        ({"endingTimestamp": str(START_MS + 11_000)}, [n for n in PLAIN if n < 10]),
        ({"at": "2023-11-14T22:14:10.500+00:00"}, [n for n in PLAIN if n < 50]),
        ({"at": "0"}, []),
    ],
)
def test_options_choose(folder: Path, options: dict[str, str], wanted: list[int]) -> None:
    both = read(folder, **options).union(
        read(folder, view="log", **options).where(f"topic != '{SystemTopic.SCHEDULE}'")
    )
    assert numbers(both) == sorted(wanted * 2)


def test_offsets_of_queues(folder: Path) -> None:
    starting = json.dumps({"Refunds": {"0": 3, "1": -1}})
    ending = json.dumps({"Refunds": {"0": 5}})
    frame = read(folder, "queueId int, queueOffset bigint", topic="Refunds", startingOffsets=starting,
                 endingOffsets=ending)  # fmt: skip
    assert sorted(map(tuple, frame.collect())) == [(0, 3), (0, 4)]


def test_a_schema_is_the_projection(folder: Path) -> None:
    frame = read(folder, "tags string, queueOffset bigint, store string", topic="Refunds")
    assert frame.columns == ["tags", "queueOffset", "store"]
    assert {row.store for row in frame.collect()} == {str(folder)}


def test_the_option_columns_is_the_projection(folder: Path) -> None:
    frame = read(folder, columns="queueOffset, tags", topic="Refunds")
    assert frame.columns == ["queueOffset", "tags"]
    assert {row.tags for row in frame.collect()} == {"vip", "plain"}
    assert read(folder, columns="queueId", view="queues").columns == ["queueId"]
    of_kafka = read(folder, columns="offset,key,tags", names="kafka", topic="Refunds")
    assert of_kafka.schema.simpleString() == "struct<offset:bigint,key:binary,tags:string>"
    assert of_kafka.count() == frame.count()


def test_a_message_carries_the_headers_of_kafka(folder: Path, tmp_path: Path) -> None:
    """They are the user's properties, and a write takes them as such."""
    frame = read(folder, names="kafka", includeHeaders="true", topic="Refunds")
    assert frame.columns == ["key", "value", "topic", "partition", "offset", "timestamp", "headers"]
    of_body = {bytes(row["value"]): row["headers"] for row in frame.collect()}
    assert [(header["key"], bytes(header["value"])) for header in of_body[b"body 6"]] == [
        ("amount", b"6"),
        ("region", b"eu"),
    ]
    with MessageStore.open(tmp_path / "copy"):
        pass
    rows = frame.drop("offset")
    rows.write.format("rocketmq").mode("append").options(names="kafka").save(str(tmp_path / "copy"))
    assert read(tmp_path / "copy", selector="amount = 6 AND region = 'eu'").count() == 1
    assert read(tmp_path / "copy", names="kafka", columns="headers").where("headers IS NULL").count() == 0


def test_several_stores_and_globs(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "s1")
    clock = ManualClock(START_MS + 1)
    with MessageStore.open(
        tmp_path / "s2", StoreConfig.tiny(commitlog_file_size=16384, max_message_size=8192), clock=clock
    ) as s:
        fill(s, clock)
    for path in ([str(tmp_path / "s1"), str(tmp_path / "s2")], tmp_path / "s?"):
        counts = {row["store"]: row["count"] for row in read(path).groupBy("store").count().collect()}
        assert counts == {str(tmp_path / "s1"): len(PLAIN), str(tmp_path / "s2"): len(PLAIN)}


def test_no_body_is_decoded_that_no_column_asks_for(folder: Path, tmp_path: Path) -> None:
    """Each record says that its body is compressed, which it is not: a read that decodes one fails."""
    path = tmp_path / "store"
    shutil.copytree(folder, path)
    with MessageStore.open(path, read_only=True) as store:
        places = [divmod(message.physical_offset, 16384) for message in store]
    for number, at in places:
        with (path / "commitlog" / f"{number * 16384:020}").open("r+b") as log:
            log.seek(at + SYS_FLAG_AT + 3)
            log.write(bytes([COMPRESSED]))
    with pytest.raises(PySparkException, match=r"\[RMQ_DAMAGED\] "):
        read(path).count()
    assert read(path, columns="queueId").count() == len(PLAIN)
    assert read(path, columns="body,keys", view="log", sql="amount < 0").count() == 0
    keys = read(path, columns="keys", tags="vip").union(read(path, "keys string", tags="plain")).collect()
    assert sorted(int(row[0][1:]) for row in keys) == PLAIN


@pytest.mark.parametrize(
    ("options", "schema", "text"),
    [
        ({"topicz": "x"}, None, "did you mean topic"),
        ({"view": "message"}, None, "did you mean messages"),
        ({"selector": "a >< 5"}, None, "^"),
        ({"mode": "fast"}, None, "FAILFAST"),
        ({"startingOffsets": "{]"}, None, "earliest, latest"),
        ({"startingOffsets": '{"Nowhere": {"0": 5}}'}, None, "has no queue 0 of topic 'Nowhere'"),
        ({"topic": "Refunds", "queue": "1", "startingOffsets": '{"Refunds": {"0": 5}}'}, None, "mean Refunds:1?"),
        ({"startingOffsets": '{"Orders": {"0": 100000}}'}, None, "[RMQ_DATA_LOSS] "),
        ({"minPartitions": "0"}, None, "at least 1"),
        ({"names": "kafka"}, "key string", "expected type binary, found string"),
        ({"columns": "tag"}, None, "[RMQ_BAD_OPTION] the view messages has no column 'tag': did you mean tags"),
        ({"columns": "tags,tags"}, None, "'tags' is named twice"),
        ({"columns": "tags"}, "keys string", "option columns: the schema of the read has others (keys)"),
        ({"includeHeaders": "true"}, None, "option includeHeaders: it is for names=kafka"),
        ({"names": "kafka", "view": "log"}, None, "names are for the views messages and all"),
        ({"startingOffsetsByTimestamp": '{"Orders": {"0": -1}}'}, None, "JSON of milliseconds"),
        ({"startingOffsets": "latest", "startingOffsetsByTimestamp": "{}"}, None, "found both"),
        ({}, "tag string", "did you mean tags"),
        ({}, "queueId string", "expected type int, found string"),
        ({}, "topic string not null, tags string not null", "column 'tags': rows can lack it: leave NOT NULL"),
        ({"names": "kafka"}, "key binary not null", "column 'key': rows can lack it"),
        ({"mode": "PERMISSIVE"}, "topic string not null", "column 'topic': rows can lack it"),
        ({"view": "progress"}, "expression string not null", "column 'expression': rows can lack it"),
        ({"view": "queues"}, "body binary", "no column 'body'"),
        ({"at": "99999999"}, None, "at: expected a physical offset from 0 to"),
    ],
)
def test_errors_are_raised_on_the_driver(folder: Path, options: dict[str, str], schema: str | None, text: str) -> None:
    with pytest.raises(PySparkException) as told:
        read(folder, schema, **options).rdd.getNumPartitions()
    assert text in str(told.value)
    assert re.match(r"\[RMQ_(BAD_OPTION|DATA_LOSS)\] ", cause_of(told.value) or "")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"maxOffsetsPerTrigger": "5"}, "option maxOffsetsPerTrigger: only a stream has it"),
        ({"maxtriggerdelay": "5s"}, "option maxTriggerDelay: only a stream has it"),
        ({"storageOptions": "{}"}, "option storageOptions: it is for URLs such as s3://bucket/store; remove it for /"),
        ({"startingOffsets": '{"Orders": {"00": 5}}'}, "option startingOffsets: expected earliest, latest, or JSON"),
        ({"view": "log", "startingOffsets": "latest"}, "the view log is not read by queue"),
        ({"view": "log", "endingOffsetsByTimestamp": "{}"}, "the view log is not read by queue"),
        ({"topic": " , "}, "option topic: expected one or several"),
        ({"queueId": "4294967296"}, "option queue: expected at most 2147483647"),
        ({"jobId": "j"}, "unknown option 'jobId' for reading"),
        ({"startingTimestamp": "9", "endingTimestamp": "5"}, "option since: expected a time before 5"),
        ({"since": "2023-11-14T22:14:10"}, "option since: expected milliseconds since 1970, or a time with a zone"),
        ({"since": "5", "startingTimestamp": "5"}, "options since and startingTimestamp: expected only one of them"),
        ({"Queue": "1", "queueId": "1"}, "options Queue and queueId: expected only one of them"),
        ({"offsets": "5"}, "option offsets is one of librmq.columns; .* the options startingOffsets and endingOffsets"),
        ({"filter": "queueId = 1"}, "option filter is one of librmq.columns; .* give the condition to the query"),
        ({"pushFilters": "true"}, "unknown option 'pushFilters' for format"),
        ({"at": "2023-11-14T22:14:10"}, "option at: expected a time with a zone such as"),
        ({"at": "-5"}, "option at: expected a time with a zone such as"),
    ],
)
def test_no_option_of_a_read_is_ignored(folder: Path, options: dict[str, str], text: str) -> None:
    from librmq.spark._source import RocketMQDataSource, schema_of

    with pytest.raises(ConfigError, match=text):
        RocketMQDataSource({"path": str(folder), **options}).reader(schema_of(["topic"]))
    with pytest.raises(ConfigError, match="column 'topic' is named twice"):
        RocketMQDataSource({"path": str(folder)}).reader(schema_of(["topic", "topic"]))


def test_an_option_of_kafka_is_refused_with_what_to_use() -> None:
    for name, text in (
        ("subscribe", "one of Kafka's; for reading rocketmq the option topic"),
        ("subscribePattern", "the option topicPattern"),
        ("kafka.bootstrap.servers", "the option path"),
        ("kafka.security.protocol", "one of Kafka's clients"),
    ):
        with pytest.raises(ConfigError, match=f"option {name} is .*{text}"):
            parse_read_options({"path": "/s", name: "x"})
        with pytest.raises(ConfigError, match=f"option {name} is one of Kafka's"):
            WriteOptions.from_options({"path": "/s", name: "x"})


def test_an_error_about_offsets_names_the_option(folder: Path) -> None:
    """The option that the user wrote is named, in batches and in streams."""
    from librmq.spark._source import RocketMQDataSource, schema_of

    for option in ("startingOffsets", "endingOffsets", "startingOffsetsByTimestamp", "endingOffsetsByTimestamp"):
        source = RocketMQDataSource({"path": str(folder), option: '{"Orders": {"7": 1}}'})
        with pytest.raises(ConfigError, match=rf"option {option}: .* has no queue 7 of topic 'Orders'"):
            source.reader(schema_of(["topic"])).partitions()
        if option.startswith("starting"):
            with pytest.raises(ConfigError, match=f"option {option}: .* has no queue 7 of topic 'Orders'"):
                source.streamReader(schema_of(["topic"])).initialOffset()


@pytest.mark.parametrize(
    ("starting", "ending", "text"),
    [
        ({"Offsets": '{"Orders": {"0": 9}}'}, {"Offsets": '{"Orders": {"0": 5}}'}, "found 9 and 5"),
        ({"Offsets": "latest"}, {"Offsets": '{"Orders": {"0": 5}}'}, "found 90 and 5"),
        ({"Offsets": '{"Orders": {"0": 9}}'}, {"Offsets": "earliest"}, "found 9 and 0"),
        (
            {"OffsetsByTimestamp": '{"Orders": {"0": 4000000000002}}'},
            {"OffsetsByTimestamp": '{"Orders": {"0": 4000000000001}}'},
            "found 4000000000002 and 4000000000001",
        ),
        ({"Offsets": '{"Orders": {"0": 9}}'}, {"OffsetsByTimestamp": '{"Orders": {"0": 1}}'}, "found 9 and 0"),
    ],
)
def test_a_begin_after_the_end_is_refused(
    folder: Path, starting: dict[str, str], ending: dict[str, str], text: str
) -> None:
    from librmq.spark._source import RocketMQDataSource, schema_of

    def planned(*sides: tuple[str, dict[str, str]]) -> list[Any]:
        options = {side + name: value for side, given in sides for name, value in given.items()}
        source = RocketMQDataSource({"path": str(folder), "failOnDataLoss": "false", **options})
        return list(source.reader(schema_of(["topic"])).partitions())

    names = [f"{side}{next(iter(given))}" for side, given in (("starting", starting), ("ending", ending))]
    with pytest.raises(ConfigError, match=f"option {names[0]} and {names[1]}: .*'Orders', queue 0: .*{text}"):
        planned(("starting", starting), ("ending", ending))
    assert planned(("ending", starting), ("starting", ending))  # the same the other way round


def test_queue_entries_are_chosen_by_time(folder: Path) -> None:
    """As in `librmq.columns.reader`: the times of the messages decide, though entries have none."""
    from librmq import columns
    from librmq.spark._source import RocketMQDataSource, schema_of

    given = {"view": "queues", "startingTimestamp": str(START_MS + 100_000), "endingTimestamp": str(START_MS + 200_000)}
    reader = RocketMQDataSource({"path": str(folder), **given}).reader(schema_of(["physicalOffset"]))
    found: list[Any] = [batch for part in reader.partitions() for batch in reader.read(part)]
    settings: Any = {"since": START_MS + 100_000, "until": START_MS + 200_000, "columns": ["physicalOffset"]}
    for view in ("queues", "messages"):
        same = columns.reader(folder, view=view, topic=re.compile(".*"), **settings).read_all()
        places = same["physicalOffset"].to_pylist()
        assert sorted(places) == sorted(place for batch in found for place in batch["physicalOffset"].to_pylist())
    assert len(places) > 90


@pytest.mark.parametrize("path", ["dbfs:/mnt/store", "abfss:store", "hdfs:/store"])
def test_paths_of_other_file_systems_are_refused(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from librmq.errors import ConfigError
    from librmq.spark._options import WriteOptions, parse_read_options

    with pytest.raises(ConfigError, match="expected a path or a URL such as s3://bucket/store"):
        parse_read_options({"path": path})
    with pytest.raises(ConfigError, match="expected a path in a mounted file system"):
        WriteOptions.from_options({"path": path})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run:7").mkdir()
    assert parse_read_options({"path": "run:7"}).paths == (str(tmp_path / "run:7"),)


def test_a_url_is_read_as_the_store_on_the_disk(folder: Path) -> None:
    """Driver and workers fetch what they need of a store behind a URL."""
    from librmq.errors import ConfigError
    from librmq.spark._options import WriteOptions, parse_read_options
    from librmq.spark.stores import paths_of

    pytest.importorskip("fsspec")
    url = f"local://{folder}"
    columns = "store string, topic string, queueId int, queueOffset bigint, body binary"
    options = {"tags": "vip", "minPartitions": "3", "storageOptions": '{"auto_mkdir": false}'}
    found = {tuple(row)[1:] for row in read(url, columns, **options).collect()}
    assert found == {tuple(row)[1:] for row in read(folder, columns, tags="vip").collect()}
    assert {row[0] for row in read(url, columns).select("store").distinct().collect()} == {url}
    with pytest.raises(ConfigError, match="pipelines and the report read only a store in a mounted file system"):
        paths_of(url)
    with pytest.raises(ConfigError, match="expected a path in a mounted file system, found the scheme local"):
        WriteOptions.from_options({"path": url})
    stream = shared_session().readStream.format("rocketmq").options(tags="vip", maxOffsetsPerTrigger="30").load(url)
    query = stream.writeStream.format("memory").queryName("remote").trigger(availableNow=True).start()
    query.awaitTermination()
    assert shared_session().table("remote").count() == len(found)
    with pytest.raises(ConfigError, match="option storageOptions: expected arguments"):
        parse_read_options({"path": url, "storageOptions": "{secret"})


@pytest.mark.skipif(find_spec("s3fs") is not None, reason="s3fs takes the place of PyArrow")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the server's own code
def test_a_store_in_s3(folder: Path) -> None:
    """Hadoop's scheme is read like the usual one, without Hadoop."""
    pytest.importorskip("fsspec")
    columns = "queueId int, queueOffset bigint, body binary"
    wanted = sorted(map(tuple, read(folder, columns, topic="Refunds").collect()))
    with serving(folder, "brokers/a") as keys:
        options = {"topic": "Refunds", "storageOptions": json.dumps(keys)}
        found = read("s3a://bucket/brokers/a", f"{columns}, store string", **options).collect()
    assert sorted(tuple(row)[:3] for row in found) == wanted
    assert {row["store"] for row in found} == {"s3a://bucket/brokers/a"}


def test_progress_of_groups(tmp_path: Path) -> None:
    """A row for each queue, with the filter of the group; and one for a filter without progress."""
    for name in ("a", "b"):
        MessageStore.open(tmp_path / name, StoreConfig.tiny()).close()
        config = tmp_path / name / "config"
        config.mkdir(exist_ok=True)
        (config / "consumerOffset.json").write_text('{"offsetTable":{"Orders@G":{0:7,1:5},"Refunds@H":{0:2}}}')
        registered = {
            group: {"consumerGroup": group, "topic": "Orders", "expression": text, "expressionType": "SQL92"}
            for group, text in (("G", "amount > 5"), ("New", "amount > 9"))
        }
        filters = {"filterDataByTopic": {"Orders": {"topic": "Orders", "groupFilterData": registered}}}
        (config / "consumerFilter.json").write_text(json.dumps(filters))
    rows = [tuple(row) for row in read(tmp_path / "a", view="progress").collect()]
    assert rows == [
        ("G", "Orders", 0, 7, "amount > 5"),
        ("G", "Orders", 1, 5, "amount > 5"),
        ("H", "Refunds", 0, 2, None),
        ("New", "Orders", None, None, "amount > 9"),
    ]
    both = read([str(tmp_path / "a"), str(tmp_path / "b")], view="progress", topic="Orders", queueId="1")
    assert sorted(map(tuple, both.select("store", "group", "offset").collect())) == [
        (str(tmp_path / name), "G", 5) for name in ("a", "b")
    ]
    assert read(tmp_path / "a", "offset bigint", view="progress").where("offset > 5").count() == 1
    for settings, schema, text in (
        ({"tags": "x"}, None, "option tags: the view progress has only topic, topicPattern, queue"),
        ({}, "offsets bigint", "the view progress has no column 'offsets': did you mean offset"),
        ({}, "offset int", "column 'offset': expected type bigint, found int"),
    ):
        with pytest.raises(PySparkException, match=re.escape(text)):
            read(tmp_path / "a", schema, view="progress", **settings).count()


def test_the_names_of_kafka(folder: Path) -> None:
    frame = read(folder, names="kafka", topic="Refunds")
    assert frame.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp>"
    )
    plain = {row["queueOffset"]: row for row in read(folder, topic="Refunds", queueId="1").collect()}
    found = frame.where("partition = 1 and offset >= 4").selectExpr("CAST(key AS STRING) AS key", "*").collect()
    assert {row["offset"] for row in found} == {at for at in plain if at >= 4}
    for key, *row in found:
        same = plain[row[4]]
        assert (key, *row[1:]) == (
            same["keys"],
            same["body"],
            "Refunds",
            1,
            same["queueOffset"],
            same["storeTimestamp"],
        )
    both = read(folder, "value binary, body binary, tags string", names="kafka", topic="Refunds", queueId="1").first()
    assert both["value"] == both["body"]


def test_offsets_by_timestamp(folder: Path) -> None:
    """They bound a batch and begin a stream, each queue at its own time; a queue that is not named is read whole."""
    from librmq.columns.planner import plan
    from librmq.spark._options import StreamLimits, parse_read_options
    from librmq.spark._source import arrow_schema, schema_of
    from librmq.spark._stream import StreamReader

    stored = {(row["topic"], row["queueId"], row["queueOffset"]): row["storeTimestamp"].timestamp() * 1000
              for row in read(folder).collect()}  # fmt: skip
    begin, end = START_MS + 100_000, START_MS + 200_000
    given = {"path": str(folder), "startingOffsetsByTimestamp": json.dumps({"Refunds": {"0": begin, "1": 1 << 45}})}
    later = {
        at for (topic, queue_id, at), time in stored.items() if (topic, queue_id) == ("Refunds", 0) and time >= begin
    }
    options = parse_read_options({**given, "topic": "Refunds"})
    schema = arrow_schema(schema_of(["topic"]), options)
    first = StreamReader(options, StreamLimits(), schema).initialOffset()[str(folder)]["Refunds"]
    assert first["0"] == min(later)
    assert first["1"] == max(at for topic, queue_id, at in stored if (topic, queue_id) == ("Refunds", 1)) + 1
    given["endingOffsetsByTimestamp"] = json.dumps({"Refunds": {"0": end}})
    slices = [one for part in plan(parse_read_options({**given, "topic": "Refunds"})) for one in part.slices]
    found = {at for one in slices for at in range(one.begin, one.end) if one.queue_id == 0}
    assert found == {at for at in later if stored["Refunds", 0, at] < end}
    assert not [one for one in slices if one.queue_id == 1]


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(PySparkException, match=r"\[RMQ_ERROR\] .*no store"):
        read(tmp_path).count()


def test_an_error_of_a_file_has_a_condition(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    source = RocketMQDataSource({"path": str(tmp_path / "file" / "store"), "topic": "T"})
    with pytest.raises(StoreIOError, match=r"^\[RMQ_ERROR\] .*/file/store"):
        source.writer(StructType([StructField("body", BinaryType())]), False)


def test_damage(folder: Path, tmp_path: Path) -> None:
    """A record keeps its frame but gets another one's body, in a file that opening does not check."""
    path = tmp_path / "damaged"
    shutil.copytree(folder, path)
    with MessageStore.open(path, read_only=True) as store:
        messages = [message for message in store if message.topic == "Orders"]
    frame, body = messages[2], messages[5]
    with (path / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(frame.physical_offset + 84)
        file.write(b"\x7f")
        file.seek(body.physical_offset + 89)
        file.write(b"!")
    for view in ("messages", "log"):
        with pytest.raises(PySparkException, match=rf"\[RMQ_DAMAGED\] .*{0:020d}: at {frame.physical_offset}: "):
            read(path, view=view).collect()
        rows = read(path, view=view, mode="PERMISSIVE").where("_corrupt_record is not null").collect()
        assert sorted(row["physicalOffset"] for row in rows) == [frame.physical_offset, body.physical_offset]
        assert any("body checksum" in row["_corrupt_record"] for row in rows)
        assert all(row["body"] is None for row in rows)
        good = numbers(read(path, view=view, mode="DROPMALFORMED").where(f"topic != '{SystemTopic.SCHEDULE}'"))
        assert len(good) == len(PLAIN) - 2
    assert len(numbers(read(path, mode="PERMISSIVE", checksums="false").where("_corrupt_record is null"))) == (
        len(PLAIN) - 1
    )


def test_a_frame_is_used_with_several_conditions(folder: Path) -> None:
    """A session that pushes conditions keeps one reader of a frame for all of its scans, so the source takes none."""
    spark, pushing = shared_session(), "spark.sql.python.filterPushdown.enabled"
    before = spark.conf.get(pushing)
    spark.conf.set(pushing, "true")
    try:
        frame = spark.read.format("rocketmq").load(str(folder))
        one, other = frame.where("topic = 'Orders' AND queueId = 0"), frame.where("topic = 'Refunds'")
        plan = one._jdf.queryExecution().executedPlan().toString()
        assert re.search(r"Filter .*topic#\d+ = Orders.*\n.*BatchScan rocketmq(?!.*Pushed)", plan), plan
        counts = [one.count(), other.count(), frame.count()]
        assert one.union(other).count() == counts[0] + counts[1]
        assert [one.count(), other.count(), frame.count()] == counts
        wanted: list[dict[str, str]] = [{"topic": "Orders", "queue": "0"}, {"topic": "Refunds"}, {}]
        assert counts == [len(numbers(read(folder, **options))) for options in wanted]
    finally:
        spark.conf.set(pushing, before)


def test_an_idle_topic_whose_messages_expired(tmp_path: Path) -> None:
    """Its last queue file outlives its messages, so earliest is where the log begins, for batches and streams."""
    path, clock = tmp_path / "store", ManualClock(START_MS)
    config = StoreConfig.tiny(commitlog_file_size=16384, max_message_size=8192)
    with MessageStore.open(path, config, clock=clock) as store:
        for number in range(3):
            store.append(Message("Quiet", b"body %d" % number))
        fill(store, clock, 400)
        store.append(Message("Late", b"body 7"))
    (path / "commitlog" / f"{0:020}").unlink()
    (path / "librmq" / "closed.json").unlink()  # as if a broker had deleted it: librmq would note the new begin
    with MessageStore.open(path, read_only=True) as store:
        there = [message for message in store if message.topic != SystemTopic.SCHEDULE]
    assert "Quiet" not in {message.topic for message in there}
    wanted = sorted(int(message.body.split()[1]) for message in there)
    assert numbers(read(path)) == wanted
    assert read(path, topic="Quiet", view="queues").count() == 0
    with pytest.raises(PySparkException, match=r"queue 0: expected offsets 0 to 3, found 3 to 3"):
        read(path, startingOffsets=json.dumps({"Quiet": {"0": 0}})).count()
    stream = shared_session().readStream.format("rocketmq").load(str(path))
    query = (
        stream.writeStream.format("parquet").option("path", str(tmp_path / "out"))
        .option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()
    assert numbers(shared_session().read.parquet(str(tmp_path / "out"))) == wanted


def test_a_table_of_the_catalog(folder: Path) -> None:
    spark = shared_session()
    options = f"path '{folder}', topic 'Refunds'"
    spark.sql(f"CREATE TABLE refunds USING rocketmq OPTIONS ({options}) TBLPROPERTIES ('owner.team' = 'x')")
    spark.sql(f"CREATE TABLE columns_given (body binary) USING rocketmq OPTIONS ({options})")
    try:
        assert numbers(spark.table("refunds")) == [n for n in PLAIN if n % 3 == 0]
        assert spark.sql("SELECT count(*) FROM refunds WHERE tags = 'vip'").first()[0] == sum(
            n % 3 == 0 and n % 2 == 0 for n in PLAIN
        )
        with pytest.raises(PySparkException, match="without columns"):
            spark.table("columns_given").count()
        with pytest.raises(PySparkException, match="did you mean topic"):
            spark.sql(f"CREATE TABLE wrong USING rocketmq OPTIONS (path '{folder}', topicz 'x')")
        spark.sql(f"CREATE TEMPORARY VIEW some USING rocketmq OPTIONS ({options}, selector 'amount > 50')")
        wanted = numbers(read(folder, topic="Refunds", selector="amount > 50"))
        assert numbers(spark.table("some")) == wanted != []
        with pytest.raises(PySparkException, match="expected"):
            spark.sql(f"CREATE TEMPORARY VIEW wrong USING rocketmq OPTIONS ({options}, selector 'amount > (')")
    finally:
        for name in ("refunds", "columns_given", "wrong"):
            spark.sql(f"DROP TABLE IF EXISTS {name}")
        spark.catalog.dropTempView("some")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"view": "log"}, "a stream reads messages or queues"),
        ({"endingOffsets": '{"Orders": {"0": 3}}'}, "a stream has no end"),
        ({"mode": "fast"}, "FAILFAST"),
        ({"at": "0"}, "option at: a stream continues with what is stored"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "5"}, "found 9 and 5"),
    ],
)
def test_a_stream_names_its_wrong_options(folder: Path, tmp_path: Path, options: dict[str, str], text: str) -> None:
    stream = shared_session().readStream.format("rocketmq").schema("topic string").options(**options)
    query = (
        stream.load(str(folder)).writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    )  # fmt: skip
    with pytest.raises(PySparkException, match=text):
        query.awaitTermination()


def test_times_in_nanoseconds(tmp_path: Path) -> None:
    """They do not come from Parquet by themselves; a store keeps milliseconds of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    spark, setting, path = shared_session(), "spark.sql.legacy.parquet.nanosAsLong", str(tmp_path / "store")
    times = pa.array([START_MS * 1_000_000 + 123_456_789], pa.timestamp("ns", "UTC"))
    pq.write_table(pa.table({"topic": ["T"], "body": [b"x"], "t": times}), tmp_path / "rows.parquet")
    with pytest.raises(PySparkException, match="PARQUET_TYPE_ILLEGAL"):
        spark.read.parquet(str(tmp_path / "rows.parquet"))
    spark.conf.set(setting, "true")
    try:
        rows = spark.read.parquet(str(tmp_path / "rows.parquet")).selectExpr(
            "topic", "body", "timestamp_micros(t div 1000) AS bornTimestamp"
        )
        rows.write.format("rocketmq").mode("append").save(path)
    finally:
        spark.conf.unset(setting)
    assert read(path, columns="bornTimestamp").selectExpr("unix_millis(bornTimestamp)").first()[0] == START_MS + 123


def test_a_store_that_is_being_written(tmp_path: Path) -> None:
    """Every acknowledged message is read, even if no file has its queue entry yet."""
    clock = ManualClock(START_MS)
    with MessageStore.open(tmp_path / "live", StoreConfig.tiny(), clock=clock) as store:
        fill(store, clock, 95)
        assert len(numbers(read(tmp_path / "live"))) == len([n for n in range(95) if n % 10])
        fill(store, clock, 7, first=95)
        assert len(numbers(read(tmp_path / "live", minPartitions="3"))) == len([n for n in range(102) if n % 10])
        store.abandon()
    assert len(numbers(read(tmp_path / "live"))) == len([n for n in range(102) if n % 10])


def test_parts_are_read_without_a_session(folder: Path, tmp_path: Path) -> None:
    """Only tasks report it: a damaged entry with its file, an entry of a deleted file as lost data."""
    from librmq.columns._read import Reading
    from librmq.columns.decoding import default_columns
    from librmq.columns.options import DataLossError, Part, Slice
    from librmq.consumequeue_entries import ENTRY
    from librmq.errors import CorruptionError, NotAStoreError
    from librmq.spark._options import parse_read_options
    from librmq.spark._source import arrow_schema, schema_of

    def rows(entry: bytes, path: Path = folder, **options: str) -> list[dict[str, Any]]:
        read_options = parse_read_options({"path": str(path), **options})
        schema = arrow_schema(schema_of(default_columns(read_options)), read_options)
        part = Part(str(path), 16384, 4000, (Slice("Orders", 1, 7, 8, 7, entry),))
        return [row for batch in Reading(read_options, schema).read(part) for row in batch.to_pylist()]

    bad, nowhere = ENTRY.pack(-5, 100, 0), ENTRY.pack(1 << 40, 100, 0)
    with pytest.raises(CorruptionError, match=r"consumequeue/Orders/1/0{20}: at 140: queue offset 7"):
        rows(bad)
    (row,) = rows(bad, mode="PERMISSIVE")
    assert (row["topic"], row["queueId"], row["queueOffset"], row["body"]) == ("Orders", 1, 7, None)
    assert rows(bad, mode="DROPMALFORMED") == []
    with pytest.raises(CorruptionError, match="at 140: queue offset 7: found physical offset 1099511627776"):
        rows(nowhere, failOnDataLoss="false")
    shutil.copytree(folder, tmp_path / "cut")
    (tmp_path / "cut" / "commitlog" / f"{0:020d}").unlink()
    with pytest.raises(DataLossError, match=f"commitlog/{0:020d} was deleted"):
        rows(ENTRY.pack(0, 100, 0), tmp_path / "cut")
    assert rows(ENTRY.pack(0, 100, 0), tmp_path / "cut", failOnDataLoss="false") == []
    with pytest.raises(CorruptionError, match="expected a record of 100 bytes"):
        rows(ENTRY.pack(0, 100, 0))
    elsewhere = Part(f"{folder}-elsewhere", 16384, 4000, (Slice("Orders", 1, 7, 8, 7, nowhere),))
    options = parse_read_options({"path": str(folder)})
    schema = arrow_schema(schema_of(default_columns(options)), options)
    with pytest.raises(NotAStoreError, match="this worker does not"):
        list(Reading(options, schema).read(elsewhere))


def test_a_reader_needs_no_pandas(folder: Path) -> None:
    """Loading pandas takes longer than reading a part."""
    code = f"""
import sys
from librmq.spark._options import parse_read_options
from librmq.columns._read import Reading
from librmq.columns.decoding import default_columns
from librmq.columns.planner import plan
from librmq.spark._source import arrow_schema, schema_of
for given in ({{}}, {{"view": "log"}}, {{"view": "queues"}}, {{"tags": "vip"}}, {{"selector": "amount < 9"}}):
    options = parse_read_options({{"path": {str(folder)!r}, **given}})
    schema = arrow_schema(schema_of(default_columns(options)), options)
    parts = plan(options)
    assert sum(batch.num_rows for part in parts for batch in Reading(options, schema).read(part)), given
    assert "pandas" not in sys.modules or "selector" in given, given
"""
    done = run_program(code)
    assert not done.returncode, done.stderr


def test_another_thread_gets_the_running_session_as_it_is(tmp_path: Path) -> None:
    """It is active there, so that Spark finds the source of a write."""
    from librmq.spark import session

    def write() -> Any:
        running = session()
        rows = running.range(3).selectExpr("CAST(id AS STRING) AS body")
        rows.write.format("rocketmq").mode("append").option("topic", "T").save(str(tmp_path / "store"))
        return running

    spark, zone = shared_session(), "spark.sql.session.timeZone"
    before = spark.conf.get(zone)
    python = os.environ["PYSPARK_PYTHON"]
    spark.conf.set(zone, "Europe/Paris")
    try:
        with ThreadPoolExecutor(1) as thread:
            other = thread.submit(write).result()
        assert other.conf.get(zone) == spark.conf.get(zone) == "Europe/Paris"
        assert os.environ["PYSPARK_PYTHON"] == python
        assert read(tmp_path / "store").count() == 3
    finally:
        spark.conf.set(zone, before)
