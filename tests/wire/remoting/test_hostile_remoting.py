"""Clients of the 4.x server that stall, flood it, or request more than a frame can hold."""

from __future__ import annotations

import json
import logging
import random
import socket
import ssl
import threading
import tracemalloc
from contextlib import ExitStack, suppress
from dataclasses import fields
from typing import Any, Final

import pytest

from librmq import Broker, ConsumeFrom, ManualRunner, PushConsumer, TransactionState
from librmq.message.batch import BatchItem, encode_batch
from librmq.protocol import Takes
from librmq.store import verify
from librmq.wire.certificates import self_signed
from librmq.wire.remoting import RemotingServer
from librmq.wire.remoting import _consumer_requests as consuming_module
from librmq.wire.remoting import _server as server_module
from librmq.wire.remoting._frames import Frame, FrameReader, encode, to_fields
from librmq.wire.remoting._headers import REQUESTS, ClientOfGroupHeader
from librmq.wire.remoting._headers import RequestCode as Code
from tests.budget import many
from tests.reference import existing, jsonl
from tests.wire.remoting_client import RawClient

SENT: Final[dict[str, Any]] = {
    "producer_group": "p", "topic": "t", "default_topic": "TBW102", "default_topic_queue_nums": 4, "sys_flag": 0,
    "born_timestamp": 5, "flag": 0,
}  # fmt: skip


def shaken(server: RemotingServer) -> ssl.SSLSocket:
    """Return a TLS connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(socket.create_connection(("127.0.0.1", server.port), timeout=20))


def test_a_stalled_handshake_does_not_stop_the_end(broker: Broker) -> None:
    server = RemotingServer(broker, tls=self_signed(["127.0.0.1"]))
    with socket.create_connection(("127.0.0.1", server.port)), shaken(server):
        closing = threading.Thread(target=server.close, daemon=True)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()


def test_part_of_a_tls_record_holds_up_no_answer(broker: Broker) -> None:
    """A held pull is answered while the client's next record is still arriving."""
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    tls = context.wrap_bio(into, out)
    with (
        RemotingServer(broker, tls=self_signed(["127.0.0.1"])) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw,
    ):

        def step(call: object, *arguments: object) -> object:
            while True:
                try:
                    result = call(*arguments)  # type: ignore[operator]
                except ssl.SSLWantReadError:
                    raw.sendall(out.read())
                    into.write(raw.recv(1 << 16))
                else:
                    raw.sendall(out.read())
                    return result

        reader = FrameReader()

        def answer() -> Frame:
            while True:
                received = step(tls.read, 1 << 16)
                assert isinstance(received, bytes)
                for frame in reader.feed(received):
                    if frame.is_answer:
                        return frame

        step(tls.do_handshake)
        beat = b'{"clientID":"c","consumerDataSet":[{"groupName":"g","subscriptionDataSet":[{"topic":"t"}]}]}'
        step(tls.write, encode(Frame(Code.HEART_BEAT, body=beat, opaque=1)))
        assert answer().code == 0
        broker.create_topic("t", 1)
        fields = {"consumerGroup": "g", "topic": "t", "queueId": "0", "queueOffset": "0", "maxMsgNums": "32"}
        fields |= {"sysFlag": "2", "commitOffset": "0", "suspendTimeoutMillis": "15000", "subVersion": "0"}
        step(tls.write, encode(Frame(Code.PULL_MESSAGE, fields, opaque=2)))
        ask = Frame(Code.GET_MAX_OFFSET, {"topic": "t", "queueId": "0"}, opaque=3)
        step(tls.write, encode(ask))  # its answer shows that the pull is held
        assert answer().opaque == 3
        ask.opaque = 4
        tls.write(encode(ask))
        record = out.read()
        raw.sendall(record[:-1])
        runner = broker.runner
        assert isinstance(runner, ManualRunner)
        runner.advance(15_000)
        assert answer().opaque == 2
        raw.sendall(record[-1:])
        assert answer().opaque == 4


def part_of_a_heartbeat(size: int) -> bytes:
    """Return bytes of a frame that lacks eight at its end."""
    return encode(Frame(Code.HEART_BEAT, body=bytes(size)))[:-8]


