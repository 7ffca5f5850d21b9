"""What is compared with the log: the scope, and the queues, of which small ones that agree stay unopened."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from librmq.commitlog import CommitLog
from librmq.consumequeue import ConsumeQueue, offset_at_place
from librmq.consumequeue_entries import ENTRY, ENTRY_SIZE, HOLE_SIZE, PLACE
from librmq.errors import CorruptionError
from librmq.files import Files, FolderEntry, is_folder
from librmq.files.interface import read_sole_file
from librmq.files.rolling import MappedFileQueue, MappingPool, file_name, list_starts
from librmq.store.engine.derivation import COMPARED
from librmq.store.engine.store_parts import QueueName, QueueState, short_state
from librmq.store.format import directory
from librmq.store.recovery._entry_check import record_at

# A small queue that is as the log says is read without a mapping, and left unopened. Mapping takes most of the time
# that an opened queue costs, and a store can have many thousands.
_LARGEST: Final = 1 << 16  # a file with more bytes is mapped, not read at once
_LARGEST_KEPT: Final = 1 << 10  # at most so many bytes of a file are kept from its listing


@dataclass(frozen=True, slots=True)
class Scope:
    """Selection of the records to compare with their queues: those from physical offset ``begin`` on."""

    begin: int
    all_of: frozenset[QueueName] = frozenset()
    """Queues whose records are all selected."""
    since: Mapping[QueueName, int] = field(default_factory=dict)
    """Begin of queues whose earlier records belong to a deleted topic, as physical offsets."""
    absent_before: int = 0
    """Physical offset below which records of queues without a folder are excluded, because the queue was deleted."""
    known_topics: frozenset[str] = frozenset()
    """The broker's topics: records of other topics are excluded if the queue has no folder. Empty: no such rule."""


def _hides_entries(raw: bytes) -> bool:
    """Return whether the used bytes of a queue's file have an entry that is none, which would hide those behind it."""
    raw += bytes(-len(raw) % ENTRY_SIZE)  # the last entry can end in zeros
    places, sizes = raw[::ENTRY_SIZE], [raw[at::ENTRY_SIZE] for at in range(8, 12)]  # of each its bytes
    if max(places, default=0) > 127 or max(sizes[0], default=0) > 127:
        return True
    at = sizes[3].find(0)
    while at >= 0 and any(part[at : at + 1] != b"\0" for part in sizes):
        at = sizes[3].find(0, at + 1)
    return at >= 0


