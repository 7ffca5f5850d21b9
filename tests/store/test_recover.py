"""Opening a store that was not closed, or that lacks derived data."""

from __future__ import annotations

import os
import random
import struct
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from librmq.clock import ManualClock
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.consumequeue_entries import ENTRY, ENTRY_SIZE
from librmq.errors import CorruptionError, MessageIllegalError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import File, file_size, is_folder
from librmq.message import record
from librmq.message.message import Message
from librmq.store import Checkpoint, MessageStore
from librmq.store.recovery import salvage
from librmq.store.recovery._verify import verify
from librmq.store.recovery.open import clear_leftovers
from librmq.store.retention import Retention
from tests.budget import step
from tests.file_seams import FailingFiles, RecordingFiles
from tests.stores import (
    ROOT,
    SMALL,
    SMALL_EXT,
    START_MS,
    Contents,
    apply,
    configs,
    contents,
    derived,
    died,
    fill,
    filled,
    in_memory,
    opened,
    retained,
    served,
)


def records_of(found: Contents, config: StoreConfig = SMALL) -> int:
    """Count the records of a store's log."""
    with opened(in_memory(found), config, read_only=True) as store:
        return len(list(store))


# ------------------------------------------------------------------------------------------------- after a kill


MAGIC = record.MESSAGE_MAGIC.to_bytes(4, "big")


@pytest.mark.slow
@configs
def test_every_prefix_of_the_writes_recovers(config: StoreConfig) -> None:
    """A store killed between any two writes recovers every record that was written completely, and continues."""
    files = RecordingFiles()
    clock = ManualClock(START_MS)
    store = MessageStore.open(ROOT, config, files=files, clock=clock)
    fill(store, clock, random.Random(7), 12)
    store.flush()
    fill(store, clock, random.Random(8), 25)
    store.close()
    replay = MemoryFiles()
    whole: set[int] = set()
    is_new = False
    for number, event in enumerate(files.trace):
        is_new |= apply(replay, event)
        if event.call == "write" and "/commitlog/" in event.path and event.data[4:8] == MAGIC:
            whole.add(int(os.path.basename(event.path)) + event.offset)
        if (
            (number % (3 * step()) and event.call == "write")
            or not is_folder(replay, f"{ROOT}/commitlog")
            or not is_new
        ):
            continue
        is_new = False
        copy = died(replay)
        with opened(copy, config) as again:
            assert whole <= set(served(again))
            again.append(Message("TopicA", b"more"))
        verdict = verify(ROOT, config, copy)
        assert verdict.sound, (number, event, verdict.damage)
    assert file_size(replay, f"{ROOT}/abort") is None


def test_long_retry_topics_of_5_are_kept(tmp_path: Path) -> None:
    """Such a record has two bytes for the length of its topic, which is that of a group and another topic."""
    topic = f"%RETRY%{'g' * 120}_{'t' * 127}"
    with MessageStore.open(tmp_path, StoreConfig.tiny()) as store:
        end = store.append(Message("orders", b"first")).size
    raw = record.encode_record(record.Record(topic=topic, physical_offset=end, magic=record.MESSAGE_MAGIC_V2))
    with (tmp_path / "commitlog" / f"{0:020}").open("r+b") as log:
        log.seek(end)
        log.write(
            raw + record.encode_record(record.Record(topic="orders", physical_offset=end + len(raw), queue_offset=1))
        )
    (tmp_path / "abort").touch()
    expected = ["orders", topic, "orders"]
    with MessageStore.open(tmp_path, read_only=True) as view:
        assert [message.topic for message in view] == expected
    with MessageStore.open(tmp_path) as store:
        assert [message.topic for message in store] == expected
        assert [message.topic for message in store.read(topic, 0, 0, 32).messages] == [topic]
        with pytest.raises(MessageIllegalError, match="expected at most 127"):
            store.append(Message(topic, b""))
    assert verify(tmp_path).sound


def test_after_a_recovery_the_checkpoint_covers_all() -> None:
    found = filled(SMALL, 80, clean=False)
    files = in_memory({**found, "checkpoint": struct.pack(">qqq", *3 * (START_MS,)) + bytes(4072)})
    with opened(files) as store:
        *_, last = store
        checkpoint = Checkpoint.open(f"{ROOT}/checkpoint", files=files)
        assert checkpoint.physic_timestamp_ms == checkpoint.logics_timestamp_ms == last.store_timestamp_ms


