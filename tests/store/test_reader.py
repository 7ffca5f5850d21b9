"""A read-only store and its writer: the reader sees everything acknowledged, and nothing in part."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from librmq.clock import ManualClock
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.consumequeue import ConsumeQueue
from librmq.consumequeue_entries import ENTRY, ENTRY_SIZE
from librmq.diagnosis import diagnose
from librmq.errors import CorruptionError, ReadOnlyError, StoreClosedError, StoreIOError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import File, Files, FolderEntry
from librmq.message import record
from librmq.message.message import Message, StoredMessage
from librmq.store import MessageStore, Wholeness
from librmq.store._live_tail import KEPT, LiveQueue, LiveQueues
from librmq.store._read_only_view import ReadOnlyView
from librmq.store.engine._append import Appender
from librmq.store.engine._durability import Durability, Housekeeping, HousekeepingThread
from librmq.store.engine.copies import CopyWriter
from librmq.store.engine.derivation import Derivation, DerivedRecord
from librmq.store.engine.read import GetStatus
from librmq.store.retention import Retention
from tests.budget import examples, many
from tests.lock_order import elsewhere
from tests.stores import (
    EVER,
    LISTS_DESCRIPTORS,
    ROOT,
    SMALL,
    SMALL_EXT,
    START_MS,
    Contents,
    any_message,
    configs,
    contents,
    died,
    fill,
    filled,
    from_disk,
    in_memory,
    no_descriptor_left,
    on_disk,
    opened,
    served,
)


def shown(store: MessageStore) -> tuple[object, ...]:
    """Return what a store shows: ends, messages, and each queue's first message.

    The first message stands for the queue's begin, because 4.9 may begin a queue at a message that is gone.
    """
    queues = {
        name: (first_message(store, queue), queue.max_offset, queue.max_physic_offset)
        for name, queue in store.queues.items()
        if queue.max_offset
    }
    return store.log.begin, store.log.end, queues, [message.raw for message in store]


def first_message(store: MessageStore, queue: ConsumeQueue) -> int | None:
    there = queue.entries()["physical_offset"] >= store.log.begin
    return queue.min_offset + int(there.argmax()) if there.any() else None


def agree(reader: MessageStore, writer: MessageStore) -> None:
    """Check that the reader shows and serves the same as the writer."""
    writer.find_by_key("T", "k")  # updates the writer's queues
    reader.refresh()
    assert shown(reader) == shown(writer)
    assert served(reader) == served(writer)


class Pair:
    """A writer and a reader of the same files, in one process."""

    def __init__(self, files: Files | None = None, config: StoreConfig = SMALL, root: str = ROOT) -> None:
        self.files = files or MemoryFiles()
        self.config = config
        self.root = root
        self.clock = ManualClock(START_MS)
        self.writer = self.open_writer()
        self.reader = self.open_reader()

    def open_writer(self) -> MessageStore:
        return MessageStore.open(self.root, self.config, files=self.files, clock=self.clock)

    def open_reader(self, config: StoreConfig | None = None) -> MessageStore:
        clock = ManualClock(START_MS)
        return MessageStore.open(self.root, config or self.config, files=self.files, clock=clock, read_only=True)


@pytest.fixture
def pair() -> Pair:
    return Pair()


# -------------------------------------------------------------------------------------------------- with a writer


@configs
def test_each_message_is_seen_when_it_is_acknowledged(config: StoreConfig) -> None:
    pair = Pair(config=config)
    rng = random.Random(1)
    writer, reader = pair.writer, pair.reader
    positions: dict[tuple[str, int], int] = {}
    for number in range(examples(400)):
        message, fields = any_message(rng, delay=False)
        queue_id = rng.randrange(3)
        done = writer.append(message, queue_id, **fields)
        name = message.topic, queue_id
        found = reader.read(*name, positions.get(name, 0))
        assert [one.physical_offset for one in found.messages] == [done.physical_offset], number
        assert found.messages[0].body == message.body
        positions[name] = found.next_offset
        if message.unique_key:
            assert done.physical_offset in [
                one.physical_offset for one in reader.find_by_key(message.topic, message.unique_key, EVER)
            ]
        assert reader.message_at(done.physical_offset) == found.messages[0]
    assert all(reader.read(*name, at).status is GetStatus.OFFSET_OVERFLOW_ONE for name, at in positions.items())
    agree(reader, writer)


class Course:
    """A store that is written, trimmed, closed, abandoned and reopened in random order."""

    def __init__(self, seed: int, files: Files, root: str) -> None:
        self.rng = random.Random(seed)
        config = self.rng.choice([SMALL, SMALL_EXT])
        self.pair = Pair(files, replace(config, max_total_size=6 * 4096), root)
        self.writing = True
        self.expected = shown(self.pair.writer)

    def step(self) -> None:
        rng, pair = self.rng, self.pair
        what = rng.choice(["append"] * 9 + ["flush", "expire", "expire", "close", "leave", "recover", "ahead"])
        pair.clock.advance(minutes=1)
        if not self.writing:
            pair.writer = pair.open_writer()
            self.writing = True
        if what == "append":
            fill(pair.writer, pair.clock, rng, rng.choice([1, 1, 2, 5, 40, 80]))
        elif what == "flush":
            pair.writer.flush()
        elif what == "expire":
            pair.writer.run_due(pair.clock.now_ms())
        elif what == "ahead":
            pair.writer.log.prepare(5000)
        elif what == "recover":
            pair.writer.recover()
        elif what == "close":
            pair.writer.close()
            self.writing = False
        elif what == "leave":
            pair.writer.abandon()
            self.writing = False

    def check(self) -> None:
        if self.writing:
            agree(self.pair.reader, self.pair.writer)
            self.expected = shown(self.pair.writer)
        else:
            self.pair.reader.refresh()


@pytest.mark.parametrize("seed", range(8))
def test_a_reader_follows_its_writer(seed: int) -> None:
    course = Course(seed, MemoryFiles(), ROOT)
    for _ in range(examples(16)):
        course.step()
        if course.rng.random() < 0.7:
            course.check()


@pytest.mark.parametrize("seed", range(3))
def test_a_reader_follows_its_writer_on_disk(seed: int, tmp_path: Path) -> None:
    course = Course(seed, DiskFiles(), str(tmp_path / "store"))
    for _ in range(examples(12)):
        course.step()
        before = contents(course.pair.files, course.pair.root)
        course.check()
        assert course.writing or contents(course.pair.files, course.pair.root) == before
    course.pair.reader.close()


def test_nothing_is_changed(pair: Pair) -> None:
    fill(pair.writer, pair.clock, random.Random(3), 200)
    before = contents(pair.files)
    agree(pair.reader, pair.writer)  # updates the writer's queues
    changed = contents(pair.files)
    assert {path for path in before.keys() | changed.keys() if before.get(path) != changed.get(path)} <= {
        path for path in changed if path.startswith(("consumequeue", "index"))
    }
    for _ in range(3):
        reader = pair.open_reader()
        served(reader)
        pair.reader.refresh()
        reader.close()
    assert contents(pair.files) == changed
    with pytest.raises(ReadOnlyError):
        pair.reader.append(Message("TopicA", b""))


def test_there_is_nothing_new_without_a_change(pair: Pair) -> None:
    assert not pair.reader.refresh()
    pair.writer.append(Message("TopicA", b"1"))
    assert pair.reader.refresh()
    assert not pair.reader.refresh()
    pair.writer.close()
    assert pair.reader.refresh()  # the writer is gone
    assert not pair.reader.refresh()
    pair.writer = pair.open_writer()
    assert pair.reader.refresh()
    assert not pair.reader.refresh()
    assert not pair.writer.refresh()


def test_changes_of_a_finished_writer_are_seen(pair: Pair) -> None:
    pair.writer.append(Message("TopicA", b"1", keys="k"))
    pair.writer.close()
    assert pair.reader.read("TopicA", 0, 0).next_offset == 1
    with pair.open_writer() as other:
        other.append(Message("TopicA", b"2", keys="k"))
    found = pair.reader.read("TopicA", 0, 1)
    assert [message.body for message in found.messages] == [b"2"]
    assert len(pair.reader.find_by_key("TopicA", "k")) == 2


def test_an_iteration_ends_at_the_current_end(pair: Pair) -> None:
    """An iteration does not stop at the end that was known when the first messages came."""
    for number in range(3):
        pair.writer.append(Message("TopicA", b"%d" % number))
        assert [message.body for message in pair.reader.messages("TopicA")] == [b"0", b"1", b"2"][: number + 1]


def test_returned_messages_and_queues_stay_valid(pair: Pair) -> None:
    pair.writer.append(Message("TopicA", b"1"))
    pair.reader.refresh()
    queue, log = pair.reader.queues["TopicA", 0], pair.reader.log
    before = queue.read(0, 10), log.read(0)
    pair.writer.append(Message("TopicA", b"2"))
    pair.writer.close()
    pair.reader.refresh()
    assert pair.reader.queues["TopicA", 0] is not queue
    assert (queue.read(0, 1), log.read(0)) == before


def test_only_repeated_requests_are_read_again(pair: Pair) -> None:
    """A read that finds messages does not check the lock or the folders."""

    class Counted(MemoryFiles):
        looks = 0

        def lock_holder(self, path: str) -> str | None:
            self.looks += 1
            return super().lock_holder(path)

    files = Counted()
    pair = Pair(files)
    for number in range(50):
        pair.writer.append(Message("TopicA", b"%d" % number))
    pair.reader.refresh()
    before = files.looks
    for queue_offset in range(50):
        assert pair.reader.read("TopicA", 0, queue_offset, 1).messages
    assert files.looks == before
    assert not pair.reader.read("TopicA", 0, 50).messages
    assert files.looks > before


# -------------------------------------------------------------------------------- before the writer has written


@pytest.mark.slow
@configs
@pytest.mark.parametrize("told", [True, False], ids=["with settings", "without"])
def test_a_reader_that_is_there_first(config: StoreConfig, told: bool) -> None:
    """A reader that was given no sizes takes them from the files as soon as these appear."""
    files, clock = MemoryFiles(), ManualClock(START_MS)
    writer = MessageStore.open(ROOT, config, files=files, clock=clock)
    reader = MessageStore.open(ROOT, config if told else None, files=files, clock=clock, read_only=True)
    assert list(reader) == []
    assert reader.read("TopicA", 0, 0).status is GetStatus.NO_MESSAGE_IN_QUEUE
    assert reader.queue_offset_at("TopicA", 0, 0) == 0
    assert ("TopicA", 0) not in reader.queues
    for number in range(300):
        message = Message("TopicA", b"%d" % number, keys=f"k{number}" if number > 150 else "", tags="t")
        done = writer.append(message, number % 2)
        assert [one.body for one in reader.read("TopicA", number % 2, done.queue_offset).messages] == [message.body]
    agree(reader, writer)
    assert reader.config.commitlog_file_size == config.commitlog_file_size


def test_an_unused_name_is_an_unknown_queue(pair: Pair) -> None:
    for name in [("a/b", 0), ("..", 0), ("", 0), ("t" * 200, 0), ("TopicA", -1), ("TopicA", 1 << 40), ("T\0", 0)]:
        assert pair.reader.read(*name, 0).status is GetStatus.NO_MESSAGE_IN_QUEUE
        assert name not in pair.reader.queues
    others: list[object] = [("TopicA",), "TopicA", 7, ("TopicA", "0")]
    for other in others:
        assert not pair.reader.queues.__contains__(other)


@pytest.mark.parametrize("kind", ["commitlog", "consumequeue", "index"])
def test_a_file_under_creation_is_not_there_yet(pair: Pair, kind: str) -> None:
    fill(pair.writer, pair.clock, random.Random(5), 50)
    pair.writer.flush()
    folder = {"consumequeue": "consumequeue/TopicA/0"}.get(kind, kind)
    newest = max(entry.name for entry in pair.files.list(f"{ROOT}/{folder}"))
    following = int(newest) + {"commitlog": 4096, "consumequeue": 160, "index": 1}[kind]
    pair.files.write(f"{ROOT}/{folder}/{following:0{len(newest)}d}", b"")
    before = shown(pair.writer)
    for reader in (pair.reader, pair.open_reader(), MessageStore.open(ROOT, files=pair.files, read_only=True)):
        reader.refresh()
        assert shown(reader) == before
        served(reader)


def test_a_wrong_length_is_reported(pair: Pair) -> None:
    fill(pair.writer, pair.clock, random.Random(5), 50)
    pair.files.write(f"{ROOT}/commitlog/{0:020d}", bytes(4097))
    assert "found 4097" in pair.open_reader().condition.damage[0].what


# --------------------------------------------------------------------------------------------- half-written data


def records() -> list[bytes]:
    """Return records with every shape of text and hosts."""
    pair = Pair()
    pair.writer.append(Message("TopicA", b""))
    pair.writer.append(Message("TopicA", b"body"))
    pair.writer.append(Message("TopicA", b"\0\0\0", tags="a", keys="k"))
    pair.writer.append(Message("TopicA", b"", unique_key="U"), born_host=("::1", 1), store_host=("::2", 2))
    pair.writer.append(Message("TopicA", bytes(500), tags="a"), 7)
    return [message.raw for message in pair.writer]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("fresh", [False, True], ids=["following", "opening"])
def test_a_record_under_copy_is_not_served(number: int, fresh: bool) -> None:
    """While a record is written byte by byte, a reader sees nothing or all of it."""
    pair = Pair()
    pair.writer.append(Message("TopicA", b"before", keys="k"))
    end = pair.writer.log.end
    raw = records()[number]
    at = record.PHYSICAL_OFFSET_AT
    raw = raw[:at] + end.to_bytes(8, "big") + raw[at + 8 :]
    buffer = pair.writer.log.sequence.file(0).buffer
    for copied in range(len(raw) + 1):
        buffer[end : end + copied] = raw[:copied]
        reader = pair.open_reader() if fresh else pair.reader
        reader.refresh()
        behind = [message.raw for message in reader][1:]
        if copied == len(raw):
            assert behind == [raw]
        else:
            assert behind in ([], [raw]), copied
            assert not behind or not any(raw[copied:]), copied


@pytest.mark.parametrize("fresh", [False, True], ids=["following", "opening"])
def test_a_record_ending_in_zeros_is_served_if_one_follows(fresh: bool) -> None:
    pair = Pair()
    pair.writer.append(Message("TopicA", b"1"))
    pair.writer.append(Message("TopicA", b"2"), properties_raw=b"a\x01\0\0")
    reader = pair.open_reader() if fresh else pair.reader
    assert len(list(reader)) == 1
    pair.writer.append(Message("TopicA", b"3"))
    assert len(list(reader)) == 3
    agree(reader, pair.writer)


def test_rubbish_after_the_end_is_not_damage(pair: Pair) -> None:
    pair.writer.append(Message("TopicA", b"1"))
    end = pair.writer.log.end
    buffer = pair.writer.log.sequence.file(0).buffer
    for data in (b"\xff" * 200, b"\0\0\0\x7f\xda\xa3\x20\xa7" + bytes(100), bytes(200)):
        buffer[end : end + len(data)] = data
        for reader in (pair.reader, pair.open_reader()):
            assert len(list(reader)) == 1
            assert len(reader.read("TopicA", 0, 0).messages) == 1
    pair.writer.append(Message("TopicA", b"2"))
    assert len(list(pair.reader)) == 2


# --------------------------------------------------------------------------- late or half-written queues and index


def lanes_only(pair: Pair) -> None:
    """Write the entries of one queue, but not yet those of the other, nor the index."""
    log, queue = pair.writer.log, pair.writer.queues["TopicA", 0]
    derive = Derivation(pair.writer.levels).derive
    records = [derive(place, size, raw) for place, size, raw in log.scan(0, log.end) if raw is not None]
    entries = [ENTRY.pack(one.physical_offset, one.size, one.tags_code) for one in records if not one.queue_id]
    queue.append_many(queue.max_offset, b"".join(entries[queue.max_offset :]))


def without_header(pair: Pair) -> None:
    """Write entries and slots of the index, but not yet its header."""
    file = pair.writer.index.files[-1]
    header = file.file.buffer[:40]
    pair.writer.find_by_key("T", "k")
    file.file.buffer[:40] = header


def half_an_entry(pair: Pair) -> None:
    """Cut the last entry of a queue short; nothing of the batch is in the index yet."""
    lanes_only(pair)
    queue = pair.writer.queues["TopicA", 0]
    path, at = queue.place_of(queue.max_offset - 1)
    pair.files.open(path, writable=True).buffer[at + 12 : at + 20] = bytes(8)


@configs
@pytest.mark.parametrize("change", [None, lanes_only, without_header, half_an_entry])
@pytest.mark.parametrize("fresh", [False, True], ids=["following", "opening"])
def test_in_the_middle_of_a_batch(config: StoreConfig, change: Callable[[Pair], None] | None, fresh: bool) -> None:
    pair = Pair(config=config)
    for number in range(14):
        pair.writer.append(Message("TopicA", b"%d" % number, keys=f"k{number % 5}", tags="t"), number % 2)
        if number == 7:
            pair.writer.flush()
            pair.reader.refresh()
            pair.reader.read("TopicA", 0, 0)
    if change is not None:
        change(pair)
    reader = pair.open_reader() if fresh else pair.reader
    for number in range(5):
        bodies = [message.body for message in reader.find_by_key("TopicA", f"k{number}")]
        assert bodies == [b"%d" % one for one in range(14) if one % 5 == number]
    for queue_id in (0, 1):
        found = reader.read("TopicA", queue_id, 0, 3)
        bodies = [message.body for message in found.messages]
        while found.messages:
            found = reader.read("TopicA", queue_id, found.next_offset)
            bodies += [message.body for message in found.messages]
        assert bodies == [b"%d" % one for one in range(14) if one % 2 == queue_id]
        assert reader.queues["TopicA", queue_id].max_offset == 7
        assert len(reader.queues["TopicA", queue_id].entries()) == 7
    for queue in reader.queues.opened():
        assert isinstance(queue, LiveQueue)
        queue.catch_up()
    tagged = reader.matching(tags="t")
    assert len(reader.read("TopicA", 0, 0, matching=tagged).messages) == 7


def late_entries(reader: MessageStore) -> int:
    """Count the entries and keys that a reader holds in memory."""
    assert isinstance(reader.queues, LiveQueues)
    view = reader._handle
    assert isinstance(view, ReadOnlyView)
    assert view._live is not None
    held = sum(queue.max_offset - queue.stored_end for queue in reader.queues.opened())
    held += sum(len(entries) // ENTRY_SIZE for _, entries in reader.queues._unwritten.values())
    return max(held, sum(len(keys.physical_offsets) for keys in view.with_index()[1]))


@pytest.mark.slow
def test_memory_use_is_bounded() -> None:
    pair = Pair(config=StoreConfig.tiny())
    most = 0
    for number in range(60):
        batch = [Message("TopicA", b"%d" % one, keys="k", tags="t") for one in range(300)]
        pair.writer.append_batch(batch, number % 3)
        pair.reader.refresh()
        most = max(most, late_entries(pair.reader))
    assert KEPT // 2 < most <= KEPT + 300
    fresh = pair.open_reader()
    pair.writer.flush()
    assert late_entries(fresh) <= KEPT
    assert shown(fresh)[:3] == shown(pair.reader)[:3] == shown(pair.writer)[:3]
    for reader in (fresh, pair.reader):
        found = reader.read("TopicA", 0, 0)
        count = len(found.messages)
        while found.messages:
            found = reader.read("TopicA", 0, found.next_offset)
            count += len(found.messages)
        assert count == 6000


@pytest.mark.slow
def test_a_writer_whose_queues_lag_far_behind(pair: Pair) -> None:
    pair = Pair(config=StoreConfig.tiny())
    dispatcher = pair.writer.appender.dispatcher
    drain, dispatcher.drain = dispatcher.drain, lambda: None  # type: ignore[method-assign]
    for number in range(9000):
        pair.writer.append(Message("TopicA", b"%d" % number), number % 2)
    for reader in (pair.reader, pair.open_reader()):
        reader.refresh()
        assert [reader.queues["TopicA", queue_id].max_offset for queue_id in (0, 1)] == [4500, 4500]
        assert reader.read("TopicA", 1, 4499).messages[0].body == b"8999"
        assert len(reader.queues["TopicA", 0].entries()) == 4500
    dispatcher.drain = drain  # type: ignore[method-assign]
    agree(pair.reader, pair.writer)


def test_a_queue_ahead_of_the_known_log(pair: Pair) -> None:
    """A queue not used before shows no message beyond the known log, and skips none."""
    for number in range(4):
        pair.writer.append(Message("TopicA", b"%d" % number))
    pair.reader.refresh()
    for number in range(4, 7):
        pair.writer.append(Message("TopicA", b"%d" % number))
    pair.writer.flush()
    found = pair.reader.read("TopicA", 0, 0)
    assert (len(found.messages), found.next_offset, found.max_offset) == (4, 4, 4)
    assert [message.body for message in pair.reader.read("TopicA", 0, 4).messages] == [b"4", b"5", b"6"]


def test_the_newest_come_first_where_the_number_is_bounded(pair: Pair) -> None:
    for number in range(10):
        pair.writer.append(Message("TopicA", b"%d" % number, keys="k"))
        if number == 5:
            pair.writer.flush()
    found = pair.reader.find_by_key("TopicA", "k", max_messages=6)
    assert [message.body for message in found] == [b"4", b"5", b"6", b"7", b"8", b"9"]
    assert [message.body for message in pair.reader.find_by_key("TopicA", "k", max_messages=2)] == [b"8", b"9"]
    assert pair.reader.find_by_key("TopicA", "k", max_messages=0) == []
    assert pair.reader.find_by_key("TopicA", "k", begin_ms=START_MS + 5000) == []


def test_a_deleted_topic_is_not_listed(pair: Pair) -> None:
    """A broker deletes its queues at once. One whose entries are only in memory so far has no folder either."""
    for number in range(30):
        pair.writer.append(Message("TopicA", b"%d" % number))
    pair.writer.flush()
    pair.writer.append(Message("New", b""))
    pair.reader.refresh()
    ends = {name: queue.max_offset for name, queue in pair.reader.queues.items()}
    assert ends == {("TopicA", 0): 30, ("New", 0): 1}
    pair.files.delete(f"{ROOT}/consumequeue/TopicA")
    assert list(pair.reader.queues) == [("New", 0)]
    assert pair.reader.queues.find(("TopicA", 0)) is None


def test_a_topic_that_is_recreated(pair: Pair) -> None:
    """A broker deletes a topic's queues and counts from 0 again."""
    for number in range(30):
        pair.writer.append(Message("TopicA", b"old %d" % number))
    pair.reader.refresh()
    assert pair.reader.queues["TopicA", 0].max_offset == 30
    pair.writer.close()
    pair.files.delete(f"{ROOT}/consumequeue/TopicA")
    pair.files.delete(f"{ROOT}/librmq")
    broker = pair.open_writer()
    queue = broker.queues["TopicA", 0]
    queue.clear()
    broker.appender.lanes.clear()
    for number in range(3):
        done = broker.append(Message("TopicA", b"new %d" % number))
        pair.reader.refresh()
        found = pair.reader.read("TopicA", 0, done.queue_offset)
        assert [message.body for message in found.messages] == [b"new %d" % number]


