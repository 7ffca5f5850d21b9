"""``serve``: a broker over a store, to which clients connect."""

from __future__ import annotations

import argparse
import os
import queue
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from librmq.cli.output import JsonLines, Output
from librmq.errors import ConfigError
from librmq.runtime.event_log import EventLog

__all__ = ["serve"]

_log = EventLog("librmq.cli")

_MAX_LINES: Final = 1000
_LOOK_S: Final = 0.2
_MAX_NAME: Final = 255


def serve(arguments: argparse.Namespace, output: Output) -> int:
    """Serve the store until a signal ends it."""
    from librmq.broker import Broker, BrokerConfig
    from librmq.scheduling.timer_config import TimerConfig
    from librmq.wire.grpc import GrpcServer

    # An event has a lock that the main thread may hold when the handler runs.
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    if output.is_on_terminal:  # a table would wait until it is full
        output = Output(JsonLines(sys.stdout))
    lines = _Lines(output)
    tls = None if arguments.tls is None else _pair(arguments)

    def changed(client_id: str, group: str, is_connected: bool) -> None:
        state = "connected" if is_connected else "left"
        lines.put({"client": client_id[:_MAX_NAME], "group": group or None, "state": state})

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: ended.put(number))
    with (
        Broker.open(arguments.store, BrokerConfig(timers=TimerConfig())) as broker,
        GrpcServer(
            broker,
            host=arguments.host,
            port=arguments.grpc,
            advertise=arguments.advertise,
            tls=tls,
            auto_create=not arguments.no_auto_create,
            changed=changed,
        ) as server,
    ):
        ready = {"ready": True, "grpc": server.address, "remoting": None}
        if tls is not None and not arguments.tls:
            ready["certificate"] = _keep_certificate(arguments.store, tls[0])
        lines.start(ready)
        ended.get()
    lines.end()
    return 0


class _Lines:
    """Prints lines in a thread of its own, so that a full pipe stops no client. Thread-safe."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(_MAX_LINES)
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._print, name="librmq serve lines", daemon=True)

    def start(self, first: dict[str, Any]) -> None:
        """Print the first line, then those that wait already."""
        self._output.row(first)
        self._output.flush()
        self._thread.start()

    def put(self, row: dict[str, Any]) -> None:
        """Print a line; drop it if too many wait."""
        with suppress(queue.Full):
            self._waiting.put_nowait(row)

    def end(self) -> None:
        """Print what waits, unless the reader is too slow."""
        self._has_ended.set()
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join()

    def _print(self) -> None:
        try:
            while (row := self._waiting.get()) is not None and self._is_writable():
                self._output.row(row)
                self._output.flush()
        except OSError as error:  # the reader is gone; clients are served further
            _log.info("no more lines are printed: %(error)s", error=error)

    def _is_writable(self) -> bool:
        """Wait for a reader, at the end only briefly: a write that blocks would hold up the exit too."""
        while True:
            has_ended = self._has_ended.is_set()
            try:
                if select.select([], [sys.stdout], [], _LOOK_S)[1]:
                    return True
            except (OSError, ValueError, TypeError):  # not a pipe, or a system without such waits
                return True
            if has_ended:
                return False


def _pair(arguments: argparse.Namespace) -> tuple[bytes, bytes]:
    """Return the certificate and the key that were named, or a pair made now."""
    from librmq.wire.grpc.certificates import self_signed

    paths = arguments.tls
    if not paths:
        advertised = (arguments.advertise or "").rpartition(":")[0].strip("[]")
        names = ("localhost", "127.0.0.1", "::1", socket.gethostname(), arguments.host, advertised)
        return self_signed(filter(None, names))
    if len(paths) != 2:
        raise ConfigError(f"--tls: expected a certificate and its key, or nothing, found {' '.join(paths)}")
    return _read(paths[0]), _read(paths[1])


def _keep_certificate(store: str, certificate: bytes) -> str:
    """Write the certificate, not its key, for clients that check it; return the path."""
    path = os.path.join(os.path.abspath(store), "librmq", "certificate.pem")
    Path(path).write_bytes(certificate)
    return path


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"--tls {path}: can't be read: {error.strerror}") from error
