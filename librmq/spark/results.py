"""Results of pipelines as folders of Parquet, each of which appears whole or not at all.

::

    OUT/part-….parquet             `write_result`: a result
    OUT/run=20261121T060000000Z/   `write_result(append=True)`: the result of each run
    OUT/latest                     `run_incrementally`: a link to the last run's folder in OUT/runs
    OUT/runs/000007/               its result, and its state: what was read up to there
    OUT/messages/000007/           the columns of messages that run 7 read, and perhaps those of earlier runs

Every change becomes visible by renaming one folder or one link. A run that was killed leaves files that nothing refers
to; the next run deletes them. To replace a folder takes two renames; if a run is killed between them, the former result
is in ``_unfinished-old-OUT`` beside OUT, and the next run moves it back.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from librmq.clock import SystemClock
from librmq.columns.options import DataLossError
from librmq.columns.planned_store import PlannedStore
from librmq.errors import ConfigError, CorruptionError
from librmq.files.disk import DiskFiles
from librmq.files.interface import make_folders
from librmq.runtime.event_log import EventLog
from librmq.spark import stores
from librmq.spark._options import parse_read_options
from librmq.spark._stream import Key, Offset, flat, nested
from librmq.spark.pipelines import Inputs, LeftOut, MessageRead, OfMessages, find
from librmq.spark.stores import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_log = EventLog("librmq.spark")

_STATE: Final = "_librmq_run.json"
_LOCK: Final = "_librmq.lock"
_UNFINISHED: Final = "_unfinished-"
_MOST_PARTS: Final = 32
"""Folders of messages from which the next run makes one."""


def write_result(
    frame: DataFrame, out: str, *, append: bool = False, overwrite: bool = False, partition_by: Sequence[str] = ()
) -> str:
    """Write ``frame`` to Parquet in ``out``, and return the folder written.

    Args:
        frame: The result.
        out: A folder that does not exist, unless ``append`` or ``overwrite`` is set.
        append: Add the result as a partition ``run=TIME``, next to the partitions of earlier calls.
        overwrite: Replace the folder.
        partition_by: Columns whose values become folders.

    Raises:
        ConfigError: ``out`` exists, or holds anything but results, or runs with other columns or partitions, or
            ``frame`` lacks a column.
        StoreLockedError: Another process writes to ``out``.
    """
    _check_columns(frame, partition_by)
    out = os.path.abspath(out)
    if append:
        if not os.path.lexists(out):
            with _replacing(out):
                _bring_back(out)
                make_folders(DiskFiles(), out)
        _check_result(out)
        with _locked(out):
            if any(name.endswith(".parquet") for name in os.listdir(out)):
                raise ConfigError(f"{out} holds one result, without runs; append to another folder")
            _delete_others(out, _UNFINISHED, ())
            _check_earlier_runs(out, frame, partition_by)
            now = datetime.fromtimestamp(SystemClock().now_ms() / 1000, UTC)
            return _write(
                frame, os.path.join(out, f"run={now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03}Z"), partition_by
            )
    _check_target(out, overwrite=overwrite)
    with _replacing(out):
        _bring_back(out)
        _check_target(out, overwrite=overwrite)
        return _write(frame, out, partition_by)


@dataclass(frozen=True, slots=True)
class Increment:
    """The result of `run_incrementally`: its folder, and the number of messages that this run read."""

    path: str
    messages: int
    """Offsets that are new; places that ``damaged=skip`` leaves out count."""
    left_out: LeftOut
    """What this run left out with ``damaged=skip``, because it can't be read."""
    lost: int
    """Number of messages that retention deleted before a run read them, with ``damaged=skip``."""


@dataclass(frozen=True)
class _State:
    """A run: what it was asked, what has been read, and which folders of messages hold that."""

    pipeline: str
    settings: dict[str, str]
    ends: Offset = field(default_factory=dict)
    """The first queue offset that is not read, of each queue."""
    parts: tuple[str, ...] = ()
    run: int = 0
    skipped: tuple[str, ...] = ()
    """The stores of which a run has left out messages."""

    @classmethod
    def read(cls, path: str) -> _State:
        try:
            document = json.loads(DiskFiles().read(path))
            skipped = tuple(document.get("skipped", ()))
            return cls(**(document | {"parts": tuple(document["parts"]), "skipped": skipped}))
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptionError(path, 0, "config", f"expected the state of an incremental run: {error}") from None