def zeroed(found: Contents, begin: int, size: int = 8) -> Contents:
    """Return the contents with a stretch of zeros in the log."""
    path = f"commitlog/{begin - begin % 4096:020d}"
    data, at = found[path], begin % 4096
    return {**found, path: data[:at] + bytes(size) + data[at + size :]}


@pytest.mark.parametrize("at", [3, 4], ids=["size", "magic"])
def test_a_covered_file_whose_first_record_rotted_is_cut_only_on_demand(at: int) -> None:
    """Recovery begins at the file before it, and so meets the rot with a sound record before it."""
    found = filled(SMALL, 120, clean=False)
    with opened(in_memory(found), read_only=True) as store:
        covered_ms = store.checkpoint.min_timestamp_ms
        begin = store.log.file_before(covered_ms)
    path = f"commitlog/{begin:020d}"
    data = found[path]
    found[path] = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    files = in_memory(found)
    log = CommitLog.open(f"{ROOT}/commitlog", 4096, files=files, writable=False)
    assert log.file_before(covered_ms) == begin - 4096
    with pytest.raises(CorruptionError, match="which no crash leaves") as told:
        opened(files)
    assert told.value.offset == begin
    assert contents(files)[path] == found[path]
    with opened(files, thorough=True) as store:
        assert store.log.end == begin
        served(store)
    assert verify(ROOT, SMALL, files).sound


def test_zeros_in_properties_are_not_damage_while_open() -> None:
    """After a crash they would count as words that were never written."""
    files = MemoryFiles()
    with MessageStore.open(ROOT, SMALL, files=files, clock=ManualClock(START_MS)) as store:
        place = store.append(Message("TopicA", b""), properties_raw=b"a\1b\2cc\1" + bytes(1000)).physical_offset
        assert store.recover() == []
        assert [message.physical_offset for message in store] == [place]
        crashed = died(files)
    with opened(crashed) as store:
        assert list(store) == []


@pytest.mark.parametrize(
    ("begin", "size", "behind", "is_served"),
    [
        (1100, 500, b"", True),  # inside a word, where no write ends; brokers accept the record
        (1104, 496, b"", False),
        (1104, 496, b"\xff", True),  # no interrupted write has data after it
        (1104, 100, b"", True),
        (1024, 512, b"", False),  # a whole sector is missing
        (1024, 512, b"\xff", False),
        (1023, 513, b"\xff", True),
        (1025, 511, b"\xff", True),
        (1536, 64, b"\xff", True),  # part of a sector is missing
        (1536, 64, b"", False),
    ],
)
def test_zeros_in_properties_are_a_crash_at_the_end(begin: int, size: int, behind: bytes, is_served: bool) -> None:
    """Zeros in a record's properties count as a crash only where a crash can leave them."""
    files = MemoryFiles()
    store = MessageStore.open(ROOT, SMALL, files=files, clock=ManualClock(START_MS))
    properties = b"a\1".ljust(1600 - record.FIXED_SIZE - len(b"TopicA") - len(b"b"), b"x")
    place = store.append(Message("TopicA", b"b"), properties_raw=properties).physical_offset
    assert (place, store.log.end) == (0, 1600)
    found = zeroed(contents(died(files)), begin, size)
    path = f"commitlog/{0:020d}"
    data = found[path]
    found[path] = data[:1600] + behind + data[1600 + len(behind) :]
    again = in_memory(found)
    with opened(again) as store:
        assert len(served(store)) == is_served
    assert verify(ROOT, SMALL, again).sound


@configs
@pytest.mark.parametrize("thorough", [False, True])
def test_entry_and_keys_of_a_torn_record_stay(config: StoreConfig, thorough: bool) -> None:
    """As in 4.9: the properties have lost tag and keys, but entry and keys were written before."""
    config = replace(config, max_index_num=5)  # fills the index file with its keys, so the checkpoint covers it
    files = MemoryFiles()
    store = MessageStore.open(ROOT, config, files=files, clock=ManualClock(START_MS))
    store.append(Message("TopicA", b"a", tags="x", keys=["k0", "k1", "k2"]))
    properties = b"TAGS\1tag\2KEYS\1old\2".ljust(100, b"p") + b"\1v"
    store.append(Message("TopicA", b"b"), properties_raw=properties)
    end = store.log.end
    store.append(Message("Other", b"c", keys="k3"))
    store.flush()
    keys = [file.entries().tolist() for file in store.index.files]
    entries = store.queue("TopicA", 0).entries().tolist()  # type: ignore[union-attr]
    begin = (end - len(properties)) | 1  # inside a word: otherwise the record is cut as never completely written
    found = zeroed(contents(died(files)), begin, end - begin)
    with opened(in_memory(found), config, thorough=thorough) as again:
        assert again.queue("TopicA", 0).entries().tolist() == entries  # type: ignore[union-attr]
        assert [file.entries().tolist() for file in again.index.files] == keys
        assert again.verify().sound
        assert not [one for one in again.recovered if one.kind in ("entry", "index")]


