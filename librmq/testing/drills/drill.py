"""A drill: deployments over sites run with a manual clock, and parts of their sites fail as a script says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, NamedTuple, get_args

from librmq.broker import Broker
from librmq.client.allocation import allocate_by_site
from librmq.client.client import Client
from librmq.client.producer import Producer
from librmq.client.recorded_route import RecordedRoute
from librmq.client.recorder import Recorder
from librmq.cluster import Cluster, Replica, ReplicaRoute, RoutedClient, RouteTable, SiteRoute, SiteRouter, site_of
from librmq.cluster.sites import check_site
from librmq.config import StoreConfig
from librmq.consumer import DeliveredMessage, PushConsumer
from librmq.errors import ConfigError, RmqError
from librmq.files.memory import MemoryFiles
from librmq.runtime.runner import ManualRunner
from librmq.store import MessageStore
from librmq.testing.anomalies import check_history
from librmq.testing.drills.drill_report import DrillReport, Minute, TimelineRow
from librmq.testing.history import History

# ---- deployments over sites, and the script of their failures

Verb = Literal[
    "lose consumers",
    "return consumers",
    "lose brokers",
    "return brokers",
    "lose site",
    "return site",
    "cut link",
    "heal link",
]


class Fault(NamedTuple):
    """One line of a script: at this minute, a part of a site fails or returns."""

    minute: float
    verb: Verb
    site: str


Script = Sequence[Fault | tuple[float, Verb, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Clusters, their sites, and how a site chooses its cluster."""

    name: str
    title: str
    clusters: Mapping[str, Sequence[str]]
    """The sites at which each cluster has brokers."""
    homes: Mapping[str, str]
    """The cluster that each site uses."""
    brokers: int = 2
    """Number of brokers that a cluster has at each of its sites."""
    consumers: int = 2
    """Number of consumers at each site; all are in one group."""
    switched: Literal["never", "by hand", "by probe", "by promotion"] = "never"
    """How a site changes to another cluster in an outage; by promotion, replicas take their masters' places."""
    replicas: Mapping[str, str] = field(default_factory=dict)
    """The site at which the brokers of a cluster have replicas."""
    moves_consumers: bool = False
    """Whether consumers change to another cluster too."""
    operator_minutes: float = 5
    """Minutes until an operator switches manually, or promotes replicas."""


_TWO: Final = ("hz", "sh")


def one_cluster(sites: Sequence[str] = _TWO) -> Deployment:
    """One cluster over all sites; producers and consumers prefer their own site."""
    return Deployment(
        name="one cluster",
        title="one cluster over all sites",
        clusters={"main": tuple(sites)},
        homes=dict.fromkeys(sites, "main"),
    )


def one_active(sites: Sequence[str] = _TWO) -> Deployment:
    """A cluster at each site. All clients use the first one; an operator switches to the second one manually."""
    return Deployment(
        name="one active",
        title="a cluster at each site, one of them active, switched by hand",
        clusters={site: (site,) for site in sites},
        homes=dict.fromkeys(sites, sites[0]),
        switched="by hand",
        moves_consumers=True,
    )


def one_active_replicated(sites: Sequence[str] = _TWO) -> Deployment:
    """A cluster at the first site, whose brokers have replicas at the second; an operator promotes these manually."""
    return Deployment(
        name="one active, replicas",
        title="a cluster at one site, with replicas at another",
        clusters={sites[0]: (sites[0],)},
        homes=dict.fromkeys(sites, sites[0]),
        replicas={sites[0]: sites[1]},
        switched="by promotion",
    )


def two_active(sites: Sequence[str] = _TWO) -> Deployment:
    """A cluster at each site, which the site's clients always use."""
    return Deployment(
        name="all active",
        title="a cluster at each site, each active for its site",
        clusters={site: (site,) for site in sites},
        homes={site: site for site in sites},
    )


def two_active_routed(sites: Sequence[str] = _TWO) -> Deployment:
    """A cluster at each site, and a router that directs a site's producers elsewhere while its cluster is down."""
    return Deployment(
        name="all active, routed",
        title="a cluster at each site, and a router that probes",
        clusters={site: (site,) for site in sites},
        homes={site: site for site in sites},
        switched="by probe",
    )


def presets(sites: Sequence[str] = _TWO) -> tuple[Deployment, ...]:
    """Return the five deployments that are usually compared."""
    return (
        one_cluster(sites),
        one_active(sites),
        one_active_replicated(sites),
        two_active(sites),
        two_active_routed(sites),
    )


def outages(site: str = "hz") -> tuple[Fault, ...]:
    """Return the script of an hour in which one site loses its consumers, then its brokers, then everything."""
    return (
        Fault(5, "lose consumers", site),
        Fault(12, "return consumers", site),
        Fault(20, "lose brokers", site),
        Fault(30, "return brokers", site),
        Fault(40, "lose site", site),
        Fault(50, "return site", site),
    )


