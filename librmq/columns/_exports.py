"""Messages of a store exported as a folder of Parquet files, one CSV file, or one file of JSON lines.

::

    OUT/part-000000-0.parquet     Parquet: one or more files for each step, perhaps in folders like topic=orders/
    .librmq-1f2e3d4c.tmp          beside OUT: the folder or file until all is written; then it gets its name

So an export is whole or absent. What is stored later goes to another path, with the setting ``since``.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, Unpack, get_args
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from librmq.columns._export_text import Batches, write_text
from librmq.columns.arrays import integers
from librmq.columns.decoding import CORRUPT, TYPES
from librmq.columns.options import log_unknown_topics
from librmq.columns.planned_store import PlannedStore
from librmq.columns.record_batches import ReaderKeywords, Store, batches_of, selection
from librmq.columns.remote import RemoteFiles, RemoteStore
from librmq.errors import ConfigError, StoreIOError
from librmq.files import DiskFiles
from librmq.files.interface import make_folders
from librmq.runtime.event_log import advance
from librmq.store.format import directory

ExportFormat = Literal["parquet", "csv", "jsonl"]

_STEP_BYTES: Final = 256 << 20
_UNIT_BYTES: Final = 4 << 20
_AHEAD: Final = 16
_AHEAD_BYTES: Final = 8 << 20
_OF_ENDINGS: Final = {"csv": "csv", "jsonl": "jsonl", "ndjson": "jsonl"}
_OF_FILE: Final = (1 << 16, 16 << 20)
"""Rows or bytes of a group of rows in a file."""
_OF_FOLDERS: Final = (sys.maxsize, 16 << 20)
"""Rows or bytes of a group of rows in the files of all folders together."""
_FOLDERS_OPEN: Final = 128
"""Folders whose files are kept open for more rows."""
_DATE: Final = "date"
"""The name of the partition by day of storing."""
_PARTITIONS: Final = ("topic", "queueId", _DATE)


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of a call of `export`: the file or folder, and how much is in it."""

    path: str
    """The file or folder."""
    rows: int
    """Number of rows."""
    files: int
    """Number of files."""
    damaged: int = 0
    """Number of damaged places: in mode ``PERMISSIVE`` each is reported by a row; in ``DROPMALFORMED`` they are left
    out."""
    skipped: bool = False
    """Whether messages are left out: damaged ones, or those after the end of a log that is read as recovered."""


def export(
    store: Store,
    out: str | os.PathLike[str],
    *,
    format: ExportFormat | None = None,
    partition_by: Sequence[str] = (),
    grep: str | None = None,
    **settings: Unpack[ReaderKeywords],
) -> Exported:
    """Write the messages of a store to ``out``, which is whole or absent.

    Parquet goes to a folder; CSV and JSON lines go to one file, with ``body_b64`` for a body that is not UTF-8.

    Args:
        store: The folder or URL of the store, or a `RemoteStore`.
        out: The folder or file, which must not exist; its parents need not exist.
        format: ``parquet``, ``csv`` or ``jsonl``; by default chosen by the suffix of ``out``, else Parquet.
        partition_by: For Parquet: make folders by ``topic``, ``queueId`` and ``date`` (of storing, in UTC).
        grep: A regular expression that occurs in the bodies to export, which are searched as UTF-8 text.
        **settings: Messages and columns to export, as for `librmq.columns.reader`, without ``view``, ``offsets``,
            ``files`` and ``fail_on_data_loss``.

    Raises:
        ConfigError: A setting is wrong, or ``out`` exists.
        DataLossError: Retention deleted messages while they were exported.
        StoreIOError: ``out`` cannot be written.
    """
    for name in ("view", "offsets", "files", "fail_on_data_loss"):
        if name in settings:
            raise ConfigError(f"{name}: an export reads all offsets of the view messages from the disk; leave it out")
    if not isinstance(store, str | os.PathLike | RemoteStore):
        raise ConfigError(f"store: expected one store, found {store!r:.80}; export each to a path of its own")
    pattern, path = _pattern(grep), _local_path(out)
    form = _format_of(path, format)
    partitions = _partitions(partition_by, form)
    options, schema, source_files = selection(store, settings)
    if isinstance(source_files, RemoteFiles):
        options = source_files.mirrored(options)
    else:
        _check_outside(path, options.paths[0])
    directory.check_kind(options.paths[0], source_files or DiskFiles())
    _check_free(path, form)
    drops = options.mode == "DROPMALFORMED"
    options = replace(options, reports_all_damage=True)
    if drops:
        options = replace(options, mode="PERMISSIVE")  # the reports are counted
    needed = [  # to write, and to choose and place rows
        *schema.names,
        *("storeTimestamp" if name == _DATE else name for name in partitions),
        *(["body"] if pattern is not None else []),
        *(["topic", CORRUPT] if options.mode != "FAILFAST" else []),
    ]
    columns = pa.schema([(name, TYPES[name]) for name in dict.fromkeys(needed)])
    with PlannedStore.open(options.paths[0], options, source_files) as planned:
        total = sum(queue.end - queue.begin for queue in planned.queues.values())
        is_cut_short = planned.is_cut_short
        log_unknown_topics(options, planned.topics)
        batches = batches_of(options, columns, source_files, planned.store)
    make_folders(DiskFiles(), os.path.dirname(path))
    with closing(_Steps(batches, pattern, total, drops_damaged=drops)) as source, _unfinished(path) as part:
        if form == "parquet":
            files = _write_parquet(part, source.steps(), schema, partitions)
        else:
            files = write_text(part, source.steps(), schema, form)
        _check_free(path, form)  # another export may have been faster
    return Exported(os.fspath(out), source.rows, files, source.damaged, is_cut_short or (drops and source.damaged > 0))


