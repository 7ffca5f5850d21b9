"""The events that the kit records."""

from __future__ import annotations

from typing import Any

import pytest

import librmq
from librmq.broker import BrokerConfig
from librmq.client import TransactionProducer
from librmq.client.recorder import Event
from librmq.message.delays import delete_key
from librmq.scheduling.timer_config import TimerConfig
from librmq.testing import HistoryAnomalyError, Kit, explore


def events(rmq: Kit, kind: str, **fields: Any) -> list[Event]:
    """Return the events of a kind that have these fields."""
    return [
        event
        for event in rmq.events()
        if event["event"] == kind and all(event.get(name) == value for name, value in fields.items())
    ]


def test_each_try_of_a_send_is_an_event(rmq: Kit) -> None:
    rmq.faults.lose_answer()
    sent = rmq.producer().send("orders", b"secret")
    rmq.faults.refuse_send(busy=True)
    with pytest.raises(librmq.BrokerBusyError):
        rmq.producer().send("orders", b"secret")
    assert [event["outcome"] for event in events(rmq, "send")] == ["unknown", "ok", "failed"]
    lost, stored = events(rmq, "send", id=sent.message_id)
    assert "queue_offset" not in lost
    assert (stored["broker"], stored["queue_id"]) == (sent.queue.broker_name, sent.queue.queue_id)
    assert "secret" not in str(rmq.events())
    rmq.messages("orders")


def test_retries_and_dead_letters(rmq: Kit) -> None:
    @rmq.consumer("billing", fail_fast=False).subscribe("orders")
    def listener(message: librmq.DeliveredMessage) -> None:
        if not message.reconsume_times:
            raise librmq.ReconsumeLater
        raise librmq.DeadLetter

    sent = rmq.producer().send("orders", b"x")
    rmq.advance(minutes=1)
    first, second = events(rmq, "deliver")
    assert (first["attempt"], first["outcome"], "stored_in" in first) == (0, "retry", False)
    assert (second["attempt"], second["outcome"], second["stored_in"]) == (1, "retry", "%RETRY%billing")
    assert first["id"] == second["id"] == sent.message_id
    assert {event["id"] for event in events(rmq, "dead_letter", group="billing")} == {sent.message_id}
    assert [event["group"] for event in events(rmq, "drained")] == ["billing"]
    rmq.dead_letters("billing")


def test_a_group_that_waits_has_not_drained(rmq: Kit) -> None:
    @rmq.consumer("billing").subscribe("orders")
    def listener(message: librmq.DeliveredMessage) -> None:
        pass

    rmq.producer().send("orders", b"x", delay_level=3)
    rmq.run_until_idle()
    assert events(rmq, "drained") == []
    (sent,) = events(rmq, "send")
    assert sent["not_before_ms"] == sent["begin_ms"] + 10_000
    rmq.advance(seconds=12)
    assert len(events(rmq, "drained")) == 1


def test_a_crash_ends_deliveries(rmq: Kit) -> None:
    @rmq.consumer("billing").subscribe("orders")
    def listener(message: librmq.DeliveredMessage) -> None:
        if len(events(rmq, "deliver")) == 1:
            rmq.crash(rmq.processes[-1])

    rmq.producer().send("orders", b"x")
    rmq.run_until_idle()
    assert [event["process"] for event in events(rmq, "crash")] == ["billing"]
    assert [(event["process"], event["outcome"]) for event in events(rmq, "deliver")] == [
        ("billing", "died"),
        ("billing~2", "ok"),
    ]
    assert {event["process"] for event in events(rmq, "assign", topic="orders")} == {"billing", "billing~2"}


def test_transactions(rmq: Kit) -> None:
    producer = TransactionProducer(rmq.route, "sales", lambda message: librmq.TransactionState.COMMIT)
    producer.send_in_transaction(
        librmq.Message("orders", b"x"), execute=lambda message, arg: librmq.TransactionState.ROLLBACK
    )
    producer.send_in_transaction(librmq.Message("orders", b"y"), execute=lambda message, arg: None)
    rmq.advance(minutes=2)
    assert [event["half"] for event in events(rmq, "send")] == [True, True]
    assert [event["decision"] for event in events(rmq, "end_transaction", outcome="ok")] == ["rollback", "commit"]
    rmq.messages("orders")


@pytest.mark.rmq(broker_config=BrokerConfig(timers=TimerConfig()))
def test_a_cancelled_message_is_not_promised(rmq: Kit) -> None:
    rmq.consumer("billing").subscribe("orders")(lambda message: None)
    at = {"TIMER_DELIVER_MS": str(rmq.clock.now_ms() + 90_000)}
    sent = rmq.producer().send("orders", b"x", properties=at)
    rmq.producer().send("orders", b"y", properties=at)
    cancels = {"TIMER_DEL_UNIQKEY": delete_key("orders", sent.message_id)}
    rmq.producer().send("orders", b"-", properties=at | cancels)
    rmq.advance(minutes=3)
    assert [attempt.body for attempt in rmq.delivered("billing")] == [b"y"]
    assert [event["outcome"] for event in events(rmq, "send")] == ["unknown", "ok"]
    assert len(events(rmq, "drained")) == 1


def test_a_copy_at_another_broker_is_not_cancelled(rmq: Kit) -> None:
    rmq.cluster(brokers=2).create_topic("orders", 1)
    rmq.consumer("billing").subscribe("orders")(lambda message: None)
    rmq.faults.lose_answer("orders")
    assert rmq.producer().cancel(rmq.producer().send("orders", b"x", delay=5)).cancelled
    rmq.advance(minutes=1)
    assert [attempt.broker_name for attempt in rmq.delivered("billing")] == ["broker-a"]


