"""Undelivered messages: transactions without an end, messages with a delay, and dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - the usual name

from librmq.columns.decode import LAST_MS
from librmq.diagnosis.deadletters import AT_ONCE, IN_ORDER, OF_A_LETTER, ORIGIN_TOPIC, USED_UP, VARIABLE_PARTS
from librmq.message.delay_levels import DEFAULT_LEVELS, SCHEDULE_TOPIC, DelayLevels
from librmq.message.record import (
    PROPERTY_DEAD_LETTER_CAUSE,
    PROPERTY_RECONSUME_TIME,
    PROPERTY_RETRY_TOPIC,
    RESERVED_PROPERTIES,
)
from librmq.message.topics import DEAD_LETTER_PREFIX, HALF_TOPIC, OP_TOPIC, RETRY_PREFIX
from librmq.scheduling.half_messages import CHECK_GROUP
from librmq.scheduling.timer_config import DELAY_MS, DELAY_SEC, DELETE_KEY, DELIVER_MS, OUT_MS, ROLL_TIMES
from librmq.scheduling.waiting import PRECISION_MS
from librmq.spark.stores import DELAY_GROUP
from librmq.store.format.timerfiles import DELETE, ROLL

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def pending_transactions(halves: DataFrame, ops: DataFrame, offsets: DataFrame) -> DataFrame:
    """Return half messages that were neither committed nor rolled back.

    ``halves`` are messages of the half topic with store, queueOffset, physicalOffset, properties, uniqueKey,
    bornTimestamp, storeTimestamp; ``ops`` messages of the op topic with store, queueOffset, tags and body (the queue
    offset of the half that was ended); ``offsets`` as in `librmq.spark.stores`; halves before the broker's own progress
    have ended. Columns: store, group, topic, uniqueKey, queueOffset, physicalOffset, checks, born, stored.
    """

    def from_progress(messages: DataFrame, topic: str) -> DataFrame:
        checked = offsets.where((F.col("group") == CHECK_GROUP) & (F.col("topic") == topic))
        done = checked.where("queueId = 0").select("store", F.col("offset").alias("done"))
        return messages.join(F.broadcast(done), "store", "left").where(
            F.col("queueOffset") >= F.coalesce(F.col("done"), F.lit(0))
        )

    ended_ops = from_progress(ops, OP_TOPIC).where(F.col("tags") == "d")  # the body of an op message can be anything
    ended = ended_ops.select("store", _whole_number(F.col("body").cast("string")).alias("half"))
    left = from_progress(halves, HALF_TOPIC)
    left = left.join(ended, (left["store"] == ended["store"]) & (left["queueOffset"] == ended["half"]), "left_anti")
    value_of = _properties("properties")
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
    done = offsets.where((F.col("group") == DELAY_GROUP) & (F.col("topic") == SCHEDULE_TOPIC)).select(
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
    left out. Columns: as `pending_delays`, with kind "timer" and no level; ``due`` as `own_time_ms` computes it.
    """
    value_of = _properties("properties")
    timers = units.join(messages, ["store", "physicalOffset"])
    rolled, deletes = F.col("magic").bitwiseAND(ROLL) != 0, F.col("magic").bitwiseAND(DELETE) != 0
    deleted = timers.where(deletes & ~rolled).select("store", "slot", value_of(DELETE_KEY).alias("deleted"))
    name = F.concat(F.coalesce(value_of("REAL_TOPIC"), F.lit("")), F.lit("+"), F.col("uniqueKey"))  # as `delete_key`
    in_slots = timers.where(~deletes).withColumn("name", F.when(~rolled, name)).alias("unit")
    same = [F.col(f"unit.{column}") == F.col(f"gone.{column}") for column in ("store", "slot")]
    in_slots = in_slots.join(deleted.alias("gone"), [*same, F.col("unit.name") == F.col("gone.deleted")], "left_anti")
    on_the_way = messages.join(F.broadcast(progress), "store").where(
        (F.col("queueOffset") >= F.col("done")) & value_of(DELETE_KEY).isNull()
    )
    columns = "store", "properties", "uniqueKey", "queueOffset", "physicalOffset", "storeTimestamp"
    waiting = in_slots.select(*columns).unionByName(on_the_way.select(*columns))
    stored_ms = F.unix_millis("storeTimestamp")
    out_ms = F.coalesce(_whole_number(value_of(OUT_MS)), F.lit(0))
    own_ms = F.coalesce(
        stored_ms + 1000 * _whole_number(value_of(DELAY_SEC)),
        stored_ms + _whole_number(value_of(DELAY_MS)),
        _whole_number(value_of(DELIVER_MS)),
        stored_ms,
    )
    due_ms = F.when(value_of(ROLL_TIMES).isNotNull(), out_ms + PRECISION_MS).otherwise(F.greatest(out_ms, own_ms))
    return _waiting(waiting, "timer", F.lit(None).cast("int"), due_ms)


