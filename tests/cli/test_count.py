"""Compare ``topics``, ``stats`` and ``count`` with ``dump`` and ``queues``."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from contextlib import redirect_stdout
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, ManualRunner, columns
from librmq.cli import main
from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.message import Message
from librmq.message.topics import kind_of_topic
from librmq.store import MessageStore
from tests.budget import many, some
from tests.cli.stand import Shell

Row = dict[str, Any]
FROM = "2026-11-20T04:54:56Z"


def groups(row: Row, by: str) -> list[Any]:
    match by:
        case "queue":
            return [f"{row['topic']}:{row['queue_id']}"]
        case "tag":
            return [row["properties"].get("TAGS")]
        case "key":
            return list(dict.fromkeys((row["dispatch_keys"] or "").split())) or [None]
        case "hour":
            return [
                datetime.fromtimestamp(row["store_timestamp"] // 3_600_000 * 3600, UTC).strftime("%Y-%m-%dT%H:00:00Z")
            ]
        case "minute":
            return [datetime.fromtimestamp(row["store_timestamp"] // 60_000 * 60, UTC).strftime("%Y-%m-%dT%H:%M:00Z")]
        case _:
            return [row["topic"]]


WORDS: tuple[list[str], ...] = (
    [],
    ["--all"],
    ["--topic", "OrderTopic", "--queue", "1"],
    ["--tag", "a || TagA"],
    ["--since", FROM],
)
BY = ("topic", "queue", "tag", "key", "hour", "minute")


@pytest.fixture(scope="module")
def stored(project_store: Path) -> list[Row]:
    """Return the messages of the project's store as ``dump`` prints them."""
    with redirect_stdout(io.StringIO()) as out:
        assert main(["dump", str(project_store)]) == 0
    return [row for row in map(json.loads, out.getvalue().splitlines()) if row["type"] == "message"]


@many
@pytest.mark.parametrize("arrow", [True, False], ids=["columns", "messages"])
@pytest.mark.parametrize(("by", "words"), some([*product(BY, WORDS)]))
def test_messages_are_counted_by(
    shell: Shell, stored: list[Row], monkeypatch: pytest.MonkeyPatch, by: str, words: list[str], arrow: bool
) -> None:
    if arrow:
        pytest.importorskip("pyarrow")
    else:
        monkeypatch.setattr("librmq.cli.commands.topics.find_spec", lambda name: None)
    messages: Counter[Any] = Counter()
    sizes: Counter[Any] = Counter()
    for row in stored:
        if row["sys_flag"] & 12 not in (0, 8):
            continue
        if "--topic" in words and (row["topic"], row["queue_id"]) != ("OrderTopic", 1):
            continue
        if "--tag" in words and row["properties"].get("TAGS") not in ("a", "TagA"):
            continue
        if "--since" in words and row["store_timestamp"] < 1_795_150_496_000:
            continue
        if "--all" not in words and kind_of_topic(row["topic"]) != "user":
            continue
        for group in groups(row, by):
            messages[group] += 1
            sizes[group] += row["size"]
    found = shell("count", "store", "--by", by, *words).rows
    assert {row[by]: (row["messages"], row["bytes"]) for row in found} == {
        group: (number, sizes[group]) for group, number in messages.items()
    }
    if by in ("topic", "tag", "key"):
        assert [row["messages"] for row in found] == sorted(messages.values(), reverse=True)


def test_topics_sum_up_their_queues(shell: Shell) -> None:
    queues = shell("queues", "store").rows
    found = shell("topics", "store").rows
    assert [row["topic"] for row in found] == sorted({row["topic"] for row in queues})
    dumped = shell("dump", "store").rows
    for row in found:
        own = [queue for queue in queues if queue["topic"] == row["topic"]]
        times = [
            one["store_timestamp"] for one in dumped
            if one.get("topic") == row["topic"] and one["sys_flag"] & 12 in (0, 8)
        ]  # fmt: skip
        assert row == {
            "topic": row["topic"],
            "kind": kind_of_topic(row["topic"]),
            "queues": len(own),
            "messages": sum(queue["max_offset"] - queue["min_offset"] for queue in own),
            "min_timestamp_ms": min(times),
            "max_timestamp_ms": max(times),
        }


@pytest.mark.parametrize(
    ("topic", "kind"),
    [
        ("orders", "user"),
        ("%RETRY%g", "retry"),
        ("%DLQ%g", "dead"),
        ("SCHEDULE_TOPIC_XXXX", "delay"),
        ("RMQ_SYS_TRANS_HALF_TOPIC", "half"),
        ("RMQ_SYS_TRANS_OP_HALF_TOPIC", "op"),
        ("TBW102", "system"),
        ("rmq_sys_wheel_timer", "system"),
    ],
)
def test_kinds_of_topics(topic: str, kind: str) -> None:
    assert kind_of_topic(topic) == kind


def test_a_topic_that_was_only_made_is_listed(shell: Shell) -> None:
    with Broker.open("new", runner=ManualRunner()) as broker:
        broker.create_topic("made", 3)
    empty = {"queues": 0, "messages": 0, "min_timestamp_ms": None, "max_timestamp_ms": None}
    assert shell("topics", "new").rows == [{"topic": "made", "kind": "user", **empty}]


