"""librmq's own clients over TCP: a route made by `librmq.connect`, to librmq's server, in one process."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

import librmq
from librmq.files import MemoryFiles
from librmq.protocol import SendBack, SendTogether
from librmq.wire.remote import RemoteRoute
from librmq.wire.remoting import RemotingServer, listen
from librmq.wire.remoting._bodies import write_body
from librmq.wire.remoting._frames import Frame, answer_to
from librmq.wire.remoting._headers import RequestCode
from tests.wire.fake_servers import FakeServer

WAIT_S = 60


class Served:
    """A broker behind a port, and a route to it."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        listening = listen()
        port = listening.getsockname()[1]
        config = librmq.StoreConfig(store_host=f"127.0.0.1:{port}", commitlog_file_size=16 << 20)
        self.broker = self.stack.enter_context(librmq.Broker.temporary(store_config=config))
        self.server = self.stack.enter_context(RemotingServer(self.broker, listening=listening))
        self.route = self.stack.enter_context(librmq.connect(self.server.address))


def served_with(queues: int = 0) -> Callable[[], Iterator[Served]]:
    """Return a fixture of a served broker, with the topic ``orders`` if it has queues."""

    @pytest.fixture
    def served() -> Iterator[Served]:
        place = Served()
        with place.stack:
            if queues:
                place.broker.create_topic("orders", queues)
            yield place

    return served


served = served_with()


@pytest.fixture
def route(served: Served) -> RemoteRoute:
    return served.route


class Inbox:
    """What listeners got."""

    def __init__(self, wanted: int) -> None:
        self.bodies: list[bytes] = []
        self._wanted = wanted
        self._is_full = threading.Event()

    def __call__(self, message: librmq.DeliveredMessage) -> None:
        self.bodies.append(message.body)
        if len(self.bodies) >= self._wanted:
            self._is_full.set()

    def wait(self) -> list[bytes]:
        assert self._is_full.wait(WAIT_S), f"{len(self.bodies)} of {self._wanted} messages came"
        return self.bodies


def test_a_full_disk_reaches_the_producer() -> None:
    files = MemoryFiles()
    files.disk_used_ratio = 0.95
    with (
        librmq.Broker.open("/store", files=files) as broker,
        RemotingServer(broker) as server,
        librmq.connect(server.address) as route,
        librmq.Producer(route, "shop") as producer,
    ):
        broker.create_topic("orders", 1)
        with pytest.raises(librmq.DiskFullError, match=r"95\.0% full"):
            producer.send("orders", b"1")


def test_a_full_store_reaches_the_producer() -> None:
    settings = librmq.StoreConfig.tiny(commitlog_file_size=4096, max_message_size=2048, max_total_size=8192)
    with (
        librmq.Broker.open("/store", store_config=settings, files=MemoryFiles()) as broker,
        RemotingServer(broker) as server,
        librmq.connect(server.address) as route,
        librmq.Producer(route, "shop") as producer,
    ):
        broker.create_topic("orders", 1)
        broker.set_group("bills")
        broker.reset_group("bills", "orders", "begin")
        with pytest.raises(librmq.StoreFullError, match="'bills'"):
            [producer.send("orders", bytes(800)) for _ in range(16)]


