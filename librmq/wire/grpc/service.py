"""The service over one broker: its clients, and the calls of producers and consumers.

Mirrors the activities of 5.3.3's proxy (``org.apache.rocketmq.proxy.grpc.v2``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from librmq.broker import Broker
from librmq.clock import moves_by_itself
from librmq.errors import RmqError
from librmq.message.message import Message
from librmq.protocol import EndTransaction, SendMessage, TransactionState
from librmq.runtime.event_log import EventLog
from librmq.scheduling.timer_config import DELETE_KEY, DELIVER_MS, delete_key
from librmq.wire.grpc.calls import (
    SEND_CODES,
    CallBounds,
    Code,
    Context,
    Endpoints,
    Refusal,
    answers,
    client_id_of,
    header,
    refuse,
    sum_up,
)
from librmq.wire.grpc.messages import (
    MAX_DELAY_MS,
    MessageType,
    check_topic,
    group_queue,
    message_of,
    message_type_of,
    milliseconds,
    recall_handle,
    recalled,
)
from librmq.wire.grpc.receives import Receives
from librmq.wire.grpc.routes import Routes
from librmq.wire.grpc.sessions import Commands, FormerClient, Sessions

# ---- producers

_HOST: Final = ("127.0.0.1", 0)
_STATES: Final = {0: TransactionState.UNKNOWN, 1: TransactionState.COMMIT, 2: TransactionState.ROLLBACK}
_FROM_CHECK: Final = 2


class Sends:
    """The sends of one server's clients. Thread-safe."""

    def __init__(self, broker: Broker, routes: Routes, sessions: Sessions, endpoints: Endpoints) -> None:
        self._broker = broker
        self._runner = broker.runner
        self._routes = routes
        self._sessions = sessions
        self._endpoints = endpoints

    @answers("SendMessageResponse")
    def send_message(self, request: Any, context: Context, response: Any) -> None:  # noqa: ANN401
        """Store messages."""
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
                self._send(sent, message, client_id, entry)
            except RmqError as error:
                if len(checked) == 1:
                    raise
                entry.Clear()  # earlier messages are stored: each entry says what happened to its message
                refuse(entry.status, error)
            codes.append(Code(entry.status.code))
        sum_up(response.status, codes)

    def _checked(self, sent: Any, now_ms: int) -> Message:  # noqa: ANN401
        """Return a sent message in its stored form; refuse one that its topic does not accept."""
        message = message_of(sent, now_ms)
        accepted = MessageType.of_topic(self._routes.ensure(message.topic).message_type)
        kind = message_type_of(message.properties)
        if kind not in accepted:
            raise Refusal(
                Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
                f"topic {message.topic!r} accepts {accepted[0].name} messages only, found one of type {kind.name}",
            )
        return message

    def _send(self, sent: Any, message: Message, client_id: str, entry: Any) -> None:  # noqa: ANN401
        system, topic = sent.system_properties, message.topic
        now_ms = self._runner.now_ms()
        sent_ms = milliseconds(system.born_timestamp, "born_timestamp")
        born_ms = sent_ms if sent_ms and moves_by_itself(self._runner.clock) else now_ms
        queue_id = -1
        if system.HasField("message_group"):
            queue_id = group_queue(system.message_group, max(self._routes.ensure(topic).write_queues, 1))
        answer = self._endpoints(client_id).call(SendMessage(topic, message, queue_id, born_ms, _HOST))
        entry.message_id = system.message_id
        entry.offset = answer.queue_offset
        if system.message_type == MessageType.TRANSACTION:
            entry.transaction_id = system.message_id
            session = self._sessions.get(client_id)
            self._sessions.sent_half(session, entry.transaction_id, topic, answer.queue_offset, answer.physical_offset)
        elif DELIVER_MS in message.properties:
            deliver_ms = int(message.properties[DELIVER_MS])
            entry.recall_handle = recall_handle(topic, self._broker.name, deliver_ms, system.message_id)
        entry.status.code = code = SEND_CODES[answer.status]
        entry.status.message = code.name

    @answers("RecallMessageResponse")
    def recall_message(self, request: Any, context: Context, response: Any) -> None:  # noqa: ANN401
        """Cancel a message with a delivery time."""
        endpoint = self._endpoints(client_id_of(context))
        topic = check_topic(request.topic.name)
        named, broker_name, deliver_ms, message_id = recalled(request.recall_handle)
        if named != topic or broker_name != self._broker.name:
            raise Refusal(Code.INTERNAL_SERVER_ERROR, f"the recall handle is of topic {named!r} at {broker_name!r}")
        now_ms = self._runner.now_ms()
        if not now_ms < deliver_ms <= now_ms + MAX_DELAY_MS:
            raise Refusal(Code.INTERNAL_SERVER_ERROR, f"message {message_id} is due already")
        message = Message(topic, b"0")
        message.properties[DELIVER_MS] = str(deliver_ms)
        message.properties[DELETE_KEY] = delete_key(topic, message_id)
        endpoint.call(SendMessage(topic, message, 0, now_ms, _HOST))
        response.message_id = message_id

    @answers("EndTransactionResponse")
    def end_transaction(self, request: Any, context: Context, response: Any) -> None:  # noqa: ANN401
        """Commit or roll back a transaction."""
        endpoint = self._endpoints(client_id_of(context))
        place = group, queue_offset, physical_offset = self._sessions.half(request.transaction_id)
        state = _STATES.get(request.resolution, TransactionState.UNKNOWN)
        from_check = request.source == _FROM_CHECK
        ended = EndTransaction(group, state, queue_offset, physical_offset, request.message_id, from_check)
        try:
            endpoint.call(ended)
        except RmqError:
            self._sessions.note_half(request.transaction_id, place)  # the client tries again
            raise


