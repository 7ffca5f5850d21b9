"""Recorded answers of a broker and a name server of 4.9.4, given to `connect`: what it makes of each.

A server sends the recorded answer to the request that `connect` writes, and that request is compared with the recorded
one, where librmq had sent it. What is expected stands in the recorded frame itself.
"""

from __future__ import annotations

import queue
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import pytest

import librmq
from librmq import BrokerError, MessageQueue, SendStatus, protocol
from librmq.errors import ClientError
from librmq.java import json as java_json
from librmq.wire.remote import RemoteRoute
from librmq.wire.remote._dialing import AccessKeys
from librmq.wire.remoting._bodies import group_clients_body, heartbeat_of, messages_of
from librmq.wire.remoting._frames import Frame, answer_to, encode
from librmq.wire.remoting._headers import RequestCode
from tests.wire.conversations import Exchange, Side, exchanges, frame_bytes, joined, recordings
from tests.wire.fake_servers import FakeServer
from tests.wire.recorded_requests import REQUESTS, queues_in
from tests.wire.test_connect import until
from tests.wire.test_message_routes import Described

DIFFERENT_REQUESTS: Final = {
    ("PULL_MESSAGE", "sysFlag"): "the test waits for each answer, so it asks the broker not to hold the pull",
    ("PULL_MESSAGE", "suspendTimeoutMillis"): "as above",
    ("PULL_MESSAGE", "commitOffset"): "as above: without the flag it has no meaning",
    ("PULL_MESSAGE", "subVersion"): "the subscription of the heartbeats counts",
    ("QUERY_MESSAGE", "_UNIQUE_KEY_QUERY"): "RemoteRoute adds it",
}
"""Fields that differ from those of the recorded requests, with the reason."""
SIGNATURE: Final = {"AccessKey", "Signature", "SecurityToken"}
PULLED: Final = {
    0: protocol.PullStatus.FOUND,
    19: protocol.PullStatus.NO_NEW_MESSAGE,
    20: protocol.PullStatus.NO_MATCHED_MESSAGE,
    21: protocol.PullStatus.OFFSET_ILLEGAL,
}
SENT: Final = {
    0: SendStatus.SEND_OK,
    10: SendStatus.FLUSH_DISK_TIMEOUT,
    11: SendStatus.SLAVE_NOT_AVAILABLE,
    12: SendStatus.FLUSH_SLAVE_TIMEOUT,
}
ONLINE: Final = group_clients_body(
    protocol.GroupConnections(
        "g", "push", protocol.MessageModel.CLUSTERING, protocol.ConsumeFrom.FIRST, {}, ("c",), {}
    ),
    [{"clientId": "c", "clientAddr": "127.0.0.1:1", "language": "JAVA", "version": 401}],
)
BESIDES: Final[dict[str, dict[int, bytes]]] = {
    "UPDATE_AND_CREATE_SUBSCRIPTIONGROUP": {
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: b'{"subscriptionGroupTable":{}}'
    },
    "INVOKE_BROKER_TO_RESET_OFFSET": {RequestCode.GET_CONSUMER_CONNECTION_LIST: ONLINE},
    "GET_ALL_PRODUCER_INFO": {
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: b'{"subscriptionGroupTable":{"g":{}}}',
        RequestCode.GET_CONSUMER_CONNECTION_LIST: ONLINE,
    },
}
"""By name of the recorded request: answers to what a client asks besides."""


