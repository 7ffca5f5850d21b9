"""Where the log ends after a crash or damage, and the recovery that cuts it there and makes queues and index agree.

The plan is made before anything is changed. The walk that finds the log's end checks each record once. After an unclean
exit the first record that did not reach the device completely ends the log. Mirrors 4.9.4's ``recoverNormally`` and
``recoverAbnormally``, but cuts sound records only on demand if no crash explains the damage.

After an unclean exit the records of the opening's walk (`librmq.store.recovery.open`) are dispatched again. Bytes
after the log's end are copied (`librmq.store.recovery.salvage`) and cut. Unlike 4.9.4, a recovery never loses keys
that the log still has, and indexes each key once.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from librmq.commitlog import CommitLog, LogEnd
from librmq.consumequeue import ConsumeQueue, offset_at_place
from librmq.errors import CorruptionError, MessageIllegalError
from librmq.files import Damage
from librmq.files.interface import flush_all, is_folder
from librmq.files.rolling import file_name
from librmq.formatting import exact_moment
from librmq.java.lang import java_decode
from librmq.message import record
from librmq.message.topics import validate_queue
from librmq.store.engine._durability import MANY_FILES
from librmq.store.engine.derivation import COMPARED
from librmq.store.engine.saved_state import WORTH_A_MARK, MarkError, lacks_all_records
from librmq.store.engine.store_parts import Parts, QueueName
from librmq.store.format import directory
from librmq.store.format._checkpoint import Checkpoint
from librmq.store.format.indexfile import IndexFile
from librmq.store.recovery._case import Case, RecoveryMode
from librmq.store.recovery._scope import Scope, dispatched, recreated

# ---- plan

_MISSING_ONE: Final = "beyond a missing one"
_NO_RECORD: Final = "that ends at no record"
_SECTOR: Final = 512
_WORD: Final = 8
_UNWRITTEN: Final = 16  # zeros at the end of a sector that show that it was never written; headers have 15


def _has_record(log: CommitLog, place: int) -> bool:
    """Return whether the log has a record at a place, or has had one that was deleted since."""
    magic = int.from_bytes(log.data_at(place + record.MAGIC_AT, 4))
    return place < log.begin or magic in record.MAGICS


class Suspect(NamedTuple):
    """A record that a crash can have left incomplete."""

    physical_offset: int
    what: str
    is_nameless: bool
    """Whether it names no queue, so that it cannot be delivered."""


_unpack_fields = record.header_struct("magic", "sys_flag", "body_length").unpack_from


class WalkFindings:
    """Findings of the walk over the log after an unclean exit.

    A sector that was not written holds zeros. In topic or properties they lead to an impossible queue, or to zeros that
    `_is_torn` recognises. The latter are searched after the first record that the checkpoint does not cover.
    """

    def __init__(self, covered_ms: int) -> None:
        self._covered_ms = covered_ms
        self._checked_names: set[tuple[bytes, bool]] = set()
        self.uncovered: int | None = None
        """Place of the first record that the checkpoint does not cover."""
        self.suspects: list[Suspect] = []

    def __call__(self, log: CommitLog, physical_offset: int, raw: bytes) -> None:
        """Check the next record."""
        # As `Derivation` does: the walk has checked the record, so its frame is only worked out where it is unusual.
        magic, sys_flag, body_size = _unpack_fields(raw)
        if magic != record.MESSAGE_MAGIC or sys_flag & record.HOSTS_V6:
            _, _, topic_at, topic_end, properties_at, _ = record.frame(raw, 0, len(raw))
        else:
            topic_at = record.TOPIC_AT + body_size if body_size > 0 else record.TOPIC_AT
            topic_end = topic_at + raw[topic_at - 1]
            properties_at = topic_end + 2
        if self.uncovered is None and record.store_timestamp_ms(raw) > self._covered_ms:
            self.uncovered = physical_offset
        topic = raw[topic_at:topic_end]
        what = None
        if (topic, raw[record.QUEUE_ID_AT] > 127) not in self._checked_names:
            what = names_no_queue(raw, topic, self._checked_names)
        if what is not None:
            self.suspects.append(Suspect(physical_offset, what, True))
        elif (
            self.uncovered is not None
            and raw.find(b"\0", properties_at) >= 0
            and _is_torn(log, physical_offset, raw, properties_at)
        ):
            what = "its properties are zeros to the end of a sector"
            self.suspects.append(Suspect(physical_offset, what, False))


def uncovered_index_files(parts: Parts) -> Sequence[IndexFile]:
    """Return the index files after the checkpoint, which can be incomplete on the device."""
    files, limit = parts.index.files, parts.checkpoint.index_timestamp_ms
    for number, file in enumerate(files):
        end = file.header.end_timestamp_ms
        if not file.full or end > limit:
            return files[number:]
        if end == limit:
            return files[number + 1 :]
    return []


def names_no_queue(raw: bytes, topic: bytes, checked: set[tuple[bytes, bool]]) -> str | None:
    """Return why a record's queue is impossible, None if it is possible; ``checked`` holds checked queues."""
    name = topic, raw[record.QUEUE_ID_AT] > 127
    if name not in checked:
        queue_id = int.from_bytes(raw[record.QUEUE_ID_AT : record.QUEUE_ID_AT + 4], "big", signed=True)
        try:
            validate_queue(java_decode(topic), queue_id)
        except MessageIllegalError as error:
            return f"its queue is impossible: {error}"
        checked.add(name)
    return None


