"""Failed messages that are sent back to the broker, or made dead letters, with a line in the log for each."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeVar

from librmq.consumer._assignment import AssignedQueue
from librmq.consumer._failures import REDELIVERY_MS, EndsProcess, cause_of
from librmq.consumer._instance import Instance
from librmq.consumer._listeners import DeliveredMessage
from librmq.errors import RmqError
from librmq.listener import ReconsumeLater, is_requested
from librmq.message import Message, retry_level, retry_topic
from librmq.message.properties import PropertyName, record_cause
from librmq.protocol import INNER_PRODUCER, MessageModel, Request, SendBack, SendMessage, SentBack

R = TypeVar("R")
_MAX_KINDS: Final = 1_000


class Retries:
    """Sends the failed messages of one consumer back, and logs each failure. Called under the runner's lock."""

    def __init__(self, consumer: Instance) -> None:
        self._consumer = consumer
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

    def convict(self, assigned: AssignedQueue, message: DeliveredMessage, error: EndsProcess) -> bool:
        """Make a message a dead letter because processes have ended at it; return False if no broker accepts it."""
        if self.send_one_back(assigned, message, -1, cause_of(error)) is False:
            return False
        self.log_dead_letter(assigned, message, error)
        return True

    # ---- orderly

    def send_exhausted(
        self, assigned: AssignedQueue, messages: list[DeliveredMessage], error: Exception | None
    ) -> tuple[list[DeliveredMessage], list[DeliveredMessage]]:
        """Send back each message at the maximum, count a failure of the others; return those sent back, and others."""
        max_times = self._consumer.max_reconsume_times
        at_once = isinstance(error, ReconsumeLater) and error.delay_level < 0
        sent, remaining = list[DeliveredMessage](), list[DeliveredMessage]()
        for message in messages:
            is_exhausted = at_once or (max_times is not None and message.reconsume_times >= max_times)
            if is_exhausted and self._send_dead_letter(assigned, message, error, at_once):
                sent.append(message)
            else:
                message._count_failure()
                remaining.append(message)
        return sent, remaining

    def _send_dead_letter(
        self, assigned: AssignedQueue, message: DeliveredMessage, error: Exception | None, at_once: bool
    ) -> bool:
        """Make a message a dead letter, as 4.9 does after its next delay, or ``at_once``; return whether it is one."""
        consumer = self._consumer
        if consumer.config.model is MessageModel.BROADCASTING:
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
        states, key = self._consumer._states, ("send back", broker_name)
        try:
            answer = self._consumer.client.route.endpoint(broker_name).call(request)
        except RmqError as error:
            states.failing(f"sending {what} to {broker_name}", error, key=key)
            return False
        states.works(key)
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
