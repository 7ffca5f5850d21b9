"""What a tool asks of a running client through its broker: its state, its progress, and to consume one message."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import librmq
from librmq import ConsumeFrom
from librmq.java import json as java_json
from librmq.java.json import ObjectKey
from librmq.wire.remoting._headers import RequestCode
from tests.wire.remoting_client import RawClient
from tests.wire.test_connect import WAIT_S, Inbox, Served, served_with, until

served = served_with(queues=2)


@pytest.fixture
def tool(served: Served) -> Iterator[RawClient]:
    with RawClient(served.server.port) as made:
        yield made


def running_info(tool: RawClient, client_id: str, **fields: Any) -> Any:
    return tool.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, consumer_group="g", client_id=client_id, **fields)


def of_queue(table: dict[ObjectKey, Any], topic: str, queue_id: int) -> Any:
    return table[ObjectKey({"brokerName": "broker-a", "queueId": queue_id, "topic": topic}.items())]


@pytest.mark.parametrize("orderly", [False, True])
def test_a_running_consumer_describes_itself(served: Served, tool: RawClient, orderly: bool) -> None:
    """A listener has one message, which counts as held, and its thread is among the stacks."""
    begun, end = threading.Event(), threading.Event()

    def hold_up_the_queue(message: librmq.DeliveredMessage) -> None:
        begun.set()
        end.wait(WAIT_S)

    consumer = librmq.PushConsumer(served.route, "g", orderly=orderly, threads=3, consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("orders", hold_up_the_queue, tags="new")
    with consumer, librmq.Producer(served.route, "shop") as producer:
        try:
            producer.send("orders", b"x", tags="new", queue=1)
            assert begun.wait(WAIT_S)
            info = running_info(tool, consumer.client.client_id, jstack_enable=True)
        finally:
            end.set()
    properties = info["properties"]
    assert properties["PROP_CONSUMEORDERLY"] == str(orderly).lower()
    assert properties["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
    assert properties["PROP_THREADPOOL_CORE_SIZE"] == "3"
    assert properties["PROP_NAMESERVER_ADDR"] == f"{served.server.address};"
    assert int(properties["PROP_CONSUMER_START_TIMESTAMP"]) > 0
    by_topic = {row["topic"]: row for row in info["subscriptionSet"]}
    assert by_topic["orders"]["subString"] == "new"
    assert set(by_topic) == {"orders", "%RETRY%g"}
    held = of_queue(info["mqTable"], "orders", 1)
    assert (held["cachedMsgCount"], held["cachedMsgMinOffset"], held["cachedMsgMaxOffset"]) == (1, 0, 0)
    assert held["locked"] is orderly
    assert (held["lastLockTimestamp"] > 0) is orderly
    assert held["lastPullTimestamp"] > 0
    assert of_queue(info["mqTable"], "orders", 0)["cachedMsgCount"] == 0
    assert "hold_up_the_queue" in info["jstack"]


def test_a_pull_consumer_describes_itself(served: Served, tool: RawClient) -> None:
    with librmq.PullConsumer(served.route, "g") as consumer:
        consumer.subscribe("orders")
        until(lambda: served.broker.connections("g") is not None)
        info = running_info(tool, consumer.client.client_id)
    assert info["properties"]["PROP_CONSUME_TYPE"] == "CONSUME_ACTIVELY"
    assert "jstack" not in info


def test_a_group_of_another_client_is_refused(served: Served, tool: RawClient) -> None:
    with librmq.PullConsumer(served.route, "g") as consumer:
        consumer.subscribe("orders")
        until(lambda: served.broker.connections("g") is not None)
        fields = {"consumer_group": "another", "client_id": consumer.client.client_id}
        answer = tool.call(RequestCode.GET_CONSUMER_RUNNING_INFO, **fields)
    assert answer.code == 1
    assert answer.remark is not None
    assert "no producer or consumer of group 'another'" in answer.remark


def test_instances_report_themselves_at_every_route(served: Served) -> None:
    """Those of the broker's process and of others, to both."""
    ids = set()
    with ExitStack() as stack:
        for threads, route in ((2, served.broker), (3, served.route)):
            consumer = librmq.PushConsumer(route, "g", threads=threads)
            consumer.subscribe("orders", accept)
            stack.enter_context(consumer)
            ids.add((consumer.client.client_id, threads, 0))
        until(lambda: len(served.broker.instances("g", timeout=0)) == 2)
        for route in (served.broker, served.route):
            states = route.instances("g").values()
            assert {(state.client_id, state.threads, state.running) for state in states if state is not None} == ids


