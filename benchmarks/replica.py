"""What a replica costs its master: sends while it follows, sends that wait for it, and how far it is behind."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from benchmarks.common import Bench, Measure, Row, Run, Stopwatch, Target, command, compare
from librmq.broker import Broker, BrokerConfig
from librmq.client.producer import Producer
from librmq.cluster import Replica
from librmq.config import StoreConfig

SENDS: Final = 20_000
BODY: Final = b"x" * 128


def sends(count: int, mode: Literal["async", "sync"] | None, behind: list[float]) -> Run:
    """Messages sent a second, without a replica or with one; ``behind`` gets the seconds until it has all."""

    def run(folder: Path) -> float:
        config = BrokerConfig(replication=mode or "async")
        with Broker.open(folder / "master", config, store_config=StoreConfig()) as broker:
            replica = None if mode is None else Replica.open(folder / "copy", of=broker)
            producer = Producer(broker, "bench")
            producer.send("T", BODY)
            with Stopwatch() as watch:
                for number in range(count):
                    producer.send("T", BODY, tags="tag", keys=f"key-{number}")
            if replica is not None:
                with Stopwatch() as rest:
                    while replica.end < broker.store.log.end:
                        time.sleep(0.001)
                behind.append(rest.seconds)
                replica.close()
            producer.shutdown()
        return count / watch.seconds

    return run


def following(bench: Bench) -> list[Row]:
    """Sends beside a replica that follows, against sends without one."""
    count, behind = bench.count(SENDS), list[float]()
    rates = bench.interleave({"replica": sends(count, "async", behind), "none": sends(count, None, behind)})
    target = Target(0.7)
    return [
        compare("asynchronous replication", "128 B", "no replica", rates["replica"], rates["none"], target, limit=True),
        Row("the replica has all", "128 B", "", max(behind), "s", Target(1, at_most=True), limit=True),
    ]


def waiting(bench: Bench) -> list[Row]:
    """Sends that wait for a replica in the process, against sends without one."""
    count, behind = bench.count(SENDS), list[float]()
    rates = bench.interleave({"replica": sends(count, "sync", behind), "none": sends(count, None, behind)})
    target = Target(0.4)
    return [
        compare("synchronous replication", "128 B", "no replica", rates["replica"], rates["none"], target, limit=True)
    ]


ROWS: Final[dict[str, Measure]] = {"following": following, "waiting": waiting}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show the table, and return the exit status."""
    return command("replica", __doc__ or "", ROWS, ("numpy",), arguments)


if __name__ == "__main__":
    sys.exit(main())
