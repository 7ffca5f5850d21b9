"""A signal handler raises at each call that the store makes. ``tests/crash`` covers random moments."""

from __future__ import annotations

import signal
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from threading import Thread

import pytest

from librmq.clock import SystemClock
from librmq.config import StoreConfig
from librmq.errors import StoreClosedError, StoreError
from librmq.files._memory import MemoryFiles
from librmq.message.message import Message, StoredMessage
from librmq.message.record import QUEUE_OFFSET_AT
from librmq.store import MessageStore, verify
from librmq.store.engine.dispatch import Dispatcher
from librmq.store.engine.store_parts import AppendLock
from tests.budget import many
from tests.interrupting import at_each_call, interrupted_at_call

numbers = count()
at_once: list[Message] = []
"""A batch whose entries and keys the compiled core writes at once, if nothing else is due."""


def message(topic: str = "T") -> Message:
    return Message(topic, bytes(100), tags="a", keys=f"k{next(numbers)}")


def delayed() -> Message:
    one = message()
    one.properties["DELAY"] = "3"
    return one


CALLS: dict[str, Callable[[MessageStore], object]] = {
    "append": lambda store: store.append(message()),
    "append to a new queue": lambda store: store.append(message(), next(numbers)),
    "append behind a full batch": lambda store: store.append(message()),
    "append a delayed message": lambda store: store.append(delayed()),
    "append_batch": lambda store: store.append_batch([message() for _ in range(3)]),
    "append a batch that is written at once": lambda store: store.append_batch(at_once),
    "append copies": lambda store: store.copies.append(
        [store.copies.prepare_again(one, "copies", 1, one.properties_raw) for one in taken(store)]
    ),
    "flush": lambda store: store.flush(),
    "read": lambda store: store.read("T", 0, 0),
    "find_by_key": lambda store: store.find_by_key("T", "k1"),
    "close": lambda store: store.close(),
    "recover": lambda store: store.recover(),
}


def taken(store: MessageStore) -> list[StoredMessage]:
    return list(store.messages("T", 0, 0, 3))


@many
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_call_leaves_the_store_sound(name: str) -> None:
    """Messages appended before and after are there once and without a gap; the store closes cleanly and is sound."""
    number, came = 0, True
    while came and number < 400:
        files = MemoryFiles()
        config = StoreConfig.tiny(durability="sync" if number % 2 else "async", max_index_num=2000)
        store = MessageStore.open("/s", config, files=files, background=False)
        for _ in range(Dispatcher.BATCH if "full" in name else 5):
            store.append(message())
        key = f"k{1 + next(numbers)}"
        if "at once" in name:
            store.find_by_key("T", key)  # writes what is due
            at_once[:] = [message() for _ in range(min(Dispatcher.BATCH, 256))]
            key = at_once[1].keys[0]
        came = next(at_each_call(partial(CALLS[name], store), first=number))
        if not store.is_closed and number % 3:  # a reader comes before the next append
            found = store.find_by_key("T", key) if number % 3 == 1 else list(store.messages("T", 0))
            stored = [one for one in store if one.topic == "T"]
            assert found == [one for one in stored if (one.queue_id == 0 if number % 3 == 2 else key in one.keys)]
        for _ in range(2):
            if not store.is_closed:
                store.append(message())
                store.append(message("U"))
        store.close()
        with MessageStore.open("/s", config, files=files) as again:
            offsets: dict[tuple[str, int], int] = {}
            for one in again:
                assert one.queue_offset == offsets.get((one.topic, one.queue_id), 0)
                offsets[one.topic, one.queue_id] = one.queue_offset + 1
                assert len(again.find_by_key(one.topic, one.keys[0])) == 1
            assert offsets["T", 0] >= 5
            assert again.verify().sound
        number += 1 + number // 10


@pytest.mark.parametrize("name", ["append", "append_batch", "append copies"])
def test_no_interrupt_keeps_its_thread_from_appending(name: str) -> None:
    """Whichever call it comes at, also the last before the lock is free."""
    with MessageStore.open("/s", StoreConfig.tiny(), files=MemoryFiles(), background=False) as store:
        for _ in range(5):
            store.append(message())
        for _ in at_each_call(partial(CALLS[name], store)):
            store.append(message(), next(numbers))  # a new queue asks whose the lock is
        assert store.verify().sound


def test_an_interrupted_open_leaves_no_lock() -> None:
    files = MemoryFiles()
    opened: list[MessageStore] = []
    number, came = 0, True
    while came:
        act = lambda: opened.append(MessageStore.open("/s", StoreConfig.tiny(), files=files))  # noqa: E731
        came = next(at_each_call(act, first=number))
        if came:
            while opened:
                opened.pop().close()  # the signal arrived after the open had finished
            MessageStore.open("/s", files=files).close()
        number += 1 + number // 10
    opened.pop().close()


