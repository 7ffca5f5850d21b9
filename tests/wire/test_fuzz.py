"""Random bytes in calls and connections: the server refuses them, logs no traceback, and keeps serving."""

from __future__ import annotations

import random
import socket
from typing import Any

import grpc
import pytest

from librmq.wire.grpc import GrpcServer
from librmq.wire.grpc.protocol import message_class
from tests.budget import some
from tests.wire.stub import Stub, message

CALLS = (
    "QueryRoute",
    "Heartbeat",
    "SendMessage",
    "QueryAssignment",
    "ReceiveMessage",
    "AckMessage",
    "ForwardMessageToDeadLetterQueue",
    "EndTransaction",
    "NotifyClientTermination",
    "ChangeInvisibleDuration",
    "RecallMessage",
)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def requests(stub: Stub) -> dict[str, bytes]:
    """Return a valid request for each call."""
    t, g = message_class("Resource")(name="t"), message_class("Resource")(name="g")
    stub.send(message("t", b"a"), message("t", b"b", tag="x", properties={"p": "1"}))
    (found, *_) = stub.receive("t")[1]
    receipt = found.system_properties.receipt_handle
    fields: dict[str, dict[str, Any]] = {
        "QueryRoute": {"topic": t},
        "Heartbeat": {"group": g, "client_type": 3},
        "SendMessage": {"messages": [message("t", b"body", tag="a", keys=["k"], properties={"a": "b"}, deliver_ms=9)]},
        "QueryAssignment": {"topic": t, "group": g},
        "ReceiveMessage": {"group": g, "batch_size": 4, "attempt_id": "x"},
        "AckMessage": {"group": g, "topic": t, "entries": [{"message_id": "id", "receipt_handle": receipt}]},
        "ForwardMessageToDeadLetterQueue": {"group": g, "topic": t, "receipt_handle": receipt},
        "EndTransaction": {"topic": t, "transaction_id": "id", "resolution": 1},
        "NotifyClientTermination": {"group": g},
        "ChangeInvisibleDuration": {"group": g, "topic": t, "receipt_handle": receipt},
        "RecallMessage": {"topic": t, "recall_handle": "djEgdCBicm9rZXItYSAxIGlk"},
    }
    made = {name: message_class(f"{name}Request")(**fields[name]) for name in CALLS}
    made["ReceiveMessage"].message_queue.topic.name = "t"
    made["ReceiveMessage"].long_polling_timeout.FromMilliseconds(1)
    made["ReceiveMessage"].invisible_duration.FromSeconds(10)
    return {name: one.SerializeToString() for name, one in made.items()}


def changed(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with some of them flipped, removed, doubled or inserted."""
    found = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(found) + 1)
        kind = chance.randrange(4)
        if kind == 0 and at < len(found):
            found[at] = chance.randrange(256)
        elif kind == 1:
            del found[at : at + chance.randint(1, 8)]
        elif kind == 2:
            found[at:at] = found[at : at + chance.randint(1, 16)]
        else:
            found[at:at] = chance.randbytes(chance.randint(1, 8))
    return bytes(found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", some(range(16)))
def test_changed_requests_are_answered(server: GrpcServer, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(seed)
    with Stub(server.address) as stub:
        sound, codes = requests(stub), set()
        for name in CALLS * 6:
            try:
                if name == "ReceiveMessage":
                    list(stub.raw_stream(name, changed(sound[name], chance), timeout=0.5))
                else:
                    stub.raw(name, changed(sound[name], chance))
            except grpc.RpcError as error:  # the request cannot be decoded, or the call waits
                codes.add(error.code())
        assert stub.send(message("t")).status.code == 20000
    assert codes <= {grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED}
    assert not [record for record in caplog.records if record.exc_info and record.name.startswith("librmq")]


@pytest.mark.parametrize("seed", some(range(16)))
def test_random_bytes_on_a_connection_stop_no_client(server: GrpcServer, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        with socket.create_connection((server.host, server.port), timeout=5) as raw:
            raw.sendall((PREFACE if chance.random() < 0.5 else b"") + chance.randbytes(chance.randint(1, 4000)))
    with Stub(server.address) as stub:
        assert stub.send(message("t")).status.code == 20000
