"""A replica: what it copies, and how sends and reads use it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, BrokerConfig, ManualRunner, Message, MessageStore, Producer, PushConsumer, StoreConfig
from librmq.cluster import Replica, promote_replica
from librmq.cluster._replica import StoredMaster
from librmq.diagnosis import StoreView, pending_messages
from librmq.errors import BrokerUnreachableError, FlushFailedError, ReplicaError, StoreLockedError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import Files
from librmq.message import record
from librmq.metrics import Metrics
from librmq.protocol import CopyTables, PullStatus, SendStatus, UpdateOffset
from librmq.store.format import directory
from librmq.store.recovery._verify import verify
from tests.broker.parties import manual, opened, pull, send
from tests.cluster.copies import COPY, assert_copies, copy_of, fill, log_files
from tests.cluster.replica_link import ReplicaLink
from tests.file_seams import FailingFiles
from tests.interrupting import at_each_call
from tests.reference import store_folders


def test_a_replica_has_the_bytes_queues_and_keys_of_its_master() -> None:
    broker = opened()
    fill(broker, 400)
    replica = copy_of(broker)
    fill(broker, 400)
    manual(broker).advance(1000)
    assert replica.lag_bytes == 0
    assert_copies(replica, broker)
    assert len(broker.store.log.sequence.starts) > 1
    found = replica.broker.find_by_key("T", "k7")
    assert [one.raw for one in found] == [one.raw for one in broker.find_by_key("T", "k7")] != []
    assert replica.broker.topics() == broker.topics()


@pytest.mark.parametrize("has_units", [False, True])
def test_records_of_every_kind_are_copied(has_units: bool) -> None:
    """Delays, halves, op messages, many alike, IPv6 hosts, extension units, and a record longer than one copy."""
    store = StoreConfig.tiny(enable_consumequeue_ext=has_units, max_message_size=40_000, commitlog_file_size=1 << 17)
    broker = opened(store=store)
    replica = copy_of(broker)
    store_ = broker.store
    store_.append(Message("D", b"later", delay_level=3))
    store_.append(Message("H", b"half"), sys_flag=record.TRANSACTION_PREPARED)
    store_.append(Message("H", b"back"), sys_flag=record.TRANSACTION_ROLLBACK)
    store_.append(Message("V", b"six", keys=["a", "b"]), born_host=("fe80::1", 5), store_host=("fe80::2", 6))
    store_.append_batch([Message("B", b"%d" % number, tags="t") for number in range(300)], 2)
    store_.append(Message("L", bytes(range(256)) * 150))
    store_.append(Message("E", b""))
    assert_copies(replica, broker)


def test_sends_say_whether_a_replica_has_the_message() -> None:
    broker = opened(replication="sync")
    clock = manual(broker).manual_clock
    link = ReplicaLink(broker, clock)

    def status(**fields: Any) -> SendStatus:
        return send(broker, "T", **fields).status

    assert status() is SendStatus.SLAVE_NOT_AVAILABLE
    replica = copy_of(broker, of=link)
    assert status() is SendStatus.SEND_OK
    assert replica.end == broker.store.log.end  # immediately, without a turn of the runner
    link.cut()
    assert status() is SendStatus.FLUSH_SLAVE_TIMEOUT
    assert status(wait_store_ok=False) is SendStatus.SEND_OK
    manual(broker).advance(21_000)
    assert status() is SendStatus.SLAVE_NOT_AVAILABLE  # counts as gone after 20 s
    link.restore()
    assert replica.follow()
    assert status() is SendStatus.SEND_OK
    link.seconds = 2
    assert status() is SendStatus.SEND_OK
    link.seconds = 4
    assert status() is SendStatus.FLUSH_SLAVE_TIMEOUT  # it arrived, but too late
    link.seconds = 0
    replica.close()
    assert status() is SendStatus.SLAVE_NOT_AVAILABLE


def test_a_killed_replica_is_gone_after_its_expiry() -> None:
    """Sends don't ask it on its behalf, which would keep it alive for its master."""
    broker = opened(replication="sync")
    replica = copy_of(broker)
    assert send(broker, "T").status is SendStatus.SEND_OK
    replica.abandon()
    for _ in range(3):
        assert send(broker, "T").status is SendStatus.FLUSH_SLAVE_TIMEOUT
        manual(broker).advance(7_000)
    assert send(broker, "T").status is SendStatus.SLAVE_NOT_AVAILABLE


