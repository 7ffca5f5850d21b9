"""``df.write.format("rocketmq")``: Spark's writer, over `encode` (in workers) and `commit` (on the driver)."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from librmq.clock import SystemClock
from librmq.errors import ConfigError
from librmq.files.disk import DiskFiles
from librmq.files.seam import make_folders
from librmq.spark.commit import commit, wait_until_free
from librmq.spark.encode import Encoder, check_columns
from librmq.spark.names import written_batch, written_schema
from librmq.spark.options import WriteOptions, local_path
from librmq.spark.staged_records import Staged, discard, job_folder
from librmq.store.engine.open_store import QueueName
from librmq.store.format import directory
from librmq.store.format.job_notes import note_path

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

BATCH_ROWS: Final = 8192
BATCH_BYTES: Final = 64 << 20


@dataclass
class Ready(WriterCommitMessage):
    """A task's report to the driver, without messages."""

    staged: Staged


class StagingWriter:
    """The part of a writer that stages rows; made and checked on the driver, `write` runs in workers."""

    def __init__(self, options: WriteOptions, schema: StructType, job: str) -> None:
        columns = [(field.name, field.dataType.simpleString()) for field in schema.fields]
        check_columns(written_schema(columns) if options.names == "kafka" else columns, options.order_by)
        files = DiskFiles()
        directory.check_kind(options.path, files, writable=True)
        wait_until_free(options.path, options.wait_seconds)  # before all the work
        config = directory.infer_config(options.path, files)
        self._options = options
        self._job = job
        self._folder = job_folder(options.path, self._job, options.staging)
        self._encoder = Encoder(
            topic=options.topic,
            queue_id=options.queue_id,
            queues=options.queues,
            host=config.store_host,
            max_body=config.max_message_size,
            max_record=config.commitlog_file_size - 8,
        )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Encode a task's rows into two files.

        Closing makes them visible to the driver. A commit does not need them on a device.
        """
        context = TaskContext.get()
        task = 0 if context is None else context.partitionId()
        # A repeated or doubled task writes other files; the commit uses the files of one.
        attempt = "0" if context is None else f"{context.attemptNumber()}-{context.taskAttemptId()}"
        name = f"t{task:06d}-{attempt}-{uuid.uuid4().hex[:8]}"
        make_folders(DiskFiles(), self._folder)
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
        return Ready(Staged(name, task, rows, tuple(lanes)))

    def _commit(self, messages: list[WriterCommitMessage | None], job: str, *, keep_note: bool) -> None:
        staged = [message.staged for message in messages if isinstance(message, Ready) and message.staged.records]
        options = self._options
        commit(
            options.path,
            job,
            staged,
            self._folder,
            ordered=options.order_by is not None,
            keep_note=keep_note,
            wait_seconds=options.wait_seconds,
        )


class Writer(StagingWriter, DataSourceArrowWriter):
    """The writer of a batch."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        super().__init__(options, schema, options.job_id or f"job-{uuid.uuid4().hex}")

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit the staged files to the store, on the driver."""
        self._commit(messages, self._job, keep_note=self._options.job_id is not None)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete the staged files, on the driver."""
        discard(self._folder)


class StreamWriter(StagingWriter, DataSourceStreamArrowWriter):
    """The writer of a stream, whose batches are jobs: a batch that Spark repeats writes nothing.

    Spark makes it again for each batch and each commit, so its name comes from the options or the checkpoint.
    """

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        super().__init__(options, schema, f"stream-{options.job_id or _query_id(options.checkpoint)}")

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's)
        """Commit the staged files of a batch to the store, on the driver."""
        self._commit(messages, f"{self._job}.{batchId}", keep_note=True)
        # Spark repeats no batch but the last.
        DiskFiles().delete(note_path(self._options.path, f"{self._job}.{batchId - 1}"))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Delete the staged files, on the driver."""
        discard(self._folder)


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
    sizes = pc.binary_length(column.cast(pa.binary())).fill_null(0).to_numpy(zero_copy_only=False)
    sums = np.cumsum(sizes.astype(np.int64))
    at = 0
    while at < batch.num_rows:
        before = int(sums[at - 1]) if at else 0
        until = max(at + 1, int(np.searchsorted(sums, before + BATCH_BYTES, "right")))
        until = min(until, at + BATCH_ROWS, batch.num_rows)
        yield batch.slice(at, until - at)
        at = until
