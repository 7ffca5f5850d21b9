"""What retention deletes and when, what it keeps, and the state after a crash during it."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest

from librmq.clock import ManualClock
from librmq.config import MIB, StoreConfig
from librmq.consumequeue import ConsumeQueue
from librmq.consumequeue_entries import ENTRY, HOLE_SIZE
from librmq.errors import ConfigError, DiskFullError, StoreIOError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import Files, file_size
from librmq.message.frames import LogItem
from librmq.message.message import Message
from librmq.store import MessageStore
from librmq.store.engine.read import GetStatus
from librmq.store.recovery._verify import verify
from librmq.store.retention import Retention, Unread, UnreadInFile, unread_between
from tests.budget import some
from tests.file_seams import Event, FailingFiles, RecordingFiles
from tests.stores import ROOT, SMALL, apply, configs, contents, died, opened, retained, served

HOUR = 3_600_000
DAY = 24 * HOUR
MIDNIGHT = 1_700_006_400_000  # 2023-11-15 00:00 UTC
FILE = SMALL.commitlog_file_size
BODY = bytes(900)  # a log file holds four records


class Kept:
    """A store whose log files are filled at given times, four records in each."""

    def __init__(
        self,
        times: Sequence[int],
        config: StoreConfig = SMALL,
        files: Files | None = None,
        zone: tzinfo = UTC,
        path: str = ROOT,
        **more: Any,
    ) -> None:
        self.files = files or MemoryFiles()
        self.clock = ManualClock(times[0])
        self.store = MessageStore.open(path, config, files=self.files, clock=self.clock)
        self.append(times)
        self.retention = Retention(retained(self.store, config, **more), timezone=zone)

    def append(self, times: Iterable[int], topics: str = "AB") -> None:
        for number, at in enumerate(times):
            self.clock.move_to(at)
            self.store.append(Message(topics[number % len(topics)], BODY, keys=f"k{number}"))
        self.store.flush()

    def run(self, now_ms: int) -> int | None:
        self.clock.move_to(max(now_ms, self.clock.now_ms()))
        return self.retention.run_due(now_ms)

    @property
    def log_files(self) -> list[int]:
        starts = [int(entry.name) for entry in self.files.list(os.path.join(self.store.path, "commitlog"))]
        assert starts == self.store.log.sequence.starts
        return [start // FILE for start in starts]

    @property
    def deleted(self) -> list[int]:
        """The numbers of the log files that the last run deleted."""
        return [int(os.path.basename(path)) // FILE for path in self.retention.deleted if "/commitlog/" in path]


def by_files(*times: int) -> list[int]:
    """Return times for files of four records, the same time for all records of a file."""
    return [at for at in times for _ in range(4)]


def ratio(kept: Kept, used: float) -> None:
    assert isinstance(kept.files, MemoryFiles)
    kept.files.disk_used_ratio = used


# ------------------------------------------------------------------------------------------------------------ age


@pytest.mark.parametrize("idle", [0, 1, 5 * DAY])
def test_the_last_record_counts_not_the_first_nor_the_next_file(idle: int) -> None:
    """The file's last record was stored two days after its first, and the next file may begin days later."""
    at = MIDNIGHT + 4 * HOUR
    last = at + 2 * DAY
    kept = Kept([at, at, at, last, *by_files(last + idle)])
    due = last + 3 * DAY
    assert kept.run(at + 3 * DAY) == due  # the first record is old enough, the last is not yet
    assert kept.run(due - 1) == due
    assert kept.deleted == []
    kept.run(due)
    assert kept.deleted == [0]


def test_an_old_file_after_a_kept_one_stays() -> None:
    """After the clock was set back, the oldest files are still deleted first, never one from the middle."""
    at = MIDNIGHT + 4 * HOUR
    files = MemoryFiles()
    with MessageStore.open(ROOT, SMALL, files=files, clock=ManualClock(at + 50 * DAY)) as store:
        for _ in range(4):
            store.append(Message("A", BODY))
    with MessageStore.open(ROOT, SMALL, files=files, clock=ManualClock(at)) as store:
        for _ in range(8):
            store.append(Message("A", BODY))
        store.flush()
        retention = Retention(retained(store, SMALL), timezone=UTC)
        assert retention.run_due(at + 10 * DAY) == at + 53 * DAY
        assert retention.deleted == []


