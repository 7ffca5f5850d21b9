"""Cost of reading a store as Arrow: header columns, all columns, two processes, export to Parquet.

A store of a million messages over 16 queues, bodies of 256 bytes, unique id, one key, tag, two user properties. Rates
of one process are messages per CPU second. "Decoding alone" decodes the same columns of records whose places are known,
without queues and without checksums. Two processes read four such stores, which share their files, so that starting the
second one is a small part.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from benchmarks import spark
from benchmarks.frame import Bench, Case, Target, Timed, main
from benchmarks.spark import HEADER, MESSAGES, store_of

BODY_BYTES: Final = 256
STORES: Final = 4
NEEDS: Final = ("pyarrow",)
EVERY: Final = (
    *("topic", "queueId", "queueOffset", "physicalOffset", "bornTimestamp", "storeTimestamp", "tags", "keys"),
    *("uniqueKey", "properties", "body", "reconsumeTimes", "sysFlag"),
)


def log(bench: Bench) -> Iterator[Any]:
    """Yield a store with its number of messages, and its log with the places of records."""
    path = store_of(bench.count(MESSAGES), BODY_BYTES)
    raw, places = spark.raw_log(path)
    yield SimpleNamespace(path=path, count=bench.count(MESSAGES), log=(raw, places))


def read(given: Any, _: Path, *, columns: Sequence[str]) -> Timed:
    from librmq.columns import reader

    yield
    rows = sum(batch.num_rows for batch in reader(given.path, columns=columns))
    yield rows


def decode(given: Any, folder: Path, *, columns: Sequence[str]) -> Timed:
    return spark.decode(given.log, folder, columns=columns)


def stores(bench: Bench) -> Iterator[list[str]]:
    """Yield the folders of four such stores."""
    path = store_of(bench.count(MESSAGES), BODY_BYTES)
    with bench.folder() as folder:
        paths = [str(folder / str(number)) for number in range(STORES)]
        for copy in paths:
            shutil.copytree(path, copy, copy_function=os.link)
        yield paths


def read_stores(paths: list[str], _: Path, *, processes: int) -> Timed:
    from librmq.columns import reader

    yield
    with reader(paths, processes=processes) as batches:
        rows = sum(batch.num_rows for batch in batches)
    yield rows


ALONE: Final = "import sys; from librmq.columns import reader; [None for _ in reader(sys.argv[1:])]"


def two_programs(paths: list[str], _: Path) -> Timed:
    """Read half of the stores in each of two programs that pass nothing on: what the machine's two cores can do."""
    from librmq.columns import reader

    rows = sum(batch.num_rows for batch in reader(paths, columns=["queueId"]))
    yield
    programs = [subprocess.Popen([sys.executable, "-P", "-c", ALONE, *half]) for half in (paths[::2], paths[1::2])]
    statuses = [program.wait() for program in programs]
    yield rows
    assert not any(statuses)


def batches(bench: Bench) -> Iterator[Any]:
    """Yield a store, and its batches in memory."""
    from librmq.columns import reader

    path = store_of(bench.count(MESSAGES), BODY_BYTES)
    source = reader(path)
    yield SimpleNamespace(path=path, count=bench.count(MESSAGES), schema=source.schema, batches=list(source))


def export(given: Any, folder: Path, *, processes: int) -> Timed:
    from librmq.columns import export

    yield
    export(given.path, folder / "out", processes=processes)
    yield given.count


def from_memory(given: Any, folder: Path) -> Timed:
    import pyarrow.parquet as pq

    yield
    with pq.ParquetWriter(folder / "out.parquet", given.schema) as writer:
        for batch in given.batches:
            writer.write_batch(batch)
    yield given.count


WITH_CORE: Final = """
import sys, time
from librmq.columns import export
for name in ("warm-up", "measured"):
    begin = time.perf_counter()
    rows = export(sys.argv[1], sys.argv[2] + "/" + name).rows
    rate = rows / (time.perf_counter() - begin)
print(rate)
"""


def export_with_core(given: Any, folder: Path) -> float:
    """Export in another program, because the core is chosen when a program starts."""
    program = [sys.executable, "-P", "-c", WITH_CORE, given.path, str(folder)]
    variables = {**os.environ, "LIBRMQ_CORE": "on"}
    return float(subprocess.run(program, env=variables, capture_output=True, text=True, check=True).stdout)


def cases() -> Iterator[Case]:
    table = (("six header columns", HEADER, Target(8e6, 15e6)), ("all columns", EVERY, Target(1.5e6, 3e6)))
    for detail, columns, target in table:
        ours = partial(read, columns=columns)
        yield Case("reading", ours, detail, target=target, unit="msg/CPU s", setup=log, cpu=True, needs=NEEDS)
        yield Case("reading", ours, detail, partial(decode, columns=columns), "decoding alone", Target(1 / 3),
                   setup=log, limit=True, cpu=True, needs=NEEDS)  # fmt: skip
    two, detail = partial(read_stores, processes=2), f"all columns of {STORES * MESSAGES:,} messages"
    for peer, against, target in (
        (partial(read_stores, processes=1), "one process", Target(1.8)),
        (two_programs, "two programs with a half each", Target()),
    ):
        yield Case("two processes", two, detail, peer, against, target, setup=stores, limit=True, needs=NEEDS)
    for detail, run, target, module in (
        ("one process", partial(export, processes=1), Target(), "pyarrow"),
        ("two processes", partial(export, processes=2), Target(0.7), "pyarrow"),
        ("compiled core", export_with_core, Target(), "librmq_core"),
    ):
        yield Case("export to Parquet", run, detail, from_memory, "batches in memory to Parquet", target,
                   setup=batches, limit=True, needs=("pyarrow", module))  # fmt: skip


CASES: Final = list(cases())

if __name__ == "__main__":
    main("columns", __doc__, CASES)
