"""Owners and writers of a shared store are killed, stopped and closed while all of them append, each by itself."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple
from zlib import crc32

import pytest

import librmq
from librmq import (
    BrokerConfig,
    ConsumeFrom,
    Message,
    MessageStore,
    Producer,
    PushConsumer,
    RmqError,
    StoreConfig,
    TransactionConfig,
    TransactionProducer,
    TransactionState,
)
from librmq.clock import SystemClock
from librmq.store import verify
from librmq.store.peer_appends import PeerAppender
from tests.conftest import SlowBudget
from tests.programs import Fork

pytestmark = [pytest.mark.slow, pytest.mark.skipif("sys.platform != 'linux'", reason="only there peers append")]

CLOCK: Final = SystemClock()
MEMBERS: Final = 4
KILLS: Final = 20
"""Kills of a round."""
LIMIT_S: Final = 10.0
"""Time limit of a send."""
LATE_S: Final = 10.0
"""A send may end so long after its limit, on a machine that is busy with other tests."""
CHECKED: Final = BrokerConfig(transactions=TransactionConfig(timeout_s=1, interval_s=1))


class Round(NamedTuple):
    """What happens in a round, as drawn from its seed."""

    seed: int
    store: StoreConfig
    makes_topics: bool
    stops: bool
    closes: bool
    sends_together: bool
    pays: bool
    """Whether members consume, and send in transactions that they end at full speed, or leave to the owner's checks."""

    @classmethod
    def draw(cls, seed: int) -> Round:
        rng = random.Random(f"kills {seed}")
        size = rng.choice((32 << 10, 128 << 10, 1 << 20, 16 << 20))
        settings: dict[str, Any] = {"max_message_size": 8 << 10, "commitlog_file_size": size}
        if rng.random() < 0.15:
            settings["durability"] = "sync"
        draws = (rng.random() < chance for chance in (0.5, 0.4, 0.5, 0.4, 0.5))
        return cls(seed, StoreConfig.tiny(**settings), *draws)


