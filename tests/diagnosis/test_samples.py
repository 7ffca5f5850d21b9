"""Findings from samples: filters that match nothing, wrong clocks, retries without progress; the order of findings."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from librmq import (
    Broker,
    ManualClock,
    ManualRunner,
    Message,
    MessageStore,
    Producer,
    PushConsumer,
    ReconsumeLater,
    StoreConfig,
)
from librmq.diagnosis import Finding, StoreView, Thresholds, design_check, diagnose
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic
from librmq.store.format.broker_tables import BrokerTables
from tests.stores import SMALL, START_MS

HOUR_MS = 3_600_000


def by_kind(source: object, limits: Thresholds | None = None) -> dict[str, Finding]:
    return {one.kind: one for one in diagnose(source, limits)}  # type: ignore[arg-type]


@pytest.mark.parametrize(("expression", "is_found"), [("prise > 5", True), ("price > 50", True), ("price > 5", False)])
def test_a_registered_filter_that_matches_nothing(tmp_path: Path, expression: str, is_found: bool) -> None:
    runner = ManualRunner()
    with Broker.open(tmp_path / "store", runner=runner) as broker:
        consumer = PushConsumer(broker, "G")
        consumer.subscribe("orders", lambda message: None, sql=expression)
        consumer.start()
        producer = Producer(broker, "P")
        for number in range(20):
            producer.send("orders", b"x", properties={"price": str(number)})
        runner.advance(20_000)
        live = by_kind(broker)
        consumer.shutdown()
    folder = by_kind(tmp_path / "store")
    assert ("filter-matches-nothing" in live, "filter-matches-nothing" in folder) == (is_found, is_found)
    if is_found:
        finding = folder["filter-matches-nothing"]
        assert finding.subject == "group G, topic orders"
        assert finding.evidence["looked_at"] == 20
        assert finding.evidence["missing_properties"] == ({"prise": "price"} if "prise" in expression else {})
        assert ("did you mean price?" in finding.what) == ("prise" in expression)


def test_a_filter_that_matches_an_older_message_is_sampled(tmp_path: Path) -> None:
    runner = ManualRunner()
    with Broker.open(tmp_path / "store", runner=runner) as broker:
        consumer = PushConsumer(broker, "G")
        consumer.subscribe("orders", lambda message: None, sql="price = 0")
        consumer.start()
        broker.create_topic("orders", 1)
        producer = Producer(broker, "P")
        for number in range(40):
            producer.send("orders", b"x", properties={"price": str(number)})
        runner.advance(20_000)
        found = by_kind(broker, Thresholds(sampled=15))["filter-matches-nothing"]
    assert found.evidence["looked_at"] == 15
    assert "none of the newest 15 messages" in found.what


def open_half(store: MessageStore, checks: int | None = None) -> None:
    half = Message(SystemTopic.HALF, b"x", unique_key="U")
    half.properties.update({PropertyName.REAL_TOPIC: "orders", PropertyName.PRODUCER_GROUP: "P"})
    if checks is not None:
        half.properties[PropertyName.TRANSACTION_CHECK_TIMES] = str(checks)
    store.append(half, 0)


@pytest.mark.parametrize(("checks", "hours", "is_found"), [(None, 5, True), (1, 5, False), (None, 0, False)])
def test_half_messages_that_are_old_and_never_checked(
    tmp_path: Path, checks: int | None, hours: int, is_found: bool
) -> None:
    clock = ManualClock(START_MS)
    with MessageStore.open(tmp_path / "store", SMALL, clock=clock) as store:
        open_half(store, checks)
        clock.advance(ms=hours * HOUR_MS)
        store.append(Message("orders", b"x"))
    found = by_kind(tmp_path / "store")
    assert ("unchecked-halves" in found) == is_found
    if is_found:
        assert found["unchecked-halves"].subject == "producer group P, topic orders"
        assert found["unchecked-halves"].evidence["halves"] == 1


@pytest.mark.parametrize(("hours", "is_found"), [(-3, True), (3, True), (0, False)])
def test_messages_born_far_from_their_store_time(tmp_path: Path, hours: int, is_found: bool) -> None:
    with MessageStore.open(tmp_path / "store", SMALL, clock=ManualClock(START_MS)) as store:
        for number in range(3):
            born_ms = START_MS + hours * HOUR_MS * (number == 0)
            store.append(Message("orders", b"x"), born_timestamp_ms=born_ms)
    found = by_kind(tmp_path / "store")
    assert ("born-far-from-stored" in found) == is_found
    if is_found:
        evidence = found["born-far-from-stored"].evidence
        assert (evidence["messages"], evidence["looked_at"], evidence["most_s"]) == (1, 3, -hours * 3600)


def test_a_wrong_clock_is_one_finding_for_all_topics(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "store", SMALL, clock=ManualClock(START_MS)) as store:
        for topic, hours in ("orders", 3), ("bills", 5), ("bills", 5), ("mails", 0):
            store.append(Message(topic, b"x"), born_timestamp_ms=START_MS - hours * HOUR_MS)
    (found,) = [finding for finding in diagnose(tmp_path / "store") if finding.kind == "born-far-from-stored"]
    assert (found.subject, found.severity) == ("topics bills, orders", "warning")
    assert found.evidence["topics"] == {"bills": 2, "orders": 1}
    assert (found.evidence["messages"], found.evidence["looked_at"], found.evidence["most_s"]) == (3, 4, 5 * 3600)
    assert diagnose(tmp_path / "store", Thresholds(topics=frozenset({"orders"})))[0].severity == "error"


def test_retries_in_topics_without_progress(tmp_path: Path) -> None:
    def fail(message: object) -> None:
        raise ReconsumeLater

    runner = ManualRunner()
    with Broker.open(tmp_path / "store", runner=runner) as broker:
        consumer = PushConsumer(broker, "G")
        consumer.subscribe("orders", fail)
        consumer.start()
        Producer(broker, "P").send("orders", b"x")
        runner.advance(15_000)
        consumer.shutdown()
        runner.advance(30_000)  # the next retry waits
        assert "retries-without-progress" not in by_kind(broker)
    assert "retries-without-progress" not in by_kind(tmp_path / "store")
    path = tmp_path / "store" / "config" / "consumerOffset.json"
    path.write_text(json.dumps({"offsetTable": {}}))
    found = [one for one in diagnose(tmp_path / "store") if one.kind == "retries-without-progress"]
    assert {one.subject for one in found} == {"group G, topic orders", "group G, topic %RETRY%G"}


@pytest.mark.parametrize("is_read", [False, True])
def test_a_topic_that_retention_deletes_unread(tmp_path: Path, is_read: bool) -> None:
    config = StoreConfig.tiny(commitlog_file_size=4096, max_message_size=2048, max_total_size=6 * 4096)
    runner = ManualRunner()
    with Broker.open(tmp_path / "store", store_config=replace(config, keep_unconsumed=False), runner=runner) as broker:
        broker.create_topic("orders", 1)
        broker.set_group("G")
        producer = Producer(broker, "P")
        producer.send("orders", b"x")
        assert "never-read" not in by_kind(broker)
        if is_read:
            broker.reset_group("G", "orders", "end")
        for _ in range(60):
            producer.send("orders", bytes(800))
            runner.advance(1000)
        assert broker.store.queue_range("orders", 0)[0] > 0
    assert ("never-read" in by_kind(tmp_path / "store")) is not is_read


def test_a_hot_key_is_found_after_retention(tmp_path: Path) -> None:
    config = StoreConfig.tiny(commitlog_file_size=4096, max_message_size=2048, max_total_size=6 * 4096)
    runner = ManualRunner()
    with Broker.open(tmp_path / "store", store_config=replace(config, keep_unconsumed=False), runner=runner) as broker:
        broker.create_topic("orders", 4)
        broker.set_group("G")
        producer = Producer(broker, "P")
        for queue_id in range(4):
            producer.send("orders", b"x", queue=queue_id)
        broker.reset_group("G", "orders", 1)
        for _ in range(60):
            producer.send("orders", bytes(800), keys="cust-42", queue=1)
            runner.advance(1000)
        runner.advance(1000)  # files are deleted at most a second after the flush of their queues
        assert broker.store.queue_range("orders", 1)[0] > 30
    found = by_kind(tmp_path / "store", Thresholds(normal_lag=5))
    assert (found["hot-key"].evidence["key"], found["hot-key"].evidence["share"]) == ("cust-42", 1.0)
    assert found["hot-key"].evidence["looked_at"] == found["hot-key"].evidence["lag"]
    assert "uneven-lag" not in found


def test_the_largest_of_equal_severity_comes_first(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "store", SMALL, clock=ManualClock(START_MS)) as store:
        for topic, count in (("A", 20), ("B", 60), ("C", 40)):
            for _ in range(count):
                store.append(Message(topic, b"x"))
        tables = BrokerTables.open(str(tmp_path / "config"))
        for topic in "ABC":
            tables.set_consumer_offset(topic, "G", 0, 0)
        found = diagnose(StoreView.over(store, tables), Thresholds(normal_lag=5, large_lag=10))
    assert [(one.kind, one.evidence["lag"]) for one in found] == [("backlog", 60), ("backlog", 40), ("backlog", 20)]


# Damage of a folder is a finding, before everything else.


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a closed store whose group has consumed nothing of two queues; one has a frequent key."""
    path = tmp_path / "store"
    with Broker.open(path) as broker:
        broker.create_topic("T", 4)
        broker.set_group("G")
        broker.reset_group("G", "T", "begin")
        for number in range(120):
            broker.store.append(Message("T", b"body %d" % number, keys=["hot"] if number % 2 else []), 1)
        broker.store.append(Message("T", b"the only one"), 0)
    return path


