"""A connection between a replica and its master that can be cut or slowed down."""

from __future__ import annotations

from typing import TypeVar, cast

from librmq.clock import ManualClock
from librmq.errors import BrokerUnreachableError
from librmq.protocol import Endpoint, LogBytes, Request

__all__ = ["ReplicaLink"]

R = TypeVar("R")


class ReplicaLink:
    """An `Endpoint` in front of a master's, for rehearsing failures: pass it to `Replica.open` as the master."""

    def __init__(self, master: Endpoint, clock: ManualClock) -> None:
        self.master = master
        self.is_cut = False
        self.seconds = 0.0
        """Time that each copy takes."""
        self.most_bytes: int | None = None
        """Bytes after which the next copy ends, perhaps in the middle of a record, and the link is cut."""
        self._clock = clock

    def call(self, request: Request[R], /) -> R:
        """Pass a request on, later, or not at all."""
        if self.is_cut:
            raise BrokerUnreachableError("the master cannot be reached: the link is cut")
        answer = self.master.call(request)
        if self.seconds and isinstance(answer, LogBytes) and answer.data:
            self._clock.advance(seconds=self.seconds)
        most = self.most_bytes
        if most is not None and isinstance(answer, LogBytes) and len(answer.data) > most:
            self.most_bytes, self.is_cut = None, True
            return cast(R, LogBytes(answer.data[:most], answer.begin, answer.end))
        return answer

    def cut(self) -> None:
        """Let all calls fail until `restore`."""
        self.is_cut = True

    def restore(self) -> None:
        """Let calls pass again; the replica notices at its next attempt, or at `Replica.follow`."""
        self.is_cut, self.most_bytes = False, None
