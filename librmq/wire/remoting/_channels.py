"""Clients on the server's side: their connections, the calls that these bring, and requests to the clients.

Mirrors the server's half of ``NettyRemotingAbstract``, ``ClientHousekeepingService`` and ``Broker2Client``.
"""

from __future__ import annotations

import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar, cast

from librmq.broker import Broker
from librmq.errors import BrokerUnreachableError, MalformedError, RmqError
from librmq.java.lang import java_int
from librmq.message import record
from librmq.message.ids import Host, format_host
from librmq.message.properties import PropertyName, encode_properties
from librmq.protocol import (
    ChannelClosed,
    CheckTransaction,
    ClientRemoved,
    ConsumerOffsets,
    ConsumersChanged,
    DescribeInstance,
    Endpoint,
    Heartbeat,
    InstanceState,
    ReplyArrived,
    Request,
    ResetGroup,
    ResetOffsets,
    ResponseCode,
    SendMessage,
    Unregister,
)
from librmq.runtime import calls_later
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.wire.remoting._bodies import heartbeat_of, queue_key, write_body
from librmq.wire.remoting._frames import (
    Frame,
    FrameSocket,
    answer_to,
    encode,
    to_fields,
)
from librmq.wire.remoting._headers import (
    ERROR_FIELD,
    REQUESTS,
    CheckTransactionHeader,
    RequestCode,
    RequestForm,
)
from librmq.wire.remoting._request_codec import (
    FORMS,
    Form,
    code_of_error,
    frame_of,
    name_of_error,
    pushed_reply,
    send_header,
)
from librmq.wire.remoting._running_info import read_running_info, running_info_frame

_log = EventLog("librmq.wire")
_MOST_TASKS: Final = 10_000
_MOST_ASKED: Final = 1_000


