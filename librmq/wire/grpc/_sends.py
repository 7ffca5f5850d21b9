"""Routes of topics, and the calls of producers: send, recall, end a transaction.

Mirrors ``RouteActivity``, ``SendMessageActivity``, ``RecallMessageActivity`` and ``EndTransactionActivity`` of 5.3.3's
proxy.
"""

from __future__ import annotations

import ipaddress
from typing import Any, Final

from librmq.broker import Broker
from librmq.clock import SystemClock, moves_by_itself
from librmq.errors import MalformedError, RmqError
from librmq.message import Message
from librmq.message.ids import RecallHandle
from librmq.message.properties import PropertyName
from librmq.protocol import (
    PERM_READ,
    PERM_WRITE,
    CancelMessage,
    CreateTopic,
    EndTransaction,
    QueueData,
    SendMessage,
    TransactionState,
)
from librmq.wire.grpc._messages import (
    MAX_DELAY_MS,
    MessageType,
    check_group,
    check_retry_topic,
    check_topic,
    group_queue,
    message_of,
    message_type_of,
    milliseconds,
)
from librmq.wire.grpc._protocol import (
    SEND_CODES,
    Code,
    Context,
    Endpoints,
    Refusal,
    answers,
    client_id_of,
    refuse,
    sum_up,
)
from librmq.wire.grpc._sessions import Sessions

# ---- routes and assignments

_PERMISSIONS: Final = {0: 1, PERM_READ: 2, PERM_WRITE: 3, PERM_READ | PERM_WRITE: 4}


class Routes:
    """The routes of one broker. Thread-safe."""

    def __init__(self, broker: Broker, advertise: str | None, auto_create: bool) -> None:
        self._broker = broker
        self._advertise = advertise
        self._auto_create = auto_create

    @answers("QueryRouteResponse")
    def query_route(self, request: Any, context: Context, response: Any) -> None:
        """Return the queues of a topic, at the address that the client has connected to."""
        client_id_of(context)
        topic = check_topic(request.topic.name)
        data = self.ensure_topic(topic)
        accepted = MessageType.of_topic(data.message_type)
        for queue_id in range(max(data.read_queues, data.write_queues)):
            permission = data.permission & ~(PERM_READ if queue_id >= data.read_queues else 0)
            permission &= ~(PERM_WRITE if queue_id >= data.write_queues else 0)
            queue = response.message_queues.add()
            self._fill(queue, request, queue_id, permission & (PERM_READ | PERM_WRITE))
            queue.accept_message_types.extend(accepted)

    def _fill(self, queue: Any, request: Any, queue_id: int, permission: int) -> None:
        queue.topic.name = request.topic.name
        queue.id = queue_id
        queue.permission = _PERMISSIONS[permission]
        queue.broker.name = self._broker.name
        queue.broker.endpoints.CopyFrom(request.endpoints)
        if self._advertise is not None:
            host, _, port = self._advertise.rpartition(":")
            endpoints = queue.broker.endpoints
            del endpoints.addresses[:]
            endpoints.addresses.add(host=host.strip("[]"), port=int(port))
            endpoints.scheme = _scheme(host.strip("[]"))

    def ensure_topic(self, topic: str) -> QueueData:
        """Return a topic's queues, creating the topic if necessary: official clients ask for it before they send."""
        route = self._broker.topic_route(topic)
        if route:
            return route[0]
        if not self._auto_create:
            raise Refusal(
                Code.TOPIC_NOT_FOUND, f"topic {topic!r} does not exist: create it first, because auto_create is off"
            )
        queues = self._broker.config.default_topic_queues
        self._broker.call(CreateTopic(topic, queues, queues, unless_exists=True))
        return self._broker.topic_route(topic)[0]

    @answers("QueryAssignmentResponse")
    def query_assignment(self, request: Any, context: Context, response: Any) -> None:
        """Return a push consumer's assignments: any queue, or for ordered groups each queue."""
        client_id_of(context)
        group, topic = check_group(request.group.name), check_topic(request.topic.name)
        check_retry_topic(self._broker, group, topic)
        data = self.ensure_topic(topic)
        if not data.permission & PERM_READ or not data.read_queues:
            raise Refusal(Code.FORBIDDEN, f"topic {topic!r} has no readable queue")
        ids = range(data.read_queues) if self._broker.is_ordered(group) else [-1]
        for queue_id in ids:
            self._fill(response.assignments.add().message_queue, request, queue_id, PERM_READ)


def _scheme(host: str) -> int:
    try:
        return 1 if ipaddress.ip_address(host).version == 4 else 2
    except ValueError:
        return 3


# ---- producers

_HOST: Final = ("127.0.0.1", 0)
_STATES: Final = {0: TransactionState.UNKNOWN, 1: TransactionState.COMMIT, 2: TransactionState.ROLLBACK}
_FROM_CHECK: Final = 2


