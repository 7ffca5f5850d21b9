"""A cluster of one process: named brokers behind one route, each with its own store and store host."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from typing import Final, Self

from librmq.broker import Broker, BrokerConfig
from librmq.cluster.routes import RouteTable
from librmq.config import StoreConfig
from librmq.errors import ConfigError, NoRouteError
from librmq.files.disk import DiskFiles
from librmq.files.seam import Files
from librmq.metrics import Metrics
from librmq.runtime.runner import Runner
from librmq.runtime.threads import ThreadRunner

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
        if not isinstance(brokers, Iterable):
            raise ConfigError(f"brokers: expected names such as ['broker-a', 'broker-b'], found {brokers!r:.80}")
        names = [brokers] if isinstance(brokers, str) else list(brokers)
        _check(names)
        with ExitStack() as undo:
            own_runner = None
            if runner is None:
                own_runner = runner = ThreadRunner()
                undo.callback(own_runner.shutdown)
            cluster = object.__new__(cls)
            cluster.name, cluster._path, cluster._own_runner = name, os.fspath(path), own_runner
            cluster._broker_config, cluster._store_config = config, store_config or StoreConfig()
            cluster._files, cluster._metrics = files or DiskFiles(), metrics
            opened = []
            for broker_name in names:
                opened.append(cluster._open(broker_name, runner))
                undo.callback(opened[-1].close)
            RouteTable.__init__(cluster, *opened)
            undo.pop_all()
            return cluster

    def _open(self, name: str, runner: Runner) -> Broker:
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
        for broker in self.brokers():
            if broker.name == name:
                return broker
        names = ", ".join(broker.name for broker in self.brokers())
        raise NoRouteError(f"unknown broker {name!r}; expected one of {names}")

    def add_broker(self, name: str) -> Broker:
        """Open one more broker, which clients notice at their next update of the route.

        Raises:
            ConfigError: The cluster has a broker with that name, or the name can't name a folder; nothing was
                opened.
        """
        _check([*(broker.name for broker in self.brokers()), name])
        broker = self._open(name, self.runner)
        self.add(broker)
        return broker

    def create_topic(self, topic: str, queues: int = 8) -> None:
        """Create a topic with ``queues`` queues in each broker that is up."""
        for broker in self.brokers():
            if not broker.dead:
                broker.create_topic(topic, queues)

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
        broker = self._open(name, self.runner)
        self.add(broker)
        return broker

    def close(self) -> None:
        """Close all brokers; shut down their clients first. A second call does nothing."""
        with ExitStack() as last:
            if self._own_runner is not None:
                last.callback(self._own_runner.shutdown)
            for broker in self.brokers():
                last.callback(broker.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Cluster {self.name!r}: {', '.join(broker.name for broker in self.brokers())}>"


def _check(names: Sequence[object]) -> None:
    """Refuse invalid names before any broker is opened."""
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
