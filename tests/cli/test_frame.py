"""What all commands share: help with an example, output formats, limits, and how a path leads to a store."""

from __future__ import annotations

import csv
import io
import json
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

import librmq
from librmq.cli.syntax import COMMANDS
from tests.budget import many
from tests.cli.stand import Shell, files_of

NEEDS_SPARK = ("spark", "doctor")
RUNS_ON = ("serve",)
"""Runs until it is stopped; other tests cover it."""
NEEDS_ARROW = ("export", "import")
NEEDS_JINJA = ("report",)
FINDS_NOTHING = ("timers", "dead-letters", "expiring", "who")
"""These find nothing in the store of the examples."""


def test_help_fits_one_screen(shell: Shell) -> None:
    answer = shell("--help")
    assert answer.status == 0
    lines = answer.out.splitlines()
    assert len(lines) <= 62
    assert max(map(len, lines)) <= 120
    assert [name for name in COMMANDS if f"\n  {name}" not in answer.out] == []


def test_version(shell: Shell) -> None:
    assert shell("--version") == (0, f"librmq {librmq.__version__}\n", "")


def test_an_unknown_command_is_answered_with_a_near_one(shell: Shell) -> None:
    answer = shell("queus", "store")
    assert (answer.status, answer.out) == (2, "")
    assert "there is no command 'queus'; did you mean queues?" in answer.said


@many
@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in (*NEEDS_SPARK, *RUNS_ON)])
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
    if name == "decide":  # that store has no half that the broker gave up on
        assert "expected an undecided half" in answer.said
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
