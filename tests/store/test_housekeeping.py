"""Scheduled work of a store: a pure step under a manual clock, and the thread that runs it."""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from librmq.clock import ManualClock, SystemClock
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.errors import CorruptionError, FlushFailedError, StoreError, StoreIOError
from librmq.files._memory import MemoryFiles
from librmq.files.interface import Advice, File
from librmq.runtime._background import Background
from librmq.runtime.event_log import EventLog, StateLog
from librmq.store.engine._durability import GroupCommit, Housekeeping

NOW = 1_700_000_000_000
PAGE = 4096
ENOUGH = 4 * PAGE
MANY = 400
CONFIG = StoreConfig.broker(flush_thorough_interval_s=10)
"""The intervals of a broker's directory."""


class TouchedFiles(MemoryFiles):
    """Files in memory that record which files were prepared."""

    def __init__(self) -> None:
        super().__init__()
        self.touched: list[tuple[str, int, int]] = []
        self.meanwhile: list[Callable[[], object]] = []
        """What others do while a part is prepared, a part each."""
        touched, meanwhile = self.touched, self.meanwhile

        class TouchedFile(File):
            def advise(self, begin: int, end: int, advice: Advice) -> None:
                if advice is Advice.WRITES:
                    touched.append((self.path, begin, end))
                    if meanwhile:
                        meanwhile.pop(0)()

        self._file_type = TouchedFile


def states() -> StateLog:
    return StateLog(EventLog("librmq.store"), "/store")


def io_error(call: str) -> StoreIOError:
    return StoreIOError(call, "/log/0", OSError(errno.EIO, os.strerror(errno.EIO)))


@dataclass
class Subject:
    """Housekeeping over a log in memory; times are seconds since the store was opened."""

    config: StoreConfig = CONFIG
    entries: int = 0
    flushes: list[tuple[float, int]] = field(default_factory=list)
    """Times at which the log was flushed, and up to which position."""
    derived: list[float] = field(default_factory=list)
    """Times at which derived data was flushed."""
    expired: list[float] = field(default_factory=list)
    expire_next: int | None = None
    flush_error: StoreIOError | None = None
    derived_error: StoreError | None = None
    expire_error: StoreError | None = None
    wakes: int = 0
    appended_during_flush: int = 0
    appended_during_expire: int = 0

    def __post_init__(self) -> None:
        self.files = TouchedFiles()
        self.files.make_folder("/log")
        self.log = CommitLog.open("/log", self.config.commitlog_file_size, files=self.files)
        self.clock = ManualClock(NOW)
        self.commit = GroupCommit(self._flush, 0, lambda: None)
        self.step = Housekeeping(
            self.config, self.log, self.commit, self.flush_derived, lambda: self.entries, self._expire, NOW, states()
        )

    @property
    def at(self) -> float:
        return (self.clock.now_ms() - NOW) / 1000

    def _flush(self) -> int:
        end = self.log.end
        if self.appended_during_flush:
            self.append(self.appended_during_flush)
            self.appended_during_flush = 0
        if self.flush_error:
            raise self.flush_error
        self.flushes.append((self.at, end))
        return end

    def flush_derived(self) -> None:
        if self.derived_error:
            raise self.derived_error
        self.entries = 0
        self.commit.reach(self.log.end)
        self.derived.append(self.at)

    def _expire(self, now_ms: int) -> int | None:
        self.expired.append(self.at)
        if self.appended_during_expire:
            self.append(self.appended_during_expire)
            self.appended_during_expire = 0
        if self.expire_error:
            raise self.expire_error
        return None if self.expire_next is None else now_ms + self.expire_next

    def append(self, size: int, entries: int = 1) -> bool:
        """Append this many bytes; return whether the thread must be woken."""
        self.log.claim(size)
        self.log.make_room(size)
        self.log.copy_in(b"x" * size, size)
        self.entries += entries
        woken = self.log.end >= self.step.alarm
        self.wakes += woken
        return woken

    def run(self) -> float | None:
        """Run one step now; return when the next is due."""
        due = self.step.run_due(self.clock.now_ms())
        return None if due is None else (due - NOW) / 1000

    def run_until(self, seconds: float) -> None:
        """Run everything that is due, like a thread that is never woken early."""
        for _ in range(10_000):
            due = self.run()
            if due is None or due > seconds:
                self.clock.move_to(NOW + round(1000 * seconds))
                return
            self.clock.move_to(max(self.clock.now_ms(), NOW + round(1000 * due)))
        raise AssertionError("it does not come to rest")


