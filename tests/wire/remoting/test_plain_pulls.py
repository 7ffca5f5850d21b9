"""Pulls whose headers equal an earlier one but for some values: read and answered as any others."""

from __future__ import annotations

import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from librmq import Broker, Message, StoreConfig
from librmq.clock import ManualClock
from librmq.files import MemoryFiles
from librmq.protocol import SendMessage
from librmq.runtime.runner import ManualRunner
from librmq.wire.remoting._channels import Channel, answer_of, answering, tried
from librmq.wire.remoting._consumer_requests import PULLS, Pulls
from librmq.wire.remoting._frames import Frame, FrameReader, encode, from_fields, read_json, to_fields
from librmq.wire.remoting._headers import PullHeader
from librmq.wire.remoting._headers import RequestCode as Code
from librmq.wire.remoting._known_headers import KnownFrame, KnownHeaders
from librmq.wire.remoting._rates import Rates
from tests.budget import many
from tests.wire.remoting.test_plain_sends import ODD_FRAMES

TOPICS = ("t", "other")


@st.composite
def pulls(draw: Any) -> Frame:
    """Return a pull that is usual most of the time."""
    rare = draw(st.integers(0, 5)) == 0
    header = PullHeader(
        "g",
        draw(st.sampled_from(("t", "other", "%RETRY%g", "größe", 'a "bad" topic', "") if rare else TOPICS)),
        draw(st.sampled_from((0, 1, 3, 9, -1, 1 << 40) if rare else (0, 1))),
        draw(st.sampled_from((0, 1, 7, 10, 11, -1, 1 << 62) if rare else (0, 7, 10, 500))),
        draw(st.sampled_from((32, 3, 0, -1) if rare else (32,))),
        draw(st.sampled_from((0, 1, 2, 4, 5, 6, 7) if rare else (4, 5))),
        draw(st.sampled_from((0, 4, -1))),
        draw(st.sampled_from((0, 15_000))),
        draw(st.sampled_from((1, 1_700_000_000_000, -1))),
        draw(st.sampled_from(("*", "", "a || b", 'x"\\\1ü') if rare else ("*",))),
    )
    fields = to_fields(header)
    names = draw(st.sampled_from((list(fields), sorted(fields), sorted(fields, reverse=True))))
    for name in draw(st.lists(st.sampled_from(names), max_size=1)) if rare else ():
        names.remove(name)
    code = draw(st.sampled_from((Code.PULL_MESSAGE,) * 9 + (Code.QUERY_CONSUMER_OFFSET,)))
    fields = {name: fields[name] for name in names}
    return Frame(code, fields, b"", draw(st.integers(0, 1 << 30)), language="JAVA", is_binary=draw(st.booleans()))


@contextmanager
def served() -> Iterator[tuple[Broker, Channel]]:
    ours, peers = socket.socketpair()
    runner = ManualRunner(ManualClock(1_000_000))
    with (
        ours,
        peers,
        Broker.open("b", store_config=StoreConfig.tiny(), runner=runner, files=MemoryFiles()) as broker,
    ):
        for topic in TOPICS:
            broker.create_topic(topic, 4)
            for number in range(10):
                broker.call(SendMessage("p", Message(topic, b"%d" % number, tags="a"), 0, 5, ("127.0.0.1", 5)))
        yield broker, Channel(ours, ("127.0.0.1", 5), ("127.0.0.1", 6), broker)


@given(st.lists(pulls(), max_size=12))
def test_known_pulls_are_answered_as_others(frames: list[Frame]) -> None:
    """Answers and progress are equal, and JSON has the bytes that a frame of such an answer has."""
    outcomes = []
    for known in (KnownHeaders([PULLS]), None):
        reader = FrameReader(read_known=None if known is None else known.read)
        with served() as (broker, channel):
            handlers = answering([{Code.PULL_MESSAGE: Pulls(broker, Rates()).pull}])
            found = list(reader.feed(b"".join(map(encode, frames * 3))))
            answers = [answer_of(handlers, channel, frame) for frame in found]
            progress = {
                (topic, queue): broker.consumer_offset("g", topic, queue) for topic in TOPICS for queue in (0, 1)
            }
            outcomes.append((answers, progress))
    assert outcomes[0] == outcomes[1]
    for answer in filter(None, answers):
        assert [encode(frame) for frame in FrameReader().feed(answer)] == [answer]


