"""Producers: destinations of sends, retries, refusals, start and shutdown."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar, cast

import pytest

from librmq import protocol
from librmq.broker import Broker
from librmq.client import queue_selectors
from librmq.client._loop_sends import LoopSends
from librmq.client.client import Client
from librmq.client.producer import Producer
from librmq.client.sender import ProducerConfig, SendResult
from librmq.clock import ManualClock
from librmq.cluster import RouteTable
from librmq.config import StoreConfig
from librmq.errors import (
    BrokerBusyError,
    BrokerError,
    BrokerUnreachableError,
    ClientStateError,
    ConfigError,
    MessageIllegalError,
    NoRouteError,
    RequestNotSentError,
    RmqError,
    SendTimeoutError,
)
from librmq.files._memory import MemoryFiles
from librmq.message.batch import split_batch
from librmq.message.message import Message, MessageQueue
from librmq.metrics import Metrics
from librmq.runtime import ManualRunner
from librmq.runtime.runner import Runner
from tests.interrupting import at_each_call
from tests.wrapped_route import WrappedRoute

R = TypeVar("R")


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker.temporary(runner=ManualRunner()) as broker:
        yield broker


class Cluster(protocol.Route):
    """A route over brokers that can make sends fail: ``fail(broker_name)`` returns the error."""

    runner: Runner

    def __init__(self, *brokers: Broker, fail: Callable[[str], Exception | None] = lambda name: None) -> None:
        self.brokers = {broker.name: broker for broker in brokers}
        self.fail = fail
        self.tried: list[str] = []
        self.runner = brokers[0].runner
        self._named = count(1)

    def identity(self, instance_name: str | None) -> tuple[tuple[str, int], str]:
        """Name clients as a kit does, so that producers start with the first queue."""
        return ("127.0.0.1", 0), f"client-{next(self._named)}"

    def topic_route(self, topic: str) -> tuple[protocol.QueueData, ...]:
        return tuple(data for broker in self.brokers.values() for data in broker.topic_route(topic))

    def broker_names(self) -> tuple[str, ...]:
        return tuple(sorted(self.brokers))

    def endpoint(self, broker_name: str) -> protocol.Endpoint:
        return FailingEndpoint(self, broker_name)

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


class FailingEndpoint(protocol.Endpoint):
    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name

    def call(self, request: protocol.Request[R], /) -> R:
        if isinstance(request, protocol.SendMessage | protocol.SendBatch):
            self.cluster.tried.append(self.name)
            failure = self.cluster.fail(self.name)
            if failure is not None:
                raise failure
        return self.cluster.brokers[self.name].call(request)


@pytest.fixture
def two() -> Iterator[tuple[Broker, Broker]]:
    runner = ManualRunner()
    with (
        Broker.temporary(name="broker-a", runner=runner) as first,
        Broker.temporary(name="broker-b", runner=runner) as second,
    ):
        for broker in (first, second):
            broker.call(protocol.CreateTopic("T", 2, 2))
        yield first, second


def bodies(broker: Broker) -> list[bytes]:
    return [message.body for message in broker.store]


def test_sends_use_the_queues_in_turn(broker: Broker) -> None:
    broker.call(protocol.CreateTopic("T", 3, 3))
    producer = Producer(broker, "shop")
    results = [producer.send("T", b"%d" % number, tags="a", keys=["k"]) for number in range(6)]
    first = results[0].queue.queue_id
    assert [result.queue.queue_id for result in results] == [(first + turn) % 3 for turn in range(6)]
    assert [result.queue_offset for result in results] == [0, 0, 0, 1, 1, 1]
    stored = list(broker.store)
    assert [message.unique_key for message in stored] == [result.message_id for result in results]
    assert [message.offset_id for message in stored] == [result.offset_id for result in results]
    assert {(message.tags, message.keys) for message in stored} == {("a", ("k",))}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tags": "a", "keys": ["k", "l"], "properties": {"colour": "blue"}, "flag": 7},
        {"wait_store_ok": False},
        {"delay": 1},
        {"delay_level": 2},
        {"priority": 1},
    ],
)
def test_a_broker_of_the_process_stores_what_a_request_stores(options: dict[str, Any]) -> None:
    """What stands before a broker gets a request for each send."""
    requests: list[type] = []

    def note(request: protocol.Request[Any], call: Callable[[Any], Any]) -> Any:
        requests.append(type(request))
        return call(request)

    outcomes = []
    for is_wrapped in (False, True):
        with Broker.open("/b", files=MemoryFiles(), runner=ManualRunner()) as broker:
            broker.create_topic("T", 2)
            producer = Producer(WrappedRoute(broker, note) if is_wrapped else broker, "shop")
            producer.client.random = None  # so that it begins with the first queue
            producer.send("T", b"first")  # after it the topic is ready
            results = [producer.send("T", b"%d" % number, unique_key=f"id-{number}", **options) for number in range(6)]
            outcomes.append((
                results,
                [(message.topic, message.body, message.flag, message.sys_flag, message.born_host,
                  message.born_timestamp_ms, message.properties_raw) for message in broker.store][1:],
            ))  # fmt: skip
    assert outcomes[0] == outcomes[1]
    assert requests.count(protocol.SendMessage) == 7


def test_new_producers_begin_at_random_queues(broker: Broker) -> None:
    """Twelve processes that each sent once all used queue 0 (issue 14, 2.14)."""
    broker.call(protocol.CreateTopic("T", 8, 8))
    begun = {Producer(broker, f"shop{number}").send("T", b"x").queue.queue_id for number in range(60)}
    assert len(begun) > 2


def test_a_route_that_changes_during_a_query_is_queried_again(broker: Broker) -> None:
    class Changing(Cluster):
        """Reports a change before it answers, and then answers with the old route."""

        def topic_route(self, topic: str) -> tuple[protocol.QueueData, ...]:
            before = super().topic_route(topic)
            if before and before[0].write_queues == 2:
                broker.create_topic(topic, 5)
            return before

        def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
            return broker.watch(changed)

    broker.create_topic("T", 2)
    producer = Producer(Changing(broker), "shop").start()
    assert len(producer.queues("T")) == 2
    assert len(producer.queues("T")) == 5


def test_a_message_is_not_changed_and_each_send_is_another(broker: Broker) -> None:
    producer = Producer(broker, "shop")
    message = Message("T", b"x", properties={"a": "1"})
    first, second = producer.send(message), producer.send(message)
    assert first.message_id != second.message_id
    assert message.properties == {"a": "1"}


def test_large_bodies_are_compressed_from_4096_bytes_on(broker: Broker) -> None:
    producer = Producer(broker, "shop")
    for size in (4095, 4096):
        producer.send("T", b"x" * size)
    plain, packed = broker.store
    assert (plain.sys_flag, packed.sys_flag) == (0, 0x301)
    assert packed.body == b"x" * 4096
    assert len(packed.stored_body) < 100


def test_a_body_that_compression_enlarges_is_compressed_too(broker: Broker) -> None:
    """RocketMQ's client looks at the size before, not at the one after."""
    body = random.Random(1).randbytes(5000)
    Producer(broker, "shop").send("T", body)
    (stored,) = broker.store
    assert (stored.sys_flag, stored.body) == (0x301, body)
    assert len(stored.stored_body) > len(body)


