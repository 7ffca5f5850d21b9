"""Settings of a broker: frozen values with 4.9's defaults.

Mirrors ``BrokerConfig`` of the original as far as it concerns what clients see; ``*_s`` are seconds. What shapes the
files is `librmq.config.StoreConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from librmq.delay import DelaySettings
from librmq.errors import ConfigError
from librmq.scheduling.timer import TimerSettings
from librmq.txn import TransactionSettings

__all__ = ["BrokerSettings"]

_LONGEST_S = 86_400 * 365


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """How a broker treats its clients. `ConfigError` names a field that is out of range."""

    auto_create_topic: bool = True
    """Whether a send makes a topic that is not there."""
    auto_create_group: bool = True
    """Whether a consumer makes its group."""
    default_topic_queues: int = 8
    """The most queues that a topic gets which is made by a send."""
    sweep_pulls_every_s: float = 5
    """How often held pulls are answered to whose queue only messages came that do not match."""
    lock_expiry_s: float = 60
    """How long a queue stays locked for a client that does not renew the lock."""
    busy_after_s: float = 1
    """A send is refused as busy while another has been writing for so long."""
    longest_wait_s: float = 0.2
    """A send is refused as busy when it has waited for others' writes for so long."""
    save_offsets_every_s: float = 5
    """From the first change of progress that is not saved to saving all of it."""
    delay: DelaySettings = field(default_factory=DelaySettings)
    """When delayed messages are looked at, and their progress is saved."""
    transactions: TransactionSettings = field(default_factory=TransactionSettings)
    """When half messages are checked."""
    timers: TimerSettings | None = None
    """With settings, a message may name its own time, as in 5.x (`librmq.scheduling.timer`); None is 4.9."""
    hops: bool = False
    """Carry messages of topic ``SYSTEM_SCHEDULE_MSG`` to their time by levels (`librmq.scheduling.relay`)."""
    original_transactions: bool = False
    """End and check transactions as the original does, its harm included: see `librmq.txn.Transactions`."""

    def __post_init__(self) -> None:
        for name in ("auto_create_topic", "auto_create_group", "hops", "original_transactions"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: expected true or false, found {getattr(self, name)!r}")
        queues = self.default_topic_queues
        if type(queues) is not int or not 1 <= queues <= 1 << 16:
            raise ConfigError(f"default_topic_queues: expected a number from 1 to 65536, found {queues!r}")
        for name in ("sweep_pulls_every_s", "lock_expiry_s", "busy_after_s", "longest_wait_s", "save_offsets_every_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_S:
                raise ConfigError(f"{name}: expected seconds from 0 to {_LONGEST_S}, found {value!r}")
        if self.timers is not None and not isinstance(self.timers, TimerSettings):
            raise ConfigError(f"timers: expected TimerSettings, found {self.timers!r}")
        for name, kind in (("delay", DelaySettings), ("transactions", TransactionSettings)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name}: expected {kind.__name__}, found {getattr(self, name)!r}")
