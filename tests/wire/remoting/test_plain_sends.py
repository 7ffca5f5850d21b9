"""Sends that come together: stored and answered as each would be alone, by fast paths where they are plain."""

from __future__ import annotations

import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from librmq import Broker, BrokerConfig, Message, MessageStore, StoreConfig
from librmq.clock import ManualClock
from librmq.files import MemoryFiles
from librmq.files.interface import Files
from librmq.protocol import Endpoint, Request, ResponseCode, SendMessage, SendTogether
from librmq.runtime.runner import ManualRunner
from librmq.wire.remoting._channels import Channel, answer_of, answering, tried
from librmq.wire.remoting._codec import send_frame
from librmq.wire.remoting._frames import Frame, FrameReader, FrameSocket, encode, to_fields
from librmq.wire.remoting._headers import REQUESTS, SendHeader
from librmq.wire.remoting._headers import RequestCode as Code
from librmq.wire.remoting._known_headers import KnownHeaders
from librmq.wire.remoting._rates import Rates
from librmq.wire.remoting._sends import Sends
from librmq.wire.remoting._server import RemotingServer
from tests.budget import many
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
    fields = to_fields(header, by_letters=REQUESTS[code].by_letters)
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
        read = FrameReader(read_known=KnownHeaders([producing.pattern(channel.peer)]).read).feed(raw)
        together = [answer for _, answer in producing.send_all(channel, list(read))]
        stored = records(broker)
    with served() as (broker, producing, channel):
        handlers = answering([producing.handlers])
        assert together == [answer_of(handlers, channel, frame) for frame in FrameReader().feed(raw)]
        assert stored == records(broker)
    with served() as (broker, producing, channel):
        assert together == [answer_alone(producing, channel, frame) for frame in FrameReader().feed(raw)]
        assert stored == records(broker)


def answer_alone(producing: Sends, channel: Channel, frame: Frame) -> bytes | None:
    """Return the answer to a frame that came alone, by the fast path for librmq's clients if it takes the frame."""
    raw = encode(replace(frame, language="PYTHON"))
    return producing.answer_plain(channel, raw) or producing.send_all(channel, [*FrameReader().feed(raw)])[0][1]


HEADER = (
    '{"code":310,"extFields":{"a":"p","b":"t","c":"TBW102","d":"4","e":"1","f":"0","g":"5","h":"0","i":"TAGS\\u0001a"},'
    '"flag":0,"language":"JAVA","opaque":7,"version":401}'
)
ODD_FRAMES = {
    "as it is": ("", ""),
    "a number with zeros": ('"opaque":7', '"opaque":07'),
    "a number in other digits": ('"opaque":7', '"opaque":\u0667'),
    "a number that ends in other digits": ('"opaque":7', '"opaque":7\u0667'),
    "no number yet": ('"opaque":7', '"opaque":0'),
    "a negative number": ('"opaque":7', '"opaque":-7'),
    "a fraction": ('"opaque":7', '"opaque":7.5'),
    "a power": ('"opaque":7', '"opaque":7e1'),
    "a large number": ('"opaque":7', '"opaque":2147483647'),
    "too large a number": ('"opaque":7', '"opaque":9999999999'),
    "a second number": ('"version"', '"opaque":8,"version"'),
    "a number in an object": ('"opaque":7', '"x":{"opaque":8,"y":1}'),
    "an answer": ('"flag":0', '"flag":1'),
    "one way": ('"flag":0', '"flag":2'),
    "a remark": ('"flag":0', '"flag":0,"remark":"why"'),
    "another language": ("JAVA", "GO"),
    "more after the end": ("401}", "401}]"),
    "a line break after the end": ("401}", "401}\n"),
    "no end": ("401}", "401"),
}
"""Changes of any request's header: what it has beside its fields."""
ODD = ODD_FRAMES | {
    "another queue first": ('{"code"', '{"e":"2","code"'),
    "another queue last": ('"version"', '"e":"2","version"'),
    "a second queue": ('"e":"1"', '"e":"1","e":"3"'),
    "the queue in another object": ('"flag"', '"x":{"e":"2","g":"6","i":"y"},"flag"'),
    "a queue with a sign": ('"e":"1"', '"e":"+1"'),
    "a queue with zeros": ('"e":"1"', '"e":"001"'),
    "a queue that is none": ('"e":"1"', '"e":"one"'),
    "a queue as a number": ('"e":"1"', '"e":1'),
    "an escaped time": ('"g":"5"', '"g":"\\u0035"'),
    "a time in other digits": ('"g":"5"', '"g":"\u0665"'),
    "a time before 1970": ('"g":"5"', '"g":"-5"'),
    "a time after all": ('"g":"5"', '"g":"99999999999999999999"'),
    "a time with a line break": ('"g":"5"', '"g":"5\n"'),
    "another topic": ('"b":"t"', '"b":"other"'),
    "an escaped topic": ('"b":"t"', '"b":"\\u0074"'),
    "a control character in the topic": ('"b":"t"', '"b":"t\x1f"'),
    "an escaped quote in the topic": ('"b":"t"', '"b":"t\\"'),
    "an escaped quote after the properties": ("TAGS\\u0001a", "TAGS\\u0001a\\"),
    "a quote in the properties": ("TAGS", 'x\\"e\\":\\"2'),
    "a control character": ("TAGS", "\x01"),
    "half a character": ("TAGS", "\\ud800"),
    "no default topic": ('"c":"TBW102",', ""),
    "a batch": ('"f":"0"', '"f":"0","m":"true"'),
}


