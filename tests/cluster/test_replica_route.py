"""A route over a master and its replica: when clients read from which."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import pytest

from librmq import ConsumeFrom, ManualRunner, Producer, PushConsumer, StoreConfig
from librmq.broker import Broker
from librmq.cluster import Cluster, Replica, ReplicaRoute
from librmq.errors import BrokerUnreachableError, ConfigError, NoRouteError
from librmq.files._memory import MemoryFiles
from librmq.message.ids import Host
from librmq.protocol import PERM_READ, MaxOffset, QueryOffset, RouteWrapper
from tests.broker.parties import manual, opened, pull, send


def test_consumers_continue_at_the_replica_and_return() -> None:
    """No message is missed; only those consumed since the last copy of the progress are delivered again."""
    files, runner = MemoryFiles(), ManualRunner()
    cluster = Cluster.open("/c", ["a"], runner=runner, files=files, store_config=StoreConfig.tiny())
    replica = Replica.open("/copy", of=cluster.broker("a"))
    route = ReplicaRoute(cluster, replica)
    got: list[bytes] = []
    consumer = PushConsumer(route, "g")
    consumer.subscribe("T", lambda message: got.append(message.body))
    cluster.create_topic("T", 2)
    consumer.start()
    producer = Producer(route, "p")
    sent = []
    for number in range(20):
        sent.append(b"%d" % number)
        producer.send("T", sent[-1])
        runner.advance(1000)
    assert got == sent
    sent.append(b"unread")
    producer.send("T", b"unread")
    assert replica.follow()
    cluster.crash("a")
    runner.advance(1000)
    assert got == sent  # immediately
    with pytest.raises(BrokerUnreachableError):
        producer.send("T", b"x")
    runner.advance(200_000)  # the clients have dropped the master from their route
    assert [(one.broker_name, one.permission) for one in route.topic_route("T")] == [("a", PERM_READ)]
    assert route.broker_names() == ("a",)
    replica.reconnect(cluster.reopen("a"))
    runner.advance(60_000)
    producer.send("T", b"after")
    runner.advance(60_000)
    assert got[-1] == b"after"
    assert set(got) == {*sent, b"after"}
    assert len(got) - len(set(got)) <= 15
    consumer.shutdown()
    replica.close()
    assert route.endpoint("a").call(MaxOffset("T", 0)) > 0
    cluster.close()


class Distant(RouteWrapper):
    """Says what a route over a network says."""

    is_remote = True
    own_host = "10.0.0.1"

    def address(self, broker_name: str) -> Host | None:
        return "10.0.0.2", 10911


def test_clients_learn_from_the_route_behind_what_the_replica_does_not_change() -> None:
    broker = opened()
    broker.create_topic("T", 1)
    with Replica.open("/copy", of=broker) as replica:
        route = ReplicaRoute(Distant(broker), replica)
        assert (route.is_remote, route.own_host, route.address("broker-a")) == (True, "10.0.0.1", ("10.0.0.2", 10911))
        assert replica.follow()
        broker.close()
        assert [queues.permission for queues in route.known_route("T")] == [6]


def test_old_messages_come_from_the_replica() -> None:
    broker = opened(store=StoreConfig.tiny(memory_ratio=0))
    for number in range(100):
        send(broker, "T", b"%d" % number)
    replica = Replica.open("/copy", of=broker)
    route = ReplicaRoute(broker, replica)
    asked: list[str] = []
    for name, one in (("master", broker), ("replica", replica.broker)):
        _note(one, name, asked)
    offset = 0
    while offset < 100:
        found = pull(route.endpoint("broker-a"), "T", offset)  # type: ignore[arg-type]
        offset = found.next_offset
    assert asked[0] == "master"
    assert set(asked[1:]) == {"replica"}
    assert [one.body for one in replica.broker.messages("T")] == [b"%d" % number for number in range(100)]


def _note(broker: Broker, name: str, asked: list[str]) -> None:
    call = broker.call

    def noted(request):  # type: ignore[no-untyped-def]
        asked.append(name)
        return call(request)

    broker.call = noted  # type: ignore[method-assign]


def test_a_route_keeps_no_consumer_that_is_gone() -> None:
    broker = opened()
    broker.create_topic("T", 1)
    replica = Replica.open("/copy", of=broker)
    route = ReplicaRoute(broker, replica)
    consumer = PushConsumer(route, "g")
    consumer.subscribe("T", print)
    consumer.start()
    manual(broker).advance(1000)
    gone = weakref.ref(consumer)
    consumer.shutdown()
    del consumer
    manual(broker).advance(200_000)
    gc.collect()
    assert gone() is None
    replica.close()


def test_a_pull_is_answered_when_its_master_goes_as_it_returns() -> None:
    """The master dies after it has held the pull, before its answer is back."""
    broker = opened()
    broker.create_topic("T", 1)
    replica = Replica.open("/copy", of=broker)
    told: list[bool] = []

    class Dying:
        """The broker, which dies as it answers a pull."""

        def __getattr__(self, name: str) -> Any:
            return getattr(broker, name)

        def endpoint(self, _: str) -> Any:
            return self

        def call(self, request: Any) -> Any:
            answer = broker.call(request)
            broker.abandon()
            return answer

    route = ReplicaRoute(cast(Any, Dying()), replica)
    pull(cast(Any, route.endpoint(broker.name)), "T", notify=lambda: told.append(True))
    assert told == [True]
    replica.close()


def test_a_route_needs_one_replica_a_broker() -> None:
    broker = opened()
    replica = Replica.open("/copy", of=broker)
    other = Replica.open("/other", of=broker)
    with pytest.raises(ConfigError, match="two replicas of broker 'broker-a'"):
        ReplicaRoute(broker, replica, other)
    with pytest.raises(ConfigError, match="another runner"):
        ReplicaRoute(opened(), replica)
    route = ReplicaRoute(broker, replica)
    with pytest.raises(NoRouteError):
        route.endpoint("nowhere")
    broker.close()
    assert route.endpoint("broker-a").call(QueryOffset("g", "T", 0)) == 0
    replica.close()
    with pytest.raises(BrokerUnreachableError):
        route.endpoint("broker-a").call(QueryOffset("g", "T", 0))
    manual(broker).advance(1000)


def test_a_consumer_that_starts_while_the_master_is_gone_reads_from_the_replica() -> None:
    broker = opened()
    send(broker, "T", b"before")
    replica = Replica.open("/copy", of=broker)
    runner = manual(broker)
    broker.abandon()
    got: list[bytes] = []
    consumer = PushConsumer(ReplicaRoute(broker, replica), "g", consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("T", lambda message: got.append(message.body))
    with consumer:
        runner.advance(30_000)
    assert got == [b"before"]


def test_a_client_joins_after_a_replica_was_promoted() -> None:
    """The route leads to the brokers alone then."""
    broker = opened()
    replica = Replica.open("/copy", of=broker)
    route = ReplicaRoute(broker, replica)
    replica.promote()
    consumer = PushConsumer(route, "g")
    consumer.subscribe("T", lambda message: None)
    with consumer:
        assert len(broker.clients()) == 1
