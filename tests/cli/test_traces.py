"""Traces that clients recorded: in ``traces``, in ``story``, as columns, and with Spark."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, ManualClock, ManualRunner, Producer, StoreConfig
from librmq.columns import traces
from librmq.errors import ConfigError
from tests.cli.stand import Shell, errors_of

START_MS = 1_700_000_000_000
PROCESS = os.getpid() & 0xFFFF


def record(*fields: object) -> str:
    return "\x01".join(map(str, fields)) + "\x02"


def store_traces(broker: Broker, ids: list[str], topic: str = "RMQ_SYS_TRACE_TOPIC") -> None:
    """Store traces as clients of 4.9 and 5.3 record them: a send, a failure, a retry in a batch of two, and others."""
    first, second = ids
    bodies = [
        record("Pub", START_MS, "DefaultRegion", "P", "orders", first, "null", "order-1", "10.9.9.9:10911", 5, 7, 0,
               "0A090909", "true"),
        record("SubBefore", START_MS + 10, "DefaultRegion", "G", "R1", first, 0, "order-1"),
        record("SubAfter", "R1", first, 30, "false", "order-1", 2, START_MS + 40, "G"),
        record("SubBefore", START_MS + 50, "DefaultRegion", "G", "R2", first, 1, "order-1")
        + record("SubBefore", START_MS + 50, "DefaultRegion", "G", "R2", second, 0, "null"),
        # Clients with an access channel of the cloud leave out time and group.
        record("SubAfter", "R2", first, 4, "true", "order-1", 0, "")
        + record("SubAfter", "R2", second, 4, "true", "null", 0, ""),
        record("EndTransaction", START_MS + 60, "DefaultRegion", "P", "orders", second, "t", "k", "10.9.9.9:10911", 1,
               "T1", "COMMIT_MESSAGE", "false"),
        record("Recall", START_MS + 70, "DefaultRegion", "P", "orders", second, "true"),
        record("Pub", "no number") + record("Unknown", 1),
        record("Pub", START_MS + 80, "DefaultRegion", "P", "orders", second, "t", "", "10.9.9.9:10911", 5, 7, 0,
               "false"),
    ]  # fmt: skip
    producer = Producer(broker, "P-trace")
    for body in bodies:
        producer.send(topic, body.encode(), keys=[first, second, "order-1"])


@pytest.fixture
def ids(shell: Shell) -> list[str]:
    """Make a store with two messages and their traces, and return their ids."""
    runner = ManualRunner(ManualClock(START_MS))
    with Broker.open(shell.folder / "own", runner=runner, store_config=StoreConfig.tiny()) as broker:
        broker.create_topic("orders", 1)
        producer = Producer(broker, "P")
        ids = [producer.send("orders", b"first", keys="order-1").message_id, producer.send("orders", b"2").message_id]
        store_traces(broker, ids)
    return ids


def short(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("trace", "at_ms", "id", "group", "succeeded", "result", "took_s", "retries"))


def test_rows(shell: Shell, ids: list[str]) -> None:
    answer = shell("traces", "own")
    assert answer.status == 0
    assert not errors_of("traces", *answer.rows)
    first, second = ids
    joined_ms = answer.rows[5]["at_ms"]  # when the broker stored it
    assert START_MS <= joined_ms < START_MS + 60_000
    assert [short(row) for row in answer.rows] == [
        ("sent", START_MS, first, "P", True, None, 0.007, None),
        ("received", START_MS + 10, first, "G", None, None, None, 0),
        ("consumed", START_MS + 40, first, "G", False, "EXCEPTION", 0.03, None),
        ("received", START_MS + 50, first, "G", None, None, None, 1),
        ("received", START_MS + 50, second, "G", None, None, None, 0),
        ("consumed", joined_ms, first, "G", True, "SUCCESS", 0.004, None),
        ("consumed", joined_ms, second, "G", True, "SUCCESS", 0.004, None),
        ("ended", START_MS + 60, second, "P", None, "COMMIT_MESSAGE", None, None),
        ("recalled", START_MS + 70, second, "P", True, None, None, None),
        ("sent", START_MS + 80, second, "P", False, None, 0.007, None),
    ]
    assert {row["instance"].rpartition("@")[2] for row in answer.rows} == {str(PROCESS)}
    assert [row["keys"] for row in answer.rows[:2]] == ["order-1", "order-1"]
    assert "2 records could not be read" in answer.said
    assert [row["id"] for row in shell("traces", "own", "--id", second).rows] == [second] * 5
    assert {row["trace"] for row in shell("traces", "own", "--group", "G").rows} == {"received", "consumed"}
    assert "no trace" in shell("traces", "own", "--group", "nobody").said
    earlier = shell("traces", "own", "--at", answer.rows[3]["physical_offset"]).rows
    assert earlier == answer.rows[:3]


def test_story_says_which_instance_consumed_it(shell: Shell, ids: list[str]) -> None:
    for name in (ids[0], "order-1"):
        rows = shell("story", "own", name).rows
        traced = [row for row in rows if row["topic"] == "RMQ_SYS_TRACE_TOPIC"]
        assert [row["event"] for row in traced] == ["sent", "received", "failed", "received", "consumed"]
        assert [row["event"] for row in rows if row["topic"] == "orders"] == ["stored"]
        failed = traced[2]
        assert (failed["group"], failed["at_ms"], failed["unique_key"]) == ("G", START_MS + 40, ids[0])
        assert f"@{PROCESS}" in failed["note"]
        assert "EXCEPTION" in failed["note"]
        assert "30 ms" in failed["note"]
        assert "attempt 2" in traced[3]["note"]


def test_story_of_a_message_of_which_only_traces_are_here(shell: Shell) -> None:
    """A broker can keep the traces of messages that another broker has."""
    runner, ids = (
        ManualRunner(ManualClock(START_MS)),
        ["0A09090900002A139A5510FA5B8A0000", "0A09090900002A139A5510FA5B8A0001"],
    )
    with Broker.open(shell.folder / "only", runner=runner, store_config=StoreConfig.tiny()) as broker:
        store_traces(broker, ids)
    for name in (ids[0], "order-1"):
        rows = shell("story", "only", name).rows
        assert [row["event"] for row in rows] == ["sent", "received", "failed", "received", "consumed"]
        assert {row["unique_key"] for row in rows} == {ids[0]}
    assert shell("story", "only", "order-1", "--topic", "orders").rows == rows
    assert shell("story", "only", "order-2").rows == []


def test_topics_of_traces_that_users_name(shell: Shell) -> None:
    runner = ManualRunner(ManualClock(START_MS))
    with Broker.open(shell.folder / "custom", runner=runner, store_config=StoreConfig.tiny()) as broker:
        broker.create_topic("orders", 1)
        broker.create_topic("audit", 1)
        producer = Producer(broker, "P")
        ids = [producer.send("orders", b"x").message_id for _ in range(2)]
        store_traces(broker, ids, "audit")
    assert len(shell("traces", "custom").rows) == 10
    assert shell("traces", "custom", "--trace-topic", "orders").rows == []
    assert [row["event"] for row in shell("story", "custom", ids[1]).rows if row["topic"] == "audit"] == [
        "received", "consumed", "ended", "recalled", "failed",
    ]  # fmt: skip
    assert traces(str(shell.folder / "custom"), topic="audit").read_all().num_rows == 10


def columns_of(shell: Shell) -> list[tuple[Any, ...]]:
    return [(*short(row)[2:], row["instance"], row["physical_offset"]) for row in shell("traces", "own").rows]


def test_columns(shell: Shell, ids: list[str]) -> None:
    names = ("id", "group", "succeeded", "result", "tookSeconds", "retries", "instance", "physicalOffset")
    table = traces(str(shell.folder / "own")).read_all()
    assert [tuple(row[name] for name in names) for row in table.to_pylist()] == columns_of(shell)
    assert int(table.column("at")[0].as_py().timestamp() * 1000) == START_MS
    several = traces([str(shell.folder / "own")]).read_all()
    assert several.column("store").to_pylist() == [str(shell.folder / "own")] * 10
    for settings in ({"mode": "PERMISSIVE"}, {"columns": ["body"]}):
        with pytest.raises(ConfigError, match="leave columns out, and read a damaged store in mode DROP"):
            traces(str(shell.folder / "own"), **settings)


@pytest.mark.spark
def test_spark(shell: Shell, ids: list[str], tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    answer = shell("spark", "run", "traces", "own")
    assert answer.status == 0, answer.said
    rows = answer.rows
    names = ("id", "group", "succeeded", "result", "tookSeconds", "retries", "instance", "physicalOffset")
    assert sorted([tuple(row[name] for name in names) for row in rows], key=str) == sorted(columns_of(shell), key=str)
    for _ in range(2):
        answer = shell("spark", "run", "traces", "own", "--incremental", "--out", "result")
        assert answer.status == 0, answer.said
        assert answer.rows[0]["rows"] == len(rows)