def test_bytes_that_are_not_flushed_are_not_acknowledged() -> None:
    broker = opened(replication="sync", store=StoreConfig.tiny(durability="sync"))
    files = FailingFiles(broker.store.files)
    replica = Replica.open(COPY, of=broker, runner=broker.runner, files=files)
    assert send(broker, "T").status is SendStatus.SEND_OK
    files.fail("flush")
    assert send(broker, "T").status is SendStatus.FLUSH_SLAVE_TIMEOUT
    manual(broker).advance(1_000)
    assert send(broker, "T").status is SendStatus.FLUSH_SLAVE_TIMEOUT
    with pytest.raises(ReplicaError, match=r"a flush has failed .*: close it and open it again"):
        replica.follow()
    with pytest.raises(FlushFailedError):
        replica.close()
    assert_copies(copy_of(broker), broker)


def test_a_replica_far_behind_is_not_waited_for() -> None:
    broker = opened(replication="sync", replica_max_lag=1000)
    link = ReplicaLink(broker, manual(broker).manual_clock)
    copy_of(broker, of=link)
    link.cut()
    assert send(broker, "T", b"x" * 500).status is SendStatus.FLUSH_SLAVE_TIMEOUT
    assert send(broker, "T", b"x" * 500).status is SendStatus.SLAVE_NOT_AVAILABLE


def test_asynchronous_sends_do_not_wait() -> None:
    broker = opened()
    replica = copy_of(broker)
    assert send(broker, "T").status is SendStatus.SEND_OK
    assert replica.end < broker.store.log.end
    manual(broker).advance(50)
    assert replica.end == broker.store.log.end


def test_a_copy_cut_in_the_middle_of_a_record_continues() -> None:
    broker = opened()
    link = ReplicaLink(broker, manual(broker).manual_clock)
    replica = copy_of(broker, of=link)
    for most in (1, 7, 8, 100, 150, 401):
        fill(broker, 10)
        link.most_bytes = most
        assert not replica.follow()
        link.restore()
        assert_copies(replica, broker)


@pytest.mark.parametrize("most", [0, 1, 100])
def test_a_link_broken_while_logs_are_compared_is_no_difference(most: int) -> None:
    broker = opened()
    fill(broker, 10)
    link = ReplicaLink(broker, manual(broker).manual_clock)
    replica = copy_of(broker, of=link)
    link.most_bytes = most
    with pytest.raises(BrokerUnreachableError, match="the link is cut"):
        replica.reconnect(link)
    link.restore()
    replica.reconnect(link)
    fill(broker, 10)
    assert replica.follow()
    assert_copies(replica, broker)


@pytest.mark.parametrize("kept", [1, 4, 60, 100, 156])
def test_a_replica_killed_in_the_middle_of_a_record_catches_up(kept: int) -> None:
    """The file has a part of the next record, as if the replica was killed while copying it."""
    broker = opened()
    fill(broker, 20)
    replica = copy_of(broker)
    replica.abandon()
    end = replica.end
    send(broker, "T", b"x" * 100)
    files = broker.store.files
    torn = broker.store.log.data_at(end, kept)
    file = files.open(f"{COPY}/commitlog/{end - end % replica.store.config.commitlog_file_size:020}", writable=True)
    file.buffer[end % file.size : end % file.size + kept] = torn
    del file
    assert_copies(copy_of(broker), broker)


def test_a_replica_behind_the_first_file_starts_again_there(caplog: pytest.LogCaptureFixture) -> None:
    broker = opened(store=StoreConfig.tiny(max_total_size=3 << 16))
    runner = manual(broker)
    link = ReplicaLink(broker, runner.manual_clock)
    replica = copy_of(broker, of=link)
    fill(broker, 50)
    assert replica.follow()
    link.cut()
    while broker.store.log.begin < replica.end:
        fill(broker, 200)
        runner.advance(20_000)
    link.restore()
    with caplog.at_level(logging.WARNING):
        assert replica.follow()
    assert f"it starts again at {broker.store.log.begin}" in caplog.text
    assert replica.store.log.begin == broker.store.log.begin
    assert log_files(replica.store) == log_files(broker.store)
    assert replica.store.verify().damage == ()
    for queue_id in range(3):
        assert replica.store.queue_range("T", queue_id) == broker.store.queue_range("T", queue_id)
    fill(broker, 50)
    replica.close()
    assert copy_of(broker).follow()


