"""Pulling: each assigned queue has one pull, which the broker holds while the queue has no message.

Mirrors ``DefaultMQPushConsumerImpl.pullMessage`` and ``PullAPIWrapper``. A postponed pull (too much is held, the lock
is missing, the consumer is paused) is woken when the reason ends.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Final

from librmq.consumer.assignment import AssignedQueue
from librmq.consumer.instance import PushInstance
from librmq.errors import BrokerError, RmqError
from librmq.protocol import MessageModel, PullMessage, PullResponse, PullStatus, ResponseCode
from librmq.runtime.runner import Step

AFTER_ERROR_MS: Final = 3_000
HOLD_MS: Final = 15_000
CORRECTION_MS: Final = 10_000
"""Time until a position that the queue does not have is corrected."""


class Fetcher:
    """The pulls of a push consumer. Called under the runner's lock."""

    def __init__(self, consumer: PushInstance) -> None:
        self._consumer = consumer
        self._is_clustering = consumer.config.model is MessageModel.CLUSTERING
        self._interval_ms = round(consumer.config.pull_interval * 1000)
        self.max_messages = consumer.config.max_held_messages
        self.max_bytes = consumer.config.max_held_bytes

    def make_step(self, label: str) -> Step:
        """Return the step that pulls a queue."""
        return Step(label, lambda now_ms: None, self._consumer.client)

    def start(self, assigned: AssignedQueue) -> None:
        """Begin to pull."""
        wake = self._consumer.runner.wake
        assigned.pull.run_due = partial(self._run_pull, assigned)
        assigned.notify = partial(wake, assigned.pull)
        wake(assigned.pull)

    def share_limits(self) -> None:
        """Divide the limits of a topic among the assigned queues of all topics, as in 4.9."""
        config, count = self._consumer.config, max(1, len(self._consumer.assigned))
        if config.max_held_messages_of_topic is not None:
            self.max_messages = max(1, config.max_held_messages_of_topic // count)
        if config.max_held_bytes_of_topic is not None:
            self.max_bytes = max(1 << 20, config.max_held_bytes_of_topic // count)

    def is_full(self, assigned: AssignedQueue) -> bool:
        """Return whether the queue holds too much for another pull."""
        messages, config = assigned.messages, self._consumer.config
        count = len(messages)
        return count > 0 and (
            count > self.max_messages
            or messages.size > self.max_bytes
            or (count > 1 and not config.orderly and messages.span > config.max_span)
        )

    def resume_throttled(self, assigned: AssignedQueue) -> None:
        """Resume a throttled queue once it holds less."""
        if not self.is_full(assigned):
            assigned.throttled = False
            self._consumer.runner.wake(assigned.pull)

    def wake_all(self) -> None:
        """Pull all queues again."""
        for assigned in self._consumer.assigned.values():
            if not assigned.released:
                self._consumer.runner.wake(assigned.pull)

    def _run_pull(self, assigned: AssignedQueue, now_ms: int) -> int | None:
        assigned.lost = False
        try:
            return self._pull_queue(assigned, now_ms)
        except BaseException:
            assigned.lost = True
            self._consumer.rebalancing.wake_on_grid()
            raise

    def _pull_queue(self, assigned: AssignedQueue, now_ms: int) -> int | None:
        consumer = self._consumer
        if assigned.released or consumer.stopping or consumer.is_paused:
            return None
        assigned.pulled_timestamp_ms = now_ms
        assigned.throttled = self.is_full(assigned)
        if assigned.throttled:
            self._count_pull("flow_controls", assigned)
            return None
        queue = assigned.queue
        try:
            if not consumer.delivery.may_pull(assigned, now_ms):
                return None
            progress = assigned.progress if self._is_clustering and assigned.progress else None
            endpoint = assigned.endpoint = consumer.client.endpoint(queue.broker_name)
            response = endpoint.call(
                PullMessage(
                    consumer.client.client_id,
                    consumer.group,
                    queue.topic,
                    queue.queue_id,
                    assigned.next_offset,
                    consumer.config.pull_batch_size,
                    None,
                    progress,
                    assigned.notify,
                    not self._interval_ms,
                )
            )
        except RmqError as error:
            if isinstance(error, BrokerError) and error.code == ResponseCode.SUBSCRIPTION_NOT_EXIST:
                consumer.client.removed_by(queue.broker_name)
            level = logging.DEBUG if assigned.is_retry else logging.WARNING
            consumer.states.failing(("pull", queue.broker_name, queue.topic), f"pulling {assigned.label}", error, level)
            return now_ms + AFTER_ERROR_MS
        if consumer.states.causes:
            consumer.states.works(("pull", queue.broker_name, queue.topic), f"pulling {queue.topic}")
        if progress is not None:
            assigned.stored_progress = progress
        status = response.status
        self._count_pull("pulls", assigned, status)
        if status is PullStatus.HELD:
            return self._handle_hold(assigned, response, now_ms)
        assigned.idle_since_ms = None
        if status is PullStatus.OFFSET_ILLEGAL:
            self._correct_later(assigned, response.next_offset, now_ms)
            return None
        assigned.next_offset = response.next_offset
        if status is PullStatus.FOUND:
            self._add_messages(assigned, response, now_ms)
            if response.is_held and not self.is_full(assigned):
                return self._handle_hold(assigned, response, now_ms)
        else:
            self._pass_skipped(assigned)
        return now_ms + self._interval_ms

    def _count_pull(self, name: str, assigned: AssignedQueue, status: PullStatus | None = None) -> None:
        metrics = self._consumer.metrics
        if metrics is None:
            return
        topic, group = assigned.queue.topic, self._consumer.group
        if status is None:
            metrics.count(name, topic=topic, group=group)
        else:
            metrics.count(name, topic=topic, group=group, status=status.value)

    def _add_messages(self, assigned: AssignedQueue, response: PullResponse, now_ms: int) -> None:
        messages = response.messages
        tag_filter = self._consumer.filters.get(assigned.queue.topic)
        if tag_filter is not None:
            messages = [message for message in messages if tag_filter.matches(message.tags)]
        delivery, bounds = self._consumer.delivery, (response.min_offset, response.max_offset)
        if len(messages) != 1 or not delivery.try_begin(assigned, messages[0], bounds, now_ms):
            count = assigned.messages.put(messages, *bounds)
            if count:
                delivery.pulled(assigned, count, now_ms)

    def _handle_hold(self, assigned: AssignedQueue, response: PullResponse, now_ms: int) -> int | None:
        """Handle an empty pull. Messages skipped since the last one count as consumed when the hold ends."""
        assigned.next_offset = response.next_offset
        will_reach = assigned.messages.end if len(assigned.messages) else assigned.progress
        if will_reach is not None and will_reach >= assigned.next_offset:  # nothing was skipped
            assigned.idle_since_ms = None
            return None
        if assigned.idle_since_ms is None:
            assigned.idle_since_ms = now_ms
        due_ms = assigned.idle_since_ms + HOLD_MS
        if now_ms < due_ms:
            return due_ms
        if len(assigned.messages):
            return now_ms + HOLD_MS
        self._pass_skipped(assigned)
        return None

    def _pass_skipped(self, assigned: AssignedQueue) -> None:
        if not len(assigned.messages) and (assigned.progress is None or assigned.progress < assigned.next_offset):
            self._consumer.progressed(assigned, assigned.next_offset)

    def _correct_later(self, assigned: AssignedQueue, next_offset: int, now_ms: int) -> None:
        """Release a queue that lacks this offset; it is assigned again at an offset that it has."""
        consumer = self._consumer
        consumer.log.warning(
            "%(consumer)s: %(queue)s has no offset %(queue_offset)d; %(next_offset)d is next",
            queue=assigned.queue,
            queue_offset=assigned.next_offset,
            next_offset=next_offset,
        )
        assigned.released = True

        def correct(now_ms: int) -> int | None:
            if not consumer.stopping and consumer.assigned.get(assigned.queue) is assigned:
                assigned.progress = next_offset
                consumer.reassign(assigned)
                consumer.rebalancing.wake_on_grid()
            return None

        step = Step(f"{consumer.label} correct {assigned.label}", correct, consumer.client)
        consumer.runner.wake(step, now_ms + CORRECTION_MS)
