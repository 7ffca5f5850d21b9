"""A broker in the process: topics, groups, progress, clients, queue locks and long polling over a store.

Other rooms take `Broker`, and the routes that it has in common with clusters and connections, from here. What
`librmq.wire` and `librmq.diagnosis` share with a broker is in the modules without underscore.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.broker._administered_route import AdministeredRoute as AdministeredRoute
    from librmq.broker._administered_route import StoreRoute as StoreRoute
    from librmq.broker._broker import Broker as Broker
    from librmq.broker._clients import QueueLocks as QueueLocks
    from librmq.broker.config import BrokerConfig as BrokerConfig
    from librmq.protocol import ConnectedClient as ConnectedClient
    from librmq.protocol import GroupConnections as GroupConnections
    from librmq.scheduling.schedules import Schedule as Schedule
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "librmq.broker._administered_route": ("AdministeredRoute", "StoreRoute"),
            "librmq.broker._broker": ("Broker",),
            "librmq.broker._clients": ("QueueLocks",),
            "librmq.broker.config": ("BrokerConfig",),
            "librmq.protocol": ("ConnectedClient", "GroupConnections"),
            "librmq.scheduling.schedules": ("Schedule",),
        },
    )
