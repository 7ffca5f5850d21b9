"""The pipelines by name for ``librmq spark run``: what each reads of the folders of stores, and its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.sql import functions as F  # noqa: N812 - the usual name

from librmq.columns import CORRUPT
from librmq.columns.options import Mode
from librmq.columns.record_batches import TRACE_TOPICS, decoded_traces
from librmq.config import suggest
from librmq.errors import ConfigError
from librmq.message.topics import SYSTEM_TOPICS, SystemTopic, TopicPrefix
from librmq.spark import stores
from librmq.spark.pipelines._backlog import MESSAGE_COLUMNS as BACKLOG_COLUMNS
from librmq.spark.pipelines._backlog import (
    backlog,
    dead_letters,
    pending_delays,
    pending_timers,
    pending_transactions,
    what_if,
    what_retention_frees,
)
from librmq.spark.pipelines._comparisons import (
    FILTER_COLUMNS,
    duplicates,
    duplicates_approximate,
    filter_savings,
    reconcile,
    skew,
)
from librmq.spark.pipelines._comparisons import MESSAGE_COLUMNS as DUPLICATE_COLUMNS
from librmq.spark.stores import (
    GROUP,
    MESSAGES,
    TIMES,
    TOPIC,
    Settings,
    first_sends,
    is_first_send,
    named_rows,
    names_of,
    source_options,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


@dataclass(frozen=True)
class MessageRead:
    """The messages that a pipeline reads."""

    columns: str
    options: Settings = field(default_factory=dict)
    """Options of the data source."""
    first_sends_only: bool = False
    """Whether to leave out the broker's topics, retries and dead letters."""

    def messages(self, spark: SparkSession, paths: tuple[str, ...], **more: str) -> DataFrame:
        """Return the messages of the stores in ``paths``."""
        options = {**self.options, **more}
        if not self.first_sends_only:
            return stores.messages(spark, paths, self.columns, **options)
        frame: DataFrame = spark.read.format("rocketmq").schema(self.columns).options(**options).load(list(paths))
        return first_sends(frame)

    def left_out(self, spark: SparkSession, paths: tuple[str, ...], **more: str) -> DataFrame:
        """Return store and reason of each place that can't be read, for a read that leaves these out."""
        options = {**self.options, **more, "mode": "PERMISSIVE"}
        if not self.first_sends_only:
            options = stores.of_all_topics(options)
        columns = f"{self.columns}, {CORRUPT} string"
        frame: DataFrame = spark.read.format("rocketmq").schema(columns).options(**options).load(list(paths))
        frame = frame.where(F.col(CORRUPT).isNotNull())
        if self.first_sends_only:  # the topic of some places is not known
            frame = frame.where(F.col("topic").isNull() | is_first_send())
        return frame.select("store", F.col(CORRUPT).alias("reason"))


@dataclass(frozen=True)
class Inputs:
    """What a pipeline works on."""

    spark: SparkSession
    paths: tuple[str, ...]
    settings: Settings
    reads: list[MessageRead] = field(default_factory=list)
    """The reads that were made of the stores."""

    def all_messages(self, columns: str, **options: str) -> DataFrame:
        """Return messages of all topics, or as ``options`` of the data source say."""
        return self.read(MessageRead(columns, {"mode": _mode(self.settings), **options}))

    def read(self, request: MessageRead) -> DataFrame:
        """Return the messages of the stores that are wanted."""
        self.reads.append(request)
        return request.messages(self.spark, self.paths)

    def left_out(self) -> DataFrame:
        """Return store and reason of each place that the reads so far leave out with ``damaged=skip``."""
        reasons: DataFrame = self.spark.createDataFrame([], "store string, reason string")
        for read in self.reads:
            reasons = reasons.union(read.left_out(self.spark, self.paths))
        return reasons.distinct()


@dataclass(frozen=True)
class OfStores:
    """A pipeline that shows the present state of stores."""

    make: Callable[[Inputs], DataFrame]


@dataclass(frozen=True)
class OfMessages:
    """A pipeline over messages, which can also come from a lake that earlier runs filled."""

    reads: Callable[[Settings], MessageRead]
    make: Callable[[DataFrame, Inputs], DataFrame]


