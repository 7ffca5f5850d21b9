"""The kit without exploring: time, failures, history, requested faults, and a sound store at the end."""

from __future__ import annotations

import asyncio
import gc
import json
import selectors
import sqlite3
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from librmq.broker import BrokerConfig
from librmq.cli import main
from librmq.client import CheckedMessage, TransactionProducer
from librmq.client.producer import Producer
from librmq.clock import ManualClock, SystemClock
from librmq.config import StoreConfig
from librmq.consumer import DeliveredMessage, PullConsumer, PushConsumer, SimpleConsumer
from librmq.dedup import DedupListener
from librmq.errors import (
    BrokerBusyError,
    BrokerError,
    BrokerUnreachableError,
    ConfigError,
    EndlessLoopError,
    MissingExtraError,
    NotIdleError,
    RunnerError,
    SendTimeoutError,
)
from librmq.files._memory import MemoryFiles
from librmq.idempotence import MemoryDedupStore, Outbox, OutboxSender, upgrade_tables
from librmq.listener import ReconsumeLater
from librmq.message.message import Message
from librmq.protocol import ConsumeFrom, MessageModel, Route, TransactionState
from librmq.store import MessageStore
from librmq.store.recovery._verify import verify
from librmq.testing import (
    Kit,
    NotAwaitedError,
    Process,
    ProcessDied,
    ProcessStateError,
    UndeliveredWarning,
    UnknownGroupError,
    UnsoundStoreError,
    check_history,
    explore,
)


def always_fails(message: DeliveredMessage) -> None:
    raise ValueError(f"no {message.body!r}")


# ---- the outcome of a test


def test_a_failing_charge_ends_in_dead_letters(rmq: Kit) -> None:
    rmq.consumer("billing", fail_fast=False).subscribe("orders")(always_fails)
    rmq.producer().send("orders", b"x")
    rmq.advance(hours=5)
    assert [m.body for m in rmq.dead_letters("billing")] == [b"x"]
    delivered = rmq.delivered("billing")
    assert [one.attempt for one in delivered] == list(range(17))
    assert {(one.outcome, one.topic, one.body, one.process) for one in delivered} == {
        ("failed", "orders", b"x", "billing")
    }
    assert [one.began_ms // 1000 for one in delivered[:4]] == [0, 10, 40, 100]
    assert len(rmq.retries("billing")) == 16
    assert {type(one.error) for one in delivered} == {ValueError}


def test_a_listeners_exception_fails_with_its_traceback() -> None:
    with pytest.raises(ValueError, match="no b'x'") as caught, Kit() as rmq:  # noqa: PT012
        rmq.consumer("billing").subscribe("orders")(always_fails)
        rmq.producer().send("orders", b"x")
        rmq.advance(hours=5)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "always_fails"
    assert not [frame for frame in caught.traceback[2:] if "librmq/runner" in str(frame.path)][3:]
    history = caught.value.__notes__[-1]
    assert "sends orders/0:0 b'x'" in history
    assert "failed: ValueError(\"no b'x'\")" in history


def test_requesting_a_retry_is_not_a_failure(rmq: Kit) -> None:
    times: list[int] = []

    @rmq.consumer("billing").subscribe("orders")
    def charge(message: DeliveredMessage) -> None:
        times.append(message.reconsume_times)
        if len(times) < 3:
            raise ReconsumeLater(delay_level=1)

    rmq.producer().send("orders", b"x")
    rmq.run_until_idle()
    assert times == [0]
    rmq.advance(seconds=1)
    assert times == [0, 1]
    rmq.advance(seconds=1)
    assert [one.outcome for one in rmq.delivered("billing")] == ["later", "later", "returned"]


def test_a_failure_is_logged_once_and_the_rest_continues() -> None:
    with Kit() as rmq:
        consumer = rmq.consumer("billing")
        seen: list[bytes] = []

        @consumer.subscribe("orders")
        def charge(message: DeliveredMessage) -> None:
            seen.append(message.body)
            if message.body == b"1" and len(seen) == 1:
                raise ValueError("once")

        for body in (b"1", b"2"):
            rmq.producer().send("orders", body, queue=0)
        with pytest.raises(ValueError, match="once"):
            rmq.run_until_idle()
        assert seen == [b"1"]
        rmq.advance(seconds=10)
        assert seen == [b"1", b"2", b"1"]


@pytest.mark.slow
def test_an_endless_loop_is_reported_with_its_cause() -> None:
    with pytest.raises(EndlessLoopError) as caught, Kit() as rmq:  # noqa: PT012
        for group, topic, then in (("billing", "orders", "payments"), ("shipping", "payments", "orders")):
            consumer = rmq.consumer(group)
            consumer.subscribe(topic)(lambda message, then=then: rmq.producer().send(then, b"x"))
        rmq.producer().send("orders", b"x")
        rmq.run_until_idle()
    text = str(caught.value)
    assert "billing → payments" in text
    assert "shipping → orders" in text
    assert "more" in caught.value.__notes__[-1]  # the history is truncated


def machine_time() -> datetime:
    return datetime.now(UTC)  # noqa: TID251 (code under test that knows no other clock)


def plan_each_hour(rmq: Kit, runs: list[datetime]) -> None:
    """Let a job send itself again, an hour later by the machine's clock."""

    @rmq.consumer("jobs").subscribe("hourly")
    def job(message: DeliveredMessage) -> None:
        runs.append(machine_time())
        rmq.producer().send("hourly", b"x", deliver_at=machine_time() + timedelta(hours=1))

    rmq.producer().send("hourly", b"x")


def check_moved_time(rmq: Kit) -> None:
    rmq.advance(hours=1, ms=1)  # a float of seconds has no such time
    assert machine_time() == datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=rmq.clock.now_ms())
    assert SystemClock().now_ms() == rmq.clock.now_ms()


def check_hourly_job(rmq: Kit) -> None:
    begin, runs = machine_time(), list[datetime]()
    plan_each_hour(rmq, runs)
    rmq.advance(hours=3)
    assert runs == [begin + timedelta(hours=hours) for hours in range(4)]
    check_moved_time(rmq)


def test_the_time_of_the_program_follows_the_kit() -> None:
    before_ms = SystemClock().now_ms()
    with Kit(now_ms=2_000_000_000_000, datetime_too=True) as rmq:
        check_hourly_job(rmq)
    assert before_ms <= SystemClock().now_ms() < 2_000_000_000_000
    explore(check_moved_time, runs=3, now_ms=2_000_000_000_000, datetime_too=True)
    assert SystemClock().now_ms() < 2_000_000_000_000


@pytest.mark.rmq(datetime_too=True)
def test_the_marker_lets_the_time_of_the_program_follow(rmq: Kit) -> None:
    check_moved_time(rmq)


def test_a_time_of_the_machine_is_a_warning_and_named_in_the_loop() -> None:
    def run() -> None:
        with Kit(now_ms=SystemClock().now_ms()) as rmq:
            rmq.advance(hours=2)
            plan_each_hour(rmq, [])
            rmq.run_until_idle()

    loop = pytest.raises(EndlessLoopError, match=r"jobs → hourly.*not the kit's time: give the kit datetime_too=True")
    with pytest.warns(UserWarning, match="hourly: deliver_at is past for the kit's clock.*datetime_too=True"), loop:
        run()


def test_the_time_of_the_program_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "time_machine", None)
    with pytest.raises(MissingExtraError, match=r"librmq\[datetime\]"):
        Kit(datetime_too=True)


