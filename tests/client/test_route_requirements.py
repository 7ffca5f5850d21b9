"""What clients require of a route and of its endpoints.

A part of your own (``LIBRMQ_OWN=route=MODULE:CALLABLE``) is a context that gives a route to brokers with an empty topic
``orders`` of two queues.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest

import librmq
from librmq import Broker, ConsumeFrom, Message, Producer, PullConsumer, PushConsumer, ReconsumeLater
from librmq.cluster import RouteTable
from librmq.errors import BrokerError, NoRouteError
from librmq.protocol import MaxOffset, PullMessage, PullStatus, Request, ResponseCode, Route, RouteWrapper, Subscription
from librmq.wire.remoting import RemotingServer
from tests import own
from tests.wrapped_route import WrappedRoute


@contextmanager
def a_broker() -> Iterator[Broker]:
    with Broker.temporary() as broker:
        broker.create_topic("orders", 2)
        yield broker


@contextmanager
def two_brokers() -> Iterator[Route]:
    with Broker.temporary() as a, Broker.temporary(runner=a.runner, name="broker-b") as b:
        a.create_topic("orders", 1)
        b.create_topic("orders", 1)
        yield RouteTable(a, b)


@contextmanager
def wrapped(wrap: Callable[[Broker], Route]) -> Iterator[Route]:
    with a_broker() as broker:
        yield wrap(broker)


@contextmanager
def over_tcp() -> Iterator[Route]:
    with a_broker() as broker, RemotingServer(broker) as server, librmq.connect(server.address) as route:
        yield route


OURS: dict[str, Callable[[], AbstractContextManager[Route]]] = {
    "broker": a_broker,
    "brokers": two_brokers,
    "wrapper": lambda: wrapped(RouteWrapper),
    "endpoint": lambda: wrapped(lambda broker: WrappedRoute(broker, lambda request, call: call(request))),
    "connect": over_tcp,
}


@pytest.fixture(params=own.params("route", OURS))
def route(request: pytest.FixtureRequest) -> Iterator[Route]:
    with ExitStack() as stack:
        yield stack.enter_context(request.param())


def places(route: Route) -> list[tuple[str, int]]:
    return [(data.broker_name, number) for data in route.topic_route("orders") for number in range(data.write_queues)]


def pull(route: Route, broker: str, queue_id: int, offset: int) -> Any:
    whole = PullMessage("reader", "readers", "orders", queue_id, offset, 64, Subscription("orders"))
    return route.endpoint(broker).call(whole)


@pytest.mark.requirement
def test_a_route_names_the_brokers_of_a_topic(route: Route) -> None:
    found = route.topic_route("orders")
    assert [data.broker_name for data in found] == sorted(data.broker_name for data in found)
    assert len(places(route)) == 2
    assert route.topic_route("no-such-topic") == ()
    assert route.registered_route("orders") == found


@pytest.mark.requirement
def test_what_a_route_knows_of_a_topic_takes_no_wait(route: Route) -> None:
    """It is asked for under the runner's lock, also by another thread than the one that learned it."""
    found = route.topic_route("orders")

    def known() -> list[object]:
        with route.runner.lock:
            return [route.known_route(topic) for topic in ("orders", "another-topic")]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(known).result() == [found, ()]


@pytest.mark.requirement
def test_each_broker_that_a_route_names_has_an_endpoint(route: Route) -> None:
    names = route.broker_names()
    assert list(names) == sorted({broker for broker, _ in places(route)})
    for name in names:
        assert route.endpoint(name).call(MaxOffset("orders", 0)) == 0
    with pytest.raises(NoRouteError, match="no-such-broker"):
        route.endpoint("no-such-broker")


@pytest.mark.requirement
def test_a_watch_ends_and_can_be_ended_again(route: Route) -> None:
    changes: list[bool] = []
    end = route.watch(lambda: changes.append(True))
    with Producer(route, "shop") as producer:
        producer.send("a-new-topic", b"x")
        if not route.is_remote:
            assert changes, "the topic is new"
        end()
        end()
        before = len(changes)
        producer.send("another-new-topic", b"x")
        assert len(changes) == before


@pytest.mark.requirement
def test_a_message_is_where_the_answer_says(route: Route) -> None:
    with Producer(route, "shop") as producer:
        sent = [producer.send("orders", b"%d" % number) for number in range(6)]
    for broker, queue_id in places(route):
        answer = pull(route, broker, queue_id, 0)
        assert answer.status is PullStatus.FOUND
        there = {message.queue_offset: message.body for message in answer.messages}
        mine = [at for at in sent if (at.queue.broker_name, at.queue.queue_id) == (broker, queue_id)]
        assert {at.queue_offset: b"%d" % sent.index(at) for at in mine} == there
        assert pull(route, broker, queue_id, len(mine)).status is not PullStatus.FOUND


@pytest.mark.requirement
def test_a_message_is_stored_once_by_each_thread(route: Route) -> None:
    bodies = [b"%d" % number for number in range(40)]
    with Producer(route, "shop") as producer, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda body: producer.send("orders", body), bodies))
    stored = [message.body for place in places(route) for message in pull(route, *place, 0).messages]
    assert sorted(stored, key=int) == bodies


@pytest.mark.requirement
def test_a_refusal_is_an_error_with_its_code_and_stores_nothing(route: Route) -> None:
    broker, queue_id = places(route)[0]
    with pytest.raises(BrokerError) as told:
        route.endpoint(broker).send("shop", Message("orders", b"x"), 99, 0, ("127.0.0.1", 0))
    assert told.value.code in set(ResponseCode)
    assert route.endpoint(broker).call(MaxOffset("orders", queue_id)) == 0


class Unheard(Request[None]):
    """A request that no broker knows."""


@pytest.mark.requirement
def test_an_unknown_request_is_refused_by_its_code(route: Route) -> None:
    with pytest.raises(BrokerError, match="Unheard") as told:
        route.endpoint(route.broker_names()[0]).call(Unheard())
    assert told.value.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


@pytest.mark.requirement
def test_consumers_get_each_message_and_continue_where_they_were(route: Route) -> None:
    bodies = {b"%d" % number for number in range(10)}
    with Producer(route, "shop") as producer:
        for body in bodies:
            producer.send("orders", body)
    with PullConsumer(route, "audit") as first:
        first.subscribe("orders")
        polled = first.poll(timeout=60)
        first.commit()
    with PullConsumer(route, "audit") as second:
        second.subscribe("orders")
        while len(polled) < len(bodies):
            more = second.poll(timeout=60)
            assert more, "a poll finds nothing although messages are left"
            polled += more
    assert {message.body for message in polled} == bodies
    assert len(polled) == len(bodies)


@pytest.mark.requirement
def test_a_failing_message_comes_again(route: Route) -> None:
    attempts: list[int] = []
    again = threading.Event()

    def listener(message: Any) -> None:
        attempts.append(message.reconsume_times)
        if message.reconsume_times == 0:
            raise ReconsumeLater("the first attempt", delay_level=1)
        again.set()

    consumer = PushConsumer(route, "billing", consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("orders", listener)
    with Producer(route, "shop") as producer, consumer:
        producer.send("orders", b"x")
        assert again.wait(60)
    assert attempts == [0, 1]
