"""What a recovery is going to change, decided before anything is changed.

The walk that finds the log's end looks at each record once. After an unclean exit the first record that did not reach
the device whole ends the log. Mirrors 4.9.4's ``recoverNormally`` and ``recoverAbnormally``, but does not cut sound
records for a damage that no crash explains, unless it is asked for.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from librmq.commitlog import CommitLog, LogEnd
from librmq.errors import CorruptionError, MessageIllegalError
from librmq.java.hashing import java_decode
from librmq.message import record
from librmq.message.topics import validate_queue
from librmq.store.engine.open_store import Parts
from librmq.store.engine.queue_table import QueueName
from librmq.store.format.indexfile import IndexFile
from librmq.store.recovery import salvage

__all__ = ["Planner", "RecordLook", "RecoveryMode", "RecoveryPlan", "unvouched_index"]

_SECTOR: Final = 512
_WORD: Final = 8
_UNWRITTEN: Final = 16  # zeros at the end of a sector by which it is told that it was never written; headers have 15


class RecoveryMode(enum.Enum):
    """How far a recovery goes, and what it may cut."""

    LAST_EXIT = "what the last exit calls for"
    """Cut only what a crash explains; else the store is refused."""
    PREVIEW = "what the last exit calls for, in memory"
    """For a read-only view, in an `OverlayFiles`: the log ends at the first damage, and what is behind it stays."""
    WHOLE_LOG = "all of the log"
    """As the caller asked: cut at the first damage, and make again what has a wrong length or an impossible header."""
    LIVING = "all of the log of an open store"
    """`WHOLE_LOG` for a store that this process had open until now: no crash left a record as it is."""
    COPY = "all of the log of a copy"
    """`WHOLE_LOG`, but a queue without a folder stays away: its topic was deleted."""

    @property
    def is_thorough(self) -> bool:
        """Whether all of the log is looked at."""
        return self not in (RecoveryMode.LAST_EXIT, RecoveryMode.PREVIEW)


class Suspect(NamedTuple):
    """A record that a crash may have left in part."""

    physical_offset: int
    what: str
    is_nameless: bool
    """Whether it names no queue, so that it can't be served."""


class RecordLook:
    """What the walk over the log learns of each record after an unclean exit.

    Where a sector was not written there are zeros. In topic or properties they lead to no possible queue, or to zeros
    as `_is_torn` knows them. The latter are looked for behind the first record that the checkpoint does not vouch for.
    """

    def __init__(self, vouched_for_ms: int) -> None:
        self._vouched_for_ms = vouched_for_ms
        self._known: set[tuple[bytes, bool]] = set()
        self.unvouched: int | None = None
        """Where the first record is that the checkpoint does not vouch for."""
        self.suspects: list[Suspect] = []

    def __call__(self, log: CommitLog, physical_offset: int, raw: bytes) -> None:
        """Look at the next record."""
        if self.unvouched is None and record.store_timestamp_ms(raw) > self._vouched_for_ms:
            self.unvouched = physical_offset
        _, _, topic_at, topic_end, properties_at, _ = record.frame(raw, 0, len(raw))
        what = names_no_queue(raw, raw[topic_at:topic_end], self._known)
        if what is not None:
            self.suspects.append(Suspect(physical_offset, what, True))
        elif self.unvouched is not None and _is_torn(log, physical_offset, raw, properties_at):
            what = "its properties are zeros to the end of a sector"
            self.suspects.append(Suspect(physical_offset, what, False))


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """What a recovery is going to do to the log, and from where on it checks."""

    mode: RecoveryMode
    is_clean: bool
    """Whether the store was closed."""
    begin: int
    """Where the walk over the log began."""
    end: LogEnd
    """Where the log is going to end."""
    cut: int
    """How many bytes are going to be cut there."""
    unvouched_from: int
    """After an unclean exit: where the first record is that the checkpoint does not vouch for."""
    lost: frozenset[QueueName] | None
    """Queues that went or came since the store was closed; None if queues and index are as they were."""


