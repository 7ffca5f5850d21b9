"""What is true after opening: where the log ends, and queues and index that agree with it.

After a clean exit the last three files of the log are walked; after an unclean one (the abort marker stands) the walk
begins at the newest file whose first record the checkpoint vouches for, and what it passes is dispatched again. The
first record that can't be read ends the log; what lies behind is cut, and kept aside (`librmq.salvage`). Mirrors
4.9.4's ``recoverNormally`` and ``recoverAbnormally``, but never loses keys that the log still has, indexes each key
once, and does not cut sound records for a damage that no crash explains, unless it is told to.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from librmq import codec, layout, salvage
from librmq.checkpoint import Checkpoint, clear_abort, has_abort, set_abort
from librmq.clock import Clock
from librmq.closedstate import ClosedState, QueueTable, read_closed_state
from librmq.commitlog import CommitLog, LogEnd
from librmq.config import StoreConfig
from librmq.consumequeue import ENTRY, ConsumeQueue
from librmq.dispatch import BitmapOf, Dispatcher, Lane, has_queue_entry
from librmq.errors import CorruptionError, MessageIllegalError
from librmq.files import Files, make_folders
from librmq.indexfile import IndexFile
from librmq.javahash import java_decode
from librmq.keyindex import KeyIndex
from librmq.levels import DelayLevels
from librmq.mappedfile import MappingPool
from librmq.message import StoredMessage
from librmq.reconcile import Damage, GapError, OpenQueue, first_at, reconcile
from librmq.topics import validate_queue

__all__ = ["Parts", "clear_leftovers", "load", "settle", "vouched_for"]

_T = TypeVar("_T")

_QUEUE_DIGITS: Final = 20  # of the names of files
_INDEX_DIGITS: Final = 17
_SECTOR: Final = 512
_UNWRITTEN: Final = 16  # zeros at the end of a sector by which it is told that it was never written; headers have 15


@dataclass(slots=True)
class Parts:
    """The opened parts of a store."""

    levels: DelayLevels
    log: CommitLog
    queues: QueueTable
    index: KeyIndex
    checkpoint: Checkpoint
    dispatcher: Dispatcher
    open_queue: OpenQueue
    cuts: list[Damage]
    """What was found and cut."""
    lanes: dict[tuple[str, int], Lane] = field(default_factory=dict)

    def queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """A queue, made when first needed."""
        queue = self.queues.get((topic, queue_id))
        if queue is None:
            queue = self.queues[topic, queue_id] = self.open_queue(topic, queue_id)
        return queue

    def lane(self, topic: str, queue_id: int) -> Lane:
        """The lane of a queue, made when first needed."""
        lane = self.lanes.get((topic, queue_id))
        if lane is None:
            lane = self.lanes[topic, queue_id] = Lane(topic, queue_id, self.queue(topic, queue_id))
        return lane

    def close(self) -> None:
        """Close every part."""
        self.log.close()
        self.index.close()
        self.checkpoint.close()
        for queue in self.queues.opened():
            queue.close()


def clear_leftovers(path: str, files: Files) -> list[Damage]:
    """Delete files that a crash left without what precedes them; all that was in them can be made again.

    Of the log those of length zero at its end; of queues and units those of length zero, and beside a missing one; of
    the index all of length zero.
    """
    log = os.path.join(path, layout.COMMITLOG)
    found = _empty_at_end(log, files)
    log_begin = min((int(os.path.basename(file)) for file, _ in _numbered(log, files)), default=0)
    for ext in (False, True):
        for topic, queue_id in layout.list_queues(path, files, ext=ext):
            folder = layout.queue_folder(path, topic, queue_id, ext=ext)
            found += _beside_missing(folder, files, 0 if ext else log_begin)
    folder = os.path.join(path, layout.INDEX)
    found += [name for name, size in _numbered(folder, files) if not size]
    checkpoint = os.path.join(path, layout.CHECKPOINT)
    if files.size(checkpoint) == 0:
        found.append(checkpoint)
    for file in found:
        files.delete(file)
    what = "a file of length zero, or beside one that is missing, as a crash leaves it"
    return [Damage(file, 0, "size", what) for file in found]


def _numbered(folder: str, files: Files) -> list[tuple[str, int]]:
    """Path and length of the files that are named by numbers, the smallest first."""
    return [
        (os.path.join(folder, entry.name), entry.size)
        for entry in files.list(folder)
        if entry.name.isascii() and entry.name.isdigit() and not entry.is_folder
    ]


def _empty_at_end(folder: str, files: Files) -> list[str]:
    backwards = reversed(_numbered(folder, files))
    return [path for path, _ in itertools.takewhile(lambda found: not found[1], backwards)]


def _beside_missing(folder: str, files: Files, log_begin: int) -> list[str]:
    """The files of a sequence that a crash left beside one that is missing or of length zero.

    Where the last entry before the gap is of a message that is gone from the log, they are those before it, which were
    about to go; else those behind it, the last first.
    """
    found = _numbered(folder, files)
    if len({size for _, size in found if size}) > 1:
        return []  # no crash does that
    gone: list[str] = []
    for number, (path, size) in enumerate(found):
        before, length = found[number - 1] if number else (path, 0)
        if size and int(os.path.basename(path)) == int(os.path.basename(before)) + length:
            continue
        place, entry_size, _ = ENTRY.unpack(files.open(before).buffer[-ENTRY.size :]) if size else (0, 0, 0)
        if not (entry_size > 0 and place < log_begin):
            return gone + [path for path, _ in reversed(found[number:])]
        gone = [path for path, _ in found[:number]]
    return gone


def load(
    path: str,
    config: StoreConfig,
    levels: DelayLevels,
    files: Files,
    clock: Clock,
    *,
    writable: bool,
    thorough: bool = False,
    lenient: bool = False,
    living: bool = False,
    bitmap_of: BitmapOf | None = None,
) -> Parts:
    """Open the parts of the store in ``path``; if ``writable``, bring them to agree.

    ``thorough`` looks at all of the log instead of what the last exit calls for, and makes queues, index and checkpoint
    again whose files have a wrong length or an impossible header. A store that is only read is left as it is: its log
    ends where a recovery would end it.

    ``lenient`` is for a look at what a recovery would give, in an `OverlayFiles`: the log ends at the first damage,
    whatever is behind it, which stays. ``living`` is for a store that this process had open until now: it is no crash
    that left a record as it is.

    `CorruptionError` for what no crash explains, sound records behind a damage among it, unless ``thorough``: a store
    that is refused is left as it was.
    """
    clean = not has_abort(files, path)
    cuts: list[Damage] = []
    mend = cuts if writable and thorough else None
    place = os.path.join(path, layout.CHECKPOINT)
    checkpoint = _opened(lambda: Checkpoint.open(place, files=files, writable=writable), files, mend, [place])

    closed = read_closed_state(path, files) if clean and not thorough else None
    trusted: ClosedState | None = None

    def scan_from(log: CommitLog) -> int:
        nonlocal trusted
        if thorough:
            return log.begin
        if closed is not None and closed.agrees_with(log):
            trusted = closed
            return closed.log_end
        return log.third_last_file() if clean else vouched_for(log, checkpoint)

    log = CommitLog.open(
        os.path.join(path, layout.COMMITLOG),
        config.commitlog_file_size,
        files=files,
        writable=writable,
        scan_from=scan_from,
    )
    pool = MappingPool(config.mapped_files)

    def open_queue(topic: str, queue_id: int) -> ConsumeQueue:
        folder, ext_folder = (layout.queue_folder(path, topic, queue_id, ext=ext) for ext in (False, True))
        return _opened(
            lambda: ConsumeQueue.open(
                folder,
                config.consumequeue_file_size,
                files=files,
                pool=pool,
                writable=writable,
                ext_folder=ext_folder if config.enable_consumequeue_ext else None,
                ext_file_size=config.consumequeue_ext_file_size,
            ),
            files,
            mend,
            [folder, ext_folder],
            _QUEUE_DIGITS,
        )

    folder = os.path.join(path, layout.INDEX)
    index = _opened(
        lambda: KeyIndex.open(
            folder,
            slots=config.max_hash_slot_num,
            entries=config.max_index_num,
            files=files,
            now_ms=clock.now_ms,
            writable=writable,
        ),
        files,
        mend if clean or not writable else cuts,
        [folder],
        _INDEX_DIGITS,
        only=None if thorough else "header",  # a crash may leave one half written
    )
    names = layout.list_queues(path, files)
    lost = trusted is not None and (trusted.queues.keys() != set(names) or not trusted.has_index(index))
    if lost:  # something went since the store was closed
        trusted = None
        log.found_end = log.walk(log.third_last_file())
        log.last_write = log.found_end.last_record
    queues = QueueTable(open_queue, trusted.queues if trusted is not None else {})
    if trusted is None:
        for name in names:
            queues[name] = open_queue(*name)
    else:
        log.last_write = trusted.last_record
    parts = Parts(levels, log, queues, index, checkpoint, Dispatcher(index, bitmap_of), open_queue, cuts)
    if writable and trusted is not None:
        set_abort(files, path)
    elif writable:
        run = _Recovery(path, files, clock, parts, scan_from(log), clean, thorough, lost, lenient, living)
        end, cut = run.cut_at()
        set_abort(files, path)  # only now: a store that is refused is left as it was
        make_folders(files, log.sequence.folder)  # by which it is known as a store
        try:
            run.run(end, cut)
        except CorruptionError:
            if clean:  # refused after all: nothing was cut, and what was mended is as true as before
                clear_abort(files, path)
            raise
    if writable:
        checkpoint.lower(clock.now_ms())
    else:
        for queue in queues.opened():
            queue.serve_from(log.begin)
    return parts


def settle(path: str, config: StoreConfig, files: Files, clock: Clock) -> tuple[int, int]:
    """Recover all of the store in ``path``, flush it and mark it as closed; returns where its log begins and ends.

    For a store that nobody else knows of yet: no lock is taken.
    """
    set_abort(files, path)
    parts = load(
        path, config, DelayLevels.parse(config.message_delay_level), files, clock, writable=True, thorough=True
    )
    found = parts.log.begin, parts.log.end
    parts.close()
    clear_abort(files, path)
    return found


def _opened(
    open_part: Callable[[], _T],
    files: Files,
    mend: list[Damage] | None,
    places: Sequence[str],
    digits: int = 0,
    *,
    only: str | None = None,
) -> _T:
    """Open a part that is derived from the log; if ``mend``, one whose files can't be its is removed, and noted there.

    ``places`` are its files and folders, in which its files have names of so many ``digits``. Where there are others
    too, it is refused, and nothing is removed; so it is for another kind of damage than ``only``, if that is given.
    """
    try:
        return open_part()
    except CorruptionError as error:
        if mend is None or error.kind != (only or error.kind) or (error.kind == "name" and digits != _QUEUE_DIGITS):
            raise
        gone = []
        for place in places:
            if not files.is_folder(place):
                gone.append(place)
                continue
            for entry in files.list(place):
                named = entry.name.isascii() and entry.name.isdigit() and len(entry.name) == digits
                if entry.is_folder or (not named and digits == _QUEUE_DIGITS):
                    raise
                if named:
                    gone.append(os.path.join(place, entry.name))
        for file in gone:
            files.delete(file)
        mend.append(Damage(error.file, error.offset, error.kind, f"{error.what}: removed, to be made again"))
        return open_part()


def vouched_for(log: CommitLog, checkpoint: Checkpoint) -> int:
    """Where the newest file starts whose first record is no younger than the checkpoint, else the oldest one."""
    for start in reversed(log.sequence.starts):
        stored = log.first_store_timestamp_ms(start)
        if stored and stored <= checkpoint.min_timestamp_ms:
            return start
    return log.begin


def _lacks_entries(log: CommitLog, queues: QueueTable) -> bool:
    """Whether a queue lacks the entry of its last record among those of the last three files."""
    last: dict[tuple[bytes, int], tuple[int, int]] = {}
    for physical_offset, _, raw in log.scan(log.third_last_file(), check_body=False):
        if raw is not None and has_queue_entry(int.from_bytes(raw[36:40], "big")):
            _, _, topic_at, topic_end, _, _ = codec.frame(raw, 0, len(raw))
            queue_id, queue_offset = int.from_bytes(raw[12:16], "big"), int.from_bytes(raw[20:28], "big", signed=True)
            last[raw[topic_at:topic_end], queue_id] = queue_offset, physical_offset
    for (topic, queue_id), (queue_offset, physical_offset) in last.items():
        queue = queues.find((java_decode(topic), queue_id))
        if queue is None or (queue_offset >= queue.max_offset and physical_offset >= queue.max_physic_offset):
            return True
    return False


class _Recovery:
    """One recovery of the parts of a store that is opened for writing."""

    def __init__(
        self,
        path: str,
        files: Files,
        clock: Clock,
        parts: Parts,
        begin: int,
        clean: bool,
        thorough: bool,
        lost: bool,
        lenient: bool,
        living: bool,
    ) -> None:
        """``lost``: queues or index are known to lack something, wherever it is; the last two: see `load`."""
        self._path = path
        self._files = files
        self._clock = clock
        self._parts = parts
        self._begin = begin
        self._clean = clean
        self._thorough = thorough
        self._lost = lost
        self._lenient = lenient
        self._living = living
        self._unvouched_from = 0
        """After an unclean exit: where the first record is that the checkpoint does not vouch for."""

    def cut_at(self) -> tuple[LogEnd, int]:
        """Where the log is going to end, and how many bytes are going to be cut there; nothing is changed yet.

        `CorruptionError` if that would cut sound records that no crash explains, and nobody asked for it.
        """
        end = self._parts.log.found_end
        if not self._clean:
            end = self._first_torn() or end
        cut = self._bytes_behind(end)
        if not self._thorough:
            self._check_cut(end, cut)
            if not self._clean and not self._lenient:
                self._check_walk(end.physical_offset)
        return end, cut

    def _first_torn(self) -> LogEnd | None:
        """The first record of an unclean exit that did not reach the device whole though its body did, if any.

        Where a sector was not written there are zeros. In topic or properties they lead to no possible queue, or to
        zeros that go on to the end of the sector; the latter is looked for behind the first record that the checkpoint
        does not vouch for. One of which no crash explains them is served, as by a broker: nothing but its body has a
        checksum. That can't be where it names no queue: `CorruptionError`, unless ``thorough``.
        """
        log, vouched_for_ms = self._parts.log, self._parts.checkpoint.min_timestamp_ms
        unvouched: int | None = None
        known: set[tuple[bytes, bool]] = set()
        found: LogEnd | None = None
        for physical_offset, size, raw in log.scan(self._begin, check_body=False):
            if raw is None:
                continue
            if unvouched is None and codec.store_timestamp_ms(raw) > vouched_for_ms:
                unvouched = physical_offset
            _, _, _, _, properties_at, _ = codec.frame(raw, 0, size)
            what = nameless = _names_no_queue(raw, known)
            if what is None and unvouched is not None and _ends_in_zeros(log, physical_offset, raw, properties_at):
                what = "its properties are zeros to the end of a sector"
            if what is None:
                continue
            path = log.sequence.path_at(physical_offset)
            torn = LogEnd(physical_offset, CorruptionError(path, physical_offset, "record", what))
            if not self._living and self._explained_by_crash(physical_offset, log.sequence.end):
                found = torn
            elif nameless is None:
                continue
            elif not self._thorough:
                self._check_cut(torn, log.data_behind(physical_offset))
            unvouched = physical_offset if unvouched is None else unvouched
            break  # nothing behind it stays
        self._unvouched_from = log.end if unvouched is None else unvouched
        return found

    def _check_walk(self, log_end: int) -> None:
        """Refuse what the walk over the log would refuse before where the log was looked at, while nothing is changed.

        It begins where the index ends that is left then. What an exit vouched for is cut only on demand.
        """
        log, index = self._parts.log, self._parts.index
        stale = self._unvouched_index()
        left = [file for file in index.files if file not in stale and file.header.end_physical_offset < log_end]
        begin = max(left[-1].header.end_physical_offset, log.begin) if left else log.begin
        known: set[tuple[bytes, bool]] = set()
        for physical_offset, _, raw in log.scan(begin, min(self._begin, log_end), check_body=False):
            what = None if raw is None else _names_no_queue(raw, known)
            if what is not None:
                what += f": `librmq recover {self._path}` would cut the log here and keep what follows aside"
                raise CorruptionError(log.sequence.path_at(physical_offset), physical_offset, "record", what)

    def _bytes_behind(self, end: LogEnd) -> int:
        """How many bytes are to be cut; after a clean exit they are looked for only where there is a hint of any."""
        parts = self._parts
        log, at = parts.log, end.physical_offset
        if (
            end.damage is not None
            or not self._clean
            or self._thorough
            or any(queue.max_physic_offset > at for queue in parts.queues.values())
            or any(any(log.sequence.file(start).buffer[:8]) for start in log.sequence.starts if start > at)
        ):
            return log.data_behind(at)
        return 0  # nothing but zeros, which may be a gigabyte

    def _check_cut(self, end: LogEnd, cut: int) -> None:
        """Refuse to cut sound records, unless a crash explains that they stand behind something else.

        It does where what was written last reached the device in another order: then records that nobody vouched for
        stand behind a page or sector that was never written.
        """
        if not cut or self._lenient:
            return
        log, at = self._parts.log, end.physical_offset
        if self._explained_by_crash(at, at + cut):
            return
        following = salvage.find_record(log.sequence, at + 1, at + cut)
        what = "a stretch of zeros" if end.damage is None else end.damage.what
        raise CorruptionError(
            log.sequence.path_at(at),
            at,
            "record" if end.damage is None else end.damage.kind,
            f"{what}, and sound records from {following} on: this is no end that a crash leaves. "
            f"`librmq recover {self._path}` would cut {cut} bytes here and keep them aside "
            f"(--dry-run shows it), `librmq salvage {self._path}` gives what is sound",
        )

    def _explained_by_crash(self, at: int, upto: int) -> bool:
        """Whether no sound record stands behind ``at``, or one to which the checkpoint does not reach, behind zeros."""
        log = self._parts.log
        following = salvage.find_record(log.sequence, at + 1, upto)
        if following is None:
            return True
        place = following % log.file_size
        stored_ms = codec.store_timestamp_ms(log.sequence.file(following - place).buffer, place)
        vouched_for = stored_ms <= self._parts.checkpoint.min_timestamp_ms
        return not self._clean and not vouched_for and _may_be_unwritten(log, at, following)

    def run(self, end: LogEnd, cut: int) -> None:
        """Bring the parts to agree, the log ending at ``end`` with ``cut`` bytes cut there."""
        parts = self._parts
        self._cut_log(end, cut)
        for queue in parts.queues.values():
            self._cut_queue(queue)
        begin = self._reconcile_from()
        if begin < parts.log.end or self._thorough or not self._clean:
            self._reconcile(begin)
        if self._lenient:
            return
        stored = self._last_timestamp_ms()
        if self._thorough:
            self._check_checkpoint(stored)
        if not self._clean or parts.cuts:
            self._set_checkpoint(stored)

    def _last_timestamp_ms(self) -> int:
        """When the last record was stored, 0 if none is near."""
        log = self._parts.log
        end = log.found_end
        if end.physical_offset != log.end:  # cut once more
            end = log.walk(log.third_last_file())
        stored = None if end.last_record is None else log.store_timestamp_ms(end.last_record)
        return max(stored or 0, 0)

    def _check_checkpoint(self, stored: int) -> None:
        """A checkpoint vouches for no time after the last record's."""
        checkpoint = self._parts.checkpoint
        times = checkpoint.physic_timestamp_ms, checkpoint.logics_timestamp_ms, checkpoint.index_timestamp_ms
        if max(times) > stored:
            what = f"times {times}, the last record was stored at {stored}"
            self._parts.cuts.append(Damage(checkpoint.path, 0, "checkpoint", what, 24))

    def _set_checkpoint(self, stored: int) -> None:
        """Vouch for what is there now: all of it."""
        log, checkpoint = self._parts.log, self._parts.checkpoint
        if not self._clean:
            self._write_again()
        log.flush()
        for queue in self._parts.queues.values():
            queue.flush()
        self._parts.index.flush()
        checkpoint.physic_timestamp_ms = checkpoint.logics_timestamp_ms = stored
        checkpoint.index_timestamp_ms = min(self._parts.index.full_timestamp_ms, stored)
        checkpoint.flush()

    def _write_again(self) -> None:
        """What no exit vouched for may not be on the device: whoever wrote it may have died before a flush."""
        log, begin = self._parts.log, self._unvouched_from
        log.sequence.write_again(begin, log.end)
        above = {self._path}
        if self._thorough:  # else those that nobody vouched for are made again
            for file in self._unvouched_index():
                file.write_again()
                above.add(self._parts.index.folder)
        for queue in self._parts.queues.values():
            if queue.max_physic_offset > begin:
                queue.write_again(first_at(queue, begin))
                folders = [queue.folder] if queue.ext is None else [queue.folder, queue.ext.folder]
                for folder in map(os.path.dirname, folders):
                    above |= {folder, os.path.dirname(folder)}
        for folder in sorted(above):
            self._files.flush_folder(folder)

    def _cut_log(self, end: LogEnd, cut: int) -> None:
        log = self._parts.log
        if cut:
            why = f"no record: {end.damage.what}" if end.damage else "bytes behind the last record"
            if not self._lenient:
                salvage.keep(self._path, log, end.physical_offset, cut, why, self._files, self._clock.now_ms())
            path = log.sequence.path_at(end.physical_offset)
            self._parts.cuts.append(Damage(path, end.physical_offset, "record", why, cut))
        if self._lenient:
            log.end = end.physical_offset  # it may be followed by gigabytes, which would have to be changed in memory
        elif cut or log.sequence.end > end.physical_offset + log.file_size:
            log.truncate(end.physical_offset)

    def _cut_queue(self, queue: ConsumeQueue) -> None:
        parts = self._parts
        if queue.max_physic_offset > parts.log.end:
            cut = queue.truncate_after(parts.log.end)
            path, position = queue.place_of(queue.max_offset)
            parts.cuts.append(Damage(path, position, "ahead", f"{cut} entries ahead of the log", 20 * cut))
        queue.serve_from(parts.log.begin)

    def _reconcile_from(self) -> int:
        """The physical offset from which on records are held against queues and index."""
        parts = self._parts
        log, index = parts.log, parts.index
        if self._thorough or self._lost:
            return log.begin
        if self._clean:
            begin = max((queue.max_physic_offset for queue in parts.queues.values()), default=log.begin)
            begin = min(begin, index.end_physical_offset)
            if _lacks_entries(log, parts.queues):
                begin = log.begin  # a queue was lost since, wherever its first record is
        else:
            begin = self._begin
            self._drop_index(self._unvouched_index(), "the checkpoint")
            begin = min(begin, index.end_physical_offset)
        ahead = [file for file in index.files if file.header.end_physical_offset >= log.end]
        begin = min(begin, self._drop_index(ahead, "the log's end"))
        return max(begin, log.begin)

    def _unvouched_index(self) -> list[IndexFile]:
        """The index files that may not be whole on the device: behind the first that the checkpoint ends with."""
        files, limit = self._parts.index.files, self._parts.checkpoint.index_timestamp_ms
        for number, file in enumerate(files):
            end = file.header.end_timestamp_ms
            if not file.full or end > limit:
                return files[number:]
            if end == limit:
                return files[number + 1 :]
        return []

    def _drop_index(self, files: Sequence[IndexFile], than: str) -> int:
        """Delete index files that are to be made again; the physical offset from which on."""
        for file in files:
            self._parts.cuts.append(Damage(file.path, 0, "ahead", f"an index file beyond {than}, made again"))
            self._parts.index.drop(file.name)
        return self._parts.index.end_physical_offset if files else self._parts.log.end

    def _reconcile(self, begin: int) -> None:
        parts = self._parts
        while True:
            found: list[Damage] = []
            try:
                found.extend(
                    reconcile(
                        parts.log,
                        parts.queues,
                        parts.open_queue,
                        parts.index,
                        parts.levels,
                        begin,
                        mend=True,
                        bitmap_of=parts.dispatcher.bitmap_of,
                    )
                )
            except GapError:
                begin = parts.log.begin
                continue
            except CorruptionError as error:
                path = parts.log.sequence.path_at(error.offset)
                if error.file != path:
                    raise
                # A record that names no queue: the log ends there.
                end, cut = LogEnd(error.offset, error), parts.log.data_behind(error.offset)
                if not self._thorough:
                    self._check_cut(end, cut)
                    if error.offset < self._begin and not self._lenient:
                        raise  # what an exit vouched for is cut only on demand
                parts.cuts += found
                self._cut_log(end, cut)
                for queue in parts.queues.values():
                    self._cut_queue(queue)
                continue
            parts.cuts += found
            return


