"""Kits with a topic ``t``."""

from __future__ import annotations

import pytest

from librmq.testing import Kit


@pytest.fixture
def one_queue(rmq: Kit) -> Kit:
    rmq.broker.create_topic("t", 1)
    return rmq


@pytest.fixture
def four_queues(rmq: Kit) -> Kit:
    rmq.broker.create_topic("t", 4)
    return rmq
