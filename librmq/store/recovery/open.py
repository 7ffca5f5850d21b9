"""Opening of a store's parts: the files that a crash left, the start of the walk over the log, the needed recovery.

After a clean exit the walk covers the last three files of the log, or only the last record if librmq closed the store
and nothing has changed since. After an unclean exit, which the abort marker shows, it begins at the newest file whose
first record the checkpoint covers, or at the mark of the last flush (`librmq.store.engine.saved_state`), which any
doubt overrules. Mirrors 4.9.4's ``DefaultMessageStore.load``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from librmq.clock import Clock
from librmq.commitlog import CommitLog, LogEnd
from librmq.config import StoreConfig
from librmq.consumequeue import ConsumeQueue
from librmq.consumequeue_entries import ENTRY
from librmq.errors import CorruptionError, NotAStoreError, RecordError
from librmq.files import Damage, Files, file_size, is_folder
from librmq.files.interface import make_folders, numbered_files
from librmq.files.rolling import MappedFileQueue, MappingPool, file_name
from librmq.message import DelayLevels, record
from librmq.runtime.event_log import counted
from librmq.store.engine.derivation import BitmapOf
from librmq.store.engine.dispatch import Dispatcher
from librmq.store.engine.saved_state import (
    WORTH_A_MARK,
    MarkError,
    StoreState,
    noted_ends,
    noted_queue_ends,
    read_closed_state,
    read_mark,
    take_mark,
    withdraw_closed_state,
    write_closed_state,
)
from librmq.store.engine.store_parts import PartFiles, Parts, QueueName, QueueTable, Recovered
from librmq.store.format import directory
from librmq.store.format._checkpoint import Checkpoint
from librmq.store.format._keyindex import KeyIndex
from librmq.store.format.directory import clear_abort, has_abort, set_abort
from librmq.store.format.documents import OWN_FOLDER
from librmq.store.recovery._case import Case, RecoveryMode

if TYPE_CHECKING:
    from librmq.store.recovery._log_end import WalkFindings

_T = TypeVar("_T")

_WORTH_PASSING: Final = 16 << 20
"""Bytes of covered records from which a brief view passes over them."""
_QUEUES_ASKED: Final = 256
"""Most queues that are looked into for the last covered record."""
_LOG_FILES_MAPPED: Final = 32
_QUEUE_DIGITS: Final = 20  # digits of a file's name
_INDEX_DIGITS: Final = 17


def clear_leftovers(path: str, files: Files, *, queues: bool = True) -> list[Damage]:
    """Delete files that a crash left incomplete; their content can be rebuilt.

    In the log these are files at its end of length zero, or without a record behind a missing one; in queues (unless
    ``queues`` is false) and units files of length zero and those beside a missing one; in the index a file of length
    zero and those after it, which continue it.
    """
    log = os.path.join(path, directory.COMMITLOG)
    leftovers = _unused_at_end(log, files)
    log_begin = min((int(os.path.basename(file)) for file, _ in _numbered(log, files)), default=0)
    for ext in (False, True) if queues else (True,):
        for topic, queue_id in directory.list_queues(path, files, ext=ext):
            folder = directory.queue_folder(path, topic, queue_id, ext=ext)
            leftovers += _beside_missing(folder, files, 0 if ext else log_begin)
    folder = os.path.join(path, directory.INDEX)
    leftovers += reversed([name for name, _ in itertools.dropwhile(lambda file: file[1], _numbered(folder, files))])
    checkpoint = os.path.join(path, directory.CHECKPOINT)
    if file_size(files, checkpoint) == 0:
        leftovers.append(checkpoint)
    return _clear(leftovers, files)


def without_leftovers(path: str, files: Files) -> tuple[Files, list[Damage]]:
    """Return files without those that a crash has left in log and index, and these; the same files without any."""
    from librmq.files import OverlayFiles

    overlay = OverlayFiles(files)
    cleared = clear_leftovers(path, overlay, queues=False)
    return overlay if cleared else files, cleared


def readable_files(path: str, files: Files, size: int, *, is_written: bool = False) -> tuple[Files, list[Damage]]:
    """Return files in which the log can be read, without those that a crash has left, and what it lacks."""
    from librmq.store.recovery._gaps import bridged

    if has_abort(files, path) and not is_written:
        files, _ = without_leftovers(path, files)
    return bridged(path, files, size, is_written=is_written)


def readable_log(path: str, files: Files, size: int) -> CommitLog:
    """Return the log up to the end of its files, as `readable_files` show it."""
    files, gaps = readable_files(path, files, size)
    folder, pool = os.path.join(path, directory.COMMITLOG), MappingPool(_LOG_FILES_MAPPED)
    log = CommitLog(MappedFileQueue(folder, size, files, pool, writable=False))
    log.end, log.gaps = log.sequence.end, gaps
    return log


def _clear(leftovers: Sequence[str], files: Files) -> list[Damage]:
    _delete(leftovers, files)
    what = "a file of length zero, or beside a missing one, left by a crash"
    return [Damage(file, 0, "size", what) for file in leftovers]


def _delete(paths: Sequence[str], files: Files) -> None:
    """Delete files durably one by one, so that no crash restores some after the store was closed."""
    for path in paths:
        files.delete(path)
        files.flush_folder(os.path.dirname(path))


def _numbered(folder: str, files: Files) -> list[tuple[str, int]]:
    """Return path and length of the files with numbers as names, in ascending order."""
    return [(os.path.join(folder, entry.name), entry.size) for entry in numbered_files(files, folder)]


def _unused_at_end(folder: str, files: Files) -> list[str]:
    """Return the last files of the log that hold nothing, the last first.

    They are of length zero; or they were prepared, and a loss of power has kept their names but not that of a file
    before them, which so was not flushed either.
    """
    sequence = _numbered(folder, files)
    unused = [path for path, _ in itertools.takewhile(lambda file: not file[1], reversed(sequence))]
    del sequence[len(sequence) - len(unused) :]
    starts = [int(os.path.basename(path)) for path, _ in sequence]
    gaps = [at for at in range(1, len(sequence)) if starts[at] > starts[at - 1] + sequence[at - 1][1]]
    at = len(sequence)
    while gaps and at > gaps[0] and not files.open(sequence[at - 1][0]).used_end(0, sequence[at - 1][1]):
        at -= 1
    behind = next((gap for gap in gaps if gap >= at), len(sequence))
    return unused + [path for path, _ in reversed(sequence[behind:])]


def _check_noted_files(path: str, files: Files) -> None:
    """Refuse a log that lacks a file into which it reached as a note says, where only prepared files are behind it.

    Call it before the notes are changed. A gap before records is refused where the log is opened.

    Raises:
        CorruptionError: No crash has left that gap.
    """
    folder = os.path.join(path, directory.COMMITLOG)
    unused = frozenset(_unused_at_end(folder, files))
    noted = max(noted_ends(path, files), key=lambda noted: noted.log_end, default=None) if unused else None
    for (before, size), (behind, _) in itertools.pairwise(_numbered(folder, files) if noted is not None else ()):
        end = int(os.path.basename(before)) + size
        if behind in unused and noted is not None and end < min(noted.log_end, int(os.path.basename(behind))):
            what = (
                f"expected {file_name(end)} before it, because {noted.what} noted that the log reached {noted.log_end}"
            )
            raise CorruptionError(behind, 0, "name", f"{what}: copy the missing file")


def _beside_missing(folder: str, files: Files, log_begin: int) -> list[str]:
    """Return the files of a sequence that a crash left beside a missing file or one of length zero.

    If the last entry before the gap belongs to a deleted message, they are the files before the gap, which were being
    deleted. Otherwise they are those after it, the last first.
    """
    sequence = _numbered(folder, files)
    if len({size for _, size in sequence if size}) > 1:
        # A crash leaves files of one length or of none. Other lengths are damage, which is refused and not removed.
        return []
    leftovers: list[str] = []
    for number, (path, size) in enumerate(sequence):
        before, length = sequence[number - 1] if number else (path, 0)
        if size and int(os.path.basename(path)) == int(os.path.basename(before)) + length:
            continue
        place, entry_size, _ = ENTRY.unpack(files.open(before).buffer[-ENTRY.size :]) if size else (0, 0, 0)
        if not (entry_size > 0 and place < log_begin):
            return leftovers + [path for path, _ in reversed(sequence[number:])]
        leftovers = [path for path, _ in sequence[:number]]
    return leftovers


def load(  # noqa: PLR0913 (one call for each way to open)
    path: str,
    config: StoreConfig,
    files: Files,
    clock: Clock,
    *,
    mode: RecoveryMode = RecoveryMode.LAST_EXIT,
    bitmap_of: BitmapOf | None = None,
    is_brief: bool = False,
    rebuilt: frozenset[QueueName] = frozenset(),
    keeps_deleted: bool = False,
) -> Parts:
    """Open the parts of the store in ``path`` for writing, and recover them as ``mode`` says.

    A brief preview of a crashed store passes over many covered records, and leaves the index as it is;
    `Recovered.is_brief` says so. A preview makes damaged files of queues, index and checkpoint again, as
    `Recovered.repairs`, and compares the queues in ``rebuilt`` with all of the log. With ``keeps_deleted`` a check of
    all of the log leaves a queue without a folder deleted, like its topic.

    Raises:
        CorruptionError: No crash explains the damage, for example sound records follow it, and the mode is not
            thorough. The store is not changed.
    """
    is_killed = has_abort(files, path)
    noted = noted_queue_ends(path, files) if is_killed else {}
    case = Case(path, config, files, clock, mode, not is_killed, noted, keeps_deleted)
    why_whole = ""
    if mode is not RecoveryMode.PREVIEW:
        is_wanted = mode is RecoveryMode.LAST_EXIT and is_killed
        _check_noted_files(path, files)
        try:
            case.mark = take_mark(path, files)
            if case.mark is not None and is_wanted:
                return _Opening(case).parts(bitmap_of)
        except (MarkError, CorruptionError) as error:
            # Recovery without the mark reads more of the log and comes to the same end, so a damaged mark is ignored.
            why_whole = str(error) if is_wanted else ""
        case.mark = None
    case.changed_queues = rebuilt or None
    parts = _Opening(case, may_pass=is_brief).parts(bitmap_of)
    parts.recovered.why_whole = why_whole
    return parts


class _Opening:
    """Opens the parts of a store one after the other, and recovers them."""

    checkpoint: Checkpoint

    def __init__(self, case: Case, *, may_pass: bool = False) -> None:
        """Clear what a crash left, and open the checkpoint; ``may_pass`` lets a view be brief.

        Raises:
            MarkError: Something was cleared, so that the mark does not count.
        """
        self._case, path, files, config = case, case.path, case.files, case.config
        self._may_pass = may_pass
        # After a kill, or to check the whole log, files are deleted beside a missing one where a queue can't be opened.
        self._at_check = (case.is_thorough or not case.is_clean) and not config.enable_consumequeue_ext
        self._pool = MappingPool(config.mapped_files)
        if case.mode is not RecoveryMode.LIVING and (case.is_thorough or not case.is_clean):
            cleared = clear_leftovers(path, files, queues=not self._at_check)
            case.recovered.cuts += cleared
            if cleared and case.mark is not None:
                raise MarkError(f"{cleared[0].file} is {cleared[0].what}")
        # Where repairs are noted; None refuses damaged files.
        self._repairs = case.recovered.repairs if case.is_preview else case.recovered.cuts if case.is_thorough else None
        place = os.path.join(path, directory.CHECKPOINT)
        self.checkpoint = self._open_or_remove(
            lambda: Checkpoint.open(place, files=files, writable=True), self._repairs, [place]
        )
        self._trusted: StoreState | None = None  # the state at the close counts while nothing contradicts it
        self._findings: WalkFindings | None = None
        """What the walk over the log finds after an unclean exit."""
        self._part_files = PartFiles(path, config, files)
        self._is_recovering = False
        self._noted_record: int | None = None

    def parts(self, bitmap_of: BitmapOf | None) -> Parts:
        """Open the parts, and recover them.

        Raises:
            MarkError: Something contradicts the mark.
        """
        case = self._case
        log = self.open_log()
        index = self.open_index()
        names = directory.list_queues(case.path, case.files)
        self.compare_with_close(log, index, names)
        queues = self.open_queues(log, names)
        dispatcher = Dispatcher(index, bitmap_of if case.config.enable_calc_filter_bitmap else None)
        levels = DelayLevels.parse(case.config.message_delay_level)
        parts = Parts(levels, log, queues, index, self.checkpoint, dispatcher, self.open_queue, case.recovered)
        self.recover_parts(parts)
        parts.checkpoint.lower(case.clock.now_ms())
        return parts

    def open_log(self) -> CommitLog:
        case, gaps = self._case, list[Damage]()
        if case.is_preview:
            from librmq.store.recovery._gaps import bridged

            _, gaps = bridged(case.path, case.files, case.config.commitlog_file_size)

        def scan_from(log: CommitLog) -> int:
            case.begin = self._walk_begin(log)
            return case.begin

        if not case.is_clean:
            from librmq.store.recovery._log_end import WalkFindings

            self._findings = WalkFindings(self.checkpoint.min_timestamp_ms)
        log = self._part_files.open_log(writable=True, scan_from=scan_from, on_record=self._findings)
        log.gaps = gaps
        return log

    def _walk_begin(self, log: CommitLog) -> int:
        """Return where the walk over the log begins."""
        case = self._case
        if case.is_thorough:
            return log.begin
        if case.is_clean:
            closed = read_closed_state(case.path, case.files) if case.changed_queues is None else None
            if closed is None or not closed.agrees_with(log):
                return log.third_last_file()
            self._trusted = closed
            return closed.log_end
        if case.mark is not None:
            case.mark.check_files(case.path, case.files, case.config, log)
            return case.mark.last_record
        self._noted_record = log.sequence.end
        with suppress(MarkError):  # a view takes from a mark only up to where it says how queues ended
            if case.is_preview and (mark := read_mark(case.path, case.files)) is not None:
                mark.check_files(case.path, case.files, case.config, log)
                self._noted_record = mark.last_record
        begin = min(log.file_before(self.checkpoint.min_timestamp_ms), self._noted_record)
        if not self._may_pass or log.sequence.end - begin < _WORTH_PASSING:  # asking queues would cost more
            return begin
        covered = min(_covered_record(case, log, self.checkpoint), self._noted_record)
        case.recovered.is_brief = covered - begin >= _WORTH_PASSING
        return covered if case.recovered.is_brief else begin

    def open_index(self) -> KeyIndex:
        case = self._case
        # A crash can leave a header incomplete.
        by_crash = None if case.is_clean or case.mark is not None else case.recovered.cuts
        return self._open_or_remove(
            partial(self._part_files.open_index, writable=True, now_ms=case.clock.now_ms),
            self._repairs,
            [os.path.join(case.path, directory.INDEX)],
            _INDEX_DIGITS,
            headers=by_crash,
            before_removal=self.checkpoint._clear_index_time,
        )

    def compare_with_close(self, log: CommitLog, index: KeyIndex, names: Sequence[QueueName]) -> None:
        """Trust the state at the close no more if queues or index have changed since."""
        case, trusted = self._case, self._trusted
        if trusted is None:
            return
        log.last_write = trusted.last_record
        if trusted.queues.keys() == set(names) and trusted.has_index(index):
            return
        if case.is_preview:
            for name in sorted(trusted.queues.keys() - set(names)):
                folder = directory.queue_folder(case.path, *name)
                case.recovered.repairs.append(Damage(folder, 0, "missing", "the folder of the queue is missing"))
            if not trusted.has_index(index):
                what = "the key index is not as it was at the close"
                case.recovered.repairs.append(Damage(index.folder, 0, "missing", what))
        # Queues whose files changed since the state was written are compared with the log one by one.
        case.changed_queues = frozenset(trusted.queues.keys() ^ set(names))
        # The comparison with the queues reads these records anyway, so the walk over the end is left to it.
        log.found_end = LogEnd(trusted.log_end, None, trusted.last_record)
        case.begin, case.reads_bodies = log.third_last_file(), True
        self._trusted = None

    def open_queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Open a queue, which need not exist yet."""
        case = self._case
        folders = [directory.queue_folder(case.path, topic, queue_id, ext=ext) for ext in (False, True)]
        repairs = self._repairs if self._trusted is None else None  # a view then opens all queues again
        before = len(case.recovered.repairs)
        queue = self._open_or_remove(lambda: self._open_unrepaired(topic, queue_id), repairs, folders, _QUEUE_DIGITS)
        if len(case.recovered.repairs) > before:
            case.changed_queues = (case.changed_queues or frozenset()) | {(topic, queue_id)}
        if self._is_recovering:  # a missing queue is unmapped when it has been made from the log
            queue.keep_descriptors()
        return queue

    def open_queues(self, log: CommitLog, names: Sequence[QueueName]) -> QueueTable:
        """Open the queues, or prepare that each is opened at its first use."""
        if self._trusted is not None:
            return QueueTable(self.open_queue, self._trusted.queues)
        queues = QueueTable(self.open_queue, dict.fromkeys(names))
        for name in names:  # opened now, a queue is repaired or refused before any change
            queue = queues[name] = self._open_after_kill(name, log.begin) if self._at_check else self.open_queue(*name)
            if self._at_check:
                queue.keep_descriptors()  # until its check has ended
        return queues

    def _open_unrepaired(self, topic: str, queue_id: int) -> ConsumeQueue:
        reads_small = self._trusted is None
        return self._part_files.open_queue(topic, queue_id, self._pool, writable=True, reads_small=reads_small)

    def _open_after_kill(self, name: QueueName, log_begin: int) -> ConsumeQueue:
        """Open a queue after a kill, and delete its files beside a missing one."""
        case = self._case
        try:
            return self._open_unrepaired(*name)
        except CorruptionError:
            if case.mark is not None:
                raise
            leftovers = _beside_missing(directory.queue_folder(case.path, *name), case.files, log_begin)
            if not leftovers and not case.is_thorough and not case.is_preview:
                raise
            case.recovered.cuts += _clear(leftovers, case.files)
            # A check of all, or of none, repairs what is left.
            return self._open_unrepaired(*name) if leftovers and not case.is_thorough else self.open_queue(*name)

    def recover_parts(self, parts: Parts) -> None:
        """Recover the parts, unless the state at the close holds, and mark the store as open."""
        case, log = self._case, parts.log
        path, files = case.path, case.files
        if self._trusted is not None:
            set_abort(files, path)
            return
        is_empty = not (log.sequence.starts or parts.queues or parts.index.files)
        if is_empty and case.is_clean and case.mode is RecoveryMode.LAST_EXIT:
            set_abort(files, path)
            make_folders(files, log.sequence.folder)  # a store is recognised by it
            withdraw_closed_state(path, files, log)
            return
        from librmq.store.recovery._log_end import Recovery

        recovery = Recovery(case, parts)
        recovery.plan(self._findings)
        # Set the abort marker only after the plan, because a refused store must stay as it was found.
        set_abort(files, path)
        make_folders(files, log.sequence.folder)  # a store is recognised by it
        self._is_recovering = True
        try:
            recovery.carry_out()
        except (CorruptionError, NotAStoreError):
            # The store was refused after a clean exit. Nothing was cut and what was repaired is right, so it stays
            # clean; with the marker, the next opening would take it for crashed and cut.
            if case.is_clean:
                clear_abort(files, path)
            raise
        finally:
            self._is_recovering = False
        knows_ends = case.mark is not None or (self._noted_record or log.end) < log.end
        parts.recovered.knows_ends = knows_ends or parts.recovered.compared_from - log.begin <= WORTH_A_MARK
        if not case.is_preview:
            self._repairs = None  # A queue that is opened later and is damaged by then is refused, and keeps its files.
            withdraw_closed_state(path, files, log)
            if case.is_thorough and log.begin and log.end == log.begin:  # the next opening would refuse it otherwise
                write_closed_state(path, files, log, parts.queues, parts.index)

    def _open_or_remove(
        self,
        open_part: Callable[[], _T],
        repairs: list[Damage] | None,
        places: Sequence[str],
        digits: int = 0,
        *,
        headers: list[Damage] | None = None,
        before_removal: Callable[[], None] = lambda: None,
    ) -> _T:
        """Open a part derived from the log; with ``repairs``, remove a part with impossible files and note it there.

        ``places`` are its files and folders, in which names have so many ``digits``. If other names are there too, the
        part is refused and nothing is removed. A damaged header is noted in ``headers``, if given. ``before_removal()``
        is called first.
        """
        files = self._case.files
        try:
            return open_part()
        except CorruptionError as error:
            notes = headers if error.kind == "header" and headers is not None else repairs
            if notes is None or (error.kind == "name" and digits != _QUEUE_DIGITS):
                raise
            deleted = []
            for place in places:
                if not is_folder(files, place):
                    if file_size(files, place) is not None:
                        deleted.append(place)
                    continue
                for entry in files.list(place):
                    named = entry.name.isascii() and entry.name.isdigit() and len(entry.name) == digits
                    if entry.is_folder or (not named and digits == _QUEUE_DIGITS):
                        raise
                    if named:
                        deleted.append(os.path.join(place, entry.name))
            before_removal()
            _delete(deleted, files)
            notes.append(Damage.of(error))
            return open_part()


