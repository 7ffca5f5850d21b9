"""Names of hosts, looked up in threads of their own, because a look-up has no time limit."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Iterable
from typing import Final

from librmq.clock import Clock
from librmq.errors import BrokerUnreachableError
from librmq.runtime.locks import Lock

_FRESH_S: Final = 5.0
"""So long a look-up counts, since the route of each topic names the same brokers."""
_MOST_AT_ONCE: Final = 64


class _Known:
    """What is known of one name."""

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

    def prepare(self, addresses: Iterable[str]) -> None:
        """Look up the names in ``host:port`` again, so that later connections need not wait for that.

        Waits for all of them together up to the time of one look-up; what is not known by then is left to `find`.
        """
        rest_s = self._timeout_s
        deadline = self._clock.monotonic() + rest_s
        hosts = list(filter(self._is_old, dict.fromkeys(split_address(address)[0] for address in addresses)))
        for begin in range(0, len(hosts), _MOST_AT_ONCE):
            begun = [self._begin(host) for host in hosts[begin : begin + _MOST_AT_ONCE]]
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

    def find(self, host: str) -> tuple[str, ...]:
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
        lookup, ended = self._begin(host)
        if ended is not None:
            lookup.is_late = not self._clock.wait(ended, self._timeout_s)
        return lookup

    def _begin(self, host: str) -> tuple[_Known, threading.Event | None]:
        """Begin to look a name up, or join the look-up under way, and return its end; None after a wait in vain."""
        with self._lock:
            lookup = self._known.setdefault(host, _Known())
            if lookup.ended is None:
                ended = lookup.ended = threading.Event()
                lookup.is_late, lookup.begin_s = False, self._clock.monotonic()
                thread = threading.Thread(
                    target=self._run, args=(host, lookup, ended), daemon=True, name=f"find {host}"
                )
                thread.start()
            elif lookup.is_late:
                return lookup, None
            return lookup, lookup.ended

    def _run(self, host: str, lookup: _Known, ended: threading.Event) -> None:
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
