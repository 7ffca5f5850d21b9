"""Slaves of brokers over TCP: they serve reads that the master suggests or can't serve, and never sends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import librmq
from librmq import Broker, BrokerUnreachableError, ConsumeFrom, NoRouteError
from librmq.cluster import Replica
from librmq.protocol import MaxOffset, PullMessage, PullStatus, QueryOffset, Subscription
from librmq.wire.remoting import RemotingServer
from librmq.wire.remoting._frames import Frame, answer_to
from librmq.wire.remoting._headers import RequestCode
from tests.wire.fake_servers import FakeServer
from tests.wire.test_connect import WAIT_S, Inbox, until


class Pair:
    """A master named ``fake`` and its replica, each behind a port, and a name server that knows both."""

    def __init__(self, stack: ExitStack, folder: str) -> None:
        self.master = stack.enter_context(Broker.open(f"{folder}/master", name="fake"))
        self.master.create_topic("orders", 1)
        self.replica = Replica.open(f"{folder}/copy", of=self.master)
        stack.callback(self.replica.close)
        self.server = RemotingServer(self.master)
        stack.callback(self.server.close)
        self.slave = stack.enter_context(RemotingServer(self.replica.broker))
        self.names = stack.enter_context(FakeServer(lambda frame: None))
        self.names.broker = self.server.address
        self.names.slaves = {1: self.slave.address}

    def copy(self, messages: int) -> None:
        """Wait until the replica has so many messages."""

        def has_all() -> bool:
            self.replica.follow()
            return self.replica.broker.call(MaxOffset("orders", 0)) == messages

        until(has_all)

    def lose_master(self, *, is_known: bool) -> None:
        """End the master's server, and let the name server forget it or not."""
        self.server.close()
        if not is_known:
            self.names.broker = None


@pytest.fixture
def pair(tmp_path: object) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, str(tmp_path))