HEADER = (
    '{"code":11,"extFields":{"queueId":"1","maxMsgNums":"32","sysFlag":"4","suspendTimeoutMillis":"0","topic":"t",'
    '"commitOffset":"0","queueOffset":"7","subVersion":"1","consumerGroup":"g","subscription":"*"},'
    '"flag":0,"language":"JAVA","opaque":7,"serializeTypeCurrentRPC":"JSON","version":401}'
)
ODD = ODD_FRAMES | {
    "another queue first": ('{"code"', '{"queueId":"2","code"'),
    "another queue last": ('"version"', '"queueId":"2","version"'),
    "a second queue": ('"queueId":"1"', '"queueId":"1","queueId":"3"'),
    "a second queue with the first number that is tried": ('"queueId":"1"', '"queueId":"1","queueId":"13"'),
    "a second queue at the end": ('"subscription"', '"queueId":"3","subscription"'),
    "a queue in another object": ('"flag"', '"x":{"queueId":"2","topic":"u"},"flag"'),
    "fields before the others": ('"extFields"', '"extFields":{"queueId":"5","topic":"u"},"extFields"'),
    "no queue": ('"queueId":"1",', ""),
    "a queue with a sign": ('"queueId":"1"', '"queueId":"+1"'),
    "a queue with zeros": ('"queueId":"1"', '"queueId":"001"'),
    "a queue that is none": ('"queueId":"1"', '"queueId":"one"'),
    "an empty queue": ('"queueId":"1"', '"queueId":""'),
    "a queue as a number": ('"queueId":"1"', '"queueId":1'),
    "an escaped offset": ('"queueOffset":"7"', '"queueOffset":"\\u0035"'),
    "an offset in other digits": ('"queueOffset":"7"', '"queueOffset":"\u0665"'),
    "a negative offset": ('"queueOffset":"7"', '"queueOffset":"-7"'),
    "an offset of 18 digits": ('"queueOffset":"7"', '"queueOffset":"999999999999999999"'),
    "an offset of 64 bits": ('"queueOffset":"7"', '"queueOffset":"9223372036854775807"'),
    "too large an offset": ('"queueOffset":"7"', '"queueOffset":"9223372036854775808"'),
    "an offset with a line break": ('"queueOffset":"7"', '"queueOffset":"7\n"'),
    "an offset with a blank": ('"queueOffset":"7"', '"queueOffset":" 7"'),
    "no topic": ('"topic":"t",', ""),
    "another topic": ('"topic":"t"', '"topic":"ü"'),
    "an escaped topic": ('"topic":"t"', '"topic":"\\u0074"'),
    "an escaped quote in the topic": ('"topic":"t"', '"topic":"t\\"'),
    "a control character in the topic": ('"topic":"t"', '"topic":"t\x1f"'),
    "a topic that is none": ('"topic":"t"', '"topic":null'),
    "a field in the subscription": ('"*"', '"\\"queueId\\":\\"2\\""'),
    "the place of an opaque in the subscription": ('"*"', '"\\"opaque\\":2,"'),
    "a negative version": ('"subVersion":"1"', '"subVersion":"-1"'),
    "blanks": (",", " , "),
    "a number among the fields": ('"topic"', '"opaque":9,"topic"'),
    "another code": ('"flag"', '"code":12,"flag"'),
}


def as_read(known: KnownHeaders | None, header: str) -> object:
    """Return what a frame says, or the error of its header."""
    raw = header.encode()
    frame = tried(lambda: (known and known.read(raw, b"body")) or read_json(raw, b"body"))
    if isinstance(frame, Exception):
        return repr(frame)
    parsed = frame.parsed if isinstance(frame, KnownFrame) else tried(from_fields, PullHeader, frame.fields)
    asked = frame.fields if frame.is_answer else repr(parsed) if isinstance(parsed, Exception) else parsed
    return asked, frame.code, frame.body, frame.opaque, frame.remark, frame.flag, frame.language, frame.version


@many
@pytest.mark.parametrize(("old", "new"), ODD.values(), ids=ODD)
def test_a_known_header_is_read_as_a_new_one(old: str, new: str) -> None:
    """Also if an odd header comes after a usual one, or before it."""
    odd = [HEADER.replace(old, new, 1), HEADER.replace(old, new)]
    for headers in ([HEADER, HEADER, *odd, *odd, HEADER], [*odd, *odd, HEADER, HEADER, *odd]):
        known = KnownHeaders([PULLS])
        assert [as_read(known, header) for header in headers] == [as_read(None, header) for header in headers]


@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, len(HEADER)),
            st.integers(0, 3),
            st.sampled_from(("", "0", "-", "\\", '"', '","', ",", "}", "ü", "\n", '"queueId":"4",', '"opaque":5,')),
        ),
        max_size=3,
    )
)
def test_rubbish_is_read_by_no_known_header(edits: list[tuple[int, int, str]]) -> None:
    """Both ways of reading agree on usual headers that were changed anywhere."""
    known = KnownHeaders([PULLS])
    headers = [HEADER]
    for begin, cut, put in edits:
        changed = headers[-1][:begin] + put + headers[-1][begin + cut :]
        headers += [HEADER[:begin] + put + HEADER[begin + cut :], changed, changed]
    for header in [*headers, HEADER]:
        assert as_read(known, header) == as_read(None, header)


def test_a_header_is_known_in_whatever_order_the_client_has() -> None:
    fields = to_fields(PullHeader("g", "t", 1, 7, 32, 4, 0, 0, 1, "*"))
    for names in (list(fields), sorted(fields)):
        known = KnownHeaders([PULLS])
        found = []
        for number in range(1, 4):
            frame = Frame(Code.PULL_MESSAGE, {name: fields[name] for name in names}, b"", number)
            found.append(known.read(encode(frame)[8:], b""))
        assert [None if frame is None else frame.opaque for frame in found] == [None, 2, 3]


def test_few_headers_are_kept() -> None:
    """A client sends many that all differ."""
    known = KnownHeaders([PULLS])
    tracemalloc.start()
    try:
        for number in range(2_000):
            assert known.read(HEADER.replace('"flag"', f'"x{number}":1,"flag"').encode(), b"") is None
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept < 500_000
