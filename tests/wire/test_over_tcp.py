"""The kit's switch that lets requests cross a TCP connection, and the tests of clients with that switch."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from librmq import DeadLetter, DeliveredMessage, MessageIllegalError, SimpleConsumer
from librmq.protocol import SetGroup
from librmq.testing import Kit
from tests.over_tcp import NOT_OVER_TCP, left_out
from tests.reference import CHECKOUT

BOTH = pytest.mark.parametrize("over_tcp", [False, pytest.param(True, marks=pytest.mark.rmq(over_tcp=True))])


@pytest.mark.rmq(over_tcp=True)
def test_a_kit_over_tcp(rmq: Kit) -> None:
    got: list[bytes] = []
    consumer = rmq.consumer("billing")
    consumer.subscribe("orders", lambda message: got.append(message.body))
    rmq.producer().send("orders", b"x" * 300_000)
    rmq.faults.lose_answer("orders")
    rmq.producer().send("orders", b"y")
    rmq.advance(seconds=60)
    assert sorted(map(len, got)) == [1, 1, 300_000]
    with SimpleConsumer(rmq.route, "readers") as receiver:
        receiver.subscribe("orders")
        received = receiver.receive(16, wait=0)
        assert sorted(len(message.body) for message in received) == [1, 1, 300_000]
        receiver.ack(*received)
        rmq.advance(minutes=5)
        assert receiver.receive(16, wait=0) == []


@pytest.mark.rmq(over_tcp=True)
def test_faults_over_tcp(rmq: Kit) -> None:
    """A cut link, a slow one and a broker that dies lose no message."""
    got: list[bytes] = []
    consumer = rmq.consumer("billing")
    consumer.subscribe("orders", lambda message: got.append(message.body))
    rmq.producer().send("orders", b"1")
    rmq.run_until_idle()
    rmq.faults.cut("broker-a", "billing", seconds=40)
    rmq.producer().send("orders", b"2")
    rmq.advance(seconds=20)
    assert got == [b"1"]
    rmq.advance(seconds=60)
    rmq.faults.delay("broker-a", "billing", 1)
    rmq.producer().send("orders", b"3")
    rmq.advance(seconds=10)
    rmq.crash_broker(down=10)
    rmq.advance(seconds=60)
    rmq.producer().send("orders", b"4")
    rmq.advance(seconds=60)
    assert sorted(set(got)) == [b"1", b"2", b"3", b"4"]


@BOTH
def test_a_request_that_arrives_twice_is_explained(rmq: Kit, over_tcp: bool) -> None:
    """It is one message id and two records, and the history names the fault."""
    got: list[str] = []
    consumer = rmq.consumer("billing")
    consumer.subscribe("orders", lambda message: got.append(message.message_id))
    rmq.faults.repeat_request("orders")
    sent = rmq.producer().send("orders", b"x")
    rmq.producer().send("orders", b"y")
    rmq.run_until_idle()
    assert len(list(rmq.broker.messages("orders"))) == 3
    assert got.count(sent.message_id) == 2
    assert "sends to orders arrives twice, and is stored twice" in str(rmq.history())


@BOTH
def test_a_send_without_an_answer_arrives_twice(rmq: Kit, over_tcp: bool) -> None:
    """The next request does not."""
    rmq.faults.repeat_request("orders")
    rmq.producer().send_oneway("orders", b"x")
    rmq.producer().send("orders", b"y")
    assert [one.body for one in rmq.broker.messages("orders")] == [b"x", b"x", b"y"]


def fail(message: DeliveredMessage) -> None:
    raise ValueError("no stock")


def failed_attempts(rmq: Kit, caplog: pytest.LogCaptureFixture, listener: Callable[..., None], **settings: Any) -> str:
    """Let a message fail until it is a dead letter; return what was logged of its attempts, by level."""
    rmq.consumer("g", fail_fast=False, **settings).subscribe("t", listener)
    with caplog.at_level(logging.INFO, "librmq.consumer"):
        rmq.producer().send("t", b"x", keys="o-1")
        rmq.advance(hours=6)
    (letter,) = rmq.dead_letters("g")
    lines = [one for one in caplog.records if hasattr(one, "rmq_attempt")]
    place = (
        r":?( on)? \S+/broker-a/\d at \d+ \(\w+\),?|(?<=the next comes) in \d+ s$"
        r"|; failure \d+ of its kind, at \S+:\d+"
    )
    said = [re.sub(place, "", one.getMessage()) for one in lines]
    told = [f"{one.levelname} {text.removeprefix('g@g: ')}" for one, text in zip(lines, said, strict=True)]
    return "\n".join([*told, letter.properties["DEAD_LETTER_CAUSE"]])


@BOTH
def test_the_last_attempt_is_an_error_with_the_dead_letter(
    rmq: Kit, caplog: pytest.LogCaptureFixture, over_tcp: bool
) -> None:
    assert failed_attempts(rmq, caplog, fail, max_reconsume_times=2).splitlines() == [
        "WARNING attempt 1 of 3 failed (ValueError: no stock), the next comes",
        "WARNING attempt 2 of 3 failed (ValueError: no stock), the next comes",
        "ERROR dead letter of group g key o-1, after 3 attempts: ValueError: no stock",
        "ValueError: no stock",
    ]


@BOTH
def test_the_setting_of_a_group_says_which_attempt_is_last(
    rmq: Kit, caplog: pytest.LogCaptureFixture, over_tcp: bool
) -> None:
    rmq.broker.set_group("g", retry_max_times=1)
    assert failed_attempts(rmq, caplog, fail).splitlines() == [
        "WARNING attempt 1 of 2 failed (ValueError: no stock), the next comes",
        "ERROR dead letter of group g key o-1, after 2 attempts: ValueError: no stock",
        "ValueError: no stock",
    ]


def test_an_attempt_is_logged_when_nothing_is_known_of_the_next(rmq: Kit, caplog: pytest.LogCaptureFixture) -> None:
    """A group without retry queues gets no answer that says it."""
    rmq.expect("lost")
    rmq.broker.call(SetGroup("g", {"retryQueueNums": 0}))
    rmq.consumer("g", fail_fast=False).subscribe("t", fail)
    with caplog.at_level(logging.INFO, "librmq.consumer"):
        rmq.producer().send("t", b"x")
        rmq.advance(hours=1)
    (line,) = (one.getMessage() for one in caplog.records if hasattr(one, "rmq_attempt"))
    assert "attempt 1 on t" in line
    assert line.endswith("and the broker does not say whether the next comes")


@BOTH
def test_a_dead_letter_that_the_listener_asks_for_has_its_cause(
    rmq: Kit, caplog: pytest.LogCaptureFixture, over_tcp: bool
) -> None:
    def refuse(message: DeliveredMessage) -> None:
        raise DeadLetter("never retried")

    assert failed_attempts(rmq, caplog, refuse).splitlines() == [
        "ERROR dead letter of group g key o-1, after 1 attempt: DeadLetter: never retried",
        "DeadLetter: never retried",
    ]


@pytest.mark.rmq(over_tcp=True)
def test_a_send_that_fails_before_its_frame_repeats_no_other(rmq: Kit) -> None:
    rmq.faults.repeat_request("orders")
    with pytest.raises(MessageIllegalError, match="UTF-8"):
        rmq.producer().send("orders", b"x", properties={"name": "\ud800"})
    rmq.producer().send("orders", b"y")
    assert [one.body for one in rmq.broker.messages("orders")] == [b"y"]


@pytest.mark.rmq(over_tcp=True)
def test_a_message_received_again_names_its_queue_of_retries(rmq: Kit) -> None:
    """Its record has an offset there; at the topic's queue it would be that of another message."""
    rmq.broker.create_topic("orders", 1)
    with SimpleConsumer(rmq.route, "mailer") as consumer:
        consumer.subscribe("orders")
        for body in ("first", "again"):
            rmq.producer().send("orders", body)
        first, _ = consumer.receive(invisible=10, wait=0)
        consumer.ack(first)
        rmq.advance(seconds=20)
        (again,) = consumer.receive(invisible=10, wait=0)
        assert (again.queue.topic, again.queue_offset, again.topic) == ("%RETRY%mailer_orders", 0, "orders")
        consumer.ack(again)


OVER_SHARE = ("tests/client", "tests/consumer/test_orderly.py", "tests/consumer/test_push.py")
"""A share has the frames of a connection over TCP; its own are sends, locks and what an owner says by itself."""


@pytest.mark.slow
@pytest.mark.parametrize(("way", "paths"), [("tcp", tuple(NOT_OVER_TCP)), ("share", OVER_SHARE)])
def test_the_tests_of_clients_pass_over_frames(way: str, paths: tuple[str, ...]) -> None:
    """All of them but a named few; a name that is no longer there is a failure."""
    words = ["-q", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider", "-rs", f"--rmq-over-{way}", *paths]
    environment = {**os.environ, "PYTEST_ADDOPTS": "", "CI": ""}  # in CI no test may be skipped
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *words], cwd=CHECKOUT, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
    assert f" {sum(len(left_out(path)) for path in paths)} skipped" in ran.stdout, ran.stdout[-2000:]
