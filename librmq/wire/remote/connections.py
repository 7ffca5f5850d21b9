"""The connections of one route: one for each address and client, shared by its users, and reopened with a back-off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from librmq.errors import BrokerUnreachableError
from librmq.wire.remote.transport import Dial, Transport
from librmq.wire.remoting.frames import Frame

__all__ = ["Connections"]

FIRST_BACK_OFF_S: Final = 0.1
LONGEST_BACK_OFF_S: Final = 5.0
_SHORT_S: Final = 1.0
"""After a connection that ends sooner, the next one waits."""
_Key = tuple[str, str]


class _Line:
    """What is known of one connection, open or not."""

    __slots__ = ("is_dropped", "lock", "opened_at", "rest", "transport")

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held while the connection is opened
        self.transport: Transport | None = None
        self.opened_at = 0.0
        self.is_dropped = False
        self.rest: _Rest | None = None


class _Rest(NamedTuple):
    """A time without a try after a connection that failed."""

    until: float
    back_off_s: float
    why: BrokerUnreachableError


class Connections:
    """The open connections. Thread-safe."""

    def __init__(
        self,
        dial: Dial,
        monotonic: Callable[[], float],
        requested: Callable[[str, str, Transport, Frame], None],
        lost: Callable[[str, str, Transport], None],
        back_off_s: tuple[float, float] = (FIRST_BACK_OFF_S, LONGEST_BACK_OFF_S),
    ) -> None:
        """Open connections by ``dial``.

        Args:
            dial: Opens one.
            monotonic: The time in seconds.
            requested: Gets address, client id, connection and frame of a request of the server.
            lost: Gets address, client id and connection at its end.
            back_off_s: Seconds to wait after the first failure, and at most. No connection is tried meanwhile.
        """
        self._dial = dial
        self._monotonic = monotonic
        self._requested = requested
        self._lost = lost
        self._back_off_s = back_off_s
        self._lock = threading.Lock()
        self._lines: dict[_Key, _Line] = {}
        self._rests: dict[str, _Rest] = {}  # of addresses that could not be reached
        self._is_closed = False

    def get(self, address: str, client_id: str = "") -> Transport:
        """Return the connection of a client to an address, or open it. An empty id is for requests without a client.

        Raises:
            BrokerUnreachableError: It can't be opened, or could not a moment ago; or the route is closed.
        """
        key = address, client_id
        line = self._lines.get(key)
        if line is not None and (found := line.transport) is not None and found.is_open:
            return found
        with self._lock:
            if self._is_closed:
                raise BrokerUnreachableError(f"{address}: the route was closed; make a new one with librmq.connect")
            line = self._lines.setdefault(key, _Line())
        with line.lock:
            if line.transport is not None and line.transport.is_open:
                return line.transport
            for rest in (line.rest, self._rests.get(address)):
                if rest is not None and self._monotonic() < rest.until:
                    raise BrokerUnreachableError(str(rest.why))
            line.transport = self._open(key, line)
        if line.is_dropped or self._is_closed:
            line.transport.close()
        return line.transport

    def _open(self, key: _Key, line: _Line) -> Transport:
        address, client_id = key
        first_s, most_s = self._back_off_s

        def requested(transport: Transport, frame: Frame) -> None:
            self._requested(address, client_id, transport, frame)

        def lost(transport: Transport) -> None:
            if self._monotonic() - line.opened_at < _SHORT_S:  # a server that hangs up must not be called in a loop
                why = BrokerUnreachableError(f"the connection to {address} ended soon after it was opened")
                line.rest = _Rest(self._monotonic() + first_s, first_s, why)
            self._lost(address, client_id, transport)

        line.opened_at, line.rest = self._monotonic(), None
        try:
            opened = self._dial(address, requested, lost)
        except BrokerUnreachableError as error:
            before, now = self._rests.get(address), self._monotonic()
            if before is None or now >= before.until:  # otherwise another client's try has failed meanwhile
                back_off_s = first_s if before is None else min(most_s, 2 * before.back_off_s)
                self._rests[address] = _Rest(now + back_off_s, back_off_s, error)
            raise
        self._rests.pop(address, None)
        return opened

    def drop(self, client_id: str, address: str) -> None:
        """Close the connection of a client."""
        with self._lock:
            line = self._lines.pop((address, client_id), None)
        if line is not None:
            line.is_dropped = True  # it can be opened at this moment
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
