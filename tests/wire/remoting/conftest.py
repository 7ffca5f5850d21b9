"""Fixtures for a broker that is served to clients of 4.x, with a clock that tests move."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from librmq import Broker
from librmq.clock import ManualClock
from librmq.runtime import ManualRunner
from librmq.wire.remoting import RemotingServer
from tests.wire.remoting_client import RawClient

BEGIN_MS = 1_000_000


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker.temporary(runner=ManualRunner(ManualClock(BEGIN_MS))) as made:
        yield made


@pytest.fixture
def server(broker: Broker) -> Iterator[RemotingServer]:
    with RemotingServer(broker) as made:
        yield made


@pytest.fixture
def client(server: RemotingServer) -> Iterator[RawClient]:
    with RawClient(server.port) as made:
        yield made
