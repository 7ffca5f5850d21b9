"""Appends of several processes to one log, by the page of its owner. Here all of them are in this process."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from librmq import Message, MessageStore
from librmq.errors import BrokerUnreachableError, MessageIllegalError, StoreError
from librmq.message import record
from librmq.runtime.compiled_core import CORE
from librmq.store.engine import _append_page as page_format
from librmq.store.engine._append_page import AppendPage
from librmq.store.engine.dispatch import Dispatcher
from librmq.store.peer_appends import PeerAppender
from tests.interrupting import at_each_call
from tests.store.shared_store import CONFIG, Shared, within_a_write

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only there peers append by themselves")


def test_peers_and_the_owner_append_to_one_log(shared: Shared) -> None:
    bodies = [b"%d" % number for number in range(600)]
    for number, body in enumerate(bodies):
        if number % 3 == 2:
            shared.send(Message("orders", body, keys="k"))
        else:
            shared.append(body, peer=number % 3)
    assert shared.bodies() == [b"first", *bodies]
    assert len(shared.store.find_by_key("orders", "k", max_messages=1000)) == 601  # with the fixture's


@pytest.fixture
def many_open_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for descriptor in descriptors:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_process_with_many_open_files_follows_its_peers(many_open_files: None, shared: Shared) -> None:
    shared.direct(b"x")
    assert shared.told.acquire(timeout=20)


def test_a_reader_sees_what_a_peer_has_appended_before(shared: Shared) -> None:
    for number in range(50):
        shared.direct(b"%d" % number)
        assert shared.bodies()[-1] == b"%d" % number


def test_a_second_reader_waits_for_the_entries_of_peers(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log ends behind the records of peers already while the first reader writes their entries."""
    ends, add_block, log = list[int](), Dispatcher.add_block, shared.store.log

    def add(dispatcher: Dispatcher, *arguments: Any) -> bool:
        ends.append(log.end)
        with pytest.raises(StoreError, match="would wait for itself"):  # another thread would wait for this one
            shared.store.queue_range("orders", 0)
        return add_block(dispatcher, *arguments)

    monkeypatch.setattr(Dispatcher, "add_block", add)
    peer, count, are_written = shared.peers[0], 60, False  # so many are dispatched together
    while not are_written:  # the owner has to make room, or let peers append, now and then
        shared.direct(b"x")
        with shared.store.writer.appender.lock.mutex:  # so that the owner finds them together
            ends.clear()
            are_written = all(peer.append(Message("orders", b"y", keys="k"), 0) for _ in range(count))
    assert shared.bodies().count(b"y") >= count
    assert ends


def test_an_owner_alone_notes_no_queues_for_peers(shared: Shared) -> None:
    """Only a turn clears the list, and an owner without peers has none: the list would grow with each message."""
    appender = shared.store.appender
    page = appender.shared
    assert page is not None
    with appender.lock.mutex:
        page.shut()
    appender.append(Message("orders", b"x"))
    appender.append_batch([Message("orders", b"x")] * 3)
    assert page.moved == []


@pytest.mark.parametrize(
    "read",
    [
        lambda store: store.message_at(0),
        lambda store: store.queue_range("orders", 0),
        lambda store: store.read("orders", 0, 0),
        lambda store: store.find_by_key("orders", "k"),
        MessageStore.flush,
    ],
)
def test_a_reader_waits_for_nobody_who_is_told(shared: Shared, read: Callable[[MessageStore], object]) -> None:
    """The caller of a read may hold a lock for which the one who is told waits."""
    is_told, goes_on = threading.Event(), threading.Event()

    def tell(_: object) -> None:
        is_told.set()
        goes_on.wait(60)

    shared.arrived = tell
    with ThreadPoolExecutor(1) as pool:
        try:
            shared.direct(b"told by the thread that follows")
            assert is_told.wait(20)
            shared.direct(b"found by the reader")
            pool.submit(read, shared.store).result(timeout=20)
        finally:
            goes_on.set()


def test_the_owner_is_told_of_messages(shared: Shared) -> None:
    for _ in range(20):
        shared.direct(b"x", peer=1)
    for _ in range(20):
        assert shared.told.acquire(timeout=20)


def test_the_log_goes_on_in_the_next_file(shared: Shared) -> None:
    bodies = [b"%06d" % number * 300 for number in range(400)]
    for body in bodies:
        shared.append(body)
    assert shared.bodies() == [b"first", *bodies]
    assert len(shared.store.log.sequence.starts) > 4


def test_the_bytes_are_those_of_one_process(shared: Shared, tmp_path: Path) -> None:
    for number in range(20):
        shared.append(b"%d" % number)
    messages = sorted(shared.store.topic_messages("orders"), key=lambda message: message.physical_offset)
    with MessageStore.open(tmp_path / "alone", CONFIG) as alone:
        for message in messages:
            alone.log.append(message.raw)
        size = shared.store.log.end
        assert alone.log.end == size
        assert alone.log.data_at(0, size) == shared.store.log.data_at(0, size)


