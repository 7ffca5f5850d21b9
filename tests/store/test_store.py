"""The store as a whole: limits, order of writes, reading, handles, full disks, many queues."""

from __future__ import annotations

import inspect
import itertools
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.consumequeue import ExtUnit
from librmq.errors import ConfigError, MessageIllegalError, ReadOnlyError, RmqError, StoreClosedError
from librmq.files._memory import MemoryFiles
from librmq.message import record
from librmq.message.ids import offset_message_id
from librmq.message.message import Message, StoredMessage
from librmq.message.properties import tags_code
from librmq.message.topics import SystemTopic
from librmq.store import AppendResult, GetStatus, MessageStore
from librmq.store.recovery._verify import verify
from tests.budget import many
from tests.file_seams import RecordingFiles
from tests.programs import run_program
from tests.stores import (
    ROOT,
    SMALL,
    SMALL_EXT,
    START_MS,
    OpenedFiles,
    configs,
    contents,
    died,
    fill,
    filled,
    in_memory,
    opened,
    served,
)


@pytest.fixture
def files() -> MemoryFiles:
    return MemoryFiles()


@pytest.fixture
def store(files: MemoryFiles) -> MessageStore:
    store = opened(files)
    store.append(Message("TopicA", b"first", keys="k"))
    return store


# --------------------------------------------------------------------------------------------------------- limits


LIMITS: dict[str, Callable[[MessageStore], object]] = {
    "topic empty": lambda store: store.append(Message("", b"")),
    "topic of 128 bytes": lambda store: store.append(Message("t" * 128, b"")),
    "topic of 129 bytes in 43 characters": lambda store: store.append(Message("消" * 43, b"")),
    "topic .": lambda store: store.append(Message(".", b"")),
    "topic ..": lambda store: store.append(Message("..", b"")),
    "topic with /": lambda store: store.append(Message("a/b", b"")),
    "topic with NUL": lambda store: store.append(Message("a\0b", b"")),
    "topic with half a pair": lambda store: store.append(Message("a\ud800", b"")),
    "body of 3001 bytes": lambda store: store.append(Message("T", bytes(3001))),
    "record that fits no file": lambda store: store.append(Message("T", bytes(2990), properties={"a": "b" * 1020})),
    "properties of 32768 bytes": lambda store: store.append(Message("T", b"", properties={"a": "b" * 32766})),
    "raw properties of 32768 bytes": lambda store: store.append(Message("T", b""), properties_raw=bytes(32768)),
    "raw properties that differ": lambda store: store.append(
        Message("T", b"", tags="a", keys="k"), properties_raw=b"TAGS\1b\2KEYS\1k"
    ),
    "half a pair in tags": lambda store: store.append(Message("T", b"", tags="\udfff")),
    "half a pair in keys": lambda store: store.append(Message("T", b"", keys="\ud800")),
    "half a pair in a property": lambda store: store.append(Message("T", b"", properties={"a\ud800": "b"})),
    "queue id below 0": lambda store: store.append(Message("T", b""), -1),
    "queue id that is a text": lambda store: store.append(Message("T", b""), "1"),  # type: ignore[arg-type]
    "queue id of 2^31": lambda store: store.append(Message("T", b""), 1 << 31),
    "sys flag for hosts that are not": lambda store: store.append(Message("T", b""), sys_flag=record.STORE_HOST_V6),
    "batch for hosts that are not": lambda store: store.append_batch([Message("T", b"")], sys_flag=record.BORN_HOST_V6),
    "born time beyond 64 bits": lambda store: store.append(Message("T", b""), born_timestamp_ms=1 << 63),
    "sys flag beyond 32 bits": lambda store: store.append(Message("T", b""), sys_flag=1 << 31),
    "reconsume times beyond 32 bits": lambda store: store.append(Message("T", b""), reconsume_times=1 << 31),
    "prepared offset beyond 64 bits": lambda store: store.append(
        Message("T", b""), prepared_transaction_offset=1 << 63
    ),
    "host that is none": lambda store: store.append(Message("T", b""), born_host=("nowhere", 1)),
    "host of five bytes": lambda store: store.append(Message("T", b""), born_host=b"12345"),
    "port beyond 32 bits": lambda store: store.append(Message("T", b""), store_host=("1.2.3.4", 1 << 31)),
    "batch of nothing": lambda store: store.append_batch([]),
    "batch of two topics": lambda store: store.append_batch([Message("T", b""), Message("U", b"")]),
    "batch with a delay": lambda store: store.append_batch([Message("T", b""), Message("T", b"", delay_level=1)]),
    "batch with a delay of its own": lambda store: store.append_batch([Message("T", b"")], properties={"DELAY": "1"}),
    "batch of two wait flags": lambda store: store.append_batch(
        [Message("T", b""), Message("T", b"", wait_store_ok=False)]
    ),
    "batch that is prepared": lambda store: store.append_batch([Message("T", b"")], sys_flag=4),
    "batch that is rolled back": lambda store: store.append_batch([Message("T", b"")], sys_flag=12),
    "batch that commits": lambda store: store.append_batch([Message("T", b"")], sys_flag=8),
    "batch of over 3000 bytes": lambda store: store.append_batch([Message("T", bytes(1000)) for _ in range(3)]),
    "batch that fits no file": lambda store: store.append_batch([Message("t" * 100, b"") for _ in range(40)]),
    "batch with a bad topic": lambda store: store.append_batch([Message("a/b", b"")]),
    "batch with a bad queue id": lambda store: store.append_batch([Message("T", b"")], -1),
    "batch with long properties": lambda store: store.append_batch(
        [Message("T", b"", properties={"a": "b" * 20000})], properties={"c": "d" * 20000}
    ),
    "batch with half a pair": lambda store: store.append_batch([Message("T", b""), Message("T", b"", keys="\ud800")]),
    "batch with half a pair in its own": lambda store: store.append_batch(
        [Message("T", b"")], properties={"a": "\ud800"}
    ),
    "batch of too large a time": lambda store: store.append_batch([Message("T", b"")], born_timestamp_ms=1 << 63),
}


