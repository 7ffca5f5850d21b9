"""Durability of a store: group commit of the log, flushes of queues and index, the checkpoint, and scheduled work.

In a group commit the first waiter flushes everything appended so far, and the others wait for their turn. The first
waiter whose message came later flushes next. After a failed flush the kernel can drop the unwritten pages and report
success for the next flush. So nothing is acknowledged until the store is reopened. The checkpoint covers log, queues
and index, so it is written last.

`Housekeeping.run_due` is a pure step over the store's parts: it does due work and returns the time of its next call. In
an application a thread of the store calls it (`Background`); under a manual clock the test does.

Mirrors 4.9.4's ``GroupCommitService``, ``FlushRealTimeService``, ``FlushConsumeQueueService``,
``CleanCommitLogService`` and ``AllocateMappedFileService``.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Final, Generic, TypeVar

from librmq.clock import Clock
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.consumequeue import ConsumeQueue, files_of
from librmq.errors import FlushFailedError, StoreClosedError, StoreError, StoreIOError
from librmq.runtime import Background, StateLog, calls_later, critical
from librmq.runtime.compiled_core import AlarmState
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.store.engine.saved_state import MarkWriter
from librmq.store.engine.store_parts import AppendLock, Parts

# ---- group commit

_T = TypeVar("_T")

MANY_FILES: Final = 64
"""Files from about which on flushing the whole file system is faster than flushing each of them."""
_MANY: Final = 16
_AT_A_TIME: Final = 8
_WORTH_A_PAUSE: Final = 64
"""Least number of records behind whose dispatch a flush lets appends that wait come first."""


def flush_all(queues: set[ConsumeQueue], flush_disks: Callable[..., bool] = lambda *folders: False) -> None:
    """Flush all of ``queues`` by folder, several at once if they are many, because the device accepts them together.

    Many queues with new files are flushed by ``flush_disks(*folders)``, because each of them by itself would take a
    commit of the file system; it returns False if it can't. Flushed ones are removed from ``queues``. The error of the
    first failure is raised.
    """
    new = list[ConsumeQueue]()
    if len(queues) >= MANY_FILES:
        new = [queue for queue in queues if queue.ext is None and files_of(queue).has_new_names]
    if len(new) >= MANY_FILES:
        # Taken before the flush, so that the marks of later changes stay.
        marks = [(files_of(queue), files_of(queue).take_marks()) for queue in new]
        is_flushed = False
        try:
            is_flushed = flush_disks(*[queue.folder for queue in new])
        finally:
            if is_flushed:
                queues.difference_update(new)
            else:
                for files, marked in marks:
                    files.put_marks_back(*marked)

    remaining = deque(sorted(queues, key=lambda queue: queue.folder))  # threads share it

    def flush() -> None:
        with suppress(IndexError):
            while True:
                queue = remaining.popleft()
                queue.flush()
                queues.discard(queue)

    if len(queues) >= _MANY:
        futures: list[Future[None]] = []
        with ThreadPoolExecutor(_AT_A_TIME, "librmq-flush") as pool:
            # The interpreter starts no thread while it calls exit handlers; the call below flushes the rest.
            with suppress(RuntimeError):
                futures.extend(pool.submit(flush) for _ in range(_AT_A_TIME))
            for future in futures:
                future.result()
    flush()


class GroupCommit:
    """Shared flushes of the log. Thread-safe.

    Waiters queue in FIFO order; the first one flushes and wakes the next. A waiter whose message has been flushed wakes
    the next in turn. So no waiter wakes too early. When a waiter has to flush, those before it have had time to append
    again.
    """

    def __init__(self, flush: Callable[[], int], flushed: int, on_failure: Callable[[], None]) -> None:
        """``flush()`` flushes the log and returns the physical offset up to which it is on the device, now ``flushed``.

        ``on_failure()`` is called once, when a flush has failed.
        """
        self.flushed: int = flushed
        """Physical offset below which everything is on the device."""
        self.failure: StoreIOError | None = None
        """The first flush that failed; nothing unflushed is acknowledged after it."""
        self._flush = flush
        self._on_failure = on_failure
        self._guard = Lock()  # protects the following fields
        self.waiters: deque[Lock] = deque()  # the first has its turn, the others are held
        self._stopped: str | None = None

    def reach(self, physical_offset: int) -> None:
        """Wait until everything below ``physical_offset`` is on the device, and flush unless another caller does.

        Raises:
            FlushFailedError: A flush has failed.
            StoreClosedError: `stop_flushes` was called.
        """
        if self.flushed >= physical_offset:
            return
        self.check_flushes()
        self._in_turn(lambda: self._flush_up_to(physical_offset))
        if self.flushed < physical_offset:
            self.check_flushes()

    def _flush_up_to(self, physical_offset: int) -> None:
        """Flush, unless an earlier caller has."""
        if self.flushed < physical_offset:
            self.check_flushes()
            try:
                self.flushed = max(self.flushed, self._flush())
            except StoreIOError as error:
                self.failure = error
                self._on_failure()

    def _in_turn(self, act: Callable[[], None]) -> None:
        """Call ``act`` at this caller's turn, in the order of the calls. Ctrl-C waits that long.

        Another thread can throw an exception into this one at any moment, as libraries for time limits do. One that
        comes when `pass_turn` begins would keep the place, so the call is repeated from here, where none can come.
        """
        turn = Lock()
        turn.acquire()
        with critical:
            try:
                with self._guard:
                    self.waiters.append(turn)
                    is_first = self.waiters[0] is turn
                if not is_first:
                    turn.acquire()  # this waits until the caller is the first
                act()
            finally:
                thrown: BaseException | None = None
                while True:
                    try:
                        self.pass_turn(turn)
                        break
                    except BaseException as error:
                        thrown = error
                if thrown is not None:
                    raise thrown

    def pass_turn(self, turn: Lock) -> None:
        """Give up a place and wake the first caller; a second call does nothing more."""
        with self._guard:
            if turn in self.waiters:
                self.waiters.remove(turn)
            if self.waiters and self.waiters[0].locked():  # it waits, or has its turn and waits no more
                self.waiters[0].release()

    def check_flushes(self) -> None:
        """Raise `FlushFailedError` if a flush has failed, `StoreClosedError` after `stop_flushes`."""
        if self.failure is not None:
            raise FlushFailedError(self.failure) from self.failure
        if self._stopped is not None:
            raise StoreClosedError(self._stopped)

    def stop_flushes(self, why: str) -> None:
        """Flush no more, because the log is released; later nothing is acknowledged that is not on the device now.

        Waits until a running flush has ended.
        """
        self._stopped = why
        self._in_turn(lambda: None)

    def stop_after_fork(self, why: str) -> None:
        """Stop in a child process after a fork, where no thread releases the locks."""
        self._stopped = why


class Acknowledgement(Generic[_T]):
    """The acknowledgement of a pipelined append: ``result`` is known immediately, durability follows later.

    Thread-safe. Acknowledgements come in the order of the appends, because one watermark decides them all.
    """

    __slots__ = ("_commit", "_end", "result")

    def __init__(self, result: _T, commit: GroupCommit, end: int) -> None:
        self.result: _T = result
        """The place of the message."""
        self._commit = commit
        self._end = end

    @property
    def done(self) -> bool:
        """Whether the message has reached the device."""
        return self._commit.flushed >= self._end

    def wait(self) -> _T:
        """Wait until the message is on the device, and return ``result``.

        Raises:
            FlushFailedError: A flush has failed.
        """
        self._commit.reach(self._end)
        return self.result


class Durability:
    """Flushes the parts of a store that one `Appender` writes. Thread-safe."""

    def __init__(
        self,
        parts: Parts,
        lock: AppendLock,
        advance: Callable[[], object],
        catch_up: Callable[[], object],
        check_lock: Callable[[], object],
        on_failure: Callable[[], None],
        flush_disks: Callable[..., bool],
        marks: MarkWriter,
    ) -> None:
        """Take the functions to call, and the writer of marks.

        ``advance()`` takes ``lock`` and writes due entries and keys; ``catch_up()`` does so under ``lock``;
        ``check_lock()`` raises if another process
        has taken over the store; ``on_failure()`` is called once, when a flush of the log has failed;
        ``flush_disks(*folders)`` flushes the whole file systems of folders, and returns False if it can't.
        """
        self._parts = parts
        self._lock = lock
        self._advance = advance
        self._catch_up = catch_up
        self._check_lock = check_lock
        self._flush_disks = flush_disks
        self._marks = marks
        self.commit: GroupCommit = GroupCommit(self._flush_log, parts.log.end, on_failure)
        """The log's part."""
        self.settled: int = parts.log.end
        """Physical offset below which queues and index are on the device too."""
        self._derived_failure: StoreIOError | None = None  # of queues or index; no flush counts after it

    def flush(self) -> int:
        """Flush the log, the parts derived from it, and the checkpoint; return the flushed physical offset.

        Raises:
            FlushFailedError: This or an earlier flush of the log failed: the store accepts nothing more.
            CorruptionError: A record has changed in the log before it was dispatched.
            StoreIOError: This or an earlier flush of queues or index failed: the next open rebuilds them.
            StoreClosedError: The store was closed meanwhile.
        """
        lock, parts = self._lock, self._parts
        dispatcher, checkpoint, index = parts.dispatcher, parts.checkpoint, parts.index
        lock.check_reentry()
        with lock.flushing:
            if dispatcher.due >= _WORTH_A_PAUSE:
                self._advance()
                lock.pause()  # for appends that wait
            with lock.mutex:
                self._catch_up()
                parts.check_counts()
                end, stored = parts.log.end, dispatcher.dispatched_timestamp_ms
                indexed = index.full_timestamp_ms
                queues, dispatcher.unflushed = dispatcher.unflushed, set()
                entries, dispatcher.entries = dispatcher.entries, 0
                mark = self._marks.due_state()
            try:
                self.commit.reach(end)
                flush_all(queues, self._flush_disks)
                index.flush()
                # After a failed flush the kernel can report the pages that it has not written as flushed, so no later
                # flush may count.
                if (failure := self._derived_failure) is not None:
                    why = "so queues and index may lack entries on the device: close the store and reopen it"
                    earlier = OSError(failure.errno, f"{failure.strerror}, {why}")
                    raise StoreIOError(failure.call, failure.filename, earlier)
                if stored:
                    checkpoint.physic_timestamp_ms = checkpoint.logics_timestamp_ms = stored
                    # Record at most the last record's time, in case the clock was set back.
                    checkpoint.index_timestamp_ms = min(indexed, stored)
                checkpoint.flush()
                self.settled = end
            except BaseException as error:
                self._marks.withdraw()
                with lock.mutex:
                    dispatcher.unflushed |= queues
                    dispatcher.entries += entries
                if self._derived_failure is None and isinstance(error, StoreIOError) and error.call.startswith("flush"):
                    self._derived_failure = error
                raise
            self._marks.write(mark)
        return self.commit.flushed

    def mark_flush(self) -> None:
        """Leave a mark if one is due, after an opening that has flushed everything."""
        self._marks.write(self._marks.due_state())

    @contextmanager
    def deletion(self) -> Iterator[None]:
        """Hold flushes and appends back while a file of the log is deleted.

        The marks are deleted before, because after a kill they would say that the file is missing.
        """
        with self._lock.flushing:
            self._marks.withdraw_all()
            with self._lock:
                yield

    def _flush_log(self) -> int:
        """Flush the log if this handle is still the only writer, because another writer can have overwritten it."""
        self._check_lock()
        return self._parts.log.flush()