def _local_path(out: object) -> str:
    text = os.fspath(out) if isinstance(out, str | os.PathLike) else ""
    if not text or "\0" in text:
        raise ConfigError(f"out: expected the path of a folder or file, found {out!r:.80}")
    if "://" in text:
        raise ConfigError(
            f"out: expected a local path, found the URL {text:.80}; export to a folder and copy it, or give the "
            "batches of librmq.columns.reader to pyarrow.dataset.write_dataset"
        )
    return os.path.abspath(text)


def _pattern(grep: str | None) -> re.Pattern[str] | None:
    if not isinstance(grep, str | None):
        raise ConfigError(f"grep: expected the text of a regular expression, found {grep!r:.80}")
    try:
        return None if grep is None else re.compile(grep)
    except re.error as error:
        raise ConfigError(f"grep: {error} in {grep!r:.80}") from None


def _partitions(value: object, form: str) -> Sequence[str]:
    names: list[Any] = [value] if isinstance(value, str | bytes) or not isinstance(value, Iterable) else list(value)
    for name in names:
        if name not in _PARTITIONS or form != "parquet" or names.count(name) > 1:
            expected = f"expected some of {', '.join(_PARTITIONS)}, each once, for Parquet"
            raise ConfigError(f"partition_by: {expected}, found {name!r}")
    return names


def _format_of(path: str, form: str | None) -> str:
    forms = get_args(ExportFormat)
    if form is not None:
        if form not in forms:
            raise ConfigError(f"format: expected one of {', '.join(forms)}, found {form!r:.80}")
        return form
    ending = os.path.splitext(path)[1].lower().removeprefix(".")
    is_kind = ending.isalpha() or ending == "bz2"  # unlike the endings of folders such as orders.2026
    if is_kind and ending != "parquet" and ending not in _OF_ENDINGS and not os.path.isdir(path):
        raise ConfigError(f"out: .{ending} is no format of an export; use .csv or .jsonl, or name the format")
    return _OF_ENDINGS.get(ending, "parquet")


def _check_outside(path: str, store: str) -> None:
    """Refuse a path in the store, or the store itself; links don't hide it."""
    if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(store)):
        raise ConfigError(f"out: {path} is in the store; export to a folder outside of it")


def _check_free(path: str, form: str) -> None:
    """Refuse a path that exists; an empty folder will do for Parquet."""
    is_empty = form == "parquet" and os.path.isdir(path) and not os.path.islink(path) and not os.listdir(path)
    if os.path.lexists(path) and not is_empty:
        raise ConfigError(
            f"out: {path} exists; name a path that does not exist (what was stored since an earlier export goes to a "
            "path of its own, with since)"
        )


