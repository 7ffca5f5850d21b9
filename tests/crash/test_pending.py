"""Pending transactions and delayed messages, with power failures and kills at any write."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from librmq.clock import ManualClock
from librmq.delay import DelayConfig, DelaySchedule
from librmq.errors import TransactionRefusedError
from librmq.files._memory import MemoryFiles
from librmq.files.interface import Files
from librmq.message.message import Message
from librmq.scheduling.timer import Timers
from librmq.scheduling.timer_config import TimerConfig
from librmq.store import MessageStore
from librmq.store.format.broker_tables import BrokerTables
from librmq.txn import CheckBack, TransactionConfig, Transactions
from tests.bytime import put_timed
from tests.conftest import SlowBudget
from tests.file_seams import CrashImages, RecordingFiles
from tests.stores import ROOT, SMALL, START_MS, apply, died

SYNC = replace(SMALL, durability="sync")
WHEEL = TimerConfig(slots_total=90, timer_roll_window_slot=20, timer_log_file_size=400, save_every_s=3)


def outcome(number: int) -> str:
    """Return the outcome of a message's local transaction. Its producer always knows it."""
    return "commit" if number % 3 else "rollback"


@dataclass
class Broker:
    """The transactions and delays of one store, and producers that answer checks."""

    files: Files
    clock: ManualClock
    answering: bool = True

    def __post_init__(self) -> None:
        self.store = MessageStore.open(ROOT, SYNC, files=self.files, clock=self.clock)
        self.tables = BrokerTables.open(f"{ROOT}/config", files=self.files)
        now = self.clock.now_ms()
        self.questions: list[CheckBack] = []
        self.transactions = Transactions(self.store, self.tables, TransactionConfig(most_at_once=2))
        self.schedule = DelaySchedule(self.store, self.tables, now, DelayConfig(save_every_s=5))
        self.timers = Timers(self.store, WHEEL)

    def prepare(self, number: int) -> tuple[int, int]:
        message = Message("T", b"%d" % number, unique_key=f"U{number}")
        message.properties |= {"TRAN_MSG": "true", "PGROUP": "P"}
        result = self.transactions.prepare(message, 0)
        return result.physical_offset, result.queue_offset

    def end(self, number: int, place: tuple[int, int]) -> None:
        (self.transactions.commit if outcome(number) == "commit" else self.transactions.rollback)(*place, "P")

    def pass_time(self, ms: int) -> None:
        until = self.clock.now_ms() + ms
        while True:
            now = self.clock.now_ms()
            steps = self.schedule.run_due, self.transactions.check.run_due, self.timers.run_due
            dues = [due for step in steps if (due := step(now)) is not None]
            self.questions += self.transactions.check.checked.questions
            while self.answering and self.questions:
                question = self.questions.pop()
                self.end(int(question.half.body), (question.half.physical_offset, question.half.queue_offset))
            if not dues or min(dues) > until:
                break
            self.clock.move_to(max(min(dues), now))
        self.clock.move_to(until)

    def counts(self, topic: str) -> Counter[int]:
        return Counter(int(message.body) for message in self.store if message.topic == topic)


