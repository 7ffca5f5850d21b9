"""Call commands, to compare what they print with what a page shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from librmq import Broker, ManualRunner
from tests.cli.stand import Shell


@pytest.fixture
def runner() -> ManualRunner:
    return ManualRunner()


@pytest.fixture
def broker(tmp_path: Path, runner: ManualRunner) -> Iterator[Broker]:
    """Open a broker in a new folder."""
    with Broker.open(tmp_path / "store", runner=runner) as opened:
        yield opened


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Run commands in a new folder."""
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys, monkeypatch)
