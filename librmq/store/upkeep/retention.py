"""What may go: log files by size, by age and by how full the disk is; queues and key index follow.

::

    disk in use           up to 75 %          up to 85 %     up to 90 %           above
    expired log files     go at their hour    go at any hour
    other log files       stay                stay           go, oldest first
    messages              are taken           are taken      are taken            are refused

Whole files go, from the oldest, never the one that holds the last record. A file has expired when its last record was
stored ``file_reserved_hours`` ago; the times of files in the file system mean nothing. What is more than
``max_total_size`` goes at once. No mapping is closed: a reader that holds a part of a deleted file goes on reading it.

A broker tells by `Readers` what its groups have not consumed. Such messages go with their file, which a warning tells,
one for each group and file. With ``keep_unconsumed`` the file stays instead, and messages are refused while the log is
larger than ``max_total_size``.

A crash may come at any point. Hence the order: what is derived from the records that go must have reached the device
first, since a queue whose messages are all gone has its offsets only from its own files. Then the log's files go one
by one, each deletion on the device before the next (a gap in the log would be damage), and only behind the last of
them those of queues and index: entries that point below the log's begin are merely old, entries that are missing would
be damage. What a crash leaves of them goes with the first `Retention.run_due` after it.

Mirrors 4.9.4's ``CleanCommitLogService``, ``CleanConsumeQueueService`` and ``MappedFileQueue.deleteExpiredFileByTime``:
10 s from round to round, 10 files a round, 100 ms from file to file. Unlike 4.9 it looks at the disk again
before each file, so that a forced round deletes no more than the disk wants.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, tzinfo
from typing import Any, Final

from librmq.commitlog import CommitLog
from librmq.config import StoreConfig, parse_hours
from librmq.consumequeue import ConsumeQueue
from librmq.errors import CorruptionError, DiskFullError, StoreError, StoreFullError
from librmq.files.seam import Files, fills_by_itself
from librmq.message import record
from librmq.store.format.keyindex import KeyIndex
from librmq.store.upkeep.unread import FindQueue, Readers, UnreadInFile, remedy, unread_between

__all__ = ["Retention"]

_FILES_A_ROUND: Final = 10
_ROUND_MS: Final = 10_000
_BETWEEN_FILES_MS: Final = 100
_UNSETTLED_MS: Final = 1_000  # as often as queues are flushed
_HOUR_MS: Final = 3_600_000
_HOURS_TRIED: Final = 72  # an hour that a day lacks, for summer time, comes on the next
_NAMED: Final = 8  # queues in a warning
_LAST_MOMENT: Final = 253_370_764_800_000  # the year 9999; what is to happen later never happens

_logger = logging.getLogger(__name__)


class Retention:
    """Decides what of a store goes, and lets it go; a step without a thread or a clock of its own.

    One thread at a time may call it, beside producers and readers. It takes ``lock`` for each log file, each queue and
    each look at the index by itself, never for longer, so the caller must not hold it; no other thread may close or
    replace the parts meanwhile.
    """

    refuses_writes: bool
    """Whether there was no room for further messages when that was last looked at; `refusal` is the error."""
    used_ratio: float
    """How much of the disk was in use then, 0.0 to 1.0."""
    is_held: bool
    """Whether a file that was to go stayed when `run_due` last looked, as a group has not consumed all of it."""
    deleted: list[str]
    """The paths that the last `run_due` deleted: of the log, of queues, of the index."""

    def __init__(  # noqa: PLR0913 (a part of the store each)
        self,
        log: CommitLog,
        queues: Callable[[], Iterable[ConsumeQueue]],
        index: KeyIndex,
        config: StoreConfig,
        files: Files,
        path: str,
        *,
        timezone: tzinfo | None = None,
        lock: AbstractContextManager[Any] | None = None,
        settled: Callable[[], int] | None = None,
        watch_disk: bool = True,
        readers: Callable[[], Readers | None] = lambda: None,
        find_queue: FindQueue = lambda topic, queue_id: None,
    ) -> None:
        """Take the parts of the store in folder ``path``, open for writing.

        ``queues()`` gives all that there are now. ``timezone`` is that of the hours, the machine's unless given.
        ``lock`` is what producers hold while they write; none is needed where no producer writes meanwhile.
        ``settled()`` is a physical offset below which all records, and the queue entries that follow from them, have
        reached the device; files that reach beyond it stay. Without it log and queues are flushed before anything is
        deleted. Without ``watch_disk``, as where a test moves the clock, a disk that others fill counts as empty, and
        files that tests fill are looked at only when something else is due, or while they are too full for messages.
        ``readers()`` gives the broker that knows what was consumed, None where there is none;
        ``find_queue(topic, queue_id)`` gives a queue with the entries of all that was appended.
        """
        self._log = log
        self._queues = queues
        self._index = index
        self._files = files
        self._path = path
        self._timezone = timezone
        self._lock = lock or nullcontext()
        self._settled = settled or self._flush
        self._settled_upto = 0
        self._watch_disk = watch_disk
        self._looks_at_disk = watch_disk or not fills_by_itself(files)
        self._readers = readers
        self._find_queue = find_queue
        self._keeps_unconsumed = config.keep_unconsumed
        self.is_held = False
        self._is_full_told = False
        self._hours = parse_hours(config.delete_when)
        hours = config.file_reserved_hours
        self._reserved_ms = _LAST_MOMENT if hours is None else hours * _HOUR_MS
        self._max_total_size = config.max_total_size
        self._max_used = config.disk_max_used_ratio / 100
        self._force_clean = config.disk_force_clean_ratio / 100
        self._refuse = config.disk_refuse_ratio / 100
        self._followed = 0  # queues and index have nothing that only concerns the log below
        self._walked = (-1, 0)  # where a log file starts, and when its last record was stored
        self._round_end = 0
        self._round_files = 0
        self.refuses_writes = False
        self.used_ratio = 0.0
        self.deleted = []

    # --------------------------------------------------------------------------------------------------- the step

    def run_due(self, now_ms: int) -> int | None:
        """Look at the disk and delete what is due; returns when to look next.

        At most 10 files that are beyond ``max_total_size`` go at once, or one that has expired. None: nothing happens
        until the log begins a new file; look then in any case. A disk is looked at every 10 s, since others fill it
        too; files in memory have none.

        `StoreIOError` if a file can't be deleted, flushed, or the disk not be looked at: the next call tries again.
        """
        self.deleted = []
        self._look_at_disk()
        self.deleted += self._follow()
        self.is_held = False
        if oversized := self._oversized():
            self.deleted += self._delete(self._ends()[: min(oversized, _FILES_A_ROUND)], "beyond max_total_size")
        if self._forced or self._any_hour or self._next_hour(now_ms) == now_ms:
            if not self._round_end - _ROUND_MS <= now_ms < self._round_end:
                self._round_end, self._round_files = now_ms + _ROUND_MS, 0
            if self._round_files < _FILES_A_ROUND:
                gone = self.expire(now_ms, at_most=1, forced=self._forced)
                self._round_files += bool(gone)
                self.deleted += gone
        return self._next_due(now_ms)

    def expire(self, now_ms: int, *, at_most: int = _FILES_A_ROUND, forced: bool = False) -> list[str]:
        """Delete the log files that have expired, ``at_most`` so many, whatever the hour; returns all paths deleted.

        ``forced`` deletes the oldest whether they have expired or not. Errors are those of `run_due`.
        """
        ends = []
        for end in self._ends()[: max(at_most, 0)]:
            if not forced and not self._has_expired(end - self._log.file_size, now_ms):
                break
            ends.append(end)
        return self._delete(ends, f"the disk is {self.used_ratio:.1%} full" if forced else "expired")

    def delete_before(self, physical_offset: int) -> list[str]:
        """Delete the log files that end at or before ``physical_offset``, and what of queues and index led there.

        Never the file of the last record. Returns all paths deleted. Errors are those of `run_due`.
        """
        return self._delete([end for end in self._ends() if end <= physical_offset], f"before {physical_offset}")

    def refusal(self) -> StoreError:
        """Return the error for a message that comes while `refuses_writes`."""
        if self._knows_no_reader_of_a_full_log():
            return StoreFullError(
                f"{self._path}: no message is taken: the log has reached max_total_size, {self._max_total_size} bytes, "
                f"and keep_unconsumed keeps its files where no broker tells what its groups have consumed: open the "
                f"store by Broker.open, or raise max_total_size"
            )
        return DiskFullError(
            f"{self._path}: no message is taken: the disk is {self.used_ratio:.1%} full, more than {self._refuse:.0%}"
        )

    def full_error(self) -> StoreFullError | None:
        """Return the error for a send while unread messages that must stay take all the room; None while there is some.

        Takes no lock. What changes that (a group consumes) is seen by the next call; `run_due` makes the room then.
        """
        error = self._full_error()
        if (error is not None) != self._is_full_told:
            self._is_full_told = error is not None
            if error is None:
                _logger.info("%s: messages are taken again: those that were not consumed are", self._path)
            else:
                _logger.error("%s", error)
        return error

    def _full_error(self) -> StoreFullError | None:
        if not self.is_full():
            return None
        begin = self._log.begin
        held = next(self._unread(begin, begin + self._log.file_size), None)
        if held is None:
            return None
        reader = held.reader
        return StoreFullError(
            f"{self._path}: no message is taken: the log has reached max_total_size, {self._max_total_size} bytes, and "
            f"keep_unconsumed keeps its oldest file: group {reader.group!r} has not consumed {_count(held.messages)} "
            f"there, from queue offset {held.queue_offset} of {reader.topic}/{reader.queue_id} on: {remedy(reader)}, "
            f"or raise max_total_size"
        )

    # --------------------------------------------------------------------------------------------------- deciding

    def is_full(self) -> bool:
        """Tell whether what is written has reached the size allowed, where files that may not go are kept."""
        largest = self._max_total_size
        return self._keeps_unconsumed and largest is not None and self._log.end > self._log.begin + largest

    def _knows_no_reader_of_a_full_log(self) -> bool:
        return self.is_full() and self._readers() is None

    def _unread(self, begin: int, end: int) -> Iterator[UnreadInFile]:
        """Find what is stored between two places and not consumed; nothing where no broker tells."""
        readers = self._readers()
        return iter(()) if readers is None else unread_between(readers, self._find_queue, begin, end)

    def _must_stay(self, unread: Sequence[UnreadInFile]) -> bool:
        return self._keeps_unconsumed and (bool(unread) or self._readers() is None)

    @property
    def _any_hour(self) -> bool:
        return self.used_ratio > self._max_used

    @property
    def _forced(self) -> bool:
        return self.used_ratio > self._force_clean

    def _look_at_disk(self) -> None:
        self.used_ratio = self._files.used_ratio(self._path) if self._looks_at_disk else 0.0
        refuses = self.used_ratio > self._refuse or self._knows_no_reader_of_a_full_log()
        if refuses and not self.refuses_writes:
            _logger.error("%s", self.refusal())
        elif self.refuses_writes and not refuses:
            _logger.info("%s: messages are taken again; the disk is %.1f%% full", self._path, 100 * self.used_ratio)
        self.refuses_writes = refuses

    def _ends(self) -> list[int]:
        """Where the files of the log end that lie before that of its last record, ascending."""
        size, end = self._log.file_size, self._log.end
        return [start + size for start in self._log.sequence.starts if start + size < end]

    def _oversized(self) -> int:
        """How many of the oldest files that may go are beyond the size allowed for all."""
        if self._max_total_size is None:
            return 0
        sequence = self._log.sequence
        excess = sequence.end - sequence.begin - self._max_total_size
        return min(max(-(-excess // sequence.file_size), 0), len(self._ends()))

    def _has_expired(self, start: int, now_ms: int) -> bool:
        """Whether the file at ``start`` has: the times of its first record and the next file's mostly tell.

        Only where its last record's is between two that disagree, it is walked through, once.
        """
        latest = now_ms - self._reserved_ms
        if self._known_timestamp(start) > latest:
            return False
        if self._walked[0] != start:
            following = self._first_behind(start)
            if following is not None and following <= latest:
                return True
            self._walked = start, self._last_timestamp(start, following)
        return self._walked[1] <= latest

    def _known_timestamp(self, start: int) -> int:
        """When the last record of the file at ``start`` was stored, or a time no later than that, at no cost."""
        if self._walked[0] == start:
            return self._walked[1]
        return self._log.first_store_timestamp_ms(start) or 0

    def _first_behind(self, start: int) -> int | None:
        """When the first record behind the file at ``start`` was stored, by the first file that tells."""
        for other in self._log.sequence.starts:
            if other > start and (stored := self._log.first_store_timestamp_ms(other)):
                return stored
        return None

    def _last_timestamp(self, start: int, following: int | None) -> int:
        """When the last record of the file at ``start`` was stored; by what follows if that can't be read."""
        last = None
        try:
            for _, _, raw in self._log.scan(start, start + self._log.file_size, check_body=False):
                last = raw or last
        except CorruptionError:
            last = None  # there may be later ones behind the damage
        if last is not None:
            return record.store_timestamp_ms(last)
        return _LAST_MOMENT if following is None else following

    # ------------------------------------------------------------------------------------------------- scheduling

    def _next_hour(self, at_ms: int) -> int | None:
        """The first moment from ``at_ms`` on that lies in one of the hours; None if that is too far off."""
        for _ in range(_HOURS_TRIED):
            if at_ms >= _LAST_MOMENT:
                return None
            moment = datetime.fromtimestamp(at_ms // 1000, self._timezone)
            if moment.hour in self._hours:
                return at_ms
            at_ms += _HOUR_MS - 1000 * (60 * moment.minute + moment.second) - at_ms % 1000
        return None

    def _next_due(self, now_ms: int) -> int | None:
        watched = self.used_ratio > 0 if self._watch_disk else self.refuses_writes
        due = [now_ms + _ROUND_MS] if watched else []
        oldest = self._oldest_due(now_ms)
        if oldest is not None:
            due.append(oldest)
        return min(due, default=None)

    def _oldest_due(self, now_ms: int) -> int | None:
        """When the oldest file is to go, or to be looked at, as things are now."""
        ends = self._ends()
        if not ends or self.is_held:
            return None
        if not (self._oversized() or self._forced):
            at = max(now_ms, self._known_timestamp(ends[0] - self._log.file_size) + self._reserved_ms)
            allowed = at if self._any_hour else self._next_hour(at)
            if allowed is None or allowed >= _LAST_MOMENT:
                return None
            if allowed > now_ms:
                return allowed
        if ends[0] >= self._settled_upto:
            return now_ms + _UNSETTLED_MS
        if not self._oversized() and self._round_files >= _FILES_A_ROUND:
            return self._round_end
        return now_ms + _BETWEEN_FILES_MS

    # --------------------------------------------------------------------------------------------------- deleting

    def _flush(self) -> int:
        """All that the log has, and the queues, brought to the device."""
        end = self._log.flush()
        for queue in list(self._queues()):
            queue.flush()
        return end

    def _delete(self, ends: Sequence[int], why: str) -> list[str]:
        """Delete the log files that end at ``ends``, the oldest there are; queues and index follow."""
        gone: list[str] = []
        if ends:
            self._settled_upto = self._settled()
        for end in ends:
            if end >= self._settled_upto:
                break
            unread = list(self._unread(end - self._log.file_size, end))
            if self._must_stay(unread):
                self.is_held = True
                break
            if self._log.begin > self._followed:
                self._flush_folder()
            with self._lock:
                paths = self._log.delete_before(end)
            for path in paths:
                _logger.info("deleted %s: %s", path, why)
            if paths:
                self._tell_lost(unread, paths[-1], why)
            gone += paths
        return gone + self._follow()

    def _tell_lost(self, unread: Sequence[UnreadInFile], path: str, why: str) -> None:
        """Tell what was deleted with a file before it was consumed: one warning for each group."""
        of_group: dict[str, list[UnreadInFile]] = {}
        for each in unread:
            of_group.setdefault(each.reader.group, []).append(each)
        for group, lost in of_group.items():
            _logger.warning(
                "group %s: %s deleted before they were consumed, with %s (%s): %s; "
                "raise the limit, or refuse sends instead by keep_unconsumed=True",
                group,
                _count(sum(each.messages for each in lost)),
                path,
                why,
                ", ".join(f"{each.messages} of {each.reader.topic}/{each.reader.queue_id}" for each in lost[:_NAMED])
                + (", …" if len(lost) > _NAMED else ""),
            )
        if (readers := self._readers()) is not None:
            for each in unread:
                readers.lost(each)

    def _flush_folder(self) -> None:
        self._files.flush_folder(self._log.sequence.folder)

    def _follow(self) -> list[str]:
        """Delete what of queues and index concerns only what is gone from the log; minima move to its begin."""
        begin = self._log.begin
        if begin <= self._followed:
            return []
        self._flush_folder()
        gone = []
        with self._lock:
            queues = list(self._queues())
        for queue in queues:
            with self._lock:
                gone += queue.trim(begin)
        with self._lock:
            gone += self._index.delete_before(begin)
        self._followed = begin
        for path in gone:
            _logger.info("deleted %s: the log begins at %d", path, begin)
        return gone


def _count(messages: int) -> str:
    return "1 message" if messages == 1 else f"{messages} messages"
