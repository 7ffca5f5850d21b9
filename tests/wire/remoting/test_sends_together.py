"""Sends that come together: stored and answered as each would be alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from librmq import Broker, BrokerConfig, Message, MessageStore, StoreConfig
from librmq.clock import ManualClock
from librmq.files import MemoryFiles
from librmq.files.interface import Files
from librmq.protocol import ResponseCode, SendMessage, SendTogether
from librmq.runtime import ManualRunner
from librmq.wire.remoting._channels import Channel
from librmq.wire.remoting._frames import Frame, FrameReader, FrameSocket, encode
from librmq.wire.remoting._headers import REQUESTS, SendHeader
from librmq.wire.remoting._headers import RequestCode as Code
from librmq.wire.remoting._request_codec import send_frame
from librmq.wire.remoting._running_info import Rates
from librmq.wire.remoting._sends import Sends
from librmq.wire.remoting._server import RemotingServer
from tests.file_seams import FailingFiles
from tests.wire.remoting_client import RawClient

BEGIN_MS = 1_000_000
NAMES = ("KEYS", "TAGS", "UNIQ_KEY", "WAIT", "DELAY", "TRAN_MSG", "TIMER_DELAY_MS", "CLUSTER", "colour", "größe", "")
VALUES = ("a", "k1 k2", "true", "false", "1", "3600000", "x\1y", "ü\ud800", "")
PROPERTIES = st.one_of(
    st.dictionaries(st.sampled_from(NAMES[:4]), st.sampled_from(VALUES[:5])),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES)),
)
TOPICS = ("t", "t", "t", "other", "%RETRY%g", "a bad topic", "SCHEDULE_TOPIC_XXXX", "HOP")


@st.composite
def sends(draw: Any) -> Frame:
    """Return a request that is plain most of the time."""
    rare = draw(st.integers(0, 5)) == 0
    header = SendHeader(
        "p",
        draw(st.sampled_from(TOPICS if rare else TOPICS[:4])),
        "TBW102",
        4,
        draw(st.sampled_from((0, 1, 3, 9, -1) if rare else (0, 1, 3))),
        draw(st.sampled_from((0, 1, 4, 8, 16, 1 << 31) if rare else (0,))),
        draw(st.sampled_from((5, 1_700_000_000_000, -1))),
        draw(st.sampled_from((0, 7, -7, 1 << 40) if rare else (0, 7))),
        "\2".join(f"{name}\1{value}" for name, value in draw(PROPERTIES).items()) + draw(st.sampled_from(("", "\2"))),
        draw(st.sampled_from((0, 2))),
        max_reconsume_times=draw(st.sampled_from((None, 3))),
    )
    code = draw(st.sampled_from((Code.SEND_MESSAGE_V2,) * 4 + (Code.SEND_MESSAGE,)))
    fields = REQUESTS[code].write(header)
    for name in draw(st.lists(st.sampled_from(sorted(fields.keys() - {"b"})), max_size=1)) if rare else ():
        del fields[name]
    body = draw(st.sampled_from((b"", b"body", bytes(5000))))
    return Frame(code, fields, body, draw(st.integers(0, 1 << 30)), language="JAVA", is_binary=draw(st.booleans()))


@contextmanager
def served(files: Files | None = None, **settings: Any) -> Iterator[tuple[Broker, Sends, Channel]]:
    ours, peers = socket.socketpair()
    runner, store = ManualRunner(ManualClock(BEGIN_MS)), StoreConfig.tiny(compress_from=4096, **settings)
    with (
        ours,
        peers,
        Broker.open(
            "b", BrokerConfig(hops=True), store_config=store, runner=runner, files=files or MemoryFiles()
        ) as broker,
    ):
        broker.create_topic("t", 4)
        yield broker, Sends(broker, Rates()), Channel(ours, ("127.0.0.1", 5), ("127.0.0.1", 6), broker)


def records(broker: Broker) -> list[bytes]:
    return [message.raw for message in broker.store]


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.lists(sends(), max_size=12))
def test_sends_together_are_as_each_alone(frames: list[Frame]) -> None:
    """Records and answers have equal bytes, whatever the requests are."""
    raw = b"".join(map(encode, frames * 2))
    with served() as (broker, producing, channel):
        together = [answer for _, answer in producing.send_all(channel, [*FrameReader().feed(raw)])]
        stored = records(broker)
    with served() as (broker, producing, channel):
        alone = [answer for frame in FrameReader().feed(raw) for _, answer in producing.send_all(channel, [frame])]
        assert together == alone
        assert stored == records(broker)


PLAIN = Message.from_parts("t", b"x", 7, {"UNIQ_KEY": "k", "TAGS": "größe", "WAIT": "true"})


def usual_send(body: bytes, opaque: int, now_ms: int = BEGIN_MS) -> bytes:
    message = Message.from_parts("t", body, 7, {"UNIQ_KEY": "k", "WAIT": "true"})
    frame = send_frame(SendMessage("p", message, 0, now_ms, ("127.0.0.1", 5)))
    frame.opaque = opaque
    return encode(frame)


def test_the_body_of_a_send_is_not_taken_for_another_send(
    broker: Broker, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its body is a frame, and comes in a read of its own."""
    inner = usual_send(b"x", 7, broker.runner.now_ms())
    outer = usual_send(inner, 8, broker.runner.now_ms())
    receive, parts = FrameSocket.receive, list[bytes]()

    def receive_parts(stream: FrameSocket, size: int, flags: int = 0) -> bytes:
        if not parts:
            head, *rest = receive(stream, size, flags).partition(inner)
            parts.extend(filter(None, (head, b"".join(rest))))
        return parts.pop(0) if parts else b""

    client.put("t", b"first")  # so that the topic is there
    monkeypatch.setattr(FrameSocket, "receive", receive_parts)
    client.write(usual_send(b"second", 6, broker.runner.now_ms()))
    assert client.answer().opaque == 6  # the server's next read is by parts
    client.write(outer)
    assert client.answer().opaque == 8
    assert [message.body for message in broker.store] == [b"first", b"second", inner]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [MemoryError("full"), ValueError("odd"), SystemExit()], ids=repr)
