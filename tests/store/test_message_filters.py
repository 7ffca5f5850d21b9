"""Filters on a store: bitmaps are made when messages arrive; reads check entries first, then messages if necessary."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from librmq.clock import ManualClock
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.consumequeue_entries import ExtUnit
from librmq.errors import ConfigError, FilterSyntaxError
from librmq.files._memory import MemoryFiles
from librmq.filter import SQL92, Policy, Registrations, SqlFilter, TagFilter, WatchedPredicate, tags_code
from librmq.message.message import Message, StoredMessage
from librmq.store import MessageStore, verify
from librmq.store.engine._message_filters import ByTags
from librmq.store.engine.read import GetStatus, MessageFilter
from tests.stores import ROOT, SMALL, SMALL_EXT, START_MS, any_message, contents, died, in_memory

Counter = Callable[[], int]

GROUPS = {
    "cheap": "price < 50",
    "near": "region IN ('eu', 'us') OR TAGS = 'TagA'",
    "dear": "price BETWEEN 90 AND 1000 AND region IS NOT NULL",
    "failing": "region > 5",
}


def registered(*topics: str) -> Registrations:
    """Register all `GROUPS` on each topic."""
    registrations = Registrations()
    for topic in topics:
        for group, expression in GROUPS.items():
            assert registrations.register(topic, group, expression, SQL92, 1, START_MS - 1)
    return registrations


def opened(
    files: MemoryFiles, filters: Registrations | None, config: StoreConfig = SMALL_EXT, *, later_ms: int = 0
) -> MessageStore:
    return MessageStore.open(ROOT, config, files=files, clock=ManualClock(START_MS + later_ms), filters=filters)


def priced(price: object, region: str | None = None, tags: str | None = None) -> Message:
    properties = {"price": str(price)} if region is None else {"price": str(price), "region": region}
    return Message("T", b"body", tags=tags, properties=properties)


def read_all(store: MessageStore, matching: MessageFilter | None) -> list[int]:
    """Return the queue offsets that a reader gets if it continues where each read ends."""
    found: list[int] = []
    queue_offset = 0
    while True:
        result = store.read("T", 0, queue_offset, 32, matching)
        found += [message.queue_offset for message in result.messages]
        if result.next_offset >= result.max_offset:
            return found
        assert result.next_offset > queue_offset
        queue_offset = result.next_offset


def unit_of(store: MessageStore, message: StoredMessage) -> ExtUnit:
    store.read(message.topic, message.queue_id, 0, 1)  # writes the collected entries to the queues
    queue = store.queues[message.topic, message.queue_id]
    entry = queue.entry(message.queue_offset)
    assert entry is not None
    unit = queue.ext_unit(entry.tags_code)
    assert unit is not None
    return unit


def units(store: MessageStore) -> list[ExtUnit]:
    return [unit_of(store, message) for message in store]


@pytest.fixture
def log_reads(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Count the records read from a log since the last call."""
    count = 0
    read = CommitLog.read

    def counting(self: CommitLog, physical_offset: int, size: int) -> bytes | None:
        nonlocal count
        count += 1
        return read(self, physical_offset, size)

    def since() -> int:
        nonlocal count
        told, count = count, 0
        return told

    monkeypatch.setattr(CommitLog, "read", counting)
    return since


# --- bitmaps


@pytest.mark.parametrize("seed", range(3))
def test_a_message_has_the_bitmap_of_its_matching_filters(seed: int) -> None:
    rng = random.Random(seed)
    filters = registered("TopicA", "消息")
    seen = set()
    with opened(MemoryFiles(), filters) as store:
        for _ in range(60):
            message, fields = any_message(rng)
            message.properties |= {"price": rng.choice(["7", "95", "x"]), "region": rng.choice(["eu", "cn"])}
            if rng.random() < 0.3 and message.delay_level <= 0:
                batch = [message, Message(message.topic, b"other", properties={"region": "us"})]
                store.append_batch(batch, properties={"price": "99"} if rng.random() < 0.5 else None)
            else:
                store.append(message, rng.randrange(2), **fields)
        for stored in store:
            unit = unit_of(store, stored)
            assert unit.bitmap == filters.bitmap(stored.topic, stored.properties)
            assert unit.store_timestamp_ms == stored.store_timestamp_ms
            seen.add(unit.bitmap)
    assert len(seen) > 3
    assert None in seen


