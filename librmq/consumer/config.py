"""How a consumer consumes: settings with 4.9's defaults, which stand in ``DefaultMQPushConsumer``."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, TypeVar

from librmq.client.allocation import AllocationStrategy, allocate_averagely
from librmq.errors import ConfigError
from librmq.files.disk import DiskFiles
from librmq.files.seam import Files
from librmq.protocol import ConsumeFrom, MessageModel

__all__ = ["ConsumerConfig", "PullConsumerConfig"]

_C = TypeVar("_C", bound="ConsumerConfig")
_POSITIVE: Final = ("threads", "batch_size", "pull_batch_size", "consume_timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerConfig:
    """Settings of a consumer. Durations are seconds, sizes bytes."""

    model: MessageModel = MessageModel.CLUSTERING
    """Whether the instances of the group share the messages, or each gets all."""
    consume_from: ConsumeFrom = ConsumeFrom.LAST
    """Where the group starts in a queue of which no progress is stored."""
    consume_from_timestamp_ms: int | None = None
    """With `ConsumeFrom.TIMESTAMP`; None: half an hour before the consumer was made."""
    strategy: AllocationStrategy = allocate_averagely
    """Which queues are this instance's (`librmq.client.allocation`)."""
    guard: bool = False
    """Refuse to join a group whose instances subscribe to something else (`GroupMismatchError`)."""

    orderly: bool = False
    """One message of a queue at a time, in order, under a lock of the queue; else concurrently."""
    lock_queues: bool = True
    """Off: an orderly consumer does without the broker's locks, and a rebalance mixes up the order."""
    threads: int = 20
    """So many listeners run at once."""
    batch_size: int = 1
    """A listener gets up to so many messages at once; more than one: as a list."""
    max_reconsume_times: int | None = None
    """Redeliveries before a message becomes a dead letter. None: the group's, 16; of an orderly consumer: no end."""
    consume_timeout: float = 900.0
    """A message that a concurrent listener has had for longer is sent back, to be delivered again."""
    suspend_time: float = 1.0
    """So long an orderly queue rests after a failure, 0.01 to 30."""

    pull_batch_size: int = 32
    """Messages asked for at once."""
    pull_interval: float = 0.0
    """Rest between two pulls of a queue."""
    max_held_messages: int = 1000
    """Pulling stops while a queue holds more."""
    max_held_bytes: int = 100 << 20
    """Pulling stops while the bodies that a queue holds are more."""
    max_held_messages_of_topic: int | None = None
    """Shared out among the queues held; takes the place of ``max_held_messages``."""
    max_held_bytes_of_topic: int | None = None
    """Shared out among the queues held; takes the place of ``max_held_bytes``."""
    max_span: int = 2000
    """Pulling stops while more queue offsets lie between the first and the last message held; concurrent only."""

    shutdown_timeout: float = 5.0
    """So long a shutdown waits for listeners that run."""
    offsets_folder: str | None = None
    """Where a broadcasting consumer keeps its progress; None: ``.rocketmq_offsets`` in the user's home."""
    files: Files = field(default_factory=DiskFiles)

    def __post_init__(self) -> None:
        for name in (one.name for one in fields(self)):
            value = getattr(self, name)
            if isinstance(value, int | float) and value < (1 if name in _POSITIVE else 0):
                raise ConfigError(f"{name}: {value!r} is too small")
        for name, kind in (("model", MessageModel), ("consume_from", ConsumeFrom)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name}: expected a {kind.__name__}, found {getattr(self, name)!r}")
        if not callable(self.strategy):
            raise ConfigError(f"strategy: expected a function, found {self.strategy!r}")

    def with_settings(self: _C, settings: dict[str, Any]) -> _C:
        """A copy with other settings; `ConfigError` for one that is unknown."""
        known = {one.name for one in fields(self)}
        if unknown := settings.keys() - known:
            raise ConfigError(f"unknown setting {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}")
        return replace(self, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullConsumerConfig(ConsumerConfig):
    """Settings of a pull consumer; those of listeners mean nothing to it."""

    pull_batch_size: int = 10
    poll_timeout: float = 5.0
    """So long a poll waits for the first message."""
    auto_commit: bool = True
    """Each poll commits what the ones before it gave."""
