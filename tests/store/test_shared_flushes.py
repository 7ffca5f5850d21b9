"""Sends of peers to a store whose senders wait for the device: the owner flushes for them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from librmq import Message
from librmq.errors import BrokerUnreachableError, LostAnswerError, StoreIOError
from librmq.store import AppendResult, verify
from librmq.store.peer_appends import PeerAppender
from tests.store.shared_store import CONFIG, Shared

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only there peers append by themselves")


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    shared = Shared(tmp_path, replace(CONFIG, durability="sync"))
    yield shared
    shared.close()
    assert verify(shared.path).sound


def appended(shared: Shared, peer: int = 0) -> AppendResult:
    """Append a message by a peer itself."""
    while (result := shared.peers[peer].append(Message("orders", b"x"), 0)) is None:
        shared.store.check_room()
        shared.store.append(Message("orders", b"by the owner"), 1, wait=False)
    return result


def end_of(result: AppendResult) -> int:
    return result.physical_offset + result.size


@contextmanager
def a_slow_device(shared: Shared) -> Iterator[Callable[[], None]]:
    """Let no flush end until the device breaks, by a call of the function that this yields."""
    log, goes_on = shared.store.log, threading.Event()
    flush, broken = log.flush, threading.Event()

    def wait() -> int:
        goes_on.wait()
        if broken.is_set():
            raise StoreIOError("flush", "log", OSError(5, "broken"))
        return flush()

    def break_it() -> None:
        broken.set()
        goes_on.set()

    with mock.patch.object(log, "flush", wait):
        try:
            yield break_it
        finally:
            goes_on.set()


def test_a_peer_waits_until_the_owner_has_flushed(shared: Shared) -> None:
    for peer in (0, 1, 0):
        assert shared.peers[peer].is_sync
        end = end_of(appended(shared, peer))
        assert shared.peers[peer].reach(end, 20)
        assert shared.store.appender.flushed >= end


def test_what_a_reader_of_the_owner_has_followed_is_flushed_too(shared: Shared) -> None:
    for _ in range(20):
        end = end_of(appended(shared))
        shared.store.queue_range("orders", 0)
        assert shared.peers[0].reach(end, 20)


def test_what_is_adopted_while_the_thread_looks_at_what_to_flush(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that follows may lose the interpreter at any instruction; here an append of the owner adopts then."""
    looks, goes_on = threading.Event(), threading.Event()
    lock = shared.store.writer.appender.lock

    def late_min(*values: int) -> int:
        if threading.current_thread().name == "librmq share follow" and lock.owner != threading.get_ident():
            looks.set()
            goes_on.wait(20)
        return min(*values)

    appended(shared)
    monkeypatch.setattr("librmq.store.engine._shared_appends.min", late_min, raising=False)
    appended(shared)
    assert looks.wait(20)
    of_peer = appended(shared, 1)
    of_owner = shared.store.append(Message("orders", b"x"), 0, wait=False)
    goes_on.set()
    assert shared.peers[1].reach(end_of(of_peer), 20)
    offsets = [
        of_peer.queue_offset,
        of_owner.queue_offset,
        shared.store.append(Message("orders", b"x"), 0).queue_offset,
    ]
    assert offsets == [*range(offsets[0], offsets[0] + 3)]


def test_threads_of_peers_share_flushes(shared: Shared) -> None:
    reached: list[bool] = []

    def run(peer: int) -> None:
        for _ in range(20):
            reached.append(shared.peers[peer].reach(end_of(appended(shared, peer)), 20))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(run, (0, 1) * 3))
    assert reached == [True] * 120


def test_an_owner_that_does_not_flush_in_time(shared: Shared) -> None:
    appended(shared)
    with a_slow_device(shared):
        end = end_of(appended(shared))
        with pytest.raises(BrokerUnreachableError, match=r"not flushed within 0.01 s: .* may be stored"):
            shared.peers[0].reach(end, 0.01)
    assert shared.peers[0].reach(end, 20)


def test_an_owner_that_ends_before_it_has_flushed(shared: Shared) -> None:
    appended(shared)
    with a_slow_device(shared):
        end = end_of(appended(shared))
        PeerAppender.end_all(shared.page, 20)  # as the next owner does
        with pytest.raises(LostAnswerError, match="may be stored"):
            shared.peers[0].reach(end, 20)


def test_an_owner_that_closes_flushes_first(shared: Shared) -> None:
    end = end_of(appended(shared))
    shared.store.close()
    assert shared.peers[0].reach(end, 20)


def test_a_flush_that_fails_is_known_to_peers(shared: Shared) -> None:
    appended(shared)
    with a_slow_device(shared) as break_it:
        end = end_of(appended(shared))
        break_it()
        assert not shared.peers[0].reach(end, 20)
    assert shared.peers[0].append(Message("orders", b"refused"), 0) is None
    shared.store.recover()
    assert shared.peers[0].reach(end_of(appended(shared)), 20)
