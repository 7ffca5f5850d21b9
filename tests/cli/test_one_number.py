"""One number has one name: what fourteen commands print about one store agrees."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, ManualClock, ManualRunner, Message, Producer, StoreConfig
from librmq.store import MessageStore
from librmq.store.format.broker_tables import BrokerTables
from tests.cli.stand import Shell
from tests.reference import existing

STORES = ("clients-retry-dlq", "clients-transactions", "clients-offsets", "own")


@pytest.fixture(params=STORES)
def path(request: pytest.FixtureRequest, shell: Shell) -> Path:
    """Return a store of real clients, or one of librmq's own with timers."""
    target: Path = shell.folder / "one"
    if request.param != "own":
        return Path(shutil.copytree(existing(request.param, "store"), target))
    runner = ManualRunner(ManualClock(1_700_000_000_000))
    with Broker.open(target, runner=runner, store_config=StoreConfig.tiny()) as own:
        own.create_topic("orders", 2)
        own.set_group("G")
        producer = Producer(own, "P")
        for number in range(10):
            producer.send("orders", b"x", queue=number % 2)
        producer.send("orders", b"later", delay=7301)
        own.reset_group("G", "orders", "begin")
    return target


def by(rows: list[dict[str, Any]], name: str, value: str) -> Counter[str]:
    """Return the sums of a value by a name."""
    sums: Counter[str] = Counter()
    for row in rows:
        sums[row[name]] += row[value] or 0
    return sums


@pytest.mark.slow
def test_fourteen_commands_agree(shell: Shell, path: Path) -> None:
    def rows(command: str, *words: str) -> list[dict[str, Any]]:
        answer = shell(command, path, *words)
        assert answer.status == 0, answer
        return answer.rows

    topics = {row["topic"]: row for row in rows("topics")}
    users = {name: row for name, row in topics.items() if row["kind"] == "user"}
    of_kind = by(list(topics.values()), "kind", "messages")
    (stats,) = rows("stats")
    # messages and queues
    messages = Counter({name: row["messages"] for name, row in users.items() if row["messages"]})
    assert stats["messages"] == messages.total() == of_kind["user"]
    queues = Counter({name: row["queues"] for name, row in users.items() if row["queues"]})
    assert (stats["topics"], stats["queues"]) == (len(users), queues.total())
    assert Counter(row["topic"] for row in rows("queues") if row["topic"] in users) == queues
    assert +by(rows("count"), "topic", "messages") == messages
    dumped = [row["topic"] for row in rows("dump") if row["type"] == "message"]
    assert Counter(name for name in dumped if name in users) == messages
    assert Counter(row["topic"] for row in rows("show") if row["topic"] in users) == messages
    disk = [row for row in rows("disk") if row["type"] == "topic" and row["topic"] in users]
    assert +by(disk, "topic", "messages") == messages
    # groups, their lag and dead letters
    groups = rows("groups")
    assert stats["groups"] == len(groups)
    consuming = {row["group"] for row in groups if row["lag"] is not None}
    assert {row["group"] for row in rows("progress")} <= consuming
    lags = +by(groups, "group", "lag")
    for words in ((), ("--by", "topic"), ("--by", "group"), ("--by", "origin")):
        lag = rows("lag", *words)
        assert {row["group"] for row in lag} <= consuming
        assert +by(lag, "group", "lag") == lags
    own = {row["group"] for row in rows("groups", "--all") if row["lag"] is not None}
    assert {row["group"] for row in rows("lag", "--all")} == own
    letters = Counter(row["group"] for row in rows("dead-letters"))
    assert letters == +by(groups, "group", "dead_letters")
    assert (stats["dead_letters"], stats["retries"]) == (of_kind["dead"], of_kind["retry"])
    assert letters.total() == of_kind["dead"]
    # the report
    assert shell("report", path, "-o", "r.html").status == 0
    (report,) = json.loads((shell.folder / "r.json").read_text())["stores"]
    traffic = by(report["traffic"], "topic", "messages")
    assert traffic.total() == len(dumped) == of_kind.total()
    assert +Counter({topic: traffic[topic] for topic in users}) == messages
    assert +by(report["lag"], "group", "lag") == lags
    assert +by(report["dead_letters"], "group", "messages") == letters
    assert +by(report["waiting"], "kind", "messages") == Counter(row["kind"] for row in rows("pending"))
    # the store
    start = rows("can-start")[0]
    assert start["log_end"] == stats["max_phy_offset"]
    assert f"RocketMQ {start['version'].partition('.')[0]}" in stats["kind"]
    assert rows("verify")[0]["sound"]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["folder", "files"])
def test_commands_agree_about_a_missing_queue(shell: Shell, part: str) -> None:
    """They have the numbers from the log, and name the queue in the same words."""
    whole, lacking = shell.folder / "whole", shell.folder / "lacking"
    with MessageStore.open(whole, StoreConfig.tiny(), clock=ManualClock(1_700_000_000_000)) as store:
        for number in range(6):
            store.append(Message("orders", b"x", keys=f"k{number}"), number % 2)
    tables = BrokerTables.open(str(whole / "config"))
    tables.topics.set("orders", {"topicName": "orders", "readQueueNums": 2, "writeQueueNums": 2, "perm": 6})
    tables.offsets.set("orders@g", {0: 1, 1: 1})
    tables.persist(1)
    shutil.copytree(whole, lacking)
    folder = lacking / "consumequeue" / "orders" / "1"
    shutil.rmtree(folder)
    if part == "files":
        folder.mkdir()
    words = f"the {'folder of the queue is' if part == 'folder' else 'files of the queue are'} missing"
    for command in ("lag", "topics", "stats", "count", "disk", "groups", "pending", "queues", "show"):
        answer, expected = shell(command, lacking), shell(command, whole)
        assert (answer.status, expected.status) == (1, 0), command
        assert f"consumequeue/orders/1: at 0: {words}" in answer.said, command
        if command == "disk":  # the files have other sizes
            answer, expected = (
                given._replace(out="".join(line for line in given.out.splitlines(True) if '"topic"' in line))
                for given in (answer, expected)
            )
        assert answer.out.replace("lacking", "whole") == expected.out, command
    for command in ("verify", "diagnose", "can-start"):
        answer = shell(command, lacking)
        assert answer.status == 1, command
        assert "consumequeue/orders/1" in answer.out, command
        assert words in answer.out, command
    assert shell("report", lacking, "-o", "report.html").status == 1
    assert f"at 0: {words}" in (shell.folder / "report.json").read_text()
