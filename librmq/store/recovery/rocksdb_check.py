"""Comparison of the queues that a broker of 5.x keeps in RocksDB with the log.

A broker flushes these queues seldom, and adds what is missing at their ends when it starts. It can have begun to keep
them there after the log's first record. So only a difference between the first and the last entry of a queue is damage.
Entries of records that retention has deleted stay until RocksDB compacts them.
"""

from __future__ import annotations

import os
from array import array
from itertools import groupby, islice
from operator import gt
from typing import Final

from librmq.commitlog import CommitLog
from librmq.errors import CorruptionError, MissingExtraError, RecordError
from librmq.files.interface import Damage, Files
from librmq.java.lang import java_decode
from librmq.message.batch import inner_messages, is_batch
from librmq.message.delays import DelayLevels
from librmq.message.message import StoredMessage
from librmq.runtime.event_log import counted
from librmq.store.engine.dispatch import MULTI_DISPATCH, Derivation, light_queues
from librmq.store.format import directory
from librmq.store.format.rocksdb import StoredEntry, is_database, queue_entries

_MOST_DAMAGE: Final = 1_000
Columns = tuple["array[int]", "array[int]", "array[int]"]
_CHECKPOINT_TOPIC: Final = "CHECKPOINT_TOPIC"


class QueuesOfLog:
    """Place and size of each message of each queue, by the log. Not thread-safe."""

    def __init__(self, log: CommitLog, levels: DelayLevels) -> None:
        """Read the whole log: 24 bytes of memory for each message."""
        self.begin, self.end = log.begin, log.end
        self._log = log
        self._queues: dict[tuple[str, int], Columns] = {}
        derivation = Derivation(levels)
        for place, size, raw in log.scan(check_body=False):
            if raw is None:
                continue
            derived = derivation.derive(place, size, raw)
            _, _, _, topic, queue_id, queue_offset, code, _, properties, _, _ = derived
            if code is None:
                continue
            count = 1
            if is_batch(message := StoredMessage(raw)):
                try:
                    count = len(inner_messages(message))
                except RecordError:
                    continue
            for number in range(count):
                self._add(java_decode(topic), queue_id, queue_offset + number, place, size)
            if MULTI_DISPATCH in properties:
                for name, light_id, light_offset in light_queues(topic, queue_id, properties):
                    self._add(name, light_id, light_offset, place, size)

    def _add(self, topic: str, queue_id: int, queue_offset: int, place: int, size: int) -> None:
        columns = self._queues.setdefault((topic, queue_id), (array("q"), array("q"), array("q")))
        for column, value in zip(columns, (queue_offset, place, size), strict=True):
            column.append(value)

    def columns(self, topic: str, queue_id: int) -> Columns:
        """Return queue offset, place and size of the messages of a queue, in order of the queue offsets."""
        columns = self._queues.get((topic, queue_id))
        if columns is None:
            return array("q"), array("q"), array("q")
        offsets, places, sizes = columns
        if any(map(gt, offsets, islice(offsets, 1, None))):  # written again by an earlier crash, or a copied log
            order = sorted(range(len(offsets)), key=offsets.__getitem__)
            return tuple(array("q", map(column.__getitem__, order)) for column in columns)  # type: ignore[return-value]
        return offsets, places, sizes

    def names(self) -> set[tuple[str, int]]:
        """Return topic and id of each queue."""
        return set(self._queues)


def compare_queues(
    path: str, log: CommitLog, levels: DelayLevels, files: Files
) -> tuple[list[Damage], list[str], bool]:
    """Return where the queues in RocksDB differ from the log, remarks, and whether they were compared."""
    has_compared = False
    damages: list[Damage] = []
    notes: list[str] = []
    for name in (directory.CONSUMEQUEUE_ROCKSDB, directory.CONSUMEQUEUE):
        folder = os.path.join(path, name)
        if is_database(folder, files):
            try:
                _compare(folder, QueuesOfLog(log, levels), files, damages, notes)
                has_compared = True
            except MissingExtraError as error:
                notes.append(f"its queues in RocksDB were not compared with the log: {error}")
            except CorruptionError as error:
                damages.append(Damage(error.file, error.offset, error.kind, error.what))
    return damages[:_MOST_DAMAGE], notes, has_compared


def _compare(folder: str, queues: QueuesOfLog, files: Files, damages: list[Damage], notes: list[str]) -> None:
    count = behind = 0
    remaining = queues.names()
    for name, entries in groupby(queue_entries(folder, files), lambda entry: entry[:2]):
        if name[0] == _CHECKPOINT_TOPIC:
            continue
        remaining.discard(name)
        offsets, places, sizes = queues.columns(*name)
        at, is_first = 0, True
        for entry in entries:
            count += 1
            while at < len(offsets) and offsets[at] < entry.queue_offset:
                if not is_first and len(damages) < _MOST_DAMAGE:
                    what = f"{_named(name[0], name[1], offsets[at])}: no entry leads to the record at {places[at]}"
                    damages.append(Damage(folder, offsets[at], "missing", what, sizes[at]))
                at += 1
            records = []
            while at < len(offsets) and offsets[at] == entry.queue_offset:
                records.append((places[at], sizes[at]))
                at += 1
            if len(damages) < _MOST_DAMAGE and (damage := _damage_of(folder, entry, records, queues)) is not None:
                damages.append(damage)
            is_first = False
        behind += len(offsets) - at
    behind += sum(len(queues.columns(*name)[0]) for name in remaining)
    notes.append(f"queues in RocksDB: {count:,} entries compared with the log")
    if behind:
        what = "have no entry in RocksDB yet: the broker adds them at its start"
        notes.append(f"{counted(behind, 'record')} of the log {what}")


def _named(topic: str, queue_id: int, queue_offset: int) -> str:
    return f"{topic}, queue {queue_id}, queue offset {queue_offset}"


def _damage_of(folder: str, entry: StoredEntry, records: list[tuple[int, int]], queues: QueuesOfLog) -> Damage | None:
    """Return what is wrong with an entry, by place and size of the records at its queue offset."""
    name = _named(*entry[:3])
    if entry.physical_offset < queues.begin or (entry.physical_offset, entry.size) in records:
        return None
    if entry.physical_offset >= queues.end:
        what = f"{name}: the entry leads to {entry.physical_offset}, beyond the log's end at {queues.end}"
        return Damage(folder, entry.queue_offset, "ahead", what, entry.size)
    expected = f"{records[0][1]} bytes at {records[0][0]}" if records else "no such message"
    what = f"{name}: expected {expected} by the log, found {entry.size} bytes at {entry.physical_offset}"
    return Damage(folder, entry.queue_offset, "entry", what, entry.size)
