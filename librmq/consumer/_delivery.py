"""Delivery: calls of listeners, and concurrent consumption; `librmq.consumer._orderly` has the orderly one.

Delivery has three steps: begin (claim messages, under the lock), run the listener (without it), apply its outcome
(under the lock). Other turns, such as a rebalance, can come between the steps.

Concurrent listeners run in parallel, in any order. ``threads`` is the number of running listeners: when one ends, the
next begins without waiting for the others. Which messages begin next is for `weights.Backlog` to say. Mirrors
``ConsumeMessageConcurrentlyService``.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar, copy_context
from functools import partial
from threading import get_ident
from typing import Any, Final

from librmq.client.client import Client
from librmq.client.observation import Observer, Operation, note_end
from librmq.clock import moves_by_itself
from librmq.consumer._assignment import AssignedQueue
from librmq.consumer._failures import REDELIVERY_MS, Rests, Retries, cause_of, is_requested, outcome
from librmq.consumer._instance import (
    BlockedQueue,
    ConsumeContext,
    ConsumerCounts,
    PushInstance,
    listener_calls,
)
from librmq.consumer._rebalancing import next_from_first
from librmq.consumer._weights import Backlog, Pulled, batches_of
from librmq.consumer.config import ConsumerConfig
from librmq.consumer.listeners import DeliveredMessage, Listener
from librmq.errors import ClientStateError
from librmq.listener import DownstreamDown
from librmq.message.message import MessageQueue
from librmq.metrics import Metrics
from librmq.protocol import ConsumeDirectly, DirectlyConsumed, DirectResult, ListenerCall, MessageModel
from librmq.runtime.locks import Event
from librmq.runtime.runner import Runner, Step, Work

Callback = Callable[[object, Exception | None], None]
"""Called after a listener, with its result or its exception."""


class Delivery:
    """Delivers pulled messages to listeners. Called under the runner's lock."""

    def __init__(self, consumer: PushInstance) -> None:
        self.consumer = consumer
        self.config: ConsumerConfig = consumer.config
        """The present settings."""
        self.runner: Runner = consumer.runner
        self.calls: dict[int, DeliveryCall] = {}
        """The listeners that run now, by thread."""
        self.running: int = 0
        """The listeners that run or are about to."""
        self.started_ms: int = 0
        """The time of joining the group, the start of the grid on which timeouts are checked and locks renewed."""
        self.counts: ConsumerCounts = ConsumerCounts()
        self.rests: Rests = Rests(consumer, self._resumed)
        self.retries: Retries = Retries(consumer, self.counts)
        self._ended: threading.Event | None = None

    def _resumed(self, now_ms: int) -> None:
        """Begin again after a rest."""
        raise NotImplementedError

    def start(self) -> None:
        """Note when the consumer joined its group."""
        self.started_ms = self.runner.now_ms()

    def stop(self) -> threading.Event | None:
        """Begin nothing new; return an event that is set when all listeners have ended, None if none runs."""
        if not self.running:
            return None
        self._ended = Event()
        return self._ended

    def cancel_listeners(self) -> int:
        """Cancel the coroutine listeners that still run; return their number."""
        cancelled = 0
        for work in list(self.runner.running):
            if isinstance(work, DeliveryCall) and work.delivery is self and hasattr(work, "cancel"):
                work.cancel()
                cancelled += 1
        return cancelled

    def release_locks(self) -> None:
        """Clean up before the consumer leaves its group."""

    def lock_queue(self, queue: MessageQueue) -> bool:
        """Return whether the queue may be taken."""
        return True

    def take_queue(self, assigned: AssignedQueue) -> None:
        """Note that a queue was taken."""

    def settle(self) -> None:
        """Apply the results of all listeners that have ended, before progress is stored."""

    def release_queue(self, assigned: AssignedQueue, now_ms: int) -> bool:
        """Note that a queue is released; return False while its listener has to end first."""
        return True

    def may_store(self, assigned: AssignedQueue, now_ms: int) -> bool:
        """Return whether the progress of the queue may be stored."""
        return True

    def may_pull(self, assigned: AssignedQueue, now_ms: int) -> bool:
        """Return whether the queue may be pulled; if not, its pull is woken later."""
        return True

    def pulled(self, assigned: AssignedQueue, count: int, now_ms: int) -> None:
        """Begin ``count`` messages that were added to a queue."""
        raise NotImplementedError

    def try_begin(self, assigned: AssignedQueue, raw: bytes, bounds: tuple[int, int], now_ms: int) -> bool:
        """Add one message to a queue and begin it if nothing precedes it: the fast path.

        ``bounds`` are the minimum and maximum offset of the queue. Return False if `pulled` has to handle the message.
        """
        return False

    def line_up(self) -> None:
        """Arrange the messages that wait by the present listeners and settings."""

    def apply_settings(self, now_ms: int) -> None:
        """Continue with the consumer's new settings."""
        self.config = self.consumer.config
        self.line_up()
        self._begin_waiting(now_ms)

    def _begin_waiting(self, now_ms: int) -> None:
        """Begin what waits, as far as threads are free."""
        raise NotImplementedError

    def blocked(self) -> list[BlockedQueue]:
        """Return the queues that rest because their first message keeps failing."""
        return []

    def max_times(self) -> int | None:
        """Return the number of redeliveries before a message becomes a dead letter, None without a limit."""
        raise NotImplementedError

    # ---- one call

    def batch_size(self, assigned: AssignedQueue) -> int:
        """Return the largest batch for one call: one message if the queue's messages have different listeners."""
        size = self.config.batch_size
        if size > 1 and not self.consumer.listeners.share_batches(assigned.queue.topic, assigned.is_retry):
            return 1
        return size

    def submit(self, assigned: AssignedQueue, messages: list[DeliveredMessage]) -> None:
        """Submit a call of the listener; `apply_result` gets its result or exception."""
        self._submit(DeliveryCall(self, self.listener_for(assigned, messages[0]), assigned, messages))

    def _submit(self, call: DeliveryCall) -> None:
        self.running += 1
        self.counts.delivered += len(call.messages)
        self.runner.submit(call)

    def count_running(self) -> None:
        """Count the listeners again that run or are about to, after an interrupted `submit`."""
        works = {*self.runner.ready, *self.runner.running}
        self.running = sum(isinstance(work, DeliveryCall) and work.delivery is self for work in works)

    def listener_for(self, assigned: AssignedQueue, message: DeliveredMessage) -> Listener:
        """Return the listener of a message; it fails if this instance does not subscribe to a redelivery's topic."""
        listeners, topic = self.consumer.listeners, message.topic if assigned.is_retry else assigned.queue.topic
        listener = listeners.listener_for(topic, message)
        if listener is None and assigned.is_retry:
            listener = listeners.dead_letter_listener(message)
        return listener or _missing_listener(topic)

    def call_ended(self) -> None:
        """Note that a listener has ended."""
        self.running -= 1
        if self._ended is not None and not self.running:
            self._ended.set()

    def apply_result(self, call: DeliveryCall, result: object, error: Exception | None) -> None:
        """Apply the result or the exception of a listener, and begin what waits for a free thread."""
        raise NotImplementedError

    def listener_calls(self) -> tuple[ListenerCall, ...]:
        """Return the listeners that threads run now, and where each stands."""
        callers = DeliveryCall.call_listener, Run.call_listener, Delivery._call_in_context
        return listener_calls(self.calls, [caller.__code__ for caller in callers])

    def call(self, call: DeliveryCall) -> object:
        """Call the listener, without the lock."""
        if call.assigned.released:
            # The queue went to another reader while this call waited for a thread. Its result would be ignored, and the
            # other reader delivers the message, so the listener is not called.
            return None
        calls, thread = self.calls, get_ident()
        # A listener that moves time in a test runs other listeners in its own thread, so calls of one thread can nest.
        outer = calls.get(thread)
        calls[thread] = call
        consumer = self.consumer
        try:
            if consumer.recorder is not None:
                consumer.recorder.begins(call.assigned.queue, call.messages)
            observer = consumer.client.observer
            is_observed = observer is not None and observer.is_active()
            if (
                is_observed
                or consumer.hooks
                or consumer.metrics is not None
                or consumer.before_last_attempt is not None
            ):
                return call.call_listener(partial(self._call_with_hooks, call.listener, call.assigned))
            return call.call_listener(None)
        finally:
            if outer is None:
                del calls[thread]
            else:
                calls[thread] = outer

    def _call_with_hooks(self, listener: Listener, assigned: AssignedQueue, messages: list[DeliveredMessage]) -> object:
        # The call has a context of its own, so what a hook sets in it ends with the call.
        before = copy_context()
        context = before.copy()
        result, callbacks = context.run(self._call_in_context, listener, assigned, messages)
        if inspect.iscoroutine(result):
            changes = [(variable, value) for variable, value in context.items() if before.get(variable) is not value]
            return _after(result, callbacks, changes)
        for callback in callbacks:
            callback(result, None)
        return result

    def _call_in_context(
        self, listener: Listener, assigned: AssignedQueue, messages: list[DeliveredMessage]
    ) -> tuple[object, list[Callback]]:
        """Call the hooks, then the listener; return its result, and what is to be called with the result in the end."""
        consumer = self.consumer
        metrics = consumer.metrics
        max_times = self.max_times()
        if consumer.before_last_attempt is not None and max_times is not None:
            for message in messages:
                if message.reconsume_times >= max_times:
                    consumer.before_last_attempt(message)
        context = ConsumeContext(consumer.group, assigned.queue, tuple(messages), listener)
        callbacks = [callback for hook in consumer.hooks if (callback := hook(context)) is not None]
        if metrics is not None:
            callbacks.append(self._stopwatch(messages[0].topic, metrics))
        observer = consumer.client.observer
        if observer is not None and observer.is_active():
            callbacks.append(self._observe(observer, listener, assigned, messages))
        try:
            result = listener.function(messages if listener.as_list else messages[0])
        except Exception as error:
            for callback in callbacks:
                callback(None, error)
            raise
        return result, callbacks

    def _observe(
        self, observer: Observer, listener: Listener, assigned: AssignedQueue, messages: list[DeliveredMessage]
    ) -> Callback:
        consumer = self.consumer
        ended = observer.begins(
            Operation(
                "process",
                consumer.client,
                consumer.group,
                messages[0].topic,
                messages,
                assigned.queue.broker_name,
                assigned.queue.queue_id,
                listener.as_list,
                "clustering" if consumer.config.model is MessageModel.CLUSTERING else "broadcasting",
                self.max_times(),
            )
        )

        def callback(result: object, error: Exception | None) -> None:
            consumed, failure = outcome(listener, len(messages), result, error)
            note_end(ended, consumed, failure)

        return callback

    def _stopwatch(self, topic: str, metrics: Metrics) -> Callable[[object, Exception | None], None]:
        clock = self.runner.clock
        begin = clock.monotonic()
        group = self.consumer.group
        return lambda result, error: metrics.count(
            "consume_seconds", clock.monotonic() - begin, topic=topic, group=group
        )

    def count_messages(self, assigned: AssignedQueue, count: int, result: str) -> None:
        """Count messages by their result."""
        if count and self.consumer.metrics is not None:
            topic, group = assigned.queue.topic, self.consumer.group
            self.consumer.metrics.count("consumed", count, topic=topic, group=group, result=result)


