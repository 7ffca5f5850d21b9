"""Cost of lag and counts: whole processes, and compared with a loop in plain Python that looks up each row.

A store of 1,000 queues with 20 messages each, and 1 or 100 groups with progress in every queue: 1,000 and 100,000 rows.
The loop reads the same tables and asks the store for each row's bounds and oldest message. ``count`` and ``stats`` are
compared with a read of header columns.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.common import Bench, Measure, Row, Run, Stopwatch, Target, command, compare

TOPICS: Final = 10
QUEUES: Final = 100
MESSAGES: Final = 20
COUNTED: Final = 400_000
PACKAGES: Final = ("numpy",)
_PROGRAM: Final = "import sys; from librmq.diagnosis import lag; print(lag(sys.argv[1]).by_group()[0].lag)"


def _made(folder: Path, groups: int, topics: int) -> str:
    from librmq.config import StoreConfig
    from librmq.message import Message
    from librmq.store import MessageStore
    from librmq.store.format.broker_tables import BrokerTables

    path = str(folder / f"lag-{groups}")
    with MessageStore.open(
        path, StoreConfig(commitlog_file_size=64 << 20, consumequeue_file_size=20_000), background=False
    ) as store:
        for _ in range(MESSAGES):
            for topic in range(topics):
                for queue_id in range(QUEUES):
                    store.append(Message(f"T{topic}", b"x" * 50), queue_id)
    tables = BrokerTables.open(os.path.join(path, "config"))
    rng = random.Random(1)
    for group in range(groups):
        for topic in range(topics):
            tables.offsets.set(f"T{topic}@G{group}", {each: rng.randrange(MESSAGES + 1) for each in range(QUEUES)})
    tables.persist(1)
    return path


def _process(path: str) -> Run:
    def run(_: Path) -> float:
        with Stopwatch() as watch:
            subprocess.run((sys.executable, "-c", _PROGRAM, path), check=True, stdout=subprocess.DEVNULL)
        return watch.seconds

    return run


def _numpy_alone(_: Path) -> float:
    with Stopwatch() as watch:
        subprocess.run((sys.executable, "-c", "import numpy"), check=True)
    return watch.seconds


def lags(bench: Bench) -> list[Row]:
    """Time whole processes. The requirement is for an idle machine; the ratio shows the share of the start."""
    topics = max(1, round(TOPICS * bench.scale))
    rows = []
    for groups, least_s in ((1, 0.3), (100, 1.5)):
        path = _made(bench.scratch, groups, topics)
        times = bench.interleave({"lag": _process(path), "numpy": _numpy_alone})
        case = f"lag, {groups * topics * QUEUES:,} rows"
        rows.append(compare("diagnosis", case, "python -c 'import numpy'", times["lag"], times["numpy"],
                            unit="s", limit=True))  # fmt: skip
        seconds = sorted(times["lag"])[len(times["lag"]) // 2]
        rows.append(Row("diagnosis", f"{case}, start included", "", seconds, "s", Target(least_s, at_most=True)))
    return rows


def loops(bench: Bench) -> list[Row]:
    """Compare with a loop in plain Python over the same open store."""
    from librmq.diagnosis import StoreView, lag

    topics = max(1, round(TOPICS * bench.scale))
    path = _made(bench.scratch, 10, topics)
    count = 10 * topics * QUEUES

    def columns(_: Path) -> float:
        with StoreView.open(path) as view, Stopwatch() as watch:
            lag(view).by_group()
        return count / watch.seconds

    def loop(_: Path) -> float:
        found = 0
        with StoreView.open(path) as view, Stopwatch() as watch:
            for name, offsets in view.tables.offsets.rows.items():
                topic = name.partition("@")[0]
                for queue_id in range(QUEUES):
                    begin, end = view.store.queue_range(topic, queue_id)
                    start = max(begin, offsets.get(queue_id, begin))
                    message = next(view.store.messages(topic, queue_id, start, end), None)
                    found += end - start + (message is not None and message.store_timestamp_ms < 0)
        return count / watch.seconds

    rates = bench.interleave({"columns": columns, "loop": loop})
    return [compare("diagnosis", f"lag, {count:,} rows", "a loop in plain Python", rates["columns"], rates["loop"],
                    unit="rows/s")]  # fmt: skip


def counts(bench: Bench) -> list[Row]:
    """Compare ``count`` and ``stats`` with a plain read of header columns."""
    from librmq.cli import main
    from librmq.columns import reader
    from librmq.config import StoreConfig
    from librmq.message import Message
    from librmq.store import MessageStore

    count, at_once = round(COUNTED * bench.scale), 500
    path = str(bench.scratch / "counted")
    with MessageStore.open(path, StoreConfig(commitlog_file_size=256 << 20), background=False) as store:
        for begin in range(0, count, at_once):
            batch = [Message(f"T{begin // at_once % 4}", b"x" * 200, tags=f"tag{each % 10}") for each in range(at_once)]
            store.append_batch(batch, begin // at_once % 8)

    def command_of(*words: str) -> Run:
        def run(_: Path) -> float:
            with Stopwatch() as watch, contextlib.redirect_stdout(io.StringIO()):
                main([*words, path])
            return count / watch.seconds

        return run

    def columns(_: Path) -> float:
        with Stopwatch() as watch:
            rows: int = sum(
                batch.num_rows for batch in reader(path, columns=["topic", "storeTimestamp", "size"], checksums=False)
            )
        return rows / watch.seconds

    commands = {f"count --by {by}": command_of("count", "--by", by) for by in ("topic", "queue", "hour", "tag")}
    rates = bench.interleave({**commands, "stats": command_of("stats"), "columns": columns})
    return [
        compare("diagnosis", f"{name}, {count:,} messages", "reading header columns", rates[name], rates["columns"],
                unit="messages/s") for name in [*commands, "stats"]
    ]  # fmt: skip


ROWS: Final[dict[str, Measure]] = {"lags": lags, "loops": loops, "counts": counts}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show the table, and return the exit status."""
    return command("diagnosis", __doc__ or "", ROWS, PACKAGES, arguments)


if __name__ == "__main__":
    sys.exit(main())
