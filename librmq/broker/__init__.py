"""A broker in the process: topics, groups, progress, clients, queue locks and long polling over a store."""

from __future__ import annotations

from librmq.lazy_exports import lazy_exports

with lazy_exports(globals()):
    from librmq.broker.broker import Broker as Broker
    from librmq.broker.clients import ConnectedClient as ConnectedClient
    from librmq.broker.clients import GroupConnections as GroupConnections
    from librmq.broker.clients import QueueLocks as QueueLocks
    from librmq.broker.config import BrokerConfig as BrokerConfig
