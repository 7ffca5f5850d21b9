"""Locks: what Ctrl-C at any moment leaves of them, and that they do what those of `threading` do."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, TypeAlias

import pytest

from librmq.runtime.locks import Event, Lock, RLock
from tests.programs import run_program

Made: TypeAlias = "Lock | RLock"
BOTH = pytest.mark.parametrize("make", [Lock, RLock])


class Hit(Exception):
    """Raised by the signal's handler."""


@pytest.fixture
def alarm() -> Iterator[None]:
    def hit(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise Hit

    before = signal.signal(signal.SIGALRM, hit)
    yield
    signal.signal(signal.SIGALRM, before)


def take_and_release(lock: Made, seconds: float) -> None:
    # Again and again: Python 3.11 can forget a signal that another thread gets, as long as that thread then waits.
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    while True:
        with lock:
            pass


def is_free(lock: Made) -> bool:
    """Ask in another thread, because a reentrant lock is free for its holder."""
    found: list[bool] = []

    def ask() -> None:
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found[0]


@BOTH
@pytest.mark.platform
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timers that send signals")
def test_no_signal_leaves_it_taken(make: Callable[[], Made], alarm: None) -> None:
    lock = make()
    for number in range(200):
        with pytest.raises(Hit):
            take_and_release(lock, seconds=5e-5 + number * 1e-7)
        assert is_free(lock)


INTERRUPTED_STREAMS = """
import signal, threading
from librmq.wire.grpc._sessions import Commands

class Hit(Exception):
    pass

def hit(number, frame):
    raise Hit

signal.signal(signal.SIGALRM, hit)
for number in range(200):
    commands = Commands()
    try:
        signal.setitimer(signal.ITIMER_REAL, 5e-5 + number * 1e-7)
        while True:
            commands.end_stream()
    except Hit:
        pass
    commands.end_stream()
    reading = threading.Thread(target=list, args=(commands,), daemon=True)
    reading.start()
    reading.join(60)
    assert not reading.is_alive()
"""


@pytest.mark.platform
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timers that send signals")
def test_no_signal_keeps_a_stream_from_its_commands() -> None:
    """Its commands have a condition, whose own ``with`` block a signal can leave locked.

    A program of its own, because a signal can leave a lock of a tool that measures coverage locked too.
    """
    pytest.importorskip("grpc")
    ended = run_program(INTERRUPTED_STREAMS)
    assert (ended.returncode, ended.stderr) == (0, "")


@BOTH
def test_a_block_holds_it(make: Callable[[], Made]) -> None:
    lock = make()
    with suppress(ValueError), lock:
        assert not is_free(lock)
        raise ValueError
    assert is_free(lock)
    assert lock.acquire(timeout=1)
    assert not is_free(lock)
    lock.release()
    assert is_free(lock)


def test_only_a_reentrant_lock_is_taken_twice() -> None:
    lock, reentrant = Lock(), RLock()
    with lock:
        assert lock.locked()
        assert not lock.acquire(blocking=False)
    assert not lock.locked()
    with reentrant, reentrant:
        assert not is_free(reentrant)
    assert is_free(reentrant)


def test_a_condition_frees_a_lock_that_is_taken_twice() -> None:
    lock = RLock()
    condition = threading.Condition(lock)

    def notify() -> None:
        with lock:
            condition.notify()

    thread = threading.Thread(target=notify)
    with lock, lock:
        thread.start()
        assert condition.wait(timeout=60)
    thread.join()
    assert is_free(lock)


def test_a_condition_knows_who_holds_a_reentrant_lock() -> None:
    lock = RLock()
    condition = threading.Condition(lock)
    with lock:
        condition.notify(0)
    with pytest.raises(RuntimeError, match="un-acquired"):
        condition.notify(0)


def test_all_threads_pass_a_set_event_and_none_a_cleared_one() -> None:
    event, passed = Event(), list[bool]()
    threads = [threading.Thread(target=lambda: passed.append(event.wait(60))) for _ in range(5)]
    for thread in threads:
        thread.start()
    event.set()
    for thread in threads:
        thread.join()
    assert passed == [True] * 5
    assert event.is_set()
    assert repr(event).endswith("set>")
    assert event.wait()
    event.set()
    event.clear()
    assert not event.is_set()
    assert not event.wait(0)
    assert not event.wait(0.001)


@pytest.mark.parametrize("work", [Event.set, Event.clear, lambda event: event.wait(0.001)])
@pytest.mark.parametrize("handler", [Event.set, Event.clear, lambda event: event.wait(0.001)])
@pytest.mark.parametrize("is_set", [False, True])
def test_an_event_serves_a_handler_and_other_threads_at_any_line(
    work: Callable[[Event], object], handler: Callable[[Event], object], is_set: bool
) -> None:
    lines, at_line = 0, 0

    def trace(frame: FrameType, kind: str, _: object) -> Any:
        nonlocal lines
        if kind == "line":
            lines += 1
            if lines == at_line:
                sys.settrace(None)
                other = threading.Thread(target=handler, args=(event,))
                other.start()
                other.join()
                handler(event)
        return trace

    while lines >= at_line:
        event, lines, at_line = Event(), 0, at_line + 1
        if is_set:
            event.set()
        before = sys.gettrace()
        sys.settrace(trace)
        work(event)
        sys.settrace(before)
        assert event.wait(0) == event.is_set()
        event.clear()
        assert not event.wait(0)
        event.set()
        assert event.wait(60)
    assert at_line > 1


def test_a_waiting_thread_passes_an_event_that_is_set_at_any_line_of_a_clear_or_cleared_at_once() -> None:
    event, passed = Event(), list[bool]()
    thread = threading.Thread(target=lambda: passed.append(event.wait(60)))
    thread.start()
    while not event._gates:
        pass

    def set_in_between(frame: FrameType, kind: str, _: object) -> Any:
        if kind == "line":
            event.set()
        return set_in_between

    before = sys.gettrace()
    sys.settrace(set_in_between)
    event.clear()
    sys.settrace(before)
    event.clear()
    thread.join()
    assert passed == [True]


def test_an_event_is_set_where_threading_has_another_class_for_events() -> None:
    """gevent puts its own there; a peer of a shared store then waited in `close` for the end of its owner."""
    done = run_program(
        """
        import threading

        class Other:
            def is_set(self):
                return False

        threading.Event = Other
        from librmq.runtime.locks import Event

        event = Event()
        event.set()
        assert event.is_set() and event.wait(0)
        event.clear()
        assert not event.is_set()
        """
    )
    assert not done.returncode, done.stderr
