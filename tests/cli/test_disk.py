"""``disk``: what fills the disk, what happens when it is full, and why old files stay."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, ManualClock, ManualRunner, Message, MessageStore, Producer, StoreConfig
from tests.cli.stand import Shell, errors_of, files_of
from tests.reference import COMPACT, unpack

HOURS = ";".join(map(str, range(24)))
START_MS = 1_700_000_000_000
HOUR_MS = 3_600_000


def disk(shell: Shell, *words: object, status: int = 0) -> tuple[dict[str, Any], dict[str, dict[str, Any]], str]:
    """Return the row of the disk, those of the topics by name, and the notes."""
    answer = shell("disk", *words)
    assert answer.status == status, answer.said
    first, *others = answer.rows
    assert first["type"] == "disk"
    topics = [row for row in others if row["type"] == "topic"]
    assert {row["type"] for row in others[len(topics) :]} <= {"file"}
    assert [row["bytes"] for row in topics] == sorted((row["bytes"] for row in topics), reverse=True)
    return first, {row["topic"]: row for row in topics}, answer.said


def test_files_of_a_brokers_store(shell: Shell) -> None:
    store = shell.folder / "store"
    before = files_of(store)
    row, topics, said = disk(shell, "store")
    kinds = {"log": ["commitlog"], "queue": ["consumequeue", "consumequeue_ext"], "index": ["index"], "timer": []}
    for kind, folders in kinds.items():
        assert row[f"{kind}_bytes"] == sum(
            len(data) for name, data in before.items() if name.split(os.sep)[0] in folders
        ), kind
    files = [path for path in store.rglob("*") if path.is_file()]
    assert sum(row[f"{kind}_bytes"] for kind in (*kinds, "other")) == sum(path.stat().st_size for path in files)
    assert row["allocated_bytes"] == sum(path.stat().st_blocks * 512 for path in files)
    usage = shutil.disk_usage(store)
    assert row["used_ratio"] == pytest.approx(usage.used / (usage.used + usage.free), abs=0.05)
    assert [threshold["ratio"] for threshold in row["thresholds"]] == [0.75, 0.85, 0.9]
    assert all({"ratio", "free_bytes", "effect"} == threshold.keys() for threshold in row["thresholds"])
    counted = {row["topic"]: row for row in shell("count", "store", "--by", "topic", "--all").rows}
    assert {name: (use["messages"], use["bytes"]) for name, use in topics.items()} == {
        name: (use["messages"], use["bytes"]) for name, use in counted.items()
    }
    assert topics["RMQ_SYS_TRANS_HALF_TOPIC"]["kind"] == "half"
    assert files_of(store) == before
    assert "a broker's fileReservedTime" in said
    assert "group CG_order" in said


def test_unread_bytes_are_those_of_the_group_furthest_behind(shell: Shell) -> None:
    _, topics, _ = disk(shell, "store")
    for topic in ("TopicTest", "OrderTopic"):
        rows = shell("lag", "store", "--topic", topic).rows
        begins: dict[int, int] = {}
        for row in rows:
            begin = max(row["consumer_offset"] or 0, row["min_offset"])
            begins[row["queue_id"]] = min(begin, begins.get(row["queue_id"], begin))
        entries = [
            entry for queue_id in begins for entry in shell("queue", "store", topic, queue_id).rows
            if entry["offset"] >= begins[queue_id]
        ]  # fmt: skip
        assert topics[topic]["unread_bytes"] == sum(entry["size"] for entry in entries)


@pytest.mark.parametrize("in_use", [True, False])
def test_a_store_of_librmq_also_while_it_is_in_use(shell: Shell, in_use: bool) -> None:
    runner = ManualRunner(ManualClock(START_MS))
    path = shell.folder / "own"
    with Broker.open(path, runner=runner, store_config=StoreConfig.tiny()) as broker:
        broker.create_topic("orders", 2)
        producer = Producer(broker, "P")
        for number in range(10):
            producer.send("orders", b"x" * 100, queue=number % 2)
        producer.send("orders", b"later", queue=0, delay=60)
        producer.send("orders", b"at a time", queue=0, delay=37)
        producer.send("nobody", b"reads this")
        for queue_id, offset in ((0, 2), (1, 5)):
            broker.set_group("G")
            broker.reset_group("G", "orders", offset, queue_id=queue_id)
        runner.advance(10_000)
        if in_use:
            row, topics, said = disk(shell, "own")
    if not in_use:
        row, topics, said = disk(shell, "own")
    size = topics["orders"]["bytes"] // 10
    assert topics["orders"] == {
        "type": "topic", "topic": "orders", "kind": "user", "messages": 10, "bytes": 10 * size,
        "unread_bytes": 3 * size,
    }  # fmt: skip
    assert topics["nobody"]["unread_bytes"] == topics["nobody"]["bytes"] > 0
    assert topics["rmq_sys_wheel_timer"]["unread_bytes"] == topics["rmq_sys_wheel_timer"]["bytes"] > 0
    # The progress of delay levels is first saved by a delivery, or at the end.
    scheduled = topics["SCHEDULE_TOPIC_XXXX"]
    assert scheduled["unread_bytes"] == (None if in_use else scheduled["bytes"])
    assert ("the progress of delay levels is unknown" in said) is in_use
    assert row["timer_bytes"] > 0


def test_why_an_old_file_stays(shell: Shell) -> None:
    clock = ManualClock(START_MS)
    config = StoreConfig.tiny(
        commitlog_file_size=4096, max_message_size=2048, file_reserved_hours=72, delete_when=HOURS, keep_unconsumed=True
    )
    path = shell.folder / "own"
    with Broker.open(path, runner=ManualRunner(clock), store_config=config) as broker:
        broker.create_topic("orders", 1)
        broker.set_group("G")
        broker.reset_group("G", "orders", "begin")
        producer = Producer(broker, "P")
        for _ in range(12):
            producer.send("orders", bytes(1500))
            clock.advance(ms=HOUR_MS)
    (shell.folder / "hours.json").write_text(json.dumps({"delete_when": HOURS}))  # no file of a store has them
    row, _, said = disk(shell, "own", "--config", "hours.json")
    assert row["log_bytes"] % 4096 == 0
    assert "a day since 2023-11-14 22:13:20 UTC" in said
    assert "75 % in " in said
    (first,) = [line for line in said.splitlines() if line.startswith("note: 00000000000000000000")]
    assert "age limit 72 h, in hour" in first
    assert "unread there: group G 2 of orders; keep_unconsumed keeps it for them" in first
    assert "ended 9 h before" in first
    assert "next at 2023-11-18 00:13:20 UTC" in first
    files = [row for row in shell("disk", "own", "--config", "hours.json").rows if row["type"] == "file"]
    assert not errors_of("disk", *files)
    names = sorted(file.name for file in (path / "commitlog").iterdir())
    assert [row["file"] for row in files] == names[: len(files)]
    assert 3 < len(files) < len(names) + 1  # each but that of the last record
    for earlier, row in zip([None, *files], files, strict=False):
        assert row["age_s"] * 1000 + row["end_timestamp_ms"] == START_MS + 11 * HOUR_MS
        assert row["delete_at_ms"] == row["end_timestamp_ms"] + 72 * HOUR_MS
        assert row["unread_by"] == ["G"]
        assert earlier is None or earlier["age_s"] > row["age_s"]
    assert f"{len(files) - 3} further log files" in said


def test_shares_come_from_the_settings_and_show_in_a_table(shell: Shell) -> None:
    (shell.folder / "config.json").write_text(json.dumps({"disk_max_used_ratio": 0, "disk_force_clean_ratio": 1}))
    row, _, said = disk(shell, "store", "--config", "config.json")
    assert row["thresholds"][0] == {
        "ratio": 0.0, "free_bytes": 0, "effect": "log files beyond the age limit are deleted at any hour",
    }  # fmt: skip
    assert "0 % is exceeded" in said
    table = shell("disk", "store", "--format", "table").out
    for text in ("timers", "CODE 14", "unread", "OrderTopic"):
        assert text in table


def test_a_short_store_says_so(shell: Shell) -> None:
    with MessageStore.open(shell.folder / "short", StoreConfig.tiny(commitlog_file_size=4096)) as store:
        for _ in range(60):
            store.append(Message("T", bytes(300)))
    first, *_ = sorted((shell.folder / "short" / "commitlog").iterdir())
    first.unlink()
    _, topics, said = disk(shell, "short", status=1)
    assert 0 < topics["T"]["messages"] < 60
    assert "begins at 4096" in said
    disk(shell, "short", "--as-recovered", status=0)


@pytest.mark.parametrize("word", ["--at", "s3://bucket/store"])
def test_what_has_no_disk_to_show_is_refused(shell: Shell, word: str) -> None:
    words = ("store", "--at", "0") if word == "--at" else (word,)
    answer = shell("disk", *words)
    assert (answer.status, answer.out) == (2, "")
    assert "disk" in answer.said


def test_unknown_progress_leaves_no_number(shell: Shell) -> None:
    for name in ("consumerOffset.json", "consumerOffset.json.bak"):
        (shell.folder / "store" / "config" / name).unlink(missing_ok=True)
    _, topics, said = disk(shell, "store")
    assert topics["OrderTopic"]["unread_bytes"] is None
    assert "progress" in said


def test_timers_of_5(shell: Shell) -> None:
    unpack(COMPACT / "stores" / "rocketmq-5.3.3.tar.xz", shell.folder / "old")
    row, _, _ = disk(shell, Path("old") / "store")
    store = shell.folder / "old" / "store"
    files = [*store.glob("timerlog/*"), *store.glob("timerwheel*")]
    assert row["timer_bytes"] == sum(path.stat().st_size for path in files) > 0
