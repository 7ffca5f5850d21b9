"""The bar of what takes longer than a second."""

from __future__ import annotations

import io
import re
import sys

import pytest

from librmq.cli.progress import ProgressBar, waiting
from librmq.clock import ManualClock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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


def test_work_of_unknown_length_is_waited_for() -> None:
    pytest.importorskip("rich")
    pipe, terminal = io.StringIO(), Terminal()
    with waiting("verify", pipe), waiting("verify", terminal):
        pass
    assert pipe.getvalue() == ""
    assert "verify" not in drawn(terminal)  # it took less than a second


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
