"""One message passed to a listener because a broker asks for it. Mirrors ``consumeMessageDirectly``."""

from __future__ import annotations

from typing import Any

from librmq.consumer.delivery import cause_of
from librmq.consumer.instance import PushInstance
from librmq.consumer.listeners import DeliveredMessage
from librmq.errors import ClientStateError
from librmq.listener import DownstreamDown, ReconsumeLater, SuspendQueue
from librmq.message.message import MessageQueue
from librmq.protocol import ConsumeDirectly, DirectlyConsumed, DirectResult
from librmq.runtime.runner import Work


def consume_directly(consumer: PushInstance, request: ConsumeDirectly) -> None:
    """Run the listener of a message in parallel with others, and pass the result to the request's ``ended``.

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
        outcome, remark = DirectResult.SUCCESS, None
        if error is None:
            try:
                if listener.acknowledged(result, 1) < 0:
                    outcome = DirectResult.RETURN_NULL if result is None else DirectResult.LATER
            except ValueError as refused:
                error = refused
        if error is not None:
            is_asked_for = isinstance(error, ReconsumeLater | SuspendQueue | DownstreamDown)
            outcome = DirectResult.LATER if is_asked_for else DirectResult.THROW_EXCEPTION
            remark = cause_of(error)
        took_ms = max(0, consumer.runner.now_ms() - begin_ms)
        request.ended(DirectlyConsumed(outcome, consumer.config.orderly, took_ms, remark))

    argument: Any = [message] if listener.as_list else message
    label = f"{consumer.label} consumes {message.message_id} directly"
    work = Work(label, lambda: listener.function(argument), done, consumer.client, loop=consumer.loop)
    consumer.runner.submit(work)
