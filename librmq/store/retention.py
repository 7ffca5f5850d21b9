"""Retention: deletion of log files by size, age and disk use, with their part of queues and key index.

::

    disk in use           up to 75 %          up to 85 %     up to 90 %           above
    expired log files     go at their hour    go at any hour
    other log files       stay                stay           go, oldest first
    messages              are accepted        are accepted   are accepted         are refused

Retention deletes whole files, the oldest first, but never the file with the last record. A file expires when its last
record is ``file_reserved_hours`` old; file times are not used. Files beyond ``max_total_size`` go now. No mapping
is closed, so a reader that holds a part of a deleted file can continue.

A store does not know groups. A broker reports by `Readers` which messages its groups, and its own parts that deliver
messages later, have not consumed. With ``keep_unconsumed`` their file stays, and messages are refused while the log is
larger than ``max_total_size``; from three quarters of it on, or of the disk, a warning names the group that holds the
oldest file. Without ``keep_unconsumed`` such messages are deleted with their file, with one warning for each group and
file.

The order of steps allows a crash at any point. First, entries and keys derived from the deleted records are flushed,
because a queue without messages has its offsets only from its own files. Then the log's files are deleted one by one,
each deletion flushed before the next, because a gap in the log would be damage. Files of queues and index follow last:
entries below the log's beginning are merely old, while missing entries would be damage. The first `Retention.run_due`
after a crash deletes the rest.

Mirrors 4.9.4's ``CleanCommitLogService``, ``CleanConsumeQueueService`` and ``MappedFileQueue.deleteExpiredFileByTime``,
with 10 s between rounds, 10 files a round, and 100 ms between files. Unlike 4.9 it checks the disk again before each
file, so a forced round deletes no more than necessary.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, tzinfo
from typing import Final, NamedTuple, Protocol

from librmq.clock import Clock, moves_by_itself
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig, parse_hours
from librmq.consumequeue import ConsumeQueue, offset_at_place
from librmq.errors import CorruptionError, DiskFullError, StoreError, StoreFullError
from librmq.files import Files, is_folder
from librmq.message import record
from librmq.message.topics import SystemTopic, TopicPrefix, has_no_row
from librmq.runtime import calls_later, critical
from librmq.runtime.event_log import EventLog, counted
from librmq.runtime.locks import Lock
from librmq.store.engine._append import Appender
from librmq.store.engine.saved_state import FILES_A_ROUND
from librmq.store.engine.store_parts import QueueName, QueueTable
from librmq.store.format import directory
from librmq.store.format._keyindex import KeyIndex

# ---- unconsumed messages of a log file

FindQueue = Callable[[QueueName], ConsumeQueue | None]


class Unread(NamedTuple):
    """The progress of a reader in a queue."""

    group: str
    topic: str
    queue_id: int
    queue_offset: int
    """Queue offset of the first message that the reader may still need."""
    has_passed: Callable[[int], bool] | None = None
    """Returns whether a later queue offset is no longer needed; None needs all of them."""


class UnreadInFile(NamedTuple):
    """The messages that a reader still needs in a part of the log."""

    reader: Unread
    queue_offset: int
    """Queue offset of the first message."""
    messages: int


class Readers(Protocol):
    """Retention's questions to a broker. Any thread calls them, without a lock of the store."""

    def unread(self, before: int) -> Iterable[Unread]:
        """Return each reader's progress by queue; messages stored at or after ``before`` don't matter."""

    def never_read(self) -> Iterable[Unread]:
        """Return the queues of topics that no group has ever read, each with an empty group; they hold no file."""

    def lost(self, unread: UnreadInFile) -> None:
        """Note that messages were deleted before their reader reached them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedStore:
    """The parts of an open store whose files retention deletes; a recovery, which replaces them, makes another."""

    path: str
    """The folder."""
    files: Files
    """The file system of the folder."""
    clock: Clock
    """A clock that a test moves makes a disk that other programs fill count as empty.

    A disk that the test fills is then checked only when something else is due, or while it is too full.
    """
    config: StoreConfig
    """The settings of retention."""
    log: CommitLog
    """The log, open for writing."""
    index: KeyIndex
    """The index, open for writing."""
    queues: Mapping[QueueName, ConsumeQueue]
    """The queues of the moment."""
    lock: AbstractContextManager[object]
    """The lock of producers."""
    readers: Callable[[], Readers | None]
    """Returns the broker that knows which messages are consumed, None without a broker."""
    written_queues: Callable[[], QueueTable]
    """Returns the queues with the entries of all appended messages."""
    deletion: Callable[[], AbstractContextManager[object]]
    """Returns what is held while a file of the log is deleted."""
    settled: Callable[[], int]
    """Returns a physical offset below which all records and their queue entries are on the device."""
    flush_log: Callable[[], object]
    """Brings to the device what readers wrote when they passed a message."""


def unread_between(readers: Iterable[Unread], find: FindQueue, begin: int, end: int) -> Iterator[UnreadInFile]:
    """Yield the unconsumed messages from physical offset ``begin`` to ``end``, reader by reader."""
    for reader in readers:
        queue = find((reader.topic, reader.queue_id))
        if queue is None:
            continue
        low = max(reader.queue_offset, queue.min_offset)
        queue_offsets = range(max(low, offset_at_place(queue, begin)), offset_at_place(queue, end))
        if reader.has_passed is None:
            if queue_offsets:
                yield UnreadInFile(reader, queue_offsets.start, len(queue_offsets))
            continue
        needed = [queue_offset for queue_offset in queue_offsets if not reader.has_passed(queue_offset)]
        if needed:
            yield UnreadInFile(reader, needed[0], len(needed))


def may_have_readers(path: str, files: Files) -> bool:
    """Return whether a broker may still need messages of the store in ``path``.

    So it is if a group has saved progress, or if messages wait for a retry, their time or the end of a transaction.
    """
    for topic in files.names(os.path.join(path, directory.CONSUMEQUEUE)):
        if topic.startswith((TopicPrefix.RETRY, TopicPrefix.SYSTEM)) or topic in (
            SystemTopic.SCHEDULE,
            SystemTopic.HALF,
        ):
            return True
    if not directory.has_tables(path, files):
        return False
    from librmq.store.format.broker_tables import BrokerTables

    try:
        return bool(BrokerTables.open(os.path.join(path, directory.CONFIG), files=files).offsets.rows)
    except CorruptionError:
        return True


def describe_holder(part: UnreadInFile, path: str) -> str:
    """Return which messages keep a log file of the store in ``path``, and how to free it."""
    reader, count = part.reader, counted(part.messages, "message")
    place = f"from queue offset {part.queue_offset} of {reader.topic}/{reader.queue_id} on"
    discard = "delete the file together with them by keep_unconsumed=False"
    if reader.topic == SystemTopic.SCHEDULE or reader.topic.startswith(TopicPrefix.SYSTEM):
        pending = shlex.join(("librmq", "pending", path))
        return f"{count} there wait for a delivery time, {place}: wait ({pending} lists them), or {discard}"
    if reader.topic == SystemTopic.HALF:
        return (
            f"{count} there wait for the end of a transaction, {place}: let the producer group commit them or roll "
            f"them back, or {discard}"
        )
    command = shlex.join(("librmq", "skip", path, "--group", reader.group, "--topic", reader.topic))
    return (
        f"group {reader.group!r} has not consumed {count} there, {place}: let the group consume, or skip them: "
        f"broker.reset_group({reader.group!r}, {reader.topic!r}, 'end'), or, while no process has the store open, "
        f"{command}"
    )


_ROUND_MS: Final = 10_000
_BETWEEN_FILES_MS: Final = 100
_UNSETTLED_MS: Final = 1_000  # queues are flushed as often
_HOUR_MS: Final = 3_600_000
_HOURS_TRIED: Final = 72  # summer time can skip an hour of a day, and the next day has it
_NAMED: Final = 8  # a warning names at most so many queues
DISK_CHECK_MS: Final = 10
"""Least time between two looks at a disk that other programs fill, in milliseconds."""
_NEARLY_FULL: Final = 0.75  # this part of the total size counts as nearly full
_LAST_MOMENT: Final = 253_370_764_800_000  # in the year 9999; what is due later never happens

_log = EventLog("librmq.store")


class Retention:
    """Retention of a store, as a step without a thread or a clock of its own.

    One thread at a time can call it, beside producers and readers. It takes the store's lock separately for each log
    file, each queue and each look at the index, so the caller must not hold it. No other thread may close or replace
    the parts meanwhile.
    """

    refuses_writes: bool
    """Whether the last look found no room for further messages; `refusal` is the error."""
    used_ratio: float
    """Used fraction of the disk at the last look, 0.0 to 1.0."""
    is_held: bool
    """Whether the last `run_due` kept a file because a group has not consumed all of it."""
    watches_disk: bool
    """Whether others fill the disk while time passes, so that it has to be seen again."""
    sees_disk_by_time: bool
    """Whether a look at the disk holds until the next periodic work; the disk of a test changes at any moment."""
    deleted: list[str]
    """Paths that the last `run_due` deleted: of the log, of queues, of the index."""

    def __init__(self, store: RetainedStore, timezone: tzinfo | None = None) -> None:
        """Take an open store; ``timezone`` is that of the hours, by default the machine's."""
        config, files = store.config, store.files
        self._store = store
        self._log, self._index = store.log, store.index
        self._files, self._path = files, store.path
        self._timezone = timezone
        self._settled_until = 0
        self.watches_disk = watch_disk = moves_by_itself(store.clock)
        # Other programs can fill a disk, so under a manual clock nothing depends on how full it is.
        self._checks_disk = watch_disk or not files.is_shared
        self.sees_disk_by_time = watch_disk or not self._checks_disk
        self._keeps_unconsumed = config.keep_unconsumed
        self.is_held = False
        self._is_full_logged = False
        self._may_have_readers = False  # only the store's files tell, while no broker does
        self._named_holder: tuple[str, str] | None = None  # the last warning named this group and topic
        self._named_unread: set[str] = set()  # a warning has named these topics, which no group has ever read
        self._checked_at_ms = -DISK_CHECK_MS
        self._check_guard = Lock()
        self._hours = parse_hours(config.delete_when)
        hours = config.file_reserved_hours
        self._reserved_ms = _LAST_MOMENT if hours is None else hours * _HOUR_MS
        self._max_total_size = config.max_total_size
        self._max_used = config.disk_max_used_ratio / 100
        self._force_clean = config.disk_force_clean_ratio / 100
        self._refuse = config.disk_refuse_ratio / 100
        self._trimmed_to = 0  # queues and index hold nothing about the log below this offset
        self._unflushed: set[str] = set()  # the last round deleted files of queues and index here
        self._walked = (-1, 0)  # a log file's start, and when its last record was stored
        self._round_end = 0
        self._round_files = 0
        self._is_requested = False  # `delete_expired` was called, and expired files are left
        self.refuses_writes = False
        self.used_ratio = 0.0
        self.deleted = []

    # --------------------------------------------------------------------------------------------------- the step

    def run_due(self, now_ms: int) -> int | None:
        """Look at the disk, delete due files, and return the time of the next look.

        A call deletes at most 10 files beyond ``max_total_size``, or one expired file. None means that nothing happens
        until the log begins a new file; look then in any case. A disk is checked every 10 s, because others fill it
        too; files in memory have none.

        Raises:
            StoreIOError: A file cannot be deleted or flushed, or the disk not be checked; the next call tries again.
        """
        self.deleted = []
        is_asked = self._keeps_unconsumed and self._store.readers() is None
        self._may_have_readers = is_asked and may_have_readers(self._path, self._files)
        self._check_disk(now_ms)
        self.deleted += self._trim_derived()
        self.is_held = False
        if not self._ends():  # there is only the file of the last record
            self._is_requested, self._named_holder = False, None
            return self._next_due(now_ms)
        if oversized := self._oversized():
            self.deleted += self._delete(self._ends()[: min(oversized, FILES_A_ROUND)], "beyond max_total_size")
        if self._forced or self._ignores_hours or self.next_cleaning_ms(now_ms) == now_ms:
            if not self._round_end - _ROUND_MS <= now_ms < self._round_end:
                self._round_end, self._round_files = now_ms + _ROUND_MS, 0
            if self._round_files < FILES_A_ROUND:
                deleted = self.expire(now_ms, at_most=1, forced=self._forced)
                self._round_files += bool(deleted)
                self.deleted += deleted
        ends = self._ends()
        if self.is_held or not ends or not self._has_expired(ends[0] - self._log.file_size, now_ms):
            self._is_requested = False
        self._warn_of_holder()
        return self._next_due(now_ms)

    def delete_expired(self) -> None:
        """Let the next calls of `run_due` delete all files that have expired, at any hour. Any thread may call this."""
        self._is_requested = True

    def expire(self, now_ms: int, *, at_most: int = FILES_A_ROUND, forced: bool = False) -> list[str]:
        """Delete at most ``at_most`` expired log files, at any hour, and return all deleted paths.

        ``forced`` deletes the oldest files even if they have not expired. Errors are those of `run_due`.
        """
        ends = []
        for end in self._ends()[: max(at_most, 0)]:
            if not forced and not self._has_expired(end - self._log.file_size, now_ms):
                break
            ends.append(end)
        return self._delete(ends, f"the disk is {self.used_ratio:.1%} full" if forced else "expired")

    def delete_before(self, physical_offset: int) -> list[str]:
        """Delete the log files that end at or before ``physical_offset``, with their part of queues and index.

        The file of the last record stays. Return all deleted paths. Errors are those of `run_due`.
        """
        ends = [end for end in self._ends() if end <= physical_offset]
        rounds = (ends[at : at + FILES_A_ROUND] for at in range(0, len(ends), FILES_A_ROUND))
        return [path for some in rounds for path in self._delete(some, f"before {physical_offset}")]

    def check_disk(self, now_ms: int) -> bool:
        """Look at the disk unless it was seen just before; return whether messages are refused otherwise than before.

        Any thread may call this.

        Raises:
            StoreIOError: The disk can't be checked.
        """
        if not self._checks_disk or (self.watches_disk and 0 <= now_ms - self._checked_at_ms < DISK_CHECK_MS):
            return False
        before = self.refuses_writes
        if self.watches_disk or self._look() != (self.used_ratio, before):  # a test's disk is seen at every send
            self._check_disk(now_ms)
        return self.refuses_writes is not before

    def refusal(self) -> StoreError:
        """Return the error for a message that arrives while `refuses_writes`."""
        if self._is_full_without_readers():
            return StoreFullError(
                f"{self._path}: message refused: the log has reached max_total_size, {self._max_total_size} bytes, "
                f"and keep_unconsumed keeps its files, because no broker reports what its groups have consumed: open "
                f"the store by Broker.open, raise max_total_size, or let files go by keep_unconsumed=False"
            )
        return DiskFullError(
            f"{self._path}: message refused: the disk is {self.used_ratio:.1%} full, more than {self._refuse:.0%}: "
            "free space, or raise disk_refuse_ratio"
        )

    def full_error(self) -> StoreFullError | None:
        """Return the error for a send if kept unread messages take all the room, otherwise None.

        This takes no lock. When a group has consumed, the next call notices it, and `run_due` makes room.
        """
        error: StoreFullError | None = None
        holder = self._holder() if self.is_full() else None
        if holder is not None:
            error = StoreFullError(
                f"{self._path}: message refused: the log has reached max_total_size, {self._max_total_size} bytes, and "
                f"keep_unconsumed keeps its oldest file: {describe_holder(holder, self._path)}, or raise max_total_size"
            )
        if (error is not None) != self._is_full_logged:
            self._is_full_logged = error is not None
            if error is None:
                _log.info("%(path)s: messages are accepted again: the kept ones are consumed", path=self._path)
            else:
                _log.error("%(refusal)s", refusal=error, path=self._path)
        return error

    def _holder(self) -> UnreadInFile | None:
        """Return the first unconsumed messages of the oldest file."""
        begin = self._log.begin
        return next(self._unread(begin, begin + self._log.file_size), None)

    def _warn_of_holder(self) -> None:
        """Warn once of the group that holds the oldest file, from 75 % of the total size or of the disk on."""
        largest = self._max_total_size
        share = 0.0 if largest is None else (self._log.end - self._log.begin) / largest
        is_nearly_full = self._keeps_unconsumed and (share >= _NEARLY_FULL or self._any_hour)
        holder = self._holder() if is_nearly_full and self._ends() else None
        if holder is None:
            self._named_holder = None
            return
        name = holder.reader.group, holder.reader.topic
        if name != self._named_holder:
            self._named_holder = name
            what = f"the log has {share:.0%} of max_total_size"
            if share < _NEARLY_FULL:
                what = f"the disk is {self.used_ratio:.0%} full"
            _log.warning(
                "%(path)s: %(_what)s, and sends will be refused, because the oldest file stays: %(_holder)s",
                path=self._path,
                group=name[0],
                _what=what,
                _holder=describe_holder(holder, self._path),
            )

    # --------------------------------------------------------------------------------------------------- deciding

    def is_full(self) -> bool:
        """Return whether the log has reached the allowed size, if unconsumed files are kept."""
        return self._log.end > self.room_end

    @property
    def room_end(self) -> int:
        """Physical offset up to which the log may grow now."""
        largest = self._max_total_size
        return self._log.begin + largest if self._keeps_unconsumed and largest is not None else sys.maxsize

    def _is_full_without_readers(self) -> bool:
        return self._may_have_readers and self._store.readers() is None and self.is_full()

    def _unread(self, begin: int, end: int, *, by_none: bool = False) -> Iterator[UnreadInFile]:
        """Return the unconsumed messages between two places, none without a broker.

        With ``by_none`` they are those of topics that no group has ever read.
        """
        readers = self._store.readers()
        if readers is None:
            return iter(())
        progress = readers.never_read() if by_none else readers.unread(end)
        return unread_between(progress, self._store.written_queues().find, begin, end)

    @property
    def _any_hour(self) -> bool:
        return self.used_ratio > self._max_used

    @property
    def _ignores_hours(self) -> bool:
        return self._any_hour or self._is_requested

    @property
    def _forced(self) -> bool:
        return self.used_ratio > self._force_clean

    def after_fork(self) -> None:
        """Replace the lock in a forked child: a thread of the parent may hold it."""
        self._check_guard = Lock()

    def _look(self) -> tuple[float, bool]:
        """Return the used fraction of the disk, and whether there is no room for messages."""
        used = self._files.used_ratio(self._path) if self._checks_disk else 0.0
        return used, used > self._refuse or self._is_full_without_readers()

    def _check_disk(self, now_ms: int) -> None:
        with calls_later(), critical, self._check_guard:
            self._checked_at_ms = now_ms
            self.used_ratio, refuses = self._look()
            if refuses and not self.refuses_writes:
                _log.error("%(refusal)s", refusal=self.refusal(), path=self._path)
            elif self.refuses_writes and not refuses:
                _log.info(
                    "%(path)s: messages are accepted again: the disk is %(percent).1f%% full",
                    path=self._path,
                    percent=100 * self.used_ratio,
                )
            self.refuses_writes = refuses

    def _ends(self) -> list[int]:
        """Return the ends of the log's files before that of the last record, ascending."""
        size, end = self._log.file_size, self._log.end
        return [start + size for start in self._log.sequence.starts if start + size < end]

    def _oversized(self) -> int:
        """Return how many of the oldest files exceed the allowed size."""
        if self._max_total_size is None:
            return 0
        sequence = self._log.sequence
        excess = sequence.end - sequence.begin - self._max_total_size
        return min(max(-(-excess // sequence.file_size), 0), len(self._ends()))

    def _has_expired(self, start: int, now_ms: int) -> bool:
        """Return whether the file at ``start`` has expired, mostly by the first records of this file and the next.

        The file is walked through once only if these two disagree.
        """
        latest = now_ms - self._reserved_ms
        if self._known_timestamp(start) > latest:
            return False
        if self._walked[0] != start:
            following = first_behind(self._log, start)
            if following is not None and following <= latest:
                return True
            self._walked = start, last_timestamp_ms(self._log, start)
        return self._walked[1] <= latest

    def _known_timestamp(self, start: int) -> int:
        """Return the store time of the last record of the file at ``start``, or an earlier time, at no cost."""
        if self._walked[0] == start:
            return self._walked[1]
        return self._log.first_store_timestamp_ms(start) or 0

    # ------------------------------------------------------------------------------------------------- scheduling

    def next_cleaning_ms(self, at_ms: int) -> int | None:
        """Return the beginning of the first hour of `delete_when` after ``at_ms``."""
        return next_hour(self._hours, at_ms, self._timezone)

    def _next_due(self, now_ms: int) -> int | None:
        watched = self.used_ratio > 0 if self.watches_disk else self.refuses_writes
        due = [now_ms + _ROUND_MS] if watched else []
        oldest = self._oldest_due(now_ms)
        if oldest is not None:
            due.append(oldest)
        return min(due, default=None)

    def _oldest_due(self, now_ms: int) -> int | None:
        """Return the time at which the oldest file can be deleted or must be checked."""
        ends = self._ends()
        if not ends or self.is_held:
            return None
        if not (self._oversized() or self._forced):
            at = max(now_ms, self._known_timestamp(ends[0] - self._log.file_size) + self._reserved_ms)
            allowed = at if self._ignores_hours else self.next_cleaning_ms(at)
            if allowed is None or allowed >= _LAST_MOMENT:
                return None
            if allowed > now_ms:
                return allowed
        if ends[0] >= self._settled_until:
            return now_ms + _UNSETTLED_MS
        if not self._oversized() and self._round_files >= FILES_A_ROUND:
            return self._round_end
        return now_ms + _BETWEEN_FILES_MS

    # --------------------------------------------------------------------------------------------------- deleting

    def _delete(self, ends: Sequence[int], why: str) -> list[str]:
        """Delete the oldest log files, which end at ``ends``, then their part of queues and index."""
        deleted: list[str] = []
        if ends:
            self._settled_until = self._store.settled()
            # After a power cut, files of queues and index that are far below the log's start tell that log files are
            # lost. So the last round's are off the device before more of the log is.
            for folder in self._unflushed:
                if not is_folder(self._files, folder):
                    continue
                self._files.flush_folder(folder)
            self._unflushed = set()
        for end in ends:
            if end >= self._settled_until:
                break
            unread = list(self._unread(end - self._log.file_size, end))
            if self._keeps_unconsumed and (unread or (self._may_have_readers and self._store.readers() is None)):
                self.is_held = True
                break
            never_read = list(self._unread(end - self._log.file_size, end, by_none=True))
            if self._keeps_unconsumed:  # readers pass messages of the file by retries and deliveries
                self._store.flush_log()
            if self._log.begin > self._trimmed_to:
                self._files.flush_folder(self._log.sequence.folder)
            with self._store.deletion():
                paths = self._log.delete_before(end)
            for path in paths:
                _log.info("deleted %(file)s: %(cause)s", file=path, cause=why)
            if paths:
                self._report_lost(unread, never_read, paths[-1], why)
            deleted += paths
        return deleted + self._trim_derived()

    def _report_lost(
        self, unread: Sequence[UnreadInFile], never_read: Sequence[UnreadInFile], path: str, why: str
    ) -> None:
        """Report messages that were deleted before they were consumed: a warning for each group, one for each topic."""
        of_group: dict[str, list[UnreadInFile]] = {}
        for part in unread:
            of_group.setdefault(part.reader.group, []).append(part)
        for group, lost in of_group.items():
            _log.warning(
                "group %(group)s: %(_messages)s deleted before they were consumed, with %(file)s (%(_why)s): "
                "%(_places)s; "
                "raise the limit, or refuse sends instead by keep_unconsumed=True",
                group=group,
                _messages=counted(sum(part.messages for part in lost), "message"),
                file=path,
                _why=why,
                _places=", ".join(
                    f"{part.messages} of {part.reader.topic}/{part.reader.queue_id}" for part in lost[:_NAMED]
                )
                + (", …" if len(lost) > _NAMED else ""),
            )
        for topic in sorted({part.reader.topic for part in never_read} - self._named_unread):
            self._named_unread.add(topic)
            _log.warning(
                "topic %(topic)s: no group has ever read it, and its messages are being deleted, the first with "
                "%(file)s (%(_why)s): start the group that is to read it, or stop sending to it; this is logged once, "
                "and the metric never_read_deleted counts the messages",
                topic=topic,
                file=path,
                _why=why,
            )
        if (readers := self._store.readers()) is not None:
            for part in (*unread, *never_read):
                readers.lost(part)

    def _trim_derived(self) -> list[str]:
        """Delete the part of queues and index about deleted records, and move minima to the log's beginning."""
        begin = self._log.begin
        if begin <= self._trimmed_to:
            return []
        self._files.flush_folder(self._log.sequence.folder)
        deleted = []
        with self._store.lock:
            queues = list(self._store.queues.values())
        for queue in queues:
            with self._store.lock:
                deleted += queue.trim(begin)
        with self._store.lock:
            deleted += self._index.delete_before(begin)
        self._trimmed_to = begin
        self._unflushed = {os.path.dirname(path) for path in deleted}
        for path in deleted:
            _log.info("deleted %(file)s: the log begins at %(begin)d", file=path, begin=begin)
        return deleted


def next_hour(hours: Container[int], at_ms: int, timezone: tzinfo | None = None) -> int | None:
    """Return the first moment from ``at_ms`` on in one of the hours, None if that is too far away.

    ``timezone`` is that of the hours, by default the machine's.
    """
    for _ in range(_HOURS_TRIED):
        if at_ms >= _LAST_MOMENT:
            return None
        moment = datetime.fromtimestamp(at_ms // 1000, timezone)
        if moment.hour in hours:
            return at_ms
        at_ms += _HOUR_MS - 1000 * (60 * moment.minute + moment.second) - at_ms % 1000
    return None


def first_behind(log: CommitLog, start: int) -> int | None:
    """Return the store time of the first record after the file at ``start``, from the first file that has one."""
    for other in log.sequence.starts:
        if other > start and (stored := log.first_store_timestamp_ms(other)):
            return stored
    return None


def last_timestamp_ms(log: CommitLog, start: int) -> int:
    """Return the store time of the last record of the file at ``start``, or of a later one if unreadable."""
    last = None
    try:
        for _, _, raw in log.scan(start, min(start + log.file_size, log.end), check_body=False):
            last = raw or last
    except CorruptionError:
        last = None  # later records can follow the damage
    if last is not None:
        return record.store_timestamp_ms(last)
    following = first_behind(log, start)
    return _LAST_MOMENT if following is None else following


# ---- queues of deleted topics


def clean_unused_topics(path: str, files: Files, appender: Appender, topics: Container[str]) -> list[QueueName]:
    """See `MessageStore.clean_unused_topics`; mirrors 4.9.4's ``DefaultMessageStore.cleanUnusedTopic``."""
    queues = appender.open_parts().queues
    unused = sorted(name for name in queues if name[0] not in topics and not has_no_row(name[0]))
    return [name for name in unused if _clean(path, files, appender, name)]


def _clean(path: str, files: Files, appender: Appender, name: QueueName) -> bool:
    """Delete the files of a queue unless the log has a message of it; return whether there were any."""
    appender.lock.check_reentry()
    with critical, appender.lock.flushing, appender.lock.mutex:
        queues = appender.open_parts().queues
        if appender.shared is not None:
            appender.shared.shut()
        appender.catch_up()
        queue = queues.find(name)
        if queue is None or queue.max_physic_offset > appender.log.begin:
            return False
        folders = [directory.queue_folder(path, *name, ext=ext) for ext in (False, True)]
        if not any(is_folder(files, folder) for folder in folders):
            return False
        lane = appender.lanes.get(name)
        queue.clear()
        if lane is not None:  # another thread can be about to append through it
            lane.next_queue_offset = 0
        queue.flush()
        for folder in folders:
            files.delete(folder)
            if not files.list(os.path.dirname(folder)):
                files.delete(os.path.dirname(folder))
        if lane is None:
            del queues[name]
        return True
