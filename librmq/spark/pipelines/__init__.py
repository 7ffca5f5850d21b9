"""Pipelines over one store or a cluster's: functions of DataFrames, and by name for ``librmq spark run``.

Each function has its own module and takes DataFrames, so it also works on tables of a data lake. `PIPELINES` reads
their arguments from the folders of stores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from librmq.columns.options import Mode
from librmq.config import suggest
from librmq.errors import ConfigError
from librmq.message.delay_levels import SCHEDULE_TOPIC
from librmq.message.topics import HALF_TOPIC, OP_TOPIC
from librmq.scheduling.timer import TIMER_TOPIC
from librmq.spark import stores
from librmq.spark.pipelines.backlog import MESSAGE_COLUMNS as BACKLOG_COLUMNS
from librmq.spark.pipelines.backlog import backlog, skew
from librmq.spark.pipelines.deadletters import dead_letters, replayable
from librmq.spark.pipelines.duplicates import MESSAGE_COLUMNS as DUPLICATE_COLUMNS
from librmq.spark.pipelines.duplicates import duplicates, duplicates_approximate
from librmq.spark.pipelines.filtering import filter_savings
from librmq.spark.pipelines.pending import pending_delays, pending_timers, pending_transactions
from librmq.spark.pipelines.ranges import GROUP, MESSAGES, TIMES, TOPIC, Settings, chosen, names_of, source_options
from librmq.spark.pipelines.reconciliation import reconcile
from librmq.spark.pipelines.retention import what_retention_frees
from librmq.spark.pipelines.whatif import what_if

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "PIPELINES",
    "Pipeline",
    "backlog",
    "dead_letters",
    "duplicates",
    "duplicates_approximate",
    "filter_savings",
    "pending_delays",
    "pending_timers",
    "pending_transactions",
    "reconcile",
    "replayable",
    "run",
    "skew",
    "what_if",
    "what_retention_frees",
]


@dataclass(frozen=True)
class Pipeline:
    """A named pipeline: what it reports, and how it reads its tables from ``paths``."""

    about: str
    make: Callable[[SparkSession, tuple[str, ...], Settings], DataFrame]
    settings: Settings = field(default_factory=dict)
    """The meaning and the default of each setting, by its name."""

    def __post_init__(self) -> None:
        own = {"damaged": "fail or skip: what to do about records that can't be read (fail)"}
        object.__setattr__(self, "settings", dict(self.settings) | own)


def run(spark: SparkSession, name: str, paths: stores.Paths, settings: Settings | None = None) -> DataFrame:
    """Return the result of the pipeline ``name`` over the stores in ``paths``; `ConfigError` for unknown names."""
    if name not in PIPELINES:
        raise ConfigError(f"unknown pipeline {name!r}: {suggest(name, PIPELINES)}")
    pipeline = PIPELINES[name]
    given = dict(settings or {})
    for one in given:
        if one not in pipeline.settings:
            raise ConfigError(f"pipeline {name} has no setting {one!r}: {suggest(one, pipeline.settings)}")
    return pipeline.make(spark, stores.paths_of(paths), given)


def _number(settings: Settings, name: str, usual: float, least: float = 0) -> float:
    try:
        found = float(settings.get(name, usual))
    except ValueError:
        found = least - 1
    if not least <= found < 1e15:
        raise ConfigError(f"setting {name}: expected a number of at least {least:g}, found {settings[name]!r}")
    return found


def _backlog(spark: SparkSession, paths: tuple[str, ...], settings: Settings) -> DataFrame:
    topics, groups = names_of(settings, "topic"), names_of(settings, "group")
    found = stores.backlog(spark, paths, _mode(settings), topics, groups)
    if found is not None:
        return found
    messages = stores.messages(spark, paths, BACKLOG_COLUMNS.replace(", keys string", ""), mode=_mode(settings))
    queues = stores.queues(spark, paths, _mode(settings))
    return chosen(backlog(stores.offsets(spark, paths), queues, messages), settings)


def _skew(spark: SparkSession, paths: tuple[str, ...], settings: Settings) -> DataFrame:
    by = settings.get("by", "queue")
    if by not in ("queue", "key"):
        raise ConfigError(f"setting by: expected queue or key, found {by!r}")
    columns = "store string, topic string, " + ("queueId int" if by == "queue" else "keys string")
    messages = _messages(spark, paths, settings, columns, **source_options(settings))
    return skew(messages, "key" if by == "key" else "queue")


def _duplicates(spark: SparkSession, paths: tuple[str, ...], settings: Settings) -> DataFrame:
    messages = _own_messages(spark, paths, settings, DUPLICATE_COLUMNS)
    return duplicates(messages, _number(settings, "window", 3600))


def _approximate(spark: SparkSession, paths: tuple[str, ...], settings: Settings) -> DataFrame:
    messages = _own_messages(
        spark, paths, settings, "store string, topic string, queueId int, queueOffset bigint, keys string"
    )
    return duplicates_approximate(messages, min(0.5, _number(settings, "error", 0.001, 1e-9)))


def _mode(settings: Settings) -> Mode:
    found = settings.get("damaged", "fail")
    if found not in ("fail", "skip"):
        raise ConfigError(f"setting damaged: expected fail or skip, found {found!r}")
    return "DROPMALFORMED" if found == "skip" else "FAILFAST"


def _messages(
    spark: SparkSession, paths: tuple[str, ...], settings: Settings, columns: str, **options: str
) -> DataFrame:
    return stores.messages(spark, paths, columns, mode=_mode(settings), **options)


def _own_messages(spark: SparkSession, paths: tuple[str, ...], settings: Settings, columns: str) -> DataFrame:
    """Return the messages of producers, without the broker's topics, retries and dead letters."""
    options = source_options(settings) | {"mode": _mode(settings)}
    frame: DataFrame = spark.read.format("rocketmq").schema(columns).options(**options).load(list(paths))
    return frame.where("topic not like '\\%RETRY\\%%' and topic not like '\\%DLQ\\%%'")