# ------------------------------------------------------------------------------------------------------- retention


@pytest.mark.slow
@configs
def test_retention_is_survived(config: StoreConfig) -> None:
    pair = Pair(config=replace(config, max_total_size=5 * 4096))
    fill(pair.writer, pair.clock, random.Random(8), 60)
    held = list(pair.reader)
    raw = [bytes(message.raw) for message in held]
    for _ in range(20):
        fill(pair.writer, pair.clock, random.Random(8), 60)
        pair.writer.flush()
        while pair.writer.run_due(pair.clock.now_ms()) == pair.clock.now_ms() + 100:
            pair.clock.advance(ms=100)
        agree(pair.reader, pair.writer)
    assert pair.reader.log.begin > 20 * 4096
    assert [message.raw for message in held] == raw
    assert pair.reader.message_at(held[0].physical_offset) is None
    topic, queue_id = "TopicA", 0
    found = pair.reader.read(topic, queue_id, 0)
    assert found.status is GetStatus.OFFSET_TOO_SMALL
    assert found.next_offset == pair.writer.queues[topic, queue_id].min_offset


class Meanwhile(MemoryFiles):
    """Files that do something once, after a folder is listed or before a file is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.then: Callable[[], object] | None = None
        self.where = ""

    def _do(self, path: str) -> None:
        then = self.then
        if then is not None and path.startswith(f"{ROOT}/{self.where}"):
            self.then = None
            with elsewhere():
                then()

    def list(self, path: str) -> list[FolderEntry]:
        found = super().list(path)
        self._do(path)
        return found

    def open(self, path: str, *, writable: bool = False, keep_descriptor: bool = False) -> File:
        if not writable:
            self._do(path)
        return super().open(path, writable=writable, keep_descriptor=keep_descriptor)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["commitlog", "consumequeue/TopicA/0", "index"])
@pytest.mark.parametrize("fresh", [False, True], ids=["following", "opening"])
def test_files_that_vanish_when_they_are_opened(where: str, fresh: bool) -> None:
    files = Meanwhile()
    pair = Pair(files, replace(SMALL, max_total_size=3 * 4096))

    def write(count: int) -> None:
        for number in range(count):
            pair.writer.append(Message("TopicA", b"x" * 100, keys=f"k{number}"), number % 2)
        pair.writer.flush()
        for _ in range(20):
            pair.writer.run_due(pair.clock.now_ms())
            pair.clock.advance(ms=100)

    write(60)
    pair.reader.refresh()
    begin = pair.writer.log.begin
    for number in range(12):
        write(20)
        files.where, files.then = where, lambda: write(40)
        if fresh:
            pair.reader = pair.open_reader()
        elif number % 3 == 0:
            pair.reader.refresh()
        elif number % 3 == 1:
            found = pair.reader.read("TopicA", 0, 0)
            assert found.status is GetStatus.OFFSET_TOO_SMALL or found.messages
        else:
            list(pair.reader)
            pair.reader.find_by_key("TopicA", "k3")
            pair.reader.queue_offset_at("TopicA", 1, START_MS)
        files.then = None
        agree(pair.reader, pair.writer)
    assert pair.writer.log.begin > begin


@pytest.mark.parametrize("again", [0, 3])
def test_a_queue_that_vanishes_when_it_is_opened(again: int) -> None:
    """It is no queue then, another one of the same name, or as it was when the reader looked at the log."""
    files = Meanwhile()
    pair = Pair(files, replace(SMALL, max_total_size=3 * 4096))
    for number in range(200):
        pair.writer.append(Message("TopicA" if number < 10 else "Other", b"x" * 100), 0)
    pair.writer.flush()
    pair.reader = pair.open_reader()

    def make_again() -> None:
        pair.writer.run_due(pair.clock.now_ms())
        assert pair.writer.clean_unused_topics({"Other"}) == [("TopicA", 0)]
        for _ in range(again):
            pair.writer.append(Message("TopicA", b"again"), 0)
        pair.writer.flush()

    files.where, files.then = "consumequeue/TopicA/0", make_again
    queue = pair.reader.queues.find(("TopicA", 0))
    assert files.then is None
    assert (0 if queue is None else queue.max_offset) in {10, again}
    pair.reader.refresh()
    assert [message.body for message in pair.reader.messages("TopicA")] == [b"again"] * again


def test_a_queue_that_could_not_be_opened_has_all_entries_later() -> None:
    """Those too of which only the reader knows so far."""
    files = Meanwhile()
    pair = Pair(files)
    for number in range(8):
        if number == 5:
            pair.writer.flush()
            pair.reader = pair.open_reader()
        pair.writer.append(Message("TopicA", b"x"), 0)
    pair.reader.refresh()

    def refuse() -> None:
        files.then = refuse
        raise StoreIOError("open", "file", OSError(errno.EMFILE, "Too many open files"))

    files.where, files.then = "consumequeue/TopicA/0/0", refuse
    with pytest.raises(StoreIOError, match="Too many open files"):
        pair.reader.queues.find(("TopicA", 0))
    files.then = None
    queue = pair.reader.queues.find(("TopicA", 0))
    assert queue is not None
    assert queue.max_offset == 8


def test_keys_are_found_although_a_queue_could_not_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader opens the queues when it has many entries in memory."""
    files = Meanwhile()
    pair = Pair(files)
    monkeypatch.setattr("librmq.store._live_tail.KEPT", 100)
    for number in range(101):
        pair.writer.append(Message("TopicA", b"x", keys=f"k{number}"), 0)

    def refuse() -> None:
        files.then = refuse
        raise StoreIOError("open", "file", OSError(errno.EMFILE, "Too many open files"))

    files.where, files.then = "consumequeue/TopicA/0", refuse
    with pytest.raises(StoreIOError, match="Too many open files"):
        pair.reader.refresh()
    files.then = None
    pair.reader.refresh()
    assert all(pair.reader.find_by_key("TopicA", f"k{number}") for number in range(101))
    assert len(list(pair.reader.messages("TopicA"))) == 101