def test_a_rest_is_no_repeat_of_a_message_that_was_sent_twice(rmq: Kit) -> None:
    rmq.broker.create_topic("orders", 2)
    failures = [librmq.DownstreamDown(seconds=5, only_queue=True)]

    @rmq.consumer("billing").subscribe("orders")
    def charge(message: librmq.DeliveredMessage) -> None:
        if failures:
            raise failures.pop()

    rmq.advance(minutes=1)
    rmq.faults.lose_answer("orders")
    rmq.producer().send("orders", b"x")
    rmq.advance(minutes=1)
    assert len(rmq.delivered("billing")) == 3


def test_polls_and_receives(rmq: Kit) -> None:
    rmq.broker.create_topic("orders", 1)
    for body in (b"a", b"b", b"c"):
        rmq.producer().send("orders", body)
    with librmq.PullConsumer(rmq.route, "puller") as puller:
        puller.subscribe("orders")
        for message in puller:
            if message.body == b"b":
                break
        assert [event.get("outcome") for event in events(rmq, "deliver", group="puller")] == ["ok", None]
    assert [event.get("outcome") for event in events(rmq, "deliver", group="puller")] == ["ok", "ok"]
    with librmq.SimpleConsumer(rmq.route, "receiver") as receiver:
        receiver.subscribe("orders")
        (late,) = receiver.receive(1, invisible=10)
        rmq.advance(seconds=20)
        receiver.ack(*receiver.receive(8))
    outcomes = [(event["attempt"], event["outcome"]) for event in events(rmq, "deliver", id=late.message_id)]
    assert outcomes[-2:] == [(0, "died"), (1, "ok")]
    assert len(rmq.delivered("receiver")) >= 2


def test_a_receive_acknowledges(rmq: Kit) -> None:
    with librmq.SimpleConsumer(rmq.route, "receiver") as receiver:
        receiver.subscribe("orders")
        rmq.producer().send("orders", b"a")
        (message,) = receiver.receive(1, wait=0)
        rmq.producer().send("orders", b"b")
        (other,) = receiver.receive_or_notify("orders", 1, lambda: None, acknowledge=[message])
        receiver.ack(other)
    assert [event.get("outcome") for event in events(rmq, "deliver", group="receiver")] == ["ok", "ok"]


def test_a_reset_is_an_event(rmq: Kit) -> None:
    @rmq.consumer("billing").subscribe("orders")
    def listener(message: librmq.DeliveredMessage) -> None:
        pass

    rmq.producer().send("orders", b"x")
    rmq.run_until_idle()
    rmq.broker.reset_group("billing", "orders", "begin")
    rmq.advance(minutes=1)
    assert events(rmq, "reset", group="billing", topic="orders")
    assert len(rmq.delivered("billing")) == 2


def test_an_effect_names_its_process(rmq: Kit) -> None:
    @rmq.consumer("billing").subscribe("orders")
    def listener(message: librmq.DeliveredMessage) -> None:
        rmq.effect("charge", message.message_id)

    sent = rmq.producer().send("orders", b"x")
    rmq.run_until_idle()
    assert [(event["key"], event["process"]) for event in events(rmq, "effect")] == [(sent.message_id, "billing")]


# ---- the verdict


def lose_a_message(rmq: Kit) -> None:
    @rmq.consumer("billing").subscribe("orders")
    def listener(message: librmq.DeliveredMessage) -> None:
        pass

    rmq.broker.create_topic("orders", 1)
    rmq.producer().send("orders", b"x")
    rmq.run_until_idle()
    rmq.recorder.add_event("effect", name="charge", key="1", process="test", at_ms=rmq.clock.now_ms())
    rmq.recorder.add_event("effect", name="charge", key="1", process="test", at_ms=rmq.clock.now_ms())


def test_an_anomaly_fails_the_test_with_its_events() -> None:
    rmq = Kit()
    lose_a_message(rmq)
    with pytest.raises(HistoryAnomalyError) as caught:
        rmq.close()
    assert "effect-twice: " in str(caught.value)
    assert str(caught.value).count("does charge for 1") == 2
    assert "rmq.expect('effect-twice')" in str(caught.value)
    assert "sends orders/0:0 b'x'" in caught.value.__notes__[0]


def test_an_expected_anomaly_has_to_come() -> None:
    with Kit() as rmq:
        rmq.expect("effect-twice")
        lose_a_message(rmq)
    rmq = Kit()
    rmq.expect("repeat")
    with pytest.raises(HistoryAnomalyError, match="expects the anomaly 'repeat', and its history has none"):
        rmq.close()
    with Kit() as rmq, pytest.raises(librmq.ConfigError, match="did you mean 'repeat'"):
        rmq.expect("repeats")


def test_an_explored_schedule_shrinks_on_its_anomaly() -> None:
    charged: set[str] = set()

    def test(rmq: Kit) -> None:
        charged.clear()

        @rmq.consumer("billing").subscribe("orders")
        def listener(message: librmq.DeliveredMessage) -> None:
            if message.message_id in charged:
                rmq.effect("charge", message.message_id)
            charged.add(message.message_id)
            rmq.effect("charge", message.message_id)

        rmq.broker.create_topic("orders", 1)
        rmq.producer().send("orders", b"x")
        rmq.run_until_idle()

    with pytest.raises(HistoryAnomalyError, match="effect-twice") as caught:
        explore(test)
    assert "the shortest schedule that fails so has 1 decision" in caught.value.__notes__[-1]
