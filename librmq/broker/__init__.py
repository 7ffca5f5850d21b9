"""A broker in the process: topics, groups, progress, clients, locks and held pulls over a store."""

from __future__ import annotations

from librmq.broker.broker import Broker
from librmq.broker.config import BrokerConfig

__all__ = ["Broker", "BrokerConfig"]
