"""A broker in the process: topics, groups, progress, clients, queue locks and long polling over a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.broker.answers import ConnectedClient as ConnectedClient
    from librmq.broker.answers import GroupConnections as GroupConnections
    from librmq.broker.broker import Broker as Broker
    from librmq.broker.config import BrokerConfig as BrokerConfig

_MODULES = {
    "answers": ("ConnectedClient", "GroupConnections"),
    "broker": ("Broker",),
    "config": ("BrokerConfig",),
}
if not TYPE_CHECKING:  # otherwise a type checker would accept any name
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _MODULES)
