"""Several brokers behind one route, and the sites that brokers and clients belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.cluster.cluster import Cluster as Cluster
    from librmq.cluster.routes import RouteTable as RouteTable
    from librmq.cluster.site_route import SiteRoute as SiteRoute
    from librmq.cluster.sites import site_of as site_of

_MODULES = {
    "cluster": ("Cluster",),
    "routes": ("RouteTable",),
    "site_route": ("SiteRoute",),
    "sites": ("site_of",),
}
if not TYPE_CHECKING:  # otherwise a type checker would accept any name
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _MODULES)
