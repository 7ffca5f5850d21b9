"""``df.write.format("rocketmq")``: Spark's writer, over `encode` (in workers) and `commit` (on the driver).

The commit writes everything after the log's end, except the first bytes up to the end of their sector. To readers, the
log still ends where it did. When the rest has reached the device, the commit writes those first bytes, which makes all
records visible together. A process that dies before that leaves a sector that was never written; recovery cuts it, as
after a crash of the broker. A process that dies later leaves records without queue entries and keys, which recovery
adds. The job's note (`librmq.store.format.documents`) distinguishes the two by the first record: is it at its planned
place? So a commit can be repeated. When retention has deleted that place, only ``done`` in the note counts.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from librmq.clock import SystemClock
from librmq.columns.arrays import Ints, runs
from librmq.consumequeue_entries import entry_dtype
from librmq.errors import ConfigError, CorruptionError, MessageIllegalError, StoreLockedError
from librmq.files import DiskFiles, file_size
from librmq.files.interface import confine, make_folders
from librmq.message import record
from librmq.override import override
from librmq.spark._encode import Encoder, check_columns
from librmq.spark._kafka import written_batch, written_name, written_schema
from librmq.spark._options import WriteOptions, local_path, shows_conditions
from librmq.spark._source import freeze_modules
from librmq.spark._staged_records import Staged, StagedBlock, StagedRecords, discard, discard_old, missing, run_folder
from librmq.store import BrokerTables, MessageStore
from librmq.store.engine.dispatch import Lane
from librmq.store.engine.store_parts import QueueName
from librmq.store.format import directory
from librmq.store.format.documents import OWN_FOLDER
from librmq.store.format.spark_jobs import JobNote

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


# ---- the commit: all staged records of a job, or none

_T = TypeVar("_T")

CHUNK_BYTES: Final = 2 << 20
_BETWEEN_TRIES: Final = 0.1
"""Seconds between two tries to lock the store."""
_SECTOR: Final = 512


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
    """Add the records of ``staged`` to the store in ``path``, and return their number; 0 if the job was already done.

    Return when the records are on the device. After an error the store is unchanged, unless the records were already
    visible: then the next open completes queues and index, and a repeated commit of the job finds them.

    Raises:
        StoreLockedError: Another process still writes to the store after ``wait_seconds``.
    """
    files = DiskFiles()
    confine(files, path, OWN_FOLDER, *directory.WRITTEN_FOLDERS)
    make_folders(files, os.path.join(path, JobNote.FOLDER))
    with _when_free(lambda: MessageStore.open(path, background=False), wait_seconds) as store:
        if _was_committed(store, job):
            discard(folder)
            return 0
        with closing(StagedRecords(folder, sorted(staged, key=lambda file: file.task), ordered)) as records:
            if len(records):
                _add_queues(store, records.lanes)
                _bring_in(store, job, records, folder)
                if keep_note:
                    _mark_done(store, job)
                else:
                    files.delete(JobNote.path(path, job))
            elif keep_note:
                JobNote(store.log.end, store.log.end, b"", 0).write(JobNote.path(path, job), files)
                _mark_done(store, job)
            count = len(records)
    discard(folder)
    return count


def wait_until_free(path: str, wait_seconds: float) -> None:
    """Wait until no other process writes to the store in ``path``."""

    def ask() -> None:
        holder = DiskFiles().lock_holder(directory.lock_path(path))
        if holder is not None:
            raise StoreLockedError(
                f"{path}: locked by {holder}; only one process can write to a store: close it there, "
                "or raise the option wait"
            )

    _when_free(ask, wait_seconds)


def _when_free(action: Callable[[], _T], wait_seconds: float) -> _T:
    """Return the result of ``action`` once it raises no `StoreLockedError`, within ``wait_seconds``."""
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
    note = JobNote.path(store.path, job)
    if file_size(store.files, note) is None:
        return False
    return JobNote.read(note, store.files).is_committed(store.log.begin, store.log.end, store.log.data_at)


def _mark_done(store: MessageStore, job: str) -> None:
    note = JobNote.path(store.path, job)
    replace(JobNote.read(note, store.files), done=True).write(note, store.files)


@dataclass(slots=True)
class _Placed:
    """A block with the places of its records."""

    block: StagedBlock
    places: Ints
    queue_offsets: Ints


def _placed(records: StagedRecords, lanes: Sequence[Lane], end: int, file_size: int) -> Iterator[_Placed]:
    """Yield all blocks with the places of their records after ``end`` and after the queues' ends."""
    following = np.array([lane.next_queue_offset for lane in lanes], np.int64)
    for block in records.record_blocks():
        places = _places(block.sizes, end, file_size)
        end = int(places[-1] + block.sizes[-1])
        queue_offsets = following[block.lane] + _ranks(block.lane, len(lanes))
        following += np.bincount(block.lane, minlength=len(lanes))
        yield _Placed(block, places, queue_offsets)


