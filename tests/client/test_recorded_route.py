"""Histories that applications write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from librmq import (
    Broker,
    ConfigError,
    DeliveredMessage,
    ManualClock,
    ManualRunner,
    Producer,
    PullConsumer,
    PushConsumer,
    ReconsumeLater,
    StoreConfig,
    record_history,
)
from librmq.testing import check_history


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_an_application_records_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    runner = ManualRunner(ManualClock(1_700_000_000_000))
    with Broker.temporary(runner=runner) as broker, record_history(broker, path, process="shop") as route:

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
