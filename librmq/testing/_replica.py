"""A replica in a test: its link to the master, its death, its promotion; and the deployments that drills run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final, Literal, TypeVar

from librmq.broker import Broker
from librmq.cluster import Replica, ReplicaConfig
from librmq.errors import BrokerUnreachableError, ConfigError, ReplicaError
from librmq.message import StoredMessage
from librmq.override import override
from librmq.protocol import Endpoint, LogBytes, Request, check_site, site_of
from librmq.testing._evidence import Evidence
from librmq.testing._kit_runner import KitRunner
from librmq.testing._network import LinkEnd
from librmq.testing._process import KitParts, ProcessStateError

# ---- the link to the master

R = TypeVar("R")


class _MasterLink(Endpoint):
    """Leads to the broker that is open under a name, unless the link is cut."""

    def __init__(self, kit: KitParts, master_name: str, name: str) -> None:
        self._kit = kit
        self._master_name = master_name
        self._end = LinkEnd(name, name)
        self._end.site = site_of(name)

    @override
    def call(self, request: Request[R], /) -> R:
        network = self._kit.network
        answer = network.reached_broker(self._end, self._master_name).call(request)
        if isinstance(answer, LogBytes) and answer.data:
            self._kit.clock.advance(seconds=network.latency(self._end, self._master_name))
        return answer


class KitReplica:
    """The replica of one broker of a test. Created by `Kit.replica`. Not thread-safe."""

    replica: Replica
    """The replica as it was opened last."""

    def __init__(
        self,
        kit: KitParts,
        runner: KitRunner,
        evidence: Evidence,
        master_name: str,
        name: str,
        config: ReplicaConfig | None,
    ) -> None:
        """Copy the broker ``master_name``; ``name`` is the replica's end of their link."""
        self.master_name: str = master_name
        self.name: str = name
        self.path: str = os.path.join(kit.path, "replicas", name)
        """The folder of the copy."""
        self._link = _MasterLink(kit, master_name, name)
        self._kit, self._runner, self._evidence, self._config = kit, runner, evidence, config
        self.open()

    def open(self) -> None:
        """Open the replica again after its death."""
        kit = self._kit
        self.replica = Replica.open(self.path, of=self._link, config=self._config, runner=self._runner, files=kit.files)

    @property
    def dead(self) -> bool:
        """Whether the replica is down."""
        return self.replica.dead

    @property
    def broker(self) -> Broker:
        """The broker that serves reads from the copy."""
        return self.replica.broker

    def follow(self) -> bool:
        """Copy everything that the master has now; return whether the master was reachable."""
        return self.replica.follow()

    def messages(self, topic: str) -> list[StoredMessage]:
        """Return the copied messages of a topic in log order."""
        self._evidence.read_topics.add(topic)
        return list(self.broker.messages(topic))

    def crash(self, *, down: float | timedelta = 0) -> None:
        """Let the replica die, and open it again after ``down`` seconds, or later when its master is back."""
        died = self.replica
        self._kit.note("fault", f"{self.name} dies")
        died.abandon()

        def open_again() -> None:
            if self.replica is not died:
                return
            try:
                self.open()
            except BrokerUnreachableError:
                self._runner.after(1, f"{self.name} is back", open_again)
            else:
                self._kit.note("fault", f"{self.name} is back")
                self._kit.network.replicas_changed()

        self._runner.after(down, f"{self.name} is back", open_again)

    def reconnect(self) -> None:
        """Follow the master again, if it can be reached."""
        if self.dead:
            return
        try:
            self.replica.reconnect(self._link)
        except BrokerUnreachableError:
            return  # the replica tries again
        except ReplicaError as error:
            self._kit.note("fault", f"{self.name} stops: {error}")

    def promote(self) -> Broker:
        """Let the copy take its dead master's place, under the master's name, and return the new broker.

        Raises:
            ProcessStateError: The master runs, or the replica is down.
        """
        network = self._kit.network
        if self.dead or not network.named(self.master_name).dead:
            state = "the replica is down" if self.dead else f"{self.master_name} runs"
            raise ProcessStateError(f"{self.name} cannot be promoted, because {state}: crash only the master")
        self._kit.note("fault", f"{self.name} takes the place of {self.master_name}")
        master = network.store(self.master_name)
        self._kit.history()._keep_messages(network.message_at)
        self.replica.promote()
        promoted = network.replace_broker(self.master_name, self)
        self._kit.history().promoted(promoted, master)
        return promoted


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Clusters, their sites, and how a site chooses its cluster."""

    name: str
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
        clusters={"main": tuple(sites)},
        homes=dict.fromkeys(sites, "main"),
    )


def one_active(sites: Sequence[str] = _TWO) -> Deployment:
    """A cluster at each site. All clients use the first one; an operator switches to the second one manually."""
    return Deployment(
        name="one active",
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
        clusters={site: (site,) for site in sites},
        homes={site: site for site in sites},
    )


def two_active_routed(sites: Sequence[str] = _TWO) -> Deployment:
    """A cluster at each site, and a router that directs a site's producers elsewhere while its cluster is down."""
    return replace(two_active(sites), name="all active, routed", switched="by probe")


def presets(sites: Sequence[str] = _TWO) -> tuple[Deployment, ...]:
    """Return the five deployments that are usually compared."""
    return (
        one_cluster(sites),
        one_active(sites),
        one_active_replicated(sites),
        two_active(sites),
        two_active_routed(sites),
    )


def check_deployment(deployment: Deployment) -> None:
    """Raise `ConfigError` for a deployment that is impossible."""
    for site, cluster in deployment.homes.items():
        check_site(site)
        if cluster not in deployment.clusters:
            raise ConfigError(f"site {site!r}: no cluster serves it: found {cluster!r}")
    for cluster, site in deployment.replicas.items():
        if cluster not in deployment.clusters or site in deployment.clusters[cluster]:
            raise ConfigError(f"replicas: expected another site than those of a cluster, found {cluster!r} at {site!r}")
    if deployment.brokers < 1 or deployment.consumers < 1:
        raise ConfigError("deployment: expected at least one broker and one consumer at each site")