def test_stats_are_one_row_about_the_store(shell: Shell) -> None:
    (row,) = shell("stats", "store").rows
    topics = shell("topics", "store").rows
    assert row["messages"] == sum(one["messages"] for one in topics if one["kind"] == "user")
    assert (row["min_phy_offset"], row["max_phy_offset"], row["log_files"]) == (0, 281277, 5)
    assert (row["used_by"], row["closed_cleanly"]) == (None, True)
    assert row["groups"] == len(shell("groups", "store").rows)
    with Broker.open("store", runner=ManualRunner()):
        (row,) = shell("stats", "store").rows
    assert row["used_by"] is not None


def test_tags_of_one_code_are_distinguished(shell: Shell, tmp_path: Path) -> None:
    """``Aa`` and ``BB`` have the same hash in Java, and a queue entry holds only the hash."""
    pytest.importorskip("pyarrow")
    tags = ["Aa"] * 50 + ["BB"] + ["Aa"] * 50 + [None, "c"]
    with MessageStore.open(tmp_path / "tags", StoreConfig.tiny()) as store:
        for number, tag in enumerate(tags):
            store.append(Message("t", b"x", tags=tag), number % 2)
    for words in ([], ["--sampled"]):
        rows = shell("count", str(tmp_path / "tags"), "--by", "tag", *words).rows
        assert {row["tag"]: row["messages"] for row in rows} == Counter(tags)
    assert shell("count", str(tmp_path / "tags"), "--by", "topic", "--sampled").status == 2


def test_a_rare_tag_of_the_same_code_is_counted_apart(shell: Shell, tmp_path: Path) -> None:
    """Beyond some thousand messages a sample misses the one ``BB`` among the ``Aa``; without it every tag counts."""
    pytest.importorskip("pyarrow")
    with MessageStore.open(tmp_path / "tags") as store:
        for number in range(20):
            tags = ("BB" if (number, at) == (7, 501) else "Aa" for at in range(1000))
            store.append_batch([Message("t", b"x", tags=tag) for tag in tags])
    rows = shell("count", str(tmp_path / "tags"), "--by", "tag").rows
    assert {row["tag"]: row["messages"] for row in rows} == {"Aa": 19_999, "BB": 1}
    (sampled,) = shell("count", str(tmp_path / "tags"), "--by", "tag", "--sampled").rows
    assert (sampled["tag"], sampled["messages"]) == ("Aa", 20_000)


def test_all_messages_are_those_of_user_topics_everywhere(shell: Shell) -> None:
    """Retries and dead letters are copies; they come by name or with ``--all``."""
    pytest.importorskip("pyarrow")
    with Broker.open("copies") as broker:
        for topic in ("T", "U", "%RETRY%g", "%DLQ%g", "SCHEDULE_TOPIC_XXXX"):
            broker.store.append(Message(topic, topic.encode()))
    users, copies = ["T", "U"], ["%DLQ%g", "%RETRY%g"]
    every = sorted([*users, *copies, "SCHEDULE_TOPIC_XXXX"])
    for words, expected in ([], users), (["--all"], every), (["--topic", copies[0]], copies[:1]):
        assert sorted(row["topic"] for row in shell("count", "copies", *words).rows) == expected
        assert sorted(row["topic"] for row in shell("count", "copies", "--grep", ".", *words).rows) == expected
        path = Path(f"{'-'.join(expected)}.jsonl".replace("%", ""))
        shell("export", "copies", "-o", path, "--columns", "topic", *words)
        assert sorted(json.loads(line)["topic"] for line in path.read_text().splitlines()) == expected
    assert columns.reader("copies").read_all()["topic"].to_pylist() == users
    assert columns.dataset("copies").count_rows() == len(users)
    named = columns.reader("copies", topic=re.compile("%(DLQ|RETRY)%.*")).read_all()["topic"].to_pylist()
    assert sorted(named) == copies


def test_hours_that_no_calendar_has_are_milliseconds(shell: Shell) -> None:
    clock = ManualClock(1_700_000_000_000)
    with MessageStore.open("far", clock=clock) as store:
        store.append(Message("T", b"x"))
        clock.move_to(253_402_300_800_005)  # the year 10000
        store.append(Message("T", b"x"))
    for by, times in (
        ("hour", ["2023-11-14T22:00:00Z", "253402300800000"]),
        ("day", ["2023-11-14T00:00:00Z", "253402300800000"]),
    ):
        answer = shell("count", "far", "--by", by)
        assert (answer.status, answer.said) == (0, "")
        assert [row[by] for row in answer.rows] == times


@pytest.mark.parametrize(
    "words", [["count", "store"], ["count", "store", "--by", "tag"], ["export", "store", "-o", "out.jsonl"]]
)
def test_a_store_is_opened_once(shell: Shell, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """Columns opened it again, which after a kill takes a second recovery in memory."""
    pytest.importorskip("pyarrow")
    opened = []
    usual = MessageStore.open.__func__  # type: ignore[attr-defined]

    def counted(kind: type[MessageStore], path: str, *arguments: Any, **settings: Any) -> MessageStore:
        opened.append(path)
        store: MessageStore = usual(kind, path, *arguments, **settings)
        return store

    monkeypatch.setattr(MessageStore, "open", classmethod(counted))
    assert shell(*words).status == 0
    assert len(opened) == 1


@pytest.mark.parametrize("by", ["topic", "queue", "tag", "key", "hour"])
def test_an_empty_store_has_no_counts(shell: Shell, by: str) -> None:
    MessageStore.open(shell.folder / "empty", StoreConfig.tiny()).close()
    for more in ((), ("--all",), ("--tag", "a")):
        answer = shell("count", "empty", "--by", by, *more)
        assert (answer.status, answer.rows) == (0, []), answer