def test_a_message_is_stored_as_a_broker_stores_it(shared: Shared) -> None:
    message = Message("orders", b"x", keys="k", wait_store_ok=False)
    shared.direct_message(message)
    *_, stored = shared.store.topic_messages("orders")
    assert stored.properties == {"KEYS": "k", "CLUSTER": "c"}
    assert message.properties == {"KEYS": "k", "WAIT": "false"}


def test_other_topics_are_for_the_owner(shared: Shared) -> None:
    assert shared.peers[0].append(Message("payments", b"x"), 0) is None
    assert shared.peers[0].append(Message("orders", b"x"), 2) is None
    with pytest.raises(MessageIllegalError, match="132,096 bytes"):  # the owner would refuse it too
        shared.peers[0].append(Message("orders", bytes(129 << 10)), 0)
    shared.appends.withdraw()
    assert shared.peers[0].append(Message("orders", b"x"), 0) is None
    shared.appends.offer("orders", 2, lambda: False)
    assert shared.peers[0].append(Message("orders", b"x"), 0) is None
    shared.appends.offer("orders", 2, lambda: True)
    shared.direct(b"x")


def test_a_store_that_refuses_messages_takes_none_of_peers(shared: Shared) -> None:
    def is_refused(_: int) -> bool:
        shared.appends.refuse()  # the owner's thread may look for room in between, and find some
        return shared.peers[0].append(Message("orders", b"x"), 0) is None

    assert any(map(is_refused, range(10)))
    shared.direct(b"z")


def test_what_is_refused_leaves_nothing(shared: Shared) -> None:
    end = shared.store.log.end
    with pytest.raises(MessageIllegalError):
        shared.direct_message(Message("orders", bytes(33 << 10)))
    shared.append(b"next")
    assert shared.bodies() == [b"first", b"next"]
    assert shared.store.log.end > end


def died(shared: Shared, *, at: str) -> None:
    """Let a peer die within an append."""
    page = AppendPage.open(shared.page)
    assert page is not None
    with page.mutex:
        page.take(1)
        tail = page.numbers[page_format.TAIL]
        start = tail - tail % CONFIG.commitlog_file_size
        page.begin_write(0, tail + 200)
        with open(Path(shared.path, "commitlog", f"{start:020}"), "r+b") as file:
            file.seek(tail - start)
            file.write(b"lost" * 10)
        if at == "offset":
            page.offsets[0] += 1
        page.close()  # which ends the lock as the end of a process does
    page.thread = 0


@pytest.mark.parametrize("at", ["record", "offset"])
@pytest.mark.parametrize("finder", ["peer", "owner"])
def test_a_write_that_its_process_did_not_end_is_undone(shared: Shared, at: str, finder: str) -> None:
    shared.append(b"before")
    died(shared, at=at)
    if finder == "peer":
        shared.direct(b"after", peer=1)
    else:
        shared.send(Message("orders", b"after"))
    assert shared.bodies() == [b"first", b"before", b"after"]
    shared.append(b"last")
    assert shared.bodies()[-1] == b"last"


def test_a_writer_that_is_stopped_is_named(shared: Shared) -> None:
    impatient = shared.peer(0.05)
    page = AppendPage.open(shared.page)
    assert page is not None
    with page.mutex:
        page.take(1)
        with pytest.raises(BrokerUnreachableError, match=r"process \d+ has written to the log for 0.05 s"):
            impatient.append(Message("orders", b"x"), 0)
        page.release()
    impatient.close()
    page.close()
    shared.direct(b"x")


def test_a_page_that_is_closed_takes_nothing(shared: Shared) -> None:
    before = shared.bodies()
    PeerAppender.end_all(shared.page, 1)
    assert shared.peers[0].append(Message("orders", b"x"), 0) is None
    assert shared.bodies() == before


def test_a_record_without_a_queue_entry_is_for_the_owner(shared: Shared) -> None:
    """It would have an offset of its queue, at which the owner expects the next message."""
    before = shared.bodies()
    for sys_flag in (record.TRANSACTION_PREPARED, record.TRANSACTION_ROLLBACK):
        assert shared.peers[0].append(Message("orders", b"half"), 0, sys_flag=sys_flag) is None
    shared.direct(b"next")
    assert shared.bodies() == [*before, b"next"]


def test_a_flag_of_a_host_that_is_not_there_is_refused(shared: Shared) -> None:
    before = shared.bodies()
    with pytest.raises(MessageIllegalError, match="claims an IPv6 host"):
        shared.peers[0].append(Message("orders", b"claims"), 0, sys_flag=record.BORN_HOST_V6)
    shared.direct(b"next")
    assert shared.bodies() == [*before, b"next"]