class DeliveryCall(Work):
    """A call of a listener. Its label and subject are computed on demand."""

    __slots__ = ("assigned", "delivery", "group", "listener", "messages")

    def __init__(
        self,
        delivery: Delivery,
        listener: Listener,
        assigned: AssignedQueue,
        messages: list[DeliveredMessage],
    ) -> None:
        self.delivery: Delivery = delivery
        consumer = delivery.consumer
        self.group: str = consumer.group
        self.owner: Client = consumer.client
        self.loop: asyncio.AbstractEventLoop | None = consumer.loop
        self.listener: Listener = listener
        self.assigned: AssignedQueue = assigned
        self.messages: list[DeliveredMessage] = messages

    def call(self) -> object:
        return self.delivery.call(self)

    def call_listener(self, with_hooks: Callable[[list[DeliveredMessage]], object] | None) -> object:
        """Call the listener, by ``with_hooks(messages)`` unless that is None."""
        if with_hooks is not None:
            return with_hooks(self.messages)
        return self.listener.function(self.messages if self.listener.as_list else self.messages[0])

    @property
    def at_listener(self) -> list[DeliveredMessage]:
        """What the listener has, or had last."""
        return self.messages

    def done(self, result: object, error: Exception | None) -> None:
        self.delivery.call_ended()
        self.delivery.apply_result(self, result, error)

    @property
    def label(self) -> str:  # type: ignore[override]
        return f"{self.delivery.consumer.label} {self.assigned.label} {self.messages[0].queue_offset}"

    @property
    def about(self) -> Sequence[tuple[str, int]]:  # type: ignore[override]
        broker_name = self.assigned.queue.broker_name
        return [(broker_name, message.physical_offset) for message in self.at_listener]


