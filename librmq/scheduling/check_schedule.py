"""Schedule of the checks of half messages: passes on a grid of times, and their progress.

One pass is a `librmq.scheduling.transaction_check.CheckPass`. Mirrors 4.9.4's ``TransactionalMessageCheckService``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

from librmq.config import Between, Config, Seconds
from librmq.errors import LASTING, RmqError
from librmq.java.numbers import java_int
from librmq.message import record
from librmq.message.message import StoredMessage
from librmq.message.topics import HALF_TOPIC
from librmq.runtime.event_log import EventLog, StateLog
from librmq.runtime.flush_aside import FlushAside
from librmq.runtime.runner import Aside
from librmq.scheduling.half_messages import CHECK_GROUP, QUEUE, TransactionOffsets, progress
from librmq.scheduling.transaction_check import CheckPass
from librmq.store import MessageStore

_log = EventLog("librmq.txn")

_CHECK: Final = ("check",), "the check of half messages"
_RESERVED_HOURS: Final = 72
_MAX_UNCOUNTED: Final = 1 << 16
_MAX_INT: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionConfig(Config):
    """Settings for the checks of half messages; the defaults are 4.9.4's."""

    timeout_s: Annotated[float, Seconds()] = 6
    """Age of a half message at its first check, unless it has an immunity of its own."""
    check_max: Annotated[int, Between(1, _MAX_INT)] = 15
    """Checks after which a half message is discarded."""
    interval_s: Annotated[float, Seconds(0.001)] = 60
    """Time between two check passes."""
    longest_pass_s: Annotated[float, Seconds(0.001)] = 60
    """A pass that takes longer ends early."""
    reserved_hours: Annotated[int | None, Between(1, _MAX_INT)] = None
    """Age at which a half message is discarded; None means the store's ``file_reserved_hours``, or else 72."""
    most_at_once: Annotated[int, Between(1, _MAX_INT)] = 1000
    """Half messages in one turn of `Transactions.run_due`; the next turn continues the pass."""


class CheckBack(NamedTuple):
    """A question to a producer group: how did the local transaction of this message end?"""

    group: str
    """The producer group."""
    half: StoredMessage
    """The copy that the check has appended; the answer ends the transaction by the copy's offsets."""
    check_times: int
    """Number of this check, counting from 1."""

    @property
    def topic(self) -> str:
        """The message's own topic."""
        return self.half.properties.get(record.PROPERTY_REAL_TOPIC, "")

    @property
    def queue_id(self) -> int:
        """The message's own queue."""
        return java_int(self.half.properties.get(record.PROPERTY_REAL_QUEUE_ID, "")) or 0

    @property
    def properties(self) -> dict[str, str]:
        """The properties in the producer's form."""
        return {**self.half.properties, record.PROPERTY_WAIT: "false"}


class Checked(NamedTuple):
    """Result of one check pass."""

    questions: list[CheckBack]
    """The questions of the pass."""
    discarded: list[tuple[StoredMessage, int]]
    """The halves that were given up, with their numbers of checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckHooks:
    """Functions that checks call; none of them may raise."""

    ask: Callable[[CheckBack], None]
    """Passes a question to a producer."""
    discarded: Callable[[StoredMessage, int], None]
    """``discarded(half, check_times)`` is called for each half that was given up."""
    make_topic: Callable[[str], None]
    """Adds a topic of one queue to the broker's table."""
    is_reachable: Callable[[str], bool] | None
    """Returns whether a producer of a group can be asked; with None each check counts."""
    has_ended: Callable[[int], bool]
    """``has_ended(queue_offset)`` returns whether a half ended during the pass."""
    passed: Callable[[int], None]
    """``passed(queue_offset)`` is called when no half below a queue offset is pending."""