def run_incrementally(
    spark: SparkSession,
    name: str,
    paths: stores.Paths,
    out: str,
    settings: Settings | None = None,
    *,
    partition_by: Sequence[str] = (),
) -> Increment:
    """Bring the result of a pipeline over messages in ``out`` up to date, reading only messages stored since last time.

    The result in ``OUT/latest`` equals that of a run over all messages that were ever there. The columns that the
    pipeline reads are kept in ``out``, so retention may delete messages that a run has read.

    Raises:
        ConfigError: The pipeline shows the present state of a store, or an earlier run had other settings or stores.
        DataLossError: Retention deleted messages that no run has read; ``damaged=skip`` continues after them.
        StoreLockedError: Another process runs in ``out``.
    """
    chosen_settings = dict(settings or {})
    pipeline = find(name, chosen_settings)
    if not isinstance(pipeline.source, OfMessages):
        raise ConfigError(
            f"pipeline {name}: it shows the present state, which append=True (--append) keeps for each run"
        )
    for setting in ("starting_offsets", "ending_offsets"):
        if setting in chosen_settings:
            raise ConfigError(f"setting {setting}: an incremental run chooses the offsets; leave it out")
    out = os.path.abspath(out)
    _check_increments(out)
    make_folders(DiskFiles(), out)
    with _locked(out):
        before = _last_state(out, name, chosen_settings)
        inputs = Inputs(spark, stores.paths_of(paths), chosen_settings)
        missing = before.ends.keys() - set(inputs.paths)
        if missing:
            raise ConfigError(f"{out}: an earlier run read {min(missing)}; name all stores of the earlier runs")
        _delete_others(os.path.join(out, "messages"), "", before.parts)
        _delete_others(os.path.join(out, "runs"), "", [_folder(before.run)])
        read = pipeline.source.reads(chosen_settings)
        skips = chosen_settings.get("damaged") == "skip"
        ends = flat(before.ends)
        starting, ending, is_damaged = _range(read, inputs.paths, ends, is_first=not before.run, strict=not skips)
        count = sum(max(0, end - starting[queue]) for queue, end in ending.items())
        run, parts, skipped = before.run + 1, before.parts, LeftOut()
        has_news = count > 0 or not parts
        new = {
            "startingOffsets": json.dumps(nested(starting)),
            "endingOffsets": json.dumps(nested(ending)),
            "failOnDataLoss": str(not skips),
        }
        if skips and (has_news or is_damaged):
            skipped = LeftOut.from_frame(read.left_out(spark, inputs.paths, **new))
        if has_news:
            fresh = read.messages(spark, inputs.paths, **new)
            if len(parts) >= _MOST_PARTS:
                fresh, parts = _stored_messages(spark, out, read, parts).unionByName(fresh), ()
            parts = (*parts, _folder(run))
            _write(fresh, os.path.join(out, "messages", parts[-1]), ())
        # Retention deleted what is between the end of the last run and the first offset.
        first_ends = {} if before.run else starting  # a queue that appears later is read from offset 0
        last_ends = {queue: ends.get(queue, first_ends.get(queue, 0)) for queue in starting}
        lost = {queue: begin - last_ends[queue] for queue, begin in starting.items() if begin > last_ends[queue]}
        stores_skipped = tuple(sorted({*before.skipped, *skipped.stores, *(path for path, _, _ in lost)}))
        result = pipeline.result(
            inputs, _stored_messages(spark, out, read, parts), stores_skipped if skips or stores_skipped else None
        )
        _check_columns(result, partition_by)
        target = os.path.join(out, "runs", _folder(run))
        state = _State(name, _pinned(chosen_settings), nested(ends | ending), parts, run, stores_skipped)
        _write(result, target, partition_by, json.dumps(vars(state)).encode())
        _link(out, target)
        return Increment(os.path.join(out, "latest"), count, skipped, sum(lost.values()))


def _folder(run: int) -> str:
    return f"{run:06}"


def _pinned(settings: Settings) -> dict[str, str]:
    """Return the settings that every run in a folder shares."""
    return {name: value for name, value in settings.items() if name != "damaged"}


