"""The control port of ``serve --clock manual``: tests in any language move its clock over HTTP.

The port listens on loopback. A page in a browser can send requests there too, so a request with an ``Origin``, or with
another ``Host``, is refused.
"""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlsplit

from librmq.diagnosis.deadletters import given_up
from librmq.errors import ConfigError, RmqError
from librmq.message.message import StoredMessage
from librmq.runtime.event_log import EventLog
from librmq.testing import Kit
from librmq.testing.evidence import UnknownGroupError
from librmq.testing.served import NotSettledError, ServedKit, ServedRemoting, WireClient
from librmq.wire.remoting import listen

if TYPE_CHECKING:
    from librmq.wire.grpc import GrpcServer


_log = EventLog("librmq.cli")

_MOST_BYTES: Final = 64 << 10
_READ_S: Final = 10
_TIMES: Final = ("hours", "minutes", "seconds", "ms")


class Ports:
    """The servers of a served kit, for both protocols; closed, it is followed by another with the same ports."""

    def __init__(
        self,
        kit: Kit,
        client_of: Callable[[str], WireClient],
        grpc: int | None,
        listening: socket.socket | None,
        changed: Callable[[str, str, bool], None],
        former: Ports | None,
    ) -> None:
        """Serve on the port ``grpc`` and on the socket ``listening``, or on the ports of a ``former`` one."""
        self.grpc: GrpcServer | None = None
        self.remoting: ServedRemoting | None = None
        if grpc is not None:
            from librmq.wire.grpc import GrpcServer

            before = None if former is None else former.grpc
            port = grpc if before is None else before.port
            self.grpc = GrpcServer(kit.broker, port=port, endpoints=client_of, changed=changed, former=before)
        if listening is not None:
            last = None if former is None else former.remoting
            socket_of = listening if last is None else listen(port=last.port)
            self.remoting = ServedRemoting(kit, socket_of, client_of, last, changed)
        self._servers = [server for server in (self.grpc, self.remoting) if server is not None]
        self.port = self._servers[0].port

    @property
    def address(self) -> str:
        """``host:port`` of each."""
        return " and ".join(server.address for server in self._servers)

    def is_settled(self) -> bool:
        """Return whether no client has work left until time passes."""
        return all(server.is_settled() for server in self._servers)

    def missing(self) -> list[str]:
        """Return the clients that are not back after a fault."""
        return [client for server in self._servers for client in server.missing()]

    def close(self, timeout: float = 5) -> bool:
        """Cut all clients off; return whether all calls have ended within ``timeout`` seconds for each server."""
        have_ended = [server.close(timeout) for server in self._servers]
        return all(have_ended)


class _Refused(Exception):
    """A request is not answered, with a status of HTTP."""

    def __init__(self, status: int, what: str) -> None:
        super().__init__(what)
        self.status = status


class Control:
    """Answers requests about a served kit, one at a time. Listens from the start."""

    def __init__(self, served: ServedKit, port: int, changed: Callable[[dict[str, Any]], None]) -> None:
        """``changed`` gets a line for each change of state that a request makes.

        Raises:
            ConfigError: The port is taken.
        """
        self._served = served
        self._changed = changed
        self._calls: dict[tuple[str, str], Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            ("POST", "/advance"): self._advance,
            ("POST", "/settle"): self._settle,
            ("POST", "/crash"): self._crash,
            ("GET", "/dead-letters"): self._dead_letters,
        }
        control = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _READ_S  # of a client that sends nothing

            def do_GET(self) -> None:
                control._respond(self)

            do_POST = do_GET  # noqa: N815 (a name of the base class)

            def log_message(self, format: str, *arguments: object) -> None:
                _log.debug("control: %(what)s", what=format % arguments)

        try:
            self._server = HTTPServer(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--control {port}: can't listen on 127.0.0.1: {error}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="librmq control", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """``host:port`` for requests."""
        return f"127.0.0.1:{self._server.server_port}"

    def close(self, timeout: float) -> bool:
        """Answer no more requests; return whether the last one has ended within ``timeout`` seconds."""
        threading.Thread(target=self._server.shutdown, name="librmq control stop", daemon=True).start()
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._server.server_close()
        return True

    # ---- requests

    def _respond(self, handler: BaseHTTPRequestHandler) -> None:
        try:
            status, body = 200, self._call(handler)
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

    def _call(self, handler: BaseHTTPRequestHandler) -> dict[str, Any]:
        host = handler.headers.get("Host", "")
        if "Origin" in handler.headers or host not in (self.address, f"localhost:{self._server.server_port}"):
            raise _Refused(403, f"expected Host: {self.address} and no Origin, found Host: {host:.80}")
        parts = urlsplit(handler.path)
        call = self._calls.get((str(handler.command), parts.path))
        if call is None:
            requests = ", ".join(f"{method} {path}" for method, path in self._calls)
            raise _Refused(404, f"expected {requests}; found {handler.command} {parts.path:.80}")
        if handler.command == "GET":
            return call({name: values[-1] for name, values in parse_qs(parts.query).items()})
        return call(_body(handler))

    def _advance(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        _check_names(fields, _TIMES)
        self._served.advance(**fields)
        return self._state("advanced")

    def _settle(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        _check_names(fields, ())
        self._served.settle()
        return {"now_ms": self._served.kit.clock.now_ms()}

    def _crash(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        _check_names(fields, ("down",))
        self._served.crash_broker(down=fields.get("down", 0))
        return self._state("crashed")

    def _dead_letters(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        _check_names(fields, ("group",))
        if "group" not in fields:
            raise _Refused(400, "expected ?group=NAME")
        letters = self._served.kit.dead_letters(fields["group"])
        return {"dead_letters": [_row(str(fields["group"]), letter) for letter in letters]}

    def _state(self, state: str) -> dict[str, Any]:
        row = {"now_ms": self._served.kit.clock.now_ms()}
        self._changed({"state": state, **row})
        return row


def _body(handler: BaseHTTPRequestHandler) -> dict[str, Any]:
    """Return the fields of a request; none without a body."""
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


def _check_names(fields: Mapping[str, Any], names: tuple[str, ...]) -> None:
    if unknown := sorted(fields.keys() - set(names)):
        raise _Refused(400, f"unknown: {', '.join(unknown):.80}; expected {', '.join(names) or 'no field'}")


def _row(group: str, letter: StoredMessage) -> dict[str, Any]:
    return {
        "group": group,
        "original_topic": given_up(group, letter).original_topic,
        "unique_key": letter.unique_key,
        "reconsume_times": letter.reconsume_times,
        "store_timestamp_ms": letter.store_timestamp_ms,
        "body_b64": base64.b64encode(letter.body).decode(),
        "properties": dict(letter.properties),
    }
