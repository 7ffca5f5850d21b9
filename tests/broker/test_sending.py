"""What producers and consumers send: where it goes, what is stored, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from librmq import protocol
from librmq.broker import Broker, BrokerConfig
from librmq.config import StoreConfig
from librmq.errors import BrokerBusyError, BrokerError, BrokerUnreachableError, MessageIllegalError, RmqError
from librmq.files import MemoryFiles
from librmq.message import Message, record
from librmq.runtime import ManualRunner
from librmq.store import MessageStore
from librmq.testing import Kit
from tests.broker.parties import HOST, manual, opened, send


def raw(broker: Broker, physical_offset: int) -> str:
    message = broker.store.message_at(physical_offset)
    assert message is not None
    return message.properties_raw.decode().replace("\1", "=").replace("\2", " ")


def test_a_send_tells_where_the_message_is(broker: Broker) -> None:
    send(broker, "T", queue_id=1)
    response = send(broker, "T", b"body", queue_id=1, tags="a", keys=["k"], properties={"u": "v"}, wait_store_ok=True)
    assert response.status is protocol.SendStatus.SEND_OK
    assert (response.queue_id, response.queue_offset) == (1, 1)
    stored = broker.store.message_at(response.physical_offset)
    assert stored is not None
    assert (stored.topic, stored.body, stored.born_host, stored.born_timestamp_ms) == (
        "T", b"body", HOST, 1_600_000_000_000,
    )  # fmt: skip
    assert response.offset_ids == (stored.offset_id,)
    assert raw(broker, response.physical_offset) == "u=v KEYS=k CLUSTER=DefaultCluster TAGS=a"


def test_the_senders_message_stays_as_it_is(broker: Broker) -> None:
    message = Message("T", b"x", tags="a", wait_store_ok=True, delay_level=2)
    before = dict(message.properties)
    broker.call(protocol.SendMessage("p", message, 0, 1, HOST))
    assert (message.topic, message.properties) == ("T", before)


def test_a_direct_send_leaves_the_message_for_another_try(broker: Broker) -> None:
    message = Message("T", b"x", tags="a", wait_store_ok=False)
    before = dict(message.properties)
    other_host = ("10.0.0.7", 99)
    for host in (HOST, other_host, HOST):
        response = broker.send("p", message, 0, 1, host)
        stored = broker.store.message_at(response.physical_offset)
        assert stored is not None
        assert stored.born_host == host
        assert raw(broker, response.physical_offset) == "CLUSTER=DefaultCluster TAGS=a"
    message.body = bytes(5 << 20)
    with pytest.raises(MessageIllegalError, match="5,242,880"):
        broker.send("p", message, 0, 1, HOST)
    assert list(message.properties.items()) == list(before.items())


@pytest.mark.parametrize(("asked", "queues"), [(4, 4), (64, 8), (1, 1)])
def test_a_send_makes_its_topic(broker: Broker, asked: int, queues: int) -> None:
    assert broker.topic_route("T") == ()
    send(broker, "T", default_queues=asked)
    (data,) = broker.topic_route("T")
    assert (data.broker_name, data.read_queues, data.write_queues, data.permission) == ("broker-a", queues, queues, 6)


@pytest.mark.rmq(broker_config=BrokerConfig(auto_create_topic=False))
def test_without_auto_creation_a_topic_must_be_there(broker: Broker) -> None:
    with pytest.raises(BrokerError, match="does not exist") as caught:
        send(broker, "T")
    assert caught.value.code == protocol.ResponseCode.TOPIC_NOT_EXIST
    assert broker.store.log.end == 0
    assert "TBW102" not in broker.topics()
    broker.create_topic("T", 2)
    send(broker, "T", queue_id=1)


def test_a_queue_that_is_not_there_is_refused(broker: Broker) -> None:
    broker.create_topic("T", 2, write_queues=4)
    send(broker, "T", queue_id=3)
    end = broker.store.log.end
    with pytest.raises(BrokerError, match="4 queues"):
        send(broker, "T", queue_id=4)
    assert broker.store.log.end == end
    broker.create_topic("T", 2, write_queues=1)
    send(broker, "T", queue_id=1)  # queue 1 still exists for readers
    broker.create_topic("None", 0)
    with pytest.raises(BrokerError, match="0 queues"):
        send(broker, "None", queue_id=-1)


def test_the_broker_chooses_a_queue_in_turn(broker: Broker) -> None:
    broker.create_topic("T", 3)
    assert [send(broker, "T", queue_id=-1).queue_id for _ in range(4)] == [0, 1, 2, 0]


def test_a_read_only_topic_takes_a_message_for_a_queue(broker: Broker) -> None:
    broker.create_topic("T", permission=4)
    assert send(broker, "T").queue_offset == 0


@pytest.mark.parametrize(
    "topic", ["SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "SELF_TEST_TOPIC", "a b", "ü", ""]
)
def test_topics_that_are_not_for_clients(broker: Broker, topic: str) -> None:
    for _ in range(2):
        with pytest.raises(MessageIllegalError):
            send(broker, topic)
    with pytest.raises(MessageIllegalError):
        broker.call(protocol.SendBatch("p", (Message(topic, b"x"),), 0, 1, HOST))
    with pytest.raises(MessageIllegalError):
        broker.create_topic(topic)
    assert broker.store.log.end == 0


def test_too_much_is_refused_before_a_byte_is_written(broker: Broker) -> None:
    for fields in ({"body": bytes(1 << 20)}, {"properties": {"p": "x" * 40_000}}):
        with pytest.raises(MessageIllegalError):
            send(broker, "T", **fields)
    assert broker.store.log.end == 0


def test_a_delayed_message_waits_and_is_delivered_in_time(rmq: Kit, broker: Broker) -> None:
    rmq.advance(ms=1_000)
    response = send(broker, "T", queue_id=2, delay_level=3, wait_store_ok=True)
    assert response.queue_id == 2
    assert raw(broker, response.physical_offset) == ("REAL_TOPIC=T CLUSTER=DefaultCluster DELAY=3 WAIT=true REAL_QID=2")
    rmq.advance(ms=9_999)
    assert list(broker.messages("T")) == []
    rmq.advance(ms=1)
    (delivered,) = broker.messages("T")
    assert (delivered.queue_id, delivered.store_timestamp_ms) == (2, rmq.clock.now_ms())


@pytest.mark.parametrize(("level", "stored"), [(None, None), (0, "0"), (-3, "-3"), (25, "18")])
def test_levels_out_of_range(rmq: Kit, broker: Broker, level: int | None, stored: str | None) -> None:
    send(broker, "T", delay_level=level)
    rmq.advance(ms=7_200_000)
    (message,) = broker.messages("T")
    assert message.properties.get("DELAY") == stored


def test_a_level_that_does_not_exist_is_reported_once(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    for level in (99, 99, -1, -1, 18):
        send(broker, "T", delay_level=level)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "no delay level 99" in told[0]
    assert "no delay level -1" in told[1]


def test_a_level_that_is_not_a_number_is_refused(broker: Broker) -> None:
    message = Message("T", b"x")
    message.properties["DELAY"] = "soon"
    with pytest.raises(MessageIllegalError, match="DELAY"):
        broker.call(protocol.SendMessage("p", message, 0, 1, HOST))


def test_a_batch_lies_side_by_side(broker: Broker) -> None:
    messages = tuple(Message("T", b"%d" % at, tags="a", wait_store_ok=True) for at in range(3))
    response = broker.call(protocol.SendBatch("p", messages, 1, 1, HOST))
    stored = list(broker.messages("T"))
    assert [message.body for message in stored] == [b"0", b"1", b"2"]
    assert response.offset_ids == tuple(message.offset_id for message in stored)
    assert (response.queue_id, response.queue_offset) == (1, 0)
    assert raw(broker, response.physical_offset) == "WAIT=true TAGS=a CLUSTER=DefaultCluster WAIT=true"
    with pytest.raises(BrokerError):
        broker.call(protocol.SendBatch("p", (), 0, 1, HOST))
    with pytest.raises(MessageIllegalError, match="delayed"):
        broker.call(protocol.SendBatch("p", (Message("T", b"x", delay_level=1),), 0, 1, HOST))


def test_a_prepared_message_waits_for_its_end(broker: Broker) -> None:
    message = Message("T", b"x", wait_store_ok=True, delay_level=1)
    message.properties |= {"TRAN_MSG": "true", "PGROUP": "p"}
    response = broker.call(protocol.SendMessage("p", message, 3, 1, HOST, record.TRANSACTION_PREPARED))
    stored = broker.store.message_at(response.physical_offset)
    assert stored is not None
    assert (stored.topic, stored.queue_id, stored.sys_flag, response.queue_id) == (
        "RMQ_SYS_TRANS_HALF_TOPIC", 0, 0, 3,
    )  # fmt: skip
    assert stored.properties == {
        "REAL_TOPIC": "T", "REAL_QID": "3", "TRAN_MSG": "true", "PGROUP": "p", "WAIT": "true",
        "CLUSTER": "DefaultCluster",
    }  # fmt: skip


# ---- what consumers send back


def test_retries_take_longer_each_time_and_end_as_dead_letters(rmq: Kit, broker: Broker) -> None:
    send(broker, "T", b"hard", tags="a")
    (first,) = broker.messages("T")
    message = first
    waits = []
    for times in range(16):
        rmq.advance(ms=1_000 - rmq.clock.now_ms() % 1_000)
        sent_ms = rmq.clock.now_ms()
        broker.call(protocol.SendBack("g", message.physical_offset, 0))
        rmq.advance(ms=7_200_000)
        message = list(broker.messages("%RETRY%g"))[times]
        waits.append((message.store_timestamp_ms - sent_ms) // 1_000)
        assert (message.reconsume_times, message.body, message.tags) == (times + 1, b"hard", "a")
        assert message.properties["ORIGIN_MESSAGE_ID"] == first.offset_id
        assert message.properties["RETRY_TOPIC"] == "T"
    assert waits == [10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200]
    broker.call(protocol.SendBack("g", message.physical_offset, 0))
    (dead,) = broker.dead_letters("g")
    assert (dead.reconsume_times, dead.queue_id, dead.body) == (17, 0, b"hard")
    assert (dead.born_host, dead.born_timestamp_ms) == (first.born_host, first.born_timestamp_ms)
    (data,) = broker.topic_route("%DLQ%g")
    assert (data.read_queues, data.write_queues, data.permission) == (1, 1, 6)


@pytest.mark.parametrize(
    ("level", "most", "topic", "stored_level"),
    [(2, None, "SCHEDULE_TOPIC_XXXX", "2"), (-1, None, "%DLQ%g", "0"), (0, 0, "%DLQ%g", "0"), (5, 0, "%DLQ%g", "0")],
)
def test_a_send_back_chooses_its_delay(
    broker: Broker, level: int, most: int | None, topic: str, stored_level: str
) -> None:
    sent = send(broker, "T")
    end = broker.store.log.end
    broker.call(protocol.SendBack("g", sent.physical_offset, level, most))
    stored = broker.store.message_at(end)
    assert stored is not None
    assert (stored.topic, stored.properties["DELAY"], stored.reconsume_times) == (topic, stored_level, 1)
    assert stored.properties["WAIT"] == "false"


def test_redeliveries_spread_over_the_queues_of_a_retry_topic(rmq: Kit, broker: Broker) -> None:
    broker.create_topic("%RETRY%g", 4)
    sent = send(broker, "T")
    for _ in range(4):
        broker.call(protocol.SendBack("g", sent.physical_offset, 1))
    rmq.advance(ms=2_000)
    assert sorted(message.queue_id for message in broker.messages("%RETRY%g")) == [0, 1, 2, 3]


def test_a_read_only_retry_topic_refuses_a_send_back(broker: Broker) -> None:
    broker.create_topic("%RETRY%g", 1, permission=protocol.PERM_READ)
    sent = send(broker, "T")
    with pytest.raises(BrokerError) as caught:
        broker.call(protocol.SendBack("g", sent.physical_offset, 0))
    assert caught.value.code == protocol.ResponseCode.NO_PERMISSION


def test_a_query_ends_at_64(broker: Broker) -> None:
    for _ in range(70):
        send(broker, "T", keys="k")
    assert len(broker.call(protocol.QueryMessages("T", "k", 100))) == 64
    for is_unique in (False, True):  # a client of the wire can ask for any number
        assert broker.call(protocol.QueryMessages("T", "k", -1, is_unique=is_unique)) == ()


def test_a_group_has_its_own_maximum(broker: Broker) -> None:
    broker.set_group("g", retry_max_times=0)
    broker.call(protocol.SendBack("g", send(broker, "T").physical_offset, 0))
    assert len(broker.dead_letters("g")) == 1
    assert broker.groups()["g"] == 0


def test_a_send_back_of_nothing() -> None:
    with opened() as broker:
        for physical_offset in (0, 17, 1 << 40, -1):
            with pytest.raises(BrokerError):
                broker.call(protocol.SendBack("g", physical_offset, 0))
        assert broker.store.log.end == 0
    with opened(auto_create_group=False) as broker:
        with pytest.raises(BrokerError) as caught:
            broker.call(protocol.SendBack("g", 0, 0))
        assert caught.value.code == protocol.ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


def test_a_consumer_that_sends_to_its_retry_topic_itself(rmq: Kit, broker: Broker) -> None:
    fields: dict[str, Any] = {"delay_level": 4, "properties": {"u": "v"}}
    send(broker, "%RETRY%g", reconsume_times=1, max_reconsume_times=2, **fields)
    send(broker, "%RETRY%g", reconsume_times=2, max_reconsume_times=2, **fields)
    assert broker.dead_letters("g") == []  # it waits for its delay first
    rmq.advance(ms=31_000)
    (dead,) = broker.dead_letters("g")
    (retried,) = broker.messages("%RETRY%g")
    assert (dead.reconsume_times, retried.reconsume_times) == (2, 1)


# ---- what goes wrong


@pytest.mark.rmq(broker_config=BrokerConfig(longest_wait_s=0))
def test_a_store_that_is_stuck_is_busy(rmq: Kit, broker: Broker) -> None:
    clock = rmq.clock
    send(broker, "T")
    with broker.store.appender.lock.mutex:  # like a write that does not end
        with pytest.raises(BrokerBusyError, match="waited 0 s"):
            send(broker, "T")
        clock.advance(ms=1_001)
        with pytest.raises(BrokerBusyError, match="taken 1001 ms"):
            send(broker, "T")
    send(broker, "T")
    with broker.store.appender.lock.mutex, pytest.raises(BrokerBusyError, match="waited 0 s"):  # like another write
        send(broker, "T")


def test_a_closed_broker_can_not_be_reached() -> None:
    for end in (Broker.close, Broker.abandon):
        broker = opened()
        send(broker, "T")
        end(broker)
        end(broker)
        with pytest.raises(BrokerUnreachableError):
            send(broker, "T")
        with pytest.raises(BrokerUnreachableError):
            broker.create_topic("U")
        assert broker.broker_names() == ()


def test_errors_of_the_store_are_the_brokers() -> None:
    files = MemoryFiles()
    with opened(files) as broker:
        send(broker, "T")
        files.disk_used_ratio = 0.99
        broker.store.run_due(manual(broker).now_ms())
        with pytest.raises(BrokerError) as caught:
            send(broker, "T")
        assert caught.value.code == protocol.ResponseCode.SERVICE_NOT_AVAILABLE
        assert isinstance(caught.value, RmqError)


def test_an_unknown_request(broker: Broker) -> None:
    class Other(protocol.SendMessage):
        pass

    with pytest.raises(BrokerError) as caught:
        broker.call(Other("p", Message("T", b"x"), 0, 1, HOST))
    assert caught.value.code == protocol.ResponseCode.REQUEST_CODE_NOT_SUPPORTED


def test_killed_while_messages_wait(rmq: Kit) -> None:
    send(rmq.broker, "T", b"once", delay_level=3)
    rmq.advance(seconds=12)
    rmq.crash_broker()  # before the progress of the delivery was saved
    assert [message.body for message in rmq.messages("T")] == [b"once"]
    rmq.advance(seconds=2)
    assert [message.body for message in rmq.messages("T")] == [b"once", b"once"]
    rmq.advance(seconds=20)
    rmq.crash_broker()  # after it was saved
    rmq.advance(seconds=100)
    assert len(rmq.messages("T")) == 2


def test_no_error_hides_what_is_stored_before_it(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even an unexpected one; otherwise the server would store those messages again."""
    send(broker, "T")
    rooms = [None, None, ZeroDivisionError()]

    def check_room(_: MessageStore) -> None:
        if (error := rooms.pop(0)) is not None:
            raise error

    monkeypatch.setattr(MessageStore, "check_room", check_room)
    sends = [protocol.SendMessage("p", Message("T", b"%d" % number), 0, 1, HOST) for number in range(3)]
    assert [response.queue_offset for response in broker.call(protocol.SendTogether(sends))] == [1, 2]


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_year_in_which_nothing_happens(on_disk: bool) -> None:
    config = StoreConfig.tiny()
    with Broker.temporary(runner=ManualRunner(), store_config=config) if on_disk else opened(store=config) as broker:
        runner = manual(broker)
        for _ in range(300):
            send(broker, "T", bytes(500))
        broker.call(protocol.SendBack("g", 0, 0))
        runner.advance(60_000)
        turns = 0
        end_ms = runner.now_ms() + 365 * 86_400_000
        while (due := runner.next_due_ms()) is not None and due <= end_ms:
            runner.advance(due - runner.now_ms())
            turns += 1
        assert turns < 100


def test_a_stored_message_is_copied_whatever_its_size() -> None:
    """An earlier process had another limit: a retry of its message is no new message, and a send of the same is one."""
    files = MemoryFiles()
    with MessageStore.open("/b", StoreConfig.tiny(max_message_size=16 << 10), files=files) as store:
        place = store.append(Message("T", bytes(8 << 10))).physical_offset
    with opened(files, store=StoreConfig.tiny(max_message_size=1 << 10)) as broker:
        with pytest.raises(MessageIllegalError, match="8,192 bytes"):
            send(broker, "T", bytes(8 << 10))
        broker.call(protocol.SendBack("g", place, 0))
        manual(broker).advance(60_000)
        (retry,) = broker.messages("%RETRY%g")
        assert retry.body == bytes(8 << 10)
