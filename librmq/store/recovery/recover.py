"""A recovery: where the log ends, and queues and index that agree with it.

What the walk at opening passes (`librmq.store.recovery.open`) is dispatched again after an unclean exit. The first
record that can't be read ends the log; what lies behind is cut, and kept aside (`librmq.store.recovery.salvage`).
Mirrors 4.9.4's ``recoverNormally`` and ``recoverAbnormally``, but never loses keys that the log still has, indexes each
key once, and does not cut sound records for a damage that no crash explains, unless it is told to.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from librmq.clock import Clock
from librmq.commitlog import CommitLog, LogEnd
from librmq.consumequeue import ConsumeQueue
from librmq.errors import CorruptionError, MessageIllegalError
from librmq.files.damage import Damage
from librmq.files.seam import Files
from librmq.message import record
from librmq.message.message import StoredMessage
from librmq.message.topics import validate_queue
from librmq.store.engine.open_store import Parts
from librmq.store.engine.queue_table import QueueName
from librmq.store.format.indexfile import IndexFile
from librmq.store.recovery import salvage
from librmq.store.recovery.queue_check import COMPARED, GapError, Scope, first_at, made_again
from librmq.store.recovery.reconcile import reconcile

__all__ = ["Recovery"]

_SECTOR: Final = 512
_MANY_QUEUES: Final = 64  # from which on it is quicker to flush the whole file system
_WORD: Final = 8
_UNWRITTEN: Final = 16  # zeros at the end of a sector by which it is told that it was never written; headers have 15


class Recovery:
    """One recovery of the parts of a store that is opened for writing."""

    def __init__(  # noqa: PLR0913 (a part of the store each)
        self,
        path: str,
        files: Files,
        clock: Clock,
        parts: Parts,
        begin: int,
        clean: bool,
        thorough: bool,
        lost: frozenset[QueueName] | None,
        lenient: bool,
        living: bool,
        keep_deleted: bool,
        *,
        has_ext: bool,
    ) -> None:
        """``lost``: queues that went since the exit; not None if queues or index did. The last two: as for opening."""
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
        self._keep_deleted = keep_deleted
        self._has_ext = has_ext
        self._written: list[ConsumeQueue] = []
        self._unvouched_from = 0
        """After an unclean exit: where the first record is that the checkpoint does not vouch for."""

    def cut_at(self) -> tuple[LogEnd, int]:
        """Where the log is going to end, and how many bytes are going to be cut there; nothing is changed yet.

        `CorruptionError` if that would cut sound records that no crash explains, unless ``thorough``.
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
        zeros as `_is_torn` knows them, which are looked for behind the first record that the checkpoint does not vouch
        for. One of which no crash explains them is served, as by a broker: nothing but its body has a
        checksum. That can't be where it names no queue: `CorruptionError`, unless ``thorough``.
        """
        log, vouched_for_ms = self._parts.log, self._parts.checkpoint.min_timestamp_ms
        unvouched: int | None = None
        known: set[tuple[bytes, bool]] = set()
        found: LogEnd | None = None
        for physical_offset, size, raw in log.scan(self._begin, check_body=False):
            if raw is None:
                continue
            if unvouched is None and record.store_timestamp_ms(raw) > vouched_for_ms:
                unvouched = physical_offset
            _, _, _, _, properties_at, _ = record.frame(raw, 0, size)
            what = nameless = _names_no_queue(raw, known)
            if what is None and unvouched is not None and _is_torn(log, physical_offset, raw, properties_at):
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

        It does where what was written last reached the device in another order: then records that no checkpoint vouched
        for stand behind a page or sector that was never written.
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
        stored_ms = record.store_timestamp_ms(log.sequence.file(following - place).buffer, place)
        vouched_for = stored_ms <= self._parts.checkpoint.min_timestamp_ms
        return not self._clean and not vouched_for and _may_be_unwritten(log, at, following)

    def run(self, end: LogEnd, cut: int) -> None:
        """Bring the parts to agree, the log ending at ``end`` with ``cut`` bytes cut there."""
        parts = self._parts
        self._cut_log(end, cut)
        for queue in parts.queues.opened():
            self.cut_queue(queue)
        begin, scope = self._reconcile_from()
        if begin < parts.log.end or self._thorough or not self._clean:
            self._reconcile(begin, scope)
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
        folders = set() if self._clean else self._write_again()
        log.flush()
        queues = self._parts.queues.opened()
        if len(queues) > _MANY_QUEUES and self._files.flush_all(self._path):
            for queue in queues:
                queue.note_flushed()
        else:
            for folder in sorted(folders if self._clean else folders | self._queue_folders()):
                self._files.flush_folder(folder)
            for queue in queues:
                queue.flush()
        self._parts.index.flush()
        checkpoint.physic_timestamp_ms = checkpoint.logics_timestamp_ms = stored
        checkpoint.index_timestamp_ms = min(self._parts.index.full_timestamp_ms, stored)
        checkpoint.flush()

    def _write_again(self) -> set[str]:
        """Write what no exit vouched for once more, as the writer may have died before a flush.

        Returns the folders that are to be flushed.
        """
        log, begin = self._parts.log, self._unvouched_from
        log.sequence.write_again(begin, log.end)
        above = {self._path}
        if self._thorough:  # else those that the checkpoint does not vouch for are made again
            for file in self._unvouched_index():
                file.write_again()
                above.add(self._parts.index.folder)
        return above

    def _vouch_for(self, queue: ConsumeQueue, first: int) -> None:
        """Write what no exit vouched for of a queue once more; ``first`` is the first entry that was checked."""
        begin = self._unvouched_from
        if queue.max_physic_offset > begin:
            queue.write_again(first if queue.max_offset - first < COMPARED else first_at(queue, begin))
            self._written.append(queue)
        queue.keep_descriptors(False)

    def _queue_folders(self) -> set[str]:
        """The folders of queues in which names may have changed that are not on the device."""
        above = set()
        written = set(self._written)
        for queue in self._parts.queues.opened():
            folders = {queue.folder} if queue.ext is None else {queue.folder, queue.ext.folder}
            above.update(filter(self._files.is_folder, folders))  # from which files may have been deleted
            if queue in written:
                for folder in map(os.path.dirname, folders):
                    above |= {folder, os.path.dirname(folder)}
        return above

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
            log.last_write = end.last_record

    def cut_queue(self, queue: ConsumeQueue) -> None:
        """Cut what a queue has ahead of the log; one that is opened later, when it is."""
        parts = self._parts
        if queue.max_physic_offset > parts.log.end:
            cut = queue.truncate_after(parts.log.end)
            path, position = queue.place_of(queue.max_offset)
            parts.cuts.append(Damage(path, position, "ahead", f"{cut} entries ahead of the log", 20 * cut))
        if parts.log.begin:
            queue.serve_from(parts.log.begin)

    def _reconcile_from(self) -> tuple[int, Scope]:
        """Return from where on records are held against the index, and which of them against queues."""
        parts = self._parts
        log, index = parts.log, parts.index
        if self._thorough:
            absent_before = self._dispatched() if self._keep_deleted else 0
            return log.begin, Scope(log.begin, since=made_again(log, parts.queues), absent_before=absent_before)
        if self._clean:
            dispatched = self._dispatched()
            begin = log.begin if self._lost is not None else min(dispatched, index.end_physical_offset)
            scope = Scope(dispatched, self._lost or frozenset())
        else:
            self._drop_index(self._unvouched_index(), "the checkpoint")
            begin, scope = min(self._begin, index.end_physical_offset), Scope(self._begin)
        ahead = [file for file in index.files if file.header.end_physical_offset >= log.end]
        begin = min(begin, self._drop_index(ahead, "the log's end"))
        return max(begin, log.begin), scope

    def _dispatched(self) -> int:
        """Up to where the log was dispatched, whatever became of some queues since."""
        return max([self._parts.log.begin, *(queue.max_physic_offset for queue in self._parts.queues.values())])

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

    def _reconcile(self, begin: int, scope: Scope) -> None:
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
                        scope=scope,
                        bitmap_of=parts.dispatcher.bitmap_of,
                        forget_index=parts.checkpoint.forget_index,
                        has_ext=self._has_ext,
                        finished=None if self._clean or self._lenient else self._vouch_for,
                    )
                )
            except GapError as gap:
                begin = parts.log.begin
                scope = replace(scope, all_of=scope.all_of | {gap.name}) if self._clean else Scope(begin)
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
                for queue in parts.queues.opened():
                    self.cut_queue(queue)
                continue
            parts.cuts += found
            return


def _names_no_queue(raw: bytes, known: set[tuple[bytes, bool]]) -> str | None:
    """Why a record names no possible queue, None if it names one; ``known`` are those that were looked at before."""
    _, _, topic_at, topic_end, _, _ = record.frame(raw, 0, len(raw))
    name = raw[topic_at:topic_end], raw[record.QUEUE_ID_AT] > 127
    if name not in known:
        message = StoredMessage(raw)
        try:
            validate_queue(message.topic, message.queue_id)
        except MessageIllegalError as error:
            return f"it names no queue: {error}"
        known.add(name)
    return None


def _is_torn(log: CommitLog, physical_offset: int, raw: bytes, properties_at: int) -> bool:
    """Whether a crash left zeros in the properties of a record.

    A sector is written as a whole or not at all, and of a write that was under way so many words, nothing behind them.
    Zeros of another kind are no crash's.
    """
    if raw.find(b"\0", properties_at) < 0:
        return False
    place, size = physical_offset % log.file_size, len(raw)
    padded = raw + log.data_at(physical_offset + size, -(place + size) % _SECTOR)
    for at in range(properties_at + -(place + properties_at) % _SECTOR, size, _SECTOR):
        if not any(padded[at : at + _SECTOR]) and (at == properties_at or padded[at - 1]):
            return True
    written = len(padded.rstrip(b"\0"))
    return properties_at <= written < size and not (place + written) % _WORD


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
    blank = (log.file_size - at).to_bytes(4, "big") + record.BLANK_MAGIC.to_bytes(4, "big")
    return blank.startswith(buffer[at : log.file_size].rstrip(b"\0"))  # part of it was written