def test_files_that_vanish_during_the_walk_over_the_log(pair: Pair) -> None:
    pair = Pair(config=replace(SMALL, max_total_size=3 * 4096))
    for number in range(120):
        pair.writer.append(Message("TopicA", b"x" * 100, keys=f"k{number}"))
    messages = iter(pair.reader)
    assert next(messages).queue_offset == 0
    pair.writer.flush()
    pair.writer.run_due(pair.clock.now_ms())
    assert pair.writer.log.begin > 8192
    pair.reader.log.sequence.unmap_all()
    left = [message.queue_offset for message in messages]
    first = pair.writer.queues["TopicA", 0].min_offset
    before = left.index(first) + 1
    assert left == [*range(1, before), *range(first, 120)]
    assert before < first


def test_a_reader_that_slept_for_long(pair: Pair) -> None:
    """Everything that the reader knew of is gone."""
    pair = Pair(config=replace(SMALL, max_total_size=3 * 4096))
    fill(pair.writer, pair.clock, random.Random(1), 10)
    pair.reader.refresh()
    for _ in range(10):
        fill(pair.writer, pair.clock, random.Random(1), 60)
        pair.writer.flush()
        pair.writer.run_due(pair.clock.now_ms())
    assert pair.writer.log.begin > pair.reader.log.end
    agree(pair.reader, pair.writer)