@dataclass(frozen=True)
class Pipeline:
    """A named pipeline: what it reports, and how."""

    about: str
    source: OfStores | OfMessages
    columns: str
    """The columns of the result with their types."""
    order: tuple[str, ...] = ()
    """The columns that sort the result; a minus sign means that the largest comes first."""
    settings: Settings = field(default_factory=dict)
    """The meaning and the default of each setting, by its name."""

    def __post_init__(self) -> None:
        common = {"damaged": "fail or skip: what to do about records that can't be read (fail)"}
        object.__setattr__(self, "settings", dict(self.settings) | common)

    def result(
        self, inputs: Inputs, messages: DataFrame | None = None, skipped: Sequence[str] | None = None
    ) -> DataFrame:
        """Return the sorted result, from ``messages`` where they do not come from the stores.

        With ``damaged=skip``, or the folders of stores in ``skipped``, it has a column ``skipped``: whether messages of
        the row's store are left out; in a result without ``store``, those of any store.
        """
        if isinstance(self.source, OfStores):
            frame = self.source.make(inputs)
        else:
            if messages is None:
                messages = inputs.read(self.source.reads(inputs.settings))
            frame = self.source.make(messages, inputs)
        if skipped is not None:
            frame = _with_skipped(frame, inputs.spark.createDataFrame([(path,) for path in skipped], "store string"))
        elif _mode(inputs.settings) == "DROPMALFORMED":
            frame = _with_skipped(frame, inputs.left_out().select("store"))
        names = [name for name in self.order if name.removeprefix("-") in frame.columns]
        return frame.orderBy(*map(_sorted_by, names)) if names else frame


def _with_skipped(frame: DataFrame, stores: DataFrame) -> DataFrame:
    """Return ``frame`` with the column ``skipped``: whether ``stores`` has the row's store, or any."""
    columns = [*frame.columns, "skipped"]
    if "store" not in frame.columns:
        return frame.crossJoin(F.broadcast(stores.agg((F.count("*") > 0).alias("skipped"))))
    marks = stores.distinct().withColumn("skipped", F.lit(True))
    return frame.join(F.broadcast(marks), "store", "left").fillna(False, "skipped").select(*columns)


def _sorted_by(name: str) -> Column:
    return F.desc_nulls_last(name[1:]) if name.startswith("-") else F.asc_nulls_last(name)


def find(name: str, settings: Settings) -> Pipeline:
    """Return the pipeline ``name``.

    Raises:
        ConfigError: There is no such pipeline, or it has no such setting; the message names the nearest one.
    """
    if name not in PIPELINES:
        raise ConfigError(f"unknown pipeline {name!r}: {suggest(name, PIPELINES)}")
    pipeline = PIPELINES[name]
    for setting in settings:
        if setting not in pipeline.settings:
            raise ConfigError(f"pipeline {name} has no setting {setting!r}: {suggest(setting, pipeline.settings)}")
    return pipeline


def run(spark: SparkSession, name: str, paths: stores.Paths, settings: Settings | None = None) -> DataFrame:
    """Return the sorted result of the pipeline ``name`` over the stores in ``paths``.

    Raises:
        ConfigError: There is no such pipeline, or a setting is wrong.
    """
    chosen_settings = dict(settings or {})
    return find(name, chosen_settings).result(Inputs(spark, stores.paths_of(paths), chosen_settings))


class LeftOut(NamedTuple):
    """How many places a pipeline left out, the reason of the first one, and their stores."""

    places: int = 0
    first: str = ""
    stores: tuple[str, ...] = ()

    @classmethod
    def from_frame(cls, frame: DataFrame) -> LeftOut:
        """Return the sum of a frame of `left_out`."""
        rows = frame.groupBy("store").agg(F.countDistinct("reason"), F.min("reason")).collect()
        first = min((reason for _, _, reason in rows), default="")
        return cls(sum(places for _, places, _ in rows), first, tuple(sorted(path for path, _, _ in rows)))


def left_out(spark: SparkSession, name: str, paths: stores.Paths, settings: Settings | None = None) -> DataFrame:
    """Return ``store`` and ``reason`` of each place that `run` leaves out with ``damaged=skip``.

    This is a second read of what the pipeline reads, which sends only these places to Spark.

    Raises:
        ConfigError: There is no such pipeline, or a setting is wrong.
    """
    chosen_settings = dict(settings or {})
    inputs = Inputs(spark, stores.paths_of(paths), chosen_settings)
    find(name, chosen_settings).result(inputs)
    if _mode(chosen_settings) == "FAILFAST":
        inputs.reads.clear()
    return inputs.left_out().orderBy("store", "reason")


def _number(settings: Settings, name: str, default: float, minimum: float = 0) -> float:
    try:
        number = float(settings.get(name, default))
    except ValueError:
        number = minimum - 1
    if not minimum <= number < 1e15:
        raise ConfigError(f"setting {name}: expected a number of at least {minimum:g}, found {settings[name]!r}")
    return number


