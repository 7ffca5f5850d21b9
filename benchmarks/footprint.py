"""Footprint of the store apart from messages: memory of a long queue, and time to start."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import struct
import subprocess
import sys
import tracemalloc
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import librmq.store.store
from benchmarks.charts import NO_BREAK
from benchmarks.common import Bench, Row, Run, Stopwatch, Target, compare, rate
from librmq.consumequeue import ENTRY_SIZE, ConsumeQueue

ENTRIES: Final = 1_000_000

_spawn: Final = multiprocessing.get_context("spawn")


def _weigh_queue(pipe: Connection, folder: str) -> None:
    """Open a queue and read all of its entries; send their number, and the bytes held, held at most, and mapped."""
    tracemalloc.start()
    held = tracemalloc.get_traced_memory()[0]
    with ConsumeQueue.open(folder, writable=False) as queue:
        entries = sum(len(block) for _, block in queue.blocks())
        last = queue.entry(queue.max_offset - 1)
        now, peak = tracemalloc.get_traced_memory()
        assert last is not None
        pipe.send((entries, now - held, peak - held, _resident(folder)))


def _resident(folder: str) -> int | None:
    """Return the bytes of files in ``folder`` that this process has in memory; None if the system does not tell."""
    try:
        with open("/proc/self/smaps", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    total, inside = 0, False
    for line in lines:
        if not line.split(" ", 1)[0].endswith(":"):
            inside = folder in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def memory(bench: Bench) -> list[Row]:
    """Measure the memory of a process that has read all of a million entries."""
    count = bench.count(ENTRIES)
    with bench.folder() as folder:
        place = str(folder / "queue")
        with ConsumeQueue.open(place) as queue:
            entry = struct.pack(">qiq", 0, 325, 42)
            for begin in range(0, count, 100_000):
                queue.append_many(begin, entry * min(100_000, count - begin))
        mine, theirs = _spawn.Pipe()
        process = _spawn.Process(target=_weigh_queue, args=(theirs, place), daemon=True)
        process.start()
        theirs.close()
        entries, held, peak, resident = mine.recv()
        process.join()
    assert entries == count
    case = f"{count:,} entries"
    raw = f"{count * ENTRY_SIZE / (1 << 20):.1f}{NO_BREAK}MiB of entries"
    rows = [
        Row(
            "queue, Python objects held",
            case,
            "",
            held / count,
            "B an entry",
            Target(1, at_most=True),
            ours=f"{held / 1024:.0f}{NO_BREAK}KiB, {peak / (1 << 20):.1f}{NO_BREAK}MiB at its peak",
        )
    ]
    if resident is not None:
        bound = 20 * count / ENTRIES if count == ENTRIES else None
        mapped = resident / (1 << 20)
        rows.append(Row("queue, mapped and resident", case, "", mapped, "MiB", Target(bound, at_most=True), ours=raw))
    return rows


def _python(code: str) -> float:
    """Return the seconds that a new interpreter reports."""
    package = str(Path(librmq.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": package}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


def _import(what: str) -> Run:
    code = f"import time; begin = time.perf_counter(); import {what}; print(time.perf_counter() - begin)"
    return lambda _: _python(code)


def _help(_: Path) -> float:
    with Stopwatch() as watch:
        _python("from librmq.cli import main\ntry:\n    main(['--help'])\nfinally:\n    print(0)")
    return watch.seconds


FIRST_TEST: Final = """
import time, pytest, librmq.testing.plugin
begin = time.perf_counter()
rmq, bodies = librmq.testing.Kit(), []
rmq.consumer("billing").subscribe("orders", lambda message: bodies.append(message.body))
rmq.producer().send("orders", b"o-1")
rmq.advance(seconds=1)
rmq.close()
assert bodies == [b"o-1"]
print(time.perf_counter() - begin)
"""


def start(bench: Bench) -> list[Row]:
    """Measure the import of librmq against that of its core packages, ``--help``, and what a first test takes."""
    seconds = bench.interleave(
        {
            "librmq": _import("librmq"),
            "librmq.store": _import("librmq.store"),
            "packages": _import("numpy, sortedcontainers, lark"),
            "help": _help,
            "test": lambda _: _python(FIRST_TEST),
        }
    )
    against, target = "import numpy, sortedcontainers, lark", Target(1.5, at_most=True)
    packages = seconds["packages"]
    took, first = statistics.median(seconds["help"]), statistics.median(seconds["test"])
    return [
        compare("import librmq", "", against, seconds["librmq"], packages, target, unit="s", limit=True),
        compare(
            "import librmq.store.store", "", against, seconds["librmq.store"], packages, target, unit="s", limit=True
        ),
        Row("librmq --help", "", "", took, "s", Target(0.3, at_most=True), ours=rate(took, "s")),
        Row(
            "first test with rmq, after its imports",
            "",
            "",
            first,
            "s",
            Target(0.3, at_most=True),
            ours=rate(first, "s"),
        ),
    ]