def test_file_times_are_never_used(tmp_path: Path) -> None:
    at = MIDNIGHT + 4 * HOUR
    kept = Kept(by_files(at, at + DAY), files=DiskFiles(), path=str(tmp_path / "s"))
    for path in (tmp_path / "s" / "commitlog").iterdir():
        os.utime(path, (1, 1))
    kept.retention.run_due(at + DAY)
    assert kept.log_files == [0, 1]
    kept.store.close()


def test_a_file_is_scanned_only_if_necessary(monkeypatch: pytest.MonkeyPatch) -> None:
    at = MIDNIGHT + 4 * HOUR
    kept = Kept([*by_files(at), at, at, at, at + HOUR, *by_files(at + 2 * HOUR)], replace(SMALL, delete_when="4;5;6"))
    walks: list[int] = []
    scan = kept.store.log.scan

    def watched(begin: int, end: int, *, check_body: bool) -> Iterator[LogItem]:
        walks.append(begin)
        return scan(begin, end, check_body=check_body)

    monkeypatch.setattr(kept.store.log, "scan", watched)
    for minutes in range(0, 120, 10):
        kept.run(at + 72 * HOUR + minutes * 60_000)
        assert kept.log_files == ([1, 2] if minutes < 60 else [2])
    assert walks == [FILE]


def test_a_damaged_record_in_an_old_file_does_not_matter() -> None:
    at = MIDNIGHT + 4 * HOUR
    kept = Kept(by_files(at, at + DAY, at + DAY))
    second = list(kept.store)[1].physical_offset
    kept.store.log.sequence.file(0).buffer[second : second + 8] = bytes(8)
    assert kept.run(at + 3 * DAY) == at + 4 * DAY  # its time is lost: the next file's decides
    assert kept.run(at + 4 * DAY) is not None
    assert kept.deleted == [0]


def test_a_file_of_unknown_age_is_deleted_only_for_space() -> None:
    at = MIDNIGHT + 4 * HOUR
    kept = Kept(by_files(at, at))
    for start in (0, FILE):
        kept.store.log.sequence.file(start).buffer[:8] = bytes(8)
    assert kept.run(at + 1000 * DAY) is None
    assert kept.deleted == []
    ratio(kept, 0.9)
    kept.run(at + 1000 * DAY)
    assert kept.deleted == [0]


@pytest.mark.parametrize("stored", [(1 << 63) - 1, -1, -(1 << 63), 253_402_300_800_000])
def test_an_impossible_time_is_not_an_error(stored: int) -> None:
    at = MIDNIGHT + 4 * HOUR
    kept = Kept(by_files(at, at, at))
    first = kept.store.log.sequence.file(0).buffer
    first[56:64] = stored.to_bytes(8, "big", signed=True)
    due = kept.run(at + DAY)
    assert due is None or at + DAY < due < 253_402_300_800_000


# ------------------------------------------------------------------------------------------------------- the hour


@pytest.mark.parametrize(("minutes", "goes"), [(4 * 60 - 1, False), (4 * 60, True), (5 * 60 - 1, True), (300, False)])
def test_the_hour_lasts_an_hour(minutes: int, goes: bool) -> None:
    kept = Kept(by_files(MIDNIGHT, MIDNIGHT))
    kept.run(MIDNIGHT + 5 * DAY + minutes * 60_000)
    assert kept.deleted == ([0] if goes else [])


class SummerTime(tzinfo):
    """A zone two hours ahead of UTC from ``begin`` to ``end``, and one hour ahead otherwise."""

    def __init__(self, begin: datetime, end: datetime) -> None:
        self.begin, self.end = begin, end

    def fromutc(self, moment: datetime) -> datetime:
        summer = self.begin <= moment.replace(tzinfo=None) < self.end
        return moment + timedelta(hours=2 if summer else 1)

    def utcoffset(self, _: datetime | None) -> timedelta:
        raise AssertionError("not needed")

    dst = utcoffset

    def tzname(self, _: datetime | None) -> str:
        return "summer time"


