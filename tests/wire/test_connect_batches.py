"""Batches of a topic with queues of batches over `librmq.connect`: a broker of RocketMQ 5 sends each as one record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import pytest

import librmq
from librmq import BrokerUnreachableError, ConsumeFrom, MessageQueue
from librmq.message.batch import BatchItem
from librmq.message.record import Record, body_checksum, encode_record
from librmq.protocol import PullMessage
from librmq.wire.remote import RemoteRoute
from librmq.wire.remoting._bodies import write_body
from librmq.wire.remoting._frames import Frame, answer_to
from librmq.wire.remoting._headers import RequestCode
from tests.stores_of_5 import batch_record
from tests.wire.fake_servers import FakeServer
from tests.wire.test_connect import WAIT_S, Inbox

QUEUE: Final = MessageQueue("orders", "fake", 0)
ITEMS: Final = [
    BatchItem(b"%d" % number, 0, b"TAGS\1%c\2KEYS\1k-%d" % (b"ab"[number % 2], number)) for number in range(5)
]


def record(made: Record) -> bytes:
    return encode_record(replace(made, body_crc=body_checksum(made.body)))


class Batches:
    """A broker with a batch of five messages, and one message after it."""

    def __init__(self) -> None:
        batch = replace(
            batch_record(Record(topic="orders", queue_offset=0, properties_raw=b"UNIQ_KEY\1batch"), ITEMS),
            store_timestamp_ms=1_000,
        )
        after = Record(topic="orders", queue_offset=5, physical_offset=900, body=b"5", properties_raw=b"TAGS\1b")
        self.records = [record(batch), record(after)]
        self.stored = 0
        self.server = FakeServer(self._answer)

    def _answer(self, frame: Frame) -> Frame | None:
        fields = {"minOffset": "0", "maxOffset": "6", "suggestWhichBrokerId": "0"}
        if frame.code == RequestCode.PULL_MESSAGE:
            offset = int(frame.fields["queueOffset"])
            if frame.fields["topic"] != "orders" or offset >= 6:
                return answer_to(frame, 20, "OFFSET_OVERFLOW_ONE", fields=fields | {"nextBeginOffset": str(offset)})
            body = b"".join(self.records[offset // 5 :])
            return answer_to(frame, fields=fields | {"nextBeginOffset": "6"}, body=body)
        if frame.code == RequestCode.GET_CONSUMER_LIST_BY_GROUP:
            beats = [beat.body for beat in self.server.asked if beat.code == RequestCode.HEART_BEAT]
            client = (beats or [b""])[-1].partition(b'"clientID":"')[2].partition(b'"')[0].decode()
            return answer_to(frame, body=write_body({"consumerIdList": [client]}))
        if frame.code == RequestCode.QUERY_CONSUMER_OFFSET:
            return answer_to(frame, 22, "none")
        if frame.code == RequestCode.UPDATE_CONSUMER_OFFSET and frame.fields["topic"] == "orders":
            self.stored = int(frame.fields["commitOffset"])
        if frame.code in (RequestCode.GET_MAX_OFFSET, RequestCode.GET_MIN_OFFSET):
            return answer_to(frame, fields={"offset": "6" if frame.code == RequestCode.GET_MAX_OFFSET else "0"})
        if frame.code == RequestCode.QUERY_MESSAGE:
            times = {"indexLastUpdateTimestamp": "0", "indexLastUpdatePhyoffset": "0"}
            return answer_to(frame, fields=times, body=self.records[0])
        if frame.code == RequestCode.VIEW_MESSAGE_BY_ID:
            return answer_to(frame, body=self.records[0])
        return answer_to(frame)


@pytest.fixture
def batches() -> Iterator[Batches]:
    made = Batches()
    with made.server:
        yield made


@pytest.fixture
def route(batches: Batches) -> Iterator[RemoteRoute]:
    with librmq.connect(batches.server.address) as made:
        yield made


def test_a_listener_gets_the_messages_of_a_batch(batches: Batches, route: RemoteRoute) -> None:
    inbox = Inbox(6)
    consumer = librmq.PushConsumer(route, "g", consume_from=ConsumeFrom.FIRST, threads=1)
    consumer.subscribe("orders", inbox)
    with consumer:
        assert inbox.wait() == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert batches.stored == 6


def test_tags_of_a_batch_are_those_of_its_messages(route: RemoteRoute) -> None:
    with librmq.PullConsumer(route, "g", consume_from=ConsumeFrom.FIRST) as consumer:
        consumer.subscribe("orders", tags="b")
        messages = next(messages for _ in range(WAIT_S) if (messages := consumer.poll(1)))
        assert [(message.body, message.tags, message.keys, message.queue_offset) for message in messages] == [
            (b"1", "b", ("k-1",), 1), (b"3", "b", ("k-3",), 3), (b"5", "b", (), 5),
        ]  # fmt: skip


def test_a_pull_that_begins_within_a_batch_gets_the_rest_of_it(route: RemoteRoute) -> None:
    response = route.endpoint("fake").call(PullMessage("", "g", "orders", 0, 3))
    assert [(message.body, message.queue_offset) for message in response.messages] == [(b"3", 3), (b"4", 4), (b"5", 5)]
    assert response.next_offset == 6


def test_messages_and_searches_show_the_messages_of_a_batch(route: RemoteRoute) -> None:
    assert [message.body for message in route.messages_in(QUEUE, range(1, 6))] == [b"1", b"2", b"3", b"4", b"5"]
    assert [message.body for message in route.find_by_key("orders", "k-2")] == [b"2"]
    assert len(route.find_by_key("orders", "batch")) == 5


def test_a_broken_batch_is_an_error_and_no_message(batches: Batches, route: RemoteRoute) -> None:
    broken = batch_record(Record(topic="orders", properties_raw=b""), ITEMS)
    batches.records[0] = record(replace(broken, body=broken.body[:-1]))
    with pytest.raises(BrokerUnreachableError, match="a batch of topic 'orders' at queue offset 0"):
        route.endpoint("fake").call(PullMessage("", "g", "orders", 0, 0))
