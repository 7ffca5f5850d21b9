"""A store opened at an earlier moment equals a snapshot that was taken then."""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from librmq import Message, MessageStore, StoreConfig
from librmq.clock import ManualClock
from librmq.errors import ConfigError
from librmq.files._disk import DiskFiles
from tests.budget import examples

START_MS = 1_700_000_000_000
TOPICS = ("orders", "payments", "refunds")
KEYS = tuple(f"k{number}" for number in range(5))
CONFIG = StoreConfig.tiny(commitlog_file_size=4096, consumequeue_file_size=400, max_hash_slot_num=20, max_index_num=40)


class Taken(NamedTuple):
    """A snapshot, and the moment at which it was taken."""

    folder: Path
    log_end: int
    time: datetime


def append(store: MessageStore, chance: Random, clock: ManualClock) -> None:
    clock.advance(seconds=chance.randrange(1, 3000) / 1000)
    keys = chance.sample(KEYS, chance.randrange(3))
    message = Message(chance.choice(TOPICS), bytes(chance.randrange(300)), keys=keys)
    if chance.random() < 0.2:
        store.append_batch([message, Message(message.topic, b"second")])
    else:
        store.append(message, chance.randrange(3))


def content(store: MessageStore) -> dict[str, Any]:
    """Return everything that a reader sees."""
    return {
        "log": (store.log.begin, store.log.end, [message.raw for message in store]),
        "queues": {
            name: (queue.min_offset, queue.max_offset, queue.max_physic_offset)
            for name, queue in sorted(store.queues.items())
        },
        "read": {
            name: [found.physical_offset for found in store.read(*name, queue.min_offset).messages]
            for name, queue in sorted(store.queues.items())
        },
        "index": {
            (topic, key, limit): [found.physical_offset for found in store.find_by_key(topic, key, max_messages=limit)]
            for topic in TOPICS
            for key in KEYS
            for limit in (2, 64)
        },
    }


def moments(store: MessageStore, chance: Random, clock: ManualClock, folder: Path, count: int) -> list[Taken]:
    """Append messages, and take snapshots in between."""
    taken = []
    for number in range(count):
        for _ in range(chance.randrange(1, 12)):
            append(store, chance, clock)
        target = folder / str(number)
        store.snapshot(target)
        taken.append(Taken(target, store.log.end, datetime.fromtimestamp(clock.now_ms() / 1000, UTC)))
        clock.advance(seconds=chance.randrange(1, 100) / 1000)
    return taken


@pytest.mark.slow
@pytest.mark.parametrize("state", ["in use", "closed", "killed"])
def test_a_moment_equals_the_snapshot_of_it(state: str, tmp_path: Path) -> None:
    chance, clock, path = Random(state), ManualClock(START_MS), tmp_path / "store"
    store = MessageStore.open(path, CONFIG, clock=clock)
    taken = moments(store, chance, clock, tmp_path / "snapshots", max(8, examples(34)))
    if state == "closed":
        store.close()
    elif state == "killed":
        shutil.copytree(path, tmp_path / "killed", ignore=shutil.ignore_patterns("lock"))
        path = tmp_path / "killed"
    before = DiskFiles().list(os.fspath(path / "commitlog"))
    for then in taken:
        with MessageStore.open(then.folder, read_only=True, clock=clock) as opened:
            expected = content(opened)
        for moment in (then.log_end, then.time):
            with MessageStore.open(path, read_only=True, at=moment, clock=clock) as opened:
                assert content(opened) == expected
                assert not opened.refresh()
                assert (opened.recovered, opened.cut_short) == ([], None)
    assert DiskFiles().list(os.fspath(path / "commitlog")) == before
    store.close()


def test_moments_that_no_store_had_are_refused(tmp_path: Path) -> None:
    clock, path = ManualClock(START_MS), tmp_path / "store"
    with MessageStore.open(path, CONFIG, clock=clock) as store:
        store.append(Message("orders", b"x"))
        end = store.log.end
    for moment in (-1, end + 1, datetime.fromtimestamp(START_MS / 1000 - 1, UTC), datetime(2100, 1, 1)):
        with pytest.raises(ConfigError, match=r"^at: expected"):
            MessageStore.open(path, read_only=True, at=moment)
    with pytest.raises(TypeError, match=r"^at: expected"):
        MessageStore.open(path, read_only=True, at="now")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^at: expected read_only=True"):
        MessageStore.open(path, at=end)
    with MessageStore.open(path, read_only=True, at=0) as opened:
        assert (list(opened), list(opened.queues)) == ([], [])
    with MessageStore.open(path, read_only=True, at=datetime(2100, 1, 1, tzinfo=UTC)) as opened:
        assert opened.log.end == end
        with pytest.raises(ConfigError, match=r"^at: expected a store of the present"):
            opened.snapshot(tmp_path / "copy")
