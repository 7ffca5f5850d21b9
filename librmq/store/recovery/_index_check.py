"""Comparison of the key index with the log, and its repair.

An index cannot be repaired in its middle, because its chains go through the whole file. Missing keys at the end are
added; for any other difference the index is rebuilt.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from librmq.commitlog import CommitLog
from librmq.files import Damage
from librmq.message import DelayLevels, StoredMessage
from librmq.runtime import lazy_numpy as np
from librmq.store.engine.derivation import (
    COMPARED,
    Derivation,
    DerivedRecord,
    KeyBlock,
    Pending,
    key_block,
    key_hashes,
    without_first_keys,
)
from librmq.store.format._keyindex import KeyIndex
from librmq.store.format.indexfile import (
    HEADER_SIZE,
    SLOT_SIZE,
    IndexFile,
    IndexHeader,
    all_entry_seconds,
    entry_seconds,
)
from librmq.store.recovery._entry_check import is_illegible

_BLOCK: Final = 65_536
_CHUNK: Final = 1 << 20


class _Run(NamedTuple):
    """The adjacent entries of the index for one record."""

    physical_offset: int
    hashes: list[int]
    seconds: list[int]
    file: IndexFile
    number: int
    before: IndexHeader | None
    """The header of the file before."""


def _runs(index: KeyIndex, begin: int, following: tuple[IndexFile, int] | None = None) -> Iterator[_Run]:
    """Yield the entries of records from ``begin`` on, record by record; those of one record can be in two files.

    ``following`` is the entry to begin with, by default the first one.
    """
    run: _Run | None = None
    for before, file in itertools.pairwise((None, *index.files)):
        assert file is not None
        header = None if before is None else before.header
        if file.header.end_physical_offset < begin or (following is not None and file is not following[0]):
            continue
        number, following = file.first_from(begin) if following is None else following[1], None
        for first in range(number, file.header.index_count, COMPARED):
            block = file.entries(first, first + COMPARED)
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


class IndexCheck:
    """Comparison of the key index with the keys of the records, in the order of the log."""

    def __init__(self, index: KeyIndex, begin: int, log: CommitLog, is_complete: bool) -> None:
        self._log = log
        self.damages: list[Damage] = []
        self._index = index
        self._begin = begin
        self._runs = _runs(index, begin)
        self._run = next(self._runs, None)
        self._following: tuple[IndexFile, int] | None = (
            None  # where the next entry is; while this is set, `_run` is out of date
        )
        self._records: list[Pending] = []  # these are compared together
        self._missing: list[KeyBlock] = []
        self._lacking = 0
        self._at_end = False  # the index ends before the next record
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

    def take(self, record: DerivedRecord) -> None:
        """Take the keys of the next record."""
        self._records.append(record.pending())
        if len(self._records) >= COMPARED:
            self._compare_records()

    def take_block(self, keys: KeyBlock) -> bool:
        """Take the keys of the next records; return False, with no effect, if some entries are there and not theirs."""
        self._compare_records()
        return self._take(keys)

    def _compare_records(self) -> None:
        records, self._records = self._records, []
        if not records or self._take(key_block(records)):
            return
        self._find_run()
        for number, record in enumerate(records):
            if self._at_end:
                self._add_missing(key_block(records[number:]))
                break
            self._compare_record(record)

    def _take(self, keys: KeyBlock) -> bool:
        if self._at_end or self._ends_before(int(keys.physical_offsets[0])):
            self._at_end = True
            self._add_missing(keys)
            return True
        return self._are_next(keys)

    def _ends_before(self, physical_offset: int) -> bool:
        return self._run is None and self._following is None and (physical_offset > self._end or self._none)

    def _find_run(self) -> None:
        if self._following is not None:
            self._runs = _runs(self._index, self._begin, self._following)
            self._run, self._following = next(self._runs, None), None

    def _are_next(self, keys: KeyBlock) -> bool:
        """Return whether the next entries are those of all these records; then continue behind them.

        The first and the last entry of a file are left to `_compare_record`, which compares the header with them too.
        """
        if self._following is None and self._run is not None:
            self._following = self._run.file, self._run.number
        if not len(keys.key_hashes) and self._following is None:
            return True
        if self._following is None or self._following[1] == 1:
            return False
        file, begin = self._following
        header, end = file.header, begin + len(keys.key_hashes)
        if begin == end:
            return bool(file.entries(begin, begin + 1)["physical"] > keys.physical_offsets[-1])
        if end >= header.index_count:
            return False
        entries = file.entries(begin, end + 1)
        following, entries = entries[-1], entries[:-1]
        seconds = all_entry_seconds(keys.timestamps, header.begin_timestamp_ms)
        if not (
            following["physical"] > keys.physical_offsets[-1]
            and np.array_equal(entries["hash"], keys.key_hashes)
            and np.array_equal(entries["physical"], keys.physical_offsets[keys.record_of_key])
            and np.array_equal(entries["time_diff"], seconds[keys.record_of_key])
        ):
            return False
        self._following = file, end
        file._release_pages(begin, end)
        return True

    def _compare_record(self, record: Pending) -> None:
        physical_offset, store_timestamp_ms, prefix_hash, unique_key, keys = record
        run = self._run
        if run is None:
            if self._ends_before(physical_offset):
                self._at_end = True
                self._add_missing(key_block([record]))
            return
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
        raw = self._log.read(physical_offset) if stored_hashes else None
        if raw is not None and is_illegible(StoredMessage(raw)):
            return
        if run is not None or not stored_hashes or stored_hashes != expected[: len(stored_hashes)]:
            self._damaged(last, f"keys of {physical_offset}: expected hashes {expected}, found {stored_hashes}")
        else:  # a crash came between the keys of the last indexed record
            self._add_missing(key_block([without_first_keys(record, len(stored_hashes))]))

    def _check_times(self, run: _Run, store_timestamp_ms: int) -> None:
        header, place = run.file.header, run.physical_offset
        seconds = entry_seconds(store_timestamp_ms, header.begin_timestamp_ms)
        times = [seconds] * len(run.seconds)
        if run.number == 1:  # it counts from the end of the file before it, which can be deleted
            before = run.before
            times[0] = run.seconds[0] if before is None else entry_seconds(store_timestamp_ms, before.end_timestamp_ms)
        if run.seconds != times:
            self._damaged(run, f"times of {place}: expected {times} s, found {run.seconds}")
        first, last = run.number == 1, run.number + len(run.hashes) == header.index_count
        if (first and header.begin_timestamp_ms != store_timestamp_ms) or (
            last and header.end_timestamp_ms != store_timestamp_ms
        ):
            span = f"{header.begin_timestamp_ms} to {header.end_timestamp_ms}"
            self._damaged(run, f"header: times {span}, the record at {place} was stored at {store_timestamp_ms}")

    def _add_missing(self, keys: KeyBlock) -> None:
        """Count records whose keys are missing, and keep a few of them until all entries were compared."""
        self._lacking += int(np.count_nonzero(np.diff(keys.record_of_key, prepend=-1)))
        self._missing.append(keys)
        if sum(len(block.physical_offsets) for block in self._missing) >= COMPARED:
            self._write_missing()

    def _write_missing(self) -> None:
        """Write missing keys if that completes the index."""
        if self._index.writable and self.sound:
            for keys in self._missing:
                self._index.append_block(*keys)
        self._missing.clear()

    def _damaged(self, run: _Run, what: str) -> None:
        self.sound = False
        if not self.damages or self.damages[-1].file != run.file.path:  # one damage a file is enough
            position = run.file.entry_position(run.number)
            kind = "ahead" if run.physical_offset >= self._log.end else "entry"
            self.damages.append(Damage(run.file.path, position, kind, what, 20 * len(run.hashes)))

    def finish_index(self) -> None:
        """Finish after the last record."""
        self._compare_records()
        self._find_run()
        while self._run is not None:
            self._damaged(self._run, f"points to {self._run.physical_offset}, where there is no record")
            self._run = next(self._runs, None)
        for file in self._checked:
            flaw = find_flaw(file)
            file.release_mapping()
            if flaw is not None:
                self.sound = False
                position, what = flaw
                self.damages.append(Damage(file.path, position, "index", what))
        files = self._index.files
        self._write_missing()
        if self._lacking:
            place = files[-1].path if files else self._index.folder
            self.damages.append(Damage(place, 0, "missing", f"lacks keys of the log's last {self._lacking} records"))


def find_flaw(file: IndexFile) -> tuple[int, str] | None:
    """Compare header, entries and slots, and return position and description of the first contradiction.

    This does not compare the entries with the log.
    """
    header = file.header
    count = header.index_count - 1
    newest = np.zeros(file.max_slots, np.int32)  # number of the newest entry of each slot so far
    before = 0
    if count:
        ends = tuple(int(file.entries(number, number + 1)["physical"][0]) for number in (1, count))
        if ends != (header.begin_physical_offset, header.end_physical_offset):
            return 16, f"header: physical offsets {header[2:4]}, the entries have {ends}"
    for begin in range(1, count + 1, _BLOCK):
        entries = file.entries(begin, begin + _BLOCK)
        places = entries["physical"]
        wrong = np.flatnonzero((entries["hash"] < 0) | (np.diff(places, prepend=before) < 0))
        if len(wrong):
            number = begin + int(wrong[0])
            return file.entry_position(number), f"entry {number}: hash or physical offset out of order"
        before = int(places[-1])
        numbers = np.arange(begin, begin + len(entries), dtype=np.int32)
        slots = entries["hash"] % file.max_slots
        previous = newest[slots]
        order = np.argsort(slots, kind="stable")
        again = np.flatnonzero(np.diff(slots[order]) == 0)
        previous[order[again + 1]] = numbers[order[again]]
        wrong = np.flatnonzero(previous != entries["previous"])
        if len(wrong):
            number = begin + int(wrong[0])
            actual, expected = int(entries["previous"][wrong[0]]), int(previous[wrong[0]])
            return file.entry_position(number) + 16, f"entry {number}: previous is {actual}, expected {expected}"
        newest[slots[order]] = numbers[order]  # the last entry of a slot counts
        file._release_pages(begin, begin + _BLOCK)
    table = file.slots()
    in_table = np.zeros_like(newest)
    in_table[table["slot"]] = table["number"]
    wrong = np.flatnonzero(in_table != newest)
    if len(wrong):
        slot = int(wrong[0])
        return HEADER_SIZE + SLOT_SIZE * slot, f"slot {slot} does not lead to the newest entry of its hash"
    if header.slot_count != len(table):
        return 32, f"header: {header.slot_count} slots are in use, found {len(table)}"
    for begin, end in ((0, 1), (count + 1, file.max_entries)):
        position = _first_byte(file, file.entry_position(begin), file.entry_position(end))
        if position is not None:
            return position, "expected zeros where no entry is"
    return None


def _first_byte(file: IndexFile, begin: int, end: int) -> int | None:
    end = file.file.used_end(begin, end)
    for at in range(begin, end, _CHUNK):
        block = file.file.buffer[at : min(end, at + _CHUNK)]
        used = block.lstrip(b"\0")
        if used:
            return at + len(block) - len(used)
    return None


def rebuild_index(log: CommitLog, index: KeyIndex, levels: DelayLevels) -> None:
    """Rebuild the whole key index."""
    for file in index.files:
        index.delete(file.name)
    for block in Derivation(levels).blocks(log, log.begin, log.end):
        index.append_block(*block.keys)
