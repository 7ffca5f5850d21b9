"""The brokers of a test: one, or a cluster over sites. They crash, return, and lose links to processes and sites."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from string import ascii_lowercase
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar

from librmq.broker import Broker, BrokerConfig
from librmq.clock import SystemClock
from librmq.cluster import Cluster, RouteTable
from librmq.config import StoreConfig
from librmq.errors import BrokerUnreachableError, ConfigError, CorruptionError, NoRouteError
from librmq.files import Files
from librmq.message import StoredMessage
from librmq.protocol import Endpoint, check_site, site_of
from librmq.runtime import Runner
from librmq.store import MessageStore, verify

if TYPE_CHECKING:
    from librmq.cluster import Replica
    from librmq.wire.frame_links import FrameLinks

FOLDER: Final = os.path.join(os.sep, "rmq")
"""The folder of a kit's store in memory."""
MOST_BROKERS: Final = len(ascii_lowercase)
SMALL_FILES: Final = StoreConfig.tiny(commitlog_file_size=1 << 20, max_message_size=512 << 10)
"""The settings of a kit's store by default."""


def machine_ms() -> int:
    """Return the machine's time in whole seconds: timers go by them, and are due equally long after each start."""
    return SystemClock().now_ms() // 1000 * 1000


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


def opened_like(before: Broker, path: str, config: BrokerConfig) -> Broker:
    """Open a broker in place of a dead one, in another folder or with other settings."""
    return Broker.open(
        path,
        config,
        name=before.name,
        cluster_name=before.cluster_name,
        store_config=before.store.config,
        runner=before.runner,
        files=before.store.files,
    )


class LinkEnd:
    """A process, or a replica, as its links see it."""

    site: str | None = None
    """Its site, if it has one."""

    def __init__(self, name: str, label: str) -> None:
        self.name: str = name
        self.label: str = label
        """Name and generation, the same in each run."""
        self.dead: bool = False
        """Whether it has died or was shut down."""


M = TypeVar("M", bound=LinkEnd)
Frames = Literal["tcp", "share"]


class Copy(Protocol):
    """A replica as the network sees it."""

    name: str
    master_name: str
    path: str
    replica: Replica

    @property
    def dead(self) -> bool:
        """Return whether its process has crashed."""

    def open(self) -> None:
        """Start its process."""

    def crash(self, *, down: float) -> None:
        """Kill its process; ``down`` seconds later it starts again."""

    def reconnect(self) -> None:
        """Connect it with its master."""


