"""The file written by a clean close saves checks, and is trusted only if the store has not changed since the close."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from librmq.clock import ManualClock
from librmq.errors import CorruptionError, StoreIOError
from librmq.files._memory import MemoryFiles
from librmq.files.interface import file_size
from librmq.message.message import Message
from librmq.runtime.event_log import watched
from librmq.store import MessageStore
from librmq.store.format.broker_tables import BrokerTables
from librmq.store.format.directory import MISSING_LOG
from librmq.store.recovery._verify import verify
from tests.budget import many
from tests.file_seams import FailingFiles
from tests.stores import (
    ROOT,
    SMALL,
    START_MS,
    Contents,
    OpenedFiles,
    contents,
    fill,
    in_memory,
    opened,
    served,
    with_fields,
)

CLOSED = "librmq/closed.json"


def closed(count: int = 200) -> Contents:
    """Return all files of a store that librmq closed."""
    files, clock = MemoryFiles(), ManualClock(START_MS)
    with MessageStore.open(ROOT, SMALL, files=files, clock=clock) as store:
        fill(store, clock, random.Random(5), count)
    return contents(files)


@pytest.mark.slow
@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("count", [50, 800])
def test_opening_maps_a_fixed_number_of_files(count: int, read_only: bool) -> None:
    files = OpenedFiles(in_memory(closed(count)))
    store = opened(files, read_only=read_only)
    log = {path for path in files.paths if path.startswith("commitlog/")}
    assert len(log) <= 2
    assert not [path for path in files.paths if path.startswith("consumequeue")]
    assert len(served(store)) == count
    store.close()


def test_opening_and_closing_again_leaves_the_same() -> None:
    before = closed()
    files = in_memory(before)
    opened(files).close()
    assert contents(files) == before


def test_opening_is_equal_with_and_without_the_file() -> None:
    found = closed()
    with_it, without = in_memory(found), in_memory({name: data for name, data in found.items() if name != CLOSED})
    clock = ManualClock(START_MS + 1000)
    for files in (with_it, without):
        with MessageStore.open(ROOT, SMALL, files=files, clock=clock) as store:
            fill(store, clock, random.Random(9), 30)
            clock = ManualClock(START_MS + 1000)
        assert verify(ROOT, SMALL, files).sound
    # Without the file an opening knows the order of times only from its own records on.
    assert without_times(contents(with_it)) == without_times(contents(without))


def without_times(found: Contents) -> dict[str, Any]:
    """Return the files of a store, without what its last close knew of the order of times."""
    fields = json.loads(found[CLOSED] or b"")
    del fields["crc32"]
    fields.pop("times", None)
    return {**found, CLOSED: fields}


def spoil(files: MemoryFiles, path: str, at: int = 0) -> None:
    buffer = files.open(f"{ROOT}/{path}", writable=True).buffer
    buffer[at : at + 1] = bytes((buffer[at] ^ 1,))


def write_on(files: MemoryFiles) -> None:
    """Use the store and close it, like a writer that ignores the file."""
    kept = files.read(f"{ROOT}/{CLOSED}")
    clock = ManualClock(START_MS + 5000)
    with MessageStore.open(ROOT, SMALL, files=files, clock=clock) as store:
        fill(store, clock, random.Random(2), 20)
    files.write(f"{ROOT}/{CLOSED}", kept)


def write_one_on(files: MemoryFiles) -> None:
    """Append one message, then restore the earlier file except for its queues."""
    kept = files.read(f"{ROOT}/{CLOSED}")
    with MessageStore.open(ROOT, SMALL, files=files, clock=ManualClock(START_MS + 5000)) as store:
        store.append(Message("TopicA", b"one"))
    after = json.loads(files.read(f"{ROOT}/{CLOSED}"))
    files.write(f"{ROOT}/{CLOSED}", with_fields(kept, queues=after["queues"]))


def cut_off(files: MemoryFiles) -> None:
    """Remove the last record, as a recovery by another program might."""
    state = json.loads(files.read(f"{ROOT}/{CLOSED}"))
    start = state["last_record"] - state["last_record"] % SMALL.commitlog_file_size
    buffer = files.open(f"{ROOT}/commitlog/{start:020d}", writable=True).buffer
    at = state["last_record"] - start
    buffer[at:] = bytes(len(buffer) - at)


def lose_index(files: MemoryFiles) -> None:
    files.delete(f"{ROOT}/index")


def lose_queue(files: MemoryFiles) -> None:
    files.delete(f"{ROOT}/consumequeue/TopicA/0")


def lose_oldest(files: MemoryFiles) -> None:
    files.delete(f"{ROOT}/commitlog/{0:020d}")


@pytest.mark.slow
@pytest.mark.parametrize("change", [write_on, write_one_on, cut_off, lose_index, lose_oldest])
def test_it_is_not_believed_after_a_change(change: Callable[[MemoryFiles], None]) -> None:
    files = in_memory(closed())
    change(files)
    unknown = in_memory({name: data for name, data in contents(files).items() if name != CLOSED})
    with opened(files) as store, opened(unknown) as other:
        assert (store.log.begin, store.log.end) == (other.log.begin, other.log.end)
        ends = {name: queue.max_offset for name, queue in store.queues.items()}
        assert ends == {name: queue.max_offset for name, queue in other.queues.items()}
        assert served(store) == served(other)
    assert without_times(contents(files)) == without_times(contents(unknown))


@many
@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b'{"version":2}', b'{"version":1}', b"\xff", b"[" * 100_000,
     b'{"version":1,"log_begin":true,"log_end":0,"last_record":null,"last_record_crc32":0,"index_files":0,'
     b'"index_end":0,"queues":[]}',
     b'{"version":1,"log_begin":0,"log_end":0,"last_record_crc32":0,"index_files":0,"index_end":0,"queues":[]}'],
)  # fmt: skip
def test_rubbish_is_ignored(text: bytes) -> None:
    files = in_memory({**closed(), CLOSED: text})
    with opened(files) as store:
        assert len(served(store)) == 200
    assert json.loads(files.read(f"{ROOT}/{CLOSED}"))["version"] == 1


def test_a_queue_changed_since_closing_is_refused_when_asked() -> None:
    """A queue that differs from its state at the close is refused when it is first used."""
    files = in_memory(closed())
    folder = f"{ROOT}/consumequeue/TopicA/0"
    last = [entry.name for entry in files.list(folder)][-1]
    files.delete(f"{folder}/{last}")
    with opened(files) as store, pytest.raises(CorruptionError, match="run librmq recover"):
        store.read("TopicA", 0, 0)
    with opened(files, thorough=True) as store:
        assert len(served(store)) == 200


def test_a_changed_last_entry_is_named_by_what_differs() -> None:
    """The queue ends at the same offset as at the close, and its last entry leads to a record of another length."""
    files = MemoryFiles()
    with MessageStore.open(ROOT, SMALL, files=files) as store:
        end = store.append(Message("T", b"x")).size
    spoil(files, "consumequeue/T/0/" + "0" * 20, at=11)
    with (
        MessageStore.open(ROOT, SMALL, files=files) as store,
        pytest.raises(
            CorruptionError, match=f"offset 0: .* ends at {end}, as closed, found one that ends at {end ^ 1}"
        ),
    ):
        store.append(Message("T", b"y"))


def test_a_lost_queue_is_rebuilt_however_old() -> None:
    files, clock = MemoryFiles(), ManualClock(START_MS)
    with MessageStore.open(ROOT, SMALL, files=files, clock=clock) as store:
        store.append(Message("Old", b"body"))
        fill(store, clock, random.Random(3), 200)
        assert len(store.log.sequence.starts) > 5
    files.delete(f"{ROOT}/consumequeue/Old")
    with opened(files) as store:
        assert [message.body for message in store.messages("Old")] == [b"body"]
    assert verify(ROOT, SMALL, files).sound


def test_a_rebuild_reads_the_log_once() -> None:
    files, config = MemoryFiles(), replace(SMALL, commitlog_file_size=1 << 16)
    with opened(files, config) as store:
        for number in range(100):
            store.append(Message("TopicA", b"body", keys=str(number)))
    files.delete(f"{ROOT}/consumequeue/TopicA")
    read: list[int] = []
    with watched(lambda done, _: read.append(done)):
        store = opened(files, config)
    assert store.log.end <= sum(read) <= 1 << 16  # whole files or only records
    assert store.queue_range("TopicA", 0) == (0, 100)
    store.close()


def test_a_rebuild_after_a_close_checks_bodies() -> None:
    """As if the queues were there, a damaged body in the last three files of the log is refused."""
    found = {path: data for path, data in closed().items() if not path.startswith(("consumequeue", "index"))}
    with opened(in_memory(found), read_only=True) as store:
        damaged = next(message for message in reversed(list(store)[:-3]) if len(message.body) > 9)
    path = f"commitlog/{damaged.physical_offset - damaged.physical_offset % SMALL.commitlog_file_size:020d}"
    data, at = found[path] or b"", damaged.physical_offset % SMALL.commitlog_file_size + damaged.raw.index(damaged.body)
    files = in_memory(found | {path: data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :]})
    with pytest.raises(CorruptionError, match="checksum") as refused:
        opened(files)
    assert refused.value.offset == damaged.physical_offset
    assert file_size(files, f"{ROOT}/abort") is None
    assert files.read(f"{ROOT}/{path}")[at] != data[at]


def test_after_a_kill_the_file_is_ignored() -> None:
    files = in_memory(closed())
    store = opened(files)
    store.append(Message("TopicA", b"more"))
    died = in_memory(contents(files))
    with opened(died) as again:
        assert len(served(again)) == 201


def test_a_store_on_a_full_disk_still_closes_cleanly() -> None:
    memory = in_memory(closed())
    before = contents(memory)
    for call in ("write", "make_folder"):
        files = FailingFiles(memory)
        store = opened(files)
        files.fail(call)
        store.close()
        assert contents(memory) == {path: data for path, data in before.items() if path != CLOSED}
    with opened(memory) as store:
        assert store.recovered == []
        assert len(served(store)) == 200
    files = FailingFiles(memory)
    store = opened(files)
    files.fail("write", code=errno.EIO)
    with pytest.raises(StoreIOError):
        store.close()
    assert "abort" in contents(memory)


@many
@pytest.mark.parametrize("broker_ran", [False, True])
@pytest.mark.parametrize("openings", [0, 1, 2])
@pytest.mark.parametrize("messages", [0, 1])
def test_a_close_tells_of_lost_first_files_until_a_broker_starts(
    openings: int, messages: int, broker_ran: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker's retention deletes files without a note of librmq; its start writes into the lock file."""
    files, clock = MemoryFiles(), ManualClock(START_MS)
    tables = BrokerTables.open(f"{ROOT}/config", files=files)
    with MessageStore.open(ROOT, SMALL, files=files, clock=clock) as store:
        fill(store, clock, random.Random(3), 60)
    for offset in range(openings):  # each is killed, after it has saved progress
        store = MessageStore.open(ROOT, SMALL, files=files, clock=clock)
        fill(store, clock, random.Random(offset), messages)
        tables.set_consumer_offset("TopicA", "g", 0, offset + 1)
        tables.persist(START_MS)
        store.abandon()
    first, *_ = (entry.name for entry in files.list(f"{ROOT}/commitlog"))
    files.delete(f"{ROOT}/commitlog/{first}")
    if broker_ran:
        files.write(f"{ROOT}/lock", b"lock")
    with MessageStore.open(ROOT, SMALL, files=files, read_only=True) as store:
        assert (store.condition.begin is None) is broker_ran
    kinds = {damage.kind for damage in verify(ROOT, SMALL, files).damage}
    assert (MISSING_LOG in kinds) is not broker_ran
    MessageStore.open(ROOT, SMALL, files=files, clock=clock).abandon()
    assert ("the log lacks a part" in caplog.text) is not broker_ran
    with MessageStore.open(ROOT, SMALL, files=files, read_only=True) as store:
        assert store.condition.begin is None
