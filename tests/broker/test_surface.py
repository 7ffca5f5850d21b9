"""A broker's public methods, as a new user would try them."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import librmq
from librmq.broker import Broker, BrokerConfig, QueueLocks
from librmq.client import TransactionProducer
from librmq.client.client import Client, QueueSelector
from librmq.client.producer import Producer
from librmq.client.queue_selectors import select_by_consistent_hash, select_by_hash
from librmq.clock import ManualClock
from librmq.cluster import Replica
from librmq.config import StoreConfig
from librmq.consumer import DeliveredMessage, PullConsumer, PushConsumer
from librmq.errors import (
    BrokerError,
    BrokerUnreachableError,
    ConfigError,
    MessageIllegalError,
    RmqError,
    StoreLockedError,
)
from librmq.message import Message
from librmq.message.message import MessageQueue
from librmq.protocol import LockQueues, ResetGroup, TransactionState, UpdateOffset
from librmq.runtime import ManualRunner
from librmq.testing import Kit
from librmq.wire.remote.remote_route import connect
from librmq.wire.remoting import RemotingServer
from tests.broker.parties import send
from tests.budget import many
from tests.clocks import Waits


def running(broker: Broker, seen: list[bytes], group: str = "g", **settings: Any) -> PushConsumer:
    consumer = PushConsumer(broker, group, **settings)

    @consumer.subscribe("T")
    def listen(message: DeliveredMessage) -> None:
        seen.append(message.body)

    consumer.start()
    return consumer


@many
@pytest.mark.parametrize(
    "use",
    [
        lambda broker, client: running(broker, []),
        lambda broker, client: running(broker, [], client=client),
        lambda broker, client: PullConsumer(broker, "g").start(),
        lambda broker, client: Producer(broker, "p").start(),
        lambda broker, client: Producer(broker, "p", client=client).start(),
        lambda broker, client: Producer(broker, "p").send("T", b"x"),
        lambda broker, client: Producer(broker, "p").send_oneway("T", b"x"),
        lambda broker, client: Producer(broker, "p").queues("T"),
        lambda broker, client: TransactionProducer(broker, "p", lambda message: TransactionState.COMMIT),
        lambda broker, client: broker.watch(lambda: None),
        lambda broker, client: broker.clients(),
        lambda broker, client: broker.dead_letters("g"),
        lambda broker, client: broker.reset_group("g", "T", "end"),
        lambda broker, client: broker.create_topic("U", 1),
        lambda broker, client: broker.join(),
    ],
)
def test_a_closed_broker_refuses_every_client(use: Callable[[Broker, Client], object]) -> None:
    with Broker.temporary(runner=ManualRunner()) as broker:
        client = Client(broker)
        PullConsumer(broker, "before", client=client).start()
    with pytest.raises(BrokerUnreachableError, match="broker-a is closed"):
        use(broker, client)


def test_a_client_refused_by_a_closed_broker_is_released() -> None:
    """A consumer that could not start is shut down like any other."""
    with Broker.temporary(runner=ManualRunner()) as broker:
        pass
    consumer = PullConsumer(broker, "g")
    with pytest.raises(BrokerUnreachableError):
        consumer.start()
    assert consumer.shutdown()
    assert not consumer.is_running


def test_a_wrong_way_to_open_is_reported() -> None:
    with pytest.raises(ConfigError, match="store_config="):
        Broker.open("data", StoreConfig())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Broker\.open"):
        Broker("data")


untyped: Any = librmq  # a type checker would report these wrong uses


@many
@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda broker: untyped.Broker.open("b", store_config=BrokerConfig()), "store_config: expected a StoreConfig"),
        (
            lambda broker: untyped.Broker.open("b", store_config="sync"),
            "store_config: expected a StoreConfig, found 'sync'",
        ),
        (lambda broker: untyped.Broker.open(5), "path: expected the folder of a store, found 5"),
        (lambda broker: untyped.Broker.open(""), "path: expected the folder of a store, found ''"),
        (lambda broker: untyped.Broker.open("a\0b"), "path: expected the folder of a store, found 'a.x00b'"),
        (lambda broker: untyped.Broker.temporary(name=5), "^name: expected text of printable characters, found 5"),
        (lambda broker: untyped.Broker.temporary(name=""), "^name: expected text of printable characters, found ''"),
        (
            lambda broker: untyped.Broker.open("x", name="a\nb"),
            r"^name: expected text of printable characters, found 'a\\nb'",
        ),
        (
            lambda broker: untyped.Broker.open("x", cluster_name="a\n"),
            "cluster_name: expected text of printable characters",
        ),
        (
            lambda broker: untyped.Broker.temporary(runner=3),
            r"runner: expected a Runner such as ManualRunner\(\).*, found 3",
        ),
        (lambda broker: untyped.Broker.open("x", clock=3), "clock: expected a Clock such as ManualClock.*, found 3"),
        (lambda broker: untyped.Broker.temporary(metrics={}), "metrics: expected a Metrics, found {}"),
        (
            lambda broker: untyped.Broker.open("x", files="disk"),
            "files: expected a Files such as DiskFiles.*, found 'disk'",
        ),
        (lambda broker: untyped.ManualRunner("now"), "clock: expected a Clock such as ManualClock.*, found 'now'"),
        (lambda broker: untyped.Producer(broker, "p", metrics=3), "metrics: expected a Metrics, found 3"),
        (lambda broker: untyped.Producer(broker, "p", client="c"), "client: expected a Client, found 'c'"),
        (lambda broker: untyped.Producer(broker, "p", instance_name=5), "instance_name: expected a str, found 5"),
        (
            lambda broker: untyped.Producer(broker, "p").send_batch(Message("T", b"x")),
            "messages: expected a list of Message",
        ),
        (lambda broker: untyped.PushConsumer(broker, "g", metrics=3), "metrics: expected a Metrics, found 3"),
        (lambda broker: untyped.PushConsumer(broker, "g", client="c"), "client: expected a Client, found 'c'"),
        (lambda broker: broker.resend_dead_letters("g", ["x"]), "letters: expected messages .*, found 'x'"),
        (
            lambda broker: broker.reset_group("store", "T", "end"),
            "group 'store' does not exist; did you mean stores.*set_group",
        ),
        (lambda broker: broker.reset_group("stores", "Tt", "end"), "topic 'Tt' does not exist; did you mean T?"),
    ],
)
def test_a_wrong_value_is_reported_with_the_expected_one(use: Callable[[Any], object], expected: str) -> None:
    with Broker.temporary(runner=ManualRunner()) as broker:
        broker.create_topic("T")
        broker.set_group("stores")
        with pytest.raises((TypeError, RmqError), match=expected):
            use(broker)


def test_a_broker_is_not_pickled(broker: Broker) -> None:
    with pytest.raises(TypeError, match="one process owns a store"):
        pickle.dumps(broker)


def test_opening_waits_for_another_writer(tmp_path: Path) -> None:
    first = Broker.open(tmp_path / "b", store_config=StoreConfig.tiny())
    with pytest.raises(StoreLockedError):
        Broker.open(tmp_path / "b", store_config=StoreConfig.tiny(), wait=timedelta(milliseconds=1))
    closing = threading.Timer(0.1, first.close)
    closing.start()
    with Broker.open(tmp_path / "b", store_config=StoreConfig.tiny(), wait=30) as second:
        assert second.topics()
    closing.join()


def test_an_async_context_closes() -> None:
    async def use() -> Broker:
        async with Broker.temporary() as broker:
            return broker

    assert asyncio.run(use()).dead


@pytest.mark.parametrize("joins_between", [True, False])
def test_join_ignores_messages_that_no_filter_accepts(joins_between: bool) -> None:
    """A held pull, or one that passes over the last message, reports it later than this join waits."""
    with Broker.temporary(runner=ManualRunner()) as broker, Producer(broker) as producer:
        broker.create_topic("T", 1)
        consumer = PushConsumer(broker, "g")
        consumer.subscribe("T", lambda message: None, tags="A")
        consumer.start()
        producer.send("T", b"a", tags="A")
        if joins_between:
            broker.join(timeout=60)
        producer.send("T", b"c", tags="C")
        broker.join(timeout=3)


def test_join_lets_coroutine_listeners_run() -> None:
    async def run() -> list[bytes]:
        seen: list[bytes] = []
        async with Broker.temporary() as broker:
            consumer = PushConsumer(broker, "g")

            async def listen(message: DeliveredMessage) -> None:
                seen.append(message.body)

            consumer.subscribe("T", listen)
            consumer.start()
            await Producer(broker).send_async("T", b"a")
            await broker.join_async(timeout=60)
        return seen

    assert asyncio.run(run()) == [b"a"]


def test_a_subscription_is_not_replaced_silently(broker: Broker) -> None:
    consumer = PullConsumer(broker, "g")
    consumer.subscribe("T", tags="a")
    consumer.subscribe("T", tags="a")
    with pytest.raises(ConfigError, match="give all its tags at once"):
        consumer.subscribe("T", tags="b")


def test_an_iteration_notices_that_its_broker_closed() -> None:
    broker = Broker.temporary(runner=ManualRunner())
    for number in range(3):
        send(broker, "T", b"%d" % number)
    messages = broker.consume("T", group="g")
    next(messages)
    broker.close()
    with pytest.raises(BrokerUnreachableError):
        list(messages)


def test_a_transaction_wants_a_message(broker: Broker) -> None:
    def commit(message: object, arg: object = None) -> TransactionState:
        return TransactionState.COMMIT

    wrong: Any = "T"
    with (
        TransactionProducer(broker, "g", check=commit) as producer,
        pytest.raises(MessageIllegalError, match="expected Message"),
    ):
        producer.send_in_transaction(wrong, "x", execute=commit)


@pytest.mark.parametrize(
    ("timeout", "seconds"), [({}, 5), ({"timeout": 0.5}, 0.5), ({"timeout": timedelta(hours=1)}, 3600)]
)
def test_an_iteration_ends_after_its_timeout(timeout: dict[str, Any], seconds: float) -> None:
    clock = Waits()
    with Broker.temporary(runner=ManualRunner(clock)) as broker:
        send(broker, "T", b"0")
        assert [message.body for message in broker.consume("T", group="g", **timeout)] == [b"0"]
        assert clock.seconds[-1] == seconds


def test_a_stopped_group_is_reset(rmq: Kit, broker: Broker) -> None:
    times = []
    for _ in range(4):
        times.append(datetime.fromtimestamp(rmq.clock.now_ms() / 1000, UTC))
        send(broker, "T")
        rmq.advance(ms=1_000)
    broker.set_group("g")
    first = MessageQueue("T", broker.name, 0)
    assert broker.reset_group("g", "T", to="end")[first] == 4
    assert broker.reset_group("g", "T", to=times[2])[first] == 2
    assert broker.reset_group("g", "T", to=times[2] + timedelta(milliseconds=1))[first] == 3
    assert broker.reset_group("g", "T", to=times[-1] + timedelta(days=1))[first] == 4
    assert broker.reset_group("g", "T", to=1, queue_id=0) == {first: 1}
    assert broker.consumer_offset("g", "T") == 1
    for wrong in ("soon", -1, True, datetime(2020, 1, 1)):
        with pytest.raises(ConfigError, match="to: expected"):
            broker.reset_group("g", "T", to=wrong)  # type: ignore[arg-type]
    with pytest.raises(BrokerError, match="no queue 9"):
        broker.reset_group("g", "T", to="end", queue_id=9)
    with pytest.raises(BrokerError, match="does not exist"):
        broker.reset_group("g", "U", to="end")


def test_a_reset_names_the_queues_that_lack_the_offset(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    broker.create_topic("T", 2)
    producer = Producer(broker, "p")
    for queue_id in (0, 0, 1):
        producer.send("T", b"x", queue=queue_id)
    broker.set_group("g")
    assert {queue.queue_id: at for queue, at in broker.reset_group("g", "T", 2).items()} == {0: 2, 1: 1}
    assert (
        f"1 queue without offset 2, where the group is at the end or the beginning now: {broker.name}/1" in caplog.text
    )
    with pytest.raises(ConfigError, match=r"to: expected a queue offset up to 1, .* found 2; if a time was meant"):
        broker.reset_group("g", "T", 2, queue_id=1)


def test_a_running_group_is_reset(rmq: Kit, broker: Broker) -> None:
    seen: list[bytes] = []
    for number in range(4):
        send(broker, "T", b"%d" % number)
    running(broker, seen)
    rmq.advance(ms=60_000)
    broker.reset_group("g", "T", to=2)
    rmq.advance(ms=60_000)
    assert seen == [b"0", b"1", b"2", b"3", b"2", b"3"]


def test_a_config_is_checked() -> None:
    with pytest.raises(ConfigError, match="default_topic_queues: expected a whole number"):
        BrokerConfig(default_topic_queues=0)


@pytest.mark.parametrize("is_failure", [True, False])
def test_a_loop_left_early_gets_its_message_again(is_failure: bool) -> None:
    """Failing inside the loop counted the message as consumed."""
    with Broker.temporary(runner=ManualRunner()) as broker:
        broker.create_topic("T", 1)
        for number in range(4):
            send(broker, "T", b"%d" % number)
        with suppress(ValueError):
            for message in broker.consume("T", group="g"):
                if message.body == b"2":
                    if is_failure:
                        raise ValueError
                    break
        assert broker.clients() == ()
        assert [message.body for message in broker.consume("T", group="g")] == [b"2", b"3"]
        assert list(broker.consume("T", group="g")) == []


def test_iterating_refuses_at_the_call() -> None:
    broker = Broker.temporary(runner=ManualRunner())
    send(broker, "T")
    with pytest.raises(MessageIllegalError, match="group 'g g'"):
        broker.consume("T", group="g g")
    with pytest.raises(ConfigError, match="either tags or sql"):
        broker.consume("T", group="g", tags="a", sql="a = 1")
    for timeout in (-1, math.inf):
        with pytest.raises(ConfigError, match=r"^timeout: expected seconds or a timedelta from 0 to 31536000, found"):
            broker.consume("T", group="g", timeout=timeout)
    broker.close()
    with pytest.raises(BrokerUnreachableError, match="this handle was closed"):
        broker.consume("T", group="g")
    for ask in (broker.clients, lambda: broker.connections("g"), lambda: broker.messages("T")):
        with pytest.raises(BrokerUnreachableError, match="this handle was closed"):
            ask()


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("is_direct", [False, True])
def test_a_shutdown_keeps_a_reset_under_way(rmq: Kit, broker: Broker, orderly: bool, is_direct: bool) -> None:
    """A running instance continues 10 s after a reset; it used to store its old progress, or to stay at its end."""
    broker.create_topic("T", 1)
    consumer = running(broker, [], orderly=orderly)
    for number in range(4):
        send(broker, "T", b"%d" % number)
    rmq.advance(ms=13_900)
    send(broker, "T")
    rmq.advance(ms=50)  # consumed, but not stored yet
    if is_direct:
        broker.reset_group("g", "T", to=2)
    else:
        broker.call(ResetGroup("g", "T", 0))
    rmq.advance(ms=5_000)
    consumer.shutdown()
    assert broker.consumer_offset("g", "T") == (2 if is_direct else 0)


@pytest.mark.parametrize("over_tcp", [False, True])
@pytest.mark.parametrize("way", ["locks", "settings", "not in order", "nothing stored", "no growth"])
def test_growth_that_moves_keys_of_an_orderly_group(
    rmq: Kit, broker: Broker, caplog: pytest.LogCaptureFixture, way: str, over_tcp: bool
) -> None:
    broker.create_topic("T", 8)
    consumer = running(broker, [], orderly=way != "not in order")
    rmq.advance(ms=25_000)
    consumer.shutdown()
    if way == "settings":
        broker.set_group("ordered", is_ordered=True)
        broker.call(UpdateOffset("ordered", "T", 0, 0))
    if way != "nothing stored":
        for step in range(8):
            send(broker, "T", b"%d" % step)
    rmq.advance(ms=1)
    queues = 8 if way == "no growth" else 9
    if over_tcp:
        with RemotingServer(broker) as server, connect(f"127.0.0.1:{server.port}") as route:
            route.create_topic("T", queues)
    else:
        broker.create_topic("T", queues)
    lines = [line for line in caplog.records if "grows from 8 to 9 queues" in line.getMessage()]
    assert [(line.levelname, vars(line)["rmq_moved_keys"], vars(line)["rmq_groups"]) for line in lines] == {
        "locks": [("WARNING", 0.8889, "g")],
        "settings": [("WARNING", 0.8889, "g, ordered")],
    }.get(way, [])


def test_growth_after_a_restart_is_logged_with_a_lock(rmq: Kit, caplog: pytest.LogCaptureFixture) -> None:
    rmq.broker.create_topic("T", 8)
    for queue_id in range(8):
        send(rmq.broker, "T", queue_id=queue_id)
    for group in ("ordered", "other"):
        rmq.broker.call(UpdateOffset(group, "T", 0, 1))
    rmq.broker.close()
    rmq.network.reopen("broker-a")
    rmq.broker.create_topic("T", 9)
    rmq.broker.create_topic("T", 10)
    for group, orderly in (("ordered", True), ("other", False), ("new", True), ("ordered", True)):
        consumer = running(rmq.broker, [], group, orderly=orderly)
        rmq.advance(ms=25_000)
        consumer.shutdown()
        lines = [vars(line)["rmq_groups"] for line in caplog.records if "grows from 8 to 10" in line.getMessage()]
        assert lines == ["ordered"]
    rmq.broker.create_topic("T", 11)
    lines = [line.getMessage() for line in caplog.records if "grows from" in line.getMessage()]
    first, second = lines
    assert "from 8 to 10 queues" in first
    assert "from 10 to 11 queues" in second
    assert "so new, ordered, reading in order" in second


@pytest.mark.parametrize(("select", "most"), [(select_by_hash, 1.0), (select_by_consistent_hash(), 0.2)])
def test_growth_breaks_the_order_of_the_keys_that_move(broker: Broker, select: QueueSelector, most: float) -> None:
    """New messages of a moved key are read before old ones wherever their queue is read first: the last queue here."""
    broker.create_topic("T", 8)
    keys = [f"order-{number}" for number in range(200)]
    with Producer(broker, "p") as producer:
        for queues, body in ((8, b"old"), (9, b"new")):
            broker.create_topic("T", queues)
            for key in keys:
                producer.send("T", body, keys=key, selector=select, arg=key)
    seen: dict[str, list[bytes]] = {key: [] for key in keys}
    for queue_id in reversed(range(9)):
        for message in broker.store.messages("T", queue_id):
            seen[message.keys[0]].append(message.body)
    broken = sum(bodies != [b"old", b"new"] for bodies in seen.values()) / len(keys)
    assert 0 < broken <= most
    assert (broken > 0.2) == (select is select_by_hash)


def test_queues_that_no_group_reads_are_logged(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    broker.create_topic("T", 4, write_queues=2)
    assert not caplog.records
    broker.create_topic("T", 2, write_queues=4)
    (told,) = caplog.messages
    assert told.startswith("topic T: producers write to 4 queues, and consumers read only 2: no group gets")


def test_a_table_of_locks_alone_refuses_wrong_values() -> None:
    wrong: list[Any] = [-1, "1", None, True, 1.5]
    for expiry_ms in wrong:
        with pytest.raises(ConfigError, match="expiry_ms: expected a whole number of at least 0"):
            QueueLocks(expiry_ms, lambda: 0)
    with pytest.raises(TypeError, match="now_ms: expected a function"):
        QueueLocks(1, 5)  # type: ignore[arg-type]


def test_an_expired_lock_that_another_client_takes_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "librmq.broker")
    clock, queue = ManualClock(1_000_000), MessageQueue("T", "broker-a", 3)
    locks = QueueLocks(60_000, clock.now_ms)
    for client_id in ("one", "one", "two"):  # the last is refused
        locks.lock_queues(LockQueues("g", client_id, frozenset({queue})))
    assert caplog.messages == []
    clock.move_to(1_060_001)
    assert locks.lock_queues(LockQueues("g", "two", frozenset({queue}))) == {queue}
    assert caplog.messages == ["group g: client two takes over T/3, whose lock one last renewed 60001 ms ago"]
    assert caplog.records[0].levelname == "INFO"


@pytest.mark.parametrize("path", ["~/shop", "~", "~me/shop", "librmq:///shop", "file:///shop"])
def test_a_path_that_means_no_folder_of_its_name_makes_none(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only shells expand ``~``, and a folder ``librmq:`` is not where the URL of other tools leads."""
    monkeypatch.chdir(tmp_path)
    with librmq.MessageStore.open("store") as store:
        for call in (
            librmq.Broker.open,
            librmq.MessageStore.open,
            librmq.share,
            lambda path: librmq.Cluster.open(path, ["a"]),
            lambda path: Replica.open(path, of="store"),
            store.snapshot,
        ):
            with pytest.raises(ConfigError, match=re.escape(f"found {path!r}: write '")):
                call(path)
    assert os.listdir() == ["store"]
    for place in (f"./{path}", path):  # one that exists is meant
        Broker.open(place).close()
