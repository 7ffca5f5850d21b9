"""The connections of one route, one for each address and client: opened, signed with an access key, and reopened.

Opening one looks host names up and connects over TCP or locally. A signed request carries the key's name and an
HMAC-SHA1 of its fields and body. Mirrors ``AclClientRPCHook`` and ``AclUtils``.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from librmq.clock import Clock
from librmq.errors import BrokerUnreachableError, ConfigError, RequestNotSentError
from librmq.override import override
from librmq.runtime.locks import Inherited, Lock
from librmq.wire.remote._connection import Connection, Requested, Transport
from librmq.wire.remoting._frames import Frame, FrameSocket, limit_time

OpenSocket = Callable[[tuple[str, int], float], socket.socket]
"""Opens a connection to host and port within a time in seconds. Raises `OSError`."""

# ---- access keys

_KEY: Final = "AccessKey"
_TOKEN: Final = "SecurityToken"
_SIGNATURE: Final = "Signature"
_UNSIGNED: Final = frozenset((_SIGNATURE, "_UNIQUE_KEY_QUERY"))


class AccessKeys:
    """An access key with its secret, which signs requests. Thread-safe."""

    def __init__(self, access_key: str, secret_key: str, security_token: str | None = None) -> None:
        named: dict[str, object] = {"access_key": access_key, "secret_key": secret_key}
        for name, value in (named | {"security_token": security_token or "none"}).items():
            if not isinstance(value, str) or not value:
                type_name = type(value).__name__ if value else "none"  # a secret stays out of errors
                raise ConfigError(f"{name}: expected text, because a key has a name and a secret: found {type_name}")
        self.access_key = access_key
        self._secret = secret_key.encode()
        self._token = security_token

    @override
    def __repr__(self) -> str:
        return f"AccessKeys({self.access_key!r})"

    def sign(self, frame: Frame) -> None:
        """Add key and signature to the fields of a request."""
        fields = frame.fields
        fields[_KEY] = self.access_key
        if self._token is not None:
            fields[_TOKEN] = self._token
        signed = "".join(fields[name] for name in sorted(fields) if name not in _UNSIGNED).encode("utf-8", "replace")
        digest = hmac.new(self._secret, signed + frame.body, hashlib.sha1).digest()
        fields[_SIGNATURE] = base64.b64encode(digest).decode()


# ---- host names, looked up in threads, because a look-up has no time limit

_FRESH_S: Final = 5.0
"""So long a look-up counts, since the route of each topic names the same brokers."""
_MOST_AT_ONCE: Final = 64


@dataclass(slots=True, eq=False)
class _Lookup:
    started_s: float = 0.0
    """When the last look-up started."""
    addresses: tuple[str, ...] = ()
    error: OSError | None = None
    ended: threading.Event | None = None
    """Set when the look-up under way ends; None if there is none."""
    is_late: bool = False
    """Whether a caller has waited in vain for the look-up under way."""


class HostNames:
    """Addresses by name, kept until a later look-up finds others. Thread-safe."""

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        """Wait up to ``timeout_s`` for a look-up."""
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = Lock()
        self._lookups: dict[str, _Lookup] = {}

    def resolve_all(self, addresses: Iterable[str]) -> None:
        """Look up the names in ``host:port`` again, so that later connections need not wait for that.

        Waits for all of them together up to the time of one look-up; what is not known by then is left to `resolve`.
        """
        left_s = self._timeout_s
        deadline = self._clock.monotonic() + left_s
        hosts = list(filter(self._is_old, dict.fromkeys(split_address(address)[0] for address in addresses)))
        for start in range(0, len(hosts), _MOST_AT_ONCE):
            under_way = [self._start_lookup(host) for host in hosts[start : start + _MOST_AT_ONCE]]
            for lookup, ended in under_way:
                if ended is not None:
                    lookup.is_late = not self._clock.wait(ended, left_s)
                    left_s = max(0.0, deadline - self._clock.monotonic())
            if not left_s:
                return

    def _is_old(self, host: str) -> bool:
        lookup = self._lookups.get(host)
        is_fresh = lookup is not None and 0 <= self._clock.monotonic() - lookup.started_s < _FRESH_S
        return not is_fresh and not _is_number(host)

    def resolve(self, host: str) -> tuple[str, ...]:
        """Return the addresses of a host: a number itself, or what the last look-up of a name has found."""
        if _is_number(host):
            return (host,)
        lookup = self._lookups.get(host)
        if lookup is None or not lookup.addresses:
            lookup, ended = self._start_lookup(host)
            if ended is not None:
                lookup.is_late = not self._clock.wait(ended, self._timeout_s)
        if lookup.addresses:
            return lookup.addresses
        why = f"its look-up takes more than {self._timeout_s:.3g} s" if lookup.error is None else str(lookup.error)
        raise BrokerUnreachableError(f"the host {host} can't be found: {why}")

    def _start_lookup(self, host: str) -> tuple[_Lookup, threading.Event | None]:
        """Start to look a name up, or join the look-up under way; return its end, or None after a wait in vain."""
        with self._lock:
            lookup = self._lookups.setdefault(host, _Lookup())
            if lookup.ended is None:
                ended = lookup.ended = threading.Event()
                lookup.is_late, lookup.started_s = False, self._clock.monotonic()
                thread = threading.Thread(
                    target=self._run_lookup, args=(host, lookup, ended), daemon=True, name=f"find {host}"
                )
                thread.start()
            elif lookup.is_late:
                return lookup, None
            return lookup, lookup.ended

    def _run_lookup(self, host: str, lookup: _Lookup, ended: threading.Event) -> None:
        try:
            rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            lookup.error = error if isinstance(error, OSError) else OSError(str(error))
        else:
            lookup.addresses, lookup.error = tuple(dict.fromkeys(str(row[4][0]) for row in rows)), None
        with self._lock:
            lookup.ended = None
        ended.set()


def split_address(address: str) -> tuple[str, str]:
    """Return the host and the port of ``host:port``, where an IPv6 host may have brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


