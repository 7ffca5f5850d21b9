"""``filter`` and ``bloom``: expressions and bit positions, without a store."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from librmq.cli import filter_cases
from librmq.cli.input import read_rows, standard_input
from librmq.cli.output import Output
from librmq.errors import ConfigError, FilterError, InputError
from librmq.message.printable import printable

Row = dict[str, Any]
T = TypeVar("T")


def filter_(arguments: argparse.Namespace, output: Output) -> int:
    """Evaluate or explain the cases on standard input, or explain the expression in the arguments."""
    dialect, strict = arguments.dialect, arguments.strict
    if isinstance(arguments.explain, str):
        _write(filter_cases.explain_text(arguments.explain, _properties(arguments.properties), dialect, strict=strict))
        return 0
    if arguments.properties:
        raise InputError("properties as arguments need --explain EXPR; without it they belong to the cases")
    if not arguments.explain:
        return _answer_rows(lambda case: filter_cases.answer_case(case, dialect, strict=strict), output.row, output)

    def explain(case: Row) -> str:
        expression, properties = filter_cases.read_case(case)
        return filter_cases.explain_text(expression, properties, dialect, strict=strict) + "\n"

    return _answer_rows(explain, _write, output)


def _properties(words: Sequence[str]) -> dict[str, str]:
    """Return properties written as ``name=text``."""
    properties = {}
    for word in words:
        name, equals_sign, text = word.partition("=")
        if not name or not equals_sign:
            raise InputError(f"not a property: {word!r}; expected name=text")
        properties[name] = text
    return properties


def _write(text: str) -> None:
    sys.stdout.write("".join(f"{printable(line)}\n" for line in text.split("\n")))


def bloom(arguments: argparse.Namespace, output: Output) -> int:
    """Print the bit positions of strings for each filter on standard input."""
    return _answer_rows(filter_cases.answer_bloom, output.row, output)


def _answer_rows(answer: Callable[[Row], T], write: Callable[[T], None], output: Output) -> int:
    for number, case in read_rows(standard_input()):
        try:
            result = answer(case)
        except (FilterError, ConfigError) as error:
            raise InputError(f"line {number}: {error}") from None
        write(result)
        output.flush()
    return 0
