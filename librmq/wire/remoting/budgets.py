"""What all connections of one server may hold together, and which one goes first when that is too much."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Final

from librmq.runtime.locks import Lock
from librmq.wire.remoting.channels import Channel

CONNECTIONS: Final = 1_000
"""Connections of one server."""
HELD_BYTES: Final = 256 << 20
"""Bytes of frames that are incomplete or being answered, over all connections."""
FRAME_SECONDS: Final = 60
"""Seconds from the first byte of a frame to its last."""


@dataclass(slots=True)
class _Share:
    number: int
    """Connections are numbered in the order in which they come."""
    held: int = 0
    """Bytes of frames that are incomplete or being answered."""
    has_asked: bool = False
    """Whether a whole frame has come."""
    is_ending: bool = False
    """Whether it was closed to make room for others."""


class Budgets:
    """The shares of all connections of one server. Thread-safe.

    A connection beyond a limit does not stop the others. Room is made at the expense of the address with the most,
    where addresses differ, and there of the connection that holds the most bytes, or that has never asked anything.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._shares: dict[Channel, _Share] = {}
        self._numbers = itertools.count()
        self._held = 0
        self._ending = 0

    def add(self, channel: Channel) -> Channel | None:
        """Add a connection; return the one to close for it, which is ``channel`` if no other has to make room."""
        with self._lock:
            self._shares[channel] = _Share(next(self._numbers))
            if len(self._shares) - self._ending <= CONNECTIONS:
                return None
            counts = Counter(other.peer[0] for other, share in self._shares.items() if not share.is_ending)
            own_count = counts[channel.peer[0]]

            def rank(item: tuple[Channel, _Share]) -> tuple[int, bool, int]:
                other, share = item
                return counts[other.peer[0]], not share.has_asked, share.number if share.has_asked else -share.number

            others = [
                (other, share)
                for other, share in self._shares.items()
                if other is not channel
                and not share.is_ending
                and (not share.has_asked or counts[other.peer[0]] > own_count)
            ]
            excess = max(others, key=rank)[0] if others else channel
            self._end(excess)
            return excess

    def hold(self, channel: Channel, held: int, *, has_asked: bool) -> Channel | None:
        """Set the bytes that a connection holds; return the connection to close because of them."""
        with self._lock:
            share = self._shares.get(channel)
            if share is None or share.is_ending:
                return None
            share.has_asked |= has_asked
            self._held += held - share.held
            share.held = held
            if self._held <= HELD_BYTES:
                return None
            sums: Counter[str] = Counter()
            for other, its in self._shares.items():
                sums[other.peer[0]] += its.held
            largest = max(self._shares, key=lambda other: (sums[other.peer[0]], self._shares[other].held))
            self._end(largest)
            return largest

    def remove(self, channel: Channel) -> None:
        """Remove a connection that has ended."""
        with self._lock:
            self._end(channel)
            self._ending -= channel in self._shares
            self._shares.pop(channel, None)

    def channels(self) -> list[Channel]:
        """Return all connections."""
        with self._lock:
            return list(self._shares)

    def _end(self, channel: Channel) -> None:
        share = self._shares.get(channel)
        if share is not None and not share.is_ending:
            share.is_ending = True
            self._ending += 1
            self._held -= share.held
            share.held = 0