def _what_if(spark: SparkSession, paths: tuple[str, ...], settings: Settings) -> DataFrame:
    rate, queue_rate = _number(settings, "rate", 100, 1e-9), _number(settings, "queue_rate", 1e9, 1e-9)
    strategies = settings.get("strategies", "AVG,AVG_BY_CIRCLE,CONSISTENT_HASH").split(",")
    numbers = [int(_number({"clients": one}, "clients", 1, 1)) for one in settings.get("clients", "1,2,4,8").split(",")]
    rows = [(f"{strategy} x {n}", strategy, n, rate, queue_rate) for strategy in strategies for n in numbers]
    schema = "scenario string, strategy string, clients int, clientRate double, queueRate double"
    return what_if(_backlog(spark, paths, settings), spark.createDataFrame(rows, schema))


def _transactions(spark: SparkSession, paths: tuple[str, ...], settings: Settings) -> DataFrame:
    columns = (
        "store string, queueOffset bigint, physicalOffset bigint, properties map<string,string>, uniqueKey string, "
        "bornTimestamp timestamp, storeTimestamp timestamp"
    )
    halves = _messages(spark, paths, settings, columns, topic=HALF_TOPIC, queueId="0")
    columns = "store string, queueOffset bigint, tags string, body binary"
    ops = _messages(spark, paths, settings, columns, topic=OP_TOPIC, queueId="0")
    return chosen(pending_transactions(halves, ops, stores.offsets(spark, paths)), settings)


def _timers(spark: SparkSession, paths: tuple[str, ...], settings: Settings) -> DataFrame:
    entries = _messages(
        spark, paths, settings, "store string, queueId int, queueOffset bigint, physicalOffset bigint, tagsCode bigint",
        view="queues", topic=SCHEDULE_TOPIC,
    )  # fmt: skip
    columns = (
        "store string, queueId int, queueOffset bigint, properties map<string,string>, uniqueKey string, "
        "storeTimestamp timestamp"
    )
    delayed = _messages(spark, paths, settings, columns, topic=SCHEDULE_TOPIC)
    delays = pending_delays(entries, delayed, stores.offsets(spark, paths))
    columns = "store string, queueOffset bigint, physicalOffset bigint, properties map<string,string>, uniqueKey string"
    timed = _messages(spark, paths, settings, columns, topic=TIMER_TOPIC, queueId="0")
    timers = pending_timers(stores.timer_units(spark, paths), timed, stores.timer_progress(spark, paths))
    return chosen(delays.unionByName(timers), settings)


