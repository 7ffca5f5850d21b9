"""The router of sites: addresses, manual switches, probes, clients rebuilt without loss, capacity."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from librmq import Cluster, ManualRunner, Producer, PushConsumer, StoreConfig
from librmq.cluster import SiteRoute, SiteRouter
from librmq.errors import CapacityError, ClientStateError, ConfigError
from librmq.files._memory import MemoryFiles


@pytest.fixture
def runner() -> ManualRunner:
    return ManualRunner()


@pytest.fixture
def clusters(runner: ManualRunner) -> Iterator[dict[str, Cluster]]:
    made = {}
    for site in ("hz", "sh"):
        made[site] = Cluster.open(
            f"/{site}", [f"{site}-a"], runner=runner, files=MemoryFiles(), store_config=StoreConfig.tiny()
        )
        made[site].create_topic("T", 1)
    yield made
    for cluster in made.values():
        cluster.close()


HOMES = {"hz": "hz", "sh": "sh"}


def shop(route: SiteRoute) -> Producer:
    return Producer(route, "shop").start()


def send(routed: object) -> str:
    return str(routed.run(lambda producer: producer.send("T", b"x").queue.broker_name))  # type: ignore[attr-defined]


class Billing:
    """Creates consumers, and records which of them received what."""

    def __init__(self) -> None:
        self.got: list[str] = []

    def __call__(self, route: SiteRoute) -> PushConsumer:
        consumer = PushConsumer(route, "billing")
        consumer.subscribe("T", lambda message: self.got.append(message.broker_name))
        consumer.start()
        return consumer


def test_a_switch_by_hand_rebuilds_clients(clusters: dict[str, Cluster], runner: ManualRunner) -> None:
    router = SiteRouter(clusters, HOMES)
    producer = router.producer("hz", shop)
    old = producer.current
    assert (router.address("hz"), send(producer)) == ("hz", "hz-a")
    router.switch("hz", "sh")
    assert (router.address("hz"), send(producer)) == ("sh", "sh-a")
    assert producer.current.client.client_id.startswith("hz-")
    with pytest.raises(ClientStateError):
        old.send("T", b"x")
    router.switch("hz", "sh")
    assert [(one.site, one.before, one.after, one.why) for one in router.switches] == [("hz", "hz", "sh", "by hand")]
    router.close()


def test_a_call_in_a_switch_is_not_lost(clusters: dict[str, Cluster]) -> None:
    router = SiteRouter(clusters, HOMES)
    routed = router.producer("hz", shop)

    def send_through(producer: Producer) -> str:
        router.switch("hz", "sh")  # runs in another thread meanwhile
        return producer.send("T", b"x").queue.broker_name

    first = routed.current
    assert routed.run(send_through) == "hz-a"
    assert "shut down" in repr(first)
    assert send(routed) == "sh-a"
    router.close()


@pytest.mark.parametrize("moves", [False, True])
def test_whether_consumers_move_is_a_choice(clusters: dict[str, Cluster], runner: ManualRunner, moves: bool) -> None:
    router, billing = SiteRouter(clusters, HOMES, moves_consumers=moves), Billing()
    router.consumer("hz", billing)
    for name in ("hz", "sh"):
        with Producer(clusters[name], "p") as producer:
            producer.send("T", b"x")
    runner.advance(1_000)
    assert billing.got == ["hz-a"]
    router.switch("hz", "sh")
    runner.advance(1_000)
    assert billing.got == (["hz-a", "sh-a"] if moves else ["hz-a"])
    router.close()


def test_a_consumer_that_does_not_move_is_at_home(clusters: dict[str, Cluster], runner: ManualRunner) -> None:
    """Even if it is created while its site uses another cluster."""
    router, billing = SiteRouter(clusters, HOMES), Billing()
    router.switch("hz", "sh")
    made = router.consumer("hz", billing)
    for name in ("hz", "sh"):
        with Producer(clusters[name], "p") as producer:
            producer.send("T", b"x")
    runner.advance(1_000)
    assert billing.got == ["hz-a"]
    router.release(made)
    router.close()
    assert made.current.is_running
    made.current.shutdown()


def test_a_probe_switches_and_comes_home(clusters: dict[str, Cluster], runner: ManualRunner) -> None:
    router = SiteRouter(clusters, HOMES)
    router.probe(every=5, failures=3)
    producer = router.producer("hz", shop)
    runner.advance(60_000)
    clusters["hz"].crash("hz-a")
    runner.advance(14_999)
    assert router.address("hz") == "hz"
    runner.advance(1)
    assert (router.address("hz"), send(producer)) == ("sh", "sh-a")
    clusters["hz"].reopen("hz-a")
    runner.advance(15_000)
    assert (router.address("hz"), send(producer)) == ("hz", "hz-a")
    assert [one.why for one in router.switches] == ["hz is out of reach", "it is back"]
    router.close()
    clusters["hz"].crash("hz-a")
    runner.advance(60_000)
    assert len(router.switches) == 2


def test_a_probe_finds_what_was_out_of_reach_before(clusters: dict[str, Cluster], runner: ManualRunner) -> None:
    clusters["hz"].cut("hz-a")
    router = SiteRouter(clusters, HOMES)
    router.probe(every=5, failures=3)
    runner.advance(15_000)
    assert (router.address("hz"), router.address("sh")) == ("sh", "sh")
    clusters["hz"].restore("hz-a")
    runner.advance(15_000)
    assert router.address("hz") == "hz"
    router.close()


def test_a_failing_factory_keeps_no_other_client(
    clusters: dict[str, Cluster], runner: ManualRunner, caplog: pytest.LogCaptureFixture
) -> None:
    """The other clients of the site are rebuilt; a repeated switch rebuilds the one that is left."""
    router = SiteRouter(clusters, HOMES)
    is_failing = False

    def failing(route: SiteRoute) -> Producer:
        if is_failing:
            raise ValueError("no credentials")
        return Producer(route, "failing").start()

    first, second = router.producer("hz", failing), router.producer("hz", shop)
    is_failing = True
    with pytest.raises(ValueError, match="no credentials"):
        router.switch("hz", "sh")
    assert (send(first), send(second)) == ("hz-a", "sh-a")
    is_failing = False
    router.switch("hz", "sh")
    assert (send(first), len(router.switches)) == ("sh-a", 1)
    router.probe()
    is_failing = True
    clusters["sh"].cut("sh-a")
    runner.advance(60_000)
    assert send(second) == "hz-a"  # as the other site
    assert (router.address("hz"), router.address("sh")) == ("hz", "hz")
    assert "a client could not be rebuilt for cluster hz: no credentials" in caplog.text
    router.close()


def test_a_short_outage_switches_nothing(clusters: dict[str, Cluster], runner: ManualRunner) -> None:
    router = SiteRouter(clusters, HOMES)
    router.probe()
    clusters["hz"].crash("hz-a")
    runner.advance(12_000)
    clusters["hz"].reopen("hz-a")
    runner.advance(60_000)
    assert router.switches == []


def test_capacity_is_checked_first(
    clusters: dict[str, Cluster], runner: ManualRunner, caplog: pytest.LogCaptureFixture
) -> None:
    router = SiteRouter(clusters, HOMES, capacity={"sh": 150}, load={"hz": 100, "sh": 100})
    producer = router.producer("hz", shop)
    with pytest.raises(CapacityError, match="cluster sh takes 150, and hz, sh would need 200"):
        router.switch("hz", "sh")
    assert (router.address("hz"), send(producer), router.switches) == ("hz", "hz-a", [])
    router.probe()
    clusters["hz"].crash("hz-a")
    runner.advance(60_000)
    assert router.address("hz") == "hz"
    assert "site hz stays without a cluster" in caplog.text
    router.close()


def test_wrong_routers_are_named(clusters: dict[str, Cluster]) -> None:
    with pytest.raises(ConfigError, match="at least one cluster"):
        SiteRouter({}, HOMES)
    with pytest.raises(ConfigError, match="site 'bj': no cluster serves it: found 'bj', expected hz, sh"):
        SiteRouter(clusters, {"bj": "bj"})
    with pytest.raises(ConfigError, match="load: 'bj' is none of hz, sh"):
        SiteRouter(clusters, HOMES, load={"bj": 1})
    with pytest.raises(CapacityError, match="cluster hz takes 1"):
        SiteRouter(clusters, HOMES, capacity={"hz": 1}, load={"hz": 2})
    with (
        Cluster.open("/o", ["o"], runner=ManualRunner(), files=MemoryFiles()) as other,
        pytest.raises(ConfigError, match="one runner"),
    ):
        SiteRouter({**clusters, "o": other}, HOMES)
    router = SiteRouter(clusters, HOMES)
    with pytest.raises(ConfigError, match="unknown site 'bj'"):
        router.switch("bj", "hz")
    with pytest.raises(ConfigError, match="unknown cluster 'bj'"):
        router.switch("hz", "bj")
