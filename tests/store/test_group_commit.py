"""Group commit: which caller flushes for which others, and what is never acknowledged.

Flushes wait for events instead of time.
"""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from librmq.errors import FlushFailedError, StoreClosedError, StoreIOError
from librmq.store.engine._durability import Acknowledgement, GroupCommit
from tests.interrupting import at_each_call


def no_space() -> StoreIOError:
    return StoreIOError("flush", "/store/commitlog/0", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


class Signals:
    """A semaphore that an exception thrown into a thread can't leave locked, as `threading.Semaphore` can be."""

    def __init__(self) -> None:
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()

    def release(self) -> None:
        self._signals.put(None)

    def acquire(self) -> None:
        self._signals.get()


class Device:
    """A log that grows and whose flushes can be held up. ``flushes`` lists the position that each one reached."""

    def __init__(self) -> None:
        self.end = 0
        self.flushes: list[int] = []
        self.error: BaseException | None = None
        self.held = False
        self.begun = Signals()
        self.go_on = Signals()
        self.failures = 0
        self.commit = GroupCommit(self.flush, 0, self.on_failure)

    def flush(self) -> int:
        end = self.end
        if self.held:
            self.begun.release()
            self.go_on.acquire()
        if self.error is not None:
            raise self.error
        self.flushes.append(end)
        return end

    def on_failure(self) -> None:
        self.failures += 1

    def append(self, size: int = 100) -> int:
        self.end += size
        return self.end


class Waiters:
    """Threads that each wait for a position of the log, and their outcomes."""

    def __init__(self, commit: GroupCommit) -> None:
        self._commit = commit
        self._threads: list[threading.Thread] = []
        self.outcomes: dict[int, object] = {}

    def start(self, physical_offset: int) -> None:
        number = len(self._threads)

        def run() -> None:
            try:
                self._commit.reach(physical_offset)
                self.outcomes[number] = self._commit.flushed
            except Exception as error:
                self.outcomes[number] = error

        thread = threading.Thread(target=run, name=str(number), daemon=True)
        self._threads.append(thread)
        thread.start()

    def throw(self, number: int) -> None:
        """Throw an exception into a thread, as libraries for time limits do."""
        thread_id = ctypes.c_ulong(self._threads[number].ident or 0)
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(TooLateError)) == 1

    def join(self, timeout: float | None = None) -> list[object]:
        for thread in self._threads:
            thread.join(timeout)
            assert not thread.is_alive(), "it waits forever"
        return [self.outcomes[number] for number in range(len(self._threads))]


class TooLateError(Exception):
    """What is thrown into a thread."""