@pytest.mark.parametrize("kind", [MemoryFiles, DiskFiles])
def test_a_log_that_is_cut_during_a_read(kind: type[MemoryFiles | DiskFiles], tmp_path: Path) -> None:
    pair = Pair(kind(), root=ROOT if kind is MemoryFiles else str(tmp_path / "s"))
    fill(pair.writer, pair.clock, random.Random(1), 40)
    agree(pair.reader, pair.writer)
    victim = list(pair.writer)[20]
    list(pair.reader)  # maps the last file, which the recovery deletes
    start = victim.physical_offset % 4096
    buffer = pair.writer.log.sequence.file(victim.physical_offset - start).buffer
    buffer[start + 4 : start + 8] = b"oops"
    assert pair.writer.recover()
    assert len(list(pair.writer)) == 20
    agree(pair.reader, pair.writer)
    fill(pair.writer, pair.clock, random.Random(2), 5)
    agree(pair.reader, pair.writer)


# ------------------------------------------------------------------------------------------------ without a writer


def torn(found: Contents) -> Contents:
    with opened(in_memory(found), None, read_only=True) as store:
        end = store.log.end
    path = max(path for path in found if path.startswith("commitlog/"))
    data, at = found[path], end % 4096
    return {**found, path: data[:at] + b"\0\0\1\0\xda\xa3\x20\xa7torn" + data[at + 12 :]}


