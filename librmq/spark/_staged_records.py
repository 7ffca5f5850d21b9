"""Staged records of a Spark job, which tasks write and the driver reads.

::

    <folder>/<job>.<run>.staging/t<task>.log      records; fields that only the store knows are zero
    <folder>/<job>.<run>.staging/t<task>.arrow    one row for each record: size, queue, tags code, keys, order

A run is the time of its start and a random number, so runs of one job share no file. What a killed run leaves is
deleted by a later one, of any job.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from typing import Final, NamedTuple
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from librmq.columns.arrays import Ints
from librmq.errors import ConfigError, CorruptionError
from librmq.files import DiskFiles
from librmq.store.engine.store_parts import QueueName
from librmq.store.format.spark_jobs import JobNote, StagedRun

_STAGED: Final = re.compile(r"t[0-9][0-9a-f-]*\.(log|arrow)")
"""Names of staged files: a deletion removes no others."""
_BLOCK_ROWS: Final = 65_536


@dataclass(frozen=True, slots=True)
class Staged:
    """A task's staged files ``name``.log and ``name``.arrow, its number, and the queues of its records."""

    name: str
    task: int
    records: int
    lanes: tuple[QueueName, ...]


def run_folder(path: str, job: str, staging: str | None, began_ms: int) -> str:
    """Return a new folder in which tasks of a run of ``job`` stage records.

    Raises:
        ConfigError: ``job`` is not the name of a folder.
    """
    base = staging or os.path.join(path, JobNote.FOLDER)
    folder = os.path.join(base, StagedRun.NAME.format(job=job, began_ms=began_ms, random=uuid4().hex[:8]))
    if "\0" in job or os.path.dirname(os.path.normpath(folder)) != os.path.normpath(base):
        raise ConfigError(f"option jobId: {job[:120]!r} is not the name of a folder")
    return folder


def discard_old(base: str, now_ms: int) -> None:
    """Delete what runs have staged in ``base`` that began so long ago that they must have been killed."""
    for run in StagedRun.all_in(base, DiskFiles()):
        if run.began_ms < now_ms - StagedRun.KEPT_MS:
            discard(run.folder)


def discard(folder: str) -> None:
    """Delete the staged files in ``folder``, and ``folder`` if nothing else is in it."""
    if os.path.islink(folder):
        return
    files = DiskFiles()
    for _ in range(3):  # a late task can add its files meanwhile, until the folder is gone
        for entry in files.list(folder):
            if _STAGED.fullmatch(entry.name):
                with suppress(OSError):
                    files.delete(os.path.join(folder, entry.name))
        with suppress(OSError):
            os.rmdir(folder)


def missing(path: str) -> ConfigError:
    """Return the error for a run's folder, or a file in it, that another process of the job has made."""
    return ConfigError(
        f"{path}: not here: driver and workers must share this folder (option staging sets another), which is deleted "
        "when the job ends, and by a later job a day after this one began"
    )


class _Task:
    def __init__(self, folder: str, staged: Staged) -> None:
        path = os.path.join(folder, staged.name)
        try:
            self.raw: Final = FileIO(f"{path}.log")
            self._columns: Final = pa.ipc.open_file(pa.OSFile(f"{path}.arrow"))  # not mapped, to free pages
        except FileNotFoundError:
            raise missing(path) from None

    def __enter__(self) -> _Task:
        return self

    def __exit__(self, *_: object) -> None:
        self.raw.close()

    def row_tables(self) -> Iterator[pa.Table]:
        """Yield the rows, some tens of thousands at a time."""
        batches: list[pa.RecordBatch] = []
        for number in range(self._columns.num_record_batches):
            batches.append(self._columns.get_batch(number))
            if sum(batch.num_rows for batch in batches) >= _BLOCK_ROWS:
                yield pa.Table.from_batches(batches)
                batches = []
        if batches:
            yield pa.Table.from_batches(batches)


@dataclass(slots=True)
class StagedBlock:
    """Records that follow one another in the log."""

    sizes: Ints
    lane: Ints
    codes: Ints
    record_of_key: Ints
    key_hashes: Ints
    read: Callable[[int, int], bytearray]
    """Return the bytes of the records from the first number to the second."""


class StagedRecords:
    """The records of all tasks in the order of the log; some tens of thousands at a time are in memory."""

    def __init__(self, folder: str, staged: Sequence[Staged], ordered: bool) -> None:
        self._folder = folder
        self._staged = staged
        lane_numbers: dict[QueueName, int] = {}
        self._own_lanes: list[Ints] = []
        self._records = 0
        self._sorted: _Sorted | None = None
        for file in staged:
            with _Task(folder, file) as task:
                records = size = 0
                for table in task.row_tables():
                    records += len(table)
                    size += pc.sum(table["size"].cast(pa.int64())).as_py() or 0
                if records != file.records or size != os.fstat(task.raw.fileno()).st_size:
                    raise CorruptionError(folder, 0, "size", f"{file.name}: expected {file.records} whole records")
            for lane in file.lanes:
                lane_numbers.setdefault(lane, len(lane_numbers))
            self._own_lanes.append(np.array([lane_numbers[lane] for lane in file.lanes], np.int64))
            self._records += records
        self.lanes = list(lane_numbers)
        if ordered and staged:
            self._sorted = _Sorted(self._tables(), [os.path.join(folder, f"{file.name}.log") for file in staged])

    def __len__(self) -> int:
        return self._records

    def close(self) -> None:
        """Close the files of a sorted job."""
        if self._sorted is not None:
            self._sorted.close()

    def record_blocks(self) -> Iterator[StagedBlock]:
        """Yield all records, block by block; may be called several times."""
        if self._sorted is not None:
            yield from self._sorted.record_blocks()
            return
        number, begin = -1, 0
        for task, table, lane in self._tables():
            if task.number != number:
                number, begin = task.number, 0
            sizes = _ints(table["size"])
            record_of_key, hashes = _keys(table["keys"].combine_chunks())
            yield StagedBlock(
                sizes, lane, _ints(table["tagsCode"]), record_of_key, hashes, _reader(task.raw, begin, sizes)
            )
            begin += int(sizes.sum())

    def _tables(self) -> Iterator[tuple[_Numbered, pa.Table, Ints]]:
        """Yield the rows of each task with the numbers of their queues."""
        for number, (file, lane_numbers) in enumerate(zip(self._staged, self._own_lanes, strict=True)):
            with _Task(self._folder, file) as task:
                for table in task.row_tables():
                    yield _Numbered(number, task.raw), table, lane_numbers[_ints(table["lane"])]


