"""The report about stores: results of the pipelines in words, plots and tables on one page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F  # noqa: N812 - the usual name

from librmq.columns.options import Mode
from librmq.diagnosis.report import Page, Section, Tile, bars, lines
from librmq.message.topics import is_system_topic
from librmq.spark import stores
from librmq.spark.pipelines import PIPELINES, duplicates, run, skew
from librmq.spark.pipelines.ranges import Settings, source_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["overview"]

MOST: Final = 15
_BUCKETS: Final = 60
_COLUMNS: Final = (
    "store string, topic string, queueId int, queueOffset bigint, physicalOffset bigint, storeTimestamp timestamp, "
    "keys string, uniqueKey string, size int"
)


def overview(
    spark: SparkSession, paths: stores.Paths, *, title: str = "What is in these stores", window_seconds: float = 3600,
    progress: Callable[[str], object] = lambda _: None, only: Settings | None = None,
) -> Page:  # fmt: skip
    """Read all stores in ``paths`` with Spark; ``progress`` gets the name of each step.

    Bodies are read only to check them. Unreadable records are left out and listed as damage. ``only`` has the settings
    of pipelines that choose topics, groups, tags, times and offsets; each part of the page takes those that it has.
    """
    only = dict(only or {})
    folders = stores.paths_of(paths)
    name = _short_names(folders)
    progress("damage")
    damage = _rows(stores.damage(spark, folders).orderBy("store", "file", "offset"))
    mode: Mode = "DROPMALFORMED" if damage else "FAILFAST"
    settings = only | ({"damaged": "skip"} if damage else {})

    def of(name: str) -> DataFrame:
        known = PIPELINES[name].settings
        return run(spark, name, folders, {each: value for each, value in settings.items() if each in known})

    progress("messages")
    messages = stores.messages(spark, folders, _COLUMNS, mode=mode, **source_options(only)).cache()
    try:
        totals = _rows(
            messages.groupBy("store", "topic").agg(
                F.count("*"), F.sum("size"), F.min("storeTimestamp"), F.max("storeTimestamp")
            )
        )
        progress("backlog")
        waiting = _rows(
            of("backlog").where("group not like 'CID\\_RMQ\\_SYS\\_%' and topic not in ('SCHEDULE_TOPIC_XXXX')")
            .groupBy("group", "topic")
            .agg(
                F.sum("lag"), F.max("lag"), F.max("ageSeconds"), F.min("oldest"), F.sum("lost"),
                F.count(F.when(F.col("offset").isNull(), 1)),
            )
            .orderBy(F.desc("sum(lag)"))
        )  # fmt: skip
        progress("skew")
        uneven = _rows(skew(messages).where("ratio >= 1").orderBy(F.desc("ratio"), "topic", "queueId").limit(200))
        hot = _rows(
            skew(_own(messages), "key", 5).where("messages > 1").orderBy(F.desc("messages"), "key", "store").limit(MOST)
        )
        progress("rates")
        rates = _rates(messages, totals)
        progress("duplicates")
        twice = _rows(
            duplicates(_own(messages), window_seconds)
            .groupBy("topic")
            .agg(F.count("*"), F.count(F.when(F.col("resend"), 1)), F.countDistinct("key"), F.min("secondsAfter"))
            .orderBy(F.desc("count(1)"))
        )
    finally:
        messages.unpersist()
    progress("pending")
    open_halves = of("transactions")
    halves = _rows(open_halves.select("group", "topic", "checks", "born", "uniqueKey"))
    waits = of("timers")
    timers = _rows(waits.groupBy("topic").agg(F.count("*"), F.min("due"), F.max("due")))
    progress("dead letters")
    letters = of("dead-letters")
    dead = _rows(letters.select("group", "topic", "cause", "messages", "last", "store"))
    progress("filters")
    matched = of("filters")
    filters = _rows(matched.select("group", "topic", "expression", "messages", "matched", "savedBytes", "store"))
    return Page(
        title,
        f"{len(folders)} store{'s' * (len(folders) != 1)}: {', '.join(name.values())}. All times are UTC; “now” is "
        "when a store’s last message was stored." + _limits(only),
        _tiles(totals, waiting, halves, timers, dead, damage),
        (
            *([_damage(damage, name)] if damage else []),
            _topics(totals),
            _backlog(waiting),
            rates,
            _skew(uneven, name),
            _keys(hot, name),
            _duplicates(twice, window_seconds),
            _pending(halves, timers),
            _dead(dead, name),
            _filters(filters, name),
        ),
    )


def _limits(only: Settings) -> str:
    """Return a sentence that says what the page leaves out."""
    return f" Only {', '.join(f'{name} {value}' for name, value in only.items())}." if only else ""


def _rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    """Return the rows of a small result, times as UTC."""
    return [tuple(_utc(value) for value in row) for row in frame.collect()]


def _utc(value: Any) -> Any:
    return value.astimezone(UTC) if isinstance(value, datetime) else value


def _own(messages: DataFrame) -> DataFrame:
    """Return the messages of producers."""
    written_again = F.col("topic").startswith("%RETRY%") | F.col("topic").startswith("%DLQ%")
    internal = F.col("topic").rlike("^(RMQ_SYS_|rmq_sys_|SCHEDULE_TOPIC_XXXX$|TRANS_CHECK_MAX_TIME_TOPIC$)")
    return messages.where(~written_again & ~internal)


def _short_names(folders: Sequence[str]) -> dict[str, str]:
    """Return folders by the distinct part of their path."""
    for parts in range(1, 10):
        names = ["/".join(folder.rstrip("/").split("/")[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return dict(zip(folders, names, strict=True))


def _with_store(rows: Sequence[Sequence[Any]], columns: tuple[str, ...], name: dict[str, str]) -> dict[str, Any]:
    """Return a table of ``rows``, whose last value is a folder: the first column where there are several stores."""
    if len(name) == 1:
        return {"columns": columns, **_cut([row[:-1] for row in rows])}
    return {"columns": ("store", *columns), **_cut([(name[row[-1]], *row[:-1]) for row in rows])}


def _damage(damage: Any, name: dict[str, str]) -> Section:
    about = (
        "What librmq verify finds wrong with these stores. Records that can’t be read are in none of the numbers. "
        "librmq recover mends what a crash leaves; librmq salvage saves what can be read of the rest."
    )
    rows = [(file, offset, kind, what, store) for store, file, offset, kind, what in damage]
    return Section("Damage", about, **_with_store(rows, ("file", "offset", "kind", "what"), name))


def _tiles(totals: Any, waiting: Any, halves: Any, timers: Any, dead: Any, damage: Any) -> list[Tile]:
    lag, dead_count = sum(row[2] for row in waiting), sum(row[3] for row in dead)
    delayed = sum(row[1] for row in timers)
    return [
        Tile("messages", f"{sum(row[2] for row in totals):,}"),
        Tile("bytes", _bytes(sum(row[3] for row in totals))),
        Tile("wait for a group", f"{lag:,}", "bad" if lag > 1000 else "good"),
        Tile("half messages open", f"{len(halves):,}", "bad" if halves else "good"),
        Tile("delayed messages wait", f"{delayed:,}"),
        Tile("dead letters", f"{dead_count:,}", "bad" if dead_count else "good"),
        Tile("damaged places", f"{len(damage):,}", "bad" if damage else "good"),
    ]


def _bytes(number: float) -> str:
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while number >= 1024 and unit != "TiB":
        number, unit = number / 1024, next(units)
    return f"{number:,.0f} {unit}" if number >= 10 or unit == "B" else f"{number:,.1f} {unit}"


def _cut(rows: Sequence[Any]) -> dict[str, Any]:
    return {"rows": rows[:MOST], "left_out": max(0, len(rows) - MOST)}


def _topics(totals: Any) -> Section:
    sums: dict[str, list[Any]] = {}
    for _, topic, count, size, first, last in totals:
        before = sums.setdefault(topic, [0, 0, first, last])
        sums[topic] = [before[0] + count, before[1] + size, min(before[2], first), max(before[3], last)]
    rows = sorted(([topic, *values] for topic, values in sums.items()), key=lambda row: -row[1])
    plot = bars([(row[0], row[1]) for row in rows[:MOST]], "messages") if rows else ""
    about = (
        "What lies in the logs, by topic. Names with %RETRY% hold messages that a group failed on and gets again, "
        "%DLQ% those it gave up; SCHEDULE_TOPIC and RMQ_SYS are the broker’s own."
    )
    columns = ("topic", "messages", "bytes", "first stored", "last stored")
    return Section("Topics", about, plot, columns, nothing="There are no messages.", **_cut(rows))


def _backlog(waiting: Any) -> Section:
    late = [row for row in waiting if row[2]]
    plot = bars([(f"{group} · {topic}", lag) for group, topic, lag, *_ in late[:MOST]], "messages that wait")
    about = (
        "How many messages each group has still to consume. Tens are normal. A large number in one queue alone points "
        "to one slow or stuck consumer, the same in all queues to too few consumers. “Lost” messages went with old "
        "files of the log before the group read them. A queue without progress counts from its first message."
    )
    columns = (
        "group", "topic", "waiting", "most in one queue", "oldest waits (s)", "oldest stored", "lost",
        "queues without progress",
    )  # fmt: skip
    nothing = "No group has stored its progress here."
    return Section("Backlog", about, plot if late else "", columns, nothing=nothing, **_cut(waiting))


def _rates(messages: DataFrame, totals: Any) -> Section:
    about = "When messages were stored, the largest topics apart: new ones as well as those written again."
    if not totals:
        return Section("Rates", about, nothing="There are no messages.")
    first, last = min(row[4] for row in totals), max(row[5] for row in totals)
    step = max(1.0, (last - first) / timedelta(seconds=1) / _BUCKETS)
    by_topic: dict[str, int] = defaultdict(int)
    for row in totals:
        by_topic[row[1]] += row[2]
    largest = sorted(by_topic, key=lambda topic: -by_topic[topic])[:6]
    begin = first.timestamp()
    bucket = F.floor((F.unix_millis("storeTimestamp") / 1000 - F.lit(begin)) / step).cast("int")
    counts = _rows(
        messages.where(F.col("topic").isin(largest)).groupBy("topic", bucket.alias("bucket")).agg(F.count("*"))
    )
    found: dict[str, dict[int, int]] = {topic: {} for topic in largest}
    for topic, number, count in counts:
        found[topic][number] = count
    until = int((last.timestamp() - begin) / step)
    series = {
        topic: [
            (first + timedelta(seconds=(number + 0.5) * step), counted.get(number, 0) / step)
            for number in range(until + 1)
        ]
        for topic, counted in found.items()
    }
    return Section("Rates", about, lines(series, "messages a second"))


def _skew(uneven: Any, name: dict[str, str]) -> Section:
    rows = [
        (topic, name[store], queue, count, share * 100, ratio)
        for store, topic, queue, count, share, ratio in uneven
        if ratio > 1.1 and not is_system_topic(topic)
    ]
    several = len(name) > 1  # the same queue can occur once for each store
    bound = [
        (f"{store} · {topic} · {queue}" if several else f"{topic} · {queue}", round(ratio, 2))
        for topic, store, queue, _, _, ratio in rows[:MOST]
    ]
    plot = bars(bound, "times the mean of the topic’s queues") if rows else ""
    about = (
        "Queues that hold more than the other queues of their topic. A queue has one consumer at a time, so the "
        "largest one bounds how fast a topic is consumed. A key that is sent often is the usual cause."
    )
    return Section(
        "Uneven queues", about, plot, ("topic", "store", "queue", "messages", "% of the topic", "times the mean"),
        nothing="All queues of a topic hold about the same.", **_cut(rows),
    )  # fmt: skip


def _keys(hot: Any, name: dict[str, str]) -> Section:
    rows = [(key, topic, count, share * 100, store) for store, topic, key, count, share, _ in hot]
    about = "Business keys with the most messages."
    shown = _with_store(rows, ("key", "topic", "messages", "% of the topic’s keys"), name)
    return Section("Frequent keys", about, nothing="No key occurs twice.", **shown)


def _duplicates(twice: Any, window_seconds: float) -> Section:
    plot = (
        bars([(topic, count) for topic, count, *_ in twice[:MOST]], "messages whose key came before") if twice else ""
    )
    about = (
        f"Messages whose business key another message of the topic had in the {window_seconds:g} s before. One key may "
        "well belong to several messages; where it must not, this is what a consumer has to recognise. “Sent again” "
        "are those with the same unique id too: a client or broker repeated them."
    )
    return Section(
        "Duplicates", about, plot, ("topic", "messages", "sent again", "keys", "shortest distance (s)"),
        nothing="There are none.", **_cut(twice),
    )  # fmt: skip


def _pending(halves: Any, timers: Any) -> Section:
    by_group: dict[tuple[str, str], list[Any]] = {}
    for group, topic, checks, born, _ in halves:
        found = by_group.setdefault((group, topic), [0, 0, born])
        by_group[group, topic] = [found[0] + 1, max(found[1], checks), min(found[2], born)]
    rows: list[tuple[Any, ...]] = [
        ("half message", topic, group, count, f"checked up to {checks} times, oldest of {born:%Y-%m-%d %H:%M:%S}")
        for (group, topic), (count, checks, born) in by_group.items()
    ]
    rows += [
        ("delayed", topic, None, count, f"due {first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S}")
        for topic, count, first, last in timers
    ]
    plot = bars([(f"{row[0]} · {row[1]}", row[3]) for row in rows[:MOST]], "messages that wait") if rows else ""
    about = (
        "Half messages were neither committed nor rolled back: the broker asks their producers until it gives up. "
        "Delayed messages wait for their time."
    )
    return Section("Pending", about, plot, ("what", "topic", "group", "messages", ""), nothing="Nothing is pending.",
                   **_cut(rows))  # fmt: skip


def _dead(dead: Any, name: dict[str, str]) -> Section:
    rows = sorted(dead, key=lambda row: -row[3])
    prefix = {store: f"{short} · " if len(name) > 1 else "" for store, short in name.items()}
    bound = [(f"{prefix[store]}{group} · {cause}", count) for group, _, cause, count, _, store in rows[:MOST]]
    plot = bars(bound, "dead letters") if rows else ""
    about = "Messages that a group gave up. No consumer gets them until they are sent again."
    shown = _with_store(rows, ("group", "topic", "cause", "messages", "last"), name)
    return Section("Dead letters", about, plot, nothing="There are none.", **shown)


def _filters(filters: Any, name: dict[str, str]) -> Section:
    rows = [(*row[:5], _bytes(row[5]), row[6]) for row in sorted(filters, key=lambda row: -row[5])]
    about = (
        "SQL filters that groups have registered, how many of their topic’s messages they match, and what the broker "
        "does not have to send because of them."
    )
    shown = _with_store(rows, ("group", "topic", "expression", "messages", "matched", "saved"), name)
    return Section("Filters", about, nothing="No group filters by SQL.", **shown)
