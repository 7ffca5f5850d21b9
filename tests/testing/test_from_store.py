"""Kits that begin with a store: what is delivered, what stays as it was, and the fewest messages that fail."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import librmq.testing.plugin  # noqa: F401 (an inner run of pytest forgets its imports)
from librmq import Broker, ManualClock, ManualRunner, Producer, SimpleConsumer
from librmq.consumer import DeliveredMessage
from librmq.diagnosis.view import viewed
from librmq.errors import ConfigError, CorruptionError, MessageIllegalError, NotAStoreError
from librmq.files._memory import TemporaryFolder
from librmq.message.batch import BatchItem
from librmq.message.message import StoredMessage
from librmq.message.properties import encode_properties
from librmq.message.record import Record
from librmq.message.topics import kind_of_topic
from librmq.store import snapshot, verify
from librmq.testing import Kit, ProcessStateError, explore
from librmq.testing._from_store import Progress, StoreStart, shrink
from tests.budget import examples
from tests.reference import folders, store_folders
from tests.stores_of_5 import KINDS, add_database, batch_record, keep_queues_elsewhere, write_log

NOW_MS = 1_600_000_000_000
Tree = dict[str, tuple[int, bytes | None]]


def tree(path: Path) -> Tree:
    """Return the times and contents of all files and folders."""
    return {
        str(entry): (entry.stat().st_mtime_ns, entry.read_bytes() if entry.is_file() else None)
        for entry in (path, *path.rglob("*"))
    }


def nothing(message: DeliveredMessage) -> None:
    """Take a message."""


def source_broker(path: Path | str) -> Broker:
    return Broker.open(path, runner=ManualRunner(ManualClock(NOW_MS)))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store in which orders, payments and a delayed order wait, and billing and audit have failed once."""
    folder = tmp_path_factory.mktemp("from-store") / "store"
    with Kit(folder, now_ms=NOW_MS) as rmq:
        rmq.broker.create_topic("orders", 2)
        rmq.broker.create_topic("payments", 1)
        rmq.broker.create_topic("empty", 1)

        def fails_at_3(message: DeliveredMessage) -> None:
            if message.body in (b"orders 3", b"payments 3"):
                raise ValueError(message.body)

        consumers = [rmq.consumer(group, fail_fast=False) for group in ("billing", "audit")]
        for consumer in consumers:
            consumer.subscribe("orders", fails_at_3)
            if consumer.group == "audit":
                consumer.subscribe("payments", fails_at_3)
        for number in range(10):
            for topic in ("orders", "payments"):
                rmq.producer().send(topic, f"{topic} {number}", queue=number % (2 if topic == "orders" else 1))
        rmq.run_until_idle()
        for consumer in consumers:
            consumer.shutdown()
        for number in range(10, 12):
            rmq.producer().send("orders", f"orders {number}", queue=number % 2)
        rmq.producer().send("orders", "delayed order", delay=60)
        rmq.producer().send("payments", "delayed payment", delay=60)
    return folder


def bodies(rmq: Kit, group: str) -> list[bytes]:
    return [attempt.body for attempt in rmq.delivered(group)]


# ---- every message once


@pytest.mark.slow
@pytest.mark.parametrize("folder", [*store_folders(), *folders("clients-"), *folders("timer-")])
def test_each_message_of_a_broker_comes_once_to_each_group(folder: Path) -> None:
    for store in sorted(path for path in folder.glob("store*") if path.is_dir()):
        before = tree(store)
        with viewed(store) as view:
            topics = [topic for topic in view.listed_topics if kind_of_topic(topic) == "user" and topic.isascii()]
            expected = Counter(
                (topic, message.body, tuple(sorted(message.properties.items())))
                for topic in topics
                for queue, offsets in view.queues(topic).items()
                for message in view.messages(queue, offsets)
            )
            last_ms = view.now_ms
        with Kit.from_store(store, topics, ["first", "second"]) as rmq:
            assert last_ms is not None
            assert rmq.clock.now_ms() == last_ms + 1
            for group in ("first", "second"):
                consumer = rmq.consumer(group)
                for topic in topics:
                    consumer.subscribe(topic, nothing)
            rmq.run_until_idle()
            for group in ("first", "second"):
                assert expected == Counter(
                    (attempt.topic, attempt.body, tuple(sorted(attempt.message.properties.items())))
                    for attempt in rmq.delivered(group)
                )
        assert tree(store) == before