def test_producers_count_the_body_and_stores_the_stored_bytes() -> None:
    """As clients and brokers of 4.9 and 5.3 do: compression can make a body fit, or grow beyond the limit."""
    random_body = random.Random(1).randbytes
    with Broker.temporary(store_config=StoreConfig.tiny(max_message_size=3000)) as broker:
        broker.create_topic("T", 1)
        producer = Producer(broker, "shop", compress_from=2000, max_message_size=100_000)
        producer.send("T", b"x" * 100_000)
        with pytest.raises(MessageIllegalError, match="the body has 100,001 bytes, at most 100,000 are taken"):
            producer.send("T", b"x" * 100_001)
        with pytest.raises(RmqError, match=r"the body has 3,0\d\d bytes as it is stored, at most 3,000 are taken"):
            producer.send("T", random_body(3000))
        producer.configure(compress_from=5000)
        producer.send("T", random_body(3000))
        with pytest.raises(RmqError, match="the body has 3,001 bytes as it is stored"):
            producer.send("T", random_body(3001))
        assert [len(message.body) for message in broker.store] == [100_000, 3000]


def test_a_selector_alone_chooses_the_queue(two: tuple[Broker, Broker]) -> None:
    failing = Cluster(*two, fail=lambda name: BrokerUnreachableError("gone"))
    producer = Producer(failing, "shop")
    with pytest.raises(BrokerUnreachableError):
        producer.send("T", b"x", selector=queue_selectors.select_by_hash, arg="order-1")
    assert len(failing.tried) == 1
    failing.fail = lambda name: None
    results = {producer.send("T", b"x", selector=queue_selectors.select_by_hash, arg="order-1").queue for _ in range(5)}
    assert len(results) == 1
    with pytest.raises(MessageIllegalError, match="not one of the 4 queues"):
        producer.send("T", b"x", selector=lambda queues, message, arg: MessageQueue("T", "elsewhere", 0))


