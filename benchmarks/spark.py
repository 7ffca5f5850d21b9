"""Cost of Spark: decoding in process, reading, filtering in the reader, writing, and memory.

A store of a million messages over 16 queues, bodies of 512 bytes, unique id, one key, tag, two user properties. Peers
do equal work by other means: Python data sources that yield prepared numpy columns, tuples, or Arrow made by a Python
loop; and Parquet with the same rows.
"""

from __future__ import annotations

import os
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.common import Bench, Measure, Row, Run, Stopwatch, Target, command, compare
from librmq import ManualClock, Message, MessageStore, StoreConfig
from librmq.files.rolling import file_name
from librmq.message import record as record_format

MESSAGES: Final = 1_000_000
QUEUES: Final = 16
PACKAGES: Final = ("pyspark", "pyarrow", "numpy")
HEADER: Final = ("queueId", "queueOffset", "physicalOffset", "storeTimestamp", "bornTimestamp", "reconsumeTimes")
ENTRIES: Final = "queueId int, queueOffset bigint, physicalOffset bigint, size int, tagsCode bigint"
HEADER_TYPES: Final = (
    "queueId int, queueOffset bigint, physicalOffset bigint, storeTimestamp timestamp, bornTimestamp timestamp, "
    "reconsumeTimes int"
)
START_MS: Final = 1_700_000_000_000

_keep: list[tempfile.TemporaryDirectory[str]] = []


@cache
def store_of(count: int, body_bytes: int = 512) -> str:
    """Create a store with this many messages, once."""
    folder = tempfile.TemporaryDirectory(prefix="librmq-benchmark-store-")
    _keep.append(folder)
    path = os.path.join(folder.name, "store")
    clock = ManualClock(START_MS)
    config = StoreConfig(commitlog_file_size=256 << 20, max_hash_slot_num=500_000, max_index_num=2_000_000)
    with MessageStore.open(path, config, clock=clock, background=False) as store:
        for number in range(count):
            if not number % 1000:
                clock.advance(ms=1)
            tag = "one" if number % 100 == 0 else "ten" if number % 10 == 0 else "rest"
            body = b"%0*d" % (body_bytes, number)
            message = Message(
                "Orders", body, tags=tag, keys=f"key{number:08d}", unique_key=f"{number:032X}",
                properties={"amount": str(number % 1000), "region": ("eu", "us", "cn", "jp")[number % 4]},
            )  # fmt: skip
            store.append(message, number % QUEUES)
    return path


def started() -> Any:
    from librmq.spark import register, session

    made = session("librmq benchmark", "local[2]", {"spark.sql.shuffle.partitions": "2"})
    made.sparkContext.setLogLevel("ERROR")
    register(made)
    return made


# ---------------------------------------------------------------------------------------------------------- in process


def raw_log(path: str) -> tuple[Any, Any, Any]:
    """Return the first file of a log, and the places of its records."""
    file = np.asarray(np.memmap(os.path.join(path, "commitlog", file_name(0)), np.uint8, "r"))
    places: list[int] = []
    at, unpack = 0, struct.Struct(">II").unpack_from
    while at + 8 < len(file):
        size, magic = unpack(file.data, at)
        if magic != record_format.MESSAGE_MAGIC:
            break
        places.append(at)
        at += size
    return file, np.array(places, np.int64), file.data


