"""Call commands, to compare what they print with what a page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.stand import Shell


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Run commands in a new folder."""
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys, monkeypatch)
