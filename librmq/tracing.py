"""Spans of OpenTelemetry for sends, receives, listeners and acknowledgements, by its conventions for messaging.

::

    operation                         span               kind       links
    send, batch, half, request        send TOPIC         PRODUCER   none; the message carries the span's context
      of a message with a context     send TOPIC         CLIENT     the context that the message carries
    poll or receive with messages     receive TOPIC      CLIENT     the context of each message
    call of a listener                process TOPIC      CONSUMER   the context of each message
    acknowledgement                   ack TOPIC          CLIENT     the context of each message
    dead letter by a simple consumer  dead_letter TOPIC  CLIENT     the context of the message
    end of a transaction              commit TOPIC       CLIENT     the context of the half message
                                      or rollback TOPIC

The context travels in the user properties that the global propagator writes: ``traceparent``, ``tracestate`` and
``baggage`` by default. ``docs/tracing.md`` is the guide.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from librmq.client import Operation
from librmq.client.operations import Ended, Kind, add_watchers, observe_kept
from librmq.clock import moves_by_itself
from librmq.consumer import DeliveredMessage
from librmq.errors import BrokerError, MissingExtraError
from librmq.message import Message, StoredMessage
from librmq.message.message import encoded_size
from librmq.message.properties import PropertyName, encode_properties
from librmq.override import override

try:
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context, attach
    from opentelemetry.environment_variables import OTEL_PYTHON_TRACER_PROVIDER
    from opentelemetry.propagators.textmap import Setter
    from opentelemetry.trace import Link, SpanKind, StatusCode
except ImportError:
    raise MissingExtraError("librmq.tracing", "tracing") from None

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, Tracer, TracerProvider

__all__ = ["Instrumentor", "instrument"]

_TYPES: Final[Mapping[Kind, str | None]] = {
    "send": "send",
    "reply": "send",
    "receive": "receive",
    "process": "process",
    "ack": "settle",
    "dead_letter": "settle",
    "commit": None,
    "rollback": None,
}
"""The conventions' type of each operation that has a span; the end of a transaction has none."""
_ROOM: Final = 30_000
"""Bytes of properties above which a message gets no context: it might no longer fit into a record."""
_BATCH_ROOM: Final = 512
"""Bytes that a batch must have left for the context of each of its messages."""


def instrument(
    target: object = None, tracer_provider: TracerProvider | None = None, *, parents: bool = False
) -> Callable[[], None]:
    """Make spans for a client, for all clients of a route, or without a target for all clients of this process.

    Clients that are created later are included. With ``instrument`` called again, a client has only the latest.

    Args:
        target: A producer, a consumer or a `Client`; a route, such as what `Broker.open`, `share` and `connect` return;
            a kit.
        tracer_provider: Makes the tracer; None takes the global provider, whenever it is set.
        parents: Make the span of the send the parent of a listener's span for a single message, and not only a link.

    Returns:
        A function that ends it.

    Raises:
        ConfigError: The target is none of these.
    """
    spans = _Spans(tracer_provider, parents)
    stop_watching = add_watchers(target, dict.fromkeys(_TYPES, spans.watch), _Spans)
    stop_keeping = observe_kept(spans.add_context, target)

    def end() -> None:
        stop_watching()
        stop_keeping()

    return end


class Instrumentor:
    """What ``opentelemetry-instrument`` finds by the entry point ``librmq``: spans for all clients of the process."""

    _end: Callable[[], None] | None = None

    def instrument(self, *, tracer_provider: TracerProvider | None = None, **_: object) -> None:
        """Make spans for all clients; a second call does nothing."""
        if Instrumentor._end is None:
            Instrumentor._end = instrument(None, tracer_provider)

    def uninstrument(self, **_: object) -> None:
        """End it."""
        end, Instrumentor._end = Instrumentor._end, None
        if end is not None:
            end()


# ---- contexts in properties


