"""Requests of tools that no recording has, with the values of their answers; replies and rates."""

from __future__ import annotations

import re
import socket
from datetime import datetime
from typing import Any

import pytest

from librmq import Broker, ManualRunner, StoreConfig
from librmq.clock import ManualClock
from librmq.files import MemoryFiles
from librmq.java import json as java_json
from librmq.message.message import StoredMessage
from librmq.message.properties import decode_properties
from librmq.message.record import STORE_TIMESTAMP_AT
from librmq.store.format.broker_tables import group_row
from librmq.wire.remoting import RemotingServer, listen
from librmq.wire.remoting._frames import Frame, encode
from librmq.wire.remoting._headers import REQUESTS
from librmq.wire.remoting._headers import RequestCode as Code
from tests.wire.remoting.conftest import BEGIN_MS
from tests.wire.remoting_client import RawClient

TO_CLIENTS = {
    Code.NOTIFY_RECEIVE,
    Code.CHECK_TRANSACTION_STATE,
    Code.NOTIFY_CONSUMER_IDS_CHANGED,
    Code.RESET_CONSUMER_CLIENT_OFFSET,
}
TO_CLIENTS |= {Code.PUSH_REPLY_MESSAGE_TO_CLIENT}
OF_PROCESSES = {Code.LIST_CONNECTIONS, Code.GROUPS_BEHIND, Code.RESEND_LETTERS}
OF_PROCESSES |= {Code.CHANGE_SCHEDULE, Code.DESCRIBE_SCHEDULES, Code.TAKE_HAND_OUTS}
UNANSWERED = TO_CLIENTS | OF_PROCESSES  # by TCP; the socket of a shared store does
"""What only a broker asks, and only of its clients."""


def advance(broker: Broker, seconds: float) -> None:
    assert isinstance(broker.runner, ManualRunner)
    broker.runner.advance(round(seconds * 1000))


def test_expired_files_are_deleted_at_any_hour() -> None:
    """`mqadmin deleteExpiredCommitLog` does not wait for ``delete_when``; younger files stay."""
    hour = datetime.fromtimestamp(BEGIN_MS / 1000).astimezone().hour
    config = StoreConfig.tiny(commitlog_file_size=4096, max_message_size=2048, file_reserved_hours=1)
    config = config.with_settings({"delete_when": f"{(hour + 12) % 24:02}", "keep_unconsumed": False})
    runner = ManualRunner(ManualClock(BEGIN_MS))
    with (
        Broker.open("/store", store_config=config, runner=runner, files=MemoryFiles()) as broker,
        RemotingServer(broker) as server,
        RawClient(server.port) as client,
    ):
        for _ in range(3):
            for _ in range(4):
                assert client.put("t", bytes(900)).code == 0
            advance(broker, 1500)
        assert broker.store.log.begin == 0
        assert client.call(Code.DELETE_EXPIRED_COMMITLOG).code == 0
        advance(broker, 10)
        assert broker.store.log.begin == 4096
        advance(broker, 2 * 3600)
        assert broker.store.log.begin == 4096
        left = sum(end - begin for begin, end in (broker.store.queue_range("t", queue_id) for queue_id in range(4)))
        client.beat("c", "g", topics=("t",))
        for queue_id in range(4):
            client.call(Code.UPDATE_CONSUMER_OFFSET, consumer_group="g", topic="t", queue_id=queue_id, commit_offset=0)
        assert client.ask(Code.GET_BROKER_CONSUME_STATS)["totalDiff"] == left  # deleted messages wait for no group


def test_every_code_has_an_answer(client: RawClient) -> None:
    for code in set(Code) - UNANSWERED:
        client.write(encode(Frame(code, opaque=7)))
        assert client.answer().code != 3, code
    for code in UNANSWERED:
        client.write(encode(Frame(code, opaque=8)))
        assert client.answer().code == 3
    assert set(REQUESTS) == set(Code)


# ---- replies


