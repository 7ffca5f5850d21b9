"""Fixtures for commands that run in a folder with a store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from librmq import Broker
from librmq.wire.remoting import RemotingServer
from tests.cli.stand import Shell, unpack_store


@pytest.fixture(scope="session")
def project_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the store that comes with the project; tests copy it."""
    return unpack_store(tmp_path_factory.mktemp("project"))


@pytest.fixture
def shell(
    tmp_path: Path, project_store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Shell:
    """Run commands in a new folder, with a copy of the project's store in ``store``."""
    shutil.copytree(project_store, tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    return Shell(tmp_path, capsys, monkeypatch)


@pytest.fixture
def cluster() -> Iterator[Broker]:
    """Open a broker that commands ask over TCP."""
    with Broker.temporary() as broker:
        yield broker


@pytest.fixture
def server(cluster: Broker) -> Iterator[RemotingServer]:
    """Serve it."""
    with RemotingServer(cluster) as server:
        yield server
