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
from librmq.consumequeue import ConsumeQueue
from librmq.dispatch import BitmapOf, Dispatcher, Lane
from librmq.errors import CorruptionError, MessageIllegalError
from librmq.files import Files
from librmq.indexfile import IndexFile
from librmq.keyindex import KeyIndex
from librmq.levels import DelayLevels
from librmq.mappedfile import MappingPool
from librmq.message import StoredMessage
from librmq.reconcile import Damage, GapError, OpenQueue, reconcile
from librmq.topics import validate_queue

__all__ = ["Parts", "clear_leftovers", "load", "settle"]

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
    """Delete the files of length zero that a kill left between making a file and giving it its length."""
    found = []
    for folder in [
        os.path.join(path, layout.COMMITLOG),
        os.path.join(path, layout.INDEX),
        *(
            layout.queue_folder(path, topic, queue_id, ext=ext)
            for ext in (False, True)
            for topic, queue_id in layout.list_queues(path, files, ext=ext)
        ),
    ]:
        for entry in reversed(files.list(folder)):  # the newest
            if not entry.name.isdigit():
                continue
            if entry.size or entry.is_folder:
                break
            found.append(os.path.join(folder, entry.name))
    checkpoint = os.path.join(path, layout.CHECKPOINT)
    if files.size(checkpoint) == 0:
        found.append(checkpoint)
    for file in found:
        files.delete(file)
    return [Damage(file, 0, "size", "a file of length zero, as a kill leaves it") for file in found]


