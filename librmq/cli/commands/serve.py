"""``serve``: a broker over a store, to which clients connect."""

from __future__ import annotations

import argparse
import base64
import json
import os
import queue
import select
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlsplit

from librmq.cli._output import EndSignals, Output, complain, end_signals
from librmq.cli._rows import schedule_row
from librmq.cli._stores import recorded_settings, settle_config
from librmq.clock import SystemClock
from librmq.errors import ConfigError, RmqError
from librmq.files import DiskFiles, Files
from librmq.message import record
from librmq.message.ids import format_host, parse_host
from librmq.override import override
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.store.format.directory import has_abort, is_made_by_librmq
from librmq.store.format.documents import OWN_FOLDER, read_document, write_document

if TYPE_CHECKING:
    from librmq.broker import Broker, BrokerConfig
    from librmq.config import StoreConfig
    from librmq.message import StoredMessage
    from librmq.testing import Kit, ServedKit
    from librmq.wire.grpc import GrpcServer
    from librmq.wire.remoting import RemotingServer


_log = EventLog("librmq.cli")

_GRPC_PORT: Final = 8081
_REMOTING_PORT: Final = 9876
_MAX_LINES: Final = 1000
_POLL_S: Final = 0.2
_MAX_NAME: Final = 255
_MOST_FILES: Final = 65_536
_STOP_S: Final = 5.0
"""The time in which all servers end."""


def serve(arguments: argparse.Namespace, output: Output) -> int:
    """Serve the store until a signal ends it."""
    from librmq.broker import Broker
    from librmq.config import StoreConfig

    _check_clock(arguments)
    _allow_files()
    grpc, remoting = _ports(arguments)
    if remoting is None:
        _refuse(arguments, ("admin",), "add --remoting PORT, which it is for")
    if grpc is None and arguments.grpc_tls is None:
        names = ("grpc_calls", "min_invisible", "min_polling", "no_auto_create")
        _refuse(arguments, names, "add --grpc PORT, which it is for")
    of_grpc = _advertised(arguments, grpc, takes_port=True)
    of_tls = _advertised(arguments, arguments.grpc_tls, takes_port=grpc is None)
    output = output.of_lines()
    lines = _Lines(output)
    pair = None if arguments.tls is None and arguments.grpc_tls is None else _pair(arguments)
    tls = pair if arguments.grpc_tls is None else None

    stop = _Stop()
    with end_signals() as ended:  # to the last line: a second signal changes nothing
        with ExitStack() as opened:
            serving = _Serving(arguments, lines, opened, stop)
            files = DiskFiles(follow_links=arguments.follow_links)
            listening, config = None, None
            if arguments.config is not None:
                config = settle_config(arguments.store, files, arguments.config)
            if remoting is not None:
                from librmq.wire.remoting import listen

                listening = opened.enter_context(listen(arguments.host, remoting))  # clients dial the store's address
                remoting = listening.getsockname()[1]
                is_alone = grpc is None and arguments.grpc_tls is None
                of_remoting = _advertised(arguments, remoting, takes_port=is_alone)
                port = (of_remoting or f":{remoting}").rpartition(":")[2]
                config = (config or StoreConfig()).with_settings({"store_host": f"{_dialled(arguments)}:{port}"})
            ready: dict[str, Any] = {"ready": True, "grpc": None, "remoting": None, "control": None}
            if arguments.clock == "manual":
                ready |= serving.by_hand(grpc, listening, config)
                grpc = listening = None
            else:
                broker = opened.enter_context(
                    Broker.open(
                        arguments.store,
                        _timers_of_a_broker(arguments.store, files),
                        store_config=config,
                        files=files,
                    )
                )
            if listening is not None:
                ready["remoting"] = serving.remoting(broker, listening, of_remoting, tls)
                _warn_of_address(broker)
            if grpc is not None:
                ready["grpc"] = serving.grpc(broker, grpc, of_grpc, tls)
            if arguments.grpc_tls is not None:
                ready["grpc_tls"] = serving.grpc(broker, arguments.grpc_tls, of_tls, pair)
            if pair is not None and not arguments.tls:
                ready["certificate"] = _keep_certificate(arguments.store, pair[0])
            lines.print_first(ready)
            if arguments.end_with_input:
                threading.Thread(target=_await_input, args=(ended,), name="librmq serve input", daemon=True).start()
            ended.wait()
            stop.start_deadline()
        lines.print_rest()
    if not stop.is_complete:  # the interpreter would wait for threads of abandoned calls
        output.flush()
        os._exit(0)
    return 0


