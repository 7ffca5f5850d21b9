"""The benchmarks of transactions and timers run, at a tiny size."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.reference import CHECKOUT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("transactions", ["committed", "check"]),
        pytest.param(
            "timers",
            ["timer", "due", "memory"],
            marks=[
                pytest.mark.platform,
                pytest.mark.skipif("sys.platform != 'linux'", reason="needs /proc/self/status"),
            ],
        ),
    ],
)
def test_each_row_is_measured(name: str, rows: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(CHECKOUT)])
    common = importlib.import_module("benchmarks.common")
    benchmark = importlib.import_module(f"benchmarks.{name}")
    assert list(benchmark.ROWS) == rows
    for part in benchmark.ROWS.values():
        (row,) = part(common.Bench(rounds=1, scratch=tmp_path, scale=0.002))
        assert row.measured > 0 or row.unit == " MiB"
    text = common.PERFORMANCE.read_text("utf-8")
    assert f"<!-- {name}: generated, do not edit -->" in text
