"""The benchmark for Spark: its parts that need no session run, at a small scale."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.reference import CHECKOUT

pytest.importorskip("pyspark")


@pytest.mark.slow
def test_parts_without_a_session_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CHECKOUT))
    if importlib.util.find_spec("benchmarks") is None:
        pytest.fail("no benchmarks in the checkout")
    from benchmarks import spark
    from benchmarks.common import Bench

    bench = Bench(rounds=1, scratch=tmp_path, scale=0.002)
    for name in ("decoding", "starts", "writing"):
        rows = spark.ROWS[name](bench)
        assert rows
        assert all(row.measured > 0 for row in rows)
    assert "benchmarks.spark" in sys.modules
