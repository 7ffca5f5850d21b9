"""Cost of a cluster: a send over a route of four brokers; an hour of a drill over four sites."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.common import Bench, Measure, Row, Run, Stopwatch, Target, command, cost
from librmq.client.producer import Producer
from librmq.cluster import Cluster
from librmq.config import StoreConfig
from librmq.runtime.runner import ManualRunner
from librmq.testing.drills import one_cluster, run_drill

SENDS: Final = 20_000
BODY: Final = b"x" * 128
SITES: Final = ("bj", "hz", "sh", "sz")


def sends(count: int, brokers: int) -> Run:
    """Return messages per second of one producer over a route of so many brokers, with 16 queues in all."""

    def run(folder: Path) -> float:
        names = [f"broker-{number}" for number in range(brokers)]
        config = StoreConfig(commitlog_file_size=64 << 20)
        with Cluster.open(folder, names, runner=ManualRunner(), store_config=config) as cluster:
            cluster.create_topic("T", 16 // brokers)
            with Producer(cluster, "p") as producer:
                for _ in range(64):
                    producer.send("T", BODY)
                with Stopwatch() as watch:
                    for _ in range(count):
                        producer.send("T", BODY)
        return count / watch.seconds

    return run


def route(bench: Bench) -> list[Row]:
    """Measure a send over four brokers against a send over one."""
    count = bench.count(SENDS)
    rates = bench.interleave({"four": sends(count, 4), "one": sends(count, 1)})
    target = Target(1.3, at_most=True)
    return [
        cost("a send over 4 brokers", "one over a single broker", rates["four"], rates["one"], target, unit="msg/s")
    ]


def drill(bench: Bench) -> list[Row]:
    """Measure the CPU time of a drill over four sites: an hour with an order a second at each, and all outages."""
    minutes = max(51, bench.count(60))
    begin = time.process_time()
    report = run_drill(one_cluster(SITES), minutes=minutes, rate=max(0.01, min(1.0, bench.scale)))
    seconds = time.process_time() - begin
    if report.lost:
        raise RuntimeError(f"{report.lost} messages were lost")
    what = f"{minutes} minutes, {report.sent:,} orders, CPU time"
    return [Row("a drill of four sites", what, "", seconds, "s", Target(10, at_most=True))]


ROWS: Final[dict[str, Measure]] = {"route": route, "drill": drill}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show the table, and return the exit status."""
    return command("cluster", __doc__ or "", ROWS, ("numpy",), arguments)


if __name__ == "__main__":
    sys.exit(main())
