"""Connect to a cluster of RocketMQ, or to librmq's server: a route over TCP that librmq's clients take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.wire.remote.remote_route import RemoteRoute as RemoteRoute
    from librmq.wire.remote.remote_route import connect as connect
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "librmq.wire.remote.remote_route": ("RemoteRoute", "connect"),
        },
    )