def _mode(settings: Settings) -> Mode:
    choice = settings.get("damaged", "fail")
    if choice not in ("fail", "skip"):
        raise ConfigError(f"setting damaged: expected fail or skip, found {choice!r}")
    return "DROPMALFORMED" if choice == "skip" else "FAILFAST"


def _options(settings: Settings, **more: str) -> dict[str, str]:
    return source_options(settings) | {"mode": _mode(settings)} | more


# -------------------------------------------------------------------------------------------------------- of messages


def _reads_skew(settings: Settings) -> MessageRead:
    by = settings.get("by", "queue")
    if by not in ("queue", "key"):
        raise ConfigError(f"setting by: expected queue or key, found {by!r}")
    last = "queueId int" if by == "queue" else "keys string"
    return MessageRead(f"store string, topic string, {last}", _options(settings))


def _skew(messages: DataFrame, inputs: Inputs) -> DataFrame:
    largest = int(_number(inputs.settings, "most", 1, 1)) if "most" in inputs.settings else None
    if "topic" not in inputs.settings:
        topic = F.col("topic")
        messages = messages.where(~topic.isin(sorted(SYSTEM_TOPICS)) & ~topic.startswith(TopicPrefix.SYSTEM))
    if inputs.settings.get("by") == "key":
        return skew(messages, "key", largest)
    return skew(messages, "queue", largest, stores.listed_queues(inputs.spark, inputs.paths))


def _reads_keys(columns: str) -> Callable[[Settings], MessageRead]:
    return lambda settings: MessageRead(columns, _options(settings), first_sends_only=True)


def _duplicates(messages: DataFrame, inputs: Inputs) -> DataFrame:
    return duplicates(messages, _number(inputs.settings, "window", 3600))


def _approximate(messages: DataFrame, inputs: Inputs) -> DataFrame:
    return duplicates_approximate(messages, min(0.5, _number(inputs.settings, "error", 0.001, 1e-9)))


def _reads_dead_letters(settings: Settings) -> MessageRead:
    columns = "store string, topic string, storeTimestamp timestamp, properties map<string,string>, reconsumeTimes int"
    times = {name: settings[name] for name in TIMES if name in settings}
    groups = names_of(settings, "group")
    where = {"topicPattern": "%DLQ%.*"} if groups is None else {"topic": ",".join(f"%DLQ%{group}" for group in groups)}
    return MessageRead(columns, _options(times, mode=_mode(settings), **where))


def _dead_letters(messages: DataFrame, inputs: Inputs) -> DataFrame:
    return named_rows(dead_letters(messages), inputs.settings)


def _reads_traces(settings: Settings) -> MessageRead:
    columns = (
        "store string, topic string, storeTimestamp timestamp, bornHost string, uniqueKey string, "
        "physicalOffset bigint, body binary"
    )
    where = {} if "topic" in settings else {"topicPattern": TRACE_TOPICS}
    return MessageRead(columns, _options({name: settings[name] for name in settings if name != "group"}, **where))


def _traces(messages: DataFrame, inputs: Inputs) -> DataFrame:
    frame = messages.drop("topic").mapInArrow(decoded_traces, PIPELINES["traces"].columns)
    return named_rows(frame, {name: value for name, value in inputs.settings.items() if name == "group"})


def _reads_filters(settings: Settings) -> MessageRead:
    return MessageRead("store string, topic string, properties map<string,string>, size int", _options(settings))


def _filters(messages: DataFrame, inputs: Inputs) -> DataFrame:
    return filter_savings(messages, named_rows(stores.filters(inputs.spark, inputs.paths), inputs.settings))


def _reconcile(messages: DataFrame, inputs: Inputs) -> DataFrame:
    settings = inputs.settings
    if "rows" not in settings or "key" not in settings:
        raise ConfigError("pipeline reconcile: settings rows (a Parquet folder) and key (its column) are required")
    return reconcile(
        messages,
        inputs.spark.read.parquet(settings["rows"]),
        business_key=settings["key"],
        business_time=settings.get("time"),
        late_seconds=_number(settings, "late", 0) if "late" in settings else None,
    )


# ---------------------------------------------------------------------------------------------------------- of stores


def _backlog(inputs: Inputs) -> DataFrame:
    spark, paths, settings = inputs.spark, inputs.paths, inputs.settings
    topics, groups = names_of(settings, "topic"), names_of(settings, "group")
    frame = stores.backlog(spark, paths, _mode(settings), topics, groups)
    if frame is not None:
        return frame
    messages = inputs.all_messages(BACKLOG_COLUMNS)
    queues = stores.queues(spark, paths, _mode(settings))
    unsorted = named_rows(backlog(stores.consumed_offsets(spark, paths, groups), queues, messages), settings)
    return unsorted.orderBy(F.desc("lag"), "store", "group", "topic", "queueId")


