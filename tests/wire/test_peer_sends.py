"""What a peer of a share appends by itself, and what it leaves to the owner."""

from __future__ import annotations

from typing import Any

import pytest

from librmq import Message
from librmq.store import AppendResult
from librmq.store.peer_appends import PeerAppender
from librmq.wire._peer_sends import PeerSends

HOST = "127.0.0.1", 10911


class Appender:
    """In place of the appender of a page."""

    cluster_name, store_host, held_properties = "c", "127.0.0.1:10911", frozenset(("DELAY",))

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def append(self, message: Message, queue_id: int, wait_s: float, **fields: Any) -> AppendResult | None:
        self.messages.append(message)
        return None if message.topic == "unknown" else AppendResult(4096, 200, 7, 1_700_000_000_000, bytes(8))


@pytest.fixture
def appender(monkeypatch: pytest.MonkeyPatch) -> Appender:
    appender = Appender()
    monkeypatch.setattr(PeerAppender, "open", lambda *_: appender)
    return appender


def test_a_message_is_stored_as_a_broker_stores_it(appender: Appender) -> None:
    message = Message("orders", b"x", keys="k")
    response = PeerSends("store", 1).send(message, 2, 1, HOST)
    assert response is not None
    assert response[1:5] == (2, 7, 4096, ("7F00000100002A9F0000000000001000",))
    (stored,) = appender.messages
    assert stored.properties == {"KEYS": "k", "CLUSTER": "c"}
    assert "CLUSTER" not in message.properties


def test_what_does_not_go_to_its_queue_at_once_is_for_the_owner(appender: Appender) -> None:
    sends = PeerSends("store", 1)
    assert sends.send(Message("orders", b"x", delay_level=3), 0, 1, HOST) is None
    assert sends.send(Message("orders", b"x", delay=60), 0, 1, HOST) is None
    assert not appender.messages
    assert sends.send(Message("unknown", b"x"), 0, 1, HOST) is None


def test_without_a_page_the_owner_stores_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerAppender, "open", lambda *_: None)
    assert PeerSends("store", 1).send(Message("orders", b"x"), 0, 1, HOST) is None
