"""A store as a read sees it: which offsets its queues have, and where in the log their entries lead.

It is opened as a read-only `MessageStore`, beside a writer or not. Entries that are in no file yet are kept, 20 bytes
each: a writer updates queues in batches, and a crash can leave entries unwritten.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, Final

import numpy as np

from librmq.columns.options import (
    EARLIEST,
    LATEST,
    REST,
    DataLossError,
    OffsetBounds,
    OffsetTimes,
    ReadOptions,
)
from librmq.columns.remote import RemoteStore, remote_store
from librmq.config import ENTRY_SIZE, StoreConfig, suggest
from librmq.consumequeue import ConsumeQueue, QueueEntry
from librmq.consumequeue_entries import ENTRY, Entries, entry_dtype
from librmq.errors import ConfigError, CorruptionError, RecordError, StoreError
from librmq.files import Damage, DiskFiles, Files
from librmq.files.interface import numbered_files
from librmq.files.rolling import MappingPool
from librmq.message.topics import is_system_topic
from librmq.override import override
from librmq.runtime.closing import Closing
from librmq.runtime.event_log import EventLog
from librmq.store import Condition, MessageStore
from librmq.store.engine.store_parts import QueueName, ShortQueue
from librmq.store.engine.store_times import StoreTimes
from librmq.store.format import directory
from librmq.store.format.directory import has_abort

_log = EventLog("librmq.columns")
_AT_ONCE: Final = 4096
"""Most entries of a queue to read at once, instead of searching among them one by one."""


@dataclass(slots=True)
class QueueRange:
    """A planned queue."""

    begin: int
    end: int
    inline_from: int
    """The queue offset from which on the files lack entries."""
    reader: ConsumeQueue
    """Reader of the queue's entries."""

    def entry(self, queue_offset: int) -> QueueEntry | None:
        """Return the entry at ``queue_offset``, None outside of the queue; a damaged one is for the read to report."""
        raw = self.reader.read(queue_offset, 1)
        return QueueEntry._make(ENTRY.unpack(raw)) if raw else None

    def entries(self, begin: int, end: int) -> Entries:
        """Return the entries from ``begin`` to ``end``, damaged ones too; fewer if files were deleted."""
        blocks = []
        while begin < end and (raw := self.reader.read(begin, end - begin)):
            blocks.append(raw)
            begin += len(raw) // ENTRY_SIZE
        return np.frombuffer(b"".join(blocks), entry_dtype())

    def has_expired(self, queue_offset: int, place: int, log_begin: int) -> bool:
        """Return whether retention has deleted the message of an entry that leads to ``place``."""
        return self.reader.has_expired(queue_offset, place, log_begin)

    def place_of(self, queue_offset: int) -> int:
        """Return the physical offset in an entry."""
        entry = self.entry(queue_offset)
        return -1 if entry is None else entry.physical_offset

    def first_from(self, place: int) -> int:
        """Return the queue offset of the first message from a place of the log on; the queue's end without one."""
        return bisect_left(range(self.end), place, self.begin, key=self.place_of)

    def pieces(self, offsets: range, bounds: Sequence[int]) -> list[range]:
        """Return the parts of ``offsets`` before, between and after ``bounds``, ascending places of the log."""
        if not bounds:
            return [offsets]
        if len(offsets) <= _AT_ONCE:
            places = self.entries(offsets.start, offsets.stop)["physical_offset"]
            ends = np.minimum(offsets.start + np.searchsorted(places, bounds), offsets.stop).tolist()
        else:
            ends, at = [], offsets.start
            for bound in bounds:
                at = bisect_left(range(offsets.stop), bound, at, offsets.stop, key=self.place_of)
                ends.append(at)
        return [range(begin, end) for begin, end in zip([offsets.start, *ends], [*ends, offsets.stop], strict=True)]


_LOOKED_AT: Final = 8
_MAPPED_FILES: Final = 16
_FINGERPRINTED: Final = 1024
"""Most bytes of a record that tell it from others."""


