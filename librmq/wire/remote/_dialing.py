"""Opens connections: looks host names up, connects over TCP or locally, and signs requests with an access key.

A signed request carries the key's name and an HMAC-SHA1 of its fields and body. Mirrors ``AclClientRPCHook`` and
``AclUtils``.
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
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from librmq.clock import Clock
from librmq.errors import BrokerUnreachableError, ConfigError
from librmq.override import override
from librmq.runtime.locks import Lock
from librmq.wire.remote._connection import Connection, Requested, Transport
from librmq.wire.remote._connections import Dial
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
        for name, value in (("access_key", access_key), ("secret_key", secret_key)):
            if not value:
                raise ConfigError(f"{name}: expected text, because a key has a name and a secret: found none")
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
        """Return the addresses of a host: a number itself, or what the last look-up of a name has found.

        Raises:
            BrokerUnreachableError: The name is unknown, or its look-up takes too long.
        """
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