@pytest.fixture
def subject() -> Subject:
    return Subject()


# ------------------------------------------------------------------------------------------------------------- idle


def test_an_idle_store_has_nothing_due(subject: Subject) -> None:
    assert subject.run() is None
    assert (subject.flushes, subject.derived) == ([], [])
    assert subject.files.list("/log") == [], "a file was made for nothing"


def test_only_the_first_append_to_an_idle_store_wakes(subject: Subject) -> None:
    assert subject.append(100)
    subject.run()
    assert not subject.append(100)
    assert not subject.append(100)
    subject.run_until(100)
    assert subject.append(100)


# -------------------------------------------------------------------------------------------------- flushing the log


@pytest.mark.parametrize(("size", "seconds"), [(ENOUGH - 1, 10), (ENOUGH, 0.5)])
def test_less_is_flushed_after_ten_seconds(subject: Subject, size: int, seconds: float) -> None:
    """Four pages are flushed after half a second."""
    subject.append(size)
    assert subject.run() == seconds
    subject.clock.advance(ms=round(1000 * seconds) - 1)
    assert subject.run() == seconds
    assert subject.flushes == []
    subject.clock.advance(ms=1)
    subject.run()
    assert subject.flushes == [(seconds, size)]


def append_steadily(subject: Subject, every_ms: int) -> list[tuple[float, int]]:
    """Append 8 MiB in 16 parts, and run what they wake; return the flushes of the log."""
    subject.append(ENOUGH)
    subject.run()
    for _ in range(16):
        subject.clock.advance(ms=every_ms)
        if subject.append(1 << 19):
            subject.run()
    return subject.flushes


def test_many_bytes_are_flushed_before_half_a_second(subject: Subject) -> None:
    """A flush of more takes a processor for so long that the other threads of a busy process fall behind."""
    assert append_steadily(subject, 5) == [(0.04, ENOUGH + (4 << 20)), (0.08, ENOUGH + (8 << 20))]


def test_a_very_fast_producer_gets_pages_instead_of_flushes(subject: Subject) -> None:
    assert append_steadily(subject, 1) == []
    subject.run_until(0.5)
    assert subject.flushes == [(0.5, ENOUGH + (8 << 20))]


@pytest.mark.parametrize("size", [1, 100, ENOUGH, 1 << 20])
@pytest.mark.parametrize("before", [0, 0.1, 0.4, 30])
def test_a_store_of_librmq_flushes_within_half_a_second(size: int, before: float) -> None:
    subject = Subject(StoreConfig())
    subject.append(1)
    subject.run_until(before)
    subject.append(size)
    appended_at = subject.at
    subject.run_until(100)
    at = next(at for at, end in subject.flushes if end == 1 + size)
    assert at <= appended_at + 0.5
    flushes = len(subject.flushes)
    assert subject.run() is None, "an idle store has nothing due"
    subject.clock.advance(days=1)
    assert subject.run() is None
    assert len(subject.flushes) == flushes


@pytest.mark.parametrize("last", [1, 100, 1 << 20])
def test_the_append_that_fills_four_pages_wakes_the_flush(subject: Subject, last: int) -> None:
    subject.append(100)
    assert subject.run() == 10
    subject.append(ENOUGH - 100 - 1)
    subject.clock.advance(seconds=2)
    assert subject.wakes == 1
    assert subject.append(last)
    subject.run()
    assert subject.flushes == [(2, ENOUGH - 1 + last)]


