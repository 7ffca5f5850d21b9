"""Processes of a master and of its replica are killed: nothing acknowledged is lost, and the copy has the same bytes.

Two forms: a replica in a process of its own, which follows the folder of a killed and restarted writer; and both in one
process, where sends wait for the replica.
"""

from __future__ import annotations

import os
import random
import select
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from librmq import Broker, BrokerConfig, ManualRunner, MessageStore
from librmq.cluster import Replica, ReplicaConfig
from librmq.protocol import SendStatus
from librmq.store.recovery._verify import verify
from tests.broker.parties import send
from tests.conftest import SlowBudget
from tests.crash.test_kill import CONFIG, MODES, body_of, run_threads, write
from tests.programs import Fork

pytestmark = [
    pytest.mark.platform,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be killed"),
]


def follow(master: Path, copy: Path) -> None:
    """Follow a folder, and print the end of the copy when it has changed."""
    config = ReplicaConfig(look_every_s=0.002, retry_after_s=0.01, copy_tables_every_s=0.05, chunk_size=5000)
    with Replica.open(copy, of=master, config=config) as replica:
        end, wait = -1, threading.Event()
        while replica.failure is None:
            if replica.end != end:
                end = replica.end
                os.write(1, b"%d\n" % end)
            wait.wait(0.001)
        raise replica.failure


def run_pair(master: Path, copy: Path, life: int) -> None:
    """Send to a master and its replica, and print what is acknowledged."""
    broker = Broker.open(master, BrokerConfig(replication="sync", replica_timeout_s=60), store_config=CONFIG)
    replica = Replica.open(copy, of=broker)

    def produce(thread: int) -> None:
        for number in count():
            response = send(broker, f"T{thread}", body_of(life, thread, number))
            assert (response.status, replica.failure) == (SendStatus.SEND_OK, None), response
            os.write(1, b"%d %d %d\n" % (thread, number, response.physical_offset))

    run_threads(produce, 3)


class Child(Fork):
    """A process whose lines are read."""

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        super().__init__(call, *arguments)
        self.lines: list[list[int]] = []
        self._part = b""

    def read(self, *, until: int | None = None, at_end: int | None = None) -> None:
        """Read lines: ``until`` so many, until the last one is ``at_end`` or more, or else to the process's end."""
        while until is None or len(self.lines) < until:
            if at_end is not None and self.lines and self.lines[-1][0] >= at_end:
                return
            select.select([self.stdout], [], [])
            part = os.read(self.stdout.fileno(), 1 << 16)
            if not part:
                assert (until, at_end) == (None, None), "it ended by itself"
                return
            *whole, self._part = (self._part + part).split(b"\n")
            self.lines += ([int(word) for word in line.split()] for line in whole)

    def kill(self) -> None:
        """Kill the process, and read what it had printed."""
        self.process.kill()
        self.read()
        self.process.join()
        assert self.process.exitcode == -signal.SIGKILL


def log_of(path: Path) -> bytes:
    """Return the bytes of a log up to its end, as another process sees them."""
    with MessageStore.open(path, CONFIG, read_only=True) as store:
        log = store.log
        starts = [start for start in log.sequence.starts if start < log.end]  # files can be made ahead
        return b"".join(log.data_at(start, min(log.file_size, log.end - start)) for start in starts)


def check_copy(master: Path, copy: Path) -> None:
    """A killed replica is opened beside its master: it follows, and its log is a part of the master's."""
    with Replica.open(copy, of=master, runner=ManualRunner()) as replica:
        assert replica.follow()
    mine, theirs = log_of(copy), log_of(master)
    assert theirs.startswith(mine)
    assert verify(str(copy), CONFIG).damage == ()


def follow_through_kills(folder: Path, seed: int, kills: int) -> None:
    """A writer and a follower of its folder run, and one of them is killed, again and again."""
    master, copy, rng = folder / "master", folder / "copy", random.Random(seed)
    with ExitStack() as running:

        def start(call: Callable[..., object], *arguments: object) -> Child:
            return running.enter_context(Child(call, *arguments))

        MessageStore.open(master, CONFIG).close()
        acknowledged: dict[int, tuple[int, int, int]] = {}
        life = 0
        writer, follower = start(write, master, MODES[seed % 3], life, 2), start(follow, master, copy)
        for _ in range(kills):
            writer.read(until=len(writer.lines) + rng.choice([1, 20, 200]))
            if rng.random() < 0.5:  # of what the writer has, because a full pipe may keep it from more
                follower.read(at_end=rng.choice(writer.lines)[2])
            if rng.random() < 0.5:
                writer.kill()
                for thread, number, place in writer.lines:
                    acknowledged[place] = life, thread, number
                follower.read(at_end=writer.lines[-1][2])
                life += 1
                writer = start(write, master, MODES[(seed + life) % 3], life, 2)
            else:
                follower.kill()
                check_copy(master, copy)
                follower = start(follow, master, copy)
        writer.kill()
        for thread, number, place in writer.lines:
            acknowledged[place] = life, thread, number
        follower.read(at_end=max(acknowledged) + 1)
        follower.kill()
    check_copy(master, copy)
    assert log_of(copy) == log_of(master)
    with MessageStore.open(copy, CONFIG, read_only=True) as store:
        found = {message.physical_offset: message.body for message in store}
    for place, which in acknowledged.items():
        assert found[place] == body_of(*which)


def kill_both(folder: Path, seed: int, kills: int) -> None:
    """Master and replica are killed with their process: both have each message whose send has returned."""
    master, copy, rng = folder / "master", folder / "copy", random.Random(seed)
    acknowledged: dict[int, tuple[int, int, int]] = {}
    for life in range(kills):
        with Child(run_pair, master, copy, life) as child:
            child.read(until=rng.choice([1, 10, 100, 400]))
            child.kill()
        for thread, number, place in child.lines:
            acknowledged[place] = life, thread, number
        copied = log_of(copy)
        assert log_of(master).startswith(copied)
        with MessageStore.open(copy, CONFIG, read_only=True) as store:
            found = {message.physical_offset: message.body for message in store}
        for place, which in acknowledged.items():
            assert found[place] == body_of(*which)
    with Broker.open(master, runner=ManualRunner()) as broker, Replica.open(copy, of=broker) as replica:
        assert replica.follow()
        assert replica.end == broker.store.log.end
    assert log_of(copy) == log_of(master)
    assert verify(str(copy), CONFIG).damage == ()


@pytest.mark.slow
def test_replicas_survive_kills(tmp_path: Path) -> None:
    follow_through_kills(tmp_path / "beside", 3, 2)
    kill_both(tmp_path / "within", 1, 1)


@pytest.mark.slow
def test_two_hundred_kills_of_masters_and_replicas(tmp_path: Path, slow_budget: SlowBudget) -> None:
    for number in slow_budget.rounds(25, "times 8 kills", at_least=1):
        folder = tmp_path / str(number)
        (kill_both if number % 3 == 2 else follow_through_kills)(folder, number, 8)
