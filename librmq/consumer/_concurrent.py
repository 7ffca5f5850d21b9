"""Concurrent consumption: listeners run in parallel, in any order.

``threads`` is the number of running listeners: when one ends, the next begins without waiting for the others. Which
messages begin next is for `Backlog` to say. Mirrors ``ConsumeMessageConcurrentlyService``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from librmq.clock import moves_by_itself
from librmq.consumer._assignment import AssignedQueue
from librmq.consumer._failures import REDELIVERY_MS, Rests, Turn, conviction, later_retries, outcome
from librmq.consumer._instance import next_from_first
from librmq.consumer._listener_calls import DeliveryCall, ListenerCalls
from librmq.consumer._listeners import DeliveredMessage, Listener
from librmq.consumer.config import ConsumerConfig
from librmq.errors import ConfigError
from librmq.listener import DownstreamDown
from librmq.message import StoredMessage, StoredRecords
from librmq.override import override
from librmq.protocol import BEGUN, SLOT_PRIME, SLOTS, MessageModel, Suspect
from librmq.runtime import Step

# ---- weights of listeners: which of the messages that wait for a thread begins next

MAX_WEIGHT: Final = 1000


def check_weight(topic: str, weight: object, orderly: bool) -> None:
    """Refuse a weight that a subscription can't have."""
    if weight is None:
        return
    if type(weight) is not int or not 1 <= weight <= MAX_WEIGHT:
        raise ConfigError(
            f"topic {topic!r}: weight: expected a whole number from 1 to {MAX_WEIGHT}, found {weight!r:.80}"
        )
    if orderly:
        raise ConfigError(
            f"topic {topic!r}: weight: an orderly consumer delivers each queue in its order, so no message can "
            "overtake another: leave weight out, or send important messages to a topic of their own"
        )


_COST: Final = 1 << 40
"""What a message of weight 1 costs, in units of virtual time."""


@dataclass(slots=True, eq=False)
class Pulled:
    """Messages of one pull that wait for a listener; a batch never mixes pulls."""

    assigned: AssignedQueue
    messages: list[DeliveredMessage]
    """In order."""
    weight: int = 1
    """Its lane in the backlog."""
    size: int = 1
    """The largest batch."""


class Backlog:
    """What waits for a thread: in the order of the pulls within a weight, and by share between weights.

    Start-time fair queueing: each weight has the virtual time at which its next message starts, which moves by 1/weight
    with each message; the earliest begins. A weight that had nothing to wait for starts at the present virtual time, so
    its first message begins next, and it can't save up its share. While two weights wait, the numbers of their
    messages that have begun, each divided by its weight, differ by at most the sum of one batch of each. O(weights) a
    message.
    """

    __slots__ = ("_now", "_starts", "lanes")

    def __init__(self) -> None:
        self.lanes: dict[int, deque[Pulled]] = {}
        """By weight; without empty ones."""
        self._starts: dict[int, int] = {}
        self._now = 0

    def append(self, pulled: Pulled, *, is_first: bool = False) -> None:
        weight = pulled.weight
        lane = self.lanes.get(weight)
        if lane is None:
            self.lanes[weight] = deque((pulled,))
            if self._starts.get(weight, -1) < self._now:
                self._starts[weight] = self._now
        elif is_first:
            lane.appendleft(pulled)
        else:
            lane.append(pulled)

    def first(self) -> Pulled:
        """Return what begins next; of equal starts the larger weight's."""
        lanes = self.lanes
        if len(lanes) == 1:
            return next(iter(lanes.values()))[0]
        return lanes[min(lanes, key=lambda weight: (self._starts[weight], -weight))][0]

    def remove(self, first: Pulled) -> None:
        lane = self.lanes[first.weight]
        lane.popleft()
        if not lane:
            del self.lanes[first.weight]

    def take(self, first: Pulled, size: int) -> list[DeliveredMessage]:
        """Begin up to ``size`` messages of what begins next."""
        messages = first.messages
        if len(messages) > size:
            messages = messages[:size]
            del first.messages[:size]
        else:
            self.remove(first)
        self._now = self._starts[first.weight]
        self._starts[first.weight] += len(messages) * _COST // first.weight
        return messages

    def take_all(self) -> list[Pulled]:
        contents = [pulled for weight in sorted(self.lanes, reverse=True) for pulled in self.lanes[weight]]
        self.lanes.clear()
        return contents


