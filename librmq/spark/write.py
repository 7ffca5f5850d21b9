"""``df.write.format("rocketmq")``: Spark's writer, over `encode` (in workers) and `commit` (on the driver)."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from librmq.clock import SystemClock
from librmq.files.disk import DiskFiles
from librmq.files.seam import make_folders
from librmq.spark.commit import commit, wait_until_free
from librmq.spark.encode import Encoder, check_columns
from librmq.spark.options import WriteOptions
from librmq.spark.staged_records import Staged, discard, job_folder
from librmq.store.engine.queue_table import QueueName
from librmq.store.format import directory

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["Writer"]

BATCH_ROWS: Final = 8192
BATCH_BYTES: Final = 64 << 20


@dataclass
class Ready(WriterCommitMessage):
    """A task's report to the driver, without messages."""

    staged: Staged


class Writer(DataSourceArrowWriter):
    """A writer, made and checked on the driver; `write` runs in workers."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_columns([(field.name, field.dataType.simpleString()) for field in schema.fields], options.order_by)
        files = DiskFiles()
        directory.check_kind(options.path, files, writable=True)
        wait_until_free(options.path, options.wait_seconds)  # before all the work
        config = directory.infer_config(options.path, files)
        self._options = options
        self._job = options.job_id or f"job-{uuid.uuid4().hex}"
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
        # A repeated or doubled task writes other files; the commit uses those of one.
        attempt = "0" if context is None else f"{context.attemptNumber()}-{context.taskAttemptId()}"
        name = f"t{task:06d}-{attempt}-{uuid.uuid4().hex[:8]}"
        make_folders(DiskFiles(), self._folder)
        lanes: dict[QueueName, int] = {}
        rows = 0
        order = self._options.order_by
        path = os.path.join(self._folder, name)
        with open(f"{path}.log", "wb") as data, _Table(f"{path}.arrow") as table:
            for whole in iterator:
                for batch in _pieces(whole):
                    encoded = self._encoder.encode(batch, rows, SystemClock().now_ms())
                    rows += batch.num_rows
                    data.write(encoded.data)
                    own = np.array([lanes.setdefault(lane, len(lanes)) for lane in encoded.lanes], np.int32)
                    offsets = np.searchsorted(encoded.record_of_key, np.arange(batch.num_rows + 1)).astype(np.int32)
                    columns = {
                        "size": pa.array(encoded.sizes.astype(np.int32)),
                        "lane": pa.array(own[encoded.lane] if len(own) else encoded.lane),
                        "tagsCode": pa.array(encoded.tags_code),
                        "keys": pa.ListArray.from_arrays(pa.array(offsets), pa.array(encoded.key_hashes)),
                    }
                    if order is not None:
                        columns["order"] = batch.column(order)
                    table.write(columns)
        return Ready(Staged(name, task, rows, tuple(lanes)))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit the staged files to the store, on the driver."""
        staged = [message.staged for message in messages if isinstance(message, Ready) and message.staged.records]
        options = self._options
        commit(
            options.path,
            self._job,
            staged,
            self._folder,
            ordered=options.order_by is not None,
            keep_note=options.job_id is not None,
            wait_seconds=options.wait_seconds,
        )

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete the staged files, on the driver."""
        discard(self._folder)


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
