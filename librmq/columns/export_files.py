"""The data and the state of an export: a folder of Parquet files, or one file of CSV or JSON lines.

A step is written first to files that are not visible, or after the committed length of a file; then the state is
replaced, which commits it.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from librmq.columns.decode import TYPES
from librmq.errors import ConfigError, CorruptionError, StoreIOError
from librmq.files.disk import DiskFiles
from librmq.message.printable import cell, guarded, is_safe_in_cell, printable

_VERSION: Final = 1
_GROUP_ROWS: Final = 1 << 16
_GROUP_BYTES: Final = 64 << 20
DATE: Final = "date"
"""The name of the partition by day of storing."""
_UNFINISHED: Final = ".tmp"
_FIRST_MS: Final = -62_135_596_800_000
_END_MS: Final = 253_402_300_800_000
"""Begin and exclusive end of the years 1 to 9999, which ISO 8601 has."""


@dataclass(frozen=True)
class ExportState:
    """The state of an export, as stored next to the data."""

    form: str
    columns: tuple[str, ...]
    partition_by: tuple[str, ...]
    conditions: dict[str, str] = field(default_factory=dict)
    """The conditions on messages, such as tags; other ones would leave out messages that were passed."""
    offsets: dict[str, dict[str, int]] = field(default_factory=dict)
    size: int = 0
    steps: int = 0
    shown: tuple[str, ...] = ()
    """Files of the last step; committing removes `_UNFINISHED` from their names."""
    files: int = 0
    """Number of Parquet files of all steps; one that an earlier release began counts from its next call."""
    last: tuple[int, ...] = ()
    """Of the exported message that is last in the log: physical offset, queue id, queue offset, ms of its birth."""
    told: tuple[str, ...] = ()
    """The reports of damage that belong to no queue offset, such as damage of a whole queue."""

    @classmethod
    def read(cls, path: str, files: DiskFiles) -> ExportState | None:
        """Return the state in the file ``path``, or None if there is none."""
        if files.size(path) is None:
            return None
        try:
            document = json.loads(files.read(path))
            if document.pop("version") != _VERSION:
                raise ValueError("another version")
            for name in ("columns", "partition_by", "shown", "last", "told"):
                document[name] = tuple(document[name])
            return cls(**document)
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptionError(path, 0, "config", f"expected the state of an export: {error}") from None

    def check_same(self, begun: ExportState, path: str) -> None:
        """Raise `ConfigError` if the export to ``path`` was begun with other settings than these."""
        if (begun.form, begun.columns, begun.partition_by) != (self.form, self.columns, self.partition_by):
            raise ConfigError(
                f"out: {path} was begun as {begun.form} with the columns {', '.join(begun.columns)}, partitioned by "
                f"{', '.join(begun.partition_by) or 'nothing'}; use the same settings, or export to another path"
            )
        if begun.conditions != self.conditions:
            raise ConfigError(
                f"out: {path} was begun with {_shown(begun.conditions)}, found {_shown(self.conditions)}, which would "
                "miss messages that were passed; use the same conditions, or export to another path"
            )

    def write(self, path: str, files: DiskFiles) -> None:
        """Replace the state in the file ``path``."""
        files.write(path, json.dumps({"version": _VERSION} | vars(self)).encode())


def _shown(conditions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value!r:.80}" for name, value in conditions.items()) or "no condition"


class ParquetFolder:
    """A folder of Parquet files."""

    def __init__(self, path: str, state: ExportState) -> None:
        self._path = path
        self._partition_by = state.partition_by
        self._steps = state.steps
        self.show(state)
        self._delete_unfinished()
        self._check_complete(state)

    def _check_complete(self, state: ExportState) -> None:
        """Refuse a folder that lacks files of earlier steps; their messages would be missing without a word."""
        count = 0
        for _, _, names in os.walk(self._path):
            count += sum(name.startswith("part-") and name.endswith(".parquet") for name in names)
        missing = [os.path.join(self._path, name.removesuffix(_UNFINISHED)) for name in state.shown]
        missing = [path for path in missing if not os.path.exists(path)]
        if count < state.files or missing:
            named = f", among them not {missing[0]}" if missing else ""
            raise ConfigError(
                f"out: {self._path} has {count} of the {max(state.files, count + len(missing))} files that were "
                f"exported{named}; delete the folder to export all messages again, or export to another path"
            )

    def _delete_unfinished(self) -> None:
        """Delete the files of an uncommitted step."""
        for folder, _, names in os.walk(self._path):
            for name in names:
                if name.startswith("part-") and name.endswith(_UNFINISHED):
                    os.unlink(os.path.join(folder, name))

    def write(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> tuple[list[str], int]:
        """Write a step to files that are not visible yet; return their names."""
        first = next(batches, None)
        if first is None:
            return [], 0
        names = [*schema.names, *(name for name in self._partition_by if name not in schema.names)]
        kinds = TYPES | {DATE: pa.string()}
        file_schema = pa.schema([(name, kinds[name]) for name in names])

        def arranged() -> Iterator[pa.RecordBatch]:
            batch: pa.RecordBatch | None = first
            while batch is not None:
                if DATE in self._partition_by:
                    batch = batch.append_column(DATE, pc.strftime(batch.column("storeTimestamp"), "%Y-%m-%d"))
                yield batch.select(names)
                batch = next(batches, None)

        template = f"part-{self._steps:06d}-{{i}}.parquet{_UNFINISHED}"
        try:
            with _named_errors(self._path):
                names_written = self._written(arranged(), file_schema, template)
        except BaseException:
            with contextlib.suppress(OSError):  # the next call deletes what is left
                self._delete_unfinished()
            raise
        self._steps += 1
        return names_written, 0

    def _written(self, batches: Iterator[pa.RecordBatch], file_schema: pa.Schema, template: str) -> list[str]:
        """Write and flush files; return their names."""
        if self._partition_by:
            names = self._partitioned(batches, file_schema, template)
        else:  # a dataset of one file takes a quarter longer
            names = [template.format(i=0)]
            with pq.ParquetWriter(os.path.join(self._path, names[0]), file_schema) as writer:
                for group in _groups(batches):
                    writer.write_table(pa.Table.from_batches(group, file_schema))
        for name in names:
            with open(os.path.join(self._path, name), "rb") as file:
                os.fsync(file.fileno())
        self._flush_folders(names)
        return names

    def _partitioned(self, batches: Iterator[pa.RecordBatch], file_schema: pa.Schema, template: str) -> list[str]:
        import pyarrow.dataset as ds

        names: list[str] = []
        ds.write_dataset(
            batches,
            self._path,
            schema=file_schema,
            format="parquet",
            basename_template=template,
            partitioning=ds.partitioning(
                pa.schema([file_schema.field(name) for name in self._partition_by]), flavor="hive"
            ),
            existing_data_behavior="overwrite_or_ignore",
            preserve_order=True,  # without threads alone, the batches of a partition still overtake each other
            min_rows_per_group=_GROUP_ROWS,
            max_partitions=1 << 16,
            file_visitor=lambda file: names.append(os.path.relpath(file.path, self._path)),
        )
        return names

    def _flush_folders(self, names: Sequence[str]) -> None:
        """Flush the folders of files and their parents, so that the names reach the device before the state."""
        folders: set[str] = set()
        for name in names:
            while name:
                name = os.path.dirname(name)
                folders.add(os.path.join(self._path, name))
        for folder in filter(os.path.isdir, folders):
            DiskFiles().flush_folder(folder)

    def show(self, state: ExportState) -> None:
        """Make the files of a committed step visible."""
        for name in state.shown:
            path = os.path.join(self._path, name)
            with contextlib.suppress(FileNotFoundError):  # already visible
                os.replace(path, path.removesuffix(_UNFINISHED))
        self._flush_folders(state.shown)


@contextlib.contextmanager
def _named_errors(path: str) -> Iterator[None]:
    """Raise errors of the system as `StoreIOError` with the path."""
    try:
        yield
    except StoreIOError:
        raise
    except OSError as error:
        raise StoreIOError("export", path, error) from error


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


class TextFile:
    """A file of CSV or JSON lines."""

    def __init__(self, path: str, state: ExportState) -> None:
        self._path = path
        self._form = state.form
        self._size = state.size
        size = os.path.getsize(path) if os.path.exists(path) else 0
        if size < state.size:
            what = f"expected the {state.size} bytes that are exported: delete the file to export all messages again, "
            raise CorruptionError(path, size, "size", f"{what}or export to another path")

    def write(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> tuple[list[str], int]:
        """Write a step after the committed data; return the file's name and its new length."""
        names = list(schema.names)
        try:
            with _named_errors(self._path), open(self._path, "r+b" if os.path.exists(self._path) else "wb") as raw:
                raw.truncate(self._size)
                raw.seek(self._size)
                text = io.TextIOWrapper(raw, "utf-8", newline="")
                lines = self._lines(text, names)
                for batch in batches:
                    for row in _with_times_as_texts(batch.select(names)).to_pylist():
                        lines(row)
                text.flush()
                os.fsync(raw.fileno())
                end = raw.tell()
                text.detach()
        except BaseException:
            with contextlib.suppress(OSError):  # the next call cuts what is left
                os.truncate(self._path, self._size)
            raise
        self._size = end
        return [self._path], self._size

    def _lines(self, text: io.TextIOWrapper, names: list[str]) -> Callable[[dict[str, Any]], object]:
        if self._form == "jsonl":
            encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
            return lambda row: text.write(encode(_plain(row)) + "\n")
        columns = [column for name in names for column in ([name, f"{name}_b64"] if _is_bytes(name) else [name])]
        # Python 3.11 leaves a lone carriage return unquoted, where readers of CSV end the row.
        minimal, quoted = (
            csv.DictWriter(text, columns, lineterminator="\n", quoting=quoting)
            for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC)
        )
        if not self._size:
            minimal.writeheader()

        def line(row: dict[str, Any]) -> None:
            plain = _cells(row)
            has_return = any(isinstance(value, str) and "\r" in value for value in plain.values())
            (quoted if has_return else minimal).writerow(plain)

        return line

    def show(self, state: ExportState) -> None:
        """Do nothing: the state's length already covers the step."""


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
