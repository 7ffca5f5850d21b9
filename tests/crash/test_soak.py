"""The threaded broker under all loads together, killed repeatedly: in the end every group has every message.

A separate process runs a broker with threads, several producers, and groups whose instances start and stop. It prints,
unbuffered, each acknowledged message (``s``) and each consumed one (``c``), and is killed without warning. The last
process is asked to end: it waits until its groups have caught up, and shuts down.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Self

import pytest

import librmq
from librmq.config import StoreConfig
from librmq.store.recovery.verify import verify
from tests.conftest import SlowBudget
from tests.reference import CHECKOUT

pytestmark = [
    pytest.mark.platform,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be killed"),
]

STORE = StoreConfig(commitlog_file_size=256 << 10, max_total_size=1 << 30)
GROUPS = ("billing", "shipping", "ledger")
ORDERLY = "ledger"
KEYS = 6

WORKER = """
import os
import random
import sys
import threading

from librmq import Broker, Message, Producer, PushConsumer, ReconsumeLater
from librmq.client import select_by_remainder
from tests.crash.test_soak import GROUPS, KEYS, ORDERLY, STORE

path, life, seed = sys.argv[1], int(sys.argv[2]), sys.argv[3]
ending = threading.Event()


def tell(line):
    os.write(1, line.encode() + b"\\n")  # shorter than a pipe's buffer: whole, also from threads


def consumer_of(broker, group):
    consumer = PushConsumer(broker, group, orderly=group == ORDERLY, threads=4)
    rng = random.Random(f"{seed} {group}")

    @consumer.subscribe("orders")
    def consume(message):
        if group != ORDERLY and rng.random() < 0.05:
            raise ReconsumeLater("not now", delay_level=1)
        tell(f"c {group} {message.body.decode()} {message.queue.queue_id} {message.queue_offset}")

    consumer.start()
    return consumer


def produce(broker, number):
    rng = random.Random(f"{seed} {number}")
    with Producer(broker, f"shop-{number}") as producer:
        count = 0
        while not ending.is_set():
            names = [f"{life}/{number}/{count + i}" for i in range(rng.choice([1, 1, 1, 5]))]
            count += len(names)
            if len(names) > 1:
                producer.send_batch([Message("orders", name.encode()) for name in names])
            else:
                producer.send("orders", names[0].encode(), selector=select_by_remainder, arg=rng.randrange(KEYS))
            for name in names:
                tell(f"s {name}")
            ending.wait(0.002)


def come_and_go(broker, group):
    rng = random.Random(f"{seed} {group} members")
    members = [consumer_of(broker, group)]
    while not ending.wait(rng.uniform(0.02, 0.2)):
        if len(members) < 3 and rng.random() < 0.6:
            members.append(consumer_of(broker, group))
        elif len(members) > 1:
            assert members.pop(rng.randrange(len(members))).shutdown()
    return members


def main():
    with Broker.open(path, store_config=STORE) as broker:
        if "orders" not in broker.topics():
            broker.create_topic("orders", KEYS)
        steady = [consumer_of(broker, ORDERLY)]
        threads = [threading.Thread(target=produce, args=(broker, number)) for number in range(3)]
        threads += [
            threading.Thread(target=lambda group=group: steady.extend(come_and_go(broker, group)))
            for group in GROUPS
            if group != ORDERLY
        ]
        for thread in threads:
            thread.start()
        sys.stdin.readline()
        ending.set()
        for thread in threads:
            thread.join()
        tell("sent")
        sys.stdin.readline()
        for consumer in steady:
            assert consumer.shutdown()
    tell(f"left {sorted(thread.name for thread in threading.enumerate())}")


