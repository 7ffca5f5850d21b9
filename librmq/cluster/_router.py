"""A router of sites: it decides which cluster a site uses, and rebuilds the site's clients when that changes.

::

    router = SiteRouter({"hz": hz, "sh": sh}, {"hz": "hz", "sh": "sh"})     site -> cluster of its own
    producer = router.producer("hz", lambda route: Producer(route, "shop"))
    producer.run(lambda client: client.send("orders", b"o-1"))
    router.switch("hz", "sh")                                               manually, or by router.probe()

Factories of the caller create the clients, so the router depends on no kind of client. A switch first creates the new
client, then directs new calls to it, and shuts the old one down after its last call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from librmq.cluster._cluster import RouteTable, SiteRoute
from librmq.config import to_seconds
from librmq.errors import CapacityError, ConfigError
from librmq.protocol import check_site, watch_all
from librmq.runtime import Runner, Step, Work, calls_later
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock, RLock

_log = EventLog("librmq.cluster")
_ANY: Final = float("inf")


class _Client(Protocol):
    """A producer or consumer as the router sees it."""

    def shutdown(self) -> object: ...


C = TypeVar("C", bound=_Client)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Switch:
    """One change of a site's cluster."""

    at_ms: int
    """Time of the change, in milliseconds since 1970."""
    site: str
    """The site of the clients."""
    before: str
    """The name of its earlier cluster."""
    after: str
    """The name of its new cluster."""
    why: str
    """The reason: ``by hand``, or what the router found."""


class RoutedClient(Generic[C]):
    """A client of a site, rebuilt when the site's cluster changes. Thread-safe."""

    def __init__(self, site: str, factory: Callable[[SiteRoute], C], route: SiteRoute, moves: bool) -> None:
        self.site = site
        self.moves = moves
        """Whether a switch rebuilds this client."""
        self._factory = factory
        self._lock = Lock()
        self._users: Counter[int] = Counter()
        self.route: SiteRoute = route
        """The route of the client now."""
        self._current = factory(route)

    @property
    def current(self) -> C:
        """The current client. The next switch shuts it down, so use `run` for calls that may overlap a switch."""
        return self._current

    def run(self, action: Callable[[C], R]) -> R:
        """Return ``action(client)``. A switch shuts this client down only after the action has ended."""
        with self._lock:
            client = self._current
            self._users[id(client)] += 1
        try:
            return action(client)
        finally:
            with self._lock:
                self._users[id(client)] -= 1
                is_last = not self._users[id(client)]
                if is_last:
                    del self._users[id(client)]
                is_old = client is not self._current
            if is_last and is_old:
                client.shutdown()

    def rebuild(self, route: SiteRoute) -> None:
        """Create the client again for another route, and shut the old one down when it is no longer used."""
        new = self._factory(route)
        with self._lock:
            old, self._current, self.route = self._current, new, route
            is_used = self._users[id(old)] > 0
        if not is_used:
            old.shutdown()


