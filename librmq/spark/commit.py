"""Records that tasks have made ready, brought into a store: all of them or none, whatever happens.

::

    librmq/spark/<job>.staging/t<task>.log      records; what only the store knows is zero
    librmq/spark/<job>.staging/t<task>.arrow    one row per record: size, queue, tags code, keys, what to order by
    librmq/spark/<job>.json                     {"version", "begin", "end", "first", "records", "done"}: where the
                                                records go in the log, how the first one begins, whether all is done

Everything is written behind the log's end but for the first bytes, up to the end of their sector: to any reader, the
log ends where it did. When all of that has reached the device those bytes are written, and the whole is there at once.
A process that dies before leaves a sector that was never written, which recovery knows from crashes of the broker, and
cuts; one that dies behind leaves records whose queue entries and keys recovery makes. A job's file tells which of the
two it was, by looking whether its first record stands where it was to stand, so that a commit may be repeated. When
retention has taken that place away, only what the file says is known: done, or not, as a process that died left it.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from librmq.clock import SystemClock
from librmq.columns.decode import Ints
from librmq.consumequeue import ENTRY_DTYPE
from librmq.errors import ConfigError, CorruptionError, MessageIllegalError, StoreLockedError
from librmq.files.disk import DiskFiles
from librmq.files.seam import make_folders
from librmq.message import record
from librmq.store import MessageStore
from librmq.store.engine.dispatch import Lane
from librmq.store.engine.queue_table import QueueName
from librmq.store.format import directory

__all__ = ["Staged", "commit", "discard", "job_folder", "wait_until_free"]

_T = TypeVar("_T")

CHUNK_BYTES: Final = 2 << 20
_STAGED: Final = re.compile(r"t[0-9][0-9a-f-]*\.(log|arrow)")
"""Names of staged files: a deletion takes no others."""
_BLOCK_ROWS: Final = 65_536
_BETWEEN_TRIES: Final = 0.1
"""Seconds between two tries to lock the store."""
_SECTOR: Final = 512
_TOLD: Final = 64


@dataclass(frozen=True, slots=True)
class Staged:
    """What a task has made ready: files ``name``.log and ``name``.arrow, its number, and the queues of its records."""

    name: str
    task: int
    records: int
    lanes: tuple[QueueName, ...]


def job_folder(path: str, job: str, staging: str | None) -> str:
    """Return the folder in which tasks stage the records of ``job``.

    Raises:
        ConfigError: ``job`` is not the name of a file.
    """
    base = staging or os.path.join(path, directory.OWN, "spark")
    folder = os.path.join(base, f"{job}.staging")
    if "\0" in job or os.path.dirname(os.path.normpath(folder)) != os.path.normpath(base):
        raise ConfigError(f"option jobId: {job[:120]!r} is not the name of a folder")
    return folder


def _note(path: str, job: str) -> str:
    return os.path.join(path, directory.OWN, "spark", f"{job}.json")


def discard(folder: str) -> None:
    """Delete the staged files in ``folder``, and ``folder`` if nothing else is in it."""
    if os.path.islink(folder):
        return
    files = DiskFiles()
    for entry in files.list(folder):
        if _STAGED.fullmatch(entry.name):
            with suppress(OSError):
                files.delete(os.path.join(folder, entry.name))
    with suppress(OSError):
        os.rmdir(folder)


def commit(
    path: str,
    job: str,
    staged: Sequence[Staged],
    folder: str,
    *,
    ordered: bool,
    keep_note: bool,
    wait_seconds: float = 0,
) -> int:
    """Bring the records of ``staged`` into the store in ``path``, and return their number; 0 if the job was done.

    Returns when the records have reached the device. After an error the store is as it was, unless the records could
    be seen already: then the next open completes queues and index, and the same job, committed again, finds them.

    Raises:
        StoreLockedError: Another process still writes to the store after ``wait_seconds``.
    """
    files = DiskFiles()
    make_folders(files, os.path.join(path, directory.OWN, "spark"))
    with _when_free(lambda: MessageStore.open(path, background=False), wait_seconds) as store:
        if _was_committed(store, job):
            discard(folder)
            return 0
        with closing(_Staging(folder, sorted(staged, key=lambda one: one.task), ordered)) as records:
            if len(records):
                _bring_in(store, job, records, folder)
                if keep_note:
                    _mark_done(store, job)
                else:
                    files.delete(_note(path, job))
            elif keep_note:
                _write_note(store, job, store.log.end, store.log.end, b"", 0)
                _mark_done(store, job)
            count = len(records)
    discard(folder)
    return count


def wait_until_free(path: str, wait_seconds: float) -> None:
    """Wait until no other process writes to the store in ``path``.

    Raises:
        StoreLockedError: Another process still does after ``wait_seconds``.
    """

    def ask() -> None:
        holder = DiskFiles().lock_holder(directory.lock_path(path))
        if holder is not None:
            raise StoreLockedError(f"{path}: locked by {holder}: one process at a time writes to a store")

    _when_free(ask, wait_seconds)


def _when_free(action: Callable[[], _T], wait_seconds: float) -> _T:
    """Return what ``action`` returns once it raises no `StoreLockedError`, after ``wait_seconds`` at most."""
    clock = SystemClock()
    until = clock.monotonic() + wait_seconds
    while True:
        try:
            return action()
        except StoreLockedError:
            left = until - clock.monotonic()
            if left <= 0:
                raise
        clock.wait(threading.Event(), min(left, _BETWEEN_TRIES))


def _was_committed(store: MessageStore, job: str) -> bool:
    note = _note(store.path, job)
    if store.files.size(note) is None:
        return False
    try:
        found = json.loads(store.files.read(note))
        begin, first, records = int(found["begin"]), bytes.fromhex(found["first"]), int(found["records"])
        done = found.get("done") is True
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptionError(note, 0, "config", f"expected the note of a write: {error}") from None
    if begin < store.log.begin:  # files of the log that have gone since held the records, if there were any
        return done
    return not records or (begin < store.log.end and store.log.data_at(begin, len(first)) == first)


def _write_note(store: MessageStore, job: str, begin: int, end: int, first: bytes, records: int) -> None:
    document = {"version": 1, "begin": begin, "end": end, "first": first.hex(), "records": records, "done": False}
    store.files.write(_note(store.path, job), json.dumps(document).encode())


def _mark_done(store: MessageStore, job: str) -> None:
    note = _note(store.path, job)
    store.files.write(note, json.dumps(json.loads(store.files.read(note)) | {"done": True}).encode())


class _Task:
    """The two files of a task."""

    def __init__(self, folder: str, one: Staged) -> None:
        path = os.path.join(folder, one.name)
        try:
            self.raw: Final = FileIO(f"{path}.log")
            self._columns: Final = pa.ipc.open_file(pa.OSFile(f"{path}.arrow"))  # read, not mapped: pages go at once
        except FileNotFoundError:
            raise ConfigError(
                f"{path}: the file that a task wrote is missing: driver and workers must share this folder "
                "(option staging names another)"
            ) from None

    def __enter__(self) -> _Task:
        return self

    def __exit__(self, *_: object) -> None:
        self.raw.close()

    def tables(self) -> Iterator[pa.Table]:
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
class _Block:
    """Records that follow one another in the log."""

    sizes: Ints
    lane: Ints
    codes: Ints
    record_of_key: Ints
    key_hashes: Ints
    read: Callable[[int, int], bytearray]
    """Returns the bytes of the records from the first number to the second."""


class _Staging:
    """The records of all tasks in the order in which they go into the log; of few at a time there is more in memory."""

    def __init__(self, folder: str, staged: Sequence[Staged], ordered: bool) -> None:
        self._folder = folder
        self._staged = staged
        known: dict[QueueName, int] = {}
        self._own_lanes: list[Ints] = []
        self._records = 0
        self._sorted: _Sorted | None = None
        for one in staged:
            with _Task(folder, one) as task:
                records = size = 0
                for table in task.tables():
                    records += len(table)
                    size += pc.sum(table["size"].cast(pa.int64())).as_py() or 0
                if records != one.records or size != os.fstat(task.raw.fileno()).st_size:
                    raise CorruptionError(folder, 0, "size", f"{one.name}: expected {one.records} whole records")
            for lane in one.lanes:
                known.setdefault(lane, len(known))
            self._own_lanes.append(np.array([known[lane] for lane in one.lanes], np.int64))
            self._records += records
        self.lanes = list(known)
        if ordered and staged:
            self._sorted = _Sorted(self._tables(), [os.path.join(folder, f"{one.name}.log") for one in staged])

    def __len__(self) -> int:
        return self._records

    def close(self) -> None:
        if self._sorted is not None:
            self._sorted.close()

    def blocks(self) -> Iterator[_Block]:
        """Yield all records, block by block; may be called several times."""
        if self._sorted is not None:
            yield from self._sorted.blocks()
            return
        number, begin = -1, 0
        for task, table, lane in self._tables():
            if task.number != number:
                number, begin = task.number, 0
            sizes = _ints(table["size"])
            record_of_key, hashes = _keys(table["keys"].combine_chunks())
            yield _Block(sizes, lane, _ints(table["tagsCode"]), record_of_key, hashes, _reader(task.raw, begin, sizes))
            begin += int(sizes.sum())

    def _tables(self) -> Iterator[tuple[_Numbered, pa.Table, Ints]]:
        """Yield the rows of each task with the numbers of their queues."""
        for number, (one, own) in enumerate(zip(self._staged, self._own_lanes, strict=True)):
            with _Task(self._folder, one) as task:
                for table in task.tables():
                    yield _Numbered(number, task.raw), table, own[_ints(table["lane"])]


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
        for first, upto, start in zip(self._firsts[:-1], self._firsts[1:], before, strict=True):
            self._begins[first:upto] -= start
        values = pa.chunked_array(orders)
        ranks = _ints(pc.rank(values, sort_keys="ascending", tiebreaker="first"))
        order = np.empty(len(ranks), np.int64)
        order[ranks - 1] = np.arange(len(ranks))
        self._order = np.roll(order, values.null_count)  # nulls first, as Spark sorts
        self._raw = [FileIO(path) for path in paths]

    def close(self) -> None:
        for raw in self._raw:
            raw.close()

    def blocks(self) -> Iterator[_Block]:
        for at in range(0, len(self._order), _BLOCK_ROWS):
            which = self._order[at : at + _BLOCK_ROWS]
            counts = self._first_key[which + 1] - self._first_key[which]
            record_of_key = np.repeat(np.arange(len(which)), counts)
            within = np.arange(len(record_of_key)) - np.repeat(np.cumsum(counts) - counts, counts)
            hashes = self._key_hashes[self._first_key[which][record_of_key] + within].astype(np.int64)
            sizes, lane, codes = (column[which].astype(np.int64) for column in (self._sizes, self._lane, self._codes))
            yield _Block(sizes, lane, codes, record_of_key, hashes, partial(self._read, which))

    def _read(self, which: Ints, begin: int, end: int) -> bytearray:
        chosen = which[begin:end]
        tasks = np.searchsorted(self._firsts, chosen, "right") - 1
        rows = zip(tasks.tolist(), self._begins[chosen].tolist(), self._sizes[chosen].tolist(), strict=True)
        return bytearray(b"".join([os.pread(self._raw[task].fileno(), size, at) for task, at, size in rows]))


def _reader(raw: FileIO, first: int, sizes: Ints) -> Callable[[int, int], bytearray]:
    """Return a function that reads records which lie one behind the other from ``first`` on."""
    bounds = np.concatenate(([0], np.cumsum(sizes))) + first

    def read(begin: int, end: int) -> bytearray:
        data = bytearray(int(bounds[end] - bounds[begin]))
        raw.seek(int(bounds[begin]))
        if raw.readinto(data) != len(data):
            raise CorruptionError(str(raw.name), int(bounds[begin]), "size", "the file was cut since it was written")
        return data

    return read


def _ints(column: pa.Array | pa.ChunkedArray) -> Ints:
    found: Ints = column.to_numpy(zero_copy_only=False) if isinstance(column, pa.Array) else column.to_numpy()
    return found.astype(np.int64)


def _keys(lists: pa.Array) -> tuple[Ints, Ints]:
    """Return the row of each key, ascending, and the hashes of all keys."""
    lengths = _ints(pc.list_value_length(lists))
    return np.repeat(np.arange(len(lists)), lengths), _ints(lists.flatten())


@dataclass(slots=True)
class _Placed:
    """A block with the places that its records get."""

    block: _Block
    places: Ints
    queue_offsets: Ints


def _placed(records: _Staging, lanes: Sequence[Lane], end: int, file_size: int) -> Iterator[_Placed]:
    """Yield all blocks with the places of their records behind ``end`` and behind the queues' ends."""
    following = np.array([lane.next_queue_offset for lane in lanes], np.int64)
    for block in records.blocks():
        places = _places(block.sizes, end, file_size)
        end = int(places[-1] + block.sizes[-1])
        queue_offsets = following[block.lane] + _ranks(block.lane, len(lanes))
        following += np.bincount(block.lane, minlength=len(lanes))
        yield _Placed(block, places, queue_offsets)


