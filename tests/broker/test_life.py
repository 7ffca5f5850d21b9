"""Counters and tables of a broker, and the failures that it survives."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from librmq.broker import Broker, BrokerConfig
from librmq.client import TransactionProducer
from librmq.client.producer import Producer
from librmq.config import StoreConfig
from librmq.consumer import SimpleConsumer
from librmq.diagnosis import diagnose
from librmq.errors import BrokerBusyError, BrokerError, MessageIllegalError, NoRouteError, StoreError, StoreIOError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.java import json as java_json
from librmq.message import record
from librmq.message.message import Message
from librmq.metrics import Metrics
from librmq.protocol import (
    EndTransaction,
    ResponseCode,
    SendBack,
    SendBatch,
    SendMessage,
    SendStatus,
    Subscription,
    TransactionState,
    UpdateOffset,
)
from librmq.runtime import ManualRunner
from librmq.scheduling.relay import send_at
from librmq.scheduling.timer_config import TimerConfig
from librmq.store import MessageStore
from librmq.store.format.broker_tables import BrokerTables, group_row
from librmq.testing import Kit
from tests.broker.parties import HOST, beat, manual, opened, pull, send
from tests.file_seams import FailingFiles


def test_hops_count_neither_in_nor_out_of_levels() -> None:
    metrics = Metrics()
    with Broker.temporary(BrokerConfig(hops=True), runner=ManualRunner(), metrics=metrics) as broker:
        Producer(broker, "p").send("T", b"x", delay=5 * 3600)
        manual(broker).advance(6 * 3_600_000)
        assert metrics.snapshot()["messages_in"]["T",] == 1
        assert not metrics.snapshot().keys() & {"delayed_in", "delayed_out"}


def test_an_expired_receive_counts_as_a_dead_letter_of_its_topic() -> None:
    metrics = Metrics()
    with Broker.temporary(runner=ManualRunner(), metrics=metrics) as broker:
        broker.set_group("g", retry_max_times=1)
        send(broker, "T")
        with SimpleConsumer(broker, "g") as consumer:
            consumer.subscribe("T")
            for _ in range(3):
                consumer.receive(1, invisible=10, wait=0)
                manual(broker).advance(11_000)
        assert metrics.snapshot()["dead_letters"] == {("T", "g"): 1}


def test_events_are_counted() -> None:
    metrics = Metrics()
    broker = Broker.temporary(runner=ManualRunner(), metrics=metrics)
    runner = manual(broker)
    first = send(broker, "T", b"12345")
    broker.call(SendBatch("p", (Message("T", b"1"), Message("T", b"2")), 0, 1, HOST))
    records = list(broker.messages("T"))
    pull(broker, "T", 1)
    pull(broker, "T", 3, notify=lambda: None)
    send(broker, "T", delay_level=30)
    broker.call(SendBack("g", first.physical_offset, 1))
    broker.call(SendBack("g", first.physical_offset, -1))
    beat(broker, Subscription("T"))
    beat(broker, Subscription("T"), client_id="c2")
    half = Message("T", b"x")
    half.properties |= {"TRAN_MSG": "true", "PGROUP": "p"}
    for state in (TransactionState.COMMIT, TransactionState.ROLLBACK):
        where = broker.call(SendMessage("p", half, 0, runner.now_ms(), HOST))
        broker.call(EndTransaction("p", state, where.queue_offset, where.physical_offset, ""))
    broker._sending._check_busy("T")
    runner.manual_clock.advance(seconds=2)
    with broker.store.appender.lock.mutex, pytest.raises(BrokerBusyError):
        broker._sending._check_busy("T")
    found = metrics.snapshot()
    runner.advance(2_000)
    later = metrics.snapshot()
    assert found["messages_in"]["T",] == 4  # including the committed one
    assert found["bytes_in"]["T",] >= sum(message.size for message in records)
    assert found["messages_out"] == {("T", "g"): 2}
    assert found["bytes_out"] == {("T", "g"): records[1].size + records[2].size}
    assert found["delayed_in"] == {("18",): 1, ("1",): 1}
    assert (found.get("delayed_out"), later["delayed_out"]) == (None, {("1",): 1})
    assert later["messages_in"]["%RETRY%g",] == 1
    assert found["send_backs"] == found["dead_letters"] == {("T", "g"): 1}
    assert found["transactions"] == {("T", "commit"): 1, ("T", "rollback"): 1}
    assert found["clients"] == {("g",): 2}
    assert found["busy"] == {("T",): 1}
    assert found["held_pulls"] == {(): 0}  # the committed message has answered it
    assert found["log_bytes"] == {(): broker.store.log.end} or later["log_bytes"] == {(): broker.store.log.end}
    broker.remove_client("c1")
    broker.remove_client("c2")
    broker.close()
    assert not metrics.snapshot().keys() & {"clients", "held_pulls", "log_bytes", "disk_used"}


def delayed(broker: Broker) -> None:
    broker.call(SendMessage("p", Message("T", b"x", delay_level=1), 0, broker.runner.now_ms(), HOST))


def timed(broker: Broker) -> None:
    message = Message("T", b"x")
    message.properties["TIMER_DELAY_SEC"] = "3600"
    broker.call(SendMessage("p", message, 0, broker.runner.now_ms(), HOST))


def ended(broker: Broker) -> None:
    for number in range(2):
        message = Message("T", b"x", unique_key=f"U{number}")
        message.properties |= {"TRAN_MSG": "true", "PGROUP": "p"}
        half = broker.call(SendMessage("p", message, 0, broker.runner.now_ms(), HOST, 4))
        broker.call(EndTransaction("p", TransactionState.ROLLBACK, half.queue_offset, half.physical_offset, ""))
        if number == 0:
            manual(broker).advance(200_000)  # lets the first check create its topics


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda broker: broker.call(UpdateOffset("g", "T", 0, 1)), "the progress of consumers"),
        (delayed, "the progress of the delay levels"),
        (timed, "the timer's progress"),
        (ended, "the progress of the check of half messages"),
        (
            lambda broker: broker.call(SendMessage("p", send_at(Message("T", b"x"), 1 << 60), 0, 1, HOST)),
            "the relay's progress",
        ),
    ],
)
def test_a_disk_that_refuses_progress_is_reported_once(
    change: Callable[[Broker], object], what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving progress logs the first failure, tries again, and logs the recovery."""
    caplog.set_level("INFO", "librmq.runtime")
    files, runner = MemoryFiles(), ManualRunner()
    with opened(files, runner, hops=True, timers=TimerConfig(slots_total=86_400, timer_log_file_size=1024)) as broker:
        change(broker)

        def refused(*_: object) -> None:
            raise StoreIOError("write", "/b", OSError(errno.ENOSPC, "full"))

        with monkeypatch.context() as patched:
            patched.setattr(broker.store, "flush", refused)
            patched.setattr(files, "write", refused)
            runner.advance(100_000)
        assert [line.message for line in caplog.records] == [
            f"{what}: saving fails; next try in 10000 ms: /b: write: full"
        ]
        runner.advance(100_000)
        assert [line.message for line in caplog.records[1:]] == [f"{what}: saving works again"]


