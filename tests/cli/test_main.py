"""The command line as a whole: arguments, exit statuses, and the modules that it loads."""

from __future__ import annotations

import argparse
import importlib
import io
import subprocess
import sys
from collections.abc import Callable

import pytest

import librmq
from librmq import MessageStore
from librmq.__main__ import main as started
from librmq.cli import main
from librmq.cli.output import Output
from librmq.cli.syntax import COMMANDS
from librmq.errors import ConfigError, CorruptionError, NotAStoreError, RecordError, StoreIOError
from tests.cli.stand import Shell
from tests.programs import POSIX, environment, run_program

NEXT = "; librmq verify lists the damage, and librmq salvage --into NEW saves every record that can be read"

Fake = Callable[[Callable[[argparse.Namespace, Output], int]], list[argparse.Namespace]]


def replace_function(monkeypatch: pytest.MonkeyPatch, name: str, handler: Callable[..., int]) -> None:
    """Let a command call ``handler``."""
    command = COMMANDS[name]
    monkeypatch.setattr(importlib.import_module(f"librmq.cli.commands.{command.module}"), command.function, handler)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Replace the command ``queues`` with a function, and record the arguments of each call."""

    def install(handler: Callable[[argparse.Namespace, Output], int]) -> list[argparse.Namespace]:
        seen: list[argparse.Namespace] = []

        def noted(arguments: argparse.Namespace, output: Output) -> int:
            seen.append(arguments)
            return handler(arguments, output)

        for name in ("queues", "queue"):
            replace_function(monkeypatch, name, noted)
        return seen

    return install


def raiser(error: BaseException) -> Callable[[argparse.Namespace, Output], int]:
    def raise_(arguments: argparse.Namespace, output: Output) -> int:
        output.row({"before": 1})
        raise error

    return raise_


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (CorruptionError("f", 7, "size", "too short"), 1, f"librmq queues: f: at 7: too short{NEXT}\n"),
        (
            CorruptionError("s/config/topics.json", 0, "table", "expected a value"),
            1,
            "librmq queues: s/config/topics.json: at 0: expected a value; restore the file from a copy, or move it "
            "away: the store then lacks what it holds\n",
        ),
        (RecordError("bad"), 1, "librmq queues: bad (at byte 0 of the record)\n"),
        (NotAStoreError("no store"), 2, "librmq queues: no store\n"),
        (ConfigError("wrong \x1b[2J"), 2, "librmq queues: wrong \\u001b[2J\n"),
        (StoreIOError("open", "f", OSError(13, "denied")), 2, "librmq queues: f: open: denied\n"),
        (OSError(28, "No space left on device"), 2, "librmq: [Errno 28] No space left on device\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_errors_become_exit_statuses(
    fake: Fake, capsys: pytest.CaptureFixture[str], error: BaseException, status: int, said: str
) -> None:
    fake(raiser(error))
    assert main(["queues", "store"]) == status
    shown = capsys.readouterr()
    assert shown.err == said
    assert shown.out == '{"before":1}\n'


def test_an_interrupt_while_the_command_is_loaded_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "librmq.cli":
                raise KeyboardInterrupt

    monkeypatch.delattr(librmq, "cli", raising=False)
    for name in [name for name in sys.modules if name.startswith("librmq.cli")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert started() == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_an_internal_error_is_one_line_too(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake(raiser(ZeroDivisionError("oh")))
    assert main(["queues", "store"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "ZeroDivisionError: oh (test_main.py:" in said


@pytest.mark.parametrize(
    ("words", "form", "config"),
    [
        (["queues", "s"], None, None),
        (["--format", "jsonl", "queues", "s"], "jsonl", None),
        (["queues", "s", "--format", "jsonl"], "jsonl", None),
        (["--format", "table", "queues", "--format", "jsonl", "s", "--config", "c"], "jsonl", "c"),
    ],
)
def test_options_may_precede_and_follow_the_command(
    fake: Fake, words: list[str], form: str | None, config: str | None
) -> None:
    seen = fake(lambda arguments, output: 0)
    assert main(words) == 0
    assert (seen[0].store, seen[0].format, seen[0].config) == ("s", form, config)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["no-such-command"],
        ["queues"],
        ["queue", "s", "T"],
        ["queues", "s", "--form", "jsonl"],
        ["dump", "-x"],
    ],
)
def test_bad_usage(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("usage: librmq")


def test_terminal_control_sequences_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["dump", "s", "--\x1b[31m"],
        ["\x1b[31m"],
        ["dump", "\x1b[31m\u202e"],
        ["filter", "--explain", "\x1b[31m"],
    ):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert "\x1b" not in said
        assert "\u202e" not in said
        assert "[31m" in said


@pytest.mark.parametrize("words", [["report", "s"], ["spark", "run", "lag", "s"]])
@pytest.mark.parametrize("option", ["-o", "--out"])
def test_the_file_to_write_is_named_by_either_option(
    monkeypatch: pytest.MonkeyPatch, words: list[str], option: str
) -> None:
    seen: list[argparse.Namespace] = []

    def note(arguments: argparse.Namespace, output: Output) -> int:
        seen.append(arguments)
        return 0

    replace_function(monkeypatch, words[0], note)
    assert main([*words, option, "x"]) == 0
    assert seen[0].out == "x"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_and_a_function(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: librmq {command}")


@pytest.mark.parametrize("word", ["-2h", "-90s", "-7d", "-250ms"])
def test_times_may_be_how_long_ago(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    seen: list[argparse.Namespace] = []

    def note(arguments: argparse.Namespace, output: Output) -> int:
        seen.append(arguments)
        return 0

    replace_function(monkeypatch, "query", note)
    assert main(["query", "s", "--topic", "t", "--key", "k", "--begin", word, "--end", word]) == 0
    assert (seen[0].begin, seen[0].end) == (word, word)


# --- as a separate program


SLOW = ("lark", "mmh3", "rich", "pyarrow", "numpy", "librmq.filter", "librmq.broker")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["lag", "store"],
        ["lag", "store", "--by", "group"],
        ["show", "store", "--topic", "OrderTopic", "--limit", "10"],
    ],
    ids=["help", "lag", "lag by group", "show"],
)
def test_a_short_answer_loads_nothing_slow(words: list[str], shell: Shell) -> None:
    MessageStore.open(shell.folder / "store").close()  # so that nothing is left to recover
    program = (
        "import sys; usual = set(sys.modules);"
        f"from librmq.cli import main; main({words});"
        f"print([name for name in {SLOW} if name in sys.modules and name not in usual])"
    )
    child = run_program(program, PATH="")
    assert child.stderr == ""
    assert child.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_leaves_early_is_not_an_error() -> None:
    program = (
        "import sys, types; from librmq.cli.syntax import COMMANDS\n"
        "name = 'librmq.cli.commands.' + COMMANDS['queues'].module\n"
        "module = sys.modules[name] = types.ModuleType(name)\n"
        "module.queues = lambda arguments, output: [output.row({'n': n}) for n in range(100000)] and 0\n"
        "from librmq.cli import main; sys.exit(main(['queues', 's']))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], env=environment(PATH=""), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stderr is not None
    assert child.stdout.readline() == b'{"n":0}\n'
    child.stdout.close()
    said = child.stderr.read()
    child.stderr.close()
    assert (child.wait(), said) == (0, b"")


@POSIX
@pytest.mark.platform
def test_a_closed_standard_output_is_not_an_error() -> None:
    program = "import sys; from librmq.cli import main; sys.exit(main(['--help']))"
    words = ["/bin/sh", "-c", f'exec "{sys.executable}" -c "$0" >&-', program]
    child = subprocess.run(words, env=environment(), stderr=subprocess.PIPE)
    assert (child.returncode, child.stderr) == (0, b"")


def test_output_is_utf8_in_any_locale() -> None:
    program = (
        "import sys, types; from librmq.cli.syntax import COMMANDS\n"
        "name = 'librmq.cli.commands.' + COMMANDS['queues'].module\n"
        "module = sys.modules[name] = types.ModuleType(name)\n"
        "module.queues = lambda arguments, output: output.row({'topic': '订单'}) or 0\n"
        "from librmq.cli import main; sys.exit(main(['queues', 's']))"
    )
    child = run_program(program, PYTHONIOENCODING="latin-1", PYTHONUTF8="0")
    assert (child.returncode, child.stderr) == (0, "")
    assert child.stdout == '{"topic":"订单"}\n'


def test_a_stream_that_cannot_be_reconfigured(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def print_one(arguments: argparse.Namespace, output: Output) -> int:
        output.row({"topic": "订单"})
        return 0

    fake(print_one)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["queues", "s"]) == 0
    assert stream.getvalue() == '{"topic":"订单"}\n'


def test_an_export_without_pyarrow_names_the_extra(shell: Shell) -> None:
    program = (
        "import sys; sys.modules['pyarrow'] = None; from librmq.cli import main; "
        "sys.exit(main(['export', 'store', '-o', 'all.csv']))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=shell.folder, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "librmq export: reading a store as columns needs an optional dependency: pip install 'librmq[arrow]'\n"
    )
