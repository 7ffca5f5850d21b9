"""Every available real store is opened, recovered and continued. Tests of commands cover what is read from it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.message.message import Message
from librmq.store import MessageStore
from librmq.store.recovery._verify import verify
from tests.conftest import StoreCopy
from tests.reference import Row, rows, store_folders
from tests.stores import from_disk

pytestmark = pytest.mark.parametrize("folder", store_folders())

NOW = 2_000_000_000_000


def config_of(folder: Path) -> StoreConfig:
    return StoreConfig.from_row(rows(folder, "config")[0])


@cache
def sound_as_left(folder: Path) -> bool:
    """Return whether the store was closed cleanly and has not been damaged since."""
    store = folder / "store"
    return not rows(folder, "config")[0]["abort_file_present"] and verify(str(store), config_of(folder)).sound


@pytest.fixture
def path(folder: Path, store_copy: StoreCopy) -> Path:
    return store_copy(folder)


def queues_of(row: Row) -> dict[tuple[str, int], tuple[int, int, int]]:
    """Return the queues that have entries; RocketMQ also lists delay queues without files."""
    return {
        (queue["topic"], queue["queue_id"]): (queue["min_offset"], queue["max_offset"], queue["max_physic_offset"])
        for queue in row["queues"]
        if queue["max_offset"]
    }


def test_opening_a_cleanly_closed_store_changes_nothing(folder: Path, path: Path) -> None:
    if not sound_as_left(folder):
        return
    before = from_disk(path)
    for _ in range(2):
        with MessageStore.open(path, config_of(folder), clock=ManualClock(NOW)) as store:
            assert store.recovered == []
    after = {name: data for name, data in from_disk(path).items() if not name.startswith("librmq")}
    assert after == before


def test_recovering_agrees_and_continues(folder: Path, path: Path) -> None:
    config = config_of(folder)
    with MessageStore.open(path, config, thorough=True, clock=ManualClock(NOW)) as store:
        after_start = queues_of(rows(folder, "store")[1])
        assert {name: queue.max_offset for name, queue in store.queues.items() if queue.max_offset} == {
            name: high for name, (_, high, _) in after_start.items()
        }
        assert len(list(store)) == len(rows(folder, "message"))
        assert store.recover() == []
        end = store.log.end
        for (topic, queue_id), (_, high, _) in sorted(after_start.items()):
            assert store.append(Message(topic, b"more", keys="more"), queue_id).queue_offset == high
    verdict = verify(str(path), config)
    assert verdict.sound, verdict.damage
    with MessageStore.open(path, config, clock=ManualClock(NOW)) as store:
        assert store.recovered == []
        for topic, queue_id in after_start:
            assert store.find_by_key(topic, "more")
            assert store.read(topic, queue_id, after_start[topic, queue_id][1]).messages[0].body == b"more"
        assert store.log.end > end
