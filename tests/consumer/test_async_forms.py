"""Calls that block have a form to await, and coroutine listeners end with their consumer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import librmq
from librmq.protocol import Receive
from librmq.runtime import Runner
from tests.wrapped_route import WrappedBrokers

RUNNERS = pytest.mark.parametrize("make_runner", [librmq.ManualRunner, librmq.ThreadRunner])


async def test_a_broker_opens_without_blocking_the_loop(tmp_path: Path) -> None:
    async with await librmq.Broker.open_async(tmp_path / "data", name="broker-x") as broker:
        assert broker.name == "broker-x"
        with pytest.raises(librmq.StoreLockedError):
            await librmq.Broker.open_async(tmp_path / "data")


def test_a_broker_that_is_opened_too_late_is_closed(tmp_path: Path) -> None:
    async def scenario() -> None:
        opening = asyncio.create_task(librmq.Broker.open_async(tmp_path / "data"))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    asyncio.run(scenario())
    with librmq.Broker.open(tmp_path / "data", wait=60) as broker:
        assert broker.topics() == broker.topics()


@RUNNERS
async def test_receives_are_acknowledged(make_runner: Callable[[], Runner]) -> None:
    async with (
        librmq.Broker.temporary(runner=make_runner()) as broker,
        librmq.Producer(broker, "shop") as producer,
        librmq.SimpleConsumer(broker, "billing") as consumer,
    ):
        broker.create_topic("orders", 1)
        consumer.subscribe("orders")
        for body in (b"1", b"2"):
            await producer.send_async("orders", body)
        first, second = await consumer.receive_async(2, invisible=30)
        await consumer.extend_async(second, 60)
        await consumer.ack_async(first, second)
        assert await consumer.receive_async(2, wait=0) == []
        assert await broker.run_async(broker.dead_letters, "billing") == []


class _Elsewhere(WrappedBrokers):
    """Brokers that note when a receive has come, and answer it when they may."""

    is_remote = True

    def __init__(self, broker: librmq.Broker, asked: threading.Event, answers: threading.Event) -> None:
        def pass_on(request: object, call: Callable[[Any], Any]) -> object:
            if isinstance(request, Receive):
                asked.set()
                assert answers.wait(10)
            return call(request)

        super().__init__(broker, pass_on)


async def test_a_receive_waits_for_a_broker_elsewhere_beside_the_loop_and_loses_nothing_if_cancelled() -> None:
    asked, answers = threading.Event(), threading.Event()
    async with librmq.Broker.temporary() as broker, librmq.Producer(broker, "shop") as producer:
        producer.send("orders", b"1")
        async with librmq.SimpleConsumer(_Elsewhere(broker, asked, answers), "billing") as consumer:
            consumer.subscribe("orders")
            receiving = asyncio.create_task(consumer.receive_async())
            await asyncio.to_thread(asked.wait)
            receiving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await receiving
            answers.set()
            (message,) = await consumer.receive_async()
            assert (message.body, message.attempt) == (b"1", 1)


def test_the_next_receive_returns_what_came_when_its_event_loop_had_ended() -> None:
    asked, answers = threading.Event(), threading.Event()

    async def leave() -> None:
        receiving = asyncio.create_task(consumer.receive_async())
        await asyncio.to_thread(asked.wait)
        receiving.add_done_callback(lambda _: answers.set())

    with librmq.Broker.temporary() as broker, librmq.Producer(broker, "shop") as producer:
        producer.send("orders", b"1")
        with librmq.SimpleConsumer(_Elsewhere(broker, asked, answers), "billing") as consumer:
            consumer.subscribe("orders")
            asyncio.run(leave())
            (message,) = consumer.receive(wait=0)
            assert (message.body, message.attempt) == (b"1", 1)


@RUNNERS
@pytest.mark.parametrize("state", [librmq.TransactionState.COMMIT, librmq.TransactionState.ROLLBACK])
def test_a_local_transaction_may_be_a_coroutine(
    make_runner: Callable[[], Runner], state: librmq.TransactionState
) -> None:
    async def scenario() -> list[bytes]:
        async with librmq.Broker.temporary(runner=make_runner()) as broker:

            async def execute(message: librmq.Message, arg: object) -> librmq.TransactionState:
                await asyncio.sleep(0)
                assert arg == "o-1"
                return state

            async with librmq.TransactionProducer(broker, "shop", check=lambda message: None) as producer:
                result = await producer.send_in_transaction_async(
                    librmq.Message("orders", b"x"), "o-1", execute=execute
                )
                assert result.state is state
            return [message.body for message in broker.messages("orders")]

    assert asyncio.run(scenario()) == ([b"x"] if state is librmq.TransactionState.COMMIT else [])


async def test_a_failing_local_transaction_is_unknown() -> None:
    async with librmq.Broker.temporary(runner=librmq.ManualRunner()) as broker:

        async def execute(message: librmq.Message, arg: object) -> librmq.TransactionState:
            raise ValueError("no stock")

        producer = librmq.TransactionProducer(broker, "shop", check=lambda message: None, execute=None)
        result = await producer.send_in_transaction_async(librmq.Message("orders", b"x"), execute=execute)
        assert result.state is librmq.TransactionState.UNKNOWN
        await producer.shutdown_async()


@RUNNERS
async def test_a_coroutine_listener_is_cancelled_after_the_shutdown(make_runner: Callable[[], Runner]) -> None:
    """It would wait forever; its message is not consumed."""
    began, cancelled = asyncio.Event(), asyncio.Event()

    async with librmq.Broker.temporary(runner=make_runner()) as broker, librmq.Producer(broker, "shop") as producer:
        consumer = librmq.PushConsumer(broker, "billing", shutdown_timeout=0.01)

        @consumer.subscribe("orders")
        async def charge(message: object) -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        consumer.start()
        await producer.send_async("orders", b"x")
        if isinstance(broker.runner, librmq.ManualRunner):
            advancing = asyncio.create_task(broker.runner.advance_async(1000))
            await asyncio.wait_for(began.wait(), 60)
            advancing.cancel()
        await asyncio.wait_for(began.wait(), 60)
        assert not await consumer.shutdown_async()
        await asyncio.wait_for(cancelled.wait(), 60)
        assert sum(broker.consumer_offsets("billing", "orders").values()) == 0
