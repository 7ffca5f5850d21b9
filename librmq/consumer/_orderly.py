"""Orderly consumption: one call at a time for each queue, in order, under the broker's lock of the queue.

::

    one call a queue   ``AssignedQueue.delivering``: nothing else of the queue begins
    consume lock       a queue is not released while its listener runs; if that takes over 1 s, the next rebalance
                       tries again
    broker's lock      of group, queue and client; ends 60 s after it was last renewed
    trusted            for 30 s after it was renewed, or until the broker is away, whose locks end with it; renewed on
                       a grid of 20 s that begins 1 s after the start

After a failure below the maximum the queue pauses, and the listener is called again. At the maximum the client itself
sends the message back, as a dead letter. Mirrors ``ConsumeMessageOrderlyService``, ``MessageQueueLock``, and the locks
of ``RebalancePushImpl``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

from librmq.consumer._assignment import AssignedQueue
from librmq.consumer._failures import Rests, Turn, conviction, later_retries
from librmq.consumer._instance import Instance, next_from_first
from librmq.consumer._listener_calls import DeliveryCall, ListenerCalls
from librmq.consumer._listeners import DeliveredMessage, Listener, OrderlyResult
from librmq.consumer._rebalancing import Rebalancing
from librmq.consumer.config import ConsumerConfig
from librmq.errors import RmqError
from librmq.listener import DownstreamDown, SuspendQueue
from librmq.message import MessageQueue, StoredMessage
from librmq.protocol import LockQueues, MessageModel, Suspect, UnlockQueues
from librmq.runtime import Step

WAIT_FOR_LISTENER_MS: Final = 1_000
MAX_WITHOUT_REST_MS: Final = 60_000  # Then a queue that is never empty gives its thread to another, as in 4.9.
REST_MS: Final = 10
MIN_SUSPENSION_S: Final = 0.01
MAX_SUSPENSION_S: Final = 30  # Both limits are those of 4.9.


class BlockedQueue(NamedTuple):
    """An orderly queue whose first message keeps failing."""

    queue: MessageQueue
    queue_offset: int
    """The offset of the message."""
    message_id: str
    reconsume_times: int
    """Failed attempts at the message."""


class OrderlyDelivery:
    """Calls listeners queue by queue. Called under the runner's lock."""

    def __init__(self, calls: ListenerCalls, rebalancing: Rebalancing, resume: Callable[[AssignedQueue], None]) -> None:
        """``resume(assigned)`` pulls a throttled queue again if it holds little enough."""
        instance = calls.instance
        self.calls: ListenerCalls = calls
        self.config: ConsumerConfig = instance.config
        """The present settings."""
        self.locks: BrokerLocks | None = None
        """None without locks: any instance that has the queue consumes it."""
        if self.config.lock_queues and self.config.model is MessageModel.CLUSTERING:
            self.locks = BrokerLocks(instance, self._begin_queue)
        self._instance = instance
        self._runner = instance.runner
        self._rebalancing = rebalancing
        self._resume = resume
        self._rests: Rests[AssignedQueue] = Rests(instance, self._resumed)
        self._retries = later_retries(instance)
        self._waiting: deque[AssignedQueue] = deque()  # those that wait for a listener, in their order

    def _suspension_ms(self, error: Exception | None = None) -> int:
        """Return for how long a queue pauses after a failure."""
        seconds = error.seconds if isinstance(error, SuspendQueue) else None
        pause_s = self.config.suspend_time if seconds is None else seconds
        return round(1000 * min(MAX_SUSPENSION_S, max(MIN_SUSPENSION_S, pause_s)))

    def apply_settings(self, now_ms: int) -> None:
        self.config = self._instance.config
        self.go_on(now_ms)

    def stop(self) -> threading.Event | None:
        """Begin nothing more; return an event as `ListenerCalls.wait_for_end` does."""
        return self.calls.wait_for_end()

    def release_queue(self, assigned: AssignedQueue, now_ms: int) -> bool:
        """Unlock a released queue; return False while its listener runs."""
        if assigned.running:
            if not assigned.release_until_ms:
                assigned.release_until_ms = now_ms + WAIT_FOR_LISTENER_MS
            return False
        # Its rest ends, but what is kept of the queue stays, because a later owner of it goes on with that.
        self._rests.times.pop(assigned.queue, None)
        if self.locks is not None:
            self.locks.release(assigned, now_ms)
        return True

    def pulled(
        self, assigned: AssignedQueue, messages: Sequence[StoredMessage], bounds: tuple[int, int], now_ms: int
    ) -> None:
        """Add pulled messages to a queue, and begin with them unless its listener runs.

        ``bounds`` are the minimum and maximum offset of the queue.
        """
        if assigned.messages.put(messages, *bounds):
            if self.locks is not None:
                self.locks.renew_on_grid(now_ms)
            self._begin_queue(assigned, now_ms)

    def _begin_queue(self, assigned: AssignedQueue, now_ms: int) -> None:
        if not assigned.delivering and not assigned.released and assigned.messages.waiting:
            assigned.delivering = True
            assigned.since_ms = now_ms
            self._waiting.append(assigned)
            self.go_on(now_ms)

    def go_on(self, now_ms: int) -> None:
        """Begin with the queues that wait, as far as threads are free."""
        calls, waiting, limit = self.calls, self._waiting, 1 if self._rests.is_probing else self.config.threads
        while waiting and calls.running < limit and calls.may_begin and None not in self._rests.times:
            assigned = waiting.popleft()
            if assigned.released:
                assigned.delivering = False
            elif self.locks is not None and not self.locks.holds(assigned, now_ms):
                self._rest(assigned, LOCK_AGAIN_MS if assigned.locked else None)
            elif assigned.left is None or not self._judge_first(assigned):
                messages = assigned.messages.take(calls.batch_size(assigned) if assigned.left is None else 1)
                if messages:
                    assigned.running = True
                    calls.begin(self._apply_result, assigned, messages)
                else:
                    assigned.delivering = False

    def _resumed(self, now_ms: int, due: list[AssignedQueue]) -> None:
        for assigned in due:
            assigned.since_ms = now_ms
        self._waiting.extend(due)
        self.go_on(now_ms)

    # ---- suspects

    def _judge_first(self, assigned: AssignedQueue) -> bool:
        """Let the next message have its turn if it is a suspect, or make it a dead letter; False for any other."""
        first = assigned.messages.peek()
        suspect = None if first is None else assigned.take_suspect(first.queue_offset)
        if suspect is None:
            return False
        error = conviction(suspect, assigned.place, self.config.max_process_deaths)
        if error is None:
            self.calls.turns.ask(Turn(suspect, partial(self._begin_suspect, assigned, suspect)))
            return True
        messages = assigned.messages.take(1)
        if self._retries().convict(assigned, messages[0], error):
            self._commit_messages(assigned, "later")
            self._continue(assigned)
        else:
            assigned.messages.put_back(messages)
            assigned.keep_suspect(suspect)
            self._rest(assigned, self._suspension_ms())
        return True

    def _begin_suspect(self, assigned: AssignedQueue, suspect: Suspect, turn: Turn, now_ms: int) -> bool:
        if assigned.released or self._instance._stopping:
            assigned.delivering = False
            return False
        if assigned.queue in self._rests or (self.locks is not None and not self.locks.holds(assigned, now_ms)):
            assigned.keep_suspect(suspect)
            self._rest(assigned, LOCK_AGAIN_MS if assigned.locked else None)
            return False
        messages = assigned.messages.take(1)
        if not messages:  # A lock that was lost and found again has moved the position.
            assigned.delivering = False
            return False
        assigned.running = True
        self.calls.begin(self._apply_result, assigned, messages, turn)
        return True

    def _rest(self, assigned: AssignedQueue, milliseconds: int | None) -> None:
        """Pause the queue for a time; None means until it is locked."""
        if milliseconds is None:
            assigned.delivering = False
        else:
            self._rests.rest(assigned.queue, milliseconds)
            self._rests.keep(assigned, *self._rests.times[assigned.queue])

    def _apply_result(self, call: DeliveryCall, result: object, error: Exception | None) -> None:
        assigned, messages = call.assigned, call.messages
        assigned.running = False
        now_ms = self._runner.now_ms()
        is_watched = bool(self._instance.watchers)
        if is_watched:
            self._note_end(call, result, error)
        if assigned.released:
            self._done_after_release(assigned, messages, now_ms)
        else:
            rest_ms = self._apply(call, result, error)
            if is_watched:
                self._instance._note("keep", assigned.queue.topic, queue=assigned.queue)
            if assigned.throttled:
                self._resume(assigned)
            if rest_ms is None and now_ms - assigned.since_ms > MAX_WITHOUT_REST_MS:
                rest_ms = REST_MS
            if rest_ms is not None:
                self._rest(assigned, rest_ms)
            else:
                self._continue(assigned)
        self.go_on(now_ms)

    def _continue(self, assigned: AssignedQueue) -> None:
        """Deliver the queue's next messages before the others', unless it is empty."""
        if assigned.messages.waiting:  # As in 4.9, a thread stays with its queue until that is empty or rests.
            self._waiting.appendleft(assigned)
        else:
            assigned.delivering = False

    def _done_after_release(self, assigned: AssignedQueue, messages: Iterable[DeliveredMessage], now_ms: int) -> None:
        assigned.delivering = False
        assigned.messages.remove(messages)
        if assigned.release_until_ms and not self._instance._stopping:
            if now_ms <= assigned.release_until_ms:
                if self.release_queue(assigned, now_ms):
                    self._instance.assigned.pop(assigned.queue, None)
                    self._rebalancing.wake()
            else:
                self._rebalancing.wake_on_grid()

    def _apply(self, call: DeliveryCall, result: object, error: Exception | None) -> int | None:
        """Apply the result or the exception of a listener, and return the pause of the queue."""
        assigned, messages = call.assigned, call.messages
        if isinstance(error, DownstreamDown):
            self._instance._note("outcome", assigned.queue.topic, "downstream", len(messages))
            assigned.end(messages)
            assigned.messages.put_back(messages)
            return self._rests.begin_rest(error, assigned.queue)
        if self._rests.is_probing or self._instance._states.causes:
            self._rests.succeeded()
        if not _has_failed(call.listener, result, error):
            if result is OrderlyResult.HOLD:
                assigned.end(messages)
                return None
            if result is OrderlyResult.ROLLBACK:
                assigned.end(messages)
                assigned.messages.roll_back()
                return self._suspension_ms()
            self._commit_messages(assigned, "success")
            return None
        attempt = messages[0].reconsume_times + 1
        sent, blocked = self._retries().send_exhausted(assigned, messages, error)
        result_of_sent = "later" if self.config.model is MessageModel.CLUSTERING else "dropped"
        if not blocked:
            self._commit_messages(assigned, result_of_sent)
            return None
        assigned.end(messages)
        if sent:
            self._instance._note("outcome", assigned.queue.topic, result_of_sent, len(sent))
            progress = assigned.messages.remove(sent)
            if progress is not None and (assigned.progress is None or progress > assigned.progress):
                self._instance._progressed(assigned, progress)
        self._instance._note("outcome", assigned.queue.topic, "suspend", len(blocked))
        assigned.messages.put_back(blocked)
        rest_ms = self._suspension_ms(error)
        if attempt == 1:
            self._retries().log_retry(
                assigned, blocked, 1, self._instance.max_redeliveries, f"the next comes in {rest_ms / 1000:g} s", error
            )
        self._log_blocked(assigned, blocked[0])
        return rest_ms

    def _commit_messages(self, assigned: AssignedQueue, result: str) -> None:
        if self._instance.watchers:
            self._instance._note("outcome", assigned.queue.topic, result, assigned.messages.begun)
        progress = assigned.messages.commit()
        if progress is not None:
            self._instance._progressed(assigned, progress)

    def _note_end(self, call: DeliveryCall, result: object, error: Exception | None) -> None:
        """Note the end of a call, and with a commit or rollback the end of the calls held before it."""
        messages, settled = call.messages, "retry"
        if not _has_failed(call.listener, result, error):
            settled = "open" if result is OrderlyResult.HOLD else "retry" if result is OrderlyResult.ROLLBACK else "ok"
            if settled != "open":
                # A released queue has dropped its messages, so fall back to those of the call.
                messages = call.assigned.messages._taken() or messages
        self._instance._note("settle", result=settled, messages=messages)

    def _log_blocked(self, assigned: AssignedQueue, message: DeliveredMessage) -> None:
        times = message.reconsume_times
        if times & (times - 1) == 0:  # The log would be full of it, so it has the 1st, 2nd, 4th, 8th time.
            self._instance._log.warning(
                "%(consumer)s: %(queue)s is blocked at %(queue_offset)d by %(message_id)s, which failed %(attempt)d "
                "times",
                queue=assigned.queue,
                queue_offset=message.queue_offset,
                message_id=message.message_id,
                attempt=times,
            )

    def blocked(self) -> list[BlockedQueue]:
        queues = []
        for assigned in self._instance.assigned.values():
            first = assigned.messages.peek()
            if first is not None and first.reconsume_times and assigned.queue in self._rests:
                queues.append(BlockedQueue(assigned.queue, first.queue_offset, first.message_id, first.reconsume_times))
        return queues


