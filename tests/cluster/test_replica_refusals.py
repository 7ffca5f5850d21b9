"""What a replica refuses: other stores, lost ends, writes, bytes that are no records."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from librmq import Broker, ManualRunner, Message, MessageStore, StoreConfig
from librmq.cluster import Replica
from librmq.cluster._replica import StoredMaster
from librmq.cluster._replica_admission import check_bytes
from librmq.errors import BrokerError, CorruptionError, NotAStoreError, ReadOnlyError, ReplicaError
from librmq.files._memory import MemoryFiles
from librmq.files.interface import is_folder
from tests.broker.parties import manual, opened, send
from tests.cluster.copies import COPY, assert_copies, copy_of, fill, log_files
from tests.cluster.replica_link import ReplicaLink
from tests.stores import contents


def test_a_refused_replica_releases_its_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path / "master")
    MessageStore.open(folder, StoreConfig.tiny()).close()
    released: list[str] = []
    monkeypatch.setattr(StoredMaster, "close", lambda self: released.append(self.path))
    with pytest.raises(ReplicaError, match="can't copy itself"):
        Replica.open(folder, of=folder)
    assert released == [folder]


def test_bytes_that_neither_side_has_end_the_comparison() -> None:
    log: Any = SimpleNamespace(begin=0, end=100, file_size=1000, last_write=None, data_at=lambda at, size: b"")
    master: Any = SimpleNamespace(call=lambda request: SimpleNamespace(data=b""))
    described: Any = SimpleNamespace(begin=0, end=100, name="broker-a")
    with pytest.raises(ReplicaError, match="neither its log nor that of broker-a has the bytes"):
        check_bytes("/copy", log, master, described)


def test_a_folder_that_can_not_copy_is_left_as_it_is() -> None:
    files = MemoryFiles()
    broker = opened(files)
    fill(broker, 30)
    runner, store = manual(broker), StoreConfig.tiny()

    def refused(path: str, of: Broker, match: str, kind: type[Exception] = ReplicaError) -> None:
        before = contents(files, path)
        with pytest.raises(kind, match=match):
            Replica.open(path, of=of, runner=runner, files=files)
        assert contents(files, path) == before

    refused("/b", broker, "can't copy itself")
    MessageStore.open("/own", store, files=files).close()
    refused("/own", broker, "found a store of its own")
    files.make_folder("/other")
    files.write("/other/letter.txt", b"x")
    refused("/other", broker, "expected an empty folder", NotAStoreError)

    stranger = Broker.open("/s", files=files, runner=runner, store_config=store)
    fill(stranger, 40)
    Replica.open("/of-stranger", of=stranger, runner=runner, files=files).close()
    refused("/of-stranger", broker, "bytes ahead of broker-a")
    fill(broker, 60)
    refused("/of-stranger", broker, "differs from that of broker-a")
    larger = Broker.open("/l", files=files, runner=runner, store_config=StoreConfig.tiny(commitlog_file_size=1 << 20))
    refused("/of-stranger", larger, "its log files have")
    with pytest.raises(TypeError, match="of: expected a broker"):
        Replica.open("/new", of=17, runner=runner, files=files)  # type: ignore[arg-type]
    assert not is_folder(files, "/new")


def test_a_replica_ahead_of_its_master_stops() -> None:
    """The master has lost the end of its log, which can happen when its machine crashes."""
    files = MemoryFiles()
    broker = opened(files)
    fill(broker, 10)
    broker.store.flush()
    replica = copy_of(broker)
    runner, at = manual(broker), broker.store.log.end
    fill(broker, 10)
    assert replica.follow()
    broker.abandon()
    file = files.open("/b/commitlog/" + "0" * 20, writable=True)
    file.buffer[at:] = bytes(file.size - at)
    again = opened(files, runner)
    assert again.store.log.end == at
    with pytest.raises(ReplicaError, match="ahead"):
        replica.reconnect(again)
    runner.advance(1)
    fill(again, 30)
    with pytest.raises(ReplicaError, match="differs"):
        replica.reconnect(again)
    assert replica.broker.store.log.end > at
    replica.promote()
    with Broker.open(COPY, files=files, runner=runner) as promoted:
        assert len(list(promoted.messages("T"))) == 20


def lose_the_end(path: Path, upto: int, file_size: int) -> None:
    """Let the log in this folder lose the bytes that a crash of its machine had not flushed yet."""
    for file in (path / "commitlog").iterdir():
        start = int(file.name)
        if start >= upto:
            file.unlink()
        elif start + file_size > upto:
            with file.open("r+b") as opened:
                opened.truncate(upto - start)
                opened.truncate(file_size)


@pytest.mark.parametrize(("kept", "lost"), [(10, 10), (300, 1200)])
def test_a_folder_that_lost_its_end_and_grew_is_noticed(tmp_path: Path, kept: int, lost: int) -> None:
    """The new records have the sizes of the lost ones, so the copy's end is the start of a record again."""
    runner, size = ManualRunner(), 1 << 16

    def grow(count: int, text: bytes) -> int:
        with Broker.open(tmp_path / "m", store_config=StoreConfig.tiny(), runner=ManualRunner()) as master:
            for _ in range(count):
                send(master, "T", text * 10)
            return master.store.log.end

    upto = grow(kept, b"a")
    grow(lost, b"b")
    with Replica.open(tmp_path / "c", of=tmp_path / "m", runner=runner) as replica:
        runner.advance(1000)
        end, before = replica.end, log_files(replica.store)
        lose_the_end(tmp_path / "m", upto, size)
        assert grow(lost + 5, b"c") > end
        runner.advance(1000)
        with pytest.raises(ReplicaError, match="differs from that of"):
            replica.follow()
        assert log_files(replica.store) == before
        assert repr(replica).endswith("stopped>")


