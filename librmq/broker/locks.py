"""Queue locks: which client of a group consumes a queue in order.

Mirrors ``RebalanceLockManager``. Locks are only in memory; each use checks whether a lock has expired.
"""

from __future__ import annotations

from collections.abc import Iterable

from librmq.message.message import MessageQueue


class QueueLocks:
    """The locks of one broker. Called under the runner's lock."""

    def __init__(self, expiry_ms: int) -> None:
        self._expiry_ms = expiry_ms
        self._held: dict[tuple[str, MessageQueue], tuple[str, int]] = {}  # client id, time of the last renewal

    def holder(self, group: str, queue: MessageQueue, now_ms: int) -> str | None:
        """Return the id of the client that holds the queue, None if there is none."""
        held = self._held.get((group, queue))
        if held is None or now_ms - held[1] > self._expiry_ms:
            return None
        if held[1] > now_ms:  # the clock was set back: this must not prolong the lock
            self._held[group, queue] = held[0], now_ms
        return held[0]

    def lock(self, group: str, client_id: str, queues: Iterable[MessageQueue], now_ms: int) -> frozenset[MessageQueue]:
        """Lock queues or renew their locks, and return the queues that the client holds then."""
        locked = frozenset(queue for queue in queues if self.holder(group, queue, now_ms) in (None, client_id))
        for queue in locked:
            self._held[group, queue] = client_id, now_ms
        return locked

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Release the client's locks."""
        for queue in queues:
            held = self._held.get((group, queue))
            if held is not None and held[0] == client_id:
                del self._held[group, queue]
