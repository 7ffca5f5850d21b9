"""Alarms for a watched broker: one when a fault begins, one when it ends, and none while the broker is healthy."""

from __future__ import annotations

import pytest

from librmq import Broker, ConfigError, DeadLetter, Message, PushConsumer, ReconsumeLater, SimpleConsumer
from librmq.diagnosis import Alarm, Thresholds, watch
from librmq.testing import Kit

LIMITS = Thresholds(normal_lag=5, stuck_s=60, retries=2)


class Heard:
    def __init__(self, rmq: Kit, limits: Thresholds = LIMITS) -> None:
        self.alarms: list[Alarm] = []
        self.watch = watch(rmq.broker, self.alarms.append, limits)

    def told(self) -> list[str]:
        return [f"{one.state} {one.finding.kind}" for one in self.alarms]


def nothing(message: object) -> None:
    pass


def consuming(rmq: Kit) -> PushConsumer:
    """Return a consumer that has consumed a message of one queue."""
    rmq.broker.create_topic("T", 1)
    consumer = rmq.consumer("G")
    consumer.subscribe("T", nothing)
    rmq.producer().send("T", b"x")
    rmq.advance(seconds=30)
    return consumer


def test_silence_while_all_is_well(rmq: Kit) -> None:
    heard = Heard(rmq)
    rmq.consumer("G").subscribe("T", nothing)
    for _ in range(10):
        rmq.producer().send("T", b"x")
        rmq.advance(seconds=30)
    assert heard.told() == []


def test_a_backlog_is_raised_once_and_cleared(rmq: Kit) -> None:
    consumer = consuming(rmq)
    heard = Heard(rmq)
    consumer.pause()
    for _ in range(20):
        rmq.producer().send("T", b"x")
    rmq.advance(seconds=50)
    assert heard.told() == ["raised backlog", "raised paused"]
    consumer.resume()
    rmq.advance(seconds=50)
    assert heard.told()[2:] == ["cleared backlog", "cleared paused"]


def test_progress_that_stopped(rmq: Kit) -> None:
    consumer = consuming(rmq)
    heard = Heard(rmq, Thresholds(stuck_s=60))
    consumer.pause()
    rmq.producer().send("T", b"x")
    rmq.advance(seconds=60)
    assert heard.told() == []
    rmq.advance(seconds=60)
    assert heard.told() == ["raised progress-stopped"]


def test_dead_letters_each_time_that_there_are_more(rmq: Kit) -> None:
    def fail(message: object) -> None:
        raise DeadLetter("no")

    heard = Heard(rmq)
    rmq.consumer("G").subscribe("T", fail)
    for _ in range(2):
        rmq.producer().send("T", b"x")
        rmq.advance(seconds=30)
    assert heard.told() == ["raised dead-letters"] * 2
    assert [one.finding.evidence["messages"] for one in heard.alarms] == [1, 2]


def test_retries_past_the_threshold(rmq: Kit) -> None:
    def fail(message: object) -> None:
        raise ReconsumeLater

    heard = Heard(rmq)
    rmq.consumer("G").subscribe("T", fail)
    rmq.producer().send("T", b"x")
    rmq.advance(seconds=25)
    assert heard.told() == []  # the first retry is due after 10 s
    rmq.advance(seconds=30)
    assert heard.told() == ["raised many-retries"]


@pytest.mark.slow
def test_an_alarm_of_retries_lasts_until_consumption(rmq: Kit) -> None:
    """It names topic and key, and comes once, not with each retry."""
    broken = [True]

    def fail(message: object) -> None:
        if broken:
            raise ReconsumeLater

    heard = Heard(rmq)
    rmq.consumer("G").subscribe("T", fail)
    rmq.producer().send("T", b"x", keys="order-7")
    rmq.advance(minutes=20)
    assert heard.told() == ["raised many-retries"]
    (alarm,) = heard.alarms
    assert alarm.finding.subject == "group G, topic T"
    assert (alarm.finding.evidence["key"], alarm.finding.evidence["messages"]) == ("order-7", 1)
    broken.clear()
    rmq.advance(hours=2)
    assert heard.told() == ["raised many-retries", "cleared many-retries"]


def test_retries_of_received_messages_raise_one_alarm(rmq: Kit) -> None:
    """Their retry topic has the names of group and topic, either of which can have an underscore."""
    heard = Heard(rmq)
    receiver = SimpleConsumer(rmq.broker, "work_ers")
    receiver.subscribe("jo_bs")
    rmq.producer().send("jo_bs", b"x", keys="job-1")
    with receiver:
        for _ in range(8):
            receiver.receive(1, invisible=10, wait=0)
            rmq.advance(seconds=30)
    raised = [alarm for alarm in heard.alarms if alarm.finding.kind == "many-retries"]
    assert {alarm.finding.subject for alarm in raised} <= {"group work_ers, topic jo_bs", "group work_ers"}
    assert [alarm.state for alarm in raised] in ([], ["raised"], ["raised", "cleared"])


def test_retries_in_any_queue_of_a_new_retry_topic(rmq: Kit) -> None:
    heard = Heard(rmq)
    rmq.advance(seconds=30)
    rmq.broker.store.append(Message("%RETRY%G", b"x"), 2, reconsume_times=5)
    rmq.advance(seconds=15)
    assert "raised many-retries" in heard.told()


def test_an_instance_that_leaves(rmq: Kit) -> None:
    consumer = consuming(rmq)
    heard = Heard(rmq)
    rmq.advance(seconds=30)
    consumer.shutdown()
    rmq.advance(seconds=30)
    assert heard.told() == ["raised instance-gone", "cleared instance-gone"]


def test_a_stopped_watch_is_silent(rmq: Kit) -> None:
    heard = Heard(rmq)
    heard.watch.stop()
    for _ in range(20):
        rmq.producer().send("T", b"x")
    rmq.broker.set_group("G")
    rmq.broker.reset_group("G", "T", "begin")
    rmq.advance(seconds=100)
    assert heard.told() == []


def test_a_callback_that_raises_is_called_again(rmq: Kit, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []

    def fail(alarm: Alarm) -> None:
        calls.append(alarm.state)
        raise ValueError("mine")

    watch(rmq.broker, fail, LIMITS)
    for _ in range(20):
        rmq.producer().send("T", b"x")
    rmq.broker.set_group("G")
    rmq.broker.reset_group("G", "T", "begin")
    rmq.advance(seconds=30)
    rmq.broker.reset_group("G", "T", "end")
    rmq.advance(seconds=30)
    assert {"raised", "cleared"} == set(calls)
    assert "the callback failed" in caplog.text


def test_an_alarm_period_of_zero_is_refused() -> None:
    with Broker.temporary() as broker, pytest.raises(ConfigError, match="callback: expected a function"):
        watch(broker, 5)  # type: ignore[arg-type]
    with Broker.temporary() as broker, pytest.raises(ConfigError, match="above 0"):
        watch(broker, print, every=0)