class SendCalls:
    """The sends of one server's clients. Thread-safe."""

    def __init__(self, broker: Broker, routes: Routes, sessions: Sessions, endpoints: Endpoints) -> None:
        self._broker = broker
        self._runner = broker.runner
        self._routes = routes
        self._sessions = sessions
        self._endpoints = endpoints

    @answers("SendMessageResponse")
    def send_message(self, request: Any, context: Context, response: Any) -> None:
        client_id = client_id_of(context)
        if not request.messages:
            raise Refusal(Code.MESSAGE_CORRUPTED, "expected at least one message")
        now_ms = self._runner.now_ms()
        checked = [(sent, self._checked(sent, now_ms)) for sent in request.messages]
        codes = []
        for sent, message in checked:
            entry = response.entries.add()
            entry.status.code, entry.status.message = Code.OK, "OK"
            try:
                self._store_message(sent, message, client_id, entry)
            except RmqError as error:
                if len(checked) == 1:
                    raise
                entry.Clear()  # earlier messages are stored: each entry says what happened to its message
                refuse(entry.status, error)
            codes.append(Code(entry.status.code))
        sum_up(response.status, codes)

    def _checked(self, sent: Any, now_ms: int) -> Message:
        """Return a sent message in its stored form; refuse one that its topic does not accept."""
        message = message_of(sent, now_ms, self._client_ms(sent, now_ms))
        topic_type = self._routes.ensure_topic(message.topic).message_type
        accepted, kind = MessageType.of_topic(topic_type), message_type_of(message.properties)
        if topic_type != "MIXED" and kind not in accepted:
            raise Refusal(
                Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
                f"topic {message.topic!r} accepts {accepted[0].name} messages only, found one of type {kind.name}",
            )
        return message

    def _client_ms(self, sent: Any, now_ms: int) -> int:
        """Return the time that the client computed a time of delivery by.

        A clock that is moved by hand is not the client's, which has the machine's and names it in each message.
        """
        if moves_by_itself(self._runner.clock):
            return now_ms
        return milliseconds(sent.system_properties.born_timestamp, "born_timestamp") or SystemClock().now_ms()

    def _store_message(self, sent: Any, message: Message, client_id: str, entry: Any) -> None:
        system, topic = sent.system_properties, message.topic
        now_ms = self._runner.now_ms()
        sent_ms = milliseconds(system.born_timestamp, "born_timestamp")
        born_ms = sent_ms if sent_ms and moves_by_itself(self._runner.clock) else now_ms
        queue_id = -1
        if system.HasField("message_group"):
            queue_id = group_queue(system.message_group, max(self._routes.ensure_topic(topic).write_queues, 1))
        answer = self._endpoints(client_id).call(SendMessage(topic, message, queue_id, born_ms, _HOST))
        entry.message_id = entry.transaction_id = system.message_id  # 5.x has both in every receipt
        entry.offset = answer.queue_offset
        if system.message_type == MessageType.TRANSACTION:
            session = self._sessions.by_id.get(client_id)
            self._sessions.sent_half(session, entry.transaction_id, topic, answer.queue_offset, answer.physical_offset)
        elif PropertyName.TIMER_DELIVER_MS in message.properties:
            deliver_ms = int(message.properties[PropertyName.TIMER_DELIVER_MS])
            entry.recall_handle = RecallHandle(topic, self._broker.name, deliver_ms, system.message_id).text()
        entry.status.code = code = SEND_CODES[answer.status]
        entry.status.message = code.name

    @answers("RecallMessageResponse")
    def recall_message(self, request: Any, context: Context, response: Any) -> None:
        """Cancel a message with a delivery time."""
        endpoint = self._endpoints(client_id_of(context))
        topic = check_topic(request.topic.name)
        try:
            named, broker_name, deliver_ms, message_id = RecallHandle.parse(request.recall_handle)
        except MalformedError as error:
            raise Refusal(Code.INTERNAL_SERVER_ERROR, str(error)) from error
        if named != topic or broker_name != self._broker.name:
            raise Refusal(Code.INTERNAL_SERVER_ERROR, f"the recall handle is of topic {named!r} at {broker_name!r}")
        now_ms = self._runner.now_ms()
        if not now_ms < deliver_ms <= now_ms + MAX_DELAY_MS:
            raise Refusal(Code.INTERNAL_SERVER_ERROR, f"message {message_id} is due already")
        result = endpoint.call(CancelMessage(message_id, topic))
        if not result.cancelled:
            raise Refusal(Code.INTERNAL_SERVER_ERROR, f"message {message_id}: {result.why}")
        response.message_id = message_id

    @answers("EndTransactionResponse")
    def end_transaction(self, request: Any, context: Context, response: Any) -> None:
        """Commit or roll back a transaction."""
        endpoint = self._endpoints(client_id_of(context))
        state = _STATES.get(request.resolution, TransactionState.UNKNOWN)
        place = self._sessions.half(request.transaction_id, ends=state is not TransactionState.UNKNOWN)
        group, queue_offset, physical_offset = place
        from_check = request.source == _FROM_CHECK
        ended = EndTransaction(group, state, queue_offset, physical_offset, request.message_id, from_check)
        try:
            endpoint.call(ended)
        except RmqError:
            self._sessions.note_half(request.transaction_id, place)  # the client tries again
            raise