def describe_recovery(path: str, log: CommitLog, recovered: Recovered, took_ms: int) -> str:
    """Return one line for the log: what a recovery after an unclean exit cut and left out, and how long it took."""
    damages, compared_from, why_whole = recovered.cuts, recovered.compared_from, recovered.why_whole
    cuts = [damage for damage in damages if damage.kind == "record" and damage.bytes]
    what = "nothing was cut"
    if cuts:
        size, place = sum(damage.bytes for damage in cuts), os.path.join(OWN_FOLDER, "salvage")
        what = f"{size} bytes were cut from {cuts[0].offset} on ({cuts[0].what}); the nonzero bytes are kept in {place}"
    lost = [damage.what for damage in damages if damage.kind == directory.LOST]
    others = len(damages) - len(cuts) - len(lost)
    more = f", and {len(lost) - 1} more" if lost[1:] else ""
    missing = f"; messages that were flushed are missing: {lost[0]}{more}" if lost else ""
    again = f", {counted(others, 'part')} of queues and index rebuilt" if others else ""
    seconds = took_ms / 1000
    no_mark = f"; the mark of the last flush did not count, because {why_whole}" if why_whole else ""
    older = f"; queue entries of records before {compared_from} are compared with the log in the background"
    return (
        f"{path}: recovered in {seconds:.1f} s, because it was not closed: the log ends at {log.end}, {what}{again}"
        f"{missing}{no_mark}{older if compared_from > log.begin else ''}"
    )