def check_script(deployment: Deployment, script: Script, minutes: float) -> list[Fault]:
    """Return the failures in a script, ordered by time.

    Raises:
        ConfigError: A verb or site is unknown, a minute is outside the drill, or the deployment is impossible.
    """
    for site, cluster in deployment.homes.items():
        check_site(site)
        if cluster not in deployment.clusters:
            raise ConfigError(f"site {site!r}: no cluster serves it: found {cluster!r}")
    for cluster, site in deployment.replicas.items():
        if cluster not in deployment.clusters or site in deployment.clusters[cluster]:
            raise ConfigError(f"replicas: expected another site than those of a cluster, found {cluster!r} at {site!r}")
    if deployment.brokers < 1 or deployment.consumers < 1:
        raise ConfigError("deployment: expected at least one broker and one consumer at each site")
    faults = [Fault(*row) for row in script]
    for fault in faults:
        if fault.verb not in get_args(Verb):
            raise ConfigError(f"script: unknown verb {fault.verb!r}; expected one of {', '.join(get_args(Verb))}")
        if fault.site not in deployment.homes:
            raise ConfigError(f"script: unknown site {fault.site!r}; expected one of {', '.join(deployment.homes)}")
        if not 0 <= fault.minute <= minutes:
            raise ConfigError(f"script: minute {fault.minute:g} is outside the drill of {minutes:g} minutes")
    return sorted(faults, key=lambda fault: fault.minute)


_TOPIC = "orders"
_GROUP = "billing"
_MINUTE_MS = 60_000
_SETTLE_MINUTES = 10
_QUEUES = 4


def run_drill(
    deployment: Deployment, script: Script | None = None, *, minutes: int = 60, rate: float = 1.0
) -> DrillReport:
    """Run a deployment for ``minutes`` of its own clock, with ``rate`` orders a second at each site.

    Users of a lost site use the next one. At the end everything returns, and messages that are not consumed within ten
    more minutes count as lost. By default the first site fails according to `outages`.

    Raises:
        ConfigError: The script or the deployment is impossible.
    """
    if minutes < 1 or not 0 < rate <= 1_000:
        raise ConfigError(
            f"drill: expected 1 minute or more and 1,000 orders a second at most, found {minutes}, {rate}"
        )
    sites = list(deployment.homes)
    faults = check_script(deployment, outages(sites[0]) if script is None else script, minutes)
    with _Drill(deployment, minutes) as drill:
        tick_ms = round(1000 / rate)
        end_ms = drill.begin_ms + minutes * _MINUTE_MS
        drill.plan(faults)
        while drill.runner.now_ms() < end_ms:
            drill.do_due()
            for site in sites:
                drill.send(site)
            drill.runner.advance(min(tick_ms, end_ms - drill.runner.now_ms()))
        drill.settle()
        return drill.report


