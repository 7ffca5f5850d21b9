"""``filter --explain``: why a filter takes a message, or does not."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Mapping

from librmq.cli._output import Output
from librmq.cli._rows import read_rows, standard_input
from librmq.errors import FilterError, InputError
from librmq.filter import FilterWarning, SqlFilter
from librmq.formatting import printable


def filter_(arguments: argparse.Namespace, output: Output) -> int:
    """Explain the expression in the arguments, or each case on standard input."""
    if isinstance(arguments.explain, str):
        _write(_explained(arguments, arguments.explain, dict(arguments.properties)))
        return 0
    if arguments.properties:
        raise InputError("properties as arguments need --explain EXPR; without it they belong to the cases")
    for number, case in read_rows(standard_input()):
        try:
            expression, properties = read_case(case)
            text = _explained(arguments, expression, properties)
        except FilterError as error:
            raise InputError(f"line {number}: {error}") from None
        _write(f"{text}\n")
        output.flush()
    return 0


def _explained(arguments: argparse.Namespace, expression: str, properties: Mapping[str, str] | None) -> str:
    """Return whether an expression matches a message with these properties, and likely mistakes in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FilterWarning)  # `lint` says so
        selector = SqlFilter(expression, dialect=arguments.dialect, strict=arguments.strict)
    parts = [str(selector.explain(properties))]
    if findings := selector.lint():
        parts.append("\n".join(("worth knowing:", *(f"  {finding}" for finding in findings))))
    return "\n\n".join(parts)


def _write(text: str) -> None:
    sys.stdout.write("".join(f"{printable(line)}\n" for line in text.split("\n")))


def read_case(row: object) -> tuple[str, dict[str, str] | None]:
    """Return the expression and the properties of a case ``{expr, props}``."""
    if not isinstance(row, dict) or not isinstance(row.get("expr"), str):
        raise FilterError("expected an object with a text expr")
    properties = row.get("props")
    if properties is None:
        return row["expr"], None
    if not isinstance(properties, dict) or not all(v is None or isinstance(v, str) for v in properties.values()):
        raise FilterError("props: expected an object of strings, or null")
    return row["expr"], {name: value for name, value in properties.items() if value is not None}
