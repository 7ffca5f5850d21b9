"""Effects of other numbers of clients and strategies: the owner of each queue, and the time to drain all.

A client drains its queues in parallel, at up to ``clientRate`` messages a second in all and ``queueRate`` for each
queue. A queue comes from one broker and goes to one client, so its lag is a limit that no further client lifts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - the usual name

from librmq.spark.functions import allocate

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def what_if(lags: DataFrame, scenarios: DataFrame) -> DataFrame:
    """Return each scenario for each group and topic.

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
