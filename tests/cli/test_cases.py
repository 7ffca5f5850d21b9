"""``python -m tests.cases``: as a program of its own, with the installed package and the folder ``tests`` alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import environment
from tests.reference import CHECKOUT

PUT = {"op": "put", "topic": "T", "queueId": 0, "body": "x", "at_ms": 1795200000000}


def cases(*words: str | Path, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.cases", *words],
        cwd=CHECKOUT, input=given, capture_output=True, text=True, env=environment(), timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "given", "answer"),
    [
        (["filter"], {"expr": "a > 5", "props": {"a": "7"}}, {"result": True, "match": True}),
        (["filter", "--dialect", "5.3"], {"expr": "a CONTAINS 'x'", "props": {"a": "xy"}}, {"match": True}),
        (["allocate"], {"strategy": "AVG", "cid": "c", "mqs": [["T", "b", 0]], "cids": ["c"]},
         {"result": [["T", "b", 0]]}),
        (["bloom"], {"f": 20, "n": 32, "strings": ["x"]}, {"k": 3, "m": 112}),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_cases_are_answered_up_to_a_bad_line(words: list[str], given: object, answer: dict[str, object]) -> None:
    result = cases(*words, given=f"{json.dumps(given)}\n{{\n")
    assert answer.items() <= json.loads(result.stdout).items()
    assert (result.returncode, "line 2" in result.stderr, "Traceback" in result.stderr) == (2, True, False)


@pytest.mark.slow
def test_operations_and_questions(tmp_path: Path) -> None:
    result = cases("load", tmp_path / "store", given=json.dumps(PUT))
    assert (result.returncode, json.loads(result.stdout)["status"], result.stderr) == (0, "PUT_OK", "")
    question = {"type": "offset_by_time", "topic": "T", "queue_id": 0, "timestamps": [PUT["at_ms"]]}
    result = cases("ask", tmp_path / "store", given=json.dumps(question))
    assert json.loads(result.stdout)["results"] == [[PUT["at_ms"], 0]]
    assert cases("ask", tmp_path / "none").returncode == 2


def test_it_loads_no_tool_of_the_tests(tmp_path: Path) -> None:
    names = ("pytest", "hypothesis", "jsonschema")
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({names})); import runpy; sys.argv = ['cases', 'bloom'];"
        "runpy.run_module('tests.cases', run_name='__main__')"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=CHECKOUT, input="", capture_output=True, text=True, env=environment()
    )
    assert (result.returncode, result.stderr) == (0, "")
