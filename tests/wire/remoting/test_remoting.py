"""The server of the 4.x protocol: every request, held pulls, callbacks, administration, and hostile clients."""

from __future__ import annotations

import json
import random
import socket
from contextlib import ExitStack
from typing import Any

import pytest

from librmq import Broker, ConfigError, ManualRunner, PullConsumer, PushConsumer, SimpleConsumer, StoreConfig
from librmq.message.message import StoredMessage
from librmq.protocol import LOCAL_HOST, Heartbeat
from librmq.store import verify
from librmq.wire.remoting import RemotingServer, listen
from librmq.wire.remoting import _server as server_module
from librmq.wire.remoting._channels import Channel, ClientChannels
from librmq.wire.remoting._frames import Frame, encode
from librmq.wire.remoting._headers import REQUESTS
from librmq.wire.remoting._headers import RequestCode as Code
from librmq.wire.remoting._request_codec import heartbeat_frame
from tests.budget import many
from tests.wire.remoting_client import RawClient

SEND: dict[str, Any] = {"producer_group": "p", "topic": "t", "default_topic": "TBW102", "default_topic_queue_nums": 4}
SEND |= {"queue_id": 0, "sys_flag": 0, "born_timestamp": 5, "flag": 7}


def runner_of(broker: Broker) -> ManualRunner:
    assert isinstance(broker.runner, ManualRunner)
    return broker.runner


def bodies(raw: bytes) -> list[bytes]:
    found = []
    while raw:
        size = int.from_bytes(raw[:4], "big")
        found.append(StoredMessage(raw[:size]).body)
        raw = raw[size:]
    return found


# ---- producers


@pytest.mark.parametrize("code", [Code.SEND_MESSAGE, Code.SEND_MESSAGE_V2])
def test_a_sent_message_is_stored_as_it_came(client: RawClient, broker: Broker, code: Code) -> None:
    fields: dict[str, Any] = {"producer_group": "p", "topic": "t", "default_topic": "TBW102", "queue_id": 2}
    fields |= {"default_topic_queue_nums": 4, "sys_flag": 0, "born_timestamp": 5, "flag": 7}
    answer = client.call(code, b"body", properties="KEYS\1k1\2TAGS\1a\2UNIQ_KEY\1u", **fields)
    assert (answer.code, answer.version, answer.language) == (0, 401, "JAVA")
    assert (answer.fields["queueId"], answer.fields["queueOffset"]) == ("2", "0")
    stored = broker.find_by_id(answer.fields["msgId"])
    assert stored is not None
    assert (stored.body, stored.flag, stored.keys, stored.tags, stored.unique_key) == (b"body", 7, ("k1",), "a", "u")
    assert "{}:{}".format(*stored.born_host) == client.address


def test_a_batch_is_stored_together(client: RawClient, broker: Broker) -> None:
    item = b"\0\0\0\x18" + bytes(12) + b"\0\0\0\2b%d\0\0"
    answer = client.put("t", item % 1 + item % 2, batch=True)
    assert len(answer.fields["msgId"].split(",")) == 2
    assert [message.body for message in broker.messages("t")] == [b"b1", b"b2"]


