"""Dead letters: count them by group, topic and cause, and send them again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - the usual name

from librmq.message.record import RESERVED_PROPERTIES
from librmq.message.topics import DEAD_LETTER_PREFIX

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_OWN = ("KEYS", "TAGS", "UNIQ_KEY")


def dead_letters(messages: DataFrame) -> DataFrame:
    """Return dead letters by group, topic and cause.

    ``messages`` has store, topic, storeTimestamp, properties, reconsumeTimes. The record shows the cause: ``never
    retried`` (given up at the first failure, by a listener or because the group retries nothing), ``retries used up``,
    or ``ordered, retries used up`` (given up by an orderly consumer). Columns: store, group, topic, cause, messages,
    first and last (when they were stored), mostTimes (reconsume times).
    """
    properties = F.col("properties")
    # A consumer in order sends the message itself, with its count as a property.
    in_order = properties.getItem("RECONSUME_TIME").isNotNull()
    cause = (
        F.when(in_order, "ordered, retries used up")
        .when(F.col("reconsumeTimes") <= 1, "never retried")
        .otherwise("retries used up")
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


_ADDED = {"DLQ_ORIGIN_TOPIC", "DLQ_ORIGIN_MESSAGE_ID", "TRAN_PREPARED_QUEUE_OFFSET", "TRANSACTION_CHECK_TIMES"}


def _group() -> Column:
    return F.substring(F.col("topic"), len(DEAD_LETTER_PREFIX) + 1, 1 << 20)


def _first_topic() -> Column:
    properties = F.col("properties")
    return F.coalesce(properties.getItem("RETRY_TOPIC"), properties.getItem("DLQ_ORIGIN_TOPIC"), F.col("topic"))