class CountingFiles(MemoryFiles):
    """Files that count how often each is opened."""

    def __init__(self, found: Contents) -> None:
        super().__init__()
        self.opened: Counter[str] = Counter()
        for path, data in found.items():
            if data is not None:
                self.make_folder(f"{ROOT}/{os.path.dirname(path)}")
                self.write(f"{ROOT}/{path}", data)

    def open(self, path: str, *, writable: bool = False, keep_descriptor: bool = False) -> File:
        self.opened[path] += 1
        return super().open(path, writable=writable, keep_descriptor=keep_descriptor)


def test_each_of_many_queues_is_opened_once_after_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening files is the main cost of reopening a store with many queues."""
    monkeypatch.setattr("librmq.store.recovery._log_end.flush_all", lambda *_: True)  # as on Linux
    files = MemoryFiles()
    store = MessageStore.open(ROOT, SMALL, files=files, clock=ManualClock(START_MS))
    for number in range(300):
        store.append(Message("TopicA", b"body"), number % 100)
    assert len(store.read("TopicA", 99, 0).messages) == 3  # the entries are written
    again = CountingFiles(contents(died(files)))
    with MessageStore.open(ROOT, replace(SMALL, mapped_files=4), files=again, clock=ManualClock(START_MS)) as store:
        queues = {path: count for path, count in again.opened.items() if "/consumequeue/" in path}
        assert queues == {f"{ROOT}/consumequeue/TopicA/{number}/{0:020d}": 1 for number in range(100)}
        assert store.verify().sound


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a file may not have the changes of its mapping")
@pytest.mark.parametrize(("is_killed", "thorough"), [(True, False), (True, True), (False, True)])
def test_small_queues_are_not_mapped(tmp_path: Path, is_killed: bool, thorough: bool) -> None:
    """After a kill, and in a check of the whole log, only a queue that has something wrong is mapped.

    All are served as before.
    """
    store = MessageStore.open(tmp_path, SMALL)
    for number in range(300):
        store.append(Message("TopicA", b"body", tags=f"t{number % 3}"), number % 100)
    store.flush()
    (MessageStore.abandon if is_killed else MessageStore.close)(store)
    damaged = tmp_path / "consumequeue" / "TopicA" / "7" / f"{0:020d}"
    with open(damaged, "r+b") as file:
        file.seek(25)
        file.write(b"\7")
    files = FailingFiles(DiskFiles())
    files.is_shared = True  # so that one flush covers all of its disk
    with MessageStore.open(tmp_path, SMALL, files=files, thorough=thorough) as store:
        assert files.calls["open"] < 50
        assert [damage.file for damage in store.recovered if "consumequeue" in damage.file] == [str(damaged)]
        assert [store.queues["TopicA", number].max_offset for number in range(100)] == [3] * 100
        for number in range(100):
            assert store.append(Message("TopicA", b"body"), number).queue_offset == 3
    assert verify(str(tmp_path), SMALL, DiskFiles()).sound


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a file may not have the changes of its mapping")
def test_a_queue_that_is_damaged_after_a_check_of_all_keeps_its_file(tmp_path: Path) -> None:
    """Such a check keeps no file mapped, and repairs none afterwards."""
    with MessageStore.open(tmp_path, SMALL) as store:
        for _ in range(SMALL.consumequeue_file_size // ENTRY_SIZE + 1):
            store.append(Message("TopicA", b"body"), 0)
    with MessageStore.open(tmp_path, SMALL, thorough=True) as store:
        damaged = tmp_path / "consumequeue" / "TopicA" / "0" / f"{0:020d}"
        os.truncate(damaged, ENTRY_SIZE)
        with pytest.raises(CorruptionError, match=f"expected {SMALL.consumequeue_file_size} bytes, found {ENTRY_SIZE}"):
            store.read("TopicA", 0, 0)
        assert damaged.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="no other system flushes a whole disk")
@pytest.mark.parametrize("part", ["consumequeue", "consumequeue_ext", "consumequeue/TopicA"])
def test_the_disk_of_many_queues_is_flushed(tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues can be on another disk than the rest of the store."""
    flushed: list[bool] = []

    def flush(descriptor: int) -> int:
        flushed.append(is_elsewhere(f"/proc/self/fd/{descriptor}"))
        return 0

    def is_elsewhere(path: str) -> bool:
        return os.path.realpath(path).startswith(str(elsewhere))

    monkeypatch.setattr("librmq.files.interface._syncfs", lambda: flush)
    config = SMALL_EXT if part == "consumequeue_ext" else SMALL
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "store"
    elsewhere.mkdir()
    (folder / "commitlog").mkdir(parents=True)
    (folder / part).parent.mkdir(exist_ok=True)
    (folder / part).symlink_to(elsewhere)
    monkeypatch.setattr("librmq.files.interface._disk_of", is_elsewhere)
    files = DiskFiles(follow_links=True)
    store = MessageStore.open(folder, config, files=files)
    for number in range(100):
        store.append(Message("TopicA", b"body"), number)
    store.flush()
    if part != "consumequeue_ext":  # queues with units are flushed one by one
        assert flushed.count(True) == 1
    flushed.clear()
    store.abandon()
    MessageStore.open(folder, config, files=files).close()
    assert flushed.count(True) == 1