def test_under_load_the_log_is_flushed_every_half_second(subject: Subject) -> None:
    for _ in range(100):
        if subject.append(ENOUGH):
            subject.run()
        subject.run_until(subject.at + 0.1)
    assert [at for at, _ in subject.flushes] == [number / 2 for number in range(1, 21)]
    assert subject.wakes <= 20, "one a flush, not one an append"


def test_appends_during_a_flush_need_another(subject: Subject) -> None:
    subject.append(ENOUGH)
    subject.appended_during_flush = 100
    subject.run_until(30)
    assert subject.flushes[0] == (0.5, ENOUGH)
    assert subject.flushes[-1][1] == ENOUGH + 100
    assert subject.commit.flushed == subject.log.end


def test_changes_during_retention_are_not_forgotten(subject: Subject) -> None:
    subject.appended_during_expire = 100  # its append checked the alarm while the alarm was off
    due = subject.run()
    assert subject.wakes == 0
    assert due == subject.at
    subject.run_until(30)
    assert subject.commit.flushed == subject.log.end


def test_exactly_enough_while_the_alarm_is_off_is_flushed_soon() -> None:
    subject = Subject(StoreConfig(flush_least_bytes=100))
    subject.append(60)
    subject.appended_during_expire = 40
    assert subject.run() == 0  # runs immediately, to check that there is enough space now
    subject.run_until(1)
    assert subject.flushes == [(0.5, 100)]


def test_intervals_are_settings() -> None:
    config = StoreConfig(flush_interval_s=2, flush_least_bytes=10, flush_thorough_interval_s=3)
    subject = Subject(config)
    subject.append(9)
    assert subject.run() == 3
    assert subject.append(1)
    assert subject.run() == 2


def test_a_clock_that_is_set_back_delays_no_flush(subject: Subject) -> None:
    subject.append(ENOUGH)
    subject.run_until(1)
    subject.append(ENOUGH)
    hour = 3_600_000
    due = subject.step.run_due(subject.clock.now_ms() - hour)
    assert due is not None
    assert due <= subject.clock.now_ms() - hour + 500
    subject.step.run_due(due)
    assert subject.commit.flushed == subject.log.end


def test_sync_flushes_unawaited_appends_immediately() -> None:
    subject = Subject(StoreConfig(durability="sync"))
    subject.run()
    assert subject.append(100)
    subject.run()
    assert subject.flushes == [(0, 100)]
    subject.appended_during_flush = 50
    assert not subject.append(100), "a waiting caller flushes itself without waking it; the others wake it"
    subject.run()
    subject.run()
    assert subject.flushes == [(0, 100), (0, 200), (0, 250)]


def test_a_caller_that_flushes_again_and_again_keeps_no_thread_busy() -> None:
    """It has always appended when a flush ends, and flushes itself."""
    subject = Subject(StoreConfig(durability="sync"))
    for _ in range(5):
        subject.append(100)
        subject.appended_during_flush = 100
        due = subject.run()
        assert subject.log.end > subject.commit.flushed
        assert due is not None
        assert due > subject.at, "it runs again at once"


def test_after_a_failed_flush_nothing_is_due(subject: Subject, caplog: pytest.LogCaptureFixture) -> None:
    subject.append(ENOUGH, MANY)
    subject.run()
    subject.flush_error = io_error("flush")
    subject.clock.advance(seconds=5)
    assert subject.run() is None
    assert subject.run() is None
    assert subject.derived == []
    with pytest.raises(FlushFailedError):
        subject.commit.check_flushes()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


# --------------------------------------------------------------------------------------------------- derived data


