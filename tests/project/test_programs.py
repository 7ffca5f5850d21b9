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
        monkeypatch.setattr(programs, "GROUPS_SECONDS", 0)
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
@pytest.mark.parametrize(
    "way",
    [
        "environment.Environment(pathlib.Path('.')).run(command)",
        "programs.HAS_GROUPS = False\n"
        "    with ThreadPoolExecutor(1) as beside:\n"
        "        words = {'folder': '.', 'variables': os.environ, 'look': lambda _: say(waits)}\n"
        "        beside.submit(programs.watch, command, None, **words).result()",
    ],
    ids=["here", "in background without groups"],
)
def test_a_program_has_time_to_end_after_ctrl_c(tmp_path: Path, way: str) -> None:
    """It is sent to all programs of the terminal; the one that waits must not disturb another that cleans up."""
    os.mkfifo(started := tmp_path / "started")
    os.mkfifo(waits := tmp_path / "waits")
    os.mkfifo(continues := tmp_path / "continues")
    inner = (
        "import pathlib, signal\n"
        f"try:\n    pathlib.Path({str(started)!r}).write_text('x'); signal.pause()\n"
        f"except KeyboardInterrupt:\n    open({str(continues)!r}, 'rb', buffering=0).read(1)\n"
        f"    pathlib.Path({str(tmp_path / 'ended')!r}).touch()\n"
    )
    # The outer program lets the inner one continue only when Popen.wait has given up its own quarter of a second.
    outer = (
        f"import os, pathlib, sys\nsys.path.insert(0, {str(CHECKOUT / 'tools')!r})\nimport environment, programs\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        f"waits, continues = {str(waits)!r}, {str(continues)!r}\n"
        "def say(pipe):\n    os.write(os.open(pipe, os.O_RDWR), b'x')\n"
        "class Popen(programs.subprocess.Popen):\n"
        "    def wait(self, timeout=None):\n"
        "        if self.returncode is None:\n"
        "            say(continues if timeout else waits)\n"
        "        return super().wait(timeout)\n"
        "programs.subprocess.Popen = Popen\n"
        f"with programs.interruptible():\n    command = [sys.executable, '-c', {inner!r}]\n    {way}\n"
    )
    process = subprocess.Popen([sys.executable, "-c", outer], stderr=subprocess.PIPE, text=True, process_group=0)
    started.read_text()
    with waits.open("rb", buffering=0) as told:
        assert told.read(1) == b"x"
    os.killpg(process.pid, signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
    assert (tmp_path / "ended").exists()


@POSIX
@pytest.mark.parametrize(
    "way",
    [
        "programs.run_here(command, folder='.', variables=os.environ)",
        "programs.watch(command, None, folder='.', variables=os.environ)",
        "with programs.Beside(command, Screen(), os.environ) as installing: installing.wait()",
    ],
    ids=["here", "watched", "beside"],
)
def test_a_program_that_has_just_started_ends_with_the_command(tmp_path: Path, way: str) -> None:
    os.mkfifo(lives := tmp_path / "lives")
    os.mkfifo(started := tmp_path / "started")
    inner = (
        f"import signal\nheld = open({str(lives)!r}, 'wb', buffering=0)\n"
        f"open({str(started)!r}, 'wb', buffering=0).write(b'x')\nsignal.pause()"
    )
    outer = (
        f"import os, signal, sys\nsys.path.insert(0, {str(CHECKOUT / 'tools')!r})\n"
        "import programs, project\nfrom screen import Screen\n"
        "class Popen(programs.subprocess.Popen):\n"
        "    def __init__(self, *words, **settings):\n"
        "        super().__init__(*words, **settings)\n"
        f"        open({str(started)!r}, 'rb').read(1)\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "programs.subprocess.Popen = Popen\n"
        f"def check(_):\n    command = [sys.executable, '-c', {inner!r}]\n    {way}\n"
        "project.check = check\nsys.exit(project.main(['check']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", outer], stderr=subprocess.PIPE, text=True)
    with lives.open("rb", buffering=0) as held:
        says = process.communicate(timeout=60)[1]
        assert (says.splitlines()[-1], process.returncode) == ("librmq: terminated", 128 + signal.SIGTERM)
        assert select.select([held], [], [], 20)[0], "the inner program still runs"
        assert held.read() == b""


