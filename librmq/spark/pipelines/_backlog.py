"""Undelivered messages: lag, the time to drain it, retention, open transactions, delays, and dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from librmq.clock import LAST_MS
from librmq.diagnosis import Consumption, estimate
from librmq.diagnosis.deadletters import OF_A_LETTER, VARIABLE_PARTS
from librmq.errors import AllocationError
from librmq.message import DEFAULT_LEVELS, DelayLevels, MessageQueue
from librmq.message.lag import lag_terms
from librmq.message.properties import RESERVED_PROPERTIES, CountedCause, PropertyName
from librmq.message.topics import SystemTopic, TopicPrefix
from librmq.scheduling.half_messages import CHECK_GROUP, HALF_SEPARATOR
from librmq.scheduling.waiting import PRECISION_MS
from librmq.spark._functions import arrow_function, strategy_of
from librmq.spark.stores import DELAY_GROUP
from librmq.store.format.timerfiles import TimerLog

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


MESSAGE_COLUMNS = "store string, topic string, queueId int, queueOffset bigint, storeTimestamp timestamp"


def backlog(offsets: DataFrame, queues: DataFrame, messages: DataFrame) -> DataFrame:
    """Return one row for each queue, in any store, of each topic that a group has made progress in, in some store.

    ``offsets`` and ``queues`` come from `librmq.spark.stores`; ``messages`` has store, topic, queueId, queueOffset,
    storeTimestamp. Columns: store, group, topic, queueId, minOffset, maxOffset, offset (null in a queue without
    progress, whose lag counts from minOffset), lag (waiting messages), lost (messages that retention deleted before
    the group read them), oldest (when the first waiting message was stored), newest (when the store's last message
    was stored), ageSeconds (between the two: the last message serves as the store's clock).
    """
    where = ["store", "topic", "queueId"]
    consumed = offsets.select("topic", "group").distinct()
    held = queues.join(consumed, "topic").join(offsets, [*where, "group"], "left")
    progress = F.coalesce("offset", "minOffset")
    following, lag, lost = lag_terms(progress, F.col("minOffset"), F.col("maxOffset"), F.greatest, F.lit(0))
    waiting = held.withColumn("next", following)
    first = messages.select(*where, F.col("queueOffset").alias("next"), F.col("storeTimestamp").alias("oldest"))
    newest = messages.groupBy("store").agg(F.max("storeTimestamp").alias("newest"))
    age = F.unix_millis("newest") - F.unix_millis("oldest")
    return (
        waiting.join(first, [*where, "next"], "left")
        .join(newest, "store", "left")
        .select(
            "store", "group", "topic", "queueId", "minOffset", "maxOffset", "offset",
            lag.alias("lag"), lost.alias("lost"), "oldest", "newest",
            F.coalesce(age / 1000, F.lit(0.0)).alias("ageSeconds"),
        )
    )  # fmt: skip


# ---- drain times


_ARROW_ESTIMATE: Final = pa.struct(
    [
        *((name, pa.int32()) for name in ("idleClients", "mostQueues", "fewestQueues", "unowned")),
        *(("mostLag", pa.int64()), ("drainSeconds", pa.float64()), ("boundBy", pa.string())),
    ]
)
_ESTIMATE: Final = (
    "struct<idleClients:int,mostQueues:int,fewestQueues:int,unowned:int,mostLag:bigint,drainSeconds:double,"
    "boundBy:string>"
)


def what_if(lags: DataFrame, scenarios: DataFrame) -> DataFrame:
    """Return each scenario for each group and topic, by `librmq.diagnosis.estimate`: the time to drain all.

    A client drains its queues in parallel, at up to ``clientRate`` messages a second in all and ``queueRate`` for each
    queue. A queue comes from one broker and goes to one client, so its lag is a limit that no further client lifts.

    ``lags`` has store, group, topic, queueId, lag, as `backlog` gives them (a store's folder stands for its broker);
    ``scenarios`` has scenario (a name), strategy (as `librmq.spark._functions.strategy_of` takes it), clients (a
    number), clientRate, queueRate. Columns: scenario, group, topic, strategy, clients, queues, lag, idleClients,
    mostQueues and fewestQueues of a client, unowned (queues without a client), mostLag of a client, drainSeconds (null
    if something is never drained), boundBy (``clients``, ``one queue``, ``nothing``).
    """
    for row in scenarios.select("strategy").distinct().collect():
        strategy_of(row["strategy"])
    queue = F.struct("topic", F.col("store").alias("brokerName"), "queueId", "lag")
    grouped = lags.groupBy("group", "topic").agg(
        F.array_sort(F.collect_list(queue)).alias("queueLags"),
        F.count("*").cast("int").alias("queues"),
        F.sum("lag").alias("lag"),
    )
    estimated = arrow_function("estimate", _estimates, _ESTIMATE)(
        "queueLags", "strategy", "clients", "clientRate", "queueRate"
    )
    return (
        grouped.crossJoin(F.broadcast(scenarios))
        .withColumn("estimate", estimated)
        .select("scenario", "group", "topic", "strategy", "clients", "queues", "lag", "estimate.*")
    )


def _estimates(
    queue_lags: pa.Array, strategies: pa.Array, clients: pa.Array, client_rates: pa.Array, queue_rates: pa.Array
) -> pa.Array:
    columns = (column.to_pylist() for column in (queue_lags, strategies, clients, client_rates, queue_rates))
    return pa.array([_estimate(*row) for row in zip(*columns, strict=True)], _ARROW_ESTIMATE)


def _estimate(
    queue_lags: list[dict[str, Any]], strategy: str, clients: int, client_rate: float, queue_rate: float
) -> dict[str, Any]:
    lags = [queue["lag"] for queue in queue_lags]
    try:
        estimated = estimate(
            Consumption(
                lags=lags,
                queues=[MessageQueue(queue["topic"], queue["brokerName"], queue["queueId"]) for queue in queue_lags],
                handler_s=1 / min(client_rate, queue_rate),
                handler_spread=0.0,
                clients=clients,
                threads=max(1.0, client_rate / queue_rate),
                is_orderly=queue_rate < client_rate,
                strategy=strategy_of(strategy),
            )
        )
    except AllocationError:  # a missing room
        return dict.fromkeys(_ARROW_ESTIMATE.names, 0) | {"unowned": len(lags), "drainSeconds": None, "boundBy": None}
    return {
        "idleClients": estimated.idle_clients,
        "mostQueues": estimated.most_queues,
        "fewestQueues": estimated.fewest_queues,
        "unowned": estimated.unowned_queues,
        "mostLag": estimated.most_lag,
        "drainSeconds": estimated.drain_s,
        "boundBy": None if estimated.drain_s is None else estimated.bound_by,
    }


# ---- retention


def what_retention_frees(
    records: DataFrame, files: DataFrame, offsets: DataFrame, hours: Sequence[float] = (6, 12, 24, 48, 72)
) -> DataFrame:
    """Return, for each number of hours, the content of files whose last record was stored so long before the last one.

    ``records`` is the view ``log`` with store, topic, queueId, queueOffset, physicalOffset, storeTimestamp; ``files``
    and ``offsets`` come from `librmq.spark.stores`. The file that is written stays, as in a broker. Columns: store,
    hours, files, bytes (freed), messages (deleted), unread (deleted messages that a group of any store has not
    consumed), oldest (when the oldest remaining message was stored).
    """
    lengths = files.groupBy("store").agg(F.max("size").alias("fileSize"))
    groups = offsets.groupBy("topic").agg(F.countDistinct("group").alias("groups"))
    read = offsets.groupBy("store", "topic", "queueId").agg(
        F.min("offset").alias("read"), F.countDistinct("group").alias("readers")
    )
    # A group without progress in a queue has read nothing of it.
    behind = F.col("readers").isNull() | (F.col("readers") < F.col("groups")) | (F.col("queueOffset") >= F.col("read"))
    unread = F.col("groups").isNotNull() & behind
    by_file = (
        records.join(F.broadcast(lengths), "store")
        .join(F.broadcast(read), ["store", "topic", "queueId"], "left")
        .join(F.broadcast(groups), "topic", "left")
        .withColumn("begin", F.col("physicalOffset") - F.col("physicalOffset") % F.col("fileSize"))
        .groupBy("store", "begin", "fileSize")
        .agg(
            F.count("*").alias("messages"),
            F.count(F.when(unread, 1)).alias("unread"),
            F.min("storeTimestamp").alias("first"),
            F.max("storeTimestamp").alias("last"),
        )
    )
    of_store = Window.partitionBy("store")
    by_hours = by_file.select(  # a window and no join with sums, which would read the log twice
        "*",
        F.max("last").over(of_store).alias("now"),
        F.max("begin").over(of_store).alias("written"),
        F.explode(F.array(*(F.lit(float(hour)) for hour in hours))).alias("hours"),
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


# ---- transactions without an end, messages with a delay


def pending_transactions(halves: DataFrame, ops: DataFrame, offsets: DataFrame) -> DataFrame:
    """Return half messages that were neither committed nor rolled back.

    ``halves`` are messages of the half topic with store, queueOffset, physicalOffset, properties, uniqueKey,
    bornTimestamp, storeTimestamp; ``ops`` messages of the op topic with store, queueOffset, tags and body (the queue
    offsets of ended halves); ``offsets`` as in `librmq.spark.stores`; halves before the progress of the check ended.
    Columns: store, group, topic, uniqueKey, queueOffset, physicalOffset, checks, born, stored.
    """

    def from_progress(messages: DataFrame, topic: str) -> DataFrame:
        checked = offsets.where((F.col("group") == CHECK_GROUP) & (F.col("topic") == topic))
        done = checked.where("queueId = 0").select("store", F.col("offset").alias("done"))
        return messages.join(F.broadcast(done), "store", "left").where(
            F.col("queueOffset") >= F.coalesce(F.col("done"), F.lit(0))
        )

    ended_ops = from_progress(ops, SystemTopic.OP).where(
        F.col("tags") == "d"
    )  # the body of an op message can be anything
    numbers = F.explode(F.split(F.col("body").cast("string"), HALF_SEPARATOR))  # 5.x writes several: 3,4,7,
    ended = ended_ops.select("store", numbers.alias("number")).select(
        "store", _whole_number(F.col("number")).alias("half")
    )
    left = from_progress(halves, SystemTopic.HALF)
    left = left.join(ended, (left["store"] == ended["store"]) & (left["queueOffset"] == ended["half"]), "left_anti")
    value_of = F.col("properties").getItem
    return left.select(
        "store",
        value_of("PGROUP").alias("group"),
        value_of("REAL_TOPIC").alias("topic"),
        "uniqueKey",
        "queueOffset",
        "physicalOffset",
        F.coalesce(_whole_number(value_of("TRANSACTION_CHECK_TIMES")).try_cast("int"), F.lit(0)).alias("checks"),
        F.col("bornTimestamp").alias("born"),
        F.col("storeTimestamp").alias("stored"),
    )


def pending_delays(
    entries: DataFrame, messages: DataFrame, offsets: DataFrame, levels: DelayLevels = DEFAULT_LEVELS
) -> DataFrame:
    """Return undelivered messages of delay levels.

    ``entries`` belong to the schedule topic in the view ``queues`` (their tags code is when they are due);
    ``messages`` the same topic's with store, queueId, queueOffset, properties, uniqueKey, storeTimestamp; ``offsets``
    as in `librmq.spark.stores`; ``levels`` the broker's, which are asked where a store has extension files. Columns:
    store, kind ("delay"), level, topic, uniqueKey, queueOffset, physicalOffset, due.
    """
    where = ["store", "queueId"]
    done = offsets.where((F.col("group") == DELAY_GROUP) & (F.col("topic") == SystemTopic.SCHEDULE)).select(
        *where, F.col("offset").alias("done")
    )
    left = entries.join(F.broadcast(done), where, "left").where(
        F.col("queueOffset") >= F.coalesce(F.col("done"), F.lit(0))
    )
    delay = F.coalesce(F.get(F.array(*map(F.lit, levels.delays_ms)), F.col("queueId")), F.lit(1000))
    # A value in the range of hashes is no time; a lower one leads to an extension unit, which is not read here.
    is_time = F.col("tagsCode") > (1 << 31) - 1
    due = F.when(is_time, F.col("tagsCode")).otherwise(F.unix_millis("storeTimestamp") + delay)
    waiting = left.drop("topic").join(messages.drop("topic", "physicalOffset"), [*where, "queueOffset"])
    return _waiting(waiting, "delay", F.col("queueId") + 1, due)


def pending_timers(units: DataFrame, messages: DataFrame, progress: DataFrame) -> DataFrame:
    """Return undelivered timed messages of 5.x, in the wheel or on their way into it.

    ``units`` and ``progress`` belong to the timer, as in `librmq.spark.stores`; ``messages`` the timer topic's with
    store, queueOffset, physicalOffset, storeTimestamp, properties, uniqueKey. What a deletion in the same slot names is
    left out, and so is what POP notes. Columns: as `pending_delays`, with kind "timer" and no level; ``due`` as
    `own_time_ms` computes it.
    """
    value_of = F.col("properties").getItem
    messages = messages.where(~F.coalesce(value_of("REAL_TOPIC").startswith(TopicPrefix.REVIVE), F.lit(False)))
    timers = units.join(messages, ["store", "physicalOffset"])
    rolled, deletes = F.col("magic").bitwiseAND(TimerLog.ROLL) != 0, F.col("magic").bitwiseAND(TimerLog.DELETE) != 0
    timers = timers.withColumn(
        "end", F.when(value_of(PropertyName.TIMER_DELETES_EARLIER).isNotNull(), F.col("physicalOffset"))
    )
    deleted = timers.where(deletes & ~rolled).select(
        "store", "slot", "end", value_of(PropertyName.TIMER_DELETE_KEY).alias("deleted")
    )
    name = F.concat(F.coalesce(value_of("REAL_TOPIC"), F.lit("")), F.lit("+"), F.col("uniqueKey"))  # as `delete_key`
    in_slots = timers.where(~deletes)
    same = [F.col(f"unit.{column}") == F.col(f"gone.{column}") for column in ("store", "slot")]
    same += [F.col("gone.end").isNull() | (F.col("unit.physicalOffset") < F.col("gone.end"))]
    for key in (name, F.col("uniqueKey")):  # brokers before 5.3.2 and from 5.4 on write no topic
        in_slots = in_slots.withColumn("name", F.when(~rolled, key)).alias("unit")
        named = [*same, F.col("unit.name") == F.col("gone.deleted")]
        in_slots = in_slots.join(deleted.alias("gone"), named, "left_anti")
    on_the_way = messages.join(F.broadcast(progress), "store").where(
        (F.col("queueOffset") >= F.col("done")) & value_of(PropertyName.TIMER_DELETE_KEY).isNull()
    )
    columns = "store", "properties", "uniqueKey", "queueOffset", "physicalOffset", "storeTimestamp"
    waiting = in_slots.select(*columns).unionByName(on_the_way.select(*columns))
    stored_ms = F.unix_millis("storeTimestamp")
    out_ms = F.coalesce(_whole_number(value_of(PropertyName.TIMER_OUT_MS)), F.lit(0))
    own_ms = F.coalesce(
        stored_ms + 1000 * _whole_number(value_of(PropertyName.TIMER_DELAY_SEC)),
        stored_ms + _whole_number(value_of(PropertyName.TIMER_DELAY_MS)),
        _whole_number(value_of(PropertyName.TIMER_DELIVER_MS)),
        stored_ms,
    )
    due_ms = F.when(value_of(PropertyName.TIMER_ROLL_TIMES).isNotNull(), out_ms + PRECISION_MS).otherwise(
        F.greatest(out_ms, own_ms)
    )
    return _waiting(waiting, "timer", F.lit(None).cast("int"), due_ms)


def _waiting(messages: DataFrame, kind: str, level: Column, due_ms: Column) -> DataFrame:
    bounded = F.least(F.greatest(due_ms, F.lit(-LAST_MS)), F.lit(LAST_MS))
    return messages.select(
        "store",
        F.lit(kind).alias("kind"),
        level.alias("level"),
        F.col("properties").getItem("REAL_TOPIC").alias("topic"),
        "uniqueKey",
        "queueOffset",
        "physicalOffset",
        F.timestamp_millis(bounded).alias("due"),
    )


def _whole_number(text: Column) -> Column:
    """Parse a number like Java, null for any other text."""
    return F.when(text.rlike(r"\A[+-]?[0-9]+\z"), text.try_cast("bigint"))


# ---- dead letters

_OWN = ("KEYS", "TAGS", "UNIQ_KEY")


def dead_letters(messages: DataFrame) -> DataFrame:
    """Return dead letters by group, topic and cause, those too that were sent again, which ``librmq groups`` counts.

    ``messages`` has store, topic, storeTimestamp, properties, reconsumeTimes. The cause is that of
    `librmq.diagnosis.dead_letter_causes`: the exception that a consumer of librmq recorded, with ``#`` for numbers, or
    ``never retried`` (given up at the first failure, by a listener or because the group retries nothing), ``retries
    used up``, or ``ordered, retries used up`` (given up by an orderly consumer). Columns: store, group, topic, cause,
    messages, first and last (when they were stored), mostTimes (reconsume times).
    """
    recorded = F.regexp_replace(_property(PropertyName.DEAD_LETTER_CAUSE), VARIABLE_PARTS, "#")
    count = F.col("properties").getItem(PropertyName.RECONSUME_TIME)
    cause = (
        F.when(recorded.isNotNull(), recorded)
        .when(F.when(count.rlike(r"\A[+-]?[0-9]+\z"), count.try_cast("int")).isNotNull(), CountedCause.IN_ORDER)
        .when(F.col("reconsumeTimes") <= 1, CountedCause.AT_ONCE)
        .otherwise(CountedCause.USED_UP)
    )
    dead = messages.where(F.col("topic").startswith(TopicPrefix.DEAD_LETTER))
    return (
        dead.select(
            "store", _group().alias("group"), _first_topic().alias("topic"), cause.alias("cause"), "storeTimestamp",
            "reconsumeTimes",
        )
        .groupBy("store", "group", "topic", "cause")
        .agg(
            F.count("*").alias("messages"),
            F.min("storeTimestamp").alias("first"),
            F.max("storeTimestamp").alias("last"),
            F.max("reconsumeTimes").alias("mostTimes"),
        )
    )  # fmt: skip


def replayable(messages: DataFrame) -> DataFrame:
    """Return dead letters, those too that were sent again, for their own topics, without properties of the broker.

    ``messages`` has topic, body, properties. Body, keys, tag, unique id and the sender's properties are kept, so a
    consumer with a guard recognises duplicates. The result has ``topic, body, properties``.
    """
    properties = F.map_filter(
        "properties", lambda name, _: ~name.isin(sorted(RESERVED_PROPERTIES - set(_OWN) | _ADDED))
    )
    dead = messages.where(F.col("topic").startswith(TopicPrefix.DEAD_LETTER))
    return dead.select(_first_topic().alias("topic"), "body", properties.alias("properties"))


_ADDED = OF_A_LETTER | {"TRAN_PREPARED_QUEUE_OFFSET", "TRANSACTION_CHECK_TIMES"}


def _group() -> Column:
    return F.substring(F.col("topic"), len(TopicPrefix.DEAD_LETTER) + 1, 1 << 20)


def _first_topic() -> Column:
    origin = F.coalesce(_property(PropertyName.RETRY_TOPIC), _property(PropertyName.DLQ_ORIGIN_TOPIC), F.col("topic"))
    # The prefix of a message that a client of 5.x received again.
    prefix = F.concat(F.lit(TopicPrefix.RETRY), _group(), F.lit("_"))
    return F.when(F.startswith(origin, prefix), F.substr(origin, F.length(prefix) + 1)).otherwise(origin)


def _property(name: str) -> Column:
    """Return a property; null if it is absent or empty."""
    return F.nullif(F.col("properties").getItem(name), F.lit(""))
