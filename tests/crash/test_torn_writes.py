"""A process is killed inside one write of the log: any part of the copied bytes can be there.

The kernel keeps everything that was written before. A C library copies large pieces in an order of its own, often the
first bytes last.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator
from dataclasses import replace

import pytest

from librmq import Broker, ManualRunner, Message, MessageStore, StoreConfig
from librmq.clock import ManualClock
from librmq.cluster import Replica
from librmq.errors import CorruptionError
from librmq.files._memory import MemoryFiles
from librmq.store._snapshots import snapshot
from librmq.store.recovery._verify import verify
from tests.broker.parties import send
from tests.file_seams import SECTOR, CrashImages, Event, RecordingFiles, distinct

STORE = StoreConfig.tiny(commitlog_file_size=4096, max_message_size=3000)


def torn(event: Event) -> Iterator[list[Event]]:
    """Yield what a kill can leave of a write; up to 8 bytes are written by one instruction."""
    data, at = event.data, event.offset
    pieces = [Event("write", event.path, at + begin, data[begin : begin + 32]) for begin in range(0, len(data), 32)]
    yield []
    if len(pieces) > 1:
        yield pieces[1:]
        yield pieces[: len(pieces) // 2]
        yield pieces[len(pieces) // 2 :]
        yield pieces[1::2]


def killed_in(trace: list[Event], number: int) -> Iterator[MemoryFiles]:
    """Yield the files after a kill in the write with that number."""
    moved = tuple(f"{one.path}/" for one in trace[:number] if one.call == "rename")
    created = {one.path for one in trace[:number] if one.call == "create" and not one.path.startswith(moved)}
    settled = [Event("flush", path) for path in created]
    for part in torn(trace[number]):
        before = trace[:number] + part + settled
        yield CrashImages(before).image(0, len(before)).files()


def log_writes(trace: list[Event], begin: int = 0) -> list[int]:
    return [n for n in range(begin, len(trace)) if trace[n].call == "write" and "/commitlog/" in trace[n].path]


@pytest.mark.slow
def test_a_kill_inside_a_write_loses_nothing_else() -> None:
    files, acknowledged = RecordingFiles(), list[tuple[int, bytes]]()
    store = MessageStore.open("/s", STORE, files=files, clock=ManualClock(), background=False)
    for number in range(6):
        bodies = [b"%d/%d," % (number, place) * (1 + 7 * place) for place in range(5)]
        for batch in [bodies[:1], bodies[1:]] if number % 2 else [bodies]:
            store.append_batch([Message("T", body) for body in batch], number % 2)
            acknowledged += [(len(files.trace), body) for body in batch]
    store.abandon()
    for number in log_writes(files.trace):
        expected = [body for at, body in acknowledged if at <= number]
        for image in killed_in(files.trace, number):
            with MessageStore.open("/s", STORE, files=image, clock=ManualClock(), background=False) as opened:
                assert [message.body for message in opened][: len(expected)] == expected
            assert verify("/s", STORE, image).damage == ()


@pytest.mark.slow
@pytest.mark.parametrize("is_at_once", [False, True])
def test_a_kill_inside_a_copy_is_made_up_for(is_at_once: bool) -> None:
    """The copy is made of many records at once, or of each as its send waits."""
    runner, files = ManualRunner(), RecordingFiles()
    with Broker.open("/b", runner=runner, files=MemoryFiles(), store_config=STORE) as master:
        if is_at_once:
            for number in range(20):
                send(master, "T", b"%d," % number * 20)
        with Replica.open("/copy", of=master, files=files) as replica:
            for number in range(20, 30):
                send(master, "T", b"%d," % number * 20)
                assert replica.follow()
        for number in log_writes(files.trace):
            for image in killed_in(files.trace, number):
                with Replica.open("/copy", of=master, files=image) as again:
                    assert again.follow()
                    assert [one.body for one in again.store] == [one.body for one in master.store]
                assert verify("/copy", STORE, image).damage == ()


def beside_a_batch(marked: int = 0) -> tuple[MessageStore, RecordingFiles, int]:
    """Return a store while a batch is copied to the end of its log, its files and that end; all but the head is there.

    The mark states the size of the batch, or ``marked``.
    """
    files = RecordingFiles()
    store = MessageStore.open("/s", STORE, files=files, clock=ManualClock(), background=False)
    store.append(Message("T", b"before"))
    end = store.log.end
    store.append_batch([Message("T", b"%d" % number) for number in range(5)])
    store.flush()
    mark = (marked or store.log.end - end).to_bytes(4, "big") + b"undo"
    files.open(store.log.sequence.path_at(end), writable=True).buffer[end : end + 8] = mark
    return store, files, end


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_mark_that_the_head_has_replaced_in_part_is_cut_with_its_batch(count: int) -> None:
    """A word of memory can end within the eight bytes, and the number that the mark had is lost."""
    store, files, end = beside_a_batch()
    log = files.open(store.log.sequence.path_at(end), writable=True).buffer
    log[end + 4 : end + 8] = (b"\xda\xa3\x20" + b"\xa7")[:count] + b"undo"[count:]
    log[end : end + 4] = (150).to_bytes(4, "big")
    store.abandon()
    with MessageStore.open("/s", STORE, files=files, clock=ManualClock(), background=False) as opened:
        assert [message.body for message in opened] == [b"before"]


@pytest.mark.slow
def test_a_crash_while_a_batch_is_cut_leaves_its_mark_to_the_last() -> None:
    """Without the mark its records would be sound ones behind zeros, which the next recovery refuses to cut."""
    store, files, end = beside_a_batch()
    store.abandon()
    files.flush(files.open(store.log.sequence.path_at(end), writable=True))
    begin = len(files.trace)
    MessageStore.open("/s", STORE, files=files, clock=ManualClock(), background=False).close()
    images = [image for number in log_writes(files.trace, begin) for image in killed_in(files.trace, number)]
    by_power_cut = CrashImages(files.trace)
    crashes = itertools.product(range(begin, len(files.trace)), range(4))
    cut = (by_power_cut.image(f"{crash_point}/{seed}", crash_point) for crash_point, seed in crashes)
    images += [image.files() for image in distinct(cut)]
    for image in images:
        with MessageStore.open("/s", STORE, files=image, clock=ManualClock(), background=False) as opened:
            assert [message.body for message in opened] == [b"before"]
        assert verify("/s", STORE, image).damage == ()


def test_a_batch_being_written_is_no_damage() -> None:
    store, files, end = beside_a_batch()
    try:
        found = verify("/s", STORE, files).damage
        assert [one for one in found if one.file.startswith("/s/commitlog")] == []
        assert snapshot("/s", "/copy", STORE, files=files).end == end
    finally:
        store.abandon()
    with MessageStore.open("/copy", STORE, files=files, background=False) as copy:
        assert [message.body for message in copy] == [b"before"]


@pytest.mark.parametrize("marked", [2**32 - 1, 4096])
def test_a_mark_beyond_its_file_is_damage(marked: int) -> None:
    """No write crosses files, so sound records after such a mark are never cut without a question."""
    store, files, end = beside_a_batch(marked)
    store.abandon()
    with pytest.raises(CorruptionError, match="sound records") as refused:
        MessageStore.open("/s", STORE, files=files, background=False)
    assert refused.value.offset == end


class _SignalledFiles(RecordingFiles):
    """Files in which a signal's handler raises after one write of the log."""

    writes_left = -1

    def _new_buffer(self, path: str, size: int) -> mmap.mmap:
        buffer = super()._new_buffer(path, size)
        if "/commitlog/" in path:
            buffer.record = self._note  # type: ignore[attr-defined]
        return buffer

    def _note(self, event: Event) -> None:
        self.trace.append(event)
        self.writes_left -= 1
        if not self.writes_left:
            raise KeyboardInterrupt


