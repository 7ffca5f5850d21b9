"""Incremental runs of a pipeline over messages: each reads what was stored since the last one.

::

    OUT/latest             a link to the folder of the last run
    OUT/runs/000007/       its result in Parquet, and its state: what was read up to there
    OUT/messages/000007/   the columns of messages that run 7 read, and perhaps those of earlier runs

Spark writes the folders. A run counts once ``latest`` leads to its folder, which is the last thing that it does, so a
run that was killed leaves folders that nothing refers to. The next run deletes them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from librmq.columns.planned_store import PlannedStore
from librmq.errors import ConfigError, CorruptionError
from librmq.files import DiskFiles
from librmq.files.interface import make_folders
from librmq.spark import stores
from librmq.spark._options import parse_read_options
from librmq.spark._positions import Document, Positions, nested
from librmq.spark.pipelines import LeftOut, find
from librmq.spark.pipelines._catalog import Inputs, MessageRead, OfMessages
from librmq.spark.stores import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_STATE: Final = "_librmq_run.json"
"""Spark reads no file whose name begins with an underscore."""
_LOCK: Final = "_librmq.lock"
_MOST_PARTS: Final = 32
"""Folders of messages from which the next run makes one."""


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
    ends: Document = field(default_factory=dict)
    """The positions before which all is read."""
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
            f"pipeline {name}: it shows the present state; append the result of each run to a table (--append)"
        )
    for setting in ("starting_offsets", "ending_offsets"):
        if setting in chosen_settings:
            raise ConfigError(f"setting {setting}: an incremental run chooses the offsets; leave it out")
    out = os.path.abspath(out)
    is_new = not os.path.lexists(out) or (os.path.isdir(out) and not os.listdir(out))
    if not is_new and not os.path.isdir(os.path.join(out, "runs")):
        raise ConfigError(f"{out} exists and holds no incremental runs; name another folder")
    make_folders(DiskFiles(), os.path.join(out, "runs"))
    with _locked(out):
        before = _last_state(out, name, chosen_settings)
        inputs = Inputs(spark, stores.paths_of(paths), chosen_settings)
        _delete_others(os.path.join(out, "messages"), before.parts)
        _delete_others(os.path.join(out, "runs"), [_folder(before.run)])
        read = pipeline.source.reads(chosen_settings)
        skips = chosen_settings.get("damaged") == "skip"
        with ExitStack() as opened:
            planned = _open(read, inputs.paths, opened)
            is_damaged = any(store.damage for store in planned.values())
            former = Positions.parse(before.ends)
            moves: dict[Any, Any] = {old: new for old, new in former.present_paths(planned).items() if old != new}
            unless = "setting damaged=skip" if before.run and not skips else None
            last = former.located(planned, unless, set())
            ending = {
                (path, *name): queue.end for path, store in planned.items() for name, queue in store.queues.items()
            }
            starting = {key: last.next_offset(key, planned, unless) for key in ending}
            ends = last.moved_to({**last.offsets, **ending}, planned)
        count = sum(max(0, end - starting[queue]) for queue, end in ending.items())
        run, parts, skipped = before.run + 1, before.parts, LeftOut()
        has_news = count > 0 or not parts or bool(moves)
        new = {
            "startingOffsets": json.dumps(nested(starting)),
            "endingOffsets": json.dumps(nested(ending)),
            "failOnDataLoss": str(not skips),
        }
        if skips and (has_news or is_damaged):
            skipped = LeftOut.from_frame(read.left_out(spark, inputs.paths, **new))
        if has_news:
            fresh = read.messages(spark, inputs.paths, **new)
            if len(parts) >= _MOST_PARTS or moves:
                stored = _stored_messages(spark, out, read, parts)
                fresh, parts = stored.replace(moves, subset=["store"]).unionByName(fresh), ()
            parts = (*parts, _folder(run))
            fresh.write.parquet(os.path.join(out, "messages", parts[-1]))
        # Retention deleted what is between the end of the last run and the first offset.
        first_ends = {} if before.run else starting  # a queue that appears later is read from offset 0
        last_ends = {queue: last.offsets.get(queue, first_ends.get(queue, 0)) for queue in starting}
        lost = {queue: begin - last_ends[queue] for queue, begin in starting.items() if begin > last_ends[queue]}
        former_skipped = (moves.get(path, path) for path in before.skipped)
        stores_skipped = tuple(sorted({*former_skipped, *skipped.stores, *(path for path, _, _ in lost)}))
        result = pipeline.result(
            inputs, _stored_messages(spark, out, read, parts), stores_skipped if skips or stores_skipped else None
        )
        target = os.path.join(out, "runs", _folder(run))
        result.write.partitionBy(*partition_by).parquet(target)
        state = _State(name, _pinned(chosen_settings), ends.document(), parts, run, stores_skipped)
        DiskFiles().write(os.path.join(target, _STATE), json.dumps(vars(state)).encode())
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


def _open(read: MessageRead, paths: Sequence[str], opened: ExitStack) -> dict[str, PlannedStore]:
    """Open the stores with the wanted queues, until ``opened`` ends."""
    default_topics = {} if read.first_sends_only or "topic" in read.options else {"topicPattern": "(?s).*"}
    options = {**default_topics, **read.options}
    return {
        path: opened.enter_context(PlannedStore.open(path, parse_read_options({**options, "path": path})))
        for path in paths
    }


def _stored_messages(spark: SparkSession, out: str, read: MessageRead, parts: Sequence[str]) -> DataFrame:
    return spark.read.schema(read.columns).parquet(*(os.path.join(out, "messages", part) for part in parts))


@contextmanager
def _locked(out: str) -> Iterator[None]:
    lock = DiskFiles().lock(os.path.join(out, _LOCK))
    try:
        yield
    finally:
        lock.release()


def _link(out: str, target: str) -> None:
    """Let ``OUT/latest`` lead to ``target``, in one step."""
    fresh = os.path.join(out, "latest.new")
    with suppress(FileNotFoundError):
        os.unlink(fresh)
    os.symlink(os.path.relpath(target, out), fresh)
    os.replace(fresh, os.path.join(out, "latest"))
    DiskFiles().flush_folder(out)


def _delete_others(folder: str, current: Sequence[str]) -> None:
    """Delete what killed or earlier runs left in ``folder``, and nothing of another name."""
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if re.fullmatch(r"\d{6,}", name) and name not in current:
            shutil.rmtree(os.path.join(folder, name))
