"""Recorded requests of Java, Go and C++ clients and ``mqadmin``, sent again: the answers have the same fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import pytest

import librmq
from librmq import Broker, ManualClock, ManualRunner, Message, protocol
from librmq.java import json as java_json
from librmq.wire.remoting import RemotingServer
from librmq.wire.remoting._frames import Frame
from librmq.wire.remoting._headers import RequestCode as Code
from librmq.wire.remoting._request_codec import FORMS, heartbeat_frame, send_frame
from tests.reference import existing, jsonl
from tests.wire.remoting_client import RawClient

DIFFERENT: Final = {
    Code.UPDATE_BROKER_CONFIG: "the process that opened the broker owns its settings: a change is refused",
    Code.GET_BROKER_CONSUME_STATS: "lists the broker's groups, which differ",
}
"""Requests whose answers differ, with the reason."""
SIGNED: Final = {"AccessKey", "Signature", "OnsChannel"}
MISSING: Final = {1, 17, 206}
"""Codes for topics, groups and clients that do not exist."""
OFFSET_FIELDS: Final = ("offset", "commitLogOffset")
TOPICS: Final = ("T4", "TG", "TJ", "TO", "NEW")


def recorded() -> list[Mapping[str, Any]]:
    rows = jsonl(existing("remoting", "frames.jsonl"))
    return [row for row in rows if row["from"] == "client"]


def header_of(row: Mapping[str, Any], offset: int) -> dict[str, Any]:
    """Return a recorded header, changed to a place in this store and to a pull that does not wait."""
    header: dict[str, Any] = json.loads(json.dumps(row["request"]["header"]))
    fields = header.get("extFields") or {}
    if header["code"] in (Code.VIEW_MESSAGE_BY_ID, Code.CONSUMER_SEND_MSG_BACK, Code.END_TRANSACTION):
        fields |= {name: str(offset) for name in OFFSET_FIELDS if name in fields}
    if header["code"] == Code.PULL_MESSAGE:
        fields["suspendTimeoutMillis"] = "0"
    return header


def raw_of(header: Mapping[str, Any], body: bytes) -> bytes:
    raw = json.dumps(header).encode()
    return (4 + len(raw) + len(body)).to_bytes(4, "big") + len(raw).to_bytes(4, "big") + raw + body


def shape(value: object) -> object:
    """Return the form of a body: its names, and the types of its values."""
    if isinstance(value, dict):
        plain = {key: each for key, each in value.items() if isinstance(key, str) and key.isidentifier()}
        if plain.keys() != value.keys() or not value:
            return "a table"
        return {key: shape(each) for key, each in plain.items()}
    if isinstance(value, list):
        return "a list"
    return type(value).__name__


def elements(value: object) -> object:
    """Return one element of a table."""
    return shape(next(iter(value.values()))) if isinstance(value, dict) and value else None


@pytest.fixture
def broker() -> Any:
    with Broker.temporary(runner=ManualRunner(ManualClock(1_795_210_700_000))) as made:
        for topic in TOPICS:
            made.create_topic(topic, 4)
        yield made


def difference(row: Mapping[str, Any], answer: Frame) -> object:
    """Return how an answer differs from the recorded one; None if it does not."""
    expected, is_pull = row["answer"]["header"], row["request"]["header"]["code"] == Code.PULL_MESSAGE
    if answer.code == 0 and expected["code"] in MISSING:
        return None  # the recording was made before this existed
    if is_pull and answer.code != expected["code"]:
        return None  # this store has other messages
    if (answer.code == 0) != (expected["code"] == 0):
        return expected["code"], answer
    if answer.code == 0 and set(answer.fields) != set(expected.get("extFields") or {}) - SIGNED:
        return expected.get("extFields"), answer.fields
    body = row["answer"].get("body", "")
    if answer.code or not body.startswith("{"):
        return None
    theirs, ours = java_json.loads(body), java_json.loads(answer.body)
    if shape(theirs) != shape(ours):
        return shape(theirs), shape(ours)
    tables = [name for name, each in theirs.items() if each and shape(each) == "a table"]
    return next(
        (each for name in tables if (each := (elements(theirs[name]), elements(ours[name])))[0] != each[1]), None
    )


def prepare(broker: Broker, client: RawClient) -> int:
    """Store messages, groups and progress as the recorded requests expect them; return a physical offset."""
    for topic in TOPICS[:-1]:
        for queue_id in range(4):
            message = Message(topic, b"x", tags="a", keys="KEY9", unique_key=f"U{queue_id}")
            sent = broker.call(protocol.SendMessage("p", message, queue_id, 1, ("127.0.0.1", 1)))
    for topic, group in (("T4", "CID-x"), ("TJ", "CID-j"), ("TG", "CID-go"), ("TO", "CID-o"), ("TO", "CID-l")):
        client.beat(f"own-{group}", group, topics=(topic, f"%RETRY%{group}"), producers=("PID-m",))
        for queue_id in range(4):
            queue = {"consumer_group": group, "topic": topic, "queue_id": queue_id}
            client.call(Code.UPDATE_CONSUMER_OFFSET, **queue, commit_offset=1)
        client.put(topic, b"y")
        client.pull(group, topic, wait_ms=0)
        client.answer()
    broker.set_group("GG")
    client.call(Code.PUT_KV_CONFIG, namespace="ns1", key="k1", value="v1")
    return sent.physical_offset


def test_answers_have_equal_fields(broker: Broker) -> None:
    """The code, the field names and the form of JSON bodies are equal, except where `DIFFERENT` gives a reason."""
    compared = 0
    found: dict[tuple[str, str], object] = {}
    with RemotingServer(broker) as server, RawClient(server.port) as client:
        offset = prepare(broker, client)
        for row in recorded():
            code = Code(row["request"]["header"]["code"])
            if row["answer"] is None or code is Code.GET_CONSUMER_RUNNING_INFO:  # unanswered, or relayed to a client
                continue
            header = header_of(row, offset)
            client.write(raw_of(header, row["request"].get("body", "").encode()))
            answer = client.answer()
            compared += 1
            if code not in DIFFERENT and (differs := difference(row, answer)) is not None:
                found[code.name, header["language"]] = differs
    assert compared > 90
    assert not found, "\n".join(f"{key}: {value}" for key, value in found.items())


QUEUES = frozenset((librmq.MessageQueue("T", "b", 0),))
SUBSCRIPTION = protocol.Subscription("T", "a", "TAG", 1)
OF_CLIENTS: Final[dict[Code, protocol.Request[Any]]] = {
    Code.SEND_MESSAGE_V2: protocol.SendMessage("p", Message("T", b"x"), 0, 1, ("127.0.0.1", 1)),
    Code.SEND_BATCH_MESSAGE: protocol.SendBatch("p", (Message("T", b"x"),), 0, 1, ("127.0.0.1", 1)),
    Code.END_TRANSACTION: protocol.EndTransaction("p", librmq.TransactionState.COMMIT, 0, 0, "ID"),
    Code.GET_CONSUMER_LIST_BY_GROUP: protocol.ConsumerIds("g"),
    Code.QUERY_CONSUMER_OFFSET: protocol.QueryOffset("g", "T", 0),
    Code.UPDATE_CONSUMER_OFFSET: protocol.UpdateOffset("g", "T", 0, 1),
    Code.GET_MAX_OFFSET: protocol.MaxOffset("T", 0),
    Code.GET_MIN_OFFSET: protocol.MinOffset("T", 0),
    Code.SEARCH_OFFSET_BY_TIMESTAMP: protocol.QueueOffsetAt("T", 0, 0),
    Code.LOCK_BATCH_MQ: protocol.LockQueues("g", "c", QUEUES),
    Code.UNLOCK_BATCH_MQ: protocol.UnlockQueues("g", "c", QUEUES),
    Code.CONSUMER_SEND_MSG_BACK: protocol.SendBack("g", 0, 0, 16, "T", "ID"),
    Code.CHECK_CLIENT_CONFIG: protocol.CheckSubscription("c", "g", SUBSCRIPTION),
    Code.VIEW_MESSAGE_BY_ID: protocol.ViewMessage(0),
    Code.QUERY_MESSAGE: protocol.QueryMessages("T", "k"),
    Code.UPDATE_AND_CREATE_TOPIC: protocol.CreateTopic("T", 4, 4),
    Code.DELETE_TOPIC_IN_BROKER: protocol.DeleteTopic("T"),
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: protocol.SetGroup("g", {"retryMaxTimes": 3}),
    Code.DELETE_SUBSCRIPTIONGROUP: protocol.DeleteGroup("g"),
    Code.INVOKE_BROKER_TO_RESET_OFFSET: protocol.ResetGroup("g", "T", 0, True),
}
EXTRA: Final = {Code.END_TRANSACTION: {"transactionId"}}
"""Fields of librmq that Java leaves out if they are empty."""
OF_A_SERVER: Final = {"ReqT"}
"""A field of admin tools, which brokers ignore."""


def names_in(body: bytes) -> object:
    return shape(java_json.loads(body)) if body.startswith(b"{") else None


def frame_of(request: Any) -> Frame:
    if isinstance(request, protocol.Heartbeat):
        return heartbeat_frame(request)
    if isinstance(request, protocol.SendMessage | protocol.SendBatch):
        return send_frame(request)
    return FORMS[type(request)].write(request)


def test_the_client_writes_the_fields_of_java() -> None:
    """Each request has the fields of Java's, and a body of the same form."""
    requests = OF_CLIENTS | {Code.HEART_BEAT: protocol.Heartbeat("c", None, frozenset(("p",)), ())}  # type: ignore[arg-type]
    ours = {code: frame_of(request) for code, request in requests.items()}
    left = set(ours)
    for row in recorded():
        header = row["request"]["header"]
        code = Code(header["code"])
        if code not in ours or header["language"] != "JAVA":
            continue
        left.discard(code)
        theirs = set(header.get("extFields") or {}) - OF_A_SERVER
        assert theirs ^ set(ours[code].fields) <= EXTRA.get(code, set()), code
        body = row["request"].get("body", "").encode()
        if body:
            assert names_in(body) == names_in(ours[code].body), code
    assert not left
