"""Tries of a send: to the next queue in turn, and on failure to another broker, within one timeout.

Mirrors ``DefaultMQProducerImpl.sendDefaultImpl`` and ``sendKernelImpl``, and ``TopicPublishInfo``.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Annotated, Final, Literal, NamedTuple, TypedDict, cast

from librmq.client.client import Client, LifeCycle, State
from librmq.client.queue_selectors import BrokerLatencies, QueueSelector, RoundRobin
from librmq.config import Between, Config, Seconds
from librmq.errors import (
    BrokerBusyError,
    BrokerError,
    BrokerUnreachableError,
    LostAnswerError,
    MessageIllegalError,
    NoRouteError,
    RmqError,
    SendTimeoutError,
)
from librmq.message import record
from librmq.message.message import Message, MessageQueue
from librmq.message.properties import PROPERTY_PRIORITY, PROPERTY_UNIQUE_KEY, PROPERTY_WAIT, priority_of
from librmq.message.topics import AUTO_CREATE_TOPIC, RETRY_PREFIX
from librmq.metrics import Metrics
from librmq.protocol import (
    PERM_WRITE,
    Endpoint,
    QueueData,
    ResponseCode,
    SendBatch,
    SendLater,
    SendMessage,
    SendResponse,
    SendStatus,
    site_of,
)
from librmq.protocol.client_requests import PendingSend
from librmq.protocol.endpoint import InProcess, SendsLater
from librmq.runtime.event_log import EventLog
from librmq.runtime.runner import Runner

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


class SendContext(NamedTuple):
    """A send, as hooks see it."""

    group: str
    message: Message
    queue: MessageQueue
    attempt: int
    """Number of the try, counting from 0."""
    messages: tuple[Message, ...]
    """The message, or all messages of a batch."""


SendHook = Callable[[SendContext], Callable[[SendResult | None, Exception | None], None] | None]
"""A function called before each try, which returns a function to call after it with the result or the error."""


# ---- queues that a producer can send to


class TopicQueues(NamedTuple):
    """The writable queues of a topic, and the next one in turn."""

    queues: tuple[MessageQueue, ...]
    turns: RoundRobin
    near: tuple[MessageQueue, ...]
    """The queues at the client's own site."""
    broker: InProcess | None
    """The broker of all queues, if it stores usual messages without a request."""
    remote: Endpoint | None
    """The broker of all queues, if it is in another process."""
    next_queue: Callable[[], MessageQueue]
    """Returns the next of the queues."""


