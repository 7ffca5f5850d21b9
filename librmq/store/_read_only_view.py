"""A read-only view of a store, beside a writer in another process or without one.

::

    the lock      what is opened                                          a refresh
    is held       the files as they are, for reading only; the log is     walks on from the log's end, lists files
                  walked through from where a recovery would begin        again, follows the log's start
    is free       the result of a recovery, in memory                     checks whether a writer has been there
    either        for a store of 5.x whose queues are not in files:       as beside a writer
                  what the log says, `librmq.store._queues_in_memory`

Nothing is locked, and no byte of a file changes. A refresh notices a writer that began or ended; replaced parts stay as
they were. `librmq.store._live_tail` reads the files beside a writer.

A view can show the store as it was at an earlier moment. The log is only appended to, and queues and index follow it.
So everything before a place of the log is as it was when the log ended there, except files that retention has deleted
since.
"""

from __future__ import annotations

import itertools
import os
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Final

from librmq.clock import Clock
from librmq.commitlog import CommitLog, LogEnd
from librmq.config import ENTRY_SIZE, StoreConfig, to_timestamp_ms
from librmq.consumequeue import ConsumeQueue
from librmq.errors import ConfigError, CorruptionError, NotAStoreError, StoreIOError
from librmq.files import Damage, Files, OverlayFiles
from librmq.files.interface import read_replaced
from librmq.formatting import exact_moment
from librmq.override import override
from librmq.runtime import critical
from librmq.runtime.locks import Lock
from librmq.store._handle import StoreHandle
from librmq.store._live_tail import ATTEMPTS, GLANCE, FollowedParts, LiveParts
from librmq.store._queues_in_memory import DerivedParts
from librmq.store.engine.derivation import BitmapOf, KeyBlock
from librmq.store.engine.dispatch import TimeOrder
from librmq.store.engine.read import GetStatus, MessageFilter, ReadResult, read_queue
from librmq.store.engine.saved_state import noted_order
from librmq.store.engine.store_parts import Parts, QueueName, QueueState, QueueTable, ShortQueue, without_advice
from librmq.store.engine.store_times import StoreTimes
from librmq.store.format import directory
from librmq.store.format.directory import has_abort
from librmq.store.recovery._case import RecoveryMode
from librmq.store.recovery._condition import Condition, Wholeness, condition_of
from librmq.store.recovery.open import load

# ---- an earlier moment

Moment = datetime | int
"""A time with a time zone, or a physical offset."""
_IsBefore = Callable[[int, int], bool]
"""Whether a record was there; called with its place and size."""


def cut_at(parts: Parts, moment: Moment, order: TimeOrder | None) -> None:
    """Let parts that are only read end as they did at a moment.

    A time includes the messages before the first one that was stored later, whatever the clock did; ``order`` is what
    is known of the times. A physical offset includes those that end there or before.

    Raises:
        ConfigError: The moment is before the first message, or a physical offset is behind the log's end.
    """
    log = parts.log
    end, last = _place(parts, moment, order)
    queues = QueueTable(parts.open_queue, {})
    for name in parts.queues:
        queue = parts.queues[name]
        before = queue.max_offset
        queue.show_before(queue.min_offset + _entries(queue, end))
        if queue.max_offset > 0 or queue.max_offset == before:  # else it did not exist
            queues[name] = queue
    parts.queues = queues
    parts.index._show_before(end)
    log.end, log.last_write, log.found_end = end, last, LogEnd(end, None, last)
    parts.recovered.cuts = [cut for cut in parts.recovered.cuts if cut.kind == "size"]  # others lie behind it


def _place(parts: Parts, moment: Moment, order: TimeOrder | None) -> tuple[int, int | None]:
    """Return where the log ended, and its last record."""
    log = parts.log
    if isinstance(moment, datetime):
        is_before = _before_time(log, moment)
        limit = _first_later(parts, StoreTimes(log, order), to_timestamp_ms("at", moment))
    else:
        is_before, limit = _before_place(log, moment), moment
    end, last = log.begin, None
    for place, size, raw in log.scan(_last_before(parts, limit), check_body=False):
        if raw is None:
            continue
        if not is_before(place, size):
            break
        end, last = place + size, place
    return end, last


def _first_later(parts: Parts, times: StoreTimes, at_ms: int) -> int:
    """Return the place of the first record with an entry that was stored after a time; the log's end without one."""
    first = parts.log.end
    for queue in parts.queues.values():
        offsets = range(queue.min_offset, queue.max_offset)
        entry = queue.entry(times.first_from(queue, at_ms + 1, offsets))
        if entry is not None:
            first = min(first, entry.physical_offset)
    return first