def without(*folders: str) -> Callable[[Contents], Contents]:
    return lambda found: {path: data for path, data in found.items() if not path.startswith(folders)}


def with_empty_file(found: Contents) -> Contents:
    newest = max(int(path.split("/")[1]) for path in found if path.startswith("commitlog/"))
    return {**found, f"commitlog/{newest + 4096:020d}": b""}


CRASHES: dict[str, Callable[[Contents], Contents]] = {
    "as it is": dict,
    "torn": torn,
    "without index": without("index"),
    "without queues": without("consumequeue"),
    "without anything": without("consumequeue", "index", "checkpoint"),
    "with an empty file": with_empty_file,
}


@many
@configs
@pytest.mark.parametrize("clean", [True, False], ids=["closed", "crashed"])
@pytest.mark.parametrize("what", CRASHES)
def test_a_reader_shows_the_result_of_a_recovery(config: StoreConfig, clean: bool, what: str, tmp_path: Path) -> None:
    found = CRASHES[what](filled(config, 80, seed=6, clean=clean))
    folder = on_disk(found, tmp_path / "store")
    clock = ManualClock(START_MS + 86_400_000)
    if what == "with an empty file" and clean:  # no kill explains it; `recover` clears it away
        with MessageStore.open(folder, config, clock=clock, read_only=True) as short:
            assert short.condition.kind is Wholeness.SHORT
        with pytest.raises(CorruptionError):
            MessageStore.open(folder, config, clock=clock)
        return
    before = from_disk(folder)
    reader = MessageStore.open(folder, config, clock=clock, read_only=True)
    seen = shown(reader), served(reader)
    assert not reader.refresh()
    assert from_disk(folder) == before
    with MessageStore.open(folder, config, clock=clock) as store:
        assert reader.refresh()
        assert (shown(store), served(store)) == seen
        agree(reader, store)
        store.append(Message("TopicA", b"more"))
        agree(reader, store)
        seen = shown(store), served(store)
    assert (shown(reader), served(reader)) == seen
    assert reader.refresh() is False
    reader.close()


