"""Client identity: clusters do not mix, the old rule and its consequence, settings of a whole group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from librmq import Broker, Cluster, ManualRunner, NoRouteError, Producer, PushConsumer, StoreConfig
from librmq.broker import BrokerConfig
from librmq.client import Client
from librmq.client.client import ProcessClients
from librmq.errors import ConfigError
from librmq.files._memory import MemoryFiles
from librmq.protocol import ConsumeFrom, MessageModel

STRICT = BrokerConfig(auto_create_topic=False)


@pytest.fixture
def clusters() -> Iterator[tuple[Cluster, Cluster]]:
    runner = ManualRunner()
    opened = [
        Cluster.open(
            f"/{name}",
            [f"{name}-1"],
            config=STRICT,
            runner=runner,
            files=MemoryFiles(),
            store_config=StoreConfig.tiny(),
        )
        for name in ("a", "b")
    ]
    yield opened[0], opened[1]
    for one in opened:
        one.close()


def test_the_old_rule_mixes_clusters_up(clusters: tuple[Cluster, Cluster], caplog: pytest.LogCaptureFixture) -> None:
    a, b = clusters
    a.create_topic("in-a")
    b.create_topic("in-b")
    clients = ProcessClients()
    consumer = PushConsumer(a, "billing", client=clients.client_for(a))
    consumer.subscribe("in-a", lambda message: None)
    consumer.start()
    client = clients.client_for(b)
    assert client is consumer.client
    assert "belongs to <Cluster 'DefaultCluster': a-1> already" in caplog.text
    with pytest.raises(NoRouteError, match=r"'in-b'.*brokers: a-1"):
        Producer(client.route, "shop", client=client).send("in-b", b"x")
    own = clients.client_for(b, instance_name="own")
    assert Producer(b, "shop", client=own).send("in-b", b"x").queue.broker_name == "b-1"
    consumer.shutdown()


def test_a_client_of_another_cluster_is_named(clusters: tuple[Cluster, Cluster]) -> None:
    a, b = clusters
    client = Client(a, instance_name="one")
    with pytest.raises(ConfigError, match=r"127.0.0.1@one belongs to another route \(<Cluster .* a-1>, not .* b-1>\)"):
        Producer(b, "shop", client=client)


def test_two_clients_of_one_id_are_named_with_their_brokers(clusters: tuple[Cluster, Cluster]) -> None:
    a, _ = clusters
    first, second = (Producer(a, "shop", client=Client(a, instance_name="same", site="hz")) for _ in range(2))
    first.start()
    assert a.shared_client_ids() == {}
    second.start()
    assert a.shared_client_ids() == {"hz-127.0.0.1@same": ("a-1",)}
    for one in (first, second):
        one.shutdown()


def test_the_last_started_sets_the_settings_of_its_group(caplog: pytest.LogCaptureFixture) -> None:
    """As in 4.9, each heartbeat replaces the kind, model and start of the group."""
    runner = ManualRunner()
    broker = Broker.open("/b", runner=runner, files=MemoryFiles(), store_config=StoreConfig.tiny())
    consumers: list[PushConsumer] = []
    for start in (ConsumeFrom.FIRST, ConsumeFrom.LAST, ConsumeFrom.LAST):
        consumer = PushConsumer(broker, "g", consume_from=start, instance_name=f"c{len(consumers)}")
        consumer.subscribe("T", lambda message: None)
        consumer.start()
        consumers.append(consumer)
    known = broker.connections("g")
    assert known is not None
    assert (known.model, known.consume_from) == (MessageModel.CLUSTERING, ConsumeFrom.LAST)
    told = [line for line in caplog.messages if "counts for the whole group" in line]
    assert len(told) == 1
    assert "127.0.0.1@c1" in told[0]
    for consumer in consumers:
        consumer.shutdown()
    broker.close()
