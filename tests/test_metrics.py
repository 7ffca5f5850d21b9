"""Counters and gauges, and their export to other systems."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from librmq import Broker, Producer, PushConsumer
from librmq.errors import ConfigError, MissingExtraError
from librmq.metrics import Metrics, export_to_opentelemetry, export_to_prometheus
from librmq.runtime import ManualRunner
from tests.programs import run_program


def test_counts_add_up_by_labels() -> None:
    metrics = Metrics()
    metrics.count("sends", topic="a", status="SEND_OK")
    metrics.count("sends", 2, status="SEND_OK", topic="a")
    metrics.count("sends", topic="a", status="ERROR")
    metrics.count("send_seconds", 0.25, topic="a")
    assert metrics.snapshot() == {"sends": {("a", "SEND_OK"): 3, ("a", "ERROR"): 1}, "send_seconds": {("a",): 0.25}}


def test_a_gauge_is_a_number_or_asked_or_gone() -> None:
    metrics = Metrics()
    held = [1]
    metrics.gauge("held_pulls", 7)
    metrics.gauge("queues", lambda: len(held), topic="a", group="g")
    assert metrics.snapshot() == {"held_pulls": {(): 7}, "queues": {("a", "g"): 1}}
    held.append(2)
    metrics.gauge("held_pulls", 8)
    assert metrics.snapshot() == {"held_pulls": {(): 8}, "queues": {("a", "g"): 2}}
    metrics.gauge("queues", None, group="g", topic="a")
    metrics.gauge("queues", None, group="g", topic="never set")
    assert metrics.snapshot() == {"held_pulls": {(): 8}}


def test_gauges_of_several_add_up() -> None:
    metrics = Metrics()
    for owner, count in (("a", 1), ("b", 2), ("a", 3)):
        metrics.gauge("queues", count, owner=owner, topic="t", group="g")
    metrics.gauge("held_pulls", lambda: 4, owner="a")
    assert metrics.snapshot() == {"held_pulls": {(): 4}, "queues": {("t", "g"): 5}}
    metrics.gauge("queues", None, topic="t", group="g")
    metrics.remove_gauges("a")
    assert metrics.snapshot() == {"queues": {("t", "g"): 2}}
    metrics.gauge("queues", None, owner="b", topic="t", group="g")
    assert metrics.snapshot() == {}


def test_errors_of_a_gauge_propagate() -> None:
    metrics = Metrics()
    metrics.gauge("log_bytes", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        metrics.snapshot()


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("sent", {}),
        ("queues", {"topic": "a", "group": "g"}),  # a gauge
        ("sends", {"topic": "a"}),
        ("sends", {"topic": "a", "status": "b", "group": "c"}),
        ("sends", {"topic": "a", "state": "b"}),
        ("sends", {"topic": "a", "status": 1}),
    ],
)
def test_an_unknown_counter_is_refused(name: str, labels: dict[str, Any]) -> None:
    metrics = Metrics()
    with pytest.raises(ConfigError):
        metrics.count(name, **labels)
    assert metrics.snapshot() == {}


@pytest.mark.parametrize(("name", "labels"), [("depth", {}), ("sends", {}), ("queues", {"topic": "a"})])
def test_an_unknown_gauge_is_refused(name: str, labels: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Metrics().gauge(name, 1, **labels)


def test_no_count_is_lost_among_threads() -> None:
    metrics = Metrics()
    gate = threading.Barrier(4)

    def work(_: int) -> None:
        gate.wait()
        for number in range(2000):
            metrics.count("messages_in", topic=str(number % 3))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert sum(metrics.snapshot()["messages_in"].values()) == 8000


@pytest.fixture
def filled() -> Metrics:
    metrics = Metrics()
    metrics.count("sends", 3, topic='a"b', status="SEND_OK")
    metrics.gauge("queues", lambda: 4, topic="a", group="g")
    metrics.gauge("held_pulls", 2)
    return metrics


def test_prometheus_shows_them(filled: Metrics) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    remove = export_to_prometheus(filled, registry)
    shown = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    assert shown == [
        r'librmq_sends_total{status="SEND_OK",topic="a\"b"} 3.0',
        "librmq_held_pulls 2.0",
        'librmq_queues{group="g",topic="a"} 4.0',
    ]
    remove()
    assert generate_latest(registry) == b""


def test_opentelemetry_shows_them(filled: Metrics) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint, Sum

    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    export_to_opentelemetry(filled, provider.get_meter("test"))
    data = reader.get_metrics_data()
    assert data is not None
    shown = {}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        points = [point for point in metric.data.data_points if isinstance(point, NumberDataPoint)]
        shown[metric.name] = [(dict(point.attributes or {}), point.value) for point in points]
        if isinstance(metric.data, Sum):
            assert metric.data.is_monotonic
            assert (metric.name, metric.unit) == ("librmq.sends", "{send}")
    assert shown == {
        "librmq.sends": [({"topic": 'a"b', "status": "SEND_OK"}, 3)],
        "librmq.queues": [({"topic": "a", "group": "g"}, 4)],
        "librmq.held_pulls": [({}, 2)],
    }
    provider.shutdown()


@pytest.mark.parametrize(
    ("package", "export"),
    [("prometheus_client", export_to_prometheus), ("opentelemetry.metrics", export_to_opentelemetry)],
)
def test_without_the_extra_it_is_named(package: str, export: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"librmq\[metrics\]"):
        export(Metrics())


def test_counting_loads_neither() -> None:
    code = "import sys, librmq.metrics; print([m for m in sys.modules if m.startswith(('prom', 'opentel'))])"
    assert run_program(code).stdout == "[]\n"


def test_its_repr_says_how_much_there_is() -> None:
    metrics = Metrics()
    metrics.count("sends", topic="T", status="SEND_OK")
    assert repr(metrics) == "<Metrics: 1 counters, 0 gauges; snapshot() has the values>"


def test_lag_of_a_group_stays_without_consumers() -> None:
    metrics = Metrics()
    runner = ManualRunner()
    with Broker.temporary(runner=runner, metrics=metrics) as broker:
        consumer = PushConsumer(broker, "g")
        consumer.subscribe("orders", lambda message: None)
        consumer.start()
        producer = Producer(broker, "p")
        producer.send("orders", b"x")
        runner.advance(30_000)
        assert metrics.snapshot()["group_lag"]["orders", "g"] == 0
        consumer.shutdown()
        for _ in range(3):
            producer.send("orders", b"x")
        assert metrics.snapshot()["group_lag"]["orders", "g"] == 3
    assert "group_lag" not in metrics.snapshot()


def test_a_broker_s_gauges_end_with_it_though_clients_have_not_left() -> None:
    metrics = Metrics()
    broker = Broker.temporary(runner=ManualRunner(), metrics=metrics)
    consumer = PushConsumer(broker, "g")
    consumer.subscribe("orders", lambda message: None)
    consumer.start()
    assert metrics.snapshot()["clients"] == {("g",): 1}
    broker.close()
    assert not metrics.snapshot().keys() & {"clients", "held_pulls", "group_lag"}


def test_a_broker_may_end_while_its_metrics_are_read() -> None:
    metrics = Metrics()
    broker = Broker.temporary(runner=ManualRunner(), metrics=metrics)
    broker.create_topic("orders", 1)
    broker.set_group("g")
    broker.reset_group("g", "orders", to="begin")
    metrics.gauge("replicas", broker.close, owner="a reader that is slow")
    assert "group_lag" not in metrics.snapshot()


def test_gauges_of_several_brokers_add_up() -> None:
    metrics = Metrics()
    runner = ManualRunner()
    with Broker.temporary(runner=runner, metrics=metrics) as other:
        with Broker.temporary(runner=runner, metrics=metrics) as broker:
            for each, count in ((broker, 2), (other, 3)):
                for _ in range(count):
                    Producer(each, "p").send("orders", b"x")
                each.set_group("g")
                each.reset_group("g", "orders", to="begin")
            found = metrics.snapshot()
            assert found["group_lag"]["orders", "g"] == 5
            assert found["log_bytes"][()] == broker.store.log.end + other.store.log.end
            assert 0 <= found["disk_used"][()] <= 1
        assert metrics.snapshot()["group_lag"]["orders", "g"] == 3


@pytest.mark.parametrize("orderly", [False, True])
def test_dead_letters_count_in_any_order(*, orderly: bool) -> None:
    metrics = Metrics()
    runner = ManualRunner()
    with Broker.temporary(runner=runner, metrics=metrics) as broker:
        consumer = PushConsumer(broker, "g", orderly=orderly, max_reconsume_times=1)
        consumer.subscribe("orders", lambda message: 1 // 0)
        with consumer:
            Producer(broker, "p").send("orders", b"x")
            runner.advance(60_000)
        assert len(broker.dead_letters("g")) == 1
        assert metrics.snapshot()["dead_letters"] == {("orders", "g"): 1}


def test_labels_have_no_control_characters() -> None:
    metrics = Metrics()
    metrics.count("dead_letters", topic="a\x1b[31m\n", group="g")
    metrics.observe("group_lag", lambda: {("t\u202e", "g"): 3})
    values = metrics.snapshot()
    assert values["dead_letters"] == {("a\\u001b[31m\\u000a", "g"): 1}
    assert values["group_lag"] == {("t\\u202e", "g"): 3}
