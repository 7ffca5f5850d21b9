"""Waiting messages of a store, read from its files, with and without a running writer."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from librmq.cli import main
from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.delay import DelayConfig, DelaySchedule
from librmq.diagnosis import StoreView, story
from librmq.diagnosis.pending import PendingMessage, pending_messages
from librmq.errors import CorruptionError
from librmq.files._memory import MemoryFiles
from librmq.message.message import Message
from librmq.message.properties import tags_code
from librmq.message.topics import SystemTopic
from librmq.scheduling.timer import Timers
from librmq.scheduling.timer_config import TimerConfig
from librmq.store import MessageStore
from librmq.store.format.broker_tables import BrokerTables
from librmq.txn import TransactionConfig, Transactions
from tests.bytime import put_timed
from tests.reference import existing
from tests.stores import ROOT, SMALL, SMALL_EXT, START_MS

SMALL_WHEEL = TimerConfig(slots_total=600, timer_log_file_size=1024, timer_roll_window_slot=100)


class Store:
    """A store in memory with waiting messages of all kinds."""

    def __init__(self, config: StoreConfig = SMALL) -> None:
        self.files = MemoryFiles()
        self.clock = ManualClock(START_MS)
        self.store = MessageStore.open(ROOT, config, files=self.files, clock=self.clock)
        self.tables = BrokerTables.open(f"{ROOT}/config", files=self.files)
        self.transactions = Transactions(self.store, self.tables)
        self.timers = Timers(self.store, SMALL_WHEEL)

    def half(self, number: int, **properties: str) -> tuple[int, int, str]:
        message = Message("H", b"%d" % number, unique_key=f"H{number}")
        message.properties |= {"PGROUP": "P", "TRAN_MSG": "true", **properties}
        result = self.transactions.prepare(message, 0)
        return result.physical_offset, result.queue_offset, "P"

    def delay(self, level: int, topic: str = "D") -> int:
        return self.store.append(Message(topic, b"x", delay_level=level, unique_key="D")).physical_offset

    def timer(self, seconds: int, key: str = "K", **properties: str) -> int:
        message = Message("T", b"x", unique_key=key)
        message.properties |= {"TIMER_DELAY_SEC": str(seconds), **properties}
        return put_timed(self.timers, message).physical_offset

    def pending(self, **only: str) -> list[PendingMessage]:
        return list(pending_messages(self.store, self.tables, **only))  # type: ignore[arg-type]


def test_nothing_waits() -> None:
    store = Store()
    store.store.append(Message("T", b"x"))
    assert store.pending() == []


def test_halves() -> None:
    store = Store()
    places = [store.half(number) for number in range(4)]
    places.append(store.half(4, CHECK_IMMUNITY_TIME_IN_SECONDS="60"))
    store.transactions.commit(*places[1])
    store.transactions.rollback(*places[3])
    expected = [
        PendingMessage(
            "half", "H", "H", START_MS + (60_000 if number == 4 else 6_000), f"H{number}", places[number][0], 0
        )
        for number in (0, 2, 4)
    ]
    assert store.pending() == expected
    store.clock.advance(ms=10_000)
    store.transactions.check.run_pass(store.clock.now_ms(), TransactionConfig())
    assert [(one.unique_key, one.checks) for one in store.pending()] == [("H0", 1), ("H2", 1), ("H4", 1)]
    assert all(one.physical_offset > places[4][0] for one in store.pending())
    store.transactions.commit(*places[2])  # by its coordinates before the check
    assert [one.unique_key for one in store.pending()] == ["H0", "H4"]


@pytest.mark.parametrize("config", [SMALL, SMALL_EXT])
def test_delays_in_the_order_of_their_times(config: StoreConfig) -> None:
    store = Store(config)
    places = {level: store.delay(level) for level in (5, 1, 3, 2)}
    due = {1: 1_000, 2: 5_000, 3: 10_000, 5: 60_000}
    expected = [
        PendingMessage("delay", "D", "D", START_MS + due[level], "D", places[level], 0) for level in (1, 2, 3, 5)
    ]
    assert store.pending() == expected
    schedule = DelaySchedule(store.store, store.tables, START_MS, DelayConfig(first_look_s=0, save_every_s=0))
    store.clock.advance(ms=5_000)
    schedule.run_due(store.clock.now_ms())
    assert store.pending() == expected[2:]


def test_a_delay_whose_entry_lost_its_time() -> None:
    store = Store()
    store.store.append(Message("D", b"x", tags="t", delay_level=2))
    queue = store.store.queue(SystemTopic.SCHEDULE, 1)
    assert queue is not None
    place, size, _ = queue.entry(0) or (0, 0, 0)
    queue.truncate_to(0)
    queue.append(0, place, size, tags_code("t"))
    assert [one.due_ms for one in store.pending()] == [START_MS + 5_000]


@pytest.mark.parametrize("bit", range(0, 8 * len(SystemTopic.TIMER), 13))
def test_a_flipped_bit_in_the_topic_of_a_timer_is_an_error(bit: int) -> None:
    """Its time is among the properties that only a record of the timer's topic has."""
    store = Store()
    place = store.timer(30)
    store.clock.advance(seconds=1)
    store.timers.run_due(store.clock.now_ms())
    store.timers.save()
    message = store.store.message_at(place)
    assert message is not None
    at = place + message.frame[2] + bit // 8
    store.store.log.patch(at, bytes([store.store.log.data_at(at, 1)[0] ^ 1 << bit % 8]))
    with pytest.raises(CorruptionError, match=f"expected one of {SystemTopic.TIMER} at {place}"):
        store.pending(kind="timer")