class _Watched:
    """A link that counts notifications, and can let two copies of tables cross."""

    def __init__(self, master: Broker) -> None:
        self.master = master
        self.notified = 0
        self.between: Callable[[], object] | None = None

    def call(self, request: Any) -> Any:
        notify = getattr(request, "notify", None)
        if notify is not None:

            def counted() -> None:
                self.notified += 1
                notify()

            request = replace(request, notify=counted)
        answer = self.master.call(request)
        if isinstance(request, CopyTables) and self.between is not None:
            between, self.between = self.between, None
            between()
        return answer


def test_an_idle_master_notifies_a_replica_once() -> None:
    """However often the replica has asked meanwhile, and was killed and opened again."""
    broker = opened()
    fill(broker, 3)
    link = _Watched(broker)
    for _ in range(3):
        replica = copy_of(broker, of=link)
        for _ in range(20):
            assert replica.follow()
        replica.abandon()
    replica = copy_of(broker, of=link)
    send(broker, "T")
    assert link.notified == 1
    broker.call(UpdateOffset("g", "T", 0, 1))
    assert link.notified == 2
    assert_copies(replica, broker)


def test_two_copies_of_tables_do_not_cross() -> None:
    """While the first answer is under way, progress grows and another thread copies it."""
    broker = opened()
    fill(broker, 9)
    link = _Watched(broker)
    replica = copy_of(broker, of=link)
    other = threading.Thread(target=replica.follow)

    def newer() -> None:
        broker.call(UpdateOffset("g", "T", 0, 2))
        other.start()
        other.join(0.2)

    broker.call(UpdateOffset("g", "T", 0, 1))
    link.between = newer
    assert replica.follow()
    other.join()
    assert replica.broker.consumer_offset("g", "T") == 2


@pytest.mark.parametrize("through", ["broker", "link"])
@pytest.mark.parametrize("end", ["promoted", "killed too", "read"])
def test_a_new_topic_is_copied_before_its_send_is_acknowledged(through: str, end: str) -> None:
    """Also a queue of a topic that has grown. An older copy of the tables, which is under way, does not remove it."""
    broker = opened(replication="sync")
    link = _Watched(broker)
    replica = copy_of(broker, of=broker if through == "broker" else link)
    broker.create_topic("T", 1)
    sent = [send(broker, "T"), send(broker, "New")]

    def newer() -> None:
        broker.create_topic("T", 3)
        sent.append(send(broker, "T", queue_id=2))

    link.between = newer
    assert replica.follow()
    if link.between is not None:
        newer()
    assert {response.status for response in sent} == {SendStatus.SEND_OK}
    broker.abandon()
    promoted = replica.broker
    if end == "killed too":
        replica.abandon()
        promote_replica(COPY, files=broker.store.files)
    elif end == "promoted":
        replica.promote()
    if end != "read":
        promoted = Broker.open(COPY, runner=broker.runner, files=broker.store.files)
    topics = promoted.topics()
    assert topics["T"].read_queues == 3
    assert [one.queue_id for topic in ("T", "New") for one in promoted.messages(topic)] == [0, 2, 0]


def test_a_replica_has_the_progress_of_its_masters_delays() -> None:
    broker = opened()
    replica = copy_of(broker)
    for _ in range(3):
        send(broker, "T", delay_level=1)
    manual(broker).advance(60_000)
    assert replica.follow()
    assert replica.broker.delay_offsets == broker.delay_offsets == {1: 3}
    assert not list(pending_messages(replica.store, StoreView.of(replica.broker).tables))


def test_a_recreated_topic_is_copied() -> None:
    """The queue starts at 0 again, although the copy has an older queue of that name."""
    broker = opened(store=StoreConfig.tiny(max_total_size=2 << 16))
    replica = copy_of(broker)
    fill(broker, 20, "Gone")
    assert replica.follow()
    broker.delete_topic("Gone")
    for _ in range(20):
        fill(broker, 200)
        assert replica.follow()
        manual(broker).advance(20_000)
        if broker.clean_unused_topics():
            break
    send(broker, "Gone", b"new")
    assert replica.follow()
    assert [one.body for one in replica.store.messages("Gone", 0)] == [b"new"]
    assert replica.store.verify().damage == ()