class PublishRoutes:
    """A producer's cache of its route: queues by topic, brokers by name. Thread-safe."""

    def __init__(self, client: Client, group: str, default_topic_queues: int) -> None:
        """``default_topic_queues`` is the number of queues of a topic that its first send creates."""
        self.topics: dict[str, TopicQueues] = {}
        """The topics looked up since the last change of the route."""
        self.endpoints: dict[str, Endpoint] = {}
        """The brokers looked up since then."""
        self._topics_before: dict[str, TopicQueues] = {}  # the route can have changed since
        self.client = client
        self._route = client.route
        self._runner = client.runner
        self.group = group
        self.default_topic_queues = default_topic_queues
        self._version = 0

    def drop_routes(self) -> None:
        """Clear the cache, under the runner's lock; a topic that stays the same keeps its turn."""
        self._version += 1
        self._topics_before.update(self.topics)
        self.topics.clear()
        self.endpoints.clear()

    def endpoint(self, broker_name: str) -> Endpoint:
        """Return the broker of that name, and cache it."""
        version = self._version
        endpoint = self._route.endpoint(broker_name)
        with self._runner.lock:
            if version == self._version:  # otherwise the endpoint can be outdated
                self.endpoints[broker_name] = endpoint
        return endpoint

    def queues(self, topic: str) -> TopicQueues:
        """Return the queues of a topic, and cache them.

        Raises:
            NoRouteError: No broker has the topic, and none creates it.
        """
        topic_queues = self.topics.get(topic)
        if topic_queues is not None:
            return topic_queues
        version = self._version
        data = self._route.topic_route(topic)
        is_new = not data
        if is_new:
            data = self._route.topic_route(AUTO_CREATE_TOPIC)
        queues = _writable(topic, data, self.default_topic_queues if is_new else None)
        if not queues:
            brokers = ", ".join(self._route.broker_names())
            if not brokers:
                why = "the route has no broker: start one, or look at the address of the name server"
            elif is_new:
                why = "no broker has it, and none makes it at the first send; create it, as by Broker.create_topic"
            else:
                why = "none lets it be written"
            hint = f" (brokers: {brokers})" if brokers else ""
            raise NoRouteError(f"topic {topic!r}, requested by producer group {self.group!r}: {why}{hint}")
        before = self._topics_before.pop(topic, None)
        if before is not None and before.queues == queues:
            turns = before.turns  # another topic has changed, so this one keeps its turn
        else:
            count, random = len(queues), self.client.random
            begin = 0 if random is None else random.randrange(count)
            turns = RoundRobin(self._runner.choose(f"first queue of {topic}", [*range(begin, count), *range(begin)]))
        site = self.client.site
        near = () if site is None else tuple(queue for queue in queues if site_of(queue.broker_name) == site)
        broker = self._sole_broker(queues)
        topic_queues = TopicQueues(
            queues,
            turns,
            near,
            broker if isinstance(broker, InProcess) else None,
            cast("Endpoint", broker) if isinstance(broker, SendsLater) else None,
            partial(turns.next_queue, queues),
        )
        with self._runner.lock:
            if not is_new and version == self._version:  # the created topic can have another number of queues
                self.topics[topic] = topic_queues
        return topic_queues

    def _sole_broker(self, queues: Sequence[MessageQueue]) -> object:
        """Return the broker that has all queues; None without one."""
        names = {queue.broker_name for queue in queues}
        if len(names) > 1:
            return None
        try:
            return self._route.endpoint(names.pop())
        except RmqError:  # a try of a send gets the error
            return None

    def named_queue(self, topic: str, queue: MessageQueue | int) -> MessageQueue:
        """Return the queue that a caller names; its number is enough if only one broker has the topic."""
        if isinstance(queue, MessageQueue):
            if queue.topic != topic:
                raise MessageIllegalError(f"queue: expected one of topic {topic!r}, found one of {queue.topic!r}")
            return queue
        if type(queue) is not int or queue < 0:
            raise MessageIllegalError(
                f"queue: expected a MessageQueue or a queue's number, from 0, found {queue!r:.80}"
            )
        names = [data.broker_name for data in self._route.topic_route(topic)] or list(self._route.broker_names())
        if len(names) != 1:
            raise NoRouteError(f"queue {queue} of topic {topic!r}: {len(names)} brokers have it; give a MessageQueue")
        return MessageQueue(topic, names[0], queue)

    def selected(
        self,
        message: Message,
        selector: QueueSelector,
        arg: object,
        if_broker_down: str | None = None,
        tried: Collection[str] = (),
    ) -> MessageQueue:
        """Return the queue that a selector chooses.

        With ``if_broker_down`` ``refuse`` it chooses among the queues of all brokers, including unreachable ones. With
        ``another`` brokers that were ``tried`` are left out while others remain.
        """
        if not callable(selector):
            raise MessageIllegalError(f"selector: expected a function, found {selector!r:.80}")
        topic = message.topic
        queues = self.queues(topic).queues
        if if_broker_down == "refuse":
            queues = _writable(topic, self._route.registered_route(topic)) or queues
        elif tried:
            queues = tuple(queue for queue in queues if queue.broker_name not in tried) or queues
        choice = selector(queues, message, arg)
        if choice not in queues:
            raise MessageIllegalError(
                f"topic {topic!r}: the selector chose {choice!r:.200}, which is not one of the {len(queues)} queues"
            )
        return choice


