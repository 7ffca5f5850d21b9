"""The application's code is never called under the lock of a runner, whose other threads it may wait for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from librmq import Broker, ConsumeFrom, DeliveredMessage, Metrics, Producer, PushConsumer, SimpleConsumer, ThreadRunner
from librmq.client.allocation import allocate_averagely
from librmq.message import MessageQueue
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock, calls_later, is_held_here
from tests import lock_order


class Watching(logging.Handler):
    """Notes the lines that it gets while its thread holds the lock of a runner."""

    def __init__(self, runner: ThreadRunner) -> None:
        super().__init__(logging.DEBUG)
        self.runner, self.lines, self.under_lock = runner, list[str](), list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        (self.under_lock if is_held_here(self.runner.lock) else self.lines).append(record.getMessage())


@pytest.fixture
def runner() -> Iterator[ThreadRunner]:
    runner = ThreadRunner()
    yield runner
    runner.shutdown()


@pytest.fixture
def watching(runner: ThreadRunner) -> Iterator[Watching]:
    handler, log = Watching(runner), logging.getLogger("librmq")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    yield handler
    log.removeHandler(handler)
    log.setLevel(before)


def test_no_line_is_written_under_the_lock(runner: ThreadRunner, watching: Watching) -> None:
    """A handler that sends by librmq, and is called by a thread of the application too, would stand still."""
    has_failed = threading.Event()

    def fail(_: DeliveredMessage) -> None:
        has_failed.set()
        raise ZeroDivisionError

    with Broker.temporary(runner=runner) as broker, Producer(broker, "shop") as producer:
        producer.send("orders", b"x")
        consumer = PushConsumer(broker, "billing", consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders", fail)
        consumer.start()
        assert has_failed.wait(60)
        consumer.shutdown()
    runner.shutdown()
    assert any("ZeroDivisionError" in line for line in watching.lines)
    assert watching.under_lock == []


def test_a_notification_comes_without_the_lock(runner: ThreadRunner) -> None:
    is_told, held = threading.Event(), list[bool]()

    def notify() -> None:
        held.append(is_held_here(runner.lock))
        is_told.set()

    with Broker.temporary(runner=runner) as broker, Producer(broker, "shop") as producer:
        broker.create_topic("orders", 1)
        with SimpleConsumer(broker, "billing") as consumer:
            consumer.subscribe("orders")
            assert consumer.receive_or_notify("orders", 1, notify) == []
            producer.send("orders", b"x")
            assert is_told.wait(60)
    assert held == [False]


def consume_one(broker: Broker, **settings: Any) -> None:
    is_consumed = threading.Event()
    consumer = PushConsumer(broker, "billing", consume_from=ConsumeFrom.FIRST, **settings)
    consumer.subscribe("orders", lambda message: is_consumed.set())
    consumer.start()
    assert is_consumed.wait(60)
    consumer.shutdown()


def test_a_subclass_of_metrics_counts_without_the_lock(runner: ThreadRunner) -> None:
    """All that librmq counts reaches it, in the order of the calls."""
    held = list[bool]()

    class Own(Metrics):
        def count(self, name: str, n: float = 1, **labels: str) -> None:
            held.append(is_held_here(runner.lock))
            super().count(name, n, **labels)

        def gauge(self, name: str, value: Any, **fields: Any) -> None:
            held.append(is_held_here(runner.lock))
            super().gauge(name, value, **fields)

    metrics = Own()
    with (
        Broker.temporary(runner=runner, metrics=metrics) as broker,
        Producer(broker, "shop", metrics=metrics) as producer,
    ):
        producer.send("orders", b"x")
        consume_one(broker, metrics=metrics)
    runner.shutdown()
    counted = metrics.snapshot()
    assert "clients" not in counted
    assert {name: [*counted[name].values()] for name in ("sends", "messages_in", "consumed")} == {
        "sends": [1], "messages_in": [1], "consumed": [1]
    }  # fmt: skip
    assert not any(held)


def test_a_strategy_shares_out_without_the_lock(runner: ThreadRunner) -> None:
    held = list[bool]()

    def share_out(client: str, queues: Sequence[MessageQueue], clients: Sequence[str]) -> list[MessageQueue]:
        held.append(is_held_here(runner.lock))
        return allocate_averagely(client, queues, clients)

    with Broker.temporary(runner=runner) as broker, Producer(broker, "shop") as producer:
        producer.send("orders", b"x")
        consume_one(broker, strategy=share_out)
    assert held
    assert not any(held)


class Own(Metrics):
    """A subclass as an application has it."""

    def count(self, name: str, n: float = 1, **labels: str) -> None:
        super().count(name, n, **labels)


def _log_line() -> None:
    EventLog("librmq.store").debug("a line")


def _call_outside() -> None:
    from librmq.runtime.locks import call_outside

    call_outside(lambda: None)


def _share_out() -> None:
    from librmq.client.allocation import own_share

    own_share("c", [MessageQueue("orders", "b", 0)], ["c"], lambda client, queues, clients: list(queues))


def _count() -> None:
    Own().count("flow_controls", topic="orders", group="billing")


@pytest.mark.parametrize("call", [_log_line, _call_outside, _share_out, _count])
def test_code_of_the_application_within_a_lock_fails_a_test(call: Callable[[], object]) -> None:
    """Of the kinds that `tests.lock_order` watches, each is found within a lock of the list."""
    lock = lock_order.Recorded(Lock(), "Retention._check_guard")
    with lock_order.elsewhere():
        call()
        assert lock_order.faults() == ""
        lock_order.hold(lock)
        call()
    assert "is called within Retention._check_guard" in lock_order.faults()


def test_what_comes_up_within_a_block_is_called_at_its_end(watching: Watching) -> None:
    with calls_later():
        with calls_later():
            EventLog("librmq.store").info("a line")
        assert watching.lines == []
    assert watching.lines == ["a line"]
