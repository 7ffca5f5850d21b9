"""Messages with a delivery time, in a broker with timers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from librmq.broker import Broker, BrokerConfig
from librmq.client.producer import Producer
from librmq.diagnosis import pending_messages
from librmq.errors import BrokerError, ConfigError, MessageIllegalError
from librmq.files import MemoryFiles
from librmq.message import Message
from librmq.message.delays import TimerRefusedError, delete_key
from librmq.protocol import PullStatus, SendBatch, SendMessage, SendTogether
from librmq.runtime import ManualRunner
from librmq.scheduling.relay import send_at
from librmq.scheduling.timer_config import TimerConfig
from librmq.testing import Kit
from tests.broker.parties import HOST, broker_directory, manual, opened, pull, send

WHEEL = TimerConfig(slots_total=600, timer_log_file_size=1024, timer_roll_window_slot=100)


def timed(broker: Broker, body: bytes = b"x", **properties: object) -> None:
    message = Message("T", body, unique_key=body.decode(), wait_store_ok=True)
    message.properties |= {name: str(value) for name, value in properties.items()}
    broker.call(SendMessage("p", message, 1, broker.runner.now_ms(), HOST))


def bodies(broker: Broker) -> list[bytes]:
    return [message.body for message in broker.messages("T")]


@pytest.mark.rmq(broker_config=BrokerConfig(timers=WHEEL))
def test_a_message_comes_at_its_time(rmq: Kit, broker: Broker) -> None:
    woken: list[int] = []
    timed(broker, TIMER_DELAY_SEC=5)
    assert pull(broker, "T", queue_id=1, notify=lambda: woken.append(1)).status is PullStatus.HELD
    rmq.advance(ms=4_999)
    assert (bodies(broker), woken) == ([], [])
    rmq.advance(ms=1_001)
    assert (bodies(broker), woken) == ([b"x"], [1])
    (message,) = broker.messages("T")
    assert message.queue_id == 1


@pytest.mark.rmq(broker_config=BrokerConfig(timers=WHEEL))
def test_due_messages_are_sent_immediately_or_refused(broker: Broker) -> None:
    timed(broker, TIMER_DELAY_SEC=0)
    assert bodies(broker) == [b"x"]
    with pytest.raises(TimerRefusedError):
        timed(broker, TIMER_DELAY_SEC="soon")
    with pytest.raises(
        TimerRefusedError, match=r"at most 259200 s away, found 259201 s, .*UTC: raise TimerConfig\(timer_max_del"
    ):
        timed(broker, TIMER_DELAY_SEC=259_201)
    with pytest.raises(TimerRefusedError, match=r"at most 259200 s away, found 259200\.5 s, "):
        timed(broker, TIMER_DELAY_MS=259_200_500)


@pytest.mark.rmq(broker_config=BrokerConfig(timers=WHEEL))
def test_a_deletion(rmq: Kit, broker: Broker) -> None:
    timed(broker, b"cancel", TIMER_DELAY_SEC=1800)
    timed(broker, b"paid", TIMER_DELAY_SEC=1800, TIMER_DEL_UNIQKEY=delete_key("T", "cancel"))
    rmq.advance(ms=3_600_000)
    assert bodies(broker) == []


@pytest.mark.parametrize(
    "properties",
    [
        {"TIMER_DELAY_SEC": 7},
        {"TIMER_DELAY_MS": 7_000},
        {"TIMER_DELIVER_MS": 1 << 60},
        {"TIMER_DELAY_SEC": 5, "TIMER_DEL_UNIQKEY": "T+x"},
    ],
)
def test_in_a_broker_directory_a_time_is_refused(properties: dict[str, object]) -> None:
    """The error names the setting to switch on; 4.9 would not see the message."""
    with opened(broker_directory()) as broker:
        end = broker.store.log.end
        with pytest.raises(MessageIllegalError, match=r"RocketMQ broker.*timers=.* or .*hops=True"):
            timed(broker, b"x", **properties)
        assert broker.store.log.end == end


def test_a_store_of_librmq_takes_any_delay() -> None:
    """A level where it is exact, else the timer, whose files appear with the first message that needs them."""
    files, runner = MemoryFiles(), ManualRunner()
    with opened(files, runner) as broker, Producer(broker, "p") as producer:
        producer.send("T", b"level", delay=10)
        runner.advance(1)
        assert not files.names("/b/timerlog")
        producer.send("T", b"in 5.5 s", delay=5.5)
        producer.send("T", b"in 37 s", deliver_at=datetime.fromtimestamp(runner.now_ms() / 1000 + 37, UTC))
        producer.send("T", b"in 3 days", delay=timedelta(days=3))
        with pytest.raises(TimerRefusedError, match="at most 259200 s away"):
            producer.send("T", b"in 4 days", delay=timedelta(days=4))
        assert [message.kind for message in pending_messages(broker.store)] == ["delay", "timer", "timer", "timer"]
        runner.advance(6_000)
        assert bodies(broker) == [b"in 5.5 s"]
    with opened(files, runner) as broker:  # named nothing, and continues
        assert files.names("/b/timerlog")
        runner.advance(40_000)
        assert sorted(bodies(broker)) == [b"in 37 s", b"in 5.5 s", b"level"]
    with opened(files, runner, hops=True) as broker:  # a relay does not hide what waits in the timer
        runner.advance(3 * 86_400_000)
        assert b"in 3 days" in bodies(broker)


@pytest.mark.rmq(broker_config=BrokerConfig(timers=WHEEL))
def test_a_time_in_a_batch_or_a_transaction_is_refused(broker: Broker) -> None:
    message = Message("T", b"x")
    message.properties["TIMER_DELAY_SEC"] = "5"
    with pytest.raises(MessageIllegalError, match="batch"):
        broker.call(SendBatch("p", (message, message), 0, 1, HOST))
    message.properties |= {"TRAN_MSG": "true", "PGROUP": "p"}
    with pytest.raises(MessageIllegalError, match="transaction"):
        broker.call(SendMessage("p", message, 0, 1, HOST))


@pytest.mark.parametrize("settings", [{}, {"timers": WHEEL}, {"hops": True}])
def test_a_delay_that_is_a_level_waits_as_one(settings: dict[str, Any]) -> None:
    with opened(**settings) as broker:
        timed(broker, TIMER_DELAY_MS=10_000)
        assert [message.queue_id for message in broker.messages("SCHEDULE_TOPIC_XXXX")] == [2]
        manual(broker).advance(9_900)
        assert bodies(broker) == []
        manual(broker).advance(200)
        assert bodies(broker) == [b"x"]


@pytest.mark.slow
@pytest.mark.rmq(broker_config=BrokerConfig(timers=WHEEL, hops=True))
def test_the_relay_carries_what_the_timer_refuses(rmq: Kit, broker: Broker) -> None:
    days = 3_600_000 * 24
    timed(broker, b"timer", TIMER_DELAY_MS=days + 1)
    timed(broker, b"relay", TIMER_DELAY_MS=5 * days + 1)
    assert [message.body for message in broker.messages("rmq_sys_wheel_timer")] == [b"timer"]
    assert [message.body for message in broker.messages("SYSTEM_SCHEDULE_MSG")] == [b"relay"]
    rmq.advance(ms=5 * days)
    assert bodies(broker) == [b"timer"]
    rmq.advance(ms=2_000)
    assert bodies(broker) == [b"timer", b"relay"]


@pytest.mark.parametrize(
    ("settings", "waits_in"),
    [({}, "rmq_sys_wheel_timer"), ({"timers": WHEEL}, "rmq_sys_wheel_timer"), ({"hops": True}, "SYSTEM_SCHEDULE_MSG")],
)
def test_delay_and_deliver_at_choose_the_mechanism(settings: dict[str, Any], waits_in: str) -> None:
    """An exact level is used first, then the timer, then the relay."""
    with opened(**settings) as broker:
        now_ms = broker.runner.now_ms()
        due = datetime.fromtimestamp((now_ms + 90_000) / 1000, UTC)
        Producer(broker, "p").send(Message("T", b"at", deliver_at=due))
        assert [message.body for message in broker.messages(waits_in)] == [b"at"]
        Producer(broker, "p").send(Message("T", b"level", delay=timedelta(minutes=1)))
        assert b"level" in [message.body for message in broker.messages("SCHEDULE_TOPIC_XXXX")]
        manual(broker).advance(89_000)
        assert bodies(broker) == [b"level"]
        manual(broker).advance(3_000)
        assert sorted(bodies(broker)) == [b"at", b"level"]


def carried(broker: Broker, queue_id: int = 0) -> None:
    message = send_at(Message("T", b"x"), broker.runner.now_ms() + 20_000, queue_id)
    broker.call(SendMessage("p", message, 0, broker.runner.now_ms(), HOST))


@pytest.mark.rmq(broker_config=BrokerConfig(hops=True))
def test_relayed_messages_can_be_consumed(rmq: Kit, broker: Broker) -> None:
    """The send creates the target topic, and the delivery creates it again if it has been deleted."""
    carried(broker)
    assert "T" in broker.topics()
    broker.delete_topic("T")
    rmq.advance(ms=21_000)
    assert [message.body for message in pull(broker, "T").messages] == [b"x"]


@pytest.mark.rmq(broker_config=BrokerConfig(hops=True))
def test_hops_are_delivered_without_a_warning(rmq: Kit, caplog: pytest.LogCaptureFixture) -> None:
    rmq.producer().send("T", b"x", delay=33)
    rmq.advance(seconds=35)
    assert [message.body for message in rmq.messages("T")] == [b"x"]
    assert "SYSTEM_SCHEDULE_MSG" not in caplog.text


@pytest.mark.rmq(broker_config=BrokerConfig(hops=True))
def test_a_relayed_message_creates_its_topic_with_its_producers_queues(broker: Broker) -> None:
    message = send_at(Message("T", b"x"), broker.runner.now_ms() + 20_000)
    Producer(broker, "p", default_topic_queues=2).send(message)
    assert len(broker.queues("T")) == 2


@pytest.mark.rmq(broker_config=BrokerConfig(hops=True))
def test_the_relay_refuses_a_queue_that_is_not_there(broker: Broker) -> None:
    broker.create_topic("T", 2)
    with pytest.raises(BrokerError, match="no queue 5"):
        carried(broker, 5)
    message = Message("SYSTEM_SCHEDULE_MSG", b"x")
    with pytest.raises(MessageIllegalError, match="send_at"):
        broker.call(SendMessage("p", message, 0, 1, HOST))
    with pytest.raises(MessageIllegalError, match="send_at"):
        broker.call(SendTogether((SendMessage("p", message, 0, 1, HOST),)))  # as a server that gets several


def test_without_relay_its_messages_are_refused(broker: Broker) -> None:
    with pytest.raises(MessageIllegalError, match="hops=True"):
        carried(broker)


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
