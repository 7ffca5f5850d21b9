"""Requests that wait for a reply, in one process: by a test's clock, and by threads."""

from __future__ import annotations

import asyncio

import pytest

import librmq
from librmq import Broker, BrokerError, ClientStateError, DeliveredMessage, MessageIllegalError, SendTimeoutError
from librmq.testing import Kit


def add_replies(consumer: librmq.PushConsumer, producer: librmq.Producer) -> None:
    """Reply to each order with its body in capitals."""

    @consumer.subscribe("orders")
    def handle(message: DeliveredMessage) -> None:
        producer.reply(message, message.body.upper(), tags="done", properties={"price": "3"})


@pytest.mark.parametrize("over_tcp", [False, pytest.param(True, marks=pytest.mark.rmq(over_tcp=True))])
def test_a_request_gets_its_reply(rmq: Kit, over_tcp: bool) -> None:
    add_replies(rmq.consumer("billing"), rmq.producer("replies"))
    reply = rmq.producer("shop").request("orders", b"tea", keys=["k1"])
    assert (reply.body, reply.tags, reply.properties["price"]) == (b"TEA", "done", "3")
    assert reply.topic == "DefaultCluster_REPLY_TOPIC"
    (stored,) = rmq.broker.messages("DefaultCluster_REPLY_TOPIC")
    assert stored.body == b"TEA"
    assert stored.properties["CORRELATION_ID"] == reply.properties["CORRELATION_ID"]


def test_a_request_without_a_reply_ends_in_time(rmq: Kit) -> None:
    begin_ms = rmq.clock.now_ms()
    with pytest.raises(SendTimeoutError, match=r"no reply to the request \w+ came within 5 s"):
        rmq.producer("shop").request("orders", b"tea", timeout=5)
    assert rmq.clock.now_ms() - begin_ms == 5_000
    assert [message.body for message in rmq.broker.messages("orders")] == [b"tea"]


def test_a_late_reply_is_ignored(rmq: Kit) -> None:
    kept: list[DeliveredMessage] = []
    rmq.consumer("billing").subscribe("orders", kept.append)
    asking, replying = rmq.producer("shop"), rmq.producer("replies")
    with pytest.raises(SendTimeoutError):
        asking.request("orders", b"tea", timeout=1)
    replying.reply(kept[0], b"too late")
    rmq.run_until_idle()


def test_the_requester_has_gone(rmq: Kit) -> None:
    kept: list[DeliveredMessage] = []
    rmq.consumer("billing").subscribe("orders", kept.append)
    asking = rmq.producer("shop")
    with pytest.raises(SendTimeoutError):
        asking.request("orders", b"tea", timeout=1)
    asking.shutdown()
    with pytest.raises(BrokerError, match=r"not connected here|can't be asked"):
        rmq.producer("replies").reply(kept[0], b"x")
    with pytest.raises(ClientStateError):
        asking.request("orders", b"tea")


def test_a_message_that_is_no_request_gets_no_reply(rmq: Kit) -> None:
    kept: list[DeliveredMessage] = []
    rmq.consumer("billing").subscribe("orders", kept.append)
    producer = rmq.producer("shop")
    producer.send("orders", b"tea")
    rmq.run_until_idle()
    with pytest.raises(
        MessageIllegalError, match=r"has no property CORRELATION_ID: reply only to what Producer\.request"
    ):
        producer.reply(kept[0], b"x")


def test_requests_of_coroutines_get_their_own_replies() -> None:
    async def run(broker: Broker) -> list[bytes]:
        async with librmq.Producer(broker, "shop") as producer:
            asked = (producer.request_async("orders", b"n%d" % number, timeout=30) for number in range(8))
            return [reply.body for reply in await asyncio.gather(*asked)]

    with Broker.temporary() as broker, librmq.Producer(broker, "replies") as producer:
        consumer = librmq.PushConsumer(broker, "billing", consume_from=librmq.ConsumeFrom.FIRST)
        add_replies(consumer, producer)
        with consumer:
            assert asyncio.run(run(broker)) == [b"N%d" % number for number in range(8)]
