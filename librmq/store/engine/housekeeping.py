"""Work of a store by time: flush, write the checkpoint, delete expired files, prepare pages.

`Housekeeping.run_due` is a pure step over the store's parts: it does what is due and says when to be called next. In an
application a thread of the store calls it (`Background`); under a clock that a test moves, the test does.
Mirrors 4.9.4's ``FlushRealTimeService``, ``FlushConsumeQueueService``, ``CleanCommitLogService`` and
``AllocateMappedFileService``.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Final

from librmq.clock import Clock
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.errors import FlushFailedError, StoreError
from librmq.runtime.background import Background
from librmq.runtime.critical import critical
from librmq.store.engine.group_commit import GroupCommit

__all__ = ["Housekeeping", "HousekeepingThread"]

_log = logging.getLogger("librmq.store")

_MIN_AHEAD: Final = 4 << 20
_MAX_AHEAD: Final = 64 << 20
_ENTRIES_WORTH_A_FLUSH: Final = 400  # two pages of a queue
_AGAIN_MS: Final = 10_000  # after something failed that may succeed later


class Housekeeping:
    """One store's work by time. Not thread-safe: one caller at a time.

    ``alarm`` is a physical offset: an append that ends at or behind it must wake the caller of `run_due`. Appends
    compare with it and nothing else, so that an idle store costs nothing and a busy one a comparison.
    """

    def __init__(
        self,
        config: StoreConfig,
        log: CommitLog,
        commit: GroupCommit,
        flush_derived: Callable[[], object],
        entries: Callable[[], int],
        expire: Callable[[int], int | None],
        now_ms: int,
    ) -> None:
        """Take what it does by time.

        ``flush_derived()`` flushes queues, index and checkpoint, ``entries()`` counts entries that are not flushed, and
        ``expire(now_ms)`` is the step of retention.
        """
        self._config = config
        self._log = log
        self._commit = commit
        self._flush_derived = flush_derived
        self._entries = entries
        self._expire = expire
        self._flushed_at_ms = self._derived_at_ms = now_ms
        self._expire_at_ms: int | None = now_ms
        self._said = ""
        self._expired_end = -1  # the end of the log's files when expiry was last looked at
        self.alarm = -1

    def expire_soon(self) -> None:
        """Check retention in the next `run_due`, because kept files can be deletable now."""
        self._expire_at_ms = self._derived_at_ms

    def run_due(self, now_ms: int) -> int | None:
        """Do due work, and return the time of the next call (ms), None if only an append can bring work."""
        self.alarm = sys.maxsize  # what comes meanwhile is seen below
        self._flushed_at_ms = min(self._flushed_at_ms, now_ms)  # the clock may have been set back
        self._derived_at_ms = min(self._derived_at_ms, now_ms)
        log = self._log
        ahead = self._ahead()
        try:
            log.prepare(ahead)
        except StoreError as error:  # the append that needs the room will meet it
            _log.warning("no room could be made ready ahead of the log: %s", error)
        log_due, log_alarm = self._flush_log(now_ms)
        if self._commit.failure is not None:
            return None  # nothing is taken any more
        queues_due = self._flush_queues(now_ms)
        if log.sequence.end > self._expired_end:  # another file of the log: the total may be too large
            self._expired_end, self._expire_at_ms = log.sequence.end, now_ms
        if self._expire_at_ms is not None and now_ms >= self._expire_at_ms:
            try:
                self._expire_at_ms = self._expire(now_ms)
            except StoreError as error:
                _log.error("log files that are due could not be deleted: %s", error)
                self._expire_at_ms = now_ms + _AGAIN_MS
        if self._config.durability == "sync" and queues_due is not None:
            log_alarm = sys.maxsize  # callers who wait flush for themselves, the others wake the caller of this
        self.alarm = min(log_alarm, log.end + ahead // 2)
        if log.end >= self.alarm or (queues_due is None and self._entries()):
            return now_ms  # an append came by while the alarm was off
        return min((due for due in (log_due, queues_due, self._expire_at_ms) if due is not None), default=None)

    def _ahead(self) -> int:
        """Return how many bytes behind the log's end to make ready: twice what came between two flushes."""
        return min(max(2 * (self._log.end - self._commit.flushed), _MIN_AHEAD), _MAX_AHEAD)

    def _flush_log(self, now_ms: int) -> tuple[int | None, int]:
        """Flush the log if it is time; when next, and the place of the append that may bring it forward."""
        config, commit = self._config, self._commit
        waiting = self._log.end - commit.flushed
        interval, thorough = round(1000 * config.flush_interval_s), round(1000 * config.flush_thorough_interval_s)
        if config.durability == "sync":  # those who wait flush for themselves; here it is for those who don't
            interval = thorough = 0
        if waiting > 0:
            enough = waiting >= config.flush_least_bytes
            due = self._flushed_at_ms + (interval if enough else thorough)
            if now_ms < due:
                return due, sys.maxsize if enough else commit.flushed + config.flush_least_bytes
            self._flushed_at_ms = now_ms
            try:
                commit.reach(self._log.end)
            except FlushFailedError as error:
                _log.error("no messages are taken any more: %s", error)
                return None, sys.maxsize
            if self._log.end > commit.flushed:
                return now_ms + interval, sys.maxsize
        return None, commit.flushed + 1

    def _flush_queues(self, now_ms: int) -> int | None:
        config, entries = self._config, self._entries()
        if not entries:
            return None
        seconds = (
            config.flush_interval_consumequeue_s
            if entries >= _ENTRIES_WORTH_A_FLUSH
            else config.flush_thorough_interval_consumequeue_s
        )
        due = self._derived_at_ms + round(1000 * seconds)
        if now_ms < due:
            return due
        self._derived_at_ms = now_ms
        try:
            self._flush_derived()
        except StoreError as error:  # nothing is lost: they can be made again from the log
            if str(error) != self._said:  # once, until another happens
                _log.error("queues and index could not be flushed: %s", error)
            self._said = str(error)
            return now_ms + round(1000 * seconds)
        self._said = ""
        return None