def _timers_of_a_broker(path: str, files: Files) -> BrokerConfig | None:
    """Return settings with the timer that a broker of RocketMQ 5 has left; None for a store that names its own.

    Naming the default would bind the store to it: no later start could name the timer whose files appear meanwhile.
    """
    from librmq.broker import BrokerConfig
    from librmq.scheduling import TimerConfig

    if is_made_by_librmq(path, files) or "timers" in recorded_settings(path, files):
        return None
    timers = TimerConfig.of_store(path, files)
    return None if timers is None else BrokerConfig(timers=timers)


def _allow_files() -> None:
    """Take as many descriptors as the system allows: each connection needs one, and so does each open file."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limit; others may refuse to change it
        import resource

        soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = _MOST_FILES if hard_limit == resource.RLIM_INFINITY else min(hard_limit, _MOST_FILES)
        if soft_limit != resource.RLIM_INFINITY and soft_limit < limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard_limit))


def _await_input(ended: EndSignals) -> None:
    """End the command when standard input ends: the system closes a process's pipes however it dies."""
    with suppress(OSError, ValueError):  # it was closed before the start
        while os.read(0, 1 << 12):
            pass
    ended.end()


class _Stop:
    """The end of the servers, which have a few seconds together. The broker has its own 5 s after them."""

    def __init__(self) -> None:
        self.is_complete = True
        """Whether all servers have ended."""
        self._clock = SystemClock()
        self._deadline: float | None = None

    def start_deadline(self) -> None:
        """Let the time run."""
        self._deadline = self._clock.monotonic() + _STOP_S

    def close(self, server: ServedKit | Control | GrpcServer | RemotingServer) -> None:
        """Close a server, or abandon it when the time is over."""
        left = _STOP_S if self._deadline is None else max(0.0, self._deadline - self._clock.monotonic())
        self.is_complete &= server.close(left)


def _check_clock(arguments: argparse.Namespace) -> None:
    """Refuse options that a clock which is moved by hand does not go with."""
    if arguments.clock != "manual":
        if arguments.control is not None:
            raise ConfigError("--control: moves a clock that stands still: add --clock manual")
        return
    names = ("advertise", "tls", "grpc_tls", "grpc_calls", "min_invisible", "admin", "no_auto_create")
    _refuse(arguments, names, "not with --clock manual, which serves tests on this machine")
    if arguments.host != "127.0.0.1":
        raise ConfigError(f"--host {arguments.host}: --clock manual serves 127.0.0.1 only")


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    """Refuse options that would have no effect."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value is not False:
            raise ConfigError(f"--{name.replace('_', '-')}: {why}")


class _Serving:
    """The servers over a store, which are closed with it; lines report their clients."""

    def __init__(self, arguments: argparse.Namespace, lines: _Lines, opened: ExitStack, stop: _Stop) -> None:
        self._arguments = arguments
        self._lines = lines
        self._opened = opened
        self._stop = stop

    def _changed(self, client_id: str, group: str, is_connected: bool) -> None:
        state = "connected" if is_connected else "left"
        self._lines.enqueue({"client": client_id[:_MAX_NAME], "group": group or None, "state": state})

    def _served(self, server: GrpcServer | RemotingServer) -> str:
        """Return the address of a server that is closed with the others."""
        self._opened.callback(self._stop.close, server)
        return server.address

    def by_hand(self, grpc: int | None, listening: socket.socket | None, config: StoreConfig | None) -> dict[str, Any]:
        """Serve a kit, whose clock moves by requests to a control port; return its part of the first line."""
        from librmq.config import StoreConfig
        from librmq.testing import Kit, ServedKit

        arguments = self._arguments
        was_killed = has_abort(DiskFiles(), arguments.store)
        kit = Kit(
            arguments.store,
            store_config=config or StoreConfig(),
            now_ms=SystemClock().now_ms(),  # clients compute times of delivery by theirs
        )
        self._opened.callback(_close_kit, kit)
        # An earlier run can have moved its clock, and stored messages after the last note of it.
        kit.clock.move_to(max(kit.clock.now_ms(), _last_stored_ms(kit.broker), _noted_time(arguments.store)))
        served = ServedKit(
            kit, grpc, listening, changed=self._changed, was_killed=was_killed, min_polling=arguments.min_polling
        )
        self._opened.callback(self._stop.close, served)
        control = Control(served, arguments.store, arguments.control or 0, self._lines.enqueue)
        self._opened.callback(self._stop.close, control)
        return {
            "grpc": None if served.grpc is None else served.grpc.address,
            "remoting": None if served.remoting is None else served.remoting.address,
            "control": control.address,
        }

    def grpc(self, broker: Broker, port: int, advertise: str | None, tls: tuple[bytes, bytes] | None) -> str:
        """Serve clients of 5.x; return the address."""
        from librmq.wire.grpc import GrpcServer

        arguments = self._arguments
        options = {
            "calls_of_address": arguments.grpc_calls,
            "min_invisible": arguments.min_invisible,
            "min_polling": arguments.min_polling,
        }
        limits: dict[str, Any] = {name: limit for name, limit in options.items() if limit is not None}
        server = GrpcServer(
            broker,
            host=arguments.host,
            port=port,
            advertise=advertise,
            tls=tls,
            auto_create=not arguments.no_auto_create,
            changed=self._changed,
            **limits,
        )
        return self._served(server)

    def remoting(
        self, broker: Broker, listening: socket.socket, advertise: str | None, tls: tuple[bytes, bytes] | None
    ) -> str:
        """Serve clients of 4.x; return the address."""
        from librmq.wire.remoting import RemotingServer

        arguments = self._arguments
        server = RemotingServer(
            broker,
            listening=listening,
            advertise=advertise,
            tls=tls,
            allows_admin=arguments.admin,
            changed=self._changed,
        )
        return self._served(server)


def _clock_path(store: str) -> str:
    """Return the file with the time of a moved clock, at which the next process goes on."""
    return os.path.join(store, OWN_FOLDER, "clock.json")


def _noted_time(store: str) -> int:
    """Return the time of a moved clock that was noted last, in ms; 0 without one."""
    return int((read_document(_clock_path(store), DiskFiles(), {"now_ms": (int,)}) or {"now_ms": 0})["now_ms"])


def _last_stored_ms(broker: Broker) -> int:
    """Return the store time of the last message; 0 without one."""
    log = broker.store.log
    for start in reversed(log.sequence.starts):
        records = log.scan(start, min(start + log.file_size, log.end), check_body=False)
        times = [record.store_timestamp_ms(raw) for _, _, raw in records if raw]
        if times:
            return times[-1]
    return 0


def _close_kit(kit: Kit) -> None:
    """Close a kit's broker; its warnings are for tests in Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kit.close()