def decoding(bench: Bench) -> list[Row]:
    """Compare decoding to columns with loops that make the tuples of a Python source."""
    from librmq.columns.decode import COLUMNS, FIXED_COLUMNS, Block

    count = min(bench.count(MESSAGES), 200_000)
    raw, places, view = raw_log(store_of(bench.count(MESSAGES)))
    places = places[:count]
    header, before = record_format.header_struct().unpack_from, 8192
    everything = (*HEADER, "topic", "tags", "keys", "uniqueKey", "properties", "body", "sysFlag")

    def columns(names: Sequence[str]) -> Run:
        def run(_: Path) -> float:
            with Stopwatch() as watch:
                for at in range(0, len(places), before):
                    block = Block(raw, places[at : at + before], frames=not set(names) <= FIXED_COLUMNS)
                    for name in names:
                        block.column(name)
            return len(places) / watch.seconds

        return run

    def loop(make: Callable[[int], object]) -> Run:
        def run(_: Path) -> float:
            with Stopwatch() as watch:
                for place in places.tolist():
                    make(place)
            return len(places) / watch.seconds

        return run

    def moment(timestamp_ms: int) -> datetime:
        return datetime.fromtimestamp(timestamp_ms / 1000, UTC)

    def six(place: int) -> object:
        _, _, _, queue_id, _, queue_offset, at, _, born, _, stored, _, reconsumed, _, _ = header(view, place)
        return queue_id, queue_offset, at, moment(stored), moment(born), reconsumed

    def tags_and_keys(place: int) -> object:
        _, _, _, _, at, end = record_format.frame(view, place, len(view))
        properties = record_format.decode_properties(bytes(view[at:end]))
        return properties.get("TAGS"), properties.get("KEYS")

    def whole(place: int) -> object:
        record = record_format.decode_record(view, place, check_body=False)
        properties = record_format.decode_properties(record.properties_raw)
        times = moment(record.store_timestamp_ms), moment(record.born_timestamp_ms)
        return record, properties, *times, properties.get("TAGS"), properties.get("KEYS"), properties.get("UNIQ_KEY")

    assert set(everything) <= set(COLUMNS)
    rates = bench.interleave(
        {
            "header": columns(HEADER),
            "header loop": loop(six),
            "tags": columns(("tags", "keys")),
            "tags loop": loop(tags_and_keys),
            "all": columns(everything),
            "all loop": loop(whole),
        }
    )
    path, other = "decoding in process", "a loop into tuples"
    return [
        compare(path, "six header columns", other, rates["header"], rates["header loop"], Target(25, 40)),
        compare(path, "tags and keys", other, rates["tags"], rates["tags loop"], Target(8, 12)),
        compare(path, "all", other, rates["all"], rates["all loop"], Target(3.5, 5.5)),
    ]


def starts(bench: Bench) -> list[Row]:
    """Return the starts of records, in log order."""
    from librmq.columns.options import ReadOptions, ReadSelection
    from librmq.columns.planner import PlannedStore
    from librmq.columns.read import _Task
    from librmq.files.disk import DiskFiles

    path = store_of(bench.count(MESSAGES))
    options = ReadOptions((path,), view="log", selection=ReadSelection(internal=True))
    import pyarrow as pa

    with PlannedStore.open(path, ReadSelection(internal=True), "FAILFAST") as planned:
        (part,) = planned.log_parts(1, bytes_a_part=1 << 50)
    assert part.walk is not None

    def ours(with_queues: bool) -> Run:
        def run(_: Path) -> float:
            task = _Task(options, pa.schema([]), part, DiskFiles())
            with Stopwatch() as watch:
                known, _gone = task._entries()
                if not with_queues:
                    known = known.take(slice(0, 0))
                rows, bad = task._walk(known, *part.walk)  # type: ignore[misc]
            assert not bad
            return len(rows) / watch.seconds

        return run

    def chain(_: Path) -> float:
        found = 0
        with Stopwatch() as watch, MessageStore.open(path, read_only=True) as store:
            for _place, _size, raw in store.log.scan(check_body=False):
                found += raw is not None
        return found / watch.seconds

    rates = bench.interleave({"queues": ours(True), "none": ours(False), "chain": chain})
    name, other = "log view: record starts", "a scan record by record"
    return [
        compare(name, "queues at hand", other, rates["queues"], rates["chain"], Target(5, 10)),
        compare(name, "without", other, rates["none"], rates["chain"], Target(1.7, 2)),
    ]


