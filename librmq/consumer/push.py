"""A consumer to which messages are brought. Mirrors ``DefaultMQPushConsumer`` and ``DefaultMQPushConsumerImpl``."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar, cast

from librmq.client.identity import Client
from librmq.consumer.assigned_queue import HeldQueue
from librmq.consumer.base import Member
from librmq.consumer.concurrent import ConcurrentDelivery
from librmq.consumer.config import ConsumerConfig
from librmq.consumer.delivery import BlockedQueue, ConsumeHook, Delivery, Listener
from librmq.consumer.gauges import show_gauges
from librmq.consumer.orderly import OrderlyDelivery
from librmq.consumer.pulling import Pulling
from librmq.errors import ConfigError
from librmq.message.message import MessageQueue
from librmq.metrics import Metrics
from librmq.protocol import Route
from librmq.runtime.runner import Step

__all__ = ["PushConsumer"]

F = TypeVar("F", bound=Callable[..., Any])

RESET_MS: Final = 10_000
"""What runs when a group is reset has so long to end."""

_log = logging.getLogger("librmq.consumer")


class PushConsumer(Member[ConsumerConfig]):
    """One instance of a group: pulls, and calls the listener of the message's topic. Thread-safe.

    ``route`` is a `Broker` or several; ``settings`` are those of `ConsumerConfig`. Instances of a group are told apart
    by their clients: each has its own unless ``client`` is given. Coroutines run on the loop in which `start` was
    called, else on one of librmq's own.
    """

    kind = "push"

    def __init__(
        self,
        route: Route,
        group: str,
        *,
        client: Client | None = None,
        instance_name: str | None = None,
        config: ConsumerConfig | None = None,
        hooks: Iterable[ConsumeHook] = (),
        before_last_attempt: Callable[[Any], None] | None = None,
        metrics: Metrics | None = None,
        **settings: Any,
    ) -> None:
        """``before_last_attempt(message)`` is called where a failure would make the message a dead letter; ``metrics``
        counts what is pulled and consumed.
        """
        super().__init__(route, group, (config or ConsumerConfig()).with_settings(settings), client, instance_name)
        self.hooks: list[ConsumeHook] = list(hooks)
        self.before_last_attempt = before_last_attempt
        self.metrics = metrics
        self.listeners: dict[str, Listener] = {}
        """By topic."""
        self.loop: asyncio.AbstractEventLoop | None = None
        self.is_paused = False
        self._resets = 0
        self.pulling = Pulling(self)
        self.delivery: Delivery = OrderlyDelivery(self) if self.config.orderly else ConcurrentDelivery(self)

    def __repr__(self) -> str:
        return f"PushConsumer({self.group!r}, {self._life.state.value}, queues={len(self.held)})"

    # ---- subscribing

    def subscribe(
        self,
        topic: str,
        *,
        tags: str | None = None,
        sql: str | None = None,
        batch: bool | None = None,
        must_return: bool = False,
    ) -> Callable[[F], F]:
        """Have messages of ``topic`` brought to the function that this decorates; a later one takes its place.

        ``tags`` are tags between ``||`` (None: all), ``sql`` an SQL92 expression over properties. The listener gets
        a `DeliveredMessage`, or with ``batch`` (by default: if ``batch_size`` is more than one) a list of them. When
        it returns, they are consumed; a concurrent batch listener may return the index of the last one that is. With
        ``must_return`` nothing counts as consumed unless it returns True, or such an index. An exception is a failure.
        """
        subscription, tag_filter = self._subscription(topic, tags, sql)

        def register(function: F) -> F:
            if not callable(function):
                raise ConfigError(f"topic {topic!r}: a listener is a function, found {function!r}")
            as_list = self.config.batch_size > 1 if batch is None else batch
            self.listeners[topic] = Listener(function, as_list, must_return, _is_async(function))
            self._set_subscription(subscription, tag_filter)
            return function

        return register

    def unsubscribe(self, topic: str) -> None:
        """Give the topic's queues up."""
        with self.runner.lock:
            self.subscriptions.pop(topic, None)
            self.listeners.pop(topic, None)
            self.filters.pop(topic, None)
            if self.is_running:
                self.client.beat()
                self.rebalancing.wake()

    # ---- life

    def _start(self) -> None:
        if not self.subscriptions:
            raise ConfigError(f"group {self.group!r}: subscribe a listener to a topic first")
        if any(listener.is_async for listener in self.listeners.values()):
            try:
                self.loop = asyncio.get_running_loop()
            except RuntimeError:
                self.loop = None
        super()._start()
        self.delivery.start()
        if self.metrics is not None:
            show_gauges(self, self.metrics)

    def shutdown(self, timeout: float | None = None) -> bool:
        """Stop pulling, wait up to ``timeout`` seconds (None: as configured) for listeners, save, leave the group.

        Whether all have ended. What a listener that runs on does is not noted: its message comes again elsewhere.
        Doing so again does nothing. Not for the loop on which coroutines run: `shutdown_async`.
        """
        try:
            in_time = self._stop(timeout, self.delivery.stop)
        finally:
            if self.metrics is not None:
                self.metrics.take_away(self)
        if not in_time:
            _log.warning("%s: %d listeners run on after the shutdown", self.label, self.delivery.running)
        return in_time

    async def shutdown_async(self, timeout: float | None = None) -> bool:
        """`shutdown`, without blocking the loop."""
        return await self.runner.offload(functools.partial(self.shutdown, timeout))

    def _end(self) -> None:
        self.delivery.end()

    def pause(self) -> None:
        """Stop pulling; what was pulled is still delivered."""
        self.is_paused = True

    def resume(self) -> None:
        """Pull again."""
        with self.runner.lock:
            self.is_paused = False
            self.pulling.wake_all()
            if self.is_running:
                self.rebalancing.wake()

    # ---- queues

    def make_held(self, queue: MessageQueue, next_offset: int, progress: int | None) -> HeldQueue:
        """A queue that is about to be taken."""
        step = self.pulling.make_step(f"{self.label} pull {queue.topic}/{queue.broker_name}/{queue.queue_id}")
        return HeldQueue(queue, next_offset, progress, step)

    def _lock(self, queue: MessageQueue) -> bool:
        return self.delivery.lock(queue)

    def _take(self, held: HeldQueue) -> None:
        self.pulling.share_limits()
        if held.progress is not None:
            self.progressed(held, held.progress)
        self.delivery.take(held)
        self.pulling.start(held)

    def _may_store(self, held: HeldQueue) -> bool:
        return self.delivery.may_store(held, self.runner.now_ms())

    def _give_up(self, held: HeldQueue, now_ms: int) -> bool:
        super()._give_up(held, now_ms)
        return self.delivery.give_up(held, now_ms)

    def let_go(self, held: HeldQueue) -> None:
        """Give up a queue whose progress was set from outside; the next rebalance takes it again from there."""
        held.told = None
        if self._give_up(held, self.runner.now_ms()):
            self.held.pop(held.queue, None)

    def _reset(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Let go of what is held, wait for what runs, and go on from other offsets."""
        self.is_paused = True
        self._resets += 1
        reset = [(held, offsets[held.queue]) for held in self.held.values() if held.queue in offsets]
        for held, _ in reset:
            held.dropped = True
            held.messages.clear()

        def go_on(now_ms: int) -> int | None:
            for held, queue_offset in reset:
                if self.held.get(held.queue) is held and not self.stopping:
                    held.progress = queue_offset
                    self.let_go(held)
            self._resets -= 1
            if not self._resets:
                self.resume()
            return None

        step = Step(f"{self.label} reset {topic}", go_on, self.client)
        self.runner.wake(step, self.runner.now_ms() + RESET_MS)

    def blocked_queues(self) -> list[BlockedQueue]:
        """Orderly queues that rest since their first message fails, with how often it did."""
        with self.runner.lock:
            return self.delivery.blocked()


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(cast(Any, function), "__call__", None)  # noqa: B004 - an object may be called asynchronously
    )