def cut_short(trace: list[Event], path: str) -> Iterator[MemoryFiles]:
    """Yield the files after a power cut: ``path`` is new up to the end of a sector, and older behind it.

    It is not older than at its last flush. The other files are there as a whole.
    """
    whole = [Event("flush", event.path) for event in trace if event.call == "create"]
    image = CrashImages(trace + whole).image(0, len(trace + whole))
    new = image.contents[path]
    assert new is not None
    content, states = bytearray(len(new)), [bytes(len(new))]
    for event in trace:
        if event.path == path and event.call == "write":
            content[event.offset : event.offset + len(event.data)] = event.data
            states.append(bytes(content))
        elif event.path == path and event.call == "flush":
            states = [bytes(content)]
    for old in states:
        for edge in range(SECTOR, len(new), SECTOR):
            yield replace(image, contents={**image.contents, path: new[:edge] + old[edge:]}).files()


@pytest.mark.parametrize("writes", [1, 2])
def test_a_power_cut_after_an_interrupted_batch_leaves_none_of_it(writes: int) -> None:
    files = _SignalledFiles()
    store = MessageStore.open("/s", STORE, files=files, clock=ManualClock(), background=False)
    store.append(Message("T", b"first"))
    store.flush()
    files.writes_left = writes
    with pytest.raises(KeyboardInterrupt):
        store.append_batch([Message("T", b"%d" % number * 50) for number in range(20)])
    store.append(Message("T", b"next" * 300))
    for image in cut_short(files.trace, f"/s/commitlog/{0:020d}"):
        with MessageStore.open("/s", STORE, files=image, clock=ManualClock(), background=False) as opened:
            assert {message.body for message in opened} <= {b"first", b"next" * 300}