def test_filters_may_be_added_while_the_store_is_open() -> None:
    filters = Registrations()
    with opened(MemoryFiles(), filters) as store:
        store.append(priced(7))
        filters.register("T", "cheap", GROUPS["cheap"], SQL92, 1, START_MS)
        store.append(priced(7))
        first, second = units(store)
    assert first.bitmap is None
    assert second.bitmap == bytes(filters.bloom.bitmap("cheap#T"))


def test_a_filter_finds_what_was_stored_with_a_later_time_before_it() -> None:
    """Compiling takes time, in which others store messages, and clocks are set back."""
    files, filters = MemoryFiles(), registered("T")
    with opened(files, filters, later_ms=50) as store:
        store.append(priced(70))
        assert not any(units(store)[0].bitmap or b"")
        filters.register("T", "late", "price = 70", SQL92, 1, START_MS)
        store.append(priced(70))
        assert read_all(store, store.matching(registration=("T", "late"))) == [0, 1]
    filters = registered("T")
    with opened(files, filters) as store:
        filters.register("T", "later", "price = 70", SQL92, 1, START_MS)
        assert read_all(store, store.matching(registration=("T", "later"))) == [0, 1]
        filters.unregister("later", START_MS)
        assert (ended := filters.get("T", "later")) is not None
        assert ended.dead


@pytest.mark.parametrize(
    ("config", "filters"),
    [(SMALL_EXT, None), (replace(SMALL_EXT, enable_calc_filter_bitmap=False), registered("T"))],
    ids=["no filters", "switched off"],
)
def test_no_bitmaps(config: StoreConfig, filters: Registrations | None) -> None:
    with opened(MemoryFiles(), filters, config) as store:
        store.append(priced(7, "eu"))
        (unit,) = units(store)
        assert unit.bitmap is None
        if filters is not None:
            for group, found in (("cheap", [0]), ("dear", [])):
                assert read_all(store, store.matching(registration=("T", group))) == found


@pytest.mark.slow
def test_groups_register_and_leave_while_messages_arrive() -> None:
    """Threads register groups, mark them dead and remove them. No append fails, and every bitmap is a possible one."""
    filters = registered("T")
    done = threading.Event()

    def change() -> None:
        rng, version = random.Random(1), 1
        while not done.is_set():
            group = f"group{rng.randrange(50)}"
            version += 1
            filters.register("T", group, f"price = {version}", SQL92, version, START_MS)
            filters.unregister(f"group{rng.randrange(50)}", START_MS)
            filters.clean(START_MS, 0)
            list(filters)

    config = replace(SMALL_EXT, commitlog_file_size=1 << 20)
    with opened(MemoryFiles(), filters, config) as store, ThreadPoolExecutor(2) as pool:
        changes = [pool.submit(change) for _ in range(2)]
        try:
            for _ in range(1_000):
                store.append(priced(7, "eu"))
        finally:
            done.set()
        for outcome in changes:
            outcome.result()
        bits = filters.bloom.bitmap("cheap#T", "near#T")
        for unit in units(store):
            assert unit.bitmap is not None
            assert all(has & must == must for has, must in zip(unit.bitmap, bits, strict=True))


# --- bitmaps after a recovery


def filled(filters: Registrations | None) -> MemoryFiles:
    """Return a store whose process died; only flushed content survived."""
    files = MemoryFiles()
    store = opened(files, filters)
    for number in range(40):
        store.append(priced(number * 5, "eu" if number % 3 else None), number % 2)
    store.flush()
    return died(files)


def test_recovery_makes_the_same_units() -> None:
    filters = registered("T")
    whole = contents(filled(filters))
    lost = {path: data for path, data in whole.items() if not path.startswith("consumequeue")}
    with opened(in_memory(whole), filters) as store:
        expected = units(store)
    with opened(in_memory(lost), filters, later_ms=1000) as store:
        assert units(store) == expected
        assert any(unit.bitmap and any(unit.bitmap) for unit in expected)
        ours = contents(store.files)
    ext = [path for path in whole if path.startswith("consumequeue_ext/") and whole[path] is not None]
    assert len(ext) > 2
    assert {path: ours[path] for path in ext} == {path: whole[path] for path in ext}