@pytest.mark.parametrize(("entries", "seconds"), [(MANY, 1), (MANY - 1, 60)])
def test_two_pages_of_entries_are_flushed_after_a_second_and_fewer_after_a_minute(
    subject: Subject, entries: int, seconds: int
) -> None:
    subject.append(100, entries)
    subject.run_until(seconds - 0.001)
    assert subject.derived == []
    subject.run_until(seconds)
    subject.run()
    assert subject.derived == [seconds]
    assert subject.commit.flushed == 100, "the log is flushed before"


def test_an_entry_while_the_alarm_is_off_is_not_forgotten(subject: Subject) -> None:
    subject.commit.flushed = 100
    subject.append(100, 0)  # its entry is counted a little later than the record
    counts = iter([0, 1, 1])
    step = Housekeeping(
        CONFIG, subject.log, subject.commit, subject.flush_derived, lambda: next(counts), lambda _: None, NOW, states()
    )
    assert step.run_due(NOW) == NOW
    assert step.run_due(NOW) == NOW + 60_000


@pytest.mark.parametrize("error", [io_error("flush"), CorruptionError("/index/1", 0, "size", "wrong")])
def test_a_failed_flush_of_derived_files_is_retried(
    subject: Subject, caplog: pytest.LogCaptureFixture, error: StoreError
) -> None:
    subject.append(100, MANY)
    subject.derived_error = error
    subject.run_until(1)
    assert str(error) in caplog.text
    assert subject.run() == 2
    subject.derived_error = None
    subject.run_until(2)
    subject.run()
    assert subject.derived == [2]


# ---------------------------------------------------------------------------------------------------------- retention


def test_retention_runs_at_the_start_and_when_it_asks(subject: Subject) -> None:
    subject.expire_next = 3_000
    assert subject.run() == 3
    subject.clock.advance(ms=2_999)
    assert subject.run() == 3
    assert subject.expired == [0]
    subject.clock.advance(ms=1)
    assert subject.run() == 6
    assert subject.expired == [0, 3]


def test_files_that_waited_for_a_flush_of_queues_go_with_it(subject: Subject) -> None:
    subject.expire_next = 45_000
    subject.append(1)
    subject.run_until(50)
    assert subject.expired == [0, 45]
    subject.run_until(60)
    subject.run()
    assert (subject.derived, subject.expired) == ([60], [0, 45, 60])


def test_a_failure_of_retention_is_logged_and_retried(subject: Subject, caplog: pytest.LogCaptureFixture) -> None:
    subject.expire_error = io_error("delete")
    subject.append(ENOUGH)
    assert subject.run() == 0.5
    assert "delete" in caplog.text
    subject.run_until(5)
    assert subject.commit.flushed == ENOUGH, "flushing continues"
    subject.expire_error = None
    subject.run_until(10)
    subject.run()
    assert subject.expired == [0, 10]


# ---------------------------------------------------------------------------------------------------- preparing files


def test_pages_are_prepared_ahead_of_the_producer(subject: Subject) -> None:
    subject.append(100)
    subject.run()
    covered = 100
    for _, begin, end in subject.files.touched:
        assert end - begin <= 256 << 10, "too much at a time"
        assert begin <= covered, "a gap"
        covered = max(covered, end)
    assert covered == 100 + (1 << 20), "little for a store that may write no more"


def test_the_first_append_prepares_more_than_its_own_page(subject: Subject) -> None:
    """The first append to a file prepares some pages, for a store that nothing else prepares."""
    subject.append(100)
    assert [(begin, end) for _, begin, end in subject.files.touched] == [(0, 64 << 10)]