@pytest.mark.parametrize(
    ("failure", "tries"),
    [
        (BrokerUnreachableError("gone"), 3),
        (BrokerError(protocol.ResponseCode.SYSTEM_ERROR, "no"), 3),
        (BrokerError(protocol.ResponseCode.NO_PERMISSION, "no"), 3),
        (BrokerError(protocol.ResponseCode.MESSAGE_ILLEGAL, "no"), 1),
        (BrokerBusyError(protocol.ResponseCode.SYSTEM_BUSY, "busy"), 1),
    ],
)
def test_errors_that_are_retried(two: tuple[Broker, Broker], failure: Exception, tries: int) -> None:
    cluster = Cluster(*two, fail=lambda name: failure)
    with pytest.raises(type(failure)):
        Producer(cluster, "shop").send("T", b"x")
    assert len(cluster.tried) == tries
    assert bodies(two[0]) + bodies(two[1]) == []


def test_a_lost_answer_leads_to_a_visible_duplicate(two: tuple[Broker, Broker]) -> None:
    cluster = Cluster(*two)

    def lose_the_first(name: str) -> Exception | None:
        if len(cluster.tried) == 1:
            producer_side = cluster.brokers[name]
            producer_side.call(protocol.SendMessage("shop", Message("T", b"x", unique_key="U"), 0, 0, ("127.0.0.1", 0)))
            return BrokerUnreachableError("the answer was lost")
        return None

    cluster.fail = lose_the_first
    Producer(cluster, "shop").send(Message("T", b"x", unique_key="U"))
    stored = [*two[0].store, *two[1].store]
    assert [message.unique_key for message in stored] == ["U", "U"]
    assert len({message.offset_id for message in stored}) == 2 or len(stored) == 2


def test_the_timeout_covers_all_tries(two: tuple[Broker, Broker]) -> None:
    clock = two[0].runner.clock
    assert isinstance(clock, ManualClock)

    def slow(name: str) -> Exception:
        clock.advance(seconds=2)
        return BrokerUnreachableError("no answer")

    cluster = Cluster(*two, fail=slow)
    with pytest.raises(SendTimeoutError, match="2 tries"):
        Producer(cluster, "shop").send("T", b"x")
    assert len(cluster.tried) == 2


def test_a_slow_look_up_of_queues_takes_no_time_from_the_first_send(two: tuple[Broker, Broker]) -> None:
    runner = two[0].runner
    assert isinstance(runner, ManualRunner)
    clock = runner.manual_clock

    class Slow(Cluster):
        def topic_route(self, topic: str) -> tuple[protocol.QueueData, ...]:
            clock.advance(seconds=4)
            return super().topic_route(topic)

    assert Producer(Slow(*two), "shop").send("T", b"x").status is protocol.SendStatus.SEND_OK
    assert [message.born_timestamp_ms for broker in two for message in broker.store] == [clock.now_ms()]


