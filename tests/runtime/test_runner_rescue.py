"""If no thread can be started, or all are busy or fail, due work is still done and failures are logged."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, Message, Producer, TransactionProducer, TransactionState
from librmq.errors import RmqError
from librmq.runtime.runner import Step, Work
from librmq.runtime.threads import ThreadRunner

WAIT_S = 30
HOUR_MS = 3_600_000
Refusing = Callable[[str], AbstractContextManager[threading.Event]]


class Outcomes:
    """The results of work, and the number of finished pieces."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self.ended = threading.Semaphore(0)

    def __call__(self, result: object, error: Exception | None) -> None:
        self.found.append(error or result)
        self.ended.release()

    def wait(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.ended.acquire(timeout=WAIT_S)


class Busy:
    """A listener that runs until the test lets it end."""

    def __init__(self) -> None:
        self.is_in, self.may = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.is_in.set()
        self.may.wait(WAIT_S)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Refusing:
    """Within ``with refusing("clock") as refused:`` no thread whose name contains that word can be started."""
    start = threading.Thread.start

    @contextmanager
    def refuse(word: str) -> Iterator[threading.Event]:
        refused = threading.Event()

        def start_or_refuse(thread: threading.Thread) -> None:
            if word in thread.name:
                refused.set()
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start_or_refuse)
            yield refused

    return refuse


@pytest.fixture
def runner() -> Iterator[ThreadRunner]:
    runner = ThreadRunner()
    yield runner
    assert runner.shutdown()


@pytest.fixture
def outcomes() -> Outcomes:
    return Outcomes()


@pytest.mark.parametrize("has_clock", [False, True])
@pytest.mark.parametrize("waiting", [0, 1])
def test_steps_continue_while_every_worker_is_in_user_code(waiting: int, has_clock: bool, outcomes: Outcomes) -> None:
    runner = ThreadRunner(max_threads=2 if has_clock else 1)
    busy, stepped = Busy(), threading.Event()
    with runner.lock:
        if has_clock:
            runner.wake(Step("far away", lambda now_ms: None), runner.now_ms() + HOUR_MS)
        runner.submit(Work("blocks", busy, outcomes))
    assert busy.is_in.wait(WAIT_S)
    with runner.lock:
        for _ in range(waiting):
            runner.submit(Work("waits for a worker", lambda: None, outcomes))
        runner.wake(Step("due now", lambda now_ms: stepped.set()))
    try:
        assert stepped.wait(WAIT_S)
    finally:
        busy.may.set()
    assert runner.shutdown()


