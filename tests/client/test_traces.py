"""Traces that producers and push consumers write with ``trace=True``."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from librmq import (
    Broker,
    BrokerConfig,
    Cluster,
    DeliveredMessage,
    ManualClock,
    ManualRunner,
    Message,
    Metrics,
    Producer,
    PushConsumer,
    ReconsumeLater,
    StoreConfig,
    TransactionProducer,
    TransactionState,
)
from librmq.client import traces
from librmq.errors import ConfigError, MessageIllegalError
from librmq.message.traces import Trace, TraceReader
from librmq.testing import Kit, check_history
from tests.broker.test_administered_routes import as_peer, over_tcp
from tests.budget import many
from tests.cli.stand import Shell

START_MS: Final = 1_700_000_000_000
TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
PATIENT_S: Final = 60


@pytest.fixture
def runner() -> ManualRunner:
    return ManualRunner(ManualClock(START_MS))


@pytest.fixture
def broker(runner: ManualRunner) -> Iterator[Broker]:
    with Broker.temporary(runner=runner) as broker:
        broker.create_topic("orders", 1)
        yield broker


def texts(broker: Any, topic: str = TOPIC) -> list[str]:
    """Return the records in the order of the log: ids as I1, I2, …, offset ids as O, fields separated by a bar."""
    names: dict[str, str] = {}
    bodies = [message.body.decode() for message in broker.messages(topic)]

    def name_of(found: re.Match[str]) -> str:
        text = found.group()
        return "O" if "00002A9F" in text else names.setdefault(text, f"I{len(names) + 1}")

    lines = re.sub(r"[0-9A-F]{32}", name_of, "".join(bodies).replace("\x01", "|")).split("\x02")
    assert lines.pop() == ""
    return lines


def read(broker: Any, topic: str = TOPIC) -> list[Trace]:
    reader = TraceReader()
    read_traces = list(reader.traces(broker.messages(topic)))
    assert reader.unreadable == 0
    return read_traces


def results(broker: Any) -> list[tuple[Any, ...]]:
    return [(trace.succeeded, trace.result) for trace in read(broker) if trace.trace == "consumed"]


# ---- what is written


def test_sends_in_the_layout_of_4_9(broker: Broker, runner: ManualRunner) -> None:
    with Producer(broker, "P", trace=True) as producer:
        producer.send("orders", b"first", tags="t", keys=["a", "b"])
        producer.send("orders", b"12", delay_level=1)
        producer.send_batch([Message("orders", b"1", keys="k"), Message("orders", b"2")])
        producer.send_oneway("orders", b"3")
        assert not list(broker.messages(TOPIC))
        runner.advance(499)
        assert not list(broker.messages(TOPIC))
        runner.advance(1)
        (message,) = broker.messages(TOPIC)
    at = f"Pub|{START_MS}|DefaultRegion|P|orders"
    assert texts(broker) == [
        f"{at}|I1|t|a b|127.0.0.1:10911|5|0|0|O|true",
        f"{at}|I2|null|null|127.0.0.1:10911|2|0|3|O|true",
        f"{at}|I3,I4|null|null|127.0.0.1:10911|155|0|0|O,O|true",
        f"{at}|I5|null|null|127.0.0.1:10911|1|0|0|O|true",
    ]
    ids = [trace.id for trace in read(broker)]
    assert message.keys == (ids[0], "a", "b", *ids[1:])
    assert {trace.instance.rpartition("@")[0] for trace in read(broker)} == {"127.0.0.1"}


def test_deliveries_and_retries(broker: Broker, runner: ManualRunner) -> None:
    def listener(message: DeliveredMessage) -> None:
        runner.clock.move_to(runner.now_ms() + 30)  # type: ignore[attr-defined]
        if message.reconsume_times == 0:
            raise ReconsumeLater

    consumer = PushConsumer(broker, "G", trace=True)
    consumer.subscribe("orders", listener)
    with consumer, Producer(broker, "P") as producer:
        producer.send("orders", b"x", keys="k")
        runner.advance(60_000)
    first, second = START_MS, read(broker)[2].at_ms
    assert second >= START_MS + 10_000
    assert texts(broker) == [
        f"SubBefore|{first}|DefaultRegion|G|I1|I2|0|k",
        f"SubAfter|I1|I2|30|false|k|4|{first + 30}|G",
        f"SubBefore|{second}|DefaultRegion|G|I3|I2|1|k",
        f"SubAfter|I3|I2|30|true|k|0|{second + 30}|G",
    ]


def test_transactions(broker: Broker, runner: ManualRunner) -> None:
    states = iter([TransactionState.COMMIT, TransactionState.ROLLBACK, None])
    with TransactionProducer(
        broker, "P", lambda message: TransactionState.COMMIT, execute=lambda message, arg: next(states), trace=True
    ) as producer:
        for _ in range(3):
            producer.send_in_transaction(Message("orders", b"x", tags="t", keys="k"))
        runner.advance(120_000)
    half = f"Pub|{START_MS}|DefaultRegion|P|orders|%s|t|k|127.0.0.1:10911|1|0|1|O|true"
    end = "EndTransaction|%d|DefaultRegion|P|orders|%s|t|k|127.0.0.1:10911|2|%s|%s|%s"
    checked_ms = read(broker)[-1].at_ms
    assert checked_ms > START_MS
    assert texts(broker) == [
        half % "I1", end % (START_MS, "I1", "I1", "COMMIT_MESSAGE", "false"),
        half % "I2", end % (START_MS, "I2", "I2", "ROLLBACK_MESSAGE", "false"),
        half % "I3", end % (START_MS, "I3", "I3", "UNKNOW", "false"),
        end % (checked_ms, "I3", "I3", "COMMIT_MESSAGE", "true"),
    ]  # fmt: skip


def fails(message: DeliveredMessage) -> None:
    raise ValueError("x")


def takes_a_quarter_of_an_hour(message: DeliveredMessage) -> None:
    clock = takes_a_quarter_of_an_hour.clock  # type: ignore[attr-defined]
    clock.move_to(clock.now_ms() + 900_000)


@many
@pytest.mark.parametrize(
    ("listener", "options", "outcome"),
    [
        (lambda message: None, {}, (True, "SUCCESS")),
        (fails, {}, (False, "EXCEPTION")),
        (lambda message: None, {"must_return": True}, (False, "RETURNNULL")),
        (lambda message: False, {"must_return": True}, (False, "FAILED")),
        (lambda message: True, {"must_return": True}, (True, "SUCCESS")),
        (lambda messages: -1, {"batch": True}, (False, "FAILED")),
        (lambda messages: -2, {"batch": True}, (False, "EXCEPTION")),
        (takes_a_quarter_of_an_hour, {}, (True, "TIME_OUT")),
    ],
)
@pytest.mark.parametrize("orderly", [False, True])
def test_results_of_a_listener(
    broker: Broker,
    runner: ManualRunner,
    listener: Callable[[Any], Any],
    options: dict[str, Any],
    outcome: tuple[bool, str],
    orderly: bool,
) -> None:
    takes_a_quarter_of_an_hour.clock = runner.clock  # type: ignore[attr-defined]
    consumer = PushConsumer(broker, "G", trace=True, orderly=orderly, max_reconsume_times=0)
    consumer.subscribe("orders", listener, **options)
    with consumer, Producer(broker, "P") as producer:
        producer.send("orders", b"x")
        runner.advance(600)
    assert results(broker)[0] == outcome


def test_each_message_of_a_batch_has_its_own_result(broker: Broker, runner: ManualRunner) -> None:
    consumer = PushConsumer(broker, "G", trace=True, batch_size=3)
    consumer.subscribe("orders", lambda messages: 1)
    with Producer(broker, "P") as producer:
        producer.send_batch([Message("orders", b"x") for _ in range(3)])
    with consumer:
        runner.advance(600)
    assert results(broker)[:3] == [(True, "SUCCESS"), (True, "SUCCESS"), (False, "FAILED")]
    assert len({trace.request for trace in read(broker)[:6]}) == 1


def test_hooks_of_the_user_stay(broker: Broker) -> None:
    groups = []
    with Producer(broker, "P", trace=True, hooks=[lambda context: groups.append(context.group)]) as producer:
        producer.send("orders", b"x")
    assert groups == ["P"]
    assert len(texts(broker)) == 1


def test_no_trace_of_traces(broker: Broker, runner: ManualRunner) -> None:
    """A consumer that reads traces and a producer that copies them would otherwise go on forever."""
    consumer = PushConsumer(broker, "G", trace=True)
    producer = Producer(broker, "P", trace=True)
    consumer.subscribe(TOPIC, lambda message: producer.send(TOPIC, message.body) if message.keys else None)
    with consumer, producer:
        producer.send("orders", b"x")
        runner.advance(10_000)
    assert [text.partition("|")[0] for text in texts(broker)] == ["Pub", "Pub"]  # the trace and its copy


def test_a_topic_of_another_name(broker: Broker, runner: ManualRunner) -> None:
    with Producer(broker, "P", trace="audit") as producer:
        producer.send("orders", b"x")
    assert len(texts(broker, "audit")) == 1
    assert not list(broker.messages(TOPIC))


@pytest.mark.parametrize("make", [Producer, PushConsumer])
def test_settings_that_are_refused(broker: Broker, make: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="trace: expected"):
        make(broker, "g", trace=1)
    with pytest.raises(ConfigError, match="trace: only the broker writes"):
        make(broker, "g", trace="RMQ_SYS_TRANS_HALF_TOPIC")
    with pytest.raises(MessageIllegalError, match="may only contain"):
        make(broker, "g", trace="a b")
    assert make(broker, "g", trace=False).traces is None


# ---- what it must not do


def test_without_a_topic_sends_go_on_and_one_line_says_so(
    runner: ManualRunner, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    with Broker.temporary(BrokerConfig(auto_create_topic=False), runner=runner) as broker:
        broker.create_topic("orders", 1)
        with Producer(broker, "P", trace="audit", metrics=metrics) as producer, caplog.at_level(logging.INFO):
            for _ in range(3):
                assert producer.send("orders", b"x").queue_offset >= 0
                runner.advance(600)
            assert len([line for line in caplog.records if line.name == "librmq.traces"]) == 1
            assert metrics.snapshot()["traces_dropped"] == {("P",): 3}
            broker.create_topic("audit", 1)
            producer.send("orders", b"x")
            runner.advance(600)
            assert "3 were dropped before" in caplog.text
        assert len(texts(broker, "audit")) == 1
        with Producer(broker, "Q", trace=True) as producer:
            producer.send("orders", b"x")
        assert 'start them with traceTopicEnable=true, or name a topic of yours, such as trace="traces"' in caplog.text


def test_more_than_fits_is_dropped(
    broker: Broker, runner: ManualRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(traces, "MAX_WAITING", 3)
    metrics = Metrics()
    with Producer(broker, "P", trace=True, metrics=metrics) as producer:
        for _ in range(5):
            producer.send("orders", b"x")
        assert metrics.snapshot()["traces_dropped"] == {("P",): 2}
        assert caplog.text.count("are dropped") == 1
        runner.advance(600)
        producer.send("orders", b"x")
    assert len(texts(broker)) == 4


def test_many_go_early_and_in_several_messages(
    broker: Broker, runner: ManualRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "MANY", 5)
    monkeypatch.setattr(traces, "MAX_BODY", 400)
    with Producer(broker, "P", trace=True) as producer:
        for _ in range(4):
            producer.send("orders", b"x")
        runner.advance(0)
        assert not list(broker.messages(TOPIC))
        producer.send("orders", b"x")
        runner.advance(0)
        assert 0 < len(list(broker.messages(TOPIC))) < 5
        runner.advance(2_000)
    assert len(texts(broker)) == 5
    assert all(len(message.body) <= 400 for message in broker.messages(TOPIC))


def test_keys_have_room_in_their_message(broker: Broker) -> None:
    """The properties of a message have at most 32,767 bytes."""
    with Producer(broker, "P", trace=True) as producer:
        for number in range(40):
            producer.send("orders", b"x", keys=f"{number}-{'k' * 3000}")
    assert len(texts(broker)) == 40
    assert len(list(broker.messages(TOPIC))) == 6


def test_a_shutdown_stores_what_waits_but_not_for_long(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    producer = Producer(broker, "P", trace=True)
    producer.send("orders", b"x")
    producer.shutdown()
    producer.shutdown()
    assert len(texts(broker)) == 1
    monkeypatch.setattr(traces, "CLOSE_MS", 0)
    with Producer(broker, "Q", trace=True) as late:
        late.send("orders", b"x")
    assert len(texts(broker)) == 1
    assert "1 traces for RMQ_SYS_TRACE_TOPIC are dropped" in caplog.text


def test_a_closed_broker_fails_no_shutdown(runner: ManualRunner, caplog: pytest.LogCaptureFixture) -> None:
    broker = Broker.temporary(runner=runner)
    broker.create_topic("orders", 1)
    producer = Producer(broker, "P", trace=True)
    producer.send("orders", b"x")
    broker.close()
    assert producer.shutdown()
    assert "are dropped" in caplog.text


# ---- where it works


@contextlib.contextmanager
def in_process(folder: Path) -> Iterator[Any]:
    with Broker.open(folder) as broker:
        yield broker


@contextlib.contextmanager
def in_cluster(folder: Path) -> Iterator[Any]:
    with Cluster.open(folder, ["a", "b"]) as cluster:
        yield cluster


@pytest.mark.parametrize("place", [in_process, as_peer, over_tcp, in_cluster])
def test_at_every_route(
    place: Callable[[Path], contextlib.AbstractContextManager[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "CLOSE_MS", 1000 * PATIENT_S)
    monkeypatch.setattr(traces, "SEND_TIMEOUT_MS", 1000 * PATIENT_S)
    with place(tmp_path / "store") as route:
        route.create_topic("orders", 1)
        consumer = PushConsumer(route, "G", trace=True)
        bodies = []
        consumer.subscribe("orders", lambda message: bodies.append(message.body))
        with consumer, Producer(route, "P", trace=True) as producer:
            sent = producer.send("orders", b"x", keys="k")
            route.join(timeout=PATIENT_S)
        assert bodies == [b"x"]
        found = sorted(read(route), key=lambda trace: ("sent", "received", "consumed").index(trace.trace))
        assert [(trace.trace, trace.id, trace.keys, trace.group) for trace in found] == [
            ("sent", sent.message_id, "k", "P"),
            ("received", sent.message_id, "k", "G"),
            ("consumed", sent.message_id, "k", "G"),
        ]


def test_commands_read_them(shell: Shell, runner: ManualRunner) -> None:
    with Broker.open(shell.folder / "own", runner=runner, store_config=StoreConfig.tiny()) as broker:
        broker.create_topic("orders", 1)
        consumer = PushConsumer(broker, "G", trace=True)
        consumer.subscribe("orders", lambda message: None)
        with consumer, Producer(broker, "P", trace=True) as producer:
            batch = producer.send_batch([Message("orders", b"1"), Message("orders", b"2")])
            runner.advance(600)
    second = batch.message_id.split(",")[1]
    rows = [row for row in shell("story", "own", second).rows if row["topic"] == TOPIC]
    assert [(row["event"], row["group"], row["at_ms"]) for row in rows] == [
        ("sent", "P", START_MS), ("received", "G", START_MS), ("consumed", "G", START_MS),
    ]  # fmt: skip
    assert [row["trace"] for row in shell("traces", "own", "--id", second).rows] == ["sent", "received", "consumed"]


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Run commands in a new folder."""
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys, monkeypatch)


def test_under_the_clock_of_a_test(rmq: Kit) -> None:
    rmq.consumer("G", trace=True).subscribe("orders")(lambda message: None)
    rmq.producer("P", trace=True).send("orders", b"x")
    begin_ms = rmq.clock.now_ms()
    rmq.advance(seconds=1)
    assert {trace.at_ms for trace in read(rmq.broker)} == {begin_ms}
    assert [trace.trace for trace in read(rmq.broker)].count("consumed") == 1
    assert not check_history(rmq.events())


def test_a_crash_of_a_traced_process(rmq: Kit) -> None:
    """Traces that wait end with their process, and delivery goes on."""
    process = rmq.app(
        "shop", lambda process: process.consumer("G", trace=True).subscribe("orders", lambda message: None)
    )
    rmq.producer("P").send("orders", b"x")
    rmq.advance(ms=100)
    rmq.crash(process)
    rmq.producer("P").send("orders", b"y")
    rmq.advance(seconds=60)
    assert not check_history(rmq.events())
    traced = [trace.trace for trace in read(rmq.broker)]
    assert traced.count("consumed") == traced.count("received") >= 1
