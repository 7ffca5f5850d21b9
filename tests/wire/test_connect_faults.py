"""librmq's clients over TCP while connections are cut, servers send nonsense, and brokers ask clients."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import random
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

import librmq
from librmq import Broker, BrokerUnreachableError, ClientStateError, ConsumeFrom, Message, TransactionState, protocol
from librmq.clock import SystemClock
from librmq.errors import ClientError
from librmq.runtime.threads import ThreadRunner
from librmq.testing import Anomaly, check_history
from librmq.wire.certificates import self_signed
from librmq.wire.remote import RemoteRoute, remote_route
from librmq.wire.remote._connection import Connection
from librmq.wire.remote._dialing import Connections
from librmq.wire.remoting import RemotingServer, listen
from librmq.wire.remoting._bodies import write_body
from librmq.wire.remoting._frames import Frame, answer_to, encode
from librmq.wire.remoting._headers import RequestCode
from tests.interrupting import at_each_call
from tests.programs import free_port
from tests.wire.fake_servers import FakeServer, Relay
from tests.wire.test_connect import WAIT_S, Inbox, Served, served_with, until

_STORED = {"msgId": "7F00000100002A9F0000000000000000", "queueId": "0", "queueOffset": "7"}
served = served_with()


@contextmanager
def relayed(queues: int) -> Iterator[tuple[Broker, Relay, RemoteRoute]]:
    """Serve a broker with the topic orders behind a relay, which can cut connections, and connect to it."""
    with ExitStack() as stack:
        broker = stack.enter_context(Broker.temporary())
        broker.create_topic("orders", queues)
        listening = listen()
        port = listening.getsockname()[1]
        relay = stack.enter_context(Relay(lambda: port))
        stack.enter_context(RemotingServer(broker, listening=listening, advertise=relay.address))
        yield broker, relay, stack.enter_context(librmq.connect(relay.address))


def run_cuts(messages: int, cuts: int, seed: int, path: Path) -> None:
    """Send and consume while all connections are cut again and again; check the history."""
    choose = random.Random(seed)
    with ExitStack() as stack:
        broker, relay, cluster = stack.enter_context(relayed(4))
        route = stack.enter_context(librmq.record_history(cluster, path))
        consumer = librmq.PushConsumer(route, "g", consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders", lambda message: None)
        stack.enter_context(consumer)
        producer = stack.enter_context(librmq.Producer(route, "shop", timeout=20))
        due = set(choose.sample(range(messages), cuts))
        pause = threading.Event()
        for number in range(messages):
            if number in due:
                relay.cut()
            while True:  # like a program that must not lose a message
                try:
                    producer.send("orders", b"%d" % number)
                except (BrokerUnreachableError, librmq.SendTimeoutError):
                    pause.wait(0.02)
                else:
                    break

        def anomalies() -> list[Anomaly]:
            events = [json.loads(line) for line in path.read_bytes().splitlines() if line.strip()]  # blanked: moved
            return check_history([*events, {"event": "drained", "group": "g", "at_ms": broker.runner.now_ms()}])

        with suppress(AssertionError):  # the anomalies say more
            until(lambda: not anomalies())
        assert anomalies() == []


@pytest.mark.parametrize(("messages", "cuts"), [(300, 3), pytest.param(1_000, 40, marks=pytest.mark.slow)])
def test_nothing_acknowledged_is_lost_by_cuts(tmp_path: Path, messages: int, cuts: int) -> None:
    run_cuts(messages, cuts, cuts, tmp_path / "history")


@pytest.mark.slow
def test_a_restarted_server_is_found_again() -> None:
    """The consumer's pulls, its locks and the producer's sends continue over new connections."""
    with ExitStack() as stack:
        broker = stack.enter_context(Broker.temporary())
        broker.create_topic("orders", 1)
        port = free_port()
        server = RemotingServer(broker, listening=port)
        inbox = Inbox(2)
        route = stack.enter_context(librmq.connect(server.address))
        consumer = librmq.PushConsumer(route, "g", orderly=True, consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders", inbox)
        stack.enter_context(consumer)
        producer = stack.enter_context(librmq.Producer(route, "shop"))
        producer.send("orders", b"1")
        server.close()
        with pytest.raises(BrokerUnreachableError):
            producer.send("orders", b"lost")
        stack.enter_context(RemotingServer(broker, listening=port))

        def is_sent() -> bool:
            try:
                producer.send("orders", b"2")
            except (BrokerUnreachableError, librmq.SendTimeoutError):
                return False
            return True

        until(is_sent)
        assert inbox.wait()[-1] == b"2"


def test_a_broker_asks_how_a_transaction_ended() -> None:
    with ExitStack() as stack:
        config = librmq.BrokerConfig(transactions=librmq.TransactionConfig(interval_s=0.2, timeout_s=0.2))
        broker = stack.enter_context(Broker.temporary(config))
        broker.create_topic("orders", 1)
        server = stack.enter_context(RemotingServer(broker))
        route = stack.enter_context(librmq.connect(server.address))
        asked: list[bytes] = []

        def check(message: librmq.CheckedMessage) -> TransactionState:
            asked.append(message.body)
            assert message.topic == "orders"
            return TransactionState.COMMIT

        inbox = Inbox(1)
        consumer = librmq.PushConsumer(route, "g", consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders", inbox)
        producer = librmq.TransactionProducer(route, "shop", check)
        with consumer, producer:
            message = Message("orders", b"x")
            producer.send_in_transaction(message, execute=lambda *_: TransactionState.UNKNOWN)
            assert inbox.wait() == asked[:1] == [b"x"]


def test_progress_is_reset_from_outside(served: Served) -> None:
    served.broker.create_topic("orders", 1)
    with librmq.Producer(served.route, "shop") as producer:
        producer.send("orders", b"1")
    consumer = librmq.PullConsumer(served.route, "g", consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("orders")
    with consumer:
        assert [message.body for message in consumer.poll(WAIT_S)] == [b"1"]
        consumer.commit()
        (queue,) = consumer.queues("orders")
        assert served.route.reset_group("g", "orders", "begin") == {queue: 0}
        assert [message.body for message in consumer.poll(WAIT_S)] == [b"1"]


def test_tls() -> None:
    chain, key = self_signed(["127.0.0.1"])
    with Broker.temporary() as broker, RemotingServer(broker, tls=(chain, key)) as server:
        context = ssl.create_default_context(cadata=chain.decode())
        with librmq.connect(server.address, tls=context) as route, librmq.Producer(route, "shop") as producer:
            sent = producer.send("orders", b"x" * 1_000_000)
            assert broker.find_by_id(sent.offset_id) is not None
        with pytest.raises(BrokerUnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
            librmq.connect(server.address, tls=ssl.create_default_context())


def test_requests_are_signed() -> None:
    def answer(frame: Frame) -> Frame:
        return answer_to(frame, fields={"offset": "7"})

    with FakeServer(answer) as server:
        with librmq.connect(server.address, access_key="ak", secret_key="secret", security_token="t") as route:
            assert route.endpoint("fake").call(protocol.MaxOffset("orders", 3)) == 7
        frame = server.asked[-1]
    signed = "ak" + "t" + "3" + "orders"  # the values of AccessKey, SecurityToken, queueId and topic
    digest = hmac.new(b"secret", signed.encode() + frame.body, hashlib.sha1).digest()
    assert frame.fields["Signature"] == base64.b64encode(digest).decode()
    assert frame.fields["AccessKey"] == "ak"


@pytest.mark.parametrize("secret", [None, b"secret"])
def test_a_key_needs_its_secret(secret: Any) -> None:
    with pytest.raises(librmq.ConfigError, match=r"secret_key: expected text.*found (none|bytes)$"):
        librmq.connect("127.0.0.1:9876", access_key="ak", secret_key=secret)


REQUESTS = (
    protocol.MaxOffset("orders", 0),
    protocol.QueryOffset("g", "orders", 0),
    protocol.ConsumerIds("g"),
    protocol.LockQueues("c", "g", frozenset((librmq.MessageQueue("orders", "fake", 0),))),
    protocol.PullMessage("c", "g", "orders", 0, 0),
    protocol.ViewMessage(0),
    protocol.QueryMessages("orders", "k"),
)


def nonsense(choose: random.Random, frame: Frame) -> Frame:
    """Return an answer whose code, fields and body have no meaning."""
    values = ("", "x", "-1", "9" * 30, "7", "true", "\0")
    names = ("offset", "msgId", "queueId", "queueOffset", "nextBeginOffset", "minOffset", "maxOffset")
    fields = {name: choose.choice(values) for name in choose.sample(names, choose.randrange(len(names)))}
    bodies = (b"", b"{}", b"[]", b"{", b"\xff" * 9, b'{"consumerIdList":7}', b'{"lockOKMQSet":[1]}', b"\0\0\0\x08abcd")
    body = choose.choice((*bodies, choose.randbytes(choose.randrange(200))))
    return answer_to(frame, choose.choice((0, 0, 0, 1, 2, 13, 21, 999)), fields=fields, body=body)


def test_answers_without_a_meaning_are_client_errors() -> None:
    choose = random.Random(7)
    with FakeServer(lambda frame: nonsense(choose, frame)) as server, librmq.connect(server.address) as route:
        endpoint = route.endpoint("fake")
        with librmq.Producer(route, "shop", retries=0) as producer:
            calls: list[Callable[[], object]] = [partial(producer.send, "orders", b"x")]
            calls += [partial(endpoint.call, cast("Any", request)) for request in REQUESTS]
            for _ in range(60):
                for call in calls:
                    with suppress(ClientError):
                        call()


@pytest.mark.parametrize(
    ("ask", "body"),
    [
        (lambda route: route.groups_of("orders"), b'{"groupList":7}'),
        (lambda route: route.groups_of("orders"), b"{"),
        (lambda route: route.find_by_key("orders", "k"), b"no records"),
        (lambda route: route.topics(), b'{"topicConfigTable":{"t":{"perm":6}}}'),
        (lambda route: route.groups(), b'{"subscriptionGroupTable":{"g":{}}}'),
        (lambda route: route.consumer_offsets("g", "t"), b'{"offsetTable":{"t@g":{"first":7}}}'),
        (lambda route: route.consumer_offsets("g", "t"), b'{"offsetTable":{"t@g":{0:"7"}}}'),
        (lambda route: route.broker("fake").tables("none"), b'{"offsetTable":[7]}'),
        (lambda route: route.broker("fake").tables("none"), b'{"offsetTable":{"first":7}}'),
        (lambda route: route.queues("t"), b'{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"t"}:7}}'),
        (lambda route: route.connections("g"), b'{"subscriptionTable":{"t":{"topic":"t","subVersion":1e999}}}'),
    ],
)
def test_lists_that_are_none_are_clear_errors(ask: Callable[[RemoteRoute], object], body: bytes) -> None:
    with (
        FakeServer(lambda frame: answer_to(frame, body=body)) as server,
        librmq.connect(server.address) as route,
        pytest.raises(BrokerUnreachableError, match="can't be read"),
    ):
        ask(route)


NO_RIGHTS = 16, "User:mail has no permission to access Group:billing from 127.0.0.1, decision:Deny"


@contextmanager
def without_rights() -> Iterator[tuple[FakeServer, RemoteRoute]]:
    """Connect to a broker of 5.x with ACL, which refuses the heartbeats of a group without rights."""

    def answer(frame: Frame) -> Frame:
        if frame.code == RequestCode.GET_CONSUMER_LIST_BY_GROUP:
            return answer_to(frame, *(server.heartbeat_refusal or (1, "no consumer for this group, billing")))
        return answer_to(frame, 22)

    with FakeServer(answer) as server, librmq.connect(server.address) as route:
        server.heartbeat_refusal = NO_RIGHTS
        yield server, route


def reader(route: RemoteRoute) -> librmq.PullConsumer:
    return librmq.PullConsumer(route, "billing", consume_from=ConsumeFrom.FIRST)


async def polled_async(route: RemoteRoute) -> list[librmq.DeliveredMessage]:
    async with reader(route) as consumer:
        consumer.subscribe("orders")
        return await consumer.poll_async(1)


def polled(route: RemoteRoute, *, assigned: bool = False) -> list[librmq.DeliveredMessage]:
    with reader(route) as consumer:
        if assigned:
            consumer.assign(consumer.queues("orders"))
        else:
            consumer.subscribe("orders")
        return consumer.poll(1)


@pytest.mark.parametrize(
    "consume",
    [
        polled,
        partial(polled, assigned=True),
        lambda route: asyncio.run(polled_async(route)),
        lambda route: list(route.consume("orders", group="billing", timeout=1)),
    ],
)
def test_a_group_without_rights_is_no_empty_topic(consume: Callable[[RemoteRoute], object]) -> None:
    with without_rights() as (_, route), pytest.raises(librmq.BrokerError, match="fake gives it no messages") as caught:
        until(lambda: consume(route) is None)  # a second can be too short for the answer to the heartbeat
    assert caught.value.code == NO_RIGHTS[0]
    assert NO_RIGHTS[1] in str(caught.value)


def is_refused(consumer: librmq.PullConsumer) -> bool:
    try:
        assert consumer.poll(0.01) == []
    except librmq.BrokerError as error:
        return error.code == NO_RIGHTS[0]
    return False


def test_a_group_that_loses_its_rights_and_gets_them_again() -> None:
    with without_rights() as (server, route), reader(route) as consumer:
        server.heartbeat_refusal = ()
        consumer.subscribe("orders")
        assert not is_refused(consumer)
        server.heartbeat_refusal = NO_RIGHTS
        route.broker("fake").beat()
        until(lambda: is_refused(consumer))
        server.heartbeat_refusal = (2, "[REJECTREQUEST]system busy, start flow control for a while")
        consumer.client.beat()
        assert is_refused(consumer)
        server.heartbeat_refusal = ()
        consumer.client.beat()
        assert not is_refused(consumer)


def test_a_busy_broker_refuses_nobody_for_good() -> None:
    with without_rights() as (server, route):
        server.heartbeat_refusal = (2, "[REJECTREQUEST]system busy, start flow control for a while")
        with reader(route) as consumer:
            consumer.subscribe("orders")
            assert not is_refused(consumer)


@pytest.mark.parametrize(
    "raw", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\0", b"\0\0\0\4\0\0\0\0", b"\x7f\xff\xff\xff", b"\0" * 64]
)
def test_bytes_that_are_no_frames_end_a_connection(raw: bytes) -> None:
    with (
        FakeServer(lambda frame: raw) as server,
        librmq.connect(server.address) as route,
        pytest.raises(BrokerUnreachableError, match=r"sends no frames|can't be read"),
    ):
        route.endpoint("fake").call(protocol.MaxOffset("orders", 0))


@pytest.mark.parametrize(("used", "is_full"), [("0.91", True), ("0.51", False)])
def test_a_full_disk_of_a_broker_reaches_the_producer(used: str, is_full: bool) -> None:
    """A broker of 4.9 names several causes, and how full the disk is."""
    remark = (
        "service not available now. It may be caused by one of the following reasons: the broker's disk is full "
        f"[CL:  {used} CQ:  0.51 INDEX:  0.51], messages are put to the slave, message store has been shut down, etc."
    )
    with (
        FakeServer(lambda frame: answer_to(frame, 14, remark)) as server,
        librmq.connect(server.address) as route,
        librmq.Producer(route, "shop", retries=0) as producer,
        pytest.raises(librmq.BrokerError, match="service not available now") as caught,
    ):
        producer.send("orders", b"x")
    assert isinstance(caught.value, librmq.DiskFullError) is is_full


@pytest.mark.parametrize(
    ("places", "next_offset", "error"),
    [
        ([("payments", 0, 0)], 1, "expected messages of queue 0, found one of 'payments', queue 0"),
        ([("orders", 1, 0)], 1, "expected messages of queue 0, found one of 'orders', queue 1"),
        ([("orders", 0, 0)], 0, "expected messages from offset 0 on, found 1 with 0 as the next"),
        ([], 1, "expected messages from offset 0 on, found 0 with 1 as the next"),
        ([("orders", 0, 1), ("orders", 0, 0)], 2, "expected a message of offsets 2 to 1, found one of 0"),
        ([("orders", 0, 0), ("orders", 0, 0)], 2, "expected a message of offsets 1 to 1, found one of 0"),
        ([("orders", 0, 0), ("orders", 0, 2)], 2, "expected a message of offsets 1 to 1, found one of 2"),
    ],
)
def test_messages_that_a_pull_did_not_ask_for_are_not_handed_out(
    places: list[tuple[str, int, int]], next_offset: int, error: str
) -> None:
    with Broker.temporary() as broker:
        for name in ("orders", "payments"):
            for queue in (0, 1):
                with librmq.Producer(broker, f"shop-{name}-{queue}") as producer:
                    for _ in range(3):
                        producer.send(name, b"x", queue=queue)
        raws = {(message.topic, message.queue_id, message.queue_offset): message.raw for message in broker.store}

    def answer(frame: Frame) -> Frame:
        offsets = {"nextBeginOffset": str(next_offset), "minOffset": "0", "maxOffset": "9", "suggestWhichBrokerId": "0"}
        return answer_to(frame, fields=offsets, body=b"".join(raws[place] for place in places))

    with (
        FakeServer(answer) as server,
        librmq.connect(server.address) as route,
        pytest.raises(BrokerUnreachableError, match=f"the answer to a pull of orders can't be read: {error}"),
    ):
        route.endpoint("fake").call(protocol.PullMessage("c", "g", "orders", 0, 0))


@pytest.mark.parametrize(
    ("sent", "groups", "expected"),
    [
        (protocol.SendBack("g", 0, 0, 2, reconsume_times=1), None, protocol.SentBack(False, 2)),
        (protocol.SendBack("g", 0, 0, 2, reconsume_times=2), None, protocol.SentBack(True, 2)),
        (protocol.SendBack("g", 0, -1), None, protocol.SentBack(True, 0)),
        (protocol.SendBack("g", 0, 0, reconsume_times=3), {"g": {"retryMaxTimes": 4}}, protocol.SentBack(False, 4)),
        (protocol.SendBack("g", 0, 0, reconsume_times=4), {"g": {"retryMaxTimes": 4}}, protocol.SentBack(True, 4)),
        (protocol.SendBack("g", 0, 0), {"h": {"retryMaxTimes": 4}}, None),
        (protocol.SendBack("g", 0, 0), ["g"], None),
        (protocol.SendBack("g", 0, 0), None, None),
    ],
)
def test_the_fate_of_a_message_is_derived(
    sent: protocol.SendBack, groups: object, expected: protocol.SentBack | None
) -> None:
    """The answer to a message that is sent back has nothing; the settings of the group say how often it can be."""
    asked: list[int] = []

    def answer(frame: Frame) -> Frame:
        asked.append(frame.code)
        if frame.code == RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG:
            if groups is None:
                return answer_to(frame, 1, "no permission")
            return answer_to(frame, body=write_body({"subscriptionGroupTable": groups}))
        return answer_to(frame)

    with FakeServer(answer) as server, librmq.connect(server.address) as route:
        endpoint = route.endpoint("fake")
        assert [endpoint.call(sent) for _ in range(2)] == [expected] * 2
    assert asked.count(RequestCode.CONSUMER_SEND_MSG_BACK) == 2


def test_an_answer_that_never_comes_ends_the_send_in_time() -> None:
    """Its own timeout counts, not that of the route, and the connection is still good for other requests."""

    def answer(frame: Frame) -> Frame | None:
        return None if frame.code == RequestCode.SEND_MESSAGE_V2 else answer_to(frame, fields={"offset": "7"})

    with FakeServer(answer) as server, librmq.connect(server.address, timeout=600) as route:
        with (
            librmq.Producer(route, "shop") as producer,
            pytest.raises((BrokerUnreachableError, librmq.SendTimeoutError)),
        ):
            producer.send("orders", b"x", timeout=0.3)
        assert route.endpoint("fake").call(protocol.MaxOffset("orders", 0)) == 7


def test_a_signal_handler_can_send_within_a_send() -> None:
    """It interrupts a send on the same thread at each call, and has the result of its own meanwhile."""
    places: list[int] = []
    with relayed(1) as (broker, _, route), librmq.Producer(route, "shop") as producer:
        producer.send("orders", b"first")
        before = signal.signal(
            signal.SIGUSR1, lambda *_: places.append(producer.send("orders", b"handler").queue_offset)
        )
        try:
            for number, came in enumerate(at_each_call(lambda: producer.send("orders", b"send"), signal.SIGUSR1), 1):
                assert len(places) == number - (not came)
        finally:
            signal.signal(signal.SIGUSR1, before)
        bodies = [message.body for message in broker.messages("orders")]
    assert len(places) > 60  # some 116, and fewer where an answer comes before the wait for it
    assert [bodies[place] for place in places] == [b"handler"] * len(places)
    assert bodies.count(b"send") == len(places) + 1


def test_async_sends_survive_cuts() -> None:
    """Each is stored where its result says."""
    with relayed(2) as (broker, relay, route), librmq.Producer(route, "shop", timeout=20) as producer:
        producer.send("orders", b"first")

        async def run() -> list[librmq.SendResult]:
            free = asyncio.Semaphore(64)

            async def send(number: int) -> librmq.SendResult:
                async with free:
                    if number in (300, 700):
                        relay.cut()
                    while True:  # like a program that must not lose a message
                        with suppress(BrokerUnreachableError):
                            return await producer.send_async("orders", b"%d" % number)

            return await asyncio.gather(*map(send, range(1_000)))

        results = asyncio.run(run())
        stored = {(message.queue_id, message.queue_offset): message.body for message in broker.messages("orders")}
    places = [(result.queue.queue_id, result.queue_offset) for result in results]
    assert [stored[place] for place in places] == [b"%d" % number for number in range(1_000)]


@pytest.mark.parametrize("refusals", [2, 3])
def test_async_sends_are_tried_as_often_as_others(refusals: int) -> None:
    codes = [int(protocol.ResponseCode.SYSTEM_ERROR)] * refusals

    def answer(frame: Frame) -> Frame | None:
        if frame.fields.get("b") != "orders" or frame.body == b"first":
            return answer_to(frame, fields=_STORED)
        return answer_to(frame, codes.pop()) if codes else answer_to(frame, fields=_STORED)

    with FakeServer(answer) as server, librmq.connect(server.address) as route:
        producer = librmq.Producer(route, "shop")
        producer.send("orders", b"first")
        sent = partial(asyncio.run, producer.send_async("orders", b"x"))
        if refusals == 2:
            assert sent().queue_offset == 7
        else:
            with pytest.raises(librmq.BrokerError):
                sent()
        assert codes == []


RULES: dict[str, tuple[dict[str, Any], int, int, int, object]] = {
    "stored": ({}, 0, 0, 1, protocol.SendStatus.SEND_OK),
    "stored too late": ({}, 0, 600_000, 1, librmq.SendTimeoutError),
    "not flushed": ({}, protocol.ResponseCode.FLUSH_DISK_TIMEOUT, 0, 1, protocol.SendStatus.FLUSH_DISK_TIMEOUT),
    "not flushed, and to be sent again": (
        {"retry_another_broker_when_not_ok": True},
        protocol.ResponseCode.FLUSH_DISK_TIMEOUT,
        0,
        3,
        protocol.SendStatus.FLUSH_DISK_TIMEOUT,
    ),
    "refused for now": ({}, protocol.ResponseCode.SYSTEM_ERROR, 0, 3, librmq.BrokerError),
    "refused": ({}, protocol.ResponseCode.MESSAGE_ILLEGAL, 0, 1, librmq.MessageIllegalError),
}


@pytest.mark.parametrize(("options", "code", "took_ms", "tries", "outcome"), RULES.values(), ids=RULES)
def test_usual_sends_keep_the_rules_of_tries(
    options: dict[str, Any], code: int, took_ms: int, tries: int, outcome: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = 1_000_000

    def answer(frame: Frame) -> Frame:
        nonlocal now_ms
        if frame.body != b"x":
            return answer_to(frame, fields=_STORED)
        now_ms += took_ms
        return answer_to(frame, code, fields=_STORED)

    with FakeServer(answer) as server, librmq.connect(server.address) as route:
        producer = librmq.Producer(route, "shop", **options)
        producer.send("orders", b"first")
        for part in (producer, producer.sender):
            monkeypatch.setattr(part, "_now_ms", lambda: now_ms)
        if isinstance(outcome, protocol.SendStatus):
            assert producer.send("orders", b"x").status is outcome
        else:
            with pytest.raises(cast("type[Exception]", outcome)):
                producer.send("orders", b"x")
        assert [frame.body for frame in server.asked].count(b"x") == tries


def test_usual_sends_with_a_priority_keep_its_queue() -> None:
    """A broker before 5.4 does not choose it."""
    with FakeServer(lambda frame: answer_to(frame, fields=_STORED)) as server:
        server.queues = 4
        with librmq.connect(server.address) as route:
            producer = librmq.Producer(route, "shop")
            producer.send("orders", b"first")
            for _ in range(3):
                producer.send("orders", b"x", priority=2)
        assert [frame.fields["e"] for frame in server.asked if frame.body == b"x"] == ["2", "2", "2"]


@pytest.mark.parametrize("sends_first", [0, 1, 2])
def test_async_sends_take_turns_of_brokers(sends_first: int) -> None:
    """Whether or not other sends have asked a broker before."""

    def answer(frame: Frame) -> Frame:
        return answer_to(frame, fields=_STORED)

    with FakeServer(answer) as server, FakeServer(answer) as second:
        server.others["second"] = second.address
        with librmq.connect(server.address) as route:
            producer = librmq.Producer(route, "shop")
            before = [producer.send("orders", b"x") for _ in range(sends_first)]

            async def run() -> list[librmq.SendResult]:
                return [await producer.send_async("orders", b"x") for _ in range(6)]

            names = [result.queue.broker_name for result in before + asyncio.run(run())]
    assert set(names) == {"fake", "second"}
    assert names[1:] == ["second" if name == "fake" else "fake" for name in names[:-1]]


def test_an_async_send_without_an_answer_ends_in_time() -> None:

    def answer(frame: Frame) -> Frame | None:
        return None if frame.body == b"x" else answer_to(frame, fields=_STORED)

    with FakeServer(answer) as server, librmq.connect(server.address, timeout=600) as route:
        producer = librmq.Producer(route, "shop")
        producer.send("orders", b"first")
        with pytest.raises((BrokerUnreachableError, librmq.SendTimeoutError)):
            asyncio.run(producer.send_async("orders", b"x", timeout=0.3))
        assert asyncio.run(producer.send_async("orders", b"y")).queue_offset == 7  # of another loop


def test_an_async_send_that_is_late_before_it_goes_out_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop that was busy looks for late sends in the turn in which this one begins."""
    with (
        FakeServer(lambda frame: answer_to(frame, fields=_STORED) if frame.body == b"first" else None) as server,
        librmq.connect(server.address, timeout=600) as route,
    ):
        producer = librmq.Producer(route, "shop", timeout=20, retries=0)
        producer.send("orders", b"first")

        async def run() -> list[object]:
            loop, busy_s = asyncio.get_running_loop(), 0
            time_of_loop = loop.time
            monkeypatch.setattr(loop, "time", lambda: time_of_loop() + busy_s)

            def be_busy() -> None:
                nonlocal busy_s
                busy_s += 21

            before = asyncio.ensure_future(producer.send_async("orders", b"before"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            be_busy()
            late = asyncio.ensure_future(producer.send_async("orders", b"late"))
            loop.call_soon(be_busy)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.wait((before, late), timeout=WAIT_S)
            return [send.done() and type(send.exception()) for send in (before, late)]

        assert asyncio.run(run()) == [BrokerUnreachableError] * 2


@contextmanager
def held_sends() -> Iterator[tuple[FakeServer, librmq.Producer, Callable[[], Connection], threading.Event]]:
    """Yield a server that answers sends, except the first, after an event; its producer and the connection of these."""
    answers = threading.Event()

    def answer(frame: Frame) -> Frame:
        assert frame.body == b"first" or answers.wait(WAIT_S)
        return answer_to(frame, fields=_STORED)

    with FakeServer(answer) as server, librmq.connect(server.address, timeout=600) as route:
        producer = librmq.Producer(route, "shop", timeout=600, compress_from=8 << 20)
        producer.send("orders", b"first")

        def opened() -> Connection:
            transport = route._connections.get_open(server.address)
            assert isinstance(transport, Connection)
            return transport

        yield server, producer, opened, answers
        answers.set()


def test_async_sends_of_different_times_keep_one_timer() -> None:
    with held_sends() as (_, producer, _, answers):

        async def run() -> librmq.SendResult:
            kept = asyncio.ensure_future(producer.send_async("orders", b"kept"))
            for _ in range(3):
                with pytest.raises((BrokerUnreachableError, librmq.SendTimeoutError)):
                    await producer.send_async("orders", b"late", timeout=0.03)
            timers = cast("Any", asyncio.get_running_loop())._scheduled
            looks = [timer for timer in timers if "_end_late" in repr(timer) and not timer.cancelled()]
            assert len(looks) == 1
            answers.set()
            return await kept

        assert asyncio.run(run()).queue_offset == 7


def test_async_sends_that_an_error_stops_go_out_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected one, which the event loop reports."""
    with held_sends() as (_, producer, _, answers):
        answers.set()
        errors: list[object] = []

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(Connection, "send_later", fail)

        async def run() -> list[librmq.SendResult]:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
            return await asyncio.wait_for(
                asyncio.gather(*(producer.send_async("orders", b"%d" % number) for number in range(3))), WAIT_S
            )

        assert [result.queue_offset for result in asyncio.run(run())] == [7] * 3
        assert [type(error) for error in errors] == [ZeroDivisionError]


def test_async_sends_do_not_wait_for_a_slow_server() -> None:
    """A thread sends what the socket does not take, and others follow in threads."""
    with held_sends() as (_, producer, opened, answers):

        async def run() -> list[librmq.SendResult]:
            sends = asyncio.gather(*(producer.send_async("orders", bytes(1 << 20)) for _ in range(40)))
            while not opened().stream._write_lock.locked():
                await asyncio.sleep(0)
            sends_later = asyncio.gather(*(producer.send_async("orders", b"%d" % number) for number in range(9)))
            await asyncio.sleep(0)
            answers.set()
            return [*await sends, *await sends_later]

        assert [result.queue_offset for result in asyncio.run(run())] == [7] * 49
        assert not opened().outstanding


def test_a_cancelled_async_send_leaves_nothing_behind() -> None:
    with held_sends() as (server, producer, opened, answers):

        async def run() -> librmq.SendResult:
            unsent = asyncio.ensure_future(producer.send_async("orders", b"unsent"))
            asyncio.get_running_loop().call_soon(unsent.cancel)  # in the turn in which it begins
            sent, kept = (asyncio.ensure_future(producer.send_async("orders", body)) for body in (b"sent", b"kept"))
            while len(opened().outstanding) < 2:
                await asyncio.sleep(0)
            sent.cancel()
            answers.set()
            result = await kept
            outcomes = await asyncio.gather(unsent, sent, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError] * 2
            return result

        assert asyncio.run(run()).queue_offset == 7
        assert [frame.body for frame in server.asked if frame.fields.get("b") == "orders"] == [
            b"first",
            b"sent",
            b"kept",
        ]
        assert not opened().outstanding
        assert producer.sender._loop_sends is not None
        assert not producer.sender._loop_sends._under_way


def test_a_closed_loop_leaves_its_connection_to_others() -> None:
    """Its sends are under way; their answers disturb nothing."""
    with held_sends() as (_, producer, opened, answers):

        async def leave() -> None:
            left = asyncio.ensure_future(producer.send_async("orders", b"left"))
            while not opened().outstanding:
                await asyncio.sleep(0)
            assert not left.done()

        asyncio.run(leave())
        before = opened()
        answers.set()
        assert producer.send("orders", b"other").queue_offset == 7
        assert asyncio.run(producer.send_async("orders", b"of another loop")).queue_offset == 7
        assert opened() is before
        assert not opened().outstanding


def test_async_sends_pass_what_watches_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook, and an endpoint that passes other attributes on."""
    seen: list[str] = []

    class Passing(protocol.Endpoint):
        def __init__(self, behind: Any) -> None:
            self.behind = behind

        def __getattr__(self, name: str) -> Any:
            return getattr(self.behind, name)

        def call(self, request: Any) -> Any:
            seen.append(type(request).__name__)
            return self.behind.call(request)

    def send(producer: librmq.Producer) -> None:
        for _ in range(2):  # the first one asks for the route
            asyncio.run(producer.send_async("orders", b"x"))

    with relayed(1) as (_, _, route):
        send(librmq.Producer(route, "b", hooks=[lambda context: seen.append("hook")]))
        link = route.endpoint
        monkeypatch.setattr(route, "endpoint", lambda name: Passing(link(name)))
        send(librmq.Producer(route, "e"))
    sends = [name for name in seen if name not in ("Heartbeat", "Unregister")]
    assert sends == ["hook", "hook", "SendMessage", "SendMessage"]


def test_an_unknown_sentof_a_broker_is_refused() -> None:
    """It comes beside the answer to a lock, and the consumer locks its queue nevertheless."""
    locked = write_body({"lockOKMQSet": [{"topic": "orders", "brokerName": "fake", "queueId": 0}]})
    members = write_body({"consumerIdList": ["127.0.0.1@me"]})
    refused: list[Frame] = []

    def answer(frame: Frame) -> bytes | None:
        if frame.is_answer:
            refused.append(frame)
            return None
        if frame.code == RequestCode.LOCK_BATCH_MQ:
            return encode(Frame(999, opaque=77)) + encode(answer_to(frame, body=locked))
        return encode(answer_to(frame, body=members))

    with FakeServer(answer) as server, librmq.connect(server.address) as route:
        consumer = librmq.PushConsumer(route, "g", orderly=True, instance_name="me")
        consumer.subscribe("orders", lambda message: None)
        with consumer:
            until(lambda: bool(refused))
    assert (refused[0].code, refused[0].opaque) == (3, 77)
    assert refused[0].remark == "request type 999 not supported"


def test_a_pull_consumer_polls_on_after_a_cut() -> None:
    with ExitStack() as stack:
        broker, relay, route = stack.enter_context(relayed(1))
        consumer = librmq.PullConsumer(route, "g", consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders")
        stack.enter_context(consumer)
        assert consumer.poll(0.2) == []
        relay.cut()
        producer = stack.enter_context(librmq.Producer(broker, "shop"))
        producer.send("orders", b"x")
        assert [message.body for message in consumer.poll(WAIT_S)] == [b"x"]


class Standing(SystemClock):
    """A clock by which no time passes, while waiting takes real time."""

    def now_ms(self) -> int:
        return 1_700_000_000_000


def test_the_first_heartbeat_waits_only_for_the_connection(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller waits a moment only, because it holds the lock. The next regular heartbeat would come after 30 s."""
    monkeypatch.setattr("librmq.wire.remote.remote_route.Connections", partial(Connections, patience_s=0.0))
    runner = ThreadRunner(Standing())
    with librmq.connect(served.server.address, runner=runner) as route:
        served.broker.create_topic("orders", 2)
        consumer = librmq.PullConsumer(route, "g", consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders")
        with consumer:
            until(lambda: [one.client_id for one in served.broker.clients()] == [consumer.client.client_id])
            until(lambda: {queue.queue_id for queue in consumer.assigned if queue.topic == "orders"} == {0, 1})
    assert runner.shutdown()


def test_a_broker_whose_first_connection_opens_late_was_not_away(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else orderly consumers would distrust the locks that they have just got, and store no progress for a while."""
    monkeypatch.setattr("librmq.wire.remote.remote_route.Connections", partial(Connections, patience_s=0.0))
    notified, may_open = threading.Event(), threading.Event()

    def open_later(address: tuple[str, int], timeout: float) -> socket.socket:
        assert may_open.wait(WAIT_S)
        return socket.create_connection(address, timeout)

    may_open.set()
    with librmq.connect(served.server.address, open_socket=open_later) as route:
        before = route.endpoint("broker-a")
        route.watch(notified.set)
        may_open.clear()
        with librmq.Producer(route, "shop"):  # its heartbeat has not waited
            may_open.set()
            assert notified.wait(WAIT_S)
        assert route.endpoint("broker-a") is before


def test_a_join_waits_for_a_consumer_whose_connection_was_not_open(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker does not know it, and its next regular heartbeat would come after 30 s."""
    unheard = {"patience_s": 0.0, "opened_late": lambda *_: None}
    monkeypatch.setattr(
        "librmq.wire.remote.remote_route.Connections", lambda *words, **fields: Connections(*words, **fields | unheard)
    )
    served.broker.create_topic("orders", 2)
    inbox, runner = Inbox(1), ThreadRunner(Standing())
    with librmq.connect(served.server.address, runner=runner) as route:
        consumer = librmq.PushConsumer(route, "g", consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders", inbox)
        with librmq.Producer(served.broker, "shop") as producer, consumer:
            producer.send("orders", b"x")
            route.join(WAIT_S)
            assert inbox.bodies == [b"x"]
    assert runner.shutdown()


def test_a_shut_down_consumer_polls_no_more(served: Served) -> None:
    consumer = librmq.PullConsumer(served.route, "g")
    consumer.subscribe("orders")
    consumer.start()
    polled = threading.Event()

    def poll() -> None:
        with suppress(ClientStateError):  # the shutdown can come first
            consumer.poll(WAIT_S)
        polled.set()

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    consumer.shutdown()
    assert polled.wait(WAIT_S)
    with pytest.raises(ClientStateError):
        consumer.poll(0)


def test_a_broker_that_is_back_at_another_address_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refused connection is the only reason to ask the name server."""
    monkeypatch.setattr(remote_route, "POLL_MS", 3_600_000)

    def stored(frame: Frame) -> Frame:
        return answer_to(frame, fields={"msgId": "0" * 32, "queueId": "0", "queueOffset": "0"})

    with FakeServer(stored) as names, ExitStack() as stack:
        before = stack.enter_context(FakeServer(stored))
        names.broker = before.address
        route = stack.enter_context(librmq.connect(names.address))
        producer = stack.enter_context(librmq.Producer(route, "shop", retries=0))
        producer.send("orders", b"1")
        with FakeServer(stored) as after:
            names.broker = after.address
            before.close()

            def is_sent() -> bool:
                with suppress(BrokerUnreachableError):
                    return producer.send("orders", b"2") is not None
                return False

            until(is_sent)
            assert RequestCode.SEND_MESSAGE_V2 in [frame.code for frame in after.asked]