def kinds(path: Path, *, check: bool | None = None) -> list[str]:
    return [one.kind for one in diagnose(path, Thresholds(old_s=1e9), check=check)]


def test_a_changed_byte_of_a_body_comes_first(store: Path) -> None:
    log = min((store / "commitlog").iterdir())
    raw = log.read_bytes()
    log.write_bytes(raw.replace(b"body 7", b"bodi 7", 1))
    (first, *_) = diagnose(store)
    assert (first.kind, first.severity) == ("damage", "error")
    assert "body checksum" in first.what
    assert kinds(store, check=False)[0] == "damage"


@pytest.mark.parametrize("check", [True, False])
def test_a_missing_queue_is_found_with_and_without_verify(store: Path, check: bool) -> None:
    shutil.rmtree(store / "consumequeue" / "T" / "1")
    found = [one for one in diagnose(store, check=check) if one.kind == "damage"]
    assert [one.evidence["kinds"] for one in found] == [["missing"]]


@pytest.mark.slow
def test_a_sound_folder_has_no_damage_even_after_a_crash(store: Path) -> None:
    assert "damage" not in kinds(store)
    with MessageStore.open(store) as writer:
        writer.append(Message("T", b"x"), 2)
        for check in (True, False):
            assert "damage" not in kinds(store, check=check)
    (store / "abort").touch()
    for check in (True, False):
        assert "damage" not in kinds(store, check=check)


def test_a_folder_shows_the_hot_key_of_a_queue_that_lags(store: Path) -> None:
    found = {one.kind: one for one in diagnose(store)}
    assert found["hot-key"].subject == "group G, topic T, queue 1"
    assert (found["hot-key"].evidence["key"], found["hot-key"].evidence["share"]) == ("hot", 0.5)
    assert set(found) == {"hot-key", "backlog"}


def test_findings_are_the_same_without_arrow(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings read samples as rows, for which Arrow would only take longer to load."""
    found = [*diagnose(store), *design_check(store)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert [*diagnose(store), *design_check(store)] == found
    assert len(found) >= 2
