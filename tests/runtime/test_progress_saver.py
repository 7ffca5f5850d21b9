"""Saving progress after a flush: when, during which other turns, and when again after a failure."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from librmq.errors import StoreClosedError, StoreIOError
from librmq.runtime._background import ProgressSaver


class Owner:
    """An owner of progress: ``at`` is the current progress, ``saved`` is the stored one."""

    def __init__(self, *, runs_aside: bool) -> None:
        self.at = self.saved = self.now = 0
        self.error: Exception | None = None
        self.waiting: list[tuple[Callable[[], object], Callable[[Exception | None], int | None]]] = []
        self.saver = ProgressSaver(
            "progress",
            flush=lambda reached: self.flush(),
            reached=lambda: self.at if self.at != self.saved else None,
            note=self.note,
            now_ms=lambda: self.now,
            save_every_s=5,
            retry_s=10,
            aside=(lambda wait, done: self.waiting.append((wait, done))) if runs_aside else None,
        )

    def flush(self) -> None:
        if self.error is not None:
            raise self.error

    def note(self, reached: int) -> None:
        self.saved = reached

    def run(self, now: int) -> int | None:
        self.now = now
        return self.saver.run_due(now)

    def flushed(self) -> int | None:
        wait, done = self.waiting.pop()
        try:
            wait()
        except Exception as error:
            return done(error)
        return done(None)


def full() -> StoreIOError:
    return StoreIOError("allocate", "/store", OSError(errno.ENOSPC, "full"))


def test_progress_is_saved_after_a_delay() -> None:
    owner = Owner(runs_aside=False)
    assert owner.run(0) is None
    owner.at = 1
    assert owner.run(100) == 5100
    owner.at = 2
    assert owner.run(200) == 5100
    assert owner.run(5100) is None
    assert owner.saved == 2


def test_changes_during_a_flush_are_saved_by_the_next() -> None:
    owner = Owner(runs_aside=True)
    owner.at = 1
    assert owner.run(0) == 5000
    assert owner.run(5000) is None
    owner.at = 2
    assert owner.run(5001) is None
    owner.now = 5010
    assert owner.flushed() == 5010, "the step checks for later changes"
    assert owner.saved == 1
    assert owner.run(5010) == 10010
    owner.run(10010)
    owner.flushed()
    assert owner.saved == 2
    assert owner.run(10010) is None


@pytest.mark.parametrize("runs_aside", [False, True])
def test_a_full_disk_is_retried_and_logged_once(runs_aside: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "librmq.runtime")
    owner = Owner(runs_aside=runs_aside)

    def tried(at: int) -> int | None:
        due = owner.run(at)
        return owner.flushed() if runs_aside else due

    owner.at, owner.error = 1, full()
    owner.run(0)
    assert [tried(at) for at in (5000, 15000, 25000)] == [15000, 25000, 35000]
    assert [line.message for line in caplog.records] == [
        "progress: saving fails; next try in 10000 ms: /store: allocate: full"
    ]
    owner.error = None
    tried(35000)
    assert owner.saved == 1
    assert [line.message for line in caplog.records[1:]] == ["progress: saving works again"]
    owner.at, owner.error = 2, full()
    owner.run(40000)
    tried(45000)
    assert caplog.text.count("next try in") == 2


def test_another_kind_of_failure_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    owner = Owner(runs_aside=False)
    owner.at, owner.error = 1, full()
    owner.run(0)
    owner.run(5000)
    owner.error = StoreIOError("flush", "/store", OSError(errno.EIO, "broken"))
    owner.run(15000)
    owner.run(25000)
    assert [line.message.rpartition(": ")[2] for line in caplog.records] == ["full", "broken"]


def test_a_flush_that_a_save_has_overtaken_does_nothing() -> None:
    owner = Owner(runs_aside=True)
    owner.at = 1
    owner.run(0)
    owner.run(5000)
    owner.at = 2
    owner.saver.save()
    owner.error = full()  # a second flush would get this error, but there is none
    owner.flushed()
    assert owner.saved == 2


def test_nothing_is_flushed_once_it_is_released(caplog: pytest.LogCaptureFixture) -> None:
    owner = Owner(runs_aside=True)
    owner.at = 1
    owner.run(0)
    owner.run(5000)
    owner.saver.end_writing("the store was closed")
    assert owner.flushed() is None
    assert owner.saved == 0
    with pytest.raises(StoreClosedError, match="was closed"):
        owner.saver.save()
    assert "saving fails: the store was closed" in caplog.text


def test_a_closed_store_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    owner = Owner(runs_aside=False)
    owner.at, owner.error = 1, StoreClosedError("closed")
    owner.run(0)
    with pytest.raises(StoreClosedError):
        owner.run(5000)
    aside = Owner(runs_aside=True)
    aside.at, aside.error = 1, StoreClosedError("closed")
    aside.run(0)
    aside.run(5000)
    assert aside.flushed() is None
    assert "progress: saving fails: closed" in caplog.text


def test_a_clock_set_back_delays_no_save() -> None:
    owner = Owner(runs_aside=False)
    owner.at = 1
    assert owner.run(1_000_000) == 1_005_000
    assert owner.run(0) == 5000
    owner.saver.put_back(100)
    assert owner.run(100) is None
    assert owner.saved == 1


def test_save_is_immediate() -> None:
    owner = Owner(runs_aside=True)
    owner.at = 3
    owner.saver.save()
    assert owner.saved == 3