@pytest.mark.parametrize("is_known", [True, False])
def test_reads_go_to_a_slave_when_the_master_is_gone(pair: Pair, is_known: bool) -> None:
    """A consumer that starts then gets what was copied; sends are refused."""
    with librmq.connect(pair.names.address) as route, librmq.Producer(route, "shop") as producer:
        for number in range(5):
            producer.send("orders", b"%d" % number)
        pair.copy(5)
        pair.lose_master(is_known=is_known)
        if not is_known:
            route.refresh()
        assert route.endpoint("fake").call(MaxOffset("orders", 0)) == 5
        inbox = Inbox(5)
        consumer = librmq.PushConsumer(route, "g", consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders", inbox)
        with consumer:
            assert sorted(inbox.wait()) == [b"%d" % number for number in range(5)]
        with pytest.raises((BrokerUnreachableError, NoRouteError)):
            producer.send("orders", b"x")


def test_a_running_consumer_reads_on_from_a_slave(pair: Pair) -> None:
    """Its pull is held at the master, which goes, and a message that only the replica has comes from there."""
    with librmq.connect(pair.names.address) as route:
        inbox = Inbox(2)
        consumer = librmq.PushConsumer(route, "g", consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders", inbox)
        with consumer, librmq.Producer(pair.master, "shop") as producer:
            producer.send("orders", b"1")
            until(lambda: inbox.bodies == [b"1"])
            pair.lose_master(is_known=True)
            producer.send("orders", b"2")
            pair.copy(2)
            assert inbox.wait() == [b"1", b"2"]


class Suggesting(FakeServer):
    """A broker whose answers to pulls suggest another one for the next pull."""

    def __init__(self, broker_id: int) -> None:
        super().__init__(self.pulled)
        self.suggests = str(broker_id)

    def pulled(self, frame: Frame) -> Frame:
        fields = {"nextBeginOffset": str(int(frame.fields.get("queueOffset", 0)) + 1), "minOffset": "0"}
        fields |= {"maxOffset": "9", "suggestWhichBrokerId": self.suggests, "offset": "7"}
        return answer_to(frame, 20 if frame.code == RequestCode.PULL_MESSAGE else 0, fields=fields)

    def pulls(self) -> list[tuple[str, str]]:
        """Return the offsets of the pulls that came, with their flags."""
        pulls = [frame.fields for frame in self.asked if frame.code == RequestCode.PULL_MESSAGE]
        return [(fields["queueOffset"], fields["sysFlag"]) for fields in pulls]


def test_pulls_go_where_the_broker_suggests() -> None:
    """A slave keeps no progress: it goes to the master, and the slave's pull commits nothing."""
    with Suggesting(1) as master, Suggesting(0) as slave:
        master.slaves = {1: slave.address}
        with librmq.connect(master.address) as route:
            call, everything = route.endpoint("fake").call, Subscription("orders")
            for offset in range(4):
                call(PullMessage("c", "g", "orders", 0, offset, 32, everything, commit_offset=offset))
            assert master.pulls() == [("0", "5"), ("2", "5")]
            assert slave.pulls() == [("1", "4"), ("3", "4")]
            stored = [one.fields["commitOffset"] for one in master.asked if one.code == 15]
            assert stored == ["1", "3"]
            assert call(QueryOffset("g", "orders", 0)) == 7


def test_a_slave_that_lacks_a_message_is_not_asked_in_a_loop() -> None:
    """The master can't be reached, and the slave has not copied the message: an error, after which a client waits."""
    with Suggesting(0) as slave:
        slave.pulled = lambda frame: answer_to(  # type: ignore[method-assign]
            frame, 20, fields={"nextBeginOffset": "5", "minOffset": "0", "maxOffset": "3", "suggestWhichBrokerId": "0"}
        )
        slave.answer = slave.pulled
        slave.slaves = {1: slave.address}
        slave.broker = None
        with librmq.connect(slave.address) as route:
            pull = PullMessage("c", "g", "orders", 0, 5, 32, Subscription("orders"))
            with pytest.raises(BrokerUnreachableError, match="the slave has no message at 5 yet"):
                route.endpoint("fake").call(pull)
            assert route.topic_route("orders")[0].permission == 4


@pytest.mark.parametrize("queue_offset", [0, 5])
def test_bounds_of_a_slave_move_no_consumer(queue_offset: int) -> None:
    """A slave that begins later or ends earlier than its master is passed over, so that progress stays as it is."""
    moved = {"nextBeginOffset": "3", "minOffset": "2", "maxOffset": "3", "suggestWhichBrokerId": "0"}
    with FakeServer(lambda frame: answer_to(frame, 21, fields=moved)) as slave:
        slave.slaves = {1: slave.address}
        slave.broker = None
        with librmq.connect(slave.address) as route:
            pull = PullMessage("c", "g", "orders", 0, queue_offset, 32, Subscription("orders"))
            with pytest.raises(BrokerUnreachableError, match=f"the slave has no message at {queue_offset} yet"):
                route.endpoint("fake").call(pull)


def test_the_master_serves_what_a_slave_refuses() -> None:
    """The slave has not copied the topic yet."""
    with Suggesting(1) as master, FakeServer(lambda frame: answer_to(frame, 17, "topic not exist")) as slave:
        master.slaves = {1: slave.address}
        with librmq.connect(master.address) as route:
            for offset in range(2):
                route.endpoint("fake").call(PullMessage("c", "g", "orders", 0, offset, 32, Subscription("orders")))
        assert [offset for offset, _ in master.pulls()] == ["0", "1"]


def test_an_empty_answer_of_a_slave_leads_to_the_master() -> None:
    """The slave holds each pull of a consumer that has come to its end, and suggests the master."""
    came, may_answer = threading.Event(), threading.Semaphore(0)
    empty = {"nextBeginOffset": "1", "minOffset": "0", "maxOffset": "1", "suggestWhichBrokerId": "0"}

    def held(frame: Frame) -> Frame:
        may_answer.acquire(timeout=WAIT_S)
        return answer_to(frame, 19, fields=empty)

    with Suggesting(1) as master, FakeServer(held) as slave:
        master.slaves = {1: slave.address}
        with librmq.connect(master.address) as route:
            call = route.endpoint("fake").call
            call(PullMessage("c", "g", "orders", 0, 0, 32, Subscription("orders")))
            pull = PullMessage("c", "g", "orders", 0, 1, 32, Subscription("orders"), notify=came.set)
            for _ in range(2):
                assert call(pull).status is PullStatus.HELD
                came.clear()
                may_answer.release()
                assert came.wait(WAIT_S)
            call(pull)
            until(lambda: [offset for offset, _ in master.pulls()] == ["0", "1"])
