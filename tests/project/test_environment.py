"""The environment of the commands: what is installed, by which program, and when."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.programs import POSIX


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


def made_by_uv(tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """Make an environment in ``folder`` for the extra ``cli``, with a Python that does nothing and without a pip."""
    commands_for(tools, monkeypatch, folder, {"cli"}, uv=True)
    place = tools("environment").Environment(folder)
    place.bin.mkdir()
    place.python.touch()
    return place


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
    place = made_by_uv(tools, monkeypatch, folder)
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
    place = made_by_uv(tools, monkeypatch, folder)
    give_pip(folder)
    commands = commands_for(tools, monkeypatch, folder, {"cli", "arrow"}, uv=uv)
    assert [words[0] for words in commands] == ["uv"] + ([] if uv else [str(place.python)])
    for words in commands:
        assert {word.partition(">")[0] for word in words} > {"install", "numpy", "pyarrow", "rich"}
        assert "--editable" not in words
