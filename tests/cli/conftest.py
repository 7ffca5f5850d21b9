"""A shell in a folder with a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.stand import Shell, unpack_store


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Commands in a folder of their own, with the project's store in ``store``."""
    unpack_store(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    return Shell(tmp_path, capsys, monkeypatch)