def test_a_new_brokers_tables() -> None:
    files, runner = MemoryFiles(), ManualRunner()
    opened(files, runner).close()
    for name, table in (
        ("topics", {"dataVersion": {"counter": 0, "timestamp": 0}}),
        ("subscriptionGroup", {"dataVersion": {"counter": 0, "timestamp": 0}}),
        ("consumerOffset", {"offsetTable": {}}),
        ("delayOffset", {"offsetTable": {}}),
        ("consumerFilter", {"filterDataByTopic": {}}),
    ):
        assert java_json.loads(files.read(f"/b/config/{name}.json")).items() >= table.items()
    before = {name: files.read(f"/b/config/{name}.json") for name in ("topics", "subscriptionGroup")}
    opened(files, runner).close()
    assert before == {name: files.read(f"/b/config/{name}.json") for name in before}


def test_progress_beyond_the_ends_of_queues_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A loss of power can take the messages of very many queues."""
    files, runner = MemoryFiles(), ManualRunner()
    with opened(files, runner) as broker:
        broker.create_topic("t", 30)
        broker.set_group("g")
        for queue_id in range(30):
            broker.call(UpdateOffset("g", "t", queue_id, 7))
    caplog.set_level("INFO", "librmq.broker")
    with opened(files, runner) as broker:
        assert set(broker.consumer_offsets("g", "t").values()) == {0}
    (line,) = [record.message for record in caplog.records if "positions" in record.message]
    assert line.startswith("30 positions of groups were beyond")
    assert "g in t/0, 7; g in t/1, 7" in line
    assert not [record for record in caplog.records if "goes back" in record.message]


@pytest.mark.parametrize("files", [None, DiskFiles()], ids=["default", "given"])
def test_disk_usage_is_ignored_with_a_manual_clock(
    files: DiskFiles | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskFiles, "used_ratio", lambda files, path: 0.99)
    runner = ManualRunner()
    with Broker.open(tmp_path / "broker", runner=runner, files=files, store_config=StoreConfig.tiny()) as broker:
        for _ in range(2):
            send(broker, "T")
            runner.advance(120_000)
        assert runner.next_due_ms() is None


def test_an_opening_that_is_interrupted_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files, runner, metrics = MemoryFiles(), ManualRunner(), Metrics()
    with Broker.open("/broker", runner=runner, files=files) as broker:
        Producer(broker, "shop").send("T", b"later", delay_level=1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("librmq.broker._context.BrokerContext.show_gauges", interrupt)
        with pytest.raises(KeyboardInterrupt):
            Broker.open("/broker", runner=runner, files=files, metrics=metrics)
    runner.advance(60_000)
    assert not caplog.records
    assert not metrics.snapshot()
    with Broker.open("/broker", runner=runner, files=files, metrics=metrics) as broker:
        runner.advance(60_000)
        assert [message.body for message in broker.messages("T")] == [b"later"]


def test_a_closed_broker_is_not_a_route() -> None:
    broker = opened()
    told = []
    broker.watch(lambda: told.append(broker.broker_names()))
    broker.create_topic("T", 3)
    broker.close()
    assert told == [("broker-a",), ()]
    assert [data.read_queues for data in broker.topic_route("T")] == [3]
    with pytest.raises(NoRouteError):
        broker.endpoint("broker-b")


def test_a_closed_broker_shows_its_hooks() -> None:
    with Broker.temporary() as broker:
        pass
    assert (broker.discard_hooks, broker.delay_offsets) == ([], {})


def test_a_group_that_may_not_be_made() -> None:
    with opened(auto_create_group=False) as broker, pytest.raises(BrokerError):
        beat(broker, Subscription("T"))
    with opened() as broker:
        for wrong in (-2, 1 << 31, True):
            with pytest.raises(BrokerError, match=r"^retry_max_times: expected a whole number from -1 to 2147483647, "):
                broker.set_group("g", retry_max_times=wrong)
        with pytest.raises(BrokerError, match=r"^consumes: expected True or False, found 'no'"):
            broker.set_group("g", consumes="no")  # type: ignore[arg-type]
        assert "g" not in broker.groups()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "group: expected a name, found an empty text"),
        (5, "group: expected text, found 5"),
        ("a b", r"group 'a b' may only contain letters"),
        ("é" * 121, "group 'é+'… has 121 characters; expected at most 120$"),
    ],
    ids=["empty", "number", "blank", "long"],
)
def test_a_bad_name_of_a_group_is_refused(name: Any, text: str) -> None:
    with opened() as broker, pytest.raises(MessageIllegalError, match=f"^{text}"):
        broker.set_group(name)


def test_settings_of_a_group_that_are_not_given_remain() -> None:
    files = MemoryFiles()
    with opened(files) as broker:
        broker.set_group("g", retry_max_times=3, is_ordered=True)
        broker.set_group("g", consumes=False)
        broker.set_group("g", is_ordered=False, broadcasts=False)
        assert broker.groups()["g"] == 3
        send(broker, "T")
        with pytest.raises(BrokerError, match="set_group with consumes=True"):
            pull(broker, "T")
    groups = java_json.loads(files.read("/b/config/subscriptionGroup.json"))["subscriptionGroupTable"]
    off = {"consumeEnable": False, "consumeBroadcastEnable": False, "consumeMessageOrderly": False}
    assert groups["g"] == {**group_row("g", 3), **off}


def configured(files: MemoryFiles, name: str, table: str, rows: dict[str, dict[str, object]]) -> MemoryFiles:
    """Return files that contain one table of a broker's configuration."""
    files.make_folder("/b")
    files.make_folder("/b/config")
    files.write(f"/b/config/{name}.json", java_json.dumps({table: rows}).encode())
    return files


