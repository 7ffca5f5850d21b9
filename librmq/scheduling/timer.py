"""Delivery at any time: messages wait in a wheel with one slot a second.

A message names its time by one of the properties TIMER_DELAY_SEC, TIMER_DELAY_MS and TIMER_DELIVER_MS, in this
precedence. It is stored in topic ``rmq_sys_wheel_timer``, with its own topic and queue in REAL_TOPIC and REAL_QID.
TIMER_OUT_MS holds its time, rounded down to the precision; an exact multiple loses a whole unit. From there it gets a
unit in the timer log, which points at the previous unit of its slot. The slot in the wheel points at the last unit. A
slot is emptied when its whole unit of time has passed, so no message is early: each message is written again, to its
own topic. A message beyond the window goes into an earlier slot, and from there back to the timer topic.

A message with TIMER_DEL_UNIQKEY, whose value is ``topic+uniqueKey`` or ``uniqueKey``, cancels that message if it is in
the same slot, so it must name the same time. It delivers nothing itself.

Mirrors 5.3.3's ``TimerMessageStore``. `librmq.scheduling.timer_config` reads a message's time,
`librmq.scheduling._timer_slots` has wheel and log, and `librmq.store.format.timerfiles` their formats. The first
message that waits makes the files, so a 4.9 store without timers stays as it is.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from librmq.config import check_now
from librmq.errors import (
    LASTING,
    ConfigError,
    CorruptionError,
    MessageIllegalError,
    RecordError,
    StoreError,
)
from librmq.files import Files
from librmq.java.lang import java_int, java_long, string_hash
from librmq.message import Message, StoredMessage
from librmq.message.properties import PropertyName, encode_properties
from librmq.message.topics import SystemTopic, validate_topic
from librmq.runtime import ProgressSaver, StateLog
from librmq.runtime.event_log import EventLog
from librmq.runtime.runner import Aside
from librmq.scheduling._timer_slots import TimerSlots
from librmq.scheduling._timer_slots import waiting_timers as waiting_timers
from librmq.scheduling.timer_config import TimerConfig, deleted_before, deletion_end, out_time_ms
from librmq.scheduling.waiting import EarlierCopies
from librmq.store import AppendResult, MessageStore
from librmq.store.format.timerfiles import TimerCheckpoint, TimerLog, timer_entries, unit_damage

_log = EventLog("librmq.timer")

_QUEUE: Final = 0
_NEVER_IN_THE_WHEEL: Final = (1 << 63) - 1
_READ: Final = 32
_DELIVERY: Final = "delivery"


class _Emptying:
    """A slot that is being emptied: the places of its units in order, and its deleted messages."""

    def __init__(self, time_ms: int, last: int, units: array[int], deleted: dict[str, int]) -> None:
        self.time_ms = time_ms
        self.last = last
        """The slot's last unit when emptying began."""
        self.units = units
        """Physical offset, size, write time and magic of each unit; the next delivery is the last one."""
        self.deleted = deleted
        """Physical offsets before which messages are deleted, by their names."""


class _Reached(NamedTuple):
    changes: int
    """Number of changes up to then."""
    checkpoint: TimerCheckpoint


