"""State of a consumer instance for diagnosis: its queues, and the places of its running listeners.

Threads are examined only when a broker asks, so delivery has no cost.
"""

from __future__ import annotations

import sys
import threading
import traceback
from types import CodeType, FrameType

from librmq.consumer.assignment import AssignedQueue
from librmq.consumer.instance import Instance
from librmq.consumer.listeners import DeliveredMessage
from librmq.protocol import HeldQueue, InstanceState, ListenerCall


def instance_state(
    member: Instance,
    kind: str,
    *,
    listeners: tuple[ListenerCall, ...] = (),
    running: int = 0,
    is_paused: bool = False,
    started_ms: int = 0,
) -> InstanceState:
    """Return the state of an instance. Call it under the runner's lock."""
    config = member.config
    held = [assigned for assigned in member.assigned.values() if not assigned.released]
    return InstanceState(
        member.client.client_id,
        member.group,
        kind,
        config.model,
        config.orderly,
        is_paused,
        config.threads if kind == "push" else 0,
        running,
        getattr(config.strategy, "__name__", repr(config.strategy)),
        tuple(_held_queue(assigned) for assigned in held),
        listeners,
        started_ms,
    )


def _held_queue(assigned: AssignedQueue) -> HeldQueue:
    messages = assigned.messages
    first = messages.first_begun() or messages.peek()
    since_ms = first.consume_start_timestamp_ms if isinstance(first, DeliveredMessage) else None
    if since_ms is None and assigned.delivering and assigned.since_ms:
        since_ms = assigned.since_ms  # orderly
    return HeldQueue(
        assigned.queue,
        assigned.progress,
        assigned.stored_progress,
        messages.waiting,
        messages.begun,
        None if first is None else first.queue_offset,
        None if first is None else first.message_id,
        since_ms,
        0 if first is None else first.reconsume_times,
        assigned.pulled_timestamp_ms,
        assigned.throttled,
        None if first is None else first.queue_offset + messages.span,
        messages.size,
        assigned.locked,
        assigned.lock_timestamp_ms,
    )


def listener_calls(call: CodeType, delivery: object) -> tuple[ListenerCall, ...]:
    """Return the listeners that threads are running.

    ``call`` is the code of the method that calls a listener with the arguments ``self`` (``delivery``), ``assigned``
    and ``messages``.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    calls = []
    for ident, top in sys._current_frames().items():
        frame: FrameType | None = top
        while frame is not None and not (frame.f_code is call and frame.f_locals.get("self") is delivery):
            frame = frame.f_back
        if frame is None or frame is top:
            continue
        messages: list[DeliveredMessage] = frame.f_locals["messages"]
        assigned: AssignedQueue = frame.f_locals["assigned"]
        stack = [
            f"{entry.filename}:{entry.lineno} {entry.name}"
            for entry in traceback.extract_stack(top, limit=_depth(top, frame))
        ]
        first = messages[0]
        calls.append(
            ListenerCall(
                assigned.queue, first.queue_offset, first.message_id, len(messages), first.consume_start_timestamp_ms,
                names.get(ident, str(ident)), tuple(stack),
            )
        )  # fmt: skip
    return tuple(sorted(calls, key=lambda entry: (entry.queue, entry.queue_offset)))


def _depth(top: FrameType, end: FrameType) -> int:
    """Return the number of frames from ``top`` to ``end``, exclusive."""
    depth, frame = 0, top
    while frame is not end and frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    return depth
