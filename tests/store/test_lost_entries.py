"""Recovery of a queue that has a record of another queue, or an entry without a record."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from librmq import Message
from librmq.config import StoreConfig
from librmq.consumequeue import ENTRY, ConsumeQueue
from librmq.message.record import MESSAGE_MAGIC, QUEUE_ID_AT
from librmq.store import MessageStore
from librmq.store.recovery.verify import verify
from tests.budget import many

CONFIG = StoreConfig.tiny(commitlog_file_size=16_384)
WITH_UNITS = StoreConfig.tiny(commitlog_file_size=16_384, enable_consumequeue_ext=True)


def change(folder: Path, physical_offset: int, data: bytes, config: StoreConfig = CONFIG) -> None:
    start = physical_offset - physical_offset % config.commitlog_file_size
    with open(folder / "commitlog" / f"{start:020d}", "r+b") as file:
        file.seek(physical_offset - start)
        file.write(data)


def filled(folder: Path, config: StoreConfig = CONFIG, count: int = 300) -> list[int]:
    """Append messages to three queues in turn; return their places."""
    with MessageStore.open(folder, config) as store:
        return [
            store.append(Message("Topic", b"%d" % n, tags=f"t{n % 5}", keys=f"k{n}"), n % 3).physical_offset
            for n in range(count)
        ]


def bodies(folder: Path, queue_id: int) -> list[int]:
    with MessageStore.open(folder, read_only=True) as store:
        return [int(message.body) for message in store.messages("Topic", queue_id)]


def broker_gives(folder: Path, queue_id: int, config: StoreConfig = CONFIG) -> list[int]:
    """Return what a broker's pulls of 32 give. At an entry without a record it skips to the next file."""
    given: list[int] = []
    with MessageStore.open(folder, read_only=True) as store:
        queue, size = store.queues["Topic", queue_id], config.commitlog_file_size
        at = queue.min_offset
        while at < queue.max_offset:
            skip_below, found = -(1 << 63), 0
            for place, length, _ in ENTRY.iter_unpack(queue.read(at, 1000)):
                if place >= skip_below:
                    if found == 32:
                        break
                    raw = b"" if place % size + length > size else store.log.data_at(place, length)
                    if raw:
                        assert struct.unpack_from(">II", raw) == (length, MESSAGE_MAGIC)
                        message = store.message_at(place)
                        assert message is not None
                        given.append(int(message.body))
                        skip_below, found = -(1 << 63), found + 1
                    else:
                        skip_below = place - place % size + size
                at += 1
    return given


@many
@pytest.mark.parametrize("config", [CONFIG, WITH_UNITS], ids=["plain", "ext"])
@pytest.mark.parametrize("field", ["queue id", "other queue", "topic"])
@pytest.mark.parametrize("number", [100, 299, *(pytest.param(number, marks=pytest.mark.slow) for number in (103, 297))])
@pytest.mark.parametrize("queues", ["there", "gone"])
def test_a_changed_header_byte_loses_no_message(
    tmp_path: Path, config: StoreConfig, field: str, number: int, queues: str
) -> None:
    places = filled(tmp_path, config)
    if field == "topic":
        with open(tmp_path / "commitlog" / f"{places[number] // 16_384 * 16_384:020d}", "rb") as file:
            file.seek(places[number] % 16_384)
            at = places[number] + file.read(400).index(b"Topic")
        change(tmp_path, at + 2, b"q", config)
    else:
        other = 7 if field == "queue id" else (number + 1) % 3
        change(tmp_path, places[number] + QUEUE_ID_AT, other.to_bytes(4, "big"), config)
    if queues == "gone":
        shutil.rmtree(tmp_path / "consumequeue")
        if config is WITH_UNITS:
            shutil.rmtree(tmp_path / "consumequeue_ext")
    assert not verify(tmp_path, config).sound
    with MessageStore.open(tmp_path, config, thorough=True):
        pass
    verdict = verify(tmp_path, config)
    assert verdict.sound, verdict.damage
    if queues == "gone" and number > 290:
        return  # it was the queue's last record, so its queue is unknown
    assert sorted(path.name for path in (tmp_path / "consumequeue").iterdir()) == ["Topic"]
    if queues == "gone" and field == "other queue":  # which of two records with one queue offset is wrong is unknown
        assert sorted(body for queue_id in range(3) for body in bodies(tmp_path, queue_id)) == list(range(300))
        return
    for queue_id in range(3):
        assert bodies(tmp_path, queue_id) == list(range(queue_id, 300, 3))
        assert broker_gives(tmp_path, queue_id, config) == list(range(queue_id, 300, 3))


@pytest.mark.parametrize("number", [60, 100, 250])
def test_a_hole_is_skipped(tmp_path: Path, number: int) -> None:
    """A record whose queue offset and queue changed, and whose entry is gone, leaves a hole."""
    places = filled(tmp_path)
    queue_id = number % 3
    change(tmp_path, places[number] + QUEUE_ID_AT, (9).to_bytes(4, "big") + bytes(4) + (5).to_bytes(8, "big"))
    with ConsumeQueue.open(tmp_path / "consumequeue" / "Topic" / str(queue_id), CONFIG.consumequeue_file_size) as queue:
        queue.truncate_to(number // 3)
    with MessageStore.open(tmp_path, CONFIG, thorough=True):
        pass
    verdict = verify(tmp_path, CONFIG)
    assert verdict.sound, verdict.damage
    wanted = [n for n in range(queue_id, 300, 3) if n != number]
    assert bodies(tmp_path, queue_id) == wanted
    given = broker_gives(tmp_path, queue_id)
    assert sorted(set(given)) == wanted
    assert len(given) <= len(wanted) + 1
    with MessageStore.open(tmp_path, CONFIG, thorough=True) as store:
        assert store.recovered == []
        assert store.queues["Topic", queue_id].max_offset == 100
