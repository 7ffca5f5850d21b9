"""The benchmark of the stores runs, at a tiny size; what it measures is nobody's concern here."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.reference import CHECKOUT

CASES = {"sqlite": "SQLite", "redis": "Redis"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_row_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(CHECKOUT)])
    common = importlib.import_module("benchmarks.common")
    dedup = importlib.import_module("benchmarks.dedup")
    assert list(dedup.ROWS) == ["sqlite", "postgresql", "mysql", "redis"]
    rows = dedup.ROWS[name](common.Bench(rounds=1, scratch=tmp_path, scale=0.005))
    assert {row.case for row in rows} == {CASES[name]}
    paths = ["claim and mark", "guarded delivery", "guarded delivery, lists of 32"]
    assert [row.path for row in rows] == (paths if name == "redis" else paths[:2])
    assert all(row.measured > 0 for row in rows)
    assert "<!-- dedup: generated, do not edit -->" in common.PERFORMANCE.read_text("utf-8")
    assert not list(tmp_path.iterdir())  # nothing is left behind