def test_an_error_of_one_send_takes_no_answer_from_others(
    error: BaseException, broker: Broker, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are messages that were stored before the error stored again."""
    append = MessageStore.append

    def fail(store: MessageStore, message: Message, *arguments: Any, **others: Any) -> Any:
        if message.body == b"bad":
            raise error
        return append(store, message, *arguments, **others)

    client.put("t", b"first")  # so that the topic is there
    monkeypatch.setattr(MessageStore, "append", fail)
    bodies, now_ms = [b"good", b"bad", b"last"], broker.runner.now_ms()
    client.write(b"".join(usual_send(body, number, now_ms) for number, body in enumerate(bodies)))
    if isinstance(error, SystemExit):  # it ends the thread of the connection
        assert client.has_ended()
        del bodies[2]
    else:
        answers = [client.answer() for _ in bodies]
        assert [answer.opaque for answer in answers] == [0, 1, 2]
        assert [answer.code for answer in answers] == [0, ResponseCode.SYSTEM_ERROR, 0]
        assert answers[1].remark == f"{type(error).__name__}: {error}"
    del bodies[1]
    assert [message.body for message in broker.store] == [b"first", *bodies]


def send_of(number: int, wait: str = "true") -> Frame:
    header = SendHeader("p", "t", "TBW102", 4, number % 4, 0, 5, 0, f"UNIQ_KEY\1{number}\2WAIT\1{wait}")
    return Frame(Code.SEND_MESSAGE_V2, REQUESTS[Code.SEND_MESSAGE_V2].write(header), b"x", number, language="JAVA")


def test_sends_together_wait_for_the_device() -> None:
    files = FailingFiles(MemoryFiles())
    with served(files, durability="sync") as (broker, producing, channel):
        codes = [code_of(answer) for _, answer in producing.send_all(channel, [send_of(0), send_of(16)])]
        files.fail("flush")
        frames = [send_of(4), send_of(8), send_of(12, "false")]
        codes += [code_of(answer) for _, answer in producing.send_all(channel, frames)]
        assert codes == [0, 0, ResponseCode.FLUSH_DISK_TIMEOUT, ResponseCode.FLUSH_DISK_TIMEOUT, 0]
        broker.abandon()


def code_of(answer: bytes) -> int:
    (frame,) = FrameReader().feed(answer)
    return frame.code


def test_sends_are_answered_in_the_order_of_their_requests(broker: Broker, client: RawClient) -> None:
    """Also if only a part of the last one has come."""
    client.put("t", b"first")  # so that the topic is there
    frames = []
    for number in range(1, 43):
        send = SendMessage("p", PLAIN, 0, broker.runner.now_ms(), ("127.0.0.1", 5), reconsume_times=int(number == 20))
        frame = send_frame(send)
        frame.opaque = 1_000 + number
        frames.append(encode(frame))
    raw, part = b"".join(frames), len(frames[-1]) // 2
    client.write(raw[:-part])
    answers = [client.answer() for _ in range(41)]
    client.write(raw[-part:])
    answers.append(client.answer())
    assert [(answer.opaque - 1_000, answer.fields["queueOffset"]) for answer in answers] == [
        (number, str(number)) for number in range(1, 43)
    ]


def test_sends_together_answer_a_held_pull(server: RemotingServer, client: RawClient) -> None:
    client.beat("c1", "g", topics=("t",))
    client.put("t", b"first")
    held = client.pull("g", "t", 1, wait_ms=15_000)
    with RawClient(server.port) as other:
        other.write(b"".join(encode(send_of(4 * number)) for number in range(3)))
        assert [other.answer().fields["queueOffset"] for _ in range(3)] == ["1", "2", "3"]
        answer = client.answer()
        assert (answer.opaque, answer.fields["nextBeginOffset"]) == (held, "4")


@pytest.mark.parametrize(("durability", "counts"), [("async", [16, 16, 8]), ("sync", [40])])
def test_many_sends_are_stored_in_parts(
    durability: Literal["async", "sync"], counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client continues with the first answers meanwhile; only sends that wait for the device wait once for all."""
    stored: list[int] = []
    call = Broker.call

    def count(broker: Broker, request: Any) -> Any:
        response = call(broker, request)
        if isinstance(request, SendTogether):
            stored.append(len(response))
        return response

    monkeypatch.setattr(Broker, "call", count)
    config = StoreConfig.tiny(durability=durability)
    with (
        Broker.open("/store", store_config=config, files=MemoryFiles()) as broker,
        RemotingServer(broker) as server,
        RawClient(server.port) as client,
    ):
        client.put("t", b"first")  # so that the topic is there
        client.write(b"".join(encode(send_of(4 * number)) for number in range(40)))
        assert [client.answer().fields["queueOffset"] for _ in range(40)] == [str(number) for number in range(1, 41)]
    assert stored == counts
