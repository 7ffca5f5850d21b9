"""Ctrl-C in the main thread, at any place of what makes something due: whatever comes next runs all the same."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from librmq.broker import Broker
from librmq.broker.arrivals import Arrivals
from librmq.broker.long_polling import Holds
from librmq.broker.offsets import GroupOffsets
from librmq.broker.persistence import Saving, Writing
from librmq.consumer import PullConsumer, PushConsumer
from librmq.files.disk import DiskFiles
from librmq.files.memory import MemoryFiles
from librmq.files.rolling import MappedFileQueue, MappingPool
from librmq.message.message import Message, StoredMessage
from librmq.protocol import LOCAL_HOST, SendMessage, UpdateOffset
from librmq.runtime.runner import Runner, Step, Work
from librmq.runtime.threads import ThreadRunner, _let_go
from tests.interrupting import at_each_call, interruptions

WAIT_S = 30
ALL = (
    Runner.wake,
    Runner.submit,
    ThreadRunner._signal,
    ThreadRunner._signal_clock,
    ThreadRunner._rouse,
    ThreadRunner._start_worker,
    ThreadRunner._start,
    _let_go,
)


class Parked(list[threading.Lock]):
    """Tells of each worker that parks."""

    def __init__(self) -> None:
        super().__init__()
        self.parks = threading.Semaphore(0)

    def append(self, turn: threading.Lock) -> None:
        super().append(turn)
        self.parks.release()


@contextmanager
def idle(workers: int) -> Iterator[ThreadRunner]:
    """A runner with so many workers, all of them parked, and in the end too."""
    runner = ThreadRunner()
    parked = runner._parked = Parked()
    together = threading.Barrier(max(1, workers))
    with runner.lock:
        for _ in range(workers):
            runner.submit(Work("work", lambda: together.wait(WAIT_S), lambda result, error: None))
    while len(parked) < workers:
        assert parked.parks.acquire(timeout=WAIT_S)
    yield runner
    while True:
        with runner.lock:
            workers = sum("worker" in thread.name and thread.is_alive() for thread in runner._threads)
            if len(parked) == workers and not runner._is_roused:
                break
        assert parked.parks.acquire(timeout=WAIT_S), "a worker is gone"
    assert runner._looking == 0
    assert runner.close() == []


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("in_ms", [None, 1])
def test_a_step_that_is_woken_again_runs(workers: int, in_ms: int | None) -> None:
    def wake(number: int) -> None:
        with idle(workers) as runner:
            ran = threading.Event()
            step = Step("step", lambda now_ms: ran.set())
            at = 0 if in_ms is None else runner.now_ms() + in_ms
            with suppress(KeyboardInterrupt), runner.lock:
                runner.wake(step, at)
            sys.settrace(None)
            with runner.lock:
                runner.wake(step, at)
            assert ran.wait(WAIT_S)

    assert interruptions(ALL, wake) >= 5


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_step_that_was_due_is_not_forgotten_over_another(workers: int) -> None:
    """Either it was not woken at all, or it runs: nobody has to wake it twice once it counts as due."""

    def wake(number: int) -> None:
        with idle(workers) as runner:
            ran = threading.Event()
            step = Step("step", lambda now_ms: ran.set())
            with suppress(KeyboardInterrupt), runner.lock:
                runner.wake(step)
            sys.settrace(None)
            with runner.lock:
                is_due = step.at is not None
            assert not is_due or ran.wait(WAIT_S)

    assert interruptions(ALL, wake) >= 5


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_work_that_was_submitted_runs_and_so_does_what_follows(workers: int) -> None:
    def submit(number: int) -> None:
        with idle(workers) as runner:
            ended = [threading.Event(), threading.Event()]

            def work(at: int) -> Work:
                return Work("work", lambda: None, lambda result, error: ended[at].set())

            with suppress(KeyboardInterrupt), runner.lock:
                runner.submit(work(0))
            sys.settrace(None)
            with runner.lock:
                is_there = bool(runner.ready)
            assert not is_there or ended[0].wait(WAIT_S)
            with runner.lock:
                runner.submit(work(1))
            assert ended[1].wait(WAIT_S)

    assert interruptions(ALL, submit) >= 5


def test_what_is_due_earlier_wakes_the_clock_thread() -> None:
    def wake(number: int) -> None:
        runner = ThreadRunner()
        asleep, ran = threading.Event(), threading.Event()
        with runner.lock:
            runner.wake(Step("first", lambda now_ms: asleep.set()), runner.now_ms() + 1)
            runner.wake(Step("in an hour", lambda now_ms: None), runner.now_ms() + 3_600_000)
        assert asleep.wait(WAIT_S)
        step = Step("soon", lambda now_ms: ran.set())
        at = runner.now_ms() + 2
        for _ in range(2):
            with suppress(KeyboardInterrupt), runner.lock:
                runner.wake(step, at)
        sys.settrace(None)
        assert ran.wait(WAIT_S)
        assert runner.close() == []

    assert interruptions(ALL, wake) >= 5


@pytest.mark.parametrize("name", ["worker", "clock"])
def test_a_thread_whose_start_is_interrupted_is_one_of_ours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ThreadRunner()
    before = set(threading.enumerate())
    start, count = threading.Thread.start, 0

    def interrupted(thread: threading.Thread) -> None:
        nonlocal count
        start(thread)
        count += 1
        if count == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    ran = threading.Event()
    step = Step("step", lambda now_ms: ran.set())
    with pytest.raises(KeyboardInterrupt), runner.lock:
        runner.wake(step, 0 if name == "worker" else runner.now_ms() + 1)
    assert ran.wait(WAIT_S)
    assert runner.close() == []
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_step_that_ends_with_no_exception_ends_no_thread(
    raised: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """A step that ends with what is no exception ends no thread."""

    def fails(now_ms: int) -> int | None:
        raise raised("of the step")

    def done(result: object, error: Exception | None) -> None:
        raise raised("of the outcome")

    with idle(1) as runner:
        with runner.lock:
            runner.wake(Step("fails", fails))
            runner.submit(Work("fails too", lambda: None, done))
        ran = threading.Event()
        with runner.lock:
            runner.submit(Work("work", lambda: None, lambda result, error: ran.set()))
        assert ran.wait(WAIT_S)
        assert len(runner._threads) <= 3
    assert "fails: librmq's own step has failed" in caplog.text
    assert "fails too: what came of it could not be applied" in caplog.text


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker.open("/b", files=MemoryFiles()) as opened:
        opened.create_topic("T", 1)
        yield opened


def test_the_next_send_tells_of_an_interrupted_one(broker: Broker) -> None:
    """A message whose send was interrupted is told of by the next."""
    holds = broker._holds
    added, bodies = threading.Semaphore(0), dict[bytes, threading.Event]()
    add = holds.add

    def told(*arguments: object) -> None:
        add(*arguments)  # type: ignore[arg-type]
        added.release()

    holds.add = told  # type: ignore[assignment,method-assign]
    consumer = PushConsumer(broker, "G")

    @consumer.subscribe("T")
    def take(message: StoredMessage) -> None:
        bodies[message.body].set()

    def send(body: bytes) -> None:
        bodies[body] = threading.Event()
        broker.call(SendMessage("P", Message("T", body), 0, 1, LOCAL_HOST))

    def interrupted(number: int) -> None:
        while ("T", 0) not in holds.by_queue:
            assert added.acquire(timeout=WAIT_S)
        with suppress(KeyboardInterrupt):
            send(b"first %d" % number)
        sys.settrace(None)
        send(b"second %d" % number)
        for word in (b"first", b"second"):
            assert bodies[b"%s %d" % (word, number)].wait(WAIT_S)

    consumer.start()
    functions: tuple[Callable[..., object], ...] = (Arrivals.stored, Arrivals.delivered, Holds.arrived, Holds.remove)
    assert interruptions((*functions, *ALL), interrupted) >= 10
    consumer.shutdown()


def test_progress_is_saved_though_a_change_was_interrupted() -> None:
    """Progress and tables are saved though one was interrupted who changed them."""
    functions = (
        GroupOffsets.set,
        Saving._offsets_changed,
        Writing.save,
        Writing.submit,
        Broker._submit_writing,
    )

    def change(number: int) -> None:
        files = MemoryFiles()
        broker = Broker.open("/b", files=files)
        writing = broker._writing
        written = threading.Event()
        for at in range(2):
            with suppress(KeyboardInterrupt):
                broker.call(UpdateOffset("G", "T", 0, 1 + at))
            with suppress(KeyboardInterrupt), broker.runner.lock:
                broker._saving.offsets.save(0)
        sys.settrace(None)
        with broker.runner.lock:
            broker._topics.ensure("U")
            is_due = broker._saving._offsets_ms is not None
        assert is_due

        def ended(error: Exception | None) -> bool:
            written.set()
            return Writing.written(writing, error)

        with broker.runner.lock:
            writing.written = ended  # type: ignore[method-assign]
            broker._topics.ensure("V")
        assert written.wait(WAIT_S)
        broker.call(UpdateOffset("G", "T", 0, 5))
        broker.close()
        assert b"5" in files.read("/b/config/consumerOffset.json")

    assert interruptions((*functions, *ALL), change) >= 10


def test_a_file_whose_making_was_interrupted_is_made_again(tmp_path: Path) -> None:
    """A file that was made as a caller was interrupted is made again."""

    def roll(number: int) -> None:
        pool = MappingPool(4)
        files = MappedFileQueue(str(tmp_path / f"{number}"), 4096, DiskFiles(), pool, durable=bool(number % 2))
        for start in (0, 4096):
            with suppress(KeyboardInterrupt):
                files.create(start)
            if start not in files.starts:
                files.create(start)
        sys.settrace(None)
        assert files.starts == [0, 4096]
        files.file(4096).buffer[:4] = b"here"
        files.flush()
        again = MappedFileQueue(files.folder, 4096, DiskFiles(), pool)
        assert again.starts == [0, 4096]
        assert again.file(4096).buffer[:4] == b"here"

    assert interruptions((MappedFileQueue.create,), roll) >= 10


def subscribed(kind: type[PushConsumer] | type[PullConsumer], broker: Broker) -> PushConsumer | PullConsumer:
    consumer = kind(broker, "G")
    if isinstance(consumer, PushConsumer):
        consumer.subscribe("T")(lambda message: None)
    else:
        consumer.subscribe("T")
    return consumer


@pytest.mark.parametrize("kind", [PushConsumer, PullConsumer])
def test_a_consumer_interrupted_at_start_leaves_its_group(
    kind: type[PushConsumer] | type[PullConsumer], broker: Broker
) -> None:
    """A consumer whose start is interrupted has left its group once it is shut down."""
    number, came = 0, True
    while came:
        consumer = subscribed(kind, broker)
        came = next(at_each_call(consumer.start, first=number))
        assert consumer.is_running or came
        assert consumer.shutdown()
        with broker.runner.lock:
            assert broker.client_ids() == ()
            assert not consumer.assigned
        number += 1 + number // 10
    assert number >= 20


@pytest.mark.parametrize("kind", [PushConsumer, PullConsumer])
def test_a_consumer_interrupted_at_shutdown_leaves_its_group(
    kind: type[PushConsumer] | type[PullConsumer], broker: Broker
) -> None:
    """A consumer whose shutdown is interrupted has left its group after another."""
    number, came = 0, True
    while came:
        consumer = subscribed(kind, broker)
        consumer.start()
        came = next(at_each_call(consumer.shutdown, first=number))
        assert consumer.shutdown()
        with broker.runner.lock:
            assert broker.client_ids() == ()
            assert not consumer.assigned
        number += 1 + number // 10
    assert number >= 8
