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

import dataclasses
import enum
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.consumequeue import ConsumeQueue
from librmq.files import Damage, Files
from librmq.formatting import moment
from librmq.runtime.event_log import counted
from librmq.store.engine.saved_state import noted_ends, was_copied
from librmq.store.engine.store_parts import Parts, QueueName
from librmq.store.format._checkpoint import Checkpoint
from librmq.store.format.directory import LOST, MISSING_LOG, has_abort
from librmq.store.recovery._log_end import beyond_checkpoint
from librmq.store.recovery.missing_files import missing_first_files

_QUEUES_SHOWN: Final = 5
_WHOLE: Final = "no message is missing, but no writer opens the store until {}"


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
    gaps: Sequence[Damage] = ()
    """What the log lacks between other bytes, and files that are none of it."""
    derived: Sequence[Damage] = ()
    """Damaged files of queues, index and checkpoint, which the view has made again in memory from the log, the entries
    of messages that are lost, and the ``record`` at which it could not read on. It grows when the view opens another
    damaged queue."""

    @property
    def lost(self) -> tuple[Damage, ...]:
        """Where the log lacks messages."""
        gaps = [gap for gap in self.gaps if gap.kind == MISSING_LOG]
        lost = [damage for damage in self.derived if damage.kind in ("record", LOST)]
        return tuple(damage for damage in (self.cut, self.begin, *gaps, *lost) if damage is not None)

    @property
    def damage(self) -> tuple[Damage, ...]:
        """What makes the store short."""
        lost = dict.fromkeys(self.lost)
        return (*lost, *(damage for damage in (*self.gaps, *self.derived) if damage not in lost))


def condition_of(path: str, parts: Parts, config: StoreConfig, files: Files, *, is_written: bool) -> Condition:
    """Return the condition of the store in ``path``, by its parts as a recovery would leave them in memory.

    Of a store that is being written, or whose queues are in no files, only what the log lacks counts.
    """
    log = parts.log
    cut = cut_before_records(log, parts.recovered.cuts)
    gaps = [_with_messages(gap, parts) for gap in log.gaps]
    was_closed, note = not has_abort(files, path), ""
    whole = Wholeness.SOUND if was_closed or is_written else Wholeness.RECOVERABLE
    if is_written or not parts.queues.has_files:
        if cut is None and not is_written:
            cut, note = cut_before_covered(path, log, parts.checkpoint, files, was_closed=was_closed)
        return Condition(Wholeness.SHORT if cut or gaps else whole, cut, note=note, gaps=gaps)
    of_end = next((number for number, gap in enumerate(gaps) if gap.bytes and gap.offset >= log.end), None)
    if cut is None:
        has_log = bool(log.sequence.starts)  # a kill leaves the files of a log whose entries are there
        cut = _cut_before_entries(parts, config, files) if was_closed or not has_log else None
    if cut is None:
        cut, note = cut_before_covered(path, log, parts.checkpoint, files, was_closed=was_closed)
    begin, begin_note = missing_first_files(path, log, files, config, was_closed=was_closed)
    unseen = f"queues, which can lack last entries, were compared with the log from {parts.recovered.compared_from} on"
    unseen = "" if was_closed or parts.recovered.knows_ends else f"{unseen}; librmq verify compares all"
    note = "; ".join(filter(None, (note, begin_note, unseen)))
    if of_end is not None:  # a copy of the last file was not completed
        gap, ends = log.gaps[of_end], [noted.log_end for noted in noted_ends(path, files)]
        if cut is not None:
            cut = dataclasses.replace(cut, what=f"{gap.file}: {gap.what}; {cut.what}")
            del gaps[of_end]
        elif log.end in (*ends, *[parts.queues.max_physic_offset] * was_closed):
            is_empty = gap.bytes == log.file_size
            remedy = "librmq recover has deleted the file" if is_empty else "the file has been copied again"
            gaps[of_end] = dataclasses.replace(gap, kind="size", what=f"{gap.what}: {_WHOLE.format(remedy)}")
    begin = begin and _with_messages(begin, parts)
    is_short = cut is not None or begin is not None or gaps or parts.recovered.repairs
    return Condition(Wholeness.SHORT if is_short else whole, cut, begin, note, gaps, parts.recovered.repairs)


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
    from librmq.store.recovery.salvage import find_record  # few stores are damaged

    following = find_record(log.sequence, at + max(log.unfinished_at(at), 1), at + cut.bytes)
    if following is None or (cut not in cuts and log.walk(at).physical_offset != at):  # the writer is there now
        return None
    return cut


