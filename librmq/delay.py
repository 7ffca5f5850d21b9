"""Delay levels: messages that wait in the schedule topic, delivered when their time has come.

A message with a delay level is stored twice. `MessageStore.append` puts it into topic ``SCHEDULE_TOPIC_XXXX``, queue
``level - 1``, with its own topic and queue in the properties ``REAL_TOPIC`` and ``REAL_QID`` and the time of delivery
as the entry's tags code. `DelaySchedule` writes it once more, to its own topic, when that time has come. How far it has
come in the queue of each level stands in ``delayOffset.json``, by level::

    level     1, 2, …           the queue offset of the next message to deliver from queue level - 1

Mirrors 4.9.4's ``ScheduleMessageService``. Time is looked at on a grid, every 100 ms from a second after the start on,
but only where something can be due: `DelaySchedule.run_due` says which look is the next that may find something.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Final, Protocol

from librmq.config import Between, Config, Seconds
from librmq.consumequeue import ENTRY, ConsumeQueue
from librmq.consumequeue_ext import is_ext_address
from librmq.errors import (
    LASTING,
    CorruptionError,
    MessageIllegalError,
    RecordError,
    StoreError,
)
from librmq.java.numbers import java_int
from librmq.message import record
from librmq.message.delay_levels import SCHEDULE_TOPIC, level_of_queue_id, queue_id_of_level
from librmq.message.message import StoredMessage
from librmq.message.topics import HALF_TOPIC
from librmq.runtime.flush_aside import FlushAside
from librmq.runtime.runner import Aside
from librmq.runtime.state_log import StateLog
from librmq.store import MessageStore
from librmq.store.engine.append import AppendResult
from librmq.store.engine.prepared import Prepared

__all__ = ["DelayConfig", "DelayOffsets", "DelaySchedule"]

_log = logging.getLogger("librmq.delay")

_LOOKED_AT: Final = 64  # entries that are read together
_HASHES: Final = -(1 << 31), 1 << 31  # a time in ms of this century is none of them


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayConfig(Config):
    """When a schedule looks and saves; the defaults are 4.9.4's."""

    first_look_s: Annotated[float, Seconds()] = 1
    """From the start to the first look."""
    look_every_s: Annotated[float, Seconds(0.001)] = 0.1
    """From one look to the next; in whole milliseconds."""
    retry_s: Annotated[float, Seconds(0.001)] = 10
    """From a failure (a full disk, a damaged queue) to the next look at the same level."""
    save_every_s: Annotated[float | None, Seconds()] = 10
    """From the first delivery that is not saved to saving; None leaves it to `DelaySchedule.save`."""
    most_at_once: Annotated[int, Between(1)] = 10_000
    """Messages of a level that one turn delivers; what is left is due at once."""


class DelayOffsets(Protocol):
    """Where the progress of each level is kept; `librmq.store.format.broker_tables.BrokerTables` is one."""

    def delay_offset(self, level: int) -> int:
        """Return the queue offset of the next message of a level."""
        ...

    def set_delay_offset(self, level: int, queue_offset: int) -> None:
        """Note the queue offset of the next message of a level."""
        ...

    def persist(self, now_ms: int) -> None:
        """Write it; durable when it returns."""
        ...


_NEEDED: Final = (
    record.PROPERTY_REAL_TOPIC,
    record.PROPERTY_REAL_QUEUE_ID,
    record.PROPERTY_UNIQUE_KEY,
    record.PROPERTY_KEYS,
    record.PROPERTY_TAGS,
)
"""The properties that a delivery looks at."""


class _Layout:
    """The stored properties of messages that have the same names, as `codec.encode_properties` writes them.

    Messages that wait one behind the other mostly have. Their values are found without decoding all of them, and what
    fits is what it would be encoded as again.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        text = "\2".join(f"{re.escape(name)}\1([^\1\2]+)" for name in names)
        self._match = re.compile(f"{text}((?!))?").fullmatch  # the last group is that of what is not there: None
        self._groups = [names.index(name) + 1 if name in names else len(names) + 1 for name in _NEEDED]

    def find(self, raw: bytes) -> tuple[str | None, ...] | None:
        """The values of the properties that are needed; None for properties that look otherwise."""
        match = self._match(raw.decode("ascii")) if raw.isascii() else None
        return None if match is None else match.group(*self._groups)


class _Layouts:
    """Chooses the layout by which the next message's properties are read, from those read so far."""

    __slots__ = ("_names", "_run", "current")

    def __init__(self) -> None:
        self.current: _Layout | None = None
        self._names: tuple[str, ...] = ()
        self._run = 0

    def seen(self, names: tuple[str, ...]) -> None:
        """Note the names of a message that the current layout did not fit.

        Making a layout takes as long as decoding hundreds of messages, so one is made for few names that came several
        times in a row: senders that make names up cost no more than decoding does.
        """
        self._run = self._run + 1 if names == self._names else 1
        self._names = names
        if self._run >= _LAYOUT_FROM and len(names) <= _LAYOUT_NAMES:
            self.current = _layout_of(names)


