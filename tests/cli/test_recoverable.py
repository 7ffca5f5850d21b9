"""What a kill, or a copy of a running store, leaves is recoverable, by the same word at each command."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, ManualClock, ManualRunner, Producer
from librmq.console import console
from tests.cli.stand import Shell
from tests.console.pages import Asked
from tests.programs import run_program

MESSAGES = 50


def send(broker: Broker, messages: int = MESSAGES) -> None:
    with Producer(broker, "p") as producer:
        for number in range(messages):
            producer.send("orders", b"%d" % number, keys=f"k{number}")


def running(path: str) -> Broker:
    broker = Broker.open(path, runner=ManualRunner())
    broker.create_topic("orders", 2)
    send(broker)
    return broker


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store that was killed before its entries and keys were written; tests copy it."""
    path = tmp_path_factory.mktemp("killed") / "s"
    run_program(f"import os; from tests.cli.test_recoverable import *; running({str(path)!r}); os.kill(os.getpid(), 9)")
    return path


@pytest.fixture(params=["killed", "copied"])
def left(shell: Shell, request: pytest.FixtureRequest) -> Path:
    """Return a store that was killed, or copied while it ran, before its entries and keys were written."""
    left = shell.folder / "left"
    if request.param == "killed":
        shutil.copytree(request.getfixturevalue("killed"), left)
    else:
        with running("running"):
            shutil.copytree("running", left)
    return left


def finding(rows: list[dict[str, Any]]) -> dict[str, Any]:
    (row,) = [row for row in rows if row["finding"] in ("damage", "recoverable")]
    return row


def test_each_command_says_recoverable(shell: Shell, left: Path) -> None:
    answer = shell("verify", left)
    (row,) = answer.rows
    assert (answer.status, row["sound"], row["damage"]) == (0, True, [])
    assert {place["file"].partition("/")[0] for place in row["recoverable"]} == {"consumequeue", "index"}
    assert "the store is recoverable" in answer.said
    for more in (["--verify"], ["--no-verify"]):
        answer = shell("diagnose", left, *more)
        assert (answer.status, finding(answer.rows)["finding"], finding(answer.rows)["severity"]) == (
            0, "recoverable", "info",
        )  # fmt: skip
    (start, *_) = shell("can-start", left).rows
    assert (start["condition"], start["librmq"]) == ("recoverable", "repairs")
    assert "recoverable; RocketMQ 4.9 repairs it" in shell("can-start", left).said
    shown = Asked(console(left, behind_proxy=True)).findings("/findings")
    assert ["recoverable" in row["what"] for row in shown if row["severity"] == "info"] == [True]


def test_a_report_says_recoverable(shell: Shell, left: Path) -> None:
    pytest.importorskip("jinja2")
    assert shell("report", left, "--out", "page.html").status == 0
    page = (shell.folder / "page.html").read_text()
    assert "recoverable: the next opening repairs it without a loss" in page
    assert "salvage" not in page


def test_the_next_opening_repairs_it_without_a_loss(shell: Shell, left: Path) -> None:
    with Broker.open(left, runner=ManualRunner()) as broker:
        assert sorted(int(message.body) for message in broker.messages("orders")) == list(range(MESSAGES))
        assert broker.find_by_key("orders", "k49")
    (row,) = shell("verify", left).rows
    assert (row["sound"], row["damage"], row["recoverable"]) == (True, [], [])


def test_damage_that_no_kill_leaves_stays_damage(shell: Shell, left: Path) -> None:
    log = left / "commitlog" / f"{0:020}"
    with log.open("r+b") as file:
        file.seek(300)
        file.write(b"\xff" * 300)
    answer = shell("verify", left)
    assert (answer.status, answer.rows[0]["sound"], answer.rows[0]["recoverable"]) == (1, False, [])
    answer = shell("diagnose", left)
    assert (answer.status, finding(answer.rows)["finding"]) == (1, "damage")


def test_a_lost_end_is_damage_and_an_older_log_of_a_copy_is_none(shell: Shell) -> None:
    """The checkpoint covers what the log lacks. Only in a copy can the log have been read before it."""
    clock = ManualClock(1_700_000_000_000)
    broker = Broker.open("running", runner=ManualRunner(clock))
    broker.create_topic("orders", 2)
    send(broker, 10)
    shutil.copytree("running/commitlog", "copy/commitlog")
    clock.advance(seconds=10)
    send(broker, 10)
    broker.store.flush()
    shutil.copytree("running", "copy", dirs_exist_ok=True, ignore=shutil.ignore_patterns("commitlog"))
    broker.abandon()
    answer = shell("verify", "copy")
    assert (answer.status, answer.rows[0]["damage"]) == (0, [])
    assert "beyond the log's end: this copy was made while a process wrote" in answer.said
    shutil.copytree("copy/commitlog", "running/commitlog", dirs_exist_ok=True)
    answer = shell("verify", "running")
    assert (answer.status, answer.rows[0]["recoverable"]) == (1, [])
