"""What is derived from a log that this process has copied or made, before others know the store."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Final

from librmq.clock import Clock
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.consumequeue_entries import ENTRY, ENTRY_SIZE
from librmq.errors import CorruptionError, MessageIllegalError
from librmq.files import Damage, Files
from librmq.files.interface import flush_all, make_folders
from librmq.files.rolling import file_name
from librmq.java.lang import java_decode
from librmq.message import DelayLevels
from librmq.message.topics import validate_queue
from librmq.store.engine._durability import MANY_FILES
from librmq.store.engine.derivation import Derivation, DerivedBlock
from librmq.store.engine.store_parts import PartFiles, QueueName
from librmq.store.format import directory
from librmq.store.format._checkpoint import Checkpoint
from librmq.store.format.directory import clear_abort, set_abort
from librmq.store.recovery._case import RecoveryMode
from librmq.store.recovery.open import load


def settle(
    path: str, config: StoreConfig, files: Files, clock: Clock, *, keeps_deleted: bool = False
) -> tuple[int, int, list[Damage]]:
    """Recover the whole store in ``path``, which this process has made, and mark it as closed.

    Return where its log begins and ends, and what was cut or rewritten.

    With ``keeps_deleted`` a queue without a folder stays deleted, like its topic. No lock is taken, so no other process
    may know the store yet.
    """
    parts = load(path, config, files, clock, mode=RecoveryMode.WHOLE_LOG, keeps_deleted=keeps_deleted)
    settled = parts.log.begin, parts.log.end, parts.recovered.cuts
    parts.close()
    clear_abort(files, path)
    return settled


_MOST_COLLECTED: Final = 64 << 20
"""Bytes of entries to collect before they are written."""


class CopiedParts:
    """Queues, key index and checkpoint of a log that this process writes, derived behind it.

    There is nothing to recover: each record was checked when it was copied, and each queue counts from 0. As with
    `settle`, no other process may know the store yet. The entries are collected so that one call makes most files.
    """

    def __init__(self, part: PartFiles, log: CommitLog) -> None:
        set_abort(part.files, part.path)  # a kill would leave queues that lack entries
        self._part = part
        self._log = log
        self._derivation = Derivation(DelayLevels.parse(part.config.message_delay_level))
        self.followed = log.begin
        """The physical offset up to which records are taken in."""
        self._index = part.open_index(writable=True)
        self._entries: dict[QueueName, bytearray] = {}
        self._size = 0
        self._ends: Counter[QueueName] = Counter()
        self._stored_ms = 0

    def follow(self) -> None:
        """Take in the records up to the log's end.

        Raises:
            CorruptionError: One names a queue that can't be.
        """
        for block in self._derivation.blocks(self._log, self.followed, self._log.end):
            self.add_block(block)
        self.followed = max(self.followed, self._log.end)

    def add_block(self, block: DerivedBlock) -> None:
        """Take in what the next records define, which the log can still lack; raise as `follow`."""
        for topic, queue_id, _, entries in block.queues:
            name = java_decode(topic), queue_id  # several damaged topics can be read as one
            collected = self._entries.get(name)
            if collected is None:
                try:
                    validate_queue(*name)
                except MessageIllegalError as error:
                    place = ENTRY.unpack_from(entries)[0] if entries else int(block.keys.physical_offsets[0])
                    what = f"its queue is impossible: {error}"
                    raise CorruptionError(self._log.sequence.path_at(place), place, "record", what) from None
                collected = self._entries[name] = bytearray()
            collected += entries
            self._size += len(entries)
        if self._size >= _MOST_COLLECTED:
            self._write()
        self._index.append_block(*block.keys)
        self._stored_ms = max(int(block.keys.timestamps[-1]), 0)
        self.followed = block.end

    def settle(self) -> None:
        """Write what is collected and flush all, after the log, and mark the store as closed."""
        path, files = self._part.path, self._part.files
        self._log.flush()
        make_folders(files, self._log.sequence.folder)  # a store is recognised by it
        self.follow()
        self._write()
        self._index.flush()
        checkpoint = Checkpoint.open(os.path.join(path, directory.CHECKPOINT), files=files, writable=True)
        checkpoint.physic_timestamp_ms = checkpoint.logics_timestamp_ms = self._stored_ms
        checkpoint.index_timestamp_ms = min(self._index.full_timestamp_ms, self._stored_ms)
        checkpoint.flush()
        checkpoint.close()
        clear_abort(files, path)

    def release(self) -> None:
        """Release the index, because a full disk must not keep the blocks of files that are deleted."""
        self._index.release()

    def _write(self) -> None:
        """Write the collected entries, and flush the files that have them."""
        part, new_files = self._part, list[str]()
        for topic, queues in groupby(sorted(self._entries.items()), key=lambda item: item[0][0]):
            new: list[tuple[str, bytearray]] = []
            folder = os.path.dirname(directory.queue_folder(part.path, topic, 0))
            for name, entries in queues:
                end = self._ends[name]
                self._ends[name] += len(entries) // ENTRY_SIZE
                if not end and 0 < len(entries) <= part.config.consumequeue_file_size:
                    new.append((os.path.join(str(name[1]), file_name(0)), entries))
                elif entries:
                    with part.open_queue(topic, name[1], writable=True) as queue:
                        queue.append_many(end, bytes(entries))
            if new:
                part.files.make_files(folder, new, part.config.consumequeue_file_size)
                new_files += [os.path.join(folder, name) for name, _ in new]
        self._entries, self._size = {}, 0
        flush_made(new_files, part.path, part.files)


def flush_made(names: Sequence[str], path: str, files: Files) -> None:
    """Flush files that `Files.make_files` has made in ``path``."""
    if len(names) < MANY_FILES or not flush_all(files, path):
        for file in names:
            files.flush(files.open(file, writable=True))
