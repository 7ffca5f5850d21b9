"""The state of a running consumer, as clients report it to tools. Mirrors ``ConsumerRunningInfo``."""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any, Final

from librmq.errors import MalformedError
from librmq.java.lang import java_int
from librmq.message import MessageQueue
from librmq.protocol import DescribeInstance, HeldQueue, InstanceState, ListenerCall, MessageModel, Subscription
from librmq.wire.remoting._bodies import by_queue, number_in, queue_key, read_body, subscription_row, write_body
from librmq.wire.remoting._codec import check, frame_of
from librmq.wire.remoting._frames import Frame
from librmq.wire.remoting._headers import ClientOfGroupHeader, RequestCode

_MOST_LISTENERS: Final = 256
_VERSION: Final = "V4_9_4"
"""The version whose protocol the client speaks, as a tool shows it."""
_STATE: Final = "librmqState"
"""A property of librmq's own: what its instances know beyond Java's, for those who look for what holds a group back."""
_NUMBER: Final = (int,)
_MAYBE: Final = (int, NoneType)
_NAME: Final = (str, NoneType)
_QUEUE: Final = ((str,), (str,), _NUMBER)
_OF_QUEUE: Final = (*_QUEUE, _MAYBE, _MAYBE, _NUMBER, _NUMBER, _MAYBE, _NAME, _MAYBE, _NUMBER, _NUMBER, (bool,))
"""The types of a queue's fields: its name, then those of `HeldQueue` from ``progress`` to ``is_throttled``."""
_OF_LISTENER: Final = (*_QUEUE, _NUMBER, (str,), _NUMBER, _MAYBE, (str,))
"""The types of a listener's fields: its queue's name, then those of `ListenerCall` up to ``thread``."""


def running_info_body(
    state: InstanceState, subscriptions: Mapping[str, Subscription], name_servers: tuple[str, ...], with_stacks: bool
) -> bytes:
    """Return the state of an instance with its subscriptions by topic, and where this process's threads stand."""
    queues = sorted(state.queues, key=lambda held: held.queue)
    body = {
        "mqTable": {queue_key(held.queue): _queue_info(held) for held in queues},
        "properties": _properties(state, name_servers),
        "statusTable": {},  # rates are not measured
        "subscriptionSet": [subscription_row(subscriptions[topic]) for topic in sorted(subscriptions)],
    }
    if with_stacks:
        body["jstack"] = _stacks()
    return write_body(body)


def _properties(state: InstanceState, name_servers: tuple[str, ...]) -> dict[str, str]:
    properties = {
        "PROP_CLIENT_VERSION": _VERSION,
        "PROP_CONSUMEORDERLY": str(state.is_orderly).lower(),
        "PROP_CONSUMER_START_TIMESTAMP": str(state.started_ms),
        "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY" if state.kind == "push" else "CONSUME_ACTIVELY",
        "PROP_NAMESERVER_ADDR": "".join(f"{address};" for address in name_servers),
        "PROP_THREADPOOL_CORE_SIZE": str(state.threads),
        "allocateMessageQueueStrategy": state.strategy,
        "clientIP": state.client_id.partition("@")[0],
        "consumerGroup": state.group,
        "instanceName": state.client_id.partition("@")[2],
        "maxReconsumeTimes": str(-1 if state.max_reconsume_times is None else state.max_reconsume_times),
        "messageModel": state.model.value,
        "pause": str(state.is_paused).lower(),
    }
    return properties | {_STATE: json.dumps(_own_state(state), separators=(",", ":"))}


def _own_state(state: InstanceState) -> dict[str, object]:
    return {
        "running": state.running,
        "queues": [
            [
                *held.queue,
                *(held.progress, held.stored, held.waiting, held.running, held.first, held.first_message_id),
                *(held.first_since_ms, held.first_failures, held.pulled_timestamp_ms, held.is_throttled),
            ]
            for held in state.queues
        ],
        "listeners": [
            [
                *call.queue,
                *(call.queue_offset, call.message_id, call.messages, call.since_ms, call.thread, list(call.stack)),
            ]
            for call in state.listeners[:_MOST_LISTENERS]
        ],
    }


def running_info_frame(request: DescribeInstance) -> Frame:
    """Return the request for the state of an instance."""
    header = ClientOfGroupHeader(request.group, request.client_id)
    return frame_of(RequestCode.GET_CONSUMER_RUNNING_INFO, header)


