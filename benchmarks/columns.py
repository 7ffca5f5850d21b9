"""Cost of reading a store as Arrow: header columns, all columns, two processes, export to Parquet.

A store of a million messages over 16 queues, bodies of 256 bytes, unique id, one key, tag, two user properties. Rates
of one process are messages per CPU second. "Decoding alone" decodes the same columns of records whose places are known,
without queues and without checksums. Two processes read four such stores, which share their files, so that starting the
second one is a small part; it loads compiled modules, as an installed package has them.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.charts import NO_BREAK
from benchmarks.common import Bench, Measure, Row, Run, Stopwatch, Target, command, compare, rate
from benchmarks.spark import HEADER, raw_log, store_of

MESSAGES: Final = 1_000_000
BODY_BYTES: Final = 256
STORES: Final = 4
PACKAGES: Final = ("pyarrow", "numpy")


def _store(bench: Bench) -> tuple[str, int]:
    count = bench.count(MESSAGES)
    return store_of(count, BODY_BYTES), count


def _per_cpu_second(path: str, columns: Sequence[str] | None) -> Run:
    from librmq.columns import reader

    def run(_: Path) -> float:
        begin = time.process_time()
        rows: int = sum(batch.num_rows for batch in reader(path, columns=columns))
        return rows / (time.process_time() - begin)

    return run


def reading(bench: Bench) -> list[Row]:
    """Compare whole reads in this process with decoding alone."""
    from librmq.columns import ReadOptions, default_columns
    from librmq.columns.decode import FIXED_COLUMNS, Block

    path, _ = _store(bench)
    raw, places, _ = raw_log(path)
    every = default_columns(ReadOptions((path,)))

    def decoding(columns: Sequence[str]) -> Run:
        def run(_: Path) -> float:
            begin = time.process_time()
            frames = not set(columns) <= FIXED_COLUMNS
            for at in range(0, len(places), 8192):
                block = Block(raw, places[at : at + 8192], frames=frames)
                for name in columns:
                    block.column(name)
            return len(places) / (time.process_time() - begin)

        return run

    rows = []
    for case, columns, least, reach in (("six header columns", HEADER, 8e6, 15e6), ("all columns", every, 1.5e6, 3e6)):
        rates = bench.interleave({"reader": _per_cpu_second(path, columns), "decoding": decoding(columns)})
        median = statistics.median(rates["reader"])
        rows.append(
            Row("reading", case, "", median / 1e6, f"M{NO_BREAK}msg/CPU{NO_BREAK}s", Target(least / 1e6, reach / 1e6),
                ours=rate(median, "msg/s"))
        )  # fmt: skip
        rows.append(
            compare("reading", case, "decoding alone", rates["reader"], rates["decoding"], Target(1 / 3), limit=True)
        )
    return rows


@contextmanager
def _compiled() -> Iterator[None]:
    """Let children keep compiled modules, and load them."""
    variable = "PYTHONDONTWRITEBYTECODE"
    before = os.environ.pop(variable, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[variable] = before


_ALONE: Final = "import sys; from librmq.columns import reader; [None for _ in reader(sys.argv[1:])]"


def _two_programs(paths: Sequence[str], count: int) -> Run:
    """Return a run of two programs that each read half of the stores and pass nothing on."""

    def run(_: Path) -> float:
        with Stopwatch() as watch:
            halves = [
                subprocess.Popen([sys.executable, "-P", "-c", _ALONE, *half]) for half in (paths[::2], paths[1::2])
            ]
            statuses = [program.wait() for program in halves]
        if any(statuses):
            raise RuntimeError(f"a program that reads a store ended with status {max(statuses)}")
        return count / watch.seconds

    return run


def processes(bench: Bench) -> list[Row]:
    """Compare two processes with one: in time, and in CPU time, which other load changes less.

    Two programs without a word between them show what this machine's two cores can do.
    """
    from librmq.columns import reader

    path, count = _store(bench)

    def used(who: int) -> float:
        found = resource.getrusage(who)
        return found.ru_utime + found.ru_stime

    figures: dict[str, list[float]] = {}

    def by(number: int, paths: Sequence[str]) -> Run:
        def run(_: Path) -> float:
            before = used(resource.RUSAGE_SELF), used(resource.RUSAGE_CHILDREN)
            with Stopwatch() as watch, reader(paths, processes=number) as batches:
                rows: int = sum(batch.num_rows for batch in batches)
            own = used(resource.RUSAGE_SELF) - before[0]
            others = used(resource.RUSAGE_CHILDREN) - before[1]
            figures.setdefault(f"{number}, busier", []).append(rows / max(own, others))
            figures.setdefault(f"{number}, all", []).append(rows / (own + others))
            return rows / watch.seconds

        return run

    stores = [f"{path}-{number}" for number in range(STORES)]  # in the store's folder, which is temporary
    for each in stores:
        shutil.copytree(path, each, copy_function=os.link)
    with _compiled():
        rates = bench.interleave(
            {"one": by(1, stores), "two": by(2, stores), "programs": _two_programs(stores, STORES * count)}
        )
    cpu = {name: found[1:] for name, found in figures.items()}  # the first round is a warm-up
    path, case = "two processes", f"all columns of {STORES * count:,} messages"
    one, programs = "one process", "two programs with a half each"
    return [
        compare(path, case, one, rates["two"], rates["one"], Target(1.8), limit=True),
        compare(path, case, programs, rates["two"], rates["programs"], limit=True),
        compare(path, f"{case}, CPU of the busier", one, cpu["2, busier"], cpu["1, busier"], limit=True),
        compare(path, f"{case}, CPU of both", one, cpu["2, all"], cpu["1, all"], limit=True),
    ]


_WITH_CORE: Final = """
import sys, time
from librmq.columns import export
for name in ("warm-up", "measured"):
    begin = time.perf_counter()
    rows = export(sys.argv[1], sys.argv[2] + "/" + name).rows
    rate = rows / (time.perf_counter() - begin)
