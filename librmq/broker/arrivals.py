"""Notification of everything in a broker that waits for a stored message.

Held pulls can wait for a message, and so can the step that delivers it later (delays, timer, relay, the check of
transactions) and the flush of the store. Code that stores a message calls `Arrivals.stored` once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from librmq.broker.long_polling import HeldPulls
from librmq.message import record
from librmq.metrics import Metrics
from librmq.runtime.runner import Runner
from librmq.store import AppendResult
from librmq.store.engine.dispatch import parse_level
from librmq.store.engine.prepared import Prepared

_DELAY: Final = record.PROPERTY_DELAY


class Arrivals:
    """The observer of one broker's stored messages. Thread-safe."""

    def __init__(
        self,
        runner: Runner,
        held_pulls: HeldPulls,
        metrics: Metrics | None,
        delayed: Callable[[int, int], int],
        wake_flush: Callable[[], None] | None,
    ) -> None:
        """Create an observer with the receivers of its notifications.

        Args:
            runner: Its lock is held while held pulls are notified.
            held_pulls: The held pulls.
            metrics: Counts the messages.
            delayed: ``delayed(level, store_timestamp_ms)`` wakes the schedule, under the runner's lock, and returns the
                level in which the message waits.
            wake_flush: Wakes the step that flushes the store; None if a thread of the store flushes.
        """
        self._runner = runner
        self._held_pulls = held_pulls
        self._held = held_pulls.by_queue
        self._metrics = metrics
        self._delayed = delayed
        self._wake_flush = wake_flush
        self.wake_by_topic: dict[str, Callable[[], None]] = {}
        """The step that handles messages of a topic."""

    def stored(self, topic: str, queue_id: int, properties: Mapping[str, str], result: AppendResult) -> None:
        """Note a message that was stored for a queue; a delayed one is not in it yet."""
        if _DELAY in properties and (level := parse_level(properties[_DELAY])) > 0:
            with self._runner.lock:
                level = self._delayed(level, result.store_timestamp_ms)
            if self._metrics is not None:
                self._metrics.count("delayed_in", level=str(level))
            if self._wake_flush is not None:
                self._wake_flush()
        else:
            self.delivered(topic, queue_id, properties, result)

    def copied(self, queues: Iterable[tuple[str, int]]) -> None:
        """Note messages that a replica has copied into these queues."""
        for queue in queues:
            if queue in self._held:
                with self._runner.lock:
                    self._held_pulls.answer_queue(queue)
        if self._wake_flush is not None:
            self._wake_flush()

    def delivered_all(
        self,
        prepared: Sequence[Prepared],
        properties: Sequence[Mapping[str, str]],
        results: Sequence[AppendResult],
    ) -> None:
        """Note messages that were stored together: the first of these, as many as there are results."""
        if self._held or self._metrics is not None or self._wake_flush is not None:
            for message, message_properties, result in zip(prepared, properties, results, strict=False):
                self.delivered(message.lane.topic, message.lane.queue_id, message_properties, result)

    def delivered(self, topic: str, queue_id: int, properties: Mapping[str, str], result: AppendResult) -> None:
        """Note a message that is in its queue, whatever delay its properties name."""
        if self._metrics is not None:
            self._metrics.count("messages_in", topic=topic)
            self._metrics.count("bytes_in", result.size, topic=topic)
        if topic in self.wake_by_topic:
            self.wake_by_topic[topic]()
        queue = topic, queue_id
        if queue in self._held:
            with self._runner.lock:
                self._held_pulls.arrived(queue, properties, result)
        if self._wake_flush is not None:
            self._wake_flush()