def test_hosts_as_a_record_has_them() -> None:
    with MessageStore.open(ROOT, SMALL, files=MemoryFiles()) as store:
        host = bytes((10, 1, 2, 3, 0, 0, 0x2A, 0x9F))
        at = store.append(Message("T", b""), born_host=host, store_host=host).physical_offset
        message = store.message_at(at)
        assert message is not None
        assert message.born_host == message.store_host == ("10.1.2.3", 0x2A9F)


def flag_beyond_32_bits(store: MessageStore) -> None:
    message = Message("T", b"")
    message.flag = 1 << 31
    store.append(message)


LIMITS["flag beyond 32 bits"] = flag_beyond_32_bits


@many
@pytest.mark.parametrize("used", [0, 3800, 4088], ids=["fresh", "before a roll", "full"])
@pytest.mark.parametrize("breach", LIMITS)
def test_a_message_beyond_a_limit_is_refused_unwritten(files: MemoryFiles, breach: str, used: int) -> None:
    store = opened(files)
    if used:
        size = store.append(Message("TopicA", b"x")).size
        body = bytes(min(used - 2 * size + 1, 3000))
        store.append(Message("TopicA", body))
        if store.log.end < used:
            store.append(Message("TopicA", bytes(used - store.log.end - size + 1)))
        assert store.log.end == used
    store.flush()
    before, end = contents(files), store.log.end
    with pytest.raises(RmqError) as told:
        LIMITS[breach](store)
    assert isinstance(told.value, ValueError)
    assert str(told.value)
    assert contents(files) == before
    assert store.log.end == end
    result = store.append(Message("T", b"after"))
    assert result.queue_offset == 0
    store.close()
    assert verify(ROOT, SMALL, files).sound


