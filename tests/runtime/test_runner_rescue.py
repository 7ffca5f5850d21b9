"""Threads that run out, are all busy or fail at the edges: what is due is taken all the same, and failures are told."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from librmq.errors import RmqError
from librmq.runtime.runner import Step, Work
from librmq.runtime.threads import ThreadRunner

WAIT_S = 30


def ignored(result: object, error: Exception | None) -> None:
    """Ignore the outcome."""


@pytest.mark.parametrize("has_clock", [False, True])
@pytest.mark.parametrize("waiting", [0, 1])
def test_steps_go_on_while_every_worker_is_in_user_code(waiting: int, has_clock: bool) -> None:
    runner = ThreadRunner(max_threads=2 if has_clock else 1)
    is_in, may, stepped = threading.Event(), threading.Event(), threading.Event()

    def listener() -> None:
        is_in.set()
        may.wait(WAIT_S)

    with runner.lock:
        if has_clock:
            runner.wake(Step("far away", lambda now_ms: None), runner.now_ms() + 3_600_000)
        runner.submit(Work("blocks", listener, ignored))
    assert is_in.wait(WAIT_S)
    with runner.lock:
        for _ in range(waiting):
            runner.submit(Work("waits for a worker", lambda: None, ignored))
        runner.wake(Step("due now", lambda now_ms: stepped.set()))
    try:
        assert stepped.wait(WAIT_S)
    finally:
        may.set()
    assert runner.close() == []


def test_without_more_threads_those_that_are_there_do_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the system has no more threads those that are there do it."""
    runner = ThreadRunner()
    is_in, may = threading.Event(), threading.Event()
    ended = threading.Semaphore(0)

    def listener() -> None:
        is_in.set()
        may.wait(WAIT_S)

    def done(result: object, error: Exception | None) -> None:
        ended.release()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with runner.lock:
        runner.submit(Work("blocks", listener, done))
    assert is_in.wait(WAIT_S)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with runner.lock:
        runner.submit(Work("waits for a worker", lambda: None, done))
    may.set()
    for _ in range(2):
        assert ended.acquire(timeout=WAIT_S)
    assert runner.close() == []
    assert "can't start new thread" in caplog.text


def test_a_first_thread_that_cannot_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thread that cannot start is told and tried again."""
    runner = ThreadRunner()
    stepped = threading.Event()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched, runner.lock:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            runner.wake(Step("refused", lambda now_ms: None), runner.now_ms() + 3_600_000)
    with runner.lock:
        runner.wake(Step("soon", lambda now_ms: stepped.set()), runner.now_ms() + 1)
    assert stepped.wait(WAIT_S)
    assert runner.close() == []


@pytest.mark.parametrize("is_swift", [False, True])
def test_without_a_thread_for_the_clock_a_worker_sees_to_it(
    is_swift: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = ThreadRunner(max_threads=1)
    start = threading.Thread.start
    stepped = threading.Semaphore(0)
    ended = threading.Semaphore(0)

    def refuse(thread: threading.Thread) -> None:
        if "clock" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    def run_due(now_ms: int) -> int | None:
        stepped.release()
        return now_ms + 1

    def done(result: object, error: Exception | None) -> None:
        ended.release()

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with runner.lock:
        runner._is_swift = is_swift
        for _ in range(3):
            runner.submit(Work("work", lambda: None, done))
        runner.wake(Step("again and again", run_due))
    for one in (stepped, ended):
        for _ in range(3):
            assert one.acquire(timeout=WAIT_S)
    assert runner.close() == []
    assert caplog.text.count("a worker does what the clock thread would") == 1


def test_the_clock_thread_goes_on_without_a_first_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock thread goes on where the first worker cannot start."""
    monkeypatch.setattr("librmq.runtime.threads._START_AGAIN_MS", 1)
    runner = ThreadRunner()
    start = threading.Thread.start
    refused, may_start, ended = threading.Event(), threading.Event(), threading.Event()

    def refuse(thread: threading.Thread) -> None:
        if "worker" in thread.name and not may_start.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    def run_due(now_ms: int) -> None:
        runner.submit(Work("the first work", lambda: None, lambda result, error: ended.set()))

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with runner.lock:
        runner.wake(Step("soon", run_due), runner.now_ms() + 1)
    assert refused.wait(WAIT_S)
    may_start.set()
    assert ended.wait(WAIT_S)
    assert runner.close() == []
    assert "the first work waits for a thread: can't start new thread" in caplog.text


def test_the_clock_thread_does_not_replace_the_only_worker() -> None:
    """The clock thread does not take the place of the only worker."""
    runner = ThreadRunner(max_threads=1)
    ended = threading.Event()
    with runner.lock:
        runner.wake(Step("far away", lambda now_ms: None), runner.now_ms() + 3_600_000)
        runner.submit(Work("work", lambda: None, lambda result, error: ended.set()))
    assert ended.wait(WAIT_S)
    assert runner.close() == []


def test_a_coroutine_without_loop_fails_its_listener() -> None:
    """A coroutine that finds no loop is a failure of the listener."""
    runner = ThreadRunner()
    outcome: list[tuple[Any, Exception | None]] = []
    ended = threading.Event()

    async def listener() -> None:
        raise AssertionError

    def done(result: object, error: Exception | None) -> None:
        outcome.append((result, error))
        ended.set()

    loop = asyncio.SelectorEventLoop()
    loop.close()
    loop.is_closed = lambda: False  # type: ignore[method-assign]  # as one that is closed right behind the look at it
    with runner.lock:
        runner.submit(Work("async", listener, done, loop=loop))
    assert ended.wait(WAIT_S)
    del loop.is_closed
    assert outcome[0][0] is None
    assert isinstance(outcome[0][1], RuntimeError | RmqError)
    assert runner.close() == []


def test_what_cannot_be_applied_of_a_coroutine_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    runner = ThreadRunner()
    begun = threading.Event()

    async def listener() -> None:
        return None

    def done(result: object, error: Exception | None) -> None:
        begun.set()
        raise ValueError("of the outcome")

    with runner.lock:
        runner.submit(Work("fails", listener, done))
    assert begun.wait(WAIT_S)
    assert runner.close() == []
    assert "fails: what came of it could not be applied" in caplog.text


def test_what_is_due_in_ages_keeps_nothing_else_from_its_time() -> None:
    runner = ThreadRunner()
    asleep, stepped = threading.Event(), threading.Event()
    with runner.lock:
        runner.wake(Step("first", lambda now_ms: asleep.set()), runner.now_ms() + 1)
        runner.wake(Step("in ages", lambda now_ms: None), 1 << 61)  # no system waits for so long at once
    assert asleep.wait(WAIT_S)
    with runner.lock:  # which the clock thread lets go of when it sleeps
        runner.wake(Step("soon", lambda now_ms: stepped.set()), runner.now_ms() + 20)
    assert stepped.wait(WAIT_S)
    assert runner.close() == []


def test_a_loop_whose_thread_cannot_start_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ThreadRunner()
    ended = threading.Semaphore(0)
    outcome: list[Any] = []

    async def listener() -> int:
        return 5

    def done(result: object, error: Exception | None) -> None:
        outcome.append(error or result)
        ended.release()

    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.endswith("asyncio"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with runner.lock:
            runner.submit(Work("no thread", listener, done))
        assert ended.acquire(timeout=WAIT_S)
    with runner.lock:
        runner.submit(Work("one more", listener, done))
    assert ended.acquire(timeout=WAIT_S)
    assert isinstance(outcome[0], RuntimeError)
    assert outcome[1] == 5
    assert runner.close() == []
