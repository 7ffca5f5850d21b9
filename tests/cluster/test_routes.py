"""Several brokers behind one route: what clients notice, and when."""

from __future__ import annotations

import pytest

from librmq.broker import Broker
from librmq.client.producer import Producer
from librmq.cluster import Cluster, RouteTable
from librmq.config import StoreConfig
from librmq.errors import BrokerUnreachableError, ConfigError, NoRouteError
from librmq.files._memory import MemoryFiles
from librmq.protocol import MaxOffset, Subscription
from librmq.runtime import ManualRunner
from tests.broker.parties import beat


def broker(name: str, runner: ManualRunner, files: MemoryFiles | None = None) -> Broker:
    return Broker.open("/b", name=name, runner=runner, files=files or MemoryFiles(), store_config=StoreConfig.tiny())


class TwoBrokers:
    """Brokers a and b with a topic; the files of b outlast it."""

    def __init__(self) -> None:
        self.runner, self.files = ManualRunner(), MemoryFiles()
        self.a, self.b = broker("a", self.runner), broker("b", self.runner, self.files)
        for member in (self.a, self.b):
            member.create_topic("T", 2)


@pytest.fixture
def two() -> TwoBrokers:
    return TwoBrokers()


def names(routes: RouteTable, topic: str = "T") -> list[str]:
    return [data.broker_name for data in routes.topic_route(topic)]


class Told:
    def __init__(self, routes: RouteTable) -> None:
        self.times = 0
        self.end = routes.watch(self.tell)

    def tell(self) -> None:
        self.times += 1


def test_a_topic_is_where_any_broker_has_it() -> None:
    runner = ManualRunner()
    a, b = broker("a", runner), broker("b", runner)
    routes = RouteTable(b, a)
    told = Told(routes)
    a.create_topic("T", 2)
    b.create_topic("T", 3)
    b.create_topic("U")
    assert [(data.broker_name, data.read_queues) for data in routes.topic_route("T")] == [("a", 2), ("b", 3)]
    assert names(routes, "U") == ["b"]
    assert routes.broker_names() == ("a", "b")
    assert routes.brokers() == (a, b)
    assert routes.endpoint("b").call(MaxOffset("T", 0)) == 0
    assert told.times == 3
    told.end()
    a.create_topic("V")
    assert told.times == 3
    with pytest.raises(NoRouteError, match="a, b"):
        routes.endpoint("c")


def test_a_closed_broker_stays_in_the_route_for_up_to_30_s(two: TwoBrokers) -> None:
    routes = RouteTable(two.a, two.b)
    two.runner.advance(1_000)
    told = Told(routes)
    two.b.close()
    assert (names(routes), routes.broker_names(), told.times) == (["a", "b"], ("a",), 1)
    with pytest.raises(BrokerUnreachableError):
        routes.endpoint("b").call(MaxOffset("T", 0))
    two.runner.advance(28_999)
    assert (names(routes), told.times) == (["a", "b"], 1)
    two.runner.advance(1)
    assert (names(routes), told.times) == (["a"], 2)
    again = broker("b", two.runner, two.files)
    routes.add(again)
    assert routes.endpoint("b").call(MaxOffset("T", 0)) == 0
    assert names(routes) == ["a"]
    two.runner.advance(30_000)
    assert (names(routes), routes.broker_names()) == (["a", "b"], ("a", "b"))
    assert two.runner.next_due_ms() is None


@pytest.mark.parametrize(
    ("settings", "last_ms"), [({}, 148_999), ({"poll_s": 4, "expiry_s": 10}, 10_999)], ids=["150 s", "chosen"]
)
def test_a_killed_broker_stays_until_a_look_after_its_expiry(
    two: TwoBrokers, settings: dict[str, int], last_ms: int
) -> None:
    routes = RouteTable(two.a, two.b, **settings)
    two.runner.advance(1_000)
    two.b.abandon()
    two.runner.advance(last_ms)
    assert names(routes) == ["a", "b"]
    two.runner.advance(1)
    assert names(routes) == ["a"]


