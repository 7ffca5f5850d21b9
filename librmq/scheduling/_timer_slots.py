"""The waiting messages of a timer, by slots: units in the timer log, chained backwards from the wheel.

The log is the truth. At each opening it is cut where it is known to be on the device, and the wheel is made to agree
with it. `librmq.store.format.timerfiles` has the formats, `librmq.scheduling.timer` the meaning of units.
`waiting_timers` reads the files of any store, without owning them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from librmq.errors import CorruptionError
from librmq.files import Files, file_size
from librmq.java.lang import java_long, string_hash
from librmq.message import StoredMessage
from librmq.message.delays import delete_key
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic
from librmq.runtime import lazy_numpy as np
from librmq.runtime.event_log import EventLog
from librmq.scheduling.timer_config import deleted_before, deletion_end
from librmq.store import MessageStore
from librmq.store.format.timerfiles import (
    Slot,
    TimerCheckpoint,
    TimerLog,
    TimerWheel,
    Unit,
    timer_entries,
    unit_damage,
)

if TYPE_CHECKING:
    import numpy.typing as npt

_log = EventLog("librmq.timer")


class TimerSlots:
    """The slots of a store's timer, and their units. Not thread-safe.

    ``time_ms`` is the time of a slot, a multiple of the precision. Positions are positions in the timer log.
    """

    log: TimerLog
    was_cut: bool
    """Whether `recover` has cut units after the given position, which a killed process left."""
    last_unit: Unit | None
    """The last unit that `recover` has kept, None if there is none."""
    other_slots: list[Slot] | None
    """The slots in which the wheel knew other units before the log's end than `recover` has found; None if it agreed.
    """

    def __init__(self, store: str, slots: int, precision_ms: int, log_file_size: int, files: Files) -> None:
        """Open the files of a wheel of ``slots`` slots; `CorruptionError` if they differ. Only `add_unit` writes."""
        self._store = store
        self._files = files
        self._slots = slots
        self._precision_ms = precision_ms
        self.was_cut = False
        self.last_unit = None
        self.other_slots = None
        self.log = TimerLog(store, log_file_size, files=files)
        self._wheel = TimerWheel.open(store, slots, files=files)

    @cached_property
    def _waiting(self) -> npt.NDArray[np.bool_]:
        """Which slots have messages; made for the first one, because clearing it takes a while."""
        return np.zeros(self._slots, np.bool_)

    @property
    def has_wheel(self) -> bool:
        """Return whether the wheel exists; the first message makes it."""
        return self._wheel is not None

    def recover(self, log_position: int, begin_ms: int) -> bool:
        """Cut the log at ``log_position``, and make the wheel agree with it from the slot of ``begin_ms`` on.

        Return False if the log's units do not fit into the wheel from there on; then the log was cut, and nothing else
        changed.
        """
        self.was_cut = self.log.resume(log_position)
        begin = begin_ms // self._precision_ms
        slots = self._slots_of_log(begin)
        if slots is None:
            return False
        wheel = self._wheel
        if wheel is None:
            if not slots:
                self._delete_wrong_snapshots()
                return True
            wheel = self._wheel = TimerWheel.create(self._store, self._slots, files=self._files)
            self.other_slots = []
        times, others = wheel.times(), self.other_slots
        for time in {*times[times >= begin].tolist(), *slots}:
            before, slot = wheel.slot(time), slots.get(time)
            if before != slot and (before is None or before.last < self.log.end):
                others = [] if others is None else others
                if before is not None:
                    others.append(before)
            if slot is None:
                if before is not None:
                    wheel.clear(time)
                continue
            if before != slot:
                wheel.put(slot)
            self._waiting[time % self._slots] = True
        self.other_slots = others
        self._delete_wrong_snapshots()
        return True

    def _delete_wrong_snapshots(self) -> None:
        """Delete snapshots of the wheel that know units behind the end of the log: others come into these places."""
        if not TimerWheel.snapshots_in(self._store, self._files):
            return
        for snapshot in TimerWheel.files_in(self._store, self._files):
            if snapshot.position is not None and max(snapshot.position, snapshot.last + 1) > self.log.end:
                self.flush()  # This comes before the deletion, so that a broker finds every slot in one of the files.
                self._files.delete(os.path.join(self._store, snapshot.name))

    def _slots_of_log(self, begin: int) -> dict[int, Slot] | None:
        """Return the slots that the log's units make from a time on; None if they do not fit into the wheel."""
        slots: dict[int, Slot] = {}
        self.last_unit = None
        for position, block in self.log.blocks(self.log.end):
            self.last_unit = self.log.unit(position + (len(block) - 1) * TimerLog.UNIT_SIZE)
            times, sound = self._times(block)
            if not sound.all():
                _log.error(
                    "the timer log has %(units)d impossible units, from %(position)d on",
                    units=(~sound).sum(),
                    position=position,
                )
            waiting = np.flatnonzero(sound & (times >= begin))
            if not len(waiting):
                continue
            if times[waiting].max() >= begin + self._slots:
                return None
            waiting = waiting[np.argsort(times[waiting], kind="stable")]
            slot_times, firsts = np.unique(times[waiting], return_index=True)
            counts = np.add.reduceat(np.where(block["magic"][waiting] & TimerLog.DELETE, -1, 1), firsts)
            lasts = np.append(firsts[1:], len(waiting)) - 1
            places = position + waiting * TimerLog.UNIT_SIZE
            for time, first, latest, count in zip(
                slot_times.tolist(), places[firsts].tolist(), places[lasts].tolist(), counts.tolist(), strict=True
            ):
                before = slots.get(time)
                if before is not None:
                    first, count = before.first, before.messages + count
                slots[time] = Slot(time, first, latest, count, 0)
        return slots

    def _times(self, block: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the slots of units, as multiples of the precision, and which units are possible."""
        written, delays = block["write_time_ms"].astype(np.int64), block["delay_ms"]
        sound = (written >= 0) & (written < 1 << 62) & (delays >= 0) & (delays < self._slots * self._precision_ms)
        times = np.where(sound, written, 0) // self._precision_ms + np.where(sound, delays // self._precision_ms, 0)
        return times, sound

    def has_between(self, begin_ms: int, end_ms: int) -> bool:
        """Return whether a unit is for a time from ``begin_ms`` on and before ``end_ms``."""
        begin, end = begin_ms // self._precision_ms, end_ms // self._precision_ms
        for _, block in self.log.blocks(self.log.end):
            times, sound = self._times(block)
            if (sound & (times >= begin) & (times < end)).any():
                return True
        return False

    def waiting_below(self, physical_offset: int, begin_ms: int) -> set[int]:
        """Return the physical offsets below a limit in units from the slot of ``begin_ms`` on."""
        begin, offsets = begin_ms // self._precision_ms, set[int]()
        for _, block in self.log.blocks(self.log.end):
            times, sound = self._times(block)
            waits = sound & (times >= begin) & (block["physical_offset"] < physical_offset)
            offsets.update(block["physical_offset"][waits].tolist())
        return offsets

    def next_ms(self, begin_ms: int) -> int | None:
        """Return the time of the first slot from ``begin_ms`` on that has messages."""
        if self._wheel is None:
            return None
        begin = begin_ms // self._precision_ms
        at = begin % self._slots
        ahead = int(self._waiting[at:].argmax())
        if not self._waiting[at + ahead]:
            ahead = int(self._waiting[:at].argmax()) if at else 0
            if not self._waiting[ahead]:
                return None
            ahead += self._slots - at
        return (begin + ahead) * self._precision_ms

    def last(self, time_ms: int) -> int:
        """Return the position of a slot's last unit, -1 if it has none."""
        slot = None if self._wheel is None else self._wheel.slot(time_ms // self._precision_ms)
        return -1 if slot is None else slot.last

    def units(self, time_ms: int) -> Iterator[Unit]:
        """Yield the units of a slot, the last first. A broken chain ends there and is logged."""
        position = self.last(time_ms)
        while position >= 0:
            unit = self.log.unit(position)
            if unit is None:
                _log.error(
                    "the timer log has no unit at %(position)d, to which slot %(slot_ms)d points",
                    position=position,
                    slot_ms=time_ms,
                )
                return
            yield unit
            if unit.previous >= position:
                _log.error(
                    "the unit at %(position)d of the timer log points to %(previous)d, which is not before it",
                    position=position,
                    previous=unit.previous,
                )
                return
            position = unit.previous

    def add_unit(
        self,
        time_ms: int,
        write_ms: int,
        magic: int,
        physical_offset: int,
        size: int,
        topic_hash: int,
        *,
        starts_empty: bool,
    ) -> None:
        """Put a message into a slot at the wheel's time ``write_ms``; with ``starts_empty`` it loses its units."""
        if self._wheel is None:
            self._wheel = TimerWheel.create(self._store, self._slots, files=self._files)
        time = time_ms // self._precision_ms
        slot = self._wheel.slot(time) if self._waiting[time % self._slots] and not starts_empty else None
        previous = -1 if slot is None else slot.last
        position = self.log.append(
            Unit(
                TimerLog.UNIT_SIZE, previous, magic, write_ms, time_ms - write_ms, physical_offset, size, topic_hash, 0
            )
        )
        first, count = (position, 0) if slot is None else (slot.first, slot.messages)
        self._wheel.put(Slot(time, first, position, count + (-1 if magic & TimerLog.DELETE else 1), 0))
        self._waiting[time % self._slots] = True

    def empty(self, time_ms: int, last: int) -> None:
        """Note that a slot with the last unit ``last`` was emptied, unless a later unit was added."""
        if self.last(time_ms) in (-1, last):
            self._waiting[time_ms // self._precision_ms % self._slots] = False

    def flush(self) -> None:
        """Flush log and wheel to the device."""
        self.log.flush()
        if self._wheel is not None:
            self._wheel.flush()


# ---- the waiting messages of a store that another process may own


def waiting_timers(store: MessageStore, topics: Collection[str] | None = None) -> Iterator[tuple[int, StoredMessage]]:
    """Yield the messages that wait in a store's timer with their times (ms): those in the wheel sorted, then the rest.

    ``topics`` are the topics of their delivery, all by default. In a store at an earlier moment due messages count as
    delivered, and all are sorted.

    Raises:
        CorruptionError: A file is unreadable.
    """
    if store.past_ms is not None:
        timers = _waiting_in_the_log(store, store.past_ms)
    else:
        timers = _waiting_in_files(store, None if topics is None else [string_hash(topic) for topic in topics])
    for due_ms, message in timers:
        if topics is None or message.properties.get(PropertyName.REAL_TOPIC) in topics:
            yield due_ms, message


def _due_ms(message: StoredMessage) -> int:
    return java_long(message.properties.get(PropertyName.TIMER_OUT_MS, "0")) or 0


def _waiting_in_files(store: MessageStore, hashes: Sequence[int] | None) -> Iterator[tuple[int, StoredMessage]]:
    checkpoint = TimerCheckpoint.read(store.path, store.files) or TimerCheckpoint()
    if file_size(store.files, path := TimerCheckpoint.path_in(store.path)) == 0:
        raise CorruptionError(path, 0, "size", f"expected {TimerCheckpoint.FILE_SIZE} bytes, found 0")
    size = TimerLog.file_size_in(store.path, store.files)
    if size:
        log = TimerLog(store.path, size, files=store.files, writable=False)
        queue = store.queue(SystemTopic.TIMER, 0)
        if queue is not None:
            begin = store.log.begin
            damage = unit_damage(
                log,
                log.end_below(store.log.end, checkpoint.log_position),
                checkpoint.read_time_ms,
                timer_entries(queue, checkpoint.queue_offset, begin),
                begin,
                partial(_waiting_message, store),
                TimerWheel.slots_in(store.path, store.files),
            )
            if damage is not None:
                raise damage
        yield from _waiting_in_the_wheel(store, checkpoint, log, hashes)
    last_ms = (None if store.log.last_write is None else store.log.store_timestamp_ms(store.log.last_write)) or 0
    for message in store.messages(SystemTopic.TIMER, 0, checkpoint.queue_offset):
        due_ms = _due_ms(message)
        # A process that was killed can have delivered messages that its last checkpoint does not know.
        if PropertyName.TIMER_DELETE_KEY not in message.properties and (
            due_ms > last_ms
            or message.unique_key is None
            or not store.find_by_key(message.properties.get(PropertyName.REAL_TOPIC, ""), message.unique_key)
        ):
            yield due_ms, message


def _waiting_message(store: MessageStore, physical_offset: int, size: int) -> StoredMessage | None:
    raw = store.log.read(physical_offset, size)
    message = None if raw is None else StoredMessage(raw)
    says = None if message is None else (message.topic, message.physical_offset)
    if says is not None and says != (SystemTopic.TIMER, physical_offset):
        what = "expected one of {} at {}, found one of {!a} at {}".format(SystemTopic.TIMER, physical_offset, *says)
        raise CorruptionError(store.log.sequence.path_at(physical_offset), physical_offset, "record", what)
    return message


def _waiting_in_the_log(store: MessageStore, now_ms: int) -> Iterator[tuple[int, StoredMessage]]:
    """Yield the messages that were due after a time, without the wheel, whose files show the present."""
    waiting: dict[str | int, tuple[int, StoredMessage]] = {}
    names: dict[str, str | int] = {}  # of waiting messages by their unique keys
    for message in store.messages(SystemTopic.TIMER, 0, 0):
        properties = message.properties
        deleted = properties.get(PropertyName.TIMER_DELETE_KEY)
        if deleted is not None:
            waiting.pop(names.get(deleted, deleted), None)
            continue
        key, topic = message.unique_key, properties.get(PropertyName.REAL_TOPIC, "")
        name = message.physical_offset if key is None else delete_key(topic, key)
        # A message far ahead is stored again from time to time, and only its last record counts.
        waiting.pop(name, None)
        due_ms = _due_ms(message)
        if due_ms > now_ms:
            waiting[name] = due_ms, message
            names[key or ""] = name
    yield from sorted(waiting.values(), key=lambda item: (item[0], item[1].physical_offset))


def _waiting_in_the_wheel(
    store: MessageStore, checkpoint: TimerCheckpoint, log: TimerLog, hashes: Sequence[int] | None
) -> Iterator[tuple[int, StoredMessage]]:
    """Yield the messages of slots that are still to come, slot by slot; ``hashes`` are those of their topics."""
    blocks: list[npt.NDArray[np.int64]] = []
    for position, block in log.blocks(checkpoint.log_position):
        times = block["write_time_ms"].astype(np.int64) + block["delay_ms"]
        is_waiting = times >= checkpoint.read_time_ms
        if hashes is not None:
            is_waiting &= np.isin(block["topic_hash"], hashes)
        waiting = np.flatnonzero(is_waiting)
        places = position + waiting * TimerLog.UNIT_SIZE
        blocks.append(np.stack((times[waiting], places, block["magic"][waiting].astype(np.int64)), axis=1))
    units = np.concatenate(blocks) if blocks else np.empty((0, 3), np.int64)
    del blocks
    if not len(units):
        return
    units = units[np.lexsort((units[:, 1], units[:, 0]))]
    _, begins = np.unique(units[:, 0], return_index=True)
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(units)], strict=True):
        magics = units[begin:end, 2]
        deletes = units[begin:end, 1][(magics & TimerLog.DELETE > 0) & (magics & TimerLog.ROLL == 0)]
        deletions = [message for _, message in _messages_of_slot(store, log, deletes)]
        deleted = deleted_before(deletions)
        for magic, message in _messages_of_slot(store, log, units[begin:end, 1][magics & TimerLog.DELETE == 0]):
            key, topic = message.unique_key, message.properties.get(PropertyName.REAL_TOPIC, "")
            is_kept = magic & TimerLog.ROLL or key is None or not deleted
            if is_kept or message.physical_offset >= deletion_end(deleted, topic, key or ""):
                yield _due_ms(message), message


def _messages_of_slot(
    store: MessageStore, log: TimerLog, positions: npt.NDArray[np.int64]
) -> Iterator[tuple[int, StoredMessage]]:
    for position in positions.tolist():
        unit = log.unit(position)
        message = None if unit is None else store.message_at(unit.physical_offset)
        if unit is not None and message is not None:
            yield unit.magic, message