@dataclass(frozen=True, slots=True)
class _Unit:
    """Batches to write, and how much was read for them."""

    batches: Sequence[pa.RecordBatch]
    size: int
    read: int
    """Number of rows, also of those that were left out."""
    damaged: int


class _Steps:
    """Batches in steps of some hundred MiB.

    A thread reads the next units while the caller writes one. All work on batches is done there: each call of Arrow by
    the caller would let go of the interpreter, and wait to get it back.
    """

    def __init__(
        self,
        batches: pa.RecordBatchReader,
        pattern: re.Pattern[str] | None,
        total: int,
        *,
        drops_damaged: bool,
    ) -> None:
        """Only messages whose bodies have ``pattern`` are in the batches; ``total`` is the number to read."""
        self._batches = batches
        self._pattern = pattern
        self._drops_damaged = drops_damaged
        self._reports: set[str] = set()
        """Reports of damage that belong to no message, such as damage of a whole queue."""
        self._total = total
        self._read = 0
        self._executor = ThreadPoolExecutor(1)
        self._coming = deque([self._executor.submit(self._next_unit)])
        self._following: _Unit | None = None
        self.rows = self.damaged = 0

    def steps(self) -> Iterator[Iterator[pa.RecordBatch]]:
        """Yield the steps; each is to be read to its end before the next."""
        left = self._total
        while self._has_more():
            before = self._read
            yield self._step()
            # Arrow may read the step in a thread of its own, which knows nothing of who watches.
            done = min(self._read - before, left)
            left -= done
            advance(done, self._total)
        if left:  # messages that no filter let through
            advance(left, self._total)

    def _has_more(self) -> bool:
        if self._following is None:
            self._following = self._coming.popleft().result()
            size = 0 if self._following is None else self._following.size
            while len(self._coming) < max(1, min(_AHEAD, _AHEAD_BYTES // max(1, size))):
                self._coming.append(self._executor.submit(self._next_unit))
        return self._following is not None

    def _step(self) -> Iterator[pa.RecordBatch]:
        size = 0
        while size < _STEP_BYTES and self._has_more():
            assert self._following is not None
            unit, self._following = self._following, None
            for batch in unit.batches:
                self.rows += batch.num_rows
                yield batch
            size += unit.size
            self.damaged += unit.damaged
            self._read += unit.read

    def _next_unit(self) -> _Unit | None:
        batches: list[pa.RecordBatch] = []
        read = read_rows = size = damaged = 0
        while read < min(_UNIT_BYTES, _STEP_BYTES) and (batch := next(self._batches, None)) is not None:
            rows, reasons = self._rows_to_write(batch)
            damaged += reasons
            read += batch.nbytes
            read_rows += batch.num_rows
            if rows.num_rows:
                batches.append(rows)
                size += rows.nbytes
        return _Unit(batches, size, read_rows, damaged) if read_rows else None

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)
        self._batches.close()

    def _rows_to_write(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
        """Return the rows to write, and the number of damaged places among the rows read."""
        damaged = 0
        if CORRUPT in batch.schema.names:
            reasons = batch.column(CORRUPT)
            damaged = len(reasons) - reasons.null_count
            if damaged:
                batch = batch.filter(reasons.is_null() if self._drops_damaged else self._unreported(batch))
        return (batch if self._pattern is None else _with_body(batch, self._pattern)), damaged

    def _unreported(self, batch: pa.RecordBatch) -> pa.Array:
        """Return which rows to write: a report that belongs to no message is written once."""
        keep = []
        for topic, reason in zip(batch.column("topic").to_pylist(), batch.column(CORRUPT).to_pylist(), strict=True):
            is_apart = reason is not None and topic is None
            keep.append(not is_apart or reason not in self._reports)
            if is_apart:
                self._reports.add(reason)
        return pa.array(keep, pa.bool_())


def _with_body(batch: pa.RecordBatch, pattern: re.Pattern[str]) -> pa.RecordBatch:
    """Return the rows whose bodies have a text, and those about damage, which have no body."""
    matches = [
        body is not None and pattern.search(body.decode(errors="backslashreplace")) is not None
        for body in batch.column("body").to_pylist()
    ]
    keep = pa.array(matches, pa.bool_())
    if CORRUPT in batch.schema.names:
        keep = pc.or_(keep, batch.column(CORRUPT).is_valid())
    return batch.filter(keep)


# ---- the files, under a temporary name beside the path


@contextmanager
def _unfinished(path: str) -> Iterator[str]:
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
        with suppress(OSError):
            os.unlink(part)
        if isinstance(error, OSError) and not isinstance(error, StoreIOError):
            raise StoreIOError("export", path, error) from error
        raise


def _write_parquet(path: str, steps: Batches, schema: pa.Schema, partition_by: Sequence[str]) -> int:
    """Write a folder of Parquet files, one or more for each step; return their number."""
    os.mkdir(path)
    names = [*schema.names, *(name for name in partition_by if name not in schema.names)]
    kinds = TYPES | {_DATE: pa.string()}
    file_schema = pa.schema([(name, kinds[name]) for name in names if name not in partition_by])
    count = 0
    for number, batches in enumerate(steps):
        arranged = (_arranged(batch, names, partition_by) for batch in batches)
        written = _write_files(path, arranged, file_schema, f"part-{number:06d}-{{}}.parquet", partition_by)
        for file in written:
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        count += len(written)
    for folder, _, _ in os.walk(path):
        DiskFiles().flush_folder(folder)
    return count


def _arranged(batch: pa.RecordBatch, names: Sequence[str], partition_by: Sequence[str]) -> pa.RecordBatch:
    """Return a batch with the columns of a file, and those that name its folder, by which its rows are sorted."""
    if _DATE in partition_by:
        batch = batch.append_column(_DATE, pc.strftime(batch.column("storeTimestamp"), "%Y-%m-%d"))
    batch = batch.select(names)
    return batch.sort_by([(name, "ascending") for name in partition_by]) if partition_by else batch


def _write_files(
    path: str, batches: Iterator[pa.RecordBatch], schema: pa.Schema, template: str, partition_by: Sequence[str]
) -> list[str]:
    """Write a file, or one in each of folders like ``topic=orders``; return their paths.

    `pyarrow.dataset.write_dataset` would keep more and more rows in memory, and takes longer.
    """
    written: list[str] = []
    writers: dict[str, pq.ParquetWriter] = {}
    try:
        for number, group in enumerate(_groups(batches, *(_OF_FOLDERS if partition_by else _OF_FILE))):
            for folder, rows in _tables_by_folder(path, group, schema, partition_by):
                writer = writers.pop(folder, None)
                if writer is None:
                    if len(writers) == _FOLDERS_OPEN:
                        writers.pop(next(iter(writers))).close()
                    os.makedirs(folder, exist_ok=True)
                    written.append(os.path.join(folder, template.format(number)))
                    writer = pq.ParquetWriter(written[-1], schema)
                writers[folder] = writer
                writer.write_table(rows)
    finally:
        for writer in writers.values():
            writer.close()
    return written


def _tables_by_folder(
    path: str, group: list[pa.RecordBatch], schema: pa.Schema, partition_by: Sequence[str]
) -> Iterator[tuple[str, pa.Table]]:
    """Yield the rows of sorted batches by their folder; the batches are released."""
    parts: dict[str, list[pa.RecordBatch]] = {}
    for batch in group:
        keys = batch.select(partition_by)
        runs = [integers(pc.run_end_encode(values).run_ends) for values in keys.columns]
        for begin, end in pairwise([0, *np.unique(np.concatenate([*runs, [len(batch)]])).tolist()]):
            (row,) = keys.slice(begin, 1).to_pylist() or [{}]
            folder = os.path.join(path, *(f"{name}={_folder_value(value)}" for name, value in row.items()))
            parts.setdefault(folder, []).append(batch.slice(begin, end - begin).select(schema.names))
    group.clear()
    for folder, rows in parts.items():
        yield folder, pa.Table.from_batches(rows, schema)


def _folder_value(value: object) -> str:
    """Return a value as readers of Hive's folders expect it."""
    return "__HIVE_DEFAULT_PARTITION__" if value is None else quote(str(value), safe="")


def _groups(batches: Iterator[pa.RecordBatch], most_rows: int, most_bytes: int) -> Iterator[list[pa.RecordBatch]]:
    """Yield batches together that have so many rows or bytes."""
    group: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        group.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= most_rows or size >= most_bytes:
            yield group
            group, rows, size = [], 0, 0
    if group:
        yield group