@pytest.mark.slow
@pytest.mark.parametrize("by_test", [False, True])
def test_an_endless_loop_through_an_outbox_is_reported(by_test: bool) -> None:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect("file:loop?mode=memory&cache=shared", uri=True)

    with (  # noqa: PT012
        closing(connect()) as database,
        pytest.raises(EndlessLoopError, match=r"in a row.*billing → orders"),
        Kit() as rmq,
    ):
        upgrade_tables(database)
        outbox = Outbox(clock=rmq.clock)
        sender = OutboxSender(connect, rmq.producer(), clock=rmq.clock)

        def send() -> None:
            sender.run_due(rmq.clock.now_ms())

        @rmq.consumer("billing").subscribe("orders")
        def bill(message: DeliveredMessage) -> None:
            assert len(rmq.delivered("billing")) < 1_200, "no loop was seen"
            outbox.add(database, Message("orders", b"x"))
            database.commit()
            if not by_test:
                rmq.route.background(send)

        rmq.producer().send("orders", b"x")
        rmq.run_until_idle()
        while True:
            send()
            rmq.run_until_idle()


@pytest.mark.slow
def test_an_endless_loop_of_transactions_is_reported() -> None:
    with pytest.raises(EndlessLoopError, match="billing → orders"), Kit() as rmq:  # noqa: PT012
        producer = TransactionProducer(rmq.route, "P", lambda message: TransactionState.COMMIT)

        def bill(message: DeliveredMessage) -> None:
            producer.send_in_transaction(Message("orders", b"x"), execute=lambda *_: TransactionState.COMMIT)

        rmq.consumer("billing").subscribe("orders")(bill)
        rmq.producer().send("orders", b"x")
        rmq.run_until_idle()


@pytest.mark.slow
def test_many_messages_are_not_an_endless_loop(rmq: Kit) -> None:
    rmq.consumer("copy").subscribe("orders")(lambda message: rmq.producer().send("copies", message.body))
    for number in range(1_100):
        rmq.producer().send("orders", b"%d" % number)
    rmq.run_until_idle()
    assert len(rmq.messages("copies")) == 1_100


# ---- time


def test_a_kit_begins_at_the_machines_time_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("librmq.testing._network.SystemClock", lambda: ManualClock(1_800_000_000_123))
    with Kit() as rmq:
        assert rmq.clock.now_ms() == 1_800_000_000_000
    with Kit(now_ms=1_700_000_000_123) as rmq:
        assert rmq.clock.now_ms() == 1_700_000_000_123
    begins: list[int] = []
    explore(lambda rmq: begins.append(rmq.clock.now_ms()), runs=3)
    assert {*begins} == {1_800_000_000_000}


def test_time_passes_only_when_it_is_moved(rmq: Kit) -> None:
    begin = rmq.clock.now_ms()
    rmq.consumer("billing").subscribe("orders")(lambda message: None)
    rmq.producer().send("orders", b"later", delay_level=3)
    assert rmq.run_until_idle().time == timedelta(0)
    assert rmq.delivered("billing") == []
    assert rmq.advance(hours=0.001, minutes=0.01, seconds=1, ms=5).time == timedelta(seconds=5.205)
    assert rmq.clock.now_ms() == begin + 5_205
    rmq.advance(seconds=5)
    assert [one.body for one in rmq.delivered("billing")] == [b"later"]


def test_running_ends_where_nothing_is_due(rmq: Kit) -> None:
    rmq.consumer("billing", fail_fast=False).subscribe("orders")(always_fails)
    rmq.producer().send("orders", b"x")
    elapsed = rmq.run_for(hours=100)
    assert len(rmq.dead_letters("billing")) == 1
    assert timedelta(hours=4) < elapsed.time <= timedelta(hours=5)
    assert rmq.run_for(hours=1).time == timedelta(0)


def test_a_year_passes_in_the_time_of_its_events(rmq: Kit) -> None:
    rmq.consumer("billing").subscribe("orders")(lambda message: None)
    rmq.producer().send("orders", b"x")
    rmq.advance(hours=24 * 365)
    assert len(rmq.history()) < 50


# ---- coroutines


async def test_coroutine_listeners_in_a_loop() -> None:
    with Kit() as rmq:
        seen: list[bytes] = []
        gate = asyncio.Event()

        @rmq.consumer("billing").subscribe("orders")
        async def charge(message: DeliveredMessage) -> None:
            if message.body == b"0":
                await gate.wait()
            seen.append(message.body)
            gate.set()

        producer = rmq.producer()
        for number in range(3):
            await producer.send_async("orders", b"%d" % number)
        await rmq.run_until_idle()
        assert sorted(seen) == [b"0", b"1", b"2"]
        assert seen[-1] == b"0"
        elapsed = await rmq.advance(seconds=30)
        assert elapsed.time == timedelta(seconds=30)
        assert len(rmq.offsets("billing")) >= 2