def _what_if(inputs: Inputs) -> DataFrame:
    settings = inputs.settings
    rate, queue_rate = _number(settings, "rate", 100, 1e-9), _number(settings, "queue_rate", 1e9, 1e-9)
    strategies = settings.get("strategies", "AVG,AVG_BY_CIRCLE,CONSISTENT_HASH").split(",")
    numbers = [
        int(_number({"clients": text}, "clients", 1, 1)) for text in settings.get("clients", "1,2,4,8").split(",")
    ]
    rows = [(f"{strategy} x {n}", strategy, n, rate, queue_rate) for strategy in strategies for n in numbers]
    schema = "scenario string, strategy string, clients int, clientRate double, queueRate double"
    return what_if(_backlog(inputs), inputs.spark.createDataFrame(rows, schema))


def _transactions(inputs: Inputs) -> DataFrame:
    columns = (
        "store string, queueOffset bigint, physicalOffset bigint, properties map<string,string>, uniqueKey string, "
        "bornTimestamp timestamp, storeTimestamp timestamp"
    )
    halves = inputs.all_messages(columns, topic=SystemTopic.HALF, queueId="0")
    columns = "store string, queueOffset bigint, tags string, body binary"
    ops = inputs.all_messages(columns, topic=SystemTopic.OP, queueId="0")
    return named_rows(pending_transactions(halves, ops, stores.offsets(inputs.spark, inputs.paths)), inputs.settings)


def _timers(inputs: Inputs) -> DataFrame:
    spark, paths = inputs.spark, inputs.paths
    entries = inputs.all_messages(
        "store string, queueId int, queueOffset bigint, physicalOffset bigint, tagsCode bigint",
        view="queues", topic=SystemTopic.SCHEDULE,
    )  # fmt: skip
    columns = (
        "store string, queueId int, queueOffset bigint, properties map<string,string>, uniqueKey string, "
        "storeTimestamp timestamp"
    )
    delayed = inputs.all_messages(columns, topic=SystemTopic.SCHEDULE)
    topics = names_of(inputs.settings, "topic")
    if topics is not None:  # a retry goes to the topic of its group, and belongs to the message's topic too
        target, first = (F.col("properties").getItem(name) for name in ("REAL_TOPIC", "RETRY_TOPIC"))
        is_retry = target.startswith(TopicPrefix.RETRY) | target.startswith(TopicPrefix.DEAD_LETTER)
        delayed = delayed.where(target.isin(topics) | (is_retry & first.isin(topics)))
    delays = pending_delays(entries, delayed, stores.offsets(spark, paths))
    columns = (
        "store string, queueOffset bigint, physicalOffset bigint, storeTimestamp timestamp, "
        "properties map<string,string>, uniqueKey string"
    )
    timed = inputs.all_messages(columns, topic=SystemTopic.TIMER, queueId="0")
    timers = pending_timers(stores.timer_units(spark, paths), timed, stores.timer_progress(spark, paths))
    return delays.unionByName(named_rows(timers, inputs.settings))


def _retention(inputs: Inputs) -> DataFrame:
    columns = (
        "store string, topic string, queueId int, queueOffset bigint, physicalOffset bigint, storeTimestamp timestamp"
    )
    records = inputs.all_messages(columns, view="log")
    hours = [_number({"hours": text}, "hours", 72) for text in inputs.settings.get("hours", "6,12,24,48,72").split(",")]
    return what_retention_frees(
        records, stores.log_files(inputs.spark, inputs.paths), stores.offsets(inputs.spark, inputs.paths), hours
    )


_APPROXIMATE_COLUMNS: Final = "store string, topic string, queueId int, queueOffset bigint, keys string"
_PENDING_COLUMNS: Final = "topic string, uniqueKey string, queueOffset bigint, physicalOffset bigint"

