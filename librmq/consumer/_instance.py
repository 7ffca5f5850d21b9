"""A consumer instance: its interface for its parts, its state for diagnosis, and its gauges."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType, FrameType
from typing import NamedTuple, Protocol

from librmq.client.client import Client
from librmq.client.recorder import ConsumerRecorder
from librmq.consumer._assignment import AssignedQueue
from librmq.consumer._offsets import Offsets
from librmq.consumer.config import ConsumerConfig
from librmq.consumer.listeners import DeliveredMessage, Listener, Listeners
from librmq.errors import RmqError
from librmq.message.lag import queue_lag
from librmq.message.message import MessageQueue
from librmq.metrics import Metrics
from librmq.protocol import HeldQueue, InstanceState, ListenerCall, MaxOffset, Route, Subscription
from librmq.runtime.event_log import EventLog, StateLog
from librmq.runtime.runner import Runner


class ConsumeContext(NamedTuple):
    """A delivery, as passed to a hook."""

    group: str
    queue: MessageQueue
    messages: Sequence[DeliveredMessage]
    """What the listener is called with."""
    listener: Listener
    """The listener, and how it is called."""


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
    recorder: ConsumerRecorder | None
    log: EventLog
    states: StateLog
    offsets: Offsets
    subscriptions: dict[str, Subscription]
    assigned: dict[MessageQueue, AssignedQueue]
    stopping: bool

    @property
    def config(self) -> ConsumerConfig:
        """The settings."""

    @property
    def shares_queues(self) -> bool:
        """Whether rebalancing assigns the queues."""

    def make_assigned(self, queue: MessageQueue, next_offset: int, progress: int | None) -> AssignedQueue:
        """Make the state of a queue before taking it."""

    def save_soon(self) -> None:
        """Schedule the storing of progress."""


class _Rebalancing(Protocol):
    def wake(self) -> None: ...

    def wake_on_grid(self) -> None: ...


class _Fetcher(Protocol):
    def resume_throttled(self, assigned: AssignedQueue, /) -> None: ...


class PushInstance(Instance, Protocol):
    """One instance of a group, as its deliveries see it."""

    listeners: Listeners
    hooks: list[ConsumeHook]
    before_last_attempt: Callable[[DeliveredMessage], object] | None
    loop: asyncio.AbstractEventLoop | None

    @property
    def max_reconsume_times(self) -> int | None:
        """The redeliveries before a message becomes a dead letter; None: the group's setting."""

    @property
    def rebalancing(self) -> _Rebalancing:
        """Assigns queues."""

    @property
    def fetcher(self) -> _Fetcher:
        """Pulls the assigned queues."""

    def progressed(self, assigned: AssignedQueue, progress: int) -> None:
        """Set the progress of a queue, which is stored soon."""


# ---- state for diagnosis


class BlockedQueue(NamedTuple):
    """An orderly queue whose first message keeps failing."""

    queue: MessageQueue
    queue_offset: int
    """The offset of the message."""
    message_id: str
    reconsume_times: int
    """Failed attempts at the message."""


@dataclass(slots=True)
class ConsumerCounts:
    """A consumer's counts of messages."""

    delivered: int = 0
    """Passed to a listener, each attempt counted."""
    consumed: int = 0
    """Consumed successfully."""
    failed: int = 0
    """Attempts that failed."""
    sent_back: int = 0
    """Sent to the group's retry or dead-letter topic after a failure."""
    dropped: int = 0
    """Failures in broadcasting, which has no retries."""


def instance_state(
    member: Instance,
    kind: str,
    *,
    listeners: tuple[ListenerCall, ...] = (),
    running: int = 0,
    is_paused: bool = False,
    started_ms: int = 0,
) -> InstanceState:
    """Return the state of an instance. Call it under the runner's lock."""
    config = member.config
    held = [assigned for assigned in member.assigned.values() if not assigned.released]
    return InstanceState(
        member.client.client_id,
        member.group,
        kind,
        config.model,
        config.orderly,
        is_paused,
        config.threads if kind == "push" else 0,
        running,
        getattr(config.strategy, "__name__", repr(config.strategy)),
        tuple(_held_queue(assigned) for assigned in held),
        listeners,
        started_ms,
    )


