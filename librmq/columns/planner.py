"""Planning of a read: which entries of which queues to read, and how to cut them into tasks. It reads no bodies.

The planner opens a store as a read-only `MessageStore`, beside a writer or not, and closes it again. The plan consists
of ranges of queue offsets, which workers read from the files. Entries that are in no file yet are part of the plan, 20
bytes each: a writer updates queues in batches, and a crash can leave entries unwritten.

All wanted queues are cut at the same places of the log, so each stretch of the log is read by one task. The places are
quantiles of the wanted entries, so all tasks are of similar size.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from librmq.columns.options import (
    EARLIEST,
    LATEST,
    REST,
    DataLossError,
    Mode,
    OffsetBounds,
    OffsetTimes,
    Part,
    ReadOptions,
    ReadSelection,
    Slice,
)
from librmq.columns.queue_ranges import QueueRange, ShortQueue, stored_entries
from librmq.columns.remote import RemoteFiles, fetch
from librmq.config import ENTRY_SIZE, StoreConfig, suggest
from librmq.consumequeue import ConsumeQueue
from librmq.errors import ConfigError, CorruptionError, RecordError, StoreError
from librmq.files.disk import DiskFiles
from librmq.files.interface import Damage, Files
from librmq.files.rolling import MappingPool, file_name
from librmq.message.record import header_struct
from librmq.message.topics import is_system_topic
from librmq.store import MessageStore
from librmq.store.engine.store_parts import QueueName, QueueState
from librmq.store.format import directory
from librmq.store.format.checkpoint import has_abort

PARTITION_BYTES: Final = 64 << 20
PARTITION_ENTRIES: Final = 1 << 19
Ranges = Sequence[tuple[QueueName, range]]
"""Offsets to read by queue; a queue can have several ranges."""
_SAMPLES: Final = 256
"""Most entries of a queue to look at for the sizes of tasks."""
_PART_SAMPLES: Final = 32
"""Entries of a store to look at for each task, about."""
_LEAST_SAMPLES: Final = 256
"""Fewest entries of a store to look at, about."""
_MOST_SAMPLES: Final = 4096
"""Most entries of a store to look at, about."""
_COMPARED: Final = 4096
_LOOKED_AT: Final = 8
_MAPPED_FILES: Final = 16
_IDENTITY: Final = header_struct("queue_id", "queue_offset", "physical_offset", "born_timestamp")


@dataclass(slots=True)
class PlannedStore:
    """A store at the time of planning."""

    path: str
    config: StoreConfig
    log_begin: int
    log_end: int
    queues: dict[QueueName, QueueRange]
    damage: list[Damage] = field(default_factory=list)
    _store: MessageStore | None = None
    _files: Files = field(default_factory=DiskFiles)
    _pool: MappingPool = field(default_factory=lambda: MappingPool(_MAPPED_FILES))  # of the queues opened here
    _opened: list[ConsumeQueue] = field(default_factory=list)
    _is_narrowed: bool = False
    _as_recovered: bool = False
    _cut: Damage | None = None
    """Where a recovery would end the log, if it is read as recovered and opening has passed over the damage."""
    _ends_as_recovered: bool = True

    @classmethod
    def open(
        cls,
        path: str,
        conditions: ReadSelection,
        mode: Mode,
        files: Files | None = None,
        *,
        as_recovered: bool = False,
        checksums: bool = True,
    ) -> PlannedStore:
        """Open the store in ``path``, and plan its wanted queues.

        Raises:
            NotAStoreError: There is no store in ``path``.
            CorruptionError: The store is visibly damaged, and the mode is ``FAILFAST``; with ``as_recovered`` a log
                that ends before sound records is not.
        """
        files = files or DiskFiles()
        directory.check_kind(path, files)
        damage: list[Damage] = []
        try:
            store: MessageStore | None = MessageStore.open(path, read_only=True, files=files)
        except CorruptionError as error:
            if mode == "FAILFAST":
                raise
            store = None
            damage.append(_damage_of(error))
        planned = cls(path, directory.infer_config(path, files), 0, 0, {}, damage, store, files)
        planned._as_recovered = as_recovered
        if as_recovered and checksums and mode == "FAILFAST" and store is not None:
            planned._cut = store.check_covered()
        try:
            planned._plan_queues(conditions, mode)
        except BaseException:
            planned.close()
            raise
        return planned

    def refresh(self, conditions: ReadSelection, mode: Mode) -> None:
        """Plan again with what the writer has stored since."""
        if self._store is not None:
            self._store.refresh()
        self._plan_queues(conditions, mode)

    def _plan_queues(self, conditions: ReadSelection, mode: Mode) -> None:
        files, store = self._files, self._store
        cut = None if store is None else store.cut_short
        if cut is not None and mode == "FAILFAST" and not self._as_recovered:
            hint = "(mode PERMISSIVE reads them, as recovered they are left out)"
            what = f"{cut.what}; the log ends at {cut.offset}"
            if cut.bytes:
                what += f"; {cut.bytes} bytes with sound records follow {hint}"
            raise CorruptionError(cut.file, cut.offset, cut.kind, what)
        # After a crash, bytes that a recovery would cut are no damage if no sound record is among them.
        self._ends_as_recovered = (
            mode == "FAILFAST" or self._as_recovered or (cut is None and has_abort(files, self.path))
        )
        self.config = config = self.config if store is None else store.config
        self.queues = {}
        self._close_opened()
        starts = _log_files(self.path, config, files)
        whole_end = max(starts) + config.commitlog_file_size if starts else 0
        self.log_begin = min(starts, default=0) if store is None else store.log.begin
        self.log_end = whole_end if store is None or not self._ends_as_recovered else store.log.end
        if self._cut is not None:
            self.log_end = self._cut.offset
        states = {} if store is None else store.queues.states()
        for name in sorted(self._names()):
            if conditions.queue(*name):
                try:
                    self.queues[name] = self._before_cut(self._queue(name, states.get(name), mode))
                except CorruptionError as error:
                    if mode == "FAILFAST":
                        raise
                    if _damage_of(error) not in self.damage:
                        self.damage.append(_damage_of(error))

    @property
    def is_cut_short(self) -> bool:
        """Whether the log ends here although sound records, or entries of queues, follow."""
        return self._cut is not None or (self._store is not None and self._store.cut_short is not None)

    def _names(self) -> Iterable[QueueName]:
        return directory.list_queues(self.path, self._files) if self._store is None else self._store.queues

    def close(self) -> None:
        """Close the store, and unmap its files."""
        if self._store is not None:
            self._store.close()
            self._store = None
        self._close_opened()

    def _close_opened(self) -> None:
        for queue in self._opened:
            queue.close()
        self._opened = []

    def __enter__(self) -> PlannedStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _queue(self, name: QueueName, state: QueueState | None, mode: Mode) -> QueueRange:
        store = self._store
        differs = store is not None and store.queues.differs(name)
        if state is not None and not differs:
            folder, size = directory.queue_folder(self.path, *name), self.config.consumequeue_file_size
            if (short := ShortQueue.read(folder, size, self._files, state)) is not None:
                begin, end = self._first_kept(short), short.max_offset
                return QueueRange(begin, end, end, b"", short)
        queue = self._stored_queue(name) if store is None else store.queues[name]
        begin, end = self._first_kept(queue), queue.max_offset
        if differs:
            return self._recovered(name, queue, begin, mode)
        inline_from = queue.stored_end
        inline = queue.entries(inline_from, end).tobytes() if inline_from < end else b""
        return QueueRange(begin, end, inline_from, inline, queue)

    def _stored_queue(self, name: QueueName) -> ConsumeQueue:
        """Return a queue as its files have it."""
        folder, size = directory.queue_folder(self.path, *name), self.config.consumequeue_file_size
        queue = ConsumeQueue.open(folder, size, files=self._files, pool=self._pool, writable=False)
        self._opened.append(queue)
        return queue

    def _recovered(self, name: QueueName, queue: ConsumeQueue, begin: int, mode: Mode) -> QueueRange:
        """Return the range of a queue that a recovery in memory changed."""
        assert self._store is not None
        end = queue.max_offset
        try:
            stored = self._stored_queue(name)
        except CorruptionError:  # a crash left a file of another length
            return QueueRange(begin, end, begin, queue.entries(begin, end).tobytes(), queue)
        crashed = self._ends_as_recovered and (self._as_recovered or has_abort(self._files, self.path))
        if stored.max_offset > end and self._store.recovered and not crashed:
            # Entries lead beyond the readable log, and not because of a crash, after which recovery would cut them.
            behind = range(max(end, stored.max_offset - _LOOKED_AT), stored.max_offset)
            if any(self._is_record(stored, at) for at in behind):
                if mode == "FAILFAST":
                    cut = self._store.recovered[0]
                    raise CorruptionError(
                        cut.file, cut.offset, cut.kind, f"{cut.what}; messages follow (mode PERMISSIVE reads them)"
                    )
                return QueueRange(begin, stored.max_offset, stored.max_offset, b"", stored)
            if not has_abort(self._files, self.path):  # it was closed, so the messages were in the log
                self._report_lost(name, range(end, stored.max_offset), mode)
        inline_from = _first_difference(queue, stored, thorough=bool(self._store.recovered))
        inline = queue.entries(inline_from, end).tobytes() if inline_from < end else b""
        return QueueRange(begin, end, inline_from, inline, queue)

    def _report_lost(self, name: QueueName, offsets: range, mode: Mode) -> None:
        lost = Damage(
            directory.queue_folder(self.path, *name),
            offsets.start * ENTRY_SIZE,
            "missing",
            f"the log lacks the messages of queue offsets {offsets.start} to {offsets.stop - 1}: its last files are "
            "missing or damaged",
        )
        if mode == "FAILFAST":
            raise CorruptionError(lost.file, lost.offset, lost.kind, f"{lost.what} (mode PERMISSIVE reads the rest)")
        if lost not in self.damage:
            self.damage.append(lost)

    def _first_kept(self, queue: ConsumeQueue | ShortQueue) -> int:
        """Return the first queue offset whose message is still in the log; the end if retention deleted all of them.

        A queue keeps its last file, so the entries of a quiet topic outlive their messages.
        """
        begin, end = queue.min_offset, queue.max_offset

        def place(queue_offset: int) -> int:
            entry = queue.entry(queue_offset)
            return -1 if entry is None else entry.physical_offset

        if begin >= end or place(begin) >= self.log_begin:
            return begin
        return bisect_left(range(end), self.log_begin, begin, end, key=place)

    def _before_cut(self, queue: QueueRange) -> QueueRange:
        """Return the queue without the messages that a recovery would cut."""
        if self._cut is None:
            return queue
        end = bisect_left(range(queue.end), self._cut.offset, queue.begin, queue.end, key=queue.place)
        inline = queue.inline[: max(end - queue.inline_from, 0) * ENTRY_SIZE]
        return replace(queue, end=end, inline_from=min(queue.inline_from, end), inline=inline)

    def _is_record(self, stored: ConsumeQueue, queue_offset: int) -> bool:
        assert self._store is not None
        with contextlib.suppress(StoreError, RecordError, AttributeError):
            entry = stored.entry(queue_offset)
            log = self._store.log
            raw = b"" if entry is None else log.data_at(entry.physical_offset, min(entry.size, 64))
            return len(raw) >= 36 and int.from_bytes(raw[28:36], "big") == entry.physical_offset  # type: ignore[union-attr]
        return False

    # ------------------------------------------------------------------------------------------------ where to begin

    def offset_of(self, name: QueueName, offsets: OffsetBounds, default: int) -> int:
        """Return the queue offset to which ``startingOffsets`` or ``endingOffsets`` refers for a queue.

        ``default`` is `EARLIEST` for a begin and `LATEST` for an end, which also serve where times can't be looked up.
        """
        queue = self.queues[name]
        bound: Any = default
        if offsets == "earliest":
            bound = EARLIEST
        elif offsets == "latest":
            bound = LATEST
        else:
            bound = self._bounds_of_store(offsets).get(name[0], {}).get(str(name[1]), default)
            if isinstance(offsets, OffsetTimes) and bound >= 0:
                if self._has_times:
                    return self.first_at(name, bound)
                bound = default
        return queue.begin if bound == EARLIEST else queue.end if bound == LATEST else int(bound)

    def _bounds_of_store(self, offsets: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the offsets for this store: its own where they are by store, else all."""
        by_store = any(isinstance(below, Mapping) for ids in offsets.values() for below in ids.values())
        bounds: Mapping[str, Any] = offsets.get(self.path, {}) if by_store else offsets
        return bounds

    @property
    def _has_times(self) -> bool:
        """Whether messages can be looked up by time: not in a store that is too damaged to open."""
        return self._store is not None

    def first_at(self, name: QueueName, timestamp_ms: int) -> int:
        """Return the first queue offset whose message was stored at ``timestamp_ms`` or later.

        In a store that is too damaged to open it is the first offset of the queue.
        """
        queue = self.queues[name]
        if not self._has_times:
            return queue.begin

        def stored(queue_offset: int) -> int:
            timestamp_ms = self.stored_at(name, queue_offset)
            return -1 if timestamp_ms is None else timestamp_ms

        return bisect_left(range(queue.end), timestamp_ms, queue.begin, queue.end, key=stored)

    def stored_at(self, name: QueueName, queue_offset: int) -> int | None:
        """Return the store time of a message; None if it is unreadable."""
        entry = self.queues[name].entries.entry(queue_offset)
        if entry is None or self._store is None:
            return None
        self._fetch(entry.physical_offset, entry.size)
        return self._store.log.store_timestamp_ms(entry.physical_offset, entry.size)

    def has_message(self, physical_offset: int, queue_id: int, queue_offset: int, born_ms: int) -> bool:
        """Return whether the log has this message, or can't tell, because it is deleted or unreadable."""
        if self._store is None or physical_offset < self.log_begin:
            return True
        if physical_offset + _IDENTITY.size > self.log_end:
            return False
        self._fetch(physical_offset, _IDENTITY.size)
        raw = self._store.log.data_at(physical_offset, _IDENTITY.size)
        identity = _IDENTITY.unpack(raw) if len(raw) == _IDENTITY.size else ()
        return identity == (queue_id, queue_offset, physical_offset, born_ms)

    def _fetch(self, physical_offset: int, size: int) -> None:
        """Fetch bytes of the log, if the store is remote."""
        place = physical_offset % self.config.commitlog_file_size
        fetch(self._files, self.path, file_name(physical_offset - place), [(place, place + size)])

    def narrowed(
        self, conditions: ReadSelection, starting: OffsetBounds, ending: OffsetBounds, *, strict: bool
    ) -> dict[QueueName, range]:
        """Return the wanted offsets of each wanted queue; with ``strict`` `DataLossError` if some of them are gone."""
        ranges: dict[QueueName, range] = {}
        for name, queue in self.queues.items():
            begin = self.offset_of(name, starting, EARLIEST)
            end = self.offset_of(name, ending, LATEST)
            begin = queue.begin if begin == EARLIEST else begin
            end = queue.end if end == LATEST else end
            if strict:
                self.check_loss(name, begin, min(end, 1 << 62) if ending not in ("earliest", "latest") else queue.end)
            begin, end = max(begin, queue.begin, conditions.begin_offset), min(end, queue.end, conditions.end_offset)
            if conditions.begin_ms is not None and begin < end:
                begin = max(begin, self.first_at(name, conditions.begin_ms))
            if conditions.end_ms is not None and begin < end and self._has_times:  # else each row is compared
                end = min(end, self.first_at(name, conditions.end_ms))
            if begin < end:
                ranges[name] = range(begin, end)
        return ranges

    def check_loss(self, name: QueueName, begin: int, end: int) -> None:
        """Raise `DataLossError` if offsets from ``begin`` to ``end`` are not all there."""
        queue = self.queues[name]
        if begin < queue.begin or max(begin, end) > queue.end:
            expected = f"offsets {begin} to {end}" if begin <= end else f"offset {begin}"
            raise DataLossError(
                f"{self.path}: topic {name[0]!r}, queue {name[1]}: expected {expected}, found {queue.begin} to "
                f"{queue.end}; {REST}"
            )

    def check_order(self, options: ReadOptions) -> None:
        """Raise `ConfigError` if the wanted offsets of a queue, or their times, begin after their end."""
        starting, ending = (
            f"{setting}{'ByTimestamp' if isinstance(offsets, OffsetTimes) else ''}"
            for setting, offsets in zip(options.offset_settings, (options.starting, options.ending), strict=True)
        )
        for name in self.queues:
            first, last = self._explicit_bound(name, options.starting), self._explicit_bound(name, options.ending)
            if first in (None, EARLIEST) or last in (None, LATEST):
                continue
            assert first is not None
            assert last is not None
            if min(first, last) >= 0 and isinstance(options.starting, OffsetTimes) == isinstance(
                options.ending, OffsetTimes
            ):
                bounds = first, last
            else:
                bounds = self.offset_of(name, options.starting, EARLIEST), self.offset_of(name, options.ending, LATEST)
            if bounds[0] > bounds[1]:
                raise ConfigError(
                    f"{starting} and {ending.removeprefix('option ')}: {self.path}: topic {name[0]!r}, "
                    f"queue {name[1]}: expected a begin that is not after the end, found {bounds[0]} and {bounds[1]}"
                )

    def _explicit_bound(self, name: QueueName, offsets: OffsetBounds) -> int | None:
        """Return what the caller asked for a queue: an offset or a time; None if nothing."""
        if isinstance(offsets, str):
            return EARLIEST if offsets == "earliest" else LATEST
        bound: int | None = self._bounds_of_store(offsets).get(name[0], {}).get(str(name[1]))
        return bound

    def check_names(self, offsets: OffsetBounds, setting: str) -> None:
        """Raise `ConfigError` if ``offsets`` name a queue that the store does not have or the read does not want.

        ``setting`` is what the caller calls these offsets.
        """
        if isinstance(offsets, str):
            return
        if isinstance(offsets, OffsetTimes):
            setting += "ByTimestamp"
        for topic, ids in self._bounds_of_store(offsets).items():
            for queue_id in ids:
                if (topic, int(queue_id)) not in self.queues:
                    queues = {f"{name[0]}:{name[1]}" for name in self._names() if not is_system_topic(name[0])}
                    hint = suggest(f"{topic}:{queue_id}", queues)
                    raise ConfigError(
                        f"{setting}: {self.path} has no queue {queue_id} of topic {topic!r} to read; {hint}"
                    )

    # -------------------------------------------------------------------------------------------------------- parts

    def parts(
        self, ranges: Ranges, min_parts: int, *, entries_only: bool = False, bytes_a_part: int = PARTITION_BYTES
    ) -> list[Part]:
        """Cut the entries in ``ranges`` into at least ``min_parts`` tasks, unless there are too few entries.

        With ``entries_only`` a task gets more entries, because it reads no messages.
        """
        samples, rows = self._samples(ranges, min_parts, bytes_a_part), sum(len(offsets) for _, offsets in ranges)
        if not rows:
            return []
        size = sum(size * weight for _, size, weight in samples)
        count = max(min_parts, -(-rows // PARTITION_ENTRIES) if entries_only else -(-size // bytes_a_part))
        shares = self._shares(ranges, _quantiles([(place, weight) for place, _, weight in samples], count))
        return [self._part(slices) for slices in shares if slices]

    def log_parts(self, min_parts: int, *, bytes_a_part: int = PARTITION_BYTES) -> list[Part]:
        """Cut the whole log into tasks, each of which starts at a record."""
        ranges = [(name, offsets) for name in self.queues if (offsets := self._in_log(name))]
        samples = self._samples(ranges, min_parts, bytes_a_part)
        count = max(min_parts, -(-(self.log_end - self.log_begin) // bytes_a_part))
        bounds = _quantiles([(place, weight) for place, _, weight in samples], count)
        bounds = [place for place in bounds if self.log_begin < place < self.log_end]
        stretches = zip([self.log_begin, *bounds], [*bounds, self.log_end], self._shares(ranges, bounds), strict=True)
        return [replace(self._part(slices), walk=(begin, end)) for begin, end, slices in stretches if begin < end]

    def _shares(self, ranges: Ranges, bounds: Sequence[int]) -> list[tuple[Slice, ...]]:
        """Cut all ranges at ``bounds`` of the log, and return the slices of each share."""
        shares: list[list[Slice]] = [[] for _ in range(len(bounds) + 1)]
        for name, offsets in ranges:
            for share, piece in zip(shares, self.queues[name].pieces(offsets, bounds), strict=True):
                if piece:
                    share.append(self._slice(name, piece.start, piece.stop))
        return [tuple(share) for share in shares]

    def _in_log(self, name: QueueName) -> range:
        """Return the offsets of a queue whose messages are in the wanted stretch of the log."""
        queue = self.queues[name]
        if not self._is_narrowed:
            return range(queue.begin, queue.end)
        first = bisect_left(range(queue.end), self.log_begin, queue.begin, queue.end, key=queue.place)
        return range(first, bisect_left(range(queue.end), self.log_end, first, queue.end, key=queue.place))

    def narrow_log(self, conditions: ReadSelection) -> None:
        """Leave out the log before and after the wanted times.

        Some records have no entry, so the stretch ends at entries outside of the wanted times.
        """
        begin, end = self.log_begin, self.log_end
        for name, queue in self.queues.items():
            if conditions.begin_ms is not None and (first := self.first_at(name, conditions.begin_ms)) > queue.begin:
                begin = max(begin, queue.place(first - 1))
            if conditions.end_ms is not None and (last := self.first_at(name, conditions.end_ms)) < queue.end:
                end = min(end, queue.place(last))
        self._is_narrowed = (begin, end) != (self.log_begin, self.log_end)
        self.log_begin, self.log_end = begin, max(begin, end)

    def _part(self, slices: tuple[Slice, ...]) -> Part:
        return Part(self.path, self.config.commitlog_file_size, self.config.consumequeue_file_size, slices)

    def damage_parts(self) -> list[Part]:
        """Return a part that reports the damage, or none; files of a remote store are named by its URL."""
        if not self.damage:
            return []
        damages = self.damage
        if isinstance(self._files, RemoteFiles):
            url = self._files.url(self.path)
            damages = [replace(damage, file=damage.file.replace(self.path, url, 1)) for damage in damages]
        return [replace(self._part(()), damage=tuple(damages))]

    def _slice(self, name: QueueName, begin: int, end: int) -> Slice:
        queue = self.queues[name]
        inline_from = max(begin, queue.inline_from)
        first = (inline_from - queue.inline_from) * ENTRY_SIZE
        inline = queue.inline[first : first + max(0, end - inline_from) * ENTRY_SIZE]
        return Slice(*name, begin, end, inline_from, inline)

    def _samples(self, ranges: Ranges, min_parts: int, bytes_a_part: int) -> list[tuple[int, int, int]]:
        """Return places and sizes of sampled entries in the order of the log, and the number that each stands for."""
        samples: list[tuple[int, int, int]] = []
        count = _PART_SAMPLES * max(min_parts, (self.log_end - self.log_begin) // bytes_a_part)
        every = sum(len(offsets) for _, offsets in ranges) // min(max(count, _LEAST_SAMPLES), _MOST_SAMPLES)
        rows = 0
        for name, offsets in ranges:
            step = max(1, every, len(offsets) // _SAMPLES)
            entries = [self.queues[name].entries.entry(at) for at in offsets[-rows % step :: step]]
            samples += [(entry.physical_offset, entry.size, step) for entry in entries if entry is not None]
            rows += len(offsets)
        return sorted(samples)


def plan(
    options: ReadOptions,
    files: Files | None = None,
    *,
    bytes_a_part: int = PARTITION_BYTES,
    prune: Callable[[PlannedStore, Ranges, ReadOptions], Ranges] | None = None,
) -> list[Part]:
    """Plan a read of each store in ``options``.

    ``prune`` removes ranges that hold no wanted row.

    Raises:
        ConfigError: An offset names a queue that does not exist, or the offsets of a queue begin after their end.
        DataLossError: Requested messages were deleted, and ``options`` treat that as an error.
        CorruptionError: A queue or the log is damaged, and the mode is ``FAILFAST``.
    """
    parts: list[Part] = []
    min_parts = -(-options.min_partitions // len(options.paths))
    conditions = options.selection
    # Finding the records between entries needs the entries of all queues.
    looked_at = ReadSelection(internal=True) if options.view == "log" else conditions
    for path in options.paths:
        with PlannedStore.open(
            path, looked_at, options.mode, files, as_recovered=options.as_recovered, checksums=options.checksums
        ) as store:
            parts += store.damage_parts()
            if options.view == "log":
                if options.mode == "FAILFAST":  # in other modes a damaged entry can give a wrong place
                    store.narrow_log(conditions)
                parts += store.log_parts(min_parts, bytes_a_part=bytes_a_part)
                continue
            starting, ending = options.offset_settings
            store.check_names(options.starting, starting)
            store.check_names(options.ending, ending)
            store.check_order(options)
            ranges_by_queue = store.narrowed(
                conditions, options.starting, options.ending, strict=options.fail_on_data_loss
            )
            ranges: Ranges = list(ranges_by_queue.items())
            if prune is not None:
                ranges = prune(store, ranges, options)
            parts += store.parts(ranges, min_parts, entries_only=options.view == "queues", bytes_a_part=bytes_a_part)
    return parts


def _damage_of(error: CorruptionError) -> Damage:
    return Damage(error.file, error.offset, error.kind, error.what)


def _quantiles(places: Sequence[tuple[int, int]], count: int) -> list[int]:
    """Return where to cut places in ascending order, with weights, into ``count`` shares of equal weight."""
    total = sum(weight for _, weight in places)
    bounds: list[int] = []
    reached = 0
    for place, weight in places:
        if reached >= total * (len(bounds) + 1) / count and len(bounds) < count - 1:
            bounds.append(place)
        reached += weight
    return sorted(set(bounds))


def _first_difference(queue: ConsumeQueue, stored: ConsumeQueue, *, thorough: bool) -> int:
    """Return the first queue offset at which the files differ from ``queue``."""
    end = min(queue.max_offset, stored.max_offset)
    offset = max(queue.min_offset, end) if end < queue.max_offset else queue.max_offset
    while end > queue.min_offset:
        begin = max(queue.min_offset, end - _COMPARED)
        ours, theirs = queue.entries(begin, end), stored_entries(stored, begin, end)
        count = min(len(ours), len(theirs))
        different = np.flatnonzero(ours[:count] != theirs[:count])
        if len(different):
            offset = begin + int(different[0])
        elif count < len(ours):
            offset = begin + count
        elif not thorough:
            break
        end = begin
    return offset


def _log_files(path: str, config: StoreConfig, files: Files) -> list[int]:
    entries: Iterable[Any] = files.list(os.path.join(path, directory.COMMITLOG))
    return [int(entry.name) for entry in entries if entry.name.isdigit() and entry.size == config.commitlog_file_size]