def _ports(arguments: argparse.Namespace) -> tuple[int | None, int | None]:
    """Return the ports of gRPC and of remoting; without either option both, gRPC where its extra is installed."""
    if arguments.grpc is not None or arguments.remoting is not None:
        return arguments.grpc, arguments.remoting
    return (_GRPC_PORT if find_spec("grpc") else None), _REMOTING_PORT


def _advertised(arguments: argparse.Namespace, port: int | None, *, takes_port: bool) -> str | None:
    """Return ``host:port`` for the routes of a server; ``takes_port``: with the port that ``--advertise`` names."""
    if arguments.advertise is None or port is None:
        return None
    host, named = arguments.advertise
    port = int(named) if named and takes_port else port
    if not port:
        raise ConfigError(f"--advertise {host}: port 0 takes a free one: name the port that it is to be")
    return f"{host}:{port}"


def _dialled(arguments: argparse.Namespace) -> str:
    """Return the IP address in the store's host, which clients dial for single messages."""
    for name in arguments.advertise and arguments.advertise[0], arguments.host:
        with suppress(ValueError):
            if name and not (address := ip_address(name.strip("[]"))).is_unspecified:
                return f"[{address.exploded}]" if address.version == 6 else str(address)
    return "127.0.0.1" if arguments.host != "::" or socket.has_dualstack_ipv6() else "[0:0:0:0:0:0:0:1]"


def _warn_of_address(broker: Broker) -> None:
    """Say that messages stored under another address can't be asked for by their ids."""
    config, log = broker.store.config, broker.store.log
    last = next(iter(broker.store), None) if log.end > log.begin else None
    if last is not None and last.store_host != parse_host(config.store_host):
        complain(
            f"librmq serve: stored messages name the address {format_host(last.store_host)}, and new ones "
            f"{config.store_host}: clients of 4.x that look a message up by its id, or send it back in C++, dial the "
            "former; serve the store on one port"
        )


