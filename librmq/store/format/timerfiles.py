"""The files of 5.x's timer: a wheel of slots, a log of the messages in them, and a checkpoint.

::

    timerwheel         slot  time in units of the precision  8   big-endian; slot n is for times t with
                             first position in the log       8   t mod (2 * slots) = n
                             last position                   8
                             messages, less deletions        4
                             magic                           4   0
    timerwheel.<n>     the same, as a snapshot of 5.4 for the timer log up to position n

    timerlog/<start>   unit  size            4   52
                             previous        8   position of the unit before it in its slot, -1 for none
                             magic           4   1; plus 2: it moves to a later slot; plus 4: it deletes another
                             write time      8   the wheel's time (ms) when it was written
                             delay           4   from the write time to the slot's time (ms)
                             physicalOffset  8   of the message, in topic rmq_sys_wheel_timer
                             size            4   of the message
                             topic hash      4   Java's hashCode of the message's own topic
                             reserved        8   0
                       blank size 4 | 0 8 | magic cbd43194 4, up to the end of the file, if a unit and 16 bytes do not
                             fit

    config/timercheck  read time 8 | log position 8 | queue offset 8 | master's queue offset 8 |
                       data version: state 8, time 8, counter 8 | zeros                         4096 bytes

Mirrors 5.3.3's ``TimerWheel``, ``TimerLog`` and ``TimerCheckpoint``.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Self

from librmq.consumequeue import ConsumeQueue
from librmq.consumequeue_entries import HOLE_SIZE, entry_dtype
from librmq.errors import CorruptionError, StoreIOError
from librmq.files import DiskFiles, File, Files, file_size
from librmq.files.interface import make_folders
from librmq.files.rolling import MappedFileQueue, MappingPool
from librmq.java.lang import java_long
from librmq.message import StoredMessage
from librmq.message.properties import PropertyName
from librmq.runtime import lazy_numpy as np
from librmq.store.format.directory import CONFIG, TIMER_SLOT_SIZE, TIMER_UNIT_SIZE, TIMERLOG, TIMERWHEEL

if TYPE_CHECKING:
    import numpy.typing as npt

BLANK_MAGIC: Final = -875286124

_UNIT: Final = struct.Struct(">iqiqiqiiq")
_SLOT: Final = struct.Struct(">qqqii")
_BLANK: Final = struct.Struct(">iqi")
_CHECKPOINT: Final = struct.Struct(">qqqqqqq")
_MAX_WHEEL_SIZE: Final = 1 << 30
_ZEROS: Final = bytes(1 << 20)
"""A piece of a wheel without a message, as long as the pieces that are read."""
_UNITS_AT_ONCE: Final = 16_384
_PAGE: Final = 4096


@cache
def unit_dtype() -> np.dtype[np.void]:
    """Return the type of an array of units of the log."""
    return np.dtype([(name, f">{code}") for name, code in zip(Unit._fields, _UNIT.format[1:], strict=True)])


@cache
def slot_dtype() -> np.dtype[np.void]:
    """Return the type of an array of slots of the wheel."""
    return np.dtype([(name, f">{code}") for name, code in zip(Slot._fields, _SLOT.format[1:], strict=True)])


class Unit(NamedTuple):
    """A unit of the timer log: a message in its slot."""

    size: int
    previous: int
    magic: int
    write_time_ms: int
    delay_ms: int
    physical_offset: int
    message_size: int
    topic_hash: int
    reserved: int


class Slot(NamedTuple):
    """A slot of the wheel."""

    time: int
    """In units of the precision, since 1970."""
    first: int
    last: int
    messages: int
    magic: int


class WheelFile(NamedTuple):
    """A file with the slots of a wheel."""

    name: str
    position: int | None
    """Position in the timer log that a snapshot has in its name; None for the wheel itself."""
    last: int
    """Position of the newest unit that its slots know, -1 if it knows none or is damaged."""
    damage: CorruptionError | None


class TimerWheel:
    """The slots, in one mapped file. One writer; not thread-safe."""

    SLOT_SIZE: Final = TIMER_SLOT_SIZE

    def __init__(self, path: str, files: Files, slots: int, file: File) -> None:
        self.path = path
        self._files = files
        self.slots = slots
        """The number of slots in the file, twice that of a turn."""
        self._file = file
        self._dirty = False
        self._reserved: set[int] = set()  # pages that have blocks behind them

    @staticmethod
    def path_in(store: str) -> str:
        """Return the path of the wheel in a store."""
        return os.path.join(store, TIMERWHEEL)

    @staticmethod
    def files_in(store: str, files: Files) -> list[WheelFile]:
        """Return the wheel of a store and its snapshots, the newest first.

        Versions after 5.3.3 can write the wheel as ``timerwheel.<position in the timer log>``, and a broker that has
        loaded such a snapshot need not write ``timerwheel`` any more. What the slots lead to shows which file is the
        newest.
        """
        wheels: list[WheelFile] = []
        for name, position in _wheel_names(store, files).items():
            try:
                pieces = (slots for _, slots in _used_slots(store, name, files))
                last = max((np.where(slots["time"] != 0, slots["last"], -1).max() for slots in pieces), default=-1)
            except CorruptionError as error:
                wheels.append(WheelFile(name, position, -1, error))
            except StoreIOError:
                if file_size(files, os.path.join(store, name)) is not None:
                    raise
                # Otherwise a broker has deleted an old snapshot meanwhile.
            else:
                wheels.append(WheelFile(name, position, int(last), None))
        return sorted(
            wheels, key=lambda wheel: (wheel.damage is not None, -wheel.last)
        )  # the stable sort keeps the wheel before snapshots

    @staticmethod
    def snapshots_in(store: str, files: Files) -> list[int]:
        """Return the positions in the timer log up to which snapshots of the wheel go, ascending."""
        prefix = f"{TIMERWHEEL}."
        names = (entry.name for entry in files.list(store) if entry.name.startswith(prefix) and entry.size)
        suffixes = [name[len(prefix) :] for name in names]
        return sorted(int(suffix) for suffix in suffixes if suffix.isdecimal() and suffix == str(int(suffix)))

    @staticmethod
    def size_in(store: str, files: Files) -> int | None:
        """Return the length of a store's wheel, or else of its last snapshot; None if there is neither."""
        names = (name for name in _wheel_names(store, files) if not name.endswith(".gz"))
        return next((file_size(files, os.path.join(store, name)) for name in names), None)

    @classmethod
    def slots_in(cls, store: str, files: Files) -> npt.NDArray[Any]:
        """Return the used slots of the newest sound wheel of a store, an array of `slot_dtype`."""
        wheels = [wheel.name for wheel in cls.files_in(store, files) if wheel.damage is None]
        pieces = [slots for name in wheels[:1] for _, slots in _used_slots(store, name, files)]
        return np.concatenate(pieces) if pieces else np.empty(0, slot_dtype())

    @classmethod
    def read_slots(cls, store: str, files: Files) -> Iterator[tuple[int, Slot]]:
        """Yield the used slots of the newest wheel of a store with their numbers.

        Raises:
            CorruptionError: A file is not a wheel; the slots of the newest sound one come first.
        """
        wheels = cls.files_in(store, files)
        if wheels and wheels[0].damage is None:
            for numbers, slots in _used_slots(store, wheels[0].name, files):
                yield from zip(numbers, map(Slot._make, slots.tolist()), strict=True)
        for wheel in wheels:
            if wheel.damage is not None:
                raise wheel.damage

    @classmethod
    def open(cls, store: str, slots: int, *, files: Files | None = None) -> Self | None:
        """Open the wheel of a store for writing, None if there is none.

        Raises:
            CorruptionError: The file has another size.
        """
        files, path = files or DiskFiles(), cls.path_in(store)
        size = file_size(files, path)
        if not size:
            return None
        if size != slots * TimerWheel.SLOT_SIZE:
            raise CorruptionError(path, 0, "size", f"expected {slots * TimerWheel.SLOT_SIZE} bytes, found {size}")
        return cls(path, files, slots, files.open(path, writable=True))

    @classmethod
    def create(cls, store: str, slots: int, *, files: Files | None = None) -> Self:
        """Make an empty wheel; durable when it returns."""
        files, path = files or DiskFiles(), cls.path_in(store)
        if file_size(files, path) is not None:
            files.delete(path)
        file = files.create(path, slots * TimerWheel.SLOT_SIZE)
        files.flush(file)
        files.flush_folder(store)
        return cls(path, files, slots, file)

    def slot(self, time: int) -> Slot | None:
        """Return the slot for a time in units of the precision, None if it was last used for another time."""
        slot = Slot._make(_SLOT.unpack_from(self._file.buffer, time % self.slots * TimerWheel.SLOT_SIZE))
        return slot if slot.time == time and (slot.first or slot.last or slot.messages or slot.time) else None

    def put(self, slot: Slot) -> None:
        """Write a slot."""
        self._write(slot.time, _SLOT.pack(*slot))

    def clear(self, time: int) -> None:
        """Empty the slot for a time."""
        self._write(time, bytes(TimerWheel.SLOT_SIZE))

    def _write(self, time: int, data: bytes) -> None:
        at = time % self.slots * TimerWheel.SLOT_SIZE
        page = at // _PAGE
        if page not in self._reserved:
            self._files.reserve(self._file, page * _PAGE, min((page + 1) * _PAGE, self.slots * TimerWheel.SLOT_SIZE))
            self._reserved.add(page)
        self._file.buffer[at : at + TimerWheel.SLOT_SIZE] = data
        self._dirty = True

    def times(self) -> npt.NDArray[np.int64]:
        """Return a copy of the time of each slot."""
        return np.frombuffer(self._file.buffer, slot_dtype())["time"].astype(np.int64)

    def flush(self) -> None:
        """Flush the slots to the device; others can be written meanwhile."""
        if self._dirty:
            self._dirty = False  # read before the flush, so that later writes belong to the next flush
            try:
                self._files.flush(self._file)
            except BaseException:
                self._dirty = True
                raise


