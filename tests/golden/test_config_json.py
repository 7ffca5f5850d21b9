"""Every JSON file that a real broker or broadcasting client left can be read, and is written back byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from librmq.java.json import ObjectKey, dumps, loads
from librmq.store.format.broker_tables import BrokerTables
from tests.budget import many
from tests.conftest import StoreCopy
from tests.reference import ABSENT, existing, folders, reference, store_folders

PATTERNS = ("**/config/*.json", "**/config/*.json.bak", "**/offsets.json", "**/offsets.json.bak")


def config_files() -> list[ParameterSet]:
    folder = reference().folder
    found = sorted(path for pattern in PATTERNS for path in folder.glob(pattern))
    nothing = pytest.mark.skip(reason=f"{ABSENT}no config files in {reference().origin}")
    return [pytest.param(path, id=str(path.relative_to(folder))) for path in found] or [
        pytest.param(None, marks=nothing)
    ]


@many
@pytest.mark.parametrize("path", config_files())
def test_real_files_are_written_again_as_they_were(path: Path) -> None:
    raw = path.read_bytes()
    assert dumps(loads(raw)).encode() == raw
    assert loads(raw.decode()) == loads(raw)


def test_offsets_of_a_broadcasting_client() -> None:
    for path in sorted(existing("clients-broadcast").glob("client/*/*/offsets.json")):
        table = loads(path.read_bytes())["offsetTable"]
        assert table
        for key, offset in table.items():
            assert isinstance(key, ObjectKey)
            assert dict(key).keys() == {"brokerName", "queueId", "topic"}
            assert isinstance(offset, int)


# Config files of real brokers can be read, and stay unchanged.


@many
@pytest.mark.parametrize("folder", [*store_folders(), *folders("clients-")])
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
