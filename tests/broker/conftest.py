"""The broker of the kit; the marker ``rmq`` gives its settings."""

from __future__ import annotations

import pytest

from librmq.broker import Broker
from librmq.testing import Kit


@pytest.fixture
def broker(rmq: Kit) -> Broker:
    return rmq.broker
