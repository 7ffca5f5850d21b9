"""The calls of the service, each answered by requests to a broker.

Mirrors the activities of 5.3.3's proxy (``org.apache.rocketmq.proxy.grpc.v2``).
"""

from __future__ import annotations

import ipaddress
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

from librmq.broker import Broker
from librmq.clock import SystemClock, moves_by_itself
from librmq.errors import RmqError
from librmq.message.message import Message
from librmq.protocol import (
    MAX_INVISIBLE_MS,
    MAX_RECEIVED,
    PERM_READ,
    PERM_WRITE,
    Acknowledge,
    CancelReceive,
    ChangeInvisible,
    CreateTopic,
    EndTransaction,
    ForwardToDeadLetters,
    Receive,
    Received,
    SendMessage,
    Subscription,
    TransactionState,
)
from librmq.scheduling.timer_config import DELETE_KEY, DELIVER_MS, delete_key
from librmq.wire.grpc.codes import SEND_CODES, Code, Refusal, code_of
from librmq.wire.grpc.messages import (
    MAX_DELAY_MS,
    MessageType,
    check_group,
    check_topic,
    group_queue,
    message_of,
    milliseconds,
    recall_handle,
    recalled,
    to_received,
)
from librmq.wire.grpc.polls import Polls
from librmq.wire.grpc.renewals import FIRST_MS, Renewals
from librmq.wire.grpc.schema import message_class
from librmq.wire.grpc.sessions import LONG_POLL_S, Commands, Session, Sessions

__all__ = ["Context", "Service"]

_log = logging.getLogger("librmq.wire")

_HOST: Final = ("127.0.0.1", 0)
_GIVEN_BACK_MS: Final = 1000
_ANSWER_S: Final = 0.2
"""What is left of a deadline for the answer to travel."""
_PERMISSIONS: Final = {0: 1, PERM_READ: 2, PERM_WRITE: 3, PERM_READ | PERM_WRITE: 4}
_STATES: Final = {0: TransactionState.UNKNOWN, 1: TransactionState.COMMIT, 2: TransactionState.ROLLBACK}
_FROM_CHECK: Final = 2


class Context(Protocol):
    """What the service uses of a gRPC call."""

    def invocation_metadata(self) -> Any:  # noqa: ANN401
        """Return the headers, as pairs."""
        ...

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; None if it has none."""
        ...

    def is_active(self) -> bool:
        """Return whether the client still waits for the answer."""
        ...

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have a function called when the call ends."""
        ...


def _answers(name: str) -> Callable[[Any], Any]:
    """Make a method answer its errors as a status, in the response of that name."""
    made = message_class(name)

    def decorate(method: Any) -> Any:  # noqa: ANN401
        def call(self: Service, request: Any, context: Context) -> Any:  # noqa: ANN401
            response = made()
            response.status.code = Code.OK
            response.status.message = "OK"
            try:
                method(self, request, context, response)
            except RmqError as error:
                _leave_status(response)
                _refuse(response.status, error)
            except Exception as error:
                _log.exception("the call %s failed", name)
                _refuse(response.status, error)
            return response

        return call

    return decorate


def _leave_status(response: Any) -> None:  # noqa: ANN401
    """Leave nothing but a status in a response."""
    for field, _ in response.ListFields():
        if field.name != "status":
            response.ClearField(field.name)


def _refuse(status: Any, error: Exception) -> None:  # noqa: ANN401
    status.code = code_of(error) if isinstance(error, RmqError) else Code.INTERNAL_SERVER_ERROR
    status.message = str(error)