@pytest.mark.parametrize(
    ("message", "size"),
    [
        (Message("t" * 127, b""), 91 + 127),
        (Message("消" * 42, b""), 91 + 126),
        (Message("T", bytes(3000)), 92 + 3000),
        (Message("T", bytes(2000), properties={"a": "b" * 1986}), 4088 - 8),
        (Message("T", bytes(2000), properties={"a": "b" * 1994}), 4088),
    ],
    ids=["topic", "topic of 126 bytes", "body", "record", "longest record"],
)
def test_values_at_the_limit_are_accepted(files: MemoryFiles, message: Message, size: int) -> None:
    with opened(files) as store:
        result = store.append(message, (1 << 31) - 1)
        assert result.size == size
        (found,) = store.read(message.topic, (1 << 31) - 1, 0).messages
        assert (found.body, found.topic) == (message.body, message.topic)
    assert verify(ROOT, SMALL, files).sound


def test_the_longest_properties(files: MemoryFiles) -> None:
    config = StoreConfig.tiny()
    with opened(files, config) as store:
        message = Message("T", b"", properties={"a": "b" * 32765})
        store.append(message)
        store.append_batch([message])
        assert [len(found.properties_raw) for found in store.read("T", 0, 0).messages] == [32767, 32767]
    assert verify(ROOT, config, files).sound


def test_a_large_batch_just_fits(files: MemoryFiles) -> None:
    with opened(files) as store:
        messages = [Message("T", bytes(978)) for _ in range(3)]  # each takes 22 more bytes as a client encodes it
        assert [result.queue_offset for result in store.append_batch(messages)] == [0, 1, 2]
        with pytest.raises(MessageIllegalError, match="3,001"):
            store.append_batch([*messages[:2], Message("T", bytes(979))])
        assert [result.queue_offset for result in store.append_batch(messages)] == [3, 4, 5]


# ---------------------------------------------------------------------------------------------- records and queues


def test_a_delayed_message_waits_in_the_queue_of_its_level(files: MemoryFiles) -> None:
    with opened(files) as store:
        for level in (1, 18, 30, 0, -3):
            store.append(Message("T", b"x", tags="A", delay_level=level), 3)
        now = store.clock.now_ms()
        store.flush()
        assert store.queues["T", 3].max_offset == 2
        for level, delay_ms, count in ((1, 1000, 1), (18, 7_200_000, 2)):
            queue = store.queues[SystemTopic.SCHEDULE, level - 1]
            assert queue.max_offset == count
            entry = queue.entry(0)
            assert entry is not None
            assert entry.tags_code == now + delay_ms
            for message in store.read(SystemTopic.SCHEDULE, level - 1, 0).messages:
                assert message.properties["DELAY"] == str(level)
                assert (message.properties["REAL_TOPIC"], message.properties["REAL_QID"]) == ("T", "3")


def test_properties_of_a_batch_follow_those_of_its_messages(files: MemoryFiles) -> None:
    with opened(files) as store:
        store.append_batch(
            [Message("T", b"1", keys="k1"), Message("T", b"2"), Message("T", b"3", tags="mine")],
            properties={"KEYS": "all", "TAGS": "batch"},
        )
        raws = [message.properties_raw for message in store]
        assert raws[0].startswith(b"KEYS\x01k1\x02")
        assert sorted(raws[1].split(b"\x02")) == [b"KEYS\x01all", b"TAGS\x01batch"]
        assert [message.body for message in store.find_by_key("T", "all")] == [b"1", b"2", b"3"]
        assert store.find_by_key("T", "k1") == []
        assert [message.tags for message in store] == ["batch"] * 3
        codes = [code for _, _, code in store.queues["T", 0].entries().tolist()]
        assert codes == [tags_code("batch")] * 3


