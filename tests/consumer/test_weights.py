"""Listeners with weights: important messages begin next under a backlog, and no weight starves."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from librmq.broker import Broker
from librmq.client.producer import Producer
from librmq.consumer import DeliveredMessage, PushConsumer
from librmq.consumer._assignment import AssignedQueue
from librmq.consumer._concurrent import Backlog, Pulled
from librmq.errors import ConfigError
from librmq.listener import DownstreamDown, ReconsumeLater
from librmq.message.message import Message, MessageQueue
from librmq.protocol import SendBack
from librmq.runtime.runner import Step
from librmq.testing import Kit, Process, explore
from tests.consumer.parties import bodies, seam_of, send
from tests.planted import send as send_to_end

QUEUE = AssignedQueue(MessageQueue("t", "broker-a", 0), 0, None, Step("pull", lambda now_ms: None))


# --------------------------------------------------------------------------------------------------------- the backlog


def batch(weight: int, count: int) -> Pulled:
    return Pulled(QUEUE, [DeliveredMessage(b"", QUEUE.queue, number, (0, 0)) for number in range(count)], weight)


@given(
    st.lists(
        st.one_of(st.tuples(st.sampled_from([1, 3, 8, 50]), st.integers(1, 4)), st.none()), min_size=1, max_size=120
    )
)
def test_shares_follow_the_weights(events: list[tuple[int, int] | None]) -> None:
    """An event adds a batch to a weight, or begins the next one."""
    backlog, waiting = Backlog(), defaultdict[int, list[Pulled]](list)
    since: dict[frozenset[int], dict[int, Fraction]] = {}  # service of two weights since both wait
    for event in [*events, *[None] * len(events)]:
        if event is not None:
            weight, count = event
            waiting[weight].append(batch(weight, count))
            backlog.append(waiting[weight][-1])
        elif backlog.lanes:
            first = backlog.first()
            assert waiting[first.weight].pop(0) is first  # in order within a weight
            count = len(backlog.take(first, 4))
            for pair, service in since.items():
                if first.weight in pair:
                    service[first.weight] += Fraction(count, first.weight)
        present = [weight for weight, batches in waiting.items() if batches]
        assert set(backlog.lanes) == set(present)
        pairs = {frozenset((one, two)) for one in present for two in present if one != two}
        since = {pair: since.get(pair, dict.fromkeys(pair, Fraction())) for pair in pairs}
        for service in since.values():
            (one, first_share), (two, second_share) = service.items()
            assert abs(first_share - second_share) <= Fraction(4, one) + Fraction(4, two) + Fraction(1, 1 << 20)


def test_a_weight_that_was_idle_begins_next() -> None:
    backlog = Backlog()
    for number in range(50):
        backlog.append(batch(1, 1))
        if number >= 30:
            backlog.append(batch(8, 1))
            assert backlog.first().weight == 8
            backlog.take(backlog.first(), 1)
        backlog.take(backlog.first(), 1)


# ------------------------------------------------------------------------------------------------------- the consumer


def weighted(rmq: Kit, begun: list[str], **settings: Any) -> PushConsumer:
    """Return a consumer with one thread, whose listeners note tags."""
    consumer = rmq.consumer("g", fail_fast=False, **{"threads": 1, **settings})

    @consumer.subscribe("t", tags="paid", weight=8)
    def pay(message: DeliveredMessage) -> None:
        begun.append("paid")

    @consumer.subscribe("t", weight=1)
    def others(message: DeliveredMessage) -> None:
        begun.append(message.tags or "none")

    return consumer


def test_a_paid_message_begins_next_under_a_backlog(one_queue: Kit) -> None:
    begun: list[str] = []
    consumer = weighted(one_queue, begun)
    assert consumer.subscriptions["t"].expression == "*"
    for number in range(900):
        send(one_queue, str(number), tags="free")
    for number in range(20):
        send(one_queue, str(number), tags="paid")
    one_queue.advance(seconds=30)
    paid = [at for at, tag in enumerate(begun) if tag == "paid"]
    first = paid[0]  # the pulls of 920 messages come between the first calls
    assert first < 60
    assert Counter(begun[first : first + 22]) == {"paid": 20, "free": 2}
    assert Counter(begun) == {"paid": 20, "free": 900}
    assert one_queue.broker.consumer_offset("g", "t") == 920


@pytest.mark.parametrize("batch_size", [1, 4])
def test_topics_by_weight_and_batches(one_queue: Kit, batch_size: int) -> None:
    one_queue.broker.create_topic("urgent", 1)
    calls: list[str] = []
    consumer = one_queue.consumer("g", threads=1, batch_size=batch_size)
    consumer.subscribe("t", lambda messages: calls.append("t"), batch=batch_size > 1)
    consumer.subscribe("urgent", lambda messages: calls.append("urgent"), weight=3, batch=batch_size > 1)
    send(one_queue, *"0123456789ab")
    send(one_queue, *"0123456789ab", topic="urgent")
    one_queue.run_until_idle()
    assert Counter(calls) == {"t": 12 // batch_size, "urgent": 12 // batch_size}
    assert len(calls) - calls[::-1].index("urgent") <= len(calls) * 2 // 3 + 2  # urgent ones ended first


def test_a_redelivery_has_the_weight_of_its_listener(one_queue: Kit) -> None:
    begun: list[str] = []
    consumer = one_queue.consumer("g", fail_fast=False, threads=1)

    @consumer.subscribe("t", tags="paid", weight=8)
    def pay(message: DeliveredMessage) -> None:
        begun.append(f"paid {message.reconsume_times}")
        if not message.reconsume_times:
            raise ReconsumeLater(delay_level=1)

    @consumer.subscribe("t", weight=1)
    def others(message: DeliveredMessage) -> None:
        begun.append("free")
        if len(begun) == 2:
            for number in range(8):
                send(one_queue, str(number), tags="free")
            one_queue.clock.move_to(one_queue.clock.now_ms() + 1_500)

    send(one_queue, "p", tags="paid")
    send(one_queue, *"abcdefgh", tags="free")
    one_queue.advance(seconds=20)
    assert begun[0] == "paid 0"
    assert 0 < begun.index("paid 1") < 16
    assert begun.count("free") == 16


def test_rests_and_weights_lose_nothing(one_queue: Kit) -> None:
    begun: list[str] = []
    consumer = one_queue.consumer("g", fail_fast=False, threads=2)

    @consumer.subscribe("t", tags="paid", weight=8)
    def pay(message: DeliveredMessage) -> None:
        if len(begun) == 3:
            begun.append("down")
            raise DownstreamDown(seconds=5, only_queue=True)
        begun.append(message.body.decode())

    consumer.subscribe("t", lambda message: begun.append(message.body.decode()), weight=1)
    send(one_queue, *"abcd", tags="free")
    send(one_queue, *"ABCD", tags="paid")
    one_queue.advance(seconds=2)
    (instance,) = one_queue.broker.instances("g").values()
    assert instance is not None
    state = instance.queues[0]
    assert begun[3] == "down"
    assert (state.waiting, state.running) == (8 - 3 - len(begun[4:]), 0)
    one_queue.advance(seconds=10)
    assert sorted(begun) == sorted([*"abcdABCD", "down"])
    assert one_queue.broker.consumer_offset("g", "t") == 8


def test_weights_that_come_and_go_while_messages_wait(one_queue: Kit) -> None:
    one_queue.broker.create_topic("urgent", 1)
    begun: list[str] = []
    consumer = one_queue.consumer("g", threads=1)

    @consumer.subscribe("t")
    def listen(message: DeliveredMessage) -> None:
        begun.append(message.topic)
        if len(begun) == 5:
            consumer.subscribe("urgent", lambda message: begun.append(message.topic), weight=9)
        if len(begun) == 40:
            consumer.unsubscribe("urgent")

    send(one_queue, *map(str, range(60)))
    send(one_queue, *map(str, range(10)), topic="urgent")
    one_queue.advance(seconds=30)
    assert begun.count("t") == 60
    assert begun.index("urgent") < 12
    assert begun[:30].count("urgent") == 10
    assert one_queue.broker.consumer_offset("g", "t") == 60


def test_a_stuck_important_message_goes_back_alone(one_queue: Kit) -> None:
    """The consume timeout counts calls, not the wait of a message that others have overtaken."""
    weighted(one_queue, [], consume_timeout=60)
    one_queue.faults.slow_listener("g", 140)
    send(one_queue, "a", "b", tags="free")
    send(one_queue, "P", tags="paid")
    one_queue.advance(seconds=150)
    assert bodies(one_queue) == ["P", "a", "P", "b"]
    assert one_queue.delivered("g")[2].attempt == 1


@pytest.mark.parametrize(
    ("weight", "orderly", "says"),
    [
        (0, False, "weight: expected a whole number from 1 to 1000, found 0"),
        (1001, False, "found 1001"),
        (2.5, False, "found 2.5"),
        (True, False, "found True"),
        (8, True, "an orderly consumer delivers each queue in its order"),
    ],
)
def test_bad_weights(one_queue: Kit, weight: Any, orderly: bool, says: str) -> None:
    consumer = one_queue.consumer("g", orderly=orderly)
    with pytest.raises(ConfigError, match=says):
        consumer.subscribe("t", print, tags="paid", weight=weight)
    assert not consumer.subscriptions
    consumer.subscribe("t", lambda message: None)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"sql": "p = 1", "weight": 2}, {"tags": "a"}),
        ({"tags": "a", "weight": 2}, {"sql": "p = 1"}),
        ({"tags": "a", "weight": 2}, {"tags": "a"}),
        ({"weight": 2}, {"weight": 1}),
    ],
)
def test_listeners_that_can_not_share_a_topic(one_queue: Kit, first: dict[str, Any], second: dict[str, Any]) -> None:
    consumer = one_queue.consumer("g")
    consumer.subscribe("t", lambda message: None, **first)
    with pytest.raises(ConfigError, match="has a listener already"):
        consumer.subscribe("t", print, **second)


@pytest.mark.slow
def test_threads_begin_a_paid_message_next() -> None:
    begun: list[str] = []
    turn, at_work = threading.Semaphore(0), threading.Semaphore(0)
    with Broker.temporary() as broker:
        broker.create_topic("t", 1)
        consumer = PushConsumer(broker, "g", threads=2)
        arrived = threading.Event()

        def listen(message: DeliveredMessage) -> None:
            begun.append(message.tags or "")
            at_work.release()
            turn.acquire()

        consumer.subscribe("t", listen, tags="paid", weight=8)
        consumer.subscribe("t", listen, tags="free", weight=1)
        producer = Producer(broker, "p")
        for _ in range(900):
            producer.send("t", b"x", tags="free")
        consumer.start()
        assert at_work.acquire(timeout=30)
        assert at_work.acquire(timeout=30)
        put = consumer.delivery.pulled

        def pulled(assigned: AssignedQueue, *more: Any) -> None:
            put(assigned, *more)
            if assigned.next_offset == 901:
                arrived.set()

        with broker.runner.lock:
            consumer.delivery.pulled = pulled  # type: ignore[method-assign, assignment]
        producer.send("t", b"x", tags="paid")
        assert arrived.wait(30)
        turn.release()
        assert at_work.acquire(timeout=30)
        assert begun == ["free", "free", "paid"]
        turn.release(1000)
        consumer.shutdown()


# ------------------------------------------------------------------------------------------------------------ schedules


def important_first(rmq: Kit) -> None:
    """Messages of two weights are pulled at once; processes die and answers are lost."""
    free: set[bytes] = set()

    def shop(process: Process) -> None:
        begun: list[str] = []
        consumer = process.consumer("billing", threads=1)

        def listen(message: DeliveredMessage) -> None:
            rmq.checkpoint("at work")
            if message.reconsume_times:
                return
            begun.append(message.tags or "")
            free.update([message.body] if message.tags == "free" else [])
            paid = begun.count("paid")
            assert begun.count("free") <= 1 + paid // 4 or paid >= 12, f"a free message overtakes paid ones: {begun}"
            assert begun[-9:].count("paid") < 9 or len(free) == 4, f"free messages starve: {begun}"

        consumer.subscribe("orders", listen, tags="paid", weight=4)
        consumer.subscribe("orders", listen, weight=1)

    rmq.broker.create_topic("orders", queues=1)
    for tag, count in (("free", 4), ("paid", 12)):
        for number in range(count):
            send_to_end(rmq.producer(), Message("orders", b"%d" % number, tags=tag), 0)
    rmq.app("shop", shop)
    rmq.advance(minutes=5)


@pytest.mark.slow
def test_no_schedule_breaks_the_shares() -> None:
    result = explore(important_first, runs=150)
    assert result.chosen["fault"] > 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "says"),
    [
        (lambda lanes: next(iter(lanes.values()))[0], "overtakes"),  # the order of the pulls
        (lambda lanes: lanes[max(lanes)][0], "starve"),  # the important first, always
    ],
)
def test_an_order_without_shares_is_noticed(monkeypatch: pytest.MonkeyPatch, planted: Any, says: str) -> None:
    monkeypatch.setattr(Backlog, "first", lambda backlog: planted(backlog.lanes))
    with pytest.raises(AssertionError, match=says):
        explore(important_first, runs=20)


def test_a_cut_send_back_keeps_its_weight(one_queue: Kit) -> None:
    """What no broker accepts back waits here for 5 s, and comes again by its weight."""
    begun: list[str] = []
    seam = seam_of(one_queue)
    consumer = PushConsumer(seam, "g", threads=1)

    @consumer.subscribe("t", tags="paid", weight=8)
    def pay(message: DeliveredMessage) -> None:
        begun.append(message.body.decode())
        if not message.reconsume_times:
            raise ValueError("no stock")

    consumer.subscribe("t", lambda message: begun.append(message.body.decode()), weight=1)
    seam.cut(SendBack)
    send(one_queue, "a", tags="free")
    send(one_queue, "P", tags="paid")
    consumer.start()
    one_queue.advance(seconds=20)
    assert begun == ["P", "a", "P"]
    assert one_queue.broker.consumer_offset("g", "t") == 2
