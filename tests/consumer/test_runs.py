"""Runs: a fast listener gets messages one after the other in one thread, and their results are applied together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from librmq.broker import Broker
from librmq.client import Operation
from librmq.client.producer import Producer
from librmq.clock import ManualClock
from librmq.consumer import DeliveredMessage, PushConsumer
from librmq.consumer._concurrent import LOOK_MS, ConcurrentDelivery
from librmq.errors import NotIdleError
from librmq.listener import DownstreamDown
from librmq.message.message import MessageQueue
from librmq.runtime import ManualRunner
from librmq.runtime.runner import Work
from tests.consumer.parties import newest_takes_all

Listener = Callable[[DeliveredMessage], object]


class Party:
    """Messages 0 to 9 in one queue, and a consumer by hand that gets them in one run."""

    def __init__(self, broker: Broker, runner: ManualRunner) -> None:
        self.broker = broker
        self.runner = runner
        self.seen: list[int] = []

    def start(self, listener: Listener, **settings: Any) -> PushConsumer:
        def note(message: DeliveredMessage) -> object:
            self.seen.append(int(message.body))
            return listener(message)

        self.broker.create_topic("t", 1)
        producer = Producer(self.broker, "p")
        for number in range(10):
            producer.send("t", b"%d" % number)
        self.consumer = PushConsumer(self.broker, "g", **settings)
        self.consumer.subscribe("t", note)
        delivery = self.consumer.delivery
        assert isinstance(delivery, ConcurrentDelivery)
        delivery.is_fast = True
        return self.consumer.start()

    def pass_in_listener(self, ms: int) -> None:
        with pytest.raises(NotIdleError):  # the calling listener itself
            self.runner.advance(ms)

    @property
    def progress(self) -> int | None:
        return self.consumer.progress().get(MessageQueue("t", self.broker.name, 0))

    def stored(self) -> int | None:
        return self.broker.consumer_offset("g", "t", 0)


@pytest.fixture
def party() -> Iterator[Party]:
    runner = ManualRunner(ManualClock())
    with Broker.temporary(runner=runner) as broker:
        yield Party(broker, runner)


def allocate_to_newest(client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]) -> list[MessageQueue]:
    return list(newest_takes_all(client_id, queues, clients))


def on(number: int, then: Callable[[], object]) -> Listener:
    return lambda message: then() if int(message.body) == number else None


def test_a_run_is_one_turn(party: Party) -> None:
    party.start(lambda message: None)
    party.runner.advance(1000)
    assert party.seen == list(range(10))
    assert party.progress == 10


def test_a_failure_ends_a_run_and_only_its_message_goes_back(party: Party) -> None:
    def fail() -> None:
        if party.seen.count(4) == 1:
            raise ValueError("no")

    party.start(on(4, fail))
    party.runner.advance(60_000)
    assert party.seen == [*range(10), 4]
    assert party.progress == 10


def test_a_rest_keeps_the_order_of_what_a_run_has_not_begun(party: Party) -> None:
    def rest() -> None:
        if party.seen.count(4) == 1:
            raise DownstreamDown("the bank", seconds=5)

    party.start(on(4, rest))
    party.runner.advance(1000)
    assert (party.seen, party.progress) == ([0, 1, 2, 3, 4], 4)
    party.runner.advance(60_000)
    assert (party.seen, party.progress) == ([0, 1, 2, 3, 4, *range(4, 10)], 10)


def test_others_get_what_a_slow_listener_has_not_begun(party: Party) -> None:
    """As soon as the run is slow, its progress counts, and the rest begins on other threads."""
    inside: list[tuple[list[int], int | None]] = []

    def wait() -> None:
        party.pass_in_listener(3 * LOOK_MS)
        inside.append((party.seen.copy(), party.progress))

    party.start(on(4, wait), threads=2)
    party.runner.advance(1000)
    assert inside == [(list(range(10)), 4)]
    assert (party.progress, party.seen) == (10, list(range(10)))


@pytest.mark.parametrize("is_slow", [False, True])
def test_what_comes_during_a_run_begins_after_it(party: Party, is_slow: bool) -> None:
    """Another thread begins it as soon as the run is slow."""
    seen_by_end: list[list[int]] = []

    def send() -> None:
        Producer(party.broker, "later").send("t", b"10")
        if is_slow:
            party.pass_in_listener(3 * LOOK_MS)
        seen_by_end.append(party.seen.copy())

    party.start(on(4, send), threads=2)
    party.runner.advance(1000)
    assert seen_by_end == [list(range(11 if is_slow else 5))]
    assert (party.seen, party.progress) == (list(range(11)), 11)


def test_one_thread_keeps_what_its_listener_has_not_begun(party: Party) -> None:
    party.start(on(4, lambda: party.pass_in_listener(3 * LOOK_MS)), threads=1)
    party.runner.advance(1000)
    assert (party.seen, party.progress) == (list(range(10)), 10)


def test_what_a_run_has_consumed_is_stored_when_its_consumer_ends(party: Party) -> None:
    """A shutdown in the middle begins nothing new, and loses no progress."""

    def shut_down() -> None:
        thread = threading.Thread(target=party.consumer.shutdown, args=(0,))
        thread.start()
        thread.join()

    party.start(on(4, shut_down))
    party.runner.advance(1000)
    assert (party.seen, party.stored()) == ([0, 1, 2, 3, 4], 4)


def test_what_a_run_has_consumed_does_not_come_again_at_the_next_reader(party: Party) -> None:
    at_next: list[int] = []

    def join() -> None:
        other = PushConsumer(party.broker, "g", strategy=allocate_to_newest)
        other.subscribe("t", lambda message: at_next.append(int(message.body)))
        other.start()
        party.pass_in_listener(LOOK_MS - 1)

    party.start(on(4, join), strategy=allocate_to_newest)
    party.runner.advance(60_000)
    assert (party.seen, at_next) == ([0, 1, 2, 3, 4], list(range(4, 10)))


@pytest.mark.parametrize("is_submitted", [False, True])
def test_ctrl_c_at_the_begin_of_a_run_blocks_no_message(
    party: Party, is_submitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = party.start(lambda message: None)
    submit = party.runner.submit

    def interrupted(work: Work) -> None:
        monkeypatch.undo()
        if is_submitted:
            submit(work)
        raise KeyboardInterrupt

    monkeypatch.setattr(party.runner, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        party.runner.advance(1000)
    party.runner.advance(60_000)
    assert (party.seen, party.progress, consumer.calls.running) == (list(range(10)), 10, 0)
    assert consumer.shutdown()


def test_a_run_with_hooks_calls_them_for_each_message(party: Party) -> None:
    hooked: list[int] = []

    def hook(operation: Operation) -> None:
        hooked.extend(int(message.body) for message in operation.messages)

    party.start(lambda message: None, hooks=[hook])
    party.runner.advance(1000)
    assert (party.seen, hooked, party.progress) == (list(range(10)), list(range(10)), 10)


def test_the_message_at_the_listener_is_shown(party: Party) -> None:
    shown: list[tuple[int, int, bool]] = []

    def show() -> None:
        for call in party.consumer.calls.shown():
            shown.append((call.queue_offset, call.messages, "test_runs" in call.stack[0]))

    party.start(on(4, show))
    party.runner.advance(1000)
    assert shown == [(4, 1, True)]


@pytest.mark.parametrize("threads", [2, 4])
def test_a_listener_may_wait_for_all_others(threads: int) -> None:
    """A listener that was fast blocks: its threads get the rest of its run."""
    total, seen, others, done = 400, list[int](), threading.Event(), threading.Event()
    with Broker.temporary() as broker:
        broker.create_topic("t", 1)
        producer = Producer(broker, "p")
        for number in range(total):
            producer.send("t", b"%d" % number)
        consumer = PushConsumer(broker, "g", threads=threads)

        @consumer.subscribe("t")
        def listen(message: DeliveredMessage) -> None:
            if message.body == b"200":
                assert others.wait(60)
            seen.append(int(message.body))
            if len(seen) == total - 1:
                others.set()
            if len(seen) == total:
                done.set()

        consumer.start()
        assert done.wait(60)
        assert consumer.shutdown()
        assert (sorted(seen), broker.consumer_offset("g", "t", 0)) == (list(range(total)), total)