def test_a_handler_within_an_append_is_refused(shared: Shared) -> None:
    refused: list[bool] = []

    def append() -> None:
        with pytest.raises(StoreError, match="signal handler"):
            shared.peers[0].append(Message("orders", b"inner"), 0)
        refused.append(True)

    with within_a_write(append):
        shared.direct(b"outer")
    assert refused
    assert shared.bodies() == [b"first", b"outer"]


def test_a_handler_at_any_call_of_an_append_is_refused_or_appends(shared: Shared) -> None:
    def append_too(number: int, frame: object) -> None:
        with suppress(StoreError):
            shared.append(b"inner")

    before = signal.signal(signal.SIGUSR1, append_too)
    try:
        number = sum(at_each_call(lambda: shared.append(b"outer"), signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert number > 20
    assert shared.bodies().count(b"outer") == number + 1


@pytest.mark.parametrize("change", [MessageStore.recover, lambda store: store.writer.verify()])
def test_a_look_at_the_whole_store_has_it_alone(shared: Shared, change: Callable[[MessageStore], object]) -> None:
    shared.append(b"before")
    change(shared.store)
    assert not shared.appends.is_open
    shared.append(b"between")
    shared.direct(b"after")
    assert shared.bodies() == [b"first", b"before", b"between", b"after"]


def test_threads_of_peers_and_of_the_owner(shared: Shared) -> None:
    def run(peer: int) -> None:
        for number in range(300):
            message = Message("orders", b"%d:%d" % (peer, number))
            if peer == 2 or shared.peers[peer].append(message, 0) is None:
                shared.send(message)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(run, (0, 1, 2) * 2))
    bodies = shared.bodies()[1:]
    assert len(bodies) == 1800
    for peer in range(3):
        for number in range(300):
            assert bodies.count(b"%d:%d" % (peer, number)) == 2


def test_a_peer_follows_a_file_that_a_recovery_has_made_again(shared: Shared) -> None:
    store, number = shared.store, 0
    size = store.log.file_size
    while store.log.end < size:
        shared.append(b"%06d" % number * 300)
        number += 1
    shared.direct(b"in the second file")
    damaged = [message for message in store.topic_messages("orders") if message.physical_offset < size][-3]
    with open(Path(shared.path, "commitlog", f"{0:020}"), "r+b") as file:
        file.seek(damaged.physical_offset + 100)
        file.write(b"\xff\xff\xff")
    assert store.recover()
    while store.log.end < size:
        shared.send(Message("orders", b"%06d" % number * 300))
    for number in range(5):
        shared.direct(b"acknowledged %d" % number)
        assert shared.bodies()[-1] == b"acknowledged %d" % number


def test_a_whole_record_stays_although_its_writer_died(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader beside the store may have seen it."""

    class DiedError(Exception):
        pass

    def die(*_: object) -> None:
        raise DiedError

    with monkeypatch.context() as patched:
        patched.setattr(AppendPage, "commit", die)
        with pytest.raises(DiedError):
            shared.direct(b"whole")
    shared.direct(b"after", peer=1)
    assert shared.bodies() == [b"first", b"whole", b"after"]


@pytest.mark.platform
@pytest.mark.skipif(CORE.module is None, reason=CORE.state)
def test_the_compiled_core_appends_beside_peers(shared: Shared) -> None:
    shared.direct(b"x")
    assert shared.appends.is_open
    shared.send(Message("orders", b"by the owner", keys="k"))  # takes note of the peer's
    before = CORE.module.counts()["append"]
    for number in range(50):
        shared.send(Message("orders", b"%d" % number, keys="k"))
    assert CORE.module.counts()["append"] - before > 10  # but for those that meet the thread that follows
    shared.direct(b"last")
    assert shared.bodies()[-51:] == [*(b"%d" % number for number in range(50)), b"last"]


@pytest.mark.platform
@pytest.mark.skipif(CORE.module is None, reason=CORE.state)
def test_the_compiled_core_goes_on_behind_what_peers_have_just_written(shared: Shared) -> None:
    shared.direct(b"x")
    before, expected, of_peers = CORE.module.counts()["append"], [b"first", b"x"], 2
    for number in range(100):
        if shared.peers[number % 2].append(Message("orders", b"of a peer", keys="k"), 0):
            of_peers += 1
            expected.append(b"of a peer")
        if not number % 3:
            assert shared.store.queue_range("orders", 0)[1] == len(expected)
        shared.send(Message("orders", b"%d" % number, keys="k"))
        expected.append(b"%d" % number)
    assert CORE.module.counts()["append"] - before > 20  # but for those that meet the thread that follows
    assert shared.bodies() == expected
    for _ in range(of_peers):
        assert shared.told.acquire(timeout=20)
    assert not shared.told.acquire(blocking=False)