def test_raw_properties_are_stored_as_they_are(files: MemoryFiles) -> None:
    raw = b"TAGS\x01A\x02\x02KEYS\x01k1  k2\x02x\x01\x02UNIQ_KEY\x01U\x02"
    with opened(files) as store:
        store.append(Message("T", b"x"), properties_raw=raw)
        (found,) = store.find_by_key("T", "k2")
        assert found.properties_raw == raw
        assert store.find_by_id("U") == [found]
    assert verify(ROOT, SMALL, files).sound


def test_records_are_written_before_derived_data() -> None:
    """At no point of the writes is there an entry or a key without its record."""
    files = RecordingFiles()
    clock = ManualClock(START_MS)
    with MessageStore.open(ROOT, SMALL, files=files, clock=clock) as store:
        fill(store, clock, random.Random(5), 60)
        ends = {message.physical_offset: message.physical_offset + message.size for message in store}
    written = 0
    for event in files.trace:
        if event.call != "write":
            continue
        if "/commitlog/" in event.path:
            written = max(written, int(os.path.basename(event.path)) + event.offset + len(event.data))
        elif "/consumequeue/" in event.path:
            for at in range(0, len(event.data), 20):
                place = int.from_bytes(event.data[at : at + 8], "big")
                assert ends[place] <= written


def test_flushing_goes_log_queues_index_checkpoint() -> None:
    files = RecordingFiles()
    clock = ManualClock(START_MS)
    store = MessageStore.open(ROOT, SMALL, files=files, clock=clock)
    fill(store, clock, random.Random(6), 40)
    files.trace.clear()
    store.flush()
    order = [event.path[len(ROOT) + 1 :].split("/")[0] for event in files.trace if event.call == "flush"]
    assert [name for name, _ in itertools.groupby(order)] == ["commitlog", "consumequeue", "index", "checkpoint"]
    found = contents(files)["checkpoint"]
    assert int.from_bytes(found[:8], "big") == clock.now_ms()


# --------------------------------------------------------------------------------------------------------- reading


class ByTag:
    """A tag filter like a broker's: it compares the code, then the text."""

    def __init__(self, tag: str) -> None:
        self.tag = tag

    def match_entries(self, tags_codes: npt.NDArray[np.int64], units: Any) -> npt.NDArray[np.bool_]:
        self.units: list[ExtUnit | None] | None = units
        wanted: npt.NDArray[np.bool_] = tags_codes == tags_code(self.tag)
        return wanted

    def match_message(self, message: StoredMessage) -> bool:
        return message.tags == self.tag


def test_a_filtered_read_continues_after_the_checked_messages(files: MemoryFiles) -> None:
    with opened(files) as store:
        for n in range(8):
            store.append(Message("T", bytes([n]), tags="Aa" if n % 3 == 0 else "BB"))  # codes collide
        result = store.read("T", 0, 0, 32, ByTag("Aa"))
        assert [message.body[0] for message in result.messages] == [0, 3, 6]
        assert (result.status, result.next_offset) == (GetStatus.FOUND, 8)
        result = store.read("T", 0, 1, 1, ByTag("Aa"))
        assert ([message.body[0] for message in result.messages], result.next_offset) == ([3], 4)
        result = store.read("T", 0, 0, 32, ByTag("none"))
        assert (result.status, result.messages, result.next_offset) == (GetStatus.NO_MATCHED_MESSAGE, [], 8)


def test_a_filter_sees_extension_units(files: MemoryFiles) -> None:
    with opened(files, SMALL_EXT) as store:
        for n in range(5):
            store.append(Message("T", bytes([n]), tags="A" if n % 2 else "B"))
        matching = ByTag("A")
        result = store.read("T", 0, 0, 32, matching)
        assert [message.body[0] for message in result.messages] == [1, 3]
        assert matching.units is not None
        assert [unit is not None and unit.store_timestamp_ms for unit in matching.units] == [store.clock.now_ms()] * 5


