"""Small DataFrames about stores: queues, groups' progress, filters, files of the log; settings that select messages.

The driver reads them from the store's own files, without a lock. For a cluster, pass the paths of its brokers; the
column ``store`` of each frame has the folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from librmq.columns import ReadOptions, ReadSelection
from librmq.columns.options import Mode
from librmq.columns.planned_store import PlannedStore
from librmq.diagnosis.report_rows import parse_time
from librmq.errors import ConfigError, CorruptionError
from librmq.files import DiskFiles
from librmq.message.delays import queue_id_of_level
from librmq.message.lag import lag_terms
from librmq.message.topics import SystemTopic, TopicPrefix, is_own_group
from librmq.spark._options import parse_read_options, refuse_urls
from librmq.store import BrokerTables
from librmq.store.format import directory
from librmq.store.format.timerfiles import TimerCheckpoint, TimerLog

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession


Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

DELAY_GROUP: Final = "delay levels"
"""Group under which the progress of delay levels is listed."""


def paths_of(paths: Paths) -> tuple[str, ...]:
    """Return the folders of stores, with globs resolved; `ConfigError` for a glob that matches nothing."""
    given_paths = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    folders = [folder for path in given_paths for folder in parse_read_options({"path": os.fspath(path)}).paths]
    refuse_urls(folders, "pipelines and the report read")
    return tuple(dict.fromkeys(folders))


def messages(spark: SparkSession, paths: Paths, columns: str, **options: str) -> DataFrame:
    """Return ``columns`` (a schema) of the stores' messages of all topics, or as ``options`` of the source say."""
    return spark.read.format("rocketmq").schema(columns).options(**of_all_topics(options)).load(list(paths_of(paths)))


def of_all_topics(options: Mapping[str, str]) -> dict[str, str]:
    """Return options of the source that read the broker's own topics too, unless they name topics."""
    if options.get("view", "messages") != "messages" or {"topic", "topicPattern"} & set(options):
        return dict(options)
    return {**options, "view": "all"}


def queues(spark: SparkSession, paths: Paths, mode: Mode = "FAILFAST") -> DataFrame:
    """Return store, topic, queueId, minOffset, maxOffset of every queue; ``mode`` is the source's option."""
    with PlannedStore.open_all(_all_queues(paths_of(paths), mode)) as opened:
        rows = [(store.path, *name, queue.begin, queue.end) for store in opened for name, queue in store.queues.items()]
    return _frame(spark, rows, "store string, topic string, queueId int, minOffset bigint, maxOffset bigint")


def listed_queues(spark: SparkSession, paths: Paths) -> DataFrame:
    """Return store, topic, queueId of every queue in a store's folders or its table of topics, empty ones too."""
    rows: set[tuple[str, str, int]] = set()
    for path in paths_of(paths):
        with suppress(CorruptionError):  # the read of the messages reports it, or leaves it out
            rows |= {(path, *name) for name in directory.list_queues(path, DiskFiles())}
        topics = BrokerTables.open(os.path.join(path, directory.CONFIG)).topics.rows
        for topic, row in topics.items():
            rows |= {(path, topic, queue_id) for queue_id in range(int(row.get("readQueueNums", 0)))}
    return _frame(spark, sorted(rows), "store string, topic string, queueId int")


def _all_queues(paths: tuple[str, ...], mode: Mode) -> ReadOptions:
    return ReadOptions(paths, selection=ReadSelection(internal=True), mode=mode)


def offsets(spark: SparkSession, paths: Paths) -> DataFrame:
    """Return store, group, topic, queueId, offset: each group's progress; delay levels have `DELAY_GROUP`."""
    return _offsets(spark, paths, lambda _: True)


def consumed_offsets(spark: SparkSession, paths: Paths, groups: Sequence[str] | None) -> DataFrame:
    """Return what `offsets` does of groups that have a backlog."""
    return _offsets(spark, paths, lambda group: _has_backlog(group, groups))


def _has_backlog(group: str, groups: Sequence[str] | None) -> bool:
    """Return whether the messages before a group are its backlog, and not what waits for a time or a transaction."""
    return group != DELAY_GROUP and (group in groups if groups is not None else not is_own_group(group))


def _offsets(spark: SparkSession, paths: Paths, is_wanted: Callable[[str], bool]) -> DataFrame:
    rows = [
        (path, *name, queue_id, next_offset)
        for path in paths_of(paths)
        for name, of_queue in _progress(path).items()
        if is_wanted(name[0])
        for queue_id, next_offset in of_queue.items()
    ]
    return _frame(spark, rows, "store string, group string, topic string, queueId int, offset bigint")


