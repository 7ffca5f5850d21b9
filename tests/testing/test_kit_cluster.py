"""The kit with several brokers and sites: faults of brokers, links and sites, and exploring all of them."""

from __future__ import annotations

from contextlib import suppress

import pytest

from librmq import BrokerUnreachableError, ConfigError, select_by_hash
from librmq.client.allocation import allocate_by_site
from librmq.testing import Kit, ProcessStateError, explore
from tests.histories import check_drained


def bodies(rmq: Kit, group: str = "billing") -> list[bytes]:
    return [one.body for one in rmq.delivered(group)]


def start(rmq: Kit, **settings: object) -> None:
    rmq.consumer("billing", **settings).subscribe("orders")(lambda message: None)  # type: ignore[arg-type]


def send(rmq: Kit, count: int, site: str | None = None, **settings: object) -> list[str]:
    producer = rmq.producer("shop", site=site, **settings)  # type: ignore[arg-type]
    return [producer.send("orders", b"%d" % number).queue.broker_name for number in range(count)]


def test_a_crashed_broker_is_avoided_and_comes_back(rmq: Kit) -> None:
    rmq.cluster(brokers=2).create_topic("orders", 2)
    start(rmq)
    assert set(send(rmq, 4)) == {"broker-a", "broker-b"}
    rmq.crash_broker("broker-b", down=30)
    assert set(send(rmq, 4)) == {"broker-a"}
    rmq.advance(minutes=2)
    assert set(send(rmq, 4)) == {"broker-a", "broker-b"}
    rmq.run_until_idle()
    assert {one.broker_name for one in rmq.delivered("billing")} == {"broker-a", "broker-b"}
    assert set(bodies(rmq)) == {b"0", b"1", b"2", b"3"}
    assert "broker-b dies" in str(rmq.history())
    assert "gets orders/broker-b/" in str(rmq.history())
    assert len(rmq.messages("orders")) == 12
    assert {queue.broker_name for queue in rmq.offsets("billing")} == {"broker-a", "broker-b"}


@pytest.mark.parametrize("fault", ["refuse", "late"])
def test_a_broker_that_refuses_or_is_late_is_avoided(rmq: Kit, fault: str) -> None:
    rmq.cluster(brokers=2).create_topic("orders", 2)
    start(rmq)
    producer = rmq.producer("shop", avoid_slow_brokers=True, timeout=60)
    if fault == "refuse":
        rmq.faults.refuse_send(broker="broker-b")
    else:
        rmq.faults.late_answer(2, broker="broker-b")
    first = [producer.send("orders", b"x").queue.broker_name for _ in range(4)]
    assert first.count("broker-b") == (fault == "late")
    assert {producer.send("orders", b"x").queue.broker_name for _ in range(4)} == {"broker-a"}
    rmq.advance(minutes=11)
    assert {producer.send("orders", b"x").queue.broker_name for _ in range(4)} == {"broker-a", "broker-b"}
    rmq.run_until_idle()


def test_a_cut_link_heals_by_itself(rmq: Kit) -> None:
    rmq.cluster(brokers=2).create_topic("orders", 2)
    start(rmq)
    send(rmq, 4)
    rmq.run_until_idle()
    rmq.faults.cut("billing", "broker-b", seconds=40)
    send(rmq, 4)
    rmq.run_until_idle()
    assert len(bodies(rmq)) == 6
    rmq.advance(minutes=2)
    assert len(bodies(rmq)) == 8


def test_a_shorter_cut_leaves_a_longer_one(rmq: Kit) -> None:
    """The first cut ends after 20 s, the second after 65 s; then they heal on request, and a later cut lasts."""
    rmq.cluster(brokers=2).create_topic("orders", 2)
    start(rmq)
    rmq.run_until_idle()
    rmq.faults.cut("billing", "broker-b", seconds=20)
    rmq.advance(seconds=5)
    rmq.faults.cut("broker-b", "billing", seconds=60)
    rmq.advance(seconds=40)
    send(rmq, 4)
    rmq.run_until_idle()
    assert len(bodies(rmq)) == 2
    assert "works again" not in str(rmq.history())
    rmq.faults.heal("billing", "broker-b")
    rmq.faults.cut("billing", "broker-b")
    rmq.advance(minutes=2)
    assert len(bodies(rmq)) == 2
    rmq.faults.heal("billing", "broker-b")
    rmq.advance(minutes=2)
    assert len(bodies(rmq)) == 4


