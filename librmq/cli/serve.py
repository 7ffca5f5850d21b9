"""``serve``: a broker over a store, to which clients connect."""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path

from librmq.cli.output import Output
from librmq.errors import ConfigError

__all__ = ["serve"]


def serve(arguments: argparse.Namespace, output: Output) -> int:
    """Serve the store until a signal ends it."""
    from librmq.broker import Broker, BrokerConfig
    from librmq.scheduling.timer_config import TimerConfig
    from librmq.wire.grpc import GrpcServer

    ended, printing = threading.Event(), threading.Lock()
    tls = None if arguments.tls is None else (_read(arguments.tls[0]), _read(arguments.tls[1]))

    def changed(client_id: str, group: str, is_connected: bool) -> None:
        with printing:
            output.row({"client": client_id, "group": group or None, "state": "connected" if is_connected else "left"})
            output.flush()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
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
        with printing:
            output.row({"ready": True, "grpc": server.address, "remoting": None})
            output.flush()
        ended.wait()
    return 0


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"--tls {path}: can't be read: {error.strerror}") from error
