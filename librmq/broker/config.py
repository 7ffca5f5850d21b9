"""Settings of a broker: frozen values with 4.9's defaults.

Mirrors the part of 4.9.4's ``BrokerConfig`` that clients notice. `librmq.config.StoreConfig` shapes the files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

from librmq.config import Between, Config, Seconds, StoreConfig
from librmq.delay import DelayConfig
from librmq.scheduling.timer_config import TimerConfig
from librmq.txn import TransactionConfig

if TYPE_CHECKING:
    from librmq.clock import Clock
    from librmq.files.interface import Files
    from librmq.metrics import Metrics
    from librmq.runtime.runner import Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig(Config):
    """Settings of a broker for its clients."""

    auto_create_topic: bool = True
    """Whether a send creates a missing topic."""
    auto_create_group: bool = True
    """Whether a consumer creates its missing group."""
    default_topic_queues: Annotated[int, Between(1, 1 << 16)] = 8
    """Largest number of queues of a topic that a send creates."""
    expected_consumers: Annotated[int, Between(1, 8192)] = 32
    """Groups with SQL filters for which the bitmap of a message has room; 4.9's ``expectConsumerNumUseFilter``."""
    bloom_error: Annotated[int, Between(1, 99)] = 20
    """Percent of messages that a full bitmap does not spare a group from reading; ``maxErrorRateOfBloomFilter``."""
    sweep_pulls_every_s: Annotated[float, Seconds()] = 5
    """Interval at which held pulls are answered if only messages that do not match were stored."""
    lock_expiry_s: Annotated[float, Seconds()] = 60
    """Time until the lock of a queue expires unless the client renews it."""
    busy_after_s: Annotated[float, Seconds()] = 1
    """Time that another write may take before a send is refused as busy."""
    longest_wait_s: Annotated[float, Seconds()] = 0.2
    """Time that a send may wait for other writes before it is refused as busy."""
    save_offsets_every_s: Annotated[float, Seconds()] = 5
    """Time from the first unsaved change of progress to saving all of it."""
    replication: Literal["async", "sync"] = "async"
    """When a send is answered: with ``sync`` when a replica has the message too, or with a status that says why not."""
    replica_timeout_s: Annotated[float, Seconds()] = 3
    """Time that a send waits for a replica, before its status is FLUSH_SLAVE_TIMEOUT."""
    replica_max_lag: Annotated[int, Between(0)] = 256 << 20
    """Bytes that the nearest replica may lack, before the status of a send is SLAVE_NOT_AVAILABLE."""
    replica_expiry_s: Annotated[float, Seconds()] = 20
    """Time after which a replica with unread bytes counts as gone, unless it requests them."""
    replica_of: str | None = None
    """Name of the master whose log this broker's store copies: it answers reads only. `librmq.cluster.Replica` opens
    it so."""
    delay: DelayConfig = field(default_factory=DelayConfig)
    """Times at which delayed messages are checked and their progress is saved."""
    transactions: TransactionConfig = field(default_factory=TransactionConfig)
    """Times of the checks of half messages."""
    timers: TimerConfig | None = None
    """Settings of a timer, by which a message can name its delivery time, as in 5.x. None: a store that librmq made has
    a timer with the default settings, unless ``hops`` is on; a broker's directory has none, as in 4.9."""
    hops: bool = False
    """Whether levels deliver messages at any time, by topic ``SYSTEM_SCHEDULE_MSG``: see `librmq.scheduling.relay`."""
    drop_resends_within: Annotated[timedelta | float | None, Seconds(0.001)] = None
    """Time in which a further send of a unique id to its topic gets the first one's answer and is not stored. None
    stores every send, as 4.9 does. A send that was cancelled or rolled back does not count. The broker keeps at
    most 524,288 ids."""
    original_transactions: bool = False
    """End and check transactions exactly like 4.9, including its losses: see `librmq.txn.Transactions`."""


class OpenKeywords(TypedDict, total=False):
    """Keywords of `Broker.open` and `Broker.open_async`, for type checkers."""

    name: str
    cluster_name: str
    store_config: StoreConfig | None
    runner: Runner | None
    clock: Clock | None
    files: Files | None
    metrics: Metrics | None
    wait: float | timedelta
