"""Several brokers behind one route, the sites that brokers and clients belong to, and replicas of brokers.

Its face is what it exports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.cluster._cluster import Cluster as Cluster
    from librmq.cluster._cluster import RouteTable as RouteTable
    from librmq.cluster._cluster import SiteRoute as SiteRoute
    from librmq.cluster._replica import Replica as Replica
    from librmq.cluster._replica import ReplicaConfig as ReplicaConfig
    from librmq.cluster._replica import promote_replica as promote_replica
    from librmq.cluster._replica_route import ReplicaRoute as ReplicaRoute
    from librmq.cluster._router import RoutedClient as RoutedClient
    from librmq.cluster._router import SiteRouter as SiteRouter
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "librmq.cluster._cluster": ("Cluster", "RouteTable", "SiteRoute"),
            "librmq.cluster._replica": ("Replica", "ReplicaConfig", "promote_replica"),
            "librmq.cluster._replica_route": ("ReplicaRoute",),
            "librmq.cluster._router": ("RoutedClient", "SiteRouter"),
        },
    )
