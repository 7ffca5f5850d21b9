"""Settings of consumers, with the defaults of 4.9's ``DefaultMQPushConsumer``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any, Final, Self, TypedDict

from librmq.client.allocation import AllocationStrategy, allocate_averagely
from librmq.config import Between, Config, Seconds, to_seconds
from librmq.files.disk import DiskFiles
from librmq.files.seam import Files
from librmq.protocol import ConsumeFrom, MessageModel

__all__ = ["ConsumerConfig", "ConsumerSettings", "PullConsumerConfig", "PullConsumerSettings"]

_DURATIONS: Final = ("consume_timeout", "suspend_time", "pull_interval", "shutdown_timeout", "poll_timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerConfig(Config):
    """Settings of a consumer. Durations are seconds, or a `timedelta` where a consumer takes them as keywords.

    Sizes are bytes.
    """

    model: MessageModel = MessageModel.CLUSTERING
    """Whether the instances of the group share the messages, or each gets all."""
    consume_from: ConsumeFrom = ConsumeFrom.LAST
    """Where the group starts in a queue of which no progress is stored."""
    consume_from_timestamp_ms: Annotated[int | None, Between(0)] = None
    """With `ConsumeFrom.TIMESTAMP`; None: half an hour before the consumer was made."""
    strategy: AllocationStrategy = allocate_averagely
    """Which queues are this instance's (`librmq.client.allocation`)."""
    guard: bool = False
    """Refuse to join a group whose instances subscribe to something else (`GroupMismatchError`)."""

    orderly: bool = False
    """One message of a queue at a time, in order, under a lock of the queue; else concurrently."""
    lock_queues: bool = True
    """Off: an orderly consumer does without the broker's locks, and a rebalance mixes up the order."""
    threads: Annotated[int, Between(1)] = 20
    """Listeners that run at once."""
    batch_size: Annotated[int, Between(1)] = 1
    """Messages that a listener gets at once, at most; with more than one it gets a list."""
    max_reconsume_times: Annotated[int | None, Between(0)] = None
    """Redeliveries before a message becomes a dead letter. None: the group's, 16; of an orderly consumer: no end."""
    consume_timeout: Annotated[float, Seconds(0.001)] = 900.0
    """A message that a concurrent listener has had for longer is sent back, to be delivered again."""
    suspend_time: Annotated[float, Seconds()] = 1.0
    """Rest of an orderly queue after a failure, 0.01 to 30."""

    pull_batch_size: Annotated[int, Between(1)] = 32
    """Messages asked for at once."""
    pull_interval: Annotated[float, Seconds()] = 0.0
    """Rest between two pulls of a queue."""
    max_held_messages: Annotated[int, Between(0)] = 1000
    """Pulling stops while a queue holds more."""
    max_held_bytes: Annotated[int, Between(0)] = 100 << 20
    """Pulling stops while the bodies that a queue holds are more."""
    max_held_messages_of_topic: Annotated[int | None, Between(0)] = None
    """Shared out among the assigned queues; takes the place of ``max_held_messages``."""
    max_held_bytes_of_topic: Annotated[int | None, Between(0)] = None
    """Shared out among the assigned queues; takes the place of ``max_held_bytes``."""
    max_span: Annotated[int, Between(0)] = 2000
    """Pulling stops while more queue offsets lie between the first and the last message held; concurrent only."""

    shutdown_timeout: Annotated[float, Seconds()] = 5.0
    """Wait of a shutdown for running listeners."""
    offsets_folder: str | None = None
    """Where a broadcasting consumer keeps its progress; None: ``.rocketmq_offsets`` in the user's home."""
    files: Files = field(default_factory=DiskFiles)
    """Where progress files are written."""

    @classmethod
    def of(cls, config: Self | None, settings: Mapping[str, object]) -> Self:
        """Return ``config``, or the defaults, with keywords in place of some settings.

        Raises:
            ConfigError: There is no such setting, or its value is refused.
        """
        given: dict[str, Any] = dict(settings)
        for name in _DURATIONS:
            if isinstance(given.get(name), timedelta):
                given[name] = to_seconds(name, given[name])
        return cls.given_or_default(config).with_settings(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullConsumerConfig(ConsumerConfig):
    """Settings of a pull consumer; those of listeners mean nothing to it."""

    pull_batch_size: Annotated[int, Between(1)] = 10
    poll_timeout: Annotated[float, Seconds()] = 5.0
    """Wait of a poll for the first message."""
    auto_commit: bool = True
    """Each poll commits what the ones before it gave."""


class ConsumerSettings(TypedDict, total=False):
    """Keywords of a `PushConsumer`: the settings of `ConsumerConfig`, for type checkers."""

    model: MessageModel
    consume_from: ConsumeFrom
    consume_from_timestamp_ms: int | None
    strategy: AllocationStrategy
    guard: bool
    orderly: bool
    lock_queues: bool
    threads: int
    batch_size: int
    max_reconsume_times: int | None
    consume_timeout: float | timedelta
    suspend_time: float | timedelta
    pull_batch_size: int
    pull_interval: float | timedelta
    max_held_messages: int
    max_held_bytes: int
    max_held_messages_of_topic: int | None
    max_held_bytes_of_topic: int | None
    max_span: int
    shutdown_timeout: float | timedelta
    offsets_folder: str | None
    files: Files


class PullConsumerSettings(ConsumerSettings, total=False):
    """Keywords of a `PullConsumer`: the settings of `PullConsumerConfig`, for type checkers."""

    poll_timeout: float | timedelta
    auto_commit: bool