@pytest.mark.parametrize("kind", KINDS)
def test_stores_of_rocketmq_5_are_read_too(source: Path, tmp_path: Path, kind: str) -> None:
    store = tmp_path / "store"
    shutil.copytree(source, store)
    keep_queues_elsewhere(store, kind)
    before = tree(store)
    with Kit.from_store(store, ["orders"], ["first"]) as rmq:
        rmq.consumer("first").subscribe("orders", nothing)
        rmq.run_until_idle()
        assert len(rmq.delivered("first")) == 12
    assert tree(store) == before


def test_progress_in_rocksdb_is_no_recorded_one(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(source, store)
    add_database(store / "config" / "consumerOffsets")
    for groups in (None, ["billing"], {"first": "begin", "billing": None}):
        with pytest.raises(
            ConfigError, match=r"progress of .* unknown.*mqadmin .*/config/consumerOffsets\.json.*'begin'"
        ):
            Kit.from_store(store, ["orders"], groups)
    with Kit.from_store(store, ["orders"], {"billing": "begin"}) as rmq:
        rmq.consumer("billing").subscribe("orders", nothing)
        rmq.run_until_idle()
        assert len(rmq.delivered("billing")) == 12
    table = re.sub(r"(\d+):", r'"\1":', (store / "config" / "consumerOffset.json").read_text())
    (store / "config" / "consumerOffsets.json").write_text(table)
    with Kit.from_store(store, ["orders"], ["billing"]) as rmq:
        rmq.consumer("billing").subscribe("orders", nothing)
        rmq.run_until_idle()
        assert sorted(bodies(rmq, "billing")) == [b"orders 10", b"orders 11"]


def test_messages_of_light_queues_come_once(tmp_path: Path) -> None:
    properties = {"INNER_MULTI_DISPATCH": "%LMQ%a", "INNER_MULTI_QUEUE_OFFSET": "0", "UNIQ_KEY": "U"}
    light = Record(topic="orders", body=b"light", properties_raw=encode_properties(properties))
    batch = Record(topic="batches", store_timestamp_ms=NOW_MS)
    write_log(tmp_path, [light, batch_record(batch, [BatchItem(body, 0, b"") for body in (b"1", b"2")])])
    add_database(tmp_path / "consumequeue_rocksdb")
    with Kit.from_store(tmp_path, groups=["first"]) as rmq:
        assert rmq.start is not None
        assert rmq.start.topics == ("batches", "orders")
        consumer = rmq.consumer("first")
        for topic in rmq.start.topics:
            consumer.subscribe(topic, nothing)
        rmq.run_until_idle()
        assert sorted(bodies(rmq, "first")) == [b"1", b"2", b"light"]


# ---- recorded progress, retries and delays


def test_groups_continue_where_they_were(source: Path, tmp_path: Path) -> None:
    before = tree(source)
    snapshot(str(source), str(tmp_path / "snapshot"))
    for store in (source, tmp_path / "snapshot"):
        with Kit.from_store(store, ["orders"], ["billing"]) as rmq:
            for group in ("billing", "new"):
                rmq.consumer(group).subscribe("orders", nothing)
            rmq.run_until_idle()
            assert sorted(bodies(rmq, "billing")) == [b"orders 10", b"orders 11"]
            assert sorted(bodies(rmq, "new")) == sorted(f"orders {number}".encode() for number in range(12))
            rmq.advance(minutes=2)
            assert sorted(bodies(rmq, "billing")[2:]) == [b"delayed order", b"orders 3"]
            assert [one.attempt for one in rmq.delivered("billing") if one.body == b"orders 3"] == [1]
            assert bodies(rmq, "new")[12:] == [b"delayed order"]
            assert not rmq.messages("%RETRY%audit") + rmq.messages("payments")
            assert [event for event in rmq.events() if event["event"] == "dead_letter"] == []
    assert tree(source) == before


def test_retries_and_resends_of_the_store_are_explained(tmp_path: Path) -> None:
    with Kit(tmp_path / "store", now_ms=NOW_MS) as rmq:
        failing = {b"orders 1": 1, b"orders 3": 99, b"payments 3": 99}  # how often

        def fails(message: DeliveredMessage) -> None:
            failing[message.body] = failing.get(message.body, 0) - 1
            if failing[message.body] >= 0:
                raise ValueError(message.body)

        consumer = rmq.consumer("billing", fail_fast=False)
        for topic in ("orders", "payments"):
            consumer.subscribe(topic, fails)
            for number in range(5):
                rmq.producer().send(topic, f"{topic} {number}", keys="k")
        rmq.advance(seconds=15)
        consumer.shutdown()
        rmq.advance(minutes=1)  # retries come into the group's topic
        rmq.faults.lose_answer("orders")
        rmq.producer().send("orders", b"twice", delay=60)
    with Kit.from_store(tmp_path / "store", ["orders"], ["billing"]) as rmq:
        rmq.consumer("billing").subscribe("orders", nothing)
        rmq.advance(minutes=2)
        attempts = sorted((attempt.body, attempt.attempt) for attempt in rmq.delivered("billing"))
        assert attempts == [(b"orders 3", 2), (b"twice", 0), (b"twice", 0)]


def test_messages_that_were_not_acknowledged_come_again(tmp_path: Path) -> None:
    runner = ManualRunner()
    with Broker.open(tmp_path / "store", runner=runner) as broker, Producer(broker, "shop") as shop:
        broker.create_topic("orders", 1)
        for body in (b"acknowledged", b"visible again"):
            shop.send("orders", body)
        mailer = SimpleConsumer(broker, "mailer")
        mailer.subscribe("orders")
        with mailer:
            mailer.ack(mailer.receive(invisible=5, wait=0)[0])
            runner.advance(6_000)
    with Kit.from_store(tmp_path / "store") as rmq:
        assert rmq.broker.lag("mailer", "%RETRY%mailer_orders") == 1
        mailer = SimpleConsumer(rmq.broker, "mailer")
        mailer.subscribe("orders")
        with mailer:
            assert [(message.body, message.attempt) for message in mailer.receive(wait=0)] == [(b"visible again", 2)]


def test_given_progress_leaves_earlier_retries_out(source: Path) -> None:
    progress: Mapping[str, Progress] = {
        "billing": "begin",
        "end": "end",
        "fourth": 4,
        "exact": {"orders": {0: 5}},
        "later": datetime.fromtimestamp(NOW_MS / 1000 + 3600, UTC),
    }
    counts = {"billing": 12, "end": 0, "fourth": 4, "exact": 7, "later": 0}
    with Kit.from_store(source, ["orders"], progress) as rmq:
        for group in progress:
            rmq.consumer(group).subscribe("orders", nothing)
        rmq.run_until_idle()
        assert {group: len(rmq.delivered(group)) for group in progress} == counts
        rmq.advance(minutes=2)
        assert {group: len(rmq.delivered(group)) for group in progress} == {
            group: count + 1 for group, count in counts.items()
        }


def test_all_topics_and_groups_come_without_names(source: Path) -> None:
    with Kit.from_store(source) as rmq:
        assert rmq.start is not None
        assert rmq.start.topics == ("empty", "orders", "payments")
        assert set(rmq.start.groups) == {"audit", "billing"}
        consumer = rmq.consumer("audit")
        for topic in rmq.start.topics:
            consumer.subscribe(topic, nothing)
        rmq.advance(minutes=2)
        waited = [b"delayed order", b"delayed payment", b"orders 10", b"orders 11", b"orders 3", b"payments 3"]
        assert sorted(bodies(rmq, "audit")) == waited


Draw = tuple[str, int]


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(
    sends=st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 1)), max_size=20),
    recorded=st.dictionaries(
        st.tuples(st.sampled_from(["g", "h"]), st.sampled_from(["a", "b", "c"]), st.integers(0, 1)), st.integers(0, 6)
    ),
    topics=st.none() | st.sets(st.sampled_from(["a", "b", "c"]), min_size=1),
    groups=st.dictionaries(
        st.sampled_from(["g", "h", "i"]), st.none() | st.sampled_from(["begin", "end"]) | st.integers(0, 6), min_size=1
    ),
)
def test_a_group_gets_what_a_model_says(
    sends: list[Draw], recorded: dict[tuple[str, str, int], int], topics: set[str] | None, groups: dict[str, Progress]
) -> None:
    queues: dict[tuple[str, int], list[bytes]] = {}
    folder = TemporaryFolder()
    try:
        with source_broker(folder.name) as broker, Producer(broker, "shop") as producer:
            for topic in "abc":
                broker.create_topic(topic, 2)
            for number, (topic, queue_id) in enumerate(sends):
                producer.send(topic, str(number), queue=queue_id)
                queues.setdefault((topic, queue_id), []).append(str(number).encode())
            for (group, topic, queue_id), offset in recorded.items():
                broker.tables.set_consumer_offset(topic, group, queue_id, offset)
        before = tree(Path(folder.name))
        with Kit.from_store(folder.name, topics, groups) as rmq:
            for group in groups:
                consumer = rmq.consumer(group)
                for topic in topics or "abc":
                    consumer.subscribe(topic, nothing)
            rmq.run_until_idle()
            for group, start in groups.items():
                expected: list[bytes] = []
                for (topic, queue_id), of_queue in queues.items():
                    if topic in (topics or "abc"):
                        begin = recorded.get((group, topic, queue_id), 0) if start is None else start
                        at = {"begin": 0, "end": len(of_queue)}[begin] if isinstance(begin, str) else begin
                        assert isinstance(at, int)
                        expected += of_queue[at:]
                assert sorted(bodies(rmq, group)) == sorted(expected)
        assert tree(Path(folder.name)) == before
    finally:
        folder.delete()


