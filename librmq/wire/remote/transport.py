"""A connection to a server as the rest of the client sees it: requests out, answers and the server's requests in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from librmq.errors import RmqError
from librmq.wire.remoting.frames import Frame

Ended = Callable[[Frame | RmqError], None]
"""Gets the answer to a request, or the error that took its place. Called by any thread, and must not wait."""


class Transport(Protocol):
    """One open connection. Thread-safe."""

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        ...

    def request(self, frame: Frame, timeout_s: float) -> Frame:
        """Send a request, and wait for its answer.

        Raises:
            BrokerUnreachableError: No answer came in time, or the connection has ended.
            MalformedError: The request does not fit into a frame; nothing was sent.
        """
        ...

    def send(self, frame: Frame, ended: Ended) -> None:
        """Send a request, and let ``ended`` have its outcome.

        Raises:
            BrokerUnreachableError: The connection has ended; ``ended`` is not called.
        """
        ...

    def send_one_way(self, frame: Frame) -> None:
        """Send a request without an answer.

        Raises:
            BrokerUnreachableError: The connection has ended.
        """
        ...

    def send_answer(self, frame: Frame) -> None:
        """Send the answer to a request of the server; it is lost with the connection."""
        ...

    def close(self) -> None:
        """End the connection. A repetition does nothing."""
        ...


Requested = Callable[[Transport, Frame], None]
"""Gets a request of the server. Must not wait."""
Dial = Callable[[str, Requested, Callable[[Transport], None]], Transport]
"""Opens a connection to ``host:port``; ``lost(transport)`` is called once at its end.

Raises:
    BrokerUnreachableError: There is nothing at that address.
"""