@many
@pytest.mark.parametrize(("old", "new"), ODD.values(), ids=ODD)
def test_a_known_header_is_read_as_a_new_one(old: str, new: str) -> None:
    """Also if an odd header comes after a usual one."""
    headers = [
        HEADER,
        HEADER.replace('"opaque":7', '"opaque":8'),
        HEADER.replace(old, new, 1),
        HEADER.replace(old, new),
    ]
    asked = []
    for is_known in (True, False):
        with served() as (broker, producing, channel):
            known = KnownHeaders([producing.pattern(channel.peer)]).read if is_known else None
            reader = FrameReader(read_known=known)
            found = [tried(frames_of, reader, header) for header in headers]
            frames = [frame for each in found if isinstance(each, list) for frame in each if not frame.is_answer]
            answers = producing.send_all(channel, frames)
            errors = [str(each) for each in found if isinstance(each, Exception)]
            asked.append(([answer for _, answer in answers], [frame.flag for frame in frames], errors, records(broker)))
    assert asked[0] == asked[1]


PLAIN = Message.from_parts("t", b"x", 7, {"UNIQ_KEY": "k", "TAGS": "größe", "WAIT": "true"})
OF_PLAIN = {
    "as it is": ("", ""),
    "a backslash": ("UNIQ_KEY", "UNIQ\\\\KEY"),
    "a backslash before a mark": ("UNIQ_KEY", "UNIQ_KEY\\\\u0001"),
    "a quote in the properties": ("UNIQ_KEY", '\\"e\\":\\"2'),
    "a control character": ("UNIQ_KEY", "\x01"),
    "half a character": ("UNIQ_KEY", "\\ud800"),
    "a delay": ("TAGS", "DELAY"),
    "a delivery time": ("TAGS", "TIMER_DELIVER_MS"),
    "no such queue": ('"e":"1"', '"e":"9"'),
    "a queue with zeros": ('"e":"1"', '"e":"001"'),
    "the queue twice": ('"e":"1"', '"e":"1","e":"3"'),
    "another topic": ('"b":"t"', '"b":"other"'),
    "a topic of the broker": ('"b":"t"', '"b":"SCHEDULE_TOPIC_XXXX"'),
    "a control character in the topic": ('"b":"t"', '"b":"t\x1f"'),
    "a topic in other letters": ('"b":"t"', '"b":"ť"'),
    "another default topic": ("TBW102", "like"),
    "a flag": ('"f":"0"', '"f":"8"'),
    "too large a flag": ('"h":"7"', '"h":"9999999999"'),
    "a large flag": ('"h":"7"', '"h":"999999999"'),
    "a resend": ('"j":"0"', '"j":"1"'),
    "a batch": ('"m":"false"', '"m":"true"'),
    "one way": ('"flag":0', '"flag":2'),
    "an answer": ('"flag":0', '"flag":1'),
    "another language": ("PYTHON", "GO"),
    "a number with zeros": ('"opaque":5', '"opaque":05'),
    "more after the end": ("401}", "401}]"),
}


