"""Messages with the same business key: exactly, or for many keys with a known error rate."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from librmq.errors import MissingExtraError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MESSAGE_COLUMNS = (
    "store string, topic string, queueId int, queueOffset bigint, physicalOffset bigint, storeTimestamp timestamp, "
    "keys string, uniqueKey string"
)


def keyed(messages: DataFrame, key: Column | str | None = None) -> DataFrame:
    """Return ``messages`` with a column ``key``: a row for each different key in ``keys``, or ``key`` as it is."""
    if key is None:
        return messages.withColumn("key", F.explode(F.array_distinct(F.split("keys", " ")))).where("key != ''")
    column = F.col(key) if isinstance(key, str) else key
    return messages.withColumn("key", column).where(F.col("key").isNotNull())


def duplicates(messages: DataFrame, window_seconds: float, key: Column | str | None = None) -> DataFrame:
    """Return messages that repeat the key of one at most ``window_seconds`` earlier, in the topic on any broker.

    Columns: those of ``messages``, key, before (when the earlier one was stored), secondsAfter, resend (true if both
        have the same unique id, so that a client or a broker, not the application, sent it again).
    """
    order = Window.partitionBy("topic", "key").orderBy("storeTimestamp", "store", "physicalOffset")
    keyed_messages = keyed(messages, key).withColumns(
        {
            "before": F.lag("storeTimestamp").over(order),
            "resend": F.coalesce(F.lag("uniqueKey").over(order) == F.col("uniqueKey"), F.lit(False)),
        }
    )
    after = F.try_subtract(F.unix_micros("storeTimestamp"), F.unix_micros("before")) / 1_000_000
    return keyed_messages.withColumn("secondsAfter", after).where(F.col("secondsAfter") <= window_seconds)


def duplicates_approximate(
    messages: DataFrame, error_rate: float = 0.001, capacity: int = 1_000_000, key: Column | str | None = None
) -> DataFrame:
    """Return messages whose key any earlier message of the topic had, using a Bloom filter for each task.

    Nothing is sorted and no key is kept: a task takes a share of the keys and needs about 2 bytes for each. No
    duplicate is missed, and about ``error_rate`` of the other messages count as duplicates. ``capacity`` is the initial
    number of keys in a task's filter, which grows. It is not known which of several equal messages is the first. Needs
    the extra ``bloom``. Columns: store, topic, queueId, queueOffset, key.
    """
    try:
        import pybloom_live
    except ImportError:
        raise MissingExtraError("finding duplicates with bloom filters", "bloom") from None
    del pybloom_live
    keyed_messages = keyed(messages, key).select("store", "topic", "queueId", "queueOffset", "key")
    shared = keyed_messages.repartition(F.col("topic"), F.col("key"))
    return shared.mapInArrow(partial(_seen_before, error_rate, capacity), keyed_messages.schema)


def _seen_before(error_rate: float, capacity: int, batches: Iterator[Any]) -> Iterator[Any]:
    import pyarrow as pa
    from pybloom_live import ScalableBloomFilter

    seen = ScalableBloomFilter(capacity, error_rate)
    for batch in batches:
        texts = zip(batch.column("topic").to_pylist(), batch.column("key").to_pylist(), strict=True)
        yield batch.filter(pa.array([seen.add(f"{topic}\0{key}") for topic, key in texts], pa.bool_()))
