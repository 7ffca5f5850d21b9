"""Lag of groups: equal to a simple model on every recorded store, and findings where a fault is planted."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from librmq import ReconsumeLater
from librmq.clock import ManualClock
from librmq.commitlog import CommitLog
from librmq.diagnosis import (
    Lag,
    QueueLag,
    StoreView,
    Thresholds,
    TopicProgress,
    WaitingOrigins,
    diagnose,
    lag,
    waiting_origins,
)
from librmq.files._memory import MemoryFiles
from librmq.message.message import Message
from librmq.store import MessageStore
from librmq.store.engine.store_times import store_times_at
from librmq.store.format.broker_tables import BrokerTables
from librmq.testing import Kit
from tests.budget import many
from tests.reference import folders, store_folders
from tests.stores import ROOT, SMALL, START_MS, opened


def model(store: MessageStore, tables: BrokerTables) -> list[QueueLag]:
    """Compute each row separately, from the store's public reads."""
    found = []
    for name, offsets in tables.offsets.rows.items():
        topic, _, group = name.rpartition("@")
        for of, queue_id in sorted(store.queues):
            if of == topic:
                begin, end = store.queue_range(topic, queue_id)
                progress = offsets.get(queue_id)
                start = begin if progress is None else max(begin, progress)
                first = next(store.messages(topic, queue_id, start), None) if start < end else None
                oldest = None if first is None else first.store_timestamp_ms
                found.append(QueueLag(group, topic, queue_id, begin, end, progress, max(0, end - start), oldest))
    return sorted(found, key=lambda row: row[:3])


NO_ROWS = dict.fromkeys(range(10_001), 0)
"""A group's progress in deleted queues, which has no rows, and makes columns of numpy pay."""
BOTH_WAYS = pytest.mark.parametrize("more", [{}, NO_ROWS], ids=["few", "many"])


@many
@BOTH_WAYS
@pytest.mark.parametrize("folder", [*store_folders(), *folders("clients-")])
def test_lag_equals_the_model_on_recorded_stores(folder: Path, more: dict[int, int]) -> None:
    for path in sorted(folder.glob("store*")):
        if not path.is_dir():
            continue
        with StoreView.open(path) as view:
            if more:
                view.tables.offsets.set("gone@I", more)
            found = lag(view)
            assert list(found) == model(view.store, view.tables)
            assert sum(row.lag for row in found) == found.total == sum(one.lag for one in found.by_group())
            assert [one.lag for one in found.by_topic()] == [
                sum(row.lag for row in rows)
                for _, rows in itertools.groupby(found, key=lambda row: (row.group, row.topic))
            ]


class Store:
    """Return a store in memory with groups."""

    def __init__(self) -> None:
        self.files = MemoryFiles()
        self.clock = ManualClock(START_MS)
        self.store = MessageStore.open(ROOT, SMALL, files=self.files, clock=self.clock)
        self.tables = BrokerTables.open(f"{ROOT}/config", files=self.files)

    def send(self, topic: str, queue_id: int, count: int) -> None:
        for _ in range(count):
            self.store.append(Message(topic, b"x"), queue_id)

    def progress(self, group: str, topic: str, **offsets: int) -> None:
        for name, offset in offsets.items():
            self.tables.set_consumer_offset(topic, group, int(name[1:]), offset)

    @property
    def view(self) -> StoreView:
        view = StoreView.over(self.store, self.tables)
        view.now_ms = self.clock.now_ms()
        return view


@pytest.mark.parametrize("seed", range(5))
def test_lag_equals_the_model_on_random_stores(seed: int) -> None:
    rng = random.Random(seed)
    store = Store()
    for _ in range(300):
        store.clock.advance(ms=rng.randrange(1000))
        store.send(rng.choice("AB"), rng.randrange(5), 1)
    for group, topic in itertools.product("GH", "AB"):
        store.progress(group, topic, **{f"q{rng.randrange(5)}": rng.randrange(60) for _ in range(3)})
    assert list(lag(store.view)) == model(store.store, store.tables)


def test_a_queue_without_progress_counts_from_its_begin() -> None:
    store = Store()
    store.send("T", 0, 5)
    store.send("T", 1, 3)
    store.progress("G", "T", q0=4)
    rows = list(lag(store.view))
    assert [(row.queue_id, row.consumer_offset, row.lag) for row in rows] == [(0, 4, 1), (1, None, 3)]
    (topic,) = lag(store.view).by_topic()
    assert (topic.lag, topic.most_in_one_queue, topic.without_progress) == (4, 3, 1)


@BOTH_WAYS
def test_a_group_without_progress_in_a_topic_has_no_rows(more: dict[int, int]) -> None:
    store = Store()
    store.send("T", 0, 5)
    store.tables.offsets.set("gone@I", more)
    found = lag(store.view)
    assert (list(found), found.by_group(), found.by_topic(), found.total) == ([], [], [], 0)