def _wheel_names(store: str, files: Files) -> dict[str, int | None]:
    """Return the name of a store's wheel, which can be packed, and its snapshots with their positions, last first."""
    names = [name for name in (TIMERWHEEL, f"{TIMERWHEEL}.gz") if file_size(files, os.path.join(store, name))]
    snapshots = {f"{TIMERWHEEL}.{position}": position for position in reversed(TimerWheel.snapshots_in(store, files))}
    return {**dict.fromkeys(names[:1]), **snapshots}


def _used_slots(store: str, name: str, files: Files) -> Iterator[tuple[list[int], npt.NDArray[Any]]]:
    """Yield the slots of a wheel that are not zero, many at a time, with their numbers.

    Raises:
        CorruptionError: The file is no wheel.
    """
    path, at = os.path.join(store, name), 0
    for piece in _unpacked(path, files) if name.endswith(".gz") else _read_in_pieces(path, files):
        _check_wheel_size(path, at + len(piece))
        if piece != _ZEROS[: len(piece)]:
            slots = np.frombuffer(piece, slot_dtype())
            rows = slots.view(f"V{TimerWheel.SLOT_SIZE}")
            used = np.flatnonzero(rows != rows.dtype.type(bytes(TimerWheel.SLOT_SIZE)))
            yield (used + at // TimerWheel.SLOT_SIZE).tolist(), slots[used]
        at += len(piece)


def _check_wheel_size(path: str, size: int) -> None:
    if size % TimerWheel.SLOT_SIZE or size > _MAX_WHEEL_SIZE:
        expected = f"expected a multiple of {TimerWheel.SLOT_SIZE} bytes up to {_MAX_WHEEL_SIZE:,}"
        raise CorruptionError(path, 0, "size", f"{expected}, found {size:,}")


def _read_in_pieces(path: str, files: Files) -> Iterator[bytes]:
    size = file_size(files, path)
    if size is not None:  # a file with holes can be far longer than its blocks
        _check_wheel_size(path, size)
    at = 0
    while piece := files.read(path, at, len(_ZEROS)):
        yield piece
        at += len(piece)


def _unpacked(path: str, files: Files) -> Iterator[bytes]:
    unpacker, packed = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), files.read(path)
    try:
        while not unpacker.eof and (piece := unpacker.decompress(packed, len(_ZEROS))):
            yield piece
            packed = unpacker.unconsumed_tail
    except zlib.error as error:
        raise CorruptionError(path, 0, "header", f"expected a wheel packed by gzip: {error}") from None