def test_without_filters_recovery_makes_units_without_bitmaps() -> None:
    filters = registered("T")
    lost = {path: data for path, data in contents(filled(filters)).items() if not path.startswith("consumequeue")}
    with opened(in_memory(lost), None) as store:
        assert {unit.bitmap for unit in units(store)} == {None}
        files = died(store.files)  # type: ignore[arg-type]
    with opened(files, filters) as store:
        cheap = [message.queue_offset for message in store if message.queue_id == 0 and price(message) < 50]
        assert read_all(store, store.matching(registration=("T", "cheap"))) == cheap


def price(message: StoredMessage) -> int:
    return int(message.properties["price"])


# --- reading by a registration


def test_the_bitmap_is_looked_at_before_the_log(log_reads: Counter) -> None:
    filters = registered("T")
    with opened(MemoryFiles(), filters) as store:
        for number in range(100):
            store.append(priced(number, "eu" if number % 10 else None))
        log_reads()
        for group, expected in (
            ("cheap", range(50)),
            ("near", [number for number in range(100) if number % 10]),
            ("dear", range(91, 100)),
            ("failing", []),
        ):
            assert read_all(store, store.matching(registration=("T", group))) == list(expected)
            assert log_reads() == len(expected), group
        # The same expressions without bitmaps: every message is evaluated.
        for group in ("cheap", "failing"):
            read_all(store, store.matching(sql=GROUPS[group]))
            assert log_reads() == 100


def test_a_read_continues_after_messages_excluded_by_bitmaps(log_reads: Counter) -> None:
    with opened(MemoryFiles(), registered("T"), replace(SMALL_EXT, consumequeue_file_size=2000)) as store:
        for number in range(20):
            store.append(priced(60 if number else 7))
        log_reads()
        result = store.read("T", 0, 1, 32, store.matching(registration=("T", "cheap")))
    assert (result.status, result.next_offset, result.messages) == (GetStatus.NO_MATCHED_MESSAGE, 20, [])
    assert log_reads() == 0


def test_a_false_maybe_is_checked_exactly(log_reads: Counter) -> None:
    """If bits of other groups cover all bits of a group, the message itself decides."""
    filters = registered("T")
    bits = set(filters.bloom.positions("mine#T"))
    others = iter(range(10**6))
    covered: set[int] = set()
    while not bits <= covered:
        name = f"other{next(others)}"
        if bits & set(filters.bloom.positions(f"{name}#T")) - covered:
            covered |= set(filters.bloom.positions(f"{name}#T"))
            filters.register("T", name, "price > 0", SQL92, 1, START_MS - 1)
    filters.register("T", "mine", "price > 1000", SQL92, 1, START_MS - 1)
    with opened(MemoryFiles(), filters) as store:
        for number in range(1, 6):
            store.append(priced(number))
        log_reads()
        assert read_all(store, store.matching(registration=("T", "mine"))) == []
        assert log_reads() == 5


def test_a_message_older_than_a_registration_is_checked_exactly(log_reads: Counter) -> None:
    filters = registered("T")
    clock = ManualClock(START_MS)
    store = MessageStore.open(ROOT, SMALL_EXT, files=MemoryFiles(), clock=clock, filters=filters)
    with store:
        store.append(priced(7))
        clock.advance(ms=10)
        filters.register("T", "late", "price < 50", SQL92, 1, clock.now_ms())
        store.append(priced(7))  # stored in the millisecond of the registration, so it counts as older
        clock.advance(ms=1)
        store.append(priced(7))
        store.append(priced(70))
        bits = filters.bloom.positions("late#T")
        assert [filters.bloom.hit(unit.bitmap or b"", bits) for unit in units(store)] == [False, True, True, False]
        log_reads()
        assert read_all(store, store.matching(registration=("T", "late"))) == [0, 1, 2]
        assert log_reads() == 3


