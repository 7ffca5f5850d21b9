"""Requests and replies over TCP: between routes, and between a route and the broker's own process."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator

import pytest

import librmq
from librmq import ConsumeFrom, DeliveredMessage, SendTimeoutError
from librmq.clock import SystemClock
from librmq.message.properties import decode_properties
from librmq.protocol import Route
from librmq.runtime.threads import ThreadRunner
from librmq.wire.remoting.headers import RequestCode
from tests.wire.remoting_client import RawClient
from tests.wire.test_connect import WAIT_S, Served, until


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    with made.stack:
        made.broker.create_topic("orders", 1)
        yield made


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
