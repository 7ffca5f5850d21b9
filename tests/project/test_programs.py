"""The programs that commands of the checkout run, and what they show of them."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType

import pytest

from tests.programs import POSIX
from tests.reference import CHECKOUT


class TestBeside:
    """A program that installs packages while the demo prints."""

    def test_it_prints_when_it_is_waited_for(self, tools: Callable[[str], ModuleType]) -> None:
        out = io.StringIO()
        command = [sys.executable, "-c", "import sys; print('done', flush=True); sys.exit(3)"]
        environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
        with tools("programs").Beside(command, tools("screen").Screen(out), environment) as program:
            assert out.getvalue() == ""
            assert program.wait() == 3
        assert out.getvalue().split() == ["done"]

    @POSIX
    def test_it_ends_with_the_programs_that_it_runs(self, tools: Callable[[str], ModuleType], tmp_path: Path) -> None:
        os.mkfifo(started := tmp_path / "started")
        inner = (
            f"import pathlib, signal\n"
            f"try:\n    pathlib.Path({str(started)!r}).write_text('x'); signal.pause()\n"
            f"except KeyboardInterrupt:\n    pathlib.Path({str(tmp_path / 'ended')!r}).touch()\n"
        )
        outer = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {inner!r}])\n"
        screen = tools("screen").Screen(io.StringIO())
        with tools("programs").Beside([sys.executable, "-c", outer], screen, dict(os.environ)) as program:
            started.read_text()
        assert (tmp_path / "ended").exists()
        assert program.wait() != 0

    @POSIX
    def test_those_that_continue_are_killed_together(
        self, tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        os.mkfifo(lives := tmp_path / "lives")
        deaf = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        inner = f"{deaf}held = open({str(lives)!r}, 'wb', buffering=0)\nheld.write(b'x')\nsignal.pause()\n"
        outer = f"{deaf}import subprocess, sys\nsubprocess.run([sys.executable, '-c', {inner!r}])\n"
        programs, screen = tools("programs"), tools("screen").Screen(io.StringIO())
        monkeypatch.setattr(programs, "GRACE_SECONDS", 0)
        with programs.Beside([sys.executable, "-c", outer], screen, dict(os.environ)):
            held = lives.open("rb", buffering=0)
            assert held.read(1) == b"x"
        with held:
            assert select.select([held], [], [], 20)[0], "the inner program still holds its end"
            assert held.read() == b""

    @POSIX
    def test_it_ends_where_ctrl_c_is_ignored(self, tools: Callable[[str], ModuleType], tmp_path: Path) -> None:
        """As in the background of a shell."""
        os.mkfifo(started := tmp_path / "started")
        command = [
            sys.executable,
            "-c",
            f"import pathlib, signal\npathlib.Path({str(started)!r}).write_text('x')\nsignal.pause()",
        ]
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            screen = tools("screen").Screen(io.StringIO())
            with tools("programs").Beside(command, screen, dict(os.environ)) as program:
                started.read_text()
            assert program.wait() == -signal.SIGTERM
        finally:
            signal.signal(signal.SIGINT, before)


@POSIX
def test_a_program_has_time_to_end_after_ctrl_c(tools: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """It is sent to all programs of the terminal; the one that waits must not kill another that cleans up."""
    os.mkfifo(started := tmp_path / "started")
    os.mkfifo(waits := tmp_path / "waits")
    os.mkfifo(continues := tmp_path / "continues")
    inner = (
        "import pathlib, signal\n"
        f"try:\n    pathlib.Path({str(started)!r}).write_text('x'); signal.pause()\n"
        f"except KeyboardInterrupt:\n    pathlib.Path({str(continues)!r}).read_text()\n"
        f"    pathlib.Path({str(tmp_path / 'ended')!r}).touch()\n"
    )
    # The outer program lets the inner one continue only when Popen.wait has given up its own quarter of a second.
    outer = (
        f"import pathlib, sys\nsys.path.insert(0, {str(CHECKOUT / 'tools')!r})\nimport environment, programs\n"
        "class Popen(programs.subprocess.Popen):\n"
        "    def wait(self, timeout=None):\n"
        f"        pathlib.Path({str(continues)!r} if timeout else {str(waits)!r}).write_text('x')\n"
        "        return super().wait(timeout)\n"
        "programs.subprocess.Popen = Popen\n"
        f"environment.Environment(pathlib.Path({str(tmp_path)!r})).run([sys.executable, '-c', {inner!r}])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", outer], stderr=subprocess.PIPE, text=True, process_group=0)
    started.read_text()
    waits.read_text()
    os.killpg(process.pid, signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate()[1]
    assert (tmp_path / "ended").exists()


def test_a_step_waits_for_a_result_and_shows_the_time(tools: Callable[[str], ModuleType]) -> None:
    future: Future[int] = Future()

    class Step:
        drawn = 0

        def draw(self) -> None:
            self.drawn += 1
            if self.drawn == 2:
                future.set_result(7)

    assert tools("programs").result_of(future, Step()) == 7


class TestScreen:
    """A running check turns the output of pip and pytest into a short display."""

    def test_without_a_terminal_a_step_is_one_line(self, tools: Callable[[str], ModuleType]) -> None:
        screen = tools("screen")
        out = io.StringIO()
        with screen.Step(screen.Screen(out), "style") as step:
            step.show("looking")
            step.finish("ruff check")
        assert re.fullmatch(r"style +ok +\d+ s  ruff check\n", out.getvalue())

    def test_a_long_step_tells_each_tenth(self, tools: Callable[[str], ModuleType]) -> None:
        screen = tools("screen")
        out = io.StringIO()
        with screen.Step(screen.Screen(out), "tests") as step:
            for done in range(101):
                step.show(f"{done} of 100", done / 100)
            step.finish("1 failed", failed=True)
        lines = out.getvalue().splitlines()
        assert lines[:2] == ["tests      10 %, 10 of 100", "tests      20 %, 20 of 100"]
        assert re.fullmatch(r"tests +FAILED +\d+ s  1 failed", lines[10])
        assert len(lines) == 11

    def test_a_step_without_progress_says_a_word_after_ten_seconds(self, tools: Callable[[str], ModuleType]) -> None:
        screen = tools("screen")
        out, times = io.StringIO(), [0.0, 0.1, 4.0, 9.9, 10.0, 15.0, 20.4, 21.0]
        with screen.Step(screen.Screen(out), "types", iter(times).__next__) as step:
            step.show("mypy")
            for _ in times[2:-1]:
                step.draw()
        assert out.getvalue().splitlines() == [
            "types      mypy  10 s",
            "types      mypy  20 s",
            "types      ok          21 s  mypy",
        ]

    def test_a_terminal_has_a_bar(self, tools: Callable[[str], ModuleType]) -> None:
        screen = tools("screen")
        out = io.StringIO()
        with screen.Step(screen.Screen(out, live=True), "tests") as step:
            step.show("50 of 100", 0.5)
        last = out.getvalue().rpartition("\r")[2]
        assert "\n" not in out.getvalue().replace(last, "")
        assert "##########..........  50 of 100" in out.getvalue()

    def test_an_exception_says_that_the_step_failed(self, tools: Callable[[str], ModuleType]) -> None:
        screen = tools("screen")
        out = io.StringIO()
        with pytest.raises(KeyError), screen.Step(screen.Screen(out), "style"):
            raise KeyError
        assert "FAILED" in out.getvalue()

    @pytest.mark.parametrize(
        ("printed", "told"),
        [
            ("=== test session starts ===\n", "looking for tests"),
            ("2 workers [10 items]\n\n..s.F", "5 of 10, 1 failed"),
            ("2 workers [80 items]\n..s.F...  [ 10%]\n...", "11 of 80, 1 failed"),
            ("collected 12 items / 2 deselected\n\ntests/a.py ...  [ 30%]\ntests/b.py .E", "5 of 10, 1 failed"),
        ],
    )
    def test_pytest_is_followed(self, tools: Callable[[str], ModuleType], printed: str, told: str) -> None:
        screen = tools("screen")
        step = screen.Step(screen.Screen(io.StringIO(), live=True), "tests")
        tools("project").Testing(step).look(printed)
        assert told in step.screen.stream.getvalue()

    def test_pytest_is_summed_up(self, tools: Callable[[str], ModuleType]) -> None:
        testing = tools("project").Testing(None)
        printed = "head\n=== FAILURES ===\nwhy\nFAILED tests/a.py::b\n== 1 failed, 2 passed in 63.10s (0:01:03) ==\n"
        assert testing.summary(printed) == "1 failed, 2 passed"
        assert testing.failures(printed).startswith("=== FAILURES ===\nwhy")
        assert testing.summary("killed") == "pytest did not come to its end"

    @pytest.mark.parametrize(
        ("line", "test"),
        [
            ("FAILED tests/a.py::b[c d@e]@tests/a.py - AssertionError: x - y", "tests/a.py::b[c d@e]"),
            ("ERROR tests/a.py::b@dedup-mysql", "tests/a.py::b"),
            ("ERROR tests/a.py", "tests/a.py"),
            ("1 passed", None),
        ],
    )
    def test_the_first_failing_test_can_be_run_alone(
        self, tools: Callable[[str], ModuleType], line: str, test: str | None
    ) -> None:
        assert tools("project").Testing(None).first_failing(f"head\n{line}\n") == test

    def test_downloads_are_distinguished(self, tools: Callable[[str], ModuleType], tmp_path: Path) -> None:
        screen = tools("screen")
        step = screen.Step(screen.Screen(io.StringIO(), live=True), "packages")
        installing = tools("environment").Installing(step, tmp_path, iter([0.0, 10.0, 14.0]).__next__)
        folder = tmp_path / "pip-unpack-1"
        folder.mkdir()
        (folder / "b.whl").write_bytes(b"x" * 500_000)
        printed = "Collecting a\n  Downloading a.whl (500 kB)\nCollecting b\n  Downloading https://x/b.whl (1.0 MB)\n"
        installing.look(printed)
        assert "##########..........  downloading b.whl (1 MB); 2 files downloaded" in step.screen.stream.getvalue()
        installing.look(printed + "Installing collected packages: a, b, c\n")
        assert installing.summary() == "3 packages installed, 2 files downloaded, 2 MB in 4 s"

    def test_a_source_that_uv_fetches_counts_as_a_download(
        self, tools: Callable[[str], ModuleType], tmp_path: Path
    ) -> None:
        step = tools("screen").Step(tools("screen").Screen(io.StringIO(), live=True), "packages")
        clock = iter([0.0, 1.0, 5.0, 7.0, 8.0]).__next__
        installing = tools("environment").Installing(step, tmp_path, clock)
        installing.look(printed := "Resolved 2 packages in 9ms\n")
        assert "downloading; 0 files downloaded" in step.screen.stream.getvalue()
        installing.look(printed := printed + "   Building a==1\n")
        assert "building a package; 0 files downloaded, 0 MB and the source of a" in step.screen.stream.getvalue()
        installing.look(printed + "      Built a==1\nPrepared 2 packages in 6s\nInstalled 2 packages in 1ms\n")
        installing.next()
        installing.look("Resolved 1 package in 1ms\nPrepared 1 package in 1ms\nInstalled 1 package in 1ms\n")
        assert installing.summary() == "3 packages installed, 0 files downloaded, 0 MB and the source of a in 4 s"

    @pytest.mark.parametrize("begun", ["Downloading", "Downloading a (1", "   Building a @"])
    def test_a_line_may_come_in_pieces(self, tools: Callable[[str], ModuleType], tmp_path: Path, begun: str) -> None:
        step = tools("screen").Step(tools("screen").Screen(io.StringIO(), live=True), "packages")
        installing = tools("environment").Installing(step, tmp_path, iter([0.0, 1.0]).__next__)
        installing.look(f"Resolved 2 packages in 9ms\n{begun}")
        assert installing.downloads == []

    def test_downloads_of_uv_are_distinguished(self, tools: Callable[[str], ModuleType], tmp_path: Path) -> None:
        step = tools("screen").Step(tools("screen").Screen(io.StringIO(), live=True), "packages")
        installing = tools("environment").Installing(step, tmp_path, iter([0.0, 1.0, 5.0, 7.0]).__next__)
        printed = "Resolved 2 packages in 9ms\nDownloading a (10.0MiB)\nDownloading b (20.0MiB)\n Downloaded a\n"
        installing.look(printed)
        assert "downloading b (21 MB); 2 files downloaded" in step.screen.stream.getvalue()
        installing.look(printed + " Downloaded b\nPrepared 2 packages in 4s\n")
        installing.look(printed + " Downloaded b\nPrepared 2 packages in 4s\nInstalled 2 packages in 8ms\n + a==1\n")
        assert installing.summary() == "2 packages installed, 2 files downloaded, 32 MB in 4 s"
