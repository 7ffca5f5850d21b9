"""Members of a share are killed while they consume: each kill repeats what was in work at its members, and no more."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import pytest

import librmq
from librmq import ConsumeFrom, DeliveredMessage, Producer, PushConsumer, RmqError
from librmq.clock import SystemClock
from tests.conftest import SlowBudget
from tests.programs import Fork
from tests.wire.stub import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.skipif("sys.platform != 'linux'", reason="only there a kill is kept")]

CLOCK: Final = SystemClock()
NEVER: Final = threading.Event()
MEMBERS: Final = 3
THREADS: Final = 4
KILLS: Final = 8
MESSAGES: Final = 1200


def consume(path: Path, ledger: Path, poisons: Sequence[bytes] = (), work_s: float = 0.002) -> None:
    """Consume until a kill or a poison, and write a line at the beginning and at the end of each call of the listener.

    A call takes ``work_s`` seconds.
    """
    lines = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def listen(message: DeliveredMessage) -> None:
        os.write(lines, b"%d begins %s\n" % (os.getpid(), message.body))
        if message.body in poisons:
            os._exit(1)
        CLOCK.wait(NEVER, work_s)
        os.write(lines, b"%d ends %s\n" % (os.getpid(), message.body))

    shared = librmq.share(path, wait=60, timeout=60)
    consumer = PushConsumer(shared, "g", threads=THREADS, consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("t", listen)
    consumer.start()
    print("ready", flush=True)
    signal.pause()


def test_kills_of_members_repeat_what_was_in_work_and_nothing_else(tmp_path: Path, slow_budget: SlowBudget) -> None:
    for number in slow_budget.rounds(40):
        kill_members(tmp_path / str(number), random.Random(f"kept {number}"))


def kill_members(folder: Path, rng: random.Random) -> None:
    folder.mkdir()
    store, ledger = folder / "store", folder / "ledger"
    members: list[Fork] = []

    def begin() -> None:
        member = Fork(consume, store, ledger)
        assert member.stdout.readline() == "ready\n"
        members.append(member)

    with librmq.share(store) as shared, Producer(shared, "p") as producer:
        shared.create_topic("t", 4)
        for number in range(MESSAGES):
            producer.send("t", b"%d" % number)
    try:
        for _ in range(MEMBERS):
            begin()
        for _ in range(KILLS):
            CLOCK.wait(NEVER, rng.uniform(0.05, 0.4))
            victim = members.pop(rng.randrange(len(members)))
            victim.__exit__()
            begin()
        with librmq.share(store, wait=60, timeout=60) as shared:
            wait_until(partial(is_consumed, shared), "all messages are consumed")
    finally:
        for member in members:
            member.__exit__()
    check(ledger)


def is_consumed(shared: librmq.SharedBroker, dead: int = 0) -> bool:
    """Return whether all messages are consumed, and so many of them are dead letters."""
    try:
        return shared.lag("g", "t") == 0 and (not dead or len([*shared.dead_letters("g")]) >= dead)
    except RmqError:  # its owner is being killed
        return False


def check(ledger: Path) -> None:
    begun: dict[str, list[int]] = defaultdict(list)
    for line in ledger.read_text().splitlines():
        process, what, body = line.split()
        if what == "begins":
            begun[body].append(int(process))
    assert len(begun) == MESSAGES, "a message is lost"
    repeats = sum(len(processes) - 1 for processes in begun.values())
    # A member that dies, and the one that comes, let the others hand over queues whose messages they have in work.
    assert repeats <= KILLS * THREADS * MEMBERS, repeats


POISONS: Final = (b"31", b"77")
FEW: Final = 120
KILLS_OF_FEW: Final = 4


def test_what_ends_its_process_is_convicted_among_kills_and_nothing_else(
    tmp_path: Path, slow_budget: SlowBudget
) -> None:
    for number in slow_budget.rounds(40):
        poison_members(tmp_path / str(number), random.Random(f"poison {number}"))


def poison_members(folder: Path, rng: random.Random) -> None:
    folder.mkdir()
    store, ledger = folder / "store", folder / "ledger"
    with librmq.share(store) as shared, Producer(shared, "p") as producer:
        shared.create_topic("t", 2)
        for number in range(FEW):
            producer.send("t", b"%d" % number)
    members = [Fork(consume, store, ledger, POISONS, 0.005) for _ in range(2)]
    killed = 0
    try:
        with librmq.share(store, wait=60, timeout=60) as shared:

            def kill_and_look() -> bool:
                nonlocal killed
                for place, member in enumerate(members):
                    if member.process.exitcode is None and killed < KILLS_OF_FEW and rng.random() < 0.02:
                        killed += 1
                        member.process.kill()
                        member.process.join()
                    if member.process.exitcode is not None:
                        member.__exit__()
                        members[place] = Fork(consume, store, ledger, POISONS, 0.005)
                CLOCK.wait(NEVER, 0.05)
                return is_consumed(shared, len(POISONS))

            wait_until(kill_and_look, "all is consumed but what ends processes")
            assert sorted(letter.body for letter in shared.dead_letters("g")) == sorted(POISONS)
    finally:
        for member in members:
            member.__exit__()
    begun, ended = defaultdict[bytes, int](int), set[bytes]()
    for line in ledger.read_bytes().splitlines():
        _, what, body = line.split()
        if what == b"begins":
            begun[body] += 1
        else:
            ended.add(body)
    assert ended == {b"%d" % number for number in range(FEW)} - set(POISONS), "an innocent message did not run"
    counts = [begun[body] for body in POISONS]
    assert max(counts) <= 1 + 3 + KILLS_OF_FEW, counts
    # A kill can come after the page says that a message begins, and before the listener writes so; never twice.
    assert sum(max(0, 1 + 3 - count) for count in counts) <= min(killed, 1), (counts, killed)
