"""Ctrl-C in the main thread, sent as a real signal at each call: later work still runs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import pytest

from librmq.broker import Broker
from librmq.client import Producer
from librmq.config import StoreConfig
from librmq.consumer import PullConsumer, PushConsumer, SimpleConsumer
from librmq.files._memory import MemoryFiles
from librmq.message.message import Message, StoredMessage
from librmq.protocol import LOCAL_HOST, SendMessage, UpdateOffset
from librmq.runtime.runner import Step, Work
from librmq.runtime.threads import ThreadRunner
from tests.interrupting import interrupted_at_call

WAIT_S = 30


def places() -> Iterator[int]:
    """Yield the first calls one by one, then at growing distances."""
    number = 0
    while True:
        yield number
        number += 1 + number // 10


@contextmanager
def having_workers(count: int) -> Iterator[ThreadRunner]:
    """Yield a runner with this many workers, and check that they still exist at the end."""
    runner = ThreadRunner()

    def all_work() -> None:
        together, ended = threading.Barrier(max(1, count)), threading.Semaphore(0)
        with runner.lock:
            for _ in range(count):
                runner.submit(Work("work", lambda: together.wait(WAIT_S), lambda result, error: ended.release()))
        for _ in range(count):
            assert ended.acquire(timeout=WAIT_S)

    all_work()
    yield runner
    all_work()
    assert runner.shutdown()


def released(ran: threading.Semaphore, now_ms: int) -> None:
    ran.release()


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("in_ms", [None, 2])
@pytest.mark.parametrize("has_clock", [False, True])
def test_a_step_that_was_or_is_woken_again_runs(workers: int, in_ms: int | None, has_clock: bool) -> None:
    """A step that counts as due does not have to be woken again."""
    for number in places():
        with having_workers(workers) as runner:
            ran = threading.Semaphore(0)
            step = Step("step", partial(released, ran))
            if has_clock:
                with runner.lock:
                    runner.wake(Step("in an hour", lambda now_ms: None), runner.now_ms() + 3_600_000)

            def wake(runner: ThreadRunner = runner, step: Step = step) -> None:
                with runner.lock:
                    runner.wake(step, 0 if in_ms is None else runner.now_ms() + in_ms)

            came = interrupted_at_call(number, wake)
            with runner.lock:
                is_due = step.at is not None
            assert not is_due or ran.acquire(timeout=WAIT_S)
            wake()
            assert ran.acquire(timeout=WAIT_S)
        if not came:
            break
    assert number >= 5


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_submitted_and_later_work_runs(workers: int) -> None:
    for number in places():
        with having_workers(workers) as runner:
            ended = [threading.Event(), threading.Event()]

            def submit(at: int, runner: ThreadRunner = runner, ended: list[threading.Event] = ended) -> None:
                with runner.lock:
                    runner.submit(Work("work", lambda: None, lambda result, error: ended[at].set()))

            came = interrupted_at_call(number, partial(submit, 0))
            with runner.lock:
                is_there = bool(runner.ready)
            assert not is_there or ended[0].wait(WAIT_S)
            submit(1)
            assert ended[1].wait(WAIT_S)
        if not came:
            break
    assert number >= 2


@pytest.mark.parametrize("name", ["worker", "clock"])
def test_a_thread_whose_start_is_interrupted_is_one_of_ours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ThreadRunner()
    before = set(threading.enumerate())
    start, count = threading.Thread.start, itertools.count()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if next(count) == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    ran = threading.Event()
    step = Step("step", lambda now_ms: ran.set())
    with pytest.raises(KeyboardInterrupt), runner.lock:
        runner.wake(step, 0 if name == "worker" else runner.now_ms() + 1)
    assert ran.wait(WAIT_S)
    assert runner.shutdown(WAIT_S)
    assert set(threading.enumerate()) <= before


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker.open("/b", files=MemoryFiles()) as opened:
        opened.create_topic("T", 1)
        yield opened


def test_messages_of_an_interrupted_send_are_delivered(broker: Broker) -> None:
    """They are delivered at the latest when the next message is sent."""
    came_to: dict[bytes, threading.Event] = {}
    consumer = PushConsumer(broker, "G")

    @consumer.subscribe("T")
    def take(message: StoredMessage) -> None:
        came_to[message.body].set()

    def send(body: bytes) -> None:
        broker.call(SendMessage("P", Message("T", body), 0, 1, LOCAL_HOST))

    consumer.start()
    for number in places():
        first, second = b"first %d" % number, b"second %d" % number
        came_to[first], came_to[second] = threading.Event(), threading.Event()
        came = interrupted_at_call(number, partial(send, first))
        send(second)
        assert came_to[second].wait(WAIT_S)
        if any(message.body == first for message in broker.messages("T")):
            assert came_to[first].wait(WAIT_S)
        if not came:
            break
    assert number >= 10
    consumer.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [lambda broker: broker.call(UpdateOffset("G", "T", 0, 1)), lambda broker: broker.create_topic("U", 1)],
    ids=["progress", "topic"],
)
def test_changes_of_an_interrupted_call_are_saved(change: Callable[[Broker], object]) -> None:
    for number in places():
        files = MemoryFiles()
        broker = Broker.open("/b", files=files, store_config=StoreConfig.tiny())
        broker.call(SendMessage("P", Message("T", b"x"), 0, 1, LOCAL_HOST))
        came = interrupted_at_call(number, partial(change, broker))
        queue_offset, topics = broker.consumer_offset("G", "T"), set(broker.topics())
        broker.close()
        with Broker.open("/b", files=files, store_config=StoreConfig.tiny()) as again:
            assert again.consumer_offset("G", "T") == queue_offset
            assert topics <= set(again.topics())
        if not came:
            break
    assert number >= 10


@pytest.mark.parametrize("kind", [PushConsumer, PullConsumer])
@pytest.mark.parametrize("call", ["start", "shutdown"])
def test_an_interrupted_consumer_leaves_its_group(
    kind: type[PushConsumer] | type[PullConsumer], call: str, broker: Broker
) -> None:
    """The start or the shutdown is interrupted; a second shutdown makes the consumer leave."""
    for number in places():
        consumer = kind(broker, "G")
        if isinstance(consumer, PushConsumer):
            consumer.subscribe("T")(lambda message: None)
        else:
            consumer.subscribe("T")
        if call == "shutdown":
            consumer.start()
        came = interrupted_at_call(number, getattr(consumer, call))
        assert call == "shutdown" or consumer.is_running or came
        assert consumer.shutdown()
        with broker.runner.lock:
            assert broker.clients() == ()
            assert not consumer.assigned
        if not came:
            break
    assert number >= 8


@pytest.mark.parametrize("kind", [SimpleConsumer, Producer])
@pytest.mark.parametrize("call", ["start", "shutdown"])
def test_an_interrupted_client_leaves_its_group(
    kind: type[SimpleConsumer] | type[Producer], call: str, broker: Broker
) -> None:
    for number in places():
        client = kind(broker, "G")
        if call == "shutdown":
            client.start()
        came = interrupted_at_call(number, getattr(client, call))
        client.shutdown()
        assert broker.clients() == ()
        if not came:
            break
    assert number >= 8


def test_a_consume_whose_end_is_interrupted_leaves_its_group(broker: Broker) -> None:
    broker.call(SendMessage("P", Message("T", b"x"), 0, 1, LOCAL_HOST))
    for number in places():
        messages = cast("Generator[StoredMessage]", broker.consume("T", group="G"))
        assert next(messages).body == b"x"  # again: each loop ends early
        # The first 3 calls resume generators: `sys.setprofile` can end them without their `finally`, a signal can not.
        came = interrupted_at_call(3 + number, messages.close)
        assert broker.clients() == ()
        if not came:
            break
    assert number >= 8
