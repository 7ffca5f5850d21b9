"""What a broker makes of queues and index that lack files, at its start.

::

    store        the broker dispatches again                     so of a queue that lacks files
    closed       what is behind the last entry of all queues     the entries before that place stay lost
    killed       what its recovery reads of the log              the entries before that place stay lost

What a queue should have is what a reader makes again from the log (`librmq.store.recovery._condition`). Entries stay in
place: a broker gives the first message behind the lost ones its old queue offset, or begins again at 0. Mirrors
``ReputMessageService.setReputFromOffset`` and ``ConsumeQueue.recover``; 5.3.3's ``ConsumeQueue.correctMinOffset`` for
a last file without entries.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from librmq.config import StoreConfig
from librmq.consumequeue import ConsumeQueue
from librmq.consumequeue_entries import ENTRY_SIZE
from librmq.errors import CorruptionError, RmqError
from librmq.files import Damage, Files, file_size, is_folder
from librmq.runtime.event_log import counted
from librmq.store import MessageStore
from librmq.store.engine.store_parts import QueueName, QueueState
from librmq.store.format import directory

BATCH_ENTRY_SIZE: Final = 46
_PLACE: Final = struct.Struct(">qi")  # with which entries of both kinds begin


class LostPart(NamedTuple):
    """A file or folder that is missing, and what a broker does without it."""

    file: str
    what: str
    is_lost: bool
    """Whether the broker starts with less than the store had; otherwise it makes the part again."""


class QueuesAtStart:
    """Queues and index as a broker finds them. ``open_store()`` returns the store as a reader sees it."""

    def __init__(self, path: str, config: StoreConfig, files: Files, open_store: Callable[[], MessageStore]) -> None:
        self._path = path
        self._config = config
        self._files = files
        self._open_store = open_store

    def end(self) -> int:
        """Return where the entries in the files of queues, and of queues of batches, end in the log; -1 without any."""
        size = self._config.consumequeue_file_size
        ends = [-1]
        for folder in self.folders(directory.CONSUMEQUEUE):
            ends.append(self._end(folder, size, ENTRY_SIZE))
        for folder in self.folders(directory.BATCHCONSUMEQUEUE):
            ends.append(self._end(folder, None, BATCH_ENTRY_SIZE))
        return max(ends)

    def folders(self, name: str) -> Iterator[str]:
        """Yield the folders of queues in a folder of the store."""
        root = os.path.join(self._path, name)
        for topic in self._files.list(root):
            if topic.is_folder:
                for queue in self._files.list(os.path.join(root, topic.name)):
                    if queue.is_folder and queue.name.isdigit():
                        yield os.path.join(root, topic.name, queue.name)

    def _starts(self, folder: str) -> list[int]:
        return sorted(int(name) for name in self._files.names(folder) if len(name) == 20 and name.isdigit())

    def _end(self, folder: str, size: int | None, entry_size: int) -> int:
        """Return where the last entry in the files of a folder ends in the log, -1 without entries."""
        for start in reversed(self._starts(folder)):
            place = os.path.join(folder, f"{start:020}")
            length = file_size(self._files, place) or 0
            if size is not None and length != size:
                continue
            if count := self._count(place, length, entry_size):
                physical_offset, entry_length = self._entry(place, (count - 1) * entry_size)
                return physical_offset + entry_length
        return -1

    def _count(self, place: str, length: int, entry_size: int) -> int:
        """Return how many entries a file of this length has."""
        return bisect_left(
            range(length // entry_size), True, key=lambda number: self._entry(place, number * entry_size)[1] <= 0
        )

    def _entry(self, place: str, at: int) -> tuple[int, int]:
        raw = self._files.read(place, at, _PLACE.size)
        physical_offset, size = _PLACE.unpack(raw.ljust(_PLACE.size, b"\0"))
        return physical_offset, size

    def lost_parts(self, walk_start: int | None) -> list[LostPart]:
        """Return what is missing of log, queues and index.

        After a kill ``walk_start`` is where a broker's recovery begins; it is None for a closed store. What a reader
        can't open either is left out: other checks find its damage.
        """
        with suppress(RmqError):
            store = self._open_store()
            states = store.queues.states()
            complete = {name for name, state in states.items() if self._is_whole(name, state)}
            others = sorted(store.queues.keys() - complete)
            for name in others:
                store.queues[name]  # a damaged queue is made again in memory when it is opened
            condition = store.condition
            dispatched = self._dispatched(states, complete, others) if walk_start is None else walk_start
            dispatched = max(dispatched, store.log.begin)
            parts = [LostPart(damage.file, damage.what, is_lost=True) for damage in condition.lost]
            damaged: dict[QueueName, Damage] = {}
            for damage in condition.derived:
                names = os.path.relpath(damage.file, self._path).split(os.sep)
                if names[0] == directory.INDEX:
                    what = f"{damage.what}: the broker starts, and finds no message by the keys that were in it"
                    parts.append(LostPart(damage.file, what, is_lost=True))
                elif names[0] == directory.CONSUMEQUEUE and len(names) > 2 and names[2].isdigit():
                    damaged[names[1], int(names[2])] = damage
            for name in others:
                parts += self._lost_of_queue(store.queues[name], name, damaged.get(name), dispatched)
            return parts
        return []

    def _is_whole(self, name: QueueName, state: QueueState) -> bool:
        """Return whether the files of a queue have its entries, by their names and the last entry."""
        size, end = self._config.consumequeue_file_size, state.max_offset * ENTRY_SIZE
        folder = directory.queue_folder(self._path, *name)
        needed = range(state.min_offset * ENTRY_SIZE // size * size, end, size)
        if not needed or not set(needed) <= set(self._starts(folder)):
            return not needed and is_folder(self._files, folder)
        last = end - ENTRY_SIZE
        physical_offset, length = self._entry(os.path.join(folder, f"{last - last % size:020}"), last % size)
        return length > 0 and physical_offset + length == state.max_physic_offset

    def _dispatched(
        self, states: Mapping[QueueName, QueueState], complete: Collection[QueueName], others: Iterable[QueueName]
    ) -> int:
        """Return where the entries in the files of queues end in the log; -1 without any."""
        ends = [states[name].max_physic_offset for name in complete]
        size = self._config.consumequeue_file_size
        ends += [self._end(directory.queue_folder(self._path, *name), size, ENTRY_SIZE) for name in others]
        return max(ends, default=-1)

    def _lost_of_queue(
        self, queue: ConsumeQueue, name: QueueName, damage: Damage | None, dispatched: int
    ) -> Iterator[LostPart]:
        """Yield what the missing files of a queue cost a broker."""
        lost = self._lost_entries(queue, name, looks_into_last=damage is not None)
        before = sum(physical_offset < dispatched for physical_offset in lost)
        file = directory.queue_folder(self._path, *name) if damage is None else damage.file
        what = "files of the queue are missing" if damage is None else damage.what
        if before:
            what += f": the broker starts, and groups read on behind {counted(before, 'message')}"
            yield LostPart(file, what, is_lost=True)
        elif lost and damage is not None:
            yield LostPart(file, f"{what}: the broker makes the queue again from the log", is_lost=False)

    def _lost_entries(self, queue: ConsumeQueue, name: QueueName, *, looks_into_last: bool) -> list[int]:
        """Return the places of the messages whose entries are in no file, or not in the last one."""
        folder = directory.queue_folder(self._path, *name)
        starts = self._starts(folder)
        size, begin, end = self._config.consumequeue_file_size, queue.min_offset, queue.max_offset
        lost: list[int] = []
        for start in range(begin * ENTRY_SIZE // size * size, end * ENTRY_SIZE, size):
            first = max(begin, start // ENTRY_SIZE)
            if start in starts:
                if not looks_into_last or start != starts[-1]:
                    continue
                first = start // ENTRY_SIZE + self._count(os.path.join(folder, f"{start:020}"), size, ENTRY_SIZE)
            until = min(end, (start + size) // ENTRY_SIZE)
            entries = map(queue.entry, range(first, until))
            lost += [entry.physical_offset for entry in entries if entry is not None]
        return lost

    def empty_last_files(self, log_end: int) -> list[str]:
        """Return the last files of queues that hold no entry behind a full file, if a broker of 5.3 fails at them.

        It does if the log goes on behind all entries, so that it cuts no queue, and has no message for the queue.
        """
        size = self._config.consumequeue_file_size
        empty = list[str]()
        for folder in self.folders(directory.CONSUMEQUEUE):
            starts = self._starts(folder)
            if len(starts) < 2:
                continue
            last, before = (os.path.join(folder, f"{start:020}") for start in (starts[-1], starts[-2]))
            if self._entry(last, 0)[1] <= 0 < self._entry(before, size - ENTRY_SIZE)[1]:
                empty.append(last)
        if not empty or self.end() >= log_end:
            return []
        with suppress(RmqError):
            store = self._open_store()
            return [place for place in empty if not self._gets_entries(store, place)]
        return empty

    def _gets_entries(self, store: MessageStore, place: str) -> bool:
        topic, queue_id = place.split(os.sep)[-3:-1]
        with suppress(KeyError, CorruptionError):
            return store.queues[topic, int(queue_id)].max_offset * ENTRY_SIZE > int(os.path.basename(place))
        return False
