"""The plan of a recovery, made before anything is changed.

The walk that finds the log's end checks each record once. After an unclean exit the first record that did not reach the
device completely ends the log. Mirrors 4.9.4's ``recoverNormally`` and ``recoverAbnormally``, but cuts sound records
only on demand if no crash explains the damage.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from librmq.commitlog import CommitLog, LogEnd
from librmq.errors import CorruptionError, MessageIllegalError
from librmq.java.lang import java_decode
from librmq.message import record
from librmq.message.topics import validate_queue
from librmq.store.engine.open_store import Parts, QueueName
from librmq.store.format.indexfile import IndexFile
from librmq.store.recovery import salvage

_SECTOR: Final = 512
_WORD: Final = 8
_UNWRITTEN: Final = 16  # zeros at the end of a sector that show that it was never written; headers have 15


class RecoveryMode(enum.Enum):
    """Extent of a recovery and its cuts."""

    LAST_EXIT = "as the last exit requires"
    """Cut only damage that a crash explains; otherwise refuse the store."""
    PREVIEW = "as the last exit requires, in memory"
    """For a read-only view, in an `OverlayFiles`: end the log at the first damage, and keep the bytes after it."""
    WHOLE_LOG = "all of the log"
    """On demand: cut at the first damage, and rebuild files with a wrong length or an impossible header."""
    LIVING = "all of the log of an open store"
    """`WHOLE_LOG` for a store that this process had open until now, so that no crash changed a record."""
    COPY = "all of the log of a copy"
    """`WHOLE_LOG`, but a queue without a folder stays deleted, like its topic."""

    @property
    def is_thorough(self) -> bool:
        """Whether the whole log is checked."""
        return self not in (RecoveryMode.LAST_EXIT, RecoveryMode.PREVIEW)


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
            topic_at = 89 + body_size if body_size > 0 else 89
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


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """Changes of a recovery to the log, and the start of its checks."""

    mode: RecoveryMode
    is_clean: bool
    """Whether the store was closed."""
    begin: int
    """Start of the walk over the log."""
    end: LogEnd
    """Planned end of the log."""
    cut: int
    """Number of bytes to cut there."""
    uncovered_from: int
    """After an unclean exit, the place of the first record that the checkpoint does not cover."""
    changed_queues: frozenset[QueueName] | None
    """Queues deleted or added since the store was closed; None if queues and index are unchanged."""


class Planner:
    """Planner of a recovery of the store in folder ``path``; it changes nothing."""

    def __init__(self, path: str, parts: Parts, mode: RecoveryMode, begin: int, *, is_clean: bool) -> None:
        self._path = path
        self._parts = parts
        self._mode = mode
        self._begin = begin
        self._clean = is_clean

    def plan(self, findings: WalkFindings, changed_queues: frozenset[QueueName] | None) -> RecoveryPlan:
        """Return the planned end of the log, by the findings of the walk.

        Raises:
            CorruptionError: This would cut sound records for damage that no crash explains, and the mode is not
                thorough.
        """
        log = self._parts.log
        end, uncovered = log.found_end, log.end
        if not self._clean:
            torn, uncovered = self._first_torn(findings)
            end = torn or end
        cut = self._bytes_behind(end)
        if not self._mode.is_thorough:
            self.check_cut(end, cut)
            if not self._clean and self._mode is not RecoveryMode.PREVIEW:
                self._check_walk(end.physical_offset)
        return RecoveryPlan(self._mode, self._clean, self._begin, end, cut, uncovered, changed_queues)

    def _first_torn(self, findings: WalkFindings) -> tuple[LogEnd | None, int]:
        """Return the first record that did not reach the device completely (but its body did), and the covered bytes.

        Like a broker, librmq delivers a suspect record that no crash explains, because only its body has a checksum.

        Raises:
            CorruptionError: The record names no queue, so it cannot be delivered, and the mode is not thorough.
        """
        log = self._parts.log
        uncovered = log.end if findings.uncovered is None else findings.uncovered
        for at, what, is_nameless in findings.suspects:
            torn = LogEnd(at, CorruptionError(log.sequence.path_at(at), at, "record", what))
            if self._mode is not RecoveryMode.LIVING and self._explained_by_crash(at, log.sequence.end):
                return torn, min(uncovered, at)
            if is_nameless:
                if not self._mode.is_thorough:
                    self.check_cut(torn, log.data_behind(at))
                return None, min(uncovered, at)  # nothing after it stays
        return None, uncovered

    def _check_walk(self, log_end: int) -> None:
        """Refuse, before any change, damage in the part of the log before the walk.

        The check begins at the end of the remaining index. Covered bytes are cut only on demand.
        """
        log, index = self._parts.log, self._parts.index
        stale = uncovered_index_files(self._parts)
        remaining = [file for file in index.files if file not in stale and file.header.end_physical_offset < log_end]
        begin = max(remaining[-1].header.end_physical_offset, log.begin) if remaining else log.begin
        checked: set[tuple[bytes, bool]] = set()
        for physical_offset, size, raw in log.scan(begin, min(self._begin, log_end), check_body=False):
            if raw is None:
                continue
            _, _, topic_at, topic_end, _, _ = record.frame(raw, 0, size)
            what = names_no_queue(raw, raw[topic_at:topic_end], checked)
            if what is not None:
                what += f": `librmq recover {self._path}` would cut the log here and keep the cut bytes aside"
                raise CorruptionError(log.sequence.path_at(physical_offset), physical_offset, "record", what)

    def _bytes_behind(self, end: LogEnd) -> int:
        """Return the number of bytes to cut; after a clean exit they are searched only if there is a hint of any."""
        parts = self._parts
        log, at = parts.log, end.physical_offset
        if (
            end.damage is not None
            or not self._clean
            or self._mode.is_thorough
            or any(queue.max_physic_offset > at for queue in parts.queues.values())
            or any(any(log.sequence.file(start).buffer[:8]) for start in log.sequence.starts if start > at)
        ):
            return log.data_behind(at)
        return 0  # only zeros, possibly a gigabyte

    def check_cut(self, end: LogEnd, cut: int) -> None:
        """Refuse to cut sound records, unless a crash explains the damage before them.

        A crash explains it if the last writes reached the device in another order: uncovered records are then after a
        page or sector that was never written.
        """
        if not cut or self._mode is RecoveryMode.PREVIEW:
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
            f"{what}, and sound records from {following} on, which no crash leaves. "
            f"`librmq recover {self._path}` would cut {cut} bytes here and keep them aside "
            f"(--dry-run shows it), `librmq salvage {self._path}` returns the sound records",
        )

    def _explained_by_crash(self, at: int, until: int) -> bool:
        """Return whether no sound record is after ``at``, or only uncovered ones after zeros.

        Records of an unfinished write at ``at`` do not count.
        """
        log = self._parts.log
        unfinished = 0 if self._clean else log.unfinished_at(at)
        following = salvage.find_record(log.sequence, at + max(unfinished, 1), until)
        if following is None:
            return True
        place = following % log.file_size
        stored_ms = record.store_timestamp_ms(log.sequence.file(following - place).buffer, place)
        is_covered = stored_ms <= self._parts.checkpoint.min_timestamp_ms
        return not self._clean and not is_covered and (unfinished > 0 or _may_be_unwritten(log, at, following))


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
    at, until = begin - start, min(end - start + 3, log.file_size)  # a record can begin with three zeros, in its size
    edges = itertools.chain(range(at - at % _SECTOR + _SECTOR, until + 1, _SECTOR), [until] * (until == log.file_size))
    if any(not any(buffer[max(at, edge - _UNWRITTEN) : edge]) for edge in edges):
        return True
    blank = (log.file_size - at).to_bytes(4, "big") + record.BLANK_MAGIC.to_bytes(4, "big")
    return blank.startswith(buffer[at : log.file_size].rstrip(b"\0"))  # part of it was written