@pytest.mark.slow
@pytest.mark.parametrize(("waiting", "ahead"), [(1 << 20, 2 << 20), (6 << 20, 12 << 20), (100 << 20, 64 << 20)])
def test_more_appends_between_flushes_prepare_more_pages(subject: Subject, waiting: int, ahead: int) -> None:
    subject.append(waiting)
    subject.run()
    assert max(end for _, _, end in subject.files.touched) == waiting + ahead
    _, begin, end = subject.files.touched[0]
    assert end - begin == min(ahead, 32 << 20), "in large parts, because a busy producer lets nothing in"
    assert subject.append(ahead // 2)


def test_a_producer_that_writes_faster_than_pages_are_prepared_gets_large_parts(subject: Subject) -> None:
    """The thread waits for the interpreter after each part; what was written meanwhile needs no preparation."""
    part, written = 256 << 10, 300 << 10
    subject.append(100)
    subject.files.meanwhile += [lambda: subject.append(100), lambda: subject.append(written)]
    subject.run()
    end = 100 + (1 << 20)
    assert [(begin, end) for _, begin, end in subject.files.touched[1:]] == [
        (100, 100 + part), (100 + part, 100 + 2 * part), (100 + 2 * part, end)
    ]  # fmt: skip


def test_a_producer_that_overtakes_the_preparation_is_followed_at_once(subject: Subject) -> None:
    subject.append(100)
    subject.files.meanwhile += [lambda: subject.append(100), lambda: subject.append(600 << 10)]
    assert subject.run() == 0
    assert subject.run() != 0


def test_pages_are_prepared_once(subject: Subject) -> None:
    for _ in range(50):
        if subject.append(64 << 10):
            subject.run()
    touched = sum(end - begin for _, begin, end in subject.files.touched)
    assert touched <= subject.log.end + (4 << 20)


def test_the_producer_wakes_before_unprepared_space(subject: Subject) -> None:
    subject.append(100)
    subject.run()
    while not subject.append(64 << 10):
        pass
    assert subject.log.end < 100 + (4 << 20), "the producer is already beyond it"


def test_the_next_file_is_created_ahead() -> None:
    subject = Subject(StoreConfig(commitlog_file_size=64 << 10, max_message_size=1 << 10))
    subject.append(1000)
    subject.run()
    assert len(subject.log.sequence.starts) == 3, "two ahead"
    subject.append(63_000)
    assert len(subject.log.sequence.starts) == 3
    assert subject.log.end < 65_536
    subject.append(2_000)
    assert 65_536 < subject.log.end < 2 * 65_536
    assert len(subject.log.sequence.starts) == 3


def test_a_failed_preallocation_is_not_a_failure(subject: Subject, caplog: pytest.LogCaptureFixture) -> None:
    def full(file: File, begin: int, end: int) -> None:
        raise io_error("allocate")

    subject.append(ENOUGH)
    subject.files.reserve = full  # type: ignore[method-assign]
    subject.run_until(1)
    assert "preparing room" in caplog.text
    assert subject.commit.flushed == ENOUGH


def test_any_order_of_appends_is_flushed_in_time() -> None:
    """If the step runs whenever it asks to, nothing stays unflushed for more than 10 s."""
    for seed in range(30):
        rng = random.Random(seed)
        subject = Subject(StoreConfig(commitlog_file_size=1 << 20, max_message_size=1 << 12))
        due: float | None = subject.run()
        appended: list[tuple[float, int]] = []
        for _ in range(200):
            if rng.random() < 0.5:
                woken = subject.append(rng.choice([1, 100, 5_000, 100_000]), rng.choice([0, 1, 500]))
                appended.append((subject.at, subject.log.end))
                if woken:
                    due = subject.run()
            else:
                until = subject.at + rng.choice([0.001, 0.2, 1, 30])
                while due is not None and due <= until:
                    subject.clock.move_to(max(subject.clock.now_ms(), NOW + round(1000 * due)))
                    due = subject.run()
                subject.clock.move_to(max(subject.clock.now_ms(), NOW + round(1000 * until)))
            for at, end in appended:
                assert end <= subject.commit.flushed or subject.at - at <= 10, (seed, at, subject.at)
            appended = [(at, end) for at, end in appended if end > subject.commit.flushed]


# -------------------------------------------------------------------------------------------------- the store's thread


class Calls:
    """A step that reports when it runs."""

    def __init__(self, due: int | None = None) -> None:
        self.due = due
        self.ran = threading.Semaphore(0)
        self.error: Exception | None = None

    def __call__(self, now_ms: int) -> int | None:
        self.ran.release()
        return self.due


class WaitingClock(SystemClock):
    """Records each wait, and waits until woken."""

    def __init__(self) -> None:
        self.waits: list[float | None] = []
        self.waiting = threading.Semaphore(0)

    def now_ms(self) -> int:
        return NOW

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        self.waits.append(seconds)
        self.waiting.release()
        return event.wait() if seconds != 0 else event.is_set()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("housekeeping-test")]