def test_progress_beyond_the_end_is_a_finding_without_lag() -> None:
    store = Store()
    store.send("T", 0, 5)
    store.progress("G", "T", q0=8, q3=2)  # queue 3 does not exist
    assert [(row.queue_id, row.lag, row.oldest_timestamp_ms) for row in lag(store.view)] == [(0, 0, None), (3, 0, None)]
    (found,) = diagnose(store.view)
    assert (found.kind, found.severity, found.subject) == ("progress-beyond-end", "error", "group G, topic T")
    evidence = {"queue_id": 0, "consumer_offset": 8, "max_offset": 5, "queues": 2, "queue_ids": "0,3", "messages": 5}
    assert found.evidence == evidence
    assert "--queue 0,3 --to end" in found.next_step


def test_deleted_queues_are_of_groups_with_progress_there() -> None:
    store = Store()
    store.send("T", 1, 5)
    store.progress("G", "T", q0=2, q1=0, q3=0)
    store.progress("H", "T", q1=4, q3=-1, q5=0)
    store.progress("G", "gone", q2=7, q1=1)
    store.progress("H", "gone", q0=0)
    assert [row[:-1] for row in lag(store.view, times=False)] == [
        ("G", "T", 0, 0, 0, 2, 0),
        ("G", "T", 1, 0, 5, 0, 5),
        ("G", "gone", 1, 0, 0, 1, 0),
        ("G", "gone", 2, 0, 0, 7, 0),
        ("H", "T", 1, 0, 5, 4, 1),
    ]


@BOTH_WAYS
def test_sums_and_rows_are_those_of_the_columns(more: dict[int, int]) -> None:
    """Rows are the same in both ways, in the same order."""
    store = Store()
    store.progress("I", "gone", **{f"q{queue_id}": offset for queue_id, offset in more.items()})
    for queue_id, count in ((0, 5), (1, 3)):
        store.send("T", queue_id, count)
    store.send("%RETRY%H", 0, 2)
    store.send("U", 0, 4)
    store.progress("G", "T", q0=2, q1=0, q3=9)
    store.progress("H", "T", q0=5, q1=3, q2=0)
    store.progress("H", "%RETRY%H", q0=1)
    store.progress("H", "U", q0=1)
    store.progress("F", "gone", q0=3, q7=1)
    store.progress("E", "gone", q0=0)
    by_blocks = lag(store.view)
    by_columns = Lag(list(by_blocks.topics), by_blocks.now_ms)
    assert by_blocks.by_group() == by_columns.by_group()
    assert by_blocks.by_topic() == by_columns.by_topic()
    assert by_blocks.total == by_columns.total
    assert list(by_blocks) == list(by_columns)
    topics = by_blocks.topics
    assert list(topics) == topics[:] == [topics[place] for place in range(-len(topics), 0)]
    assert len(by_blocks) == len(by_columns) == len(list(by_blocks))
    assert [row[:6] for row in by_blocks.by_group()] == [
        ("F", 1, 2, 0, 0, 0),
        ("G", 1, 3, 6, 6, 0),
        ("H", 3, 4, 4, 3, 1),
    ]


@BOTH_WAYS
def test_the_columns_of_a_file_are_its_rows(more: dict[int, int]) -> None:
    """Of two rows with one name, and of two numbers of a queue, the last one counts."""
    store = Store()
    for topic, queue_id in (("A", 0), ("A", 3), ("B", 1)):
        store.send(topic, queue_id, 5)
    rows = '"A@G":{0:1,3:2},"B@H":{1:9,1:2,7:4,7:0},"A@H":{3:1,5:6},"A@G":{3:4}'
    if more:
        rows += f',"C@I":{{{",".join(f"{queue_id}:{offset}" for queue_id, offset in more.items())}}}'
    store.files.make_folder(f"{ROOT}/config")
    store.files.write(f"{ROOT}/config/consumerOffset.json", f'{{"offsetTable":{{{rows}}}}}'.encode())
    found = [
        list(lag(StoreView.over(store.store), group=group, topic=topic)) for group in "GH" for topic in ("A", "B", "C")
    ]
    whole = lag(StoreView.over(store.store))
    assert list(whole) == list(itertools.chain(*found))
    assert [row[:-1] for row in whole] == [
        ("G", "A", 0, 0, 5, None, 5),
        ("G", "A", 3, 0, 5, 4, 1),
        ("H", "A", 0, 0, 5, None, 5),
        ("H", "A", 3, 0, 5, 1, 4),
        ("H", "A", 5, 0, 0, 6, 0),
        ("H", "B", 1, 0, 5, 2, 3),
    ]
    view = StoreView.over(store.store)
    assert [row for row in whole if row.max_offset] == model(store.store, view.tables)
    assert list(lag(view)) == list(whole)  # from the rows, which the model has read