# ---- connections

_SILENT_S: Final = 180.0


def dial_by_tcp(
    tls: ssl.SSLContext | None,
    keys: AccessKeys | None,
    timeout_s: float,
    find: Callable[[str], tuple[str, ...]],
    open_socket: OpenSocket = socket.create_connection,
) -> Dial:
    """Return a function that opens connections over TCP, with TLS and signed requests if wanted.

    ``find`` returns the addresses of a host.
    """

    def connected_to(host: str, port: int) -> socket.socket:
        *others, last = find(host)
        for other in others:
            with suppress(OSError):
                return open_socket((other, port), timeout_s)
        return open_socket((last, port), timeout_s)

    def dial(address: str, requested: Requested, lost: Callable[[Transport], None]) -> Transport:
        host, port = split_address(address)
        try:
            connected = connected_to(host, int(port))
        except (OSError, ValueError, OverflowError) as error:
            raise BrokerUnreachableError(f"{address} can't be reached: {error}") from error
        stream = FrameSocket(connected, idle_s=_SILENT_S, send_s=timeout_s)
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.settimeout(None)
            limit_time(connected, socket.SO_SNDTIMEO, timeout_s)
            if tls is not None:
                stream.begin_tls(tls, host)
        except OSError as error:
            stream.close()
            raise BrokerUnreachableError(f"{address}: TLS has failed: {error}") from error
        sign = None if keys is None else keys.sign
        return Connection(stream, address, sign, requested, lost, timeout_s).begin_reading()

    return dial


