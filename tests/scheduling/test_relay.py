"""Delivery at any time by delay levels: number of hops, lateness, and the proxy that forwards messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from librmq.clock import ManualClock
from librmq.delay import DelayConfig, DelaySchedule
from librmq.errors import ConfigError, DiskFullError, MessageIllegalError, StoreClosedError
from librmq.files._memory import MemoryFiles
from librmq.message.delays import DEFAULT_LEVELS, DelayLevels
from librmq.message.message import Message, StoredMessage
from librmq.message.topics import SystemTopic
from librmq.scheduling.relay import HopProxy, best_level, send_at
from librmq.store import MessageStore
from librmq.store.format.broker_tables import BrokerTables
from tests.stores import ROOT, SMALL, START_MS, died

HOUR = 3_600_000


def hops(delay_ms: int, levels: DelayLevels = DEFAULT_LEVELS) -> list[int]:
    """Return the delays of the levels that a message takes, in milliseconds."""
    delays = []
    while delay_ms > 0:
        delays.append(levels.delay_ms(best_level(delay_ms, levels)))
        delay_ms -= delays[-1]
    return delays


@pytest.mark.parametrize(
    ("delay_ms", "number", "overshoot"),
    [(0, 0, 0), (1, 1, 999), (1_001, 2, 999), (59_999, 9, 1), (60_000, 1, 0), (7_199_999, 13, 1),
     (10 * HOUR + 1_000, 6, 0), (365 * 24 * HOUR, 365 * 12, 0)],
)  # fmt: skip
def test_hops_and_overshoot(delay_ms: int, number: int, overshoot: int) -> None:
    assert (len(hops(delay_ms)), sum(hops(delay_ms)) - delay_ms) == (number, overshoot)


levels = st.builds(DelayLevels, st.lists(st.integers(0, 10**6), min_size=1, max_size=8).filter(any).map(tuple))


@given(delay_ms=st.integers(1, 2 * 10**6), levels=levels)
def test_hops_are_late_by_less_than_the_shortest_level(delay_ms: int, levels: DelayLevels) -> None:
    shortest = min(delay for delay in levels.delays_ms if delay)
    assume(delay_ms < 2_000 * shortest)  # with short levels there are too many hops to count
    assert 0 <= sum(hops(delay_ms, levels)) - delay_ms < shortest


def test_levels_that_do_not_wait() -> None:
    with pytest.raises(ConfigError):
        best_level(5, DelayLevels((0, 0)))
    with pytest.raises(ConfigError):
        best_level(5, DelayLevels(()))
    assert best_level(5, DelayLevels((10, 0, 3))) == 3


def test_of_equal_levels_the_first_is_taken() -> None:
    assert best_level(5_000, DelayLevels((1_000, 5_000, 5_000))) == 2


class Carried:
    """A store in memory with a schedule and a proxy."""

    def __init__(self, files: MemoryFiles | None = None, at_ms: int = START_MS) -> None:
        self.files = files or MemoryFiles()
        self.clock = ManualClock(at_ms)
        self.store = MessageStore.open(ROOT, SMALL, files=self.files, clock=self.clock)
        self.tables = BrokerTables.open(f"{ROOT}/config", files=self.files)
        self.schedule = DelaySchedule(self.store, self.tables, at_ms, DelayConfig(first_look_s=0, save_every_s=None))
        self.told: list[int] = []
        self.proxy = HopProxy(
            self.store, self.tables, delivered=lambda message, result: self.told.append(result.queue_offset)
        )

    def send(self, target_ms: int, body: bytes = b"x", **fields: Any) -> None:
        message = Message("T", body, tags="t", unique_key="U", flag=3)
        self.store.append(send_at(message, START_MS + target_ms, 2), **fields)

    def pass_to(self, at_ms: int) -> None:
        until = START_MS + at_ms
        while True:
            self.proxy.run_due(self.clock.now_ms())
            due = self.schedule.run_due(self.clock.now_ms())
            if self.store.read(SystemTopic.HOP, 0, self.proxy.next_offset).messages:
                continue
            if due is None or due > until:
                break
            self.clock.move_to(due)
        self.clock.move_to(until)

    def arrived(self) -> list[StoredMessage]:
        return [message for message in self.store if message.topic == "T"]


def test_a_message_is_carried_to_its_time() -> None:
    carried = Carried()
    carried.send(3 * HOUR + 61_250, born_timestamp_ms=5)
    carried.pass_to(4 * HOUR)
    (message,) = carried.arrived()
    assert 0 <= message.store_timestamp_ms - START_MS - (3 * HOUR + 61_250) < 1_100
    assert (message.queue_id, message.body, message.flag, message.born_timestamp_ms) == (2, b"x", 3, 5)
    assert message.properties == {"TAGS": "t", "UNIQ_KEY": "U"}
    assert sum(message.topic == SystemTopic.SCHEDULE for message in carried.store) == 5  # 2 h, 1 h, 1 min, 1 s, 1 s
    assert carried.told == [0]


def test_due_messages_arrive_immediately() -> None:
    carried = Carried()
    carried.send(-5)
    carried.pass_to(0)
    assert len(carried.arrived()) == 1


def test_a_crash_on_the_way_loses_nothing_and_is_not_early() -> None:
    carried = Carried()
    carried.send(90_000)
    carried.pass_to(30_000)
    again = Carried(died(carried.files), START_MS + 30_000)
    again.pass_to(200_000)
    times = [message.store_timestamp_ms - START_MS for message in again.arrived()]
    assert times
    assert min(times) >= 90_000


def test_a_saved_progress_repeats_nothing() -> None:
    carried = Carried()
    carried.send(90_000)
    carried.pass_to(30_000)
    carried.schedule.save(0)
    carried.proxy.save()
    carried.proxy.save()
    carried.tables.persist(0)
    again = Carried(died(carried.files), START_MS + 30_000)
    again.pass_to(200_000)
    assert len(again.arrived()) == 1


@pytest.mark.parametrize(
    "changes",
    [{"SCHEDULE_TARGET_MS": "x"}, {"SCHEDULE_TARGET_QID": "-1"}, {"SCHEDULE_TARGET_QID": "q"},
     {"SCHEDULE_TARGET_TOPIC": "a/b"}, {"SCHEDULE_TARGET_TOPIC": SystemTopic.HOP}],
)  # fmt: skip
def test_messages_without_a_destination_are_dropped(changes: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    carried = Carried()
    message = send_at(Message("T", b"bad"), START_MS)
    message.properties |= changes
    carried.store.append(message)
    carried.send(0)
    carried.pass_to(0)
    assert [message.body for message in carried.arrived()] == [b"x"]
    assert "queue offset 0, physical offset 0 is dropped" in caplog.text


def test_a_full_disk_stops_it_for_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    carried = Carried()
    carried.send(0, b"first")
    carried.send(0, b"second")
    again, count = carried.store.copies.append_again, 0

    def refuse(*arguments: Any, **fields: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise DiskFullError("full")
        return again(*arguments, **fields)

    monkeypatch.setattr(carried.store.copies, "append_again", refuse)
    assert carried.proxy.run_due(START_MS) == START_MS + 10_000
    assert "the relay: sending on fails; next try in 10000 ms: full" in caplog.text
    assert [message.body for message in carried.arrived()] == [b"first"]
    carried.proxy.run_due(START_MS + 10_000)
    assert [message.body for message in carried.arrived()] == [b"first", b"second"]
    carried.store.close()
    with pytest.raises(StoreClosedError):
        carried.proxy.run_due(START_MS + 20_000)


def test_messages_that_cannot_be_carried() -> None:
    with pytest.raises(MessageIllegalError):
        send_at(Message("a/b", b""), 0)
    with pytest.raises(MessageIllegalError, match="delay level"):
        send_at(Message("T", b"", delay_level=1), 0)


def test_the_default_levels_are_those_of_4_9() -> None:
    assert best_level(30 * 60_000) == 16
    assert DEFAULT_LEVELS.delay_ms(16) == 30 * 60_000