@dataclass
class Life:
    """The events of a run, and the number of events after which each promise holds."""

    files: RecordingFiles
    prepared: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of a number of events, and the number of a half message acknowledged by then."""
    delayed: list[tuple[int, int]] = field(default_factory=list)
    timed: list[tuple[int, int]] = field(default_factory=list)
    ended_ms: int = 0

    def promised(self, kind: list[tuple[int, int]], crash_point: int) -> set[int]:
        return {number for events, number in kind if events <= crash_point}


def live(seed: str, steps: int = 40) -> Life:
    rng = random.Random(seed)
    life = Life(RecordingFiles())
    clock = ManualClock(START_MS)
    broker = Broker(life.files, clock)
    known: dict[int, tuple[int, int]] = {}
    for number in range(steps):
        kind = rng.random()
        if kind < 0.4:
            known[number] = broker.prepare(number)
            life.prepared.append((len(life.files.trace), number))
        elif kind < 0.6 and known:
            one = rng.choice(list(known))
            broker.end(one, known[one])
        elif kind < 0.75:
            broker.store.append(Message("D", b"%d" % number, delay_level=rng.choice([1, 2, 3])))
            life.delayed.append((len(life.files.trace), number))
        elif kind < 0.9:
            message = Message("W", b"%d" % number, unique_key=f"W{number}")
            message.properties["TIMER_DELAY_SEC"] = str(rng.choice([1, 3, 30, 100]))
            put_timed(broker.timers, message)
            life.timed.append((len(life.files.trace), number))
            broker.pass_time(0)
        elif kind < 0.97:
            broker.answering = rng.random() < 0.5
            broker.pass_time(rng.choice([100, 1_000, 7_000, 70_000]))
        else:
            broker.tables.persist(clock.now_ms())  # the tables may be saved at any time
    life.ended_ms = clock.now_ms()
    return life


def check_after(life: Life, files: Files, crash_point: int, why: Callable[[], str]) -> None:
    """Let time pass and producers answer after a crash; check that everything is decided and delivered correctly."""
    broker = Broker(files, ManualClock(life.ended_ms + 1_000))
    broker.pass_time(1_200_000)
    assert broker.transactions.check.run_due(broker.clock.now_ms()) is None, why()
    delivered, prepared = broker.counts("T"), life.promised(life.prepared, crash_point)
    assert {number for number in prepared if outcome(number) == "commit"} <= set(delivered), why()
    assert all(outcome(number) == "commit" for number in delivered), why()
    assert max(delivered.values(), default=1) == 1, why()
    timed = broker.counts("D")
    assert life.promised(life.delayed, crash_point) <= set(timed), why()
    early = [m for m in broker.store if m.topic == "D" and m.store_timestamp_ms < due_ms(broker.store, m.body)]
    assert not early, why()
    assert life.promised(life.timed, crash_point) <= set(broker.counts("W")), why()
    for message in broker.store:
        if message.topic == "W":
            born, seconds = message.born_timestamp_ms, int(message.properties["TIMER_DELAY_SEC"])
            assert message.store_timestamp_ms >= born + 1000 * seconds, why()
    broker.store.close()


def due_ms(store: MessageStore, body: bytes) -> int:
    (waiting,) = (m for m in store if m.body == body and m.topic.startswith("SCHEDULE"))
    return store.levels.deliver_timestamp_ms(int(waiting.properties["DELAY"]), waiting.store_timestamp_ms)


def check_images(seed: str, count: int) -> None:
    life = live(seed)
    images, rng = CrashImages(life.files.trace), random.Random(seed)
    for number in range(count):
        crash_point = rng.randrange(len(life.files.trace) + 1)
        image = images.image(f"{seed} {number}", crash_point)
        check_after(life, image.files(), crash_point, image.__str__)


@pytest.mark.slow
def test_pending_messages_survive_many_power_failures(slow_budget: SlowBudget) -> None:
    for number in slow_budget.rounds(200, "images of what is pending", at_least=4):
        check_images(f"slow pending {number}", 40)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_pending_messages_survive_a_kill_at_any_write(number: int) -> None:
    """At each tried event all earlier writes are there, on the device or not."""
    seed = f"kill {number}"
    life = live(seed, steps=25)
    for crash_point in range(0, len(life.files.trace) + 1, 7):
        files = MemoryFiles()
        for event in life.files.trace[:crash_point]:
            apply(files, event)
        check_after(life, files, crash_point, f"{seed} at event {crash_point}".__str__)


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("point", ["half", "decided", "final", "op", "asked", "answered", "checked"])
def test_a_kill_at_each_step(point: str, end: str) -> None:
    """Whichever step the broker has reached, the outcome is that of the local transaction."""
    number = 1 if end == "commit" else 0
    assert outcome(number) == end
    files = MemoryFiles()
    broker = Broker(files, ManualClock(START_MS), answering=False)
    place = broker.prepare(number)
    if point == "final" and end == "commit":
        append = broker.store.append

        def dies(message: Message, *args: int, **fields: int) -> object:
            if message.topic.endswith("OP_HALF_TOPIC"):
                raise KeyboardInterrupt
            return append(message, *args, **fields)  # type: ignore[arg-type]

        broker.store.append = dies  # type: ignore[method-assign, assignment]
        with pytest.raises(KeyboardInterrupt):
            broker.end(number, place)
    elif point == "op":
        broker.end(number, place)
    elif point in ("asked", "answered", "checked"):
        broker.pass_time(60_000)
        if point != "asked":
            (question,) = broker.questions
            broker.end(number, (question.half.physical_offset, question.half.queue_offset))
        if point == "checked":
            broker.pass_time(60_000)
            broker.store.flush()
            broker.tables.persist(0)
    again = Broker(died(files), ManualClock(broker.clock.now_ms()))
    again.pass_time(600_000)
    assert again.counts("T") == ({number: 1} if end == "commit" else {})
    if end == "commit":
        with pytest.raises(TransactionRefusedError):
            again.transactions.rollback(*place, "P")
    else:
        again.end(number, place)
        assert again.counts("T") == {}