print(rate)
"""


def exporting(bench: Bench) -> list[Row]:
    """Compare an export to Parquet with PyArrow writing the same batches from memory.

    With the compiled core, another program exports, because the core is chosen when a program starts.
    """
    import pyarrow.parquet as pq

    from librmq.columns import export, reader

    path, count = _store(bench)
    source = reader(path)
    schema, batches = source.schema, list(source)

    def ours(folder: Path, number: int = 1) -> float:
        with Stopwatch() as watch:
            export(path, folder / "out", processes=number)
        return count / watch.seconds

    def from_memory(folder: Path) -> float:
        with Stopwatch() as watch, pq.ParquetWriter(folder / "out.parquet", schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return count / watch.seconds

    def with_core(folder: Path) -> float:
        program = [sys.executable, "-P", "-c", _WITH_CORE, path, str(folder)]
        variables = {**os.environ, "LIBRMQ_CORE": "on"}
        return float(subprocess.run(program, env=variables, capture_output=True, text=True, check=True).stdout)

    variants: dict[str, Run] = {"export": ours, "by two": lambda folder: ours(folder, 2), "memory": from_memory}
    if bench.has("librmq_core"):
        variants["core"] = with_core
    rates = bench.interleave(variants)
    parquet, peer = "export to Parquet", "batches in memory to Parquet"
    rows = [
        compare(parquet, "one process", peer, rates["export"], rates["memory"], limit=True),
        compare(parquet, "two processes", peer, rates["by two"], rates["memory"], Target(0.7), limit=True),
    ]
    if "core" in rates:
        rows.append(compare(parquet, "compiled core", peer, rates["core"], rates["memory"], limit=True))
    return rows


ROWS: Final[dict[str, Measure]] = {"reading": reading, "processes": processes, "exporting": exporting}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show the table, and return the exit status."""
    return command("columns", __doc__ or "", ROWS, PACKAGES, arguments)


if __name__ == "__main__":
    sys.exit(main())