class Channel:
    """One connection. Thread-safe."""

    def __init__(
        self, connected: socket.socket, peer: Host, own_host: Host, endpoint: Endpoint, advertise: str | None = None
    ) -> None:
        """Serve a client.

        Args:
            connected: The connection.
            peer: The client's address.
            own_host: The address that the client has connected to.
            endpoint: Answers what the client asks the broker.
            advertise: The broker's ``host:port`` for the client, if it is not ``own_host``.
        """
        self.stream: FrameSocket = FrameSocket(connected)
        """The socket. One thread alone reads from it, and what it sends goes through `write`."""
        self.peer = peer
        # Whether it is a socket of a shared store.
        self.is_local = connected.family not in (socket.AF_INET, socket.AF_INET6)
        self.own = own_host
        self.broker_address = advertise or format_host(own_host)
        self.endpoint = endpoint
        self.client_ids: set[str] = set()
        """The client ids in its heartbeats, usually one."""
        self.reader: threading.Thread | None = None
        self.is_open = True
        self.is_tls = False
        self._lock = Lock()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._asked: dict[int, Future[Frame]] = {}
        self._opaque = 0

    @property
    def client_id(self) -> str | None:
        """The client id of its heartbeats; None before the first one."""
        return next(iter(self.client_ids), None)

    def begin_tls(self, context: ssl.SSLContext) -> None:
        self.is_tls = True
        self.stream.begin_tls(context)

    def write(self, data: bytes | bytearray) -> None:
        """Send bytes; a client that does not read them in time is cut off. Waits: never under a runner's lock."""
        try:
            self.stream.write(data)
        except OSError:
            self.close()

    def run_later(self, task: Callable[[], None]) -> None:
        """Run a task in the connection's own thread, in order, without waiting. A client with too many is cut off."""
        with self._lock:
            if not self.is_open:
                return
            is_started = self._worker is not None or self._start_worker()
        if not is_started or self._tasks.qsize() >= _MOST_TASKS:
            self.close()
        else:
            self._tasks.put(task)

    def _start_worker(self) -> bool:
        """Start the connection's own thread; return False if no thread is free."""
        worker = threading.Thread(target=self._work, name=f"librmq {self.peer[0]}", daemon=True)
        try:
            worker.start()
        except RuntimeError as error:
            _log.error("client %(client)s is cut off: %(error)s", client=self.peer[0], error=error)
            return False
        self._worker = worker
        return True

    def send_one_way(self, frame: Frame) -> None:
        """Send a request without an answer, without waiting."""
        with self._lock:
            self._numbered(frame.one_way())
        self.run_later(lambda: self.write(encode(frame)))

    def request(self, frame: Frame, timeout_s: float) -> Frame:
        """Send a request and wait for its answer.

        Raises:
            BrokerUnreachableError: No answer came in time, or the connection has ended.
        """
        waiting: Future[Frame] = Future()
        with self._lock:
            if not self.is_open or len(self._asked) >= _MOST_ASKED:
                raise BrokerUnreachableError(f"client {self.client_id or self.peer[0]} can't be asked")
            self._numbered(frame)
            self._asked[frame.opaque] = waiting
        try:
            self.write(encode(frame))
            return waiting.result(timeout_s)
        except TimeoutError:
            client = self.client_id or self.peer[0]
            raise BrokerUnreachableError(f"client {client} did not answer within {timeout_s:g} s") from None
        finally:
            with self._lock:
                self._asked.pop(frame.opaque, None)

    def accept_answer(self, answer: Frame) -> None:
        """Accept an answer; ignore one for which no call waits."""
        with self._lock:
            waiting = self._asked.pop(answer.opaque, None)
        if waiting is not None:
            waiting.set_result(answer)

    def close(self) -> None:
        """End the connection; its reader will notice."""
        with self._lock:
            if not self.is_open:
                return
            self.is_open = False
            waiters, self._asked = list(self._asked.values()), {}
        for waiting in waiters:
            waiting.set_exception(BrokerUnreachableError(f"client {self.peer[0]} has gone"))
        self._tasks.put(None)
        self.stream.shut()

    def close_socket(self) -> None:
        """Close the socket once nothing reads from it."""
        self.close()
        self.stream.close()

    def _numbered(self, frame: Frame) -> Frame:
        self._opaque = frame.opaque = (self._opaque + 1) & 0x7FFFFFFF
        frame.language = "JAVA"
        return frame

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:  # later tasks could no longer run in order
                _log.exception("client %(client)s is cut off: %(error)s", client=self.peer[0], error=error)
                self.close()


# ---- calls: their headers and answers

R = TypeVar("R")
T = TypeVar("T")


class RemotingCall(NamedTuple):
    channel: Channel
    frame: Frame
    header: Any
    """Of the class that `REQUESTS` names."""

    def call_broker(self, request: Request[R]) -> R:
        """Ask the broker for this client."""
        return self.channel.endpoint.call(request)

    def await_device(self, broker: Broker, request: Request[R], answer: R) -> R:
        """Return an answer once the broker's device has what it tells; a client on a local socket need not wait."""
        return answer if self.channel.is_local else broker.await_device(request, answer)

    def answer(self, header: object = None, *, body: bytes = b"", code: int = 0, remark: str | None = None) -> bytes:
        fields = {} if header is None else to_fields(header)
        return encode(answer_to(self.frame, code, remark, fields=fields, body=body))

    def answer_fields(self, fields: Mapping[str, str | int], body: bytes = b"") -> bytes:
        """Return the bytes of an answer with these fields."""
        texts = {name: str(value) for name, value in fields.items()}
        return encode(answer_to(self.frame, fields=texts, body=body))

    def write_later(self, answer: bytes) -> None:
        """Write the bytes of an answer that comes after its handler has returned, unless none is expected."""
        if not self.frame.is_one_way:
            self.channel.write(answer)

    def serve(self, form: Form, ask: Callable[[Any], Any] | None = None) -> bytes:
        """Pass the request to the broker, by ``ask`` or for this client; return the bytes of the answer, if any."""
        request = form.parse(self.header, self.frame.body)
        result = (ask or self.call_broker)(request)
        if self.frame.is_one_way:
            return b""
        reply = form.reply(request, result)
        return self.answer(reply.header, body=reply.body, code=reply.code, remark=reply.remark)


