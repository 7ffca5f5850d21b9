"""A store's public methods, as a new user tries them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.errors import ConfigError, StoreClosedError
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
    with pytest.raises(TypeError, match="expected an offset id or a unique key as a str, found 3: use message_at"):
        store.find_by_id(3)  # type: ignore[arg-type]


MISTAKES: dict[str, Callable[[Any], object]] = {
    "message: expected a Message, found 'x'": lambda store: store.append("x"),
    "message: expected a Message, found StoredMessage": lambda store: store.append(store.message_at(0)),
    "message: expected a Message, found None": lambda store: store.submit(None),
    "messages: expected a list of Message, found Message": lambda store: store.append_batch(Message("T", b"1")),
    "messages: expected a list of Message, found 'x'": lambda store: store.append_batch("x"),
    "record: expected a StoredMessage, found 3": lambda store: store.appender.append_again(3, "T", 0, {}),
    "result: expected the result of an Ack": lambda store: store.wait_for(store.submit(Message("T", b"1"))),
    "topic: expected text, found 5": lambda store: store.read(5, 0, 0),
    "queue_id: expected a whole number, found '0'": lambda store: list(store.messages("T", "0")),
    "queue_offset: expected a whole number, found '0'": lambda store: store.read("T", 0, "0"),
    "max_messages: expected a whole number, found '3'": lambda store: store.read("T", 0, 0, "3"),
    "matching: expected a filter, as matching": lambda store: store.read("T", 0, 0, 3, "tag"),
    "key: expected text, found 2": lambda store: store.find_by_key("T", 2),
    r"tags: expected text such as 'a \|\| b', found 5": lambda store: store.matching(tags=5),
    r"registration: expected \(topic, group\), found 'x'": lambda store: store.matching(registration="x"),
    "path: expected the folder of a store, found 5": lambda store: MessageStore.open(5),  # type: ignore[arg-type]
    "files: expected one such as MemoryFiles": lambda store: MessageStore.open("/s", files="disk"),  # type: ignore[arg-type]
    "clock: expected one such as ManualClock": lambda store: MessageStore.open("/s", clock=5),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("said", MISTAKES)
def test_an_argument_of_a_wrong_kind_is_named(store: MessageStore, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        MISTAKES[said](store)
    assert len(list(store.messages("T"))) in (3, 4)


def test_a_store_needs_a_path() -> None:
    with pytest.raises(ConfigError, match="path: expected the folder of a store, found ''"):
        MessageStore.open("")


def test_a_closed_store_says_so_at_each_call(store: MessageStore) -> None:
    store.close()
    calls: list[Callable[[], object]] = [
        lambda: store.append(Message("T", b"1")),
        lambda: store.read("T", 0, 0),
        store.flush,
        store.recover,
        store.verify,
        store.refresh,
        lambda: store.run_due(0),
    ]
    for call in calls:
        with pytest.raises(StoreClosedError, match="this handle is closed"):
            call()