def test_timers_in_the_wheel_and_before_it() -> None:
    store = Store()
    store.clock.advance(ms=500)
    places = {seconds: store.timer(seconds, f"K{seconds}") for seconds in (30, 10, 300, 20)}
    due = {seconds: START_MS + 500 + 1000 * seconds for seconds in places}
    assert [(one.due_ms, one.physical_offset) for one in store.pending()] == [
        (due[seconds], places[seconds]) for seconds in (10, 20, 30, 300)
    ]  # none is in the wheel yet
    store.timers.run_due(store.clock.now_ms())
    store.timers.save()
    places[5] = store.timer(5, "K5")
    expected = [
        PendingMessage("timer", "T", "T", due.get(seconds, START_MS + 5_500), f"K{seconds}", places[seconds], 0)
        for seconds in (5, 10, 20, 30, 300)
    ]
    assert store.pending() == expected
    store.clock.advance(ms=21_000)
    store.timers.run_due(store.clock.now_ms())
    store.timers.save()
    assert [one.unique_key for one in store.pending()] == ["K30", "K300"]
    for _ in range(4):  # moved on from slot to slot
        store.clock.advance(ms=100_000)
        store.timers.run_due(store.clock.now_ms())
    store.timers.save()
    assert store.pending() == []


@pytest.mark.parametrize("key", ["T+gone", "gone"])
def test_timers_that_are_deleted(key: str) -> None:
    """With the topic in the key as by a broker of 5.3.3, or without it as by later ones."""
    store = Store()
    store.timer(10, "gone")
    store.timer(10, "stays")
    store.timer(10, "d", TIMER_DEL_UNIQKEY=key)
    store.timers.run_due(store.clock.now_ms())
    store.timers.save()
    assert [one.unique_key for one in store.pending()] == ["stays"]


def test_of_one_kind_or_topic() -> None:
    store = Store()
    store.half(0)
    store.delay(1)
    store.delay(1, "E")
    store.timer(10)
    assert [one.kind for one in store.pending()] == ["half", "delay", "delay", "timer"]
    assert [one.kind for one in store.pending(kind="timer")] == ["timer"]
    assert [one.topic for one in store.pending(topic="E")] == ["E"]


def test_retries_with_the_topic_they_were_sent_to() -> None:
    store = Store()
    retry = Message("%RETRY%G", b"x", delay_level=3, unique_key="R")
    retry.properties["RETRY_TOPIC"] = "D"
    store.store.append(retry)
    store.delay(1)
    found = [(one.kind, one.topic, one.target_topic) for one in store.pending()]
    assert found == [("delay", "D", "D"), ("retry", "D", "%RETRY%G")]
    assert [one.unique_key for one in store.pending(kind="retry")] == ["R"]