def test_a_signal_in_the_pause_of_an_append_is_raised() -> None:
    """An append makes it for other threads. A signal in an event of Python's own would leave the event's lock held."""
    lock = AppendLock(SystemClock())
    for _ in at_each_call(lock.yield_to_waiters, within=""):
        other = Thread(target=lock.yield_to_waiters, daemon=True)
        other.start()
        other.join(60)
        assert not other.is_alive()


FROM_A_HANDLER: dict[str, Callable[[MessageStore], object]] = {
    "append": lambda store: store.append(message()),
    "append_batch": lambda store: store.append_batch([message()]),
    "append to a new queue": lambda store: store.append(message(), 1),
    "flush": lambda store: store.flush(),
    "read": lambda store: store.read("T", 0, 0),
    "verify": lambda store: store.verify(),
    "close": lambda store: store.close(),
}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs signals of POSIX")
@pytest.mark.parametrize("name", FROM_A_HANDLER)
def test_a_signal_handler_that_calls_the_store_does_not_hang(name: str) -> None:
    """A handler calls the store anywhere in an append. The call works or its error says what to do; all is sound."""
    refused, came, place = 0, True, 0
    before = signal.getsignal(signal.SIGUSR1)
    while came:
        files = MemoryFiles()
        store = MessageStore.open("/s", StoreConfig.tiny(), files=files, background=False)
        store.append(message())

        def handle(*_: object, store: MessageStore = store) -> None:
            nonlocal refused
            try:
                FROM_A_HANDLER[name](store)
            except StoreError as error:
                assert "let the handler record the signal" in str(error)  # noqa: PT017 (a handler's error goes elsewhere)
                refused += 1

        def append(store: MessageStore = store) -> None:
            with suppress(StoreClosedError):
                store.appender.append(message())  # never the compiled append, within which no signal is handled

        signal.signal(signal.SIGUSR1, handle)
        came = next(at_each_call(append, signal.SIGUSR1, first=place))
        signal.signal(signal.SIGUSR1, before)
        assert store.is_closed or store.append(message())
        store.close()
        assert verify("/s", files=files).sound
        place += 1
    assert refused


def test_a_copy_interrupted_at_a_new_queue_keeps_its_offsets() -> None:
    """The first message of each queue in the copy is a later one of the master's queue, as after retention."""
    files, config = MemoryFiles(), StoreConfig.tiny(commitlog_file_size=1 << 15)
    with (
        MessageStore.open("/master", config, files=files, background=False) as master,
        MessageStore.open("/copy", config, files=files, background=False, replica_of="master") as copy,
    ):
        for _ in range(2):
            master.append(Message("T", bytes(20_000)), 20)
            ends = [sum(master.append(Message("T", b"x"), number)[:2]) for number in range(20)]
        begin = ends[0] - ends[0] % config.commitlog_file_size
        copy.writer.copy_log(begin, master.log.data_at(begin, ends[0] - begin))
        came = []
        for number in range(1, 20):

            def copy_one(end: int = ends[number]) -> None:
                copy.writer.copy_log(copy.log.end, master.log.data_at(copy.log.end, end - copy.log.end))

            came.append(interrupted_at_call(8 * number, copy_one))
            copy_one()
        assert came.count(True) > 10
        assert [copy.queues["T", number].max_offset for number in range(20)] == [2] * 20


@pytest.mark.slow
def test_a_copy_interrupted_where_a_queue_begins_again_is_completed() -> None:
    """The record that the signal leaves is the first of a topic that was made again: its queue has others already."""
    config = StoreConfig.tiny()
    for place in count():
        files = MemoryFiles()
        with (
            MessageStore.open("/master", config, files=files, background=False) as master,
            MessageStore.open("/copy", config, files=files, background=False, replica_of="master") as copy,
        ):
            places = [master.append(message()).physical_offset for _ in range(4)]
            begin, end = places[2], master.log.end
            copy.writer.copy_log(0, master.log.data_at(0, begin))
            raw = bytearray(master.log.data_at(begin, end - begin))
            for number, at in enumerate(places[2:]):
                struct.pack_into(">q", raw, at - begin + QUEUE_OFFSET_AT, number)
            came = interrupted_at_call(place, partial(copy.writer.copy_log, begin, bytes(raw)))
            if copy.is_closed:  # it was in the recovery already
                break
            copy.writer.copy_log(copy.log.end, bytes(raw[copy.log.end - begin :]))
            assert copy.log.end == end
            assert [one.physical_offset for one in copy.messages("T", 0)] == places[2:]
        assert came
    assert place > 20
