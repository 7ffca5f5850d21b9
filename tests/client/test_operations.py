"""What an application sees of the operations of its clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest

from librmq import Broker, TransactionProducer, TransactionState
from librmq.client import Operation, Producer, watch
from librmq.client.operations import Ended, Kind, Watcher
from librmq.consumer import PullConsumer, SimpleConsumer
from librmq.errors import ConfigError
from librmq.listener import DeadLetter
from librmq.message import Message
from librmq.metrics import Metrics
from librmq.runtime.locks import call_outside
from librmq.testing import Kit
from tests import own

Seen = list[tuple[str, str | None, str]]


@pytest.fixture
def rmq() -> Iterator[Kit]:
    with Kit() as kit:
        kit.broker.create_topic("orders", 1)
        yield kit


OURS: dict[str, Callable[[], Watcher]] = {
    "begins": lambda: lambda operation: None,
    "notes": lambda: noting([]),
    "failing at the end": lambda: lambda operation: lambda result, error: 1 // 0,
}


@pytest.fixture(params=own.params("watcher", OURS))
def watcher(request: pytest.FixtureRequest) -> Watcher:
    made: Watcher = request.param()
    return made


@pytest.mark.requirement
def test_a_watcher_changes_no_result(rmq: Kit, watcher: Watcher) -> None:
    """Sends of each kind, listeners that succeed, fail and give up, polls, receives, and both ends of transactions."""
    results: list[object] = []
    for is_watched in (False, True):
        stop = watch(rmq, watcher) if is_watched else lambda: None
        results.append(all_kinds(rmq, f"orders-{is_watched}"))
        stop()
    assert results[0] == results[1]


def all_kinds(rmq: Kit, topic: str) -> object:
    """Return what clients get from a topic of their own."""
    rmq.broker.create_topic(topic, 1)
    got: list[object] = []

    def listener(message: Any) -> None:
        got.append((message.body, message.reconsume_times))
        if message.body == b"fails" and message.reconsume_times < 2:
            raise ValueError("not yet")
        if message.body == b"poison":
            raise DeadLetter("never")

    consumer = rmq.consumer(f"push-{topic}", fail_fast=False)
    consumer.subscribe(topic, listener)
    producer = rmq.producer()
    sent = [producer.send(topic, body).queue_offset for body in (b"one", b"fails", b"poison")]
    sent.append(producer.send_batch([Message(topic, b"a"), Message(topic, b"b")]).queue_offset)
    producer.send_oneway(topic, b"last")
    sent.append(asyncio.run(producer.send_async(topic, b"async")).queue_offset)
    with TransactionProducer(rmq.broker, f"bank-{topic}", check=lambda message: TransactionState.COMMIT) as bank:
        for state in (TransactionState.COMMIT, TransactionState.ROLLBACK):
            bank.send_in_transaction(Message(topic, state.name.encode()), execute=lambda message, argument: state)  # noqa: B023
    with SimpleConsumer(rmq.broker, f"simple-{topic}") as simple:
        simple.subscribe(topic)
        received = simple.receive(wait=0)
        simple.ack(*received)
    with PullConsumer(rmq.broker, f"pull-{topic}") as pull:
        pull.subscribe(topic)
        polled = pull.poll(timeout=0)
        pull.commit()
    rmq.advance(minutes=5)
    return sent, got, [message.body for message in [*received, *polled]], len(rmq.broker.dead_letters(f"push-{topic}"))


def noting(seen: Seen) -> Watcher:
    """Return a watcher that notes beginnings, and ends by `+` or the class of their error."""

    def begins(operation: Operation) -> Ended:
        seen.append((operation.kind, operation.topic, operation.result))

        def ended(result: object, error: BaseException | None) -> None:
            seen.append((operation.kind, operation.topic, "+" if error is None else type(error).__name__))

        return ended

    return begins


def test_all_that_a_message_goes_through(rmq: Kit) -> None:
    seen: Seen = []
    stop = watch(rmq, noting(seen))

    def listener(message: Any) -> None:
        if message.reconsume_times == 0:
            raise ValueError("not yet")

    consumer = rmq.consumer("mailer", fail_fast=False)
    consumer.subscribe("orders", listener)
    rmq.advance(seconds=1)
    del seen[:]
    rmq.producer().send("orders", "one")
    rmq.advance(seconds=30)
    assert [entry for entry in seen if entry[0] not in ("pull", "rebalance", "hand_out")] == [
        ("send", "orders", ""),
        ("try", "orders", ""),
        ("try", "orders", "+"),
        ("send", "orders", "+"),
        ("process", "orders", ""),
        ("process", "orders", "ValueError"),
        ("settle", "orders", "retry"),
        ("outcome", "orders", "later"),
        ("process", "orders", ""),
        ("process", "orders", "+"),
        ("settle", "%RETRY%mailer", "ok"),
        ("outcome", "%RETRY%mailer", "success"),
        ("keep", "%RETRY%mailer", ""),
    ]
    stop()
    del seen[:]
    rmq.producer().send("orders", "two")
    rmq.advance(seconds=1)
    assert seen == []


def test_polls_receives_outcomes_and_transactions(rmq: Kit) -> None:
    seen: Seen = []
    watch(rmq.broker, noting(seen))
    with TransactionProducer(rmq.broker, "shop", check=lambda message: TransactionState.COMMIT) as producer:
        for state in (TransactionState.COMMIT, TransactionState.UNKNOWN):
            producer.send_in_transaction(Message("orders", b"x"), execute=lambda message, argument: state)  # noqa: B023
    ends = [entry for entry in seen if entry[0] in ("commit", "rollback", "undecided")]
    assert ends == [("commit", "orders", ""), ("commit", "orders", "+"), ("undecided", "orders", ""),
                    ("undecided", "orders", "+")]  # fmt: skip
    with SimpleConsumer(rmq.broker, "auditor") as simple:
        simple.subscribe("orders")
        rmq.producer().send("orders", "3")
        del seen[:]
        simple.ack(*simple.receive(wait=0))
    assert [entry for entry in seen if entry[2] == "+"] == [("receive", None, "+"), ("ack", "orders", "+")]


def test_several_watch_at_once_and_a_failing_one_fails_nothing(rmq: Kit, caplog: pytest.LogCaptureFixture) -> None:
    first, second = list[str](), list[str]()

    def fails(result: object, error: object) -> None:
        raise ValueError("of the watcher")

    def begins(operation: Operation) -> Ended:
        first.append(operation.kind)
        return fails

    producer = rmq.producer()
    watch(producer, begins)
    watch(None, lambda operation: second.append(operation.kind))()
    stop = watch(None, lambda operation: second.append(operation.kind))
    producer.send("orders", "one")
    stop()
    assert (first, second) == (["send", "try"], ["send", "try"])
    assert "a watcher has failed at the end of an operation" in caplog.text


def test_an_operation_ends_for_those_before_a_watcher_that_fails_at_its_beginning(rmq: Kit) -> None:
    ended: list[object] = []
    refusal = ValueError("of the watcher")

    def refuses(operation: Operation) -> None:
        raise refusal

    producer = rmq.producer()
    watch(producer, lambda operation: lambda result, error: ended.append(error))
    watch(producer, refuses)
    with pytest.raises(ValueError, match="of the watcher"):
        producer.send("orders", "one")
    assert ended == [refusal]


def test_moments_come_when_no_lock_is_held(rmq: Kit) -> None:
    free: list[bool] = []

    def begins(operation: Operation) -> None:
        later: list[int] = []
        call_outside(lambda: later.append(1))
        free.append(bool(later))

    watch(rmq, begins)
    rmq.consumer("mailer").subscribe("orders", lambda message: None)
    rmq.producer().send("orders", "one")
    rmq.advance(seconds=5)
    assert len(free) > 5
    assert all(free)


def test_a_send_asks_once_who_watches() -> None:
    class Asked(Producer):
        asked = 0
        kept: Mapping[Kind, tuple[Watcher, ...]] = MappingProxyType({})

        @property
        def watchers(self) -> Mapping[Kind, tuple[Watcher, ...]]:
            self.asked += 1
            return self.kept

        @watchers.setter
        def watchers(self, watchers: Mapping[Kind, tuple[Watcher, ...]]) -> None:
            self.kept = watchers

    with Broker.temporary() as broker, Asked(broker, "shop") as producer:
        producer.send("orders", b"1")
        producer.asked = 0
        producer.send("orders", b"2")
        assert producer.asked == 1


def test_sends_of_an_event_loop_are_counted() -> None:
    async def send(broker: Broker, metrics: Metrics) -> None:
        with Producer(broker, "shop", metrics=metrics) as producer:
            await asyncio.gather(*(producer.send_async("orders", b"x") for _ in range(3)))

    metrics = Metrics()
    with Broker.temporary() as broker:
        asyncio.run(send(broker, metrics))
    assert metrics.snapshot()["sends"] == {("orders", "SEND_OK"): 3}


def test_what_is_no_client_or_no_watcher_is_refused(rmq: Kit) -> None:
    with pytest.raises(ConfigError, match="expected a producer, a consumer, a Client, a route or None"):
        watch("orders", lambda operation: None)
    watcher: Any = lambda: None  # noqa: E731
    with pytest.raises(ConfigError, match=r"watch: the function .* is called with an Operation"):
        watch(rmq, watcher)
