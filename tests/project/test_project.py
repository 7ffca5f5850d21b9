"""The checkout itself: its commands, its part of the reference data, and the code that tests share."""

from __future__ import annotations

import importlib
import io
import os
import re
import select
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import budget
from tests.conftest import SlowBudget, SlowTime, StoreCopy
from tests.data.cut import cut, spread, spread_each
from tests.reference import CHECKOUT, COMPACT, jsonl, reference, rows, store_folders, unpack_compact

POSIX = pytest.mark.skipif("sys.platform == 'win32'", reason="needs a POSIX shell")


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a module of ``tools/`` as the commands do, as in ``tools("screen")``."""
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    return importlib.import_module


def run_check(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, CHECKOUT / "tools" / "project.py", "check", *words],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


def fake_python(folder: Path, name: str, version: str, *, is_new: bool, has_venv: bool) -> None:
    """Write a program that answers ``tools/python`` as such a Python would, and then prints its own name."""
    script = folder / name
    script.write_text(
        "#!/bin/sh\n"
        'case "$2" in\n'
        f"*version_info[*) echo {version} ;;\n"
        f"*exit*) exit {int(not is_new)} ;;\n"
        f"*ensurepip*) exit {int(not has_venv)} ;;\n"
        f'*) echo "{name}: $*" ;;\n'
        "esac\n"
    )
    script.chmod(0o755)


def run_finder(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", CHECKOUT / "tools" / "python", "x.py", "two words"],
        env={"PATH": str(path)},
        capture_output=True,
        text=True,
    )


def run_pytest(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the tests in a folder in a separate process, without the pytest variables of this run."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words, "."],
        cwd=folder,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
    )


@POSIX
@pytest.mark.platform
def test_commands_can_be_started() -> None:
    for name in ("demo", "check", "tools/python", ".ci/run"):
        if (CHECKOUT / name).exists():  # a source distribution lacks some of them
            assert os.access(CHECKOUT / name, os.X_OK), name


@POSIX
@pytest.mark.platform
def test_the_first_python_that_will_do_is_taken(tmp_path: Path) -> None:
    fake_python(tmp_path, "python3", "3.9.2", is_new=False, has_venv=True)
    fake_python(tmp_path, "python3.13", "3.13.0", is_new=True, has_venv=False)
    fake_python(tmp_path, "python3.12", "3.12.1", is_new=True, has_venv=True)
    assert run_finder(tmp_path).stdout == "python3.12: x.py two words\n"


@POSIX
@pytest.mark.platform
@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "Python 3.11 or later is needed, and this machine has none at all"),
        ("3.9.2", "Python 3.11 or later is needed, and this machine has python3 (3.9.2)"),
        ("3.12.1", "python3 (3.12.1) has no venv module"),
    ],
)
def test_a_missing_python_is_reported_in_a_sentence(tmp_path: Path, version: str | None, said: str) -> None:
    if version:
        fake_python(tmp_path, "python3", version, is_new=version != "3.9.2", has_venv=False)
    found = run_finder(tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert said in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_a_foreign_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").write_text("")
    done = run_check(LIBRMQ_VENV=str(tmp_path))
    assert done.returncode == 2
    assert "was not made by this command" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["pyvenv.cfg"]


def test_a_wheel_that_is_not_there_is_reported(tmp_path: Path) -> None:
    done = run_check("--wheel", str(tmp_path / "no.whl"))
    assert done.returncode == 2
    assert "there is no wheel" in done.stderr


def test_a_small_demo_needs_no_spark(tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    project = tools("project")
    done: list[object] = []
    monkeypatch.setattr(project.Environment, "prepare", lambda place, extras, screen: done.append(extras))
    monkeypatch.setattr(project.Environment, "run", lambda place, command, folder: done.append(command[1:]))
    project.demo(["--small", "there"])
    assert done == [project.SMALL_DEMO_EXTRAS, [project.DEMO, "there"], [project.DEMO_REPORT, "there"]]
    assert "spark" not in project.SMALL_DEMO_EXTRAS


@pytest.mark.parametrize(("small", "installed"), [(0, 0), (2, 0), (0, 1)])
def test_spark_is_installed_beside_the_small_demo(
    tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, small: int, installed: int
) -> None:
    project = tools("project")
    done: list[object] = []

    class Beside:
        def __init__(self, command: list[object], *_: object) -> None:
            done.append({*command[3:]})

        def __enter__(self) -> Beside:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def wait(self) -> int:
            done.append("wait")
            return installed

    def run(place: object, command: list[object], folder: object) -> int:
        done.append(command[1])
        return small

    monkeypatch.setattr(project, "Beside", Beside)
    monkeypatch.setattr(project.Environment, "prepare", lambda place, extras, screen: done.append(extras))
    monkeypatch.setattr(project.Environment, "extras", lambda place: project.SMALL_DEMO_EXTRAS)
    monkeypatch.setattr(project.Environment, "run", run)
    assert project.demo([]) == small or installed
    beside = [project.SMALL_DEMO_EXTRAS, project.DEMO_EXTRAS, project.DEMO, "wait"]
    later = [project.DEMO_REPORT, project.DEMO_ON_SPARK]  # the report imports PyArrow if it finds a part of it
    assert done == (beside[:3] if small else beside if installed else [*beside, *later])


def test_packages_of_an_unknown_extra_are_refused(
    tools: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tools("project").main(["packages", "cli", "sprak"]) == 2
    assert "no extra sprak" in capsys.readouterr().err


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


@pytest.mark.parametrize(("extras", "times"), [({"cli", "report"}, 0), ({"cli", "test"}, 1)])
def test_a_demo_waits_for_no_compiler(
    tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, extras: set[str], times: int
) -> None:
    environment, screen = tools("environment"), tools("screen")
    commands: list[list[object]] = []

    def watch(command: list[object], *_: object, **__: object) -> tuple[int, str]:
        commands.append(command)
        return 0, ""

    monkeypatch.setattr(environment, "watch", watch)
    monkeypatch.setattr(environment, "find_uv", lambda *_, **__: None)
    monkeypatch.setattr(environment.shutil, "which", lambda _: "/usr/bin/cc")
    place = environment.Environment(tmp_path / "venv")
    place.prepare(frozenset(extras), screen.Screen(io.StringIO(), live=False))
    assert sum(environment.CORE in command for command in commands) == times
    place.python.parent.mkdir()
    place.python.touch()
    place.prepare(frozenset(extras | {"arrow"}), screen.Screen(io.StringIO(), live=False))
    assert sum(environment.CORE in command for command in commands) == times, "it is built once"


def test_an_interrupted_installation_keeps_the_core(
    tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment, quiet = tools("environment"), tools("screen").Screen(io.StringIO(), live=False)
    commands: list[list[object]] = []
    interrupted = [False]

    def watch(command: list[object], *_: object, **__: object) -> tuple[int, str]:
        commands.append(command)
        if interrupted[0]:
            raise KeyboardInterrupt
        return 0, ""

    monkeypatch.setattr(environment, "watch", watch)
    monkeypatch.setattr(environment, "find_uv", lambda *_, **__: None)
    monkeypatch.setattr(environment.shutil, "which", lambda _: "/usr/bin/cc")
    place = environment.Environment(tmp_path / "venv")
    place.prepare(frozenset({"test"}), quiet)
    place.bin.mkdir()
    place.python.touch()
    interrupted[0] = True
    with pytest.raises(KeyboardInterrupt):
        place.prepare(frozenset({"cli"}), quiet)
    interrupted[0] = False
    assert place.extras() == frozenset()
    assert not [*place.folder.glob("tmp*")], "what was downloaded is gone"
    commands.clear()
    place.prepare(frozenset({"test"}), quiet)
    assert commands
    assert not any(environment.CORE in command for command in commands)


@POSIX
def test_a_second_command_waits_for_the_first_installation(
    tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment, screen = tools("environment"), tools("screen")
    out = io.StringIO()
    first = screen.Step(screen.Screen(io.StringIO()), "packages")
    with ExitStack() as held:
        held.enter_context(environment.alone_in_checkout(first))
        monkeypatch.setattr(environment.time, "sleep", lambda _: held.close())
        environment.Environment(tmp_path / "venv").prepare(frozenset(), screen.Screen(out))
    assert out.getvalue().count("this one waits for its end") == 1


def test_a_wheel_takes_the_place_of_the_checkout(
    tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its environment keeps the packages: librmq alone is uninstalled and installed again."""
    environment, quiet = tools("environment"), tools("screen").Screen(io.StringIO(), live=False)
    commands: list[list[str]] = []

    def watch(command: list[object], *_: object, **__: object) -> tuple[int, str]:
        commands.append([*map(str, command)])
        return 0, ""

    monkeypatch.setattr(environment, "watch", watch)
    monkeypatch.setattr(environment, "find_uv", lambda *_, **__: None)
    monkeypatch.setattr(environment.Environment, "run", lambda place, command: watch(command)[0])
    place = environment.Environment(tmp_path / "venv")
    place.prepare(frozenset({"cli"}), quiet)
    place.bin.mkdir()
    place.python.touch()
    commands.clear()
    (wheel := tmp_path / "librmq.whl").touch()
    give_pip(tmp_path / "venv")
    environment.Environment(tmp_path / "venv", wheel).prepare(frozenset({"cli"}), quiet)
    assert [words[3] for words in commands if words[3] != "--version"] == ["uninstall", "install"]
    assert commands[-1][-1] == f"{wheel}[cli]"