class CountedRow(deque[Any]):
    """A queue of waiters that counts arrivals."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = Signals()

    def append(self, one: Any) -> None:
        super().append(one)
        self.waiting.release()


@pytest.fixture
def device() -> Device:
    return Device()


@contextmanager
def held(device: Device) -> Iterator[tuple[Waiters, CountedRow]]:
    """Start the first flush, for 100 bytes, and hold it up."""
    row = device.commit.waiters = CountedRow()
    device.held = True
    waiters = Waiters(device.commit)
    waiters.start(device.append())
    device.begun.acquire()
    row.waiting.acquire()
    yield waiters, row


def test_flushed_data_is_not_flushed_again(device: Device) -> None:
    device.commit.reach(0)
    assert device.flushes == []
    device.commit.reach(device.append())
    device.commit.reach(50)
    assert device.flushes == [100]


@pytest.fixture
def untraced() -> Iterator[None]:
    """Run untraced: under a tracer CPython 3.11 enters no function while another thread has an exception waiting."""
    own, of_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    yield
    threading.settrace(of_threads)
    sys.settrace(own)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_exception_thrown_into_a_waiter_stops_no_other(device: Device, number: int) -> None:
    with held(device) as (waiters, row):
        for _ in range(3):
            waiters.start(device.append())
            row.waiting.acquire()
        waiters.throw(number)
        device.held = False
        device.go_on.release()
    outcomes = waiters.join(60)
    assert isinstance(outcomes.pop(number), TooLateError)
    assert set(outcomes) <= {100, 400}
    assert outcomes[-1] == 400
    device.commit.reach(device.append())
    assert device.commit.flushed == 500


def test_an_exception_at_the_end_of_a_turn_stops_no_other(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    leave = device.commit.pass_turn
    thrown: list[Exception] = []

    def throw_first(turn: Any) -> None:
        if not thrown:
            thrown.append(TooLateError())
            raise thrown[0]
        leave(turn)

    monkeypatch.setattr(device.commit, "pass_turn", throw_first)
    with pytest.raises(TooLateError):
        device.commit.reach(device.append())
    waiters = Waiters(device.commit)
    waiters.start(device.append())
    assert waiters.join(60) == [200]


def test_no_waiter_returns_before_its_flush(device: Device) -> None:
    with held(device) as (waiters, row):
        waiters.start(device.append())
        row.waiting.acquire()
        assert waiters.outcomes == {}
        device.go_on.release()
        device.begun.acquire()
        assert 1 not in waiters.outcomes
        device.go_on.release()
    waiters.join()


def test_a_failed_flush_fails_current_and_later_waiters(device: Device) -> None:
    with held(device) as (waiters, row):
        for _ in range(5):
            waiters.start(device.append())
        for _ in range(5):
            row.waiting.acquire()
        device.error = no_space()
        device.go_on.release()
    for outcome in waiters.join():
        assert isinstance(outcome, FlushFailedError)
        assert outcome.cause is device.error
        assert "No space left" in str(outcome)
        assert "commitlog" in str(outcome)
    assert device.flushes == []
    assert device.failures == 1
    device.error = None
    device.held = False
    for place in (1, 600, device.append()):
        with pytest.raises(FlushFailedError):
            device.commit.reach(place)
    assert device.flushes == [], "flushed again: the kernel may call it good"
    assert device.failures == 1


def test_earlier_flushes_outlast_a_failed_one(device: Device) -> None:
    device.commit.reach(device.append())
    device.error = no_space()
    with pytest.raises(FlushFailedError):
        device.commit.reach(device.append())
    device.commit.reach(100)
    with pytest.raises(FlushFailedError) as raised:
        device.commit.check_flushes()
    assert raised.value.__cause__ is device.commit.failure is device.error


def test_no_waiter_is_woken_before_its_turn(device: Device) -> None:
    """A waiter whose data is flushed continues and wakes the next; later callers queue behind them."""
    turns: list[int] = []
    commit = device.commit
    leave = commit.pass_turn

    def note(turn: Any) -> None:
        turns.append(int(threading.current_thread().name))
        leave(turn)

    commit.pass_turn = note  # type: ignore[method-assign]
    with held(device) as (waiters, row):
        for _ in range(20):
            waiters.start(device.append())
            row.waiting.acquire()
        device.held = False
        device.go_on.release()
    waiters.join()
    assert turns == list(range(21))
    assert device.flushes == [100, 2100]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_an_interrupted_leader_passes_the_flush_to_another(device: Device, error: BaseException) -> None:
    device.error = error
    place = device.append()
    with pytest.raises(type(error)):
        device.commit.reach(place)
    assert device.commit.flushed == 0
    device.error = None
    device.commit.reach(place)
    assert device.flushes == [100]


def test_the_watermark_never_goes_back(device: Device) -> None:
    commit = GroupCommit(lambda: 50, 100, device.on_failure)
    commit.reach(120)
    assert commit.flushed == 100


# ------------------------------------------------------------------------------------------------------ pipelined


def test_an_acknowledgement_completes_with_the_watermark(device: Device) -> None:
    acknowledgements = [Acknowledgement(number, device.commit, device.append()) for number in range(5)]
    assert not any(one.done for one in acknowledgements)
    assert acknowledgements[2].result == 2
    device.end = 300  # a flush that began when the log had this length
    device.commit.reach(300)
    device.end = 500
    assert [one.done for one in acknowledgements] == [True, True, True, False, False]
    assert [one.wait() for one in acknowledgements] == [0, 1, 2, 3, 4]
    assert device.flushes == [300, 500]


def test_acknowledgements_come_in_the_order_of_the_appends(device: Device) -> None:
    acknowledgements = [Acknowledgement(number, device.commit, device.append()) for number in range(50)]
    for end in (0, 100, 150, 2000, 4999, 5000):
        device.end = end
        if end:
            device.commit.reach(end)
        done = [one.done for one in acknowledgements]
        assert done == sorted(done, reverse=True)
        assert done.count(True) == device.commit.flushed // 100


def test_an_acknowledgement_is_not_given_after_a_failure(device: Device) -> None:
    first = Acknowledgement("first", device.commit, device.append())
    assert first.wait() == "first"
    device.error = no_space()
    later = [Acknowledgement(number, device.commit, device.append()) for number in range(3)]
    for one in later:
        with pytest.raises(FlushFailedError):
            one.wait()
        assert not one.done
    assert first.done
    assert first.wait() == "first"


# ---------------------------------------------------------------------------------------------------------- release


def test_nothing_is_acknowledged_once_the_log_is_released(device: Device) -> None:
    device.commit.reach(device.append())
    late = Acknowledgement("late", device.commit, device.append())
    device.commit.stop_flushes("the log was let go")
    device.commit.reach(100)
    with pytest.raises(StoreClosedError, match="the log was let go"):
        late.wait()
    assert device.flushes == [100]


def test_letting_go_waits_for_the_flush_that_runs(device: Device) -> None:
    with held(device) as (waiters, row):
        stopped = threading.Thread(target=device.commit.stop_flushes, args=("let go",))
        stopped.start()
        row.waiting.acquire()
        assert stopped.is_alive()
        device.go_on.release()
        stopped.join()
    assert waiters.join() == [100], "flushed messages stay flushed"


@pytest.mark.parametrize("let_go", [GroupCommit.stop_flushes, GroupCommit.stop_after_fork])
def test_waiters_get_an_error_when_the_log_is_released(
    device: Device, let_go: Callable[[GroupCommit, str], Any]
) -> None:
    with held(device) as (waiters, row):
        waiters.start(device.append())
        row.waiting.acquire()
        device.commit._stopped = "let go"
        device.go_on.release()
    first, second = waiters.join()
    assert first == 100
    assert isinstance(second, StoreClosedError)
    let_go(device.commit, "again")


def test_an_interrupted_wait_holds_no_other_up(device: Device) -> None:
    for _ in at_each_call(lambda: device.commit.reach(device.append())):
        waiters = Waiters(device.commit)
        waiters.start(device.append())
        assert waiters.join(timeout=30) == [device.end]