class SiteRouter:
    """The cluster of each site, switched manually or by probes. Thread-safe."""

    def __init__(
        self,
        clusters: Mapping[str, RouteTable],
        homes: Mapping[str, str],
        *,
        capacity: Mapping[str, float] | None = None,
        load: Mapping[str, float] | None = None,
        moves_consumers: bool = False,
    ) -> None:
        """Start with each site at its home.

        Args:
            clusters: Clusters by name, which share one runner.
            homes: The cluster of each site.
            capacity: Highest load of each cluster, in any unit. A cluster without an entry takes any load.
            load: The load of each site in that unit.
            moves_consumers: Whether a switch also rebuilds consumers. Otherwise they stay and read what is left.

        Raises:
            ConfigError: A site has no cluster, or clusters have different runners.
            CapacityError: A cluster cannot take the load of its sites.
        """
        if not clusters or not homes:
            raise ConfigError("SiteRouter: expected at least one cluster and one site")
        for site, name in homes.items():
            check_site(site)
            if name not in clusters:
                names = ", ".join(clusters)
                raise ConfigError(f"site {site!r}: no cluster serves it: found {name!r}, expected {names}")
        _check_names("capacity", capacity, list(clusters))
        _check_names("load", load, list(homes))
        first = next(iter(clusters.values()))
        if any(cluster.runner is not first.runner for cluster in clusters.values()):
            raise ConfigError("SiteRouter: open all clusters with one runner")
        self.switches: list[Switch] = []
        """All switches so far."""
        self._clusters = dict(clusters)
        self._homes = dict(homes)
        self._at = dict(homes)
        self._capacity = dict(capacity or {})
        self._load = dict(load or {})
        self._moves_consumers = moves_consumers
        self._runner = first.runner
        self._lock = RLock()
        self._clients: list[RoutedClient[_Client]] = []
        self._probing: _Probing | None = None
        for name in clusters:
            self._check_capacity(name, self._at)

    def address(self, site: str) -> str:
        """Return the name of the cluster that a site uses."""
        self._check_site(site)
        return self._at[site]

    def producer(self, site: str, factory: Callable[[SiteRoute], C]) -> RoutedClient[C]:
        """Return a producer for a site, created by ``factory(route)`` now and after each switch."""
        return self._routed(site, factory, moves=True)

    def consumer(self, site: str, factory: Callable[[SiteRoute], C]) -> RoutedClient[C]:
        """Return a consumer for a site, created by ``factory(route)`` now and, if consumers move, after each switch.

        If consumers do not move, the route leads to the site's home.
        """
        return self._routed(site, factory, moves=self._moves_consumers)

    def _routed(self, site: str, factory: Callable[[SiteRoute], C], *, moves: bool) -> RoutedClient[C]:
        with calls_later(), self._lock:
            self._check_site(site)
            name = self._at[site] if moves else self._homes[site]
            client = RoutedClient(site, factory, self._clusters[name].at(site), moves)
            self._clients.append(client)  # type: ignore[arg-type]
            return client

    def release(self, client: RoutedClient[C]) -> None:
        """Stop switching a client; the caller shuts it down."""
        with self._lock:
            self._clients = [entry for entry in self._clients if entry is not client]

    def switch(self, site: str, to: str, *, why: str = "by hand") -> None:
        """Let a site use another cluster, and rebuild the site's clients.

        If a factory raises, its client stays as it is, and the others are rebuilt before the error is raised. A
        repetition of the call rebuilds the clients that are left.

        Raises:
            ConfigError: There is no such site or cluster; nothing was changed.
            CapacityError: The cluster cannot also take the site's load; nothing was changed.
        """
        with calls_later(), self._lock:
            self._check_site(site)
            if to not in self._clusters:
                raise ConfigError(f"unknown cluster {to!r}: expected one of {', '.join(self._clusters)}")
            before = self._at[site]
            if to != before:
                self._check_capacity(to, {**self._at, site: to})
                self._at[site] = to
                self.switches.append(Switch(self._runner.now_ms(), site, before, to, why))
                _log.warning(
                    "site %(site)s uses cluster %(cluster)s, no longer %(before)s: %(why)s",
                    site=site,
                    cluster=to,
                    before=before,
                    why=why,
                )
            route = self._clusters[to].at(site)
            with ExitStack() as rebuilds:  # continues after an error, and raises it at the end
                for client in reversed(self._clients):
                    if client.site == site and client.moves and client.route is not route:
                        rebuilds.callback(client.rebuild, route)

    def probe(self, *, every: float = 5, failures: int = 3) -> None:
        """Switch automatically: away from a cluster without a reachable broker, and home when it is back.

        A change takes effect after ``failures`` probes in a row, one every ``every`` seconds. Probes run only while
        the reachability of a cluster changes.
        """
        with self._runner.lock:
            if self._probing is None:
                self._probing = _Probing(self, self._runner, round(1000 * to_seconds("every", every)), failures)

    def close(self) -> None:
        """Stop the probes, and shut all clients down."""
        with self._runner.lock:
            if self._probing is not None:
                self._probing.stop_probes()
                self._probing = None
        with self._lock:  # after a switch under way
            clients, self._clients = self._clients, []
        with ExitStack() as shutdowns:  # continues after an error, and raises it at the end
            for client in reversed(clients):
                shutdowns.callback(client.current.shutdown)

    def is_reachable(self, cluster: str, site: str) -> bool:
        """Return whether a site can reach a broker of a cluster."""
        return bool(self._clusters[cluster].at(site).broker_names())

    def redirect(self) -> None:
        """Switch each site with an unreachable cluster to the first reachable one with the capacity, or back home."""
        for site, home in self._homes.items():
            at = self._at[site]
            if self.is_reachable(home, site):
                candidates = [home]
            elif self.is_reachable(at, site):
                candidates = []
            else:
                candidates = [name for name in self._clusters if self.is_reachable(name, site)]
            for name in candidates if at not in candidates else ():
                try:
                    self.switch(site, name, why="it is back" if name == home else f"{at} is out of reach")
                except CapacityError as error:
                    _log.error("site %(site)s stays without a cluster: %(error)s", site=site, error=error)
                    continue
                except Exception as error:  # A client's factory failed, which must not keep other sites from switching.
                    _log.error(
                        "site %(site)s: a client could not be rebuilt for cluster %(cluster)s: %(error)s",
                        site=site,
                        cluster=name,
                        error=error,
                        exc_info=error,
                    )
                break

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call ``changed`` under the runner's lock when brokers of any cluster change; call the result to stop."""
        return watch_all(self._clusters.values(), changed)

    def state(self) -> tuple[tuple[str, str, bool], ...]:
        """Return for each site and cluster whether the site can reach a broker there."""
        return tuple((site, name, self.is_reachable(name, site)) for site in self._homes for name in self._clusters)

    def _check_site(self, site: str) -> None:
        if site not in self._homes:
            raise ConfigError(f"unknown site {site!r}: expected one of {', '.join(self._homes)}")

    def _check_capacity(self, cluster: str, at: Mapping[str, str]) -> None:
        capacity = self._capacity.get(cluster, _ANY)
        sites = [site for site, name in at.items() if name == cluster]
        total = sum(self._load.get(site, 0) for site in sites)
        if total > capacity:
            raise CapacityError(f"cluster {cluster} takes {capacity:g}, and {', '.join(sites)} would need {total:g}")


