"""``serve``: a broker over a store, to which clients connect."""

from __future__ import annotations

import argparse
import queue
import select
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from librmq.cli.output import Output
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

    lines = _Lines(output)
    # An event has a lock that the main thread may hold when the handler runs.
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    tls = None if arguments.tls is None else (_read(arguments.tls[0]), _read(arguments.tls[1]))

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
        lines.start({"ready": True, "grpc": server.address, "remoting": None})
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


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"--tls {path}: can't be read: {error.strerror}") from error
