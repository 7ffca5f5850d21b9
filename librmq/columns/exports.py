"""Messages of a store exported as a folder of Parquet files, one CSV file, or one file of JSON lines.

::

    OUT/part-000000-0.parquet           Parquet: one or more files for each step, perhaps in folders like topic=orders/
    OUT/part-000001-0.parquet.tmp       file of an uncommitted step
    OUT/_librmq_export.json             the state of the export; for a file OUT it is OUT.librmq_export.json

An export proceeds in steps. At the end of a step its data is flushed, then the state is replaced: for each queue the
first offset that is not exported, and the length of the file or the Parquet files that become visible. An export that
was killed, or is called again later, continues from that state: no message is lost or written twice.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, Literal, Unpack, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from librmq.columns.planner import PlannedStore
from librmq.columns.read import TYPES
from librmq.columns.record_batches import ReaderKeywords, Store, batches_of, selection
from librmq.columns.remote import RemoteFiles
from librmq.errors import ConfigError, CorruptionError
from librmq.files.disk import DiskFiles
from librmq.files.seam import make_folders
from librmq.runtime.headway import advance

__all__ = ["ExportFormat", "Exported", "export"]

ExportFormat = Literal["parquet", "csv", "jsonl"]

_STATE: Final = "librmq_export.json"
_VERSION: Final = 1
_STEP_BYTES: Final = 256 << 20
_GROUP_ROWS: Final = 1 << 16
_GROUP_BYTES: Final = 64 << 20
_AHEAD: Final = 16
_AHEAD_BYTES: Final = 64 << 20
_BODY: Final = ("body",)
_PLACE: Final = ("topic", "queueId", "queueOffset")
_DATE: Final = "date"
_PARTITIONS: Final = ("topic", "queueId", _DATE)
_UNFINISHED: Final = ".tmp"


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of a call of `export`: the file or folder, the number of rows added, and their files."""

    path: str
    rows: int
    files: int


@dataclass(frozen=True)
class _State:
    """The state of an export, as stored beside the data."""

    form: str
    columns: tuple[str, ...]
    partition_by: tuple[str, ...]
    offsets: dict[str, dict[str, int]] = field(default_factory=dict)
    size: int = 0
    steps: int = 0
    shown: tuple[str, ...] = ()
    """Files of the last step; committing removes `_UNFINISHED` from their names."""

    @classmethod
    def read(cls, path: str, files: DiskFiles) -> _State | None:
        if files.size(path) is None:
            return None
        try:
            found = json.loads(files.read(path))
            if found.pop("version") != _VERSION:
                raise ValueError("another version")
            for name in ("columns", "partition_by", "shown"):
                found[name] = tuple(found[name])
            return cls(**found)
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptionError(path, 0, "config", f"expected the state of an export: {error}") from None

    def write(self, path: str, files: DiskFiles) -> None:
        files.write(path, json.dumps({"version": _VERSION} | vars(self)).encode())


