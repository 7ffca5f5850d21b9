"""Requests of a test's processes as frames of 4.x over a TCP connection, one turn at a time.

The client's half (`RemoteBroker`) and the server's half (`FrameAnswers`) are those of production. Only the threads are
missing: a frame crosses the connection and is answered within the call, and what a server says later is a step.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, TypeVar, cast

from librmq.broker import Broker
from librmq.clock import SystemClock
from librmq.errors import BrokerUnreachableError
from librmq.protocol import (
    Acknowledge,
    ChangeInvisible,
    ChannelClosed,
    ClientRemoved,
    Endpoint,
    EndTransaction,
    ForwardToDeadLetters,
    Heartbeat,
    Receive,
    Received,
    Request,
    SendMessage,
    SendResponse,
)
from librmq.runtime.runner import Runner, Step
from librmq.scheduling.timer_config import DELETE_KEY
from librmq.testing.history import Call, show
from librmq.testing.kit import Kit
from librmq.testing.process import Process
from librmq.wire.remote.connection import Ended, Requested, Transport
from librmq.wire.remote.connection_pool import Connections
from librmq.wire.remote.remote_broker import RemoteBroker
from librmq.wire.remoting.channels import Channel
from librmq.wire.remoting.client_channels import ClientChannels
from librmq.wire.remoting.consuming import Pulling
from librmq.wire.remoting.frames import Frame, FrameReader, encode
from librmq.wire.remoting.runtime_info import Rates
from librmq.wire.remoting.sends import SENDS
from librmq.wire.remoting.server import FrameAnswers

_PIECE: Final = 32 << 10
"""Bytes that fit into the buffers of a connection."""
_TIMEOUT_S: Final = 3.0


class _Peer(Protocol):
    label: str


class _Cable:
    """A TCP connection whose two ends one thread serves."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.client = socket.create_connection(listening.getsockname())
            self.server, _ = listening.accept()
        for end in (self.client, self.server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @staticmethod
    def carry(source: socket.socket, target: socket.socket, raw: bytes | bytearray) -> bytes:
        """Send bytes from one end, and return them as they have come to the other."""
        arrived = bytearray()
        for begin in range(0, len(raw), _PIECE):
            piece = raw[begin : begin + _PIECE]
            source.sendall(piece)
            missing = len(piece)
            while missing:
                received = target.recv(missing)
                if not received:
                    raise BrokerUnreachableError("the test has ended")
                arrived += received
                missing -= len(received)
        return bytes(arrived)

    def close(self) -> None:
        self.client.close()
        self.server.close()


class _Server:
    """The server's half for one broker."""

    def __init__(self, broker: Broker) -> None:
        rates = Rates()
        self.broker = broker
        self.sessions = ClientChannels(broker, lambda *_: None)
        self.pulling = Pulling(broker, rates, ends_holds=False)  # otherwise a test would never be idle
        self.answers = FrameAnswers(broker, self.sessions, self.pulling, rates)


class _TurnChannel(Channel):
    """A channel that works in steps of the runner, and writes to a client in the same thread."""

    def __init__(self, cable: _Cable, runner: Runner, label: str, endpoint: Endpoint) -> None:
        super().__init__(cable.server, ("127.0.0.1", 0), ("127.0.0.1", 0), endpoint)
        self._cable = cable
        self._runner = runner
        self._label = label
        self._pending: list[Callable[[], None]] = []
        self.arrive: Callable[[bytes], None] = lambda raw: None
        self.end: Callable[[], None] = lambda: None

    def write(self, data: bytes | bytearray) -> None:
        if self.is_open:
            self.arrive(self._cable.carry(self._cable.server, self._cable.client, data))

    def run_later(self, task: Callable[[], None]) -> None:
        self._pending.append(task)

        def run(now_ms: int) -> None:
            if task in self._pending:
                self._pending.remove(task)
                if self.is_open:
                    task()

        self._runner.wake(Step(self._label, run))

    def work(self) -> None:
        """Run what would run later, for a client that waits for it."""
        while self._pending and self.is_open:
            self._pending.pop(0)()

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.end()


class _TurnTransport:
    """A `Transport` whose requests are answered within the call."""

    def __init__(
        self,
        cable: _Cable,
        server: _Server,
        channel: _TurnChannel,
        requested: Requested,
        lost: Callable[[Transport], None],
        repeated: Callable[[], str | None],
    ) -> None:
        self._repeated = repeated
        self._is_answered_twice = False
        self._cable = cable
        self._server = server
        self._channel = channel
        self._requested = requested
        self._lost = lost
        self._number = 0
        self._ended: dict[int, Ended] = {}
        self._to_server, self._to_client = FrameReader(), FrameReader()
        self.is_open = True
        channel.arrive, channel.end = self._arrive, self.close

    def request(self, frame: Frame, timeout_s: float) -> Frame:
        outcomes: list[object] = []
        self.send(frame, outcomes.append)
        if not outcomes:
            self._channel.work()
        if not outcomes or not isinstance(outcomes[0], Frame):
            self._ended.pop(frame.opaque, None)
            raise BrokerUnreachableError("no answer came")
        return outcomes[0]

    def send(self, frame: Frame, ended: Ended) -> None:
        self._number = frame.opaque = self._number + 1
        self._ended[frame.opaque] = ended
        what = self._repeated() if frame.code in SENDS else None
        self._is_answered_twice = what == "answer"
        self._send(frame, times=2 if what == "request" else 1)

    def send_one_way(self, frame: Frame) -> None:
        self._number = frame.one_way().opaque = self._number + 1
        self._send(frame, times=2 if self._repeated() == "request" else 1)

    def send_answer(self, frame: Frame) -> None:
        self._send(frame)

    def _send(self, frame: Frame, times: int = 1) -> None:
        if not self.is_open:
            raise BrokerUnreachableError("the connection has ended")
        raw = self._cable.carry(self._cable.client, self._cable.server, encode(frame) * times)
        self._server.answers.write(self._channel, list(self._to_server.feed(raw)))

    def _arrive(self, raw: bytes) -> None:
        if self._is_answered_twice:
            self._is_answered_twice = False
            raw += raw
        for frame in self._to_client.feed(raw):
            if not frame.is_answer:
                self._requested(self, frame)
            elif (ended := self._ended.pop(frame.opaque, None)) is not None:
                ended(frame)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._channel.close()
            outstanding, self._ended = list(self._ended.values()), {}
            for ended in outstanding:
                ended(BrokerUnreachableError("the connection has ended"))
            self._lost(self)


class FrameLinks:
    """The links between processes and brokers of one test."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.repeat: str | None = None
        """What of the next send arrives twice: ``request`` or ``answer``."""
        self._cable = _Cable()
        self._servers: dict[str, _Server] = {}
        self._brokers: dict[tuple[str, str], tuple[_Server, RemoteBroker]] = {}

    def endpoint(self, process: _Peer, broker: Broker) -> Endpoint:
        """Return a broker as a process sees it through frames."""
        server = self._servers.get(broker.name)
        if server is None or server.broker is not broker:  # reopened
            server = self._servers[broker.name] = _Server(broker)
        key = process.label, broker.name
        link = self._brokers.get(key)
        if link is None or link[0] is not server:
            link = self._brokers[key] = server, self._connect(process, server)
        return link[1]

    def _connect(self, process: _Peer, server: _Server) -> RemoteBroker:
        broker, runner, label = server.broker, self._runner, f"{process.label} frames of {server.broker.name}"

        def dial(address: str, requested: Requested, lost: Callable[[Transport], None]) -> Transport:
            channel = _TurnChannel(self._cable, runner, label, broker)
            return _TurnTransport(self._cable, server, channel, requested, lost, self._take_repeat)

        def requested(address: str, client_id: str, transport: Transport, frame: Frame) -> None:
            remote.requested(client_id, transport, frame)

        def lost(address: str, client_id: str, transport: Transport) -> None:
            client = remote.client(client_id)
            if client is not None:
                client.call(ClientRemoved(broker.name))

        connections = Connections(dial, runner.clock.monotonic, requested, lost, (0.0, 0.0))
        later = partial(_run_locked, runner)
        remote = RemoteBroker(broker.name, broker.name, connections, runner, later, lambda topic: None, _TIMEOUT_S)
        return remote

    def _take_repeat(self) -> str | None:
        what, self.repeat = self.repeat, None
        return what

    def close(self) -> None:
        """End all connections."""
        self._cable.close()


def _run_locked(runner: Runner, call: Callable[[], None]) -> None:
    with runner.lock:
        call()


# ---- clients that are connected over the wire

R = TypeVar("R")
_LATE_S: Final = 20.0


class WireClient:
    """The endpoint of one client: a process of the kit whose code runs elsewhere. Thread-safe."""

    def __init__(self, kit: Kit, process_of: Callable[[str], Process], name: str) -> None:
        """``process_of`` returns the process of a client, by its id, or by ``name`` before its first heartbeat."""
        self._kit = kit
        self._process_of = process_of
        self._name = name
        self._made: Process | None = None
        self._groups: frozenset[str] = frozenset()
        self._calls: dict[str, Call] = {}

    @property
    def process(self) -> Process:
        """Its process, which its first request makes."""
        if self._made is None:
            self._made = self._process_of(self._name)
        return self._made

    def call(self, request: Request[R], /) -> R:
        """Pass a request to the broker, with the kit's history and faults."""
        if isinstance(request, SendMessage):
            return cast(R, self._send(request))
        if isinstance(request, Heartbeat):
            self._heartbeat(request)
        elif isinstance(request, ChannelClosed):
            self.note("leaves")
        elif isinstance(request, EndTransaction):
            self.note(f"ends a transaction: {request.state.name.lower()}")
        elif isinstance(request, ChangeInvisible):
            self._ended(request.receipt, "failed", f"lets a message come again in {request.invisible_ms:,} ms")
        elif isinstance(request, ForwardToDeadLetters):
            self._ended(request.receipt, "failed", "makes a message a dead letter")
        answer = self._kit.broker.call(request)
        if isinstance(request, Receive):
            self._received(request, cast(Any, answer).messages)
        elif isinstance(request, Acknowledge):
            for receipt, is_good in zip(request.receipts, cast(Any, answer), strict=True):
                self._ended(receipt, "returned", "acknowledges" if is_good else "acknowledges too late")
        elif isinstance(request, ChangeInvisible):
            self._calls.pop(request.receipt, None)
        return answer

    def note(self, what: str, group: str = "") -> None:
        """Add a line to the history."""
        kit = self._kit
        with kit.runner.lock:
            kit.note(f"{group}@{self.process.label}" if group else self.process.label, what)

    def _heartbeat(self, request: Heartbeat) -> None:
        if self._made is None:
            self._name = request.client_id
        groups = frozenset(data.group for data in request.consumers)
        if self._groups != groups or not groups:
            self._groups = groups
            role = f"consumes as group {', '.join(sorted(groups))}" if groups else "produces"
            self.note(f"is connected and {role} ({request.client_id})")
        with self._kit.runner.lock:
            self._kit.observer.noted_heartbeat(self.process, request)

    # ---- sends

    def _send(self, request: SendMessage) -> SendResponse:
        kit, process, topic = self._kit, self.process, request.message.topic
        if DELETE_KEY in request.message.properties:
            self.note(f"recalls a message of {topic}")
            return self._kit.broker.call(request)
        due: threading.Event | None = None
        with kit.runner.lock:  # so that time is not moved between the message and its fault
            kit.faults.before_send(process, topic, kit.broker.name)
            response: SendResponse = self._kit.broker.call(request)
            kit.observer.noted_remote_send(topic)
            place = f"{topic}/{response.queue_id}:{response.queue_offset}"
            self.note(f"sends {place} {show(request.message)}")
            kit.faults.lose(process, topic, kit.broker.name, response)
            late_s = kit.faults.take_delay_s(process, topic, kit.broker.name)
            if late_s:
                due = self._due_in(late_s)
        if due is not None and not SystemClock().wait(due, _LATE_S):
            raise BrokerUnreachableError(f"the answer is {late_s:g} s late, and the test did not move the clock")
        return response

    def _due_in(self, seconds: float) -> threading.Event:
        """Return an event that is set once the test has moved the clock by ``seconds``."""
        runner, is_due = self._kit.runner, threading.Event()
        runner.wake(Step("a late answer", lambda now_ms: is_due.set()), runner.now_ms() + round(1000 * seconds))
        return is_due

    # ---- receives

    def _received(self, request: Receive, messages: tuple[Received, ...]) -> None:
        kit = self._kit
        for received in messages:
            stored = received.message
            where = f"{stored.topic}/{stored.queue_id}:{stored.queue_offset}"
            with kit.runner.lock:
                kit.observer.noted_remote_receive(request.group, request.topic)
                self._calls[received.receipt] = kit.history().begin_remote(
                    kit.clock.now_ms(), request.group, self.process.label, where, (kit.broker.name, stored)
                )
            attempt = f", attempt {received.attempt}" if received.attempt > 1 else ""
            self.note(f"gets {where} {show(stored)}{attempt}", request.group)

    def _ended(self, receipt: str, outcome: str, what: str) -> None:
        kit = self._kit
        with kit.runner.lock:
            call = self._calls.pop(receipt, None)
            if call is None:  # acknowledged again, or renewed: for the history the delivery is over
                return
            call.ended_ms, call.outcome = kit.clock.now_ms() - kit.history().begin_ms, outcome
        self.note(f"{what} ({call.where})", call.group)