@many
@pytest.mark.parametrize(("old", "new"), OF_PLAIN.values(), ids=OF_PLAIN)
def test_a_usual_send_that_comes_alone_is_stored_as_others(old: str, new: str) -> None:
    frame = send_frame(SendMessage("p", PLAIN, 1, BEGIN_MS, ("127.0.0.1", 5)))
    frame.opaque = 5
    header = frame.json_header().decode()
    assert old in header
    asked = []
    for is_alone in (True, False):
        with served() as (broker, producing, channel):
            answers: list[bytes | None] = []
            for each in (header, header.replace(old, new), header):
                raw = each.encode()
                raw = (len(raw) + 5).to_bytes(4) + len(raw).to_bytes(4) + raw + b"x"
                answer = producing.answer_plain(channel, raw) if is_alone else None
                if answer is None:
                    read = tried(lambda _, raw: [*FrameReader().feed(raw)], channel, raw)
                    frames = (
                        [read_frame for read_frame in read if not read_frame.is_answer] if type(read) is list else []
                    )
                    answers += [answer for _, answer in producing.send_all(channel, frames)]
                else:
                    answers.append(answer)
            assert producing.answer_plain(channel, raw) is not None  # the topic is ready now
            assert producing.answer_plain(channel, raw + raw) is None
            assert producing.answer_plain(channel, raw[:-1]) is None
            assert producing.answer_plain(channel, raw[:5]) is None
            asked.append((answers, records(broker)))
    assert asked[0] == asked[1]


@pytest.mark.parametrize(("kind", "excess"), [(1, 0), (255, 0), (0, 50)])
def test_a_usual_header_in_a_malformed_frame_stores_nothing(kind: int, excess: int) -> None:
    with served() as (broker, producing, channel):
        raw = usual_send(b"", 5)
        producing.send_all(channel, [*FrameReader().feed(usual_send(b"x", 5))])
        malformed = raw[:4] + (kind << 24 | len(raw) - 8 + excess).to_bytes(4) + raw[8:]
        assert producing.answer_plain(channel, malformed) is None
        assert FrameReader(read_known=lambda *_: Frame(0)).read_only(malformed) is None
        assert len(records(broker)) == 1


def usual_send(body: bytes, opaque: int, now_ms: int = BEGIN_MS) -> bytes:
    """Return a frame that `Sends.answer_plain` takes."""
    message = Message.from_parts("t", body, 7, {"UNIQ_KEY": "k", "WAIT": "true"})
    frame = send_frame(SendMessage("p", message, 0, now_ms, ("127.0.0.1", 5)))
    frame.opaque = opaque
    return encode(frame)


def test_a_usual_send_counts_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, clocks, append = [], list[ManualClock](), MessageStore.append

    def append_slowly(*arguments: Any, **others: Any) -> Any:
        for clock in clocks:
            clock.advance(ms=7)
        return append(*arguments, **others)

    monkeypatch.setattr(MessageStore, "append", append_slowly)
    for is_alone in (True, False):
        with served() as (broker, _, channel):
            rates, raw = Rates(), usual_send(b"body", 5)
            producing = Sends(broker, rates)
            producing.send_all(channel, [*FrameReader().feed(raw)])
            assert isinstance(broker.runner.clock, ManualClock)
            clocks[:] = [broker.runner.clock]
            if is_alone:
                assert producing.answer_plain(channel, raw) is not None
            else:
                producing.send_all(channel, [*FrameReader().feed(raw)])
            now_ms = broker.runner.now_ms()
            counted.append((rates.total("put"), rates.longest_ms("put"), rates.rows("TOPIC_PUT_SIZE", "t", now_ms)))
            clocks.clear()
    assert counted[0] == counted[1]
    assert counted[0][:2] == ((2, 2, 8), 7)


