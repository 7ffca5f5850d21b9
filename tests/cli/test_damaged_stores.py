"""Commands over stores that lack files of the log, or whose log is damaged in its middle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from librmq import Broker, BrokerConfig, ManualClock, Message, MessageStore, StoreConfig
from tests.cli.stand import Shell
from tests.stores import START_MS

CONFIG = StoreConfig.tiny(commitlog_file_size=4096, consumequeue_file_size=8 * 20)
MESSAGES = 140
PASSED = 20  # of the first queue


@pytest.fixture
def orders(shell: Shell) -> Path:
    """Return a closed store with 70 messages in each of two queues; the group ``G`` has consumed 20 of the first."""
    path = shell.folder / "orders"
    with Broker.open(path, BrokerConfig(), store_config=CONFIG) as broker:
        broker.create_topic("T", 2)
        broker.set_group("G")
        broker.reset_group("G", "T", "begin")
        for number in range(MESSAGES):
            broker.store.append(Message("T", b"body %03d" % number), number % 2)
        broker.reset_group("G", "T", "begin")
    return path


def remove_first_files(path: Path, count: int) -> int:
    """Remove the first files of the log, and return how many messages that leaves."""
    for file in sorted((path / "commitlog").iterdir())[:count]:
        file.unlink()
    return sum(file.read_bytes().count(b"body ") for file in (path / "commitlog").iterdir())


def kinds(shell: Shell, *words: object) -> dict[str, dict[str, object]]:
    return {row["finding"]: row for row in shell("diagnose", *words).rows}


@pytest.mark.parametrize("missing", [1, 2, 3])
@pytest.mark.parametrize("crashed", [False, True])
def test_messages_in_missing_log_files_do_not_count(shell: Shell, orders: Path, missing: int, crashed: bool) -> None:
    left = remove_first_files(orders, missing)
    assert 0 < left < MESSAGES
    if crashed:
        (orders / "abort").touch()
    assert sum(row["lag"] for row in shell("lag", orders).rows) == left
    assert [row["messages"] for row in shell("topics", orders).rows if row["topic"] == "T"] == [left]
    assert shell("stats", orders).rows[0]["messages"] == left
    assert shell("count", orders).rows == [
        {"topic": "T", "messages": left, "bytes": shell("count", orders).rows[0]["bytes"]}
    ]
    for check in ("--verify", "--no-verify"):
        found = kinds(shell, orders, check)
        assert found["expired-unread"]["evidence"] == {"expired": MESSAGES - left}
        assert found["missing-log-files"]["severity"] == "error"
        assert "damage" not in found


def test_verify_says_that_the_log_lacks_its_begin(shell: Shell, orders: Path) -> None:
    remove_first_files(orders, 1)
    answer = shell("verify", orders)
    assert (answer.status, [one["offset"] for one in answer.rows[0]["damage"]]) == (1, [0])
    assert shell("recover", orders).status == 0
    assert shell("verify", orders).status == 0


def test_a_queue_whose_messages_are_all_gone_is_empty(shell: Shell, orders: Path) -> None:
    with Broker.open(orders, store_config=CONFIG) as broker:
        broker.store.append(Message("Late", bytes(3000)))
        broker.store.append(Message("Late", bytes(3000)))
    remove_first_files(orders, len(list((orders / "commitlog").iterdir())) - 2)
    assert {row["lag"] for row in shell("lag", orders).rows} == {0}
    assert kinds(shell, orders)["expired-unread"]["evidence"] == {"expired": MESSAGES}
    with Broker.open(orders, store_config=CONFIG) as broker:
        broker.store.append(Message("T", b"new"), 1)
    assert sum(row["lag"] for row in shell("lag", orders).rows) == 1


def test_retention_leaves_no_missing_files(shell: Shell, orders: Path) -> None:
    config = replace(CONFIG, max_total_size=2 * 4096)
    clock = ManualClock(START_MS)
    with MessageStore.open(orders, config, clock=clock, background=False) as store:
        begin = store.log.begin
        store.append(Message("T", b"new"))
        store.run_due(clock.now_ms() + 86_400_000)
        assert store.log.begin > begin
    assert "missing-log-files" not in kinds(shell, orders)
