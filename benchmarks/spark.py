"""Cost of Spark: decoding in process, reading, filtering in the reader, pipelines, writing, and memory.

A store of a million messages over 16 queues, bodies of 512 bytes, unique id, one key, tag, two user properties; for
processor time four million with bodies of 256 bytes. Peers do equal work by other means: Python data sources that yield
prepared numpy columns, tuples, or Arrow made by a Python loop; and Parquet with the same rows.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from benchmarks.frame import Bench, Case, Part, Run, Target, Timed, from_setup, last_line, main
from librmq import ManualClock, Message, MessageStore, StoreConfig
from librmq.files.rolling import file_name
from librmq.filter._registrations import Registrations
from librmq.message import record as record_format
from librmq.message.properties import decode_properties, encode_properties, tags_code
from librmq.store.format.broker_tables import BrokerTables

MESSAGES: Final = 1_000_000
LARGE: Final = 4_000_000
"""Messages of the store for processor time, with bodies of 256 bytes: what starting a task costs is a small part."""
QUEUES: Final = 16
ROWS: Final = 8192
"""Rows of a batch."""
TAGS: Final = ["one" if not number % 100 else "ten" if not number % 10 else "rest" for number in range(ROWS)]
TASKS: Final = 8
START_MS: Final = 1_700_000_000_000
CONFIG: Final = StoreConfig(commitlog_file_size=256 << 20, max_hash_slot_num=500_000, max_index_num=2_000_000)
HEADER: Final = ("queueId", "queueOffset", "physicalOffset", "storeTimestamp", "bornTimestamp", "reconsumeTimes")
HEADER_TYPES: Final = (
    "queueId int, queueOffset bigint, physicalOffset bigint, storeTimestamp timestamp, bornTimestamp timestamp, "
    "reconsumeTimes int"
)
ENTRIES: Final = "queueId int, queueOffset bigint, physicalOffset bigint, size int, tagsCode bigint"
WHOLE: Final = (
    "topic string, queueId int, queueOffset bigint, physicalOffset bigint, bornTimestamp timestamp, "
    "storeTimestamp timestamp, tags string, keys string, uniqueKey string, properties map<string,string>, "
    "body binary, reconsumeTimes int, sysFlag int"
)
NEEDS: Final = ("pyspark", "pyarrow")
_folders: list[tempfile.TemporaryDirectory[str]] = []


def repeated(count: int, rows: int) -> int:
    """Return the rows of a source whose tasks repeat a batch of ``rows`` until they have ``count`` together."""
    return TASKS * (count // TASKS // rows + 1) * rows


@cache
def of_frame(run: Callable[..., Timed], name: str) -> Run:
    """Return the run of a frame with this name, the same one for all cases that compare it."""
    return partial(run, name=name)


@cache
def store_of(count: int, body_bytes: int = 512) -> str:
    """Make a store with this many messages, once."""
    _folders.append(tempfile.TemporaryDirectory(prefix="librmq-benchmark-store-"))
    path, clock = os.path.join(_folders[-1].name, "store"), ManualClock(START_MS)
    with MessageStore.open(path, CONFIG, clock=clock, background=False) as store:
        for number in range(count):
            if not number % 1000:
                clock.advance(ms=1)
            tag = "one" if number % 100 == 0 else "ten" if number % 10 == 0 else "rest"
            message = Message(
                "Orders", b"%0*d" % (body_bytes, number), tags=tag, keys=f"key{number:08d}",
                unique_key=f"{number:032X}", properties=properties_of(number),
            )  # fmt: skip
            store.append(message, number % QUEUES)
    return path


def properties_of(number: int) -> dict[str, str]:
    return {"amount": str(number % 1000), "region": ("eu", "us", "cn", "jp")[number % 4]}


# ----------------------------------------------------------------------------------------------------------- in process


def raw_log(path: str) -> tuple[Any, Any]:
    """Return the first file of a log, and the places of its records."""
    file = np.asarray(np.memmap(os.path.join(path, "commitlog", file_name(0)), np.uint8, "r"))
    places, at, unpack = list[int](), 0, struct.Struct(">II").unpack_from
    while at + 8 < len(file):
        size, magic = unpack(file.data, at)
        if magic != record_format.MESSAGE_MAGIC:
            break
        places.append(at)
        at += size
    return file, np.array(places, np.int64)


def log(bench: Bench, body_bytes: int = 512) -> Iterator[tuple[Any, Any]]:
    """Yield the same of the benchmark's store, at most 200,000 records."""
    raw, places = raw_log(store_of(bench.count(MESSAGES), body_bytes))
    yield raw, places[:200_000]


