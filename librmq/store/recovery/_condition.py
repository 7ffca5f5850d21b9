"""The condition of a store that is only read: sound, recoverable, or short of what it had.

::

    sound         closed, and nothing that its files promise is missing
    recoverable   a kill, or a copy of a running store, left it; the next opening cuts only what neither the
                  checkpoint nor the mark of a flush covers
    short         records are missing, sound ones follow the log's end, or a file that the log can make again is
                  damaged: `Condition.damage` says what

A store that cannot be opened at all is refused by `CorruptionError`. Commands, columns, Spark and the diagnosis ask
here, so that they agree.

What covers a record is the promise that it reached the device: the checkpoint by the time at which it was stored, the
mark of the last flush and the note of the last close by its place. The queues of a closed store cover their entries;
those of a killed one do not, because the log's pages can be lost when the queues' pages are not.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from typing import NamedTuple

from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.consumequeue import ConsumeQueue
from librmq.files import Damage, Files
from librmq.store.engine.saved_state import missing_first_files, noted_ends, was_copied
from librmq.store.engine.store_parts import Parts
from librmq.store.format.directory import has_abort
from librmq.store.recovery.log_end import beyond_checkpoint
from librmq.store.recovery.salvage import find_record


class Wholeness(enum.Enum):
    """How whole a store is."""

    SOUND = "sound"
    """Nothing is missing."""
    RECOVERABLE = "recoverable"
    """A kill, or a copy of a running store, left it, and the next opening repairs it. What that cuts was never promised
    to be on the device."""
    SHORT = "short"
    """Files or records are missing that were promised, or queues, index or checkpoint are damaged."""


class Condition(NamedTuple):
    """How whole a store is, and what is missing."""

    kind: Wholeness
    """How whole the store is."""
    cut: Damage | None = None
    """Where the log ends although records follow or are missing there. Its ``bytes`` go up to the last nonzero one, and
    are 0 if nothing follows."""
    begin: Damage | None = None
    """The first files of the log, if they are missing and retention did not delete them."""
    note: str = ""
    """What may be missing: files, where a kill explains it too (`missing_first_files`), or entries not compared."""
    derived: Sequence[Damage] = ()
    """Damaged files of queues, index and checkpoint, which the view has made again in memory from the log, and
    the ``record`` at which it could not read on. It grows when the view opens another damaged queue."""

    @property
    def lost(self) -> tuple[Damage, ...]:
        """Where the log lacks messages."""
        lost = [damage for damage in self.derived if damage.kind == "record"]
        return tuple(damage for damage in (self.cut, self.begin, *lost) if damage is not None)

    @property
    def damage(self) -> tuple[Damage, ...]:
        """What makes the store short."""
        return (*self.lost, *(damage for damage in self.derived if damage.kind != "record"))


def condition_of(path: str, parts: Parts, config: StoreConfig, files: Files, *, is_written: bool) -> Condition:
    """Return the condition of the store in ``path``, by its parts as a recovery would leave them in memory.

    Of a store that is being written, or whose queues are in no files, only what follows the log's end counts.
    """
    log = parts.log
    cut = cut_before_records(log, parts.cuts)
    if is_written:
        return Condition(Wholeness.SOUND if cut is None else Wholeness.SHORT, cut)
    was_closed = not has_abort(files, path)
    if cut is None:
        has_log = bool(log.sequence.starts)  # a kill leaves the files of a log whose entries are there
        cut = _cut_before_entries(parts, config, files) if was_closed or not has_log else None
    cut, note = (cut, "") if cut is not None else _cut_before_covered(path, parts, files, was_closed=was_closed)
    begin, begin_note = missing_first_files(path, log, files, config, was_closed=was_closed)
    unseen = f"queues, which can lack last entries, were compared with the log from {parts.compared_from} on"
    unseen = "" if was_closed or parts.knows_ends else f"{unseen}; librmq verify compares all"
    note = "; ".join(filter(None, (note, begin_note, unseen)))
    if cut is not None or begin is not None or parts.repairs:
        return Condition(Wholeness.SHORT, cut, begin, note, parts.repairs)
    return Condition(Wholeness.SOUND if was_closed else Wholeness.RECOVERABLE, None, None, note, parts.repairs)


def cut_before_records(log: CommitLog, cuts: Sequence[Damage]) -> Damage | None:
    """Return the damage at the log's end that sound records follow; ``cuts`` are those of a recovery in memory.

    A record that a writer is just writing, or has left unfinished, does not count as damage.
    """
    at = log.end
    cut = next((earlier for earlier in reversed(cuts) if earlier.kind == "record" and earlier.offset == at), None)
    if cut is None:  # no recovery in memory has looked behind the end
        damage = log.walk(at).damage
        if damage is None:
            return None
        cut = Damage(damage.file, at, damage.kind, damage.what, log.data_behind(at))
    following = find_record(log.sequence, at + max(log.unfinished_at(at), 1), at + cut.bytes)
    if following is None or (cut not in cuts and log.walk(at).physical_offset != at):  # the writer is there now
        return None
    return cut


def _cut_before_entries(parts: Parts, config: StoreConfig, files: Files) -> Damage | None:
    """Return as damage that queues of a closed store lead beyond the log's end, which no crash explains."""
    end = parts.queues.max_physic_offset
    for cut in parts.cuts:
        if cut.kind == "ahead" and cut.bytes:  # a recovery in memory has cut the queue
            folder = os.path.dirname(cut.file)
            queue = ConsumeQueue.open(folder, config.consumequeue_file_size, files=files, writable=False)
            end = max(end, queue.max_physic_offset)
            queue.close()
    return None if end <= parts.log.end else _lost_end(parts.log, f"queues have entries up to {end}")


def _cut_before_covered(path: str, parts: Parts, files: Files, *, was_closed: bool) -> tuple[Damage | None, str]:
    """Return as damage that the log ends before a record that was flushed, or a note where a copy explains that.

    A copy that was made while the store was written can have older bytes of the log than of its other files.
    """
    log, what, is_of_copy = parts.log, "", False
    for end in noted_ends(path, files):
        if end.log_end > log.end:
            what = f"{end.what} noted that it reached {end.log_end}"
            is_of_copy = end.by_flush and end.log_end <= log.sequence.end
            break
    if not what and (what := beyond_checkpoint(parts)):
        is_of_copy = True
    if not what:
        return None, ""
    if is_of_copy and not was_closed and was_copied(path, files):
        return (
            None,
            f"{what}, beyond the log's end: this copy was made while a process wrote, or has lost its end since",
        )
    return _lost_end(log, what), ""


def _lost_end(log: CommitLog, what: str) -> Damage:
    return Damage(log.sequence.path_at(log.end), log.end, "ahead", f"{what}, beyond the log's end")