def utc(day: int, hour: int, minute: int = 0, *, month: int) -> int:
    return int(datetime(2024, month, day, hour, minute, tzinfo=UTC).timestamp()) * 1000


def hours_of(delete_when: str, zone: tzinfo) -> Callable[[int], int | None]:
    return Kept(by_files(MIDNIGHT), replace(SMALL, delete_when=delete_when), zone=zone).retention.next_cleaning_ms


def test_the_hour_of_a_clock_change() -> None:
    """Rules of Berlin in 2024: 02:00 becomes 03:00 on March 31, 03:00 becomes 02:00 on October 27."""
    zone = SummerTime(datetime(2024, 3, 31, 1), datetime(2024, 10, 27, 1))
    at_four, at_two = hours_of("04", zone), hours_of("02", zone)
    assert at_four(utc(30, 4, month=3)) == utc(31, 2, month=3)
    assert at_four(utc(31, 4, month=3)) == utc(1, 2, month=4)
    assert at_two(utc(30, 12, month=3)) == utc(1, 0, month=4)  # 02:00 does not exist on that day
    assert at_four(utc(26, 12, month=10)) == utc(27, 3, month=10)
    assert at_two(utc(26, 12, month=10)) == utc(27, 0, month=10)
    assert at_two(utc(27, 1, 59, month=10)) == utc(27, 1, 59, month=10)  # 02:00 occurs twice on that day
    assert at_two(utc(27, 2, month=10)) == utc(28, 1, month=10)