def test_uv_asks_the_indexes_that_pip_is_set_to(
    tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packages = tools("packages")
    printed = (
        "WARNING: x = y\n:env:.cert='/c.pem'\nglobal.find-links='/a b'\ninstall.extra-index-url='https://x https://y'"
    )
    monkeypatch.setattr(packages.shutil, "which", lambda _: "/usr/bin/uv")
    uv = packages.find_uv(tmp_path / "python", lambda _: (0, printed), own_pip=True)
    assert uv.variables == {"SSL_CERT_FILE": "/c.pem"}
    assert uv.indexes == ["--find-links", "/a", "--find-links", "b", "--index", "https://x", "--index", "https://y"]
    assert uv.install(["cli"])[-1] == "cli"


@pytest.mark.parametrize("line", ["global.require-hashes='1'", "wheel.find-links='/a'", "global.no-binary=':all:'"])
def test_pip_installs_where_uv_lacks_a_setting(tools: Callable[[str], ModuleType], tmp_path: Path, line: str) -> None:
    printed = f"global.timeout='9'\n{line}\n"
    assert tools("packages").find_uv(tmp_path / "python", lambda _: (0, printed), own_pip=True) is None


def give_pip(environment: Path) -> None:
    package = environment / "lib" / "python3.11" / "site-packages" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()


def commands_for(
    tools: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    extras: set[str],
    *,
    uv: bool,
    serves: bool = True,
) -> list[list[str]]:
    """Return the commands that make an environment with these extras, without running them.

    ``uv`` says whether uv works, and ``serves`` whether this Python's pip installs elsewhere.
    """
    environment, packages = tools("environment"), tools("packages")
    commands: list[list[str]] = []

    def watch(command: list[object], *_: object, **__: object) -> tuple[int, str]:
        commands.append([*map(str, command)])
        if "venv" in command and "--without-pip" not in command:
            give_pip(folder)
        return int(command[0] == "uv" and not uv), ""

    monkeypatch.setattr(environment, "watch", watch)
    monkeypatch.setattr(environment, "serves_others", lambda: serves)
    monkeypatch.setattr(environment, "find_uv", lambda python, run, own_pip: packages.Uv("uv", python, [], None))
    screen = tools("screen").Screen(io.StringIO(), live=False)
    environment.Environment(folder).prepare(frozenset(extras), screen)
    return [words for words in commands if words[-1] != "--version"]


@pytest.mark.parametrize("works", [True, False])
def test_pip_installs_what_uv_could_not(
    tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, works: bool
) -> None:
    commands = commands_for(tools, monkeypatch, tmp_path / "venv", {"cli"}, uv=works)
    programs = ["uv" if words[0] == "uv" else words[2] for words in commands if words[2] != "ensurepip"]
    assert programs == ["venv", "uv"] + (["pip"] if not works else [])


@pytest.mark.parametrize("serves", [True, False])
def test_an_environment_does_not_wait_for_a_pip_of_its_own(
    tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, serves: bool
) -> None:
    """This Python's pip brings uv, and uv brings pip; Python's way to give it a pip takes seconds."""
    made, installed, *_ = commands_for(tools, monkeypatch, tmp_path / "venv", {"cli"}, uv=True, serves=serves)
    assert ("--without-pip" in made) is serves
    assert (installed[-1] == "pip") is serves


def test_an_interrupted_first_run_is_repaired_from_itself(
    tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has no pip yet, and where it is activated, it is the Python that runs the command."""
    folder = tmp_path / "venv"
    commands_for(tools, monkeypatch, folder, {"cli"}, uv=True)
    place = tools("environment").Environment(folder)
    place.bin.mkdir()
    place.python.touch()
    commands = commands_for(tools, monkeypatch, folder, {"cli", "arrow"}, uv=False, serves=False)
    assert commands[0] == [str(place.python), "-m", "ensurepip"]


def test_a_part_of_pip_is_not_taken_for_pip(
    tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment, quiet = tools("environment"), tools("screen").Screen(io.StringIO(), live=False)
    seen: list[bool] = []

    def watch(command: list[object], *_: object, **__: object) -> tuple[int, str]:
        if "venv" in command:
            give_pip(tmp_path / "venv")
        return int(command[-1] == "--version"), ""

    def find_uv(*_: object, own_pip: bool) -> None:
        seen.append(own_pip)

    monkeypatch.setattr(environment, "watch", watch)
    monkeypatch.setattr(environment, "find_uv", find_uv)
    environment.Environment(tmp_path / "venv").prepare(frozenset({"cli"}), quiet)
    assert seen == [False]


@pytest.mark.parametrize(("version", "serves"), [("22.2.2", False), ("22.3", True), ("100.0", True), (None, False)])
def test_a_pip_that_installs_elsewhere_is_known(
    tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, version: str | None, serves: bool
) -> None:
    packages = tools("packages")

    def of_pip(_: str) -> str:
        if version is None:
            raise packages.PackageNotFoundError
        return version

    monkeypatch.setattr(packages, "version", of_pip)
    assert packages.serves_others() is serves


def test_a_source_of_pyspark_is_fetched_once(
    tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where uv asks a source for its requirements, it gets it a second time from an index that forbids to keep it."""
    _, alone, rest, *_ = commands_for(tools, monkeypatch, tmp_path / "venv", {"cli", "spark"}, uv=True)
    assert {word.partition(">")[0] for word in alone} > {"--no-deps", "numpy", "rich", "pyspark"}
    assert "--no-deps" not in rest
    assert "--editable" in rest


@pytest.mark.parametrize("uv", [True, False])
def test_more_packages_leave_librmq_in_place(
    tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uv: bool
) -> None:
    """A program that runs beside the installer would otherwise miss librmq for a moment."""
    folder = tmp_path / "venv"
    commands_for(tools, monkeypatch, folder, {"cli"}, uv=True)
    place = tools("environment").Environment(folder)
    place.bin.mkdir()
    place.python.touch()
    give_pip(folder)
    commands = commands_for(tools, monkeypatch, folder, {"cli", "arrow"}, uv=uv)
    assert [words[0] for words in commands] == ["uv"] + ([] if uv else [str(place.python)])
    for words in commands:
        assert {word.partition(">")[0] for word in words} > {"install", "numpy", "pyarrow", "rich"}
        assert "--editable" not in words


def test_check_prints_its_arguments() -> None:
    done = run_check("--help")
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("--quick", "--lint", "--fix", "--keep-going", "--wheel"))


def test_only_the_quick_check_ends_at_a_failing_test(tools: Callable[[str], ModuleType]) -> None:
    project = tools("project")
    words = project.pytest_words
    assert words([], quick=True, keep_going=False)[-3:] == ["-m", project.LEFT_OUT_QUICK, "-x"]
    assert "-x" not in words([], quick=True, keep_going=True)
    assert words([], quick=False, keep_going=False)[-2:] == ["-m", "not bench"]


def test_a_check_keeps_bytecode(
    tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without bytecode each process would compile every module again, and pytest would rewrite its tests again."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in tools("environment").Environment(tmp_path).variables()


def test_the_quick_check_tries_a_part_from_first_to_last(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = range(10)
    monkeypatch.setattr(budget, "run", budget.Run(quick=False))
    assert (budget.examples(100), list(budget.some(cases))) == (100, list(cases))
    monkeypatch.setattr(budget, "run", budget.Run(quick=True))
    assert (budget.examples(100), list(budget.some(cases))) == (12, [0, 8, 9])
    assert (budget.examples(1), list(budget.some([]))) == (1, [])


def test_ci_draws_a_third_and_numbers_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "run", budget.Run(quick=False, in_ci=True))
    assert (budget.examples(100), list(budget.some(range(10))), budget.step()) == (33, [*range(10)], 1)


@pytest.mark.slow
def test_long_tests_begin_first_and_modules_stay_together(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.append({str(CHECKOUT)!r})\n"
        "from tests.conftest import pytest_collect_directory, pytest_collection_modifyitems\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    servers\n")
    for name, mark in (
        ("a", ""),
        ("b", "@pytest.mark.servers\n@pytest.mark.xdist_group('db')\n"),
        ("c", "@pytest.mark.slow\n"),
    ):
        (tmp_path / f"test_{name}.py").write_text(
            f"import pytest\n{mark}@pytest.mark.parametrize('number', range(3))\ndef test_it(number): pass\n"
        )
    child = run_pytest(tmp_path, "-n", "1", "--dist", "loadgroup", "--no-loadscope-reorder", "-v")
    passed = re.findall(r"PASSED test_(\w)\.py\S+?\[\d\](\S*)", child.stdout)
    assert passed == [*3 * [("b", "@db")], *3 * [("c", "")], *3 * [("a", "@test_a.py")]]


@pytest.mark.thorough
def test_of_many_cases_the_quick_check_runs_every_eighth(tools: Callable[[str], ModuleType], tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.append({str(CHECKOUT)!r})\nfrom tests.conftest import pytest_collection_modifyitems\n"
    )
    marks = "".join(f"    {mark}\n" for mark in ("bench", "slow", "spark", "thorough", "many"))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{marks}")
    cases = "@pytest.mark.parametrize('number', range(17))\n"
    (tmp_path / "test_it.py").write_text(
        f"import pytest\n@pytest.mark.many\n{cases}def test_many(number): pass\n"
        "@pytest.mark.many\ndef test_one(): pass\n@pytest.mark.thorough\ndef test_left_out(): pass\n"
    )
    child = run_pytest(tmp_path, "-v", "-m", tools("project").LEFT_OUT_QUICK)
    assert re.findall(r"test_it.py::(\S+) PASSED", child.stdout) == [
        "test_many[0]",
        "test_many[8]",
        "test_many[16]",
        "test_one",
    ]
    assert "4 passed, 15 deselected" in child.stdout


def test_a_file_that_is_named_runs_in_one_process(tools: Callable[[str], ModuleType]) -> None:
    words = tools("project").pytest_words
    assert words(["tests/fuzz/test_formats.py::x"], quick=False, keep_going=False)[-3:] == [
        "-n",
        "0",
        "tests/fuzz/test_formats.py::x",
    ]
    assert "0" not in words(["-k", "tests", "tests/fuzz"], quick=False, keep_going=False)


@pytest.mark.parametrize("words", [["tests", "--ignore=tests/store"], ["--ignore=tests/store"]])
def test_a_folder_that_is_named_is_tested_alone(
    tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """CI leaves out style, layers and types in this way where an earlier check has looked at the same code."""
    project = tools("project")
    begun: list[str] = []

    def pytest_alone(place: object, command: list[str]) -> int:
        begun.append(command[3])
        return 0

    def program_alone(place: object, step: object, program: Any) -> tuple[int, str]:
        begun.append(program.step)
        return 0, ""

    monkeypatch.setattr(project.Environment, "prepare", lambda place, extras, screen: None)
    monkeypatch.setattr(project.Environment, "run", pytest_alone)
    monkeypatch.setattr(project, "run", program_alone)
    assert project.check(["--quick", *words]) == 0
    others = set() if "tests" in words else {"style", "layers", "types"}
    assert set(begun) == {"pytest", *others}


@pytest.mark.spark
def test_java_knows_the_options_of_a_short_session(tools: Callable[[str], ModuleType]) -> None:
    """And prints no warning, which each program on Spark would show."""
    pytest.importorskip("pyspark")
    from librmq.spark.session import java_home

    java = [java_home() / "bin" / "java", *tools("environment").SHORT_JAVA.split(), "-version"]
    done = subprocess.run(java, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()


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


@pytest.mark.thorough
def test_in_ci_a_skip_is_a_failure_unless_marked(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.append({str(CHECKOUT)!r})\n"
        "from tests.conftest import pytest_make_collect_report, pytest_runtest_makereport\n"
    )
    (tmp_path / "test_module.py").write_text("import pytest\npytest.skip('all of it', allow_module_level=True)\n")
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_skips(): pytest.skip('no reason at all')\n"
        "@pytest.mark.platform\n"
        "def test_may_skip(): pytest.skip('another system')\n"
        "@pytest.mark.xfail\n"
        "def test_may_fail(): assert False\n"
        "def test_passes(): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    platform\n")
    tallies = []
    for ci in ("true", ""):
        child = run_pytest(tmp_path, "--continue-on-collection-errors", CI=ci)
        tallies.append(child.stdout.splitlines()[-1].strip("= ").rpartition(" in ")[0])
    assert tallies == ["1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error", "1 passed, 3 skipped, 1 xfailed"]


def test_the_budget_of_a_slow_test_has_a_floor_and_a_ceiling() -> None:
    nothing, plenty = SlowBudget(0), SlowBudget(1000)
    assert list(nothing.rounds(10, at_least=3)) == [0, 1, 2]
    assert list(plenty.rounds(10, "points")) == list(range(10))
    assert nothing.reached[0].startswith("3 of 10 rounds in ")
    assert plenty.reached[0].startswith("10 of 10 points in ")


def test_slow_tests_share_the_remaining_time(tmp_path: Path) -> None:
    here, there = (SlowTime(tmp_path, 100, 4) for _ in range(2))  # two processes
    assert here.share("a") == 25
    assert there.share("b") == 25
    here.note("a", 5)  # it was quicker, so the others get more
    assert here.share("c") == 35
    there.note("b", 90)  # it took longer than its share
    assert there.share("d") == 0


@pytest.mark.slow
def test_notes_of_tests_come_from_all_processes(tmp_path: Path) -> None:
    """The summary has figures, the progress of slow tests, and each reason for skips once."""
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.append({str(CHECKOUT)!r})\n"
        "from tests.conftest import (\n"
        "    figure, pytest_collection_finish, pytest_collection_modifyitems, pytest_collectreport,\n"
        "    pytest_runtest_logreport, pytest_terminal_summary, slow_budget, slow_time,\n"
        ")\n"
    )
    (tmp_path / "test_module.py").write_text("import pytest\npytest.skip('no Spark', allow_module_level=True)\n")
    (tmp_path / "test_some.py").write_text(
        "import os\n"
        "import pytest\n"
        "def test_measures(figure): figure('42 of 42')\n"
        "@pytest.mark.parametrize('number', range(4))\n"
        "def test_takes_time(number, slow_budget):\n"
        "    assert slow_budget.seconds > 20\n"
        "    assert list(slow_budget.rounds(3, 'turns')) == [0, 1, 2]\n"
        "@pytest.mark.spark\n"
        "@pytest.mark.parametrize('number', range(9))\n"
        "def test_spark(number, figure): figure(f\"by {os.environ.get('PYTEST_XDIST_WORKER')}\")\n"
        "@pytest.mark.parametrize('number', range(9))\n"
        "def test_data(number): pytest.skip(f'reference data: no part {number}')\n"
        "def test_other(): pytest.skip('no Spark')\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    spark\n")
    child = run_pytest(tmp_path, "-n", "2", "--dist", "loadgroup", RMQ_SLOW_SECONDS="100", CI="")
    assert child.returncode == 0, child.stdout
    lines = child.stdout.splitlines()
    assert lines.count("42 of 42") == 1
    assert len({line for line in lines if line.startswith("by ")}) == 1
    assert sum(line.startswith("by ") for line in lines) == 9
    assert [line.partition(" in ")[0] for line in lines if "turns" in line] == [
        f"test_some.py::test_takes_time[{number}]: 3 of 3 turns" for number in range(4)
    ]
    told = [line for line in lines if line.startswith("skipped ")]
    assert told[0].startswith("skipped 9: this run has only a part of the reference data")
    assert told[1:] == ["skipped 2: no Spark"]


def test_rows_are_spread_from_first_to_last() -> None:
    assert spread(list(range(100)), 4) == [0, 33, 66, 99]
    assert spread([1, 2], 4) == [1, 2]
    assert spread_each(list(range(10)), lambda number: number % 2, 2) == [0, 1, 8, 9]


@pytest.mark.parametrize("folder", store_folders())
def test_store_folders_hold_a_store_and_its_expected_results(folder: Path) -> None:
    assert (folder / "store" / "commitlog").is_dir()
    assert len(rows(folder, "config")) == 1
    assert sum(len(rows(folder, kind)) for kind in {row["type"] for row in jsonl(folder / "expected.jsonl")}) == len(
        jsonl(folder / "expected.jsonl")
    )


@pytest.mark.parametrize("folder", store_folders())
def test_a_copy_of_a_store_can_be_spoilt(folder: Path, store_copy: StoreCopy) -> None:
    copy = store_copy(folder)
    assert copy != store_copy(folder)
    log = sorted((copy / "commitlog").iterdir())[0]
    original = (folder / "store" / "commitlog" / log.name).read_bytes()
    with log.open("r+b") as file:
        file.write(b"spoilt")
    (copy / "commitlog" / "new").touch()
    assert (folder / "store" / "commitlog" / log.name).read_bytes() == original
    assert not (folder / "store" / "commitlog" / "new").exists()


class TestCompactPart:
    """``tests/data`` matches its README, whichever reference data this run uses."""

    @pytest.fixture
    def unpacked(self, tmp_path: Path) -> Path:
        unpack_compact(COMPACT, tmp_path / "compact")
        return tmp_path / "compact"

    def test_it_is_small(self) -> None:
        assert sum(path.stat().st_size for path in COMPACT.rglob("*") if path.is_file()) < 300 * 1024

    def test_it_has_the_layout_of_the_whole(self, unpacked: Path) -> None:
        names = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
        assert names >= {
            "allocate.jsonl",
            "bloom.json",
            "encoding.json",
            "filter/cases-5.3.3.jsonl",
            "filter/cases.jsonl",
            "store-basic/expected.jsonl",
            "store-basic/ops.jsonl",
            "store-basic/put_results.jsonl",
            "store-basic/store/checkpoint",
            "store-basic/store/commitlog/00000000000000000000",
            "store-basic/store/consumequeue/订单主题/0/00000000000000000000",
        }

    def test_its_store_is_complete(self, unpacked: Path) -> None:
        store = unpacked / "store-basic"
        (after_load, _) = rows(store, "store")
        assert len(rows(store, "cq")) == sum(
            queue["max_offset"] - queue["min_offset"] for queue in after_load["queues"]
        )
        assert len(jsonl(store / "ops.jsonl")) == len(jsonl(store / "put_results.jsonl"))
        assert sum(log.stat().st_size for log in (store / "store/commitlog").iterdir()) >= after_load["max_phy_offset"]

    @pytest.mark.thorough
    def test_cutting_it_again_changes_nothing(self, unpacked: Path, tmp_path: Path) -> None:
        again = tmp_path / "again"
        cut(unpacked, again)
        for path in again.rglob("*"):
            if path.is_file() and path.suffix != ".xz":  # the compressed size depends on the version of xz
                assert path.read_bytes() == (COMPACT / path.relative_to(again)).read_bytes(), path.name
        with (
            tarfile.open(again / "store-basic.tar.xz") as new,
            tarfile.open(COMPACT / "store-basic.tar.xz") as old,
        ):
            assert new.getnames() == old.getnames()
            for name in old.getnames():
                contents = [archive.extractfile(name) for archive in (new, old)]
                assert len({content.read() for content in contents if content}) == 1, name


def test_reference_data_are_named_in_the_header() -> None:
    assert reference().folder.is_dir()
    assert reference().origin
