"""A bare client of the 4.x protocol, which sends and receives frames."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, Self

from librmq.errors import MalformedError
from librmq.java import json as java_json
from librmq.wire.remoting._frames import Frame, FrameReader, encode
from librmq.wire.remoting._headers import REQUESTS, RequestCode, SendHeader

_WAIT_S: Final = 60


def _written(fields: dict[str, Any]) -> dict[str, str]:
    """Return fields as a client writes them: ``queue_id=0`` is the field ``queueId``."""
    texts: dict[str, str] = {}
    for attribute, value in fields.items():
        first, *others = attribute.split("_")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        texts |= {} if value is None else {first + "".join(map(str.capitalize, others)): text}
    return texts


class RawClient:
    """One connection."""

    def __init__(self, port: int, source: str = "127.0.0.1") -> None:
        """``source`` is the address that the connection comes from."""
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=_WAIT_S, source_address=(source, 0))
        self._socket.settimeout(None)  # it may be idle for as long as a test takes
        self._opaque = 0
        self._answers: queue.Queue[Frame | None] = queue.Queue()
        self._told: queue.Queue[Frame] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def address(self) -> str:
        return "{}:{}".format(*self._socket.getsockname())

    def _frames(self) -> Iterator[Frame]:
        reader = FrameReader()
        with suppress(OSError, MalformedError):
            while received := self._socket.recv(1 << 16):
                yield from reader.feed(received)

    def _read(self) -> None:
        for frame in self._frames():
            (self._answers if frame.is_answer else self._told).put(frame)
        self._answers.put(None)

    def send(self, code: RequestCode, body: object = b"", *, one_way: bool = False, **fields: Any) -> int:
        """Send a request, and return its number."""
        form = REQUESTS[code]
        header = form.write(form.header(**fields)) if form.header is SendHeader else _written(fields)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._opaque += 1
        frame = Frame(code, header, raw, self._opaque, language="JAVA")
        self.write(encode(frame.one_way() if one_way else frame))
        return self._opaque

    def write(self, raw: bytes) -> None:
        self._socket.sendall(raw)

    def answer(self) -> Frame:
        frame = self._answers.get(timeout=_WAIT_S)
        assert frame is not None, "the server has closed the connection"
        return frame

    def asked(self, code: RequestCode) -> Frame:
        """Return the server's next request with that code."""
        while (frame := self._told.get(timeout=_WAIT_S)).code != code:
            pass
        return frame

    def has_ended(self) -> bool:
        """Wait until the connection ends; return False if an answer arrives first."""
        return self._answers.get(timeout=_WAIT_S) is None

    def call(self, code: RequestCode, body: object = b"", **fields: Any) -> Frame:
        """Send a request, and return its answer."""
        number = self.send(code, body, **fields)
        answer = self.answer()
        assert answer.opaque == number
        return answer

    def ask(self, code: RequestCode, body: object = b"", **fields: Any) -> Any:
        """Return the JSON in the body of a successful answer."""
        answer = self.call(code, body, **fields)
        assert answer.code == 0, answer
        return java_json.loads(answer.body)

    def put(self, topic: str, body: bytes, properties: str = "", **fields: Any) -> Frame:
        known: dict[str, Any] = {"producer_group": "p", "default_topic": "TBW102", "default_topic_queue_nums": 4}
        known |= {"queue_id": 0, "sys_flag": 0, "born_timestamp": 1, "flag": 0, "properties": properties}
        return self.call(RequestCode.SEND_MESSAGE_V2, body, topic=topic, **(known | fields))

    def beat(self, client_id: str, *groups: str, topics: tuple[str, ...] = (), producers: tuple[str, ...] = ()) -> None:
        subscriptions = [{"topic": topic, "subString": "*", "subVersion": 1} for topic in topics]
        consumers = [
            {
                "groupName": group,
                "consumeType": "CONSUME_PASSIVELY",
                "messageModel": "CLUSTERING",
                "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
                "subscriptionDataSet": subscriptions,
            }
            for group in groups
        ]
        beat = {"clientID": client_id, "consumerDataSet": consumers}
        beat["producerDataSet"] = [{"groupName": group} for group in producers]
        assert self.call(RequestCode.HEART_BEAT, beat).code == 0

    def pull(
        self,
        group: str,
        topic: str,
        offset: int = 0,
        wait_ms: int = 0,
        code: RequestCode = RequestCode.PULL_MESSAGE,
        **fields: Any,
    ) -> int:
        """Send a pull, and return its number."""
        known: dict[str, Any] = {"queue_id": 0, "max_msg_nums": 32, "sys_flag": 2, "commit_offset": 0, "sub_version": 1}
        known |= {"consumer_group": group, "topic": topic, "queue_offset": offset, "suspend_timeout_millis": wait_ms}
        return self.send(code, **(known | fields))

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._reader.join(_WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