def test_a_quickly_reopened_broker_stays_in_the_route(two: TwoBrokers) -> None:
    routes = RouteTable(two.a, two.b)
    two.b.abandon()
    assert routes.broker_names() == ("a",)
    routes.add(broker("b", two.runner, two.files))
    assert (names(routes), routes.broker_names()) == (["a", "b"], ("a", "b"))
    two.runner.advance(600_000)
    assert names(routes) == ["a", "b"]


def test_a_broker_out_of_reach_loses_its_clients() -> None:
    runner = ManualRunner()
    a = broker("a", runner)
    routes = RouteTable(a)
    beat(a, Subscription("T"))
    routes.cut("a")
    with pytest.raises(BrokerUnreachableError, match="a cannot be reached"):
        routes.endpoint("a").call(MaxOffset("T", 0))
    assert (a.clients(), routes.broker_names()) == ((), ())
    routes.restore("a")
    assert routes.endpoint("a").call(MaxOffset("T", 0)) == 0
    a.close()
    routes.cut("a")
    with pytest.raises(NoRouteError):
        routes.cut("b")


def test_a_cut_outlasts_its_broker(two: TwoBrokers) -> None:
    """A broker that is opened again stays out of reach until its connection is restored."""
    routes = RouteTable(two.a, two.b)
    routes.cut("b")
    two.b.abandon()
    routes.add(broker("b", two.runner, two.files))
    with pytest.raises(BrokerUnreachableError, match="b cannot be reached"):
        routes.endpoint("b").call(MaxOffset("T", 0))
    two.runner.advance(180_000)
    assert names(routes) == ["a"]
    routes.restore("b")
    assert routes.endpoint("b").call(MaxOffset("T", 0)) == 0
    two.runner.advance(60_000)
    assert names(routes) == ["a", "b"]


def test_a_new_broker_is_noticed_at_the_next_update() -> None:
    runner = ManualRunner()
    routes = RouteTable(broker("a", runner))
    told = Told(routes)
    new = broker("b", runner)
    new.create_topic("T")
    routes.add(new)
    assert (names(routes), routes.broker_names()) == ([], ("a",))
    runner.advance(30_000)
    assert (names(routes), routes.broker_names()) == (["b"], ("a", "b"))
    assert told.times == 2


def test_values_that_are_not_routes() -> None:
    runner = ManualRunner()
    with pytest.raises(ConfigError, match="at least one"):
        RouteTable()
    with pytest.raises(ConfigError, match="two brokers"):
        RouteTable(broker("a", runner), broker("a", runner))
    with pytest.raises(ConfigError, match="runner"):
        RouteTable(broker("a", runner), broker("b", ManualRunner()))


def test_two_clusters_may_share_a_route_table() -> None:
    """Messages carry the name of their cluster; a topic is on the brokers of both clusters if both have it."""
    runner, files = ManualRunner(), MemoryFiles()
    store = StoreConfig.tiny()
    with (
        Cluster.open("/1", ["a"], name="first", runner=runner, files=files, store_config=store) as first,
        Cluster.open("/2", ["b"], name="second", runner=runner, files=files, store_config=store) as second,
    ):
        table = RouteTable(*first.brokers(), *second.brokers())
        first.create_topic("shared", 1)
        second.create_topic("shared", 1)
        second.create_topic("own", 1)
        producer = Producer(table, "p")
        assert {producer.send("shared", b"x").queue.broker_name for _ in range(4)} == {"a", "b"}
        assert {producer.send("own", b"x").queue.broker_name for _ in range(2)} == {"b"}
        for cluster, broker in ((first, "a"), (second, "b")):
            stored = cluster.broker(broker).messages("shared")
            assert {message.properties["CLUSTER"] for message in stored} == {cluster.name}
        first.crash("a")
        assert {producer.send("shared", b"x").queue.broker_name for _ in range(4)} == {"b"}
        table.add(first.reopen("a"))
        runner.advance(60_000)
        assert {producer.send("shared", b"x").queue.broker_name for _ in range(4)} == {"a", "b"}
        producer.shutdown()
