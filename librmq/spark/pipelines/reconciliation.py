"""Comparison of messages with the rows of a business table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - the usual name

from librmq.spark.pipelines.duplicates import keyed

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


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
