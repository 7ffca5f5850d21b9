"""Each guarantee in the docs names a test that exists."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.reference import CHECKOUT

DOCUMENT = CHECKOUT / "docs" / "guarantees.md"
NAMED = re.findall(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\)", DOCUMENT.read_text("utf-8"))


def rows() -> list[list[str]]:
    """Return the rows of all tables as lists of cells, without the title rows."""
    lines = [line for line in DOCUMENT.read_text("utf-8").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [
        row for number, row in enumerate(cells) if "---" not in row[0] and "---" not in [*cells, [""]][number + 1][0]
    ]


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((CHECKOUT / file).read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("test", "file"), NAMED, ids=[test for test, _ in NAMED])
def test_the_test_exists(test: str, file: str) -> None:
    assert test in functions(file)


def test_every_row_names_a_test() -> None:
    assert len(rows()) > 15
    for row in rows():
        assert re.search(r"\[`test_\w+`\]", row[-1]), row[0]


def test_every_name_of_a_test_is_a_link() -> None:
    assert len(re.findall(r"test_\w+`", DOCUMENT.read_text("utf-8"))) == len(NAMED)
