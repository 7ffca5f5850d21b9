"""Stores whose clock is before 1970, has been set back, or jumps."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest

from librmq import Message
from librmq.clock import ManualClock, SystemClock
from librmq.files._memory import MemoryFiles
from librmq.override import override
from librmq.store import MessageStore, Wholeness
from librmq.store.engine.store_parts import AppendLock
from librmq.store.recovery._verify import verify
from tests.stores import ROOT, SMALL, START_MS


@pytest.mark.parametrize("start_ms", [-5_000_000, -1, 0])
@pytest.mark.parametrize("clean", [True, False])
def test_a_store_from_before_1970_opens_again(start_ms: int, clean: bool) -> None:
    files = MemoryFiles()
    store = MessageStore.open(ROOT, SMALL, files=files, clock=ManualClock(start_ms))
    for number in range(100):
        store.append(Message("T", b"x", keys=f"k{number}"))
    store.flush()
    if clean:
        store.close()
    else:
        store.abandon()
    with MessageStore.open(ROOT, SMALL, files=files, clock=ManualClock(start_ms)) as store:
        assert len(list(store.messages("T"))) == 100
        assert len(store.find_by_key("T", "k7")) == 1
        store.append(Message("T", b"y", keys="k7"))
    assert verify(ROOT, SMALL, files).sound


class UnsteadyClock(ManualClock):
    """A clock that can be set back."""

    @override
    def move_to(self, now_ms: int) -> None:
        self._now_ms = now_ms


def test_a_clock_that_is_set_back_before_a_kill_is_no_loss() -> None:
    """The record of the checkpoint's time is not in the last file with records, behind which there are empty ones."""
    files, clock = MemoryFiles(), UnsteadyClock(START_MS + 3_600_000)
    with MessageStore.open(ROOT, SMALL, files=files, clock=clock) as store:
        store.append(Message("T", b"x" * 100))
        store.flush()
        clock.move_to(START_MS)
        while store.log.end < 2 * SMALL.commitlog_file_size:
            store.append(Message("T", b"x" * 100))
        store.log.prepare(2 * SMALL.commitlog_file_size)
        assert len(store.log.sequence.starts) > 3
        store.abandon()
    with MessageStore.open(ROOT, SMALL, files=files, read_only=True) as store:
        assert store.condition.kind is Wholeness.RECOVERABLE
    assert verify(ROOT, SMALL, files).sound


def test_a_narrow_search_finds_messages_after_a_clock_jump() -> None:
    files, back_ms = MemoryFiles(), START_MS - 3_600_000
    for name, start_ms in (("before", START_MS), ("after", back_ms)):
        clock = ManualClock(start_ms)
        with MessageStore.open(ROOT, SMALL, files=files, clock=clock) as store:
            for number in range(40):
                clock.advance(seconds=60)
                store.append(Message("T", f"{name} {number}".encode(), keys="k"))
    with MessageStore.open(ROOT, SMALL, files=files, read_only=True) as store:

        def found(begin_ms: int, end_ms: int, most: int = 64) -> list[bytes]:
            return [message.body for message in store.find_by_key("T", "k", begin_ms, end_ms, most)]

        assert found(back_ms + 600_000, back_ms + 660_000) == [b"after 9", b"after 10"]
        assert found(back_ms + 600_000, back_ms + 660_000, 1) == [b"after 10"]
        assert found(START_MS + 600_000, START_MS + 600_000) == [b"before 9"]


class PausedClock(SystemClock):
    """The clock of a process that is paused for an hour between any two looks at it."""

    hours = 0

    def monotonic(self) -> float:
        self.hours += 1
        return super().monotonic() + 3600 * self.hours


def test_a_pause_of_the_process_uses_up_no_wait() -> None:
    """A send was refused as busy after a pause, although the write that it waited for was paused too."""
    with MessageStore.open(ROOT, SMALL, files=MemoryFiles(), clock=PausedClock()) as store:
        lock = store.appender.lock
        lock.mutex.acquire()
        other = threading.Timer(0.2, lock.mutex.release)  # another write, longer than one step of the wait
        other.start()
        assert lock.is_free_within(60)
        other.join()


def test_a_loaded_machine_uses_up_little_of_a_wait() -> None:
    """Each look takes long there, in which the other write gets as little done."""
    lock = AppendLock(SystemClock())
    lock.mutex = Mock(acquire=Mock(side_effect=[False] * 15 + [True]))
    assert lock.is_free_within(0.2)
    lock.mutex.acquire.side_effect = [False] * 100
    assert not lock.is_free_within(0.2)
