"""Queue files of deleted topics: which are deleted and which stay."""

from __future__ import annotations

import errno
import os

import pytest

from librmq.broker import Broker
from librmq.config import StoreConfig
from librmq.errors import BrokerError, StoreClosedError, StoreIOError
from librmq.files._memory import MemoryFiles
from librmq.files.interface import is_folder
from librmq.message.message import Message
from librmq.protocol import UpdateOffset
from librmq.runtime import ManualRunner
from librmq.store import MessageStore
from librmq.store.format.directory import list_queues
from librmq.store.recovery._verify import verify
from tests.file_seams import RecordingFiles
from tests.stores import ROOT, SMALL, SMALL_EXT, died, opened


def filled(config: StoreConfig, files: MemoryFiles) -> MessageStore:
    """Return a store whose log has no messages of topics Old and Older, some of Mixed, and all of New."""
    store = opened(files, config)
    for number in range(20):
        for topic, queue_id in (("Old", 0), ("Old", 3), ("Older", 0), ("Mixed", 0), ("SCHEDULE_TOPIC_XXXX", 5)):
            store.append(Message(topic, b"%d" % number, keys=f"k{number}"), queue_id)
    for number in range(60):
        store.append(Message("New", b"%d" % number * 40), 0)
        store.append(Message("Mixed", b"%d" % number * 40), 0)
    store.flush()
    store.writer.retention.delete_before(store.log.end - 3 * config.commitlog_file_size)
    return store


GONE = [("Old", 0), ("Old", 3), ("Older", 0)]
LEFT = [("Mixed", 0), ("New", 0), ("SCHEDULE_TOPIC_XXXX", 5)]


@pytest.mark.parametrize("config", [SMALL, SMALL_EXT])
def test_queues_without_messages_in_the_log_are_deleted(config: StoreConfig) -> None:
    files = MemoryFiles()
    store = filled(config, files)
    assert store.clean_unused_topics({"New", "Mixed", "Old", "Older"}) == []
    assert store.clean_unused_topics({"Older"}) == GONE[:2]
    assert store.clean_unused_topics(()) == GONE[2:]
    assert store.clean_unused_topics(()) == []  # each is reported once
    assert list_queues(ROOT, files) == LEFT
    assert list_queues(ROOT, files, ext=True) == (LEFT if config is SMALL_EXT else [])
    assert not is_folder(files, f"{ROOT}/consumequeue/Old")
    assert store.verify().sound
    store.close()
    assert verify(ROOT, config, files).sound
    again = opened(files, config)
    assert again.recovered == []
    assert sorted(again.queues) == LEFT
    again.close()


@pytest.mark.parametrize("ends", ["goes on", "closed", "died"])
def test_a_queue_that_was_deleted_starts_at_0(ends: str) -> None:
    files = MemoryFiles()
    store = filled(SMALL, files)
    store.clean_unused_topics(())
    assert store.queue_range("Old", 3) == (0, 0)
    if ends == "closed":
        store.close()
        store = opened(files, SMALL)
    elif ends == "died":
        files = died(files)
        store = opened(files, SMALL)
    assert store.append(Message("Old", b"new"), 3).queue_offset == 0
    assert [message.body for message in store.messages("Old", 3)] == [b"new"]
    assert store.verify().sound
    store.close()
    assert verify(ROOT, SMALL, files).sound


def test_earlier_holders_of_the_queue_see_it_empty() -> None:
    files = MemoryFiles()
    store = filled(SMALL, files)
    reader = MessageStore.open(ROOT, SMALL, files=files, read_only=True)
    queue = store.queue("Old", 3)
    assert queue is not None
    assert queue.max_offset == 20
    store.clean_unused_topics(())
    assert queue.read(19, 1) == b""
    reader.refresh()
    assert reader.read("Old", 3, 0).messages == []
    assert store.append(Message("Old", b"new"), 3).queue_offset == 0
    assert [message.body for message in reader.messages("Old", 3)] == [b"new"]
    reader.close()
    store.close()
    with pytest.raises(StoreClosedError):
        store.clean_unused_topics(())