@LISTS_DESCRIPTORS
@pytest.mark.parametrize("config", [SMALL, SMALL_EXT], ids=["plain", "ext"])
def test_a_view_of_a_killed_store_leaves_no_file_open(tmp_path: Path, config: StoreConfig) -> None:
    folder = on_disk(filled(config, 60, clean=False), tmp_path / "store")
    with no_descriptor_left(), MessageStore.open(folder, config, read_only=True) as view:
        assert shown(view)


def test_a_damaged_store_is_shown_up_to_the_damage(tmp_path: Path) -> None:
    for number, clean in enumerate((True, False)):
        found = filled(SMALL, 80, seed=6, clean=clean)
        path = max(path for path in found if path.startswith("commitlog/"))
        with opened(in_memory(found), read_only=True) as store:
            whole = list(store)
        victim = next(message for message in whole if message.physical_offset >= int(path.split("/")[1]) + 500)
        at = victim.physical_offset % 4096
        data = found[path]
        found[path] = data[:at] + b"oops" + data[at + 4 :]
        folder = on_disk(found, tmp_path / str(number))
        with pytest.raises(CorruptionError, match="librmq recover"):
            MessageStore.open(folder, SMALL)
        with suppress(FileNotFoundError):
            (folder / "lock").unlink()
        before = from_disk(folder)
        with MessageStore.open(folder, SMALL, read_only=True) as reader:
            assert reader.log.end == victim.physical_offset
            expected = [message for message in whole if message.physical_offset < victim.physical_offset]
            assert list(served(reader).values()) == expected
            assert reader.recovered
        assert from_disk(folder) == before


