"""Very many timers with random times, over kills: all are delivered, in order of time, and none early."""

from __future__ import annotations

import itertools
import random

import pytest

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.files._memory import MemoryFiles
from librmq.message.message import Message
from librmq.scheduling.timer import Timers
from librmq.scheduling.timer_config import TimerConfig
from librmq.store import MessageStore
from tests.bytime import put_timed
from tests.conftest import SlowBudget
from tests.stores import ROOT, START_MS, died

WHEEL = TimerConfig(
    slots_total=4_000, timer_roll_window_slot=3_000, timer_log_file_size=1 << 20, timer_max_delay_sec=10_000
)
STORE = StoreConfig(commitlog_file_size=4 << 20, max_hash_slot_num=1_000, max_index_num=100_000)


def check(seed: int, count: int, kills: int) -> None:
    rng = random.Random(seed)
    files, clock = MemoryFiles(), ManualClock(START_MS)
    store = MessageStore.open(ROOT, STORE, files=files, clock=clock)
    timers = Timers(store, WHEEL)
    due: dict[int, int] = {}
    killed_at = sorted(rng.randrange(count) for _ in range(kills))
    for number in range(count):
        seconds = rng.randint(1, 6_000)
        message = Message("T", b"%d" % number)
        message.properties["TIMER_DELAY_SEC"] = str(seconds)
        put_timed(timers, message)
        due[number] = clock.now_ms() + 1000 * seconds
        if rng.random() < 0.02:  # let time pass from one due slot to the next
            until = clock.now_ms() + rng.randrange(1, 4_000)
            while (at := timers.run_due(clock.now_ms())) is not None and at <= until:
                clock.move_to(max(at, clock.now_ms()))
            clock.move_to(until)
        while killed_at and killed_at[0] == number:
            killed_at.pop(0)
            files = died(files)
            clock.advance(ms=rng.choice([0, 1, 5_000]))
            store = MessageStore.open(ROOT, STORE, files=files, clock=clock)
            timers = Timers(store, WHEEL)
    while (at := timers.run_due(clock.now_ms())) is not None:
        clock.move_to(max(at, clock.now_ms()))
    first: dict[int, int] = {}
    order = []
    for delivered in store:
        if delivered.topic == "T":
            number = int(delivered.body)
            assert delivered.store_timestamp_ms >= due[number]
            if number not in first:
                first[number] = delivered.store_timestamp_ms
                order.append(due[number])
    assert len(first) == count
    if not kills:  # after a kill, overdue messages are delivered immediately
        assert all(at - due[number] <= 2_000 for number, at in first.items())
        assert all(later - earlier > -2_000 for earlier, later in itertools.pairwise(order))
    store.close()


@pytest.mark.slow
def test_very_many_timers(slow_budget: SlowBudget) -> None:
    for number in slow_budget.rounds(200, "rounds of 5,000 timers over kills", at_least=2):
        check(number, 5_000, number % 5)