def test_a_broker_deletes_queues_of_unknown_topics() -> None:
    files, runner = MemoryFiles(), ManualRunner()
    config = StoreConfig.tiny(commitlog_file_size=4096, max_message_size=2048, keep_unconsumed=False)
    with Broker.open("/b", files=files, runner=runner, store_config=config) as broker:
        for topic in ("Old", "New"):
            broker.create_topic(topic, 2)
            for number in range(40):
                broker.store.append(Message(topic, b"%d" % number * 50), number % 2)
        broker.call(UpdateOffset("g", "Old", 0, 15))
        broker.call(UpdateOffset("g", "Old", 1, 20))
        broker.call(UpdateOffset("g", "New", 1, 3))
        broker.delete_topic("Old")
        assert broker.clean_unused_topics() == []  # the log has its messages
        broker.store.flush()
        last = list(broker.store.messages("New"))[-1].physical_offset
        broker.store.writer.retention.delete_before(last)
        assert broker.consumer_offset("g", "Old", 1) == 20
        assert broker.clean_unused_topics() == [("Old", 0), ("Old", 1)]
        assert broker.consumer_offsets("g", "Old") == {}
        assert broker.consumer_offset("g", "Old", 1) is None
        assert broker.consumer_offset("g", "New", 1) == 3
    assert verify("/b", config, files).sound
    assert b"Old@g" not in files.read("/b/config/consumerOffset.json")


def test_deleted_topics_are_forgotten_on_a_failing_disk() -> None:
    class Refuses(MemoryFiles):
        refused = ""

        def delete(self, path: str) -> None:
            if self.refused and path.endswith(self.refused):
                raise StoreIOError("delete", path, OSError(errno.EIO, "broken"))
            super().delete(path)

    files = Refuses()
    config = StoreConfig.tiny(commitlog_file_size=4096, max_message_size=2048)
    with Broker.open("/b", files=files, runner=ManualRunner(), store_config=config) as broker:
        for topic in ("Old", "New"):
            broker.create_topic(topic, 2)
            for number in range(40):
                broker.store.append(Message(topic, b"%d" % number * 50), number % 2)
        for queue_id in (0, 1):
            broker.call(UpdateOffset("g", "Old", queue_id, 15))
        broker.delete_topic("Old")
        broker.store.flush()
        broker.store.writer.retention.delete_before(list(broker.store.messages("New"))[-1].physical_offset)
        files.refused = "/consumequeue/Old/1"
        with pytest.raises(BrokerError, match="broken"):
            broker.clean_unused_topics()
        assert broker.store.queue_range("Old", 0) == (0, 0)
        assert broker.consumer_offset("g", "Old", 0) is None
        assert broker.consumer_offset("g", "Old", 1) is None
        assert broker.store.append(Message("Old", b"again"), 1).queue_offset == 0
        files.refused = ""
        assert broker.clean_unused_topics() == []  # the log has a message of queue 1, and nothing is left of queue 0
        assert [message.body for message in broker.messages("Old")] == [b"again"]
    assert verify("/b", config, files).sound
    assert b"Old@g" not in files.read("/b/config/consumerOffset.json")


def test_files_are_deleted_durably_before_their_folder() -> None:
    """Otherwise a power failure could bring old files back into a queue that has started again."""
    files = RecordingFiles()
    store = filled(SMALL, files)
    files.trace.clear()
    assert store.clean_unused_topics({"New", "Mixed", "Older"}) == GONE[:2]
    folder = f"{ROOT}/consumequeue/Old/3"
    told = [event.call for event in files.trace if os.path.join(event.path, "").startswith(folder + "/")]
    assert told[-2:] == ["flush_folder", "delete"]
    assert told[:-2] == ["delete"] * (len(told) - 2)
    assert len(told) > 2
    store.close()
