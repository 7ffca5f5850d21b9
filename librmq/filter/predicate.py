"""User predicates on messages, watched: an error does not stop delivery, and a slow call is counted and logged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from inspect import iscoroutinefunction
from typing import Final, Generic, TypeVar

from librmq.clock import Clock
from librmq.errors import ConfigError
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock

M = TypeVar("M")

_log = EventLog("librmq.filter")


class Policy(Enum):
    """What to do with a message on which the predicate failed or took too long."""

    SKIP = "skip"
    """Count as no match, as the broker does for an expression that raises."""
    DELIVER = "deliver"
    """Count as a match."""
    AS_ANSWERED = "as answered"
    """Follow the answer; only for a predicate that took too long."""


@dataclass(frozen=True, slots=True)
class PredicateCounts:
    """Counts of a predicate's calls; ``seconds`` is their total time, ``slowest`` the longest of them."""

    calls: int = 0
    """Calls."""
    matched: int = 0
    """Calls with a true answer."""
    failed: int = 0
    """Calls that raised."""
    over_budget: int = 0
    """Calls that took longer than the budget."""
    seconds: float = 0.0
    """Total time of all calls."""
    slowest: float = 0.0
    """Seconds of the longest call."""


class WatchedPredicate(Generic[M]):
    """A predicate on messages with a time budget and a policy for errors. Thread-safe.

    ``budget`` is in seconds for each message. It is measured, not enforced, because Python cannot stop a call from
    outside. A call over budget is counted and logged, and ``over_budget`` decides about its message. ``on_error`` (SKIP
    or DELIVER) decides about a message on which the predicate raised an error. The predicate's answer need not be a
    bool; its truth value counts.

    Raises:
        ConfigError: The budget is not positive, the predicate cannot be called, or ``on_error`` is AS_ANSWERED.
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
            raise ConfigError(f"budget: expected a positive number of seconds, found {budget}")
        answers: object = predicate
        if iscoroutinefunction(answers) or not callable(answers):
            raise ConfigError(f"predicate: expected a plain function, not a coroutine's, found {predicate!r:.100}")
        if on_error is Policy.AS_ANSWERED:
            raise ConfigError("on_error: expected SKIP or DELIVER, since a predicate that raised has no answer")
        self._predicate: Final = predicate
        self._clock: Final = clock
        self._budget: Final = budget
        self._over_budget: Final = over_budget
        self._on_error: Final = on_error
        self._lock: Final = Lock()
        self._counts = PredicateCounts()

    @property
    def counts(self) -> PredicateCounts:
        """The number of calls so far, by outcome."""
        return self._counts

    def matches(self, message: M, address: object = None) -> bool:
        """Return whether to deliver; the log names the message by ``address``. Never raises an `Exception`."""
        failed = False
        begun = self._clock.monotonic()
        try:
            match = bool(self._predicate(message))
        except Exception:
            failed = True
            match = self._on_error is Policy.DELIVER
            _log.exception(
                "predicate raised on message %(message)s: %(_policy)s", message=address, _policy=self._on_error.value
            )
        seconds = self._clock.monotonic() - begun
        is_over_budget = seconds > self._budget
        if is_over_budget:
            _log.warning(
                "predicate took %(seconds).6f s on message %(message)s; its budget is %(budget_s).6f s",
                seconds=seconds,
                message=address,
                budget_s=self._budget,
            )
            if not failed and self._over_budget is not Policy.AS_ANSWERED:
                match = self._over_budget is Policy.DELIVER
        with self._lock:
            before = self._counts
            self._counts = PredicateCounts(
                calls=before.calls + 1,
                matched=before.matched + match,
                failed=before.failed + failed,
                over_budget=before.over_budget + is_over_budget,
                seconds=before.seconds + seconds,
                slowest=max(before.slowest, seconds),
            )
        return match
