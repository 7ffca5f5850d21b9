"""Recovery: carries out the plan for the log, and makes queues and index agree with it.

After an unclean exit the records of the opening's walk (`librmq.store.recovery.open`) are dispatched again. Bytes
after the log's end are copied (`librmq.store.recovery.salvage`) and cut. Unlike 4.9.4, a recovery never loses keys
that the log still has, and indexes each key once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from librmq.clock import Clock
from librmq.commitlog import LogEnd
from librmq.consumequeue import ConsumeQueue
from librmq.errors import CorruptionError
from librmq.files.seam import Damage, Files
from librmq.store.engine.open_store import Parts
from librmq.store.format.indexfile import IndexFile
from librmq.store.recovery import salvage
from librmq.store.recovery.plan import Planner, RecoveryMode, RecoveryPlan, uncovered_index_files
from librmq.store.recovery.queue_check import GapError
from librmq.store.recovery.queue_checks import Scope
from librmq.store.recovery.queue_search import recreated_queues
from librmq.store.recovery.reconcile import reconcile
from librmq.store.recovery.unclean_queues import UncleanQueues

_MANY_QUEUES: Final = 64  # number of files from which flushing the whole file system is faster


class Recovery:
    """One recovery of a store's parts, which are open for writing."""

    def __init__(
        self,
        path: str,
        files: Files,
        clock: Clock,
        parts: Parts,
        unclean: UncleanQueues,
        *,
        has_ext: bool,
        bodies_from: int | None = None,
    ) -> None:
        """Take the parts; with ``bodies_from``, check the bodies of records from there on, as no walk has done it."""
        self._path = path
        self._files = files
        self._clock = clock
        self._parts = parts
        self._has_ext = has_ext
        self._bodies_from = bodies_from
        self._unclean = unclean

    def run(self, plan: RecoveryPlan, planner: Planner) -> None:
        """Carry out the plan."""
        parts, self._plan, self._planner = self._parts, plan, planner
        self._is_preview = plan.mode is RecoveryMode.PREVIEW
        if not plan.is_clean and not self._is_preview:
            self._unclean.uncovered_from = plan.uncovered_from
        self._cut_log(plan.end, plan.cut)
        for queue in parts.queues.opened():
            self.cut_queue(queue)
        begin, scope = self._reconcile_from()
        if begin < parts.log.end or self._plan.mode.is_thorough or not self._plan.is_clean:
            self._reconcile(begin, scope)
        if self._is_preview:
            return
        stored = self._last_timestamp_ms()
        if self._plan.mode.is_thorough:
            self._check_checkpoint(stored)
        if not self._plan.is_clean or parts.cuts:
            self._set_checkpoint(stored)

    def _last_timestamp_ms(self) -> int:
        """Return the store time of the last record, 0 if none is near."""
        log = self._parts.log
        end = log.found_end
        if end.physical_offset != log.end:  # cut once more
            end = log.walk(log.third_last_file())
        stored = None if end.last_record is None else log.store_timestamp_ms(end.last_record)
        return max(stored or 0, 0)

    def _check_checkpoint(self, stored: int) -> None:
        """Limit the checkpoint to the time of the last record."""
        checkpoint = self._parts.checkpoint
        times = checkpoint.physic_timestamp_ms, checkpoint.logics_timestamp_ms, checkpoint.index_timestamp_ms
        if max(times) > stored:
            what = f"times {times}, the last record was stored at {stored}"
            self._parts.cuts.append(Damage(checkpoint.path, 0, "checkpoint", what, 24))

    def _set_checkpoint(self, stored: int) -> None:
        """Set the checkpoint for the complete store."""
        log, checkpoint = self._parts.log, self._parts.checkpoint
        folders = set() if self._plan.is_clean else self._write_again()
        log.flush()
        queues = self._parts.queues.opened()
        if len(queues) + len(self._unclean.states) > _MANY_QUEUES and self._files.flush_all(self._path):
            for queue in queues:
                queue.note_flushed()
        else:
            for folder in sorted(folders if self._plan.is_clean else folders | self._unclean.folders(queues)):
                self._files.flush_folder(folder)
            self._unclean.flush()
            for queue in queues:
                queue.flush()
        self._parts.index.flush()
        checkpoint.physic_timestamp_ms = checkpoint.logics_timestamp_ms = stored
        checkpoint.index_timestamp_ms = min(self._parts.index.full_timestamp_ms, stored)
        checkpoint.flush()

    def _write_again(self) -> set[str]:
        """Write uncovered bytes again, because the writer can have died before a flush; return the folders to flush."""
        log, begin = self._parts.log, self._plan.uncovered_from
        log.sequence.write_again(begin, log.end)
        folders = {self._path}
        if self._plan.mode.is_thorough:  # otherwise those that the checkpoint does not cover are rebuilt
            for file in uncovered_index_files(self._parts):
                file.write_again()
                folders.add(self._parts.index.folder)
        return folders

    def _cut_log(self, end: LogEnd, cut: int) -> None:
        log = self._parts.log
        if cut:
            why = f"no record: {end.damage.what}" if end.damage else "bytes after the last record"
            if not self._is_preview:
                salvage.keep_cut(self._path, log, end.physical_offset, cut, why, self._files, self._clock.now_ms())
            path = log.sequence.path_at(end.physical_offset)
            self._parts.cuts.append(Damage(path, end.physical_offset, "record", why, cut))
        if self._is_preview:
            log.end = end.physical_offset  # gigabytes can follow it, which would all change in memory
        elif cut or log.sequence.end > end.physical_offset + log.file_size:
            log.truncate(end.physical_offset)
            log.last_write = end.last_record

    def cut_queue(self, queue: ConsumeQueue) -> None:
        """Cut a queue's entries ahead of the log; a queue that is opened later is cut then."""
        parts = self._parts
        if queue.max_physic_offset > parts.log.end:
            cut = queue.truncate_after(parts.log.end)
            path, position = queue.place_of(queue.max_offset)
            parts.cuts.append(Damage(path, position, "ahead", f"{cut} entries ahead of the log", 20 * cut))
        if parts.log.begin:
            queue.advance(parts.log.begin)

    def _reconcile_from(self) -> tuple[int, Scope]:
        """Return the place from which records are compared with the index, and the records to compare with queues."""
        parts = self._parts
        log, index = parts.log, parts.index
        if self._plan.mode.is_thorough:
            absent_before = self._dispatched() if self._plan.mode is RecoveryMode.COPY else 0
            return log.begin, Scope(log.begin, since=recreated_queues(log, parts.queues), absent_before=absent_before)
        if self._plan.is_clean:
            dispatched = self._dispatched()
            begin = log.begin if self._plan.changed_queues is not None else min(dispatched, index.end_physical_offset)
            scope = Scope(dispatched, self._plan.changed_queues or frozenset())
        elif parts.walked_from is not None:
            return self._plan.begin, Scope(self._plan.begin)
        else:
            self._drop_index(uncovered_index_files(self._parts), "the checkpoint")
            begin, scope = min(self._plan.begin, index.end_physical_offset), Scope(self._plan.begin)
        ahead = [file for file in index.files if file.header.end_physical_offset >= log.end]
        begin = min(begin, self._drop_index(ahead, "the log's end"))
        return max(begin, log.begin), scope

    def _dispatched(self) -> int:
        """Return the place up to which the log was dispatched, whatever happened to some queues since."""
        return max([self._parts.log.begin, *(queue.max_physic_offset for queue in self._parts.queues.values())])

    def _drop_index(self, files: Sequence[IndexFile], than: str) -> int:
        """Delete index files to rebuild, and return the physical offset from which to rebuild."""
        for file in files:
            self._parts.cuts.append(Damage(file.path, 0, "ahead", f"an index file beyond {than}, made again"))
            self._parts.index.delete(file.name)
        return self._parts.index.end_physical_offset if files else self._parts.log.end

    def _reconcile(self, begin: int, scope: Scope) -> None:
        parts = self._parts
        while True:
            damages: list[Damage] = []
            try:
                damages.extend(
                    reconcile(
                        parts.log,
                        parts.queues,
                        parts.open_queue,
                        parts.index if parts.walked_from is None else None,
                        parts.levels,
                        begin,
                        repair=True,
                        scope=scope,
                        bitmap_of=parts.dispatcher.bitmap_of,
                        before_rebuild=parts.checkpoint.clear_index_time,
                        has_ext=self._has_ext,
                        bodies_from=self._bodies_from,
                        unclean=None if self._plan.is_clean else self._unclean,
                    )
                )
            except GapError as gap:
                begin = parts.log.begin
                scope = replace(scope, all_of=scope.all_of | {gap.name}) if self._plan.is_clean else Scope(begin)
                continue
            except CorruptionError as error:
                path = parts.log.sequence.path_at(error.offset)
                if error.file != path:
                    raise
                # A record with an impossible queue ends the log.
                end, cut = LogEnd(error.offset, error), parts.log.data_behind(error.offset)
                if not self._plan.mode.is_thorough:
                    self._planner.check_cut(end, cut)
                    if error.offset < self._plan.begin and not self._is_preview:
                        raise  # covered bytes are cut only on demand
                parts.cuts += damages
                self._cut_log(end, cut)
                for queue in parts.queues.values():  # unopened ones can have been compared too
                    self.cut_queue(queue)
                continue
            parts.cuts += damages
            return
