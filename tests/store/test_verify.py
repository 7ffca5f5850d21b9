"""What `verify` reports about sound and damaged stores, writers and markers; it changes nothing."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import pytest

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.errors import NotAStoreError
from librmq.files._memory import MemoryFiles
from librmq.message import record
from librmq.message.message import Message
from librmq.message.topics import SystemTopic
from librmq.store import MessageStore
from librmq.store.recovery._verify import UNKNOWABLE, Verdict, verify
from tests.budget import many
from tests.stores import (
    LISTS_DESCRIPTORS,
    ROOT,
    SMALL,
    SMALL_EXT,
    START_MS,
    Contents,
    contents,
    filled,
    in_memory,
    no_descriptor_left,
    opened,
)


@pytest.fixture
def found() -> Contents:
    """Return a store with two messages in T/0, one in U/3 and one delayed; the records are adjacent, from 0 on."""
    files = MemoryFiles()
    with opened(files) as store:
        store.append(Message("T", b"first", tags="A", keys=["k1", "k2"], unique_key="U1"))
        store.append(Message("T", b"second", tags="B", keys="k1"))
        store.append(Message("U", b"third", flag=5), 3)
        store.append(Message("U", b"", delay_level=2))
    return contents(files)


LOG, T, U = f"commitlog/{0:020d}", f"consumequeue/T/0/{0:020d}", f"consumequeue/U/3/{0:020d}"
FIRST = 91 + 1 + len("first") + len("TAGS.A.KEYS.k1 k2.UNIQ_KEY.U1")


def judged(found: Contents, spoil: dict[tuple[str, int], bytes] | None = None) -> Verdict:
    """Return the verdict on contents with some bytes replaced; check that verifying changes nothing."""
    found = dict(found)
    for (path, at), new in (spoil or {}).items():
        data = found[path]
        assert data[at : at + len(new)] != new
        found[path] = data[:at] + new + data[at + len(new) :]
    files = in_memory(found)
    before = contents(files)
    verdict = verify(ROOT, SMALL, files)
    assert contents(files) == before
    assert verify(ROOT, None, files).sound == verdict.sound
    return verdict


def places(verdict: Verdict) -> list[tuple[str, int, str]]:
    return [(damage.file[len(ROOT) + 1 :], damage.offset, damage.kind) for damage in verdict.damage]


def test_a_sound_store(found: Contents) -> None:
    verdict = judged(found)
    assert (verdict.sound, verdict.damage, verdict.notes) == (True, (), (UNKNOWABLE,))
    assert verify(ROOT, SMALL_EXT, in_memory(filled(SMALL_EXT, 60))).sound


def test_the_record_is_where_this_test_expects(found: Contents) -> None:
    data = found[LOG]
    assert struct.unpack(">I", data[:4]) == (FIRST,)
    assert struct.unpack(">I", data[FIRST + 4 : FIRST + 8]) == (record.MESSAGE_MAGIC,)


# Every byte of the first record, by field: what one changed bit causes.
FIELDS = {
    "size": (0, 4, "record"),
    "magic": (4, 4, "record"),
    "body crc": (8, 4, "checksum"),
    "queue id": (12, 4, ""),
    "queue offset": (20, 8, ""),
    "physical offset": (28, 8, ""),
    "body length": (84, 4, "record"),
    "body": (88, 5, "checksum"),
    "topic length": (93, 1, "record"),
    "topic": (94, 1, ""),
    "properties length": (95, 2, "record"),
    "tags": (97 + 5, 1, ""),
}


@many
@pytest.mark.parametrize("field", FIELDS)
def test_every_bit_of_a_field_that_can_be_known(found: Contents, field: str) -> None:
    begin, length, kind = FIELDS[field]
    data = found[LOG]
    for bit in range(8 * length):
        at = begin + bit // 8
        verdict = judged(found, {(LOG, at): bytes([data[at] ^ 1 << bit % 8])})
        assert not verdict.sound, (field, bit)
        if kind:
            assert (LOG, 0, kind) in places(verdict), (field, bit, verdict.damage)


@pytest.mark.parametrize(("begin", "length"), [(16, 4), (40, 8), (48, 8), (64, 8), (72, 4), (76, 8)])
def test_unknown_values_are_named(found: Contents, begin: int, length: int) -> None:
    """No checksum covers flag, born time, hosts, reconsume times and prepared offset."""
    data = found[LOG]
    for at in range(begin, begin + length):
        verdict = judged(found, {(LOG, at): bytes([data[at] ^ 1])})
        assert verdict.sound
        assert "checksum" in verdict.notes[0]
        assert "user properties" in verdict.notes[0]


@pytest.mark.slow
def test_every_byte_of_queue_and_index(found: Contents) -> None:
    index = next(path for path in found if path.startswith("index/"))
    used = {T: 40, U: 20, index: 40 + 4 * 8 + 20 * 5}
    for path, length in used.items():
        data = found[path]
        for at in [*range(length), len(data) - 1]:
            if path == index and 104 <= at < 108:
                continue  # the first entry's time counts from a file that may be gone
            assert not judged(found, {(path, at): bytes([data[at] ^ 0x10])}).sound, (path, at)


def test_bytes_behind_the_end(found: Contents) -> None:
    data = found[LOG]
    end = len(data.rstrip(b"\0"))
    for at in (end, end + 1, 4000, 4095):
        ((path, place, kind),) = places(judged(found, {(LOG, at): b"\x01"}))
        assert (path, kind) == (LOG, "record" if at < end + 8 else "tail")
        assert end <= place <= at


@pytest.mark.parametrize(("timestamp", "sound"), [(0, True), (START_MS, True), (1 << 60, False)])
@pytest.mark.parametrize("field", [0, 8, 16])
def test_a_checkpoint_later_than_the_last_record(found: Contents, field: int, timestamp: int, sound: bool) -> None:
    data = found["checkpoint"]
    found["checkpoint"] = data[:field] + struct.pack(">q", timestamp) + data[field + 8 :]
    verdict = judged(found)
    assert verdict.sound == sound
    assert places(verdict) == ([] if sound else [("checkpoint", field, "checkpoint")])


def test_a_store_without_a_checkpoint(found: Contents) -> None:
    del found["checkpoint"]
    assert judged(found).sound


def test_a_table_that_no_broker_can_read_is_damage(found: Contents) -> None:
    """A backup takes its place; a broker refuses to start with an unreadable one, and starts empty without any."""
    unreadable = {**found, "config": None, "config/topics.json": b'{"a":'}
    for backup, effect in (({}, "starts without"), ({"config/topics.json.bak": b"{"}, "can't open")):
        verdict = judged({**unreadable, **backup})
        assert [
            damage.kind
            for damage in verdict.damage
            if f"a broker {effect}" in damage.what and "topics.json" in damage.file
        ] == ["config"]
    replaced, unknowable = sorted(judged({**unreadable, "config/topics.json.bak": b"{}"}).notes)
    assert "topics.json.bak was read, as a broker does" in replaced
    assert unknowable == UNKNOWABLE


@pytest.mark.parametrize(
    "gone",
    [T, U, "consumequeue/T/0", "consumequeue/T", "consumequeue", "index", f"consumequeue/{SystemTopic.SCHEDULE}"],
)
def test_missing_requirements_are_named(found: Contents, gone: str) -> None:
    left = {path: data for path, data in found.items() if path != gone and not path.startswith(gone + "/")}
    verdict = judged(left)
    assert not verdict.sound
    assert {kind for _, _, kind in places(verdict)} == {"missing"}


def test_queues_ahead_of_the_log(found: Contents) -> None:
    files = in_memory(found)
    with opened(files) as store:
        store.append(Message("T", b"later", keys="k9"))
    later = contents(files)
    verdict = judged({**later, LOG: found[LOG]})
    assert (T, 40, "ahead") in places(verdict)
    assert any(path.startswith("index/") for path, _, _ in places(verdict))


@pytest.mark.parametrize(
    "name",
    [
        "consumequeue/a:b/x",
        "consumequeue/" + "t" * 128,
        "consumequeue/T/-1",
        "consumequeue/T/00",
        "commitlog/x",
        "index/77",
    ],
)
def test_foreign_folders(found: Contents, name: str) -> None:
    verdict = judged({**found, name: None})
    assert not verdict.sound
    assert {kind for _, _, kind in places(verdict)} == {"name"}


@pytest.mark.parametrize("path", [LOG, T, "index/", "checkpoint"])
@pytest.mark.parametrize("change", [-1, 1, -4096])
def test_files_of_another_length(found: Contents, path: str, change: int) -> None:
    path = next(name for name, data in found.items() if name.startswith(path) and data is not None)
    data = found[path]
    found[path] = data[: len(data) + change] if change < 0 else data + b"\0"
    verdict = verify(ROOT, SMALL, in_memory(found))
    assert not verdict.sound
    assert any(name == path and kind == "size" for name, _, kind in places(verdict))


@pytest.mark.parametrize("left", [0, 20])
def test_a_queue_file_that_lost_its_content_is_one_damage(found: Contents, left: int) -> None:
    data = found[T]
    found[T] = data[:left]
    assert places(verify(ROOT, SMALL, in_memory(found))) == [(T, left, "size")]


def test_an_abort_marker_alone_is_reported_and_sound(found: Contents) -> None:
    verdict = judged({**found, "abort": b""})
    assert verdict.sound
    assert any("abort" in note for note in verdict.notes)


def test_queues_behind_an_active_writer_are_not_damage() -> None:
    files = MemoryFiles()
    store = opened(files)
    store.append(Message("T", b"x", keys="k"))
    verdict = verify(ROOT, SMALL, files)
    assert verdict.sound
    assert any("writing" in note for note in verdict.notes)
    assert store.verify().sound
    files.open(f"{ROOT}/{LOG}", writable=True).buffer[88:89] = b"?"
    assert [damage.kind for damage in verify(ROOT, SMALL, files).damage] == ["checksum"]


@pytest.mark.parametrize("left", [[], ["config/topics.json"], ["consumequeue/T/0/x"]])
def test_folders_that_are_not_stores(left: list[str]) -> None:
    with pytest.raises(NotAStoreError):
        verify(ROOT, SMALL, in_memory(dict.fromkeys(left, b"x")))


def test_an_empty_log_is_sound() -> None:
    assert verify(ROOT, SMALL, in_memory({"commitlog": None})).sound


@pytest.mark.parametrize("earlier", [5, 1])
def test_a_recreated_topic_is_sound(earlier: int) -> None:
    """The log has two generations of queue offsets, the queue only the later one."""
    files = MemoryFiles()
    for turn, count in enumerate((earlier, 3)):
        with opened(files) as store:
            if turn:
                store.queues["T", 0].clear()
            results = [store.append(Message("T", b"%d%d" % (turn, n), keys="k")) for n in range(count)]
            assert [result.queue_offset for result in results] == list(range(count))
    assert verify(ROOT, SMALL, files).sound
    with opened(files, thorough=True) as store:
        assert store.recovered == []
        assert [message.body for message in store.read("T", 0, 0).messages] == [b"10", b"11", b"12"]
        assert len(store.find_by_key("T", "k")) == earlier + 3
    log = {path: data for path, data in contents(files).items() if path.startswith("commitlog/")}
    for path in contents(files):
        if path.startswith("consumequeue/"):
            files.delete(f"{ROOT}/{path}")
    assert not verify(ROOT, SMALL, files).sound
    with opened(files, thorough=True) as store:
        assert [message.body for message in store.read("T", 0, 0).messages] == [b"10", b"11", b"12"]
    assert verify(ROOT, SMALL, files).sound
    assert log.items() <= contents(files).items()


def test_delivery_times_of_a_broker_with_other_delay_levels() -> None:
    """No file of a broker names its levels, so the default ones can be wrong."""
    files = MemoryFiles()
    with opened(files, dataclasses.replace(SMALL, message_delay_level="7s 90m")) as store:
        for level in (1, 2, 2):
            store.append(Message("T", b"later", delay_level=level))
    delayed = {path: data for path, data in contents(files).items() if not path.startswith("librmq/")}
    assert judged(delayed).sound
    first, _ = queues = [f"consumequeue/{SystemTopic.SCHEDULE}/{queue_id}/{0:020d}" for queue_id in (0, 1)]
    crashed = in_memory({**delayed, "abort": b""})
    opened(crashed, None, thorough=True).close()
    assert [contents(crashed)[path] for path in queues] == [delayed[path] for path in queues]
    data = delayed[first]
    entry = struct.Struct(">qiq")
    place, size, due_ms = entry.unpack(data[: entry.size])
    for wrong_ms in (due_ms + 1, due_ms - 8_000):
        changed = judged(delayed, {(first, 0): entry.pack(place, size, wrong_ms)})
        assert places(changed) == [(first, 0, "entry")]


def test_the_first_message_of_a_queue_that_names_another_topic_is_found() -> None:
    """The entry still leads to it. Its flag is right, and it goes back to its queue."""
    files = MemoryFiles()
    bodies = {topic: [f"{topic}{number}".encode() for number in range(4)] for topic in ("TA", "TB")}
    with opened(files) as store:
        for body in bodies["TA"][:2]:
            store.append(Message("TA", body), 0)
        place = store.append(Message("TB", bodies["TB"][0]), 0).physical_offset
        for body in bodies["TB"][1:] + bodies["TA"][2:]:
            store.append(Message(body[:2].decode(), body), 0)
    log = files.open(f"{ROOT}/commitlog/{0:020d}", writable=True).buffer
    at = log.find(b"TB", log.find(b"TB", place) + 1)
    log[at + 1 : at + 2] = b"A"
    (damage,) = verify(ROOT, SMALL, files).damage
    assert damage.what == "topic and queue id: expected TB 0, found TA 0"
    with opened(files, thorough=True) as store:
        assert {topic: [message.body for message in store.messages(topic)] for topic in bodies} == bodies
    assert verify(ROOT, SMALL, files).sound


@pytest.mark.parametrize("flag", [record.TRANSACTION_PREPARED, record.TRANSACTION_ROLLBACK])
@pytest.mark.parametrize("has_all", [True, False], ids=["all files", "log that begins above 0"])
def test_a_flipped_bit_that_gives_a_record_an_entry_is_found(flag: int, has_all: bool) -> None:
    """No queue has an entry of a half or a rolled-back record, whose flag then says that one must have."""
    files = MemoryFiles()
    with MessageStore.open(ROOT, SMALL, files=files, clock=ManualClock(START_MS), background=False) as store:
        for _ in range(30):
            store.append(Message("T", b"x" * 600), 0)
        place = store.append(Message("T", b"no entry"), 0, sys_flag=flag).physical_offset
        store.append(Message("T", b"last"), 0)
        if not has_all:
            store.flush()
            store.writer.retention.delete_before(place - SMALL.commitlog_file_size)
            assert store.log.begin > 0
    assert verify(ROOT, SMALL, files).sound
    at = place % SMALL.commitlog_file_size
    path = f"{ROOT}/commitlog/{place - at:020d}"
    files.open(path, writable=True).buffer[at + record.SYS_FLAG_AT + 3] ^= record.TRANSACTION_PREPARED
    (damage,) = verify(ROOT, SMALL, files).damage
    found = flag & ~record.TRANSACTION_PREPARED
    assert damage.what == f"system flag: expected {flag}, found {found}, of a record that has no queue entry"
    assert damage.offset == place
    with MessageStore.open(ROOT, SMALL, files=files, thorough=True) as store:
        assert [message.body for message in store.messages("T")][-2:] == [b"x" * 600, b"last"]
    assert verify(ROOT, SMALL, files).sound


@many
@LISTS_DESCRIPTORS
@pytest.mark.parametrize("config", [SMALL, SMALL_EXT], ids=["plain", "ext"])
def test_no_file_stays_open(tmp_path: Path, config: StoreConfig) -> None:
    with MessageStore.open(tmp_path / "store", config) as store:
        for number in range(20):
            store.append(Message(f"T{number % 3}", b"x" * 200, keys=f"k{number}"))
    with no_descriptor_left():
        assert verify(str(tmp_path / "store")).sound
