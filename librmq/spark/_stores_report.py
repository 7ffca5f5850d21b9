"""A report by Spark, for stores that are too large for one machine: the same rows and the same page.

One task for each store finds what `librmq.diagnosis.report` finds without reading every message; the sums over all
messages are DataFrames. Repeated keys are looked for over all stores.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F  # noqa: N812 - the usual name

from librmq.columns.options import Mode
from librmq.diagnosis import Report
from librmq.diagnosis.report_rows import (
    ATTEMPTS,
    DELAY_BOUNDS_MS,
    MOST_OF_A_TOPIC,
    FilterMatch,
    FrequentKey,
    RepeatedKeys,
    ReportScope,
    StoreReport,
    TimeAxis,
    TopicTraffic,
    frequent_keys,
)
from librmq.diagnosis.reports import WINDOW_S, joined, short_names, summary_of
from librmq.message.topics import SYSTEM_TOPICS, TopicPrefix
from librmq.spark import stores
from librmq.spark.pipelines import PIPELINES, duplicates, run, skew
from librmq.spark.stores import Settings, first_sends, source_options

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_COLUMNS: Final = (
    "store string, topic string, queueId int, queueOffset bigint, physicalOffset bigint, storeTimestamp timestamp, "
    "bornTimestamp timestamp, keys string, uniqueKey string, size int, reconsumeTimes int"
)


def overview(
    spark: SparkSession,
    paths: stores.Paths,
    *,
    title: str | None = None,
    window_s: float = WINDOW_S,
    only: Settings | None = None,
) -> Report:
    """Return the report about all stores in ``paths``; see `librmq.diagnosis.report` for the settings.

    Unreadable records are left out and listed as damage.
    """
    scope = ReportScope.from_settings(dict(only or {}))
    folders = stores.paths_of(paths)
    names = short_names(folders)
    parts = _parts(spark, names, scope)
    damaged = any(part.damage or part.error for part in parts.values())
    mode: Mode = "DROPMALFORMED" if damaged else "FAILFAST"
    messages = stores.messages(spark, folders, _COLUMNS, mode=mode, **source_options(dict(only or {}))).cache()
    try:
        sums = _Sums(messages, window_s, scope)
    finally:
        messages.unpersist()
    filters = _filters(spark, names, dict(only or {}), "skip" if damaged else "fail")
    filled = [replace(sums.fill(parts[folder], folder), filters=tuple(filters.get(folder, ()))) for folder in folders]
    return joined(filled, sums.axis, scope, title=title, window_s=window_s)


# ------------------------------------------------------------------------------------------------- a task for a store


def _parts(spark: SparkSession, names: dict[str, str], scope: ReportScope) -> dict[str, StoreReport]:
    """Return the part of each store that needs no pass over its messages, found in a task for each."""
    rows = spark.createDataFrame(list(names.items()), "store string, name string")

    def survey(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for row in (row for batch in batches for row in batch.to_pylist()):
            text = json.dumps(summary_of(row["store"], row["name"], scope).to_document())
            yield pa.RecordBatch.from_pydict({"store": [row["store"]], "report": [text]})

    reports = rows.repartition(len(names), "store").mapInArrow(survey, "store string, report string").collect()
    return {row["store"]: StoreReport.from_document(json.loads(row["report"])) for row in reports}


class _Sums:
    """The sums over the messages of all stores that `librmq.diagnosis.report` makes of one."""

    def __init__(self, messages: DataFrame, window_s: float, scope: ReportScope) -> None:
        stored, born = F.unix_millis("storeTimestamp"), F.unix_millis("bornTimestamp")
        by_topic = messages.groupBy("store", "topic").agg(
            F.count("*"), F.sum("size"), F.min(stored), F.max(stored), F.max(stored - born)
        )
        self._scope = scope
        self._totals = by_topic.collect()
        self.axis = None
        if self._totals:
            self.axis = TimeAxis.between(min(row[4] for row in self._totals), max(row[5] for row in self._totals))
            interval = F.floor((stored - F.lit(self.axis.begin_ms)) / F.lit(self.axis.interval_ms)).cast("int")
            self._stored = _counts(messages, interval)
        else:
            self._stored = {}
        self._queues = _counts(messages, F.col("queueId"))
        delay = stored - born
        at = sum((F.when(delay >= bound, 1).otherwise(0) for bound in DELAY_BOUNDS_MS), F.lit(0))
        self._delays = _counts(messages, at)
        attempt = F.greatest(F.least("reconsumeTimes", F.lit(ATTEMPTS)), F.lit(1))
        self._attempts = _counts(messages.where(F.col("topic").startswith(TopicPrefix.RETRY)), attempt)
        produced = _messages_of_producers(messages)
        self._keys = skew(produced, "key", MOST_OF_A_TOPIC + 1).where("messages > 1").collect()
        self._repeated = (
            duplicates(produced, window_s)
            .groupBy("store", "topic")
            .agg(F.count("*"), F.count(F.when(F.col("resend"), 1)), F.countDistinct("key"), F.min("secondsAfter"))
            .collect()
        )

    def fill(self, part: StoreReport, folder: str) -> StoreReport:
        """Return the report about a store with its sums."""
        totals = [row[1:] for row in self._totals if row[0] == folder]
        return replace(
            part,
            traffic=tuple(self._topic(folder, *row) for row in sorted(totals, key=lambda row: (-row[1], row[0]))),
            keys=frequent_keys(
                FrequentKey(row["topic"], row["key"], row["messages"], row["share"], sampled=False)
                for row in self._keys
                if row["store"] == folder
            ),
            repeated=tuple(
                RepeatedKeys(topic, count, resent, keyed, max(0.0, after), sampled=False)
                for store, topic, count, resent, keyed, after in sorted(self._repeated)
                if store == folder
            ),
        )

    def _topic(self, store: str, topic: str, *totals: int) -> TopicTraffic:
        assert self.axis is not None
        name = store, topic
        return TopicTraffic.of(
            topic,
            self._scope,
            totals,
            self._queues[name],
            _list(self._stored[name], self.axis.intervals),
            _list(self._delays[name], len(DELAY_BOUNDS_MS) + 1),
            _list(self._attempts.get(name, {}), ATTEMPTS, 1),
        )


def _counts(messages: DataFrame, column: Any) -> dict[tuple[str, str], dict[int, int]]:
    """Return the number of messages by store and topic, and by another value."""
    counts: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    for store, topic, value, count in messages.groupBy("store", "topic", column.alias("value")).count().collect():
        counts[store, topic][value] = count
    return counts


def _list(counts: dict[int, int], length: int, first: int = 0) -> tuple[int, ...]:
    return tuple(counts.get(first + at, 0) for at in range(length))


def _messages_of_producers(messages: DataFrame) -> DataFrame:
    topic = F.col("topic")
    return first_sends(messages).where(~topic.isin(*sorted(SYSTEM_TOPICS)) & ~topic.startswith(TopicPrefix.SYSTEM))


def _filters(spark: SparkSession, names: dict[str, str], only: Settings, damaged: str) -> dict[str, list[FilterMatch]]:
    setting_names = PIPELINES["filters"].settings
    settings = {name: value for name, value in {**only, "damaged": damaged}.items() if name in setting_names}
    matches: dict[str, list[FilterMatch]] = defaultdict(list)
    for row in run(spark, "filters", list(names), settings).collect():
        matches[row["store"]].append(
            FilterMatch(
                row["group"], row["topic"], row["expression"], row["messages"], row["matched"],
                row["bytes"], row["matchedBytes"],
            )
        )  # fmt: skip
    return matches