def test_a_queue_continues_serving_from_where_the_log_begins() -> None:
    files = MemoryFiles()
    clock = ManualClock(START_MS)
    store = MessageStore.open(ROOT, SMALL, files=files, clock=clock)
    fill(store, clock, random.Random(1), 120)
    store.flush()  # the deletion is durable
    retention = Retention(retained(store, SMALL))
    retention.delete_before(3 * 4096)
    before = {name: queue.min_offset for name, queue in store.queues.items()}
    assert any(before.values())
    with opened(died(files)) as again:
        assert {name: queue.min_offset for name, queue in again.queues.items()} == before


@pytest.mark.parametrize("there", [0, 2, 4, 7])
def test_an_unwritten_part_of_a_blank_is_a_crash_hole(there: int) -> None:
    """This many of the blank's 8 bytes were written. Their sector also holds the end of the record before."""
    files = MemoryFiles()
    with MessageStore.open(ROOT, SMALL, files=files, clock=ManualClock(START_MS)) as store:
        store.append(Message("TopicA", b"a" * 1500))
        size = store.append(Message("TopicA", b"")).size
        last = store.append(Message("TopicA", b"b" * (4096 - store.log.end - size - 12))).physical_offset
        following = store.append(Message("TopicA", b"")).physical_offset
        assert following == 4096
        crashed = contents(files)
    data = crashed["commitlog/00000000000000000000"]
    assert data[4084:4088] == (12).to_bytes(4, "big")
    crashed["commitlog/00000000000000000000"] = data[: 4084 + there] + bytes(12 - there)
    files = in_memory({**crashed, "checkpoint": bytes(4096)})
    with opened(files) as store:
        assert [message.physical_offset for message in store][-1] == last
        assert store.log.end == 4084
    assert [cut.records for cut in salvage.kept_cuts(ROOT, files)] == [1]
    assert verify(ROOT, SMALL, files).sound


# ------------------------------------------------------------------------------------------------ derived data


@pytest.mark.parametrize("full", [False, True])
def test_an_uncovered_index_file_is_rebuilt(full: bool) -> None:
    """The checkpoint does not cover an index file that is not full, or one that ends later than it says.

    It may name the end of a file that is not full, because another one ended at the same moment.
    The damaged file counts entries that did not reach the device.
    """
    found = filled(SMALL, 80, clean=False)
    path = sorted(path for path in found if path.startswith("index/"))[0 if full else -1]
    data = found[path]
    (count,) = struct.unpack(">i", data[36:40])
    assert (count == SMALL.max_index_num) is full
    found[path] = data[:-200] + bytes(200) if full else data[:72] + bytes(len(data) - 72)
    vouched_for = 0 if full else struct.unpack(">q", data[8:16])[0]
    if not full:  # and those before it are gone
        found = {other: kept for other, kept in found.items() if not other.startswith("index/") or other == path}
    checkpoint = found["checkpoint"]
    found["checkpoint"] = checkpoint[:16] + struct.pack(">q", vouched_for) + checkpoint[24:]
    files = in_memory(found)
    with opened(files) as store:
        assert len(served(store)) == records_of(found)
    assert verify(ROOT, SMALL, files).sound


