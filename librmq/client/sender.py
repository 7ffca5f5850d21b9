"""Tries of a send: to the next queue in turn, and on failure to another broker, within one timeout.

Mirrors ``DefaultMQProducerImpl.sendDefaultImpl`` and ``sendKernelImpl``, and ``TopicPublishInfo``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple, TypedDict, cast

from librmq.client.client import LifeCycle, PublishRoutes, State, TopicQueues
from librmq.client.operations import Operation, Watcher, begin, end
from librmq.config import Between, Config, Seconds
from librmq.errors import (
    BrokerBusyError,
    BrokerError,
    BrokerUnreachableError,
    LostAnswerError,
    RequestNotSentError,
    SendTimeoutError,
)
from librmq.message import Message, MessageQueue, record
from librmq.message.properties import PropertyName, priority_of
from librmq.message.topics import TopicPrefix
from librmq.protocol import Endpoint, ResponseCode, SendBatch, SendMessage, SendResponse, SendsLater, SendStatus

if TYPE_CHECKING:
    import asyncio

    from librmq.client._loop_sends import LoopSends
    from librmq.client.queue_selectors import BrokerLatencies


@cache
def _running_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    import asyncio  # slow to load, and unnecessary for sends without a loop

    return asyncio.get_running_loop


# ---- settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerConfig(Config):
    """Settings of a producer; the defaults are 4.9's. Durations are seconds, or a `timedelta` as keywords."""

    timeout: Annotated[float, Seconds()] = 3.0
    """Time for all tries of a send."""
    retries: Annotated[int, Between(0)] = 2
    """Further tries of `Producer.send` and `Producer.send_async`."""
    retry_another_broker_when_not_ok: bool = False
    """Try another broker if a message was stored with less durability than asked (`SendStatus`)."""
    compress_from: Annotated[int, Between(0)] = 4096
    """Bodies of at least this many bytes are compressed."""
    max_message_size: Annotated[int, Between(0)] = 4 << 20
    """The longest body, in bytes."""
    default_topic_queues: Annotated[int, Between(0)] = 4
    """Number of queues of a topic that the first send makes."""
    avoid_slow_brokers: bool = False
    """Avoid brokers for a while after a failure or a slow answer (`librmq.client.queue_selectors`)."""
    nearby: bool = False
    """Send to the brokers of the client's own site, and to others only if these fail."""
    if_broker_down: Literal["refuse", "another"] | None = None
    """How a send with a selector continues while the broker of the selected queue fails: ``refuse`` keeps each key in
    its queue and raises, ``another`` selects among the queues of other brokers. None is 4.9's: refuse until clients
    notice that the broker is gone, then another."""


class ProducerKeywords(TypedDict, total=False):
    """Keywords of a `Producer`: the settings of `ProducerConfig`, for type checkers."""

    timeout: float | timedelta
    retries: int
    retry_another_broker_when_not_ok: bool
    compress_from: int
    max_message_size: int
    default_topic_queues: int
    avoid_slow_brokers: bool
    nearby: bool
    if_broker_down: Literal["refuse", "another"] | None


# ---- results of sends


class SendResult(NamedTuple):
    """Where a sent message or batch is stored."""

    status: SendStatus
    """How durable the message is."""
    message_id: str
    """The unique id; for a batch the unique ids, joined by commas."""
    offset_id: str
    """The broker's id; for a batch the ids, joined by commas."""
    queue: MessageQueue
    queue_offset: int
    """The queue offset of the first message."""
    transaction_id: str | None = None
    """The id of the transaction; None outside of one."""
    recall_handle: str | None = None
    """By which a broker of 5.x over `connect` cancels a message with a delivery time; `Producer.cancel` uses it."""


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
_PRIORITY: Final = PropertyName.PRIORITY
_COMPRESSED: Final = record.COMPRESSED | record.COMPRESSION_ZLIB
_UNIQUE_KEY: Final = PropertyName.UNIQUE_KEY
_OK: Final = SendStatus.SEND_OK  # access to a member of an enum takes twice the time
_RUNNING: Final = State.RUNNING

_new_result = tuple.__new__  # in half the time


class _FirstTry(NamedTuple):
    """A try that an event loop has made."""

    begin_ms: int
    broker_name: str
    failure: BrokerError | BrokerUnreachableError | None
    result: SendResult | None