def _last_state(out: str, name: str, settings: Settings) -> _State:
    latest = os.path.join(out, "latest")
    if not os.path.lexists(latest):
        return _State(name, _pinned(settings))
    state = _State.read(os.path.join(latest, _STATE))
    if (state.pipeline, state.settings) != (name, _pinned(settings)):
        description = ", ".join(f"{setting}={value}" for setting, value in state.settings.items()) or "no settings"
        raise ConfigError(
            f"{out} was begun by the pipeline {state.pipeline} with {description}; keep them, or name another folder"
        )
    return state


def _range(
    read: MessageRead, paths: Sequence[str], ends: Mapping[Key, int], *, is_first: bool, strict: bool
) -> tuple[dict[Key, int], dict[Key, int], bool]:
    """Return the first offset to read of each wanted queue, its present end, and whether a queue can't be opened."""
    is_damaged = False
    starting: dict[Key, int] = {}
    ending: dict[Key, int] = {}
    default_topics = {} if read.first_sends_only or "topic" in read.options else {"topicPattern": "(?s).*"}
    for path in paths:
        options = parse_read_options({**default_topics, **read.options, "path": path})
        with PlannedStore.open(path, options) as store:
            is_damaged |= bool(store.damage)
            for (topic, queue_id), queue in store.queues.items():
                last_end = ends.get((path, topic, queue_id))
                if strict and not is_first and last_end is None and queue.begin:
                    raise DataLossError(
                        f"{path}: topic {topic!r}, queue {queue_id}: it is new since the last run, but begins at "
                        f"offset {queue.begin}: the messages before were deleted unread (setting damaged=skip "
                        "continues with the rest)"
                    )
                if strict and last_end is not None and not queue.begin <= last_end <= queue.end:
                    raise DataLossError(
                        f"{path}: topic {topic!r}, queue {queue_id}: the last run ended at offset {last_end}, but the "
                        f"queue holds {queue.begin} to {queue.end} (setting damaged=skip continues with these)"
                    )
                begin = last_end if last_end is not None and queue.begin <= last_end <= queue.end else queue.begin
                starting[path, topic, queue_id], ending[path, topic, queue_id] = begin, queue.end
    return starting, ending, is_damaged


def _stored_messages(spark: SparkSession, out: str, read: MessageRead, parts: Sequence[str]) -> DataFrame:
    return spark.read.schema(read.columns).parquet(*(os.path.join(out, "messages", part) for part in parts))


# -------------------------------------------------------------------------------------------------------------- files


def _check_target(out: str, *, overwrite: bool) -> None:
    """Refuse a folder that exists, or with ``overwrite`` one that holds anything but results."""
    if overwrite:
        _check_result(out)
    elif os.path.lexists(out):
        raise ConfigError(f"{out} exists (--overwrite replaces it, --append adds a run)")


def _check_result(out: str) -> None:
    """Refuse a folder that holds anything but results, because replacing it would delete that."""
    if os.path.lexists(out) and not os.path.isdir(out):
        raise ConfigError(f"{out}: expected a folder, found a file")
    _refuse_others(out, out, rf"part-.*|_SUCCESS|\..*\.crc|[^/]+=.*|{re.escape(_LOCK)}")


def _check_increments(out: str) -> None:
    """Refuse a folder that holds anything but incremental runs, which delete what no run refers to."""
    _refuse_others(out, out, rf"messages|runs|latest|latest\.new|{re.escape(_LOCK)}")
    for name in ("messages", "runs"):
        _refuse_others(out, os.path.join(out, name), rf"\d{{6,}}|{_UNFINISHED}.*")


def _refuse_others(out: str, folder: str, own_names: str) -> None:
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if not re.fullmatch(rf"{own_names}|{_UNFINISHED}.*", name):
            path = os.path.relpath(os.path.join(folder, name), out)
            raise ConfigError(f"{out} holds {path}, which is no result of a pipeline; name another folder")


def _check_earlier_runs(out: str, frame: DataFrame, partition_by: Sequence[str]) -> None:
    """Refuse columns or partitions that differ from the earlier runs in ``out``: one read could not cover both."""
    for below, _, names in os.walk(out):
        file = next((name for name in names if name.endswith(".parquet")), None)
        run, *folders = os.path.relpath(below, out).split(os.sep)
        if file is None or not run.startswith("run="):
            continue
        import pyarrow.parquet as pq

        partitions = [folder.partition("=")[0] for folder in folders]
        if partitions != list(partition_by):
            layout = f"partitioned by {', '.join(partitions) or 'nothing'}"
            raise ConfigError(f"partition_by: the earlier runs in {out} are {layout}; use the same, or another folder")
        columns = [*pq.read_schema(os.path.join(below, file)).names, *partitions]
        if set(columns) != set(frame.columns):
            raise ConfigError(
                f"{out}: the earlier runs have the columns {', '.join(columns)}, this one {', '.join(frame.columns)}; "
                "append it to another folder"
            )
        return


