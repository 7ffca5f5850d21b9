"""Matches of registered filters, and savings if the broker evaluates them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - the usual name

from librmq.spark.functions import match_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
