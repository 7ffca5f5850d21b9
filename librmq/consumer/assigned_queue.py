"""Queue that a consumer was assigned: what rebalancing gave it, and how far it has come there."""

from __future__ import annotations

from collections.abc import Callable

from librmq.consumer.processqueue import ProcessQueue
from librmq.message.message import MessageQueue
from librmq.message.topics import RETRY_PREFIX
from librmq.protocol import Endpoint
from librmq.runtime.runner import Step

__all__ = ["AssignedQueue"]


class AssignedQueue:
    """One queue, from its assignment until it is given up. Changed under the runner's lock."""

    __slots__ = (
        "delivering",
        "dropped",
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
        "running",
        "since_ms",
        "throttled",
        "told",
    )

    def __init__(self, queue: MessageQueue, next_offset: int, progress: int | None, pull: Step) -> None:
        self.queue = queue
        self.is_retry = queue.topic.startswith(RETRY_PREFIX)
        self.label = f"{queue.topic}/{queue.broker_name}/{queue.queue_id}"
        self.messages = ProcessQueue(queue)
        self.next_offset = next_offset
        """Where to pull next."""
        self.pull = pull
        self.notify: Callable[[], None] | None = None
        """What brokers call when a pull that they held is worth asking again."""
        self.pulled_timestamp_ms = 0
        self.lost = False
        """Its last pull failed unexpectedly: none is under way, and only a rebalance begins one."""
        self.endpoint: Endpoint | None = None
        """The broker that was asked last."""
        self.idle_since_ms: int | None = None
        """Since when a pull is held though something was passed over that progress does not tell yet."""
        self.throttled = False
        """Pulling has stopped until less is held."""
        self.progress = progress
        """The queue offset of the next message to be consumed; None as long as nothing was."""
        self.told: int | None = None
        """The progress as it was last stored."""
        self.dropped = False
        """Given up: nothing begins, results of what runs are ignored."""
        self.locked = False
        """The broker has locked the queue for this client."""
        self.lock_timestamp_ms: int | None = None
        self.owned_timestamp_ms = 0
        """Orderly: when the broker last said that the queue is this client's."""
        self.delivering = False
        """Orderly: a listener has a message of it, or it waits for one, or it rests."""
        self.running = False
        """Orderly: a listener is at work, or about to be."""
        self.since_ms = 0
        """Orderly: since when listeners have worked on it without a rest."""
        self.release_until_ms = 0
        """Dropped while its listener runs: released when the listener ends by this time, else by the next rebalance."""

    def __repr__(self) -> str:
        state = "dropped" if self.dropped else "locked" if self.locked else "assigned"
        return f"AssignedQueue({self.label}, {state}, next_offset={self.next_offset}, progress={self.progress})"