def _extent(records: _Staging, end: int, file_size: int) -> tuple[int, int, int]:
    """Return where the first record begins, where the last one begins, and where it ends."""
    begin = last = -1
    for block in records.blocks():
        places = _places(block.sizes, end, file_size)
        begin = int(places[0]) if begin < 0 else begin
        last, end = int(places[-1]), int(places[-1] + block.sizes[-1])
    return begin, last, end


def _bring_in(store: MessageStore, job: str, records: _Staging, folder: str) -> None:
    """Write the records, show them, then derive queues and index; meanwhile the staged files are flushed away."""
    log, now_ms = store.log, store.clock.now_ms()
    old_end = log.end
    lanes = [store._lane(*lane) for lane in records.lanes]
    begin, last, end = _extent(records, old_end, log.file_size)
    try:
        shown = _write(store, job, records, lanes, (begin, end), now_ms)
        log.flush()
        log.patch(begin, shown)  # within one sector: there or not
    except BaseException:
        log.truncate(old_end)
        store.files.delete(_note(store.path, job))
        raise
    log.last_write = last
    try:
        with ThreadPoolExecutor(1) as beside:
            flushed = beside.submit(log.flush)
            if not store.config.enable_consumequeue_ext:
                _derive(store, records, lanes, old_end, now_ms)
            flushed.result()
        records.close()
        discard(folder)
        if store.config.enable_consumequeue_ext:  # units with their bitmaps are made by recovery, one by one
            store.abandon()
            MessageStore.open(store.path, background=False).close()
        else:
            store._dispatcher.dispatched_timestamp_ms = now_ms
    except BaseException:
        store.abandon()  # the records are there: the next open makes what follows from them
        raise