class Run(DeliveryCall):
    """Calls of a fast listener, one after the other in one thread, whose results are applied together.

    The thread takes the messages from an iterator, without the runner's lock. Others take the rest from it under the
    lock. Each message comes to one of them, because a step of the iterator is atomic, and the thread first counts a
    message as begun after it has it: what precedes the last one that was counted has ended.
    """

    __slots__ = ("_begun", "_rest", "_settled", "is_seen")

    def __init__(
        self, delivery: Delivery, listener: Listener, assigned: AssignedQueue, messages: list[DeliveredMessage]
    ) -> None:
        super().__init__(delivery, listener, assigned, messages)
        self._rest = iter(messages)
        self._begun = self._settled = 0
        self.is_seen = False
        """Whether it has been looked at, so that it takes long if it is seen again."""

    def call_listener(self, with_hooks: Callable[[list[DeliveredMessage]], object] | None) -> object:
        """Call the listener for one message after the other, up to one that is not consumed."""
        function, must_return = self.listener.function, self.listener.must_return
        assigned, result = self.assigned, None
        for message in self._rest:
            self._begun += 1
            result = function(message) if with_hooks is None else with_hooks([message])
            if result is not None and inspect.iscoroutine(result):
                break
            if (must_return and result is not True) or assigned.released:
                break
        return result

    @property
    def at_listener(self) -> list[DeliveredMessage]:
        """The message that the listener has, or had last."""
        return self.messages[max(self._begun - 1, 0) : self._begun]

    @property
    def ended(self) -> list[DeliveredMessage]:
        """What the listener has consumed, and is not settled yet."""
        return self.messages[self._settled : max(self._begun - 1, self._settled)]

    def settle(self, ended: list[DeliveredMessage]) -> None:
        """Note that the first of what has ended is part of the progress."""
        self._settled += len(ended)

    def take_rest(self) -> list[DeliveredMessage]:
        """Return what the listener has not got, which it does not get any more."""
        return list(self._rest)