@pytest.fixture
def clock() -> Iterator[WaitingClock]:
    yield WaitingClock()
    assert threads() == [], "a thread is left"


def test_a_thread_runs_the_step_when_woken_until_stopped(clock: WaitingClock) -> None:
    step = Calls()
    background = Background(step, clock, "housekeeping-test")
    step.ran.acquire()
    clock.waiting.acquire()
    for _ in range(3):
        background.wake()
        step.ran.acquire()
        clock.waiting.acquire()
    background.stop()
    assert threads() == []
    background.wake()
    background.stop()
    assert not step.ran.acquire(blocking=False)
    assert clock.waits == [None] * 4, "nothing is due: only a wake ends the wait"


@pytest.mark.parametrize(("due", "seconds"), [(NOW + 500, 0.5), (NOW - 5, 0), (NOW, 0)])
def test_a_thread_waits_until_the_step_is_due(clock: WaitingClock, due: int, seconds: float) -> None:
    background = Background(Calls(due), clock, "housekeeping-test")
    clock.waiting.acquire()
    background.stop()
    assert clock.waits[0] == seconds


def test_a_wake_during_the_step_is_not_lost(clock: WaitingClock) -> None:
    runs, background = list[int](), None
    made = threading.Event()

    def step(now_ms: int) -> None:
        made.wait()
        assert background is not None
        if not runs:
            background.wake()
        runs.append(now_ms)

    background = Background(step, clock, "housekeeping-test")
    made.set()
    clock.waiting.acquire()
    clock.waiting.acquire()  # the second run
    background.stop()
    assert len(runs) == 2


def test_a_stop_just_before_the_signal_is_cleared_counts(clock: WaitingClock) -> None:
    background = Background(Calls(), clock, "housekeeping-test")
    clock.waiting.acquire()

    class Slow(threading.Event):
        def clear(self) -> None:
            background._stopping = True  # as `stop` does, between the end of a wait and this call
            self.set()
            super().clear()

    old, background._event = background._event, Slow()
    old.set()
    for thread in threads():
        thread.join()
    assert threads() == []


def test_stopping_waits_for_the_step_that_runs(clock: WaitingClock) -> None:
    inside, go_on = threading.Event(), threading.Event()
    ended = []

    def step(now_ms: int) -> None:
        inside.set()
        go_on.wait()
        ended.append(True)

    background = Background(step, clock, "housekeeping-test")
    inside.wait()
    stopper = threading.Thread(target=background.stop)
    stopper.start()
    assert stopper.is_alive()
    go_on.set()
    stopper.join()
    assert ended == [True]


def test_a_step_may_stop_its_own_thread(clock: WaitingClock) -> None:
    made = threading.Event()

    def step(now_ms: int) -> None:
        made.wait()
        background.stop()

    background = Background(step, clock, "housekeeping-test")
    made.set()
    for thread in threads():
        thread.join()


def test_a_background_thread_keeps_no_process_alive(clock: WaitingClock) -> None:
    background = Background(Calls(), clock, "housekeeping-test")
    assert [thread.daemon for thread in threads()] == [True]
    background.stop()
