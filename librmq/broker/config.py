"""Settings of a broker: frozen values with 4.9's defaults.

Mirrors the part of 4.9.4's ``BrokerConfig`` that clients see. `librmq.config.StoreConfig` shapes the files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from librmq.config import Between, Config, Seconds
from librmq.delay import DelayConfig
from librmq.scheduling.timer import TimerConfig
from librmq.txn import TransactionConfig

__all__ = ["BrokerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig(Config):
    """How a broker treats its clients."""

    auto_create_topic: bool = True
    """Whether a send makes a missing topic."""
    auto_create_group: bool = True
    """Whether a consumer makes its missing group."""
    default_topic_queues: Annotated[int, Between(1, 1 << 16)] = 8
    """The most queues of a topic that a send makes."""
    sweep_pulls_every_s: Annotated[float, Seconds()] = 5
    """How often the broker answers held pulls to whose queue only messages came that do not match."""
    lock_expiry_s: Annotated[float, Seconds()] = 60
    """How long a queue stays locked for a client that does not renew the lock."""
    busy_after_s: Annotated[float, Seconds()] = 1
    """The broker refuses a send as busy while another has been writing for this long."""
    longest_wait_s: Annotated[float, Seconds()] = 0.2
    """The broker refuses a send as busy that has waited for other writes for this long."""
    save_offsets_every_s: Annotated[float, Seconds()] = 5
    """From the first change of progress that is not saved to saving all of it."""
    delay: DelayConfig = field(default_factory=DelayConfig)
    """When the broker looks at delayed messages, and saves their progress."""
    transactions: TransactionConfig = field(default_factory=TransactionConfig)
    """When the broker checks half messages."""
    timers: TimerConfig | None = None
    """With it a message may name a time of its own, as in 5.x: see `librmq.scheduling.timer`. None is 4.9."""
    hops: bool = False
    """Whether levels carry messages to any time, by topic ``SYSTEM_SCHEDULE_MSG``: see `librmq.scheduling.relay`."""
    original_transactions: bool = False
    """End and check transactions exactly as 4.9 does, its losses included: see `librmq.txn.Transactions`."""