class Replay(FakeServer):
    """A server whose next answer is a recorded one."""

    def __init__(self) -> None:
        self.side: Side | None = None
        self.pushed: bytes | None = None
        """A request of the broker that follows the answer to a heartbeat."""
        self.is_names = False
        self.bodies: Mapping[int, bytes] = {}
        """Answers to other requests, by code, which a client sends besides the recorded one."""
        super().__init__(self._recorded)

    def _usual(self, frame: Frame) -> Frame | None:
        is_recorded = self.is_names or (frame.code == RequestCode.HEART_BEAT and self.pushed is not None)
        if frame.code in self.bodies:
            return answer_to(frame, body=self.bodies[frame.code])
        return None if is_recorded else super()._usual(frame)

    def _recorded(self, frame: Frame) -> bytes | None:
        if frame.is_answer:
            return None
        side = self.side
        if frame.code == RequestCode.HEART_BEAT and self.pushed is not None:
            return encode(answer_to(frame)) + self.pushed
        assert side is not None
        if side.is_binary:
            assert side.raw_header is not None
            header = side.raw_header
            return joined(header[:5] + frame.opaque.to_bytes(4, "big") + header[9:], side.body, is_binary=True)
        if side.raw_header is not None:
            number = f'"opaque":{frame.opaque}'
            return joined(re.sub(r'"opaque":\d+', number, side.raw_header.decode(), count=1).encode(), side.body)
        return frame_bytes({**side.header, "opaque": frame.opaque}, side.body)


def offset(answer: Side) -> int:
    return int(answer.fields["offset"])


def raws(messages: Any) -> bytes:
    return b"".join(message.raw for message in messages)


def of_queues(answer: Side, name: str) -> dict[MessageQueue, Any]:
    table = java_json.loads(answer.body)[name]
    return {next(iter(queues_in([key]))): row for key, row in table.items()}


EXPECTED: Final[dict[str, Callable[[Side], Any]]] = {
    "QUERY_CONSUMER_OFFSET": offset,
    "GET_MAX_OFFSET": offset,
    "GET_MIN_OFFSET": offset,
    "SEARCH_OFFSET_BY_TIMESTAMP": offset,
    "GET_CONSUMER_LIST_BY_GROUP": lambda answer: tuple(java_json.loads(answer.body)["consumerIdList"]),
    "LOCK_BATCH_MQ": lambda answer: queues_in(java_json.loads(answer.body)["lockOKMQSet"]),
    "VIEW_MESSAGE_BY_ID": lambda answer: answer.body,
    "QUERY_MESSAGE": lambda answer: answer.body,
    "INVOKE_BROKER_TO_RESET_OFFSET": lambda answer: of_queues(answer, "offsetTable"),
    "CLEAN_UNUSED_TOPIC": lambda _: (),
}
"""What a good answer says; None for those that say nothing."""
ABSENT: Final[dict[tuple[str, int], Any]] = {
    ("QUERY_CONSUMER_OFFSET", 22): None,
    ("GET_CONSUMER_LIST_BY_GROUP", 1): (),
    ("VIEW_MESSAGE_BY_ID", 1): None,
    ("QUERY_MESSAGE", 22): b"",
}
"""Answers by name and code that are no errors for a client."""


def expected(name: str, answer: Side) -> Any:
    """Return what a recorded answer says."""
    code, fields = answer.code, answer.fields
    if name.startswith("SEND_") and code in SENT:
        ids = tuple(fields["msgId"].split(","))
        return SENT[code], int(fields["queueId"]), int(fields["queueOffset"]), ids, fields.get("transactionId")
    if name == "PULL_MESSAGE" and code in PULLED:
        names = ("nextBeginOffset", "minOffset", "maxOffset")
        is_slave = fields["suggestWhichBrokerId"] != "0"
        return PULLED[code], *(int(fields[each]) for each in names), is_slave, answer.body if code == 0 else b""
    if (name, code) in ABSENT:
        return ABSENT[name, code]
    if code:
        return "refused", code, answer.header.get("remark") or f"refused with code {code}"
    return EXPECTED[name](answer) if name in EXPECTED else None


def made_of(name: str, call: Callable[[], Any]) -> Any:
    """Return what the client makes of an answer, in the form of `expected`."""
    try:
        found = call()
    except BrokerError as error:
        return "refused", error.code, str(error)
    except ClientError as error:
        return "unreadable", str(error)
    if name.startswith("SEND_"):
        return found.status, found.queue_id, found.queue_offset, found.offset_ids, found.transaction_id
    if name == "PULL_MESSAGE":
        bounds = found.next_offset, found.min_offset, found.max_offset
        return found.status, *bounds, found.suggests_replica, raws(found.messages)
    if name == "VIEW_MESSAGE_BY_ID":
        return None if found is None else found.raw
    if name == "QUERY_MESSAGE":
        return raws(found)
    return None if name == "CONSUMER_SEND_MSG_BACK" else found


