"""Drills: deployments over several sites fail according to a script, and report what was lost, delayed and repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from html import escape
from typing import Final, Literal, NamedTuple, get_args

from librmq.broker import Broker, BrokerConfig
from librmq.client.allocation import allocate_by_site
from librmq.client.client import Client
from librmq.client.producer import Producer
from librmq.client.recorded_route import RecordedRoute
from librmq.client.recorder import Event, Recorder
from librmq.cluster import Cluster, Replica, ReplicaRoute, RoutedClient, RouteTable, SiteRoute, SiteRouter, site_of
from librmq.cluster.replica import ReplicaConfig
from librmq.cluster.sites import check_site
from librmq.config import StoreConfig
from librmq.consumer import DeliveredMessage, PushConsumer
from librmq.errors import ConfigError, RmqError
from librmq.files.memory import MemoryFiles
from librmq.runtime.runner import ManualRunner
from librmq.store import MessageStore
from librmq.testing.histories._history import History
from librmq.testing.histories.anomalies import Anomaly, check_history

# ---- results

_COLOURS: Final = ("#1b6ca8", "#2e9e5b", "#b8860b", "#8e44ad", "#16a085", "#7f5539", "#5c6bc0", "#ad1457")
_WIDTH, _LEFT, _EDGE, _TOP, _LANE = 400, 44, 8, 76, 110  # little wider than a phone
_SITES_IN_ROW: Final = 4
_HALO: Final = 'stroke="white" stroke-width="4" paint-order="stroke"'


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
    minutes: list[Minute] = field(default_factory=list)
    events: list[TimelineRow] = field(default_factory=list)
    sent: int = 0
    refused: int = 0
    delivered: int = 0
    duplicates: int = 0
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

    # ---- picture

    def svg(self) -> str:
        """Return a picture: what each site's consumers got from where, then lag and refused sends, with the events."""
        lanes = [*self.sites, "lag", "refused"]
        top = self._top()
        bottom = top + _LANE * len(lanes) + 30
        height = bottom + 17 * len(self.events) + 10
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
            f'width="{_WIDTH}" height="{height}" font-size="12">',
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
            f'<text x="{_EDGE}" y="18" font-size="15">{escape(self.name)}: messages per minute</text>',
        ]
        parts += self._legend()
        parts += self._marks(bottom)
        for number, lane in enumerate(lanes):
            parts += self._lane(lane, top + _LANE * number)
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _top(self) -> int:
        """Return the place below the legend, which can have several rows, and the numbers of the events."""
        return _TOP + 16 * ((len(self.sites) - 1) // _SITES_IN_ROW)

    def _x(self, minute: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _EDGE) * minute / max(1, len(self.minutes))

    def _legend(self) -> list[str]:
        parts = []
        for number, site in enumerate(self.sites):
            row, column = divmod(number, _SITES_IN_ROW)
            x, y = _EDGE + 96 * column, 28 + 16 * row
            parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{_COLOURS[number % len(_COLOURS)]}"/>')
            parts.append(f'<text x="{x + 14}" y="{y + 10}">from {escape(site)}</text>')
        return parts

    def _lane(self, lane: str, top: int) -> list[str]:
        if lane in self.sites:
            title = f"consumed at {lane}"
            stacks = [[minute.consumed[lane, site] for site in self.sites] for minute in self.minutes]
            colours = [_COLOURS[number % len(_COLOURS)] for number in range(len(self.sites))]
        elif lane == "lag":
            title, colours = "waiting at the end of the minute", ["#c77700"]
            stacks = [[minute.lag] for minute in self.minutes]
        else:
            title, colours = "sends refused", ["#c0392b"]
            stacks = [[minute.refused] for minute in self.minutes]
        highest = max((sum(stack) for stack in stacks), default=0)
        high, base = _LANE - 40, top + _LANE - 14
        width = (_WIDTH - _LEFT - _EDGE) / max(1, len(stacks))
        parts = [
            f'<text x="{_LEFT}" y="{top + 14}" {_HALO}>{escape(title)}</text>',
            f'<line x1="{_LEFT}" y1="{base}" x2="{_WIDTH - _EDGE}" y2="{base}" stroke="#888"/>',
            f'<text x="{_LEFT - 6}" y="{base}" text-anchor="end">0</text>',
        ]
        if highest:
            parts.append(f'<text x="{_LEFT - 6}" y="{base - high + 8}" text-anchor="end">{highest:,}</text>')
        for minute, stack in enumerate(stacks):
            y = float(base)
            for count, colour in zip(stack, colours, strict=True):
                if count:
                    tall = high * count / highest
                    y -= tall
                    parts.append(
                        f'<rect x="{self._x(minute):.1f}" y="{y:.1f}" width="{max(0.5, width - 1):.1f}" '
                        f'height="{tall:.1f}" fill="{colour}"/>'
                    )
        return parts

    def _marks(self, bottom: int) -> list[str]:
        """Return the numbered lines of the events, the list of events, and the axis."""
        parts, numbers = [], []
        for number, row in enumerate(self.events):
            x, y = self._x(row.minute), self._top() - 22 + 11 * (number % 2)
            parts.append(f'<path d="M{x:.1f} {y + 2}V{bottom - 28}" stroke="#333" stroke-dasharray="2 3"/>')
            numbers.append(f'<text x="{x:.1f}" y="{y}" font-size="11" text-anchor="middle" {_HALO}>{number + 1}</text>')
            caption = f"{number + 1}  minute {row.minute:g}, {row.what}"
            parts.append(f'<text x="{_EDGE}" y="{bottom + 14 + 17 * number}">{escape(caption)}</text>')
        for minute in range(0, len(self.minutes) + 1, max(1, len(self.minutes) // 6)):
            parts.append(f'<text x="{self._x(minute):.1f}" y="{bottom - 12}" text-anchor="middle">{minute}</text>')
        return parts + numbers  # after all lines, whose neighbours would strike them through


def _part(count: int, total: int) -> str:
    return f"{count:,} ({100 * count / total:.0f} %)" if count and total else f"{count:,}"


# ---- deployments over sites, and the script of their failures

Verb = Literal[
    "lose consumers",
    "return consumers",
    "lose brokers",
    "return brokers",
    "destroy disks",
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
    replication: Literal["async", "sync"] = "async"
    """Whether sends wait for replicas, as in `BrokerConfig`."""
    replica_lag_s: float = 0.05
    """Time after which a replica gets messages that no send waits for."""
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


def one_active_replicated(
    sites: Sequence[str] = _TWO, *, replication: Literal["async", "sync"] = "async"
) -> Deployment:
    """A cluster at the first site, whose brokers have replicas at the second; an operator promotes these manually."""
    return Deployment(
        name=f"one active, {'sync ' * (replication == 'sync')}replicas",
        title="a cluster at one site, with replicas at another",
        clusters={sites[0]: (sites[0],)},
        homes=dict.fromkeys(sites, sites[0]),
        replicas={sites[0]: sites[1]},
        replication=replication,
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


def disk_loss(sites: Sequence[str] = _TWO) -> tuple[Fault, ...]:
    """Return a script of half an hour in which the first site loses its brokers' disks while no consumer runs.

    The brokers return with empty disks, unless replicas have taken their places.
    """
    return (
        *(Fault(5, "lose consumers", site) for site in sites),
        Fault(10, "destroy disks", sites[0]),
        Fault(16, "return brokers", sites[0]),
        *(Fault(20, "return consumers", site) for site in sites),
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

    Users of a lost site use the next one. At the end everything but destroyed disks returns, and messages that are not
    consumed within ten more minutes count as lost. By default the first site fails according to `outages`.

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
        self._replicated_at: dict[str, str] = {}  # the site of a broker's replica
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
        is_lost = lost in ("lose", "cut", "destroy")
        if what in ("brokers", "site", "disks"):
            for cluster, name in self._brokers_at(site):
                if is_lost and not cluster.broker(name).dead:
                    self._recorder.broker_crashed(name)
                    cluster.crash(name)
                if what == "disks":
                    self._destroyed.add(name)
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
        for cluster in self._clusters.values():
            for broker in cluster.brokers():
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
        broker = Broker.open(
            path,
            before.config,
            name=name,
            cluster_name=cluster.name,
            store_config=before.store.config,
            runner=self.runner,
            files=before.store.files,
        )
        cluster.add(broker)
        return broker

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
        self._recorder.add_event("drained", group=_GROUP, at_ms=self.runner.now_ms())
        self.report.history = self._history.events
        self.report.anomalies = check_history(self.report.history)
