"""Running with threads: long backlogs, user code that ends in unusual ways, and forks."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from librmq import Broker, ConsumeFrom, Producer, PushConsumer
from librmq.clock import ManualClock, SystemClock
from librmq.errors import RunnerError
from librmq.runtime.runner import ManualRunner, Step, Work
from librmq.runtime.threads import ThreadRunner
from tests.budget import examples
from tests.programs import in_child
from tests.wire.stub import wait_until


@pytest.fixture
def runner() -> Iterator[ThreadRunner]:
    runner = ThreadRunner()
    yield runner
    assert runner.shutdown()


def run(runner: ThreadRunner, call: Any, **settings: Any) -> tuple[Any, Any]:
    ended = threading.Event()
    outcome: list[tuple[Any, Any]] = []

    def done(result: Any, error: Exception | None) -> None:
        outcome.append((result, error))
        ended.set()

    with runner.lock:
        runner.submit(Work("work", call, done, **settings))
    assert ended.wait(30)
    return outcome[0]


def test_work_gives_its_result_or_its_error(runner: ThreadRunner) -> None:
    assert run(runner, lambda: 5) == (5, None)
    assert isinstance(run(runner, lambda: 1 // 0)[1], ZeroDivisionError)


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_base_exception_is_a_failure_like_any_other(runner: ThreadRunner, raised: type[BaseException]) -> None:
    def listener() -> None:
        raise raised("bye")

    error = run(runner, listener)[1]
    assert isinstance(error, RunnerError)
    assert isinstance(error.__cause__, raised)
    assert run(runner, lambda: "the worker lives") == ("the worker lives", None)


def test_a_coroutine_gives_its_result_or_is_cancelled(runner: ThreadRunner) -> None:
    async def listener() -> int:
        return 5

    async def cancelled() -> None:
        raise asyncio.CancelledError

    assert run(runner, listener) == (5, None)
    assert isinstance(run(runner, cancelled)[1], RunnerError)
    assert not runner.running


def test_other_threads_get_the_lock_beside_endless_steps(runner: ThreadRunner) -> None:
    stop = threading.Event()
    step = Step("always due", lambda now_ms: None if stop.is_set() else now_ms)
    with runner.lock:
        runner.wake(step)
    try:
        assert runner.lock.acquire(timeout=30)
        runner.lock.release()
        assert run(runner, lambda: "work runs too") == ("work runs too", None)
    finally:
        stop.set()


def test_a_step_that_fails_is_logged_and_others_continue(
    runner: ThreadRunner, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(now_ms: int) -> int | None:
        raise ValueError("of the step")

    with runner.lock:
        runner.wake(Step("fails", fails))
    assert run(runner, lambda: 5) == (5, None)
    assert runner.shutdown(60)  # waits for it
    assert "fails: an internal step failed" in caplog.text


def test_an_outcome_that_cannot_be_applied_is_logged(runner: ThreadRunner, caplog: pytest.LogCaptureFixture) -> None:
    """A result that cannot be applied is logged, and the others continue."""

    def done(result: object, error: Exception | None) -> None:
        raise ValueError("of the outcome")

    with runner.lock:
        runner.submit(Work("fails", lambda: None, done))
    assert run(runner, lambda: 5) == (5, None)
    assert runner.shutdown(60)  # waits for it
    assert "fails: its result could not be applied" in caplog.text


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_base_exception_ends_no_thread(
    runner: ThreadRunner, raised: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fails(now_ms: int) -> int | None:
        raise raised("of the step")

    def done(result: object, error: Exception | None) -> None:
        raise raised("of the outcome")

    with runner.lock:
        runner.wake(Step("fails", fails))
        runner.submit(Work("fails too", lambda: None, done))
    assert run(runner, lambda: 5) == (5, None)
    assert runner.shutdown(60)  # waits for both
    assert "fails: an internal step failed" in caplog.text
    assert "fails too: its result could not be applied" in caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_is_not_held_up_by_a_lock_of_the_parent(runner: ThreadRunner) -> None:
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with runner.lock:
            held.set()
            free.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(30)

    def acquire() -> None:
        assert runner.lock.acquire(timeout=20)

    in_child(acquire)
    free.set()
    holder.join()


def test_manual_runner_propagates_a_base_exception() -> None:
    runner = ManualRunner(ManualClock())

    def listener() -> None:
        raise SystemExit("bye")

    runner.submit(Work("work", listener, lambda result, error: None))
    with pytest.raises(SystemExit):
        runner.advance()
    assert not runner.running


def test_manual_runner_runs_steps_at_their_times() -> None:
    runner = ManualRunner(ManualClock(1_000_000))
    seen: list[int] = []

    def run_due(now_ms: int) -> int | None:
        seen.append(now_ms)
        return now_ms + 50 if len(seen) < 3 else None

    runner.wake(Step("step", run_due), 1_000_100)
    runner.advance(99)
    assert seen == []
    runner.advance(10_000)
    assert seen == [1_000_100, 1_000_150, 1_000_200]
    assert runner.now_ms() == 1_010_099
    assert runner.next_due_ms() is None


def test_work_that_waits_for_each_other_runs_at_once(runner: ThreadRunner) -> None:
    together = threading.Barrier(8)
    ended = threading.Semaphore(0)

    def submit(call: Any, count: int) -> None:
        with runner.lock:
            for _ in range(count):
                runner.submit(Work("work", call, lambda result, error: ended.release()))
        for _ in range(count):
            assert ended.acquire(timeout=30)

    submit(lambda: together.wait(30), 8)
    for _ in range(3):
        submit(lambda: None, 2_000)  # fast listeners, which a single worker can run
        submit(lambda: together.wait(30), 8)


def test_fast_work_does_not_wait_for_blocked_work(runner: ThreadRunner) -> None:
    behind = threading.Event()
    ended = threading.Semaphore(0)
    with runner.lock:
        for call in [*[lambda: None] * 2_000, lambda: behind.wait(30), behind.set]:
            runner.submit(Work("work", call, lambda result, error: ended.release()))
    for _ in range(2_002):
        assert ended.acquire(timeout=20)
    assert behind.is_set()


def test_a_worker_that_makes_steps_due_takes_them_itself(runner: ThreadRunner) -> None:
    by: list[str] = []
    ended = threading.Event()

    def run_due(now_ms: int) -> None:
        by.append(threading.current_thread().name)
        ended.set()

    def done(result: object, error: Exception | None) -> None:
        by.append(threading.current_thread().name)
        runner.wake(Step("step", run_due))

    with runner.lock:
        runner.submit(Work("work", lambda: None, done))
    assert ended.wait(30)
    assert len(set(by)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("max_threads", [3, 64])
@pytest.mark.parametrize("seed", range(examples(8)))
def test_no_due_work_is_left(seed: int, max_threads: int) -> None:
    runner = ThreadRunner(max_threads=max_threads)
    ended = threading.Semaphore(0)

    def make(chance: random.Random) -> None:
        at = chance.choice([0, 0, 0, runner.now_ms() + 1, runner.now_ms() + 3])
        work = Work("work", lambda: None, lambda result, error: ended.release())
        match chance.randrange(3):
            case 0:
                runner.submit(work)
            case 1:
                runner.wake(Step("makes work", lambda now_ms: runner.submit(work)), at)
            case 2:
                step = Step("of a listener", lambda now_ms: ended.release())
                runner.submit(Work("wakes", lambda: None, lambda result, error: runner.wake(step, at)))

    def send(number: int) -> None:
        chance = random.Random(10 * seed + number)
        for _ in range(500):
            with runner.lock:
                for _ in range(chance.choice([1, 1, 1, 40])):
                    make(chance)
                    made.release()

    made = threading.Semaphore(0)
    senders = [threading.Thread(target=send, args=(number,)) for number in range(3)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    while made.acquire(blocking=False):
        assert ended.acquire(timeout=30)
    assert runner.shutdown()


def test_runners_have_a_useful_repr() -> None:
    runner = ManualRunner(ManualClock(5))
    assert repr(runner) == "<ManualRunner at 5 ms>"
    assert repr(runner.clock) == "ManualClock(5)"
    threads = ThreadRunner(max_threads=3)
    assert repr(threads) == "<ThreadRunner, open, threads: 0 of 3>"
    threads.shutdown()
    assert "closed" in repr(threads)


class PutBack(SystemClock):
    """A clock that is set back an hour at one of its readings."""

    def __init__(self, reading: int) -> None:
        self.left = reading

    def now_ms(self) -> int:
        self.left -= 1
        return super().now_ms() - (3_600_000 if self.left < 0 else 0)


@pytest.mark.parametrize("reading", range(1, 12))
def test_a_step_runs_whenever_the_clock_is_set_back(reading: int) -> None:
    """The thread that sleeps until the next step reads the clock just when it is set back."""
    runner, has_run = ThreadRunner(PutBack(reading)), threading.Event()

    def run_due(now_ms: int) -> int | None:
        has_run.set()
        return None

    with runner.lock:
        runner.wake(Step("later", run_due), SystemClock().now_ms() + 40)
    assert has_run.wait(20)
    runner.shutdown()


def test_a_worker_is_named_after_its_group() -> None:
    names: dict[str, str] = {}
    ended = threading.Semaphore(0)
    with Broker.temporary() as broker:
        for group in ("billing", "shipping"):
            consumer = PushConsumer(broker, group, consume_from=ConsumeFrom.FIRST)

            def note(_: object, group: str = group) -> None:
                names[group] = threading.current_thread().name
                ended.release()

            consumer.subscribe("orders", note)
            consumer.start()
        Producer(broker, "shop").send("orders", b"one coat")
        for _ in range(2):
            assert ended.acquire(timeout=20)
        wait_until(lambda: not any("Consume" in thread.name for thread in threading.enumerate()), "workers are idle")
        broker.runner.submit(Work("other", lambda: note(None, "other"), lambda result, error: None))
        assert ended.acquire(timeout=20)
    assert {group: name.rpartition("_")[0] for group, name in names.items() if group != "other"} == {
        "billing": "ConsumeMessageThread_billing",
        "shipping": "ConsumeMessageThread_shipping",
    }
    assert names["other"].startswith("librmq-worker-")
