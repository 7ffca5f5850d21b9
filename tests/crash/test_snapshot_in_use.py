"""Snapshots of a broker that continues to send, deliver and consume.

Messages acknowledged before the call are consumed when the snapshot is opened, unless the group has already consumed
them. So are messages that are sent afterwards.
"""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from librmq import DeliveredMessage, ManualRunner, Message, Producer, PushConsumer
from librmq.broker import Broker, BrokerConfig
from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.files._disk import DiskFiles
from librmq.files.interface import FolderEntry
from librmq.listener import ReconsumeLater
from librmq.runtime.locks import Lock
from librmq.scheduling.timer_config import TimerConfig
from librmq.store import MessageStore
from librmq.store._snapshots import snapshot
from librmq.store.format.broker_tables import BrokerTables
from librmq.store.recovery._verify import verify
from tests.conftest import SlowBudget
from tests.stores import START_MS

CONFIG = StoreConfig.tiny()
SETTINGS = BrokerConfig(timers=TimerConfig(), default_topic_queues=2)


class World:
    """A broker and a group that refuses every fifth message once, and receives delayed and timed ones."""

    def __init__(self, folder: Path, now_ms: int) -> None:
        self.runner = ManualRunner(ManualClock(now_ms))
        self.broker = Broker.open(folder, SETTINGS, store_config=CONFIG, runner=self.runner)
        self.producer = Producer(self.broker, "p")
        self.consumer = PushConsumer(self.broker, "g")
        self.seen: list[str] = []
        self.sent = 0
        self._refused: set[str] = set()
        self.consumer.subscribe("T")(self._listen)
        self.consumer.start()

    def _listen(self, message: DeliveredMessage) -> None:
        body = message.body.decode()
        if int(body.rpartition(" ")[2]) % 5 == 0 and body not in self._refused:
            self._refused.add(body)
            raise ReconsumeLater
        self.seen.append(body)

    def send(self, count: int, name: str = "sent") -> list[str]:
        bodies = []
        for _ in range(count):
            self.sent += 1
            body = f"{name} {self.sent}"
            properties = {"TIMER_DELAY_SEC": "7"} if self.sent % 4 == 0 else {}
            delay = 2 if self.sent % 4 == 1 else 0
            self.producer.send(Message("T", body.encode(), properties=properties, delay_level=delay))
            bodies.append(body)
        return bodies

    def close(self) -> None:
        self.consumer.shutdown()
        self.broker.close()


class Meddling(DiskFiles):
    """Real files that run an action before one of the snapshot's calls."""

    def __init__(self, at: int, meddle: Callable[[], None]) -> None:
        super().__init__()
        self._at, self._meddle, self.calls = at, meddle, 0

    def list(self, folder: str) -> list[FolderEntry]:
        self.calls += 1
        if self.calls == self._at:
            self._meddle()
        return super().list(folder)


def check(folder: Path, wanted: set[str], now_ms: int) -> None:
    """Open a snapshot and check that it delivers all expected messages, and only messages that were sent."""
    assert verify(folder, CONFIG).sound
    progress_within_queues(folder)
    world = World(folder, now_ms)
    later = world.send(8, "later")
    world.runner.advance(600_000)
    assert wanted - set(world.seen) == set()
    assert set(later) - set(world.seen) == set()
    world.close()


def progress_within_queues(folder: Path) -> None:
    tables = BrokerTables.open(f"{folder}/config")
    with MessageStore.open(folder, read_only=True) as store:
        for name, offsets in tables.offsets.rows.items():
            for queue_id, at in offsets.items():
                assert at <= store.queue_range(name.rpartition("@")[0], queue_id)[1]
        for level, at in tables.delays.rows.items():
            assert at <= store.queue_range("SCHEDULE_TOPIC_XXXX", level - 1)[1]


