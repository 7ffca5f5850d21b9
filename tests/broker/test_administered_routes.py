"""Every administrative call at every place: in the process, between processes, over TCP, in a cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

import pytest

import librmq
from librmq.broker import retries
from librmq.broker._administered_route import AdministeredRoute
from librmq.broker._administration import Administration
from librmq.diagnosis import StoreView
from librmq.errors import BrokerError, BrokerUnreachableError, ConfigError, GroupBehindError, MessageIllegalError
from librmq.files._memory import MemoryFiles
from librmq.files.interface import File
from librmq.protocol import QueryMessages, SendMessage
from librmq.wire.remoting import RemotingServer
from librmq.wire.share_links import connect_to_owner
from tests.programs import start_program, start_serve

PATIENT_S: Final = 60
"""Longer than the disk of a busy machine takes for a flush; a call waits for several."""


@contextlib.contextmanager
def in_process(folder: Path) -> Iterator[AdministeredRoute]:
    with librmq.Broker.open(folder) as broker:
        yield broker


@contextlib.contextmanager
def temporary(folder: Path) -> Iterator[AdministeredRoute]:
    with librmq.Broker.temporary() as broker:
        yield broker


@contextlib.contextmanager
def by_coroutine(folder: Path) -> Iterator[AdministeredRoute]:
    with (
        librmq.share(folder, timeout=PATIENT_S),
        ThreadPoolExecutor(1) as thread,
    ):  # the test may have an event loop of its own
        peer = thread.submit(asyncio.run, librmq.share_async(folder, timeout=PATIENT_S)).result()
        yield peer
        thread.submit(asyncio.run, peer.__aexit__(None, None, None)).result()


@contextlib.contextmanager
def as_owner(folder: Path) -> Iterator[AdministeredRoute]:
    with librmq.share(folder, timeout=PATIENT_S) as shared:
        yield shared


@contextlib.contextmanager
def as_peer(folder: Path) -> Iterator[AdministeredRoute]:
    with librmq.share(folder, timeout=PATIENT_S), librmq.share(folder, timeout=PATIENT_S) as peer:
        assert not peer.is_owner
        yield peer


@contextlib.contextmanager
def to_owner(folder: Path) -> Iterator[AdministeredRoute]:
    with librmq.share(folder, timeout=PATIENT_S), connect_to_owner(folder, timeout_s=PATIENT_S) as route:
        yield route


@contextlib.contextmanager
def over_tcp(folder: Path) -> Iterator[AdministeredRoute]:
    with (
        librmq.Broker.open(folder) as broker,
        RemotingServer(broker) as server,
        librmq.connect(server.address, timeout=PATIENT_S) as route,
    ):
        yield route


@contextlib.contextmanager
def in_cluster(folder: Path) -> Iterator[AdministeredRoute]:
    with librmq.Cluster.open(folder, ["a", "b"]) as cluster:
        yield cluster


@contextlib.contextmanager
def of_one(folder: Path) -> Iterator[AdministeredRoute]:
    with librmq.Cluster.open(folder, ["a"]) as cluster:
        yield cluster


PLACES = [in_process, temporary, as_peer, as_owner, by_coroutine, to_owner, over_tcp, in_cluster, of_one]
Place = Callable[[Path], contextlib.AbstractContextManager[AdministeredRoute]]
NEAR = (temporary, as_owner, to_owner, of_one)
"""Places whose calls run the code of another one: only how they are opened differs, so one program tries them all."""


@pytest.fixture(params=[place for place in PLACES if place not in NEAR])
def place(request: pytest.FixtureRequest) -> Place:
    return cast(Place, request.param)


@pytest.fixture
def route(place: Place, tmp_path: Path) -> Iterator[AdministeredRoute]:
    with place(tmp_path / "store") as route:
        yield route


@pytest.fixture
def producer(route: AdministeredRoute) -> Iterator[librmq.Producer]:
    with librmq.Producer(route, "shop") as producer:
        yield producer


OWNER: Final = """
import sys
import librmq

