"""Settings of consumers, with the defaults of 4.9's ``DefaultMQPushConsumer``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, TypedDict

from librmq.client import allocate_averagely
from librmq.client.allocation import AllocationStrategy
from librmq.config import Between, Config, Seconds
from librmq.errors import ConfigError
from librmq.files import DiskFiles, Files
from librmq.override import override
from librmq.protocol import ConsumeFrom, MessageModel

_OF_SUBSCRIPTIONS: Final = frozenset({"tags", "sql", "predicate", "batch", "must_return", "weight"})
StartAt: TypeAlias = Literal["first", "last"] | datetime | int
"""The first message, the end, the first message stored at or after a time with a zone, or a queue offset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerConfig(Config):
    """Settings of a consumer. Durations are in seconds; keywords can also be a `timedelta`.

    Sizes are bytes.
    """

    model: MessageModel = MessageModel.CLUSTERING
    """Whether the instances of the group share the messages, or each instance gets all."""
    consume_from: ConsumeFrom = ConsumeFrom.LAST
    """Where the group starts in a queue without stored progress."""
    consume_from_timestamp_ms: Annotated[int | None, Between(0)] = None
    """The start with `ConsumeFrom.TIMESTAMP`; None: half an hour before the consumer was made."""
    start_at: Annotated[StartAt | None, Between(0, (1 << 63) - 1)] = None
    """Where the group starts once, in each topic, with or without progress: ``"first"``, ``"last"``, a time with a
    zone, or a queue offset. The broker keeps a mark, so later starts and further instances continue."""
    strategy: AllocationStrategy = allocate_averagely
    """The strategy that allocates queues to instances (`librmq.client.allocation`)."""
    guard: bool = False
    """Refuse to join a group whose instances have other subscriptions (`GroupMismatchError`)."""

    orderly: bool = False
    """Consume each queue in order, one message at a time, under a lock of the queue; otherwise concurrently."""
    lock_queues: bool = True
    """Whether an orderly consumer uses the broker's locks; without them a rebalance can break the order."""
    threads: Annotated[int, Between(1)] = 20
    """Number of listeners that run in parallel, coroutines too; the keyword ``concurrency`` says the same."""
    rate: Annotated[float | None, Between(0.001, 1_000_000)] = None
    """At most so many messages a second, retries too, over all processes of the group at a store; the lowest of its
    members counts. Over `librmq.connect` each instance counts for itself."""
    burst: Annotated[int | None, Between(1)] = None
    """Messages that may come at once after a rest, with ``rate``; None: those of a tenth of a second."""
    batch_size: Annotated[int, Between(1)] = 1
    """Largest number of messages for one call of a listener; with more than one it gets a list."""
    max_reconsume_times: Annotated[int | None, Between(0)] = None
    """Redeliveries before a message becomes a dead letter. None: the group's setting, 16; for orderly ones no limit."""
    max_process_deaths: Annotated[int | None, Between(0, 100)] = None
    """Ends of the process, by a crash or a kill while the message ran alone, before it becomes a dead letter. 0: none
    makes it one. None: the group's setting, 3."""
    consume_timeout: Annotated[float, Seconds(0.001)] = 900.0
    """Time after which a message that a concurrent listener still has is sent back. The consumer checks at this
    interval, so the message comes again after one to two times this long, plus the delay of its retry, 10 s."""
    suspend_time: Annotated[float, Seconds()] = 1.0
    """Rest of an orderly queue after a failure, from 0.01 to 30."""
    on_damage: Annotated[float | None, Seconds()] = 60.0
    """Time that a queue waits at a message whose record is damaged, before that becomes a dead letter with the damage
    as its cause, and the queue goes on; dropped while broadcasting. None: it waits for a repair or a reset."""

    pull_batch_size: Annotated[int, Between(1)] = 32
    """Largest number of messages of one pull."""
    pull_interval: Annotated[float, Seconds()] = 0.0
    """Time between two pulls of a queue."""
    max_held_messages: Annotated[int, Between(0)] = 1000
    """Pulling stops while a queue holds more messages."""
    max_held_bytes: Annotated[int, Between(0)] = 100 << 20
    """Pulling stops while a queue holds larger bodies in total."""
    max_held_messages_of_topic: Annotated[int | None, Between(0)] = None
    """Limit that the assigned queues of a topic share; replaces ``max_held_messages``."""
    max_held_bytes_of_topic: Annotated[int | None, Between(0)] = None
    """Limit that the assigned queues of a topic share; replaces ``max_held_bytes``."""
    max_span: Annotated[int, Between(0)] = 2000
    """Pulling stops while the held messages span more queue offsets; concurrent only."""

    shutdown_timeout: Annotated[float, Seconds()] = 5.0
    """Time that a shutdown waits for running listeners."""
    offsets_folder: str | None = None
    """Folder for the progress of a broadcasting consumer; None: ``.rocketmq_offsets`` in the user's home, in a kit
    one beside its store."""
    files: Files = field(default_factory=DiskFiles)
    """Files by which progress is written."""

    @override
    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """Return a copy with some settings replaced; those of a subscription are refused with their place."""
        for name in _OF_SUBSCRIPTIONS & settings.keys():
            raise ConfigError(f"{name}: a setting of each subscription, not of the consumer: give it to subscribe")
        if "concurrency" in settings:
            if "threads" in settings:
                raise ConfigError("concurrency: expected it without threads, which is the same")
            settings = {"threads" if name == "concurrency" else name: value for name, value in settings.items()}
        return Config.with_settings(self, settings)

    @override
    def _check_together(self) -> None:
        if isinstance(self.start_at, datetime) and self.start_at.tzinfo is None:
            raise self.refusal("start_at", "a time with a time zone")
        if self.start_at is not None and self.model is MessageModel.BROADCASTING:
            raise ConfigError(
                "start_at: a broadcasting instance keeps its progress in a file of its own, where no mark says that it "
                "was moved: delete the file to start by consume_from"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PullConsumerConfig(ConsumerConfig):
    """Settings of a pull consumer; those for listeners keep their defaults."""

    pull_batch_size: Annotated[int, Between(1)] = 10
    """Largest number of messages of one pull."""
    poll_timeout: Annotated[float, Seconds()] = 5.0
    """Time that a poll waits for the first message."""
    auto_commit: bool = True
    """Whether each poll commits the messages of earlier polls."""

    @override
    def _check_together(self) -> None:
        ConsumerConfig._check_together(self)
        for name in _FOR_LISTENERS:
            if getattr(self, name) != getattr(_DEFAULTS, name):
                raise self.refusal(name, "the default, because a pull consumer has no listeners and holds no messages")


FIXED: Final = {
    "model": "the group's instances agree on it, and it says where progress is kept",
    "consume_from": "it says where the group starts, and queues were taken by it",
    "consume_from_timestamp_ms": "it says where the group starts, and queues were taken by it",
    "start_at": "it says where the group starts, and queues were taken by it",
    "strategy": "all instances of the group share the queues by one strategy",
    "guard": "it is checked at the start",
    "orderly": "messages that are held now were pulled for the other kind of delivery",
    "lock_queues": "queues that are held now were taken with or without locks",
    "offsets_folder": "the progress is there",
    "files": "the progress was opened by them",
}
"""Why a setting of a consumer can't change after its making; the others can."""
_FOR_LISTENERS: Final = (
    "threads",
    "rate",
    "burst",
    "batch_size",
    "max_reconsume_times",
    "consume_timeout",
    "suspend_time",
    "on_damage",
    "pull_interval",
    "max_held_messages",
    "max_held_bytes",
    "max_held_messages_of_topic",
    "max_held_bytes_of_topic",
    "max_span",
)
_DEFAULTS: Final = ConsumerConfig()


class ConsumerKeywords(TypedDict, total=False):
    """Keywords of a `PushConsumer`: the settings of `ConsumerConfig`, for type checkers."""

    model: MessageModel
    consume_from: ConsumeFrom
    consume_from_timestamp_ms: int | None
    start_at: StartAt | None
    strategy: AllocationStrategy
    guard: bool
    orderly: bool
    lock_queues: bool
    threads: int
    concurrency: int
    rate: float | None
    burst: int | None
    batch_size: int
    max_reconsume_times: int | None
    max_process_deaths: int | None
    consume_timeout: float | timedelta
    suspend_time: float | timedelta
    on_damage: float | timedelta | None
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


class PullConsumerKeywords(ConsumerKeywords, total=False):
    """Keywords of a `PullConsumer`: the settings of `PullConsumerConfig`, for type checkers."""

    poll_timeout: float | timedelta
    auto_commit: bool
