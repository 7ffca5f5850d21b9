"""What `verify` reports about sound and damaged stores, writers and markers; it changes nothing."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import pytest

from librmq.clock import ManualClock
from librmq.config import StoreConfig
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

LOG = f"commitlog/{0:020d}"


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


def test_a_table_that_no_broker_can_read_is_damage() -> None:
    """A backup takes its place; a broker refuses to start with an unreadable one, and starts empty without any."""
    unreadable = {**filled(SMALL, 9), "config": None, "config/topics.json": b'{"a":'}
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
