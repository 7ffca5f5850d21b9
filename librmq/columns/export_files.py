"""The files of an export: a folder of Parquet files, or one file of CSV or JSON lines.

All is written under a temporary name beside the path, and flushed; then it gets its name.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import io
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from librmq.columns.decode import TYPES
from librmq.errors import StoreIOError
from librmq.files.disk import DiskFiles
from librmq.message.printable import cell, guarded, is_safe_in_cell, printable

_GROUP_ROWS: Final = 1 << 16
_GROUP_BYTES: Final = 64 << 20
DATE: Final = "date"
"""The name of the partition by day of storing."""
_FIRST_MS: Final = -62_135_596_800_000
_END_MS: Final = 253_402_300_800_000
"""Begin and exclusive end of the years 1 to 9999, which ISO 8601 has."""
_Steps = Iterable[Iterator[pa.RecordBatch]]


@contextlib.contextmanager
def unfinished(path: str) -> Iterator[str]:
    """Yield a temporary name, which becomes ``path`` at the end; after an error nothing is left.

    Raises:
        StoreIOError: The system refuses to write.
    """
    folder = os.path.dirname(path)
    part = os.path.join(folder, f".librmq-{secrets.token_hex(4)}.tmp")
    try:
        yield part
        os.rename(part, path)
        DiskFiles().flush_folder(folder)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(part)
        if isinstance(error, OSError) and not isinstance(error, StoreIOError):
            raise StoreIOError("export", path, error) from error
        raise


def write_parquet(path: str, steps: _Steps, schema: pa.Schema, partition_by: Sequence[str]) -> int:
    """Write a folder of Parquet files, one or more for each step; return their number."""
    os.mkdir(path)
    names = [*schema.names, *(name for name in partition_by if name not in schema.names)]
    kinds = TYPES | {DATE: pa.string()}
    file_schema = pa.schema([(name, kinds[name]) for name in names])
    count = 0
    for number, batches in enumerate(steps):
        # The writer must not be called without a batch: it would write a file without rows.
        if (first := next(batches, None)) is None:
            continue
        arranged = (_arranged(batch, names, partition_by) for step in ([first], batches) for batch in step)
        template = f"part-{number:06d}-{{i}}.parquet"
        if partition_by:
            written = _partitioned(path, arranged, file_schema, template, partition_by)
        else:  # a dataset of one file takes a quarter longer
            written = [os.path.join(path, template.format(i=0))]
            with pq.ParquetWriter(written[0], file_schema) as writer:
                for group in _groups(arranged):
                    writer.write_table(pa.Table.from_batches(group, file_schema))
        for file in written:
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        count += len(written)
    for folder, _, _ in os.walk(path):
        DiskFiles().flush_folder(folder)
    return count


def _arranged(batch: pa.RecordBatch, names: Sequence[str], partition_by: Sequence[str]) -> pa.RecordBatch:
    """Return a batch with the columns of a file, and those that name its folder."""
    if DATE in partition_by:
        batch = batch.append_column(DATE, pc.strftime(batch.column("storeTimestamp"), "%Y-%m-%d"))
    return batch.select(names)


def _partitioned(
    path: str, batches: Iterator[pa.RecordBatch], file_schema: pa.Schema, template: str, partition_by: Sequence[str]
) -> list[str]:
    """Write files in folders like ``topic=orders``; return their paths."""
    import pyarrow.dataset as ds

    files: list[str] = []
    ds.write_dataset(
        batches,
        path,
        schema=file_schema,
        format="parquet",
        basename_template=template,
        partitioning=ds.partitioning(pa.schema([file_schema.field(name) for name in partition_by]), flavor="hive"),
        existing_data_behavior="overwrite_or_ignore",
        preserve_order=True,  # without threads alone, the batches of a partition still overtake each other
        min_rows_per_group=_GROUP_ROWS,
        max_partitions=1 << 16,
        file_visitor=lambda file: files.append(file.path),
    )
    return files


def _groups(batches: Iterator[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Yield batches together that make a row group of a Parquet file."""
    group: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        group.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
            yield group
            group, rows, size = [], 0, 0
    if group:
        yield group


def write_text(path: str, steps: _Steps, schema: pa.Schema, form: str) -> int:
    """Write a file of CSV or JSON lines; return 1, the number of files."""
    names = list(schema.names)
    with open(path, "x", encoding="utf-8", newline="") as text:
        line = _lines(text, names, form)
        for batches in steps:
            for batch in batches:
                for row in _with_times_as_texts(batch.select(names)).to_pylist():
                    line(row)
        text.flush()
        os.fsync(text.fileno())
    return 1


def _lines(text: io.TextIOWrapper, names: list[str], form: str) -> Callable[[dict[str, Any]], object]:
    """Return how a row is written; CSV begins with the names of the columns."""
    if form == "jsonl":
        encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
        return lambda row: text.write(encode(_plain(row)) + "\n")
    columns = [column for name in names for column in ([name, f"{name}_b64"] if _is_bytes(name) else [name])]
    # Python 3.11 leaves a lone carriage return unquoted, where readers of CSV end the row.
    minimal, quoted = (
        csv.DictWriter(text, columns, lineterminator="\n", quoting=quoting)
        for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC)
    )
    minimal.writeheader()

    def line(row: dict[str, Any]) -> None:
        plain = _cells(row)
        has_return = any(isinstance(value, str) and "\r" in value for value in plain.values())
        (quoted if has_return else minimal).writerow(plain)

    return line


def _with_times_as_texts(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with times in the form of ISO 8601, or in milliseconds if they are outside of its years.

    A client chooses the time of a message's birth, so it can be any number.
    """
    for at, column in enumerate(batch.schema):
        if pa.types.is_timestamp(column.type):
            times = pc.divide(batch.column(at).view(pa.int64()), 1000)
            in_range = pc.and_(pc.greater_equal(times, _FIRST_MS), pc.less(times, _END_MS))
            texts = pc.strftime(pc.if_else(in_range, times, None).cast(pa.timestamp("ms")), "%Y-%m-%dT%H:%M:%SZ")
            batch = batch.set_column(at, column.name, pc.coalesce(texts, times.cast(pa.string())))
    return batch


def _cells(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose texts neither a terminal nor a spreadsheet obeys; `librmq import` gets the same message."""
    cells: dict[str, Any] = {}
    for name, value in _plain(row).items():
        if isinstance(value, dict):
            cells[name] = printable(json.dumps(value, ensure_ascii=False))
        elif not isinstance(value, str):
            cells[name] = value
        elif name not in TYPES or not _is_bytes(name):
            cells[name] = cell(value)
        elif is_safe_in_cell(value):
            cells[name] = guarded(value)
        else:
            cells[f"{name}_b64"] = base64.b64encode(value.encode()).decode()
    return cells


def _is_bytes(name: str) -> bool:
    return bool(pa.types.is_binary(TYPES[name]))


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row in JSON's types; bytes become text, or ``…_b64`` if they are not UTF-8."""
    plain: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, bytes):
            try:
                plain[name] = value.decode()
            except UnicodeDecodeError:
                plain[f"{name}_b64"] = base64.b64encode(value).decode()
        else:
            plain[name] = dict(value) if isinstance(value, list) else value
    return plain