with librmq.share(sys.argv[1]):
    print("owns it", flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def beside_a_process(folder: Path) -> Iterator[AdministeredRoute]:
    with start_program(OWNER, folder) as owner:
        owner.stdout.readline()
        with librmq.share(folder, timeout=PATIENT_S) as peer:
            assert not peer.is_owner
            yield peer
        owner.communicate("\n")


@contextlib.contextmanager
def at_serve(folder: Path) -> Iterator[AdministeredRoute]:
    with (
        start_serve(folder, "--remoting", "0", "--format", "jsonl") as (_, row),
        librmq.connect(row["remoting"], timeout=PATIENT_S) as route,
    ):
        yield route


class Asked:
    """A route that remembers which of its members a program used."""

    def __init__(self, route: AdministeredRoute) -> None:
        self._route = route
        self.used: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.used.add(name)
        return getattr(self._route, name)


def consumed(route: AdministeredRoute, number: int, **selection: str) -> list[bytes]:
    """Return the bodies of ``number`` messages of a topic, with longer waits on a busy machine."""
    bodies: list[bytes] = []
    for attempt in range(10):
        messages = route.consume("orders", group="billing", timeout=0.1 * 2**attempt, **selection)
        bodies += [message.body for message in messages]
        if len(bodies) >= number:
            break
    return bodies


def give_up(message: librmq.StoredMessage) -> None:
    raise librmq.DeadLetter


@pytest.mark.slow
@pytest.mark.parametrize("place", [*PLACES, beside_a_process, at_serve])
def test_a_program_makes_every_call_wherever_the_broker_is(place: Place, tmp_path: Path) -> None:
    """The program is the same at each place. A call that is new has to be made here too."""
    with place(tmp_path / "store") as route, librmq.Producer(route, "shop") as producer:
        asked: Any = Asked(route)
        name = asked.broker_names()[0]
        asked.create_topic("orders", 1, broker_name=name)
        assert asked.topics()["orders"].read_queues == 1
        (queue,) = asked.queues("orders")
        sent = [
            producer.send("orders", b"%d" % number, keys="k", tags="ab"[number % 2], properties={"n": str(number)})
            for number in range(4)
        ]
        assert [message.body for message in asked.messages("orders")] == [b"0", b"1", b"2", b"3"]
        assert [message.body for message in asked.messages_in(queue, range(1, 3))] == [b"1", b"2"]
        assert asked.find_by_id(sent[1].message_id).body == b"1"
        assert [message.body for message in asked.find_by_key("orders", "k", max_messages=2)] == [b"2", b"3"]

        asked.set_group("billing", retry_max_times=0)
        assert asked.groups()["billing"] == asked.group_settings("billing").retry_max_times == 0
        for selection in ({"tags": "a"}, {"sql": "n = 0 OR n = 2"}):
            assert asked.reset_group("billing", "orders", "begin") == {queue: 0}
            assert consumed(asked, 2, **selection) == [b"0", b"2"]
        assert asked.reset_group("billing", "orders", 2, queue_id=0) == {queue: 2}
        assert (asked.consumer_offset("billing", "orders"), asked.consumer_offsets("billing", "orders")) == (2, {0: 2})
        assert (asked.progress("billing")[queue].queue_offset, asked.lag("billing")) == (2, 2)
        assert asked.groups_of("orders") == ("billing",)

        consumer = librmq.PushConsumer(route, "billing")
        consumer.subscribe("orders", give_up)
        with consumer:
            asked.join(timeout=20)
            assert asked.connections("billing").client_ids == (consumer.client.client_id,)
            ((client_id, state),) = asked.instances("billing").items()
            assert (client_id, state.threads) == (consumer.client.client_id, 20)
            if place in (over_tcp, at_serve):
                with pytest.raises(BrokerError, match="a broker moves a running group only in all queues"):
                    asked.reset_group("billing", "orders", 4, queue_id=0)
            else:
                assert asked.reset_group("billing", "orders", 4, queue_id=0) == {queue: 4}
            clients = asked.clients()
            assert [client.client_id for client in clients if "billing" in client.consumer_groups] == [
                consumer.client.client_id
            ]
        letters = asked.dead_letters("billing")
        assert sorted(letter.body for letter in letters) == [b"2", b"3"]
        assert asked.resend_dead_letters("billing", letters[:1]) == 1
        assert [message.body for message in asked.messages("%RETRY%billing")] == [letters[0].body]
        assert asked.cancel(producer.send("orders", b"later", delay_level=18)).cancelled

        if place in (over_tcp, at_serve):
            with pytest.raises(ConfigError, match="schedules"):
                asked.schedules()
            for change in (asked.pause_schedule, asked.resume_schedule, asked.delete_schedule):
                with pytest.raises(ConfigError, match="schedules"):
                    change("daily")
            with pytest.raises(ConfigError, match="schedules"):
                asked.set_schedule("daily", topic="orders", every=86_400)
        else:
            asked.set_schedule("daily", topic="orders", every=86_400)
            asked.pause_schedule("daily")
            assert [(one.name, one.topic, one.paused) for one in asked.schedules()] == [("daily", "orders", True)]
            asked.resume_schedule("daily")
            asked.delete_schedule("daily")
            assert asked.schedules() == ()

        asked.delete_group("billing", keep_progress=False)
        assert asked.consumer_offset("billing", "orders") is None
        asked.delete_topic("orders")
        assert asked.clean_unused_topics() == []
    calls = {name for name in dir(AdministeredRoute) if not name.startswith("_")} - set(dir(librmq.protocol.Route))
    # The first two are shown by the block, the others by a test below.
    assert calls - asked.used == {"close", "dead", "run_async", "join_async"}


def test_topics_and_queues(route: AdministeredRoute) -> None:
    brokers = len(route.broker_names())
    route.create_topic("orders", 3)
    topic = route.topics()["orders"]
    assert (topic.kind, topic.read_queues, topic.write_queues, topic.permission) == (
        "user",
        3 * brokers,
        3 * brokers,
        6,
    )
    assert [bounds.max_offset for bounds in route.queues("orders").values()] == [0] * 3 * brokers
    assert route.queues("unknown") == {}
    route.create_topic("in_order", 1, message_type="FIFO")
    route.create_topic("in_order", 2)
    assert route.topics()["in_order"].message_type == "FIFO"
    route.create_topic("one", 2, broker_name=route.broker_names()[0])
    assert route.topics()["one"].read_queues == 2
    route.delete_topic("orders")
    assert "orders" not in route.topics()
    assert route.clean_unused_topics() == []


def test_settings_of_groups(route: AdministeredRoute) -> None:
    route.set_group("billing", retry_max_times=3, consumes=False)
    route.set_group("billing", is_ordered=True)
    assert route.groups()["billing"] == 3
    settings = route.group_settings("billing")
    assert (settings.retry_max_times, settings.consumes, settings.is_ordered) == (3, False, True)
    with pytest.raises(BrokerError, match="group 'bilings' does not exist; did you mean billing"):
        route.group_settings("bilings")
    route.delete_group("billing")
    assert "billing" not in route.groups()


def test_messages_are_found(place: Place, route: AdministeredRoute, producer: librmq.Producer) -> None:
    route.create_topic("orders", 2)
    sent = [producer.send("orders", b"%d" % number, keys="k1") for number in range(4)]
    bodies = [message.body for message in route.messages("orders")]
    assert (sorted(bodies) if place is in_cluster else bodies) == [b"0", b"1", b"2", b"3"]
    assert {message.body for message in route.find_by_key("orders", "k1")} == {b"0", b"1", b"2", b"3"}
    for message_id in (sent[2].message_id, sent[2].offset_id):
        message = route.find_by_id(message_id)
        assert message is not None
        assert message.body == b"2"
    waiting = producer.send("orders", b"later", delay_level=18)
    message = route.find_by_id(waiting.message_id)
    assert message is not None
    assert message.body == b"later"
    assert route.find_by_id("0" * 32) is None
    assert sum(bounds.max_offset - bounds.min_offset for bounds in route.queues("orders").values()) == 4


def test_a_group_consumes_and_is_reset(route: AdministeredRoute, producer: librmq.Producer) -> None:
    route.create_topic("orders", 1)
    begin = datetime(2020, 1, 1, tzinfo=UTC)
    for number in range(3):
        producer.send("orders", b"%d" % number)
    assert sorted(consumed(route, 3)) == [b"0", b"1", b"2"]
    assert route.lag("billing", "orders") == 0
    assert "billing" in route.groups_of("orders")
    end = {queue: bounds.max_offset for queue, bounds in route.queues("orders").items()}
    assert {queue: row.queue_offset for queue, row in route.progress("billing", "orders").items()} == end
    zero = dict.fromkeys(end, 0)
    assert route.reset_group("billing", "orders", "begin") == zero
    assert route.lag("billing", "orders") == route.lag("billing") == route.lag("billing", "") == 3
    assert route.reset_group("billing", "orders", "end") == end
    assert route.reset_group("billing", "orders", begin) == zero
    assert set(route.reset_group("billing", "orders", 1).values()) <= {0, 1}
    before = route.progress("billing", "orders")
    with pytest.raises(ConfigError, match=r"found 1795802400000; if a time was meant, give it .* 2026-11-27T18:00"):
        route.reset_group("billing", "orders", 1_795_802_400_000)
    assert route.progress("billing", "orders") == before
    with pytest.raises(ConfigError, match="to: expected 'begin'"):
        route.reset_group("billing", "orders", "soon")  # type: ignore[arg-type]
    with pytest.raises(BrokerError):
        route.reset_group("billing", "unknown", "end")
    with pytest.raises(BrokerError):
        route.reset_group("unknown", "orders", "end")


def test_join_waits_for_what_is_due(tmp_path: Path) -> None:
    """An opened store has its first look at delays after a second."""
    runner, bodies = librmq.ManualRunner(), list[bytes]()
    with librmq.Broker.open(tmp_path, runner=runner) as broker, librmq.Producer(broker, "shop") as producer:
        producer.send("orders", b"due", delay_level=1)
        producer.send("orders", b"waits", delay_level=5)
    later = librmq.ManualRunner(librmq.ManualClock(runner.now_ms() + 30_000))
    with librmq.Broker.open(tmp_path, runner=later) as broker:
        consumer = librmq.PushConsumer(broker, "billing", consume_from=librmq.ConsumeFrom.FIRST)
        consumer.subscribe("orders", lambda message: bodies.append(message.body))
        with consumer:
            broker.join(timeout=10)
    assert bodies == [b"due"]


def test_join_waits_for_nothing_that_is_not_due(tmp_path: Path) -> None:
    """Also where it was stored after the last look at delays."""
    runner = librmq.ManualRunner()
    with librmq.Broker.open(tmp_path, runner=runner) as broker, librmq.Producer(broker, "shop") as producer:
        runner.advance(5)
        producer.send("orders", b"waits", delay_level=5)
        producer.send("orders", b"waits too", delay=3600)
        broker.join(timeout=10)


def test_join_waits_for_running_groups(
    route: AdministeredRoute, producer: librmq.Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs no save of theirs, which would come later."""
    monkeypatch.setattr("librmq.consumer._instance.FIRST_SAVE_MS", 60_000)
    route.create_topic("orders", 2)
    consumer = librmq.PushConsumer(route, "billing", consume_from=librmq.ConsumeFrom.FIRST)
    bodies: list[bytes] = []
    consumer.subscribe("orders", lambda message: bodies.append(message.body))
    producer.send("orders", b"1")
    with consumer:
        route.join(timeout=50)
        assert bodies == [b"1"]
        connections = route.connections("billing")
        assert connections is not None
        assert (connections.kind, connections.client_ids) == ("push", (consumer.client.client_id,))
        assert connections.subscriptions["orders"].expression == "*"
        assert {"billing"} <= {group for client in route.clients() for group in client.consumer_groups}
    assert route.connections("billing") is None
    pulling = librmq.PullConsumer(route, "late", consume_from=librmq.ConsumeFrom.FIRST)
    pulling.subscribe("orders")
    with pulling, pytest.raises(GroupBehindError, match="group late: 1 messages of orders/"):
        route.join(timeout=0.1)


def test_dead_letters_are_listed_and_sent_again(
    place: Place, route: AdministeredRoute, producer: librmq.Producer
) -> None:
    route.create_topic("orders", 1)
    route.set_group("billing", retry_max_times=0)
    fails = True
    seen: list[bytes] = []

    def charge(message: librmq.StoredMessage) -> None:
        if fails:
            raise ValueError("no such customer")
        seen.append(message.body)

    consumer = librmq.PushConsumer(route, "billing", consume_from=librmq.ConsumeFrom.FIRST, max_reconsume_times=0)
    consumer.subscribe("orders", charge)
    producer.send("orders", b"1")
    with consumer:
        route.join(timeout=20)
        for _ in range(100):
            if letters := route.dead_letters("billing"):
                break
            route.runner.pass_time(0.05)
        assert [letter.body for letter in letters] == [b"1"]
        fails = False
        assert route.resend_dead_letters("billing", letters) == 1
        for _ in range(100):
            if seen:
                break
            route.runner.pass_time(0.05)
    assert seen == [b"1"]
    if place is over_tcp:
        for named in (None, letters):
            with pytest.raises(ConfigError, match="brokers do not note which dead letters were sent again"):
                route.resend_dead_letters("billing", named, only_unsent=True)
    else:
        assert route.resend_dead_letters("billing") == 0  # it is noted
        assert route.resend_dead_letters("billing", letters, only_unsent=True) == 0
        assert route.resend_dead_letters("billing", letters) == 1


def test_letters_that_another_call_sends_now_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with librmq.Broker.temporary() as broker:
        broker.create_topic("%DLQ%billing", 1)
        for number in range(3):
            broker.store.append(librmq.Message("%DLQ%billing", b"%d" % number, unique_key=f"U{number}"))
        letters, counts = broker.dead_letters("billing"), list[int]()

        def retry_during_another_call(letter: librmq.StoredMessage, group: str, **way: Any) -> SendMessage:
            with monkeypatch.context() as inside:
                inside.setattr(retries, "retry_of", retry_of)
                counts.append(broker.resend_dead_letters("billing", letters, only_unsent=True))
            return retry_of(letter, group, **way)

        retry_of = retries.retry_of
        monkeypatch.setattr(retries, "retry_of", retry_during_another_call)
        assert broker.resend_dead_letters("billing") == 3
        assert counts == [0, 0, 0]
        assert len(list(broker.messages("%RETRY%billing"))) == 3


class CountedFlushes(MemoryFiles):
    """Files that count the flushes of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.flushes = 0

    def flush(self, file: File, begin: int = 0, end: int | None = None) -> None:
        self.flushes += "commitlog" in file.path
        super().flush(file, begin, end)


def test_letters_that_are_sent_together_wait_once_for_the_device() -> None:
    """A wait for each would exceed the time of a request on a slow disk."""
    files, config = CountedFlushes(), librmq.StoreConfig.tiny(durability="sync")
    with librmq.Broker.open("/s", files=files, store_config=config, runner=librmq.ManualRunner()) as broker:
        broker.create_topic("%DLQ%billing", 1)
        broker.create_topic("%RETRY%billing", 1)
        for number in range(64):
            broker.store.append(librmq.Message("%DLQ%billing", b"x", unique_key=f"U{number}"))
        files.flushes = 0
        assert broker.resend_dead_letters("billing") == 64
        assert files.flushes <= 2


def test_unnoted_copies_of_letters_in_any_queue_are_recognised() -> None:
    files = MemoryFiles()
    with librmq.Broker.open("/s", files=files, store_config=librmq.StoreConfig.tiny()) as broker:
        broker.create_topic("%DLQ%billing", 3)
        for number in range(3):
            broker.store.append(librmq.Message("%DLQ%billing", b"x", unique_key=f"U{number}"), number)
        assert broker.resend_dead_letters("billing") == 3
        files.delete("/s/librmq/resent.json")  # as if a kill had come before the note
        assert broker.resend_dead_letters("billing") == 0


@pytest.mark.parametrize("place", ["in process", "as peer", "over tcp"])
def test_a_letter_that_is_refused_does_not_keep_the_others(place: str, tmp_path: Path) -> None:
    config = librmq.StoreConfig.tiny(commitlog_file_size=8192, max_message_size=8192)
    with librmq.Broker.open(tmp_path, store_config=config) as broker:
        broker.create_topic("%DLQ%billing", 1)
        for number in range(4):
            body = bytes(8192 - 130 if number == 2 else 1)  # it fills a file, and its copy has more properties
            broker.store.append(librmq.Message("%DLQ%billing", body, unique_key=f"U{number}"))
    with contextlib.ExitStack() as opened:
        route: AdministeredRoute
        if place == "as peer":
            opened.enter_context(librmq.share(tmp_path, timeout=PATIENT_S))
            route = opened.enter_context(librmq.share(tmp_path, timeout=PATIENT_S))
        else:
            route = broker = opened.enter_context(librmq.Broker.open(tmp_path))
            if place == "over tcp":
                server = opened.enter_context(RemotingServer(broker))
                route = opened.enter_context(librmq.connect(server.address, timeout=PATIENT_S))
        letters = route.dead_letters("billing")
        kind = BrokerError if place == "over tcp" else MessageIllegalError
        with pytest.raises(kind, match="message U2 of '%DLQ%billing'/0 at 2, physical"):
            route.resend_dead_letters("billing", letters)
        assert [message.unique_key for message in route.messages("%RETRY%billing")] == ["U0", "U1", "U3"]
        if place != "over tcp":
            with pytest.raises(MessageIllegalError):
                route.resend_dead_letters("billing")
            assert route.resend_dead_letters("billing", [letters[1], letters[3]], only_unsent=True) == 0


LETTERS: Final = "%DLQ%billing"


def forget_resends(folder: Path) -> None:
    (folder / "librmq/resent.json").unlink()  # as if SIGKILL had come before the note


def resent_bodies(route: AdministeredRoute) -> list[bytes]:
    return [message.body for message in route.messages("%RETRY%billing")]


@pytest.mark.parametrize("unique_key", ["U", None])
def test_letters_that_a_killed_call_has_sent_are_left_out_by_their_names(
    tmp_path: Path, unique_key: str | None
) -> None:
    """Several letters can have the same ids, or none."""
    with librmq.Broker.open(tmp_path) as broker:
        for number in range(3):
            broker.store.append(librmq.Message(LETTERS, b"%d" % number, unique_key=unique_key))
        letters = broker.dead_letters("billing")
        assert broker.resend_dead_letters("billing", [letters[1]]) == 1
        forget_resends(tmp_path)
        assert broker.resend_dead_letters("billing", letters[:2], only_unsent=True) == 1
        assert broker.resend_dead_letters("billing", [letters[0]]) == 1
        forget_resends(tmp_path)
        assert broker.resend_dead_letters("billing") == 1
        assert resent_bodies(broker) == [b"1", b"0", b"0", b"2"]


@pytest.mark.parametrize(("size", "again"), [(32_600, 0), (32_740, 1)])
def test_a_copy_names_its_letter_if_a_record_has_room_for_it(tmp_path: Path, size: int, again: int) -> None:
    """Without a name and a note, the letter is sent twice."""
    with librmq.Broker.open(tmp_path) as broker:
        broker.store.append(librmq.Message(LETTERS, b"x", properties={"p": "x" * size}))
        assert broker.resend_dead_letters("billing") == 1
        forget_resends(tmp_path)
        assert broker.resend_dead_letters("billing") == again


def test_a_named_resend_says_nothing_of_a_later_letter_of_its_message(tmp_path: Path) -> None:
    with librmq.Broker.open(tmp_path) as broker:
        broker.store.append(librmq.Message(LETTERS, b"first", unique_key="U"))
        first = broker.dead_letters("billing")
        assert broker.resend_dead_letters("billing", first) == 1
        broker.store.append(librmq.Message(LETTERS, b"died again", unique_key="U"))
        assert broker.resend_dead_letters("billing", first) == 1
        assert broker.resend_dead_letters("billing") == 1
        assert resent_bodies(broker) == [b"first", b"first", b"died again"]


def test_a_waiting_message_is_cancelled(route: AdministeredRoute, producer: librmq.Producer) -> None:
    receipt = producer.send("orders", b"1", delay_level=18)
    assert route.cancel(receipt).cancelled
    assert route.cancel(receipt.message_id).cancelled
    with pytest.raises(TypeError, match="receipt: expected what send returned"):
        route.cancel(5)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_any_call_runs_beside_an_event_loop(route: AdministeredRoute, anyio_backend: str) -> None:
    await route.run_async(route.create_topic, "orders", 2)
    assert "orders" in await route.run_async(route.topics)
    assert await route.run_async(route.dead_letters, "billing") == []
    await route.join_async(timeout=5)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("place", [in_process, as_owner, as_peer, to_owner, over_tcp])
def test_a_reset_that_was_answered_is_saved(place: Place, tmp_path: Path) -> None:
    """A kill of the broker's process undoes neither a reset nor the end of a group's progress."""
    queue = "billing", "orders"

    def saved() -> object:
        with StoreView.open(tmp_path / "store") as view:
            return view.progress.get(queue)

    with place(tmp_path / "store") as route, librmq.Producer(route, "shop") as producer:
        route.create_topic("orders", 1)
        route.set_group("billing")
        producer.send("orders", b"one")
        route.reset_group("billing", "orders", "end")
        assert saved() == {0: 1}
        route.reset_group("billing", "orders", 0, queue_id=0)
        assert saved() == {0: 0}
        route.delete_group("billing", keep_progress=False)
        assert saved() is None


def test_a_message_that_was_delivered_is_known_to_cancel(route: AdministeredRoute, producer: librmq.Producer) -> None:
    route.create_topic("orders", 1)
    sent = [producer.send("orders", b"%d" % number) for number in range(2)]
    for result in sent:
        cancelled = route.cancel(result.message_id)
        assert not cancelled.cancelled
        assert "no message of a producer" not in cancelled.why
    assert "no message of a producer" in route.cancel("0" * 32).why


def test_closed_handles_refuse_each_call_at_once(place: Place, tmp_path: Path) -> None:
    with place(tmp_path / "store") as route:
        route.create_topic("orders", 1)
    calls: list[Callable[[], object]] = [
        route.topics,
        lambda: route.queues("orders"),
        lambda: route.create_topic("orders"),
        lambda: route.create_topic("orders", broker_name="broker-a"),
        lambda: route.delete_topic("orders"),
        route.clean_unused_topics,
        route.groups,
        lambda: route.group_settings("billing"),
        lambda: route.set_group("billing"),
        lambda: route.delete_group("billing"),
        route.clients,
        lambda: route.connections("billing"),
        lambda: route.groups_of("orders"),
        lambda: route.consumer_offset("billing", "orders"),
        lambda: route.consumer_offsets("billing", "orders"),
        lambda: route.progress("billing", "orders"),
        lambda: route.lag("billing"),
        lambda: route.reset_group("billing", "orders", "end"),
        route.join,
        lambda: route.messages("orders"),
        lambda: route.find_by_id("0" * 32),
        lambda: route.find_by_key("orders", "k1"),
        lambda: route.dead_letters("billing"),
        lambda: route.resend_dead_letters("billing"),
        lambda: route.resend_dead_letters("billing", []),
        lambda: route.cancel("0" * 32),
        lambda: route.consume("orders", group="billing"),
    ]
    for call in calls:
        with pytest.raises(BrokerUnreachableError, match=r"closed|no broker can be reached|cannot be asked"):
            call()


def test_iteration_ends_with_an_error_if_the_handle_is_closed_meanwhile(place: Place, tmp_path: Path) -> None:
    with place(tmp_path / "store") as route:
        route.create_topic("orders", 1)
        messages = route.messages("orders")
    with pytest.raises(BrokerUnreachableError, match=r"closed|no broker can be reached"):
        next(messages)


def test_what_does_not_exist_is_named_with_what_may_be_meant(place: Place, route: AdministeredRoute) -> None:
    route.create_topic("orders", 1)
    route.set_group("billing")
    with pytest.raises(BrokerError, match="topic 'orderz' does not exist; did you mean orders"):
        route.reset_group("billing", "orderz", "end")
    with pytest.raises(BrokerError, match="group 'bilings' does not exist; did you mean billing"):
        route.reset_group("bilings", "orders", "end")
    with pytest.raises(BrokerError, match="topic 'orders' has no queue 7"):
        route.reset_group("billing", "orders", "end", queue_id=7)
    if place is over_tcp:  # the protocol's deletions succeed, as at a broker of RocketMQ
        route.delete_topic("unknown")
        route.delete_group("unknown")
    else:
        with pytest.raises(BrokerError, match="topic 'unknown' does not exist"):
            route.delete_topic("unknown")
        with pytest.raises(BrokerError, match="group 'unknown' does not exist"):
            route.delete_group("unknown")


def test_the_last_messages_of_a_key_are_found(route: AdministeredRoute, producer: librmq.Producer) -> None:
    route.create_topic("one", 1, broker_name=route.broker_names()[0])
    for number in range(66):
        producer.send("one", b"%d" % number, keys="k")
    found = [int(message.body) for message in route.find_by_key("one", "k", max_messages=1000)]
    assert found == list(range(2, 66))
    assert [int(message.body) for message in route.find_by_key("one", "k", max_messages=2)] == [64, 65]


def test_an_id_is_not_looked_for_among_keys(route: AdministeredRoute, producer: librmq.Producer) -> None:
    route.create_topic("orders", 1)
    first = producer.send("orders", b"first")
    for _ in range(70):
        producer.send("orders", b"about it", keys=[first.message_id, "k"])
    message = route.find_by_id(first.message_id)
    assert message is not None
    assert message.body == b"first"
    assert route.find_by_id("k") is None


def test_an_id_is_found_behind_many_keys_at_a_broker_that_returns_the_last_32(monkeypatch: pytest.MonkeyPatch) -> None:
    def query_as_a_broker(self: Administration, request: QueryMessages) -> tuple[librmq.StoredMessage, ...]:
        bounds = request.begin_ms, request.end_ms
        store, most = self._store, 32 if request.is_unique else 64
        return tuple(store.find_by_key(request.topic, request.key, *bounds, most, exact=False))

    monkeypatch.setattr(Administration, "query_messages", query_as_a_broker)
    runner = librmq.ManualRunner()
    with (
        librmq.Broker.temporary(runner=runner) as broker,
        RemotingServer(broker) as server,
        librmq.connect(server.address) as route,
        librmq.Producer(broker, "shop") as producer,
    ):
        first = producer.send("orders", b"first")
        for number in range(300):
            producer.send("orders", b"about it", keys=first.message_id)
            runner.advance(0 if number % 20 else 1_700)
        message = route.find_by_id(first.message_id)
        assert message is not None
        assert message.body == b"first"


def test_wrong_arguments_are_refused_alike(route: AdministeredRoute) -> None:
    wrong: list[tuple[Callable[[], object], type[Exception]]] = [
        (lambda: route.create_topic("a b"), MessageIllegalError),
        (lambda: route.create_topic("refused", cast(Any, "3")), BrokerError),
        (lambda: route.create_topic("refused", permission=99), BrokerError),
        (lambda: route.create_topic("refused", message_type=cast(Any, "fifo")), BrokerError),
        (lambda: route.delete_topic(cast(Any, 5)), MessageIllegalError),
        (lambda: route.create_topic("TBW102"), MessageIllegalError),
        (lambda: route.delete_topic("SCHEDULE_TOPIC_XXXX"), MessageIllegalError),
        (lambda: route.set_group("a b"), MessageIllegalError),
        (lambda: route.group_settings(cast(Any, None)), MessageIllegalError),
        (lambda: route.delete_group(cast(Any, None)), MessageIllegalError),
        (lambda: route.set_group("refused", priority_factor=200), BrokerError),
        (lambda: route.set_group("refused", priority_factor=cast(Any, "7")), BrokerError),
        (lambda: route.set_group("refused", retry_max_times=cast(Any, "3")), BrokerError),
        (lambda: route.queues(cast(Any, None)), MessageIllegalError),
        (lambda: route.connections(cast(Any, None)), MessageIllegalError),
        (lambda: route.groups_of(cast(Any, None)), MessageIllegalError),
        (lambda: route.consumer_offset(cast(Any, None), "orders"), MessageIllegalError),
        (lambda: route.consumer_offsets("billing", cast(Any, 5)), MessageIllegalError),
        (lambda: route.progress(cast(Any, None)), MessageIllegalError),
        (lambda: route.lag("billing", cast(Any, 5)), MessageIllegalError),
        (lambda: route.reset_group(cast(Any, None), "orders", "end"), MessageIllegalError),
        (lambda: route.reset_group("billing", "orders", "end", queue_id=cast(Any, "0")), ConfigError),
        (lambda: route.messages(cast(Any, None)), MessageIllegalError),
        (lambda: route.dead_letters(cast(Any, None)), MessageIllegalError),
        (lambda: route.resend_dead_letters(cast(Any, None)), MessageIllegalError),
        (lambda: route.find_by_id(cast(Any, None)), ConfigError),
        (lambda: route.find_by_key("orders", "k", max_messages=cast(Any, "2")), ConfigError),
    ]
    for call, error in wrong:
        with pytest.raises(error, match=r"expected|may only contain|the broker's own"):
            call()
    with pytest.raises(BrokerError, match="priority_factor: expected a whole number from 0 to 100, found 200"):
        route.set_group("refused", priority_factor=200)
    assert "refused" not in route.topics()
    assert "refused" not in route.groups()