class Timers:
    """The timers of a store. Not thread-safe: one caller at a time.

    After a crash the timers continue from the last save. A message that the log shows as delivered since then is
    passed; in doubt it is delivered again, so none is lost or early. Every opening rebuilds the wheel from the timer
    log, which is the truth.
    """

    def __init__(
        self,
        store: MessageStore,
        config: TimerConfig | None = None,
        *,
        delivered: Callable[[StoredMessage, AppendResult], None] | None = None,
        is_cancelled: Callable[[StoredMessage, int], bool] = lambda message, now_ms: False,
        aside: Aside | None = None,
    ) -> None:
        """Open the timers of a store that is open for writing; a store without timers is not changed.

        ``delivered(message, result)`` is called for each delivery, with the waiting message and its new place, and must
        not raise. ``is_cancelled(message, now_ms)`` returns whether a due message is not delivered. ``aside`` saves
        while other work continues; None saves within `run_due`.

        Raises:
            ConfigError: The settings contradict the files.
            CorruptionError: The files are not timer files.
        """
        config = config or TimerConfig()
        self._is_cancelled = is_cancelled
        self._store = store
        self._files: Files = store.files
        self._config = config
        self._precision_ms = config.timer_precision_ms
        self._delivered = delivered
        self._retry_at_ms: int | None = None
        self._states = StateLog(_log, "the timer")
        self._emptying: _Emptying | None = None
        self._earlier = EarlierCopies(store, store.log.end, in_order=False)
        size = TimerLog.file_size_in(store.path, self._files)
        if size is not None and size != config.timer_log_file_size:
            raise ConfigError(
                f"timer_log_file_size: expected {size}, as in the files of {store.path}, "
                f"found {config.timer_log_file_size}: use TimerConfig.of_store"
            )
        now_ms = store.clock.now_ms()
        saved = TimerCheckpoint.read(store.path, self._files)
        self._write_ms = self._floor(now_ms)
        self._slots = TimerSlots(
            store.path, 2 * config.slots_total, self._precision_ms, config.timer_log_file_size, self._files
        )
        self._checkpoint = saved or TimerCheckpoint(read_time_ms=self._write_ms)  # as it was read, or written last
        self._changes = self._saved_changes = 0
        self.next_offset: int = self._checkpoint.queue_offset
        """Queue offset of the first message of the timer topic that is not in the wheel."""
        # The clock can have been set back since the checkpoint.
        self.read_ms: int = self._floor(min(max(self._checkpoint.read_time_ms, 0), now_ms))
        """The time before which all slots are empty."""
        self._saver: ProgressSaver[_Reached] = ProgressSaver(
            "the timer's progress",
            flush=self._write_checkpoint,
            reached=self._reached,
            note=self._saved,
            now_ms=store.clock.now_ms,
            save_every_s=config.save_every_s,
            retry_s=config.retry_s,
            aside=aside,
        )
        if saved is not None or self._slots.has_wheel or size is not None:
            self._recover()

    def _floor(self, time_ms: int) -> int:
        return time_ms - time_ms % self._precision_ms

    def _recover(self) -> None:
        """Continue from the checkpoint, or from the beginning if it or the units can't belong to this log."""
        slots = self._slots
        position = slots.log.end_below(self._store.log.end, self._checkpoint.log_position)
        fits = slots.recover(position, self.read_ms)
        if fits and slots.was_cut and slots.last_unit is not None:
            # After a crash 5.3.3's queue offset can be ahead of the flushed timer log.
            message = self._message(slots.last_unit.physical_offset, slots.last_unit.message_size)
            if message is not None and message.topic == SystemTopic.TIMER:
                self.next_offset = min(self.next_offset, message.queue_offset + 1)
        _, end = self._store.queue_range(SystemTopic.TIMER, _QUEUE)
        if self.next_offset > end:  # A crash took messages, and the next ones get their queue offsets.
            _log.warning(
                "the timer's queue offset was %(old)d, beyond the queue's end: set to %(queue_offset)d",
                old=self.next_offset,
                queue_offset=end,
            )
            self.next_offset = end
        damage: object = self._damage(position) if fits else "units do not fit into the wheel"
        if damage is not None:
            _log.error(
                "the timer's checkpoint and log do not belong together, so all that waits gets a new place: %(damage)s",
                damage=damage,
            )
            self.next_offset, self.read_ms = 0, self._write_ms
            slots.recover(0, self.read_ms)

    def _damage(self, position: int) -> CorruptionError | None:
        """Return what is wrong with the units before a position, or with the checkpoint, as their messages say.

        While the wheel agrees with the log, a unit is known to be in its slot, and its message need not be read.
        """
        slots, queue = self._slots, self._store.queue(SystemTopic.TIMER, _QUEUE)
        last = self._store.log.last_write
        stored_ms = None if last is None else self._store.log.store_timestamp_ms(last)
        if stored_ms is not None and stored_ms < self.read_ms and slots.has_between(stored_ms, self.read_ms):
            # Each delivery is a record, so nothing that was due after the last one has been delivered.
            self.read_ms = self._floor(stored_ms)
            slots.recover(position, self.read_ms)
        if queue is None:
            return None
        try:
            entries = timer_entries(queue, self.next_offset, self._store.log.begin)
        except CorruptionError:
            return None  # putting messages into slots meets the damage, and says it
        begin = self._store.log.begin
        return unit_damage(slots.log, position, self.read_ms, entries, begin, self._message, slots.other_slots)

    # ------------------------------------------------------------------------------------------------------ putting

    def takes(self, delay_ms: int) -> bool:
        """Return whether a message can wait this long."""
        return delay_ms <= 1000 * self._config.timer_max_delay_sec

    def waiting_form(self, message: Message, queue_id: int) -> Message | None:
        """Return the record for queue 0 of the timer topic in place of a timed message; None if its time has come.

        Thread-safe.

        Raises:
            TimerRefusedError: The time is not a number, or too far away, or a deletion is late.
            MessageIllegalError: The topic is invalid.
        """
        out_ms = out_time_ms(message.properties, self._store.clock.now_ms(), self._config)
        if out_ms is None:
            return None
        validate_topic(message.topic)
        waiting = Message(SystemTopic.TIMER, message.body, flag=message.flag)
        waiting.properties = {
            **message.properties,
            PropertyName.TIMER_OUT_MS: str(out_ms),
            PropertyName.REAL_TOPIC: message.topic,
            PropertyName.REAL_QUEUE_ID: str(queue_id),
        }
        return waiting

    # ------------------------------------------------------------------------------------------------- scheduled work

    def run_due(self, now_ms: int) -> int | None:
        """Put new messages into the wheel, empty the slots that have passed, and return the time of the next call (ms).

        The result is None if nothing waits. Call this soon after storing into the timer topic.

        Raises:
            StoreClosedError: The store was closed.
            FlushFailedError: A flush has failed; the store must be reopened.
            ReadOnlyError: The store is read-only.
        """
        check_now(now_ms)
        write_ms = self._floor(now_ms)
        if write_ms < self._write_ms:  # The clock was set back, so new messages can be due before those that were read.
            self.read_ms = min(self.read_ms, write_ms)
            self._retry_at_ms = None
            self._saver.put_back(now_ms)
        self._write_ms = write_ms
        if self._retry_at_ms is not None:
            if now_ms < self._retry_at_ms:
                return self._retry_at_ms
            self._retry_at_ms = None
        try:
            if not (self._empty_slots(now_ms) and self._fill_slots(now_ms)):
                return now_ms
            save_ms = self._saver.run_due(now_ms)
        except LASTING:
            raise
        except StoreError as error:
            self._retry_at_ms = now_ms + round(1000 * self._config.retry_s)
            self._states.failing(_DELIVERY, error, logging.ERROR, again_ms=self._retry_at_ms - now_ms)
            return self._retry_at_ms
        self._states.works(_DELIVERY)
        next_slot_ms = self._slots.next_ms(self.read_ms)
        dues = [due for due in (next_slot_ms and next_slot_ms + self._precision_ms, save_ms) if due is not None]
        return min(dues, default=None)

    def _empty_slots(self, now_ms: int) -> bool:
        """Deliver from all slots that have passed; return False if one turn is not enough."""
        left = self._config.most_at_once
        while True:
            emptying = self._emptying
            if emptying is None:
                time_ms = self._slots.next_ms(self.read_ms)
                if time_ms is None or time_ms >= self._write_ms:
                    self.read_ms = max(self.read_ms, self._write_ms)
                    return True
                self.read_ms = time_ms
                emptying = self._emptying = self._begin_slot(time_ms)
            units = emptying.units
            while units:
                if left == 0:
                    return False
                physical_offset, size, write_time_ms, magic = units[-4:]
                self._handle_unit(emptying, physical_offset, size, write_time_ms, magic, now_ms)
                del units[-4:]
                left -= 1
            self._slots.empty(emptying.time_ms, emptying.last)
            if self.read_ms == emptying.time_ms:
                # Otherwise the clock was set back meanwhile, and earlier slots come first.
                self.read_ms += self._precision_ms
            self._emptying = None
            self._changes += 1

    def _begin_slot(self, time_ms: int) -> _Emptying:
        """Follow a slot's units from the last to the first, and read the deleting ones at once."""
        units, deletions, last = array("q"), list[StoredMessage](), self._slots.last(time_ms)
        for unit in self._slots.units(time_ms):
            if unit.magic & TimerLog.DELETE and not unit.magic & TimerLog.ROLL:
                message = self._message(unit.physical_offset, unit.message_size)
                if message is not None and PropertyName.TIMER_DELETE_KEY in message.properties:
                    deletions.append(message)
            else:
                units.extend((unit.physical_offset, unit.message_size, unit.write_time_ms, unit.magic))
        return _Emptying(time_ms, last, units, deleted_before(deletions))

    def _handle_unit(
        self, slot: _Emptying, physical_offset: int, size: int, write_time_ms: int, magic: int, now_ms: int
    ) -> None:
        """Deliver the message of a unit, or roll it."""
        message = self._message(physical_offset, size)
        if message is None:
            return
        rolls = bool(magic & TimerLog.ROLL)
        out_ms = java_long(message.properties.get(PropertyName.TIMER_OUT_MS, "")) or 0
        if message.topic != SystemTopic.TIMER or (not rolls and self._floor(out_ms) > slot.time_ms):
            # A crash lost the message of this unit. The message at its place has its own unit.
            _log.error(
                "the timer's unit for physical offset %(physical_offset)d is skipped: another message is there",
                physical_offset=physical_offset,
            )
            return
        if slot.deleted and not rolls and message.unique_key:
            topic = message.properties.get(PropertyName.REAL_TOPIC, "")
            if physical_offset < deletion_end(slot.deleted, topic, message.unique_key):
                return
        self._deliver_message(message, write_time_ms, now_ms, rolls=rolls)

    def _deliver_message(self, message: StoredMessage, enqueue_ms: int, now_ms: int, *, rolls: bool) -> None:
        if self._is_cancelled(message, now_ms):
            self._changes += 1
            return
        properties = {**message.properties, PropertyName.TIMER_ENQUEUE_MS: str(enqueue_ms)}
        topic, queue_id = SystemTopic.TIMER, _QUEUE  # where a rolled one waits
        if rolls:
            times = java_int(properties.get(PropertyName.TIMER_ROLL_TIMES, "0"))
            properties[PropertyName.TIMER_ROLL_TIMES] = str((times or 0) + 1)
        elif PropertyName.TIMER_DELETE_KEY in properties:
            return
        else:
            topic = properties.get(PropertyName.REAL_TOPIC, "")
            real_queue_id = java_int(properties.get(PropertyName.REAL_QUEUE_ID, ""))
            queue_id = -1 if real_queue_id is None else real_queue_id
        properties[PropertyName.TIMER_DEQUEUE_MS] = str(now_ms)
        try:
            if not rolls and topic in (SystemTopic.TIMER, SystemTopic.SCHEDULE, SystemTopic.HALF):
                raise MessageIllegalError(f"REAL_TOPIC: expected a topic for delivery, found {topic}")
            if self._earlier.concerns(message.physical_offset) and self._was_delivered(message, topic, properties):
                self._changes += 1
                return
            result = self._store.copies.append_again(message, topic, queue_id, properties, raw=_encoded(properties))
        except MessageIllegalError as error:
            self._drop(message.queue_offset, message.physical_offset, error)
            return
        self._changes += 1
        if not rolls and self._delivered is not None:
            self._delivered(message, result)

    def _was_delivered(self, message: StoredMessage, topic: str, properties: Mapping[str, str]) -> bool:
        """Return whether the log shows that an earlier run delivered or rolled a message."""
        rolls = properties.get(PropertyName.TIMER_ROLL_TIMES)

        def is_copy(copy: StoredMessage) -> bool:
            return (
                PropertyName.TIMER_DEQUEUE_MS in copy.properties
                and copy.properties.get(PropertyName.TIMER_ROLL_TIMES) == rolls
            )

        return self._earlier.has(message, (topic,), is_copy)

    def _drop(self, queue_offset: int, physical_offset: int, error: Exception) -> None:
        _log.error(
            "the timer message at queue offset %(queue_offset)d, physical offset %(physical_offset)d is dropped: "
            "%(error)s",
            queue_offset=queue_offset,
            physical_offset=physical_offset,
            error=error,
            topic=SystemTopic.TIMER,
            queue_id=_QUEUE,
        )

    def _message(self, physical_offset: int, size: int) -> StoredMessage | None:
        """Return the record of a unit; if there is none, log it and return None."""
        try:
            raw = self._store.log.read(physical_offset, size)
            if raw is None:
                return None  # Retention has deleted it, so there is nothing to deliver.
            message = StoredMessage(raw)
            message.frame  # noqa: B018 (raises where it is none)
        except (CorruptionError, RecordError) as error:
            _log.error(
                "the timer message at physical offset %(physical_offset)d can't be read: %(error)s",
                physical_offset=physical_offset,
                error=error,
            )
            return None
        return message

    def _fill_slots(self, now_ms: int) -> bool:
        """Put new messages of the timer topic into slots; return False if one turn is not enough."""
        queue = self._store.queue(SystemTopic.TIMER, _QUEUE)
        if queue is None:
            return True
        corrected = min(max(self.next_offset, queue.min_offset), queue.max_offset)
        if corrected != self.next_offset:
            if self.next_offset or queue.min_offset:
                _log.error(
                    "the timer's queue offset was %(old)d, and is set to %(queue_offset)d",
                    old=self.next_offset,
                    queue_offset=corrected,
                )
            self.next_offset = corrected
        left = self._config.most_at_once
        while self.next_offset < queue.max_offset:
            if left <= 0:
                return False
            batch = self._store.read(SystemTopic.TIMER, _QUEUE, self.next_offset, _READ)
            for message in batch.messages:
                self._fill(message, now_ms)
                self.next_offset = message.queue_offset + 1
                self._changes += 1
                left -= 1
            if not batch.messages:
                if batch.next_offset <= self.next_offset:
                    return True
                self.next_offset = batch.next_offset
        return True

    def _fill(self, message: StoredMessage, now_ms: int) -> None:
        properties = message.properties
        out_ms = java_long(properties.get(PropertyName.TIMER_OUT_MS, ""))
        if out_ms is None:
            error = MessageIllegalError(
                f"{PropertyName.TIMER_OUT_MS}: expected a time, found {properties.get(PropertyName.TIMER_OUT_MS)!r:.80}"
            )
            self._drop(message.queue_offset, message.physical_offset, error)
            return
        write_ms, precision_ms = self._write_ms, self._precision_ms
        out_ms = self._floor(out_ms)
        if out_ms < write_ms:
            self._deliver_message(message, _NEVER_IN_THE_WHEEL, now_ms, rolls=False)
            return
        magic, window_ms, slots = TimerLog.DEFAULT, self._config.window_ms, self._config.window_slots
        if out_ms - write_ms >= window_ms:
            magic |= TimerLog.ROLL
            # A full window now would leave the next turn too little time.
            nearly = out_ms - write_ms - window_ms < slots // 3 * precision_ms
            out_ms = write_ms + (slots // 2 if nearly else slots) * precision_ms
        if PropertyName.TIMER_DELETE_KEY in properties:
            magic |= TimerLog.DELETE
        self._slots.add_unit(
            out_ms,
            write_ms,
            magic,
            message.physical_offset,
            message.size,
            string_hash(properties.get(PropertyName.REAL_TOPIC, "")),
            starts_empty=self._emptying is not None and self._emptying.time_ms == out_ms,
        )

    # ------------------------------------------------------------------------------------------------ saving, asking

    def save(self) -> None:
        """Write the checkpoint if anything has changed, after a flush of everything that it covers.

        Raises the errors of `MessageStore.flush`.
        """
        if self._slots.has_wheel and self.read_ms != self._checkpoint.read_time_ms:
            self._changes += 1  # Time alone is no change that needs a save, but a last save keeps it.
        self._saver.save()

    def _reached(self) -> _Reached | None:
        """Return the progress to save, None if nothing has changed."""
        if self._changes == self._saved_changes:
            return None
        before = self._checkpoint
        checkpoint = replace(
            before,
            read_time_ms=self.read_ms,
            log_position=self._slots.log.end,
            queue_offset=self.next_offset,
            master_queue_offset=self.next_offset,
        )
        if self.next_offset != before.queue_offset:
            checkpoint.version_counter += 1
            checkpoint.version_timestamp_ms = self._store.clock.now_ms()
        return _Reached(self._changes, checkpoint)

    def _write_checkpoint(self, reached: _Reached) -> None:
        """Flush everything that a checkpoint covers, and write the checkpoint. Thread-safe."""
        self._store.flush()
        self._slots.flush()
        reached.checkpoint.write(self._store.path, self._files)

    def _saved(self, reached: _Reached) -> None:
        """Release everything before a written checkpoint."""
        self._checkpoint = reached.checkpoint
        self._slots.log.trim(self._store.log.begin)
        self._saved_changes = reached.changes  # This comes after the steps that can fail, so that they are tried again.

    def end_writing(self, why: str) -> None:
        """End all writes; later callers get ``why``. Return when no write is running. Thread-safe."""
        self._saver.end_writing(why)

    def passed(self, before: int) -> Callable[[int], bool]:
        """Return which messages of the timer topic, stored before a physical offset, no longer wait. Thread-safe.

        They are given by queue offset. A cancelling message waits as long as the one that it cancels.
        """
        queue, next_offset = self._store.queue(SystemTopic.TIMER, _QUEUE), self.next_offset
        waiting = self._slots.waiting_below(before, self.read_ms)

        def has_passed(queue_offset: int) -> bool:
            entry = None if queue is None else queue.entry(queue_offset)
            return entry is None or (queue_offset < next_offset and entry.physical_offset not in waiting)

        return has_passed


def _encoded(properties: Mapping[str, str]) -> bytes:
    """Encode properties like 5.x, with a separator after the last one too."""
    return encode_properties(properties) + b"\2" if properties else b""