def test_a_changed_filter_is_not_judged_by_new_bits() -> None:
    filters = registered("T")
    clock = ManualClock(START_MS)
    with MessageStore.open(ROOT, SMALL_EXT, files=MemoryFiles(), clock=clock, filters=filters) as store:
        old = store.matching(registration=("T", "cheap"))
        clock.advance(ms=5)
        assert filters.register("T", "cheap", "price > 90", SQL92, 2, clock.now_ms())
        clock.advance(ms=5)
        store.append(priced(7))
        store.append(priced(95))
        assert read_all(store, old) == [0]
        new = store.matching(registration=("T", "cheap"))
        assert read_all(store, new) == [1]
        assert not filters.register("T", "cheap", "price >", SQL92, 3, clock.now_ms())  # ends the previous registration
        store.append(priced(95))
        assert read_all(store, new) == [1, 2]


@pytest.mark.parametrize("spoil", ["missing", "damaged", "switched off"])
def test_an_unreadable_unit_excludes_nothing(spoil: str, log_reads: Counter) -> None:
    filters = registered("T")
    files = MemoryFiles()
    with opened(files, filters) as store:
        for number in range(10):
            store.append(priced(number * 10))
    found = contents(files)
    if spoil == "damaged":
        for path, data in found.items():
            if data and path.startswith("consumequeue_ext"):
                found[path] = b"\x7f" * len(data)
    else:
        found = {path: data for path, data in found.items() if not path.startswith("consumequeue_ext")}
    config = SMALL if spoil == "switched off" else SMALL_EXT
    with MessageStore.open(ROOT, config, files=in_memory(found), read_only=True, filters=filters) as store:
        log_reads()
        assert read_all(store, store.matching(registration=("T", "cheap"))) == [0, 1, 2, 3, 4]
        assert log_reads() == 10


def test_the_extension_can_be_switched_on_after_a_kill(tmp_path: Path) -> None:
    """There is no folder of it then."""
    with MessageStore.open(tmp_path, SMALL) as store:
        store.append(priced(7))
        store.abandon()
    with MessageStore.open(tmp_path, SMALL_EXT) as store:
        store.append(priced(70))
        assert len(store.read("T", 0, 0).messages) == 2
    assert verify(tmp_path).sound


def test_messages_from_before_the_extension_are_checked_exactly(log_reads: Counter) -> None:
    filters = registered("T")
    files = MemoryFiles()
    roomy = replace(SMALL, consumequeue_file_size=2000)  # old and new entries in one file, and in one read
    with opened(files, filters, roomy) as store:
        for number in (7, 70):
            store.append(priced(number))
    with opened(died(files), filters, replace(roomy, enable_consumequeue_ext=True), later_ms=5) as store:
        for number in (7, 70):
            store.append(priced(number))
        log_reads()
        assert read_all(store, store.matching(registration=("T", "cheap"))) == [0, 2]
        assert log_reads() == 3


# --- tags


def test_tags_exactly_and_by_code() -> None:
    assert tags_code("Aa") == tags_code("BB")
    for config in (SMALL, SMALL_EXT):
        with opened(MemoryFiles(), None, config) as store:
            for tags in ("Aa", "BB", "C", None, "v2-2c4"):
                store.append(Message("T", b"x", tags=tags))
            assert read_all(store, store.matching(tags="Aa || C")) == [0, 2]
            assert read_all(store, ByTags(TagFilter("Aa || C"), exact=False)) == [0, 1, 2]
            assert read_all(store, store.matching(tags="v2-2c4")) == [4]
            assert read_all(store, store.matching(tags="BB")) == [1]
            assert read_all(store, store.matching(tags="nobody")) == []
            assert read_all(store, store.matching(tags="|| ||")) == []
            for every in ("*", ""):
                assert read_all(store, store.matching(tags=every)) == [0, 1, 2, 3, 4]


def test_32_bits_of_a_code_are_compared() -> None:
    """As in RocketMQ, and also when a delivery time takes the place of a code."""
    by_code = ByTags(TagFilter("C"), exact=False)
    codes = np.array([67, 67 + (5 << 32), 68, 67 - (1 << 32)], np.int64)
    assert by_code.match_entries(codes, None).tolist() == [True, True, False, True]
    assert ByTags(TagFilter("C || D"), exact=False).match_entries(codes, None).all()


def test_tags_do_not_touch_the_log(log_reads: Counter) -> None:
    for config in (SMALL, SMALL_EXT):
        with opened(MemoryFiles(), None, config) as store:
            for number in range(50):
                store.append(Message("T", b"x", tags="wanted" if number == 30 else f"other{number}"))
            log_reads()
            assert read_all(store, store.matching(tags="wanted")) == [30]
            assert log_reads() == 1