def decode(given: tuple[Any, Any], _: Path, *, columns: Sequence[str]) -> Timed:
    """Decode columns of records whose places are known."""
    from librmq.columns.decoding import FIELDS, FIXED_COLUMNS, Block

    raw, places = given
    frames, fields = not set(columns) <= FIXED_COLUMNS, [FIELDS[name] for name in columns if name in FIELDS]
    yield
    for at in range(0, len(places), ROWS):
        block = Block(raw, places[at : at + ROWS], frames=frames, fields=fields)
        for name in columns:
            block.column(name)
    yield len(places)


def decode_loop(given: tuple[Any, Any], _: Path, *, row: Callable[[Any, int], object]) -> Timed:
    raw, places = given
    view = raw.data
    yield
    for place in places.tolist():
        row(view, place)
    yield len(places)


def moment(timestamp_ms: int) -> datetime:
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC)


_header = record_format.header_struct().unpack_from


def header_row(view: Any, place: int) -> object:
    _, _, _, queue_id, _, queue_offset, at, _, born, _, stored, _, reconsumed, _, _ = _header(view, place)
    return queue_id, queue_offset, at, moment(stored), moment(born), reconsumed


def tags_row(view: Any, place: int) -> object:
    _, _, _, _, at, end = record_format.frame(view, place, len(view))
    properties = decode_properties(bytes(view[at:end]))
    return properties.get("TAGS"), properties.get("KEYS")


