"""Deployments over several sites, as drills run them: clusters, their sites, and how a site chooses its cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from librmq.errors import ConfigError
from librmq.protocol import check_site


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