def has_files(folder: str) -> bool:
    """Return whether a result has a file, which shows its columns; a partitioned run without rows has none."""
    return any(name.endswith(".parquet") for _, _, names in os.walk(folder) for name in names)


def _check_columns(frame: DataFrame, names: Sequence[str]) -> None:
    for name in names:
        if name not in frame.columns:
            raise ConfigError(f"partition_by: expected some of {', '.join(frame.columns)}, found {name!r}")


@contextmanager
def _replacing(target: str) -> Iterator[None]:
    """Hold a lock beside ``target``, which a new folder replaces."""
    folder, name = os.path.split(target)
    make_folders(DiskFiles(), folder)
    path = os.path.join(folder, f"{_UNFINISHED}lock-{name}")
    lock = DiskFiles().lock(path)
    try:
        yield
    finally:
        os.unlink(path)  # first: once released, the file can belong to another process
        lock.release()


@contextmanager
def _locked(out: str) -> Iterator[None]:
    lock = DiskFiles().lock(os.path.join(out, _LOCK))
    try:
        yield
    finally:
        lock.release()


def _write(frame: DataFrame, target: str, partition_by: Sequence[str], state: bytes | None = None) -> str:
    """Write ``frame`` and ``state`` beside ``target``, flush them, and rename the folder to ``target``."""
    folder, name = os.path.split(target)
    make_folders(DiskFiles(), folder)
    unfinished, old = os.path.join(folder, f"{_UNFINISHED}{name}"), _moved_away(target)
    shutil.rmtree(unfinished, ignore_errors=True)
    _discard(old, unfinished)
    frame.write.partitionBy(*partition_by).parquet(unfinished)
    if partition_by and not has_files(unfinished) and not name.startswith("run="):  # else no file shows the columns
        frame.limit(0).write.mode("append").parquet(unfinished)
    if state is not None:
        DiskFiles().write(os.path.join(unfinished, _STATE), state)
    for below, _, names in os.walk(unfinished):
        for file_name in names:
            with open(os.path.join(below, file_name), "rb") as file:
                os.fsync(file.fileno())
        DiskFiles().flush_folder(below)
    with suppress(FileNotFoundError):
        os.rename(target, old)
    os.rename(unfinished, target)
    DiskFiles().flush_folder(folder)
    _discard(old, unfinished)
    return target


def _discard(old: str, unfinished: str) -> None:
    """Delete a former folder under the name of an unfinished one, because `_bring_back` takes ``old`` for whole."""
    if os.path.isdir(old):
        os.rename(old, unfinished)
        shutil.rmtree(unfinished, ignore_errors=True)


def _moved_away(target: str) -> str:
    """Return where the former folder is while a new one takes its place."""
    folder, name = os.path.split(target)
    return os.path.join(folder, f"{_UNFINISHED}old-{name}")


def _bring_back(target: str) -> None:
    """Move the former folder back if a run was killed before the new one took its place."""
    old = _moved_away(target)
    if os.path.isdir(old) and not os.path.lexists(target):
        os.rename(old, target)
        DiskFiles().flush_folder(os.path.dirname(target))
        _log.warning("%(path)s: restored the former result, which a killed run was replacing", path=target)


def _link(out: str, target: str) -> None:
    """Let ``OUT/latest`` lead to ``target``, in one step."""
    fresh = os.path.join(out, "latest.new")
    with suppress(FileNotFoundError):
        os.unlink(fresh)
    os.symlink(os.path.relpath(target, out), fresh)
    os.replace(fresh, os.path.join(out, "latest"))
    DiskFiles().flush_folder(out)


def _delete_others(folder: str, prefix: str, current: Sequence[str]) -> None:
    """Delete what killed or earlier runs left in ``folder``."""
    if not os.path.isdir(folder):
        return
    for name in os.listdir(folder):
        if name.startswith(prefix) and name not in current:
            shutil.rmtree(os.path.join(folder, name))
