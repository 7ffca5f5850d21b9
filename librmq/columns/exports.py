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

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Unpack, get_args

import pyarrow as pa
import pyarrow.compute as pc

from librmq.columns.decode import CORRUPT, TYPES
from librmq.columns.export_files import DATE, ExportState, ParquetFolder, TextFile
from librmq.columns.options import Mode, ReadOptions
from librmq.columns.planned_store import PlannedStore
from librmq.columns.record_batches import ReaderKeywords, Store, batches_of, selection
from librmq.columns.remote import RemoteFiles, RemoteStore
from librmq.errors import ConfigError
from librmq.files.disk import DiskFiles
from librmq.files.interface import make_folders
from librmq.runtime.event_log import advance
from librmq.store.format import directory

ExportFormat = Literal["parquet", "csv", "jsonl"]

_STATE: Final = "librmq_export.json"
_STEP_BYTES: Final = 256 << 20
_UNIT_BYTES: Final = 8 << 20
_AHEAD: Final = 16
_AHEAD_BYTES: Final = 64 << 20
_BODY: Final = ("body",)
_PLACE: Final = ("topic", "queueId", "queueOffset")
_IDENTITY: Final = ("physicalOffset", "queueId", "queueOffset", "bornTimestamp")
_NOT_WRITTEN: Final = ("arrow", "avro", "bz2", "feather", "gz", "json", "orc", "tsv", "txt", "xlsx", "xz", "zip", "zst")
"""Suffixes of files, which a folder of Parquet files would not be."""
_PARTITIONS: Final = ("topic", "queueId", DATE)


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of a call of `export`: the file or folder, the number of rows added, and their files."""

    path: str
    """The file or folder."""
    rows: int
    """Rows that this call has added."""
    files: int
    """Files that this call has written."""
    damaged: int = 0
    """Number of damaged places that this call met: in mode ``PERMISSIVE`` each is reported once, by a row of this or an
    earlier call; in ``DROPMALFORMED`` they are left out."""
    skipped: bool = False
    """Whether messages are left out: damaged ones, those after the end of a log that is read as recovered, or those
    that retention deleted since the last call."""


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
        ConfigError: A setting is wrong, or an earlier export to ``out`` has other columns or conditions.
        DataLossError: Retention deleted messages that were not exported. With ``fail_on_data_loss=False`` the export
            continues after them.
        StoreLockedError: Another process exports to ``out``.
        StoreIOError: ``out`` cannot be written.
    """
    for name in ("view", "offsets", "files"):
        if name in settings:
            raise ConfigError(f"{name}: an export reads all offsets of the view messages from the disk; leave it out")
    if not isinstance(store, str | os.PathLike | RemoteStore):
        raise ConfigError(f"store: expected one store, found {store!r:.80}; export each to a path of its own")
    pattern = _pattern(grep)
    path = _local_path(out)
    form = _format_of(path, format)
    partition_by = _partitions(partition_by, form)
    options, schema, source_files = selection(store, settings)
    if isinstance(source_files, RemoteFiles):
        options = source_files.mirrored(options)
    else:
        _check_outside(path, options.paths[0])
    directory.check_kind(options.paths[0], source_files or DiskFiles())
    files = DiskFiles()
    state_path = os.path.join(path, f"_{_STATE}") if form == "parquet" else f"{path}.{_STATE}"
    if not os.path.lexists(state_path):
        _check_free(path, form)
    make_folders(files, os.path.dirname(state_path))
    lock = files.lock(f"{state_path}.lock")
    try:
        fresh = ExportState(form, tuple(schema.names), tuple(partition_by), _conditions(options, settings, grep))
        state = ExportState.read(state_path, files)
        if state is None or (form != "parquet" and not os.path.exists(path)):  # a deleted file is made again
            state = fresh
            state.write(state_path, files)  # marks the path as an export
        fresh.check_same(state, path)
        target: ParquetFolder | TextFile
        target = ParquetFolder(path, state) if form == "parquet" else TextFile(path, state)
        with PlannedStore.open(options.paths[0], options, source_files) as planned:
            # Include queues whose entries the writer has not written yet, and which therefore have no folder.
            ends = {(topic, str(queue_id)): queue.end for (topic, queue_id), queue in planned.queues.items()}
            skipped = planned.is_cut_short or any(
                state.offsets.get(topic, {}).get(str(queue_id), queue.begin) < queue.begin
                for (topic, queue_id), queue in planned.queues.items()
            )
            if state.last and not planned.has_message(*state.last):
                raise ConfigError(
                    f"store: {options.paths[0]} lacks the last message that was exported to {path}, at physical offset "
                    f"{state.last[0]}: it is another store, or a crash has cut its log; export it to another path"
                )
        state = state if options.fail_on_data_loss else _without_deleted(state, ends)
        starting = {
            topic: {number: at for number, at in reached.items() if (topic, number) in ends}
            for topic, reached in state.offsets.items()
        }
        columns = _read_columns(schema, partition_by, grep, options)
        rows = written = damaged = 0
        drops = options.mode == "DROPMALFORMED"
        mode: Mode = "PERMISSIVE" if drops else options.mode  # the reports are counted
        options = replace(options, starting=starting, mode=mode, reports_all_damage=True)
        total = left = _remaining(ends, starting)
        with closing(
            _Steps(
                batches_of(options, columns, source_files),
                state,
                pattern,
                drops_damaged=drops,
            )
        ) as source:
            while source.more():
                files_written, size = target.write(source.step(), schema)
                rows, damaged = rows + source.rows, damaged + source.damaged
                written += len(files_written) if source.rows else 0
                steps = state.steps + 1
                state = replace(
                    state,
                    offsets=source.offsets,
                    last=source.last,
                    size=size,
                    steps=steps,
                    shown=tuple(files_written),
                    files=state.files + len(files_written),
                    told=source.reports,
                )
                state.write(state_path, files)
                target.show(state)
                before, left = left, _remaining(ends, source.offsets)
                advance(before - left, total)
        if not state.steps:
            target.write(iter(()), schema)
        if options.selection.end_ms is None:  # else unwanted messages that are deleted later would count as lost
            for (topic, number), end in ends.items():
                queue_offsets = source.offsets.setdefault(topic, {})
                queue_offsets[number] = max(queue_offsets.get(number, 0), end)
            replace(state, offsets=source.offsets).write(state_path, files)
        return Exported(os.fspath(out), rows, written, damaged, skipped or (drops and damaged > 0))
    finally:
        lock.release()


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