def test_the_connection_that_holds_most_makes_room(server: RemotingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HELD_BYTES", 900)
    monkeypatch.setattr(server_module, "_COUNTED", 0)
    with RawClient(server.port) as client, RawClient(server.port) as filling, RawClient(server.port) as small:
        filling.write(part_of_a_heartbeat(600))
        small.write(part_of_a_heartbeat(200))
        assert filling.has_ended()
        assert client.call(Code.GET_MAX_OFFSET, topic="t", queue_id=0).opaque == 1
        small.write(bytes(8))
        assert small.answer().code == 1


@pytest.mark.platform
def test_the_address_that_holds_most_makes_room(server: RemotingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several connections of one address together hold more than the largest one."""
    monkeypatch.setattr(server_module, "HELD_BYTES", 1_000)
    monkeypatch.setattr(server_module, "_COUNTED", 0)
    with (
        RawClient(server.port, "127.0.0.2") as large,
        RawClient(server.port) as first,
        RawClient(server.port) as second,
    ):
        large.write(part_of_a_heartbeat(350))
        first.write(part_of_a_heartbeat(250))
        second.write(part_of_a_heartbeat(200))
        assert first.has_ended()
        large.write(bytes(8))
        assert large.answer().code == 1


def test_silent_connections_make_room(server: RemotingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one that has never asked anything is closed for a new one, and clients at work stay."""
    monkeypatch.setattr(server_module, "CONNECTIONS", 3)
    with RawClient(server.port) as client:
        assert client.put("t", b"x").code == 0
        with RawClient(server.port) as silent, RawClient(server.port), RawClient(server.port) as late:
            assert silent.has_ended()
            assert late.put("t", b"x").code == client.put("t", b"x").code == 0


def test_connections_that_make_room_do_not_fill_the_log(
    server: RemotingServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "CONNECTIONS", 1)
    with ExitStack() as opened:
        silent = [opened.enter_context(RawClient(server.port)) for _ in range(5)]
        assert all(client.has_ended() for client in silent[:-1])
        assert silent[-1].put("t", b"x").code == 0
    assert caplog.text.count("another client needs its place") == 1


def test_connections_are_bounded(server: RemotingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all clients are at work, one too many is closed; one that leaves makes room."""
    monkeypatch.setattr(server_module, "CONNECTIONS", 2)
    with RawClient(server.port) as first:
        first.call(Code.GET_MAX_OFFSET, topic="t", queue_id=0)
        with RawClient(server.port) as second:
            second.call(Code.GET_MAX_OFFSET, topic="t", queue_id=0)
            with RawClient(server.port) as third:
                assert third.has_ended()
            assert first.put("t", b"x").code == second.put("t", b"x").code == 0


@pytest.mark.platform
def test_another_address_gets_a_place(server: RemotingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One address that takes all places with clients at work gives one up for another address."""
    monkeypatch.setattr(server_module, "CONNECTIONS", 2)
    with RawClient(server.port) as first, RawClient(server.port) as second:
        for client in (first, second):
            client.call(Code.GET_MAX_OFFSET, topic="t", queue_id=0)
        with RawClient(server.port, "127.0.0.2") as other:
            assert second.has_ended()
            assert other.put("t", b"x").code == first.put("t", b"x").code == 0


def test_a_frame_must_end_in_time(server: RemotingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "FRAME_SECONDS", 0)
    with RawClient(server.port) as client, RawClient(server.port) as slow:
        whole = part_of_a_heartbeat(300)
        ask = Frame(Code.GET_MAX_OFFSET, {"topic": "t", "queueId": "0"}, opaque=1)
        slow.write(encode(ask) + whole[:200])
        assert slow.answer().opaque == 1  # the server has read the beginning of the second frame too
        assert client.put("t", b"x").code == 0
        slow.write(whole[200:])
        assert slow.has_ended()
        assert client.put("t", b"x").code == 0


@pytest.mark.parametrize(
    "body", [b'{"clientID":"c","x":[' + b"{}," * 100_000 + b"{}]}", b'{"clientID":"' + b"c" * (5 << 20) + b'"}']
)
def test_a_heartbeat_that_becomes_many_objects_is_refused(client: RawClient, body: bytes) -> None:
    answer = client.call(Code.HEART_BEAT, body)
    assert answer.code == 1
    assert "expected at most" in (answer.remark or "")
    assert client.put("t", b"x").code == 0


def test_a_batch_that_is_too_large_is_not_read(client: RawClient, broker: Broker) -> None:
    messages = encode_batch([BatchItem(b"")]) * 400_000
    client.call(Code.SEND_MESSAGE_V2, b"x", **SENT, queue_id=0)
    tracemalloc.start()
    try:
        answer = client.call(Code.SEND_MESSAGE_V2, messages, **SENT, queue_id=0, batch=True)
        assert tracemalloc.get_traced_memory()[1] < 10 * len(messages)
    finally:
        tracemalloc.stop()
    assert (answer.code, answer.fields) == (13, {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"})
    assert sum(1 for _ in broker.messages("t")) == 1


def test_a_large_header_is_refused(client: RawClient) -> None:
    client.write(encode(Frame(Code.HEART_BEAT, {"x": "x" * (1 << 20)})))
    assert client.has_ended()


@pytest.mark.parametrize("bound", ["_MOST_HELD", "_MOST_HELD_IN_ALL"])
def test_held_pulls_are_bounded(client: RawClient, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    """A pull too many is answered immediately; one that is answered makes room."""
    monkeypatch.setattr(consuming_module, bound, 2)
    client.beat("c", "g", topics=("t",))
    client.put("t", b"x")
    held = [client.pull("g", "t", 0, 15_000, queue_id=number) for number in (1, 2)]
    refused = client.pull("g", "t", 0, 15_000, queue_id=3)
    answer = client.answer()
    assert (answer.opaque, answer.code) == (refused, 19)
    number = client.send(Code.SEND_MESSAGE_V2, b"x", **SENT, queue_id=1)
    assert {client.answer().opaque, client.answer().opaque} == {number, held[0]}
    client.pull("g", "t", 0, 15_000, queue_id=3)
    assert client.call(Code.GET_MAX_OFFSET, topic="t", queue_id=3).fields == {"offset": "0"}


@pytest.mark.parametrize("seed", range(4))
def test_garbled_requests_are_answered_or_cut_off(
    client: RawClient, server: RemotingServer, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """Nothing that clients have sent, changed at random, makes the server fail."""
    draw = random.Random(seed)
    recorded = [row["request"] for row in jsonl(existing("remoting", "frames.jsonl")) if row["from"] == "client"]
    odd = ["-1", "2147483648", "9223372036854775808", "", "null", "true", "%RETRY%g", "TBW102", "a" * 300, "1e5", "٣"]
    for _ in range(15):
        with RawClient(server.port) as garbling:
            for request in draw.choices(recorded, k=8):
                header = json.loads(json.dumps(request["header"]))
                header["extFields"] = {
                    name: draw.choice([value, value, draw.choice(odd)])
                    for name, value in (header.get("extFields") or {}).items()
                }
                head, body = bytearray(json.dumps(header).encode()), bytearray(request.get("body", "").encode())
                garbled = draw.choice([head, body, body])
                if garbled and draw.random() < 0.4:
                    garbled[draw.randrange(len(garbled))] = draw.randrange(256)
                length = 4 + len(head) + len(body)
                with suppress(OSError):
                    garbling.write(length.to_bytes(4, "big") + len(head).to_bytes(4, "big") + head + body)
    assert client.put("t", b"x").code == 0
    assert not [line for line in caplog.records if line.levelno >= logging.ERROR]


def test_large_answers_do_not_wait_for_each_other(client: RawClient) -> None:
    """Answers are sent as soon as they are ready, so rubbish after the requests cannot take them back."""
    place = client.put("t", bytes(3 << 20)).fields
    offset = str(int(place["msgId"][16:], 16))
    requests = [encode(Frame(Code.VIEW_MESSAGE_BY_ID, {"offset": offset}, opaque=number)) for number in (7, 8)]
    client.write(b"".join(requests) + b"\x7f" * 8)
    assert [client.answer().opaque for _ in requests] == [7, 8]
    assert client.has_ended()


def test_what_no_frame_can_hold_is_an_error(client: RawClient, server: RemotingServer) -> None:
    """Another client answers with a code that the binary header of the requesting client cannot express."""
    client.beat("c1", "g", topics=("t",))
    with RawClient(server.port) as tool:
        fields = to_fields(ClientOfGroupHeader("g", "c1"))
        tool.write(encode(Frame(Code.GET_CONSUMER_RUNNING_INFO, fields, opaque=5, is_binary=True)))
        asked = client.asked(Code.GET_CONSUMER_RUNNING_INFO)
        asked.flag, asked.code = 1, 1 << 20
        client.write(encode(asked))
        answer = tool.answer()
    assert (answer.opaque, answer.code) == (5, 1)
    assert "expected a number of 16 bits" in (answer.remark or "")


ODD_NAMES: Final = {"half": "\ud800", "long": "a" * 20_000, "at": "a@b", "empty": "", "escape": "a\x1b[31mb"}


@pytest.mark.parametrize("name", ODD_NAMES.values(), ids=ODD_NAMES)
def test_no_name_of_a_request_spoils_a_table(
    client: RawClient, broker: Broker, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Every text in every request has an odd value; afterwards all tables can be saved, and are little larger."""

    def size() -> int:
        tables = broker.tables
        return sum(
            len(table.snapshot(0)) for table in (tables.topics, tables.groups, tables.offsets, tables.filter_table)
        )

    client.put("t", b"x")
    client.beat("c1", "g", topics=("t",))
    before = size()
    usual = {"topic": "t", "group": "g", "consumerGroup": "g", "clientID": "c1", "a": "p", "b": "t", "e": "0"}
    for code, form in REQUESTS.items():
        texts = [field.name for field in fields(form.header) if "str" in str(field.type)]
        others = {"state": TransactionState.UNKNOWN, "attributes": {" ": None}, "takes": Takes.NO_SUSPECT}
        for text in texts:
            odd = {"": None} if text == "attributes" else "odd"
            marked = form.header(**{one.name: others.get(one.name, "0") for one in fields(form.header)} | {text: odd})
            texts_sent = form.write(marked).items()
            named = {key: name if value in ("odd", "-") else usual.get(key, value) for key, value in texts_sent}
            head = json.dumps({"code": code, "extFields": named, "flag": 2, "opaque": 9}).encode()
            client.write((4 + len(head)).to_bytes(4) + len(head).to_bytes(4) + head)
    client.call(Code.UPDATE_CONSUMER_OFFSET, consumer_group="g", topic="t", queue_id=0, commit_offset=1)
    assert broker.consumer_offset("g", "t") == 1
    assert size() < before + 2_000
    assert not [line for line in caplog.records if line.exc_info]


@many
def test_no_field_of_a_send_spoils_the_store_or_a_group(client: RawClient, broker: Broker) -> None:
    """Neither a claim to be a batch of 5.x nor the largest number of attempts, which can't grow by one."""
    client.put("t", b"x", "INNER_NUM\x01nonsense", sys_flag=64 | 128, reconsume_times=(1 << 31) - 1)
    assert verify(broker.store.path).sound
    client.beat("c1", "g", topics=("t",))
    back: dict[str, Any] = {"offset": 0, "group": "g", "delay_level": 0, "max_reconsume_times": 16}
    assert client.call(Code.CONSUMER_SEND_MSG_BACK, **back, origin_msg_id="", origin_topic="t").code == 0
    assert [letter.body for letter in broker.dead_letters("g")] == [b"x"]


@pytest.mark.parametrize("sys_flag", [4, 12])
def test_a_send_that_claims_a_half_message_takes_no_place(client: RawClient, broker: Broker, sys_flag: int) -> None:
    """It is in no queue, so a waiting consumer must not get it in place of the next message."""
    broker.create_topic("t", 1)
    bodies: list[bytes] = []
    consumer = PushConsumer(broker, "g", consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("t", lambda message: bodies.append(message.body))
    runner = broker.runner
    assert isinstance(runner, ManualRunner)
    with consumer:
        runner.advance(1_000)
        assert client.put("t", b"claims", sys_flag=sys_flag).code == 13
        assert client.put("t", b"next").code == 0
        runner.advance(1_000)
    assert bodies == [b"next"]


@pytest.mark.parametrize("name", ["consumeType", "messageModel", "consumeFromWhere"])
@pytest.mark.parametrize("odd", [None, [], {}, 7, "X"])
def test_odd_kinds_in_a_heartbeat_mean_the_default(client: RawClient, broker: Broker, name: str, odd: object) -> None:
    row = {"groupName": "g", "subscriptionDataSet": [{"topic": "t"}], name: odd}
    assert client.call(Code.HEART_BEAT, {"clientID": "c1", "consumerDataSet": [row]}).code == 0
    found = broker.connections("g")
    assert found is not None
    assert (found.kind, found.model.name) == ("push", "CLUSTERING")
