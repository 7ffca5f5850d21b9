"""Delay levels: messages that wait in the schedule topic until their time.

A message with a delay level is stored twice. `MessageStore.append` puts it into topic ``SCHEDULE_TOPIC_XXXX``, queue
``level - 1``, with its own topic and queue in the properties ``REAL_TOPIC`` and ``REAL_QID`` and the time of delivery
as the entry's tags code. `DelaySchedule` writes it again, to its own topic, at that time. Its progress in the queue of
each level is in ``delayOffset.json``, by level:

    level     1, 2, …           the queue offset of the next message to deliver from queue level - 1

Mirrors 4.9.4's ``ScheduleMessageService``. It looks on a grid of 100 ms, from a second after the start on, but only at
times when a message can be due: `DelaySchedule.run_due` returns the next such look.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

from librmq.config import DelayConfig as DelayConfig
from librmq.config import check_now
from librmq.consumequeue import ConsumeQueue
from librmq.consumequeue_entries import ENTRY, is_ext_address
from librmq.errors import (
    LASTING,
    CorruptionError,
    MessageIllegalError,
    RecordError,
    StoreError,
)
from librmq.java.lang import java_int
from librmq.message import StoredMessage
from librmq.message.delays import level_of_queue_id, queue_id_of_level
from librmq.message.properties import PropertyName, encode_properties, is_encoding_of, texts_before_values
from librmq.message.topics import SystemTopic
from librmq.runtime import ProgressSaver, StateLog
from librmq.runtime.event_log import EventLog
from librmq.runtime.runner import Aside
from librmq.scheduling.waiting import EarlierCopies
from librmq.store import AppendResult, BrokerTables, MessageStore
from librmq.store.engine.copies import Prepared
from librmq.store.engine.read import records_of

__all__ = ["DelaySchedule"]

_log = EventLog("librmq.delay")

_ENTRIES_A_READ: Final = 64  # entries read together
_HASHES: Final = -(1 << 31), 1 << 31  # no time in ms of this century is among them


COPIED_PROPERTIES: Final = (PropertyName.REAL_TOPIC, PropertyName.REAL_QUEUE_ID)
"""The properties that a delivery reads."""


class Layout:
    """The stored properties of messages that have the same names, as `codec.encode_properties` writes them.

    Consecutive waiting messages mostly have the same names. Their values are found without decoding the others, and
    matching properties are encoded as they would be again.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        text = "\2".join(f"{re.escape(name)}\1([^\1\2]+)" for name in names)
        self.befores = list(map(str.encode, texts_before_values(names)))
        """The bytes before each value."""
        self.places = tuple(names.index(name) if name in names else -1 for name in COPIED_PROPERTIES)
        """The numbers of the needed values, -1 for an absent one."""
        self._match = re.compile(f"{text}((?!))?").fullmatch  # the last group, of absent properties, is None
        self._groups = [len(names) + 1 if place < 0 else place + 1 for place in self.places]

    def values_of(self, raw: bytes) -> tuple[str | None, ...] | None:
        """Return the values of the needed properties, None if the properties have another layout."""
        match = self._match(raw.decode("ascii")) if raw.isascii() else None
        return None if match is None else match.group(*self._groups)


class _Layouts:
    """Choice of the layout for the next message's properties, from the previous ones."""

    __slots__ = ("_names", "_run", "current")

    def __init__(self) -> None:
        self.current: Layout | None = None
        self._names: tuple[str, ...] = ()
        self._run = 0

    def record_names(self, names: tuple[str, ...]) -> None:
        """Note the names of a message that does not fit the current layout.

        Making a layout takes as long as decoding hundreds of messages. So it is made only for few names that occurred
        several times in a row. Senders with random names then cost no more than decoding.
        """
        self._run = self._run + 1 if names == self._names else 1
        self._names = names
        if self._run >= _LAYOUT_FROM and len(names) <= _LAYOUT_NAMES:
            self.current = _layout_of(names)


_LAYOUT_FROM: Final = 16
_LAYOUT_NAMES: Final = 32
_layout_of = lru_cache(maxsize=64)(Layout)


class _Level:
    """One level: its queue, and the time of its next look."""

    __slots__ = ("delay_ms", "earlier", "label", "level", "look_ms", "next_offset", "queue_id", "saved_offset")

    def __init__(self, level: int, delay_ms: int | None, queue_offset: int, earlier: EarlierCopies) -> None:
        self.level = level
        self.earlier = earlier
        self.next_offset = self.saved_offset = queue_offset
        """Queue offset of the next message, and the saved one."""
        self.queue_id = queue_id_of_level(level)
        self.delay_ms = delay_ms
        """Delay of the level, None if the settings no longer have it."""
        self.label = f"level {level}"
        self.look_ms: int | None = None
        """The look at which the first waiting message is due; None without one."""