def reply_to(client_id: str | None) -> dict[str, Any]:
    properties = "CORRELATION_ID\1c-1\2MSG_TYPE\1reply"
    if client_id is not None:
        properties += f"\2REPLY_TO_CLIENT\1{client_id}"
    return {
        "producer_group": "p", "topic": "DefaultCluster_REPLY_TOPIC", "default_topic": "TBW102", "queue_id": 0,
        "default_topic_queue_nums": 4, "sys_flag": 0, "born_timestamp": 5, "flag": 0, "properties": properties,
    }  # fmt: skip


@pytest.mark.parametrize("code", [Code.SEND_REPLY_MESSAGE, Code.SEND_REPLY_MESSAGE_V2])
def test_a_reply_is_pushed_to_its_requester(
    client: RawClient, server: RemotingServer, broker: Broker, code: Code
) -> None:
    """It is stored as well, and the one who replies learns that it has arrived."""
    client.beat("asker", producers=("p",))
    with RawClient(server.port) as answering:
        number = answering.send(code, b"42", **reply_to("asker"))
        pushed = client.asked(Code.PUSH_REPLY_MESSAGE_TO_CLIENT)
        properties = decode_properties(pushed.fields["properties"])
        assert (pushed.body, properties["CORRELATION_ID"]) == (b"42", "c-1")
        assert properties["PUSH_REPLY_TIME"] == pushed.fields["storeTimestamp"] == str(BEGIN_MS)
        assert pushed.fields["bornHost"] == answering.address
        pushed.flag, pushed.body, pushed.code = 1, b"", 0
        client.write(encode(pushed))
        answer = answering.answer()
    assert (answer.opaque, answer.code, answer.fields["queueOffset"]) == (number, 0, "0")
    assert [one.body for one in broker.messages("DefaultCluster_REPLY_TOPIC")] == [b"42"]


def test_a_client_can_reply_to_itself(client: RawClient) -> None:
    """A program whose producer and consumer share a connection is not blocked."""
    client.beat("both", producers=("p",))
    client.send(Code.SEND_REPLY_MESSAGE_V2, b"x", **reply_to("both"))
    pushed = client.asked(Code.PUSH_REPLY_MESSAGE_TO_CLIENT)
    pushed.flag, pushed.code = 1, 0
    client.write(encode(pushed))
    assert client.answer().code == 0


@pytest.mark.parametrize(
    ("client_id", "remark"),
    [(None, "reply message properties[REPLY_TO_CLIENT] is null"), ("gone", "channel of <gone> not found.")],
)
def test_a_reply_without_a_requester_is_an_error(client: RawClient, client_id: str | None, remark: str) -> None:
    answer = client.call(Code.SEND_REPLY_MESSAGE_V2, b"x", **reply_to(client_id))
    assert (answer.code, answer.fields["queueOffset"]) == (1, "0")  # it is stored
    assert remark in (answer.remark or "")


# ---- rates


def rates(client: RawClient, name: str, key: str) -> dict[str, Any]:
    found = client.ask(Code.VIEW_BROKER_STATS_DATA, stats_name=name, stats_key=key)
    assert isinstance(found, dict)
    return found


def test_sends_are_counted_by_minute_hour_and_day(client: RawClient, broker: Broker) -> None:
    for _ in range(6):
        for _ in range(5):
            client.put("t", b"four")
        advance(broker, 10)
    assert rates(client, "TOPIC_PUT_NUMS", "t")["statsMinute"] == {"avgpt": 1.0, "sum": 25, "tps": 0.5}
    assert rates(client, "TOPIC_PUT_SIZE", "t")["statsHour"] == {"avgpt": 4.0, "sum": 120, "tps": 0.2}
    advance(broker, 60)
    assert rates(client, "TOPIC_PUT_NUMS", "t")["statsMinute"] == {"avgpt": 0.0, "sum": 0, "tps": 0.0}
    assert rates(client, "BROKER_PUT_NUMS", "DefaultCluster")["statsDay"]["sum"] == 30
    advance(broker, 86_400)
    assert rates(client, "TOPIC_PUT_NUMS", "t")["statsDay"]["sum"] == 0


