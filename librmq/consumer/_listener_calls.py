"""Calls of listeners, and what watches them.

A call has three steps: messages are claimed under the runner's lock, the listener runs without it, and its outcome is
applied under it. Other turns, such as a rebalance, can come between the steps, so each looks whether the queue was
released meanwhile. `librmq.consumer._concurrent` and `librmq.consumer._orderly` choose what to call next, and apply the
outcome.
"""

from __future__ import annotations

import inspect
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar, copy_context
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

from librmq.client import Client
from librmq.consumer._assignment import AssignedQueue
from librmq.consumer._failures import Turn, Turns, cause_of, outcome
from librmq.consumer._instance import Instance
from librmq.consumer._listeners import DeliveredMessage, Listener, Listeners, OrderlyResult
from librmq.errors import ClientStateError
from librmq.listener import is_requested, returned_failure
from librmq.message import MessageQueue
from librmq.override import override
from librmq.protocol import ConsumeDirectly, DirectlyConsumed, DirectResult, ListenerCall, MessageModel
from librmq.runtime import Work
from librmq.runtime.locks import Event

if TYPE_CHECKING:
    import asyncio


class DeliveryCall(Work):
    """A call of a listener. Its label and subject are computed on demand, because most are never shown."""

    __slots__ = ("apply_result", "assigned", "calls", "group", "listener", "messages", "turn")

    def __init__(
        self,
        calls: ListenerCalls,
        apply_result: Callable[[Any, object, Exception | None], None],
        listener: Listener,
        assigned: AssignedQueue,
        messages: list[DeliveredMessage],
        turn: Turn | None = None,
    ) -> None:
        """``apply_result(call, result, error)`` gets the outcome, under the lock; a suspect has its ``turn``."""
        instance = calls.instance
        self.calls: ListenerCalls = calls
        self.apply_result: Callable[[Any, object, Exception | None], None] = apply_result
        self.group: str = instance.group
        self.owner: Client = instance.client
        self.loop: asyncio.AbstractEventLoop | None = calls.loop
        self.task: asyncio.Task[Any] | None = None
        self.listener: Listener = listener
        self.assigned: AssignedQueue = assigned
        self.messages: list[DeliveredMessage] = messages
        self.turn: Turn | None = turn

    @override
    def call(self) -> object:
        if self.assigned.released:
            # The queue went to another reader while this call waited for a thread. Its result would be ignored, and the
            # other reader delivers the message, so the listener is not called.
            return None
        calls, instance, thread = self.calls, self.calls.instance, get_ident()
        # A listener that moves time in a test runs other listeners in its own thread, so calls of one thread can nest.
        outer = calls.by_thread.get(thread)
        calls.by_thread[thread] = self
        try:
            if not instance.watchers:
                return self.call_listener(None)
            instance._note("hand_out", result="listener", queue=self.assigned.queue, messages=self.messages)
            is_watched = "process" in instance.watchers
            watched = partial(calls.call_watched, self.listener, self.assigned) if is_watched else None
            return self.call_listener(watched)
        finally:
            if outer is None:
                del calls.by_thread[thread]
            else:
                calls.by_thread[thread] = outer

    def call_listener(self, watched: Callable[[list[DeliveredMessage]], object] | None) -> object:
        """Call the listener, by ``watched(messages)`` unless that is None."""
        place = self.assigned.place
        if place is not None:
            place.begin(self.messages)
        if watched is not None:
            return watched(self.messages)
        return self.listener.function(self.messages if self.listener.as_list else self.messages[0])

    @property
    def at_listener(self) -> list[DeliveredMessage]:
        """What the listener has, or had last."""
        return self.messages

    @override
    def done(self, result: object, error: Exception | None) -> None:
        calls = self.calls
        calls.running -= 1
        if not calls.may_begin and not calls.running:
            if calls.all_ended is not None:
                calls.all_ended.set()
            calls.turns.look()
        if result is not None and result is not True and error is None:
            error = returned_failure(result)
            if error is None:
                calls.warn_of_result(self.listener, result)
        self.apply_result(self, result, error)
        if self.turn is not None:
            calls.turns.ended(self.turn)

    @property
    @override
    def label(self) -> str:  # type: ignore[override]
        return f"{self.calls.instance._label} {self.assigned.label} {self.messages[0].queue_offset}"

    @property
    @override
    def about(self) -> Sequence[tuple[str, int]]:  # type: ignore[override]
        broker_name = self.assigned.queue.broker_name
        return [(broker_name, message.physical_offset) for message in self.at_listener]


