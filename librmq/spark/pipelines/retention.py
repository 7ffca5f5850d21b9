"""Gain and cost of a shorter retention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - the usual name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def what_retention_frees(
    records: DataFrame, files: DataFrame, offsets: DataFrame, hours: Sequence[float] = (6, 12, 24, 48, 72)
) -> DataFrame:
    """Return, for each number of hours, the content of files whose last record was stored so long before the last one.

    ``records`` is the view ``log`` with store, topic, queueId, queueOffset, physicalOffset, storeTimestamp; ``files``
    and ``offsets`` comes from `librmq.spark.stores`. The file that is written stays, as in a broker. Columns: store,
    hours, files, bytes (freed), messages (deleted), unread (deleted messages that a group has not consumed), oldest
    (when the oldest remaining message was stored).
    """
    lengths = files.groupBy("store").agg(F.max("size").alias("fileSize"))
    groups = offsets.groupBy("store", "topic").agg(F.countDistinct("group").alias("groups"))
    read = offsets.groupBy("store", "topic", "queueId").agg(
        F.min("offset").alias("read"), F.countDistinct("group").alias("readers")
    )
    # A group without progress in a queue has read nothing of it.
    behind = F.col("readers").isNull() | (F.col("readers") < F.col("groups")) | (F.col("queueOffset") >= F.col("read"))
    unread = F.col("groups").isNotNull() & behind
    by_file = (
        records.join(F.broadcast(lengths), "store")
        .join(F.broadcast(read), ["store", "topic", "queueId"], "left")
        .join(F.broadcast(groups), ["store", "topic"], "left")
        .withColumn("begin", F.col("physicalOffset") - F.col("physicalOffset") % F.col("fileSize"))
        .groupBy("store", "begin", "fileSize")
        .agg(
            F.count("*").alias("messages"),
            F.count(F.when(unread, 1)).alias("unread"),
            F.min("storeTimestamp").alias("first"),
            F.max("storeTimestamp").alias("last"),
        )
    )
    newest = by_file.groupBy("store").agg(F.max("last").alias("now"), F.max("begin").alias("written"))
    by_hours = by_file.join(newest, "store").crossJoin(
        records.sparkSession.createDataFrame([(float(hour),) for hour in hours], "hours double")
    )
    age = (F.unix_millis("now") - F.unix_millis("last")) / 3_600_000
    is_freed = (age >= F.col("hours")) & (F.col("begin") < F.col("written"))
    return by_hours.groupBy("store", "hours").agg(
        F.count(F.when(is_freed, 1)).alias("files"),
        F.coalesce(F.sum(F.when(is_freed, F.col("fileSize"))), F.lit(0)).alias("bytes"),
        F.coalesce(F.sum(F.when(is_freed, F.col("messages"))), F.lit(0)).alias("messages"),
        F.coalesce(F.sum(F.when(is_freed, F.col("unread"))), F.lit(0)).alias("unread"),
        F.min(F.when(~is_freed, F.col("first"))).alias("oldest"),
    )