# ------------------------------------------------------------------------------------------------------------- reading


def peers(path: str, count: int) -> dict[str, Any]:  # noqa: C901 (a peer each)
    """Return Python data sources that do equal work by other means."""
    import pyarrow as pa
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    tasks, rows = 8, 8192
    whole_schema = (
        "topic string, queueId int, queueOffset bigint, physicalOffset bigint, bornTimestamp timestamp, "
        "storeTimestamp timestamp, tags string, keys string, uniqueKey string, properties map<string,string>, "
        "body binary, reconsumeTimes int, sysFlag int"
    )

    class Reader(DataSourceReader):
        def __init__(self, kind: str) -> None:
            self.kind = kind

        def partitions(self) -> list[InputPartition]:
            return [InputPartition(number) for number in range(tasks)]

        def read(self, partition: InputPartition) -> Iterator[Any]:
            return getattr(self, self.kind)(partition.value)  # type: ignore[no-any-return]

        def entries(self, number: int) -> Iterator[Any]:
            at = np.arange(65_536, dtype=np.int64)
            for _ in range(count // tasks // 65_536 + 1):
                yield pa.RecordBatch.from_pydict(
                    {"queueId": at.astype(np.int32), "queueOffset": at, "physicalOffset": at,
                     "size": at.astype(np.int32), "tagsCode": at}
                )  # fmt: skip

        def header(self, number: int) -> Iterator[Any]:
            at = np.arange(rows, dtype=np.int64)
            time = pa.timestamp("us", "UTC")
            for _ in range(count // tasks // rows + 1):
                yield pa.RecordBatch.from_pydict(
                    {"queueId": at.astype(np.int32), "queueOffset": at, "physicalOffset": at,
                     "storeTimestamp": pa.array(at).cast(time), "bornTimestamp": pa.array(at).cast(time),
                     "reconsumeTimes": at.astype(np.int32)}
                )  # fmt: skip

        def prepared(self, number: int) -> Iterator[Any]:
            from librmq.columns import reader

            batch = reader(path, offsets=range(rows // QUEUES)).read_next_batch()
            for _ in range(count // tasks // rows + 1):
                yield batch

        def records(self, number: int) -> Iterator[tuple[Any, ...]]:
            with MessageStore.open(path, read_only=True) as store:
                begin = count // tasks * number // QUEUES
                for queue_id in range(QUEUES):
                    queue = store.queues["Orders", queue_id]
                    for at in range(begin, begin + count // tasks // QUEUES):
                        entry = queue.entry(at)
                        assert entry is not None
                        raw = store.log.read(entry.physical_offset, entry.size)
                        assert raw is not None
                        record = record_format.decode_record(raw, check_body=False)
                        properties = record_format.decode_properties(record.properties_raw)
                        born = datetime.fromtimestamp(record.born_timestamp_ms / 1000, UTC)
                        stored = datetime.fromtimestamp(record.store_timestamp_ms / 1000, UTC)
                        yield (
                            record.topic, record.queue_id, record.queue_offset, record.physical_offset, born, stored,
                            properties.get("TAGS"), properties.get("KEYS"), properties.get("UNIQ_KEY"), properties,
                            record.body, record.reconsume_times, record.sys_flag,
                        )  # fmt: skip

        def arrow(self, number: int) -> Iterator[Any]:
            from pyspark.sql.pandas.types import to_arrow_schema

            from librmq.spark.source import schema_of

            schema = to_arrow_schema(schema_of(whole_schema_names), timezone="UTC")
            records = self.records(number)
            while block := list(islice(records, rows)):
                columns = zip(*((*row[:9], list(row[9].items()), *row[10:]) for row in block), strict=True)
                arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    whole_schema_names = [part.split()[0] for part in whole_schema.split(", ")]

    def source(kind: str, schema_text: str) -> type[DataSource]:
        class Source(DataSource):
            @classmethod
            def name(cls) -> str:
                return f"peer_{kind}"

            def schema(self) -> str:
                return schema_text

            def reader(self, schema: Any) -> Any:
                return Reader(kind)

        return Source

    return {
        "entries": source(
            "entries", "queueId int, queueOffset bigint, physicalOffset bigint, size int, tagsCode bigint"
        ),
        "header": source("header", HEADER_TYPES),
        "prepared": source("prepared", whole_schema),
        "records": source("records", whole_schema),
        "arrow": source("arrow", whole_schema),
    }


def reading(bench: Bench) -> list[Row]:
    if not bench.has("pyspark"):
        return []
    spark = started()
    count = bench.count(MESSAGES)
    path = store_of(count)
    for source in peers(path, count).values():
        spark.dataSource.register(source)
    slow = min(count, 100_000)
    for kind, source in peers(path, slow).items():
        if kind in ("records", "arrow"):
            spark.dataSource.register(source)

    def ours(schema: str | None = None, **options: str) -> Any:
        reader = spark.read.format("rocketmq").options(minPartitions="8", **options)
        return (reader.schema(schema) if schema else reader).load(path)

    parquet = os.path.join(os.path.dirname(path), "parquet")
    if not os.path.exists(parquet):
        ours().write.option("compression", "none").parquet(parquet)
    frames = {
        "entries": (
            ours(ENTRIES, view="queues"),
            count,
        ),
        "entries peer": (spark.read.format("peer_entries").load(), 8 * (count // 8 // 65_536 + 1) * 65_536),
        "header": (ours(HEADER_TYPES), count),
        "header peer": (spark.read.format("peer_header").load(), 8 * (count // 8 // 8192 + 1) * 8192),
        "whole": (ours(), count),
        "whole unchecked": (ours(checksums="false"), count),
        "prepared": (spark.read.format("peer_prepared").load(), 8 * (count // 8 // 8192 + 1) * 8192),
        "tuples": (spark.read.format("peer_records").load(), slow // 8 // QUEUES * QUEUES * 8),
        "arrow": (spark.read.format("peer_arrow").load(), slow // 8 // QUEUES * QUEUES * 8),
        "parquet": (spark.read.parquet(parquet), count),
        "tag 1 %": (ours(tags="one"), count),
        "tag 10 %": (ours(tags="one||ten"), count),
        "selector 1 %": (ours(selector="amount < 10"), count),
        "selector 10 %": (ours(selector="amount < 100"), count),
    }

    def run(name: str) -> Run:
        frame, rows = frames[name]

        def once(_: Path) -> float:
            with Stopwatch() as watch:
                frame.write.format("noop").mode("overwrite").save()
            return rows / watch.seconds

        return once

    rates = bench.interleave({name: run(name) for name in frames})
    part, unit = "Spark, reading", "rows/s"
    share = partial(compare, "Spark, filtering in the reader", unit=unit)
    return [
        compare(part, "queue entries (5 columns)", "a source of 5 numpy columns", rates["entries"],
                rates["entries peer"], Target(0.75, 0.95), unit=unit),
        compare(part, "six header columns", "a source of 6 numpy columns", rates["header"], rates["header peer"],
                Target(0.55, 0.70), unit=unit),
        compare(part, "whole messages", "a source of tuples", rates["whole"], rates["tuples"], Target(4, 6), unit=unit),
        compare(part, "whole messages", "a Python loop into Arrow", rates["whole"], rates["arrow"], Target(3, 4.5),
                unit=unit),
        compare(part, "six header columns", "all thirteen", rates["header"], rates["whole"], Target(2.3, 2.8),
                unit=unit),
        compare(part, "whole messages", "Parquet of the same rows", rates["whole"], rates["parquet"],
                Target(0.4, 0.5), unit=unit),
        compare(part, "whole messages", "a batch prepared once", rates["whole"], rates["prepared"], unit=unit,
                limit=True),
        compare(part, "whole messages, no checksums", "Parquet of the same rows", rates["whole unchecked"],
                rates["parquet"], Target(0.4, 0.5), unit=unit),
        share("tag of 1 %", "unfiltered", rates["tag 1 %"], rates["whole"], Target(4, 6)),
        share("tags of 10 %", "unfiltered", rates["tag 10 %"], rates["whole"], Target(2.5, 4)),
        share("selector of 1 %", "unfiltered", rates["selector 1 %"], rates["whole"], Target(1.7, 2.5)),
        share("selector of 10 %", "unfiltered", rates["selector 10 %"], rates["whole"], Target(1.5, 2)),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- writing


def writing(bench: Bench) -> list[Row]:
    """Compare encoding in process with a loop, and the commit with a copy of the bytes."""
    import shutil

    import pyarrow as pa

    from librmq.spark.encode import Encoder
    from librmq.spark.staged_records import Staged, job_folder
    from librmq.spark.write import commit

    count = min(bench.count(MESSAGES), 200_000)
    rows = 8192
    bodies = [b"%0512d" % number for number in range(rows)]
    texts = [{"amount": str(number % 1000), "region": ("eu", "us", "cn", "jp")[number % 4]} for number in range(rows)]
    keys, uniques = [f"key{n:08d}" for n in range(rows)], [f"{n:032X}" for n in range(rows)]
    batch = pa.RecordBatch.from_pydict(
        {
            "topic": pa.array(["Orders"] * rows), "body": pa.array(bodies), "tags": pa.array(["rest"] * rows),
            "keys": pa.array(keys), "uniqueKey": pa.array(uniques),
            "properties": pa.array([list(one.items()) for one in texts], pa.map_(pa.string(), pa.string())),
        }
    )  # fmt: skip
    encoder = Encoder(None, None, 4, "127.0.0.1:10911", 4 << 20, 1 << 30)
    batches = max(1, count // rows)

    def encoding(_: Path) -> float:
        with Stopwatch() as watch:
            for number in range(batches):
                encoder.encode(batch, number * rows, START_MS)
        return batches * rows / watch.seconds

    def loop(_: Path) -> float:
        with Stopwatch() as watch:
            for _number in range(max(1, batches // 8)):
                for number, row in enumerate(batch.to_pylist()):
                    message = Message(
                        row["topic"], row["body"], tags=row["tags"], keys=row["keys"], unique_key=row["uniqueKey"],
                        properties=dict(row["properties"]),
                    )  # fmt: skip
                    record_format.encode_record(
                        record_format.Record(
                            topic=message.topic, queue_id=number % 4, body=message.body,
                            body_crc=record_format.body_checksum(message.body), born_timestamp_ms=START_MS,
                            properties_raw=record_format.encode_properties(message.properties),
                        )
                    )  # fmt: skip
        return max(1, batches // 8) * rows / watch.seconds

    encoded = encoder.encode(batch, 0, START_MS)
    offsets = np.searchsorted(encoded.record_of_key, np.arange(rows + 1)).astype(np.int32)
    table = pa.table(
        {
            "size": encoded.sizes.astype(np.int32), "lane": encoded.lane, "tagsCode": encoded.tags_code,
            "keys": pa.ListArray.from_arrays(pa.array(offsets), pa.array(encoded.key_hashes)),
        }
    )  # fmt: skip
    config = StoreConfig(commitlog_file_size=256 << 20, max_hash_slot_num=500_000, max_index_num=2_000_000)

    def stage(folder: Path) -> tuple[str, str, list[Staged]]:
        path = str(folder / "store")
        with MessageStore.open(path, config, background=False) as store:
            store.append(Message("Orders", b"first"))
        work = job_folder(path, "job", None)
        os.makedirs(work)
        with open(os.path.join(work, "t.log"), "wb") as file:
            for _ in range(batches):
                file.write(encoded.data)
        with pa.ipc.new_file(os.path.join(work, "t.arrow"), table.schema) as made:
            for _ in range(batches):
                made.write_table(table)
        return path, work, [Staged("t", 0, rows * batches, tuple(encoded.lanes))]

    def bring_in(folder: Path) -> float:
        path, work, staged = stage(folder)
        with Stopwatch() as watch:
            commit(path, "job", staged, work, ordered=False, keep_note=False)
        return rows * batches * (len(encoded.data) / rows) / watch.seconds

    def copy(folder: Path) -> float:
        _, work, _ = stage(folder)
        name = os.path.join(work, "t.log")
        with Stopwatch() as watch, open(name, "rb") as source, open(folder / "copy", "wb") as target:
            shutil.copyfileobj(source, target, 8 << 20)
            target.flush()
            os.fdatasync(target.fileno())
        return rows * batches * (len(encoded.data) / rows) / watch.seconds

    rates = bench.interleave({"encode": encoding, "loop": loop, "commit": bring_in, "copy": copy})
    return [
        compare("Spark, writing", "encoding", "a Python loop", rates["encode"], rates["loop"], Target(4.5, 7),
                unit="rows/s"),
        compare("Spark, writing", "commit, queues and index done", "a flushed copy of the bytes", rates["commit"],
                rates["copy"], Target(0.7, 1.0), unit="B/s", limit=True),
    ]  # fmt: skip


def row_writer() -> Any:
    """Return a data source that takes rows one by one, stages the same records by the plain encoder, and commits."""
    import pyarrow as pa
    from pyspark import TaskContext
    from pyspark.sql.datasource import DataSource, DataSourceWriter, WriterCommitMessage

    from librmq.java.lang import index_key_hash
    from librmq.spark.staged_records import Staged, job_folder
    from librmq.spark.write import Ready, commit

    class Writer(DataSourceWriter):
        def __init__(self, path: str) -> None:
            self.path = path
            self.folder = job_folder(path, "rows", None)
            os.makedirs(self.folder)

        def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
            context = TaskContext.get()
            task = 0 if context is None else context.partitionId()
            name = os.path.join(self.folder, str(task))
            rows: list[tuple[int, int, int, list[int]]] = []
            with open(f"{name}.log", "wb") as file:
                for number, row in enumerate(iterator):
                    message = Message(
                        row["topic"], bytes(row["body"]), tags=row["tags"], keys=row["keys"],
                        unique_key=row["uniqueKey"], properties=dict(row["properties"]),
                    )  # fmt: skip
                    raw = record_format.encode_record(
                        record_format.Record(
                            topic=message.topic, queue_id=number % 4, body=message.body,
                            body_crc=record_format.body_checksum(message.body), born_timestamp_ms=START_MS,
                            properties_raw=record_format.encode_properties(message.properties),
                        )
                    )  # fmt: skip
                    file.write(raw)
                    hashes = [index_key_hash(message.topic, key) for key in (row["uniqueKey"], row["keys"])]
                    rows.append((len(raw), number % 4, record_format.tags_code(row["tags"]), hashes))
            sizes, lanes, codes, keys = zip(*rows, strict=True)
            table = pa.table(
                {
                    "size": pa.array(sizes, pa.int32()), "lane": pa.array(lanes, pa.int32()),
                    "tagsCode": pa.array(codes, pa.int64()), "keys": pa.array(keys, pa.list_(pa.int64())),
                }
            )  # fmt: skip
            with pa.ipc.new_file(f"{name}.arrow", table.schema) as made:
                made.write_table(table)
            return Ready(Staged(str(task), task, len(rows), tuple(("Orders", queue_id) for queue_id in range(4))))

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


def writing_by_spark(bench: Bench) -> list[Row]:
    """Compare a frame appended to a store with a writer that gets its rows one by one."""
    if not bench.has("pyspark"):
        return []
    from pyspark.sql import functions as F  # noqa: N812

    spark = started()
    spark.dataSource.register(row_writer())
    text = F.col("id").cast("string")

    def frame(rows: int) -> Any:
        made = spark.range(rows, numPartitions=4).select(
            F.lit("Orders").alias("topic"),
            F.lpad(text, 512, "0").cast("binary").alias("body"),
            F.lit("rest").alias("tags"),
            F.concat(F.lit("key"), F.lpad(text, 8, "0")).alias("keys"),
            F.lpad(text, 32, "0").alias("uniqueKey"),
            F.create_map(
                F.lit("amount"), (F.col("id") % 1000).cast("string"),
                F.lit("region"), F.element_at(F.array(*map(F.lit, ("eu", "us", "cn", "jp"))), F.pmod("id", F.lit(4))
                                              .cast("int") + 1),
            ).alias("properties"),
        ).cache()  # fmt: skip
        made.count()
        return made

    count = bench.count(400_000)
    fewer = max(4, count // 4)
    frames = {"rocketmq": (frame(count), count), "peer_rows": (frame(fewer), fewer)}
    config = StoreConfig(commitlog_file_size=512 << 20, max_hash_slot_num=500_000, max_index_num=2_000_000)

    def run(source: str) -> Run:
        rows_frame, rows = frames[source]

        def once(folder: Path) -> float:
            path = str(folder / "store")
            MessageStore.open(path, config, background=False).close()
            with Stopwatch() as watch:
                rows_frame.write.format(source).mode("append").save(path)
            return rows / watch.seconds

        return once

    rates = bench.interleave({name: run(name) for name in frames})
    for rows_frame, _ in frames.values():
        rows_frame.unpersist()
    return [
        compare("Spark, writing", "with Arrow, commit included", "a writer of rows, the same commit",
                rates["rocketmq"], rates["peer_rows"], Target(4, 6.5), unit="rows/s"),
    ]  # fmt: skip


def memory(bench: Bench) -> list[Row]:
    """Measure the memory of a reader in addition to interpreter and libraries, in its own process."""
    import subprocess

    path = store_of(bench.count(MESSAGES))
    code = f"""
import resource, sys
from librmq.spark.options import ReadOptions, ReadSelection
from librmq.columns.planner import PlannedStore
from librmq.columns.read import Reading
from librmq.columns.schema import default_columns
from librmq.spark.source import arrow_schema, schema_of
options = ReadOptions(({path!r},), selection=ReadSelection())
def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
schema = arrow_schema(schema_of(default_columns(options)), options)
with PlannedStore.open({path!r}, ReadSelection(), "FAILFAST") as store:
    parts = store.parts(list(store.narrowed(ReadSelection(), "earliest", "latest", strict=True).items()), 1)
before, mapped, most = status("RssAnon"), status("RssFile"), [0.0, 0.0]
for part in parts:
    for batch in Reading(options, schema).read(part):
        most = [max(most[0], status("RssAnon") - before), max(most[1], status("RssFile") - mapped)]
print(*most)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    own, mapped = map(float, done.stdout.split())
    about = f"{bench.count(MESSAGES):,} messages"
    return [
        Row("Spark, memory of a reader", "its own", about, own, "MiB", Target(100, 60, at_most=True)),
        Row("Spark, memory of a reader", "mapped pages", about, mapped, "MiB", Target(None, 150, at_most=True)),
    ]


ROWS: Final[dict[str, Measure]] = {
    "decoding": decoding,
    "starts": starts,
    "reading": reading,
    "writing": writing,
    "writing-by-spark": writing_by_spark,
    "memory": memory,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show the table, and return the exit status."""
    return command("spark", __doc__ or "", ROWS, PACKAGES, arguments)


if __name__ == "__main__":
    sys.exit(main())
