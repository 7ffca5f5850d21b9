"""Stores of each release and each kind of broker open, are continued and are sound; see ``tests/data/README.md``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from librmq import ManualRunner, PushConsumer
from librmq.broker import Broker, BrokerConfig
from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.dedup import DedupListener
from librmq.errors import CorruptionError, NotAStoreError
from librmq.idempotence import SqliteDedupStore
from librmq.message.message import Message
from librmq.store import MessageStore
from librmq.store.recovery._verify import verify
from tests.budget import many
from tests.reference import COMPACT, unpack
from tests.stores import derived, from_disk
from tests.stores_of_5 import KINDS, keep_queues_elsewhere, state_of

LATER_MS = 1_800_000_000_000
OLD = {
    "rocketmq-4.9.4": ("store-basic", 394, "51278d3869344b06"),
    "rocketmq-5.3.3": ("stores/rocketmq-5.3.3", 70, "9d03c637383271c3"),
    "librmq-0.1.0-early": ("stores/librmq-0.1.0-early", 51, "5dbec9b9407ba173"),
    "librmq-0.1.0": ("stores/librmq-0.1.0", 34, "5601eadb78741618"),
}
"""The archive of each store, the number of its messages, and their digest."""
EARLY = StoreConfig.tiny(
    commitlog_file_size=4096,
    consumequeue_file_size=400,
    consumequeue_ext_file_size=256,
    max_hash_slot_num=8,
    max_index_num=32,
    max_message_size=3000,
    enable_consumequeue_ext=True,
    message_delay_level="1s 5s 10s 1m",
)
"""Of the early store, which did not keep its delay levels yet."""

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
    text = file.read_text("utf-8") if file.exists() else '{"version": 1}'
    file.write_text(re.sub(r',"crc32":.*', "}", re.sub(r'"version": ?1', '"version": 2', text)), "utf-8")
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


@pytest.mark.parametrize(
    ("name", "config", "waited"),
    [
        ("librmq-0.1.0-early", EARLY, [b"delayed", *(b"order %d" % number for number in range(40, 50))]),
        (
            "librmq-0.1.0",
            None,
            [*(b"batched %d" % number for number in range(3)), b"by level", b"by time", *range(12, 24)],
        ),
    ],
)
def test_a_group_continues_in_an_old_store(
    name: str, config: StoreConfig | None, waited: list[bytes | int], old: Unpack
) -> None:
    """With its progress, its filter, what waits, and what was cancelled; the guard knows what was consumed."""
    path = old(name)
    runner = ManualRunner(ManualClock(1_700_000_200_000))
    bodies: list[bytes] = []
    with (
        Broker.open(path, BrokerConfig(hops=True), store_config=config, runner=runner) as broker,
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
    orders = {number: (b"order %d " % number) * (1 if number % 5 else 30) for number in range(24)}
    assert sorted(bodies) == sorted(orders[body] if isinstance(body, int) else body for body in waited)
