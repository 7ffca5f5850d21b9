"""A store's public methods, as a new user tries them."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.errors import ConfigError
from librmq.files.memory import MemoryFiles
from librmq.message.message import Message
from librmq.store import MessageStore

MOMENT = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)


@pytest.fixture
def store() -> MessageStore:
    """Three messages, a minute apart."""
    clock = ManualClock(round(MOMENT.timestamp() * 1000))
    store = MessageStore.open("/s", StoreConfig.tiny(), files=MemoryFiles(), clock=clock)
    for _ in range(3):
        store.append(Message("T", b"1"))
        clock.advance(minutes=1)
    return store


@pytest.mark.parametrize("hold", [lambda store: store, lambda store: [store], lambda store: store.append])
def test_a_store_is_not_pickled(store: MessageStore, hold: Any) -> None:
    with pytest.raises(TypeError, match="one process owns a store; open it there"):
        pickle.dumps(hold(store))


def test_a_queue_is_searched_by_a_time_with_a_zone(store: MessageStore) -> None:
    moment = MOMENT + timedelta(minutes=1)
    assert store.queue_offset_at("T", 0, moment) == 1
    assert store.queue_offset_at("T", 0, round(moment.timestamp() * 1000)) == 1
    for wrong in (moment.replace(tzinfo=None), "yesterday", 1.5, None):
        with pytest.raises(ConfigError, match="time: expected a time with a time zone, or milliseconds"):
            store.queue_offset_at("T", 0, wrong)  # type: ignore[arg-type]


def test_an_id_that_is_no_text_is_refused(store: MessageStore) -> None:
    with pytest.raises(TypeError, match="expected an offset id or a unique key as a str, found 3: message_at takes"):
        store.find_by_id(3)  # type: ignore[arg-type]
