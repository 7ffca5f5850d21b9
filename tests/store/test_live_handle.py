"""How a handle copes with other writers, with threads that can't be started, and with retention."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.errors import ConfigError, NotAStoreError, ReadOnlyError, ReplicaError, StoreLockedError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import FileLock, FolderEntry
from librmq.message.message import Message
from librmq.store import MessageStore


def message() -> Message:
    return Message("T", bytes(100))


def test_append_succeeds_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    with MessageStore.open("/s", StoreConfig.tiny(), files=MemoryFiles()) as store:
        with monkeypatch.context() as full:
            full.setattr("librmq.store.engine._durability.Background", refuse)
            results = [store.append(message()) for _ in range(50)]
        assert [result.queue_offset for result in results] == list(range(50))
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "no thread can be started" in caplog.text
        assert len(list(store.messages("T"))) == 50


def test_queues_of_a_live_store_have_all_appends() -> None:
    with MessageStore.open("/s", StoreConfig.tiny(), files=MemoryFiles()) as store:
        for _ in range(5):
            store.append(message())
        assert store.queues["T", 0].max_offset == 5
        store.append(message())
        assert {name: queue.max_offset for name, queue in store.queues.items()} == {("T", 0): 6}


def test_a_second_writer_learns_what_to_do(tmp_path: Path) -> None:
    with (
        MessageStore.open(tmp_path / "s", StoreConfig.tiny()),
        pytest.raises(
            StoreLockedError, match=r"by this process \(pid \d+\); only one process .*docs/processes.md.*read_only"
        ),
    ):
        MessageStore.open(tmp_path / "s", wait=0.001)


def test_open_waits_for_another_writer(tmp_path: Path) -> None:
    first = MessageStore.open(tmp_path / "s", StoreConfig.tiny())
    closing = threading.Thread(target=first.close)
    tried = DiskFiles.lock

    def lock(self: DiskFiles, path: str) -> FileLock:
        if closing.ident is None:
            closing.start()  # starts only now, so the lock is still held at the first attempt or was just released
        return tried(self, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskFiles, "lock", lock)
        MessageStore.open(tmp_path / "s", wait=60).close()
    closing.join()


@pytest.mark.parametrize("wait", [-1, "soon", float("nan"), None])
def test_a_wait_that_is_not_a_duration_is_refused(tmp_path: Path, wait: Any) -> None:
    with pytest.raises(ConfigError, match="wait: expected seconds"):
        MessageStore.open(tmp_path / "s", wait=wait)
    assert not (tmp_path / "s").exists()


class ChangingBeforeTheLock(MemoryFiles):
    """Files of a folder in which another process does something after the first look, just before the lock is taken."""

    def __init__(self, change: Callable[[MemoryFiles], object]) -> None:
        super().__init__()
        self.change: Callable[[MemoryFiles], object] | None = change

    def lock(self, path: str) -> FileLock:
        change, self.change = self.change, None
        if change is not None:
            change(self)
        return super().lock(path)


def make_replica(files: MemoryFiles) -> None:
    MessageStore.open("/s", files=files, replica_of="master").close()


def make_store(files: MemoryFiles) -> None:
    with MessageStore.open("/s", StoreConfig.tiny(), files=files) as store:
        store.append(Message("T", b"x"))


def make_tables_in_rocksdb(files: MemoryFiles) -> None:
    make_store(files)
    files.make_folder("/s/config/consumerOffsets")
    files.write("/s/config/consumerOffsets/CURRENT", b"MANIFEST-000001\n")


@pytest.mark.parametrize(
    ("change", "replica_of", "error"),
    [
        (make_replica, None, ReadOnlyError),
        (make_store, "master", ReplicaError),
        (make_tables_in_rocksdb, None, NotAStoreError),
    ],
)
def test_a_store_that_became_another_before_the_lock_is_refused(
    change: Callable[[MemoryFiles], object], replica_of: str | None, error: type[Exception]
) -> None:
    files = ChangingBeforeTheLock(change)
    with pytest.raises(error):
        MessageStore.open("/s", files=files, replica_of=replica_of)
    assert files.lock_holder("/s/lock") is None


def test_a_store_that_was_made_before_the_lock_keeps_its_sizes() -> None:
    files = ChangingBeforeTheLock(make_store)
    with MessageStore.open("/s", files=files) as store:
        assert store.config.commitlog_file_size == StoreConfig.tiny().commitlog_file_size
        assert [message.body for message in store] == [b"x"]


def test_a_config_of_another_type_is_named() -> None:
    with pytest.raises(TypeError, match=r"config: expected a StoreConfig such as StoreConfig\(\), found {'max"):
        MessageStore.open("/s", {"max_message_size": 5}, files=MemoryFiles())  # type: ignore[arg-type]


def test_the_repr_shows_the_state_of_a_handle() -> None:
    files = MemoryFiles()
    with MessageStore.open("/s", StoreConfig.tiny(), files=files) as store:
        assert repr(store) == "<MessageStore '/s': is open for writing>"
        with MessageStore.open("/s", files=files, read_only=True) as reader:
            assert repr(reader) == "<MessageStore '/s': is open for reading>"
    assert repr(store) == "<MessageStore '/s': is closed>"


def test_a_deletion_by_retention_does_not_count_as_a_write() -> None:
    """A producer waits for the deletion, but a broker does not consider the store stuck."""
    seen: list[bool] = []

    class Watched(MemoryFiles):
        def delete(self, path: str) -> None:
            if "commitlog" in path:
                seen.append(store.appender.lock.is_writing())
            super().delete(path)

    clock = ManualClock()
    config = StoreConfig.tiny(commitlog_file_size=4096, max_total_size=8192)
    with MessageStore.open("/s", config, files=Watched(), clock=clock) as store:
        for _ in range(100):
            store.append(message())
        store.flush()
        clock.advance(hours=1)
        store.run_due(clock.now_ms())
        assert seen
        assert not any(seen)
        assert not store.appender.lock.is_writing()


class MeanwhileFiles(MemoryFiles):
    """Files that let another thread run when a folder is listed, until that thread ends or waits."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = ""
        self.meanwhile: Callable[[], object] = bool
        self.results: list[object] = []
        self.threads: list[threading.Thread] = []

    def at_next_list(self, folder: str, meanwhile: Callable[[], object]) -> None:
        self.folder, self.meanwhile = folder, meanwhile

    def list(self, path: str) -> list[FolderEntry]:
        if self.folder and path.endswith(self.folder):
            self.folder = ""
            self.threads.append(threading.Thread(target=self._run))
            self.threads[-1].start()
            self.threads[-1].join(0.2)
        return super().list(path)

    def _run(self) -> None:
        try:
            self.results.append(self.meanwhile())
        except Exception as error:
            self.results.append(error)

    def result(self) -> object:
        for thread in self.threads:
            thread.join()
        (found,) = self.results
        return found