def _read_columns(schema: pa.Schema, partition_by: Sequence[str], grep: str | None, options: ReadOptions) -> pa.Schema:
    """Return the columns to read: those to write, and those that steps and state need."""
    needed = dict.fromkeys(
        [
            *schema.names,
            *_PLACE,
            *_IDENTITY,
            *(["storeTimestamp"] if DATE in partition_by else []),
            *_BODY[: grep is not None],
            *([CORRUPT] if options.mode != "FAILFAST" else []),
        ]
    )
    return pa.schema([(name, TYPES[name]) for name in needed])


def _conditions(options: ReadOptions, settings: ReaderKeywords, grep: str | None) -> dict[str, str]:
    """Return the conditions that select among the messages of a queue."""
    conditions = {
        "tags": options.selection.tags,
        "sql": options.selector,
        "filter": settings.get("filter"),
        "grep": grep,
    }
    return {name: str(value) for name, value in conditions.items() if value is not None}


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
    if ending in _NOT_WRITTEN:
        raise ConfigError(f"out: .{ending} is no format of an export; use .csv or .jsonl, or name the format")
    return {"csv": "csv", "jsonl": "jsonl", "ndjson": "jsonl"}.get(ending, "parquet")


def _check_outside(path: str, store: str) -> None:
    """Refuse a path in the store, or the store itself; links don't hide it."""
    if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(store)):
        raise ConfigError(f"out: {path} is in the store; export to a folder outside of it")


def _check_free(path: str, form: str) -> None:
    """Refuse a path that holds anything but an export."""
    if form == "parquet" and os.path.isdir(path):
        exists = any(not name.startswith("_librmq") for name in os.listdir(path))
    else:
        exists = os.path.lexists(path)
    if exists:
        raise ConfigError(f"out: {path} holds something that is no export; name a path that does not exist")


def _without_deleted(state: ExportState, ends: Mapping[tuple[str, str], int]) -> ExportState:
    """Return ``state`` with queues that end before its offsets, because they were created again, from their begin."""
    offsets = {
        topic: {number: at if at <= ends.get((topic, number), at) else 0 for number, at in reached.items()}
        for topic, reached in state.offsets.items()
    }
    return replace(state, offsets=offsets)


def _remaining(ends: Mapping[tuple[str, str], int], offsets: Mapping[str, Mapping[str, int]]) -> int:
    """Return how many messages there are between queue offsets and the queues' ends."""
    return sum(max(0, end - offsets.get(topic, {}).get(number, 0)) for (topic, number), end in ends.items())


