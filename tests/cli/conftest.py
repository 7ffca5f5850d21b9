"""A shell in a folder with a store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.stand import Shell, unpack_store


@pytest.fixture(scope="session")
def project_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of the project's own data, to be copied."""
    return unpack_store(tmp_path_factory.mktemp("project"))


@pytest.fixture
def shell(
    tmp_path: Path, project_store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Shell:
    """Commands in their own folder, with the project's store in ``store``."""
    shutil.copytree(project_store, tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    return Shell(tmp_path, capsys, monkeypatch)
