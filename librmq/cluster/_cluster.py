"""Several brokers of one process behind one route, and the times at which clients notice changes.

Mirrors ``RouteInfoManager`` and ``MQClientInstance``, as clients see them::

    a broker is closed   calls fail immediately; its queues leave the route at the clients' next poll, every 30 s
    it is killed         the same, 120 s later
    it is reopened       calls work immediately; its queues return to the route at the clients' next poll

There is no name server and no polling, but changes take effect on the same grid of times. The clients of a site have a
route of their own, from which brokers can be cut off. A `Cluster` also opens its brokers, each with its own store and
store host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Self, TypeVar

from librmq.broker import AdministeredRoute, Broker, BrokerConfig
from librmq.config import StoreConfig, check_path
from librmq.errors import BrokerUnreachableError, ConfigError, MalformedError, NoRouteError
from librmq.files import DiskFiles, Files
from librmq.files.interface import fixed_path
from librmq.message import StoredMessage
from librmq.message.ids import parse_host, parse_offset_message_id
from librmq.override import override
from librmq.protocol import Endpoint, QueueData, Request, Route, RouteWrapper, Watchers, check_site, site_of
from librmq.runtime import Runner, Step
from librmq.runtime.runner import next_on_grid

if TYPE_CHECKING:
    from librmq.metrics import Metrics
    from librmq.runtime import ThreadRunner

R = TypeVar("R")


class _Link(Endpoint):
    """The connection to one broker, which is cut while the broker's name is among those ``cut``.

    The error of a cut connection ends with ``suffix``.
    """

    __slots__ = ("_broker_name", "_call", "_cut", "_suffix")

    def __init__(self, behind: Endpoint, broker_name: str, cut: set[str], suffix: str) -> None:
        self._call = behind.call
        self._broker_name = broker_name
        self._cut = cut
        self._suffix = suffix

    @override
    def call(self, request: Request[R], /) -> R:
        if self._broker_name in self._cut:
            raise BrokerUnreachableError(f"broker {self._broker_name} cannot be reached{self._suffix}")
        return self._call(request)


@dataclass(slots=True)
class _Entry:
    """A broker as clients know it."""

    broker: Broker
    link: _Link
    end_watch: Callable[[], None]
    is_routed: bool = True
    """Whether clients have its queues in their routes."""
    was_up: bool = True
    noticed_ms: int | None = field(default=None)
    """When they notice that this has changed."""


# ---- sites


class SiteRoute(RouteWrapper):
    """A `Route` for the clients of one site, whose ids begin with its name. Created by `RouteTable.at`. Thread-safe."""

    def __init__(self, table: Route, site: str) -> None:
        super().__init__(table)
        self._site = site
        self.cut: set[str] = set()
        """Names of the brokers that this site cannot reach."""

    @property
    @override
    def site(self) -> str:
        """The name of the site, with which the ids of clients on this route begin."""
        return self._site

    @override
    def broker_names(self) -> tuple[str, ...]:
        """Return the names of the brokers that this site can reach, sorted."""
        return tuple(name for name in self._route.broker_names() if name not in self.cut)

    @override
    def wrap(self, broker_name: str, broker: Endpoint) -> Endpoint:
        """Return a broker whose calls raise `BrokerUnreachableError` while its link is cut."""
        return _Link(broker, broker_name, self.cut, f" from site {self._site}")

    @override
    def __repr__(self) -> str:
        return f"<SiteRoute {self.site!r} of {self._route!r}>"


class RouteTable(AdministeredRoute):
    """A `Route` over several brokers that share a runner. Thread-safe."""

    def __init__(self, *brokers: Broker, poll_s: float = 30, expiry_s: float = 120) -> None:
        """Clients poll the route every ``poll_s`` seconds; a killed broker stays in it for ``expiry_s`` seconds.

        Raises:
            ConfigError: There is no broker, two have one name, or they have different runners.
        """
        if not brokers:
            raise ConfigError("a route table needs at least one broker")
        self.runner: Runner = brokers[0].runner
        self._poll_ms = max(1, round(1000 * poll_s))
        self._created_ms = self.runner.now_ms()
        self._expiry_ms = round(1000 * expiry_s)
        self._watchers = Watchers()
        self._entries: dict[str, _Entry] = {}
        self._cut: set[str] = set()
        self._sites: dict[str, SiteRoute] = {}
        self._step = Step("routes", self._update)
        for broker in brokers:
            if broker.name in self._entries:
                raise ConfigError(f"two brokers are named {broker.name!r}")
            self.add(broker)

    def add(self, broker: Broker) -> None:
        """Add a new broker, or one that was reopened under its name.

        A link that was cut stays cut. Clients know the first brokers immediately. Once the table is in use, they
        notice a new broker at their next update.
        """
        if broker.runner is not self.runner:
            raise ConfigError(f"broker {broker.name} has another runner: open all brokers of a route with one runner")
        with self.runner.lock:
            old = self._entries.get(broker.name)
            if old is not None:
                old.end_watch()
            is_routed = old.is_routed if old is not None else not self._watchers
            end_watch = broker.watch(self.changed)
            link = _Link(broker, broker.name, self._cut, ": its connection is cut")
            entry = self._entries[broker.name] = _Entry(broker, link, end_watch, is_routed)
            entry.was_up = self._is_up(entry)
            if old is not None and broker.name in self._cut:
                entry.noticed_ms = old.noticed_ms  # clients have yet to notice the cut
            elif not is_routed:
                self._schedule_update(entry, self.runner.now_ms())
            self._watchers.notify()

    def cut(self, broker_name: str, *, site: str | None = None) -> None:
        """Cut the connection to a broker, like a network failure: the broker keeps running and loses its clients.

        With ``site`` only the clients of that site lose the broker.
        """
        with self.runner.lock:
            broker = self._entry(broker_name).broker
            self._cuts_of(site).add(broker_name)
            for client in () if broker.dead else broker.clients():
                if site is None or site_of(client.client_id) == site:
                    broker.remove_client(client.client_id)
            self.changed()

    def restore(self, broker_name: str, *, site: str | None = None) -> None:
        """Restore the connection to a broker, for all clients or for the clients of one site."""
        with self.runner.lock:
            self._entry(broker_name)  # refuses an unknown name
            self._cuts_of(site).discard(broker_name)
            self.changed()

    def _cuts_of(self, site: str | None) -> set[str]:
        return self._cut if site is None else self.at(site).cut

    def _is_up(self, entry: _Entry) -> bool:
        return entry.broker.name not in self._cut and not entry.broker.dead

    # ---- sites

    def sites(self) -> tuple[str, ...]:
        """Return the sites that have a broker, sorted."""
        return tuple(sorted({site for name in self._entries if (site := site_of(name)) is not None}))

    def at(self, site: str) -> SiteRoute:
        """Return the route for clients of ``site``: their ids begin with it, and its links can be cut separately.

        Raises:
            ConfigError: ``site`` contains characters other than letters and digits.
        """
        check_site(site)
        route = self._sites.get(site)
        if route is None:
            route = self._sites[site] = SiteRoute(self, site)
        return route

    def shared_client_ids(self) -> dict[str, tuple[str, ...]]:
        """Return the ids that two clients use, each with the names of the brokers that know both."""
        brokers_by_client: dict[str, tuple[str, ...]] = {}
        for name, entry in sorted(self._entries.items()):
            for client_id in sorted(entry.broker.shared_client_ids()) if not entry.broker.dead else ():
                brokers_by_client[client_id] = (*brokers_by_client.get(client_id, ()), name)
        return brokers_by_client

    # ---- messages

    @override
    def _find_by_id(self, message_id: str) -> StoredMessage | None:
        try:
            host = parse_offset_message_id(message_id)[0]
        except MalformedError:
            host = None
        entries = sorted(self._entries.items())
        named = [entry for entry in entries if host == parse_host(entry[1].broker.store.config.store_host)]
        messages: dict[str, StoredMessage] = {}
        down = []
        for name, entry in named or entries:
            if not self._is_up(entry):
                down.append(name)
            elif (message := entry.broker.find_by_id(message_id)) is not None:
                messages[name] = message
        if len(messages) > 1 and named:
            raise ConfigError(
                f"message {message_id}: brokers {', '.join(messages)} have one store host; open each with its own "
                "StoreConfig(store_host=…), or all by Cluster.open"
            )
        if not messages and down:
            raise BrokerUnreachableError(f"message {message_id}: {', '.join(down)} cannot be asked")
        return next(iter(messages.values()), None)

    def brokers(self) -> tuple[Broker, ...]:
        """Return all brokers by name, including closed ones."""
        return tuple(self._entries[name].broker for name in sorted(self._entries))

    # ---- route

    @override
    def topic_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return the brokers that have ``topic``, by name, except brokers that clients have noticed to be down."""
        entries = sorted(self._entries.items())
        return tuple(data for _, entry in entries if entry.is_routed for data in entry.broker.topic_route(topic))

    @override
    def registered_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return all brokers that have ``topic``, by name, including those that are down."""
        return tuple(data for broker in self.brokers() for data in broker.topic_route(topic))

    @override
    def broker_names(self) -> tuple[str, ...]:
        """Return the names of the brokers that can be reached, sorted."""
        return tuple(sorted(name for name, entry in self._entries.items() if entry.is_routed and self._is_up(entry)))

    @override
    def endpoint(self, broker_name: str) -> Endpoint:
        """Return the broker with that name; its calls raise `BrokerUnreachableError` while it is down."""
        return self._entry(broker_name).link

    @override
    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call ``changed``, under the runner's lock, at each change of the route; return a function that ends this."""
        return self._watchers.watch(changed)

    # ---- details

    def _entry(self, broker_name: str) -> _Entry:
        entry = self._entries.get(broker_name)
        if entry is None:
            raise NoRouteError(f"unknown broker {broker_name!r}; expected one of {', '.join(sorted(self._entries))}")
        return entry

    def changed(self) -> None:
        """Note that a broker's topics or its reachability have changed. Called under the runner's lock."""
        now = self.runner.now_ms()
        for entry in self._entries.values():
            is_up = self._is_up(entry)
            if is_up != entry.was_up:
                entry.was_up = is_up
                if is_up == entry.is_routed:
                    entry.noticed_ms = None  # it was back before a client noticed
                else:
                    is_announced = is_up or (entry.broker.dead and not entry.broker.was_killed)
                    self._schedule_update(entry, now if is_announced else now + self._expiry_ms)
        self._watchers.notify()

    def _schedule_update(self, entry: _Entry, change_ms: int) -> None:
        """Schedule the clients' first poll after ``change_ms``, when a name server would have the change."""
        entry.noticed_ms = next_on_grid(change_ms, self._created_ms, self._poll_ms)
        self.runner.wake(self._step, entry.noticed_ms)

    def _update(self, now_ms: int) -> int | None:
        changed = False
        longest_ms = self._expiry_ms + self._poll_ms  # a longer wait means that the clock was set back
        for entry in self._entries.values():
            if entry.noticed_ms is not None and not now_ms < entry.noticed_ms <= now_ms + longest_ms:
                entry.is_routed, entry.noticed_ms, changed = self._is_up(entry), None, True
        if changed:
            self._watchers.notify()
        return min((entry.noticed_ms for entry in self._entries.values() if entry.noticed_ms is not None), default=None)