def _write(
    store: MessageStore,
    job: str,
    records: _Staging,
    lanes: Sequence[Lane],
    extent: tuple[int, int],
    now_ms: int,
) -> bytes:
    """Write the records but for the first bytes, which are returned."""
    log, (begin, end) = store.log, extent
    shown = b""
    with ThreadPoolExecutor(1) as beside:  # it writes a chunk while the next one is made ready
        written: Future[None] | None = None
        for placed in _placed(records, lanes, log.end, log.file_size):
            places = placed.places
            for first, upto in _chunks(places, placed.block.sizes, log.file_size):
                data = placed.block.read(first, upto)
                _fill_in(data, places[first:upto], placed.queue_offsets[first:upto], now_ms)
                if written is None:
                    gate = min(len(data), _SECTOR - begin % _SECTOR)
                    shown = bytes(data[:gate])
                    _write_note(store, job, begin, end, bytes(data[:_TOLD]), len(records))
                    data[:gate] = bytes(gate)
                else:
                    written.result()
                if log.claim(len(data)) != int(places[first]):
                    raise CorruptionError(
                        log.sequence.folder, int(places[first]), "record", "the log is not where it was"
                    )
                written = beside.submit(log.append_block, data)
        assert written is not None
        written.result()
    return shown


def _derive(store: MessageStore, records: _Staging, lanes: Sequence[Lane], old_end: int, now_ms: int) -> None:
    """Write queue entries and keys of all records, block by block, as the store's dispatcher writes its batches."""
    with ThreadPoolExecutor(1) as beside:
        indexed: Future[None] | None = None
        for placed in _placed(records, lanes, old_end, store.log.file_size):
            block = placed.block
            if indexed is not None:
                indexed.result()
            stored = np.full(len(placed.places), now_ms, np.int64)
            indexed = beside.submit(
                store.index.append_block, placed.places, stored, block.record_of_key, block.key_hashes
            )
            _derive_queues(store, placed, lanes)
        if indexed is not None:
            indexed.result()