def test_a_refused_message_has_the_code_of_the_refusal(client: RawClient) -> None:
    for topic, code in (("a bad topic", 1), ("SCHEDULE_TOPIC_XXXX", 16)):
        answer = client.put(topic, b"x")
        assert (answer.code, answer.fields) == (code, {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"})


@pytest.mark.parametrize("topic", ["TBW102", "broker-a", "DefaultCluster"])
def test_topics_of_cluster_and_broker_take_messages(client: RawClient, broker: Broker, topic: str) -> None:
    """``clusterRT`` and ``sendMsgStatus`` of ``mqadmin`` send to them."""
    assert client.put(topic, b"x").code == 0
    assert [message.body for message in broker.messages(topic)] == [b"x"]


@pytest.mark.parametrize(("default", "queues"), [("DefaultCluster", 4), ("BenchmarkTest", None), ("unknown", None)])
def test_a_missing_topic_is_made_like_the_default_one(
    client: RawClient, broker: Broker, default: str, queues: int | None
) -> None:
    """The default topic must pass its permission on."""
    answer = client.put("new", b"x", default_topic=default)
    made = broker.topics().get("new")
    assert (answer.code, made and made.read_queues) == (17 if queues is None else 0, queues)
    assert (
        queues is not None
        or f"with a default topic that exists and lets topics inherit from it, not {default!r}" in (answer.remark or "")
    )


def test_a_transaction_is_asked_about_and_ends(client: RawClient, broker: Broker) -> None:
    client.beat("c1", producers=("p",))
    half = client.put("t", b"x", "TRAN_MSG\1true\2PGROUP\1p\2UNIQ_KEY\1u", sys_flag=4)
    assert not list(broker.messages("t"))
    runner_of(broker).advance(120_000)
    asked = client.asked(Code.CHECK_TRANSACTION_STATE)
    record = StoredMessage(asked.body)
    assert (asked.code, asked.is_one_way, record.body, record.topic) == (Code.CHECK_TRANSACTION_STATE, True, b"x", "t")
    assert asked.fields["transactionId"] == asked.fields["msgId"] == "u"
    client.call(
        Code.END_TRANSACTION,
        producer_group="p",
        tran_state_table_offset=int(asked.fields["tranStateTableOffset"]),
        commit_log_offset=int(asked.fields["commitLogOffset"]),
        commit_or_rollback=8,
        from_transaction_check=True,
    )
    assert half.code == 0
    assert [message.body for message in broker.messages("t")] == [b"x"]


# ---- consumers


def test_a_pull_returns_the_records_of_the_log(client: RawClient, broker: Broker) -> None:
    client.beat("c1", "g", topics=("t",))
    for body in (b"one", b"two"):
        client.put("t", body)
    client.pull("g", "t")
    answer = client.answer()
    assert (answer.code, answer.remark, bodies(answer.body)) == (0, "FOUND", [b"one", b"two"])
    assert answer.body == b"".join(message.raw for message in broker.messages("t"))
    assert answer.fields == {
        "nextBeginOffset": "2", "minOffset": "0", "maxOffset": "2", "suggestWhichBrokerId": "0",
    }  # fmt: skip


def test_a_lite_pull_of_5x_is_a_pull(client: RawClient) -> None:
    """Its ``DefaultLitePullConsumer`` has a code of its own for it, and would never get a message."""
    client.put("t", b"one")
    client.beat("c1", "g", topics=("t",))
    client.pull("g", "t", sys_flag=2 | 4 | 16, subscription="*", expression_type="TAG", code=Code.LITE_PULL_MESSAGE)
    assert bodies(client.answer().body) == [b"one"]


@pytest.mark.parametrize(
    ("offset", "code", "remark"), [(1, 19, "OFFSET_OVERFLOW_ONE"), (9, 21, "OFFSET_OVERFLOW_BADLY")]
)
def test_an_empty_pull_says_why(client: RawClient, offset: int, code: int, remark: str) -> None:
    client.beat("c1", "g", topics=("t",))
    client.put("t", b"one")
    client.pull("g", "t", offset, wait_ms=0, sys_flag=0)
    answer = client.answer()
    assert (answer.code, answer.remark) == (code, remark)


def test_a_held_pull_is_answered_by_a_message(client: RawClient, server: RemotingServer) -> None:
    """Meanwhile other requests on the connection are answered."""
    client.beat("c1", "g", topics=("t",))
    with RawClient(server.port) as other:
        other.put("t", b"first")
        held = client.pull("g", "t", 1, wait_ms=15_000)
        assert client.call(Code.GET_MAX_OFFSET, topic="t", queue_id=0).fields == {"offset": "1"}
        other.put("t", b"second")
        answer = client.answer()
    assert (answer.opaque, bodies(answer.body)) == (held, [b"second"])


def test_a_held_pull_ends_with_its_time(client: RawClient, broker: Broker) -> None:
    client.beat("c1", "g", topics=("t",))
    client.put("t", b"first")
    held = client.pull("g", "t", 1, wait_ms=15_000)
    client.call(Code.GET_MAX_OFFSET, topic="t", queue_id=0)
    runner_of(broker).advance(14_999)
    assert client.call(Code.GET_MIN_OFFSET, topic="t", queue_id=0).code == 0
    runner_of(broker).advance(1)
    answer = client.answer()
    assert (answer.opaque, answer.code, answer.fields["nextBeginOffset"]) == (held, 19, "1")


def test_a_pull_brings_its_subscription_and_progress(client: RawClient, broker: Broker) -> None:
    """Pull consumers send both, because the broker may not know their group."""
    client.put("t", b"one", "TAGS\1a")
    client.put("t", b"two", "TAGS\1b")
    client.beat("c1", "g", topics=("t",))
    client.pull("g", "t", sys_flag=1 | 4, commit_offset=0, subscription="b", expression_type="TAG")
    assert bodies(client.answer().body) == [b"two"]
    assert broker.consumer_offset("g", "t") == 0


def test_a_held_pull_commits_once(client: RawClient, broker: Broker) -> None:
    """Progress that was stored while it was held stays."""
    client.beat("c1", "g", topics=("t",))
    client.put("t", b"one")
    client.pull("g", "t", 1, wait_ms=15_000, sys_flag=3, commit_offset=0)
    client.call(Code.UPDATE_CONSUMER_OFFSET, consumer_group="g", topic="t", queue_id=0, commit_offset=1)
    number = client.send(Code.SEND_MESSAGE, b"two", **SEND)
    assert {client.answer().opaque, client.answer().opaque} == {number, number - 2}
    assert broker.consumer_offset("g", "t") == 1


@pytest.mark.parametrize(
    ("model", "start", "saved", "lines"),
    [
        ("CLUSTERING", "CONSUME_FROM_LAST_OFFSET", None, ["skips its first 3 messages: it starts at 3"]),
        ("CLUSTERING", "CONSUME_FROM_LAST_OFFSET", 1, []),
        ("CLUSTERING", "CONSUME_FROM_FIRST_OFFSET", None, []),
        ("BROADCASTING", "CONSUME_FROM_LAST_OFFSET", None, []),
    ],
)
def test_messages_that_a_new_group_skips_are_logged(
    client: RawClient, caplog: pytest.LogCaptureFixture, model: str, start: str, saved: int | None, lines: list[str]
) -> None:
    for _ in range(3):
        client.put("t", b"x")
    row: dict[str, object] = {"groupName": "g", "messageModel": model, "consumeFromWhere": start}
    row |= {"subscriptionDataSet": [{"topic": "t", "subString": "*", "subVersion": 1}]}
    assert client.call(Code.HEART_BEAT, {"clientID": "c1", "consumerDataSet": [row]}).code == 0
    if saved is not None:
        client.call(Code.UPDATE_CONSUMER_OFFSET, consumer_group="g", topic="t", queue_id=0, commit_offset=saved)
    for offset in (0, 3, 3) if start == "CONSUME_FROM_FIRST_OFFSET" else (3, 3):
        client.pull("g", "t", offset)
        client.answer()
    warnings = [line for line in caplog.records if line.levelname == "WARNING"]
    assert len(warnings) == len(lines)
    for line, text in zip(warnings, lines, strict=True):
        assert text in line.getMessage()
        assert "consume_from of its clients (consumeFromWhere) is LAST" in line.getMessage()


def test_a_held_pull_of_a_group_that_was_left_is_dropped(client: RawClient, broker: Broker) -> None:
    """Asked again, it would be refused."""
    client.beat("c1", "g", topics=("t",))
    client.put("t", b"one")
    client.pull("g", "t", 1, wait_ms=15_000)
    client.call(Code.UNREGISTER_CLIENT, clientID="c1", consumer_group="g")
    runner_of(broker).advance(20_000)
    assert client.call(Code.GET_MAX_OFFSET, topic="t", queue_id=0).fields == {"offset": "1"}


def test_a_connection_that_ended_takes_no_client_along(
    client: RawClient, server: RemotingServer, broker: Broker
) -> None:
    """The client has another connection by then, and the old one can't make it leave."""
    with RawClient(server.port) as former:
        former.beat("c1", "g", topics=("t",))
        client.beat("c1", "g", topics=("t",))
        former.call(Code.UNREGISTER_CLIENT, clientID="c1", consumer_group="g")
    client.call(Code.GET_MAX_OFFSET, topic="t", queue_id=0)
    assert [client.client_id for client in broker.clients()] == ["c1"]


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_client_that_comes_back_is_no_second_one(broker: Broker, has_ended: bool) -> None:
    """Its former connection has ended, which the server has not seen yet."""
    clients = ClientChannels(broker, lambda *_: None)
    beat = heartbeat_frame(Heartbeat("c1", broker, frozenset("p"), ()))
    with ExitStack() as opened:
        pairs = [tuple(map(opened.enter_context, socket.socketpair())) for _ in "ab"]
        former, present = (Channel(ours, LOCAL_HOST, LOCAL_HOST, broker) for ours, _ in pairs)
        clients.register_client(former, beat)
        if has_ended:
            pairs[0][1].shutdown(socket.SHUT_RDWR)
        clients.register_client(present, beat)
        assert broker.shared_client_ids() == (frozenset() if has_ended else {"c1"})
        clients.closed(former, has_ended=False)
        assert [client.client_id for client in broker.clients()] == ["c1"]
        clients.closed(present, has_ended=False)
        assert broker.clients() == ()


def test_progress_is_kept(client: RawClient, broker: Broker) -> None:
    client.put("t", b"x")
    queue = {"consumer_group": "g", "topic": "t", "queue_id": 0}
    assert client.call(Code.QUERY_CONSUMER_OFFSET, **queue).fields == {"offset": "0"}
    assert client.call(Code.UPDATE_CONSUMER_OFFSET, **queue, commit_offset=1).code == 0
    assert client.call(Code.QUERY_CONSUMER_OFFSET, **queue).fields == {"offset": "1"}
    assert broker.consumer_offset("g", "t") == 1


def test_a_failed_message_comes_again_and_dies(client: RawClient, broker: Broker) -> None:
    client.beat("c1", "g", topics=("t",))
    place = broker.find_by_id(client.put("t", b"x", "UNIQ_KEY\1u").fields["msgId"])
    assert place is not None
    back = {"group": "g", "origin_msg_id": "u", "origin_topic": "t", "max_reconsume_times": 16}
    assert client.call(Code.CONSUMER_SEND_MSG_BACK, offset=place.physical_offset, delay_level=0, **back).code == 0
    runner_of(broker).advance(10_000)
    (again,) = broker.messages("%RETRY%g")
    assert (again.body, again.reconsume_times) == (b"x", 1)
    assert client.call(Code.CONSUMER_SEND_MSG_BACK, offset=again.physical_offset, delay_level=-1, **back).code == 0
    assert [letter.body for letter in broker.dead_letters("g")] == [b"x"]


def test_members_are_notified_of_each_other(client: RawClient, server: RemotingServer) -> None:
    client.beat("c1", "g", topics=("t",))
    with RawClient(server.port) as other:
        other.beat("c2", "g", topics=("t",))
        told = client.asked(Code.NOTIFY_CONSUMER_IDS_CHANGED)
        assert (told.code, told.fields) == (Code.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "g"})
        assert client.ask(Code.GET_CONSUMER_LIST_BY_GROUP, consumer_group="g") == {"consumerIdList": ["c1", "c2"]}
    while client.ask(Code.GET_CONSUMER_LIST_BY_GROUP, consumer_group="g") != {"consumerIdList": ["c1"]}:
        client.asked(Code.NOTIFY_CONSUMER_IDS_CHANGED)
    client.call(Code.UNREGISTER_CLIENT, clientID="c1", consumer_group="g")
    gone = client.call(Code.GET_CONSUMER_LIST_BY_GROUP, consumer_group="g")
    assert (gone.code, gone.remark) == (1, "no consumer for this group, g")


def test_a_heartbeat_of_numbers_is_understood(client: RawClient, broker: Broker) -> None:
    """The C++ client sends numbers where others send names."""
    row = {"groupName": "g", "consumeType": 1, "messageModel": 0, "consumeFromWhere": 4}
    row["subscriptionDataSet"] = [{"subString": "*", "subVersion": "12", "topic": "t"}]
    client.call(Code.HEART_BEAT, {"clientID": "c1", "consumerDataSet": [row], "producerDataSet": [{"groupName": "p"}]})
    found = broker.connections("g")
    assert found is not None
    assert (found.kind, found.model.name, found.consume_from.name) == ("push", "BROADCASTING", "FIRST")
    assert found.subscriptions["t"].version == 12


def test_only_a_push_consumer_consumes_passively(client: RawClient, broker: Broker) -> None:
    broker.create_topic("t", 1)
    pushing, pulling, simple = (
        PushConsumer(broker, "push"),
        PullConsumer(broker, "pull"),
        SimpleConsumer(broker, "simple"),
    )
    pushing.subscribe("t", print)
    pulling.subscribe("t")
    simple.subscribe("t")
    with pushing, pulling, simple:
        kinds = {
            group: client.ask(Code.GET_CONSUMER_CONNECTION_LIST, consumer_group=group)["consumeType"]
            for group in ("push", "pull", "simple")
        }
    assert kinds == {"push": "CONSUME_PASSIVELY", "pull": "CONSUME_ACTIVELY", "simple": "CONSUME_ACTIVELY"}


def test_queues_are_locked_for_one_client(client: RawClient) -> None:
    queues = [{"topic": "t", "brokerName": "broker-a", "queueId": number} for number in (0, 1)]
    asked = {"consumerGroup": "g", "clientId": "c1", "mqSet": queues}
    assert len(client.ask(Code.LOCK_BATCH_MQ, asked)["lockOKMQSet"]) == 2
    assert client.ask(Code.LOCK_BATCH_MQ, asked | {"clientId": "c2"}) == {"lockOKMQSet": []}
    client.call(Code.UNLOCK_BATCH_MQ, asked)
    assert len(client.ask(Code.LOCK_BATCH_MQ, asked | {"clientId": "c2"})["lockOKMQSet"]) == 2


def test_a_bad_expression_is_refused_before_the_start(client: RawClient) -> None:
    row = {"topic": "t", "subString": "a >", "expressionType": "SQL92"}
    assert client.call(Code.CHECK_CLIENT_CONFIG, {"clientId": "c", "group": "g", "subscriptionData": row}).code == 23


# ---- name server


def test_a_route_names_the_dialled_address(client: RawClient, server: RemotingServer, broker: Broker) -> None:
    broker.create_topic("t", 3)
    route = client.ask(Code.GET_ROUTEINFO_BY_TOPIC, topic="t")
    assert route["brokerDatas"][0]["brokerAddrs"] == {"0": f"127.0.0.1:{server.port}"}
    assert [data["readQueueNums"] for data in route["queueDatas"]] == [3]
    assert b" " not in client.call(Code.GET_ROUTEINFO_BY_TOPIC, topic="t").body


def test_a_question_makes_no_topic(client: RawClient, broker: Broker) -> None:
    """What ``consumerProgress``, ``consumerStatus`` and ``topicRoute`` ask about a misspelt group leaves nothing."""
    before = broker.topics()
    assert client.call(Code.GET_ROUTEINFO_BY_TOPIC, topic="%RETRY%misspelt").code == 17
    assert client.call(Code.GET_CONSUME_STATS, consumer_group="misspelt").code == 0
    assert client.call(Code.GET_CONSUMER_CONNECTION_LIST, consumer_group="misspelt").code == 206
    assert (broker.topics(), "misspelt" in broker.groups()) == (before, False)


def test_a_test_has_the_route_of_retries_at_once(broker: Broker) -> None:
    with RemotingServer(broker, creates_retry_topics=True) as server, RawClient(server.port) as client:
        route = client.ask(Code.GET_ROUTEINFO_BY_TOPIC, topic="%RETRY%g")
    assert [data["readQueueNums"] for data in route["queueDatas"]] == [1]


def test_values_are_kept_while_the_server_runs(client: RawClient) -> None:
    key = {"namespace": "n", "key": "k"}
    assert client.call(Code.GET_KV_CONFIG, **key).code == 22
    client.call(Code.PUT_KV_CONFIG, **key, value="v")
    assert client.call(Code.GET_KV_CONFIG, **key).fields == {"value": "v"}
    client.call(Code.DELETE_KV_CONFIG, **key)
    assert client.call(Code.GET_KV_CONFIG, **key).code == 22


# ---- administration


def test_topics_and_groups_are_made_and_deleted(client: RawClient, broker: Broker) -> None:
    client.call(
        Code.UPDATE_AND_CREATE_TOPIC, topic="n", default_topic="", read_queue_nums=2, write_queue_nums=2, perm=6
    )
    client.call(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {"groupName": "gg", "retryMaxTimes": 3})
    assert (broker.topics()["n"].read_queues, broker.groups()["gg"]) == (2, 3)
    client.call(Code.UPDATE_CONSUMER_OFFSET, consumer_group="gg", topic="n", queue_id=0, commit_offset=5)
    client.call(Code.DELETE_SUBSCRIPTIONGROUP, group_name="gg", remove_offset=True)
    client.call(Code.DELETE_TOPIC_IN_BROKER, topic="n")
    assert "n" not in broker.topics()
    assert "gg" not in broker.groups()
    assert broker.consumer_offset("gg", "n") is None
    for topic in ("n", "%DLQ%gg"):  # as ``deleteSubGroup -r true`` of mqadmin asks, whether they are there or not
        assert client.call(Code.DELETE_TOPIC_IN_BROKER, topic=topic).code == 0
    assert client.call(Code.DELETE_SUBSCRIPTIONGROUP, group_name="gg").code == 0
    for topic in ("TBW102", "a bad name"):
        assert client.call(Code.DELETE_TOPIC_IN_BROKER, topic=topic).code == 1


def test_tools_of_5x_get_the_row_of_a_topic(client: RawClient) -> None:
    """Their ``examineTopicStats`` asks for it, with fields that 4.x does not have, and ends without an answer."""
    client.call(
        Code.UPDATE_AND_CREATE_TOPIC, topic="n", default_topic="", read_queue_nums=2, write_queue_nums=3, perm=6
    )
    fields = {"lo": "true", "bname": "broker-a", "nsd": "false"}
    client.write(encode(Frame(Code.GET_TOPIC_CONFIG, fields | {"topic": "n"}, b"", 901, language="JAVA")))
    assert json.loads(client.answer().body) == {
        "attributes": {},
        "order": False,
        "perm": 6,
        "readQueueNums": 2,
        "topicFilterType": "SINGLE_TAG",
        "topicName": "n",
        "topicSysFlag": 0,
        "writeQueueNums": 3,
    }
    client.write(encode(Frame(Code.GET_TOPIC_CONFIG, fields | {"topic": "missing"}, b"", 902, language="JAVA")))
    answer = client.answer()
    assert (answer.code, answer.remark) == (17, "No topic in this broker. topic: missing")


def test_tools_of_5x_get_the_row_of_a_group(client: RawClient, broker: Broker) -> None:
    broker.set_group("g", retry_max_times=3)
    row = client.ask(Code.GET_SUBSCRIPTIONGROUP_CONFIG, group="g")
    assert (row["groupName"], row["retryMaxTimes"], row["consumeEnable"]) == ("g", 3, True)
    assert client.call(Code.GET_SUBSCRIPTIONGROUP_CONFIG, group="missing").code == 26


def test_statistics_tell_begin_end_and_progress(client: RawClient) -> None:
    client.beat("c1", "g", topics=("t",))
    client.put("t", b"x")
    client.call(Code.UPDATE_CONSUMER_OFFSET, consumer_group="g", topic="t", queue_id=0, commit_offset=1)
    (row,) = [
        row for key, row in client.ask(Code.GET_TOPIC_STATS_INFO, topic="t")["offsetTable"].items()
        if dict(key)["queueId"] == 0
    ]  # fmt: skip
    assert row == {"lastUpdateTimestamp": 1_000_000, "maxOffset": 1, "minOffset": 0}
    table = client.ask(Code.GET_CONSUME_STATS, consumer_group="g")["offsetTable"]
    rows = {(dict(key)["topic"], dict(key)["queueId"]): row for key, row in table.items()}
    assert rows["t", 0] == {"brokerOffset": 1, "consumerOffset": 1, "lastTimestamp": 1_000_000}


def test_a_reset_reaches_the_clients(client: RawClient, broker: Broker) -> None:
    client.put("t", b"x")
    reset = {"topic": "t", "group": "g", "timestamp": -1}
    assert client.call(Code.INVOKE_BROKER_TO_RESET_OFFSET, **reset).code == 1  # it has never consumed
    for number in range(4):
        client.call(Code.UPDATE_CONSUMER_OFFSET, consumer_group="g", topic="t", queue_id=number, commit_offset=0)
    assert client.call(Code.INVOKE_BROKER_TO_RESET_OFFSET, **reset).code == 206
    client.beat("c1", "g", topics=("t",))
    assert client.call(Code.INVOKE_BROKER_TO_RESET_OFFSET, **reset).code == 0
    told = client.asked(Code.RESET_CONSUMER_CLIENT_OFFSET)
    assert (told.code, told.is_one_way, told.fields["group"]) == (Code.RESET_CONSUMER_CLIENT_OFFSET, True, "g")
    assert b'{"brokerName":"broker-a","queueId":0,"topic":"t"}:1' in told.body


def test_a_client_answers_a_tool_through_the_server(client: RawClient, server: RemotingServer) -> None:
    """The server relays the tool's request to the client, and the answer back."""
    client.beat("c1", "g", topics=("t",))
    with RawClient(server.port) as tool:
        number = tool.send(Code.GET_CONSUMER_RUNNING_INFO, consumer_group="g", client_id="c1")
        asked = client.asked(Code.GET_CONSUMER_RUNNING_INFO)
        asked.flag, asked.body = 1, b'{"properties":{}}'
        client.write(encode(asked))
        answer = tool.answer()
    assert (answer.opaque, answer.body) == (number, b'{"properties":{}}')


def test_what_is_unknown_is_answered_as_unsupported(client: RawClient) -> None:
    client.write(encode(Frame(9999, opaque=3)))
    answer = client.answer()
    assert (answer.code, answer.remark, answer.opaque) == (3, " request type 9999 not supported", 3)


def test_other_machines_administrate_only_if_allowed(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test makes the connection look like one from another machine."""
    monkeypatch.setattr(server_module, "_is_local", lambda host: False)
    with RemotingServer(broker) as server, RawClient(server.port) as client:
        assert client.call(Code.DELETE_TOPIC_IN_BROKER, topic="t").code == 16
        assert client.put("t", b"x").code == 0
    with RemotingServer(broker, allows_admin=True) as server, RawClient(server.port) as client:
        assert client.call(Code.DELETE_TOPIC_IN_BROKER, topic="t").code == 0


# ---- life, and bad input


def test_a_one_way_request_has_no_answer(client: RawClient, broker: Broker) -> None:
    fields = {"consumerGroup": "g", "topic": "t", "queueId": "0", "commitOffset": "0"}
    client.write(encode(Frame(Code.UPDATE_CONSUMER_OFFSET, fields, opaque=77).one_way()))
    assert client.call(Code.GET_MAX_OFFSET, topic="t", queue_id=0).opaque == 1
    assert broker.consumer_offset("g", "t") == 0


def test_a_one_way_request_has_no_later_answer_either(client: RawClient, server: RemotingServer) -> None:
    """Later answers of a connection come in order, so that the first one would be of the first request."""
    client.beat("c1", "g", topics=("t",))
    assert client.put("t", b"x").code == 0
    pull = {"consumer_group": "g", "queue_id": 0, "topic": "t", "queue_offset": 1, "max_msg_nums": 1, "sys_flag": 2}
    pull |= {"commit_offset": 0, "suspend_timeout_millis": 9_000, "sub_version": 1}
    notify = {"consumer_group": "receivers", "queue_id": -1, "topic": "t", "poll_time": 9_000, "born_time": 0}
    with RawClient(server.port) as tool:
        for code, fields in ((Code.PULL_MESSAGE, pull), (Code.NOTIFICATION, notify)):
            client.send(code, one_way=True, **fields)
            client.beat("c1", "g", topics=("t",))  # it is held before this is answered
            assert tool.put("t", b"x").code == 0
            assert client.call(Code.NOTIFICATION, **notify).fields["hasMsg"] == "true"
        of_instance, of_group = {"consumer_group": "g", "client_id": "c1"}, {"group": "g", "topic": "t"}
        for code, asked_code, names in (
            (Code.GET_CONSUMER_RUNNING_INFO, Code.GET_CONSUMER_RUNNING_INFO, of_instance),
            (Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, Code.GET_CONSUMER_STATUS_FROM_CLIENT, of_group),
        ):
            number = [tool.send(code, one_way=is_first, **names) for is_first in (True, False)][1]
            for _ in range(2):
                asked = client.asked(asked_code)
                asked.flag, asked.body = 1, b"{}"
                client.write(encode(asked))
            assert tool.answer().opaque == number


@many
@pytest.mark.parametrize("seed", [None, *range(20)])
def test_rubbish_closes_its_connection_only(client: RawClient, server: RemotingServer, seed: int | None) -> None:
    """Also a frame without a header."""
    frame = b"\0\0\0\4" + bytes(4)
    with RawClient(server.port) as bad:
        bad.write(frame if seed is None else b"\x7f" + random.Random(seed).randbytes(200))
        assert bad.has_ended()
    assert server.refused == 1
    assert client.put("t", b"x").code == 0


@many
@pytest.mark.parametrize("seed", range(20))
def test_fields_of_any_kind_are_answered(client: RawClient, seed: int) -> None:
    """No request ends the connection."""
    draw = random.Random(seed)
    values = ["", "x", "-1", "0", "1", "9223372036854775807", "true", "\0", "😀" * 100, "%RETRY%g", "t"]
    for code, form in REQUESTS.items():
        names = list(form.header.__dataclass_fields__)
        camel = [name.split("_")[0] + "".join(map(str.title, name.split("_")[1:])) for name in names]
        named = [word.partition("=")[0] for word in form.names.split() if "=" in word]
        fields = {name: draw.choice(values) for name in [*camel, *named] if draw.random() < 0.9}
        body = draw.choice([b"", b"{}", b"[]", b"{" * 500, draw.randbytes(30), b'{"clientID":5}'])
        client.write(encode(Frame(code, fields, body, opaque=code)))
        if code != Code.PULL_MESSAGE:
            while client.answer().opaque != code:
                pass


def test_a_client_that_goes_leaves_its_groups(broker: Broker) -> None:
    seen: list[tuple[str, str, bool]] = []
    with RemotingServer(broker, changed=lambda *change: seen.append(change)) as server:
        with RawClient(server.port) as client:
            client.beat("c1", "g", topics=("t",))
            client.pull("g", "t", wait_ms=15_000)
            assert server.clients == 1
        with RawClient(server.port) as other:
            while broker.clients():
                other.put("t", b"x")
    assert seen == [("c1", "g", True), ("c1", "", False)]


def test_closing_ends_all_connections(server: RemotingServer, client: RawClient) -> None:
    client.put("t", b"x")
    server.close()
    server.close()
    assert client.has_ended()
    with pytest.raises(OSError, match=r"."):
        socket.create_connection(("127.0.0.1", server.port), timeout=5).close()


def test_a_taken_port_is_an_error(server: RemotingServer, broker: Broker) -> None:
    with pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1:{server.port}"):
        RemotingServer(broker, listening=server.port)


@pytest.mark.parametrize("address", ["here", "h:", "h:0", "h:99999", ":1", "http://h:1", "a b:1", "::1:1", b"h:1"])
def test_an_address_that_no_client_can_dial_is_refused(broker: Broker, address: Any) -> None:
    with pytest.raises(ConfigError, match=r"advertise: expected host:port such as .*, found "):
        RemotingServer(broker, advertise=address)


def test_a_store_whose_messages_no_frame_holds_is_not_served() -> None:
    config = StoreConfig(max_message_size=16 << 20)
    with Broker.temporary(store_config=config) as broker, pytest.raises(ConfigError, match="max_message_size"):
        RemotingServer(broker)


def test_many_clients_at_once_lose_nothing(server: RemotingServer, broker: Broker) -> None:
    clients = [RawClient(server.port) for _ in range(20)]
    for number in range(10):
        for client in clients:
            client.send(
                Code.SEND_MESSAGE_V2, b"%d" % number, producer_group="p", topic="t", default_topic="TBW102",
                default_topic_queue_nums=4, queue_id=number % 4, sys_flag=0, born_timestamp=0, flag=0,
            )  # fmt: skip
    assert {client.answer().code for client in clients for _ in range(10)} == {0}
    for client in clients:
        client.close()
    assert len(list(broker.messages("t"))) == 200


def test_the_store_is_sound_and_names_the_port(tmp_path: Any) -> None:
    listening = listen()
    port = listening.getsockname()[1]
    config = StoreConfig(store_host=f"127.0.0.1:{port}")
    with (
        Broker.open(tmp_path / "s", store_config=config) as broker,
        RemotingServer(broker, listening=listening) as server,
        RawClient(server.port) as client,
    ):
        assert client.put("t", b"x").fields["msgId"].startswith(f"7F000001{port:08X}")
    assert verify(tmp_path / "s").sound