def export(
    store: Store,
    out: str | os.PathLike[str],
    *,
    format: ExportFormat | None = None,
    partition_by: Sequence[str] = (),
    grep: str | None = None,
    **settings: Unpack[ReaderKeywords],
) -> Exported:
    """Write the messages of a store to ``out``; a later call adds the messages stored since.

    Parquet goes to a folder; CSV and JSON lines go to one file, with ``body_b64`` for a body that is not UTF-8. The
    state of the export is stored next to the data, so an export that was killed continues where it was.

    Args:
        store: The folder or URL of the store, or a `RemoteStore`.
        out: The folder or file, which need not exist.
        format: ``parquet``, ``csv`` or ``jsonl``; by default chosen by the suffix of ``out``, else Parquet.
        partition_by: For Parquet: make folders by ``topic``, ``queueId`` and ``date`` (of storing, in UTC).
        grep: A regular expression that occurs in the bodies to export, which are searched as UTF-8 text.
        **settings: Messages and columns to export, as for `librmq.columns.reader`, without ``view`` and ``offsets``.

    Raises:
        ConfigError: A setting is wrong, or an earlier export to ``out`` has other columns.
        DataLossError: Retention deleted messages that were not exported. With ``fail_on_data_loss=False`` the export
        continues after them.
        StoreLockedError: Another process exports to ``out``.
        StoreIOError: ``out`` cannot be written.
    """
    for name in ("view", "offsets", "files"):
        if name in settings:
            raise ConfigError(f"{name}: an export reads all offsets of the view messages from the disk; leave it out")
    pattern = _pattern(grep)
    path = os.path.abspath(out)
    form = _format_of(path, format)
    partition_by = _partitions(partition_by, form)
    options, schema, processes, source_files = selection(store, settings)
    if any(path.startswith(os.path.join(folder, "")) for folder in options.paths):
        raise ConfigError(f"out: {path} is in the store; export to a folder outside of it")
    files = DiskFiles()
    state_path = os.path.join(path, f"_{_STATE}") if form == "parquet" else f"{path}.{_STATE}"
    make_folders(files, os.path.dirname(state_path))
    lock = files.lock(f"{state_path}.lock")
    try:
        fresh = _State(form, tuple(schema.names), tuple(partition_by))
        state = _State.read(state_path, files)
        if state is None:
            _check_free(path, form)
            state = fresh
            state.write(state_path, files)  # marks the path as an export
        if (state.form, state.columns, state.partition_by) != (fresh.form, fresh.columns, fresh.partition_by):
            raise ConfigError(
                f"out: {path} was begun as {state.form} with the columns {', '.join(state.columns)}, partitioned by "
                f"{', '.join(state.partition_by) or 'nothing'}; use the same settings, or export to another path"
            )
        target: _ParquetFolder | _TextFile
        target = _ParquetFolder(path, state) if form == "parquet" else _TextFile(path, state)
        if isinstance(source_files, RemoteFiles):
            options = source_files.mirrored(options)
        with PlannedStore.open(options.paths[0], options.wanted, options.mode, source_files) as planned:
            # Include queues whose entries the writer has not written yet, and which therefore have no folder.
            known = {(topic, str(queue_id)): of.end for (topic, queue_id), of in planned.queues.items()}
        starting = {
            topic: {number: at for number, at in reached.items() if (topic, number) in known}
            for topic, reached in state.offsets.items()
        }
        needed = dict.fromkeys(
            [
                *schema.names,
                *_PLACE,
                *(["storeTimestamp"] if _DATE in partition_by else []),
                *_BODY[: grep is not None],
            ]
        )
        whole = pa.schema([(name, TYPES[name]) for name in needed])
        rows = written = 0
        total = left = _left(known, starting)
        with closing(
            _Steps(
                batches_of(replace(options, starting=starting), whole, processes, source_files), state.offsets, pattern
            )
        ) as source:
            while source.more():
                shown, size = target.write(source.step(), schema)
                rows, written = rows + source.rows, written + len(shown)
                state = replace(state, offsets=source.offsets, size=size, steps=state.steps + 1, shown=tuple(shown))
                state.write(state_path, files)
                target.show(state)
                before, left = left, _left(known, source.offsets)
                advance(before - left, total)
        if not state.steps:
            target.write(iter(()), schema)
        if options.wanted.end_ms is None:  # else unwanted messages that are deleted later would count as lost
            for (topic, number), end in known.items():
                own = source.offsets.setdefault(topic, {})
                own[number] = max(own.get(number, 0), end)
            replace(state, offsets=source.offsets).write(state_path, files)
        return Exported(os.fspath(out), rows, written)
    finally:
        lock.release()


def _pattern(grep: str | None) -> re.Pattern[str] | None:
    try:
        return None if grep is None else re.compile(grep)
    except re.error as error:
        raise ConfigError(f"grep: {error} in {grep!r:.80}") from None


def _partitions(asked: str | Sequence[str], form: str) -> Sequence[str]:
    names = [asked] if isinstance(asked, str) else asked
    for name in names:
        if name not in _PARTITIONS or form != "parquet":
            raise ConfigError(f"partition_by: expected some of {', '.join(_PARTITIONS)}, for Parquet, found {name!r}")
    return names


def _format_of(path: str, asked: str | None) -> str:
    known = get_args(ExportFormat)
    if asked is not None:
        if asked not in known:
            raise ConfigError(f"format: expected one of {', '.join(known)}, found {asked!r:.80}")
        return asked
    ending = path.rpartition(".")[2].lower()
    return {"csv": "csv", "jsonl": "jsonl", "ndjson": "jsonl"}.get(ending, "parquet")


def _check_free(path: str, form: str) -> None:
    """Refuse a path that holds anything but an export."""
    taken = (
        os.path.lexists(path) if form != "parquet" else any(not name.startswith("_librmq") for name in os.listdir(path))
    )
    if taken:
        raise ConfigError(f"out: {path} holds something that is no export; name a path that does not exist")


