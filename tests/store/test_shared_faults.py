"""What can go wrong between an owner and peers that append to its log: signals, stops, recoveries, other topics."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from librmq import Message, MessageStore
from librmq.clock import ManualClock
from librmq.errors import BrokerUnreachableError, CorruptionError
from librmq.message import record
from librmq.store import AppendResult
from librmq.store.engine import _append_page as append_page
from librmq.store.engine._append_page import AppendPage
from librmq.store.engine.copies import Prepared
from librmq.store.peer_appends import PeerAppender
from tests.interrupting import at_each_call, interrupted_at_call
from tests.store.shared_store import CONFIG, Shared, within_a_write
from tests.store.test_shared_deaths import REFUSED, child

if sys.platform != "win32":
    import fcntl

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only there peers append by themselves")


@contextmanager
def a_stopped_writer(shared: Shared, wait_s: float = 0.01) -> Iterator[None]:
    """Hold the lock of the page, as a process that is stopped; others wait as long for it."""
    page = AppendPage.open(shared.page)
    assert page is not None
    with mock.patch.object(shared.appends, "wait_s", wait_s), page.mutex:
        page.take(20)
        try:
            yield
        finally:
            page.release()
            page.close()


# ---- signals


def test_a_signal_in_an_append_of_a_peer_leaves_the_lock_free(shared: Shared) -> None:
    """Wherever Ctrl-C comes, others can append at once, and so can its own process."""
    peer, sent = shared.peers[0], 0

    def act() -> None:
        nonlocal sent
        sent += 1
        while peer.append(Message("orders", b"interrupted %d" % sent), 0) is None:
            shared.send(Message("orders", b"by the owner"), 1)

    impatient = shared.peer(0.01)
    for number, _ in enumerate(at_each_call(act)):
        for writer in (impatient, peer):
            while writer.append(Message("orders", b"%d" % number), 1) is None:
                shared.send(Message("orders", b"by the owner"), 1)
    impatient.close()
    bodies = shared.bodies()
    assert len(bodies) == len({*bodies})
    assert b"interrupted %d" % sent in bodies


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a listing of files ends unclosed
def test_a_signal_in_the_first_append_of_a_peer_lets_it_append_later(shared: Shared) -> None:
    """It may come while the peer maps the file."""
    came, number = True, 0
    while came:
        peer = shared.peer(0.01)
        came = interrupted_at_call(number, partial(peer.append, Message("orders", b"interrupted"), 0))
        while peer.append(Message("orders", b"%d" % number), 1) is None:
            shared.send(Message("orders", b"by the owner"), 1)
        peer.close()
        number += 1
    bodies = shared.bodies(1)
    assert [body for body in bodies if body.isdigit()] == [b"%d" % sent for sent in range(number)]


def test_a_signal_in_an_append_of_the_owner_keeps_peers_appending(shared: Shared) -> None:
    acknowledged: list[bytes] = []
    sent = 0

    def act() -> None:
        nonlocal sent
        sent += 1
        shared.store.append(Message("orders", b"own %d" % sent), 0)
        acknowledged.append(b"own %d" % sent)

    for number, _ in enumerate(at_each_call(act)):
        shared.direct(b"of a peer %d" % number)
        acknowledged.append(b"of a peer %d" % number)
    bodies = shared.bodies()
    assert len(bodies) == len({*bodies})
    assert [body for body in bodies if body in acknowledged] == acknowledged


def test_a_signal_behind_the_unlock_leaves_the_write_of_another_alone(shared: Shared) -> None:
    """The second end of a turn must not take the mark of a process that has the lock by then for its own."""
    page = AppendPage.open(shared.page)
    assert page is not None
    flock, unlocks = fcntl.flock, 0

    def interrupted(descriptor: int, operation: int) -> None:
        nonlocal unlocks
        flock(descriptor, operation)
        if operation == fcntl.LOCK_UN and threading.current_thread() is threading.main_thread():
            unlocks += 1
            if unlocks == 1:
                page.take(20)
                page.begin_write(0, page.numbers[append_page.TAIL] + 300)
                raise KeyboardInterrupt

    with page.mutex:
        with mock.patch.object(fcntl, "flock", interrupted), pytest.raises(KeyboardInterrupt):
            shared.peers[0].append(Message("orders", b"x"), 0)
        assert page.numbers[append_page.WRITING]
        page.numbers[append_page.WRITING] = 0
        page.release()
    page.close()
    shared.direct(b"next")


# ---- a process that is stopped with the lock


def test_a_store_stays_open_until_no_process_appends(shared: Shared) -> None:
    shared.append(b"before")
    with a_stopped_writer(shared), pytest.raises(BrokerUnreachableError, match="has written to the log"):
        shared.store.close()
    shared.append(b"after")
    assert shared.bodies() == [b"first", b"before", b"after"]
    shared.store.close()
    assert shared.peers[0].append(Message("orders", b"late"), 0) is None


def test_a_changed_topic_waits_for_no_process(shared: Shared) -> None:
    with a_stopped_writer(shared):
        shared.appends.withdraw()
    assert shared.peers[0].append(Message("orders", b"late"), 0) is None
    shared.send(Message("orders", b"by the owner"))
    assert shared.peers[0].append(Message("orders", b"late"), 0) is None
    shared.appends.offer("orders", 2, lambda: True)
    shared.direct(b"next")


def test_only_the_first_thread_waits_for_a_stopped_process(shared: Shared) -> None:
    with a_stopped_writer(shared):
        with pytest.raises(BrokerUnreachableError):
            shared.store.append(Message("orders", b"refused"), 0)
        with mock.patch.object(shared.appends, "wait_s", 3600), pytest.raises(BrokerUnreachableError):
            shared.store.append(Message("orders", b"refused"), 0)
    shared.direct(b"next")


def test_a_topic_that_changes_during_its_offer_stays_withdrawn(shared: Shared) -> None:
    def changes_now() -> bool:
        shared.appends.withdraw()
        return True

    shared.appends.offer("orders", 2, changes_now)
    assert shared.peers[0].append(Message("orders", b"x"), 0) is None
    shared.send(Message("orders", b"by the owner"))
    assert shared.peers[0].append(Message("orders", b"x"), 0) is None
    shared.appends.offer("orders", 2, lambda: True)
    shared.direct(b"next")


# ---- what the owner does besides


def test_a_message_is_told_although_a_send_of_the_owner_has_followed_it(shared: Shared) -> None:
    """The follower may find nothing more to follow, and tells of what was."""
    for _ in range(5):
        shared.direct(b"of a peer")
        shared.send(Message("orders", b"by the owner"))
        assert shared.told.acquire(timeout=20)


def test_an_error_of_the_application_ends_no_following(shared: Shared) -> None:
    def fail(_: object) -> None:
        failed.set()
        raise ZeroDivisionError

    failed, arrived = threading.Event(), shared.arrived
    shared.arrived = fail
    while not failed.is_set():
        shared.direct(b"x")
    shared.arrived = arrived
    while not shared.told.acquire(blocking=False):
        shared.direct(b"x")


def test_a_page_that_a_killed_owner_left_is_not_used_beside_its_worker(tmp_path: Path) -> None:
    """A worker that the owner has forked lives on, and another writer has had the store since."""

    def own(tell: Callable[[], object], wait: Callable[[], object]) -> None:
        shared = Shared(tmp_path)
        shared.direct(b"of a peer")
        if not os.fork():
            tell()  # with the parent's locks closed, which takes a moment after the fork
            wait()
            os._exit(0)
        signal.pause()

    with child(own) as owner:
        assert owner.step()
        os.kill(owner.process, signal.SIGKILL)
        os.waitid(os.P_PID, owner.process, os.WEXITED | os.WNOWAIT)
        with MessageStore.open(tmp_path / "store", CONFIG) as store:
            store.append(Message("orders", b"of another writer"), 0)
            end = store.log.end
        with pytest.raises(ConnectionRefusedError):
            PeerAppender.open(str(tmp_path / "store"), str(tmp_path / "appends"), 20)
        with MessageStore.open(tmp_path / "store", CONFIG) as store:
            assert store.log.end == end
        owner.let_on()  # the worker ends


def test_copies_that_go_on_in_the_next_file_leave_no_number_twice(shared: Shared) -> None:
    """Entries of the first part are written before the second part, which adds to other queues."""
    writer = shared.store.copies
    (record, *_) = shared.store.messages("orders", 0)

    def copies(queue_id: int, count: int) -> list[Prepared]:
        return [writer.prepare_again(record, "orders", queue_id, b"") for _ in range(count)]

    (size,) = {result.size for result in writer.append(copies(0, 1))}
    left = (shared.store.log.file_size - shared.store.log.end) // size
    writer.append([*copies(0, 300), *copies(1, left - 300 + 20)])
    end = shared.store.queue_range("orders", 0)[1]
    shared.direct(b"next")
    assert shared.store.queue_range("orders", 0)[1] == end + 1
    assert shared.bodies()[-1] == b"next"


def test_all_ways_to_a_message_find_that_of_a_peer(shared: Shared, tmp_path: Path) -> None:
    """As soon as it is acknowledged, as one of the owner."""
    store = shared.store

    def append(key: str) -> AppendResult:
        while (result := shared.peers[0].append(Message("orders", key.encode(), keys=key), 0)) is None:
            shared.send(Message("orders", b"by the owner"), 1)
        return result

    result = append("place")
    message = store.message_at(result.physical_offset)
    assert message is not None
    assert message.body == b"place"
    result = append("id")
    assert [message.body for message in store.find_by_id(result.offset_id)] == [b"id"]
    append("key")
    assert [message.body for message in store.find_by_key("orders", "key")] == [b"key"]
    result = append("flushed")
    assert store.flush() >= result.physical_offset + result.size
    append("snapshot")
    store.snapshot(tmp_path / "copy")
    with MessageStore.open(tmp_path / "copy", read_only=True) as copy:
        assert [*copy.messages("orders", 0)][-1].body == b"snapshot"


def test_a_record_that_does_not_continue_its_queue_is_an_error_each_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An opening repairs it; until then nothing that follows it passes for whole."""
    shared, result = Shared(tmp_path), None
    shared.store.writer.thread.stop()
    while result is None:
        shared.direct(b"x")
        with shared.store.writer.appender.lock.mutex:
            result = shared.peers[0].append(Message("orders", b"x"), 0)
            if result is not None:
                with open(shared.store.log.sequence.path_at(result.physical_offset), "r+b") as file:
                    file.seek(result.physical_offset % shared.store.config.commitlog_file_size + record.QUEUE_OFFSET_AT)
                    file.write((result.queue_offset + 3).to_bytes(8))
    for step in (shared.store.flush, shared.store.flush, shared.close):
        with pytest.raises(CorruptionError, match="a record that continues its queue"):
            step()
        if step != shared.close:  # periodic work goes on, so that the rest of the log is flushed
            assert shared.store.run_due(shared.store.clock.now_ms() + 60_000) is not None
    assert [one.getMessage() for one in caplog.records if "flushing queues and index fails" in one.getMessage()]
    with MessageStore.open(shared.path) as store:
        assert store.queue_range("orders", 0) == (0, result.queue_offset + 1)


