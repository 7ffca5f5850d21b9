"""`PushConsumer(rate=)`: at most so many messages a second, over all processes of a group at a store."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import librmq
from librmq import Broker, ConfigError, ConsumeFrom, DeliveredMessage, Message, Producer, PushConsumer
from librmq.runtime.locks import Event, Lock
from librmq.testing import Kit
from librmq.wire.remoting import RemotingServer


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("members", [1, 3])
def test_a_group_gets_so_many_a_second(rmq: Kit, members: int, orderly: bool) -> None:
    times: list[int] = []
    for _ in range(members):
        consumer = rmq.consumer("billing", rate=10, orderly=orderly, consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders", lambda message: times.append(rmq.clock.now_ms()))
    rmq.run_until_idle()
    producer = rmq.producer()
    for number in range(200):
        producer.send("orders", f"{number}")
    rmq.advance(seconds=30)
    assert len(rmq.delivered("billing")) == 200
    for first, later in zip(times, times[11:], strict=False):
        assert later - first >= 1000
    assert times[-1] - times[0] <= 21_000


@pytest.mark.parametrize("over", ["tcp", "share"])
def test_a_group_of_a_kit_over_a_connection(over: str) -> None:
    with Kit(over_tcp=over == "tcp", over_share=over == "share") as rmq:
        for _ in range(2):
            rmq.consumer("billing", rate=10).subscribe("orders", lambda message: None)
        rmq.run_until_idle()
        for number in range(40):
            rmq.producer().send("orders", f"{number}")
        rmq.advance(seconds=2)
        assert 20 <= len(rmq.delivered("billing")) <= 21
        rmq.advance(seconds=4)
        assert len(rmq.delivered("billing")) == 40


def test_a_burst_after_a_rest(rmq: Kit) -> None:
    times: list[int] = []
    rmq.consumer("billing", rate=1, burst=5).subscribe("orders", lambda message: times.append(rmq.clock.now_ms()))
    rmq.run_until_idle()
    for number in range(8):
        rmq.producer().send("orders", f"{number}")
    rmq.advance(seconds=10)
    begin = times[0]
    assert Counter(time - begin for time in times) == {0: 5, 1000: 1, 2000: 1, 3000: 1}


def test_the_lowest_of_different_rates_counts_and_is_said(rmq: Kit, caplog: pytest.LogCaptureFixture) -> None:
    for rate in (50, 5):
        rmq.consumer("billing", rate=rate, consume_from=ConsumeFrom.FIRST).subscribe("orders", lambda message: None)
    rmq.run_until_idle()
    for number in range(100):
        rmq.producer().send("orders", f"{number}")
    rmq.advance(seconds=10)
    assert 45 <= len(rmq.delivered("billing")) <= 60
    assert caplog.text.count("different rates, 5, 50 messages a second") == 1


def test_it_changes_while_the_consumer_runs(rmq: Kit) -> None:
    consumer = rmq.consumer("billing", rate=1)
    consumer.subscribe("orders", lambda message: None)
    rmq.run_until_idle()
    for number in range(100):
        rmq.producer().send("orders", f"{number}")
    rmq.advance(seconds=5)
    assert len(rmq.delivered("billing")) <= 6
    consumer.configure(rate=None)
    rmq.advance(seconds=2)
    assert len(rmq.delivered("billing")) == 100


@pytest.mark.skipif(sys.platform == "win32", reason="no Unix domain sockets with credentials")
def test_processes_of_a_share_have_one_rate(tmp_path: Path) -> None:
    times, lock, done = list[float](), Lock(), Event()

    def listen(message: object) -> None:
        with lock:
            times.append(time.monotonic())  # noqa: TID251 (no upper limit is asserted)
            if len(times) == 30:
                done.set()

    with librmq.share(tmp_path) as owner, librmq.share(tmp_path) as peer:
        with Producer(owner, "shop") as producer:
            for number in range(60):
                producer.send("orders", f"{number}")
        consumers = [PushConsumer(route, "billing", rate=20, start_at="first") for route in (owner, peer)]
        for consumer in consumers:
            consumer.subscribe("orders", listen)
            consumer.start()
        assert done.wait(60)
        for consumer in consumers:
            consumer.shutdown()
    assert times[29] - times[0] >= 1.2  # two rates of their own would take 0.7 s


def test_over_connect_each_instance_counts_for_itself_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    done, count = Event(), [0]

    def listen(message: object) -> None:
        count[0] += 1
        if count[0] == 3:
            done.set()

    with Broker.temporary() as broker, RemotingServer(broker) as server:
        with Producer(broker, "shop") as producer:
            for number in range(3):
                producer.send("orders", f"{number}")
        with librmq.connect(server.address) as route:
            consumer = PushConsumer(route, "billing", rate=50, consume_from=ConsumeFrom.FIRST)
            consumer.subscribe("orders", listen)
            with consumer:
                assert done.wait(60)
    assert "rate counts for this instance alone" in caplog.text


async def test_concurrency_bounds_coroutines() -> None:
    """Three at a time meet; a fourth would count beside them, and two would wait for ever."""
    running: list[int] = []
    counts: list[int] = []
    meeting, done = asyncio.Barrier(3), asyncio.Event()

    async def listen(message: DeliveredMessage) -> None:
        running.append(1)
        counts.append(len(running))
        await meeting.wait()
        running.pop()
        if len(counts) == 39:
            done.set()

    with Broker.temporary() as broker, Producer(broker, "shop") as producer:
        consumer = PushConsumer(broker, "billing", concurrency=3, consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders", listen)
        producer.send_batch([Message("orders", b"%d" % number) for number in range(39)])
        async with consumer:
            await asyncio.wait_for(done.wait(), 60)
    assert max(counts) == 3


def test_concurrency_is_another_name_of_threads(rmq: Kit) -> None:
    assert PushConsumer(rmq.route, "billing", concurrency=3).config.threads == 3
    with pytest.raises(ConfigError, match="concurrency: expected it without threads"):
        PushConsumer(rmq.route, "billing", concurrency=3, threads=3)
