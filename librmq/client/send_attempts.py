"""Tries of a send: to the next queue in turn, and on failure to another broker, within one timeout.

Mirrors ``DefaultMQProducerImpl.sendDefaultImpl`` and ``sendKernelImpl``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from librmq.client.client import LifeCycle, State
from librmq.client.producer_config import ProducerConfig
from librmq.client.publish_routes import PublishRoutes, TopicQueues
from librmq.client.queue_selectors import BrokerLatencies, QueueSelector
from librmq.client.send_result import SendContext, SendHook, SendResult
from librmq.errors import BrokerBusyError, BrokerError, BrokerUnreachableError, SendTimeoutError
from librmq.message import record
from librmq.message.message import Message, MessageQueue
from librmq.metrics import Metrics
from librmq.protocol import ResponseCode, SendBatch, SendMessage, SendResponse, SendStatus
from librmq.runtime.event_log import EventLog

_log = EventLog("librmq.producer")
_RETRIED: Final = frozenset(
    (
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.NO_PERMISSION,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
    )
)
_COMPRESSED: Final = record.COMPRESSED | record.COMPRESSION_ZLIB
_UNIQUE_KEY: Final = record.PROPERTY_UNIQUE_KEY
_OK: Final = SendStatus.SEND_OK  # access to a member of an enum takes twice the time
_RUNNING: Final = State.RUNNING

_new_result = tuple.__new__  # in half the time


class SendAttempts:
    """The tries of one producer's sends. Thread-safe."""

    def __init__(
        self,
        routes: PublishRoutes,
        config: ProducerConfig,
        life: LifeCycle,
        start: Callable[[], None],
        hooks: list[SendHook],
        metrics: Metrics | None,
    ) -> None:
        """``start()`` starts a new producer, and raises if it was shut down."""
        self._client = routes.client
        self._group = routes.group
        self.config = config
        self._life = life
        self._start = start
        self._hooks = hooks
        self._metrics = metrics
        self._runner = self._client.runner
        self._now_ms = self._runner.now_ms
        self._latencies = BrokerLatencies(self._now_ms) if config.avoid_slow_brokers else None
        self._routes = routes
        self._topics, self._endpoints = routes.topics, routes.endpoints  # asked by every send

    def queues(self, topic: str) -> TopicQueues:
        """Return the queues of a topic, for which the producer has to run.

        Raises:
            NoRouteError: No broker has the topic, and none makes it.
        """
        queues = self._topics.get(topic)
        if queues is not None:
            return queues
        if not self._life.is_running:
            self._start()
        return self._routes.queues(topic)

    def in_turn(self, message: Message, timeout_ms: float, batch: tuple[Message, ...] | None = None) -> SendResult:
        """Send a message, or a batch with this first message, to the next queue, and to others if that fails."""
        queues = self._topics.get(message.topic) or self.queues(message.topic)
        return self._until_stored(message, timeout_ms, lambda tried: self.next_queue(queues, tried), batch)

    def selected(self, message: Message, selector: QueueSelector, arg: object, timeout_ms: float) -> SendResult:
        """Send a message to the queue that a selector chooses; where the settings say so, to another if that fails."""
        choice = self.config.if_broker_down

        def choose(tried: Sequence[str]) -> MessageQueue:
            return self._routes.selected(message, selector, arg, choice, tried)

        if choice == "another":
            return self._until_stored(message, timeout_ms, choose)
        return self.send_to(message, choose(()), timeout_ms)

    def _until_stored(
        self,
        message: Message,
        timeout_ms: float,
        choose: Callable[[Sequence[str]], MessageQueue],
        batch: tuple[Message, ...] | None = None,
    ) -> SendResult:
        """Try queues that ``choose(brokers tried before)`` returns until one stores the message."""
        begin_ms = self._now_ms()
        rest_ms = timeout_ms
        tried: list[str] = []
        failure: Exception | None = None
        result: SendResult | None = None
        for attempt in range(self.config.retries + 1):
            if attempt:
                rest_ms = begin_ms + timeout_ms - self._now_ms()
                if rest_ms < 0:
                    raise SendTimeoutError(
                        f"topic {message.topic!r}: {attempt} tries took over {timeout_ms:.0f} ms"
                        f"{'' if failure is None else f'; the last error: {failure}'}"
                    ) from failure
            queue = choose(tried)
            tried.append(queue.broker_name)
            if attempt and self._metrics is not None:
                self._metrics.count("send_retries", topic=queue.topic)
            try:
                result = self.send_to(message, queue, rest_ms, batch, attempt)
            except BrokerBusyError:
                raise
            except BrokerError as error:
                if error.code not in _RETRIED:
                    raise
                failure = error
            except BrokerUnreachableError as error:
                failure = error
            else:
                if result.status is _OK or not self.config.retry_another_broker_when_not_ok:
                    return result
        if result is not None:
            return result
        assert failure is not None
        raise failure

    def next_queue(self, queues: TopicQueues, tried: Sequence[str] = ()) -> MessageQueue:
        """Return the queue of the next try, on another broker than the last one if there is one."""
        if self.config.nearby:
            return self._next_nearby(queues, tried)
        if self._latencies is not None:
            return self._latencies.choose(queues.queues, queues.turns)
        return queues.turns.choose(queues.queues, tried[-1] if tried else None)

    def _next_nearby(self, queues: TopicQueues, tried: Sequence[str]) -> MessageQueue:
        """Return a queue of the own site; for the last try, or if its brokers fail, one of another site."""
        near, latencies = queues.near, self._latencies
        if tried:
            is_last = len(tried) >= self.config.retries
            near = () if is_last else tuple(queue for queue in near if queue.broker_name not in tried)
        if near and latencies is not None:
            near = tuple(queue for queue in near if latencies.is_available(queue.broker_name))
        if not near:
            near = tuple(
                queue for queue in queues.queues if queue not in queues.near and queue.broker_name not in tried
            )
        if not near:
            return queues.turns.choose(queues.queues, tried[-1] if tried else None)
        if latencies is not None:
            return latencies.choose(near, queues.turns)
        return queues.turns.choose(near)

    def send_to(
        self,
        message: Message,
        queue: MessageQueue,
        timeout_ms: float,
        batch: tuple[Message, ...] | None = None,
        attempt: int = 0,
        is_one_way: bool = False,
    ) -> SendResult:
        """Make one try; raise `SendTimeoutError` for an answer after ``timeout_ms``, although the message is stored."""
        if self._life.state is not _RUNNING:
            self._start()
        self._runner.point(f"send {queue.topic}")
        client = self._client
        default_queues = self.config.default_topic_queues
        request: SendMessage | SendBatch
        if batch is None:
            sent, sys_flag = message, 0
            if len(message.body) >= self.config.compress_from:
                packed, sys_flag = record.compress_body(message.body), _COMPRESSED
                sent = Message._from_parts(message.topic, packed, message.flag, message.properties, message._delays)
            request = SendMessage(
                self._group,
                sent,
                queue.queue_id,
                self._now_ms(),
                client.host,
                sys_flag,
                default_queues,
                timeout_ms=timeout_ms,
                is_one_way=is_one_way,
            )
        else:
            request = SendBatch(
                self._group, batch, queue.queue_id, self._now_ms(), client.host, default_queues, timeout_ms
            )
        after = []
        if self._hooks:
            context = SendContext(self._group, message, queue, attempt)
            after = [then for hook in self._hooks if (then := hook(context)) is not None]
        try:
            endpoint = self._endpoints.get(queue.broker_name) or self._routes.endpoint(queue.broker_name)
            response: SendResponse = endpoint.call(request)
            took_ms = self._now_ms() - request.born_timestamp_ms
            if took_ms > timeout_ms:
                raise SendTimeoutError(
                    f"topic {message.topic!r}: {queue.broker_name} answered after {took_ms} ms, when the time was over;"
                    f" the message is stored"
                )
        except Exception as error:
            self._record_attempt(queue, request, "ERROR")
            self._run_hooks(after, None, error)
            raise
        if self._metrics is not None or self._latencies is not None:
            self._record_attempt(queue, request, response.status.value)
        if batch is None:
            stored_queue = queue if response.queue_id == queue.queue_id else queue._replace(queue_id=response.queue_id)
            result = _new_result(
                SendResult,
                (
                    response.status,
                    message.properties[_UNIQUE_KEY],
                    response.offset_ids[0],
                    stored_queue,
                    response.queue_offset,
                    response.transaction_id,
                ),
            )
        else:
            result = SendResult(
                response.status,
                ",".join(part.properties[_UNIQUE_KEY] for part in batch),
                ",".join(response.offset_ids),
                queue._replace(queue_id=response.queue_id),
                response.queue_offset,
            )
        if after:
            self._run_hooks(after, result, None)
        return result

    def _run_hooks(
        self,
        after: Iterable[Callable[[SendResult | None, Exception | None], None]],
        result: SendResult | None,
        error: Exception | None,
    ) -> None:
        for then in after:
            try:
                then(result, error)
            except Exception:  # a stored message stays stored
                _log.exception("group %(group)s: a hook has failed after a send", group=self._group)

    def _record_attempt(self, queue: MessageQueue, request: SendMessage | SendBatch, status: str) -> None:
        """Count a try, and note its broker's latency."""
        took_ms = self._now_ms() - request.born_timestamp_ms
        if self._latencies is not None:
            self._latencies.report(queue.broker_name, took_ms, failed=status == "ERROR")
        if self._metrics is not None:
            messages = request.messages if isinstance(request, SendBatch) else (request.message,)
            self._metrics.count("sends", topic=queue.topic, status=status)
            self._metrics.count("send_bytes", sum(len(message.body) for message in messages), topic=queue.topic)
            self._metrics.count("send_seconds", took_ms / 1000, topic=queue.topic)
