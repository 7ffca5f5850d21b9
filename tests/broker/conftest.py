"""The kit's broker as a fixture; the marker ``rmq`` sets its configuration."""

from __future__ import annotations

import pytest

from librmq.broker import Broker
from librmq.testing import Kit


@pytest.fixture
def broker(rmq: Kit) -> Broker:
    return rmq.broker
