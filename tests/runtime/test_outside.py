"""The application's code is never called under the lock of a runner, whose other threads it may wait for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from librmq import Broker, ConsumeFrom, DeliveredMessage, Producer, PushConsumer, SimpleConsumer, ThreadRunner
from librmq.runtime.locks import is_held_here


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