@pytest.mark.parametrize("words", [1, 2, 3, 4])
def test_an_index_header_torn_at_its_first_entry_is_reported(words: int) -> None:
    """The header has the record's place or time, but counts no entry."""
    files, clock = MemoryFiles(), ManualClock(START_MS)
    store = MessageStore.open(ROOT, SMALL, files=files, clock=clock)
    for number in range(SMALL.max_index_num):
        store.append(Message("TopicA", b"", keys=f"key{number}"))
        clock.advance(seconds=1)
    store.flush()
    first, second = store.index.files
    assert (first.full, second.header.index_count) == (True, 2)
    found, path = contents(died(files)), f"index/{second.name}"
    written = found[path]
    assert written is not None
    header = written[: 8 * words] + struct.pack(">qqqqii", *first.header.follower)[8 * words :]
    found[path] = header.ljust(len(written), b"\0")
    again = in_memory(found)
    verdict = verify(ROOT, SMALL, again)
    assert verdict.sound
    (told, *_) = verdict.recoverable
    assert (told.file, told.kind) == (f"{ROOT}/{path}", "header" if words == 3 else "index")
    with opened(again, thorough=True) as store:
        assert len(served(store)) == SMALL.max_index_num
    assert verify(ROOT, SMALL, again).sound


def test_recovery_and_verify_agree_on_the_unit_before() -> None:
    """A torn address leads to another unit with the same content."""
    files, clock = MemoryFiles(), ManualClock(START_MS)
    store = MessageStore.open(ROOT, SMALL_EXT, files=files, clock=clock)
    for _ in range(60):
        store.append(Message("TopicA", b"body", tags="tag"))
    store.flush()
    Retention(retained(store, SMALL_EXT)).delete_before(4096)
    queue = store.queues["TopicA", 0]
    first = queue.min_offset
    assert first % 8
    found = contents(died(files))
    path, position = queue.place_of(first)
    path = os.path.relpath(path, ROOT)
    data = found[path]
    found[path] = data[: position + 12] + data[position - 8 : position] + data[position + 20 :]
    again = in_memory(found)
    with opened(again, SMALL_EXT) as store:
        assert served(store)
        verdict = store.verify()
        assert verdict.sound, verdict.damage


def test_the_first_of_index_files_with_one_end_is_covered() -> None:
    """The checkpoint covers log and queues far beyond the file."""
    files = MemoryFiles()
    clock = ManualClock(START_MS)
    store = MessageStore.open(ROOT, SMALL, files=files, clock=clock)
    for number in range(80):
        store.append(Message("TopicA", b"", keys=f"k{number}"))
    for _ in range(60):
        clock.advance(seconds=1)
        store.append(Message("TopicA", b"no keys"))
    store.flush()
    first, second, _ = store.index.files
    assert (first.full, second.full) == (True, True)
    assert store.checkpoint.index_timestamp_ms == START_MS
    assert store.log.file_before(store.checkpoint.min_timestamp_ms) > second.header.end_physical_offset
    found = contents(files)
    path = f"index/{second.name}"
    data = found[path]
    found[path] = data[:-200] + bytes(200)
    with opened(in_memory(found)) as again:
        assert len(served(again)) == 140
        assert again.verify().sound


# -------------------------------------------------------------------------------------- damaged or missing files


def test_recovering_an_open_store_mends_it() -> None:
    files = in_memory(filled(SMALL, 60))
    with opened(files) as store:
        assert store.recover() == []
        path = next(f"{ROOT}/{path}" for path in contents(files) if path.startswith("index/") and "/" in path)
        files.open(path, writable=True).buffer[100:104] = b"\xff\xff\xff\xff"
        assert not store.verify().sound
        assert {cut.file for cut in store.recover()} >= {path}
        assert store.verify().sound
        assert len(served(store)) >= 60
        store.append(Message("TopicA", b""))
    assert verify(ROOT, SMALL, files).sound