# --- SQL and predicates


def test_sql_needs_no_extension() -> None:
    filters = registered("T")
    with opened(MemoryFiles(), filters, SMALL) as store:
        for number in range(20):
            store.append(priced(number * 10, "eu" if number % 2 else None, tags="TagA" if number == 4 else None))
        assert read_all(store, store.matching(sql="price >= 180 OR TAGS = 'TagA'")) == [4, 18, 19]
        assert read_all(store, store.matching(sql=SqlFilter("region STARTSWITH 'e'", dialect="5.3"))) == [
            *range(1, 20, 2)
        ]
        assert read_all(store, store.matching(registration=("T", "near"))) == sorted([4, *range(1, 20, 2)])
        assert read_all(store, store.matching()) == list(range(20))


def test_a_failing_predicate_names_the_message(caplog: pytest.LogCaptureFixture) -> None:

    def predicate(message: StoredMessage) -> object:
        return 100 // price(message) > 10

    with opened(MemoryFiles(), None, SMALL) as store:
        results = [store.append(priced(number)) for number in (0, 5, 50, 0, 7)]
        with caplog.at_level(logging.WARNING, "librmq.filter"):
            assert read_all(store, store.matching(predicate=predicate)) == [1, 4]
        for place in (0, 3):
            assert f"physical offset {results[place].physical_offset}:" in caplog.text
        assert caplog.text.count("ZeroDivisionError") == 2
        delivering = WatchedPredicate(predicate, clock=store.clock, budget=1, on_error=Policy.DELIVER)
        assert read_all(store, store.matching(predicate=delivering)) == [0, 1, 3, 4]
        assert (delivering.counts.calls, delivering.counts.matched, delivering.counts.failed) == (5, 4, 2)


def test_a_slow_predicate_is_reported_with_the_message(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock(START_MS)

    def predicate(message: StoredMessage) -> bool:
        clock.advance(ms=price(message))
        return True

    with MessageStore.open(ROOT, SMALL, files=MemoryFiles(), clock=clock) as store:
        results = [store.append(priced(number)) for number in (5, 50, 6)]
        with caplog.at_level(logging.WARNING, "librmq.filter"):
            assert read_all(store, store.matching(predicate=predicate)) == [0, 1, 2]
        (record,) = caplog.records
        assert f"physical offset {results[1].physical_offset};" in record.getMessage()
        strict = WatchedPredicate(predicate, clock=clock, budget=0.01, over_budget=Policy.SKIP)
        assert read_all(store, store.matching(predicate=strict)) == [0, 2]
        assert strict.counts.over_budget == 1


# --- switches


def test_sql_switched_off_names_the_switch() -> None:
    config = replace(SMALL_EXT, enable_property_filter=False)
    with opened(MemoryFiles(), registered("T"), config) as store:
        store.append(priced(7, tags="t"))
        with pytest.raises(ConfigError, match="enable_property_filter"):
            store.matching(sql="price > 5")
        with pytest.raises(ConfigError, match="enable_property_filter"):
            store.matching(registration=("T", "cheap"))
        assert read_all(store, store.matching(tags="t")) == [0]
        assert read_all(store, store.matching(predicate=lambda message: True)) == [0]


@pytest.mark.parametrize("name", ["enable_property_filter", "enable_calc_filter_bitmap", "enable_consumequeue_ext"])
def test_switches_are_true_or_false(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected True or False"):
        StoreConfig.from_row({name: "yes"})


def test_values_that_are_not_filters() -> None:
    with opened(MemoryFiles(), registered("T")) as store:
        with pytest.raises(ConfigError, match="one of tags, sql, registration, predicate"):
            store.matching(tags="a", sql="a = 1")
        for registration in (("T", "nobody"), ("U", "cheap")):
            with pytest.raises(ConfigError, match="has no filter on topic"):
                store.matching(registration=registration)
        with pytest.raises(FilterSyntaxError):
            store.matching(sql="price >")
        with pytest.raises(FilterSyntaxError):
            store.matching(tags="||")
    with opened(MemoryFiles(), None) as store, pytest.raises(ConfigError, match="has no filter on topic"):
        store.matching(registration=("T", "cheap"))