def _check_names(what: str, values: Mapping[str, float] | None, expected: list[str]) -> None:
    unknown = sorted(set(values or ()) - set(expected))
    if unknown:
        raise ConfigError(f"{what}: {unknown[0]!r} is none of {', '.join(expected)}")


class _Probing:
    """The probes of a router: a step that runs while the reachability of a cluster changes."""

    def __init__(self, router: SiteRouter, runner: Runner, every_ms: int, failures: int) -> None:
        self._router = router
        self._runner = runner
        self._every_ms = every_ms
        self._failures = failures
        # A site whose cluster is out of reach already must be switched too.
        self._settled = tuple((site, name, up or name == router.address(site)) for site, name, up in router.state())
        self._seen = self._settled
        self._count = 0
        self._step = Step("router probe", self._probe)
        self._unwatch = router.watch(self._changed)
        self._changed()

    def _changed(self) -> None:
        if self._router.state() != self._settled:
            self._runner.wake(self._step, self._runner.now_ms() + self._every_ms)

    def _probe(self, now_ms: int) -> int | None:
        state = self._router.state()
        self._count = self._count + 1 if state == self._seen else 1
        self._seen = state
        if state == self._settled:
            self._count = 0
            return None
        if self._count < self._failures:
            return now_ms + self._every_ms
        self._settled, self._count = state, 0
        self._runner.submit(Work("router redirect", self._router.redirect, self._redirected))
        return None

    def _redirected(self, result: object, error: Exception | None) -> None:
        if error is not None:
            _log.error("a site could not be switched: %(error)s", error=error, exc_info=error)

    def stop_probes(self) -> None:
        self._unwatch()
        self._settled = self._router.state()
