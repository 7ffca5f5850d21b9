"""Drills: deployments over several sites fail according to a script, and report what was lost, delayed and repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Self

from librmq.broker import Broker, BrokerConfig
from librmq.client import Client, Producer, allocate_by_site
from librmq.client.recorded_route import RecordedRoute
from librmq.client.recorder import Event, Recorder
from librmq.cluster import (
    Cluster,
    Replica,
    ReplicaConfig,
    ReplicaRoute,
    RoutedClient,
    RouteTable,
    SiteRoute,
    SiteRouter,
)
from librmq.config import StoreConfig
from librmq.consumer import DeliveredMessage, PushConsumer
from librmq.errors import ConfigError, RmqError
from librmq.files import MemoryFiles
from librmq.protocol import site_of
from librmq.runtime import ManualRunner
from librmq.store import MessageStore
from librmq.testing._network import opened_like
from librmq.testing._replica import Deployment, check_deployment
from librmq.testing.histories._history import History
from librmq.testing.histories.anomalies import Anomaly, check_history

# ---- results


class TimelineRow(NamedTuple):
    """An event in a drill."""

    minute: float
    what: str


@dataclass(slots=True)
class Minute:
    """What happened in one minute; ``lag`` is the one at its end."""

    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Stored messages, by the sites of producer and broker."""
    consumed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """First deliveries, by the sites of consumer and broker."""
    refused: int = 0
    """Sends that failed."""
    duplicates: int = 0
    """Deliveries of messages that had been delivered before."""
    lag: int = 0
    """Stored messages that no consumer has received."""