def _writable(topic: str, data: Collection[QueueData], limit: int | None = None) -> tuple[MessageQueue, ...]:
    """Return the queues of brokers that let the topic be written, sorted, at most ``limit`` of each broker."""
    return tuple(
        MessageQueue(topic, broker.broker_name, number)
        for broker in sorted(data, key=lambda entry: entry.broker_name)
        if broker.permission & PERM_WRITE
        for number in range(broker.write_queues if limit is None else min(broker.write_queues, limit))
    )


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
_PRIORITY: Final = PROPERTY_PRIORITY
_COMPRESSED: Final = record.COMPRESSED | record.COMPRESSION_ZLIB
_UNIQUE_KEY: Final = PROPERTY_UNIQUE_KEY
_WAIT: Final = PROPERTY_WAIT
_OK: Final = SendStatus.SEND_OK  # access to a member of an enum takes twice the time
_RUNNING: Final = State.RUNNING

_new_result = tuple.__new__  # in half the time


_FirstTry = tuple[int, str, Exception | None, SendResult | None]
"""When a try began, its broker, and its error or result."""


def _is_retried(error: BrokerError | BrokerUnreachableError) -> bool:
    if isinstance(error, BrokerError):
        return error.code in _RETRIED and not isinstance(error, BrokerBusyError)
    return True


def _too_late(queue: MessageQueue, took_ms: int) -> SendTimeoutError:
    return SendTimeoutError(
        f"topic {queue.topic!r}: {queue.broker_name} answered after {took_ms} ms, when the time was over;"
        f" the message is stored"
    )


class _Pending(PendingSend):
    __slots__ = ("answer", "deadline", "together")

    def __init__(self, send: SendMessage, answer: asyncio.Future[SendResponse | None], deadline: float) -> None:
        super().__init__(send)
        self.answer = answer
        self.deadline = deadline
        self.together: SendLater | None = None