def _has_failed(listener: Listener, result: object, error: Exception | None) -> bool:
    if error is not None:
        return True
    return listener.must_return and result is not True and not isinstance(result, OrderlyResult)


# ---- the broker's locks of the queues

FIRST_RENEWAL_MS: Final = 1_000
RENEWAL_MS: Final = 20_000
TRUSTED_MS: Final = 30_000
BROKER_LOCK_MS: Final = 60_000
LOCK_AGAIN_MS: Final = 3_000
UNLOCK_DELAY_MS: Final = 20_000


class BrokerLocks:
    """The locks of one instance's queues at their brokers, so that no other instance reads them meanwhile.

    Called under the runner's lock. Locks are renewed by time only while messages are held, else at their next use. A
    client that holds a lock too long, by its clock or the broker's, may consume beside the next holder: so it stops
    after half of the broker's time.
    """

    def __init__(self, instance: Instance, begin: Callable[[AssignedQueue, int], None]) -> None:
        """``begin(assigned, now_ms)`` begins with a queue that has become locked."""
        self._instance = instance
        self._runner = instance.runner
        self._begin = begin
        self._unlocking: dict[MessageQueue, Step] = {}
        self._renewing = Step(f"{instance._label} locks", self._renew, instance.client)

    def lock(self, queue: MessageQueue) -> bool:
        """Ask the broker for the lock of a queue, and return whether this client has it."""
        return queue in self._ask_locks(queue.broker_name, frozenset((queue,)))

    def _ask_locks(self, broker_name: str, queues: frozenset[MessageQueue]) -> frozenset[MessageQueue]:
        for queue in queues:  # An unlock that is still to be sent would release the lock that is taken now.
            self._unlocking.pop(queue, None)
        request = LockQueues(self._instance.group, self._instance.client.client_id, queues)
        return self._instance.client.route.endpoint(broker_name).call(request)

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
            self._instance._log.info(
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
        if instance._stopping:
            return None
        by_broker: dict[str, list[AssignedQueue]] = {}
        for assigned in instance.assigned.values():
            by_broker.setdefault(assigned.queue.broker_name, []).append(assigned)
        for broker_name, queues in by_broker.items():
            locked = self._renew_at(broker_name, frozenset(assigned.queue for assigned in queues))
            if locked is not None:
                for assigned in queues:
                    self._apply_lock(assigned, assigned.queue in locked, now_ms)
        if any(not assigned.locked or len(assigned.messages) for assigned in instance.assigned.values()):
            return next_from_first(now_ms, self._instance.started_ms + FIRST_RENEWAL_MS, RENEWAL_MS)
        return None

    def _renew_at(self, broker_name: str, queues: frozenset[MessageQueue]) -> frozenset[MessageQueue] | None:
        """Ask a broker for the locks of its queues; return those that this client has, None if it can't be asked."""
        states, what = self._instance._states, f"locking queues at {broker_name}"
        try:
            locked = self._ask_locks(broker_name, queues)
        except RmqError as error:
            states.failing(what, error)
            return None
        states.works(what)
        return locked

    def _apply_lock(self, assigned: AssignedQueue, is_locked: bool, now_ms: int) -> None:
        if not is_locked:
            if assigned.locked:
                self._instance._log.warning(
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
                return  # Its result still counts, and moves the position that is looked for here.
            try:
                self._find_position(assigned)
            except RmqError as error:
                self._instance._log.warning(
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
        stored, first = self._instance._offsets.read(assigned.queue), assigned.messages.first
        present = assigned.next_offset if first is None else first
        if stored is None:  # The group is new, and has consumed nothing of what it holds.
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
        queue = assigned.queue
        locked = self._renew_at(queue.broker_name, frozenset((queue,)))
        if locked is not None:
            self._apply_lock(assigned, queue in locked, now_ms)
        return locked is not None

    def may_pull(self, assigned: AssignedQueue, now_ms: int) -> bool:
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
            self._unlock((assigned.queue,))

    def _unlock(self, queues: Iterable[MessageQueue]) -> None:
        instance = self._instance
        by_broker: dict[str, set[MessageQueue]] = {}
        for queue in queues:
            by_broker.setdefault(queue.broker_name, set()).add(queue)
        for broker_name in sorted(by_broker):
            request = UnlockQueues(instance.group, instance.client.client_id, frozenset(by_broker[broker_name]))
            try:
                instance.client.route.endpoint(broker_name).call(request)
            except RmqError as error:
                instance._log.warning(
                    "%(consumer)s: could not release locks at %(broker)s, where they end within a minute: %(error)s",
                    broker=broker_name,
                    error=error,
                )

    def _unlock_later(self, queue: MessageQueue, now_ms: int) -> None:
        def unlock(now_ms: int) -> int | None:
            if self._unlocking.pop(queue, None) is step and not self._instance._stopping:
                self._unlock((queue,))
            return None

        step = Step(f"{self._instance._label} unlock {queue.topic}/{queue.broker_name}/{queue.queue_id}", unlock)
        step.owner = self._instance.client
        self._unlocking[queue] = step
        self._runner.wake(step, now_ms + UNLOCK_DELAY_MS)

    def release_all(self) -> None:
        """Release all locks except the locks of running listeners."""
        instance = self._instance
        running = {assigned.queue for assigned in instance.assigned.values() if assigned.running}
        self._unlock({*instance.assigned, *self._unlocking} - running)
