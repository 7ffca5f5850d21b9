"""The brokers of a test: one, or a cluster over sites. They crash, return, and lose links to processes and sites."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from string import ascii_lowercase
from typing import Final, Protocol, TypeVar

from librmq.broker import Broker, BrokerConfig
from librmq.cluster import Cluster, RouteTable
from librmq.cluster.sites import check_site, site_of
from librmq.config import StoreConfig
from librmq.errors import BrokerUnreachableError, ConfigError, NoRouteError
from librmq.files.seam import Files
from librmq.message.message import StoredMessage
from librmq.protocol import Endpoint, QueueData
from librmq.runtime.runner import Runner
from librmq.store import MessageStore
from librmq.store.recovery.verify import verify

__all__ = ["Network", "broker_names"]

MOST_BROKERS: Final = len(ascii_lowercase)


def broker_names(brokers: int | Iterable[str], sites: Sequence[str]) -> list[str]:
    """Return the names of a cluster's brokers with their sites: ``hz-broker-a`` for the first one at ``hz``.

    Raises:
        ConfigError: The number of brokers, or the name of a site, is invalid.
    """
    for site in sites:
        check_site(site)
    if len(set(sites)) < len(sites):
        raise ConfigError(f"sites: expected each site once, found {', '.join(sites)}")
    if isinstance(brokers, int):
        if not 0 < brokers <= MOST_BROKERS:
            raise ConfigError(f"brokers: expected 1 to {MOST_BROKERS}, or names, found {brokers}")
        brokers = [f"broker-{letter}" for letter in ascii_lowercase[:brokers]]
        return [f"{site}-{name}" for site in sites for name in brokers] if sites else list(brokers)
    names = list(brokers)
    unserved = sorted(set(sites) - {site_of(name) for name in names})
    if unserved:
        raise ConfigError(f"sites: {', '.join(unserved)} would have no broker: name one '{unserved[0]}-…'")
    return names


class Peer(Protocol):
    """A process as its links see it."""

    name: str
    label: str
    site: str | None
    dead: bool


M = TypeVar("M", bound=Peer)


class Network:
    """The brokers of one test behind one route table, and the links to them."""

    def __init__(
        self,
        path: str,
        files: Files,
        runner: Runner,
        config: BrokerConfig | None,
        store_config: StoreConfig,
        came: Callable[[str, bool], object],
    ) -> None:
        """Open the broker; ``came(name, is_new)`` is called for each broker that joins or returns."""
        self._path = path
        self._files = files
        self._runner = runner
        self._config = config
        self._store_config = store_config
        self._cluster: Cluster | None = None
        self._cuts: dict[frozenset[str], set[int]] = {}
        self._cut_ids = count()
        self._read_only: dict[str, MessageStore] = {}
        self._came = came
        first = self._open()
        self.table = RouteTable(first)
        """The route that all processes use."""
        self.by_name: dict[str, Broker] = {first.name: first}
        """The brokers as they were opened last."""
        self._end_watch = self.table.watch(self._look)

    def _open(self) -> Broker:
        return Broker.open(
            self._path, self._config, store_config=self._store_config, runner=self._runner, files=self._files
        )

    @property
    def first(self) -> Broker:
        """The first broker by name."""
        return next(iter(self.by_name.values()))

    @property
    def is_cluster(self) -> bool:
        """Whether the test has made a cluster."""
        return self._cluster is not None

    @property
    def is_whole_cluster(self) -> bool:
        """Whether there are several brokers, all running and reachable."""
        return len(self.by_name) > 1 and not self._cuts and not any(broker.dead for broker in self.by_name.values())

    def make_cluster(self, names: Sequence[str]) -> Cluster:
        """Replace the single broker, which is still unused, with a cluster."""
        cluster = Cluster.open(
            os.path.join(self._path, "cluster"),
            names,
            config=self._config,
            store_config=self._store_config,
            runner=self._runner,
            files=self._files,
        )
        self._end_watch()
        self.first.close()
        self.table = self._cluster = cluster
        self.by_name = {broker.name: broker for broker in cluster.brokers()}
        self._end_watch = cluster.watch(self._look)
        return cluster

    def _look(self) -> None:
        """Take in brokers that were reopened or added since. Called under the runner's lock."""
        for broker in self.table.brokers():
            name = broker.name
            before = self.by_name.get(name)
            if before is not broker:
                read_only = self._read_only.pop(name, None)
                if read_only is not None:
                    read_only.close()
                self.by_name[name] = broker
                self._came(name, before is None)

    def named(self, name: str) -> Broker:
        """Return the broker with that name.

        Raises:
            NoRouteError: There is none.
        """
        found = self.by_name.get(name)
        if found is None:
            raise NoRouteError(f"unknown broker {name!r}; expected one of {', '.join(self.by_name)}")
        return found

    def reopen(self, name: str) -> Broker:
        """Reopen a broker that has died."""
        if self._cluster is not None:
            return self._cluster.reopen(name)
        broker = self._open()
        self.table.add(broker)
        return broker

    def at(self, site: str) -> list[Broker]:
        """Return the brokers of a site.

        Raises:
            ConfigError: The site has no brokers.
        """
        found = [broker for name, broker in self.by_name.items() if site_of(name) == site]
        if not found:
            raise ConfigError(f"site {site!r} has no broker; brokers are {', '.join(self.by_name)}")
        return found

    # ---- messages

    def store(self, name: str) -> MessageStore:
        """Return the store of a broker for reading; for a broker that is down, a read-only handle."""
        broker = self.by_name[name]
        if not broker.dead:
            return broker.store
        found = self._read_only.get(name)
        if found is None:
            found = MessageStore.open(broker.store.path, self._store_config, read_only=True, files=self._files)
            self._read_only[name] = found
        return found

    def messages(self, name: str, topic: str) -> list[StoredMessage]:
        """Return a broker's messages in a topic, queue by queue. The broker may be down."""
        store = self.store(name)
        return [one for queue in sorted(of for of in store.queues if of[0] == topic) for one in store.messages(*queue)]

    # ---- route

    def topic_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return the queues of a topic as clients know them."""
        return self.table.topic_route(topic)

    def registered_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return the queues of a topic in all brokers, including those that are down."""
        return self.table.registered_route(topic)

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call ``changed`` when topics change and when a broker is reopened; return a function that ends this."""
        return self.table.watch(changed)

    # ---- links

    def cut(self, one: str, other: str, processes: Sequence[M]) -> tuple[int, list[tuple[M, Broker]]]:
        """Cut the link between two ends.

        Return the number of the cut, and the processes that lose a broker, each with that broker.

        Raises:
            ConfigError: An end is not a broker, a process or a site.
        """
        ends = {end for process in processes for end in (process.name, process.site)}
        ends |= {end for name in self.by_name for end in (name, site_of(name))}
        for end in (one, other):
            if end not in ends:
                known = ", ".join(sorted(filter(None, ends)))
                raise ConfigError(f"{end!r} is not a broker, a process or a site: expected one of {known}")
        number = next(self._cut_ids)
        self._cuts.setdefault(frozenset((one, other)), set()).add(number)
        return number, [
            (process, broker)
            for process in processes
            for name, broker in self.by_name.items()
            if not process.dead and not broker.dead and self._is_cut(process, name)
        ]

    def others(self, one: str, processes: Iterable[Peer]) -> list[str]:
        """Return the ends of the links that isolate a broker or a site from everything else."""
        if one in self.by_name:
            return sorted({process.name for process in processes})
        outside = {process.site or process.name for process in processes} | set(self.table.sites())
        return sorted(outside - {one})

    def heal(self, one: str, other: str, number: int | None = None) -> bool:
        """End all cuts of the link between two ends, or one of them; return whether this restored the link."""
        pair = frozenset((one, other))
        cuts = self._cuts.get(pair, set())
        ended = cuts & {number} if number is not None else set(cuts)
        cuts -= ended
        if not ended or cuts:
            return False
        del self._cuts[pair]
        self.table.changed()
        return True

    def _is_cut(self, process: Peer, broker_name: str) -> bool:
        if not self._cuts:
            return False
        ends = {process.name, process.site or process.name}
        others = {broker_name, site_of(broker_name) or broker_name}
        return any(frozenset((one, other)) in self._cuts for one in ends for other in others)

    def names_for(self, process: Peer) -> tuple[str, ...]:
        """Return the names of the brokers that a process can reach, sorted."""
        return tuple(name for name in self.table.broker_names() if not self._is_cut(process, name))

    def reached(self, process: Peer, broker_name: str) -> Endpoint:
        """Return the link to a broker for a call of a process.

        Raises:
            BrokerUnreachableError: It is down, or the link is cut.
        """
        broker = self.by_name[broker_name]
        if broker.dead:
            raise BrokerUnreachableError(f"{broker_name} is down")
        if self._cuts and self._is_cut(process, broker_name):
            raise BrokerUnreachableError(f"{broker_name} cannot be reached from {process.label}: the link is cut")
        route = self.table if process.site is None else self.table.at(process.site)
        return route.endpoint(broker_name)

    # ---- closing

    def close(self) -> None:
        """Close all brokers that are running."""
        for broker in self.by_name.values():
            broker.close()

    def abandon(self) -> None:
        """Let all brokers die."""
        for store in self._read_only.values():
            store.close()
        for broker in self.by_name.values():
            broker.abandon()

    def damage(self) -> list[str]:
        """Return a line for each damaged place in the closed stores."""
        found = []
        for name, broker in self.by_name.items():
            of = f"{name}: " if self.is_cluster else ""
            damage = verify(broker.store.path, self._store_config, self._files).damage
            found += [f"{of}{one.file} at {one.offset}: {one.what}" for one in damage]
        return found
