"""``demo``: the screen is that of the picture in the README, and a producer that is killed loses nothing."""

from __future__ import annotations

import html
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from librmq.cli._demo import Program, Screen, demo_folder, prove_by_kills, replace_folder
from librmq.errors import InputError
from tests.cli.stand import Shell, Terminal
from tests.programs import Process
from tests.reference import CHECKOUT

PICTURE = CHECKOUT / "docs" / "pictures" / "demo.svg"


def steps_of(screen: str) -> list[list[str]]:
    return [step.splitlines() for step in re.split(r"\n(?=\d  )", screen)]


def test_the_picture_fits_a_terminal() -> None:
    drawn = [html.unescape(row) for row in re.findall(r"<text [^>]*>(.*)</text>", PICTURE.read_text("utf-8"))]
    assert max(map(len, drawn)) <= 80
    assert len(drawn) <= 81
    for title, *lines in steps_of("\n".join(drawn))[1:]:
        assert {line[:4].strip() for line in lines if line} == {"", "→"}, title


def greet(name: str) -> str:
    print(f"hello {name}")
    return name


def fail() -> None:
    print("before")
    raise LookupError


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_code_is_shown_run_and_answered(stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = stream()
    assert Screen(shown).run(greet, "ann") == "ann"
    code = '    print(f"hello {name}")'
    assert shown.getvalue() == (f"\x1b[36m{code}\x1b[0m" if stream is Terminal else code) + "\n  → hello ann\n"


def test_what_code_printed_before_an_error_is_shown() -> None:
    shown = io.StringIO()
    with pytest.raises(LookupError):
        Screen(shown).run(fail)
    assert shown.getvalue().endswith("  → before\n")


@pytest.mark.slow
def test_kills_in_the_middle_of_sends_lose_nothing(tmp_path: Path) -> None:
    shown = io.StringIO()
    assert prove_by_kills(Screen(shown), str(tmp_path), 7, sends=300, kills=2)
    screen = shown.getvalue()
    assert "Seed: 7" in screen
    assert sum(map(int, re.findall(r"run \d: .* after (\d+) accepted", screen))) == 300
    assert "→ 300 orders accepted, 300 there, 0 lost" in screen


def test_the_seed_is_for_kills_alone(shell: Shell) -> None:
    answer = shell("demo", "--seed", 1)
    assert (answer.status, answer.said) == (
        2,
        "librmq demo: --seed: it draws when a producer is killed, so it is for librmq demo kill\n",
    )


def test_a_folder_of_something_else_is_kept(shell: Shell) -> None:
    (shell.folder / "mine").mkdir()
    (shell.folder / "mine" / "README.txt").write_text("not to be lost", "utf-8")
    answer = shell("demo", "--keep", "mine")
    assert (answer.status, answer.out) == (2, "")
    assert "mine holds something else: name a folder that is empty or does not exist" in answer.said
    assert (shell.folder / "mine" / "README.txt").read_text("utf-8") == "not to be lost"


def test_a_folder_that_a_demo_left_is_replaced(tmp_path: Path) -> None:
    for _ in range(2):
        with demo_folder(str(tmp_path / "kept")):
            assert [path.name for path in (tmp_path / "kept").iterdir()] == ["README.txt"]
            (tmp_path / "kept" / "shop").mkdir()


def test_a_folder_that_an_interrupted_demo_left_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: Path, **_: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "shop").mkdir()
    (tmp_path / "README.txt").write_text("Made by a demo of librmq, which replaces this folder on each run.\n", "utf-8")
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            replace_folder(tmp_path)
    replace_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["README.txt"]


def test_a_temporary_folder_is_removed() -> None:
    with demo_folder(None) as folder:
        assert os.path.isdir(folder)
    assert not os.path.exists(folder)


def test_a_folder_that_can_not_be_written_has_advice(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    (shell.folder / "file").touch()
    answer = shell("demo", "--keep", "file/inside")
    assert answer.status == 2
    assert "name one by --keep FOLDER, or by TMPDIR" in answer.said
    monkeypatch.setattr("tempfile.mkdtemp", no_folder)
    answer = shell("demo", "kill")
    assert (answer.status, answer.out) == (2, "")
    assert "No space left on device: '/tmp/demo'" in answer.said
    assert "name one by --keep FOLDER, or by TMPDIR" in answer.said


def no_folder(*_: object, **__: object) -> str:
    raise OSError(28, "No space left on device", "/tmp/demo")


def test_a_disk_that_is_full_in_a_program_has_advice() -> None:
    script = "from librmq.errors import DiskFullError; raise DiskFullError('the disk is full')"
    advice = pytest.raises(InputError, match=r"status 1: .*the disk is full\. The demo needs 20 MB")
    with advice, demo_folder(None), Program("timeit", "-n", 1, script) as program:
        program.end()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_a_screen_that_is_full_has_no_advice_about_folders() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-P", "-m", "librmq", "demo"]
        child = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (child.returncode, child.stderr) == (2, "librmq: [Errno 28] No space left on device\n")


def test_a_program_that_fails_is_reported() -> None:
    with Program("librmq", "queues", "nowhere") as program, pytest.raises(InputError, match=r"status 2: .*nowhere"):
        program.end()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to one process")
def test_ctrl_c_leaves_neither_folder_nor_program(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "librmq", "demo", "kill", "--seed", "1"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    pipe = subprocess.PIPE
    with Process(command, stdout=pipe, stderr=pipe, text=True, env=env) as process:
        while "accepted" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "interrupted\n")
    assert list(tmp_path.iterdir()) == []