def read_running_info(request: DescribeInstance, answer: Frame) -> InstanceState:
    """Return the state of an instance; that of a client of another kind has no listeners.

    Raises:
        BrokerError: The broker or the client refuses.
        MalformedError: The answer is something else.
    """
    body = read_body(check(answer).body, "a client's state")
    properties = body.get("properties")
    if not isinstance(properties, dict):
        raise MalformedError(f"properties: expected an object, found {properties!r:.80}")
    texts = {str(name): str(text) for name, text in properties.items()}
    maximum = java_int(texts.get("maxReconsumeTimes", ""))
    running, own_queues, listeners = _read_own_state(texts.get(_STATE))
    is_broadcast = texts.get("messageModel") == MessageModel.BROADCASTING.value
    return InstanceState(
        client_id=request.client_id,
        group=request.group,
        kind="push" if texts.get("PROP_CONSUME_TYPE") == "CONSUME_PASSIVELY" else "pull",
        model=MessageModel.BROADCASTING if is_broadcast else MessageModel.CLUSTERING,
        is_orderly=texts.get("PROP_CONSUMEORDERLY") == "true",
        is_paused=texts.get("pause") == "true",
        threads=java_int(texts.get("PROP_THREADPOOL_CORE_SIZE", "")) or 0,
        running=running,
        strategy=texts.get("allocateMessageQueueStrategy", ""),
        queues=tuple(_held_queue(queue, row, own_queues) for queue, row in by_queue(body.get("mqTable") or {})),
        listeners=listeners,
        started_ms=java_int(texts.get("PROP_CONSUMER_START_TIMESTAMP", "")) or 0,
        max_reconsume_times=None if maximum is None or maximum < 0 else maximum,
    )


def _queue_info(held: HeldQueue) -> dict[str, object]:
    """Return a queue as ``ProcessQueueInfo``.

    Tools call a queue blocked by the time of ``lastConsumeTimestamp``: since when a listener has its first message, or
    the last pull if none has it.
    """
    since_ms = held.pulled_timestamp_ms if held.first_since_ms is None else held.first_since_ms
    return {
        "cachedMsgCount": held.waiting + held.running,
        "cachedMsgMaxOffset": held.last or 0,
        "cachedMsgMinOffset": held.first or 0,
        "cachedMsgSizeInMiB": held.held_bytes >> 20,
        "commitOffset": -1 if held.progress is None else held.progress,
        "droped": False,
        "lastConsumeTimestamp": since_ms,
        "lastLockTimestamp": held.lock_timestamp_ms or 0,
        "lastPullTimestamp": held.pulled_timestamp_ms,
        "locked": held.is_locked,
        "transactionMsgCount": 0,
        "transactionMsgMaxOffset": 0,
        "transactionMsgMinOffset": 0,
        "tryUnlockTimes": 0,
    }


def _read_own_state(
    text: str | None,
) -> tuple[int | None, Mapping[MessageQueue, Sequence[Any]], tuple[ListenerCall, ...]]:
    """Return what an instance of librmq says of itself: listeners that run, numbers by queue, and where they stand.

    Raises:
        MalformedError: It is something else.
    """
    if text is None:
        return None, {}, ()
    try:
        state = json.loads(text)
        queues = {}
        for row in state["queues"]:
            topic, broker, queue_id, *numbers = _checked(row, _OF_QUEUE)
            queues[MessageQueue(topic, broker, queue_id)] = numbers
        calls = []
        for *fields, stack in state["listeners"]:
            topic, broker, queue_id, *of_call = _checked(fields, _OF_LISTENER)
            of_call.append(tuple(map(str, stack)))
            calls.append(ListenerCall(MessageQueue(topic, broker, queue_id), *of_call))
        return _checked([state["running"]], (_MAYBE,))[0], queues, tuple(calls)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise MalformedError(f"{_STATE}: expected the state of an instance, found {text!r:.80}") from error


def _checked(values: Any, kinds: Sequence[tuple[type, ...]]) -> list[Any]:  # noqa: ANN401 (as it came)
    if len(values) != len(kinds) or not all(type(value) in kind for value, kind in zip(values, kinds, strict=True)):
        raise TypeError("expected other fields")
    return list(values)


def _held_queue(queue: MessageQueue, row: Any, own: Mapping[MessageQueue, Sequence[Any]]) -> HeldQueue:  # noqa: ANN401 (as it came)
    if queue in own:
        last = number_in(row, "cachedMsgMaxOffset") if number_in(row, "cachedMsgCount") else None
        return replace(HeldQueue(queue, *own[queue]), last=last, is_locked=row.get("locked") is True)
    progress, held = number_in(row, "commitOffset"), number_in(row, "cachedMsgCount")
    return HeldQueue(
        queue=queue,
        progress=None if progress < 0 else progress,
        stored=None,
        waiting=held,
        running=0,
        first=number_in(row, "cachedMsgMinOffset") if held else None,
        first_message_id=None,
        first_since_ms=None,
        first_failures=0,
        pulled_timestamp_ms=number_in(row, "lastPullTimestamp"),
        is_throttled=False,
        last=number_in(row, "cachedMsgMaxOffset") if held else None,
        is_locked=row.get("locked") is True,
    )


def _stacks() -> str:
    """Return where each thread of this process stands, the innermost call first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    text = []
    for ident, top in sys._current_frames().items():
        calls = reversed(traceback.extract_stack(top))
        text.append(f"{names.get(ident, 'thread')} TID: {ident}\n")
        text += [f"    {call.name} ({call.filename}:{call.lineno})\n" for call in calls]
        text.append("\n")
    return "".join(text)
