"""How derived data is written: by which call, when, and what is left after a failure."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator

import pytest

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.consumequeue import ConsumeQueue
from librmq.errors import StoreIOError
from librmq.files.memory import MemoryFiles
from librmq.message.message import Message
from librmq.store import MessageStore
from librmq.store.engine import dispatch
from librmq.store.engine.dispatch import Dispatcher
from librmq.store.format.indexfile import IndexFile
from librmq.store.format.keyindex import KeyIndex
from tests.interrupting import at_each_call

BATCH = Dispatcher.BATCH
ROOT = "/store"


@pytest.fixture
def store() -> Iterator[MessageStore]:
    config = StoreConfig.tiny(max_index_num=4000)
    with MessageStore.open(ROOT, config, files=MemoryFiles(), background=False) as opened:
        yield opened


def send(store: MessageStore, begin: int, end: int, topic: str = "T") -> None:
    for number in range(begin, end):
        message = Message(topic, b"x", keys=f"k{number}")
        message.properties["UNIQ_KEY"] = f"u{number}"
        store.append(message, number % 3)


def indexed(store: MessageStore) -> int:
    return sum(file.count - 1 for file in store.index.files)


def test_reading_a_queue_writes_entries_and_no_keys(store: MessageStore) -> None:
    send(store, 0, 30)
    assert [len(store.read("T", queue_id, 0).messages) for queue_id in range(3)] == [10, 10, 10]
    queue = store.queue("T", 0)
    assert queue is not None
    assert queue.max_offset == 10
    assert indexed(store) == 0
    assert len(store.find_by_key("T", "k7")) == 1
    assert indexed(store) == 60


def test_a_batch_is_dispatched_in_three_parts(store: MessageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the three appends that follow a batch does one part: entries, the keys' hashes, keys."""
    done: list[str] = []
    for owner, name in ((ConsumeQueue, "append_many"), (dispatch, "key_block"), (KeyIndex, "append_block")):
        call = getattr(owner, name)

        def noted(*given: object, name: str = name, call: Callable[..., object] = call) -> object:
            done.append(name)
            return call(*given)

        monkeypatch.setattr(owner, name, noted)
    send(store, 0, BATCH)
    for number, part in enumerate((["append_many"] * 3, ["key_block"], ["append_block"], []), BATCH):
        done.clear()
        send(store, number, number + 1)
        assert done == part
    assert indexed(store) == 2 * BATCH, "those of the batch"
    send(store, BATCH + 4, 2 * BATCH + 3)
    assert indexed(store) == 4 * BATCH
    for number in range(2 * BATCH + 3):
        assert len(store.find_by_key("T", f"k{number}")) == len(store.find_by_key("T", f"u{number}")) == 1


@pytest.mark.parametrize("appended", [BATCH - 1, BATCH, BATCH + 1, BATCH + 2, BATCH + 3, 2 * BATCH + 1])
def test_a_query_between_the_parts_finds_all(store: MessageStore, appended: int) -> None:
    send(store, 0, appended)
    assert len(store.find_by_key("T", f"k{appended - 1}")) == len(store.find_by_key("T", "k0")) == 1
    assert indexed(store) == 2 * appended
    assert store.verify().sound


@pytest.mark.parametrize("part", ["a queue", "the index"])
@pytest.mark.parametrize("ends", ["append", "read", "find"])
def test_a_full_disk_in_either_part_loses_nothing(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch, part: str, ends: str
) -> None:
    send(store, 0, BATCH if part == "a queue" else BATCH + 2)
    owner, name = (ConsumeQueue, "append_many") if part == "a queue" else (store.index.__class__, "append_block")
    with monkeypatch.context() as full:

        def refuse(*_: object) -> None:
            raise StoreIOError("allocate", ROOT, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

        full.setattr(owner, name, refuse)
        for _ in range(2):
            with pytest.raises(StoreIOError):
                send(store, 1000, 1001)
    if ends == "append":
        send(store, BATCH + 2, BATCH + 4)
    elif ends == "read":
        assert len(store.read("T", 0, 0).messages) == 32
    for number in range(BATCH):
        assert len(store.find_by_key("T", f"k{number}")) == len(store.find_by_key("T", f"u{number}")) == 1
    assert store.find_by_key("T", "k1000") == [], "it was refused before it was written"
    assert store.verify().sound


def test_an_interrupted_wait_for_the_writer_frees_the_lock(store: MessageStore) -> None:
    for _ in at_each_call(lambda: store.appender.lock.is_free_within(0)):
        assert not store.appender.lock.is_writing()


@pytest.mark.parametrize("records", [2, 20])
def test_keys_in_two_files_survive_a_disk_that_is_often_full(records: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record whose keys fall into two files keeps all of them, however often the disk is full."""
    config = StoreConfig.tiny(max_index_num=2 * records)  # room for one key less
    with MessageStore.open(ROOT, config, files=MemoryFiles(), background=False) as store:
        send(store, 0, 1)
        assert len(store.find_by_key("T", "k0")) == 1
        send(store, 1, records)
        with monkeypatch.context() as full:

            def refuse(*_: object, **__: object) -> None:
                raise StoreIOError("create", ROOT, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

            full.setattr(IndexFile, "create", refuse)
            for _ in range(3):
                with pytest.raises(StoreIOError):
                    store.find_by_key("T", "k0")
        assert indexed(store) == 2 * records - 1
        send(store, records, records + 1)
        for number in range(records + 1):
            assert len(store.find_by_key("T", f"k{number}")) == len(store.find_by_key("T", f"u{number}")) == 1
        assert indexed(store) == 2 * records + 2
        assert store.verify().sound


class PauseClock(ManualClock):
    """A clock that counts the pauses of appends."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses = 0

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        self.pauses += 1
        return super().wait(event, seconds)


def test_producers_in_several_threads_make_pauses() -> None:
    """A thread that appends alone makes none."""
    clock = PauseClock()
    with MessageStore.open(ROOT, StoreConfig.tiny(), files=MemoryFiles(), clock=clock, background=False) as store:
        send(store, 0, 3 * BATCH)
        assert clock.pauses == 0
        other = threading.Thread(target=send, args=(store, 0, 2 * BATCH))
        other.start()
        other.join()
        assert 0 < clock.pauses <= 8, "two threads, and each change of threads costs few"
        assert store.queues["T", 0].max_offset == -(-3 * BATCH // 3) + -(-2 * BATCH // 3)