def dial_locally(connect: Callable[[], socket.socket], label: str, timeout_s: float) -> Dial:
    """Return a function that opens connections to one process of this machine, whatever the address.

    ``connect`` opens a socket, and raises `BrokerUnreachableError`; ``label`` names the process in errors.
    """

    def dial(address: str, requested: Requested, lost: Callable[[Transport], None]) -> Transport:
        connected = connect()
        limit_time(connected, socket.SO_SNDTIMEO, timeout_s)
        stream = FrameSocket(connected, send_s=timeout_s)
        return Connection(stream, label, None, requested, lost, timeout_s).begin_reading()

    return dial


Dial = Callable[[str, Requested, Callable[[Transport], None]], Transport]
"""Opens a connection to ``host:port``; ``lost(transport)`` is called once at its end.

Raises:
    BrokerUnreachableError: There is nothing at that address.
"""

_BACK_OFF_S: Final = (0.1, 5.0)
_SHORT_S: Final = 1.0
"""After a connection that ends sooner, the next one waits."""
_PATIENCE_S: Final = 0.05
_HANDLER: Final = "!"
"""In place of a client id: the connection for signal handlers that interrupt a request on the one before."""
_Key = tuple[str, str]


class _Pause(NamedTuple):
    """A time without a try after a connection that failed."""

    until: float
    back_off_s: float
    why: BrokerUnreachableError


class _Line:
    """The connection of one client to one address, open or not."""

    __slots__ = ("is_dropped", "lock", "opened_at", "opening", "pause", "transport")

    def __init__(self) -> None:
        # Held while the connection is opened, so that the callers of one address open one connection and not many.
        self.lock = Lock()
        self.opening: Future[Transport] | None = None  # the last one in a thread of its own
        self.transport: Transport | None = None
        self.opened_at = 0.0
        self.is_dropped = False
        self.pause: _Pause | None = None