def _is_torn(log: CommitLog, physical_offset: int, raw: bytes, properties_at: int) -> bool:
    """Return whether a crash left the zeros that are in the properties of a record.

    A sector is written completely or not at all. A running write can have written only its first words. Other zeros do
    not come from a crash.
    """
    place, size = physical_offset % log.file_size, len(raw)
    padded = raw + log.data_at(physical_offset + size, -(place + size) % _SECTOR)
    for at in range(properties_at + -(place + properties_at) % _SECTOR, size, _SECTOR):
        if not any(padded[at : at + _SECTOR]) and (at == properties_at or padded[at - 1]):
            return True
    written = len(padded.rstrip(b"\0"))
    return properties_at <= written < size and not (place + written) % _WORD


def _may_be_unwritten(log: CommitLog, begin: int, end: int) -> bool:
    """Return whether an unwritten sector ends between two physical offsets, in the file of the first.

    Files are zero where nothing was written.
    """
    start = begin - begin % log.file_size
    buffer = log.sequence.file(start).buffer
    # Look from three bytes before the last record's end on: a record can begin with three zeros, in its size.
    at, until = begin - start, min(end - start + 3, log.file_size)
    edges = itertools.chain(range(at - at % _SECTOR + _SECTOR, until + 1, _SECTOR), [until] * (until == log.file_size))
    if any(not any(buffer[max(at, edge - _UNWRITTEN) : edge]) for edge in edges):
        return True
    blank = (log.file_size - at).to_bytes(4, "big") + record.BLANK_MAGIC.to_bytes(4, "big")
    return blank.startswith(buffer[at : log.file_size].rstrip(b"\0"))  # part of it was written


def beyond_checkpoint(log: CommitLog, checkpoint: Checkpoint) -> str:
    """Return what the checkpoint says of flushed records that the log lacks at its end; empty if it lacks none."""
    covered_ms = min(checkpoint.physic_timestamp_ms, checkpoint.logics_timestamp_ms)
    if covered_ms <= 0 or _has_record_of(log, covered_ms):
        return ""
    return f"the checkpoint covers records up to {exact_moment(covered_ms)}"


def _has_record_of(log: CommitLog, timestamp_ms: int) -> bool:
    """Return whether a record near the log's end was stored at a time or later.

    The last one shows it, unless the clock was set back.
    """
    last = log.last_write
    if last is not None and (log.store_timestamp_ms(last) or 0) >= timestamp_ms:
        return True
    written = [start for start in log.sequence.starts if start < log.end]  # files behind them were made ahead
    try:
        for place, size, raw in log.scan(written[-3:][0] if written else log.begin, check_body=False):
            if raw is not None and (log.store_timestamp_ms(place, size) or 0) >= timestamp_ms:
                return True
    except CorruptionError:
        return True  # other damage, which is found where it is read
    return False