class _Drill:
    """The running parts of a drill."""

    def __init__(self, deployment: Deployment, minutes: int) -> None:
        self.deployment = deployment
        self.runner = ManualRunner()
        self.begin_ms = self.runner.now_ms()
        self.report = DrillReport(deployment.name, tuple(deployment.homes), [Minute() for _ in range(minutes)])
        self._history = History(self.begin_ms)
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
                f"/{name}", names, name=name, runner=self.runner, files=MemoryFiles(), store_config=store
            )
            self._closing.callback(cluster.close)
            cluster.create_topic(_TOPIC, _QUEUES)
            self._clusters[name] = cluster
        tables: dict[str, RouteTable] = dict(self._clusters)
        self._replicas: dict[str, Replica] = {}
        self._replicated_at: dict[str, str] = {}  # the site of a broker's replica
        for name, site in deployment.replicas.items():
            for broker in self._clusters[name].brokers():
                self._replicated_at[broker.name] = site
                self._replicas[broker.name] = Replica.open(f"/replicas/{broker.name}", of=broker)
        self._promoted: set[str] = set()
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
        self.begin_ms = self.runner.now_ms()

    def __enter__(self) -> _Drill:
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
        client.random = None  # so that figures are the same in every run
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

    def send(self, users_of: str) -> None:
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

    # ---- script

    def plan(self, faults: list[Fault]) -> None:
        """Schedule each failure."""
        for fault in faults:
            self._at(fault.minute, partial(self._fail, fault))

    def _at(self, minute: float, call: Callable[[], None]) -> None:
        self._due.append((self.begin_ms + round(minute * _MINUTE_MS), call))
        self._due.sort(key=lambda event: event[0])

    def do_due(self) -> None:
        """Apply the failures that are due, and record switches and the lag."""
        while self._due and self._due[0][0] <= self.runner.now_ms():
            self._due.pop(0)[1]()
        self._note_switches()
        lag = self.report.sent - len(self._got)
        self._minute().lag = lag
        self.report.most_waiting = max(self.report.most_waiting, lag)

    def _note_switches(self) -> None:
        for switch in self._router.switches[self._switches_reported :]:
            minute = (switch.at_ms - self.begin_ms) / _MINUTE_MS
            self._note(f"{switch.site} switches from {switch.before} to {switch.after}: {switch.why}", minute)
        self._switches_reported = len(self._router.switches)

    def _note(self, what: str, minute: float | None = None) -> None:
        at = (self.runner.now_ms() - self.begin_ms) / _MINUTE_MS if minute is None else minute
        self.report.events.append(TimelineRow(round(at, 2), what))

    def _minute(self) -> Minute:
        number = (self.runner.now_ms() - self.begin_ms) // _MINUTE_MS
        return self.report.minutes[min(max(0, number), len(self.report.minutes) - 1)]

    def _fail(self, fault: Fault) -> None:
        self._note(f"{fault.site}: {fault.verb}")
        site, (lost, what) = fault.site, fault.verb.split(" ")
        is_lost = lost in ("lose", "cut")
        if what in ("brokers", "site"):
            for cluster, name in self._brokers_at(site):
                if is_lost and not cluster.broker(name).dead:
                    self._recorder.broker_crashed(name)
                    cluster.crash(name)
                elif not is_lost and cluster.broker(name).dead:
                    self._reopen(cluster, name)
            act = {"by hand": self._router.redirect, "by promotion": self._promote}.get(self.deployment.switched)
            if act is not None:
                at = (self.runner.now_ms() - self.begin_ms) / _MINUTE_MS + self.deployment.operator_minutes
                self._at(at, act)
        if what in ("consumers", "site"):
            (self._lose_consumers if is_lost else self._return_consumers)(site)
        if what == "site":
            (self._dark.add if is_lost else self._dark.discard)(site)
        if what == "link":
            self._link(site, is_cut=is_lost)

    def _brokers_at(self, site: str) -> Iterator[tuple[Cluster, str]]:
        for cluster in self._clusters.values():
            for broker in cluster.brokers():
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
        return next(
            broker for cluster in self._clusters.values() for broker in cluster.brokers() if broker.name == broker_name
        )

    # ---- replicas

    def _reopen(self, cluster: Cluster, name: str) -> None:
        """Open a broker again, and let its replica follow it. A promoted copy is opened in its own folder."""
        if name in self._promoted:
            self._open_copy(cluster, name)
            return
        cluster.reopen(name)
        if name in self._replicas:
            self._replicas[name].reconnect(cluster.broker(name))

    def _promote(self) -> None:
        """Let the replicas of dead brokers take their places."""
        for cluster in self._clusters.values():
            for broker in cluster.brokers():
                replica = self._replicas.get(broker.name)
                if replica is not None and not replica.dead and broker.dead:
                    self._note(f"{self._replicated_at[broker.name]}: the replica of {broker.name} is promoted")
                    replica.promote()
                    self._promoted.add(broker.name)
                    store = broker.store
                    with MessageStore.open(store.path, store.config, read_only=True, files=store.files) as master:
                        self._history.promoted(self._open_copy(cluster, broker.name), master)

    def _open_copy(self, cluster: Cluster, name: str) -> Broker:
        before = cluster.broker(name)
        copy = Broker.open(
            self._replicas[name].path,
            name=name,
            cluster_name=cluster.name,
            store_config=before.store.config,
            runner=self.runner,
            files=before.store.files,
        )
        cluster.add(copy)
        return copy

    def _link(self, site: str, *, is_cut: bool) -> None:
        """Cut or restore all links between a site and others."""
        for cluster in self._clusters.values():
            for broker in cluster.brokers():
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
            for cluster in self._clusters.values():
                for broker in cluster.brokers():
                    if not broker.dead:
                        broker.remove_client(client.client_id)
            for replica in self._replicas.values():
                if not replica.dead:
                    replica.broker.remove_client(client.client_id)
        self._consumers[site].clear()

    def _return_consumers(self, site: str) -> None:
        while len(self._consumers[site]) < self.deployment.consumers:
            self._consumers[site].append(self._router.consumer(site, self._consumer))

    def settle(self) -> None:
        """Record the lag at the end, let everything return, count what is never consumed, and check the history."""
        self.do_due()
        for site in self.deployment.homes:
            for cluster, name in self._brokers_at(site):
                if cluster.broker(name).dead:
                    self._reopen(cluster, name)
            self._link(site, is_cut=False)
            self._return_consumers(site)
        self._router.redirect()
        self.runner.advance(_SETTLE_MINUTES * _MINUTE_MS)
        self.report.lost = self.report.sent - len(self._got)
        self._recorder.add("drained", group=_GROUP, at_ms=self.runner.now_ms())
        self.report.history = self._history.events
        self.report.anomalies = check_history(self.report.history)
