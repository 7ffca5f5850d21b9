"""The locks of ordered queues: which client of a group consumes a queue in order."""

from __future__ import annotations

from collections.abc import Callable

from librmq.config import wrong_kind
from librmq.errors import ConfigError
from librmq.message import MessageQueue
from librmq.protocol import LockQueues, UnlockQueues
from librmq.runtime.event_log import EventLog

_log = EventLog("librmq.broker")


class QueueLocks:
    """Which client of a group consumes a queue in order, in memory. Called under the runner's lock.

    Each use checks whether a lock has expired, so no step has to run for a client that is lost. Mirrors
    ``RebalanceLockManager`` and the locking half of ``AdminBrokerProcessor``.
    """

    def __init__(self, expiry_ms: int, now_ms: Callable[[], int]) -> None:
        """Return a table without locks; each expires ``expiry_ms`` after its last renewal, by ``now_ms()``.

        Raises:
            ConfigError: ``expiry_ms`` is not a whole number of at least 0.
            TypeError: ``now_ms`` is not a function.
        """
        if type(expiry_ms) is not int or expiry_ms < 0:
            raise ConfigError(f"expiry_ms: expected a whole number of at least 0, found {expiry_ms!r:.80}")
        if not callable(now_ms):
            raise wrong_kind("now_ms", now_ms, "a function that returns milliseconds")
        self._expiry_ms = expiry_ms
        self._now_ms = now_ms
        self._held: dict[tuple[str, MessageQueue], tuple[str, int]] = {}  # client id, time of the last renewal
        self.groups_by_topic: dict[str, set[str]] = {}
        """The groups that have locked queues of a topic, also those whose clients have left since."""
        self.noted_group: Callable[[str, str], None] | None = None
        """Called with a topic and a group that it is added to."""

    def _holder(self, group: str, queue: MessageQueue, now_ms: int) -> str | None:
        """Return the id of the client that holds the queue, None if there is none."""
        held = self._held.get((group, queue))
        if held is None or now_ms - held[1] > self._expiry_ms:
            return None
        if held[1] > now_ms:
            # The clock was set back. Count from its new time, because the lock of a lost client would otherwise last
            # until the clock has come back to its old time.
            self._held[group, queue] = held[0], now_ms
        return held[0]

    def lock_queues(self, request: LockQueues) -> frozenset[MessageQueue]:
        """Lock queues or renew their locks, and return the queues that the client holds then."""
        group, client_id, now_ms = request.group, request.client_id, self._now_ms()
        locked = frozenset(queue for queue in request.queues if self._holder(group, queue, now_ms) in (None, client_id))
        for queue in locked:
            before = self._held.get((group, queue), (client_id, now_ms))
            if before[0] != client_id:
                _log.info(
                    "group %(group)s: client %(client_id)s takes over %(topic)s/%(queue_id)d, whose lock %(before)s "
                    "last renewed %(ago_ms)d ms ago",
                    group=group,
                    client_id=client_id,
                    topic=queue.topic,
                    queue_id=queue.queue_id,
                    before=before[0],
                    ago_ms=now_ms - before[1],
                )
            self._held[group, queue] = client_id, now_ms
            groups = self.groups_by_topic.setdefault(queue.topic, set())
            if group not in groups:
                groups.add(group)
                if self.noted_group is not None:
                    self.noted_group(queue.topic, group)
        return locked

    def unlock_queues(self, request: UnlockQueues) -> None:
        """Release the client's locks."""
        for queue in request.queues:
            held = self._held.get((request.group, queue))
            if held is not None and held[0] == request.client_id:
                del self._held[request.group, queue]