def work(path: Path, name: str, answers: Path, settings: Round) -> None:
    """Send until SIGTERM, and write a line for each answer: the number of the message, its place, and the seconds."""
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ending.append(number))
    rng = random.Random(f"{settings.seed} {name}")
    alone, append_all = [0], PeerAppender.append_all

    def counted(self: PeerAppender, records: Any, wait_s: float, results: list[Any]) -> None:
        append_all(self, records, wait_s, results)
        alone[0] += len(results)

    PeerAppender.append_all = counted  # type: ignore[method-assign]
    lines = os.open(answers, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def decide(message: Message, _: object) -> TransactionState:
        return rng.choice((decision_of(message.body), TransactionState.UNKNOWN))

    with (
        librmq.share(path, CHECKED, wait=60, timeout=5, store_config=settings.store) as shared,
        Producer(shared, "shop", timeout=LIMIT_S, retries=0) as producer,
        TransactionProducer(shared, "bank", lambda half: decision_of(half.body), execute=decide) as bank,
        ExitStack() as stack,
    ):
        if settings.pays:
            consumer = PushConsumer(shared, "billing", consume_from=ConsumeFrom.FIRST)
            consumer.subscribe("orders", lambda message: None)
            stack.enter_context(consumer)
        number = 0
        while not ending:
            number += 1
            begin_s, before, numbers = CLOCK.monotonic(), alone[0], range(number, number + 1)
            outcomes: list[Any] = []
            topic = "orders" if not settings.makes_topics or rng.random() < 0.9 else f"beside{rng.randrange(6)}"
            try:
                if topic != "orders" and rng.random() < 0.1:
                    shared.delete_topic(topic)
                elif rng.random() < 0.02:
                    producer.send_batch([Message("orders", b"") for _ in range(3)])
                elif settings.pays and rng.random() < 0.4:
                    outcomes = [bank.send_in_transaction(Message("paid", b"%s %d" % (name.encode(), number))).state]
                elif settings.sends_together and rng.random() < 0.5:
                    numbers = range(number, number + rng.choice((1, 10, 200)))
                    number = numbers[-1]
                    outcomes = asyncio.run(_send_together(producer, name, numbers))
                else:
                    body = b"%s %d " % (name.encode(), number) + rng.randbytes(rng.choice((10, 100, 1000)))
                    sent = producer.send(topic, body, keys=f"{name}-{number}", tags=rng.choice(("a", "b")))
                    outcomes = [sent] if topic == "orders" else []
            except RmqError as error:
                outcomes = [error]
            seconds, appended = CLOCK.monotonic() - begin_s, alone[0] - before
            for sent_number, outcome in zip(numbers, outcomes, strict=False):
                line = f"{seconds:.3f} {_line(sent_number, outcome)} {appended}\n"
                os.write(lines, line.encode())
                appended = 0
            if number % 64 == 0:
                time.sleep(0.002)  # noqa: TID251 (a writer that pauses now and then)


async def _send_together(producer: Producer, name: str, numbers: range) -> list[Any]:
    sends = (producer.send_async("orders", b"%s %d x" % (name.encode(), number)) for number in numbers)
    return await asyncio.gather(*sends, return_exceptions=True)


def decision_of(body: bytes) -> TransactionState:
    return TransactionState.COMMIT if crc32(body) % 2 else TransactionState.ROLLBACK


def _line(number: int, outcome: Any) -> str:
    if isinstance(outcome, TransactionState):
        return f"{outcome.name} {number}"
    if isinstance(outcome, RmqError):
        return f"refused {number} {outcome}"
    return f"sent {number} {outcome.queue.queue_id} {outcome.queue_offset}"


class Killed:
    """A store whose members come and go."""

    def __init__(self, folder: Path, settings: Round) -> None:
        self.folder, self.path, self.settings = folder, folder / "store", settings
        self.rng = random.Random(f"killed {settings.seed}")
        self.counts: Counter[str] = Counter()
        self._members: list[Fork] = []
        self._leaving: list[Fork] = []
        self._count = 0

    def start(self) -> None:
        """Let a member begin."""
        name = f"w{self._count}"
        self._count += 1
        self._members.append(Fork(work, self.path, name, self.folder / f"{name}.txt", self.settings))

    def change(self) -> None:
        """Kill, stop or close a member, and begin another."""
        member = self.rng.choice(self._members)
        assert member.process.pid is not None
        if self.settings.closes and self.rng.random() < 0.15:
            self.counts["closed"] += 1
            os.kill(member.process.pid, signal.SIGTERM)
            self._leaving.append(member)
        else:
            if self.settings.stops and self.rng.random() < 0.2:
                self.counts["stopped"] += 1
                os.kill(member.process.pid, signal.SIGSTOP)
                _pause(self.rng.uniform(0.02, 0.3))
                if self.rng.random() < 0.5:
                    os.kill(member.process.pid, signal.SIGCONT)
                    return
            self.counts["killed"] += 1
            member.process.kill()
            member.__exit__()
        self._members.remove(member)
        self.start()

    def run(self) -> Counter[str]:
        """Kill members, let the others end, judge what they have stored, and return what was counted."""
        try:
            for _ in range(MEMBERS):
                self.start()
            while not any(self.folder.glob("*.txt")):
                _pause(0.01)
            while self.counts["killed"] < KILLS:
                _pause(self.rng.uniform(0.005, 0.12))
                self.change()
            self._leaving += self._members
            for member in self._members:
                assert member.process.pid is not None
                os.kill(member.process.pid, signal.SIGTERM)
            for member in self._leaving:
                member.process.join(90)
                # A member that has not set its handler yet ends by the signal.
                assert member.process.exitcode in (0, -signal.SIGTERM), f"ended by {member.process.exitcode}"
        finally:
            for member in {*self._members, *self._leaving}:
                with suppress(ValueError):
                    member.__exit__()
        self._judge()
        return self.counts

    def _judge(self) -> None:
        """Compare the answers with the store.

        Raises:
            AssertionError: A promise is broken.
        """
        acknowledged: dict[tuple[str, int], tuple[int, int]] = {}
        undone: set[bytes] = set()
        for file in self.folder.glob("*.txt"):
            for line in file.read_text("utf-8").splitlines():
                seconds, kind, number, *place = line.split(" ", 5)
                assert float(seconds) <= LIMIT_S + LATE_S, line
                self.counts[kind] += 1
                if kind == "ROLLBACK":
                    undone.add(b"%s %s" % (file.stem.encode(), number.encode()))
                elif kind == "sent":
                    acknowledged[file.stem, int(number)] = int(place[0]), int(place[1])
                    self.counts["alone"] += int(place[2])
        verdict = verify(str(self.path))
        assert verdict.sound, verdict.damage
        stored: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        last: dict[tuple[str, int], int] = {}
        with MessageStore.open(self.path, read_only=True) as store:
            kept = undone.intersection(message.body for message in store.topic_messages("paid"))
            assert not kept, f"rolled back, and there: {sorted(kept)[:10]}"
            for queue_id in range(8):
                begin, end = store.queue_range("orders", queue_id)
                messages = [*store.messages("orders", queue_id)]
                assert [message.queue_offset for message in messages] == [*range(begin, end)]
                for message in messages:
                    if message.body:
                        words = message.body.split(b" ", 2)
                        writer, sent = words[0].decode(), int(words[1])
                        stored[writer, sent].append((queue_id, message.queue_offset))
                        is_late = sent < last.get((writer, queue_id), 0)
                        assert self.settings.sends_together or not is_late, f"{writer}: message {sent} comes late"
                        last[writer, queue_id] = sent
        lost = [name for name, place in acknowledged.items() if place not in stored[name]]
        assert not lost, f"acknowledged, and lost: {lost[:10]}"
        doubled = [name for name, places in stored.items() if len(places) > 1]
        assert len(doubled) <= self.counts["killed"] + self.counts["refused"], f"doubled: {doubled[:10]}"


def _pause(seconds: float) -> None:
    time.sleep(seconds)  # noqa: TID251 (members do what they do in real time)


def test_kills_of_owners_and_writers_lose_nothing(
    tmp_path: Path, slow_budget: SlowBudget, figure: Callable[[str], None]
) -> None:
    """No acknowledged message is lost, none is twice in the store but for one unanswered send a kill."""
    counts: Counter[str] = Counter()
    for seed in slow_budget.rounds(10_000 // KILLS, f"times {KILLS} kills of owners and writers", at_least=1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        counts += Killed(folder, Round.draw(seed)).run()
    figure("owners and writers: " + ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items())))