# ---- scheduled work

_log = EventLog("librmq.store")

_FIRST_AHEAD: Final = 1 << 20
_USUAL_AHEAD: Final = 4 << 20
_MAX_AHEAD: Final = 64 << 20
_ENTRIES_WORTH_A_FLUSH: Final = 400  # so many fill two pages of a queue
_MUCH: Final = 4 << 20
"""Bytes of the log that are flushed before the interval has passed. A flush of more takes a processor for so long that
the other threads of a busy process fall behind."""
_FAST: Final = 160 << 10
"""Bytes a millisecond above which the thread prepares pages for the producer instead."""
AGAIN_MS: Final = 10_000
"""Milliseconds after which a step that failed is tried again."""
_PREPARING: Final = "preparing room after the log's end"
_EXPIRING: Final = "deleting due log files"
_DERIVING: Final = "flushing queues and index"


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
        states: StateLog,
    ) -> None:
        """Take the functions to call, and where to log what fails.

        ``flush_derived()`` flushes queues, index and checkpoint, ``entries()`` is the average of unflushed entries
        of a queue that has some, and ``expire(now_ms)`` is the step of retention.
        """
        self._config = config
        self._log = log
        self._begin = log.end
        self._commit = commit
        self._flush_derived = flush_derived
        self._entries = entries
        self._expire = expire
        self._flushed_at_ms = self._derived_at_ms = now_ms
        self._seen_ms, self._seen_end = now_ms, log.end  # at the last look whether a flush is due
        self._expire_at_ms: int | None = now_ms
        self._states = states
        self._expired_end = -1  # where the log's files ended at the last check of expiry
        self.alarm: int = -1
        self.watched: int = sys.maxsize
        """An append that ends after this place calls the watchers; `alarm` is never beyond it."""

    def expire_soon(self) -> None:
        """Check retention in the next `run_due`, because kept files may have become deletable."""
        self._expire_at_ms = self._derived_at_ms

    def watch_from(self, physical_offset: int) -> None:
        """Let the first append that ends after ``physical_offset`` wake the watchers."""
        self.watched = physical_offset
        self.alarm = min(self.alarm, physical_offset)

    def run_due(self, now_ms: int) -> int | None:
        """Do due work, and return the time of the next call (ms), None if only an append can bring work."""
        self.alarm = self.watched  # later appends are noticed below
        self._flushed_at_ms = min(self._flushed_at_ms, now_ms)  # in case the clock was set back
        self._derived_at_ms = min(self._derived_at_ms, now_ms)
        log = self._log
        ahead, begin = self._ahead(), self._log.end
        try:
            log.prepare(ahead)
        except StoreError as error:
            # The append that needs the room gets this error, so the step does not raise it.
            self._states.failing(_PREPARING, error)
        else:
            self._states.works(_PREPARING)
        log_due, log_alarm = self._flush_log(now_ms)
        if self._commit.failure is not None:
            return None  # the store accepts nothing more
        derived_at_ms = self._derived_at_ms
        queues_due = self._flush_queues(now_ms)
        if log.sequence.end > self._expired_end:  # a new log file can exceed the total size
            self._expired_end, self._expire_at_ms = log.sequence.end, now_ms
        if self._expire_at_ms is not None and self._derived_at_ms > derived_at_ms:
            self._expire_at_ms = now_ms  # files that waited for this flush of queues can go, not a second later
        if self._expire_at_ms is not None and now_ms >= self._expire_at_ms:
            try:
                self._expire_at_ms = self._expire(now_ms)
            except StoreError as error:
                self._states.failing(_EXPIRING, error, logging.ERROR, again_ms=AGAIN_MS)
                self._expire_at_ms = now_ms + AGAIN_MS
            else:
                self._states.works(_EXPIRING)
        if self._config.durability == "sync" and queues_due is not None:
            log_alarm = sys.maxsize  # waiting callers flush, other callers wake this step
        alarm = self.alarm = min(log_alarm, begin + ahead // 2)
        self.watch_from(self.watched)
        if log.end >= alarm or (queues_due is None and self._entries()):
            return now_ms  # an append came while the alarm was off
        return min((due for due in (log_due, queues_due, self._expire_at_ms) if due is not None), default=None)

    def _ahead(self) -> int:
        """Return how many bytes behind the log's end to make ready: twice what came between two flushes.

        At first they are few: pages that a short-lived store never writes would take most of its time.
        """
        end = self._log.end
        minimum = min(max(end - self._begin, _FIRST_AHEAD), _USUAL_AHEAD)
        return min(max(2 * (end - self._commit.flushed), minimum), _MAX_AHEAD)

    def _flush_log(self, now_ms: int) -> tuple[int | None, int]:
        """Flush the log if due; return the next time, and the physical offset of an append that advances it."""
        config, commit = self._config, self._commit
        end = self._log.end
        is_fast = end - self._seen_end > _FAST * (now_ms - self._seen_ms + 1)
        self._seen_end, self._seen_ms = end, now_ms
        waiting = end - commit.flushed
        interval, thorough = round(1000 * config.flush_interval_s), round(1000 * config.flush_thorough_interval_s)
        if config.durability == "sync":  # waiting callers flush; this is for the others
            interval = thorough = 0
        if waiting > 0:
            enough = waiting >= config.flush_least_bytes
            due = self._flushed_at_ms + (interval if enough else thorough)
            if now_ms < due:
                if waiting < _MUCH:
                    return due, commit.flushed + (_MUCH if enough else config.flush_least_bytes)
                if is_fast:
                    return due, sys.maxsize
            self._flushed_at_ms = now_ms
            try:
                commit.reach(self._log.end)
            except FlushFailedError as error:
                _log.error("the store accepts no more messages: %(error)s", error=error, path=self._log.sequence.folder)
                return None, sys.maxsize
            # With "sync" the next append either waits, and flushes, or wakes this step.
            if self._log.end > commit.flushed and config.durability != "sync":
                return now_ms + interval, commit.flushed + _MUCH
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
        except StoreError as error:
            # Queues and index can be rebuilt from the log, so nothing is lost and the step goes on.
            again_ms = round(1000 * seconds)
            self._states.failing(_DERIVING, error, logging.ERROR, again_ms=again_ms)
            return now_ms + again_ms
        self._states.works(_DERIVING)
        return None


class HousekeepingThread:
    """The thread that calls a store's `Housekeeping`, started by the first append with work for it. Thread-safe."""

    def __init__(self, path: str, run_due: Callable[[int], int | None], clock: Clock) -> None:
        self._path = path
        self._run_due = run_due
        self._clock = clock
        self._guard = Lock()
        self._background: Background | None = None
        self.may_start: bool = False
        """Whether the next `wake` can start the thread."""
        self._is_warned = False

    def wake(self) -> None:
        """Let the thread check for work."""
        background = self._background
        if background is not None:
            background.wake()
        elif self.may_start:
            with calls_later(), critical, self._guard:
                if self._background is None and self.may_start:
                    try:
                        self._background = Background(self._run_due, self._clock, "librmq-store")
                        self._is_warned = False
                    except RuntimeError as error:
                        # No thread can start for the flush, but the messages are written, so the append succeeds. The
                        # next one with work for a thread tries again.
                        if not self._is_warned:
                            _log.warning(
                                "%(path)s: no thread can be started (%(error)s), so stored messages are not flushed or "
                                "deleted periodically; call flush(), or raise the limit of threads",
                                path=self._path,
                                error=error,
                            )
                        self._is_warned = True

    def stop(self) -> None:
        """Stop the thread and return when it has ended; none starts until `may_start` is set."""
        with critical:
            with self._guard:
                background, self._background, self.may_start = self._background, None, False
            if background is not None:
                background.stop()

    def after_fork(self) -> None:
        """Leave the thread to the parent, in a forked child."""
        self._background, self.may_start = None, False
        self._guard = Lock()
