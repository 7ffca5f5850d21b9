"""The kit with replicas: faults of their links, their death and promotion, latency, and exploring all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from librmq import BrokerUnreachableError, ConfigError, MessageQueue, SendTimeoutError
from librmq.broker import BrokerConfig
from librmq.broker._replication import Replication
from librmq.client.sender import SendResult
from librmq.protocol import SendStatus
from librmq.testing import Kit, ProcessStateError, explore

MINUTE = 60


def bodies(rmq: Kit) -> list[bytes]:
    return [one.body for one in rmq.delivered("billing")]


def start(rmq: Kit) -> None:
    rmq.consumer("billing").subscribe("orders")(lambda message: None)


def send(rmq: Kit, body: bytes = b"x") -> SendResult:
    return rmq.producer("shop").send("orders", body)


def test_a_send_waits_for_the_replica_of_the_kit(rmq: Kit) -> None:
    replica = rmq.replica(sync=True)
    assert send(rmq).status is SendStatus.SEND_OK
    assert len(replica.messages("orders")) == 1
    rmq.faults.cut("broker-a", replica.name, seconds=10)
    assert send(rmq).status is SendStatus.FLUSH_SLAVE_TIMEOUT
    rmq.advance(seconds=30)
    assert send(rmq).status is SendStatus.SEND_OK
    rmq.faults.delay("broker-a", "broker-a-copy", 2)
    before = rmq.clock.now_ms()
    assert send(rmq).status is SendStatus.SEND_OK
    assert rmq.clock.now_ms() - before == 2000
    rmq.faults.delay("broker-a", "broker-a-copy", 4)
    with pytest.raises(SendTimeoutError, match="the message is stored"):
        send(rmq)
    rmq.faults.delay("broker-a", "broker-a-copy", 0)
    replica.crash(down=60)
    assert send(rmq).status is SendStatus.FLUSH_SLAVE_TIMEOUT
    rmq.advance(seconds=30)
    assert send(rmq).status is SendStatus.SLAVE_NOT_AVAILABLE
    rmq.advance(seconds=60)
    assert send(rmq).status is SendStatus.SEND_OK
    assert len(replica.messages("orders")) == 8
    assert "broker-a-copy is back" in str(rmq.history())


def test_a_replica_of_the_kit_follows_asynchronously(rmq: Kit) -> None:
    replica = rmq.replica()
    assert send(rmq).status is SendStatus.SEND_OK
    assert replica.messages("orders") == []
    rmq.advance(seconds=1)
    assert len(replica.messages("orders")) == 1
    rmq.faults.cut("broker-a", replica.name)
    send(rmq)
    rmq.advance(seconds=1)
    assert len(replica.messages("orders")) == 1
    rmq.faults.heal("broker-a", replica.name)
    assert replica.follow()
    assert len(replica.messages("orders")) == 2


def test_consumers_of_the_kit_read_from_a_replica(rmq: Kit) -> None:
    """While their broker is down, and while only their own link to it is cut."""
    rmq.replica()
    start(rmq)
    send(rmq, b"1")
    rmq.run_until_idle()
    rmq.faults.cut("billing", "broker-a")
    send(rmq, b"2")
    rmq.advance(minutes=1)
    assert bodies(rmq) == [b"1", b"2"]
    rmq.faults.heal("billing", "broker-a")
    rmq.advance(minutes=1)
    send(rmq, b"3")
    rmq.advance(ms=100)  # the replica has it, and the consumer did not have it yet
    rmq.crash_broker(down=5 * MINUTE)
    with pytest.raises(BrokerUnreachableError):
        send(rmq)
    rmq.advance(minutes=10)
    send(rmq, b"4")
    rmq.run_until_idle()
    assert list(dict.fromkeys(bodies(rmq))) == [b"1", b"2", b"3", b"4"]


def test_a_promoted_replica_takes_its_masters_place(rmq: Kit) -> None:
    """The copy has the progress of up to 15 s before, so a new consumer gets messages again, every second of them."""
    rmq.cluster(brokers=2).create_topic("orders", 1)
    replica = rmq.replica("broker-b", sync=True)
    start(rmq)
    with pytest.raises(ProcessStateError, match="because broker-b runs: crash only the master"):
        replica.promote()
    for number in range(56):
        send(rmq, b"%d" % number)
        rmq.advance(seconds=1)
    rmq.crash_broker("broker-b", down=5 * MINUTE)
    promoted = replica.promote()
    rmq.crash(next(process for process in rmq.processes if process.name == "billing"))
    assert rmq.network.named("broker-b") is promoted
    rmq.advance(minutes=10)
    names = {send(rmq, b"new %d" % number).queue.broker_name for number in range(4)}
    rmq.run_until_idle()
    assert names == {"broker-a", "broker-b"}
    got = bodies(rmq)
    assert len(set(got)) == 60
    assert 0 < len([one for one in rmq.delivered("billing") if one.broker_name == "broker-b"]) - 30 <= 15 / 2 + 1
    rmq.crash_broker("broker-b")
    assert len(rmq.messages("orders")) == 60


@pytest.mark.parametrize("dies", [True, False])
def test_a_promotion_excuses_what_the_copy_never_had(rmq: Kit, dies: bool) -> None:
    """A consumer that has read those messages and lives on skips what the copy stores in their places."""
    rmq.broker.create_topic("orders", 1)
    replica = rmq.replica()
    start(rmq)
    send(rmq, b"copied")
    rmq.advance(seconds=10)
    rmq.faults.cut("broker-a", replica.name)
    send(rmq, b"read")
    rmq.advance(seconds=6)
    rmq.producer("shop").send("orders", b"delayed", delay_level=3)
    rmq.crash_broker(down=MINUTE)
    replica.promote()
    if dies:
        rmq.crash(next(process for process in rmq.processes if process.name == "billing"))
    else:
        rmq.expect("progress-ahead")
    rmq.faults.heal("broker-a", replica.name)
    send(rmq, b"in its place")
    rmq.advance(minutes=2)
    send(rmq, b"behind it")
    rmq.run_until_idle()
    assert bodies(rmq) == [b"copied", b"read", *[b"in its place"] * dies, b"behind it"]
    events = rmq.events()
    outcomes = [event["outcome"] for event in events if event["event"] == "send"]
    assert outcomes == ["ok", "unknown", "unknown", "ok", "ok"]
    assert {event["broker"] for event in events if event["event"] == "deliver"} == {"broker-a", "broker-a~1"}
    assert [event["event"] for event in events][-1] == "drained"


def test_a_lost_site_takes_its_replica_with_it(rmq: Kit) -> None:
    rmq.cluster(brokers=1, sites=["hz", "sh"]).create_topic("orders", 1)
    replica = rmq.replica("hz-broker-a", site="sh")
    assert replica.name == "sh-hz-broker-a-copy"
    rmq.lose_site("sh", down=60)
    assert replica.dead
    rmq.advance(minutes=2)
    assert not replica.dead
    rmq.faults.cut("hz", "sh")
    assert not replica.follow()
    rmq.faults.heal("hz", "sh")
    assert replica.follow()


def test_wrong_replicas_are_named(rmq: Kit) -> None:
    rmq.replica()
    with pytest.raises(ConfigError, match="has the replica broker-a-copy: name another site"):
        rmq.replica()
    with pytest.raises(ConfigError, match="site: expected letters"):
        rmq.replica(site="s-1")
    with pytest.raises(ProcessStateError, match=r"rmq\.cluster replaces the broker"):
        rmq.cluster()
    send(rmq)
    with pytest.raises(ProcessStateError, match="call it before clients are made"):
        rmq.replica(site="sh", sync=True)
    with pytest.raises(ConfigError, match=r"'b' is not a broker, a process or a site: expected one of .*broker-a-copy"):
        rmq.faults.delay("broker-a", "b", 1)
    assert len(rmq.messages("orders")) == 1


def test_links_take_their_time(rmq: Kit) -> None:
    """A pull over a slow link brings a message later; other consumers and later pulls have their own time."""
    rmq.cluster(brokers=1, sites=["hz", "sh"]).create_topic("orders", 1)
    for site in ("hz", "sh"):
        consumer = rmq.consumer(f"at-{site}", site=site)
        consumer.subscribe("orders")(lambda message: None)
    rmq.run_until_idle()
    rmq.faults.delay("hz", "sh", 0.2)
    rmq.advance(seconds=5)
    begin = rmq.clock.now_ms()
    queue = MessageQueue("orders", "hz-broker-a", 0)
    rmq.producer("shop", site="hz").send("orders", b"1", queue=queue)
    assert rmq.clock.now_ms() == begin
    rmq.advance(seconds=5)
    rmq.producer("shop", site="sh").send("orders", b"2", queue=queue)
    rmq.advance(seconds=5)
    near, far = ([one.began_ms for one in rmq.delivered(f"at-{site}")] for site in ("hz", "sh"))
    assert near == [begin - rmq.history().begin_ms, begin + 5200 - rmq.history().begin_ms]
    assert [b - a for a, b in zip(near, far, strict=True)] == [200, 200]


def only_on_the_master(rmq: Kit) -> None:
    """An application with a planted bug: it ignores the status of its sends, and promotes the replica."""
    lose_the_master(rmq, lambda status: True)


def on_both(rmq: Kit) -> None:
    """The application without the bug: only SEND_OK counts."""
    lose_the_master(rmq, lambda status: status is SendStatus.SEND_OK)


def lose_the_master(rmq: Kit, counts: Callable[[SendStatus], bool]) -> None:
    rmq.cluster(brokers=2)
    replica = rmq.replica("broker-b", sync=True)
    for name in ("broker-a", "broker-b"):
        rmq.network.named(name).create_topic("orders", 1)
    start(rmq)
    sent = []
    for number in range(4):
        try:
            result = send(rmq, b"%d" % number)
        except BrokerUnreachableError:
            continue
        if counts(result.status) or result.queue.broker_name == "broker-a":
            sent.append(b"%d" % number)
        rmq.advance(seconds=1)
    if not rmq.network.named("broker-b").dead and not replica.dead:
        rmq.crash_broker("broker-b", down=5 * MINUTE)
        replica.promote()
    rmq.run_until_idle()
    rmq.advance(minutes=8)
    assert set(sent) <= {one.body for one in rmq.messages("orders")}
    assert set(sent) <= set(bodies(rmq))


def repeats_are_refused(rmq: Kit) -> None:
    """An application with a planted bug: it expects no message twice, which only a fail-over to the replica brings."""
    rmq.cluster(brokers=2).create_topic("orders", 1)
    rmq.replica("broker-b")
    start(rmq)
    for number in range(4):
        try:
            send(rmq, b"%d" % number)
        except BrokerUnreachableError:
            continue
        rmq.advance(seconds=8)
    rmq.run_until_idle()
    rmq.advance(minutes=3)
    got = bodies(rmq)
    assert len(set(got)) == len(got)


@pytest.mark.slow
@pytest.mark.parametrize("planted", [only_on_the_master, pytest.param(repeats_are_refused, marks=pytest.mark.slow)])
def test_a_schedule_finds_a_bug_that_needs_a_replica(planted: Callable[[Kit], None]) -> None:
    with pytest.raises(AssertionError) as caught:
        explore(planted, runs=300)
    told = caught.value.__notes__[-1]
    assert "the shortest schedule" in told
    assert "broker-b" in told


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_in_any_schedule() -> None:
    result = explore(on_both, runs=60)
    assert result.found is None
    assert result.chosen["fault"] > 5


@pytest.mark.slow
def test_a_schedule_finds_a_topic_that_the_replica_gets_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The master dies before the next copy of the tables."""
    follow_log = Replication.follow_log
    monkeypatch.setattr(Replication, "follow_log", lambda *call: replace(follow_log(*call), topics=None))
    with pytest.raises(AssertionError) as caught:
        explore(on_both, runs=400)
    assert "broker-b" in caught.value.__notes__[-1]


@pytest.mark.slow
@pytest.mark.rmq(broker_config=BrokerConfig(replication="sync"))
def test_a_broker_may_wait_for_replicas_from_the_start(rmq: Kit) -> None:
    assert send(rmq).status is SendStatus.SLAVE_NOT_AVAILABLE
    rmq.replica()
    assert send(rmq).status is SendStatus.SEND_OK
    assert len(rmq.messages("orders")) == 2