class _Numbered(NamedTuple):
    """A task by its place among the tasks, with the file of its records."""

    number: int
    raw: FileIO


class _Sorted:
    """All records in the order of a column: some 40 bytes each."""

    def __init__(self, tables: Iterable[tuple[_Numbered, pa.Table, Ints]], paths: Sequence[str]) -> None:
        sizes, lanes, codes, tasks, orders, counts, hashes = [], [], [], [], [], [], []
        for task, table, lane in tables:
            keys = table["keys"].combine_chunks()
            sizes.append(_ints(table["size"]).astype(np.int32))
            lanes.append(lane.astype(np.int32))
            codes.append(_ints(table["tagsCode"]).astype(np.int32))
            tasks.append((task.number, len(table)))
            orders.append(table["order"].combine_chunks())
            counts.append(_ints(pc.list_value_length(keys)))
            hashes.append(_keys(keys)[1].astype(np.int32))
        self._sizes, self._lane, self._codes = np.concatenate(sizes), np.concatenate(lanes), np.concatenate(codes)
        self._first_key = np.concatenate(([0], np.cumsum(np.concatenate(counts))))
        self._key_hashes = np.concatenate(hashes)
        of_task = np.bincount([number for number, _ in tasks], [rows for _, rows in tasks]).astype(np.int64)
        self._firsts = np.concatenate(([0], np.cumsum(of_task)))
        """The first record of each task, and the number of all records."""
        ends = np.cumsum(self._sizes, dtype=np.int64)
        before = np.concatenate(([0], ends))[self._firsts[:-1]]
        self._begins = ends - self._sizes
        for first, until, start in zip(self._firsts[:-1], self._firsts[1:], before, strict=True):
            self._begins[first:until] -= start
        values = pa.chunked_array(orders)
        ranks = _ints(pc.rank(values, sort_keys="ascending", tiebreaker="first"))
        order = np.empty(len(ranks), np.int64)
        order[ranks - 1] = np.arange(len(ranks))
        self._order = np.roll(order, values.null_count)  # nulls first, as Spark sorts
        self._raw = [FileIO(path) for path in paths]

    def close(self) -> None:
        for raw in self._raw:
            raw.close()

    def record_blocks(self) -> Iterator[StagedBlock]:
        for at in range(0, len(self._order), _BLOCK_ROWS):
            which = self._order[at : at + _BLOCK_ROWS]
            counts = self._first_key[which + 1] - self._first_key[which]
            record_of_key = np.repeat(np.arange(len(which)), counts)
            within = np.arange(len(record_of_key)) - np.repeat(np.cumsum(counts) - counts, counts)
            hashes = self._key_hashes[self._first_key[which][record_of_key] + within].astype(np.int64)
            sizes, lane, codes = (column[which].astype(np.int64) for column in (self._sizes, self._lane, self._codes))
            yield StagedBlock(sizes, lane, codes, record_of_key, hashes, partial(self._read_records, which))

    def _read_records(self, which: Ints, begin: int, end: int) -> bytearray:
        records = which[begin:end]
        tasks = np.searchsorted(self._firsts, records, "right") - 1
        rows = zip(tasks.tolist(), self._begins[records].tolist(), self._sizes[records].tolist(), strict=True)
        return bytearray(b"".join([os.pread(self._raw[task].fileno(), size, at) for task, at, size in rows]))


def _reader(raw: FileIO, first: int, sizes: Ints) -> Callable[[int, int], bytearray]:
    """Return a function that reads consecutive records from ``first`` on."""
    bounds = np.concatenate(([0], np.cumsum(sizes))) + first

    def read(begin: int, end: int) -> bytearray:
        data = bytearray(int(bounds[end] - bounds[begin]))
        raw.seek(int(bounds[begin]))
        if raw.readinto(data) != len(data):
            raise CorruptionError(str(raw.name), int(bounds[begin]), "size", "the file is shorter than a task wrote it")
        return data

    return read


def _ints(column: pa.Array | pa.ChunkedArray) -> Ints:
    values: Ints = column.to_numpy(zero_copy_only=False) if isinstance(column, pa.Array) else column.to_numpy()
    return values.astype(np.int64)


def _keys(lists: pa.Array) -> tuple[Ints, Ints]:
    """Return the row of each key, ascending, and the hashes of all keys."""
    lengths = _ints(pc.list_value_length(lists))
    return np.repeat(np.arange(len(lists)), lengths), _ints(lists.flatten())
