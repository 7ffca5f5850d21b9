"""Delivery at any time by delay levels: a message is sent again in hops, each as long as a level.

Each hop takes the longest level that is not longer than what remains, else the shortest: by 4.9's levels 10 h 1 s are 6
hops, 5 × 2 h and 1 s. Messages are late by less than the shortest level (1 s) plus one tick of the schedule (100 ms),
for any number of hops: each hop is computed from the current time, so lateness does not add up. Messages are never
early.

`HopProxy` does this. A message that must wait goes to topic ``SYSTEM_SCHEDULE_MSG``, with its time and its own topic
and queue as properties. The proxy sends it on by level, and finally to its own topic without those properties.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from librmq.config import check_now
from librmq.errors import LASTING, ConfigError, MessageIllegalError, StoreError
from librmq.java.lang import java_int, java_long
from librmq.message import DEFAULT_LEVELS, DelayLevels, Message, StoredMessage
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic, validate_topic
from librmq.runtime import ProgressSaver, StateLog
from librmq.runtime.event_log import EventLog
from librmq.runtime.runner import Aside
from librmq.scheduling.half_messages import TransactionOffsets
from librmq.scheduling.waiting import HOP_GROUP, EarlierCopies
from librmq.store import AppendResult, GetStatus, MessageStore

_log = EventLog("librmq.hops")

_SAVE_EVERY_S: Final = 10  # After a crash the log is searched for copies of what was sent on since the last save.

_HOP_PROPERTIES: Final = frozenset(
    (
        PropertyName.HOP_MS,
        PropertyName.HOP_TOPIC,
        PropertyName.HOP_QUEUE_ID,
        PropertyName.DELAY,
        PropertyName.REAL_TOPIC,
        PropertyName.REAL_QUEUE_ID,
    )
)
_QUEUE: Final = 0
_READ: Final = 32
_RETRY_MS: Final = 10_000
_SENDING: Final = "sending on"


def best_level(remaining_ms: int, levels: DelayLevels = DEFAULT_LEVELS) -> int:
    """Return the longest level that is not longer than the remaining time, or the shortest if all are.

    Raises:
        ConfigError: No level has a delay.
    """
    delays = [(delay_ms, -level) for level, delay_ms in enumerate(levels.delays_ms, 1) if delay_ms > 0]
    if not delays:
        raise ConfigError("delay levels: expected one above 0 s for hops, found none")
    return -max((delay for delay in delays if delay[0] <= remaining_ms), default=min(delays))[1]


def send_at(message: Message, target_ms: int, queue_id: int = 0) -> Message:
    """Return the message to send instead of ``message``, so that it reaches its topic at ``target_ms``.

    Raises:
        MessageIllegalError: The topic is invalid, or the message also has a delay level.
    """
    validate_topic(message.topic)
    if PropertyName.DELAY in message.properties:
        raise MessageIllegalError("delay level: expected none for a message with a delivery time")
    relayed = Message(SystemTopic.HOP, message.body, flag=message.flag)
    relayed.properties = {
        **message.properties,
        PropertyName.HOP_MS: str(target_ms),
        PropertyName.HOP_TOPIC: message.topic,
        PropertyName.HOP_QUEUE_ID: str(queue_id),
    }
    return relayed


class HopProxy:
    """Sends on the messages in topic ``SYSTEM_SCHEDULE_MSG``. Not thread-safe: one caller at a time.

    Use it with `librmq.delay.DelaySchedule`, which delivers each hop to the topic again; call `run_due` when a message
    has arrived there. A message without a time or a topic is dropped and logged as an error. After a temporary failure,
    such as a full disk, the next try is 10 s later. After a crash a message that the log shows as sent on is passed;
    in doubt it is sent on again, so none is lost or early.
    """

    def __init__(
        self,
        store: MessageStore,
        offsets: TransactionOffsets,
        *,
        delivered: Callable[[StoredMessage, AppendResult], None] | None = None,
        make_topic: Callable[[str, int], None] = lambda topic, queue_id: None,
        is_cancelled: Callable[[StoredMessage, int], bool] = lambda message, now_ms: False,
        aside: Aside | None = None,
    ) -> None:
        """Continue from the saved progress.

        Args:
            store: Open for writing.
            offsets: Keeps the progress.
            delivered: ``delivered(message, result)`` is called for each message that reaches its topic.
            make_topic: ``make_topic(topic, queue_id)`` is called before a delivery, to make the queue available to
                consumers; `MessageIllegalError` drops the message.
            is_cancelled: ``is_cancelled(message, now_ms)`` returns whether a message that has arrived is not sent on.
            aside: Flushes the store while other work continues; None flushes within `run_due`.
        """
        self._make_topic = make_topic
        self._is_cancelled = is_cancelled
        self._store = store
        self._offsets = offsets
        self._delivered = delivered
        self._states = StateLog(_log, "the relay")
        self._earlier = EarlierCopies(store, store.log.end)
        self._next_offset = offsets.consumer_offset(SystemTopic.HOP, HOP_GROUP, _QUEUE) or 0
        self._saved_offset = self._next_offset
        self._saver = ProgressSaver(
            "the relay's progress",
            flush=lambda reached: store.flush(),
            reached=lambda: self._next_offset if self._next_offset != self._saved_offset else None,
            note=self._save_progress,
            now_ms=store.clock.now_ms,
            save_every_s=_SAVE_EVERY_S,
            aside=aside,
        )

    def run_due(self, now_ms: int) -> int | None:
        """Send on all arrived messages; return the latest time of the next call (ms), None to wait for an arrival.

        Raises:
            StoreClosedError: The store was closed.
            FlushFailedError: A flush has failed; the store must be reopened.
            ReadOnlyError: The store is read-only.
        """
        check_now(now_ms)
        try:
            self._send_all(now_ms)
            self._states.works(_SENDING)
            return self._saver.run_due(now_ms)
        except LASTING:
            raise
        except StoreError as error:
            self._states.failing(_SENDING, error, logging.ERROR, again_ms=_RETRY_MS)
            return now_ms + _RETRY_MS

    def _send_all(self, now_ms: int) -> None:
        while True:
            batch = self._store.read(SystemTopic.HOP, _QUEUE, self._next_offset, _READ)
            for message in batch.messages:
                self._send_on(message, now_ms)
                self._next_offset = message.queue_offset + 1
            if batch.messages:
                continue
            if batch.status is GetStatus.NO_MESSAGE_IN_QUEUE or batch.next_offset == self._next_offset:
                return
            self._next_offset = batch.next_offset

    @property
    def next_offset(self) -> int:
        """Queue offset of the next message to send on."""
        return self._next_offset

    def save(self) -> None:
        """Save the progress, after a flush of the store. Raises the errors of the flush."""
        self._saver.save()

    def _save_progress(self, reached: int) -> None:
        """Save the progress over messages that are on the device."""
        self._offsets.set_consumer_offset(SystemTopic.HOP, HOP_GROUP, _QUEUE, reached)
        self._saved_offset = reached

    def _send_on(self, message: StoredMessage, now_ms: int) -> None:
        properties = message.properties
        target_ms = java_long(properties.get(PropertyName.HOP_MS, ""))
        queue_id = java_int(properties.get(PropertyName.HOP_QUEUE_ID, "0"))
        topic = properties.get(PropertyName.HOP_TOPIC, "")
        try:
            if target_ms is None or queue_id is None or topic == SystemTopic.HOP:
                raise MessageIllegalError("expected properties with a time, a queue and a topic")
            if self._is_cancelled(message, now_ms):
                return
            if self._earlier.concerns(message.physical_offset) and self._earlier.has(
                message, (SystemTopic.SCHEDULE, topic), lambda copy: _was_sent_on(copy, topic, queue_id)
            ):
                return
            is_due = now_ms >= target_ms
            if is_due:
                new_properties = {name: value for name, value in properties.items() if name not in _HOP_PROPERTIES}
                validate_topic(topic)
                self._make_topic(topic, queue_id)
                result = self._store.copies.append_again(message, topic, queue_id, new_properties)
            else:
                level = best_level(target_ms - now_ms, self._store.levels)
                new_properties = {**properties, PropertyName.DELAY: str(level)}
                result = self._store.copies.append_again(message, SystemTopic.HOP, _QUEUE, new_properties)
        except MessageIllegalError as error:
            _log.error(
                "the message at queue offset %(queue_offset)d, physical offset %(physical_offset)d is dropped: "
                "%(error)s",
                queue_offset=message.queue_offset,
                physical_offset=message.physical_offset,
                error=error,
                topic=SystemTopic.HOP,
                queue_id=_QUEUE,
            )
            return
        if is_due and self._delivered is not None:
            self._delivered(message, result)


def _was_sent_on(copy: StoredMessage, topic: str, queue_id: int) -> bool:
    """Return whether a record is a hop, or the delivery to this queue."""
    if copy.topic == SystemTopic.SCHEDULE:
        return copy.properties.get(PropertyName.REAL_TOPIC) == SystemTopic.HOP
    return copy.topic == topic and copy.queue_id == queue_id