def _before_place(log: CommitLog, moment: int) -> _IsBefore:
    if not log.begin <= moment <= log.end:
        raise ConfigError(
            f"at: expected a physical offset from {log.begin} to {log.end}, where the log begins and ends, found "
            f"{moment!r:.80}; a time needs its date, such as 2026-11-20T08:00:00Z"
        )
    return lambda place, size: place + size <= moment


def _before_time(log: CommitLog, moment: datetime) -> _IsBefore:
    if moment.tzinfo is None:
        raise ConfigError(f"at: expected a time with a time zone, or a physical offset, found {moment!r:.80}")
    at_ms = to_timestamp_ms("at", moment)
    first_ms = log.first_store_timestamp_ms(log.begin) if log.end > log.begin else None
    if first_ms is None or first_ms > at_ms:
        if first_ms is None:
            if log.unreadable is not None:
                raise log.unreadable
            raise ConfigError(f"at: the store has no messages, so it has no earlier state; found {moment}")
        raise ConfigError(
            f"at: expected a time from {exact_moment(first_ms)} on, when the first message was stored, "
            f"found {exact_moment(at_ms)}"
        )

    def is_before(place: int, size: int) -> bool:
        stored_ms = log.store_timestamp_ms(place, size)
        return stored_ms is None or stored_ms <= at_ms  # a deleted message is older than all others

    return is_before


def _last_before(parts: Parts, limit: int) -> int:
    """Return the place of the last record that ends at a place or before, and has an entry, else the log's start.

    Records without entries can follow it.
    """
    latest = parts.log.begin
    for queue in parts.queues.values():
        count = _entries(queue, limit)
        entry = queue.entry(queue.min_offset + count - 1) if count else None
        if entry is not None:
            latest = max(latest, entry.physical_offset)
    return latest


def _entries(queue: ConsumeQueue, log_end: int) -> int:
    """Return how many entries of a queue belong to records that end at a place or before."""

    def is_later(queue_offset: int) -> bool:
        entry = queue.entry(queue_offset)
        return entry is not None and entry.physical_offset + entry.size > log_end

    return bisect_left(range(queue.min_offset, queue.max_offset), True, key=is_later)


# ---- the view

_FILE_DIGITS: Final = 20  # of the name of a queue's file
_NOTHING_MORE: Final = (GetStatus.NO_MATCHED_MESSAGE, GetStatus.OFFSET_TOO_SMALL)