@dataclass(eq=False, repr=False)
class Connections:
    """The open connections. Thread-safe."""

    dial: Dial
    """Opens one."""
    monotonic: Callable[[], float]
    """The time in seconds."""
    requested: Callable[[str, str, Transport, Frame], None]
    """Gets address, client id, connection and frame of a request of the server."""
    lost: Callable[[str, str, Transport], None]
    """Gets address, client id and connection at its end."""
    back_off_s: tuple[float, float] = _BACK_OFF_S
    """Seconds to wait after the first failure, and at most. No connection is tried meanwhile."""
    is_hurried: Callable[[], bool] = lambda: False
    """Whether others wait for the caller of `get`, because it holds the runner's lock."""
    patience_s: float = _PATIENCE_S
    """How long such a caller waits for a connection, which is opened in a thread of its own."""
    opened_late: Callable[[str, str], object] = lambda *_: None
    """Gets address and client id of a connection that opens after its caller has stopped waiting."""

    def __post_init__(self) -> None:
        self._is_closed = False
        self._remove_all()
        _inherited.add(self)

    def _remove_all(self) -> None:
        # A forked child starts without connections too, because threads of the parent hold the locks of the parent's.
        self._lock = Lock()
        self._lines: dict[_Key, _Line] = {}
        self._pauses: dict[str, _Pause] = {}  # of addresses that could not be reached

    def get_open(self, address: str) -> Transport | None:
        """Return the connection to an address for requests without a client, if it is open."""
        line = self._lines.get((address, ""))
        transport = None if line is None else line.transport
        return transport if transport is not None and transport.is_open and not transport.is_interrupted else None

    def get(self, address: str, client_id: str = "") -> Transport:
        """Return the connection of a client to an address, or open it. An empty id is for requests without a client.

        Raises:
            BrokerUnreachableError: It can't be opened, or could not a moment ago; the route is closed; or others wait
                for the caller, and the connection is not open yet.
        """
        key = address, client_id
        line = self._lines.get(key)
        if line is not None and (transport := line.transport) is not None and transport.is_open:
            if not transport.is_interrupted or client_id.strip(_HANDLER):
                return transport
            return self.get(address, client_id + _HANDLER)
        with self._lock:
            if self._is_closed:
                raise RequestNotSentError(f"{address}: the route was closed; make a new one with librmq.connect")
            line = self._lines.setdefault(key, _Line())
        return self._open_in_thread(key, line) if self.is_hurried() else self._open(key, line)

    def _open(self, key: _Key, line: _Line) -> Transport:
        with line.lock:
            if line.transport is not None and line.transport.is_open:
                return line.transport
            self._check_pauses(line, key[0])
            line.transport = self._dial_for(key, line)
        if line.is_dropped or self._is_closed:
            line.transport.close()
        return line.transport

    def _open_in_thread(self, key: _Key, line: _Line) -> Transport:
        """Open a connection in a thread, and wait a moment for it, but not again nor for a host that was down."""
        address, opening, patience_s, is_first = key[0], line.opening, 0.0, False
        if opening is None or opening.done():
            self._check_pauses(line, address)
            patience_s = 0.0 if address in self._pauses else self.patience_s
            opening = Future()
            thread = threading.Thread(
                target=self._run_opening, args=(opening, key, line), name=f"librmq connect {address}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                raise BrokerUnreachableError(f"{address} can't be reached: no thread can start: {error}") from error
            line.opening = opening
            is_first = True
        try:
            return opening.result(patience_s)
        except TimeoutError:
            if is_first:
                opening.add_done_callback(lambda done: done.exception() is not None or self.opened_late(*key))
            raise BrokerUnreachableError("the connection is not open yet: try again") from None

    def _run_opening(self, opening: Future[Transport], key: _Key, line: _Line) -> None:
        try:
            opening.set_result(self._open(key, line))
        except BaseException as error:
            # Pass every error on, Ctrl-C included: the callers wait for this result and raise it.
            opening.set_exception(error)

    def _check_pauses(self, line: _Line, address: str) -> None:
        for pause in (line.pause, self._pauses.get(address)):
            if pause is not None and self.monotonic() < pause.until:
                raise RequestNotSentError(str(pause.why))

    def _dial_for(self, key: _Key, line: _Line) -> Transport:
        address, client_id = key
        first_s, most_s = self.back_off_s

        def requested(transport: Transport, frame: Frame) -> None:
            self.requested(address, client_id, transport, frame)

        def lost(transport: Transport) -> None:
            # A server that accepts and hangs up must not be called in a loop, so an early end is followed by a pause
            # like a failed opening.
            if not transport.was_interrupted and self.monotonic() - line.opened_at < _SHORT_S:
                why = BrokerUnreachableError(f"the connection to {transport.address} ended soon after it was opened")
                line.pause = _Pause(self.monotonic() + first_s, first_s, why)
            self.lost(address, client_id, transport)

        line.opened_at, line.pause = self.monotonic(), None
        try:
            transport = self.dial(address, requested, lost)
        except BrokerUnreachableError as error:
            before, now = self._pauses.get(address), self.monotonic()
            # If another client's try has failed meanwhile, its pause stands: doubling it for each client would grow
            # with their number.
            if before is None or now >= before.until:
                back_off_s = first_s if before is None else min(most_s, 2 * before.back_off_s)
                self._pauses[address] = _Pause(now + back_off_s, back_off_s, error)
            raise
        self._pauses.pop(address, None)
        return transport

    def drop(self, client_id: str, address: str) -> None:
        """Close the connection of a client."""
        with self._lock:
            line = self._lines.pop((address, client_id), None)
        if line is not None:
            # The connection can be being opened at this moment; the mark lets that thread close it.
            line.is_dropped = True
            if line.transport is not None:
                line.transport.close()

    def close(self) -> None:
        """Close all connections; no new one is opened."""
        with self._lock:
            self._is_closed = True
            lines = list(self._lines.values())
        for line in lines:
            transport = line.transport
            if transport is not None:
                transport.close()


_inherited: Final[Inherited[Connections]] = Inherited(Connections._remove_all)
