"""The commands ``filter`` and ``bloom`` compared with the answers of RocketMQ."""

from __future__ import annotations

import json

import pytest

from tests.conftest import Run
from tests.reference import document, existing, jsonl


@pytest.mark.parametrize(("file", "dialect"), [("cases.jsonl", []), ("cases-5.3.3.jsonl", ["--dialect", "5.3"])])
def test_filter(run_lines: Run, file: str, dialect: list[str]) -> None:
    cases = jsonl(existing("filter", file))
    given = [{name: case[name] for name in ("expr", "props") if name in case} for case in cases]
    status, lines, err = run_lines("filter", *dialect, given=given)
    assert (status, err) == (0, "")
    wanted = ("expr", "props", "result", "match")
    assert [json.loads(line) for line in lines] == [
        {name: case[name] for name in wanted if name in case} for case in cases
    ]


def test_bloom(run_lines: Run) -> None:
    filters = document(existing("bloom.json"))["filters"]
    given = [
        {"f": one["f"], "n": one["n"], "strings": [position["str"] for position in one["positions"]]} for one in filters
    ]
    status, lines, err = run_lines("bloom", given=given)
    assert (status, err) == (0, "")
    expected = [
        {
            "k": one["k"],
            "m": one["m"],
            "positions": [{"str": each["str"], "bits": each["bits"]} for each in one["positions"]],
        }
        for one in filters
    ]
    assert [json.loads(line) for line in lines] == expected


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("filter", "{"),
        ("filter", "{}"),
        ("filter", '{"expr": 5}'),
        ("filter", '{"expr": "a = 1", "props": [1]}'),
        ("filter", '{"expr": "a = 1", "props": {"a": 1}}'),
        ("bloom", '{"f": 0, "n": 32, "strings": []}'),
        ("bloom", '{"f": 100, "n": 32, "strings": []}'),
        ("bloom", '{"f": 20, "n": 0, "strings": []}'),
        ("bloom", '{"f": 20, "n": 32, "strings": [5]}'),
        ("bloom", "[]"),
    ],
)
def test_bad_input_ends_with_the_answers_before_it(run_lines: Run, command: str, line: str) -> None:
    good = {"filter": '{"expr": "a = 1", "props": null}', "bloom": '{"f": 20, "n": 32, "strings": ["x"]}'}[command]
    status, lines, err = run_lines(command, given=[good, line, good])
    assert (status, len(lines)) == (2, 1)
    assert err.startswith(f"librmq {command}: line 2: ")


def test_an_explanation_is_for_people(run_lines: Run) -> None:
    status, lines, err = run_lines(
        "filter", "--explain", given=[{"expr": "a > 5 AND b = 'x'", "props": {"a": "\x1b7"}}]
    )
    assert (status, err) == (0, "")
    assert "match" in lines[0]
    assert not any("\x1b" in line for line in lines)
    status, lines, err = run_lines("filter", "--explain", given=[{"expr": "a >", "props": {}}])
    assert (status, lines) == (2, [])
    assert err.startswith("librmq filter: line 1: ")
    assert err.splitlines()[-1].strip() == "^"
