"""Brokers that die before they save progress, again and again: what the log shows as done is not done again."""

from __future__ import annotations

from collections import Counter

import pytest

from librmq.broker import BrokerConfig
from librmq.consumer import DeliveredMessage
from librmq.message import Message, StoredMessage
from librmq.scheduling.timer_config import TimerConfig
from librmq.testing import Kit

LIVES = 5


def messages(rmq: Kit, topic: str) -> list[StoredMessage]:
    return [message for message in rmq.broker.store if message.topic == topic]


def bodies(rmq: Kit, topic: str) -> Counter[bytes]:
    return Counter(message.body for message in messages(rmq, topic))


def live_and_die(rmq: Kit, lives: int = LIVES) -> None:
    """Let the broker and all consumers live for 4 s several times, too short for a save of progress."""
    for _ in range(lives):
        rmq.advance(seconds=4)
        for process in list(rmq.processes):
            if process.name.startswith("g") and not process.dead:
                rmq.crash(process)
        rmq.crash_broker()


def fail(message: object) -> None:
    raise ValueError("poison")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("delay", "config"),
    [
        (1, BrokerConfig()),
        (2.5, BrokerConfig(timers=TimerConfig(save_every_s=60, slots_total=600, timer_roll_window_slot=500))),
        (300, BrokerConfig(timers=TimerConfig(timer_roll_window_slot=7, save_every_s=60, slots_total=600))),
        (10, BrokerConfig(hops=True)),
        (13, BrokerConfig(hops=True)),
    ],
)
def test_a_crash_loop_delivers_each_delayed_message_once(delay: float, config: BrokerConfig) -> None:
    with Kit(broker_config=config) as rmq:
        producer = rmq.producer()
        for number in range(20):
            producer.send(Message("T", b"%d" % number, delay=delay))
        live_and_die(rmq, LIVES + round(delay / 4))
        assert bodies(rmq, "T") == {b"%d" % number: 1 for number in range(20)}


@pytest.mark.slow
@pytest.mark.parametrize("groups", [("g",), ("g", "gg")])
def test_a_crash_loop_makes_one_dead_letter_of_each_message(rmq: Kit, groups: tuple[str, ...]) -> None:
    for group in groups:
        rmq.consumer(group, fail_fast=False, max_reconsume_times=2).subscribe("T")(fail)
    for number in range(8):
        rmq.producer().send("T", b"%d" % number)
    live_and_die(rmq, 3 * LIVES)
    once = {b"%d" % number: 1 for number in range(8)}
    for group in groups:
        assert bodies(rmq, f"%DLQ%{group}") == once
        assert Counter(m.body for m in messages(rmq, f"%RETRY%{group}") if m.reconsume_times == 1) == once


@pytest.mark.parametrize("delay", [1, 2.5], ids=["level", "timer"])
def test_what_a_lost_answer_stored_twice_is_delivered_twice_whatever_dies(rmq: Kit, delay: float) -> None:
    rmq.faults.lose_answer("T")
    rmq.producer().send("T", b"x", delay=delay)
    live_and_die(rmq)
    assert bodies(rmq, "T") == {b"x": 2}


def test_records_that_are_written_again_are_delivered(rmq: Kit) -> None:
    """The same id is sent to wait twice, and directly in between; nothing counts as the delivery of another."""
    producer = rmq.producer()
    for level in (1, 0, 1):
        producer.send(Message("T", b"x", unique_key="same", delay_level=level))
    rmq.crash_broker()
    rmq.advance(seconds=3)
    assert bodies(rmq, "T") == {b"x": 3}


def test_a_key_that_is_the_id_of_another_message_is_no_delivery(rmq: Kit) -> None:
    rmq.broker.create_topic("T", 1)
    rmq.producer().send(Message("T", b"waits", unique_key="same", delay_level=3))
    rmq.producer().send(Message("T", b"other", keys="same", delay_level=1))
    rmq.advance(seconds=3)
    rmq.crash_broker()
    rmq.advance(seconds=10)
    assert bodies(rmq, "T") == {b"waits": 1, b"other": 1}


def test_a_resent_dead_letter_has_all_its_retries(rmq: Kit) -> None:
    rmq.consumer("g", fail_fast=False, max_reconsume_times=1).subscribe("T")(fail)
    rmq.producer().send("T", b"x")
    rmq.advance(minutes=1)
    assert rmq.broker.resend_dead_letters("g") == 1
    rmq.crash_broker()
    rmq.advance(minutes=1)
    assert bodies(rmq, "%DLQ%g") == {b"x": 2}


def test_a_reset_after_a_crash_retries_again(rmq: Kit) -> None:
    rmq.consumer("g", fail_fast=False, max_reconsume_times=1).subscribe("T")(fail)
    rmq.producer().send("T", b"x")
    rmq.advance(minutes=1)
    rmq.crash_broker()
    rmq.advance(seconds=10)
    rmq.broker.reset_group("g", "T", "begin")
    rmq.advance(minutes=1)
    assert bodies(rmq, "%DLQ%g") == {b"x": 2}


def test_a_reset_before_a_crash_retries_again(rmq: Kit) -> None:
    received: list[int] = []

    def fail_first(message: DeliveredMessage) -> None:
        received.append(message.reconsume_times)
        if message.reconsume_times == 0:
            raise ValueError("not now")

    consumer = rmq.consumer("g", fail_fast=False)
    consumer.subscribe("T")(fail_first)
    rmq.producer().send("T", b"x")
    rmq.advance(minutes=1)
    consumer.shutdown()
    rmq.broker.reset_group("g", "T", "begin")
    rmq.advance(minutes=1)
    rmq.crash_broker()
    rmq.consumer("g", fail_fast=False).subscribe("T")(fail_first)
    rmq.advance(minutes=1)
    assert received == [0, 1, 0, 1]
