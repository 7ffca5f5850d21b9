"""Running with threads: long backlogs, user code that ends in unusual ways, and forks."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

import librmq
from librmq.clock import ManualClock, SystemClock
from librmq.errors import FlushFailedError, RmqError, RunnerError
from librmq.runtime import ManualRunner
from librmq.runtime._background import Background
from librmq.runtime.runner import Step, Work
from librmq.runtime.threads import ThreadRunner
from tests.budget import examples
from tests.clocks import Adjusted
from tests.programs import in_child


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


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
@pytest.mark.parametrize("from_task", [False, True])
def test_a_base_exception_of_a_coroutine_is_a_failure_and_others_continue(
    runner: ThreadRunner, raised: type[BaseException], from_task: bool
) -> None:
    async def leaves() -> None:
        raise raised("bye")

    async def listener() -> None:
        await (asyncio.create_task(leaves()) if from_task else leaves())

    async def other() -> int:
        await asyncio.sleep(0)
        return 5

    error = run(runner, listener)[1]
    assert isinstance(error, RunnerError)
    assert isinstance(error.__cause__, raised)
    assert run(runner, other) == (5, None)
    assert not runner.running


@pytest.mark.parametrize("raised", [SystemExit, asyncio.CancelledError])
def test_an_application_s_event_loop_outlives_a_listener(runner: ThreadRunner, raised: type[BaseException]) -> None:
    async def listener() -> None:
        raise raised("bye")

    async def application() -> tuple[Any, Any]:
        return await asyncio.to_thread(run, runner, listener, loop=asyncio.get_running_loop())

    assert isinstance(asyncio.run(application())[1], RunnerError)


def test_a_listener_that_stops_the_event_loop_stops_no_other(runner: ThreadRunner) -> None:
    async def stops() -> None:
        asyncio.get_running_loop().stop()

    async def other() -> int:
        await asyncio.sleep(0)
        return 5

    assert run(runner, stops) == (None, None)
    assert run(runner, other) == (5, None)
    assert runner.shutdown()  # the fixture does it again


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


@pytest.mark.parametrize("raised", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_what_fails_is_logged_and_ends_no_thread(
    runner: ThreadRunner, raised: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """A step that fails, and an outcome that cannot be applied; the others continue."""

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


def test_a_step_of_a_store_that_accepts_nothing_fails_without_a_traceback(
    runner: ThreadRunner, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(now_ms: int) -> int | None:
        raise FlushFailedError(OSError("the disk is gone"))

    with runner.lock:
        runner.wake(Step("delivers", fails))
    assert run(runner, lambda: 5) == (5, None)
    assert runner.shutdown(60)
    assert "delivers fails: a flush has failed (the disk is gone)" in caplog.text
    assert "Traceback" not in caplog.text


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


def test_a_busy_worker_takes_steps_that_are_due_since_the_clock_was_set_forward() -> None:
    """The thread that waits for the next step does not notice it."""
    clock = Adjusted()
    runner, has_run, ended = ThreadRunner(clock), threading.Event(), threading.Semaphore(0)
    with runner.lock:
        runner.submit(Work("starts a worker", lambda: None, lambda result, error: ended.release()))
    assert ended.acquire(timeout=20)
    with runner.lock:
        runner.wake(Step("in a minute", lambda now_ms: has_run.set()), runner.now_ms() + 60_000)
    clock.ahead_ms = 120_000
    with runner.lock:
        runner.submit(Work("keeps the worker busy", lambda: None, lambda result, error: ended.release()))
    assert ended.acquire(timeout=20)
    assert has_run.wait(20)
    runner.shutdown()


HOUR_MS = 3_600_000
JUMPS = {"set back and right": (-HOUR_MS, HOUR_MS), "set forward and right": (HOUR_MS // 2, 0, HOUR_MS)}


class Jumping(Adjusted):
    """A clock that can be set, and says when it was read."""

    def __init__(self) -> None:
        self.has_been_read = threading.Event()

    def now_ms(self) -> int:
        self.has_been_read.set()
        return super().now_ms()

    def jump(self, ahead_ms: int) -> None:
        self.ahead_ms = ahead_ms
        self.has_been_read.clear()
        assert self.has_been_read.wait(20), "the clock is not read again"


def step_an_hour_later(clock: Jumping) -> tuple[Callable[[int], int | None], threading.Event]:
    """Return a step that is due an hour after now, and the event that it has run."""
    due_ms, has_run = clock.now_ms() + HOUR_MS, threading.Event()

    def run_due(now_ms: int) -> int | None:
        if now_ms < due_ms:
            return due_ms
        has_run.set()
        return None

    return run_due, has_run


@pytest.mark.parametrize("jumps", JUMPS.values(), ids=JUMPS)
def test_no_jump_of_the_clock_makes_a_step_late(jumps: tuple[int, ...]) -> None:
    clock = Jumping()
    runner = ThreadRunner(clock)
    run_due, has_run = step_an_hour_later(clock)
    run_in_background, has_run_in_background = step_an_hour_later(clock)
    with runner.lock:
        runner.wake(Step("later", run_due), clock.now_ms() + HOUR_MS)
    background = Background(run_in_background, clock, "test")
    for ahead_ms in jumps:
        clock.jump(ahead_ms)
    assert has_run.wait(20)
    assert has_run_in_background.wait(20)
    background.stop()
    runner.shutdown()


def test_a_due_time_found_while_the_clock_was_ahead_is_not_kept() -> None:
    """A call can wake a step by a time that no thread of the runner has seen."""
    clock = Jumping()
    runner, has_run = ThreadRunner(clock), threading.Event()
    with runner.lock:
        runner.wake(Step("first", lambda now_ms: now_ms + 10 * HOUR_MS))
    clock.jump(0)
    with runner.lock:
        clock.ahead_ms = HOUR_MS
        runner.wake(Step("later", lambda now_ms: has_run.set()), clock.now_ms() + 5_000)
        clock.ahead_ms = 0
    assert has_run.wait(20)
    runner.shutdown()


def test_a_worker_is_named_after_its_group() -> None:
    names: dict[str, str] = {}
    ended = threading.Semaphore(0)
    with librmq.Broker.temporary() as broker:
        for group in ("billing", "shipping"):
            consumer = librmq.PushConsumer(broker, group, consume_from=librmq.ConsumeFrom.FIRST)

            def note(_: object, group: str = group) -> None:
                names[group] = threading.current_thread().name
                ended.release()

            consumer.subscribe("orders", note)
            consumer.start()
        librmq.Producer(broker, "shop").send("orders", b"one coat")
        for _ in range(2):
            assert ended.acquire(timeout=20)
        broker.runner.submit(Work("other", lambda: note(None, "other"), lambda result, error: None))
        assert ended.acquire(timeout=20)
    assert {group: name.rpartition("_")[0] for group, name in names.items() if group != "other"} == {
        "billing": "ConsumeMessageThread_billing",
        "shipping": "ConsumeMessageThread_shipping",
    }
    assert names["other"].startswith("librmq-worker-")


@pytest.mark.parametrize("orderly", [False, True])
def test_the_workers_of_a_group_are_numbered_from_1(orderly: bool) -> None:
    """Whichever threads of the runner they are, and however many other groups had them."""
    names: list[str] = []
    begun, ended = threading.Event(), threading.Event()

    def occupy() -> None:
        begun.set()
        ended.wait(60)

    with librmq.Broker.temporary() as broker, librmq.Producer(broker, "shop") as producer:
        with broker.runner.lock:
            broker.runner.submit(Work("another", occupy, lambda result, error: None))
        assert begun.wait(20)
        for group in ("billing", "shipping", "audit"):
            busy = threading.Barrier(3)

            def note(_: object, busy: threading.Barrier = busy) -> None:
                names.append(threading.current_thread().name)
                busy.wait(20)

            names.clear()
            broker.create_topic(group, 3)
            consumer = librmq.PushConsumer(broker, group, threads=3, orderly=orderly)
            consumer.subscribe(group, note)
            with consumer:
                for queue_id in range(3):
                    producer.send(group, b"one", queue=librmq.MessageQueue(group, "broker-a", queue_id))
                broker.join(20)
            assert sorted(names) == [f"ConsumeMessageThread_{group}_{number}" for number in (1, 2, 3)]
        ended.set()


# If no thread can be started, or all are busy or fail, due work is still done and failures are logged.


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
    runner.shutdown()
    assert "can't start new thread" in caplog.text


def test_a_first_thread_that_cannot_start_is_retried(
    runner: ThreadRunner, refusing: Refusing, outcomes: Outcomes, caplog: pytest.LogCaptureFixture
) -> None:
    stepped = threading.Semaphore(0)
    with refusing(""), runner.lock:
        for delay_ms in (-1, 0, 1):
            runner.wake(Step("refused", lambda now_ms: stepped.release()), runner.now_ms() + delay_ms)
        runner.submit(Work("refused", lambda: None, outcomes))
    runner.call_waiting()  # as a caller does that has released the lock
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
    with refusing(""), librmq.Broker.open(tmp_path) as broker:
        for body in bodies:
            message = librmq.Message("t", body, delay_level=1 if how == "delayed" else 0)
            if how == "transaction":
                producer = librmq.TransactionProducer(broker, "shop", lambda message: librmq.TransactionState.COMMIT)
                sent = producer.send_in_transaction(
                    message, execute=lambda message, arg: librmq.TransactionState.COMMIT
                )
                assert sent.state is librmq.TransactionState.COMMIT
            else:
                librmq.Producer(broker, "shop").send(message)
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
    due_ms: int, runner: ThreadRunner, outcomes: Outcomes, refusing: Refusing, monkeypatch: pytest.MonkeyPatch
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