def _extent(records: StagedRecords, end: int, file_size: int) -> tuple[int, int, int]:
    """Return the start of the first record, and start and end of the last one."""
    begin = last = -1
    for block in records.record_blocks():
        places = _places(block.sizes, end, file_size)
        begin = int(places[0]) if begin < 0 else begin
        last, end = int(places[-1]), int(places[-1] + block.sizes[-1])
    return begin, last, end


def _add_queues(store: MessageStore, lanes: Sequence[QueueName]) -> None:
    """Let the broker's table of topics have these queues: a group gets no message of another one.

    The broker makes the table of a store without one, from the queues that it finds.
    """
    tables = BrokerTables.open(os.path.join(store.path, directory.CONFIG), files=store.files)
    if not tables.topics.is_new:
        for topic, queue_id in lanes:
            tables.add_queues(topic, queue_id + 1)
        tables.topics.persist(store.clock.now_ms())


def _bring_in(store: MessageStore, job: str, records: StagedRecords, folder: str) -> None:
    """Write the records, show them, then derive queues and index, and delete the staged files."""
    log, now_ms = store.log, store.clock.now_ms()
    old_end = log.end
    lanes = [store.appender.lane(*lane) for lane in records.lanes]
    begin, last, end = _extent(records, old_end, log.file_size)
    try:
        head = _write(store, job, records, lanes, (begin, end), now_ms)
        log.flush()
        log.patch(begin, head)  # within one sector, so it is atomic
    except BaseException:
        log.truncate(old_end)
        store.files.delete(JobNote.path(store.path, job))
        raise
    log.last_write = last
    try:
        with ThreadPoolExecutor(1) as executor:
            flushed = executor.submit(log.flush)
            if not store.config.enable_consumequeue_ext:
                _derive(store, records, lanes, old_end, now_ms)
            flushed.result()
        records.close()
        discard(folder)
        if store.config.enable_consumequeue_ext:  # recovery makes the units with their bitmaps
            store.abandon()
            MessageStore.open(store.path, background=False).close()
        else:
            store.appender.dispatcher.followed = log.end
            store.appender.dispatcher.dispatched_timestamp_ms = now_ms
            store.appender.dispatcher.order.add_few([now_ms], last)
    except BaseException:
        store.abandon()  # the records are stored: the next open adds entries and keys
        raise


