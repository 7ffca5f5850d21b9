"""A served broker, and a bare client of its calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from librmq import Broker, BrokerConfig, TimerConfig

pytest.importorskip("grpc")


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker.temporary(BrokerConfig(timers=TimerConfig())) as made:
        yield made