def test_the_time_of_an_append_is_that_under_the_lock(shared: Shared) -> None:
    clock = ManualClock(shared.store.clock.now_ms() + 3_600_000)
    shared.store.appender.now_ms = clock.now_ms
    take, thread = AppendPage.take, threading.get_ident()

    def take_late(page: AppendPage, *words: Any, **fields: Any) -> None:
        take(page, *words, **fields)
        if threading.get_ident() == thread:
            clock.advance(minutes=1)  # while another process had it

    before_ms = clock.now_ms()
    with mock.patch.object(AppendPage, "take", take_late):
        result = shared.store.append(Message("orders", b"x"), 0)
    assert result.store_timestamp_ms == before_ms + 60_000


def test_a_record_that_its_writer_has_not_committed_is_the_same_to_readers(shared: Shared) -> None:
    """A reader beside the store sees it, so it must stay."""

    def die(*_: object) -> int:
        with mock.patch.object(AppendPage, "commit", side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
            shared.peer().append(Message("orders", b"whole"), 0)
        return REFUSED

    status = REFUSED
    while status == REFUSED:
        shared.direct(b"before", 1)
        with child(die) as dying:
            status = dying.end()
    assert status == -signal.SIGKILL
    with MessageStore.open(shared.path, read_only=True) as reader:
        bodies = [message.body for message in reader.messages("orders", 0)]
        assert bodies == [b"first", b"whole"]
        shared.direct(b"after")
        assert shared.bodies() == [*bodies, b"after"]


def test_a_child_that_is_forked_within_an_append_keeps_no_lock(shared: Shared) -> None:
    children = list[tuple[int, int]]()

    def fork() -> None:
        waiting, writing = os.pipe()
        process = os.fork()
        if not process:
            os.close(writing)
            os.read(waiting, 1)
            os._exit(0)
        os.close(waiting)
        children.append((process, writing))

    shared.direct(b"before")
    with within_a_write(fork):
        shared.direct(b"forked")
    shared.direct(b"after", peer=1)
    for process, writing in children:
        os.close(writing)
        os.waitpid(process, 0)
    assert children
    assert shared.bodies() == [b"first", b"before", b"forked", b"after"]