def _is_retried(error: Exception, is_bound: bool) -> bool:
    """Return whether a failed try is followed by another one, which for a bound send goes to the same queue."""
    if is_bound:
        return isinstance(error, LostAnswerError)
    if isinstance(error, BrokerError):
        return error.code in _RETRIED and not isinstance(error, BrokerBusyError)
    return isinstance(error, BrokerUnreachableError)


def _may_be_stored(error: Exception | None) -> bool:
    """Return whether a try failed without showing that its message is not stored."""
    return isinstance(error, BrokerUnreachableError) and not isinstance(error, RequestNotSentError)


def _perhaps_stored(unanswered: Exception, last: Exception) -> Exception:
    """Return the error of a send whose last try has stored nothing, where an earlier one had no answer."""
    return type(unanswered)(f"{last}; an earlier try had no answer, so the message may be stored: {unanswered}")


def _over_time(
    message: Message, timeout_ms: float, attempts: int, failure: Exception | None, is_bound: bool
) -> Exception:
    if is_bound and failure is not None:
        return failure
    last = "" if failure is None else f"; the last error: {failure}"
    error = SendTimeoutError(f"topic {message.topic!r}: {attempts} tries took over {timeout_ms:.0f} ms{last}")
    error.__cause__ = failure
    return error


def _too_late(queue: MessageQueue, took_ms: int) -> SendTimeoutError:
    return SendTimeoutError(
        f"topic {queue.topic!r}: {queue.broker_name} answered after {took_ms} ms, when the time was over;"
        f" the message is stored"
    )


def _result_of(
    message: Message, queue: MessageQueue, response: SendResponse, batch: tuple[Message, ...] | None = None
) -> SendResult:
    status, queue_id, queue_offset, _, offset_ids, transaction_id, recall_handle = response
    if queue_id != queue.queue_id:
        queue = queue._replace(queue_id=queue_id)
    unique_id, offset_id = message.properties[_UNIQUE_KEY], offset_ids[0]
    if batch is not None:
        unique_id = ",".join(part.properties[_UNIQUE_KEY] for part in batch)
        offset_id = ",".join(offset_ids)
    fields = status, unique_id, offset_id, queue, queue_offset, transaction_id, recall_handle
    result: SendResult = _new_result(SendResult, fields)
    return result


