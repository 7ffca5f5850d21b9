"""A report by Spark, for stores that are too large for one machine: the same values and the same page.

One task for each store finds what `librmq.diagnosis.report` finds without reading every message; the sums over all
messages are DataFrames. Repeated keys are looked for over all stores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F  # noqa: N812 - the usual name

from librmq.columns.options import Mode
from librmq.diagnosis import Report, StoreView, Thresholds
from librmq.diagnosis.survey.message_sums import MOST_OF_A_TOPIC, ReportScope, TimeAxis, most_frequent
from librmq.diagnosis.survey.model import (
    ATTEMPTS,
    DELAY_BOUNDS_MS,
    ROW_NAMES,
    BornToStored,
    FilterMatch,
    FrequentKey,
    RepeatedKeys,
    ReportPart,
    RetriedMessages,
    StoredTopic,
    StoreSummary,
)
from librmq.diagnosis.survey.report import WINDOW_S, broken_store, join_parts, short_names, survey_findings
from librmq.errors import CorruptionError
from librmq.message.topics import SYSTEM_TOPICS, TopicPrefix, is_user_topic
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
    damaged = any(part.damage or part.summary.error for part in parts.values())
    mode: Mode = "DROPMALFORMED" if damaged else "FAILFAST"
    messages = stores.messages(spark, folders, _COLUMNS, mode=mode, **source_options(dict(only or {}))).cache()
    try:
        sums = _Sums(messages, window_s, scope)
        axis = sums.axis
        sums_by_folder = {folder: sums.part_of(folder, names[folder]) for folder in folders}
    finally:
        messages.unpersist()
    filters = _filters(spark, names, dict(only or {}), "skip" if damaged else "fail")
    joined = [_joined(parts[folder], sums_by_folder[folder], filters.get(folder, ())) for folder in folders]
    return join_parts(joined, axis, scope, title=title, window_s=window_s)


def _joined(part: ReportPart, sums: ReportPart, filters: Sequence[FilterMatch]) -> ReportPart:
    summary = part.summary._replace(
        records=sums.summary.records, bytes=sums.summary.bytes, first_ms=sums.summary.first_ms,
        last_ms=sums.summary.last_ms,
    )  # fmt: skip
    return replace(
        part, summary=summary, topics=sums.topics, delays=sums.delays, retries=sums.retries, keys=sums.keys,
        repeated=sums.repeated, filters=tuple(filters),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- a task for a store


def _parts(spark: SparkSession, names: dict[str, str], scope: ReportScope) -> dict[str, ReportPart]:
    """Return the part of each store that needs no pass over its messages, found in a task for each."""
    rows = spark.createDataFrame(list(names.items()), "store string, name string")

    def survey(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for row in (row for batch in batches for row in batch.to_pylist()):
            text = _survey(row["store"], row["name"], scope)
            yield pa.RecordBatch.from_pydict({"store": [row["store"]], "report": [text]})

    reports = rows.repartition(len(names), "store").mapInArrow(survey, "store string, report string").collect()
    return {row["store"]: _part(Report.from_json(row["report"])) for row in reports}


def _survey(path: str, name: str, scope: ReportScope) -> str:
    try:
        with StoreView.open(path) as view:
            part = survey_findings(view, name, scope, limits=Thresholds(), check=True)
    except CorruptionError as error:
        part = broken_store(path, name, error)
    return join_parts([part], None, scope, title=None, window_s=WINDOW_S).to_json()


def _part(report: Report) -> ReportPart:
    return ReportPart(summary=report.stores[0], **{name: getattr(report, name) for name in ROW_NAMES})


# -------------------------------------------------------------------------------------------------------------- sums


@dataclass(frozen=True)
class _Total:
    messages: int
    bytes: int
    first_ms: int
    last_ms: int
    longest_ms: int


class _Sums:
    """Sums over the messages of all stores, as `librmq.diagnosis.survey.message_sums` makes them of one."""

    def __init__(self, messages: DataFrame, window_s: float, scope: ReportScope) -> None:
        stored, born = F.unix_millis("storeTimestamp"), F.unix_millis("bornTimestamp")
        by_topic = messages.groupBy("store", "topic").agg(
            F.count("*"), F.sum("size"), F.min(stored), F.max(stored), F.max(stored - born)
        )
        self._scope = scope
        self._totals: dict[str, dict[str, _Total]] = defaultdict(dict)
        for store, topic, *values in by_topic.collect():
            self._totals[store][topic] = _Total(*values)
        every = [total for topics in self._totals.values() for total in topics.values()]
        self.axis = None
        if every:
            self.axis = TimeAxis.between(min(total.first_ms for total in every), max(total.last_ms for total in every))
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

    def part_of(self, store: str, name: str) -> ReportPart:
        totals = self._totals.get(store, {})
        largest = sorted(totals.items(), key=lambda item: (-item[1].messages, item[0]))
        topics = tuple(self._topic(store, name, topic, total) for topic, total in largest)
        summary = StoreSummary(
            store=name, path=store, owner=None, now_ms=None, is_sound=None, error=None,
            records=sum(topic.messages for topic in topics),
            bytes=sum(topic.bytes for topic in topics),
            first_ms=min((topic.first_ms for topic in topics), default=None),
            last_ms=max((topic.last_ms for topic in topics), default=None),
        )  # fmt: skip
        keys = {(row["topic"], row["key"]): row for row in self._keys if row["store"] == store}
        listed = most_frequent((row["messages"], *key) for key, row in keys.items())
        return ReportPart(
            summary=summary,
            topics=topics,
            delays=tuple(
                BornToStored(name, topic, _list(self._delays[store, topic], len(DELAY_BOUNDS_MS) + 1), total.longest_ms)
                for topic, total in largest
                if is_user_topic(topic)
            ),
            retries=tuple(
                RetriedMessages(name, group, _list(self._attempts[store, topic], ATTEMPTS, 1))
                for topic in sorted(totals)
                if topic.startswith(TopicPrefix.RETRY)
                and self._scope.has_group(group := topic.removeprefix(TopicPrefix.RETRY))
            ),
            keys=tuple(
                FrequentKey(name, topic, key, count, keys[topic, key]["share"], False, cut)
                for count, topic, key, cut in listed
            ),
            repeated=tuple(
                RepeatedKeys(name, topic, count, resent, keyed, max(0.0, after), False)
                for folder, topic, count, resent, keyed, after in sorted(self._repeated)
                if folder == store
            ),
        )

    def _topic(self, store: str, name: str, topic: str, total: _Total) -> StoredTopic:
        assert self.axis is not None
        ids, counts = zip(*sorted(self._queues[store, topic].items()), strict=True)
        stored = _list(self._stored[store, topic], self.axis.intervals)
        return StoredTopic(name, topic, total.messages, total.bytes, total.first_ms, total.last_ms, stored, ids, counts)


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
                names[row["store"]], row["group"], row["topic"], row["expression"], row["messages"], row["matched"],
                row["bytes"], row["matchedBytes"],
            )
        )  # fmt: skip
    return matches