def test_halves_that_an_op_of_5_ends_do_not_wait() -> None:
    store = Store()
    for number in range(5):
        store.half(number)
    store.store.append(Message(SystemTopic.OP, b"0,1,3,", tags="d"))
    assert [one.unique_key for one in store.pending()] == ["H2", "H4"]
    assert [one.event for one in story(StoreView.over(store.store), "H3")] == ["half", "rolled_back"]


def test_halves_of_a_broker_of_5_that_was_killed(tmp_path: Path) -> None:
    """It wrote the ends of three commits and three rollbacks in one op message."""
    with tarfile.open(existing("store-5.3.3/tx3.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    (path,) = (found.parent for found in tmp_path.rglob("commitlog"))
    with StoreView.open(path) as view:
        assert len(list(pending_messages(view.store, kind="half"))) == 3


def test_a_copy_of_a_half_waits_in_its_place() -> None:
    """A killed broker has put halves back, and not saved the progress of its check."""
    store = Store()
    places = [store.half(number) for number in range(3)]
    copies = []
    for _ in range(4):
        store.clock.advance(ms=60_000)
        found = store.transactions.check.run_pass(store.clock.now_ms()).questions
        copies = [one.half for one in found]
    store.tables.set_consumer_offset(SystemTopic.HALF, "CID_RMQ_SYS_TRANS", 0, 0)
    assert [(one.unique_key, one.checks) for one in store.pending()] == [("H0", 4), ("H1", 4), ("H2", 4)]
    store.store.append(Message(SystemTopic.OP, b"%d" % copies[1].queue_offset, tags="d"))  # as 4.9 and 5.x end a copy
    store.store.append(Message(SystemTopic.OP, b"%d" % places[2][1], tags="d"))
    assert [one.unique_key for one in store.pending()] == ["H0"]


def test_given_up_halves_that_an_op_of_5_ends() -> None:
    store = Store()
    for number in range(3):
        store.half(number)
    for _ in range(2):
        store.clock.advance(ms=60_000)
        store.transactions.check.run_pass(store.clock.now_ms(), TransactionConfig(check_max=1))
    store.store.append(Message(SystemTopic.OP, b"0,2,", tags="d"))
    assert [one.unique_key for one in store.pending(kind="given_up")] == ["H1"]


def test_given_up_halves_until_they_are_decided() -> None:
    store = Store()
    places = [store.half(number) for number in range(3)]
    store.clock.advance(ms=10_000)
    for _ in range(3):
        store.transactions.check.run_pass(store.clock.now_ms(), TransactionConfig(check_max=1))
        store.clock.advance(ms=60_000)
    given_up = [(one.unique_key, one.topic, one.due_ms, one.checks) for one in store.pending(kind="given_up")]
    assert given_up == [(f"H{number}", "H", None, 1) for number in range(3)]
    store.transactions.commit(*places[1])
    assert [one.unique_key for one in store.pending()] == ["H0", "H2"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock(START_MS)
    with MessageStore.open(tmp_path / "store", StoreConfig.tiny(), clock=clock) as store:
        place = store.append(Message("D", b"x", delay_level=1, unique_key="U")).physical_offset
        store.append(Message(SystemTopic.OP, b"0", tags="d"))
        assert main(["pending", str(tmp_path / "store")]) == 0  # while the writer is running
        line = (
            f'{{"kind":"delay","topic":"D","target_topic":"D","due_ms":{START_MS + 1000},"unique_key":"U",'
            f'"physical_offset":{place},"checks":0}}\n'
        )
        assert capsys.readouterr().out == line
    assert main(["pending", str(tmp_path / "store"), "--kind", "half"]) == 0
    assert main(["timers", str(tmp_path / "store")]) == 0
    assert capsys.readouterr().out == ""
    assert main(["pending", str(tmp_path / "none")]) == 2