class CheckSchedule:
    """The check passes of a store's transactions. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        store: MessageStore,
        offsets: TransactionOffsets,
        start_ms: int,
        config: TransactionConfig,
        hooks: CheckHooks,
        aside: Aside | None,
    ) -> None:
        """The first pass continues from the saved progress.

        Args:
            store: Open for writing.
            offsets: Keeps the progress of the check.
            start_ms: Start of the grid of check passes.
            config: When to check.
            hooks: Functions that checks call.
            aside: Flushes the store after a pass while other work continues; None flushes within `run_due`.
        """
        self._uncounted: set[int] = set()
        self._store = store
        self._offsets = offsets
        self._config = config
        self._hooks = hooks
        self._interval_ms = round(1000 * config.interval_s)
        self._begin_ms = start_ms + self._interval_ms
        self._next_ms: int | None = None  # None while nothing is pending
        self._last_ms = start_ms
        self._pass: CheckPass | None = None
        self._is_over = False  # the pass is over: its halves count as judged, though its progress is not saved
        self._states = StateLog(_log, "transactions")
        self._saver = FlushAside(
            "the progress of the check of half messages",
            flush=lambda reached: store.flush(),
            reached=lambda: self._pass if self._is_over else None,
            note=self._save_progress,
            now_ms=store.clock.now_ms,
            save_every_s=0,
            aside=aside,
        )

    def judged_below(self) -> int:
        """Return the queue offset below which all halves have ended, were copied, or were discarded."""
        if self._pass is not None:
            return self._pass.queue_offset
        return progress(self._store, self._offsets, HALF_TOPIC)

    def check(self, now_ms: int, config: TransactionConfig | None = None) -> Checked:
        """Make a whole check pass now, independent of `run_due`. Raises the store's errors."""
        self.save()
        result = Checked([], [])
        current = self._begin_pass(now_ms, config or self._config, result)
        try:
            while not current.check_halves(now_ms, self._config.most_at_once):
                pass
        finally:
            self.save()
        return result

    def run_due(self, now_ms: int) -> int | None:
        """Make the due check pass or a part of it; return the time of the next call (ms), None if nothing is pending.

        Passes come every 60 s from the start on, except those that would find nothing new in the half queue. Call this
        soon after preparing a half.

        Raises:
            StoreClosedError: The store was closed.
            FlushFailedError: A flush has failed; the store must be reopened.
            ReadOnlyError: The store is read-only.
        """
        if now_ms < self._last_ms:  # the clock was set back
            self._begin_ms = min(self._begin_ms, now_ms + self._interval_ms)
            self._next_ms = None
            self._saver.put_back(now_ms)
        self._last_ms = now_ms
        try:
            if self._pass is None and self._next_ms is not None and now_ms >= self._next_ms:
                self._next_ms = None
                if self._has_new():
                    self._begin_pass(now_ms, self._config)
            if self._pass is not None and not self._is_over:
                if not self._pass.check_halves(now_ms, self._config.most_at_once):
                    return now_ms
                self._end_pass()
                self._states.works(*_CHECK)
        except LASTING:
            raise
        except RmqError as error:
            self._end_pass()
            self._states.failing(*_CHECK, error, logging.ERROR, again_ms=self.next_check_ms(now_ms) - now_ms)
        save_ms = self._saver.run_due(now_ms)
        return self._due() if self._pass is None else save_ms

    def _due(self) -> int | None:
        """Return the time of the next pass."""
        if not self._has_new():
            self._next_ms = None
        elif self._next_ms is None:
            self._next_ms = self.next_check_ms(self._last_ms)
        return self._next_ms

    def next_check_ms(self, now_ms: int) -> int:
        """Return the time of the first check pass after ``now_ms``."""
        return max(self._begin_ms, now_ms + self._interval_ms - (now_ms - self._begin_ms) % self._interval_ms)

    def _has_new(self) -> bool:
        _, end = self._store.queue_range(HALF_TOPIC, QUEUE)  # report the result although the disk is full
        return end > progress(self._store, self._offsets, HALF_TOPIC)

    def _begin_pass(self, now_ms: int, config: TransactionConfig, result: Checked | None = None) -> CheckPass:
        """Begin a check pass; ``result`` collects the questions and discards; None drops them."""

        def ask(copy: StoredMessage, check_times: int) -> None:
            question = CheckBack(copy.properties.get(record.PROPERTY_PRODUCER_GROUP, ""), copy, check_times)
            self._hooks.ask(question)
            if result is not None:
                result.questions.append(question)

        def discarded(half: StoredMessage, check_times: int) -> None:
            self._hooks.discarded(half, check_times)
            if result is not None:
                result.discarded.append((half, check_times))

        self._hooks.make_topic(HALF_TOPIC)
        hours = self._store.config.file_reserved_hours if config.reserved_hours is None else config.reserved_hours
        if hours is None:  # the store keeps messages of any age
            hours = _RESERVED_HOURS
        self._pass = CheckPass(
            self._store,
            self._offsets,
            now_ms,
            timeout_ms=round(1000 * config.timeout_s),
            longest_ms=round(1000 * config.longest_pass_s),
            check_max=config.check_max,
            reserved_ms=hours * 3_600_000,
            has_ended=self._hooks.has_ended,
            ask=ask,
            discarded=discarded,
            make_topic=self._hooks.make_topic,
            is_reachable=self._hooks.is_reachable,
            uncounted=self._uncounted,
        )
        return self._pass

    def not_reached(self, question: CheckBack) -> None:
        """Note that a question reached no producer. Such a check does not count, unless every check counts as in 4.9.

        Kept in memory: after a restart it counts.
        """
        if self._hooks.is_reachable is not None and len(self._uncounted) < _MAX_UNCOUNTED:
            self._uncounted.add(question.half.queue_offset)

    def save(self) -> None:
        """Save the progress of a running check pass, which ends there.

        It flushes the records of the pass first. Raises the errors of `MessageStore.flush`.
        """
        self._end_pass()
        self._saver.save()

    def _end_pass(self) -> None:
        """End the pass; its results are saved later."""
        if self._pass is not None and not self._pass.progress():
            self._pass = None
        self._is_over = self._pass is not None

    def _save_progress(self, current: CheckPass) -> None:
        for topic, queue_offset in current.progress().items():
            self._offsets.set_consumer_offset(topic, CHECK_GROUP, QUEUE, queue_offset)
        below = progress(self._store, self._offsets, HALF_TOPIC)
        self._uncounted.difference_update([offset for offset in self._uncounted if offset < below])
        self._hooks.passed(below)
        self._pass, self._is_over = None, False
