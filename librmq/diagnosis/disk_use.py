"""What fills the disk of a store, what happens when it is full, and why its old files stay.

::

    log  queues  index  timers  others     lengths of files; together the length of all files of the store
    allocated                              what they take on the disk: less, since files are made in full length
    used ratio                             of the fullest disk of the store, counted as ``df`` and a broker count it
    a topic's bytes                        its records in the log, by the entries of its queues
    unread of them                         from the progress of the group that is furthest behind

Mirrors the limits of 4.9.4's ``CleanCommitLogService``; `librmq.store.retention` acts on them.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Final, NamedTuple, Self

from librmq.config import StoreConfig, parse_hours
from librmq.consumequeue_entries import HOLE_SIZE
from librmq.diagnosis._lag_report import lag
from librmq.diagnosis.view import StoreView
from librmq.formatting import duration, moment, number, percent, size
from librmq.message.delays import level_of_queue_id
from librmq.message.topics import SystemTopic, kind_of_topic
from librmq.store.format import directory
from librmq.store.format.spark_jobs import StagedRun
from librmq.store.retention import Unread, UnreadInFile, first_behind, next_hour, unread_between

_KINDS: Final = {
    directory.COMMITLOG: "log_bytes",
    directory.CONSUMEQUEUE: "queue_bytes",
    directory.CONSUMEQUEUE_EXT: "queue_bytes",
    directory.CONSUMEQUEUE_ROCKSDB: "queue_bytes",
    directory.BATCHCONSUMEQUEUE: "queue_bytes",
    directory.INDEX: "index_bytes",
    directory.TIMERLOG: "timer_bytes",
}
"""The field in which the files of a folder, or a file, of a store count."""
_BLOCK: Final = 512  # bytes of the unit in which a system counts what is allocated
_BROKER_HOURS: Final = 72  # 4.9's ``fileReservedTime``, which no file of a broker shows
_DAY_MS: Final = 86_400_000
_HOUR_MS: Final = 3_600_000
_NAMED: Final = 3


class DiskThreshold(NamedTuple):
    """A share of the disk at which a broker acts."""

    ratio: float
    """Used fraction of the disk above which it acts."""
    free_bytes: int
    """Bytes that can be written until then; 0 if it acts already."""
    effect: str
    """What it does."""


class DiskUse(NamedTuple):
    """The bytes of a store by kind of file, and those of its disk."""

    log_bytes: int
    """Length of the log's files."""
    queue_bytes: int
    """Length of the files of queues, with their extension."""
    index_bytes: int
    """Length of the files of the key index."""
    timer_bytes: int
    """Length of the timer's log and wheel."""
    other_bytes: int
    """Length of all other files."""
    allocated_bytes: int
    """Bytes that all files take on the disk: less than their lengths where nothing is written yet."""
    used_ratio: float
    """Used fraction of the disk, 0.0 to 1.0; of the fullest one if folders of the store are on several."""
    thresholds: list[DiskThreshold]
    """What a broker does when the disk is fuller, the lowest share first."""

    @classmethod
    def of(cls, path: str, config: StoreConfig) -> Self:
        """Return the bytes of the store in ``path`` and of its disk.

        Raises:
            OSError: The disk can't be asked.
        """
        sums: defaultdict[str, int] = defaultdict(int)
        for place, length, allocated in _files(path):
            first = place.split(os.sep, 1)[0]
            is_wheel = first.startswith(directory.TIMERWHEEL)  # and its snapshots of later versions
            sums["timer_bytes" if is_wheel else _KINDS.get(first, "other_bytes")] += length
            sums["allocated_bytes"] += allocated
        folders = (path, *(os.path.join(path, name) for name in (directory.COMMITLOG, directory.CONSUMEQUEUE)))
        disks = [shutil.disk_usage(folder) for folder in folders if os.path.isdir(folder)]
        # Space that is reserved for the superuser is neither used nor free.
        used, within_reach = max(
            ((disk.used, disk.used + disk.free) for disk in disks), key=lambda pair: pair[0] / (pair[1] or 1)
        )
        unless_kept = ", unless keep_unconsumed keeps them for a group" if config.keep_unconsumed else ""
        effects = (
            (config.disk_max_used_ratio, "log files beyond the age limit are deleted at any hour"),
            (config.disk_force_clean_ratio, f"the oldest log files are deleted at any age{unless_kept}"),
            (config.disk_refuse_ratio, "messages are refused: CODE 14 of a RocketMQ broker, DiskFullError of librmq"),
        )
        return cls(
            log_bytes=sums["log_bytes"],
            queue_bytes=sums["queue_bytes"],
            index_bytes=sums["index_bytes"],
            timer_bytes=sums["timer_bytes"],
            other_bytes=sums["other_bytes"],
            allocated_bytes=sums["allocated_bytes"],
            used_ratio=used / within_reach if within_reach else 0.0,
            thresholds=[
                DiskThreshold(ratio / 100, max(0, ratio * within_reach // 100 - used), effect)
                for ratio, effect in effects
            ],
        )

    def notes(self, view: StoreView) -> Iterator[str]:
        """Yield sentences: when the disk is full at the log's growth, and why its old files stay."""
        yield from StagedRun.notes(view.store.path, view.store.files)
        if SystemTopic.SCHEDULE in view.topics and (why := view.unknown_delays) is not None:
            yield why
        log = view.store.log
        first, now_ms = log.first_store_timestamp_ms(log.begin) if log.end > log.begin else None, view.now_ms
        if first is None or now_ms is None:
            return
        if now_ms > first:
            a_day = (log.end - log.begin) * _DAY_MS / (now_ms - first)
            times = ", ".join(
                f"{percent(threshold.ratio)} in {duration(threshold.free_bytes / a_day * _DAY_MS / 1000)}"
                if threshold.free_bytes
                else f"{percent(threshold.ratio)} is exceeded"
                for threshold in self.thresholds
            )
            yield (
                f"the log took {size(a_day)} a day since {moment(first)} UTC; at this rate, and if nothing is deleted, "
                f"the disk, {percent(self.used_ratio)} full now, reaches {times}"
            )
        yield from self._file_notes(view)

    def old_files(self, view: StoreView) -> Iterator[OldFile]:
        """Yield the files of the log that retention can delete, oldest first: all but that with the last record."""
        log, config, now_ms = view.store.log, view.store.config, view.now_ms
        old = [start for start in log.sequence.starts if start + log.file_size < log.end]
        if not old or now_ms is None:
            return
        is_own = directory.is_made_by_librmq(view.store.path, view.store.files)
        hours = config.file_reserved_hours if is_own else config.file_reserved_hours or _BROKER_HOURS
        readers = list(_readers(view))
        for start in old:
            last_ms, end = first_behind(log, start), start + log.file_size
            delete_ms, when = _next_time(self, config, hours, last_ms, now_ms, is_own=is_own)
            unread = list(unread_between(readers, view.store.queues.get, start, end))
            yield OldFile(
                file=os.path.basename(log.sequence.path(start)),
                end_timestamp_ms=last_ms,
                age_s=None if last_ms is None else max(0, now_ms - last_ms) / 1000,
                delete_at_ms=delete_ms,
                unread_by=sorted({part.reader.group for part in unread}),
                why="; ".join((when, *_holders(unread, config))),
            )

    def _file_notes(self, view: StoreView) -> Iterator[str]:
        """Yield why each of the oldest files stays: its age, its hour, its readers."""
        log = view.store.log
        count = sum(start + log.file_size < log.end for start in log.sequence.starts)
        if not count:
            yield "the log has one file; the file with the last record is never deleted"
        for file in islice(self.old_files(view), _NAMED):
            age = "an unknown time" if file.age_s is None else duration(file.age_s)
            yield f"{file.file}: ended {age} before; {file.why}"
        if count > _NAMED:
            yield f"{number(count - _NAMED)} further log files are newer, and follow these"


class TopicUse(NamedTuple):
    """The bytes of a topic in the log."""

    topic: str
    kind: str
    """Its kind: user, retry, dead, delay, half, op or system."""
    messages: int
    """Number of its messages."""
    bytes: int
    """Size of their records."""
    unread_bytes: int | None
    """Size of those that a group, the schedule or the timer has not consumed; all of them in a topic that no group has
    progress in; None if progress is unknown."""


class OldFile(NamedTuple):
    """A file of the log that retention can delete, and why it is still there."""

    file: str
    """Name of the file."""
    end_timestamp_ms: int | None
    """Store time of the first record behind it, by which its age counts; None if that is unreadable."""
    age_s: float | None
    """Seconds since then."""
    delete_at_ms: int | None
    """The next time at which its age lets it go; None without an age limit."""
    unread_by: list[str]
    """The groups that have not consumed all messages in it; empty text for the schedule of delay levels."""
    why: str
    """The same for people, with the hour of deletion and how much is unread."""


def _files(path: str) -> Iterator[tuple[str, int, int]]:
    """Yield place, length and allocated bytes of each file below a folder; links to its own folders are followed."""
    links = [entry.path for entry in os.scandir(path) if entry.is_symlink() and entry.is_dir()]
    for top in (path, *links):
        for folder, _, names in os.walk(top):
            for name in names:
                place = os.path.join(folder, name)
                with suppress(FileNotFoundError):  # its writer has just deleted it
                    state = os.lstat(place)
                    allocated = state.st_size if sys.platform == "win32" else state.st_blocks * _BLOCK
                    yield os.path.relpath(place, path), state.st_size, allocated


# ---- by topic


def topic_uses(view: StoreView) -> list[TopicUse]:
    """Return the bytes of each topic that has queues, the largest first."""
    unread = _unread_places(view)
    read_topics = {topic for topic, _ in unread}
    uses = []
    for topic, queue_ids in view.topics.items():
        messages = total = waiting = 0
        for queue_id in queue_ids:
            begin = unread.get((topic, queue_id), sys.maxsize if topic in read_topics else 0)
            for first, block in view.store.queues[topic, queue_id].blocks():
                sizes = block["size"]
                is_message = sizes != HOLE_SIZE
                messages += int(is_message.sum())
                total += int(sizes[is_message].sum(dtype="i8"))
                at = max(0, begin - first)
                waiting += int(sizes[at:][is_message[at:]].sum(dtype="i8"))
        uses.append(TopicUse(topic, kind_of_topic(topic), messages, total, _known(view, topic, waiting)))
    return sorted(uses, key=lambda use: (-use.bytes, use.topic))


def _known(view: StoreView, topic: str, waiting: int) -> int | None:
    """Return the unread bytes of a topic; None if progress is unknown."""
    if topic == SystemTopic.TIMER:
        from librmq.scheduling.timer import waiting_timers  # few stores have a timer

        return sum(message.size for _, message in waiting_timers(view.store))
    if (view.unknown_delays if topic == SystemTopic.SCHEDULE else view.unknown_progress) is not None:
        return None
    return waiting


def _readers(view: StoreView) -> Iterator[Unread]:
    """Yield the progress of each group and delay level in each queue that exists."""
    for row in lag(view, times=False):
        if (row.topic, row.queue_id) in view.ranges:
            yield Unread(row.group, row.topic, row.queue_id, row.next_offset)
    for topic, queue_id in view.ranges:
        if topic == SystemTopic.SCHEDULE:
            yield Unread("", topic, queue_id, view.tables.delay_offset(level_of_queue_id(queue_id)))


def _unread_places(view: StoreView) -> dict[tuple[str, int], int]:
    """Return the lowest queue offset that a reader still needs, by queue."""
    places: dict[tuple[str, int], int] = {}
    for reader in _readers(view):
        queue = reader.topic, reader.queue_id
        places[queue] = min(reader.queue_offset, places.get(queue, reader.queue_offset))
    return places


# ---- why old files stay


def _next_time(
    use: DiskUse, config: StoreConfig, hours: int | None, last_ms: int | None, now_ms: int, *, is_own: bool
) -> tuple[int | None, str]:
    """Return when a file that ended at a time can be deleted, None if age does not decide that, and a text for it."""
    if use.used_ratio > config.disk_force_clean_ratio / 100:
        return now_ms, f"the disk is above {config.disk_force_clean_ratio} %, so it is deleted at any age"
    if hours is None:
        largest = "none" if config.max_total_size is None else size(config.max_total_size)
        return None, f"no age limit (file_reserved_hours); it goes beyond max_total_size, {largest}"
    limit = f"age limit {hours} h" + (
        "" if is_own else " (a broker's fileReservedTime, unless its broker.conf differs)"
    )
    if last_ms is None:
        return None, f"{limit}; its end is unreadable"
    at_ms = max(now_ms, last_ms + hours * _HOUR_MS)
    if use.used_ratio > config.disk_max_used_ratio / 100:
        why = f"at any hour because the disk is above {config.disk_max_used_ratio} %: from {moment(at_ms)} UTC"
        return at_ms, f"{limit}, {why}"
    due_ms = next_hour(parse_hours(config.delete_when), at_ms)
    return due_ms, f"{limit}, in hour {config.delete_when}: next at {moment(due_ms)} UTC"


def _holders(unread: list[UnreadInFile], config: StoreConfig) -> Iterator[str]:
    """Yield who has not consumed messages of a file."""
    by_reader: defaultdict[tuple[str, str], int] = defaultdict(int)
    for part in unread:
        by_reader[part.reader.group, part.reader.topic] += part.messages
    if not by_reader:
        return
    named = [
        f"{f'group {group}' if group else 'the schedule'} {number(messages)} of {topic}"
        for (group, topic), messages in sorted(by_reader.items(), key=lambda item: -item[1])
    ]
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    consequence = "keep_unconsumed keeps it for them" if config.keep_unconsumed else "they are deleted with it"
    yield f"unread there: {', '.join(named[:_NAMED])}{more}; {consequence}"