def test_reading_a_closed_store_costs_no_more_than_opening(tmp_path: Path) -> None:
    """A reader trusts what librmq closed: it neither walks through the log nor recovers."""
    folder = tmp_path / "store"
    with MessageStore.open(folder, SMALL, clock=ManualClock(START_MS)) as store:
        fill(store, ManualClock(START_MS), random.Random(1), 300)
    with MessageStore.open(folder, SMALL, read_only=True) as reader:
        assert len(reader.log.sequence.mapped) <= 2
        assert reader.queues.opened() == []
        assert reader.recovered == []
        assert len(served(reader)) >= 300


def test_a_writer_that_starts_during_an_opening_is_noticed(tmp_path: Path) -> None:
    folder = str(tmp_path / "store")
    with MessageStore.open(folder, SMALL) as store:
        store.append(Message("TopicA", b"1"))

    class Late(DiskFiles):
        looks = 0
        writer: MessageStore | None = None

        def lock_holder(self, path: str) -> str | None:
            self.looks += 1
            if self.looks == 2:
                self.writer = MessageStore.open(folder, SMALL)
                self.writer.append(Message("TopicA", b"2"))
            return super().lock_holder(path)

    files = Late()
    with MessageStore.open(folder, SMALL, read_only=True, files=files) as reader:
        assert files.writer is not None
        assert reader.log.end == files.writer.log.end
        assert [message.body for message in reader.read("TopicA", 0, 0).messages] == [b"1", b"2"]
        files.writer.close()


def test_a_lasting_error_is_raised(pair: Pair) -> None:
    fill(pair.writer, pair.clock, random.Random(1), 5)

    class Broken(MemoryFiles):
        opened = 0

        def open(self, path: str, *, writable: bool = False, keep_descriptor: bool = False) -> File:
            self.opened += 1
            raise StoreIOError("open", path, OSError(5, "Input/output error"))

    broken = Broken()
    broken.__dict__.update(pair.files.__dict__)
    with pytest.raises(StoreIOError):
        MessageStore.open(ROOT, SMALL, files=broken, read_only=True)
    assert 0 < broken.opened < 1000


def test_lasting_corruption_during_writes_is_raised(pair: Pair) -> None:
    for number in range(5):
        pair.writer.append(Message("TopicA", b"%d" % number))
    pair.reader.refresh()
    assert len(pair.reader.read("TopicA", 0, 0).messages) == 5
    buffer = pair.writer.log.sequence.file(0).buffer
    buffer[4:8] = b"oops"
    with pytest.raises(CorruptionError):
        pair.reader.read("TopicA", 0, 0)
    with pytest.raises(CorruptionError):
        list(pair.reader)


# --------------------------------------------------------------------------------------------------------- threads


def test_many_threads_read_while_one_writes(tmp_path: Path) -> None:
    """Each thread follows its own queue: in order, without a hole, no message twice."""
    folder, count = str(tmp_path / "store"), 4000
    config = StoreConfig.tiny(max_total_size=64 << 20)
    with (
        ThreadPoolExecutor(3) as pool,  # outermost: a failed append closes the reader, which ends the threads
        MessageStore.open(folder, config) as writer,
        MessageStore.open(folder, config, read_only=True) as reader,
    ):

        def follow(queue_id: int) -> None:
            queue_offset = 0
            while queue_offset < count // 2:
                result = reader.read("T", queue_id, queue_offset)
                for message in result.messages:
                    assert (message.queue_offset, message.queue_id) == (queue_offset, queue_id)
                    assert message.body == b"%d" % (2 * queue_offset + queue_id)
                    queue_offset += 1
                assert result.next_offset == queue_offset or not result.messages

        following = pool.map(follow, (0, 1, 0))
        for number in range(count):
            writer.append(Message("T", b"%d" % number, keys="k" if number % 7 else ""), number % 2)
        list(following)


def test_a_look_makes_nothing_that_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MessageStore.open(tmp_path, SMALL) as store:
        for number in range(20):
            store.append(Message("T", b"%d" % number, keys=f"k{number}"))
    for writing in (Appender, Durability, Housekeeping, HousekeepingThread, Retention, CopyWriter):
        monkeypatch.setattr(writing, "__init__", None)
    with MessageStore.open(tmp_path, read_only=True) as view:
        assert len(list(view)) == len(list(view.messages("T"))) == view.queue_range("T", 0)[1] == 20
        assert [message.body for message in view.find_by_key("T", "k7")] == [b"7"]
        assert view.verify().sound
        for refused in (view.flush, view.recover, view.delete_expired, lambda: view.append(Message("T", b""))):
            with pytest.raises(ReadOnlyError, match="without read_only=True"):
                refused()
    with pytest.raises(StoreClosedError, match="is closed"):
        view.refresh()


