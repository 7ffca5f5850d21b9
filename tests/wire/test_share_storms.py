"""Transactions end at full speed in all processes of a share, while all append and consume, and some are killed."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final
from zlib import crc32

import pytest

import librmq
from librmq import (
    BrokerConfig,
    ConsumeFrom,
    DeliveredMessage,
    Message,
    MessageStore,
    Producer,
    PushConsumer,
    RmqError,
    TransactionConfig,
    TransactionProducer,
    TransactionState,
)
from librmq.clock import SystemClock
from tests.conftest import SlowBudget
from tests.programs import Fork
from tests.wire.stub import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.skipif("sys.platform != 'linux'", reason="only there peers append")]

CLOCK: Final = SystemClock()
MEMBERS: Final = 3
ROUND_S: Final = 4.0
"""How long the members of a round work; at an interval of checks of a second the owner stood still within that time."""
CHECKED: Final = BrokerConfig(transactions=TransactionConfig(timeout_s=1, interval_s=1))


def outcome_of(body: bytes) -> TransactionState:
    """Return how the transaction of a message ends at each process."""
    return TransactionState.COMMIT if crc32(body) % 2 else TransactionState.ROLLBACK


def work(path: Path, name: str, answers: Path, seed: int) -> None:
    """Work for the time of a round, and write a line for each message whose transaction was ended as it says."""
    rng = random.Random(f"{seed} {name}")
    lines = os.open(answers, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def decide(message: Message, _: object) -> TransactionState:
        return rng.choice((outcome_of(message.body), TransactionState.UNKNOWN))

    def consume(message: DeliveredMessage) -> None:
        if rng.random() < 0.02:
            raise ValueError("comes again")

    end_s = CLOCK.monotonic() + ROUND_S
    with (
        librmq.share(path, CHECKED, wait=60, timeout=10) as shared,
        Producer(shared, "shop", timeout=20) as shop,
        TransactionProducer(shared, "bank", lambda half: outcome_of(half.body), execute=decide, timeout=20) as bank,
    ):
        consumer = PushConsumer(shared, "billing", consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders", consume)
        consumer.start()
        number = 0
        while CLOCK.monotonic() < end_s:
            number += 1
            body = f"{name} {number}"
            with suppress(RmqError):  # the owner was killed
                if rng.random() < 0.5:
                    state = bank.send_in_transaction(Message("orders", body.encode())).state.name
                else:
                    shop.send("orders", body.encode())
                    state = "SENT"
                os.write(lines, f"{state} {body}\n".encode())
        consumer.shutdown()


def run(folder: Path, seed: int) -> Counter[str]:
    """Let members work, kill some, and return what was counted."""
    rng = random.Random(seed)
    is_killed = rng.random() < 0.5
    members = [Fork(work, folder / "store", f"w{number}", folder / f"w{number}.txt", seed) for number in range(MEMBERS)]
    try:
        if is_killed:
            wait_until(lambda: (folder / "w0.txt").exists(), "a member works")
            killed = rng.choice(members)
            assert killed.process.pid is not None
            os.kill(killed.process.pid, signal.SIGKILL)
        for member in members:
            member.process.join(120)
            assert member.process.exitcode in (0, -signal.SIGKILL), f"it stands still: {member.process.exitcode}"
    finally:
        for member in members:
            member.__exit__()
    said = {
        line.split(" ", 1)[1]: line.split(" ", 1)[0]
        for file in folder.glob("*.txt")
        for line in file.read_text("utf-8").splitlines()
    }
    with MessageStore.open(folder / "store", read_only=True) as store:
        stored = {message.body.decode() for message in store.topic_messages("orders")}
    # A commit that a killed owner has not got waits for the next check.
    acknowledged = ("SENT",) if is_killed else ("SENT", "COMMIT")
    kept = {body for body, state in said.items() if state in acknowledged}
    assert kept <= stored, f"acknowledged, and lost: {sorted(kept - stored)[:10]}"
    undone = {body for body, state in said.items() if state == "ROLLBACK"}
    assert not undone & stored, f"rolled back, and there: {sorted(undone & stored)[:10]}"
    return Counter(said.values())


def test_storms_of_transactions_in_a_share(
    tmp_path: Path, slow_budget: SlowBudget, figure: Callable[[str], None]
) -> None:
    """No process stands still, nothing committed is lost, nothing rolled back is there."""
    counts: Counter[str] = Counter()
    for seed in slow_budget.rounds(100, "storms of transactions in a share", at_least=1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        counts += run(folder, seed)
    figure("storms: " + ", ".join(f"{count:,} {state}" for state, count in sorted(counts.items())))
