"""Counters and gauges in a plain object, and their export to OpenTelemetry or Prometheus.

`METRICS` lists all names with their labels; any other name or label is refused at its first use.
``docs/metrics.md`` is the guide.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from librmq.errors import ConfigError, MissingExtraError
from librmq.formatting import printable
from librmq.override import override
from librmq.runtime.locks import Lock, call_outside

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from prometheus_client.core import Metric as PrometheusMetric
    from prometheus_client.registry import CollectorRegistry

__all__ = ["Metrics", "export_to_opentelemetry", "export_to_prometheus"]


class Metric(NamedTuple):
    """Meaning of a name."""

    kind: Literal["counter", "gauge"]
    """A counter only grows; a gauge is the current value."""
    unit: str
    """The unit in UCUM's notation: By for bytes, s for seconds, {message} for a number of messages."""
    labels: tuple[str, ...]
    """The names of its labels."""
    meaning: str
    """What it counts or measures."""


def _counter(unit: str, labels: str, meaning: str) -> Metric:
    return Metric("counter", unit, tuple(labels.split()), meaning)


def _gauge(unit: str, labels: str, meaning: str) -> Metric:
    return Metric("gauge", unit, tuple(labels.split()), meaning)


METRICS: Final[Mapping[str, Metric]] = {
    # producers
    "sends": _counter("{send}", "topic status", "sends by status; ERROR if no answer came"),
    "send_retries": _counter("{send}", "topic", "retries of sends"),
    "send_bytes": _counter("By", "topic", "bytes of bodies sent, after compression"),
    "send_seconds": _counter("s", "topic", "total time from send to answer, including retries"),
    "traces_dropped": _counter(
        "{trace}", "group", "traces not stored, because too many waited or their topic could not be written"
    ),
    # broker
    "messages_in": _counter("{message}", "topic", "messages stored"),
    "bytes_in": _counter("By", "topic", "bytes of records stored"),
    "messages_out": _counter("{message}", "topic group", "messages delivered to consumers"),
    "bytes_out": _counter("By", "topic group", "bytes of records delivered to consumers"),
    "busy": _counter("{send}", "topic", "sends refused because the store could not keep up"),
    "resends_dropped": _counter("{send}", "topic", "sends not stored, because their unique id was stored before"),
    "resend_ids": _gauge("{id}", "", "unique ids kept in memory now to find resends"),
    "resend_ids_dropped": _counter("{id}", "", "unique ids dropped early, because memory keeps at most 524,288"),
    "send_backs": _counter("{message}", "topic group", "messages sent back for another delivery"),
    "dead_letters": _counter("{message}", "topic group", "messages that became dead letters after their last retry"),
    "delayed_in": _counter("{message}", "level", "messages stored for a later delivery"),
    "delayed_out": _counter("{message}", "level", "delayed messages delivered"),
    "transactions": _counter("{transaction}", "topic outcome", "transactions ended: commit, rollback, discard"),
    "transaction_checks": _counter("{check}", "topic", "checks of transactions sent to producers"),
    "clients": _gauge("{client}", "group", "clients in a group now"),
    "replicas": _gauge("{replica}", "", "replicas that follow the broker now"),
    "replica_lag_bytes": _gauge("By", "", "bytes of its master's log that a replica lacks now"),
    "held_pulls": _gauge("{pull}", "", "pulls waiting for a message now"),
    # consumers
    "pulls": _counter("{pull}", "topic group status", "pulls by status"),
    "consumed": _counter("{message}", "topic group result", "messages by result of their listener"),
    "consume_seconds": _counter("s", "topic group", "total time in listeners"),
    "rests": _counter("{rest}", "topic group", "rests of a consumer or a queue because downstream is down"),
    "predicate_calls": _counter(
        "{message}",
        "topic group outcome",
        "messages judged by a consumer's predicate: match, no match, error, slow",
    ),
    "flow_controls": _counter("{pull}", "topic group", "pulls postponed because too much waits in memory"),
    "rebalances": _counter("{rebalance}", "topic group", "rebalances that changed the assigned queues"),
    "queues": _gauge("{queue}", "topic group", "assigned queues now"),
    "waiting_messages": _gauge("{message}", "topic group", "messages in memory now, pulled but not consumed"),
    "waiting_bytes": _gauge("By", "topic group", "bytes of their bodies"),
    "lag": _gauge("{message}", "topic group", "messages between committed offset and end of the assigned queues"),
    "duplicates": _counter("{message}", "topic group outcome", "results of the guard: skip, wait, take over, no store"),
    # store
    "unread_deleted": _counter("{message}", "topic group", "messages that retention deleted before they were consumed"),
    "never_read_deleted": _counter(
        "{message}", "topic", "messages that retention deleted in topics that no group has ever read"
    ),
    "group_lag": _gauge(
        "{message}", "topic group", "unconsumed messages by the broker's progress, also without consumers"
    ),
    "log_bytes": _gauge("By", "", "length of the log now, including deleted files"),
    "disk_used": _gauge("1", "", "used fraction of the disk now"),
}
"""Every name, with its meaning and its labels."""