def test_unknown_fields_of_a_table_are_kept() -> None:
    topic = {"perm": 6, "order": True, "topicFilterType": "MULTI_TAG", "attributes": {"a": "b"}}
    files = configured(MemoryFiles(), "topics", "topicConfigTable", {"T": topic})
    configured(files, "subscriptionGroup", "subscriptionGroupTable", {"g": {"brokerId": 7, "retryQueueNums": 0}})
    with opened(files) as broker:
        assert broker.topics()["T"].read_queues == 16
        sent = send(broker, "T", tags="a")
        stored = broker.store.message_at(sent.physical_offset)
        assert stored is not None
        assert stored.sys_flag == record.MULTI_TAGS
        broker.call(SendBack("g", sent.physical_offset, 0))  # the group does not retry
        assert broker.store.log.end == stored.size
        broker.create_topic("T", 3)
        broker.set_group("g", retry_max_times=2)
    topics = java_json.loads(files.read("/b/config/topics.json"))["topicConfigTable"]
    assert topics["T"] == {**topic, "readQueueNums": 3, "writeQueueNums": 3}
    groups = java_json.loads(files.read("/b/config/subscriptionGroup.json"))["subscriptionGroupTable"]
    assert groups["g"] == {"brokerId": 7, "retryQueueNums": 0, "retryMaxTimes": 2}