def test_without_a_timezone_the_hour_is_the_machine_s() -> None:
    kept = Kept(by_files(MIDNIGHT))
    retention = Retention(retained(kept.store, SMALL))
    due = retention.next_cleaning_ms(MIDNIGHT)
    assert due is not None
    assert datetime.fromtimestamp(due // 1000).hour == 4


def test_a_year_passes_in_the_time_of_its_events() -> None:
    kept = Kept(by_files(*(MIDNIGHT + day * DAY for day in range(30))))
    due, rounds, end = kept.run(MIDNIGHT + 30 * DAY), 1, MIDNIGHT + 395 * DAY
    while due is not None and due < end:
        assert due > kept.clock.now_ms()
        due = kept.run(due)
        rounds += 1
    assert kept.log_files == [29]
    assert due is None
    assert rounds < 45


@pytest.mark.parametrize(("used", "goes"), [(0.75, False), (0.751, True)])
def test_above_75_percent_expired_files_are_deleted_anytime(used: float, goes: bool) -> None:
    now = MIDNIGHT + 4 * DAY + 12 * HOUR
    kept = Kept(by_files(MIDNIGHT, now - 72 * HOUR + 1, now))
    ratio(kept, used)
    kept.run(now)
    assert kept.deleted == ([0] if goes else [])
    kept.run(now)
    assert kept.log_files == ([1, 2] if goes else [0, 1, 2])


@pytest.mark.parametrize(("used", "goes"), [(0.85, False), (0.851, True)])
def test_above_85_percent_the_oldest_are_deleted_early(used: float, goes: bool) -> None:
    kept = Kept(by_files(MIDNIGHT, MIDNIGHT, MIDNIGHT))
    ratio(kept, used)
    due = kept.run(MIDNIGHT)
    assert kept.deleted == ([0] if goes else [])
    assert due == MIDNIGHT + (100 if goes else 10_000)


# ------------------------------------------------------------------------------------------------------- the disk


def test_between_two_rounds_nothing_is_deleted() -> None:
    kept = Kept(by_files(*[MIDNIGHT] * 15))
    ratio(kept, 0.86)
    for number in range(10):
        kept.run(MIDNIGHT + 100 * number)
    assert kept.run(MIDNIGHT + 1_000) == MIDNIGHT + 10_000
    assert kept.deleted == []
    assert kept.run(MIDNIGHT - 60_000) == MIDNIGHT - 60_000 + 100  # the clock was set back: no round lasts that long
    assert kept.deleted == [10]


@pytest.mark.parametrize(("used", "refuses"), [(0.0, False), (0.9, False), (0.901, True), (1.0, True)])
def test_above_90_percent_no_message_is_accepted(used: float, refuses: bool) -> None:
    kept = Kept(by_files(MIDNIGHT))
    assert not kept.retention.refuses_writes
    ratio(kept, used)
    due = kept.run(MIDNIGHT)
    assert kept.retention.refuses_writes is refuses
    assert kept.retention.used_ratio == used
    assert due == (MIDNIGHT + 10_000 if used else None)
    assert kept.log_files == [0]
    ratio(kept, 0.5)
    kept.run(MIDNIGHT + 10_000)
    assert not kept.retention.refuses_writes


def test_the_refusal_says_why() -> None:
    kept = Kept(by_files(MIDNIGHT))
    ratio(kept, 0.934)
    kept.run(MIDNIGHT)
    error = kept.retention.refusal()
    assert isinstance(error, DiskFullError)
    assert (
        str(error)
        == "/store: message refused: the disk is 93.4% full, more than 90%: free space, or raise disk_refuse_ratio"
    )


def test_the_ratios_are_settings() -> None:
    config = replace(SMALL, disk_max_used_ratio=10, disk_force_clean_ratio=20, disk_refuse_ratio=30)
    kept = Kept(by_files(*[MIDNIGHT] * 3), config)
    for used, files, refuses in ((0.2, 3, False), (0.21, 2, False), (0.31, 1, True)):
        ratio(kept, used)
        kept.run(MIDNIGHT)
        assert (len(kept.log_files), kept.retention.refuses_writes) == (files, refuses)


def test_a_real_disk_is_measured(tmp_path: Path) -> None:
    assert 0.0 < DiskFiles().used_ratio(str(tmp_path)) <= 1.0
    with pytest.raises(StoreIOError) as caught:
        DiskFiles().used_ratio(str(tmp_path / "none"))
    assert caught.value.filename == str(tmp_path / "none")


# ----------------------------------------------------------------------------------------------------------- size


def test_by_default_a_store_is_bounded_by_size_not_by_age() -> None:
    assert (StoreConfig().max_total_size, StoreConfig().file_reserved_hours) == (4096 * MIB, None)
    kept = Kept(by_files(*[MIDNIGHT] * 4), replace(SMALL, file_reserved_hours=None, max_total_size=2 * FILE))
    assert kept.run(MIDNIGHT + 10**12) is None
    assert kept.log_files == [2, 3]


# ----------------------------------------------------------------------------------------------------- remaining files


def test_the_newest_file_always_stays() -> None:
    config = replace(SMALL, max_total_size=FILE, delete_when="0")
    kept = Kept(by_files(MIDNIGHT), config)
    ratio(kept, 0.99)
    kept.run(MIDNIGHT + 100 * DAY)
    assert kept.retention.expire(MIDNIGHT + 100 * DAY, forced=True) == []
    assert kept.retention.delete_before(1 << 62) == []
    assert kept.log_files == [0]


def test_a_file_created_ahead_does_not_age_its_predecessor() -> None:
    """The file with the last record stays although it is not the last file; otherwise no record would be left."""
    kept = Kept(by_files(MIDNIGHT, MIDNIGHT))
    kept.store.log.sequence.create(2 * FILE)
    kept.run(MIDNIGHT + 4 * HOUR + 5 * DAY)
    assert kept.retention.delete_before(1 << 62) == []
    assert kept.log_files == [1, 2]


def test_a_file_before_an_empty_one_is_the_newest_too() -> None:
    """A power failure that lost the first record of the next file leaves this state."""
    kept = Kept([*by_files(MIDNIGHT), MIDNIGHT])
    kept.store.log.sequence.file(FILE).buffer[:] = bytes(FILE)
    files = died(kept.files)  # type: ignore[arg-type]
    with opened(files) as store:
        assert store.log.end == FILE
        config = replace(SMALL, max_total_size=FILE)
        retention = Retention(retained(store, config))
        assert retention.run_due(MIDNIGHT + 100 * DAY) is None
        assert retention.deleted == []


def test_an_empty_store() -> None:
    kept = Kept(by_files(MIDNIGHT))
    store = MessageStore.open("/other", SMALL, files=kept.files, clock=kept.clock)
    retention = Retention(retained(store, SMALL))
    assert retention.run_due(MIDNIGHT) is None
    assert retention.deleted == []


@configs
def test_queues_and_index_follow(config: StoreConfig) -> None:
    kept = Kept(by_files(*[MIDNIGHT] * 30), config)
    store = kept.store
    before = {key: queue.max_offset for key, queue in store.queues.items()}
    gone = kept.retention.delete_before(20 * FILE + 17)
    assert store.log.begin == 20 * FILE
    assert sum("/commitlog/" in path for path in gone) == 20
    assert sum("/consumequeue/" in path for path in gone) == 2 * 5  # a file holds eight entries
    assert sum("/index/" in path for path in gone) == 2
    assert all(file_size(kept.files, path) is None for path in gone)
    for (topic, queue_id), queue in store.queues.items():
        assert (queue.min_offset, queue.max_offset) == (40, before[topic, queue_id])
        assert store.read(topic, queue_id, 39).status is GetStatus.OFFSET_TOO_SMALL
        assert store.read(topic, queue_id, 40).messages[0].queue_offset == 40
    assert len(served(store)) == 40
    assert store.find_by_key("A", "k0") == []
    assert verify(ROOT, config, kept.files).sound
    store.close()
    assert verify(ROOT, config, kept.files).sound
    assert len(served(opened(kept.files, config))) == 40


@configs
@pytest.mark.parametrize("leave", [MessageStore.close, MessageStore.abandon])
def test_a_queue_whose_messages_are_all_gone_keeps_its_offsets(
    config: StoreConfig, leave: Callable[[MessageStore], None]
) -> None:
    kept = Kept(by_files(MIDNIGHT), config)
    kept.append([MIDNIGHT] * 13, topics="G")  # more than one queue file holds
    kept.append([MIDNIGHT] * 20, topics="A")
    kept.retention.delete_before(1 << 62)
    states = kept.store.queues.states()
    assert [states[topic, 0][:2] for topic in "BG"] == [(2, 2), (13, 13)]
    assert kept.store.read("G", 0, 12).messages == []
    leave(kept.store)
    files = died(kept.files)  # type: ignore[arg-type]
    assert verify(ROOT, config, files).sound
    with opened(files, config) as again:
        assert again.queues.states() == states
        assert again.append(Message("G", b"next")).queue_offset == 13
    assert verify(ROOT, config, files).sound


@pytest.mark.parametrize("on_disk", [False, True])
def test_readers_continue_in_held_files(tmp_path: Path, on_disk: bool) -> None:
    kept = Kept(
        by_files(*[MIDNIGHT] * 4), files=DiskFiles() if on_disk else None, path=str(tmp_path / "s") if on_disk else ROOT
    )
    store = kept.store
    messages = store.read("A", 0, 0).messages
    file = store.log.sequence.file(0)
    walk = iter(store)
    first = next(walk)
    kept.retention.delete_before(1 << 62)
    assert kept.log_files == [3]
    assert [message.body for message in messages] == [BODY] * len(messages)
    assert file.buffer[: len(first.raw)] == first.raw
    places = [message.physical_offset for message in walk]
    assert places[3:] == [message.physical_offset for message in store]  # after the rest of the deleted file
    assert places[:3] == sorted(places[:3])
    assert store.message_at(0) is None
    store.close()


# --------------------------------------------------------------------------------------------------- the contract


def test_manual_expiry_does_not_wait_for_the_hour() -> None:
    now = MIDNIGHT + 4 * DAY + 12 * HOUR
    kept = Kept(by_files(MIDNIGHT, MIDNIGHT, now, now))
    assert kept.retention.expire(now, at_most=0) == []
    assert len(kept.retention.expire(now, at_most=1)) == 1
    kept.retention.expire(now)
    assert kept.log_files == [2, 3]
    kept.retention.expire(now, forced=True)
    assert kept.log_files == [3]


def test_unflushed_files_stay() -> None:
    settled = [2 * FILE]
    config = replace(SMALL, max_total_size=FILE)
    kept = Kept(by_files(*[MIDNIGHT] * 4), config, settled=lambda: settled[0])
    assert kept.run(MIDNIGHT) == MIDNIGHT + 1000
    assert kept.log_files == [1, 2, 3]  # one record below that mark remains
    settled[0] = kept.store.log.end
    assert kept.run(MIDNIGHT + 1000) is None
    assert kept.log_files == [3]


def test_nothing_is_flushed_where_nothing_is_deleted() -> None:
    asked: list[int] = []

    def settled() -> int:
        asked.append(1)
        return 1 << 62

    kept = Kept(by_files(MIDNIGHT, MIDNIGHT), settled=settled)
    kept.run(MIDNIGHT)
    assert asked == []
    kept.run(MIDNIGHT + 4 * DAY + 4 * HOUR)
    assert asked == [1]
    assert kept.deleted == [0]


def test_log_and_queues_are_durable_before_a_deletion() -> None:
    """Without `settled`, retention flushes the log, all queues, each deletion before the next, then derived files."""
    files = RecordingFiles()
    kept = Kept(by_files(*[MIDNIGHT] * 12), files=files)
    kept.append([MIDNIGHT] * 4)
    kept.store.log.sequence.mark_dirty(12 * FILE)
    dirty = kept.store.queues["A", 0]
    dirty.write_again(dirty.max_offset - 1)
    files.trace.clear()
    kept.retention.delete_before(10 * FILE)
    log = f"{ROOT}/commitlog"
    calls = [(event.call, event.path) for event in files.trace]
    first = calls.index(("delete", f"{log}/{0:020d}"))
    assert {call for call, _ in calls[:first]} == {"flush", "flush_folder"}
    assert {path.removeprefix(ROOT).split("/")[1] for _, path in calls[:first]} == {"commitlog", "consumequeue"}
    expected = [
        step for number in range(10) for step in (("delete", f"{log}/{number * FILE:020d}"), ("flush_folder", log))
    ]
    assert calls[first : first + 20] == expected
    derived = calls[first + 20 :]
    assert derived
    assert all(call == "delete" and log not in path for call, path in derived)


class Held:
    """A lock that knows whether it is held."""

    def __init__(self) -> None:
        self.held = False
        self.taken = 0

    def __enter__(self) -> None:
        assert not self.held
        self.held = True
        self.taken += 1

    def __exit__(self, *_: object) -> None:
        self.held = False


def test_the_lock_is_held_for_deleting_and_for_nothing_else() -> None:
    lock = Held()

    class Watched(MemoryFiles):
        def delete(self, path: str) -> None:
            assert lock.held
            super().delete(path)

        def flush_folder(self, path: str) -> None:
            assert not lock.held

        def flush(self, file: Any, begin: int = 0, end: int | None = None) -> None:
            assert not lock.held

    kept = Kept(by_files(*[MIDNIGHT] * 30), files=Watched(), lock=lock)
    kept.retention.delete_before(20 * FILE)
    trims = 2 * (1 + len(kept.store.queues) + 1)  # of two rounds: the list of queues, each queue, the index
    assert lock.taken == 20 + trims  # for each file, and for what is about it


def test_with_producers_and_readers() -> None:
    """Nothing is lost during retention, no reader fails, and the size limit holds."""
    config = replace(SMALL, max_total_size=4 * FILE)
    files = MemoryFiles()
    store = MessageStore.open(ROOT, config, files=files, clock=ManualClock(MIDNIGHT))
    retention = Retention(retained(store, config, store.appender.lock, store.flush))
    producing = threading.Event()

    def produce() -> None:
        try:
            for number in range(1500):
                result = store.append(Message("A", BODY, keys=f"k{number}"))
                assert result.queue_offset == number
        finally:
            producing.set()

    def read() -> None:
        at = 0
        while not producing.is_set() or at < store.queue_range("A", 0)[1]:
            result = store.read("A", 0, at)
            for message in result.messages:
                assert message.queue_offset >= at
            if result.status is GetStatus.NO_MESSAGE_IN_QUEUE:
                continue
            at = result.next_offset

    with ThreadPoolExecutor(2) as pool:
        outcomes = [pool.submit(produce), pool.submit(read)]
        while not producing.is_set():
            retention.run_due(MIDNIGHT)
    for outcome in outcomes:
        outcome.result()
    while retention.run_due(MIDNIGHT) in (MIDNIGHT + 100, MIDNIGHT + 1000):
        pass
    assert len(store.log.sequence.starts) == 4
    assert store.queues["A", 0].max_offset == 1500
    served(store)
    store.close()
    assert verify(ROOT, config, files).sound


# --------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("call", ["used_ratio", "delete", "flush_folder", "flush"])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_failed_call_is_logged_and_retried(call: str, number: int) -> None:
    disk = MemoryFiles()
    files = FailingFiles(disk)
    config = replace(SMALL, max_total_size=2 * FILE)
    kept = Kept(by_files(*[MIDNIGHT] * 12), config, files=files)
    for queue in kept.store.queues.values():
        queue.write_again(queue.max_offset - 1)
    before = files.calls[call]
    files.fail(call, number, 5)
    failures: list[str] = []
    sound: list[bool] = []
    for _ in range(number + 5):
        try:
            kept.run(MIDNIGHT)
        except StoreIOError as error:
            failures.append(error.call)
            sound.append(verify(ROOT, config, died(disk)).sound)
    reached = files.calls[call] - before >= number
    assert failures == ([call] if reached else [])
    assert all(sound)
    assert reached or call == "flush"
    assert kept.log_files == [10, 11]
    assert {queue.min_offset for queue in kept.store.queues.values()} == {20}
    kept.store.close()
    assert verify(ROOT, config, disk).sound


@pytest.mark.parametrize("value", ["", "24", "4;", "4, 5", "-1", "004", "٤"])
def test_what_is_no_hour_of_deletion_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="delete_when"):
        StoreConfig(delete_when=value)