# ---- a cluster with stores of its own

_PORT: Final = 10911
_NOT_IN_NAMES: Final = frozenset("/\\\0:")


class Cluster(RouteTable):
    """A `RouteTable` that opens, crashes and reopens its brokers, and closes them as a context manager. Thread-safe."""

    name: str
    """The cluster's name in stored messages."""
    _path: str
    _broker_config: BrokerConfig | None
    _store_config: StoreConfig
    _files: Files
    _metrics: Metrics | None
    _own_runner: ThreadRunner | None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        brokers: Iterable[str],
        *,
        name: str = "DefaultCluster",
        config: BrokerConfig | None = None,
        store_config: StoreConfig | None = None,
        runner: Runner | None = None,
        files: Files | None = None,
        metrics: Metrics | None = None,
    ) -> Self:
        """Open brokers with these names, each with its store in the folder of ``path`` that has its name.

        A broker's store host is derived from its name, so an offset id identifies its broker in every process.

        Args:
            path: The folder that contains all stores.
            brokers: Their names. A name such as ``hz-broker-a`` begins with the broker's site.
            name: The cluster's name in stored messages.
            config: Settings for every broker.
            store_config: Settings for every store.
            runner: Runs the work of brokers and clients. None starts threads, which end with the cluster.
            files: The file system; None is the disk.
            metrics: Counts events.

        Raises:
            ConfigError: There is no broker, two have the same name, or a name can't name a folder; nothing was opened.
        """
        check_path("path", path, "the folder of the brokers' stores")
        if not isinstance(brokers, Iterable):
            raise ConfigError(f"brokers: expected names such as ['broker-a', 'broker-b'], found {brokers!r:.80}")
        names = [brokers] if isinstance(brokers, str) else list(brokers)
        _check(names)
        with ExitStack() as undo:
            own_runner = None
            if runner is None:
                from librmq.runtime import ThreadRunner

                own_runner = runner = ThreadRunner()
                undo.callback(own_runner.shutdown)
            cluster = object.__new__(cls)
            cluster._broker_config, cluster._store_config = config, store_config or StoreConfig()
            cluster._files, cluster._metrics = files or DiskFiles(), metrics
            cluster.name, cluster._path, cluster._own_runner = name, fixed_path(path, cluster._files), own_runner
            opened = []
            for broker_name in names:
                opened.append(cluster._open_broker(broker_name, runner))
                undo.callback(opened[-1].close)
            RouteTable.__init__(cluster, *opened)
            undo.pop_all()
            return cluster

    def _open_broker(self, name: str, runner: Runner) -> Broker:
        return Broker.open(
            os.path.join(self._path, name),
            self._broker_config,
            name=name,
            cluster_name=self.name,
            store_config=self._store_config.with_settings({"store_host": _host_of(name)}),
            runner=runner,
            files=self._files,
            metrics=self._metrics,
        )

    def broker(self, name: str) -> Broker:
        """Return the broker with that name, as it was last opened.

        Raises:
            NoRouteError: The cluster has no such broker.
        """
        return self._entry(name).broker

    def add_broker(self, name: str) -> Broker:
        """Open one more broker, which clients notice at their next update of the route.

        Raises:
            ConfigError: The cluster has a broker with that name, or the name can't name a folder; nothing was
                opened.
        """
        _check([*(broker.name for broker in self.brokers()), name])
        broker = self._open_broker(name, self.runner)
        self.add(broker)
        return broker

    def crash(self, name: str) -> None:
        """Let a broker end without saving, like a killed process."""
        self.broker(name).abandon()

    def reopen(self, name: str) -> Broker:
        """Reopen a broker that has died or was closed, with all acknowledged messages, and return it.

        Raises:
            ConfigError: The broker is open.
        """
        if not self.broker(name).dead:
            raise ConfigError(f"broker {name} is open: reopen needs one that was closed or has crashed")
        broker = self._open_broker(name, self.runner)
        self.add(broker)
        return broker

    @override
    def close(self) -> None:
        """Close all brokers; shut down their clients first. A second call does nothing."""
        with ExitStack() as last:
            if self._own_runner is not None:
                last.callback(self._own_runner.shutdown)
            for broker in self.brokers():
                last.callback(broker.close)

    @override
    def __repr__(self) -> str:
        return f"<Cluster {self.name!r}: {', '.join(broker.name for broker in self.brokers())}>"


def _check(names: Sequence[object]) -> None:
    hosts: dict[str, str] = {}
    if not names:
        raise ConfigError("brokers: expected at least one name")
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or not name.isprintable() or _NOT_IN_NAMES & set(name):
            raise ConfigError(f"brokers: expected names that can name folders, found {name!r:.80}")
        host = _host_of(name)
        if host in hosts:
            both = f"two brokers are named {name!r}" if hosts[host] == name else f"{hosts[host]!r} and {name!r}"
            raise ConfigError(f"brokers: {both}, which gives them one store host; rename one")
        hosts[host] = name


def _host_of(name: str) -> str:
    """Return the store host of a broker: a loopback address derived from the broker's name."""
    high, middle, low = blake2b(name.encode("utf-8", "replace"), digest_size=3).digest()
    return f"127.{high}.{middle}.{low}:{_PORT}"
