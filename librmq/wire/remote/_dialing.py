"""Opens connections: looks host names up, and connects over TCP or locally."""

import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from librmq.clock import Clock
from librmq.errors import BrokerUnreachableError
from librmq.runtime.locks import Lock
from librmq.wire.remote._connection import AccessKeys, Connection, Requested, Transport
from librmq.wire.remote._connections import Dial
from librmq.wire.remoting._frames import FrameSocket, limit_time

OpenSocket = Callable[[tuple[str, int], float], socket.socket]
"""Opens a connection to host and port within a time in seconds. Raises `OSError`."""
# ---- host names, looked up in threads, because a look-up has no time limit

_FRESH_S: Final = 5.0
"""So long a look-up counts, since the route of each topic names the same brokers."""
_MOST_AT_ONCE: Final = 64


class _Known:
    __slots__ = ("begin_s", "ended", "error", "found", "is_late")

    def __init__(self) -> None:
        self.begin_s = 0.0
        """When the last look-up began."""
        self.found: tuple[str, ...] = ()
        self.error: OSError | None = None
        self.ended: threading.Event | None = None
        """Set when the look-up under way ends; None if none is."""
        self.is_late = False
        """Whether a caller has waited in vain for the look-up under way."""


class HostNames:
    """Addresses by name, kept until a later look-up finds others. Thread-safe."""

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        """Wait up to ``timeout_s`` for a look-up."""
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = Lock()
        self._known: dict[str, _Known] = {}

    def resolve_all(self, addresses: Iterable[str]) -> None:
        """Look up the names in ``host:port`` again, so that later connections need not wait for that.

        Waits for all of them together up to the time of one look-up; what is not known by then is left to `resolve`.
        """
        rest_s = self._timeout_s
        deadline = self._clock.monotonic() + rest_s
        hosts = list(filter(self._is_old, dict.fromkeys(split_address(address)[0] for address in addresses)))
        for begin in range(0, len(hosts), _MOST_AT_ONCE):
            begun = [self._begin_lookup(host) for host in hosts[begin : begin + _MOST_AT_ONCE]]
            for lookup, ended in begun:
                if ended is not None:
                    lookup.is_late = not self._clock.wait(ended, rest_s)
                    rest_s = max(0.0, deadline - self._clock.monotonic())
            if not rest_s:
                return

    def _is_old(self, host: str) -> bool:
        lookup = self._known.get(host)
        is_fresh = lookup is not None and 0 <= self._clock.monotonic() - lookup.begin_s < _FRESH_S
        return not is_fresh and not _is_number(host)

    def resolve(self, host: str) -> tuple[str, ...]:
        """Return the addresses of a host: a number itself, or what was found of a name last.

        Raises:
            BrokerUnreachableError: The name is unknown, or its look-up takes too long.
        """
        if _is_number(host):
            return (host,)
        lookup = self._known.get(host)
        if lookup is None or not lookup.found:
            lookup = self._look_up(host)
        if lookup.found:
            return lookup.found
        why = f"its look-up takes more than {self._timeout_s:.3g} s" if lookup.error is None else str(lookup.error)
        raise BrokerUnreachableError(f"the host {host} can't be found: {why}")

    def _look_up(self, host: str) -> _Known:
        lookup, ended = self._begin_lookup(host)
        if ended is not None:
            lookup.is_late = not self._clock.wait(ended, self._timeout_s)
        return lookup

    def _begin_lookup(self, host: str) -> tuple[_Known, threading.Event | None]:
        """Begin to look a name up, or join the look-up under way, and return its end; None after a wait in vain."""
        with self._lock:
            lookup = self._known.setdefault(host, _Known())
            if lookup.ended is None:
                ended = lookup.ended = threading.Event()
                lookup.is_late, lookup.begin_s = False, self._clock.monotonic()
                thread = threading.Thread(
                    target=self._run_lookup, args=(host, lookup, ended), daemon=True, name=f"find {host}"
                )
                thread.start()
            elif lookup.is_late:
                return lookup, None
            return lookup, lookup.ended

    def _run_lookup(self, host: str, lookup: _Known, ended: threading.Event) -> None:
        try:
            rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            lookup.error = error if isinstance(error, OSError) else OSError(str(error))
        else:
            lookup.found, lookup.error = tuple(dict.fromkeys(str(row[4][0]) for row in rows)), None
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
        return _begin_reading(Connection(stream, address, keys, requested, lost, timeout_s))

    return dial


def dial_locally(connect: Callable[[], socket.socket], label: str, timeout_s: float) -> Dial:
    """Return a function that opens connections to one process of this machine, whatever the address.

    ``connect`` opens a socket, and raises `BrokerUnreachableError`; ``label`` names the process in errors.
    """

    def dial(address: str, requested: Requested, lost: Callable[[Transport], None]) -> Transport:
        connected = connect()
        limit_time(connected, socket.SO_SNDTIMEO, timeout_s)
        stream = FrameSocket(connected, send_s=timeout_s)
        return _begin_reading(Connection(stream, label, None, requested, lost, timeout_s))

    return dial


def _begin_reading(connection: Connection) -> Connection:
    reader = threading.Thread(target=connection.read, name=f"librmq {connection.address}", daemon=True)
    try:
        reader.start()
    except RuntimeError as error:
        connection.close_unread()
        raise BrokerUnreachableError(f"{connection.address} can't be read: no thread can start: {error}") from error
    return connection