def whole_row(view: Any, place: int = 0) -> tuple[Any, ...]:
    record = record_format.decode_record(view, place, check_body=False)
    properties = decode_properties(record.properties_raw)
    return (
        record.topic, record.queue_id, record.queue_offset, record.physical_offset, moment(record.born_timestamp_ms),
        moment(record.store_timestamp_ms), properties.get("TAGS"), properties.get("KEYS"), properties.get("UNIQ_KEY"),
        properties, record.body, record.reconsume_times, record.sys_flag,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- reading


def started() -> Any:
    from librmq.spark import register, session

    spark = session("librmq benchmark", "local[2]", {"spark.sql.shuffle.partitions": "2"})
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    return spark


def names(types: str) -> list[str]:
    return [column.split()[0] for column in types.split(", ")]


def sources(path: str, count: int, slow: int) -> list[Any]:  # noqa: C901 (a peer each)
    """Return Python data sources that do equal work by other means; ``slow`` is the rows of those with loops."""
    import pyarrow as pa
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    def same(batch: Any) -> Iterator[Any]:
        for _ in range(repeated(count, batch.num_rows) // TASKS // batch.num_rows):
            yield batch

    def numpy_columns(rows: int, types: str) -> Any:
        at = np.arange(rows, dtype=np.int64)
        casts = {"int": pa.int32(), "bigint": pa.int64(), "timestamp": pa.timestamp("us", "UTC")}
        arrays = [pa.array(at).cast(casts[column.split()[1]]) for column in types.split(", ")]
        return pa.RecordBatch.from_arrays(arrays, names(types))

    def tuples(number: int) -> Iterator[tuple[Any, ...]]:
        with MessageStore.open(path, read_only=True) as store:
            begin = slow // TASKS * number // QUEUES
            for queue_id in range(QUEUES):
                queue = store.queues["Orders", queue_id]
                for at in range(begin, begin + slow // TASKS // QUEUES):
                    entry = queue.entry(at)
                    assert entry is not None
                    yield whole_row(store.log.read(entry.physical_offset, entry.size))

    def arrow(number: int) -> Iterator[Any]:
        from pyspark.sql.pandas.types import to_arrow_schema

        from librmq.spark._source import schema_of

        schema = to_arrow_schema(schema_of(names(WHOLE)), timezone="UTC")
        records = tuples(number)
        while block := list(islice(records, ROWS)):
            columns = zip(*((*row[:9], list(row[9].items()), *row[10:]) for row in block), strict=True)
            arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def source(peer: str, read: Callable[[int], Iterator[Any]], types: str) -> type[DataSource]:
        class Reader(DataSourceReader):
            def partitions(self) -> list[InputPartition]:
                return [InputPartition(number) for number in range(TASKS)]

            def read(self, partition: InputPartition) -> Iterator[Any]:
                return read(partition.value)

        class Source(DataSource):
            @classmethod
            def name(cls) -> str:
                return f"peer_{peer}"

            def schema(self) -> str:
                return types

            def reader(self, schema: Any) -> Any:
                return Reader()

        return Source

    return [
        source("entries", lambda _: same(numpy_columns(65_536, ENTRIES)), ENTRIES),
        source("tags", lambda _: same(pa.RecordBatch.from_pydict({"tags": TAGS})), "tags string"),
        source("header", lambda _: same(numpy_columns(ROWS, HEADER_TYPES)), HEADER_TYPES),
        source("tuples", tuples, WHOLE),
        source("arrow", arrow, WHOLE),
    ]


def add_groups(path: str) -> None:
    """Give a store three groups with progress, and the filters of two."""
    tables, registrations = BrokerTables.open(os.path.join(path, "config")), Registrations()
    for group, expression in (("one", "amount < 100"), ("two", "region IN ('eu', 'us') AND amount > 10"), ("all", "")):
        tables.offsets.set(f"Orders@{group}", dict.fromkeys(range(QUEUES), 1000))
        if expression:
            registrations.register("Orders", group, expression, "SQL92", 1, START_MS)
    tables.set_filters(registrations.to_document(START_MS)["filterDataByTopic"])
    tables.offsets.persist(START_MS)
    tables.filter_table.persist(START_MS)


def frames(bench: Bench) -> Iterator[dict[str, tuple[Any, int]]]:
    """Yield frames of librmq, of the peers and of Parquet, each with its number of rows."""
    from librmq.spark.pipelines import run

    spark, count = started(), bench.count(MESSAGES)
    path, slow = store_of(count), min(count, 100_000)
    add_groups(path)
    for source in sources(path, count, slow):
        spark.dataSource.register(source)

    ours = partial(loaded, spark, path, count, minPartitions=str(TASKS))

    def peer(name: str, rows: int) -> Any:
        return spark.read.format(f"peer_{name}").load(), rows

    with bench.folder() as folder:
        ours()[0].write.option("compression", "none").parquet(str(folder / "parquet"))
        parquet = spark.read.parquet(str(folder / "parquet"))
        keys = parquet.where("queueOffset % 10 = 0").select("keys")
        in_loops = slow // TASKS // QUEUES * QUEUES * TASKS
        yield {
            "entries": ours(ENTRIES, view="queues"),
            "entries peer": peer("entries", repeated(count, 65_536)),
            "header": ours(HEADER_TYPES),
            "header peer": peer("header", repeated(count, ROWS)),
            "whole": ours(),
            "tuples": peer("tuples", in_loops),
            "arrow": peer("arrow", in_loops),
            "parquet": (parquet, count),
            "by tag": (ours(columns="tags")[0].groupBy("tags").count(), count),
            "by tag parquet": (parquet.groupBy("tags").count(), count),
            "by tag peer": (peer("tags", 0)[0].groupBy("tags").count(), repeated(count, ROWS)),
            "rows": (ours(columns="queueId")[0].groupBy().count(), count),
            "rows of entries": (ours(ENTRIES, view="queues")[0].groupBy().count(), count),
            "join": (ours(columns="keys")[0].join(keys, "keys").groupBy().count(), count),
            "join parquet": (parquet.join(keys, "keys").groupBy().count(), count),
            "tag 1 %": ours(tags="one"),
            "tag 10 %": ours(tags="one||ten"),
            "selector 1 %": ours(sql="amount < 10"),
            "selector 10 %": ours(sql="amount < 100"),
            "count": (ours("topic string, queueId int")[0].groupBy("topic", "queueId").count(), count),
            **{name: (run(spark, name, path), count) for name in ("retention", "filters", "skew")},
        }


def loaded(spark: Any, path: str, count: int, schema: str | None = None, **options: str) -> tuple[Any, int]:
    """Return a frame of a store and its number of messages."""
    reader = spark.read.format("rocketmq").options(**options)
    return (reader.schema(schema) if schema else reader).load(path), count


def large_frames(bench: Bench) -> Iterator[dict[str, tuple[Any, int]]]:
    """Yield frames of the large store, planned as by default, of sources that read nothing, and of Parquet."""
    spark, count = started(), bench.count(LARGE)
    path = store_of(count, 256)
    ours = partial(loaded, spark, path, count)
    for source in sources(path, count, 0):
        spark.dataSource.register(source)
    tags, entries = (spark.read.format(f"peer_{name}").load() for name in ("tags", "entries"))
    with bench.folder() as folder:
        ours()[0].write.option("compression", "none").parquet(str(folder / "parquet"))
        parquet = spark.read.parquet(str(folder / "parquet"))
        yield {
            "header": ours(HEADER_TYPES),
            "header parquet": (parquet.select(*HEADER), count),
            "tag 1 %": ours(tags="one"),
            "tag 1 % parquet": (parquet.where("tags = 'one'"), count),
            "by tag": (ours(columns="tags")[0].groupBy("tags").count(), count),
            "by tag parquet": (parquet.groupBy("tags").count(), count),
            "by tag peer": (tags.groupBy("tags").count(), repeated(count, ROWS)),
            "rows of entries": (ours(ENTRIES, view="queues")[0].groupBy().count(), count),
            "rows of parquet": (parquet.groupBy().count(), count),
            "entries peer": (entries.groupBy().count(), repeated(count, 65_536)),
        }


def read_frame(given: dict[str, tuple[Any, int]], _: Path, *, name: str) -> Timed:
    frame, rows = given[name]
    yield
    frame.write.format("noop").mode("overwrite").save()
    yield rows


def write_parquet(given: dict[str, tuple[Any, int]], folder: Path, *, name: str) -> Timed:
    frame, rows = given[name]
    yield
    frame.write.parquet(str(folder / "out"))
    yield rows


# ------------------------------------------------------------------------------------------------------------- writing


def encode_row(row: Any, number: int) -> bytes:
    """Encode a row by the plain encoder."""
    message = Message(
        row["topic"], bytes(row["body"]), tags=row["tags"], keys=row["keys"], unique_key=row["uniqueKey"],
        properties=dict(row["properties"]),
    )  # fmt: skip
    return record_format.encode_record(
        record_format.Record(
            topic=message.topic, queue_id=number % 4, body=message.body, born_timestamp_ms=START_MS,
            body_crc=record_format.body_checksum(message.body),
            properties_raw=encode_properties(message.properties),
        )
    )  # fmt: skip


def stage(folder: str, name: str, table: Any, count: int, data: bytes, lanes: Any) -> Any:
    """Write records and their table into a job's folder, ``count`` times; return what a commit takes."""
    import pyarrow as pa

    from librmq.spark._staged_records import Staged

    with open(os.path.join(folder, f"{name}.log"), "wb") as file:
        for _ in range(count):
            file.write(data)
    with pa.ipc.new_file(os.path.join(folder, f"{name}.arrow"), table.schema) as tables:
        for _ in range(count):
            tables.write_table(table)
    return Staged(name, int(name), table.num_rows * count, tuple(lanes))


def encodable(bench: Bench) -> Iterator[Any]:
    """Yield a batch of rows, the number of its repetitions, and its encoder."""
    import pyarrow as pa

    from librmq.spark._encode import Encoder

    properties = [list(properties_of(number).items()) for number in range(ROWS)]
    batch = pa.RecordBatch.from_pydict(
        {
            "topic": pa.array(["Orders"] * ROWS), "body": pa.array([b"%0512d" % number for number in range(ROWS)]),
            "tags": pa.array(["rest"] * ROWS), "keys": pa.array([f"key{number:08d}" for number in range(ROWS)]),
            "uniqueKey": pa.array([f"{number:032X}" for number in range(ROWS)]),
            "properties": pa.array(properties, pa.map_(pa.string(), pa.string())),
        }
    )  # fmt: skip
    times = max(1, min(bench.count(MESSAGES), 200_000) // ROWS)
    encoder = Encoder(None, None, 4, "127.0.0.1:10911", 4 << 20, 1 << 30)
    encoded = encoder.encode(batch, 0, START_MS)
    offsets = np.searchsorted(encoded.record_of_key, np.arange(ROWS + 1)).astype(np.int32)
    table = pa.table(
        {
            "size": encoded.sizes.astype(np.int32), "lane": encoded.lane, "tagsCode": encoded.tags_code,
            "keys": pa.ListArray.from_arrays(pa.array(offsets), pa.array(encoded.key_hashes)),
        }
    )  # fmt: skip
    yield SimpleNamespace(batch=batch, times=times, encoder=encoder, encoded=encoded, table=table)


def encode(given: Any, _: Path) -> Timed:
    yield
    for number in range(given.times):
        given.encoder.encode(given.batch, number * ROWS, START_MS)
    yield given.times * ROWS


def encode_loop(given: Any, _: Path) -> Timed:
    times = max(1, given.times // 8)
    yield
    for _round in range(times):
        for number, row in enumerate(given.batch.to_pylist()):
            encode_row(row, number)
    yield times * ROWS


def commit_records(given: Any, folder: Path, *, copied: bool) -> Timed:
    """Commit staged records, with queues and index, or only copy and flush their bytes."""
    from librmq.spark._staged_records import run_folder
    from librmq.spark._write import commit

    path = str(folder / "store")
    with MessageStore.open(path, CONFIG, background=False) as store:
        store.append(Message("Orders", b"first"))
    job = run_folder(path, "job", None, 0)
    os.makedirs(job)
    staged = stage(job, "0", given.table, given.times, given.encoded.data, given.encoded.lanes)
    yield
    if copied:
        with open(os.path.join(job, "0.log"), "rb") as source, open(folder / "copy", "wb") as target:
            shutil.copyfileobj(source, target, 8 << 20)
            target.flush()
            os.fdatasync(target.fileno())
    else:
        commit(path, "job", [staged], job, ordered=False, keep_note=False)
    yield given.times * len(given.encoded.data)


def row_writer() -> Any:
    """Return a data source that takes rows one by one, stages the same records by the plain encoder, and commits."""
    import pyarrow as pa
    from pyspark import TaskContext
    from pyspark.sql.datasource import DataSource, DataSourceWriter, WriterCommitMessage

    from librmq.java.lang import index_key_hash
    from librmq.spark._staged_records import run_folder
    from librmq.spark._write import Ready, commit

    class Writer(DataSourceWriter):
        def __init__(self, path: str) -> None:
            self.path, self.folder = path, run_folder(path, "rows", None, 0)
            os.makedirs(self.folder)

        def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
            context = TaskContext.get()
            records, columns = [], []
            for number, row in enumerate(iterator):
                records.append(encode_row(row, number))
                hashes = [index_key_hash(row["topic"], key) for key in (row["uniqueKey"], row["keys"])]
                columns.append((len(records[-1]), number % 4, tags_code(row["tags"]), hashes))
            types = {"size": pa.int32(), "lane": pa.int32(), "tagsCode": pa.int64(), "keys": pa.list_(pa.int64())}
            rows = [dict(zip(types, row, strict=True)) for row in columns]
            table = pa.Table.from_pylist(rows, pa.schema(types.items()))
            task, lanes = (0 if context is None else context.partitionId()), [("Orders", number) for number in range(4)]
            return Ready(stage(self.folder, str(task), table, 1, b"".join(records), lanes), self.folder)

        def commit(self, messages: list[WriterCommitMessage | None]) -> None:
            staged = [message.staged for message in messages if isinstance(message, Ready)]
            commit(self.path, "rows", staged, self.folder, ordered=False, keep_note=False)

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "peer_rows"

        def writer(self, schema: Any, overwrite: bool) -> DataSourceWriter:
            return Writer(self.options["path"])

    return Source


def writable(bench: Bench) -> Iterator[dict[str, tuple[Any, int]]]:
    """Yield cached frames, for librmq and, with a quarter of the rows, for the writer of rows."""
    from pyspark.sql import functions as F  # noqa: N812

    spark, text, count = started(), F.col("id").cast("string"), max(bench.count(400_000), 16)
    spark.dataSource.register(row_writer())
    region = F.element_at(F.array(*map(F.lit, ("eu", "us", "cn", "jp"))), F.pmod("id", F.lit(4)).cast("int") + 1)

    def frame(rows: int) -> Any:
        cached = spark.range(rows, numPartitions=4).select(
            F.lit("Orders").alias("topic"),
            F.lpad(text, 512, "0").cast("binary").alias("body"),
            F.lit("rest").alias("tags"),
            F.concat(F.lit("key"), F.lpad(text, 8, "0")).alias("keys"),
            F.lpad(text, 32, "0").alias("uniqueKey"),
            F.create_map(F.lit("amount"), (F.col("id") % 1000).cast("string"), F.lit("region"), region)
            .alias("properties"),
        ).cache()  # fmt: skip
        cached.count()
        return cached

    yield {"rocketmq": (frame(count), count), "peer_rows": (frame(count // 4), count // 4)}


def write_frame(given: dict[str, tuple[Any, int]], folder: Path, *, source: str) -> Timed:
    frame, rows = given[source]
    path = str(folder / "store")
    MessageStore.open(path, CONFIG, background=False).close()
    yield
    frame.write.format(source).mode("append").save(path)
    yield rows


# -------------------------------------------------------------------------------------------------------------- memory

READER: Final = """
import json, sys
from librmq.spark._options import ReadOptions, ReadSelection
from librmq.columns.planner import plan
from librmq.columns._read import Reading
from librmq.columns.decoding import default_columns
from librmq.spark._source import arrow_schema, schema_of
path = sys.argv[1]
options = ReadOptions((path,), selection=ReadSelection())
def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
schema = arrow_schema(schema_of(default_columns(options)), options)
parts = plan(options)
before, mapped, most = status("RssAnon"), status("RssFile"), [0.0, 0.0]
for part in parts:
    for batch in Reading(options, schema).read(part):
        most = [max(most[0], status("RssAnon") - before), max(most[1], status("RssFile") - mapped)]
print(json.dumps(dict(zip(("own", "mapped"), most))))
"""


def weighed(bench: Bench) -> Iterator[dict[str, float]]:
    """Yield the memory (MiB) of a reader in its own process, in addition to interpreter and libraries."""
    yield json.loads(last_line(READER, store_of(bench.count(MESSAGES))))


READ: Final = [
    ("Spark, reading", "entries", "queue entries (5 columns)", "entries peer", "a source of 5 numpy columns", .75, .95),
    ("Spark, reading", "header", "six header columns", "header peer", "a source of 6 numpy columns", 0.55, 0.70),
    ("Spark, reading", "whole", "whole messages", "tuples", "a source of tuples", 4, 6),
    ("Spark, reading", "whole", "whole messages", "arrow", "a Python loop into Arrow", 3, 4.5),
    ("Spark, reading", "header", "six header columns", "whole", "all thirteen", 2.3, 2.8),
    ("Spark, reading", "whole", "whole messages", "parquet", "Parquet of the same rows", 0.4, 0.5),
    ("Spark, queries", "by tag", "a count by tag", "by tag parquet", "Parquet of the same rows", 0.67, 1),
    ("Spark, queries", "by tag", "a count by tag", "by tag peer", "a source of prepared tags", 0.5, 0.7),
    ("Spark, queries", "rows", "a count", "rows of entries", "a count of queue entries", 0.5, 1),
    ("Spark, queries", "join", "a join on the key", "join parquet", "Parquet of the same rows", 0.33, 0.5),
    ("Spark, filtering in the reader", "tag 1 %", "tag of 1 %", "whole", "unfiltered", 4, 6),
    ("Spark, filtering in the reader", "tag 10 %", "tags of 10 %", "whole", "unfiltered", 2.5, 4),
    ("Spark, filtering in the reader", "selector 1 %", "selector of 1 %", "whole", "unfiltered", 1.7, 2.5),
    ("Spark, filtering in the reader", "selector 10 %", "selector of 10 %", "whole", "unfiltered", 1.5, 2),
    ("Spark, pipelines", "retention", "retention", "count", "a count by queue", 0.5, 0.7),
    ("Spark, pipelines", "filters", "filters", "count", "a count by queue", 0.5, 0.7),
    ("Spark, pipelines", "skew", "skew", "count", "a count by queue", 0.5, 0.9),
]  # fmt: skip


COSTS: Final = [
    (read_frame, "by tag", "a count by tag", "by tag parquet", "Parquet of the same rows", 1.6),
    (read_frame, "by tag", "a count by tag", "by tag peer", "a source of prepared tags", 2),
    (read_frame, "tag 1 %", "the option tags, of 1 %", "tag 1 % parquet", "Parquet of the same rows", 0.5),
    (write_parquet, "header", "six header columns to Parquet", "header parquet", "Parquet of the same rows", 1.5),
    (read_frame, "rows of entries", "a count of queue entries", "rows of parquet", "Parquet of the same rows", 2),
    (read_frame, "rows of entries", "a count of queue entries", "entries peer", "a source of 5 numpy columns", 1.3),
]  # fmt: skip
"""The sources read nothing: what they cost of Parquet is the least that a Python source can cost."""


def cases() -> Iterator[Case]:
    everything = (*HEADER, "topic", "tags", "keys", "uniqueKey", "properties", "body", "sysFlag")
    for detail, columns, row, target in (
        ("six header columns", HEADER, header_row, Target(25, 40)),
        ("tags and keys", ("tags", "keys"), tags_row, Target(8, 12)),
        ("all", everything, whole_row, Target(3.5, 5.5)),
    ):
        yield Case("decoding in process", partial(decode, columns=columns), detail, partial(decode_loop, row=row),
                   "a loop into tuples", target, setup=log, needs=("pyarrow",))  # fmt: skip
    for path, name, detail, other, against, least, reach in READ:
        ours, peer = of_frame(read_frame, name), of_frame(read_frame, other)
        yield Case(path, ours, detail, peer, against, Target(least, reach), "rows/s", frames, needs=NEEDS)
    for run, name, detail, other, against, most in COSTS:
        ours, peer = of_frame(run, name), of_frame(run, other)
        yield Case("Spark, processor time", ours, detail, peer, against, Target(most, at_most=True), "rows/CPU s",
                   large_frames, is_cost=True, cpu=True, needs=NEEDS)  # fmt: skip
    yield Case("Spark, writing", encode, "encoding", encode_loop, "a Python loop", Target(4.5, 7), "rows/s", encodable,
               needs=NEEDS)  # fmt: skip
    yield Case("Spark, writing", partial(commit_records, copied=False), "commit, queues and index done",
               partial(commit_records, copied=True), "a flushed copy of the bytes", Target(0.7, 1.0), "B/s", encodable,
               limit=True, needs=NEEDS)  # fmt: skip
    yield Case("Spark, writing", partial(write_frame, source="rocketmq"), "with Arrow, commit included",
               partial(write_frame, source="peer_rows"), "a writer of rows, the same commit", Target(4, 6.5), "rows/s",
               writable, needs=NEEDS)  # fmt: skip
    for detail, part, target in (
        ("its own", "own", Target(100, 60, at_most=True)), ("mapped pages", "mapped", Target(None, 150, at_most=True))
    ):  # fmt: skip
        yield Case("Spark, memory of a reader", Part(from_setup, part), detail, target=target, unit="MiB",
                   setup=weighed, needs=NEEDS)  # fmt: skip


CASES: Final = list(cases())

if __name__ == "__main__":
    main("spark", __doc__, CASES)
