"""The benchmarks run at a tiny size; their results do not matter here."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import facts
import pytest

from tests.reference import CHECKOUT

SUBJECTS = sorted(path.stem for path in (CHECKOUT / "benchmarks" / "results").glob("*.md"))
LIMITS = {
    "raw write, unbuffered",
    "raw slices of records",
    "raw crc32",
    "raw pwrite and fdatasync",
    "flushes of the disk",
}


def load(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """Import a module of ``benchmarks``; installed modules come first on the path."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(CHECKOUT)])
    return importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def frame(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load(monkeypatch, "frame")


def tried_cases(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """Return the cases of a benchmark that are tried here."""
    cases = [case for case in load(monkeypatch, name).CASES if "pyspark" not in case.needs]
    if name in ("celery", "growth", "kombu"):
        # The smallest size of each, and one process instead of four.
        cases = list({(case.name, case.against): case for case in reversed(cases)}.values())
    if name == "celery":
        cases = [case for case in cases if case.against == "Redis"]  # each run starts a worker, which takes seconds
    return cases


@pytest.mark.slow
@pytest.mark.platform
@pytest.mark.parametrize("name", [name for name in SUBJECTS if name != "figures"])  # those are cases of others
def test_each_case_is_measured(monkeypatch: pytest.MonkeyPatch, frame: ModuleType, tmp_path: Path, name: str) -> None:
    if name == "timers" and sys.platform != "linux":
        pytest.skip("needs /proc/self/status")
    cases = tried_cases(monkeypatch, name)
    rows, _ = frame.measure(cases, frame.Bench(rounds=1, scratch=tmp_path, scale=0.002, warm_up=0))
    assert rows or name in ("core", "django_tasks")  # the tests do without the database backend of django-tasks
    for row in rows:
        assert row.measured > 0 or row.unit in ("MiB", "% of a core"), row
        assert row.limit or row.against not in LIMITS, row
    assert not list(tmp_path.iterdir())  # nothing is left


@pytest.mark.parametrize("name", SUBJECTS)
def test_recorded_rows_have_their_case(monkeypatch: pytest.MonkeyPatch, frame: ModuleType, name: str) -> None:
    cases = {(case.name, case.detail) for case in load(monkeypatch, name).CASES}
    rows, _ = frame.recorded()[name]
    assert {(row.name, row.detail) for row in rows} <= cases


def test_the_figures_of_the_readme_are_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {(case.name, case.detail, case.against) for case in load(monkeypatch, "figures").CASES}
    assert {words[2:5] for words in facts.FIGURES} <= cases


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_page_shows_the_results(frame: ModuleType, name: str) -> None:
    guide = (CHECKOUT / "docs" / "performance.md").read_text("utf-8")
    rows, measured_on = frame.recorded()[name]
    picture = CHECKOUT / "docs" / "performance" / f"{name}.svg"
    assert f"](../benchmarks/results/{name}.md)" in guide
    assert (f"](performance/{name}.svg)" in guide) == picture.is_file()
    assert (frame.TABLES / f"{name}.md").read_text("utf-8") == frame.page(name, rows, measured_on)
    if picture.is_file() and name not in ("growth", "tail"):  # curves
        words = " ".join(ElementTree.parse(picture).getroot().itertext())
        assert all(frame.cells(row)[3] in words for row in rows if row.unit == "×")
