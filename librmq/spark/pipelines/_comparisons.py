"""Messages compared by business key or queue, with the rows of a business table, and with registered filters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from librmq.errors import MissingExtraError
from librmq.spark._functions import match_sql

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


MESSAGE_COLUMNS = (
    "store string, topic string, queueId int, queueOffset bigint, physicalOffset bigint, storeTimestamp timestamp, "
    "keys string, uniqueKey string"
)


def keyed(messages: DataFrame, key: Column | str | None = None) -> DataFrame:
    """Return ``messages`` with a column ``key``: a row for each different key in ``keys``, or ``key`` as it is."""
    if key is None:
        return messages.withColumn("key", F.explode(F.array_distinct(F.split("keys", " ")))).where("key != ''")
    column = F.col(key) if isinstance(key, str) else key
    return messages.withColumn("key", column).where(F.col("key").isNotNull())


def duplicates(messages: DataFrame, window_seconds: float, key: Column | str | None = None) -> DataFrame:
    """Return messages that repeat the key of one at most ``window_seconds`` earlier, in the topic on any broker.

    Columns: those of ``messages``, key, before (when the earlier one was stored), secondsAfter, resend (true if both
        have the same unique id, so that a client or a broker, not the application, sent it again).
    """
    order = Window.partitionBy("topic", "key").orderBy("storeTimestamp", "store", "physicalOffset")
    keyed_messages = keyed(messages, key).withColumns(
        {
            "before": F.lag("storeTimestamp").over(order),
            "resend": F.coalesce(F.lag("uniqueKey").over(order) == F.col("uniqueKey"), F.lit(False)),
        }
    )
    after = F.try_subtract(F.unix_micros("storeTimestamp"), F.unix_micros("before")) / 1_000_000
    return keyed_messages.withColumn("secondsAfter", after).where(F.col("secondsAfter") <= window_seconds)


def duplicates_approximate(
    messages: DataFrame, error_rate: float = 0.001, capacity: int = 1_000_000, key: Column | str | None = None
) -> DataFrame:
    """Return messages whose key any earlier message of the topic had, using a Bloom filter for each task.

    Nothing is sorted and no key is kept: a task takes a share of the keys and needs about 2 bytes for each. No
    duplicate is missed, and about ``error_rate`` of the other messages count as duplicates. ``capacity`` is the initial
    number of keys in a task's filter, which grows. It is not known which of several equal messages is the first. Needs
    the extra ``bloom``. Columns: store, topic, queueId, queueOffset, key.
    """
    try:
        import pybloom_live
    except ImportError:
        raise MissingExtraError("finding duplicates with bloom filters", "bloom") from None
    del pybloom_live
    keyed_messages = keyed(messages, key).select("store", "topic", "queueId", "queueOffset", "key")
    shared = keyed_messages.repartition(F.col("topic"), F.col("key"))
    return shared.mapInArrow(partial(_seen_before, error_rate, capacity), keyed_messages.schema)


def _seen_before(error_rate: float, capacity: int, batches: Iterator[Any]) -> Iterator[Any]:
    import pyarrow as pa
    from pybloom_live import ScalableBloomFilter

    seen = ScalableBloomFilter(capacity, error_rate)
    for batch in batches:
        texts = zip(batch.column("topic").to_pylist(), batch.column("key").to_pylist(), strict=True)
        yield batch.filter(pa.array([seen.add(f"{topic}\0{key}") for topic, key in texts], pa.bool_()))


def skew(
    messages: DataFrame,
    by: Literal["queue", "key"] = "queue",
    limit: int | None = None,
    queues: DataFrame | None = None,
) -> DataFrame:
    """Return the queues of each topic over all stores, or the keys of each topic of a store.

    ``queues`` has store, topic, queueId of all queues, as `librmq.spark.stores.listed_queues` gives them: those without
    messages have no row, and lower the mean. Columns: store, topic, queueId or key, messages, share (of the topic's),
    ratio (to the mean of the topic's queues or keys). ``limit`` leaves the largest of each topic, and adds cut (whether
    the topic has further ones).
    """
    name, together = ("key", ["store", "topic"]) if by == "key" else ("queueId", ["topic"])
    columns = ["store", "topic", name]
    grouped = (keyed(messages) if by == "key" else messages).groupBy(*columns)
    counts = grouped.agg(F.count("*").alias("messages"))
    if by == "queue" and queues is not None:
        empty = queues.select(*columns, F.lit(0).cast("bigint").alias("messages"))
        counts = counts.unionByName(empty).groupBy(*columns).agg(F.sum("messages").alias("messages"))
    of_topic = Window.partitionBy(*together)
    ranked = counts.select(
        *columns,
        "messages",
        (F.col("messages") / F.nullif(F.sum("messages").over(of_topic), F.lit(0))).alias("share"),
        (F.col("messages") / F.nullif(F.avg("messages").over(of_topic), F.lit(0.0))).alias("ratio"),
        F.row_number().over(of_topic.orderBy(F.desc("messages"), "store", name)).alias("place"),
        F.count_if(F.col("messages") > 0).over(of_topic).alias("count"),
    ).where("messages > 0")
    if limit is not None:
        ranked = ranked.where(F.col("place") <= limit).withColumn("cut", F.col("count") > limit)
    return ranked.drop("place", "count")


# ---- rows of a business table


def reconcile(
    messages: DataFrame,
    business: DataFrame,
    *,
    business_key: str,
    business_time: str | None = None,
    late_seconds: float | None = None,
    key: Column | str | None = None,
) -> DataFrame:
    """Return one row for each topic, key and verdict, and none if one row has one message in time.

    Verdicts: ``missing`` (a row without a message in any topic; its topic is null), ``extra`` (a message without a
    row), ``repeated`` (more messages in a topic than rows), ``late`` (the first message of the topic was stored more
    than ``late_seconds`` after ``business_time``). ``messages`` has topic, keys and storeTimestamp; ``key`` is the
    business key, each of ``keys`` unless given. Columns: topic, key, verdict, messages, rows, first (when the first
    message was stored), secondsAfter.
    """
    sent = (
        keyed(messages, key)
        .groupBy("topic", "key")
        .agg(F.count("*").alias("messages"), F.min("storeTimestamp").alias("first"))
    )
    time = F.col(business_time) if business_time is not None else F.lit(None).cast("timestamp")
    rows = (
        business.select(F.col(business_key).cast("string").alias("key"), time.alias("at"))
        .where(F.col("key").isNotNull())
        .groupBy("key")
        .agg(F.count("*").alias("rows"), F.min("at").alias("at"))
    )
    both = sent.join(rows, "key", "full").withColumns(
        {"messages": F.coalesce("messages", F.lit(0)), "rows": F.coalesce("rows", F.lit(0))}
    )
    both = both.withColumn("secondsAfter", F.try_subtract(F.unix_micros("first"), F.unix_micros("at")) / 1_000_000)
    is_late = F.lit(False) if late_seconds is None else F.col("secondsAfter") > late_seconds
    verdicts = F.array_compact(
        F.array(
            F.when(F.col("messages") == 0, F.lit("missing")),
            F.when(F.col("rows") == 0, F.lit("extra")),
            F.when((F.col("rows") > 0) & (F.col("messages") > F.col("rows")), F.lit("repeated")),
            F.when(is_late, F.lit("late")),
        )
    )
    return both.select(
        "topic", "key", F.explode(verdicts).alias("verdict"), "messages", "rows", "first", "secondsAfter"
    )


# ---- registered filters

FILTER_COLUMNS = (
    "store string, group string, topic string, expression string, messages bigint, matched bigint, bytes bigint, "
    "matchedBytes bigint, savedBytes bigint, selectivity double"
)


def filter_savings(messages: DataFrame, filters: DataFrame) -> DataFrame:
    """Return a row for each registered filter.

    ``messages`` has store, topic, properties, size; ``filters`` comes from `librmq.spark.stores`, and is small.
    Columns: store, group, topic, expression, messages (of the topic), matched, bytes, matchedBytes, savedBytes (what
    the group would not be sent), selectivity.
    """
    rows = filters.distinct().collect()
    if not rows:
        spark = filters.sparkSession
        return spark.createDataFrame([], FILTER_COLUMNS)
    # One pass over the messages, whatever the number of filters.
    answers = []
    for row in rows:
        here = (F.col("topic") == row["topic"]) & (F.col("store") == row["store"])
        match = here & match_sql("properties", row["expression"])
        answers.append(
            F.struct(
                F.lit(row["store"]).alias("store"),
                F.lit(row["group"]).alias("group"),
                F.lit(row["topic"]).alias("topic"),
                F.lit(row["expression"]).alias("expression"),
                F.count(F.when(here, 1)).alias("messages"),
                F.count(F.when(match, 1)).alias("matched"),
                F.coalesce(F.sum(F.when(here, F.col("size"))), F.lit(0)).cast("bigint").alias("bytes"),
                F.coalesce(F.sum(F.when(match, F.col("size"))), F.lit(0)).cast("bigint").alias("matchedBytes"),
            )
        )
    every = messages.agg(F.array(*answers).alias("rows")).select(F.explode("rows").alias("row")).select("row.*")
    return every.withColumns(
        {
            "savedBytes": F.col("bytes") - F.col("matchedBytes"),
            "selectivity": F.when(F.col("messages") > 0, F.col("matched") / F.col("messages")),
        }
    )
