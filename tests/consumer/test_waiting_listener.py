"""A message that arrives while a listener's thread waits: the call that stores it begins it, if nothing forbids it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from librmq.broker import Broker
from librmq.consumer import DeliveredMessage, PushConsumer
from librmq.files._memory import MemoryFiles
from librmq.message.message import Message
from librmq.metrics import Metrics
from librmq.protocol import LOCAL_HOST, PERM_WRITE, PullMessage, Request, Route, SendMessage, SetGroup
from librmq.runtime.runner import Runner
from tests.wrapped_route import WrappedRoute

WAIT_S = 30


class Listening:
    """A consumer whose listener has had a message, and waits for the next one."""

    def __init__(self, broker: Broker, route: Route | None = None, **settings: Any) -> None:
        self.broker = broker
        self.bodies: list[bytes] = []
        self.is_over = threading.Event()
        broker.create_topic("T", 1)
        self.consumer = PushConsumer(route or broker, "G", **settings)
        self.consumer.subscribe("T")(self._listen)
        self.consumer.start()
        self.send(b"first")
        assert self.ends_with(b"last"), "nothing is delivered"

    def _listen(self, message: DeliveredMessage) -> None:
        self.bodies.append(message.body)
        if message.body == b"last":
            self.is_over.set()

    def send(self, body: bytes) -> None:
        self.broker.call(SendMessage("P", Message("T", body), 0, 1, LOCAL_HOST))

    def ends_with(self, body: bytes) -> bool:
        """Send a last message, and return whether it has reached the listener, after which nothing runs."""
        self.is_over.clear()
        self.send(body)
        came = self.is_over.wait(WAIT_S)
        until_idle(self.broker.runner)
        return came


def until_idle(runner: Runner) -> None:
    """Return when no listener runs or is about to."""
    while True:
        with runner.lock:
            if not runner.running and not runner.ready:
                return


@contextmanager
def listening(wrapped: Callable[[Broker], Route] = lambda broker: broker, **settings: Any) -> Iterator[Listening]:
    with Broker.open("/b", files=MemoryFiles()) as broker:
        listener = Listening(broker, wrapped(broker), **settings)
        yield listener
        listener.consumer.shutdown()


def begun(listener: Listening, *bodies: bytes) -> int:
    """Return how many messages have begun when the calls that store them have returned, before any other turn."""
    with listener.broker.runner.lock:
        for body in bodies:
            listener.send(body)
        return len(listener.broker.runner.ready)


def test_the_call_that_stores_a_message_begins_it() -> None:
    with listening() as listener:
        assert begun(listener, b"1") == 1
        assert listener.ends_with(b"last")
        assert listener.bodies == [b"first", b"last", b"1", b"last"]
        assert list(listener.consumer.progress("T").values()) == [4]


def test_progress_travels_with_it() -> None:
    with listening() as listener:
        assert begun(listener, b"1") == 1
        assert listener.broker.consumer_offset("G", "T") == 2


def test_while_a_listener_is_about_to_run_messages_gather_for_one_pull() -> None:
    with listening() as listener:
        assert begun(listener, b"1", b"2", b"3") == 1
        assert listener.ends_with(b"last")
        assert sorted(listener.bodies) == [b"1", b"2", b"3", b"first", b"last", b"last"]


def test_what_stands_before_a_broker_sees_each_message() -> None:
    pulled: list[int] = []

    def watch(request: Request[Any], call: Callable[[Any], Any]) -> Any:
        answer = call(request)
        if isinstance(request, PullMessage):
            pulled.extend(message.queue_offset for message in answer.messages)
        return answer

    with listening(lambda broker: WrappedRoute(broker, watch)) as listener:
        assert begun(listener, b"1") == 0
        assert listener.ends_with(b"last")
        assert pulled == [0, 1, 2, 3]


def pause(listener: Listening) -> Callable[[], object]:
    listener.consumer.pause()
    return listener.consumer.resume


def switch_off(listener: Listening) -> Callable[[], object]:
    listener.broker.call(SetGroup("G", {"consumeEnable": False}))
    return lambda: listener.broker.call(SetGroup("G", {"consumeEnable": True}))


def make_unreadable(listener: Listening) -> Callable[[], object]:
    listener.broker.create_topic("T", 1, permission=PERM_WRITE)
    return lambda: listener.broker.create_topic("T", 1)


def subscribe_otherwise(listener: Listening) -> Callable[[], object]:
    """The heartbeat of another instance counts for the group."""
    other = PushConsumer(listener.broker, "G", instance_name="other")
    other.subscribe("T", lambda message: None, tags="a")
    other.start()
    return other.shutdown


@pytest.mark.parametrize("forbid", [pause, switch_off, make_unreadable, subscribe_otherwise])
def test_what_a_pull_would_be_refused_is_not_begun(forbid: Callable[[Listening], Callable[[], object]]) -> None:
    with listening() as listener:
        allow = forbid(listener)
        assert begun(listener, b"1") == 0
        allow()
        assert b"1" not in listener.bodies


@pytest.mark.parametrize("settings", [{"orderly": True}, {"pull_interval": 0.001}, {"max_held_messages": 1}])
def test_settings_of_pulls_hold(settings: dict[str, Any]) -> None:
    with listening(**settings) as listener:
        assert begun(listener, b"1") == ("max_held_messages" in settings)
        assert listener.ends_with(b"last")
        assert sorted(listener.bodies) == [b"1", b"first", b"last", b"last"]


def test_it_counts_as_pulled() -> None:
    metrics = Metrics()
    with Broker.open("/b", files=MemoryFiles(), metrics=metrics) as broker:
        listener = Listening(broker, metrics=metrics)
        assert begun(listener, b"1") == 1
        assert listener.ends_with(b"last")
        listener.consumer.shutdown()
    counts = metrics.snapshot()
    assert counts["messages_out"] == {("T", "G"): 4}
    assert sum(counts["pulls"].values()) >= 4