def test_a_broker_reopened_by_the_cluster_is_used(rmq: Kit) -> None:
    cluster = rmq.cluster(brokers=2)
    cluster.create_topic("orders", 2)
    start(rmq)
    assert set(send(rmq, 4)) == {"broker-a", "broker-b"}
    cluster.crash("broker-b")
    assert set(send(rmq, 4)) == {"broker-a"}
    assert len(rmq.messages("orders")) == 8  # the store of the dead broker is read too
    cluster.reopen("broker-b")
    rmq.advance(minutes=2)
    assert set(send(rmq, 4)) == {"broker-a", "broker-b"}
    cluster.add_broker("broker-c").create_topic("orders", 2)
    rmq.advance(minutes=2)
    assert set(send(rmq, 6)) == {"broker-a", "broker-b", "broker-c"}
    cluster.cut("broker-c")
    assert set(send(rmq, 4)) == {"broker-a", "broker-b"}
    cluster.restore("broker-c")
    rmq.advance(minutes=2)
    assert len(bodies(rmq)) == 22
    assert [broker.name for broker in rmq.brokers()] == ["broker-a", "broker-b", "broker-c"]
    history = str(rmq.history())
    assert "broker-b is back" in history
    assert "broker-c joins" in history


def test_an_earlier_crash_does_not_end_a_later_one(rmq: Kit) -> None:
    cluster = rmq.cluster(brokers=2)
    rmq.crash_broker("broker-b", down=20)
    cluster.reopen("broker-b")
    rmq.crash_broker("broker-b", down=60)
    rmq.advance(seconds=40)
    assert cluster.broker("broker-b").dead
    rmq.advance(seconds=40)
    assert not cluster.broker("broker-b").dead


def test_a_lost_site_returns(rmq: Kit) -> None:
    rmq.cluster(brokers=1, sites=["hz", "sh"]).create_topic("orders", 2)
    for site in ("hz", "sh"):
        start(rmq, site=site, strategy=allocate_by_site())
    assert set(send(rmq, 4, "hz", nearby=True)) == {"hz-broker-a"}
    rmq.run_until_idle()
    assert {one.process for one in rmq.delivered("billing")} == {"billing"}
    rmq.lose_site("hz", down=300)
    assert set(send(rmq, 4, "sh", nearby=True)) == {"sh-broker-a"}
    rmq.advance(minutes=1)
    assert {one.process for one in rmq.delivered("billing")[4:]} == {"billing-2"}
    rmq.advance(minutes=10)
    assert set(send(rmq, 4, "hz")) == {"hz-broker-a", "sh-broker-a"}
    rmq.run_until_idle()
    assert {one.process for one in rmq.delivered("billing")[8:]} == {"billing~2", "billing-2"}


@pytest.mark.parametrize("down", [0, 60])
def test_a_listener_loses_its_own_site(rmq: Kit, down: int) -> None:
    rmq.cluster(brokers=1, sites=["hz", "sh"]).create_topic("orders", 2)
    dead: list[list[str]] = []

    def bill(message: object) -> None:
        if not dead:
            dead.append([])
            rmq.lose_site("hz", down=down)
            dead.append(["the listener goes on"])

    rmq.consumer("billing", site="hz").subscribe("orders")(bill)
    rmq.consumer("audit", site="hz").subscribe("orders")(lambda message: None)
    rmq.consumer("audit", site="sh").subscribe("orders")(lambda message: None)
    send(rmq, 1, "hz")
    rmq.run_until_idle()
    dead.append([process.label for process in rmq.processes if process.dead])
    rmq.advance(minutes=5)
    living = {process.label for process in rmq.processes if not process.dead and not process.is_test}
    assert dead == [[], ["billing", "audit"]]
    assert living == {"billing~2", "audit~2", "audit-2"}
    assert set(bodies(rmq)) == set(bodies(rmq, "audit")) == {b"0"}