@POSIX
@pytest.mark.parametrize(
    ("way", "number"),
    [
        ("programs.run_here(command, folder='.', variables=os.environ)", signal.SIGTERM),
        ("programs.watch(command, None, folder='.', variables=os.environ)", signal.SIGTERM),
        ("programs.watch(command, None, folder='.', variables=os.environ)", signal.SIGHUP),
        (
            "with ThreadPoolExecutor(1) as beside:\n"
            "        beside.submit(programs.watch, command, None, folder='.', variables=os.environ).result()",
            signal.SIGTERM,
        ),
        ("with programs.Beside(command, Screen(), os.environ) as installing: installing.wait()", signal.SIGTERM),
    ],
    ids=["here", "watched", "terminal closed", "in background", "beside"],
)
def test_a_command_that_is_terminated_ends_its_programs(tmp_path: Path, way: str, number: signal.Signals) -> None:
    os.mkfifo(lives := tmp_path / "lives")
    inner = f"held = open({str(lives)!r}, 'wb', buffering=0); held.write(b'x'); signal.pause()"
    if "run_here" not in way:  # a group ends with the programs that it runs
        deaf = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {inner}"
        inner = f"child = subprocess.Popen([sys.executable, '-c', {deaf!r}]); signal.pause()"
    inner = (
        f"import pathlib, signal, subprocess, sys\ntry:\n    {inner}\n"
        f"except KeyboardInterrupt:\n    pathlib.Path({str(tmp_path / 'ended')!r}).touch()\n"
    )
    outer = (
        f"import os, signal, sys\nsys.path.insert(0, {str(CHECKOUT / 'tools')!r})\n"
        "from concurrent.futures import ThreadPoolExecutor\nimport programs, project\nfrom screen import Screen\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        f"def check(_):\n    command = [sys.executable, '-c', {inner!r}]\n    {way}\n"
        "project.check = check\nsys.exit(project.main(['check']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", outer], stderr=subprocess.PIPE, text=True)
    with lives.open("rb", buffering=0) as held:
        assert held.read(1) == b"x"
        process.send_signal(number)
        assert (process.communicate(timeout=60)[1], process.returncode) == ("librmq: terminated\n", 128 + number)
        assert select.select([held], [], [], 20)[0], "the inner program still holds its end"
        assert held.read() == b""
    assert (tmp_path / "ended").exists()


@POSIX
@pytest.mark.parametrize(
    "way",
    [
        "programs.run_here(command, folder='.', variables=os.environ)",
        "with programs.Beside(command, Screen(), os.environ) as installing: installing.wait()",
    ],
    ids=["here", "beside"],
)
def test_a_second_ctrl_c_kills_groups_within_groups(tmp_path: Path, way: str) -> None:
    os.mkfifo(lives := tmp_path / "lives")
    deaf = (
        f"import os, signal\nheld = open({str(lives)!r}, 'wb', buffering=0)\n"
        "signal.signal(signal.SIGINT, lambda *_: held.write(b'heard'))\n"
        "held.write(b'begun')\nwhile True: signal.pause()\n"
    )

    def command(inner: str, way: str) -> str:
        return (
            f"import os, signal, sys\nsys.path.insert(0, {str(CHECKOUT / 'tools')!r})\n"
            "import programs, project\nfrom screen import Screen\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            f"def packages(_):\n    command = [sys.executable, '-c', {inner!r}]\n    {way}\n"
            "project.packages = packages\nsys.exit(project.main(['packages']))\n"
        )

    middle = command(deaf, "programs.watch(command, None, folder='.', variables=os.environ)")
    process = subprocess.Popen([sys.executable, "-c", command(middle, way)], stderr=subprocess.PIPE, process_group=0)
    with lives.open("rb", buffering=0) as held:
        assert held.read(5) == b"begun"
        os.killpg(process.pid, signal.SIGINT)
        assert held.read(5) == b"heard"
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130
        assert select.select([held], [], [], 20)[0], "the deaf program still holds its end"
        assert held.read() == b""


def test_only_a_second_ctrl_c_is_impatient(tools: Callable[[str], ModuleType]) -> None:
    programs, numbers = tools("programs"), (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    with programs.interruptible():
        with pytest.raises(programs.Terminated):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # `timeout` sends two
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in numbers] == before


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

    def test_a_signal_says_that_the_step_was_interrupted(self, tools: Callable[[str], ModuleType]) -> None:
        screen, terminated = tools("screen"), tools("programs").Terminated
        out = io.StringIO()
        with pytest.raises(KeyboardInterrupt), screen.Step(screen.Screen(out), "style"):
            raise terminated(signal.SIGTERM)
        assert "interrupted" in out.getvalue()

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
