"""Lag of consumer groups, the time to drain it, and what a shorter retention would delete unread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - the usual name

from librmq.spark.functions import allocate

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


MESSAGE_COLUMNS = "store string, topic string, queueId int, queueOffset bigint, storeTimestamp timestamp"


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


# ---- drain times


def what_if(lags: DataFrame, scenarios: DataFrame) -> DataFrame:
    """Return each scenario for each group and topic: the owner of each queue, and the time to drain all.

    A client drains its queues in parallel, at up to ``clientRate`` messages a second in all and ``queueRate`` for each
    queue. A queue comes from one broker and goes to one client, so its lag is a limit that no further client lifts.

    ``lags`` has store, group, topic, queueId, lag, as `backlog` gives them (a store's folder stands for its broker);
    ``scenarios`` has scenario (a name), strategy (as `librmq.spark.functions.strategy_of` takes it), clients (a
    number), clientRate, queueRate. Columns: scenario, group, topic, strategy, clients, queues, lag, idleClients,
    mostQueues and fewestQueues of a client, unowned (queues without a client), mostLag of a client, drainSeconds (null
    if something is never drained), boundBy (``clients``, ``one queue``, ``nothing``).
    """
    queue = F.struct("topic", F.col("store").alias("brokerName"), "queueId")
    grouped = lags.groupBy("group", "topic").agg(
        F.array_sort(F.collect_list(queue)).alias("queueList"),
        F.map_from_entries(F.collect_list(F.struct(queue, "lag"))).alias("lagOf"),
        F.sum("lag").alias("lag"),
    )
    # Sort by id: the ids are made so that this is also the numeric order.
    members = F.transform(
        F.sequence(F.lit(0), F.col("clients") - 1),
        lambda n: F.concat(F.lit("client-"), F.lpad(n.cast("string"), 6, "0")),
    )
    crossed = grouped.crossJoin(F.broadcast(scenarios)).withColumn(
        "members", F.when(F.col("clients") > 0, members).otherwise(F.array().cast("array<string>"))
    )
    # The strategy differs from row to row, and so is the function's argument, not part of it.
    names = [row["strategy"] for row in scenarios.select("strategy").distinct().collect()]
    shares = F.coalesce(
        *(F.when(F.col("strategy") == name, allocate(name, "queueList", "members")) for name in names), F.lit(None)
    )
    assigned = crossed.withColumn("shares", F.map_values(shares))
    counts = F.transform("shares", F.size)

    def lag_of(share: Column) -> Column:
        return F.transform(share, lambda queue: F.element_at("lagOf", queue))

    sums = F.transform("shares", lambda share: F.aggregate(lag_of(share), F.lit(0).cast("bigint"), lambda a, b: a + b))
    largest = F.coalesce(F.array_max(F.map_values("lagOf")), F.lit(0))
    owned = F.coalesce(F.aggregate(counts, F.lit(0), lambda a, b: a + b), F.lit(0))
    result = assigned.select(
        "scenario", "group", "topic", "strategy", "clients", "clientRate", "queueRate", "lag",
        F.size("queueList").alias("queues"),
        F.coalesce(F.size(F.filter(counts, lambda n: n == 0)), F.lit(0)).alias("idleClients"),
        F.coalesce(F.array_max(counts), F.lit(0)).alias("mostQueues"),
        F.coalesce(F.array_min(counts), F.lit(0)).alias("fewestQueues"),
        (F.size("queueList") - owned).alias("unowned"),
        F.coalesce(F.array_max(sums), F.lit(0)).alias("mostLag"),
        largest.alias("mostLagOfQueue"),
    )  # fmt: skip
    by_clients, by_queue = F.col("mostLag") / F.col("clientRate"), F.col("mostLagOfQueue") / F.col("queueRate")
    never = (F.col("unowned") > 0) & (F.col("lag") > 0)
    bound = F.when(F.col("lag") == 0, "nothing").when(by_queue >= by_clients, "one queue").otherwise("clients")
    return result.select(
        "scenario", "group", "topic", "strategy", "clients", "queues", "lag", "idleClients", "mostQueues",
        "fewestQueues", "unowned", "mostLag",
        F.when(~never, F.greatest(by_clients, by_queue)).alias("drainSeconds"),
        F.when(~never, bound).alias("boundBy"),
    )  # fmt: skip


# ---- retention


def what_retention_frees(
    records: DataFrame, files: DataFrame, offsets: DataFrame, hours: Sequence[float] = (6, 12, 24, 48, 72)
) -> DataFrame:
    """Return, for each number of hours, the content of files whose last record was stored so long before the last one.

    ``records`` is the view ``log`` with store, topic, queueId, queueOffset, physicalOffset, storeTimestamp; ``files``
    and ``offsets`` come from `librmq.spark.stores`. The file that is written stays, as in a broker. Columns: store,
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