def to_client(recording: str, peers: tuple[str, ...]) -> Iterator[tuple[Exchange, Side]]:
    for one in exchanges(recording):
        if one.is_from_client and one.peer in peers and one.answer is not None and not one.answer.is_cut:
            yield one, one.answer


@pytest.fixture(scope="module")
def replay() -> Iterator[Replay]:
    with Replay() as server:
        yield server


@pytest.fixture(scope="module")
def route(replay: Replay) -> Iterator[RemoteRoute]:
    with librmq.connect(replay.address) as made:
        yield made


def test_answers_of_the_broker(replay: Replay, route: RemoteRoute) -> None:
    compared: Counter[str] = Counter()
    differ: list[object] = []
    met: set[tuple[str, str]] = set()
    endpoint = route.endpoint("fake")
    for recording in recordings():
        for one, answer in to_client(recording, ("broker", "slave")):
            if one.name not in REQUESTS:
                continue
            build, usual = REQUESTS[one.name]
            replay.side = answer
            replay.bodies = BESIDES.get(one.name, {})
            try:
                request, is_built = build(one.request.fields, one.request.body), not one.request.is_cut
            except (KeyError, ValueError, TypeError, librmq.RmqError):
                request, is_built = usual, False
            made = made_of(one.name, partial(endpoint.call, request))
            compared[one.name] += 1
            if made != expected(one.name, answer):
                differ.append((recording, one.at_ms, one.name, made, expected(one.name, answer)))
            elif is_built and one.client == "librmq":
                for name, *values in differences(one, replay.asked):
                    if (one.name, name) in DIFFERENT_REQUESTS:
                        met.add((one.name, name))
                    else:
                        differ.append((recording, one.at_ms, one.name, name, *values))
    replay.bodies = {}
    assert not differ, "\n".join(f"{each}"[:600] for each in differ)
    assert not compared.keys() ^ REQUESTS.keys(), compared
    assert sum(compared.values()) > 1000
    assert met == DIFFERENT_REQUESTS.keys()


def differences(one: Exchange, asked: list[Frame]) -> Iterator[tuple[str, object, object]]:
    """Yield what differs between the request that was sent and a recorded one, and both values."""
    frame = next(frame for frame in reversed(asked) if frame.code == one.request.code)
    theirs = {name: value for name, value in one.request.fields.items() if name not in SIGNATURE}
    for name in theirs.keys() | frame.fields.keys():
        was_cut = "(cut)" in theirs.get(name, "")
        if theirs.get(name) != frame.fields.get(name) and not was_cut:
            yield name, frame.fields.get(name), theirs.get(name)
    if frame.body != one.request.body:
        yield "body", frame.body, one.request.body


def test_a_delay_becomes_a_level_that_the_broker_names() -> None:
    (side,) = (answer for one, answer in to_client("m_info", ("broker",)) if one.name == "GET_BROKER_CONFIG")
    broker = Described(side.body.decode())
    with (
        FakeServer(broker) as server,
        librmq.connect(server.address) as made,
        librmq.Producer(made, "shop") as producer,
    ):
        producer.send("t", b"x", delay=7)
        with pytest.raises(librmq.MessageIllegalError, match="has no timer, and none of its delay levels, 1s 2s 3s"):
            producer.send("t", b"x", delay=60)
    assert broker.properties == [{"DELAY": "7"}]


SECRETS: Final = {"recorded1": "secret-0001", "recorded2": "secret-0002"}
"""Of the accounts of the recorded broker, by their names."""