def test_another_endpoint_gets_usual_sends() -> None:
    """The endpoint of a connection watches each message, for example that of a share."""

    class Watching(Endpoint):
        def call(self, request: Request[Any], /) -> Any:
            return broker.call(request)

    with served() as (broker, producing, channel):
        raw = usual_send(b"x", 5)
        producing.send_all(channel, [*FrameReader().feed(raw)])
        channel.endpoint = Watching()
        assert producing.answer_plain(channel, raw) is None


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
def test_an_error_of_one_usual_send_takes_no_answer_from_others(
    error: BaseException, broker: Broker, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the message, which is stored before the error, stored again."""
    send = Broker.send

    def fail(broker: Broker, group: str, message: Message, *arguments: Any) -> Any:
        response = send(broker, group, message, *arguments)
        if message.body == b"bad":
            raise error
        return response

    client.put("t", b"first")  # so that the topic is there
    monkeypatch.setattr(Broker, "send", fail)
    bodies, now_ms = [b"good", b"bad", b"last"], broker.runner.now_ms()
    client.write(b"".join(usual_send(body, number, now_ms) for number, body in enumerate(bodies)))
    if isinstance(error, SystemExit):  # it ends the thread of the connection
        assert (client.answer().opaque, client.has_ended()) == (0, True)
        del bodies[2]
    else:
        answers = [client.answer() for _ in bodies]
        assert [answer.opaque for answer in answers] == [0, 1, 2]
        assert [answer.code for answer in answers] == [0, ResponseCode.SYSTEM_ERROR, 0]
        assert answers[1].remark == f"{type(error).__name__}: {error}"
    assert [message.body for message in broker.store] == [b"first", *bodies]


@pytest.mark.slow
def test_long_headers_are_not_kept() -> None:
    """A client sends large ones that all differ; its connection stays open."""
    with served() as (_, producing, channel):
        reader = FrameReader(read_known=KnownHeaders([producing.pattern(channel.peer)]).read)
        tracemalloc.start()
        try:
            for number in range(40):
                assert frames_of(reader, HEADER.replace('"flag"', f'"x":"{number:<200000}","flag"'))
            kept = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
    assert kept < 2_000_000


def frames_of(reader: FrameReader, header: str) -> list[Frame]:
    raw = header.encode()
    return list(reader.feed((len(raw) + 5).to_bytes(4, "big") + len(raw).to_bytes(4, "big") + raw + b"x"))


def send_of(number: int, wait: str = "true") -> Frame:
    header = SendHeader("p", "t", "TBW102", 4, number % 4, 0, 5, 0, f"UNIQ_KEY\1{number}\2WAIT\1{wait}")
    return Frame(Code.SEND_MESSAGE_V2, to_fields(header, by_letters=True), b"x", number, language="JAVA")


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


def test_usual_sends_are_answered_around_others(
    broker: Broker, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer comes in the order of its request, also if only a part of the last one has come."""
    stored: list[int] = []
    store = Broker.send

    def note(*arguments: Any) -> Any:
        response = store(*arguments)
        stored.append(response.queue_offset)
        return response

    client.put("t", b"first")  # so that the topic is there
    frames = []
    for number in range(1, 43):
        send = SendMessage("p", PLAIN, 0, broker.runner.now_ms(), ("127.0.0.1", 5), reconsume_times=number == 20)
        frame = send_frame(send)
        frame.opaque = 1_000 + number
        frames.append(encode(frame))
    monkeypatch.setattr(Broker, "send", note)
    raw, part = b"".join(frames), len(frames[-1]) // 2
    client.write(raw[:-part])
    answers = [client.answer() for _ in range(41)]
    client.write(raw[-part:])
    answers.append(client.answer())
    assert [(answer.opaque - 1_000, answer.fields["queueOffset"]) for answer in answers] == [
        (number, str(number)) for number in range(1, 43)
    ]
    assert stored[:2] == [1, 2]


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