PIPELINES: Final[dict[str, Pipeline]] = {
    "backlog": Pipeline(
        "lag by group, topic and queue, and the age of the oldest message that waits",
        OfStores(_backlog),
        "store string, group string, topic string, queueId int, minOffset bigint, maxOffset bigint, offset bigint, "
        "lag bigint, lost bigint, oldest timestamp, newest timestamp, ageSeconds double",
        settings=TOPIC | GROUP,
    ),
    "skew": Pipeline(
        "queues or keys with more than their share",
        OfMessages(_reads_skew, _skew),
        "store string, topic string, queueId int, messages bigint, share double, ratio double",
        ("-ratio", "-messages", "store", "topic", "queueId", "key"),
        {"by": "queue or key (queue)", "most": "most rows of a topic (all)"} | MESSAGES,
    ),
    "duplicates": Pipeline(
        "messages whose business key came before, exactly",
        OfMessages(_reads_keys(DUPLICATE_COLUMNS), _duplicates),
        f"{DUPLICATE_COLUMNS}, key string, before timestamp, resend boolean, secondsAfter double",
        ("topic", "key", "storeTimestamp", "store", "physicalOffset"),
        {"window": "seconds between the two (3600)"} | MESSAGES,
    ),
    "duplicates-approximate": Pipeline(
        "messages whose business key probably came before, at any time, by Bloom filters",
        OfMessages(_reads_keys(_APPROXIMATE_COLUMNS), _approximate),
        _APPROXIMATE_COLUMNS.replace("keys", "key"),
        ("topic", "key", "store", "queueId", "queueOffset"),
        {"error": "share of false ones (0.001)"} | MESSAGES,
    ),
    "what-if": Pipeline(
        "who would get which queue, and the time to drain, for many scenarios",
        OfStores(_what_if),
        "scenario string, group string, topic string, strategy string, clients int, queues int, lag bigint, "
        "idleClients int, mostQueues int, fewestQueues int, unowned int, mostLag bigint, drainSeconds double, "
        "boundBy string",
        ("group", "topic", "drainSeconds", "clients", "strategy"),
        {
            "clients": "numbers of clients (1,2,4,8)",
            "strategies": "how queues are shared out (AVG,AVG_BY_CIRCLE,CONSISTENT_HASH)",
            "rate": "messages a second of a client (100)",
            "queue_rate": "messages a second of a queue (no bound)",
        }
        | TOPIC
        | GROUP,
    ),
    "transactions": Pipeline(
        "half messages that were neither committed nor rolled back",
        OfStores(_transactions),
        f"store string, group string, {_PENDING_COLUMNS}, checks int, born timestamp, stored timestamp",
        ("born", "store", "queueOffset"),
        TOPIC | GROUP,
    ),
    "timers": Pipeline(
        "messages of delay levels and 5.x's timer that wait, and when they are due",
        OfStores(_timers),
        f"store string, kind string, level int, {_PENDING_COLUMNS}, due timestamp",
        ("due", "store", "kind", "level", "queueOffset"),
        TOPIC,
    ),
    "dead-letters": Pipeline(
        "dead letters by group, topic and cause, also those that were sent again",
        OfMessages(_reads_dead_letters, _dead_letters),
        "store string, group string, topic string, cause string, messages bigint, first timestamp, last timestamp, "
        "mostTimes int",
        ("-messages", "store", "group", "topic", "cause"),
        TOPIC | GROUP | TIMES,
    ),
    "traces": Pipeline(
        "what clients recorded: which instance consumed a message, when, with what result",
        OfMessages(_reads_traces, _traces),
        "store string, trace string, at timestamp, id string, topic string, group string, instance string, "
        "succeeded boolean, result string, tookSeconds double, retries int, keys string, request string, "
        "physicalOffset bigint",
        ("at", "store", "physicalOffset", "id"),
        {"topic": "topics of traces, separated by commas (RocketMQ's own)"} | GROUP | TIMES,
    ),
    "filters": Pipeline(
        "what registered filters match, and what they would save if pushed down",
        OfMessages(_reads_filters, _filters),
        FILTER_COLUMNS,
        ("-savedBytes", "store", "group", "topic"),
        MESSAGES | GROUP,
    ),
    "reconcile": Pipeline(
        "messages compared with business rows: missing, extra, repeated, late",
        OfMessages(_reads_keys("store string, topic string, storeTimestamp timestamp, keys string"), _reconcile),
        "topic string, key string, verdict string, messages bigint, rows bigint, first timestamp, secondsAfter double",
        ("verdict", "topic", "key"),
        {
            "rows": "a Parquet folder",
            "key": "its key column",
            "time": "its time column (none)",
            "late": "seconds behind it that are late (none)",
        }
        | MESSAGES,
    ),
    "retention": Pipeline(
        "what a shorter retention would free",
        OfStores(_retention),
        "store string, hours double, files bigint, bytes bigint, messages bigint, unread bigint, oldest timestamp",
        ("store", "hours"),
        {"hours": "hours that are kept (6,12,24,48,72)"},
    ),
}
"""The pipelines of ``librmq spark run``."""
