"""The kit's switch that lets requests cross a TCP connection, and the tests of clients with that switch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from librmq import BrokerError, MessageIllegalError
from librmq.protocol import Receive
from librmq.testing import Kit
from tests.over_tcp import NOT_OVER_TCP
from tests.reference import CHECKOUT


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
    with pytest.raises(BrokerError, match=r"4\.x can't be asked for Receive"):
        rmq.route.endpoint("broker-a").call(Receive("c", "g", "orders"))


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


@pytest.mark.parametrize("over_tcp", [False, pytest.param(True, marks=pytest.mark.rmq(over_tcp=True))])
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


@pytest.mark.parametrize("over_tcp", [False, pytest.param(True, marks=pytest.mark.rmq(over_tcp=True))])
def test_a_send_without_an_answer_arrives_twice(rmq: Kit, over_tcp: bool) -> None:
    """The next request does not."""
    rmq.faults.repeat_request("orders")
    rmq.producer().send_oneway("orders", b"x")
    rmq.producer().send("orders", b"y")
    assert [one.body for one in rmq.broker.messages("orders")] == [b"x", b"x", b"y"]


@pytest.mark.parametrize("over_tcp", [False, pytest.param(True, marks=pytest.mark.rmq(over_tcp=True))])
def test_an_answer_that_arrives_twice_is_ignored(rmq: Kit, over_tcp: bool) -> None:
    rmq.faults.repeat_answer(times=2)
    sent = [rmq.producer().send("orders", b"%d" % number) for number in range(4)]
    stored = list(rmq.broker.messages("orders"))
    assert [one.offset_id for one in stored] == sorted(one.offset_id for one in sent)
    assert "the answer to test, topic orders, arrives twice" in str(rmq.history())


@pytest.mark.rmq(over_tcp=True)
def test_a_send_that_fails_before_its_frame_repeats_no_other(rmq: Kit) -> None:
    rmq.faults.repeat_request("orders")
    with pytest.raises(MessageIllegalError, match="UTF-8"):
        rmq.producer().send("orders", b"x", properties={"name": "\ud800"})
    rmq.producer().send("orders", b"y")
    assert [one.body for one in rmq.broker.messages("orders")] == [b"y"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOT_OVER_TCP)
def test_the_tests_of_clients_pass_over_tcp(path: str) -> None:
    """All of them but a named few; a name that is no longer there is a failure."""
    words = ["-q", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider", "-rs", "--rmq-over-tcp", path]
    environment = {**os.environ, "PYTEST_ADDOPTS": "", "CI": ""}  # in CI no test may be skipped
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *words], cwd=CHECKOUT, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
    left_out = len(NOT_OVER_TCP[path])
    assert (f" {left_out} skipped" in ran.stdout) == (left_out > 0), ran.stdout[-2000:]