async def _after(
    result: Awaitable[object], callbacks: list[Callback], changes: list[tuple[ContextVar[Any], Any]]
) -> object:
    """Await a listener in the context that its hooks have made."""
    for variable, value in changes:
        variable.set(value)
    try:
        value = await result
    except Exception as error:
        for callback in callbacks:
            callback(None, error)
        raise
    for callback in callbacks:
        callback(value, None)
    return value


def _missing_listener(topic: str) -> Listener:
    def fail(messages: object) -> None:
        raise LookupError(
            f"this instance has no listener for topic {topic!r}: subscribe all instances of a group to the same topics"
        )

    return Listener(fail, False, False, False)


# ---- consumption for a broker


def consume_directly(consumer: PushInstance, request: ConsumeDirectly) -> None:
    """Run the listener of a message in parallel with others, and pass the result to the request's ``ended``.

    Mirrors ``consumeMessageDirectly``.

    Raises:
        ClientStateError: The consumer is shutting down, or has no listener for the message.
    """
    stored = request.message
    queue = MessageQueue(stored.topic, request.broker_name, stored.queue_id)
    message = DeliveredMessage(stored.raw, queue, stored.queue_offset, (0, stored.queue_offset + 1))
    listener = consumer.listeners.listener_for(message.topic, message)
    if consumer.stopping or listener is None:
        why = "it is shutting down" if consumer.stopping else f"it has no listener for topic {message.topic!r}"
        raise ClientStateError(f"{consumer.label} can't consume message {message.message_id} directly: {why}")
    begin_ms = message.consume_start_timestamp_ms = consumer.runner.now_ms()

    def done(result: object, error: Exception | None) -> None:
        direct_result, remark = DirectResult.SUCCESS, None
        consumed, error = outcome(listener, 1, result, error)
        if error is not None:
            direct_result = DirectResult.LATER if is_requested(error) else DirectResult.THROW_EXCEPTION
            remark = cause_of(error)
        elif not consumed:
            direct_result = DirectResult.RETURN_NULL if result is None else DirectResult.LATER
        took_ms = max(0, consumer.runner.now_ms() - begin_ms)
        request.ended(DirectlyConsumed(direct_result, consumer.config.orderly, took_ms, remark))

    argument: Any = [message] if listener.as_list else message
    label = f"{consumer.label} consumes {message.message_id} directly"
    work = Work(label, lambda: listener.function(argument), done, consumer.client, loop=consumer.loop)
    consumer.runner.submit(work)