Handler = Callable[[RemotingCall], "bytes | None"]
"""Returns the bytes of the answer; None if it comes later."""
Handlers = Mapping[RequestCode, Handler]
Answering = Mapping[int, tuple[Handler, RequestForm]]
"""The handler and the form of each request, by its code."""


def served(ask: Callable[[Any], Any] | None, *kinds: type[Request[Any]]) -> Handlers:
    """Return the handlers of requests that go to the broker as they are, by ``ask`` or for the client."""
    return {FORMS[kind].code: partial(RemotingCall.serve, form=FORMS[kind], ask=ask) for kind in kinds}


def answering(parts: Iterable[Handlers]) -> Answering:
    """Return the handlers of all parts, with the forms of their requests."""
    return {int(code): (handler, REQUESTS[code]) for part in parts for code, handler in part.items()}


def answer_of(handlers: Answering, channel: Channel, frame: Frame) -> bytes | None:
    """Return the bytes of the answer to a request; None if it comes later or if none is expected."""
    try:
        handler, form = handlers[frame.code]
    except KeyError:
        remark = f" request type {frame.code} not supported"
        return encode(answer_to(frame, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark))
    try:
        return handler(RemotingCall(channel, frame, form.read(frame.fields)))
    except Exception as error:
        return refused(channel, frame, error)


def tried(step: Callable[..., T], *arguments: object) -> T | Exception:
    """Return the result of a step, or its error."""
    try:
        return step(*arguments)
    except Exception as error:
        return error


def refused(
    channel: Channel, frame: Frame, error: Exception, header: object = None, *, code: int | None = None
) -> bytes:
    """Return the bytes of the answer to a failed request; ``code`` replaces the code of an error of librmq."""
    if isinstance(error, RmqError):
        fields = {} if header is None else to_fields(header)
        if named := name_of_error(error, in_share=channel.is_local):
            fields[ERROR_FIELD] = named
        return encode(answer_to(frame, code_of_error(error) if code is None else code, str(error), fields=fields))
    _log.error("the request %(code)s failed", code=frame.code, exc_info=error)
    return encode(answer_to(frame, ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}"))


# ---- clients by their heartbeats, and the broker's requests to them

_MOST_IDS: Final = 1_000
"""The client ids of one connection."""


class ClientChannel:
    """One client, according to its last heartbeat, and as the broker's endpoint.

    The broker calls it under the runner's lock, so that it never waits, except for a state within ``timeout_s``.
    """

    def __init__(self, client_id: str, channel: Channel, store_host: str) -> None:
        self.client_id = client_id
        self.channel = channel
        self.language = ""
        self.version = 0
        self.beat_ms = 0
        self._store_host = store_host

    @property
    def address(self) -> str:
        """The client's own address and port."""
        return f"{self.channel.peer[0]}:{self.channel.peer[1]}"

    def call(self, request: Request[R], /) -> R:
        match request:
            case ConsumersChanged():
                self._send_request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, request)
            case CheckTransaction():
                self._check_transaction(request)
            case ResetOffsets(group, topic, offsets):
                table = {queue_key(queue): offset for queue, offset in offsets.items()}
                reset = ResetGroup(group, topic, -1)
                self._send_request(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, reset, write_body({"offsetTable": table}))
            case ReplyArrived(send):
                self._push(send)
            case ConsumerOffsets():
                return cast(R, {})
            case ClientRemoved():
                self.channel.close()  # as in 4.9; the client registers again over a new connection
            case DescribeInstance():
                return cast(R, self._describe(request))
        return cast(R, None)

    def _describe(self, request: DescribeInstance) -> InstanceState:
        if not request.timeout_s:
            raise BrokerUnreachableError("a client of the wire can't be asked without waiting")
        return read_running_info(request, self.channel.request(running_info_frame(request), request.timeout_s))

    def _push(self, send: SendMessage) -> None:
        message, born_ms = send.message, send.born_timestamp_ms
        header = send_header(send, encode_properties(message.properties).decode())
        self.channel.send_one_way(pushed_reply(header, message.body, send.born_host, self._store_host, born_ms))

    def _send_request(self, code: RequestCode, header: object, body: bytes = b"") -> None:
        self.channel.send_one_way(frame_of(code, header, body))

    def _check_transaction(self, request: CheckTransaction) -> None:
        half = request.message
        header = CheckTransactionHeader(
            half.queue_offset,
            half.physical_offset,
            half.unique_key or "",
            request.transaction_id,
            half.offset_id,
        )
        topic = half.properties.get(PropertyName.REAL_TOPIC, half.topic)
        queue_id = java_int(half.properties.get(PropertyName.REAL_QUEUE_ID, "")) or 0
        real = replace(record.decode_record(half.raw), topic=topic, queue_id=queue_id)
        self._send_request(RequestCode.CHECK_TRANSACTION_STATE, header, record.encode_record(real))