# ---- beside a writer, and where a test runs


def test_a_store_that_grows_gives_what_it_had(tmp_path: Path) -> None:
    with source_broker(tmp_path / "store") as broker, Producer(broker, "shop") as producer:
        producer.send("orders", b"before")
        rmq = Kit.from_store(tmp_path / "store", ["orders"], ["billing"])
        producer.send("orders", b"after")
        with rmq:
            rmq.consumer("billing").subscribe("orders", nothing)
            rmq.run_until_idle()
            assert bodies(rmq, "billing") == [b"before"]


@pytest.mark.parametrize("settings", [{"over_tcp": True}, {"path": "kit"}, {"now_ms": NOW_MS * 2}], ids=str)
def test_settings_of_a_kit_hold(source: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    if "path" in settings:
        settings["path"] = tmp_path / settings["path"]
    with Kit(store=source, topics=["orders"], groups=["billing"], **settings) as rmq:
        rmq.consumer("billing").subscribe("orders", nothing)
        rmq.run_until_idle()
        assert {b"orders 10", b"orders 11"} <= set(bodies(rmq, "billing"))
        rmq.crash_broker()
        rmq.producer().send("orders", b"x" * 300_000)
        if "now_ms" in settings:
            assert rmq.clock.now_ms() == settings["now_ms"]
        rmq.advance(minutes=2)
        assert b"x" * 300_000 in bodies(rmq, "billing")
    if "path" in settings:
        assert verify(settings["path"]).sound


def test_explored_schedules_begin_with_the_store(source: Path) -> None:
    times: list[int] = []

    def booked_once(rmq: Kit) -> None:
        booked: list[bytes] = []
        times.append(rmq.clock.now_ms())

        @rmq.consumer("billing").subscribe("orders")
        def charge(message: DeliveredMessage) -> None:
            if message.body not in booked:
                rmq.checkpoint("between look and insert")
                booked.append(message.body)

        for _ in range(2):
            rmq.producer().send("orders", b"again")
        rmq.run_until_idle()
        assert booked[:2] == [b"orders 10", b"orders 11"]
        assert booked.count(b"again") <= 1

    with pytest.raises(AssertionError) as failure:
        explore(booked_once, store=source, topics=["orders"], groups=["billing"])
    assert times[0] == times[1] < NOW_MS + 60_000
    assert "it fails in the same way with its store on disk" in failure.value.__notes__[-1]
    seed = failure.value.__notes__[-1].rpartition(" ")[2]
    with pytest.raises(AssertionError):
        explore(booked_once, seed=seed, store=source, topics=["orders"], groups=["billing"])


@pytest.mark.slow
def test_a_failing_schedule_is_shown_with_the_fewest_messages(
    start: StoreStart, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runs: list[int] = []

    def booked_once(rmq: Kit) -> None:
        booked: list[bytes] = []
        runs.append(1)

        @rmq.consumer("billing", fail_fast=False).subscribe("orders")
        def charge(message: DeliveredMessage) -> None:
            if message.body == b"3" and not rmq.retries("billing"):
                raise ValueError("no price")
            if message.body in {b"17", b"50"} and not booked:  # the same order
                rmq.checkpoint("between look and insert")
                booked.append(message.body)

        rmq.run_until_idle()
        assert len(booked) < 2

    with pytest.raises(AssertionError) as failure:
        explore(booked_once, store=start)
    shrunk = failure.value.__notes__[-2]
    assert "2 of the 64 messages make the test fail in this way (and none of them can be left out, " in shrunk
    assert "b'17'" in shrunk
    assert "b'50'" in shrunk
    assert len(caplog.messages) < 3 < len(runs)  # only the lines of the shortest failing schedule
    assert any("no price" in message for message in caplog.messages)
    call = re.search(r"^explore\(test, (.*)\)$", shrunk, re.MULTILINE)
    assert call is not None
    runs.clear()
    with pytest.raises(AssertionError):
        explore(booked_once, **eval(f"dict({call[1]})"))
    assert len(runs) == 1
    assert verify(next(tmp_path.glob("librmq-failing-store-*"))).sound


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "error", "what"),
    [
        ({"topics": ["order"]}, ConfigError, "has no topic 'order'; did you mean 'orders'"),
        ({"topics": ["x"]}, ConfigError, "has no topic 'x'; it has empty, orders, payments"),
        ({"topics": ["SCHEDULE_TOPIC_XXXX"]}, ConfigError, "has no topic"),
        ({"topics": "orders"}, ConfigError, "topics: expected a list"),
        ({"groups": "billing"}, ConfigError, "groups: expected a list"),
        ({"groups": ["a b"]}, MessageIllegalError, "group 'a b'"),
        ({"topics": [1]}, ConfigError, "topics: expected a list of topics, found [1]"),
        ({"groups": 5}, ConfigError, "groups: expected a list of groups"),
        ({"groups": {"billing": True}}, ConfigError, "groups: billing: expected 'begin', 'end'"),
        ({"groups": {"billing": {"orders": {0: -1}}}}, ConfigError, "groups: billing: expected 'begin', 'end'"),
        ({"groups": {"billing": {"order": {0: 1}}}}, ConfigError, "expected progress in empty, orders, payments"),
        ({"groups": {"billing": {"orders": {"0": 1}}}}, ConfigError, "groups: billing: expected 'begin', 'end'"),
        ({"groups": {"billing": {"orders": {0: 1, 2: 1}}}}, ConfigError, "in queues 0, 1 of topic orders, found 2"),
        ({"groups": {"billing": "middle"}}, ConfigError, "groups: billing: expected 'begin', 'end'"),
        ({"groups": {"billing": datetime(2020, 1, 1)}}, ConfigError, "time zone"),
        ({"now_ms": NOW_MS}, ConfigError, "now_ms: expected a time after the store's last message"),
    ],
)
def test_wrong_arguments_are_refused(source: Path, arguments: Any, error: type[Exception], what: str) -> None:
    before = tree(source)
    with pytest.raises(error, match=re.escape(what)):
        Kit.from_store(source, **arguments)
    assert tree(source) == before