def _progress(path: str) -> dict[tuple[str, str], dict[int, int]]:
    """Return the offsets of queues by group and topic."""
    config = BrokerTables.open(os.path.join(path, directory.CONFIG))
    progress = config.progress()
    if config.delays.rows:
        levels = {queue_id_of_level(level): queue_offset for level, queue_offset in config.delays.rows.items()}
        progress[DELAY_GROUP, SystemTopic.SCHEDULE] = levels
    return progress


def backlog(
    spark: SparkSession,
    paths: Paths,
    mode: Mode = "FAILFAST",
    topics: Sequence[str] | None = None,
    groups: Sequence[str] | None = None,
) -> DataFrame | None:
    """Return what `librmq.spark.pipelines._backlog` does, the largest lag first; None for a store too damaged to open.

    The driver looks up the first waiting message of each queue, and no other message is read.
    """
    import pyarrow as pa

    rows: list[tuple[Any, ...]] = []
    progress = {path: _progress(path) for path in paths_of(paths)}
    # A group that consumes a topic reads it at every broker, also at one where it has not begun.
    consumed = sorted(
        (group, topic)
        for group, topic in {name for of_store in progress.values() for name in of_store}
        if _has_backlog(group, groups) and (topics is None or topic in topics)
    )
    with PlannedStore.open_all(_all_queues(tuple(progress), mode)) as opened:
        for store in opened:
            if store.damage:
                return None
            rows += _backlog(store, {name: progress[store.path].get(name, {}) for name in consumed})
    rows.sort(key=lambda row: (-row[7], *row[:4]))
    time = pa.timestamp("us", "UTC")
    kinds = {
        "store": pa.string(), "group": pa.string(), "topic": pa.string(), "queueId": pa.int32(),
        "minOffset": pa.int64(), "maxOffset": pa.int64(), "offset": pa.int64(), "lag": pa.int64(), "lost": pa.int64(),
        "oldest": time, "newest": time, "ageSeconds": pa.float64(),
    }  # fmt: skip
    columns = zip(*rows, strict=True) if rows else [()] * len(kinds)
    arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds.values(), strict=True)]
    return spark.createDataFrame(pa.Table.from_arrays(arrays, names=list(kinds)))


def _backlog(store: PlannedStore, progress: Mapping[tuple[str, str], Mapping[int, int]]) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each queue of each topic that a group consumes; ``progress`` is by group and topic."""
    queues: dict[str, list[int]] = {}
    for topic, queue_id in store.queues:
        queues.setdefault(topic, []).append(queue_id)
    last = [store.stored_at(name, queue.end - 1) for name, queue in store.queues.items() if queue.end > queue.begin]
    newest = max((time for time in last if time is not None), default=None)
    stored_at = cache(store.stored_at)
    for (group, topic), of_queue in progress.items():
        for queue_id in queues.get(topic, ()):
            queue, stored = store.queues[topic, queue_id], of_queue.get(queue_id)
            following, lag, deleted = lag_terms(queue.begin if stored is None else stored, queue.begin, queue.end)
            oldest = stored_at((topic, queue_id), following) if following < queue.end else None
            age = 0.0 if oldest is None or newest is None else (newest - oldest) / 1000
            yield (
                store.path, group, topic, queue_id, queue.begin, queue.end, stored,
                lag, deleted,
                None if oldest is None else oldest * 1000, None if newest is None else newest * 1000, age,
            )  # fmt: skip


def filters(spark: SparkSession, paths: Paths) -> DataFrame:
    """Return store, group, topic, expression: the SQL filters that groups have registered."""
    rows = []
    for path in paths_of(paths):
        config = BrokerTables.open(os.path.join(path, directory.CONFIG))
        rows += [
            (path, entry.group, entry.topic, entry.expression)
            for entry in config.registrations(0)
            if entry.filter is not None
        ]
    return _frame(spark, rows, "store string, group string, topic string, expression string")


def log_files(spark: SparkSession, paths: Paths) -> DataFrame:
    """Return store, file, begin, size: the files of the log."""
    rows = []
    for path in paths_of(paths):
        rows += [
            (path, entry.name, int(entry.name), entry.size)
            for entry in DiskFiles().list(os.path.join(path, directory.COMMITLOG))
            if entry.name.isdigit()
        ]
    return _frame(spark, rows, "store string, file string, begin bigint, size bigint")


def timer_progress(spark: SparkSession, paths: Paths) -> DataFrame:
    """Return store, done: the queue offset up to which the timer topic's messages are in the wheel."""
    files = DiskFiles()
    rows = [(path, (TimerCheckpoint.read(path, files) or TimerCheckpoint()).queue_offset) for path in paths_of(paths)]
    return _frame(spark, rows, "store string, done bigint")


