"""Name servers, names and topics that keep one client waiting must not keep others, and what is known has bounds."""

from __future__ import annotations

import logging
import socket
import threading
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import librmq
from librmq import (
    BrokerError,
    BrokerUnreachableError,
    ConsumeFrom,
    DeliveredMessage,
    MessageModel,
    NoRouteError,
    SendTimeoutError,
)
from librmq.client import TransactionProducer
from librmq.clock import SystemClock
from librmq.consumer import _rebalancing as rebalancing
from librmq.java.json import ObjectKey
from librmq.message.properties import decode_properties
from librmq.protocol import Route, TransactionState
from librmq.runtime.threads import ThreadRunner
from librmq.wire.remote import remote_route
from librmq.wire.remote._dialing import HostNames
from librmq.wire.remote.remote_route import LearntRoute
from librmq.wire.remoting import RemotingServer
from librmq.wire.remoting._bodies import write_body
from librmq.wire.remoting._frames import Frame, answer_to
from librmq.wire.remoting._headers import RequestCode
from tests.wire.fake_servers import FakeServer
from tests.wire.remoting_client import RawClient
from tests.wire.test_connect import WAIT_S, Inbox, Served, served_with, until

served = served_with(queues=1)


class SlowNames(FakeServer):
    """A name server that leads to a real broker, and keeps a question for the topic ``slow`` waiting."""

    def __init__(self, address: str) -> None:
        self.is_asked, self.end = threading.Event(), threading.Event()
        super().__init__(lambda frame: None)
        self.broker = None
        self.others["broker-a"] = address

    def _usual(self, frame: Frame) -> Frame | None:
        if frame.code == RequestCode.GET_ROUTEINFO_BY_TOPIC and frame.fields["topic"] == "slow":
            self.is_asked.set()
            self.end.wait(WAIT_S)
        return super()._usual(frame)