@dataclass(eq=False, repr=False)
class Network:
    """The brokers of one test behind one route table, and the links to them. Making one opens the first broker."""

    path: str
    """Folder of the first broker's store."""
    files: Files
    runner: Runner
    config: BrokerConfig | None
    """Settings of brokers."""
    store_config: StoreConfig
    joined: Callable[[str, bool], object]
    """Called as ``joined(name, is_new)`` for each broker that joins or returns."""
    frames: Frames | None = None
    """What requests cross as frames of 4.x: a TCP connection, or the socket of a shared store."""

    def __post_init__(self) -> None:
        self._frames: FrameLinks | None = None
        if self.frames is not None:
            from librmq.wire.frame_links import FrameLinks

            self._frames = FrameLinks(self.runner, is_shared=self.frames == "share")
        self.has_pages = False
        """Whether a process keeps what it has consumed by itself, as one with its own store or in a share does."""
        self._cluster: Cluster | None = None
        self.cuts: dict[frozenset[str], set[int]] = {}
        """The numbers of the cuts of each link."""
        self._cut_ids = count()
        self._read_only: dict[str, MessageStore] = {}
        self._retired: dict[str, list[MessageStore]] = {}
        self._latencies: dict[frozenset[str], float] = {}
        self.copies: list[Copy] = []
        """The replicas of the brokers."""
        self.replicas: tuple[Replica, ...] = ()
        """The replicas from which processes read, one for each master. Another tuple after a change."""
        self._changed: dict[str, tuple[str, BrokerConfig]] = {}  # those with another folder or other settings
        first = self._open()
        self.table: RouteTable = RouteTable(first)
        """The route that all processes use."""
        self.by_name: dict[str, Broker] = {first.name: first}
        """The brokers as they were opened last."""
        self._end_watch = self.table.watch(self._refresh_brokers)

    def _open(self) -> Broker:
        return Broker.open(self.path, self.config, store_config=self.store_config, runner=self.runner, files=self.files)

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
        """Whether there are several brokers and replicas, all running and reachable."""
        dead = [*(broker.dead for broker in self.by_name.values()), *(copy.dead for copy in self.copies)]
        return len(dead) > 1 and not self.cuts and not any(dead)

    def make_cluster(self, names: Sequence[str]) -> Cluster:
        """Replace the single broker, which is still unused, with a cluster."""
        cluster = Cluster.open(
            os.path.join(self.path, "cluster"),
            names,
            config=self.config,
            store_config=self.store_config,
            runner=self.runner,
            files=self.files,
        )
        self._end_watch()
        self.first.close()
        self.table = self._cluster = cluster
        self.by_name = {broker.name: broker for broker in cluster.brokers()}
        self._end_watch = cluster.watch(self._refresh_brokers)
        return cluster

    def _refresh_brokers(self) -> None:
        """Add the brokers that were reopened or added since the last call. Called under the runner's lock."""
        for broker in self.table.brokers():
            name = broker.name
            before = self.by_name.get(name)
            if before is not broker:
                read_only = self._read_only.pop(name, None)
                if read_only is not None:
                    read_only.close()
                self.by_name[name] = broker
                self.joined(name, before is None)
                self._reconnect(name)

    def _reconnect(self, name: str) -> None:
        """Let the replicas of a broker follow it again."""
        for copy in self.copies:
            if copy.master_name == name:
                copy.reconnect()

    def named(self, name: str) -> Broker:
        """Return the broker with that name.

        Raises:
            NoRouteError: There is none.
        """
        broker = self.by_name.get(name)
        if broker is None:
            raise NoRouteError(f"unknown broker {name!r}; expected one of {', '.join(self.by_name)}")
        return broker

    def reopen(self, name: str) -> Broker:
        """Reopen a broker that has died."""
        if name in self._changed:
            return self._open_changed(name)
        if self._cluster is not None:
            return self._cluster.reopen(name)
        broker = self._open()
        self.table.add(broker)
        return broker

    def _open_changed(self, name: str) -> Broker:
        """Open a broker in another folder or with other settings than at first."""
        broker = opened_like(self.by_name[name], *self._changed[name])
        self.table.add(broker)
        return broker

    # ---- replicas

    def wait_for_replicas(self, name: str) -> None:
        """Reopen a broker, so that its sends wait for a replica."""
        broker = self.by_name[name]
        if broker.config.replication != "sync":
            broker.close()
            self._changed[name] = broker.store.path, replace(broker.config, replication="sync")
            self._open_changed(name)

    def add_copy(self, copy: Copy) -> None:
        """Let processes read from a replica."""
        self.copies.append(copy)
        self.replicas_changed()

    def replicas_changed(self) -> None:
        """Note that a replica was added, reopened or promoted."""
        self.replicas = tuple({copy.master_name: copy.replica for copy in reversed(self.copies)}.values())
        self.table.changed()

    def replace_broker(self, name: str, copy: Copy) -> Broker:
        """Open the promoted copy of a dead broker under the broker's name."""
        self._retired.setdefault(name, []).insert(0, self.store(name))
        self._read_only.pop(name, None)
        self.copies.remove(copy)
        self._changed[name] = copy.path, self.by_name[name].config
        self.replicas_changed()
        return self._open_changed(name)

    def at(self, site: str) -> list[Broker]:
        """Return the brokers of a site.

        Raises:
            ConfigError: The site has no brokers.
        """
        brokers = [broker for name, broker in self.by_name.items() if site_of(name) == site]
        if not brokers:
            raise ConfigError(f"site {site!r} has no broker; brokers are {', '.join(self.by_name)}")
        return brokers

    # ---- messages

    def store(self, name: str) -> MessageStore:
        """Return the store of a broker for reading; for a broker that is down, a read-only handle."""
        broker = self.by_name[name]
        if not broker.dead:
            return broker.store
        store = self._read_only.get(name)
        if store is None:
            store = MessageStore.open(broker.store.path, self.store_config, read_only=True, files=self.files)
            self._read_only[name] = store
        return store

    def stores(self, name: str) -> list[MessageStore]:
        """Return the store of a broker, then the stores of the brokers that it replaced."""
        return [self.store(name), *self._retired.get(name, [])]

    def messages(self, name: str, topic: str) -> list[StoredMessage]:
        """Return a broker's messages in a topic, queue by queue. The broker may be down."""
        store = self.store(name)
        return [
            message
            for queue in sorted(name_and_id for name_and_id in store.queues if name_and_id[0] == topic)
            for message in store.messages(*queue)
        ]

    def in_order(self, topic: str) -> list[StoredMessage]:
        """Return the messages of a topic in log order, or by time if there are several brokers."""
        of_brokers = [
            sorted(self.messages(name, topic), key=lambda message: message.physical_offset) for name in self.by_name
        ]
        messages = [message for of_broker in of_brokers for message in of_broker]
        return messages if len(of_brokers) == 1 else sorted(messages, key=lambda message: message.store_timestamp_ms)

    def message_at(self, broker_name: str, physical_offset: int) -> StoredMessage:
        """Return the message at a physical offset of a broker.

        Raises:
            LookupError: There is none.
        """
        for store in self.stores(broker_name):
            with suppress(CorruptionError):  # a promoted replica can have other records
                message = store.message_at(physical_offset)
                if message is not None:
                    return message
        raise LookupError(f"broker {broker_name} no longer has the message at physical offset {physical_offset}")

    # ---- links

    def cut(self, end: str, other: str, processes: Sequence[M]) -> tuple[int, list[tuple[M, Broker]]]:
        """Cut the link between two ends.

        Return the number of the cut, and the processes that lose a broker, each with that broker.

        Raises:
            ConfigError: An end is not a broker, a process or a site.
        """
        self.check_ends(end, other, processes)
        number = next(self._cut_ids)
        self.cuts.setdefault(frozenset((end, other)), set()).add(number)
        return number, [
            (process, broker)
            for process in processes
            for name, broker in self.by_name.items()
            if not process.dead and not broker.dead and self.is_cut(process, name)
        ]

    def check_ends(self, end: str, other: str, processes: Sequence[LinkEnd]) -> None:
        """Refuse unknown ends of a link."""
        ends = (name for process in processes for name in (process.name, process.site))
        names = [*self.by_name, *(copy.name for copy in self.copies)]
        allowed = {*filter(None, ends), *names, *filter(None, map(site_of, names))}
        for name in (end, other):
            if name not in allowed:
                raise ConfigError(
                    f"{name!r} is not a broker, a process or a site: expected one of {', '.join(sorted(allowed))}"
                )

    def delay(self, end: str, other: str, seconds: float, processes: Sequence[LinkEnd]) -> None:
        """Set the latency of the link between two ends.

        Raises:
            ConfigError: An end is not a broker, a replica, a process or a site.
        """
        self.check_ends(end, other, processes)
        self._latencies[frozenset((end, other))] = seconds

    def repeat_frame(self, *, is_repeated: bool) -> bool:
        """Let the next request arrive twice, or no longer; return False if requests do not cross a connection."""
        if self._frames is None:
            return False
        self._frames.repeats_next = is_repeated
        return True

    def latency(self, end: LinkEnd, broker_name: str) -> float:
        """Return the seconds that the link to a broker takes."""
        if not self._latencies:
            return 0.0
        return max(self._latencies.get(pair, 0.0) for pair in _links(end, broker_name))

    def is_cut(self, end: LinkEnd, broker_name: str) -> bool:
        """Return whether the link to a broker or to its site is cut."""
        return bool(self.cuts) and any(pair in self.cuts for pair in _links(end, broker_name))

    def others(self, end: str, processes: Iterable[LinkEnd]) -> list[str]:
        """Return the ends of the links that isolate a broker or a site from everything else."""
        if end in self.by_name:
            copies = {copy.name for copy in self.copies if copy.master_name == end}
            return sorted({process.name for process in processes} | copies)
        outside = {process.site or process.name for process in processes} | set(self.table.sites())
        return sorted(outside - {end})

    def heal(self, end: str, other: str, number: int | None = None) -> bool:
        """End all cuts of the link between two ends, or one of them; return whether this restored the link."""
        pair = frozenset((end, other))
        cuts = self.cuts.get(pair, set())
        ended = cuts & {number} if number is not None else set(cuts)
        cuts -= ended
        if not ended or cuts:
            return False
        del self.cuts[pair]
        self.table.changed()
        for name in self.by_name:
            self._reconnect(name)
        return True

    def names_for(self, process: LinkEnd) -> tuple[str, ...]:
        """Return the names of the brokers that a process can reach, sorted."""
        return tuple(name for name in self.table.broker_names() if not self.is_cut(process, name))

    def reached_broker(self, end: LinkEnd, broker_name: str) -> Broker:
        """Return the broker to which a link leads.

        Raises:
            BrokerUnreachableError: It is down, or the link is cut.
        """
        broker = self.named(broker_name)
        if broker.dead:
            raise BrokerUnreachableError(f"{broker_name} is down")
        if self.is_cut(end, broker_name):
            raise BrokerUnreachableError(f"{broker_name} cannot be reached from {end.label}: the link is cut")
        return broker

    def reached(self, process: LinkEnd, broker_name: str) -> Endpoint:
        """Return the link to a broker for a call of a process; raises the errors of `reached_broker`."""
        broker = self.reached_broker(process, broker_name)
        if self._frames is not None:
            return self._frames.endpoint(process.label, broker)
        route = self.table if process.site is None else self.table.at(process.site)
        return route.endpoint(broker_name)

    # ---- closing

    def close(self) -> None:
        """Close all brokers and replicas that are running."""
        for copy in self.copies:
            copy.replica.close()
        self._close_readers()
        for broker in self.by_name.values():
            broker.close()

    def abandon(self) -> None:
        """Let all brokers and replicas die."""
        for copy in self.copies:
            copy.replica.abandon()
        self._close_readers()
        for broker in self.by_name.values():
            broker.abandon()

    def _close_readers(self) -> None:
        if self._frames is not None:
            self._frames.close()
        for store in (*self._read_only.values(), *(store for stores in self._retired.values() for store in stores)):
            store.close()

    def damage(self) -> list[str]:
        """Return a line for each damaged place in the closed stores."""
        lines = []
        stores = {name: (broker.store.path, broker.store.config) for name, broker in self.by_name.items()}
        stores |= {copy.name: (copy.path, self.by_name[copy.master_name].store.config) for copy in self.copies}
        for name, (path, config) in stores.items():
            prefix = f"{name}: " if len(stores) > 1 else ""
            damage = verify(path, config, self.files).damage
            lines += [f"{prefix}{finding.file} at {finding.offset}: {finding.what}" for finding in damage]
        return lines


def _links(end: LinkEnd, broker_name: str) -> list[frozenset[str]]:
    """Return the links on the way to a broker: of each end, itself and its site."""
    ends, others = {end.name, end.site or end.name}, {broker_name, site_of(broker_name) or broker_name}
    return [frozenset((first, second)) for first in ends for second in others]