def until(holds: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(10 * WAIT_S):
        if holds():
            return
        pause.wait(0.1)
    raise AssertionError("it did not come true in time")


def test_a_sent_message_is_stored_as_by_a_local_producer(served: Served) -> None:
    served.broker.create_topic("orders", 2)
    with librmq.Producer(served.route, "shop") as producer:
        sent = producer.send(librmq.Message("orders", b"x" * 5000, tags="new", keys=["k1"], properties={"a": "b"}))
        found = served.broker.find_by_id(sent.offset_id)
    assert found is not None
    assert (found.body, found.tags, found.keys, found.properties["a"]) == (b"x" * 5000, "new", ("k1",), "b")
    assert len(found.stored_body) < 5000  # compressed by the producer
    assert (sent.queue.queue_id, sent.queue_offset) == (found.queue_id, found.queue_offset)
    assert sent.message_id == found.unique_key


GROUPS = [f"group-{number:03}" for number in range(200)]


def sent_back_twice(route: RemoteRoute) -> None:
    for _ in range(2):
        route.endpoint("fake").call(SendBack(GROUPS[0], 0, 3))


def test_a_body_that_no_frame_holds_is_refused(served: Served) -> None:
    """The error says what to do, and the connection stays."""
    served.broker.create_topic("orders", 1)
    with librmq.Producer(served.route, "shop") as producer:
        producer.configure(max_message_size=32 << 20)
        with pytest.raises(librmq.MessageIllegalError, match=r"expected at most 16,777,216: .*largebody\.md"):
            producer.send("orders", random.Random(0).randbytes(17 << 20))
        producer.send("orders", b"small")


@pytest.mark.parametrize(
    ("call", "requests"),
    [
        (lambda route: route.groups_of("orders"), {RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: 1}),
        (lambda route: route.groups(), {RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: 1}),
        (  # "with a request for each consumer group"
            lambda route: route.clients(),
            {
                RequestCode.GET_ALL_PRODUCER_INFO: 1,
                RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: 1,
                RequestCode.GET_CONSUMER_CONNECTION_LIST: len(GROUPS),
            },
        ),
        (  # settings of groups "are asked for once a connection"
            sent_back_twice,
            {RequestCode.CONSUMER_SEND_MSG_BACK: 2, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: 1},
        ),
    ],
)
def test_calls_make_as_many_requests_as_they_say(
    call: Callable[[RemoteRoute], object], requests: dict[RequestCode, int]
) -> None:
    table = {group: {"retryMaxTimes": 16} for group in GROUPS}
    body = write_body({"groupList": GROUPS, "subscriptionGroupTable": table})

    def answer(frame: Frame) -> Frame:
        return answer_to(frame, 206 if frame.code == RequestCode.GET_CONSUMER_CONNECTION_LIST else 0, body=body)

    with FakeServer(answer) as server, librmq.connect(server.address) as route:
        before = len(server.asked)
        call(route)
        assert Counter(frame.code for frame in server.asked[before:]) == requests


def test_a_change_of_a_topic_is_in_its_route_at_once(route: RemoteRoute) -> None:
    """A program that grows a topic must not send to the old queues for 30 s, nor to those that it has removed."""
    for queues, write_queues in ((4, 4), (2, 2), (6, 0)):
        route.create_topic("orders", queues, write_queues=write_queues)
        assert [(data.read_queues, data.write_queues) for data in route.topic_route("orders")] == [
            (queues, write_queues)
        ]
    route.delete_topic("orders")
    assert route.topic_route("orders") == ()


def test_async_sends_and_polls(served: Served) -> None:
    served.broker.create_topic("orders", 1)

    async def run() -> list[bytes]:
        async with librmq.connect(served.server.address) as route:
            async with librmq.Producer(route, "shop") as producer:
                await asyncio.gather(*(producer.send_async("orders", b"%d" % number) for number in range(5)))
            async with librmq.PullConsumer(route, "g", consume_from=librmq.ConsumeFrom.FIRST) as consumer:
                consumer.subscribe("orders")
                bodies: list[bytes] = []
                while len(bodies) < 5:
                    bodies += [message.body for message in await consumer.poll_async(WAIT_S)]
                return bodies

    assert sorted(asyncio.run(run())) == [b"0", b"1", b"2", b"3", b"4"]


def test_two_members_share_the_queues(served: Served) -> None:
    served.broker.create_topic("orders", 4)
    members = [librmq.PushConsumer(served.route, "g") for _ in range(2)]
    for member in members:
        member.subscribe("orders", lambda message: None)
        member.start()

    def shares() -> list[set[librmq.MessageQueue]]:
        return [{queue for queue in list(one.assigned) if queue.topic == "orders"} for one in members]

    until(lambda: [len(share) for share in shares()] == [2, 2])
    assert not set.intersection(*shares())
    for member in members:
        member.shutdown()
    until(lambda: served.server.clients == 0)


@pytest.mark.parametrize(("number", "version"), [(401, "4.9.4"), (479, "5.3.3")])
def test_what_a_broker_lacks_is_said_with_its_version(
    route: RemoteRoute, number: int, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("librmq.wire.remoting._frames.VERSION", number)
    with pytest.raises(
        librmq.BrokerError, match=f"broker-a is a broker of RocketMQ {version}, which has no SendTogether"
    ):
        route.endpoint("broker-a").call(SendTogether(()))


@pytest.mark.parametrize("address", ["", "host", "host:0", "host:port", "http://host:9876", 9876])
def test_invalid_addresses_are_refused(address: str) -> None:
    with pytest.raises(librmq.ConfigError, match="host:port"):
        librmq.connect(address)


@pytest.fixture
def dead() -> Iterator[str]:
    """Return an address where nothing listens, and that no other test can get."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_nothing_at_the_address_is_said(dead: str) -> None:
    with pytest.raises(librmq.BrokerUnreachableError, match=f"no name server answers: {dead}"):
        librmq.connect(dead)


def test_the_second_name_server_answers(served: Served, dead: str) -> None:
    with librmq.connect(f"{dead};{served.server.address}") as route:
        assert route.broker_names() == ("broker-a",)


def test_a_silent_server_is_an_error_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(librmq.BrokerUnreachableError, match=r"within 0\.2 s"):
            librmq.connect(f"127.0.0.1:{port}", timeout=0.2)


def own_address() -> str:
    """Return an address of this machine, if it has a network one that others can reach."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect(("192.0.2.1", 9))  # sends nothing
        return str(asking.getsockname()[0])
    return "127.0.0.1"


def test_client_ids_begin_with_the_address_of_the_machine() -> None:
    """Otherwise clients with one instance_name on two machines would count as one."""
    address = own_address()
    with (
        librmq.Broker.temporary() as broker,
        RemotingServer(broker, listening=listen("0.0.0.0")) as server,
        librmq.connect(f"{address}:{server.port}") as route,
        librmq.Producer(route, "shop", instance_name="worker") as producer,
    ):
        assert producer.client.client_id == f"{address}@worker"
        assert producer.send("orders", b"x").message_id.startswith(socket.inet_aton(address).hex().upper())


def test_a_closed_route_refuses(served: Served) -> None:
    producer = librmq.Producer(served.route, "shop")
    producer.send("orders", b"x")
    served.route.close()
    with pytest.raises(librmq.BrokerUnreachableError, match="the route was closed"):
        producer.send("orders", b"x")
    producer.shutdown()
    with pytest.raises(librmq.BrokerUnreachableError, match="the route was closed"):
        librmq.Producer(served.route, "shop").start()