def test_deliveries_and_send_backs_are_counted(client: RawClient, broker: Broker) -> None:
    client.beat("c", "g", topics=("t",))
    place = 0
    for _ in range(3):
        place = int(client.put("t", b"x").fields["msgId"][16:], 16)
    client.pull("g", "t")
    client.answer()
    client.call(Code.CONSUMER_SEND_MSG_BACK, offset=place, group="g", delay_level=0, origin_topic="t")
    assert rates(client, "GROUP_GET_NUMS", "t@g")["statsMinute"] == {"avgpt": 3.0, "sum": 3, "tps": 0.3}
    assert rates(client, "SNDBCK_PUT_NUMS", "t@g")["statsMinute"]["sum"] == 1
    assert client.ask(Code.GET_CONSUME_STATS, consumer_group="g", topic="t")["consumeTps"] == 0.3
    assert client.ask(Code.GET_BROKER_RUNTIME_INFO)["table"]["getTransferedTps"] == "0.3"


def table(client: RawClient) -> dict[str, str]:
    found = client.ask(Code.GET_BROKER_RUNTIME_INFO)["table"]
    assert isinstance(found, dict)
    return found


def test_messages_are_counted_by_day(client: RawClient, broker: Broker) -> None:
    """``clusterList -m`` subtracts these numbers."""
    client.beat("c", "g", topics=("t",))
    for _ in range(3):
        client.put("t", b"four")
    client.pull("g", "t")
    client.answer()
    names = [
        f"msg{kind}Total{day}" for kind in ("Put", "Get") for day in ("YesterdayMorning", "TodayMorning", "TodayNow")
    ]
    assert [table(client)[name] for name in names] == ["0", "0", "3"] * 2
    advance(broker, 86_400)
    client.put("t", b"four")
    assert [table(client)[name] for name in names] == ["0", "3", "4", "0", "3", "3"]
    advance(broker, 3 * 86_400)
    assert [table(client)[name] for name in names] == ["4", "4", "4", "3", "3", "3"]


def test_a_broker_says_what_tools_read(client: RawClient, broker: Broker) -> None:
    """``brokerStatus`` prints what there is; ``clusterList`` and ``exportMetrics`` read these numbers."""
    assert table(client)["putMessageTimesTotal"] == "0"
    client.put("t", b"four")
    client.put("t", b"size 6")
    client.put("a bad topic", b"x")
    found = table(client)
    sizes = [found[name] for name in ("putMessageSizeTotal", "putMessageTimesTotal", "putMessageAverageSize")]
    assert (sizes, found["putMessageFailedTimes"]) == (["10", "2", "5.0"], "1")
    assert found["commitLogMaxOffset"] == str(broker.store.log.end)
    for name in ("sendThreadPoolQueueHeadWaitTimeMills", "pullThreadPoolQueueHeadWaitTimeMills"):
        assert int(found[name]) == 0
    read = ("putTps", "getTransferedTps", "getTransferredTps", "earliestMessageTimeStamp", "commitLogDiskRatio")
    assert all(float(found[name]) >= 0 for name in (*read, "consumeQueueDiskRatio", "putMessageAverageSize"))
    assert found["brokerVersionDesc"] == "V4_9_4"
    assert not found.keys() & {"putLatency99", "EndTransactionQueueSize"}  # unknown, and no tool needs them
    lines = client.call(Code.GET_BROKER_CONFIG).body.decode().splitlines()
    settings = dict(line.split("=", 1) for line in lines)
    assert settings.keys() >= EXPORTED
    assert (settings["brokerName"], settings["brokerRole"], settings["useTLS"]) == ("broker-a", "ASYNC_MASTER", "false")