class DelaySchedule:
    """Delivery of the messages in a store's schedule topic. Not thread-safe: one caller at a time.

    Every message is delivered at the first look at or after its time, messages of a level in order. A message further
    away than the level's delay, because the clock was set back or the levels were changed, is delivered at once. If the
    settings no longer have its level, it is delivered at its time; 4.9 never delivers it.

    An undeliverable message (a half message, without a topic, damaged) is logged as an error and skipped; its record
    stays in the log. After a temporary failure, such as a full disk, the next look at the level is 10 s later.

    After a crash delivery continues from the last saved progress. A message that the log shows as delivered since then
    is passed; one without a unique id is delivered again, and none is lost. A save flushes the store first, so that no
    progress outlives the messages it covers.
    """

    def __init__(  # noqa: PLR0913 (what a broker gives it)
        self,
        store: MessageStore,
        offsets: BrokerTables,
        start_ms: int,
        config: DelayConfig | None = None,
        *,
        delivered: Callable[[StoredMessage, str, int, AppendResult], None] | None = None,
        is_cancelled: Callable[[StoredMessage, int], bool] | None = None,
        persist: Callable[[int], object] | None = None,
        aside: Aside | None = None,
        is_first: bool = False,
    ) -> None:
        """Delivery continues from the saved progress.

        Args:
            store: Open for writing.
            offsets: Keeps the progress.
            start_ms: Start of the grid of looks.
            config: Times of looks and saves.
            delivered: ``delivered(message, topic, queue_id, result)`` is called for each delivery with the waiting
                message and its new place. It must not raise.
            is_cancelled: ``is_cancelled(message, now_ms)`` returns whether a due message is not delivered.
            persist: ``persist(now_ms)`` writes the progress, durable when it returns; None writes all of ``offsets``.
            aside: Flushes the store while other work continues; None flushes within `run_due`.
            is_first: Whether no earlier run of the store had delayed messages, so that none has been delivered.
        """
        config = config or DelayConfig()
        self._store = store
        self._offsets = offsets
        self._persist = persist or offsets.persist
        self._delivered = delivered
        self._is_cancelled = is_cancelled
        self._layouts = _Layouts()
        self._states = StateLog(_log, "delayed messages")
        self._first_look_ms = round(1000 * config.first_look_s)
        self._every_ms = round(1000 * config.look_every_s)
        self._retry_ms = round(1000 * config.retry_s)
        self._saver = ProgressSaver(
            "the progress of the delay levels",
            flush=lambda reached: store.flush(),
            reached=lambda: (self._unsaved_offsets() or None) if self._unsaved else None,
            note=self._save_offsets,
            now_ms=store.clock.now_ms,
            save_every_s=config.save_every_s,
            retry_s=config.retry_s,
            aside=aside,
        )
        self._most = config.most_at_once
        self._begin_ms = start_ms + self._first_look_ms
        self._last_ms = start_ms
        self._unsaved = False
        stored_levels = {
            level_of_queue_id(queue_id) for topic, queue_id in store.queues if topic == SystemTopic.SCHEDULE
        }
        configured_levels = range(1, store.levels.max_level + 1)
        self._levels = [
            _Level(
                level,
                store.levels.delay_ms(level) if level in configured_levels else None,
                offsets.delay_offset(level),
                EarlierCopies(store, 0 if is_first else store.log.end),
            )
            for level in sorted(stored_levels | set(configured_levels))
        ]

    @property
    def progress(self) -> dict[int, int]:
        """Queue offsets of the next message to deliver, by level, for levels with messages."""
        return {level.level: level.next_offset for level in self._levels if level.next_offset}

    def next_offsets(self) -> list[tuple[int, int]]:
        """Return for each queue of the schedule topic the queue offset of the next message to deliver. Thread-safe."""
        return [(level.queue_id, level.next_offset) for level in self._levels]

    def due_for(self, level: int, store_timestamp_ms: int) -> int:
        """Return the latest time to call `run_due` for a message of ``level`` stored at a time.

        Code that appends delayed messages must have `run_due` called by then. A call right after the append works too,
        and costs little.
        """
        levels = self._store.levels
        return self._next_look_ms(levels.deliver_timestamp_ms(levels.cap(level), store_timestamp_ms))

    def run_due(self, now_ms: int) -> int | None:
        """Deliver due messages, and return the time in ms of the next useful look, None if no message waits.

        The look is the last one of the grid that is not after ``now_ms``.

        Raises:
            StoreClosedError: The store was closed.
            FlushFailedError: A flush has failed; the store must be reopened.
            ReadOnlyError: The store is read-only.
        """
        check_now(now_ms)
        if now_ms < self._last_ms:  # the clock was set back, so find all due times again
            self._begin_ms = min(self._begin_ms, now_ms)
            self._saver.put_back(now_ms)
            for level in self._levels:
                level.look_ms = None
        self._last_ms = now_ms
        early = now_ms < self._begin_ms
        look_ms = now_ms - (now_ms - self._begin_ms) % self._every_ms
        next_ms: int | None = None
        for level in self._levels:
            if level.look_ms is None:
                _, end = self._store.queue_range(SystemTopic.SCHEDULE, level.queue_id)
                if end == level.next_offset:
                    continue  # fast path: no message waits
            if level.look_ms is None or level.look_ms <= look_ms:
                level.look_ms = self._deliver_level(level, None if early else look_ms)
            if level.look_ms is not None and (next_ms is None or level.look_ms < next_ms):
                next_ms = level.look_ms
        save_ms = self._saver.run_due(now_ms)
        return next_ms if save_ms is None or (next_ms is not None and next_ms < save_ms) else save_ms

    def has_due(self, now_ms: int) -> bool:
        """Return whether a message is due and not delivered yet, as after an opening until the first look."""
        for level in self._levels:
            queue, queue_offset = self._store.queue(SystemTopic.SCHEDULE, level.queue_id), level.next_offset
            raw = b"" if queue is None else queue.read(queue_offset, 1)
            if queue is not None and raw and self._due_ms(level, queue, queue_offset, *ENTRY.unpack(raw)) <= now_ms:
                return True
        return False

    def save(self, now_ms: int) -> None:
        """Save the progress, after a flush of the store, so that the device has the delivered messages.

        It does nothing without new progress. Raises the errors of `MessageStore.flush`.
        """
        self._last_ms = now_ms
        self._saver.save()

    def _unsaved_offsets(self) -> list[tuple[_Level, int]]:
        return [(level, level.next_offset) for level in self._levels if level.next_offset != level.saved_offset]

    def _save_offsets(self, reached: Sequence[tuple[_Level, int]]) -> None:
        """Write progress whose messages are on the device."""
        for level, queue_offset in reached:
            self._offsets.set_delay_offset(level.level, queue_offset)
        self._persist(self._last_ms)
        for level, queue_offset in reached:
            level.saved_offset = queue_offset
        self._unsaved = bool(self._unsaved_offsets())

    def _next_look_ms(self, due_ms: int) -> int:
        """Return the first look at or after a time."""
        return max(self._begin_ms, due_ms + (self._begin_ms - due_ms) % self._every_ms)

    def _deliver_level(self, level: _Level, look_ms: int | None) -> int | None:
        """Deliver the due messages of a level at a look, none if that is None, and return the next look."""
        try:
            next_ms = self._deliver_due(level, look_ms)
        except LASTING:
            raise
        except StoreError as error:
            self._states.failing(level.label, error, logging.ERROR, again_ms=self._retry_ms)
            return self._next_look_ms(self._last_ms + self._retry_ms)
        self._states.works(level.label)
        return next_ms

    def _deliver_due(self, level: _Level, look_ms: int | None) -> int | None:
        queue = self._store.queue(SystemTopic.SCHEDULE, level.queue_id)
        queue_offset = self._next_offset_of(level, queue)
        if queue is None:
            return None
        end = queue_offset + self._most
        count = 1  # usually one look finds one message
        while queue_offset < end:
            raw = queue.read(queue_offset, min(count, end - queue_offset))
            if not raw:
                return None
            due, next_look = self._count_due(level, queue, queue_offset, raw, look_ms)
            if due:
                self._deliver(level, queue, queue_offset, raw[: due * ENTRY.size])
            queue_offset += due
            if next_look is not None:
                return next_look
            count = min(_ENTRIES_A_READ, 2 * count)
        return look_ms  # the rest is due immediately

    def _count_due(
        self, level: _Level, queue: ConsumeQueue, queue_offset: int, raw: bytes, look_ms: int | None
    ) -> tuple[int, int | None]:
        """Return how many of these entries are due at a look, and the look at which the next one is; None if all are.

        The records are asked about the last that is due and the first that is not. Those before are due too, because
        the times of a level are in order.
        """
        entries = list(ENTRY.iter_unpack(raw))

        def look_of(number: int) -> int | None:
            return self._look_of(level, queue, queue_offset + number, entries[number], look_ms)

        due, wait = 0, None
        while look_ms is not None and due < len(entries) and entries[due][2] <= look_ms:
            due += 1
        while due < len(entries) and (wait := look_of(due)) is None:  # an entry is wrong, or the clock was set back
            due += 1
        while due and (earlier := look_of(due - 1)) is not None:
            due, wait = due - 1, earlier
        return due, wait

    def _look_of(
        self, level: _Level, queue: ConsumeQueue, queue_offset: int, entry: tuple[int, int, int], look_ms: int | None
    ) -> int | None:
        """Return the look at which a message is due; None if it is at this one."""
        due_ms = self._due_ms(level, queue, queue_offset, *entry)
        too_far = level.delay_ms is not None and due_ms > self._last_ms + level.delay_ms
        if look_ms is not None and (due_ms <= look_ms or too_far):
            return None
        return self._begin_ms if too_far else self._next_look_ms(due_ms)

    def _next_offset_of(self, level: _Level, queue: ConsumeQueue | None) -> int:
        """Return the queue offset of the next message, corrected if the queue does not have it."""
        stored = level.next_offset
        low, high = (0, 0) if queue is None else (queue.min_offset, queue.max_offset)
        corrected = min(max(stored, low), high)
        if corrected != stored:
            _log.error(
                "delay level %(level)d: the progress was %(old)d and is set to %(queue_offset)d, because its queue "
                "has %(_low)d to %(_high)d",
                level=level.level,
                old=stored,
                queue_offset=corrected,
                _low=low,
                _high=high,
            )
            level.next_offset = corrected
            self._unsaved = True
        return corrected

    def _due_ms(
        self, level: _Level, queue: ConsumeQueue, queue_offset: int, physical_offset: int, size: int, code: int
    ) -> int:
        """Return the delivery time of an entry's message: the entry's, if the record can have waited for it.

        A level is a whole number of seconds, also where a broker wrote the entry by other levels.
        """
        if queue.ext is not None and is_ext_address(code):
            unit = queue.ext_unit(code)
            if unit is None:
                _log.error(
                    "delay level %(level)d: no extension unit at %(unit)d, so the record gives the time",
                    level=level.level,
                    unit=code,
                )
            code = 0 if unit is None else unit.tags_code
        name = SystemTopic.SCHEDULE, level.queue_id
        try:
            message = self._read(queue, name, queue_offset, physical_offset, size)
        except RecordError:
            return code  # its delivery says so
        if message is None:
            return code
        stored_ms = message.store_timestamp_ms
        # 4.9's recovery makes entries with the hash of the tags in place of the time.
        is_time = not _HASHES[0] <= code < _HASHES[1] and code >= stored_ms and (code - stored_ms) % 1000 == 0
        return code if is_time else stored_ms + (level.delay_ms or 0)

    def _deliver(self, level: _Level, queue: ConsumeQueue, queue_offset: int, entries: bytes) -> None:
        """Deliver the messages of packed entries from ``queue_offset`` on, and log each one that is dropped.

        Messages deleted with the log's beginning are skipped.
        """
        name = SystemTopic.SCHEDULE, level.queue_id
        messages, _ = records_of(self._store.log, name, queue_offset, entries) or (None, 0)
        if messages is not None and self._deliver_usual(level, queue_offset, entries, messages):
            return
        end = queue_offset + len(entries) // ENTRY.size
        waiting: list[StoredMessage] = []
        copies: list[Prepared] = []
        places: list[int] = []
        for place, (physical_offset, size, _) in enumerate(ENTRY.iter_unpack(entries), queue_offset):
            try:
                if messages is None:
                    message = self._read(queue, name, place, physical_offset, size)
                else:
                    message = messages[place - queue_offset]
                if message is not None:
                    if self._is_cancelled is not None and self._is_cancelled(message, self._last_ms):
                        continue
                    copy = self._prepare_copy(message)
                    if level.earlier.concerns(physical_offset) and _was_delivered(level.earlier, message, copy):
                        continue
                    copies.append(copy)
                    waiting.append(message)
                    places.append(place)
            except (MessageIllegalError, RecordError) as error:
                self._write(level, waiting, copies, places)
                waiting, copies, places = [], [], []
                _log.error(
                    "delay level %(level)d: the message at queue offset %(queue_offset)d, physical offset "
                    "%(physical_offset)d is dropped: %(error)s",
                    level=level.level,
                    queue_offset=place,
                    physical_offset=physical_offset,
                    error=error,
                    topic=SystemTopic.SCHEDULE,
                    queue_id=level.queue_id,
                )
                level.next_offset = place + 1
                self._unsaved = True
        self._write(level, waiting, copies, places)
        if len(places) < end - queue_offset:  # save soon what the log showed, so that no later opening looks for it
            self._saver.put_back(self._last_ms)
        level.next_offset = end
        self._unsaved = True

    def _deliver_usual(
        self, level: _Level, queue_offset: int, entries: bytes, messages: Sequence[StoredMessage]
    ) -> bool:
        """Deliver the messages of entries by the compiled core; return False, without any effect, if it can't.

        It takes messages of the current layout that are not cancelled and that no earlier run can have delivered.
        """
        layout = self._layouts.current
        if layout is None or level.earlier.concerns(ENTRY.unpack_from(entries)[0]):
            return False
        if self._is_cancelled is not None:
            try:
                if any(self._is_cancelled(message, self._last_ms) for message in messages):
                    return False
            except RecordError:
                return False
        reports = self._store.copies.append_waiting(messages, layout.befores, layout.places)
        if reports is None:
            return False
        level.next_offset = queue_offset + len(messages)
        self._unsaved = True
        if self._delivered is not None:
            for report in reports:
                self._delivered(*report)
        return True

    def _prepare_copy(self, waiting: StoredMessage) -> Prepared:
        """Return a waiting message as sent to its own topic and queue.

        Raises:
            MessageIllegalError: It names no topic and queue, or the half topic, whose messages only a transaction ends,
                or the schedule topic.
        """
        _, _, _, _, begin, end = waiting.frame
        raw = waiting.raw[begin:end]
        layout = self._layouts.current
        values = None if layout is None else layout.values_of(raw)
        if values is None:
            properties = waiting.properties
            values = tuple(map(properties.get, COPIED_PROPERTIES))
            if is_encoding_of(raw, properties):
                self._layouts.record_names(tuple(properties))
            else:
                raw = encode_properties(properties)
        topic, queue_text = values
        queue_id = _queue_id(queue_text or "")
        if queue_id is None:
            raise MessageIllegalError(f"REAL_QID: expected a queue id, found {queue_text!r:.80}")
        if topic in (SystemTopic.HALF, SystemTopic.SCHEDULE):
            raise MessageIllegalError(f"REAL_TOPIC: expected a topic for delivery, found {topic}")
        return self._store.copies.prepare_again(waiting, topic or "", queue_id, raw)

    def _write(
        self, level: _Level, waiting: Sequence[StoredMessage], copies: Sequence[Prepared], places: Sequence[int]
    ) -> None:
        """Append copies of the messages at these queue offsets, and report each."""
        done = 0
        while done < len(copies):
            results = self._store.copies.append(copies[done:])
            self._unsaved = True
            level.next_offset = places[done + len(results) - 1] + 1
            if self._delivered is not None:
                for message, copy, result in zip(waiting[done:], copies[done:], results, strict=False):
                    self._delivered(message, copy.lane.topic, copy.lane.queue_id, result)
            done += len(results)

    def _read(
        self, queue: ConsumeQueue, name: tuple[str, int], queue_offset: int, physical_offset: int, size: int
    ) -> StoredMessage | None:
        """Read one record, where the entries could not be read together; return None if it is deleted.

        Raises:
            RecordError: The bytes are not a record.
        """
        try:
            raw = self._store._checks.record(queue, name, queue_offset, physical_offset, size)
        except CorruptionError as error:
            raise RecordError(str(error)) from error
        return None if raw is None else StoredMessage.framed(raw)


_queue_id = lru_cache(maxsize=64)(java_int)


def _was_delivered(earlier: EarlierCopies, waiting: StoredMessage, copy: Prepared) -> bool:
    """Return whether the log shows that an earlier run delivered a waiting message."""
    topic, queue_id = copy.lane.topic, copy.lane.queue_id

    def is_delivery(record_: StoredMessage) -> bool:
        return record_.queue_id == queue_id and PropertyName.REAL_QUEUE_ID in record_.properties

    return earlier.has(waiting, (topic,), is_delivery)
