"""Commands on stores that tests of the diagnosis make."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.stand import Shell


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Run commands in this process."""
    return Shell(tmp_path, capsys, monkeypatch)