def test_signatures_that_a_broker_has_checked() -> None:
    """Those of librmq and of Java are computed again; a broker refuses wrong ones with code 1."""
    signed: Counter[str] = Counter()
    for one, answer in to_client("j_acl", ("broker",)):
        fields = one.request.fields
        if answer.code == 1 or fields.get("AccessKey") not in SECRETS:
            continue
        frame = Frame(one.request.code, {name: fields[name] for name in fields.keys() - SIGNATURE}, one.request.body)
        keys = AccessKeys(fields["AccessKey"], SECRETS[fields["AccessKey"]], fields.get("SecurityToken"))
        keys.sign(frame)
        assert frame.fields["Signature"] == fields["Signature"], (one.at_ms, one.name)
        signed[one.client] += 1
    assert signed["librmq"] > 40
    assert signed["java"] > 10


# ---- tools


def rows_of(answer: Side, *names: str) -> dict[MessageQueue, tuple[int, ...]]:
    return {queue: tuple(row[name] for name in names) for queue, row in of_queues(answer, "offsetTable").items()}


def topics_in(answer: Side) -> dict[str, list[tuple[int, ...]]]:
    table = java_json.loads(answer.body)["topicConfigTable"]
    return {topic: [(row["readQueueNums"], row["writeQueueNums"], row["perm"])] for topic, row in table.items()}


def clients_in(answer: Side) -> tuple[str, set[str], set[str]]:
    body = java_json.loads(answer.body)
    ids = {row["clientId"] for row in body["connectionSet"]}
    return body["messageModel"], ids, set(body["subscriptionTable"])


def clients(admin: RemoteRoute, group: str) -> object:
    found = admin.connections(group)
    return found and (found.model.value, set(found.client_ids), set(found.subscriptions))


def producers_in(answer: Side) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    groups: dict[str, set[str]] = {}
    for group, rows in java_json.loads(answer.body)["data"].items():
        for row in rows:
            groups.setdefault(row["clientId"], set()).add(group)
    return {**{client: (tuple(sorted(names)), ()) for client, names in groups.items()}, "c": ((), ("g",))}


def place_of(fields: Mapping[str, str]) -> Any:
    timestamp_ms = int(fields["timestamp"])
    if timestamp_ms <= 0:
        return "end" if timestamp_ms else "begin"
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC)


NO_PROGRESS: Final = "THe consumer group"
"""A broker says so of a group without progress in the topic."""
TOOLS: Final[dict[str, tuple[Callable[[RemoteRoute, Mapping[str, str]], Any], Callable[[Side], Any], Any]]] = {
    "GET_ALL_TOPIC_CONFIG": (
        lambda admin, _: {
            topic: [(one.read_queues, one.write_queues, one.permission) for one in found.brokers]
            for topic, found in admin.topics().items()
        },
        topics_in,
        None,
    ),
    "GET_ALL_SUBSCRIPTIONGROUP_CONFIG": (
        lambda admin, _: admin.groups(),
        lambda answer: {
            group: row["retryMaxTimes"] for group, row in java_json.loads(answer.body)["subscriptionGroupTable"].items()
        },
        None,
    ),
    "GET_TOPIC_STATS_INFO": (
        lambda admin, fields: admin.queues(fields["topic"]),
        lambda answer: rows_of(answer, "minOffset", "maxOffset", "lastUpdateTimestamp"),
        {17: {}},
    ),
    "GET_CONSUME_STATS": (
        lambda admin, fields: {
            queue: row[:3] for queue, row in admin.progress(fields["consumerGroup"], fields.get("topic")).items()
        },
        lambda answer: rows_of(answer, "brokerOffset", "consumerOffset", "lastTimestamp"),
        {17: {}},
    ),
    "GET_CONSUMER_CONNECTION_LIST": (
        lambda admin, fields: clients(admin, fields["consumerGroup"]),
        clients_in,
        {206: None},
    ),
    "QUERY_TOPIC_CONSUME_BY_WHO": (
        lambda admin, fields: admin.groups_of(fields["topic"]),
        lambda answer: tuple(sorted(java_json.loads(answer.body)["groupList"])),
        None,
    ),
    "GET_ALL_CONSUMER_OFFSET": (
        lambda admin, _: admin.consumer_offsets("MG", "t"),
        lambda answer: java_json.loads(answer.body)["offsetTable"].get("t@MG", {}),
        None,
    ),
    "QUERY_MESSAGE": (
        lambda admin, fields: raws(admin.find_by_key(fields["topic"], fields["key"])),
        lambda answer: raws(sorted(messages_of(answer.body), key=lambda message: message.physical_offset)),
        {22: b""},
    ),
    "GET_ALL_PRODUCER_INFO": (
        lambda admin, _: {one.client_id: (one.producer_groups, one.consumer_groups) for one in admin.clients()},
        producers_in,
        None,
    ),
    "INVOKE_BROKER_TO_RESET_OFFSET": (
        lambda admin, fields: admin.reset_group(fields["group"], fields["topic"], place_of(fields)),
        lambda answer: of_queues(answer, "offsetTable"),
        None,
    ),
    "DELETE_TOPIC_IN_BROKER": (lambda admin, fields: admin.delete_topic(fields["topic"]), lambda _: None, None),
    "DELETE_SUBSCRIPTIONGROUP": (lambda admin, fields: admin.delete_group(fields["groupName"]), lambda _: None, None),
    "CLEAN_UNUSED_TOPIC": (lambda admin, _: admin.clean_unused_topics(), lambda _: [], None),
}
"""By name: what a tool asks for, what a good answer says, and what other answers say by their code."""


