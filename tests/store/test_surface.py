"""A store's public methods, as a new user tries them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.errors import ConfigError, MessageIllegalError
from librmq.files._memory import MemoryFiles
from librmq.message.message import Message
from librmq.store import MessageStore, rescue, restore

MOMENT = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)


@pytest.fixture
def store() -> MessageStore:
    """Store three messages, a minute apart."""
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


def test_an_id_that_is_not_a_string_is_refused(store: MessageStore) -> None:
    with pytest.raises(TypeError, match="expected an offset id or a unique id as a str, found 3: use message_at"):
        store.find_by_id(3)  # type: ignore[arg-type]


MISTAKES: dict[str, Callable[[Any], object]] = {
    "message: expected a Message, found 'x'": lambda store: store.append("x"),
    "message: expected a Message, found StoredMessage": lambda store: store.append(store.message_at(0)),
    "message: expected a Message, found None": lambda store: store.submit(None),
    "messages: expected a list of Message, found Message": lambda store: store.append_batch(Message("T", b"1")),
    "messages: expected a list of Message, found 'x'": lambda store: store.append_batch("x"),
    "record: expected a StoredMessage, found 3": lambda store: store.copies.append_again(3, "T", 0, {}),
    "result: expected the result of an Ack": lambda store: store.wait_for(store.submit(Message("T", b"1"))),
    "topic: expected text, found 5": lambda store: store.read(5, 0, 0),
    "queue_id: expected a whole number, found '0'": lambda store: list(store.messages("T", "0")),
    "queue_offset: expected a whole number, found '0'": lambda store: store.read("T", 0, "0"),
    "max_messages: expected a whole number, found '3'": lambda store: store.read("T", 0, 0, "3"),
    "matching: expected a filter, as matching": lambda store: store.read("T", 0, 0, 3, "tag"),
    "key: expected text, found 2": lambda store: store.find_by_key("T", 2),
    r"tags: expected text such as 'a \|\| b', found 5": lambda store: store.matching(tags=5),
    r"registration: expected \(topic, group\), found 'x'": lambda store: store.matching(registration="x"),
    r"topic: expected text, found \[\]": lambda store: store.read([], 0, 0),
    r"queue_id: expected a whole number, found \[\]": lambda store: store.read("T", [], 0),
    "queue_id: expected a whole number, found {}": lambda store: store.queue_range("T", {}),
    "sys_flag: expected a whole number, found 'x'": lambda store: store.append(Message("T", b"1"), sys_flag="x"),
    r"sys_flag: expected a whole number, found \[\]": lambda store: store.append(Message("T", b"1"), sys_flag=[]),
    "sys_flag: expected a whole number, found None": lambda s: s.append_batch([Message("T", b"1")], sys_flag=None),
    "properties: expected a mapping of names to texts": lambda s: s.append_batch([Message("T", b"1")], properties="x"),
    "target: expected the folder of a new store, found 5": lambda store: store.snapshot(5),
    "target: expected the folder of a new store, found b'x'": lambda store: rescue("/s", b"x"),  # type: ignore[arg-type]
    "path: expected the folder of a store, found None": lambda store: restore(None, "/t"),  # type: ignore[arg-type]
    "now_ms: expected milliseconds since 1970, a whole number, found 'x'": lambda store: store.run_due("x"),
    "topics: expected a set of names, found 5": lambda store: store.clean_unused_topics(5),
    "topics: expected a set of names, found 'T'": lambda store: store.clean_unused_topics("T"),
    "path: expected the folder of a store, found 5": lambda store: MessageStore.open(5),  # type: ignore[arg-type]
    "files: expected one such as MemoryFiles": lambda store: MessageStore.open("/s", files="disk"),  # type: ignore[arg-type]
    "clock: expected one such as ManualClock": lambda store: MessageStore.open("/s", clock=5),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("said", MISTAKES)
def test_an_argument_of_a_wrong_kind_is_named(store: MessageStore, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        MISTAKES[said](store)
    assert len(list(store.messages("T"))) in (3, 4)


WRONG_HOSTS: list[Any] = [[], b"x", b"", "x", ("1.2.3.4",), 5]


@pytest.mark.parametrize("host", WRONG_HOSTS)
def test_a_host_needs_an_address_and_a_port(store: MessageStore, host: Any) -> None:
    for name in ("born_host", "store_host"):
        for call in (store.append, lambda message, **fields: store.append_batch([message], **fields)):
            with pytest.raises(MessageIllegalError, match="expected an IP address and a port of 32 bits, found"):
                call(Message("T", b"1"), **{name: host})
    store.append(Message("T", b"1"))
    assert len(list(store)) == 4


@pytest.mark.parametrize("queue_id", [[], {}, "0", 1.5, None, -1])
def test_a_queue_id_is_a_whole_number(store: MessageStore, queue_id: Any) -> None:
    for call in (store.append, lambda message, queue_id: store.append_batch([message], queue_id)):
        with pytest.raises(MessageIllegalError, match="queue id: expected a whole number from 0 to 2147483647, found"):
            call(Message("T", b"1"), queue_id)
    assert list(store.queues) == [("T", 0)]


def test_a_store_needs_a_path() -> None:
    with pytest.raises(ConfigError, match="path: expected the folder of a store, found ''"):
        MessageStore.open("")
