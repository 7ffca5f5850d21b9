"""Stores of each release and each kind of broker open, are continued and are sound; see ``tests/data/README.md``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from librmq import ManualRunner, PushConsumer
from librmq.broker import Broker, BrokerConfig
from librmq.clock import ManualClock
from librmq.dedup import DedupListener
from librmq.errors import CorruptionError, NotAStoreError
from librmq.idempotence import SqliteDedupStore
from librmq.message.message import Message
from librmq.store import MessageStore
from librmq.store.recovery._verify import verify
from tests.budget import many
from tests.reference import COMPACT, unpack
from tests.stores import derived, from_disk, with_fields
from tests.stores_of_5 import KINDS, keep_queues_elsewhere, state_of

LATER_MS = 1_800_000_000_000
OLD = {
    "rocketmq-4.9.4": ("store-basic", 394, "51278d3869344b06"),
    "rocketmq-5.3.3": ("stores/rocketmq-5.3.3", 70, "9d03c637383271c3"),
    "librmq-0.1.0": ("stores/librmq-0.1.0", 34, "b8d2929208423ee1"),
}
"""The archive of each store, the number of its messages, and their digest."""

Unpack = Callable[[str], Path]


@pytest.fixture
def old(tmp_path: Path) -> Unpack:
    def unpacked(name: str) -> Path:
        unpack(COMPACT / f"{OLD[name][0]}.tar.xz", tmp_path)
        return next(path.parent for path in tmp_path.rglob("commitlog"))

    return unpacked


def digest(store: MessageStore, end: int) -> tuple[int, str]:
    """Return number and digest of the messages before a physical offset, with their places and all that they hold."""
    messages = [message for message in store if message.physical_offset < end]
    places = [(message.topic, message.queue_id, message.queue_offset, message.raw) for message in messages]
    return len(messages), hashlib.sha256(repr(places).encode()).hexdigest()[:16]


def check_continued(path: Path, name: str) -> None:
    """Append to the store, find and read what is new and what is old, and verify all of it."""
    with MessageStore.open(path, clock=ManualClock(LATER_MS)) as store:
        end = store.log.end
        assert digest(store, end) == OLD[name][1:]
        for number in range(30):
            store.append(Message("T", b"new %d" % number, keys=f"new-{number}"), number % 2)
    with MessageStore.open(path, clock=ManualClock(LATER_MS)) as store:
        assert digest(store, end) == OLD[name][1:]
        assert [message.body for message in store.find_by_key("T", "new-7")] == [b"new 7"]
        first, last = store.queue_range("T", 1)
        assert store.read("T", 1, last - 1).messages[0].body == b"new 29"
        assert last - first >= 15
    assert verify(path).sound


@pytest.mark.parametrize("name", OLD)
def test_an_old_store_opens_unchanged_and_continues(name: str, old: Unpack) -> None:
    path = old(name)
    before = derived(from_disk(path))
    assert verify(path).sound
    with MessageStore.open(path, clock=ManualClock(LATER_MS)) as store:
        assert store.recovered == []
    assert derived(from_disk(path)) == before
    check_continued(path, name)


@pytest.mark.parametrize("name", OLD)
def test_an_old_store_that_was_killed_recovers(name: str, old: Unpack) -> None:
    path = old(name)
    (path / "abort").touch()
    (path / "librmq" / "closed.json").unlink(missing_ok=True)
    check_continued(path, name)


def of_a_later_version(path: Path, name: str) -> None:
    """Give one of librmq's own files in the store a version that this librmq does not know."""
    file = path / "librmq" / f"{name}.json"
    file.write_bytes(with_fields(file.read_bytes() if file.exists() else None, version=2))
    file.with_name(f"{name}.json.bak").unlink(missing_ok=True)


@many
@pytest.mark.parametrize("name", ["closed", "flushed", "retention"])
def test_a_file_of_a_later_version_counts_as_missing(name: str, old: Unpack) -> None:
    path = old("librmq-0.1.0")
    of_a_later_version(path, name)
    Broker.open(path, BrokerConfig(hops=True), runner=ManualRunner(ManualClock(LATER_MS))).close()
    check_continued(path, "librmq-0.1.0")


@pytest.mark.parametrize("name", ["cancelled", "config", "replica", "settings"])
def test_a_file_of_a_later_version_is_refused(name: str, old: Unpack) -> None:
    path = old("librmq-0.1.0")
    of_a_later_version(path, name)
    before = derived(from_disk(path))
    with pytest.raises(
        CorruptionError, match=rf"{name}\.json: .*expected version 1, found version 2 of a later librmq"
    ):
        Broker.open(path, BrokerConfig(hops=True), runner=ManualRunner(ManualClock(LATER_MS)))
    assert derived(from_disk(path)) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_with_queues_in_rocksdb_is_only_read(kind: str, old: Unpack) -> None:
    path = old("rocketmq-5.3.3")
    keep_queues_elsewhere(path, kind)
    before = state_of(path)
    with MessageStore.open(path, read_only=True) as store:
        assert digest(store, store.log.end) == OLD["rocketmq-5.3.3"][1:]
        assert store.queue_range("T", 0)[1] > 0
    assert verify(path).sound
    with pytest.raises(NotAStoreError, match="RocksDB"):
        MessageStore.open(path)
    assert state_of(path) == before


def test_a_group_continues_in_an_old_store(old: Unpack) -> None:
    """With its progress, its filter, what waits, and what was cancelled; the guard knows what was consumed."""
    path = old("librmq-0.1.0")
    runner = ManualRunner(ManualClock(1_700_000_200_000))
    bodies: list[bytes] = []
    with (
        Broker.open(path, BrokerConfig(hops=True), runner=runner) as broker,
        SqliteDedupStore(path / "guard.sqlite", clock=runner.clock) as guard,
    ):
        consumer = PushConsumer(broker, "billing")
        listener = DedupListener(
            lambda message: bodies.append(message.body), guard, group="billing", clock=runner.clock
        )
        consumer.subscribe("orders", sql="amount > 3 OR amount IS NULL")(listener)
        with consumer:
            for _ in range(6):
                runner.advance(3_600_000)
    orders = [(b"order %d " % number) * (1 if number % 5 else 30) for number in range(12, 24)]
    assert sorted(bodies) == sorted(
        [*(b"batched %d" % number for number in range(3)), b"by level", b"by time", *orders]
    )
