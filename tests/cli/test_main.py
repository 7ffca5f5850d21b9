"""The command line as a whole: arguments, exit statuses, and the modules that it loads."""

from __future__ import annotations

import argparse
import csv
import importlib
import io
import json
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest

import librmq
from librmq import MessageStore
from librmq.__main__ import main as started
from librmq.cli import main
from librmq.cli._output import Output
from librmq.cli._syntax import COMMANDS
from librmq.errors import ConfigError, CorruptionError, NotAStoreError, RecordError, StoreIOError
from tests.budget import many
from tests.cli.stand import Shell, files_of
from tests.programs import POSIX, Process, environment, run_program
from tests.reference import CHECKOUT

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
        (CorruptionError("s/config/x.json", 0, "config", "cut"), 1, "librmq queues: s/config/x.json: at 0: cut\n"),
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
    [[], ["no-such-command"], ["queues"], ["queue", "s", "T"], ["queues", "s", "--form", "jsonl"], ["dump", "-x"]],
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
    called = Mock(return_value=0)
    replace_function(monkeypatch, words[0], called)
    assert main([*words, option, "x"]) == 0
    assert called.call_args.args[0].out == "x"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_and_a_function(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: librmq {command}")


@pytest.mark.parametrize("word", ["-2h", "-90s", "-7d", "-250ms"])
def test_times_may_be_how_long_ago(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    called = Mock(return_value=0)
    replace_function(monkeypatch, "query", called)
    assert main(["query", "s", "--topic", "t", "--key", "k", "--begin", word, "--end", word]) == 0
    asked = called.call_args.args[0]
    assert (asked.begin, asked.end) == (word, word)


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
        "import sys, types; from librmq.cli._syntax import COMMANDS\n"
        "name = 'librmq.cli.commands.' + COMMANDS['queues'].module\n"
        "module = sys.modules[name] = types.ModuleType(name)\n"
        "module.queues = lambda arguments, output: [output.row({'n': n}) for n in range(100000)] and 0\n"
        "from librmq.cli import main; sys.exit(main(['queues', 's']))"
    )
    child = Process[bytes](
        [sys.executable, "-c", program], env=environment(PATH=""), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout.readline() == b'{"n":0}\n'
    child.stdout.close()
    said = child.stderr.read()
    child.stderr.close()
    assert (child.wait(), said) == (0, b"")


@POSIX
@pytest.mark.platform
def test_a_closed_standard_output_or_error_is_not_an_error() -> None:
    for arguments, closed, status in (["--help"], ">&-", 0), (["queues", "nowhere"], "2>&-", 2):
        program = f"import sys; from librmq.cli import main; sys.exit(main({arguments}))"
        words = ["/bin/sh", "-c", f'exec "{sys.executable}" -c "$0" {closed}', program]
        child = subprocess.run(words, env=environment(), stderr=subprocess.PIPE)
        assert (child.returncode, child.stderr) == (status, b"")


def test_output_is_utf8_in_any_locale() -> None:
    program = (
        "import sys, types; from librmq.cli._syntax import COMMANDS\n"
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


# Shell completion of commands, options and choices.


CASES = [
    (["sho"], {"show"}),
    (["dia"], {"diagnose"}),
    (["show", "store", "--gr"], {"--grep"}),
    (["show", "store", "--body", ""], {"text", "json", "hex", "base64", "none"}),
    (["count", "store", "--by", "t"], {"topic", "tag"}),
    (["topic", ""], {"create", "grow", "permit", "delete"}),
    (["show", "sto"], {"store"}),
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.platform
def test_bash_completes_commands_options_and_files(shell: Shell) -> None:
    script = shell("completion", "bash").out
    for words, _ in CASES:
        quoted = " ".join(f"'{word}'" for word in ["librmq", *words])
        script += f'COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _librmq; echo "${{COMPREPLY[*]}}"\n'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stderr == ""
    assert [set(line.split()) for line in done.stdout.split("\n")[: len(CASES)]] == [found for _, found in CASES]


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_scripts_know_every_command(shell: Shell, name: str) -> None:
    script = shell("completion", name).out
    assert [command for command in COMMANDS if command not in script] == []
    assert "--body" in script or "-l body" in script


# What all commands share: help with an example, output formats, limits, and how a path leads to a store.


NEEDS_SPARK = ("spark",)
ELSEWHERE = ("console", "consume", "demo", "send", "serve")
"""They run until they are stopped, or for seconds; other tests cover them."""
NEEDS_ARROW = ("export", "import")
NEEDS_JINJA = ("report",)
FINDS_NOTHING = ("schedules", "timers", "dead-letters", "expiring", "traces", "who")
"""These find nothing in the store of the examples."""


def test_help_fits_one_screen(shell: Shell) -> None:
    answer = shell("--help")
    assert answer.status == 0
    lines = answer.out.splitlines()
    assert len(lines) <= 65
    assert max(map(len, lines)) <= 120
    assert [name for name in COMMANDS if f"\n  {name}" not in answer.out] == []


def test_version(shell: Shell) -> None:
    assert shell("--version") == (0, f"librmq {librmq.__version__}\n", "")


def test_an_unknown_command_is_answered_with_a_near_one(shell: Shell) -> None:
    answer = shell("queus", "store")
    assert (answer.status, answer.out) == (2, "")
    assert "there is no command 'queus'; did you mean queues?" in answer.said


@many
@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in (*NEEDS_SPARK, *ELSEWHERE)])
def test_the_example_in_the_help_of_a_command_runs(shell: Shell, name: str) -> None:
    if name in NEEDS_ARROW and find_spec("pyarrow") is None:
        pytest.skip("needs the extra arrow")
    if name in NEEDS_JINJA and find_spec("jinja2") is None:
        pytest.skip("needs the extra report")
    shown = shell(name, "--help").out
    example = shown.rpartition("example: ")[2].strip()
    first, _, given = example.partition(" < ")
    words = shlex.split(first)
    assert words[:2] == ["librmq", name]
    if name == "import":
        shell("export", "store", "-o", "orders.jsonl")
    if name == "replay":
        shell("skip", "store", "--group", "CG_order", "--topic", "OrderTopic")
    before = files_of(shell.folder / "store")
    answer = shell(*words[1:])
    if name == "decide":  # a broker that owns that store would still ask
        assert "checks still ask the producer group about this half" in answer.said
        return
    assert (answer.status, "a bug" in answer.said) == (0, False), answer.said
    assert given or answer.out or name in FINDS_NOTHING
    if name not in ("topic", "group", "reset", "skip", "replay", "cancel"):
        assert files_of(shell.folder / "store") == before


# --- output formats


def test_rows_can_be_csv(shell: Shell) -> None:
    rows = shell("queues", "store").rows
    found = list(csv.DictReader(io.StringIO(shell("queues", "store", "--format", "csv").out)))
    assert found == [{name: str(value) for name, value in row.items()} for row in rows]


def test_csv_holds_objects_as_json(shell: Shell) -> None:
    row = shell("dump", "store", "--limit", 1).rows[0]
    (found,) = csv.DictReader(io.StringIO(shell("dump", "store", "--limit", 1, "--format", "csv").out))
    assert json.loads(found["properties"]) == row["properties"]


def test_rows_can_be_a_file_of_parquet(shell: Shell) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = shell("queues", "store").rows
    assert shell("queues", "store", "-o", "queues.parquet") == (0, "", "")
    assert parquet.read_table("queues.parquet").to_pylist() == rows
    assert shell("queues", "store", "--format", "parquet").status == 2


@pytest.mark.parametrize(("name", "begins"), [("q.jsonl", '{"topic"'), ("q.csv", "topic,"), ("q", '{"topic"')])
def test_the_file_names_the_form(shell: Shell, name: str, begins: str) -> None:
    assert shell("queues", "store", "--out", name) == (0, "", "")
    assert Path(name).read_text("utf-8").startswith(begins)


def test_a_file_that_cannot_be_written_is_named(shell: Shell) -> None:
    answer = shell("queues", "store", "-o", "absent/file")
    assert answer.status == 2
    assert "absent/file: No such file" in answer.said


@pytest.mark.parametrize("name", ["dump", "verify", "can-start", "stats", "disk"])
def test_a_file_has_all_rows_of_a_command_with_notes(shell: Shell, name: str) -> None:
    answer = shell(name, "store")
    assert shell(name, "store", "-o", "rows.jsonl").status == answer.status
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text("utf-8").splitlines()]
    assert [list(row) for row in rows] == [list(row) for row in answer.rows]  # how fast a disk is differs


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet", "rows.txt"])
@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device"), 2, "librmq queues: {}: No space left on device"),
        (ConfigError("wrong"), 2, "librmq queues: wrong"),
    ],
)
def test_a_file_that_is_not_whole_is_removed(
    fake: Fake, shell: Shell, name: str, error: BaseException, status: int, said: str
) -> None:
    if name != "rows.jsonl":
        pytest.importorskip("rich" if name == "rows.txt" else "pyarrow")
    fake(raiser(error))
    assert shell("queues", "store", "-o", name) == (status, "", f"{said.format(name)}\n")
    assert not Path(name).exists()


