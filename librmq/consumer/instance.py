"""The interface of a consumer instance for its parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

from librmq.client.client import Client
from librmq.consumer.assignment import AssignedQueue
from librmq.consumer.config import ConsumerConfig
from librmq.consumer.listeners import DeliveredMessage, Listeners
from librmq.consumer.offsets import Offsets
from librmq.filter import TagFilter
from librmq.message.message import MessageQueue, StoredMessage
from librmq.metrics import Metrics
from librmq.protocol import Route, Subscription
from librmq.runtime.event_log import EventLog, StateLog
from librmq.runtime.runner import Runner


class ConsumeContext(NamedTuple):
    """A delivery, as passed to a hook."""

    group: str
    """The consumer group."""
    queue: MessageQueue
    """The queue of the messages."""
    messages: Sequence[DeliveredMessage]
    """What the listener is called with."""


ConsumeHook = Callable[[ConsumeContext], Callable[[object, Exception | None], None] | None]
"""A function called before a listener; it returns a function that gets the listener's result or exception.

An exception of a hook counts as a failure of the listener."""


class Instance(Hashable, Protocol):
    """One instance of a group, as rebalancing and gauges see it."""

    group: str
    label: str
    route: Route
    runner: Runner
    client: Client
    metrics: Metrics | None
    log: EventLog
    states: StateLog
    offsets: Offsets
    subscriptions: dict[str, Subscription]
    assigned: dict[MessageQueue, AssignedQueue]
    stopping: bool

    @property
    def config(self) -> ConsumerConfig:
        """The settings."""
        ...

    @property
    def shares_queues(self) -> bool:
        """Whether rebalancing assigns the queues."""
        ...

    def make_assigned(self, queue: MessageQueue, next_offset: int, progress: int | None) -> AssignedQueue:
        """Make the state of a queue before taking it."""
        ...


class _Rebalancing(Protocol):
    def wake(self) -> None: ...

    def wake_on_grid(self) -> None: ...


class _PullRequests(Protocol):
    def resume_throttled(self, assigned: AssignedQueue, /) -> None: ...


class _Delivery(Protocol):
    def may_pull(self, assigned: AssignedQueue, now_ms: int, /) -> bool: ...

    def pulled(self, assigned: AssignedQueue, count: int, now_ms: int, /) -> None: ...

    def try_begin(
        self, assigned: AssignedQueue, message: StoredMessage, bounds: tuple[int, int], now_ms: int, /
    ) -> bool: ...


class PushInstance(Instance, Protocol):
    """One instance of a group, as its pulls and deliveries see it."""

    listeners: Listeners
    filters: dict[str, TagFilter]
    hooks: list[ConsumeHook]
    before_last_attempt: Callable[[DeliveredMessage], object] | None
    loop: asyncio.AbstractEventLoop | None
    is_paused: bool

    @property
    def rebalancing(self) -> _Rebalancing:
        """Assigns queues."""
        ...

    @property
    def pull_requests(self) -> _PullRequests:
        """Pulls the assigned queues."""
        ...

    @property
    def delivery(self) -> _Delivery:
        """Delivers messages to listeners."""
        ...

    def progressed(self, assigned: AssignedQueue, progress: int) -> None:
        """Set the progress of a queue, which is stored soon."""
        ...

    def reassign(self, assigned: AssignedQueue) -> None:
        """Release a queue after its progress was set from outside."""
        ...