def _names_no_queue(raw: bytes, known: set[tuple[bytes, bool]]) -> str | None:
    """Why a record names no possible queue, None if it names one; ``known`` are those that were looked at before."""
    _, _, topic_at, topic_end, _, _ = codec.frame(raw, 0, len(raw))
    name = raw[topic_at:topic_end], raw[codec.QUEUE_ID_AT] > 127
    if name not in known:
        message = StoredMessage(raw)
        try:
            validate_queue(message.topic, message.queue_id)
        except MessageIllegalError as error:
            return f"it names no queue: {error}"
        known.add(name)
    return None


def _ends_in_zeros(log: CommitLog, physical_offset: int, raw: bytes, properties_at: int) -> bool:
    """Whether a record has zeros in its properties that go on to the end of a sector."""
    zero = raw.find(b"\0", properties_at)
    if zero < 0:
        return False
    place, size = physical_offset % log.file_size, len(raw)
    edge = (place + zero) // _SECTOR * _SECTOR + _SECTOR
    while edge <= place + size:
        if not raw[edge - place - 1]:
            return True
        edge += _SECTOR
    return not raw[-1] and not any(log.data_at(physical_offset + size, edge - place - size))


def _may_be_unwritten(log: CommitLog, begin: int, end: int) -> bool:
    """Whether between two physical offsets, in the file of the first, a sector ends that never reached the device.

    Files are zero where nothing was written.
    """
    start = begin - begin % log.file_size
    buffer = log.sequence.file(start).buffer
    at, upto = begin - start, min(end - start + 3, log.file_size)  # a record may begin with three zeros, its size
    edges = itertools.chain(range(at - at % _SECTOR + _SECTOR, upto + 1, _SECTOR), [upto] * (upto == log.file_size))
    if any(not any(buffer[max(at, edge - _UNWRITTEN) : edge]) for edge in edges):
        return True
    blank = (log.file_size - at).to_bytes(4, "big") + codec.BLANK_MAGIC.to_bytes(4, "big")
    return blank.startswith(buffer[at : log.file_size].rstrip(b"\0"))  # part of it was written
