"""Serve a broker to the official clients of RocketMQ 5, by gRPC.

::

    from librmq.wire.grpc import GrpcServer

    with Broker.open("data") as broker, GrpcServer(broker, port=8081) as server:
        print(server.address)

Needs the extra ``grpc``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.wire.grpc._server import GrpcServer as GrpcServer
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "librmq.wire.grpc._server": ("GrpcServer",),
        },
    )
