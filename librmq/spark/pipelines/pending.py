"""What waits in a store for something other than a consumer: transactions without an end, messages with a delay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from librmq.consumequeueext import LAST_EXT_ADDRESS
from librmq.levels import DEFAULT_LEVELS, SCHEDULE_TOPIC, DelayLevels
from librmq.spark.stores import DELAY_GROUP
from librmq.topics import HALF_TOPIC

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["CHECK_GROUP", "pending_timers", "pending_transactions"]

CHECK_GROUP = "CID_RMQ_SYS_TRANS"
"""Under whose name the broker keeps how far it has judged half messages."""


def pending_transactions(halves: DataFrame, ops: DataFrame, offsets: DataFrame) -> DataFrame:
    """Half messages that were neither committed nor rolled back.

    ``halves`` are messages of the half topic with store, queueOffset, physicalOffset, properties, uniqueKey,
    bornTimestamp, storeTimestamp; ``ops`` those of the op topic with store and body (the queue offset of the half that
    was ended); ``offsets`` as in `librmq.spark.stores`: what lies before the broker's own progress is done with.
    Columns: store, group, topic, uniqueKey, queueOffset, physicalOffset, checks, born, stored.
    """
    ended = ops.where(F.col("body").isNotNull()).select(
        "store", F.col("body").cast("string").cast("bigint").alias("half")
    )
    done = offsets.where((F.col("group") == CHECK_GROUP) & (F.col("topic") == HALF_TOPIC)).select(
        "store", F.col("offset").alias("done")
    )
    left = halves.join(F.broadcast(done), "store", "left").where(
        F.col("queueOffset") >= F.coalesce(F.col("done"), F.lit(0))
    )
    left = left.join(ended, (left["store"] == ended["store"]) & (left["queueOffset"] == ended["half"]), "left_anti")
    of = _properties("properties")
    return left.select(
        "store",
        of("PGROUP").alias("group"),
        of("REAL_TOPIC").alias("topic"),
        "uniqueKey",
        "queueOffset",
        "physicalOffset",
        F.coalesce(of("TRANSACTION_CHECK_TIMES").try_cast("int"), F.lit(0)).alias("checks"),
        F.col("bornTimestamp").alias("born"),
        F.col("storeTimestamp").alias("stored"),
    )


def pending_timers(
    entries: DataFrame, messages: DataFrame, offsets: DataFrame, levels: DelayLevels = DEFAULT_LEVELS
) -> DataFrame:
    """Delayed messages that were not delivered yet.

    ``entries`` are those of the schedule topic in the view ``queues`` (their tags code is when they are due);
    ``messages`` the same topic's with store, queueId, queueOffset, properties, uniqueKey, storeTimestamp; ``offsets``
    as in `librmq.spark.stores`; ``levels`` the broker's, which are asked where a store has extension files. Columns:
    store, level, topic, uniqueKey, queueOffset, physicalOffset, due.
    """
    where = ["store", "queueId"]
    done = offsets.where((F.col("group") == DELAY_GROUP) & (F.col("topic") == SCHEDULE_TOPIC)).select(
        *where, F.col("offset").alias("done")
    )
    left = entries.join(F.broadcast(done), where, "left").where(
        F.col("queueOffset") >= F.coalesce(F.col("done"), F.lit(0))
    )
    of = _properties("properties")
    delay = F.coalesce(F.get(F.array(*map(F.lit, levels.delays_ms)), F.col("queueId")), F.lit(1000))
    is_time = F.col("tagsCode") > LAST_EXT_ADDRESS  # else it leads to an extension unit, which is not looked into
    due = F.timestamp_millis(F.when(is_time, F.col("tagsCode")).otherwise(F.unix_millis("storeTimestamp") + delay))
    return left.drop("topic").join(messages.drop("topic", "physicalOffset"), [*where, "queueOffset"]).select(
        "store",
        (F.col("queueId") + 1).alias("level"),
        of("REAL_TOPIC").alias("topic"),
        "uniqueKey",
        "queueOffset",
        "physicalOffset",
        due.alias("due"),
    )  # fmt: skip


def _properties(column: str):  # type: ignore[no-untyped-def]
    def of(name: str) -> Column:
        return F.col(column).getItem(name)

    return of