def test_an_exporter_finds_each_number_that_it_reads(client: RawClient) -> None:
    """``rocketmq-exporter`` drops all figures of a broker that lacks one of these, or has text in place of a number."""
    found = table(client)
    names = ("send", "pull", "query")
    assert all(int(found[f"{name}ThreadPoolQueue{what}"]) == 0 for name in names for what in ("Capacity", "Size"))
    read = ("dispatchBehindBytes", "dispatchMaxBuffer", "pageCacheLockTimeMills", "remainTransientStoreBufferNumbs")
    assert all(int(found[name]) >= 0 for name in (*read, "startAcceptSendRequestTimeStamp", "bootTimestamp"))
    assert found["putMessageDistributeTime"] == "null"  # as 4.9 says of figures that it does not have


EXPORTED = {
    *(
        "autoCreateSubscriptionGroup",
        "autoCreateTopicEnable",
        "brokerClusterName",
        "brokerId",
        "brokerName",
        "brokerRole",
    ),
    *("clientCallbackExecutorThreads", "fileReservedTime", "filterServerNums", "flushDiskType", "maxMessageSize"),
    *("messageDelayLevel", "msgTraceTopicName", "slaveReadEnable", "traceOn", "traceTopicEnable", "useTLS"),
}
"""The settings that mqadmin's exports read."""


def test_the_filter_of_a_group_comes_with_queue_entries(client: RawClient) -> None:
    client.put("t", b"x")
    asked = {"topic": "t", "queue_id": 0, "index": 0, "count": 1}
    assert "filterData" not in client.ask(Code.QUERY_CONSUME_QUEUE, **asked)
    assert client.ask(Code.QUERY_CONSUME_QUEUE, **asked, consumer_group="g")["filterData"] == "g@t is not online!"
    client.beat("c", "g", topics=("t",))
    found = client.ask(Code.QUERY_CONSUME_QUEUE, **asked, consumer_group="g")
    assert (found["subscriptionData"]["subString"], found["filterData"]) == ("*", "null")


def test_a_rate_that_was_never_counted_does_not_exist(client: RawClient) -> None:
    for name in ("TOPIC_PUT_NUMS", "UNKNOWN"):
        answer = client.call(Code.VIEW_BROKER_STATS_DATA, stats_name=name, stats_key="t")
        assert (answer.code, answer.remark) == (1, f"The stats <{name}> <t> not exist")


# ---- settings and clients


def test_settings_as_they_are_can_be_set(client: RawClient) -> None:
    body = client.call(Code.GET_BROKER_CONFIG).body
    assert client.call(Code.UPDATE_BROKER_CONFIG, body).code == 0
    answer = client.call(Code.UPDATE_BROKER_CONFIG, b"fileReservedTime=72\n")
    assert answer.code == 1
    assert "fileReservedTime can't be changed while the broker is open" in (answer.remark or "")


@pytest.mark.parametrize("code", [Code.GET_CONSUMER_STATUS_FROM_CLIENT, Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS])
def test_the_progress_of_clients_is_collected(client: RawClient, server: RemotingServer, code: Code) -> None:
    client.beat("c1", "g", topics=("t",))
    with RawClient(server.port) as tool:
        assert tool.call(code, topic="t", group="none").code == 1
        tool.send(code, topic="t", group="g")
        asked = client.asked(Code.GET_CONSUMER_STATUS_FROM_CLIENT)
        assert asked.fields == {"topic": "t", "group": "g"}
        asked.flag, asked.code = 1, 0
        asked.body = b'{"messageQueueTable":{{"brokerName":"broker-a","queueId":0,"topic":"t"}:7}}'
        client.write(encode(asked))
        found = java_json.loads(tool.answer().body)
    assert [list(table.values()) for table in found["consumerTable"].values()] == [[7]]