def test_two_threads_open_one_queue_at_once() -> None:
    """One thread reads. Before its queue is open, another has opened the queue and appended to it."""
    files = MeanwhileFiles()
    with MessageStore.open("/s", StoreConfig.tiny(), files=files, background=False) as store:
        for _ in range(5):
            store.append(message())
    with MessageStore.open("/s", files=files, background=False) as store:

        def append_and_read() -> int:
            store.append(message())
            return len(store.read("T", 0, 0).messages)

        files.at_next_list("consumequeue/T/0", append_and_read)
        assert len(store.read("T", 0, 0).messages) >= 5
        assert files.result() == 6
        assert store.append(message()).queue_offset == 6
        assert len(list(store.messages("T"))) == 7


BESIDE: dict[str, Callable[[MessageStore], object]] = {
    "append": lambda store: store.append(message()).queue_offset,
    "append_batch": lambda store: store.append_batch([message()])[0].queue_offset,
    "append to a new queue": lambda store: store.append(message(), 1).queue_offset + 5,
    "flush": lambda store: store.flush() and 5,
    "read": lambda store: len(store.read("T", 0, 0).messages),
    "find_by_key": lambda store: len(store.find_by_key("T", "k")),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_call_during_a_recovery_waits(name: str) -> None:
    files = MeanwhileFiles()
    with MessageStore.open("/s", StoreConfig.tiny(), files=files, background=False) as store:
        for _ in range(5):
            store.append(Message("T", bytes(100), keys="k"))
        files.at_next_list("commitlog", lambda: BESIDE[name](store))
        store.recover()
        assert files.result() == 5
        before = store.queue_range("T", 0)[1]
        assert store.append(message()).queue_offset == before
        assert len(list(store.messages("T"))) == before + 1
        assert store.flush() == store.log.end
        assert store.verify().sound


def test_a_relative_path_means_the_same_folder_in_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon changes to ``/``, a test to another folder: new files of the log, queues and index stay in the store."""
    bodies = [Random(number).randbytes(1_000) for number in range(100)]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    with MessageStore.open("store", StoreConfig.tiny(), background=False) as store:
        store.append(Message("orders", bodies[0]))
        with MessageStore.open("store", read_only=True) as reader:
            monkeypatch.chdir(elsewhere)
            for body in bodies[1:]:
                store.append(Message("orders", body))
            assert [message.body for message in reader] == bodies
    assert len(list((tmp_path / "store" / "commitlog").iterdir())) > 1
    assert list(elsewhere.iterdir()) == []
    with MessageStore.open(tmp_path / "store") as store:
        assert [message.body for message in store] == bodies
