"""What is true after opening: where the log ends, and queues and index that agree with it.

After a clean exit the last three files of the log are walked; after an unclean one (the abort marker stands) the walk
begins at the newest file whose first record the checkpoint vouches for, and what it passes is dispatched again. The
first record that can't be read ends the log; what lies behind is cut. Mirrors 4.9.4's ``recoverNormally`` and
``recoverAbnormally``, but never loses keys that the log still has, and indexes each key once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from librmq import layout
from librmq.checkpoint import Checkpoint, has_abort, set_abort
from librmq.clock import Clock
from librmq.commitlog import CommitLog, LogEnd
from librmq.config import StoreConfig
from librmq.consumequeue import ConsumeQueue
from librmq.dispatch import Dispatcher, Lane
from librmq.errors import CorruptionError
from librmq.files import Files
from librmq.indexfile import IndexFile
from librmq.keyindex import KeyIndex
from librmq.levels import DelayLevels
from librmq.mappedfile import MappingPool
from librmq.reconcile import Damage, GapError, OpenQueue, reconcile

__all__ = ["Parts", "clear_leftovers", "load"]

_T = TypeVar("_T")

_QUEUE_DIGITS: Final = 20  # of the names of files
_INDEX_DIGITS: Final = 17


@dataclass(slots=True)
class Parts:
    """The opened parts of a store."""

    levels: DelayLevels
    log: CommitLog
    queues: dict[tuple[str, int], ConsumeQueue]
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
        for queue in self.queues.values():
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
) -> Parts:
    """Open the parts of the store in ``path``; if ``writable``, bring them to agree.

    ``thorough`` looks at all of the log instead of what the last exit calls for, and makes queues, index and checkpoint
    again whose files have a wrong length or an impossible header. A store that is only read is left as it is: its log
    ends where a recovery would end it.

    `CorruptionError` for what no crash explains: a store that is refused is left as it was.
    """
    clean = not has_abort(files, path)
    cuts: list[Damage] = []
    mend = cuts if writable and thorough else None
    place = os.path.join(path, layout.CHECKPOINT)
    checkpoint = _opened(lambda: Checkpoint.open(place, files=files, writable=writable), files, mend, [place])

    def scan_from(log: CommitLog) -> int:
        if thorough:
            return log.begin
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

    queues = {key: open_queue(*key) for key in layout.list_queues(path, files)}
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
    parts = Parts(levels, log, queues, index, checkpoint, Dispatcher(index), open_queue, cuts)
    if writable:
        set_abort(files, path)  # only now: a store that is refused is left as it was
        files.make_folder(log.sequence.folder)  # by which it is known as a store
        _Recovery(parts, scan_from(log), clean, thorough).run()
    else:
        for queue in queues.values():
            queue.serve_from(log.begin)
    return parts


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

    def __init__(self, parts: Parts, begin: int, clean: bool, thorough: bool) -> None:
        self._parts = parts
        self._begin = begin
        self._clean = clean
        self._thorough = thorough

    def run(self) -> None:
        parts = self._parts
        self._cut_log(parts.log.found_end)
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

    def _cut_log(self, end: LogEnd) -> None:
        log = self._parts.log
        # After a clean exit nothing but zeros is expected, and not looked for in what may be a gigabyte of them.
        cut = log.data_behind(end.physical_offset) if end.damage or not self._clean or self._thorough else 0
        if cut:
            why = f"no record: {end.damage.what}" if end.damage else "bytes behind the last record"
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
        if self._thorough:
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
                    reconcile(parts.log, parts.queues, parts.open_queue, parts.index, parts.levels, begin, mend=True)
                )
            except GapError:
                begin = parts.log.begin
                continue
            except CorruptionError as error:
                path = parts.log.sequence.path_at(error.offset)
                if error.file != path or (not self._thorough and error.offset < self._begin):
                    raise  # what an exit vouched for is cut only on demand
                # A record that names no queue: the log ends there.
                parts.cuts += found
                self._cut_log(LogEnd(error.offset, error))
                for queue in parts.queues.values():
                    self._cut_queue(queue)
                continue
            parts.cuts += found
            return
