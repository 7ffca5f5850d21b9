"""Named brokers behind one route: ids that name their broker, outages, and order or availability."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from librmq import Cluster, ManualRunner, Producer, PushConsumer, StoreConfig, select_by_hash
from librmq.broker import Broker
from librmq.client import Client
from librmq.client.allocation import allocate_by_site
from librmq.cluster import RouteTable
from librmq.errors import BrokerUnreachableError, ConfigError, NoRouteError
from librmq.files._memory import MemoryFiles
from librmq.protocol import SendBack

TINY = StoreConfig.tiny()


@pytest.fixture
def runner() -> ManualRunner:
    return ManualRunner()


@pytest.fixture
def cluster(runner: ManualRunner) -> Iterator[Cluster]:
    with Cluster.open("/c", ["a", "b"], runner=runner, files=MemoryFiles(), store_config=TINY) as made:
        made.create_topic("T", 2)
        yield made


@pytest.fixture
def sites(runner: ManualRunner) -> Iterator[Cluster]:
    names = ["hz-a", "hz-b", "sh-a", "sh-b"]
    with Cluster.open("/c", names, runner=runner, files=MemoryFiles(), store_config=TINY) as made:
        made.create_topic("T", 2)
        yield made


class Group:
    """Consumers of one group; records what each of them received."""

    def __init__(self) -> None:
        self.got: list[tuple[str, str, bytes]] = []

    def add(self, cluster: RouteTable, site: str, name: str = "c") -> PushConsumer:
        consumer = PushConsumer(cluster.at(site), "g", instance_name=name, strategy=allocate_by_site())

        def listen(message: object) -> None:
            broker = message.broker_name  # type: ignore[attr-defined]
            self.got.append((consumer.client.client_id, broker, message.body))  # type: ignore[attr-defined]

        consumer.subscribe("T", listen)
        consumer.start()
        return consumer


def test_an_offset_id_names_its_broker(cluster: Cluster) -> None:
    with Producer(cluster, "p") as producer:
        sent = [producer.send("T", b"%d" % number) for number in range(4)]
    assert len({one.offset_id[:16] for one in sent}) == 2
    for number, one in enumerate(sent):
        for message_id in (one.offset_id, one.message_id):
            found = cluster.find_by_id(message_id)
            assert found is not None
            assert found.body == b"%d" % number
    assert cluster.find_by_id("0" * 32) is None
    cluster.crash("b")
    on_b = next(one for one in sent if one.queue.broker_name == "b")
    with pytest.raises(BrokerUnreachableError, match="b cannot be asked"):
        cluster.find_by_id(on_b.offset_id)
    cluster.reopen("b")
    assert cluster.find_by_id(on_b.offset_id) is not None


def test_brokers_with_one_store_host_are_named(runner: ManualRunner) -> None:
    brokers = [
        Broker.open("/b", name=name, runner=runner, files=MemoryFiles(), store_config=TINY) for name in ("x", "y")
    ]
    for broker in brokers:
        broker.create_topic("T", 1)
    routes = RouteTable(*brokers)
    with Producer(routes, "p") as producer:
        sent = [producer.send("T", b"same") for _ in range(2)]
    with pytest.raises(ConfigError, match="x, y have one store host"):
        routes.find_by_id(sent[0].offset_id)


def test_store_hosts_stay_when_a_cluster_is_reopened(tmp_path: Path) -> None:
    with Cluster.open(tmp_path, ["b", "a"], runner=ManualRunner(), store_config=TINY) as cluster:
        sent = Producer(cluster, "p").send("T", b"x")
    with Cluster.open(tmp_path, ["c", "a", "b"], runner=ManualRunner(), store_config=TINY) as cluster:
        found = cluster.find_by_id(sent.offset_id)
        assert found is not None
        assert found.body == b"x"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], "at least one"),
        (["a", "a"], "two brokers are named 'a'"),
        (["a", "../b"], "name folders"),
        ([""], "name"),
        (2, r"brokers: expected names such as \['broker-a', 'broker-b'\], found 2"),
    ],
)
def test_bad_names_are_refused_before_a_file_is_made(names: Any, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=expected):
        Cluster.open(tmp_path / "new", names)
    assert not (tmp_path / "new").exists()


def test_a_route_without_a_writable_queue(cluster: Cluster) -> None:
    for broker in cluster.brokers():
        broker.create_topic("read", 1, permission=4)
    with pytest.raises(NoRouteError, match=r"none lets it be written \(brokers: a, b\)"):
        Producer(cluster, "p").send("read", b"x")


def test_wrong_uses_are_named(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="broker a is open"):
        cluster.reopen("a")
    with pytest.raises(NoRouteError, match="unknown broker 'z'; expected one of a, b"):
        cluster.crash("z")
    with pytest.raises(ConfigError, match="two brokers are named 'a'"):
        cluster.add_broker("a")
    with pytest.raises(ConfigError, match="site: expected letters and digits, found 'h-z'"):
        cluster.at("h-z")
    with pytest.raises(ConfigError, match="nearby: the client has no site"):
        Producer(cluster, "p", nearby=True)
    with pytest.raises(ConfigError, match="if_broker_down: expected one of 'refuse', 'another', or None"):
        Producer(cluster, "p", if_broker_down="other")  # type: ignore[arg-type]


def test_consumers_read_the_rest_after_recovery(cluster: Cluster, runner: ManualRunner) -> None:
    got: list[bytes] = []
    consumer = PushConsumer(cluster, "g")
    consumer.subscribe("T", lambda message: got.append(message.body))
    with Producer(cluster, "p") as producer:
        for number in range(4):
            producer.send("T", b"%d" % number)
        cluster.crash("b")
        with consumer:
            runner.advance(1_000)
            for number in range(4, 8):
                assert producer.send("T", b"%d" % number).queue.broker_name == "a"
            runner.advance(1_000)
            assert len(got) == 6
            cluster.reopen("b")
            runner.advance(60_000)
            assert sorted(got) == [b"%d" % number for number in range(8)]
            assert {producer.send("T", b"x").queue.broker_name for _ in range(4)} == {"a", "b"}


def keyed(producer: Producer, key: str) -> str:
    return producer.send("T", key.encode(), selector=select_by_hash, arg=key).queue.broker_name


def test_refuse_keeps_each_key_in_its_queue(cluster: Cluster, runner: ManualRunner) -> None:
    producer = Producer(cluster, "p", if_broker_down="refuse")
    keys = {key: keyed(producer, key) for key in "klmnop"}
    on_b = sorted(key for key, name in keys.items() if name == "b")
    assert 0 < len(on_b) < 6
    cluster.crash("b")
    for waited_ms in (0, 200_000, 3_600_000):
        runner.advance(waited_ms)
        for key in on_b:
            with pytest.raises(BrokerUnreachableError):
                keyed(producer, key)
        assert all(keyed(producer, key) == "a" for key in keys if key not in on_b)
    late = Producer(cluster, "late", if_broker_down="refuse")  # it has never seen broker b
    with pytest.raises(BrokerUnreachableError):
        keyed(late, on_b[0])
    cluster.reopen("b")
    assert {key: keyed(producer, key) for key in keys} == keys


def test_another_queue_keeps_sending_and_breaks_order(cluster: Cluster, runner: ManualRunner) -> None:
    producer = Producer(cluster, "p", if_broker_down="another")
    keys = {key: keyed(producer, key) for key in "klmnop"}
    cluster.crash("b")
    for waited_ms in (0, 200_000):
        runner.advance(waited_ms)
        assert {keyed(producer, key) for key in keys} == {"a"}
    cluster.reopen("b")
    runner.advance(60_000)
    assert {key: keyed(producer, key) for key in keys} == keys


def test_without_a_choice_order_breaks_after_150_s(cluster: Cluster, runner: ManualRunner) -> None:
    """As in 4.9, the send is refused until clients notice, and then goes to another queue."""
    producer = Producer(cluster, "p")
    key = next(key for key in "klmnop" if keyed(producer, key) == "b")
    cluster.crash("b")
    with pytest.raises(BrokerUnreachableError):
        keyed(producer, key)
    runner.advance(150_000)
    assert keyed(producer, key) == "a"


def test_sends_stay_at_the_site_while_it_has_a_broker(sites: Cluster, runner: ManualRunner) -> None:
    producer = Producer(sites.at("hz"), "p", nearby=True)
    assert producer.client.client_id.startswith("hz-")

    def brokers() -> set[str]:
        return {producer.send("T", b"x").queue.broker_name for _ in range(8)}

    assert brokers() == {"hz-a", "hz-b"}
    sites.crash("hz-a")
    assert brokers() == {"hz-b"}
    sites.crash("hz-b")
    assert brokers() == {"sh-a", "sh-b"}
    runner.advance(300_000)
    assert brokers() == {"sh-a", "sh-b"}
    sites.reopen("hz-a")
    runner.advance(60_000)
    assert brokers() == {"hz-a"}


def test_a_cut_link_concerns_one_site(sites: Cluster, runner: ManualRunner) -> None:
    near, far = (Producer(sites.at(site), "p", nearby=True) for site in ("hz", "sh"))
    for name in ("hz-a", "hz-b"):
        sites.cut(name, site="hz")
    assert near.send("T", b"x").queue.broker_name.startswith("sh-")
    far_queue = next(queue for queue in far.queues("T") if queue.broker_name == "hz-a")
    assert far.send("T", b"x", queue=far_queue).queue == far_queue
    assert sites.at("hz").broker_names() == ("sh-a", "sh-b")
    for name in ("hz-a", "hz-b"):
        sites.restore(name, site="hz")
    runner.advance(60_000)
    assert near.send("T", b"x").queue.broker_name.startswith("hz-")


def test_a_dead_letter_that_another_broker_sent_again_is_not_sent_once_more(
    sites: Cluster, runner: ManualRunner
) -> None:
    """The broker that has the letter was down, so it has no note."""
    retries = "%RETRY%billing"
    sites.create_topic("orders", 1)
    for broker in sites.brokers():
        Producer(broker, "shop").send("orders", broker.name.encode())
        (message,) = broker.messages("orders")
        broker.call(SendBack("billing", message.physical_offset, -1))
    letters = sites.dead_letters("billing")
    lost = sites.brokers()[0].name
    sites.crash(lost)
    assert sites.resend_dead_letters("billing", [letter for letter in letters if letter.body == lost.encode()]) == 1
    runner.advance(1000)
    sites.reopen(lost)
    runner.advance(60_000)
    assert sites.resend_dead_letters("billing", letters[:1], only_unsent=True) == 0
    assert sites.resend_dead_letters("billing") == len(letters) - 1
    assert sites.resend_dead_letters("billing") == 0
    assert sorted(copy.body for copy in sites.messages(retries)) == sorted(letter.body for letter in letters)


def test_queues_without_consumers_are_taken_and_given_back(sites: Cluster, runner: ManualRunner) -> None:
    group = Group()
    hz, sh = group.add(sites, "hz"), group.add(sites, "sh")
    producer = Producer(sites, "p")

    def crossings() -> set[bool]:
        group.got.clear()
        for _ in range(8):
            producer.send("T", b"x")
        runner.advance(1_000)
        assert len(group.got) == 8
        return {who.partition("-")[0] != broker.partition("-")[0] for who, broker, _ in group.got}

    runner.advance(1_000)
    assert crossings() == {False}
    sh.shutdown()
    runner.advance(20_000)
    assert crossings() == {False, True}
    again = group.add(sites, "sh", "again")
    runner.advance(20_000)
    assert crossings() == {False}
    for one in (hz, again):
        one.shutdown()


def test_clients_may_name_their_site(cluster: Cluster) -> None:
    assert Client(cluster, instance_name="pay", site="hz").client_id == "hz-127.0.0.1@pay"
    with pytest.raises(ConfigError, match="site"):
        Client(cluster, site="h z")


def test_threads_and_a_disk(tmp_path: Path) -> None:
    with Cluster.open(tmp_path, ["a", "b"], store_config=TINY) as cluster, Producer(cluster, "p") as producer:
        assert producer.send("T", b"x").queue.broker_name in ("a", "b")
        broker = cluster.add_broker("c")
        assert broker.name == "c"
        assert [one.name for one in cluster.brokers()] == ["a", "b", "c"]
        assert "a, b, c" in repr(cluster)
    assert all(one.dead for one in cluster.brokers())


@pytest.mark.parametrize("place", ["broker", "cluster"])
def test_a_relative_path_means_the_same_folder_in_another_working_directory(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    runner = ManualRunner()
    opened = Broker.open("b", runner=runner) if place == "broker" else Cluster.open("c", ["b"], runner=runner)
    with opened, Producer(opened, "shop") as producer:
        monkeypatch.chdir(elsewhere)
        producer.send("orders", b"o-1")
        runner.advance(60_000)
        if isinstance(opened, Cluster):
            opened.crash("b")
            opened.reopen("b")
            producer.send("orders", b"o-2")
    assert list(elsewhere.iterdir()) == []