def test_a_place_beyond_the_log_hides_no_store_time_after_it() -> None:
    with opened(MemoryFiles()) as store:
        first, second = (store.append(Message("T", b"x")) for _ in range(2))
        entries = [(0, store.log.end + 5), (0, first.physical_offset), (1, second.physical_offset)]
        times = store_times_at(store.log, ("T", 0), entries)
        assert times == [None, first.store_timestamp_ms, second.store_timestamp_ms]


class CountedRow(dict[int, int]):
    """A group's progress in a topic, which counts how often a queue is looked up."""

    lookups = 0

    def get(self, queue_id: int, default: Any = None) -> Any:
        CountedRow.lookups += 1
        return super().get(queue_id, default)

    def __getitem__(self, queue_id: int) -> int:
        CountedRow.lookups += 1
        return super().__getitem__(queue_id)


def test_a_deleted_queue_is_looked_up_only_in_the_groups_with_progress_there() -> None:
    store = Store()
    store.send("T", 0, 5)
    for number in range(50):
        store.progress(f"G{number}", "T", q0=2, **{f"q{10 + number}": 1})
        name = f"T@G{number}"
        store.tables.offsets.set(name, CountedRow(store.tables.offsets.rows[name]))
    CountedRow.lookups = 0
    assert len(list(lag(store.view))) == 100
    assert CountedRow.lookups <= 50 * 3  # before, each of 50 groups was asked for each of 51 queues


def test_many_queues_share_a_short_finding() -> None:
    store = Store()
    store.send("T", 0, 5)
    store.progress("G", "T", q0=5, **{f"q{number}": 1 for number in range(1, 2_000, 2)})
    (found,) = diagnose(store.view)
    assert (found.evidence["queues"], found.evidence["messages"]) == (1_000, 1_000)
    assert "1,3,5" in found.evidence["queue_ids"]
    assert len(" ".join(map(str, (*found, found.evidence)))) < 2_000


def test_a_negative_progress_expires_nothing() -> None:
    store = Store()
    store.send("T", 0, 5)
    store.progress("G", "T", q0=-3)
    found = lag(store.view)
    assert [(row.consumer_offset, row.lag) for row in found] == [(-3, 5)]
    assert [one.expired for one in found.by_topic()] == [0]


@BOTH_WAYS
def test_retries_are_counted_separately(more: dict[int, int]) -> None:
    store = Store()
    store.send("T", 0, 5)
    store.send("%RETRY%G", 0, 2)
    store.progress("F", "T", q0=3)
    store.progress("G", "T", q0=1)
    store.progress("G", "%RETRY%G", q0=0)
    store.tables.offsets.set("gone@I", more)
    groups = lag(store.view, times=False).by_group()
    assert groups == [("F", 1, 1, 2, 2, 0, None), ("G", 2, 2, 6, 4, 2, None)]


def test_the_age_of_the_oldest_message() -> None:
    store = Store()
    for _ in range(4):
        store.send("T", 0, 1)
        store.clock.advance(seconds=10)
    store.progress("G", "T", q0=1)
    view = store.view
    (row,) = lag(view)
    assert row.oldest_timestamp_ms == START_MS + 10_000
    assert view.age_s(row.oldest_timestamp_ms) == 30
    assert view.age_s(None) is None
    assert view.age_s(view.now_ms + 5) == 0 if view.now_ms is not None else False


def test_rates_between_two_measurements() -> None:
    store = Store()
    store.send("T", 0, 50)
    store.progress("G", "T", q0=10)
    before = lag(store.view)
    store.clock.advance(seconds=10)
    store.send("T", 0, 20)
    store.progress("G", "T", q0=50)
    (rate,) = lag(store.view).rates_since(before)
    assert (rate.stored_per_s, rate.consumed_per_s, rate.lag, rate.drain_s) == (2.0, 4.0, 20, 10.0)
    assert before.rates_since(before) == []


def test_rates_leave_out_queues_of_a_missing_broker() -> None:
    """Two brokers have queue 0, and one of them queue 1; then one does not answer."""

    def measured(at_s: int, *rows: tuple[str, int, int, int]) -> Lag:
        brokers, ids, ends, progress = zip(*rows, strict=True)
        lags = [end - offset for end, offset in zip(ends, progress, strict=True)]
        begins, times = [0] * len(ids), [None] * len(ids)
        columns = TopicProgress("G", "T", ids, begins, ends, progress, lags, times, brokers)
        return Lag([columns], START_MS + 1000 * at_s)

    before = measured(0, ("a", 0, 100, 50), ("b", 0, 900, 900), ("b", 1, 10, 0))
    (all_there,) = measured(10, ("a", 0, 120, 50), ("b", 0, 910, 900), ("b", 1, 30, 10)).rates_since(before)
    assert (all_there.stored_per_s, all_there.consumed_per_s) == (5.0, 1.0)
    (one_missing,) = measured(10, ("b", 0, 910, 900), ("b", 1, 30, 10)).rates_since(before)
    assert (one_missing.stored_per_s, one_missing.consumed_per_s, one_missing.lag) == (3.0, 1.0, 30)
    assert measured(10, ("c", 0, 910, 900)).rates_since(before) == []


