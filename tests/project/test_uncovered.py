"""The list of lines that no test reached."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from tests.reference import CHECKOUT


@pytest.fixture
def uncovered(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    return importlib.import_module("uncovered")


def test_lines_are_joined_to_ranges(uncovered: ModuleType) -> None:
    assert uncovered.ranges([3, 4, 5, 9, 11, 12]) == "3-5, 9, 11-12"
    assert uncovered.ranges([]) == ""


def test_the_least_covered_module_comes_first(uncovered: ModuleType) -> None:
    modules = [
        uncovered.Module("whole.py", 10, ()),
        uncovered.Module("half.py", 4, (2, 3)),
        uncovered.Module("most.py", 10, (7,)),
        uncovered.Module("empty.py", 0, ()),
    ]
    assert list(uncovered.listing(modules)) == [" 50.0 %  half.py: 2-3", " 90.0 %  most.py: 7"]


def test_a_long_line_is_cut_between_lines(uncovered: ModuleType) -> None:
    assert uncovered.shortened("a.py: 1-2, 30-44, 58", 16) == "a.py: 1-2, …"
    assert uncovered.shortened("a.py: 1-2") == "a.py: 1-2"
