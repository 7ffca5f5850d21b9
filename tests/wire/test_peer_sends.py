"""What a peer of a share appends by itself, and what it leaves to the owner."""

from __future__ import annotations

from typing import Any

import pytest

from librmq import Message, SendStatus
from librmq.errors import BrokerUnreachableError, LostAnswerError
from librmq.store import AppendResult
from librmq.store.peer_appends import PeerAppender
from librmq.wire._peer_sends import PeerSends

HOST = "127.0.0.1", 10911


class Appender:
    """In place of the appender of a page."""

    cluster_name, store_host, held_properties = "c", "127.0.0.1:10911", frozenset(("DELAY",))
    is_sync = False

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.flush: bool | Exception = True
        self.reached: list[int] = []

    def reach(self, end: int, wait_s: float) -> bool:
        self.reached.append(end)
        if isinstance(self.flush, Exception):
            raise self.flush
        return self.flush

    def append(self, message: Message, queue_id: int, *_: Any) -> AppendResult | None:
        self.messages.append(message)
        return None if message.topic == "unknown" else AppendResult(4096, 200, 7, 1_700_000_000_000, bytes(8))


@pytest.fixture
def appender(monkeypatch: pytest.MonkeyPatch) -> Appender:
    appender = Appender()
    monkeypatch.setattr(PeerAppender, "open", lambda *_: appender)
    return appender


def test_a_message_is_stored_as_a_broker_stores_it(appender: Appender) -> None:
    message = Message("orders", b"x", keys="k")
    response = PeerSends("store", 1, lambda: None).send(message, 2, 1, HOST)
    assert response is not None
    assert response[1:5] == (2, 7, 4096, ("7F00000100002A9F0000000000001000",))
    (stored,) = appender.messages
    assert stored.properties == {"KEYS": "k", "CLUSTER": "c"}
    assert "CLUSTER" not in message.properties


def test_what_does_not_go_to_its_queue_at_once_is_for_the_owner(appender: Appender) -> None:
    sends = PeerSends("store", 1, lambda: None)
    assert sends.send(Message("orders", b"x", delay_level=3), 0, 1, HOST) is None
    assert sends.send(Message("orders", b"x", delay=60), 0, 1, HOST) is None
    assert not appender.messages
    assert sends.send(Message("unknown", b"x"), 0, 1, HOST) is None


def test_a_send_to_a_store_that_confirms_waits_for_the_flush(appender: Appender) -> None:
    appender.is_sync = True
    sends = PeerSends("store", 1, lambda: None)

    def status(message: Message, **fields: Any) -> SendStatus:
        response = sends.send(message, 0, 1, HOST, **fields)
        assert response is not None
        return response.status

    assert status(Message("orders", b"x")) is SendStatus.SEND_OK
    assert appender.reached == [4296]
    appender.flush = False
    assert status(Message("orders", b"x")) is SendStatus.FLUSH_DISK_TIMEOUT
    assert status(Message("orders", b"x", wait_store_ok=False)) is SendStatus.SEND_OK
    assert status(Message("orders", b"x"), is_one_way=True) is SendStatus.SEND_OK
    assert len(appender.reached) == 2


def test_an_owner_that_is_stopped_before_its_flush_is_named(appender: Appender) -> None:
    appender.is_sync, appender.flush = True, BrokerUnreachableError("it may be stored")
    sends = PeerSends("store", 1, lambda: BrokerUnreachableError("process 7 is stopped"))
    with pytest.raises(BrokerUnreachableError, match="it may be stored; process 7 is stopped"):
        sends.send(Message("orders", b"x"), 0, 1, HOST)
    appender.flush = LostAnswerError("it may be stored")
    with pytest.raises(LostAnswerError, match=r"it may be stored$"):
        sends.send(Message("orders", b"x"), 0, 1, HOST)


def test_without_a_page_the_owner_stores_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerAppender, "open", lambda *_: None)
    assert PeerSends("store", 1, lambda: None).send(Message("orders", b"x"), 0, 1, HOST) is None
