"""Bounds on the calls that are answered at once, so that one client leaves room for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from librmq.runtime.locks import Lock
from librmq.wire.grpc.codes import Code, Refusal


class CallBounds:
    """Counts calls by connection, by address and in all. Thread-safe."""

    def __init__(self, what: str, *, of_connection: int, of_address: int, in_all: int) -> None:
        """Bound calls, which errors call ``what``, to these numbers at a time."""
        self._what = what
        self._bounds = of_connection, of_address, in_all
        self._held: Counter[str] = Counter()
        self._lock = Lock()

    @contextmanager
    def hold(self, peer: str) -> Iterator[None]:
        """Count a call of ``peer``, such as ``ipv4:10.0.0.7:51234``, for as long as the block runs.

        Raises:
            Refusal: There are as many calls already.
        """
        names = peer, peer.rpartition(":")[0] + ":", ""
        with self._lock:
            for name, bound in zip(names, self._bounds, strict=True):
                if self._held[name] >= bound:
                    scope = "in all" if not name else f"of {name.rstrip(':')}"
                    raise Refusal(
                        Code.TOO_MANY_REQUESTS, f"{bound} {self._what} {scope} are open already; end some first"
                    )
            self._held.update(names)
        try:
            yield
        finally:
            with self._lock:
                self._held -= Counter(names)  # drops names at 0
