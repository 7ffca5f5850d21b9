"""Fuzz every decoder: with the corpus, with a few blind changes, and for as long as the time of slow tests allows."""

from __future__ import annotations

import importlib.util
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from librmq.message import record
from librmq.runtime.compiled_core import CORE
from tests.budget import many
from tests.conftest import SlowBudget
from tests.fuzz.formats import CORPUS, TARGETS, mutants, seeds
from tests.programs import environment

ROUND = 20
OF_CORE = [pytest.mark.platform, pytest.mark.skipif(CORE.module is None, reason=CORE.state)]
"""Without the core its inputs call nothing."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence logging, because damage can be reported any number of times."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def test_each_target_has_beginnings_and_nothing_else_is_kept() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    for target in TARGETS:
        assert len(seeds(target)) >= 2
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 200_000


@many
@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus_does_no_harm(target: str) -> None:
    for data in seeds(target):
        TARGETS[target](data)


@many
@pytest.mark.parametrize("target", TARGETS)
def test_a_few_mutants_do_no_harm(target: str) -> None:
    for data in islice(mutants(target, Random(target)), 300 if target != "store" else 15):
        TARGETS[target](data)


@pytest.mark.slow
@pytest.mark.parametrize("target", [pytest.param(name, marks=OF_CORE if name == "core" else ()) for name in TARGETS])
def test_no_bytes_do_harm(target: str, slow_budget: SlowBudget, tmp_path: Path) -> None:
    """Fuzz by coverage if atheris is installed, and blindly if not."""
    if importlib.util.find_spec("atheris") is None:
        for number in slow_budget.rounds(2_000, f"rounds of {ROUND} changed {target} inputs", at_least=2):
            for data in islice(mutants(target, Random(number)), ROUND):
                TARGETS[target](data)
        return
    (tmp_path / "found").mkdir()
    variables = {"LIBRMQ_CORE": "on"} if target == "core" else {}  # without the core it fails, and counts nothing
    options = [f"-max_total_time={max(2, round(slow_budget.seconds))}", "-max_len=4096", "-timeout=60"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tests.fuzz.formats", target, *options, f"-artifact_prefix={tmp_path}/", "found"],
        cwd=tmp_path,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    harmful = [path.read_bytes() for path in tmp_path.iterdir() if path.is_file()]
    assert done.returncode == 0, f"{harmful} does harm: {done.stdout[-3000:]} {done.stderr[-3000:]}"
    runs = re.search(r"Done (\d+) runs in (\d+) second", done.stdout + done.stderr)
    assert runs is not None
    slow_budget.reached.append(f"{int(runs[1]):,} {target} inputs led by coverage in {runs[2]} s")


def test_harm_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_record(raw: bytes, position: int, limit: int, *, check_body: bool) -> int:
        return raw[limit]

    monkeypatch.setattr(record, "check_record", check_record)
    with pytest.raises(IndexError):
        TARGETS["record"](seeds("record")[0])