def test_a_file_keeps_the_rows_before_damage(fake: Fake, shell: Shell) -> None:
    fake(raiser(CorruptionError("f", 7, "size", "too short")))
    assert shell("queues", "store", "-o", "rows.jsonl").status == 1
    assert Path("rows.jsonl").read_text() == '{"before":1}\n'


def test_an_interrupt_keeps_the_file_of_a_command_without_end(fake: Fake, shell: Shell) -> None:
    def follow(arguments: argparse.Namespace, output: Output) -> int:
        output.row({"n": 1})
        output.draw()
        raise KeyboardInterrupt

    fake(follow)
    assert shell("queues", "store", "-o", "rows.jsonl").status == 130
    assert Path("rows.jsonl").read_text() == '{"n":1}\n'


def test_limit_ends_a_list(shell: Shell) -> None:
    rows = shell("queues", "store").rows
    assert shell("queues", "store", "--limit", 2).rows == rows[:2]
    assert shell("queues", "store", "--limit", 2, "--format", "csv").out.count("\n") == 3
    assert "--limit: expected a whole number" in shell("queues", "store", "--limit", "0").said


def test_no_row_is_an_error_only_on_request(shell: Shell) -> None:
    words = ["query", "store", "--topic", "OrderTopic", "--key", "none"]
    assert shell(*words) == (0, "", "")
    assert shell(*words, "--fail-empty") == (3, "", "")
    assert shell("queues", "store", "--fail-empty").status == 0


