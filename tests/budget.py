"""How much a test tries: all of it in the whole check, a part that is spread over all of it in the quick one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

PART = 8
"""The quick check tries one of this many cases."""


@dataclass(frozen=True)
class Run:
    """What kind of run this is."""

    quick: bool
    """It leaves out slow tests."""


run = Run(quick=False)
"""Set by `tests.conftest` before test modules are imported."""


def examples(wanted: int) -> int:
    """Return the number of cases or rounds: ``wanted``, or a part of it in the quick check."""
    return max(1, wanted // PART) if run.quick else wanted


def step() -> int:
    """Return the step from one numbered case to the next, if their number is unknown."""
    return PART if run.quick else 1


def some(cases: Sequence[T]) -> Sequence[T]:
    """The cases to go through: all, or in the quick check a part spread from the first to the last."""
    if not run.quick or len(cases) <= PART:
        return cases
    return [*cases[:-1:PART], cases[-1]]
