"""Cost of a cluster: a send over a route of four brokers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.frame import Bench, Case, Target, Timed, main
from librmq.client.producer import Producer
from librmq.cluster import Cluster
from librmq.config import StoreConfig
from librmq.runtime.runner import ManualRunner

SENDS: Final = 20_000
BODY: Final = b"x" * 128


def send(bench: Bench, folder: Path, *, brokers: int) -> Timed:
    """Send over a route of some brokers, with 16 queues in all."""
    names, config = [f"broker-{number}" for number in range(brokers)], StoreConfig(commitlog_file_size=64 << 20)
    with Cluster.open(folder, names, runner=ManualRunner(), store_config=config) as cluster:
        cluster.create_topic("T", 16 // brokers)
        with Producer(cluster, "p") as producer:
            for _ in range(64):
                producer.send("T", BODY)
            yield
            for _ in range(bench.count(SENDS)):
                producer.send("T", BODY)
            yield bench.count(SENDS)


CASES: Final = [
    Case("a send over 4 brokers", partial(send, brokers=4), "", partial(send, brokers=1), "one over a single broker",
         Target(1.3, at_most=True), limit=True, is_cost=True),
]  # fmt: skip

if __name__ == "__main__":
    main("cluster", __doc__, CASES)