class ListedQueues:
    """The queues of the store in folder ``path``, listed after an unclean exit or for a verification."""

    def __init__(self, path: str, files: Files, file_size: int, pool: MappingPool) -> None:
        self._path = path
        self._files = files
        self._file_size = file_size
        self._pool = pool
        # The folder, and start and content of the only file, if it is one and was read, and no entry hides others.
        self._listed: dict[QueueName, tuple[str, int | None, bytes | None]] = {}
        self._ends: dict[QueueName, int] = {}  # where the messages of listed queues end
        self._left: set[str] = set()
        self._written: set[str] = set()
        self._overwritten: list[str] = []
        self.states: dict[QueueName, QueueState] = {}
        """Queues that agree with the log, and need not be opened."""
        self.uncovered_from: int | None = None
        """Place of the log from which on entries are written again; None: none are."""

    def list_files(self, name: QueueName) -> None:
        """List the files of a queue.

        Raises:
            CorruptionError: A file has a wrong name or length.
        """
        folder = directory.queue_folder(self._path, *name)
        only = read_sole_file(self._files, folder, self._file_size, _LARGEST)
        listed = self._files.list(folder) if only is None else [FolderEntry(only[0], self._file_size, False, True)]
        starts = list_starts(folder, self._file_size, listed)
        content = None if only is None or len(only[1]) > _LARGEST_KEPT else only[1]
        is_short = only is not None and len(starts) == 1 and not _hides_entries(only[1])
        self._listed[name] = folder, starts[0] if is_short else None, content
        if only is not None and only[1]:
            last = (len(only[1]) - 1) // ENTRY_SIZE * ENTRY_SIZE
            self._ends[name] = sum(PLACE.unpack(only[1][last : last + PLACE.size].ljust(PLACE.size, b"\0")))

    def try_list(self, name: QueueName) -> bool:
        """List the files of a queue, and return whether they can be opened."""
        with suppress(CorruptionError):
            self.list_files(name)
        return self.has_listed(name)

    def has_listed(self, name: QueueName) -> bool:
        """Return whether the queue's files are listed, and it was neither opened nor left unopened since."""
        return name in self._listed

    def end_of_whole(self, name: QueueName, log_end: int) -> int | None:
        """Return the end of the messages of a queue that is not opened yet, if its only file is the first one.

        None if the file has no room for more entries, because there can have been a next one. None too if the queue
        leads behind the log's end: damage can have made its last entry do so.
        """
        folder, start, content = self._listed.get(name, ("", None, None))
        known_to = self._ends.get(name, 0)
        if start != 0 or known_to > log_end:
            return None
        end = self._file_size - ENTRY_SIZE
        if content is not None:
            return known_to if len(content) <= end else None
        return None if any(self._files.read(os.path.join(folder, file_name(0)), end, ENTRY_SIZE)) else known_to

    def ends_of(self, name: QueueName, log_end: int) -> tuple[bytes, int] | None:
        """Return entry 0 of a queue that is not opened yet, empty if it is not stored, and the end of its messages.

        None if the queue must be opened for that, as if an entry is not sound, or leads behind the log's end.
        """
        _, start, content = self._listed.get(name, ("", None, None))
        state = short_state(start, content) if start is not None and content else None
        if state is None or content is None or state.max_physic_offset > log_end:
            return None
        return b"" if start else content[:ENTRY_SIZE].ljust(ENTRY_SIZE, b"\0"), state.max_physic_offset

    def recreated(self, queues: Mapping[QueueName, ConsumeQueue], log: CommitLog) -> dict[QueueName, int]:
        """Return the beginning of the records of each queue that counts from 0 again, by its first entry.

        A topic deleted on a broker leaves its records in the log. A new topic of that name counts from 0 again.
        """
        begins = {}
        for name in queues:
            ends = self.ends_of(name, log.end)
            raw = ends[0] if ends else queues[name].read(0, 1) if queues[name].stored_begin == 0 else b""
            place, size, _ = ENTRY.unpack(raw) if raw else (-1, 0, 0)
            message = record_at(log, place, size) if place > log.begin and size != HOLE_SIZE else None
            if message is not None and (message.topic, message.queue_id, message.queue_offset) == (*name, 0):
                begins[name] = place
        return begins

    def dispatched(self, queues: Mapping[QueueName, ConsumeQueue], log: CommitLog) -> int:
        """Return the place up to which the log was dispatched, whatever happened to some queues since."""
        ends = ((name, self.ends_of(name, log.end)) for name in queues)
        return max([log.begin, *(end[1] if end else queues[name].max_physic_offset for name, end in ends)])

    def pop_files(self, name: QueueName) -> MappedFileQueue | None:
        """Return the files of a queue that is opened now; None if it was left as it is, or is not listed."""
        if name not in self._listed:
            return None
        folder, *_ = self._listed.pop(name)
        return MappedFileQueue(folder, self._file_size, self._files, self._pool)

    def read_stored(self, name: QueueName) -> tuple[bytes, int] | None:
        """Return the used bytes of a queue's only file and its first queue offset; None if it must be opened."""
        folder, start, stored = self._listed.get(name, ("", None, None))
        if start is None:
            return None
        if stored is None:
            stored = self._files.read_used(f"{folder}{os.sep}{file_name(start)}", _LARGEST)
        return None if stored is None else (stored, start // ENTRY_SIZE)

    def keep_unopened(self, name: QueueName, state: QueueState, first: int, entries: Sequence[bytes]) -> None:
        """Leave the queue unopened that was read last, and write its last entries again if need be.

        They begin at queue offset ``first``: the writer can have died before a flush, or after one that failed.
        """
        folder, start, _ = self._listed.pop(name)
        assert start is not None
        if entries and self.uncovered_from is not None and state.max_physic_offset > self.uncovered_from:
            path = f"{folder}{os.sep}{file_name(start)}"
            self._files.overwrite(path, first * ENTRY_SIZE - start, b"".join(entries))
            self._overwritten.append(path)
            self._written.add(folder)
        self._left.add(folder)
        self.states[name] = state

    def rewrite_entries(self, queue: ConsumeQueue, first: int) -> None:
        """Write entries of an opened queue again, as `keep_unopened` does; ``first`` is the first checked one."""
        begin = self.uncovered_from
        if begin is not None and queue.max_physic_offset > begin:
            queue.write_again(first if queue.max_offset - first < COMPARED else offset_at_place(queue, begin))
            self._written |= {queue.folder} if queue.ext is None else {queue.folder, queue.ext.folder}
        queue.unmap_all()

    def flush_overwritten(self) -> None:
        """Flush the files of unopened queues that were written again."""
        for path in self._overwritten:
            self._files.flush(self._files.open(path, writable=True))

    def folders(self, opened: Iterable[ConsumeQueue]) -> set[str]:
        """Return the folders that can have unflushed names, those of ``opened`` queues among them."""
        folders = set(self._left)
        for queue in opened:
            folders |= {queue.folder} if queue.ext is None else {queue.folder, queue.ext.folder}
        for topic in map(os.path.dirname, self._written):
            folders |= {topic, os.path.dirname(topic)}
        # Folders stay out that are gone with their queues, or were never made, because no entry has an extension.
        # Files can have been deleted from the others.
        return {folder for folder in folders if is_folder(self._files, folder)}
