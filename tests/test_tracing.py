"""Spans of OpenTelemetry, as an exporter gets them."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import librmq
from librmq.client import Client
from librmq.errors import ClientError
from librmq.idempotence import Outbox, OutboxSender, upgrade_tables
from librmq.testing import Kit
from librmq.tracing import Instrumentor, instrument
from librmq.wire.remoting import RemotingServer
from tests.programs import run_program

# Requirement levels of open-telemetry/semantic-conventions at e10a930844c6951757a43b849d364f7d056ac32b (v1.44.0), in
# model/messaging/spans.yaml and rocketmq.yaml: + required, ? where it applies or recommended, - opt-in.
COMMON = """
+messaging.system +messaging.operation.name ?messaging.operation.type ?messaging.destination.name
?messaging.destination.template ?messaging.destination.partition.id ?messaging.message.id
?messaging.message.conversation_id ?error.type ?server.address ?server.port ?messaging.client.id
?messaging.batch.message_count +messaging.rocketmq.namespace ?messaging.rocketmq.message.group
?messaging.rocketmq.message.type ?messaging.rocketmq.message.tag ?messaging.rocketmq.message.keys
"""
CONSUMER = COMMON + "+messaging.consumer.group.name ?messaging.rocketmq.consumption_model"
SIZES = " -messaging.message.body.size -messaging.message.envelope.size"
NETWORK = " ?network.peer.address ?network.peer.port"
DELAYS = " ?messaging.rocketmq.message.delivery_timestamp ?messaging.rocketmq.message.delay_time_level"
CONVENTIONS = {
    "send": (COMMON + SIZES + NETWORK + DELAYS, {SpanKind.PRODUCER, SpanKind.CLIENT}),
    "receive": (CONSUMER + SIZES + NETWORK, {SpanKind.CLIENT}),
    "process": (CONSUMER + SIZES, {SpanKind.CONSUMER}),
    "settle": (CONSUMER + NETWORK, {SpanKind.CLIENT}),
    None: (COMMON, {SpanKind.CLIENT}),  # the end of a transaction, which the conventions do not describe
}
START_NS = 1_700_000_000_000_000_000


class Spans:
    """The spans of a test by their names."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("application")

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


@pytest.fixture
def spans() -> Iterator[Spans]:
    """Every span of a test is compared with the conventions."""
    spans = Spans()
    yield spans
    for span in spans.exporter.get_finished_spans():
        if span.instrumentation_scope is None or span.instrumentation_scope.name != "librmq":
            continue
        attributes = dict(span.attributes or {})
        levels, kinds = CONVENTIONS[attributes.get("messaging.operation.type")]  # type: ignore[index]
        allowed = {name[1:] for name in levels.split()}
        required = {name[1:] for name in levels.split() if name[0] == "+"}
        assert {name for name in attributes if not name.startswith("librmq.")} <= allowed, span.name
        assert required <= attributes.keys(), span.name
        assert span.kind in kinds, span.name
        assert ("error.type" in attributes) is (span.status.status_code is StatusCode.ERROR), span.name


@pytest.fixture
def rmq() -> Iterator[Kit]:
    with Kit() as kit:
        yield kit


def context_of(span: ReadableSpan) -> trace.SpanContext:
    span_context = span.get_span_context()
    assert span_context is not None
    return span_context


def ids(spans: list[ReadableSpan]) -> list[int]:
    return [context_of(span).span_id for span in spans]