def _covered_record(case: Case, log: CommitLog, checkpoint: Checkpoint) -> int:
    """Return the place of a late record of the log that the checkpoint covers, 0 without one.

    Queues say where records begin. Their files need not have entries of all records.
    """
    covered_ms = min(checkpoint.physic_timestamp_ms, checkpoint.logics_timestamp_ms)
    last, pool = 0, MappingPool(4)

    def is_covered(place: int) -> bool:
        file = log.sequence.file_at(place)
        with suppress(RecordError):
            if file is not None and record.check_record(file.buffer, place % file.size, file.size, check_body=True):
                return record.store_timestamp_ms(file.buffer, place % file.size) <= covered_ms
        return False

    names = directory.list_queues(case.path, case.files)
    size = case.config.consumequeue_file_size
    for topic, queue_id in names[:: -(-len(names) // _QUEUES_ASKED) or 1]:
        folder = directory.queue_folder(case.path, topic, queue_id)
        with (
            # The reader's view opens the queue again, and its error says more than this look-up could.
            suppress(CorruptionError),
            ConsumeQueue.open(folder, size, files=case.files, pool=pool, writable=False) as queue,
        ):
            queue.advance(log.begin)
            low, high = queue.min_offset, queue.max_offset
            while low < high:  # entries below `low` are covered, `high` is not
                middle = (low + high) // 2
                entry = queue.entry(middle)
                if entry is not None and is_covered(entry.physical_offset):
                    low, last = middle + 1, max(last, entry.physical_offset)
                else:
                    high = middle
    return last