def test_a_deleted_topic_is_deleted_at_the_replica(tmp_path: Path) -> None:
    runner = ManualRunner()
    with Broker.open(tmp_path / "a", runner=runner) as broker:
        broker.create_topic("Gone", 1)
        with Replica.open(tmp_path / "b", of=broker):
            runner.advance(20_000)
            broker.delete_topic("Gone")
            runner.advance(20_000)
    promote_replica(tmp_path / "b")
    with Broker.open(tmp_path / "b", runner=ManualRunner()) as promoted:
        assert "Gone" not in promoted.topics()


def test_a_promoted_copy_is_a_store_of_its_own() -> None:
    files = MemoryFiles()
    broker = opened(files)
    fill(broker)
    with copy_of(broker) as replica:
        with pytest.raises(StoreLockedError):
            promote_replica(COPY, files=files)
        replica.promote()
    with pytest.raises(ReplicaError, match="expected a replica, found none"):
        promote_replica(COPY, files=files)
    with Broker.open(COPY, files=files, runner=manual(broker)) as promoted:
        assert Producer(promoted, "p").send("T", b"new").status is SendStatus.SEND_OK
        assert len(list(promoted.messages("T"))) == 101
    assert verify(COPY, StoreConfig.tiny(), files).damage == ()
    with pytest.raises(ReplicaError, match="a store of its own"):
        copy_of(broker)


def test_a_pull_beyond_the_copy_waits_for_it() -> None:
    """The master has these messages, so the offset is not illegal, and the consumer keeps its progress."""
    broker = opened()
    fill(broker, 9)
    link = ReplicaLink(broker, manual(broker).manual_clock)
    replica = copy_of(broker, of=link)
    link.cut()
    fill(broker, 9)
    told: list[int] = []
    found = pull(replica.broker, "T", 5)
    assert (found.status, found.next_offset) == (PullStatus.NO_NEW_MESSAGE, 5)
    found = pull(replica.broker, "T", 5, notify=lambda: told.append(1))
    assert (found.status, found.next_offset) == (PullStatus.HELD, 5)
    link.restore()
    assert replica.follow()
    assert told == [1]
    assert pull(replica.broker, "T", 5).status is PullStatus.FOUND


def test_a_master_suggests_its_replica_for_old_messages() -> None:
    broker = opened(store=StoreConfig.tiny(memory_ratio=0))
    fill(broker, 30)
    assert not pull(broker, "T").suggests_replica
    copy_of(broker)
    assert pull(broker, "T").suggests_replica
    recent = opened()
    fill(recent, 30)
    copy_of(recent)
    assert not pull(recent, "T").suggests_replica


@pytest.mark.parametrize("since_ms", [0, 4_000, 9_999])
def test_progress_follows_within_ten_seconds(since_ms: int) -> None:
    """The replica knows all progress that was stored 10 s before the master ended."""
    broker = opened()
    runner = manual(broker)
    fill(broker, 9)
    replica = copy_of(broker)
    runner.advance(since_ms)
    for offset in range(1, 4):
        broker.call(UpdateOffset("g", "T", 0, offset))
        runner.advance(10_000)
        assert replica.broker.consumer_offset("g", "T") == offset


def test_a_failover_repeats_the_last_messages() -> None:
    """With one message a second and progress copied every 10 s, at most 15 of 47 messages are delivered again.

    A consumer sends its progress to the broker every 5 s, and the replica copies it up to 10 s later.
    """
    broker = opened()
    runner = manual(broker)
    replica = copy_of(broker)
    got: list[bytes] = []
    consumer = PushConsumer(broker, "g")
    consumer.subscribe("T", lambda message: got.append(message.body))
    consumer.start()
    for number in range(47):
        send(broker, "T", b"%d" % number)
        runner.advance(1000)
    assert len(got) == 47
    assert replica.lag_bytes == 0
    broker.abandon()
    again: list[bytes] = []
    other = PushConsumer(replica.broker, "g")
    other.subscribe("T", lambda message: again.append(message.body))
    other.start()
    runner.advance(5000)
    assert 0 < len(again) <= 15
    assert again == got[-len(again) :]
    other.shutdown()
    replica.close()


