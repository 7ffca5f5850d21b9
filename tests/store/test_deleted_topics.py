"""A topic that was deleted on a broker, and possibly created again, stays deleted.

A broker deletes a topic's queue folders but leaves its records in the log. A topic that is created again counts from 0.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from librmq import Message
from librmq.config import StoreConfig
from librmq.store import MessageStore
from librmq.store._snapshots import snapshot
from librmq.store.format.broker_tables import BrokerTables
from librmq.store.recovery._verify import verify
from tests.stores import derived, from_disk

CONFIG = StoreConfig.tiny()


def as_a_broker_left_it(folder: Path) -> None:
    """Store ten messages in each of four queues, delete the queues, then store three more in three of them.

    A second topic is left alone.
    """
    with MessageStore.open(folder, CONFIG, background=False) as store:
        for number in range(40):
            store.append(Message("T", b"before %d" % number, keys=f"k{number}"), number % 4)
        store.append(Message("Other", b"x"))
    shutil.rmtree(folder / "consumequeue" / "T")
    (folder / "librmq" / "closed.json").unlink()
    with MessageStore.open(folder, CONFIG, background=False) as store:
        for number in range(3):
            store.append(Message("T", b"since %d" % number), number)
    (folder / "librmq" / "closed.json").unlink()


def messages(folder: Path) -> list[bytes]:
    with MessageStore.open(folder, CONFIG, read_only=True) as store:
        return [message.body for queue_id in range(4) for message in store.messages("T", queue_id)]


SINCE = [b"since 0", b"since 1", b"since 2"]


def test_a_recreated_topic_has_only_new_messages(tmp_path: Path) -> None:
    as_a_broker_left_it(tmp_path)
    before = derived(from_disk(tmp_path))
    assert messages(tmp_path) == SINCE
    for _ in range(2):  # first as a broker closed it, then as librmq did
        with MessageStore.open(tmp_path, CONFIG, background=False) as store:
            assert store.recovered == []
        assert messages(tmp_path) == SINCE
    assert derived(from_disk(tmp_path)) == before
    with MessageStore.open(tmp_path, CONFIG, background=False) as store:
        assert store.append(Message("T", b"more"), 3).queue_offset == 0


@pytest.mark.parametrize("by", ["broker", "librmq"])
def test_verify_calls_it_sound_and_mentions_it(tmp_path: Path, by: str) -> None:
    as_a_broker_left_it(tmp_path)
    if by == "librmq":
        MessageStore.open(tmp_path, CONFIG, background=False).close()
    verdict = verify(tmp_path, CONFIG)
    assert verdict.sound, verdict.damage
    assert "queue 3 of topic T was deleted: 10 of its records are still in the log" in verdict.notes
    assert len([note for note in verdict.notes if "was deleted" in note]) == 4


def test_a_lost_folder_of_a_store_that_librmq_closed_is_damage(tmp_path: Path) -> None:
    as_a_broker_left_it(tmp_path)
    MessageStore.open(tmp_path, CONFIG, background=False).close()
    shutil.rmtree(tmp_path / "consumequeue" / "T" / "1")
    assert not verify(tmp_path, CONFIG).sound
    with MessageStore.open(tmp_path, CONFIG, background=False):
        pass
    assert verify(tmp_path, CONFIG).sound
    assert set(SINCE) <= set(messages(tmp_path))


@pytest.mark.parametrize("last", ["T", "Other"])
def test_a_deletion_after_a_close_of_librmq_stays(tmp_path: Path, last: str) -> None:
    """A topic that a broker deletes after librmq closed the store does not come back."""
    tables = BrokerTables.open(str(tmp_path / "config"))
    for topic in ("T", "Other"):
        tables.make_topic(topic)
    tables.persist(0)
    with MessageStore.open(tmp_path, CONFIG, background=False) as store:
        for topic in ("T", "Other", last):
            store.append(Message(topic, topic.encode()))
    shutil.rmtree(tmp_path / "consumequeue" / "T")
    tables.topics.remove("T")
    tables.persist(0)
    verdict = verify(tmp_path, CONFIG)
    assert verdict.sound, verdict.damage
    assert any("queue 0 of topic T was deleted" in note for note in verdict.notes)
    for _ in range(2):
        with MessageStore.open(tmp_path, CONFIG, background=False) as store:
            assert store.recovered == []
            assert store.queues.keys() == {("Other", 0)}
    with MessageStore.open(tmp_path, CONFIG, background=False) as store:
        assert store.append(Message("T", b"since")).queue_offset == 0
    assert messages(tmp_path) == [b"since"]


def test_a_snapshot_leaves_deleted_topics_deleted(tmp_path: Path) -> None:
    as_a_broker_left_it(tmp_path / "store")
    snapshot(str(tmp_path / "store"), str(tmp_path / "copy"), CONFIG)
    assert messages(tmp_path / "copy") == SINCE


def test_recover_keeps_a_topic_that_was_made_again(tmp_path: Path) -> None:
    as_a_broker_left_it(tmp_path)
    with MessageStore.open(tmp_path, CONFIG, thorough=True, background=False):
        pass
    assert messages(tmp_path)[:3] == SINCE
    assert verify(tmp_path, CONFIG).sound
