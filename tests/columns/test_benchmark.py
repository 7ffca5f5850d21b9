"""The benchmark for columns runs, at a small scale."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reference import CHECKOUT

pytest.importorskip("pyarrow")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reading", "processes", "exporting"])
def test_each_part_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.syspath_prepend(str(CHECKOUT))
    from benchmarks import columns
    from benchmarks.common import Bench

    rows = columns.ROWS[name](Bench(rounds=1, scratch=tmp_path, scale=0.002))
    assert rows
    assert all(row.measured > 0 for row in rows)