def timer_units(spark: SparkSession, paths: Paths) -> DataFrame:
    """Return store, slot (its time in ms), magic, physicalOffset of the messages in slots of the timer's wheel.

    Each task reads the timer's log of one store.
    """
    files = DiskFiles()
    stores = [(path, size) for path in paths_of(paths) if (size := TimerLog.file_size_in(path, files))]
    schema = "store string, slot bigint, magic int, physicalOffset bigint"
    logs = _frame(spark, stores, "store string, size bigint")
    return logs.repartition(max(1, len(stores)), "store").mapInArrow(_units, schema)


def _units(logs: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for row in (row for batch in logs for row in batch.to_pylist()):
        checkpoint = TimerCheckpoint.read(row["store"], DiskFiles()) or TimerCheckpoint()
        log = TimerLog(row["store"], row["size"], writable=False)
        for _, block in log.blocks(checkpoint.log_position):
            times = block["write_time_ms"].astype(np.int64) + block["delay_ms"]
            waiting = times >= checkpoint.read_time_ms
            yield pa.RecordBatch.from_pydict(
                {
                    "store": pa.repeat(row["store"], int(waiting.sum())),
                    "slot": times[waiting],
                    "magic": block["magic"][waiting].astype(np.int32),
                    "physicalOffset": block["physical_offset"][waiting].astype(np.int64),
                }
            )


def _frame(spark: SparkSession, rows: Iterable[tuple[Any, ...]], schema: str) -> DataFrame:
    return spark.createDataFrame(list(rows), schema)


# ---- settings that select messages

Settings = Mapping[str, str]

TOPIC: Final = {"topic": "names separated by commas (all)"}
GROUP: Final = {"group": "names separated by commas (all)"}
TIMES: Final = {
    "since": "stored at this time or later, ISO 8601 with a zone or milliseconds (all)",
    "until": "stored before this time (all)",
}
MESSAGES: Final = (
    TOPIC
    | TIMES
    | {
        "tags": "a subscription such as a || b (all)",
        "starting_offsets": 'first queue offsets, as JSON: {"TopicA": {"0": 23}} (all)',
        "ending_offsets": "the queue offsets before which it ends, in the same form (all)",
    }
)
_OPTIONS: Final = {
    "topic": "topic",
    "tags": "tags",
    "since": "since",
    "until": "until",
    "starting_offsets": "startingOffsets",
    "ending_offsets": "endingOffsets",
}


def source_options(settings: Settings) -> dict[str, str]:
    """Return the options of the data source for ``settings``; it prunes by them.

    Raises:
        ConfigError: A time is none, or ``since`` is after ``until``.
    """
    times = {name: parse_time(name, settings[name]) for name in TIMES if name in settings}
    if len(times) == len(TIMES) and times["since"] > times["until"]:
        raise ConfigError(
            f"setting since: expected a time before until, found {settings['since']!r} and {settings['until']!r}"
        )
    return {option: str(times.get(name, settings[name])) for name, option in _OPTIONS.items() if name in settings}


def names_of(settings: Settings, name: str) -> list[str] | None:
    """Return the names of a setting; None where all are wanted."""
    return [text.strip() for text in settings[name].split(",")] if name in settings else None


def first_sends(messages: DataFrame) -> DataFrame:
    """Return the messages that are neither retries nor dead letters."""
    return messages.where(is_first_send())


def is_first_send() -> Column:
    """Return the condition that a message is neither a retry nor a dead letter; null without a topic."""
    topic = F.col("topic")
    return ~topic.startswith(TopicPrefix.RETRY) & ~topic.startswith(TopicPrefix.DEAD_LETTER)


def named_rows(frame: DataFrame, settings: Settings) -> DataFrame:
    """Return the rows of ``frame`` with a topic and a group that ``settings`` name."""
    for name in ("topic", "group"):
        names = names_of(settings, name)
        if names is not None and name in frame.columns:
            frame = frame.where(F.col(name).isin(names))
    return frame
