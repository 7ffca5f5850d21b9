"""The benchmark of shares runs, at a tiny size."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.reference import CHECKOUT


@pytest.mark.slow
def test_each_row_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(CHECKOUT)])
    common = importlib.import_module("benchmarks.common")
    allocate = importlib.import_module("benchmarks.allocate")
    assert list(allocate.ROWS) == ["allocation"]
    rows = allocate.ROWS["allocation"](common.Bench(rounds=1, scratch=tmp_path, scale=0.001))
    assert {row.case for row in rows} == {
        "consistent hash",
        "consistent hash, ring rebuilt",
        "consistent hash, with sorting",
        "averagely",
    }
    assert all(row.measured > 0 for row in rows)
    assert "<!-- allocate: generated, do not edit -->" in common.PERFORMANCE.read_text("utf-8")