def test_answers_to_tools(replay: Replay, route: RemoteRoute, monkeypatch: pytest.MonkeyPatch) -> None:
    admin = route
    monkeypatch.setattr("librmq.wire.remote._administration._SAVED_WITHIN_S", 0)
    compared: Counter[str] = Counter()
    for recording in recordings():
        for one, answer in to_client(recording, ("broker", "slave")):
            if one.name not in TOOLS or one.request.fields.get("topic") == "TBW102":  # refused before a request
                continue
            ask, read, by_code = TOOLS[one.name]
            replay.side, replay.bodies = answer, BESIDES.get(one.name, {})
            compared[one.name] += 1
            where = recording, one.at_ms, one.name
            if answer.code and answer.code not in (by_code or {}):
                with pytest.raises(BrokerError) as caught:
                    ask(admin, one.request.fields)
                remark = answer.header["remark"]
                said = "have not saved progress" if NO_PROGRESS in remark else remark
                assert (caught.value.code, said in str(caught.value)) == (answer.code, True), where
                continue
            expected = by_code[answer.code] if answer.code else read(answer)
            assert ask(admin, one.request.fields) == expected, where
    replay.bodies = {}
    assert compared.keys() == TOOLS.keys()


# ---- name servers


def route_in(answer: Side) -> tuple[object, object]:
    """Return the brokers' addresses and the queues in the answer of a name server; none in one without a route."""
    if answer.code == protocol.ResponseCode.TOPIC_NOT_EXIST:
        return {}, []
    body = java_json.loads(answer.body)
    rows = body["brokerAddrTable"].values() if "brokerAddrTable" in body else body["brokerDatas"]
    brokers = {
        row["brokerName"]: {int(number): address for number, address in row["brokerAddrs"].items()} for row in rows
    }
    queues = [
        (
            row["brokerName"],
            row["readQueueNums"],
            row["writeQueueNums"],
            row["perm"] if 0 in brokers[row["brokerName"]] else row["perm"] & ~2,  # a slave takes no sends
        )
        for row in body.get("queueDatas", ())
    ]
    return brokers, queues


def test_answers_of_the_name_server(replay: Replay, route: RemoteRoute) -> None:
    compared: Counter[tuple[str, int]] = Counter()
    replay.is_names = True
    try:
        for recording in recordings():
            for one, answer in to_client(recording, ("namesrv",)):
                if one.name not in ("GET_ROUTEINFO_BY_TOPIC", "GET_BROKER_CLUSTER_INFO"):
                    continue
                replay.side = answer
                names = route.name_servers
                found = names.route_of("t") if one.name == "GET_ROUTEINFO_BY_TOPIC" else names.all_brokers()
                queues = [(row.broker_name, row.read_queues, row.write_queues, row.permission) for row in found.queues]
                assert (found.brokers, queues) == route_in(answer), (recording, one.at_ms)
                compared[one.name, answer.code] += 1
    finally:
        replay.is_names = False
    assert len(compared) == 3, compared