def test_sites_that_cannot_reach_each_other(rmq: Kit) -> None:
    rmq.cluster(brokers=1, sites=["hz", "sh"]).create_topic("orders", 2)
    start(rmq, site="hz", strategy=allocate_by_site())
    rmq.faults.cut("hz", "sh")
    strict = rmq.producer("strict", site="hz")
    far = next(queue for queue in strict.queues("orders") if queue.broker_name == "sh-broker-a")
    with pytest.raises(BrokerUnreachableError, match="cannot be reached from test-hz"):
        strict.send("orders", b"x", queue=far)
    assert set(send(rmq, 2, "sh", nearby=True)) == {"sh-broker-a"}
    rmq.advance(minutes=1)
    assert bodies(rmq) == []
    rmq.faults.heal("hz", "sh")
    rmq.advance(minutes=1)
    assert bodies(rmq) == [b"0", b"1"]


def test_wrong_clusters_are_named(rmq: Kit) -> None:
    with pytest.raises(ConfigError, match="sites: sh would have no broker"):
        rmq.cluster(brokers=["hz-a"], sites=["hz", "sh"])
    with pytest.raises(ConfigError, match="brokers: expected 1 to 26"):
        rmq.cluster(brokers=0)
    with pytest.raises(ConfigError, match="expected each site once"):
        rmq.cluster(sites=["hz", "hz"])
    with pytest.raises(ConfigError, match="two brokers are named 'a'"):
        rmq.cluster(brokers=["a", "a"])
    rmq.cluster(brokers=["a", "b"])
    with pytest.raises(ProcessStateError, match="call it once"):
        rmq.cluster()
    for change in (rmq.faults.cut, rmq.faults.heal):
        with pytest.raises(ConfigError, match="'c' is not a broker, a process or a site"):
            change("a", "c")
    assert "works again" not in str(rmq.history())
    with pytest.raises(ConfigError, match="site 'hz' has no broker"):
        rmq.lose_site("hz", down=1)


def lost_in_an_outage(rmq: Kit) -> None:
    """An application with a planted bug: it gives up a send at its first error, which only an outage causes."""
    rmq.cluster(brokers=2).create_topic("orders", 1)
    rmq.consumer("billing").subscribe("orders")(lambda message: None)
    producer, missed = rmq.producer(), []
    for number in range(4):
        try:
            producer.send("orders", b"%d" % number, selector=select_by_hash, arg="ab"[number % 2])
        except BrokerUnreachableError:
            missed.append(number)
        rmq.advance(seconds=5)
    rmq.run_until_idle()
    rmq.advance(minutes=3)
    assert {one.body for one in rmq.delivered("billing")} == {b"0", b"1", b"2", b"3"}, missed


@pytest.mark.slow
def test_a_schedule_lets_a_broker_fail() -> None:
    with pytest.raises(AssertionError) as caught:
        explore(lost_in_an_outage, runs=300)
    told = caught.value.__notes__[-1]
    assert "crashes" in told or "unreachable" in told
    assert "the shortest schedule" in told


def at_least_once(rmq: Kit) -> None:
    """Send over two brokers and two sites; the history of every schedule is judged."""
    rmq.cluster(brokers=1, sites=["hz", "sh"]).create_topic("orders", 1)
    for site in ("hz", "sh"):
        consumer = rmq.consumer("billing", site=site, strategy=allocate_by_site())
        consumer.subscribe("orders")(lambda message: None)
    for number in range(4):
        with suppress(BrokerUnreachableError):
            rmq.producer("shop", site=("hz", "sh")[number % 2]).send("orders", b"%d" % number)
            rmq.advance(seconds=1)
    rmq.run_until_idle()
    rmq.advance(minutes=3)
    check_drained(rmq, "billing")


@pytest.mark.slow
def test_nothing_is_lost_in_any_schedule_over_two_sites() -> None:
    result = explore(at_least_once, runs=60)
    assert result.found is None
    assert result.chosen["fault"] > 5