class ListenerCalls:
    """The calls of one consumer's listeners. Called under the runner's lock, except for `call_watched`."""

    def __init__(self, instance: Instance) -> None:
        self.instance: Instance = instance
        self.listeners: Listeners = Listeners()
        self.loop: asyncio.AbstractEventLoop | None = None
        """Runs coroutine listeners; None: a loop of the runner's own."""
        self.running: int = 0
        """The listeners that run or are about to."""
        self.by_thread: dict[int, DeliveryCall] = {}
        """The calls that threads make now."""
        self._warned: set[int] = set()
        self.all_ended: threading.Event | None = None
        """Set when no listener runs any more; None until the consumer stops."""
        self.turns: Turns = Turns.of(instance.runner)
        self.may_begin: bool = True
        """Whether listeners may begin: not while a suspect has its turn, nor when the consumer stops."""

    # ---- which call

    def batch_size(self, assigned: AssignedQueue) -> int:
        """Return the largest batch for one call: one message if the queue's messages have different listeners."""
        size = self.instance.config.batch_size
        if size > 1 and not self.listeners.share_batches(assigned.queue.topic, assigned.is_retry):
            return 1
        return size

    def listener_for(self, assigned: AssignedQueue, message: DeliveredMessage) -> Listener:
        """Return the listener of a message; it fails if this instance does not subscribe to a redelivery's topic."""
        topic = message.topic if assigned.is_retry else assigned.queue.topic
        listener = self.listeners.listener_for(topic, message)
        if listener is None and assigned.is_retry:
            listener = self.listeners.dead_letter_listener(message)
        return listener or _missing_listener(topic)

    def begin(
        self,
        apply_result: Callable[[Any, object, Exception | None], None],
        assigned: AssignedQueue,
        messages: list[DeliveredMessage],
        turn: Turn | None = None,
    ) -> None:
        """Call the listener of messages as soon as a thread is free."""
        listener = self.listener_for(assigned, messages[0])
        self.submit(DeliveryCall(self, apply_result, listener, assigned, messages, turn))

    def submit(self, call: DeliveryCall) -> None:
        self.running += 1
        self.instance.runner.submit(call)

    def count_running(self) -> None:
        """Count the listeners again that run or are about to, after an interrupted `submit`."""
        works = {*self.instance.runner.ready, *self.instance.runner.running}
        self.running = sum(isinstance(work, DeliveryCall) and work.calls is self for work in works)

    def wait_for_end(self) -> threading.Event | None:
        """Begin nothing more; return an event that is set when all listeners have ended, None if none runs."""
        self.may_begin = False
        if not self.running:
            return None
        self.all_ended = Event()
        return self.all_ended

    def cancel(self) -> int:
        cancelled = 0
        for work in list(self.instance.runner.running):
            if isinstance(work, DeliveryCall) and work.calls is self and hasattr(work, "cancel"):
                work.cancel()
                cancelled += 1
        return cancelled

    def are_around_caller(self) -> bool:
        """Return whether the caller is one of this consumer's listeners, by its thread or its task."""
        runner = self.instance.runner
        works = [work for work in list(runner.running) if isinstance(work, DeliveryCall) and work.calls is self]
        return get_ident() in self.by_thread or runner.runs_here(works)

    def warn_of_result(self, listener: Listener, result: object) -> None:
        """Warn once of a listener whose result says nothing, because its author may take it for a failure."""
        is_index = listener.as_list and isinstance(result, int) and not isinstance(result, bool)
        is_known = is_index or (self.instance.config.orderly and isinstance(result, OrderlyResult))
        if is_known or listener.must_return or id(listener.function) in self._warned:
            return
        self._warned.add(id(listener.function))
        self.instance._log.warning(
            "%(consumer)s: the listener %(listener)s returned %(result)s, which counts as consumed: return None or "
            "True, and raise an exception for a failure",
            listener=f"{listener.function!r:.80}",
            result=f"{result!r:.80}",
        )

    # ---- around a call

    def call_watched(self, listener: Listener, assigned: AssignedQueue, messages: list[DeliveredMessage]) -> object:
        # The call has a context of its own, so what a watcher sets in it ends with the call.
        before = copy_context()
        context = before.copy()
        result, end = context.run(self._call_in_context, listener, assigned, messages)
        if inspect.iscoroutine(result):
            changes = [(variable, value) for variable, value in context.items() if before.get(variable) is not value]
            return _after(result, end, changes)
        end(result, None)
        return result

    def _call_in_context(
        self, listener: Listener, assigned: AssignedQueue, messages: list[DeliveredMessage]
    ) -> tuple[object, Callable[[object, Exception | None], None]]:
        instance = self.instance
        call = instance._watched(
            "process",
            messages[0].topic,
            tuple(messages),
            queue=assigned.queue,
            is_batch=listener.as_list,
            listener=listener,
            outcome=partial(outcome, listener, len(messages)),
            model="clustering" if instance.config.model is MessageModel.CLUSTERING else "broadcasting",
            max_times=instance.max_redeliveries,
        )
        try:
            result = listener.function(messages if listener.as_list else messages[0])
        except Exception as error:
            call.end(None, error)
            raise
        return result, call.end

    # ---- for diagnosis

    def shown(self) -> tuple[ListenerCall, ...]:
        """Return the listeners that threads run now, and where each stands: its stack, without the callers here."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        calls = []
        for ident, call in dict(self.by_thread).items():
            # A copy is read, because threads begin and end calls meanwhile.
            callers = type(call).call_listener.__code__, ListenerCalls._call_in_context.__code__
            stack: list[str] = []
            for frame, line in traceback.walk_stack(frames[ident]) if ident in frames else ():
                if frame.f_code in callers:
                    break
                stack.insert(0, f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}")
            else:  # The call has ended, or has not begun.
                continue
            if not stack:
                continue
            assigned, messages = call.assigned, call.at_listener
            first = messages[0]
            calls.append(
                ListenerCall(
                    assigned.queue, first.queue_offset, first.message_id, len(messages),
                    first.consume_start_timestamp_ms, names.get(ident, str(ident)), tuple(stack),
                )
            )  # fmt: skip
        return tuple(sorted(calls, key=lambda entry: (entry.queue, entry.queue_offset)))


async def _after(
    result: Awaitable[object],
    end: Callable[[object, Exception | None], None],
    changes: list[tuple[ContextVar[Any], Any]],
) -> object:
    """Await a listener in the context that its watchers have made."""
    for variable, value in changes:
        variable.set(value)
    try:
        value = await result
    except Exception as error:
        end(None, error)
        raise
    end(value, None)
    return value


def _missing_listener(topic: str) -> Listener:
    def fail(messages: object) -> None:
        raise LookupError(
            f"this instance has no listener for topic {topic!r}: subscribe all instances of a group to the same topics"
        )

    return Listener(fail, as_list=False, must_return=False, is_async=False)


# ---- consumption for a broker


def consume_directly(calls: ListenerCalls, request: ConsumeDirectly) -> None:
    """Run the listener of a message in parallel with others, and pass the result to the request's ``ended``.

    Mirrors ``consumeMessageDirectly``.
    """
    instance, stored = calls.instance, request.message
    queue = MessageQueue(stored.topic, request.broker_name, stored.queue_id)
    message = DeliveredMessage(stored.raw, queue, stored.queue_offset, (0, stored.queue_offset + 1))
    listener = calls.listeners.listener_for(message.topic, message)
    if instance._stopping or listener is None:
        why = "it is shutting down" if instance._stopping else f"it has no listener for topic {message.topic!r}"
        raise ClientStateError(f"{instance._label} can't consume message {message.message_id} directly: {why}")
    begin_ms = message.consume_start_timestamp_ms = instance.runner.now_ms()

    def done(result: object, error: Exception | None) -> None:
        direct_result, remark = DirectResult.SUCCESS, None
        consumed, error = outcome(listener, 1, result, error)
        if error is not None:
            direct_result = DirectResult.LATER if is_requested(error) else DirectResult.THROW_EXCEPTION
            remark = cause_of(error)
        elif not consumed:
            direct_result = DirectResult.RETURN_NULL if result is None else DirectResult.LATER
        took_ms = max(0, instance.runner.now_ms() - begin_ms)
        request.ended(DirectlyConsumed(direct_result, instance.config.orderly, took_ms, remark))

    argument: Any = [message] if listener.as_list else message
    label = f"{instance._label} consumes {message.message_id} directly"
    work = Work(label, lambda: listener.function(argument), done, instance.client, loop=calls.loop)
    instance.runner.submit(work)