threading.excepthook = lambda failure: (sys.__excepthook__(*failure[:3]), os._exit(1))
main()
"""


class Life:
    """A process that runs such a broker, and its output."""

    def __init__(self, path: Path, life: int, seed: str) -> None:
        assert librmq.__file__ is not None
        roots = [str(Path(librmq.__file__).parent.parent), str(CHECKOUT)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(path), str(life), seed],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
        )
        assert self.process.stdout is not None
        self.out = self.process.stdout.fileno()
        self.told: list[str] = []
        self.sent: set[str] = set()
        self.consumed: dict[str, Counter[str]] = defaultdict(Counter)
        self.orderly: dict[int, list[int]] = defaultdict(list)
        """For each queue, the queue offsets in the order in which the orderly group got them."""
        self._rest = b""

    def read(self, timeout: float | None = None) -> bool:
        """Read the process's next line; return False at the end."""
        if not select.select([self.out], [], [], timeout)[0]:
            raise AssertionError(f"no output for {timeout} s; the last was {self.told[-3:]}")
        part = os.read(self.out, 1 << 16)
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            kind, *words = line.decode().split(" ")
            if kind == "s":
                self.sent.add(words[0])
            elif kind == "c":
                self.consumed[words[0]][words[1]] += 1
                if words[0] == ORDERLY:
                    self.orderly[int(words[2])].append(int(words[3]))
            else:
                self.told.append(line.decode())
        return bool(part)

    def kill(self, after: int) -> None:
        """Kill the process once it has reported this many consumed messages."""
        while sum(map(Counter.total, self.consumed.values())) < after:
            assert self.read(60), f"it ended by itself: {self.process.wait()}"
        self.process.send_signal(signal.SIGKILL)
        while self.read():
            pass
        assert self.process.wait() == -signal.SIGKILL

    def ask(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # in case the process did not end as it should have
        self.process.__exit__(None, None, None)


def soak(path: Path, seed: str) -> tuple[int, int, int]:
    """Run and kill several processes, shut the last one down; return the numbers of messages, deliveries and kills."""
    rng = random.Random(seed)
    sent: set[str] = set()
    consumed: dict[str, Counter[str]] = {group: Counter() for group in GROUPS}
    kills = rng.choice([1, 2, 3])

    reached: Counter[int] = Counter()  # progress of the orderly group, by queue

    def take(life: Life) -> None:
        sent.update(life.sent)
        for group, times in life.consumed.items():
            consumed[group] += times
        for queue_id, offsets in life.orderly.items():
            assert offsets[0] <= reached[queue_id], "a message was passed over"
            assert offsets == list(range(offsets[0], offsets[0] + len(offsets))), "the order was not kept"
            reached[queue_id] = max(reached[queue_id], offsets[-1] + 1)

    for number in range(kills):
        with Life(path, number, f"{seed} {number}") as life:
            life.kill(after=rng.choice([1, 100, 1000, 3000]))
        take(life)

    with Life(path, kills, f"{seed} last") as last:
        while len(last.consumed) < len(GROUPS) or not last.sent:
            assert last.read(60)
        last.ask()
        while "sent" not in last.told:
            assert last.read(60)
        sent |= last.sent
        while any(sent - consumed[group].keys() - last.consumed[group].keys() for group in GROUPS):
            assert last.read(60), "it ended, and messages were not consumed"
        last.ask()
        while last.read(60):
            pass
        assert last.process.wait() == 0
    assert last.told == ["sent", "left ['MainThread']"]
    take(last)

    for group in GROUPS:
        strangers = consumed[group].keys() - sent
        assert all(int(name.split("/")[0]) < kills for name in strangers), "consumed, and never sent"
    verdict = verify(str(path))
    assert verdict.sound, verdict.damage
    return len(sent), sum(map(Counter.total, consumed.values())), kills


@pytest.mark.slow
def test_every_message_is_consumed_by_every_group(tmp_path: Path, slow_budget: SlowBudget) -> None:
    for number in slow_budget.rounds(50, "rounds of kills", at_least=1):
        messages, deliveries, _ = soak(tmp_path / f"store-{number}", f"soak {number}")
        assert messages > 0
        assert deliveries >= len(GROUPS) * messages
