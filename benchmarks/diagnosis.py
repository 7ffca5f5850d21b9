"""Cost of lag and reports: whole processes.

A store of 1,000 queues with 20 messages each, and 1 or 100 groups with progress in every queue: 1,000 and 100,000 rows.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Final

from benchmarks.frame import CHECKOUT, Bench, Case, Part, Run, Setup, Target, Timed, from_setup, last_line, main
from librmq.config import StoreConfig
from librmq.message import Message
from librmq.store import MessageStore
from librmq.store.format.broker_tables import BrokerTables

TOPICS: Final = 10
QUEUES: Final = 100
MESSAGES: Final = 20
MANY: Final = 400_000
"""Messages that are reported."""
TEN_MILLION: Final = 10_000_000


def progress(bench: Bench, groups: int) -> Iterator[tuple[str, int]]:
    """Yield a store in whose queues groups have progress, and the number of rows of its lag."""
    config, rng = StoreConfig(commitlog_file_size=64 << 20, consumequeue_file_size=20_000), random.Random(1)
    topics = [f"T{number}" for number in range(max(1, round(TOPICS * bench.scale)))]
    with bench.folder() as folder:
        path = str(folder / "store")
        with MessageStore.open(path, config, background=False) as store:
            for _ in range(MESSAGES):
                for topic in topics:
                    for queue_id in range(QUEUES):
                        store.append(Message(topic, b"x" * 50), queue_id)
        tables = BrokerTables.open(os.path.join(path, "config"))
        for group in range(groups):
            for topic in topics:
                offsets = {queue_id: rng.randrange(MESSAGES + 1) for queue_id in range(QUEUES)}
                tables.offsets.set(f"{topic}@G{group}", offsets)
        tables.persist(1)
        yield path, groups * len(topics) * QUEUES


def process(given: tuple[str, int], _: Path, *, words: Sequence[str]) -> Timed:
    """Run a whole command, its start included."""
    yield
    subprocess.run((sys.executable, "-m", "librmq", *words, given[0]), check=True, stdout=subprocess.DEVNULL)
    yield 1


# -------------------------------------------------------------------------------------------------------------- reports


def reported(bench: Bench) -> Iterator[tuple[str, int]]:
    """Yield a store of messages with keys, and their number."""
    count = round(MANY * bench.scale)
    with bench.folder() as folder:
        path = str(folder / "store")
        with MessageStore.open(path, StoreConfig(commitlog_file_size=256 << 20), background=False) as store:
            for number in range(count):
                store.append(Message(f"T{number % 4}", b"x" * 40, keys=f"order-{number % 100_003}"), number % 8)
        yield path, count


def report_in_process(given: tuple[str, int], _: Path, *, messages: int) -> Timed:
    """Make a report, with ``messages`` as the units of which there are so many."""
    from librmq.diagnosis import render_page, report

    path, count = given
    yield
    answer = report(path, check=False)
    render_page(answer)
    answer.to_json()
    yield count / messages


REPORT: Final = """
import resource, sys, time
from librmq.cli import main
begin = time.perf_counter()
main(["report", sys.argv[1], "-o", sys.argv[2]])
print(time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def report_process(given: tuple[str, int], folder: Path) -> dict[str, float]:
    """Return the seconds of a report in a process of its own, without its start, and its peak in MiB."""
    seconds, peak = map(float, last_line(REPORT, given[0], folder / "report.html").split())
    return {"seconds": seconds, "peak": peak / 1024}


def report_peak(bench: Bench) -> Iterator[dict[str, float]]:
    with bench.folder() as folder:
        for given in reported(bench):
            yield report_process(given, folder)


def demo(bench: Bench) -> Iterator[tuple[str, int]]:
    archive = CHECKOUT / "tests" / "data" / "store-basic.tar.xz"
    with bench.folder() as folder, tarfile.open(archive, "r:xz") as packed:
        packed.extractall(folder, filter="data")
        yield str(folder / "store-basic" / "store"), 0


def cases() -> Iterator[Case]:
    progress_of = cache(lambda groups: partial(progress, groups=groups))
    for groups, words, detail, most in (
        (1, ("lag",), "1,000 rows", 0.3),
        (1, ("lag", "--by", "group"), "1,000 rows, by group", 0.3),
        (100, ("lag",), "100,000 rows", 1.5),
        (100, ("lag", "--by", "group"), "100,000 rows, by group", 0.5),
    ):
        ours, target = partial(process, words=words), Target(most, at_most=True)
        yield Case("lag", ours, f"{detail}, start included", target=target, unit="s", setup=progress_of(groups))
    rows: list[tuple[str, Run | Part, float, str, Setup]] = [
        (f"{TEN_MILLION:,} messages at that rate", partial(report_in_process, messages=TEN_MILLION), 60, "s", reported),
        (f"{MANY:,} messages, peak of the process", Part(from_setup, "peak"), 300, "MiB", report_peak),
        ("the demo's store", Part(report_process, "seconds"), 2, "s", demo),
    ]
    for detail, run, bound, unit, store in rows:
        yield Case("report", run, detail, target=Target(bound, at_most=True), unit=unit, setup=store,
                   needs=("pyarrow",))  # fmt: skip


CASES: Final = list(cases())

if __name__ == "__main__":
    main("diagnosis", __doc__, CASES)