def test_a_late_answer_is_a_timeout_of_a_stored_message(two: tuple[Broker, Broker]) -> None:
    runner = two[0].runner
    assert isinstance(runner, ManualRunner)
    clock = runner.manual_clock

    class Late(Cluster):
        def endpoint(self, broker_name: str) -> protocol.Endpoint:
            return LateEndpoint(self, broker_name)

    class LateEndpoint(FailingEndpoint):
        def call(self, request: protocol.Request[R], /) -> R:
            answer = super().call(request)
            if isinstance(request, protocol.SendMessage):
                clock.advance(seconds=4)
            return answer

    producer = Producer(Late(*two), "shop")
    queue = producer.queues("T")[0]
    ways: tuple[dict[str, Any], ...] = ({}, {"queue": queue}, {"selector": queue_selectors.select_by_hash, "arg": 1})
    for way in ways:
        with pytest.raises(SendTimeoutError, match="the message is stored"):
            producer.send("T", b"x", **way)
    producer.send("T", b"x", timeout=5)
    producer.send_oneway("T", b"x")
    assert len(bodies(two[0]) + bodies(two[1])) == 5


@pytest.mark.parametrize(
    "last",
    [
        RequestNotSentError("refused"),
        BrokerError(protocol.ResponseCode.MESSAGE_ILLEGAL, "refused"),
        NoRouteError("none"),
    ],
)
def test_a_send_whose_first_answer_is_lost_may_be_stored(two: tuple[Broker, Broker], last: Exception) -> None:
    """However the last try ends, the error is not one that says that nothing is stored."""
    failures = [BrokerUnreachableError("its answer was lost"), last]
    producer = Producer(Cluster(*two, fail=lambda _: failures.pop(0)), "shop", retries=1)
    with pytest.raises(BrokerUnreachableError, match="may be stored: its answer was lost") as raised:
        producer.send("T", b"y")
    assert not isinstance(raised.value, RequestNotSentError)


