"""Histories that applications write."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from librmq import (
    Broker,
    BrokerConfig,
    CheckedMessage,
    ConfigError,
    ConsumeFrom,
    DeliveredMessage,
    ManualClock,
    ManualRunner,
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
    ReconsumeLater,
    StoreConfig,
    TransactionConfig,
    TransactionProducer,
    TransactionState,
    connect,
    protocol,
    record_history,
)
from librmq.testing import check_history
from librmq.wire.remoting import RemotingServer
from tests.programs import POSIX
from tests.wrapped_route import WrappedBrokers


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_an_application_records_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    runner = ManualRunner(ManualClock(1_700_000_000_000))
    with Broker.temporary(runner=runner) as broker, record_history(broker, path, process="shop") as route:
        assert route.endpoint(broker.name) is route.endpoint(broker.name)  # another one shows that it was reopened

        def listener(message: DeliveredMessage) -> None:
            if not message.reconsume_times:
                raise ReconsumeLater

        consumer = PushConsumer(route, "billing")
        consumer.subscribe("orders", listener)
        with Producer(route, "shop") as producer, consumer:
            sent = producer.send("orders", b"secret")
            runner.advance(60_000)
        with PullConsumer(route, "audit") as audit:
            audit.subscribe("orders")
            audit.poll(0)
    events = lines(path)
    assert b"secret" not in path.read_bytes()
    deliveries = [event for event in events if event["event"] == "deliver" and event["group"] == "billing"]
    assert [(event["id"], event["outcome"]) for event in deliveries] == [
        (sent.message_id, "retry"),
        (sent.message_id, "ok"),
    ]
    assert {event["event"] for event in events} >= {"send", "assign", "revoke", "commit", "group"}
    assert {event["process"] for event in events if "process" in event} == {"shop"}
    assert check_history(events) == []


def test_what_was_polled_and_never_committed_is_written_to_its_end(tmp_path: Path) -> None:
    runner = ManualRunner(ManualClock(1_700_000_000_000))
    with Broker.temporary(runner=runner) as broker, record_history(broker, tmp_path / "history.jsonl") as route:
        broker.create_topic("orders", 1)
        with Producer(route, "shop") as producer:
            producer.send("orders", b"secret")
        with PullConsumer(route, "audit", auto_commit=False, consume_from=ConsumeFrom.FIRST) as audit:
            audit.subscribe("orders")
            assert audit.poll(0)
            assert not audit.poll(0)
        assert not route._open  # noqa: SLF001 (else a long run fills the memory)
    (delivery,) = (event for event in lines(tmp_path / "history.jsonl") if event["event"] == "deliver")
    assert delivery["outcome"] == "ok"
    assert "kept_ms" not in delivery


def test_a_full_history_ends_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "history.jsonl"
    with (
        Broker.temporary(runner=ManualRunner(ManualClock(0))) as broker,
        record_history(broker, path, max_bytes=1_000) as route,
        Producer(route, "shop") as producer,
    ):
        for _ in range(20):
            producer.send("orders", b"x")
    assert 500 < path.stat().st_size <= 1_000
    assert all(event["event"] == "send" for event in lines(path))
    assert [record.getMessage() for record in caplog.records if "is full" in record.getMessage()] == [
        f"the history {path} is full at 1000 bytes: it ends here"
    ]


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    with Broker.temporary(runner=ManualRunner(ManualClock(0))) as broker:
        (tmp_path / "old").write_text("x")
        with pytest.raises(ConfigError, match="exists"):
            record_history(broker, tmp_path / "old")
        with pytest.raises(ConfigError, match="max_bytes"):
            record_history(broker, tmp_path / "new", max_bytes=0)


def test_levels_and_ordered_batches_are_no_anomalies(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    files = StoreConfig.tiny(message_delay_level="1s 1s 1s")
    runner = ManualRunner(ManualClock(1_700_000_000_000))
    with Broker.temporary(store_config=files, runner=runner) as broker, record_history(broker, path) as route:
        consumer = PushConsumer(route, "billing", orderly=True, batch_size=4)
        consumer.subscribe("orders", lambda messages: None)
        with consumer, Producer(route, "shop") as producer:
            for number in range(8):
                producer.send("orders", b"%d" % number, queue=0, delay_level=3)
            runner.advance(60_000)
    assert sum(line["event"] == "deliver" for line in lines(path)) == 8
    assert check_history(lines(path)) == []


def test_over_tcp_the_same_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    checks = TransactionConfig(timeout_s=0.1, interval_s=0.1)
    consumed = threading.Semaphore(0)
    with (
        Broker.temporary(BrokerConfig(transactions=checks)) as broker,
        RemotingServer(broker) as server,
        connect(server.address) as cluster,
        record_history(cluster, path, process="shop") as route,
    ):
        consumer = PushConsumer(route, "billing", consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders", lambda message: consumed.release())

        def check(message: CheckedMessage) -> TransactionState:  # on a busy machine also about the others
            return TransactionState.COMMIT if message.body == b"UNKNOWN" else TransactionState.UNKNOWN

        with TransactionProducer(route, "halves", check) as halves, Producer(route, "shop") as producer, consumer:
            for number in range(3):
                producer.send("orders", b"%d" % number)
            for state in (TransactionState.COMMIT, TransactionState.UNKNOWN, TransactionState.ROLLBACK):
                message = Message("orders", state.name.encode())
                halves.send_in_transaction(message, arg=state, execute=lambda _, state: state)
            for _ in range(5):
                assert consumed.acquire(timeout=30)
        with PullConsumer(route, "audit", consume_from=ConsumeFrom.FIRST) as audit:
            audit.subscribe("orders")
            messages = 0
            while messages < 5:
                messages += len(audit.poll(30))
    events = lines(path)
    kinds = Counter((event["event"], event.get("group"), event.get("outcome")) for event in events)
    assert kinds["send", None, "ok"] == 6
    assert kinds["end_transaction", None, "ok"] == 3
    assert kinds["deliver", "billing", "ok"] == kinds["deliver", "audit", "ok"] == 5
    assert {event["event"] for event in events} >= {"assign", "revoke", "commit", "group"}
    assert check_history([*events, {"event": "drained", "group": "billing", "at_ms": 1 << 50}]) == []


def killing_route(broker: Broker, request_type: type) -> WrappedBrokers:
    """Return a route on which this process is killed, after the broker has done the first request of a type."""

    def pass_on(request: Any, call: Callable[[Any], Any]) -> Any:
        answer = call(request)
        if isinstance(request, request_type):
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    return WrappedBrokers(broker, pass_on)


@POSIX
@pytest.mark.parametrize(
    ("killed_at", "unexplained"),
    [(protocol.SendMessage, []), (protocol.EndTransaction, ["undecided"]), (protocol.SendBack, [])],
)
def test_a_killed_process_leaves_what_it_had_begun(tmp_path: Path, killed_at: type, unexplained: list[str]) -> None:
    """Without these lines the next process would get messages that no process had sent, committed or got before."""

    def run(process: str, route: Any, broker: Broker, *, sends: bool) -> None:
        with record_history(route, tmp_path / process, process=process) as recorded:

            def listener(message: DeliveredMessage) -> None:
                if not message.reconsume_times:
                    raise ReconsumeLater(delay_level=1)

            consumer = PushConsumer(recorded, "billing", consume_from=ConsumeFrom.FIRST)
            consumer.subscribe("orders", listener)
            with consumer, TransactionProducer(recorded, "shop", lambda message: TransactionState.COMMIT) as producer:
                if sends and killed_at is protocol.SendMessage:
                    producer.send("orders", b"paid")
                elif sends:
                    producer.send_in_transaction(
                        Message("orders", b"paid"), execute=lambda _, __: TransactionState.COMMIT
                    )
                assert isinstance(broker.runner, ManualRunner)
                broker.runner.advance(30_000)

    def first() -> None:
        with Broker.open(tmp_path / "store", runner=ManualRunner(ManualClock(1_000_000))) as broker:
            run("first", killing_route(broker, killed_at), broker, sends=True)

    child = os.fork()
    if not child:
        with suppress(BaseException):
            first()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with Broker.open(tmp_path / "store", runner=ManualRunner(ManualClock(2_000_000))) as broker:
        run("second", broker, broker, sends=False)
    crash = {"event": "crash", "process": "first", "at_ms": 1_500_000}
    events = [*lines(tmp_path / "first"), crash, *lines(tmp_path / "second")]
    group = {"event": "group", "group": "billing", "topics": ["orders"]}  # each of the two has described it
    events = [event for event in events if event["event"] != "group"]
    events += [group, {"event": "drained", "group": "billing", "at_ms": 3_000_000}]
    assert [event["outcome"] for event in events if event["event"] == "deliver"][-1] == "ok"
    assert [anomaly.anomaly for anomaly in check_history(events)] == unexplained


def test_an_acknowledgement_after_its_time_ends_nothing(tmp_path: Path) -> None:
    """A server gives a message back for a client that is gone; the broker takes the receipt anyway."""
    path, runner = tmp_path / "history", ManualRunner(ManualClock(1_000_000))
    with Broker.temporary(runner=runner) as broker, record_history(broker, path) as route:
        broker.create_topic("orders", 1)
        call = route.endpoint(broker.name).call
        with Producer(route, "shop") as producer:
            producer.send("orders", b"1")
        receive = protocol.Receive("c", "billing", "orders", 1)
        (first,) = call(receive).messages
        call(protocol.ChangeInvisible("billing", "orders", first.receipt, 1_000, keeps_receipt=True))
        runner.advance(2_000)
        assert call(protocol.Acknowledge("billing", "orders", (first.receipt,))) == (True,)
        (again,) = call(receive).messages
        call(protocol.Acknowledge("billing", "orders", (again.receipt,)))
    deliveries = [event for event in lines(path) if event["event"] == "deliver"]
    assert [(event["attempt"], event["outcome"]) for event in deliveries] == [(0, "died"), (1, "ok")]
    assert check_history(lines(path)) == []