def test_a_message_is_consumed_directly(client: RawClient, server: RemotingServer) -> None:
    client.beat("c1", "g", topics=("t",))
    place = client.put("t", b"x").fields["msgId"]
    with RawClient(server.port) as tool:
        fields: dict[str, Any] = {"consumer_group": "g", "client_id": "c1", "msg_id": place}
        tool.send(Code.CONSUME_MESSAGE_DIRECTLY, **fields)
        asked = client.asked(Code.CONSUME_MESSAGE_DIRECTLY)
        assert StoredMessage(asked.body).body == b"x"
        asked.flag, asked.code, asked.body = 1, 0, b'{"consumeResult":"CR_SUCCESS"}'
        client.write(encode(asked))
        assert tool.answer().body == asked.body
        assert tool.call(Code.CONSUME_MESSAGE_DIRECTLY, **(fields | {"msg_id": "0" * 32})).code == 1


# ---- the rest of the table


def test_times_of_the_first_message_are_answered(client: RawClient, broker: Broker) -> None:
    queue: dict[str, Any] = {"topic": "t", "queue_id": 0}
    client.put("t", b"x")
    advance(broker, 60)
    client.put("t", b"y")
    assert client.call(Code.GET_EARLIEST_MSG_STORETIME, **queue).fields == {"timestamp": str(BEGIN_MS)}
    assert client.call(Code.SEARCH_OFFSET_BY_TIMESTAMP, **queue, timestamp=BEGIN_MS + 60_000).fields == {"offset": "1"}
    client.call(Code.UPDATE_CONSUMER_OFFSET, consumer_group="g", **queue, commit_offset=1)
    rows = client.ask(Code.QUERY_CONSUME_TIME_SPAN, topic="t", group="g")["consumeTimeSpanSet"]
    spans = {row["messageQueue"]["queueId"]: row for row in rows}
    assert (spans[0]["minTimeStamp"], spans[0]["maxTimeStamp"]) == (BEGIN_MS, BEGIN_MS + 60_000)
    assert spans[0]["consumeTimeStamp"] == BEGIN_MS
    assert spans[0]["delayTime"] == broker.runner.now_ms() - (BEGIN_MS + 60_000)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d#\d\d:\d\d:\d\d:000", spans[0]["consumeTimeStampStr"])


def test_a_time_beyond_the_calendar_is_shown_as_a_number(client: RawClient, broker: Broker) -> None:
    client.put("t", b"x")
    client.call(Code.UPDATE_CONSUMER_OFFSET, consumer_group="g", topic="t", queue_id=0, commit_offset=1)
    far_ms = 1 << 62  # damage that the checksum of the body does not show
    broker.store.log.sequence.file(0).buffer[STORE_TIMESTAMP_AT : STORE_TIMESTAMP_AT + 8] = far_ms.to_bytes(8, "big")
    rows = client.ask(Code.QUERY_CONSUME_TIME_SPAN, topic="t", group="g")["consumeTimeSpanSet"]
    assert {row["maxTimeStampStr"] for row in rows if row["maxTimeStamp"] == far_ms} == {str(far_ms)}


def test_progress_is_cloned_to_another_group(client: RawClient, broker: Broker) -> None:
    client.put("t", b"x")
    client.call(Code.UPDATE_CONSUMER_OFFSET, consumer_group="g", topic="t", queue_id=0, commit_offset=1)
    assert client.call(Code.CLONE_GROUP_OFFSET, src_group="g", dest_group="h", topic="t").code == 0
    assert broker.consumer_offset("h", "t") == 1
    assert client.call(Code.CLONE_GROUP_OFFSET, src_group="g", dest_group="g").code == 1


