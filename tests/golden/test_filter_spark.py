"""Every recorded filter case as a Spark column, in a few jobs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from librmq.filter.filters import compiled
from tests.golden.test_filter import DIALECTS, compiling
from tests.reference import Row

pytestmark = pytest.mark.spark

EXPRESSIONS_A_JOB = 60


def test_spark_answers_every_case_itself(figure: Callable[[str], None]) -> None:
    pytest.importorskip("pyspark")
    from pyspark.sql import functions as F  # noqa: N812

    from librmq.filter.spark_backend import to_column
    from tests.spark_session import assert_native, shared_session

    rows: list[tuple[Row, str]] = [(row, dialect) for file, dialect in DIALECTS for row, _ in compiling(file, dialect)]
    schema = "number int, props map<string,string>"
    frame = shared_session().createDataFrame([(n, row["props"]) for n, (row, _) in enumerate(rows)], schema).cache()
    of_expression: dict[tuple[str, str], list[int]] = {}
    for number, (row, dialect) in enumerate(rows):
        of_expression.setdefault((row["expr"], dialect), []).append(number)
    expressions = list(of_expression)
    answered = 0
    for begin in range(0, len(expressions), EXPRESSIONS_A_JOB):
        part = expressions[begin : begin + EXPRESSIONS_A_JOB]
        columns = [
            to_column(compiled(text, dialect).question, F.col("props")).alias(f"c{i}")  # type: ignore[arg-type]
            for i, (text, dialect) in enumerate(part)
        ]
        wanted = [number for key in part for number in of_expression[key]]
        answers = frame.where(F.col("number").isin(wanted)).select("number", *columns)
        assert_native(answers)
        found = {row[0]: row for row in answers.collect()}
        for i, key in enumerate(part):
            for number in of_expression[key]:
                assert found[number][1 + i] is rows[number][0]["match"], rows[number]
                answered += 1
    figure(f"filter, Spark: {answered} of {len(rows)} compiling cases answered by native expressions")
    assert answered == len(rows)
    frame.unpersist()