class HousekeepingThread:
    """The thread that calls a store's `Housekeeping`, started by the first append that has work for it. Thread-safe."""

    def __init__(self, path: str, run_due: Callable[[int], int | None], clock: Clock) -> None:
        self._path = path
        self._run_due = run_due
        self._clock = clock
        self._guard = threading.Lock()
        self._background: Background | None = None
        self._may_start = False
        self._is_missed = False

    def wake(self) -> None:
        """Let the thread look at what there is to do."""
        background = self._background
        if background is not None:
            background.wake()
        elif self._may_start:
            with critical, self._guard:
                if self._background is None and self._may_start:
                    try:
                        self._background = Background(self._run_due, self._clock, "librmq-store")
                    except RuntimeError as error:  # the messages are written all the same
                        self._miss(error)
                        return
                    self._is_missed = False

    def _miss(self, error: RuntimeError) -> None:
        """Say that no thread can be started; the next append that has work for one tries again."""
        if not self._is_missed:
            _log.warning(
                "%s: messages are stored, but nothing is flushed or deleted by time as no thread can be started (%s); "
                "call flush(), or raise the limit of threads",
                self._path, error,
            )  # fmt: skip
        self._is_missed = True

    def allow(self) -> None:
        """Let the next `wake` start the thread."""
        self._may_start = True

    def stop(self) -> None:
        """Return when the thread, if any, has ended; none starts until `allow`."""
        with critical:
            with self._guard:
                background, self._background, self._may_start = self._background, None, False
            if background is not None:
                background.stop()

    def forget(self) -> None:
        """Leave the thread to the parent, in a child process after a fork."""
        self._background, self._may_start = None, False
        self._guard = threading.Lock()
