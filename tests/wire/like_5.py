"""A server that shows clients of librmq what a broker of RocketMQ 5 does otherwise than ``librmq serve``.

It names 5.3.3 in its answers, lacks the requests that only librmq has, resets groups by the answer to a pull, recalls
what waits in its timer, and keeps a batch with an id as one record of a topic with ``queue.type=BatchCQ``. All else is
librmq's own server.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Final

from librmq import Broker
from librmq.clock import SystemClock
from librmq.errors import MalformedError
from librmq.message.batch import decode_batch
from librmq.message.properties import PropertyName, decode_properties, encode_properties
from librmq.message.record import Record, body_checksum, encode_record
from librmq.runtime.locks import Lock
from librmq.wire.remoting import RemotingServer, listen
from librmq.wire.remoting._frames import Frame, FrameReader, answer_to, encode
from librmq.wire.remoting._headers import RequestCode
from tests.stores_of_5 import batch_record
from tests.wire.fake_servers import _Listener

_VERSION: Final = 478  # 5.3.3
_OF_LIBRMQ: Final = range(RequestCode.RECEIVE, RequestCode.RESEND_LETTERS + 1)


def _frames(connected: socket.socket) -> Iterator[Frame]:
    reader = FrameReader()
    while received := connected.recv(1 << 16):
        yield from reader.feed(received)


class LikeFive(_Listener):
    """Passes frames between clients and a server of librmq, and answers some itself."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._topics: set[str] = set()  # with queues of batches
        self._records: dict[
            str, list[tuple[int, bytes]]
        ] = {}  # by topic: the queue offset after a record, and its bytes
        super().__init__()

    def serve(self, connected: socket.socket) -> None:
        writing = Lock()

        def send(frame: Frame) -> None:
            with writing:
                connected.sendall(encode(replace(frame, version=_VERSION)))

        def pass_back() -> None:
            with suppress(OSError, MalformedError):
                for frame in _frames(server):
                    send(frame)
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

        with socket.create_connection(("127.0.0.1", self._port)) as server:
            back = threading.Thread(target=pass_back, daemon=True)
            back.start()
            with suppress(OSError, MalformedError):
                for frame in _frames(connected):
                    answer = self._answer(frame)
                    if answer is None:
                        server.sendall(encode(frame))
                    else:
                        send(answer)
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            back.join()

    def _answer(self, frame: Frame) -> Frame | None:
        fields = frame.fields
        if frame.code in _OF_LIBRMQ:
            return answer_to(frame, 3, f"request type {frame.code} not supported")
        if frame.code == RequestCode.UPDATE_AND_CREATE_TOPIC and "BatchCQ" in fields.get("attributes", ""):
            self._topics.add(fields["topic"])
        elif frame.code == RequestCode.SEND_MESSAGE_V2:
            fields["i"] = _with_moment(fields["i"])
        elif frame.code == RequestCode.SEND_BATCH_MESSAGE and fields["b"] in self._topics:
            return self._stored(frame, fields["b"], int(fields["e"]))
        elif frame.code == RequestCode.PULL_MESSAGE and fields["topic"] in self._topics:
            return self._pulled(frame, fields["topic"], int(fields["queueOffset"]))
        return None

    def _stored(self, frame: Frame, topic: str, queue_id: int) -> Frame | None:
        if PropertyName.UNIQUE_KEY not in decode_properties(frame.fields["i"]):
            return None  # its messages are records of their own
        records, items = self._records.setdefault(topic, []), decode_batch(frame.body)
        begin = records[-1][0] if records else 0
        head = Record(topic=topic, queue_id=queue_id, queue_offset=begin, properties_raw=frame.fields["i"].encode())
        record = batch_record(head, items)
        records.append((begin + len(items), encode_record(replace(record, body_crc=body_checksum(record.body)))))
        return answer_to(frame, fields={"msgId": "0" * 32, "queueId": str(queue_id), "queueOffset": str(begin)})

    def _pulled(self, frame: Frame, topic: str, queue_offset: int) -> Frame:
        records = self._records.get(topic, [])
        end = records[-1][0] if records else 0
        body = b"".join(record for after, record in records if after > queue_offset)
        bounds = {"minOffset": "0", "maxOffset": str(end), "suggestWhichBrokerId": "0"}
        next_offset = {"nextBeginOffset": str(end if body else queue_offset)}
        return answer_to(frame, 0 if body else 19, fields=bounds | next_offset, body=body)


def _with_moment(raw: str) -> str:
    """Name the time of a message by its moment, so that the answer has a handle: a broker of 5.x always knows it."""
    properties = decode_properties(raw)
    if (delay_ms := properties.pop(PropertyName.TIMER_DELAY_MS, None)) is not None:
        properties[PropertyName.TIMER_DELIVER_MS] = str(SystemClock().now_ms() + int(delay_ms))
    return encode_properties(properties).decode()


@contextmanager
def broker_like_5() -> Iterator[tuple[Broker, str]]:
    """Yield a broker, and the address at which it is like one of RocketMQ 5."""
    with ExitStack() as stack:
        broker = stack.enter_context(Broker.temporary())
        listening = listen()
        like_5 = stack.enter_context(LikeFive(listening.getsockname()[1]))
        server = stack.enter_context(RemotingServer(broker, listening=listening, advertise=like_5.address))
        server.resets_by_pull = True
        yield broker, like_5.address
