"""Comparison of the key index with the keys of the records, in the order of the log, and its repair.

An index cannot be repaired in its middle, because its chains go through the whole file. Missing keys at the end are
added; for any other difference the index is rebuilt.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from librmq.commitlog import CommitLog
from librmq.errors import CorruptionError
from librmq.files.seam import Damage
from librmq.java.lang import java_decode, string_hash
from librmq.message.delay_levels import DelayLevels
from librmq.message.message import StoredMessage
from librmq.message.record import PROPERTY_KEYS, split_keys
from librmq.store.engine.dispatch import Derivation, Pending, RawPending, is_indexed, key_block, key_hashes
from librmq.store.format.index_layout import IndexHeader, entry_seconds
from librmq.store.format.indexfile import IndexFile, find_flaw
from librmq.store.format.keyindex import KeyIndex
from librmq.store.recovery.entry_check import is_illegible

_BLOCK: Final = 65_536
_MOST_BETWEEN: Final = 10_000  # records without keys between two files
SETTLED: Final = 4096  # records whose keys are added together, as many as caches hold


class _Run(NamedTuple):
    """The adjacent entries of the index for one record."""

    physical_offset: int
    hashes: list[int]
    seconds: list[int]
    file: IndexFile
    number: int
    before: IndexHeader | None
    """The header of the file before."""


def _runs(index: KeyIndex, begin: int) -> Iterator[_Run]:
    """Yield the entries of records from ``begin`` on, record by record; those of one record can be in two files."""
    run: _Run | None = None
    for before, file in itertools.pairwise((None, *index.files)):
        assert file is not None
        header = None if before is None else before.header
        if file.header.end_physical_offset < begin:
            continue
        for first in range(1, file.header.index_count, _BLOCK):
            block = file.entries(first, first + _BLOCK)
            rows = zip(block["hash"].tolist(), block["physical"].tolist(), block["time_diff"].tolist(), strict=True)
            for number, (value, physical_offset, seconds) in enumerate(rows, first):
                if physical_offset < begin:
                    continue
                if run is None or run.physical_offset != physical_offset or run.file is not file:
                    if run is not None:
                        yield run
                    run = _Run(physical_offset, [], [], file, number, header)
                run.hashes.append(value)
                run.seconds.append(seconds)
    if run is not None:
        yield run


def missing_keys(index: KeyIndex, log: CommitLog, levels: DelayLevels) -> tuple[int, int] | None:
    """Return begin and end of the first part of the log between index files that has keys, None if there is none.

    The recovery of RocketMQ 4.9 can leave one: it deletes index files that the checkpoint does not cover, and indexes
    the log from a later place on. The call reads few records. A gap inside of a file it does not find.
    """
    derive = Derivation(levels).derive
    begin, indexed = log.begin, -1
    for file in index.files:
        header = file.header
        if header.index_count <= 1:
            continue
        records = log.scan(begin, min(header.begin_physical_offset, log.end), check_body=False)
        with suppress(CorruptionError):  # `verify` reports it
            for place, size, raw in itertools.islice(records, _MOST_BETWEEN):
                if raw is not None and place != indexed and any(derive(place, size, raw)[-2:]):
                    return place, header.begin_physical_offset
        indexed = header.end_physical_offset
        begin = max(begin, indexed)
    return None


class IndexCheck:
    """Comparison of the key index with the keys of the records, in the order of the log."""

    def __init__(self, index: KeyIndex, begin: int, log: CommitLog, is_complete: bool, repair: bool) -> None:
        self._log = log
        self.damages: list[Damage] = []
        self._index = index
        self._repair = repair
        self._runs = _runs(index, begin)
        self._run = next(self._runs, None)
        self.lacking: list[RawPending] = []
        """Records whose keys are missing in the index; call `settle` when there are `SETTLED`."""
        self._lacking = 0
        self.at_end = False
        """Whether the index ends before the next record."""
        self._end = index.end_physical_offset
        self._none = all(file.header.index_count <= 1 for file in index.files)
        self.sound = not (self._none and self._end > begin)  # files show whether others existed before them
        """Whether the index can be completed; otherwise it must be rebuilt."""
        self._checked = index.files if is_complete else []  # rebuilt parts need no check
        for file in self._checked[:-1]:
            if not file.full:
                self.sound = False
                what = f"header: {file.header.index_count} of {file.max_entries}, and another file follows"
                self.damages.append(Damage(file.path, 36, "index", what))

        for before, file in itertools.pairwise(index.files):
            if file.header.index_count <= 1 and file.header != before.header.follower:
                self.sound = False  # it was torn when the first entry was added
                self.damages.append(Damage(file.path, 0, "index", "header: expected that of an empty file"))

    def offer(self, record: RawPending) -> None:
        """Add the keys of the next record, unless `at_end`."""
        physical_offset, store_timestamp_ms, prefix_hash, raw_unique_key, raw_keys = record
        run = self._run
        if run is None:  # the index ends before the log
            if physical_offset > self._end or self._none:
                self.at_end = True
                self.lacking.append(record)
            return
        unique_key = None if raw_unique_key is None else java_decode(raw_unique_key)
        keys = None if raw_keys is None else java_decode(raw_keys)
        while run is not None and run.physical_offset < physical_offset:
            self._damaged(run, f"points to {run.physical_offset}, where there is no record with keys")
            run = self._run = next(self._runs, None)
        expected = key_hashes(prefix_hash, unique_key, keys)
        stored_hashes: list[int] = []
        last = run
        while run is not None and run.physical_offset == physical_offset:
            stored_hashes += run.hashes
            self._check_times(run, store_timestamp_ms)
            last = run
            run = self._run = next(self._runs, None)
        if stored_hashes == expected or last is None:
            return
        if set(stored_hashes) == set(expected) and not Counter(expected) - Counter(stored_hashes):
            return  # 4.9 indexes a record again after an unclean exit
        if stored_hashes and self._is_illegible(physical_offset):
            return
        if run is not None or not stored_hashes or stored_hashes != expected[: len(stored_hashes)]:
            self._damaged(last, f"keys of {physical_offset}: expected hashes {expected}, found {stored_hashes}")
        else:  # a crash came between the keys of the last indexed record
            texts = [*([unique_key] if unique_key else []), *split_keys(keys)][len(stored_hashes) :]
            self.lacking.append((physical_offset, store_timestamp_ms, prefix_hash, None, " ".join(texts).encode()))

    def _is_illegible(self, physical_offset: int) -> bool:
        raw = self._log.read(physical_offset)
        return raw is not None and is_illegible(StoredMessage(raw))

    def _check_times(self, run: _Run, store_timestamp_ms: int) -> None:
        header, place = run.file.header, run.physical_offset
        seconds = entry_seconds(store_timestamp_ms, header.begin_timestamp_ms)
        times = [seconds] * len(run.seconds)
        if run.number == 1:  # it counts from the end of the file before it, which can be deleted
            before = run.before
            times[0] = run.seconds[0] if before is None else entry_seconds(store_timestamp_ms, before.end_timestamp_ms)
        if run.seconds != times:
            self._damaged(run, f"times of {place}: expected {seconds} s, found {run.seconds}")
        first, last = run.number == 1, run.number + len(run.hashes) == header.index_count
        if (first and header.begin_timestamp_ms != store_timestamp_ms) or (
            last and header.end_timestamp_ms != store_timestamp_ms
        ):
            span = f"{header.begin_timestamp_ms} to {header.end_timestamp_ms}"
            self._damaged(run, f"header: times {span}, the record at {place} was stored at {store_timestamp_ms}")

    def settle(self) -> None:
        """Count missing keys, and write them if that completes the index."""
        self._lacking += sum(1 for record in self.lacking if record[3] or record[4])
        if self._repair and self.sound and self.lacking:
            self._index.append_block(*key_block(self.lacking))
        self.lacking.clear()

    def _damaged(self, run: _Run, what: str) -> None:
        self.sound = False
        if not self.damages or self.damages[-1].file != run.file.path:  # one for each file is enough
            position = run.file.entry_position(run.number)
            kind = "ahead" if run.physical_offset >= self._log.end else "entry"
            self.damages.append(Damage(run.file.path, position, kind, what, 20 * len(run.hashes)))

    def finish(self) -> None:
        """Finish after the last record."""
        while self._run is not None:
            self._damaged(self._run, f"points to {self._run.physical_offset}, where there is no record")
            self._run = next(self._runs, None)
        for file in self._checked:
            flaw = find_flaw(file)
            if flaw is not None:
                self.sound = False
                position, what = flaw
                self.damages.append(Damage(file.path, position, "index", what))
        files = self._index.files
        self.settle()
        if self._lacking:
            place = files[-1].path if files else self._index.folder
            self.damages.append(Damage(place, 0, "missing", f"lacks keys of the log's last {self._lacking} records"))


def rebuild_index(log: CommitLog, index: KeyIndex) -> None:
    """Rebuild the whole key index."""
    for file in index.files:
        index.delete(file.name)
    prefixes: dict[str, int] = {}
    records: list[Pending] = []
    for physical_offset, _, raw in log.scan(check_body=False):
        if raw is None:
            continue
        message = StoredMessage(raw)
        topic = message.topic
        prefix_hash = prefixes.get(topic)
        if prefix_hash is None:
            prefix_hash = prefixes[topic] = string_hash(topic + "#")
        unique_key = keys = None
        if is_indexed(message.sys_flag):
            unique_key, keys = message.unique_key, message.properties.get(PROPERTY_KEYS)
        records.append((physical_offset, message.store_timestamp_ms, prefix_hash, unique_key, keys))
        if len(records) >= _BLOCK:
            index.append_block(*key_block(records))
            records = []
    if records:
        index.append_block(*key_block(records))