def load(
    path: str,
    config: StoreConfig,
    levels: DelayLevels,
    files: Files,
    clock: Clock,
    *,
    writable: bool,
    thorough: bool = False,
    bitmap_of: BitmapOf | None = None,
) -> Parts:
    """Open the parts of the store in ``path``; if ``writable``, bring them to agree.

    ``thorough`` looks at all of the log instead of what the last exit calls for, and makes queues, index and checkpoint
    again whose files have a wrong length or an impossible header. A store that is only read is left as it is: its log
    ends where a recovery would end it.

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
        return log.third_last_file() if clean else _vouched_for(log, checkpoint)

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
        mend,
        [folder],
        _INDEX_DIGITS,
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
        run = _Recovery(path, files, clock, parts, scan_from(log), clean, thorough, lost)
        end, cut = run.cut_at()
        set_abort(files, path)  # only now: a store that is refused is left as it was
        files.make_folder(log.sequence.folder)  # by which it is known as a store
        run.run(end, cut)
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
    open_part: Callable[[], _T], files: Files, mend: list[Damage] | None, places: Sequence[str], digits: int = 0
) -> _T:
    """Open a part that is derived from the log; if ``mend``, one whose files can't be its is removed, and noted there.

    ``places`` are its files and folders, in which its files have names of so many ``digits``. Where there are others
    too, it is refused, and nothing is removed.
    """
    try:
        return open_part()
    except CorruptionError as error:
        if mend is None or (error.kind == "name" and digits != _QUEUE_DIGITS):
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


def _vouched_for(log: CommitLog, checkpoint: Checkpoint) -> int:
    """Where the newest file starts whose first record is no younger than the checkpoint, else the oldest one."""
    for start in reversed(log.sequence.starts):
        stored = log.first_store_timestamp_ms(start)
        if stored and stored <= checkpoint.min_timestamp_ms:
            return start
    return log.begin


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
    ) -> None:
        """``lost``: queues or index are known to lack something, wherever it is."""
        self._path = path
        self._files = files
        self._clock = clock
        self._parts = parts
        self._begin = begin
        self._clean = clean
        self._thorough = thorough
        self._lost = lost

    def cut_at(self) -> tuple[LogEnd, int]:
        """Where the log is going to end, and how many bytes are going to be cut there; nothing is changed yet.

        `CorruptionError` if that would cut sound records that no crash explains, and nobody asked for it.
        """
        log = self._parts.log
        end = log.found_end
        if not self._clean and not self._thorough:
            end = _first_without_queue(log, self._begin) or end
        cut = self._bytes_behind(end)
        if not self._thorough:
            self._check_cut(end, cut)
        return end, cut

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
        if not cut:
            return
        log, at = self._parts.log, end.physical_offset
        following = salvage.find_record(log.sequence, at + 1, at + cut)
        if following is None:
            return
        place = following % log.file_size
        stored_ms = codec.store_timestamp_ms(log.sequence.file(following - place).buffer, place)
        vouched_for = stored_ms <= self._parts.checkpoint.min_timestamp_ms
        if not self._clean and not vouched_for and _may_be_unwritten(log, at, following):
            return
        what = "a stretch of zeros" if end.damage is None else end.damage.what
        raise CorruptionError(
            log.sequence.path_at(at),
            at,
            "record" if end.damage is None else end.damage.kind,
            f"{what}, and sound records from {following} on: this is no end that a crash leaves. "
            f"`librmq recover {self._path}` would cut {cut} bytes here and keep them aside "
            f"(--dry-run shows it), `librmq salvage {self._path}` gives what is sound",
        )

    def run(self, end: LogEnd, cut: int) -> None:
        """Bring the parts to agree, the log ending at ``end`` with ``cut`` bytes cut there."""
        parts = self._parts
        self._cut_log(end, cut)
        for queue in parts.queues.values():
            self._cut_queue(queue)
        begin = self._reconcile_from()
        if begin < parts.log.end or self._thorough:
            self._reconcile(begin)
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
        log.flush()
        for queue in self._parts.queues.values():
            queue.flush()
        self._parts.index.flush()
        checkpoint.physic_timestamp_ms = checkpoint.logics_timestamp_ms = stored
        checkpoint.index_timestamp_ms = min(self._parts.index.full_timestamp_ms, stored)
        checkpoint.flush()

    def _cut_log(self, end: LogEnd, cut: int) -> None:
        log = self._parts.log
        if cut:
            why = f"no record: {end.damage.what}" if end.damage else "bytes behind the last record"
            salvage.keep(self._path, log, end.physical_offset, cut, why, self._files, self._clock.now_ms())
            path = log.sequence.path_at(end.physical_offset)
            self._parts.cuts.append(Damage(path, end.physical_offset, "record", why, cut))
        if cut or log.sequence.end > end.physical_offset + log.file_size:
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
        else:
            begin = self._begin
            newer = [file for file in index.files if file.header.end_timestamp_ms > parts.checkpoint.index_timestamp_ms]
            begin = min(begin, self._drop_index(newer, "the checkpoint"))
        ahead = [file for file in index.files if file.header.end_physical_offset >= log.end]
        begin = min(begin, self._drop_index(ahead, "the log's end"))
        if not index.files:
            begin = log.begin
        return max(begin, log.begin)

    def _drop_index(self, files: Sequence[IndexFile], than: str) -> int:
        """Delete index files that are to be made again; the physical offset from which on."""
        begin = self._parts.log.end
        for file in files:
            begin = min(begin, file.header.begin_physical_offset)
            self._parts.cuts.append(Damage(file.path, 0, "ahead", f"an index file beyond {than}, made again"))
            self._parts.index.drop(file.name)
        return begin

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
                    if error.offset < self._begin:
                        raise  # what an exit vouched for is cut only on demand
                parts.cuts += found
                self._cut_log(end, cut)
                for queue in parts.queues.values():
                    self._cut_queue(queue)
                continue
            parts.cuts += found
            return


def _first_without_queue(log: CommitLog, begin: int) -> LogEnd | None:
    """The first record from ``begin`` on that names no possible queue: with it the log ends."""
    known: set[tuple[bytes, bool]] = set()
    for physical_offset, size, raw in log.scan(begin, check_body=False):
        if raw is None:
            continue
        _, _, topic_at, topic_end, _, _ = codec.frame(raw, 0, size)
        name = raw[topic_at:topic_end], raw[codec.QUEUE_ID_AT] > 127
        if name in known:
            continue
        message = StoredMessage(raw)
        try:
            validate_queue(message.topic, message.queue_id)
        except MessageIllegalError as error:
            path, what = log.sequence.path_at(physical_offset), f"it names no queue: {error}"
            return LogEnd(physical_offset, CorruptionError(path, physical_offset, "record", what))
        known.add(name)
    return None


def _may_be_unwritten(log: CommitLog, begin: int, end: int) -> bool:
    """Whether between two physical offsets, in the file of the first, a sector ends that never reached the device.

    Files are zero where nothing was written.
    """
    start = begin - begin % log.file_size
    buffer = log.sequence.file(start).buffer
    at, upto = begin - start, min(end - start, log.file_size)
    edges = itertools.chain(range(at - at % _SECTOR + _SECTOR, upto + 1, _SECTOR), [upto] * (upto == log.file_size))
    return any(not any(buffer[max(at, edge - _UNWRITTEN) : edge]) for edge in edges)