def test_what_is_no_sound_store_is_refused(source: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(source, damaged)
    log = next((damaged / "commitlog").iterdir())
    log.write_bytes(log.read_bytes().replace(b"orders 7", b"orders X", 1))
    cut = tmp_path / "cut"
    shutil.copytree(source, cut)
    log = next((cut / "commitlog").iterdir())
    raw = log.read_bytes()
    log.write_bytes(raw[:4] + b"none" + raw[8:])
    (cut / "abort").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    before = tree(tmp_path)
    for name, error, what in (
        ("folder", NotAStoreError, "no store"),
        ("nowhere", NotAStoreError, "no store"),
        ("file", NotAStoreError, "found a file"),
        ("damaged", CorruptionError, "checksum"),
        ("cut", CorruptionError, "no record: .* run librmq salvage"),
    ):
        with pytest.raises(error, match=what):
            Kit.from_store(tmp_path / name, groups=["billing"])
    assert tree(tmp_path) == before
    with pytest.raises(ConfigError, match="expected store="):
        Kit(topics=["orders"])
    with Kit.from_store(source, ["orders"]) as rmq, pytest.raises(ProcessStateError, match="the one broker"):
        rmq.cluster()


# ---- the fewest messages


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> StoreStart:
    """Return 64 messages with their numbers as bodies."""
    folder = tmp_path_factory.mktemp("shrink") / "store"
    with source_broker(folder) as broker, Producer(broker, "shop") as producer:
        for number in range(64):
            producer.send("orders", str(number), queue=number % 4)
    return StoreStart.read(folder, ["orders"], ["billing"])


def numbers(messages: Sequence[StoredMessage]) -> list[int]:
    return [int(message.body) for message in messages]


def test_a_store_without_messages_begins_as_no_store(tmp_path: Path) -> None:
    with source_broker(tmp_path / "store") as broker:
        broker.create_topic("orders", 1)
    with Kit() as plain, Kit(store=tmp_path / "store") as rmq:
        assert rmq.clock.now_ms() == plain.clock.now_ms()


@settings(max_examples=examples(200), deadline=None)
@given(needed=st.sets(st.integers(0, 63), max_size=6))
def test_only_the_needed_messages_remain(start: StoreStart, needed: set[int]) -> None:
    shrunk = shrink(start, lambda part: needed <= set(numbers(part.messages)), 1000)
    assert shrunk is not None
    assert numbers(shrunk.start.messages) == sorted(needed)
    assert shrunk.start.now_ms == (NOW_MS + 1 if needed else start.now_ms)
    assert not shrunk.is_cut
    assert shrunk.tries <= 2 + 14 * len(needed)


@pytest.mark.parametrize(
    "fails",
    [
        lambda part: len(part) % 2 == 0 and 37 in part,
        lambda part: len(part) >= 20,
        lambda part: sum(part) % 11 == sum(range(64)) % 11,
    ],
    ids=["an even number", "twenty", "a sum"],
)
def test_what_remains_fails(start: StoreStart, fails: Callable[[list[int]], bool]) -> None:
    for most_tries in (1, 2, 10, 1000):
        shrunk = shrink(start, lambda part: fails(numbers(part.messages)), most_tries)
        assert shrunk is not None
        left = numbers(shrunk.start.messages)
        assert fails(left)
        assert shrunk.tries <= most_tries
        assert shrunk.is_cut == (most_tries < 1000)
    assert not any(fails([*left[:at], *left[at + 1 :]]) for at in range(len(left)))
    assert shrink(start, lambda part: False, 10) is None


TESTS = """
import pytest

@pytest.fixture(scope="module")
def once():
    numbers = []
    yield numbers
    print("runs:", len(numbers))

@pytest.mark.rmq(store="prod", topics=["orders"], groups=["billing"])
def test_pairs(rmq, once, tmp_path):
    once.append(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "own").touch()
    seen = set()

    @rmq.consumer("billing").subscribe("orders")
    def charge(message):
        seen.add(message.body)
        if {b"17", b"50"} <= seen:
            raise ValueError("both")

    rmq.run_until_idle()

@pytest.mark.rmq(store="prod", topics=["orders"], groups=["billing"])
def test_passes(rmq):
    rmq.consumer("billing").subscribe("orders")(lambda message: None)
    rmq.run_until_idle()
    assert len(rmq.delivered("billing")) == 64

@pytest.mark.rmq(store="prod", topics=["orders"], groups=["billing"])
def test_needs_none(rmq):
    assert False

@pytest.mark.rmq(store="prod", topics=["orders"])
@pytest.mark.xfail
def test_known(rmq, once):
    assert False
"""


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    explore(lambda rmq: None, runs=2)  # an inner run forgets its imports, and some modules can be imported only once
    return pytester.runpytest_inprocess("-p", "pytest_librmq", "-p", "no:asyncio", *arguments)


@pytest.mark.slow
def test_a_failing_test_shows_and_saves_the_fewest_messages(start: StoreStart, pytester: pytest.Pytester) -> None:
    start.save(str(pytester.path / "prod"))
    before = tree(pytester.path / "prod")
    pytester.makepyfile(TESTS)
    result = run(pytester, "--strict-markers")
    result.assert_outcomes(passed=1, failed=2, xfailed=1)
    text = result.stdout.str()
    assert "2 of the 64 messages make the test fail in this way (and none of them can be left out, " in text
    result.stdout.fnmatch_lines(
        ["  orders/1:4 * b'17'", "  orders/2:12 * b'50'", "they are saved as a store of * KiB*"]
    )
    assert "the test fails in this way without any of the 64 messages" in text
    assert text.count("ValueError: both") < 5  # only those of one run
    assert tree(pytester.path / "prod") == before

    copied = re.search(r"^cp -r (\S+) (\S+)$", text, re.MULTILINE)
    marker = re.search(r"^@pytest.mark.rmq\(.*\)$", text, re.MULTILINE)
    assert copied is not None
    assert marker is not None
    shutil.copytree(copied[1], copied[2])
    assert sum(path.stat().st_size for path in Path(copied[2]).rglob("*") if path.is_file()) < 16 << 10
    assert verify(copied[2]).sound
    pytester.makepyfile(
        TESTS.replace('@pytest.mark.rmq(store="prod", topics=["orders"], groups=["billing"])', marker[0])
    )
    again = run(pytester, "-k", "pairs", "--rmq-shrink=0")
    again.assert_outcomes(failed=1, deselected=3)
    assert "ValueError: both" in again.stdout.str()
    assert "shrunk (rmq)" not in again.stdout.str()


@pytest.mark.slow
def test_a_search_can_be_cut(start: StoreStart, pytester: pytest.Pytester) -> None:
    start.save(str(pytester.path / "prod"))
    pytester.makepyfile(TESTS)
    text = run(pytester, "-k", "pairs", "--rmq-shrink=5").stdout.str()
    assert "the search ended after 5 tries, and --rmq-shrink=50 may find fewer" in text
    for arguments, what in ((["-p", "no:cacheprovider"], "they are not saved"), (["--rmq-shrink=-1"], "")):
        text = run(pytester, "-k", "pairs", *arguments).stdout.str()
        assert ("shrunk (rmq)" in text) == bool(what)
        assert what in text


def test_explored_tests_begin_with_the_store(start: StoreStart, pytester: pytest.Pytester) -> None:
    start.save(str(pytester.path / "prod"))
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.rmq_explore(runs=5)
        @pytest.mark.rmq(store="prod", topics=["orders"], groups=["billing"])
        def test_all_come(rmq):
            seen = set()
            rmq.consumer("billing").subscribe("orders")(lambda message: seen.add(message.body))
            rmq.advance(minutes=2)
            assert len(seen) == 64
        """
    )
    result = run(pytester)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_all_come: 5 runs*"])


def test_served_tests_begin_with_the_store(start: StoreStart, pytester: pytest.Pytester) -> None:
    start.save(str(pytester.path / "prod"))
    pytester.makepyfile(
        """
        import pytest
        from librmq import PushConsumer, connect

        @pytest.mark.rmq(store="prod", topics=["orders"], groups=["billing"])
        def test_all_come(rmq_remoting):
            seen = set()
            with connect(rmq_remoting.address) as route:
                consumer = PushConsumer(route, "billing")
                consumer.subscribe("orders", lambda message: seen.add(message.body))
                with consumer:
                    rmq_remoting.settle()
            assert len(seen) == 64
        """
    )
    run(pytester).assert_outcomes(passed=1)