class Planner:
    """Decides what a recovery may do to the parts of a store in folder ``path``; changes nothing."""

    def __init__(self, path: str, parts: Parts, mode: RecoveryMode, begin: int, *, is_clean: bool) -> None:
        self._path = path
        self._parts = parts
        self._mode = mode
        self._begin = begin
        self._clean = is_clean

    def plan(self, look: RecordLook, lost: frozenset[QueueName] | None) -> RecoveryPlan:
        """Return where the log is going to end, by what the walk over it found.

        `CorruptionError` if that would cut sound records that no crash explains, unless the mode is thorough.
        """
        log = self._parts.log
        end, unvouched = log.found_end, log.end
        if not self._clean:
            torn, unvouched = self._first_torn(look)
            end = torn or end
        cut = self._bytes_behind(end)
        if not self._mode.is_thorough:
            self.check_cut(end, cut)
            if not self._clean and self._mode is not RecoveryMode.PREVIEW:
                self._check_walk(end.physical_offset)
        return RecoveryPlan(self._mode, self._clean, self._begin, end, cut, unvouched, lost)

    def _first_torn(self, look: RecordLook) -> tuple[LogEnd | None, int]:
        """Return the first record that did not reach the device whole though its body did, and what is vouched for.

        A suspect that no crash explains is served, as by a broker: nothing but its body has a checksum. That can't be
        where it names no queue: `CorruptionError`, unless the mode is thorough.
        """
        log = self._parts.log
        unvouched = log.end if look.unvouched is None else look.unvouched
        for at, what, is_nameless in look.suspects:
            torn = LogEnd(at, CorruptionError(log.sequence.path_at(at), at, "record", what))
            if self._mode is not RecoveryMode.LIVING and self._explained_by_crash(at, log.sequence.end):
                return torn, min(unvouched, at)
            if is_nameless:
                if not self._mode.is_thorough:
                    self.check_cut(torn, log.data_behind(at))
                return None, min(unvouched, at)  # nothing behind it stays
        return None, unvouched

    def _check_walk(self, log_end: int) -> None:
        """Refuse what the walk over the log would refuse before where the log was looked at, while nothing is changed.

        It begins where the index ends that is left then. What an exit vouched for is cut only on demand.
        """
        log, index = self._parts.log, self._parts.index
        stale = unvouched_index(self._parts)
        left = [file for file in index.files if file not in stale and file.header.end_physical_offset < log_end]
        begin = max(left[-1].header.end_physical_offset, log.begin) if left else log.begin
        known: set[tuple[bytes, bool]] = set()
        for physical_offset, size, raw in log.scan(begin, min(self._begin, log_end), check_body=False):
            if raw is None:
                continue
            _, _, topic_at, topic_end, _, _ = record.frame(raw, 0, size)
            what = names_no_queue(raw, raw[topic_at:topic_end], known)
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
            or self._mode.is_thorough
            or any(queue.max_physic_offset > at for queue in parts.queues.values())
            or any(any(log.sequence.file(start).buffer[:8]) for start in log.sequence.starts if start > at)
        ):
            return log.data_behind(at)
        return 0  # nothing but zeros, which may be a gigabyte

    def check_cut(self, end: LogEnd, cut: int) -> None:
        """Refuse to cut sound records, unless a crash explains that they stand behind something else.

        It does where what was written last reached the device in another order: then records that no checkpoint vouched
        for stand behind a page or sector that was never written.
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


def unvouched_index(parts: Parts) -> Sequence[IndexFile]:
    """Return the index files that may not be whole on the device: behind the first that the checkpoint ends with."""
    files, limit = parts.index.files, parts.checkpoint.index_timestamp_ms
    for number, file in enumerate(files):
        end = file.header.end_timestamp_ms
        if not file.full or end > limit:
            return files[number:]
        if end == limit:
            return files[number + 1 :]
    return []


def names_no_queue(raw: bytes, topic: bytes, known: set[tuple[bytes, bool]]) -> str | None:
    """Return why a record names no possible queue, None if it names one; ``known`` are those looked at before."""
    name = topic, raw[record.QUEUE_ID_AT] > 127
    if name not in known:
        queue_id = int.from_bytes(raw[record.QUEUE_ID_AT : record.QUEUE_ID_AT + 4], "big", signed=True)
        try:
            validate_queue(java_decode(topic), queue_id)
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
