"""Answers of the commands ``filter`` and ``bloom``, row by row, from plain values to plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from librmq.errors import ConfigError, FilterError, FilterEvaluationError, FilterSyntaxError
from librmq.filter.explain import explain, lint
from librmq.filter.filters import compiled
from librmq.filter.parser import Dialect, parse, refuse_rest
from librmq.filter.registrations import BloomFilter


def answer_case(row: object, dialect: Dialect = "4.9", *, strict: bool = False) -> dict[str, Any]:
    """Return a case ``{expr, props}`` with its ``result`` and ``match``.

    The result is true, false, null for UNKNOWN, or the name of an error. With ``strict``, an expression with text after
    it does not compile.

    Raises:
        FilterError: The row is no case.
    """
    expression, properties = read_case(row)
    assert isinstance(row, dict)
    answer: dict[str, Any] = {name: row[name] for name in ("expr", "props") if name in row}
    try:
        sql = compiled(expression, dialect)
        if strict:
            refuse_rest(sql.selector)
    except FilterSyntaxError:
        return answer | {"result": "PARSE_ERROR", "match": None}
    try:
        result: bool | str | None = sql.evaluate(properties)
    except FilterEvaluationError as error:
        result = f"EVAL_ERROR:{error.java_name}"
    return answer | {"result": result, "match": result is True}


def read_case(row: object) -> tuple[str, dict[str, str] | None]:
    """Return the expression and the properties of a case ``{expr, props}``.

    Raises:
        FilterError: The row is no case.
    """
    if not isinstance(row, dict) or not isinstance(row.get("expr"), str):
        raise FilterError("expected an object with a text expr")
    properties = row.get("props")
    if properties is None:
        return row["expr"], None
    if not isinstance(properties, dict) or not all(v is None or isinstance(v, str) for v in properties.values()):
        raise FilterError("props: expected an object of strings, or null")
    return row["expr"], {name: value for name, value in properties.items() if value is not None}


def answer_bloom(row: object) -> dict[str, Any]:
    """Return ``{k, m, positions: [{str, bits}]}`` for ``{f, n, strings}``.

    Raises:
        ConfigError: The row is no such case.
    """
    if not isinstance(row, dict):
        raise ConfigError("expected an object with f, n and strings")
    f, n = row.get("f"), row.get("n")
    if isinstance(f, bool) or not isinstance(f, int | float) or type(n) is not int:
        raise ConfigError("f: expected a number of percent; n: expected an integer")
    bloom = BloomFilter(f, n)
    answer: dict[str, Any] = {"k": bloom.hash_count, "m": bloom.bit_count}
    if "strings" in row:
        strings = row["strings"]
        if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
            raise ConfigError("strings: expected a list of strings")
        answer["positions"] = [{"str": text, "bits": list(bloom.positions(text))} for text in strings]
    return answer


def explain_text(expr: str, props: Mapping[str, str] | None, dialect: Dialect = "4.9", *, strict: bool = False) -> str:
    """Explain whether ``expr`` matches a message with ``props``, and list likely mistakes in it.

    Raises:
        FilterSyntaxError: The expression does not compile.
    """
    selector = parse(expr, dialect)
    if strict:
        refuse_rest(selector)
    parts = [str(explain(selector, props))]
    findings = lint(selector, dialect)
    if findings:
        parts.append("\n".join(("worth knowing:", *(f"  {finding}" for finding in findings))))
    return "\n\n".join(parts)