_Series = tuple[str, tuple[tuple[str, str], ...]]


class Metrics:
    """Counters and gauges. Thread-safe; counting takes less than a microsecond."""

    def __init__(self) -> None:
        self._counts: dict[_Series, list[float]] = {}  # lists of one number, so that counting needs one look-up
        self._gauges: dict[tuple[_Series, object], float | Callable[[], float | None]] = {}
        self._observed: dict[tuple[str, object], Callable[[], Mapping[tuple[str, ...], float]]] = {}
        self._lock = Lock()

    @override
    def __repr__(self) -> str:
        return f"<Metrics: {len(self._counts)} counters, {len(self._gauges)} gauges; snapshot() has the values>"

    def count(self, name: str, n: float = 1, **labels: str) -> None:
        """Add ``n`` to a counter.

        Raises:
            ConfigError: `METRICS` has no such counter with these labels.
        """
        key = (name, tuple(labels.items()))
        with self._lock:
            cell = self._counts.get(key)
            if cell is None:
                _check(key, "counter")
                cell = self._counts[key] = [0]
            cell[0] += n

    def gauge(
        self, name: str, value: float | Callable[[], float | None] | None, *, owner: Hashable = None, **labels: str
    ) -> None:
        """Set a gauge to a number or to a function that returns it; None removes the gauge.

        Values of several owners are added up; of a fraction, ``disk_used``, the highest counts. `snapshot` can call a
        function in any thread. Where a function returns None, the value is unknown now, and the sum too: the snapshot
        leaves it out.

        Raises:
            ConfigError: `METRICS` has no such gauge with these labels.
        """
        series = (name, tuple(sorted(labels.items())))
        _check(series, "gauge")
        with self._lock:
            if value is None:
                self._gauges.pop((series, owner), None)
            else:
                self._gauges[series, owner] = value

    def observe(
        self, name: str, values: Callable[[], Mapping[tuple[str, ...], float]] | None, *, owner: Hashable = None
    ) -> None:
        """Set a gauge to a function that returns its values by labels, in the order of `METRICS`; None removes it.

        Values of several owners are added up.

        Raises:
            ConfigError: `METRICS` has no such gauge.
        """
        if name not in METRICS or METRICS[name].kind != "gauge":
            raise ConfigError(f"unknown gauge {name!r}: METRICS has all names")
        with self._lock:
            if values is None:
                self._observed.pop((name, owner), None)
            else:
                self._observed[name, owner] = values

    def remove_gauges(self, owner: Hashable) -> None:
        """Remove all gauges that ``owner`` has set."""
        with self._lock:
            self._gauges = {key: value for key, value in self._gauges.items() if key[1] != owner}
            self._observed = {key: values for key, values in self._observed.items() if key[1] != owner}

    def snapshot(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Return all values: ``snapshot()["sends"]["orders", "SEND_OK"]``, with labels in the order of `METRICS`.

        Names and labels appear after their first use. Errors of a gauge's function propagate.
        """
        with self._lock:
            counts = [(series, cell[0]) for series, cell in self._counts.items()]
            gauges = list(self._gauges.items())
            observed = list(self._observed.items())
        values: dict[str, dict[tuple[str, ...], float]] = {}
        # Callers can give the same labels in different orders.
        for (name, labels), value in counts:
            place = _place(name, labels)
            places = values.setdefault(name, {})
            places[place] = places.get(place, 0) + value
        unknown: set[tuple[str, tuple[str, ...]]] = set()
        for ((name, labels), _), gauge in gauges:
            place, measured = _place(name, labels), gauge() if callable(gauge) else gauge
            if measured is None:
                unknown.add((name, place))
            else:
                places = values.setdefault(name, {})
                before = places.get(place, 0)
                places[place] = max(before, measured) if METRICS[name].unit == "1" else before + measured
        for name, place in unknown:
            values.get(name, {}).pop(place, None)
        for (name, _), observe in observed:
            places = values.setdefault(name, {})
            for labels_of_name, value in observe().items():
                place = tuple(map(printable, labels_of_name))
                places[place] = places.get(place, 0) + value
        return {name: values[name] for name in METRICS if values.get(name)}


class _Outside(Metrics):
    """A subclass of the application, whose code runs without the locks of librmq, and in the order of the calls."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        self._metrics = metrics

    @override
    def count(self, name: str, n: float = 1, **labels: str) -> None:
        call_outside(partial(self._metrics.count, name, n, **labels))

    @override
    def gauge(
        self, name: str, value: float | Callable[[], float | None] | None, *, owner: Hashable = None, **labels: str
    ) -> None:
        call_outside(partial(self._metrics.gauge, name, value, owner=owner, **labels))

    @override
    def observe(
        self, name: str, values: Callable[[], Mapping[tuple[str, ...], float]] | None, *, owner: Hashable = None
    ) -> None:
        call_outside(partial(self._metrics.observe, name, values, owner=owner))

    @override
    def remove_gauges(self, owner: Hashable) -> None:
        call_outside(partial(self._metrics.remove_gauges, owner))


def outside(metrics: Metrics) -> Metrics:
    """Return what librmq's own code counts by; a subclass is application code, which no lock of librmq may enclose."""
    return metrics if type(metrics) is Metrics else _Outside(metrics)


def _check(key: _Series, kind: str) -> None:
    name, labels = key
    metric = METRICS.get(name)
    if metric is None or metric.kind != kind:
        raise ConfigError(f"unknown {kind} {name!r}: METRICS has all names")
    if sorted(label for label, _ in labels) != sorted(metric.labels):
        raise ConfigError(f"{name}: expected the labels {metric.labels}, found {tuple(label for label, _ in labels)}")
    if not all(isinstance(value, str) for _, value in labels):
        raise ConfigError(f"{name}: expected strings for labels, found {dict(labels)!r:.200}")


def _place(name: str, labels: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    values = dict(labels)
    return tuple(printable(values[label]) for label in METRICS[name].labels)


# -------------------------------------------------------------------------------------------------------- exporters


class _PrometheusCollector:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[PrometheusMetric]:
        return []  # nothing to ask for when it is registered

    def collect(self) -> Iterator[PrometheusMetric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, series in self._metrics.snapshot().items():
            metric = METRICS[name]
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            values = family(f"librmq_{name}", metric.meaning, labels=metric.labels)
            for labels, value in series.items():
                values.add_metric(labels, value)
            yield values


def export_to_prometheus(metrics: Metrics, registry: CollectorRegistry | None = None) -> Callable[[], None]:
    """Show ``metrics`` in a registry of prometheus_client (its own by default) as ``librmq_sends_total`` and so on.

    Return a function that removes them.

    Raises:
        MissingExtraError: The extra ``metrics`` is not installed.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        raise MissingExtraError("export_to_prometheus", "metrics") from None
    target = REGISTRY if registry is None else registry
    collector = _PrometheusCollector(metrics)
    target.register(collector)
    return partial(target.unregister, collector)


def export_to_opentelemetry(metrics: Metrics, meter: Meter | None = None) -> None:
    """Show ``metrics`` by a meter of OpenTelemetry, by default the global provider's ``librmq``.

    They are named ``librmq.sends`` and so on, and read when the provider collects.

    Raises:
        MissingExtraError: The extra ``metrics`` is not installed.
    """
    try:
        from opentelemetry.metrics import Observation, get_meter
    except ImportError:
        raise MissingExtraError("export_to_opentelemetry", "metrics") from None

    def observe(name: str, options: CallbackOptions) -> list[Observation]:
        series = metrics.snapshot().get(name, {})
        labels = METRICS[name].labels
        return [Observation(value, dict(zip(labels, values, strict=True))) for values, value in series.items()]

    meter = meter or get_meter("librmq")
    for name, metric in METRICS.items():
        create = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
        create(f"librmq.{name}", callbacks=[partial(observe, name)], unit=metric.unit, description=metric.meaning)
