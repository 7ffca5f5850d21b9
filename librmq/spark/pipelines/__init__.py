"""Pipelines over one store or a cluster's: functions of DataFrames, and by name for ``librmq spark run``.

Each function has a module of its own and takes DataFrames, so it works on tables of a lake too. `PIPELINES` reads their
arguments from the folders of stores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - the usual name

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

Settings = Mapping[str, str]


@dataclass(frozen=True)
class Pipeline:
    """A pipeline by name: what it reports, and how it reads its tables from ``paths``."""

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
    messages = _messages(spark, paths, settings, BACKLOG_COLUMNS.replace(", keys string", ""))
    return backlog(stores.offsets(spark, paths), stores.queues(spark, paths, _mode(settings)), messages)


def _skew(spark: SparkSession, paths: tuple[str, ...], settings: Settings) -> DataFrame:
    by = settings.get("by", "queue")
    if by not in ("queue", "key"):
        raise ConfigError(f"setting by: expected queue or key, found {by!r}")
    columns = "store string, topic string, " + ("queueId int" if by == "queue" else "keys string")
    return skew(_messages(spark, paths, settings, columns), "key" if by == "key" else "queue")


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
    reader = spark.read.format("rocketmq").schema(columns).option("mode", _mode(settings))
    frame: DataFrame = reader.load(list(paths))
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
    return pending_transactions(halves, ops, stores.offsets(spark, paths))


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
    return delays.unionByName(timers)


def _dead_letters(spark: SparkSession, paths: tuple[str, ...], settings: Settings) -> DataFrame:
    columns = "store string, topic string, storeTimestamp timestamp, properties map<string,string>, reconsumeTimes int"
    return dead_letters(_messages(spark, paths, settings, columns, topicPattern="%DLQ%.*"))


def _filters(spark: SparkSession, paths: tuple[str, ...], settings: Settings) -> DataFrame:
    columns = "store string, topic string, properties map<string,string>, size int"
    return filter_savings(_messages(spark, paths, settings, columns), stores.filters(spark, paths))


def _reconcile(spark: SparkSession, paths: tuple[str, ...], settings: Settings) -> DataFrame:
    if "rows" not in settings or "key" not in settings:
        raise ConfigError("pipeline reconcile: settings rows (a Parquet folder) and key (its column) are wanted")
    late = _number(settings, "late", 0) if "late" in settings else None
    messages = _own_messages(spark, paths, settings, "topic string, storeTimestamp timestamp, keys string")
    if "topic" in settings:
        messages = messages.where(F.col("topic") == settings["topic"])
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
    "backlog": Pipeline("lag by group, topic and queue, and the age of the oldest message that waits", _backlog),
    "skew": Pipeline("queues or keys with more than their share", _skew, {"by": "queue or key (queue)"}),
    "duplicates": Pipeline(
        "messages whose business key came before, exactly", _duplicates, {"window": "seconds between the two (3600)"}
    ),
    "duplicates-approximate": Pipeline(
        "the same with bloom filters, whenever", _approximate, {"error": "share of false ones (0.001)"}
    ),
    "what-if": Pipeline(
        "who would get which queue, and the time to drain, for many scenarios",
        _what_if,
        {
            "clients": "numbers of clients (1,2,4,8)",
            "strategies": "how queues are shared out (AVG,AVG_BY_CIRCLE,CONSISTENT_HASH)",
            "rate": "messages a second of a client (100)",
            "queue_rate": "messages a second of a queue (no bound)",
        },
    ),
    "transactions": Pipeline("half messages that were neither committed nor rolled back", _transactions),
    "timers": Pipeline("messages of delay levels and 5.x's timer that wait, and when they are due", _timers),
    "dead-letters": Pipeline("dead letters by group, topic and cause", _dead_letters),
    "filters": Pipeline("what registered filters match, and what they would save if pushed down", _filters),
    "reconcile": Pipeline(
        "messages held against business rows: missing, extra, repeated, late",
        _reconcile,
        {
            "rows": "a Parquet folder",
            "key": "its key column",
            "time": "its time column (none)",
            "late": "seconds behind it that are late (none)",
            "topic": "the only topic that counts (all)",
        },
    ),
    "retention": Pipeline(
        "what a shorter retention would free", _retention, {"hours": "hours that are kept (6,12,24,48,72)"}
    ),
}
"""The pipelines of ``librmq spark run``."""
