"""Producers: send messages to the brokers of a route.

Mirrors ``DefaultMQProducer`` and ``DefaultMQProducerImpl``. A send goes to the next queue of its topic in turn. If a
broker cannot be reached, or refuses for a temporary reason, the producer tries another: three tries in all within one
timeout. A try can store the message although its answer is lost, so a message can be stored twice, with one unique id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, Self, Unpack

from librmq.client.client import Client, LifeCycle, Member, PublishRoutes, QueueSelector, client_of
from librmq.client.operations import Watcher
from librmq.client.sender import ProducerConfig, ProducerKeywords, Sender, SendResult
from librmq.config import to_seconds
from librmq.errors import BrokerError, BrokerUnreachableError, ConfigError, MessageIllegalError, SendTimeoutError
from librmq.message import Message, MessageQueue, StoredMessage
from librmq.message.message import (
    SendKeywords,
    body_too_large,
    check_batch,
    check_batch_size,
    encoded_size,
    priority_with_queue,
    reserved_topic,
)
from librmq.message.properties import PropertyName
from librmq.message.topics import NOT_FOR_SENDING, validate_client_topic, validate_group
from librmq.override import override
from librmq.protocol import TOOL_PRODUCERS, CancelResult, Route, SentMessage, cancel_request
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import check_reentry

if TYPE_CHECKING:
    from librmq.client.traces import TraceWriter
    from librmq.metrics import Metrics

_log = EventLog("librmq.producer")
_UNIQUE_KEY: Final = PropertyName.UNIQUE_KEY
_WAIT: Final = PropertyName.WAIT
Body = bytes | bytearray | memoryview | str
"""Type of a body; text is sent as UTF-8."""


class ProducerArguments(ProducerKeywords, total=False):
    """Keywords of a `Producer`, for type checkers."""

    client: Client | None
    instance_name: str | None
    config: ProducerConfig | None
    hooks: Iterable[Watcher]
    metrics: Metrics | None
    trace: bool | str


class Producer(Member):
    """A sender of messages, which starts with its first send or with `start`. Thread-safe.

    Producers of one group have different clients.
    """

    def __init__(
        self,
        route: Route,
        group: str = "DEFAULT_PRODUCER",
        *,
        client: Client | None = None,
        instance_name: str | None = None,
        config: ProducerConfig | None = None,
        hooks: Iterable[Watcher] = (),
        metrics: Metrics | None = None,
        trace: bool | str = False,
        **settings: Unpack[ProducerKeywords],
    ) -> None:
        """It joins its group at its first send, at `start` or in a ``with`` block.

        Args:
            route: A `Broker`, or several in a `RouteTable`.
            group: The producer group.
            client: The identity; by default one of its own.
            instance_name: Makes the client's id the same from run to run.
            config: Settings.
            hooks: Called with each try, an `Operation`; each may return a function that gets the result and the error.
            metrics: Counts sends.
            trace: Whether each send is recorded in ``RMQ_SYS_TRACE_TOPIC``, or the name of another topic for that, as
                by ``enableMsgTrace`` of RocketMQ's clients; read by `librmq.diagnosis.story` and ``librmq traces``.
            **settings: Single settings of `ProducerConfig`, in place of those in ``config``.

        Raises:
            ConfigError: There is no such setting, or its value is refused.
            TypeError: ``route`` is no route.
        """
        validate_group(group)
        self.client: Client = client_of(route, type(self).__name__, client, instance_name)
        self.group = group
        config = ProducerConfig.of(config, settings)
        self.route = route
        self.traces: TraceWriter | None = None
        if trace is not False:
            from librmq.client.traces import TraceWriter

            self.traces = TraceWriter(self.client, group, trace, metrics, "PRODUCE")
        traces = None if self.traces is None else self.traces.watchers
        self._watch_by(traces, kind="try", hooks=(hooks := tuple(hooks)), metrics=metrics)
        self._may_wait = bool(traces or hooks)
        self._given_watchers = self._own_watchers
        self.metrics = metrics
        self._runner = route.runner
        self._now_ms = route.runner.now_ms
        self._routes = PublishRoutes(self.client, group, config.default_topic_queues)
        self._topics = self._routes.topics  # asked by every send
        self._life = LifeCycle(f"producer of group {group!r}")
        self.sender: Sender = Sender(self._routes, config, self._life, self._start_or_refuse)
        self._unwatch: Callable[[], None] | None = None
        self.config = config

    def configure(self, **settings: Unpack[ProducerKeywords]) -> None:
        """Change settings while the producer runs; sends that begin later use them.

        Raises:
            ConfigError: There is no such setting, or its value is refused. Then nothing has changed.
        """
        with self._runner.lock:
            self.config = self.config.with_settings(settings)

    @property
    def config(self) -> ProducerConfig:
        """The settings; assigning others changes them, like `configure`."""
        return self._config

    @config.setter
    def config(self, config: ProducerConfig) -> None:
        if not isinstance(config, ProducerConfig):
            raise ConfigError(f"config: expected a ProducerConfig, found {type(config).__name__}")
        if config.nearby and self.client.site is None:
            raise ConfigError(
                "nearby: the client has no site: make the producer on cluster.at(site), or with Client(route, site=…)"
            )
        with self._runner.lock:
            self._config = config
            self.sender.configure(config)
            self._timeout_ms = 1000 * config.timeout
            self._routes.default_topic_queues = config.default_topic_queues
            latencies = self.sender.latencies
            self._own_watchers = self._given_watchers
            self._watch_by(None if latencies is None else {"try": latencies.watch})

    # ------------------------------------------------------------------------------------------------------------ life

    @override
    def start(self) -> Self:
        """Join the group now instead of with the first send. If the producer runs, this does nothing.

        Raises:
            BrokerUnreachableError: The route is a single broker, which is closed.
            ClientStateError: The producer was shut down, or its client has another producer of the group.
        """
        with self._runner.lock:
            if not self._life.is_running:
                self._life.start(self._join)
        return self

    def _join(self) -> None:
        self.client.join(self)
        self._unwatch = self.route.watch(self._routes.drop_routes)

    @override
    def shutdown(self) -> bool:
        """Leave the group; a later send raises `ClientStateError`. A second call does nothing.

        Traces that wait are stored first, within half a second.

        Returns:
            True, like a consumer's shutdown after all its listeners have ended.
        """
        check_reentry()
        with self._runner.lock:
            self._life.shut_down()
            self.client.leave(self)  # also after a start or a shutdown that Ctrl-C has interrupted
            if self._unwatch is not None:
                self._unwatch()
        if self.traces is not None:
            self.traces.close()
        return True

    async def shutdown_async(self) -> bool:
        """Shut down without blocking the event loop."""
        return await self._runner.offload(self.shutdown)

    @override
    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.group}, {self._life.state.value}, client {self.client.client_id}>"

    # ------------------------------------------------------------------------------------------------------------ send

    def send(
        self,
        message: Message | str,
        body: Body | None = None,
        *,
        queue: MessageQueue | int | None = None,
        selector: QueueSelector | None = None,
        arg: object = None,
        timeout: float | timedelta | None = None,
        **fields: Unpack[SendKeywords],
    ) -> SendResult:
        """Send a message, given or made from topic, ``body`` and the keywords of `Message`; return where it is stored.

        A message goes to the next queue in turn, and on failure to another, unless ``queue`` or ``selector`` chooses
        its queue. The given message is not changed: each send creates a new unique id, unless the message has one.

        Args:
            message: A `Message`, or a topic.
            body: With a topic: bytes or a string.
            queue: The queue, or its number if only one broker has the topic.
            selector: Called as ``selector(queues, message, arg)``; returns the queue.
            arg: Argument for the selector; refused without one.
            timeout: Time for all tries; None: as configured.
            **fields: With a topic: ``json`` instead of a body, ``tags``, ``keys``, ``properties``, ``delay``,
                ``deliver_at`` and the other keywords of `Message`.

        Raises:
            MessageIllegalError: The message is refused; nothing was sent.
            NoRouteError: No broker has the topic, and none creates it.
            BrokerError: A broker refused it; `BrokerBusyError` is not tried again.
            BrokerUnreachableError: No try reached a broker or got its answer.
            SendTimeoutError: The time limit has passed; the message may have been stored anyway.
        """
        timeout_ms = self._timeout_ms if timeout is None else 1000 * to_seconds("timeout", timeout)
        begin_ms = self._now_ms()
        prepared = self._prepare(message, body, fields, begin_ms)
        if queue is None and selector is None and arg is None and not self.watchers:
            return self.sender.send(prepared, timeout_ms, begin_ms=begin_ms)
        with self._watched("send", prepared.topic, (prepared,)) as send:
            return send.returns(self._send_prepared(prepared, queue, selector, arg, timeout_ms))

    def _send_prepared(
        self,
        prepared: Message,
        queue: MessageQueue | int | None,
        selector: QueueSelector | None,
        arg: object,
        timeout_ms: float,
    ) -> SendResult:
        if selector is not None and queue is None and self.config.if_broker_down == "another":
            _check_choice(prepared, queue, selector, arg)
            if not self._life.is_running:
                self._start_or_refuse()
            choose = partial(self._routes.selected, prepared, selector, arg, "another")
            return self.sender.send(prepared, timeout_ms, choose=choose, watchers=self.watchers.get("try", ()))
        chosen_queue = self._chosen_queue(prepared, queue, selector, arg)
        return self.sender.send(prepared, timeout_ms, queue=chosen_queue, watchers=self.watchers.get("try", ()))

    def _chosen_queue(
        self, prepared: Message, queue: MessageQueue | int | None, selector: QueueSelector | None, arg: object
    ) -> MessageQueue | None:
        """Return the queue that a caller or its selector names; None for the queues in turn."""
        if queue is None and selector is None and arg is None:
            return None
        _check_choice(prepared, queue, selector, arg)
        if queue is not None:
            return self._routes.named_queue(prepared.topic, queue)
        assert selector is not None
        if not self._life.is_running:
            self._start_or_refuse()
        return self._routes.selected(prepared, selector, arg, self.config.if_broker_down)

    def send_batch(self, messages: Iterable[Message], *, queue: MessageQueue | int | None = None) -> SendResult:
        """Send messages of one topic as one batch: either all are stored, in order in one queue, or none.

        Raises:
            MessageIllegalError: The messages have several topics or wait flags, one has a delay, or together they have
                more than 4 MiB; `split_batch` cuts longer lists. `send` lists the other errors.
        """
        if isinstance(messages, Message) or not isinstance(messages, Iterable):
            raise MessageIllegalError(f"messages: expected a list of Message, found {messages!r:.80}")
        batch = tuple(self._prepare(message, None, {}) for message in map(_checked, messages))
        _check_batch(batch, self.config.max_message_size)
        with self._watched("send", batch[0].topic, batch, is_batch=True) as send:
            bound = None if queue is None else self._routes.named_queue(batch[0].topic, queue)
            sent = self.sender.send(
                batch[0], self._timeout_ms, batch, queue=bound, watchers=self.watchers.get("try", ())
            )
            return send.returns(sent)

    def send_oneway(
        self,
        message: Message | str,
        body: Body | None = None,
        *,
        queue: MessageQueue | int | None = None,
        selector: QueueSelector | None = None,
        arg: object = None,
        **fields: Unpack[SendKeywords],
    ) -> None:
        """Send without waiting for the result and without retries; a refusal by a broker is logged.

        Errors that need no broker are raised as in `send`.
        """
        prepared = self._prepare(message, body, fields)
        target = self._chosen_queue(prepared, queue, selector, arg)
        if target is None:
            target = self.sender.queue_of_try(self.sender.queues(prepared.topic))
        try:
            with self._watched("send", prepared.topic, (prepared,)) as send:
                sent = self.sender.send(
                    prepared, self._timeout_ms, queue=target, is_one_way=True, watchers=self.watchers.get("try", ())
                )
                send.returns(sent)
        except (BrokerError, BrokerUnreachableError, SendTimeoutError) as error:
            _log.warning(
                "group %(group)s: a one-way message to %(queue)s was not stored: %(error)s",
                group=self.group,
                queue=target,
                error=error,
            )

    async def send_async(
        self,
        message: Message | str,
        body: Body | None = None,
        *,
        queue: MessageQueue | int | None = None,
        selector: QueueSelector | None = None,
        arg: object = None,
        timeout: float | timedelta | None = None,
        **fields: Unpack[SendKeywords],
    ) -> SendResult:
        """Send like `send`, without blocking the event loop while the store waits for its disk.

        Messages for a broker in another process that begin in one turn of the loop go out together. Sends that are
        under way at the same time are stored in any order, as those of RocketMQ's callbacks are: await each where the
        order matters. A send whose task is cancelled may have been sent.
        """
        if queue is None and selector is None and arg is None:
            prepared = self._prepare(message, body, fields)
            timeout_ms = self._timeout_ms if timeout is None else 1000 * to_seconds("timeout", timeout)
            with self._watched("send", prepared.topic, (prepared,)) as send:
                sent = self.sender.send_async(
                    prepared, timeout_ms, self.watchers.get("try", ()), may_wait=self._may_wait
                )
                return send.returns(await sent)
        return await self._runner.offload(
            lambda: self.send(message, body, queue=queue, selector=selector, arg=arg, timeout=timeout, **fields)
        )

    def request(
        self,
        message: Message | str,
        body: Body | None = None,
        *,
        queue: MessageQueue | int | None = None,
        selector: QueueSelector | None = None,
        arg: object = None,
        timeout: float | timedelta | None = None,
        **fields: Unpack[SendKeywords],
    ) -> Message:
        """Send a message like `send`, wait until a consumer replies to it by `reply`, and return the reply.

        A request whose time is over can still be handled. With a manual clock, the clock moves while the call waits.

        Args:
            message: A `Message`, or a topic.
            body: With a topic: bytes or a string.
            queue: As for `send`.
            selector: As for `send`.
            arg: Argument for the selector.
            timeout: Time for the send and the reply together; None: as configured for a send.
            **fields: As for `send`.

        Raises:
            SendTimeoutError: No reply came in time. `send` lists the other errors.
        """
        from librmq.client._requests import send_request  # few producers await replies

        prepared = self._prepare(message, body, fields)
        self.start()

        def send(request: Message, seconds: float) -> object:
            return self.send(request, queue=queue, selector=selector, arg=arg, timeout=seconds)

        seconds = self.config.timeout if timeout is None else to_seconds("timeout", timeout)
        return send_request(self.client, prepared, seconds, send)

    async def request_async(
        self,
        message: Message | str,
        body: Body | None = None,
        *,
        queue: MessageQueue | int | None = None,
        selector: QueueSelector | None = None,
        arg: object = None,
        timeout: float | timedelta | None = None,
        **fields: Unpack[SendKeywords],
    ) -> Message:
        """Request like `request`, in another thread, without blocking the event loop."""
        return await self._runner.offload(
            lambda: self.request(message, body, queue=queue, selector=selector, arg=arg, timeout=timeout, **fields)
        )

    def reply(
        self,
        request: StoredMessage,
        body: Body | None = None,
        *,
        timeout: float | timedelta | None = None,
        **fields: Unpack[SendKeywords],
    ) -> SendResult:
        """Reply to a message that `request` has sent; listeners call this with the message that they got.

        The broker passes the reply to the client that waits, and stores it in a topic of the cluster.

        Args:
            request: The message.
            body: Bytes or a string.
            timeout: Time for the broker's answer; None: as configured.
            **fields: ``json`` instead of a body, and the other keywords of `Message`.

        Raises:
            MessageIllegalError: The message is no request, or the reply is refused.
            BrokerError: The client that sent the request is no longer connected.
            BrokerUnreachableError: No broker can be reached.
        """
        from librmq.client._requests import reply, reply_properties

        topic, properties = reply_properties(request)
        prepared = self._prepare(topic, body, fields)
        prepared.properties.update(properties)
        self._start_or_refuse()
        timeout_ms = self._timeout_ms if timeout is None else 1000 * to_seconds("timeout", timeout)
        broker_name = getattr(request, "broker_name", None)
        with self._watched("reply", topic, (prepared,)) as send:
            return send.returns(reply(self.client, self.group, prepared, broker_name, timeout_ms))

    def cancel(self, receipt: SentMessage) -> CancelResult:
        """Cancel the delivery of a message that waits for its time, at the broker that has it.

        The answer says whether it is cancelled, or why not: most often it was delivered already. See
        `librmq.Broker.cancel`, whose errors are raised too.

        Args:
            receipt: What `send` returned.

        Raises:
            BrokerError: The broker can't: one of RocketMQ 5 recalls only what waits in its timer, and one of 4.x
                nothing (REQUEST_CODE_NOT_SUPPORTED).
        """
        request = cancel_request(receipt)
        if not self._life.is_running:
            self._start_or_refuse()
        return self._routes.endpoint(receipt.queue.broker_name).call(request)

    async def cancel_async(self, receipt: SentMessage) -> CancelResult:
        """Cancel like `cancel`, without blocking the event loop."""
        return await self._runner.offload(lambda: self.cancel(receipt))

    def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """Return the queues that messages of ``topic`` can be sent to.

        Raises:
            NoRouteError: No broker has the topic, and none creates it.
        """
        return self.sender.queues(topic).queues

    # --------------------------------------------------------------------------------------------------------- details

    def _prepare(
        self, message: Message | str, body: Body | None, fields: SendKeywords, now_ms: int | None = None
    ) -> Message:
        """Return a checked message of the producer's own, with a unique id."""
        if isinstance(message, Message):
            if body is not None or fields:
                names = ", ".join([*(["body"] if body is not None else []), *fields])
                raise MessageIllegalError(f"{names}: a Message was given, which has its own: give them to Message")
            properties = message.properties.copy()
            message = Message.from_parts(message.topic, message.body, message.flag, properties, message._delays)
        elif isinstance(message, str):
            message = Message(message, body, **fields)
        else:
            several = ": send several by send_batch" if isinstance(message, list | tuple) else ""
            raise MessageIllegalError(
                f"message: expected a Message, or a topic and a body, found {message!r:.80}{several}"
            )
        if message.topic not in self._topics or not 0 < len(message.body) <= self._config.max_message_size:
            self._check_new(message)
        properties = message.properties
        if _UNIQUE_KEY not in properties:
            properties[_UNIQUE_KEY] = self.client.unique_ids.next(now_ms)
        if _WAIT not in properties:
            properties[_WAIT] = "true"
        return message

    def _check_new(self, message: Message) -> None:
        """Refuse what clients do not send, unless it is a copy of a stored message, about which the broker decides."""
        if self.group in TOOL_PRODUCERS:
            return
        validate_client_topic(message.topic)
        if message.topic in NOT_FOR_SENDING:
            raise reserved_topic(message.topic)
        if not message.body:
            raise MessageIllegalError(f"topic {message.topic!r}: the message has no body: expected at least one byte")
        if len(message.body) > self._config.max_message_size:
            raise body_too_large(len(message.body), self._config.max_message_size)

    def _start_or_refuse(self) -> None:
        with self._runner.lock:
            if self._life.is_new:
                self._life.start(self._join)
        self._life.check_running("send")


def _checked(message: object) -> Message:
    if not isinstance(message, Message):
        raise MessageIllegalError(f"messages: expected only Message objects, found {message!r:.80}")
    return message


def _check_choice(
    message: Message, queue: MessageQueue | int | None, selector: QueueSelector | None, arg: object
) -> None:
    if selector is None and arg is not None:
        raise MessageIllegalError(
            f"topic {message.topic!r}: arg= is for a selector: give selector= too, such as select_by_hash"
        )
    if queue is not None and selector is not None:
        raise MessageIllegalError(f"topic {message.topic!r}: give queue= or selector=, not both")
    if message.priority is not None:
        raise priority_with_queue(message.topic)


def _check_batch(batch: Sequence[Message], max_size: int) -> None:
    check_batch(batch)
    if any(message.priority is not None for message in batch):
        raise priority_with_queue(batch[0].topic)
    if batch[0].topic.startswith("%RETRY%"):
        raise MessageIllegalError(f"topic {batch[0].topic!r} takes no batch: send its messages one by one")
    check_batch_size(sum(map(encoded_size, batch)), max_size)
