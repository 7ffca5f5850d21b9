"""While a downstream service is down, consumers rest and use up no attempts."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from librmq import Broker, DownstreamDown, ManualRunner, Metrics, Producer, PullConsumer, PushConsumer, StoreConfig
from librmq.consumer import DeliveredMessage
from librmq.errors import ClientStateError
from librmq.files._memory import MemoryFiles


class Bank:
    """A downstream service that counts its calls and can be down."""

    def __init__(self, **how: object) -> None:
        self.is_up = False
        self.calls: list[tuple[int, bytes]] = []
        self.booked: list[bytes] = []
        self.attempts: set[int] = set()
        self.how = how

    def book(self, message: DeliveredMessage) -> None:
        self.calls.append((message.queue_id, message.body))
        self.attempts.add(message.reconsume_times)
        if not self.is_up:
            raise DownstreamDown("the bank is down", **self.how)  # type: ignore[arg-type]
        self.booked.append(message.body)


@pytest.fixture
def runner() -> ManualRunner:
    return ManualRunner()


@pytest.fixture
def broker(runner: ManualRunner) -> Iterator[Broker]:
    with Broker.open("/b", runner=runner, files=MemoryFiles(), store_config=StoreConfig.tiny()) as opened:
        opened.create_topic("T", 2)
        yield opened


def send(broker: Broker, count: int) -> list[bytes]:
    with Producer(broker, "p") as producer:
        for number in range(count):
            producer.send("T", b"%d" % number)
    return [b"%d" % number for number in range(count)]


def consume(broker: Broker, bank: Bank, **settings: object) -> PushConsumer:
    consumer = PushConsumer(broker, "g", **settings)  # type: ignore[arg-type]
    consumer.subscribe("T", bank.book)
    consumer.start()
    return consumer


@pytest.mark.parametrize("orderly", [False, True])
def test_an_hour_down_uses_no_attempt_up(
    broker: Broker, runner: ManualRunner, orderly: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bank, metrics = Bank(seconds=60), Metrics()
    consumer = consume(broker, bank, orderly=orderly, max_reconsume_times=3, metrics=metrics)
    bodies = send(broker, 8)
    runner.advance(3_600_000)
    assert bank.booked == []
    assert 55 <= len(bank.calls) <= 70  # those that were already running, then one a minute
    assert broker.consumer_offsets("g", "T").get(0, 0) == 0
    bank.is_up = True
    runner.advance(61_000)
    assert sorted(bank.booked) == bodies
    assert bank.attempts == {0}
    assert broker.dead_letters("g") == []
    told = [record.message for record in caplog.records if "what listeners call" in record.message]
    assert len([line for line in told if "fails; next try in 60000 ms: the bank is down" in line]) == 1
    counts = metrics.snapshot()
    down = len(bank.calls) - 8
    assert counts["rests"]["T", "g"] == counts["consumed"]["T", "g", "downstream"] == down
    consumer.shutdown()


def test_order_holds_through_a_rest(broker: Broker, runner: ManualRunner) -> None:
    bank = Bank(seconds=10, only_queue=True)
    consumer = consume(broker, bank, orderly=True)
    with Producer(broker, "p") as producer:
        for number in range(5):
            producer.send("T", b"%d" % number, queue=0)
    runner.advance(60_000)
    bank.is_up = True
    runner.advance(60_000)
    assert bank.booked == [b"%d" % number for number in range(5)]
    consumer.shutdown()


@pytest.mark.parametrize("orderly", [False, True])
def test_only_the_queue_rests(broker: Broker, runner: ManualRunner, orderly: bool) -> None:
    booked: list[tuple[int, int]] = []
    consumer = PushConsumer(broker, "g", orderly=orderly)
    down = {0}

    @consumer.subscribe("T")
    def book(message: DeliveredMessage) -> None:
        if message.queue_id in down:
            raise DownstreamDown(seconds=timedelta(minutes=1), only_queue=True)
        booked.append((message.queue_id, message.queue_offset))

    consumer.start()
    send(broker, 8)
    runner.advance(200_000)
    assert booked == [(1, offset) for offset in range(4)]
    down.clear()
    runner.advance(60_000)
    assert sorted(booked) == [(queue, offset) for queue in (0, 1) for offset in range(4)]
    consumer.shutdown()


def test_the_first_call_after_a_rest_decides(broker: Broker, runner: ManualRunner) -> None:
    bank = Bank(seconds=60)
    consumer = consume(broker, bank, threads=8)
    send(broker, 8)
    runner.advance(1_000)
    before = len(bank.calls)
    runner.advance(60_000)
    assert len(bank.calls) == before + 1
    consumer.shutdown()


def test_the_done_part_of_a_batch_counts(broker: Broker, runner: ManualRunner) -> None:
    got: list[list[bytes]] = []
    consumer = PushConsumer(broker, "g", batch_size=4)

    @consumer.subscribe("T")
    def book(messages: list[DeliveredMessage]) -> None:
        got.append([message.body for message in messages])
        if len(got) == 1:
            raise DownstreamDown(consumed=3, seconds=1)

    with Producer(broker, "p") as producer:
        for number in range(4):
            producer.send("T", b"%d" % number, queue=0)
    consumer.start()
    runner.advance(2_000)
    assert got == [[b"0", b"1", b"2", b"3"], [b"3"]]
    consumer.shutdown()


def test_a_rest_does_not_count_as_a_consume_timeout(broker: Broker, runner: ManualRunner) -> None:
    bank = Bank(seconds=3600)
    consumer = consume(broker, bank, consume_timeout=60)
    send(broker, 2)
    runner.advance(1_800_000)
    bank.is_up = True
    runner.advance(1_900_000)
    assert sorted(bank.booked) == [b"0", b"1"]
    assert broker.store.queues.get(("%RETRY%g", 0)) is None
    consumer.shutdown()


def test_a_message_of_its_own_still_fails(broker: Broker, runner: ManualRunner) -> None:
    """Other exceptions count as attempts, even between rests."""
    consumer = PushConsumer(broker, "g", max_reconsume_times=1)
    down = [True]

    @consumer.subscribe("T")
    def book(message: DeliveredMessage) -> None:
        if message.body == b"bad":
            raise ValueError("bad")
        if down.pop() if down else False:
            raise DownstreamDown(seconds=5)

    consumer.start()
    with Producer(broker, "p") as producer:
        producer.send("T", b"good")
        producer.send("T", b"bad")
    runner.advance(60_000)
    assert [letter.body for letter in broker.dead_letters("g")] == [b"bad"]
    consumer.shutdown()


def test_a_rest_takes_back_nothing_that_was_committed(broker: Broker, runner: ManualRunner) -> None:
    broker.create_topic("t", 1)
    with Producer(broker, "p") as producer:
        for number in range(5):
            producer.send("t", f"{number}")
    with PullConsumer(broker, "g", poll_timeout=0, auto_commit=False, pull_batch_size=2) as consumer:
        (queue,) = consumer.queues("t")
        consumer.assign([queue])
        consumer.seek_to_begin(queue)
        assert [message.body for message in consumer.poll(0)] == [b"0", b"1"]
        consumer.commit()
        consumer.rest(5)
        consumer.commit()
        assert consumer.committed(queue) == 2
        runner.advance(5_000)
        for message in consumer:  # the rest ends the loop
            assert message.body == b"2"
            consumer.commit()
            consumer.rest(5)
        runner.advance(5_000)
        assert [message.body for message in consumer.poll(0)] == [b"3", b"4"]


def test_a_pull_consumer_rests(broker: Broker, runner: ManualRunner) -> None:
    bodies = send(broker, 4)
    with PullConsumer(broker, "g", poll_timeout=0) as consumer:
        consumer.subscribe("T")
        seen: list[bytes] = []
        for message in consumer:
            if len(seen) == 1:
                consumer.rest(30, reason="the bank is down")
                continue
            seen.append(message.body)
        assert len(seen) == 1
        assert consumer.poll() == []
        runner.advance(30_000)
        seen += [message.body for message in consumer]
        assert sorted(seen) == bodies
        polled = send(broker, 1)
        queue = next(iter(consumer.assignment))
        first = consumer.poll()
        consumer.rest(5)
        runner.advance(5_000)
        assert [message.body for message in first] == [message.body for message in consumer.poll()] == polled
        with pytest.raises(ClientStateError):
            consumer.rest(5, queue=queue._replace(queue_id=99))
        with pytest.raises(ValueError, match="seconds"):
            consumer.rest(0)


@pytest.mark.parametrize("seconds", [0, -1, 86_401])
def test_rests_without_sense_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds: expected more than 0, and a day at most"):
        DownstreamDown(seconds=seconds)
