"""Comparison of the queues that a broker of 5.x keeps in RocksDB with the log.

A broker flushes these queues seldom, and adds what is missing at their ends when it starts. It can have begun to keep
them there after the log's first record. So only a difference between the first and the last entry of a queue is damage.
Entries of records that retention has deleted stay until RocksDB compacts them.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from itertools import groupby
from typing import Final

from librmq.commitlog import CommitLog
from librmq.errors import CorruptionError, MissingExtraError, RecordError
from librmq.files.interface import Damage, Files
from librmq.java.lang import java_decode
from librmq.message.batch import inner_messages, is_batch
from librmq.message.delay_levels import DelayLevels
from librmq.message.message import StoredMessage
from librmq.runtime.event_log import counted
from librmq.store.engine.dispatch import MULTI_DISPATCH, Derivation, light_queues
from librmq.store.format import directory
from librmq.store.format.rocksdb import StoredEntry, is_database, queue_entries

_MOST_DAMAGE: Final = 1_000
_CHECKPOINT_TOPIC: Final = "CHECKPOINT_TOPIC"


class QueuesOfLog:
    """Place and size of each message of each queue, by the log. Not thread-safe."""

    def __init__(self, log: CommitLog, levels: DelayLevels) -> None:
        """Read the whole log: 24 bytes of memory for each message."""
        self.begin, self.end = log.begin, log.end
        self._log = log
        self._queues: dict[tuple[str, int], tuple[array[int], array[int], array[int]]] = {}
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

    def places(self, topic: str, queue_id: int) -> dict[int, tuple[int, int]]:
        """Return place and size of the messages of a queue by queue offset."""
        columns = self._queues.get((topic, queue_id))
        return {} if columns is None else {at: (place, size) for at, place, size in zip(*columns, strict=True)}

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
    entries = behind = 0
    remaining = queues.names()
    for (topic, queue_id), stored in groupby(queue_entries(folder, files), lambda entry: entry[:2]):
        if topic == _CHECKPOINT_TOPIC:
            continue
        remaining.discard((topic, queue_id))
        places, last = queues.places(topic, queue_id), -1
        for entry in stored:
            entries += 1
            for missing in _between(places, last, entry.queue_offset) if last >= 0 else ():
                if len(damages) < _MOST_DAMAGE:
                    place, size = places[missing]
                    what = f"{topic}, queue {queue_id}: no entry for queue offset {missing}, a record at {place}"
                    damages.append(Damage(folder, missing, "missing", what, size))
            last = entry.queue_offset
            damages.extend(_damage_of(folder, entry, places, queues))
        behind += sum(1 for at in places if at > last)
    behind += sum(len(queues.places(*name)) for name in remaining)
    notes.append(f"queues in RocksDB: {entries} entries compared with the log")
    if behind:
        what = "have no entry in RocksDB yet: the broker adds them at its start"
        notes.append(f"{counted(behind, 'record')} of the log {what}")


def _between(places: dict[int, tuple[int, int]], last: int, following: int) -> list[int]:
    """Return the queue offsets of messages between two entries, however far these are apart."""
    if following - last <= len(places):
        return [at for at in range(last + 1, following) if at in places]
    return sorted(at for at in places if last < at < following)


def _damage_of(
    folder: str, entry: StoredEntry, places: dict[int, tuple[int, int]], queues: QueuesOfLog
) -> Iterator[Damage]:
    name = f"{entry.topic}, queue {entry.queue_id}, queue offset {entry.queue_offset}"
    if entry.physical_offset < queues.begin:
        return
    if entry.physical_offset >= queues.end:
        what = f"{name}: the entry leads to {entry.physical_offset}, beyond the log's end at {queues.end}"
        yield Damage(folder, entry.queue_offset, "ahead", what, entry.size)
    elif places.get(entry.queue_offset) != (entry.physical_offset, entry.size):
        found = places.get(entry.queue_offset)
        expected = "no such message" if found is None else f"{found[1]} bytes at {found[0]}"
        what = f"{name}: expected {expected} by the log, found {entry.size} bytes at {entry.physical_offset}"
        yield Damage(folder, entry.queue_offset, "entry", what, entry.size)
