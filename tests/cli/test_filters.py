"""``filter`` and ``bloom`` as users call them: explanations of an expression, and errors that point at a fault."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import Run


def test_an_expression_is_explained(run_lines: Run) -> None:
    status, lines, err = run_lines("filter", "--explain", "a > 5 AND b = 'x=y'", "a=7", "b=x=y")
    assert (status, err) == (0, "")
    assert lines[:3] == [
        "match: the filter is TRUE",
        "decided by: a > 5 AND b = 'x=y'",
        "because all of its terms are TRUE",
    ]
    assert [line.split() for line in lines[4:7]] == [
        ["a", ">", "5", "AND", "b", "=", "'x=y'", "TRUE"],
        ["a", ">", "5", "TRUE", "a", "is", "'7'"],
        ["b", "=", "'x=y'", "TRUE", "b", "is", "'x=y'"],
    ]
    assert lines[-1].endswith("[integer-literal]")


def test_why_it_does_not_match(run_lines: Run) -> None:
    for words, said in (
        (["a=5.0"], "'5.0' is not an integer: that is an error, so no match (NumberFormatException)"),
        ([], "a is missing; that is UNKNOWN"),
        (["a="], "'' is not an integer"),
        (["a=-5"], "a is '-5'; that is FALSE"),
    ):
        status, lines, err = run_lines("filter", "--explain", "a > 5", *words)
        assert (status, err) == (0, "")
        assert lines[0].startswith("no match: the filter is ")
        assert said in lines[2]


def test_output_has_no_control_characters(run_lines: Run) -> None:
    status, lines, err = run_lines("filter", "--explain", "a = 'x'", "a=\x1b[2J\u202e")
    assert (status, err) == (0, "")
    assert not any("\x1b" in line or "\u202e" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--explain", "price == 5", "price=5"], "unexpected '='; expected a number"),
        (["--explain", "a =\n b = >\n c", "a=1"], "unexpected '>'; "),
        (["--explain", "a CONTAINS 'x'", "--strict"], "the expression ended before"),
        (["--dialect", "5.3", "--explain", "CONTAINS = 'x'"], "unexpected 'CONTAINS'"),
        (["--explain", "(" * 100_000], "more than 2000 parentheses"),
    ],
)
def test_faults_are_pointed_at(run_lines: Run, words: list[str], said: str) -> None:
    status, lines, err = run_lines("filter", *words)
    assert (status, lines) == (2, [])
    first, shown, caret = err.splitlines()
    assert first.startswith("librmq filter: ")
    assert said in first
    assert len(shown) <= 102
    assert caret.strip() == "^"
    assert caret.index("^") <= len(shown)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--explain", "a = 1", "a"], "expected NAME=TEXT, found 'a'"),
        (["--explain", "a = 1", "=1"], "expected NAME=TEXT, found '=1'"),
        (["a=1", "--explain"], "properties as arguments need --explain EXPR"),
        (["a=1"], "unrecognized arguments"),
        (["--dialect", "4.8"], "invalid choice"),
    ],
)
def test_bad_usage(run_lines: Run, words: list[str], said: str) -> None:
    status, lines, err = run_lines("filter", *words)
    assert (status, lines) == (2, [])
    assert said in err


def test_cases_are_explained_one_by_one(run_lines: Run) -> None:
    given = '{"expr": "a = 1", "props": {"a": "1"}}\n{"expr": "a IS NULL"}\n{"expr": "a ="}\n'
    status, lines, err = run_lines("filter", "--explain", given=given)
    assert status == 2
    assert [line for line in lines if line.startswith("match")] == ["match: the filter is TRUE"] * 2
    assert err.startswith("librmq filter: line 3: the expression ends here")


def test_strict_cases(run_lines: Run) -> None:
    given = '{"expr": "a = 1 b", "props": {"a": "1"}}\n{"expr": "a = 1", "props": {"a": "1"}}\n'
    status, lines, _ = run_lines("filter", "--strict", given=given)
    assert status == 0
    assert [json.loads(line)["result"] for line in lines] == ["PARSE_ERROR", True]
    status, lines, _ = run_lines("filter", given=given)
    assert [json.loads(line)["match"] for line in lines] == [True, True]


def test_no_input_gives_no_output(run_lines: Run) -> None:
    for words in (["filter"], ["filter", "--explain"], ["bloom"]):
        assert run_lines(*words) == (0, [], "")


# --- bitmaps


@pytest.fixture
def store(run_lines: Run, tmp_path: Path) -> Path:
    """Return a store with a filter and a message that matches it; its queues and their extension are lost."""
    config = tmp_path / "config.json"
    sizes = {"commitlog_file_size": 65536, "consumequeue_file_size": 4000, "consumequeue_ext_file_size": 1024}
    config.write_text(
        json.dumps(sizes | {"enable_consumequeue_ext": True, "max_hash_slot_num": 64, "max_index_num": 256})
    )
    folder = tmp_path / "store"
    given = (
        '{"op": "filter", "topic": "T", "group": "G", "expr": "a > 1", "version": 1}\n'
        '{"op": "put", "topic": "T", "queueId": 0, "body": "b", "props": {"a": "2"}}\n'
    )
    assert run_lines("load", str(folder), "--config", str(config), given=given)[0] == 0
    shutil.copytree(folder, tmp_path / "whole")
    shutil.rmtree(folder / "consumequeue")
    shutil.rmtree(folder / "consumequeue_ext")
    return folder


def test_recovering_makes_bitmaps_of_the_filters_in_the_tables(run_lines: Run, store: Path) -> None:
    config = str(store.parent / "config.json")
    status, _, err = run_lines("recover", str(store), "--config", config)
    assert (status, err) == (0, "")
    ours, whole = (run_lines("queue", str(folder), "T", "0")[1] for folder in (store, store.parent / "whole"))
    assert ours == whole
    assert json.loads(ours[0])["ext"]["bitmap_hex"] not in (None, "00" * 14)


def test_tables_that_cannot_be_read_stop_no_recovery(run_lines: Run, store: Path) -> None:
    for path in (store / "config").glob("consumerFilter.json*"):
        path.write_text("{")
    status, _, err = run_lines("recover", str(store), "--config", str(store.parent / "config.json"))
    assert status == 0
    assert err.startswith("note: bitmaps of filters are not rebuilt, ")
    (entry,) = run_lines("queue", str(store), "T", "0")[1]
    assert json.loads(entry)["ext"]["bitmap_hex"] is None
