"""A kit that official clients connect to: the test moves the clock, and the clients keep up.

The clients run in threads or processes of their own and time some things by the wall clock. So each hop of the clock
waits until they are settled: push consumers wait for messages, and no client still owes an answer.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Final, Protocol

from librmq.clock import SystemClock
from librmq.testing.kit import Kit
from librmq.testing.process import Process
from librmq.testing.wire_client import WireClient

__all__ = ["NotSettledError", "Serve", "ServedKit", "serve_grpc", "serve_remoting"]

_WAIT_S: Final = 20.0
_LOOK_S: Final = 0.001


class NotSettledError(AssertionError):
    """Clients did not answer within a bounded time by the wall clock."""


class _Server(Protocol):
    """What serves a kit's broker."""

    port: int

    @property
    def address(self) -> str: ...

    def is_settled(self) -> bool: ...

    def close(self) -> None: ...


Serve = Callable[[Kit, int, Callable[[str], WireClient]], _Server]
"""Serves a kit's broker on a port; the function returns the endpoint of a client by its name."""


def serve_grpc(kit: Kit, port: int, client_of: Callable[[str], WireClient]) -> _Server:
    """Serve clients of RocketMQ 5."""
    from librmq.wire.grpc import GrpcServer

    return GrpcServer(kit.broker, port=port, endpoints=client_of)


def serve_remoting(listening: socket.socket) -> Serve:
    """Serve clients of RocketMQ 4.x, at first on a socket whose address is the kit's ``store_host``."""
    from librmq.testing.served_remoting import ServedRemoting
    from librmq.wire.remoting import listen

    def serve(kit: Kit, port: int, client_of: Callable[[str], WireClient]) -> _Server:
        return ServedRemoting(kit, listen(port=port) if port else listening, client_of)

    return serve


class ServedKit:
    """A kit and its server. A context manager; at its end clients are cut off. Not thread-safe."""

    def __init__(self, kit: Kit, serve: Serve = serve_grpc) -> None:
        """Serve the broker of a kit, whose clock should start at the machine's time."""
        self.kit = kit
        """The broker, its dead letters, its faults and history, and all else of the fixture ``rmq``."""
        self._clients: dict[str, WireClient] = {}
        self._processes: dict[str, Process] = {}
        self._serve = serve
        self.server = self._served(0)

    def _served(self, port: int) -> _Server:
        return self._serve(self.kit, port, self._endpoint)

    def _endpoint(self, name: str) -> WireClient:
        with self.kit.runner.lock:
            return self._clients.setdefault(name, WireClient(self.kit, self._process_of, name))

    def _process_of(self, name: str) -> Process:
        with self.kit.runner.lock:
            if name not in self._processes:
                self._processes[name] = self.kit.outside_process("client")
            return self._processes[name]

    @property
    def address(self) -> str:
        """``host:port`` for the configuration of a client."""
        return self.server.address

    def settle(self) -> None:
        """Wait until the clients have done what there is to do now.

        Raises:
            NotSettledError: They did not within 20 s of wall-clock time.
        """
        clock, never = SystemClock(), threading.Event()
        deadline = clock.monotonic() + _WAIT_S
        while not self.server.is_settled():
            if clock.monotonic() > deadline:
                raise NotSettledError(
                    f"the clients at {self.address} were not settled within {_WAIT_S:g} s: a push consumer has not "
                    "finished what it received or does not ask for more, or a producer has not answered a check"
                )
            clock.wait(never, _LOOK_S)

    def advance(self, *, hours: float = 0, minutes: float = 0, seconds: float = 0, ms: int = 0) -> None:
        """Let time pass hop by hop; after each, wait until the clients are settled.

        Raises:
            NotSettledError: They did not settle within 20 s of wall-clock time.
        """
        runner = self.kit.runner
        until = runner.now_ms() + ms + round(1000 * (seconds + 60 * (minutes + 60 * hours)))
        self.settle()
        while True:
            due = runner.next_due_ms()
            hop = until if due is None else max(min(due, until), runner.now_ms())
            self.kit.advance(ms=hop - runner.now_ms())
            self.settle()
            following = runner.next_due_ms()
            if runner.now_ms() >= until and (following is None or following > until):
                return

    def cut_connections(self) -> None:
        """Cut the connections of all clients in the middle of their calls; they may connect again at once."""
        self.kit.note("fault", "all connections of clients are cut")
        self._serve_again()

    def crash_broker(self) -> None:
        """Let the broker die and open it again, with all acknowledged messages; connections are cut."""
        self.server.close()
        self.kit.crash_broker()
        self._serve_again()

    def _serve_again(self) -> None:
        port = self.server.port
        self.server.close()
        self.server = self._served(port)

    def close(self) -> None:
        """Cut the clients off."""
        self.server.close()

    def __enter__(self) -> ServedKit:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