def test_an_instance_that_keeps_silent_holds_nothing_up(served: Served, tool: RawClient) -> None:
    tool.beat("mute", "g", topics=("orders",))
    for route in (served.broker, served.route):
        assert route.instances("g", timeout=0.1) == {"mute": None}
        assert route.lag("g") == 0  # the broker itself counts as no silent one


def test_progress_in_memory_is_reported(served: Served, tool: RawClient) -> None:
    inbox = Inbox(3)
    consumer = librmq.PushConsumer(served.route, "g", consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("orders", inbox)
    with consumer, librmq.Producer(served.route, "shop") as producer:
        for _ in range(3):
            producer.send("orders", b"x", queue=1)
        inbox.wait()
        until(lambda: 3 in consumer.progress("orders").values())
        code = RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS
        found = tool.ask(code, topic="orders", group="g")["consumerTable"][consumer.client.client_id]
    assert of_queue(found, "orders", 1) == 3


def consumed(served: Served, tool: RawClient, consumer: librmq.PushConsumer, topic: str = "orders") -> Any:
    """Let the consumer have a message directly that it does not get otherwise, and return the result."""
    with librmq.Producer(served.broker, "shop") as producer:
        sent = producer.send(topic, b"x", tags="new")
        fields = {"consumer_group": "g", "client_id": consumer.client.client_id, "msg_id": sent.offset_id}
        return tool.call(RequestCode.CONSUME_MESSAGE_DIRECTLY, broker_name="broker-a", **fields)


def fail(message: librmq.DeliveredMessage) -> None:
    raise LookupError("no such order")


def refuse(message: librmq.DeliveredMessage) -> None:
    raise librmq.ReconsumeLater("not now")


def accept(message: librmq.DeliveredMessage) -> None:
    assert (message.body, message.queue.broker_name) == (b"x", "broker-a")


async def accept_later(message: librmq.DeliveredMessage) -> None:
    accept(message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("listener", "settings", "result", "remark"),
    [
        (accept, {}, "CR_SUCCESS", None),
        (accept_later, {}, "CR_SUCCESS", None),
        (accept, {"orderly": True}, "CR_SUCCESS", None),
        (refuse, {}, "CR_LATER", "ReconsumeLater: not now"),
        (fail, {"orderly": True}, "CR_THROW_EXCEPTION", "LookupError: no such order"),
    ],
)
def test_a_message_is_consumed_directly(
    served: Served, tool: RawClient, listener: Any, settings: Any, result: str, remark: str | None
) -> None:
    """The consumer is paused, so it gets the message only this way."""
    consumer = librmq.PushConsumer(served.route, "g", **settings)
    consumer.subscribe("orders", listener)
    consumer.pause()
    with consumer:
        until(lambda: served.broker.connections("g") is not None)
        answer = consumed(served, tool, consumer)
        assert answer.code == 0
        body = java_json.loads(answer.body)
    assert (body["consumeResult"], body.get("remark")) == (result, remark)
    assert body["order"] is settings.get("orderly", False)
    assert body["spentTimeMills"] >= 0


def test_a_message_without_a_listener_is_refused(served: Served, tool: RawClient) -> None:
    served.broker.create_topic("others", 1)
    consumer = librmq.PushConsumer(served.route, "g")
    consumer.subscribe("orders", accept)
    with consumer:
        until(lambda: served.broker.connections("g") is not None)
        answer = consumed(served, tool, consumer, "others")
    assert answer.code == 1
    assert answer.remark is not None
    assert "it has no listener for topic 'others'" in answer.remark


def test_a_pull_consumer_consumes_nothing_directly(served: Served, tool: RawClient) -> None:
    with librmq.PullConsumer(served.route, "g") as consumer:
        consumer.subscribe("orders")
        until(lambda: served.broker.connections("g") is not None)
        fields = {"consumer_group": "g", "client_id": consumer.client.client_id, "broker_name": "broker-a"}
        with librmq.Producer(served.broker, "shop") as producer:
            fields["msg_id"] = producer.send("orders", b"x").offset_id
        answer = tool.call(RequestCode.CONSUME_MESSAGE_DIRECTLY, **fields)
    assert answer.code == 1
    assert answer.remark is not None
    assert "answers no ConsumeDirectly" in answer.remark
