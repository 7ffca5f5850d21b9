"""A store that an earlier librmq wrote opens unchanged.

``older-store.tar.xz`` was written before the modules moved into rooms, with tiny files, and closed cleanly. It holds
50 messages in two queues with extension files, one delayed message, the key index, and a group with an SQL filter and
progress. It is never regenerated.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from librmq import ManualRunner, PushConsumer
from librmq.broker import Broker
from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.store import MessageStore
from librmq.store.recovery.verify import verify
from tests.stores import derived, from_disk

CONFIG = StoreConfig.tiny(
    commitlog_file_size=4096,
    consumequeue_file_size=400,
    consumequeue_ext_file_size=256,
    max_hash_slot_num=8,
    max_index_num=32,
    max_message_size=3000,
    enable_consumequeue_ext=True,
    message_delay_level="1s 5s 10s 1m",
)
LATER_MS = 1_700_000_200_000


@pytest.fixture
def older(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).with_name("older-store.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "store"


def test_an_older_store_opens_unchanged(older: Path) -> None:
    before = derived(from_disk(older))
    assert verify(older, CONFIG).sound
    with MessageStore.open(older, clock=ManualClock(LATER_MS)) as store:
        assert store.recovered == []
        assert len(list(store)) == 51
        assert [message.body for message in store.find_by_key("orders", "k7")] == [b"order 7"]
        assert store.queue_range("orders", 0)[1] + store.queue_range("orders", 1)[1] == 50
    assert derived(from_disk(older)) == before


def test_an_older_store_that_was_killed_recovers(older: Path) -> None:
    before = derived(from_disk(older))
    (older / "abort").touch()
    (older / "librmq" / "closed.json").unlink()
    with MessageStore.open(older, CONFIG, clock=ManualClock(LATER_MS)) as store:
        assert len(list(store)) == 51
    assert {path: data for path, data in derived(from_disk(older)).items() if "index" not in path} == {
        path: data for path, data in before.items() if "index" not in path
    }
    assert verify(older, CONFIG).sound


def test_a_group_continues_in_an_older_store(older: Path) -> None:
    runner = ManualRunner(ManualClock(LATER_MS))
    seen: list[bytes] = []
    with Broker.open(older, store_config=CONFIG, runner=runner) as broker:
        consumer = PushConsumer(broker, "billing")
        consumer.subscribe("orders", sql="amount > 3 OR amount IS NULL")(lambda message: seen.append(message.body))
        consumer.start()
        runner.advance(120_000)
        consumer.shutdown()
    assert sorted(seen) == [b"delayed", *(b"order %d" % number for number in range(40, 50))]
