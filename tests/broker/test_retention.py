"""What happens to unconsumed messages when the log reaches its total size."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from librmq.broker import Broker
from librmq.broker.config import BrokerConfig
from librmq.client.producer import Producer
from librmq.config import StoreConfig
from librmq.consumer import PullConsumer, PushConsumer, SimpleConsumer
from librmq.errors import BrokerError, DiskFullError, StoreFullError
from librmq.files import MemoryFiles
from librmq.message import Message
from librmq.metrics import Metrics
from librmq.protocol import ConsumeFrom, EndTransaction, ResponseCode, SendMessage, TransactionState
from librmq.runtime import ManualRunner
from librmq.scheduling.timer_config import TimerConfig
from librmq.store import MessageStore, verify
from librmq.store.retention import Unread, UnreadInFile
from tests.file_seams import FailingFiles, RecordingFiles

FILE = 4096
BODY = bytes(800)  # a log file holds four records
KEEP = StoreConfig.tiny(
    commitlog_file_size=FILE, max_message_size=2048, max_total_size=4 * FILE, flush_thorough_interval_consumequeue_s=1
)
CONFIG = KEEP.with_settings({"keep_unconsumed": False})


class Shop:
    """A broker with a manual clock, a topic with one queue, and a producer."""

    def __init__(self, store: StoreConfig | None = CONFIG, **config: Any) -> None:
        self.files = MemoryFiles()
        self.runner = ManualRunner()
        self.metrics = Metrics()
        self.store_config = store
        self.config = BrokerConfig(**config)
        self.open()
        self.broker.create_topic("orders", 1)

    def open(self) -> None:
        self.broker = Broker.open(
            "/store",
            self.config,
            store_config=self.store_config,
            runner=self.runner,
            files=self.files,
            metrics=self.metrics,
        )
        self.producer = Producer(self.broker, "shop")

    def reopen(self) -> None:
        self.producer.shutdown()
        self.broker.close()
        self.open()

    def send(self, count: int, topic: str = "orders", **fields: Any) -> None:
        """Send messages, and do the work that is due after each."""
        for _ in range(count):
            self.producer.send(topic, BODY, **fields)
            self.runner.advance(2000)

    def fill(self, most: int = 100, topic: str = "orders") -> int:
        """Send until a message is refused; return the number of stored messages."""
        for count in range(most):
            try:
                self.send(1, topic)
            except BrokerError as error:
                if error.code != ResponseCode.SERVICE_NOT_AVAILABLE:
                    raise
                return count
        return most

    def consume(self, group: str, count: int, topic: str = "orders") -> int:
        """Consume up to ``count`` messages as a group; return the number consumed."""
        done = 0
        with PullConsumer(self.broker, group, consume_from=ConsumeFrom.FIRST, pull_batch_size=1) as consumer:
            consumer.subscribe(topic)
            while done < count and consumer.poll():
                done += 1
            consumer.commit()
        return done

    @property
    def lost(self) -> dict[tuple[str, ...], float]:
        return self.metrics.snapshot().get("unread_deleted", {})


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and "before they were consumed" in record.getMessage()
    ]


# ------------------------------------------------------------------------------------- they are deleted, with a report


def test_deleting_unread_messages_logs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop()
    shop.send(4)
    for group, count in (("bills", 1), ("mails", 3), ("stock", 4)):
        assert shop.consume(group, count) == count
    shop.send(20)
    found = warnings(caplog)
    deleted = shop.broker.store.log.begin // FILE
    assert deleted >= 3
    assert len(found) == 3 * deleted - 1  # stock has consumed all messages of the first file
    of_first = [each for each in found if "/commitlog/00000000000000000000 " in each]
    assert [re.findall(r"group (\w+): (\d) message", each) for each in of_first] == [[("bills", "3")], [("mails", "1")]]
    assert "3 of orders/0" in of_first[0]
    assert "keep_unconsumed=True" in of_first[0]
    read = 4 * deleted
    assert shop.lost == {("orders", "bills"): read - 1, ("orders", "mails"): read - 3, ("orders", "stock"): read - 4}


def test_no_warning_without_unconsumed_messages(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop()
    shop.broker.create_topic("unread", 1)
    for _ in range(10):
        shop.send(2)
        shop.send(1, "unread")
        assert shop.consume("bills", 2) == 2
    assert shop.broker.store.log.begin
    assert warnings(caplog) == []
    assert shop.lost == {}


def test_a_topic_that_no_group_has_read_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop()
    shop.broker.create_topic("unread", 1)
    shop.broker.create_topic("watched", 1)
    with PullConsumer(shop.broker, "watch", consume_from=ConsumeFrom.LAST) as consumer:
        consumer.subscribe("watched")
        for _ in range(10):
            shop.send(1)
            shop.send(1, "unread")
            shop.send(1, "watched")
            assert shop.consume("bills", 1) == 1
    texts = [record.getMessage() for record in caplog.records if "no group has ever read" in record.getMessage()]
    assert len(texts) == 1
    assert texts[0].startswith("topic unread: ")
    begin = shop.broker.store.queue_range("unread", 0)[0]
    assert begin
    assert shop.metrics.snapshot()["never_read_deleted"] == {("unread",): begin}
    assert "unread" not in {topic for topic, _ in shop.lost}


def test_a_running_group_without_progress_counts(caplog: pytest.LogCaptureFixture) -> None:
    """Its listener hangs on the first message, so the group has no progress at all."""
    shop = Shop()
    with PullConsumer(shop.broker, "bills", consume_from=ConsumeFrom.FIRST) as consumer:
        consumer.subscribe("orders")
        shop.send(30)
        assert shop.lost.keys() == {("orders", "bills")}
    assert warnings(caplog)


def test_retries_count_as_unread() -> None:
    shop = Shop()
    consumer = PushConsumer(shop.broker, "bills", consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("orders", lambda message: 1 / 0)
    with consumer:
        shop.send(2)
    shop.runner.advance(60_000)  # the retries are in the group's topic, which nothing reads
    assert len(list(shop.broker.messages("%RETRY%bills"))) == 2
    shop.broker.create_topic("other", 1)
    shop.send(30, "other")
    assert shop.lost["%RETRY%bills", "bills"] == 2


def test_delayed_messages_count_as_unread(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop()
    shop.send(1, delay=3600)
    shop.send(1, delay=1)  # this one is delivered
    shop.send(30)
    assert shop.lost["SCHEDULE_TOPIC_XXXX", "delay levels"] == 1
    assert len(warnings(caplog)) == 1


def test_timers_count_as_unread() -> None:
    shop = Shop(timers=TimerConfig())
    shop.send(1, delay=5000)  # 5,000 s is no level
    shop.send(1, delay=13)
    shop.runner.advance(20_000)
    shop.send(30)
    assert shop.lost == {("rmq_sys_wheel_timer", "timers"): 1}


def half(shop: Shop, number: int) -> Callable[[TransactionState], None]:
    message = Message("orders", BODY, unique_key=f"U{number}")
    message.properties |= {"TRAN_MSG": "true", "PGROUP": "p"}
    sent = shop.broker.call(SendMessage("p", message, 0, shop.runner.now_ms(), ("127.0.0.1", 1), 4))

    def end(state: TransactionState) -> None:
        shop.broker.call(EndTransaction("p", state, sent.queue_offset, sent.physical_offset, ""))

    return end


def test_open_halves_count_as_unread() -> None:
    """Halves whose transaction has ended do not count, even before a check has passed them."""
    shop = Shop()
    ends = [half(shop, number) for number in range(4)]
    ends[0](TransactionState.COMMIT)
    ends[2](TransactionState.ROLLBACK)
    for _ in range(30):  # no check runs in between
        shop.producer.send("orders", BODY)
    shop.broker.store.flush()
    shop.runner.advance(1500)
    assert shop.broker.store.log.begin
    assert shop.lost == {("RMQ_SYS_TRANS_HALF_TOPIC", "CID_RMQ_SYS_TRANS"): 2}


# ---------------------------------------------------------------------------------------- they are kept, with a refusal


def test_sends_are_refused_until_the_group_has_consumed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shop = Shop(KEEP)
    shop.send(1)
    shop.consume("bills", 1)
    taken = shop.fill()
    assert 14 <= taken <= 17  # four files of four records, and one in a new file
    with pytest.raises(BrokerError) as caught:
        shop.producer.send("orders", BODY)
    assert isinstance(caught.value, StoreFullError)
    for part in ("max_total_size, 16384 bytes", "'bills'", "3 messages", "offset 1 of orders/0", "reset_group('bills'"):
        assert part in str(caught.value)
    assert sum("message refused" in r.getMessage() for r in caplog.records) == 1  # once, although two were refused
    assert shop.consume("bills", 100) == taken  # nothing was lost
    assert shop.fill(most=8) == 8
    assert shop.broker.store.log.begin >= FILE
    assert sum("messages are accepted again" in r.getMessage() for r in caplog.records) == 1
    assert shop.lost == {}
    assert warnings(caplog) == []


def test_a_disk_that_others_fill_costs_no_unread_message(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop(KEEP)
    shop.send(1)
    shop.consume("bills", 1)
    shop.send(8)
    assert not caplog.records
    shop.files.disk_used_ratio = 0.86
    shop.broker.store.delete_expired()  # looks at the disk, which a manual clock does not do periodically
    shop.send(1)
    shop.runner.advance(3_600_000)
    assert shop.broker.store.log.begin == 0
    (warning,) = [each.getMessage() for each in caplog.records]
    for part in ("the disk is 86% full", "'bills'", "librmq skip /store --group bills --topic orders"):
        assert part in warning
    shop.files.disk_used_ratio = 0.91
    with pytest.raises(DiskFullError, match=r"91\.0% full") as caught:  # immediately, whenever the last look was
        shop.producer.send("orders", BODY)
    assert isinstance(caught.value, BrokerError)
    with pytest.raises(DiskFullError):
        shop.producer.send_batch([Message("orders", b"1"), Message("orders", b"2")])
    shop.files.disk_used_ratio = 0.5
    shop.producer.send("orders", BODY)
    assert shop.consume("bills", 100) == 10
    assert warnings(caplog) == []


def test_delayed_messages_go_on_when_the_disk_has_room_again() -> None:
    """Although no producer sends, which would look at the disk."""
    shop = Shop(KEEP)
    shop.producer.send("orders", BODY, delay=7200)
    shop.runner.advance(7_000_000)
    shop.files.disk_used_ratio = 0.95
    with pytest.raises(DiskFullError):
        shop.producer.send("orders", BODY)
    shop.runner.advance(600_000)
    assert shop.consume("bills", 100) == 0
    shop.files.disk_used_ratio = 0.5
    shop.runner.advance(60_000)
    assert shop.consume("bills", 100) == 1


def test_a_device_without_blocks_is_a_full_disk_to_a_producer() -> None:
    files = FailingFiles(MemoryFiles())
    with (
        Broker.open("/store", store_config=KEEP, runner=ManualRunner(), files=files) as broker,
        Producer(broker, "shop", retries=0) as producer,
    ):
        broker.create_topic("orders", 1)
        files.fail("create")
        with pytest.raises(DiskFullError, match="create"):
            producer.send("orders", BODY)
        producer.send("orders", BODY)


def test_a_warning_names_the_holder_before_sends_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop(KEEP)
    shop.send(1)
    shop.consume("bills", 1)
    shop.send(10)
    assert not caplog.records
    shop.send(4)
    (warning,) = [each.getMessage() for each in caplog.records]
    for part in ("of max_total_size", "'bills'", "librmq skip /store --group bills --topic orders"):
        assert part in warning
    shop.broker.reset_group("bills", "orders", "end")
    shop.send(8)
    assert len(caplog.records) == 1


def test_a_topic_that_no_group_has_read_holds_nothing() -> None:
    shop = Shop(KEEP)
    assert shop.fill() == 100
    assert shop.broker.store.log.begin
    shop.broker.close()
    with MessageStore.open("/store", files=shop.files, clock=shop.runner.clock, background=False) as store:
        for _ in range(40):  # nor where no broker has the store open
            begin = store.log.begin
            store.append(Message("orders", BODY))
            shop.runner.manual_clock.advance(seconds=2)
            store.run_due(shop.runner.now_ms())
        assert store.log.begin > begin - FILE > 0


def test_the_store_of_a_broker_keeps_the_rules_of_a_broker() -> None:
    shop = Shop(KEEP)
    shop.send(1)
    shop.consume("bills", 1)
    shop.send(8)
    shop.producer.shutdown()
    shop.broker.close()
    shop.files.delete("/store/librmq")  # which no broker makes
    for settings in (None, StoreConfig(durability="sync")):
        with MessageStore.open("/store", settings, files=shop.files, clock=shop.runner.clock) as store:
            assert not store.config.keep_unconsumed
        shop.files.delete("/store/librmq")
    with MessageStore.open("/new", StoreConfig.broker(), files=shop.files, clock=shop.runner.clock) as store:
        assert not store.config.keep_unconsumed


def test_a_reset_of_the_group_lets_sends_continue() -> None:
    shop = Shop(KEEP)
    shop.send(1)
    shop.consume("bills", 1)
    shop.fill()
    shop.broker.reset_group("bills", "orders", "end")
    assert shop.fill(most=8) == 8


def test_a_refusal_outlives_a_reopening() -> None:
    """The broker still refuses, whether the setting is given again or kept, although progress was saved too."""
    shop = Shop(KEEP)
    shop.send(1)
    shop.consume("bills", 1)
    taken = shop.fill()
    shop.reopen()
    assert shop.fill() == 0
    shop.store_config = None  # uses the kept setting
    shop.reopen()
    assert shop.broker.store.config.keep_unconsumed
    assert shop.fill() == 0
    assert shop.consume("bills", 100) == taken
    assert shop.fill(most=8) == 8
    shop.reopen()
    shop.send(1)
    shop.broker.close()
    assert verify("/store", files=shop.files).sound


def test_batches_are_refused_and_every_topic_is() -> None:
    shop = Shop(KEEP)
    shop.broker.create_topic("other", 1)
    shop.send(1)
    shop.consume("bills", 1)
    shop.fill()
    assert shop.fill(topic="other") == 0
    with pytest.raises(BrokerError, match="keep_unconsumed"):
        shop.producer.send_batch([Message("other", b"1"), Message("other", b"2")])


def test_writes_that_groups_need_are_not_refused() -> None:
    """Deliveries of delayed messages, retries and ends of transactions are stored; else the log would stay full."""
    shop = Shop(KEEP)
    shop.broker.create_topic("other", 1)
    shop.send(1, delay=60)
    end = half(shop, 0)
    shop.send(1)
    shop.consume("bills", 1)
    shop.fill(topic="other")
    assert shop.fill() == 0
    end(TransactionState.COMMIT)
    shop.runner.advance(3_600_000)
    assert len(list(shop.broker.messages("orders"))) == 3
    failed: list[bytes] = []

    def fail(message: Any) -> None:
        failed.append(message.body)
        if len(failed) <= 2:
            raise ValueError

    consumer = PushConsumer(shop.broker, "bills", consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("orders", fail)
    with consumer:
        shop.runner.advance(3_600_000)
    assert len(failed) == 4  # two messages, twice each
    assert shop.fill(most=8) == 8


@pytest.mark.parametrize("what", ["delay", "timer", "half"])
def test_waiting_messages_keep_their_file(what: str) -> None:
    shop = Shop(KEEP, timers=TimerConfig())
    if what == "half":
        end = half(shop, 0)
    else:
        shop.send(1, delay=3600 if what == "delay" else 5000)
    for _ in range(14):
        shop.producer.send("orders", BODY)
    assert shop.fill() < 6
    with pytest.raises(BrokerError) as caught:
        shop.producer.send("orders", BODY)
    cause = "wait for the end of a transaction" if what == "half" else "wait for a delivery time"
    for part in (cause, "keep_unconsumed=False", "raise max_total_size"):
        assert part in str(caught.value)
    if what == "half":
        end(TransactionState.ROLLBACK)
    else:
        shop.runner.advance(6_000_000)
    assert shop.fill(most=8) == 8
    assert shop.lost == {}


def test_files_stay_by_age_too() -> None:
    config = StoreConfig.tiny(
        commitlog_file_size=FILE,
        max_message_size=2048,
        max_total_size=None,
        file_reserved_hours=1,
        delete_when=";".join(map(str, range(24))),
    )
    shop = Shop(config)
    shop.send(1)
    shop.consume("bills", 1)
    shop.send(15)
    shop.runner.advance(4 * 3_600_000)
    assert shop.broker.store.log.begin == 0
    assert shop.consume("bills", 100) == 15
    shop.send(8)
    shop.runner.advance(4 * 3_600_000)
    assert shop.broker.store.log.begin > 0


def test_a_store_without_a_broker_keeps_all_and_refuses() -> None:
    """The store cannot know what was consumed, so neither a tool nor a job deletes messages that a group needs."""
    shop = Shop(KEEP)
    shop.send(1)
    shop.consume("bills", 1)
    shop.send(6)
    shop.broker.close()
    with MessageStore.open("/store", files=shop.files, clock=shop.runner.clock, background=False) as store:
        for _ in range(10):
            store.append(Message("orders", BODY))
            shop.runner.manual_clock.advance(seconds=2)
            store.run_due(shop.runner.now_ms())
        with pytest.raises(StoreFullError, match=r"Broker\.open"):
            store.append(Message("orders", BODY))
        assert store.log.begin == 0


class PassingReaders:
    """Readers that have consumed everything, but send a message back while retention asks them."""

    def __init__(self, store: MessageStore) -> None:
        self.store = store

    def unread(self, before: int) -> tuple[Unread, ...]:
        self.store.append(Message("%RETRY%bills", b"retry copy"))
        return ()

    def never_read(self) -> tuple[Unread, ...]:
        return ()

    def lost(self, unread: UnreadInFile) -> None:
        raise AssertionError("all was consumed")


def test_a_retry_copy_is_on_the_device_before_its_message_goes() -> None:
    """A file was deleted although the copy that let the group pass its message could still be lost."""
    files, runner = RecordingFiles(), ManualRunner()
    with MessageStore.open("/store", KEEP, files=files, clock=runner.clock, background=False) as store:
        store.readers = PassingReaders(store)
        for _ in range(24):
            store.append(Message("orders", BODY))
            runner.manual_clock.advance(seconds=2)
            store.run_due(runner.now_ms())
        assert store.log.begin
    log = [event for event in files.trace if "/commitlog/" in event.path]
    deletions = [at for at, event in enumerate(log) if event.call == "delete"]
    assert deletions
    for at in deletions:
        written = max(number for number in range(at) if b"retry copy" in log[number].data)
        assert any(event.call == "flush" and event.path == log[written].path for event in log[written:at])


def test_the_refusal_by_threads() -> None:
    with Broker.open("/store", store_config=KEEP, files=MemoryFiles()) as broker, Producer(broker, "shop") as producer:
        broker.create_topic("orders", 1)
        producer.send("orders", BODY)
        with PullConsumer(broker, "bills", consume_from=ConsumeFrom.FIRST) as consumer:
            consumer.subscribe("orders")
            assert consumer.poll(timeout=60)
            consumer.commit()
        for _ in range(16):
            producer.send("orders", BODY)
        with pytest.raises(StoreFullError, match="'bills'"):
            producer.send("orders", BODY)
        broker.reset_group("bills", "orders", "end")
        broker.store.flush()
        producer.send("orders", BODY)
        broker.join(60)


@pytest.mark.parametrize("kind", ["push", "pull", "receive"])
def test_a_new_group_that_skips_messages_is_reported(caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """Once the first file is deleted, a new group does not begin with the first message."""
    shop = Shop()
    shop.send(30)
    begin, end = shop.broker.store.queue_range("orders", 0)
    seen: list[int] = []
    match kind:
        case "push":
            consumer = PushConsumer(shop.broker, "late")
            consumer.subscribe("orders", lambda message: seen.append(message.queue_offset))
            with consumer:
                shop.runner.advance(2000)
        case "pull":
            with PullConsumer(shop.broker, "late") as pulling:
                pulling.subscribe("orders")
                seen += [message.queue_offset for message in pulling.poll(timeout=1)]
        case _:
            with SimpleConsumer(shop.broker, "late") as receiving:
                receiving.subscribe("orders")
                seen += [message.queue_offset for message in receiving.receive(32)]
    (line,) = [line for line in caplog.records if "consume_from" in line.getMessage()]
    skipped = (seen[0] if seen else end) - begin
    assert 0 < begin < end
    assert (line.levelname, vars(line)["rmq_queue_id"], vars(line)["rmq_skipped"]) == ("WARNING", 0, skipped)