def _dead_letters(spark: SparkSession, paths: tuple[str, ...], settings: Settings) -> DataFrame:
    columns = "store string, topic string, storeTimestamp timestamp, properties map<string,string>, reconsumeTimes int"
    times = source_options({name: settings[name] for name in TIMES if name in settings})
    groups = names_of(settings, "group")
    where = {"topicPattern": "%DLQ%.*"} if groups is None else {"topic": ",".join(f"%DLQ%{group}" for group in groups)}
    return chosen(dead_letters(_messages(spark, paths, settings, columns, **where, **times)), settings)


def _filters(spark: SparkSession, paths: tuple[str, ...], settings: Settings) -> DataFrame:
    columns = "store string, topic string, properties map<string,string>, size int"
    messages = _messages(spark, paths, settings, columns, **source_options(settings))
    return filter_savings(messages, chosen(stores.filters(spark, paths), settings))


def _reconcile(spark: SparkSession, paths: tuple[str, ...], settings: Settings) -> DataFrame:
    if "rows" not in settings or "key" not in settings:
        raise ConfigError("pipeline reconcile: settings rows (a Parquet folder) and key (its column) are required")
    late = _number(settings, "late", 0) if "late" in settings else None
    messages = _own_messages(spark, paths, settings, "topic string, storeTimestamp timestamp, keys string")
    return reconcile(
        messages,
        spark.read.parquet(settings["rows"]),
        business_key=settings["key"],
        business_time=settings.get("time"),
        late_seconds=late,
    )


def _retention(spark: SparkSession, paths: tuple[str, ...], settings: Settings) -> DataFrame:
    columns = (
        "store string, topic string, queueId int, queueOffset bigint, physicalOffset bigint, storeTimestamp timestamp"
    )
    records = _messages(spark, paths, settings, columns, view="log")
    hours = [_number({"hours": one}, "hours", 72) for one in settings.get("hours", "6,12,24,48,72").split(",")]
    return what_retention_frees(records, stores.log_files(spark, paths), stores.offsets(spark, paths), hours)


PIPELINES: Final[dict[str, Pipeline]] = {
    "backlog": Pipeline(
        "lag by group, topic and queue, and the age of the oldest message that waits", _backlog, TOPIC | GROUP
    ),
    "skew": Pipeline("queues or keys with more than their share", _skew, {"by": "queue or key (queue)"} | MESSAGES),
    "duplicates": Pipeline(
        "messages whose business key came before, exactly",
        _duplicates,
        {"window": "seconds between the two (3600)"} | MESSAGES,
    ),
    "duplicates-approximate": Pipeline(
        "the same with bloom filters, whenever", _approximate, {"error": "share of false ones (0.001)"} | MESSAGES
    ),
    "what-if": Pipeline(
        "who would get which queue, and the time to drain, for many scenarios",
        _what_if,
        {
            "clients": "numbers of clients (1,2,4,8)",
            "strategies": "how queues are shared out (AVG,AVG_BY_CIRCLE,CONSISTENT_HASH)",
            "rate": "messages a second of a client (100)",
            "queue_rate": "messages a second of a queue (no bound)",
        }
        | TOPIC
        | GROUP,
    ),
    "transactions": Pipeline("half messages that were neither committed nor rolled back", _transactions, TOPIC | GROUP),
    "timers": Pipeline("messages of delay levels and 5.x's timer that wait, and when they are due", _timers, TOPIC),
    "dead-letters": Pipeline("dead letters by group, topic and cause", _dead_letters, TOPIC | GROUP | TIMES),
    "filters": Pipeline(
        "what registered filters match, and what they would save if pushed down", _filters, MESSAGES | GROUP
    ),
    "reconcile": Pipeline(
        "messages held against business rows: missing, extra, repeated, late",
        _reconcile,
        {
            "rows": "a Parquet folder",
            "key": "its key column",
            "time": "its time column (none)",
            "late": "seconds behind it that are late (none)",
        }
        | MESSAGES,
    ),
    "retention": Pipeline(
        "what a shorter retention would free", _retention, {"hours": "hours that are kept (6,12,24,48,72)"}
    ),
}
"""The pipelines of ``librmq spark run``."""
