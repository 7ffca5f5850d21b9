"""How many cases a test tries: all of them in the whole check, an evenly spread part in the quick check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

PART = 8
"""The quick check tries one case in this many."""


@dataclass(frozen=True)
class Run:
    """The kind of this test run."""

    quick: bool
    """Whether slow tests are left out."""


run = Run(quick=False)
"""Set by `tests.conftest` before test modules are imported."""


def examples(wanted: int) -> int:
    """Return the number of cases or rounds: ``wanted``, or a fraction of it in the quick check."""
    return max(1, wanted // PART) if run.quick else wanted


def step() -> int:
    """Return the step between numbered cases when their total is not known in advance."""
    return PART if run.quick else 1


def some(cases: Sequence[T]) -> Sequence[T]:
    """Return the cases to try: all of them, or in the quick check a spread that includes the first and the last."""
    if not run.quick or len(cases) <= PART:
        return cases
    return [*cases[:-1:PART], cases[-1]]
