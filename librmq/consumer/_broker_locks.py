"""The broker's locks of the queues that an orderly consumer reads, so that no other instance reads them meanwhile.

::

    broker's lock    of group, queue and client; ends 60 s after it was last renewed
    trusted          for 30 s after it was renewed, or until the broker is away, whose locks end with it; renewed on a
                     grid of 20 s that begins 1 s after the start

Locks are renewed by time only while messages are held, else at their next use. A client that holds a lock too long, by
its clock or the broker's, may consume beside the next holder: so it stops after half of the broker's time. Mirrors the
locks of ``ConsumeMessageOrderlyService`` and ``RebalancePushImpl``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from librmq.consumer._assignment import AssignedQueue
from librmq.consumer._instance import Instance, next_from_first
from librmq.errors import RmqError
from librmq.message import MessageQueue
from librmq.protocol import LockQueues, UnlockQueues
from librmq.runtime import Step

FIRST_RENEWAL_MS: Final = 1_000
RENEWAL_MS: Final = 20_000
TRUSTED_MS: Final = 30_000
BROKER_LOCK_MS: Final = 60_000
LOCK_AGAIN_MS: Final = 3_000
UNLOCK_DELAY_MS: Final = 20_000


class BrokerLocks:
    """The locks of one instance's queues. Called under the runner's lock."""

    def __init__(self, instance: Instance, begin: Callable[[AssignedQueue, int], None]) -> None:
        """``begin(assigned, now_ms)`` begins with a queue that has become locked."""
        self._instance = instance
        self._runner = instance.runner
        self._begin = begin
        self._unlocking: dict[MessageQueue, Step] = {}
        self._renewing = Step(f"{instance.label} locks", self._renew, instance.client)

    def lock(self, queue: MessageQueue) -> bool:
        """Ask the broker for the lock of a queue, and return whether this client has it."""
        # An unlock that is still to be sent would release the lock that is taken now.
        self._unlocking.pop(queue, None)
        return queue in self._ask_locks(queue.broker_name, frozenset((queue,)))

    def _ask_locks(self, broker_name: str, queues: frozenset[MessageQueue]) -> frozenset[MessageQueue]:
        """Ask a broker for the locks of its queues, and return those that this client has."""
        request = LockQueues(self._instance.group, self._instance.client.client_id, queues)
        return self._instance.client.endpoint(broker_name).call(request)

    def note_taken(self, assigned: AssignedQueue) -> None:
        """Note that a queue was taken, for which `lock` has just got the lock.

        In a queue that the group has consumed, consumption begins after the next periodic lock, as in 4.9.
        """
        now_ms = self._runner.now_ms()
        assigned.owned_timestamp_ms = now_ms
        # The former reader stores its progress before it gives its lock back, so no reader can be behind this one.
        assigned.may_be_passed = False
        due_ms = self.renew_on_grid(now_ms)
        if not assigned.progress:
            assigned.locked, assigned.lock_timestamp_ms = True, now_ms
        else:
            self._instance.log.info(
                "%(consumer)s: begins to consume %(queue)s in %(wait_ms)d ms, when it locks its queues again",
                queue=assigned.queue,
                wait_ms=due_ms - now_ms,
            )

    def renew_on_grid(self, now_ms: int) -> int:
        """Schedule the next periodic lock, and return its time."""
        due_ms = next_from_first(now_ms, self._instance.started_ms + FIRST_RENEWAL_MS, RENEWAL_MS)
        if self._renewing.at is None:
            self._runner.wake(self._renewing, due_ms)
        return due_ms

    def _renew(self, now_ms: int) -> int | None:
        """Lock all assigned queues or renew their locks, and begin with those that were not locked."""
        instance = self._instance
        if instance.stopping:
            return None
        by_broker: dict[str, list[AssignedQueue]] = {}
        for assigned in instance.assigned.values():
            by_broker.setdefault(assigned.queue.broker_name, []).append(assigned)
        for broker_name, queues in by_broker.items():
            try:
                locked = self._ask_locks(broker_name, frozenset(assigned.queue for assigned in queues))
            except RmqError as error:
                instance.states.failing(("lock", broker_name), f"locking queues at {broker_name}", error)
                continue
            instance.states.works(("lock", broker_name), f"locking queues at {broker_name}")
            for assigned in queues:
                self._apply_lock(assigned, assigned.queue in locked, now_ms)
        if any(not assigned.locked or len(assigned.messages) for assigned in instance.assigned.values()):
            return next_from_first(now_ms, self._instance.started_ms + FIRST_RENEWAL_MS, RENEWAL_MS)
        return None

    def _apply_lock(self, assigned: AssignedQueue, is_locked: bool, now_ms: int) -> None:
        if not is_locked:
            if assigned.locked:
                self._instance.log.warning(
                    "%(consumer)s: the lock of %(queue)s is lost, so consumption stops until it is back",
                    queue=assigned.queue,
                )
            assigned.locked = False
            return
        assigned.owned_timestamp_ms = now_ms
        renewed_ms = assigned.lock_timestamp_ms
        # The lock was not renewed in time, so another client can have consumed messages since then.
        if renewed_ms is None or now_ms - renewed_ms >= BROKER_LOCK_MS:
            if assigned.running:
                return  # its result still counts, and moves the position that is looked for here
            try:
                self._find_position(assigned)
            except RmqError as error:
                self._instance.log.warning(
                    "%(consumer)s: no position is known in %(queue)s: %(error)s", queue=assigned.queue, error=error
                )
                assigned.locked = False
                return
        assigned.lock_timestamp_ms = now_ms
        was_locked, assigned.locked = assigned.locked, True
        if not was_locked and not assigned.released:
            self._runner.wake(assigned.pull)
            self._begin(assigned, now_ms)

    def _find_position(self, assigned: AssignedQueue) -> None:
        """Continue at the group's progress if that is further."""
        stored, first = self._instance.offsets.read(assigned.queue), assigned.messages.first
        present = assigned.next_offset if first is None else first
        if stored is None:  # the group is new, and has consumed nothing of what it holds
            stored = present
        position = stored if assigned.progress is None else max(stored, assigned.progress)
        if assigned.progress is not None and position > assigned.progress:
            assigned.progress = assigned.stored_progress = position
        # Otherwise what is held stays, with its attempts: only messages that the group leaves out can precede it. The
        # pull is not woken either. It asks for the lock itself, so one that the broker refuses would repeat at once.
        if position > present:
            assigned.messages.drop_all()
            assigned.next_offset = position
            self._runner.wake(assigned.pull)

    def holds(self, assigned: AssignedQueue, now_ms: int) -> bool:
        """Return whether the lock is trusted; renew it if it ran out while there was nothing to do."""
        if not assigned.locked:
            self.renew_on_grid(now_ms)
            return False
        if assigned.lock_timestamp_ms is None or now_ms - assigned.lock_timestamp_ms > TRUSTED_MS:
            if not self._renew_one(assigned, now_ms):
                return False
            if not assigned.locked:
                self.renew_on_grid(now_ms)
                return False
        return True

    def may_store(self, assigned: AssignedQueue, now_ms: int) -> bool:
        """Return whether this client may store the progress; after a minute without a lock others can be further."""
        if now_ms - assigned.owned_timestamp_ms < BROKER_LOCK_MS:
            return True
        return self._renew_one(assigned, now_ms) and assigned.locked

    def _renew_one(self, assigned: AssignedQueue, now_ms: int) -> bool:
        """Ask for the lock of one queue; return False if the broker cannot be asked."""
        broker_name = assigned.queue.broker_name
        try:
            self._apply_lock(assigned, self.lock(assigned.queue), now_ms)
        except RmqError as error:
            self._instance.states.failing(("lock", broker_name), f"locking queues at {broker_name}", error)
            return False
        self._instance.states.works(("lock", broker_name), f"locking queues at {broker_name}")
        return True

    def may_pull(self, assigned: AssignedQueue, now_ms: int) -> bool:
        """Return whether this client has the queue's lock."""
        if self.holds(assigned, now_ms):
            return True
        # The broker could not be asked, so its last answer counts. Ask again soon.
        if assigned.locked:
            self._runner.wake(assigned.pull, now_ms + LOCK_AGAIN_MS)
        return False

    def release(self, assigned: AssignedQueue, now_ms: int) -> None:
        """Unlock a released queue; one that still holds messages some time later, as in 4.9."""
        if assigned.messages.waiting:
            self._unlock_later(assigned.queue, now_ms)
        else:
            self._unlock(assigned.queue)

    def _unlock(self, queue: MessageQueue) -> None:
        request = UnlockQueues(self._instance.group, self._instance.client.client_id, frozenset((queue,)))
        try:
            self._instance.client.endpoint(queue.broker_name).call(request)
        except RmqError as error:
            self._instance.log.warning(
                "%(consumer)s: could not release the lock of %(queue)s: %(error)s", queue=queue, error=error
            )

    def _unlock_later(self, queue: MessageQueue, now_ms: int) -> None:
        def unlock(now_ms: int) -> int | None:
            if self._unlocking.pop(queue, None) is step and not self._instance.stopping:
                self._unlock(queue)
            return None

        step = Step(f"{self._instance.label} unlock {queue.topic}/{queue.broker_name}/{queue.queue_id}", unlock)
        step.owner = self._instance.client
        self._unlocking[queue] = step
        self._runner.wake(step, now_ms + UNLOCK_DELAY_MS)

    def release_all(self) -> None:
        """Release all locks except the locks of running listeners."""
        instance = self._instance
        running = {assigned.queue for assigned in instance.assigned.values() if assigned.running}
        queues = {*instance.assigned, *self._unlocking} - running
        for broker_name in sorted({queue.broker_name for queue in queues}):
            broker_queues = frozenset(queue for queue in queues if queue.broker_name == broker_name)
            try:
                request = UnlockQueues(instance.group, instance.client.client_id, broker_queues)
                instance.client.endpoint(broker_name).call(request)
            except RmqError as error:
                instance.log.warning("%(consumer)s: could not release locks: %(error)s", error=error)
