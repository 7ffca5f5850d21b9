"""A user's own predicate on a message: watched, so that it can neither stop delivery nor slow it unseen."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from inspect import iscoroutinefunction
from typing import Final, Generic, TypeVar

from librmq.clock import Clock
from librmq.errors import ConfigError

__all__ = ["Policy", "PredicateCounts", "WatchedPredicate"]

M = TypeVar("M")

_log = logging.getLogger("librmq.filter")


class Policy(Enum):
    """What to do with a message whose predicate failed or took too long."""

    SKIP = "skip"
    """No match, as the broker treats an expression that raises."""
    DELIVER = "deliver"
    """A match."""
    AS_ANSWERED = "as answered"
    """For one that took too long: what it answered."""


@dataclass(frozen=True, slots=True)
class PredicateCounts:
    """What a predicate did so far; ``seconds`` were spent in it, ``slowest`` of them on one message."""

    asked: int = 0
    matched: int = 0
    failed: int = 0
    over_budget: int = 0
    seconds: float = 0.0
    slowest: float = 0.0


class WatchedPredicate(Generic[M]):
    """Calls ``predicate`` with a message, measures it, and lives with its errors.

    ``budget`` is in seconds for each message. Time is measured, not enforced: Python cannot stop a call from
    outside. A message over budget is counted, logged, and treated as ``over_budget`` says; one at which the
    predicate raised as ``on_error`` says (SKIP or DELIVER). What comes back need not be a bool: its truth
    counts. Thread-safe.
    """

    def __init__(
        self,
        predicate: Callable[[M], object],
        *,
        clock: Clock,
        budget: float,
        over_budget: Policy = Policy.AS_ANSWERED,
        on_error: Policy = Policy.SKIP,
    ) -> None:
        if not budget > 0:
            raise ConfigError(f"the budget of a predicate is a positive number of seconds, not {budget}")
        answers: object = predicate
        if iscoroutinefunction(answers) or not callable(answers):
            raise ConfigError(f"a predicate is a function that answers when it is called, not {predicate!r:.100}")
        if on_error is Policy.AS_ANSWERED:
            raise ConfigError("a predicate that raised has not answered: on_error is SKIP or DELIVER")
        self._predicate: Final = predicate
        self._clock: Final = clock
        self._budget: Final = budget
        self._over_budget: Final = over_budget
        self._on_error: Final = on_error
        self._lock: Final = threading.Lock()
        self._counts = PredicateCounts()

    @property
    def counts(self) -> PredicateCounts:
        """How often it was asked, and with which outcome."""
        return self._counts

    def matches(self, message: M, address: object = None) -> bool:
        """Return whether to deliver; ``address`` is how the log names the message. Never raises an Exception."""
        failed = False
        begun = self._clock.monotonic()
        try:
            match = bool(self._predicate(message))
        except Exception:
            failed = True
            match = self._on_error is Policy.DELIVER
            _log.exception("the predicate failed on message %s: %s", address, self._on_error.value)
        seconds = self._clock.monotonic() - begun
        late = seconds > self._budget
        if late:
            _log.warning("the predicate took %.6f s on message %s, of %.6f s", seconds, address, self._budget)
            if not failed and self._over_budget is not Policy.AS_ANSWERED:
                match = self._over_budget is Policy.DELIVER
        with self._lock:
            before = self._counts
            self._counts = PredicateCounts(
                asked=before.asked + 1,
                matched=before.matched + match,
                failed=before.failed + failed,
                over_budget=before.over_budget + late,
                seconds=before.seconds + seconds,
                slowest=max(before.slowest, seconds),
            )
        return match
