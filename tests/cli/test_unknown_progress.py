"""Commands on a store whose tables of progress are missing, empty, or under the name that light queues have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, MessageStore, Producer, PushConsumer, TransactionProducer, TransactionState
from librmq.clock import ManualClock
from librmq.java import json as java_json
from librmq.message import Message
from librmq.runtime import ManualRunner
from librmq.store.format.broker_tables import BrokerTables
from tests.cli.stand import Shell


@pytest.fixture
def lively(shell: Shell) -> Path:
    """Make a store with a backlog, a half that was put back, ended ones, and delivered and waiting delays."""
    path = shell.folder / "lively"
    runner = ManualRunner(ManualClock(1_700_000_000_000))
    with Broker.open(path, runner=runner) as broker:
        consumer = PushConsumer(broker, "readers")
        consumer.subscribe("orders", lambda message: None)
        consumer.start()
        producer = Producer(broker, "senders")
        transactions = TransactionProducer(broker, "payers", lambda message: TransactionState.UNKNOWN)
        producer.send("orders", b"read", delay_level=1)
        for state in (TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN):
            transactions.send_in_transaction(Message("payments", state.name.encode()), execute=lambda *_: state)  # noqa: B023
        runner.advance(200_000)
        consumer.shutdown()
        for number in range(7):
            producer.send("orders", b"%d" % number)
        producer.send("orders", b"later", delay_level=18)
        runner.advance(1000)
    return path


def outputs(shell: Shell) -> dict[str, list[dict[str, Any]]]:
    commands = ("lag lively", "groups lively", "pending lively", "diagnose lively")
    return {words: shell(*words.split()).rows for words in commands}


@pytest.mark.parametrize("content", [None, b""])
def test_missing_progress_of_groups_is_said_by_every_command(lively: Path, shell: Shell, content: bytes | None) -> None:
    before = outputs(shell)
    table = lively / "config/consumerOffset.json"
    (lively / "config/consumerOffset.json.bak").unlink(missing_ok=True)
    table.unlink() if content is None else table.write_bytes(content)
    for words in (
        "lag",
        "groups",
        "pending",
        "expiring",
        "story lively orders",
        "whatif --group readers --topic orders --handler 1ms",
    ):
        name, _, rest = words.partition(" ")
        rest = rest.removeprefix("lively ")
        assert "the progress of groups is unknown: " in shell(name, "lively", *rest.split()).said, words
    halves = [row for row in shell("pending", "lively").rows if row["kind"] == "half"]
    assert halves == [row for row in before["pending lively"] if row["kind"] == "half"]
    found = {row["finding"]: row for row in shell("diagnose", "lively").rows}
    assert found.keys() - {row["finding"] for row in before["diagnose lively"]} == {"unknown-progress"}
    assert found["unknown-progress"]["severity"] == "warning"
    assert shell("report", "lively", "-o", "page.html").status == 0
    report = json.loads((shell.folder / "page.json").read_text())
    assert "unknown-progress" in json.dumps(report["stores"][0]["findings"])


def test_a_copy_without_its_tables_does_not_know_the_progress_of_its_groups(lively: Path, shell: Shell) -> None:
    with Broker.open(lively) as broker:
        broker.store.append(Message("%RETRY%readers", b"x"))
    before = outputs(shell)["pending lively"]
    shutil.rmtree(lively / "config")
    for words in ("lag", "groups", "pending", "expiring", "disk"):
        answer = shell(words, "lively")
        assert answer.said.count("the progress of groups is unknown: ") == 1, words
        if words == "pending":
            halves = [row for row in before if row["kind"] == "half"]
            assert halves == [row for row in answer.rows if row["kind"] == "half"]
    found = {row["finding"] for row in shell("diagnose", "lively").rows}
    assert "unknown-progress" in found
    assert not {"backlog", "retries-without-progress", "expired-unread"} & found


def test_a_store_without_a_broker_has_no_groups(shell: Shell) -> None:
    with MessageStore.open(shell.folder / "plain") as store:
        store.append(Message("orders", b"x"))
    for words in ("lag", "groups"):
        answer = shell(words, "plain")
        assert (answer.status, answer.said.count("plain/config/consumerOffset.json, so the progress of no")) == (0, 1)
    assert {row["finding"] for row in shell("diagnose", "plain").rows} & {"unknown-progress"} == set()


def test_missing_progress_of_delays_lists_what_surely_waits(lively: Path, shell: Shell) -> None:
    before = outputs(shell)["pending lively"]
    for file in lively.glob("config/delayOffset.json*"):
        file.unlink()
    answer = shell("pending", "lively")
    assert answer.rows == before
    assert "the progress of delay levels is unknown: " in answer.said
    assert "unknown-progress" in {row["finding"] for row in shell("diagnose", "lively").rows}


def test_progress_in_the_file_of_a_broker_with_light_queues(lively: Path, shell: Shell) -> None:
    before = outputs(shell)
    config = lively / "config"
    table = java_json.loads(BrokerTables.open(str(config)).offsets.snapshot(0))
    for file in config.glob("consumerOffset.json*"):
        file.unlink()
    light = {"dataVersion": {"timestamp": 5}, **table, "lmqOffsetTable": {"%LMQ%one@%LMQ%readers": 3}}
    (config / "lmqConsumerOffset.json").write_text(java_json.dumps(light))
    after = outputs(shell)
    assert [row for row in after["lag lively"] if "LMQ" not in row["topic"]] == before["lag lively"]
    assert after["pending lively"] == before["pending lively"]
    tables = BrokerTables.open(str(config))
    assert tables.consumer_offset("%LMQ%one", "%LMQ%readers", 0) == 3
    tables.set_consumer_offset("%LMQ%one", "%LMQ%readers", 0, 4)
    tables.persist(0)
    written = java_json.loads((config / "lmqConsumerOffset.json").read_bytes())
    assert written["lmqOffsetTable"] == {"%LMQ%one@%LMQ%readers": 4}
    assert not (config / "consumerOffset.json").exists()


def test_light_queues_are_not_unlisted(shell: Shell) -> None:
    with Broker.open(shell.folder / "light") as broker:
        broker.create_topic("orders", 1)
        broker.store.append(Message("%LMQ%one", b"x"))
        assert broker.clean_unused_topics() == []
    assert "unlisted-topic" not in {row["finding"] for row in shell("diagnose", "light").rows}


def test_a_young_store_has_no_progress_yet(shell: Shell) -> None:
    broker = Broker.open(shell.folder / "young")
    Producer(broker, "senders").send("orders", b"x")
    broker.abandon()
    assert "progress" not in shell("groups", "young").said


@pytest.mark.parametrize("content", ['{"offsetTable":{"orders@', "", None])
def test_a_table_that_was_read_from_its_backup_is_said(
    lively: Path, shell: Shell, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    table = lively / "config/consumerOffset.json"
    (lively / "config/consumerOffset.json.bak").write_bytes(table.read_bytes())
    before = {words: shell(*words.split()).rows for words in ("lag lively", "groups lively", "pending lively")}
    table.unlink() if content is None else table.write_text(content)
    for words, rows in before.items():
        answer = shell(*words.split())
        assert (answer.status, answer.rows) == (0, rows)
        assert answer.said.count("so consumerOffset.json.bak was read, as a broker does: it can be a save older") == 1
    checked = shell("verify", "lively")
    assert checked.status == 0
    assert "consumerOffset.json.bak was read" in checked.said
    with Broker.open(lively):
        assert "consumerOffset.json.bak was read" in caplog.text


def test_an_extracted_store_does_not_know_what_its_source_does_not(lively: Path, shell: Shell) -> None:
    for file in lively.glob("config/consumerOffset.json*"):
        file.unlink()
    assert "the progress of groups is unknown: " in shell("extract", "lively", "--topic", "orders", "-o", "small").said
    assert BrokerTables.open(str(shell.folder / "small/config")).unknown_progress() is not None