def test_a_recovery_of_an_open_store_logs_without_a_lock_that_the_log_lacks_a_part(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another thread's handler can wait for the store meanwhile."""
    files = MemoryFiles()
    with opened(files) as store:
        places = [store.append(Message("TopicA", b"%d" % number)).physical_offset for number in range(3)]
    with opened(files) as store:
        files.open(f"{ROOT}/commitlog/{0:020d}", writable=True).buffer[places[2] + record.BODY_AT] ^= 1
        assert [cut.offset for cut in store.recover() if cut.kind == "record"] == [places[2]]
        assert [message.body for message in store.messages("TopicA")] == [b"0", b"1"]
    assert "the log lacks a part: it reached from 0 to" in caplog.text


def test_a_refused_recovery_ends_the_handle() -> None:
    files = in_memory(filled(SMALL, 60))
    store = opened(files)
    files.write(f"{ROOT}/commitlog/x", b"")
    with pytest.raises(CorruptionError):
        store.recover()
    for call in (
        lambda: store.append(Message("TopicA", b"")),
        lambda: store.read("TopicA", 0, 0),
        store.flush,
        store.verify,
    ):
        with pytest.raises(Exception, match="recover"):
            call()
    store.close()
    files.delete(f"{ROOT}/commitlog/x")
    with opened(files) as again:
        assert len(served(again)) == records_of(contents(files))


# ------------------------------------------------------------------------------------------ leftovers of a kill


def test_a_lost_log_file_that_was_flushed_is_no_leftover_of_a_crash(tmp_path: Path) -> None:
    """Behind it is a file that was prepared, as behind the last one of a running store."""
    config = StoreConfig(commitlog_file_size=8 << 20)
    store = MessageStore.open(tmp_path / "store", config)
    for _ in range(5):
        store.append(Message("orders", bytes(3 << 20)))
    store.flush()  # more than 8 MiB, so it notes where the log ends
    store.abandon()
    log = tmp_path / "store" / "commitlog"
    (log / f"{16 << 20:020d}").unlink()
    prepared = log / f"{24 << 20:020d}"
    prepared.write_bytes(bytes(8 << 20))
    for _ in range(2):  # the first refusal takes no note away
        with pytest.raises(CorruptionError, match=f"{16 << 20:020d}"):
            MessageStore.open(tmp_path / "store", config)
    assert prepared.exists()


def test_flushed_messages_that_only_the_checkpoint_knows_are_named_as_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk, or a copy, has lost the end of the log within a file; the opening sets the checkpoint back."""
    clock = ManualClock(1_700_000_000_000)
    store = MessageStore.open(tmp_path / "store", StoreConfig.tiny(), clock=clock)
    places = []
    for _ in range(3):
        places.append(store.append(Message("orders", b"x")).physical_offset)
        clock.advance(seconds=1)
    store.flush()
    store.abandon()
    file = min((tmp_path / "store" / "commitlog").iterdir())
    with file.open("r+b") as log:
        log.seek(places[1])
        log.write(bytes(file.stat().st_size - places[1]))
    for missing in ("; messages that were flushed are missing: the checkpoint covers records up to 2023-11-14", ""):
        caplog.clear()
        with MessageStore.open(tmp_path / "store", StoreConfig.tiny(), clock=clock) as opened:
            assert [damage.offset for damage in opened.recovered if damage.kind == "lost"] == [places[1]] * bool(
                missing
            )
        assert missing in caplog.text


def test_the_rest_of_expiring_queue_files_is_deleted() -> None:
    """Power fails while retention deletes the files of a queue without remaining messages; its offsets stay."""
    files = MemoryFiles()
    clock = ManualClock(START_MS)
    store = MessageStore.open(ROOT, SMALL, files=files, clock=clock)
    for _ in range(20):
        store.append(Message("Old", b""))
    fill(store, clock, random.Random(1), 100)
    store.flush()
    path = f"consumequeue/Old/0/{0:020d}"
    first = contents(files)[path]
    retention = Retention(retained(store, SMALL))
    retention.delete_before(3 * 4096)
    assert [entry.name for entry in files.list(f"{ROOT}/consumequeue/Old/0")] == [f"{320:020d}"]
    crashed = in_memory({**contents(files), path: first})
    with opened(crashed) as again:
        assert (again.queues["Old", 0].min_offset, again.queues["Old", 0].max_offset) == (20, 20)
        assert again.append(Message("Old", b"")).queue_offset == 20
    assert verify(ROOT, SMALL, crashed).sound


def test_recovering_leaves_derived_files_of_a_sound_store() -> None:
    for config in (SMALL, SMALL_EXT):
        files = in_memory(filled(config, 90))
        before = derived(contents(files))
        with opened(files, config, thorough=True) as store:
            assert store.recovered == []
            assert store.recover() == []
        assert derived(contents(files)) == before


def test_index_files_after_an_empty_one_are_deleted_last_first() -> None:
    """Each of these files implies that the empty one had the keys of earlier records."""
    files = RecordingFiles()
    for folder in (ROOT, f"{ROOT}/commitlog", f"{ROOT}/index"):
        files.make_folder(folder)
    for number, size in enumerate((100, 0, 100, 0, 100)):
        files.write(f"{ROOT}/index/2020010100000000{number}", bytes(size))
    files.trace.clear()
    cleared = [os.path.basename(damage.file)[-1] for damage in clear_leftovers(ROOT, files)]
    assert cleared == ["4", "3", "2", "1"]
    assert [event.path[-1] for event in files.trace if event.call == "delete"] == cleared


def test_a_recovery_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A recovery logs its cut and its duration; a clean opening logs nothing."""
    found = filled(SMALL, 60, clean=False)
    files = in_memory(found)
    with opened(files) as store:
        end = store.log.end
    (warning,) = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    assert warning.startswith(
        f"{ROOT}: recovered in 0.0 s, because it was not closed: the log ends at {end}, nothing was"
    )
    caplog.clear()
    opened(files).close()
    assert not caplog.records
    path = max(path for path, data in found.items() if path.startswith("commitlog/") and data and data.strip(b"\0"))
    data = found[path]
    used = len(data.rstrip(b"\0"))
    files = in_memory({**found, path: data[: used - 40] + b"\xff" * 40 + data[used:]})
    with opened(files) as store:
        cut = next(one for one in store.recovered if one.kind == "record")
    (warning,) = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    assert f"{cut.bytes} bytes were cut from {cut.offset} on" in warning


def test_messages_prepared_before_a_recovery_are_queued() -> None:
    with opened(MemoryFiles()) as store:
        for number in range(5):
            store.append(Message("TopicA", b"%d" % number))
        first = store.message_at(0)
        assert first is not None
        prepared = store.copies.prepare_again(first, "TopicA", 0, b"")
        store.recover()
        copy = store.copies.append([prepared])[0]
        after = store.append(Message("TopicA", b"after"))
        assert (copy.queue_offset, after.queue_offset) == (5, 6)
        assert [message.body for message in store.messages("TopicA", 0)] == [
            b"0",
            b"1",
            b"2",
            b"3",
            b"4",
            b"0",
            b"after",
        ]
        assert store.verify().sound


@pytest.mark.parametrize("entries", [0, 3], ids=["alone", "behind others"])
def test_an_entry_that_was_cleared_in_part_is_no_entry(entries: int) -> None:
    """A power cut while a recovery cuts a queue can leave the size of the entry and zeros for its place."""
    files, clock = MemoryFiles(), ManualClock(START_MS)
    store = MessageStore.open(ROOT, SMALL, files=files, clock=clock)
    store.append(Message("TopicB", b"the first record is of another queue"))
    for _ in range(entries):
        store.append(Message("TopicA", b"there"))
    for _ in range(100):  # later files, from which recovery begins
        clock.advance(seconds=60)
        store.append(Message("TopicB", b"later" * 20))
    store.flush()
    found = contents(died(files))
    path = f"consumequeue/TopicA/0/{0:020d}"
    data, at = found.get(path) or bytes(SMALL.consumequeue_file_size), entries * ENTRY_SIZE
    found |= {"consumequeue/TopicA": None, "consumequeue/TopicA/0": None}
    found[path] = data[:at] + ENTRY.pack(0, 141, 7) + data[at + ENTRY_SIZE :]
    again = in_memory(found)
    with opened(again) as store:
        assert store.queues["TopicA", 0].max_offset == entries
        assert store.append(Message("TopicA", b"next")).queue_offset == entries
        assert len(served(store)) == entries + 102
    assert verify(ROOT, SMALL, again).sound
