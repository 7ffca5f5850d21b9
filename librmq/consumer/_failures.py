"""Failures: what becomes of messages whose listener failed, and of the consumer.

::

    result of the listener       concurrent                             orderly
    it returns                   consumed                               consumed
    an index of a batch          the messages after it are sent back    consumed
    not True, where it must      sent back                              the queue is suspended
    FAILURE, RECONSUME_LATER     sent back                              the queue is suspended
    ReconsumeLater               sent back, with its delay level        suspended; below level 0 a dead letter
    SuspendQueue                 sent back                              suspended for its seconds
    DownstreamDown               the consumer or the queue rests; this counts as no failure
    any other exception          sent back                              suspended
    after the last attempt       the broker makes a dead letter         the consumer sends a dead letter
    while broadcasting           dropped                                dropped after the last attempt

`librmq.broker.retries` stores what is sent back: for a later delivery, or as a dead letter.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, Final, Generic, Literal, TypeVar

from librmq.consumer._assignment import AssignedQueue
from librmq.consumer._instance import ConsumerCounts, Instance
from librmq.consumer._listeners import DeliveredMessage, Listener
from librmq.errors import RmqError
from librmq.listener import DownstreamDown, ReconsumeLater, SuspendQueue, is_requested, returned_failure
from librmq.message import Message, MessageQueue, retry_level, retry_topic
from librmq.message.properties import PropertyName, record_cause
from librmq.protocol import (
    INNER_PRODUCER,
    MessageModel,
    Request,
    SendBack,
    SendMessage,
    SentBack,
)
from librmq.runtime import Step
from librmq.runtime.runner import NEVER

R = TypeVar("R")
T = TypeVar("T")
REDELIVERY_MS: Final = 5_000
"""Pause before a message that no broker accepted back is delivered again."""
MIN_SUSPENSION_MS: Final = 10
MAX_SUSPENSION_MS: Final = 30_000  # Both limits are those of 4.9.
_MAX_CAUSE: Final = 500  # The cause shares the room of a record's properties, 32,767 bytes, with those of the message.
_MAX_KINDS: Final = 1_000


def outcome(listener: Listener, count: int, result: object, error: Exception | None) -> tuple[int, Exception | None]:
    """Return how many of ``count`` messages are consumed, and why the others failed (None: not acknowledged)."""
    if error is None and result is not None and result is not True:
        error = returned_failure(result)
    if error is not None:
        consumed = error.consumed if isinstance(error, ReconsumeLater) and listener.as_list else 0
        return min(max(0, consumed), count), error
    if listener.as_list and isinstance(result, int) and not isinstance(result, bool):
        if result < -1:
            return 0, ValueError(f"the listener returned {result}: expected the index of a message, or -1 for none")
        return min(result + 1, count), None
    return 0 if listener.must_return and result is not True else count, None


def suspension_ms(error: Exception | None, configured_ms: int) -> int:
    """Return for how long an orderly queue pauses after a failure."""
    pause_ms = configured_ms
    if isinstance(error, SuspendQueue) and error.seconds is not None:
        pause_ms = round(error.seconds * 1000)
    return min(MAX_SUSPENSION_MS, max(MIN_SUSPENSION_MS, pause_ms))


def cause_of(error: Exception | None) -> str:
    """Return an exception as one line for a property; None stands for a missing acknowledgement."""
    if error is None:
        return "the listener did not acknowledge it"
    text = str(error)
    name = type(error).__name__
    line = f"{name}: {text}" if text else name
    return "".join(char if char.isprintable() else " " for char in line[:_MAX_CAUSE])


class Retries:
    """Sends the failed messages of one consumer back, and logs each failure. Called under the runner's lock."""

    def __init__(self, consumer: Instance, counts: ConsumerCounts) -> None:
        self._consumer = consumer
        self._counts = counts
        self._failures: Counter[tuple[type[Exception], str, int]] = Counter()

    # ---- concurrent

    def send_back(
        self, assigned: AssignedQueue, failed: list[DeliveredMessage], error: Exception | None, max_times: int | None
    ) -> list[DeliveredMessage]:
        """Send failed messages back, log the results, and return those that no broker accepted.

        ``max_times`` is the number of redeliveries before a message becomes a dead letter, unless the broker answers
        another. A broadcasting consumer drops failed messages.
        """
        if self._consumer.config.model is MessageModel.BROADCASTING:
            self._counts.dropped += len(failed)
            next_attempt = "and it is dropped, because broadcasting has no retries"
            self.log_retry(assigned, failed, 1, 0, next_attempt, error)
            return []
        level = error.delay_level if isinstance(error, ReconsumeLater) else 0
        unaccepted: list[DeliveredMessage] = []
        retried: list[DeliveredMessage] = []
        due_ms: int | None = None
        next_delivery = "the next comes"
        for message in failed:
            sent = self.send_one_back(assigned, message, level, cause_of(error))
            if sent is False:
                unaccepted.append(message)
            elif sent is not None and sent.is_dead:
                self.log_dead_letter(assigned, message, error)
            else:
                if sent is None:
                    max_times, next_delivery = None, "and the broker does not say whether the next comes"
                elif not retried:
                    max_times, due_ms = sent.max_reconsume_times, sent.due_timestamp_ms
                retried.append(message)
        if retried:
            wait = "" if due_ms is None else f" in {(due_ms - self._consumer.runner.now_ms()) / 1000:g} s"
            self.log_retry(assigned, retried, retried[0].reconsume_times + 1, max_times, next_delivery + wait, error)
        if unaccepted:
            next_attempt = f"the next comes in {REDELIVERY_MS / 1000:g} s, because no broker accepted it back"
            self.log_retry(assigned, unaccepted, unaccepted[0].reconsume_times + 1, max_times, next_attempt, error)
        return unaccepted

    def send_one_back(
        self, assigned: AssignedQueue, message: DeliveredMessage, level: int, cause: str
    ) -> SentBack | Literal[False] | None:
        """Send one message back; return the broker's answer, or False if no broker accepted it."""
        request = SendBack(
            group=self._consumer.group,
            physical_offset=message.physical_offset,
            delay_level=level,
            max_reconsume_times=self._consumer.max_reconsume_times,
            origin_topic=message.topic,
            origin_message_id=message.origin_message_id,
            cause=cause,
            reconsume_times=super(DeliveredMessage, message).reconsume_times,
        )
        return self._send(assigned.queue.broker_name, request, "failed messages back")

    # ---- orderly

    def send_exhausted(
        self, assigned: AssignedQueue, messages: list[DeliveredMessage], error: Exception | None
    ) -> bool:
        """Count a failure of each message, send it back at the maximum, and return whether all were sent back."""
        max_times = self._consumer.max_reconsume_times
        at_once = isinstance(error, ReconsumeLater) and error.delay_level < 0
        are_all_sent = True
        for message in messages:
            is_exhausted = at_once or (max_times is not None and message.reconsume_times >= max_times)
            if not is_exhausted or not self._send_dead_letter(assigned, message, error, at_once):
                message._count_failure()
                are_all_sent = False
        return are_all_sent

    def _send_dead_letter(
        self, assigned: AssignedQueue, message: DeliveredMessage, error: Exception | None, at_once: bool
    ) -> bool:
        """Make a message a dead letter, as 4.9 does after its next delay, or ``at_once``; return whether it is one."""
        consumer = self._consumer
        if consumer.config.model is MessageModel.BROADCASTING:
            self._counts.dropped += 1
            self.log_retry(
                assigned, [message], message.reconsume_times + 1, None, "and it is dropped: broadcasting", error
            )
            return True
        times = message.reconsume_times + at_once
        limit = times if at_once else consumer.max_reconsume_times or 0
        copy = Message(retry_topic(consumer.group), message.body, flag=message.flag)
        copy.properties.update(message.properties)
        copy.properties[PropertyName.ORIGIN_MESSAGE_ID] = message.origin_message_id
        copy.properties[PropertyName.RETRY_TOPIC] = message.topic
        copy.properties[PropertyName.RECONSUME_TIME] = str(times)
        copy.properties[PropertyName.MAX_RECONSUME_TIMES] = str(limit)
        copy.properties.pop(PropertyName.TRANSACTION_PREPARED, None)
        copy.properties.pop(PropertyName.DELAY, None)
        level = 0 if at_once else retry_level(times)
        if not at_once:
            copy.properties[PropertyName.DELAY] = str(level)
        record_cause(copy.properties, cause_of(error), len(message.properties_raw))
        request = SendMessage(
            INNER_PRODUCER,
            copy,
            0,
            consumer.runner.now_ms(),
            consumer.client.host,
            reconsume_times=times,
            max_reconsume_times=limit,
        )
        if self._send(assigned.queue.broker_name, request, "dead letters") is False:
            return False
        self.log_dead_letter(assigned, message, error, delay_level=level)
        return True

    def _send(self, broker_name: str, request: Request[R], what: str) -> R | Literal[False]:
        """Send a message back; return the broker's answer, or False if it did not accept the message."""
        states, key, what = self._consumer._states, ("send back", broker_name), f"sending {what} to {broker_name}"
        try:
            answer = self._consumer.client.route.endpoint(broker_name).call(request)
        except RmqError as error:
            states.failing(key, what, error)
            return False
        states.works(key, what)
        self._counts.sent_back += 1
        return answer

    # ---- log lines

    def log_retry(
        self,
        assigned: AssignedQueue,
        messages: Sequence[DeliveredMessage],
        attempt: int,
        max_times: int | None,
        next_attempt: str,
        error: Exception | None,
    ) -> None:
        """Log a failed attempt and the time of the next; only the first failure of a kind has a traceback."""
        others = f" and {len(messages) - 1} others" if len(messages) > 1 else ""
        total = "" if max_times is None else f" of {max_times + 1}"
        self._consumer._log.log(
            logging.INFO if is_requested(error) else logging.WARNING,
            "%(consumer)s: attempt %(attempt)d%(_of)s on %(queue)s at %(queue_offset)d (%(message_id)s)%(_others)s "
            "failed (%(cause)s%(_alike)s), %(_next)s",
            _of=total,
            _others=others,
            _next=next_attempt,
            cause=cause_of(error),
            **self._counted(error),
            **_fields(assigned, messages[0], attempt),
        )

    def log_dead_letter(
        self, assigned: AssignedQueue, message: DeliveredMessage, error: Exception | None, *, delay_level: int = 0
    ) -> None:
        """Log a dead letter, which the broker stores after a delay level if there is one."""
        self._consumer._note("give_up", message.topic, messages=(message,))
        attempt = message.reconsume_times + 1
        self._consumer._log.error(
            "%(consumer)s: dead letter of group %(group)s%(_when)s: %(queue)s at %(queue_offset)d (%(message_id)s), "
            "key %(keys)s, after %(attempt)d attempt%(_s)s: %(cause)s%(_alike)s",
            keys=" ".join(message.keys) or "none",
            _s="" if attempt == 1 else "s",
            _when=f", which is there after delay level {delay_level}" if delay_level else "",
            cause=cause_of(error),
            **self._counted(error),
            **_fields(assigned, message, attempt),
        )

    def _counted(self, error: Exception | None) -> dict[str, Any]:
        """Count a failure of its kind, an exception's class and line; return its number and traceback for the log.

        Only the first has the traceback, because a thousand messages that fail in one way would bury other lines.
        """
        if error is None or is_requested(error):
            return {"_alike": ""}
        code, line = _place(error)
        if len(self._failures) >= _MAX_KINDS:  # Generated code can raise at ever new lines, so the counts have a limit.
            self._failures.clear()
        self._failures[type(error), code, line] += 1
        number = self._failures[type(error), code, line]
        if number == 1:
            return {"_alike": "", "alike": 1, "exc_info": error}
        at = f", at {os.path.basename(code)}:{line}" if code else ""
        return {"_alike": f"; failure {number:,} of its kind{at}", "alike": number}


