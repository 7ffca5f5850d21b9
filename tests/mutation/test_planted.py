"""Each planted bug is found by the history of a program, which has no anomaly without the bug."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.budget import many
from tests.conftest import SlowBudget
from tests.judged.faults import FAULTS
from tests.mutation.planted import BUGS, SHARES, Bug
from tests.mutation.programs import PROGRAMS, anomalies_of
from tests.mutation.trusted import BUGS as TRUSTED
from tests.programs import environment
from tests.reference import CHECKOUT

QUICK = "late-commit"
"""The planted bug of the quick check."""


@many
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_keeps_all_promises(name: str) -> None:
    assert anomalies_of(name) == []


def test_each_planted_bug_has_its_place() -> None:
    for edit in [edit for bug in BUGS for edit in bug.edits] + [fault.edit for fault in FAULTS]:
        compile(edit.source(), edit.file, "exec")


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(bug, id=bug.name, marks=[pytest.mark.slow] * (bug.name != QUICK))
        for bug in BUGS
        if bug.program != SHARES  # minutes of real time each: `python -m tests.mutation.planted NAME`
    ],
)
def test_a_history_finds_a_planted_bug(bug: Bug) -> None:
    command = [sys.executable, "-m", "tests.mutation.planted", bug.name]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert bug.anomaly in json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["finished-not-kept", "older-position", "acknowledged-in-flight"])
def test_the_simulation_finds_a_bug_of_kept_progress(name: str) -> None:
    """Bounded in runs, because the seed of each is its number, however long a machine needs for it."""
    command = [sys.executable, "-m", "tests.mutation.planted", name, "inf", "24"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert re.search("found in run .*: repeat: .* was kept", done.stdout), done.stdout + done.stderr


def test_the_page_lists_what_rocketmq_had() -> None:
    page = (CHECKOUT / "tests" / "mutation" / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| \[(\S+)\].*\| `(\S+)` \| `(\S+)` \|$", page, re.MULTILINE)
    assert sorted(rows) == sorted((bug.issue, bug.name, bug.anomaly) for bug in BUGS if bug.issue)
    assert len(rows) >= 10


# Each file that one has to trust has a bug that a test finds.


def test_each_trusted_file_has_a_planted_bug() -> None:
    rows = json.loads((CHECKOUT / "tests" / "judged" / "facts.json").read_text("utf-8"))["trusted"]
    assert sorted({bug.edit.file for bug in TRUSTED}) == sorted(
        name.removeprefix("librmq/") for row in rows for name in row["files"]
    )
    for bug in TRUSTED:
        compile(bug.edit.source(), bug.edit.file, "exec")
        path, _, name = bug.test.partition("[")[0].partition("::")
        assert f"def {name}(" in (CHECKOUT / path).read_text("utf-8"), bug.test


@pytest.mark.slow
def test_a_test_finds_the_bug_in_a_trusted_file(slow_budget: SlowBudget) -> None:
    """`python -m tests.mutation.trusted` tries all at once."""
    for number in slow_budget.rounds(len(TRUSTED), "bugs planted in trusted files", at_least=2):
        command = [sys.executable, "-m", "tests.mutation.trusted", TRUSTED[number % len(TRUSTED)].edit.file]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
