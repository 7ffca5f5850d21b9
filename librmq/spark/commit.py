"""Records that tasks have made ready, brought into a store: all of them or none, whatever happens.

::

    librmq/spark/<job>/<task>.log      records, what only the store knows still zero
    librmq/spark/<job>/<task>.arrow    a row a record: size, queue, tags code, keys, what to order by
    librmq/spark/<job>.json            {"version", "begin", "end", "first", "records", "done"}: where the records of the
                                       job are to stand in the log, how the first of them begins, whether all is done

Everything is written behind the log's end but for the first bytes, up to the end of their sector: to whoever looks, the
log ends where it did. When all of that has reached the device those bytes are written, and the whole is there at once.
A process that dies before leaves a sector that was never written, which recovery knows from crashes of the broker, and
cuts; one that dies behind leaves records whose queue entries and keys recovery makes. A job's file tells which of the
two it was, by looking whether its first record stands where it was to stand, so that a commit may be repeated. When
retention has taken that place away, only what the file says is known: done, or not, as a process that died left it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from io import FileIO
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from librmq.columns.decode import Ints
from librmq.consumequeue import ENTRY_DTYPE
from librmq.errors import ConfigError, CorruptionError, MessageIllegalError
from librmq.files.disk import DiskFiles
from librmq.files.seam import make_folders
from librmq.message import record
from librmq.spark.encode import Lane
from librmq.store import MessageStore
from librmq.store.engine.dispatch import Lane as LaneOfStore
from librmq.store.format import directory

__all__ = ["Staged", "commit", "discard", "job_folder"]

CHUNK_BYTES: Final = 2 << 20
_SECTOR: Final = 512
_TOLD: Final = 64


@dataclass(frozen=True, slots=True)
class Staged:
    """What a task has made ready: files ``name``.log and ``name``.arrow, its number, and the queues of its records."""

    name: str
    task: int
    records: int
    lanes: tuple[Lane, ...]


def job_folder(path: str, job: str, staging: str | None) -> str:
    """Where the files of a job are."""
    return os.path.join(staging or os.path.join(path, directory.OWN, "spark"), job)


def _note(path: str, job: str) -> str:
    return os.path.join(path, directory.OWN, "spark", f"{job}.json")


def discard(folder: str) -> None:
    """Delete the files of a job."""
    files = DiskFiles()
    for entry in files.list(folder):
        with suppress(OSError):
            files.delete(os.path.join(folder, entry.name))
    with suppress(OSError):
        os.rmdir(folder)


def commit(path: str, job: str, staged: Sequence[Staged], folder: str, *, ordered: bool, keep_note: bool) -> int:
    """Bring the records of ``staged`` into the store in ``path``; how many there are, 0 if that was done before.

    Returns when they have reached the device. `StoreLockedError` if somebody else writes to the store. After an error
    the store is as it was, unless it came when the records were shown already: then the next open completes what
    follows from them, and the same job, committed again, finds them there.
    """
    files = DiskFiles()
    make_folders(files, os.path.join(path, directory.OWN, "spark"))
    with MessageStore.open(path, background=False) as store:
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


def _opened(folder: str, one: Staged) -> tuple[pa.Table, FileIO]:
    path = os.path.join(folder, one.name)
    try:
        with pa.memory_map(f"{path}.arrow") as source:
            return pa.ipc.open_file(source).read_all(), FileIO(f"{path}.log")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: what a task wrote is not there: driver and workers must share this folder (option staging names "
            "another)"
        ) from None


class _Staging:
    """The records of all tasks, in the order in which they go into the log."""

    def __init__(self, folder: str, staged: Sequence[Staged], ordered: bool) -> None:
        self.lanes: list[Lane] = []
        known: dict[Lane, int] = {}
        tables: list[pa.Table] = []
        self._raw: list[FileIO] = []
        begins, tasks, lanes = [], [], []
        try:
            for number, one in enumerate(staged):
                table, raw = _opened(folder, one)
                self._raw.append(raw)
                sizes = table["size"].to_numpy().astype(np.int64)
                if len(table) != one.records or int(sizes.sum()) != os.fstat(raw.fileno()).st_size:
                    raise CorruptionError(folder, 0, "size", f"{one.name}: expected {one.records} whole records")
                tables.append(table)
                begins.append(np.cumsum(sizes) - sizes)
                tasks.append(np.full(len(sizes), number, np.int64))
                for lane in one.lanes:
                    known.setdefault(lane, len(known))
                own = np.array([known[lane] for lane in one.lanes], np.int64)
                lanes.append(own[table["lane"].to_numpy()] if len(own) else np.zeros(0, np.int64))
        except BaseException:
            self.close()
            raise
        self.lanes = list(known)
        empty: Ints = np.zeros(0, np.int64)
        self.begins = np.concatenate([*begins, empty])
        self._task = np.concatenate([*tasks, empty])
        self.lane = np.concatenate([*lanes, empty])
        table = pa.concat_tables(tables) if tables else None
        self.sizes: Ints = table["size"].to_numpy().astype(np.int64) if table is not None else empty
        self.codes: Ints = table["tagsCode"].to_numpy() if table is not None else empty
        keys = table["keys"].combine_chunks() if table is not None else pa.array([], pa.list_(pa.int64()))
        self._sorted = False
        if ordered and table is not None:
            ranks = pc.rank(table["order"], sort_keys="ascending", null_placement="at_start", tiebreaker="dense")
            stable = np.argsort(ranks.to_numpy(), kind="stable")
            self.begins, self._task, self.lane = self.begins[stable], self._task[stable], self.lane[stable]
            self.sizes, self.codes, keys = self.sizes[stable], self.codes[stable], keys.take(pa.array(stable))
            self._sorted = True
        lengths = pc.list_value_length(keys).to_numpy(zero_copy_only=False).astype(np.int64)
        self.record_of_key: Ints = np.repeat(np.arange(len(self.sizes)), lengths)
        self.key_hashes: Ints = keys.flatten().to_numpy()

    def __len__(self) -> int:
        return len(self.sizes)

    def close(self) -> None:
        for raw in self._raw:
            raw.close()

    def data(self, begin: int, end: int) -> bytearray:
        """The bytes of records ``begin`` to ``end``, one behind the other."""
        if not self._sorted and self._task[begin] == self._task[end - 1]:
            first = int(self.begins[begin])
            data = bytearray(int(self.begins[end - 1] + self.sizes[end - 1]) - first)
            raw = self._raw[self._task[begin]]
            raw.seek(first)
            if raw.readinto(data) != len(data):
                raise CorruptionError(raw.name, first, "size", "the file was cut since it was written")
            return data
        rows = zip(
            self._task[begin:end].tolist(), self.begins[begin:end].tolist(), self.sizes[begin:end].tolist(), strict=True
        )
        return bytearray(b"".join([os.pread(self._raw[task].fileno(), size, at) for task, at, size in rows]))


def _bring_in(store: MessageStore, job: str, records: _Staging, folder: str) -> None:
    """Write the records, show them, and what is derived from them; what was staged goes meanwhile."""
    log, now_ms = store.log, store.clock.now_ms()
    old_end = log.end
    lanes = [store._lane(*lane) for lane in records.lanes]
    first_offsets = np.array([lane.next_queue_offset for lane in lanes], np.int64)
    queue_offsets = first_offsets[records.lane] + _ranks(records.lane, len(lanes))
    places = _places(records.sizes, old_end, log.file_size)
    begin = int(places[0])
    try:
        shown = _write(store, job, records, places, queue_offsets, now_ms)
        log.flush()
        log.patch(begin, shown)  # within one sector: there or not
    except BaseException:
        log.truncate(old_end)
        store.files.delete(_note(store.path, job))
        raise
    log.last_write = int(places[-1])

    def settle() -> None:
        log.flush()
        records.close()
        discard(folder)

    try:
        with ThreadPoolExecutor(2) as beside:
            tasks = [beside.submit(settle)]
            if not store.config.enable_consumequeue_ext:
                stored = np.full(len(places), now_ms, np.int64)
                hashes = records.record_of_key, records.key_hashes
                tasks.append(beside.submit(store.index.append_block, places, stored, *hashes))
                _derive_queues(store, records, lanes, places)
        for task in tasks:
            task.result()
        if store.config.enable_consumequeue_ext:  # units with their bitmaps are made by recovery, one by one
            store.abandon()
            MessageStore.open(store.path, background=False).close()
        else:
            store._dispatcher.dispatched_timestamp_ms = now_ms
    except BaseException:
        store.abandon()  # the records are there: the next open makes what follows from them
        raise


def _write(store: MessageStore, job: str, records: _Staging, places: Ints, queue_offsets: Ints, now_ms: int) -> bytes:
    """Write the records but for the first bytes, which are returned."""
    log, begin = store.log, int(places[0])
    shown = b""
    with ThreadPoolExecutor(1) as beside:  # it writes a chunk while the next one is made ready
        written: Future[None] | None = None
        for first, upto in _chunks(places, records.sizes, log.file_size):
            data = records.data(first, upto)
            _fill_in(data, places[first:upto], queue_offsets[first:upto], now_ms)
            if written is None:
                gate = min(len(data), _SECTOR - begin % _SECTOR)
                shown = bytes(data[:gate])
                end = int(places[-1] + records.sizes[-1])
                _write_note(store, job, begin, end, bytes(data[:_TOLD]), len(records))
                data[:gate] = bytes(gate)
            else:
                written.result()
            if log.claim(len(data)) != int(places[first]):
                raise CorruptionError(log.sequence.folder, int(places[first]), "record", "the log is not where it was")
            written = beside.submit(log.append_block, data)
        assert written is not None
        written.result()
    return shown


def _derive_queues(store: MessageStore, records: _Staging, lanes: list[LaneOfStore], places: Ints) -> None:
    """Queue entries of all records at once, as the store's own dispatcher writes them batch by batch."""
    entries = np.empty(len(places), ENTRY_DTYPE)
    entries["physical_offset"], entries["size"], entries["tags_code"] = places, records.sizes, records.codes
    order = np.argsort(records.lane, kind="stable")
    bounds = np.searchsorted(records.lane[order], np.arange(len(lanes) + 1))
    dispatcher = store._dispatcher
    for number, lane in enumerate(lanes):
        chosen = order[bounds[number] : bounds[number + 1]]
        lane.queue.append_many(lane.next_queue_offset, entries[chosen].tobytes())
        lane.next_queue_offset += len(chosen)
        dispatcher.unflushed.add(lane.queue)
    dispatcher.entries += len(places)


def _ranks(lane: Ints, lanes: int) -> Ints:
    """Of each record its number among those of its queue."""
    order = np.argsort(lane, kind="stable")
    begins = np.searchsorted(lane[order], np.arange(lanes))
    ranks = np.empty(len(lane), np.int64)
    ranks[order] = np.arange(len(lane)) - begins[lane[order]]
    return ranks


def _places(sizes: Ints, end: int, file_size: int) -> Ints:
    """Where records go from ``end`` on: to the next file where one does not fit with a blank behind it."""
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
    """Runs of records that go into one file, some MiB at a time."""
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