class _LoopSends:
    """Sends of one event loop: those that begin in one turn go out together, and their outcomes come together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._unsent: dict[Endpoint, list[_Pending]] = {}
        self._under_way: set[_Pending] = set()
        self._next_look = math.inf
        self._look: asyncio.TimerHandle | None = None
        self._ended: deque[Sequence[PendingSend]] = deque()
        self._is_woken = False
        """Whether the loop is about to take what has ended."""

    def begin(self, endpoint: Endpoint, send: SendMessage, timeout_ms: float) -> asyncio.Future[SendResponse | None]:
        """Return the outcome to come of a send; None if the caller has to send the message by itself."""
        loop = self.loop
        answer: asyncio.Future[SendResponse | None] = loop.create_future()
        now = loop.time()
        deadline = now + timeout_ms / 1000
        pending = _Pending(send, answer, deadline)
        self._under_way.add(pending)
        if not self._unsent:
            loop.call_soon(self._send)
        self._unsent.setdefault(endpoint, []).append(pending)
        # Plan the look again also if its time is past: the exception of a signal's handler can have ended it at its
        # begin.
        if deadline < self._next_look or self._next_look < now:
            former, self._look = self._look, loop.call_at(deadline, self._end_late)
            self._next_look = deadline
            if former is not None:
                former.cancel()
        return answer

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, {}
        try:
            for endpoint, sends in unsent.items():
                open_sends = [pending for pending in sends if not pending.answer.done()]
                # Cancelled sends are not sent, and no outcome will remove them.
                if len(open_sends) < len(sends):
                    self._under_way.difference_update(set(sends).difference(open_sends))
                together = SendLater(open_sends, self._note_ends)
                for pending in open_sends:
                    pending.together = together
                # An error here belongs to one message of many. The caller sends each again by itself, and gets the
                # error of its own.
                with suppress(RmqError):
                    if not open_sends or endpoint.call(together):
                        unsent[endpoint] = []
        finally:
            for sends in unsent.values():
                for pending in sends:
                    self._end(pending, None)

    def _note_ends(self, sends: Sequence[PendingSend]) -> None:
        """Note the ends of sends, in any thread."""
        self._ended.append(sends)
        # One wake-up serves all ends until the loop takes them. The flag is cleared before they are taken, so an end
        # that is noted meanwhile wakes the loop again.
        if not self._is_woken:
            self._is_woken = True
            # A closed loop has no coroutine that could wait for the outcome.
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._take_ended)

    def _take_ended(self) -> None:
        self._is_woken = False
        while self._ended:
            for pending in self._ended[0]:
                self._end(cast("_Pending", pending), pending.outcome)
            # Remove the entry after its sends have ended. The exception of a signal's handler can come in between, and
            # a removed entry would leave coroutines waiting for good.
            self._ended.popleft()

    def _end(self, pending: _Pending, outcome: SendResponse | RmqError | None) -> None:
        answer = pending.answer
        # An answer that is done was cancelled, or has its error.
        if not answer.done():
            self._set_outcome(pending, outcome)
        self._under_way.discard(pending)

    def _set_outcome(self, pending: _Pending, outcome: SendResponse | RmqError | None) -> None:
        answer = pending.answer
        if isinstance(outcome, BrokerUnreachableError) and pending.together is not None:
            outcome = pending.together.explain(outcome)
        if isinstance(outcome, RmqError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    def _end_late(self) -> None:
        now = self.loop.time()
        # Take what is left over here: usually its own turn comes, but the exception of a signal's handler can have
        # ended that.
        if self._ended or self._unsent:
            self._take_ended()
            self._send()
        for pending in [pending for pending in self._under_way if pending.deadline <= now]:
            error = None if pending.together is None else pending.together.give_up(pending)
            if error is not None or pending.together is None:
                self._end(pending, error)
        waiting = (pending for pending in self._under_way if pending.deadline > now)
        self._next_look = min((pending.deadline for pending in waiting), default=math.inf)
        if self._next_look < math.inf:
            self._look = self.loop.call_at(self._next_look, self._end_late)


class Sender:
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
        self._life = life
        self._start = start
        self._hooks = hooks
        self._metrics = metrics
        self._runner = self._client.runner
        self._now_ms = self._runner.now_ms
        self.latencies: BrokerLatencies | None = None
        self._loop_sends: _LoopSends | None = None  # sends of the event loop that has sent last
        self.configure(config)
        self._routes = routes
        self._topics, self._endpoints = routes.topics, routes.endpoints  # asked by every send

    def configure(self, config: ProducerConfig) -> None:
        """Use these settings for sends that begin later."""
        self.config = config
        if not config.avoid_slow_brokers:
            self.latencies = None
        elif self.latencies is None:
            self.latencies = BrokerLatencies(self._now_ms)
        # Whatever watches single tries, or lets other turns run between them, needs requests.
        has_points = type(self._runner).point is not Runner.point
        watches = self._metrics is not None or config.avoid_slow_brokers or config.nearby or has_points
        self._plain_size = 0 if watches else min(config.compress_from, config.max_message_size + 1)

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

    def selected(self, message: Message, selector: QueueSelector, arg: object, timeout_ms: float) -> SendResult:
        """Send a message to the queue that a selector chooses; where the settings say so, to another if that fails."""
        choice = self.config.if_broker_down

        def choose(tried: Sequence[str]) -> MessageQueue:
            return self._routes.selected(message, selector, arg, choice, tried)

        if choice == "another":
            return self.send(message, timeout_ms, choose=choose)
        return self.send_bound(message, choose(()), timeout_ms)

    def send_bound(
        self, message: Message, queue: MessageQueue, timeout_ms: float, batch: tuple[Message, ...] | None = None
    ) -> SendResult:
        """Send to one queue only. There is no other try, unless the store has another owner with the same queue now."""
        begin_ms, rest_ms, attempt = self._now_ms(), timeout_ms, 0
        while True:
            try:
                return self.send_to(message, queue, rest_ms, batch, attempt)
            except LostAnswerError:
                attempt, rest_ms = attempt + 1, begin_ms + timeout_ms - self._now_ms()
                if attempt > self.config.retries or rest_ms <= 0:
                    raise
                if self._metrics is not None:
                    self._metrics.count("send_retries", topic=queue.topic)

    def send_plain(self, message: Message, timeout_ms: float) -> SendResult | None:
        """Send a usual message to the only broker of its topic with less work; None if `send` has to do it."""
        queues, body = self._topics.get(message.topic), message.body
        if (
            queues is None
            or (queues.broker is None and queues.remote is None)
            or not 0 < len(body) < self._plain_size
            or message._delays is not None
            or self._hooks
            or self._life.state is not _RUNNING
        ):
            return None
        begin_ms, properties = self._now_ms(), message.properties.copy()
        unique_id = properties.get(_UNIQUE_KEY)
        if unique_id is None:
            unique_id = properties[_UNIQUE_KEY] = self._client.unique_ids.next(begin_ms)
        copy = Message.from_parts(message.topic, body, message.flag, properties)
        if queues.broker is None:
            return self._send_remotely(copy, queues, begin_ms, timeout_ms)
        try:
            place = queues.broker.store_plain(copy, queues.next_queue, begin_ms, self._client.host)
        except RmqError:  # the request gets the error that says why, or another broker stores the message
            return None
        if place is None:
            return None
        queue, queue_offset, offset_id = place
        if self._now_ms() - begin_ms > timeout_ms:
            raise _too_late(queue, self._now_ms() - begin_ms)
        result: SendResult = _new_result(SendResult, (_OK, unique_id, offset_id, queue, queue_offset, None, None))
        return result

    def _send_remotely(
        self, message: Message, queues: TopicQueues, begin_ms: int, timeout_ms: float
    ) -> SendResult | None:
        """Send a usual message to a broker over a connection, and after a failed try like `send`."""
        properties = message.properties
        remote = queues.remote
        if remote is None or _PRIORITY in properties:
            return None
        if _WAIT not in properties:
            properties[_WAIT] = "true"
        queue, client, defaults = queues.next_queue(), self._client, self.config.default_topic_queues
        request = SendMessage(
            self._group, message, queue.queue_id, begin_ms, client.host, 0, defaults, timeout_ms=timeout_ms
        )
        failure: Exception | None = None
        result: SendResult | None = None
        try:
            response = remote.call(request)
            self._check_time(queue, request, timeout_ms)
        except (BrokerError, BrokerUnreachableError) as error:
            if not _is_retried(error):
                raise
            failure = error
        else:
            result = self._result_of(message, queue, request, response)
            if result.status is _OK or not self.config.retry_another_broker_when_not_ok:
                return result
        return self.send(message, timeout_ms, first=(begin_ms, queue.broker_name, failure, result))

    def send(
        self,
        message: Message,
        timeout_ms: float,
        batch: tuple[Message, ...] | None = None,
        choose: Callable[[Sequence[str]], MessageQueue] | None = None,
        first: _FirstTry | None = None,
    ) -> SendResult:
        """Send a message, or a batch with this first message, to one queue after the other, until one stores it.

        ``choose(brokers tried before)`` returns the next queue; None takes the queues in turn. ``first`` was tried
        before.
        """
        queues = self._topics.get(message.topic) or self.queues(message.topic)
        rest_ms = timeout_ms
        tried: list[str] = []
        failure: Exception | None = None
        result: SendResult | None = None
        if first is None:
            begin_ms = self._now_ms()
        else:
            begin_ms, broker_name, failure, result = first
            tried.append(broker_name)
        for attempt in range(len(tried), self.config.retries + 1):
            if attempt:
                rest_ms = begin_ms + timeout_ms - self._now_ms()
                if rest_ms < 0:
                    raise SendTimeoutError(
                        f"topic {message.topic!r}: {attempt} tries took over {timeout_ms:.0f} ms"
                        f"{'' if failure is None else f'; the last error: {failure}'}"
                    ) from failure
            queue = self.queue_of_try(queues, tried) if choose is None else choose(tried)
            tried.append(queue.broker_name)
            if attempt and self._metrics is not None:
                self._metrics.count("send_retries", topic=queue.topic)
            try:
                result = self.send_to(message, queue, rest_ms, batch, attempt)
            except (BrokerError, BrokerUnreachableError) as error:
                if not _is_retried(error):
                    raise
                failure = error
            else:
                if result.status is _OK or not self.config.retry_another_broker_when_not_ok:
                    return result
        if result is not None:
            return result
        assert failure is not None
        raise failure

    async def send_async(self, message: Message, timeout_ms: float) -> SendResult:
        """Send like `send`; make the first try without a thread, where no hook and no endpoint could wait."""
        queues = self._topics.get(message.topic)
        if (
            queues is None
            or self._hooks
            or _PRIORITY in message.properties
            or len(message.body) >= self.config.compress_from
        ):
            return await self._runner.offload(partial(self.send, message, timeout_ms))
        queue = self.queue_of_try(queues)
        # Look the endpoint up only once, because a change of the route can clear the cache in between.
        endpoint = self._endpoints.get(queue.broker_name)
        if not isinstance(endpoint, SendsLater):
            return await self._send_in_thread(message, timeout_ms, queues, queue)
        sends, loop = self._loop_sends, asyncio.get_running_loop()
        if sends is None or sends.loop is not loop:
            sends = self._loop_sends = _LoopSends(loop)
        begin_ms: int | None = None
        failure: Exception | None = None
        result: SendResult | None = None
        try:
            request = self._request_of(message, queue, timeout_ms)
            begin_ms = request.born_timestamp_ms
            try:
                response = await sends.begin(endpoint, request, timeout_ms)
                if response is None:
                    return await self._send_in_thread(message, timeout_ms, queues, queue)
                self._check_time(queue, request, timeout_ms)
            except Exception:
                self._record_attempt(queue, request, "ERROR")
                raise
            result = self._result_of(message, queue, request, response)
            if result.status is _OK or not self.config.retry_another_broker_when_not_ok:
                return result
        except (BrokerError, BrokerUnreachableError) as error:
            if not _is_retried(error):
                raise
            failure = error
        first = self._now_ms() if begin_ms is None else begin_ms, queue.broker_name, failure, result
        return await self._runner.offload(partial(self.send, message, timeout_ms, first=first))

    async def _send_in_thread(
        self, message: Message, timeout_ms: float, queues: TopicQueues, queue: MessageQueue
    ) -> SendResult:
        """Send a message, first to a queue that is chosen already."""
        return await self._runner.offload(
            lambda: self.send(
                message, timeout_ms, choose=lambda tried: self.queue_of_try(queues, tried) if tried else queue
            )
        )

    def queue_of_try(self, queues: TopicQueues, tried: Sequence[str] = ()) -> MessageQueue:
        """Return the queue of the next try, on another broker than the last one if there is one."""
        if self.config.nearby:
            return self._next_nearby(queues, tried)
        if self.latencies is not None:
            return self.latencies.next_queue(queues.queues, queues.turns)
        return queues.turns.next_queue(queues.queues, tried[-1] if tried else None)

    def _next_nearby(self, queues: TopicQueues, tried: Sequence[str]) -> MessageQueue:
        """Return a queue of the own site; for the last try, or if its brokers fail, one of another site."""
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
            return queues.turns.next_queue(queues.queues, tried[-1] if tried else None)
        if latencies is not None:
            return latencies.next_queue(near, queues.turns)
        return queues.turns.next_queue(near)

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
        if _PRIORITY in message.properties and batch is None:
            queue = self._queue_of_priority(message, queue)
        request: SendMessage | SendBatch
        if batch is None:
            request = self._request_of(message, queue, timeout_ms, is_one_way)
        else:
            self._begin_try(queue)
            host, default_queues = self._client.host, self.config.default_topic_queues
            request = SendBatch(self._group, batch, queue.queue_id, self._now_ms(), host, default_queues, timeout_ms)
        after = []
        if self._hooks:
            context = SendContext(self._group, message, queue, attempt, batch or (message,))
            after = [then for hook in self._hooks if (then := hook(context)) is not None]
        try:
            endpoint = self._endpoints.get(queue.broker_name) or self._routes.endpoint(queue.broker_name)
            response: SendResponse = endpoint.call(request)
            self._check_time(queue, request, timeout_ms)
        except Exception as error:
            self._record_attempt(queue, request, "ERROR")
            self._run_hooks(after, None, error)
            raise
        result = self._result_of(message, queue, request, response, batch)
        if after:
            self._run_hooks(after, result, None)
        return result

    def _begin_try(self, queue: MessageQueue) -> None:
        if self._life.state is not _RUNNING:
            self._start()
        self._runner.point(f"send {queue.topic}")

    def _request_of(
        self, message: Message, queue: MessageQueue, timeout_ms: float, is_one_way: bool = False
    ) -> SendMessage:
        self._begin_try(queue)
        sent, sys_flag = message, 0
        if len(message.body) >= self.config.compress_from:
            packed, sys_flag = record.compress_body(message.body), _COMPRESSED
            sent = Message.from_parts(message.topic, packed, message.flag, message.properties, message._delays)
        return SendMessage(
            self._group,
            sent,
            queue.queue_id,
            self._now_ms(),
            self._client.host,
            sys_flag,
            self.config.default_topic_queues,
            timeout_ms=timeout_ms,
            is_one_way=is_one_way,
        )

    def _check_time(self, queue: MessageQueue, request: SendMessage | SendBatch, timeout_ms: float) -> None:
        took_ms = self._now_ms() - request.born_timestamp_ms
        if took_ms > timeout_ms:
            raise _too_late(queue, took_ms)

    def _result_of(
        self,
        message: Message,
        queue: MessageQueue,
        request: SendMessage | SendBatch,
        response: SendResponse,
        batch: tuple[Message, ...] | None = None,
    ) -> SendResult:
        if self._metrics is not None or self.latencies is not None:
            self._record_attempt(queue, request, response.status.value)
        if batch is None:
            stored_queue = queue if response.queue_id == queue.queue_id else queue._replace(queue_id=response.queue_id)
            stored: SendResult = _new_result(
                SendResult,
                (
                    response.status,
                    message.properties[_UNIQUE_KEY],
                    response.offset_ids[0],
                    stored_queue,
                    response.queue_offset,
                    response.transaction_id,
                    response.recall_handle,
                ),
            )
            return stored
        return SendResult(
            response.status,
            ",".join(part.properties[_UNIQUE_KEY] for part in batch),
            ",".join(response.offset_ids),
            queue._replace(queue_id=response.queue_id),
            response.queue_offset,
        )

    def _queue_of_priority(self, message: Message, queue: MessageQueue) -> MessageQueue:
        """Return the queue of the message's priority at the broker of ``queue``: brokers before 5.4 don't choose it."""
        priority = priority_of(message.properties)
        if priority is None or message.topic.startswith(RETRY_PREFIX):
            return queue
        queues = self.queues(message.topic).queues
        count = sum(other.broker_name == queue.broker_name for other in queues)
        return queue._replace(queue_id=min(priority, max(count - 1, 0)))

    def _run_hooks(
        self,
        after: Iterable[Callable[[SendResult | None, Exception | None], None]],
        result: SendResult | None,
        error: Exception | None,
    ) -> None:
        for then in after:
            try:
                then(result, error)
            except Exception:
                # The message is stored, so an error while its result is made must not look like a failed send.
                _log.exception("group %(group)s: a hook has failed after a send", group=self._group)

    def _record_attempt(self, queue: MessageQueue, request: SendMessage | SendBatch, status: str) -> None:
        """Count a try, and note its broker's latency."""
        took_ms = self._now_ms() - request.born_timestamp_ms
        if self.latencies is not None:
            self.latencies.report(queue.broker_name, took_ms, failed=status == "ERROR")
        if self._metrics is not None:
            messages = request.messages if isinstance(request, SendBatch) else (request.message,)
            self._metrics.count("sends", topic=queue.topic, status=status)
            self._metrics.count("send_bytes", sum(len(message.body) for message in messages), topic=queue.topic)
            self._metrics.count("send_seconds", took_ms / 1000, topic=queue.topic)