_log = EventLog("librmq.wire")

_SETTINGS_S: Final = 10.0


class Service:
    """The service over one broker. Thread-safe."""

    def __init__(
        self,
        broker: Broker,
        *,
        advertise: str | None,
        auto_create: bool,
        changed: Callable[[str, str, bool], None],
        endpoints: Endpoints | None = None,
        former: Mapping[str, FormerClient] | None = None,
    ) -> None:
        former = former or {}
        endpoints = endpoints or (lambda _: broker)
        self._silent = CallBounds("streams without settings", of_connection=64, of_address=96, in_all=128)
        self.sessions = Sessions(broker, changed, endpoints, former)
        self.routes = Routes(broker, advertise, auto_create)
        self.sends = Sends(broker, self.routes, self.sessions, endpoints)
        self.receives = Receives(broker, self.routes, self.sessions, endpoints, former)

    def is_settled(self) -> bool:
        """Return whether no client has anything to answer: push consumers wait, and no question is open."""
        return not self.missing() and not self.sessions.has_open_question() and self.receives.is_settled()

    def clients(self) -> dict[str, FormerClient]:
        """Return the clients, as the next server takes them over."""
        return {
            client_id: client._replace(places=self.receives.polls.places(client_id)) if client.is_push else client
            for client_id, client in self.sessions.clients().items()
        }

    def missing(self) -> list[str]:
        """Return the clients of the server before that are not back."""
        return list(dict.fromkeys([*self.sessions.silent(), *self.receives.polls.missing()]))

    def close(self) -> None:
        """End all streams and renewals."""
        self.sessions.close()
        self.receives.close()

    def telemetry(self, requests: Iterator[Any], context: Context) -> Iterator[Any]:
        """Serve a client's stream, in which it sends its settings, and is asked about its transactions."""
        client_id = client_id_of(context)
        stream = Commands()
        words = requests, client_id, header(context, "x-mq-client-version"), stream
        with self._silent.hold(context.peer()):
            reader = threading.Thread(target=self._read, args=words, name=f"librmq telemetry {client_id}", daemon=True)
            reader.start()  # it notices the end of the stream too
            if not stream.wait_for_first(_SETTINGS_S):
                raise ValueError(f"expected settings as the first command of a client, found none in {_SETTINGS_S:g} s")
        yield from stream

    def _accept(self, client_id: str, command: Any, version: str, stream: Commands) -> None:  # noqa: ANN401
        if command.WhichOneof("command") != "settings":
            raise ValueError("expected settings as the first command of a client")
        self.sessions.take_settings(client_id, command.settings, version, stream)
        command.status.code = Code.OK
        command.status.message = "OK"
        stream.put(command)
        session = self.sessions.get(client_id)
        if session is not None and session.is_for_node:
            stream.put_again(command)

    def _read(self, requests: Iterator[Any], client_id: str, version: str, stream: Commands) -> None:
        """Read a client's commands until its stream ends; the end of its last stream removes the client."""
        is_first = True
        try:
            for command in requests:
                if is_first or command.WhichOneof("command") == "settings":
                    self._accept(client_id, command, version, stream)
                is_first = False
        except (ValueError, RmqError) as error:  # the commands make no sense
            stream.end(error)
        except Exception as error:  # the stream was cut
            _log.debug("client %(client)s: its stream has ended: %(error)s", client=client_id, error=error)
        finally:
            self._stream_ended(client_id, stream)

    def _stream_ended(self, client_id: str, stream: Commands) -> None:
        try:
            stream.end()
            if self.sessions.stream_ended(client_id, stream):
                self.receives.client_gone(client_id)
        except RmqError as error:  # the broker was closed before
            _log.debug("client %(client)s left: %(error)s", client=client_id, error=error)

    @answers("HeartbeatResponse")
    def heartbeat(self, request: Any, context: Context, response: Any) -> None:  # noqa: ANN401
        """Say that a client lives."""
        if self.sessions.get(client_id_of(context)) is None:
            raise Refusal(Code.UNRECOGNIZED_CLIENT_TYPE, "the client has sent no settings: it opens its stream first")

    @answers("NotifyClientTerminationResponse")
    def notify_client_termination(self, request: Any, context: Context, response: Any) -> None:  # noqa: ANN401
        """Remove a client that ends."""
        client_id = client_id_of(context)
        was_known = self.sessions.leave(client_id, has_said_so=True)
        self.receives.client_gone(client_id)
        if not was_known:
            raise Refusal(Code.UNRECOGNIZED_CLIENT_TYPE, "the client has sent no settings")