class _KeepingSetter(Setter[dict[str, str]]):
    """Sets properties, but overwrites none of the application's."""

    @override
    def set(self, carrier: dict[str, str], key: str, value: str) -> None:
        if "\1" not in value and "\2" not in value:
            carrier.setdefault(key, value)


_SETTER: Final = _KeepingSetter()


def _context_of(message: Message | StoredMessage) -> Context:
    return propagate.extract(message.properties, context=Context())


def _span_context(context: Context) -> SpanContext | None:
    span_context = trace.get_current_span(context).get_span_context()
    return span_context if span_context.is_valid else None


def _carried(message: Message | StoredMessage) -> SpanContext | None:
    """Return the context that a message carries."""
    properties = message.properties
    if not any(field in properties for field in propagate.get_global_textmap().fields):
        return None
    return _span_context(_context_of(message))


def _has_room(messages: Sequence[Message], is_batch: bool) -> bool:
    if any(len(encode_properties(message.properties)) > _ROOM for message in messages):
        return False
    return not is_batch or sum(encoded_size(message) + _BATCH_ROOM for message in messages) <= 4 << 20


def _links(messages: Sequence[Message | StoredMessage]) -> list[Link]:
    """Return a link to the creation of each message that carries a context, with what only this message has."""
    links = []
    for message in messages:
        span_context = _carried(message)
        if span_context is not None:
            attributes: dict[str, Any] = {"messaging.message.id": _message_id(message)} if len(messages) > 1 else {}
            if len(messages) > 1 and isinstance(message, StoredMessage):
                attributes["librmq.delivery_attempt"] = message.reconsume_times + 1
            links.append(Link(span_context, attributes))
    return links


# ---- attributes


def _message_id(message: Message | StoredMessage) -> str:
    if isinstance(message, StoredMessage):
        return message.message_id
    return message.properties.get(PropertyName.UNIQUE_KEY, "")


def _message_attributes(message: Message | StoredMessage, now_ms: int) -> dict[str, Any]:
    """Return the attributes of a span about a single message."""
    properties = message.properties
    attributes: dict[str, Any] = {"messaging.message.id": _message_id(message)}
    if (correlation_id := properties.get(PropertyName.CORRELATION_ID)) is not None:
        attributes["messaging.message.conversation_id"] = correlation_id
    if message.tags:
        attributes["messaging.rocketmq.message.tag"] = message.tags
    if message.keys:
        attributes["messaging.rocketmq.message.keys"] = tuple(message.keys)
    kind = "normal"
    if properties.get(PropertyName.TRANSACTION_PREPARED, "").lower() == "true":
        kind = "transaction"
    elif (message_group := properties.get(PropertyName.SHARDING_KEY)) is not None:
        kind, attributes["messaging.rocketmq.message.group"] = "fifo", message_group
    if isinstance(message, Message):
        if message.delay_level > 0:
            kind, attributes["messaging.rocketmq.message.delay_time_level"] = "delay", message.delay_level
        elif (due_ms := _due_ms(message, now_ms)) is not None:
            kind, attributes["messaging.rocketmq.message.delivery_timestamp"] = "delay", due_ms
    else:
        attributes["librmq.delivery_attempt"] = getattr(message, "attempt", message.reconsume_times + 1)
    attributes["messaging.rocketmq.message.type"] = kind
    return attributes


def _without_namespace(topic: str | None) -> tuple[str, str | None]:
    """Return the namespace in front of a topic, empty without one, and the rest; both stand apart in a span."""
    if topic is None or "%" not in topic[1:] or topic[0] == "%":
        return "", topic
    namespace, _, name = topic.partition("%")
    return namespace, name


def _due_ms(message: Message, now_ms: int) -> int | None:
    return message.deliver_at_ms if message.delay_s is None else now_ms + round(1000 * message.delay_s)


def _error_type(error: BaseException) -> str:
    if isinstance(error, BrokerError):
        return getattr(error.code, "name", str(error.code))
    return type(error).__name__


