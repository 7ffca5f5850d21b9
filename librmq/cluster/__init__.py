"""Several brokers behind one route."""

from __future__ import annotations

from librmq.cluster.routes import RouteTable

__all__ = ["RouteTable"]
