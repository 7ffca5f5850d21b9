"""Traces of a producer or a consumer, as RocketMQ's clients write them with ``enableMsgTrace``.

::

    send, listener ── record ──> at most 10,000 wait ── every 0.5 s, or early if many wait ──> one message of the topic

The thread that sends or runs a listener only adds a record; a turn of the runner encodes and stores them. Records for
which there is no room, or whose message can't be stored, are dropped, counted and logged. Mirrors
``AsyncTraceDispatcher``, ``SendMessageTraceHookImpl`` and ``EndTransactionTraceHookImpl``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, cast

from librmq.client.client import Client, LifeCycle, PublishRoutes
from librmq.client.operations import Ended, Kind, Operation, Watchers
from librmq.client.sender import ProducerConfig, Sender, SendResult
from librmq.clock import moves_by_itself
from librmq.errors import ConfigError, NoRouteError
from librmq.listener import is_requested
from librmq.message import Message, StoredMessage, traces
from librmq.message.ids import format_host, parse_offset_message_id
from librmq.message.message import encoded_size
from librmq.message.properties import PropertyName
from librmq.message.topics import NOT_FOR_SENDING, SystemTopic, validate_client_topic
from librmq.metrics import Metrics, outside
from librmq.protocol import SendStatus
from librmq.runtime import Step, Work
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Event, Lock

MAX_WAITING: Final = 10_000
"""Most records that wait to be stored."""
MANY: Final = 500
"""From this number of records on they are stored at once."""
WAIT_MS: Final = 500
MAX_BODY: Final = 118_000
_MAX_KEYS: Final = 24_000  # all properties of a message together have at most 32,767 bytes
SEND_TIMEOUT_MS: Final = 5_000
CLOSE_MS: Final = 500
"""Time to store what waits at the shutdown."""

_STATES: Final[Mapping[Kind, str]] = {
    "commit": "COMMIT_MESSAGE",
    "rollback": "ROLLBACK_MESSAGE",
    "undecided": "UNKNOW",  # as in Java
}
_NO_TOPIC: Final = (
    f"no broker has {SystemTopic.TRACE}, and none makes it at the first send: start them with traceTopicEnable=true, "
    'or name a topic of yours, such as trace="traces"'
)
_log = EventLog("librmq.traces")


def _trace_topic(trace: bool | str) -> str:
    """Return the topic that a setting ``trace`` names, if it is on."""
    if trace is True:
        return SystemTopic.TRACE
    if not isinstance(trace, str):
        raise ConfigError(f"trace: expected True, False or the name of a topic, found {trace!r:.80}")
    validate_client_topic(trace)
    if trace in NOT_FOR_SENDING:
        raise ConfigError(f"trace: only the broker writes to {trace!r}: name another topic, or write trace=True")
    return trace


class TraceWriter:
    """Stores the traces of one producer or consumer in the background. Thread-safe."""

    def __init__(
        self,
        client: Client,
        group: str,
        trace: bool | str,
        metrics: Metrics | None,
        purpose: str,
        timeout_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """``purpose`` is ``PRODUCE`` or ``CONSUME``, and part of the name by which RocketMQ's clients send traces.

        ``trace`` is the setting of that name, which is on. A listener that takes ``timeout_s()`` or more counts as
        timed out.
        """
        self.client = client
        self.group = group
        self.topic: str = _trace_topic(trace)
        self.dropped: int = 0
        """Number of records that were not stored."""
        self._metrics = None if metrics is None else outside(metrics)
        self._timeout_s = timeout_s
        self._runner = client.runner
        self._clock = client.runner.clock
        self._waiting: deque[traces.TraceRecord] = deque()
        self._is_planned = False  # a turn stores what waits
        self._is_early = False  # that turn comes at once
        self._is_closed = False
        self._is_dropping = False
        self._counting = Lock()
        self._idle = Event()
        self._idle.set()
        self._life = LifeCycle(f"traces of group {group!r}")
        config = ProducerConfig(timeout=SEND_TIMEOUT_MS / 1000, default_topic_queues=1)
        sender_group = f"_INNER_TRACE_PRODUCER-{group}-{purpose}-1"
        self._routes = PublishRoutes(client, sender_group, config.default_topic_queues)
        self._sender = Sender(self._routes, config, self._life, self._start)
        self._unwatch: Callable[[], None] | None = None
        self._step = Step(f"{client.client_id} traces of {group}", self._run_due, client)

    def _start(self) -> None:
        with self._runner.lock:
            self._life.start(self._watch)

    def _watch(self) -> None:
        self._unwatch = self.client.route.watch(self._routes.drop_routes)

    # ---- records

    @property
    def watchers(self) -> Watchers:
        """What records operations."""
        return dict.fromkeys(("try", "process", *_STATES), self._begin)

    def _begin(self, operation: Operation) -> Ended | None:
        """Record a try of a send, the call of a listener, or the end of a transaction; not those about traces."""
        topic, queue = operation.topic, operation.queue
        if self.topic in (topic, None if queue is None else queue.topic):
            return None
        if operation.kind == "try":
            return partial(self._tried, operation, self._runner.now_ms())
        if operation.kind == "process":
            return self._begin_call(operation)
        if operation.kind in _STATES:
            message = operation.message
            transaction = message.properties.get(PropertyName.UNIQUE_KEY) or operation.offset_id
            self.add(
                traces.EndTransaction(
                    at_ms=self._runner.now_ms(),
                    region=traces.TRACE_REGION,
                    group=self.group,
                    topic=topic or "",
                    id=transaction,
                    tags=message.properties.get(PropertyName.TAGS),
                    keys=message.properties.get(PropertyName.KEYS),
                    broker=_broker_of(operation.offset_id),
                    message_type=traces.COMMITTED,
                    transaction=transaction,
                    state=_STATES[operation.kind],
                    from_check=operation.is_check,
                )
            )
        return None

    def _tried(
        self, operation: Operation, begin_ms: int, result: SendResult | None, error: BaseException | None
    ) -> None:
        """Record a try, as in 4.9 only one that a broker has answered."""
        if result is None or not result.offset_id:  # no answer came, or none was awaited
            return
        messages = cast("Sequence[Message]", operation.messages)
        is_batch = len(messages) > 1
        properties: Mapping[str, str] = {} if is_batch else messages[0].properties
        record = traces.Pub(
            at_ms=begin_ms,
            region=traces.TRACE_REGION,
            group=operation.group,
            topic=messages[0].topic,
            id=result.message_id,
            tags=properties.get(PropertyName.TAGS),
            keys=properties.get(PropertyName.KEYS),
            broker=_broker_of(result.offset_id),
            body_size=sum(map(encoded_size, messages)) if is_batch else len(messages[0].body),
            took_ms=self._runner.now_ms() - begin_ms,
            message_type=_type_of(messages[0]),
            offset_id=result.offset_id,
            succeeded=result.status is SendStatus.SEND_OK,
        )
        self.add(record)

    def _begin_call(self, operation: Operation) -> Ended | None:
        """Record the call of a listener, a record a message before and after it, as ``ConsumeMessageTraceHookImpl``."""
        messages, judge = cast("Sequence[StoredMessage]", operation.messages), operation.outcome
        traced = [
            (index, message.message_id, message.properties.get(PropertyName.KEYS), message.reconsume_times)
            for index, message in enumerate(messages)
            if message.properties.get(PropertyName.TRACE_SWITCH) != "false"
        ]
        if not traced or judge is None:
            return None
        begin_ms, request, group = self._runner.now_ms(), self.client.unique_ids.next(), operation.group
        before = [
            traces.SubBefore(begin_ms, traces.TRACE_REGION, group, request, name, retries, keys)
            for _, name, keys, retries in traced
        ]
        self.add(*before)

        def ended(result: object, error: BaseException | None) -> None:
            end_ms = self._runner.now_ms()
            took_ms, is_late = (end_ms - begin_ms) // len(messages), end_ms - begin_ms >= 1000 * self._timeout_s()
            consumed, failure = judge(result, error)
            records = []
            for index, name, keys, _ in traced:
                is_consumed = index < consumed
                code = traces.result_code(_result(is_consumed, result, failure, is_late=is_late))
                records.append(
                    traces.SubAfter(
                        request=request,
                        id=name,
                        took_ms=took_ms,
                        succeeded=is_consumed,
                        keys=keys,
                        result=code,
                        at_ms=end_ms,
                        group=group,
                    )
                )
            self.add(*records)

        return ended

    def add(self, *records: traces.TraceRecord) -> None:
        """Let records wait to be stored; without room for them they are dropped. Never waits for a broker."""
        waiting = self._waiting
        if self._is_closed or len(waiting) + len(records) > MAX_WAITING:
            why = "the client was shut down" if self._is_closed else f"{len(waiting)} wait to be stored"
            self._drop(len(records), why)
            return
        waiting.extend(records)
        is_early = len(waiting) >= MANY
        if not self._is_planned or (is_early and not self._is_early):
            with self._runner.lock:
                self._plan(is_early=is_early)

    # ---- storing, in the background

    def _plan(self, *, is_early: bool) -> None:
        """Plan the turn that stores what waits. Under the runner's lock."""
        self._is_planned, self._is_early = True, is_early
        if is_early:
            self._runner.wake(self._step)
        else:
            self._runner.wake(self._step, self._runner.now_ms() + WAIT_MS)

    def _run_due(self, now_ms: int) -> int | None:
        if self._idle.is_set() and not self._is_closed:
            self._idle.clear()
            self._is_planned = self._is_early = True  # until its end
            self._runner.submit(Work(self._step.label, self._send_waiting, self._sent, self.client))
        return None

    def _send_waiting(self) -> None:
        if not self._is_closed:
            self._send(SEND_TIMEOUT_MS)

    def _sent(self, result: object, error: Exception | None) -> None:
        """End the turn, and plan the next one if more waits. Under the runner's lock."""
        self._idle.set()
        if error is not None:
            _log.error(
                "group %(group)s: storing traces in %(topic)s failed",
                group=self.group,
                topic=self.topic,
                exc_info=error,
            )
        # What was added before this is seen below; what is added later plans a turn by itself.
        self._is_planned = self._is_early = False
        if self._waiting and not self._is_closed:
            self._plan(is_early=len(self._waiting) >= MANY)

    def _send(self, timeout_ms: float) -> bool:
        """Store records that wait, as many as fit in a message; return False if they are dropped."""
        body, keys, count = self._next_body()
        if not count:
            return True
        properties = {
            PropertyName.KEYS: " ".join(keys),
            PropertyName.UNIQUE_KEY: self.client.unique_ids.next(),
            PropertyName.WAIT: "true",
        }
        try:
            self._sender.send(Message.from_parts(self.topic, body, 0, properties), timeout_ms)
        except NoRouteError as error:
            self._drop(count, _NO_TOPIC if self.topic == SystemTopic.TRACE else str(error))
            return False
        except Exception as error:
            # Whatever is wrong with the broker may not fail the sends and listeners that were traced.
            self._drop(count, f"{type(error).__name__}: {error}")
            return False
        if self._is_dropping and len(self._waiting) < MAX_WAITING // 2:
            self._is_dropping = False
            _log.info(
                "group %(group)s: traces are stored in %(topic)s again; %(dropped)d were dropped before",
                group=self.group,
                topic=self.topic,
                dropped=self.dropped,
            )
        return True

    def _next_body(self) -> tuple[bytes, dict[str, None], int]:
        """Take records that wait; return them as a body, with the keys of its message and their number."""
        waiting, texts, keys = self._waiting, list[str](), dict[str, None]()
        size = keys_size = 0
        while waiting:
            text, more = traces.encode(waiting[0]), [key for key in traces.keys_of(waiting[0]) if key not in keys]
            size += len(text)
            keys_size += sum(map(len, more)) + len(more)
            if texts and (size > MAX_BODY or keys_size > _MAX_KEYS):
                break
            waiting.popleft()
            texts.append(text)
            keys.update(dict.fromkeys(more))
        return "".join(texts).encode(), keys, len(texts)

    def _drop(self, count: int, why: str) -> None:
        with self._counting:
            self.dropped += count
            is_first, self._is_dropping = not self._is_dropping, True
        if self._metrics is not None:
            self._metrics.count("traces_dropped", count, group=self.group)
        if is_first:
            _log.warning(
                "group %(group)s: %(count)d traces for %(topic)s are dropped, and more may follow: %(cause)s",
                group=self.group,
                count=count,
                topic=self.topic,
                cause=why,
            )

    # ---- the end

    def close(self) -> None:
        """Store what waits, for at most `CLOSE_MS`; the rest is dropped. A second call does nothing."""
        with self._runner.lock:
            if self._is_closed:
                return
            self._is_closed = True
        clock = self._clock
        deadline = clock.monotonic() + CLOSE_MS / 1000
        if moves_by_itself(clock) and not self._runner.is_inherited:
            clock.wait(self._idle, CLOSE_MS / 1000)  # a message under way, which would overtake these records
        while self._waiting and (left_s := deadline - clock.monotonic()) > 0:
            if not self._send(1000 * left_s):
                break
        if self._waiting:
            self._drop(len(self._waiting), f"the shutdown waits {CLOSE_MS} ms for them")
            self._waiting.clear()
        with self._runner.lock:
            self._life.shut_down()
            if self._unwatch is not None:
                self._unwatch()
                self._unwatch = None


def _type_of(message: Message) -> int:
    if message.delay_level > 0 or message._delays is not None:
        return traces.DELAYED
    return traces.HALF if message.properties.get(PropertyName.TRANSACTION_PREPARED) == "true" else traces.NORMAL


def _broker_of(offset_id: str) -> str:
    """Return the address of the broker that gave this id; of several ids it is the same."""
    host, _ = parse_offset_message_id(offset_id.partition(",")[0])
    return format_host(host)


def _result(is_consumed: bool, result: object, error: Exception | None, *, is_late: bool) -> str:
    if not is_consumed and not is_requested(error):
        return "EXCEPTION"
    if not is_consumed and error is None and result is None:
        return "RETURNNULL"
    if is_late:
        return "TIME_OUT"
    return "SUCCESS" if is_consumed else "FAILED"