class TimerLog:
    """The log of units. One writer; not thread-safe."""

    UNIT_SIZE: Final = TIMER_UNIT_SIZE
    DEFAULT: Final = 1
    """The flag of every unit's magic."""
    ROLL: Final = 2
    """The flag of a message that moves to a later slot."""
    DELETE: Final = 4
    """The flag of a message that deletes another."""

    def __init__(self, store: str, file_size: int, *, files: Files | None = None, writable: bool = True) -> None:
        """List the files; a writer removes those of length zero, which a crash leaves.

        Raises:
            CorruptionError: A name or a length is impossible.
        """
        folder, files = os.path.join(store, TIMERLOG), files or DiskFiles()
        if writable:
            for entry in files.list(folder):
                if not entry.is_folder and not entry.size:
                    files.delete(os.path.join(folder, entry.name))
        self._files = MappedFileQueue(folder, file_size, files, MappingPool(4), writable=writable, durable=writable)
        self.end = self._files.begin
        """Position of the next unit; set by `resume`."""

    @property
    def begin(self) -> int:
        """Start of the first file."""
        return self._files.begin

    @staticmethod
    def file_size_in(store: str, files: Files) -> int | None:
        """Return the length of the timer log's files, None if there are none."""
        sizes = (entry.size for entry in files.list(os.path.join(store, TIMERLOG)) if not entry.is_folder)
        return next(filter(None, sizes), None)

    def resume(self, end: int) -> bool:
        """Continue at ``end``, clear everything after it, and return whether there was anything."""
        files = self._files
        self.end = max(files.begin, min(end, files.end))
        start = files.start_of(self.end)
        behind = any(other > self.end for other in files.starts)
        if start is not None and files.used_end(start, self.end - start) > self.end - start:
            behind = True
        files.delete_from(self.end + 1)
        files.zero_from(self.end)
        return behind

    def append(self, unit: Unit) -> int:
        """Write a unit and return its position."""
        files, size = self._files, self._files.file_size
        if self.end >= files.end:
            files.create(self.end)
        start = self.end - self.end % size
        room = start + size - self.end
        if TimerLog.UNIT_SIZE + _BLANK.size > room:
            self._write(start, self.end, _BLANK.pack(room, 0, BLANK_MAGIC))
            self.end = start = start + size
            files.create(start)
        at = self.end
        self._write(start, at, _UNIT.pack(*unit))
        self.end = at + TimerLog.UNIT_SIZE
        return at

    def _write(self, start: int, at: int, data: bytes) -> None:
        self._files.reserve(start, at - start, at - start + len(data))
        self._files.file(start).buffer[at - start : at - start + len(data)] = data
        self._files.mark_dirty(start)

    def unit(self, position: int) -> Unit | None:
        """Return the unit at ``position``, None if there is none."""
        file = self._files.file_at(position)
        if file is None:
            return None
        at = position % file.size
        if at + TimerLog.UNIT_SIZE > file.size:
            return None
        unit = Unit._make(_UNIT.unpack_from(file.buffer, at))
        return unit if unit.size == TimerLog.UNIT_SIZE and 0 < unit.magic < 8 else None

    def items(self) -> Iterator[tuple[int, Unit | int]]:
        """Yield every unit with its position, and the size of every blank, up to the first place with neither."""
        for start in list(self._files.starts):
            buffer, at = self._files.file(start).buffer, 0
            while at + _BLANK.size <= len(buffer):
                unit = self.unit(start + at)
                if unit is not None:
                    yield start + at, unit
                    at += TimerLog.UNIT_SIZE
                    continue
                size, _, magic = _BLANK.unpack_from(buffer, at)
                if magic != BLANK_MAGIC or size != len(buffer) - at:
                    return
                yield start + at, size
                break

    def blocks(self, end: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield copies of the units below ``end``, many at a time: positions of the first and arrays."""
        for start in list(self._files.starts):
            block_end = min(end - start, self._files.file_size)
            file = self._files.file_at(start)
            if file is None:
                continue  # the file is deleted, because its messages are
            buffer, at = file.buffer, 0
            while at + TimerLog.UNIT_SIZE <= block_end:
                count = min(_UNITS_AT_ONCE, (block_end - at) // TimerLog.UNIT_SIZE)
                block = np.frombuffer(buffer[at : at + count * TimerLog.UNIT_SIZE], unit_dtype())
                sound = (block["size"] == TimerLog.UNIT_SIZE) & (block["magic"] > 0) & (block["magic"] < 8)
                if not sound.all():
                    block = block[: int(sound.argmin())]
                if len(block):
                    yield start + at, block
                if len(block) < count:
                    break
                at += count * TimerLog.UNIT_SIZE

    def end_below(self, physical_offset: int, end: int) -> int:
        """Return the position, at most ``end``, up to which units point below a physical offset.

        Later units point at messages that a crash lost; other messages take their place over time.
        """
        for position, block in self.blocks(end):
            beyond = np.flatnonzero(block["physical_offset"] >= physical_offset)
            if len(beyond):
                return position + int(beyond[0]) * TimerLog.UNIT_SIZE
        return end

    def position_after(self, position: int) -> int:
        """Return the position of the unit that follows one, which can be in the next file."""
        position += TimerLog.UNIT_SIZE
        room = self._files.file_size - position % self._files.file_size
        return position if TimerLog.UNIT_SIZE + _BLANK.size <= room else position + room

    def path_at(self, position: int) -> str:
        """Return the path of the file that has a position."""
        return self._files.path_at(position)

    def trim(self, physical_offset: int) -> None:
        """Delete the files, except the last, whose units all name messages below a physical offset.

        As in 5.3.3, a file stays until the commit log's beginning has passed the messages that it names.
        """
        size = self._files.file_size
        while len(self._files.starts) > 1:
            start = self._files.starts[0]
            at = (size - _BLANK.size) // TimerLog.UNIT_SIZE * TimerLog.UNIT_SIZE - TimerLog.UNIT_SIZE
            last = self.unit(start + at)
            if last is None or last.physical_offset >= physical_offset:
                return
            self._files.delete_before(start + size)

    def flush(self) -> None:
        """Flush all units to the device."""
        self._files.flush()


class _Waiting(NamedTuple):
    """What a message in the timer's topic says of its unit."""

    due_ms: int
    """The time of its slot, unless it is too far away for one."""
    deletes: bool
    """Whether it deletes another."""


def _waiting(message: StoredMessage | None) -> _Waiting | None:
    """Return what a message says; None if it names no time."""
    if message is None or (due_ms := java_long(message.properties.get(PropertyName.TIMER_OUT_MS, ""))) is None:
        return None
    return _Waiting(due_ms, PropertyName.TIMER_DELETE_KEY in message.properties)


def timer_entries(queue: ConsumeQueue, end: int, log_begin: int) -> npt.NDArray[Any]:
    """Return the entries of the timer's topic before a queue offset whose messages the log still has.

    Raises:
        CorruptionError: An entry is damaged.
    """
    blocks = [block for _, block in queue.blocks(end=end)]
    entries = np.concatenate(blocks) if blocks else np.empty(0, entry_dtype())
    remaining: npt.NDArray[Any] = entries[(entries["physical_offset"] >= log_begin) & (entries["size"] != HOLE_SIZE)]
    return remaining


def unit_damage(
    log: TimerLog,
    end: int,
    read_ms: int,
    entries: npt.NDArray[Any],
    log_begin: int,
    message_of: Callable[[int, int], StoredMessage | None],
    slots: npt.NDArray[Any] | Sequence[Slot] | None,
    *,
    may_lack: bool = False,
) -> CorruptionError | None:
    """Compare the units below a position of the timer log with the messages in the timer's topic; None if all agree.

    ``entries`` are those of the messages that have been put into slots and that the store's log, which begins at
    ``log_begin``, still has; ``message_of(place, size)`` returns one. Each unit belongs to a message, units
    of a slot are chained, and unless some ``may_lack``, each message that is due from ``read_ms`` on has a unit. What a
    unit says is compared too, unless ``slots`` is None; then messages are read only where they have no unit. A message
    does not say in which slot it waits for its roll, but the wheel's ``slots`` do, of the last unit of each.
    """
    units, damage = _units_of(log, end, entries, log_begin)
    if damage is not None:
        return damage
    rows = np.concatenate([block for _, block in units]) if units else np.empty(0, unit_dtype())
    ats = np.array([at + TimerLog.UNIT_SIZE * number for at, block in units for number in range(len(block))], np.int64)
    times = rows["write_time_ms"].astype(np.int64) + rows["delay_ms"]
    wrong = _unchained(log, ats, times, rows["previous"].astype(np.int64), read_ms)
    if wrong is not None:
        return _unit_damage(log, wrong, "it does not point at the one before in its slot")
    precision_ms = int(np.gcd.reduce(times)) or 1
    have_units = np.isin(entries["physical_offset"], rows["physical_offset"])
    for place, size in [] if may_lack else entries[["physical_offset", "size"]][~have_units]:
        message = _waiting(message_of(int(place), int(size)))
        if message is not None and message.due_ms // precision_ms * precision_ms >= read_ms:
            return _unit_damage(log, end, f"the message at {place}, which waits, has no unit")
    if slots is None:
        return None
    moved = _moved(np.array(slots, slot_dtype()), ats, times, read_ms)
    for at, time_ms, row in zip(ats.tolist(), times.tolist(), rows, strict=True):
        unit = Unit._make(row.item())
        is_there = unit.physical_offset >= log_begin
        message = _waiting(message_of(unit.physical_offset, unit.message_size)) if is_there else None
        if message is None or max(message.due_ms, time_ms) < read_ms:
            continue
        early_ms, deletes = message.due_ms - time_ms, bool(unit.magic & TimerLog.DELETE)
        rolls_on = early_ms > 0 and unit.delay_ms > 0 and at not in moved
        is_its_time = rolls_on if unit.magic & TimerLog.ROLL else 0 <= early_ms < precision_ms
        if not is_its_time or deletes != message.deletes:
            return _unit_damage(log, at, f"it is not what the message at {unit.physical_offset} says")
    return None


def _units_of(
    log: TimerLog, end: int, entries: npt.NDArray[Any], log_begin: int
) -> tuple[list[tuple[int, npt.NDArray[Any]]], CorruptionError | None]:
    """Return the units with their positions, and what is wrong with them: one is missing, or belongs to no message."""
    places, sizes = entries["physical_offset"].astype(np.int64), entries["size"].astype(np.int64)
    expected = log.begin
    units: list[tuple[int, npt.NDArray[Any]]] = []
    for position, block in log.blocks(end):
        if position != expected:
            break
        unit_places = block["physical_offset"].astype(np.int64)
        agrees = unit_places < log_begin
        if len(places):
            at = np.minimum(np.searchsorted(places, unit_places), len(places) - 1)
            agrees |= (places[at] == unit_places) & (sizes[at] == block["message_size"])
        if not agrees.all():
            position += int(agrees.argmin()) * TimerLog.UNIT_SIZE
            return units, _unit_damage(log, position, "no message of the timer's topic has its place and size")
        units.append((position, block))
        expected = log.position_after(position + (len(block) - 1) * TimerLog.UNIT_SIZE)
    return units, _unit_damage(log, expected, "expected a unit") if expected < end else None


def _unchained(
    log: TimerLog,
    positions: npt.NDArray[np.int64],
    times: npt.NDArray[np.int64],
    previous: npt.NDArray[np.int64],
    read_ms: int,
) -> int | None:
    """Return the position of the first unit in a slot from ``read_ms`` on that does not point at the one before."""
    waits = np.flatnonzero(times >= read_ms)
    waits = waits[np.lexsort((positions[waits], times[waits]))]
    positions, previous = positions[waits], previous[waits]
    has_one_before = np.diff(times[waits], prepend=-1) == 0
    continues = np.where(has_one_before, previous == np.roll(positions, 1), previous < log.begin)
    # -1 ends a chain, also where a slot was being emptied when its next unit came.
    is_chained = (previous == -1) | (previous >= 0) & continues
    return None if is_chained.all() else int(positions[is_chained.argmin()])


def _moved(
    slots: npt.NDArray[Any], positions: npt.NDArray[np.int64], times: npt.NDArray[np.int64], read_ms: int
) -> set[int]:
    """Return the positions of units that name a slot before ``read_ms``, while the wheel has them in another one.

    The time of a unit is a multiple of that of its slot, whatever the precision is.
    """
    passed = times < read_ms
    positions, times = positions[passed], times[passed]
    at = np.searchsorted(positions, slots["last"])
    at[at == len(positions)] = 0
    is_last = (positions[at] == slots["last"]) & (slots["time"] > 0) if len(positions) else np.zeros(len(at), np.bool_)
    at, slot_times = at[is_last], slots["time"][is_last].astype(np.int64)
    return set(positions[at[times[at] % slot_times != 0]].tolist())


def _unit_damage(log: TimerLog, position: int, what: str) -> CorruptionError:
    return CorruptionError(log.path_at(position), position, "unit", f"timer log: {what}")


@dataclass(slots=True)
class TimerCheckpoint:
    """Progress of a timer."""

    FILE_SIZE: ClassVar = 4096

    read_time_ms: int = 0
    """Time of the next slot to empty."""
    log_position: int = 0
    """Position up to which the timer log is on the device."""
    queue_offset: int = 0
    """Queue offset of the timer topic's next message for the wheel."""
    master_queue_offset: int = 0
    state_version: int = 0
    version_timestamp_ms: int = 0
    version_counter: int = 0

    @staticmethod
    def path_in(store: str) -> str:
        """Return the path of the timer's checkpoint in a store."""
        return os.path.join(store, CONFIG, "timercheck")

    @classmethod
    def read(cls, store: str, files: Files) -> Self | None:
        """Read the checkpoint of a store, None if there is none.

        Raises:
            CorruptionError: The file has another length.
        """
        path = cls.path_in(store)
        size = file_size(files, path)
        if not size:
            return None
        if size != TimerCheckpoint.FILE_SIZE:
            raise CorruptionError(
                path, min(size, TimerCheckpoint.FILE_SIZE), "size", f"expected 4096 bytes, found {size}"
            )
        return cls(*_CHECKPOINT.unpack_from(files.read(path)))

    def write(self, store: str, files: Files) -> None:
        """Write the checkpoint; durable when it returns."""
        path = self.path_in(store)
        make_folders(files, os.path.dirname(path))
        files.write(path, _CHECKPOINT.pack(*astuple(self)).ljust(TimerCheckpoint.FILE_SIZE, b"\0"))
