"""What tools ask of a running server or consumer: rates of messages, and a consumer's state.

Rates are those of what clients have sent, got and sent back, by minute, hour and day. Nothing runs periodically: the
first event in a slot of time notes the totals before it, and a question subtracts them from the totals now.

Mirrors ``BrokerStatsManager``, ``StatsItem`` and ``ConsumerRunningInfo``.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from types import NoneType
from typing import Any, Final, Literal, NamedTuple, get_args

from librmq.errors import MalformedError
from librmq.java.lang import java_int
from librmq.message import MessageQueue
from librmq.protocol import DescribeInstance, HeldQueue, InstanceState, ListenerCall, MessageModel, Subscription
from librmq.runtime.locks import Lock
from librmq.wire.remoting._bodies import by_queue, number_in, queue_key, read_body, subscription_row, write_body
from librmq.wire.remoting._frames import Frame
from librmq.wire.remoting._headers import ClientOfGroupHeader, RequestCode
from librmq.wire.remoting._request_codec import check, frame_of

Kind = Literal["put", "get", "back", "latency", "miss", "failed"]
"""``latency`` counts milliseconds of found pulls, ``miss`` pulls without a message, ``failed`` refused messages."""
_MOST_RATES: Final = 10_000
_DAY_MS: Final = 86_400_000


class Window(NamedTuple):
    """A span of time, and the slots in which it moves on, in ms."""

    span_ms: int
    slot_ms: int


MINUTE: Final = Window(60_000, 10_000)
WINDOWS: Final = {"statsDay": Window(86_400_000, 3_600_000), "statsHour": Window(3_600_000, 600_000)}
WINDOWS["statsMinute"] = MINUTE
_NAMES: Final[Mapping[str, tuple[Kind, int]]] = {
    "TOPIC_PUT_NUMS": ("put", 1),
    "TOPIC_PUT_SIZE": ("put", 2),
    "GROUP_GET_NUMS": ("get", 1),
    "GROUP_GET_SIZE": ("get", 2),
    "SNDBCK_PUT_NUMS": ("back", 1),
    "GROUP_GET_LATENCY": ("latency", 1),
    "BROKER_PUT_NUMS": ("put", 1),
    "BROKER_GET_NUMS": ("get", 1),
}


class _Totals(NamedTuple):
    since_ms: int
    counts: tuple[int, int, int]
    """Calls, messages and bytes before that time."""


class _Rate:
    """What one topic or group has moved. Not thread-safe."""

    __slots__ = ("_calls", "_marks", "_messages", "_next_ms", "_size")

    def __init__(self) -> None:
        self._calls = self._messages = self._size = 0
        self._next_ms = 0
        self._marks: dict[Window, deque[_Totals]] = {window: deque() for window in WINDOWS.values()}

    def count(self, now_ms: int, messages: int, size: int, calls: int) -> None:
        if now_ms >= self._next_ms:
            self._mark(now_ms)
        self._calls += calls
        self._messages += messages
        self._size += size

    def _mark(self, now_ms: int) -> None:
        before = self._calls, self._messages, self._size
        for window, marks in self._marks.items():
            begin_ms = now_ms - now_ms % window.slot_ms
            if not marks or marks[-1].since_ms < begin_ms:
                marks.append(_Totals(begin_ms, before))
            while marks[0].since_ms <= now_ms - window.span_ms:
                marks.popleft()
        self._next_ms = now_ms - now_ms % MINUTE.slot_ms + MINUTE.slot_ms

    @property
    def counts(self) -> tuple[int, int, int]:
        """All calls, messages and bytes."""
        return self._calls, self._messages, self._size

    def counts_in(self, window: Window, now_ms: int) -> tuple[int, tuple[int, int, int]]:
        """Return the counted time in ms, and the calls, messages and bytes in it."""
        for since_ms, (calls, messages, size) in self._marks[window]:
            if since_ms > now_ms - window.span_ms:
                counts = self._calls - calls, self._messages - messages, self._size - size
                return max(now_ms - since_ms, window.slot_ms), counts
        return window.slot_ms, (0, 0, 0)


class DayTotals(NamedTuple):
    """Messages before yesterday, before today, and until now."""

    yesterday_morning: int
    today_morning: int
    now: int


class Rates:
    """The rates of one server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._rates: dict[tuple[Kind, str], _Rate] = {}
        self._totals: dict[Kind, _Rate] = {kind: _Rate() for kind in get_args(Kind)}
        self._longest_ms: dict[Kind, int] = {}
        self._mornings = dict.fromkeys(self._totals, (0, 0))
        self._next_morning_ms = 0

    def count(self, kind: Kind, key: str, now_ms: int, messages: int = 1, size: int = 0, calls: int = 1) -> None:
        """Count calls that have moved messages; ``key`` is a topic, ``topic@group`` or ``queue@topic@group``."""
        with self._lock:
            if now_ms >= self._next_morning_ms:
                self._begin_day(now_ms)
            self._totals[kind].count(now_ms, messages, size, calls)
            if kind in ("miss", "failed"):
                return
            rate = self._rates.get((kind, key))
            if rate is None:
                if len(self._rates) >= _MOST_RATES:
                    return
                rate = self._rates[kind, key] = _Rate()
            rate.count(now_ms, messages, size, calls)

    def rows(self, name: str, key: str, now_ms: int) -> dict[str, dict[str, float]] | None:
        """Return a statistic of 4.9 by window; None if nothing was counted."""
        if name not in _NAMES:
            return None
        kind, place = _NAMES[name]
        with self._lock:
            rate = self._totals[kind] if name.startswith("BROKER_") else self._rates.get((kind, key))
            if rate is None or not rate.counts[0]:
                return None
            return {title: _row(window, rate, place, now_ms) for title, window in WINDOWS.items()}

    def per_second(self, kind: Kind, key: str | None, now_ms: int, *, of_calls: bool = False) -> float:
        """Return the messages or calls a second in the last minute, of one key or of all."""
        with self._lock:
            rate = self._totals[kind] if key is None else self._rates.get((kind, key))
            return 0.0 if rate is None else float(_row(MINUTE, rate, 0 if of_calls else 1, now_ms)["tps"])

    def took(self, kind: Kind, ms: int) -> None:
        """Note how long a call has taken."""
        if ms > self._longest_ms.get(kind, 0):
            with self._lock:
                self._longest_ms[kind] = max(ms, self._longest_ms.get(kind, 0))

    def longest_ms(self, kind: Kind) -> int:
        """Return how long the longest call has taken."""
        return self._longest_ms.get(kind, 0)

    def total(self, kind: Kind) -> tuple[int, int, int]:
        """Return the calls, messages and bytes since the server began."""
        with self._lock:
            return self._totals[kind].counts

    def days(self, kind: Kind, now_ms: int) -> DayTotals:
        """Return the messages by day of the machine's time zone."""
        with self._lock:
            if now_ms >= self._next_morning_ms:
                self._begin_day(now_ms)
            return DayTotals(*self._mornings[kind], self._totals[kind].counts[1])

    def _begin_day(self, now_ms: int) -> None:
        is_next_day = now_ms < self._next_morning_ms + _DAY_MS
        for kind, rate in self._totals.items():
            total = rate.counts[1]
            self._mornings[kind] = (self._mornings[kind][1] if is_next_day else total), total
        midnight = datetime.fromtimestamp(now_ms // 1000).replace(hour=0, minute=0, second=0)
        self._next_morning_ms = round(1000 * (midnight + timedelta(days=1)).timestamp())


def _row(window: Window, rate: _Rate, place: int, now_ms: int) -> dict[str, float]:
    span_ms, counts = rate.counts_in(window, now_ms)
    total, calls = counts[place], counts[0]
    return {"avgpt": total / calls if calls else 0.0, "sum": total, "tps": total * 1000 / span_ms}


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
    """Return the state of an instance; that of a client of another kind has no listeners."""
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
    """Return what an instance of librmq says of itself: listeners that run, numbers by queue, and where they stand."""
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


def _held_queue(queue: MessageQueue, row: Any, states: Mapping[MessageQueue, Sequence[Any]]) -> HeldQueue:  # noqa: ANN401 (as it came)
    if queue in states:
        last = number_in(row, "cachedMsgMaxOffset") if number_in(row, "cachedMsgCount") else None
        return replace(HeldQueue(queue, *states[queue]), last=last, is_locked=row.get("locked") is True)
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
