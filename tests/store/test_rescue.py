"""Messages rescued from a damaged store can be consumed, and progress is carried over."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from librmq import ManualRunner, Message, Producer, PushConsumer
from librmq.broker import Broker
from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.errors import StoreIOError
from librmq.files import DiskFiles, File, MemoryFiles
from librmq.files.interface import is_folder
from librmq.message.record import FIXED_SIZE
from librmq.message.topics import SystemTopic
from librmq.store import MessageStore
from librmq.store.extraction import rescue
from librmq.store.format.broker_tables import BrokerTables
from librmq.store.format.spark_jobs import JobNote, noted_jobs
from librmq.store.recovery._verify import verify
from tests.file_seams import FailingFiles
from tests.stores import START_MS

CONFIG = StoreConfig.tiny()


def spoil(folder: Path, physical_offset: int, at: int) -> None:
    """Change one byte of a record."""
    start = physical_offset - physical_offset % CONFIG.commitlog_file_size
    with open(folder / "commitlog" / f"{start:020d}", "r+b") as file:
        file.seek(physical_offset - start + at)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0x55]))


def consumed(folder: Path, group: str) -> list[bytes]:
    """Return the messages that a group gets when it starts on a store."""
    runner, seen = ManualRunner(ManualClock(START_MS + 10**9)), []
    with Broker.open(folder, runner=runner) as broker:
        consumer = PushConsumer(broker, group)
        consumer.subscribe("T")(lambda message: seen.append(message.body))
        consumer.start()
        runner.advance(60_000)
        consumer.shutdown()
    return seen


def store_of(folder: Path, count: int = 500) -> list[int]:
    """Create a store with messages in one queue, 250 of them consumed by a group; return their places."""
    runner = ManualRunner(ManualClock(START_MS))
    with Broker.open(folder, store_config=CONFIG, runner=runner) as broker:
        broker.create_topic("T", 1)
        producer = Producer(broker, "p")
        for number in range(count):
            producer.send("T", b"%d" % number)
        places = [message.physical_offset for message in broker.store.messages("T")]
    tables = BrokerTables.open(f"{folder}/config")
    tables.set_consumer_offset("T", "half-way", 0, 250)
    tables.set_consumer_offset("T", "ready", 0, 500)
    tables.set_consumer_offset("gone", "ready", 0, 7)
    tables.persist(START_MS)
    return places


def test_a_rescued_store_is_consumed_to_its_end(tmp_path: Path) -> None:
    places = store_of(tmp_path / "old")
    spoil(tmp_path / "old", places[100], 88)
    made = rescue(str(tmp_path / "old"), str(tmp_path / "new"), CONFIG)
    assert (made.records, made.gaps) == (499, 1)
    assert verify(tmp_path / "new", CONFIG).sound
    with MessageStore.open(tmp_path / "new", read_only=True) as store:
        assert [message.queue_offset for message in store.messages("T")] == list(range(499))
        assert store.queues["T", 0].stored_begin == 0
    wanted = [b"%d" % number for number in range(500) if number != 100]
    assert consumed(tmp_path / "new", "fresh") == wanted
    assert consumed(tmp_path / "new", "half-way") == wanted[249:]
    assert consumed(tmp_path / "new", "ready") == []
    tables = BrokerTables.open(str(tmp_path / "new" / "config"))
    assert tables.consumer_offset("gone", "ready", 0) == 0


def test_a_sound_store_is_rescued_with_equal_log_and_queues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # So that queues are written in parts.
    monkeypatch.setattr("librmq.store.recovery._copied_parts._MOST_COLLECTED", 200)
    config = replace(CONFIG, consumequeue_file_size=160)
    with MessageStore.open(tmp_path / "store", config, background=False) as store:
        for number in range(60):
            store.append(Message(f"T{number % 3 // 2}", b"x" * 100, keys=f"k{number}"), number % 3)
    rescue(str(tmp_path / "store"), str(tmp_path / "saved"))
    for folder in ("commitlog", "consumequeue"):
        files = [path.relative_to(tmp_path / "store") for path in (tmp_path / "store" / folder).rglob("*")]
        assert files
        assert sorted(files) == sorted(
            path.relative_to(tmp_path / "saved") for path in (tmp_path / "saved" / folder).rglob("*")
        )
        for file in files:
            place, saved = tmp_path / "store" / file, tmp_path / "saved" / file
            assert place.is_dir() or place.read_bytes() == saved.read_bytes(), file
    assert not verify(tmp_path / "saved").damage


@pytest.mark.parametrize("call", ["make_files", "flush_folder", "rename"])
def test_a_call_that_fails_leaves_no_store(call: str) -> None:
    files = FailingFiles(MemoryFiles())
    with MessageStore.open("/store", CONFIG, files=files, background=False) as store:
        store.append(Message("T", b"one"))
    files.fail(call)
    with pytest.raises(StoreIOError):
        rescue("/store", "/saved", files=files)
    assert not is_folder(files, "/saved")
    assert not is_folder(files, "/saved.part")
    assert rescue("/store", "/saved", files=files).records == 1


def test_a_lost_message_at_the_progress_is_skipped(tmp_path: Path) -> None:
    places = store_of(tmp_path / "old")
    for number in (0, 249, 250):
        spoil(tmp_path / "old", places[number], 88)
    rescue(str(tmp_path / "old"), str(tmp_path / "new"), CONFIG)
    assert consumed(tmp_path / "new", "half-way") == [b"%d" % number for number in range(251, 500)]


def test_progress_of_delays_and_transactions_is_translated(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "old", CONFIG, clock=ManualClock(START_MS)) as store:
        delayed = [store.append(Message("T", b"d%d" % number, delay_level=3)) for number in range(6)]
        halves = [store.append(Message(SystemTopic.HALF, b"h%d" % number)) for number in range(12)]
        for number in (0, 10, 11):
            store.append(Message(SystemTopic.OP, b"%d" % number, tags="d"))
        store.append(Message(SystemTopic.OP, b"8,9,10,", tags="d"))  # as 5.x writes it
    tables = BrokerTables.open(str(tmp_path / "old" / "config"))
    tables.set_delay_offset(3, 4)
    tables.set_consumer_offset(SystemTopic.HALF, "CID_RMQ_SYS_TRANS", 0, 2)
    tables.persist(START_MS)
    spoil(tmp_path / "old", delayed[1].physical_offset, 88)
    spoil(tmp_path / "old", halves[0].physical_offset, 88)
    spoil(tmp_path / "old", halves[9].physical_offset, FIXED_SIZE - 2)
    rescue(str(tmp_path / "old"), str(tmp_path / "new"), CONFIG)
    tables = BrokerTables.open(str(tmp_path / "new" / "config"))
    assert tables.delay_offset(3) == 3
    assert tables.consumer_offset(SystemTopic.HALF, "CID_RMQ_SYS_TRANS", 0) == 1
    assert not (tmp_path / "new" / "config" / "consumerOffset.json.bak").exists()
    with MessageStore.open(tmp_path / "new", read_only=True) as store:
        assert [message.body for message in store.messages(SystemTopic.HALF)] == [
            b"h%d" % n for n in range(1, 12) if n != 9
        ]
        assert [message.body for message in store.messages(SystemTopic.OP)] == [b"-1", b"8", b"9", b"7,-1,8,"]
    assert verify(tmp_path / "new", CONFIG).sound


def test_progress_of_a_recreated_topic_is_that_of_the_later(tmp_path: Path) -> None:
    """If a topic was deleted and created again, progress belongs to the later topic."""
    store_of(tmp_path / "old", 20)
    with MessageStore.open(tmp_path / "old", CONFIG) as store:
        store.queues["T", 0].clear()
        for number in range(4):
            store.append(Message("T", b"again %d" % number))
    tables = BrokerTables.open(str(tmp_path / "old" / "config"))
    tables.set_consumer_offset("T", "half-way", 0, 3)
    tables.persist(START_MS)
    rescue(str(tmp_path / "old"), str(tmp_path / "new"), CONFIG)
    assert consumed(tmp_path / "new", "half-way") == [b"again 3"]


def test_jobs_of_spark_stay_committed(tmp_path: Path) -> None:
    """A job that is committed again on the rescued store is found where its records are now."""
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    files = DiskFiles()
    places = store_of(tmp_path / "old")
    (tmp_path / "old" / JobNote.FOLDER).mkdir(parents=True)

    def remember(job: str, first: int, last: int, *, done: bool = True, raw: bytes | None = None) -> None:
        with MessageStore.open(old, read_only=True) as store:
            found = bytes(store.log.data_at(places[first], 64) or b"") if raw is None else raw
        JobNote(places[first], places[last], found, last - first, done).write(JobNote.path(old, job), files)

    remember("whole", 110, 120)
    remember("without-its-first", 150, 160)
    remember("killed-before-its-end", 200, 210, done=False)
    remember("never-appeared", 220, 230, done=False, raw=bytes(64))
    remember("killed-and-damaged", 300, 310, done=False)
    remember("lost", 400, 402)
    JobNote(0, 0, b"", 0, True).write(JobNote.path(old, "empty"), files)
    (tmp_path / "old" / JobNote.FOLDER / "unreadable.json").write_text("{")
    for number in (100, 150, 300, 400, 401):
        spoil(tmp_path / "old", places[number], 88)
    told: list[str] = []
    rescue(old, new, CONFIG, tell=lambda gap: told.append(gap.file))
    assert sum(file.endswith("unreadable.json") for file in told) == 1

    assert sorted(noted_jobs(new, files)) == ["empty", "killed-before-its-end", "whole", "without-its-first"]
    with MessageStore.open(new, read_only=True) as store:
        starts = {message.body: message.physical_offset for message in store.messages("T")}
        for job in noted_jobs(new, files):
            note = JobNote.read(JobNote.path(new, job), files)
            assert note.is_committed(store.log.begin, store.log.end, store.log.data_at)
    assert JobNote.read(JobNote.path(new, "whole"), files).begin == starts[b"110"]
    assert JobNote.read(JobNote.path(new, "whole"), files).end == starts[b"120"]
    assert JobNote.read(JobNote.path(new, "without-its-first"), files).begin == starts[b"151"]


def test_a_job_that_retention_deleted_stays_done(tmp_path: Path) -> None:
    files = DiskFiles()
    places = store_of(tmp_path / "old")
    second = CONFIG.commitlog_file_size
    assert places[-1] > second
    (tmp_path / "old" / JobNote.FOLDER).mkdir(parents=True)
    JobNote(places[1], places[3], b"gone", 2, True).write(JobNote.path(str(tmp_path / "old"), "early"), files)
    (tmp_path / "old" / "commitlog" / f"{0:020d}").unlink()
    rescue(str(tmp_path / "old"), str(tmp_path / "new"), CONFIG)
    with MessageStore.open(tmp_path / "new", read_only=True) as store:
        note = JobNote.read(JobNote.path(str(tmp_path / "new"), "early"), files)
        assert note.is_committed(store.log.begin, store.log.end, store.log.data_at)


def test_a_copy_that_was_killed_lacks_no_entry_if_a_program_opens_it(tmp_path: Path) -> None:
    class Killed(DiskFiles):
        def create(self, path: str, size: int, *, keep_descriptor: bool = False) -> File:
            if "saved.part" in path and Path(path).parent.parts[-2:] == ("T1", "0") and path.endswith("0" * 20):
                shutil.copytree(tmp_path / "saved.part", tmp_path / "left")  # a kill would leave this
            return super().create(path, size, keep_descriptor=keep_descriptor)

    config = replace(CONFIG, consumequeue_file_size=1280)
    with MessageStore.open(tmp_path / "store", config) as store:
        for number in range(1200):
            store.append(Message(f"T{number % 3}", bytes(100)), number % 2)
    rescue(str(tmp_path / "store"), str(tmp_path / "saved"), config, files=Killed())
    for copy in ("left", "saved"):
        with MessageStore.open(tmp_path / copy) as store:
            assert [queue.max_offset for queue in store.queues.values()] == [200] * 6