def _left(ends: Mapping[tuple[str, str], int], offsets: Mapping[str, Mapping[str, int]]) -> int:
    """Return how many messages there are between queue offsets and the queues' ends."""
    return sum(max(0, end - offsets.get(topic, {}).get(number, 0)) for (topic, number), end in ends.items())


class _Steps:
    """Batches in steps of some hundred MiB, and the queue offsets after each step.

    A thread reads the next batch while the caller writes one.
    """

    def __init__(
        self,
        batches: pa.RecordBatchReader,
        offsets: Mapping[str, Mapping[str, int]],
        pattern: re.Pattern[str] | None = None,
    ) -> None:
        """Only messages whose bodies have ``pattern`` are in the batches; the offsets pass the others."""
        self._batches = batches
        self._pattern = pattern
        self._beside = ThreadPoolExecutor(1)
        self._coming = deque([self._beside.submit(self._read)])
        self._following: tuple[pa.RecordBatch, list[dict[str, Any]]] | None = None
        self.offsets = {topic: dict(queues) for topic, queues in offsets.items()}
        self.rows = 0
        """The offsets at the end of the last step."""

    def more(self) -> bool:
        """Return whether another step follows."""
        while self._following is None or not self._following[0].num_rows:
            self._following = self._coming.popleft().result()
            size = 0 if self._following is None else self._following[0].nbytes
            while len(self._coming) < max(1, min(_AHEAD, _AHEAD_BYTES // max(1, size))):
                self._coming.append(self._beside.submit(self._read))
            if self._following is None:
                return False
        return True

    def _read(self) -> tuple[pa.RecordBatch, list[dict[str, Any]]] | None:
        """Return the next batch and the last offset of each of its queues."""
        batch = next(self._batches, None)
        if batch is None:
            return None
        queues = pa.table(batch.select(list(_PLACE))).group_by(["topic", "queueId"], use_threads=False)
        return batch, queues.aggregate([("queueOffset", "max")]).to_pylist()

    def close(self) -> None:
        """End the read."""
        self._beside.shutdown(cancel_futures=True)
        self._batches.close()

    def step(self) -> Iterator[pa.RecordBatch]:
        """Yield the batches of the next step."""
        size = self.rows = 0
        while size < _STEP_BYTES and self.more():
            assert self._following is not None
            (batch, reached), self._following = self._following, None
            chosen = batch if self._pattern is None else _with_body(batch, self._pattern)
            yield chosen
            size += chosen.nbytes
            self.rows += chosen.num_rows
            for row in reached:
                if row["topic"] is not None:  # a damaged record may have no topic
                    self.offsets.setdefault(row["topic"], {})[str(row["queueId"])] = row["queueOffset_max"] + 1


def _with_body(batch: pa.RecordBatch, pattern: re.Pattern[str]) -> pa.RecordBatch:
    """Return the rows whose bodies have a text."""
    found = [
        body is not None and pattern.search(body.decode(errors="backslashreplace")) is not None
        for body in batch.column("body").to_pylist()
    ]
    return batch.filter(pa.array(found, pa.bool_()))


class _ParquetFolder:
    """A folder of Parquet files."""

    def __init__(self, path: str, state: _State) -> None:
        self._path = path
        self._partition_by = state.partition_by
        self._steps = state.steps
        self.show(state)
        for folder, _, names in os.walk(path):  # delete the files of an uncommitted step
            for name in names:
                if name.startswith("part-") and name.endswith(_UNFINISHED):
                    os.unlink(os.path.join(folder, name))

    def write(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> tuple[list[str], int]:
        """Write a step to files that are not visible yet; return their names."""
        first = next(batches, None)
        if first is None:
            return [], 0
        names = [*schema.names, *(name for name in self._partition_by if name not in schema.names)]
        kinds = TYPES | {_DATE: pa.string()}
        wanted = pa.schema([(name, kinds[name]) for name in names])

        def arranged() -> Iterator[pa.RecordBatch]:
            batch: pa.RecordBatch | None = first
            while batch is not None:
                if _DATE in self._partition_by:
                    batch = batch.append_column(_DATE, pc.strftime(batch.column("storeTimestamp"), "%Y-%m-%d"))
                yield batch.select(names)
                batch = next(batches, None)

        template = f"part-{self._steps:06d}-{{i}}.parquet{_UNFINISHED}"
        if self._partition_by:
            made = self._partitioned(arranged(), wanted, template)
        else:  # a dataset of one file takes a quarter longer
            made = [template.format(i=0)]
            with pq.ParquetWriter(os.path.join(self._path, made[0]), wanted) as writer:
                for group in _groups(arranged()):
                    writer.write_table(pa.Table.from_batches(group, wanted))
        for name in made:
            with open(os.path.join(self._path, name), "rb") as file:
                os.fsync(file.fileno())
        self._flush_folders(made)
        self._steps += 1
        return made, 0

    def _partitioned(self, batches: Iterator[pa.RecordBatch], wanted: pa.Schema, template: str) -> list[str]:
        import pyarrow.dataset as ds

        made: list[str] = []
        ds.write_dataset(
            batches,
            self._path,
            schema=wanted,
            format="parquet",
            basename_template=template,
            partitioning=ds.partitioning(pa.schema([wanted.field(name) for name in self._partition_by]), flavor="hive"),
            existing_data_behavior="overwrite_or_ignore",
            preserve_order=True,  # without threads alone, the batches of a partition still overtake each other
            min_rows_per_group=_GROUP_ROWS,
            max_partitions=1 << 16,
            file_visitor=lambda file: made.append(os.path.relpath(file.path, self._path)),
        )
        return made

    def _flush_folders(self, names: Sequence[str]) -> None:
        """Flush the folders of files and their parents, so that the names reach the device before the state."""
        folders: set[str] = set()
        for name in names:
            while name:
                name = os.path.dirname(name)
                folders.add(os.path.join(self._path, name))
        for folder in filter(os.path.isdir, folders):
            DiskFiles().flush_folder(folder)

    def show(self, state: _State) -> None:
        """Make the files of a committed step visible."""
        for name in state.shown:
            made = os.path.join(self._path, name)
            with suppress(FileNotFoundError):  # already visible
                os.replace(made, made.removesuffix(_UNFINISHED))
        self._flush_folders(state.shown)


def _groups(batches: Iterator[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Yield batches together that make a row group of a Parquet file."""
    group: list[pa.RecordBatch] = []
    for batch in batches:
        group.append(batch)
        rows, size = (sum(getattr(each, name) for each in group) for name in ("num_rows", "nbytes"))
        if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
            yield group
            group = []
    if group:
        yield group


class _TextFile:
    """A file of CSV or JSON lines."""

    def __init__(self, path: str, state: _State) -> None:
        self._path = path
        self._form = state.form
        self._size = state.size

    def write(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> tuple[list[str], int]:
        """Write a step after the committed data; return the file's name and its new length."""
        names = list(schema.names)
        found = os.path.getsize(self._path) if os.path.exists(self._path) else 0
        if found < self._size:
            raise CorruptionError(
                self._path, found, "size", f"expected the {self._size} bytes that are exported: export to another path"
            )
        with open(self._path, "r+b" if self._size or os.path.exists(self._path) else "wb") as raw:
            raw.truncate(self._size)
            raw.seek(self._size)
            text = io.TextIOWrapper(raw, "utf-8", newline="")
            lines = self._lines(text, names)
            for batch in batches:
                for row in batch.select(names).to_pylist():
                    lines(row)
            text.flush()
            os.fsync(raw.fileno())
            self._size = raw.tell()
            text.detach()
        return [self._path], self._size

    def _lines(self, text: io.TextIOWrapper, names: list[str]) -> Callable[[dict[str, Any]], object]:
        if self._form == "jsonl":
            encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
            return lambda row: text.write(encode(_plain(row)) + "\n")
        columns = [each for name in names for each in ([name, f"{name}_b64"] if _is_bytes(name) else [name])]
        table = csv.DictWriter(text, columns, lineterminator="\n")
        if not self._size:
            table.writeheader()

        def line(row: dict[str, Any]) -> None:
            plain = _plain(row)
            for name, value in plain.items():
                if isinstance(value, dict):
                    plain[name] = json.dumps(value, ensure_ascii=False)
            table.writerow(plain)

        return line

    def show(self, state: _State) -> None:
        """Do nothing: the state's length already covers the step."""


def _is_bytes(name: str) -> bool:
    return bool(pa.types.is_binary(TYPES[name]))


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row in JSON's types; bytes become text, or ``…_b64`` if they are not UTF-8."""
    plain: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, datetime):
            plain[name] = value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        elif isinstance(value, bytes):
            try:
                plain[name] = value.decode()
            except UnicodeDecodeError:
                plain[f"{name}_b64"] = base64.b64encode(value).decode()
        else:
            plain[name] = dict(value) if isinstance(value, list) else value
    return plain