def test_a_message_sent_back_keeps_its_bytes_and_its_host() -> None:
    files = MemoryFiles()
    body = record.compress_body(bytes(5_000))
    with opened(files, store=StoreConfig.tiny(store_host="10.0.0.1:10911")) as broker:
        sent = broker.call(
            SendMessage("p", Message("T", body), 0, 1, HOST, record.COMPRESSED | record.COMPRESSION_ZLIB)
        )
    with opened(files, store=StoreConfig.tiny(store_host="10.0.0.2:10911")) as broker:
        broker.call(SendBack("g", sent.physical_offset, -1))
        (dead,) = broker.dead_letters("g")
        assert (dead.stored_body, dead.body, dead.store_host) == (body, bytes(5_000), ("10.0.0.1", 10911))


@pytest.mark.rmq(store_config=StoreConfig.tiny(durability="sync"))
def test_callers_that_wait_for_the_device(broker: Broker) -> None:
    send(broker, "T", wait_store_ok=False)
    assert broker.store.writer.durability.commit.flushed < broker.store.log.end
    assert send(broker, "T").status is SendStatus.SEND_OK
    assert broker.store.writer.durability.commit.flushed == broker.store.log.end


def test_a_message_that_may_not_have_reached_the_device() -> None:
    files = FailingFiles(MemoryFiles())
    broker = opened(files, store=StoreConfig.tiny(durability="sync"))
    send(broker, "T")
    files.fail("flush")
    assert send(broker, "T").status is SendStatus.FLUSH_DISK_TIMEOUT
    with pytest.raises(BrokerError) as caught:
        send(broker, "T")
    assert caught.value.code == ResponseCode.SERVICE_NOT_AVAILABLE
    broker.abandon()


def test_with_a_manual_runner_a_step_flushes_the_store(rmq: Kit, broker: Broker) -> None:
    send(broker, "T")
    rmq.advance(ms=10_500)
    assert broker.store.writer.durability.commit.flushed == broker.store.log.end