def test_a_separate_handle_is_enough(tmp_path: Path) -> None:
    """The parts that follow a store work alone, without the store's class."""
    folder = str(tmp_path / "store")
    with MessageStore.open(folder, SMALL) as writer:
        view = ReadOnlyView(folder, DiskFiles(), ManualClock())
        view.open()
        writer.append(Message("TopicA", b"1"))
        assert view.refresh()
        raw = view.parts.log.read(0)
        assert raw is not None
        assert StoredMessage(raw).body == b"1"
    assert view.refresh()
    assert view.parts.queues["TopicA", 0].max_offset == 1
    view.close()


def test_a_dead_store_is_shown_as_in_memory(pair: Pair) -> None:
    fill(pair.writer, pair.clock, random.Random(1), 30)
    files = died(pair.files)  # type: ignore[arg-type]
    with opened(files, read_only=True) as reader:
        assert len(list(reader)) == 30


# ---------------------------------------------------------------------------------------- large stores after a crash


@pytest.mark.slow
def test_a_missing_queue_folder_lets_a_view_take_the_log_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one queue is made again; records of the others are passed over together and not read one by one."""
    config = StoreConfig.tiny(commitlog_file_size=8 << 20, consumequeue_file_size=200_000, max_index_num=60_000)
    with MessageStore.open(tmp_path, config, background=False) as store:
        for number in range(120):
            topic = f"T{number % 6}"
            store.append_batch([Message(topic, b"x", keys=f"k{number}.{place}") for place in range(300)])
        expected = [message.raw for message in store.messages("T2")]
    shutil.rmtree(tmp_path / "consumequeue" / "T2")
    derive, calls = Derivation.derive, []

    def counted(self: Derivation, place: int, size: int, raw: bytes) -> DerivedRecord:
        calls.append(place)
        return derive(self, place, size, raw)

    monkeypatch.setattr(Derivation, "derive", counted)
    with MessageStore.open(tmp_path, read_only=True) as view:
        assert [message.raw for message in view.messages("T2")] == expected
    assert len(calls) < 12_000, "of 36,000: those at the ends of the index"


def large(path: Path) -> None:
    """Leave a store of 24 MiB whose writer died after its last flush: 30 records are not covered."""
    config = StoreConfig.tiny(commitlog_file_size=64 << 20, max_message_size=1 << 20)
    clock = ManualClock(START_MS)
    store = MessageStore.open(path, config, clock=clock, background=False)
    for number in range(400):
        clock.advance(seconds=1)
        store.append(Message("T", bytes(60_000), keys=f"k{number}"), number % 3)
    store.flush()
    for number in range(400, 430):
        clock.advance(seconds=1)
        store.append(Message("T", b"late", keys=f"k{number}"), number % 3)
    store.abandon()


@pytest.mark.slow
@pytest.mark.parametrize("lacks_a_queue", [False, True])
def test_a_large_crashed_store_is_read_as_recovery_leaves_it(tmp_path: Path, lacks_a_queue: bool) -> None:
    large(tmp_path / "crashed")
    if lacks_a_queue:
        shutil.rmtree(tmp_path / "crashed" / "consumequeue" / "T" / "0")
    shutil.copytree(tmp_path / "crashed", tmp_path / "recovered")
    before = from_disk(tmp_path / "crashed")
    with (
        MessageStore.open(tmp_path / "crashed", read_only=True) as found,
        MessageStore.open(tmp_path / "recovered", background=False) as expected,
    ):
        assert found.log.end == expected.log.end
        for queue in range(3):
            assert found.queue_range("T", queue) == expected.queue_range("T", queue)
            assert [m.raw for m in found.messages("T", queue)] == [m.raw for m in expected.messages("T", queue)]
        for number in (0, 200, 399, 400, 429):
            (message,) = found.find_by_key("T", f"k{number}")
            assert f"k{number}" in message.keys
        assert found.index.end_physical_offset == expected.index.end_physical_offset
    assert from_disk(tmp_path / "crashed") == before


def test_damage_among_covered_records_is_found_on_demand(tmp_path: Path) -> None:
    large(tmp_path / "crashed")
    with MessageStore.open(tmp_path / "crashed", read_only=True) as store:
        assert (store.cut_short, store.check_covered()) == (None, None)
        place = next(store.messages("T", 1)).physical_offset
    log = min((tmp_path / "crashed" / "commitlog").iterdir())
    with log.open("r+b") as file:
        file.seek(place + 200)
        file.write(b"!")
    with MessageStore.open(tmp_path / "crashed", read_only=True) as store:
        assert sum(end - begin for begin, end in (store.queue_range("T", queue) for queue in range(3))) == 430
        damage = store.check_covered()
        assert damage is not None
        assert damage.offset == place
    (finding, *_) = diagnose(tmp_path / "crashed", check=False)
    assert (finding.kind, finding.severity) == ("damage", "error")


def test_reads_of_many_messages_release_the_pages_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise messages of many queues, far apart in the log, map as much memory as the log has."""
    with MessageStore.open(tmp_path / "s", StoreConfig.tiny(), background=False) as writer:
        for number in range(1_200):
            writer.append(Message("T", bytes(150)), number % 7)
    released: list[tuple[int, int]] = []
    with MessageStore.open(tmp_path / "s", read_only=True) as store:
        monkeypatch.setattr(CommitLog, "release_read_pages", lambda _, begin, end: released.append((begin, end)))
        assert sum(1 for queue_id in range(7) for _ in store.messages("T", queue_id)) == 1_200
        assert not released  # neighbours share their pages
        for number in range(1_100):
            store.read("T", 0, 0 if number % 2 else 160, 1)
        assert released == [(store.log.begin, store.log.end)]
