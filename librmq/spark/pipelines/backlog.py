"""Lag of consumer groups, and uneven queues or keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from librmq.spark.pipelines.duplicates import keyed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MESSAGE_COLUMNS = "store string, topic string, queueId int, queueOffset bigint, storeTimestamp timestamp, keys string"


def backlog(offsets: DataFrame, queues: DataFrame, messages: DataFrame) -> DataFrame:
    """Return one row for each queue of each topic that a group has made progress in.

    ``offsets`` and ``queues`` come from `librmq.spark.stores`; ``messages`` has store, topic, queueId, queueOffset,
    storeTimestamp. Columns: store, group, topic, queueId, minOffset, maxOffset, offset (null in a queue without
    progress, whose lag counts from minOffset), lag (waiting messages), lost (messages that retention deleted before
    the group read them), oldest (when the first waiting message was stored), newest (when the store's last message
    was stored), ageSeconds (between the two: the last message serves as the store's clock).
    """
    where = ["store", "topic", "queueId"]
    consumed = offsets.select("store", "topic", "group").distinct()
    held = queues.join(consumed, ["store", "topic"]).join(offsets, [*where, "group"], "left")
    waiting = held.withColumn("next", F.greatest("offset", "minOffset"))  # greatest skips nulls
    first = messages.select(*where, F.col("queueOffset").alias("next"), F.col("storeTimestamp").alias("oldest"))
    newest = messages.groupBy("store").agg(F.max("storeTimestamp").alias("newest"))
    lag = F.greatest(F.col("maxOffset") - F.col("next"), F.lit(0))
    age = F.unix_millis("newest") - F.unix_millis("oldest")
    return (
        waiting.join(first, [*where, "next"], "left")
        .join(newest, "store", "left")
        .select(
            "store", "group", "topic", "queueId", "minOffset", "maxOffset", "offset",
            lag.alias("lag"),
            F.when(F.col("offset") < F.col("minOffset"), F.col("minOffset") - F.greatest("offset", F.lit(0)))
            .otherwise(F.lit(0))
            .alias("lost"),
            "oldest", "newest",
            F.coalesce(age / 1000, F.lit(0.0)).alias("ageSeconds"),
        )
    )  # fmt: skip


def skew(messages: DataFrame, by: Literal["queue", "key"] = "queue", most: int | None = None) -> DataFrame:
    """Return the queues or keys of each topic, or the ``most`` largest of each.

    Columns: store, topic, queueId or key, messages, share (of the topic's), ratio (to the mean of the topic's queues
    or keys); with ``most`` also cut (whether the topic has further ones).
    """
    topic = ["store", "topic"]
    if by == "key":
        grouped, name = keyed(messages).groupBy(*topic, "key"), "key"
    else:
        grouped, name = messages.groupBy(*topic, "queueId"), "queueId"
    counts = grouped.agg(F.count("*").alias("messages"))
    of_topic = Window.partitionBy(*topic)
    ranked = counts.select(
        *topic,
        name,
        "messages",
        (F.col("messages") / F.sum("messages").over(of_topic)).alias("share"),
        (F.col("messages") / F.avg("messages").over(of_topic)).alias("ratio"),
        F.row_number().over(of_topic.orderBy(F.desc("messages"), F.asc(name))).alias("place"),
        F.count("*").over(of_topic).alias("count"),
    )
    if most is not None:
        ranked = ranked.where(F.col("place") <= most).withColumn("cut", F.col("count") > most)
    return ranked.drop("place", "count")
