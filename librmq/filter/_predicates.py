"""Filters by a predicate of an application, which is watched: its time, its errors, its counts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from inspect import iscoroutinefunction, isgeneratorfunction, signature
from typing import Final, Generic, NamedTuple, TypeVar

from librmq.clock import Clock, SystemClock
from librmq.config import to_seconds
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
    STOP = "stop"
    """Raise the predicate's error. A consumer keeps the message from its application, and delivers it again later: a
    listener's message fails, and a poll does not get past it. Only for a predicate that raised."""
    AS_ANSWERED = "as answered"
    """Follow the answer; only for a predicate that took too long."""


@dataclass(frozen=True, slots=True)
class PredicateCounts:
    """Counts of a predicate's calls; ``seconds`` is their total time, ``slowest`` the longest of them."""

    calls: int = 0
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


class Judgment(NamedTuple):
    """The answer of a predicate about one message, with its policies applied."""

    match: bool
    """Whether to deliver."""
    error: Exception | None
    """What the predicate raised."""
    is_over_budget: bool
    """Whether the call took longer than the budget."""


class WatchedPredicate(Generic[M]):
    """A predicate on messages with a time budget and a policy for errors. Thread-safe.

    ``budget`` is in seconds, or a `timedelta`, for each message. It is measured, not enforced, because Python
    cannot stop a call from outside. A call over budget is counted and logged, and ``over_budget`` decides about its
    message. ``on_error`` (SKIP, DELIVER or STOP) decides about a message on which the predicate raised an error.
    The predicate's answer need not be a bool; its truth value counts. ``clock`` is the system's by default.

    Raises:
        ConfigError: The budget is not positive, the predicate cannot be called, ``on_error`` is AS_ANSWERED, or
            ``over_budget`` is STOP.
    """

    def __init__(
        self,
        predicate: Callable[[M], object],
        *,
        clock: Clock | None = None,
        budget: float | timedelta,
        over_budget: Policy = Policy.AS_ANSWERED,
        on_error: Policy = Policy.SKIP,
    ) -> None:
        budget_s = to_seconds("budget", budget)
        if not budget_s:
            raise ConfigError(f"budget: expected more than 0 seconds, found {budget}")
        for name, policy in (("over_budget", over_budget), ("on_error", on_error)):
            if not isinstance(policy, Policy):
                raise ConfigError(f"{name}: expected one of Policy, such as Policy.SKIP, found {policy!r:.80}")
        answers: object = predicate
        if iscoroutinefunction(answers) or isgeneratorfunction(answers) or not _takes_message(answers):
            raise ConfigError(
                "predicate: expected a plain function of one message, no coroutine or generator, found "
                f"{predicate!r:.100}"
            )
        if on_error is Policy.AS_ANSWERED:
            raise ConfigError("on_error: expected SKIP, DELIVER or STOP, since a predicate that raised has no answer")
        if over_budget is Policy.STOP:
            raise ConfigError("over_budget: expected SKIP, DELIVER or AS_ANSWERED: a slow predicate has raised nothing")
        self._predicate: Final = predicate
        self._clock: Final[Clock] = clock or SystemClock()
        self._budget: Final = budget_s
        self._over_budget: Final = over_budget
        self.on_error: Final = on_error
        """What becomes of a message on which the predicate raised."""
        self._lock: Final = Lock()
        self._counts = PredicateCounts()

    @property
    def counts(self) -> PredicateCounts:
        """The number of calls so far, by outcome."""
        return self._counts

    def matches(self, message: M, address: object = None) -> bool:
        """Return whether to deliver; the log names the message by ``address``.

        Raises an `Exception` only with ``on_error=Policy.STOP``: the predicate's.
        """
        judgment = self.judge(message, address)
        if judgment.error is not None and self.on_error is Policy.STOP:
            raise judgment.error
        return judgment.match

    def judge(self, message: M, address: object = None) -> Judgment:
        """Return the answer with what happened in the call, which never raises an `Exception`."""
        error: Exception | None = None
        begun = self._clock.monotonic()
        try:
            match = bool(self._predicate(message))
        except Exception as raised:
            error = raised
            match = self.on_error is Policy.DELIVER
            _log.exception(
                "predicate raised on message %(message)s: %(_policy)s", message=address, _policy=self.on_error.value
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
            if error is None and self._over_budget is not Policy.AS_ANSWERED:
                match = self._over_budget is Policy.DELIVER
        with self._lock:
            before = self._counts
            self._counts = PredicateCounts(
                calls=before.calls + 1,
                matched=before.matched + match,
                failed=before.failed + (error is not None),
                over_budget=before.over_budget + is_over_budget,
                seconds=before.seconds + seconds,
                slowest=max(before.slowest, seconds),
            )
        return Judgment(match, error, is_over_budget)


def _takes_message(predicate: object) -> bool:
    """Return whether an object can be called with one argument."""
    if not callable(predicate):
        return False
    with suppress(ValueError):  # one in C without a signature
        try:
            signature(predicate).bind(None)
        except TypeError:
            return False
    return True