RUN: Final = 32
"""The most messages of a run. Listeners count as fast when so many end in `RUN_S`."""
RUN_S: Final = 0.001
LOOK_MS: Final = 5
"""Time between two looks at a run, the interpreter's switch interval. A slow run is seen twice, or follows another that
was seen."""
EXPIRED_LEVEL: Final = 3  # A message that exceeds consume_timeout goes back with this level, as in 4.9.
MAX_EXPIRED: Final = 16  # One round sends back no more of a queue, as in 4.9, because it keeps the lock.
_NO_WINDOW: Final = [0] * SLOTS, 0, 0
_FINISHED: Final = [(rest << 56) - BEGUN for rest in range(SLOT_PRIME)]
"""What the end of a message adds to the word of its beginning, by its remainder."""


class Run(DeliveryCall):
    """Calls of a fast listener, one after the other in one thread, whose results are applied together.

    The thread takes the messages from an iterator, without the runner's lock. Others take the remaining ones from it
    under the lock. Each message comes to one of them, because a step of the iterator is atomic. The thread counts a
    message as begun only after it has it, so what precedes the last one that was counted has ended.
    """

    __slots__ = ("_begun", "_remaining", "_settled", "count", "is_seen")

    def __init__(
        self,
        calls: ListenerCalls,
        apply_result: Callable[[Any, object, Exception | None], None],
        listener: Listener,
        assigned: AssignedQueue,
        messages: list[DeliveredMessage],
    ) -> None:
        super().__init__(calls, apply_result, listener, assigned, messages)
        self.count: int = len(messages)
        self._remaining = iter(messages)
        self._begun = self._settled = 0
        self.is_seen = False
        """Whether it has been looked at, so that it takes long if it is seen again."""

    @override
    def call_listener(self, watched: Callable[[list[DeliveredMessage]], object] | None) -> object:
        """Call the listener for one message after the other, up to one that is not consumed."""
        function, must_return = self.listener.function, self.listener.must_return
        assigned, place, result = self.assigned, self.assigned.place, None
        words, begin, tag = _NO_WINDOW if place is None or place.window is None else place.window
        begun, salt = tag + BEGUN, 37 * (tag >> 48)
        for message in self._remaining:
            offset = message.queue_offset
            slot, word = begin + offset % SLOTS, begun + offset
            try:  # This is `Place.begin`, and below `Place.finish`, inlined, because they run for each message.
                words[slot] = word
            except ValueError:  # the broker has ended
                break
            self._begun += 1
            result = function(message) if watched is None else watched([message])
            if result is not True and (must_return or result is not None):  # a failure, a coroutine, or odd
                break
            if assigned.released:
                break
            try:
                words[slot] = word + _FINISHED[(offset + salt) % SLOT_PRIME]
            except ValueError:
                break
        return result

    @property
    @override
    def at_listener(self) -> list[DeliveredMessage]:
        """The message that the listener has, or had last."""
        return self.messages[max(self._begun - 1, 0) : self._begun]

    @property
    def unsettled(self) -> list[DeliveredMessage]:
        """What the listener has got, and is not settled yet; it has consumed all but the last."""
        return self.messages[self._settled : self._begun]

    def settle(self, ended: list[DeliveredMessage]) -> None:
        """Note that the first of what has ended is part of the progress."""
        self._settled += len(ended)

    def take_remaining(self) -> list[DeliveredMessage]:
        """Return what the listener has not got, which it does not get any more."""
        return list(self._remaining)