class ReadOnlyView(StoreHandle):
    """A store that this process only reads. `refresh` brings its parts up to date. Thread-safe."""

    parts: Parts
    """The parts as of the last `refresh`. They are replaced when a writer begins or ends, and never closed."""
    version: int
    """Number of refreshes that found anything new."""

    def __init__(
        self,
        path: str,
        files: Files,
        clock: Clock,
        bitmap_of: BitmapOf | None = None,
        moment: Moment | None = None,
    ) -> None:
        """Prepare a view of the store in ``path``, by default as it is now, that accepts no calls until `open`."""
        super().__init__(path, files, clock)
        self._given_config: StoreConfig | None = None
        self._bitmap_of = bitmap_of
        self.moment = moment
        """The earlier moment at which the store is shown; None for the present."""
        self.derives_queues = False
        """Whether the queues are not all in files, so that they are derived from the log."""
        self._guard = Lock()
        self._is_brief = True
        self._has_all_files = False
        self._holder: str | None = None
        self._live: FollowedParts | None = None
        self._marks: tuple[object, ...] = ()
        self._inferred: tuple[bool, ...] = ()
        self._noted_order: TimeOrder | None = None
        self._overlays: list[OverlayFiles] = []
        self.version = 0

    def open(self, config: StoreConfig | None = None) -> None:
        """Open the store; see `MessageStore.open`."""
        kind = directory.check_kind(self.path, self.files, writable=False)
        if config is not None:
            self._given_config = directory.complete_config(self.path, config, self.files)
        self.derives_queues = kind.derives_queues
        self._open()
        self.accept_calls()

    def refresh(self) -> bool:
        """See what other processes have changed, and return whether there is any change.

        Everything that was acknowledged before the call is seen. It costs a look at the lock, a listing of the folders
        of log and index, and a walk over new records. After an error, which is one of opening, the parts stay.
        """
        with self._guard:
            self.check_open()
            before, live = self.version, self._live
            if self.moment is not None:
                return False
            if self._lock_holder() != self._holder:  # it can be a broker of a later version
                self.derives_queues |= directory.recognise(self.path, self.files).derives_queues
                self._open()
            elif live is None:
                if self._read_state() != self._marks:
                    self._open()
            else:
                try:
                    if live.has_lost_end() or not (all(self._inferred) or self._inferable() == self._inferred):
                        self._open()
                    else:
                        self.version += live.follow_log()
                except NotAStoreError:  # a new record is a batch
                    self._open()
                except CorruptionError as error:
                    if error.kind not in ("name", "size"):
                        raise
                    self._open()  # the log lacks a file now
            return self.version != before

    def complete(self) -> None:
        """Compare the index with the log too, if a view of a large crashed store has put it off."""
        with self._guard:
            if self._live is not None:
                self._live.complete()
            if self._is_brief:
                self._is_brief = False
                if self.parts.recovered.is_brief:
                    self._open()

    def check_covered(self) -> Damage | None:
        """Read all records, those too that opening has passed over; return the first damage."""
        log = self.log
        try:
            deque(log.scan(), maxlen=0)
        except CorruptionError as error:
            return Damage.of(error, log.end - error.offset)
        return None

    def condition(self, *, looks_at_queues: bool = True) -> Condition:
        """Return how whole the store is, and what is missing. An earlier moment lacks nothing."""
        if self.moment is not None:
            return Condition(Wholeness.RECOVERABLE)
        if looks_at_queues and not self._has_all_files:
            self._has_all_files = True
            self._open_queue_without_files()
        return condition_of(self.path, self.parts, self.config, self.files, is_written=self._holder is not None)

    def _open_queue_without_files(self) -> None:
        """Open a queue that lacks a file of those at the close, so that the view makes it again."""
        queues, size, look_at = self.parts.queues, self.config.consumequeue_file_size, self.files.status
        if queues.rebuild is None:
            return
        for name, (first, end, _) in queues.states().items():  # a plain loop, because there can be many thousands
            if first < end and not queues.is_open(name):
                folder = directory.queue_folder(self.path, *name)
                for start in range(first * ENTRY_SIZE // size * size, end * ENTRY_SIZE, size):
                    status = look_at(f"{folder}{os.sep}{start:020d}")
                    if status is None or status.size != size:
                        queues[name]
                        return

    def read(
        self,
        name: QueueName,
        queue_offset: int,
        max_messages: int,
        matching: MessageFilter | None,
        *,
        checked: bool = False,
    ) -> ReadResult:
        """Read a queue as `read_queue` does; if nothing is there, refresh and read once more."""
        is_refreshed, attempt = False, -1
        while True:
            attempt += 1
            version, checks = self.version, self.checks
            try:
                queue = checks.queues.find(name)
                result = read_queue(checks, queue, name, queue_offset, max_messages, matching, checked=checked)
            except (StoreIOError, CorruptionError):  # the parts may be outdated
                if attempt >= ATTEMPTS or not (self.refresh() or self.version != version):
                    raise
                continue
            if is_refreshed or result.messages or result.status in _NOTHING_MORE:
                return result
            is_refreshed = True
            self.refresh()
            if self.version == version:
                return result

    @override
    def up_to_date(self) -> Parts:
        self.refresh()
        return self.parts

    @override
    def with_index(self) -> tuple[Parts, Sequence[KeyBlock]]:
        self.check_open()
        self.complete()
        parts = self.up_to_date()
        with self._guard:  # another thread's refresh can collect more
            return parts, parts.dispatcher.unindexed()

    @property
    @override
    def times(self) -> StoreTimes:
        if self._noted_order is None:
            self._noted_order = noted_order(self.path, self.files, self.log) or TimeOrder(0, 0)
        return StoreTimes(self.log, self._noted_order)

    @override
    def abandon(self, why: str) -> None:
        # Take no guard, because a signal handler that closes the view can have interrupted a refresh, which holds it.
        with critical:
            if self.closed is None:
                self.closed = why
                self.parts.close()
                for overlay in self._overlays:  # the parts refer to each other, so they stay for a while
                    overlay._discard()

    # ------------------------------------------------------------------------------------------------------ opening

    def _lock_holder(self) -> str | None:
        return self.files.lock_holder(directory.lock_path(self.path))

    def _open(self) -> None:
        marks: tuple[object, ...] | None = None
        for attempt in itertools.count():
            holder = self._lock_holder()
            try:
                marks = self._read_marks()
                inferred = self._inferable() if self._given_config is None else ()
                config = self._given_config or directory.infer_config(self.path, self.files)
                live: FollowedParts | None = None
                if self.derives_queues:
                    live = DerivedParts(self.path, config, self.files, is_written=holder is not None)
                elif holder is not None:
                    live = LiveParts(self.path, config, self.files)
                parts = self._recovered(config) if live is None else live.parts
                if self.moment is not None:
                    cut_at(parts, self.moment, noted_order(self.path, self.files, parts.log))
                changed = self._lock_holder() != holder or (live is None and self._read_marks() != marks)
            except NotAStoreError:  # a record of the log is a batch
                if self.derives_queues:
                    raise
                self.derives_queues = True
                continue
            except (StoreIOError, CorruptionError):
                # A writer makes and deletes files between the listing and their opening, and so does who cleans up.
                is_written = holder is not None or self._lock_holder() is not None
                if attempt >= ATTEMPTS or not (is_written or self._read_marks() != marks):
                    raise
                continue
            if not changed or attempt >= ATTEMPTS:
                break
        self.configure(config)
        self.parts, self._live, self._holder = parts, live, holder
        self._inferred = inferred
        self._marks = () if live is not None else self._read_state()
        with critical:
            self.use_parts(parts)
        self.recovered = parts.recovered.cuts
        self._noted_order = None
        self.version += 1

    def _recovered(self, config: StoreConfig) -> Parts:
        """Return the parts as a recovery would leave them, in memory."""
        files, path = self.files, self.path
        is_brief = self._is_brief and not config.enable_consumequeue_ext

        overlays: list[OverlayFiles] = []

        def previewed(rebuilt: frozenset[QueueName] = frozenset()) -> Parts:
            overlay = OverlayFiles(files)
            overlays.append(overlay)
            parts = load(
                path, config, overlay, self.clock, mode=RecoveryMode.PREVIEW, bitmap_of=self._bitmap_of,
                is_brief=is_brief, rebuilt=rebuilt,
            )  # fmt: skip
            # Mark the log as read-only from here on, so that scans release the pages that they have read.
            parts.log.sequence.writable = False
            ends = _kept_to(path, overlay)
            parts.queues.kept_to = lambda name: ends.get(directory.queue_folder(path, *name)) if ends else None
            if not config.enable_consumequeue_ext:
                parts.queues.read_short = partial(_read_short, parts, path, config, files)
            return parts

        def rebuild(error: CorruptionError) -> QueueTable:
            rebuilt_parts = previewed(frozenset(parts.queues))
            added = [damage for damage in rebuilt_parts.recovered.repairs if damage not in parts.recovered.repairs]
            parts.recovered.repairs += added or [Damage(error.file, error.offset, error.kind, without_advice(error))]
            if rebuilt_parts.log.end < parts.log.end:  # the rebuild has met a damaged record
                parts.recovered.repairs += [cut for cut in rebuilt_parts.recovered.cuts if cut.kind == "record"]
                parts.log.end = rebuilt_parts.log.end
            return rebuilt_parts.queues

        parts = previewed()
        parts.queues.rebuild = rebuild
        self._overlays = overlays
        return parts

    def _read_state(self) -> tuple[object, ...]:
        """Return what every writer to the store changes: `_read_marks`, and the bytes behind the log."""
        log = self.parts.log
        start = log.sequence.start_of(log.end)
        behind = None
        if start is not None:
            with suppress(StoreIOError, CorruptionError):  # if the file is deleted or empty, the listing shows it
                at = log.end - start
                behind = self.files.open(log.sequence.path(start)).buffer[at : at + GLANCE]
        return *self._read_marks(), behind

    def _read_marks(self) -> tuple[object, ...]:
        """Return the files of the log, the abort marker and the checkpoint."""
        files, checkpoint = self.files, os.path.join(self.path, directory.CHECKPOINT)
        times = read_replaced(files, checkpoint)
        return tuple(files.list(os.path.join(self.path, directory.COMMITLOG))), has_abort(files, self.path), times

    def _inferable(self) -> tuple[bool, ...]:
        """Return whether log, index and queues have files from which their settings can be inferred."""
        files, path = self.files, self.path
        names = () if self.derives_queues else directory.iter_queues(path, files)
        queues = (directory.queue_folder(path, *name) for name in names)
        folders = [os.path.join(path, directory.COMMITLOG)], [os.path.join(path, directory.INDEX)], queues
        return tuple(any(entry.size for folder in kind for entry in files.list(folder)) for kind in folders)


def _kept_to(path: str, overlay: OverlayFiles) -> dict[str, int]:
    """Return up to which queue offset the files below an overlay have the entries, by the folders of changed queues."""
    ends: dict[str, int] = {}
    queues = os.path.join(path, directory.CONSUMEQUEUE, "")
    for changed, place in overlay.changes().items():
        folder, name = os.path.split(changed)
        if changed.startswith(queues):
            is_file = len(name) == _FILE_DIGITS and name.isdigit()
            of_queue, first = (folder, (int(name) + place) // ENTRY_SIZE) if is_file else (changed, 0)
            ends[of_queue] = min(ends.get(of_queue, first), first)
    return ends


def _read_short(
    parts: Parts, path: str, config: StoreConfig, files: Files, name: QueueName, state: QueueState
) -> ConsumeQueue | None:
    """Return a queue of few entries that no recovery in memory has changed; None if it is another."""
    if parts.queues.kept_to(name) is not None:
        return None
    folder, size = directory.queue_folder(path, *name), config.consumequeue_file_size
    return ShortQueue.from_file(folder, size, files, state, partial(parts.open_queue, *name))
