"""Frames of the 4.x protocol: recorded frames, arbitrary frames, and rubbish."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from librmq.errors import MalformedError
from librmq.protocol import Acknowledge
from librmq.wire.remoting._frames import LANGUAGES, Frame, FrameReader, answer_to, encode, from_fields, to_fields
from librmq.wire.remoting._headers import (
    REQUESTS,
    EmptyHeader,
    FoundByKeyHeader,
    OffsetHeader,
    PulledHeader,
    RequestCode,
    SentHeader,
)
from librmq.wire.remoting._request_codec import FORMS
from tests.reference import existing, jsonl

INT = st.integers(-(1 << 31), (1 << 31) - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
FRAMES = st.builds(
    Frame,
    code=st.integers(0, 0x7FFF),
    fields=st.dictionaries(TEXT, TEXT, max_size=5),
    body=st.binary(max_size=50),
    opaque=INT,
    remark=TEXT.filter(bool) | st.none(),
    flag=st.integers(0, 3),
    language=st.sampled_from(LANGUAGES),
    version=st.integers(0, 0x7FFF),
    is_binary=st.booleans(),
)

CODE = RequestCode
ANSWERS = {
    **dict.fromkeys((CODE.SEND_MESSAGE, CODE.SEND_MESSAGE_V2, CODE.SEND_BATCH_MESSAGE), SentHeader),
    **dict.fromkeys((CODE.GET_MIN_OFFSET, CODE.GET_MAX_OFFSET, CODE.SEARCH_OFFSET_BY_TIMESTAMP), OffsetHeader),
    CODE.QUERY_CONSUMER_OFFSET: OffsetHeader,
    CODE.PULL_MESSAGE: PulledHeader,
    CODE.QUERY_MESSAGE: FoundByKeyHeader,
}
"""The header of an answer to a request."""
LONE_FIELDS = {
    CODE.WIPE_WRITE_PERM_OF_BROKER: "wipeTopicCount",
    CODE.ADD_WRITE_PERM_OF_BROKER: "addTopicCount",
    CODE.GET_BROKER_CONFIG: "version",
}
"""Fields that are given where an answer is made, without a header."""


def recorded() -> list[dict[str, Any]]:
    return list(jsonl(existing("remoting", "frames.jsonl")))


@given(TEXT, TEXT, st.lists(TEXT | st.just('0 17 60 0 0 broker-a 0 0 9","1'), max_size=3))
def test_acknowledgements_round_trip(group: str, topic: str, receipts: list[str]) -> None:
    """The usual one has a reader of its own."""
    request = Acknowledge(group, topic, tuple(receipts))
    form = FORMS[Acknowledge]
    assert form.parse(None, form.write(request).body) == request


@given(st.lists(FRAMES, max_size=4), st.integers(1, 40))
def test_frames_round_trip(frames: list[Frame], piece: int) -> None:
    """A connection may split the frames at any place."""
    sent = b"".join(map(encode, frames))
    reader = FrameReader()
    pieces = [sent[at : at + piece] for at in range(0, len(sent), piece)]
    assert [frame for received in pieces for frame in reader.feed(received)] == frames


def test_recorded_headers_are_read_and_written_alike() -> None:
    """Recorded frames that clients in three languages sent, and the broker's answers."""
    for row in recorded():
        for side in ("request", "answer"):
            if row.get(side) is None:
                continue
            header = row[side]["header"]
            code = CODE(row["request"]["header"]["code"])
            form = REQUESTS[code]
            raw = json.dumps(header).encode()
            length = len(raw).to_bytes(4, "big")
            (frame,) = FrameReader().feed((4 + len(raw)).to_bytes(4, "big") + length + raw)
            assert (frame.code, frame.opaque, frame.is_answer) == (header["code"], header["opaque"], side == "answer")
            if side == "answer" and frame.code != 0:
                continue
            cls, names = (form.header, form.names) if side == "request" else (ANSWERS.get(code, EmptyHeader), "")
            typed: Any = from_fields(cls, frame.fields, names)
            written = to_fields(typed, names)
            sent = {name: text.lower() if text in ("True", "False") else text for name, text in frame.fields.items()}
            common = set(sent) & set(written) - {"unitMode", "batch"}  # the C++ client writes 0 for false
            assert {name: written[name] for name in common} == {name: sent[name] for name in common}
            unknown = set(sent) - set(written) - {"AccessKey", "Signature", "OnsChannel", "ReqT"}
            assert not unknown or (side, unknown) == ("answer", {LONE_FIELDS.get(code)}), (code, side, unknown)


@given(FRAMES)
def test_an_answer_has_the_form_and_number_of_its_request(request: Frame) -> None:
    (answer,) = FrameReader().feed(encode(answer_to(request, 17, "no such topic", fields={"a": "b"}, body=b"x")))
    assert (answer.opaque, answer.is_binary, answer.is_answer) == (request.opaque, request.is_binary, True)
    assert (answer.code, answer.remark, answer.fields, answer.body) == (17, "no such topic", {"a": "b"}, b"x")


@given(st.binary(max_size=200), st.booleans())
def test_rubbish_is_refused_or_incomplete(raw: bytes, framed: bool) -> None:
    """Rubbish raises no error but `MalformedError`."""
    try:
        frames = list(FrameReader(max_frame=1000).feed(len(raw).to_bytes(4, "big") + raw if framed else raw))
    except MalformedError:
        return
    assert all(isinstance(frame, Frame) for frame in frames)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b'{"code": 1.5}',
        b'{"code": 99999999999}',
        b'{"extFields": []}',
        b'{"extFields": {"a": {}}}',
        b"[" * 90_000,
    ],
    ids=["nothing", "a list", "half a code", "a long code", "listed fields", "nested", "deep"],
)
def test_a_lying_header_is_refused(header: bytes) -> None:
    with pytest.raises(MalformedError):
        list(FrameReader().feed((4 + len(header)).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header))


@pytest.mark.parametrize("length", [-1, 0, 3, (16 << 20) + 1, 0x7FFFFFFF])
def test_an_impossible_length_is_refused(length: int) -> None:
    """It is refused before any of the frame is kept."""
    with pytest.raises(MalformedError, match="expected 4 to"):
        list(FrameReader().feed(length.to_bytes(4, "big", signed=True)))


@pytest.mark.parametrize(
    ("fields", "error"),
    [({}, "consumerGroup is missing"), ({"consumerGroup": "g", "topic": "t", "queueId": "x"}, "queueId is 'x'")],
)
def test_a_wrong_field_is_named(fields: dict[str, str], error: str) -> None:
    with pytest.raises(MalformedError, match=error):
        REQUESTS[RequestCode.QUERY_CONSUMER_OFFSET].read(fields)


@given(
    fields=st.dictionaries(st.sampled_from(["msgId", "queueId", "queueOffset", "TRACE_ON", "x%s"]), st.text()),
    remark=st.none() | st.text(),
    language=st.sampled_from(LANGUAGES),
    code=st.sampled_from([0, 1, 10]),
    opaque=INT,
)
def test_answers_are_read_as_they_were_written(
    fields: dict[str, str], remark: str | None, language: str, code: int, opaque: int
) -> None:
    """Unknown fields, other orders, escapes, remarks and other languages."""
    frame = Frame(code, fields, b"", opaque, remark, 1, language)
    raw = encode(frame)
    read = next(FrameReader().feed(raw))
    assert encode(read) == raw
    assert json.loads(raw[8:]).get("extFields", {}) == fields
