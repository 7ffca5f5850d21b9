"""Dead letters: count them by group, topic and cause, and send them again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - the usual name

from librmq.diagnosis.deadletters import AT_ONCE, IN_ORDER, OF_A_LETTER, ORIGIN_TOPIC, USED_UP, VARIABLE_PARTS
from librmq.message.record import (
    PROPERTY_DEAD_LETTER_CAUSE,
    PROPERTY_RECONSUME_TIME,
    PROPERTY_RETRY_TOPIC,
    RESERVED_PROPERTIES,
)
from librmq.message.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

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
