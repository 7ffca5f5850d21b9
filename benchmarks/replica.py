"""What a replica costs its master: sends while it follows, sends that wait for it, and how far it is behind."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Final, Literal

from benchmarks.frame import Bench, Case, Target, Timed, main
from librmq.broker import Broker, BrokerConfig
from librmq.client.producer import Producer
from librmq.cluster import Replica
from librmq.config import StoreConfig

SENDS: Final = 20_000
BODY: Final = b"x" * 128


def send(bench: Bench, folder: Path, *, mode: Literal["async", "sync"] | None) -> Timed:
    count = bench.count(SENDS)
    with Broker.open(
        folder / "master", BrokerConfig(replication=mode or "async"), store_config=StoreConfig()
    ) as broker:
        replica = None if mode is None else Replica.open(folder / "copy", of=broker)
        producer = Producer(broker, "bench")
        producer.send("T", BODY)
        yield
        for number in range(count):
            producer.send("T", BODY, tags="tag", keys=f"key-{number}")
        yield count
        if replica is not None:
            replica.close()
        producer.shutdown()


def catch_up(bench: Bench, folder: Path) -> float:
    """Return the seconds after many sends until a replica that follows has them all."""
    with (
        Broker.open(folder / "master", store_config=StoreConfig()) as broker,
        Replica.open(folder / "copy", of=broker) as replica,
        Producer(broker, "bench") as producer,
    ):
        for number in range(bench.count(SENDS)):
            producer.send("T", BODY, tags="tag", keys=f"key-{number}")
        begin = time.perf_counter()
        while replica.end < broker.store.log.end:
            time.sleep(0.001)
        return time.perf_counter() - begin


ALONE: Final = partial(send, mode=None)
CASES: Final = [
    Case(
        "asynchronous replication", partial(send, mode="async"), "128 B", ALONE, "no replica", Target(0.7), limit=True
    ),
    Case("the replica has all", catch_up, "128 B", target=Target(1, at_most=True), unit="s", figure=max),
    Case("synchronous replication", partial(send, mode="sync"), "128 B", ALONE, "no replica", Target(0.4), limit=True),
]

if __name__ == "__main__":
    main("replica", __doc__, CASES)