def test_a_slow_name_server_stops_no_other_consumer(served: Served) -> None:
    """A consumer that starts waits for the route of its topic, while another one gets its messages."""
    inbox = Inbox(1)
    with SlowNames(served.server.address) as names, librmq.connect(names.address, timeout=WAIT_S) as route:
        consumer = librmq.PushConsumer(route, "g", consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders", inbox)
        other = librmq.PushConsumer(route, "h")
        other.subscribe("slow", lambda message: None)
        with consumer:
            until(lambda: len(consumer.assigned) == 2)  # the topic's, and that of retries
            starting = threading.Thread(target=other.start)
            starting.start()
            try:
                assert names.is_asked.wait(WAIT_S)
                with librmq.Producer(served.broker, "shop") as producer:
                    producer.send("orders", b"x")
                assert inbox.wait() == [b"x"]
                assert starting.is_alive()
            finally:
                names.end.set()
                starting.join(WAIT_S)
            other.shutdown()


class Hurried(SystemClock):
    """A clock by which waits of exactly `WAIT_S`, such as those for look-ups, end soon."""

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        return super().wait(event, 0.1 if seconds == WAIT_S else seconds)


def test_a_hanging_look_up_stops_no_other_client(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of one broker can't be looked up, and the other broker of the route is used meanwhile."""
    end, find = threading.Event(), socket.getaddrinfo
    asked: list[str] = []

    def hang(host: Any, *rest: Any, **fields: Any) -> Any:
        if host == "hangs.invalid":
            asked.append(host)
            end.wait(WAIT_S)
            raise socket.gaierror("no such name")
        return find(host, *rest, **fields)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    inbox, runner = Inbox(20), ThreadRunner(Hurried())
    with SlowNames(served.server.address) as names:
        names.others["broker-b"] = "hangs.invalid:10911"
        try:
            with librmq.connect(names.address, timeout=WAIT_S, runner=runner) as route:
                consumer = librmq.PushConsumer(route, "g", consume_from=ConsumeFrom.FIRST)
                consumer.subscribe("orders", inbox)
                with consumer, librmq.Producer(served.broker, "shop") as producer:
                    for _ in range(20):
                        producer.send("orders", b"x")
                    inbox.wait()
                with pytest.raises(BrokerUnreachableError, match=r"the host hangs\.invalid can't be found: .* 60 s"):
                    route.broker("broker-b").connections("g")
        finally:
            end.set()
            runner.shutdown()
    assert asked == ["hangs.invalid"]  # nothing looks it up again while it hangs


class Standing(SystemClock):
    """A clock that a test moves, while waiting takes real time."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


def test_the_routes_of_many_topics_look_a_name_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some seconds it is looked up again, because it may lead elsewhere."""
    asked: list[str] = []

    def found(host: str, *rest: object, **fields: object) -> list[tuple[object, ...]]:
        asked.append(host)
        return [(0, 0, 0, "", (f"127.0.0.{len(asked)}", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    clock = Standing()
    names = HostNames(WAIT_S, clock)
    for _ in range(20):
        names.resolve_all(["broker:10911"])
    assert (asked, names.resolve("broker")) == (["broker"], ("127.0.0.1",))
    clock.seconds += 5
    names.resolve_all(["broker:10911"])
    assert names.resolve("broker") == ("127.0.0.2",)


def test_names_that_hang_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A route with many brokers takes no longer than one with a single one."""

    class Passing(Standing):
        def wait(self, event: threading.Event, seconds: float | None) -> bool:
            self.seconds += seconds or 0.0
            return False

    end = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: end.wait(WAIT_S) and [])
    clock = Passing()
    try:
        HostNames(3, clock).resolve_all([f"broker-{number}.invalid:10911" for number in range(300)])
    finally:
        end.set()
    assert clock.seconds == 3


def test_a_route_that_is_too_large_is_not_read() -> None:
    class Large(FakeServer):
        def _usual(self, frame: Frame) -> Frame | None:
            if frame.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
                return answer_to(frame, body=b" " * (2 << 20))
            return super()._usual(frame)

    with (
        Large(lambda frame: None) as server,
        librmq.connect(server.address) as route,
        pytest.raises(BrokerUnreachableError, match=r"route of orders can't be read: .* found 2,097,152"),
    ):
        route.topic_route("orders")


class Impatient(SystemClock):
    """A clock whose waits pass at once."""

    waited_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.waited_s

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        if seconds == 1:
            self.waited_s += seconds
            return False
        return super().wait(event, seconds)


class Patient(SystemClock):
    """A clock that notes long waits, which pass at once."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        if seconds is not None and 10 < seconds < WAIT_S:
            self.waits.append(seconds)
            return False
        return super().wait(event, seconds)


@pytest.mark.parametrize(("info", "waits"), [({}, 1), ({"librmqVersion": "0.1.0"}, 0)])
def test_a_group_is_deleted_when_a_broker_holds_none_of_its_pulls(info: dict[str, str], waits: int) -> None:
    """A broker of RocketMQ makes the group of a pull again when its hold ends, also after its client has left."""
    clock = Patient()
    runner = ThreadRunner(clock)
    deleted: list[int] = []

    def answer(frame: Frame) -> Frame:
        if frame.code == RequestCode.DELETE_SUBSCRIPTIONGROUP:
            deleted.append(len(clock.waits))
        return answer_to(frame, body=write_body({"table": info, "consumerIdList": []}))

    try:
        with FakeServer(answer) as server, librmq.connect(server.address, runner=runner) as route:
            with librmq.PullConsumer(route, "g") as consumer:
                consumer.subscribe("orders")
            for group in ("g", "other"):
                route.delete_group(group)
    finally:
        runner.shutdown()
    assert (deleted, len(clock.waits)) == ([waits, waits], waits)


class Resetting:
    """A broker that resets a group after its clients have saved progress, as RocketMQ 4.9.4 does."""

    def __init__(self, refusals: int, *, is_online: bool) -> None:
        self.refusals, self.is_online = refusals, is_online

    def __call__(self, frame: Frame) -> Frame | None:
        if frame.code == RequestCode.GET_CONSUMER_CONNECTION_LIST:
            body = write_body({"connectionSet": [], "subscriptionTable": {}, "consumeType": "CONSUME_PASSIVELY"})
            return answer_to(frame, body=body) if self.is_online else answer_to(frame, 206, "not online")
        if self.refusals:
            self.refusals -= 1
            return answer_to(frame, 1, "THe consumer group <g> not exist")
        queue = {"brokerName": "fake", "queueId": 0, "topic": frame.fields["topic"]}
        return answer_to(frame, body=write_body({"offsetTable": {ObjectKey(queue.items()): 7}}))


@pytest.mark.parametrize(
    ("refusals", "is_online", "error"),
    [
        (3, True, None),
        (1000, True, "group 'g' can't be reset in 'orders', because its clients have not saved progress of each queue"),
    ],
)
def test_a_reset_waits_for_the_first_progress(refusals: int, is_online: bool, error: str | None) -> None:
    runner = ThreadRunner(Impatient())
    try:
        with (
            FakeServer(Resetting(refusals, is_online=is_online)) as server,
            librmq.connect(server.address, runner=runner) as route,
        ):
            if error is None:
                assert route.reset_group("g", "orders", "begin") == {librmq.MessageQueue("orders", "fake", 0): 7}
            else:
                with pytest.raises(BrokerError, match=error):
                    route.reset_group("g", "orders", "begin")
    finally:
        runner.shutdown()


def test_an_unknown_name_is_said() -> None:
    with pytest.raises(BrokerUnreachableError, match=r"the host nowhere\.invalid can't be found"):
        librmq.connect("nowhere.invalid:9876", timeout=5)


def test_of_too_many_topics_the_first_are_forgotten(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked for again when they are used again."""
    monkeypatch.setattr(remote_route, "MOST_TOPICS", 3)
    with FakeServer(lambda frame: None) as names, librmq.connect(names.address) as route:
        for number in range(10):
            assert len(route.topic_route(f"t{number}")) == 1
        asked = len(names.asked)
        route.refresh()
        assert len(names.asked) - asked == 1 + 3  # the brokers, and the topics that are kept
        assert len(route.topic_route("t0")) == 1


def test_a_missing_topic_is_forgotten(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that exists and was asked for before it does not keep it."""
    monkeypatch.setattr(remote_route, "FORGET_MS", 0)
    asked: list[str] = []
    find = served.route.name_servers.route_of

    def counted(topic: str) -> LearntRoute:
        asked.append(topic)
        return find(topic)

    monkeypatch.setattr(served.route.name_servers, "route_of", counted)
    for topic in ("orders", "missing"):
        served.route.topic_route(topic)
    for _ in range(2):
        served.route.refresh()
    assert asked == ["orders", "missing", "missing", "orders", "orders"]


def test_a_consumer_keeps_asking_for_a_missing_topic(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The route has forgotten it when it is made."""
    monkeypatch.setattr(remote_route, "FORGET_MS", 0)
    monkeypatch.setattr(rebalancing, "INTERVAL_MS", 50)
    inbox = Inbox(1)
    with RemotingServer(served.broker) as server, librmq.connect(server.address) as route:
        consumer = librmq.PushConsumer(
            route, "g", model=MessageModel.BROADCASTING, consume_from=ConsumeFrom.FIRST, offsets_folder=str(tmp_path)
        )
        consumer.subscribe("later", inbox)
        with consumer:
            route.topic_route("other")
            route.refresh()
            with librmq.Producer(served.broker, "shop") as producer:
                producer.send("later", b"x")
            assert inbox.wait() == [b"x"]


def test_unknown_topics_do_not_wait_for_an_answer(served: Served) -> None:
    assert served.route.known_route("later") == ()
    served.broker.create_topic("later", 2)
    until(lambda: len(served.route.known_route("later")) == 1)
    with pytest.raises(NoRouteError):
        served.route.endpoint("unknown")


# Requests and replies over TCP: between routes, and between a route and the broker's own process.


def until_known(served: Served, producer: librmq.Producer) -> None:
    """Wait for the heartbeat of a producer, without which no reply reaches it."""
    producer.start()
    until(lambda: producer.client.client_id in {one.client_id for one in served.broker.clients()})


@pytest.mark.parametrize(("asks_over_tcp", "replies_over_tcp"), [(True, True), (True, False), (False, True)])
def test_a_request_crosses_the_route(served: Served, asks_over_tcp: bool, replies_over_tcp: bool) -> None:
    asking: Route = served.route if asks_over_tcp else served.broker
    replying: Route = served.route if replies_over_tcp else served.broker
    with librmq.Producer(asking, "shop") as producer, librmq.Producer(replying, "replies") as replies:
        consumer = librmq.PushConsumer(replying, "billing", consume_from=ConsumeFrom.FIRST)

        @consumer.subscribe("orders")
        def handle(message: DeliveredMessage) -> None:
            replies.reply(message, message.body * 3000, keys=["k1"])

        until_known(served, producer)
        with consumer:
            for body in (b"tea", b"jam"):
                reply = producer.request("orders", body, timeout=WAIT_S)
                assert (reply.body, reply.keys) == (body * 3000, ("k1",))


def test_a_served_broker_compares_the_members_of_groups(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Their heartbeats say what those of Java clients do not."""
    caplog.set_level(logging.WARNING, "librmq.broker")
    with ExitStack() as clients:
        members = []
        for number in (3, 1):
            member = librmq.PushConsumer(
                served.route, "billing", instance_name=f"b{number}", max_reconsume_times=number, threads=1
            )
            member.subscribe("orders", ignore)
            members.append(clients.enter_context(member))
            until(lambda: members[-1].client.client_id in {one.client_id for one in served.broker.clients()})
        until(lambda: [member.max_reconsume_times for member in members] == [1, 1])
        tx = TransactionProducer(served.route, "shop", lambda _: TransactionState.COMMIT, instance_name="tx")
        clients.enter_context(tx)
        until_known(served, clients.enter_context(librmq.Producer(served.route, "shop", instance_name="plain")))
    warnings = [record.getMessage() for record in caplog.records]
    assert [warning for warning in warnings if "max_reconsume_times=1" in warning and "has 3" in warning]
    assert [warning for warning in warnings if "@plain beside" in warning and "@tx, which" in warning]


def ignore(_: DeliveredMessage) -> None:
    pass


@pytest.mark.parametrize("is_compressed", [False, True])
def test_another_client_replies(served: Served, is_compressed: bool) -> None:
    """It pulls the request as a Java client does, and a large reply of such a client is compressed."""
    replied: list[int] = []
    consumer = librmq.PushConsumer(served.broker, "billing", consume_from=ConsumeFrom.FIRST)
    with RawClient(served.server.port) as client, librmq.Producer(served.route, "shop") as producer:

        @consumer.subscribe("orders")
        def handle(message: DeliveredMessage) -> None:
            asked = message.properties
            names = ("CORRELATION_ID", "REPLY_TO_CLIENT", "TTL")
            properties = "\2".join(f"{name}\1{asked[name]}" for name in names) + "\2MSG_TYPE\1reply"
            fields = {
                "producer_group": "java", "topic": asked["CLUSTER"] + "_REPLY_TOPIC", "default_topic": "TBW102",
                "default_topic_queue_nums": 4, "queue_id": 0, "sys_flag": 1 if is_compressed else 0,
                "born_timestamp": 1, "flag": 0, "properties": properties,
            }  # fmt: skip
            body = zlib.compress(b"yes" * 2000) if is_compressed else b"yes" * 2000
            replied.append(client.call(RequestCode.SEND_REPLY_MESSAGE_V2, body, **fields).code)

        until_known(served, producer)
        with consumer:
            reply = producer.request("orders", b"tea", timeout=WAIT_S)
    assert reply.body == b"yes" * 2000
    assert "ARRIVE_TIME" not in reply.properties
    assert replied == [0]


def test_another_client_asks(served: Served) -> None:
    """A reply from the broker's process is pushed to it with its correlation id."""
    consumer = librmq.PushConsumer(served.broker, "billing", consume_from=ConsumeFrom.FIRST)
    with RawClient(served.server.port) as client, librmq.Producer(served.broker, "replies") as replies:

        @consumer.subscribe("orders")
        def handle(message: DeliveredMessage) -> None:
            replies.reply(message, b"yes")

        with consumer:
            client.beat("asker", producers=("p",))
            client.put("orders", b"tea", "CORRELATION_ID\1c7\2REPLY_TO_CLIENT\1asker\2TTL\x013000")
            pushed = client.asked(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT)
    assert pushed.body == b"yes"
    properties = decode_properties(pushed.fields["properties"])
    assert (properties["CORRELATION_ID"], properties["MSG_TYPE"]) == ("c7", "reply")
    assert pushed.fields["topic"] == "DefaultCluster_REPLY_TOPIC"


class Skipping(SystemClock):
    """A clock that jumps to the end of what the main thread waits for."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        if threading.current_thread() is not threading.main_thread() or seconds is None:
            return super().wait(event, seconds)
        self.ahead_s += seconds
        return event.is_set()


def test_no_reply_comes_in_time(served: Served) -> None:
    runner = ThreadRunner(Skipping())
    with (
        librmq.connect(served.server.address, runner=runner) as route,
        librmq.Producer(route, "shop") as producer,
        pytest.raises(SendTimeoutError, match="the request is stored"),
    ):
        producer.request("orders", b"tea", timeout=WAIT_S)
    assert runner.shutdown()
    assert [message.body for message in served.broker.messages("orders")] == [b"tea"]