def _cut_before_entries(parts: Parts, config: StoreConfig, files: Files) -> Damage | None:
    """Return as damage that queues of a closed store lead beyond the log's end, which no crash explains."""
    end, lost = parts.queues.max_physic_offset, {}
    for cut in parts.recovered.cuts:
        folder = os.path.dirname(cut.file)
        if cut.kind == "ahead" and cut.bytes and os.path.basename(folder).isdigit():  # a recovery in memory cut a queue
            queue = ConsumeQueue.open(folder, config.consumequeue_file_size, files=files, writable=False)
            name = os.path.basename(os.path.dirname(folder)), int(os.path.basename(folder))
            lost[name] = range(parts.queues[name].max_offset, queue.max_offset)
            end = max(end, queue.max_physic_offset)
            queue.close()
    if end <= parts.log.end:
        return None
    return _with_messages(_lost_end(parts.log, f"queues have entries up to {end}"), parts, lost)


def cut_before_covered(
    path: str, log: CommitLog, checkpoint: Checkpoint, files: Files, *, was_closed: bool
) -> tuple[Damage | None, str]:
    """Return as damage that the log ends before a record that was flushed, or a note where a copy explains that.

    A copy that was made while the store was written can have older bytes of the log than of its other files.
    """
    what, is_of_copy = "", False
    for end in noted_ends(path, files):
        if end.log_end > log.end:
            what = f"{end.what} noted that it reached {end.log_end}"
            is_of_copy = end.by_flush and end.log_end <= log.sequence.end
            break
    if not what and not log.is_missing(log.end - 1) and (what := beyond_checkpoint(log, checkpoint)):  # a gap says more
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


def _entries_between(parts: Parts, gap: Damage) -> dict[QueueName, range]:
    """Return the entries of messages in a part of the log that is missing."""
    lost, states = {}, parts.queues.states()
    for name in parts.queues:
        if name in states and states[name].max_physic_offset <= gap.offset:
            continue  # a look at the others takes long where there are many
        queue = parts.queues[name]

        def place(at: int, queue: ConsumeQueue = queue) -> int:
            return int.from_bytes(queue.read(at, 1)[:8])

        first, end = queue.stored_begin, queue.max_offset
        first = bisect_left(range(end), gap.offset, first, key=place)
        last = bisect_left(range(end), gap.offset + gap.bytes, first, key=place)
        if not parts.queues.has_files and (next_message := queue.first_message(last)) is not None:
            last = next_message[0]  # holes before a message stand for those that the log lacks
        lost[name] = range(first, last)
    return {name: offsets for name, offsets in lost.items() if offsets}


def _with_messages(gap: Damage, parts: Parts, lost: Mapping[QueueName, range] | None = None) -> Damage:
    """Say of a part of the log that is missing when its messages were stored, and which queues have entries of them."""
    if lost is None:
        if not gap.bytes:
            return gap
        lost = _entries_between(parts, gap)
    times: dict[str, list[int]] = {"after": [], "before": []}
    if gap.offset >= parts.log.end and parts.log.last_write is not None:
        times["after"] += filter(None, [parts.log.store_timestamp_ms(parts.log.last_write)])
    for name, offsets in lost.items():
        for side, at in (("after", offsets.start - 1), ("before", offsets.stop)):
            queue = parts.queues[name]
            entry = queue.entry(at) if queue.min_offset <= at < queue.max_offset else None
            stored = None if entry is None else parts.log.store_timestamp_ms(entry.physical_offset, entry.size)
            times[side] += [] if stored is None else [stored]
    bounds = [("after", max(times["after"], default=None)), ("before", min(times["before"], default=None))]
    when = " and ".join(f"{side} {moment(at)}" for side, at in bounds if at is not None)
    queues = [f"{topic}/{queue_id} {ids.start}-{ids.stop - 1}" for (topic, queue_id), ids in sorted(lost.items())]
    more = [f"and {counted(len(queues) - _QUEUES_SHOWN, 'more queue')}"] if queues[_QUEUES_SHOWN:] else []
    queue_names = f" ({', '.join(queues[:_QUEUES_SHOWN] + more)})" if queues else ""
    count = counted(sum(map(len, lost.values())), "message") if lost else "an unknown number of messages"
    if lost and not parts.queues.has_files:  # of a queue without earlier or later messages nothing is known
        count = f"at least {count}"
    what = f"{gap.what}: without {count}{queue_names}, stored {when or 'at an unknown time'}"
    return dataclasses.replace(gap, what=what)
