"""Fixtures for a served broker and the official clients."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from librmq import Broker, BrokerConfig, TimerConfig
from librmq.wire.grpc import GrpcServer
from tests.cli.stand import errors_of
from tests.programs import Process
from tests.wire.clients import PYTHON_VERSIONS, OfficialClient, node_client, python_client
from tests.wire.stub import Stub

pytest.importorskip("grpc")


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker.temporary(BrokerConfig(timers=TimerConfig())) as made:
        yield made


@pytest.fixture
def server(broker: Broker) -> Iterator[GrpcServer]:
    with GrpcServer(broker) as made:
        yield made


@pytest.fixture
def stub(server: GrpcServer) -> Iterator[Stub]:
    """Connect a bare client to it."""
    with Stub(server.address) as made:
        yield made


@pytest.fixture(scope="session")
def client_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the fetched clients."""
    cache = getattr(request.config, "cache", None)
    return Path(cache.mkdir("clients")) if cache is not None else tmp_path_factory.mktemp("clients")


@pytest.fixture
def python(client_cache: Path) -> OfficialClient:
    return python_client(PYTHON_VERSIONS[0], client_cache)


@pytest.fixture
def node(client_cache: Path) -> OfficialClient:
    return node_client(client_cache)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Process[str]]:
    """Start ``librmq serve`` on a free port."""
    command = [sys.executable, "-m", "librmq", "serve", str(tmp_path / "store"), "--grpc", "0"]
    with Process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as made:
        yield made
        if made.poll() is None:
            made.kill()


def ready(serving: Process[str]) -> str:
    """Wait for the ready line of a serving process; return its gRPC address."""
    row = json.loads(serving.stdout.readline())
    assert (row["ready"], errors_of("serve", row)) == (True, [])
    return str(row["grpc"])