def test_a_hook_that_fails_after_a_send_does_not_undo_it(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    def fails(result: object, error: object) -> None:
        raise ValueError("of the hook")

    assert Producer(broker, "shop", hooks=[lambda context: fails]).send("T", b"x").status is protocol.SendStatus.SEND_OK
    assert "a watcher has failed" in caplog.text


def test_slow_brokers_are_avoided_if_asked(two: tuple[Broker, Broker]) -> None:
    clock = two[0].runner.clock
    assert isinstance(clock, ManualClock)

    def slow(name: str) -> None:
        clock.advance(ms=600 if name == "broker-a" else 0)

    cluster = Cluster(*two, fail=slow)
    producer = Producer(cluster, "shop", avoid_slow_brokers=True)
    names = [producer.send("T", b"x").queue.broker_name for _ in range(6)]
    assert names[0] == "broker-a"
    assert set(names[1:]) == {"broker-b"}
    clock.advance(seconds=31)
    assert "broker-a" in {producer.send("T", b"x").queue.broker_name for _ in range(4)}


def test_one_way_messages_are_tried_once(two: tuple[Broker, Broker], caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(*two, fail=lambda name: BrokerUnreachableError("gone"))
    producer = Producer(cluster, "shop")
    producer.send_oneway("T", b"x")
    assert len(cluster.tried) == 1
    assert "was not stored" in caplog.text
    cluster.fail = lambda name: None
    producer.send_oneway("T", b"y")
    assert bodies(two[0]) + bodies(two[1]) == [b"y"]


def test_one_way_messages_and_batches_accept_a_queue(broker: Broker) -> None:
    producer = Producer(broker, "shop")
    producer.send_oneway("T", b"x", selector=lambda queues, message, arg: queues[arg], arg=2)
    sent = producer.send_batch([Message("T", b"y"), Message("T", b"z")], queue=2)
    assert (sent.queue.queue_id, sent.queue_offset) == (2, 1)
    assert [(message.queue_id, message.body) for message in broker.messages("T")] == [(2, b"x"), (2, b"y"), (2, b"z")]


def test_a_batch_is_stored_contiguously(broker: Broker) -> None:
    producer = Producer(broker, "shop")
    result = producer.send_batch([Message("T", b"1", tags="a"), Message("T", b"2", tags="b"), Message("T", b"3")])
    stored = list(broker.store)
    assert [message.body for message in stored] == [b"1", b"2", b"3"]
    assert result.message_id == ",".join(str(message.unique_key) for message in stored)
    assert result.offset_id == ",".join(message.offset_id for message in stored)
    assert {message.queue_id for message in stored} == {result.queue.queue_id}
    for wrong, why in (
        ([], "at least one"),
        ([Message("T", b"1"), Message("U", b"2")], "one topic"),
        ([Message("T", b"1"), Message("T", b"2", wait_store_ok=False)], "wait flag"),
        ([Message("T", b"1", delay_level=1)], "delayed"),
        ([Message("T", b"1" * (3 << 20)), Message("T", b"2" * (2 << 20))], "split_batch"),
    ):
        with pytest.raises(MessageIllegalError, match=why):
            producer.send_batch(wrong)
    for part in split_batch([Message("T", b"x" * 30_000) for _ in range(4)], 80_000):
        producer.send_batch(part)
    assert len(bodies(broker)) == 7


def test_a_batch_of_short_messages_takes_what_split_batch_cuts(broker: Broker) -> None:
    """Their unique ids and wait flags are longer than the rest."""
    for messages in ([Message("T", b"x")] * 2000, [Message("T", b"x", unique_key="own", wait_store_ok=False)] * 2000):
        with Producer(broker, "shop", config=ProducerConfig(max_message_size=4000)) as producer:
            assert (
                sum(producer.send_batch(part).message_id.count(",") + 1 for part in split_batch(messages, 4000)) == 2000
            )


@pytest.mark.parametrize(
    ("topic", "body", "why"),
    [
        ("", b"x", "empty"),
        ("bad topic!", b"x", "may only contain"),
        ("T" * 128, b"x", "127"),
        ("SCHEDULE_TOPIC_XXXX", b"x", "is the broker's own"),
        ("RMQ_SYS_TRANS_HALF_TOPIC", b"x", "is the broker's own"),
        ("T", b"", "no body"),
        ("T", b"x" * ((4 << 20) + 1), "at most"),
    ],
)
def test_messages_refused_before_the_send(broker: Broker, topic: str, body: bytes, why: str) -> None:
    with pytest.raises(MessageIllegalError, match=why):
        Producer(broker, "shop").send(topic, body)
    assert bodies(broker) == []


class NoBrokers(RouteTable):
    """A route such as one over TCP whose name server knows no broker."""

    def broker_names(self) -> tuple[str, ...]:
        return ()

    def topic_route(self, topic: str) -> tuple[protocol.QueueData, ...]:
        return ()


def test_a_send_without_any_broker_says_so(broker: Broker) -> None:
    with pytest.raises(NoRouteError, match="topic 'T', requested by producer group 'shop': the route has no broker"):
        Producer(NoBrokers(broker), "shop").send("T", b"x")


def test_topics_that_cannot_be_written(broker: Broker) -> None:
    broker.call(protocol.CreateTopic("ReadOnly", 2, 2, protocol.PERM_READ))
    producer = Producer(broker, "shop")
    with pytest.raises(NoRouteError, match="'ReadOnly', requested by producer group 'shop'"):
        producer.send("ReadOnly", b"x")
    with pytest.raises(BrokerError):
        producer.send("ReadOnly", b"x", queue=99)


def test_life(broker: Broker) -> None:
    client = Client(broker, instance_name="one")
    producer = Producer(broker, "shop", client=client)
    assert producer.start() is producer.start()
    with pytest.raises(ClientStateError, match="already has a producer of group 'shop'"):
        Producer(broker, "shop", client=client).start()
    producer.send("T", b"x")
    producer.shutdown()
    producer.shutdown()
    with pytest.raises(ClientStateError, match="shut down"):
        producer.send("T", b"x")
    with pytest.raises(ClientStateError, match="start only once"):
        producer.start()
    Producer(broker, "shop", client=client).send("T", b"y")
    assert bodies(broker) == [b"x", b"y"]
    with pytest.raises(MessageIllegalError, match="group"):
        Producer(broker, "a b")
    with pytest.raises(ConfigError, match="did you mean retries"):
        Producer(broker, "shop", tries=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="retries"):
        Producer(broker, "shop", retries=-1)


def test_hooks_see_each_try(two: tuple[Broker, Broker]) -> None:
    seen: list[Any] = []

    def hook(context: Any) -> Callable[[SendResult | None, Exception | None], None]:
        seen.append((context.attempt, context.queue.broker_name))
        return lambda result, error: seen.append(type(error) if error else result and result.status)

    metrics = Metrics()
    cluster = Cluster(*two, fail=lambda name: BrokerUnreachableError("gone") if name == "broker-a" else None)
    Producer(cluster, "shop", hooks=[hook], metrics=metrics).send("T", b"xyz")
    assert seen == [(0, "broker-a"), BrokerUnreachableError, (1, "broker-b"), protocol.SendStatus.SEND_OK]
    counted = metrics.snapshot()
    assert counted["sends"] == {("T", "ERROR"): 1, ("T", "SEND_OK"): 1}
    assert counted["send_retries"] == {("T",): 1}


def test_bytes_are_counted_after_compression(broker: Broker) -> None:
    metrics = Metrics()
    Producer(broker, "shop", metrics=metrics).send("T", b"x" * 10_000)
    (message,) = broker.messages("T")
    assert len(message.stored_body) < 1_000
    assert metrics.snapshot()["send_bytes"] == {("T",): len(message.stored_body)}


def test_awaited(broker: Broker) -> None:
    async def send() -> SendResult:
        return await Producer(broker, "shop").send_async("T", b"x", tags="a")

    assert asyncio.run(send()).status is protocol.SendStatus.SEND_OK
    assert bodies(broker) == [b"x"]


# ---- from the user's side


def test_queue_and_selector_exclude_each_other(broker: Broker) -> None:
    producer = Producer(broker, "shop")
    for send in (producer.send, producer.send_oneway):
        with pytest.raises(MessageIllegalError, match="give queue= or selector=, not both"):
            send("T", b"x", queue=0, selector=queue_selectors.select_by_hash, arg="k")
    assert bodies(broker) == []


def test_a_selector_s_argument_needs_a_selector(broker: Broker) -> None:
    """Without one the messages of a key would go to all queues in turn."""
    producer = Producer(broker, "shop")
    for send in (
        producer.send,
        producer.send_oneway,
        producer.request,
        lambda *message, **keywords: asyncio.run(producer.send_async(*message, **keywords)),
    ):
        for queue in (None, 0):
            with pytest.raises(MessageIllegalError, match="topic 'T': arg= is for a selector: give selector= too"):
                send("T", b"x", queue=queue, arg="k")
    assert bodies(broker) == []


def test_one_way_messages_go_to_the_queue_that_is_named(broker: Broker) -> None:
    broker.call(protocol.CreateTopic("T", 4, 4))
    Producer(broker, "shop").send_oneway("T", b"x", queue=3)
    assert [message.queue_id for message in broker.messages("T")] == [3]


def test_a_path_is_not_a_route() -> None:
    with pytest.raises(TypeError, match=r"Producer: expected a route, such as a Broker .* Broker\.open\('data'\)"):
        Producer("data", "shop")  # type: ignore[arg-type]


def test_producers_have_a_useful_repr(broker: Broker) -> None:
    producer = Producer(broker, "shop", instance_name="one", timeout=timedelta(seconds=1))
    assert repr(producer) == "<Producer shop, created, client 127.0.0.1@one>"
    assert producer.config.timeout == 1
    with producer:
        assert "running" in repr(producer)
    assert producer.shutdown() is True


def test_bodies_are_bytes_text_or_json(broker: Broker) -> None:
    producer = Producer(broker, "shop")
    producer.send("T", "Grüße", queue=0)
    producer.send_oneway("T", json={"total": 3}, tags="a", queue=0)
    asyncio.run(producer.send_async("T", json=[1, "ü"], queue=0))
    assert [message.body for message in broker.messages("T")] == ["Grüße".encode(), b'{"total":3}', '[1,"ü"]'.encode()]
    for wrong in ({}, {"body": b"x", "json": 1}):
        with pytest.raises(MessageIllegalError):
            producer.send("T", **wrong)  # type: ignore[arg-type]


def test_wrong_arguments_are_named(broker: Broker) -> None:
    """These arguments used to raise errors of the interpreter, or were silently accepted."""
    producer: Any = Producer(broker, "shop")
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: producer.send(3, b"x"), "message: expected a Message, or a topic and a body, found 3"),
        (lambda: producer.send([Message("T", b"x")]), ": send several by send_batch"),
        (lambda: producer.send_batch(["T"]), "messages: expected only Message objects, found 'T'"),
        (
            lambda: producer.send("T", b"x", queue="1"),
            "queue: expected a MessageQueue or a queue's number, from 0, found '1'",
        ),
        (lambda: producer.send_oneway("T", b"x", queue=True), "queue: expected a MessageQueue"),
        (lambda: producer.send("T", b"x", selector=1), "selector: expected a function, found 1"),
        (lambda: producer.send("T", b"", json=1), "expected either a body or json, found both"),
    ]
    for call, why in calls:
        with pytest.raises(MessageIllegalError, match=why):
            call()
    assert bodies(broker) == []