def linked(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


def test_a_send_and_its_listener(rmq: Kit, spans: Spans) -> None:
    instrument(rmq.broker, spans.provider)
    current: list[int] = []
    consumer = rmq.consumer("mailer")
    consumer.subscribe("orders", lambda message: current.append(trace.get_current_span().get_span_context().span_id))
    consumer.start()
    rmq.advance(seconds=1)
    with spans.tracer.start_as_current_span("POST /orders") as request:
        producer = rmq.producer()
        result = producer.send("orders", "one", tags="paid", keys=["7", "8"])
        rmq.advance(seconds=5)
    send, process = spans.one("send orders"), spans.one("process orders")
    assert send.parent is not None
    assert send.parent.span_id == request.get_span_context().span_id
    assert send.kind is SpanKind.PRODUCER
    # What is current in the thread that takes the turn has not caused the delivery.
    assert (process.parent, linked(process)) == (None, ids([send]))
    assert current == ids([process])
    assert dict(send.attributes or {}) == {
        "messaging.system": "rocketmq",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.client.id": producer.client.client_id,
        "messaging.destination.name": "orders",
        "messaging.destination.partition.id": str(result.queue.queue_id),
        "messaging.message.id": result.message_id,
        "messaging.rocketmq.namespace": "",
        "messaging.rocketmq.message.type": "normal",
        "messaging.rocketmq.message.tag": "paid",
        "messaging.rocketmq.message.keys": ("7", "8"),
    }
    attributes = process.attributes or {}
    assert attributes["messaging.consumer.group.name"] == "mailer"
    assert attributes["messaging.rocketmq.consumption_model"] == "clustering"
    assert attributes["messaging.message.id"] == result.message_id
    assert attributes["messaging.destination.partition.id"] == str(result.queue.queue_id)
    assert attributes["librmq.delivery_attempt"] == 1


def test_a_namespace_stands_apart_from_the_topic(rmq: Kit, spans: Spans) -> None:
    instrument(rmq, spans.provider)
    rmq.producer().send("shop%orders", b"one")
    rmq.producer().send("orders", b"two")
    values = [
        (
            span.name,
            *(dict(span.attributes or {})[f"messaging.{name}"] for name in ("destination.name", "rocketmq.namespace")),
        )
        for span in spans.exporter.get_finished_spans()
    ]
    assert values == [("send orders", "orders", "shop"), ("send orders", "orders", "")]


def test_times_are_those_of_a_moved_clock(rmq: Kit, spans: Spans) -> None:
    instrument(rmq.broker, spans.provider)
    consumer = rmq.consumer("slow")
    consumer.subscribe("orders", lambda message: rmq.clock.advance(seconds=30))
    consumer.start()
    rmq.producer().send("orders", "one", delay=60)
    rmq.advance(seconds=61)
    send, process = spans.one("send orders"), spans.one("process orders")
    attributes = send.attributes or {}
    assert send.start_time == send.end_time == START_NS
    assert attributes["messaging.rocketmq.message.type"] == "delay"
    assert attributes["messaging.rocketmq.message.delivery_timestamp"] == (START_NS + 60_000_000_000) // 1_000_000
    assert process.start_time is not None
    assert process.end_time is not None
    assert process.start_time >= START_NS + 60_000_000_000
    assert process.end_time - process.start_time == 30_000_000_000


def test_a_delay_level(rmq: Kit, spans: Spans) -> None:
    instrument(rmq.broker, spans.provider)
    rmq.producer().send("orders", "one", delay_level=3)
    assert (spans.one("send orders").attributes or {})["messaging.rocketmq.message.delay_time_level"] == 3


@pytest.mark.parametrize("awaits", [True, False], ids=["a coroutine function", "a function that returns a coroutine"])
def test_the_span_is_current_in_a_coroutine(rmq: Kit, spans: Spans, awaits: bool) -> None:
    instrument(rmq.broker, spans.provider)
    seen: list[tuple[int, object]] = []

    async def listener(message: librmq.DeliveredMessage) -> None:
        await asyncio.sleep(0)
        seen.append((trace.get_current_span().get_span_context().span_id, baggage.get_baggage("tenant")))

    consumer = rmq.consumer("mailer")
    consumer.subscribe("orders", listener if awaits else lambda message: listener(message))
    consumer.start()
    token = context.attach(baggage.set_baggage("tenant", "blue"))
    try:
        rmq.producer().send("orders", "one")
    finally:
        context.detach(token)
    rmq.advance(seconds=5)
    assert seen == [(ids([spans.one("process orders")])[0], "blue")]
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_the_span_is_current_in_threads(spans: Spans) -> None:
    """A thread keeps nothing of a listener's span for the next one."""
    current: list[tuple[bool, int]] = []

    def listener(message: librmq.DeliveredMessage) -> None:
        current.append((message.body == b"no context", trace.get_current_span().get_span_context().span_id))

    with librmq.Broker.temporary() as broker:
        instrument(broker, spans.provider)
        consumer = librmq.PushConsumer(broker, "mailer", consume_from=librmq.ConsumeFrom.FIRST, threads=1)
        consumer.subscribe("orders", listener)
        with consumer, librmq.Producer(broker) as producer:
            for number in range(3):
                producer.send("orders", str(number))
            broker.join(timeout=10)
    assert sorted(span_id for _, span_id in current) == sorted(ids(spans.named("process orders")))


def test_a_sent_batch_has_one_context(rmq: Kit, spans: Spans) -> None:
    instrument(rmq.broker, spans.provider)
    consumer = rmq.consumer("mailer", batch_size=8)
    consumer.subscribe("orders", lambda messages: None, batch=True)
    consumer.start()
    rmq.producer().send_batch([librmq.Message("orders", b"a"), librmq.Message("orders", b"b")], queue=0)
    rmq.producer().send("orders", "c", queue=0)
    rmq.advance(seconds=5)
    batch, single = spans.named("send orders")
    assert (batch.attributes or {})["messaging.batch.message_count"] == 2
    assert "messaging.message.id" not in (batch.attributes or {})
    processed = spans.named("process orders")
    assert [link for span in processed for link in linked(span)] == [*2 * ids([batch]), *ids([single])]
    counts = [(span.attributes or {})["messaging.batch.message_count"] for span in processed]
    assert sum(count for count in counts if isinstance(count, int)) == 3
    for span in processed:
        if len(span.links) > 1:
            assert {"messaging.message.id", "librmq.delivery_attempt"} <= (span.links[0].attributes or {}).keys()


def test_a_batch_without_room_for_contexts_is_sent(spans: Spans) -> None:
    body = b"x" * ((2 << 20) - 200)
    with librmq.Broker.temporary() as broker, librmq.Producer(broker) as producer:
        instrument(broker, spans.provider)
        producer.send_batch([librmq.Message("orders", body), librmq.Message("orders", body)])
        assert all("traceparent" not in message.properties for message in broker.messages("orders"))
    assert spans.one("send orders").status.status_code is StatusCode.UNSET


def test_a_retry_links_to_the_first_send_until_it_is_a_dead_letter(rmq: Kit, spans: Spans) -> None:
    instrument(rmq.broker, spans.provider)

    def fail(message: librmq.DeliveredMessage) -> None:
        if message.reconsume_times == 0:
            raise librmq.ReconsumeLater
        raise KeyError("stock")

    consumer = rmq.consumer("mailer", max_reconsume_times=1, fail_fast=False)
    consumer.subscribe("orders", fail)
    consumer.start()
    rmq.producer().send("orders", "one")
    rmq.advance(minutes=5)
    first, second = spans.named("process orders")
    send = spans.one("send orders")
    assert linked(first) == linked(second) == ids([send])
    attempts = [
        tuple((span.attributes or {})[name] for name in ("librmq.delivery_attempt", "librmq.outcome", "error.type"))
        for span in (first, second)
    ]
    assert attempts == [(1, "retry", "ReconsumeLater"), (2, "dead_letter", "KeyError")]
    assert [event.timestamp for event in second.events] == [second.end_time]


def test_a_listener_that_does_not_acknowledge(rmq: Kit, spans: Spans) -> None:
    instrument(rmq.broker, spans.provider)
    consumer = rmq.consumer("mailer", fail_fast=False)
    consumer.subscribe("orders", lambda message: message.reconsume_times > 0, must_return=True)
    consumer.start()
    rmq.producer().send("orders", "one")
    rmq.advance(minutes=1)
    kinds = [(span.attributes or {}).get("error.type") for span in spans.named("process orders")]
    assert kinds == ["not_acknowledged", None]


def test_pulls(rmq: Kit, spans: Spans) -> None:
    rmq.broker.create_topic("orders", 1)
    with librmq.PullConsumer(rmq.broker, "reader") as consumer:
        end = instrument(consumer, spans.provider)
        consumer.subscribe("orders")
        assert consumer.poll(0) == []
        instrument(rmq.broker, spans.provider)
        with librmq.Producer(rmq.broker) as producer:
            producer.send("orders", "1", queue=0)
            producer.send("orders", "2", queue=0)
        while consumer.poll(0):
            pass
        received = spans.named("receive orders")
        assert sorted(link for span in received for link in linked(span)) == sorted(ids(spans.named("send orders")))
        assert all("messaging.batch.message_count" in (span.attributes or {}) for span in received)
        end()


def test_receive_and_acknowledge(rmq: Kit, spans: Spans) -> None:
    instrument(rmq.broker, spans.provider)
    with librmq.SimpleConsumer(rmq.broker, "worker") as consumer:
        consumer.subscribe("orders")
        rmq.producer().send("orders", "1")
        (message,) = consumer.receive(1, wait=0)
        consumer.extend(message, 0)
        (message,) = asyncio.run(consumer.receive_async(1, wait=0))
        consumer.ack(message)
        rmq.producer().send("orders", "2")
        (other,) = consumer.receive_or_notify("orders", 1, lambda: None, acknowledge=[message])  # once more
        consumer.dead_letter(other)
    send, other_send = spans.named("send orders")
    receives = spans.named("receive orders")
    assert [linked(span) for span in receives] == [ids([send]), ids([send]), ids([other_send])]
    assert [(span.attributes or {})["librmq.delivery_attempt"] for span in receives] == [1, 2, 1]
    assert [linked(span) for span in spans.named("ack orders")] == [ids([send])] * 2
    assert linked(spans.one("dead_letter orders")) == ids([other_send])


# The required and recommended attributes that apply to each span about received messages; `test_request_and_reply` has
# the conversation's. A broker in this process has no address.
OF_EVERY_RECEIVE = (
    "system operation.name operation.type destination.name destination.partition.id client.id rocketmq.namespace "
    "consumer.group.name"
)
OF_ONE = "message.id rocketmq.message.type rocketmq.message.tag rocketmq.message.keys "
RECEIVED = [
    ("receive orders", 1, OF_ONE + "batch.message_count rocketmq.consumption_model"),
    ("receive orders", 2, "batch.message_count rocketmq.consumption_model"),
    ("ack orders", 1, OF_ONE),
    ("ack orders", 2, "batch.message_count"),
    ("dead_letter orders", 1, OF_ONE),
    ("poll", 1, OF_ONE + "batch.message_count rocketmq.consumption_model"),
    ("poll", 2, "batch.message_count rocketmq.consumption_model"),
]


@pytest.mark.parametrize(("name", "count", "own"), RECEIVED, ids=[f"{name} {count}" for name, count, _ in RECEIVED])
def test_every_attribute_that_applies(rmq: Kit, spans: Spans, name: str, count: int, own: str) -> None:
    rmq.broker.create_topic("orders", 1)
    with librmq.SimpleConsumer(rmq.broker, "worker") as simple, librmq.PullConsumer(rmq.broker, "reader") as pull:
        for consumer in (simple, pull):
            consumer.subscribe("orders")
        pull.poll(0)
        for _ in range(count):
            rmq.producer().send("orders", "1", tags="paid", keys="o-1")
        instrument(rmq.broker, spans.provider)
        if name == "poll":
            pull.poll(0)
        else:
            messages = simple.receive(8, wait=0)
            simple.dead_letter(messages[0]) if name.startswith("dead_letter") else simple.ack(*messages)
    (span,) = spans.named(name.replace("poll", "receive orders"))
    attributes = dict(span.attributes or {})
    attributes.pop("librmq.delivery_attempt", None)
    expected = [f"messaging.{attribute}" for attribute in (OF_EVERY_RECEIVE + " " + own).split()]
    assert sorted(attributes) == sorted(expected)
    assert attributes["messaging.destination.partition.id"] == "0"
    assert attributes.get("messaging.batch.message_count", count) == count


def test_a_failed_receive(rmq: Kit, spans: Spans) -> None:
    instrument(rmq.broker, spans.provider)
    with librmq.SimpleConsumer(rmq.broker, "worker") as consumer:
        consumer.subscribe("orders")
        rmq.broker.create_topic("orders", 1)
        with pytest.raises(ClientError):
            consumer.receive(33, wait=0)
    assert (spans.one("receive").attributes or {})["error.type"] == "SYSTEM_ERROR"


@pytest.mark.parametrize("commits", [True, False])
def test_a_transaction(rmq: Kit, spans: Spans, commits: bool) -> None:
    instrument(rmq.broker, spans.provider)
    state = librmq.TransactionState.COMMIT if commits else librmq.TransactionState.ROLLBACK
    with librmq.TransactionProducer(rmq.broker, "shop", lambda message: state) as producer:
        producer.send_in_transaction(librmq.Message("orders", b"1"), execute=lambda message, arg: state)
        producer.send_in_transaction(librmq.Message("orders", b"2"), execute=lambda message, arg: None)
        rmq.advance(minutes=2)
    sends = spans.named("send orders")
    assert [(span.attributes or {})["messaging.rocketmq.message.type"] for span in sends] == ["transaction"] * 2
    ends = spans.named("commit orders" if commits else "rollback orders")
    assert [linked(span) for span in ends] == [[span_id] for span_id in ids(sends)]
    if commits:
        assert all("traceparent" in message.properties for message in rmq.broker.messages("orders"))


def test_request_and_reply(rmq: Kit, spans: Spans) -> None:
    instrument(rmq.broker, spans.provider)
    producer = rmq.producer()
    consumer = rmq.consumer("prices")

    def answer_it(message: librmq.DeliveredMessage) -> None:
        producer.reply(message, "3")

    consumer.subscribe("ask", answer_it)
    consumer.start()
    rmq.advance(seconds=1)
    reply = producer.request("ask", "price?", timeout=10)
    ask, answer = spans.one("send ask"), spans.one(f"send {reply.topic}")
    process = spans.one("process ask")
    key = "messaging.message.conversation_id"
    assert (ask.attributes or {})[key] == (answer.attributes or {})[key] == (process.attributes or {})[key]
    assert answer.parent is not None
    assert answer.parent.span_id == context_of(process).span_id
    assert reply.properties["traceparent"].split("-")[2] == f"{context_of(answer).span_id:016x}"


def test_parents_by_choice(rmq: Kit, spans: Spans) -> None:
    instrument(rmq.broker, spans.provider, parents=True)
    consumer = rmq.consumer("mailer")
    consumer.subscribe("orders", lambda message: None)
    consumer.start()
    rmq.producer().send("orders", "one")
    rmq.advance(seconds=5)
    send, process = spans.one("send orders"), spans.one("process orders")
    assert process.parent is not None
    assert [process.parent.span_id] == linked(process) == ids([send])
    assert context_of(process).trace_id == context_of(send).trace_id


def test_a_context_of_the_user_stays(rmq: Kit, spans: Spans) -> None:
    """The send then is a CLIENT that links to it."""
    instrument(rmq.broker, spans.provider)
    given = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    rmq.producer().send("orders", "one", properties={"traceparent": given})
    (message,) = rmq.broker.messages("orders")
    assert message.properties["traceparent"] == given
    send = spans.one("send orders")
    assert (send.kind, linked(send)) == (SpanKind.CLIENT, [int("cd" * 8, 16)])


@pytest.mark.parametrize("call", ["send", "send_async", "send_oneway", "selector", "queue"])
def test_each_way_to_send(rmq: Kit, spans: Spans, call: str) -> None:
    instrument(rmq.broker, spans.provider)
    producer = rmq.producer()
    message = librmq.Message("orders", b"one")
    ways: dict[str, Callable[[], Any]] = {
        "send": lambda: producer.send(message),
        "send_async": lambda: asyncio.run(producer.send_async(message)),
        "send_oneway": lambda: producer.send_oneway(message),
        "selector": lambda: producer.send(message, selector=lambda queues, message, arg: queues[0]),
        "queue": lambda: producer.send(message, queue=1),
    }
    ways[call]()
    (stored,) = rmq.broker.messages("orders")
    assert stored.properties["traceparent"].split("-")[2] == f"{ids([spans.one('send orders')])[0]:016x}"
    assert "traceparent" not in message.properties


def test_a_failed_send(rmq: Kit, spans: Spans) -> None:
    """All tries are one span."""
    producer = rmq.producer()
    producer.send("orders", "one")
    instrument(producer, spans.provider)
    rmq.broker.close()
    with pytest.raises(ClientError) as raised:
        producer.send("orders", "two")
    send = spans.one("send orders")
    assert (send.attributes or {})["error.type"] == type(raised.value).__name__
    assert (send.status.status_code, send.end_time) == (StatusCode.ERROR, START_NS)


@pytest.mark.slow
def test_what_makes_the_spans_of_a_client_ends_with_it(rmq: Kit) -> None:
    """A program can trace many clients one after the other without ending each."""
    provider = TracerProvider(shutdown_on_exit=False)
    instrument(Client(rmq.broker), provider)
    left = weakref.ref(provider)
    del provider
    gc.collect()
    instrument(Client(rmq.broker))()
    gc.collect()
    assert left() is None


def test_the_outbox_keeps_the_context_of_the_request(rmq: Kit, spans: Spans, tmp_path: Path) -> None:
    instrument(rmq.broker, spans.provider)
    place = str(tmp_path / "shop.db")
    with closing(sqlite3.connect(place)) as connection:
        upgrade_tables(connection)
        message = librmq.Message("orders", b"one")
        with spans.tracer.start_as_current_span("POST /orders") as request:
            Outbox().add(connection, message)
            connection.commit()
        assert "traceparent" not in message.properties
        OutboxSender(lambda: sqlite3.connect(place), rmq.producer()).run_due(rmq.clock.now_ms())
    send = spans.one("send orders")
    assert linked(send) == [request.get_span_context().span_id]
    assert context_of(send).trace_id == request.get_span_context().trace_id


def test_addresses_of_a_broker_elsewhere(spans: Spans) -> None:
    with librmq.Broker.temporary() as broker, RemotingServer(broker) as server, librmq.connect(server.address) as route:
        instrument(route, spans.provider)
        broker.create_topic("orders", 1)
        with librmq.Producer(route) as producer, librmq.SimpleConsumer(route, "worker") as consumer:
            producer.send("orders", "one")
            consumer.subscribe("orders")
            consumer.ack(*consumer.receive(1, wait=10))
        own = librmq.Producer(broker, "own")
        own.send("orders", "two")  # by another route
    assert [span.name for span in spans.exporter.get_finished_spans()] == [
        "send orders",
        "receive orders",
        "ack orders",
    ]
    for span in spans.exporter.get_finished_spans():
        assert (span.attributes or {})["server.port"] == server.port


def test_peers_of_a_share(spans: Spans, tmp_path: Path) -> None:
    """The peer's clients are its own."""
    with librmq.share(tmp_path / "store") as owner, librmq.share(tmp_path / "store") as peer:
        instrument(peer, spans.provider)
        owner.create_topic("orders", 1)
        current: list[int] = []
        called = threading.Event()

        def listener(message: librmq.DeliveredMessage) -> None:
            current.append(trace.get_current_span().get_span_context().span_id)
            called.set()

        consumer = librmq.PushConsumer(peer, "mailer", consume_from=librmq.ConsumeFrom.FIRST)
        consumer.subscribe("orders", listener)
        with consumer, librmq.Producer(owner) as producer:
            producer.send("orders", "one")
            assert called.wait(20)
    assert current == ids([spans.one("process orders")])


def test_the_end_of_an_instrumentation(rmq: Kit, spans: Spans) -> None:
    producer = rmq.producer()
    end = instrument(rmq.broker, spans.provider)
    producer.send("orders", "one")
    instrument(producer.client, other := Spans().provider)()
    assert other is not spans.provider
    producer.send("orders", "two")
    end()
    end()
    producer.send("orders", "three")
    assert len(spans.named("send orders")) == 2


def test_without_a_provider_nothing_changes(rmq: Kit, spans: Spans) -> None:
    instrument(rmq.broker)
    instrument(rmq.broker, trace.NoOpTracerProvider())
    with spans.tracer.start_as_current_span("POST /orders"):
        rmq.producer().send("orders", "one")
    (message,) = rmq.broker.messages("orders")
    assert "traceparent" not in message.properties


@pytest.mark.slow
def test_a_global_provider_that_comes_later() -> None:
    program = """
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from librmq import Broker, Producer
        from librmq.tracing import instrument

        instrument()
        with Broker.temporary() as broker, Producer(broker) as producer:
            producer.send("orders", "one")
            trace.set_tracer_provider(TracerProvider())
            producer.send("orders", "two")
            print(sorted("traceparent" in message.properties for message in broker.messages("orders")))
    """
    assert run_program(program).stdout == "[False, True]\n"


def test_what_is_no_client_is_refused() -> None:
    with pytest.raises(librmq.ConfigError, match=r"expected a producer, a consumer, a Client, a route .* found 'x'"):
        instrument("x")


def test_the_entry_point_instruments_the_process(rmq: Kit, spans: Spans) -> None:
    (entry,) = [entry for entry in entry_points(group="opentelemetry_instrumentor") if entry.name == "librmq"]
    assert entry.load() is Instrumentor
    instrumentor = Instrumentor()
    instrumentor.instrument(tracer_provider=spans.provider, skip_dep_check=True)
    instrumentor.instrument(tracer_provider=spans.provider)
    try:
        rmq.producer().send("orders", "one")
    finally:
        instrumentor.uninstrument()
    instrumentor.uninstrument()
    rmq.producer().send("orders", "two")
    assert len(spans.named("send orders")) == 1


@pytest.mark.slow
def test_nothing_is_imported_without_it() -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from librmq import Broker, Producer\n"
        "with Broker.temporary() as broker: Producer(broker).send('orders', 'one')\n"
        "try:\n    import librmq.tracing\nexcept ImportError as error: print(error)\n"
    )
    run = run_program(program)
    assert "pip install 'librmq[tracing]'" in run.stdout
