"""Random bytes in calls and connections: the server refuses them, logs no traceback, and keeps serving."""

from __future__ import annotations

import gc
import random
import socket
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError

from librmq.wire.grpc import GrpcServer
from librmq.wire.grpc._protocol import message_class
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


def telemetry(chance: random.Random) -> bytes:
    """Return valid settings of a client, of one of several shapes."""
    command = message_class("TelemetryCommand")()
    settings = command.settings
    settings.access_point.addresses.add(host="localhost", port=1)
    settings.request_timeout.FromSeconds(3)
    settings.user_agent.hostname = "h"
    settings.metric.endpoints.addresses.add(host="m")
    if chance.random() < 0.5:
        settings.backoff_policy.exponential_backoff.initial.FromSeconds(1)
        settings.publishing.topics.add(name="t")
    else:
        settings.backoff_policy.customized_backoff.next.add().FromSeconds(2)
        settings.subscription.group.name = "g"
        settings.subscription.subscriptions.add().topic.name = "t"
    data: bytes = command.SerializeToString()
    return data


def test_classes_of_nested_messages_are_held() -> None:
    """protobuf's upb lets the class of a nested message go with its last instance, though the parser can need it."""
    command = message_class("TelemetryCommand").FromString(telemetry(random.Random(0)))
    nested = [command.settings, command.settings.metric, command.settings.backoff_policy, command.settings.user_agent]
    classes = [weakref.ref(type(one)) for one in nested]
    del command, nested
    gc.collect()
    assert all(one() is not None for one in classes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", some(range(8)))
def test_changed_settings_are_parsed_on_several_threads(seed: int) -> None:
    def parse(number: int) -> int:
        chance, parsed = random.Random(f"{seed} {number}"), 0
        for turn in range(500):
            try:
                command = message_class("TelemetryCommand").FromString(changed(telemetry(chance), chance))
            except DecodeError:
                continue
            copy = message_class("TelemetryCommand")()
            copy.settings.CopyFrom(command.settings)
            copy.settings.backoff_policy.exponential_backoff.max.FromSeconds(1)
            copy.settings.metric.endpoints.CopyFrom(copy.settings.access_point)
            parsed += len(copy.SerializeToString()) > 0
            if turn % 50 == 0:
                gc.collect()
        return parsed

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(parse, range(4)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", some(range(4)))
def test_changed_settings_on_streams_stop_no_client(server: GrpcServer, seed: int) -> None:
    chance = random.Random(seed)
    with Stub(server.address) as stub:
        for _ in range(40):
            try:
                list(stub.raw_stream("Telemetry", changed(telemetry(chance), chance), timeout=0.05))
            except grpc.RpcError:
                continue
        assert stub.send(message("t")).status.code == 20000