# --- the store that a path leads to


def test_a_store_below_the_path_is_found_and_named(shell: Shell) -> None:
    expected = shell("queues", "store").out
    for path in (".", shell.folder, shell.folder / "store" / "commitlog"):
        answer = shell("queues", path)
        assert (answer.status, answer.out) == (0, expected)
        assert answer.said.startswith("note: the store is ")
        assert answer.said.endswith("store\n")


def test_several_stores_below_the_path_are_listed(shell: Shell) -> None:
    (shell.folder / "other" / "commitlog").mkdir(parents=True)
    answer = shell("queues", ".")
    assert (answer.status, answer.out) == (2, "")
    assert "2 stores are below it (./other, ./store)" in answer.said


def test_doctor_of_a_plain_installation_says_what_each_extra_would_bring(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("importlib.metadata.version", absent)
    answer = shell("doctor")
    assert (answer.status, answer.said) == (0, "")
    checks = {row["check"]: row for row in answer.rows}
    assert checks["python"]["ok"]
    assert not checks["spark"]["ok"]
    assert "pip install 'librmq[spark]' brings Spark's tables" in checks["spark"]["what"]
    project = CHECKOUT / "pyproject.toml"
    extras = tomllib.loads(project.read_text("utf-8"))["project"]["optional-dependencies"]
    assert checks.keys() - {"python", "core"} == extras.keys() - {"all", "bench", "test", "test-spark", "docs", "dev"}
