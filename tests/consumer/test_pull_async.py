"""Polling in an event loop: the loop is never blocked, and no message is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from librmq.broker import Broker
from librmq.client.operations import Operation, watch
from librmq.client.producer import Producer
from librmq.config import StoreConfig
from librmq.consumer import PullConsumer
from librmq.errors import ClientStateError
from librmq.message.message import Message

WAIT_S = 30.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker.temporary(store_config=StoreConfig.tiny()) as opened:
        opened.create_topic("T", 1)
        yield opened


@pytest.fixture
def reader(broker: Broker) -> Iterator[PullConsumer]:
    consumer = PullConsumer(broker, "readers")
    consumer.assign(consumer.queues("T"))
    with consumer:
        consumer.seek_to_begin(consumer.queues("T")[0])
        yield consumer


@pytest.mark.anyio
async def test_a_poll_waits_and_others_continue(broker: Broker, reader: PullConsumer) -> None:
    producer = Producer(broker, "writers")
    polling = asyncio.ensure_future(reader.poll_async(WAIT_S))
    for _ in range(100):  # the loop keeps running
        await asyncio.sleep(0)
    assert not polling.done()
    await producer.send_async("T", b"1")
    assert [message.body for message in await polling] == [b"1"]


@pytest.mark.anyio
async def test_a_poll_that_is_cancelled_loses_nothing(broker: Broker, reader: PullConsumer) -> None:
    producer = Producer(broker, "writers")
    sent = [b"%d" % number for number in range(60)]
    seen: list[bytes] = []
    for body in sent:
        polling = asyncio.ensure_future(reader.poll_async(WAIT_S))
        await asyncio.sleep(0)
        producer.send("T", body)
        if len(seen) % 2:
            await asyncio.sleep(0)
        polling.cancel()
        try:
            seen += [message.body for message in await polling]
        except asyncio.CancelledError:
            continue
    while messages := await reader.poll_async(0):
        seen += [message.body for message in messages]
    assert seen == sent


@pytest.mark.anyio
async def test_a_poll_that_a_watcher_fails_loses_nothing(broker: Broker, reader: PullConsumer) -> None:
    def fail(operation: Operation) -> None:
        if operation.kind == "hand_out":
            raise OSError("no audit")

    Producer(broker, "writers").send("T", b"1")
    unwatch = watch(reader, fail)
    with pytest.raises(OSError, match="no audit"):
        await reader.poll_async(WAIT_S)
    unwatch()
    assert [message.body for message in await reader.poll_async(0)] == [b"1"]


@pytest.mark.anyio
async def test_messages_may_be_iterated_over(broker: Broker) -> None:
    producer = Producer(broker, "writers")
    for number in range(70):
        producer.send(Message("T", b"%d" % number))
    with PullConsumer(broker, "iterating", poll_timeout=0) as reader:
        reader.subscribe("T")
        reader.seek_to_begin(reader.queues("T")[0])
        assert [message.body async for message in reader] == [b"%d" % number for number in range(70)]
        assert await reader.poll_async() == []
        assert reader.position(reader.queues("T")[0]) == 70
    assert broker.consumer_offset("iterating", "T") == 70


@pytest.mark.anyio
async def test_an_async_loop_left_early_loses_nothing(broker: Broker) -> None:
    """After a ``return`` inside the ``async for``, the event loop closes the generator some time later."""
    producer = Producer(broker, "writers")
    for number in range(30):
        producer.send(Message("T", b"%d" % number))
    handled: list[int] = []

    async def first_nine(reader: PullConsumer) -> None:
        async for message in reader:
            handled.append(int(message.body))
            if len(handled) == 9:
                return

    with PullConsumer(broker, "leaving", poll_timeout=0) as reader:
        reader.subscribe("T")
        reader.seek_to_begin(reader.queues("T")[0])
        await first_nine(reader)
    with PullConsumer(broker, "leaving", poll_timeout=0) as reader:
        reader.subscribe("T")
        handled += [int(message.body) async for message in reader]
    assert handled == list(range(30))


@pytest.mark.anyio
async def test_a_shutdown_ends_a_poll(reader: PullConsumer) -> None:
    polling = asyncio.ensure_future(reader.poll_async(WAIT_S))
    await asyncio.sleep(0)
    await asyncio.to_thread(reader.shutdown)
    assert await polling == []
    with pytest.raises(ClientStateError):
        await reader.poll_async()


@pytest.mark.anyio
async def test_one_poll_at_a_time(reader: PullConsumer) -> None:
    polling = asyncio.ensure_future(reader.poll_async(WAIT_S))
    await asyncio.sleep(0)
    with pytest.raises(ClientStateError, match="one poll at a time"):
        await reader.poll_async()
    with pytest.raises(ClientStateError, match="one poll at a time"):
        reader.poll(0)  # would block the loop, and so wait forever
    polling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await polling
    assert await reader.poll_async(0) == []  # the next poll may run


def test_a_poll_continues_in_another_loop(broker: Broker, reader: PullConsumer) -> None:
    assert asyncio.run(reader.poll_async(0)) == []
    Producer(broker, "writers").send("T", b"1")  # to a queue whose reader waited in the first loop
    assert [message.body for message in asyncio.run(reader.poll_async(WAIT_S))] == [b"1"]