def test_a_read_is_bounded_by_count_and_bytes(files: MemoryFiles) -> None:
    config = StoreConfig.tiny(max_transfer_count_in_memory=4, max_transfer_bytes_in_memory=1000)
    with opened(files, config) as store:
        for n in range(10):
            store.append(Message("T", bytes(10 if n < 6 else 600)))
        assert len(store.read("T", 0, 0, 32).messages) == 4
        assert len(store.read("T", 0, 0, 2).messages) == 2
        assert len(store.read("T", 0, 6, 32).messages) == 1
        assert store.read("T", 0, 6, 32).next_offset == 7
        for start in range(10):  # the result is the same with a filter that accepts every message
            one, other = store.read("T", 0, start, 32), store.read("T", 0, start, 32, ByTagless())
            assert (one.messages, one.next_offset, one.total_size) == (
                other.messages,
                other.next_offset,
                other.total_size,
            )


@pytest.mark.parametrize("memory", [0, 300, 1500, 10_000])
def test_a_read_from_disk_is_bounded_by_where_it_comes_to(
    files: MemoryFiles, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = StoreConfig.tiny(
        max_transfer_count_in_memory=7, max_transfer_bytes_in_memory=1400, max_transfer_count_on_disk=3, memory_ratio=50
    )
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_PAGE_SIZE" else 2 * memory)
    with opened(files, config) as store:
        for _ in range(20):
            store.append(Message("T", bytes(10)))
        for start in range(20):
            for most in (-1, 0, 1, 2, 5, 32):
                one, other = store.read("T", 0, start, most), store.read("T", 0, start, most, ByTagless())
                assert one == other
        assert len(store.read("T", 0, 0).messages) == (7 if memory == 10_000 else 3)


class ByTagless(ByTag):
    def __init__(self) -> None:
        super().__init__("")

    def match_entries(self, tags_codes: npt.NDArray[np.int64], units: Any) -> npt.NDArray[np.bool_]:
        return np.ones(len(tags_codes), np.bool_)

    def match_message(self, message: StoredMessage) -> bool:
        return True


@pytest.mark.parametrize("most", [0, -1])
def test_at_least_one_message_is_read(store: MessageStore, most: int) -> None:
    result = store.read("TopicA", 0, 0, most)
    assert len(result.messages) == 1
    assert result.next_offset == len(result.messages)


@pytest.mark.parametrize("size", [-(1 << 31), -1, 0, 1, 90, 111, 113, 2000])
def test_an_entry_of_another_size_than_its_record_still_leads_to_it(files: MemoryFiles, size: int) -> None:
    with opened(files) as store:
        sizes = {store.append(Message("T", bytes(20))).size for _ in range(3)}
        assert sizes == {112}
        path, at = store.queues["T", 0].place_of(1)
        assert len(store.read("T", 0, 0).messages) == 3
        buffer = files.open(path, writable=True).buffer
        buffer[at + 8 : at + 12] = size.to_bytes(4, "big", signed=True)
        for begin in range(3):
            offsets = [message.queue_offset for message in store.read("T", 0, begin).messages]
            assert offsets == list(range(begin, 3))
        store.abandon()


def test_messages_that_are_gone_from_the_log_are_passed_over() -> None:
    files = in_memory(filled(SMALL, 60, seed=11))
    with opened(files) as store:
        store.log.delete_before(9000)
        begin = store.log.begin
        assert begin == 8192
        for topic, queue_id in sorted(store.queues):
            queue_offset, read = 0, list[StoredMessage]()
            while (result := store.read(topic, queue_id, queue_offset)).status is not GetStatus.OFFSET_OVERFLOW_ONE:
                if result.status is GetStatus.NO_MESSAGE_IN_QUEUE:
                    break
                assert result.next_offset > queue_offset
                read += result.messages
                queue_offset = result.next_offset
            assert read == [
                message
                for message in store
                if (message.topic, message.queue_id) == (topic, queue_id)
                and message.sys_flag & record.TRANSACTION_MASK in (0, record.TRANSACTION_COMMIT)
            ]


def test_finding_by_id(store: MessageStore) -> None:
    result = store.append(Message("TopicB", b"second", unique_key="0" * 32))
    store.append(Message("TopicC", b"third", unique_key="0" * 32))
    assert [message.body for message in store.find_by_id(result.offset_id)] == [b"second"]
    assert [message.body for message in store.find_by_id(result.offset_id.lower())] == [b"second"]
    assert [message.body for message in store.find_by_id("0" * 32)] == [b"second", b"third"]
    other = offset_message_id(("10.0.0.1", 10911), result.physical_offset)
    assert store.find_by_id(other) == []
    for unknown in ("", "x", "F" * 32, "7F00000100002A9F0000000000000001", "é", "\ud800", "F" * 56):
        assert store.find_by_id(unknown) == []


# -------------------------------------------------------------------------------------------------- large numbers


@pytest.mark.parametrize("start", [(1 << 31) - 4096, 1 << 40, 1 << 61])
@pytest.mark.parametrize("queue_offset", [0, (1 << 31) + 3, 1 << 40])
def test_offsets_beyond_2_31_and_2_40(tmp_path: Path, start: int, queue_offset: int) -> None:
    """Return a log and a queue that begin far above 0, as on an old broker."""
    (tmp_path / "commitlog").mkdir()
    log = tmp_path / "commitlog" / f"{start:020d}"
    raw = record.encode_record(
        record.Record(
            topic="T", queue_offset=queue_offset, physical_offset=start, store_timestamp_ms=START_MS, body=b"0",
            body_crc=record.body_checksum(b"0"),
        )
    )  # fmt: skip
    log.write_bytes(raw + bytes(4096 - len(raw)))
    (tmp_path / "abort").touch()
    clock = ManualClock(START_MS + 5)
    with MessageStore.open(tmp_path, SMALL, clock=clock) as store:
        queue = store.queues["T", 0]
        assert (queue.min_offset, queue.max_offset) == (queue_offset, queue_offset + 1)
        results = [store.append(Message("T", b"x" * 500, keys="k")) for n in range(20)]
        assert [result.queue_offset for result in results] == [queue_offset + 1 + n for n in range(20)]
        assert results[-1].physical_offset > start + 4096
    assert verify(str(tmp_path), SMALL).sound
    with MessageStore.open(tmp_path, SMALL, clock=clock) as store:
        assert store.recovered == []
        assert store.log.begin == start
        assert store.read("T", 0, queue_offset, 1).messages[0].raw == raw
        assert store.read("T", 0, queue_offset + 20).messages[-1].physical_offset == results[-1].physical_offset
        assert len(store.find_by_key("T", "k", max_messages=100)) == 20
        assert store.find_by_id(results[-1].offset_id)[0].body == b"x" * 500
        assert store.queue_offset_at("T", 0, START_MS) == queue_offset


MANY = """
import resource, sys, tempfile
from librmq.config import StoreConfig
from librmq.message import Message
from librmq.store import MessageStore
from librmq.store import verify
queues, limit = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
config = StoreConfig.tiny(commitlog_file_size=1 << 20, max_hash_slot_num=1000, max_index_num=100_000)
with tempfile.TemporaryDirectory() as path:
    with MessageStore.open(path, config) as store:
        for turn in range(2):
            for n in range(queues):
                store.append(Message(f"T{n % 100}", b"%d" % turn), n // 100)
        for n in range(0, queues, 7):
            found = store.read(f"T{n % 100}", n // 100, 0).messages
            assert [message.body for message in found] == [b"0", b"1"], n
    with MessageStore.open(path, config) as store:
        assert store.recovered == [] and len(store.queues) == queues
        store.append(Message("T0", b"2"), 0)
        assert store.read("T0", 0, 2).messages[0].body == b"2"
    assert verify(path, config).sound
print("done")
"""


@pytest.mark.slow
@pytest.mark.platform
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs a limit of descriptors")
def test_queues_outnumber_descriptors() -> None:
    done = run_program(MANY, 2_000, 1024)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


# ------------------------------------------------------------------------------------------------- opened files


@pytest.mark.parametrize("read_only", [False, True])
def test_opening_a_cleanly_closed_store_maps_only_its_ends(read_only: bool) -> None:
    """Opening touches at most three log files and the first and last used file of each queue, however long they are."""
    files = in_memory(filled(SMALL, 400, seed=3))
    touched = OpenedFiles(files)
    store = opened(touched, read_only=read_only)
    log = [path for path in touched.paths if path.startswith("commitlog/")]
    every = sorted(path for path in contents(files) if path.startswith("commitlog/"))
    assert len(every) > 20
    assert set(log) <= set(every[-3:])
    by_queue: dict[str, set[str]] = {}
    for path in touched.paths:
        if path.startswith("consumequeue/"):
            by_queue.setdefault(os.path.dirname(path), set()).add(os.path.basename(path))
    assert max(len(names) for names in by_queue.values()) <= 2
    assert len(by_queue) == len(store.queues)
    store.close()


def test_opening_after_a_kill_maps_uncovered_files() -> None:
    files = MemoryFiles()
    clock = ManualClock(START_MS)
    store = MessageStore.open(ROOT, SMALL, files=files, clock=clock)
    results = fill(store, clock, random.Random(3), 200)
    store.flush()
    clock.advance(seconds=10)
    results += fill(store, clock, random.Random(4), 30)
    touched = OpenedFiles(died(files))
    with opened(touched) as again:
        log = sorted({path for path in touched.paths if path.startswith("commitlog/")})
        every = sorted(path for path in contents(files) if path.startswith("commitlog/"))
        assert len(served(again)) == len(results)
    assert log[-3:] == every[-3:]
    seams = sum(path.startswith("index/") for path in contents(files))  # a glance at what each index file begins with
    assert len(log) <= min(3 + seams, len(every) - 3)


# --------------------------------------------------------------------------------------------------------- handles


def test_a_closed_handle_refuses(store: MessageStore) -> None:
    store.close()
    store.close()
    for call in (
        lambda: store.append(Message("T", b"")),
        lambda: store.append_batch([Message("T", b"")]),
        lambda: store.read("TopicA", 0, 0),
        lambda: store.find_by_key("TopicA", "k"),
        lambda: store.find_by_id("k"),
        lambda: store.message_at(0),
        lambda: store.queue_offset_at("TopicA", 0, 0),
        lambda: next(iter(store)),
        lambda: store.flush(),
        lambda: store.recover(),
        lambda: store.verify(),
        lambda: store.refresh(),
        lambda: store.run_due(0),
    ):
        with pytest.raises(StoreClosedError, match="this handle is closed"):
            call()


def test_a_reader_writes_nothing(files: MemoryFiles, store: MessageStore) -> None:
    store.close()
    before = contents(files)
    with opened(files, read_only=True) as reader:
        for call in (
            lambda: reader.append(Message("TopicA", b"")),
            lambda: reader.append(Message("New", b"")),
            lambda: reader.append_batch([Message("TopicA", b"")]),
            lambda: reader.flush(),
            lambda: reader.recover(),
        ):
            with pytest.raises(ReadOnlyError):
                call()
        assert reader.verify().sound
        assert len(reader.read("TopicA", 0, 0).messages) == 1
    assert contents(files) == before


def test_a_store_is_opened_by_open_alone() -> None:
    with pytest.raises(TypeError):
        MessageStore()


def test_a_new_store_is_a_store(files: MemoryFiles) -> None:
    with opened(files) as store:
        assert list(store) == []
        assert store.read("T", 0, 0).status is GetStatus.NO_MESSAGE_IN_QUEUE
        assert store.find_by_key("T", "k") == []
        assert store.queue_offset_at("T", 0, 0) == 0
        assert store.message_at(0) is None
    assert verify(ROOT, SMALL, files).sound
    with opened(files, read_only=True) as store:
        assert list(store) == []
    with opened(files) as store:
        assert store.recovered == []
        assert store.recover() == []


@configs
def test_sizes_are_inferred_from_the_files(config: StoreConfig) -> None:
    found = filled(config, 60)
    with MessageStore.open(ROOT, files=in_memory(found)) as store:
        for name in ("commitlog_file_size", "consumequeue_file_size", "enable_consumequeue_ext", "max_index_num"):
            assert getattr(store.config, name) == getattr(config, name)


def test_a_config_that_disagrees_is_refused() -> None:
    files = in_memory(filled(SMALL, 60))
    before = contents(files)
    with pytest.raises(ConfigError, match="commitlog_file_size"):
        opened(files, StoreConfig.tiny())
    assert contents(files) == before
    opened(files).close()


def test_iterating_while_appending(store: MessageStore) -> None:
    found = []
    for number, message in enumerate(store):
        found.append(message.body)
        if number < 50:
            store.append(Message("TopicA", b"%d" % number))
    assert found[0] == b"first"
    assert len(found) <= 51


# --------------------------------------------------------------------------------------------------------- threads


def test_producers_in_many_threads(files: MemoryFiles) -> None:
    with opened(files) as store:

        def produce(number: int) -> list[tuple[int, int]]:
            messages = [Message("T", b"%d %d" % (number, n), keys=f"p{number}") for n in range(60)]
            return [(n % 2, store.append(message, n % 2).queue_offset) for n, message in enumerate(messages)]

        with ThreadPoolExecutor(4) as pool:
            taken = sorted(itertools.chain.from_iterable(pool.map(produce, range(4))))
        assert taken == [(queue_id, n) for queue_id in range(2) for n in range(120)]
        for number in range(4):
            bodies = [message.body for message in store.find_by_key("T", f"p{number}", max_messages=100)]
            assert bodies == [b"%d %d" % (number, n) for n in range(60)]
    assert verify(ROOT, SMALL, files).sound


# ---- methods that a user replaces


def test_a_subclass_defines_what_append_does() -> None:
    class Noting(MessageStore):
        def append(self, message: Message, queue_id: int = 0, **fields: Any) -> AppendResult:
            noted.append(message.body)
            return super().append(message, queue_id, **fields)

        def append_batch(self, messages: Any, queue_id: int = 0, **fields: Any) -> list[AppendResult]:
            noted.append(len(messages))
            return super().append_batch(messages, queue_id, **fields)

    noted: list[object] = []
    with Noting.open("/store", files=MemoryFiles()) as store:
        store.append(Message("T", b"one"))
        store.append_batch([Message("T", b"two"), Message("T", b"three")])
        store.submit(Message("T", b"four"))
        assert noted == [b"one", 2, b"four"]
        assert [message.body for message in store.messages("T", 0)] == [b"one", b"two", b"three", b"four"]


@pytest.mark.parametrize("on_class", [True, False])
@pytest.mark.parametrize("name", ["append", "append_batch"])
def test_a_replaced_append_is_called(name: str, on_class: bool) -> None:
    with MessageStore.open("/store", files=MemoryFiles()) as store:
        with mock.patch.object(MessageStore if on_class else store, name, return_value="replaced"):
            assert getattr(store, name)([Message("T", b"")]) == "replaced"
        store.append(Message("T", b"one"))
        store.append_batch([Message("T", b"two")])
        MessageStore.append(store, Message("T", b"three"))
        assert [message.body for message in store.messages("T", 0)] == [b"one", b"two", b"three"]


def test_the_signature_of_append_is_shown() -> None:
    assert list(inspect.signature(MessageStore.append).parameters)[:3] == ["self", "message", "queue_id"]
    assert "page cache" in (inspect.getdoc(MessageStore.append) or "")