LIMITS = Thresholds(normal_lag=10, large_lag=50, old_s=60)


def test_backlogs_by_their_size_and_age() -> None:
    store = Store()
    store.send("T", 0, 20)
    store.send("T", 1, 20)
    store.progress("G", "T", q0=16, q1=16)
    assert diagnose(store.view, LIMITS) == []
    store.progress("G", "T", q0=10, q1=9)
    assert [(one.kind, one.severity) for one in diagnose(store.view, LIMITS)] == [("backlog", "info")]
    store.send("T", 0, 30)
    store.send("T", 1, 30)
    (found,) = diagnose(store.view, LIMITS)
    assert (found.kind, found.severity, found.evidence["lag"]) == ("backlog", "warning", 81)
    assert [
        one.severity for one in diagnose(store.view, Thresholds(topics=frozenset("T"), large_lag=50, normal_lag=9))
    ] == ["error"]
    store.progress("G", "T", q0=49, q1=50)
    store.clock.advance(seconds=61)
    assert [one.kind for one in diagnose(store.view, LIMITS)] == ["old-messages"]


def test_one_queue_that_lags() -> None:
    store = Store()
    for queue_id in range(5):
        store.send("T", queue_id, 20)
    store.progress("G", "T", q0=0, q1=20, q2=20, q3=20, q4=20)
    assert {one.kind for one in diagnose(store.view, LIMITS)} == {"backlog", "uneven-lag"}


@pytest.mark.parametrize("others", [1, 2, 7])
@pytest.mark.parametrize(("of_each", "is_uneven"), [(0, True), (6, True), (7, False), (20, False)])
def test_a_queue_is_compared_with_the_mean_of_the_others(others: int, of_each: int, is_uneven: bool) -> None:
    """One of two queues can lag too; a queue in which nothing waits counts as 0."""
    store = Store()
    for queue_id in range(others + 1):
        store.send("T", queue_id, 20)
    store.progress("G", "T", q0=0, **{f"q{other}": 20 - of_each for other in range(1, others + 1)})
    kinds = {one.kind for one in diagnose(store.view, LIMITS)}
    assert ("uneven-lag" in kinds) == is_uneven


def test_messages_that_expired_unread() -> None:
    store = Store()
    store.send("T", 0, 200)
    store.progress("G", "T", q0=3)
    queue = store.store.queues["T", 0]
    queue.min_offset = 50
    (found,) = [one for one in diagnose(store.view) if one.kind == "expired-unread"]
    assert found.evidence == {"expired": 47}
    assert lag(store.view).total == 150


# Messages that wait, by origin: new ones, deliveries of delays, and retries.


def test_new_delayed_and_retried_messages_count_apart(rmq: Kit) -> None:
    rmq.broker.create_topic("T", 2)

    def fail(message: object) -> None:
        raise ReconsumeLater

    consumer = rmq.consumer("G", fail_fast=False)
    consumer.subscribe("T", fail)
    rmq.producer().send("T", b"fails")
    rmq.advance(seconds=5)
    consumer.shutdown()
    for number in range(10):
        rmq.producer().send("T", b"%d" % number, delay=5 if number % 3 == 0 else None)
    rmq.advance(seconds=60)
    of_retries, of_topic = waiting_origins(rmq.broker)
    assert of_retries == WaitingOrigins("G", "%RETRY%G", 1, 1, 0, 0, 1)
    assert of_topic == WaitingOrigins("G", "T", 10, 10, 6, 4, 0)
    (sampled,) = waiting_origins(rmq.broker, topic="T", sampled=4)
    assert (sampled.lag, sampled.looked_at) == (10, 4)
    assert waiting_origins(rmq.broker, group="other") == []


def test_many_looks_at_records_release_their_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise looks into each of many queues map as much memory as the log has."""
    released: list[tuple[int, int]] = []
    monkeypatch.setattr(CommitLog, "release_read_pages", lambda _, begin, end: released.append((begin, end)))
    store = Store()
    store.send("T", 0, 800)  # the last one is more than 64 KiB behind the first
    view = store.view
    for _ in range(1_100):
        view.times_of(("T", 0), range(800))
    assert released == [(store.store.log.begin, store.store.log.end)] * 2