class _Lines:
    """Prints lines in a thread of its own, so that a full pipe stops no client. Thread-safe."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(_MAX_LINES)
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._print, name="librmq serve lines", daemon=True)

    def print_first(self, first: dict[str, Any]) -> None:
        """Print the first line, then those that wait already."""
        self._output.row(first)
        self._output.flush()
        self._thread.start()

    def enqueue(self, row: dict[str, Any]) -> None:
        """Print a line; drop it if too many wait."""
        with suppress(queue.Full):
            self._waiting.put_nowait(row)

    def print_rest(self) -> None:
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
                if select.select([], [sys.stdout], [], _POLL_S)[1]:
                    return True
            except (OSError, ValueError, TypeError):  # not a pipe, or a system without such waits
                return True
            if has_ended:
                return False


def _pair(arguments: argparse.Namespace) -> tuple[bytes, bytes]:
    """Return the certificate and the key that were named, or a pair made now."""
    from librmq.wire.certificates import self_signed

    paths = arguments.tls
    if not paths:
        advertised = arguments.advertise and arguments.advertise[0].strip("[]")
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


# ---- the control port of ``serve --clock manual``

_MOST_BYTES: Final = 64 << 10
_READ_S: Final = 10
_TIMES: Final = ("hours", "minutes", "seconds", "ms")
_CHANGES: Final = ("pause", "resume", "delete")
_SCHEDULE: Final = (
    "name", "topic", "cron", "timezone", "every", "missed", "body", "properties", "message_type", "until",
)  # fmt: skip


class _Refused(Exception):
    """A request is not answered, with a status of HTTP."""

    def __init__(self, status: int, what: str) -> None:
        super().__init__(what)
        self.status = status


Fields = Mapping[str, Any]
"""What a request names."""


class Control:
    """Answers requests about a served kit, one at a time: tests in any language move its clock over HTTP.

    Listens from the start, on loopback. Each connection has a thread, so that a silent one holds up no other. A page in
    a browser can send requests there too, so a request with an ``Origin``, or with another ``Host``, is refused.
    """

    def __init__(self, served: ServedKit, store: str, port: int, changed: Callable[[dict[str, Any]], None]) -> None:
        """``changed`` gets a line for each change of state that a request makes; ``store`` is the served folder."""
        self._served = served
        self._store = store
        self._changed = changed
        self._turn = Lock()
        self._busy: set[threading.Thread] = set()
        """The threads that answer a request which has arrived whole."""
        self._calls: dict[tuple[str, str], Callable[[Fields], dict[str, Any]]] = {
            ("POST", "/advance"): self._advance,
            ("POST", "/settle"): self._settle_kit,
            ("POST", "/crash"): self._crash,
            ("GET", "/dead-letters"): self._dead_letters,
            ("GET", "/schedules"): self._schedules,
            ("POST", "/schedules"): self._set_schedule,
            **{("POST", f"/schedules/{change}"): partial(self._change_schedule, change) for change in _CHANGES},
        }
        control = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _READ_S  # seconds until a client that sends nothing is cut off

            def do_GET(self) -> None:
                control._respond(self)

            do_POST = do_GET  # noqa: N815 (a name of the base class)

            @override
            def log_message(self, format: str, *arguments: object) -> None:
                _log.debug("control: %(what)s", what=format % arguments)

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--control {port}: can't listen on 127.0.0.1: {error}; 0 takes a free port") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="librmq control", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """``host:port`` for requests."""
        return f"127.0.0.1:{self._server.server_port}"

    def close(self, timeout: float) -> bool:
        """Answer no more requests; return whether the last ones have ended within ``timeout`` seconds."""
        clock = SystemClock()
        deadline = clock.monotonic() + timeout
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        while threads := list(self._busy):
            threads[0].join(max(0.0, deadline - clock.monotonic()))
            if threads[0].is_alive():
                return False
            self._busy.discard(threads[0])
        return True

    def _respond(self, handler: BaseHTTPRequestHandler) -> None:
        thread = threading.current_thread()
        try:
            self._answer(handler, thread)
        finally:
            self._busy.discard(thread)

    def _answer(self, handler: BaseHTTPRequestHandler, thread: threading.Thread) -> None:
        from librmq.testing import NotSettledError, UnknownGroupError

        try:
            call, fields = self._request(handler)
            self._busy.add(thread)
            with self._turn:
                status, body = 200, call(fields)
        except _Refused as error:
            status, body = error.status, {"error": str(error)}
        except NotSettledError as error:
            status, body = 504, {"error": str(error)}
        except (RmqError, TypeError, UnknownGroupError) as error:
            status, body = 400, {"error": str(error)}
        raw = json.dumps(body, ensure_ascii=False).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(raw)))
        handler.end_headers()
        handler.wfile.write(raw)

    def _request(self, handler: BaseHTTPRequestHandler) -> tuple[Callable[[Fields], dict[str, Any]], Fields]:
        """Return the call that a request is for, and its fields."""
        host = handler.headers.get("Host", "")
        if "Origin" in handler.headers or host not in (self.address, f"localhost:{self._server.server_port}"):
            raise _Refused(403, f"expected Host: {self.address} and no Origin, found Host: {host:.80}")
        parts = urlsplit(handler.path)
        call = self._calls.get((str(handler.command), parts.path))
        if call is None:
            requests = ", ".join(f"{method} {path}" for method, path in self._calls)
            raise _Refused(404, f"expected {requests}; found {handler.command} {parts.path:.80}")
        if handler.command == "GET":
            return call, {name: values[-1] for name, values in parse_qs(parts.query).items()}
        return call, _body(handler)

    def _advance(self, fields: Fields) -> dict[str, Any]:
        _check_names(fields, _TIMES)
        try:
            self._served.advance(**fields)
        finally:  # a client that does not settle ends it halfway
            write_document(_clock_path(self._store), DiskFiles(), {"now_ms": self._served.kit.clock.now_ms()})
        return self._report_state("advanced")

    def _settle_kit(self, fields: Fields) -> dict[str, Any]:
        _check_names(fields, ())
        self._served.settle()
        return {"now_ms": self._served.kit.clock.now_ms()}

    def _crash(self, fields: Fields) -> dict[str, Any]:
        _check_names(fields, ("down",))
        self._served.crash_broker(down=fields.get("down", 0))
        return self._report_state("crashed")

    def _dead_letters(self, fields: Fields) -> dict[str, Any]:
        _check_names(fields, ("group",))
        if "group" not in fields:
            raise _Refused(400, "expected ?group=NAME")
        letters = self._served.kit.dead_letters(fields["group"])
        return {"dead_letters": [_row(str(fields["group"]), letter) for letter in letters]}

    def _schedules(self, fields: Fields) -> dict[str, Any]:
        _check_names(fields, ())
        return {"schedules": [schedule_row(schedule) for schedule in self._served.kit.broker.schedules()]}

    def _set_schedule(self, fields: Fields) -> dict[str, Any]:
        _check_names(fields, _SCHEDULE)
        if missing := [name for name in _SCHEDULE[:2] if name not in fields]:
            raise _Refused(400, f"expected the fields {', '.join(missing)}")
        self._served.kit.broker.set_schedule(**fields)
        return self._schedules({})

    def _change_schedule(self, change: str, fields: Fields) -> dict[str, Any]:
        _check_names(fields, ("name",))
        getattr(self._served.kit.broker, f"{change}_schedule")(fields.get("name", ""))
        return self._schedules({})

    def _report_state(self, state: str) -> dict[str, Any]:
        row = {"now_ms": self._served.kit.clock.now_ms()}
        self._changed({"state": state, **row})
        return row


def _body(handler: BaseHTTPRequestHandler) -> dict[str, Any]:
    length = handler.headers.get("Content-Length", "0")
    if not length.isdecimal() or int(length) > _MOST_BYTES:
        raise _Refused(400, f"Content-Length: expected at most {_MOST_BYTES}, found {length:.80}")
    raw = handler.rfile.read(int(length))
    try:
        fields = json.loads(raw) if raw else {}
    except ValueError as error:
        raise _Refused(400, f"expected JSON: {error}") from error
    if not isinstance(fields, dict):
        raise _Refused(400, f"expected a JSON object, found {fields!r:.80}")
    return fields


def _check_names(fields: Fields, names: tuple[str, ...]) -> None:
    if unknown := sorted(fields.keys() - set(names)):
        raise _Refused(400, f"unknown: {', '.join(unknown):.80}; expected {', '.join(names) or 'no field'}")


def _row(group: str, letter: StoredMessage) -> dict[str, Any]:
    from librmq.diagnosis.deadletters import given_up

    return {
        "group": group,
        "original_topic": given_up(group, letter).original_topic,
        "unique_key": letter.unique_key,
        "reconsume_times": letter.reconsume_times,
        "store_timestamp_ms": letter.store_timestamp_ms,
        "body_b64": base64.b64encode(letter.body).decode(),
        "properties": dict(letter.properties),
    }
