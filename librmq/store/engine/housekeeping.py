"""Scheduled work of a store: flush, write the checkpoint, delete expired files, prepare pages.

`Housekeeping.run_due` is a pure step over the store's parts: it does due work and returns the time of its next call. In
an application a thread of the store calls it (`Background`); under a manual clock the test does.
Mirrors 4.9.4's ``FlushRealTimeService``, ``FlushConsumeQueueService``, ``CleanCommitLogService`` and
``AllocateMappedFileService``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

from librmq.clock import Clock
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.errors import FlushFailedError, StoreError
from librmq.runtime.background import Background
from librmq.runtime.compiled_core import AlarmState
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock, critical
from librmq.store.engine.group_commit import GroupCommit

_log = EventLog("librmq.store")

_MIN_AHEAD: Final = 4 << 20
_MAX_AHEAD: Final = 64 << 20
_ENTRIES_WORTH_A_FLUSH: Final = 400  # two pages of a queue
_AGAIN_MS: Final = 10_000  # after a temporary failure


class Housekeeping(AlarmState):
    """Scheduled work of one store. Not thread-safe: one caller at a time.

    ``alarm`` is a physical offset: an append that ends at or after it must wake the caller of `run_due`. Appends only
    compare with it, so the cost is a comparison in a busy store and nothing in an idle one.
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
        """Take the functions to call.

        ``flush_derived()`` flushes queues, index and checkpoint, ``entries()`` is the average of unflushed entries
        of a queue that has some, and ``expire(now_ms)`` is the step of retention.
        """
        self._config = config
        self._log = log
        self._commit = commit
        self._flush_derived = flush_derived
        self._entries = entries
        self._expire = expire
        self._flushed_at_ms = self._derived_at_ms = now_ms
        self._expire_at_ms: int | None = now_ms
        self._last_error = ""
        self._expired_end = -1  # the end of the log's files at the last check of expiry
        self.alarm = -1
        self.watched = sys.maxsize
        """An append that ends after this place calls the watchers; `alarm` is never beyond it."""

    def expire_soon(self) -> None:
        """Check retention in the next `run_due`, because kept files may have become deletable."""
        self._expire_at_ms = self._derived_at_ms

    def watch(self, physical_offset: int) -> None:
        """Let the first append that ends after ``physical_offset`` wake the watchers."""
        self.watched = physical_offset
        self.alarm = min(self.alarm, physical_offset)

    def run_due(self, now_ms: int) -> int | None:
        """Do due work, and return the time of the next call (ms), None if only an append can bring work."""
        self.alarm = self.watched  # later appends are noticed below
        self._flushed_at_ms = min(self._flushed_at_ms, now_ms)  # in case the clock was set back
        self._derived_at_ms = min(self._derived_at_ms, now_ms)
        log = self._log
        ahead = self._ahead()
        try:
            log.prepare(ahead)
        except StoreError as error:  # the append that needs the room gets this error
            _log.warning(
                "no room could be prepared after the log's end: %(error)s", error=error, path=self._log.sequence.folder
            )
        log_due, log_alarm = self._flush_log(now_ms)
        if self._commit.failure is not None:
            return None  # the store accepts nothing more
        queues_due = self._flush_queues(now_ms)
        if log.sequence.end > self._expired_end:  # a new log file can exceed the total size
            self._expired_end, self._expire_at_ms = log.sequence.end, now_ms
        if self._expire_at_ms is not None and now_ms >= self._expire_at_ms:
            try:
                self._expire_at_ms = self._expire(now_ms)
            except StoreError as error:
                _log.error("due log files could not be deleted: %(error)s", error=error, path=self._log.sequence.folder)
                self._expire_at_ms = now_ms + _AGAIN_MS
        if self._config.durability == "sync" and queues_due is not None:
            log_alarm = sys.maxsize  # waiting callers flush, other callers wake this step
        alarm = self.alarm = min(log_alarm, log.end + ahead // 2)
        self.watch(self.watched)
        if log.end >= alarm or (queues_due is None and self._entries()):
            return now_ms  # an append came while the alarm was off
        return min((due for due in (log_due, queues_due, self._expire_at_ms) if due is not None), default=None)

    def _ahead(self) -> int:
        """Return how many bytes behind the log's end to make ready: twice what came between two flushes."""
        return min(max(2 * (self._log.end - self._commit.flushed), _MIN_AHEAD), _MAX_AHEAD)

    def _flush_log(self, now_ms: int) -> tuple[int | None, int]:
        """Flush the log if due; return the next time, and the physical offset of an append that advances it."""
        config, commit = self._config, self._commit
        waiting = self._log.end - commit.flushed
        interval, thorough = round(1000 * config.flush_interval_s), round(1000 * config.flush_thorough_interval_s)
        if config.durability == "sync":  # waiting callers flush; this is for the others
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
                _log.error("the store accepts no more messages: %(error)s", error=error, path=self._log.sequence.folder)
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
        except StoreError as error:  # nothing is lost: they can be rebuilt from the log
            if str(error) != self._last_error:  # log each error once
                _log.error(
                    "queues and index could not be flushed: %(error)s", error=error, path=self._log.sequence.folder
                )
            self._last_error = str(error)
            return now_ms + round(1000 * seconds)
        self._last_error = ""
        return None


class HousekeepingThread:
    """The thread that calls a store's `Housekeeping`, started by the first append with work for it. Thread-safe."""

    def __init__(self, path: str, run_due: Callable[[int], int | None], clock: Clock) -> None:
        self._path = path
        self._run_due = run_due
        self._clock = clock
        self._guard = Lock()
        self._background: Background | None = None
        self._may_start = False
        self._is_warned = False

    def wake(self) -> None:
        """Let the thread check for work."""
        background = self._background
        if background is not None:
            background.wake()
        elif self._may_start:
            with critical, self._guard:
                if self._background is None and self._may_start:
                    try:
                        self._background = Background(self._run_due, self._clock, "librmq-store")
                    except RuntimeError as error:  # the messages are written nevertheless
                        self._warn_not_started(error)
                        return
                    self._is_warned = False

    def _warn_not_started(self, error: RuntimeError) -> None:
        """Log that no thread can be started; the next append with work for one tries again."""
        if not self._is_warned:
            _log.warning(
                "%(path)s: no thread can be started (%(error)s), so stored messages are not flushed or deleted "
                "periodically; call flush(), or raise the limit of threads",
                path=self._path,
                error=error,
            )
        self._is_warned = True

    def allow_start(self) -> None:
        """Allow the next `wake` to start the thread."""
        self._may_start = True

    def stop(self) -> None:
        """Stop the thread and return when it has ended; none starts until `allow_start`."""
        with critical:
            with self._guard:
                background, self._background, self._may_start = self._background, None, False
            if background is not None:
                background.stop()

    def after_fork(self) -> None:
        """Leave the thread to the parent, in a forked child."""
        self._background, self._may_start = None, False
        self._guard = Lock()
