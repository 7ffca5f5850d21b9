"""Timer files with arbitrary content are used or refused, and no stored message is lost."""

from __future__ import annotations

import gzip
import logging
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from librmq.clock import ManualClock
from librmq.diagnosis.pending import pending_messages
from librmq.errors import CorruptionError, RmqError
from librmq.files import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.message.message import Message
from librmq.scheduling.timer import Timers
from librmq.scheduling.timer_config import TimerConfig
from librmq.store import MessageStore
from librmq.store.format.timerfiles import Slot, TimerCheckpoint, TimerLog, TimerWheel, Unit
from tests.budget import examples
from tests.bytime import put_timed
from tests.stores import ROOT, SMALL, START_MS, Contents, contents, in_memory

WHEEL = TimerConfig(slots_total=80, timer_roll_window_slot=20, timer_log_file_size=400, save_every_s=None)
FILES = ("timerwheel", "timerlog/00000000000000000000", "timerlog/00000000000000000400", "config/timercheck")


def stored() -> Contents:
    files, clock = MemoryFiles(), ManualClock(START_MS)
    with MessageStore.open(ROOT, SMALL, files=files, clock=clock) as store:
        timers = Timers(store, WHEEL)
        for number in range(14):
            message = Message("T", b"%d" % number, unique_key=f"U{number}")
            message.properties["TIMER_DELAY_SEC"] = str(1 + number % 7 * 5)
            put_timed(timers, message)
            timers.run_due(clock.now_ms())
        clock.advance(seconds=8)
        timers.run_due(clock.now_ms())
        timers.save()
    return contents(files)


STORED = stored()

changes = st.lists(
    st.tuples(
        st.sampled_from(FILES),
        st.integers(0, 4095),
        st.one_of(st.binary(min_size=1, max_size=16), st.sampled_from([b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7])),
    ),
    max_size=4,
)


@settings(max_examples=examples(150), deadline=None)
@given(changes=changes, cut=st.sampled_from([None, *FILES]), length=st.integers(0, 500))
def test_any_file_is_refused_or_continued(changes: list[tuple[str, int, bytes]], cut: str | None, length: int) -> None:
    found = dict(STORED)
    for name, at, data in changes:
        before = found[name] or b""
        at %= len(before)
        found[name] = (before[:at] + data + before[at + len(data) :])[: len(before)]
    if cut is not None:
        found[cut] = (found[cut] or b"")[:length]
    clock = ManualClock(START_MS + 9_000)
    with MessageStore.open(ROOT, SMALL, files=in_memory(found), clock=clock) as store:
        logging.disable(logging.CRITICAL)
        try:
            list(TimerWheel.read_slots(ROOT, store.files))
            list(pending_messages(store, kind="timer"))
            timers = Timers(store, WHEEL)
            for _ in range(60):
                due = timers.run_due(clock.now_ms())
                if due is None or due > START_MS + 10**6:
                    break
                clock.move_to(max(due, clock.now_ms()))
            timers.save()
        except RmqError:
            return
        finally:
            logging.disable(logging.NOTSET)
        for message in store:
            if message.topic == "T":
                waited = message.store_timestamp_ms - message.born_timestamp_ms
                assert waited >= 1000 * int(message.properties["TIMER_DELAY_SEC"])


@pytest.mark.parametrize("read_ms", [0, -(1 << 63), (1 << 63) - 1, START_MS - 10**9])
def test_a_read_time_that_cannot_be_loses_nothing(read_ms: int) -> None:
    files, clock = in_memory(STORED), ManualClock(START_MS + 9_000)
    checkpoint = TimerCheckpoint.read(ROOT, files)
    assert checkpoint is not None
    checkpoint.read_time_ms = read_ms
    checkpoint.write(ROOT, files)
    with MessageStore.open(ROOT, SMALL, files=files, clock=clock) as store:
        timers = Timers(store, WHEEL)
        due = timers.run_due(clock.now_ms())
        while due is not None:
            clock.move_to(max(due, clock.now_ms()))
            due = timers.run_due(clock.now_ms())
        assert {int(message.body) for message in store if message.topic == "T"} == set(range(14))


units = st.builds(
    Unit, st.just(52), st.integers(-1, 1 << 40), st.integers(1, 7), st.integers(0, 1 << 50), st.integers(0, 1 << 30),
    st.integers(0, 1 << 50), st.integers(0, 1 << 20), st.integers(-(1 << 31), (1 << 31) - 1), st.integers(0, 9),
)  # fmt: skip


@given(written=st.lists(units, max_size=40), size=st.integers(68, 300))
def test_units_are_read_as_they_were_written(written: list[Unit], size: int) -> None:
    files = MemoryFiles()
    files.make_folder(ROOT)
    log = TimerLog(ROOT, size, files=files)
    positions = [log.append(unit) for unit in written]
    assert [log.unit(position) for position in positions] == written
    found = [(position, item) for position, item in TimerLog(ROOT, size, files=files, writable=False).items()]
    assert [(position, item) for position, item in found if isinstance(item, Unit)] == list(
        zip(positions, written, strict=True)
    )
    ends = [position + (item if isinstance(item, int) else 52) for position, item in found]
    assert [position for position, _ in found] == ([0, *ends[:-1]] if found else [])


def test_the_log_is_read_while_it_is_cut() -> None:
    """A read that began before a file was deleted leaves that file out."""
    log = TimerLog(ROOT, 1024, files=MemoryFiles())
    log.resume(0)
    for number in range(60):
        log.append(Unit(TimerLog.UNIT_SIZE, -1, 1, 1000, 1000, 100 * number, 90, 0, 0))
    reading = log.blocks(log.end)
    next(reading)
    log.trim(1 << 40)
    (position, block), *others = reading
    assert position == log.begin > 1024
    assert not others
    assert int(block["physical_offset"][-1]) == 5900


class Unread(DiskFiles):
    """Files of which none may be read."""

    def read(self, path: str, at: int = 0, size: int | None = None) -> bytes:
        raise AssertionError(path)


def test_a_wheel_that_is_longer_than_any_is_not_read(tmp_path: Path) -> None:
    """It can be a file of 5 GiB with a single block."""
    with (tmp_path / "timerwheel").open("wb") as file:
        file.truncate(5 << 30)
    (wheel,) = TimerWheel.files_in(str(tmp_path), Unread())
    assert wheel.damage is not None
    assert wheel.damage.kind == "size"
    with pytest.raises(CorruptionError, match="up to 1,073,741,824, found 5,368,709,120"):
        list(TimerWheel.read_slots(str(tmp_path), Unread()))


@pytest.mark.parametrize("name", ["timerwheel", "timerwheel.gz"])
def test_used_slots_are_found_far_apart(tmp_path: Path, name: str) -> None:
    used = {0: Slot(7, 0, 52, 2, 0), 40_000: Slot(8, 104, 104, 1, 0), 99_999: Slot(0, 0, 0, 0, 1)}
    data = b"".join(struct.pack(">qqqii", *used.get(number, (0, 0, 0, 0, 0))) for number in range(100_000))
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert dict(TimerWheel.read_slots(str(tmp_path), DiskFiles())) == used
    (wheel,) = TimerWheel.files_in(str(tmp_path), DiskFiles())
    assert wheel.last == 104
