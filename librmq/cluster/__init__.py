"""Several brokers behind one route, the sites that brokers and clients belong to, and replicas of brokers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.cluster.cluster import Cluster as Cluster
    from librmq.cluster.cluster import RouteTable as RouteTable
    from librmq.cluster.replica import Replica as Replica
    from librmq.cluster.replica import ReplicaConfig as ReplicaConfig
    from librmq.cluster.replica import StoredMaster as StoredMaster
    from librmq.cluster.replica import promote_replica as promote_replica
    from librmq.cluster.replica_route import ReplicaRoute as ReplicaRoute
    from librmq.cluster.router import RoutedClient as RoutedClient
    from librmq.cluster.router import SiteRouter as SiteRouter
    from librmq.cluster.router import Switch as Switch
    from librmq.cluster.sites import SiteRoute as SiteRoute
    from librmq.cluster.sites import site_of as site_of
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "librmq.cluster.cluster": ("Cluster", "RouteTable"),
            "librmq.cluster.replica": ("Replica", "ReplicaConfig", "StoredMaster", "promote_replica"),
            "librmq.cluster.replica_route": ("ReplicaRoute",),
            "librmq.cluster.router": ("RoutedClient", "SiteRouter", "Switch"),
            "librmq.cluster.sites": ("SiteRoute", "site_of"),
        },
    )