def _write(
    store: MessageStore,
    job: str,
    records: StagedRecords,
    lanes: Sequence[Lane],
    extent: tuple[int, int],
    now_ms: int,
) -> bytes:
    """Write the records except their first bytes, which are returned."""
    log, (begin, end) = store.log, extent
    head = b""
    with ThreadPoolExecutor(1) as executor:  # writes a chunk while the next one is prepared
        written: Future[None] | None = None
        for placed in _placed(records, lanes, log.end, log.file_size):
            places = placed.places
            for first, until in runs(placed.block.sizes, CHUNK_BYTES, len(places), places // log.file_size):
                data = placed.block.read(first, until)
                _fill_in(data, places[first:until], placed.queue_offsets[first:until], now_ms)
                if written is None:
                    gate = min(len(data), _SECTOR - begin % _SECTOR)
                    head = bytes(data[:gate])
                    note = JobNote(begin, end, bytes(data[: JobNote.FIRST_BYTES]), len(records))
                    note.write(JobNote.path(store.path, job), store.files)
                    data[:gate] = bytes(gate)
                else:
                    written.result()
                if log.claim(len(data)) != int(places[first]):
                    raise CorruptionError(
                        log.sequence.folder, int(places[first]), "record", "expected the log's end here"
                    )
                written = executor.submit(log.append_block, data)
        assert written is not None
        written.result()
    return head


def _derive(store: MessageStore, records: StagedRecords, lanes: Sequence[Lane], old_end: int, now_ms: int) -> None:
    """Write queue entries and keys of all records, block by block, as the store's dispatcher writes its batches."""
    with ThreadPoolExecutor(1) as executor:
        indexed: Future[None] | None = None
        for placed in _placed(records, lanes, old_end, store.log.file_size):
            block = placed.block
            if indexed is not None:
                indexed.result()
            stored = np.full(len(placed.places), now_ms, np.int64)
            indexed = executor.submit(
                store.index.append_block, placed.places, stored, block.record_of_key, block.key_hashes
            )
            _derive_queues(store, placed, lanes)
        if indexed is not None:
            indexed.result()


def _derive_queues(store: MessageStore, placed: _Placed, lanes: Sequence[Lane]) -> None:
    block = placed.block
    entries = np.empty(len(placed.places), entry_dtype())
    entries["physical_offset"], entries["size"], entries["tags_code"] = placed.places, block.sizes, block.codes
    order = np.argsort(block.lane, kind="stable")
    numbers, firsts = np.unique(block.lane[order], return_index=True)
    dispatcher = store.appender.dispatcher
    for number, first, until in zip(numbers.tolist(), firsts, [*firsts[1:], len(order)], strict=True):
        lane, records = lanes[number], order[first:until]
        lane.queue.append_many(lane.next_queue_offset, entries[records].tobytes())
        lane.next_queue_offset += len(records)
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
    """Return the positions of records from ``end`` on; one that does not fit before a blank starts a new file."""
    if int(sizes.max()) + record.BLANK_SIZE > file_size:
        raise MessageIllegalError(f"a record of {sizes.max()} bytes does not fit a log file of {file_size} bytes")
    sums = np.cumsum(sizes)
    places = np.empty(len(sizes), np.int64)
    at = 0
    while at < len(sizes):
        limit = end - end % file_size + file_size - record.BLANK_SIZE
        before = int(sums[at - 1]) if at else 0
        until = int(np.searchsorted(sums, before + max(0, limit - end), "right"))
        if until == at:
            end = limit + record.BLANK_SIZE
            continue
        places[at:until] = end + (sums[at:until] - sizes[at:until] - before)
        end = int(places[until - 1] + sizes[until - 1])
        at = until
    return places


def _fill_in(data: bytearray, places: Ints, queue_offsets: Ints, now_ms: int) -> None:
    """Fill in the fields that were zero: physical offset, queue offset, store time."""
    at = places - places[0]
    raw: npt.NDArray[np.uint8] = np.frombuffer(data, np.uint8)
    window = np.ndarray((len(raw) - 7,), ">i8", raw, strides=(1,))
    window[at + record.QUEUE_OFFSET_AT] = queue_offsets
    window[at + record.PHYSICAL_OFFSET_AT] = places
    wide = (raw[at + record.SYS_FLAG_AT + 3] & record.BORN_HOST_V6) != 0
    window[at + record.STORE_TIMESTAMP_AT + record.HOST_V6_EXTRA * wide] = now_ms


_QUEUES: Final = 4
"""Number of queues of a topic that the store does not know, for rows without a queue."""


def _queues_of_topics(path: str) -> dict[str, int]:
    """Return the number of queues of each topic that clients write to and read."""
    rows = BrokerTables.open(os.path.join(path, directory.CONFIG)).topics.rows
    counts = {name: min(row.get("writeQueueNums", 0), row.get("readQueueNums", 0)) for name, row in rows.items()}
    return {name: count for name, count in counts.items() if count > 0}


BATCH_ROWS: Final = 8192
BATCH_BYTES: Final = 64 << 20


@dataclass
class Ready(WriterCommitMessage):
    """A task's report to the driver, without messages."""

    staged: Staged
    folder: str
    """Spark makes the writer of a stream again for each commit, so only its tasks know their run."""


@shows_conditions
class StagingWriter:
    """The part of a writer that stages rows; made and checked on the driver, `write` runs in workers."""

    def __init__(self, options: WriteOptions, schema: StructType, job: str) -> None:
        columns = [(field.name, field.dataType.simpleString()) for field in schema.fields]
        if options.names == "kafka":
            columns = written_schema(columns)
            options = replace(options, order_by=options.order_by and written_name(options.order_by))
        check_columns(columns, options.order_by)
        files = DiskFiles()
        directory.check_kind(options.path, files, writable=True)
        wait_until_free(options.path, options.wait_seconds)  # before all the work
        config = directory.infer_config(options.path, files)
        self._options = options
        self._job = job
        self._path = options.path
        now_ms = SystemClock().now_ms()
        self._folder = run_folder(options.path, self._job, options.staging, now_ms)
        discard_old(os.path.dirname(self._folder), now_ms)
        confine(files, self._path, OWN_FOLDER)
        make_folders(files, self._folder)
        self._encoder = Encoder(
            topic=options.topic,
            queue_id=options.queue_id,
            queues=options.queues or _QUEUES,
            host=config.store_host,
            max_body=config.max_message_size,
            max_record=config.commitlog_file_size - 8,
            queues_of=_queues_of_topics(options.path) if options.queues is None else {},
        )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Encode a task's rows into two files.

        Closing makes them visible to the driver. A commit does not need them on a device.
        """
        freeze_modules()
        context = TaskContext.get()
        task = 0 if context is None else context.partitionId()
        # A repeated or doubled task writes other files; the commit uses the files of one.
        attempt = "0" if context is None else f"{context.attemptNumber()}-{context.taskAttemptId()}"
        name = f"t{task:06d}-{attempt}-{uuid.uuid4().hex[:8]}"
        if not os.path.isdir(self._folder):  # a task that makes it again after the end of its job would leave it behind
            raise missing(self._folder)
        lanes: dict[QueueName, int] = {}
        rows = 0
        order = self._options.order_by
        path = os.path.join(self._folder, name)
        with open(f"{path}.log", "wb") as data, _Table(f"{path}.arrow") as table:
            for spark_batch in iterator:
                for batch in _pieces(written_batch(spark_batch) if self._options.names == "kafka" else spark_batch):
                    encoded = self._encoder.encode(batch, rows, SystemClock().now_ms())
                    rows += batch.num_rows
                    data.write(encoded.data)
                    lane_numbers = np.array([lanes.setdefault(lane, len(lanes)) for lane in encoded.lanes], np.int32)
                    offsets = np.searchsorted(encoded.record_of_key, np.arange(batch.num_rows + 1)).astype(np.int32)
                    columns = {
                        "size": pa.array(encoded.sizes.astype(np.int32)),
                        "lane": pa.array(lane_numbers[encoded.lane] if len(lane_numbers) else encoded.lane),
                        "tagsCode": pa.array(encoded.tags_code),
                        "keys": pa.ListArray.from_arrays(pa.array(offsets), pa.array(encoded.key_hashes)),
                    }
                    if order is not None:
                        columns["order"] = batch.column(order)
                    table.write(columns)
        return Ready(Staged(name, task, rows, tuple(lanes)), self._folder)

    def _commit(self, messages: list[WriterCommitMessage | None], job: str, *, keep_note: bool) -> None:
        ready = [message for message in messages if isinstance(message, Ready)]
        options = self._options
        commit(
            options.path,
            job,
            [message.staged for message in ready if message.staged.records],
            ready[0].folder if ready else self._folder,
            ordered=options.order_by is not None,
            keep_note=keep_note,
            wait_seconds=options.wait_seconds,
        )
        discard(self._folder)


@shows_conditions
class Writer(StagingWriter, DataSourceArrowWriter):
    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        super().__init__(options, schema, options.job_id or f"job-{uuid.uuid4().hex}")

    @override
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit the staged files to the store, on the driver."""
        self._commit(messages, self._job, keep_note=self._options.job_id is not None)

    @override
    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete the staged files, on the driver."""
        discard(self._folder)


@shows_conditions
class StreamWriter(StagingWriter, DataSourceStreamArrowWriter):
    """The writer of a stream, whose batches are jobs: a batch that Spark repeats writes nothing.

    Spark makes it again for each batch and each commit, so its name comes from the options or the checkpoint.
    """

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        super().__init__(options, schema, f"stream-{options.job_id or _query_id(options.checkpoint)}")

    @override
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's)
        """Commit the staged files of a batch to the store, on the driver."""
        self._commit(messages, f"{self._job}.{batchId}", keep_note=True)
        # Spark repeats no batch but the last.
        DiskFiles().delete(JobNote.path(self._options.path, f"{self._job}.{batchId - 1}"))

    @override
    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Delete the staged files, on the driver."""
        for folder in {self._folder, *(message.folder for message in messages if isinstance(message, Ready))}:
            discard(folder)


def _query_id(checkpoint: str | None) -> str:
    """Return the id that Spark gave the query with this checkpoint.

    A new checkpoint counts its batches from 0 again, but has another id.
    """
    try:
        with open(os.path.join(local_path(checkpoint or "."), "metadata"), "rb") as file:
            return str(uuid.UUID(json.load(file)["id"]))
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        raise ConfigError(
            f"option jobId: expected an id for this stream, found none, and no checkpoint in a mounted file system "
            f"({checkpoint}); use another id with each new checkpoint"
        ) from None


class _Table:
    """An Arrow file with the schema of its first batch."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._writer: Any = None

    def __enter__(self) -> _Table:
        return self

    def write(self, columns: dict[str, pa.Array]) -> None:
        batch = pa.RecordBatch.from_pydict(columns)
        if self._writer is None:
            self._writer = pa.ipc.new_file(self._path, batch.schema)
        self._writer.write_batch(batch)

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch so that the records of a piece fit into one buffer."""
    column = batch.column("body")
    sizes = pc.binary_length(column.cast(pa.binary())).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    for begin, end in runs(sizes, BATCH_BYTES, BATCH_ROWS, np.zeros(len(sizes), np.int64)):
        yield batch.slice(begin, end - begin)
