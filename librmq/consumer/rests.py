"""Rests: a consumer, or some of its queues, starts no messages for a while because a downstream service is down."""

from __future__ import annotations

from collections.abc import Callable

from librmq.consumer.instance import Instance
from librmq.listener import DownstreamDown
from librmq.message.message import MessageQueue
from librmq.runtime.runner import Step


class Rests:
    """The rests of one consumer. Its methods are called under the runner's lock."""

    def __init__(self, consumer: Instance, resumed: Callable[[int], None]) -> None:
        """``resumed(now_ms)`` is called when a rest ends."""
        self._consumer = consumer
        self._resumed = resumed
        self._times: dict[MessageQueue | None, tuple[int, int]] = {}  # begin and end; None is the whole consumer
        self.is_probing = False
        """Whether the next call decides if the whole consumer continues."""
        self._step = Step(f"{consumer.label} resume", self._resume, consumer.client)

    @property
    def is_whole(self) -> bool:
        """Whether the whole consumer rests."""
        return None in self._times

    def __contains__(self, queue: MessageQueue) -> bool:
        """Return whether a queue rests."""
        return bool(self._times) and (None in self._times or queue in self._times)

    def begin(self, error: DownstreamDown, queue: MessageQueue) -> int:
        """Begin a rest and return its length in milliseconds; only the first in a row is logged as a warning."""
        consumer, key = self._consumer, queue if error.only_queue else None
        now_ms, rest_ms = consumer.runner.now_ms(), max(1, round(1000 * error.seconds))
        self._times[key] = now_ms, now_ms + rest_ms
        self.is_probing |= key is None
        consumer.states.failing(("downstream",), "what listeners call", error, again_ms=rest_ms)
        if consumer.metrics is not None:
            consumer.metrics.count("rests", topic=queue.topic, group=consumer.group)
        consumer.runner.wake(self._step, min(end for _, end in self._times.values()))
        return rest_ms

    def succeeded(self) -> None:
        """Note a successful call, which ends the probing."""
        if not self._times:
            self.is_probing = False
            self._consumer.states.works(("downstream",), "what listeners call")

    def _resume(self, now_ms: int) -> int | None:
        for key, (begin, end) in list(self._times.items()):
            if not begin <= now_ms < end:  # earlier than its begin, because the clock was set back
                del self._times[key]
        self._resumed(now_ms)
        return min((end for _, end in self._times.values()), default=None)