def test_existing_threads_suffice_without_more(
    runner: ThreadRunner, outcomes: Outcomes, refusing: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    busy = Busy()
    with runner.lock:
        runner.submit(Work("blocks", busy, outcomes))
    assert busy.is_in.wait(WAIT_S)
    with refusing(""):
        with runner.lock:
            runner.submit(Work("waits for a worker", lambda: None, outcomes))
        busy.may.set()
        outcomes.wait(2)
    assert "can't start new thread" in caplog.text


def test_a_first_thread_that_cannot_start_is_retried(
    runner: ThreadRunner, refusing: Refusing, outcomes: Outcomes, caplog: pytest.LogCaptureFixture
) -> None:
    stepped = threading.Semaphore(0)
    with refusing(""), runner.lock:
        for delay_ms in (-1, 0, 1):
            runner.wake(Step("refused", lambda now_ms: stepped.release()), runner.now_ms() + delay_ms)
        runner.submit(Work("refused", lambda: None, outcomes))
    assert caplog.text.count("no thread can be started (can't start new thread)") == 1
    with runner.lock:
        runner.wake(Step("soon", lambda now_ms: stepped.release()), runner.now_ms() + 1)
        runner.wake(Step("now", lambda now_ms: stepped.release()))
    for _ in range(5):
        assert stepped.acquire(timeout=WAIT_S)
    outcomes.wait()


@pytest.mark.parametrize("how", ["plain", "delayed", "transaction"])
def test_a_send_without_a_thread_is_not_failed(how: str, tmp_path: Path, refusing: Refusing) -> None:
    """A message that the broker has written is acknowledged even if the runner can't start a thread."""
    bodies = [b"0", b"1"]
    with refusing(""), Broker.open(tmp_path) as broker:
        for body in bodies:
            message = Message("t", body, delay_level=1 if how == "delayed" else 0)
            if how == "transaction":
                producer = TransactionProducer(broker, "shop", lambda message: TransactionState.COMMIT)
                sent = producer.send_in_transaction(message, execute=lambda message, arg: TransactionState.COMMIT)
                assert sent.state is TransactionState.COMMIT
            else:
                Producer(broker, "shop").send(message)
        stored = [message.body for message in broker.store if message.topic != "RMQ_SYS_TRANS_OP_HALF_TOPIC"]
        assert sorted(stored) == sorted(bodies * (2 if how == "transaction" else 1))


@pytest.mark.parametrize("is_swift", [False, True])
def test_a_worker_replaces_a_missing_clock_thread(
    is_swift: bool, outcomes: Outcomes, refusing: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    runner, stepped = ThreadRunner(max_threads=1), threading.Semaphore(0)

    def run_due(now_ms: int) -> int | None:
        stepped.release()
        return now_ms + 1

    with refusing("clock"):
        with runner.lock:
            runner._is_swift = is_swift
            for _ in range(3):
                runner.submit(Work("work", lambda: None, outcomes))
            runner.wake(Step("again and again", run_due))
        for _ in range(3):
            assert stepped.acquire(timeout=WAIT_S)
        outcomes.wait(3)
        assert runner.shutdown(WAIT_S)
    assert caplog.text.count("so a worker runs the steps") == 1


@pytest.mark.parametrize("due_ms", [-1, 1])
def test_the_clock_thread_continues_without_a_first_worker(
    due_ms: int,
    runner: ThreadRunner,
    outcomes: Outcomes,
    refusing: Refusing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the step is due when it is woken, or a moment later."""
    monkeypatch.setattr("librmq.runtime.threads._START_AGAIN_MS", 1)
    with runner.lock:
        runner.wake(Step("far away", lambda now_ms: None), runner.now_ms() + HOUR_MS)  # starts the clock thread
    with refusing("worker") as refused:
        with runner.lock:
            runner.wake(
                Step("soon", lambda now_ms: runner.submit(Work("the first work", lambda: None, outcomes))),
                runner.now_ms() + due_ms,
            )
        assert refused.wait(WAIT_S)
    outcomes.wait()


def test_the_clock_thread_does_not_replace_the_only_worker(outcomes: Outcomes) -> None:
    runner = ThreadRunner(max_threads=1)
    with runner.lock:
        runner.wake(Step("far away", lambda now_ms: None), runner.now_ms() + HOUR_MS)
        runner.submit(Work("work", lambda: None, outcomes))
    outcomes.wait()
    assert runner.shutdown()


def test_a_coroutine_without_loop_fails_its_listener(runner: ThreadRunner, outcomes: Outcomes) -> None:
    async def listener() -> None:
        raise AssertionError

    loop = asyncio.SelectorEventLoop()
    loop.close()
    loop.is_closed = lambda: False  # type: ignore[method-assign]  # as one that is closed right behind the look at it
    with runner.lock:
        runner.submit(Work("async", listener, outcomes, loop=loop))
    outcomes.wait()
    del loop.is_closed
    assert isinstance(outcomes.found[0], RuntimeError | RmqError)


def test_a_failed_result_of_a_coroutine_is_logged(caplog: pytest.LogCaptureFixture) -> None:
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
    assert runner.shutdown(WAIT_S)  # waits for the line
    assert "fails: its result could not be applied" in caplog.text


def test_a_step_in_the_far_future_delays_nothing(runner: ThreadRunner) -> None:
    asleep, stepped = threading.Event(), threading.Event()
    with runner.lock:
        runner.wake(Step("first", lambda now_ms: asleep.set()), runner.now_ms() + 1)
        runner.wake(Step("in ages", lambda now_ms: None), 1 << 61)  # longer than any system can wait in one call
    assert asleep.wait(WAIT_S)
    with runner.lock:  # the clock thread releases the lock while it sleeps
        runner.wake(Step("soon", lambda now_ms: stepped.set()), runner.now_ms() + 20)
    assert stepped.wait(WAIT_S)


def test_a_loop_without_a_thread_is_recreated(runner: ThreadRunner, outcomes: Outcomes, refusing: Refusing) -> None:
    async def listener() -> int:
        return 5

    with refusing("asyncio"):
        with runner.lock:
            runner.submit(Work("no thread", listener, outcomes))
        outcomes.wait()
    with runner.lock:
        runner.submit(Work("one more", listener, outcomes))
    outcomes.wait()
    assert isinstance(outcomes.found[0], RuntimeError)
    assert outcomes.found[1] == 5