@pytest.mark.rmq(broker_config=BrokerConfig(auto_create_topic=False))
def test_a_retry_topic_is_made_in_any_case(broker: Broker) -> None:
    send(broker, "%RETRY%g", max_reconsume_times=1)
    assert broker.topics()["%RETRY%g"].write_queues == 1


def test_a_store_that_never_had_a_broker_keeps_its_topics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "librmq.broker")
    with MessageStore.open(tmp_path, StoreConfig.tiny()) as store:
        for number in range(6):
            store.append(Message("orders", b"%d" % number), number % 3)
    consumed: list[bytes] = []
    for _ in range(2):
        with Broker.open(tmp_path, runner=ManualRunner()) as broker:
            (data,) = broker.topic_route("orders")
            assert (data.read_queues, data.write_queues) == (3, 3)
            consumed += [message.body for message in broker.consume("orders", group="g")]
    assert sorted(consumed) == [b"%d" % number for number in range(6)]
    assert [line.levelname for line in caplog.records if "no topics.json" in line.getMessage()] == ["INFO"]


def test_topics_that_the_table_lacks_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Broker.open(tmp_path, store_config=StoreConfig.tiny(), runner=ManualRunner()) as broker:
        broker.create_topic("listed", 1)
        broker.store.append(Message("orders", b"x"), 1)
    with Broker.open(tmp_path, runner=ManualRunner()) as broker:
        assert broker.topic_route("orders") == ()
        (finding,) = diagnose(broker)
        broker.create_topic("orders", 2)
        assert [message.body for message in broker.consume("orders", group="g")] == [b"x"]
        assert diagnose(broker) == []
    assert (finding.kind, finding.subject, finding.evidence["queues"]) == ("unlisted-topic", "topic orders", 2)
    assert [line.levelname for line in caplog.records if "topics.json lacks" in line.getMessage()] == ["WARNING"]


@pytest.mark.parametrize("key", ["x", "", "@", "a@", "@b", "a@b@c", "5"])
def test_progress_of_no_topic_and_group_is_kept_and_counts_for_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    with Broker.open(tmp_path, runner=ManualRunner()) as broker:
        broker.create_topic("orders", 1)
        broker.store.append(Message("orders", b"x"), 0)
        assert [message.body for message in broker.consume("orders", group="g")] == [b"x"]
    tables = BrokerTables.open(str(tmp_path / "config"))
    tables.offsets.set(key, {0: 9})
    tables.persist(1)
    with Broker.open(tmp_path, runner=ManualRunner()) as broker:
        assert broker.consumer_offset("g", "orders") == 1
        (finding,) = diagnose(broker)
    assert (finding.kind, finding.evidence["keys"]) == ("unknown-progress", [key])
    assert BrokerTables.open(str(tmp_path / "config")).offsets.rows[key] == {0: 9}
    assert "keys are no topic@group" in caplog.text


def test_progress_of_what_does_not_exist_is_bounded(broker: Broker) -> None:
    broker.create_topic("orders", 1)
    for number in range(1_000):
        broker.call(UpdateOffset(f"group{number}", "orders", 0, 1))
    with pytest.raises(BrokerError, match="group 'another' or topic 'orders' does not exist, and progress of 1,000"):
        broker.call(UpdateOffset("another", "orders", 0, 1))
    broker.call(UpdateOffset("group7", "orders", 0, 2))
    broker.set_group("another")
    broker.call(UpdateOffset("another", "orders", 0, 1))
    with pytest.raises(BrokerError, match="progress of 1,000"):
        broker.call(UpdateOffset("third", "orders", 0, 1))
    broker.set_group("group3")  # so its progress is of something that exists
    broker.call(UpdateOffset("third", "orders", 0, 1))
    with pytest.raises(BrokerError, match="progress of 1,000"):
        broker.call(UpdateOffset("fourth", "orders", 0, 1))
    with pytest.raises(MessageIllegalError, match="group 'x@y': expected 1 to 255 letters"):
        broker.call(UpdateOffset("x@y", "orders", 0, 1))


