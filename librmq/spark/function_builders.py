"""Functions of SQL text that become native columns while Spark analyses a query, on the driver.

Spark passes values to a Python function, in tasks. It passes expressions to the builder of a function: so a builder can
check a literal text, and return the column that the same function returns in Python. Spark calls the builder through
py4j, as it calls ``foreachBatch``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession


def register_builder(spark: SparkSession, name: str, function: Any, build: Callable[[Column, str], Column]) -> None:
    """Let ``build`` make the calls of a registered function of a column and a text whose text is a literal.

    Other calls run ``function``. So do all calls in a session that has no builders: one of Spark Connect, or of a Spark
    with other internals.
    """
    session = getattr(spark, "_jsparkSession", None)
    if session is None:
        return
    from py4j.protocol import Py4JError
    from pyspark import java_gateway

    jvm: Any = spark.sparkContext._jvm
    builder = _Builder(session, jvm.org.apache.spark.sql.classic.ExpressionUtils, name, function, build)
    try:
        builder.check()
        registry = session.sessionState().functionRegistry()
    except (Py4JError, TypeError):  # py4j takes an unknown class for a package, which can't be called
        return
    start_callbacks: Callable[[Any], None] = java_gateway.ensure_callback_server_started
    start_callbacks(spark.sparkContext._gateway)
    registry.createOrReplaceTempFunction(name, builder, "python_udf")


class _Builder:
    """What Spark's registry of functions calls with the arguments of a call in SQL text."""

    class Java:
        """The interface for py4j."""

        implements = ("scala.Function1",)

    def __init__(
        self, session: Any, expressions: Any, name: str, function: Any, build: Callable[[Column, str], Column]
    ) -> None:
        self._session = session
        self._expressions = expressions
        self._name = name
        self._function = function
        self._build = build

    def check(self) -> None:
        """Raise an error of py4j or `TypeError` if this Spark lacks what `apply` calls."""
        from pyspark.sql import functions as F  # noqa: N812 - the usual name

        self._column(self._session.expression(F.lit(True)._jc))

    def apply(self, arguments: Any) -> Any:
        """Return the expression of a call."""
        operands = [arguments.apply(number) for number in range(arguments.length())]
        if len(operands) == 2 and (text := _literal_text(operands[1])) is not None:
            column = self._build(self._column(operands[0]), text).alias(f"{self._name}({operands[0].sql()}, {text})")
            return self._session.expression(column._jc)
        return self._function._judf.builder(arguments)

    def _column(self, expression: Any) -> Column:
        from pyspark.sql.classic.column import Column as ClassicColumn

        return ClassicColumn(self._expressions.column(expression))


def _literal_text(expression: Any) -> str | None:
    if expression.getClass().getSimpleName() != "Literal" or expression.dataType().typeName() != "string":
        return None
    value = expression.value()
    return None if value is None else str(value.toString())