@dataclass(frozen=True, slots=True)
class _Unit:
    """Batches to write, and what they and the messages that were left out reach."""

    batches: Sequence[pa.RecordBatch]
    size: int
    damaged: int
    offsets: Sequence[Mapping[str, Any]]
    """Rows with a topic, a queue id and the largest queue offset."""
    last: tuple[int, ...]
    """See `ExportState.last`."""
    reports: tuple[str, ...]
    """See `ExportState.told`, with the reports of earlier units."""


class _Steps:
    """Batches in steps of some hundred MiB, and the queue offsets after each step.

    A thread reads the next units while the caller writes one. All work on batches is done there: each call of Arrow by
    the caller would let go of the interpreter, and wait to get it back.
    """

    def __init__(
        self,
        batches: pa.RecordBatchReader,
        state: ExportState,
        pattern: re.Pattern[str] | None = None,
        *,
        drops_damaged: bool = False,
    ) -> None:
        """Only messages whose bodies have ``pattern`` are in the batches; the offsets pass the others."""
        self._batches = batches
        self._pattern = pattern
        self._drops_damaged = drops_damaged
        self._reports_ahead = state.told
        self._executor = ThreadPoolExecutor(1)
        self._coming = deque([self._executor.submit(self._next_unit)])
        self._following: _Unit | None = None
        self.offsets = {topic: dict(queues) for topic, queues in state.offsets.items()}
        """The offsets at the end of the last step."""
        self.last = state.last
        """The same for `ExportState.last`."""
        self.reports = state.told
        """The same for `ExportState.told`."""
        self.rows = self.damaged = 0

    def more(self) -> bool:
        """Return whether another step follows."""
        if self._following is None:
            self._following = self._coming.popleft().result()
            size = 0 if self._following is None else self._following.size
            while len(self._coming) < max(1, min(_AHEAD, _AHEAD_BYTES // max(1, size))):
                self._coming.append(self._executor.submit(self._next_unit))
        return self._following is not None

    def _next_unit(self) -> _Unit | None:
        """Return the next unit."""
        places: list[pa.RecordBatch] = []
        batches: list[pa.RecordBatch] = []
        last: tuple[int, ...] = ()
        read = size = damaged = 0
        while read < min(_UNIT_BYTES, _STEP_BYTES) and (batch := next(self._batches, None)) is not None:
            if not batch.num_rows:
                continue
            places.append(batch.select(list(_PLACE)))
            last = max(last, _last_in_log(batch))
            rows, reasons = self._rows_to_write(batch)
            damaged += reasons
            read += batch.nbytes
            if rows.num_rows:
                batches.append(rows)
                size += rows.nbytes
        if not places:
            return None
        queues = pa.Table.from_batches(places).group_by(["topic", "queueId"], use_threads=False)
        reached = queues.aggregate([("queueOffset", "max")]).to_pylist()
        return _Unit(batches, size, damaged, reached, last, self._reports_ahead)

    def close(self) -> None:
        """End the read."""
        self._executor.shutdown(cancel_futures=True)
        self._batches.close()

    def step(self) -> Iterator[pa.RecordBatch]:
        """Yield the batches of the next step."""
        size = self.rows = self.damaged = 0
        while size < _STEP_BYTES and self.more():
            assert self._following is not None
            unit, self._following = self._following, None
            for batch in unit.batches:
                self.rows += batch.num_rows
                yield batch
            size += unit.size
            self.damaged += unit.damaged
            self.last, self.reports = max(self.last, unit.last), unit.reports
            for row in unit.offsets:
                if row["topic"] is not None:  # a damaged record may have no topic
                    self.offsets.setdefault(row["topic"], {})[str(row["queueId"])] = row["queueOffset_max"] + 1

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
        """Return which rows to write: not reports that an earlier call wrote, and that no queue offset passes."""
        keep = []
        for topic, reason in zip(batch.column("topic").to_pylist(), batch.column(CORRUPT).to_pylist(), strict=True):
            is_apart = reason is not None and topic is None
            keep.append(not is_apart or reason not in self._reports_ahead)
            if is_apart and reason not in self._reports_ahead:
                self._reports_ahead += (reason,)
        return pa.array(keep, pa.bool_())


def _last_in_log(batch: pa.RecordBatch) -> tuple[int, ...]:
    """Return what `ExportState.last` holds of a batch."""
    place = batch.column("physicalOffset")
    if place.null_count == len(place):  # only damage
        return ()
    row = batch.slice(pc.index(place, pc.max(place)).as_py(), 1)
    *identity, born = (row.column(name).cast(pa.int64())[0].as_py() for name in _IDENTITY)
    return () if None in (*identity, born) else (*identity, born // 1000)  # of a damaged record less is known


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