def test_settings_of_a_row_are_taken() -> None:
    row = {
        "file_reserved_hours": 48,
        "delete_when": "04;16",
        "disk_max_used_ratio": 70,
        "disk_force_clean_ratio": 80,
        "disk_refuse_ratio": 95,
    }
    config = StoreConfig.from_row(row)
    assert {name: getattr(config, name) for name in row} == row


# -------------------------------------------------------------------------------------------------------- crashes


def check_image(files: MemoryFiles, config: StoreConfig, offsets: dict[tuple[str, int], int], what: object) -> None:
    """Check before and after opening that the store is sound, complete and writable, and keeps its offsets."""
    verdict = verify(ROOT, config, files)
    assert verdict.sound, (what, verdict.damage)
    with opened(files, config) as store:
        assert {key: queue.max_offset for key, queue in store.queues.items()} == offsets, what
        served(store)
        retention = Retention(retained(store, config))
        retention.run_due(MIDNIGHT)
        begin = store.log.begin
        for path in contents(files):
            assert not path.startswith("commitlog/") or int(path[10:]) >= begin
        for (topic, queue_id), queue in store.queues.items():
            entries = queue.entries(queue.stored_begin)
            files_of_queue = -(-len(entries) // 8)
            gone = int((entries["physical_offset"] < begin).sum())
            assert gone < 8 or files_of_queue == 1, (what, topic, queue_id)  # the opening deletes the rest
            assert store.append(Message(topic, b"more"), queue_id).queue_offset == offsets[topic, queue_id]
    verdict = verify(ROOT, config, files)
    assert verdict.sound, (what, verdict.damage)


def recorded(config: StoreConfig) -> tuple[MemoryFiles, list[Event], dict[tuple[str, int], int]]:
    """Return a store before a retention, the events of that retention, and the offsets that its queues must keep.

    All messages of one queue are in files that are deleted.
    """
    files = RecordingFiles()
    kept = Kept(by_files(MIDNIGHT), config, files=files)
    kept.append([MIDNIGHT] * 9, topics="G")
    kept.append([MIDNIGHT] * 80)
    before = died(files)
    offsets = {key: queue.max_offset for key, queue in kept.store.queues.items()}
    files.trace.clear()
    kept.retention.delete_before(1 << 62)
    return before, list(files.trace), offsets


@pytest.mark.slow
@configs
def test_killed_after_any_single_deletion(config: StoreConfig) -> None:
    replay, trace, offsets = recorded(config)
    deletions = [event for event in trace if event.call == "delete"]
    assert {event.path.split("/")[2] for event in deletions} >= {"commitlog", "consumequeue", "index"}
    check_image(died(replay), config, offsets, "before")
    checked = set(some(range(len(trace))))
    for number, event in enumerate(trace):
        if apply(replay, event) and number in checked:
            check_image(died(replay), config, offsets, (number, event))


@pytest.mark.slow
@configs
def test_power_lost_at_any_moment(config: StoreConfig) -> None:
    """Any unflushed deletions may be lost.

    In the folder of the log each may be lost on its own; in another folder all are lost or none.
    """
    start, trace, offsets = recorded(config)
    images = set[frozenset[int]]()
    moments = some(range(len(trace) + 1))
    for upto in moments:
        unsure: dict[str, list[int]] = {}
        sure: list[int] = []
        for number, event in enumerate(trace[:upto]):
            folder = os.path.dirname(event.path)
            if event.call == "delete":
                unsure.setdefault(folder, []).append(number)
            elif event.call == "flush_folder":
                sure += unsure.pop(event.path, [])
            else:
                sure.append(number)
        choices = []
        for folder, events in unsure.items():
            if folder.endswith("/commitlog"):
                few = {0, 1, len(events) - 1, len(events)}  # each alone, and all but each
                choices.append([c for n in few for c in itertools.combinations(events, n)])
            else:
                choices.append([tuple(events[:n]) for n in {0, len(events)}])
        for chosen in itertools.product(*choices):
            done = [*sure, *itertools.chain(*chosen)]
            if frozenset(done) in images:  # as after a loss of power a moment earlier
                continue
            images.add(frozenset(done))
            image = died(start)
            for number in done:
                apply(image, trace[number])
            check_image(image, config, offsets, (upto, [trace[number] for number in itertools.chain(*chosen)]))
    assert len(images) >= len(moments)


def test_the_first_run_removes_leftovers_of_a_dead_process() -> None:
    kept = Kept(by_files(*[MIDNIGHT] * 30))
    kept.store.log.delete_before(20 * FILE)
    files = died(kept.files)  # type: ignore[arg-type]
    with opened(files) as store:
        retention = Retention(retained(store, SMALL))
        retention.run_due(MIDNIGHT)
        assert {path.split("/")[2] for path in retention.deleted} == {"consumequeue", "index"}
        retention.run_due(MIDNIGHT)
        assert retention.deleted == []


# How retention finds the unconsumed messages of a file.


def test_unread_messages_before_a_hole_are_found() -> None:
    """Recovery fills a lost place of a queue with an entry of position 0, which is not its place in the log."""
    with ConsumeQueue.open("/q", 400, files=MemoryFiles(), writable=True) as queue:
        places = (1000, 100), (0, HOLE_SIZE), (1300, 100)
        queue.append_many(0, b"".join(ENTRY.pack(place, size, 0) for place, size in places))
        reader = Unread("halves", "H", 0, 0, lambda queue_offset: queue_offset != 0)
        found = list(unread_between([reader], lambda name: queue, 1000, 2000))
        assert found == [UnreadInFile(reader, 0, 1)]