_LAYOUT_FROM: Final = 16
_LAYOUT_NAMES: Final = 32
_layout_of = lru_cache(maxsize=64)(_Layout)


class _Level:
    """One level: its queue, and when to look at it next."""

    __slots__ = ("delay_ms", "level", "look_ms", "next_offset", "queue_id", "saved_offset", "state_key")

    def __init__(self, level: int, delay_ms: int | None, queue_offset: int) -> None:
        self.level = level
        self.next_offset = self.saved_offset = queue_offset
        """The queue offset of the next message, and what was saved of it."""
        self.queue_id = queue_id_of_level(level)
        self.delay_ms = delay_ms
        """None for a level that the settings no longer have."""
        self.state_key = (f"level {level}",), f"level {level}"
        self.look_ms: int | None = None
        """The look at which the first message that waits is due; None if none was waiting."""


class DelaySchedule:
    """Delivers what waits in a store's schedule topic. Not thread-safe: one caller at a time.

    Every message is delivered at the first look at or after its time, those of a level in their order; a message whose
    time is further away than the level's delay (the clock was put back, the levels were changed) at once. A message
    whose level the settings no longer have is delivered at its time, where 4.9 leaves it for good.

    What can't be delivered (a half message, no topic, a record that is damaged) is dropped: logged as an error, and
    passed over; its record stays in the log. After a failure that may pass (a full disk) the level is looked at again
    10 s later.

    After a crash it goes on from the progress last saved: messages delivered since then are delivered again, none is
    lost. Saving flushes the store first, so that no progress outlives what it vouches for.
    """

    def __init__(
        self,
        store: MessageStore,
        offsets: DelayOffsets,
        start_ms: int,
        settings: DelayConfig | None = None,
        *,
        delivered: Callable[[StoredMessage, str, int, AppendResult], None] | None = None,
        aside: Aside | None = None,
    ) -> None:
        """Begin at the saved progress.

        Args:
            store: Open for writing.
            offsets: Keeps the progress.
            start_ms: Where the grid of looks begins.
            settings: When to look and save.
            delivered: ``delivered(message, topic, queue_id, result)`` is told of each delivery: the message as it
                waited, and where it went. It must not raise.
            aside: Lets other things go on while the store is flushed; None flushes within `run_due`.
        """
        settings = settings or DelayConfig()
        self._store = store
        self._offsets = offsets
        self._delivered = delivered
        self._layouts = _Layouts()
        self._states = StateLog(_log, "delayed messages")
        self._first_look_ms = round(1000 * settings.first_look_s)
        self._every_ms = round(1000 * settings.look_every_s)
        self._retry_ms = round(1000 * settings.retry_s)
        self._saver = FlushAside(
            "the progress of the delay levels",
            flush=lambda reached: store.flush(),
            reached=lambda: (self._reached() or None) if self._unsaved else None,
            note=self._note,
            now_ms=store.clock.now_ms,
            save_every_s=settings.save_every_s,
            retry_s=settings.retry_s,
            aside=aside,
        )
        self._most = settings.most_at_once
        self._begin_ms = start_ms + self._first_look_ms
        self._last_ms = start_ms
        self._unsaved = False
        there = {level_of_queue_id(queue_id) for topic, queue_id in store.queues if topic == SCHEDULE_TOPIC}
        known = range(1, store.levels.max_level + 1)
        self._levels = [
            _Level(level, store.levels.delay_ms(level) if level in known else None, offsets.delay_offset(level))
            for level in sorted(there | set(known))
        ]

    @property
    def progress(self) -> dict[int, int]:
        """By level the queue offset of the next message to deliver, where there were any."""
        return {level.level: level.next_offset for level in self._levels if level.next_offset}

    def next_offsets(self) -> list[tuple[int, int]]:
        """Return for each queue of the schedule topic the queue offset of the next message to deliver. Thread-safe."""
        return [(level.queue_id, level.next_offset) for level in self._levels]

    def due_for(self, level: int, store_timestamp_ms: int) -> int:
        """When to call `run_due` for a message of ``level`` stored then, at the latest.

        What appends delayed messages has `run_due` called by then. Calling it right after the append works as well, and
        costs little.
        """
        levels = self._store.levels
        return self._look_for(levels.deliver_timestamp_ms(levels.cap(level), store_timestamp_ms))

    def run_due(self, now_ms: int) -> int | None:
        """Deliver what is due; returns the time in ms of the next look that finds something, None if nothing waits.

        The look is the last one of the grid that is not after ``now_ms``. `StoreClosedError`, `FlushFailedError` and
        `ReadOnlyError` where the store takes no messages any more.
        """
        if now_ms < self._last_ms:  # the clock was put back: find again what is due when
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
                _, end = self._store.queue_range(SCHEDULE_TOPIC, level.queue_id)
                if end == level.next_offset:
                    continue  # nothing waits: the usual case, at little cost
            if level.look_ms is None or level.look_ms <= look_ms:
                level.look_ms = self._look(level, None if early else look_ms)
            if level.look_ms is not None and (next_ms is None or level.look_ms < next_ms):
                next_ms = level.look_ms
        save_ms = self._saver.run_due(now_ms)
        return next_ms if save_ms is None or (next_ms is not None and next_ms < save_ms) else save_ms

    def save(self, now_ms: int) -> None:
        """Write the progress, after a flush of the store: what it says is delivered has reached the device.

        Does nothing where nothing was delivered since. Raises what `MessageStore.flush` does.
        """
        self._last_ms = now_ms
        self._saver.save()

    def _reached(self) -> list[tuple[_Level, int]]:
        """Return how far the levels have come whose progress is not saved."""
        return [(level, level.next_offset) for level in self._levels if level.next_offset != level.saved_offset]

    def _note(self, reached: Sequence[tuple[_Level, int]]) -> None:
        """Write progress that the device has the messages of."""
        for level, queue_offset in reached:
            self._offsets.set_delay_offset(level.level, queue_offset)
        self._offsets.persist(self._last_ms)
        for level, queue_offset in reached:
            level.saved_offset = queue_offset
        self._unsaved = bool(self._reached())

    def _look_for(self, due_ms: int) -> int:
        """The first look at or after a time."""
        return max(self._begin_ms, due_ms + (self._begin_ms - due_ms) % self._every_ms)

    def _look(self, level: _Level, look_ms: int | None) -> int | None:
        """Deliver what is due in a level at a look, nothing if that is None; returns the next look to take."""
        try:
            next_ms = self._deliver_due(level, look_ms)
        except LASTING:
            raise
        except StoreError as error:
            self._states.failing(*level.state_key, error, logging.ERROR, again_ms=self._retry_ms)
            return self._look_for(self._last_ms + self._retry_ms)
        self._states.works(*level.state_key)
        return next_ms

    def _deliver_due(self, level: _Level, look_ms: int | None) -> int | None:
        queue = self._store.queue(SCHEDULE_TOPIC, level.queue_id)
        queue_offset = self._progress(level, queue)
        if queue is None:
            return None
        end = queue_offset + self._most
        count = 1  # as a rule one look finds one message
        while queue_offset < end:
            raw = queue.read(queue_offset, min(count, end - queue_offset))
            if not raw:
                return None
            due: list[tuple[int, int]] = []
            next_look: int | None = None
            for physical_offset, size, code in ENTRY.iter_unpack(raw):
                if size <= 0 or physical_offset < 0:
                    break
                is_time = queue.ext is None and code >= _HASHES[1]  # the usual case, at once
                due_ms = code if is_time else self._due(level, queue, physical_offset, size, code)
                too_far = level.delay_ms is not None and due_ms > self._last_ms + level.delay_ms
                if look_ms is None or (due_ms > look_ms and not too_far):
                    next_look = self._begin_ms if too_far else self._look_for(due_ms)
                    break
                due.append((physical_offset, size))
            self._deliver(level, queue_offset, due)
            queue_offset += len(due)
            if next_look is not None:
                return next_look
            if len(due) * ENTRY.size < len(raw):
                queue.entry(queue_offset)  # raises, unless the queue was cut meanwhile
                return None
            count = min(_LOOKED_AT, 2 * count)
        return look_ms  # the rest at once

    def _progress(self, level: _Level, queue: ConsumeQueue | None) -> int:
        """The queue offset of the next message, corrected where the queue does not have it."""
        stored = level.next_offset
        low, high = (0, 0) if queue is None else (queue.min_offset, queue.max_offset)
        corrected = min(max(stored, low), high)
        if corrected != stored:
            _log.error(
                "delay level %d: the progress was %d, and is set to %d: its queue goes from %d to %d",
                level.level, stored, corrected, low, high,
            )  # fmt: skip
            level.next_offset = corrected
            self._unsaved = True
        return corrected

    def _due(self, level: _Level, queue: ConsumeQueue, physical_offset: int, size: int, code: int) -> int:
        """When the message of an entry is due."""
        if queue.ext is not None and is_ext_address(code):
            unit = queue.ext_unit(code)
            if unit is None:
                _log.error("delay level %d: no extension unit at %d: the record tells the time", level.level, code)
            code = 0 if unit is None else unit.tags_code
        if not _HASHES[0] <= code < _HASHES[1]:
            return code
        # After an unclean exit 4.9 makes entries with the hash of the tags in the place of the time.
        stored_ms = self._store.log.store_timestamp_ms(physical_offset, size)
        return code if stored_ms is None else stored_ms + (level.delay_ms or 0)

    def _deliver(self, level: _Level, queue_offset: int, entries: Sequence[tuple[int, int]]) -> None:
        """Deliver the messages of entries from ``queue_offset`` on, or say why one is dropped.

        Messages that have gone with the log's begin are passed over.
        """
        waiting: list[StoredMessage] = []
        copies: list[Prepared] = []
        places: list[int] = []
        for place, (physical_offset, size) in enumerate(entries, queue_offset):
            try:
                message = self._read(physical_offset, size)
                if message is not None:
                    copies.append(self._copied(message))
                    waiting.append(message)
                    places.append(place)
            except (MessageIllegalError, RecordError) as error:
                self._write(level, waiting, copies, places)
                waiting, copies, places = [], [], []
                _log.error(
                    "delay level %d: the message at queue offset %d, physical offset %d is dropped: %s",
                    level.level, place, physical_offset, error,
                    extra={"topic": SCHEDULE_TOPIC, "queue_id": level.queue_id, "queue_offset": place},
                )  # fmt: skip
                level.next_offset = place + 1
                self._unsaved = True
        self._write(level, waiting, copies, places)
        if entries:
            level.next_offset = queue_offset + len(entries)
            self._unsaved = True

    def _copied(self, waiting: StoredMessage) -> Prepared:
        """A message that waited as it goes to the topic and queue it was sent to; all else stays as it is.

        `MessageIllegalError` if it names no topic and queue, or one that no message may be delivered to: half messages,
        which a transaction ends, and the schedule topic.
        """
        raw = waiting.properties_raw
        layout = self._layouts.current
        found = None if layout is None else layout.find(raw)
        if found is None:
            properties = waiting.properties
            found = tuple(map(properties.get, _NEEDED))
            if record.is_encoding_of(raw, properties):
                self._layouts.seen(tuple(properties))
            else:
                raw = record.encode_properties(properties)
        topic, queue_text, unique_key, keys, tags = found
        queue_id = java_int(queue_text or "")
        if queue_id is None:
            raise MessageIllegalError(f"the message names no queue: {queue_text!r:.80}")
        if topic in (HALF_TOPIC, SCHEDULE_TOPIC):
            raise MessageIllegalError(f"nothing is delivered to {topic}")
        return self._store.prepare_again(waiting, topic or "", queue_id, raw, unique_key, keys, tags)

    def _write(
        self, level: _Level, waiting: Sequence[StoredMessage], copies: Sequence[Prepared], places: Sequence[int]
    ) -> None:
        """Append copies of messages that wait at these queue offsets; tells of each."""
        done = 0
        while done < len(copies):
            results = self._store.append_copies(copies[done:])
            self._unsaved = True
            level.next_offset = places[done + len(results) - 1] + 1
            if self._delivered is not None:
                for message, copy, result in zip(waiting[done:], copies[done:], results, strict=False):
                    self._delivered(message, copy.lane.topic, copy.lane.queue_id, result)
            done += len(results)

    def _read(self, physical_offset: int, size: int) -> StoredMessage | None:
        """The record of an entry, None if it is gone; `RecordError` if it is none."""
        try:
            raw = self._store.log.read(physical_offset, size)
        except CorruptionError as error:
            raise RecordError(str(error)) from error
        return None if raw is None else StoredMessage.framed(raw)