class ConcurrentDelivery:
    """Calls listeners in parallel, in the order of the pulled messages. Called under the runner's lock."""

    def __init__(self, calls: ListenerCalls, resume: Callable[[AssignedQueue], None]) -> None:
        """``resume(assigned)`` pulls a throttled queue again if it holds little enough."""
        instance = calls.instance
        self.calls: ListenerCalls = calls
        self.config: ConsumerConfig = instance.config
        """The present settings."""
        self._instance = instance
        self._runner = instance.runner
        self._resume = resume
        self._rests: Rests[Pulled] = Rests(instance, self._resumed)
        self._retries = later_retries(instance)
        self._backlog = Backlog()
        # The run is under way in one thread. If it is slow, the other threads get what it has not begun.
        self._run: Run | None = None
        self._pulls_after_run: list[Step] = []
        self.is_fast: bool = False
        """Whether listeners end so fast that they get runs."""
        self._was_run_seen = False
        self._ended_calls = 0
        self._count_began = 0.0
        self._watching = Step(f"{instance._label} slow listener", self._divide_slow_run, instance.client)
        self._expiring = Step(f"{instance._label} consume timeout", self._expire, instance.client)

    @property
    def _timeout_ms(self) -> int:
        return max(1, round(self.config.consume_timeout * 1000))

    def apply_settings(self, now_ms: int) -> None:
        self.config = self._instance.config
        self.line_up()
        self.go_on(now_ms)
        # The timeout can be shorter now than when the step was planned, so plan it again from the new one.
        if self._expiring.at is not None:
            self._watch_timeouts(now_ms)

    def stop(self) -> threading.Event | None:
        """Begin nothing more, also not of a run; return an event as `ListenerCalls.wait_for_end` does."""
        if self._run is not None:
            self._divide(self._run)
        return self.calls.wait_for_end()

    # ---- what begins next

    def pulled(
        self, assigned: AssignedQueue, messages: Sequence[StoredMessage], bounds: tuple[int, int], now_ms: int
    ) -> None:
        """Add pulled messages to a queue, and begin them as far as threads are free.

        ``bounds`` are the minimum and maximum offset of the queue.
        """
        if len(messages) == 1 and assigned.left is None and self.try_begin(assigned, messages[0].raw, bounds, now_ms):
            return
        new = assigned.messages.put_and_take(StoredRecords.raw_records(messages), bounds)
        if new:
            self._enqueue(assigned, new)
            self.go_on(now_ms)

    def _enqueue(self, assigned: AssignedQueue, messages: list[DeliveredMessage], *, is_first: bool = False) -> None:
        """Add messages to the backlog: by listener if these have weights."""
        calls = self.calls
        if not calls.listeners.are_weighted:
            pulled = Pulled(assigned, messages, size=calls.batch_size(assigned))
            self._backlog.append(pulled, is_first=is_first)
            return
        by_listener: dict[int, Pulled] = {}
        for message in messages:
            listener = calls.listener_for(assigned, message)
            size = self.config.batch_size if listener.as_list else 1
            pulled = by_listener.setdefault(id(listener), Pulled(assigned, [], listener.weight or 1, size))
            pulled.messages.append(message)
        for pulled in by_listener.values():
            self._backlog.append(pulled, is_first=is_first)

    def _resumed(self, now_ms: int, due: list[Pulled]) -> None:
        for pulled in reversed(due):  # Each goes to the front, so the last one goes there first.
            self._enqueue(pulled.assigned, pulled.messages, is_first=True)
        self.go_on(now_ms)

    def line_up(self) -> None:
        for pulled in self._backlog.take_all():
            self._enqueue(pulled.assigned, pulled.messages)

    def try_begin(self, assigned: AssignedQueue, raw: bytes, bounds: tuple[int, int], now_ms: int) -> bool:
        """Add and begin a message if nothing precedes it: the fast path of a consumer that keeps up.

        Return False, and do nothing, if it has to be `pulled`.
        """
        calls = self.calls
        if self._backlog.lanes or calls.running >= self.config.threads or not calls.may_begin:
            return False
        if self._rests.is_probing or assigned.queue in self._rests:
            return False
        messages = assigned.messages.put_and_take((raw,), bounds)
        if not messages:
            return False
        messages[0].consume_start_timestamp_ms = now_ms
        listener = calls.listener_for(assigned, messages[0])
        calls.submit(DeliveryCall(calls, self._apply_result, listener, assigned, messages))
        if self._expiring.at is None:
            self._watch_timeouts(now_ms)
        return True

    def go_on(self, now_ms: int) -> None:
        """Begin what waits, as far as threads are free."""
        calls, backlog, resting = self.calls, self._backlog, self._rests.times
        lanes, limit = backlog.lanes, 1 if self._rests.is_probing else self.config.threads
        while lanes and calls.running < limit and calls.may_begin and self._run is None and None not in resting:
            first = backlog.first()
            if first.assigned.released:
                # They have stayed until their turn: searching them at the release would take as long as the backlog.
                backlog.remove(first)
            elif resting and first.assigned.queue in resting:
                backlog.remove(first)
                self._rests.keep(first, *resting[first.assigned.queue])
            else:
                self._begin(first, now_ms)

    def _begin(self, first: Pulled, now_ms: int) -> None:
        calls, assigned = self.calls, first.assigned
        listener = self._run_listener(assigned) if self.is_fast and assigned.left is None else None
        size = RUN if listener is not None else first.size if assigned.left is None else 1
        messages = self._backlog.take(first, size)
        if assigned.left is not None and (suspect := assigned.take_suspect(messages[0].queue_offset)):
            self._judge(assigned, messages[0], suspect)
            return
        for message in messages:
            message.consume_start_timestamp_ms = now_ms
        if listener is None or len(messages) == 1:
            calls.begin(self._apply_result, assigned, messages)
        else:
            if self._watching.at is None:
                self._runner.wake(self._watching, now_ms + LOOK_MS)
            self._run = Run(calls, self._apply_result, listener, assigned, messages)
            calls.submit(self._run)
        if self._expiring.at is None:
            self._watch_timeouts(now_ms)

    def _watch_timeouts(self, now_ms: int) -> None:
        self._runner.wake(self._expiring, next_from_first(now_ms, self._instance.started_ms, self._timeout_ms))

    def _apply_result(self, call: DeliveryCall, result: object, error: Exception | None) -> None:
        assigned, messages, before = call.assigned, call.messages, 0
        if isinstance(call, Run):
            self._end_run(call)
            messages = call.unsettled
            before = max(0, len(messages) - 1)  # all but the last are consumed
        consumed, error = outcome(call.listener, len(messages), result, error)
        consumed = max(before, consumed)
        is_recorded = "settle" in self._instance.watchers
        if is_recorded:
            if consumed:
                self._instance._note("settle", assigned.queue.topic, "ok", messages=messages[:consumed])
            if consumed < len(messages):
                self._instance._note("settle", assigned.queue.topic, "retry", messages=messages[consumed:])
        # The result for a released queue is dropped: its messages belong to the queue's next reader, and progress or a
        # retry from here would count as that reader's.
        if messages and not assigned.released:
            if isinstance(error, DownstreamDown):
                self._keep(assigned, messages[consumed:], error)
                messages = messages[:consumed]
            elif self._rests.is_probing or self._instance._states.causes:
                self._rests.succeeded()
            if messages:
                self._apply(assigned, messages, consumed, error)
            if is_recorded and consumed:
                self._instance._note("keep", assigned.queue.topic, queue=assigned.queue)
        if self._backlog.lanes:
            if not self.is_fast:
                self._count_ended()
            self.go_on(self._runner.now_ms())

    # ---- runs of fast listeners

    def _count_ended(self) -> None:
        """Note that a listener has ended while messages wait; if many did in a short time, runs begin."""
        if not self._ended_calls:
            self._count_began = self._runner.clock.monotonic()
        self._ended_calls += 1
        if self._ended_calls > RUN:
            self._ended_calls, seconds = 0, self._runner.clock.monotonic() - self._count_began
            # By hand, and in a history, each call is a turn of its own.
            is_by_hand = not moves_by_itself(self._runner.clock)
            self.is_fast = seconds < RUN_S and not is_by_hand and "settle" not in self._instance.watchers

    def _run_listener(self, assigned: AssignedQueue) -> Listener | None:
        """Return the listener of all messages of a queue, None if it can't have a run of them."""
        listeners = self.calls.listeners
        if self._rests.is_probing or listeners.are_weighted:  # It would keep the messages of other weights waiting.
            return None
        listener = listeners.sole_listener(assigned.queue.topic)
        return None if listener is None or listener.as_list or listener.is_async else listener

    def _end_run(self, run: Run) -> None:
        if self._run is run:
            self.is_fast, self._was_run_seen = not (run.is_seen and self._was_run_seen), run.is_seen
            self._clear_run()
        self._give_back(run)

    def _clear_run(self) -> None:
        self._run = None
        pulls, self._pulls_after_run = self._pulls_after_run, []
        for pull in pulls:
            self._runner.wake(pull)

    def pull_again(self, pull: Step) -> None:
        """Repeat a held pull: at once, or at the end of a run under way, before which no message begins.

        A thread that is woken meanwhile would only compete with the run's and the sender's for the interpreter.
        """
        if self._run is None:
            self._runner.wake(pull)
        else:
            self._pulls_after_run.append(pull)

    def _divide_slow_run(self, now_ms: int) -> int | None:
        """Look at the run under way; let all threads have what a slow one has not begun."""
        run = self._run
        if run is None:
            return None
        if not run.is_seen:
            run.is_seen = True
            return now_ms + LOOK_MS
        self.is_fast = False
        self._clear_run()
        self.calls.count_running()  # Ctrl-C can have come between the count of the run and its submission
        self._divide(run)
        self.go_on(now_ms)
        return None

    def _divide(self, run: Run) -> None:
        """Apply the results of a run up to now, and let what it has not begun wait again."""
        if not run.assigned.released:
            self._settle(run)
        self._give_back(run)

    def _give_back(self, run: Run) -> None:
        remaining = run.take_remaining()
        if remaining and not run.assigned.released:
            self._begin_later(run.assigned, remaining)

    def settle(self) -> None:
        """Apply the results of all listeners that have ended, before progress is stored."""
        if self._run is not None:
            self._settle(self._run)

    def _settle(self, run: Run) -> None:
        ended = run.unsettled[:-1]
        if ended:
            self._apply(run.assigned, ended, len(ended), None)
            run.settle(ended)

    def _begin_later(self, assigned: AssignedQueue, messages: list[DeliveredMessage], wait_ms: int = 0) -> None:
        """Let messages that had begun wait for a time, and then for a thread before all others."""
        for message in messages:
            message.consume_start_timestamp_ms = None  # No listener has it, so it can't exceed consume_timeout.
        assigned.end(messages)
        if wait_ms:
            now_ms = self._runner.now_ms()
            self._rests.keep(Pulled(assigned, messages), now_ms, now_ms + wait_ms)
        else:
            self._enqueue(assigned, messages, is_first=True)

    # ---- suspects

    def _judge(self, assigned: AssignedQueue, message: DeliveredMessage, suspect: Suspect) -> None:
        error = conviction(suspect, assigned.place, self.config.max_process_deaths)
        if error is None:
            self.calls.turns.ask(Turn(suspect, partial(self._begin_suspect, assigned, message, suspect)))
            return
        self._apply(assigned, [message], 0, error)
        if assigned.messages.holds(message):  # no broker has accepted it
            assigned.keep_suspect(suspect)

    def _begin_suspect(
        self, assigned: AssignedQueue, message: DeliveredMessage, suspect: Suspect, turn: Turn, now_ms: int
    ) -> bool:
        if assigned.released or self._instance._stopping or not assigned.messages.holds(message):
            return False
        if assigned.queue in self._rests:
            assigned.keep_suspect(suspect)
            self._enqueue(assigned, [message], is_first=True)
            return False
        message.consume_start_timestamp_ms = now_ms
        self.calls.begin(self._apply_result, assigned, [message], turn)
        if self._expiring.at is None:
            self._watch_timeouts(now_ms)
        return True

    # ---- rests

    def _keep(self, assigned: AssignedQueue, messages: list[DeliveredMessage], error: DownstreamDown) -> None:
        """Keep messages to begin again after a rest, without counting a failure."""
        # Those that exceeded consume_timeout were sent back, and would be delivered twice.
        messages = [message for message in messages if assigned.messages.holds(message)]
        self._instance._note("outcome", assigned.queue.topic, "downstream", len(messages))
        if messages:
            self._begin_later(assigned, messages)
        self._rests.begin_rest(error, assigned.queue)

    def _apply(
        self, assigned: AssignedQueue, messages: list[DeliveredMessage], consumed: int, error: Exception | None
    ) -> None:
        if "outcome" in self._instance.watchers:
            self._instance._note("outcome", assigned.queue.topic, "success", consumed)
        ended: Sequence[DeliveredMessage] = messages
        if consumed < len(messages):
            failed = messages[consumed:]
            result = "later" if self.config.model is MessageModel.CLUSTERING else "dropped"
            self._instance._note("outcome", assigned.queue.topic, result, len(failed))
            # One that exceeded consume_timeout has been sent back, and would come twice.
            failed = [message for message in failed if assigned.messages.holds(message)]
            unaccepted = (
                self._retries().send_back(assigned, failed, error, self._instance.max_redeliveries) if failed else []
            )
            if unaccepted:
                ended = [message for message in messages if message not in unaccepted]
                for message in unaccepted:
                    message._count_failure()
                self._begin_later(assigned, unaccepted, REDELIVERY_MS)
        progress = assigned.messages.remove(ended)
        if progress is not None and ended and ended[-1].queue_offset >= progress and assigned.place is not None:
            for message in ended:
                assigned.place.finish(message.queue_offset)
        if progress is not None and (assigned.progress is None or progress > assigned.progress):
            self._instance._progressed(assigned, progress)
        if assigned.throttled:
            self._resume(assigned)

    # ---- consume timeout

    def _expire(self, now_ms: int) -> int | None:
        """Send back the first messages of each queue that a listener has had for longer than the consume timeout."""
        if self._instance._stopping:
            return None
        self.settle()
        for assigned in list(self._instance.assigned.values()):
            for _ in range(MAX_EXPIRED):
                first = next(assigned.messages._started(), None)
                started_ms = None if first is None else first.consume_start_timestamp_ms
                if first is None or assigned.released or started_ms is None or now_ms - started_ms <= self._timeout_ms:
                    break
                self._instance._log.warning(
                    "%(consumer)s: the listener exceeds consume_timeout on %(queue)s at %(queue_offset)d: "
                    "the message goes back",
                    queue=assigned.queue,
                    queue_offset=first.queue_offset,
                )
                cause = f"the listener has had it for over {self.config.consume_timeout:g} s"
                sent = self._retries().send_one_back(assigned, first, EXPIRED_LEVEL, cause)
                if sent is False:
                    break
                self._instance._note("settle", result="retry", messages=(first,))
                if sent is not None and sent.is_dead:
                    self._retries().log_dead_letter(assigned, first, TimeoutError(cause))
                # Progress moves with the next message that ends, or here if the queue is empty now.
                assigned.messages.remove((first,))
                if assigned.place is not None:
                    assigned.place.finish(first.queue_offset)
                if assigned.throttled:
                    self._resume(assigned)
                elif not len(assigned.messages):
                    self._runner.wake(assigned.pull)
        if any(next(assigned.messages._started(), None) for assigned in self._instance.assigned.values()):
            return next_from_first(now_ms, self._instance.started_ms, self._timeout_ms)
        return None