def _waiting(messages: DataFrame, kind: str, level: Column, due_ms: Column) -> DataFrame:
    bounded = F.least(F.greatest(due_ms, F.lit(-LAST_MS)), F.lit(LAST_MS))
    return messages.select(
        "store",
        F.lit(kind).alias("kind"),
        level.alias("level"),
        _properties("properties")("REAL_TOPIC").alias("topic"),
        "uniqueKey",
        "queueOffset",
        "physicalOffset",
        F.timestamp_millis(bounded).alias("due"),
    )


def _whole_number(text: Column) -> Column:
    """Parse a number like Java, null for any other text."""
    return F.when(text.rlike(r"\A[+-]?[0-9]+\z"), text.try_cast("bigint"))


def _properties(column: str):  # type: ignore[no-untyped-def]
    def of(name: str) -> Column:
        return F.col(column).getItem(name)

    return of


# ---- dead letters

_OWN = ("KEYS", "TAGS", "UNIQ_KEY")


def dead_letters(messages: DataFrame) -> DataFrame:
    """Return dead letters by group, topic and cause.

    ``messages`` has store, topic, storeTimestamp, properties, reconsumeTimes. The cause is that of
    `librmq.diagnosis.dead_letter_causes`: the exception that a consumer of librmq recorded, with ``#`` for numbers, or
    ``never retried`` (given up at the first failure, by a listener or because the group retries nothing), ``retries
    used up``, or ``ordered, retries used up`` (given up by an orderly consumer). Columns: store, group, topic, cause,
    messages, first and last (when they were stored), mostTimes (reconsume times).
    """
    recorded = F.regexp_replace(_property(PROPERTY_DEAD_LETTER_CAUSE), VARIABLE_PARTS, "#")
    count = F.col("properties").getItem(PROPERTY_RECONSUME_TIME)
    cause = (
        F.when(recorded.isNotNull(), recorded)
        .when(F.when(count.rlike(r"\A[+-]?[0-9]+\z"), count.try_cast("int")).isNotNull(), IN_ORDER)
        .when(F.col("reconsumeTimes") <= 1, AT_ONCE)
        .otherwise(USED_UP)
    )
    dead = messages.where(F.col("topic").startswith(DEAD_LETTER_PREFIX))
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
    """Return dead letters for their own topics, without properties that the broker added.

    ``messages`` has topic, body, properties. Body, keys, tag, unique id and the sender's properties are kept, so a
    consumer with a guard recognises duplicates. The result has ``topic, body, properties``.
    """
    properties = F.map_filter(
        "properties", lambda name, _: ~name.isin(sorted(RESERVED_PROPERTIES - set(_OWN) | _ADDED))
    )
    dead = messages.where(F.col("topic").startswith(DEAD_LETTER_PREFIX))
    return dead.select(_first_topic().alias("topic"), "body", properties.alias("properties"))


_ADDED = OF_A_LETTER | {"TRAN_PREPARED_QUEUE_OFFSET", "TRANSACTION_CHECK_TIMES"}


def _group() -> Column:
    return F.substring(F.col("topic"), len(DEAD_LETTER_PREFIX) + 1, 1 << 20)


def _first_topic() -> Column:
    origin = F.coalesce(_property(PROPERTY_RETRY_TOPIC), _property(ORIGIN_TOPIC), F.col("topic"))
    prefix = F.concat(F.lit(RETRY_PREFIX), _group(), F.lit("_"))  # of a message that a client of 5.x received again
    return F.when(F.startswith(origin, prefix), F.substr(origin, F.length(prefix) + 1)).otherwise(origin)


def _property(name: str) -> Column:
    """Return a property; null if it is absent or empty."""
    return F.nullif(F.col("properties").getItem(name), F.lit(""))