@dataclass(slots=True)
class PlannedStore(Closing):
    """A store at the time of planning."""

    path: str
    options: ReadOptions
    config: StoreConfig
    log_begin: int
    log_end: int
    queues: dict[QueueName, QueueRange]
    store: MessageStore
    damage: list[Damage] = field(default_factory=list)
    _files: Files = field(default_factory=DiskFiles)
    _pool: MappingPool = field(default_factory=lambda: MappingPool(_MAPPED_FILES))  # mappings of the queues opened here
    _opened: list[ConsumeQueue] = field(default_factory=list)
    _cut: Damage | None = None
    """Where a recovery would end the log, if it is read as recovered and opening has passed over the damage."""
    _ends_as_recovered: bool = True
    _past_end: int | None = None
    """The end of the log at the moment at which the store is read."""
    _note: str = ""
    """What was logged of a copy that lacks what its other files cover."""
    _is_lent: bool = False
    """Whether the caller opened the store, and closes it."""

    @classmethod
    def open(
        cls, path: str, options: ReadOptions, files: Files | None = None, opened: MessageStore | None = None
    ) -> PlannedStore:
        """Open the store in ``path`` unless it is ``opened`` read-only, and plan the queues that ``options`` select.

        Raises:
            NotAStoreError: There is no store in ``path``.
            CorruptionError: The store is visibly damaged, and the mode is ``FAILFAST``; read as recovered, a log that
                ends before sound records is not.
        """
        files = files or DiskFiles()
        store = opened or MessageStore.open(path, read_only=True, files=files)
        planned = cls(path, options, store.config, 0, 0, {}, store, _files=files, _is_lent=opened is not None)
        if planned._fails and options.as_recovered and options.checksums:
            planned._cut = store.check_covered()
        try:
            if options.at is not None:
                with MessageStore.open(path, read_only=True, files=files, at=options.at) as past:
                    planned._past_end = past.log.end
            planned._plan_queues()
        except BaseException:
            planned.close()
            raise
        return planned

    @classmethod
    @contextlib.contextmanager
    def open_all(
        cls, options: ReadOptions, files: Files | None = None, opened: MessageStore | None = None
    ) -> Iterator[list[PlannedStore]]:
        """Open the stores of a read for a while.

        Raises:
            ConfigError: One is a copy of another. Else as `open`.
        """
        with contextlib.ExitStack() as stores_open:
            stores = [stores_open.enter_context(cls.open(path, options, files, opened)) for path in options.paths]
            cls.refuse_copies({store.place: store for store in stores})
            yield stores

    @staticmethod
    def refuse_copies(stores: Mapping[str, PlannedStore], checked: Collection[str] = ()) -> None:
        """Raise `ConfigError` if two stores have the last message of one in common, or the first that both kept.

        So one is a copy of the other, and both can have been written to since. Stores that were ``checked`` before are
        only compared with others.
        """
        for (path, copy), (other, store) in permutations(stores.items(), 2):
            if path in checked and other in checked:
                continue
            for place in (copy.last_place, copy.first_place(store.log_begin)):
                digest = copy.fingerprint_at(place) if place >= 0 else None
                if digest is not None and store.fingerprint_at(place) == digest:
                    raise ConfigError(
                        f"{max(path, other)} has the messages of {min(path, other)}, up to the one at {place} at "
                        "least, as a snapshot or a replica of it: they would be read twice; name only one of them"
                    )

    def refresh(self) -> None:
        """Plan again with what the writer has stored since."""
        self.store.refresh()
        self._plan_queues()

    @property
    def _fails(self) -> bool:
        """Whether damage raises."""
        return self.options.mode == "FAILFAST"

    def _plan_queues(self) -> None:
        files, store, as_recovered = self._files, self.store, self.options.as_recovered
        condition = self._noted(store.condition)
        cut, derived_count = condition.cut, len(condition.derived)
        if not as_recovered:
            self._refuse_short(condition)
        # After a crash, bytes that a recovery would cut are no damage if no sound record is among them.
        self._ends_as_recovered = self._fails or as_recovered or (cut is None and has_abort(files, self.path))
        self.config = config = store.config
        self.queues = {}
        self._close_opened()
        self.log_begin, self.log_end = store.log.begin, store.log.end
        if not self._ends_as_recovered:
            of_log, size = numbered_files(files, store.log.sequence.folder), config.commitlog_file_size
            self.log_end = max((int(entry.name) + size for entry in of_log if entry.size == size), default=0)
        if self._cut is not None:
            self.log_end = self._cut.offset
        if self._past_end is not None:
            self.log_end = min(self.log_end, self._past_end)
        for name in sorted(store.queues):
            if self.options.selection.has_queue(*name):
                try:
                    queue = self._queue(name)
                    if queue is not None:
                        self.queues[name] = queue
                except CorruptionError as error:
                    if self._fails:
                        raise
                    if Damage.of(error) not in self.damage:
                        self.damage.append(Damage.of(error))
        if not as_recovered and len(condition.derived) > derived_count:
            self._refuse_short(condition)  # the store has made queues again that could not be opened

    def _noted(self, condition: Condition) -> Condition:
        """Log once that the store is a copy that lacks what its other files cover."""
        if condition.note not in ("", self._note):
            self._note = condition.note
            _log.warning("%(path)s: %(_note)s", path=self.path, _note=self._note)
        return condition

    def _refuse_short(self, condition: Condition) -> None:
        """Raise `CorruptionError` if the store is short of something and damage raises; else note missing files."""
        for damage in condition.damage:
            if self._is_later(damage):
                continue
            what = damage.what
            if self._fails:
                if damage is condition.cut:
                    what += f"; the log ends at {damage.offset}"
                    if damage.bytes:
                        hint = "(mode PERMISSIVE reads them, as recovered they are left out)"
                        what += f"; {damage.bytes} bytes with sound records follow {hint}"
                raise CorruptionError(damage.file, damage.offset, damage.kind, what)
            if not (damage is condition.cut and damage.bytes) and damage not in self.damage:
                self.damage.append(damage)

    def _is_later(self, damage: Damage) -> bool:
        """Return whether the log had not come to some damage at the moment at which the store is read."""
        is_of_log = os.path.dirname(damage.file) == self.store.log.sequence.folder
        return self._past_end is not None and is_of_log and damage.offset >= self._past_end

    @property
    def remote(self) -> RemoteStore | None:
        """The store that is mirrored here; None if it is here itself."""
        return remote_store(self._files, self.path)

    @property
    def place(self) -> str:
        """The URL of a remote store, the path of another."""
        return self.path if self.remote is None else self.remote.url

    @property
    def topics(self) -> set[str]:
        """The topics of the store, also those that the read leaves out."""
        return {topic for topic, _ in self.store.queues}

    @property
    def has_batches(self) -> bool:
        """Whether a record of the log can be a batch of messages."""
        return not self.store.queues.has_files

    @property
    def is_cut_short(self) -> bool:
        """Whether messages are left out, because files of the log are missing, or sound records follow its end."""
        lost = [self._cut, *self.store.condition.lost]
        return any(damage is not None and not self._is_later(damage) for damage in lost)

    @override
    def close(self) -> None:
        """Close the store, and unmap its files."""
        if not self._is_lent:
            self.store.close()
        self._close_opened()

    def _close_opened(self) -> None:
        for queue in self._opened:
            queue.close()
        self._opened = []

    def _queue(self, name: QueueName) -> QueueRange | None:
        """Return what is to be read of a queue; None if there is none any more."""
        queue = self.store.queues.find(name)
        if queue is None:
            return None
        begin, end = queue.min_offset, queue.max_offset
        kept_to = self.store.queues.kept_to(name)  # opening it can have shown that a file is damaged
        if kept_to is not None and (stored := self._beyond_log(name, end)) is not None:
            planned = QueueRange(begin, stored.max_offset, stored.max_offset, stored)
        elif self._is_lent and isinstance(queue, ShortQueue):  # the caller's view has read its file
            planned = QueueRange(begin, end, begin, queue)
        else:
            planned = QueueRange(begin, end, queue.stored_end if kept_to is None else kept_to, queue)
        if self._cut is not None or self._past_end is not None:
            planned.end = planned.first_from(self.log_end)
        return planned

    def _beyond_log(self, name: QueueName, end: int) -> ConsumeQueue | None:
        """Return the queue in its files if they have records behind ``end``, and not because of a crash.

        Recovery after a crash would cut these entries.

        Raises:
            CorruptionError: They have, and damage raises.
        """
        is_as_recovered = self.options.as_recovered or has_abort(self._files, self.path)
        if not self.store.recovered or self._past_end is not None or (self._ends_as_recovered and is_as_recovered):
            return None
        folder, size = directory.queue_folder(self.path, *name), self.config.consumequeue_file_size
        try:
            stored = ConsumeQueue.open(folder, size, files=self._files, pool=self._pool, writable=False)
        except CorruptionError:  # a crash left a file of another length
            return None
        self._opened.append(stored)
        behind = range(max(end, stored.max_offset - _LOOKED_AT), stored.max_offset)
        if not any(self._is_record(stored, at) for at in behind):
            return None
        if self._fails:
            cut = self.store.recovered[0]
            what = f"{cut.what}; messages follow (mode PERMISSIVE reads them)"
            raise CorruptionError(cut.file, cut.offset, cut.kind, what)
        return stored

    def fingerprint_at(self, physical_offset: int) -> str | None:
        """Return a digest of a record's first bytes, with times and ids; None if the log no longer has that place.

        It tells stores apart, and a place where no record begins from every record.
        """
        if physical_offset < self.log_begin:
            return None
        if self.remote is not None:
            self.remote.fetch_at([physical_offset], _FINGERPRINTED)
        size = int.from_bytes(self.store.log.data_at(physical_offset, 4), "big")
        beginning = self.store.log.data_at(physical_offset, min(size, _FINGERPRINTED))
        return hashlib.blake2b(beginning, digest_size=8).hexdigest()

    @property
    def last_place(self) -> int:
        """The place in the log of the last message of the wanted queues; -1 without one."""
        ends = (queue.place_of(queue.end - 1) for queue in self.queues.values() if queue.end > queue.begin)
        return max(ends, default=-1)

    def first_place(self, begin: int) -> int:
        """Return the place of the first message of the wanted queues from ``begin`` of the log on; -1 without one."""
        of_queue = (queue.place_of(queue.first_from(begin)) for queue in self.queues.values())
        return min((place for place in of_queue if place >= begin), default=-1)

    def _is_record(self, stored: ConsumeQueue, queue_offset: int) -> bool:
        with contextlib.suppress(StoreError, RecordError, AttributeError):
            entry = stored.entry(queue_offset)
            log = self.store.log
            raw = b"" if entry is None else log.data_at(entry.physical_offset, min(entry.size, 64))
            return len(raw) >= 36 and int.from_bytes(raw[28:36], "big") == entry.physical_offset  # type: ignore[union-attr]
        return False

    # ------------------------------------------------------------------------------------------------ where to begin

    def offset_of(self, name: QueueName, offsets: OffsetBounds, default: int) -> int:
        """Return the queue offset to which ``startingOffsets`` or ``endingOffsets`` refers for a queue.

        ``default`` is `EARLIEST` for a begin and `LATEST` for an end, which also serve where times can't be looked up.
        """
        queue = self.queues[name]
        bound = self._explicit_bound(name, offsets)
        bound = default if bound is None else bound
        if isinstance(offsets, OffsetTimes) and bound >= 0:
            return self.first_at(name, bound)
        return queue.begin if bound == EARLIEST else queue.end if bound == LATEST else int(bound)

    def _bounds_of_store(self, offsets: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the offsets for this store: its own where they are by store, else all."""
        by_store = any(isinstance(below, Mapping) for ids in offsets.values() for below in ids.values())
        bounds: Mapping[str, Any] = offsets.get(self.path, {}) if by_store else offsets
        return bounds

    def first_at(self, name: QueueName, timestamp_ms: int) -> int:
        """Return the first queue offset whose message was stored at ``timestamp_ms`` or later."""
        queue = self.queues[name]
        return self.times.first_from(queue, timestamp_ms, range(queue.begin, queue.end))

    def stored_at(self, name: QueueName, queue_offset: int) -> int | None:
        """Return the store time of a message; None if it is unreadable."""
        return self.times.stored_at(self.queues[name], queue_offset)

    @property
    def times(self) -> StoreTimes:
        """The store times of the messages, by queue."""
        order = self.store.times.order
        return StoreTimes(self.store.log, order, None if self.remote is None else self.remote._fetch_records)

    def narrowed(self) -> dict[QueueName, range]:
        """Return the wanted offsets of each wanted queue.

        Raises:
            ConfigError: The wanted offsets name a queue that the read does not have, or begin after their end.
            DataLossError: Some of them are gone, and the options treat that as an error.
        """
        options = self.options
        starting, ending, conditions = options.starting, options.ending, options.selection
        for offsets, setting in zip((starting, ending), options.offset_settings, strict=True):
            self.check_names(offsets, setting)
        self._check_order()
        ranges: dict[QueueName, range] = {}
        for name, queue in self.queues.items():
            begin, end = self.offset_of(name, starting, EARLIEST), self.offset_of(name, ending, LATEST)
            if options.fail_on_data_loss:
                self.check_loss(name, begin, min(end, 1 << 62) if ending not in ("earliest", "latest") else queue.end)
            begin, end = max(begin, queue.begin, conditions.begin_offset), min(end, queue.end, conditions.end_offset)
            offset_range = range(begin, max(begin, end))
            if offset_range and conditions.has_times:
                offset_range = self.times.span(queue, *conditions.window_ms, offset_range)
            if offset_range:
                ranges[name] = offset_range
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

    def _check_order(self) -> None:
        """Raise `ConfigError` if the wanted offsets of a queue, or their times, begin after their end."""
        options = self.options
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
                    queues = {f"{name[0]}:{name[1]}" for name in self.store.queues if not is_system_topic(name[0])}
                    missing_queue = f"{topic}:{queue_id}"
                    hint = suggest(missing_queue, queues - {missing_queue})
                    raise ConfigError(
                        f"{setting}: {self.path} has no queue {queue_id} of topic {topic!r} to read; {hint}"
                    )