def _derive_queues(store: MessageStore, placed: _Placed, lanes: Sequence[Lane]) -> None:
    block = placed.block
    entries = np.empty(len(placed.places), ENTRY_DTYPE)
    entries["physical_offset"], entries["size"], entries["tags_code"] = placed.places, block.sizes, block.codes
    order = np.argsort(block.lane, kind="stable")
    numbers, firsts = np.unique(block.lane[order], return_index=True)
    dispatcher = store._dispatcher
    for number, first, upto in zip(numbers.tolist(), firsts, [*firsts[1:], len(order)], strict=True):
        lane, chosen = lanes[number], order[first:upto]
        lane.queue.append_many(lane.next_queue_offset, entries[chosen].tobytes())
        lane.next_queue_offset += len(chosen)
        dispatcher.unflushed.add(lane.queue)
    dispatcher.entries += len(order)


def _ranks(lane: Ints, lanes: int) -> Ints:
    """Return each record's rank within its queue."""
    order = np.argsort(lane, kind="stable")
    begins = np.searchsorted(lane[order], np.arange(lanes))
    ranks = np.empty(len(lane), np.int64)
    ranks[order] = np.arange(len(lane)) - begins[lane[order]]
    return ranks


def _places(sizes: Ints, end: int, file_size: int) -> Ints:
    """Return where records go from ``end`` on: to the next file where one does not fit with a blank behind it."""
    if int(sizes.max()) + record.BLANK_SIZE > file_size:
        raise MessageIllegalError(f"a record of {sizes.max()} bytes does not fit a log file of {file_size} bytes")
    sums = np.cumsum(sizes)
    places = np.empty(len(sizes), np.int64)
    at = 0
    while at < len(sizes):
        limit = end - end % file_size + file_size - record.BLANK_SIZE
        before = int(sums[at - 1]) if at else 0
        upto = int(np.searchsorted(sums, before + max(0, limit - end), "right"))
        if upto == at:
            end = limit + record.BLANK_SIZE
            continue
        places[at:upto] = end + (sums[at:upto] - sizes[at:upto] - before)
        end = int(places[upto - 1] + sizes[upto - 1])
        at = upto
    return places