def _place(error: Exception) -> tuple[str, int]:
    """Return the file and line at which an exception was raised."""
    trace = error.__traceback__
    if trace is None:
        return "", 0
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno


def _fields(assigned: AssignedQueue, message: DeliveredMessage, attempt: int) -> dict[str, Any]:
    return {
        "queue": assigned.queue,
        "topic": message.topic,
        "queue_offset": message.queue_offset,
        "message_id": message.message_id,
        "attempt": attempt,
    }


# ---- what waits for a time


class Rests(Generic[T]):
    """What waits for a time in one consumer, and what is kept meanwhile. Called under the runner's lock.

    The whole consumer or a queue rests while a service that listeners call is down, or the queue is suspended. Failed
    messages that no broker has accepted back are kept for a time of their own.
    """

    def __init__(self, consumer: Instance, resumed: Callable[[int, list[T]], None]) -> None:
        """``resumed(now_ms, due)`` is called when rests end, with what was kept for them."""
        self._consumer = consumer
        self._resumed = resumed
        self.times: dict[MessageQueue | None, tuple[int, int]] = {}
        """Start and end of the rest of each queue; None is the whole consumer."""
        # A heap of the end of the wait, a number that keeps the order of equal ends, and the start.
        self._kept: list[tuple[int, int, int, T]] = []
        self._number = 0
        self.is_probing: bool = False
        """Whether the next call decides if the whole consumer continues."""
        self._step = Step(f"{consumer._label} resume", self._end_rests, consumer.client)

    def __contains__(self, queue: MessageQueue) -> bool:
        return bool(self.times) and (None in self.times or queue in self.times)

    def begin_rest(self, error: DownstreamDown, queue: MessageQueue) -> int:
        """Begin a rest and return its length in milliseconds; only the first in a row is logged as a warning."""
        consumer, rest_ms = self._consumer, max(1, round(1000 * error.seconds))
        self.is_probing |= not error.only_queue
        if not consumer._stopping:
            consumer._states.failing(("downstream",), "what listeners call", error, again_ms=rest_ms)
        consumer._note("rest", queue.topic)
        self.rest(queue if error.only_queue else None, rest_ms)
        return rest_ms

    def rest(self, queue: MessageQueue | None, milliseconds: int) -> None:
        """Let a queue, or the whole consumer, rest for a time."""
        now_ms = self._consumer.runner.now_ms()
        self.times[queue] = now_ms, max(now_ms + milliseconds, self.times.get(queue, (0, 0))[1])
        self._wake()

    def keep(self, item: T, begin_ms: int, end_ms: int) -> None:
        """Keep something until a time."""
        self._number += 1
        heappush(self._kept, (end_ms, self._number, begin_ms, item))
        self._wake()

    def _wake(self) -> None:
        self._consumer.runner.wake(self._step, self._next_ms)

    def end(self, queue: MessageQueue) -> None:
        """End the rest of a queue, without what is kept for it."""
        self.times.pop(queue, None)

    def succeeded(self) -> None:
        """Note a successful call, which ends the probing."""
        if not self.times:
            self.is_probing = False
            self._consumer._states.works(("downstream",), "what listeners call")

    @property
    def _next_ms(self) -> int:
        ends = [end for _, end in self.times.values()]
        return min([*ends, *(kept[0] for kept in self._kept[:1])], default=NEVER)

    def _end_rests(self, now_ms: int) -> int | None:
        # A time that has not come ends too if it is before the start: the clock was set back.
        for queue, (begin, end) in list(self.times.items()):
            if not begin <= now_ms < end:
                del self.times[queue]
        due: list[T] = []
        while self._kept and not self._kept[0][2] <= now_ms < self._kept[0][0]:
            due.append(heappop(self._kept)[3])
        self._resumed(now_ms, due)
        return self._next_ms if self.times or self._kept else None
