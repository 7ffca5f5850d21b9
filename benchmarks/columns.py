"""Cost of reading a store as Arrow: header columns, all columns, queries of DuckDB, export to Parquet.

A store of a million messages over 16 queues, bodies of 256 bytes, unique id, one key, tag, two user properties. Rates
of reading are messages per CPU second.

A query of DuckDB reads its columns, and asks what was read: both, one after the other, are its limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.frame import Bench, Case, Target, Timed, main
from benchmarks.spark import HEADER, MESSAGES, store_of

BODY_BYTES: Final = 256
NEEDS: Final = ("pyarrow",)
EVERY: Final = (
    *("topic", "queueId", "queueOffset", "physicalOffset", "bornTimestamp", "storeTimestamp", "tags", "keys"),
    *("uniqueKey", "properties", "body", "reconsumeTimes", "sysFlag"),
)


def stored(bench: Bench) -> Iterator[str]:
    """Yield the folder of a store."""
    yield store_of(bench.count(MESSAGES), BODY_BYTES)


def read(path: str, _: Path, *, columns: Sequence[str]) -> Timed:
    from librmq.columns import reader

    yield
    rows = sum(batch.num_rows for batch in reader(path, columns=columns))
    yield rows


def query(source: Any, _: Path, *, sql: str) -> Timed:
    """Let DuckDB ask a store, or its batches in memory, for the number of rows, and other values of them."""
    import duckdb
    import pyarrow as pa

    from librmq.columns import dataset

    connection = duckdb.connect()
    messages = dataset(source) if isinstance(source, str) else pa.Table.from_batches(source.batches)
    connection.register("messages", messages)
    yield
    yield connection.sql(sql).fetchall()[0][0]


def read_and_query(path: str, _: Path, *, sql: str) -> Timed:
    """Read the six columns into memory, and then let DuckDB ask for the same."""
    import duckdb
    import pyarrow as pa

    from librmq.columns import reader

    connection = duckdb.connect()
    yield
    connection.register("messages", pa.Table.from_batches(list(reader(path, columns=HEADER))))
    yield connection.sql(sql).fetchall()[0][0]


def batches(bench: Bench) -> Iterator[Any]:
    """Yield a store, and its batches in memory."""
    from librmq.columns import reader

    path = store_of(bench.count(MESSAGES), BODY_BYTES)
    source = reader(path)
    yield SimpleNamespace(path=path, count=bench.count(MESSAGES), schema=source.schema, batches=list(source))


def export(given: Any, folder: Path) -> Timed:
    from librmq.columns import export

    yield
    export(given.path, folder / "out")
    yield given.count


def from_memory(given: Any, folder: Path) -> Timed:
    import pyarrow.parquet as pq

    yield
    path = folder / "out.parquet"
    with pq.ParquetWriter(path, given.schema) as writer:
        for batch in given.batches:
            writer.write_batch(batch)
    with path.open("rb") as written:
        os.fsync(written.fileno())  # as an export does
    yield given.count


def cases() -> Iterator[Case]:
    table = (("six header columns", HEADER, Target(8e6, 15e6)), ("all columns", EVERY, Target(1.5e6, 3e6)))
    for detail, columns, target in table:
        ours = partial(read, columns=columns)
        yield Case("reading", ours, detail, target=target, unit="msg/CPU s", setup=stored, cpu=True, needs=NEEDS)
    header = f"SELECT count(*), {', '.join(map('max({})'.format, HEADER))} FROM messages"
    by_tag = "SELECT sum(n)::BIGINT FROM (SELECT count(*) AS n FROM messages GROUP BY tags)"
    for detail, sql, target, setup in (
        ("a count", "SELECT count(*) FROM messages", Target(12e6), stored),
        ("six header columns, batches in memory", header, Target(), batches),
        ("a count by tag", by_tag, Target(), stored),
    ):
        yield Case("DuckDB", partial(query, sql=sql), detail, target=target, unit="msg/CPU s", setup=setup, cpu=True,
                   needs=(*NEEDS, "duckdb"))  # fmt: skip
    yield Case("DuckDB", partial(query, sql=header), "six header columns", partial(read_and_query, sql=header),
               "reading, then a query in memory", Target(0.9), "msg/CPU s", stored, limit=True, cpu=True,
               needs=(*NEEDS, "duckdb"))  # fmt: skip
    yield Case("export to Parquet", export, "one process", from_memory,
               "batches in memory to Parquet", Target(0.7), setup=batches, limit=True, needs=NEEDS)  # fmt: skip


CASES: Final = list(cases())

if __name__ == "__main__":
    main("columns", __doc__, CASES)
