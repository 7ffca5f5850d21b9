"""Config files of real brokers can be read, and stay unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from librmq.store.format.broker_tables import BrokerTables
from tests.conftest import StoreCopy
from tests.reference import folders


@pytest.mark.parametrize("folder", [*folders("store-"), *folders("clients-")])
def test_real_files_are_read_and_kept(folder: Path, store_copy: StoreCopy) -> None:
    config = store_copy(folder) / "config"
    before = {path.name: path.read_bytes() for path in config.iterdir() if path.is_file()}
    assert "topics.json" in before
    tables = BrokerTables.open(str(config))
    tables.persist(1)
    after = {path.name: path.read_bytes() for path in config.iterdir() if path.is_file()}
    assert {name: after[name] for name in before} == before
    tables.set_topic("another", read_queues=1, write_queues=1, permission=6)
    tables.persist(2)
    assert (config / "topics.json.bak").read_bytes() == before["topics.json"]