# ---- concurrent consumption

RUN: Final = 32
"""The most messages of a run. Listeners count as fast when so many end in `RUN_S`."""
RUN_S: Final = 0.001
LOOK_MS: Final = 5
"""Time between two looks at a run, the interpreter's switch interval. A slow run is seen twice, or follows another that
was seen."""
EXPIRED_LEVEL: Final = 3
MAX_EXPIRED: Final = 16


class ConcurrentDelivery(Delivery):
    """Calls listeners in parallel, in the order of the pulled messages. Called under the runner's lock."""

    def __init__(self, consumer: PushInstance) -> None:
        super().__init__(consumer)
        self._backlog = Backlog()
        self._postponed: deque[tuple[int, Pulled]] = deque()
        self._resting: list[Pulled] = []
        # The run under way. The other threads are free meanwhile; if it is slow, they get what it has not begun.
        self._run: Run | None = None
        self.is_fast = False
        """Whether listeners end so fast that they get runs."""
        self._was_run_seen = False
        self._ended_calls = 0  # since this time:
        self._count_began = 0.0
        self._watching = Step(f"{consumer.label} slow listener", self._divide_slow_run, consumer.client)
        self._expiring = Step(f"{consumer.label} consume timeout", self._expire, consumer.client)
        self._redelivery = Step(f"{consumer.label} deliver again", self._deliver_postponed, consumer.client)

    @property
    def _timeout_ms(self) -> int:
        return max(1, round(self.config.consume_timeout * 1000))

    def apply_settings(self, now_ms: int) -> None:
        """Continue with the consumer's new settings."""
        super().apply_settings(now_ms)
        # The timeout can be shorter now than when the step was planned, so plan it again from the new one.
        if self._expiring.at is not None:
            self.runner.wake(self._expiring, next_from_first(now_ms, self.started_ms, self._timeout_ms))

    def stop(self) -> threading.Event | None:
        """Begin nothing new, also not of a run; return an event as `Delivery.stop` does."""
        if self._run is not None:
            self._divide(self._run)
        return super().stop()

    def max_times(self) -> int | None:
        """Return the number of redeliveries before a message becomes a dead letter."""
        return 16 if self.consumer.max_reconsume_times is None else self.consumer.max_reconsume_times

    def pulled(self, assigned: AssignedQueue, count: int, now_ms: int) -> None:
        """Begin messages that were added to a queue, as far as threads are free."""
        self._enqueue(Pulled(assigned, count))
        self._begin_waiting(now_ms)

    def _enqueue(self, pulled: Pulled, *, is_first: bool = False) -> None:
        """Add messages to the backlog: by listener if these have weights."""
        is_weighted = self.consumer.listeners.are_weighted
        if pulled.messages is None and not is_weighted:
            self._backlog.append(pulled, 1, is_first=is_first)
            return
        self._take(pulled)
        by_listener: dict[int, tuple[Listener, list[DeliveredMessage]]] = {}
        for message in pulled.messages or ():
            listener = self.listener_for(pulled.assigned, message)
            by_listener.setdefault(id(listener), (listener, []))[1].append(message)
        batches = [
            (batch, (listener.weight or 1) if is_weighted else 1)
            for listener, messages in by_listener.values()
            for batch in batches_of(pulled.assigned, messages, self.config.batch_size if listener.as_list else 1)
        ]
        # Each batch that goes first stands before the one added last, so add them from the end to keep their order.
        for batch, weight in reversed(batches) if is_first else batches:
            self._backlog.append(batch, weight, is_first=is_first)

    def _take(self, pulled: Pulled) -> None:
        """Take the messages from their queue, so that they can overtake others."""
        if pulled.messages is None:
            pulled.messages = pulled.assigned.messages.take(pulled.count)
            pulled.assigned.messages.lined_up += len(pulled.messages)

    def line_up(self) -> None:
        """Arrange the messages that wait by the present listeners and settings."""
        backlog = self._backlog.take_all()
        if self.consumer.listeners.are_weighted:
            for pulled in self._resting:
                self._take(pulled)
        former: Pulled | None = None
        for pulled in backlog:
            if former is not None and former.assigned is pulled.assigned and former.messages and pulled.messages:
                former.messages += pulled.messages  # batches of another size
                continue
            if former is not None:
                self._enqueue(former)
            former = None if pulled.assigned.released else pulled
        if former is not None:
            self._enqueue(former)

    def try_begin(self, assigned: AssignedQueue, raw: bytes, bounds: tuple[int, int], now_ms: int) -> bool:
        """Add and begin a message if nothing precedes it: the fast path of a consumer that keeps up."""
        if self._backlog.lanes or self.running >= self.config.threads or self.consumer.stopping:
            return False
        if self.rests.is_probing or assigned.queue in self.rests:
            return False
        begun = assigned.messages.put_and_take(raw, bounds)
        if begun is None:
            return False
        begun.consume_start_timestamp_ms = now_ms
        self.submit(assigned, [begun])
        self._watch_timeouts(now_ms)
        return True

    def _begin_waiting(self, now_ms: int) -> None:
        backlog, limit = self._backlog, 1 if self.rests.is_probing else self.config.threads
        if self.consumer.stopping:
            backlog.lanes.clear()
            return
        lanes = backlog.lanes
        while lanes and self.running < limit and self._run is None and not self.rests.is_whole:
            # Without weights the first message in order is next, and asking the lanes for their turns is left out.
            first = lanes[1][0] if len(lanes) == 1 and 1 in lanes else backlog.first()
            assigned = first.assigned
            # A released queue's messages stay in the backlog until their turn: searching them at the release would take
            # as long as the backlog.
            if assigned.released:
                backlog.remove(first)
                continue
            if assigned.queue in self.rests:
                backlog.remove(first)
                self._resting.append(first)
                continue
            run_listener = None
            if first.messages is not None:
                messages = first.messages
                assigned.messages.lined_up -= len(messages)
                backlog.remove(first)
                backlog.charge(first.weight, len(messages))
            else:
                count, run_listener = first.count, self._run_listener(assigned) if self.is_fast else None
                batch = self.batch_size(assigned) if run_listener is None else RUN
                messages = assigned.messages.take(count if count < batch else batch)
                first.count = count = count - len(messages)
                if count <= 0 or not messages:
                    backlog.remove(first)
                if not messages:
                    continue
            for message in messages:
                message.consume_start_timestamp_ms = now_ms
            if run_listener is None or len(messages) == 1:
                self.submit(assigned, messages)
            else:
                if self._watching.at is None:
                    self.runner.wake(self._watching, now_ms + LOOK_MS)
                self._run = Run(self, run_listener, assigned, messages)
                self._submit(self._run)
            self._watch_timeouts(now_ms)

    def _watch_timeouts(self, now_ms: int) -> None:
        if self._expiring.at is None:
            self.runner.wake(self._expiring, next_from_first(now_ms, self.started_ms, self._timeout_ms))

    def apply_result(self, call: DeliveryCall, result: object, error: Exception | None) -> None:
        """Apply the result or the exception of a listener, and begin what waits for a free thread."""
        assigned, messages = call.assigned, call.at_listener
        consumed, error = outcome(call.listener, len(messages), result, error)
        if isinstance(call, Run):
            self._end_run(call)
        if self.consumer.recorder is not None:
            self.consumer.recorder.ends(messages, consumed)
        # The result for a released queue is dropped: its messages belong to the queue's next reader, and progress or a
        # retry from here would count as that reader's.
        if messages and not assigned.released:
            if isinstance(error, DownstreamDown):
                self._rest(assigned, messages[consumed:], error)
                messages = messages[:consumed]
            elif self.rests.is_probing or self.consumer.states.causes:
                self.rests.succeeded()
            if messages:
                self._apply(assigned, messages, consumed, error)
        if self._backlog.lanes:
            if not self.is_fast:
                self._count_ended()
            self._begin_waiting(self.runner.now_ms())

    # ---- runs of fast listeners

    def _count_ended(self) -> None:
        """Note that a listener has ended while messages wait; if many did in a short time, runs begin."""
        self._ended_calls += 1
        if self._ended_calls >= RUN:
            now, began = self.runner.clock.monotonic(), self._count_began
            self._ended_calls, self._count_began = 0, now
            # By hand, and in a history, each call is a turn of its own.
            is_by_hand = not moves_by_itself(self.runner.clock)
            self.is_fast = now - began < RUN_S and not is_by_hand and self.consumer.recorder is None

    def _run_listener(self, assigned: AssignedQueue) -> Listener | None:
        """Return the listener of all messages of a queue, None if it can't have a run of them."""
        listener = None if self.rests.is_probing else self.consumer.listeners.sole_listener(assigned.queue.topic)
        return None if listener is None or listener.as_list or listener.is_async else listener

    def _end_run(self, run: Run) -> None:
        if self._run is run:
            self._run = None
            self.is_fast, self._was_run_seen = not (run.is_seen and self._was_run_seen), run.is_seen
        self._divide(run)

    def _divide_slow_run(self, now_ms: int) -> int | None:
        """Look at the run under way; let all threads have what a slow one has not begun."""
        run = self._run
        if run is None:
            return None
        if not run.is_seen:
            run.is_seen = True
            return now_ms + LOOK_MS
        self._run, self.is_fast = None, False
        self.count_running()  # Ctrl-C can have come between the count of the run and its submission
        self._divide(run)
        self._begin_waiting(now_ms)
        return None

    def _divide(self, run: Run) -> None:
        """Apply the results of a run up to now, and let what it has not begun wait again."""
        rest = run.take_rest()
        self.counts.delivered -= len(rest)
        if not run.assigned.released:
            self._settle(run)
            if rest:
                self._begin_later(run.assigned, rest)

    def settle(self) -> None:
        """Apply the results of all listeners that have ended, before progress is stored."""
        if self._run is not None:
            self._settle(self._run)

    def _settle(self, run: Run) -> None:
        ended = run.ended
        if ended:
            self._apply(run.assigned, ended, len(ended), None)
            run.settle(ended)

    def _begin_later(self, assigned: AssignedQueue, messages: list[DeliveredMessage]) -> None:
        """Let messages that were taken from their queue wait again, before all others."""
        for message in messages:
            message.consume_start_timestamp_ms = None
        assigned.messages.lined_up += len(messages)
        self._enqueue(Pulled(assigned, len(messages), messages), is_first=True)

    # ---- rests

    def _rest(self, assigned: AssignedQueue, messages: list[DeliveredMessage], error: DownstreamDown) -> None:
        """Keep messages to begin again after a rest, without counting a failure."""
        messages = [message for message in messages if assigned.messages.holds(message)]  # none that went back
        self.count_messages(assigned, len(messages), "downstream")
        if messages:
            self._begin_later(assigned, messages)
        self.rests.begin_rest(error, assigned.queue)

    def _resumed(self, now_ms: int) -> None:
        for pulled in reversed(self._resting):
            self._enqueue(pulled, is_first=True)
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
            # One that exceeded consume_timeout has been sent back, and would come twice.
            failed = [message for message in failed if assigned.messages.holds(message)]
            unaccepted = self.retries.send_back(assigned, failed, error, self.max_times()) if failed else []
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
            message.consume_start_timestamp_ms = None  # it is not in a listener
        # All of them wait for the same time, so the deque is in order of the due times.
        due_ms = self.runner.now_ms() + REDELIVERY_MS
        assigned.messages.lined_up += len(messages)
        for batch in batches_of(assigned, messages, self.batch_size(assigned)):
            self._postponed.append((due_ms, batch))
        self.runner.wake(self._redelivery, self._postponed[0][0])

    def _deliver_postponed(self, now_ms: int) -> int | None:
        while self._postponed and self._postponed[0][0] <= now_ms:
            self._enqueue(self._postponed.popleft()[1])
        self._begin_waiting(now_ms)
        return self._postponed[0][0] if self._postponed else None

    # ---- consume timeout

    def _expire(self, now_ms: int) -> int | None:
        """Send back the first messages of each queue that a listener has had for longer than the consume timeout."""
        if self.consumer.stopping:
            return None
        self.settle()
        for assigned in list(self.consumer.assigned.values()):
            for _ in range(MAX_EXPIRED):
                first = assigned.messages.first_started()
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
                if self.consumer.recorder is not None:
                    self.consumer.recorder.ends((first,), 0)
                if sent is not None and sent.is_dead:
                    self.retries.log_dead_letter(assigned, first, TimeoutError(cause))
                # Progress moves with the next message that ends, or here if the queue is empty now.
                assigned.messages.remove((first,))
                if assigned.throttled:
                    self.consumer.fetcher.resume_throttled(assigned)
                elif not len(assigned.messages):
                    self.runner.wake(assigned.pull)
        if any(assigned.messages.begun for assigned in self.consumer.assigned.values()):
            return next_from_first(now_ms, self.started_ms, self._timeout_ms)
        return None
