"""The progress bar of commands that take longer than a second."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from librmq.cli import main
from librmq.cli._output import ProgressBar
from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.message import Message
from librmq.store import MessageStore
from tests.cases import commands_for
from tests.cli.stand import Terminal
from tests.clocks import SlowClock


def drawn(stream: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())


def test_a_bar_comes_after_a_second_with_rate_and_time_left() -> None:
    pytest.importorskip("rich")
    stream, clock = Terminal(), ManualClock()
    with ProgressBar("import", 10_000_000, stream=stream, clock=clock) as bar:
        bar.to(1_000_000)
        assert stream.getvalue() == ""
        for done in range(2, 8):
            clock.advance(seconds=1)
            bar.to(done * 1_000_000)
    last = drawn(stream)
    assert "import" in last
    assert "70%" in last
    assert "1.0 MB/s" in last
    assert "0:00:0" in last


def test_messages_are_counted_in_a_bar() -> None:
    pytest.importorskip("rich")
    stream, clock = Terminal(), ManualClock()
    with ProgressBar("count", 100, "messages", stream=stream, clock=clock) as bar:
        for done in (20, 40, 60):
            clock.advance(seconds=2)
            bar.to(done)
    assert "60/100" in drawn(stream)


def test_work_of_unknown_length_shows_its_amount_and_rate() -> None:
    pytest.importorskip("rich")
    stream, clock = Terminal(), ManualClock()
    with ProgressBar("load", 0, "messages", stream=stream, clock=clock) as bar:
        clock.advance(seconds=2)
        bar.advance(10)
        assert "10/?" in drawn(stream)
        clock.advance(seconds=2)
        bar.advance(10, 40)
    assert "20/40" in drawn(stream)
    assert "50%" in drawn(stream)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "verify",
        "recover",
        "snapshot",
        "restore",
        "salvage --into",
        "salvage",
        "dump",
        "show",
        "show --topic t",
        "tail -n 100",
        "traces --trace-topic t",
        "diagnose --verify",
        "export",
        "count --by tag",
        "count --grep x",
        "count --topic t --grep x",
        "stats",
        "import",
        "load",
    ],
)
def test_every_long_command_reports_its_progress(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal shows the bar after a second; the clock of this test advances a second each time it is read."""
    pytest.importorskip("rich")
    store, target = str(tmp_path / "store"), str(tmp_path / "target.jsonl")
    with MessageStore.open(store, StoreConfig.tiny()) as made:
        for number in range(100):
            made.append(Message("t", b"x" * 100, keys=f"{number}"))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("librmq.cli._output.SystemClock", SlowClock)
    name, *more = words.split()
    if name in ("snapshot", "restore", "export"):
        more += [target] if name != "export" else ["-o", target]
    elif more == ["--into"]:
        more += [target]
    elif name == "import":
        assert main(["show", store, "-o", target]) == 0
        more += [target]
    elif name == "load":
        operations = json.dumps({"op": "put", "topic": "t", "queueId": 0, "body": "b"}) + "\n"
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(operations.encode())))
    assert main([name, store, *more], commands_for([name])) == 0
    assert name in drawn(terminal)


def test_no_bar_is_drawn_where_it_would_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    pipe, terminal = io.StringIO(), Terminal()
    for stream, quiet in ((pipe, False), (terminal, True)):
        with ProgressBar("import", 10, stream=stream, quiet=quiet, clock=clock) as bar:
            clock.advance(seconds=5)
            bar.to(5)
    monkeypatch.setitem(sys.modules, "rich", None)
    with ProgressBar("import", 10, stream=terminal, clock=clock) as bar:
        clock.advance(seconds=5)
        bar.to(5)
    assert pipe.getvalue() + terminal.getvalue() == ""
