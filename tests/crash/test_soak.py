"""The threaded broker under all loads together, killed repeatedly: its history has no anomaly, and its store is sound.

`tests.soak.run` runs the broker with its clients in a process of its own, and kills it without warning.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from librmq.broker import Broker
from librmq.config import StoreConfig
from librmq.store.recovery._verify import verify
from librmq.testing import check_history
from tests.conftest import SlowBudget
from tests.soak.run import Soak, SoakPlan

pytestmark = [
    pytest.mark.platform,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be killed"),
]

STORE = StoreConfig(commitlog_file_size=256 << 10, max_total_size=1 << 30)


@pytest.mark.slow
def test_every_message_is_consumed_by_every_group(tmp_path: Path, slow_budget: SlowBudget) -> None:
    for number in slow_budget.rounds(30, "rounds of kills", at_least=1):
        rng = random.Random(number)
        path = tmp_path / f"store-{number}"
        Broker.open(path, store_config=STORE).close()  # which keeps its sizes
        plan = SoakPlan(
            store=path, recordings=tmp_path / f"recordings-{number}", seconds=rng.choice([1, 3, 6]), rate=1_000,
            fault_every_s=rng.choice([0.2, 0.5, 2]), seed=number,
        )  # fmt: skip
        events = Soak(plan).run()
        assert check_history(events) == []
        assert any(event["event"] == "send" and event["outcome"] == "ok" for event in events)
        verdict = verify(str(path))
        assert verdict.sound, verdict.damage