class Service:
    """The service over one broker. Thread-safe."""

    def __init__(
        self,
        broker: Broker,
        *,
        advertise: str | None,
        auto_create: bool,
        changed: Callable[[str, str, bool], None],
    ) -> None:
        self._broker = broker
        self._runner = broker.runner
        self._advertise = advertise
        self._auto_create = auto_create
        self._waiting_clock = SystemClock()  # clients wait by the wall clock, whatever moves the broker's
        self.sessions = Sessions(broker, changed)
        self.renewals = Renewals(broker, broker.runner)
        self.polls = Polls()

    def is_settled(self) -> bool:
        """Return whether no client has anything to answer: push consumers wait, and no question is open."""
        return (
            not len(self.renewals)
            and not self.sessions.has_open_question()
            and self.polls.all_wait(self.sessions.push_consumers())
        )

    def close(self) -> None:
        """End all streams and renewals."""
        self.sessions.close()
        with self._runner.lock:
            self.renewals.close()

    # ---- who calls

    def _client_id(self, context: Context) -> str:
        client_id = _metadata(context, "x-mq-client-id")
        if not client_id:
            raise Refusal(Code.CLIENT_ID_REQUIRED, "the header x-mq-client-id is missing")
        return client_id

    def _session(self, context: Context) -> Session | None:
        return self.sessions.get(self._client_id(context))

    # ---- routes

    @_answers("QueryRouteResponse")
    def query_route(self, request: Any, context: Context, response: Any) -> None:  # noqa: ANN401
        """Return the queues of a topic, at the address that the client has dialled."""
        self._client_id(context)
        topic = check_topic(request.topic.name)
        self._ensure_topic(topic)
        for data in self._broker.topic_route(topic):
            for queue_id in range(max(data.read_queues, data.write_queues)):
                permission = data.permission & ~(PERM_READ if queue_id >= data.read_queues else 0)
                permission &= ~(PERM_WRITE if queue_id >= data.write_queues else 0)
                queue = response.message_queues.add()
                self._fill_queue(queue, request, queue_id, permission & (PERM_READ | PERM_WRITE))

    def _fill_queue(self, queue: Any, request: Any, queue_id: int, permission: int) -> None:  # noqa: ANN401
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
        queue.accept_message_types.extend(MessageType.ALL)

    def _ensure_topic(self, topic: str) -> None:
        """Make a topic that is not there, as official clients ask for its route before they send."""
        if self._broker.topic_route(topic):
            return
        if not self._auto_create:
            raise Refusal(Code.TOPIC_NOT_FOUND, f"topic {topic!r} does not exist, and is not made by asking for it")
        queues = self._broker.config.default_topic_queues
        self._broker.call(CreateTopic(topic, queues, queues))

    @_answers("QueryAssignmentResponse")
    def query_assignment(self, request: Any, context: Context, response: Any) -> None:  # noqa: ANN401
        """Return what a push consumer is to receive from: any queue, or in order each."""
        self._client_id(context)
        group, topic = check_group(request.group.name), check_topic(request.topic.name)
        self._ensure_topic(topic)
        (data,) = self._broker.topic_route(topic)
        if not data.permission & PERM_READ or not data.read_queues:
            raise Refusal(Code.FORBIDDEN, f"topic {topic!r} has no readable queue")
        ids = range(data.read_queues) if self._broker.is_ordered(group) else [-1]
        for queue_id in ids:
            self._fill_queue(response.assignments.add().message_queue, request, queue_id, PERM_READ)

    # ---- clients

    def telemetry(self, requests: Iterator[Any], context: Context) -> Iterator[Any]:
        """Keep a client's stream: it tells its settings, and is asked about its transactions."""
        client_id = self._client_id(context)
        version = _metadata(context, "x-mq-client-version")
        first = next(requests, None)
        if first is None:
            return
        stream = Commands()
        self._told(client_id, first, version, stream)
        reader = threading.Thread(
            target=self._read,
            args=(requests, client_id, version, stream),
            name=f"librmq telemetry {client_id}",
            daemon=True,
        )
        try:
            reader.start()  # before the first answer: the stream may be cut there, and the reader notices its end
        except RuntimeError:  # no thread is free
            self._stream_ended(client_id, stream)
            raise
        yield from stream

    def _told(self, client_id: str, command: Any, version: str, stream: Commands) -> None:  # noqa: ANN401
        if command.WhichOneof("command") != "settings":
            raise ValueError("the first command of a client is expected to be its settings")
        self.sessions.take_settings(client_id, command.settings, version, stream)
        command.status.code = Code.OK
        command.status.message = "OK"
        stream.put(command)

    def _read(self, requests: Iterator[Any], client_id: str, version: str, stream: Commands) -> None:
        """Take what a client tells, until its stream ends; with its last stream it is gone."""
        try:
            for command in requests:
                if command.WhichOneof("command") == "settings":
                    self._told(client_id, command, version, stream)
        except Exception as error:  # the stream was cut, or the client tells nonsense
            _log.debug("client %s: its stream has ended: %s", client_id, error)
        finally:
            self._stream_ended(client_id, stream)

    def _stream_ended(self, client_id: str, stream: Commands) -> None:
        try:
            if self.sessions.stream_ended(client_id, stream):
                self._gone(client_id)
        except RmqError as error:  # the broker was closed before
            _log.debug("client %s left: %s", client_id, error)

    def _gone(self, client_id: str) -> None:
        """Let what a client had come again; its session has ended, so that it gets no more to renew."""
        self.polls.forget(client_id)
        with self._runner.lock:
            self.renewals.client_gone(client_id)

    @_answers("HeartbeatResponse")
    def heartbeat(self, request: Any, context: Context, response: Any) -> None:  # noqa: ANN401
        """Say that a client lives."""
        if self._session(context) is None:
            raise Refusal(Code.UNRECOGNIZED_CLIENT_TYPE, "the client has told no settings: it opens its stream first")

    @_answers("NotifyClientTerminationResponse")
    def notify_client_termination(self, request: Any, context: Context, response: Any) -> None:  # noqa: ANN401
        """Take a client's good-bye."""
        client_id = self._client_id(context)
        if not self.sessions.leave(client_id):
            raise Refusal(Code.UNRECOGNIZED_CLIENT_TYPE, "the client has told no settings")
        self._gone(client_id)

    # ---- sending

    @_answers("SendMessageResponse")
    def send_message(self, request: Any, context: Context, response: Any) -> None:  # noqa: ANN401
        """Store messages."""
        session = self._session(context)
        if not request.messages:
            raise Refusal(Code.MESSAGE_CORRUPTED, "expected at least one message")
        now_ms = self._runner.now_ms()
        made = [(sent, message_of(sent, now_ms)) for sent in request.messages]
        codes = []
        for sent, message in made:
            entry = response.entries.add()
            code = self._send(sent, message, session, entry)
            entry.status.code = code
            entry.status.message = code.name
            codes.append(code)
        _sum_up(response.status, codes)

    def _send(self, sent: Any, message: Message, session: Session | None, entry: Any) -> Code:  # noqa: ANN401
        system, topic = sent.system_properties, message.topic
        self._ensure_topic(topic)
        now_ms = self._runner.now_ms()
        told_ms = milliseconds(system.born_timestamp, "born_timestamp")
        born_ms = told_ms if told_ms and moves_by_itself(self._runner.clock) else now_ms
        queue_id = -1
        if system.HasField("message_group"):
            (data,) = self._broker.topic_route(topic)
            queue_id = group_queue(system.message_group, max(data.write_queues, 1))
        answer = self._broker.call(SendMessage(topic, message, queue_id, born_ms, _HOST))
        entry.message_id = system.message_id
        entry.offset = answer.queue_offset
        if system.message_type == MessageType.TRANSACTION:
            entry.transaction_id = system.message_id
            self.sessions.sent_half(session, entry.transaction_id, topic, answer.queue_offset, answer.physical_offset)
        elif DELIVER_MS in message.properties:
            deliver_ms = int(message.properties[DELIVER_MS])
            entry.recall_handle = recall_handle(topic, self._broker.name, deliver_ms, system.message_id)
        return SEND_CODES[answer.status]

    @_answers("RecallMessageResponse")
    def recall_message(self, request: Any, context: Context, response: Any) -> None:  # noqa: ANN401
        """Cancel a timed message."""
        self._client_id(context)
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
        self._broker.call(SendMessage(topic, message, 0, now_ms, _HOST))
        response.message_id = message_id

    @_answers("EndTransactionResponse")
    def end_transaction(self, request: Any, context: Context, response: Any) -> None:  # noqa: ANN401
        """Commit a transaction, or roll it back."""
        self._client_id(context)
        place = group, queue_offset, physical_offset = self.sessions.half(request.transaction_id)
        state = _STATES.get(request.resolution, TransactionState.UNKNOWN)
        from_check = request.source == _FROM_CHECK
        ended = EndTransaction(group, state, queue_offset, physical_offset, request.message_id, from_check)
        try:
            self._broker.call(ended)
        except RmqError:
            self.sessions.note_half(request.transaction_id, place)  # the client tries again
            raise

    # ---- receiving

    def receive_message(self, request: Any, context: Context) -> Iterator[Any]:  # noqa: ANN401
        """Hand out messages, or wait for some: first the status, then the messages, last the time."""
        made = message_class("ReceiveMessageResponse")
        found: list[tuple[Received, Any]] = []
        status = made()
        status.status.code, status.status.message = Code.OK, "OK"
        try:
            found = self._receive(request, context)
            if not found:
                status.status.code, status.status.message = Code.MESSAGE_NOT_FOUND, "no new message"
        except RmqError as error:
            _refuse(status.status, error)
        except Exception as error:
            _log.exception("a receive failed")
            _refuse(status.status, error)
        sent = 0
        try:
            yield status
            for _, message in found:
                yield made(message=message)
                sent += 1
        except GeneratorExit:  # the client is gone
            self._give_back(request, [received for received, _ in found[sent:]])
            raise
        last = made()
        last.delivery_timestamp.FromMilliseconds(self._runner.now_ms())
        yield last

    def _give_back(self, request: Any, messages: list[Received]) -> None:  # noqa: ANN401
        """Let messages that did not reach their client come again in a second, as 5.3.3 does."""
        group, topic = request.group.name, request.message_queue.topic.name
        self._end_renewals(group, topic, tuple(one.receipt for one in messages))
        for one in messages:
            try:
                self._broker.call(ChangeInvisible(group, topic, one.receipt, _GIVEN_BACK_MS))
            except RmqError as error:  # its time is over, or the broker was closed
                _log.debug("group %s: a message of topic %s was not given back: %s", group, topic, error)

    def _receive(self, request: Any, context: Context) -> list[tuple[Received, Any]]:  # noqa: ANN401
        client_id = self._client_id(context)
        group, topic = check_group(request.group.name), check_topic(request.message_queue.topic.name)
        self._ensure_topic(topic)
        expression = request.filter_expression
        kind = "SQL92" if expression.type == 2 else "TAG"
        asked_ms = milliseconds(request.invisible_duration, "invisible_duration", Code.ILLEGAL_INVISIBLE_TIME)
        invisible_ms = FIRST_MS if request.auto_renew else asked_ms
        if not 0 < invisible_ms <= MAX_INVISIBLE_MS:
            raise Refusal(
                Code.ILLEGAL_INVISIBLE_TIME,
                f"invisible_duration: expected more than 0 and at most 12 h, found {invisible_ms} ms",
            )
        arrived = threading.Event()
        context.add_callback(arrived.set)
        queues = max((data.read_queues for data in self._broker.topic_route(topic)), default=0)
        queue_id = request.message_queue.id if 0 <= request.message_queue.id < queues else -1
        poll = self.polls.begin(client_id, (topic, queue_id), is_push=self.sessions.get(client_id) is not None)

        def notify() -> None:
            poll.wake()
            arrived.set()

        asked = Receive(
            client_id,
            group,
            topic,
            max(1, min(request.batch_size or 1, MAX_RECEIVED)),
            invisible_ms,
            Subscription(topic, expression.expression or "*", kind),
            request.attempt_id,
            notify=notify,
        )
        clock = self._waiting_clock
        deadline = clock.monotonic() + self._poll_time(request, context)
        try:
            while True:
                arrived.clear()
                if not context.is_active():  # after `clear`, which can erase the signal of the end
                    break
                messages = self._broker.call(asked).messages
                if messages:
                    return self._handed_out(request, context, client_id, messages, invisible_ms)
                if not arrived.is_set():
                    poll.hold()
                remaining = deadline - clock.monotonic()
                if remaining <= 0 or not clock.wait(arrived, remaining):
                    break
                poll.wake()
            return []
        finally:
            poll.end()
            self._broker.call(CancelReceive(notify))

    def _handed_out(
        self,
        request: Any,  # noqa: ANN401
        context: Context,
        client_id: str,
        messages: Sequence[Received],
        invisible_ms: int,
    ) -> list[tuple[Received, Any]]:
        """Return received messages in the form for their client, and renew them while it lives."""
        group, topic = request.group.name, request.message_queue.topic.name
        if not context.is_active():
            self._give_back(request, list(messages))
            return []
        made = []
        for one in messages:
            try:
                made.append((one, to_received(one, invisible_ms)))
            except (RmqError, ValueError) as error:  # it becomes a dead letter in its time, and the others are read
                _log.warning("group %s: a message of topic %s can't be sent to its client: %s", group, topic, error)
        if request.auto_renew:
            with self._runner.lock:
                if self.sessions.get(client_id) is not None:  # else no later end of it would end the renewals
                    for one, _ in made:
                        self.renewals.add(client_id, group, topic, one.receipt, one.visible_timestamp_ms)
        return made

    @staticmethod
    def _poll_time(request: Any, context: Context) -> float:  # noqa: ANN401
        """Return how long a receive waits, in seconds: the client's deadline leaves time for the answer."""
        asked = milliseconds(request.long_polling_timeout, "long_polling_timeout", Code.ILLEGAL_POLLING_TIME) / 1000
        remaining = context.time_remaining()
        seconds = min(asked or LONG_POLL_S, LONG_POLL_S)
        return seconds if remaining is None else max(0.0, min(seconds, remaining - _ANSWER_S))

    @_answers("AckMessageResponse")
    def ack_message(self, request: Any, context: Context, response: Any) -> None:  # noqa: ANN401
        """Note that messages are done with."""
        self._client_id(context)
        group, topic = check_group(request.group.name), check_topic(request.topic.name)
        receipts = tuple(entry.receipt_handle for entry in request.entries)
        codes = []
        answers: tuple[bool, ...] = self._broker.call(Acknowledge(group, topic, receipts))
        for entry, is_good in zip(request.entries, answers, strict=True):
            code = Code.OK if is_good else Code.INVALID_RECEIPT_HANDLE
            codes.append(code)
            result = response.entries.add(message_id=entry.message_id, receipt_handle=entry.receipt_handle)
            result.status.code = code
            result.status.message = "OK" if is_good else "the receipt is no longer good: the message has come again"
        self._end_renewals(group, topic, receipts)
        _sum_up(response.status, codes)

    @_answers("ChangeInvisibleDurationResponse")
    def change_invisible_duration(self, request: Any, context: Context, response: Any) -> None:  # noqa: ANN401
        """Move the time at which a message comes again."""
        self._client_id(context)
        group, topic = check_group(request.group.name), check_topic(request.topic.name)
        invisible_ms = milliseconds(request.invisible_duration, "invisible_duration", Code.ILLEGAL_INVISIBLE_TIME)
        if not 0 <= invisible_ms <= MAX_INVISIBLE_MS:
            raise Refusal(
                Code.ILLEGAL_INVISIBLE_TIME, f"invisible_duration: expected 0 to 12 h, found {invisible_ms} ms"
            )
        changed = ChangeInvisible(group, topic, request.receipt_handle, invisible_ms)
        response.receipt_handle = self._broker.call(changed)
        self._end_renewals(group, topic, (request.receipt_handle,))

    @_answers("ForwardMessageToDeadLetterQueueResponse")
    def forward_to_dead_letters(self, request: Any, context: Context, response: Any) -> None:  # noqa: ANN401
        """Make a message a dead letter."""
        self._client_id(context)
        group, topic = check_group(request.group.name), check_topic(request.topic.name)
        self._broker.call(ForwardToDeadLetters(group, topic, request.receipt_handle))
        self._end_renewals(group, topic, (request.receipt_handle,))

    def _end_renewals(self, group: str, topic: str, receipts: tuple[str, ...]) -> None:
        with self._runner.lock:
            for receipt in receipts:
                self.renewals.remove(group, topic, receipt)


def _metadata(context: Context, name: str) -> str:
    return next((str(value) for key, value in context.invocation_metadata() or () if key == name), "")


def _sum_up(status: Any, codes: list[Code]) -> None:  # noqa: ANN401
    """Set the status of a response to that of its entries."""
    code = codes[0] if len(set(codes)) == 1 else Code.MULTIPLE_RESULTS
    status.code, status.message = code, code.name


def _scheme(host: str) -> int:
    try:
        return 1 if ipaddress.ip_address(host).version == 4 else 2
    except ValueError:
        return 3
