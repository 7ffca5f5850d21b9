"""How derived data is written: by which call, when, and what is left after a failure."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import chain, count, repeat
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.consumequeue import ConsumeQueue
from librmq.consumequeue_entries import ENTRY
from librmq.errors import CorruptionError, StoreIOError
from librmq.files._memory import MemoryFiles
from librmq.files.interface import File
from librmq.message.delays import DelayLevels
from librmq.message.message import Message
from librmq.message.record import TRANSACTION_COMMIT, Record, check_record, encode_record
from librmq.runtime import compiled_core
from librmq.store import MessageStore
from librmq.store.engine import derivation
from librmq.store.engine.derivation import Derivation, derived_block, key_block
from librmq.store.engine.dispatch import Dispatcher
from librmq.store.format._keyindex import KeyIndex
from librmq.store.format.indexfile import IndexFile
from tests.budget import examples, many
from tests.clocks import Waits
from tests.file_seams import FailingFiles
from tests.interrupting import at_each_call

BATCH = Dispatcher.BATCH
QUEUES = 40
ROOT = "/store"


@pytest.fixture
def store() -> Iterator[MessageStore]:
    config = StoreConfig.tiny(max_index_num=4000, commitlog_file_size=1 << 20)
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


@pytest.mark.parametrize("fails", [False, True])
def test_many_new_queues_are_made_together(fails: bool) -> None:
    """Where that fails, they are made one by one, with the same content."""
    files = FailingFiles(MemoryFiles())
    config = StoreConfig.tiny(commitlog_file_size=1 << 20)
    with MessageStore.open(ROOT, config, files=files, background=False) as store:
        store.append(Message("T", b"x"), QUEUES)  # makes a file of the log
        store.flush()
        before = files.calls["create"]
        if fails:
            files.fail("make_files")
        for number in range(3 * QUEUES):
            store.append(Message("T", b"x"), number % QUEUES)
        assert len(store.queues) == QUEUES + 1
        assert files.calls["make_files"] == 1
        assert files.calls["create"] - before == (QUEUES if fails else 0)
        for queue_id in range(QUEUES):
            store.append(Message("T", b"y"), queue_id)
            bodies = [message.body for message in store.read("T", queue_id, 0).messages]
            assert bodies == [b"x", b"x", b"x", b"y"]
        store.flush()
        assert store.verify().sound


def test_the_append_behind_a_batch_dispatches_it(store: MessageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for owner, name in ((ConsumeQueue, "append_many"), (KeyIndex, "append_block")):
        call = getattr(owner, name)

        def noted(*given: object, name: str = name, call: Callable[..., object] = call) -> object:
            done.append(name)
            return call(*given)

        monkeypatch.setattr(owner, name, noted)
    send(store, 0, BATCH)
    assert done == []
    for number, calls in enumerate((["append_many"] * 3 + ["append_block"], []), BATCH):
        done.clear()
        send(store, number, number + 1)
        assert done == calls
    assert indexed(store) == 2 * BATCH, "those of the batch"
    send(store, BATCH + 2, 2 * BATCH + 1)
    assert indexed(store) == 4 * BATCH
    for number in range(2 * BATCH + 1):
        assert len(store.find_by_key("T", f"k{number}")) == len(store.find_by_key("T", f"u{number}")) == 1


@pytest.mark.parametrize("appended", [BATCH - 1, BATCH, BATCH + 1, BATCH + 2, BATCH + 3, 2 * BATCH + 1])
def test_a_query_finds_all(store: MessageStore, appended: int) -> None:
    send(store, 0, appended)
    assert len(store.find_by_key("T", f"k{appended - 1}")) == len(store.find_by_key("T", "k0")) == 1
    assert indexed(store) == 2 * appended
    assert store.verify().sound


@many
@pytest.mark.parametrize("part", ["a queue", "the index"])
@pytest.mark.parametrize("ends", ["append", "read", "find"])
def test_a_full_disk_in_either_part_loses_nothing(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch, part: str, ends: str
) -> None:
    send(store, 0, BATCH)
    owner, name = (ConsumeQueue, "append_many") if part == "a queue" else (store.index.__class__, "append_block")
    with monkeypatch.context() as full:

        def refuse(*_: object) -> None:
            raise StoreIOError("allocate", ROOT, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

        full.setattr(owner, name, refuse)
        for _ in range(2):
            with pytest.raises(StoreIOError):
                send(store, 5000, 5001)
    if ends == "append":
        send(store, BATCH, BATCH + 2)
    elif ends == "read":
        assert len(store.read("T", 0, 0).messages) == 32
    for number in range(BATCH):
        assert len(store.find_by_key("T", f"k{number}")) == len(store.find_by_key("T", f"u{number}")) == 1
    assert store.find_by_key("T", "k5000") == [], "it was refused before it was written"
    assert store.verify().sound


@many
@pytest.mark.parametrize("part", ["a queue", "the index", "a file of the index"])
@pytest.mark.parametrize("ends", ["append", "read", "find"])
def test_a_batch_that_finds_a_full_disk_is_stored(monkeypatch: pytest.MonkeyPatch, part: str, ends: str) -> None:
    """A file of the index is full between two keys of a message."""
    parts: dict[str, tuple[type, str]] = {
        "a queue": (ConsumeQueue, "append_many"), "the index": (KeyIndex, "append_block"),
        "a file of the index": (IndexFile, "create"),
    }  # fmt: skip
    messages = [Message("T", b"x", keys=f"k{number}", unique_key=f"u{number}") for number in range(BATCH)]
    config = StoreConfig.tiny(max_index_num=BATCH + 1, commitlog_file_size=1 << 20)
    with MessageStore.open(ROOT, config, files=MemoryFiles(), background=False) as store:
        store.append(Message("T", b"before", keys="before"))
        assert len(store.find_by_key("T", "before")) == 1
        with monkeypatch.context() as full:

            def refuse(*_: object, **__: object) -> None:
                raise StoreIOError("allocate", ROOT, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

            full.setattr(*parts[part], refuse)
            results = store.append_batch(messages)
            assert [result.queue_offset for result in results] == list(range(1, 1 + BATCH))
            later = [Message("T", b"x") for _ in range(BATCH)]
            with pytest.raises(StoreIOError):  # once the keys of a whole batch are due
                deque(map(store.append_batch, repeat(later, 3)), 0)
        if ends == "append":
            send(store, BATCH, BATCH + 2)
        elif ends == "read":
            assert len(store.read("T", 0, 0).messages) == 32
        for number in range(BATCH):
            assert len(store.find_by_key("T", f"k{number}")) == len(store.find_by_key("T", f"u{number}")) == 1
        assert store.read("T", 0, BATCH, 1).messages[0].keys == (f"k{BATCH - 1}",)
        assert store.verify().sound


def test_a_batch_whose_repair_fails_too_is_there_once(store: MessageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue has the entries, its index has no keys, and there is no memory for entries at each other attempt."""
    messages = [Message("T", b"x", keys=f"k{number}", unique_key=f"u{number}") for number in range(BATCH)]
    send(store, 0, 1, "T")
    assert len(store.find_by_key("T", "k0")) == 1
    with monkeypatch.context() as failing:
        calls, append_many = count(), ConsumeQueue.append_many

        def refuse(*_: object) -> None:
            raise StoreIOError("allocate", ROOT, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

        def put_some(queue: ConsumeQueue, queue_offset: int, entries: bytes) -> None:
            if next(calls) % 2 == 0:
                raise MemoryError
            append_many(queue, queue_offset, entries)

        failing.setattr(store.index.__class__, "append_block", refuse)
        failing.setattr(ConsumeQueue, "append_many", put_some)
        with pytest.raises(MemoryError):
            store.append_batch(messages)
        with pytest.raises(StoreIOError):
            store.append(messages[0])
    send(store, BATCH, BATCH + 2)
    for number in range(BATCH):
        assert len(store.find_by_key("T", f"k{number}")) == (1 if number else 2)
        assert len(store.find_by_key("T", f"u{number}")) == (1 if number else 2)
    assert [message.keys for message in store.messages("T", 0)] == [("k0",), *(one.keys for one in messages)]
    assert store.verify().sound


@pytest.mark.parametrize(("at", "byte"), [(89, b"V"), (23, b"\x07"), (20, b"\xff"), (4, b"x"), (3, b"\x01")])
def test_a_record_that_changes_before_it_is_dispatched_is_told(at: int, byte: bytes) -> None:
    """Its topic, its queue offset, its magic or its size: its queue would lack it in silence."""
    store = MessageStore.open(ROOT, files=MemoryFiles(), background=False)
    store.append(Message("T", b"x"))
    store.log.patch(at, byte)
    for call in store.flush, store.close:
        with pytest.raises(CorruptionError):
            call()


def test_an_interrupted_wait_for_the_writer_frees_the_lock(store: MessageStore) -> None:
    for _ in at_each_call(lambda: store.appender.lock.is_free_within(0)):
        assert not store.appender.lock.is_writing()


@pytest.mark.parametrize("records", [2, 20])
def test_keys_in_two_files_survive_a_disk_that_is_often_full(records: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
                for number in range(records):
                    assert len(store.find_by_key("T", f"k{number}")) == len(store.find_by_key("T", f"u{number}")) == 1
        assert indexed(store) == 2 * records - 1
        send(store, records, records + 1)
        for number in range(records + 1):
            assert len(store.find_by_key("T", f"k{number}")) == len(store.find_by_key("T", f"u{number}")) == 1
        assert indexed(store) == 2 * records + 2
        assert store.verify().sound


def test_producers_in_several_threads_make_pauses() -> None:
    """A thread that appends alone makes none."""
    clock = Waits()
    with MessageStore.open(ROOT, StoreConfig.tiny(), files=MemoryFiles(), clock=clock, background=False) as store:
        send(store, 0, 3 * BATCH)
        assert clock.seconds == []
        other = threading.Thread(target=send, args=(store, 0, 2 * BATCH))
        other.start()
        other.join()
        assert 0 < len(clock.seconds) <= 8, "two threads, and each change of threads costs few"
        assert store.queues["T", 0].max_offset == -(-3 * BATCH // 3) + -(-2 * BATCH // 3)


# However often the disk was full, queues and index hold each record exactly once and in order.


KEYS = st.sampled_from(["", "a", "a b", "a b c"])
ACTS = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 150), KEYS),
    st.tuples(st.just("batch"), st.integers(1, 60), KEYS),
    st.tuples(st.sampled_from(["read", "find", "flush"]), st.just(1), st.just("")),
)