def test_tables_and_topic_lists_are_complete(client: RawClient, broker: Broker) -> None:
    broker.create_topic("t", 3)
    broker.set_group("g", retry_max_times=5)
    assert client.ask(Code.GET_ALL_TOPIC_CONFIG)["topicConfigTable"]["t"]["writeQueueNums"] == 3
    groups = client.ask(Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)["subscriptionGroupTable"]
    assert groups["g"]["retryMaxTimes"] == 5
    asked = {**groups["g"], "consumeEnable": False, "whichBrokerWhenConsumeSlowly": 2, "unknown": 1}
    client.call(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, asked)
    del asked["unknown"]
    assert client.ask(Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)["subscriptionGroupTable"]["g"] == asked
    client.call(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {"groupName": "g", "retryMaxTimes": 3})
    assert client.ask(Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)["subscriptionGroupTable"]["g"] == group_row("g", 3)
    assert "t" in client.ask(Code.GET_TOPICS_BY_CLUSTER, cluster="DefaultCluster")["topicList"]
    for code in (Code.GET_SYSTEM_TOPIC_LIST_FROM_NS, Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER):
        topics = client.ask(code)["topicList"]
        assert "TBW102" in topics
        assert "t" not in topics
    client.call(Code.PUT_KV_CONFIG, namespace="n", key="k", value="v")
    assert client.ask(Code.GET_KVLIST_BY_NAMESPACE, namespace="n") == {"table": {"k": "v"}}


# ---- both kinds of addresses


@pytest.mark.skipif("not __import__('socket').has_dualstack_ipv6()", reason="one port is for one kind of address here")
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"retryQueueNums": 65_537}, "retryQueueNums: expected a whole number from 0 to 65536, found 65537"),
        ({"retryQueueNums": "2"}, "retryQueueNums: expected a whole number"),
        ({"consumeEnable": None}, "consumes: expected True or False, found None"),
        ({"groupName": ["g"]}, "groupName: expected text, found"),
    ],
)
def test_a_row_of_a_group_is_checked(client: RawClient, broker: Broker, settings: dict[str, object], text: str) -> None:
    """A client makes each queue of a topic, so billions of retry queues would take all its memory."""
    answer = client.call(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {"groupName": "g", **settings})
    assert answer.code == 1
    assert text in (answer.remark or "")
    assert "g" not in broker.groups()


def test_attributes_of_a_topic_are_set_and_removed(client: RawClient, broker: Broker) -> None:
    """As `mqadmin updateTopic -a` names them; one that librmq lacks is refused, as by a broker of 5.x."""

    def change(attributes: str | None) -> str:
        counts = {"read_queue_nums": 1, "write_queue_nums": 1, "perm": 6}
        answer = client.call(Code.UPDATE_AND_CREATE_TOPIC, topic="n", attributes=attributes, **counts)
        return answer.remark or ""

    for attributes, kind in (
        ("+message.type=FIFO", "FIFO"), (None, "FIFO"), ("", "FIFO"), ("+message.type=DELAY", "DELAY"),
        ("-message.type,+queue.type=BatchCQ", "MIXED"),
    ):  # fmt: skip
        assert change(attributes) == ""
        assert broker.topics()["n"].message_type == kind
    for attributes, said in (
        ("+cleanup.policy=COMPACTION", "expected message.type or queue.type, which librmq has, found 'cleanup.policy'"),
        ("+message.type=SLOW", "message_type: expected one of NORMAL, FIFO"),
        ("message.type=FIFO", "expected +NAME=VALUE or -NAME, found 'message.type=FIFO'"),
        ("+message.type", "expected +NAME=VALUE or -NAME"),
    ):
        assert said in change(attributes)
        assert broker.topics()["n"].message_type == "MIXED"


def test_all_addresses_are_those_of_ipv4_too(broker: Broker) -> None:
    """A client of IPv4 sees its own kind of address, and counts as one on this machine."""
    with (
        RemotingServer(broker, listening=listen("::")) as server,
        RawClient(server.port) as client,
        socket.create_connection(("::1", server.port), timeout=20),
    ):
        route = client.ask(Code.GET_ROUTEINFO_BY_TOPIC, topic="TBW102")
        assert route["brokerDatas"][0]["brokerAddrs"] == {"0": f"127.0.0.1:{server.port}"}
        stored = broker.find_by_id(client.put("t", b"x").fields["msgId"])
        assert stored is not None
        assert "{}:{}".format(*stored.born_host) == client.address
        assert client.call(Code.DELETE_TOPIC_IN_BROKER, topic="t").code == 0