@pytest.mark.slow
def test_a_store_of_another_writer_is_followed_on_disk(tmp_path: Path) -> None:
    """Without a broker or connection, the replica reads the files while another process writes them."""
    runner = ManualRunner()
    master = Broker.open(tmp_path / "m", store_config=StoreConfig.tiny(), runner=ManualRunner())
    fill(master, 200)
    with Replica.open(tmp_path / "c", of=tmp_path / "m", runner=runner) as replica:
        runner.advance(1000)
        assert replica.end == master.store.log.end
        fill(master, 200)
        runner.advance(1000)
        assert replica.end == master.store.log.end
        master.call(UpdateOffset("g", "T", 0, 7))
        manual(master).advance(6000)
        runner.advance(10_000)
        assert replica.broker.consumer_offset("g", "T") == 7
        master.abandon()
        runner.advance(1000)
        again = Broker.open(tmp_path / "m", runner=ManualRunner())
        fill(again, 50)
        runner.advance(100_000)
        assert log_files(replica.store) == log_files(again.store)
        assert replica.store.verify().damage == ()
        again.close()


class _CountedFiles(DiskFiles):
    """Files on disk that note the name of each file that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def write(self, path: str, data: bytes | Iterable[bytes]) -> None:
        self.written.append(os.path.basename(path))
        super().write(path, data)


@pytest.mark.slow
def test_tables_of_a_folder_are_copied_only_if_their_content_changes(tmp_path: Path) -> None:
    """A broker of 4.9 rewrites its tables every few seconds, so a new time alone copies nothing."""
    master = Broker.open(tmp_path / "m", store_config=StoreConfig.tiny(), runner=ManualRunner())
    fill(master, 20)
    master.call(UpdateOffset("g", "T", 0, 7))
    manual(master).advance(6000)
    files, runner = _CountedFiles(), ManualRunner()
    with Replica.open(tmp_path / "c", of=tmp_path / "m", runner=runner, files=files) as replica:
        runner.advance(20_000)
        files.written.clear()
        for _ in range(3):
            for table in (tmp_path / "m/config").iterdir():
                table.write_bytes(table.read_bytes())
            runner.advance(10_000)
        assert files.written == []
        master.call(UpdateOffset("g", "T", 0, 9))
        manual(master).advance(6000)
        runner.advance(20_000)
        assert set(files.written) == {"consumerOffset.json", "consumerOffset.json.bak"}
        assert replica.broker.consumer_offset("g", "T") == 9
    master.close()


def test_tables_of_a_folder_are_parsed_only_if_their_content_changes(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "m", store_config=StoreConfig.tiny(), runner=ManualRunner()) as broker:
        fill(broker, 20)
        broker.call(UpdateOffset("g", "T", 0, 7))
    master = StoredMaster(tmp_path / "m")
    first = master.call(CopyTables())
    path = tmp_path / "m/config/consumerOffset.json"
    path.write_bytes(path.read_bytes())
    assert master.call(CopyTables()) is first
    path.write_bytes(path.read_bytes().replace(b"0:7", b"0:8"))
    assert first.offsets["T@g"] == {0: 7}
    assert master.call(CopyTables()).offsets["T@g"] == {0: 8}
    master.close()


def test_a_restarted_writer_behind_a_blank_is_followed(tmp_path: Path) -> None:
    """The writer is killed after the blank of a log file and before the first record of the next one."""
    store = MessageStore.open(tmp_path / "m", StoreConfig.tiny())
    end = store.append(Message("T", b"o-1"))[0]
    store.log.make_room(store.log.file_size - 50)
    assert store.log.end == store.log.file_size > end
    store.abandon()
    with Replica.open(tmp_path / "c", of=tmp_path / "m", runner=ManualRunner()) as replica:
        assert replica.end == store.log.end
        replica.close()
        assert verify(tmp_path / "c").damage == ()
    with Replica.open(tmp_path / "c", of=tmp_path / "m", runner=ManualRunner()) as replica:
        assert replica.end == store.log.end
        with MessageStore.open(tmp_path / "m") as again:
            assert replica.follow()
            again.append(Message("T", b"o-2"))
            assert replica.follow()
            assert [one.body for one in replica.store] == [b"o-1", b"o-2"]


@pytest.mark.parametrize("part", ["commitlog", "consumequeue/T/0", "index"])
def test_a_store_killed_with_an_empty_file_is_read(tmp_path: Path, part: str) -> None:
    """A kill can leave a new file without a length; readers and replicas ignore it, as a recovery does."""
    store = MessageStore.open(tmp_path / "m", StoreConfig.tiny())
    for number in range(30):
        store.append(Message("T", b"o-%d" % number, keys="k"))
    store.flush()
    store.abandon()
    last = max((tmp_path / "m" / part).iterdir())
    following = int(last.name) + (1 if part == "index" else last.stat().st_size)
    (last.parent / str(following).zfill(len(last.name))).touch()
    before = {path: path.stat().st_size for path in (tmp_path / "m").rglob("*")}
    with MessageStore.open(tmp_path / "m", read_only=True) as reader:
        assert len(list(reader)) == 30
    with Replica.open(tmp_path / "c", of=tmp_path / "m", runner=ManualRunner()) as replica:
        assert len(list(replica.store)) == 30
    assert {path: path.stat().st_size for path in (tmp_path / "m").rglob("*")} == before


def test_senders_in_threads_share_a_copy(tmp_path: Path) -> None:
    config = BrokerConfig(replication="sync", replica_timeout_s=60)
    with (
        Broker.open(tmp_path / "m", config) as broker,
        Replica.open(tmp_path / "c", of=broker, metrics=(metrics := Metrics())) as replica,
    ):
        results: list[SendStatus] = []

        def run(name: str) -> None:
            for _ in range(50):
                results.append(send(broker, name).status)

        threads = [threading.Thread(target=run, args=(f"T{number}",)) for number in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert results == [SendStatus.SEND_OK] * 200
        assert replica.end == broker.store.log.end
        assert metrics.snapshot()["replica_lag_bytes"] == {(): 0}
        assert repr(replica).endswith("0 bytes behind>")
    assert verify(str(tmp_path / "c"), None, DiskFiles()).damage == ()


@pytest.mark.parametrize("folder", store_folders())
def test_recorded_stores_are_copied_byte_for_byte(folder: Path) -> None:
    """The log is copied with its blanks and what follows them; the copy derives its queues itself."""
    source, files = folder / "store", DiskFiles()
    with MessageStore.open(source, read_only=True) as master:
        runner, memory = ManualRunner(), MemoryFiles()
        link = _OnDisk(source, files)
        with Replica.open(COPY, of=link, runner=runner, files=memory) as replica:
            assert replica.follow()
            assert log_files(replica.store) == {
                name: files.read(f"{source}/commitlog/{name}", 0, 1 << 30)[: master.log.end - int(name)]
                for name in (f"{start:020}" for start in master.log.sequence.starts)
                if master.log.end > int(name)
            }
            assert set(replica.store.queues) == {name for name in master.queues if master.queue_range(*name)[1]}
            for name in replica.store.queues:
                mine, theirs = replica.store.queue(*name), master.queue(*name)
                assert mine is not None
                assert theirs is not None
                assert mine.max_offset == theirs.max_offset
                assert [one.raw for one in replica.store.messages(*name)] == [one.raw for one in master.messages(*name)]
            assert replica.store.verify().damage == ()


class _OnDisk:
    """Serves a store on disk as the master of a replica in memory."""

    def __new__(cls, path: Path, files: Files) -> Any:
        assert directory.recognise(str(path), files).has_log
        return StoredMaster(path, files=files)


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_copy_interrupted_by_a_signal_is_completed(is_checked: bool) -> None:
    """SIGINT comes at each call that the copy makes; each second copy is left alone and completes the one before."""
    broker = opened(store=StoreConfig.tiny())
    link = ReplicaLink(broker, manual(broker).manual_clock)
    replica = copy_of(broker, of=link)
    link.cut()
    log, copies = broker.store.log, 0

    def copy() -> None:
        begin = replica.end
        replica.store.writer.copy_log(begin, log.data_at(begin, log.end - begin), is_checked=is_checked)

    rounds = at_each_call(copy)
    while True:
        fill(broker, 2, f"T{copies // 20}")
        if log.end // log.file_size > replica.end // log.file_size:  # the rest of a file is copied with its blank
            link.restore()
            assert replica.follow()
            link.cut()
            continue
        copies += 1
        if not next(rounds):
            break
        if copies % 2:
            copy()
            assert replica.end == log.end
    assert copies > 20
    link.restore()
    assert_copies(replica, broker)
    replica.close()
    assert verify(COPY, broker.store.config, broker.store.files).damage == ()
