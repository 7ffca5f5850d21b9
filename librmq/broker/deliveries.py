"""Deliveries of one broker at a later time: by delay levels, the timer and the relay, each a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from librmq.broker.context import BrokerContext
from librmq.broker.long_polling import Arrivals
from librmq.broker.offsets import DelayProgress
from librmq.broker.transactions import CheckOffsets
from librmq.delay import DelaySchedule
from librmq.errors import MessageIllegalError
from librmq.message.delay_levels import level_of_queue_id
from librmq.message.message import StoredMessage
from librmq.scheduling.relay import HOP_TOPIC, HopProxy
from librmq.scheduling.timer import Timers
from librmq.scheduling.timer_config import TIMER_TOPIC
from librmq.store import AppendResult


class Deliveries:
    """The delayed messages of one broker. Called under the runner's lock, except the notifications of `arrivals`."""

    def __init__(self, context: BrokerContext, wake_flush: Callable[[], None] | None) -> None:
        """``wake_flush()`` wakes the step that flushes the store; None where a thread of the store does."""
        runner, store, config, steps = context.runner, context.store, context.config, context.steps
        self._runner = runner
        self._store = store
        self._topics = context.topics
        self._default_queues = config.default_topic_queues
        self._metrics = context.metrics
        self._held = context.held_pulls.by_queue
        self.arrivals = Arrivals(runner, context.held_pulls, context.metrics, self._delayed, wake_flush)
        self.schedule = DelaySchedule(
            store,
            DelayProgress(context.tables, context.writing),
            runner.now_ms(),
            config.delay,
            delivered=self._delivered,
            aside=steps.aside("flushes for its delays", lambda at: runner.wake(self._delay, at)),
        )
        self._delay = steps.step("delivers delayed messages", self.schedule.run_due)
        self.timers: Timers | None = None
        if config.timers is not None:
            self.timers = Timers.open(
                store,
                config.timers,
                delivered=self._timed_out,
                aside=steps.aside("saves its timers", lambda at: runner.wake(self._timing, at)),
            )
            self._timing = steps.step("delivers what is due", self.timers.run_due)
            self.arrivals.wake_by_topic[TIMER_TOPIC] = self._wake_timers
        self.relay: HopProxy | None = None
        if config.hops:
            self.relay = HopProxy(
                store,
                CheckOffsets(context.offsets),
                delivered=self._relayed,
                make_topic=self._make_target,
                aside=steps.aside("flushes for its hops", lambda at: runner.wake(self._relaying, at)),
            )
            self._relaying = steps.step("sends on by levels", self._run_relay)
            self.arrivals.wake_by_topic[HOP_TOPIC] = self._wake_relay

    def start(self) -> None:
        """Deliver due messages, and wake the steps for waiting ones."""
        self._run_schedule()
        for topic in (TIMER_TOPIC, HOP_TOPIC):
            if topic in self.arrivals.wake_by_topic:
                self.arrivals.wake_by_topic[topic]()

    def save(self) -> None:
        """Save the progress of each part, even if another part fails. Raises the errors of the flush."""
        with ExitStack() as saves:
            if self.relay is not None:
                saves.callback(self.relay.save)
            if self.timers is not None:
                saves.callback(self.timers.save)
            self.schedule.save(self._runner.now_ms())

    def end_writing(self, why: str) -> None:
        """End all writes; later callers get ``why``. Return when no write is running. Thread-safe."""
        if self.timers is not None:
            self.timers.end(why)

    def _run_schedule(self) -> None:
        due = self.schedule.run_due(self._runner.now_ms())
        if due is not None:
            self._runner.wake(self._delay, due)

    def _delayed(self, level: int, store_timestamp_ms: int) -> int:
        self._runner.wake(self._delay, self.schedule.due_for(level, store_timestamp_ms))
        return self._store.levels.cap(level)

    def _delivered(self, message: StoredMessage, topic: str, queue_id: int, result: AppendResult) -> None:
        # The properties are decoded only if a held pull asks for them.
        properties = message.properties if (topic, queue_id) in self._held else {}
        self.arrivals.delivered(topic, queue_id, properties, result)
        if self._metrics is not None:
            self._metrics.count("delayed_out", level=str(level_of_queue_id(message.queue_id)))

    def _wake_timers(self) -> None:
        with self._runner.lock:
            self._runner.wake(self._timing)

    def _timed_out(self, message: StoredMessage, result: AppendResult) -> None:
        properties = message.properties
        self.arrivals.delivered(properties["REAL_TOPIC"], int(properties["REAL_QID"]), properties, result)

    def _wake_relay(self) -> None:
        with self._runner.lock:
            self._runner.wake(self._relaying)

    def _run_relay(self, now_ms: int) -> int | None:
        assert self.relay is not None
        due = self.relay.run_due(now_ms)
        self._run_schedule()  # it delivers the hops
        return due

    def _make_target(self, topic: str, queue_id: int) -> None:
        """Check that the topic has the queue; recreate a topic that was deleted since the send."""
        with self._runner.lock:
            target = self._topics.ensure(topic, self._default_queues)
        if not 0 <= queue_id < target.queues:
            raise MessageIllegalError(f"topic {topic!r} has {target.queues} queues, but no queue {queue_id}")

    def _relayed(self, hop: StoredMessage, result: AppendResult) -> None:
        message = self._store.message_at(result.physical_offset)
        if message is not None:
            self.arrivals.delivered(message.topic, message.queue_id, message.properties, result)
