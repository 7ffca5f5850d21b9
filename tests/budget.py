"""How many cases a test tries: all in a whole check, a sixth of the drawn ones in CI's, a part in the quick check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Test = TypeVar("Test", bound=Callable[..., object])

PART = 11
"""The quick check tries one case in this many: a prime, so that it meets each value of a test's parameters."""
QUICK_DRAWN_PART = 8
"""The quick check tries one drawn case in this many."""
DRAWN_PART = 6
"""The whole check in CI tries one drawn case in this many, because CI draws the same ones in each run."""


@dataclass(frozen=True)
class Run:
    """The kind of this test run."""

    quick: bool
    """Whether slow tests are left out."""
    in_ci: bool = False
    """Whether drawn cases are the same in each run."""

    @property
    def drawn_part(self) -> int:
        """One drawn case in this many is tried."""
        return QUICK_DRAWN_PART if self.quick else DRAWN_PART if self.in_ci else 1


run = Run(quick=False)
"""Set by `tests.conftest` before test modules are imported."""


def examples(wanted: int) -> int:
    """Return the number of drawn cases or rounds: ``wanted``, or a fraction of it in the quick check and in CI."""
    return max(1, wanted // run.drawn_part)


def step() -> int:
    """Return the step between numbered cases when their total is not known in advance."""
    return PART if run.quick else 1


def many(test: Test) -> Test:
    """Say that a test has many cases, of which the quick check runs one in `PART`."""
    test.has_many_cases = True  # type: ignore[attr-defined]
    return test


def some(cases: Sequence[T]) -> Sequence[T]:
    """Return the cases to try: all of them, or in the quick check a spread that includes the first and the last."""
    if not run.quick or len(cases) <= PART:
        return cases
    return [*cases[:-1:PART], cases[-1]]