class Filling(MemoryFiles):
    """A disk that can be limited to a few more files and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.room: int | None = None

    def _take(self, call: str, path: str) -> None:
        if self.room is not None:
            if not self.room:
                raise StoreIOError(call, path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            self.room -= 1

    def create(self, path: str, size: int, *, keep_descriptor: bool = False) -> File:
        self._take("create", path)
        return super().create(path, size, keep_descriptor=keep_descriptor)

    def reserve(self, file: File, begin: int, end: int) -> None:
        self._take("allocate", file.path)
        super().reserve(file, begin, end)


def message(number: int, keys: str) -> Message:
    return Message("T", b"x" * (number % 50), keys=keys.split(), unique_key=f"u{number}" if number % 3 else None)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(150))
@given(
    st.lists(st.tuples(ACTS, st.sampled_from([None, None, 0, 0, 1, 2, 5])), min_size=5, max_size=20),
    st.sampled_from([4, 40, 101, 4000]),
)
def test_a_disk_full_now_and_then_costs_no_entry_or_key(
    acts: list[tuple[tuple[str, int, str], int | None]], keys_a_file: int
) -> None:
    files = Filling()
    config = StoreConfig.tiny(max_index_num=keys_a_file, max_hash_slot_num=50, consumequeue_file_size=320)
    with MessageStore.open(ROOT, config, files=files, background=False) as store:
        number = 0
        taken: list[int] = []
        for (act, count, keys), files.room in acts:
            try:
                if act == "append":
                    for _ in range(count):
                        number += 1
                        taken.append(store.append(message(number, keys), number % 2).physical_offset)
                elif act == "batch":
                    number += count
                    batch = [message(number, keys) for _ in range(count)]
                    taken += [result.physical_offset for result in store.append_batch(batch, number % 2)]
                elif act == "read":
                    store.read("T", 0, 0)
                elif act == "find":
                    store.find_by_key("T", "a")
                else:
                    store.flush()
            except StoreIOError:
                pass
        files.room = None
        assert store.verify().sound
        assert [one.physical_offset for one in store] == taken
        keys_of = [(one.unique_key is not None) + len(one.properties.get("KEYS", "").split()) for one in store]
        expected = [place for place, keys in zip(taken, keys_of, strict=True) for _ in range(keys)]
        entries = [file.entries(1, file.header.index_count)["physical"].tolist() for file in store.index.files]
        assert list(chain.from_iterable(entries)) == expected


PROPERTIES = st.lists(
    st.sampled_from(
        [
            *(b"UNIQ_KEY\1u1", b"KEYS\1k", b"KEYS\1 k1  k2 ", b"KEYS\1 ", b"TAGS\1t", b"TAGS\1a\1b", b"p\1q", b""),
            *(b"DELAY\1" + level for level in (b"1", b"2", b"9", b"10", b"0", b"01", b"100", b"-1")),
            *(
                b"UNIQ_KEY\1",
                b"KEYS",
                b"TAGS\1",
                b"TAGS\1\xc3\xa9",
                b"KEYS\1" + b"x" * 200,
                b"KEYSX\1y",
                b"UNIQ_KEYS\1z",
            ),
        ]
    )
    | st.binary(max_size=12),
    max_size=6,
).map(b"\2".join)
RECORDS = st.lists(
    st.builds(
        Record,
        topic=st.sampled_from(["T", "orders", "x" * 127, "\u00e9", "SCHEDULE_TOPIC_XXXX"]),
        queue_id=st.integers(-1, 2),
        sys_flag=st.sampled_from([0, 0, 0, 1, 4, 8, 12, 16, 128]),
        store_timestamp_ms=st.integers(0, 1 << 62),
        body=st.binary(max_size=40),
        properties_raw=PROPERTIES,
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=examples(1000))
@given(
    RECORDS,
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=2),
    st.sampled_from([1, 8]),
    st.booleans(),
    st.sampled_from([compiled_core.CORE, compiled_core.PURE]),
    st.sampled_from([DelayLevels(), DelayLevels.parse("1s 5s 1d 9s 9s 9s 9s 9s 9s 9s 9s")]),
)
def test_records_define_the_same_together_as_one_by_one(
    records: list[Record],
    flips: list[tuple[int, int]],
    most: int,
    check_body: bool,
    core: compiled_core.Core,
    levels: DelayLevels,
) -> None:
    """Also damaged records, properties of any bytes, and others that are left to a loop."""
    log, counts = CommitLog.open("/log", 1 << 14, files=MemoryFiles()), Counter[tuple[str, int]]()
    for item in records:
        item.physical_offset, item.queue_offset = log.end, 5 + counts[item.topic, item.queue_id]
        counts[item.topic, item.queue_id] += 1
        item.body_crc = crc32(item.body) & 0x7FFFFFFF
        item.born_host = ("::1" if item.sys_flag & 16 else "127.0.0.1", 1)
        log.append(encode_record(item))
    buffer = log.sequence.file(0).buffer
    for at, value in flips:
        buffer[at % log.end] = value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(derivation, "CORE", core)
        block = derived_block(log, 0, log.end, most, check_body=check_body, levels=levels)
        derive, at, keys = Derivation(levels).derive, 0, []
        queues: dict[tuple[bytes, int], tuple[int, bytes]] = {}
        while at < (0 if block is None else block.end):
            size = int.from_bytes(buffer[at : at + 4], "big")
            record = derive(at, size, buffer[at : at + size])
            assert record.physical_offset == record.address
            if check_body:
                check_record(buffer, at, log.end, check_body=True)
            name = record.topic, record.queue_id
            first, entries = queues.setdefault(name, (record.queue_offset, b""))
            assert record.queue_offset == first + len(entries) // ENTRY.size
            queues[name] = first, entries + ENTRY.pack(at, size, record.tags_code)
            keys.append(record.pending())
            at += size
        if block is not None:
            assert at == block.end
            assert core.derive is not None or len(keys) >= most / 4
            assert {(topic, number): (first, run) for topic, number, first, run in block.queues} == queues
            assert [column.tolist() for column in block.keys] == [column.tolist() for column in key_block(keys)]


def test_usual_records_are_taken_together(store: MessageStore) -> None:
    """Also those of committed transactions."""
    send(store, 0, 10)
    store.append(Message("T", b"x", keys="k10"), 1, sys_flag=TRANSACTION_COMMIT)
    send(store, 11, 100)
    for core in (compiled_core.CORE, compiled_core.PURE):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(derivation, "CORE", core)
            block = derived_block(store.log, 0, store.log.end, 90)
            assert block is not None
            assert len(block.keys.physical_offsets) == 90
            assert [queue[:3] for queue in block.queues] == [(b"T", number, 0) for number in range(3)]
            assert derived_block(store.log, block.end, store.log.end, 90) is not None or core.derive is None


def test_a_delivery_time_behind_the_last_moment_is_that_of_java() -> None:
    fields = Record(topic="SCHEDULE_TOPIC_XXXX", store_timestamp_ms=(1 << 63) - 1, properties_raw=b"DELAY\x011\x02")
    raw = encode_record(fields)
    assert Derivation(DelayLevels.parse("1s")).derive(0, len(raw), raw).tags_code == 999 - (1 << 63)
