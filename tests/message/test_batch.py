"""Batches: their bytes, which messages may form one, and splitting one into messages."""

from __future__ import annotations

import struct

import pytest

from librmq.errors import MessageIllegalError
from librmq.message.batch import BatchItem, decode_batch, encode_batch, split_batch
from librmq.message.message import Message, check_batch, encoded_size
from librmq.message.properties import encode_properties


@pytest.mark.parametrize(
    ("at", "value"), [(0, 24), (0, 26), (0, -1), (0, 2**31 - 1), (16, -1), (16, 4), (16, 2**31 - 1), (16, 2)]
)
def test_a_batch_that_contradicts_itself_is_refused(at: int, value: int) -> None:
    raw = encode_batch([BatchItem(b"one")])
    with pytest.raises(MessageIllegalError, match="batch: message 0"):
        decode_batch(raw[:at] + struct.pack(">i", value) + raw[at + 4 :])


def test_messages_that_do_not_fit_a_batch_are_refused() -> None:
    for item in (BatchItem(b"", 2**31), BatchItem(b"", 0, bytes(32_768))):
        with pytest.raises(MessageIllegalError, match="message 1 of the batch is out of range"):
            encode_batch([BatchItem(b""), item])


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([], "at least one"),
        ([Message("T", b""), Message("U", b"")], "one topic in a batch, found 'T' and 'U'"),
        ([Message("T", b""), Message("T", b"", wait_store_ok=False)], "one wait flag"),
        ([Message("T", b"", wait_store_ok=False), Message("T", b"")], "one wait flag"),
        ([Message("T", b""), Message("T", b"", delay_level=1)], "delayed"),
    ],
)
def test_invalid_batches_are_refused(messages: list[Message], why: str) -> None:
    with pytest.raises(MessageIllegalError, match=why):
        check_batch(messages)


def test_batches_with_equal_meaning_are_equal() -> None:
    check_batch([Message("T", b""), Message("T", b"", wait_store_ok=True), Message("T", b"", properties={"a": "b"})])
    check_batch([Message("T", b"", wait_store_ok=False), Message("T", b"", wait_store_ok=False)])


def test_messages_are_cut_into_batches_by_their_encoded_size() -> None:
    messages = [Message("T", bytes(number), keys=str(number)) for number in range(100)]
    parts = list(split_batch(messages, 500))
    assert [message for part in parts for message in part] == messages
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        items = [BatchItem(one.body, one.flag, encode_properties(one.properties)) for one in part]
        size = len(encode_batch(items))
        assert size == sum(map(encoded_size, part))
        added = sum(len("UNIQ_KEY\1\2WAIT\1false\2") + 56 for _ in part)
        assert size + added <= 500
        assert following is None or size + added + encoded_size(following[0]) + 80 > 500
    assert list(split_batch([])) == []
    with pytest.raises(MessageIllegalError, match=r"does not fit .* send it alone"):
        list(split_batch([Message("T", bytes(500))], 500))
    with pytest.raises(MessageIllegalError, match="has 501 bytes, at most 500 are taken: store it elsewhere"):
        list(split_batch([Message("T", bytes(501))], 500))
