"""A link of a replica to its master that a test cuts, slows down, or breaks in the middle of a record."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar, cast

from librmq.clock import ManualClock
from librmq.errors import BrokerUnreachableError
from librmq.protocol import Endpoint, LogBytes, Request

R = TypeVar("R")


class ReplicaLink(Endpoint):
    """An `Endpoint` in front of a master: pass it to `Replica.open` as the master."""

    def __init__(self, master: Endpoint, clock: ManualClock) -> None:
        self.master = master
        self.is_cut = False
        self.seconds = 0.0
        """Seconds that each copy takes."""
        self.most_bytes: int | None = None
        """Number of bytes after which the link breaks, even in the middle of a record."""
        self._clock = clock

    def call(self, request: Request[R], /) -> R:
        """Forward a request now or later, or fail."""
        if self.is_cut:
            raise BrokerUnreachableError("the master cannot be reached: the link is cut")
        answer = self.master.call(request)
        if self.seconds and isinstance(answer, LogBytes) and answer.data:
            self._clock.advance(seconds=self.seconds)
        most_bytes = self.most_bytes
        if most_bytes is not None and isinstance(answer, LogBytes) and len(answer.data) > most_bytes:
            self.most_bytes, self.is_cut = None, True
            return cast(R, replace(answer, data=answer.data[:most_bytes]))
        return answer

    def cut(self) -> None:
        """Let all calls fail until `restore`."""
        self.is_cut = True

    def restore(self) -> None:
        """Let calls through again. The replica notices at its next attempt, or at `Replica.follow`."""
        self.is_cut, self.most_bytes = False, None
