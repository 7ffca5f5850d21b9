"""Several brokers behind one route, the sites that brokers and clients belong to, and replicas of brokers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.cluster.cluster import Cluster as Cluster
    from librmq.cluster.replica import Replica as Replica
    from librmq.cluster.replica import promote_replica as promote_replica
    from librmq.cluster.replica_config import ReplicaConfig as ReplicaConfig
    from librmq.cluster.replica_route import ReplicaRoute as ReplicaRoute
    from librmq.cluster.router import RoutedClient as RoutedClient
    from librmq.cluster.router import SiteRouter as SiteRouter
    from librmq.cluster.router import Switch as Switch
    from librmq.cluster.routes import RouteTable as RouteTable
    from librmq.cluster.site_route import SiteRoute as SiteRoute
    from librmq.cluster.sites import site_of as site_of
    from librmq.cluster.stored_master import StoredMaster as StoredMaster

_MODULES = {
    "cluster": ("Cluster",),
    "replica": ("Replica", "promote_replica"),
    "replica_config": ("ReplicaConfig",),
    "replica_route": ("ReplicaRoute",),
    "router": ("RoutedClient", "SiteRouter", "Switch"),
    "routes": ("RouteTable",),
    "site_route": ("SiteRoute",),
    "sites": ("site_of",),
    "stored_master": ("StoredMaster",),
}
if not TYPE_CHECKING:  # otherwise a type checker would accept any name
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _MODULES)
