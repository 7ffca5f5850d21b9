"""`close` of objects with open files returns None; `shutdown` of running objects returns whether everything ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, ManualRunner, MessageStore, Producer, PullConsumer, PushConsumer, StoreConfig, ThreadRunner
from librmq.client import TransactionProducer
from librmq.commitlog import CommitLog
from librmq.consumequeue import ConsumeQueue
from librmq.idempotence import SqliteDedupStore
from librmq.store import Checkpoint, KeyIndex
from librmq.testing import Kit

HOLDS: dict[str, Callable[[Path], Any]] = {
    "store": lambda path: MessageStore.open(path, StoreConfig.tiny()),
    "temporary store": lambda _: MessageStore.temporary(),
    "broker": lambda path: Broker.open(path, store_config=StoreConfig.tiny(), runner=ManualRunner()),
    "log": lambda path: CommitLog.open(path, 1 << 16),
    "queue": lambda path: ConsumeQueue.open(path, 2000),
    "index": lambda path: KeyIndex.open(path, slots=10, entries=20),
    "checkpoint": lambda path: Checkpoint.open(path, writable=True),
    "guard": lambda path: SqliteDedupStore(path),
    "kit": lambda _: Kit(),
}


def listening(broker: Broker) -> PushConsumer:
    consumer = PushConsumer(broker, "g")
    consumer.subscribe("T", lambda _: None)
    return consumer.start()


RUNS: dict[str, Callable[[Broker], Any]] = {
    "producer": lambda broker: Producer(broker, "g").start(),
    "transaction producer": lambda broker: TransactionProducer(broker, "g", check=lambda _: None).start(),
    "push consumer": listening,
    "pull consumer": lambda broker: PullConsumer(broker, "g").start(),
    "threads": lambda _: ThreadRunner(),
    "runner by hand": lambda _: ManualRunner(),
}


@pytest.mark.parametrize("name", HOLDS)
def test_closing_gives_nothing_and_twice_does_nothing(name: str, tmp_path: Path) -> None:
    opened = HOLDS[name](tmp_path / "it")
    assert [opened.close(), opened.close()] == [None, None]


@pytest.mark.parametrize("name", RUNS)
def test_shutting_down_tells_whether_all_has_ended(name: str) -> None:
    with Broker.temporary(runner=ManualRunner()) as broker:
        runs = RUNS[name](broker)
        assert [runs.shutdown(), runs.shutdown()] == [True, True]
