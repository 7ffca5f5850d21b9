"""Concurrent consumption: listeners run in parallel, up to the number of threads, in any order.

Mirrors ``ConsumeMessageConcurrentlyService``. ``threads`` is the number of running listeners: when one ends, the next
begins without waiting for the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from librmq.consumer.assignment import AssignedQueue
from librmq.consumer.delivery import Delivery
from librmq.consumer.failures import REDELIVERY_MS, outcome
from librmq.consumer.instance import PushInstance
from librmq.consumer.listeners import DeliveredMessage, Listener
from librmq.consumer.rebalancing import next_from_first
from librmq.listener import DownstreamDown
from librmq.message.message import StoredMessage
from librmq.protocol import MessageModel
from librmq.runtime.runner import Step

EXPIRED_LEVEL: Final = 3
MAX_EXPIRED: Final = 16


class _Pulled:
    """Messages of one pull that wait for a listener; a batch never mixes pulls."""

    __slots__ = ("assigned", "count", "messages")

    def __init__(self, assigned: AssignedQueue, count: int, messages: list[DeliveredMessage] | None = None) -> None:
        self.assigned = assigned
        self.count = count
        self.messages = messages
        """Messages that began before and begin again, in place of pulled ones."""


class ConcurrentDelivery(Delivery):
    """Calls listeners in parallel, in the order of the pulled messages. Called under the runner's lock."""

    def __init__(self, consumer: PushInstance) -> None:
        super().__init__(consumer)
        self._pulled: deque[_Pulled] = deque()
        self._postponed: deque[tuple[int, _Pulled]] = deque()
        self._resting: list[_Pulled] = []
        self._timeout_ms = max(1, round(self.config.consume_timeout * 1000))
        self._expiring = Step(f"{consumer.label} consume timeout", self._expire, consumer.client)
        self._redelivery = Step(f"{consumer.label} deliver again", self._deliver_postponed, consumer.client)

    def max_times(self) -> int | None:
        """Return the number of redeliveries before a message becomes a dead letter."""
        return 16 if self.config.max_reconsume_times is None else self.config.max_reconsume_times

    def pulled(self, assigned: AssignedQueue, count: int, now_ms: int) -> None:
        """Begin messages that were added to a queue, as far as threads are free."""
        self._pulled.append(_Pulled(assigned, count))
        self._begin_waiting(now_ms)

    def try_begin(self, assigned: AssignedQueue, message: StoredMessage, bounds: tuple[int, int], now_ms: int) -> bool:
        """Add and begin a message if nothing precedes it: the fast path of a consumer that keeps up."""
        if self._pulled or self.running >= self.config.threads or self.consumer.stopping:
            return False
        if self.rests.is_probing or assigned.queue in self.rests:
            return False
        begun = assigned.messages.begin(message, bounds)
        if begun is None:
            return False
        self._deliver_messages(assigned, [begun], now_ms)
        return True

    def _begin_waiting(self, now_ms: int) -> None:
        pulled, limit = self._pulled, 1 if self.rests.is_probing else self.config.threads
        if self.consumer.stopping:
            pulled.clear()
            return
        while pulled and self.running < limit and not self.rests.is_whole:
            first = pulled[0]
            assigned = first.assigned
            if assigned.released:
                pulled.popleft()
                continue
            if assigned.queue in self.rests:
                self._resting.append(pulled.popleft())
                continue
            if first.messages is not None:
                messages = first.messages
                pulled.popleft()
            else:
                count, batch = first.count, self.batch_size(assigned)
                messages = assigned.messages.take(count if count < batch else batch)
                first.count = count = count - len(messages)
                if count <= 0 or not messages:
                    pulled.popleft()
                if not messages:
                    continue
            self._deliver_messages(assigned, messages, now_ms)

    def _deliver_messages(self, assigned: AssignedQueue, messages: list[DeliveredMessage], now_ms: int) -> None:
        for message in messages:
            message.consume_start_timestamp_ms = now_ms
        if self._expiring.at is None:
            self.runner.wake(self._expiring, next_from_first(now_ms, self.started_ms, self._timeout_ms))
        self.submit(assigned, messages, self._done)

    def _done(
        self,
        assigned: AssignedQueue,
        messages: list[DeliveredMessage],
        listener: Listener,
        result: object,
        error: Exception | None,
    ) -> None:
        self.ended()
        if not assigned.released:
            consumed, error = outcome(listener, len(messages), result, error)
            if isinstance(error, DownstreamDown):
                self._rest(assigned, messages[consumed:], error)
                messages = messages[:consumed]
            elif self.rests.is_probing or self.consumer.states.causes:
                self.rests.succeeded()
            if messages:
                self._apply(assigned, messages, consumed, error)
        if self._pulled:
            self._begin_waiting(self.runner.now_ms())

    def _rest(self, assigned: AssignedQueue, messages: list[DeliveredMessage], error: DownstreamDown) -> None:
        """Keep messages to begin again after a rest, without counting a failure."""
        self.count_messages(assigned, len(messages), "downstream")
        for message in messages:
            message.consume_start_timestamp_ms = None  # a rest is not time in a listener
        self._pulled.appendleft(_Pulled(assigned, len(messages), messages))
        self.rests.begin(error, assigned.queue)

    def _resumed(self, now_ms: int) -> None:
        self._pulled.extendleft(reversed(self._resting))
        self._resting.clear()
        self._begin_waiting(now_ms)

    def _apply(
        self, assigned: AssignedQueue, messages: list[DeliveredMessage], consumed: int, error: Exception | None
    ) -> None:
        self.counts.consumed += consumed
        if self.consumer.metrics is not None:
            self.count_messages(assigned, consumed, "success")
        ended: Sequence[DeliveredMessage] = messages
        if consumed < len(messages):
            failed = messages[consumed:]
            self.counts.failed += len(failed)
            self.count_messages(
                assigned, len(failed), "later" if self.config.model is MessageModel.CLUSTERING else "dropped"
            )
            unaccepted = self.retries.send_back(assigned, failed, error, self.max_times())
            if unaccepted:
                ended = [message for message in messages if message not in unaccepted]
                self._postpone(assigned, unaccepted)
        progress = assigned.messages.remove(ended)
        if progress is not None and (assigned.progress is None or progress > assigned.progress):
            self.consumer.progressed(assigned, progress)
        if assigned.throttled:
            self.consumer.fetcher.resume_throttled(assigned)

    # ---- messages that could not be sent back

    def _postpone(self, assigned: AssignedQueue, messages: list[DeliveredMessage]) -> None:
        for message in messages:
            message.count_failure()
        due_ms = self.runner.now_ms() + REDELIVERY_MS
        batch = self.batch_size(assigned)
        for start in range(0, len(messages), batch):
            part = messages[start : start + batch]
            self._postponed.append((due_ms, _Pulled(assigned, len(part), part)))
        self.runner.wake(self._redelivery, self._postponed[0][0])

    def _deliver_postponed(self, now_ms: int) -> int | None:
        while self._postponed and self._postponed[0][0] <= now_ms:
            self._pulled.append(self._postponed.popleft()[1])
        self._begin_waiting(now_ms)
        return self._postponed[0][0] if self._postponed else None

    # ---- consume timeout

    def _expire(self, now_ms: int) -> int | None:
        """Send back the first messages of each queue that a listener has had for longer than the consume timeout."""
        if self.consumer.stopping:
            return None
        for assigned in list(self.consumer.assigned.values()):
            for _ in range(MAX_EXPIRED):
                first = assigned.messages.first_begun()
                started_ms = None if first is None else first.consume_start_timestamp_ms
                if first is None or assigned.released or started_ms is None or now_ms - started_ms <= self._timeout_ms:
                    break
                self.consumer.log.warning(
                    "%(consumer)s: the listener exceeds consume_timeout on %(queue)s at %(queue_offset)d: "
                    "the message goes back",
                    queue=assigned.queue,
                    queue_offset=first.queue_offset,
                )
                cause = f"the listener has had it for over {self.config.consume_timeout:g} s"
                sent = self.retries.send_one_back(assigned, first, EXPIRED_LEVEL, cause)
                if sent is False:
                    break
                if sent is not None and sent.is_dead:
                    self.retries.log_dead_letter(assigned, first, TimeoutError(cause))
                assigned.messages.remove((first,))  # the next message that ends, or an empty queue, moves the progress
                if assigned.throttled:
                    self.consumer.fetcher.resume_throttled(assigned)
                elif not len(assigned.messages):
                    self.runner.wake(assigned.pull)
        if any(assigned.messages.begun for assigned in self.consumer.assigned.values()):
            return next_from_first(now_ms, self.started_ms, self._timeout_ms)
        return None