@dataclass(slots=True)
class DrillReport:
    """The result of one drill."""

    name: str
    sites: Sequence[str]
    """The sites of its brokers and clients."""
    minutes: list[Minute] = field(default_factory=list)
    """What happened in each minute of the script."""
    events: list[TimelineRow] = field(default_factory=list)
    """What the script did, and when."""
    sent: int = 0
    """Messages that a broker stored."""
    refused: int = 0
    """Sends that no broker took."""
    delivered: int = 0
    """Deliveries to listeners."""
    duplicates: int = 0
    """Deliveries of messages that had been delivered before."""
    sends_across: int = 0
    """Messages that were stored at another site than the producer's."""
    deliveries_across: int = 0
    """Deliveries to a consumer at another site than the broker's."""
    most_waiting: int = 0
    """The largest lag at the end of a minute."""
    longest_wait_s: float = 0
    """The longest time from a send to the first delivery."""
    lost: int = 0
    """Stored messages that were never delivered, although everything but destroyed disks returned at the end."""
    history: list[Event] = field(default_factory=list)
    """What clients and brokers did, as `librmq.testing.check_history` judges it."""
    anomalies: list[Anomaly] = field(default_factory=list)
    """What is wrong in the history."""

    @property
    def lag(self) -> int:
        """Messages that were waiting at the end of the script."""
        return self.minutes[-1].lag if self.minutes else 0

    def timeline(self) -> str:
        """Return the events and, between them, who consumed what from where, the lag, refused sends and duplicates."""
        lines = []
        marks = sorted({0.0, *(row.minute for row in self.events), float(len(self.minutes))})
        for begin, end in zip(marks, [*marks[1:], marks[-1]], strict=True):
            lines += [f"{row.minute:6.1f}  {row.what}" for row in self.events if row.minute == begin]
            span = self.minutes[int(begin) : max(int(end), int(begin) + (end > begin))]
            if not span:
                continue
            consumed = sum((minute.consumed for minute in span), Counter[tuple[str, str]]())
            flows = ", ".join(f"{user} from {where} {count}" for (user, where), count in sorted(consumed.items()))
            refused, again = sum(minute.refused for minute in span), sum(minute.duplicates for minute in span)
            problems = f"{f', {refused} sends refused' if refused else ''}{f', {again} duplicates' if again else ''}"
            lines.append(f"        consumed: {flows or 'nothing'}; lag {span[-1].lag}{problems}")
        return "\n".join(lines)

    @staticmethod
    def table(reports: Sequence[DrillReport]) -> str:
        """Return a Markdown table that compares drills."""
        rows = [
            "| deployment | sends refused | most messages waiting | longest wait | duplicates | "
            "sends to another site | deliveries from another site | lost |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for report in reports:
            wait = f"{report.longest_wait_s:,.0f} s"
            rows.append(
                f"| {report.name} | {_part(report.refused, report.sent + report.refused)} | {report.most_waiting:,} | "
                f"{wait} | {report.duplicates:,} | {_part(report.sends_across, report.sent)} | "
                f"{_part(report.deliveries_across, report.delivered)} | {report.lost:,} |"
            )
        return "\n".join(rows)


def _part(count: int, total: int) -> str:
    return f"{count:,} ({100 * count / total:.0f} %)" if count and total else f"{count:,}"


# ---- a drill

_TOPIC = "orders"
_GROUP = "billing"
_MINUTE_MS = 60_000
_SETTLE_MINUTES = 10
_QUEUES = 4


class Drill:
    """A deployment at work, with the verbs of a script: it lets time pass, and parts of a site fail or return.

    Each verb raises a `ConfigError` for a site that the deployment does not have.
    """

    def __init__(self, deployment: Deployment, rate: float) -> None:
        """Use `run_drill`, which also settles the drill at its end."""
        check_deployment(deployment)
        if not 0 < rate <= 1_000:
            raise ConfigError(f"rate: expected 1,000 orders a second at most, and some, found {rate}")
        self.deployment: Deployment = deployment
        self.runner: ManualRunner = ManualRunner()
        self._begin_ms = self.runner.now_ms()
        self._tick_ms = round(1000 / rate)
        self.report: DrillReport = DrillReport(deployment.name, tuple(deployment.homes))
        self._history = History(self._begin_ms)
        self._recorder = Recorder(self.runner.now_ms, self._history)
        self._closing = ExitStack()
        self._due: list[tuple[int, Callable[[], None]]] = []
        self._sent_ms: dict[bytes, int] = {}
        self._got: set[bytes] = set()
        self._dark: set[str] = set()
        self._made = 0
        store = StoreConfig.tiny(commitlog_file_size=1 << 20, max_message_size=64 << 10)
        self._clusters: dict[str, Cluster] = {}
        for name, at in deployment.clusters.items():
            names = [f"{site}-{name}-{number}" for site in at for number in range(deployment.brokers)]
            cluster = Cluster.open(
                f"/{name}",
                names,
                name=name,
                config=BrokerConfig(replication=deployment.replication),
                runner=self.runner,
                files=MemoryFiles(),
                store_config=store,
            )
            self._closing.callback(cluster.close)
            cluster.create_topic(_TOPIC, _QUEUES)
            self._clusters[name] = cluster
        tables: dict[str, RouteTable] = dict(self._clusters)
        self._replicas: dict[str, Replica] = {}
        self._replicated_at: dict[str, str] = {}  # by broker
        follows = ReplicaConfig(follow_after_s=deployment.replica_lag_s)
        for name, site in deployment.replicas.items():
            for broker in self._clusters[name].brokers():
                self._replicated_at[broker.name] = site
                self._replicas[broker.name] = Replica.open(f"/replicas/{broker.name}", of=broker, config=follows)
        self._promoted: set[str] = set()
        self._destroyed: set[str] = set()
        self._paths: dict[str, str] = {}  # the folders of promoted copies, and those on new disks
        self._router = SiteRouter(tables, deployment.homes, moves_consumers=deployment.moves_consumers)
        self._closing.callback(self._router.close)
        if deployment.switched == "by probe":
            self._router.probe()
        self._switches_reported = 0
        self._producers = {site: self._router.producer(site, self._producer) for site in deployment.homes}
        self._consumers: dict[str, list[RoutedClient[PushConsumer]]] = {site: [] for site in deployment.homes}
        for site in deployment.homes:
            self._return_consumers(site)
        self.runner.advance(1_000)
        self._begin_ms = self.runner.now_ms()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for replica in self._replicas.values():
            replica.close()
        self._closing.close()

    # ---- clients

    def _client(self, route: SiteRoute) -> Client:
        self._made += 1
        name = f"c{self._made:03}"
        through = ReplicaRoute(route, *self._replicas.values()) if self._replicas else route
        client = Client(RecordedRoute(through, self._recorder, name), instance_name=name)
        client.random = None  # it would choose other queues in each run
        return client

    def _producer(self, route: SiteRoute) -> Producer:
        client = self._client(route)
        return Producer(client.route, "shop", client=client, nearby=True, avoid_slow_brokers=True).start()

    def _consumer(self, route: SiteRoute) -> PushConsumer:
        client = self._client(route)
        consumer = PushConsumer(client.route, _GROUP, client=client, strategy=allocate_by_site())
        consumer.subscribe(_TOPIC, partial(self._deliver, route.site))
        consumer.start()
        return consumer

    def _deliver(self, site: str, message: DeliveredMessage) -> None:
        now_ms, minute, report = self.runner.now_ms(), self._minute(), self.report
        where = self._site_of(message.broker_name)
        report.delivered += 1
        report.deliveries_across += where != site
        if message.body in self._got:
            report.duplicates += 1
            minute.duplicates += 1
            return
        self._got.add(message.body)
        minute.consumed[site, where] += 1
        report.longest_wait_s = max(report.longest_wait_s, (now_ms - self._sent_ms[message.body]) / 1000)

    def _send(self, users_of: str) -> None:
        """Send an order for a user of a site: there or, if the site is lost, at the next one."""
        sites = list(self.deployment.homes)
        at = sites.index(users_of)
        site = next((name for name in [*sites[at:], *sites[:at]] if name not in self._dark), None)
        minute, report = self._minute(), self.report
        body = b"%d" % (report.sent + report.refused)
        self._sent_ms[body] = self.runner.now_ms()
        try:
            if site is None:
                raise ConfigError("all sites are lost")
            sent = self._producers[site].run(lambda producer: producer.send(_TOPIC, body))
        except RmqError:
            report.refused += 1
            minute.refused += 1
            return
        report.sent += 1
        where = self._site_of(sent.queue.broker_name)
        minute.sent[site, where] += 1
        report.sends_across += where != site

    # ---- verbs of a script

    def run(self, *, minutes: float) -> None:
        """Let time pass, in which users of each site order."""
        end_ms = self.runner.now_ms() + round(minutes * _MINUTE_MS)
        for _ in range(len(self.report.minutes), -(-(end_ms - self._begin_ms) // _MINUTE_MS)):
            self.report.minutes.append(Minute())
        while self.runner.now_ms() < end_ms:
            self._do_due()
            for site in self.deployment.homes:
                self._send(site)
            self.runner.advance(min(self._tick_ms, end_ms - self.runner.now_ms()))

    def lose_consumers(self, site: str) -> None:
        """Kill the consumers of a site."""
        self._note_verb(site, "lose consumers")
        self._lose_consumers(site)

    def return_consumers(self, site: str) -> None:
        """Start new consumers in place of those that a site has lost."""
        self._note_verb(site, "return consumers")
        self._return_consumers(site)

    def lose_brokers(self, site: str) -> None:
        """Kill the brokers of a site, whose disks remain."""
        self._note_verb(site, "lose brokers")
        self._lose_brokers(site)

    def return_brokers(self, site: str) -> None:
        """Start the brokers of a site again: on their disks, or on empty ones where these are destroyed."""
        self._note_verb(site, "return brokers")
        self._return_brokers(site)

    def destroy_disks(self, site: str) -> None:
        """Kill the brokers of a site, and lose their disks."""
        self._note_verb(site, "destroy disks")
        self._lose_brokers(site)
        self._destroyed.update(name for _, name in self._brokers_at(site))

    def lose_site(self, site: str) -> None:
        """Kill the brokers and consumers of a site; its users order at the next one."""
        self._note_verb(site, "lose site")
        self._lose_brokers(site)
        self._lose_consumers(site)
        self._dark.add(site)

    def return_site(self, site: str) -> None:
        """Start the brokers and consumers of a site again, at which its users order."""
        self._note_verb(site, "return site")
        self._return_brokers(site)
        self._return_consumers(site)
        self._dark.discard(site)

    def cut_link(self, site: str) -> None:
        """Cut all links between a site and others."""
        self._note_verb(site, "cut link")
        self._link(site, is_cut=True)

    def heal_link(self, site: str) -> None:
        """Restore all links between a site and others."""
        self._note_verb(site, "heal link")
        self._link(site, is_cut=False)

    def _note_verb(self, site: str, what: str) -> None:
        if site not in self.deployment.homes:
            raise ConfigError(f"script: unknown site {site!r}; expected one of {', '.join(self.deployment.homes)}")
        self._note(f"{site}: {what}")

    # ---- what happens by time

    def _do_due(self) -> None:
        """Let operators do what is due, and record switches and the lag."""
        while self._due and self._due[0][0] <= self.runner.now_ms():
            self._due.pop(0)[1]()
        self._note_switches()
        lag = self.report.sent - len(self._got)
        self._minute().lag = lag
        self.report.most_waiting = max(self.report.most_waiting, lag)

    def _note_switches(self) -> None:
        for switch in self._router.switches[self._switches_reported :]:
            minute = (switch.at_ms - self._begin_ms) / _MINUTE_MS
            self._note(f"{switch.site} switches from {switch.before} to {switch.after}: {switch.why}", minute)
        self._switches_reported = len(self._router.switches)

    def _note(self, what: str, minute: float | None = None) -> None:
        at = (self.runner.now_ms() - self._begin_ms) / _MINUTE_MS if minute is None else minute
        self.report.events.append(TimelineRow(round(at, 2), what))

    def _minute(self) -> Minute:
        """Return the present minute; the last one, too, for what comes after the end of the script."""
        number = (self.runner.now_ms() - self._begin_ms) // _MINUTE_MS
        return self.report.minutes[min(max(0, number), len(self.report.minutes) - 1)]

    # ---- brokers

    def _lose_brokers(self, site: str) -> None:
        for cluster, name in self._brokers_at(site):
            if not cluster.broker(name).dead:
                self._recorder.broker_crashed(name)
                cluster.crash(name)
        self._call_operator()

    def _return_brokers(self, site: str) -> None:
        self._reopen_brokers(site)
        self._call_operator()

    def _reopen_brokers(self, site: str) -> None:
        for cluster, name in self._brokers_at(site):
            if cluster.broker(name).dead:
                self._reopen(cluster, name)

    def _call_operator(self) -> None:
        """Let an operator look at the brokers some minutes later, where the deployment has one."""
        act = {"by hand": self._router.redirect, "by promotion": self._promote}.get(self.deployment.switched)
        if act is not None:
            self._due.append((self.runner.now_ms() + round(self.deployment.operator_minutes * _MINUTE_MS), act))

    def _brokers(self) -> Iterator[tuple[Cluster, Broker]]:
        for cluster in self._clusters.values():
            yield from ((cluster, broker) for broker in cluster.brokers())

    def _brokers_at(self, site: str) -> Iterator[tuple[Cluster, str]]:
        for cluster, broker in self._brokers():
            if self._site_of(broker.name, serves=False) == site:
                yield cluster, broker.name

    def _site_of(self, broker_name: str, *, serves: bool = True) -> str:
        """Return the site of a broker, or of its replica while that ``serves`` for it or has taken its place."""
        replica = self._replicas.get(broker_name)
        reads = serves and replica is not None and not replica.dead and self._master(broker_name).dead
        if reads or broker_name in self._promoted:
            return self._replicated_at[broker_name]
        return site_of(broker_name) or ""

    def _master(self, broker_name: str) -> Broker:
        return next(broker for _, broker in self._brokers() if broker.name == broker_name)

    # ---- replicas

    def _reopen(self, cluster: Cluster, name: str) -> None:
        """Open a broker again, and let its replica follow it. A destroyed one is its replica or begins empty."""
        replica = self._replicas.get(name)
        if name in self._destroyed and replica is not None and not replica.dead:
            self._promote_replica(cluster, name, replica)
        elif name in self._destroyed:
            self._replace(cluster, name, f"/disk-{len(self.report.events)}/{name}").create_topic(_TOPIC, _QUEUES)
        elif name in self._paths:
            self._open_at(cluster, name, self._paths[name])
        else:
            cluster.reopen(name)
            if replica is not None:
                replica.reconnect(cluster.broker(name))

    def _promote(self) -> None:
        """Let the replicas of dead brokers take their places."""
        for cluster, broker in self._brokers():
            replica = self._replicas.get(broker.name)
            if replica is not None and not replica.dead and broker.dead:
                self._promote_replica(cluster, broker.name, replica)

    def _promote_replica(self, cluster: Cluster, name: str, replica: Replica) -> None:
        self._note(f"{self._replicated_at[name]}: the replica of {name} is promoted")
        replica.promote()
        self._promoted.add(name)
        self._replace(cluster, name, replica.path)

    def _replace(self, cluster: Cluster, name: str, path: str) -> Broker:
        """Open another store, in which acknowledged messages can be missing, in place of a dead broker's."""
        store = cluster.broker(name).store
        self._destroyed.discard(name)
        self._paths[name] = path
        broker = self._open_at(cluster, name, path)
        with MessageStore.open(store.path, store.config, read_only=True, files=store.files) as before:
            self._history.promoted(broker, before)
        return broker

    def _open_at(self, cluster: Cluster, name: str, path: str) -> Broker:
        before = cluster.broker(name)
        broker = opened_like(before, path, before.config)
        cluster.add(broker)
        return broker

    def _link(self, site: str, *, is_cut: bool) -> None:
        """Cut or restore all links between a site and others."""
        for cluster, broker in self._brokers():
            at = self._site_of(broker.name, serves=False)
            for other in self.deployment.homes:
                if at != other and site in (other, at):
                    (cluster.cut if is_cut else cluster.restore)(broker.name, site=other)

    def _lose_consumers(self, site: str) -> None:
        for routed in self._consumers[site]:
            self._router.release(routed)
            client = routed.current.client
            client.dead = True
            self._recorder.crashed({client.client_id.partition("@")[2]})
            brokers = [broker for _, broker in self._brokers() if not broker.dead]
            brokers += [replica.broker for replica in self._replicas.values() if not replica.dead]
            for broker in brokers:
                broker.remove_client(client.client_id)
        self._consumers[site].clear()

    def _return_consumers(self, site: str) -> None:
        while len(self._consumers[site]) < self.deployment.consumers:
            self._consumers[site].append(self._router.consumer(site, self._consumer))

    def settle(self) -> None:
        """Record the lag at the end, let everything return, count what is never consumed, and check the history."""
        if not self.report.minutes:
            raise ConfigError(
                "script: no time passed: call drill.run(minutes=…) before, between and after the failures"
            )
        self._do_due()
        for site in self.deployment.homes:
            self._reopen_brokers(site)
            self._link(site, is_cut=False)
            self._return_consumers(site)
        self._router.redirect()
        self.runner.advance(_SETTLE_MINUTES * _MINUTE_MS)
        self.report.lost = self.report.sent - len(self._got)
        self._recorder.add_event("drained", group=_GROUP, at_ms=self.runner.now_ms())
        self.report.history = self._history.events
        self.report.anomalies = check_history(self.report.history)


# ---- scripts

Script = Callable[[Drill], object]
"""A function that lets time pass and parts of a deployment fail, by the verbs of a `Drill`."""


def outages(drill: Drill) -> None:
    """Let, within an hour, the first site lose its consumers, then its brokers, then everything."""
    site = next(iter(drill.deployment.homes))
    drill.run(minutes=5)
    drill.lose_consumers(site)
    drill.run(minutes=7)
    drill.return_consumers(site)
    drill.run(minutes=8)
    drill.lose_brokers(site)
    drill.run(minutes=10)
    drill.return_brokers(site)
    drill.run(minutes=10)
    drill.lose_site(site)
    drill.run(minutes=10)
    drill.return_site(site)
    drill.run(minutes=10)


def run_drill(deployment: Deployment, script: Script = outages, *, rate: float = 1.0) -> DrillReport:
    """Run a script on a deployment with a clock of its own, and ``rate`` orders a second at each site.

    Users of a lost site use the next one. At the end everything but destroyed disks returns, and messages that are not
    consumed within ten more minutes count as lost.

    Raises:
        ConfigError: The script or the deployment is impossible.
    """
    with Drill(deployment, rate) as drill:
        script(drill)
        drill.settle()
        return drill.report