def _set_server(span: Span, operation: Operation, broker_name: str | None) -> None:
    address = None if broker_name is None else operation.client.route.address(broker_name)
    if address is not None:
        span.set_attribute("server.address", address[0])
        span.set_attribute("server.port", address[1])


# ---- the watcher


class _Spans:
    """Makes the spans of operations. Thread-safe."""

    def __init__(self, provider: TracerProvider | None, parents: bool) -> None:
        self._given = provider
        self._is_named = OTEL_PYTHON_TRACER_PROVIDER in os.environ
        self._parents = parents
        self._provider: TracerProvider | None = None
        self._tracer: Tracer | None = None

    def is_active(self) -> bool:
        """Return whether there is a provider, and its tracer could record."""
        provider = self._given
        if provider is None:
            # `get_tracer_provider` reads the environment in each call while there is no provider, which takes longer
            # than everything else here.
            if trace._TRACER_PROVIDER is None and not self._is_named:
                return False
            provider = trace.get_tracer_provider()
        if provider is not self._provider:
            self._tracer = None
            if not isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
                from librmq import __version__

                self._tracer = provider.get_tracer("librmq", __version__)
            self._provider = provider
        return self._tracer is not None

    def add_context(self, properties: dict[str, str]) -> None:
        """Add the present context to the properties of a message that is kept for a later send."""
        if not self.is_active() or len(encode_properties(properties)) > _ROOM:
            return
        if _carried(Message.from_parts("", b"", 0, properties)) is None:
            propagate.inject(properties, setter=_SETTER)

    def watch(self, operation: Operation) -> Ended | None:
        """Begin the span of an operation; a receive gets its span at its end, because it may receive nothing."""
        if not self.is_active():
            return None
        if operation.kind == "receive":
            return self._begin_receive(operation)
        if operation.kind == "process":
            return self._begin_process(operation)
        if operation.kind in ("send", "reply"):
            return self._begin_send(operation)
        span = self._start(operation, SpanKind.CLIENT, _links(operation.messages), None)
        _set_server(span, operation, operation.broker_name)
        return lambda result, error: self._end(operation, span, error)

    # ---- each kind

    def _begin_send(self, operation: Operation) -> Ended:
        messages: list[Message] = [message for message in operation.messages if isinstance(message, Message)]
        carried = [span_context for message in messages if (span_context := _carried(message)) is not None]
        if len(carried) == len(messages):
            context = None
            if len(messages) == 1 and not trace.get_current_span().get_span_context().is_valid:
                context = _context_of(messages[0])  # a kept message: its send belongs to the trace that has kept it
            span = self._start(operation, SpanKind.CLIENT, _links(messages), context)
        else:
            span = self._start(operation, SpanKind.PRODUCER, _links(messages), None)
            if _has_room(messages, operation.is_batch):
                context = trace.set_span_in_context(span)
                for message in messages:
                    if not carried or _carried(message) is None:
                        propagate.inject(message.properties, context, _SETTER)

        def ended(result: Any, error: BaseException | None) -> None:  # noqa: ANN401 (the result of a send)
            if result is not None and span.is_recording():
                span.set_attribute("messaging.destination.partition.id", str(result.queue.queue_id))
                _set_server(span, operation, result.queue.broker_name)
            self._end(operation, span, error)

        return ended

    def _begin_receive(self, operation: Operation) -> Ended:
        start_ns = operation.client.runner.now_ms() * 1_000_000

        def ended(result: Any, error: BaseException | None) -> None:  # noqa: ANN401 (the messages)
            if not result and (error is None or not isinstance(error, Exception)):
                return
            messages: Sequence[StoredMessage] = result or ()
            topics = {message.topic for message in messages}
            operated = operation._replace(
                topic=topics.pop() if len(topics) == 1 else operation.topic, messages=messages
            )
            span = self._start(operated, SpanKind.CLIENT, _links(messages), None, start_ns)
            if messages and isinstance(messages[0], DeliveredMessage):
                _set_server(span, operation, messages[0].broker_name)
            self._end(operation, span, error)

        return ended

    def _begin_process(self, operation: Operation) -> Ended:
        messages, links = operation.messages, _links(operation.messages)
        # The span that is current in the thread which takes the turn did not cause this delivery.
        within, parent = Context(), Context()
        if len(messages) == 1:
            within = _context_of(messages[0])
            parent = within if self._parents else parent
        span = self._start(operation, SpanKind.CONSUMER, links, parent)
        if span.is_recording() and operation.queue is not None:
            _set_server(span, operation, operation.queue.broker_name)
        attach(trace.set_span_in_context(span, within))  # ends with the context of the listener's call

        def ended(result: object, error: BaseException | None) -> None:
            assert operation.outcome is not None
            consumed, error = operation.outcome(result, error)
            if consumed < len(messages) and span.is_recording():
                last = operation.max_times
                dead = last is not None and any(
                    isinstance(message, StoredMessage) and message.reconsume_times >= last
                    for message in messages[consumed:]
                )
                span.set_attribute("librmq.outcome", "dead_letter" if dead else "retry")
                if error is None:
                    span.set_attribute("error.type", "not_acknowledged")
                    span.set_status(StatusCode.ERROR, "the listener did not acknowledge the message")
            self._end(operation, span, error)

        return ended

    # ---- begin and end

    def _start(
        self,
        operation: Operation,
        kind: SpanKind,
        links: Sequence[Link],
        context: Context | None,
        start_ns: int | None = None,
    ) -> Span:
        assert self._tracer is not None
        name = "send" if operation.kind == "reply" else operation.kind
        messages = operation.messages
        namespace, topic = _without_namespace(operation.topic)
        attributes: dict[str, Any] = {
            "messaging.system": "rocketmq",
            "messaging.operation.name": name,
            "messaging.client.id": operation.client.client_id,
            "messaging.rocketmq.namespace": namespace,
        }
        if (operation_type := _TYPES[operation.kind]) is not None:
            attributes["messaging.operation.type"] = operation_type
        if topic is not None:
            attributes["messaging.destination.name"] = topic
        if operation.kind in ("receive", "process", "ack", "dead_letter"):
            attributes["messaging.consumer.group.name"] = operation.group
        if operation.model is not None:
            attributes["messaging.rocketmq.consumption_model"] = operation.model
        queue_ids = {None if operation.queue is None else operation.queue.queue_id}
        if operation.kind in ("receive", "ack", "dead_letter"):
            queue_ids = {message.queue_id for message in messages if isinstance(message, StoredMessage)}
        if len(queue_ids) == 1 and (queue_id := queue_ids.pop()) is not None:
            attributes["messaging.destination.partition.id"] = str(queue_id)
        if operation.is_batch and messages:
            attributes["messaging.batch.message_count"] = len(messages)
        if len(messages) == 1:
            attributes |= _message_attributes(messages[0], operation.client.runner.now_ms())
        if start_ns is None:
            start_ns = _time_ns(operation)
        return self._tracer.start_span(
            f"{name} {topic}" if topic else name,
            context,
            kind,
            attributes,
            links,
            start_ns,
        )

    def _end(self, operation: Operation, span: Span, error: BaseException | None) -> None:
        end_ns = _time_ns(operation)
        if error is not None and span.is_recording():
            span.set_attribute("error.type", _error_type(error))
            span.set_status(StatusCode.ERROR, str(error))
            span.record_exception(error, timestamp=end_ns)
        span.end(end_ns)


def _time_ns(operation: Operation) -> int | None:
    """Return the time of a clock that a test moves; None for the machine's, which a span reads more precisely."""
    runner = operation.client.runner
    return None if moves_by_itself(runner.clock) else runner.now_ms() * 1_000_000
