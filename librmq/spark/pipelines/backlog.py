"""Who is behind, by how much, since when; and what is spread unevenly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["MESSAGE_COLUMNS", "backlog", "skew"]

MESSAGE_COLUMNS = "store string, topic string, queueId int, queueOffset bigint, storeTimestamp timestamp, keys string"


def backlog(offsets: DataFrame, queues: DataFrame, messages: DataFrame) -> DataFrame:
    """A row for each queue that a group consumes.

    ``offsets`` and ``queues`` are those of `librmq.spark.stores`; ``messages`` has store, topic, queueId, queueOffset,
    storeTimestamp. Columns: store, group, topic, queueId, minOffset, maxOffset, offset, lag (messages that wait),
    lost (messages that went before the group came to them), oldest (when the first that waits was stored), newest
    (when the store's last message was), ageSeconds (between the two: a store's own clock is its last message).
    """
    where = ["store", "topic", "queueId"]
    held = offsets.join(queues, where)
    waiting = held.withColumn("next", F.greatest("offset", "minOffset"))
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
            F.greatest(F.col("minOffset") - F.col("offset"), F.lit(0)).alias("lost"),
            "oldest", "newest",
            F.coalesce(age / 1000, F.lit(0.0)).alias("ageSeconds"),
        )
    )  # fmt: skip


def skew(messages: DataFrame, by: Literal["queue", "key"] = "queue", most: int = 100) -> DataFrame:
    """How unevenly messages lie over the queues of a topic, or over the keys: the ``most`` largest of each topic.

    Columns: store, topic, queueId or key, messages, share (of the topic's), ratio (to the mean of the topic's queues
    or keys).
    """
    topic = ["store", "topic"]
    if by == "key":
        each = messages.withColumn("key", F.explode(F.split("keys", " "))).where("key != ''").groupBy(*topic, "key")
        name = "key"
    else:
        each, name = messages.groupBy(*topic, "queueId"), "queueId"
    counts = each.agg(F.count("*").alias("messages"))
    whole = Window.partitionBy(*topic)
    ranked = counts.select(
        *topic,
        name,
        "messages",
        (F.col("messages") / F.sum("messages").over(whole)).alias("share"),
        (F.col("messages") / F.avg("messages").over(whole)).alias("ratio"),
        F.row_number().over(whole.orderBy(F.desc("messages"), F.asc(name))).alias("place"),
    )
    return ranked.where(F.col("place") <= most).drop("place")
