"""A broker of this process as its clients see it over the wire: by frames of 4.x, one turn at a time.

The client's half (`RemoteBroker`) and the server's half (`FrameAnswers`) are the usual ones. Only the threads are
missing: a frame crosses the connection and is answered within the call, and what a server says later is a step. So a
runner that a test moves by hand decides the order of all that happens.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from librmq.broker import Broker
from librmq.errors import BrokerUnreachableError
from librmq.override import override
from librmq.protocol import ClientRemoved, Endpoint, TakeHandOuts
from librmq.runtime import Runner, Step
from librmq.wire.remote._administration import ANSWERS
from librmq.wire.remote._connection import Ended, EndedTogether, Requested, Transport
from librmq.wire.remote._dialing import Connections
from librmq.wire.remote._remote_broker import RemoteBroker
from librmq.wire.remoting._channels import Channel, ClientChannels, served
from librmq.wire.remoting._consumer_requests import ChannelReceives, Pulls
from librmq.wire.remoting._frames import Frame, FrameReader, encode
from librmq.wire.remoting._running_info import Rates
from librmq.wire.remoting._sends import SENDS
from librmq.wire.remoting._server import FrameAnswers

_PIECE: Final = 32 << 10
"""Bytes that fit into the buffers of a connection."""
_TIMEOUT_S: Final = 3.0


class _Cable:
    """A connection over TCP, or of processes that share a store, whose two ends one thread serves."""

    def __init__(self, *, is_shared: bool) -> None:
        if is_shared:
            self.client, self.server = socket.socketpair(socket.AF_UNIX)
            return
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
                    raise BrokerUnreachableError("the connection was closed")
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
        self.pulls = Pulls(broker, rates, ends_holds=False)  # otherwise a runner by hand would never be idle
        # A kit's clients share their group's rate at every kind of connection.
        others = served(broker.call, TakeHandOuts)
        self.answers = FrameAnswers(broker, self.sessions, self.pulls, ChannelReceives(broker), rates, others=others)


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

    @override
    def write(self, data: bytes | bytearray) -> None:
        if self.is_open:
            self.arrive(self._cable.carry(self._cable.server, self._cable.client, data))

    @override
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

    @override
    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.end()


@dataclass(eq=False, repr=False)
class _TurnTransport:
    """A `Transport` whose requests are answered within the call."""

    cable: _Cable
    server: _Server
    channel: _TurnChannel
    requested: Requested
    lost: Callable[[Transport], None]
    repeated: Callable[[], bool]
    address: str = "the server of this process"

    def __post_init__(self) -> None:
        self._number = 0
        self._ended: dict[int, Ended] = {}
        self._to_server, self._to_client = FrameReader(), FrameReader()
        self.is_open, self.is_interrupted, self.was_interrupted = True, False, False
        self.channel.arrive, self.channel.end = self._arrive, self.close

    def request(self, frame: Frame, timeout_s: float) -> Frame:
        outcomes: list[object] = []
        self.send(frame, outcomes.append)
        if not outcomes:
            self.channel.work()
        if not outcomes or not isinstance(outcomes[0], Frame):
            self._ended.pop(frame.opaque, None)
            raise BrokerUnreachableError("no answer came")
        return outcomes[0]

    def send(self, frame: Frame, ended: Ended) -> None:
        self._number = frame.opaque = self._number + 1
        self._ended[frame.opaque] = ended
        self._send(frame, times=2 if frame.code in SENDS and self.repeated() else 1)

    def send_later(self, requests: Sequence[tuple[Frame, Any]], ended: EndedTogether[Any]) -> None:
        """Send nothing: `request` is a turn of the explorer."""

    def send_one_way(self, frame: Frame) -> None:
        self._number = frame.one_way().opaque = self._number + 1
        self._send(frame, times=2 if self.repeated() else 1)

    def send_answer(self, frame: Frame) -> None:
        self._send(frame)

    def _send(self, frame: Frame, times: int = 1) -> None:
        if not self.is_open:
            raise BrokerUnreachableError("the connection has ended")
        raw = self.cable.carry(self.cable.client, self.cable.server, encode(frame) * times)
        self.server.answers.write(self.channel, list(self._to_server.feed(raw)))

    def _arrive(self, raw: bytes) -> None:
        for frame in self._to_client.feed(raw):
            if not frame.is_answer:
                self.requested(self, frame)
            elif (ended := self._ended.pop(frame.opaque, None)) is not None:
                ended(frame)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.channel.close()
            outstanding, self._ended = list(self._ended.values()), {}
            for ended in outstanding:
                ended(BrokerUnreachableError("the connection has ended"))
            self.lost(self)


class FrameLinks:
    """The links between processes and brokers under one runner."""

    def __init__(self, runner: Runner, *, is_shared: bool = False) -> None:
        """``is_shared`` takes the connections of processes that share a store."""
        self._runner = runner
        self._is_shared = is_shared
        self.repeats_next = False
        """Whether the next send arrives twice."""
        self._cable = _Cable(is_shared=is_shared)
        self._servers: dict[str, _Server] = {}
        self._brokers: dict[tuple[str, str], tuple[_Server, RemoteBroker]] = {}

    def endpoint(self, process: str, broker: Broker) -> Endpoint:
        """Return a broker as the process of that label sees it through frames."""
        server = self._servers.get(broker.name)
        if server is None or server.broker is not broker:  # the broker was reopened
            server = self._servers[broker.name] = _Server(broker)
        key = process, broker.name
        link = self._brokers.get(key)
        if link is None or link[0] is not server:
            link = self._brokers[key] = server, self._connect(process, server)
        return link[1]

    def _connect(self, process: str, server: _Server) -> RemoteBroker:
        broker, runner, label = server.broker, self._runner, f"{process} frames of {server.broker.name}"

        def dial(address: str, requested: Requested, lost: Callable[[Transport], None]) -> Transport:
            channel = _TurnChannel(self._cable, runner, label, broker)
            return _TurnTransport(self._cable, server, channel, requested, lost, self._take_repeat)

        def requested(address: str, client_id: str, transport: Transport, frame: Frame) -> None:
            remote.requests.requested(client_id, transport, frame)

        def lost(address: str, client_id: str, transport: Transport) -> None:
            beat = remote.heartbeats().get(client_id)
            if beat is not None:
                beat.client.call(ClientRemoved(broker.name))

        def later(call: Callable[[], None]) -> None:
            with runner.lock:
                call()

        connections = Connections(dial, runner.clock.monotonic, requested, lost, (0.0, 0.0))
        remote = RemoteBroker(
            name=broker.name,
            address=broker.name,
            transports=connections,
            runner=runner,
            later=later,
            stored=lambda topic: None,
            timeout_s=_TIMEOUT_S,
            answers=ANSWERS,
        )
        remote.has_receives = self._is_shared
        return remote

    def _take_repeat(self) -> bool:
        is_repeated, self.repeats_next = self.repeats_next, False
        return is_repeated

    def close(self) -> None:
        """End all connections."""
        self._cable.close()