def _chunks(places: Ints, sizes: Ints, file_size: int) -> Iterator[tuple[int, int]]:
    """Yield runs of records that go into one file, some MiB at a time."""
    files = places // file_size
    sums = np.cumsum(sizes)
    at = 0
    while at < len(places):
        before = int(sums[at - 1]) if at else 0
        upto = max(at + 1, int(np.searchsorted(sums, before + CHUNK_BYTES, "right")))
        upto = min(upto, int(np.searchsorted(files, files[at], "right")))
        yield at, upto
        at = upto


def _fill_in(data: bytearray, places: Ints, queue_offsets: Ints, now_ms: int) -> None:
    """Put in what was zero: physical offset, queue offset, store time."""
    at = places - places[0]
    raw: npt.NDArray[np.uint8] = np.frombuffer(data, np.uint8)
    window = np.ndarray((len(raw) - 7,), ">i8", raw, strides=(1,))
    window[at + record.QUEUE_OFFSET_AT] = queue_offsets
    window[at + record.PHYSICAL_OFFSET_AT] = places
    wide = (raw[at + record.SYS_FLAG_AT + 3] & record.BORN_HOST_V6) != 0
    window[at + record.STORE_TIMESTAMP_AT + record.HOST_V6_EXTRA * wide] = now_ms