# ---- what clients say of themselves, and what a broker asks of them


def test_heartbeats_are_written_alike(replay: Replay) -> None:
    compared = 0
    for recording in recordings():
        for one in exchanges(recording):
            if one.name != "HEART_BEAT" or one.client != "librmq":
                continue
            client_id, producers, consumers, checking = heartbeat_of(one.request.body)
            with librmq.connect(replay.address) as route:
                route.endpoint("fake").call(protocol.Heartbeat(client_id, Asked([]), producers, consumers, checking))
            frame = next(frame for frame in reversed(replay.asked) if frame.code == RequestCode.HEART_BEAT)
            assert java_json.loads(frame.body) == java_json.loads(one.request.body), (recording, one.at_ms)
            compared += 1
    assert compared > 100


class Asked:
    """A client that keeps what a broker asks, and answers as recorded."""

    def __init__(self, answers: list[Any]) -> None:
        self.requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers = answers

    def call(self, request: protocol.Request[Any], /) -> Any:
        self.requests.put(request)
        if isinstance(request, protocol.ConsumeDirectly):
            request.ended(protocol.DirectlyConsumed(protocol.DirectResult.SUCCESS, False, 0))
        return self._answers.pop() if isinstance(request, protocol.ConsumerOffsets) else None


def asked_in(one: Exchange) -> Any:
    """Return what a recorded request of a broker asks a client."""
    f, body = one.request.fields, one.request.body
    if one.name == "CHECK_TRANSACTION_STATE":
        return f["transactionId"], body, int(f["commitLogOffset"]), int(f["tranStateTableOffset"])
    if one.name == "RESET_CONSUMER_CLIENT_OFFSET":
        return f["group"], f["topic"], of_queues(one.request, "offsetTable")
    if one.name == "GET_CONSUMER_STATUS_FROM_CLIENT":
        return f["group"], f["topic"]
    return f["consumerGroup"], body if one.name == "CONSUME_MESSAGE_DIRECTLY" else None


def understood(request: Any) -> Any:
    """Return what a client understood, in the form of `asked_in`."""
    if isinstance(request, protocol.CheckTransaction):
        half = request.message
        assert request.group == half.properties["PGROUP"]
        return request.transaction_id, half.raw, half.physical_offset, half.queue_offset
    if isinstance(request, protocol.ResetOffsets):
        return request.group, request.topic, request.offsets
    if isinstance(request, protocol.ConsumerOffsets):
        return request.group, request.topic
    return request.group, request.message.raw if isinstance(request, protocol.ConsumeDirectly) else None


def test_requests_of_the_broker(replay: Replay) -> None:
    """A client understands them, and the answers that the broker took are written again."""
    compared: Counter[str] = Counter()
    for recording in recordings():
        for one in exchanges(recording):
            if one.is_from_client or one.client != "librmq" or one.name == "GET_CONSUMER_RUNNING_INFO":
                continue
            if compared[one.name] > 10:
                continue
            table = {} if one.answer is None or not one.answer.body else java_json.loads(one.answer.body)
            progress = {next(iter(queues_in([key]))): at for key, at in table.get("messageQueueTable", {}).items()}
            client = Asked([progress])
            replay.pushed = one.request.raw()
            try:
                with librmq.connect(replay.address) as route:
                    route.endpoint("fake").call(protocol.Heartbeat("c", client, frozenset(("p",)), ()))
                    assert understood(client.requests.get(timeout=60)) == asked_in(one), (recording, one.at_ms)
                    if one.answer is not None:
                        until(lambda: replay.asked[-1].is_answer)
                        answer = replay.asked[-1]
                        assert (answer.code, java_json.loads(answer.body)) == (one.answer.code, table)
            finally:
                replay.pushed = None
            compared[one.name] += 1
    assert len(compared) == 5, compared
