"""What the parts of one broker share, so that each takes one argument for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from librmq.broker.config import BrokerConfig
from librmq.broker.groups import Groups
from librmq.broker.long_polling import Holds
from librmq.broker.offsets import GroupOffsets
from librmq.broker.registry import Registry
from librmq.broker.topics import Topics
from librmq.metrics import Metrics
from librmq.runtime.runner import Runner
from librmq.store import MessageStore

if TYPE_CHECKING:
    from librmq.filter import Registrations

__all__ = ["BrokerContext"]


@dataclass(frozen=True, slots=True)
class BrokerContext:
    """One broker's names, settings, store and tables."""

    name: str
    cluster_name: str
    config: BrokerConfig
    runner: Runner
    store: MessageStore
    metrics: Metrics | None
    topics: Topics
    groups: Groups
    offsets: GroupOffsets
    registry: Registry
    registrations: Registrations
    holds: Holds