def test_a_reopened_master_is_compared_again() -> None:
    """A link leads to whichever broker is open, so the replica is not asked to reconnect."""
    files = MemoryFiles()
    broker = opened(files)
    link = ReplicaLink(broker, manual(broker).manual_clock)
    fill(broker, 10)
    broker.store.flush()
    replica = copy_of(broker, of=link)
    runner, at = manual(broker), broker.store.log.end
    fill(broker, 10)
    assert replica.follow()
    broker.abandon()
    link.master = broker = opened(files, runner)
    fill(broker, 10)
    assert_copies(replica, broker)
    broker.abandon()
    file = files.open("/b/commitlog/" + "0" * 20, writable=True)
    file.buffer[at:] = bytes(file.size - at)
    runner.advance(1)
    link.master = broker = opened(files, runner)
    fill(broker, 40)
    with pytest.raises(ReplicaError, match="differs"):
        replica.follow()


@pytest.mark.parametrize("name", ["broker-s", "broker-a"])
def test_a_replica_of_another_master_is_not_deleted(name: str) -> None:
    """The master has no bytes any more that could be compared with the copy's. Both may have one name."""
    files = MemoryFiles()
    broker = opened(files, store=StoreConfig.tiny(max_total_size=2 << 16))
    runner = manual(broker)
    other = Broker.open("/s", name=name, files=files, runner=runner, store_config=StoreConfig.tiny())
    fill(other, 5)
    replica = Replica.open("/of-other", of=other, runner=runner, files=files)
    while broker.store.log.begin <= other.store.log.end:
        fill(broker, 200)
        runner.advance(20_000)
    with pytest.raises(ReplicaError, match=f"it is the replica of {name} in /s, and broker-a in /b no longer has"):
        replica.reconnect(broker)
    assert replica.follow()
    replica.close()
    before = contents(files, "/of-other")
    with pytest.raises(ReplicaError, match=f"it is the replica of {name} in /s"):
        Replica.open("/of-other", of=broker, runner=runner, files=files)
    assert contents(files, "/of-other") == before


def test_a_moved_master_is_recognised_by_its_bytes(tmp_path: Path) -> None:
    """The mark then names its new folder."""

    def copied() -> dict[str, bytes]:
        runner = ManualRunner()
        with Broker.open(folder, runner=runner, store_config=StoreConfig.tiny()) as master:
            fill(master, 10)
            with Replica.open(tmp_path / "c", of=master) as replica:
                assert replica.follow()
                return log_files(replica.store)

    folder = tmp_path / "before"
    copied()
    folder = folder.rename(tmp_path / "after")
    copied()
    assert str(folder) in (tmp_path / "c" / "librmq" / "replica.json").read_text()


def test_a_replica_takes_no_writes() -> None:
    broker = opened()
    replica = copy_of(broker)
    with pytest.raises(BrokerError, match="is a replica of broker-a and takes no SendMessage"):
        send(replica.broker, "T")
    with pytest.raises(BrokerError, match="takes no CreateTopic"):
        replica.broker.create_topic("T")
    with pytest.raises(BrokerError, match="takes no DeleteGroup"):
        replica.broker.delete_group("G")
    with pytest.raises(ReadOnlyError, match="is a replica of broker-a and takes no writes"):
        replica.store.append(Message("T", b"x"))
    with pytest.raises(ReplicaError, match="found a store of its own"):
        broker.store.writer.copy_log(0, b"")
    replica.close()
    for open_it in (MessageStore.open, Broker.open):
        with pytest.raises(ReadOnlyError, match=r"promote"):
            open_it(COPY, files=broker.store.files)
    with MessageStore.open(COPY, files=broker.store.files, read_only=True) as store:
        assert store.log.end == broker.store.log.end


def test_bytes_that_are_not_records_are_not_copied() -> None:
    broker = opened()
    replica = copy_of(broker)
    send(broker, "T", b"x" * 100)
    data = bytearray(broker.store.log.data_at(0, broker.store.log.end))
    data[95] ^= 1
    with pytest.raises(CorruptionError):
        replica.store.writer.copy_log(0, bytes(data))
    with pytest.raises(CorruptionError):
        replica.store.writer.copy_log(0, bytes(data[:-1]))
    assert_copies(replica, broker)
