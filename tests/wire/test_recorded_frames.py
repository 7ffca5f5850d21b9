"""Recorded requests of Java, Go and C++ clients and ``mqadmin``, sent again: the answers have the same fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import pytest

from librmq import Broker, ManualClock, ManualRunner, Message
from librmq.java import json as java_json
from librmq.protocol import SendMessage
from librmq.wire.remoting import RemotingServer
from librmq.wire.remoting.codes import RequestCode as Code
from librmq.wire.remoting.frames import Frame, FrameReader
from tests.reference import existing, jsonl
from tests.wire.remoting_client import RawClient

DIFFERENT: Final = {
    Code.GET_BROKER_RUNTIME_INFO: "librmq counts no thread pools, and says what it knows",
    Code.GET_BROKER_CONFIG: "librmq has settings of its own",
    Code.GET_NAMESRV_CONFIG: "librmq has settings of its own",
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
            sent = broker.call(SendMessage("p", message, queue_id, 1, ("127.0.0.1", 1)))
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


def test_recorded_frames_are_read_whole() -> None:
    for row in recorded():
        (frame,) = FrameReader().feed(raw_of(row["request"]["header"], row["request"].get("body", "").encode()))
        assert frame.code == row["request"]["header"]["code"]
