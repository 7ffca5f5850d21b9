"""A queue that rebalancing assigned to a consumer, and the consumer's position in it."""

from __future__ import annotations

from collections.abc import Callable

from librmq.consumer.processqueue import ProcessQueue
from librmq.message.message import MessageQueue
from librmq.message.topics import RETRY_PREFIX
from librmq.protocol import Endpoint
from librmq.runtime.runner import Step


class AssignedQueue:
    """One queue from its assignment until it is released. Changed under the runner's lock."""

    __slots__ = (
        "delivering",
        "endpoint",
        "idle_since_ms",
        "is_retry",
        "label",
        "lock_timestamp_ms",
        "locked",
        "lost",
        "messages",
        "next_offset",
        "notify",
        "owned_timestamp_ms",
        "progress",
        "pull",
        "pulled_timestamp_ms",
        "queue",
        "release_until_ms",
        "released",
        "running",
        "since_ms",
        "stored_progress",
        "throttled",
    )

    def __init__(self, queue: MessageQueue, next_offset: int, progress: int | None, pull: Step) -> None:
        self.queue = queue
        self.is_retry = queue.topic.startswith(RETRY_PREFIX)
        self.label = f"{queue.topic}/{queue.broker_name}/{queue.queue_id}"
        self.messages = ProcessQueue(queue)
        self.next_offset = next_offset
        """Queue offset of the next pull."""
        self.pull = pull
        self.notify: Callable[[], None] | None = None
        """Brokers call this when a held pull should be repeated."""
        self.pulled_timestamp_ms = 0
        self.lost = False
        """Whether the last pull failed unexpectedly; none is running, and only a rebalance starts the next one."""
        self.endpoint: Endpoint | None = None
        """The broker of the last pull."""
        self.idle_since_ms: int | None = None
        """Time since which a pull is held while skipped messages are not yet part of the progress."""
        self.throttled = False
        """Whether pulling has stopped because too much is held."""
        self.progress = progress
        """The queue offset of the next message to consume; None before the first consumed message."""
        self.stored_progress: int | None = None
        """The last stored progress."""
        self.released = False
        """Whether the queue is released: nothing begins, and results of running listeners are ignored."""
        self.locked = False
        """Whether the broker has locked the queue for this client."""
        self.lock_timestamp_ms: int | None = None
        self.owned_timestamp_ms = 0
        """Orderly: when the broker last confirmed this client's lock."""
        self.delivering = False
        """Orderly: whether a listener has a message of the queue, the queue waits for a listener, or it rests."""
        self.running = False
        """Orderly: whether a listener runs or is about to."""
        self.since_ms = 0
        """Orderly: time since which listeners have run without a rest."""
        self.release_until_ms = 0
        """Latest end of a listener that still runs in a released queue; then the next rebalance unlocks it."""

    def __repr__(self) -> str:
        state = "released" if self.released else "locked" if self.locked else "assigned"
        return f"AssignedQueue({self.label}, {state}, next_offset={self.next_offset}, progress={self.progress})"