class ClientChannels:
    """All clients of one server. Thread-safe."""

    def __init__(self, broker: Broker, changed: Callable[[str, str, bool], None]) -> None:
        """``changed(client_id, group, is_connected)`` is called as clients come and go; a producer's group is empty."""
        self._broker = broker
        self._changed = changed
        self._lock = Lock()
        self.by_id: dict[str, ClientChannel] = {}
        """The clients that have sent a heartbeat and not left."""

    def __len__(self) -> int:
        return len(self.by_id)

    def register_client(self, channel: Channel, frame: Frame) -> None:
        client_id, producers, consumers, checking = heartbeat_of(frame.body)
        if not client_id:
            return
        with calls_later(), self._lock:  # also during the broker's call, so that a connection ends before or after it
            if client_id not in channel.client_ids and len(channel.client_ids) >= _MOST_IDS:
                raise MalformedError(f"a connection with more than {_MOST_IDS} client ids")
            client = self.by_id.get(client_id)
            is_new = client is None
            if client is None or (client.channel is not channel and not client.channel.stream.has_ended):
                client = ClientChannel(client_id, channel, self._broker.store.config.store_host)
            client.channel = channel  # the next one of a client whose former one has ended
            channel.client_ids.add(client_id)
            channel.endpoint.call(Heartbeat(client_id, client, producers, consumers, checking))
            client.language, client.version = frame.language, frame.version
            client.beat_ms = self._broker.runner.now_ms()
            self.by_id[client_id] = client
        if is_new:
            groups = [data.group for data in consumers]
            for group in groups or [""]:
                self._changed(client_id, group, True)

    def remove_client(self, channel: Channel, request: Unregister) -> None:
        """Remove a client from a group, unless it has another connection by now."""
        client = self.by_id.get(request.client_id)
        if client is not None and client.channel is not channel:
            return
        groups = request.producer_group or None, request.consumer_group or None  # a client can send an empty name
        channel.endpoint.call(Unregister(request.client_id, *groups))

    def closed(self, channel: Channel, *, has_ended: bool) -> None:
        """Remove the clients of a connection that has ended, perhaps with its process, unless they have another one."""
        for client_id in list(channel.client_ids):
            with calls_later(), self._lock:
                client = self.by_id.get(client_id)
                if client is None or client.channel is not channel:
                    continue
                del self.by_id[client_id]
                try:
                    channel.endpoint.call(ChannelClosed(client_id, has_ended))
                except RmqError as error:  # the broker was closed earlier
                    _log.debug("client %(client)s left: %(error)s", client=client_id, error=error)
            self._changed(client_id, "", False)