def _held_queue(assigned: AssignedQueue) -> HeldQueue:
    messages = assigned.messages
    first = messages.first_begun() or messages.peek()
    since_ms = first.consume_start_timestamp_ms if isinstance(first, DeliveredMessage) else None
    if since_ms is None and assigned.delivering and assigned.since_ms:
        since_ms = assigned.since_ms  # orderly
    return HeldQueue(
        assigned.queue,
        assigned.progress,
        assigned.stored_progress,
        messages.waiting,
        messages.begun,
        None if first is None else first.queue_offset,
        None if first is None else first.message_id,
        since_ms,
        0 if first is None else first.reconsume_times,
        assigned.pulled_timestamp_ms,
        assigned.throttled,
        None if first is None else first.queue_offset + messages.span,
        messages.size,
        assigned.locked,
        assigned.lock_timestamp_ms,
    )


class RunningCall(Protocol):
    """A call of a listener that is running."""

    assigned: AssignedQueue

    @property
    def at_listener(self) -> Sequence[DeliveredMessage]:
        """The messages that the listener has."""


def listener_calls(running: Mapping[int, RunningCall], callers: Collection[CodeType]) -> tuple[ListenerCall, ...]:
    """Return the listeners that threads are running, by the threads' ids, and where each stands.

    ``callers`` have the code that calls listeners; a stack is shown from the last of them on.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    calls = []
    for ident, call in dict(running).items():  # threads begin and end calls meanwhile
        top: FrameType | None = frames.get(ident)
        frame = top
        while frame is not None and frame.f_code not in callers:
            frame = frame.f_back
        if top is None or frame is None or frame is top:  # the call has ended, or not begun
            continue
        stack = [
            f"{entry.filename}:{entry.lineno} {entry.name}"
            for entry in traceback.extract_stack(top, limit=_depth(top, frame))
        ]
        assigned, messages = call.assigned, call.at_listener
        first = messages[0]
        calls.append(
            ListenerCall(
                assigned.queue, first.queue_offset, first.message_id, len(messages), first.consume_start_timestamp_ms,
                names.get(ident, str(ident)), tuple(stack),
            )
        )  # fmt: skip
    return tuple(sorted(calls, key=lambda entry: (entry.queue, entry.queue_offset)))


def _depth(top: FrameType, end: FrameType) -> int:
    """Return the number of frames from ``top`` to ``end``, exclusive."""
    depth, frame = 0, top
    while frame is not end and frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    return depth


# ---- gauges

_GAUGES: dict[str, Callable[[Instance, AssignedQueue], float]] = {
    "queues": lambda member, assigned: 1,
    "waiting_messages": lambda member, assigned: len(assigned.messages),
    "waiting_bytes": lambda member, assigned: assigned.messages.size,
}
"""What an instance holds of a queue, measured under the runner's lock."""


def _lag(member: Instance, topic: str) -> float | None:
    """Return the lag of an instance in its queues of a topic; None if a broker can't be asked for their ends."""
    with member.runner.lock:
        progress = {
            assigned.queue: assigned.next_offset if assigned.progress is None else assigned.progress
            for assigned in _assigned(member, topic)
        }
    lag = 0
    # Without the lock: a broker over TCP may take seconds to answer, in which other turns of the clients go on.
    try:
        for queue, offset in progress.items():
            end = member.client.endpoint(queue.broker_name).call(MaxOffset(queue.topic, queue.queue_id))
            lag += queue_lag(offset, 0, end)
    except RmqError:
        return None
    return lag


def _assigned(member: Instance, topic: str) -> list[AssignedQueue]:
    return [
        assigned for assigned in member.assigned.values() if assigned.queue.topic == topic and not assigned.released
    ]


def show_gauges(member: Instance, metrics: Metrics) -> None:
    """Show the gauges of all subscribed topics until ``metrics.remove_gauges(member)``."""
    for topic in list(member.subscriptions):
        for name, measure in _GAUGES.items():
            metrics.gauge(name, _gauge(member, topic, measure), owner=member, topic=topic, group=member.group)
        metrics.gauge("lag", partial(_lag, member, topic), owner=member, topic=topic, group=member.group)


def _gauge(member: Instance, topic: str, measure: Callable[[Instance, AssignedQueue], float]) -> Callable[[], float]:
    def total() -> float:
        with member.runner.lock:
            return sum(measure(member, assigned) for assigned in _assigned(member, topic))

    return total
