"""Run the fuzzer on filter expressions for as long as the time of slow tests allows."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest

from tests.conftest import SlowBudget
from tests.fuzz.filter_parser import check, mutants

ROUND = 100


@pytest.mark.slow
def test_no_text_does_harm(slow_budget: SlowBudget) -> None:
    compiled = 0
    for number in slow_budget.rounds(5_000, f"rounds of {ROUND} texts", at_least=3):
        compiled += sum(check(text, dialect) for text, dialect in islice(mutants(Random(number)), ROUND))
    assert compiled > ROUND // 10


def test_a_few_texts() -> None:
    results = [check(text, dialect) for text, dialect in islice(mutants(Random(-1)), 2 * ROUND)]
    assert True in results
    assert False in results