@pytest.mark.parametrize("way", ["sleep", "thread", "lock", "queue", "real time"])
async def test_time_stands_while_coroutine_listeners_run(way: str) -> None:
    """Retries come at the same times as those of a function."""

    lock, results = asyncio.Lock(), asyncio.Queue[int]()
    with Kit() as rmq:
        begin, seen = rmq.clock.now_ms(), []

        async def report() -> None:
            while True:
                await results.get()
                seen.append((rmq.clock.now_ms() - begin) // 1000)
                await asyncio.sleep(0)
                if way == "queue":
                    await rmq.producer().send_async("reports", b"r")

        reporting = asyncio.create_task(report())

        @rmq.consumer("billing", max_reconsume_times=3).subscribe("orders")
        async def charge(message: DeliveredMessage) -> None:
            if way == "sleep":
                for _ in range(50):
                    await asyncio.sleep(0)
            elif way == "thread":
                await asyncio.to_thread(lambda: None)
            elif way == "real time":
                await asyncio.sleep(0.01)
            async with lock:
                await asyncio.sleep(0)
                results.put_nowait(1)
            raise ReconsumeLater

        await rmq.producer().send_async("orders", b"x")
        await (rmq.run_for(hours=2) if way == "real time" else rmq.advance(hours=2))
        assert seen == [0, 10, 40, 100]
        assert len(rmq.delivered("billing")) == 4
        assert [message.body for message in rmq.dead_letters("billing")] == [b"x"]
        if way == "queue":
            times = [message.store_timestamp_ms - begin for message in rmq.messages("reports")]
            assert [time // 1000 for time in times] == [0, 10, 40, 100]
        reporting.cancel()


@pytest.mark.parametrize("call", ["advance", "run_for", "advance_async"])
async def test_time_stands_while_tasks_of_the_test_run(call: str) -> None:
    """A listener that is a function hands its message to a task, whose messages come before time moves."""

    orders, receipts = asyncio.Queue[bytes](), asyncio.Queue[bytes]()
    with Kit() as rmq:
        begin = rmq.clock.now_ms()

        @rmq.consumer("billing", max_reconsume_times=3).subscribe("orders")
        def charge(message: DeliveredMessage) -> None:
            orders.put_nowait(message.body)
            raise ReconsumeLater

        async def work() -> None:
            while True:
                await orders.get()
                await asyncio.sleep(0)
                await rmq.producer().send_async("receipts", b"%d" % ((rmq.clock.now_ms() - begin) // 1000))

        working = asyncio.create_task(work())
        rmq.consumer("mail").subscribe("receipts")(lambda message: receipts.put_nowait(message.body))
        await rmq.producer().send_async("orders", b"x")
        if call == "advance":
            await rmq.advance(hours=1)
        elif call == "run_for":
            await rmq.run_for(hours=1)
        else:
            await rmq.runner.advance_async(3_600_000)
        assert [receipts.get_nowait() for _ in range(4)] == [b"0", b"10", b"40", b"100"]
        assert [one.began_ms // 1000 for one in rmq.delivered("mail")] == [0, 10, 40, 100]
        working.cancel()


class _FastSelector(selectors.DefaultSelector):
    """Waits a thousandth of the time."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(timeout and timeout / 1000)


class _FastLoop(asyncio.SelectorEventLoop):
    """Waits a thousandth of the time."""

    def __init__(self) -> None:
        super().__init__(_FastSelector())

    def time(self) -> float:
        return 1000 * super().time()


def test_a_coroutine_that_waits_for_a_later_message_is_named() -> None:
    async def test() -> None:
        later = asyncio.Event()
        with Kit(check=False) as rmq:

            @rmq.consumer("billing").subscribe("orders")
            async def charge(message: DeliveredMessage) -> None:
                if message.body == b"second":
                    later.set()
                await later.wait()

            rmq.producer().send("orders", b"first")
            rmq.producer().send("orders", b"second", delay_level=3)
            begin = rmq.clock.now_ms()
            with pytest.raises(NotIdleError, match=r"billing.*orders.*waiting at test_kit.py:\d+: time stands"):
                await rmq.advance(minutes=1)
            assert rmq.clock.now_ms() == begin

    with asyncio.Runner(loop_factory=_FastLoop) as runner:
        runner.run(test())


async def _charge_behind_a_cancelled_task(message: DeliveredMessage) -> None:
    task = asyncio.create_task(asyncio.sleep(0))
    task.cancel()
    await task


async def test_a_coroutine_that_a_cancelled_task_ends_fails_the_test() -> None:
    with Kit(check=False) as rmq:
        rmq.consumer("billing").subscribe("orders")(_charge_behind_a_cancelled_task)
        await rmq.producer().send_async("orders", b"x")
        with pytest.raises(RunnerError, match=r"billing.*ended by CancelledError"):
            await rmq.run_until_idle()


def test_a_coroutine_that_a_cancelled_task_ends_is_a_failed_attempt() -> None:
    with Kit(check=False) as rmq:
        rmq.consumer("billing", fail_fast=False).subscribe("orders")(_charge_behind_a_cancelled_task)
        rmq.producer().send("orders", b"x")
        rmq.advance(seconds=11)
        assert [delivered.attempt for delivered in rmq.delivered("billing")] == [0, 1]


async def _within_a_time(lock: asyncio.Lock) -> None:
    await asyncio.wait_for(lock.acquire(), 1e6)


async def _by_a_task(lock: asyncio.Lock) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(lock.acquire())


@pytest.mark.parametrize("acquire", [asyncio.Lock.acquire, _within_a_time, _by_a_task])
@pytest.mark.parametrize("is_early", [False, True])
async def test_a_dead_coroutine_keeps_no_lock_of_asyncio(
    acquire: Callable[[asyncio.Lock], Awaitable[object]], is_early: bool
) -> None:
    """The process dies before its coroutines begin, or while one has the lock and two wait for it."""

    lock, has_begun, crashes = asyncio.Lock(), asyncio.Event(), list[object]()
    begun = Counter[bytes]()
    with Kit() as rmq:

        @rmq.consumer("billing").subscribe("orders")
        async def charge(message: DeliveredMessage) -> None:
            begun[message.body] += 1
            await acquire(lock)
            try:
                has_begun.set()
                await asyncio.sleep(0 if crashes else 1e6)
            finally:
                lock.release()

        def crash() -> None:
            crashes.append(rmq.crash(rmq.processes[-1]))

        async def crash_later() -> None:
            await has_begun.wait()
            crash()

        for number in range(3):
            rmq.producer().send("orders", b"%d" % number)
        resting = rmq.run_until_idle()
        crashing = asyncio.create_task(crash_later())
        if is_early:
            crash()
            has_begun.set()
            crashing.cancel()
        await resting
        assert Counter(one.outcome for one in rmq.delivered("billing")) == {"died": 3, "returned": 3}
        assert set(begun.values()) == {1 if is_early else 2}


async def test_a_dead_coroutine_passes_on_the_lock_that_it_was_just_given() -> None:
    lock, crashes = asyncio.Lock(), list[object]()
    with Kit() as rmq:

        @rmq.consumer("billing").subscribe("orders")
        async def charge(message: DeliveredMessage) -> None:
            async with lock:
                await asyncio.sleep(0.001)  # meanwhile all others wait
            if not crashes:
                crashes.append(None)
                rmq.crash(rmq.processes[1])

        @rmq.consumer("shipping").subscribe("orders")
        async def ship(message: DeliveredMessage) -> None:
            async with lock:
                pass

        for number in range(2):
            rmq.producer().send("orders", b"%d" % number)
        await rmq.run_until_idle()
        assert [one.outcome for one in rmq.delivered("billing")] == ["died", "died", "returned", "returned"]
        assert [one.outcome for one in rmq.delivered("shipping")] == ["returned", "returned"]


def test_coroutines_that_never_began_leave_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    async def charge(message: DeliveredMessage) -> None:
        raise AssertionError

    async def fails() -> None:
        with Kit() as rmq:
            rmq.consumer("billing").subscribe("orders")(charge)
            rmq.producer().send("orders", b"x")
            _forgotten = rmq.producer().send_async("orders", b"y")
            rmq.run_until_idle()
            raise KeyError

    with pytest.raises(KeyError):
        asyncio.run(fails())
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []


def test_a_coroutines_exception_fails_the_test() -> None:
    async def fails(message: DeliveredMessage) -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    async def test() -> None:
        with Kit() as rmq:
            rmq.consumer("billing").subscribe("orders")(fails)
            rmq.producer().send("orders", b"x")
            await rmq.run_until_idle()

    with pytest.raises(ValueError, match="no") as caught:
        asyncio.run(test())
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fails"


# ---- history


def test_the_history_reads_well(rmq: Kit) -> None:
    rmq.consumer("billing").subscribe("orders", tags="paid")(lambda message: None)
    rmq.producer().send("orders", b"x" * 100, tags="paid")
    rmq.advance(seconds=10)
    assert str(rmq.history()).splitlines() == [
        f"       0.000 s  test             sends orders/0:0 {b'x' * 48!r}… (100 bytes) [paid]",
        f"       0.000 s  billing@billing  gets orders/0:0 {b'x' * 48!r}… (100 bytes) [paid]",
        "       0.000 s  billing@billing  returned (orders/0:0)",
        "      10.000 s  billing@billing  saves progress orders/0:1",
    ]


def test_batches_are_shown_message_by_message(rmq: Kit) -> None:
    rmq.consumer("billing", batch_size=8).subscribe("orders")(lambda messages: None)
    for number in range(3):
        rmq.producer().send("orders", b"%d" % number, queue=0)
    rmq.run_until_idle()
    assert [one.body for one in rmq.delivered("billing")] == [b"0", b"1", b"2"]


def test_acknowledged_messages_of_a_group_in_order_may_come_again(rmq: Kit) -> None:
    """Behind one that is not acknowledged in time, which becomes a dead letter; each delivery is in the history."""
    rmq.broker.create_topic("orders", 1)
    rmq.broker.set_group("billing", is_ordered=True, retry_max_times=1)
    for number in range(3):
        rmq.producer().send("orders", b"%d" % number)
    with SimpleConsumer(rmq.route, "billing") as consumer:
        consumer.subscribe("orders")
        for most in (1, 2, 3):
            for message in consumer.receive(most):
                if message.body != b"0":
                    consumer.ack(message)
            rmq.advance(minutes=1)
    assert bodies(rmq) == [b"0", b"0", b"1", b"1", b"2"]
    assert [letter.body for letter in rmq.dead_letters("billing")] == [b"0"]


# ---- requested faults


def bodies(rmq: Kit, group: str = "billing") -> list[bytes]:
    return [one.body for one in rmq.delivered(group)]


def test_a_lost_answer_stores_the_message_twice(rmq: Kit) -> None:
    rmq.consumer("billing").subscribe("orders")(lambda message: None)
    rmq.faults.lose_answer("orders")
    rmq.producer().send("orders", b"x")
    rmq.run_until_idle()
    assert bodies(rmq) == [b"x", b"x"]
    assert len({one.message.unique_key for one in rmq.delivered("billing")}) == 1


def test_a_lost_answer_to_a_send_to_a_queue_is_the_callers(rmq: Kit) -> None:
    rmq.faults.lose_answer()
    with pytest.raises(BrokerUnreachableError):
        rmq.producer().send("orders", b"x", queue=0)
    assert [m.body for m in rmq.messages("orders")] == [b"x"]


def test_refused_sends(rmq: Kit) -> None:
    rmq.faults.refuse_send("orders", times=2)
    assert rmq.producer().send("orders", b"x").queue_offset == 0
    rmq.faults.refuse_send(times=3)
    with pytest.raises(BrokerError):
        rmq.producer().send("orders", b"y")
    rmq.faults.refuse_send(busy=True)
    with pytest.raises(BrokerBusyError):
        rmq.producer().send("orders", b"y")
    assert [m.body for m in rmq.messages("orders")] == [b"x"]


def test_a_late_answer_uses_the_time_of_the_tries(rmq: Kit) -> None:
    begin = rmq.clock.now_ms()
    rmq.faults.late_answer(2)
    rmq.producer().send("orders", b"x")
    assert rmq.clock.now_ms() == begin + 2_000
    rmq.faults.late_answer(4)
    with pytest.raises(SendTimeoutError, match="the message is stored"):
        rmq.producer().send("orders", b"late")
    assert rmq.clock.now_ms() == begin + 6_000
    assert [m.body for m in rmq.messages("orders")] == [b"x", b"late"]
    rmq.faults.late_answer(timedelta(seconds=4))
    with pytest.raises(SendTimeoutError):
        rmq.producer().send("orders", b"y")
    rmq.faults.lose_answer(times=3)
    with pytest.raises(BrokerUnreachableError):
        rmq.producer().send("orders", b"z")


def counting_shop(process: Process) -> list[bytes]:
    seen: list[bytes] = []
    process.consumer("billing").subscribe("orders")(lambda message: seen.append(message.body))
    return seen


def test_a_crash_before_progress_was_saved_delivers_again(rmq: Kit) -> None:
    shop = rmq.app("shop", counting_shop)
    rmq.producer().send("orders", b"x")
    rmq.run_until_idle()
    rmq.crash(shop)
    rmq.run_until_idle()
    assert shop.dead
    assert shop.state == [b"x"]
    new = rmq.processes[-1]
    assert (new.name, new.generation, new.label, new.state) == ("shop", 2, "shop~2", [b"x"])
    assert [one.process for one in rmq.delivered("billing")] == ["shop", "shop~2"]


def test_a_process_that_began_while_no_broker_was_up_dies_whole(rmq: Kit) -> None:
    """No broker has heard of its client, and no turn of it runs on."""

    def reader(process: Process) -> PullConsumer:
        consumer = PullConsumer(process, "audit")
        consumer.subscribe("orders")
        return consumer.start()

    rmq.crash_broker(down=3600)
    audit = rmq.app("audit", reader)
    rmq.crash(audit)
    assert audit.state.client.dead
    rmq.advance(hours=2)


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "coroutine"])
def test_a_crash_in_a_listener_ends_the_listener(rmq: Kit, is_async: bool) -> None:
    """The listener's code does not continue, and a guard in front of it does not mark the message as consumed."""
    store = MemoryDedupStore()
    done: list[str] = []

    def charge(message: Any) -> None:
        done.append("begins")
        if len(done) == 1:
            rmq.crash(shop)
        done.append("ends")

    async def charge_async(message: Any) -> None:
        await asyncio.sleep(0)
        charge(message)

    def setup(process: Process) -> PushConsumer:
        guard = DedupListener(
            charge_async if is_async else charge, store, group="billing", clock=rmq.clock, consuming_timeout=60
        )
        consumer = process.consumer("billing")
        consumer.subscribe("orders")(guard)
        return consumer

    shop = rmq.app("shop", setup)
    rmq.producer().send("orders", b"x")
    rmq.advance(minutes=5)
    assert done == ["begins", "begins", "ends"]
    assert [one.outcome for one in rmq.delivered("billing")] == ["died", *["later"] * 3, "returned"]
    assert [process.label for process in rmq.processes if not process.dead] == ["test", "shop~2"]


async def test_a_crash_ends_coroutines_where_they_wait() -> None:
    seen: list[str] = []
    with Kit() as rmq:

        def setup(process: Process) -> PushConsumer:
            consumer = process.consumer("billing")

            @consumer.subscribe("orders")
            async def charge(message: DeliveredMessage) -> None:
                attempt = f"{process.generation} {message.body.decode()}"
                seen.append(f"{attempt} begins")
                if message.body == b"2" and process.generation == 1:
                    rmq.crash(shop)
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError:
                    seen.append(f"{attempt} is told")
                    raise
                seen.append(f"{attempt} ends")

            return consumer

        shop = rmq.app("shop", setup)
        for body in (b"1", b"2"):
            await rmq.producer().send_async("orders", body, queue=0)
        await rmq.run_until_idle()
    assert seen == ["1 1 begins", "1 2 begins", "2 1 begins", "2 2 begins", "2 1 ends", "2 2 ends"]


def test_operations_that_a_process_refuses(rmq: Kit) -> None:
    def setup(process: Process) -> None:
        process.consumer("billing").subscribe("orders")(lambda message: rmq.restart(shop))

    shop = rmq.app("shop", setup)
    rmq.producer().send("orders", b"x")
    with pytest.raises(ProcessStateError, match=r"within its own listener.*rmq\.crash"):
        rmq.run_until_idle()
    rmq.crash(shop)
    rmq.crash(shop)  # kills the process that was started in its place
    rmq.crash(shop, restart=False)
    assert [process.label for process in rmq.processes] == ["test", "shop", "shop~2", "shop~3"]
    with pytest.raises(TypeError, match=r"process: expected a Process, as rmq\.app returns one"):
        rmq.crash(rmq.producer())  # type: ignore[arg-type]
    with pytest.raises(ProcessDied, match="shop~3: the process has died in this test"):
        rmq.processes[-1].producer("shop").send("orders", b"x")
    with pytest.raises(ProcessStateError, match="shop has ended and was not restarted"):
        rmq.lose(shop)


def test_a_crash_without_a_restart_leaves_the_work_to_others(rmq: Kit) -> None:
    shop = rmq.app("shop", counting_shop)
    other = rmq.join(shop)
    assert other.label == "shop-2"
    rmq.run_until_idle()
    rmq.crash(shop, restart=False)
    for queue in range(4):
        rmq.producer().send("orders", b"%d" % queue, queue=queue)
    rmq.run_until_idle()
    assert sorted(other.state) == [b"0", b"1", b"2", b"3"]


def test_a_further_instance_shares_the_queues(rmq: Kit) -> None:
    shop = rmq.app("shop", counting_shop)
    rmq.producer().send("orders", b"x")
    rmq.run_until_idle()
    other = rmq.join(shop)
    rmq.run_until_idle()
    for queue in range(4):
        rmq.producer().send("orders", b"%d" % queue, queue=queue)
    rmq.run_until_idle()
    assert len(other.state) == 2
    assert len(shop.state) == 3


def test_a_lost_member_delivers_what_it_has(rmq: Kit) -> None:
    """Both readers of a queue had its messages before either delivered the second one: that it comes again is legal."""

    def shop(process: Process) -> None:
        process.consumer("billing", threads=1).subscribe("orders")(lambda message: None)

    rmq.broker.create_topic("orders", queues=1)
    first = rmq.app("shop", shop)
    rmq.join(first)
    rmq.advance(seconds=2)
    rmq.faults.slow_listener("billing", 6, times=4)
    for body in (b"0", b"1"):
        rmq.producer().send("orders", body)
    rmq.advance(ms=500)
    rmq.lose(first)
    rmq.advance(seconds=20)
    assert sorted(delivery.body for delivery in rmq.delivered("billing")) == [b"0", b"0", b"1", b"1"]
    assert check_history(rmq.events()) == []


def test_a_lost_member_is_back_after_thirty_seconds(rmq: Kit) -> None:
    shop = rmq.app("shop", counting_shop)
    other = rmq.join(shop)
    rmq.producer().send("orders", b"first")
    rmq.run_until_idle()
    rmq.lose(shop)
    rmq.run_until_idle()
    for queue in range(4):
        rmq.producer().send("orders", b"%d" % queue, queue=queue)
    rmq.run_until_idle()
    assert sorted(body for body in other.state if body != b"first") == [b"0", b"1", b"2", b"3"]
    rmq.advance(seconds=31)
    before = len(shop.state)
    for queue in range(4):
        rmq.producer().send("orders", b"%d" % queue, queue=queue)
    rmq.run_until_idle()
    assert len(shop.state) == before + 2


def test_the_broker_dies_and_is_back(rmq: Kit) -> None:
    shop = rmq.app("shop", counting_shop)
    rmq.producer().send("orders", b"1")
    rmq.run_until_idle()
    rmq.crash_broker()
    rmq.advance(minutes=1)
    assert set(shop.state) == {b"1"}
    rmq.crash_broker(down=timedelta(seconds=5))
    with pytest.raises((BrokerError, BrokerUnreachableError)):
        rmq.producer().send("orders", b"2")
    rmq.advance(minutes=1)
    rmq.producer().send("orders", b"3")
    rmq.advance(minutes=1)
    assert set(shop.state) == {b"1", b"3"}
    assert "the broker is back" in str(rmq.history())


def test_a_skewed_clock_stamps_other_times(rmq: Kit) -> None:
    def late_clock(process: Process) -> Any:
        return process.producer()

    process = rmq.app("shop", late_clock)
    rmq.faults.skew_clock(process, timedelta(hours=-1))
    process.state.send("orders", b"x")
    rmq.producer().send("orders", b"y")
    stamps = [message.born_timestamp_ms for message in rmq.messages("orders")]
    assert stamps[1] - stamps[0] == 3_600_000


def test_background_work_dies_with_its_process(rmq: Kit) -> None:
    done: list[str] = []

    def shop(process: Process) -> None:
        process.background(lambda: done.append(process.label))

    process = rmq.app("shop", shop)
    rmq.crash(process)
    rmq.run_until_idle()
    assert done == ["shop~2"]
    with pytest.raises(ProcessStateError, match=r"shop is dead.* that rmq\.crash or rmq\.restart has returned"):
        process.background(lambda: None)


# ---- applications as in production


def test_failures_fail_the_test_unless_switched_off() -> None:
    def broken(route: Route) -> PushConsumer:
        consumer = PushConsumer(route, "billing")
        consumer.subscribe("orders")(always_fails)
        return consumer.start()

    with pytest.raises(ValueError, match="no"), Kit() as rmq:  # noqa: PT012
        rmq.app("shop", broken)
        rmq.producer().send("orders", b"x")
        rmq.run_until_idle()
    with Kit() as rmq:
        rmq.app("shop", broken, fail_fast=False)
        rmq.producer().send("orders", b"x")
        rmq.run_until_idle()
        assert len(rmq.retries("billing")) == 1


def test_broadcasting_keeps_its_progress_with_the_kit(rmq: Kit) -> None:
    for _ in range(2):
        rmq.consumer("cache", model=MessageModel.BROADCASTING).subscribe("prices")(lambda message: None)
    rmq.broker.create_topic("prices", queues=2)  # so that its first message is not missed
    rmq.producer().send("prices", b"x")
    rmq.advance(seconds=10)
    assert sorted(one.process for one in rmq.delivered("cache")) == ["cache", "cache-2"]
    assert isinstance(rmq.files, MemoryFiles)


@pytest.mark.rmq(store_config=StoreConfig.tiny(enable_property_filter=False))
def test_a_consumer_that_cannot_start_fails_the_test(rmq: Kit) -> None:
    """The producer took the refusal for its send's answer and sent again, so the refusal was lost (issue 14, 2.1)."""
    rmq.consumer("billing").subscribe("orders", lambda message: None, sql="amount > 3")
    with pytest.raises(ProcessStateError, match="can't start: topic 'orders': filters of type SQL92 are switched off"):
        rmq.producer().send("orders", b"x")


@pytest.mark.parametrize("again", [Kit.restart, Kit.crash])
def test_a_broadcasting_process_keeps_its_id(rmq: Kit, again: Callable[[Kit, Process], object]) -> None:
    """A restarted process used to get a new client id, so it began without its progress."""

    def cache(process: Process) -> PushConsumer:
        consumer = process.consumer("cache", instance_name="c1", model=MessageModel.BROADCASTING)
        consumer.subscribe("prices", lambda message: None)
        return consumer

    rmq.broker.create_topic("prices", queues=1)
    process = rmq.app("cache", cache)
    rmq.advance(seconds=1)
    before = rmq.broker.connections("cache")
    for body in (b"1", b"2"):
        rmq.producer().send("prices", body)
        rmq.advance(seconds=15)
        again(rmq, process)
        rmq.advance(seconds=1)
    assert [one.body for one in rmq.delivered("cache")] == [b"1", b"2"]
    after = rmq.broker.connections("cache")
    assert before is not None
    assert after is not None
    assert before.client_ids == after.client_ids


def test_instances_of_one_name_on_two_hosts_are_two_processes_of_a_history(rmq: Kit) -> None:
    def cache(process: Process) -> None:
        consumer = process.consumer("cache", instance_name="c1", model=MessageModel.BROADCASTING)
        consumer.subscribe("prices", lambda message: None)

    first = rmq.app("cache", cache)
    rmq.join(first)
    rmq.advance(seconds=1)
    rmq.producer().send("prices", b"x")
    rmq.run_until_idle()
    rmq.crash(first)
    processes = [event["process"] for event in rmq.events() if event["event"] == "deliver"]
    assert processes == ["c1", "10.0.1.102@c1"]
    crashed = [event["process"] for event in rmq.events() if event["event"] == "crash"]
    assert crashed == ["c1", "cache"]
    assert "takes over" not in str(rmq.history())


def test_a_transaction_whose_end_is_lost_is_asked_about(rmq: Kit) -> None:
    table: dict[str, TransactionState] = {}

    def check(message: CheckedMessage) -> TransactionState | None:
        return table.get(message.keys[0])

    def execute(message: Message, state: TransactionState) -> TransactionState:
        table[message.keys[0]] = state
        return TransactionState.UNKNOWN

    rmq.consumer("billing").subscribe("orders")(lambda message: None)
    producer = TransactionProducer(rmq.route, "shop", check, execute=execute)
    for key, state in (("o-1", TransactionState.COMMIT), ("o-2", TransactionState.ROLLBACK)):
        producer.send_in_transaction(Message("orders", key.encode(), keys=key), state)
    rmq.run_until_idle()
    assert bodies(rmq) == []
    rmq.advance(minutes=10)
    assert bodies(rmq) == [b"o-1"]
    assert "ends a transaction: rollback" in str(rmq.history())


def test_an_error_of_a_check_fails_the_test() -> None:
    def check(message: CheckedMessage) -> None:
        raise ValueError("no table")

    with Kit() as rmq:
        producer = TransactionProducer(rmq.route, "shop", check)
        producer.send_in_transaction(Message("orders", b"x"), execute=lambda message, arg: TransactionState.UNKNOWN)
        with pytest.raises(ValueError, match="no table"):
            rmq.advance(minutes=10)
        assert rmq.messages("orders") == []


# ---- the end


def test_on_disk_its_store_is_a_brokers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Kit(tmp_path / "broker") as rmq:
        rmq.consumer("billing", fail_fast=False, max_reconsume_times=1).subscribe("orders")(always_fails)
        rmq.producer().send("orders", b"x")
        rmq.advance(minutes=1)
    assert verify(tmp_path / "broker").sound
    assert main(["dump", str(tmp_path / "broker"), "--format", "jsonl"]) == 0
    topics = [json.loads(line)["topic"] for line in capsys.readouterr().out.splitlines()]
    assert topics == ["orders", "SCHEDULE_TOPIC_XXXX", "%RETRY%billing", "%DLQ%billing"]


def test_an_unsound_store_fails_the_test(tmp_path: Path) -> None:
    rmq = Kit(tmp_path / "broker")
    rmq.producer().send("orders", b"x", queue=0)
    rmq.broker.store.flush()
    log = tmp_path / "broker" / "commitlog" / f"{0:020}"
    with log.open("r+b") as file:
        file.seek(90)
        file.write(b"?")
    with pytest.raises(UnsoundStoreError, match="not sound"):
        rmq.close()


def test_a_store_is_sound_with_the_sizes_that_it_had(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path, StoreConfig(commitlog_file_size=1 << 16), background=False) as store:
        store.append(Message("orders", b"x"))
    with Kit(tmp_path, store_config=StoreConfig()) as rmq:  # names no size, as `librmq serve` does
        rmq.producer().send("orders", b"y", queue=0)


def test_settings_of_the_broker() -> None:
    with Kit(broker_config=BrokerConfig(auto_create_topic=False)) as rmq, pytest.raises(Exception, match="orders"):
        rmq.producer().send("orders", b"x")


async def test_work_that_does_not_end_is_reported() -> None:
    never = asyncio.Event()

    async def waits(message: DeliveredMessage) -> None:
        await never.wait()

    rmq = Kit(check=False)
    rmq.consumer("billing").subscribe("orders")(waits)
    rmq.producer().send("orders", b"x")
    running = rmq.run_until_idle()
    with pytest.raises(asyncio.TimeoutError):
        async with asyncio.timeout(0):
            await running
    never.set()
    await rmq.run_until_idle()
    rmq.close()


@pytest.mark.parametrize("kind", ["concurrent", "orderly", "receive"])
def test_a_group_that_reads_dead_letters(rmq: Kit, kind: str) -> None:
    """Its attempts are its own, and not those of the group that gave the message up."""

    def fails(message: DeliveredMessage) -> None:
        raise ReconsumeLater

    rmq.consumer("billing", max_reconsume_times=2).subscribe("orders")(fails)
    rmq.producer().send("orders", b"x")
    rmq.advance(minutes=5)
    assert [message.body for message in rmq.dead_letters("billing")] == [b"x"]
    seen: list[bytes] = []
    if kind == "receive":
        with SimpleConsumer(rmq.route, "ops") as reader:
            reader.subscribe("%DLQ%billing")
            for message in reader.receive(wait=0):
                seen.append(message.body)
                reader.ack(message)
        attempts = [0]
    else:

        def read(message: DeliveredMessage) -> None:
            seen.append(message.body)
            if kind == "orderly" and len(seen) < 3:
                raise ReconsumeLater

        consumer = rmq.consumer("ops", orderly=kind == "orderly", consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("%DLQ%billing")(read)
        rmq.advance(minutes=20)
        attempts = [0, 1, 2] if kind == "orderly" else [0]
    assert seen == [b"x"] * len(attempts)
    events = rmq.events()
    ours = [event for event in events if event["event"] == "deliver" and event["group"] == "ops"]
    assert [event["attempt"] for event in ours] == attempts
    assert [one.attempt for one in rmq.delivered("ops")] == attempts
    assert list(check_history(events)) == []


def test_a_reader_of_dead_letters_gets_what_it_gave_back(rmq: Kit) -> None:
    seen: list[bytes] = []

    def give_back(message: DeliveredMessage) -> None:
        raise ReconsumeLater

    def read(message: DeliveredMessage) -> None:
        seen.append(message.body)
        if len(seen) < 3:
            raise ReconsumeLater

    rmq.consumer("billing", max_reconsume_times=0).subscribe("orders")(give_back)
    rmq.producer().send("orders", b"x")
    rmq.advance(seconds=1)
    rmq.consumer("ops", consume_from=ConsumeFrom.FIRST).subscribe("%DLQ%billing")(read)
    rmq.advance(minutes=5)
    assert seen == [b"x"] * 3
    assert rmq.dead_letters("ops") == []


@pytest.mark.parametrize("route", ["route", "broker", "app", "pull"])
def test_broadcast_progress_stays_in_the_kit(route: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))

    def seen() -> list[bytes]:
        bodies: list[bytes] = []
        settings: Any = {"model": MessageModel.BROADCASTING, "consume_from": ConsumeFrom.FIRST}
        with Kit() as rmq:

            def start(process: Process | Route) -> PushConsumer:
                consumer = PushConsumer(process, "cache", instance_name="c1", **settings)
                consumer.subscribe("prices")(lambda message: bodies.append(message.body))
                return consumer.start()

            rmq.producer().send("prices", b"x")
            if route == "app":
                rmq.app("shop", start)
            elif route == "pull":
                with PullConsumer(rmq.route, "cache", instance_name="c1", **settings) as reader:
                    reader.subscribe("prices")
                    rmq.advance(seconds=1)
                    bodies += [message.body for message in reader.poll()]
                    rmq.advance(seconds=10)
                return bodies
            else:
                start(rmq.route if route == "route" else rmq.broker)
            rmq.advance(seconds=20)
        return bodies

    assert [seen(), seen()] == [[b"x"], [b"x"]]
    assert list(tmp_path.iterdir()) == []


def test_a_producer_and_a_consumer_of_one_instance_name(rmq: Kit) -> None:
    """As Java's clients of one process live: neither of them ends the other's registration."""
    seen: list[bytes] = []

    def start(process: Process) -> Producer:
        consumer = PushConsumer(process, "billing", instance_name="app", consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders")(lambda message: seen.append(message.body))
        consumer.start()
        return Producer(process, "shop", instance_name="app").start()

    app = rmq.app("shop", start)
    app.state.send("orders", b"0")
    rmq.run_until_idle()
    assert seen == [b"0"]
    (client,) = (client for client in rmq.broker.clients() if client.client_id.endswith("@app"))
    assert (set(client.producer_groups), set(client.consumer_groups)) == ({"shop"}, {"billing"})
    rmq.lose(app)
    rmq.advance(minutes=1)
    app.state.send("orders", b"1")
    rmq.run_until_idle()
    again = rmq.restart(app)
    again.state.send("orders", b"2")
    rmq.advance(minutes=1)
    assert seen == [b"0", b"1", b"2"]
    third = rmq.crash(again)
    assert third is not None
    assert (third.name, third.generation) == ("shop", 3)
    assert rmq.crash(third, restart=False) is None
    rmq.join(third)
    rmq.producer().send("orders", b"3")
    rmq.advance(minutes=1)
    assert seen[3:][-1:] == [b"3"]


# ---- forgotten by a test


def sends(rmq: Kit, topic: str = "orders", **fields: Any) -> None:
    rmq.producer().send(topic, b"x", **fields)
    rmq.run_until_idle()


@pytest.mark.parametrize(
    ("subscribed", "send", "said"),
    [
        ({}, lambda rmq: sends(rmq, "order"), "none was sent to it; 1 message is in 'order', to which no group"),
        (
            {"sql": "amount > 3"},
            lambda rmq: sends(rmq, properties={"amount": "2"}),
            "its filter 'amount > 3' matches none of the 1 there: amount > 3 decides for the first, because amount is",
        ),
        (
            {"tags": "paid || open"},
            lambda rmq: sends(rmq, tags="Paid"),
            "its filter 'paid || open' matches none of the 1 there: their tags are 'Paid'",
        ),
        ({}, lambda rmq: rmq.producer().send("orders", b"x"), "1 message is not delivered yet: end the test with"),
        ({}, lambda rmq: sends(rmq, "payments"), "none was sent to it\nno group subscribes to 'payments': 1 message"),
        ({}, lambda rmq: sends(rmq, delay_level=3), "1 message is still delayed: let time pass with rmq.advance"),
    ],
    ids=["another topic", "sql", "tags", "time stands still", "nothing sent", "delayed"],
)
def test_a_subscription_that_matched_nothing(
    subscribed: dict[str, Any], send: Callable[[Kit], None], said: str
) -> None:
    def scenario(ends: Callable[[], None]) -> None:
        with Kit() as rmq:
            rmq.consumer("billing").subscribe("orders", **subscribed)(lambda message: None)
            send(rmq)
            ends()

    with pytest.warns(UndeliveredWarning) as told:
        scenario(lambda: None)
    assert f"billing got nothing of 'orders': {said}" in str(told[0].message)
    with pytest.raises(pytest.fail.Exception) as caught:
        scenario(lambda: pytest.fail("for another reason"))
    assert said in caught.value.__notes__[-1]


def test_a_fault_that_never_happens_is_named() -> None:
    def scenario() -> None:
        with Kit() as rmq:
            rmq.consumer("billing").subscribe("orders")(lambda message: None)
            rmq.faults.lose_answer("order")
            rmq.faults.refuse_send(broker="broker-z", topic="orders")
            rmq.faults.late_answer(1, times=5)
            rmq.faults.slow_listener("biling", 5)
            rmq.faults.slow_listener("billing", 5, times=2)
            rmq.producer().send("orders", b"x")
            rmq.run_until_idle()
            rmq.faults.repeat_request("orders")  # too late, as are the next two
            rmq.faults.lose_answer()
            rmq.faults.slow_listener("billing", 5)
            rmq.run_until_idle()

    with pytest.warns(UndeliveredWarning) as told:
        scenario()
    assert str(told[0].message).splitlines() == [
        "the fault lose_answer never happened: nothing was sent to topic 'order' after its request",
        "the fault refuse_send never happened: nothing was sent to broker 'broker-z' after its request",
        "the fault repeat_request never happened: nothing was sent to topic 'orders' after its request",
        "the fault lose_answer never happened: nothing was sent after its request",
        "the fault slow_listener never happened: no listener of group 'biling' was called after its request",
        "the fault slow_listener never happened: no listener of group 'billing' was called after its request",
    ]


def test_messages_that_were_read_do_not_count_as_unread(rmq: Kit) -> None:
    """Messages that filters drop do not count if some subscription matches, nor do those that applications send."""
    rmq.consumer("billing").subscribe("orders", tags="paid")(lambda message: None)

    def shop(process: Process) -> None:
        process.consumer("mail").subscribe("letters")(lambda message: None)
        process.producer().send("receipts", b"x")

    rmq.app("shop", shop)
    reader = PullConsumer(rmq.route, "reader")
    reader.subscribe("reports")
    reader.start()
    for topic in ("orders", "reports", "audit"):
        rmq.producer().send(topic, b"x", tags="paid")
        rmq.producer().send(topic, b"x", tags="open")
    rmq.run_until_idle()
    assert rmq.undelivered() == ["no group subscribes to 'audit': 2 messages are in it"]
    assert len(rmq.messages("audit")) == 2
    assert not rmq.undelivered()
    rmq.consumer("none").subscribe("orders", tags="none")(lambda message: None)
    rmq.run_until_idle()
    assert len(rmq.undelivered()) == 1
    assert not rmq.delivered("none")  # a filter dropped it on purpose
    assert not rmq.undelivered()
    assert len(reader.poll()) == 2
    reader.shutdown()


def test_what_a_test_forgot_is_said_at_its_end(rmq: Kit) -> None:
    """A send that no group subscribes to, a consumer without a start, a predicate that drops all, an open end."""
    rmq.producer().send("orders", b"x")
    assert rmq.undelivered() == ["no group subscribes to 'orders': 1 message is in it"]
    PushConsumer(rmq.route, "billing").subscribe("orders")(lambda message: None)
    forgotten = "billing got nothing of 'orders': its consumer was never started, call its start()"
    assert rmq.undelivered()[0] == forgotten
    rmq.consumer("billing").subscribe("orders")(lambda message: None)
    rmq.run_until_idle()
    assert not rmq.undelivered()
    rmq.consumer("mail").subscribe("orders", predicate=lambda message: False)(lambda message: None)
    rmq.consumer("log").subscribe("orders", predicate=lambda message: bool(1 / 0))(lambda message: None)
    rmq.run_until_idle()
    assert rmq.undelivered() == [
        "the predicate of mail dropped all 1 messages of 'orders' that it saw",
        "the predicate of log dropped all 1 messages of 'orders' that it saw; it raised an error on 1 of them",
    ]
    assert len(rmq.delivered("mail") + rmq.delivered("log")) == 2
    producer = TransactionProducer(rmq.route, "shop", lambda message: TransactionState.COMMIT)
    producer.send_in_transaction(Message("paid", b"x"), execute=lambda message, arg: TransactionState.UNKNOWN)
    assert rmq.undelivered() == [
        "1 transaction is open, with messages to 'paid': commit or roll back, or let the broker ask the producer with "
        "rmq.advance(…)"
    ]
    rmq.advance(minutes=2)
    assert len(rmq.messages("paid")) == 1
    assert not rmq.undelivered()


@pytest.mark.parametrize("question", ["dead_letters", "delivered", "retries", "offsets"])
def test_a_group_that_no_consumer_has(rmq: Kit, question: str) -> None:
    with pytest.raises(UnknownGroupError, match="group 'billing'; its groups are none"):
        getattr(rmq, question)("billing")
    rmq.consumer("billing").subscribe("orders")(lambda message: None)
    assert not getattr(rmq, question)("billing")
    with pytest.raises(UnknownGroupError, match=r"group 'biling'; did you mean 'billing'\?"):
        getattr(rmq, question)("biling")


def test_unawaited_calls_are_noticed() -> None:
    async def sends_nothing() -> None:
        with Kit() as rmq:
            rmq.producer().send_async("orders", b"x")  # type: ignore[unused-coroutine]

    async def moves_no_time(*, once: bool) -> None:
        with Kit() as rmq:

            @rmq.consumer("billing").subscribe("orders")
            async def charge(message: DeliveredMessage) -> None:
                await asyncio.sleep(0)

            await rmq.producer().send_async("orders", b"x")
            rmq.run_until_idle()
            if not once:
                rmq.run_until_idle()

    with pytest.raises(NotAwaitedError, match=r"send_async at test_kit\.py:\d+ sent nothing: write `await`"):
        asyncio.run(sends_nothing())
    for once in (True, False):
        with pytest.raises(NotAwaitedError, match=r"moves time at test_kit\.py:\d+ was not awaited"):
            asyncio.run(moves_no_time(once=once))


def test_a_message_comes_again_in_the_same_millisecond(rmq: Kit) -> None:
    """Its offset in the retry topic is below the first one, by which a history orders what happens at one time."""
    with SimpleConsumer(rmq.route, "mailer") as consumer:
        consumer.subscribe("orders")
        for body in ("first", "again"):
            rmq.producer().send("orders", body, queue=0)
        first, again = consumer.receive(invisible=30, wait=0)
        consumer.ack(first)
        consumer.extend(again, 0)
        (again,) = consumer.receive(invisible=30, wait=0)
        assert (again.body, again.attempt) == (b"again", 2)
        consumer.ack(again)


def test_a_consumer_that_was_shut_down_first_is_not_started(rmq: Kit) -> None:
    consumer = rmq.consumer("billing")
    consumer.subscribe("orders", lambda message: None)
    consumer.shutdown()
    rmq.producer().send("orders", b"x")
    rmq.advance(seconds=1)
    assert rmq.delivered("billing") == []


def test_what_a_simple_consumer_receives_is_known(rmq: Kit) -> None:
    consumer = SimpleConsumer(rmq.route, "mailer")
    consumer.subscribe("orders")
    with consumer:
        rmq.producer().send("orders", b"x")
        (first,) = consumer.receive(invisible=30)
        rmq.advance(seconds=31)
        (second,) = consumer.receive()
        consumer.ack(second)
    assert (first.attempt, second.attempt) == (1, 2)
    assert not rmq.undelivered()
    assert "receives orders/0:0 b'x'" in str(rmq.history())


@pytest.mark.parametrize(
    ("time", "said"),
    [
        ({"seconds": -1}, "time can't go back: expected at least 0 ms, found -1,000"),
        ({"minutes": 1, "seconds": -61}, "time can't go back"),
        ({"seconds": "1"}, "seconds: expected a number, found '1'"),
        ({"hours": float("nan")}, "hours: expected a number, found nan"),
        ({"hours": float("inf")}, "hours: expected at most the time to the year 9999, found inf"),
        ({"hours": 1e9}, "expected to move it to the year 9999 at most"),
    ],
)
def test_a_time_that_cannot_pass_is_refused(rmq: Kit, time: dict[str, Any], said: str) -> None:
    begin_ms = rmq.clock.now_ms()
    for call in (rmq.advance, rmq.run_for):
        with pytest.raises(ConfigError, match=said):
            call(**time)
    rmq.advance(minutes=1, seconds=-59)
    assert rmq.clock.now_ms() == begin_ms + 1_000


def test_a_fault_that_cannot_happen_is_refused(rmq: Kit) -> None:
    for times in (0, -1):
        for fault in (rmq.faults.lose_answer, rmq.faults.refuse_send, rmq.faults.repeat_request):
            with pytest.raises(ConfigError, match="times: expected a whole number of at least 1"):
                fault("orders", times=times)
        with pytest.raises(ConfigError, match="times: expected a whole number of at least 1"):
            rmq.faults.slow_listener("billing", 5, times=times)
    for seconds in (-1, float("inf"), 1e300):
        with pytest.raises(ConfigError, match="seconds: expected seconds or a timedelta from 0 to"):
            rmq.faults.late_answer(seconds)
        with pytest.raises(ConfigError, match="down: expected seconds or a timedelta from 0 to"):
            rmq.crash_broker(down=seconds)
    assert not rmq.broker.dead
    calls: list[Callable[[Any], object]] = [rmq.join, lambda process: rmq.faults.skew_clock(process, 5)]
    for call in calls:
        with pytest.raises(TypeError, match=r"process: expected a Process, as rmq\.app returns one, found 'shop'"):
            call("shop")


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"now_ms": "2026-11-20"}, TypeError, "now_ms: expected milliseconds since 1970"),
        ({"now_ms": -1}, ConfigError, "now_ms: expected milliseconds from 1970 to the year 9999, found -1"),
        ({"now_ms": 10**18}, ConfigError, "now_ms: expected milliseconds from 1970 to the year 9999"),
        ({"over_tcp": True, "over_share": True}, ConfigError, "over_tcp and over_share: expected one of them"),
        ({"store_config": BrokerConfig()}, TypeError, "store_config: expected a StoreConfig, found BrokerConfig"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Kit(**settings)


def test_an_effect_without_a_text_fails_where_it_is_recorded(rmq: Kit) -> None:
    untyped: Any = rmq.effect
    with pytest.raises(TypeError, match="key: expected a text, found b'o-1'"):
        untyped("charge", b"o-1")


def test_a_failing_test_shows_a_call_that_was_not_awaited() -> None:
    """Its assertion fails because of that call, and comes before the end of the kit, which would name it."""
    charged: list[bytes] = []

    async def charge(message: DeliveredMessage) -> None:
        await asyncio.sleep(0)
        charged.append(message.body)

    async def moves_no_time() -> None:
        with Kit() as rmq:
            rmq.consumer("billing").subscribe("orders", charge)
            rmq.producer().send("orders", b"o-1")
            rmq.run_until_idle()
            assert charged == [b"o-1"]

    with pytest.raises(AssertionError) as failed:
        asyncio.run(moves_no_time())
    assert "was not awaited, so that coroutines did not go on: write `await`" in failed.value.__notes__[-1]


def test_a_process_is_set_up_by_a_plain_function(rmq: Kit) -> None:
    async def shop(process: Process) -> None:
        await process.producer("shop").send_async("orders", b"x")

    def audit(process: Process) -> Iterator[Producer]:
        yield process.producer("audit")

    for factory in (shop, audit):
        with pytest.raises(ConfigError, match=r"app '.*': expected a function .* make it a plain function"):
            rmq.app("it", factory)