class _Stopped(Exception):
    """Raised by a signal's handler, as applications do that end what they wait for."""


@pytest.mark.slow
def test_async_sends_end_although_a_handler_raises() -> None:
    """A handler's exception can end a callback of the event loop anywhere; no send waits beyond its time."""

    def stop(*_: object) -> None:
        raise _Stopped

    async def sends(producer: Producer) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        under_way = [asyncio.ensure_future(producer.send_async(Message("T", b"x"), timeout=0.05)) for _ in range(2)]
        _, waiting = await asyncio.wait(under_way, timeout=10)
        for one in under_way:
            if one.done():
                one.exception()
        assert not waiting

    former = signal.signal(signal.SIGUSR1, stop)
    try:
        with (
            Broker.open("/s", store_config=StoreConfig.tiny(), files=MemoryFiles()) as broker,
            Producer(broker, "P") as producer,
        ):
            producer.send(Message("T", b"x"))
            for _ in at_each_call(lambda: asyncio.run(sends(producer)), signal.SIGUSR1, _Stopped):
                pass
    finally:
        signal.signal(signal.SIGUSR1, former)


def test_an_endpoint_that_passes_a_late_send_on_is_asked_again() -> None:
    """It gives the send up at its second look: at the first one another endpoint was about to get it."""
    error = BrokerUnreachableError("silent")

    class Passing(protocol.SendsLater):
        def call(self, request: protocol.SendLater) -> bool:
            looks = iter((None, error))
            request.give_up = lambda _: next(looks)
            return True

    async def send() -> None:
        message = protocol.SendMessage("P", Message("T", b"x"), 0, 1, ("127.0.0.1", 10911))
        sends = LoopSends(asyncio.get_running_loop())
        await asyncio.wait_for(sends.begin(cast("protocol.Endpoint", Passing()), message, 1), 60)

    with pytest.raises(BrokerUnreachableError, match="silent"):
        asyncio.run(send())