def snapshot_with(tmp_path: Path, at: int) -> int:
    """Make a snapshot, with much activity before its call number ``at``; return the number of calls."""
    shutil.rmtree(tmp_path, ignore_errors=True)
    world = World(tmp_path / "store", START_MS)
    acknowledged = set(world.send(20))
    world.runner.advance(5_500)
    acknowledged |= set(world.send(20))
    seen = set(world.seen)
    passed: set[str] = set()

    def meddle() -> None:
        if not (tmp_path / "copy.part" / "config").exists():
            world.runner.advance(20_000)  # the snapshot may have this progress or not
            passed.update(world.seen)
        world.send(40)
        world.runner.advance(30_000)

    files = Meddling(at, meddle)
    snapshot(str(tmp_path / "store"), str(tmp_path / "copy"), CONFIG, files=files)
    now_ms = world.runner.now_ms()
    world.close()
    check(tmp_path / "copy", acknowledged - seen - passed, now_ms)
    return files.calls


@pytest.mark.slow
def test_a_snapshot_in_use_loses_no_message(tmp_path: Path, slow_budget: SlowBudget) -> None:
    """Before each call by which the snapshot lists a folder there is much activity; the calls come in mixed order."""
    calls = snapshot_with(tmp_path / "0", 0)
    points = list(range(1, calls + 1, 1 + calls // 12))
    random.Random(1).shuffle(points)
    for number in slow_budget.rounds(len(points), "calls of a snapshot in use", at_least=3, of_list=True):
        snapshot_with(tmp_path / str(number), points[number])


class Load:
    """A producer and a consumer in separate threads; the consumer refuses some messages once."""

    def __init__(self, folder: Path) -> None:
        patient = BrokerConfig(busy_after_s=60, longest_wait_s=60)  # the machine may be busy
        self.broker = Broker.open(folder, patient, store_config=CONFIG)
        self.lock, self.seen, self.acknowledged = Lock(), set[bytes](), set[bytes]()
        self._over = threading.Event()
        self._consumer = PushConsumer(self.broker, "g")
        self._consumer.subscribe("T")(self._listen)
        self._consumer.start()
        self._sending = threading.Thread(target=self._produce)
        self._sending.start()

    def _listen(self, message: DeliveredMessage) -> None:
        if message.body.endswith(b"7") and message.reconsume_times == 0:
            raise ReconsumeLater
        with self.lock:
            self.seen.add(message.body)

    def _produce(self) -> None:
        producer, number = Producer(self.broker, "p"), 0
        while not self._over.wait(0.001):
            body = b"%d" % number
            producer.send(Message("T", body, delay_level=1 if number % 10 == 3 else None))
            number += 1
            with self.lock:
                self.acknowledged.add(body)

    def left(self) -> set[bytes]:
        """Return the acknowledged messages that have not been consumed yet."""
        with self.lock:
            return self.acknowledged - self.seen

    def close(self) -> None:
        self._over.set()
        self._sending.join()
        self._consumer.shutdown()
        self.broker.close()


@pytest.mark.slow
def test_snapshots_under_load(tmp_path: Path, slow_budget: SlowBudget) -> None:
    """While a producer and a consumer run in threads, each snapshot is sound and complete."""
    load: Load | None = None
    try:
        for number in slow_budget.rounds(100, "snapshots under load"):
            if load is None or number % 10 == 0:
                if load is not None:
                    load.close()
                shutil.rmtree(tmp_path / "store", ignore_errors=True)
                load = Load(tmp_path / "store")
            wanted = load.left()
            snapshot(str(tmp_path / "store"), str(tmp_path / "copy"), CONFIG)
            reopened(tmp_path / "copy", wanted & load.left())
            shutil.rmtree(tmp_path / "copy")
    finally:
        if load is not None:
            load.close()


def reopened(folder: Path, wanted: set[bytes]) -> None:
    assert verify(folder, CONFIG).sound
    progress_within_queues(folder)
    runner = ManualRunner(ManualClock(4_000_000_000_000))
    with Broker.open(folder, store_config=CONFIG, runner=runner) as broker:
        seen = set()
        consumer = PushConsumer(broker, "g")
        consumer.subscribe("T")(lambda message: seen.add(message.body))
        consumer.start()
        Producer(broker, "p").send("T", b"afterwards")
        runner.advance(60_000)
        consumer.shutdown()
    assert wanted | {b"afterwards"} <= seen