def waiting_in(path: Path, runner: ManualRunner) -> None:
    """Leave messages that wait for topics of their own: by a level, by the timer, and as a half."""
    with Broker.open(path, runner=runner) as broker:
        producer = Producer(broker, "p")
        for topic in ("by_level", "by_timer"):
            broker.create_topic(topic, 2)
        producer.send("by_level", b"x", delay_level=5, queue=1)
        producer.send("by_timer", b"x", delay=77)
        transactions = TransactionProducer(broker, "t", check=lambda message: TransactionState.COMMIT)
        transactions.send_in_transaction(Message("by_half", b"x"), execute=lambda *_: TransactionState.UNKNOWN)
        transactions.shutdown()


@pytest.mark.parametrize("is_lost", [True, False])
def test_topics_of_messages_that_wait_are_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_lost: bool
) -> None:
    runner, topics = ManualRunner(), ("by_level", "by_timer", "by_half")
    waiting_in(tmp_path, runner)
    table = tmp_path / "config/topics.json"
    if is_lost:
        for path in table.parent.glob("topics.json*"):
            path.unlink()
    else:
        tables = BrokerTables.open(str(table.parent))
        for topic in topics:
            tables.topics.remove(topic)
        tables.persist(1)
    with Broker.open(tmp_path, runner=runner) as broker:
        routes = {topic: [data.write_queues for data in broker.topic_route(topic)] for topic in topics}
        producer = TransactionProducer(broker, "t", check=lambda message: TransactionState.COMMIT)
        producer.start()
        runner.advance(600_000)
        if not is_lost:
            assert not any(routes.values())
            for topic in topics:
                assert f"topics.json lacks topic {topic}, into which a message was delivered" in caplog.text
                broker.create_topic(topic, 8)
        else:
            assert routes["by_level"] == [2]
            assert all(routes.values())
        for topic in topics:
            assert [message.body for message in broker.consume(topic, group="g")] == [b"x"]
        producer.shutdown()


def test_a_kill_before_the_table_of_topics_is_written_hides_no_copy_of_a_group(tmp_path: Path) -> None:
    runner = ManualRunner()
    broker = Broker.open(tmp_path, runner=runner)
    broker.create_topic("orders", 1)
    broker.set_group("g")
    with Producer(broker, "p") as producer:
        producer.send("orders", b"x")
    consumer = SimpleConsumer(broker, "g")
    consumer.subscribe("orders")
    consumer.start()
    assert consumer.receive(wait=0, invisible=10)
    table = tmp_path / "config/topics.json"
    before = table.read_bytes()
    runner.advance(10_000)  # the copy is stored
    broker.abandon()
    table.write_bytes(before)  # the thread that writes tables has not come so far
    with Broker.open(tmp_path, runner=runner) as broker, SimpleConsumer(broker, "g") as consumer:
        assert broker.lag("g") == 1
        consumer.subscribe("orders")
        assert [message.body for message in consumer.receive(wait=0)] == [b"x"]


@pytest.mark.parametrize("leave", [shutil.rmtree, lambda path: path.rename(f"{path}-away")], ids=["deleted", "moved"])
def test_a_store_whose_folder_is_gone_makes_no_part_of_it_again(
    leave: Callable[[Path], object], tmp_path: Path
) -> None:
    """What it left there would keep the next opening from making a new store."""
    place = tmp_path / "store"
    runner = ManualRunner()
    broker = Broker.open(place, runner=runner)
    producer = Producer(broker, "shop").start()
    producer.send("orders", b"o-1")
    leave(place)
    with pytest.raises(BrokerError, match="No such file or directory"):
        producer.send("returns", b"o-2")
    runner.advance(60_000)
    producer.shutdown()
    with pytest.raises(StoreError):
        broker.close()
    assert not place.exists()
    with Broker.open(place, runner=ManualRunner()) as broker, Producer(broker, "shop") as producer:
        producer.send("orders", b"o-1")
