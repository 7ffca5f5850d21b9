"""Messages that name a time of their own, in a broker that has timers."""

from __future__ import annotations

from typing import Any

import pytest

from librmq.broker import Broker
from librmq.errors import ConfigError
from librmq.files.memory import MemoryFiles
from librmq.message.message import Message
from librmq.protocol import PullStatus, SendMessage
from librmq.runtime.manual import ManualRunner
from librmq.scheduling.relay import send_at
from librmq.scheduling.timer import TimerRefusedError, TimerSettings, delete_key
from tests.broker.parties import HOST, manual, opened, pull, send

WHEEL = TimerSettings(slots_total=600, timer_log_file_size=1024, timer_roll_window_slot=100)


def timed(broker: Broker, body: bytes = b"x", **properties: object) -> None:
    message = Message("T", body, unique_key=body.decode(), wait_store_ok=True)
    message.properties |= {name: str(value) for name, value in properties.items()}
    broker.call(SendMessage("p", message, 1, broker.runner.now_ms(), HOST))


def bodies(broker: Broker) -> list[bytes]:
    return [message.body for message in broker.messages("T")]


def test_a_message_comes_at_its_time() -> None:
    with opened(timers=WHEEL) as broker:
        woken: list[int] = []
        timed(broker, TIMER_DELAY_SEC=5)
        assert pull(broker, "T", queue_id=1, notify=lambda: woken.append(1)).status is PullStatus.HELD
        manual(broker).advance(4_999)
        assert (bodies(broker), woken) == ([], [])
        manual(broker).advance(1_001)
        assert (bodies(broker), woken) == ([b"x"], [1])
        (message,) = broker.messages("T")
        assert message.queue_id == 1


def test_what_is_due_is_sent_at_once_and_what_cannot_be_is_refused() -> None:
    with opened(timers=WHEEL) as broker:
        timed(broker, TIMER_DELAY_SEC=0)
        assert bodies(broker) == [b"x"]
        with pytest.raises(TimerRefusedError):
            timed(broker, TIMER_DELAY_SEC="soon")


def test_a_deletion() -> None:
    with opened(timers=WHEEL) as broker:
        timed(broker, b"cancel", TIMER_DELAY_SEC=1800)
        timed(broker, b"paid", TIMER_DELAY_SEC=1800, TIMER_DEL_UNIQKEY=delete_key("T", "cancel"))
        manual(broker).advance(3_600_000)
        assert bodies(broker) == []


def test_without_timers_the_properties_are_the_users() -> None:
    with opened() as broker:
        timed(broker, TIMER_DELAY_SEC=5)
        assert bodies(broker) == [b"x"]


@pytest.mark.parametrize("killed", [False, True])
def test_timers_survive_a_restart(killed: bool) -> None:
    files, runner = MemoryFiles(), ManualRunner()
    broker = opened(files, runner, timers=WHEEL)
    timed(broker, TIMER_DELAY_SEC=500)
    send(broker, "T", b"plain")
    runner.advance(60_000)
    if killed:
        broker.abandon()
    else:
        broker.close()
    with opened(files, runner, timers=WHEEL) as again:
        runner.advance(439_000)
        assert bodies(again) == [b"plain"]
        runner.advance(2_000)
        assert bodies(again) == [b"plain", b"x"]


@pytest.mark.parametrize("killed", [False, True])
def test_messages_are_carried_by_levels(killed: bool) -> None:
    files, runner = MemoryFiles(), ManualRunner()
    broker = opened(files, runner, hops=True)
    due_ms = runner.now_ms() + 3_700_000
    carried = send_at(Message("T", b"x", tags="t", wait_store_ok=True), due_ms, 1)
    broker.call(SendMessage("p", carried, 3, runner.now_ms(), HOST))
    broker.create_topic("T", 4)
    runner.advance(1_800_000)
    if killed:
        broker.abandon()
    else:
        broker.close()
    with opened(files, runner, hops=True) as again:
        woken: list[int] = []
        assert pull(again, "T", queue_id=1, notify=lambda: woken.append(1)).status is PullStatus.HELD
        runner.advance(1_899_000)
        assert bodies(again) == []
        runner.advance(5_000)
        assert set(bodies(again)) == {b"x"}
        assert killed or len(bodies(again)) == 1
        assert woken == [1]
        (message, *_) = again.messages("T")
        assert (message.queue_id, dict(message.properties)) == (1, {"TAGS": "t", "CLUSTER": again.cluster_name})


@pytest.mark.parametrize("value", [True, 5, {}])
def test_settings_that_are_none(value: Any) -> None:
    with pytest.raises(ConfigError, match="timers"):
        opened(timers=value)
