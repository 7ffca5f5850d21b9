"""A kit that official clients connect to: the test moves the clock, and the clients keep up.

The clients run in threads or processes of their own and time some things by the wall clock. So each hop of the clock
waits until they are settled: push consumers wait for messages, and no client still owes an answer.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

from librmq.clock import SystemClock
from librmq.config import to_seconds
from librmq.testing.frame_links import WireClient
from librmq.testing.kit import Kit, to_milliseconds
from librmq.testing.process import Process

if TYPE_CHECKING:
    from librmq.testing.served_remoting import ServedRemoting
    from librmq.wire.grpc import GrpcServer

_WAIT_S: Final = 20.0
_BACK_S: Final = 60.0
"""The longest time in which clients return after a fault; those of 4.x register every 30 s."""
_LOOK_S: Final = 0.001


class NotSettledError(AssertionError):
    """Clients did not answer within a bounded time by the wall clock."""


class _Server(Protocol):
    """What serves a kit's broker."""

    port: int

    @property
    def address(self) -> str: ...

    def is_settled(self) -> bool: ...

    def missing(self) -> list[str]: ...

    def close(self) -> object: ...


Serve = Callable[[Kit, int, Callable[[str], WireClient], Any], _Server]
"""Serves a kit's broker on a port; the function returns the endpoint of a client by its name.

The last argument is the closed server that this one replaces, or None.
"""


def serve_grpc(kit: Kit, port: int, client_of: Callable[[str], WireClient], former: GrpcServer | None) -> _Server:
    """Serve clients of RocketMQ 5."""
    from librmq.wire.grpc import GrpcServer

    return GrpcServer(kit.broker, port=port, endpoints=client_of, former=former)


def serve_remoting(listening: socket.socket) -> Serve:
    """Serve clients of RocketMQ 4.x, at first on a socket whose address is the kit's ``store_host``."""
    from librmq.testing.served_remoting import ServedRemoting
    from librmq.wire.remoting import listen

    def serve(kit: Kit, port: int, client_of: Callable[[str], WireClient], former: ServedRemoting | None) -> _Server:
        return ServedRemoting(kit, listen(port=port) if port else listening, client_of, former)

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
        kit.name_fixture("rmq_grpc" if serve is serve_grpc else "rmq_remoting")
        self._is_down = False
        self.server = serve(kit, 0, self._endpoint, None)

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

        After a fault, first wait until each client that was connected before is back. While the broker is down, this
        returns at once.

        Raises:
            NotSettledError: They did not within 20 s of wall-clock time, or a client was not back within 60 s.
        """
        clock, never = SystemClock(), threading.Event()
        begin = clock.monotonic()
        back = begin
        while not self._is_down:
            missing = self.server.missing()
            if missing:
                back = clock.monotonic()
            elif self.server.is_settled():
                return
            if missing and back > begin + _BACK_S:
                raise NotSettledError(
                    f"not back within {_BACK_S:g} s after the fault: {', '.join(missing[:5])}"
                    + (f" and {len(missing) - 5:,} more" if len(missing) > 5 else "")
                    + ". A client that ends before the fault, or shuts down after it, is not awaited"
                )
            if clock.monotonic() > back + _WAIT_S:
                raise NotSettledError(
                    f"the clients at {self.address} were not settled within {_WAIT_S:g} s: a push consumer has not "
                    "finished what it received or does not ask for more, or a producer has not answered a check"
                )
            clock.wait(never, _LOOK_S)

    def advance(self, *, hours: float = 0, minutes: float = 0, seconds: float = 0, ms: int = 0) -> None:
        """Let time pass hop by hop; after each, wait until the clients are settled, as `settle` does.

        Raises:
            NotSettledError: They did not settle within 20 s of wall-clock time, or a client was not back within 60 s.
        """
        runner = self.kit.runner
        until = runner.now_ms() + to_milliseconds(hours, minutes, seconds, ms)
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
        """Cut the connections of all clients in the middle of their calls; they may connect again at once.

        `settle` and `advance` wait until they have.
        """
        self.kit.note("fault", "all connections of clients are cut")
        if not self._is_down:
            self.server.close()
            self._serve_again()

    def crash_broker(self, *, down: float | timedelta = 0) -> None:
        """Let the broker die and open it again after ``down`` seconds, with all acknowledged messages.

        Connections are cut, and refused until then. `settle` and `advance` wait for the clients once it is open.
        """
        to_seconds("down", down)
        self.server.close()
        self._is_down = True
        self.kit.crash_broker(down=down)
        self.kit.runner.after(down, "the broker serves again", self._serve_again)

    def _serve_again(self) -> None:
        former = self.server
        self.server = self._serve(self.kit, former.port, self._endpoint, former)
        self._is_down = False

    def close(self) -> None:
        """Cut the clients off."""
        self.server.close()

    def __enter__(self) -> ServedKit:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
