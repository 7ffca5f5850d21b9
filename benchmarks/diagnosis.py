"""Cost of lag, counts and reports: whole processes, and compared with a loop in plain Python that looks up each row.

A store of 1,000 queues with 20 messages each, and 1 or 100 groups with progress in every queue: 1,000 and 100,000 rows.
The loop reads the same tables and asks the store for each row's bounds and oldest message. ``count`` and ``stats`` are
compared with a read of header columns; so is a report, of which whole processes are timed too.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.common import Bench, Measure, Row, Run, Stopwatch, Target, command, compare

TOPICS: Final = 10
QUEUES: Final = 100
MESSAGES: Final = 20
COUNTED: Final = 400_000
REPORTED: Final = 400_000
PACKAGES: Final = ("numpy",)


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


def _process(*words: str) -> Run:
    """Return a run of a whole command, its start included."""

    def run(_: Path) -> float:
        with Stopwatch() as watch:
            subprocess.run((sys.executable, "-m", "librmq", *words), check=True, stdout=subprocess.DEVNULL)
        return watch.seconds

    return run


def _numpy_alone(_: Path) -> float:
    with Stopwatch() as watch:
        subprocess.run((sys.executable, "-c", "import numpy"), check=True)
    return watch.seconds


def lags(bench: Bench) -> list[Row]:
    """Time whole processes. The requirement is for an idle machine; the ratio shows the share of the start."""
    topics = max(1, round(TOPICS * bench.scale))
    rows: list[Row] = []
    for groups, at_most_s, by_group_s in ((1, 0.3, 0.3), (100, 1.5, 0.5)):
        path = _made(bench.scratch, groups, topics)
        case = f"{groups * topics * QUEUES:,} rows"
        limits = {case: at_most_s, f"{case}, by group": by_group_s}
        runs = {case: _process("lag", path), f"{case}, by group": _process("lag", path, "--by", "group")}
        rows += _of_processes(bench, "lag", runs, limits)
    return rows


def _of_processes(bench: Bench, path: str, runs: dict[str, Run], limits: dict[str, float]) -> list[Row]:
    """Compare whole commands with the start of numpy alone, and with their limits in seconds."""
    times = bench.interleave({**runs, "numpy": _numpy_alone})
    rows = []
    for case, at_most_s in limits.items():
        rows.append(compare(path, case, "python -c 'import numpy'", times[case], times["numpy"],
                            unit="s", limit=True))  # fmt: skip
        seconds = sorted(times[case])[len(times[case]) // 2]
        rows.append(Row(path, f"{case}, start included", "", seconds, "s", Target(at_most_s, at_most=True)))
    return rows


def shows(bench: Bench) -> list[Row]:
    """Time ``show --limit 10`` on a small and on a large store, whole processes: the size must not matter."""
    from librmq.config import StoreConfig
    from librmq.message import Message
    from librmq.store import MessageStore

    runs, limits = {}, {}
    for count in (1000, round(COUNTED * bench.scale)):
        path = str(bench.scratch / f"shown-{count}")
        with MessageStore.open(path, StoreConfig(commitlog_file_size=64 << 20), background=False) as store:
            for begin in range(0, count, 500):
                store.append_batch([Message("T", b"x" * 200)] * 500, begin // 500 % 8)
        case = f"{count:,} messages"
        runs[case], limits[case] = _process("show", path, "--topic", "T", "--limit", "10"), 0.3
    return _of_processes(bench, "show --limit 10", runs, limits)


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
    return [compare("lag", f"{count:,} rows", "a loop in plain Python", rates["columns"], rates["loop"],
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

    ways = (["topic"], ["queue"], ["hour"], ["tag"], ["tag", "--sampled"])
    commands = {f"count --by {' '.join(by)}": command_of("count", "--by", *by) for by in ways}
    rates = bench.interleave({**commands, "stats": command_of("stats"), "columns": columns})
    return [
        compare(f"{count:,} messages", name, "reading header columns", rates[name], rates["columns"], unit="msg/s",
                limit=True) for name in [*commands, "stats"]
    ]  # fmt: skip


_REPORT: Final = """
import resource, sys, time
from librmq.cli import main
begin = time.perf_counter()
main(["report", sys.argv[1], "-o", sys.argv[2]])
print(time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
_TEN_MILLION: Final = 10_000_000
_HEADERS: Final = ["topic", "queueId", "size", "storeTimestamp", "bornTimestamp", "reconsumeTimes", "keys", "uniqueKey"]


def reports(bench: Bench) -> list[Row]:
    """Compare a report with a read of the columns that it needs; time the one of the demo's store."""
    from librmq.columns import reader
    from librmq.config import StoreConfig
    from librmq.diagnosis import render_page, report
    from librmq.message import Message
    from librmq.store import MessageStore

    count = round(REPORTED * bench.scale)
    path = str(bench.scratch / "reported")
    config = StoreConfig(commitlog_file_size=256 << 20)
    with MessageStore.open(path, config, background=False) as store:
        for number in range(count):
            store.append(Message(f"T{number % 4}", b"x" * 40, keys=f"order-{number % 100_003}"), number % 8)

    def columns(_: Path) -> float:
        with Stopwatch() as watch:
            rows: int = sum(
                batch.num_rows for batch in reader(path, columns=[*_HEADERS, "_corrupt_record"], mode="PERMISSIVE")
            )
        return rows / watch.seconds

    def whole(_: Path) -> float:
        with Stopwatch() as watch:
            found = report(path, check=False)
            render_page(found)
            found.to_json()
        return count / watch.seconds

    rates = bench.interleave({"report": whole, "columns": columns})
    case = f"{count:,} messages"
    per_s = sorted(rates["report"])[len(rates["report"]) // 2]
    _, peak = _report_process(path, bench.scratch)
    small = _demo_store(bench.scratch)
    times = sorted(_report_process(small, bench.scratch)[0] for _ in range(bench.rounds))
    return [
        compare("report", case, "reading its columns", rates["report"], rates["columns"], unit="msg/s", limit=True),
        Row("report", f"{_TEN_MILLION:,} messages at that rate", "", _TEN_MILLION / per_s, "s",
            Target(60, at_most=True)),
        Row("report", f"{case}, peak of the process", "", peak / 1024, "MiB", Target(300, at_most=True)),
        Row("report", "the demo's store", "", times[len(times) // 2], "s", Target(2, at_most=True)),
    ]  # fmt: skip


def _report_process(path: str, folder: Path) -> tuple[float, int]:
    """Return the seconds of a report in a process of its own, without its start, and its peak in KiB."""
    words = (sys.executable, "-c", _REPORT, path, str(folder / "report.html"))
    last = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    seconds, peak = last.split()
    return float(seconds), int(peak)


def _demo_store(folder: Path) -> str:
    """Unpack the store that the demo shows."""
    archive = Path(__file__).parent.parent / "tests" / "data" / "store-basic.tar.xz"
    with tarfile.open(archive, "r:xz") as found:
        found.extractall(folder / "demo", filter="data")
    return str(folder / "demo" / "store-basic" / "store")


ROWS: Final[dict[str, Measure]] = {"lags": lags, "loops": loops, "shows": shows, "counts": counts, "reports": reports}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show the table, and return the exit status."""
    return command("diagnosis", __doc__ or "", ROWS, PACKAGES, arguments)


if __name__ == "__main__":
    sys.exit(main())