class Recovery:
    """One recovery of a store whose parts are open for writing."""

    end: LogEnd
    """Planned end of the log."""

    def __init__(self, case: Case, parts: Parts) -> None:
        self._case = case
        self._parts = parts

    # ---- plan

    def plan(self, findings: WalkFindings | None) -> None:
        """Plan the end of the log, by the findings of the walk after an unclean exit; this changes nothing.

        Raises:
            CorruptionError: This would cut sound records for damage that no crash explains, and the mode is not
                thorough.
            MarkError: The log ends before the mark, or lacks what the index has.
        """
        case, log = self._case, self._parts.log
        self.end, self._uncovered_from = log.found_end, log.end
        if findings is not None:
            torn, self._uncovered_from = self._first_torn(findings)
            self.end = torn or self.end
        end = self.end.physical_offset
        if case.mark is not None and end < case.mark.state.log_end:
            raise MarkError(f"the log ends at {end}, before that flush")
        if case.mark is not None and self._parts.index.end_physical_offset >= end:
            raise MarkError("the key index is ahead of the log")
        self._cut = self._bytes_behind(self.end)
        self._stale = self._stale_index_files()
        if case.mode is not RecoveryMode.LAST_EXIT:
            return
        self._check_records(end)
        if case.is_clean:
            self._check_next_file(end)
        self._check_cut(self.end, self._cut)
        if not case.is_clean and case.mark is None:
            self._check_walk(end)

    def _first_torn(self, findings: WalkFindings) -> tuple[LogEnd | None, int]:
        """Return the first record that did not reach the device completely (but its body did), and the covered bytes.

        Like a broker, librmq delivers a suspect record that no crash explains, because only its body has a checksum.

        Raises:
            CorruptionError: The record names no queue, so it cannot be delivered, and the mode is not thorough.
        """
        case, log = self._case, self._parts.log
        uncovered = log.end if findings.uncovered is None else findings.uncovered
        for at, what, is_nameless in findings.suspects:
            torn = LogEnd(at, CorruptionError(log.sequence.path_at(at), at, "record", what))
            if case.mode is not RecoveryMode.LIVING and self._unexplained(at, log.sequence.end) is None:
                return torn, min(uncovered, at)
            if is_nameless:
                if not case.is_thorough:
                    self._check_cut(torn, log.data_behind(at))
                # The record belongs to no queue that may exist, so the log ends before it, and nothing after it stays.
                return None, min(uncovered, at)
        return None, uncovered

    def _check_records(self, log_end: int) -> None:
        """Refuse a log without a record behind those of its queues: other files are lost, or elsewhere."""
        case, log = self._case, self._parts.log
        if log_end == log.begin and (what := lacks_all_records(case.path, case.files, log)) is not None:
            what += f": copy the missing files; {directory.ON_PATHS}; `librmq recover {case.path}` goes on without them"
            raise CorruptionError(log.sequence.path(log.begin), log.begin, directory.MISSING_LOG, what)

    def _check_next_file(self, log_end: int) -> None:
        """Refuse a closed store whose queues lead beyond the log's last file: the next one is lost, or elsewhere.

        A broker can keep it on another path. librmq would write a second file of the same name.
        """
        log = self._parts.log
        if not log.sequence.starts or log_end + log.blank_at(log_end) < log.sequence.end:
            return
        end = max((queue.max_physic_offset for queue in self._parts.queues.values()), default=0)
        if end > log_end:
            place = os.path.join(log.sequence.folder, file_name(log.sequence.end))
            what = (
                f"the file is missing: the store was closed with queues up to {end}: copy the file from the store that "
                f"this is a copy of; {directory.ON_PATHS}; `librmq recover {self._case.path}` goes on without it"
            )
            raise CorruptionError(place, log_end, "ahead", what)

    def _check_walk(self, log_end: int) -> None:
        """Refuse, before any change, damage in the part of the log before the walk.

        The check begins at the end of the remaining index. Covered bytes are cut only on demand.
        """
        case, log = self._case, self._parts.log
        files = [file for file in self._parts.index.files if file not in self._stale]
        begin = max(files[-1].header.end_physical_offset, log.begin) if files else log.begin
        checked: set[tuple[bytes, bool]] = set()
        for physical_offset, size, raw in log.scan(begin, min(case.begin, log_end), check_body=False):
            if raw is None:
                continue
            _, _, topic_at, topic_end, _, _ = record.frame(raw, 0, size)
            what = names_no_queue(raw, raw[topic_at:topic_end], checked)
            if what is not None:
                what += f": `librmq recover {case.path}` would cut the log here and keep the cut bytes aside"
                raise CorruptionError(log.sequence.path_at(physical_offset), physical_offset, "record", what)

    def _stale_index_files(self) -> dict[IndexFile, str]:
        """Return the index files to make again, and what each is beyond; a check of all compares them instead."""
        case, parts, stale = self._case, self._parts, dict[IndexFile, str]()
        files = parts.index.files
        if case.is_thorough or case.recovered.is_brief or case.mark is not None:
            return stale
        if not case.is_clean:
            from librmq.store.recovery.missing_files import missing_keys

            stale |= dict.fromkeys(uncovered_index_files(parts), "beyond the checkpoint")
            covered = [file for file in files if file not in stale]
            if (gap := missing_keys(covered, parts.log, parts.levels)) is not None:  # only a rebuild returns its keys
                behind = [file for file in covered if file.header.begin_physical_offset >= gap[1]]
                stale |= dict.fromkeys(behind, _MISSING_ONE)
        log_end = self.end.physical_offset
        ahead = [file for file in files if file not in stale and file.header.end_physical_offset >= log_end]
        stale |= dict.fromkeys(ahead, "beyond the log's end")
        last = next((file for file in reversed(files) if file not in stale), None)
        # The walk over records that the index may lack begins there.
        if last is not None and not _has_record(parts.log, last.header.end_physical_offset):
            stale[last] = _NO_RECORD
        return stale

    def _bytes_behind(self, end: LogEnd) -> int:
        """Return the number of bytes to cut; after a clean exit they are searched only if there is a hint of any."""
        case, parts = self._case, self._parts
        log, at = parts.log, end.physical_offset
        if (
            end.damage is not None
            or not case.is_clean
            or case.is_thorough
            or any(queue.max_physic_offset > at for queue in parts.queues.values())
            or any(any(log.sequence.file(start).buffer[:8]) for start in log.sequence.starts if start > at)
        ):
            return log.data_behind(at)
        return 0  # only zeros follow, possibly a gigabyte

    def _check_cut(self, end: LogEnd, cut: int) -> None:
        """Refuse to cut sound records, unless a crash explains the damage before them."""
        if not cut or self._case.is_preview:
            return
        case, log, at = self._case, self._parts.log, end.physical_offset
        following = self._unexplained(at, at + cut)
        if following is None:
            return
        what = "a stretch of zeros" if end.damage is None else end.damage.what
        raise CorruptionError(
            log.sequence.path_at(at),
            at,
            "record" if end.damage is None else end.damage.kind,
            f"{what}, and sound records from {following} on, which no crash leaves. "
            f"`librmq recover {case.path}` would cut {cut} bytes here and keep them aside "
            f"(--dry-run shows it), `librmq salvage {case.path}` returns the sound records",
        )

    def _unexplained(self, at: int, until: int) -> int | None:
        """Return the place of a sound record after damage at ``at`` that no crash explains, None without one.

        A crash explains it if the last writes reached the device in another order: uncovered records are then after a
        page or sector that was never written, or after an unfinished write, whose own records do not count.
        """
        from librmq.store.recovery.salvage import find_record

        case, log = self._case, self._parts.log
        unfinished = 0 if case.is_clean else log.unfinished_at(at)
        following = find_record(log.sequence, at + max(unfinished, 1), until)
        if following is None or case.is_clean:
            return following
        place = following % log.file_size
        stored_ms = record.store_timestamp_ms(log.sequence.file(following - place).buffer, place)
        is_covered = stored_ms <= self._parts.checkpoint.min_timestamp_ms
        return following if is_covered or not (unfinished or _may_be_unwritten(log, at, following)) else None

    # ---- repair

    def carry_out(self) -> None:
        """Carry out the plan."""
        case, parts = self._case, self._parts
        self._cut_log(self.end, self._cut)
        for queue in parts.queues.opened():
            self.cut_queue(queue)
        begin, scope = self._reconcile_from()
        lacking = self._lacking_queues(scope)
        if lacking:
            begin, scope = self._widened(scope, lacking)
        parts.recovered.compared_from = min(case.begin, scope.begin)
        if begin < parts.log.end or case.is_thorough or not case.is_clean:
            self._reconcile(begin, scope)
        folders = {directory.queue_folder(case.path, *name) for name in lacking}
        noted = {(damage.file, damage.what) for damage in case.recovered.repairs}
        case.recovered.repairs += [
            cut
            for cut in case.recovered.cuts
            if (cut.kind == directory.LOST or not folders.isdisjoint((cut.file, os.path.dirname(cut.file))))
            and (cut.file, cut.what) not in noted
        ]
        if case.is_preview:
            return
        stored = self._last_timestamp_ms()
        if case.is_thorough and max(parts.checkpoint.times_ms) > stored:
            what = f"times {parts.checkpoint.times_ms}, the last record was stored at {stored}"
            parts.recovered.cuts.append(Damage(parts.checkpoint.path, 0, "checkpoint", what, 24))
        elif not case.is_thorough and not case.is_clean and (what := beyond_checkpoint(parts.log, parts.checkpoint)):
            # Say it before the checkpoint is set, because no later opening can know it.
            end = parts.log.end
            path = parts.log.sequence.path_at(end)
            parts.recovered.cuts.append(Damage(path, end, directory.LOST, f"{what}, beyond the log's end"))
        if not case.is_clean or parts.recovered.cuts:
            self._set_checkpoint(stored)

    def _last_timestamp_ms(self) -> int:
        """Return the store time of the last record, 0 if none is near."""
        log = self._parts.log
        end = log.found_end
        # The log was cut again after the walk, so the walk's last record may be gone.
        if end.physical_offset != log.end:
            end = log.walk(log.third_last_file())
        stored = None if end.last_record is None else log.store_timestamp_ms(end.last_record)
        return max(stored or 0, 0)

    def _set_checkpoint(self, stored: int) -> None:
        case, log, checkpoint = self._case, self._parts.log, self._parts.checkpoint
        folders = set() if case.is_clean else self._write_again()
        log.flush()
        queues = self._parts.queues.opened()
        if len(queues) > MANY_FILES and flush_all(case.files, case.path, *folders, *self._folders_of(queues)):
            for queue in queues:
                queue.note_flushed()
        else:
            for folder in sorted(folders if case.is_clean else folders | self._changed_folders(queues)):
                case.files.flush_folder(folder)
            for queue in queues:
                queue.flush()
        self._parts.index.flush()
        checkpoint.physic_timestamp_ms = checkpoint.logics_timestamp_ms = stored
        checkpoint.index_timestamp_ms = min(self._parts.index.full_timestamp_ms, stored)
        checkpoint.flush()

    def _folders_of(self, opened: Iterable[ConsumeQueue]) -> set[str]:
        """Return the folders of queues that can be on a disk of their own, by a link or a mount."""
        case, names = self._case, [directory.CONSUMEQUEUE]
        names += [directory.CONSUMEQUEUE_EXT] * case.config.enable_consumequeue_ext
        return {os.path.join(case.path, name) for name in names} | {os.path.dirname(queue.folder) for queue in opened}

    def _changed_folders(self, opened: Iterable[ConsumeQueue]) -> set[str]:
        """Return the folders of queues that can have unflushed names, or from which files can have been deleted."""
        folders = set[str]()
        for queue in opened:
            folders |= {queue.folder} if queue.ext is None else {queue.folder, queue.ext.folder}
        for topic in set(map(os.path.dirname, folders)):
            folders |= {topic, os.path.dirname(topic)}
        # Folders stay out that are gone with their queues, or were never made, because no entry has an extension.
        return {folder for folder in folders if is_folder(self._case.files, folder)}

    def _rewrite_entries(self, queue: ConsumeQueue, first: int) -> None:
        """Write the last entries of a queue again, the checked ones from ``first`` on, like the log's last bytes."""
        if queue.max_physic_offset > self._uncovered_from:
            is_near = queue.max_offset - first < COMPARED
            queue.write_again(first if is_near else offset_at_place(queue, self._uncovered_from))

    def _write_again(self) -> set[str]:
        """Write uncovered bytes again, because the writer can have died before a flush; return the folders to flush."""
        case, log, begin = self._case, self._parts.log, self._uncovered_from
        log.sequence.write_again(begin, log.end)
        folders = {case.path}
        # Write index files again that no checkpoint covers, because nothing says that they reached the disk. Without a
        # complete check these files are rebuilt instead; at a mark a flush is enough.
        for file in uncovered_index_files(self._parts) if case.is_thorough or case.mark is not None else ():
            if case.is_thorough:
                file.write_again()
            else:
                file._note_unflushed()
            folders.add(self._parts.index.folder)
        return folders

    def _cut_log(self, end: LogEnd, cut: int) -> None:
        case, log = self._case, self._parts.log
        if cut:
            why = f"no record: {end.damage.what}" if end.damage else "bytes after the last record"
            if not case.is_preview:
                from librmq.store.recovery.salvage import keep_cut

                keep_cut(case.path, log, end.physical_offset, cut, why, case.files, case.clock.now_ms())
            path = log.sequence.path_at(end.physical_offset)
            self._parts.recovered.cuts.append(Damage(path, end.physical_offset, "record", why, cut))
        if case.is_preview:
            # A preview only moves the end. Truncating would copy all that follows, possibly gigabytes, into memory.
            log.end = end.physical_offset
        elif cut or log.sequence.end > end.physical_offset + log.file_size:
            log.truncate(end.physical_offset)
            log.last_write = end.last_record

    def cut_queue(self, queue: ConsumeQueue) -> None:
        """Cut a queue's entries ahead of the log; a queue that is opened later is cut then."""
        parts = self._parts
        if queue.max_physic_offset > parts.log.end:
            cut = queue.truncate_after(parts.log.end)
            path, position = queue.place_of(queue.max_offset)
            parts.recovered.cuts.append(Damage(path, position, "ahead", f"{cut} entries ahead of the log", 20 * cut))
        if parts.log.begin:
            queue.advance(parts.log.begin)

    def _reconcile_from(self) -> tuple[int, Scope]:
        """Return the place from which records are compared with the index, and the records to compare with queues."""
        case, parts, log = self._case, self._parts, self._parts.log
        if case.is_thorough:
            absent_before = dispatched(parts.queues, log) if case.keeps_deleted else 0
            return log.begin, self._scope(log.begin, absent_before)
        if case.recovered.is_brief or case.mark is not None:
            return case.begin, Scope(case.begin)
        if {_MISSING_ONE, _NO_RECORD} & {*self._stale.values()}:
            self._before_index()
        for file, which in self._stale.items():  # they are made again
            parts.recovered.cuts.append(Damage(file.path, 0, "ahead", f"an index file {which}, made again"))
            parts.index.delete(file.name)
        begin, scope = case.begin, Scope(case.begin)
        if case.is_clean:
            end = dispatched(parts.queues, log)
            begin = end if case.changed_queues is None else log.begin
            scope = Scope(end, case.changed_queues or frozenset())
        begin = max(min(begin, parts.index.end_physical_offset), log.begin)
        if begin < scope.begin and not case.is_clean:  # what is read for the index is compared with queues too
            scope = self._scope(begin, scope.begin)
        return begin, scope

    def _scope(self, begin: int, absent_before: int) -> Scope:
        return Scope(begin, since=recreated(self._parts.queues, self._parts.log), absent_before=absent_before)

    def _lacking_queues(self, scope: Scope) -> frozenset[QueueName]:
        """Return the queues that lack a file, which a comparison of this scope would not see."""
        case, parts = self._case, self._parts
        if case.is_thorough or case.mark is not None or not parts.queues:  # the mark knows the files
            return frozenset()
        from librmq.store.recovery.missing_files import lacking_queues

        # After a clean end without a note a broker may not have come to the last entries, which are no loss then.
        is_asked = not case.is_clean and scope.begin - parts.log.begin <= WORTH_A_MARK

        def may_lack_end(name: QueueName, end: int) -> bool:
            folder = directory.queue_folder(case.path, *name)
            was_cut = any(cut.kind == "ahead" and os.path.dirname(cut.file) == folder for cut in parts.recovered.cuts)
            return is_asked or was_cut or end < case.noted.get(name, 0) or (case.is_clean and not end)

        names = lacking_queues(case.path, case.files, parts.log, parts.queues, parts.levels, scope.begin, may_lack_end)
        return names - scope.all_of

    def _widened(self, scope: Scope, names: frozenset[QueueName]) -> tuple[int, Scope]:
        """Return the log's start, and a scope with all records of some queues."""
        begin = self._parts.log.begin
        return begin, replace(scope, all_of=scope.all_of | names) if self._case.is_clean else Scope(begin)

    def _before_index(self) -> None:
        if self._case.mark is not None:
            raise MarkError("the key index does not fit the log")
        self._parts.checkpoint._clear_index_time()

    def _reconcile(self, begin: int, scope: Scope) -> None:
        from librmq.store.recovery._log_comparison import Reconciliation
        from librmq.store.recovery._queue_check import GapError

        case, parts = self._case, self._parts
        comparison = Reconciliation(
            log=parts.log,
            queues=parts.queues,
            open_queue=parts.open_queue,
            index=None if case.recovered.is_brief else parts.index,
            levels=parts.levels,
            has_ext=case.config.enable_consumequeue_ext,
            bitmap_of=parts.dispatcher.bitmap_of,
            before_rebuild=self._before_index,
            after_check=None if case.is_clean or case.is_preview else self._rewrite_entries,
            is_thorough=case.is_thorough,
            bodies_from=case.begin if case.reads_bodies else None,
        )
        while True:
            damages: list[Damage] = []
            try:
                damages.extend(comparison.run(begin, scope))
            except GapError as gap:
                parts.recovered.cuts += [damage for damage in damages if damage.kind == directory.LOST]
                if case.mark is not None:
                    raise MarkError("queue {1} of topic {0} lacks entries".format(*gap.name)) from None
                begin, scope = self._widened(scope, frozenset([gap.name]))
            except CorruptionError as error:
                if error.file != parts.log.sequence.path_at(error.offset):
                    raise
                self._end_before(error, damages)
            else:
                parts.recovered.cuts += damages
                return

    def _end_before(self, error: CorruptionError, damages: Iterable[Damage]) -> None:
        """End the log before a record with an impossible queue; ``damages`` were found before it.

        Raises:
            CorruptionError: Only a person may cut there, by `recover`: no crash explains the damage, or the checkpoint
                covers the record, which so was durable.
        """
        case, parts = self._case, self._parts
        end, cut = LogEnd(error.offset, error), parts.log.data_behind(error.offset)
        if not case.is_thorough:
            self._check_cut(end, cut)
            if error.offset < case.begin and not case.is_preview:
                raise error
        parts.recovered.cuts += damages
        self._cut_log(end, cut)
        for queue in parts.queues.values():
            self.cut_queue(queue)
