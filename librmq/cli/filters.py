"""``filter`` and ``bloom``: expressions and bit positions, without a store."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from librmq.cli.input import read_rows, standard_input
from librmq.cli.output import Output, printable
from librmq.errors import ConfigError, FilterError, InputError
from librmq.filter import commands

__all__ = ["bloom", "filter_"]

Row = dict[str, Any]
T = TypeVar("T")


def filter_(arguments: argparse.Namespace, output: Output) -> int:
    """Evaluate the expression of each case on standard input, or explain what it comes to."""
    if not arguments.explain:
        return _answer(lambda case: commands.answer_case(case, arguments.dialect), output.row, output)

    def explain(case: Row) -> str:
        commands.answer_case(case, arguments.dialect)  # refuses what is no case
        return commands.explain_text(case["expr"], case.get("props"), arguments.dialect)

    def write(text: str) -> None:
        sys.stdout.write("".join(f"{printable(line)}\n" for line in [*text.split("\n"), ""]))

    return _answer(explain, write, output)


def bloom(arguments: argparse.Namespace, output: Output) -> int:
    """Print the bit positions of strings for each filter on standard input."""
    return _answer(commands.answer_bloom, output.row, output)


def _answer(answer: Callable[[Row], T], write: Callable[[T], None], output: Output) -> int:
    for number, case in read_rows(standard_input()):
        try:
            found = answer(case)
        except (FilterError, ConfigError) as error:
            raise InputError(f"line {number}: {error}") from None
        write(found)
        output.flush()
    return 0
