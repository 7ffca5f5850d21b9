"""Filters that applications make: by SQL92 expression, by tags, by a predicate.

`SqlFilter` serves a message, an Arrow column and a Spark column. `TagFilter` mirrors
``FilterAPI.buildSubscriptionData`` of 4.9.4 and both checks of tags: by code at the broker and by text at the consumer,
because a queue entry has only the hash of a tag, and two tags can share one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from functools import cached_property, lru_cache, partial
from inspect import iscoroutinefunction, isgeneratorfunction, signature
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from librmq.clock import Clock, SystemClock
from librmq.config import to_seconds
from librmq.errors import ConfigError, FilterSyntaxError
from librmq.filter import interpreter
from librmq.filter._python_backend import EvaluationRefusedError, compile_evaluate, compile_match
from librmq.filter.interpreter import Explanation, Lint, explain, lint
from librmq.filter.normal_form import reduce
from librmq.filter.parser import Dialect, Selector, parse, refuse_rest
from librmq.java.lang import TRIMMED, string_hash
from librmq.override import override
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column


CACHED_FILTERS: Final = 512
CACHED_LENGTH: Final = 4096
"""Longer expressions are compiled each time, so the cache has a bounded size in memory."""


class FilterWarning(UserWarning):
    """The filter ignores text after a complete expression."""


class Compiled:
    """The part that all filters with the same expression and dialect share. Thread-safe."""

    def __init__(self, expression: str, dialect: Dialect) -> None:
        self.selector: Final[Selector] = parse(expression, dialect)
        self.question: Final = reduce(self.selector.root)
        self._answer_first = len(expression) > CACHED_LENGTH

    @cached_property
    def matches(self) -> Callable[[Mapping[str, str] | None], bool]:
        """Return the function that decides whether properties match."""
        return compile_match(self.question)

    @cached_property
    def _evaluate(self) -> object:
        return compile_evaluate(self.question)

    def evaluate(self, properties: Mapping[str, str] | None) -> bool | None:
        """Return whether properties match; None if that is unknown (SQL's NULL)."""
        if self._answer_first:  # compiling a long expression costs more than interpreting it once
            self._answer_first = False
            return interpreter.evaluate(self.selector, properties)
        try:
            return self._evaluate(properties)  # type: ignore[operator,no-any-return]
        except EvaluationRefusedError:
            pass
        return interpreter.evaluate(self.selector, properties)  # its error names the term that failed


def compiled(expression: str, dialect: Dialect = "4.9") -> Compiled:
    """Return the compiled form of an expression, from a bounded cache.

    Raises:
        FilterSyntaxError: The expression does not compile.
    """
    if not isinstance(expression, str):
        raise TypeError(f"a filter expression is a str, not {type(expression).__name__}")
    if len(expression) > CACHED_LENGTH:
        return Compiled(expression, dialect)
    return compiled_once(expression, dialect)


@lru_cache(maxsize=CACHED_FILTERS)
def compiled_once(expression: str, dialect: Dialect) -> Compiled:
    """Return the compiled expression, the same for every caller while it is cached."""
    return Compiled(expression, dialect)


class SqlFilter:
    """An SQL92 filter expression with exactly the decisions of RocketMQ's broker.

    ``dialect`` is ``"4.9"`` or ``"5.3"``, which adds [NOT] CONTAINS, STARTSWITH, ENDSWITH. The broker ignores text
    after a complete expression (``a = 1 garbage``). `SqlFilter` does too and issues a `FilterWarning`; ``strict=True``
    raises an error.

    ``matches(properties) -> bool`` is the broker's decision for a message with these properties, which are a mapping of
    strings or None. It is true for TRUE, and false for FALSE, UNKNOWN and an error.

    Immutable and thread-safe. Compiling takes less than a millisecond; a cache keeps compiled expressions.

    Raises:
        FilterSyntaxError: The expression does not compile; the error has the position and the expected tokens.
    """

    __slots__ = ("_compiled", "dialect", "expression", "matches", "strict")

    def __init__(self, expression: str, *, dialect: Dialect = "4.9", strict: bool = False) -> None:
        self._compiled: Final = compiled(expression, dialect)
        self.expression: Final = expression
        self.dialect: Final = dialect
        self.strict: Final = strict
        self.matches: Final = self._compiled.matches
        if strict:
            refuse_rest(self._compiled.selector)
        ignored_from = self._compiled.selector.ignored_from
        if ignored_from is not None:
            ignored = expression[ignored_from : ignored_from + 40]
            warnings.warn(f"the filter ignores {ignored!r}, as the broker does", FilterWarning, stacklevel=2)

    @override
    def __repr__(self) -> str:
        return f"SqlFilter({self.expression!r}, dialect={self.dialect!r}, strict={self.strict})"

    @override
    def __reduce__(self) -> tuple[object, ...]:
        """Send the filter to another process as its text."""
        return partial(SqlFilter, self.expression, dialect=self.dialect, strict=self.strict), ()

    def evaluate(self, properties: Mapping[str, str] | None) -> bool | None:
        """Return TRUE, FALSE, or UNKNOWN as None.

        Raises:
            FilterEvaluationError: The broker would raise an error; this one names the term.
        """
        return self._compiled.evaluate(properties)

    def match_arrow(self, properties: pa.MapArray | pa.RecordBatch) -> pa.BooleanArray:
        """Return ``matches`` for many messages at once, without nulls. Needs the extra ``arrow``.

        ``properties`` is a map array from string to string, in which a null is a message without properties. It can
        also be a record batch with a column for each property; a null or a missing column is a missing property.
        Integers and booleans count as the text that a sender writes for them.

        Raises:
            TypeError: The columns have other types.
        """
        from librmq.filter.arrow_backend import match_arrow

        return match_arrow(self._compiled.question, properties)

    def to_column(self, properties: Column | Mapping[str, Column]) -> Column:
        """Return ``matches`` as a Spark column that is never null. Needs the extra ``spark``.

        The column consists of native, deterministic expressions, and runs no Python. ``properties`` is a column of type
        map from string to string, or a mapping with a column for each property. Integers and booleans count as the
        text that a sender writes for them; a property of another type fails when a row is read.

        Raises:
            FilterError: The expression is too large for Spark.
        """
        from librmq.filter.spark_backend import to_column

        column: Column = to_column(self._compiled.question, properties)
        return column

    def explain(self, properties: Mapping[str, str] | None) -> Explanation:
        """Explain why a message with these properties matches or does not, term by term."""
        return explain(self._compiled.selector, properties)

    def lint(self) -> list[Lint]:
        """Return the mistakes found in this expression, from left to right."""
        return lint(self._compiled.selector, self.dialect)


# ---- tags

ALL_TAGS: Final = "*"


@dataclass(frozen=True, slots=True)
class TagFilter:
    """A subscription expression: tags separated by ``||``; ``*``, empty or None selects all messages.

    Blanks around a tag have no meaning. As in the broker, only a bare ``*`` selects everything: ``" * "`` selects the
    tag ``*``, and ``||`` with blanks selects no tag at all. Immutable and thread-safe.

    Raises:
        FilterSyntaxError: The expression is a lone ``||``.
    """

    expression: str
    """The expression as given, ``*`` for an empty one."""
    tags: frozenset[str] = field(init=False)
    """The selected tags; empty if all messages are."""
    codes: frozenset[int] = field(init=False)
    """The codes of the tags, as signed 32-bit numbers."""

    def __init__(self, expression: str | None = ALL_TAGS) -> None:
        expression = expression or ALL_TAGS
        parts = [] if expression == ALL_TAGS else expression.split("||")
        if parts and not any(parts):
            raise FilterSyntaxError(expression, 0, "expected tags between the ||")
        tags = frozenset(tag for part in parts if (tag := part.strip(TRIMMED)))
        object.__setattr__(self, "expression", expression)
        object.__setattr__(self, "tags", tags)
        object.__setattr__(self, "codes", frozenset(map(string_hash, tags)))

    @property
    def takes_all(self) -> bool:
        """Return whether the filter selects every message, with a tag or without."""
        return self.expression == ALL_TAGS

    def matches_code(self, code: int | None) -> bool:
        """Check an entry's tags code (None: unknown) as the broker does; false means certainly not selected."""
        if code is None or self.takes_all:
            return True
        return ((code & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000 in self.codes

    def matches(self, tags: str | None) -> bool:
        """Check a message's tags exactly, as consumers do; a message without tags passes only if no tag is listed."""
        return not self.tags or tags in self.tags


# ---- predicates

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