class Sender:
    """The tries of one producer's sends. Thread-safe."""

    def __init__(
        self,
        routes: PublishRoutes,
        config: ProducerConfig,
        life: LifeCycle,
        start: Callable[[], None],
    ) -> None:
        """``start()`` starts a new producer, and raises if it was shut down."""
        self._client = routes.client
        self._group = routes.group
        self._life = life
        self._start = start
        self._runner = self._client.runner
        self._now_ms = self._runner.now_ms
        self._host = self._client.host
        # Only where other turns may run within a send, as in a kit, does it offer them one.
        self._point = None if self._runner.begins_at_once else self._runner.point
        self.latencies: BrokerLatencies | None = None
        self._loop_sends: LoopSends | None = None  # sends of the event loop that has sent last
        self.configure(config)
        self._routes = routes
        self._topics, self._endpoints = routes.topics, routes.endpoints  # asked by every send

    def configure(self, config: ProducerConfig) -> None:
        """Use these settings for sends that begin later."""
        self.config = config
        self._is_in_turn = not (config.nearby or config.avoid_slow_brokers)
        if not config.avoid_slow_brokers:
            self.latencies = None
        elif self.latencies is None:
            from librmq.client.queue_selectors import BrokerLatencies  # few producers avoid brokers

            self.latencies = BrokerLatencies(self._now_ms)

    def queues(self, topic: str) -> TopicQueues:
        """Return the queues of a topic, for which the producer has to run."""
        queues = self._topics.get(topic)
        if queues is not None:
            return queues
        if not self._life.is_running:
            self._start()
        return self._routes.queues(topic)

    def send(  # noqa: C901, PLR0913 (the hot path: the whole life of a send)
        self,
        message: Message,
        timeout_ms: float,
        batch: tuple[Message, ...] | None = None,
        *,
        queue: MessageQueue | None = None,
        choose: Callable[[Sequence[str]], MessageQueue] | None = None,
        first: _FirstTry | None = None,
        begin_ms: int | None = None,
        is_one_way: bool = False,
        watchers: Sequence[Watcher] = (),
    ) -> SendResult:
        """Send a message, or a batch with this first message, to one queue after the other, until one stores it.

        With ``queue`` all tries go there, and there is another one only if the answer was lost: then the store has
        another owner with the same queue. Otherwise ``choose(brokers tried before)`` returns the queue of each try; by
        default the queues come in turn. ``first`` was tried before. ``begin_ms`` is the time, if the caller has read
        it. With ``is_one_way`` there is one try, whose outcome the broker need not answer. ``watchers`` see each try.
        """
        is_bound, target = queue is not None, queue
        if queue is None and choose is None:
            topic_queues = self._topics.get(message.topic)
            queues = topic_queues or self.queues(message.topic)
            if topic_queues is None:
                begin_ms = None  # asking a name server for the queues takes none of the time for the tries
            if self._is_in_turn and first is None:
                target = queues.queues[next(queues.turns.numbers) % len(queues.queues)]
            else:
                choose = partial(self.queue_of_try, queues)
        tried: list[str] = []
        failure: Exception | None = None
        unanswered: Exception | None = None  # of the first try whose message may be stored
        result: SendResult | None = None
        if begin_ms is None:
            begin_ms = self._now_ms()
        now_ms, left_ms, config = begin_ms, timeout_ms, self.config
        if first is not None:
            begin_ms, broker_name, failure, result = first
            tried.append(broker_name)
            unanswered = failure if _may_be_stored(failure) else None
        while len(tried) <= config.retries:
            if tried:
                now_ms = self._now_ms()
                left_ms = timeout_ms - now_ms + begin_ms
                if left_ms < 0:
                    raise _over_time(message, timeout_ms, len(tried), failure, is_bound)
            if target is None:
                target = queue or (self.queue_of_try(queues, tried) if choose is None else choose(tried))
            if batch is None and _PRIORITY in message.properties:
                target = self._queue_of_priority(message, target)
            if self._life.state is not _RUNNING:
                self._start()
            if self._point is not None:  # time can pass
                self._point(f"send {target.topic}")
                now_ms = self._now_ms()
            sent, sys_flag = message, 0
            if batch is None and len(message.body) >= config.compress_from:
                packed, sys_flag = record.compress_body(message.body), _COMPRESSED
                sent = Message.from_parts(message.topic, packed, message.flag, message.properties, message._delays)
            watching = begin(watchers, self._try(sent, target, len(tried), message, batch)) if watchers else ()
            try:
                endpoint = self._endpoints.get(target.broker_name) or self._routes.endpoint(target.broker_name)
                if batch is None:
                    response = endpoint.send(
                        self._group,
                        sent,
                        target.queue_id,
                        now_ms,
                        self._host,
                        sys_flag,
                        config.default_topic_queues,
                        left_ms,
                        is_one_way,
                    )
                else:
                    born, count = (now_ms, self._host), config.default_topic_queues
                    response = endpoint.call(SendBatch(self._group, batch, target.queue_id, *born, count, left_ms))
                if self._now_ms() - now_ms > left_ms:
                    raise _too_late(target, self._now_ms() - now_ms)
            except Exception as error:
                end(watching, None, error)
                if is_one_way or not _is_retried(error, is_bound):
                    if unanswered is None or isinstance(error, SendTimeoutError):
                        raise
                    raise _perhaps_stored(unanswered, error) from error
                failure = error
                if unanswered is None and _may_be_stored(error):
                    unanswered = error
            else:
                result = _result_of(message, target, response, batch)
                if watching:
                    end(watching, result, None)
                if result.status is _OK or is_bound or not config.retry_another_broker_when_not_ok:
                    return result
            tried.append(target.broker_name)
            target = None
        if result is not None:
            return result
        assert failure is not None
        if unanswered is None or _may_be_stored(failure):
            raise failure
        raise _perhaps_stored(unanswered, failure) from failure

    async def send_async(
        self, message: Message, timeout_ms: float, watchers: Sequence[Watcher] = (), *, may_wait: bool = False
    ) -> SendResult:
        """Send like `send`; make the first try without a thread, unless its watchers or its endpoint ``may_wait``."""
        queues, config = self._topics.get(message.topic), self.config
        if queues is None or may_wait or _PRIORITY in message.properties or len(message.body) >= config.compress_from:
            return await self._runner.offload(partial(self.send, message, timeout_ms, watchers=watchers))
        queue, first = self.queue_of_try(queues), None
        # Look the endpoint up only once, because a change of the route can clear the cache in between.
        endpoint = self._endpoints.get(queue.broker_name)
        if isinstance(endpoint, SendsLater):
            begin_ms = self._now_ms()
            try:
                result = await self._send_in_loop(message, queue, cast("Endpoint", endpoint), timeout_ms, watchers)
            except (BrokerError, BrokerUnreachableError) as error:
                if not _is_retried(error, is_bound=False):
                    raise
                first = _FirstTry(begin_ms, queue.broker_name, error, None)
            else:
                if result is not None:
                    if result.status is _OK or not config.retry_another_broker_when_not_ok:
                        return result
                    first = _FirstTry(begin_ms, queue.broker_name, None, result)

        def choose(tried: Sequence[str]) -> MessageQueue:
            return self.queue_of_try(queues, tried) if tried else queue

        send = partial(self.send, message, timeout_ms, choose=choose, first=first, watchers=watchers)
        return await self._runner.offload(send)

    async def _send_in_loop(
        self,
        message: Message,
        queue: MessageQueue,
        endpoint: Endpoint,
        timeout_ms: float,
        watchers: Sequence[Watcher],
    ) -> SendResult | None:
        """Make one try together with others of the event loop; return None if a thread has to make it."""
        sends, loop = self._loop_sends, _running_loop()()
        if sends is None or sends.loop is not loop:
            from librmq.client._loop_sends import LoopSends

            sends = self._loop_sends = LoopSends(loop)
        if self._life.state is not _RUNNING:
            self._start()
        host, default_queues, born_ms = self._host, self.config.default_topic_queues, self._now_ms()
        send = SendMessage(
            self._group, message, queue.queue_id, born_ms, host, 0, default_queues, timeout_ms=timeout_ms
        )
        watching = begin(watchers, self._try(message, queue, 0, message)) if watchers else ()
        try:
            response = await sends.begin(endpoint, send, timeout_ms)
            if response is not None and self._now_ms() - born_ms > timeout_ms:
                raise _too_late(queue, self._now_ms() - born_ms)
        except Exception as error:
            end(watching, None, error)
            raise
        result = None if response is None else _result_of(message, queue, response)
        end(watching, result, None)  # without a result the try was not made, and a thread makes it
        return result

    def queue_of_try(self, queues: TopicQueues, tried: Sequence[str] = ()) -> MessageQueue:
        """Return the queue of the next try, on another broker than the last one if there is one."""
        if self.config.nearby:
            return self._next_nearby(queues, tried)
        if self.latencies is not None:
            return self.latencies.next_queue(queues.queues, queues.turns)
        return queues.turns.next_queue(queues.queues, tried)

    def _next_nearby(self, queues: TopicQueues, tried: Sequence[str]) -> MessageQueue:
        near, latencies = queues.near, self.latencies
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
            return queues.turns.next_queue(queues.queues, tried)
        if latencies is not None:
            return latencies.next_queue(near, queues.turns)
        return queues.turns.next_queue(near)

    def _try(
        self,
        sent: Message,
        queue: MessageQueue,
        attempt: int,
        message: Message,
        batch: tuple[Message, ...] | None = None,
    ) -> Operation:
        """Return a try of a message, which is ``sent`` in a form that may be compressed."""
        return Operation(
            "try",
            self._client,
            self._group,
            message.topic,
            batch or (message,),
            queue,
            attempt=attempt,
            size=sum(len(part.body) for part in batch or (sent,)),
            is_batch=batch is not None,
        )

    def _queue_of_priority(self, message: Message, queue: MessageQueue) -> MessageQueue:
        """Return the queue of the message's priority at the broker of ``queue``: brokers before 5.4 don't choose it."""
        priority = priority_of(message.properties)
        if priority is None or message.topic.startswith(TopicPrefix.RETRY):
            return queue
        queues = self.queues(message.topic).queues
        count = sum(other.broker_name == queue.broker_name for other in queues)
        return queue._replace(queue_id=min(priority, max(count - 1, 0)))
